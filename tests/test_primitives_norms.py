"""Normalisation: against torch and transformers in every precision, transformed, compiled, and over sharded heads."""

import math

import pytest
import torch
from torch.nn import functional

from fmegatron import random, tree
from fmegatron.checking import check
from fmegatron.errors import UserError
from fmegatron.initializers import Normal
from fmegatron.mesh import everywhere, make_mesh, parse_axes
from fmegatron.precision import Precision
from fmegatron.primitives import embedding, layer_norm, rms_norm
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import Param, init
from tests.test_primitives import gradients, saved_bytes, third_derivatives
from tests.test_primitives_transforms import transforms

DOUBLE, SINGLE, HALF = torch.float64, torch.float32, torch.bfloat16
ROUNDING = {DOUBLE: 1e-13, SINGLE: 1e-6, HALF: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def near_exact(got, exact, dtype):
    """Within a rounding or so of gradients that float64 gives of the same arguments."""
    for a, b in zip(got, exact, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() < ROUNDING[dtype] * b.norm()


def in_double(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


# layer_norm


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("given", ["weight and bias", "weight", "neither"])
def test_layer_norm_is_torch(dtype, given):
    x = (torch.randn(5, 3, 48) * 3 + 1).to(dtype).requires_grad_()
    weight, bias = (torch.randn(48).to(dtype).requires_grad_() for _ in range(2))
    args = {"weight and bias": (x, weight, bias), "weight": (x, weight), "neither": (x,)}[given]
    ours = layer_norm(*args, *[None] * (2 - len(args)), eps=1e-3)
    assert torch.equal(ours, functional.layer_norm(x, (48,), *args[1:], eps=1e-3))
    g = torch.randn(5, 3, 48).to(dtype)
    exact = in_double(*args)
    theirs = functional.layer_norm(exact[0], (48,), *exact[1:], eps=1e-3)
    near_exact(gradients(ours, args, g), gradients(theirs, exact, g.double()), dtype)


def test_layer_norm_keeps_x_the_weight_and_two_numbers_per_row():
    x = torch.randn(64, 256).to(HALF).requires_grad_()
    w, b = (torch.ones(256, dtype=HALF, requires_grad=True) for _ in range(2))
    assert saved_bytes(lambda: layer_norm(x, w, b))[0] == 64 * 256 * 2 + 256 * 2 + 64 * 2 * 4


def test_layer_norm_of_mixed_precision_and_of_one_row():
    x, w, b = torch.randn(3, 16).to(HALF).requires_grad_(), torch.randn(16), torch.randn(16)
    w, b = w.requires_grad_(), b.requires_grad_()
    y, exact = layer_norm(x, w, b), in_double(x, w, b)
    want = functional.layer_norm(exact[0], (16,), exact[1], exact[2])
    torch.testing.assert_close(y, want.to(HALF), rtol=2**-8, atol=0)
    g = torch.randn(3, 16).to(HALF)
    got = gradients(y, (x, w, b), g)
    assert [t.dtype for t in got] == [HALF, SINGLE, SINGLE]
    for a, c in zip(got, gradients(want, exact, g.double()), strict=True):
        assert (a.double() - c).norm() < 2**-8 * c.norm()
    assert torch.equal(layer_norm(x[0], w, b), y[0])


def test_layer_norm_refuses():
    x, w = torch.randn(2, 3, 4), torch.ones(4)
    with pytest.raises(UserError, match=r"layer_norm\(weight of shape \(3, 4\)\)"):
        layer_norm(x, torch.ones(3, 4))
    with pytest.raises(UserError, match="no weight"):
        layer_norm(x, None, w)
    with pytest.raises(UserError, match=r"bias of shape \(1,\)"):
        layer_norm(x, w, torch.ones(1))


# rms_norm


def transformers_norm(name):
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    gemma, olmo = dict(zero_centred=True, wide_weight=True), dict(wide_weight=True)
    return {
        "gemma2": (Gemma2RMSNorm, gemma),
        "gemma3": (Gemma3RMSNorm, gemma),
        "olmo2": (Olmo2RMSNorm, olmo),
        "llama": (LlamaRMSNorm, {}),
    }[name]


@pytest.mark.parametrize("dtype", [HALF, torch.float16, SINGLE])
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "llama"])
def test_rms_norm_is_transformers(name, dtype):
    cls, options = transformers_norm(name)
    theirs = cls(48, eps=1e-5).to(dtype)
    theirs.weight.data.normal_(0.2, 0.5)
    x = (torch.randn(50, 3, 48) * 3).to(dtype).requires_grad_()
    ours, want = rms_norm(x, theirs.weight, eps=1e-5, **options), theirs(x)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, want, rtol=2e-6 if dtype == SINGLE else 2 * ROUNDING[dtype], atol=0)
    if dtype != SINGLE:  # a rounding of the statistics may tip that of the result
        assert (ours != want).double().mean() < 1e-3
    g, exact = torch.randn(50, 3, 48).to(dtype), in_double(x, theirs.weight)
    scaled = functional.rms_norm(exact[0], (48,), exact[1] + ("gemma" in name), 1e-5)
    near_exact(gradients(ours, (x, theirs.weight), g), gradients(scaled, exact, g.double()), dtype)


