"""fp8 products: every recipe against float64 within the error that its formats allow, and what surrounds one product."""

import dataclasses
import math

import pytest
import torch

from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.fp8 import Fp8
from fmegatron.fp8.cast import cast, dequantised, scale_of
from fmegatron.fp8.form import form_of
from fmegatron.fp8.kernels import laid_out
from fmegatron.fp8.multiply import multiply
from fmegatron.fp8.policy import FORMATS
from fmegatron.fp8.scaling import Casts, Layer, Step
from fmegatron.parallel.stack import compiled
from fmegatron.precision import Precision
from fmegatron.sharding import Sharding
from fmegatron.split import split

RECIPES = ("tensorwise", "rowwise", "blockwise", "delayed")
EQUATION = "batch seq kv head, kv head embed -> batch seq embed"
E4M3, E5M2 = FORMATS["e4m3"], FORMATS["e5m2"]
# half of a step relative to a number, and half of the least step
ROUNDING = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17)}
G = torch.Generator().manual_seed(0)


def sharding(recipe="tensorwise", dtype=torch.float64, **options):
    return Sharding(precision=Precision(params=dtype, fp8=Fp8(recipe, **options)))


def with_layer(sh, **fields):
    return dataclasses.replace(sh, fp8=Layer(**fields))


def drawn(*shape, spread=2.0):
    """Numbers whose magnitudes differ by row and column, as activations' do."""
    x = torch.randn(*shape, generator=G, dtype=torch.float64)
    return x * torch.exp(spread * torch.randn(shape[-1], generator=G, dtype=torch.float64))


def error(x, dtype, share, by):
    """By how much each number of a matrix may change in a cast for a contraction over dim `by`: half a step of the format, at a
    scale that is at least half of what keeps the largest number of its group in range."""
    relative, least = ROUNDING[dtype]
    size = x.abs()
    if share == "tensor":
        group = size.amax()
    elif share == "row":
        group = size.amax(by, keepdim=True)
    else:
        r, c = x.shape
        height, width = (128, 128) if share == "tile" else (1, 128) if by == 1 else (128, 1)
        blocks = size.view(r // height, height, c // width, width)
        group = blocks.amax((1, 3), keepdim=True).expand_as(blocks).reshape(r, c)
    return relative * size + 2 * least * group / torch.finfo(dtype).max


def share_of(recipe, weight=False):
    return {"rowwise": "row", "blockwise": "tile" if weight else "block"}.get(recipe, "tensor")


def product_error(a, da, b, db):
    return a.abs() @ db + da @ b.abs() + da @ db


@pytest.mark.parametrize("gradients", ["e4m3", "e5m2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_product_and_gradients_are_within_the_rounding_of_their_operands(recipe, gradients):
    if gradients == "e5m2" and recipe in ("rowwise", "blockwise"):
        pytest.skip("these take e4m3 alone")
    sh, grad = sharding(recipe, gradients=gradients), FORMATS[gradients]
    x, w, g = drawn(2, 128, 2, 128), drawn(2, 128, 128) / 16, drawn(2, 128, 128, spread=1.0) * 1e-6
    if recipe == "delayed":
        largest = torch.stack([t.abs().amax().float() for t in (x, w, g)])
        scales = torch.stack([scale_of(m, d) for m, d in zip(largest, (E4M3, E4M3, grad), strict=True)])
        sh = with_layer(sh, names=("dot",), scales=scales[None], seen=torch.zeros(1, 3))
    x.requires_grad_(), w.requires_grad_()
    y = sh.dot(x, w, EQUATION)
    gx, gw = torch.autograd.grad(y, (x, w), g)
    x, w, g = x.detach().view(256, 256), w.detach().view(256, 128), g.view(256, 128)
    kind, tile = share_of(recipe), share_of(recipe, weight=True)

    def dx(by):
        return error(x, E4M3, kind, by)

    def dw(by):
        return error(w, E4M3, tile, by)

    def dg(by):
        return error(g, grad, kind, by)

    cases = {
        "y": (y.view(256, 128), x @ w, product_error(x, dx(1), w, dw(0))),
        "gx": (gx.view(256, 256), g @ w.T, product_error(g, dg(1), w.T, dw(1).T)),
        "gw": (gw.view(256, 128), x.T @ g, product_error(x.T, dx(0).T, g, dg(0))),
    }
    for name, (got, want, bound) in cases.items():
        assert got.dtype is torch.float64
        assert ((got - want).abs() <= bound + 1e-12 * want.abs()).all(), name
        assert (got - want).norm() > 0.01 * want.norm(), f"{name} is not in fp8"
    if recipe == "delayed":  # what it has seen, for the next steps
        assert torch.equal(sh.fp8.seen[0], torch.stack([t.abs().amax().float() for t in (x, w, g)]))


def test_finer_scales_keep_small_numbers_that_one_scale_loses():
    """Rows of 1e-8 beside rows of 1: with one scale of e4m3 they become zeros."""
    x, w = drawn(1, 128, 1, 128, spread=0.0), drawn(1, 128, 128, spread=0.0)
    x = x * torch.logspace(0, -8, 128, dtype=torch.float64)[:, None, None]
    want = torch.einsum("bskh,khe->bse", x, w)
    worst = {}
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        y = sharding(recipe).dot(x, w, EQUATION)
        worst[recipe] = ((y - want).norm(dim=-1) / want.norm(dim=-1)).max().item()
    assert worst["tensorwise"] > 0.9 and worst["rowwise"] < 0.06 and worst["blockwise"] < 0.06


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)])
def test_the_emulated_product_is_torch_s_own_of_the_same_operands(dtype, formats):
    a, b = drawn(48, 64).float(), drawn(64, 32).float()
    left, _, _ = cast(a, formats[0], "tensor", columns=True, rows=False)
    _, right, _ = cast(b, formats[1], "tensor", columns=False, rows=True)
    want = torch._scaled_mm(left.data, right.data.t(), left.scale, right.scale, out_dtype=dtype)
    got = multiply(left, right, dtype, native=False)
    step = torch.finfo(dtype).eps
    assert got.dtype is dtype and (got.float() - want.float()).norm() < 2 * step * want.float().norm()


