"""Bytes that a rank holds, by part, at the moment when they are most.

    memory(model, setting)          # of the rank that needs most
    memory(model, setting, rank=0)  # of the first rank of the pipeline

Parameters, gradients, the optimizer's moments and master copy follow from how each parameter rests (`Sharding.stored_shape`); what
is kept for the backward, and what computing takes meanwhile, from the traces; how many microbatches are under way from the
schedule. The most is either at the first backward of a full pipeline, or at the end of the backward, when gradients are complete.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron.axes import PIPELINE
from fmegatron.offload import BUCKET as STATE_BUCKET
from fmegatron.parallel.stages import Stage
from fmegatron.plan.rank import SPLIT, Model, Setting, of_ranks, outer, placement, read_elements, size, virtual_of
from fmegatron.plan.residuals import most_alive, residuals
from fmegatron.plan.tracing import Trace
from fmegatron.sharding import Sharding
from fmegatron.spec import Param
from fmegatron.testing.layout import Layout
from fmegatron.tree import leaves
from fmegatron.zero import BUCKET


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by part. rank: its number in the pipeline. in_flight: residuals of stages that are alive at once.

    gathered: parameters as equations read them, cast or gathered over data ranks, of two layers at a time, and gradients on their
    way. logits: the loss's room and probabilities. working: what a layer's backward takes beside what is kept. buffers: of the
    gather of new parameters (ZeRO-1 and -2), of messages between stages, and of an optimizer's state in host memory.
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
    def kept(self) -> int:
        """Bytes from forwards to backwards, of layers and of the loss."""
        return self.activations + self.logits

    @property
    def parts(self) -> dict[str, int]:
        """{part: bytes}."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("rank", "in_flight")}


def memory(model: Model, setting: Setting, *, rank: int | None = None, exact: bool = True) -> Memory:
    """Bytes of one rank of the pipeline; None: of that which needs most. exact: residuals are counted stage by stage in the schedule's
    table; else, quicker, as if all stages of a rank were alike."""
    parts = _Sizes.of(model, setting)
    some = _unlike(model, setting.layout) if rank is None else [rank]
    return max((_of_rank(model, setting, r, parts, exact) for r in some), key=lambda m: (m.total, -m.rank))


@dataclass(frozen=True)
class _Sizes:
    """Bytes of the traces of a setting. saved, left: of a layer of each kind (see `Trace`, `Halves`); working: of one beside that."""

    saved: dict[int, int]
    left: dict[int, int]
    working: dict[int, int]
    embed: int
    carry: int
    head: int
    ends_left: tuple[int, int]  # by the embedding, and by the head
    head_working: int

    @staticmethod
    def of(model: Model, setting: Setting) -> _Sizes:
        layout, rows = setting.layout, setting.microbatch
        split = layout.schedule in SPLIT
        key = ("sizes", outer(layout), layout.remat, split, rows, setting.seq, setting.precision)
        found: _Sizes = model.kept(key, lambda: _Sizes._of(model, setting, rows))
        return found

    @staticmethod
    def _of(model: Model, setting: Setting, rows: int) -> _Sizes:
        traces = {k: model.trace(setting, k, rows) for k in sorted(set(model.kinds))}
        embed, head = (model.trace(setting, part, rows) for part in ("embed", "head"))
        return _Sizes(
            {k: t.saved for k, t in traces.items()},
            {k: _left(t) for k, t in traces.items()},
            {k: max(t.backward.working, t.forward.working) for k, t in traces.items()},
            embed.saved,
            embed.out,
            head.saved,
            (_left(embed), _left(head)),
            max(head.forward.working, head.backward.working),
        )

    def of_stage(self, model: Model, stage: Stage) -> tuple[int, int, int]:
        """(a residual's bytes, the loss's in it, what the first half of a backward leaves)."""
        layers = model.alike(stage)[0]
        saved = sum(self.saved[k] * n for k, n in layers) + self.embed * stage.embedding
        # A layer counts what it gives: what a stage gives to another one has gone, what it got from one is there.
        saved += self.carry * ((not stage.embedding) - (not stage.head))
        left = sum(self.left[k] * n for k, n in layers)
        left += sum(n for n, there in zip(self.ends_left, (stage.embedding, stage.head), strict=True) if there)
        return saved, self.head * stage.head, left


def _left(trace: Trace) -> int:
    return 0 if trace.halves is None else trace.halves.left


