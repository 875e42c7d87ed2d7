"""Parameters declared once: shape, named dims, initial value, and the dims that each is applied across.

A *spec* is a pytree of `Param`, layers under their global index: {"embed": Param(…), "layers": {0: {…}, 1: {…}}}.
From it come the sharded initial values, meta tensors, placements, gradient reductions and weight-decay masks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fmegatron import tree
from fmegatron.dtensor import DTensor
from fmegatron.equations import parse_side
from fmegatron.errors import ShardingError, UserError
from fmegatron.initializers import Normal
from fmegatron.precision import dtype_name
from fmegatron.random import Key, fold_in

if TYPE_CHECKING:
    from fmegatron.sharding import Sharding


@dataclass(frozen=True)
class Param:
    """One parameter.

    shape: global sizes.
    dims: a name for every dimension, "embed kv head".
    init: (key, shape, *, index, dtype, device) -> tensor, such as `initializers.normal(0.02)`.
    over: the dims that the parameter is applied across and its gradient summed over ("batch seq"). None means that it
        is inferred from the program (`infer_over`); it is checked when given.
    dtype: its own dtype, at rest and in equations; None means the `Precision`'s.
    placements: its layout by mesh axis, {"tp": Shard(1)}, in place of the rules' for these axes.
    decay: does weight decay apply? None means yes for two dims or more.
    """

    shape: tuple[int, ...]
    dims: str
    init: Any = Normal(0.02)
    over: str | None = None
    dtype: torch.dtype | None = None
    placements: Mapping[str, Any] | None = None
    decay: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        side = parse_side(self.dims)
        if side.region:
            raise ShardingError(f"Param dims {self.dims!r}: a parameter has no `|`")
        if len(side.dims) != len(self.shape):
            raise ShardingError(
                f"Param of shape {self.shape} has {len(self.shape)} dims, but dims {self.dims!r} names {len(side.dims)}: "
                "name every dimension once"
            )
        if any(not isinstance(n, int) or n < 1 for n in self.shape):
            raise ShardingError(f"Param {self.dims!r} of shape {self.shape}: every size must be an int of 1 or more")
        if self.over is not None:
            parse_side(self.over)

    @property
    def names(self) -> tuple[str, ...]:
        return parse_side(self.dims).dims

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def params_of(spec: Any) -> dict[str, Param]:
    """{dotted name: Param} of a spec. Raises UserError when a leaf is no Param."""
    found = tree.named(spec)
    for path, leaf in found.items():
        if not isinstance(leaf, Param):
            raise UserError(f"spec leaf {path!r} is a {type(leaf).__name__}, not a Param")
    return found


def sizes(spec: Any) -> dict[str, int]:
    """{dim: size} over the whole spec. Raises ShardingError when one name has two sizes, naming both parameters."""
    known: dict[str, tuple[int, str]] = {}
    for path, param in params_of(spec).items():
        for name, size in zip(param.names, param.shape, strict=True):
            first, where = known.setdefault(name, (size, path))
            if first != size:
                raise ShardingError(
                    f"dim {name!r} has size {first} in {where!r} and {size} in {path!r}: use two names for two dims"
                )
    return {name: size for name, (size, _) in known.items()}


def count(spec: Any) -> int:
    """Number of parameters (global elements)."""
    return sum(p.numel for p in params_of(spec).values())


def init(spec: Any, key: Key, *, sh: Sharding | None = None, device: torch.device | str | None = None) -> Any:
    """The initial parameters. Each rank makes only its own shards; the global value is the same on every mesh.

    Leaves are DTensors on a mesh of more than one rank, else plain tensors. A leaf's key is folded with its name, so
    that adding a layer changes no other leaf.
    """
    from fmegatron.sharding import Sharding

    sh = sh or Sharding()
    sizes(spec)
    sh.check_spec(spec)
    where = torch.device(device) if device is not None else sh.device

    def make(path: str, param: Param) -> torch.Tensor:
        local = param.init(
            fold_in(key, path), param.shape, index=sh.stored_index(param), dtype=sh.param_dtype(param), device=where
        )
        return sh.at_rest(local, param)

    return tree.like(spec, [make(path, param) for path, param in params_of(spec).items()])


def abstract(spec: Any, *, sh: Sharding | None = None) -> Any:
    """The parameters on the meta device: shapes, dtypes and placements of `init`, no memory."""
    from fmegatron.sharding import Sharding

    sh = sh or Sharding()
    sizes(spec)
    sh.check_spec(spec)

    def make(param: Param) -> torch.Tensor:
        return sh.at_rest(torch.empty(sh.stored_shape(param), dtype=sh.param_dtype(param), device="meta"), param)

    return tree.tree_map(make, spec)


def describe(spec: Any, *, sh: Sharding | None = None) -> str:
    """A readable table of a spec: name, shape, dims, what it is applied across, placements, elements and bytes per
    rank."""
    from fmegatron.sharding import Sharding

    sh = sh or Sharding()
    sizes(spec)
    rows = [("name", "shape", "dims", "over", "dtype", "placements", "elements", "bytes/rank")]
    total = held = 0
    for path, p in params_of(spec).items():
        local = math.prod(sh.stored_shape(p)) * sh.param_dtype(p).itemsize
        shown = ", ".join(f"{a}:{x}" for a, x in zip(sh.axis_order, sh.stored_placements(p), strict=True)) or "-"
        over = p.over if p.over is not None else "?"
        shape = "×".join(map(str, p.shape)) or "scalar"
        rows.append((path, shape, p.dims, over, dtype_name(sh.param_dtype(p)), shown, f"{p.numel:,}", f"{local:,}"))
        total, held = total + p.numel, held + local
    rows.append(("total", "", "", "", "", "", f"{total:,}", f"{held:,}"))
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]

    def line(row: tuple[str, ...]) -> str:
        cells = [c.rjust(w) if i >= 6 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join(line(r) for r in rows)


def local_bytes(values: Any) -> int:
    """Bytes that this rank holds of a tree of tensors or DTensors."""
    locals_ = [x.to_local() if isinstance(x, DTensor) else x for x in tree.leaves(values) if tree.is_tensor(x)]
    return sum(x.numel() * x.element_size() for x in locals_)
