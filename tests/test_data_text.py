"""From text to token files: corpora and what is wrong with them, tokenizers, preprocess and prepare."""

import argparse
import importlib
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import strategies as st

from fmegatron.data import (
    IndexedWriter,
    TokenDataset,
    Tokenizer,
    bits_per_byte,
    builtin_corpus,
    check_vocab,
    encode_documents,
    find_corpus,
    load_tokenizer,
    open_indexed,
    prepare,
    preprocess,
    read_documents,
    save_tokenizer,
    text_bytes,
    train_bpe,
    unigram_entropy,
)
from fmegatron.data.corpus import Document, cut_document, validation_names
from fmegatron.errors import UserError

TEXT = inspect.getsource(argparse)[:30_000]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe([TEXT], vocab_size=400)


def jsonl(path: Path, texts, key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def texts_of(prefix: str, tokenizer: Tokenizer) -> list[str]:
    data = open_indexed(prefix)
    documents = (data.document(k) for k in range(data.num_documents))
    return [tokenizer.decode(np.concatenate(d).tolist()) if d else "" for d in documents]


def left(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


# --- corpora


def test_builtin_corpus_is_the_library_without_tests():
    corpus = builtin_corpus()
    names = set(corpus.files)
    assert {"os.py", "json/decoder.py", "collections/__init__.py"} <= names and len(names) > 500
    assert not any({"test", "tests", "idle_test", "site-packages"} & set(name.split("/")) for name in names)
    assert list(corpus.files) == sorted(names)
    held_out = validation_names(names, 0.05)
    assert 0.02 * len(names) < len(held_out) < 0.08 * len(names)
    first = next(document for document in read_documents(corpus) if document.name == "os.py")
    assert first.text == Path(os.__file__).read_bytes().decode()


def test_folder_of_text(tmp_path):
    for name, text in [("b.txt", "bee\r\n"), ("a/c.md", "sea"), ("a/empty.py", ""), ("z.py", "é")]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    for name in (".git/x.txt", "__pycache__/y.py", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\xff\xfe")
    documents = list(read_documents(find_corpus(tmp_path)))
    assert documents == [Document("a/c.md", "sea"), Document("b.txt", "bee\r\n"), Document("z.py", "é")]


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes("héllo".encode() + b"\xff")
    with pytest.raises(UserError, match=r"a.txt is not UTF-8 text \(byte 0xff at offset 6\)"):
        list(read_documents(find_corpus(tmp_path)))


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match="data='/no/such' does not exist"):
        find_corpus("/no/such")
    with pytest.raises(UserError, match="has no text"):
        find_corpus(tmp_path)


def test_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one\\n", "id": 1}\r\n\n{"text": ""}\n{"text": "\\u00e9"}')
    expected = [Document("a.jsonl:1", "one\n"), Document("a.jsonl:3", ""), Document("a.jsonl:4", "é")]
    assert list(read_documents(find_corpus(path))) == expected
    assert list(read_documents(find_corpus(tmp_path))) == expected


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"text": "a"', "line 3 is not valid JSON .*column"),
        (b"[1]", "line 3 is a JSON list"),
        (b'{"body": "a", "id": 1}', "line 3 has no key 'text' .it has 'body', 'id'."),
        (b"{}", "line 3 has no key 'text' .it has none."),
        (b'{"text": null}', "line 3 has a NoneType under 'text'"),
        (b'{"text": "a\\ud800"}', "line 3 has half a surrogate pair at character 1"),
        (b'{"text": "\xff"}', "line 3 is not UTF-8 text .byte at offset 41"),
        (b"[" * 100_000, "line 3 is (JSON nested too deeply|not valid JSON)"),
    ],
)
def test_broken_lines_are_named(tmp_path, bpe, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + b'{"text":"x"}\n' + line + b'\n{"text": "last"}\n')
    assert "offset" not in message or line.index(b"\xff") == 10 and path.read_bytes().index(b"\xff") == 41
    for run in (lambda: preprocess(path, tmp_path / "out" / "a", bpe), lambda: prepare(path, tmp_path / "out")):
        with pytest.raises(UserError, match=f"a.jsonl {message}"):
            run()
        assert left(tmp_path) == ["a.jsonl"]


