"""Placements of a value on a mesh axis: torch's `Shard`, `Replicate` and `Partial`, and `Invariant`.

DTensor has one Replicate where gradients need two types. `Replicate` is a value equal on all ranks that work which
*differs* along the axis reads, so its gradient is Partial. `Invariant` is a value equal on all ranks and used alike, so
its gradient is equal on all ranks too (the R and I of `spmd_types`).
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fmegatron.errors import ShardingError
from fmegatron.layout import Type

__all__ = ["Invariant", "Partial", "Placement", "Replicate", "Shard", "placement_of", "type_of"]


class Invariant(Replicate):
    """Equal on all ranks of an axis and used alike there: the gradient is Invariant too. At rest it is Replicate."""

    def __repr__(self) -> str:
        return "Invariant()"

    def __str__(self) -> str:
        return "I"


def type_of(placement: Any) -> Type:
    """The type that a placement (or one of the letters "P", "R", "I", or a dim) stands for."""
    if isinstance(placement, Shard):
        return placement.dim
    if isinstance(placement, Invariant):
        return "I"
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Partial):
        return "P"
    if isinstance(placement, int) or placement in ("P", "R", "I"):
        return placement
    raise ShardingError(
        f"{placement!r} is no placement: use Shard(dim), Replicate(), Invariant() or Partial() of fmegatron.placements"
    )


def placement_of(kind: Type) -> Placement:
    """The placement that a type stands for."""
    if isinstance(kind, int):
        return Shard(kind)
    return {"P": Partial(), "R": Replicate(), "I": Invariant()}[kind]
