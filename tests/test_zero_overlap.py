"""Communication beside computation: what is issued and awaited when, on gloo, and what a delay of every collective costs."""

import sys
import time
import weakref

import pytest
import torch
from torch.autograd import Function

from fmegatron import collectives
from fmegatron.accumulate import Term, Weight, accumulate
from fmegatron.context import Ctx
from fmegatron.initializers import Normal
from fmegatron.mesh import make_mesh
from fmegatron.optim import adamw
from fmegatron.parallel.stack import stack
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.remat import nothing
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding
from fmegatron.spec import Param, init
from fmegatron.split import everything
from fmegatron.step import TrainState, train_step
from fmegatron.zero import with_sharded_state
from tests.processes import processes

torch.set_num_threads(1)
pytestmark = pytest.mark.xdist_group("gloo")

POLICIES = {"everything": everything, "nothing": nothing}


class Noted(Function):
    """The identity, which calls `when(there)` on its way and `when(back)` in the backward."""

    @staticmethod
    def forward(x, when, there, back):
        when(there)
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.when, _, ctx.back = inputs

    @staticmethod
    def backward(ctx, g):
        ctx.when(ctx.back)
        return g, None, None, None


def spec_of(layers):
    def leaf(dims):
        return Param((8, 8), dims, Normal(0.5), over="batch seq")

    return {"layers": {i: {"a": leaf("embed mlp"), "b": leaf("mlp embed")} for i in range(layers)}}


def loss_of(spec, when, save):
    """A loss of layers of two products; `when` is called with "block i" before a block, with "backward i" before its
    backward and with "done i" behind that."""

    def block(p, x, ctx):
        x = Noted.apply(x, when, f"block {ctx.layer}", f"done {ctx.layer}")
        h = ctx.sh.dot(x, p["a"], "batch seq embed, embed mlp -> batch seq mlp").tanh()
        y = x + ctx.sh.dot(h, p["b"], "batch seq mlp, mlp embed -> batch seq embed")
        return Noted.apply(y, when, None, f"backward {ctx.layer}")

    layers = stack(block, spec["layers"], save=POLICIES[save])
    return lambda p, batch, ctx: (Term(layers(p["layers"], batch["x"], ctx).square().sum(-1), "batch seq"), None)


def weights(batch):
    return {"loss": Weight(torch.ones(batch["x"].shape[:2]), "batch seq")}


def sharding(zero):
    mesh = make_mesh("dp=4", device="cpu")
    rows = {"batch": "dp", "seq": None, "embed": None, "mlp": None}
    return Sharding(mesh, Rules(compute=rows, store="dp", zero=zero), precision=Precision(params=torch.float64))


class Watched:
    """While open: every collective of a layer's size is noted in `events`, and takes `delay` seconds."""

    def __init__(self, delay=0.0):
        self.events, self.delay, self.count = [], delay, 0
        self.under_way = {}

    def begin(self, collective, x, mesh, axes):
        y = self.original[0](collective, x, mesh, axes)
        self.count += 1
        if x.numel() > 8:
            self.events.append(f"begin {collective}")
        self.under_way[id(y)] = (y, collective, x.numel() > 8, time.monotonic())
        return y

    def end(self, y):
        _, collective, large, at = self.under_way.pop(id(y))
        time.sleep(max(0.0, at + self.delay - time.monotonic()))
        if large:
            self.events.append(f"end {collective}")
        return self.original[1](y)

    def __enter__(self):
        self.original = collectives.begin, collectives.end
        collectives.begin, collectives.end = self.begin, self.end
        return self

    def __exit__(self, *_):
        collectives.begin, collectives.end = self.original


def events_of(zero, save):
    """The events of a forward and backward of three layers, with gathers and reductions numbered in their order."""
    sh, spec = sharding(zero), spec_of(3)
    with Watched() as watched:

        def when(what):
            if what is not None:
                watched.events.append(what)

        params = init(spec, key(0), sh=sh)
        f = accumulate(loss_of(spec, when, save), weights=weights, spec=spec)
        f(params, {"x": torch.randn(2, 3, 8, dtype=torch.float64)}, Ctx(sh))
    return watched.events


