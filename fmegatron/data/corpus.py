"""Text to train on: the Python standard library's own sources, a folder or file of text, or JSON lines.

A corpus is a list of files found once; `read_documents` reads them anew each time. Every document has a name that is
the same on every machine (a file's relative name; for JSON lines file:line), and the split into training and validation
hashes it, so adding documents moves none from one side to the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fmegatron.errors import UserError

TEXT_SUFFIXES = frozenset(
    ".txt .text .md .rst .tex .html .xml .csv .tsv .toml .yaml .yml .ini .cfg .log .srt "
    ".py .pyi .c .h .cc .cpp .hpp .cu .cuh .rs .go .java .kt .scala .js .jsx .ts .tsx .rb .pl .php .lua .sh .sql .r "
    ".jl .hs .ml .swift .cs .f90 .m .el .lisp".split()
)
JSONL_SUFFIXES = frozenset((".jsonl", ".ndjson", ".json"))
SKIPPED_FOLDERS = frozenset(("__pycache__", "site-packages", "dist-packages", "node_modules"))
TEST_FOLDERS = frozenset(("test", "tests", "idle_test"))


@dataclass(frozen=True)
class Document:
    """One text and the name by which it is split: its file's name relative to the corpus; for JSON lines FILE:LINE."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The files of a corpus, relative to `root` and in their order of reading.

    key: the field that holds the text of each JSON line, None for plain text. strict: is a file that is not UTF-8 an
    error, or is it left out?
    """

    root: Path
    files: tuple[str, ...]
    key: str | None = None
    strict: bool = True


def builtin_corpus() -> Corpus:
    """The running Python's standard library, about 12 MB in 700 files: real text on any machine, with no download.

    Folders of tests and installed packages are left out. Raises UserError where Python comes without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = tuple(name for name in _walk(root, skip=TEST_FOLDERS) if name.endswith(".py"))
    if not files:
        raise UserError(
            f"this Python has no library sources in {root} to train on: give text of your own with data=PATH"
        )
    return Corpus(root, files, strict=False)


def find_corpus(data: str | os.PathLike[str], *, key: str = "text") -> Corpus:
    """The corpus at a path: a .jsonl file, any other file (one text), or a folder of text files or, lacking those,
    .jsonl.

    Raises UserError if there is nothing there or nothing in it.
    """
    path = Path(data)
    if path.is_file():
        return Corpus(path.parent, (path.name,), key if path.suffix in JSONL_SUFFIXES else None)
    if not path.is_dir():
        raise UserError(
            f"data={str(path)!r} does not exist: give a .jsonl or text file, a folder of text or a .bin/.idx prefix"
        )
    names = list(_walk(path))
    texts = tuple(name for name in names if Path(name).suffix.lower() in TEXT_SUFFIXES)
    lines = tuple(name for name in names if Path(name).suffix.lower() in (".jsonl", ".ndjson"))
    if not texts and not lines:
        raise UserError(
            f"the folder data={str(path)!r} has no text: put files such as *.txt, *.md, *.py or *.jsonl in it"
        )
    return Corpus(path, texts) if texts else Corpus(path, lines, key)


def read_documents(corpus: Corpus) -> Iterator[Document]:
    """All documents, in order. Empty text files and blank lines are no documents; a JSON line with empty text is one.

    Raises UserError for text that is not UTF-8 (names file and byte offset), for broken JSON, and for a line without
    the key or with something else than text in it (names file and line).
    """
    for name in corpus.files:
        path = corpus.root / name
        if corpus.key is not None:
            yield from _read_jsonl(path, name, corpus.key)
        else:
            text = _read_text(path, corpus.strict)
            if text:
                yield Document(name, text)


def validation_names(names: Iterable[str], fraction: float) -> frozenset[str]:
    """Of these document names, those that go to validation: the ones whose hash is below `fraction`.

    At least one and never all of them (the lowest and the highest hash decide). Raises UserError for fewer than two
    names or a fraction outside (0, 1).
    """
    if not 0 < fraction < 1:
        raise UserError(f"valid_fraction={fraction} is not between 0 and 1: give the part to hold out, such as 0.05")
    ranked = sorted((_unit_hash(name), name) for name in set(names))
    if len(ranked) < 2:
        raise UserError(f"{len(ranked)} document(s) cannot be split into training and validation: give at least two")
    below = sum(value < fraction for value, _ in ranked)
    return frozenset(name for _, name in ranked[: min(max(below, 1), len(ranked) - 1)])


def cut_document(document: Document, fraction: float) -> tuple[Document, Document]:
    """A single document cut in two, training and validation: at the last line end before the last `fraction` of it."""
    at = int(len(document.text) * (1 - fraction))
    line_end = document.text.rfind("\n", 0, at) + 1
    at = line_end or max(at, 1)
    return Document(document.name, document.text[:at]), Document(document.name, document.text[at:])


def fingerprint(corpus: Corpus) -> str:
    """A hash that changes when files come, go, or change their size or time; it reads no content."""
    digest = hashlib.blake2b(f"{corpus.root.resolve()}\0{corpus.key}\0".encode(), digest_size=16)
    for name in corpus.files:
        stat = os.stat(corpus.root / name)
        digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> list[str]:
    """Relative names of all files below root, sorted; hidden ones and caches left out."""
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name not in SKIPPED_FOLDERS and name not in skip and not name.startswith(".")
        ]
        found += [Path(folder, name).relative_to(root).as_posix() for name in files if not name.startswith(".")]
    return sorted(found)


def _read_text(path: Path, strict: bool) -> str:
    raw = _read_bytes(path)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if not strict:
            return ""
        raise UserError(
            f"{path} is not UTF-8 text (byte 0x{raw[error.start]:02x} at offset {error.start}): "
            "convert it or take it out"
        ) from None


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; make it readable or take it out") from None


def _read_jsonl(path: Path, name: str, key: str) -> Iterator[Document]:
    try:
        file = open(path, "rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; make it readable or take it out") from None
    with file:
        offset = 0
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield Document(f"{name}:{number}", _text_of_line(raw, f"{path} line {number}", offset, key))
            offset += len(raw)


def _text_of_line(raw: bytes, where: str, offset: int, key: str) -> str:
    try:
        row = json.loads(raw.decode("utf-8-sig" if offset == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise UserError(f"{where} is not UTF-8 text (byte at offset {at} of the file): convert the file") from None
    except json.JSONDecodeError as error:
        at = error.colno
        raise UserError(f"{where} is not valid JSON ({error.msg}, column {at}): each line must be one object") from None
    except RecursionError:
        raise UserError(f"{where} is JSON nested too deeply: each line must be a flat object with {key!r}") from None
    if not isinstance(row, dict):
        raise UserError(
            f"{where} is a JSON {type(row).__name__}: each line must be one JSON object with the key {key!r}"
        )
    if key not in row:
        others = ", ".join(repr(name) for name in row) or "none"
        raise UserError(f"{where} has no key {key!r} (it has {others}): name the key of the text, or mend the line")
    text = row[key]
    if not isinstance(text, str):
        raise UserError(f"{where} has a {type(text).__name__} under {key!r}: the text must be a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        at = error.start
        raise UserError(f"{where} has half a surrogate pair at character {at} of {key!r}: mend the line") from None
    return text


def _unit_hash(name: str) -> float:
    """A hash of the name in [0, 1)."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
