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
from fmegatron.optim import adamw, chain, clip_by_global_norm
from fmegatron.optim import norm as norms
from fmegatron.parallel.stack import stack
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.remat import nothing
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding
from fmegatron.spec import Param, init
from fmegatron.split import everything
from fmegatron.step import TrainState, train_step
from fmegatron.tree import leaves
from fmegatron.zero import Ahead, with_sharded_state
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


def leaf(dims):
    return Param((8, 8), dims, Normal(0.5), over="batch seq")


FIRST, LAST = (
    {"in": leaf("embed mlp")},
    {"norm": Param((8,), "embed", Normal(0.5), over="batch seq"), "out": leaf("embed mlp")},
)


def spec_of(layers, ends=False):
    """Layers of two matrices, and leaves outside of them in front and behind."""
    spec = {"layers": {i: {"a": leaf("embed mlp"), "b": leaf("mlp embed")} for i in range(layers)}}
    return {**spec, **FIRST, **LAST} if ends else spec


def loss_of(spec, when, save="everything", ends=None):
    """A loss of layers of two products; `when` is called with "block i" before a block, with "backward i" before its
    backward and with "done i" behind that.

    ends: how the leaves outside the layers are read: None (there are none), "use" or "ahead".
    """

    def block(p, x, ctx):
        x = Noted.apply(x, when, f"block {ctx.layer}", f"done {ctx.layer}")
        h = ctx.sh.dot(x, p["a"], "batch seq embed, embed mlp -> batch seq mlp").tanh()
        y = x + ctx.sh.dot(h, p["b"], "batch seq mlp, mlp embed -> batch seq embed")
        return Noted.apply(y, when, None, f"backward {ctx.layer}")

    layers = stack(block, spec["layers"], save=POLICIES[save])

    def loss(p, batch, ctx):
        x = batch["x"].to(ctx.sh.precision.compute_dtype)
        if ends == "ahead":
            first, last = (Ahead({n: p[n] for n in end}, end, ctx.sh) for end in (FIRST, LAST))
            first.begin()
            y = layers(p["layers"], lambda: x @ first()["in"], ctx, last.begin)
        else:
            first, last = (lambda end=end: ctx.sh.use({n: p[n] for n in end}, end) for end in (FIRST, LAST))
            y = layers(p["layers"], x @ first()["in"] if ends else x, ctx)
        if ends:
            when("head")
            y = (y * (q := last())["norm"]) @ q["out"]
        return Term(y.square().sum(-1), "batch seq"), None

    return loss


def weights(batch):
    return {"loss": Weight(torch.ones(batch["x"].shape[:2]), "batch seq")}


# name: (mesh, options of Rules)
LAYOUTS = {
    "dp": ("dp=4", {"store": "dp", "zero": 0}),
    "zero 1": ("dp=4", {"store": "dp", "zero": 1}),
    "zero 2": ("dp=4", {"store": "dp", "zero": 2}),
    "zero 3": ("dp=4", {"store": "dp", "zero": 3}),
    "hsdp": ("dp=2,fsdp=2", {"store": "fsdp"}),
    "hsdp, state over both": ("dp=2,fsdp=2", {"store": "fsdp", "store_optimizer": "dp"}),
}
DOUBLE = Precision(params=torch.float64)
MIXED = Precision(params=torch.float64, compute=torch.float32, reduce=torch.float64)


def sharding(layout, precision=DOUBLE):
    axes, options = LAYOUTS[layout]
    mesh = make_mesh(axes, device="cpu")
    rows = {"batch": tuple(mesh.sizes), "seq": None, "embed": None, "mlp": None}
    return Sharding(mesh, Rules(compute=rows, **options), precision=precision)


