"""Pipeline schedules against PyTorch's own tables, published closed forms, real threads that block, and planted faults."""

import csv
import io
import itertools
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from fmegatron.errors import UserError
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.parallel import schedule_text
from fmegatron.parallel.schedule_check import Residuals, ScheduleError, check, peaks, steps
from fmegatron.parallel.schedule_communication import with_collectives, with_communication
from fmegatron.parallel.schedule_drawing import draw, svg
from fmegatron.parallel.schedule_simulation import Costs, parse_costs, simulate
from fmegatron.parallel.schedule_theory import theory
from fmegatron.parallel.schedules import (
    SCHEDULES,
    Action,
    breadth_first,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved,
    make_schedule,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from fmegatron.parallel.stages import (
    Stage,
    by_cost,
    estimated_costs,
    even,
    format_layout,
    layers_of_rank,
    loop,
    parse_layout,
    uneven,
    vee,
)
from fmegatron.schedule_command import main


def rows(schedule):
    return [[str(a) for a in program] for program in schedule.programs]


@st.composite
def drawn_schedules(draw_, stages=5, microbatches=13):
    name = draw_(st.sampled_from(sorted(SCHEDULES)))
    options = {}
    if name in ("interleaved", "bfs"):
        options["virtual"] = draw_(st.integers(1, 4))
    if name == "interleaved":
        options["group"] = draw_(st.none() | st.integers(1, 7))
    return make_schedule(name, draw_(st.integers(1, stages)), draw_(st.integers(1, microbatches)), **options)


# ---------------------------------------------------------------------------------------------- PyTorch's own tables


def torch_rows(kind, p, m, v):
    """The order of computing of a torch.distributed.pipelining schedule, which is a method of an object of modules."""
    found = []
    for rank in range(p):
        one = object.__new__(kind)
        one.pp_group_size, one._n_microbatches, one.n_local_stages, one.rank = p, m, v, rank
        one.num_stages = one._num_stages = p * v
        one._stages = [None] * v
        one.number_of_rounds = max(1, m // p)
        one.microbatches_per_round = m // one.number_of_rounds
        actions = one._calculate_single_rank_operations(rank)
        found.append([str(b) for a in actions if a is not None for b in a.sub_actions or (a,)])
    return found


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_order_of_computing_equals_torch(p):
    for m in range(1, 4 * p + 2):
        assert rows(zb_v(p, m)) == torch_rows(torch_schedules.ScheduleZBVZeroBubble, p, m, 2)
        if m >= 2 * p:
            assert rows(dualpipe_v(p, m)) == torch_rows(torch_schedules.ScheduleDualPipeV, p, m, 2)
        rounds = max(1, m // p)
        for v in (2, 3):
            if m % rounds == 0:
                expected = torch_rows(torch_schedules.ScheduleInterleaved1F1B, p, m, v)
                assert rows(interleaved(p, m, virtual=v, group=m // rounds)) == expected
                assert rows(interleaved(p, m, virtual=v)) == expected


@settings(max_examples=40, deadline=None)
@given(drawn_schedules())
def test_torch_finds_no_deadlock_in_our_sends_and_receives(schedule):
    whole = with_communication(schedule)
    theirs = {rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows(whole))}
    torch_schedules._simulate_comms_compute(theirs, whole.placement.__getitem__, whole.stages)


# ------------------------------------------------------------------------------------------------------ nothing hangs


def run_on_threads(schedule, timeout):
    """Every rank a thread; a send and a receive wait for each other. True if all come to their end."""
    reached = {a._replace(joined=False): threading.Event() for program in schedule.programs for a in program}
    ended = []

    def rank(program):
        for step in steps(program):
            step = [a._replace(joined=False) for a in step]
            for a in step:
                reached[a].set()
            for a in step:
                if a.kind in ("SEND_F", "RECV_B"):
                    other = Action("RECV_F" if a.kind == "SEND_F" else "SEND_B", a.stage + 1, a.microbatch)
                elif a.kind in ("SEND_B", "RECV_F"):
                    other = Action("RECV_B" if a.kind == "SEND_B" else "SEND_F", a.stage - 1, a.microbatch)
                else:
                    continue
                if not reached[other].wait(timeout):
                    return
        ended.append(None)

    threads = [threading.Thread(target=rank, args=(program,)) for program in schedule.programs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return len(ended) == schedule.ranks


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_blocking_threads_come_to_their_end(name):
    for p, m in ((2, 3), (4, 9)):
        assert run_on_threads(with_communication(make_schedule(name, p, m)), 20)


@settings(max_examples=80, deadline=None)
@given(drawn_schedules(), st.data())
def test_complete_and_without_deadlock_whatever_the_sizes_and_costs(schedule, data):
    time = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])  # stages may be empty
    per_stage = st.lists(time, min_size=schedule.stages, max_size=schedule.stages).map(tuple)
    costs = Costs(
        data.draw(per_stage), data.draw(per_stage), data.draw(time), data.draw(st.sampled_from([0.0, 0.2, 1.0]))
    )
    check(schedule)
    whole = with_communication(schedule, costs)
    report = check(whole)
    across = sum(a != b for a, b in itertools.pairwise(schedule.placement))
    assert report.messages == 2 * across * schedule.microbatches
    computing = [tuple(a for a in program if a.kind in "FBIW") for program in whole.programs]
    assert tuple(computing) == schedule.programs  # nothing else was changed
    assert report.peaks == peaks(schedule) == simulate(schedule, costs).peaks
    order, actual = simulate(schedule, costs), simulate(whole, costs)
    assert actual.makespan >= order.makespan - 1e-9  # messages that wait behind others
    if costs.communication == 0:
        assert actual.makespan == pytest.approx(order.makespan, abs=1e-9)
    check(with_collectives(whole))
    assert check(with_communication(with_collectives(schedule), costs)).messages == report.messages
    assert schedule_text.parse(schedule_text.format(whole), name=schedule.name) == whole


def test_neighbours_send_in_both_directions_at_once():
    whole = with_communication(one_f_one_b(4, 16))
    batches = [step for step in steps(whole.programs[1]) if step[0].kind.startswith(("SEND", "RECV"))]
    both = [b for b in batches if len(b) == 2]
    assert len(both) > len(batches) // 2
    assert all(len({whole.peer(a) for a in b}) == 1 and {a.kind[:4] for a in b} == {"SEND", "RECV"} for b in both)


def test_forwards_alone():
    for placement in (loop(3), loop(2, 2), vee(3), vee(2, 3)):
        whole = with_communication(forward_only(placement, 5))
        assert run_on_threads(whole, 20)
        assert check(whole, backward=False).messages == 5 * sum(a != b for a, b in itertools.pairwise(placement))
        with pytest.raises(ScheduleError, match="rank 0 never does 0B0"):
            check(whole)


# ----------------------------------------------------------------------------------------------------- planted faults

GOOD = """
rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0W0 0RECV_B1 0B1
rank 1: 1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1W0 1F1 1B1 1SEND_B1
"""


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ("0W0 ", "", r"rank 0 never does 0W0: every stage must run every microbatch once"),
        (" 1F1 1B1 1SEND_B1", " 1F1 1I1 1SEND_B1", r"rank 1 never does 1W1"),
        (" 0B1", " 0B1 0B1", r"rank 0, action 10 \(0B1\) is done twice"),
        (" 0B1", " 0B1 0W1", r"rank 0, action 9 \(0B1\) is done twice, as it is half done by 0W1"),
        (
            "1I0 1SEND_B0 1W0",
            "1W0 1I0 1SEND_B0",
            r"rank 1, action 4 \(1W0\) needs 1I0, which this rank does only later",
        ),
        ("1F1 1B1", "1B1 1F1", r"rank 1, action 7 \(1B1\) needs 1F1, which this rank does only later"),
        ("1RECV_F0 1F0", "1F0 1RECV_F0", r"rank 1, action 1 \(1F0\) needs 1RECV_F0, which this rank does only later"),
        ("0F1 0SEND_F1", "0SEND_F1 0F1", r"rank 0, action 3 \(0SEND_F1\) needs 0F1, which this rank does only later"),
        ("1I0 1SEND_B0", "1SEND_B0 1I0", r"rank 1, action 4 \(1SEND_B0\) needs 1B0, which this rank does only later"),
        (" 0SEND_F1", "", r"rank 0 never does 0SEND_F1, for which rank 1, action 3 \(1RECV_F1\) would wait for ever"),
        (" 1RECV_F1", "", r"rank 1 never does 1RECV_F1, for which rank 0, action 4 \(0SEND_F1\) would wait"),
        (" 0RECV_B1", " 0RECV_B1 0RECV_B1", r"rank 0, action 9 \(0RECV_B1\) is done twice"),
        (
            "0F0 0SEND_F0 0F1 0SEND_F1",
            "0F0 0F1 0SEND_F1 0SEND_F0",
            r"message 1 from rank 0 to rank 1 is rank 0, action 3 \(0SEND_F1\), but is received as rank 1, action 1",
        ),
        (
            "0F1 0SEND_F1 0RECV_B0",
            "0F1 0RECV_B0 0SEND_F1",
            r"deadlock: rank 0, action 4 \(0RECV_B0\) waits for rank 1 to do 1SEND_B0; "
            r"rank 1, action 3 \(1RECV_F1\) waits for rank 0 to do 0SEND_F1",
        ),
        ("0F0 0SEND_F0", "0F0 +0SEND_F0", r"rank 0, action 2 \(0SEND_F0\): only sends and receives, or a forward and"),
        ("0I0 0W0", "0I0 0REDUCE 0W0", r"rank 0, action 7 \(0REDUCE\) comes before 0W0, whose gradient it would miss"),
        ("1F0 1RECV_F1", "1F0 1GATHER 1RECV_F1", r"rank 1, action 3 \(1GATHER\) comes behind what stage 1 computes"),
    ],
)
def test_a_planted_fault_is_refused_by_name(was, now, says):
    assert check(schedule_text.parse(GOOD)).messages == 4
    assert GOOD.count(was) == 1
    with pytest.raises(ScheduleError, match=says):
        check(schedule_text.parse(GOOD.replace(was, now)))


def test_a_deadlock_of_rendezvous_alone():
    """Both ranks send before they receive: right where sends are buffered, or where both are one batch."""
    table = "0F0 0SEND_F0 0F1 {0} 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 {1} 1F1 1B1 1SEND_B1"
    crossed = schedule_text.parse(table.format("0SEND_F1 0RECV_B0", "1SEND_B0 1RECV_F1"))
    says = r"0, action 4 \(0SEND_F1\) waits for rank 1 to do 1RECV_F1; rank 1, action 4 \(1SEND_B0\) waits for rank 0"
    with pytest.raises(ScheduleError, match=says):
        check(crossed)
    assert not run_on_threads(crossed, 0.5)
    batched = schedule_text.parse(table.format("0SEND_F1 +0RECV_B0", "1SEND_B0 +1RECV_F1"))
    assert check(batched).messages == 4 and run_on_threads(batched, 20)


def test_an_order_of_computing_that_cannot_be():
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0, action 2 \(0B0\) waits for rank 1 to do 1B0; rank 1, "):
        check(schedule_text.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"))
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(schedule_text.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"))
    # Interleaved 1F1B with groups smaller than the number of ranks, where every rank runs ahead as in larger groups.
    p, m, v, group = 4, 4, 2, 1
    programs = []
    for r in range(p):
        f = [f"{c * p + r}F{i}" for i in range(m) for c in range(v)]
        b = [f"{(v - 1 - c) * p + r}B{i}" for i in range(m) for c in range(v)]
        ahead = min(2 * (p - 1 - r) + (v - 1) * group, m * v)
        turns = [x for pair in zip(f[ahead:], b, strict=False) for x in pair]
        programs.append(" ".join([*f[:ahead], *turns, *b[m * v - ahead :]]))
    with pytest.raises(ScheduleError, match="deadlock"):
        check(schedule_text.parse("\n".join(programs)))
    check(interleaved(p, m, virtual=v, group=group))


def test_places_are_checked():
    good = one_f_one_b(2, 2)

    def with_first(action):
        return replace(good, programs=((action, *good.programs[0]), good.programs[1]))

    for action, says in (
        (Action("F", 2, 0), "only the stages 0 to 1"),
        (Action("F", 1, 0), "stage 1 is on rank 1, not on this one"),
        (Action("F", 0, 2), "only the microbatches 0 to 1"),
        (Action("F", 0), "of which microbatch"),
        (Action("X", 0, 0), "'X' is no kind"),
        (Action("RECV_F", 0, 0), "the first stage has none"),
    ):
        with pytest.raises(ScheduleError, match=says):
            check(with_first(action))
    with pytest.raises(ScheduleError, match="both stages are on this rank"):
        check(replace(zb_v(1, 1), programs=((Action("SEND_F", 0, 0), *zb_v(1, 1).programs[0]),)))


# ------------------------------------------------------------------------------------------------------- closed forms

SIZES = [(1, 1), (2, 1), (2, 7), (3, 3), (4, 8), (5, 23), (8, 256), (16, 40), (64, 16)]


def agrees(schedule, costs, idle, most, *, span=False, **options):
    """Simulated: `idle` beyond a rank's work, `most` residuals by rank; and that is what `theory` says too."""
    timeline = simulate(schedule, costs)
    assert (timeline.span_idle if span else timeline.idle) == pytest.approx(idle, abs=1e-9)
    assert timeline.peaks == tuple(most)
    known = theory(schedule.name, schedule.ranks, schedule.microbatches, costs=costs, **options)
    assert known is not None and known.idle == pytest.approx(idle) and known.peaks == tuple(most) and known.source
    return timeline


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_and_1f1b(p, m):
    """Narayanan et al. 2021, section 2.2.1: (p − 1) ÷ m of the work, for any times and any m; residuals of m, and of
    min(p − rank, m) microbatches."""
    for f, i, w in ((1.0, 1.0, 1.0), (2.0, 3.0, 0.5)):
        costs = Costs(f, i, w)
        for schedule, most in (
            (gpipe(p, m), [m] * p),
            (one_f_one_b(p, m), [min(p - rank, m) for rank in range(p)]),
        ):
            timeline = agrees(schedule, costs, (p - 1) * (f + i + w), most)
            assert timeline.bubble == pytest.approx((p - 1) / m)


@pytest.mark.parametrize(
    ("p", "m", "v"), [(2, 2, 2), (3, 9, 3), (4, 8, 2), (4, 10, 2), (5, 8, 4), (8, 32, 4), (24, 24, 2)]
)
def test_interleaved_and_breadth_first(p, m, v):
    """Narayanan et al. 2021, section 2.2.2, and Lamy-Poirier 2023: (p − 1) ÷ (v m). Korthikanti et al. 2022, section
    4.2.3: the first rank keeps 1 + (p − 1) ÷ (p v) times what 1F1B's keeps, where m divides by p."""
    for f, i, w in ((1.0, 1.0, 1.0), (2.0, 3.0, 0.5)):
        costs = Costs(f, i, w)
        group = -(-m // (m // p))
        if m % group == 0:
            most = [min((v - 1) * group + 2 * (p - 1 - rank) + 1, v * m) for rank in range(p)]
            timeline = agrees(interleaved(p, m, virtual=v), costs, (p - 1) * (f + i + w), most, virtual=v)
        timeline = agrees(breadth_first(p, m, virtual=v), costs, (p - 1) * (f + i + w), [v * m] * p, virtual=v)
        assert timeline.bubble == pytest.approx((p - 1) / (v * m))
    if m % p == 0 and m > p:
        assert peaks(interleaved(p, m, virtual=v))[0] / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 7), (3, 3), (4, 8), (5, 23), (8, 64), (32, 32)])
def test_zb_h1(p, m):
    """Qi et al. 2023, section 2.3: (p − 1)(F + I − W), with 1F1B's memory, p. Where W is longer than F or I it is not so."""
    for f, i, w in ((1.0, 1.0, 1.0), (2.0, 1.5, 1.0), (1.0, 3.0, 0.5)):
        agrees(zb_h1(p, m), Costs(f, i, w), (p - 1) * (f + i - w), [p] * p)
    if p > 1:
        for f, i, w in ((1.0, 1.0, 1.5), (1.0, 2.0, 1.5), (2.0, 1.0, 1.5)):
            costs = Costs(f, i, w)
            assert simulate(zb_h1(p, max(m, 2 * p)), costs).idle > (p - 1) * (f + i - w) + 1e-9
            assert theory("zbh1", p, m, costs=costs) is None
    # The residuals of W are smaller, so that the last ranks need less than the first.
    sizes = peaks(zb_h1(p, m), Residuals(1.0, 0.25))
    assert sizes[0] == p and all(a > b for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (3, 6), (4, 8), (5, 23), (8, 64), (24, 47)])
