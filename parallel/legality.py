"""Is a layout legal? Asked once, before anything is allocated; the answer to an illegal one names the sizes and a fix."""

from __future__ import annotations

import math
from typing import Any

from fmegatron.errors import UserError
from fmegatron.mesh import Mesh


def check_layout(
    mesh: Mesh, *, heads: int, batch_size: int, seq_len: int, microbatches: int = 1, sequence_parallel: bool = False
) -> None:
    """Raises UserError when query heads, batch or sequence cannot be cut as the mesh says.

    heads: query heads of the model. batch_size: sequences of the global batch. seq_len: tokens of a sequence.
    """

    def size(*names: str) -> int:
        return math.prod(mesh.size(mesh.expand(n)) for n in names if n in mesh.names or n in mesh.sizes)

    tp, cp, data = size("tp"), size("cp"), size("dp", "fsdp")
    if heads % tp:
        raise UserError(
            f"the model has {heads} query heads, which do not divide by tp={tp} (mesh {_shown(mesh)}): "
            f"use a tp of {_near_divisors(heads, tp)} or a model whose heads divide"
        )
    if batch_size % data:
        raise UserError(
            f"batch.size {batch_size} does not divide by {data}, the data-parallel ranks of mesh {_shown(mesh)}: "
            f"use {batch_size - batch_size % data or data} or {batch_size + data - batch_size % data}"
        )
    if batch_size // data < microbatches:
        raise UserError(
            f"batch.microbatches {microbatches} needs as many sequences on every rank, but batch.size {batch_size} gives "
            f"each of the {data} data-parallel ranks {batch_size // data}: use fewer microbatches or a larger batch"
        )
    cuts = cp * (tp if sequence_parallel else 1)
    if seq_len % cuts:
        axes = "cp × tp (sequence parallelism)" if sequence_parallel else "cp"
        raise UserError(
            f"batch.seq_len {seq_len} does not divide by {cuts}, the size of {axes} in mesh {_shown(mesh)}: "
            f"use {seq_len - seq_len % cuts or cuts} or {seq_len + cuts - seq_len % cuts}"
        )


def _near_divisors(n: int, near: int) -> str:
    smaller = max(d for d in range(1, near) if n % d == 0)
    larger = next((d for d in range(near + 1, n + 1) if n % d == 0), None)
    return f"{smaller} or {larger}" if larger else f"{smaller}"


def _shown(mesh: Any) -> str:
    return ",".join(f"{name}={mesh.size(axes)}" for name, axes in mesh.names.items() if not name.startswith("tp_"))
