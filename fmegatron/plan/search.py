"""The layouts of a model on a cluster, and which of them are the fastest that fit.

    found = plan(Decoder(PRESETS["llama3-70b"]), Cluster(hardware("h100"), 64), seq=8192, rows=512)
    found.best.setting.layout, found.best.tokens_per_second

Layouts are enumerated axis by axis; what `fmegatron.parallel.legality` refuses, and what does not fit even with nothing kept for
the backward, is dropped before any time is asked for. Of layouts that differ in what they keep alone, the first that fits counts: it
runs least again. Always the same for the same arguments.

The rest is put in the order of a time that each cannot fall below: by parts that are traced once and by the waiting that a schedule
cannot avoid. In that order layouts are traced, simulated and counted to the byte, until no other one can be among the best. What is a
variant of a layout gets its bound from that one, untraced: another way of attention over cp, which at best costs nothing, and
schedules that split backwards, which keep at least as much as 1F1B and wait at least for the first microbatch.

Stages of as many layers each as can be are looked at first; for the best pipelines then those whose last stage, or both ends, have
fewer, as the head and the embedding take time too.

Left out is what cannot win here: GPipe and breadth-first, which wait like 1F1B and interleaved stages and keep more; ZeRO-2, and
ZeRO-3 in a pipeline, where ZeRO-1 fits with everything kept. Hybrid sharding (parameters over the ranks of one node, of 8 or of 64,
whole between these) is for ZeRO-3 without a pipeline.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fmegatron.accumulate import OVERLAPS
from fmegatron.axes import PIPELINE
from fmegatron.errors import UserError
from fmegatron.job_model import computations
from fmegatron.models.config import DecoderConfig
from fmegatron.parallel.folding import problem_of_experts
from fmegatron.parallel.legality import Choice, Sizes, problem
from fmegatron.parallel.stages import Stage, even, uneven
from fmegatron.plan.memory import Memory, held_by, memory, of_stages, state_bytes
from fmegatron.plan.rank import FOLDED, SPLIT, Model, Rough, Setting, size, virtual_of
from fmegatron.plan.timing import Cluster, Spent, times
from fmegatron.plan.waiting import first_microbatch, half_of_first_microbatch, least_bubble
from fmegatron.precision import Precision
from fmegatron.rules import CONTEXTS
from fmegatron.testing.layout import Layout

MOST_EXPERT_RANKS = 64  # that experts are spread over,
EXPERT_RANKS = 2  # and how many such numbers are tried
SHORTEST = 2048  # tokens of a sequence on a rank, for which cp is thought of
MICROBATCHES = (1, 2, 4, 8)  # rows of one
HYBRID_NODES = (1, 8, 64)  # nodes over which hybrid sharding cuts parameters
FEWER = (1, 2)  # layers that the last stage of a pipeline may have less than others


@dataclass(frozen=True)
class Estimate:
    """A layout, and what it needs. why_not: what is wrong with it, in words; None for one that fits."""

    setting: Setting
    memory: Memory
    spent: Spent
    cluster: Cluster
    flops: float  # of the model, a token
    why_not: str | None = None

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.spent.total

    @property
    def tokens_per_second(self) -> float:
        """For each GPU."""
        return self.setting.tokens / self.seconds / self.cluster.gpus

    @property
    def utilisation(self) -> float:
        """The model's floating-point operations, nothing twice, as a part of the GPUs' bf16 peak."""
        return self.flops * self.tokens_per_second / self.cluster.hardware.peak("bf16")


@dataclass(frozen=True)
class Found:
    """estimates: the fastest first. tried: how many layouts were looked at, and why others were dropped."""

    estimates: tuple[Estimate, ...]
    tried: Counter[str] = field(default_factory=Counter)

    @property
    def best(self) -> Estimate:
        return self.estimates[0]


def plan(
    model: Any,
    cluster: Cluster,
    *,
    seq: int,
    rows: int,
    precision: Precision | None = None,
    moments: torch.dtype = torch.float32,
    master: torch.dtype | None = torch.float32,
    offload: bool = False,
    top: int = 10,
) -> Found:
    """The fastest layouts that fit, of a model with `spec`, `embed`, `block` and `head` (as a pipeline wants it).

    seq, rows: tokens of a sequence, and sequences of a step. precision: of parameters, products and gradients; None: bf16, with
    gradients summed in fp32. moments, master: of AdamW's state; master None: no copy of the parameters. offload: that state in host memory. top: how many to
    give.

    Raises UserError for sizes below 1, a batch that no number of GPUs divides, and where nothing fits: with what needs least.
    """
    for name, value in (("seq", seq), ("rows", rows), ("gpus", cluster.gpus), ("top", top)):
        if not isinstance(value, int) or value < 1:
            raise UserError(f"plan({name}={value!r}): a whole number of 1 or more")
    planned = model if isinstance(model, Model) else Model(model)
    precision = precision or Precision(params=torch.bfloat16)
    search = _Search(planned, cluster, rows, seq, precision, moments, master, offload)
    for base in candidates(planned, cluster, rows=rows, seq=seq, tried=search.tried):
        search.add(base)
    found = search.best(top)
    if not found:
        least = None if search.least is None else search.least[1]
        words = "no layout is legal" if least is None else _does_not_fit(memory(planned, least), least, cluster)
        raise UserError(
            f"plan: {words} for {cluster.gpus} GPUs: use more GPUs, a shorter sequence or another batch size"
        )
    return Found(tuple(found), search.tried)


@dataclass(order=True)
class _Option:
    """A layout that may be among the best. bound: seconds that a step takes at least, with what it may keep at most."""

    bound: float
    text: str
    layout: Layout = field(compare=False)


class _Search:
    """Layouts by the least that they can take, and the best of them exactly."""

    def __init__(self, model: Model, cluster: Cluster, rows: int, seq: int, *formats: Any) -> None:
        self.model, self.rough = model, Rough(model)
        self.cluster, self.rows, self.seq, self.formats = cluster, rows, seq, formats
        self.room = cluster.hardware.memory - cluster.hardware.reserved
        self.policies = policies(model)
        self.options: list[_Option] = []
        self.tried: Counter[str] = Counter()
        self.least: tuple[int, Setting] | None = None  # of those that do not fit, what needs about least

    def setting(self, layout: Layout) -> Setting:
        return Setting(layout, self.rows, self.seq, *self.formats)

    def add(self, base: Layout) -> None:
        """Takes in a mesh with its microbatches, and all that can be done with it."""
        keeps = self._of_zero(base)
        if base.zero == 1 and base.micro > 1 and keeps != self.policies[0]:
            for zero in (2, 3) if size(base, PIPELINE) > 1 else (2,):
                self._of_zero(dataclasses.replace(base, zero=zero))

    def _of_zero(self, base: Layout) -> str | None:
        """What the plain schedule can keep; None where it does not fit."""
        plain = self.setting(base)
        if static(self.model, plain) > self.room:
            self.tried["too large at rest"] += 1
            if self.least is None or static(self.model, plain) < self.least[0]:
                self._note(self.setting(dataclasses.replace(base, remat="nothing")))
            return None
        keeps = None
        for layout in with_schedules(base, self.model.layers):
            fits = self._fitting(layout)
            keeps = fits.layout.remat if layout is base and fits is not None else keeps
            if fits is None:
                continue
            spent = times(self.rough, fits, self.cluster, waiting=least_bubble)
            self._offer(fits.layout, spent.total)
            if layout is base and size(base, PIPELINE) > 1:
                for name in SPLIT:
                    least = half_of_first_microbatch if name in FOLDED else first_microbatch
                    spent = times(self.rough, fits, self.cluster, waiting=least)
                    other = dataclasses.replace(fits.layout, schedule=name)
                    if illegal(self.model, other, self.rows, self.seq) is None:
                        self._offer(other, spent.total)
        return keeps

    def _offer(self, layout: Layout, bound: float) -> None:
        """A layout, with all ways of attention over cp."""
        cp = size(layout, "cp")
        for context in CONTEXTS if cp > 1 else (layout.context,):
            if context == "ulysses+ring" and cp == 2:  # which would be a ring of two
                continue
            other = dataclasses.replace(layout, context=context)
            if context == layout.context or illegal(self.model, other, self.rows, self.seq) is None:
                self.tried["legal layouts that may fit"] += 1
                self.options.append(_Option(bound, str(other), other))

    def _fitting(self, layout: Layout, *, exact: bool = False) -> Setting | None:
        """With the first policy, from the layout's on, with which it fits."""
        for remat in self.policies[self.policies.index(layout.remat) :]:
            setting = self.setting(dataclasses.replace(layout, remat=remat))
            if memory(self.model if exact else self.rough, setting, exact=exact).total <= self.room:
                return setting
        self.tried["too much memory"] += 1
        self._note(setting)
        return None

    def _note(self, setting: Setting) -> None:
        needed = memory(self.rough, setting, exact=False).total
        if self.least is None or needed < self.least[0]:
            self.least = needed, setting

    def best(self, top: int) -> list[Estimate]:
        """The fastest of all, the first one first."""
        flops, found = flops_per_token(self.model, self.seq), list[Estimate]()
        heapq.heapify(self.options)
        while self.options and (len(found) < top or self.options[0].bound < found[top - 1].seconds):
            option = heapq.heappop(self.options)
            if (setting := self._fitting(option.layout, exact=True)) is None:
                continue
            self.tried["simulated"] += 1
            spent = times(self.model, setting, self.cluster)
            estimate = Estimate(setting, memory(self.model, setting), spent, self.cluster, flops)
            bisect.insort(found, estimate, key=_in_order)
        for e in found[:top]:
            for layout in lighter_ends(self.model, e.setting.layout):
                if (setting := self._fitting(layout, exact=True)) is not None:
                    self.tried["with lighter ends"] += 1
                    spent = times(self.model, setting, self.cluster)
                    found.append(Estimate(setting, memory(self.model, setting), spent, self.cluster, flops))
        return sorted(found, key=_in_order)[:top]


