"""Each primitive under torch.func and torch.compile, and all of them on simulated meshes and in the checking mode."""

import math

import pytest
import torch
from torch.nn import functional

from fmegatron import random, tree
from fmegatron.checking import check
from fmegatron.initializers import Normal
from fmegatron.mesh import everywhere, make_mesh, parse_axes
from fmegatron.precision import Precision
from fmegatron.primitives import (
    apply_rotary,
    attention,
    cross_entropy,
    dropout,
    embedding,
    linear_cross_entropy,
    rms_norm,
    rotary_table,
    swiglu,
)
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import Param, init

DOUBLE = torch.float64
KEY = random.key(5)
LABELS = torch.tensor([[1, -100, 0, 6], [3, 3, -100, 2]])
SEGMENTS = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
COS, SIN = rotary_table(torch.arange(4), 6, dtype=DOUBLE)


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


# what torch computes in plain operations


def plain_attention(q, k, v):
    s = torch.einsum("bqngh,bknh->bngqk", q, k) / q.shape[-1] ** 0.5
    seen = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & torch.ones(4, 4, dtype=torch.bool).tril()
    return torch.einsum("bngqk,bknh->bqngh", s.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1), v)


def plain_rotary(x):
    turn = torch.cat([-x[..., 3:], x[..., :3]], -1)
    cos, sin = (torch.cat([t, t], -1)[:, None] for t in (COS, SIN))
    return x * cos + turn * sin


def plain_loss(logits):
    flat = logits.reshape(-1, logits.shape[-1])
    return functional.cross_entropy(flat, LABELS.flatten(), reduction="none").view(LABELS.shape)


def plain_norm(x, w):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def plain_dropout(x):
    return x * (dropout(torch.ones(2, 4, 5, dtype=DOUBLE), 0.4, KEY))


PRIMITIVES = {
    "rms_norm": (rms_norm, plain_norm, [(2, 4, 5), (5,)]),
    "swiglu": (swiglu, lambda g, u: functional.silu(g) * u, [(2, 4, 5), (2, 4, 5)]),
    "rotary": (lambda x: apply_rotary(x, COS, SIN), plain_rotary, [(2, 4, 3, 6)]),
    "embedding": (lambda t: embedding(t, LABELS.clamp(min=0)), lambda t: t[LABELS.clamp(min=0)], [(7, 5)]),
    "attention": (
        lambda q, k, v: attention(q, k, v, segments=SEGMENTS),
        plain_attention,
        [(2, 4, 2, 2, 3), (2, 4, 2, 3), (2, 4, 2, 3)],
    ),
    "cross_entropy": (lambda t: cross_entropy(t, LABELS), plain_loss, [(2, 4, 7)]),
    "linear_cross_entropy": (
        lambda x, w: linear_cross_entropy(x, w, LABELS, chunk=3),
        lambda x, w: plain_loss(x @ w),
        [(2, 4, 5), (5, 7)],
    ),
    "dropout": (lambda x: dropout(x, 0.4, KEY), plain_dropout, [(2, 4, 5)]),
}
NAMES = list(PRIMITIVES)


def transforms(f, args, others):
    """Everything that torch.func makes of a scalar loss of f: a dict of trees of tensors."""
    every = tuple(range(len(args)))
    vectors = [torch.cos(a) for a in args]

    def loss(*args):
        return (f(*args) ** 3).sum()

    gradient = torch.func.grad(loss, every)

    def product(*args):  # reverse over reverse
        return torch.func.grad(
            lambda *a: sum((g * v).sum() for g, v in zip(gradient(*a), vectors, strict=True)), every
        )(*args)

    stacked = [torch.stack([a, b]) for a, b in zip(args, others, strict=True)]
    one_mapped = (0, *[None] * (len(args) - 1))
    return {
        "grad": gradient(*args),
        "vjp": torch.func.vjp(f, *args)[1](torch.ones_like(f(*args))),
        "vmap": torch.func.vmap(f)(*stacked),
        "vmap of grad": torch.func.vmap(gradient)(*stacked),
        "vmap of grad, one argument mapped": torch.func.vmap(gradient, one_mapped)(stacked[0], *args[1:]),
        "jacrev": torch.func.jacrev(f, every)(*args),
        "Hessian-vector product": product(*args),
        "vmap of it": torch.func.vmap(product)(*stacked),
        "vmap of it, one argument mapped": torch.func.vmap(product, one_mapped)(stacked[0], *args[1:]),
        "jacrev of grad": torch.func.jacrev(gradient)(*args),
    }


@pytest.mark.parametrize("name", NAMES)
def test_torch_func(name):
    ours, plain, shapes = PRIMITIVES[name]
    args, others = ([torch.randn(s, dtype=DOUBLE) for s in shapes] for _ in range(2))
    got, want = transforms(ours, args, others), transforms(plain, args, others)
    for what in want:
        torch.testing.assert_close(
            got[what], want[what], rtol=1e-11, atol=1e-11, msg=lambda m, what=what: f"{what}: {m}"
        )