def test_zb_v(p, m):
    """Qi et al. 2023, section 6: where F = I = W, and m ≥ 2 p − 1, no rank is idle between its first and its last
    action, and each keeps 2 p residuals of half of its layers."""
    agrees(zb_v(p, m), Costs(1.5, 1.5, 1.5), 0.0, [2 * p] * p, span=True)
    assert simulate(zb_v(p, m)).idle == pytest.approx(p - 1)  # the last rank begins when the others have worked p − 1
    if 3 < p < 24:
        assert simulate(zb_v(p, 2 * p - 2)).span_idle > 0 and theory("zbv", p, 2 * p - 2) is None
        for uneven_costs in (Costs(1, 1, 2), Costs(1, 2, 1), Costs(2, 1, 1)):
            assert simulate(zb_v(p, m), uneven_costs).span_idle > 0 and theory("zbv", p, m, costs=uneven_costs) is None


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (3, 7), (4, 8), (5, 23), (8, 64), (24, 48)])
def test_dualpipe_v(p, m):
    """github.com/deepseek-ai/DualPipe, table, with PP = 2 p stages: a bubble of (PP ÷ 2 − 1)(F&B + B − 3 W), and PP + 1
    residuals. It is so where a pair takes as long as its parts, F = I and W ≤ I."""
    for f, i, w in ((1.0, 1.0, 1.0), (2.0, 2.0, 0.5)):
        agrees(dualpipe_v(p, m), Costs(f, i, w), (p - 1) * ((f + i + w) + (i + w) - 3 * w), [2 * p + 1] * p)
    fast = Costs(1, 1, 1, overlapped=2.5)
    assert simulate(dualpipe_v(p, m), fast).makespan < simulate(dualpipe_v(p, m)).makespan
    assert theory("dualpipev", p, m, costs=fast) is None