def test_scales_are_powers_of_two_and_as_large_as_they_may_be():
    largest = torch.tensor([448.0, 449.0, 447.0, 1.0, 3e-5, 7e20, 0.0])
    for dtype in (E4M3, E5M2):
        scale, most = scale_of(largest, dtype), torch.finfo(dtype).max
        assert (torch.frexp(scale).mantissa == 0.5).all() and scale.isfinite().all()
        assert (scale * largest <= most).all() and (2 * scale * largest > most)[:-1].all()
        assert torch.equal(scale_of(largest, dtype, margin=3) * 8, scale)


def test_too_large_numbers_saturate_and_what_is_not_finite_stays_so():
    x = torch.tensor([[1000.0, -1000.0, float("inf"), float("nan")] * 4])
    there, turned, size = cast(x, E4M3, "tensor", columns=True, rows=True, scale=torch.tensor(1.0))
    values = there.data.float()[0, :4]
    assert values[:2].tolist() == [448.0, -448.0] and values[2:].isnan().all() and size.isnan()
    assert torch.equal(turned.data.view(torch.uint8), there.data.t().contiguous().view(torch.uint8))
    x[0, 3] = float("inf")
    for share in ("tensor", "row"):  # a scale of its own: infinity is not hidden in any of its products
        there, _, _ = cast(x, E4M3, share, columns=True, rows=False)
        assert not multiply(there, there, torch.float32, native=False).isfinite().any()


@pytest.mark.parametrize("share", ["tensor", "row", "block", "tile"])
def test_both_casts_of_a_matrix_stand_for_it(share):
    x = drawn(128, 256)
    here, turned, _ = cast(x, E4M3, share, columns=True, rows=True)
    assert here.data.shape == (128, 256) and turned.data.shape == (256, 128) and turned.data.is_contiguous()
    for operand, want, by in ((here, x, 1), (turned, x.t(), 0)):
        bound = error(x, E4M3, share, by)
        assert ((dequantised(operand, torch.float64) - want).abs() <= (bound if by else bound.t()) * (1 + 1e-12)).all()
    assert (here.scale.shape, turned.scale.shape) == {
        "tensor": ((), ()),
        "row": ((128, 1), (256, 1)),
        "block": ((128, 2), (256, 1)),
        "tile": ((1, 2), (2, 1)),
    }[share]


def test_scales_of_blocks_lie_as_cublas_wants_them():
    data = torch.zeros(256, 640)
    assert laid_out(torch.rand(256, 5), data).stride() == (1, 256)
    tiles = torch.rand(2, 5)
    assert laid_out(tiles, data).stride() == (8, 1) and torch.equal(laid_out(tiles, data), tiles)
    assert laid_out(torch.rand(2, 8), torch.zeros(256, 1024)).stride() == (8, 1)


