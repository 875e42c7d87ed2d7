"""DeepSeek-V3's prediction layers in Hugging Face's files, against transformers' modules for them."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.modeling_layers import MtpModel

from fmegatron import tree
from fmegatron.accumulate import accumulate
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.models import Decoder, DecoderConfig, hf, load_hf, save_hf
from fmegatron.random import key
from fmegatron.spec import init
from tests import families
from tests.families import DOUBLE, SINGLE, Case, rope
from tests.test_deepseek import EXPERTS, SIZES, in_fp8

NAME, DEPTHS, LAYERS, WEIGHT = "deepseek-v3-modules", 2, 2, 0.3
FIELDS = {**SIZES, **EXPERTS, **rope("default"), "num_nextn_predict_layers": DEPTHS, "n_group": 2, "topk_group": 1}


@pytest.fixture(autouse=True, scope="module")
def case():
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.CASES, NAME, Case("deepseek_v3", FIELDS))
        yield


def in_files(modules: dict[str, torch.Tensor], main: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of transformers' modules by the names that published files have: experts apart, embedding and head once more."""
    found = {}
    for name, x in modules.items():
        _, index, rest = name.split(".", 2)
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        layer = f"model.layers.{LAYERS + int(index)}"
        if "mlp.experts.gate_up_proj" in rest:
            for n, w in enumerate(x):
                for part, half in zip(("gate", "up"), w.chunk(2), strict=True):
                    found[f"{layer}.mlp.experts.{n}.{part}_proj.weight"] = half.clone()
        elif "mlp.experts.down_proj" in rest:
            found |= {f"{layer}.mlp.experts.{n}.down_proj.weight": w.clone() for n, w in enumerate(x)}
        else:
            found[f"{layer}.{rest}"] = x.clone()
        found[f"{layer}.embed_tokens.weight"] = main["model.embed_tokens.weight"].clone()
        found[f"{layer}.shared_head.head.weight"] = main["lm_head.weight"].clone()
    return found


def write(folder, tensors):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = {**hf.read_config(families.folder_of(NAME)), "num_nextn_predict_layers": DEPTHS}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def own_tensors(modules: MtpModel, what=lambda p: p.detach()) -> dict[str, torch.Tensor]:
    """Those of the modules alone; a bias of the choice, which is no parameter, too."""
    names = {n: what(p) for n, p in modules.named_parameters() if n.startswith("layers.")}
    return names | {n: b for n, b in modules.named_buffers() if n.endswith("e_score_correction_bias")}


@pytest.fixture(scope="module")
def made(case, tmp_path_factory):
    """(a folder with the layers and the modules, transformers' model and modules in float64)."""
    main = families.folder_of(NAME)
    with families.wide("deepseek_v3", DOUBLE):
        theirs = families.reference(NAME, DOUBLE)
        modules = MtpModel(theirs, DEPTHS).to(DOUBLE)
        g = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, p in modules.named_parameters():
                if name.startswith("layers."):
                    p.copy_((1.0 if p.ndim == 1 else 0.0) + 0.3 * torch.randn(p.shape, generator=g, dtype=SINGLE))
    main_tensors = families.tensors_in(main)
    more = in_files({n: p.to(SINGLE) for n, p in own_tensors(modules).items()}, main_tensors)
    folder = write(tmp_path_factory.mktemp("modules"), main_tensors | more)
    return folder, theirs, modules


def test_losses_and_gradients_equal_transformers(made, tmp_path):
    """Of the loss of training, with two modules, one behind the other."""
    folder, theirs, modules = made
    batch = families.batch_of(FIELDS["vocab_size"])
    tokens, labels, mask = batch["tokens"], batch["labels"], batch["mask"]
    with families.wide("deepseek_v3", DOUBLE):
        states = theirs.model(tokens).last_hidden_state
        total, want = 0.0, []
        for depth in range(DEPTHS + 1):
            left = tokens.shape[1] - depth
            if depth:  # transformers' modules, of the tokens that have one so much further
                states = modules.forward_layer(
                    depth - 1, states[:, :left], torch.arange(left)[None], None, input_ids=tokens[:, depth:]
                )
            each = torch.nn.functional.cross_entropy(
                theirs.lm_head(states).flatten(0, 1), labels[:, depth:].flatten(), reduction="none", ignore_index=-100
            )
            counts = (mask[:, depth:] & (labels[:, depth:] != -100)).flatten()
            want.append((each * counts).sum() / counts.sum())
            total = total + want[-1] * (WEIGHT / DEPTHS if depth else 1.0)
        total.backward()
    model, params = load_hf(folder, dtype=DOUBLE, mtp_weight=WEIGHT)
    assert model.config.mtp == DEPTHS and set(params["mtp"]) == {LAYERS, LAYERS + 1}
    f = accumulate(model.loss, 1, weights=model.weights)
    (value, metrics), grads = f(params, batch, Ctx(sh=families.sharding(DOUBLE)))
    got = [metrics["terms"][n] for n in ("lm", "mtp_loss.1", "mtp_loss.2")]
    for a, b in zip([value, *got], [total, *want], strict=True):
        assert float(a) == pytest.approx(float(b.detach()), rel=1e-11)

    # the gradients as files, which are read as the parameters are
    with families.wide("deepseek_v3", DOUBLE):
        wanted = own_tensors(modules, lambda p: p.grad)
        with torch.no_grad():
            for p in theirs.parameters():
                p.copy_(p.grad)
        theirs.save_pretrained(tmp_path / "main")
    main = families.tensors_in(tmp_path / "main")
    wanted = {n: torch.zeros_like(x) if "correction" in n else x for n, x in wanted.items()}
    main = {n: torch.zeros_like(x) if "correction" in n else x for n, x in main.items()}
    _, expected = load_hf(write(tmp_path / "both", main | in_files(wanted, main)), dtype=DOUBLE)
    for path, g in tree.named(grads).items():
        x = tree.named(expected)[path]
        assert float((g - x).norm()) <= 1e-10 * float(x.norm()), path
        assert "expert_bias" in path or float(x.norm()) > 1e-8, path


