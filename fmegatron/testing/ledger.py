"""The communication ledger: every collective of a step, by counting what ran."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
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
from fmegatron.testing.compiled import BACKENDS, counting, one_rank_of
from fmegatron.testing.engines import check_engine
from fmegatron.testing.layout import Layout
from fmegatron.testing.program import Program, program_of
from fmegatron.testing.running import Job, inputs_of
from fmegatron.zero import with_sharded_state


@dataclass(frozen=True)
class Entry:
    """Collectives of one kind over one group of ranks, as one rank takes part in them.

    axes: mesh axes, by the names of the layout; tp_kv, tp_group, cp_ring, cp_kv and cp_group are the parts into which tp
        and cp are cut for kv heads. count: a bucket of many leaves is one. bytes: of the whole buffers, as bandwidth
        tests count them: what an all-gather gives, what any other kind is given. sent: bytes that a rank sends where
        collectives are rings.
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
        return _sum(kind, axes, 0, found)

    @property
    def totals(self) -> tuple[Entry, ...]:
        """All kinds together, for each group of ranks, the most bytes first."""
        groups: dict[Any, list[Entry]] = defaultdict(list)
        for e in self.entries:
            groups[e.axes, e.ranks].append(e)
        return tuple(_in_order(_sum("all", axes, ranks, some) for (axes, ranks), some in groups.items()))

    def __str__(self) -> str:
        if not self.entries:
            return f"one step of {self.layout} communicates nothing"
        rows = [("collective", "over", "ranks", "count", "bytes", "sent by a rank"), *map(_cells, self.entries)]
        if len(totals := self.totals) > 1:
            rows += map(_cells, totals)
        rows.append(_cells(_sum("total", (), 0, self.entries)))
        widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
        lines = [f"one step of {self.layout}, on each of {self.layout.world} ranks"]
        for row in rows:
            cells = [c.rjust(w) if i > 1 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def _sum(kind: str, axes: tuple[str, ...], ranks: int, some: Sequence[Entry]) -> Entry:
    return Entry(kind, axes, ranks, *(sum(getattr(e, n) for e in some) for n in ("count", "bytes", "sent")))


def _in_order(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda e: (-e.sent, e.kind, e.axes))


def _cells(e: Entry) -> tuple[str, ...]:
    return e.kind, "×".join(e.axes), str(e.ranks or ""), f"{e.count:,}", f"{e.bytes:,}", f"{e.sent:,}"


def ledger(
    model: Any,
    layout: Layout | str,
    *,
    part: Literal["step", "gradients"] = "step",
    precision: Precision | None = None,
    optimizer: Literal["adamw", "muon"] = "adamw",
    compile: str | None = None,
    **options: Any,
) -> Ledger:
    """What a layout communicates, counted in a simulated step (with clipping, and the norms that it reports); or in its
    "gradients" alone. precision: float32 by default. optimizer: "adamw", or "muon" for the matrices of hidden layers,
    whose exchange between ranks is counted too.

    compile: blocks are compiled by this backend of torch.compile, "aot_eager", and collectives counted where their graphs
    run. Then one rank alone runs, in a group whose collectives give no values, so that part must be "gradients".

    model, options: as for `assert_equivalent`. Raises UserError for a layout that is not legal, for a pipeline, which is
    not simulated, and for a model whose blocks cannot be compiled.
    """
    program, layout = program_of(model, **options), Layout.parse(layout) if isinstance(layout, str) else layout
    if (why := program.why_illegal(layout, propose=True)) is not None:
        raise UserError(f"layout {layout} is not legal for this model: {why}")
    check_engine("simulated", layout, "cpu")
    if optimizer not in ("adamw", "muon") or (optimizer == "muon" and part == "gradients"):
        raise UserError(f'optimizer={optimizer!r} with part={part!r}: use "adamw" or "muon", muon with part="step"')
    if compile is not None and compile not in BACKENDS:
        raise UserError(
            f"compile={compile!r}: collectives are counted in graphs of the backend {' or '.join(BACKENDS)}"
        )
    if layout.world == 1:
        return Ledger(layout, ())
    precision = precision or Precision()
    made = program.on(layout)
    if compile is not None:
        return Ledger(layout, tuple(_of_compiled(made, layout, part, precision, compile)))
    _, loss, weights = made.functions
    inputs = inputs_of(program, layout, Job(precision=precision, steps=1))
    with simulate(layout.world):
        sh = made.sharding(layout, precision)
        params = sh.shard_params(inputs.params, inputs.spec)
        (batch,) = inputs.batches
        batch = {n: sh.shard(x, program.dims_of(n, x)) for n, x in batch.items()}
        with record_collectives() as found:
            if part == "step":
                pieces = optim.chain(optim.clip_by_global_norm(1.0), _optimizer(optimizer, inputs.spec))
                pieces = with_sharded_state(pieces, inputs.spec, sh)
                state = TrainState(0, params, pieces.init(params), random.key(0))
                found.clear()
                step = train_step(loss, pieces, weights=weights, sh=sh, microbatches=layout.micro, spec=inputs.spec)
                step(state, batch)
            else:
                gradients = accumulate(loss, layout.micro, weights=weights, spec=inputs.spec)
                gradients(params, batch, Ctx(sh=sh, key=random.fold_in(random.key(0), 0)))
        assert sh.mesh is not None
        return Ledger(layout, tuple(summed_up(found, sh.mesh)))


def _optimizer(name: str, spec: Any) -> optim.Optimizer:
    adamw = optim.adamw(1e-3)
    if name == "adamw":
        return adamw
    return optim.partition(optim.muon_labels(spec), {"muon": optim.muon(1e-3, spec=spec), "adamw": adamw})


def _of_compiled(program: Program, layout: Layout, part: str, precision: Precision, backend: str) -> list[Entry]:
    """The collectives of one rank whose blocks are compiled."""
    if part != "gradients":
        raise UserError(
            f'ledger(part={part!r}, compile={backend!r}): only part="gradients" is counted of compiled blocks'
        )
    model = program.model
    if not dataclasses.is_dataclass(model) or isinstance(model, type) or not hasattr(model, "compile"):
        raise UserError(
            f"ledger(compile={backend!r}) needs a model that is a dataclass with a field `compile`, as Decoder is"
        )
    inputs = inputs_of(program, layout, Job(precision=precision, steps=1))
    with one_rank_of(layout.world):
        sh = program.sharding(layout, precision)
        assert sh.mesh is not None
        program = dataclasses.replace(
            program, model=dataclasses.replace(model, compile={"backend": counting(backend, sh.mesh)})
        )
        _, loss, weights = program.functions
        params = sh.shard_params(inputs.params, inputs.spec)
        batch = {n: sh.shard(x, program.dims_of(n, x)) for n, x in inputs.batches[0].items()}
        with record_collectives() as found:
            gradients = accumulate(loss, layout.micro, weights=weights, spec=inputs.spec)
            gradients(params, batch, Ctx(sh=sh, key=random.fold_in(random.key(0), 0)))
        return summed_up(found, sh.mesh)


def summed_up(found: Sequence[Collective], mesh: Mesh) -> list[Entry]:
    """Collectives of one kind and group together, the most bytes first."""
    groups: dict[Any, list[Collective]] = defaultdict(list)
    for c in found:
        groups[c.kind, _named(c.axes, mesh), c.ranks].append(c)
    entries = [
        Entry(kind, axes, ranks, len(some), sum(c.bytes for c in some), sum(c.sent for c in some))
        for (kind, axes, ranks), some in groups.items()
    ]
    return _in_order(entries)


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