# name: (idle time, residuals of rank 0, is it of each rank's own span?), of 64 ranks and 256 microbatches
LARGEST = {
    "gpipe": (189, 256, False),
    "1f1b": (189, 64, False),
    "zbh1": (63, 64, False),
    "interleaved": (189, 191, False),
    "bfs": (189, 512, False),
    "zbv": (0, 128, True),
    "dualpipev": (126, 129, False),
}


@pytest.mark.parametrize(
    "name", [n if n in ("1f1b", "zbh1") else pytest.param(n, marks=pytest.mark.slow) for n in LARGEST]
)
def test_64_ranks_and_256_microbatches(name):
    idle, most, span = LARGEST[name]
    schedule = make_schedule(name, 64, 256)
    timeline = agrees(schedule, Costs(), idle, theory(name, 64, 256).peaks, span=span)
    assert timeline.peaks[0] == most


def test_groups_smaller_than_the_ranks_keep_less_and_are_slower():
    most, idle = [], []
    for group in (2, 4, 8):
        timeline = simulate(interleaved(4, 16, virtual=2, group=group))
        most.append(max(timeline.peaks))
        idle.append(timeline.idle)
    assert most == sorted(set(most)) and idle[0] > idle[1] == idle[2]


# --------------------------------------------------------------------------------------------------------- simulation


