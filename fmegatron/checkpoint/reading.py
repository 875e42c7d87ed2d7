"""Loading a state, onto any mesh."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException

from fmegatron import tree
from fmegatron.checkpoint import folders, leaves
from fmegatron.checkpoint.folders import Info
from fmegatron.checkpoint.ranks import distributed, on_first, together
from fmegatron.dtensor import DTensor
from fmegatron.errors import UserError
from fmegatron.precision import dtype_name

SHOWN = 8  # names listed in an error


def load(
    path: str | os.PathLike[str],
    like: Any,
    *,
    strict: bool = True,
    cast: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """The state that was saved, in new tensors with the structure, shapes, dtypes and placements of `like`.

    Every rank must call it.

    path: a run's folder (its newest complete checkpoint) or one checkpoint.
    like: a pytree of tensors, which may be on the meta device, and of plain values, which come from the checkpoint. Its
        mesh may be any: each rank allocates and reads its own shards only. {"params": …} loads a part (strict=False).
    strict: must the checkpoint hold nothing else? Missing leaves are an error either way.
    cast: convert tensors that were saved in another dtype; by default they are an error.
    device: where plain tensors go for which `like` has meta tensors (default cpu); DTensors go where their mesh lies,
        and tensors that have memory keep their device.

    Raises UserError, on all ranks and before anything is allocated, for a checkpoint that is absent, incomplete,
    damaged or of another model, naming the tensors.
    """
    return _load(path, like, "" if strict else None, cast, device)


def load_part(
    path: str | os.PathLike[str],
    name: str,
    like: Any,
    *,
    cast: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """One entry of the state that was saved, such as "params", as `load` gives the whole; no other part is read.

    Raises UserError as `load`, also when the checkpoint holds more leaves of this part than `like`.
    """
    return _load(path, {name: like}, f"{name}.", cast, device)[name]


def saved_dtype(path: str | os.PathLike[str], name: str) -> torch.dtype:
    """The dtype in which a tensor was saved. Raises UserError when the checkpoint has no tensor of this dotted name."""
    found = folders.info(path)
    if name not in found.tensors:
        raise UserError(f"checkpoint {found.path} has no tensor {name!r}; it has {listed('tensors', [*found.tensors])}")
    return getattr(torch, found.tensors[name][1])


def _load(path: Any, like: Any, scope: str | None, cast: bool, device: Any) -> Any:
    """scope: the beginning of the names of which the checkpoint may not hold more than `like`; None: no such names."""
    tensors, values = leaves.split(like)
    # rank 0 looks for all, so that every rank loads the same one
    found = on_first(lambda: folders.info(path))
    wanted = {name for names in together(lambda: [*tensors, *values]) for name in names}

    def check() -> None:
        if problems := differences(found, tensors, values, wanted, scope, cast):
            raise UserError(f"checkpoint {found.path} does not fit: {'; '.join(problems)}")

    together(check)
    new = {name: _empty(x, device) for name, x in tensors.items()}
    if found.tensors:
        _read(found, new)
    return tree.like(like, [new[n] if n in new else found.values[n] for n in tree.paths(like)])


def differences(
    found: Info,
    tensors: dict[str, torch.Tensor],
    values: dict[str, Any],
    wanted: set[str],
    scope: str | None,
    cast: bool,
) -> list[str]:
    """In words, why a checkpoint does not fit what is to be loaded. wanted: the names on all ranks."""
    held = {**dict.fromkeys(found.tensors, "a tensor"), **{n: leaves.kind(v) for n, v in found.values.items()}}
    here = {n: leaves.kind(v) for n, v in {**tensors, **values}.items()}
    both = [n for n in here if n in held]
    problems = [
        listed("missing in it", [n for n in here if n not in held]),
        listed("only in it", [n for n in held if scope is not None and n.startswith(scope) and n not in wanted]),
        listed("of another kind", [f"{n} ({held[n]} in it, {here[n]} here)" for n in both if held[n] != here[n]]),
    ]
    shapes, dtypes = [], []
    for name, x in tensors.items():
        shape, dtype = found.tensors.get(name, (tuple(x.shape), dtype_name(x.dtype)))
        if shape != tuple(x.shape):
            shapes.append(f"{name} ({list(shape)} in it, {list(x.shape)} here)")
        if dtype != dtype_name(x.dtype):
            dtypes.append(f"{name} ({dtype} in it, {dtype_name(x.dtype)} here)")
    problems.append(listed("of another shape", shapes))
    if dtypes and not cast:
        problems.append(listed("of another dtype", dtypes) + " (cast=True converts)")
    return [p for p in problems if p]


def listed(what: str, names: Sequence[str]) -> str:
    """ "3 missing: a, b, c", with the first SHOWN names; empty when there are none."""
    if not names:
        return ""
    more = f", … and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:SHOWN])}{more}"


def _empty(x: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    part = leaves.local(x)
    where: Any = part.device
    if part.is_meta:
        where = device or "cpu"
        if isinstance(x, DTensor):
            kind = x.device_mesh.device_type
            where = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    return leaves.with_local(x, torch.empty(part.shape, dtype=part.dtype, device=where))


def _read(found: Info, new: dict[str, torch.Tensor]) -> None:
    """Fill new tensors from a checkpoint's files."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                new,
                storage_reader=HuggingFaceStorageReader(str(found.path)),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=not distributed(),
            )
    except CheckpointException as e:
        cause = next(iter(e.failures.values()))[0]
        size = sum(math.prod(shape) for shape, _ in found.tensors.values())
        raise UserError(f"checkpoint {found.path} ({size:,} elements) cannot be read: {cause}; use another one") from e
