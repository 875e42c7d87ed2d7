"""`vmap` and `jacrev` that know about ranks.

torch.func's own work on sharded programs where what is mapped is the same on all ranks: `vmap` over seeds,
directions, or batches of which every rank holds its rows; `jacrev` of an output that all ranks hold. Where the
mapped dim, or the output, is itself cut over ranks, rank r's item i is another one than rank s's, and sums over
ranks would add them up. These two ask which dims those are, and refuse. (grad, vjp and reverse over reverse need
nothing of the kind; forward mode is not supported over collectives.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fmegatron.equations import parse_side
from fmegatron.errors import ShardingError
from fmegatron.sharding import Sharding


def vmap(f: Callable[..., Any], in_dims: Any = 0, out_dims: Any = 0, *, sh: Sharding, dim: str) -> Callable[..., Any]:
    """torch.func.vmap over a dim named `dim` ("" for one that no rule knows, such as seeds).

    Raises ShardingError when mesh axes hold that dim.
    """
    _refuse(sh, dim, "vmap over")
    return torch.func.vmap(f, in_dims, out_dims)


def jacrev(f: Callable[..., Any], argnums: Any = 0, *, sh: Sharding, dims: str) -> Callable[..., Any]:
    """torch.func.jacrev of a function whose output has the dims `dims` ("" for a scalar).

    Raises ShardingError when mesh axes hold one of them: gather the output with sh(y, "batch -> every") first.
    """
    _refuse(sh, dims, "jacrev of an output with")
    return torch.func.jacrev(f, argnums)


def _refuse(sh: Sharding, dims: str, what: str) -> None:
    for name in parse_side(dims).dims:
        if axes := sh.axes(name):
            raise ShardingError(
                f"{what} dim {name!r}, which lies on mesh axes {', '.join(axes)}: its item i is another one on each rank, and sums over "
                "ranks would add them up; use a dim that no axis holds"
            )