@pytest.mark.parametrize("name", NAMES)
def test_third_derivatives(name):
    ours, plain, shapes = PRIMITIVES[name]
    args = [torch.randn(s, dtype=DOUBLE, requires_grad=True) for s in shapes]

    def third(f):
        value = (f(*args) ** 4).sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(value, args[0], create_graph=True)
            value = (g**2).sum()
        return g

    a, b = third(ours), third(plain)
    assert (a - b).norm() < 1e-10 * b.norm()


# torch.compile


@pytest.mark.parametrize("name", NAMES)
def test_compiled_alone(name):
    ours, plain, shapes = PRIMITIVES[name]
    args = [torch.randn(s, dtype=DOUBLE, requires_grad=True) for s in shapes]
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    got, want = (torch.autograd.grad((f(*args) ** 3).sum(), args) for f in (compiled, plain))
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    constants = [a.detach() for a in args]  # dynamo takes another way for them: the first run of a remat
    torch.testing.assert_close(compiled(*constants), plain(*constants), rtol=1e-11, atol=1e-11)


def block(p, tokens, key=None):
    """Every primitive once."""
    x = embedding(p["table"], tokens)
    h = rms_norm(x, p["norm"])
    q = torch.einsum("bse,engh->bsngh", h, p["q"])
    k, v = (torch.einsum("bse,enh->bsnh", h, p[n]) for n in "kv")
    q, k = (apply_rotary(t, COS.to(t.dtype), SIN.to(t.dtype)) for t in (q, k))
    x = x + torch.einsum("bsngh,nghe->bse", attention(q, k, v, segments=SEGMENTS), p["o"])
    x = x + swiglu(x @ p["gate"], x @ p["up"]) @ p["down"]
    x = dropout(x, 0.3, key) if key is not None else x
    weights = torch.linspace(0.5, 2, 8, dtype=x.dtype).view(2, 4)
    tied = "batch seq embed, vocab embed -> batch seq vocab"
    fused = linear_cross_entropy(x, p["table"], LABELS, equation=tied, chunk=3)
    return ((fused + 0.1 * cross_entropy(x @ p["table"].t(), LABELS)) * weights).sum()


SHAPES = dict(
    table=(7, 5), norm=(5,), q=(5, 2, 2, 6), k=(5, 2, 6), v=(5, 2, 6), o=(2, 2, 6, 5), gate=(5, 8), up=(5, 8), down=(8, 5)
)  # fmt: skip


def block_gradients(f, dtype, key=None):
    torch.manual_seed(1)
    p = {n: torch.randn(s, dtype=dtype, requires_grad=True) for n, s in SHAPES.items()}
    loss = f(p, LABELS.clamp(min=0), key)
    return [loss.detach(), *torch.autograd.grad(loss, list(p.values()))]


@pytest.mark.parametrize(
    "backend, key",
    [
        ("aot_eager", KEY),
        ("aot_eager", random.to_tensor(KEY)),
        pytest.param("inductor", None, marks=pytest.mark.slow),
        pytest.param("inductor", random.to_tensor(KEY), marks=pytest.mark.slow),
    ],
)
def test_compiled_whole(backend, key):
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    got, want = block_gradients(compiled, DOUBLE, key), block_gradients(block, DOUBLE, key)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_compiled_in_bf16():
    got = block_gradients(torch.compile(block, backend="aot_eager", fullgraph=True), torch.bfloat16)
    for a, b in zip(got, block_gradients(block, torch.bfloat16), strict=True):
        assert a.dtype == b.dtype
        assert (a - b).float().norm() < 0.03 * b.float().norm()


# `sh`

V, E, S, KV, G, H, FF = 16, 8, 8, 2, 2, 4, 12
STREAM, TOKEN = "batch seq*", "batch seq"
SPEC = dict(
    table=Param((V, E), "vocab embed", Normal(0.7), over=TOKEN),
    head=Param((E, V), "embed vocab", Normal(0.7), over=TOKEN),
    norm=Param((E,), "embed", Normal(0.7), over=STREAM),
    q=Param((E, KV, G, H), "embed kv group head", Normal(0.7), over=TOKEN),
    k=Param((E, KV, H), "embed kv head", Normal(0.7), over="batch seq group"),
    v=Param((E, KV, H), "embed kv head", Normal(0.7), over="batch seq group"),
    o=Param((KV, G, H, E), "kv group head embed", Normal(0.7), over=TOKEN),
    gate=Param((E, FF), "embed mlp", Normal(0.7), over=TOKEN),
    up=Param((E, FF), "embed mlp", Normal(0.7), over=TOKEN),
    down=Param((FF, E), "mlp embed", Normal(0.7), over=TOKEN),
)
FREE = dict.fromkeys(("embed", "head", "kvseq"))