def test_the_form_of_an_equation():
    for equation, x, w in (
        ("bse,ekgh->bskgh", (2, 3, 4), (4, 5, 2, 3)),
        ("bskgh,kghe->bse", (2, 3, 5, 2, 3), (5, 2, 3, 4)),
        ("bse,ve->bsv", (2, 3, 4), (7, 4)),
        ("seb,fe->fbs", (3, 4, 2), (7, 4)),
    ):
        form = form_of(equation)
        a, b = torch.randn(x, generator=G), torch.randn(w, generator=G)
        want = torch.einsum(equation, a, b)
        torch.testing.assert_close(form.to_y(form.left(a) @ form.right(b), x, w), want)
        assert torch.equal(form.to_x(form.left(a), x), a) and torch.equal(form.to_w(form.right(b), w), b)
        assert torch.equal(form.to_y(form.result(want), x, w), want)
        assert math.prod(form.sizes(x, w)) == want.numel() * math.prod(a.shape[i] for i in form.x[form.rows :])
    for equation in ("xse,xef->xsf", "bs,e->bse"):  # a batch of products, no sum
        assert form_of(equation) is None


def block(p, x, ctx):
    h = torch.tanh(ctx.sh.dot(x, p["up"], "batch seq embed, embed mlp -> batch seq mlp", name="up"))
    return x + ctx.sh.dot(h, p["down"], "batch seq mlp, mlp embed -> batch seq embed", name="down")


def block_inputs(dtype=torch.float64):
    p = {"up": drawn(128, 256, spread=0.5) / 11, "down": drawn(256, 128, spread=0.5) / 16}
    x, g = drawn(1, 128, 128, spread=0.5), drawn(1, 128, 128, spread=0.5)
    return {n: t.to(dtype) for n, t in p.items()}, x.to(dtype), g.to(dtype)


def delayed_layer(sh, steps):
    names = ("down", "up")
    scales = torch.tensor([[16.0, 256.0, 512.0]] * 2) if steps else None
    return with_layer(sh, names=names, scales=scales, seen=torch.zeros(2, 3))


