"""Sends and receives for a schedule that says only in which order ranks compute; gathers and reductions for any.

    with_communication(one_f_one_b(4, 8))

A message's send and its receive are put into both ranks' tables at one moment of a common clock: that of the simulation,
at the end of the action that made it. So both ranks have their messages in the order of that clock, whoever talks to
whom, and the table cannot hang, even where a send waits for its receive and a rank does one thing after the other: the
clock's order is one in which everything runs. Messages of the same moment, with nothing in between on a rank, are one
batch there: neighbours then send in both directions at once.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from fmegatron.errors import UserError
from fmegatron.parallel.schedule_check import needs
from fmegatron.parallel.schedule_simulation import Costs, simulate_order
from fmegatron.parallel.schedules import (
    BACKWARD,
    COLLECTIVE,
    COMMUNICATION,
    COMPUTE,
    FORWARD,
    GATHER,
    RECV_B,
    RECV_F,
    REDUCE,
    SEND_B,
    SEND_F,
    WEIGHT,
    Action,
    Schedule,
    other_end,
)

DEFAULT = Costs(communication=0.05)


def with_communication(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """The schedule with a send and a receive for every output and gradient that another rank needs.

    costs: by which the order of messages is chosen (by default those of `Costs`); with the costs of the machine no
        message waits behind one that is not needed yet. Any costs give a table that cannot hang. All ranks must use
        the same.
    Raises UserError where the table has sends and receives already, ScheduleError where its order is impossible.
    """
    costs = costs or DEFAULT
    if schedule.communicates:
        raise UserError(f"schedule {schedule.name!r} has sends and receives already: add none")
    plain = without_collectives(schedule)
    n, placement = schedule.stages, schedule.placement
    wanted = {key for program in plain.programs for a in program for key in needs(a, n)}
    # (time, number of the step that made it, a step or a message?) is an order in which everything can run: a step
    # starts no earlier than what it needs ends, and has a larger number.
    moments: list[tuple[float, int, int, int, tuple[Action, ...]]] = []
    before, behind = _collectives_of(schedule)
    for rank, (some, times) in enumerate(simulate_order(plain, costs)):
        for step, (start, end, number) in zip(some, times, strict=True):
            moments.append((start, number, 0, rank, (*before[rank].get(step[0], ()), *step)))
            for a in step:
                if a.kind == WEIGHT:
                    continue
                forward = a.kind == FORWARD
                to = a.stage + (1 if forward else -1)
                if (FORWARD if forward else BACKWARD, a.stage, a.microbatch) in wanted and placement[to] != rank:
                    send = Action(SEND_F if forward else SEND_B, a.stage, a.microbatch)
                    receive = Action(RECV_F if forward else RECV_B, to, a.microbatch)
                    moments.append((end, number, 1, rank, (send, receive)))
    moments.sort(key=lambda moment: moment[:3])
    rows: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    at: dict[Action, tuple[int, float]] = {}  # where in its row a message is, and its moment
    for time, _, message, rank, actions in moments:
        if not message:
            rows[rank] += actions
            continue
        for where, a in zip((rank, placement[actions[1].stage]), actions, strict=True):
            at[a] = len(rows[where]), time
            rows[where].append(a)
    _join(rows, at, schedule, costs.communication)
    return replace(schedule, programs=tuple((*row, *end) for row, end in zip(rows, behind, strict=True)))


def _join(rows: list[list[Action]], at: dict[Action, tuple[int, float]], schedule: Schedule, window: float) -> None:
    """Joins messages that two ranks exchange one right after the other, on both, and not further apart than `window`.

    Nothing lies between them, so what a batch asks for earlier than before is asked for no later than what follows it:
    this cannot make a deadlock.
    """
    for rank, row in enumerate(rows):
        for i, (x, y) in enumerate(itertools.pairwise(row)):
            if x.kind not in COMMUNICATION or y.kind not in COMMUNICATION:
                continue
            peer = schedule.peer(x)
            if rank > peer or peer != schedule.peer(y):  # of two ranks once
                continue
            x, y = (a._replace(joined=False) for a in (x, y))
            x_there, y_there = (at[other_end(a)][0] for a in (x, y))
            (_, before), (_, time) = at[x], at[y]
            if y_there == x_there + 1 and time - before <= window + 1e-9 * time:
                row[i + 1] = y._replace(joined=True)
                rows[peer][y_there] = other_end(y)._replace(joined=True)


def with_collectives(schedule: Schedule, *, gather: bool = True, reduce: bool = True) -> Schedule:
    """The schedule with a GATHER of each stage's parameters, one step of computing before its first forward, and a
    REDUCE of its gradients behind its last backward: over the data axes, once a step.

    Ranks that share a stage have the same table, so they call them in the same order.
    """
    rows = []
    for program in without_collectives(schedule).programs:
        row: list[Action] = []
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        computes = [i for i, a in enumerate(program) if a.kind in COMPUTE and not a.joined]
        for i, a in enumerate(program):
            if a.kind in COMPUTE:
                first.setdefault(a.stage, i)
                last[a.stage] = i
        ahead: dict[int, list[int]] = {}
        for stage, i in first.items():
            before = [c for c in computes if c < i]
            ahead.setdefault(before[-1] if before else 0, []).append(stage)
        for i, a in enumerate(program):
            if gather:
                row += [Action(GATHER, stage) for stage in ahead.get(i, ())]
            row.append(a)
            joined = i + 1 < len(program) and program[i + 1].joined
            if reduce and not joined:
                row += [Action(REDUCE, stage) for stage, j in last.items() if j == i or (j == i - 1 and a.joined)]
        rows.append(tuple(row))
    return replace(schedule, programs=tuple(rows))


def without_collectives(schedule: Schedule) -> Schedule:
    """The schedule without GATHER and REDUCE."""
    return replace(schedule, programs=tuple(tuple(a for a in p if a.kind not in COLLECTIVE) for p in schedule.programs))


def _collectives_of(schedule: Schedule) -> tuple[list[dict[Action, list[Action]]], list[list[Action]]]:
    """Of each rank: the GATHERs and REDUCEs before each action of computing, and those behind all."""
    before: list[dict[Action, list[Action]]] = []
    behind: list[list[Action]] = []
    for program in schedule.programs:
        where: dict[Action, list[Action]] = {}
        waiting: list[Action] = []
        for a in program:
            if a.kind in COLLECTIVE:
                waiting.append(a)
            elif a.kind in COMPUTE and waiting:
                where[a], waiting = waiting, []
        before.append(where)
        behind.append(waiting)
    return before, behind
