"""A small model that uses every kind of annotation: GQA with query heads as two dims, a norm over all heads, a rope key shared by
sharded heads, tied embeddings, mixture of experts (dense or by all-to-all), context parallelism by gathering keys.

`bug` names one deliberate error: `pick(good, name=bad)` gives the bad text then. Each is a mistake that a user could make.
"""

import torch
import torch.nn.functional as F

from fmegatron.initializers import Normal
from fmegatron.rules import Rules
from fmegatron.spec import Param

B, S, D, KV, G, HEAD, ROPE, V, FF, E, FE, TOP = 4, 8, 8, 4, 2, 4, 2, 16, 16, 8, 4, 2
TOKEN, STREAM, REGION = "batch seq", "batch seq*", "batch seq kv group"
NAMES = ("batch", "seq", "kv", "group", "mlp", "vocab", "expert", "emlp")
UNSHARDED = ("embed", "head", "rope", "route", "all")
ACTIVATIONS = ("batch", "seq", "all")


def rules(store=(), **rows):
    """A rule table; dims without a row are not sharded."""
    compute = {n: rows.pop(n, None) for n in NAMES} | dict.fromkeys(UNSHARDED)
    return Rules(compute={**compute, **rows}, store=store, activations=ACTIVATIONS)


def chooser(bug):
    return lambda good, **bad: bad.get(bug, good)


def spec(bug=None, with_over=True):
    o = chooser(bug)

    def param(shape, dims, over, about=0.0):
        return Param(shape, dims, Around(about), over=over if with_over else None)

    def block(moe):
        p = dict(
            n1=param((D,), "embed", o(STREAM, norm_over=TOKEN, norm_over_heads="batch seq* kv group"), 1.0),
            q=param((D, KV, G, HEAD), "embed kv group head", o(TOKEN, q_over="batch")),
            bq=param((KV, G, HEAD), "kv group head", TOKEN),
            qn=param((KV, G, HEAD), "kv group head", TOKEN, 1.0),
            k=param((D, KV, HEAD), "embed kv head", o("batch seq group", k_over=TOKEN)),
            v=param((D, KV, HEAD), "embed kv head", "batch seq group"),
            kn=param((KV, HEAD), "kv head", o("batch seq group", kn_over=TOKEN), 1.0),
            qr=param((D, KV, G, ROPE), "embed kv group rope", TOKEN),
            kr=param((D, ROPE), "embed rope", o(REGION, rope_key_over=TOKEN)),
            o=param((KV, G, HEAD, D), "kv group head embed", TOKEN),
            bo=param((D,), "embed", o(STREAM, out_bias_over=TOKEN)),
            n2=param((D,), "embed", STREAM, 1.0),
        )
        if moe:
            p |= dict(
                router=param((D, E), "embed route", o(STREAM, router_over=TOKEN)),
                eg=param((E, D, FE), "expert embed emlp", o(TOKEN, expert_over="")),
                eu=param((E, D, FE), "expert embed emlp", TOKEN),
                ed=param((E, FE, D), "expert emlp embed", TOKEN),
            )
        else:
            p |= dict(
                gate=param((D, FF), "embed mlp", TOKEN),
                up=param((D, FF), "embed mlp", TOKEN),
                down=param((FF, D), "mlp embed", TOKEN),
            )
        return p

    return dict(
        emb=param((V, D), "vocab embed", o(TOKEN, emb_over=STREAM)),
        nf=param((D,), "embed", STREAM, 1.0),
        blocks={0: block(False), 1: block(True)},
    )


class Around(Normal):
    """Normal(0.5) around a mean."""

    def __init__(self, mean):
        super().__init__(0.5)
        object.__setattr__(self, "mean", mean)

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) + self.mean


