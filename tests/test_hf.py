"""Hugging Face folders, against transformers itself."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fmegatron import tree
from fmegatron.data.tokenizer import save_tokenizer, train_bpe
from fmegatron.errors import UserError
from fmegatron.mesh import make_mesh
from fmegatron.models import Decoder, DecoderConfig, hf, load_hf, safetensors_files, save_hf
from fmegatron.models.fused import FUSED
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import init, params_of

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
}


def theirs(
    folder: Any, family: str = "llama", *, shard: str = "5GB", dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """A random model of transformers, saved: odd sizes, 3 kv heads, a head size that is not embed / heads."""
    fields = dict(
        vocab_size=101,
        hidden_size=24,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
    )
    if family == "phi3":
        fields |= dict(pad_token_id=0, eos_token_id=1, original_max_position_embeddings=64)
    config, model = CLASSES[family]
    return saved(model(config(**{**fields, **changes})), folder, shard, dtype)


def small_gpt2(folder: Any, **changes: Any) -> Any:
    fields = dict(vocab_size=101, n_embd=24, n_layer=2, n_head=3, n_positions=32, n_inner=36)
    return saved(transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**fields, **changes})), folder)


def saved(model: Any, folder: Any, shard: str = "5GB", dtype: torch.dtype = torch.float32) -> Any:
    """The model with parameters of which none is trivially right (norms of ones would hide a swap), saved."""
    model = model.to(dtype).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def tensors(folder: Any) -> dict[str, torch.Tensor]:
    return {n: x for f in sorted(folder.glob("*.safetensors")) for n, x in load_file(f).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


TOKENS = torch.randint(0, 101, (2, 9), generator=torch.Generator().manual_seed(1))
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def logits_of(folder: Any, dtype: torch.dtype) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["5GB", "6KB"])
def test_theirs_to_ours_and_back_is_bitwise(tmp_path, tied, shard):
    theirs(tmp_path / "a", tie_word_embeddings=tied, shard=shard)
    assert (tmp_path / "a" / "model.safetensors").exists() == (shard == "5GB")
    model, params = load_hf(tmp_path / "a")
    assert ("head" in params) == (not tied) and model.config.tied == tied
    save_hf(tmp_path / "b", model, params, max_shard_bytes=5e9 if shard == "5GB" else 6000)
    assert same(tensors(tmp_path / "a"), tensors(tmp_path / "b"))
    assert torch.equal(logits_of(tmp_path / "a", torch.float32), logits_of(tmp_path / "b", torch.float32))


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"rope_parameters": LLAMA3}])
def test_ours_has_the_logits_of_transformers(tmp_path, changes):
    theirs(tmp_path, dtype=torch.float64, **changes)
    model, params = load_hf(tmp_path, dtype="float64", sh=None)
    ours = model.logits(params, TOKENS, ctx_of(torch.float64)).detach()
    expected = logits_of(tmp_path, torch.float64)
    assert (ours - expected).abs().max() < 1e-6  # transformers makes its rotary table in float32


def ctx_of(dtype: torch.dtype) -> Any:
    from fmegatron.context import Ctx

    return Ctx(sh=Sharding(precision=Precision(params=dtype)))


def test_a_model_made_here_has_its_logits_in_transformers(tmp_path):
    config = DecoderConfig(vocab=101, embed=24, layers=2, heads=6, kv_heads=3, head=8, mlp=36, norm_eps=1e-6)
    model = Decoder(config)
    params = tree.tree_map(lambda t: t.double() * 5, init(model.spec(), key(0)))
    save_hf(tmp_path / "out", model, params)
    ours = model.logits(params, TOKENS, ctx_of(torch.float64)).detach()
    assert (ours - logits_of(tmp_path / "out", torch.float64)).abs().max() < 1e-6 * ours.abs().max()
    again, loaded = load_hf(tmp_path / "out", dtype=torch.float64)
    assert again.config == config
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(params), tree.leaves(loaded), strict=True))


def test_dtype_of_memory_and_of_the_file(tmp_path):
    theirs(tmp_path / "a", dtype=torch.bfloat16)
    model, params = load_hf(tmp_path / "a", sh=Sharding(precision=Precision(params=torch.bfloat16)))
    assert {t.dtype for t in tree.leaves(params)} == {torch.bfloat16}
    assert {t.dtype for t in tree.leaves(load_hf(tmp_path / "a")[1])} == {torch.float32}
    save_hf(tmp_path / "b", model, params, dtype="fp16")
    assert {t.dtype for t in tensors(tmp_path / "b").values()} == {torch.float16}
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "float16"
    save_hf(tmp_path / "c", model, params)
    assert same(tensors(tmp_path / "a"), tensors(tmp_path / "c"))


def test_fields_may_be_replaced(tmp_path):
    theirs(tmp_path)
    model, _ = load_hf(tmp_path, dropout=0.25, compile=False)
    assert model.config.dropout == 0.25
    with pytest.raises(UserError, match="load_hf: 'droput' is no field of llama: it has .*dropout"):
        load_hf(tmp_path, droput=0.25)


class Counting:
    """safe_open that counts the bytes of the slices taken and refuses whole tensors."""

    read = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.inner = safe_open(*args, **kwargs)

    def __enter__(self) -> Counting:
        self.inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)

    def keys(self) -> Any:
        return self.inner.keys()

    def get_slice(self, name: str) -> Any:
        inner = self.inner.get_slice(name)

        class Slice:
            get_shape, get_dtype = inner.get_shape, inner.get_dtype

            def __getitem__(self, index: Any) -> torch.Tensor:
                part = inner[index]
                Counting.read += part.nbytes
                return part

        return Slice()


LAYOUTS = [
    ("dp=2,tp=3", {"store": ("dp",)}),
    ("dp=4", {"store": ("dp",)}),
    ("tp=2", {}),  # 3 kv heads on 2 ranks: queries are cut by group
]


@pytest.mark.parametrize(
    ("family", "mesh", "rules", "leaves"),
    [
        *(("llama", *layout, {}) for layout in LAYOUTS),
        *(("phi3", *layout, {}) for layout in LAYOUTS),  # fused matrices, as in GPT-2
        *(("gpt2", *layout, {}) for layout in LAYOUTS[:2]),
        *(("llama", *layout, dict.fromkeys(FUSED, True)) for layout in LAYOUTS),
        ("phi3", *LAYOUTS[0], {"fused_qkv": True}),
        ("gpt2", *LAYOUTS[1], {"fused_qkv": True}),
    ],
)
def test_each_rank_reads_its_own_bytes_only(tmp_path, monkeypatch, family, mesh, rules, leaves):
    """Every rank of a layout in turn: it reads exactly the bytes of its shards, and they are the right ones."""
    if family == "gpt2":
        small_gpt2(tmp_path, vocab_size=102)
    else:
        theirs(tmp_path, family, vocab_size=102, shard="6KB")
    _, whole = load_hf(tmp_path, **leaves)
    monkeypatch.setattr(safetensors_files.safetensors, "safe_open", Counting)
    model = hf.model_of(tmp_path, **leaves)
    spec = params_of(model.spec())
    world = 1
    for part in mesh.split(","):
        world *= int(part.split("=")[1])
    with simulate(world):
        made = make_mesh(mesh, device="cpu", kv_heads=3)
        sh = Sharding(made, standard_rules(made, **rules))
        index = {path: [None if i is None else per_rank(i) for i in sh.stored_index(p)] for path, p in spec.items()}
        shape = {path: sh.stored_shape(p) for path, p in spec.items()}
    assert any(shape[path] != p.shape for path, p in spec.items())
    for rank in range(world):
        one = {p: tuple(None if i is None else i[rank % len(i)] for i in index[p]) for p in spec}
        monkeypatch.setattr(Sharding, "stored_index", lambda self, p, one=one: one[name_of(spec, p)])
        monkeypatch.setattr(Sharding, "stored_shape", lambda self, p: shape[name_of(spec, p)])
        Counting.read = 0
        _, params = load_hf(tmp_path, **leaves)
        loaded = tree.named(params)
        for path, x in tree.named(whole).items():
            for d, held in enumerate(one[path]):
                x = x if held is None else x.index_select(d, held)
            assert torch.equal(loaded[path], x), path
        assert Counting.read == sum(x.nbytes for x in loaded.values())


def name_of(spec: dict[str, Any], param: Any) -> str:
    """The name of a parameter; equal parameters (the norms of all layers) are laid out alike."""
    return next(name for name, p in spec.items() if p is param or p == param)


@pytest.fixture
def folder(tmp_path):
    theirs(tmp_path / "hf")
    return tmp_path / "hf"


def edit(folder: Any, change: Any) -> None:
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Any, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def rename(held: dict[str, torch.Tensor]) -> None:
    for name in [n for n in held if "layers.1." in n]:
        held["x." + name] = held.pop(name)
    held["model.norm.weight"] = torch.ones(21)


def test_tensors_that_do_not_fit_are_named_before_anything_is_made(folder, monkeypatch):
    edit(folder, rename)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: pytest.fail("allocated"))
    with pytest.raises(UserError) as caught:
        load_hf(folder)
    text = str(caught.value)
    assert "9 missing: model.layers.1." in text and "9 unknown: x.model.layers.1." in text
    assert text.count("… and 1 more") == 2
    assert "1 of another shape: model.norm.weight ([21] in the file, [24] by config.json)" in text


def test_what_is_no_parameter_is_ignored(tmp_path):
    theirs(tmp_path, tie_word_embeddings=True)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    edit(tmp_path, lambda held: held.update(extra, **{"lm_head.weight": held["model.embed_tokens.weight"].clone()}))
    load_hf(tmp_path)


def test_an_output_matrix_that_a_config_ties_must_equal_the_embedding(tmp_path):
    """transformers takes the one in the file, so that ignoring it would compute something else."""
    theirs(tmp_path, tie_word_embeddings=False)
    configure(tmp_path, tie_word_embeddings=True)
    with pytest.raises(UserError, match="ties the output matrix"):
        load_hf(tmp_path)
    load_hf(tmp_path, tied=False)


def test_partial_rotary_is_refused_where_transformers_has_it_not(tmp_path):
    theirs(tmp_path)
    configure(tmp_path, partial_rotary_factor=0.5)
    with pytest.raises(UserError, match="partial_rotary_factor=0.5 is not supported for llama"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: shutil.rmtree(f), "does not exist"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "config.json has no field 'vocab_size'"),
        (lambda f: configure(f, model_type="gpt9"), "model_type 'gpt9' is not supported: only llama"),
        (lambda f: configure(f, quantization_config={"bits": 4}), "quantized weights are not supported"),
        (lambda f: configure(f, attention_bias=True), "8 missing: model.layers.0.self_attn.k_proj.bias"),
        (lambda f: configure(f, hidden_act="relu"), "hidden_act='relu' is not supported for llama: only silu"),
        (lambda f: configure(f, pretraining_tp=2), "pretraining_tp=2 is not supported for llama: only 1 is"),
        (lambda f: configure(f, rope_scaling={"rope_type": "spiral"}), "rope type 'spiral' is not supported for llama"),
        (
            lambda f: configure(f, rope_scaling={"rope_type": "linear", "factor": 2.0, "twist": 3}),
            "'twist' is not known for llama's rope type 'linear'",
        ),
        (
            lambda f: configure(f, residual_multiplier=0.5),
            r"residual_multiplier=0.5 is not known for llama, .* ignore_fields=\('residual_multiplier',\)",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor"),
        (lambda f: os.rename(f / "model.safetensors", f / "pytorch_model.bin"), "pickled weights only"),
        (lambda f: os.truncate(f / "model.safetensors", 5000), "model.safetensors is damaged"),
        (
            lambda f: edit(f, lambda held: held.update({"model.norm.weight": torch.ones(24, dtype=torch.int8)})),
            r"1 of an unsupported dtype: model.norm.weight \(I8\)",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}'),
            "lacks 1 of the 1 files in model.safetensors.index.json: gone.safetensors",
        ),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "index.json is damaged"),
    ],
)
def test_folders_that_cannot_be_loaded(folder, damage, message):
    damage(folder)
    with pytest.raises(UserError, match=message):
        load_hf(folder)


def test_the_tokenizer_travels_and_gives_the_ids(tmp_path):
    tokenizer = train_bpe(["to be or not to be " * 9], vocab_size=264)
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    model = Decoder(DecoderConfig(vocab=tokenizer.vocab_size, embed=8, layers=1, heads=2, mlp=8))
    params = init(model.spec(), key(0))
    for name, source in {"a": tmp_path / "tokenizer", "b": tmp_path / "tokenizer" / "tokenizer.json"}.items():
        save_hf(tmp_path / name, model, params, tokenizer=source)
        loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert loaded.encode("not to be") == tokenizer.encode("not to be")
        config = transformers.AutoConfig.from_pretrained(tmp_path / name)
        generation = transformers.GenerationConfig.from_pretrained(tmp_path / name)
        assert config.eos_token_id == generation.eos_token_id == loaded.eos_token_id == tokenizer.eod
        assert config.bos_token_id is None
    small = Decoder(DecoderConfig(vocab=100, embed=8, layers=1, heads=2, mlp=8))
    with pytest.raises(UserError, match="has 26. tokens, the model a vocabulary of 100"):
        save_hf(tmp_path / "c", small, init(small.spec(), key(0)), tokenizer=tmp_path / "tokenizer")
    with pytest.raises(UserError, match="does not exist"):
        save_hf(tmp_path / "c", model, params, tokenizer=tmp_path / "absent")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "tokenizer"]


def test_ids_and_generation_settings_of_a_folder_are_kept(folder, tmp_path):
    configure(folder, bos_token_id=5, eos_token_id=[6, 7])
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": true}')
    save_hf(tmp_path / "out", *load_hf(folder), tokenizer=folder)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (5, [6, 7])
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.6


def test_a_folder_in_use_is_not_overwritten(folder, tmp_path):
    model, params = load_hf(folder)
    before = tensors(folder)
    for used in (folder, tmp_path):
        with pytest.raises(UserError, match="is not empty and no earlier export"):
            save_hf(used, model, params, dtype="bf16")
    assert same(tensors(folder), before)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        save_hf(tmp_path / "file", model, params)
    with pytest.raises(UserError, match="cannot write to"):
        save_hf(tmp_path / "file" / "below", model, params)


def test_an_earlier_export_is_replaced_and_other_files_stay(folder, tmp_path):
    model, params = load_hf(folder)
    out = tmp_path / "out"
    save_hf(out, model, params, max_shard_bytes=6000)
    save_hf(out, model, params, dtype="bf16")
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    (out / "README.md").write_text("mine")
    with pytest.raises(UserError, match="is not empty and no earlier export"):
        save_hf(out, model, params)
    save_hf(out, model, params, overwrite=True)
    assert same(tensors(out), tensors(folder)) and (out / "README.md").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_parameters_of_another_model_are_refused(folder, tmp_path):
    model, params = load_hf(folder)
    wrong = {**params, "norm": torch.ones(3), "new": torch.ones(1)}
    del wrong["embed"]
    with pytest.raises(
        UserError, match=r"1 missing: embed; 1 unknown: new; 1 of another shape: norm \(\[3\], not \[24\]"
    ):
        save_hf(tmp_path / "out", model, wrong)
    assert not (tmp_path / "out").exists()


def test_files_are_what_safetensors_writes(folder, tmp_path):
    """Our writer, which holds one tensor at a time, against the library's."""
    model, params = load_hf(folder)
    save_hf(tmp_path / "out", model, params, max_shard_bytes=6000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, framework="pt") as f:
            assert f.metadata()["format"] == "pt"
            assert {n for n, where in index["weight_map"].items() if where == file.name} == set(f.keys())
            held = sum(f.get_tensor(n).nbytes for n in f.keys())
            assert held <= 6000 or len(f.keys()) == 1
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tree.leaves(params))