def test_a_timeline_worked_out_by_hand():
    """Two ranks, two microbatches, 1F1B; stage 1 is slower, a message takes 0.5."""
    costs = Costs((1.0, 2.0), (1.0, 2.0), (0.5, 1.0), communication=0.5)
    timeline = simulate(one_f_one_b(2, 2), costs)
    times = [{str(e.action): (e.start, e.end) for e in some} for some in timeline.events]
    assert times[0] == {"0F0": (0, 1), "0F1": (1, 2), "0B0": (7, 8.5), "0B1": (12, 13.5)}
    assert times[1] == {"1F0": (1.5, 3.5), "1B0": (3.5, 6.5), "1F1": (6.5, 8.5), "1B1": (8.5, 11.5)}
    assert timeline.makespan == 13.5 and timeline.busy == (5.0, 10.0) and timeline.idle == 3.5
    assert timeline.memory(0) == [(0, 0), (0, 1), (1, 2), (8.5, 1), (13.5, 0)]
    sizes = Residuals((3.0, 5.0), (1.0, 2.0))
    timeline = simulate(zb_h1(2, 2), costs, residuals=sizes)
    assert [alive for _, alive in timeline.memory(1)] == [0, 5, 2, 7, 4, 2, 0]
    assert timeline.peaks == check(zb_h1(2, 2), residuals=sizes).peaks == (6.0, 7.0)


