"""Proof that a schedule is complete, respects what depends on what, and cannot hang; its peak memory on each rank.

    report = check(with_communication(one_f_one_b(4, 8)))
    report.peaks                       # residuals alive on each rank at most: (4, 3, 2, 1)

What is proven, each with an error that names rank and action:

- every stage runs the forward of every microbatch once, and its backward once, whole or in its two halves, on the rank
  that holds the stage;
- an action's input is there: made before it on the same rank, or received before it;
- between two ranks messages are received in the order in which they are sent (they have no names on the wire);
- the table runs to its end even where a send waits until its receive is posted (rendezvous: NCCL, large messages of MPI),
  so also where sends are buffered. A rank does one thing after the other here, and joined sends and receives at once;
  a runtime that posts earlier or waits later only waits less.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from fmegatron.errors import UserError
from fmegatron.parallel.schedules import (
    BACKWARD,
    COLLECTIVE,
    COMMUNICATION,
    COMPUTE,
    FORWARD,
    GATHER,
    INPUT,
    KINDS,
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


class ScheduleError(UserError):
    """A schedule that is incomplete, out of order, or would hang. The message names the rank and the action."""


@dataclass(frozen=True)
class Residuals:
    """What one microbatch keeps on a stage: `after_forward` until its backward, `after_input` between the backward by
    input and the backward by weight (Qi et al. 2023: M_B and M_W), nothing after that. In any unit, such as bytes.

    A number, or one per stage.
    """

    after_forward: float | Sequence[float] = 1.0
    after_input: float | Sequence[float] = 1.0

    def change(self, action: Action) -> float:
        """By how much the memory grows with an action: a forward at its start, a backward at its end."""
        if action.kind == FORWARD:
            return of_stage(self.after_forward, action.stage)
        if action.kind == BACKWARD:
            return -of_stage(self.after_forward, action.stage)
        if action.kind == INPUT:
            return of_stage(self.after_input, action.stage) - of_stage(self.after_forward, action.stage)
        return -of_stage(self.after_input, action.stage) if action.kind == WEIGHT else 0.0


@dataclass(frozen=True)
class Report:
    """What `check` found: peaks, the most that is alive on each rank, in the unit of `Residuals`; actions and messages
    (sends), over all ranks."""

    peaks: tuple[float, ...]
    actions: int
    messages: int


def check(schedule: Schedule, *, residuals: Residuals | None = None, backward: bool = True) -> Report:
    """Proves the schedule, or raises ScheduleError; see the module. residuals: sizes (by default each is 1).

    A table without sends and receives is proven as the order of computing that it is: each action waits for what it
    needs from other ranks. backward=False: the table has forwards alone.
    """
    _check_places(schedule)
    _check_complete(schedule, backward)
    if schedule.communicates:
        _check_messages(schedule)
    _check_inputs(schedule)
    _check_progress(schedule)
    every = [a for program in schedule.programs for a in program]
    return Report(peaks(schedule, residuals), len(every), sum(a.kind in (SEND_F, SEND_B) for a in every))


def peaks(schedule: Schedule, residuals: Residuals | None = None) -> tuple[float, ...]:
    """The most that is alive on each rank at a time. It depends on the order of actions alone, not on their times."""
    sizes = residuals or Residuals()
    found = []
    for program in schedule.programs:
        alive = most = 0.0
        for a in program:
            alive += sizes.change(a)
            most = max(most, alive)
        found.append(most)
    return tuple(found)


def of_stage(value: float | Sequence[float], stage: int) -> float:
    """A number that may be given per stage."""
    return value[stage] if isinstance(value, Sequence) else value


def steps(program: Sequence[Action]) -> list[tuple[Action, ...]]:
    """A rank's actions with joined ones together."""
    found: list[list[Action]] = []
    for a in program:
        if a.joined and found:
            found[-1].append(a)
        else:
            found.append([a])
    return [tuple(step) for step in found]


def needs(action: Action, stages: int) -> list[tuple[str, int, int | None]]:
    """(FORWARD or BACKWARD, stage, microbatch): whose output or whose input's gradient an action needs, of `stages`.

    Besides a residual of its own stage: that of the forward, or for W that of the backward by input.
    """
    kind, stage, microbatch, _ = action
    if kind == FORWARD and stage > 0:
        return [(FORWARD, stage - 1, microbatch)]
    if kind in (BACKWARD, INPUT) and stage < stages - 1:
        return [(BACKWARD, stage + 1, microbatch)]
    return []


def carried(action: Action) -> tuple[str, int, int | None]:
    """What a send or receive carries, named like `needs`."""
    kind, stage, microbatch, _ = action
    if kind in (SEND_F, RECV_F):
        return FORWARD, stage if kind == SEND_F else stage - 1, microbatch
    return BACKWARD, stage if kind == SEND_B else stage + 1, microbatch


def _at(rank: int, index: int, action: Action) -> str:
    return f"rank {rank}, action {index + 1} ({action})"


