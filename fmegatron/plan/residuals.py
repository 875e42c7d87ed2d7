"""What a pipeline keeps: how many residuals of each of a rank's stages are alive at once.

    most_alive("zbv", 4, 16, 2, rank=0)         # of moments: (residuals of each stage, halves of backwards of each stage)

A residual is alive from a stage's forward to its backward; where a schedule runs the two halves of a backward apart, what the first
half leaves is alive until the second. The order of a rank's actions decides, not their times.
"""

from __future__ import annotations

import functools
import operator

from fmegatron.parallel.schedule_theory import theory
from fmegatron.parallel.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule, make_schedule

ROUNDS = 2  # times as many microbatches as ranks; in more of them everything repeats
Alive = tuple[tuple[int, ...], tuple[int, ...]]


def most_alive(name: str, ranks: int, microbatches: int, virtual: int, rank: int) -> tuple[Alive, ...]:
    """(residuals, halves left) of each stage of a rank, in the order of the stages, at the moments at which none of these numbers
    can be larger without another that is smaller."""
    few = fewer(name, ranks, microbatches)
    if name == "1f1b" and virtual == 1:
        return (((min(ranks - rank, few),), (0,)),)
    return _most_alive(name, ranks, few, virtual, rank)


def residuals(name: str, ranks: int, microbatches: int, virtual: int, rank: int) -> int:
    """The most residuals alive at once, of all stages of a rank together: by the closed form where one is known."""
    known = theory(name, ranks, microbatches, virtual=virtual)
    if known is not None and known.peaks is not None:
        return known.peaks[rank]
    return max(sum(kept) + sum(left) for kept, left in most_alive(name, ranks, microbatches, virtual, rank))


def fewer(name: str, ranks: int, microbatches: int) -> int:
    """As many microbatches as tell all that there is to know of a schedule of more."""
    if name in ("gpipe", "bfs") or (name == "interleaved" and microbatches % ranks):
        return microbatches
    few = ranks * ROUNDS
    return microbatches if microbatches < few else few + (microbatches - few) % ranks


@functools.lru_cache(maxsize=256)
def schedule_of(name: str, ranks: int, microbatches: int, virtual: int) -> Schedule:
    """The table, made once."""
    return make_schedule(name, ranks, microbatches, virtual=virtual if name in ("interleaved", "bfs") else None)


@functools.lru_cache(maxsize=4096)
def _most_alive(name: str, ranks: int, microbatches: int, virtual: int, rank: int) -> tuple[Alive, ...]:
    table = schedule_of(name, ranks, microbatches, virtual)
    place = {stage: n for n, stage in enumerate(table.stages_of(rank))}
    kept, left = [0] * len(place), [0] * len(place)
    found = dict[Alive, None]()
    for action in table.programs[rank]:
        n = place[action.stage]
        if action.kind == FORWARD:
            kept[n] += 1
        elif action.kind in (BACKWARD, INPUT):
            kept[n] -= 1
            left[n] += action.kind == INPUT
        elif action.kind == WEIGHT:
            left[n] -= 1
        if action.kind in (FORWARD, INPUT):
            found[tuple(kept), tuple(left)] = None
    most: list[tuple[int, ...]] = []
    for x in sorted(((*kept, *left) for kept, left in found), key=lambda x: (-sum(x), x)):
        if not any(all(map(operator.ge, y, x)) for y in most):
            most.append(x)
    return tuple((x[: len(place)], x[len(place) :]) for x in most)
