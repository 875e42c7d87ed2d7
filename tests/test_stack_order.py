"""In which order `stack` gathers, runs, reduces and waits: the whole list of events, for more layers than are gathered
ahead, and its numbers against the plain loop."""

from __future__ import annotations

import pytest
import torch

from fmegatron.context import Ctx
from fmegatron.parallel.stack import Store, stack

F64 = torch.float64
LAYERS = 4


def recording(events, reduces=True):
    """At rest parameters are half of what blocks read; every call is noted."""

    def gather(p, index):
        events.append(f"gather {index}")
        return f"wait {index}", {k: 2 * t if t.is_floating_point() else t for k, t in p.items()}

    def reduce(g, index):
        events.append(f"reduce {index}")
        return f"reduced {index}", {k: None if t is None else 2 * t for k, t in g.items()}

    def wait(started):
        events.append(started[0])
        return started[1]

    return Store(gather, reduce, wait, reduces=lambda index: reduces)


def block(p, x, ctx):
    return torch.tanh(x * p["w"] + p["n"].sum()) + p["b"]


def block_noting(events):
    def run(p, x, ctx):
        events.append(f"run {ctx.layer}")
        return block(p, x, ctx)

    return run


def layers():
    g = torch.Generator().manual_seed(0)
    return {
        i: {
            "w": torch.randn(3, dtype=F64, generator=g).requires_grad_(),
            "n": torch.arange(2),
            "b": torch.randn(3, dtype=F64, generator=g).requires_grad_(i != 1),  # frozen there
        }
        for i in range(LAYERS)
    }


def plain(p, x):
    for i in range(LAYERS):
        x = block({k: 2 * t if t.is_floating_point() else t for k, t in p[i].items()}, x, None)
    return x


def gradients(run, p, x):
    x = x.clone().requires_grad_()
    y = run(p, x)
    wanted = [t for i in p for t in p[i].values() if t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *wanted])]


FORWARD = ["gather 0", "gather 1", "wait 0", "run 0", "gather 2", "wait 1", "run 1", "gather 3", "wait 2", "run 2"]
LAST = ["then", "wait 3", "run 3"]
BACKWARD = [
    *["gather 3", "gather 2", "wait 3", "reduce 3"],
    *["gather 1", "wait 2", "reduced 3", "reduce 2"],
    *["gather 0", "wait 1", "reduced 2", "reduce 1"],
    *["wait 0", "reduced 1", "reduce 0", "reduced 0"],
]
AT_ONCE = [e for i in (3, 2, 1, 0) for e in (f"wait {i}", f"reduce {i}", f"reduced {i}")]


@pytest.mark.parametrize("free", [True, False])
def test_layers_are_gathered_one_ahead_and_reduced_one_behind(free):
    events, x, p = [], torch.randn(3, dtype=F64), layers()
    f = stack(block_noting(events), store=recording(events), free=free)

    def run(p, x):
        return f(p, x, Ctx(), lambda: events.append("then"))

    found = gradients(run, p, x)
    for one, other in zip(found, gradients(plain, p, x), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
    backward = BACKWARD if free else [e for e in BACKWARD if e.split()[0] not in ("gather", "wait")]
    assert events == [*FORWARD, *LAST, *backward]


def test_reductions_that_take_no_time_are_awaited_at_once():
    events, x, p = [], torch.randn(3, dtype=F64), layers()
    f = stack(block, store=recording(events, reduces=False))
    found = gradients(lambda p, x: f(p, x, Ctx()), p, x)
    for one, other in zip(found, gradients(plain, p, x), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
    assert [e for e in events if e.startswith("reduce")] == [e for e in AT_ONCE if e.startswith("reduce")]


def test_a_single_layer():
    events, x, p = [], torch.randn(3, dtype=F64), layers()
    f = stack(block_noting(events), store=recording(events))
    with torch.no_grad():
        y = f({0: p[0]}, x, Ctx(), lambda: events.append("then"))
    torch.testing.assert_close(y, block({k: 2 * t if k != "n" else t for k, t in p[0].items()}, x, None))
    assert events == ["gather 0", "then", "wait 0", "run 0"]


HALVES = ["wait 3", "wait 2", "wait 1", "wait 0"]


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("joint", [True, False])
def test_the_split_of_a_stack(free, joint):
    events, x, p = [], torch.randn(3, dtype=F64), layers()
    halves = stack(block_noting(events), store=recording(events), free=free).split
    y, run = halves.forward(p, x, Ctx(), joint)
    assert events == [
        *["gather 0", "gather 1", "wait 0", "run 0", "gather 2", "wait 1", "run 1", "gather 3", "wait 2", "run 2"],
        *["wait 3", "run 3"],
    ]
    events.clear()
    if joint:
        gx, own = halves.backward(run, 2 * y.detach(), p)
        ahead = [["gather 3", "gather 2"], ["gather 1"], ["gather 0"], []]
        expected = []
        for n, (index, gathers) in enumerate(zip((3, 2, 1, 0), ahead, strict=True)):
            expected += [*gathers, f"wait {index}"] if free else []
            expected += [f"reduced {index + 1}"] if n else []
            expected += [f"reduce {index}"]
        assert events == [*expected, "reduced 0"]
    else:
        gx, left = halves.backward_input(run, 2 * y.detach(), p)
        gathers = ["gather 3", "gather 2", "wait 3", "gather 1", "wait 2", "gather 0", "wait 1", "wait 0"]
        assert events == (gathers if free else [])
        events.clear()
        own = halves.backward_weight(left)
        reductions = [
            "reduce 0",
            "reduced 0",
            "reduce 1",
            "reduced 1",
            "reduce 2",
            "reduced 2",
            "reduce 3",
            "reduced 3",
        ]
        assert events == reductions
    found = [y.detach(), gx, *(own[i][k] for i in p for k, t in p[i].items() if t.requires_grad)]
    for one, other in zip(found, gradients(plain, p, x), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_a_store_as_a_differentiable_function():
    events, p = [], layers()[0]
    full = recording(events).differentiable(p, 0)
    assert torch.equal(full["n"], p["n"])
    got = torch.autograd.grad(full["w"].square().sum() + full["b"].sum(), [p["w"], p["b"]], create_graph=True)
    torch.testing.assert_close(got[0], 8 * p["w"])
    torch.testing.assert_close(torch.autograd.grad(got[0].sum(), p["w"])[0], torch.full((3,), 8.0, dtype=F64))