def test_messages_wait_behind_others_in_the_order_of_the_table():
    table = "0F0 0F1 {0} 0RECV_B0 0B0 0RECV_B1 0B1\n{1} 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    late = schedule_text.parse(table.format("0SEND_F0 0SEND_F1", "1RECV_F0 1RECV_F1"))
    assert check(late).messages == 4
    one_by_one = simulate(late, Costs(communication=1.5))
    assert [(e.start, e.end) for e in one_by_one.messages[0][:2]] == [(1, 2.5), (2.5, 4)]
    at_once = schedule_text.parse(table.format("0SEND_F0 +0SEND_F1", "1RECV_F0 +1RECV_F1"))
    assert [(e.start, e.end) for e in simulate(at_once, Costs(communication=1.5)).messages[1][:2]] == [(0, 3.5)] * 2


def test_gathers_before_and_reductions_behind():
    schedule = with_collectives(interleaved(2, 2, virtual=2))
    assert [str(a) for a in schedule.programs[0] if a.microbatch is None] == [
        "0GATHER",
        "2GATHER",
        "2REDUCE",
        "0REDUCE",
    ]
    timeline = simulate(schedule, Costs(gather=1.5, reduce=1.25))
    plain = simulate(interleaved(2, 2, virtual=2))
    first = timeline.events[0][0]
    assert first.start == 1.5  # nothing before it hides the first one
    assert timeline.makespan == plain.makespan + 1.5 + 1.25  # and nothing behind it the last one
    assert timeline.idle == timeline.makespan - 12
    assert str(schedule.programs[0][-1]) == "0REDUCE"
    with_pair = with_collectives(dualpipe_v(1, 3))
    check(with_pair)


