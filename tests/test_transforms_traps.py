"""What goes silently wrong in other ways of building these transforms is right here, or refused."""

import pytest
import torch
from torch.func import grad, vmap
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.function import apply_function
from fmegatron.parallel.stack import Store, chain, stack
from fmegatron.product import product
from fmegatron.random import Key
from fmegatron.remat import names, nothing, remat
from fmegatron.split import split
from fmegatron.tape import Root, Tape
from fmegatron.tree import leaves, structure, tree_map
from tests.transforms_model import HALF, T, close, copies, ones

pytestmark = pytest.mark.filterwarnings("ignore")
g = torch.Generator().manual_seed(0)
X = torch.randn(2, 3, 8, dtype=T, generator=g)
P = {"w": torch.randn(8, 8, dtype=T, generator=g), "b": torch.randn(8, dtype=T, generator=g)}
CONST = torch.randn(8, 8, dtype=T, generator=g)
EQ = "batch seq embed, embed mlp -> batch seq mlp"


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def dot(x, w, ctx, name="dot"):
    return ctx.sh.dot(x, w, EQ, name=name)


def aot(f):
    return torch.compile(f, backend="aot_eager", fullgraph=True)


def halves(s, p=P, ctx=None, x=X):
    """Gradients by B and W, of the sum of the output."""
    y, residual = s.forward(p, x, ctx or Ctx())
    gx, left = s.backward_input(residual, ones(y), p)
    return gx, s.backward_weight(left)


def plain(f, p=P, ctx=None, x=X):
    q, x = copies(p), x.clone().requires_grad_()
    gx, *gp = torch.autograd.grad(f(q, x, ctx or Ctx()).sum(), [x, *leaves(q)])
    return gx, gp


def same(s, f, p=P, ctx=None):
    close(halves(s, p, ctx), plain(f, p, ctx))


def changed(p, x, ctx):
    h = x * 2
    y = dot(h, p["w"], ctx)
    h.add_(1)
    return y + h.sin() + p["b"]


# In-place changes


@pytest.mark.parametrize("how", [lambda f: f, aot])
def test_a_products_input_changed_in_place(how):
    with pytest.raises(UserError, match="dot is changed in place"):
        halves(split(how(changed)))


def test_a_products_input_changed_in_place_after_the_block():
    s, x = split(lambda p, x, ctx: dot(x, p["w"], ctx)), X.clone()
    y, residual = s.forward(P, x, Ctx())
    _, left = s.backward_input(residual, ones(y), P)
    x.add_(1)
    with pytest.raises(UserError, match="changed in place"):
        s.backward_weight(left)


def test_a_blocks_input_changed_in_place_before_it_runs_again():
    s, x = remat(lambda p, x, ctx: dot(x, p["w"], ctx)).split, X.clone()
    y, residual = s.forward(P, x, Ctx())
    x.add_(1)
    with pytest.raises(UserError, match="changed in place"):
        s.backward(residual, ones(y), P)


@pytest.mark.parametrize("how", [lambda f: f, aot])
def test_a_saved_output_changed_in_place(how):
    def f(p, x, ctx):
        return dot(x, p["w"], ctx, name="kept").add_(1).tanh()

    # torch itself refuses it where a gradient is needed.
    with pytest.raises((UserError, RuntimeError), match="kept is changed in place|modified inplace"):
        remat(how(f), names("kept")).split.forward(P, X, Ctx())


# Closures


def closing_over(t):
    return lambda p, x, ctx: dot(x, p["w"], ctx) + x @ t + p["b"]


def test_a_closure_over_a_tensor_that_needs_a_gradient_is_refused():
    closed, q = closing_over(CONST.clone().requires_grad_()), copies(P)
    with pytest.raises(UserError, match="no argument"):
        split(closed).forward(P, X, Ctx())
    with pytest.raises(UserError, match="no argument"):
        remat(closed)(q, X, Ctx())
    with pytest.raises(UserError, match="no argument"):
        stack(closed, store=Store(lambda p, i: p, lambda g, i: g))({0: q}, X, Ctx())


def test_in_ctx_too():
    f = remat(lambda p, x, ctx: dot(x, p["w"], ctx) @ ctx.extras)
    with pytest.raises(UserError, match="no argument"):
        f(copies(P), X, Ctx(extras=CONST.clone().requires_grad_()))


def test_under_torch_func_too():
    def loss(w):
        return remat(lambda p, x, ctx: dot(x, w, ctx) + p["b"])(P, X, Ctx()).sum()

    with pytest.raises(UserError, match="closed-over"):
        grad(loss)(P["w"])


def test_a_closure_over_a_constant_is_fine():
    fine = closing_over(CONST)
    same(split(fine), fine)
    same(remat(fine).split, fine)


def test_ctx_may_hold_a_mapped_tensor():
    def of(transform):
        def f(p, x, ctx):
            return dot(x, p["w"], ctx) * ctx.extras

        return vmap(lambda m: grad(lambda w: transform(f)({"w": w}, X, Ctx(extras=m)).sum())(P["w"]))

    m = torch.arange(1.0, 4, dtype=T)
    close(of(remat)(m), of(lambda f: f)(m))