class Watched:
    """While open: every collective of a layer's size is noted in `events`, and each one takes `delay` seconds.

    clock: a time that only delays and `pass_time` move on, instead of the real one.
    """

    def __init__(self, delay=0.0, clock=False):
        self.events, self.delay, self.count = [], delay, 0
        self.under_way = {}
        self.time = 0.0 if clock else None

    def now(self):
        return time.monotonic() if self.time is None else self.time

    def pass_time(self, seconds):
        if self.time is None:
            time.sleep(max(0.0, seconds))
        else:
            self.time += max(0.0, seconds)

    def begin(self, collective, x, mesh, axes):
        y = self.original[0](collective, x, mesh, axes)
        self.count += 1
        large = x.numel() > 8
        if large:
            self.events.append(f"begin {collective}")
        self.under_way[id(y)] = (y, collective, large, self.now())
        return y

    def end(self, y):
        _, collective, large, at = self.under_way.pop(id(y))
        self.pass_time(at + self.delay - self.now())
        if large:
            self.events.append(f"end {collective}")
        return self.original[1](y)

    def norm(self, *about):
        """That of a global norm is awaited where it is issued."""
        self.count += 1
        self.pass_time(self.delay)
        self.original[2](*about)

    def __enter__(self):
        self.original = collectives.begin, collectives.end, norms.note_collective
        collectives.begin, collectives.end, norms.note_collective = self.begin, self.end, self.norm
        return self

    def __exit__(self, *_):
        collectives.begin, collectives.end, norms.note_collective = self.original


def data():
    return {"x": torch.randn(2, 3, 8, dtype=torch.float64)}


def events_of(layout, save="everything", ends=None, precision=DOUBLE):
    """The events of a forward and backward of three layers."""
    sh, spec = sharding(layout, precision), spec_of(3, ends)
    params = init(spec, key(0), sh=sh)
    with Watched() as watched:

        def when(what):
            if what is not None:
                watched.events.append(what)

        f = accumulate(loss_of(spec, when, save, ends), weights=weights, spec=spec)
        f(params, data(), Ctx(sh))
    return watched.events


G, R, A = "all-gather", "reduce-scatter", "all-reduce"
# Of block i + 1 gathered before block i and awaited behind it, backward alike; reduced of block i, awaited behind the
# backward of block i - 1.
FORWARD = [
    *(f"begin {G}", f"begin {G}", f"end {G}", "block 0"),
    *(f"begin {G}", f"end {G}", "block 1", f"end {G}", "block 2"),
]
BACKWARD = [
    *(f"begin {G}", f"begin {G}", f"end {G}", "backward 2", "done 2", f"begin {R}"),
    *(f"begin {G}", f"end {G}", "backward 1", "done 1", f"end {R}", f"begin {R}"),
    *(f"end {G}", "backward 0", "done 0", f"end {R}", f"begin {R}", f"end {R}"),
]


def test_gathers_and_reductions_run_beside_the_blocks():
    for events in processes(4).run(events_of, "zero 3"):
        assert events == FORWARD + BACKWARD
    for events in processes(4).run(events_of, "zero 3", "nothing"):  # each block runs once more in the backward
        assert [e for e in events if not e.startswith("block")] == [
            e for e in FORWARD + BACKWARD if not e.startswith("block")
        ]


def test_leaves_outside_the_layers_are_gathered_ahead_and_reduced_behind():
    """Those in front beside the first layers' gathers, those behind while the last block runs. In the backward the
    reduction of what is behind is awaited behind the last block's, and that in front with the first layer's at the end.
    """
    expected = [
        *(f"begin {G}", *FORWARD[:2], f"end {G}", *FORWARD[2:-2]),  # in front
        *(f"begin {G}", f"end {G}", "block 2", "head", f"end {G}", f"begin {R}"),  # behind
        *(*BACKWARD[:6], f"end {R}", *BACKWARD[6:-1]),
        *(f"begin {R}", f"end {R}", f"end {R}"),
    ]
    for events in processes(4).run(events_of, "zero 3", "everything", "ahead"):
        assert events == expected


