"""split, remat, stack, chain, value_and_grad and accumulate in every combination: one value, one gradient."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fmegatron.accumulate import Term, Weight, accumulate, cut_batch, scales
from fmegatron.context import Ctx
from fmegatron.grad import value_and_grad
from fmegatron.parallel.stack import Store, stack
from fmegatron.random import fold_in, uniform
from fmegatron.random import key as new_key
from fmegatron.remat import everything, nothing, remat
from fmegatron.split import split
from fmegatron.tree import add_trees, leaves, like
from tests.transforms_model import (
    HALF,
    POLICIES,
    T,
    backend,
    block,
    close,
    context,
    copies,
    each,
    embed,
    gather_half,
    halve,
    head,
    loss_of,
    make_batch,
    make_params,
    ones,
    ordinary,
    reduce_half,
    reference,
    rematted,
    small_block,
    unhalve,
    weights,
    whole,
)

pytestmark = pytest.mark.filterwarnings("ignore")
torch._dynamo.config.recompile_limit = 64


# One compiled block for all tests: a block has two graphs for joint and one for split backwards, for every policy and shape.
SMALL = {"norm1", "q", "o", "bias", "up"}
COMPILED = {how: torch.compile(small_block, backend=how, fullgraph=True) for how in ("aot_eager", "inductor")}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def split_gradients(f, p, batch, n):
    """The gradients by backward_input and backward_weight apart."""
    scale, grads = {k: s for k, (_, s) in scales(weights(batch), Ctx().sh).items()}, None
    for part, _ in cut_batch(batch, Ctx(), n):
        y, residual = f.split.forward(p, None, context(part))
        _, left = f.split.backward_input(residual, {k: torch.ones_like(t) * scale[k] for k, t in y.items()}, p)
        grads = add_trees(grads, f.split.backward_weight(left))
    return grads


def check(f, policy, p, batch, microbatches, want, free=(True, False)):
    value, grads_want = want
    for freeing in free:
        layers = stack(rematted(f, POLICIES[policy]), store=HALF, free=freeing)
        (got, _), grads = accumulate(loss_of(ordinary(layers)), microbatches, weights=weights)(p, batch)
        close(grads, grads_want)
        close(got, value)
        close(split_gradients(whole(layers), p, batch, microbatches), grads_want)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_gradient_whatever_the_policy_backward_freeing_microbatches(policy):
    p, batch = halve(make_params()), make_batch()
    for n in (1, 3):
        check(block, policy, p, batch, n, reference(p, batch, unhalve))


@pytest.mark.parametrize(
    ("how", "policy"),
    [*(("aot_eager", policy) for policy in POLICIES), pytest.param("inductor", "attention", marks=pytest.mark.slow)],
)
def test_one_gradient_compiled(how, policy):
    p = halve(make_params(layers=2, only=SMALL))
    for n in (1, 3) if how == "aot_eager" else (3,):
        batch = make_batch(rows=2 * n)  # microbatches of one size, as every size has its own graphs
        check(COMPILED[how], policy, p, batch, n, reference(p, batch, unhalve, small_block))


@pytest.mark.parametrize("policy", POLICIES)
def test_options_of_stack_are_the_same_as_wrapping(policy):
    p, batch = make_params(), make_batch()
    _, want = reference(p, batch)
    for store in (None, Store(lambda p, i: p, lambda g, i: g)):
        layers = stack(block, save=POLICIES[policy], store=store)
        close(accumulate(loss_of(ordinary(layers)), 3, weights=weights)(p, batch)[1], want)


def test_stack_compiles_its_block_once_for_all_layers():
    p, batch = make_params(layers=3, only=SMALL), make_batch()
    key = fold_in(new_key(1), 0)
    seen = []

    def counting(graph, example_inputs):
        seen.append(graph)
        return graph.forward

    def f(p, carry, ctx):
        noise = uniform(ctx.key, carry["x"].shape, dtype=T)
        return {"x": (carry["x"] + noise) * p["bias"], "aux": carry["aux"]}

    def run(layers):
        def loss(p, batch, ctx):
            ctx = context(batch, ctx)
            return Term(layers(p["layers"], embed(p, None, ctx), ctx)["x"], "batch seq embed"), None

        one = {"loss": Weight(1.0)}
        return accumulate(loss, weights=lambda batch: one)(p, batch, Ctx(key=key))

    close(run(stack(f, compile={"backend": counting})), run(stack(f)))
    assert len(seen) == 1


# What stays alive


class Alive:
    """A store that counts gathered tensors whose storage lives."""

    def __init__(self):
        self.refs, self.most = [], 0
        self.store = Store(each(self.gather), each(self.reduce))

    def count(self):
        self.refs = [r for r in self.refs if not r.expired()]
        self.most = max(self.most, len(self.refs))
        return len(self.refs)

    def gather(self, t):
        t = gather_half(t)
        self.refs.append(StorageWeakRef(t.untyped_storage()))
        self.count()
        return t

    def reduce(self, g):
        self.count()
        return reduce_half(g)

    def since(self):
        most, self.most = self.most, 0
        return most


@pytest.mark.parametrize("how", ["eager", "aot_eager"])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_gathered_parameter_outlives_the_forward_and_two_layers_live_at_once(policy, how):
    p, ctx, leaf_count = halve(make_params(layers=4, only=SMALL)), context(make_batch(rows=2)), len(SMALL)
    f = rematted(COMPILED.get(how, small_block), POLICIES[policy])
    for free in (True, False):
        alive = Alive()
        layers = stack(f, store=alive.store, free=free)
        seen = []

        def loss(p, layers=layers, alive=alive, seen=seen):
            x = layers(p["layers"], embed(p, None, ctx), ctx)
            seen.append((alive.since(), alive.count()))
            alive.most = 0
            return sum(t.sum() for t in head(p, x, ctx).values())

        value_and_grad(loss)(p)
        joint = (*seen[0], alive.since())
        y, residual = layers.split.forward(p["layers"], embed(p, None, ctx), ctx)
        forward = alive.since(), alive.count()
        alive.most = 0
        _, left = layers.split.backward_input(residual, ones(y), p["layers"])
        after = alive.since(), alive.count()
        layers.split.backward_weight(left)
        if free:
            assert joint == (2 * leaf_count, 0, 2 * leaf_count)
            assert forward == (2 * leaf_count, 0)
            assert after == (2 * leaf_count, 0)
        else:
            assert joint[:2] == forward == (4 * leaf_count, 4 * leaf_count)
            assert after[1] == 0


def test_gathers_run_one_layer_ahead_and_gradients_reduce_behind():
    events = []

    def note(what, result):
        events.append(what)
        return result

    store = Store(
        gather=lambda p, i: note(f"gather {i}", each(gather_half)(p)),
        reduce=lambda g, i: note(f"reduce {i}", each(reduce_half)(g)),
    )
    layers = {i: torch.randn(2, 4, dtype=T).requires_grad_() for i in (3, 5, 11)}
    f = stack(remat(lambda p, x, ctx: note(f"block {ctx.layer}", x @ p.tanh())), store=store)
    y = f(layers, torch.ones(2, 4, dtype=T), Ctx())
    assert events == ["gather 3", "gather 5", "block 3", "gather 11", "block 5", "block 11"]
    events.clear()
    torch.autograd.grad(y.sum(), list(layers.values()))
    assert events == "gather 11,gather 5,block 11,reduce 11,gather 3,block 5,reduce 5,block 3,reduce 3".split(",")


def test_a_remat_inside_a_block_keeps_no_gathered_parameter():
    alive = Alive()
    mlp = remat(
        lambda p, x, ctx: ctx.sh.dot(ctx.sh.dot(x, p["u"], "b s e, e f -> b s f").tanh(), p["d"], "b s f, f e -> b s e")
    )

    def f(p, x, ctx):
        return x + mlp({"u": p["u"], "d": p["d"]}, x * p["n"], ctx)

    layers = {
        i: copies({"u": torch.randn(4, 8, dtype=T), "d": torch.randn(4, 8, dtype=T), "n": torch.randn(4, dtype=T)})
        for i in range(4)
    }
    y = stack(f, store=alive.store)(layers, torch.randn(2, 3, 8, dtype=T), Ctx())
    assert alive.count() == 0 and y.requires_grad


# FLOPs and bytes


def count_flops(f):
    with FlopCounterMode(display=False) as m:
        out = f()
    return out, m.get_total_flops()


def plain_loop(layers, x, ctx):
    for index in sorted(layers):
        x = block(layers[index], x, ctx)
    return x


@pytest.mark.parametrize("policy", POLICIES)
def test_backward_halves_add_up_to_the_plain_backward(policy):
    p, ctx = make_params(layers=2), context(make_batch(rows=4, seq=8))
    x, q = embed(p, None, ctx), copies(p)
    xq = copies(x)
    y, forward = count_flops(lambda: plain_loop(q["layers"], xq, ctx))
    inputs = leaves(xq) + leaves(q["layers"])
    _, plain = count_flops(lambda: torch.autograd.grad(leaves(y), inputs, leaves(ones(y)), allow_unused=True))
    s = stack(rematted(block, POLICIES[policy])).split
    (y, residual), f = count_flops(lambda: s.forward(p["layers"], x, ctx))
    (_, left), b = count_flops(lambda: s.backward_input(residual, ones(y), p["layers"]))
    _, w = count_flops(lambda: s.backward_weight(left))
    (y, residual), _ = count_flops(lambda: s.forward(p["layers"], x, ctx, True))
    _, joint = count_flops(lambda: s.backward(residual, ones(y), p["layers"]))
    again = {"everything": 0, "nothing": forward}.get(policy)
    assert f == forward
    assert b + w == joint
    if again is not None:
        assert joint == plain + again
    else:
        assert plain < joint < plain + forward
    # Each product costs as much by its input as by its weight; attention has no weight.
    products = sum(
        2 * 4 * 8 * t.numel() * (2 if name == "up" else 1)
        for q in p["layers"].values()
        for name, t in q.items()
        if t.dim() > 1
    )
    assert w == products


@pytest.mark.parametrize("how", ["eager", "aot_eager"])
def test_a_tied_leaf_is_tapped_and_keeps_its_other_gradient(how):
    p, ctx = make_params(layers=1, only=SMALL), context(make_batch())

    def model(p, x, ctx):
        return head(p, small_block(p["layers"][0], embed(p, None, ctx), ctx), ctx)

    s, q = split(backend(how, model)), copies(p)
    y, residual = s.forward(p, None, ctx)
    _, left = s.backward_input(residual, ones(y), p)
    grads, w = count_flops(lambda: s.backward_weight(left))
    close(grads, torch.autograd.grad(sum(t.sum() for t in model(q, None, ctx).values()), leaves(q)))
    tokens = 6 * 5
    assert w == 2 * tokens * (p["table"].numel() + sum(t.numel() for t in p["layers"][0].values() if t.dim() > 1))


class Live(TorchDispatchMode):
    """Bytes of the storages made inside."""

    def __init__(self):
        super().__init__()
        self.at, self.peak = {}, 0

    def now(self):
        self.at = {k: v for k, v in self.at.items() if not v[0].expired()}
        return sum(n for _, n in self.at.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        flat = torch.utils._pytree.tree_leaves
        old = {t.untyped_storage()._cdata for t in flat((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in flat(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in old:
                s = t.untyped_storage()
                self.at[s._cdata] = StorageWeakRef(s), s.nbytes()
        self.peak = max(self.peak, self.now())
        return out


# After the forward and at the peak, as parts of plain autograd's; after backward_input.
BYTES = {
    "everything": (1.0, 1.0, 0.78),
    "nothing": (0.05, 0.4, 0.78),
    "attention": (0.09, 0.4, 0.78),
    "predicate": (0.4, 0.6, 0.78),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_saved_bytes_of_each_policy(policy):
    p = make_params(layers=5, embed=32, mlp=128, heads=4, head=8)
    ctx = context(make_batch(rows=4, seq=32))
    x, q = embed(p, None, ctx), copies(p)

    def measure(run):
        xq = copies(x)
        with Live() as m:
            y = run(xq)
            held = m.now()
            torch.autograd.grad(leaves(y), leaves(xq) + leaves(q["layers"]), leaves(ones(y)), allow_unused=True)
        return held, m.peak

    held0, peak0 = measure(lambda x: plain_loop(q["layers"], x, ctx))
    identity = Store(lambda p, i: p, lambda g, i: g)
    f = stack(rematted(block, POLICIES[policy]), store=identity)
    held, peak = measure(lambda x: f(q["layers"], x, ctx))
    most_held, most_peak, most_left = BYTES[policy]
    assert held <= 1.001 * most_held * held0
    assert peak <= 1.001 * most_peak * peak0
    with Live() as m:
        y, residual = f.split.forward(p["layers"], x, ctx)
        assert m.now() <= 1.01 * most_held * held0
        gx, left = f.split.backward_input(residual, ones(y), p["layers"])
        del residual, y
        assert m.now() <= 1.01 * most_left * held0
        grads = f.split.backward_weight(left)
        assert len(leaves(grads)) == 45 and gx is not None


def test_accumulation_holds_one_set_of_gradients():
    """Gradients are added as the backward makes them, so three microbatches peak no higher than one of the same size."""
    p = {i: torch.randn(256, 256, dtype=T) for i in range(8)}
    x = torch.randn(6, 256, dtype=T)

    def loss(p, batch, ctx):
        h = batch
        for i in range(8):
            h = (h @ p[i]).tanh()
        return Term(h, "batch embed", weight=torch.ones_like(h)), None

    def peak(n):
        with Live() as m:
            accumulate(loss, n)(p, x)
        return m.peak

    one_leaf = 256 * 256 * 8
    assert peak(3) <= 8 * one_leaf + 2 * one_leaf


def test_frozen_leaves_cost_no_product():
    p, ctx = make_params(layers=2), context(make_batch())
    x = embed(p, None, ctx)
    q = like(p["layers"], [t.clone().requires_grad_(t.dim() == 1) for t in leaves(p["layers"])])
    inputs = [t for t in leaves(q) if t.requires_grad]
    y = plain_loop(q, x, ctx)
    want = torch.autograd.grad(leaves(y), inputs, leaves(ones(y)))
    identity = Store(lambda p, i: p, lambda g, i: g)
    for policy in (everything, nothing):
        y = stack(rematted(block, policy), store=identity)(q, x, ctx)
        got, flops = count_flops(lambda y=y: torch.autograd.grad(leaves(y), inputs, leaves(ones(y))))
        close(got, want)
        y = plain_loop(q, x, ctx)
        _, plain = count_flops(lambda y=y: torch.autograd.grad(leaves(y), inputs, leaves(ones(y))))
        _, forward = count_flops(lambda: plain_loop(q, x, ctx))
        first_layer_inputs = 2 * 6 * 5 * sum(q[0][n].numel() * (2 if n == "up" else 1) for n in ("q", "k", "v"))
        assert flops <= plain + (forward if policy is nothing else 0) + first_layer_inputs
