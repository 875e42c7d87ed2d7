"""`fmegatron train --init-from`: Hugging Face models made by transformers, continued, resumed, exported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fmegatron import checkpoint, cli
from fmegatron.data import load_tokenizer, open_indexed, save_tokenizer, train_bpe
from fmegatron.errors import UserError
from tests.processes import processes
from tests.train_runs import WORDS, flags_of, go, losses, numbers, rows, write_corpus

torch.set_num_threads(1)
VOCAB, LONGEST = 300, 64
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
ROTARY: dict[str, Any] = {
    **COMMON,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "intermediate_size": 36,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": ROTARY,
    "qwen3": {**ROTARY, "tie_word_embeddings": True},
    "gemma2": {**ROTARY, "sliding_window": 5, "query_pre_attn_scalar": 7},
    "gpt2": {**COMMON, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": LONGEST, "initializer_range": 0.2},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """text.jsonl, a larger tokenizer, and a folder of each model, with its tokenizer and a chat template."""
    import transformers

    folder = tmp_path_factory.mktemp("init-from")
    write_corpus(folder / "text.jsonl")
    tokenizer = train_bpe([" ".join(WORDS)] * 9, vocab_size=290)
    save_tokenizer(train_bpe([" ".join(WORDS)] * 9, vocab_size=330), folder / "larger")
    for family, sizes in MODELS.items():
        torch.manual_seed(5)
        config = transformers.AutoConfig.for_model(family, **sizes)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
        save_tokenizer(tokenizer, folder / family)
        (folder / family / "chat_template.jinja").write_text("{{ messages }}")
        (folder / family / "vocab.json").write_text("{}")
    return folder


def arguments(files: Path, out: Path, family: str, *more: object, **settings: object) -> list[str]:
    given = ("--init-from", files / family, "--eval.batches", 99)
    return flags_of(files / "text.jsonl", out, *given, *more, **{"steps": 4, "optim_lr": 1e-3, **settings})


def on(world: int, given: list[str], stop: Any = None) -> Any:
    return go(given, stop) if world == 1 else processes(world).run(go, given, stop)[0]


def their_loss(folder: Path, out: Path) -> float:
    """The mean cross-entropy of transformers' model over the held-out tokens, in sequences of 16."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = np.array(open_indexed(out / "data/valid_text_document").tokens, dtype=np.int64)
    stream, total = torch.from_numpy(tokens), 0.0
    with torch.no_grad():
        for at in range(0, len(stream) - 1, 16):
            part = stream[at : at + 17]
            logits = theirs(part[None, :-1]).logits[0].double()
            total += float(torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum"))
    return total / (len(stream) - 1)


@pytest.mark.parametrize("family", MODELS)
def test_the_first_evaluation_is_the_loss_of_transformers(files, tmp_path, family) -> None:
    """And after the steps the exported folder is a model of transformers with the loss of the run."""
    out = tmp_path / "run"
    assert go(arguments(files, out, family)) == 0
    found = [row for row in rows(out) if "val_loss" in row]
    assert [row["step"] for row in found] == [0, 4]
    assert found[0]["val_loss"] == pytest.approx(their_loss(files / family, out), rel=1e-5)
    assert "step 0/4  validation loss " in (out / "log.txt").read_text()
    assert found[1]["val_loss"] < found[0]["val_loss"]
    hf = tmp_path / "hf"
    assert cli.main(["export", "--checkpoint", str(out), "--out", str(hf)]) == 0
    assert found[1]["val_loss"] == pytest.approx(their_loss(hf, out), rel=1e-5)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "vocab.json",
        "generation_config.json",
    ):
        assert (hf / name).read_text() == (files / family / name).read_text()


@pytest.mark.parametrize(
    "mesh",
    [
        ("--mesh", "dp=2", "--store", "dp"),
        pytest.param(("--mesh", "tp=2", "--sp"), marks=pytest.mark.slow),
    ],
)
def test_two_ranks_make_the_same_run_and_go_on_without_the_folder(files, tmp_path, mesh) -> None:
    """Resharded on read; a resumed run is bitwise the uninterrupted one when the folder is gone."""
    folder = tmp_path / "model"
    shutil.copytree(files / "llama", folder)
    common = dict(steps=5, precision_params="float64", dropout=0.1)
    one, two, parts = tmp_path / "one", tmp_path / "two", tmp_path / "parts"
    given = [arguments(tmp_path, out, "model", "--data", files / "text.jsonl", **common) for out in (one, two, parts)]
    assert on(1, given[0]) == 0
    assert on(2, [*given[1], *mesh]) == 0
    torch.testing.assert_close(losses(two), losses(one), rtol=1e-9, atol=0)
    assert on(2, [*given[2], *mesh], (2, "SIGTERM")) == 0
    shutil.rmtree(folder)
    assert on(2, ["--out", str(parts), "--resume"]) == 0
    assert numbers(parts) == numbers(two)
    with pytest.raises(UserError, match="--init-from None: the run in --out .* began from --init-from .*model: leave"):
        go(["--out", str(parts), "--resume", "--init-from", "None", "--steps", "9"])
    with pytest.raises(UserError, match="--model tiny: the run in --out .* began from --init-from .*model: leave"):
        go(["--out", str(parts), "--resume", "--model", "tiny", "--steps", "9"])


