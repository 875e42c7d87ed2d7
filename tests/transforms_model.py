"""The small model of the tests of transforms, as a user would write it, and its reference in torch's own operations."""

import torch
import torch.nn.functional as F
from torch.autograd import Function

from fmegatron.accumulate import Term, Weight
from fmegatron.context import Ctx
from fmegatron.function import apply_function
from fmegatron.parallel.stack import Store, chain
from fmegatron.remat import everything, names, nothing, remat
from fmegatron.simulation import per_rank
from fmegatron.tree import leaves, like, tree_map

T = torch.float64
POLICIES = {
    "everything": everything,
    "nothing": nothing,
    "attention": names("attention"),
    "predicate": lambda name: name in ("up", "o"),
}
COEFFICIENT = {"lm": 1.0, "aux": 0.3}


class Attention(Function):
    """A computation that can be saved by name: it takes its own outputs."""

    generate_vmap_rule = True

    @staticmethod
    def probs(q, k, mask):
        return torch.einsum("bqhd,bkhd->bhqk", q, k).div(q.shape[-1] ** 0.5).masked_fill(~mask[:, None], -torch.inf)

    @staticmethod
    def forward(q, k, v, mask, saved_o, saved_lse):
        if saved_o is not None:
            return saved_o.view_as(saved_o), saved_lse.view_as(saved_lse)
        s = Attention.probs(q, k, mask)
        lse = s.logsumexp(-1)
        return torch.einsum("bhqk,bkhd->bqhd", (s - lse[..., None]).exp(), v), lse

    @staticmethod
    def setup_context(ctx, inputs, outs):
        ctx.save_for_backward(*inputs[:4], *outs)

    @staticmethod
    def backward(ctx, go, gl):
        q, k, v, mask, o, lse = ctx.saved_tensors
        p = (Attention.probs(q, k, mask) - lse[..., None]).exp()
        dp = torch.einsum("bqhd,bkhd->bhqk", go, v)
        ds = p * (dp - torch.einsum("bqhd,bqhd->bhq", go, o)[..., None] + gl[..., None]) / q.shape[-1] ** 0.5
        gq, gk = torch.einsum("bhqk,bkhd->bqhd", ds, k), torch.einsum("bhqk,bqhd->bkhd", ds, q)
        return gq, gk, torch.einsum("bhqk,bqhd->bkhd", p, go), None, None, None


def causal_mask(segments):
    n = segments.shape[1]
    return (segments[:, :, None] == segments[:, None]) & torch.ones(n, n, dtype=torch.bool).tril()


def attention(q, k, v, ctx):
    tape, mask = ctx.sh.tape, causal_mask(ctx.segments)
    if tape is None:
        return apply_function(Attention, q, k, v, mask, None, None)[0]
    _, saved = tape.enter("attention")
    outs = apply_function(Attention, q, k, v, mask, *(saved or (None, None)))
    return tape.leave("attention", outs)[0]


def norm(x, w):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w


def block(p, carry, ctx):
    x, dot = carry["x"], ctx.sh.dot
    h = norm(x, p["norm1"])
    q, k, v = (dot(h, p[n], "batch seq embed, embed heads head -> batch seq heads head", name=n) for n in "qkv")
    a = attention(q, k, v, ctx)
    x = x + dot(a, p["o"], "batch seq heads head, heads head embed -> batch seq embed", name="o")
    h = norm(x, p["norm2"])
    up = dot(h, p["up"], "batch seq embed, embed mlp -> batch seq mlp", name="up")
    again = dot(h.flip(-1), p["up"], "batch seq embed, embed mlp -> batch seq mlp", name="up")  # one leaf, two products
    up = F.silu(up) * again
    x = x + dot(up, p["down"], "batch seq mlp, mlp embed -> batch seq embed", name="down") + p["bias"]
    return {"x": x, "aux": carry["aux"] + up.square().mean((1, 2))}  # a term of the loss rides in the carry


def small_block(p, carry, ctx):
    """The same kinds of primitives in fewer calls, for compiled tests."""
    x, dot = carry["x"], ctx.sh.dot
    h = norm(x, p["norm1"])
    q = dot(h, p["q"], "batch seq embed, embed heads head -> batch seq heads head", name="q")
    a = attention(q, q.sin(), q.cos(), ctx)
    x = x + dot(a, p["o"], "batch seq heads head, heads head embed -> batch seq embed", name="o") + p["bias"]
    up = dot(x, p["up"], "batch seq embed, embed mlp -> batch seq mlp", name="up")
    return {"x": x + up.tanh().mean(-1, keepdim=True), "aux": carry["aux"] + up.square().mean((1, 2))}


def embed(p, _, ctx):
    tokens = ctx.extras["tokens"]
    return {"x": F.embedding(tokens, p["table"]), "aux": p["table"].new_zeros(tokens.shape[0])}


def head(p, carry, ctx):
    x, targets = norm(carry["x"], p["norm"]), ctx.extras["targets"]
    logits = ctx.sh.dot(x, p["table"], "batch seq embed, vocab embed -> batch seq vocab", name="head")
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return {"lm": nll * ctx.extras["mask"], "aux": carry["aux"]}


def ref_block(p, carry, ctx):
    """The block in torch's own operations: the independent reference."""
    x, e = carry["x"], torch.einsum
    h = norm(x, p["norm1"])
    q, k, v = (e("bse,ehd->bhsd", h, p[n]) for n in "qkv")
    s = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~causal_mask(ctx.segments)[:, None], -torch.inf)
    x = x + e("bhsd,hde->bse", s.softmax(-1) @ v, p["o"])
    h = norm(x, p["norm2"])
    up = F.silu(h @ p["up"]) * (h.flip(-1) @ p["up"])
    return {"x": x + up @ p["down"] + p["bias"], "aux": carry["aux"] + up.square().mean((1, 2))}


