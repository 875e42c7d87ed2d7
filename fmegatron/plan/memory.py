"""Bytes that a rank holds, by part, at the moment when they are most.

    memory(model, setting)          # of the rank that needs most
    memory(model, setting, rank=0)  # of the first rank of the pipeline

Parameters, gradients, the optimizer's moments and master copy follow from how each parameter rests (`Sharding.stored_shape`); what
is kept for the backward, and what computing takes meanwhile, from the traces; how many microbatches are under way from the
schedule. The most is either at the first backward of a full pipeline, or at the end of the backward, when gradients are complete.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron.axes import PIPELINE
from fmegatron.parallel.schedule_check import peaks
from fmegatron.parallel.schedule_theory import theory
from fmegatron.parallel.schedules import make_schedule
from fmegatron.parallel.stages import Stage
from fmegatron.plan.rank import Model, Setting, read_elements, size
from fmegatron.sharding import Sharding
from fmegatron.spec import Param
from fmegatron.tree import leaves
from fmegatron.zero import BUCKET


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by part. rank: its number in the pipeline. in_flight: residuals of stages that are alive at once.

    gathered: parameters as equations read them, cast or gathered over data ranks, of two layers at a time, and gradients on their
    way. logits: the loss's room and probabilities. working: what a layer's backward takes beside what is kept. buffers: of the
    gather of new parameters (ZeRO-1 and -2), and of messages between stages.
    """

    parameters: int
    gradients: int
    moments: int
    master: int
    activations: int
    logits: int
    gathered: int
    working: int
    buffers: int
    rank: int = 0
    in_flight: int = 1

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """{part: bytes}."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("rank", "in_flight")}


def memory(model: Model, setting: Setting, *, rank: int | None = None) -> Memory:
    """Bytes of one rank of the pipeline; None: of that which needs most."""
    layout = setting.layout
    ranks = size(layout, PIPELINE)
    if rank is None:
        some = (
            sorted({0, 1 % ranks, ranks - 1}) if layout.schedule in ("1f1b", "interleaved", "gpipe") else range(ranks)
        )
        return max((memory(model, setting, rank=r) for r in some), key=lambda m: (m.total, -m.rank))
    sh, stages = model.sharding(setting), held_by(model, setting, rank)
    resting, wide = of_stages(model, sh, stages), _accumulated(sh)
    rows, several = setting.microbatch, layout.micro > 1 or layout.pipelined
    zero = layout.zero
    kinds = sorted({model.kinds[i] for s in stages for i in s.layers})
    largest = max((_layer_elements(model, sh, k) for k in kinds), default=0)

    # gradients: whole until the last microbatch, or in the shards that they are reduced to
    if zero == 3 or sh.mesh is None or zero == 0:
        gradients = resting.params * wide
    else:
        gradients = (resting.params if zero == 1 and several else resting.state) * wide

    counts = Counter(model.kinds[i] for s in stages for i in s.layers)
    stored = sum(model.trace(setting, k, rows).saved * n for k, n in counts.items())
    chunks = len(stages)
    alive = in_flight(setting, rank)
    activations = stored * alive // chunks
    activations += sum(model.trace(setting, "embed", rows).saved for s in stages if s.embedding) * max(
        1, alive // chunks
    )
    carry = model.trace(setting, "embed", rows).out
    logits = head_working = 0
    if any(s.head for s in stages):
        head = model.trace(setting, "head", rows)
        logits = head.saved
        head_working = max(head.forward.working, head.backward.working)
    layer = [model.trace(setting, k, rows) for k in kinds]
    working = max((max(t.backward.working, t.forward.working) for t in layer), default=0)

    compute = (setting.precision.compute_dtype or setting.precision.params).itemsize
    moved = any(model.moves(sh, ("layer", k), leaves(model.spec["layers"][k]), "enter") for k in kinds)
    cast = setting.precision.compute_dtype not in (None, setting.precision.params)
    gathered = (2 * largest * compute if moved or cast else 0) + _ends_read(model, sh, stages, moved or cast) * compute
    on_way = largest * (wide + compute) if sh.mesh is not None and sh.mesh.world > 1 else largest * compute
    buffers = 0
    if zero in (1, 2) and sh.mesh is not None:
        buffers = 2 * min(BUCKET, resting.params) * setting.precision.params.itemsize
    if layout.pipelined:
        buffers += 4 * carry

    # the moments at which it may be most: the first backward (all activations, gradients of other microbatches), and the last
    first = dict(activations=activations, logits=logits, working=max(working, head_working), gathered=gathered)
    first["gradients"] = gradients if several else _ends_gradient(model, sh, stages, wide)
    last = dict(activations=0, logits=0, working=working, gathered=gathered + on_way, gradients=gradients)
    if several:
        first["gathered"] += on_way
    moment = max((first, last), key=lambda m: sum(m.values()))
    state = resting.state
    return Memory(
        parameters=resting.bytes,
        moments=2 * state * setting.moments.itemsize,
        master=0 if setting.master in (None, setting.precision.params) else state * setting.master.itemsize,
        buffers=buffers,
        rank=rank,
        in_flight=alive,
        **moment,
    )


@dataclass(frozen=True)
class AtRest:
    """Elements of a rank's parameters, and of the parts of them that its optimizer holds; bytes of the former."""

    params: int
    state: int
    bytes: int


