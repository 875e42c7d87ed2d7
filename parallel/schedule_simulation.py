"""How long a schedule takes, where ranks are idle and what they keep, given what each action costs.

    timeline = simulate(one_f_one_b(4, 8), Costs(forward=1, backward_input=1, backward_weight=1))
    timeline.makespan, timeline.bubble          # 33.0, 0.375
    timeline.memory(rank=0)                     # [(time, residuals alive), …]

Each rank computes one step after the other. Beside that it has one channel for messages, on which the batches of sends
and receives of the table go one after the other, as on one NCCL communicator: a batch begins when the one before is
over and what it sends is made; a message moves when both ranks have begun its batch, and takes `communication`. In a
table without sends and receives a message arrives `communication` after it was made. GATHER and REDUCE go on a third
channel, one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from fmegatron.errors import UserError
from fmegatron.parallel.schedule_check import Residuals, carried, check, needs, of_stage, steps
from fmegatron.parallel.schedules import (
    BACKWARD,
    COMMUNICATION,
    COMPUTE,
    FORWARD,
    GATHER,
    INPUT,
    REDUCE,
    SEND_B,
    SEND_F,
    WEIGHT,
    Action,
    Schedule,
)


@dataclass(frozen=True)
class Costs:
    """What one microbatch's actions take on a stage, in any unit of time: a number, or one per stage.

    A whole backward takes backward_input + backward_weight. communication: from the end of a send's action to its
    arrival. overlapped: a forward and a backward that are joined; None: as long as one after the other. gather, reduce:
    of one stage.
    """

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    communication: float = 0.0
    overlapped: float | Sequence[float] | None = None
    gather: float | Sequence[float] = 0.0
    reduce: float | Sequence[float] = 0.0

    def of(self, step: Sequence[Action]) -> float:
        """How long a step of one action, or of a joined forward and backward, takes."""
        if len(step) > 1 and self.overlapped is not None:
            return of_stage(self.overlapped, step[0].stage)
        total = 0.0
        for a in step:
            if a.kind == BACKWARD:
                total += of_stage(self.backward_input, a.stage) + of_stage(self.backward_weight, a.stage)
            else:
                total += of_stage(getattr(self, _COST[a.kind]), a.stage)
        return total


_COST = {
    FORWARD: "forward",
    INPUT: "backward_input",
    WEIGHT: "backward_weight",
    GATHER: "gather",
    REDUCE: "reduce",
}
EXCHANGE = "exchange"  # no field of Costs, but in those of others
SHORT = {
    "f": "forward",
    "b": "backward_input",
    "w": "backward_weight",
    "comm": "communication",
    "fb": "overlapped",
    "gather": "gather",
    "reduce": "reduce",
    "a2a": EXCHANGE,
}


def parse_costs(text: str) -> Costs:
    """Costs from text such as "f=1,b=1.1,w=0.9,comm=0.05"; a cost per stage is "f=1:1:1:1.5".

    f forward, b backward by input, w backward by weight, comm a message, fb a forward and a backward that overlap,
    gather, reduce; a2a exchanges of experts (`with_exchange`). Raises UserError that names what is wrong.
    """
    found: dict[str, float | tuple[float, ...]] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        field_name = SHORT.get(name.strip())
        if field_name is None:
            raise UserError(f"costs {text!r}: {part!r} is none of {', '.join(f'{n}=…' for n in SHORT)}")
        try:
            numbers = tuple(float(v) for v in value.split(":"))
        except ValueError:
            raise UserError(f"costs {text!r}: {value!r} is no number, nor numbers with : in between") from None
        if not all(0 <= v < float("inf") for v in numbers):
            raise UserError(f"costs {text!r}: {part!r} must be finite and not negative")
        if len(numbers) > 1 and field_name in ("communication", EXCHANGE):
            raise UserError(f"costs {text!r}: {name.strip()} is one number, not one per stage")
        found[field_name] = numbers[0] if len(numbers) == 1 else numbers
    exchange = found.pop(EXCHANGE, 0.0)
    costs = Costs(**found)  # type: ignore[arg-type]
    return with_exchange(costs, exchange) if exchange else costs  # type: ignore[arg-type]


@dataclass(frozen=True)
class Event:
    """An action and when it ran."""

    action: Action
    start: float
    end: float


Rows = tuple[tuple[Event, ...], ...]


@dataclass(frozen=True)
class Timeline:
    """When everything happens. events: each rank's computing, in order; messages: each rank's sends and receives;
    collectives: each rank's GATHER and REDUCE."""

    schedule: Schedule
    costs: Costs
    events: Rows
    messages: Rows
    collectives: Rows
    residuals: Residuals = field(default_factory=Residuals)

    @cached_property
    def makespan(self) -> float:
        """From the start of the step to the end of the last action on any rank."""
        every = (*self.events, *self.collectives)
        return max((e.end for some in every for e in some), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(self.costs.of(step) for step in steps(tuple(e.action for e in some))) for some in self.events)

    @property
    def idle(self) -> float:
        """How much longer the step takes than its busiest rank computes."""
        return self.makespan - max(self.busy)

    @property
    def bubble(self) -> float:
        """`idle` as a fraction of the busiest rank's work: (p − 1) ÷ m for 1F1B (Narayanan et al. 2021)."""
        return self.idle / max(self.busy) if max(self.busy) else 0.0

    @property
    def span_idle(self) -> float:
        """How much longer than it computes a rank takes from its first action to its last one, on the worst rank.

        The bubble of Qi et al. 2023, who let each rank go on to its next step without waiting for the others.
        """
        return max(
            ((some[-1].end - some[0].start) - busy for some, busy in zip(self.events, self.busy, strict=True) if some),
            default=0.0,
        )

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """(time, what is alive from then on) of a rank, in the unit of `residuals`."""
        return self.memories[rank]

    @cached_property
    def memories(self) -> list[list[tuple[float, float]]]:
        found = []
        for some in self.events:
            # A forward's residual counts from its start, what a backward frees until its end; at the same moment what
            # ends is freed first, except that a rank's own order is kept.
            alive, curve = 0.0, [(0.0, 0.0)]
            for e in some:
                alive += self.residuals.change(e.action)
                curve.append((e.start if e.action.kind == FORWARD else e.end, alive))
            found.append(curve)
        return found

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """The most that is alive on each rank."""
        return tuple(max(alive for _, alive in curve) for curve in self.memories)


