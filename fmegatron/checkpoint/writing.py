"""Saving a state."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from fmegatron.checkpoint import folders, leaves
from fmegatron.checkpoint.ranks import distributed, on_first, together
from fmegatron.errors import UserError
from fmegatron.precision import dtype_name

# A file is put together in host memory, twice its size, so no rank writes larger ones (but for one huge tensor).
FILE_BYTES = 1 << 30


def save(
    folder: str | os.PathLike[str],
    state: Any,
    *,
    step: int,
    meta: dict[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Save a state as FOLDER/checkpoints/step_… and return that path. Every rank must call it.

    state: a pytree of DTensors, of plain tensors that are equal on all ranks (one rank writes each), and of ints,
        floats, bools, strings and None, which must be equal on all ranks too. Ranks may hold different leaves
        (pipeline stages).
    step: names the checkpoint; one of the same step is replaced.
    meta: anything that JSON can hold, for whoever loads it.
    keep: how many of the newest checkpoints stay; None means all. Nothing is removed before the new one is complete.

    Raises UserError, on all ranks, for a leaf or meta that cannot be saved, or a folder that cannot be written.
    """
    if not isinstance(step, int) or step < 0:
        raise UserError(f"step={step!r} must be an int of 0 or more")
    if keep is not None and keep < 1:
        raise UserError(f"keep={keep} must be 1 or more, or None to keep all checkpoints")

    def describe() -> tuple[dict[str, int], dict[str, Any]]:
        try:
            json.dumps(meta)
        except (TypeError, ValueError) as e:
            raise UserError(f"meta cannot be written as JSON ({e}): use dicts, lists, strings and numbers") from None
        found, plain = leaves.split(state)
        return {name: leaves.local(x).nbytes for name, x in found.items()}, plain

    everyone = together(describe)
    values = on_first(lambda: _merged([plain for _, plain in everyone]))
    files = _files([sizes for sizes, _ in everyone])
    temporary = on_first(lambda: folders.begin(folder, step))
    tensors = _writable(leaves.split(state)[0])
    metadata = _write(temporary, tensors, files) if files else None
    held = metadata.state_dict_metadata if metadata is not None else {}
    described = {n: {"shape": list(held[n].size), "dtype": dtype_name(held[n].properties.dtype)} for n in files}
    whole = {"step": step, "meta": meta or {}, "values": values, "tensors": described}
    return on_first(lambda: folders.publish(folder, temporary, whole, keep))


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The plain values of all ranks in one dict."""
    whole: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        for name, value in part.items():
            first = whole.setdefault(name, value)
            if (type(first), repr(first)) != (type(value), repr(value)):
                raise UserError(f"leaf {name!r} of the state is {first!r} on one rank and {value!r} on rank {rank}")
    return whole


def _files(parts: list[dict[str, int]]) -> dict[str, int]:
    """{tensor: number of the file, from 1, that it goes to on each rank}, none above FILE_BYTES on any rank."""
    largest: dict[str, int] = {}
    for part in parts:
        for name, size in part.items():
            largest[name] = max(size, largest.get(name, 0))
    number, filled, found = 1, 0, {}
    for name, size in largest.items():
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        filled += size
        found[name] = number
    return found


def _writable(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values in the form that safetensors takes: contiguous, and no two that share memory (tied leaves)."""
    seen: set[tuple[torch.device, int]] = set()
    found = {}
    for name, x in tensors.items():
        part = leaves.local(x)
        key = (part.device, part.untyped_storage().data_ptr())
        if key in seen or not part.is_contiguous():
            part = part.clone(memory_format=torch.contiguous_format)
        seen.add(key)
        found[name] = leaves.with_local(x, part)
    return found


def _write(temporary: Path, tensors: dict[str, torch.Tensor], files: dict[str, int]) -> Any:
    """Each rank's shards to disk, synced; returns torch's metadata of all of them."""
    writer = HuggingFaceStorageWriter(str(temporary), fqn_to_index_mapping=files, save_distributed=True)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            return dcp.save(tensors, storage_writer=writer, planner=planner, no_dist=not distributed())
    except (CheckpointException, OSError) as e:
        on_first(lambda: folders.abandon(temporary))
        causes = [cause for cause, _ in e.failures.values()] if isinstance(e, CheckpointException) else [e]
        for cause in causes:
            if isinstance(cause, OSError):
                raise UserError(f"cannot write the checkpoint to {temporary.parent}: {cause.strerror or cause}") from e
        raise RuntimeError(f"saving a checkpoint to {temporary.parent} failed: {causes[0]!r}") from e