@pytest.mark.parametrize(("world", "more"), [(1, ()), (2, ("--mesh", "dp=2", "--ep", 2)), (2, ("--mesh", "pp=2"))])
def test_a_dense_model_is_upcycled(files, tmp_path, world, more) -> None:
    """With the loss of transformers' dense model before the first step, and exported with experts behind the last."""
    out, hf = tmp_path / "run", tmp_path / "hf"
    assert on(world, arguments(files, out, "llama", "--moe.experts", 4, *more, optim_lr=1e-2)) == 0
    found = [row["val_loss"] for row in rows(out) if "val_loss" in row]
    assert found[0] == pytest.approx(their_loss(files / "llama", out), rel=1e-5) and found[1] < found[0]
    assert cli.main(["export", "--checkpoint", str(out), "--out", str(hf)]) == 0
    assert '"mixtral"' in (hf / "config.json").read_text()
    assert found[1] == pytest.approx(their_loss(hf, out), rel=1e-5)


def test_experts_of_another_width_than_the_dense_part_are_refused(files, tmp_path) -> None:
    with pytest.raises(UserError, match="--moe.mlp 8 --moe.shared 0 with the dense model of --init-from .*36 wide"):
        go(arguments(files, tmp_path / "run", "llama", "--moe.experts", 4, "--moe.mlp", 8))
    with pytest.raises(UserError, match="--moe with the dense model of .*must sum to 1"):
        go(arguments(files, tmp_path / "run", "llama", "--moe.experts", 4, "--moe.scale", 2))


def test_a_larger_vocabulary(files, tmp_path, capsys) -> None:
    """A tokenizer with more tokens needs --resize-vocab; new rows are the mean of the old ones and a little noise."""
    out = tmp_path / "run"
    given = arguments(files, out, "llama", "--tokenizer", files / "larger", "--optim.lr", "1e-30", steps=1)
    assert cli.main(["train", *given]) == 2
    assert "its vocabulary of 300 is smaller than the tokenizer's 325 tokens: add --resize-vocab 325" in (
        capsys.readouterr().err
    )
    assert cli.main(["train", *given, "--resize-vocab", "320"]) == 2
    assert "--resize-vocab 320 is smaller than the tokenizer's 325 tokens: use 325 or more" in capsys.readouterr().err
    assert not out.exists()
    assert go([*given, "--resize-vocab", "336"]) == 0
    (file,) = [p for p in checkpoint.latest(out).iterdir() if p.suffix == ".safetensors"]
    held, old = load_file(file), load_file(files / "llama/model.safetensors")
    for ours, theirs in (("params.embed", "model.embed_tokens.weight"), ("params.head", "lm_head.weight")):
        before, after = old[theirs], held[ours]
        assert after.shape == (336, 24)
        torch.testing.assert_close(after[:300], before, rtol=1e-6, atol=1e-6)
        spread = (after[300:] - before.mean(0)) / before.std(0)
        assert 0.005 < spread.std() < 0.02 and spread.abs().max() < 0.06
    assert go(["--out", str(out), "--resume", "--steps", "2"]) == 0
    assert cli.main(["train", "--out", str(out), "--resume", "--steps", "3", "--resize-vocab", "340"]) == 2
    assert "is of another model, with vocab 336 (now 340)" in capsys.readouterr().err


def test_overrides_that_keep_the_parameters(files, tmp_path) -> None:
    """A window changes the first loss, and comes back from the checkpoint; the export says what it cannot."""
    plain, window = tmp_path / "plain", tmp_path / "window"
    assert go(arguments(files, plain, "qwen3", steps=1)) == 0
    given = ("--model-overrides.window", 3, "--model-overrides.rope-theta", 500.0)
    assert go(arguments(files, window, "qwen3", *given, steps=1)) == 0
    first = [rows(out)[0]["val_loss"] for out in (plain, window)]
    assert abs(first[0] - first[1]) > 1e-4
    model = checkpoint.read_meta(window)["model"]
    assert (model["window"], model["rope_base"], model["qk_norm"]) == (3, 500.0, "head")
    assert go(["--out", str(window), "--resume", "--steps", "2"]) == 0


