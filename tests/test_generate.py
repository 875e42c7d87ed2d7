"""Generation and export, against transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from fmegatron import cli, generate
from fmegatron.data import load_tokenizer
from fmegatron.generate import Printer, continuation, draw, generate_tokens, load_run
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.models.moe import MoE
from fmegatron.parallel.routing import Routing
from fmegatron.random import fold_in, key
from fmegatron.sharding import Sharding
from fmegatron.spec import init
from tests.train_runs import flags, go, write_corpus

torch.set_num_threads(1)
SMALL = DecoderConfig(vocab=97, embed=32, layers=2, heads=4, kv_heads=2, mlp=64, init_std=0.3)
PROMPTS = [[5, 17, 3], [8], [1, 2, 3, 4, 5, 6, 7, 90, 11], [44, 44]]


@pytest.fixture(scope="module")
def model():
    return Decoder(SMALL)


@pytest.fixture(scope="module")
def params(model):
    return init(model.spec(), key(3))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of a few steps, with characters of several bytes in its text."""
    folder = tmp_path_factory.mktemp("generate")
    corpus = write_corpus(folder / "text.jsonl")
    assert go(flags(corpus, folder / "run", steps=4, checkpoint_every=2, optim_lr=0.02)) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run) -> Path:
    out = run.parent / "hf"
    assert cli.main(["export", "--checkpoint", str(run), "--to", "hf", "--out", str(out)]) == 0
    return out


# -------------------------------------------------------------------------------------------------------------- drawing


def test_greedy_output_is_that_of_transformers(model, params, tmp_path) -> None:
    """Token by token, for prompts of unequal length in one batch, the model having gone through its exported folder."""
    import transformers

    from fmegatron.models.hf import save_hf

    save_hf(tmp_path / "hf", model, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    found = generate_tokens(model, params, PROMPTS, tokens=24)
    for prompt, ours in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        whole = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=0
        )
        assert ours == whole[0, len(prompt) :].tolist()
    assert len({tuple(f) for f in found}) == len(PROMPTS)  # no constant output that would be right by chance


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}])
def test_several_prompts_equal_each_alone(model, params, options) -> None:
    """Rows draw by (seed, row, step), so the first row of a batch is the prompt alone, whatever stands beside it."""
    for first in range(len(PROMPTS)):
        others = [PROMPTS[first], *PROMPTS[:first], *PROMPTS[first + 1 :]]
        together = generate_tokens(model, params, others, tokens=12, seed=5, **options)
        assert together[0] == generate_tokens(model, params, [PROMPTS[first]], tokens=12, seed=5, **options)[0]


def test_of_experts_with_a_capacity_padding_takes_no_place() -> None:
    """Prompts of unequal length equal each alone: the first tokens of a row find a place, and padding is in front of them."""
    moe = MoE(Routing(4, 2, normalised=True, capacity=1.0, drop="position"), 32)
    mixture = Decoder(dataclasses.replace(SMALL, moe=moe))
    params = init(mixture.spec(), key(3))
    together = generate_tokens(mixture, params, PROMPTS, tokens=6)
    assert together == [generate_tokens(mixture, params, [prompt], tokens=6)[0] for prompt in PROMPTS]


def test_a_cached_step_processes_one_token(model, params) -> None:
    """The prompt goes through the layers once, then every step one token a row."""
    seen = []

    class Counting(Decoder):
        def block(self, p, x, ctx):
            seen.append(x[0].shape[1])
            return Decoder.block(self, p, x, ctx)

    counting = Counting(SMALL)
    found = generate_tokens(counting, params, PROMPTS, tokens=6)
    assert seen == [9] * 2 + [1] * (2 * 5)
    assert found == generate_tokens(model, params, PROMPTS, tokens=6)


def test_cached_logits_are_those_of_the_whole_sequence(model, params) -> None:
    """In float64, over a sampled continuation."""
    sh = Sharding(precision=generate.Precision(params=torch.float64))
    wide = init(model.spec(), key(3), sh=sh)
    logits = []

    class Recording(Decoder):
        def cached(self, *arguments, **options):
            logits.append(Decoder.cached(self, *arguments, **options))
            return logits[-1]

    (new,) = generate_tokens(Recording(SMALL), wide, PROMPTS[:1], tokens=10, temperature=1.0, sh=sh)
    from fmegatron.context import Ctx

    whole = model.logits(wide, torch.tensor([PROMPTS[0] + new]), Ctx(sh=sh))[0, len(PROMPTS[0]) - 1 : -1]
    torch.testing.assert_close(torch.cat(logits), whole, rtol=1e-12, atol=1e-12)


