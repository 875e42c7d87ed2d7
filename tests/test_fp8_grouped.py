"""Experts' products in fp8: against float64 within the rounding of their formats, on every layout the same, and what surrounds
them."""

import dataclasses
import functools

import pytest
import torch

import fmegatron as fm
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.fp8 import Fp8
from fmegatron.fp8 import grouped_kernels as kernels
from fmegatron.fp8.grouped import GroupedUse, grouped_use
from fmegatron.fp8.scaling import Casts, Layer
from fmegatron.kernels.moe import weighted_gated
from fmegatron.parallel.dispatch import dispatched
from fmegatron.parallel.routing import Routed
from fmegatron.parallel.stack import compiled
from fmegatron.precision import Precision
from fmegatron.primitives.grouped import grouped_product
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.split import split

F64, E4M3 = torch.float64, torch.float8_e4m3fn
G = torch.Generator().manual_seed(0)
IN, OUT = 32, 64
ENDS = torch.tensor([13, 13, 45, 61], dtype=torch.int32)  # of 64 rows: a group without rows, three rows of no group


def sharding(recipe="rowwise", dtype=F64, mesh=None, rules=None, **options):
    precision = Precision(params=dtype, fp8=None if recipe is None else Fp8(recipe, **options))
    return Sharding(precision=precision) if mesh is None else Sharding(mesh, rules, precision=precision)


def drawn(*shape, spread=1.0, made=G):
    x = torch.randn(*shape, generator=made, dtype=F64)
    return x * torch.exp(spread * torch.randn(shape[-1], generator=made, dtype=F64))


def results(x, w, g, fp8):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = grouped_product(x, w, ENDS, fp8=fp8)
    return [y.detach(), *torch.autograd.grad(y, (x, w), g)]


def rounding(x, by):
    """By how much numbers may change that share a scale along dim `by`."""
    return 2.0**-4 * x.abs() + 2 * 2.0**-10 / 448 * x.abs().amax(by, keepdim=True)


def test_products_and_gradients_are_within_the_rounding_of_their_operands():
    x, w, g = drawn(64, IN), drawn(4, IN, OUT) / 6, drawn(64, OUT) * 1e-6
    y, gx, gw = results(x, w, g, GroupedUse(Fp8("rowwise")))

    def near(got, a, b, da, db):
        want = a @ b
        assert ((got - want).abs() <= a.abs() @ db + da @ b.abs() + da @ db + 1e-12 * want.abs()).all()
        assert (got - want).norm() > 0.01 * want.norm() and got.dtype is F64
        assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.98

    for n, (start, end) in enumerate(zip([0, *ENDS.tolist()], ENDS.tolist(), strict=False)):
        a, b, c = x[start:end], w[n], g[start:end]
        if start == end:
            assert (gw[n] == 0).all()
            continue
        near(y[start:end], a, b, rounding(a, 1), rounding(b, 0))
        near(gx[start:end], c, b.t(), rounding(c, 1), rounding(b, 1).t())
        near(gw[n], a.t(), c, rounding(a, 0).t(), rounding(c, 0))


