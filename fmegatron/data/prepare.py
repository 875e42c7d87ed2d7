"""From whatever text a user has to token files to train on: what `fmegatron train` runs first."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from fmegatron.data import indexed
from fmegatron.data.corpus import (
    Corpus,
    Document,
    builtin_corpus,
    cut_document,
    find_corpus,
    fingerprint,
    read_documents,
    validation_names,
)
from fmegatron.data.files import make_folder, remove_folders, write_text
from fmegatron.data.preprocess import Stats, encode_documents, write_documents
from fmegatron.data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer, text_bytes, train_bpe
from fmegatron.errors import UserError

FORMAT = 1  # change it when the same input would give other files
RECORD = "prepared.json"
BPE_CHARACTERS = 50_000_000


@dataclass(frozen=True)
class Prepared:
    """Training and validation data and their tokenizer.

    train_split and valid_split are the parts of the documents of each prefix (both prefixes may be the same). train and
    valid: documents, tokens and bytes of text in each part; bytes of `train` are 0 for a prefix that existed before.
    reused: was everything there already, from a run with the same inputs?
    """

    train_prefix: str
    valid_prefix: str
    tokenizer_path: str
    vocab_size: int
    eod: int | None
    train: Stats
    valid: Stats
    train_split: tuple[float, float] = (0.0, 1.0)
    valid_split: tuple[float, float] = (0.0, 1.0)
    seconds: float = 0.0
    reused: bool = False


def prepare(
    data: str | os.PathLike[str] | None,
    out_dir: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    vocab_size: int = 4096,
    text_key: str = "text",
    append_eod: bool = True,
    valid_fraction: float = 0.05,
    workers: int = 1,
) -> Prepared:
    """Split, train a tokenizer, tokenize: OUT_DIR/{train,valid}_text_document.bin/.idx and OUT_DIR/tokenizer/.

    data: None, the standard library's sources; a .jsonl file or a folder of them (text under text_key); a folder of
    text files, or one text file; or the prefix of a .bin/.idx pair (needs `tokenizer`; nothing but the tokenizer is
    written). Whole documents (files, lines) go to training or to validation; a single document is cut at a line's end.
    tokenizer: a folder, a tokenizer.json, or one loaded; None trains a byte-level BPE of vocab_size on the training
    part. The same inputs and the same out_dir again: what is there is used. In a job of several ranks, call it on one
    of them.
    Raises UserError, with nothing written, for what `read_documents`, `open_indexed` and `load_tokenizer` refuse.
    """
    start = time.perf_counter()
    given = tokenizer if isinstance(tokenizer, Tokenizer) or tokenizer is None else load_tokenizer(tokenizer)
    if not 0 < valid_fraction < 1:
        raise UserError(
            f"valid_fraction={valid_fraction} is not between 0 and 1: give the part to hold out, such as 0.05"
        )
    out = Path(out_dir)
    new_folders = make_folder(out)  # tried first: work for minutes and then find no place to write would be worse
    try:
        if data is not None and indexed.exists(data):
            result = _use_prefix(indexed.strip_suffix(data), out, given, valid_fraction)
        else:
            if data is not None and os.fspath(data).endswith((".bin", ".idx")):
                indexed.open_indexed(data)  # says which of the two is missing
            corpus = builtin_corpus() if data is None else find_corpus(data, key=text_key)
            result = _from_corpus(corpus, out, given, vocab_size, append_eod, valid_fraction, workers)
    except BaseException:
        remove_folders(new_folders)
        raise
    return dataclasses.replace(result, seconds=time.perf_counter() - start)


def prepared(out_dir: str | os.PathLike[str]) -> Prepared | None:
    """What an earlier `prepare` made of text and left in out_dir, if it is whole; the text is not looked at."""
    return _recorded(Path(out_dir), None)


def _from_corpus(
    corpus: Corpus,
    out: Path,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    append_eod: bool,
    fraction: float,
    workers: int,
) -> Prepared:
    inputs = {
        "format": FORMAT,
        "corpus": fingerprint(corpus),
        "tokenizer": _tokenizer_hash(tokenizer) if tokenizer else f"bpe {vocab_size} {tokenizers.__version__}",
        "append_eod": append_eod,
        "valid_fraction": fraction,
    }
    found = _recorded(out, inputs)
    if found is not None:
        return found
    parts = _split(corpus, fraction)  # reads everything once, so that bad input is found before anything is written
    if tokenizer is None:
        tokenizer = train_bpe(_limited(parts[0](), BPE_CHARACTERS), vocab_size=vocab_size)
    encoded = [encode_documents(part(), tokenizer, append_eod=append_eod, workers=workers) for part in parts]
    (out / RECORD).unlink(missing_ok=True)  # from here on what it describes is being replaced
    train, valid = (
        write_documents(batches, str(out / f"{name}_text_document"), tokenizer.vocab_size)
        for name, batches in zip(("train", "valid"), encoded, strict=True)
    )
    folder = str(out / "tokenizer")
    save_tokenizer(tokenizer, folder)
    result = Prepared(train.prefix, valid.prefix, folder, tokenizer.vocab_size, tokenizer.eod, train, valid)
    write_text(out / RECORD, json.dumps({"inputs": inputs, "result": _relative(result)}, indent=2) + "\n")
    return result


def _split(corpus: Corpus, fraction: float) -> tuple[Callable[[], Iterator[str]], Callable[[], Iterator[str]]]:
    """Two functions that read the texts of the training and of the validation part, anew at each call."""
    names = [document.name for document in read_documents(corpus) if document.text]
    if not names:
        raise UserError(f"the corpus {corpus.root} has no text in it (no document that is not empty): give some")
    if len(names) == 1:
        return _cut(corpus, fraction)
    held_out = validation_names(names, fraction)

    def train() -> Iterator[str]:
        return (document.text for document in read_documents(corpus) if document.name not in held_out)

    def valid() -> Iterator[str]:
        return (document.text for document in read_documents(corpus) if document.name in held_out)

    return train, valid


def _cut(corpus: Corpus, fraction: float) -> tuple[Callable[[], Iterator[str]], Callable[[], Iterator[str]]]:
    def whole() -> Document:
        return next(document for document in read_documents(corpus) if document.text)

    if min(len(part.text) for part in cut_document(whole(), fraction)) == 0:
        raise UserError(
            f"the only document of {corpus.root} is too short to hold out {fraction:g} of it: give more text"
        )
    return (
        lambda: iter([cut_document(whole(), fraction)[0].text]),
        lambda: iter([cut_document(whole(), fraction)[1].text]),
    )


def _use_prefix(prefix: str, out: Path, tokenizer: Tokenizer | None, fraction: float) -> Prepared:
    """An existing pair of files: the last documents are for validation."""
    if tokenizer is None:
        raise UserError(
            f"data={prefix!r} is already tokenized: say by which tokenizer (tokenizer=FOLDER with tokenizer.json)"
        )
    data = indexed.open_indexed(prefix)
    indexed.check_tokens(data, tokenizer.vocab_size)
    documents = data.num_documents
    if documents < 2:
        raise UserError(
            f"{prefix}.idx has {documents} document(s), too few to hold some out: give data of at least two"
        )
    first = min(max(int(round((1 - fraction) * documents)), 1), documents - 1)
    at = first / documents
    bounds = data.document_bounds
    cut, total = int(bounds[first]), int(bounds[-1])
    held_out = (data.tokens[int(bounds[k]) : int(bounds[k + 1])] for k in range(first, documents))
    train = Stats(prefix, first, cut, 0, 0.0)
    valid = Stats(prefix, documents - first, total - cut, text_bytes(tokenizer, held_out), 0.0)
    (out / RECORD).unlink(missing_ok=True)  # of text that was used before
    save_tokenizer(tokenizer, out / "tokenizer")
    return Prepared(
        prefix,
        prefix,
        str(out / "tokenizer"),
        tokenizer.vocab_size,
        tokenizer.eod,
        train,
        valid,
        (0.0, at),
        (at, 1.0),
    )


def _limited(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The first texts, up to a number of characters in all: a tokenizer learns no more from more."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def _tokenizer_hash(tokenizer: Tokenizer) -> str:
    text = f"{tokenizer.backend.to_str()}\0{tokenizer.eod_token}"
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()


def _relative(result: Prepared) -> dict[str, Any]:
    """The record's form: file names instead of paths, so that the folder may move."""
    record = dataclasses.asdict(result)
    for name in ("train_prefix", "valid_prefix", "tokenizer_path"):
        record[name] = os.path.basename(record[name])
    for name in ("train", "valid"):
        record[name]["prefix"] = os.path.basename(record[name]["prefix"])
    return record


def _recorded(out: Path, inputs: dict[str, Any] | None) -> Prepared | None:
    """What an earlier call left in `out` for the same inputs (None: for any), if all of it is still there and whole."""
    try:
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
        if inputs is not None and record["inputs"] != inputs:
            return None
        result = record["result"]
        for name in ("train_prefix", "valid_prefix", "tokenizer_path"):
            result[name] = str(out / result[name])
        for name in ("train", "valid"):
            result[name] = Stats(**(result[name] | {"prefix": str(out / result[name]["prefix"])}))
        for name in ("train_split", "valid_split"):
            result[name] = tuple(result[name])
        found = Prepared(**(result | {"reused": True}))
        sizes = [len(indexed.open_indexed(stats.prefix).tokens) for stats in (found.train, found.valid)]
        whole = sizes == [found.train.tokens, found.valid.tokens]
        same_tokenizer = load_tokenizer(found.tokenizer_path).vocab_size == found.vocab_size
    except (OSError, ValueError, KeyError, TypeError):  # none, or damaged: made anew (UserError is a ValueError)
        return None
    return found if whole and same_tokenizer else None