def test_seeds(model, params) -> None:
    def tokens(seed: int) -> list[list[int]]:
        return generate_tokens(model, params, PROMPTS, tokens=10, temperature=1.0, seed=seed)

    assert tokens(1) == tokens(1) != tokens(2)


def frequencies(logits: torch.Tensor, **options) -> torch.Tensor:
    """How often each token is drawn, from 20,000 rows of the same logits."""
    rows = 20000
    drawn = draw(logits.expand(rows, -1), fold_in(key(0), 1), **options)
    return torch.bincount(drawn, minlength=logits.shape[-1]) / rows


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"temperature": 1.0}, 6),
        ({"temperature": 0.5}, 6),
        ({"temperature": 2.0, "top_k": 3}, 3),
        ({"temperature": 1.0, "top_p": 0.9}, 4),  # 0.45 + 0.25 + 0.15 are 0.85, so the fourth is still drawn
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.6}, 2),  # of the three left the first has 0.53
        ({"temperature": 1.0, "top_k": 1}, 1),
        ({"temperature": 1.0, "top_p": 1e-6}, 1),
        ({"temperature": 0.0}, 1),
    ],
)
def test_draws_have_the_distribution_of_transformers_filters(options, kept) -> None:
    """Frequencies of 20,000 draws against the probabilities that transformers' own logit processors leave."""
    from transformers.generation import logits_process as theirs

    p = torch.tensor([0.15, 0.45, 0.04, 0.25, 0.08, 0.03], dtype=torch.float64)
    scores = p.log()[None]
    if options["temperature"]:
        scores = theirs.TemperatureLogitsWarper(options["temperature"])(None, scores)
    if k := options.get("top_k"):
        scores = theirs.TopKLogitsWarper(k)(None, scores)
    if top := options.get("top_p"):
        scores = theirs.TopPLogitsWarper(top)(None, scores)
    expected = scores.softmax(-1)[0] if options["temperature"] else torch.nn.functional.one_hot(p.argmax(), 6).double()
    found = frequencies(p.log().float(), **options)
    assert int((found > 0).sum()) == int((expected > 0).sum() if options["temperature"] else 1) == kept
    torch.testing.assert_close(found.double(), expected, atol=0.012, rtol=0)  # 3.4 standard deviations of the largest


def test_a_row_ends_at_the_end_of_document_and_the_others_go_on(model, params) -> None:
    free = generate_tokens(model, params, PROMPTS, tokens=12)
    eod = free[0][4]
    ended = generate_tokens(model, params, PROMPTS, tokens=12, eod=eod)
    for row, whole in zip(ended, free, strict=True):
        assert row == (whole[: whole.index(eod)] if eod in whole else whole)
    assert len({len(row) for row in ended}) > 1


# ------------------------------------------------------------------------------------------------------ the command line


def text(capsys, *arguments: str) -> str:
    assert cli.main(["generate", *arguments]) == 0
    return capsys.readouterr().out


def test_streaming_prints_the_same_text(run, capsys) -> None:
    """Also while characters of several bytes come in pieces: the random model writes many broken and some whole ones."""
    common = ("--checkpoint", str(run), "--prompt", "def é", "--tokens", "120", "--temperature", "1.0")
    broken = whole = 0
    for seed in "0123":
        whole_text = text(capsys, *common, "--seed", seed, "--no-stream")
        assert text(capsys, *common, "--seed", seed) == whole_text
        broken += whole_text.count("\ufffd")
        whole += sum(ord(c) > 127 for c in whole_text.replace("\ufffd", "")[5:])
    assert broken > 5 and whole > 5


def test_a_character_is_printed_when_it_is_whole(run, monkeypatch) -> None:
    tokenizer = load_tokenizer(run / "data/tokenizer")
    letters = tokenizer.backend.get_vocab()
    byte = {b: letters[c] for b, c in byte_letters().items()}
    printed: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *text, **_: printed.append("".join(text)))
    printer = Printer(tokenizer, tokenizer.encode("x"))
    for b in "aé日b".encode() + b"\xe6\x97" + b"c" + b"\xf0":
        printer([byte[b]])
    printer.finish()
    assert printed[:5] == ["a", "é", "日", "b", "\ufffdc"]
    assert "".join(printed) == "aé日b\ufffdc\ufffd"


