"""The safetensors files of a Hugging Face folder: which tensors there are, parts of one, and writing one tensor at a
time."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import torch

from fmegatron.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BYTES = ("U8",)  # of tensors in MXFP4
BLOCK_SCALED = "F8_E4M3"  # read with the scales beside it alone
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Found:
    """A tensor in a file: which one, its shape, and safetensors' code of its dtype ("BF16")."""

    file: Path
    shape: tuple[int, ...]
    code: str


def tensors_of(folder: Path) -> dict[str, Found]:
    """{name: where and what} of all tensors, from the files' headers. Raises UserError for absent or damaged files."""
    found: dict[str, Found] = {}
    for file in _files(folder):
        with opened(file) as f:
            for name in f.keys():
                part = f.get_slice(name)
                found[name] = Found(file, tuple(part.get_shape()), part.get_dtype())
    return found


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Any]:
    """safetensors.safe_open of a file, whose errors name it."""
    try:
        context = safetensors.safe_open(str(file), framework="pt")  # type: ignore[no-untyped-call]
    except FileNotFoundError:
        raise UserError(f"{file} is missing: download or copy it again") from None
    except (safetensors.SafetensorError, OSError) as e:
        raise UserError(f"{file} is damaged or no safetensors file ({e}): download or copy it again") from None
    with context as f:
        yield f


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as e:
            raise UserError(f"{index} is damaged ({e!r}): it must be JSON with a weight_map") from None
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise UserError(
                f"{folder} lacks {len(missing)} of the {len(names)} files in {INDEX}: {', '.join(missing[:8])}"
            )
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if any(folder.glob("pytorch_model*.bin")):
        raise UserError(
            f"{folder} has pickled weights only (pytorch_model.bin): save it as safetensors with transformers"
        )
    raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}")


def part_of(f: Any, name: str, runs: Sequence[Sequence[tuple[int, int]]], dtype: torch.dtype) -> torch.Tensor:
    """A part of a tensor in an open file: per dim, the ranges (start, stop) wanted, joined. Reads nothing else."""
    stored = f.get_slice(name)
    out = torch.empty([sum(stop - start for start, stop in dim) for dim in runs], dtype=dtype)
    _copy(stored, out, runs, ())
    return out


def _copy(stored: Any, out: torch.Tensor, runs: Sequence[Any], chosen: tuple[slice, ...]) -> None:
    dim = len(chosen)
    if dim == len(runs):
        out.copy_(stored[chosen])
        return
    at = 0
    for start, stop in runs[dim]:
        _copy(stored, out.narrow(dim, at, stop - start), runs, (*chosen, slice(start, stop)))
        at += stop - start


# Writing


@dataclass(frozen=True)
class Entry:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def shards(entries: Sequence[Entry], limit: float) -> dict[str, list[Entry]]:
    """{file name: its tensors}, in order, none larger than `limit` bytes (but for one larger tensor)."""
    groups: list[list[Entry]] = [[]]
    for entry in entries:
        if groups[-1] and sum(e.nbytes for e in groups[-1]) + entry.nbytes > limit:
            groups.append([])
        groups[-1].append(entry)
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def index_of(files: dict[str, list[Entry]]) -> str:
    """The text of model.safetensors.index.json."""
    total = sum(e.nbytes for group in files.values() for e in group)
    names = {e.name: file for file, group in files.items() for e in group}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2) + "\n"


def write_header(file: BinaryIO, entries: Sequence[Entry], metadata: dict[str, str]) -> None:
    """The beginning of a safetensors file; the tensors follow, each by `write_tensor`, in this order.

    safetensors' own writer takes all tensors of a file at once; this way one is in memory.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for e in entries:
        header[e.name] = {"dtype": CODES[e.dtype], "shape": list(e.shape), "data_offsets": [at, at + e.nbytes]}
        at += e.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def write_tensor(file: BinaryIO, x: torch.Tensor) -> None:
    """The bytes of a tensor."""
    file.write(x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def finish(file: BinaryIO) -> None:
    """Everything to disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
