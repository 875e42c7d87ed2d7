"""How long a step takes, by part.

    times(model, setting, cluster)

A rank's work in a microbatch is that of its traces on this hardware. Collectives of activations stand in the way of what needs
them; those of parameters and gradients run beside a layer's products, and only what is longer than these counts. Messages and
waiting of a pipeline are those of its schedule, simulated.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fmegatron.axes import PIPELINE
from fmegatron.mesh import Mesh
from fmegatron.parallel.schedules import BACKWARD, FORWARD, INPUT, WEIGHT
from fmegatron.parallel.stages import Stage
from fmegatron.plan.hardware import Hardware
from fmegatron.plan.memory import of_layer, of_stages, state_bytes
from fmegatron.plan.rank import SPLIT, Model, Setting, of_ranks, placement, size, virtual_of
from fmegatron.plan.residuals import fewer, schedule_of
from fmegatron.plan.tracing import Work
from fmegatron.plan.waiting import Seconds, bubble
from fmegatron.recording import Collective
from fmegatron.sharding import Sharding
from fmegatron.tree import leaves

BESIDE = 0.85  # of the time of products that collectives can run beside


@dataclass(frozen=True)
class Cluster:
    """Machines: so many GPUs of some hardware, in nodes of its size."""

    hardware: Hardware
    gpus: int


@dataclass
class Spent:
    """Seconds by part. exposed: of collectives that nothing runs beside, by axes."""

    products: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    optimizer: float = 0.0
    bubble: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def total(self) -> float:
        return (
            self.products
            + self.attention
            + self.memory_bound
            + self.optimizer
            + self.bubble
            + sum(self.exposed.values())
        )

    @property
    def parts(self) -> dict[str, float]:
        """{part: seconds}, the longest part of which comes first among collectives."""
        found = {"products": self.products, "attention": self.attention, "memory-bound": self.memory_bound}
        found |= {f"exposed {n}": t for n, t in sorted(self.exposed.items(), key=lambda x: (-x[1], x[0])) if t > 0}
        return found | {"bubble": self.bubble, "optimizer": self.optimizer}

    def add(self, other: Spent, times: float = 1.0) -> None:
        self.products += times * other.products
        self.attention += times * other.attention
        self.memory_bound += times * other.memory_bound
        for n, t in other.exposed.items():
            self.exposed[n] += times * t


def times(
    model: Model,
    setting: Setting,
    cluster: Cluster,
    *,
    waiting: Callable[[Setting, Seconds, float], float] | None = None,
) -> Spent:
    """The time of a step. waiting: of a pipeline's busiest rank; None: `bubble`, by simulation."""
    layout, sh = setting.layout, model.sharding(setting)
    ranks, micro = size(layout, PIPELINE), layout.micro
    work = _Work(model, setting, cluster, sh)
    stages, held = model.stages(layout), of_ranks(placement(layout))
    each = [work.stage(s) for s in stages]
    per_rank: dict[Any, Spent] = {}  # of ranks whose stages are alike once
    slowest, most = 0, -1.0
    for r, some in enumerate(held):
        alike = tuple(id(each[n]) for n in some)
        if alike not in per_rank:
            per_rank[alike] = spent = Spent()
            for n in some:
                for part in each[n].values():
                    spent.add(part)
            if spent.total > most:
                slowest, most = r, spent.total
    found = Spent()
    found.add(per_rank[tuple(id(each[n]) for n in held[slowest])], micro)
    if setting.beside != "none":
        found.exposed["ep"] -= hidden(setting, slowest, [each[n] for n in held[slowest]])
    message = 0.0
    if ranks > 1:
        far = cluster.gpus // ranks >= cluster.hardware.node or ranks * sh_world(sh) > cluster.hardware.node
        message = cluster.hardware.message(model.trace(setting, "embed", setting.microbatch).out, far=far)
    totals = {id(parts): {n: spent.total for n, spent in parts.items()} for parts in each}
    seconds = [totals[id(parts)] for parts in each]
    found.bubble = (waiting or bubble)(setting, seconds, message)
    own = [stages[n] for n in held[slowest]]
    back = sum(t for n in held[slowest] for part, t in seconds[n].items() if part != FORWARD)
    found.exposed["dp"] += work.reduction(own, back)
    found.optimizer = work.optimizer(own)
    return found


