"""The communication ledger: every collective of a step, by counting what ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fmegatron import optim, random
from fmegatron.accumulate import accumulate
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.mesh import Mesh
from fmegatron.precision import Precision
from fmegatron.recording import Collective, record_collectives
from fmegatron.simulation import simulate
from fmegatron.step import TrainState, train_step
from fmegatron.testing.layout import Layout
from fmegatron.testing.program import program_of
from fmegatron.testing.running import Job, inputs_of
from fmegatron.zero import with_sharded_state


@dataclass(frozen=True)
class Entry:
    """Collectives of one kind over one group of ranks.

    axes: mesh axes, by the names of the layout. bytes: of the buffers, as bandwidth tests count them. sent: bytes that
    each rank sends in rings.
    """

    kind: str
    axes: tuple[str, ...]
    ranks: int
    count: int
    bytes: int
    sent: int


@dataclass(frozen=True)
class Ledger:
    """What one rank communicates in one step of a layout."""

    layout: Layout
    entries: tuple[Entry, ...]

    def of(self, kind: str, *axes: str) -> Entry:
        """The entry of a kind over some axes; one of zeros if there is none."""
        found = [e for e in self.entries if e.kind == kind and (not axes or set(e.axes) == set(axes))]
        return Entry(kind, axes, 0, *(sum(getattr(e, n) for e in found) for n in ("count", "bytes", "sent")))

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("collective", "axes", "ranks", "count", "bytes", "sent/rank")]
        rows += [
            (e.kind, "×".join(e.axes), str(e.ranks), f"{e.count:,}", f"{e.bytes:,}", f"{e.sent:,}")
            for e in self.entries
        ]
        total = [sum(getattr(e, n) for e in self.entries) for n in ("count", "bytes", "sent")]
        rows.append(("total", "", "", *(f"{n:,}" for n in total)))
        widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
        lines = [f"collectives of one step of {self.layout}"]
        for row in rows:
            cells = [c.rjust(w) if i > 1 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def ledger(
    model: Any,
    layout: Layout | str,
    *,
    part: Literal["step", "gradients"] = "step",
    precision: Precision | None = None,
    **options: Any,
) -> Ledger:
    """What a layout communicates, counted in a simulated step (AdamW with clipping, and the norms that it reports); or
    in its "gradients" alone. precision: float32 by default.

    model, options: as for `assert_equivalent`. What runs inside a compiled block, and Muon's exchange of matrices, is
    not counted. Raises UserError for a layout that is not legal.
    """
    program, layout = program_of(model, **options), Layout.parse(layout) if isinstance(layout, str) else layout
    if (why := program.why_illegal(layout)) is not None:
        raise UserError(f"layout {layout} is not legal for this model: {why}")
    if layout.world == 1:
        return Ledger(layout, ())
    precision = precision or Precision()
    made = program.on(layout)
    _, loss, weights = made.functions
    inputs = inputs_of(program, layout, Job(precision=precision, steps=1))
    with simulate(layout.world):
        sh = made.sharding(layout, precision)
        params = sh.shard_params(inputs.params, inputs.spec)
        (batch,) = inputs.batches
        batch = {n: sh.shard(x, program.dims_of(n, x)) for n, x in batch.items()}
        optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
        optimizer = with_sharded_state(optimizer, inputs.spec, sh)
        state = TrainState(0, params, optimizer.init(params), random.key(0))
        with record_collectives() as found:
            if part == "step":
                step = train_step(loss, optimizer, weights=weights, sh=sh, microbatches=layout.micro, spec=inputs.spec)
                step(state, batch)
            else:
                gradients = accumulate(loss, layout.micro, weights=weights, spec=inputs.spec)
                gradients(params, batch, Ctx(sh=sh, key=random.fold_in(random.key(0), 0)))
        assert sh.mesh is not None
        return Ledger(layout, tuple(summed_up(found, sh.mesh)))


def summed_up(found: Sequence[Collective], mesh: Mesh) -> list[Entry]:
    """Collectives of one kind and group together, the most bytes first."""
    groups: dict[Any, list[Collective]] = defaultdict(list)
    for c in found:
        groups[c.kind, _named(c.axes, mesh), c.ranks].append(c)
    entries = [
        Entry(kind, axes, ranks, len(some), sum(c.bytes for c in some), sum(c.sent for c in some))
        for (kind, axes, ranks), some in groups.items()
    ]
    return sorted(entries, key=lambda e: (-e.sent, e.kind, e.axes))


def _named(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """Atomic axes by the names of the mesh that stand for all of their parts."""
    left, found = set(axes), []
    for name, parts in mesh.names.items():
        live = set(mesh.live(parts))
        if live and live <= left and not name.startswith(("tp_", "cp_")):
            found.append(name)
            left -= live
    return (*found, *(a for a in axes if a in left))


__all__ = ["Entry", "Ledger", "ledger", "summed_up"]