def program(params, batch, sh, declared=True):
    p = sh.use(params, SPEC)
    size = dict(vocab_size=V)
    x = embedding(p["table"], batch["tokens"], sh=sh, **size)
    x = dropout(x, 0.3, KEY, sh=sh)
    h = sh(rms_norm(x, p["norm"]), "batch seq* embed -> batch seq embed | kv group")
    q = sh.dot(h, p["q"], "batch seq embed, embed kv group head -> batch seq kv group head")
    k, v = (sh.dot(h, p[n], "batch seq embed, embed kv head -> batch seq kv head") for n in "kv")
    positions = sh.index("seq", S)
    table = rotary_table(positions, H, dtype=DOUBLE)
    q, k = (apply_rotary(t, *table) for t in (q, k))
    k, v = (sh(t, "batch seq kv head -> batch kvseq kv head | seq") for t in (k, v))
    where = dict(
        positions=positions,
        kv_positions=sh(positions, "seq -> kvseq | seq"),
        segments=batch["segments"],
        kv_segments=sh(batch["segments"], "batch seq -> batch kvseq | seq"),
    )
    a = attention(q, k, v, sh=sh, **where)
    x = x + sh.dot(a, p["o"], "batch seq kv group head, kv group head embed -> batch seq* embed")
    h = sh(rms_norm(x, p["norm"]), "batch seq* embed -> batch seq embed | mlp")
    gate, up = (sh.dot(h, p[n], "batch seq embed, embed mlp -> batch seq mlp") for n in ("gate", "up"))
    x = x + sh.dot(swiglu(gate, up), p["down"], "batch seq mlp, mlp embed -> batch seq* embed")
    # without the region the gradient of x lacks the sum over the vocabulary
    h = (
        sh(x, "batch seq* embed -> batch seq embed | vocab")
        if declared
        else sh(x, "batch seq* embed -> batch seq embed")
    )
    fused = linear_cross_entropy(h, p["head"], batch["labels"], sh=sh, chunk=3, **size)
    logits = sh.dot(h, p["table"], "batch seq embed, vocab embed -> batch seq vocab")
    return sh.sum(fused + 0.3 * cross_entropy(logits, batch["labels"], sh=sh, **size), "batch seq ->")


def sharded_data():
    torch.manual_seed(3)
    labels = torch.randint(V, (4, S))
    labels[0, 3] = labels[2, 7] = -100
    batch = dict(
        tokens=torch.randint(V, (4, S)), labels=labels, segments=(torch.arange(S) // 3).expand(4, S).contiguous()
    )
    sh = Sharding(precision=Precision(params=DOUBLE))
    return init(SPEC, random.key(0), sh=sh), init(SPEC, random.key(1), sh=sh), batch


def derivatives(params, vector, batch, sh):
    flat = [w.detach().requires_grad_() for w in tree.leaves(sh.local(params))]
    loss = program(tree.like(params, flat), batch, sh)
    grads = torch.autograd.grad(loss, flat, create_graph=True)
    along = 0.0
    for g, v, p in zip(grads, tree.leaves(sh.local(vector)), tree.leaves(SPEC), strict=True):
        along = along + sh((g * v).sum(), **{a: ("P", "I") for a in sh.held_by(p)})
    return loss.detach(), [g.detach() for g in grads], torch.autograd.grad(along, flat)


@pytest.mark.parametrize(
    "axes, rows",
    [
        ("tp=4", dict(vocab="tp", mlp="tp")),
        ("tp=2", {"vocab": "tp", "mlp": "tp", "kv": "tp", "seq*": "tp"}),
        ("dp=2,cp=2", dict(batch="dp", seq="cp")),
        ("dp=2,cp=2,tp=2", {"batch": "dp", "seq": "cp", "seq*": ("cp", "tp"), "vocab": "tp", "kv": "tp", "mlp": "tp"}),
        ("dp=2,tp=2", dict(vocab=("tp", "dp"), kv="tp")),
    ],
)
def test_sharded(axes, rows):
    params, vector, batch = sharded_data()
    want = derivatives(params, vector, batch, Sharding(precision=Precision(params=DOUBLE)))
    with simulate(math.prod(parse_axes(axes).values())):
        mesh = make_mesh(axes, device="cpu")
        names = ("batch", "seq", "vocab", "kv", "group", "mlp")
        sh = Sharding(mesh, Rules({**FREE, **dict.fromkeys(names), **rows}), precision=Precision(params=DOUBLE))

        def place(values):
            return {n: sh.shard_param(everywhere(mesh, w), SPEC[n]) for n, w in values.items()}

        local = {n: sh.shard(everywhere(mesh, x), "batch seq") for n, x in batch.items()}
        got = derivatives(place(params), place(vector), local, sh)
        for x in per_rank(got[0]):
            torch.testing.assert_close(x, want[0], rtol=1e-12, atol=0)
        for mine, theirs in zip(got[1:], want[1:], strict=True):
            for g, r, p in zip(mine, theirs, tree.leaves(SPEC), strict=True):
                r = sh.local(sh.shard_param(everywhere(mesh, r.detach()), p))
                for a, b in zip(per_rank(g.detach()), per_rank(r), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_checking_mode():
    params, _, batch = sharded_data()
    every = {n: "x" for n in ("batch", "seq", "seq*", "vocab", "kv", "group", "mlp")}
    rules = Rules({**FREE, **every})
    check(program, SPEC, params, batch, rules)
    with pytest.raises(ValueError, match="vocab"):
        check(lambda *a: program(*a, declared=False), SPEC, params, batch, rules)
