"""Bad input to the commands: one message that names the argument and the fix, code 2, and the disk as it was."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fmegatron import cli
from fmegatron.data import IndexedWriter, save_tokenizer, train_bpe
from fmegatron.data.words import PREPROCESS, renamed
from fmegatron.errors import UserError
from tests.processes import processes
from tests.test_train import start
from tests.train_runs import WORDS, flags, go, write_corpus

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with good and bad data; the commands run in it."""
    folder = tmp_path_factory.mktemp("files")
    write_corpus(folder / "good.jsonl")
    lines = (folder / "good.jsonl").read_text().splitlines()
    (folder / "broken.jsonl").write_text("\n".join([*lines[:6], '{"text": "half', *lines[6:]]))
    (folder / "keyless.jsonl").write_text("\n".join([*lines[:2], '{"body": "x"}']))
    (folder / "empty.jsonl").write_text("")
    (folder / "blank.jsonl").write_text('{"text": ""}\n\n{"text": ""}\n')
    (folder / "short.jsonl").write_text('{"text": "one two"}\n{"text": "three"}\n')
    (folder / "no-text").mkdir()
    (folder / "image.bin").write_bytes(bytes(10))
    tokenizer = train_bpe(WORDS * 3, vocab_size=280)
    save_tokenizer(tokenizer, folder / "tokenizer")
    for name, largest in (("pair", 279), ("too-large", 5000)):
        with IndexedWriter(str(folder / name), np.dtype("<u2")) as out:
            tokens = np.full(400, largest, np.int32)
            out.add_documents(tokens, [100] * 4)
    assert go(flags(folder / "good.jsonl", folder / "run", steps=2)) == 0
    (folder / "run.toml").write_text("[optim]\nlearning_rate = 1\n")
    return folder


def tree_of(folder: Path) -> dict[str, object]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