def hidden(setting: Setting, rank: int, stages: Sequence[Mapping[str, Spent]]) -> float:
    """How much of the exchanges of experts runs beside another microbatch's computing. stages: of a rank, what a microbatch takes.

    Those of a forward under the backward that runs by turns with it and the other way round, in all pairs that there are: of
    neighbouring microbatches, or of a schedule that joins them. "pairs": of a forward under another forward, a backward under a backward.
    """
    layout, micro = setting.layout, setting.layout.micro
    back = [s[BACKWARD] if BACKWARD in s else _sum(s[INPUT], s[WEIGHT]) for s in stages]
    there = _sum(*(s[FORWARD] for s in stages)), _sum(*back)
    if setting.beside == "pairs":
        return (micro - micro % 2) * sum(_beside(x, x) for x in there)
    pairs = float(micro - 1)
    if layout.pipelined:  # each is of one stage of the rank
        few = fewer(layout.schedule, size(layout, PIPELINE), micro)
        table = schedule_of(layout.schedule, size(layout, PIPELINE), few, virtual_of(layout))
        pairs = sum(a.joined for a in table.programs[rank]) / len(stages) + micro - few
    return pairs * (_beside(there[0], there[1]) + _beside(there[1], there[0]))


def _beside(one: Spent, other: Spent) -> float:
    """What of one's exchanges fits beside the other's computing."""
    return min(one.exposed.get("ep", 0.0), BESIDE * (other.products + other.attention + other.memory_bound))


def _sum(*some: Spent) -> Spent:
    found = Spent()
    for one in some:
        found.add(one)
    return found


def sh_world(sh: Sharding) -> int:
    return 1 if sh.mesh is None else sh.mesh.world