def test_a_full_disk_leaves_nothing(folder, tmp_path, monkeypatch):
    model, params = load_hf(folder)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_files, "write_tensor", full)
    with pytest.raises(UserError, match="cannot write .*out: No space left on device"):
        save_hf(tmp_path / "out", model, params)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_field_may_be_ignored_by_name(folder):
    configure(folder, residual_multiplier=0.5)
    model, _ = load_hf(folder, ignore_fields=("residual_multiplier",))
    assert model.config.embed == 24


def test_gpt2_as_it_was_published(tmp_path):
    """The original files are of the bare model, without "transformer.", and hold the causal mask."""
    model = small_gpt2(tmp_path)
    _, whole = load_hf(tmp_path)

    def published(held: dict[str, torch.Tensor]) -> None:
        for name in list(held):
            held[name.removeprefix("transformer.")] = held.pop(name)
        held["h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
        held["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    edit(tmp_path, published)
    ours, params = load_hf(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(params), tree.leaves(whole), strict=True))
    with torch.no_grad():
        expected = model(TOKENS).logits
    assert (ours.logits(params, TOKENS) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("tied", [True, False])
def test_more_rows_of_the_vocabulary(tmp_path, tied):
    """Old rows stay; new ones are the mean of the old plus one percent of their spread, alike on every layout."""
    theirs(tmp_path, tie_word_embeddings=tied)
    _, before = load_hf(tmp_path)
    model, params = load_hf(tmp_path, vocab=2000)
    for name in ("embed",) if tied else ("embed", "head"):
        old, new = before[name].double(), params[name].double()
        assert new.shape == (2000, 24) and torch.equal(new[:101], old)
        z = (new[101:] - old.mean(0)) / (0.01 * old.std(0, correction=0))
        assert z.mean().abs() < 4 / z.numel() ** 0.5 and abs(z.std() - 1) < 4 / (2 * z.numel()) ** 0.5
    if not tied:
        assert not torch.equal(params["embed"][101:] - params["embed"][101], params["head"][101:] - params["head"][101])
    assert model.config.vocab == 2000 and not torch.equal(
        load_hf(tmp_path, vocab=2000, seed=1)[1]["embed"], params["embed"]
    )
    fewer, less = load_hf(tmp_path, vocab=60)
    assert torch.equal(less["embed"], before["embed"][:60])
    save_hf(tmp_path / "out", model, params)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == 2000


def test_new_rows_are_the_same_on_every_layout(tmp_path, monkeypatch):
    theirs(tmp_path)
    _, whole = load_hf(tmp_path, vocab=120)
    embed = hf.model_of(tmp_path, vocab=120).spec()["embed"]
    with simulate(6):
        made = make_mesh("dp=2,tp=3", device="cpu", kv_heads=3)
        sh = Sharding(made, standard_rules(made, store=("dp",)))
        index = [None if i is None else per_rank(i) for i in sh.stored_index(embed)]
    for rank in range(6):
        held = tuple(None if i is None else i[rank] for i in index)
        assert any(i is not None for i in held)
        for i in held:
            assert i is None or len(i) < 120
        monkeypatch.setattr(Sharding, "stored_index", lambda self, p, h=held: h if "vocab" in p.names else None)
        _, params = load_hf(tmp_path, vocab=120)
        for name in ("embed", "head"):
            want = whole[name]
            for d, i in enumerate(held):
                want = want if i is None else want.index_select(d, i)
            assert (params[name] - want).abs().max() < 1e-6, (name, rank)


def test_a_form_that_the_family_lacks_is_refused_before_anything_is_written(tmp_path):
    model = Decoder(DecoderConfig(vocab=60, embed=8, layers=1, heads=2, mlp=8, qk_norm="head"))
    with pytest.raises(UserError, match="qk_norm='head' cannot be written: a config.json of llama means None"):
        save_hf(tmp_path / "out", model, init(model.spec(), key(0)))
    assert not (tmp_path / "out").exists()
    other = Decoder(DecoderConfig(vocab=60, embed=8, layers=1, heads=2, mlp=8, family="mine"))
    with pytest.raises(UserError, match="Decoder of family 'mine' has no Hugging Face layout: only llama"):
        save_hf(tmp_path / "out", other, init(other.spec(), key(0)))