@pytest.mark.parametrize(("layout", "precision"), [("dp", DOUBLE), ("zero 1", MIXED), ("zero 2", DOUBLE)])
def test_reductions_of_replicated_parameters_run_beside_the_backward(layout, precision):
    """Those of block i begin when all its gradients are there, and are awaited when those of block i - 1 are; so too
    where parameters are cast, block by block."""
    r = A if layout == "dp" else R
    order = (lambda i: (f"done {i}", f"begin {r}")) if precision is MIXED else (lambda i: (f"begin {r}", f"done {i}"))
    expected = ["block 0", "block 1", "block 2", "backward 2", *order(2)]
    for i in (1, 0):
        begun = [f"end {r}", f"begin {r}"]
        if precision is MIXED:
            expected += [f"backward {i}", f"done {i}", *begun]
        else:  # nothing needs the gradient of the first input
            expected += [f"backward {i}", *begun, *([f"done {i}"] if i else [])]
    for events in processes(4).run(events_of, layout, "everything", None, precision):
        assert events == [*expected, f"end {r}"]


def test_both_halves_of_sums_that_are_sent_run_beside_the_backward():
    """A rank's summands of block i are awaited when those of block i - 1 are there, and the gathered sums a block later."""
    sent = Precision(params=torch.float64, wire=torch.float64)
    x = "all-to-all"
    expected = [
        *("block 0", "block 1", "block 2", "backward 2", f"begin {x}", "done 2"),
        *("backward 1", f"end {x}", f"begin {G}", f"begin {x}", "done 1"),
        *("backward 0", f"end {G}", f"end {x}", f"begin {G}", f"begin {x}"),
        *(f"end {G}", f"end {x}", f"begin {G}", f"end {G}"),
    ]
    for events in processes(4).run(events_of, "dp", "everything", None, sent):
        assert events == expected


LAYERS = 6


def step_of(layout, when, precision=DOUBLE, ends=None, microbatches=1):
    """(a step, a state) of clipped AdamW."""
    sh, spec = sharding(layout, precision), spec_of(LAYERS, ends)
    optimizer = with_sharded_state(chain(clip_by_global_norm(1.0), adamw(1e-3)), spec, sh)
    step = train_step(
        loss_of(spec, when, ends=ends), optimizer, weights=weights, sh=sh, spec=spec, microbatches=microbatches
    )
    params = init(spec, key(0), sh=sh)
    return step, TrainState(0, params, optimizer.init(params))


def delays_seen(layout, precision, ends, microbatches):
    """(by how many delays a step grows, its collectives), where blocks, forward and backward, take 1.3 delays each; on a
    clock that only these move."""
    with Watched(1.0, clock=True) as watched:

        def busy(what):
            if what is not None and what.startswith(("block", "backward")):
                watched.pass_time(1.3)

        step, state = step_of(layout, busy, precision, ends, microbatches)
        step(state, data())
    return round(watched.time - 1.3 * 2 * LAYERS * microbatches, 6), watched.count


# Of a step with leaves outside the layers, one microbatch and two: the delays that are not beside a block. The last
# reduction; the norm of cut gradients; new parameters; of ZeRO-3 the first gather, forward and backward, and the norm of
# cut parameters. HSDP reduces in two steps.
SEEN = {
    "dp": (1, 1),
    "zero 1": (3, 3),
    "zero 2": (3, 4),
    "zero 3": (5, 8),
    "hsdp": (6, 9),
    "hsdp, state over both": (8, 11),
}


CASES = [(n, DOUBLE, 1) for n in ("dp", "zero 1", "zero 3", "hsdp")]
CASES += [(n, MIXED, 2) for n in ("zero 1", "zero 2", "zero 3", "hsdp, state over both")]


@pytest.mark.parametrize(("layout", "precision", "microbatches"), CASES)
def test_delayed_collectives_are_hidden(layout, precision, microbatches):
    """With d seconds more for each collective a step grows by less than 0.3 of all delays."""
    for seen, count in processes(4).run(delays_seen, layout, precision, "ahead", microbatches):
        assert seen == SEEN[layout][microbatches - 1] < 0.3 * count