def simulate(schedule: Schedule, costs: Costs | None = None, *, residuals: Residuals | None = None) -> Timeline:
    """When every action of a schedule runs. residuals: the sizes for the memory curve.

    Raises ScheduleError for a schedule that would never end, UserError for costs that are not one per stage.
    """
    costs = costs or Costs()
    check_per_stage(costs, schedule.stages)
    run = _Run(schedule, costs)
    run.all()
    events, messages, collectives = run.result()
    return Timeline(schedule, costs, events, messages, collectives, residuals or Residuals())


def simulate_order(
    schedule: Schedule, costs: Costs
) -> list[tuple[list[tuple[Action, ...]], list[tuple[float, float, int]]]]:
    """Each rank's steps of computing, and (start, end, number) of each; what a step needs has smaller numbers."""
    check_per_stage(costs, schedule.stages)
    run = _Run(schedule, costs)
    run.all()
    return list(zip(run.compute, run.times, strict=True))


def check_per_stage(values: Costs | Residuals, stages: int) -> None:
    """Raises UserError where a list of numbers is not as long as there are stages."""
    for one in fields(values):
        value = getattr(values, one.name)
        if isinstance(value, Sequence) and len(value) != stages:
            raise UserError(
                f"{one.name} has {len(value)} numbers for {stages} stages: give one per stage, or one for all"
            )