def _in_order(e: Estimate) -> tuple[float, str]:
    return e.seconds, str(e.setting.layout)


def estimate(model: Any, setting: Setting, cluster: Cluster) -> Estimate:
    """What one layout needs. Raises UserError for one that is not legal."""
    planned = model if isinstance(model, Model) else Model(model)
    layout = setting.layout
    if layout.schedule == "1f1b" and (layout.virtual or 1) > 1:  # the same, as `make_schedule` says
        layout = dataclasses.replace(layout, schedule="interleaved")
        setting = dataclasses.replace(setting, layout=layout)
    if layout.world != cluster.gpus:
        raise UserError(f"layout {layout} has {layout.world} ranks, but there are {cluster.gpus} GPUs: change either")
    if (wrong := illegal(planned, layout, setting.rows, setting.seq)) is not None:
        raise UserError(f"layout {layout} is not legal for this model: {wrong}")
    if (wrong := _problem_beside(planned, setting)) is not None:
        raise UserError(f"microbatch overlap {setting.beside} with layout {layout}: {wrong}")
    needed, room = memory(planned, setting), cluster.hardware.memory - cluster.hardware.reserved
    why = _does_not_fit(needed, setting, cluster) if needed.total > room else None
    spent = times(planned, setting, cluster)
    return Estimate(setting, needed, spent, cluster, flops_per_token(planned, setting.seq), why)