BAD: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a model too": (("--model", "tiny"), ("--model tiny and --init-from llama exclude each other",)),
    "sizes": (
        ("--model-overrides.layers", "3"),
        ("--model-overrides.layers would change the parameters of --init-from",),
    ),
    "another form": (("--model-overrides.qk-norm", "head"), ("--model-overrides.qk-norm would change the parameters",)),
    "vocabulary": (
        ("--model-overrides.vocab", "400"),
        ("--model-overrides.vocab: with --init-from", "--resize-vocab 400"),
    ),
    "another family": (("--model-overrides.family", "gpt2"), ("--model-overrides.family would change",)),
    "no such folder": (
        ("--init-from", "gone"),
        ("--init-from gone is no folder: give a folder that transformers wrote",),
    ),
    "no model in it": (("--init-from", "larger"), ("--init-from larger has no config.json",)),
    "no tokenizer": (("--init-from", "bare"), ("--init-from bare has no tokenizer.json: name one by --tokenizer",)),
    "no weights": (("--init-from", "hollow"), ("hollow",)),
    "an unknown field": (("--init-from", "odd"), ("the field mystery=3", "add --ignore-fields mystery")),
    "a family not known": (("--init-from", "strange"), ("model_type 'bloom' is not supported",)),
    "positions that are learned": (
        ("--init-from", "gpt2", "--batch.seq-len", "65"),
        ("--batch.seq-len 65 is longer than the 64 learned positions of gpt2: use at most 64\n",),
    ),
    "rotary base of learned positions": (
        ("--init-from", "gpt2", "--model-overrides.rope-theta", "1e5"),
        ("--model-overrides.rope-theta 100000.0: gpt2 has learned positions, not rotary ones: leave it out",),
    ),
    "a vocabulary to resize without a model": (
        ("--init-from", "None", "--resize-vocab", "400"),
        ("--resize-vocab 400 is for --init-from",),
    ),
    "fields without a model": (("--init-from", "None", "--ignore-fields", "a"), ("--ignore-fields is for",)),
}


@pytest.fixture(scope="module")
def broken(files) -> Path:
    """The folder with models that are none."""
    import json

    for name in ("bare", "hollow", "odd", "strange"):
        shutil.copytree(files / "llama", files / name)
    (files / "bare/tokenizer.json").unlink()
    (files / "hollow/model.safetensors").unlink()
    config = json.loads((files / "llama/config.json").read_text())
    (files / "odd/config.json").write_text(json.dumps({**config, "mystery": 3}))
    (files / "strange/config.json").write_text(json.dumps({**config, "model_type": "bloom"}))
    return files


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_one_line_and_nothing_is_written(broken, monkeypatch, capsys, name) -> None:
    monkeypatch.chdir(broken)
    before = sorted(broken.rglob("*"))
    more, parts = BAD[name]
    code = cli.main(["train", *flags_of("text.jsonl", "new", "--init-from", "llama", *more, steps=2)])
    printed = capsys.readouterr()
    assert code == 2 and printed.out == "", printed.err
    assert printed.err.startswith("fmegatron: error: ") and printed.err.count("\n") == 1, printed.err
    assert all(part in printed.err for part in parts), printed.err
    assert sorted(broken.rglob("*")) == before


def test_a_field_that_is_ignored_on_request(broken, tmp_path) -> None:
    assert go(arguments(broken, tmp_path / "run", "odd", "--ignore-fields", "mystery,other", steps=1)) == 0


def test_generation_from_the_folder_is_that_of_transformers(files, capsys, tmp_path) -> None:
    """With the first token that its tokenizer puts before a text."""
    import transformers
    from tokenizers.processors import TemplateProcessing

    folder = str(tmp_path / "gemma2")
    shutil.copytree(files / "gemma2", folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.eod)]
    )
    save_tokenizer(tokenizer, folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(folder)("def return value 日本")["input_ids"]
    assert ids == [tokenizer.eod, *tokenizer.encode("def return value 日本")]
    found = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12, pad_token_id=1, eos_token_id=0)[0]
    common = ["generate", "--checkpoint", folder, "--prompt", "def return value 日本", "--tokens", "12"]
    assert cli.main([*common, "--temperature", "0", "--no-stream"]) == 0
    assert capsys.readouterr().out == tokenizer.decode(found.tolist()) + "\n"
    assert cli.main([*common, "--weights", "ema"]) == 2
    assert "--weights ema: " in capsys.readouterr().err
    assert cli.main(["describe", "--init-from", folder, "--mesh", "tp=3"]) == 0
    assert "attention_softcap=50.0" in capsys.readouterr().out