class _Run:
    """The state of a simulation: how far each rank's three channels are, and when what is made, and arrives, does."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.explicit = schedule.communicates
        ranks = range(schedule.ranks)
        self.compute: list[list[tuple[Action, ...]]] = [[] for _ in ranks]
        self.batches: list[list[tuple[Action, ...]]] = [[] for _ in ranks]
        self.others: list[list[tuple[Action, int]]] = [[] for _ in ranks]  # and how many steps of computing come before
        for rank, program in enumerate(schedule.programs):
            for step in steps(program):
                if step[0].kind in COMPUTE:
                    self.compute[rank].append(step)
                elif step[0].kind in COMMUNICATION:
                    self.batches[rank].append(step)
                else:
                    self.others[rank] += [(a, len(self.compute[rank])) for a in step]
        self.times: list[list[tuple[float, float, int]]] = [[] for _ in ranks]  # start, end, number, of steps
        self.sent: list[list[tuple[float, float]]] = [[] for _ in ranks]
        self.collected: list[list[Event]] = [[] for _ in ranks]
        self.made: dict[tuple, float] = {}
        self.arrived: dict[tuple, float] = {}
        self.begun: dict[tuple, dict[int, float]] = {}  # a message: when each of its ranks began its batch
        self.gathered: dict[int, float] = {}
        self.count = 0
        self.ready = deque(ranks)

    def all(self) -> None:
        ready = self.ready
        while ready:
            rank = ready.popleft()
            while self.advance_compute(rank) or self.advance_batches(rank) or self.advance_others(rank):
                pass
        if any(len(a) < len(b) for a, b in zip(self.times, self.compute, strict=True)):
            check(self.schedule, backward=any(a.kind != FORWARD for s in self.compute for step in s for a in step))
            raise AssertionError("a schedule that was proven to end did not end")

    def advance_compute(self, rank: int) -> bool:
        """Runs the next step of computing, if what it needs is there."""
        times, steps_ = self.times[rank], self.compute[rank]
        if len(times) == len(steps_):
            return False
        step, schedule = steps_[len(times)], self.schedule
        start = times[-1][1] if times else 0.0
        for a in step:
            for key in needs(a, schedule.stages):
                there = self.made if schedule.placement[key[1]] == rank else self.arrived
                if key not in there:
                    return False
                start = max(start, there[key])
            if self.others[rank]:
                when = self.gathered_before(rank, a, len(times))
                if when is None:
                    return False
                start = max(start, when)
        end = start + self.costs.of(step)
        times.append((start, end, self.count))
        self.count += 1
        for a in step:
            if a.kind == WEIGHT:
                continue
            key = (FORWARD if a.kind == FORWARD else BACKWARD, a.stage, a.microbatch)
            self.made[key] = end
            to = a.stage + (1 if a.kind == FORWARD else -1)
            if not self.explicit and 0 <= to < schedule.stages and schedule.placement[to] != rank:
                self.arrived[key] = end + self.costs.communication
                self.ready.append(schedule.placement[to])
        return True

    def advance_batches(self, rank: int) -> bool:
        """Begins the next batch of sends and receives, and ends it if all its messages have moved."""
        sent, batches = self.sent[rank], self.batches[rank]
        if len(sent) == len(batches):
            return False
        batch = batches[len(sent)]
        keys = [carried(a) for a in batch]
        if rank not in self.begun.setdefault(keys[0], {}):
            begin = sent[-1][1] if sent else 0.0
            for a, key in zip(batch, keys, strict=True):
                if a.kind in (SEND_F, SEND_B):
                    if key not in self.made:
                        return False
                    begin = max(begin, self.made[key])
            for a, key in zip(batch, keys, strict=True):
                both = self.begun.setdefault(key, {})
                both[rank] = begin
                if len(both) == 2:
                    self.arrived[key] = max(both.values()) + self.costs.communication
                    self.ready.append(self.schedule.peer(a))
        if not all(len(self.begun[key]) == 2 for key in keys):
            return False
        sent.append((self.begun[keys[0]][rank], max(self.arrived[key] for key in keys)))
        return True

    def advance_others(self, rank: int) -> bool:
        """Runs the next GATHER, from the start of the step of computing before it, or REDUCE, from its end."""
        done, others = self.collected[rank], self.others[rank]
        if len(done) == len(others):
            return False
        action, before = others[len(done)]
        if before > len(self.times[rank]):
            return False
        start = done[-1].end if done else 0.0
        if before:
            start = max(start, self.times[rank][before - 1][1 if action.kind == REDUCE else 0])
        done.append(Event(action, start, start + self.costs.of((action,))))
        if action.kind == GATHER:
            self.gathered[action.stage] = done[-1].end
        return True

    def gathered_before(self, rank: int, a: Action, steps_done: int) -> float | None:
        """When the last GATHER of the stage that stands before this step was over; None: it is still to come."""
        due = [
            n
            for n, (c, before) in enumerate(self.others[rank])
            if c.kind == GATHER and c.stage == a.stage and before <= steps_done
        ]
        if not due:
            return 0.0
        return self.collected[rank][due[-1]].end if due[-1] < len(self.collected[rank]) else None

    def result(self) -> tuple[Rows, Rows, Rows]:
        events = [
            tuple(Event(a, start, end) for step, (start, end, _) in zip(some, times, strict=True) for a in step)
            for some, times in zip(self.compute, self.times, strict=True)
        ]
        messages = [
            tuple(Event(a, start, end) for batch, (start, end) in zip(some, times, strict=True) for a in batch)
            for some, times in zip(self.batches, self.sent, strict=True)
        ]
        return tuple(events), tuple(messages), tuple(map(tuple, self.collected))


# ------------------------------------------------------------------------------------------------ exchanges of experts
#
# A layer's experts cost a microbatch two exchanges between ranks each way. Alone it waits for them. Beside another
# microbatch (fmegatron.interleave, the joined pairs of DualPipe-V) one computes while the other's rows travel.

Segment = tuple[
    float, float
]  # how long a program computes, and how long the exchange takes that it begins then; 0: none


def turns(segments: Sequence[int]) -> list[tuple[int, int]]:
    """In which order two programs of so many segments run, by turns: [(program, segment), …]; one of them is alone when
    the other has ended."""
    first, second = segments
    found = []
    for n in range(max(first, second)):
        found += [(program, n) for program, count in ((0, first), (1, second)) if n < count]
    return found


def turns_time(first: Sequence[Segment], second: Sequence[Segment]) -> float:
    """How long two programs take by turns, until the last exchange of both is over.

    A program passes the turn at each segment's end, and when it is its turn again waits for the exchange that it began.
    Exchanges go one after the other, as on one communicator. Two programs of n segments (c, x) with x ≤ c take 2 n c + x,
    and one after the other 2 n (c + x).
    """
    programs = [list(first), list(second)]
    there = [0.0, 0.0]  # when what each of them waits for has come
    computed = channel = 0.0
    for program, n in turns([len(p) for p in programs]):
        compute, exchange = programs[program][n]
        computed = max(computed, there[program]) + compute
        there[program] = computed
        if exchange:
            channel = there[program] = max(channel, computed) + exchange
    return max(computed, *there)


def with_exchange(costs: Costs, exchange: float) -> Costs:
    """Costs of stages with experts, whose exchanges take `exchange` a microbatch forward, and as much backward by input.

    A forward or backward that runs alone takes so much longer. A joined pair takes as long as the longest of: its computing;
    its exchanges; one of its parts alone. That is what `turns_time` comes to for pairs of many equal segments. A cost
    `overlapped` that is given is kept: then it is known.

    Raises UserError for costs per stage.
    """
    f, i, w = costs.forward, costs.backward_input, costs.backward_weight
    if isinstance(f, Sequence) or isinstance(i, Sequence) or isinstance(w, Sequence):
        raise UserError(
            "a2a: an exchange of experts goes with one cost for all stages: give f, b and w one number each"
        )
    joined = costs.overlapped
    if joined is None:
        joined = max(f + i + w, 2 * exchange, max(f, i + w) + exchange)
    return replace(costs, forward=f + exchange, backward_input=i + exchange, overlapped=joined)