def _problem_beside(model: Model, setting: Setting) -> str | None:
    """Why exchanges cannot run beside another microbatch, as `fmegatron train` has it; None if they can, or need not."""
    layout = setting.layout
    if setting.beside == "none":
        return None
    if setting.beside not in OVERLAPS:
        return f"use one of {', '.join(OVERLAPS)}"
    if not model.program.has_experts:
        return "the model has no experts, whose exchanges it hides: leave it out"
    if layout.micro == 1:
        return "there is one microbatch: use two or more"
    if layout.pipelined and (setting.beside == "pairs" or layout.schedule != "dualpipev"):
        return (
            "a pipeline joins forwards and backwards with schedule=dualpipev alone: use 1f1b with that, or leave it out"
        )
    return None


def flops_per_token(model: Model, seq: int) -> float:
    """The model's own figure, where it has one; else 6 operations for each parameter that a token meets."""
    own = getattr(model.model, "flops_per_token", None)
    return own(seq) if callable(own) else 6.0 * model.active_parameters


def _does_not_fit(needed: Memory, setting: Setting, cluster: Cluster) -> str:
    gib = float(1 << 30)
    largest = sorted(needed.parts.items(), key=lambda x: -x[1])[:3]
    shown = ", ".join(f"{n} {b / gib:.1f}" for n, b in largest)
    h = cluster.hardware
    return f"{setting.layout} needs {needed.total / gib:.1f} GiB on a GPU ({shown}), and there are {(h.memory - h.reserved) / gib:.1f} GiB"


