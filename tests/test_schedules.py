"""Schedules against torch.optim.lr_scheduler and closed forms."""

import math

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules

from fmegatron.errors import UserError
from fmegatron.schedules import constant, cosine, linear, wsd


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
        (lambda: constant(1.0, warmup=-3), ("warmup", "-3")),
    ],
)
def test_nonsense_is_refused(make, names):
    with pytest.raises(UserError) as error:
        make()
    assert all(n in str(error.value) for n in names)


def test_schedules_are_values():
    assert cosine(1e-3, total=10) == cosine(1e-3, total=10)
    assert repr(wsd(1.0, total=9, decay=2)) == "WSD(peak=1.0, total=9, decay=2, warmup=0, end=0.0)"
