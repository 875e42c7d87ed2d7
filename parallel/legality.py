"""Is a layout legal? Asked once, before anything is allocated; the answer to an illegal one names the sizes and a
fix."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence

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
    zero: int | None = None,
    context: str = "gather",
    kv_heads: int | None = None,
) -> None:
    """Raises UserError for an axis that divides nothing, and when query heads, batch or sequence cannot be cut as
    the mesh says.

    heads: query heads of the model. batch_size: sequences of the global batch. seq_len: tokens of a sequence. store:
    axes that hold trees at rest; zero: which trees (see `Rules`; None: all). context: how attention reads a sequence on cp (see `Rules`). kv_heads: of the
    model; None: as many as query heads.
    """

    def size(*names: str) -> int:
        return math.prod(mesh.size(mesh.expand(n)) for n in names if n in mesh.names or n in mesh.sizes)

    given = [name for name in mesh.names if not name.startswith(("tp_", "cp_"))]
    for name in given:
        if name not in AXES:
            near = difflib.get_close_matches(name, AXES, 1)
            known = ", ".join(f"{axis} ({what})" for axis, what in AXES.items())
            hint = f"; did you mean {near[0]}?" if near else "."
            raise UserError(
                f"--mesh {_shown(mesh)}: nothing is divided over an axis {name!r}{hint} The axes are {known}"
            )
    for name in store:
        if name not in given:
            raise UserError(
                f"--store {name}: the mesh {_shown(mesh)} has no axis of this name; use {' or '.join(given)}, "
                "or add it to --mesh"
            )
    if zero not in (None, 0, 1, 2, 3):
        raise UserError(
            f"--zero {zero}: the stages are 0 (nothing is stored over data ranks), 1 (optimizer state), 2 (gradients too) "
            "and 3 (parameters too)"
        )
    if zero == 0 and store:
        raise UserError(f"--zero 0 stores nothing, so --store {','.join(store)} means nothing: leave one of them out")
    if zero and not store and not {"dp", "fsdp"} & set(given):
        raise UserError(f"--zero {zero}: the mesh {_shown(mesh)} has no data axis to store over; add dp to --mesh")
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
    if context in ("ulysses", "ulysses+ring") and cp > 1:
        _check_shared_heads(mesh, context, heads, kv_heads or heads, size)
    cuts, axes = cp * (tp if sequence_parallel else 1), "cp × tp (sequence parallelism)" if sequence_parallel else "cp"
    ring = size("cp_ring") if context == "ulysses+ring" else cp
    zigzag = 2 * ring if context != "ulysses" and ring > 1 else 1
    if seq_len % cuts or seq_len % zigzag:
        of = math.lcm(cuts, zigzag)
        what = f"the size of {axes}" if of == cuts else f"the least multiple of {axes} and twice the ranks of cp"
        raise UserError(
            f"--batch.seq-len {seq_len} does not divide by {of}, {what} in --mesh {_shown(mesh)}: "
            f"use {_near_multiples(seq_len, of)}"
        )


def _check_shared_heads(mesh: Mesh, context: str, heads: int, kv_heads: int, size: Callable[..., int]) -> None:
    """Can the ranks between which attention moves heads share them out?"""
    cut = "cp_kv" in mesh.names or "cp_kv" in mesh.sizes
    on_tp = math.gcd(kv_heads, size("tp"))
    left = {"kv heads": kv_heads // on_tp, "query heads of each kv head": heads // kv_heads * on_tp // size("tp")}
    ranks = (size("cp_kv"), size("cp_group")) if cut else (size("cp"), 1)
    for (what, n), by in zip(left.items(), ranks, strict=True):
        if n % by:
            raise UserError(
                f"context {context}: the {n} {what} on a tensor-parallel rank do not divide by {by} of the cp ranks of "
                f"--mesh {_shown(mesh)}: make the mesh with also=factoring(…) of fmegatron.parallel.context, use a cp "
                f"of {_near_divisors(n, by)}, or the kinds ring or gather"
            )


def _near_divisors(n: int, near: int) -> str:
    smaller = max(d for d in range(1, near) if n % d == 0)
    larger = next((d for d in range(near + 1, n + 1) if n % d == 0), None)
    return f"{smaller} or {larger}" if larger else f"{smaller}"


def _near_multiples(n: int, of: int) -> str:
    return " or ".join(str(m) for m in (n - n % of, n + of - n % of) if m)


def _shown(mesh: Mesh) -> str:
    shown = {name: axes for name, axes in mesh.names.items() if not name.startswith(("tp_", "cp_"))}
    return ",".join(f"{name}={mesh.size(axes)}" for name, axes in shown.items())
