"""Pipeline schedules as data: which action each rank runs, in order.

    schedule = one_f_one_b(stages=4, microbatches=8)
    schedule.programs[0]            # (0F0, 0F1, 0F2, 0F3, 0B0, 0F4, …): stage 0's forward of microbatch 0, …

A schedule is made by a pure function of sizes, or read from text (`schedule_text`). It says in which order each rank
computes; `schedule_communication` adds the sends and receives, `schedule_check` proves that it is complete and cannot
hang, `schedule_simulation` tells its time, bubble and memory, `schedule_drawing` draws it. Nothing here knows tensors.

`stages` is always the number of ranks of the pipeline; each of them holds `virtual` stages of the model. All functions
take any number of microbatches: one that is not a multiple of anything is run by the schedule of the next number that
fits, without the microbatches that do not exist. (Microbatches depend on none but themselves, so what is left of an
order that cannot hang cannot hang.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fmegatron.errors import UserError
from fmegatron.parallel.stages import loop, vee

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
GATHER, REDUCE = "GATHER", "REDUCE"

COMPUTE = frozenset((FORWARD, BACKWARD, INPUT, WEIGHT))
COMMUNICATION = frozenset((SEND_F, RECV_F, SEND_B, RECV_B))
COLLECTIVE = frozenset((GATHER, REDUCE))
KINDS = COMPUTE | COMMUNICATION | COLLECTIVE


class Action(NamedTuple):
    """One thing a rank does. As text: 2F5, stage 2's forward of microbatch 5.

    kind: F forward; B the whole backward; I the backward by input and W the backward by weight, which are its halves;
        SEND_F, RECV_F: the output of `stage` goes to the next stage, the input of `stage` comes from the one before;
        SEND_B, RECV_B: the gradient of the input of `stage` goes to the stage before, that of its output comes from the
        next one; GATHER: the stage's parameters are gathered; REDUCE: its gradients are on their way over the data axes,
        which begins in its last backward as they are made.
    stage: of the model, counted over all ranks. microbatch: None for GATHER and REDUCE.
    joined: together with the action before it: sends and receives as one batch, or a forward and a backward that
        overlap.
    """

    kind: str
    stage: int
    microbatch: int | None = None
    joined: bool = False

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """A table of actions.

    placement: the rank of each stage. programs: each rank's actions, in order.
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    programs: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.programs)

    @property
    def stages(self) -> int:
        """Stages of the model, over all ranks."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds."""
        return tuple(s for s, r in enumerate(self.placement) if r == rank)

    def peer(self, action: Action) -> int:
        """The rank at the other end of a send or receive."""
        return self.placement[action.stage + (1 if action.kind in (SEND_F, RECV_B) else -1)]

    @property
    def communicates(self) -> bool:
        """Does the table have sends and receives? If not, it says only in which order ranks compute."""
        return any(a.kind in COMMUNICATION for program in self.programs for a in program)


def other_end(action: Action) -> Action:
    """The receive that a send goes to, the send that a receive comes from."""
    kind, stage, microbatch, _ = action
    return Action(_OTHER_END[kind], stage + (1 if kind in (SEND_F, RECV_B) else -1), microbatch)


_OTHER_END = {SEND_F: RECV_F, RECV_F: SEND_F, SEND_B: RECV_B, RECV_B: SEND_B}


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, GPipe). Keeps the residuals of all microbatches."""
    _check(stages, microbatches)
    rows = [[*_row(FORWARD, r, microbatches), *_row(BACKWARD, r, microbatches)] for r in range(stages)]
    return _schedule("gpipe", loop(stages), microbatches, rows)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward in turn, as early as can be (Narayanan et al. 2021, PipeDream-Flush).

    GPipe's bubble with the residuals of min(stages − rank, microbatches) microbatches.
    """
    _check(stages, microbatches)
    rows = [
        _in_turn(_row(FORWARD, r, microbatches), _row(BACKWARD, r, microbatches), stages - 1 - r) for r in range(stages)
    ]
    return _schedule("1f1b", loop(stages), microbatches, rows)