def at_rest(sh: Sharding, params: Iterable[Param]) -> AtRest:
    """Of some parameters."""
    held = state = size = 0
    for p in params:
        n = math.prod(sh.stored_shape(p))
        held, size = held + n, size + n * sh.param_dtype(p).itemsize
        state += math.prod(sh.stored_shape(p, "optimizer"))
    return AtRest(held, state, size)


def of_stages(model: Model, sh: Sharding, stages: Iterable[Stage]) -> AtRest:
    """Of what some stages hold."""
    names: dict[str, None] = {}
    total = AtRest(0, 0, 0)
    for stage in stages:
        names |= dict.fromkeys(
            [*(model.ends.front if stage.embedding else ()), *(model.ends.back if stage.head else ())]
        )
        for kind, n in Counter(model.kinds[i] for i in stage.layers).items():
            one = _once(model, sh, kind, lambda kind=kind: leaves(model.spec["layers"][kind]))  # type: ignore[misc]
            total = AtRest(total.params + n * one.params, total.state + n * one.state, total.bytes + n * one.bytes)
    for name in names:
        one = _once(model, sh, name, lambda name=name: leaves(model.spec[name]))  # type: ignore[misc]
        total = AtRest(total.params + one.params, total.state + one.state, total.bytes + one.bytes)
    return total


def _once(model: Model, sh: Sharding, key: Any, params: Callable[[], Iterable[Param]]) -> AtRest:
    return model.kept(("at rest", id(sh), key), lambda: at_rest(sh, params()))


def held_by(model: Model, setting: Setting, rank: int) -> list[Stage]:
    """The stages of a rank of the pipeline."""
    stages, ranks = model.stages(setting.layout), size(setting.layout, PIPELINE)
    if setting.layout.schedule in ("zbv", "dualpipev"):
        return [stages[rank], stages[2 * ranks - 1 - rank]]
    return [stages[n] for n in range(rank, len(stages), ranks)]


def in_flight(setting: Setting, rank: int) -> int:
    """The most residuals of a stage that are alive at once on a rank (see `fmegatron.parallel.schedule_theory`)."""
    layout = setting.layout
    if not layout.pipelined:
        return 1
    return _peaks(layout.schedule, size(layout, PIPELINE), layout.micro, layout.virtual)[rank]


@functools.cache
def _peaks(schedule: str, ranks: int, microbatches: int, virtual: int | None) -> tuple[int, ...]:
    """Of each rank: by the closed form where one is known, else counted in the table."""
    known = theory(schedule, ranks, microbatches, virtual=virtual or 2)
    if known is not None and known.peaks is not None:
        return known.peaks
    return tuple(map(int, peaks(make_schedule(schedule, ranks, microbatches, virtual=virtual))))


def _layer_elements(model: Model, sh: Sharding, kind: int) -> int:
    params = model.spec["layers"][kind]
    return model.kept(("read", id(sh), kind), lambda: sum(read_elements(sh, p) for p in leaves(params)))


def _ends_read(model: Model, sh: Sharding, stages: Iterable[Stage], copied: bool) -> int:
    """Elements of the largest parameters outside the layers, as equations read them, where that is a copy."""
    if not copied:
        return 0
    return max((sum(read_elements(sh, p) for p in model.entries(s)) for s in stages), default=0)


def _ends_gradient(model: Model, sh: Sharding, stages: Iterable[Stage], wide: int) -> int:
    """Bytes of the gradients that the head has made when the layers' backward begins."""
    return (
        sum(read_elements(sh, p) for s in stages if s.head for n in model.ends.back for p in leaves(model.spec[n]))
        * wide
    )


def _accumulated(sh: Sharding) -> int:
    """Bytes of an element of summed gradients."""
    grads: torch.dtype = torch.promote_types(sh.precision.params, sh.precision.reduce_dtype)
    return grads.itemsize