def test_costs_as_text():
    assert parse_costs("f=1,b=2,w=0.5,comm=0.1") == Costs(1, 2, 0.5, 0.1)
    assert parse_costs(" f=1:2 , fb=3,") == Costs((1, 2), overlapped=3)
    for text, says in (
        ("x=1", "'x=1' is none of f="),
        ("f=a", "'a' is no number"),
        ("f=-1", "not negative"),
        ("f=inf", "finite"),
        ("comm=1:2", "one number"),
    ):
        with pytest.raises(UserError, match=says):
            parse_costs(text)
    with pytest.raises(UserError, match="forward has 3 numbers for 2 stages"):
        simulate(gpipe(2, 2), Costs((1, 2, 3)))


# --------------------------------------------------------------------------------------------------------------- text


def test_tables_of_torch_are_read():
    for kind, ours in (
        (torch_schedules.ScheduleZBVZeroBubble, zb_v(3, 6)),
        (torch_schedules.ScheduleDualPipeV, dualpipe_v(3, 6)),
    ):
        file = io.StringIO()
        for rank in range(3):
            one = object.__new__(kind)
            one.pp_group_size, one._n_microbatches, one.num_stages = 3, 6, 6
            csv.writer(file).writerow(one._calculate_single_rank_operations(rank))
        assert schedule_text.parse(file.getvalue(), name=ours.name) == ours


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the table has no actions"),
        ("rank 0: 0F0 0B0 zero", r"line 1, action 3 'zero': an action is a stage, what it does and a microbatch"),
        ("0F0\n\n1F0 # ok\n2F0, 2Q0", r"line 4, action 2 '2Q0': Q is no kind of action"),
        ("0F0 0F", r"line 1, action 2 '0F': F of which microbatch\?"),
        ("0F0 0REDUCE1", r"line 1, action 2 '0REDUCE1': REDUCE is of all microbatches"),
        ("0F0\n0F1", r"line 2, action 1 \(0F1\): stage 0 is on rank 0 already"),
        ("rank 1: 1F0\nrank 1: 0F0", "line 2: rank 1 has a line already"),
        ("rank 0: 0F0\nrank 2: 1F0", "the table has no rank 1, but a rank 2"),
        ("0F0\n2F0", "the table has no stage 1, but a stage 2"),
        ("0GATHER", "the table has no microbatch"),
    ],
)
def test_bad_text_names_line_and_action(text, says):
    with pytest.raises(UserError, match=says):
        schedule_text.parse(text)


def test_ranks_in_any_order_and_cells_that_are_nothing():
    table = schedule_text.parse("rank 1: - 1F0,,1B0\n# between\nRank 0: 0UNSHARD 0F0 - - 0B0 0RESHARD 0REDUCE_GRAD")
    assert rows(table) == [["0GATHER", "0F0", "0B0", "0REDUCE"], ["1F0", "1B0"]]
    assert check(with_communication(table)).messages == 2


# ---------------------------------------------------------------------------------------------- pictures, command line


def test_drawn_in_plain_letters():
    lines = draw(simulate(one_f_one_b(2, 2)), unicode=False, width=80).splitlines()
    assert lines[:2] == ["rank 0 F0-F1-......B0----...B1----", "rank 1 ...F0-B0----F1-B1----......"]
    assert lines[3:] == [
        "residuals alive, 9 = 2",
        "rank 0 555999999999999999555555555  peak 2",
        "rank 1 000555555555555555555000000  peak 1",
    ]
    coloured = draw(simulate(zb_v(2, 3)), colour=True)
    assert "\x1b[48;5;" in coloured and "f0" in coloured


def test_wide_schedules_fit():
    lines = draw(simulate(one_f_one_b(16, 64)), width=60).splitlines()
    assert all(len(line) <= 60 for line in lines[:16])


