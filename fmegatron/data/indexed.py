"""Token files in Megatron-LM's format: PREFIX.bin holds the token ids, PREFIX.idx says where sequences and documents
lie.

`.bin` is the ids back to back, little-endian, with no header. `.idx` is, little-endian:

    9 bytes "MMIDIDX\\0\\0" · u64 version 1 · u8 dtype code · u64 S, the number of sequences · u64 D, documents + 1
    i32[S] lengths in tokens · i64[S] byte offsets into .bin · i64[D] document boundaries · optionally i8[S] modes

Document k is the sequences [boundary[k], boundary[k + 1]); an empty document repeats a boundary.
"""

from __future__ import annotations

import contextlib
import os
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fmegatron.data.files import make_folder, partial_name, remove_folders
from fmegatron.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CODES = {np.dtype(name): code for code, name in DTYPES.items()}


def token_dtype(vocab_size: int | None) -> np.dtype:
    """The dtype that Megatron chooses for ids of this vocabulary: uint16 below 65,500, else int32."""
    return np.dtype("<u2" if vocab_size is not None and vocab_size < 65500 else "<i4")


@dataclass(frozen=True, eq=False)
class Indexed:
    """An opened pair of files; all arrays are read-only memory maps.

    lengths [sequences] and offsets [sequences] are in tokens and in bytes; documents [documents + 1] counts sequences;
    tokens is the whole .bin as one array; modes [sequences] only in multimodal files.
    """

    prefix: str
    tokens: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray
    modes: np.ndarray | None = None

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def sequence_bounds(self) -> np.ndarray:
        """int64 [sequences + 1]: sequence i is tokens[bounds[i] : bounds[i + 1]]."""
        return np.append(self.offsets // self.tokens.dtype.itemsize, np.int64(len(self.tokens)))

    @property
    def document_bounds(self) -> np.ndarray:
        """int64 [documents + 1]: document k is tokens[bounds[k] : bounds[k + 1]]."""
        return self.sequence_bounds[self.documents]

    def sequence(self, i: int) -> np.ndarray:
        """The tokens of sequence i."""
        start = int(self.offsets[i]) // self.tokens.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[i])]

    def document(self, k: int) -> list[np.ndarray]:
        """The sequences of document k."""
        return [self.sequence(i) for i in range(int(self.documents[k]), int(self.documents[k + 1]))]


def strip_suffix(prefix: str | os.PathLike[str]) -> str:
    """A prefix as a string; a name that ends in .bin or .idx is taken for its pair."""
    name = os.fspath(prefix)
    return name[:-4] if name.endswith((".bin", ".idx")) else name


def exists(prefix: str | os.PathLike[str]) -> bool:
    """Are there PREFIX.bin and PREFIX.idx?"""
    name = strip_suffix(prefix)
    return os.path.isfile(name + ".bin") and os.path.isfile(name + ".idx")


def open_indexed(prefix: str | os.PathLike[str]) -> Indexed:
    """Open PREFIX.bin and PREFIX.idx by memory map, and check them.

    Raises UserError, naming the file, when one is missing, is no such file, is cut short, or disagrees with the other.
    """
    name = strip_suffix(prefix)
    for path in (name + ".idx", name + ".bin"):
        if not os.path.isfile(path):
            raise UserError(f"no file {path}: a prefix names a pair PREFIX.bin and PREFIX.idx (`fmegatron preprocess`)")
    idx, bin_ = name + ".idx", name + ".bin"
    dtype, num_sequences, num_boundaries = _read_header(idx)

    size = os.path.getsize(idx)
    expected = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if size not in (expected, expected + num_sequences):
        raise UserError(
            f"{idx} has {size} bytes where its header ({num_sequences} sequences, {num_boundaries} document "
            f"boundaries) needs {expected}: the file is damaged or cut short; write it again"
        )
    raw = np.memmap(idx, dtype=np.uint8, mode="r")
    at = HEADER.size
    lengths = raw[at : at + 4 * num_sequences].view("<i4")
    at += 4 * num_sequences
    offsets = raw[at : at + 8 * num_sequences].view("<i8")
    at += 8 * num_sequences
    documents = raw[at : at + 8 * num_boundaries].view("<i8")
    modes = raw[expected:].view("<i1") if size > expected else None

    tokens = _map_tokens(bin_, dtype)
    _check_index(idx, bin_, tokens, lengths, offsets, documents)
    return Indexed(name, tokens, lengths, offsets, documents, modes)


def check_tokens(data: Indexed, vocab_size: int, *, chunk: int = 1 << 24) -> None:
    """Scan all token ids, a chunk at a time. Raises UserError that names the first id outside [0, vocab_size)."""
    for start in range(0, len(data.tokens), chunk):
        part = data.tokens[start : start + chunk]
        if int(part.max()) < vocab_size and int(part.min()) >= 0:
            continue
        position = start + int(np.argmax((part >= vocab_size) | (part < 0)))
        bounds = data.document_bounds
        document = int(np.searchsorted(bounds, position, side="right")) - 1
        raise UserError(
            f"token id {int(data.tokens[position])} at position {position - int(bounds[document])} of document "
            f"{document} of {data.prefix}.bin is outside the vocabulary [0, {vocab_size}): use the tokenizer that "
            "wrote the data, or a model with a larger vocab_size"
        )


class IndexedWriter:
    """Writes a pair of files as a stream: `with IndexedWriter(prefix, dtype) as out: out.add_document([ids, ids])`.

    The files appear under their final names only when the block ends without an error; otherwise nothing is left
    behind.
    Raises UserError for a dtype without a code, a folder that is not writable and ids that do not fit the dtype.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: Any) -> None:
        self.prefix = strip_suffix(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            names = ", ".join(np.dtype(name).name for name in DTYPES.values())
            raise UserError(f"dtype={self.dtype.name} has no code in the .idx format: choose one of {names}")
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._bin, self._idx = Path(self.prefix + ".bin"), Path(self.prefix + ".idx")
        self._new_folders = make_folder(self._bin.parent)
        try:
            self._file = open(partial_name(self._bin), "wb")
        except OSError as failure:
            raise self._failed(failure) from None

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as failure:
            raise self._failed(failure) from None
        finally:
            self._file.close()
            for path in (partial_name(self._bin), partial_name(self._idx)):
                with contextlib.suppress(OSError):
                    path.unlink()
            remove_folders(self._new_folders)  # a folder that holds the finished files is not empty and stays

    def add_document(self, sequences: Iterable[Any]) -> None:
        """Append one document of any number of sequences; none at all makes an empty document."""
        for sequence in sequences:
            self._append(np.asarray(sequence))
            self._lengths.append(len(sequence))
        self._documents.append(len(self._lengths))

    def add_documents(self, tokens: np.ndarray, lengths: Iterable[int]) -> None:
        """Append documents of one sequence each, their ids back to back; a length of 0 makes an empty document."""
        self._append(tokens)
        for length in lengths:
            if length:
                self._lengths.append(length)
            self._documents.append(len(self._lengths))

    def _append(self, tokens: np.ndarray) -> None:
        if tokens.size == 0:
            return
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            low, high = tokens.min(), tokens.max()
            if tokens.dtype.kind not in "iu" or low < limits.min or high > limits.max:
                raise UserError(
                    f"token ids from {low} to {high} do not fit dtype={self.dtype.name} of {self.prefix}.bin: "
                    "take the dtype from token_dtype(vocab_size)"
                )
        try:
            self._file.write(np.ascontiguousarray(tokens, dtype=self.dtype).tobytes())
        except OSError as failure:
            raise self._failed(failure) from None

    def _failed(self, failure: OSError) -> UserError:
        return UserError(
            f"cannot write {self.prefix}.bin/.idx: {failure.strerror}; free space or choose another folder"
        )

    def _finish(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.zeros(0, np.int32)
        offsets = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1], out=offsets[1:])
        offsets *= self.dtype.itemsize
        with open(partial_name(self._idx), "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(self._documents)))
            file.write(lengths.astype("<i4", copy=False).tobytes())
            file.write(offsets.astype("<i8", copy=False).tobytes())
            file.write(np.frombuffer(self._documents, dtype=np.int64).astype("<i8", copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())
        self._file.flush()
        os.fsync(self._file.fileno())
        # An old index goes first and the new one comes last: at no moment does an index stand beside another's tokens.
        self._idx.unlink(missing_ok=True)
        os.replace(partial_name(self._bin), self._bin)
        os.replace(partial_name(self._idx), self._idx)


def merge(prefixes: Iterable[str | os.PathLike[str]], output_prefix: str | os.PathLike[str]) -> None:
    """Concatenate several pairs of files of one dtype into one, documents kept as they are.

    Raises UserError when there is none or their dtypes differ.
    """
    parts = [open_indexed(prefix) for prefix in prefixes]
    if not parts:
        raise UserError("prefixes is empty: name at least one pair of files to merge")
    for part in parts[1:]:
        if part.tokens.dtype != parts[0].tokens.dtype:
            raise UserError(
                f"{part.prefix} holds {part.tokens.dtype} but {parts[0].prefix} {parts[0].tokens.dtype}: "
                "merge files of one dtype (preprocess them with one tokenizer)"
            )
    with IndexedWriter(output_prefix, parts[0].tokens.dtype) as out:
        for part in parts:
            for k in range(part.num_documents):
                out.add_document(part.document(k))


def _read_header(idx: str) -> tuple[np.dtype, int, int]:
    """(dtype, number of sequences, number of document boundaries)."""
    with open(idx, "rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or head[: len(MAGIC)] != MAGIC:
        raise UserError(
            f"{idx} is no Megatron index (it does not begin with MMIDIDX): give the prefix of a .bin/.idx pair"
        )
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(head)
    if version != VERSION:
        raise UserError(f"{idx} has version {version}: only version {VERSION} is known; write it again")
    if code not in DTYPES:
        raise UserError(f"{idx} has dtype code {code}: known are {sorted(DTYPES)}; the file is damaged, write it again")
    return np.dtype(DTYPES[code]), num_sequences, num_boundaries


def _map_tokens(path: str, dtype: np.dtype) -> np.ndarray:
    size = os.path.getsize(path)
    if size % dtype.itemsize:
        unit = f"{dtype.itemsize} ({dtype.name})"
        raise UserError(f"{path} has {size} bytes, no multiple of {unit}: it is cut short; write it again")
    return np.memmap(path, dtype=dtype, mode="r") if size else np.zeros(0, dtype)


def _check_index(
    idx: str, bin_: str, tokens: np.ndarray, lengths: np.ndarray, offsets: np.ndarray, documents: np.ndarray
) -> None:
    total = int(lengths.sum(dtype=np.int64))
    if total != len(tokens):
        raise UserError(
            f"{bin_} holds {len(tokens)} tokens but {idx} describes {total}: the two belong to different data, "
            "or one is cut short; write both again"
        )
    ends = np.cumsum(lengths, dtype=np.int64) * tokens.dtype.itemsize
    if (lengths < 0).any() or (offsets[:1] != 0).any() or not np.array_equal(offsets[1:], ends[:-1]):
        raise UserError(
            f"{idx} has lengths and offsets that do not lie back to back: the file is damaged, write it again"
        )
    ends_right = len(documents) > 0 and documents[0] == 0 and documents[-1] == len(lengths)
    if not ends_right or (np.diff(documents) < 0).any():
        raise UserError(
            f"{idx} has document boundaries that do not rise from 0 to {len(lengths)}, its number of sequences: "
            "the file is damaged, write it again"
        )