# arguments after --data good.jsonl --out new (a later flag wins), what the message has
PAIR = ("--data", "pair", "--tokenizer", "tokenizer")
RUN = ("--out", "run", "--resume", "--steps", "4")
BAD: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no such file": (("--data", "gone.jsonl"), ("--data gone.jsonl", "no such file", "give the path")),
    "half a pair": (("--data", "image"), ("--data image", "image.bin", "not the other")),
    "a pair without tokenizer": (("--data", "pair"), ("--data pair", "--tokenizer FOLDER")),
    "no such tokenizer": (("--tokenizer", "gone"), ("--tokenizer gone", "tokenizer.json")),
    "empty corpus": (("--data", "empty.jsonl"), ("has no text in it", "give some")),
    "blank corpus": (("--data", "blank.jsonl"), ("has no text in it", "give some")),
    "folder without text": (("--data", "no-text"), ("the folder --data no-text has no text", "*.jsonl")),
    "broken JSON": (
        ("--data", "broken.jsonl"),
        ("broken.jsonl line 7 is not valid JSON", "each line must be one object"),
    ),
    "no text key": (("--data", "keyless.jsonl"), ("keyless.jsonl line 3 has no key 'text' (it has 'body')",)),
    "another text key": (("--text-key", "body"), ("good.jsonl line 1 has no key 'body' (it has 'text')",)),
    "sequence longer than the data": (
        ("--data", "short.jsonl", "--batch.seq-len", "512"),
        ("--batch.seq-len 512 needs 513 tokens", "of short.jsonl has ", "use at most "),
    ),
    "vocabulary smaller than the tokenizer's": (
        ("--model-overrides.vocab", "290"),
        ("--model-overrides.vocab 290 is smaller than the tokenizer's 300 tokens", "to 300 or more"),
    ),
    "tokenizer of a smaller vocabulary than the ids": (
        ("--data", "too-large", *PAIR[2:]),
        ("5000", "too-large"),
    ),
    "tokenizer vocabulary too small": (
        ("--tokenizer-vocab", "100"),
        ("--tokenizer-vocab 100 is too small", "at least 257"),
    ),
    "mesh of another size": (
        ("--mesh", "dp=2,tp=2"),
        ("--mesh dp=2,tp=2 has 4 ranks, but this run has 1", "--nproc 4"),
    ),
    "mesh with a typo": (("--mesh", "dp:2"), ("--mesh", "'dp:2' is not \"axis=size\"")),
    "mesh axis unknown": (("--mesh", "dtp=1"), ("--mesh dtp=1", "axis 'dtp'", "did you mean", "cp (sequence)")),
    "store axis unknown": (("--store", "zp"), ("--store zp", "has no axis of this name; use dp")),
    "store of no axis": (("--store", ""), ("--store '' names no mesh axis: give dp, or leave it out",)),
    "no axis to share": (("--cp", "ulysses+ring"), ("--cp ulysses+ring needs a mesh with an axis cp of 2 ranks",)),
    "unknown preset": (("--model", "llama3-8"), ("--model llama3-8 is no preset; did you mean llama3-8b?",)),
    "sizes that do not fit": (("--model-overrides.heads", "5"), ("--model-overrides", "heads=5", "kv_heads=2")),
    "microbatches": (("--batch.microbatches", "9"), ("--batch.size 8", "--batch.microbatches 9")),
    "a run in --out": (("--out", "run"), ("--out run holds a run already", "add --resume")),
    "resume without a run": (("--resume",), ("--resume: --out new holds no run", "leave --resume out")),
    "no steps left": ((*RUN[:3], "--steps", "2"), ("--steps 2", "has made 2 steps already; raise --steps")),
    "checkpoint of another model": (
        (*RUN, "--model-overrides.embed", "64"),
        ("step_00000002 is of another model, with embed 32 (now 64)", "leave --model and --model-overrides out"),
    ),
    "checkpoint of another vocabulary": ((*RUN, "--model-overrides.vocab", "512"), ("with vocab 320 (now 512)",)),
    "checkpoint of another dtype": (
        (*RUN, "--precision.params", "float64"),
        ("--precision.params float64", "step_00000002 holds float32"),
    ),
    "another tokenizer": ((*RUN, "--tokenizer", "tokenizer"), ("--tokenizer tokenizer is not the one that",)),
    "other data": ((*RUN, "--data", "short.jsonl"), ("short.jsonl: the run in --out run has had ", "add --other-data")),
    "another part held out": (
        (*RUN, "--eval.fraction", "0.5"),
        ("--eval.fraction 0.5: the run in --out run has had 0.05",),
    ),
    "under a file": (("--out", "good.jsonl/run"), ("--out good.jsonl/run", "good.jsonl is not a folder")),
    "unknown key": (
        ("--config", "run.toml"),
        ("--config run.toml: unknown key 'optim.learning_rate'; the nearest known key is 'optim.",),
    ),
    "a device that is not known": (("--device", "gpu"), ("--device 'gpu' is not known",)),
    "negative number": (("--optim.lr", "-1"), ("--optim.lr -1.0 must be greater than 0",)),
}
IN_TWO = {  # the same with two ranks; the first two are told by the parent and by both ranks
    "no such file": BAD["no such file"],
    "heads not divisible by tp": (
        ("--mesh", "tp=2", "--model-overrides.heads", "3", "--model-overrides.kv-heads", "1"),
        ("3 query heads", "tp=2", "use a tp of 1 or 3"),
    ),
    "broken JSON": BAD["broken JSON"],
    "mesh of another size": (("--mesh", "dp=3"), ("--mesh dp=3 has 3 ranks, but this run has 2", "--nproc 3")),
    "fewer rows than ranks": (("--batch.size", "1"), ("--batch.size 1 does not divide by 2", "use 2")),
    "too many microbatches": (("--batch.microbatches", "8"), ("--batch.microbatches 8", "gives each of the 2")),
    **{
        name: BAD[name]
        for name in (
            "empty corpus",
            "no text key",
            "sequence longer than the data",
            "vocabulary smaller than the tokenizer's",
            "tokenizer of a smaller vocabulary than the ids",
            "store axis unknown",
            "unknown preset",
            "a run in --out",
            "resume without a run",
            "no steps left",
            "checkpoint of another model",
            "another tokenizer",
            "under a file",
            "unknown key",
        )
    },
}
FAST = tuple(IN_TWO)[:2]


def check(message: str, parts: tuple[str, ...]) -> None:
    """One sentence, which for a layout is followed by lines with legal ones."""
    assert message.startswith("fmegatron: error: ") and message.endswith("\n"), message
    first, *lines = message.splitlines()
    assert first.endswith(". Nearest legal layouts:") == bool(lines), message
    assert len(lines) <= 3 and all(line.startswith("  --mesh ") for line in lines), message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_one_line_and_nothing_is_written(files, monkeypatch, capsys, name) -> None:
    monkeypatch.chdir(files)
    before = tree_of(files)
    more, parts = BAD[name]
    code = cli.main(["train", *given(more)])
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    check(printed.err, parts)
    assert tree_of(files) == before


def given(more: tuple[str, ...]) -> list[str]:
    """A good tiny run with some flags changed. A resumed run has the data and sizes that it had."""
    return list(more) if "run" in more and "--resume" in more else [*flags("good.jsonl", "new"), *more]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in IN_TWO])
def test_bad_input_to_two_ranks_is_told_once(files, name) -> None:
    before = tree_of(files)
    more, parts = IN_TWO[name]
    began = time.monotonic()
    process = start("fmegatron", "train", *given(more), "--nproc", 2, cwd=files)
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed) == (2, "")
    check(errors, parts)
    assert time.monotonic() - began < 10 * max(1.0, os.getloadavg()[0] / 2)  # 10 s where nothing else runs
    assert tree_of(files) == before


def refused(arguments: list[str]) -> str:
    """Why `train` refuses on this rank."""
    try:
        return f"exit code {go(arguments)}"
    except UserError as error:
        return str(error)