# Blocks of every kind


def test_a_block_that_reads_a_value():
    def reads(p, x, ctx):
        return dot(x, p["w"], ctx)[:, : int((x.sum() > -1e9) + 1)] * p["b"]

    same(split(reads), reads)
    same(remat(reads).split, reads)


def test_a_block_that_branches_on_grad_mode_or_first_run_is_refused():
    runs = []

    def odd(p, x, ctx):
        runs.append(None)
        y = dot(x, p["w"], ctx, name="kept")
        return dot(y, p["w"], ctx, name="kept") if len(runs) == 1 else y

    f = remat(odd, names("kept"))
    with pytest.raises(UserError, match="must not branch"):
        halves(f.split)


def test_a_remat_inside_a_block_and_inside_a_remat():
    inner = remat(lambda p, x, ctx: dot(x, p["w"], ctx).tanh())

    def outer(p, x, ctx):
        return x + inner({"w": p["w"]}, x, ctx) + p["b"]

    same(split(outer), outer)
    same(split(remat(outer)), outer)


def test_a_remat_of_a_stack_recomputes_all_of_it():
    runs = []

    def f(p, x, ctx):
        runs.append(ctx.layer)
        return dot(x, p["w"], ctx).tanh() + p["b"]

    layers, q = {0: P, 1: P}, copies({0: P, 1: P})
    grouped = remat(stack(f, store=Store(lambda p, i: p, lambda g, i: g)))
    got = torch.autograd.grad(grouped(q, X, Ctx()).sum(), leaves(q))
    assert runs == [0, 1, 0, 1]
    close(got, plain(lambda p, x, ctx: f(p[1], f(p[0], x, ctx), ctx), layers)[1])