def ref_run(p, ctx, layer=ref_block):
    carry = embed(p, None, ctx)
    for index in sorted(p["layers"]):
        carry = layer(p["layers"][index], carry, ctx)
    logits = norm(carry["x"], p["norm"]) @ p["table"].T
    nll = -logits.log_softmax(-1).gather(-1, ctx.extras["targets"][..., None])[..., 0]
    return {"lm": nll * ctx.extras["mask"], "aux": carry["aux"]}


def weights(batch):
    mask = batch["mask"]
    return {
        "lm": Weight(mask, "batch seq", COEFFICIENT["lm"]),
        "aux": Weight(mask.new_ones(mask.shape[0]), "batch", COEFFICIENT["aux"]),
    }


def context(batch, ctx=None):
    return (ctx or Ctx()).replace(segments=batch["segments"], extras=batch)


def loss_of(run):
    """run(params, ctx) -> items per term; the loss in the form that `accumulate` takes."""

    def loss(params, batch, ctx):
        items = run(params, context(batch, ctx))
        return {"lm": Term(items["lm"], "batch seq"), "aux": Term(items["aux"], "batch")}, {
            "rows": batch["mask"].shape[0]
        }

    return loss


def scalar_of(run):
    """The same loss as one number, by plain arithmetic."""

    def loss(params, batch):
        items = run(params, context(batch))
        count = {"lm": batch["mask"].sum(), "aux": batch["mask"].shape[0]}
        return sum(COEFFICIENT[k] * t.sum() / count[k] for k, t in items.items())

    return loss


def make_params(layers=3, vocab=11, embed=8, heads=2, head=4, mlp=12, seed=0, only=None):
    g = torch.Generator().manual_seed(seed)

    def r(*shape):
        return torch.randn(shape, generator=g, dtype=T) * 0.4

    def layer():
        full = {
            "norm1": 1 + r(embed),
            "q": r(embed, heads, head),
            "k": r(embed, heads, head),
            "v": r(embed, heads, head),
            "o": r(heads, head, embed),
            "norm2": 1 + r(embed),
            "up": r(embed, mlp),
            "down": r(mlp, embed),
            "bias": r(embed),
        }
        return {name: t for name, t in full.items() if only is None or name in only}

    return {"table": r(vocab, embed), "layers": {i: layer() for i in range(layers)}, "norm": 1 + r(embed)}


def make_batch(rows=6, seq=5, vocab=11, seed=1):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (rows, seq + 1), generator=g)
    # Microbatches weigh unequally.
    mask = (torch.rand(rows, seq, generator=g) < torch.linspace(0.2, 0.95, rows)[:, None]).to(T)
    segments = (torch.arange(seq)[None] >= torch.randint(1, seq, (rows, 1), generator=g)).long()
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "targets": tokens[:, 1:].contiguous(),
        "mask": mask,
        "segments": segments,
    }


def layers_of(p):
    return p["layers"]


def whole(layers):
    """The model as a chain around a stack of layers, which can be split."""
    return chain(
        (lambda p: {"table": p["table"]}, embed),
        (layers_of, layers),
        (lambda p: {"table": p["table"], "norm": p["norm"]}, head),
    )


def ordinary(layers):
    """The model as a plain function."""
    return lambda p, ctx: head(p, layers(p["layers"], embed(p, None, ctx), ctx), ctx)


def loop(f):
    """A block for each layer in turn, without any machinery."""

    def run(layers, carry, ctx):
        for index in sorted(layers):
            carry = f(layers[index], carry, ctx)
        return carry

    return run


def rematted(f, policy):
    return f if policy is everything else remat(f, policy)


def backend(name, f):
    return f if name == "eager" else torch.compile(f, backend=name, fullgraph=True)


# A stand-in for parameters at rest: half of a leaf is stored, and the other half equals it.


def gather_half(t):
    return torch.cat([t, t])


def reduce_half(g):
    return g[: len(g) // 2] + g[len(g) // 2 :]


def each(how):
    return lambda tree, index=None: tree_map(lambda t: how(t) if isinstance(t, torch.Tensor) else t, tree)


HALF = Store(each(gather_half), each(reduce_half))


def halve(p):
    return {**p, "layers": {i: tree_map(lambda t: t[: len(t) // 2].clone(), q) for i, q in p["layers"].items()}}


def unhalve(p):
    return {**p, "layers": {i: tree_map(gather_half, q) for i, q in p["layers"].items()}}


def copies(tree):
    return tree_map(lambda t: t.clone().requires_grad_(), tree)


def ones(tree):
    return tree_map(torch.ones_like, tree)


def reference(p, batch, unshard=lambda p: p, layer=ref_block):
    """(value, gradients) by torch.autograd and the reference's own operations."""
    q = copies(p)
    value = scalar_of(lambda p, ctx: ref_run(p, ctx, layer))(unshard(q), batch)
    return value.detach(), like(p, torch.autograd.grad(value, leaves(q), allow_unused=True, materialize_grads=True))


def error(got, want):
    """The largest error of a leaf relative to its norm (or to 1e-3 of the whole gradient's root mean square, if that
    is larger).
    """
    got, want = ([t for t in leaves(tree) if t is not None] for tree in (got, want))
    want = [torch.as_tensor(w) for w in want]
    floor = 1e-3 * sum(w.square().sum() for w in want).sqrt() / len(want) ** 0.5
    errors = [(g - w).norm() / torch.maximum(w.norm(), floor) for g, w in zip(got, want, strict=True)]
    return max(float(rank) for e in errors for rank in per_rank(e))  # ranks may round differently


def close(got, want, tolerance=1e-12):
    worst = error(got, want)
    assert worst <= tolerance, worst