def test_groups_lie_behind_zeros_in_multiples_of_sixteen():
    for _ in range(20):
        sizes = torch.randint(0, 40, (5,), generator=G)
        ends = sizes.cumsum(0).to(torch.int32)
        x = drawn(int(ends[-1]) + 2, 16)
        cast, padded = kernels.cast_groups(x, ends, None, (), 0, "torch")
        assert cast.data.shape == (16, kernels.places(len(x), 5)) and cast.data.is_contiguous()
        assert (padded % 16 == 0).all() and padded[-1] < cast.data.shape[1]
        left = cast.data.to(F64)
        for n, (start, end) in enumerate(zip([0, *padded.tolist()], padded.tolist(), strict=False)):
            mine, size = x[ends[n] - sizes[n] : ends[n]], int(sizes[n])
            assert end - start == max(16, -(-size // 16) * 16) and (left[:, start + size : end] == 0).all()
            got = (left[:, start : start + size] * cast.scale[n, :, None].to(F64)).t()
            assert ((got - mine).abs() <= rounding(mine, 0) * (1 + 1e-12) if size else torch.tensor(True)).all()


def block(p, x, ctx):
    h = grouped_product(x, p["up"], ENDS, tape=ctx.sh.tape, name="up", fp8=use(ctx, x, p["up"], "up"))
    return x + grouped_product(
        h.tanh(), p["down"], ENDS, tape=ctx.sh.tape, name="down", fp8=use(ctx, h, p["down"], "down")
    )


def use(ctx, x, w, name):
    return grouped_use(ctx.sh, x, w, name, "embed -> emlp" if name == "up" else "emlp -> embed")


def block_inputs(dtype=F64):
    p = {"up": drawn(4, IN, OUT) / 6, "down": drawn(4, OUT, IN) / 7}
    x, g = drawn(64, IN), drawn(64, IN)
    g[61:] = 0
    return {n: t.to(dtype) for n, t in p.items()}, x.to(dtype), g.to(dtype)


def test_split_backward_is_bitwise_the_joint_one():
    p, x, g = block_inputs()
    halves, ctx = split(block), Ctx(sh=sharding())
    y, residual = halves.forward(p, x, ctx, joint=True)
    gx, gp = halves.backward(residual, g, p)
    y2, residual = halves.forward(p, x, ctx)
    gx2, left = halves.backward_input(residual, g, p)
    assert all(t is None for t in left.gp.values())
    assert [inputs[0].dtype for inputs in left.inputs] == [E4M3, E4M3]
    gp2 = halves.backward_weight(left)
    assert torch.equal(y[:61], y2[:61]) and torch.equal(gx[:61], gx2[:61])
    assert all(torch.equal(gp[n], gp2[n]) for n in p)


@pytest.mark.slow
def test_compiled_is_the_same():
    p, x, g = block_inputs(torch.float32)
    torch._dynamo.reset()
    found = []
    for f in (block, compiled(block, {"backend": "aot_eager"})):
        leaves = [t.clone().requires_grad_() for t in (*p.values(), x)]
        y = f(dict(zip(p, leaves[:2], strict=True)), leaves[2], Ctx(sh=sharding(dtype=torch.float32)))
        found.append([y[:61], *(t[:61] for t in torch.autograd.grad(y, leaves, g))])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


def test_under_torch_func_gradients_are_those_of_the_compute_dtype():
    p, x, g = block_inputs()
    gradients = []
    for recipe in ("rowwise", None):
        y, pull = torch.func.vjp(lambda p, x, recipe=recipe: block(p, x, Ctx(sh=sharding(recipe))), p, x)
        gradients.append(pull(g)[0])
    assert all(0 < (gradients[0][n] - t).norm() < 0.1 * t.norm() for n, t in gradients[1].items())
    leaf = x.clone().requires_grad_()
    with pytest.raises(UserError, match="use torch.func"):
        torch.autograd.grad(block(p, leaf, Ctx(sh=sharding())).sum(), leaf, create_graph=True)


def test_what_stays_in_the_compute_dtype():
    x, w = drawn(64, IN), drawn(4, IN, OUT)

    def wide(sh, w=w, name="experts_up"):
        return grouped_use(sh, x, w, name, "embed -> emlp") is None

    assert not wide(sharding("rowwise")) and not wide(sharding("tensorwise"))
    assert all(wide(sharding(recipe)) for recipe in ("blockwise", "delayed", None))
    assert wide(sharding(keep=("experts_*",))) and not wide(sharding(keep=("experts_down",)))
    assert wide(dataclasses.replace(sharding(), fp8=Layer(wide=True)))
    odd = drawn(4, IN, 2, 12)
    with pytest.raises(UserError, match=r"'experts_up' of experts has matrices of \[32, 24\] .* multiples of 16"):
        wide(sharding(), odd)
    assert wide(sharding(unaligned="keep"), odd)


def test_weights_are_cast_once_for_all_microbatches(monkeypatch):
    p, x, g = block_inputs()
    calls, real = [], kernels.cast_columns
    monkeypatch.setattr(kernels, "cast_columns", lambda w, *rest: (calls.append(w.shape), real(w, *rest))[1])
    leaves = {n: t.clone().requires_grad_() for n, t in p.items()}
    found = []
    for casts in (Casts(leaves), None):
        sh, calls[:] = dataclasses.replace(sharding(), fp8=Layer(casts=casts)), []
        for _ in range(3):
            found.append(torch.autograd.grad(block(leaves, x, Ctx(sh=sh)), list(leaves.values()), g))
        assert len(calls) == (2 if casts else 6)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


# --------------------------------------------------------------------------------------------------------------- layouts

EXPERTS, CHOICES, ROWS, SEQ = 8, 2, 4, 4
SPEC = {
    "scale": fm.Param((IN,), "embed", over="batch seq*"),  # whose gradient is that of the rows
    "gate_up": fm.Param((EXPERTS, IN, 2, OUT), "expert embed gated emlp", over="batch' seq'"),
    "down": fm.Param((EXPERTS, OUT, IN), "expert emlp embed", over="batch' seq'"),
}


def experts(rows, weights, ends, leaves, *, sh):
    def product(x, w, dims, name):
        return grouped_product(x, w, ends, tape=sh.tape, name=name, fp8=grouped_use(sh, x, w, name, dims))

    h = product(rows, leaves["gate_up"], "embed -> emlp", "experts_up")
    return product(weighted_gated(h, weights), leaves["down"], "emlp -> embed", "experts_down")


@functools.cache  # first called outside of a simulation, in which every rank would draw its own
def layer_inputs():
    made = torch.Generator().manual_seed(0)
    params = {n: drawn(*p.shape, made=made) / (1 if n == "scale" else 6) for n, p in SPEC.items()}
    params["gate_up"][::2, ..., OUT // 2 :] *= 2.0**-14  # (where one rank's part is small by itself)
    params["down"][1::2, OUT // 2 :] *= 2.0**-14
    routing = drawn(ROWS, SEQ, EXPERTS, spread=0.0, made=made).softmax(-1).topk(CHOICES, -1)
    x = drawn(ROWS, SEQ, IN, made=made)
    x[1] *= 2.0**-14
    return params, {"x": x, "weights": routing[0], "experts": routing[1]}


def layer(sh, backend="all-to-all"):
    params, batch = layer_inputs()
    if sh.mesh is not None:
        params = sh.shard_params(params, SPEC)
        batch = {n: sh.shard(t, f"batch seq {'embed' if n == 'x' else 'choice'}") for n, t in batch.items()}

    def loss(params, batch, ctx):
        p = ctx.sh.use(params, SPEC)
        x = ctx.sh(batch["x"], "batch seq embed -> batch seq* embed") * p["scale"]
        weights, chosen = (ctx.sh(batch[n], "batch seq choice -> batch seq* choice") for n in ("weights", "experts"))
        routed = Routed(chosen, weights, weights, weights, chosen)
        y = dispatched(experts, x, routed, p, number=EXPERTS, sh=ctx.sh, backend=backend)
        items = y.square().sum(-1)
        return fm.Term(items, "batch seq*", weight=torch.ones_like(items)), None

    (value, _), grads = fm.accumulate(loss, spec=SPEC if sh.mesh else None)(params, batch, Ctx(sh=sh))
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in grads.items()}
    return {"loss": per_rank(value)[0], **{n: per_rank(t)[0] for n, t in whole.items()}}


def on(axes, also, options, **fp8):
    with simulate(4):
        mesh = fm.make_mesh(axes, also=also)
        return layer(sharding(mesh=mesh, rules=standard_rules(mesh, **options), **fp8))


def apart(found):
    layer_inputs()
    return max(float((found[n] - t).norm() / t.norm()) for n, t in layer(sharding()).items())


@pytest.mark.parametrize(
    ("axes", "also", "options"),
    [
        ("dp=2,tp=2", ["ep=4"], {"sequence_parallel": True}),
        ("dp=2,tp=2", ["edp=2,ep=2"], {"sequence_parallel": True}),
        ("dp=2,tp=2", ["ep=2,etp=2"], {}),
        ("dp=4", [], {}),
    ],
)
def test_the_layout_does_not_change_the_result(axes, also, options):
    layer_inputs()
    assert apart(on(axes, also, options)) < 1e-12


def test_scales_that_are_not_agreed_do_change_it():
    layer_inputs()
    assert apart(on("dp=4", [], {}, agree=False)) > 1e-8
    assert apart(on("dp=2,tp=2", ["ep=2,etp=2"], {}, agree=False)) > 1e-8


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_gradients_of_a_layer_point_where_those_of_float64_do(recipe):
    want, got = layer(sharding(None)), layer(sharding(recipe))
    for n, t in want.items():
        assert torch.nn.functional.cosine_similarity(got[n].flatten(), t.flatten(), dim=0) > 0.98
        assert not torch.equal(got[n], t)