def test_weights_of_another_dtype():
    x, w = torch.randn(3, 8).to(HALF), torch.randn(8)
    normal = functional.rms_norm(x.float(), (8,), None, 1e-6)
    assert torch.equal(rms_norm(x, w), normal.to(HALF) * w)  # as Llama's: the product decides
    torch.testing.assert_close(rms_norm(x, w, wide_weight=True), (normal * w).to(HALF), rtol=2**-8, atol=0)
    torch.testing.assert_close(rms_norm(x, None), normal.to(HALF), rtol=2**-8, atol=0)
    assert torch.equal(rms_norm(x, torch.zeros(8, dtype=HALF), zero_centred=True), rms_norm(x, None))


@pytest.mark.parametrize("options", [{}, dict(zero_centred=True, wide_weight=True)])
def test_rms_norm_over_several_dims(options):
    x, w = (torch.randn(s, dtype=DOUBLE, requires_grad=True) for s in ((2, 3, 2, 5), (2, 5)))
    ours = rms_norm(x, w, eps=1e-3, **options)
    theirs = functional.rms_norm(x, (2, 5), w + bool(options), 1e-3)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
    g = torch.randn_like(x)
    torch.testing.assert_close(gradients(ours, (x, w), g), gradients(theirs, (x, w), g), rtol=1e-13, atol=1e-13)
    size = saved_bytes(lambda: rms_norm(x, w, eps=1e-3, **options))[0]
    assert size == 8 * (x.numel() + w.numel() + 6)


def test_rms_norm_refuses():
    x = torch.randn(2, 3, 4)
    with pytest.raises(UserError, match=r"weight of shape \(3,\)"):
        rms_norm(x, torch.ones(3))
    with pytest.raises(UserError, match="names 2 dims"):
        rms_norm(x, torch.ones(4), dims="batch embed")
    with pytest.raises(UserError, match="with sh give dims"):
        rms_norm(x, torch.ones(4), sh=Sharding())


# torch.func and torch.compile


def plain_layer(x, w, b):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * w + b


def plain_rms(x, w, dims=(-1,)):
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + 1e-6) * (1 + w)


NORMS = {
    "layer_norm": (layer_norm, plain_layer, [(2, 4, 5), (5,), (5,)]),
    "layer_norm without weight": (
        lambda x: layer_norm(x, None),
        lambda x: plain_layer(x, 1.0, 0.0),
        [(2, 4, 5)],
    ),
    "rms_norm": (
        lambda x, w: rms_norm(x, w, zero_centred=True, wide_weight=True),
        plain_rms,
        [(2, 4, 5), (5,)],
    ),
    "rms_norm over two dims": (
        lambda x, w: rms_norm(x, w, zero_centred=True),
        lambda x, w: plain_rms(x, w, (-2, -1)),
        [(2, 2, 2, 3), (2, 3)],
    ),
    "rms_norm without weight": (lambda x: rms_norm(x, None), lambda x: plain_rms(x, 0.0), [(2, 4, 5)]),
}


@pytest.mark.parametrize("name", NORMS)
def test_torch_func(name):
    ours, plain, shapes = NORMS[name]
    args, others = ([torch.randn(s, dtype=DOUBLE) for s in shapes] for _ in range(2))
    got, want = transforms(ours, args, others), transforms(plain, args, others)
    for what in want:
        torch.testing.assert_close(
            got[what], want[what], rtol=1e-11, atol=1e-11, msg=lambda m, what=what: f"{what}: {m}"
        )