def test_validation_names():
    names = [f"file{i}" for i in range(1000)]
    held_out = validation_names(names, 0.05)
    assert 25 < len(held_out) < 80
    assert validation_names(names[::-1], 0.05) == held_out
    assert validation_names(names[:500], 0.05) == held_out & set(names[:500])  # more documents move none
    assert len(validation_names(["a", "b"], 1e-9)) == len(validation_names(["a", "b"], 1 - 1e-9)) == 1
    for bad in (0, 1, -0.1, 5):
        with pytest.raises(UserError, match="valid_fraction="):
            validation_names(names, bad)
    with pytest.raises(UserError, match="1 document"):
        validation_names(["a", "a"], 0.5)


@hypothesis.given(st.text(alphabet="ab\n", min_size=2, max_size=60), st.floats(0.01, 0.99))
def test_cut_document(text, fraction):
    first, second = cut_document(Document("a", text), fraction)
    assert first.text + second.text == text and first.text
    assert len(second.text) >= int(len(text) * fraction)
    assert first.text.endswith("\n") or "\n" not in text[: int(len(text) * (1 - fraction))]


# --- tokenizers


@hypothesis.settings(deadline=None)
@hypothesis.given(st.text(max_size=50))
def test_any_text_round_trips(bpe, text):
    hypothesis.assume(bpe.eod_token not in text)
    assert bpe.decode(bpe.encode(text)) == text
    assert bpe.encode_batch([text, "x"])[0] == bpe.encode(text)


def test_training_is_deterministic_and_of_the_size_asked_for(bpe):
    assert bpe.vocab_size == 400 and bpe.eod == 0 and bpe.eod_token == "<|endoftext|>"
    assert train_bpe([TEXT], vocab_size=400).backend.to_str() == bpe.backend.to_str()
    with pytest.raises(UserError, match="vocab_size=256 .* at least 257"):
        train_bpe([TEXT], vocab_size=256)


def test_transformers_loads_what_was_saved(bpe, tmp_path):
    save_tokenizer(bpe, tmp_path / "t")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    assert theirs(TEXT)["input_ids"] == bpe.encode(TEXT)
    assert theirs.decode(bpe.encode(TEXT)) == TEXT
    assert (theirs.eos_token, theirs.eos_token_id) == (bpe.eod_token, bpe.eod)
    for path in (tmp_path / "t", tmp_path / "t" / "tokenizer.json"):
        ours = load_tokenizer(path)
        assert (ours.encode(TEXT), ours.eod, ours.vocab_size) == (bpe.encode(TEXT), 0, 400)


def test_loads_what_transformers_saved(bpe, tmp_path):
    raw = tokenizers.Tokenizer.from_str(bpe.backend.to_str())
    raw.add_special_tokens(["</s>", "<s>"])
    raw.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 401)])
    raw.enable_truncation(5)
    raw.enable_padding(pad_id=400, pad_token="</s>")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", chat_template="{{ x }}")
    theirs.save_pretrained(tmp_path / "t")
    ours = load_tokenizer(tmp_path / "t")
    assert (ours.eod_token, ours.eod, ours.vocab_size) == ("</s>", 400, 402)
    assert ours.encode(TEXT) == bpe.encode(TEXT)  # not cut at 5, and without <s>
    assert ours.encode("a", add_special_tokens=True) == [401, *bpe.encode("a")]
    assert load_tokenizer(tmp_path / "t", eod_token="<s>").eod == 401
    save_tokenizer(ours, tmp_path / "again")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "again").chat_template == "{{ x }}"
    with pytest.raises(UserError, match="eod_token='nope'"):
        load_tokenizer(tmp_path / "t", eod_token="nope")


