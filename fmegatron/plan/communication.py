"""What a rank communicates in a step, to the byte: collectives of the traced parts, of parameters and gradients by their arrows, and
the messages of a pipeline.

    entries(model, setting)                # as `fmegatron.testing.ledger` counts them when the step runs
    entries(model, setting, rank=1)        # of a rank of the second stage of a pipeline

Of a mixture of experts bytes are those of an even load, where the program itself decides by values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron.axes import PIPELINE
from fmegatron.parallel.stages import Stage
from fmegatron.plan.memory import held_by
from fmegatron.plan.rank import ENTRY, Model, Setting, placement
from fmegatron.recording import Collective
from fmegatron.sharding import Sharding
from fmegatron.spec import Param
from fmegatron.testing.ledger import Entry, summed_up
from fmegatron.tree import leaves

SEND = "send"  # kind of a message to another stage, of one tensor


def collectives(model: Model, setting: Setting, *, rank: int = 0) -> Counter[Collective]:
    """Of a step, on a rank of the pipeline, over the ranks that hold the same stages: forward, backward, reduction and gather of
    parameters, and the sums of losses, weights and norms."""
    layout, sh = setting.layout, model.sharding(setting)
    found: Counter[Collective] = Counter()
    if sh.mesh is None or sh.mesh.world == 1:
        return found
    stages, micro = held_by(model, setting, rank), layout.micro
    for rows in _microbatches(setting):
        for part, times in _parts(model, stages).items():
            trace = model.trace(setting, part, rows)
            for work in (trace.forward, trace.backward):
                for c, n in work.collectives.items():
                    found[c] += n * times
    for group in _groups(model, stages):
        often = {
            "enter": micro * group.gathers * group.reads,
            "leave": micro * group.reads,
            # stages reduce what each of them reads, a model in one piece the sum of what its ends give
            "settle": micro * (group.reads if layout.pipelined else 1) if layout.zero == 2 else 1,
            "return": 1,
        }
        for what, n in often.items():
            for c, count in model.moves(sh, group.key, group.params, what).items():
                found[c] += count * n * group.times
    if any(s.head for s in stages):
        found.update(model.sums(setting))
    found.update(_norms(model, setting, sh, stages))
    return found


def messages(model: Model, setting: Setting, *, rank: int = 0) -> Counter[Collective]:
    """What a rank of a pipeline sends to those of other stages in a step: the stream forwards, its gradient backwards, and gradients
    of parameters that two stages hold."""
    layout, stages, owner = setting.layout, model.stages(setting.layout), placement(setting.layout)
    first = next(n for n, s in enumerate(stages) if s.embedding)
    last = next(n for n, s in enumerate(stages) if s.head)

    def sent(elements: int, dtype: torch.dtype) -> Collective:
        return Collective(SEND, (PIPELINE,), 2, elements, dtype)

    found: Counter[Collective] = Counter()
    for rows in _microbatches(setting):
        carry = model.trace(setting, "embed", rows).outs
        for n in (n for n, r in enumerate(owner) if r == rank):
            if first <= n < last and owner[n + 1] != rank:
                found.update(sent(*t) for t in carry)
            if first < n <= last and owner[n - 1] != rank:
                found.update(sent(*t) for t in carry if t[1].is_floating_point)
    if rank in (owner[first], owner[last]) and owner[first] != owner[last]:
        sh = model.sharding(setting)
        cut = "optimizer" if layout.zero == 2 else "params"  # behind the sum over data axes, or before
        for p in (p for name in model.ends.tied for p in leaves(model.spec[name])):
            dtype = torch.promote_types(sh.param_dtype(p), sh.precision.reduce_dtype)
            found[sent(math.prod(sh.stored_shape(p, cut)), dtype)] += 1
    return found


def entries(model: Model, setting: Setting, *, rank: int = 0) -> list[Entry]:
    """Collectives and messages, of one kind and group together, the most bytes first."""
    sh = model.sharding(setting)
    found = [] if sh.mesh is None else summed_up(list(collectives(model, setting, rank=rank).elements()), sh.mesh)
    if sent := list(messages(model, setting, rank=rank).elements()):
        size = sum(c.bytes for c in sent)
        found.append(Entry(SEND, (PIPELINE,), 2, len(sent), size, size))
    return sorted(found, key=lambda e: -e.sent)


def _microbatches(setting: Setting) -> list[int]:
    """Rows of each microbatch on a rank, as evenly as they go."""
    each, more = divmod(setting.rank_rows, setting.layout.micro)
    return [each + (n < more) for n in range(setting.layout.micro)]


def _parts(model: Model, stages: Sequence[Stage]) -> Counter[str | int]:
    """What is traced of some stages: how often each part is there."""
    found: Counter[str | int] = Counter(model.kinds[i] for s in stages for i in s.layers)
    found["embed"], found["head"] = (sum(getattr(s, n) for s in stages) for n in ("embedding", "head"))
    return +found


@dataclass(frozen=True)
class _Group:
    """Parameters that go together: so many times in a rank, gathered so often in a microbatch. reads: by so many stages."""

    key: Any
    params: list[Param]
    times: int
    gathers: int
    reads: int = 1


def _groups(model: Model, stages: Sequence[Stage]) -> Iterator[_Group]:
    """Layers, which are gathered for the backward again; and each entry outside of them, once for each end that reads it."""
    for kind, n in Counter(model.kinds[i] for s in stages for i in s.layers).items():
        yield _Group(("layer", kind), leaves(model.spec["layers"][kind]), n, 2)
    read = Counter(
        name
        for s in stages
        for some, there in ((model.ends.front, s.embedding), (model.ends.back, s.head))
        if there
        for name in some
    )
    for name, n in read.items():
        yield _Group(("entry", name), leaves(model.spec[name]), 1, 2 if name == ENTRY else 1, n)


def _norms(model: Model, setting: Setting, sh: Sharding, stages: Sequence[Stage]) -> list[Collective]:
    """The sums of the norms of gradients and parameters: a mesh dim after the other, of as many numbers as there are layouts that
    it cuts. What two stages hold counts on the first of them."""
    assert sh.mesh is not None
    counted = any(s.embedding for s in stages) or not setting.layout.pipelined
    groups = [g for g in _groups(model, stages) if counted or g.key[0] != "entry" or g.key[1] not in model.ends.tied]
    params = [p for g in groups for p in g.params]
    wide = torch.float64 if sh.precision.params == torch.float64 else torch.float32
    found = []
    for tree in ("optimizer" if setting.layout.zero in (1, 2) else "params", "params"):
        cuts = set()
        for p in params:
            placed = zip(sh.mesh.order, sh.stored_placements(p, tree), strict=True)
            cuts.add(frozenset(a for a, x in placed if sh.mesh.sizes[a] > 1 and not x.is_replicate()))
        counts = Counter(a for cut in cuts for a in cut)
        found += [Collective("all-reduce", (a,), sh.mesh.sizes[a], n, wide) for a, n in counts.items()]
    return found