def interleaved(stages: int, microbatches: int, *, virtual: int = 2, group: int | None = None) -> Schedule:
    """1F1B with `virtual` stages on each rank, round and round (Narayanan et al. 2021): a bubble `virtual` times smaller.

    group: how many microbatches run through one stage of a rank before its next stage has its turn (Megatron-LM's
        microbatch-group-size-per-virtual-pipeline-stage). More keep more residuals; fewer than there are ranks leave
        ranks idle, for a microbatch comes around only after `stages` stages. None: as many as there are ranks, as in
        the paper; where that does not divide the microbatches, the next number that cuts them evenly, for a smaller
        last group would leave all ranks idle too.
    """
    _check(stages, microbatches, virtual=virtual, group=group)
    if virtual == 1:
        return one_f_one_b(stages, microbatches)
    group = -(-microbatches // max(microbatches // stages, 1)) if group is None else min(group, microbatches)
    every = -(-microbatches // group) * group
    turns = [(c, m) for g in range(0, every, group) for c in range(virtual) for m in range(g, g + group)]
    rows = []
    for rank in range(stages):
        forwards = [Action(FORWARD, c * stages + rank, m) for c, m in turns]
        backwards = [Action(BACKWARD, (virtual - 1 - c) * stages + rank, m) for c, m in turns]
        # A rank runs ahead by what the last rank needs before its first backward, and the way there and back. Where a
        # group is smaller than that way, running ahead by all of it would be a deadlock: rank 0 would wait for a
        # microbatch that comes around only when later ranks got the gradients that rank 0 has not sent.
        ahead = (virtual - 1) * group + 2 * min(stages - 1 - rank, group)
        rows.append(_in_turn(forwards, backwards, ahead))
    return _schedule("interleaved", loop(stages, virtual), microbatches, rows)


def breadth_first(stages: int, microbatches: int, *, virtual: int = 2) -> Schedule:
    """All microbatches through a rank's first stage, then through its next one (Lamy-Poirier 2023).

    The interleaved schedule's bubble and GPipe's memory; a stage's gradients are reduced early, and its parameters would need to
    be gathered twice a step only, which is what it is for (`with_collectives`; the runtime gathers layers one ahead, for
    every microbatch, which never holds more than two).
    """
    _check(stages, microbatches, virtual=virtual)
    rows = [
        [a for c in range(virtual) for a in _row(FORWARD, c * stages + r, microbatches)]
        + [a for c in reversed(range(virtual)) for a in _row(BACKWARD, c * stages + r, microbatches)]
        for r in range(stages)
    ]
    return _schedule("bfs", loop(stages, virtual), microbatches, rows)


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """1F1B whose backwards by weight fill the bubble at the end (Qi et al. 2023, ZB-H1), with 1F1B's peak memory.

    Rank r is r backwards by weight behind: it keeps as many residuals as 1F1B's first rank, and no rank more.
    """
    _check(stages, microbatches)
    rows = []
    for rank in range(stages):
        row = _in_turn(_row(FORWARD, rank, microbatches), _row(INPUT, rank, microbatches), stages - 1 - rank)
        whole = []
        for action in row:
            whole.append(action)
            if action.kind == INPUT and action.microbatch is not None and action.microbatch >= rank:
                whole.append(Action(WEIGHT, rank, action.microbatch - rank))
        behind = range(max(microbatches - rank, 0), microbatches)
        rows.append(whole + [Action(WEIGHT, rank, m) for m in behind])
    return _schedule("zbh1", loop(stages), microbatches, rows)


def zb_v(stages: int, microbatches: int) -> Schedule:
    """Two stages a rank, placed as a V, and split backwards (Qi et al. 2023, section 6, ZB-V): no bubble and 1F1B's
    memory on every rank, where forward, backward by input and backward by weight take the same time.
    """
    _check(stages, microbatches)
    every = max(microbatches, 2 * stages - 1)  # fewer never fill the pipeline
    rows = []
    for rank in range(stages):
        row = _Rows(rank, 2 * stages - 1 - rank)
        row.add("F0", times=2 * (stages - rank) - 1)
        row.add("F1", "F0", times=rank)
        row.add("F1", "I1", "W1", times=stages - rank)
        while row.next["F1"] < every:
            if row.next["F0"] < every:
                row.add("F0")
            row.add("I0", "W0", "F1", "I1", "W1")
        row.add("I0", "I1", times=rank)
        row.add("I0", "W0", times=stages - rank)
        row.add("W1", times=every - row.next["W1"])
        row.add("W0", times=every - row.next["W0"])
        rows.append(row.actions)
    return _schedule("zbv", vee(stages), microbatches, rows)


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """DualPipe cut in half (DeepSeek-AI 2025; Qi et al. 2025): two stages a rank, placed as a V, in whose steady state
    every forward overlaps with the backward of another microbatch.

    Such a pair is two joined actions; a backward is split only where its second half fills a bubble.
    """
    _check(stages, microbatches)
    every = max(microbatches, 2 * stages)
    rows = []
    for rank in range(stages):
        row = _Rows(rank, 2 * stages - 1 - rank)
        back = stages - 1 - rank  # ranks between this one and the turn of the V
        row.add("F0", times=2 * back)
        row.add("F0", "F1", times=rank + 1)
        row.add("I1", "W1", "F1", times=back)
        for turn in range(every - 2 * stages + rank + 1):
            if turn == 0 and back == 0:
                row.add("F0", "B1")  # side by side the pair would take longer, and all ranks wait for this backward
            else:
                row.pair("F0", "B1")
            row.pair("F1", "B0")
        for _ in range(back):
            row.add("B1")
            row.pair("F1", "B0")
        for n, chunk in enumerate("10" * (rank + 1)):  # the first half of these whole, the others split
            row.add(f"B{chunk}" if n < rank + 1 else f"I{chunk}")
        for _ in range(back):
            row.weight()
            row.add("I0")
        while row.owed:
            row.weight()
        rows.append(row.actions)
    return _schedule("dualpipev", vee(stages), microbatches, rows)


def forward_only(placement: Sequence[int], microbatches: int) -> Schedule:
    """Forwards alone, for evaluation: each rank runs its stages breadth-first. placement: the rank of each stage."""
    ranks = max(placement) + 1
    _check(ranks, microbatches)
    rows = [
        [a for s, where in enumerate(placement) if where == r for a in _row(FORWARD, s, microbatches)]
        for r in range(ranks)
    ]
    return _schedule("forward", tuple(placement), microbatches, rows)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "bfs": breadth_first,
    "zbh1": zb_h1,
    "zbv": zb_v,
    "dualpipev": dualpipe_v,
}


def make_schedule(
    name: str, stages: int, microbatches: int, *, virtual: int | None = None, group: int | None = None
) -> Schedule:
    """A schedule by its name in `SCHEDULES`, whatever its case and hyphens.

    virtual: stages of the model on each rank; None: 2 where the schedule has several, else 1. "1f1b" with more than one
        is the interleaved schedule. group: as for `interleaved`.
    Raises UserError for a name that there is not, and for a `virtual` or `group` that the schedule does not have.
    """
    found = SCHEDULES.get(name.lower().replace("-", "").replace("_", ""))
    if found is None:
        raise UserError(f"schedule {name!r} is none of {', '.join(SCHEDULES)}")
    if found is one_f_one_b and (virtual or 1) > 1:
        found = interleaved
    takes = inspect.signature(found).parameters
    always = 2 if found in (zb_v, dualpipe_v) else 1
    options: dict[str, Any] = {}
    if "virtual" in takes:
        options["virtual"] = 2 if virtual is None else virtual
    elif virtual not in (None, always):
        raise UserError(
            f"virtual={virtual}: the schedule {name} has {always} stage{'s' * (always > 1)} on every rank; leave it out, "
            "or use interleaved or bfs"
        )
    if "group" in takes:
        options["group"] = group
    elif group is not None:
        raise UserError(f"group={group}: only the interleaved schedule takes microbatches in groups; leave it out")
    return found(stages, microbatches, **options)


class _Rows:
    """One rank's actions as they are added, for a rank with two stages, chunks 0 and 1 of the V."""

    def __init__(self, *stages: int) -> None:
        self.stages = stages
        self.actions: list[Action] = []
        self.next = {f"{kind}{chunk}": 0 for kind in "FIW" for chunk in range(len(stages))}
        self.owed: list[Action] = []  # backwards by weight that are to come, in order

    def add(self, *names: str, times: int = 1, joined: bool = False) -> None:
        """The next microbatch's action of each name, such as "F0" (forward of chunk 0), so many times."""
        for name in names * times:
            kind, chunk = name[0], int(name[1])
            counted = f"I{chunk}" if kind == BACKWARD else name
            microbatch = self.next[counted]
            self.actions.append(Action(kind, self.stages[chunk], microbatch, joined))
            self.next[counted] += 1
            if kind == INPUT:
                self.owed.append(Action(WEIGHT, self.stages[chunk], microbatch))
            if kind == WEIGHT:
                self.owed.remove(Action(WEIGHT, self.stages[chunk], microbatch))
            if kind == BACKWARD:
                self.next[f"W{chunk}"] += 1

    def pair(self, forward: str, backward: str) -> None:
        """A forward and a backward that overlap."""
        self.add(forward)
        self.add(backward, joined=True)

    def weight(self) -> None:
        """The oldest backward by weight that is to come."""
        self.actions.append(self.owed.pop(0))


def _row(kind: str, stage: int, microbatches: int) -> list[Action]:
    return [Action(kind, stage, m) for m in range(microbatches)]


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards that remain."""
    ahead = min(ahead, len(forwards))
    row = list(forwards[:ahead])
    for f, b in zip(forwards[ahead:], backwards, strict=False):
        row += [f, b]
    return row + list(backwards[len(forwards) - ahead :])


def _schedule(name: str, placement: tuple[int, ...], microbatches: int, rows: Iterable[Sequence[Action]]) -> Schedule:
    """A schedule without the microbatches that do not exist."""
    programs = []
    for row in rows:
        kept: list[Action] = []
        dropped = False  # the action before?
        for a in row:
            if a.microbatch is not None and a.microbatch >= microbatches:
                dropped = True
                continue
            kept.append(a._replace(joined=False) if a.joined and dropped else a)
            dropped = False
        programs.append(tuple(kept))
    return Schedule(name, placement, microbatches, tuple(programs))


def _check(stages: int, microbatches: int, *, virtual: int = 1, group: int | None = None) -> None:
    for name, n in (("stages", stages), ("microbatches", microbatches), ("virtual", virtual), ("group", group)):
        if n is not None and n < 1:
            raise UserError(f"{name}={n} must be at least 1")