def _of_rank(model: Model, setting: Setting, rank: int, parts: _Sizes, exact: bool) -> Memory:
    layout = setting.layout
    sh, stages = model.sharding(setting), held_by(model, setting, rank)
    resting, wide = of_stages(model, sh, stages), _accumulated(sh)
    several, zero = layout.micro > 1 or layout.pipelined, layout.zero
    kinds = sorted({k for s in stages for k, _ in model.alike(s)[0]})
    largest = max((_layer_elements(model, sh, k) for k in kinds), default=0)

    # gradients: whole until the last microbatch, or in the shards that they are reduced to
    if zero == 3 or sh.mesh is None or zero == 0:
        gradients = resting.params * wide
    else:
        gradients = (resting.params if zero == 1 and several else resting.state) * wide

    activations, logits, alive = _kept(model, setting, rank, stages, parts, exact)
    head_working = parts.head_working if any(s.head for s in stages) else 0
    working = max((parts.working[k] for k in kinds), default=0)

    compute = (setting.precision.compute_dtype or setting.precision.params).itemsize
    moved = any(model.moves(sh, ("layer", k), leaves(model.spec["layers"][k]), "enter") for k in kinds)
    cast = setting.precision.compute_dtype not in (None, setting.precision.params)
    gathered = (2 * largest * compute if moved or cast else 0) + _ends_read(model, sh, stages, moved or cast) * compute
    on_way = largest * (wide + compute) if sh.mesh is not None and sh.mesh.world > 1 else largest * compute
    buffers = 0
    if zero in (1, 2) and sh.mesh is not None:
        buffers = 2 * min(BUCKET, resting.params) * setting.precision.params.itemsize
    if layout.pipelined:
        buffers += 4 * parts.carry

    # the moments at which it may be most: the first backward (all activations, gradients of other microbatches), and the last
    first = dict(activations=activations, logits=logits, working=max(working, head_working), gathered=gathered)
    first["gradients"] = gradients if several else _ends_gradient(model, sh, stages, wide)
    last = dict(activations=0, logits=0, working=working, gathered=gathered + on_way, gradients=gradients)
    if several:
        first["gathered"] += on_way
    moment = max((first, last), key=lambda m: sum(m.values()))
    state = 0 if setting.offload else resting.state
    if setting.offload:  # a part of the state that is updated, and the next one on its way
        buffers += min(2 * STATE_BUCKET, resting.state * state_bytes(setting))
    return Memory(
        parameters=resting.bytes,
        moments=2 * state * setting.moments.itemsize,
        master=0 if setting.master in (None, setting.precision.params) else state * setting.master.itemsize,
        buffers=buffers,
        rank=rank,
        in_flight=alive,
        **moment,
    )


def _kept(
    model: Model, setting: Setting, rank: int, stages: Sequence[Stage], parts: _Sizes, exact: bool
) -> tuple[int, int, int]:
    """(bytes of residuals of layers, and of the loss, when most is alive; how many residuals of a stage that are)."""
    layout = setting.layout
    each = [parts.of_stage(model, s) for s in stages]
    if not layout.pipelined:
        ((saved, logits, _),) = each
        two = 1 + (
            setting.beside != "none" and layout.micro > 1
        )  # that run by turns; with 1f1b at most, and less on the whole
        return two * saved, two * logits, two
    name, ranks, virtual = layout.schedule, size(layout, PIPELINE), virtual_of(layout)
    if not exact and name not in SPLIT:
        alive = residuals(name, ranks, layout.micro, virtual, rank)
        heads = alive if name == "gpipe" else layout.micro if name == "bfs" else 1
        return alive * sum(s for s, _, _ in each) // len(each), heads * sum(n for _, n, _ in each), alive
    moments = []
    for kept, left in most_alive(name, ranks, layout.micro, virtual, rank):
        layers = sum(n * s + m * x for n, m, (s, _, x) in zip(kept, left, each, strict=True))
        moments.append((layers, sum(n * x for n, (_, x, _) in zip(kept, each, strict=True)), sum(kept)))
    return max(moments, key=lambda m: (m[0] + m[1], m))


def _unlike(model: Model, layout: Layout) -> list[int]:
    """The ranks of a pipeline that may need most: of those that hold alike the first, which is furthest ahead; and the last, as V-shaped
    schedules keep as much on every rank, but more of its second stage the further it is."""
    ranks = size(layout, PIPELINE)

    def found() -> list[int]:
        alike: dict[Any, list[int]] = {}
        for r in range(ranks):
            held = [model.stages(layout)[n] for n in of_ranks(placement(layout))[r]]
            layers = Counter(model.kinds[i] for s in held for i in s.layers)
            ends = tuple((s.embedding, s.head) for s in held)
            alike.setdefault((tuple(sorted(layers.items())), ends), []).append(r)
        return sorted(
            {r for some in alike.values() for r in (some[0], some[-1] if layout.schedule in SPLIT else some[0])}
        )

    key = ranks, layout.schedule, layout.virtual, layout.stages
    return model.kept(("unlike", key), found)


def state_bytes(setting: Setting) -> int:
    """Of an element of what the optimizer holds: two moments, and a copy of the parameter."""
    master = 0 if setting.master in (None, setting.precision.params) else setting.master.itemsize
    return 2 * setting.moments.itemsize + master


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
        for kind, n in model.alike(stage)[0]:
            one = of_layer(model, sh, kind)
            total = AtRest(total.params + n * one.params, total.state + n * one.state, total.bytes + n * one.bytes)
    for name in names:
        one = _once(model, sh, name, lambda name=name: leaves(model.spec[name]))  # type: ignore[misc]
        total = AtRest(total.params + one.params, total.state + one.state, total.bytes + one.bytes)
    return total


def of_layer(model: Model, sh: Sharding, kind: int) -> AtRest:
    """Of one layer of a kind."""
    return _once(model, sh, kind, lambda: leaves(model.spec["layers"][kind]))


def _once(model: Model, sh: Sharding, key: Any, params: Callable[[], Iterable[Param]]) -> AtRest:
    return model.kept(("at rest", id(sh), key), lambda: at_rest(sh, params()))


def held_by(model: Model, setting: Setting, rank: int) -> list[Stage]:
    """The stages of a rank of the pipeline."""
    stages = model.stages(setting.layout)
    return [stages[n] for n in of_ranks(placement(setting.layout))[rank]]


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
