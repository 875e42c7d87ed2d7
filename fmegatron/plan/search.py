"""The layouts of a model on a cluster, and which of them are the fastest that fit.

    found = plan(Decoder(PRESETS["llama3-70b"]), Cluster(hardware("h100"), 64), seq=8192, rows=512)
    found.best.setting.layout, found.best.tokens_per_second

Layouts are enumerated axis by axis; what `fmegatron.parallel.legality` refuses, and what does not fit even with nothing kept for
the backward, is dropped before any time is asked for. Of layouts that differ in what they keep alone, the first that fits counts: it
runs least again. Always the same for the same arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fmegatron.errors import UserError
from fmegatron.parallel.folding import problem_of_experts
from fmegatron.parallel.legality import Choice, Sizes, problem
from fmegatron.plan.memory import Memory, memory
from fmegatron.plan.rank import Model, Setting, size, virtual_of
from fmegatron.plan.timing import Cluster, Spent, times
from fmegatron.precision import Precision
from fmegatron.testing.layout import Layout

REFINED = 24  # whose pipelines are simulated
MOST_EXPERT_RANKS, EXPERT_RANKS = (
    64,
    2,
)  # the most ranks that experts are spread over, and how many such numbers are tried
SHORTEST = 2048  # tokens of a sequence on a rank, for which cp is thought of
MICROBATCHES = (1, 2, 4, 8)  # rows of one


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
    smallest: Estimate | None = None

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
    top: int = 10,
) -> Found:
    """The fastest layouts that fit, of a model with `spec`, `embed`, `block` and `head` (as a pipeline wants it).

    seq, rows: tokens of a sequence, and sequences of a step. precision: of parameters, products and gradients; None: bf16, with
    gradients summed in fp32. moments, master: of AdamW's state; master None: no copy of the parameters. top: how many to give.

    Raises UserError for sizes below 1, a batch that no number of GPUs divides, and where nothing fits: with what needs least.
    """
    for name, value in (("seq", seq), ("rows", rows), ("gpus", cluster.gpus), ("top", top)):
        if not isinstance(value, int) or value < 1:
            raise UserError(f"plan({name}={value!r}): a whole number of 1 or more")
    planned = model if isinstance(model, Model) else Model(model)
    precision = precision or Precision(params=torch.bfloat16)
    tried: Counter[str] = Counter()
    fitting: list[tuple[float, Setting, Memory]] = []
    least: tuple[Memory, Setting] | None = None
    room = cluster.hardware.memory - cluster.hardware.reserved
    flops = flops_per_token(planned, seq)

    def made(layout: Layout) -> Setting:
        return Setting(layout, rows, seq, precision, moments, master)

    for base in candidates(planned, cluster, rows=rows, seq=seq, tried=tried):
        if static(planned, made(base)) > room:
            tried["too large at rest"] += 1
            if least is None or static(planned, made(base)) < least[0].total:
                found = memory(planned, made(dataclasses.replace(base, remat="nothing")))
                least = (found, made(base)) if least is None or found.total < least[0].total else least
            continue
        for layout in with_schedules(base, planned.layers):
            for remat in policies(planned):
                setting = made(dataclasses.replace(layout, remat=remat))
                needed = memory(planned, setting)
                tried["layouts"] += 1
                if needed.total <= room:
                    spent = times(planned, setting, cluster, simulated=False)
                    fitting.append((spent.total, setting, needed))
                    break
                tried["too much memory"] += 1
                if least is None or needed.total < least[0].total:
                    least = needed, setting
    if not fitting:
        words = "no layout is legal" if least is None else _does_not_fit(*least, cluster)
        raise UserError(
            f"plan: {words} for {cluster.gpus} GPUs: use more GPUs, a shorter sequence or another batch size"
        )
    fitting.sort(key=lambda x: (x[0], str(x[1].layout)))
    refined = [
        Estimate(setting, needed, times(planned, setting, cluster), cluster, flops)
        for _, setting, needed in fitting[: max(top, REFINED)]
    ]
    refined += [
        e for e in map(functools.partial(_by_heads, planned), refined[:top]) if e is not None and e.memory.total <= room
    ]
    refined.sort(key=lambda e: (e.seconds, str(e.setting.layout)))
    return Found(tuple(refined[:top]), tried)


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
    needed, room = memory(planned, setting), cluster.hardware.memory - cluster.hardware.reserved
    why = _does_not_fit(needed, setting, cluster) if needed.total > room else None
    spent = times(planned, setting, cluster)
    return Estimate(setting, needed, spent, cluster, flops_per_token(planned, setting.seq), why)


def _by_heads(model: Model, ring: Estimate) -> Estimate | None:
    """The same layout with heads shared out over cp in place of a ring, if that is legal."""
    setting = ring.setting
    layout = dataclasses.replace(setting.layout, context="ulysses")
    if size(layout, "cp") == 1 or illegal(model, layout, setting.rows, setting.seq) is not None:
        return None
    setting = dataclasses.replace(setting, layout=layout)
    return Estimate(setting, memory(model, setting), times(model, setting, ring.cluster), ring.cluster, ring.flops)


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
                    yield from _of_mesh(model, tp, cp, pp, dp, ep, rows, seq, tried)


def _of_mesh(
    model: Model, tp: int, cp: int, pp: int, dp: int, ep: int, rows: int, seq: int, tried: Counter[str]
) -> Iterator[Layout]:
    mesh = ",".join(f"{n}={s}" for n, s in (("pp", pp), ("dp", dp), ("cp", cp), ("tp", tp)) if s > 1) or "dp=1"
    stages = (0,) if dp * cp == 1 else (1,) if pp > 1 else (1, 3)
    first = Layout(mesh, sp=tp > 1, ep=ep, context="ring" if cp > 1 else "gather")
    if illegal(model, first, rows, seq) is not None:
        tried["not legal"] += 1
        return
    for zero in stages:
        for each in MICROBATCHES:
            micro, left = divmod(rows // dp, each)
            if not left and (pp == 1 or micro >= pp):
                yield dataclasses.replace(first, zero=zero, micro=micro)


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
    from fmegatron.job_model import computations

    return ("everything", "+".join(computations(config)), "nothing")


def static(model: Model, setting: Setting) -> int:
    """Bytes that rest on the first rank: parameters, gradients and the optimizer's state."""
    from fmegatron.plan.memory import held_by, of_stages

    sh = model.sharding(setting)
    rest = of_stages(model, sh, held_by(model, setting, 0))
    master = 0 if setting.master in (None, setting.precision.params) else setting.master.itemsize
    wide = sh.precision.reduce_dtype.itemsize
    return (
        rest.bytes
        + rest.state * (2 * setting.moments.itemsize + master)
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


def _expert_ranks(model: Model, ranks: int) -> Sequence[int]:
    experts = model.program.sizes.get("expert")
    if experts is None:
        return (1,)
    return [n for n in _divisors(math.gcd(experts, ranks)) if n <= MOST_EXPERT_RANKS][-EXPERT_RANKS:]


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
