"""A model of one's own: pure functions, a mesh with rules, and a train step.

On one process: `python own_model.py`; on four, with the same losses: `torchrun --nproc-per-node 4 own_model.py dp=2,tp=2`
"""

import sys

import torch

import fmegatron as fm
from fmegatron.primitives import embedding, linear_cross_entropy, rms_norm, swiglu

VOCAB, EMBED, MLP, LAYERS, BATCH, SEQ = 64, 32, 96, 2, 8, 16


def spec():
    """Which parameters exist: shapes, named dims, and the dims that each is applied across."""
    layer = {
        "norm": fm.Param((EMBED,), "embed", fm.ones(), over="batch seq*"),
        "gate": fm.Param((EMBED, MLP), "embed mlp", over="batch seq"),
        "up": fm.Param((EMBED, MLP), "embed mlp", over="batch seq"),
        "down": fm.Param((MLP, EMBED), "mlp embed", over="batch seq"),
    }
    table = fm.Param((VOCAB, EMBED), "vocab embed", fm.normal(0.5), over="batch seq")
    return {"embed": table, "layers": dict.fromkeys(range(LAYERS), layer), "head": table}


def embed(params, batch, ctx):
    """What comes before the layers."""
    return embedding(ctx.sh.use(params["embed"], spec()["embed"]), batch["tokens"], sh=ctx.sh, vocab_size=VOCAB)


def block(p, x, ctx):
    """One layer. Equations over named dims say where collectives may happen."""
    h = ctx.sh(rms_norm(x, p["norm"]), "batch seq* embed -> batch seq embed | mlp")
    gate, up = (ctx.sh.dot(h, p[n], "batch seq embed, embed mlp -> batch seq mlp") for n in ("gate", "up"))
    return x + ctx.sh.dot(swiglu(gate, up), p["down"], "batch seq mlp, mlp embed -> batch seq* embed")


def head(params, x, batch, ctx):
    """What comes behind them: the loss of every token."""
    h = ctx.sh(x, "batch seq* embed -> batch seq embed | vocab")
    table, equation = ctx.sh.use(params["head"], spec()["head"]), "batch seq embed, vocab embed -> batch seq vocab"
    each = linear_cross_entropy(h, table, batch["labels"], equation=equation, sh=ctx.sh, vocab_size=VOCAB)
    return fm.Term(each, "batch seq", weight=torch.ones_like(each)), None


def loss(params, batch, ctx):
    """The parts in turn. (One function would do, but a pipeline runs them on several ranks.)"""
    x = embed(params, batch, ctx)
    for p in ctx.sh.use(params["layers"], spec()["layers"]).values():
        x = block(p, x, ctx)
    return head(params, x, batch, ctx)


if __name__ == "__main__":
    fm.join_processes()
    mesh = fm.make_mesh(sys.argv[1] if len(sys.argv) > 1 else "dp=1,tp=1", device="cpu")
    rules = fm.Rules({"batch": "dp", "seq": None, "seq*": "tp", "embed": None, "mlp": "tp", "vocab": "tp"}, store="dp")
    sh = fm.Sharding(mesh, rules)
    optimizer = fm.optim.chain(fm.optim.clip_by_global_norm(1.0), fm.optim.adamw(1e-2))
    gradients = fm.accumulate(loss, microbatches=2)

    def step(state, batch):
        """Yours to edit: from a state and a batch to the next state."""
        ctx = fm.Ctx(sh=sh, key=fm.fold_in(state.key, state.step))
        (value, _), grads = gradients(state.params, batch, ctx)
        params, _, opt = optimizer.update(state.params, grads, state.opt)
        return fm.TrainState(state.step + 1, params, opt, state.key), value

    params = fm.init(spec(), fm.key(0), sh=sh)
    state = fm.TrainState(0, params, optimizer.init(params), fm.key(1))
    text = fm.random.randint(fm.key(2), (BATCH, SEQ + 1), 0, VOCAB).cumsum(1) % VOCAB  # the same on every rank
    batch = {"tokens": sh.shard(text[:, :-1], "batch seq"), "labels": sh.shard(text[:, 1:], "batch seq")}
    for _ in range(20):
        state, value = step(state, batch)
        if fm.is_first_process():
            print(f"{state.step:3}  {value.item():.6f}")
    fm.leave_processes()