def contexts(recipe, dtype=torch.float64):
    sh = sharding(recipe, dtype)
    if recipe != "delayed":
        return [Ctx(sh=sh)]
    return [Ctx(sh=delayed_layer(sh, steps)) for steps in (0, 1)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_split_backward_is_bitwise_the_joint_one(recipe):
    p, x, g = block_inputs()
    halves = split(block)
    for ctx in contexts(recipe):
        y, residual = halves.forward(p, x, ctx, joint=True)
        gx, gp = halves.backward(residual, g, p)
        y2, residual = halves.forward(p, x, ctx)
        gx2, left = halves.backward_input(residual, g, p)
        assert all(t is None for t in left.gp.values())  # both weights are left for later
        kept = [t.dtype for inputs in left.inputs for t in inputs[:1]]
        gp2 = halves.backward_weight(left)
        assert kept == [E4M3, E4M3] and torch.equal(y, y2) and torch.equal(gx, gx2)
        assert all(torch.equal(gp[n], gp2[n]) for n in p)


@pytest.mark.parametrize("recipe", ["delayed", *(pytest.param(r, marks=pytest.mark.slow) for r in RECIPES[:3])])
def test_compiled_is_the_same(recipe):
    p, x, g = block_inputs(torch.float32)
    torch._dynamo.reset()
    run = compiled(block, {"backend": "aot_eager"})
    for ctx in contexts(recipe, torch.float32)[-1:]:
        found = []
        for f in (block, run):
            if recipe == "delayed":
                ctx.sh.fp8.seen.zero_()
            leaves = [t.clone().requires_grad_() for t in (*p.values(), x)]
            y = f(dict(zip(p, leaves[:2], strict=True)), leaves[2], ctx)
            found.append([y, *torch.autograd.grad(y, leaves, g)])
            if recipe == "delayed":
                assert (ctx.sh.fp8.seen > 0).all()
                found[-1].append(ctx.sh.fp8.seen.clone())
        for a, b in zip(*found, strict=True):
            assert (a - b).norm() < 1e-4 * b.norm()


def test_under_torch_func_values_are_in_fp8_and_gradients_are_those_of_the_compute_dtype():
    p, x, g = block_inputs()
    (ctx,) = contexts("tensorwise")
    plain = Ctx(sh=Sharding(precision=Precision(params=torch.float64)))
    y, pull = torch.func.vjp(lambda p, x: block(p, x, ctx), p, x)
    assert torch.equal(y, block(p, x, ctx))
    gp, _ = pull(g)
    _, pull = torch.func.vjp(lambda p, x: block(p, x, plain), p, x)
    want, _ = pull(g)
    for n in p:
        assert 0 < (gp[n] - want[n]).norm() < 0.1 * want[n].norm()  # of tanh at other places
    each = torch.vmap(torch.func.grad(lambda p, x: block(p, x[None], ctx).sum()), (None, 0))(p, torch.cat([x, 2 * x]))
    assert each["up"].shape == (2, 128, 256)
    leaf = x.clone().requires_grad_()
    (gx,) = torch.autograd.grad(block(p, leaf, plain).sum(), leaf, create_graph=True)  # plain products can
    with pytest.raises(UserError, match="use torch.func"):
        torch.autograd.grad(block(p, leaf, ctx).sum(), leaf, create_graph=True)


def test_without_gradients_any_number_of_rows():
    x, w = drawn(1, 3, 1, 128), drawn(1, 128, 128)
    with torch.no_grad():
        y = sharding("blockwise").dot(x, w, EQUATION)
    want = torch.einsum("bskh,khe->bse", x, w)
    assert 0.01 < (y - want).norm() / want.norm() < 0.1


def test_what_stays_in_the_compute_dtype():
    x, w = drawn(1, 16, 1, 32), drawn(1, 32, 16)
    want = torch.einsum("bskh,khe->bse", x, w)

    def wide(sh, name="up", x=x, w=w, equation=EQUATION):
        return torch.equal(sh.dot(x, w, equation, name=name), torch.einsum("bskh,khe->bse", x, w))

    sh = sharding(keep=("head", "r*er", "*late"))
    assert not wide(sh) and not wide(sh, "o") and not wide(sh, "router2") and not wide(sh, "heads")
    assert all(wide(sh, n) for n in ("head", "router", "late", "x_late"))
    assert wide(with_layer(sharding(), wide=True)) and not wide(with_layer(sharding()))
    fp8 = Fp8(keep_first=1, keep_last=2)
    assert [i for i in range(6) if fp8.keeps_layer(i, 6)] == [0, 4, 5]
    odd = {"x": drawn(1, 16, 1, 24), "w": drawn(1, 24, 16)}
    with pytest.raises(UserError, match=r"the fp8 product 'up' of \[16, 24\] and \[24, 16\] .* multiples of 16"):
        wide(sharding(), **odd)
    assert wide(sharding(unaligned="keep"), **odd)
    with pytest.raises(UserError, match="multiples of 128, as recipe 'blockwise' needs"):
        wide(sharding("blockwise"))
    assert torch.equal(Sharding(precision=Precision(params=torch.float64)).dot(x, w, EQUATION), want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "mxfp8"}, "recipe='mxfp8'.* must be one of tensorwise, rowwise, blockwise, delayed"),
        ({"gradients": "e3m4"}, "gradients='e3m4'.* e5m2, e4m3 or None"),
        ({"recipe": "rowwise", "gradients": "e5m2"}, "with several scales an operand use e4m3"),
        ({"margin": -1}, "margin=-1.* integer of 0 or more"),
        ({"history": 0}, "history=0.* integer of 1 or more"),
        ({"keep_last": 1.5}, "keep_last=1.5"),
        ({"unaligned": "pad"}, "refuse or keep"),
        ({"backend": "cuda"}, "backend='cuda'.* auto, native, emulated, te"),
        ({"backend": "te", "recipe": "delayed"}, "tensorwise here; use backend='native'"),
        ({"backend": "te", "margin": 1}, "take no margin"),
        ({"kernels": "cutlass"}, "auto, torch, triton"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Fp8(**options)


def test_backends_that_are_not_there_are_refused():
    x, w = drawn(1, 16, 1, 32), drawn(1, 32, 16)
    with pytest.raises(UserError, match="backend='native'.* needs a GPU"):
        sharding(backend="native").dot(x, w, EQUATION)
    with pytest.raises(UserError, match="Transformer Engine|needs a GPU"):
        sharding(backend="te").dot(x, w, EQUATION)
    assert torch.equal(sharding(backend="emulated").dot(x, w, EQUATION), sharding().dot(x, w, EQUATION))


def test_casts_of_parameters_at_rest_are_made_once_a_step():
    w, x = drawn(1, 32, 16), drawn(1, 16, 1, 32)
    casts = Casts({"w": w})
    sh = dataclasses.replace(sharding(), fp8=Step(casts=casts))
    first = sh.dot(x, w.detach().requires_grad_(), EQUATION)
    assert len(casts.found) == 1
    assert torch.equal(sh.dot(x, w.view_as(w), EQUATION), first) and len(casts.found) == 1
    gathered = w.clone()
    assert torch.equal(sh.dot(x, gathered, EQUATION), first) and len(casts.found) == 1  # would be kept alive
    w.mul_(-1)  # another value is another cast
    assert torch.equal(sh.dot(x, w, EQUATION), -first) and len(casts.found) == 2
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    for inp, how in ((leaf, sh), (other, sharding())):
        how.dot(inp, w, EQUATION).square().sum().backward()
    assert torch.equal(leaf.grad, other.grad)
