"""Schedules against torch.optim.lr_scheduler and closed forms."""

import math

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules
from transformers import optimization as transformers_schedules

from fmegatron.errors import UserError
from fmegatron.schedules import constant, cosine, inverse_sqrt, linear, wsd


def torch_rates(steps, make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def ours(schedule, steps):
    return [schedule(i) for i in range(steps)]


def test_cosine_equals_torch_with_warmup():
    def make(o):
        warm = torch_schedules.LinearLR(o, start_factor=1 / 5, total_iters=4)
        wave = torch_schedules.CosineAnnealingLR(o, T_max=15, eta_min=0.03)
        return torch_schedules.SequentialLR(o, [warm, wave], milestones=[5])

    want = torch_rates(20, make)
    assert ours(cosine(0.3, total=20, warmup=5, end=0.03), 20) == pytest.approx(want, rel=1e-12)


def test_linear_equals_torch():
    want = torch_rates(20, lambda o: torch_schedules.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=16))
    assert ours(linear(0.3, total=16, end=0.03), 20) == pytest.approx(want, rel=1e-12)


def test_constant_equals_torch():
    want = torch_rates(9, lambda o: torch_schedules.LinearLR(o, start_factor=1 / 4, total_iters=3))
    assert ours(constant(0.3, warmup=4), 9) == pytest.approx(want, rel=1e-12)
    assert constant(0.3)(0) == 0.3


def test_wsd_closed_form():
    schedule = wsd(0.4, total=20, decay=5, warmup=4, end=0.1)
    want = [0.1, 0.2, 0.3] + [0.4] * 13 + [0.4 - 0.3 * i / 5 for i in range(1, 5)] + [0.1] * 3
    assert ours(schedule, 23) == pytest.approx(want, rel=1e-12)
    assert math.isclose(schedule(10**9), 0.1)


@pytest.mark.parametrize(("form", "theirs"), [("linear", "linear"), ("cosine", "cosine"), ("minus_sqrt", "1-sqrt")])
def test_wsd_forms_equal_transformers(form, theirs):
    """Past the warm-up, which there begins at zero and here does not."""

    def make(o):
        return transformers_schedules.get_wsd_schedule(
            o, 4, 6, num_training_steps=20, decay_type=theirs, min_lr_ratio=0.1
        )

    got = ours(wsd(0.3, total=20, decay=6, warmup=4, end=0.03, form=form), 24)
    assert got[4:] == pytest.approx(torch_rates(24, make)[4:], rel=1e-12)
    assert got[:4] == pytest.approx([0.075, 0.15, 0.225, 0.3], rel=1e-12)


def test_wsd_exponential_closed_form():
    """Halves what is left of twice the fall, less the fall: 2 * 0.5^x - 1 at a part x of the decay."""
    got = ours(wsd(1.0, total=8, decay=4, end=0.2, form="exponential"), 10)
    want = [1.0] * 5 + [0.2 + 0.8 * (2 / 2**0.25 - 1), 0.2 + 0.8 * (2 / 2**0.5 - 1), 0.2 + 0.8 * (2 / 2**0.75 - 1)]
    assert got == pytest.approx([*want, 0.2, 0.2], rel=1e-12)


@pytest.mark.parametrize(("warmup", "timescale"), [(5, None), (5, 12), (0, 7), (0, None)])
def test_inverse_sqrt_equals_transformers(warmup, timescale):
    want = torch_rates(60, lambda o: transformers_schedules.get_inverse_sqrt_schedule(o, warmup, timescale))
    got = ours(inverse_sqrt(0.3, warmup=warmup, timescale=timescale), 60)
    assert got[warmup:] == pytest.approx(want[warmup:], rel=1e-12)
    assert got[:warmup] == pytest.approx([0.3 * (i + 1) / 5 for i in range(warmup)], rel=1e-12)


def test_inverse_sqrt_has_a_floor():
    """Megatron-LM's: max(min_lr, max_lr * sqrt(warmup) / sqrt(step))."""
    got = ours(inverse_sqrt(1.0, warmup=4, end=0.25), 100)
    assert got[4:] == pytest.approx([max(0.25, 2 / math.sqrt(i)) for i in range(4, 100)], rel=1e-12)


def test_ends_without_room():
    assert ours(cosine(1.0, total=4, warmup=4, end=0.5), 6) == [0.25, 0.5, 0.75, 1.0, 0.5, 0.5]
    assert ours(wsd(1.0, total=2, decay=0), 3) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: cosine(1e-3, total=10, warmup=11), ("warmup", "10", "11")),
        (lambda: linear(1e-3, total=10, warmup=11), ("warmup", "10", "11")),
        (lambda: wsd(1e-3, total=10, warmup=6, decay=5), ("warmup + decay", "10", "11")),
        (lambda: constant(-1.0), ("peak", "-1.0")),
        (lambda: constant(float("nan")), ("peak", "nan")),
        (lambda: linear(1e-3, total=-1), ("total", "-1")),
        (lambda: cosine(1e-3, total=10, end=-0.1), ("end", "-0.1")),
        (lambda: wsd(1.0, total=9, decay=2, form="sqrt"), ("form='sqrt'", "minus_sqrt")),
        (lambda: inverse_sqrt(1.0, timescale=0), ("timescale", "0")),
        (lambda: inverse_sqrt(1.0, warmup=-1), ("warmup", "-1")),
        (lambda: constant(1.0, warmup=-3), ("warmup", "-3")),
    ],
)
def test_nonsense_is_refused(make, names):
    with pytest.raises(UserError) as error:
        make()
    assert all(n in str(error.value) for n in names)


def test_schedules_are_values():
    assert cosine(1e-3, total=10) == cosine(1e-3, total=10)
    assert repr(wsd(1.0, total=9, decay=2)) == "WSD(peak=1.0, total=9, decay=2, warmup=0, end=0.0, form='linear')"