def test_no_tokenizer(tmp_path):
    with pytest.raises(UserError, match="has no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_vocabularies_that_disagree(bpe):
    check_vocab(bpe, 400)
    with pytest.raises(UserError, match="has 400 tokens but the model's vocab_size is 399"):
        check_vocab(bpe, 399)


def test_bits_per_byte():
    assert bits_per_byte(np.log(256), 10, 10) == pytest.approx(8)  # uniform over bytes
    assert bits_per_byte(np.log(2), 10, 40) == pytest.approx(0.25)


# --- preprocess


def some_texts(count: int) -> list[str]:
    draw = random.Random(1)
    texts = [TEXT[(at := draw.randrange(len(TEXT))) : at + draw.randrange(300)] for _ in range(count)]
    return [text if i % 7 else "" for i, text in enumerate(texts)]


def test_preprocess(tmp_path, bpe):
    texts = some_texts(60)
    path = jsonl(tmp_path / "a.jsonl", texts, "body")
    stats = preprocess(path, tmp_path / "out" / "a", bpe, key="body")
    assert stats.prefix == str(tmp_path / "out" / "a_body_document")
    assert left(tmp_path / "out") == ["a_body_document.bin", "a_body_document.idx"]
    assert texts_of(stats.prefix, bpe) == texts
    data = open_indexed(stats.prefix)
    assert data.tokens.dtype == np.uint16
    assert [d[0][-1] for k in range(60) if (d := data.document(k))] == [bpe.eod] * sum(bool(text) for text in texts)
    assert stats.documents == data.num_documents == 60 and stats.tokens == len(data.tokens)
    assert stats.bytes == sum(len(text.encode()) for text in texts)
    assert text_bytes(bpe, [data.tokens]) == stats.bytes
    plain = preprocess(path, tmp_path / "b", bpe, key="body", append_eod=False)
    assert plain.tokens == sum(len(bpe.encode(text)) for text in texts)


def test_preprocess_of_several_files_and_folders(tmp_path, bpe):
    (tmp_path / "in").mkdir()
    jsonl(tmp_path / "in" / "b.jsonl", ["two"])
    jsonl(tmp_path / "in" / "a.jsonl", ["one"])
    (tmp_path / "in" / "notes.txt").write_text("no JSON")
    single = jsonl(tmp_path / "c.data", ["three"])
    save_tokenizer(bpe, tmp_path / "t")
    stats = preprocess([tmp_path / "in", str(single)], tmp_path / "out", tmp_path / "t")
    assert texts_of(stats.prefix, bpe) == ["one", "two", "three"]


def test_the_number_of_workers_changes_nothing(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(importlib.import_module("fmegatron.data.preprocess"), "BATCH_CHARACTERS", 2000)
    path = jsonl(tmp_path / "a.jsonl", some_texts(200))
    files = []
    for workers in (1, 2):
        prefix = preprocess(path, tmp_path / str(workers), bpe, workers=workers).prefix
        files.append([Path(prefix + suffix).read_bytes() for suffix in (".bin", ".idx")])
    assert files[0] == files[1]
    path.write_bytes(path.read_bytes() + b"{")
    with pytest.raises(UserError, match="line 201 is not valid JSON"):
        preprocess(path, tmp_path / "3", bpe, workers=2)
    assert not [name for name in left(tmp_path) if "3" in name or "partial" in name]


def test_a_script_without_a_main_guard_is_told_so(tmp_path, bpe):
    jsonl(tmp_path / "a.jsonl", ["a"])
    save_tokenizer(bpe, tmp_path / "t")
    script = tmp_path / "script.py"
    script.write_text("from fmegatron.data import preprocess\npreprocess('a.jsonl', 'out/a', 't', workers=2)")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    job = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert job.returncode == 1 and "UserError: one of workers=2 processes died" in job.stderr
    assert not (tmp_path / "out").exists()


def test_memory_is_bounded(bpe):
    """Documents are taken as they are needed: reading runs ahead of writing by one batch at most."""
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield "x" * 100_000

    stream = encode_documents(endless(), bpe)
    next(stream)
    assert taken <= 21


def test_bad_preprocess(tmp_path, bpe):
    good = jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "empty.jsonl").write_text("")
    blank = jsonl(tmp_path / "blank.jsonl", ["", ""])
    before = left(tmp_path)
    nameless = Tokenizer(bpe.backend, None)
    for arguments, message in [
        ((tmp_path / "none.jsonl", "x", bpe), "none.jsonl' does not exist"),
        ((tmp_path / "empty.jsonl", "x", bpe), "no text at all .* .0 documents"),
        ((blank, "x", bpe), "no text at all .* .2 documents"),
        ((good, "x", nameless), "append_eod=True but"),
        ((good, "x", tmp_path / "nowhere"), "has no tokenizer.json"),
        ((good, "a.jsonl/x", bpe), "cannot make the folder"),
    ]:
        source, prefix, tokenizer = arguments
        with pytest.raises(UserError, match=message):
            preprocess(source, tmp_path / prefix, tokenizer)
        assert left(tmp_path) == before
    with pytest.raises(UserError, match="workers=0"):
        preprocess(good, tmp_path / "x", bpe, workers=0)


# --- prepare


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """A standard library of 40 files."""
    root = tmp_path / "lib"
    for name in ("package/__init__.py", "test/test_x.py", "site-packages/y.py", "data.bin"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("" if "init" in name else "raise SystemExit")
    (root / "old.py").write_bytes(b"# latin-1: \xe9")
    for i, text in enumerate(some_texts(47)):
        (root / f"m{i}.py").write_text(text)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(root))
    return root


def test_prepare_the_builtin_corpus(tmp_path, library):
    out = tmp_path / "out"
    got = prepare(None, out, vocab_size=300)
    assert (got.reused, got.vocab_size, got.eod) == (False, 300, 0)
    tokenizer = load_tokenizer(got.tokenizer_path)
    train, valid = texts_of(got.train_prefix, tokenizer), texts_of(got.valid_prefix, tokenizer)
    sources = {path.name: path.read_text() for path in library.glob("m*.py") if path.read_text()}
    assert sorted(train + valid) == sorted(sources.values())
    held_out = validation_names(sources, 0.05)
    assert sorted(valid) == sorted(sources[name] for name in held_out)
    assert got.valid.bytes == sum(len(text.encode()) for text in valid)
    assert (got.train.documents, got.valid.documents) == (len(train), len(valid))
    assert tokenizer.backend.to_str() == train_bpe(train, vocab_size=300).backend.to_str()  # of the training part only
    entropy = unigram_entropy(TokenDataset(got.valid_prefix, seq_len=8, order="sequential").tokens, 300)
    assert 1 < entropy < np.log(300)


def test_prepare_reuses_only_what_is_whole_and_of_the_same_inputs(tmp_path, library):
    out = tmp_path / "out"
    first = prepare(None, out, vocab_size=300)
    again = prepare(None, out, vocab_size=300)
    assert again.reused and (again.train, again.valid) == (first.train, first.valid)
    assert again.train_prefix == first.train_prefix and again.train_split == (0.0, 1.0)
    assert not prepare(None, out, vocab_size=301).reused
    assert not prepare(None, out, vocab_size=300).reused
    assert not prepare(None, out, vocab_size=300, append_eod=False).reused
    (library / "m1.py").write_text("print('another text')")
    assert not prepare(None, out, vocab_size=300, append_eod=False).reused
    moved = out.rename(tmp_path / "moved")
    same = prepare(None, moved, vocab_size=300, append_eod=False)
    assert same.reused and same.train_prefix.startswith(str(moved))
    os.truncate(moved / "valid_text_document.bin", 10)
    assert not prepare(None, moved, vocab_size=300, append_eod=False).reused
    with IndexedWriter(moved / "train_text_document", "u2") as other:  # whole, but not what was recorded
        other.add_document([[1, 2, 3]])
    assert not prepare(None, moved, vocab_size=300, append_eod=False).reused
    (moved / "prepared.json").write_text("{")
    assert not prepare(None, moved, vocab_size=300, append_eod=False).reused
    (moved / "tokenizer" / "tokenizer.json").unlink()
    assert not prepare(None, moved, vocab_size=300, append_eod=False).reused
    assert prepare(None, moved, vocab_size=300, append_eod=False).reused


def test_prepare_jsonl_with_a_tokenizer(tmp_path, bpe):
    texts = some_texts(50)
    path = jsonl(tmp_path / "a.jsonl", texts, "body")
    save_tokenizer(bpe, tmp_path / "t")
    got = prepare(path, tmp_path / "out", tokenizer=tmp_path / "t", text_key="body", valid_fraction=0.2)
    held_out = validation_names([f"a.jsonl:{i}" for i, text in enumerate(texts, 1) if text], 0.2)
    assert texts_of(got.valid_prefix, bpe) == [t for i, t in enumerate(texts, 1) if f"a.jsonl:{i}" in held_out]
    assert texts_of(got.train_prefix, bpe) == [t for i, t in enumerate(texts, 1) if f"a.jsonl:{i}" not in held_out]
    assert load_tokenizer(got.tokenizer_path).backend.to_str() == bpe.backend.to_str()


def test_prepare_one_text_file_cuts_it(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    got = prepare(tmp_path / "a.txt", tmp_path / "out", vocab_size=300)
    tokenizer = load_tokenizer(got.tokenizer_path)
    train, valid = texts_of(got.train_prefix, tokenizer) + texts_of(got.valid_prefix, tokenizer)
    assert train + valid == TEXT and 0.05 <= len(valid) / len(TEXT) < 0.06


def test_prepare_an_existing_prefix(tmp_path, bpe):
    texts = [f"text number {i}, é" for i in range(40)]
    prefix = preprocess(jsonl(tmp_path / "a.jsonl", texts), tmp_path / "a", bpe).prefix
    got = prepare(prefix, tmp_path / "out", tokenizer=bpe, valid_fraction=0.1)
    assert got.train_prefix == got.valid_prefix == prefix and left(tmp_path / "out")[0] == "tokenizer"
    assert got.valid.bytes == sum(len(text.encode()) for text in texts[36:])
    parts = [
        TokenDataset(prefix, seq_len=4, split=split, order="sequential") for split in (got.train_split, got.valid_split)
    ]
    assert [len(part.tokens) for part in parts] == [got.train.tokens, got.valid.tokens]
    assert bpe.decode(parts[1].tokens.tolist()) == "".join(texts[36:])
    with pytest.raises(UserError, match="already tokenized"):
        prepare(prefix, tmp_path / "other")
    with pytest.raises(UserError, match=r"token id \d+ at position .* outside the vocabulary \[0, 25\d\)"):
        prepare(prefix, tmp_path / "other", tokenizer=train_bpe(["abc"], vocab_size=260))
    with IndexedWriter(tmp_path / "one", "u2") as out:
        out.add_document([[1, 2, 3]])
    with pytest.raises(UserError, match="has 1 document"):
        prepare(tmp_path / "one", tmp_path / "other", tokenizer=bpe)
    (tmp_path / "one.idx").unlink()
    with pytest.raises(UserError, match="no file .*one.idx"):
        prepare(tmp_path / "one.bin", tmp_path / "other", tokenizer=bpe)
    assert not (tmp_path / "other").exists()


def test_bad_prepare_writes_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.txt").write_text("")
    (tmp_path / "short.txt").write_text("x")
    before = left(tmp_path)
    for data, arguments, message in [
        ("none", {}, "none' does not exist"),
        ("empty", {}, "has no text"),
        ("blank", {}, "has no text in it"),
        ("short.txt", {}, "too short to hold out"),
        ("short.txt", {"valid_fraction": 0}, "valid_fraction=0"),
        ("short.txt", {"tokenizer": tmp_path}, "has no tokenizer.json"),
    ]:
        with pytest.raises(UserError, match=message):
            prepare(tmp_path / data, tmp_path / "deep" / "out", **arguments)
        assert left(tmp_path) == before
    with pytest.raises(UserError, match="cannot make the folder"):
        prepare(tmp_path / "blank", tmp_path / "short.txt" / "out")


def test_a_kill_never_leaves_what_looks_whole(tmp_path):
    """SIGKILL at moments all over the work: what is recorded is whole, and the next call ends right."""
    jsonl(tmp_path / "a.jsonl", some_texts(400))
    out = tmp_path / "out"
    program = "import sys; from fmegatron.data import prepare\nprint('go', flush=True)\n"
    program += "while True: [prepare(sys.argv[1], sys.argv[2], vocab_size=v) for v in (280, 300)]"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    for moment in (0.05, 0.21):
        job = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "a.jsonl"), str(out)],
            env=environment,
            stdout=subprocess.PIPE,
        )
        assert job.stdout is not None and job.stdout.readline() == b"go\n"
        time.sleep(moment)
        job.send_signal(signal.SIGKILL)
        job.wait()
        job.stdout.close()
        if (out / "prepared.json").exists():
            record = json.loads((out / "prepared.json").read_text())
            assert len(open_indexed(out / "train_text_document").tokens) == record["result"]["train"]["tokens"]
    got = prepare(tmp_path / "a.jsonl", out, vocab_size=300)
    fresh = prepare(tmp_path / "a.jsonl", tmp_path / "fresh", vocab_size=300)
    for name in ("train_text_document.bin", "valid_text_document.idx", "tokenizer/tokenizer.json"):
        assert (out / name).read_bytes() == (tmp_path / "fresh" / name).read_bytes()
    assert got.train.tokens == fresh.train.tokens