def byte_letters() -> dict[int, str]:
    """The character by which byte-level BPE writes each byte (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + n) for n, b in enumerate(others)}


def test_a_continuation_keeps_the_space_that_some_tokenizers_drop() -> None:
    class Sentences:
        """As SentencePiece: a space before each word, none at the beginning of a text."""

        def decode(self, ids):
            return " ".join(f"w{i}" for i in ids)

    assert continuation(Sentences(), [1, 2], [3, 4]) == " w3 w4"
    assert continuation(Sentences(), [1, 2], []) == ""


def test_run_folder_or_one_checkpoint(run, capsys) -> None:
    common = ("--prompt", "return import", "--tokens", "20", "--temperature", "0", "--checkpoint")
    newest, first = (str(run / "checkpoints" / f"step_0000000{n}") for n in (4, 2))
    texts = [text(capsys, *common, where) for where in (str(run), newest, first)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("return import")
    moved = run.parent / "moved"
    run.rename(moved)
    try:
        assert text(capsys, *common, str(moved)) == texts[0]
    finally:
        moved.rename(run)


def test_several_prompts_and_none(run, capsys) -> None:
    common = ("--checkpoint", str(run), "--tokens", "8", "--temperature", "0")
    prompts = ("def", "for in if else return", "日本")
    together = text(capsys, *common, "--prompt", *prompts).split("-" * 20 + "\n")
    assert [t for t in together if t] == [text(capsys, *common, "--prompt", p) for p in prompts]
    assert text(capsys, *common)  # no prompt: from the beginning of a document
    assert text(capsys, *common, "--dtype", "float64", "--prompt", "def") == text(capsys, *common, "--prompt", "def")


# ---------------------------------------------------------------------------------------------------------------- export


def test_transformers_loads_the_exported_run_with_the_same_logits(run, exported, monkeypatch) -> None:
    import transformers

    model, params, tokenizer, _ = load_run(str(run), device=torch.device("cpu"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    for line in ("def return import é 日本", "loop while for in", ""):
        ids = their_tokenizer(line)["input_ids"]
        assert ids == tokenizer.encode(line)
        ids = ids or [tokenizer.eod]
        with torch.no_grad():
            torch.testing.assert_close(
                model.logits(params, torch.tensor([ids])), theirs(torch.tensor([ids])).logits, rtol=1e-6, atol=1e-6
            )
    assert their_tokenizer.eos_token_id == tokenizer.eod


def test_generated_text_is_that_of_transformers_on_the_exported_run(run, exported, capsys) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    for prompt in ("def self", "while for in if else value 日本"):
        found = model.generate(
            **tokenizer(prompt, return_tensors="pt"), do_sample=False, max_new_tokens=20, pad_token_id=0
        )
        expected = tokenizer.decode(found[0], skip_special_tokens=True)
        arguments = ("--checkpoint", str(run), "--prompt", prompt, "--tokens", "20", "--temperature", "0")
        assert text(capsys, *arguments) == expected + "\n"


def test_export_refuses_a_folder_in_use_and_takes_a_dtype(run, exported, tmp_path, capsys) -> None:
    from safetensors import safe_open

    arguments = ["export", "--checkpoint", str(run), "--out"]
    assert cli.main([*arguments, str(exported)]) == 2
    assert "exists already: give a folder that does not exist or is empty" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert cli.main([*arguments, str(empty), "--dtype", "bfloat16"]) == 0
    assert f"wrote {empty}: load it with transformers.AutoModelForCausalLM" in capsys.readouterr().out
    with safe_open(empty / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_the_printed_text_is_also_that_of_the_function(run, capsys) -> None:
    model, params, tokenizer, _ = load_run(str(run), device=torch.device("cpu"))
    (made,) = generate.generate(model, params, tokenizer, ["def"], tokens=9, temperature=0.9, seed=4)
    arguments = ("--checkpoint", str(run), "--prompt", "def", "--tokens", "9", "--temperature", "0.9", "--seed", "4")
    assert text(capsys, *arguments) == "def" + made + "\n"