class _Work:
    """Times of the parts of one setting."""

    def __init__(self, model: Model, setting: Setting, cluster: Cluster, sh: Sharding) -> None:
        self.model, self.setting, self.sh = model, setting, sh
        self.hardware = cluster.hardware
        self.directions = (FORWARD, INPUT, WEIGHT) if setting.layout.schedule in SPLIT else (FORWARD, BACKWARD)
        self.near = functools.cache(functools.partial(ranks_of_a_node, sh.mesh, self.hardware.node))
        self.layers: dict[tuple[int, str], Spent] = {}
        self.stages: dict[Any, dict[str, Spent]] = {}

    def stage(self, stage: Stage) -> dict[str, Spent]:
        """One microbatch's directions of a stage; the same object for stages that are alike."""
        key = self.model.alike(stage)
        if key not in self.stages:
            counts = Counter(dict(key[0]))
            self.stages[key] = {part: self._stage(counts, stage, part) for part in self.directions}
        return self.stages[key]

    def _stage(self, counts: Mapping[int, int], stage: Stage, direction: str) -> Spent:
        found = Spent()
        for kind, n in counts.items():
            found.add(self.layer(kind, direction), n)
        ends = (("embed", stage.embedding), ("head", stage.head))
        for part in (name for name, there in ends if there):
            found.add(self.of(self.model.trace(self.setting, part, self.setting.microbatch).work(direction)))
        if counts:
            found.exposed["dp"] += self.edges(max(counts), direction)
        return found

    def edges(self, kind: int, direction: str) -> float:
        """What of a stage's collectives of parameters has no layer to run beside: the first gather, which all wait for, and the
        last reduction, of gradients of the layer that comes last."""
        found = self.layer(kind, direction)
        room = BESIDE * (found.products + found.attention + found.memory_bound)
        first = self.collectives(self.params(kind, "enter")) if direction != WEIGHT else 0.0
        return min(first, room) + min(self.leaving(kind) if direction in (BACKWARD, WEIGHT) else 0.0, room)

    def leaving(self, kind: int) -> float:
        """The reduction of a layer's gradients in every microbatch."""
        found = self.collectives(self.params(kind, "leave"))
        return found + (self.collectives(self.params(kind, "settle")) if self.setting.layout.zero == 2 else 0.0)

    def layer(self, kind: int, direction: str) -> Spent:
        """A layer, with its parameters' collectives beside it."""
        if (kind, direction) not in self.layers:
            trace = self.model.trace(self.setting, kind, self.setting.microbatch)
            found = self.of(trace.work(direction))
            found = replace(found, exposed=defaultdict(float, found.exposed))
            beside = self.collectives(self.params(kind, "enter")) if direction != WEIGHT else 0.0
            if direction in (BACKWARD, WEIGHT):
                beside += self.leaving(kind)
                found.memory_bound += self.accumulation(kind)
            room = BESIDE * (found.products + found.attention + found.memory_bound)
            if beside > room:
                found.exposed["dp"] += beside - room
            self.layers[kind, direction] = found
        return self.layers[kind, direction]

    def params(self, kind: int, what: str) -> Counter[Collective]:
        return self.model.moves(self.sh, ("layer", kind), leaves(self.model.spec["layers"][kind]), what)

    def accumulation(self, kind: int) -> float:
        """Adding a layer's gradients to those of the microbatches before."""
        held = of_layer(self.model, self.sh, kind).params
        wide = self.sh.precision.reduce_dtype.itemsize
        size = self.sh.precision.params.itemsize
        several = self.setting.layout.micro > 1
        return (
            self.hardware.stream(held * (size + wide * (2 if several else 1)), 1, plain=True)
            if several or wide != size
            else 0.0
        )

    def of(self, work: Work) -> Spent:
        """What computes, and the collectives that it waits for."""
        where = tuple((c.axes, self.near(c.axes)) for c in work.collectives)
        chunks = self.setting.layout.overlap
        return self.model.kept(("time", id(work), id(self.hardware), where, chunks), lambda: self._of(work, chunks))

    def _of(self, work: Work, chunks: int) -> Spent:
        h = self.hardware
        found = Spent(
            products=sum(h.product(p) * n for p, n in work.products.items()),
            attention=sum(h.attend(a) * n for a, n in work.attention.items()),
        )
        others = (
            work.kernels - sum(work.products.values()) - sum(work.attention.values()) - sum(work.collectives.values())
        )
        found.memory_bound = h.stream(work.bytes, max(0, others))
        ring = 0.0
        for c, n in work.collectives.items():
            t = h.collective(c, self.near(c.axes)) * n
            if c.kind == "exchange":
                ring += t
            else:
                found.exposed[label(c)] += t
        if ring > BESIDE * found.attention:  # keys and values travel beside attention
            found.exposed["cp"] += ring - BESIDE * found.attention
        if chunks > 1 and found.exposed.get("tp"):
            self._in_chunks(found, work, chunks)
        return found

    def _in_chunks(self, found: Spent, work: Work, chunks: int) -> None:
        """Products cut into so many chunks, whose gathers and scatters run beside the other chunks' products: all but the first, or the
        last, as far as these take as long. Gradients of weights are whole products. Smaller products reach less."""
        cut = {p: n for p, n in work.products.items() if p.batch == 1 and not p.weight}
        parts = {p: chunks * self.hardware.product(replace(p, m=-(-p.m // chunks))) for p in cut}
        found.products += sum((parts[p] - self.hardware.product(p)) * n for p, n in cut.items())
        beside = BESIDE * sum(parts[p] * n for p, n in cut.items())
        found.exposed["tp"] -= min(found.exposed["tp"] * (1 - 1 / chunks), beside * (1 - 1 / chunks))

    def collectives(self, some: Counter[Collective]) -> float:
        return sum(self.hardware.collective(c, self.near(c.axes)) * n for c, n in some.items())

    def reduction(self, held: list[Stage], backward: float) -> float:
        """What the last microbatch's reduction of gradients, beside its backward, and the gather of new parameters, add."""
        settle = back = tail = 0.0
        for kind, n in Counter(self.model.kinds[i] for s in held for i in s.layers).items():
            if self.setting.layout.zero != 2:
                one = self.collectives(self.params(kind, "settle"))
                settle, tail = settle + n * one, max(tail, one)
            back += n * self.collectives(self.params(kind, "return"))
        for s in held:
            some = self.model.entries(s)
            key = ("ends", s.embedding, s.head)
            settle += self.collectives(self.model.moves(self.sh, key, some, "settle"))
            back += self.collectives(self.model.moves(self.sh, key, some, "return"))
        room = BESIDE * backward
        return max(settle - room, tail) + back  # the last layer has nothing to run beside

    def optimizer(self, held: list[Stage]) -> float:
        """Norms, clipping and AdamW in one pass; a state in host memory comes and goes meanwhile, both ways at once."""
        s = self.setting
        rest = of_stages(self.model, self.sh, held)
        size, wide = s.precision.params.itemsize, self.sh.precision.reduce_dtype.itemsize
        master = 0 if s.master in (None, s.precision.params) else 2 * s.master.itemsize
        each = (
            wide + 4 * s.moments.itemsize + (master or size) + size + wide + size
        )  # and the norms of gradients and parameters
        took = self.hardware.stream(rest.state * each, 12, plain=True)
        return max(took, rest.state * state_bytes(s) / self.hardware.host) if s.offload else took


def label(c: Collective) -> str:
    """What a collective of activations is counted as."""
    kinds = sorted({a.split("_")[0].rstrip("0123456789") for a in c.axes})
    if c.kind == "all-to-all" and kinds != ["cp"]:
        return "ep"
    return "+".join(kinds)


def ranks_of_a_node(mesh: Mesh | None, node: int, axes: tuple[str, ...]) -> int:
    """How many ranks of a group over some axes are on one node, nodes being so many adjacent ranks."""
    if mesh is None:
        return 1
    found, stride = 1, 1
    for axis, n in reversed(list(mesh.sizes.items())):
        if axis in axes:
            found *= max(1, min(n, node // stride))
        stride *= n
    return found
