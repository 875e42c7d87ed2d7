"""How long the ranks of a pipeline wait for one another: by its schedule, simulated, and the least that no schedule can avoid.

    bubble(setting, stages, message)        # stages: seconds of each direction of each stage; message: of one between ranks

The steps of a schedule are put once into an order in which they can run; then a simulation is one pass over that order, whatever the
costs. It gives what `fmegatron.parallel.schedule_simulation` gives for a table without sends and receives.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence

from fmegatron.axes import PIPELINE
from fmegatron.parallel.schedule_check import needs, steps
from fmegatron.parallel.schedules import BACKWARD, FORWARD, INPUT, WEIGHT
from fmegatron.plan.rank import Setting, placement, size, virtual_of
from fmegatron.plan.residuals import fewer, schedule_of

WAITS = ("1f1b", "dualpipev")  # schedules in whose steady state messages are waited for

Seconds = Sequence[Mapping[str, float]]  # of each stage: what each direction of a microbatch takes
Kind = tuple[tuple[str, int], ...]  # of a step: (direction, stage) of its actions
Order = tuple[tuple[tuple[int, int, tuple[int, ...]], ...], tuple[Kind, ...]]


def bubble(setting: Setting, stages: Seconds, message: float) -> float:
    """How much longer a step takes than its busiest rank computes, simulated: with fewer microbatches than there are, as waiting is
    the same, or grows evenly where every message is waited for."""
    layout = setting.layout
    ranks, name, micro = size(layout, PIPELINE), layout.schedule, layout.micro
    if ranks == 1:
        return 0.0
    few, virtual = fewer(name, ranks, micro), virtual_of(layout)
    found = waiting(_order(name, ranks, few, virtual), ranks, stages, message)
    if name in WAITS and message and few + ranks <= micro:
        more = waiting(_order(name, ranks, few + ranks, virtual), ranks, stages, message)
        found += (micro - few) // ranks * (more - found)
    return found


def waiting(order: Order, ranks: int, stages: Seconds, message: float) -> float:
    """How much longer all ranks take than the busiest of them computes."""
    steps, kinds = order
    costs = [sum(_seconds(stages[stage], kind) for kind, stage in some) for some in kinds]
    ends, busy, there = [0.0] * ranks, [0.0] * ranks, list[float]()  # there: when another rank has what a step made
    for rank, kind, others in steps:
        start = ends[rank]
        for n in others:
            if there[n] > start:
                start = there[n]
        ends[rank] = end = start + costs[kind]
        busy[rank] += end - start
        there.append(end + message)
    return max(ends) - max(busy)


def _seconds(stage: Mapping[str, float], kind: str) -> float:
    """Of a direction; of half a backward where it is not known apart, half of it, and of a whole one both halves."""
    if kind == BACKWARD and BACKWARD not in stage:
        return stage[INPUT] + stage[WEIGHT]
    return stage[kind] if kind in stage else stage[BACKWARD] / 2


@functools.lru_cache(maxsize=16)
def _order(name: str, ranks: int, microbatches: int, virtual: int) -> Order:
    """Every rank's steps in one order in which they can run, each as (rank, number of its kind, the steps of other ranks whose
    results it needs), and the kinds. What it needs of its own rank stands before it anyway."""
    table = schedule_of(name, ranks, microbatches, virtual)
    stages, owner = table.stages, table.placement
    programs = [steps(p) for p in table.programs]
    done, made, kinds = [0] * ranks, dict[tuple[str, int, int | None], int](), dict[Kind, int]()
    order: list[tuple[int, int, tuple[int, ...]]] = []
    blocked: dict[tuple[str, int, int | None], int] = {}  # the rank that waits for a result
    ready = deque(range(ranks))
    while ready:
        rank = ready.popleft()
        program = programs[rank]
        while done[rank] < len(program):
            step = program[done[rank]]
            wanted = [key for a in step for key in needs(a, stages) if owner[key[1]] != rank]
            missing = next((key for key in wanted if key not in made), None)
            if missing is not None:
                blocked[missing] = rank
                break
            kind = tuple((a.kind, a.stage) for a in step)
            number = len(order)
            order.append((rank, kinds.setdefault(kind, len(kinds)), tuple(made[key] for key in wanted)))
            done[rank] += 1
            for a in step:
                if a.kind != WEIGHT:
                    key = (FORWARD if a.kind == FORWARD else BACKWARD, a.stage, a.microbatch)
                    made[key] = number
                    if key in blocked:
                        ready.append(blocked.pop(key))
    return tuple(order), tuple(kinds)


def least_bubble(setting: Setting, stages: Seconds, message: float) -> float:
    """What a schedule with whole backwards cannot avoid: a rank begins when a microbatch has come through the stages before its first
    one, and what it computes last goes back through these. Of equal stages that is (p - 1)(F + B), the bubble of 1F1B."""
    owner, micro = placement(setting.layout), setting.layout.micro
    busy = [0.0] * size(setting.layout, PIPELINE)
    wait, before = dict[int, float](), 0.0
    for rank, s in zip(owner, stages, strict=True):
        wait.setdefault(rank, before)
        busy[rank] += micro * sum(s.values())
        before += sum(s.values()) + 2 * message
    return max(b + wait[r] for r, b in enumerate(busy)) - max(busy)


def first_microbatch(setting: Setting, stages: Seconds, message: float) -> float:
    """What no schedule can avoid on these ranks: a microbatch comes to the last one through all of the others."""
    ranks = size(setting.layout, PIPELINE)
    return (ranks - 1) * message + sum(s[FORWARD] for s in stages) * (ranks - 1) / ranks


def half_of_first_microbatch(setting: Setting, stages: Seconds, message: float) -> float:
    """The same of ranks whose layers are half in the way there, and half in the way back."""
    ranks = size(setting.layout, PIPELINE)
    return (ranks - 1) * message + sum(s[FORWARD] for s in stages) / 2 * (ranks - 1) / ranks