def _check_places(schedule: Schedule) -> None:
    """Every action is of a stage of its rank, of a microbatch that there is, and joined with what it may be."""
    stages, microbatches = schedule.stages, schedule.microbatches
    ends = {SEND_F: stages - 1, RECV_B: stages - 1, SEND_B: 0, RECV_F: 0}
    for rank, program in enumerate(schedule.programs):
        for i, a in enumerate(program):
            if a.kind not in KINDS:
                raise ScheduleError(f"{_at(rank, i, a)}: {a.kind!r} is no kind of action")
            if not 0 <= a.stage < stages:
                raise ScheduleError(f"{_at(rank, i, a)}: there are only the stages 0 to {stages - 1}")
            if schedule.placement[a.stage] != rank:
                raise ScheduleError(
                    f"{_at(rank, i, a)}: stage {a.stage} is on rank {schedule.placement[a.stage]}, not on this one"
                )
            if (a.microbatch is None) != (a.kind in COLLECTIVE):
                raise ScheduleError(
                    f"{_at(rank, i, a)}: "
                    + ("names a microbatch, and is of all" if a.microbatch is not None else "of which microbatch?")
                )
            if a.microbatch is not None and not 0 <= a.microbatch < microbatches:
                raise ScheduleError(f"{_at(rank, i, a)}: there are only the microbatches 0 to {microbatches - 1}")
            if ends.get(a.kind) == a.stage:
                raise ScheduleError(
                    f"{_at(rank, i, a)}: the {'last' if a.stage else 'first'} stage has none to do it with"
                )
            if a.kind in COMMUNICATION and schedule.peer(a) == rank:
                raise ScheduleError(
                    f"{_at(rank, i, a)}: both stages are on this rank, so nothing is sent; leave it out"
                )
            if a.joined and (i == 0 or not _may_join(program[i - 1], a)):
                raise ScheduleError(
                    f"{_at(rank, i, a)}: only sends and receives, or a forward and a backward behind it, can be joined"
                )


def _may_join(before: Action, a: Action) -> bool:
    if a.kind in COMMUNICATION:
        return before.kind in COMMUNICATION
    return before.kind == FORWARD and a.kind in (BACKWARD, INPUT) and not before.joined


def _check_complete(schedule: Schedule, backward: bool) -> None:
    """Every F once, every B once or I and W once."""
    done: list[Counter[Action]] = []
    for rank, program in enumerate(schedule.programs):
        done.append(Counter(a._replace(joined=False) for a in program if a.kind in COMPUTE))
        seen: set[Action] = set()
        for i, a in enumerate(program):
            if a.kind not in COMPUTE:
                continue
            a = a._replace(joined=False) if a.joined else a
            halves = [a._replace(kind=k) for k in (INPUT, WEIGHT)] if a.kind == BACKWARD else []
            if a in seen or any(h in done[rank] for h in halves):
                other = next((h for h in halves if h in done[rank]), a)
                raise ScheduleError(
                    f"{_at(rank, i, a)} is done twice{'' if other == a else f', as it is half done by {other}'}"
                )
            if a.kind != FORWARD and not backward:
                raise ScheduleError(f"{_at(rank, i, a)} is a backward in a table of forwards")
            seen.add(a)
    for stage, rank in enumerate(schedule.placement):
        for m in range(schedule.microbatches):
            have = {kind for kind in (FORWARD, BACKWARD, INPUT, WEIGHT) if Action(kind, stage, m) in done[rank]}
            missing = [] if FORWARD in have else [FORWARD]
            if backward and BACKWARD not in have:
                parts = [kind for kind in (INPUT, WEIGHT) if kind not in have]
                missing += [BACKWARD] if len(parts) == 2 else parts
            if missing:
                what = " and ".join(str(Action(kind, stage, m)) for kind in missing)
                raise ScheduleError(f"rank {rank} never does {what}: every stage must run every microbatch once")


def _check_messages(schedule: Schedule) -> None:
    """Every send has its receive, and between two ranks both are in the same order."""
    found: dict[Action, tuple[int, int]] = {}  # where each is: rank and index
    between: dict[tuple[int, int], tuple[list[Action], list[Action]]] = {}  # sends and receives, by (from, to)
    for rank, program in enumerate(schedule.programs):
        for i, a in enumerate(program):
            if a.kind not in COMMUNICATION:
                continue
            a, peer = a._replace(joined=False), schedule.peer(a)
            if a in found:
                raise ScheduleError(f"{_at(rank, i, a)} is done twice")
            found[a] = rank, i
            if a.kind in (SEND_F, SEND_B):
                between.setdefault((rank, peer), ([], []))[0].append(a)
            else:
                between.setdefault((peer, rank), ([], []))[1].append(a)
    for a, (rank, i) in found.items():
        if other_end(a) not in found:
            raise ScheduleError(
                f"rank {schedule.peer(a)} never does {other_end(a)}, for which {_at(rank, i, a)} would wait for ever"
            )
    for (sender, receiver), (sends, receives) in between.items():
        for n, (s, r) in enumerate(zip(sends, receives, strict=True), 1):
            if other_end(s) != r:
                raise ScheduleError(
                    f"message {n} from rank {sender} to rank {receiver} is {_at(*found[s], s)}, but is received as "
                    f"{_at(*found[r], r)}: receives must be in the order of the sends"
                )


