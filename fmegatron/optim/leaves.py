"""What optimizers do with the leaves of a tree, plain tensors or DTensors: local shards, buffers, positions, groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fmegatron import tree
from fmegatron.dtensor import DTensor
from fmegatron.simulation import lift, simulating

Member = TypeVar("Member")


def plain_only() -> bool:
    """Plain operations only: under torch.func, or in a compiled graph."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def no_grad() -> Any:
    """Updates and norms are not differentiated, but by torch.func."""
    return nullcontext() if plain_only() else torch.no_grad()


def local_of(x: Tensor) -> Tensor:
    """The local shard."""
    return x.to_local() if type(x) is not Tensor and isinstance(x, DTensor) else x


def buffer_of(x: Tensor) -> Tensor:
    """The local shard, which a kernel may write to. In a simulation a plain tensor gets a copy a rank: a kernel that
    writes to it beside simulated tensors would run once a rank."""
    if type(x) is Tensor and not torch._C._len_torch_dispatch_stack():
        return x
    return lift(local_of(x), torch.distributed.get_world_size()) if simulating() else local_of(x)


def holder_of(local: Tensor, leaf: Tensor) -> Tensor:
    """The leaf itself if `local` is its buffer, else a new one at its placements."""
    return leaf if leaf is local or local_of(leaf) is local else wrapped(local, leaf)


def wrapped(local: Tensor, like: Tensor) -> Tensor:
    """A local shard as a leaf with the shape and placements of another."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def layout_of(x: Tensor) -> tuple[Any, ...]:
    """What two leaves must share to be updated together: the shape and the placements."""
    return (tuple(x.shape), x.placements) if isinstance(x, DTensor) else (tuple(x.shape),)


def cuts_of(x: Tensor) -> list[tuple[DeviceMesh, int, int]]:
    """(mesh, mesh dim, tensor dim) of every mesh dim larger than one that cuts a leaf, in the order of the mesh."""
    if not isinstance(x, DTensor):
        return []
    from torch.distributed.tensor import Shard

    mesh = x.device_mesh
    return [(mesh, d, p.dim) for d, p in enumerate(x.placements) if isinstance(p, Shard) and mesh.size(d) > 1]


def positions_of(x: Tensor) -> list[Tensor | None]:
    """Per dim, the global positions that the local shard holds (int64), or None for all."""
    cut = {dim for _, _, dim in cuts_of(x)}
    return [_positions(x, dim) if dim in cut else None for dim in range(x.ndim)]


def _positions(x: Any, dim: int) -> Tensor:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    here = [Shard(0) if isinstance(p, Shard) and p.dim == dim else Replicate() for p in x.placements]
    every = torch.arange(x.shape[dim], device=x.device)
    return distribute_tensor(every, x.device_mesh, here, src_data_rank=None).to_local()


def zeros_of(p: Any, dtype: torch.dtype | None = None) -> Any:
    """Zeros at a parameter's placements, or None where there is nothing to train.

    dtype: None means float64 for float64 parameters, else float32.
    """
    if not tree.is_float(p):
        return None
    with no_grad():
        zeros = torch.zeros_like(local_of(p), dtype=dtype or wide(p), memory_format=torch.contiguous_format)
        return wrapped(zeros, p)


def wide(*tensors: Tensor) -> torch.dtype:
    """The dtype to compute in: float64 if one of the tensors has it, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def widened(*tensors: Tensor) -> list[Tensor]:
    """In the dtype to compute in."""
    dtype = wide(*tensors)
    return [x.to(dtype) for x in tensors]


def grouped(members: Iterable[Member], kind: Callable[[Member], Any]) -> dict[Any, list[Member]]:
    """{kind: its members, in their order}."""
    groups: dict[Any, list[Member]] = defaultdict(list)
    for i in members:
        groups[kind(i)].append(i)
    return groups
