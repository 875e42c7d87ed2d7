"""Backwards by weight placed by cost: still proven, in the same order otherwise, never slower, never more memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron.errors import UserError
from fmegatron.parallel.schedule_check import Residuals, check, peaks
from fmegatron.parallel.schedule_communication import with_communication
from fmegatron.parallel.schedule_placing import place_weights
from fmegatron.parallel.schedule_simulation import Costs, simulate
from fmegatron.parallel.schedule_theory import theory
from fmegatron.parallel.schedules import BACKWARD, INPUT, WEIGHT, Action, Schedule, make_schedule, one_f_one_b

times = st.floats(0.1, 2.0)


def split_at_once(schedule: Schedule) -> Schedule:
    """Every backward as its two halves, one behind the other."""
    halves = [
        tuple(
            b
            for a in program
            for b in ([a._replace(kind=INPUT), Action(WEIGHT, a.stage, a.microbatch)] if a.kind == BACKWARD else [a])
        )
        for program in schedule.programs
    ]
    return replace(schedule, programs=tuple(halves))


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(("zbh1", "zbv", "dualpipev", "1f1b at once")),
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 12),
    costs=st.builds(
        Costs, forward=times, backward_input=times, backward_weight=times, communication=st.sampled_from((0.0, 0.2))
    ),
    after_input=st.sampled_from((0.3, 0.6, 1.0)),
)
def test_what_is_placed(name, ranks, microbatches, costs, after_input):
    sizes = Residuals(1.0, after_input)
    before = (
        split_at_once(one_f_one_b(ranks, microbatches))
        if name == "1f1b at once"
        else make_schedule(name, ranks, microbatches)
    )
    after = place_weights(before, costs, residuals=sizes)
    check(after)
    check(with_communication(after, costs))
    for old, new in zip(before.programs, after.programs, strict=True):
        assert [a for a in new if a.kind != WEIGHT] == [a for a in old if a.kind != WEIGHT]
    assert simulate(after, costs).makespan <= simulate(before, costs).makespan
    assert all(n <= o + 1e-9 for o, n in zip(peaks(before, sizes), peaks(after, sizes), strict=True))


@pytest.mark.parametrize(("ranks", "microbatches", "weight"), [(4, 8, 1.0), (8, 24, 1.0), (4, 12, 0.5)])
def test_1f1b_becomes_zb_h1(ranks, microbatches, weight):
    """With the memory of 1F1B's first rank on every rank, the bubble is the published one: (p − 1)(F + B − W)."""
    costs = Costs(1.0, 1.0, weight)
    before = split_at_once(one_f_one_b(ranks, microbatches))
    after = place_weights(before, costs, limits=[ranks] * ranks)
    known = theory("zbh1", ranks, microbatches, costs=costs)
    assert simulate(after, costs).idle == pytest.approx(known.idle) == pytest.approx((ranks - 1) * (2 - weight))
    assert simulate(before, costs).idle == pytest.approx((ranks - 1) * 2)  # F + B: the gradient leaves before W
    assert max(peaks(after)) <= ranks


def test_errors():
    schedule, costs = make_schedule("zbv", 2, 4), Costs()
    with pytest.raises(UserError, match="SEND_F.*computing alone"):
        place_weights(with_communication(schedule, costs), costs)
    with pytest.raises(UserError, match="1 numbers for 2 ranks"):
        place_weights(schedule, costs, limits=[4])
    with pytest.raises(UserError, match="keeps more"):
        place_weights(schedule, costs, limits=[0.5, 4])
    with pytest.raises(UserError, match="3 numbers for 4 stages"):
        place_weights(schedule, Costs(forward=(1, 1, 1)))
