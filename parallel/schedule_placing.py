"""Where the backwards by weight go, given what actions cost: into the time in which a rank would wait.

    schedule = place_weights(zb_v(8, 32), parse_costs("f=1,b=1.4,w=0.7,comm=0.05"))

The published zero-bubble schedules place them for a forward, a backward by input and a backward by weight that take equally
long. With the costs that were measured they can go elsewhere (Qi et al. 2023, section 3.1, search by heuristics of this
kind): every other action keeps its order, so that no rank computes anything in another order than the schedule says, and
nothing else is kept longer than it keeps it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from fmegatron.errors import UserError
from fmegatron.parallel.schedule_check import Residuals, needs, peaks, steps
from fmegatron.parallel.schedule_simulation import Costs, check_per_stage, simulate
from fmegatron.parallel.schedules import BACKWARD, COMPUTE, FORWARD, INPUT, WEIGHT, Action, Schedule

# How much of a backward by weight must fit into the wait before an action for it to be placed there.
FITS = (0.0, 0.25, 0.5, 0.75, 1.0)


def place_weights(
    schedule: Schedule,
    costs: Costs,
    *,
    residuals: Residuals | None = None,
    limits: Sequence[float] | None = None,
) -> Schedule:
    """The schedule with its backwards by weight where these costs leave a rank waiting; the schedule as it was, if that is
    no faster.

    schedule: an order of computing alone, as the functions of `schedules` make it (`with_communication` comes after).
    residuals: the sizes of what is kept. limits: the most that each rank may keep, in their unit; None: as much as it
        keeps in the schedule as given.
    Raises UserError for a schedule with sends, receives, gathers or reductions, for limits that are not one per rank or under
    which a microbatch does not fit, and for costs that are not one per stage.
    """
    other = next((a for program in schedule.programs for a in program if a.kind not in COMPUTE), None)
    if other is not None:
        raise UserError(
            f"schedule {schedule.name!r} has {other}: place backwards by weight in a table of computing alone"
        )
    check_per_stage(costs, schedule.stages)
    sizes = residuals or Residuals()
    check_per_stage(sizes, schedule.stages)
    kept = peaks(schedule, sizes)
    most = tuple(kept if limits is None else limits)
    if len(most) != schedule.ranks:
        raise UserError(f"limits has {len(most)} numbers for {schedule.ranks} ranks: give one per rank")
    found = [_placed(schedule, costs, sizes, most, fits) for fits in FITS]
    if all(a <= b + 1e-9 for a, b in zip(kept, most, strict=True)):
        found.insert(0, schedule)
    fitting = [s for s in found if s is not None]
    if not fitting:
        raise UserError(
            f"limits {', '.join(f'{x:g}' for x in most)}: a rank keeps more whatever comes first; give it more"
        )
    return min(fitting, key=lambda s: simulate(s, costs).makespan)  # the first of equals: the schedule as it was


def _placed(
    schedule: Schedule, costs: Costs, sizes: Residuals, limits: Sequence[float], fits: float
) -> Schedule | None:
    """Runs the schedule without its backwards by weight, in the order of time, and takes the oldest one that is owed
    wherever the next action's input comes later than `fits` of it takes, or its memory is needed. None: over the limit."""
    ranks = range(schedule.ranks)
    rest = [deque(s for s in steps(program) if s[0].kind != WEIGHT) for program in schedule.programs]
    owed: list[deque[Action]] = [deque() for _ in ranks]
    rows: list[list[Action]] = [[] for _ in ranks]
    alive = [0.0] * schedule.ranks
    arrived: dict[tuple, float] = {}
    queue = [(0.0, r) for r in ranks]
    waiting: dict[tuple, int] = {}  # what is not made yet: the rank that has nothing to do until then
    while queue:
        now, rank = heapq.heappop(queue)
        if not rest[rank] and not owed[rank]:
            continue
        due, lacking = now, None
        for key in (k for a in (rest[rank][0] if rest[rank] else ()) for k in needs(a, schedule.stages)):
            due = max(due, arrived.get(key, math.inf))
            lacking = lacking or (key if key not in arrived else None)
        weight = costs.of((owed[rank][0],)) if owed[rank] else 0.0
        full = bool(rest[rank]) and any(
            a.kind == FORWARD and alive[rank] + sizes.change(a) > limits[rank] + 1e-9 for a in rest[rank][0]
        )
        if owed[rank] and (not rest[rank] or full or due - now > max(fits * weight, 1e-12)):
            step: tuple[Action, ...] = (owed[rank].popleft(),)
        elif full:
            return None
        elif lacking is not None:
            waiting[lacking] = rank
            continue
        elif due > now:
            heapq.heappush(queue, (due, rank))
            continue
        else:
            step = rest[rank].popleft()
        end = now + costs.of(step)
        for a in step:
            rows[rank].append(a)
            alive[rank] += sizes.change(a)
            if a.kind == INPUT:
                owed[rank].append(Action(WEIGHT, a.stage, a.microbatch))
            if a.kind == WEIGHT:
                continue
            key = (FORWARD if a.kind == FORWARD else BACKWARD, a.stage, a.microbatch)
            to = a.stage + (1 if a.kind == FORWARD else -1)
            there = 0 <= to < schedule.stages and schedule.placement[to] != rank
            arrived[key] = end + (costs.communication if there else 0.0)
            if key in waiting:
                # known only now: the rank looks again, at the time when this one began it, whether to wait or to work
                heapq.heappush(queue, (now, waiting.pop(key)))
        heapq.heappush(queue, (end, rank))
    return replace(schedule, programs=tuple(tuple(row) for row in rows))