def test_what_the_first_rank_alone_reads_is_refused_by_all(files, tmp_path) -> None:
    out = tmp_path / "new"
    first, second = processes(2).run(refused, flags(files / "broken.jsonl", out))
    assert first == second and "broken.jsonl line 7 is not valid JSON" in first and not out.exists()


@pytest.mark.slow
def test_bad_input_under_torchrun_is_told_once(files) -> None:
    before = tree_of(files)
    process = start(
        "torch.distributed.run",
        "--nproc-per-node=2",
        "-m",
        "fmegatron",
        "train",
        *given(BAD["broken JSON"][0]),
        cwd=files,
    )
    printed, errors = process.communicate(timeout=120)
    assert process.returncode != 0 and printed == ""
    assert errors.count("broken.jsonl line 7 is not valid JSON") == 1 and "UserError" not in errors
    assert tree_of(files) == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--precision.params", "fp33"),
            "--precision.params fp33 is not known; did you mean float32? Choices: float64,",
        ),
        (
            ("--optim.name=adamm",),
            "--optim.name adamm is not known; did you mean adam? Choices: adamw, adam, sgd, lion,",
        ),
        (("--optim.schedule", "cos"), "--optim.schedule cos is not known; did you mean cosine?"),
        (("--optim.wsd_form", "line"), "--optim.wsd_form line is not known; did you mean linear?"),
        (("--precision.loss-scale", "dyn"), "--precision.loss-scale dyn is not known; did you mean dynamic? Choices: "),
        (("--model-overrides.qk-norm", "heads"), "--model-overrides.qk-norm heads is not known; did you mean head?"),
    ],
)
def test_wrong_names_of_choices_are_told_in_one_line(files, monkeypatch, capsys, more, message) -> None:
    monkeypatch.chdir(files)
    before = tree_of(files)
    assert cli.main(["train", *given(more)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    check(printed.err, (message,))
    assert tree_of(files) == before


def test_wrong_flags_are_told_by_the_parser(files, monkeypatch, capsys) -> None:
    monkeypatch.chdir(files)
    before = tree_of(files)
    for more, parts in (
        (("--optim.lrr", "1"), ("--optim.lrr", "--optim.lr ")),
        (("--steps", "many"), ("--steps", "many")),
        (("--model-overrides.pattern", "half"), ("--model-overrides.pattern", "half", "full")),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["train", *given(more)])
        printed = capsys.readouterr()
        assert (end.value.code, printed.out) == (2, "")
        assert all(part in printed.err for part in parts) and "Traceback" not in printed.err, printed.err
    assert tree_of(files) == before


def test_data_that_are_tokenized_already_train(files, monkeypatch, tmp_path) -> None:
    """The pair of the refused cases is good with its tokenizer, and a resume finds it again."""
    monkeypatch.chdir(files)
    out = tmp_path / "run"
    assert go([*flags("good.jsonl", out, steps=2), *PAIR]) == 0
    assert go(["--out", str(out), "--resume", "--steps", "3"]) == 0
    assert sorted(p.name for p in (out / "data").iterdir()) == ["tokenizer"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("generate", "--checkpoint", "gone", "--prompt", "x"), ("checkpoint 'gone'", "give a run's folder")),
        (("generate", "--checkpoint", "no-text"), ("no checkpoint in no-text/checkpoints",)),
        (("generate", "--checkpoint", "run", "--tokens", "0"), ("--tokens 0 must be at least 1",)),
        (("generate", "--checkpoint", "run", "--temperature", "-1"), ("--temperature -1.0 must be 0",)),
        (("generate", "--checkpoint", "run", "--top-k", "0"), ("--top-k 0 must be at least 1",)),
        (("generate", "--checkpoint", "run", "--top-p", "1.5"), ("--top-p 1.5 must be above 0 and at most 1",)),
        (("export", "--checkpoint", "gone", "--out", "new"), ("checkpoint 'gone'",)),
        (("export", "--checkpoint", "run", "--out", "tokenizer"), ("--out tokenizer exists already",)),
        (("export", "--checkpoint", "run", "--out", "good.jsonl"), ("--out good.jsonl exists already",)),
        (("export", "--checkpoint", "run", "--out", "good.jsonl/new"), ("good.jsonl",)),
    ],
)
def test_bad_input_to_generate_and_export(files, monkeypatch, capsys, arguments, parts) -> None:
    monkeypatch.chdir(files)
    before = tree_of(files)
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    check(printed.err, parts)
    assert tree_of(files) == before


def test_arguments_of_functions_are_told_as_flags() -> None:
    for message, told in (
        ("workers=0 is not positive", "--workers 0 is not positive"),
        ("input='a b.jsonl' does not exist: give", "--data a b.jsonl does not exist: give"),
        ("append_eod=True but none: set append_eod=False", "--append-eod but none: set --no-append-eod"),
        ("another vocab_size=3", "another vocab_size=3"),
    ):
        assert renamed(message, PREPROCESS) == told