def test_one_layer_twice_in_a_stack():
    layers = stack(lambda p, x, ctx: dot(x, p["w"], ctx).tanh() + p["b"], store=HALF)

    def twice(p, x, ctx):
        return layers({0: p, 1: p}, x, ctx)

    same(split(twice), twice, tree_map(lambda t: t[: len(t) // 2], P))


def test_a_carry_that_passes_values_through():
    """An untouched leaf, one of integers and one that is None come out as they went in, with the right gradients."""

    def f(p, carry, ctx):
        return {**carry, "x": dot(carry["x"], p["w"], ctx) * carry["scale"]}

    def loss(run, q, x, scale):
        out = run(q, {"x": x, "scale": scale, "ids": torch.arange(3), "none": None}, Ctx())
        assert out["none"] is None and out["ids"].tolist() == [0, 1, 2]
        return out["x"].sum() + out["scale"].square().sum()

    def loop(layers, carry, ctx):
        for index in layers:
            carry = f(layers[index], carry, ctx)
        return carry

    layers = {0: {"w": P["w"]}, 1: {"w": CONST}}
    q, x, s = copies(layers), X.clone().requires_grad_(), torch.ones(8, dtype=T).requires_grad_()
    want = torch.autograd.grad(loss(loop, q, x, s), [x, s, *leaves(q)])
    identity = Store(lambda p, i: p, lambda g, i: g)
    for run in (stack(f), stack(f, save=nothing), stack(f, store=identity), stack(f, save=nothing, store=identity)):
        close(torch.autograd.grad(loss(run, q, x, s), [x, s, *leaves(q)]), want)


def test_a_chain_sums_the_gradients_of_a_shared_leaf():
    first, second = (lambda p, x, ctx: dot(x, p["w"], ctx).tanh()), (lambda p, x, ctx: dot(x, p["w"].T, ctx) + p["b"])
    f = chain((lambda p: {"w": p["w"]}, first), (lambda p: p, second))

    def ref(p, x, ctx):
        return (x @ p["w"]).tanh() @ p["w"].T + p["b"]

    same(f.split, ref)
    q, x = copies(P), X.clone().requires_grad_()
    close(torch.autograd.grad(f(q, x, Ctx()).sum(), [x, *leaves(q)]), plain(ref))


def test_a_second_backward_is_an_error():
    q = copies(P)
    y = remat(lambda p, x, ctx: dot(x, p["w"], ctx))(q, X, Ctx()).sum()
    torch.autograd.grad(y, q["w"], retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        torch.autograd.grad(y, q["w"])


def test_remat_of_a_compiled_block_differentiates_twice():
    def f(p, x, ctx):
        return dot(x, p["w"], ctx).tanh()

    def hvp(run):
        q = copies(P)
        (gw,) = torch.autograd.grad(run(q, X, Ctx()).sum(), q["w"], create_graph=True)
        return torch.autograd.grad(gw.square().sum(), q["w"])

    fast = aot(f)
    close(hvp(remat(fast)), hvp(f))
    close(
        grad(lambda w: stack(fast)({0: {"w": w}}, X, Ctx()).sum())(P["w"]),
        grad(lambda w: f({"w": w}, X, Ctx()).sum())(P["w"]),
    )


def test_a_parameter_that_moves_in_its_storage():
    """Between forward and backward a leaf may move inside a bucket; only another layout is refused."""
    s = split(lambda p, x, ctx: (x @ p["w"][:, 2:]).tanh().sum((0, 1)) * p["w"][0, 2:])
    bucket = torch.cat([torch.zeros(5, dtype=T), P["w"].flatten()])
    for moved in ({"w": bucket[5:].view(8, 8)}, {"w": P["w"].clone()}):
        y, residual = s.forward({"w": P["w"]}, X, Ctx())
        got = s.backward(residual, ones(y), moved)
        close(got, plain(lambda p, x, ctx: (x @ p["w"][:, 2:]).tanh().sum((0, 1)) * p["w"][0, 2:], {"w": P["w"]}))
    y, residual = s.forward({"w": P["w"]}, X, Ctx())
    with pytest.raises(UserError, match="strides"):
        s.backward(residual, ones(y), {"w": P["w"].T.contiguous().T})


WAYS = {  # how a weight may be used, and which part of the work backward_weight does
    "x @ w": (lambda p, x, c: x @ p["w"], 0),
    "dot": (lambda p, x, c: dot(x, p["w"], c), 1),
    "dot of w.T": (lambda p, x, c: dot(x, p["w"].T, c), 0),
    "dot transposed by its equation": (lambda p, x, c: c.sh.dot(x, p["w"], "b s e, f e -> b s f"), 1),
    "dot of a view": (lambda p, x, c: c.sh.dot(x, p["w"].view(8, 2, 4), "b s e, e h d -> b s h d").flatten(2), 0),
    "dot of a cast": (lambda p, x, c: dot(x.float(), p["w"].float(), c).double(), 0),
    "dot, and another use": (lambda p, x, c: dot(x, p["w"], c) * p["w"].norm(), 1),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_use_of_a_weight_is_right_and_frees_it(way):
    f, tapped = WAYS[way]
    full, s = {"w": P["w"].clone()}, split(f)
    alive = StorageWeakRef(full["w"].untyped_storage())
    y, residual = s.forward(full, X, Ctx())
    del full
    # A cast is a new tensor and no view of the parameter: what is saved of it is the cast.
    assert alive.expired()
    with FlopCounterMode(display=False) as by_input:
        gx, left = s.backward_input(residual, ones(y), {"w": P["w"]})
    with FlopCounterMode(display=False) as by_weight:
        gp = s.backward_weight(left)
    close((gx, gp), plain(f, {"w": P["w"]}), 1e-6 if way == "dot of a cast" else 1e-12)
    one = 2 * 2 * 3 * 8 * 8
    assert (by_input.get_total_flops(), by_weight.get_total_flops()) == (2 * one - tapped * one, tapped * one)


# Small parts


@pytest.mark.parametrize(
    ("equation", "weight"),
    [("bse,ef->bsf", (8, 6)), ("bse,fe->bsf", (6, 8)), ("bse,ehd->bshd", (8, 2, 3)), ("bse,hed->bhsd", (2, 8, 3))],
)
def test_product_and_its_gradients(equation, weight):
    x, w = torch.randn(2, 3, 8, dtype=T).requires_grad_(), torch.randn(weight, dtype=T).requires_grad_()
    close(product(x, w, equation), torch.einsum(equation, x, w))
    assert torch.autograd.gradcheck(lambda x, w: product(x, w, equation), (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: product(x, w, equation), (x, w))
    gx, gw = torch.autograd.grad(product(x, w, equation).sum(), (x, w))
    assert gx.is_contiguous()
    assert gw.is_contiguous() or equation == "bse,hed->bhsd"  # only where the weight's own dims are interleaved


def test_apply_function_outlives_a_transform():
    """A tensor that escapes from a transform is a dead wrapper; it counts as its value."""
    escaped = []
    grad(lambda x: (escaped.append(x), x.sum())[1])(X)
    root = torch.zeros((), dtype=T).expand(X.shape).requires_grad_()
    y = apply_function(Root, root, escaped[0])
    assert torch.equal(y.detach(), X) and torch.equal(torch.autograd.grad(y.sum(), root)[0], torch.ones_like(X))


def test_ctx_is_a_pytree_whose_tensors_are_children():
    words, tape = torch.tensor([1, 2]), Tape(nothing)
    ctx = Ctx(positions=torch.arange(3), layer=4, key=Key(words), extras={"a": torch.ones(2)}).with_tape(tape)
    assert sum(isinstance(t, torch.Tensor) for t in leaves(ctx)) == 3
    doubled = tree_map(lambda t: t * 2 if isinstance(t, torch.Tensor) else t, ctx)
    assert doubled.layer == 4 and doubled.sh is ctx.sh and doubled.sh.tape is tape
    assert doubled.key.words.tolist() == [2, 4] and doubled.positions.tolist() == [0, 2, 4]
    assert structure(doubled) == structure(ctx)
    assert Ctx(key=Key((1, 2))).replace(layer=1).key == Key((1, 2))