def _check_inputs(schedule: Schedule) -> None:
    """What an action needs from its own rank, or has received, comes before it there."""
    for rank, program in enumerate(schedule.programs):
        step_of = [n for n, step in enumerate(steps(program)) for _ in step]
        order: dict[tuple, int] = {}
        for n, a in zip(step_of, program, strict=True):
            order.setdefault((a.kind, a.stage, a.microbatch), n)
        computed: set[int] = set()  # stages of which something was computed,
        reduced: dict[int, int] = {}  # and those whose gradients were reduced, and where
        for i, (n, a) in enumerate(zip(step_of, program, strict=True)):
            for need in _local_needs(schedule, rank, a):
                when = min((order[k] for k in need if k in order), default=None)
                if when is None or when >= n:
                    raise ScheduleError(
                        f"{_at(rank, i, a)} needs {Action(*need[0])}, which this rank "
                        + ("never does" if when is None else "does only later" if when > n else "does at the same time")
                    )
            if a.kind == GATHER and a.stage in computed and order[GATHER, a.stage, None] == n:
                raise ScheduleError(f"{_at(rank, i, a)} comes behind what stage {a.stage} computes with its parameters")
            if a.kind in (BACKWARD, INPUT, WEIGHT) and a.stage in reduced:
                raise ScheduleError(
                    f"{_at(rank, reduced[a.stage], program[reduced[a.stage]])} comes before {a}, whose gradient it would miss"
                )
            if a.kind in COMPUTE:
                computed.add(a.stage)
            elif a.kind == REDUCE:
                reduced.setdefault(a.stage, i)


def _local_needs(schedule: Schedule, rank: int, a: Action) -> list[list[tuple]]:
    """What must come before an action on its own rank: of each list one."""
    kind, s, m, _ = a
    found: list[list[tuple]] = []
    if kind in (BACKWARD, INPUT):
        found.append([(FORWARD, s, m)])
    elif kind == WEIGHT:
        found.append([(INPUT, s, m)])
    elif kind == SEND_F:
        found.append([(FORWARD, s, m)])
    elif kind == SEND_B:
        found.append([(BACKWARD, s, m), (INPUT, s, m)])
    for what, stage, _m in needs(a, schedule.stages):
        if schedule.placement[stage] == rank:
            found.append([(FORWARD, stage, m)] if what == FORWARD else [(BACKWARD, stage, m), (INPUT, stage, m)])
        elif schedule.communicates:
            found.append([(RECV_F if what == FORWARD else RECV_B, s, m)])
    return found


def _check_progress(schedule: Schedule) -> None:
    """Runs the table, each rank one step after the other, and says who waits for whom where it stops."""
    programs, communicates = [steps(program) for program in schedule.programs], schedule.communicates
    at = [0] * schedule.ranks  # the step that each rank is at
    reached: set[tuple] = set()  # sends and receives that a rank is at or past; without these, outputs that are made
    waiting: dict[tuple, list[int]] = {}
    ready = deque(range(schedule.ranks))

    def lack(a: Action) -> tuple | None:
        """What an action waits for that another rank has not reached."""
        wanted: Sequence[tuple] = ()
        if a.kind in COMMUNICATION:
            wanted = [other_end(a)[:3]]
        elif not communicates and a.kind in COMPUTE:
            wanted = needs(a, schedule.stages)
        return next((key for key in wanted if key not in reached), None)

    def reach(key: tuple) -> None:
        reached.add(key)
        ready.extend(waiting.pop(key, ()))

    while ready:
        rank = ready.popleft()
        while at[rank] < len(programs[rank]):
            step = programs[rank][at[rank]]
            for a in step:
                if a.kind in COMMUNICATION and a[:3] not in reached:
                    reach(a[:3])
            lacks = next((key for a in step if (key := lack(a)) is not None), None)
            if lacks is not None:
                waiting.setdefault(lacks, []).append(rank)
                break
            at[rank] += 1
            for a in step:
                if not communicates and a.kind in COMPUTE and a.kind != WEIGHT:
                    reach((FORWARD if a.kind == FORWARD else BACKWARD, a.stage, a.microbatch))
    stuck = {rank: programs[rank][n] for rank, n in enumerate(at) if n < len(programs[rank])}
    if not stuck:
        return
    # Whoever is stuck waits for a rank that is stuck as well: from one to the next there is a circle.
    told: dict[int, str] = {}
    rank = min(stuck)
    while rank not in told:
        a, key = next((a, key) for a in stuck[rank] if (key := lack(a)) is not None)
        there = schedule.placement[key[1]]
        index = sum(map(len, programs[rank][: at[rank]])) + stuck[rank].index(a)
        told[rank] = f"{_at(rank, index, a)} waits for rank {there} to do {Action(*key)}"
        rank = there
    circle = list(told)[list(told).index(rank) :]
    raise ScheduleError("the schedule is a deadlock: " + "; ".join(told[r] for r in circle))