def rope(x, positions):
    n = x.shape[-1] // 2
    angle = positions[:, None].to(x.dtype) * 0.7 ** torch.arange(1, n + 1, dtype=x.dtype)
    cos, sin = (t[(slice(None),) + (None,) * (x.ndim - 3)] for t in (angle.cos(), angle.sin()))
    a, b = x[..., :n], x[..., n:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def norm(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


def attention(p, x, sh, bug):
    e = chooser(bug)
    enter = e(
        "batch seq* embed -> batch seq embed | kv group",
        no_region="batch seq* embed -> batch seq embed",
        wrong_region="batch seq* embed -> batch seq embed | mlp",
        half_region="batch seq* embed -> batch seq embed | kv",
    )
    u = sh(norm(x, p["n1"]), enter)
    q = sh.dot(u, p["q"], "batch seq embed, embed kv group head -> batch seq kv group head") + p["bq"]
    k, v = (sh.dot(u, p[n], "batch seq embed, embed kv head -> batch seq kv head") for n in "kv")
    qr = sh.dot(u, p["qr"], "batch seq embed, embed kv group rope -> batch seq kv group rope")
    kr = sh.dot(u, p["kr"], "batch seq embed, embed rope -> batch seq rope")
    # one norm over all heads, though they are sharded
    total = e("batch seq kv group head -> batch seq | kv group", qnorm_invariant="batch seq kv group head -> batch seq")
    qq = (q * q).sum((2, 3, 4)) if bug == "qnorm_local" else sh.sum(q * q, total)
    q = q * torch.rsqrt(qq / (KV * G * HEAD) + 1e-6)[..., None, None, None] * p["qn"]
    kk = sh.sum(k * k, "batch seq kv head -> batch seq | kv")
    k = k * torch.rsqrt(kk / (KV * HEAD) + 1e-6)[..., None, None] * p["kn"]
    pos = torch.arange(q.shape[1]) if bug == "local_positions" else sh.index("seq", S)
    q, k, qr, kr = (rope(t, pos) for t in (q, k, qr, kr))
    # context parallel: every rank reads all keys, each for other queries
    full = e("batch seq kv head -> batch all kv head | seq", cp_invariant="batch seq kv head -> batch all kv head")
    k, v, kr = sh(k, full), sh(v, full), sh(kr, "batch seq rope -> batch all rope | seq")
    kpos = sh(pos, "seq -> all | seq")

    def attend(q, k, v, qr, kr, pos, kpos):
        s = (torch.einsum("bqngd,bknd->bngqk", q, k) + torch.einsum("bqngd,bkd->bngqk", qr, kr)) * 0.5
        s = s.masked_fill(kpos[None, :] > pos[:, None], float("-inf"))
        return torch.einsum("bngqk,bknd->bqngd", s.softmax(-1), v)

    sides = (
        REGION + " head",
        "batch all kv head",
        "batch all kv head",
        REGION + " rope",
        "batch all rope",
        "seq",
        "all",
    )
    a = sh.primitive(attend, (q, k, v, qr, kr, pos, kpos), sides, REGION + " head")
    if bug == "region_to_stream":
        x = x + u.mean(1, keepdim=True)
    out = e(
        "batch seq kv group head, kv group head embed -> batch seq* embed",
        out_region="batch seq kv group head, kv group head embed -> batch seq* embed | kv group",
    )
    return sh.dot(a, p["o"], out) + p["bo"], x


def mlp(p, x, sh, bug):
    e = chooser(bug)
    enter = e(
        "batch seq* embed -> batch seq embed | mlp",
        mlp_region_heads="batch seq* embed -> batch seq embed | kv group",
    )
    u = sh(norm(x, p["n2"]), enter)
    g, u = (sh.dot(u, p[n], "batch seq embed, embed mlp -> batch seq mlp") for n in ("gate", "up"))
    return sh.dot(F.silu(g) * u, p["down"], "batch seq mlp, mlp embed -> batch seq* embed")


def moe(p, x, sh, kind, bug):
    """-> (output, auxiliary loss of each sequence). The router is on the stream; a routing group is one sequence."""
    e, n = chooser(bug), norm(x, p["n2"])
    logits = sh.dot(n, p["router"], "batch seq* embed, embed route -> batch seq* route")
    probs = torch.softmax(logits, -1)
    pick = (probs >= probs.detach().topk(TOP, -1).values[..., -1:]).to(probs.dtype)
    gate = probs * pick
    if bug != "gate_local_norm":
        gate = gate / gate.sum(-1, keepdim=True)
    if kind == "dense":  # every expert sees every token, gates pick
        g = sh(gate, "batch seq* route -> batch' seq' expert")
        if bug == "gate_local_norm":
            g = g / (g.sum(-1, keepdim=True) + 1e-9)
        enter = e(
            "batch seq* embed -> batch' seq' embed | expert emlp",
            moe_no_region="batch seq* embed -> batch' seq' embed | emlp",
        )
        u = sh(n, enter)
        a, b = (
            sh.dot(u, p[w], "batch' seq' embed, expert embed emlp -> expert batch' seq' emlp") for w in ("eg", "eu")
        )
        y = sh.dot(F.silu(a) * b, p["ed"], "expert batch' seq' emlp, expert emlp embed -> expert batch' seq' embed")
        y = sh.dot(y, g, "expert batch' seq' embed, batch' seq' expert -> batch seq* embed")
    else:  # each expert gets the tokens that picked it, and sends its results back
        u = sh(n[:, :, None] * pick[..., None], "batch seq* route embed -> batch' seq' expert embed")
        u = sh(u, "batch' seq' expert embed -> batch' seq' expert embed | emlp")
        a, b = (
            sh.dot(u, p[w], "batch' seq' expert embed, expert embed emlp -> batch' seq' expert emlp")
            for w in ("eg", "eu")
        )
        y = sh.dot(F.silu(a) * b, p["ed"], "batch' seq' expert emlp, expert emlp embed -> batch' seq' expert embed")
        y = (sh(y, "batch' seq' expert embed -> batch seq* route embed") * gate[..., None]).sum(2)
    if bug == "aux_local":
        f, m = pick.sum(1), probs.sum(1)
    else:
        f, m = (sh.sum(t, "batch seq* route -> batch route") for t in (pick, probs))
    return y, (f * m).sum(-1)


def loss(params, batch, sh, sp, kind="dense", bug=None):
    e = chooser(bug)
    tokens, labels = batch["tokens"], batch["labels"]
    emb, nf = sh.use(params["emb"], sp["emb"]), sh.use(params["nf"], sp["nf"])
    ids = torch.arange(sh.local_size("vocab", V)) if bug == "vocab_local" else sh.index("vocab", V)

    def onehot(t):
        return (sh(t, "batch seq -> batch seq | vocab")[..., None] == ids).to(emb.dtype)

    x = sh.dot(onehot(tokens), emb, "batch seq vocab, vocab embed -> batch seq* embed")
    for i in (0, 1):
        p = sh.use(params["blocks"][i], sp["blocks"][i])
        y, x = attention(p, x, sh, bug)
        x = x + y
        if "router" in p:
            y, aux = moe(p, x, sh, kind, bug)
        else:
            y = mlp(p, x, sh, bug)
        x = x + y
    leave = e("batch seq* embed -> batch seq embed | vocab", head_no_region="batch seq* embed -> batch seq embed")
    x = sh(norm(x, nf), leave)
    logits = sh.dot(x, emb, "batch seq embed, vocab embed -> batch seq vocab")
    if bug == "max_local":
        largest = logits.detach().amax(-1)
    else:
        largest = sh.max(logits, "batch seq vocab -> batch seq | vocab")
    logits = logits - largest[..., None]
    total = e("batch seq vocab -> batch seq", ce_region="batch seq vocab -> batch seq | vocab")
    z = logits.exp().sum(-1) if bug == "ce_local" else sh.sum(logits.exp(), total)
    per = z.log() - sh.sum(logits * onehot(labels), total)
    if bug == "weights_local":
        per = per * torch.linspace(0.5, 1.5, per.shape[1], dtype=per.dtype)
    if bug == "mean_local":
        ce = sh.sum(per / per.numel(), "batch seq ->") * (B * S)
    elif bug == "loss_local":
        ce = per.sum()
    elif bug == "loss_no_seq":
        ce = sh.sum(per.sum(1), "batch ->")
    else:
        ce = sh.sum(per, "batch seq ->")
    if bug == "loss_twice":
        ce = sh.sum(ce[None, None], "batch seq ->")
    out = ce / (B * S) + 0.01 * sh.sum(aux, "batch ->") / B
    if bug == "penalty":  # a term of parameters alone, through `use`
        w = sh.use(params["blocks"][0]["q"], sp["blocks"][0]["q"])
        out = out + 0.01 * sh.sum(w * w, "embed kv group head ->")
    return out


BUGS = """norm_over norm_over_heads q_over k_over kn_over rope_key_over out_bias_over router_over expert_over emb_over
no_region wrong_region half_region qnorm_local qnorm_invariant local_positions cp_invariant region_to_stream out_region
mlp_region_heads gate_local_norm moe_no_region aux_local vocab_local head_no_region max_local ce_local ce_region weights_local
mean_local loss_local loss_no_seq loss_twice penalty""".split()
