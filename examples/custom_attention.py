"""An attention of one's own on any layout: talking heads (Shazeer et al. 2020), whose heads lie on `tp`.

Talking-heads attention mixes the scores of all heads before the softmax, and the weights of all heads behind it. With
heads over ranks that takes communication, and here one equation says so: the mix contracts over `heads` and its result
is cut along the new heads, which is a reduce-scatter. All else is plain PyTorch. What it shows:
`check` proves the annotations for every layout of these rules, and refuses a mix that forgets the other ranks' heads; in float64,
loss and gradients on every mesh of four ranks are those of one device.

    python custom_attention.py                                  # four simulated ranks, against one device
    torchrun --nproc-per-node 4 custom_attention.py dp=2,tp=2   # real ones
"""

import contextlib
import os
import sys

import torch

import fmegatron as fm
from fmegatron.primitives import embedding, linear_cross_entropy, rms_norm, rotary

VOCAB, EMBED, HEADS, HEAD, LAYERS, ROWS, SEQ = 16, 8, 4, 4, 2, 4, 8
RULES = fm.Rules(
    {"batch": "dp", "seq": None, "seq*": "tp", "key": None, "embed": None, "head": None, "vocab": "tp"}
    | {"heads": "tp", "new": None, "new*": "tp"},  # `new` names the mixed heads; as `new*` they are cut like `heads`
    store="dp",
    activations=("batch", "seq", "key"),
)
DOUBLE = fm.Precision(params=torch.float64)
WEIGHT = {"init": fm.normal(0.4), "over": "batch seq"}
LAYER = {
    "norm": fm.Param((EMBED,), "embed", fm.ones(), over="batch seq*"),
    **{n: fm.Param((EMBED, HEADS, HEAD), "embed heads head", **WEIGHT) for n in ("q", "k", "v")},
    **{n: fm.Param((HEADS, HEADS), "heads new", **WEIGHT) for n in ("mix_scores", "mix_weights")},
    "out": fm.Param((HEADS, HEAD, EMBED), "heads head embed", **WEIGHT),
}
TABLE = fm.Param((VOCAB, EMBED), "vocab embed", **WEIGHT)
SPEC = {"embed": TABLE, "layers": dict.fromkeys(range(LAYERS), LAYER), "head": TABLE}


def talk(x, w, sh):
    """Every head's scores become a mix of all heads': x[batch heads seq key]."""
    y = sh.dot(x, w, "batch heads seq key, heads new -> batch new* seq key")
    return sh(y, "batch new* seq key -> batch heads seq key")  # another name for it, nothing is sent


def talk_among_local_heads(x, w, sh):
    """What one would write on one device: wrong where a rank holds some of the heads only."""
    return torch.einsum("bhqk,hn->bnqk", x, w)


def attention(p, x, sh, mix):
    """x[batch seq embed], in the region of heads -> [batch seq* embed]."""
    q, k, v = (sh.dot(x, p[n], "batch seq embed, embed heads head -> batch seq heads head") for n in "qkv")
    positions = torch.arange(x.shape[1])
    q, k = rotary(q, positions), rotary(k, positions)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / HEAD**0.5
    masked = mix(scores, p["mix_scores"], sh).masked_fill(positions[None, :] > positions[:, None], -torch.inf)
    weights = mix(masked.softmax(-1), p["mix_weights"], sh)
    y = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    return sh.dot(y, p["out"], "batch seq heads head, heads head embed -> batch seq* embed")


def loss(params, batch, sh, mix=talk):
    p = sh.use(params, SPEC)
    x = embedding(p["embed"], batch["tokens"], sh=sh, vocab_size=VOCAB)
    for layer in p["layers"].values():
        h = sh(rms_norm(x, layer["norm"]), "batch seq* embed -> batch seq embed | heads")
        x = x + attention(layer, h, sh, mix)
    h = sh(x, "batch seq* embed -> batch seq embed | vocab")
    equation = "batch seq embed, vocab embed -> batch seq vocab"
    each = linear_cross_entropy(h, p["head"], batch["labels"], equation=equation, sh=sh, vocab_size=VOCAB)
    return sh.sum(each, "batch seq ->") / (ROWS * SEQ)


def results(sh, values, batch):
    """(loss, gradients at rest) on a mesh, of the parameters' and the batch's global values."""
    batch = {n: sh.shard(x, "batch seq") for n, x in batch.items()}
    return fm.value_and_grad(loss)(sh.shard_params(values, SPEC), batch, sh)


def worst(sh, got, want):
    """The largest difference of local gradients from the shards of the expected ones."""
    difference = fm.tree.tree_map(torch.sub, sh.local(got), sh.local(sh.shard_params(want, SPEC)))
    return max(float(x.abs().max()) for leaf in fm.tree.leaves(difference) for x in fm.simulation.per_rank(leaf))


if __name__ == "__main__":
    one = fm.Sharding(precision=DOUBLE)
    values = fm.init(SPEC, fm.key(0), sh=one)
    text = fm.random.randint(fm.key(1), (ROWS, SEQ + 1), 0, VOCAB)
    batch = {"tokens": text[:, :-1], "labels": text[:, 1:]}
    fm.check(loss, SPEC, values, batch, RULES)
    try:
        fm.check(lambda p, b, sh: loss(p, b, sh, talk_among_local_heads), SPEC, values, batch, RULES)
        raise AssertionError("the wrong mix passed")
    except fm.ShardingError as refusal:
        wrong = refusal
    value, grads = fm.value_and_grad(loss)(values, batch, one)
    lines = [
        "annotations checked for every layout of the rules",
        f"a mix of local heads is refused: {wrong}",
        f"{value:.12f} alone",
    ]

    real = "WORLD_SIZE" in os.environ  # under torchrun
    fm.join_processes()
    for axes in sys.argv[1:] or ["dp=2,tp=2", "dp=1,tp=4", "dp=4,tp=1"]:
        with contextlib.nullcontext() if real else fm.simulate(4):
            sh = fm.Sharding(fm.make_mesh(axes, device="cpu"), RULES, precision=DOUBLE)
            got, found = results(sh, values, batch)
            apart = worst(sh, found, grads)
            got = float(fm.simulation.per_rank(got)[0])
        lines.append(f"{got:.12f} on {axes}, gradients to {apart:.0e}")
        assert abs(got - value) < 1e-12 and apart < 1e-12
    if fm.is_first_process():
        print("\n".join(lines))
    fm.leave_processes()