# ------------------------------------------------------------------------------------------------------------ candidates


def candidates(model: Model, cluster: Cluster, *, rows: int, seq: int, tried: Counter[str]) -> Iterator[Layout]:
    """Meshes with their microbatches, ZeRO and ways of attention, that are legal."""
    world, node, experts = cluster.gpus, cluster.hardware.node, "expert" in model.program.sizes
    for tp in _divisors(min(world, node)):
        if world % tp:
            continue
        for cp in _divisors(world // tp):
            if cp > 1 and seq // cp < (2 * SHORTEST if experts else SHORTEST):
                break
            for pp in _divisors(world // tp // cp):
                if pp > model.layers:
                    break
                dp = world // tp // cp // pp
                if rows % dp:
                    tried["the batch does not divide"] += 1
                    continue
                for ep in _expert_ranks(model, dp * cp * tp):
                    yield from _of_mesh(model, tp, cp, pp, dp, ep, rows, seq, node, tried)


def _of_mesh(
    model: Model, tp: int, cp: int, pp: int, dp: int, ep: int, rows: int, seq: int, node: int, tried: Counter[str]
) -> Iterator[Layout]:
    mesh = ",".join(f"{n}={s}" for n, s in (("pp", pp), ("dp", dp), ("cp", cp), ("tp", tp)) if s > 1) or "dp=1"
    stages = (0,) if dp * cp == 1 else (0, 1) if pp > 1 else (0, 1, 3)  # further ones where they are needed
    first = Layout(mesh, sp=tp > 1, ep=ep, context="ring" if cp > 1 else "gather")
    hybrid = [*_hybrids(first, dp, node)] if pp == 1 else []
    if illegal(model, first, rows, seq) is not None:
        tried["not legal"] += 1
        return
    for zero in stages:
        for each in MICROBATCHES:
            micro, left = divmod(rows // dp, each)
            if not left and (pp == 1 or micro >= pp):
                yield dataclasses.replace(first, zero=zero, micro=micro)
                yield from (dataclasses.replace(h, micro=micro) for h in hybrid if zero == 3)


def _hybrids(layout: Layout, dp: int, node: int) -> Iterator[Layout]:
    """A layout with hybrid sharding: ZeRO-3 over the data ranks of some nodes, whole copies over the others."""
    beside = size(layout, "cp", "tp")
    for nodes in HYBRID_NODES:
        inner = nodes * node // beside
        if 1 < inner < dp and dp % inner == 0 and inner * beside == nodes * node:
            sizes = {"dp": dp // inner, "fsdp": inner, "cp": size(layout, "cp"), "tp": size(layout, "tp")}
            mesh = ",".join(f"{n}={s}" for n, s in sizes.items() if s > 1)
            yield dataclasses.replace(layout, mesh=mesh, zero=3, store="fsdp" + "+cp" * (sizes["cp"] > 1))


def lighter_ends(model: Model, layout: Layout) -> Iterator[Layout]:
    """The layouts of a pipeline whose last stage, or both ends, have fewer layers than stages have that are as even as can be."""
    count, seen = size(layout, PIPELINE) * virtual_of(layout), set[str]()
    if not layout.pipelined or layout.stages or count < 2:
        return
    plain = even(model.layers, count)
    found = [even(model.layers, count, count_embedding=e, count_head=True) for e in (False, True)]
    rest = [n for n in FEWER if n <= len(plain[-1].layers)]
    found += [uneven(model.layers, count, last=len(plain[-1].layers) - n) for n in rest if count > 2]
    for stages in found:
        text = short(stages)
        if stages != plain and text not in seen:
            seen.add(text)
            yield dataclasses.replace(layout, stages=text)


def short(stages: Sequence[Stage]) -> str:
    """Stages in Megatron-LM's notation, alike ones in a row together: "Et*3|(t*4|)*14t*3L"."""
    parts = [f"t*{len(s.layers)}" if len(s.layers) > 1 else "t" * len(s.layers) for s in stages]
    text = f"E{parts[0]}|"
    for part, some in itertools.groupby(parts[1:-1]):
        n = len(list(some))
        text += f"({part}|)*{n}" if n > 1 else f"{part}|"
    return f"{text}{parts[-1]}L"


def with_schedules(layout: Layout, layers: int) -> Iterator[Layout]:
    """A layout with the schedules that its pipeline may have."""
    pp = size(layout, "pp")
    yield layout
    if pp == 1:
        return
    for virtual in (2, 3, 4, 5, 6, 8, 10, 12):
        if pp * virtual <= layers + 2 and layout.micro % pp == 0:
            yield dataclasses.replace(layout, schedule="interleaved", virtual=virtual)


def policies(model: Model) -> tuple[str, ...]:
    """What layers may keep, the most first; of mixtures of experts, whose traces are long, the extremes alone."""
    config = getattr(model.model, "config", None)
    if config is None or not model.program.has_remat:
        return ("everything",)
    if model.program.has_experts:
        return ("everything", "nothing")
    return ("everything", "+".join(computations(config)), "nothing")


def static(model: Model, setting: Setting) -> int:
    """Bytes that rest on the first rank: parameters, gradients and the optimizer's state."""
    sh = model.sharding(setting)
    rest = of_stages(model, sh, held_by(model, setting, 0))
    wide = sh.precision.reduce_dtype.itemsize
    return (
        rest.bytes
        + rest.state * (0 if setting.offload else state_bytes(setting))
        + (rest.params if setting.layout.micro > 1 and setting.layout.zero != 2 else rest.state) * wide
    )


def illegal(model: Model, layout: Layout, rows: int, seq: int) -> str | None:
    """Why a layout cannot be; None if it can."""
    sizes, attention = model.program.sizes, "kv" in model.program.sizes
    inside = layout.inside
    found = problem(
        Choice(inside.axes, layout.sp, layout.zero, layout.store_axes, layout.state_axes, layout.context, layout.micro),
        Sizes(
            heads=sizes["kv"] * sizes.get("group", 1) if attention else None,
            kv_heads=sizes.get("kv"),
            batch_size=rows,
            seq_len=seq,
            vocab=sizes.get("vocab"),
            mlp=sizes.get("mlp"),
            positions=sizes.get("position"),
            uneven=("vocab",),
        ),
    )
    found = found or _problem_of_remat(model, layout)
    if found is None and size(layout, "pp") * virtual_of(layout) > model.layers + 2:
        found = f"{size(layout, 'pp') * virtual_of(layout)} stages are more than {model.layers} layers with both ends"
    count = size(layout, "pp") * virtual_of(layout)
    if found is None and layout.stages and (there := len(model.stages(layout))) != count:
        found = f"stages={layout.stages} has {there} stages, but the pipeline has {count}"
    if (
        found is None
        and layout.pipelined
        and size(layout, "pp") > layout.micro > 0
        and layout.schedule == "interleaved"
    ):
        found = (
            f"interleaved stages need as many microbatches as ranks, {size(layout, 'pp')}, and there are {layout.micro}"
        )
    found = found or problem_of_experts(
        ranks=inside.world, ep=layout.ep, etp=layout.etp, experts=sizes.get("expert"), width=sizes.get("emlp")
    )
    if found is None and layout.ep * layout.etp > 1:
        found = model.kept(("experts", layout.mesh, layout.ep, layout.etp), lambda: model.unplaced(layout))
    return found


def _problem_of_remat(model: Model, layout: Layout) -> str | None:
    config = getattr(model.model, "config", None)
    if layout.remat in ("everything", "nothing") or not isinstance(config, DecoderConfig):
        return None
    known = computations(config)
    for name in layout.remat.split("+"):
        if name.endswith(":host") and name.removesuffix(":host") in known:
            return f"remat={name}: activations in host memory are not planned: leave :host out"
        if name not in known:
            return f"remat={layout.remat}: {name!r} is no computation of this model's layers: use {', '.join(known)}"
    return None


def _expert_ranks(model: Model, ranks: int) -> Sequence[int]:
    experts = model.program.sizes.get("expert")
    if experts is None:
        return (1,)
    return [n for n in _divisors(math.gcd(experts, ranks)) if n <= MOST_EXPERT_RANKS][-EXPERT_RANKS:]


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