def test_without_ahead_leaves_outside_the_layers_are_waited_for():
    """Three gathers and three reductions more."""
    for seen, _ in processes(4).run(delays_seen, "zero 3", DOUBLE, "use", 1):
        assert seen == SEEN["zero 3"][0] + 6


DELAY = 0.06


def seconds(layout, delay, rounds=2):
    """(the least seconds of a step whose blocks take some time, its collectives)."""

    def busy(what):
        if what is not None and what.startswith(("block", "backward")):
            time.sleep(1.3 * DELAY)

    step, state = step_of(layout, busy, ends="ahead")
    took = []
    for _ in range(rounds):
        torch.distributed.barrier()
        with Watched(delay) as watched:
            began = time.monotonic()
            state, _ = step(state, data())
            took.append(time.monotonic() - began)
    return min(took), watched.count


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_delayed_collectives_are_hidden_by_the_clock_on_the_wall(layout):
    quick = max(t for t, _ in processes(4).run(seconds, layout, 0.0))
    slow, counts = zip(*processes(4).run(seconds, layout, DELAY), strict=True)
    assert max(slow) - quick < 0.3 * counts[0] * DELAY


def most_alive(save):
    """(the most layers gathered or being gathered at a time, those left behind the forward, behind the backward; the
    same of what lies in front of the layers)."""
    modules = [sys.modules[f"fmegatron.{name}"] for name in ("parallel.stack", "zero")]
    original, alive, most = modules[0].moving, {"layers": [], "front": []}, 0

    def moving(xs, params, sh, what):
        arrive = original(xs, params, sh, what)
        if what != "enter" or len(params) == 2 and params[0] is LAST["norm"]:
            return arrive
        nonlocal most
        whole = [None]  # until it has arrived
        alive["front" if params[0] is FIRST["in"] else "layers"].append(whole)
        most = max(most, living("layers"))

        def noted():
            out = arrive()
            whole[:] = [weakref.ref(t.untyped_storage()) for t in out]
            return out

        return noted

    def living(where):
        return sum(any(r is None or r() is not None for r in whole) for whole in alive[where])

    for module in modules:
        module.moving = moving
    try:
        sh, spec = sharding("zero 3"), spec_of(5, "ahead")
        params = sh.local(init(spec, key(0), sh=sh))
        flat = [t.requires_grad_() for t in leaves(params)]
        terms, _ = loss_of(spec, lambda what: None, save, "ahead")(params, data(), Ctx(sh))
        forward = living("layers"), living("front")
        torch.autograd.grad(terms.items.sum(), flat)
    finally:
        for module in modules:
            module.moving = original
    return most, forward, (living("layers"), living("front"))


@pytest.mark.parametrize("save", POLICIES)
def test_two_gathered_layers_are_alive_at_most(save):
    """Backward included, from the beginning of a gather; none is saved for it, nor an embedding."""
    assert processes(4).run(most_alive, save) == [(2, (0, 0), (0, 0))] * 4


def second_derivatives(ends):
    """By the graph of a backward (not torch.func), of all parameters at rest."""
    sh, spec = sharding("zero 3"), spec_of(2, ends)
    params = sh.local(init(spec, key(0), sh=sh))
    flat = [t.requires_grad_() for t in leaves(params)]
    x = {"x": torch.arange(48, dtype=torch.float64).view(2, 3, 8) / 48}
    terms, _ = loss_of(spec, lambda what: None, ends=ends)(params, x, Ctx(sh))
    first = torch.autograd.grad(sh.sum(terms.items, "batch seq ->"), flat, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), flat)
    return [t.detach() for t in (*first, *second)]


def test_leaves_gathered_ahead_have_all_derivatives():
    """Those of `sh.use`, of which the functions of the arrows make the graph."""
    for got, want in zip(*(processes(4).run(second_derivatives, ends) for ends in ("ahead", "use")), strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
