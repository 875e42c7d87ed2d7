"""Is a layout legal? Asked once, before anything is allocated; the answer to an illegal one names the sizes and a
fix."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

from fmegatron.errors import UserError
from fmegatron.mesh import Mesh

AXES = {
    "dp": "batch rows",
    "fsdp": "batch rows",
    "cp": "sequence",
    "tp": "heads, mlp and vocabulary",
}


def check_layout(
    mesh: Mesh,
    *,
    heads: int,
    batch_size: int,
    seq_len: int,
    microbatches: int = 1,
    sequence_parallel: bool = False,
    store: Sequence[str] = (),
) -> None:
    """Raises UserError for an axis that divides nothing, and when query heads, batch or sequence cannot be cut as
    the mesh says.

    heads: query heads of the model. batch_size: sequences of the global batch. seq_len: tokens of a sequence. store:
    axes that hold parameters at rest.
    """

    def size(*names: str) -> int:
        return math.prod(mesh.size(mesh.expand(n)) for n in names if n in mesh.names or n in mesh.sizes)

    given = [name for name in mesh.names if not name.startswith("tp_")]
    for name in given:
        if name not in AXES:
            near = difflib.get_close_matches(name, AXES, 1)
            known = ", ".join(f"{axis} ({what})" for axis, what in AXES.items())
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(
                f"--mesh {_shown(mesh)}: nothing is divided over an axis {name!r}{hint} The axes are {known}"
            )
    for name in store:
        if name not in given:
            raise UserError(
                f"--store {name}: the mesh {_shown(mesh)} has no axis of this name; use {' or '.join(given)}, "
                "or add it to --mesh"
            )
    tp, cp, data = size("tp"), size("cp"), size("dp", "fsdp")
    if heads % tp:
        raise UserError(
            f"the model has {heads} query heads, which do not divide by tp={tp} (--mesh {_shown(mesh)}): "
            f"use a tp of {_near_divisors(heads, tp)} or a model whose heads divide"
        )
    if batch_size % data:
        raise UserError(
            f"--batch.size {batch_size} does not divide by {data}, the data-parallel ranks of --mesh {_shown(mesh)}: "
            f"use {_near_multiples(batch_size, data)}"
        )
    if batch_size // data < microbatches:
        raise UserError(
            f"--batch.microbatches {microbatches} needs as many sequences on every rank, but --batch.size {batch_size} "
            f"gives each of the {data} data-parallel ranks {batch_size // data}: use fewer microbatches or a larger batch"
        )
    cuts = cp * (tp if sequence_parallel else 1)
    if seq_len % cuts:
        axes = "cp × tp (sequence parallelism)" if sequence_parallel else "cp"
        raise UserError(
            f"--batch.seq-len {seq_len} does not divide by {cuts}, the size of {axes} in --mesh {_shown(mesh)}: "
            f"use {_near_multiples(seq_len, cuts)}"
        )


def _near_divisors(n: int, near: int) -> str:
    smaller = max(d for d in range(1, near) if n % d == 0)
    larger = next((d for d in range(near + 1, n + 1) if n % d == 0), None)
    return f"{smaller} or {larger}" if larger else f"{smaller}"


def _near_multiples(n: int, of: int) -> str:
    return " or ".join(str(m) for m in (n - n % of, n + of - n % of) if m)


def _shown(mesh: Mesh) -> str:
    return ",".join(f"{name}={mesh.size(axes)}" for name, axes in mesh.names.items() if not name.startswith("tp_"))