@pytest.mark.parametrize("name", NORMS)
def test_third_derivatives(name):
    ours, plain, shapes = NORMS[name]
    args = [torch.randn(s, dtype=DOUBLE, requires_grad=True) for s in shapes]

    for a, b in zip(third_derivatives(ours, args), third_derivatives(plain, args), strict=True):
        assert (a - b).norm() < 1e-10 * b.norm()


@pytest.mark.parametrize(
    "name, backend",
    [
        *((n, "aot_eager") for n in NORMS),
        pytest.param("layer_norm", "inductor", marks=pytest.mark.slow),
        pytest.param("rms_norm over two dims", "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled(name, backend):
    ours, plain, shapes = NORMS[name]
    args = [torch.randn(s, dtype=DOUBLE, requires_grad=True) for s in shapes]
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    got, want = (torch.autograd.grad((f(*args) ** 3).sum(), args) for f in (compiled, plain))
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    constants = [a.detach() for a in args]
    torch.testing.assert_close(compiled(*constants), plain(*constants), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_in_half_precision(backend):
    def loss(x, w, b):
        y = layer_norm(x, w, b)
        return (y * rms_norm(y, w, zero_centred=True, wide_weight=True)).float().sum()

    args = [torch.randn(s).to(HALF).requires_grad_() for s in ((6, 32), (32,), (32,))]
    got, want = (torch.autograd.grad(f(*args), args) for f in (torch.compile(loss, backend=backend), loss))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == HALF and (a - b).float().norm() < 0.02 * b.float().norm()


@pytest.mark.parametrize("name", NORMS)
def test_half_precision_under_torch_func(name):
    ours, plain, shapes = NORMS[name]
    args = [torch.randn(s).to(HALF) for s in shapes]
    y, back = torch.func.vjp(ours, *args)
    exact, exactly = torch.func.vjp(plain, *(a.double() for a in args))
    g = torch.randn_like(y)
    for a, b in zip((y, *back(g)), (exact, *exactly(g.double())), strict=True):
        assert a.dtype == HALF and (a.double() - b).norm() < 2**-7 * b.norm()


# over sharded heads: OLMo 2's norms of queries and keys

V, E, S, KV, G, H = 8, 8, 4, 2, 4, 4
STREAM, TOKEN, KEY = "batch seq*", "batch seq", "batch seq group"
SPEC = dict(
    table=Param((V, E), "vocab embed", Normal(0.7), over=TOKEN),
    norm=Param((E,), "embed", Normal(0.7), over=STREAM),
    bias=Param((E,), "embed", Normal(0.7), over=STREAM),
    q=Param((E, KV, G, H), "embed kv group head", Normal(0.7), over=TOKEN),
    k=Param((E, KV, H), "embed kv head", Normal(0.7), over=KEY),
    qn=Param((KV, G, H), "kv group head", Normal(0.7), over=TOKEN),
    kn=Param((KV, H), "kv head", Normal(0.7), over=KEY),
)
NAMES = ("batch", "seq", "vocab", "kv", "group")
FREE = dict.fromkeys((*NAMES, "embed", "head"))
GEMMA = dict(zero_centred=True, wide_weight=True)


def program(params, batch, sh, bug=None):
    p = sh.use(params, SPEC)
    x = embedding(p["table"], batch["tokens"], sh=sh, vocab_size=V)
    x = layer_norm(x, p["norm"], p["bias"]) + rms_norm(x, p["norm"], dims="batch seq* embed", sh=sh)
    h = sh(x, "batch seq* embed -> batch seq embed | kv group")
    q = sh.dot(h, p["q"], "batch seq embed, embed kv group head -> batch seq kv group head")
    k = sh.dot(h, p["k"], "batch seq embed, embed kv head -> batch seq kv head")
    if bug == "local":
        q = rms_norm(q, p["qn"], **GEMMA)
    elif bug == "misnamed":
        q = rms_norm(q, p["qn"], dims="batch seq group kv head", sh=sh)
    else:
        q = rms_norm(q, p["qn"], dims="batch seq kv group head", sh=sh, **GEMMA)
    k = rms_norm(k, p["kn"], dims="batch seq kv head", sh=sh)
    return sh.sum((q + k.unsqueeze(3)) ** 3, "batch seq kv group head ->")


def data():
    torch.manual_seed(3)
    sh = Sharding(precision=Precision(params=DOUBLE))
    values, vector = (init(SPEC, random.key(i), sh=sh) for i in (0, 1))
    return values, vector, dict(tokens=torch.randint(V, (4, S)))


def derivatives(params, vector, batch, sh):
    """The loss, its gradients and a Hessian-vector product."""
    flat = [w.detach().requires_grad_() for w in tree.leaves(sh.local(params))]
    loss = program(tree.like(params, flat), batch, sh)
    grads = torch.autograd.grad(loss, flat, create_graph=True)
    first = torch.autograd.grad(program(tree.like(params, flat), batch, sh), flat)  # without a graph of its own
    along = sh.inner(tree.like(params, list(grads)), sh.local(vector), SPEC)
    return loss.detach(), [g.detach() for g in grads], first, torch.autograd.grad(along, flat)


def plain_program(params, batch):
    """Heads in plain operations."""
    x = params["table"][batch["tokens"]]
    x = plain_layer(x, params["norm"], params["bias"]) + functional.rms_norm(x, (E,), params["norm"], 1e-6)
    q, k = (torch.einsum(e, x, params[n]) for e, n in (("bse,engh->bsngh", "q"), ("bse,enh->bsnh", "k")))
    q = functional.rms_norm(q, (KV, G, H), 1 + params["qn"], 1e-6)
    k = functional.rms_norm(k, (KV, H), params["kn"], 1e-6)
    return ((q + k.unsqueeze(3)) ** 3).sum()


@pytest.mark.parametrize(
    "axes, rows",
    [
        ("tp=2", {"kv": "tp", "seq*": "tp"}),
        ("a=2,b=2", {"kv": "a", "group": "b", "seq*": ("a", "b"), "vocab": ("a", "b")}),  # fewer kv heads than ranks
        ("dp=2,b=4", {"batch": "dp", "group": "b"}),
        ("cp=2,a=2,b=2", {"seq": "cp", "kv": "a", "group": "b", "vocab": "a"}),
    ],
)
def test_sharded_heads(axes, rows):
    params, vector, batch = data()
    want = derivatives(params, vector, batch, Sharding(precision=Precision(params=DOUBLE)))
    torch.testing.assert_close(want[0], plain_program(params, batch), rtol=1e-13, atol=0)
    with simulate(math.prod(parse_axes(axes).values())):
        mesh = make_mesh(axes, device="cpu")
        sh = Sharding(mesh, Rules({**FREE, **rows}), precision=Precision(params=DOUBLE))
        placed = [{n: sh.shard_param(everywhere(mesh, w), SPEC[n]) for n, w in t.items()} for t in (params, vector)]
        local = {n: sh.shard(everywhere(mesh, x), "batch seq") for n, x in batch.items()}
        got = derivatives(*placed, local, sh)
        for x in per_rank(got[0]):
            torch.testing.assert_close(x, want[0], rtol=1e-12, atol=0)
        for mine, theirs in zip(got[1:], want[1:], strict=True):
            for g, r, p in zip(mine, theirs, tree.leaves(SPEC), strict=True):
                size = r.norm()
                r = sh.local(sh.shard_param(everywhere(mesh, r.detach()), p))
                for a, b in zip(per_rank(g.detach()), per_rank(r), strict=True):
                    assert (a - b).norm() < 1e-12 * size


def test_saved_bytes_over_sharded_heads():
    with simulate(2):
        sh = Sharding(make_mesh("tp=2", device="cpu"), Rules({**FREE, "kv": "tp"}))
        q = sh.shard(torch.randn(4, S, KV, G, H, dtype=DOUBLE), "batch seq kv group head").requires_grad_()
        w = sh.shard(torch.randn(KV, G, H, dtype=DOUBLE), "kv group head").requires_grad_()
        kept = {}

        def pack(t):
            kept[id(t)] = t.numel() * t.element_size()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            rms_norm(q, w, dims="batch seq kv group head", sh=sh)
        assert sum(kept.values()) == 8 * (q.numel() + w.numel() + 4 * S)


def test_torch_func_over_sharded_heads():
    """vmap, vjp and a Hessian-vector product of every example."""
    x, w = torch.randn(3, 2, 4, KV, H, dtype=DOUBLE), torch.randn(KV, H, dtype=DOUBLE)
    dims = "batch seq kv head"

    def results(f, total, x, w):
        def product(x):
            grad = torch.func.grad(lambda x: total(f(x, w) ** 3))
            return torch.func.vjp(grad, x)[1](torch.cos(x))[0]

        mapped = torch.func.vmap(f, (0, None))(x, w)
        return mapped, *torch.func.vjp(lambda x, w: f(x[0], w), x, w)[1](torch.cos(x[0])), torch.func.vmap(product)(x)

    want = results(lambda x, w: functional.rms_norm(x, (KV, H), w, 1e-6), torch.sum, x, w)
    with simulate(2):
        sh = Sharding(make_mesh("tp=2", device="cpu"), Rules({**FREE, "kv": "tp"}))
        parts = sh.shard(x, "group batch seq kv head"), sh.shard(w, "kv head")
        got = results(
            lambda x, w: rms_norm(x, w, dims=dims, sh=sh), lambda y: sh.sum(y, dims + " ->"), parts[0], parts[1]
        )
        for a, b in zip(got, want, strict=True):
            b = sh.shard(b, "group batch seq kv head" if b.ndim == 5 else "kv head")
            for mine, theirs in zip(per_rank(a), per_rank(b), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_compiled_over_sharded_heads():
    """On a mesh of a group whose collectives do nothing: that the graph is whole, and computes as eager code does."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        sh = Sharding(make_mesh("tp=2", device="cpu"), Rules({**FREE, "kv": "tp"}))
        args = [torch.randn(s, dtype=DOUBLE, requires_grad=True) for s in ((2, 3, 1, 2, 4), (1, 2, 4))]

        def norm(x, w):
            return rms_norm(x, w, dims="batch seq kv group head", sh=sh, zero_centred=True)

        compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
        got, want = (gradients(f(*args) ** 3, args) for f in (compiled, norm))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        constants = [a.detach() for a in args]
        torch.testing.assert_close(compiled(*constants), norm(*constants), rtol=1e-12, atol=1e-12)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("probe", [False, True])
def test_checking_mode(probe):
    params, _, batch = data()
    rules = Rules({**FREE, **dict.fromkeys((*NAMES, "seq*"), "x")}, activations=("batch", "seq"))
    check(program, SPEC, params, batch, rules, probe=probe)
    bugs = ["local", "misnamed"] if probe else []
    for bug in bugs:
        with pytest.raises(ValueError, match="on_kv|on_group"):
            check(lambda *a, bug=bug: program(*a, bug=bug), SPEC, params, batch, rules, probe=probe)


# on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", [*NORMS, "rms_norm, wide weight", "rms_norm, narrow weight"])
def test_on_gpu(name, dtype):
    more = {
        "rms_norm, wide weight": (lambda x, w: rms_norm(x, w - 1, wide_weight=True), lambda x, w: plain_rms(x, w - 2)),
        "rms_norm, narrow weight": (lambda x, w: rms_norm(x, w), lambda x, w: plain_rms(x, w - 1)),
    }
    ours, plain = NORMS[name][:2] if name in NORMS else more[name]
    narrow = name in ("rms_norm, narrow weight", "rms_norm over two dims")
    shapes = [(7, 33, 96), (96,), (96,)][: len(NORMS[name][2]) if name in NORMS else 2]
    if name == "rms_norm over two dims":
        shapes = [(7, 33, 4, 24), (4, 24)]
    args = [torch.randn(s, device="cuda").to(dtype).requires_grad_() for s in shapes]
    exact = in_double(*args)
    got, want = ours(*args), plain(*exact)
    g = torch.randn_like(got)
    double = [want, *gradients(want, exact, g.double())]
    for a, b in zip([got, *gradients(got, args, g)], double, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() < (3 if narrow or "wide" in name else 1) * ROUNDING[dtype] * b.norm()
    if name.startswith("layer_norm") and name in NORMS:
        weights = args[1:] if len(args) > 1 else []
        alone = layer_norm(args[0], *(weights or [None]), kernel="torch")
        assert torch.equal(alone, functional.layer_norm(args[0], shapes[0][-1:], *weights, eps=1e-5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_layer_norm_of_mixed_precision_on_gpu():
    x, w, b = torch.randn(9, 64, device="cuda").to(HALF), *torch.randn(2, 64, device="cuda")
    args, exact = [t.detach().requires_grad_() for t in (x, w, b)], in_double(x, w, b)
    got, want = layer_norm(*args), plain_layer(*exact)
    g = torch.randn_like(got)
    for a, c in zip([got, *gradients(got, args, g)], [want, *gradients(want, exact, g.double())], strict=True):
        assert (a.double() - c).norm() < 2**-8 * c.norm()