def test_svg_holds_every_action():
    schedule = dualpipe_v(3, 6)
    picture = ET.fromstring(svg(simulate(schedule)))
    named = [e.text.split(":")[0] for e in picture.iter("{http://www.w3.org/2000/svg}title")][1:]
    assert sorted(named) == sorted(itertools.chain(*rows(schedule)))
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polygon"))) == 3


def test_command(tmp_path, capsys):
    table, picture = tmp_path / "t.txt", tmp_path / "t.svg"
    assert main(["1f1b", "--stages", "4", "--microbatches", "8", "--out", str(table), "--svg", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "bubble 9, 37.5 % of that work" in out and "4, 3, 2, 1 (ranks in order)" in out and "48 messages" in out
    assert "(p − 1) ÷ m" in out or "(p - 1) / m" in out
    assert ET.parse(picture).getroot().tag.endswith("svg")
    assert main(["--file", str(table)]) == 0
    assert "bubble 9, 37.5 %" in capsys.readouterr().out
    table.write_text(table.read_text().replace(" 1B3", ""))
    assert main(["--file", str(table)]) == 2
    assert "rank 1 never does 1B3" in capsys.readouterr().err
    assert main(["1f1b", "--virtual", "2", "--costs", "f=1,b=1,w=1,comm=0.25"]) == 0
    assert "interleaved: 4 ranks, 8 stages" in capsys.readouterr().out
    assert main(["all", "--stages", "4", "--microbatches", "12"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["1f1b"][3] == "25.0%" and lines["interleaved"][3] == "12.5%" and lines["zbh1"][4] == "4"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "schedule 'nope' is none of gpipe, 1f1b"),
        (["1f1b", "--stages", "0"], "stages=0 must be at least 1"),
        (["zbv", "--virtual", "3"], "virtual=3: the schedule zbv has 2 stages on every rank"),
        (["bfs", "--group", "2"], "group=2: only the interleaved schedule"),
        (["1f1b", "--file", "x"], "give one of them"),
        (["--file", "/nowhere/x"], "--file /nowhere/x cannot be read"),
        (["1f1b", "--costs", "f=1:2"], "forward has 2 numbers for 4 stages"),
        (["1f1b", "--svg", "/nowhere/x.svg"], "--svg /nowhere/x.svg cannot be written"),
        (["1f1b", "--after-input", "-1"], "--after-input -1 must be finite"),
    ],
)
def test_bad_arguments_are_one_line(arguments, says, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_torch_is_not_imported():
    code = "import sys, fmegatron.schedule_command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --------------------------------------------------------------------------------------------------- layers on stages


def counts(stages):
    return [len(s.layers) for s in stages]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.integers(1, 6), st.integers(1, 3), st.booleans(), st.booleans())
def test_even(layers, stages, virtual, embedding, head):
    found = even(layers, stages, virtual=virtual, count_embedding=embedding, count_head=head)
    assert len(found) == stages * virtual
    assert [n for s in found for n in s.layers] == list(range(layers))
    assert found[0].embedding and found[-1].head and sum(s.embedding for s in found) == sum(s.head for s in found) == 1
    sizes = [len(s.layers) + (embedding and s.embedding) + (head and s.head) for s in found]
    least = max(-(-(layers + embedding + head) // len(found)), 2 if embedding and head and len(found) == 1 else 0)
    assert max(sizes) == max(least, int(embedding), int(head))


def test_even_and_uneven_by_example():
    assert counts(even(24, 4)) == [6, 6, 6, 6]
    assert counts(even(26, 4)) == [6, 7, 7, 6]
    assert counts(even(22, 4, count_embedding=True, count_head=True)) == [5, 6, 6, 5]
    assert counts(even(2, 4, count_embedding=True, count_head=True)) == [0, 1, 1, 0]
    assert counts(uneven(26, 4, first=4, last=6)) == [4, 8, 8, 6]
    assert counts(uneven(26, 4, last=2)) == [8, 8, 8, 2]
    assert counts(uneven(7, 2, virtual=2, first=0)) == [0, 2, 3, 2]
    assert counts(uneven(5, 2, first=2, last=3)) == [2, 3] and counts(uneven(5, 1, first=5)) == [5]
    for kw, says in (
        ({"first": 20, "last": 7}, "they are too many"),
        ({"first": 27}, "first=27 layers must be between 0 and"),
        ({"stages": 2, "first": 20, "last": 5}, "1 layers would be on no stage"),
        ({"stages": 1, "first": 20}, "the only stage holds all 26 layers"),
    ):
        with pytest.raises(UserError, match=says):
            uneven(26, kw.pop("stages", 4), **kw)
    with pytest.raises(UserError, match="stages=0, virtual=1 must both be at least 1"):
        even(4, 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=7), st.integers(1, 4), st.integers(0, 9), st.integers(0, 9))
def test_by_cost_is_the_best_of_all(costs, stages, embedding, head):
    def parts(ends):
        edges = [0, *ends, len(costs)]
        own = [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]
        own[0] += embedding
        own[-1] += head
        return max(own), sum(c * c for c in own)

    every = itertools.combinations_with_replacement(range(len(costs) + 1), stages - 1)
    found = by_cost(costs, stages, embedding=embedding, head=head)
    assert [n for s in found for n in s.layers] == list(range(len(costs)))
    assert parts([s.layers.stop for s in found[:-1]]) == min(map(parts, every))


def test_by_cost_by_example():
    assert counts(by_cost([1.0] * 24, 4, head=2.0)) in ([7, 6, 6, 5], [6, 7, 6, 5], [6, 6, 7, 5])
    assert counts(by_cost([1, 1, 1, 1, 4], 2)) == [4, 1]
    with pytest.raises(UserError, match="finite and not negative"):
        by_cost([1, -1], 2)


def test_estimated_costs_add_up_to_the_model():
    sizes = {"layers": 6, "embed": 64, "heads": 4, "kv_heads": 2, "head": 32, "mlp": 96, "vocab": 500}
    for seq_len, gated in ((128, True), (16, False)):
        config = DecoderConfig(
            **sizes, window=24, pattern=("window", "window", "full"), activation="swiglu" if gated else "gelu"
        )
        costs, head = estimated_costs(**sizes, seq_len=seq_len, gated=gated, windows=(24, 24, None))
        assert 3 * (sum(costs) + head) == pytest.approx(Decoder(config).flops_per_token(seq_len))
    assert counts(by_cost(costs, 3, head=4 * head))[-1] < 2


def test_layout_strings():
    found = parse_layout("Et*3|(tt|)*29,L", layers=61)  # DeepSeek-V3's layers on Megatron-LM's layout
    assert counts(found) == [3, *[2] * 29, 0]
    assert found[0].embedding and found[-1] == Stage(range(61, 61), head=True)
    assert format_layout(found) == "Ettt|" + "tt|" * 29 + "L" and parse_layout(format_layout(found)) == found
    assert counts(parse_layout("E||t t|(t*2|)*2 ,tL")) == [0, 0, 2, 2, 2, 1]
    assert [s.empty for s in parse_layout("E|t||L|")] == [False, False, True, False, True]
    assert [s.embedding for s in parse_layout("|E|tL")] == [False, True, False]
    assert counts(parse_layout("E((t|)*2t|)*2L")) == [1, 1, 1, 1, 1, 1, 0]
    found = parse_layout("Et|tm*2L", layers=2, mtp=2)  # prediction modules are with the head
    assert [s.modules for s in found] == [0, 2] and format_layout(found) == "Et|tmmL"
    assert parse_layout("Et|tL", mtp=2)[-1].modules == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Et|m|L", "m, a prediction module, reads what the head reads and is held with it"),
        ("Et|mtL", "write it on the stage of L, behind its layers"),
        ("Et*3|mmL", "has 2 m, but the model has 1 prediction modules: write as many m, or none"),
        ("Et|x|L", r"character 4: 'x' is none of"),
        ("E(t|L", r"character 2: this \( is never closed"),
        ("Et)|L", r"character 3: this \) closes no"),
        ("Et*|L", r"character 3: \* stands behind"),
        ("*3EtL", r"character 1: \* stands behind"),
        ("t|L", "has 0 E, the embedding"),
        ("Et|tLL", "has 2 L, the head"),
        ("tE|L", "E, the embedding, must come before all else"),
        ("Et|Lt", "L, the head with the loss, must come behind all else"),
        ("Et|tL", r"has 2 layers t, but the model has 3"),
    ],
)
def test_bad_layout_strings(text, says):
    with pytest.raises(UserError, match=says):
        parse_layout(text, layers=3, mtp=1)


def test_placement():
    assert loop(4, 2) == (0, 1, 2, 3, 0, 1, 2, 3) and vee(4) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert vee(3, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2) and vee(2, 1) == loop(2)
    assert layers_of_rank(even(8, 2, virtual=2), vee(2), 0) == (0, 1, 6, 7)
    for name in SCHEDULES:
        schedule = make_schedule(name, 3, 6)
        assert schedule.placement in (loop(3), loop(3, 2), vee(3))