def test_gathers_and_reductions_run_beside_the_blocks():
    """Of block i + 1 gathered before block i and awaited behind it, backward alike; reduced of block i, awaited behind
    the backward of block i - 1."""
    g, r = "all-gather", "reduce-scatter"
    expected = [
        *(f"begin {g}", f"begin {g}", f"end {g}", "block 0"),
        *(f"begin {g}", f"end {g}", "block 1", f"end {g}", "block 2"),
        *(f"begin {g}", f"begin {g}", f"end {g}", "backward 2", "done 2", f"begin {r}"),
        *(f"begin {g}", f"end {g}", "backward 1", "done 1", f"end {r}", f"begin {r}"),
        *(f"end {g}", "backward 0", "done 0", f"end {r}", f"begin {r}", f"end {r}"),
    ]
    for events in processes(4).run(events_of, 3, "everything"):
        assert events == expected
    for events in processes(4).run(events_of, 3, "nothing"):  # each block runs once more in the backward
        assert [e for e in events if not e.startswith("block")] == [e for e in expected if not e.startswith("block")]


@pytest.mark.parametrize("zero", [1, 2])
def test_reductions_of_replicated_parameters_run_beside_the_backward(zero):
    """Those of block i begin when all its gradients are there, and are awaited when those of block i - 1 are."""
    r = "reduce-scatter"
    expected = ["block 0", "block 1", "block 2"]
    expected += ["backward 2", f"begin {r}", "done 2", "backward 1", f"end {r}", f"begin {r}", "done 1"]
    expected += ["backward 0", f"end {r}", f"begin {r}", f"end {r}"]  # (nothing needs the gradient of the first input)
    for events in processes(4).run(events_of, zero, "everything"):
        assert events == expected


DELAY, LAYERS = 0.06, 8


def seconds(zero, delay, rounds=2):
    """(the least seconds of a step whose blocks take some time, its collectives)."""
    sh, spec = sharding(zero), spec_of(LAYERS)
    optimizer = with_sharded_state(adamw(1e-3), spec, sh)

    def busy(what):
        if what is not None and not what.startswith("done"):
            time.sleep(1.3 * DELAY)

    loss = loss_of(spec, busy, "everything")
    step = train_step(loss, optimizer, weights=weights, sh=sh, spec=spec)
    params = init(spec, key(0), sh=sh)
    state = TrainState(0, params, optimizer.init(params))
    took = []
    for _ in range(rounds):
        torch.distributed.barrier()
        with Watched(delay) as watched:
            began = time.monotonic()
            state, _ = step(state, {"x": torch.randn(2, 3, 8, dtype=torch.float64)})
            took.append(time.monotonic() - began)
    return min(took), watched.count


@pytest.mark.parametrize("zero", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_delayed_collectives_are_hidden(zero):
    """With d seconds more for each collective a step grows by less than 0.3 of all delays: all but the first gather of
    forward and backward, the last reduction (or gather of new parameters), and two sums run beside blocks."""
    quick = max(t for t, _ in processes(4).run(seconds, zero, 0.0))
    slow, counts = zip(*processes(4).run(seconds, zero, DELAY), strict=True)
    count = counts[0]
    assert count == (3 * LAYERS + 2 if zero == 3 else LAYERS + 3)
    share = 0.3 if zero == 3 else 0.45  # of so few collectives as ZeRO-1 has, four are not beside a block
    assert max(slow) - quick < share * count * DELAY


def most_alive(save):
    """(the most gathered layers alive at a time, those alive behind the forward, behind the backward)."""
    where = sys.modules["fmegatron.parallel.stack"]
    original, alive, most = where.moving, [], 0

    def moving(xs, params, sh, what):
        arrive = original(xs, params, sh, what)

        def noted():
            nonlocal most
            out = arrive()
            if what == "enter":
                alive.append([weakref.ref(t.untyped_storage()) for t in out])
                most = max(most, living())
            return out

        return noted

    def living():
        return sum(any(r() is not None for r in layer) for layer in alive)

    where.moving = moving
    try:
        sh, spec = sharding(3), spec_of(5)
        layers = sh.local(init(spec, key(0), sh=sh))["layers"]
        flat = [t.requires_grad_() for i in layers for t in layers[i].values()]
        behind = []
        f = loss_of(spec, lambda what: None, save)
        terms, _ = f({"layers": layers}, {"x": torch.randn(2, 3, 8, dtype=torch.float64)}, Ctx(sh))
        behind.append(living())
        torch.autograd.grad(terms.items.sum(), flat)
        behind.append(living())
    finally:
        where.moving = original
    return most, *behind


@pytest.mark.parametrize("save", POLICIES)
def test_two_gathered_layers_are_alive_at_most(save):
    """Backward included; none is saved for it. (That of a gather under way is not yet counted: it is the second.)"""
    for most, forward, backward in processes(4).run(most_alive, save):
        assert most <= 2 and forward == backward == 0
