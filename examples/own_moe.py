"""A mixture of experts of one's own: the router, the experts and the loss are plain functions; layouts are chosen outside.

On one process: `python own_moe.py`; on four, with the same losses, two experts on each (mesh, then experts' ranks):
`torchrun --nproc-per-node 4 own_moe.py dp=2,tp=2 4`
"""

import dataclasses
import sys

import fmegatron as fm
from fmegatron.parallel.folding import expert_factoring
from fmegatron.parallel.moe import moe
from fmegatron.parallel.routing import Routed
from fmegatron.primitives import embedding, linear_cross_entropy, rms_norm
from fmegatron.primitives.grouped import grouped_product
from fmegatron.rules import standard_rules

VOCAB, EMBED, EXPERTS, WIDTH, TOP, LAYERS, BATCH, SEQ = 64, 32, 8, 16, 2, 2, 8, 16


def spec():
    """Which parameters exist: shapes, named dims, and the dims that each is applied across. Among experts tokens lie on
    batch' and seq', whatever axes the experts take."""
    layer = {
        "norm": fm.Param((EMBED,), "embed", fm.ones(), over="batch seq*"),
        "router": fm.Param((EMBED, EXPERTS), "embed route", over="batch seq*"),
        "up": fm.Param((EXPERTS, EMBED, WIDTH), "expert embed emlp", over="batch' seq'"),
        "down": fm.Param((EXPERTS, WIDTH, EMBED), "expert emlp embed", over="batch' seq'"),
    }
    table = fm.Param((VOCAB, EMBED), "vocab embed", fm.normal(0.5), over="batch seq")
    return {"embed": table, "layers": dict.fromkeys(range(LAYERS), layer), "head": table}


def choose(p, x, ctx):
    """A router: the two best experts of each token, weighed by a sigmoid each."""
    logits = ctx.sh.dot(x, p["router"], "batch seq* embed, embed route -> batch seq* route")
    chosen = logits.detach().topk(TOP).indices
    return Routed(chosen, logits.gather(-1, chosen).sigmoid(), logits.softmax(-1), logits, chosen)


def squared_relu(rows, weights, ends, p, *, sh):
    """Experts: rows[row embed] are sorted by expert; ends[expert] is where each one's stop."""
    h = grouped_product(rows, p["up"], ends).relu().square()
    return grouped_product(h * weights[:, None], p["down"], ends)


layer = moe(choose, squared_relu, number=EXPERTS)


def loss(params, batch, ctx):
    """The loss of each token, and one that keeps the router's logits small."""
    sh, s = ctx.sh, spec()
    x, small = embedding(sh.use(params["embed"], s["embed"]), batch["tokens"], sh=sh, vocab_size=VOCAB), 0.0
    for p in sh.use(params["layers"], s["layers"]).values():
        y, routed = layer(p, rms_norm(x, p["norm"]), ctx)
        x, small = x + y, small + routed.logits.logsumexp(-1).square()
    h = sh(x, "batch seq* embed -> batch seq embed | vocab")
    table, equation = sh.use(params["head"], s["head"]), "batch seq embed, vocab embed -> batch seq vocab"
    each = linear_cross_entropy(h, table, batch["labels"], equation=equation, sh=sh, vocab_size=VOCAB)
    small = small * sh(batch["labels"] >= 0, "batch seq -> batch seq*")
    return {"tokens": fm.Term(each, "batch seq"), "router": fm.Term(small, "batch seq*")}, None


def weights(batch):
    """What each term is divided by, and its coefficient."""
    real = batch["labels"] >= 0
    return {"tokens": fm.Weight(real, "batch seq"), "router": fm.Weight(real, "batch seq", 1e-3)}


if __name__ == "__main__":
    fm.join_processes()
    axes, ep = (*sys.argv[1:], "dp=1,tp=1")[0], int((*sys.argv[2:], "1")[0])
    mesh = fm.make_mesh(axes, also=expert_factoring(axes, ep=ep), device="cpu")
    rules = standard_rules(mesh, sequence_parallel=True, zero=3)
    sh = fm.Sharding(mesh, dataclasses.replace(rules, activations=tuple(rules.compute)))  # also for dims it lacks
    optimizer = fm.optim.chain(fm.optim.clip_by_global_norm(1.0), fm.optim.adamw(1e-2))
    step = fm.train_step(loss, optimizer, weights=weights, sh=sh, microbatches=2)
    params = fm.init(spec(), fm.key(0), sh=sh)
    state = fm.TrainState(0, params, optimizer.init(params), fm.key(1))
    text = fm.random.randint(fm.key(2), (BATCH, SEQ + 1), 0, VOCAB).cumsum(1) % VOCAB  # the same on every rank
    batch = {"tokens": sh.shard(text[:, :-1], "batch seq"), "labels": sh.shard(text[:, 1:], "batch seq")}
    for _ in range(20):
        state, metrics = step(state, batch)
        if fm.is_first_process():
            print(f"{state.step:3}  {metrics['loss'].item():.6f}")
    fm.leave_processes()