def test_files_go_back_and_forth_bitwise(made, tmp_path):
    """With the copies of embedding and head, as published; and transformers loads the model in them."""
    folder, _, _ = made
    model, params = load_hf(folder)
    save_hf(tmp_path / "out", model, params)
    assert families._difference(families.tensors_in(folder), families.tensors_in(tmp_path / "out")) == 0
    assert hf.read_config(tmp_path / "out")["num_nextn_predict_layers"] == DEPTHS
    again, loaded = load_hf(tmp_path / "out", fused_gate_up=True)
    assert again.config.mtp == DEPTHS and "shared_gate_up" in loaded["mtp"][LAYERS]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=SINGLE, experts_implementation="eager"
    )
    tokens = families.batch_of(FIELDS["vocab_size"])["tokens"]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model.logits(params, tokens), rtol=1e-4, atol=1e-4)


def test_block_scaled_fp8_is_read(made, tmp_path):
    folder, _, _ = made
    """… with copies of embedding and head, which are never in fp8."""
    scaled, plain = in_fp8(folder, tmp_path)
    want = tree.named(load_hf(plain)[1])
    for path, x in tree.named(load_hf(scaled)[1]).items():
        assert torch.equal(x, want[path]), path
    assert f"model.layers.{LAYERS}.eh_proj.weight_scale_inv" in families.tensors_in(scaled)


def test_as_many_modules_as_asked_for(made, tmp_path):
    """Fewer are the first ones; those that files lack are drawn; without a word as many as the files have."""
    folder, _, _ = made
    model, params = load_hf(folder)
    for number in (0, 1, 3):
        other, found = load_hf(folder, mtp=number)
        assert other.config.mtp == number
        both = tree.named(found).keys() & tree.named(params).keys()
        assert len(both) == min(len(tree.named(found)), len(tree.named(params)))
        assert all(torch.equal(tree.named(found)[n], tree.named(params)[n]) for n in both)
    assert float(found["mtp"][LAYERS + 2]["join"].std()) == pytest.approx(model.config.init_std, rel=0.2)
    assert (found["mtp"][LAYERS + 2]["norm"] == 1).all()
    # transformers writes the number of modules, but not the modules
    assert hf.read_config(families.folder_of(NAME))["num_nextn_predict_layers"] == DEPTHS
    assert load_hf(families.folder_of(NAME))[0].config.mtp == 0
    # a family whose files have no place for them
    llama = Decoder(DecoderConfig(vocab=12, embed=8, layers=1, heads=2, mlp=8, mtp=1))
    save_hf(tmp_path / "llama", llama, init(llama.spec(), key(0)))
    assert load_hf(tmp_path / "llama")[0].config == dataclasses.replace(llama.config, mtp=0)


def test_damaged_modules_are_refused(made, tmp_path):
    folder, _, _ = made
    tensors = families.tensors_in(folder)
    copy = f"model.layers.{LAYERS}.shared_head.head.weight"
    write(tmp_path / "copy", {**tensors, copy: tensors[copy] + 1})
    with pytest.raises(UserError, match=f"{copy} is not lm_head.weight, which prediction modules share"):
        load_hf(tmp_path / "copy")
    assert load_hf(tmp_path / "copy", mtp=0)[0].config.mtp == 0
    missing = f"model.layers.{LAYERS}.hnorm.weight"
    write(tmp_path / "missing", {n: x for n, x in tensors.items() if n != missing})
    with pytest.raises(UserError, match=f"1 missing: {missing}"):
        load_hf(tmp_path / "missing")
