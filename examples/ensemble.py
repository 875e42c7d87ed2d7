"""An ensemble over seeds: one `vmap` around whole trainings, initial values and optimizer steps included.

A training is a function of its seed, made of pure functions, so `vmap` trains all members at once: every product
becomes a batched one, and random numbers (initial values, dropout, data) are functions of each member's key. What it
shows, in float64: every member is what its seed gives when it is trained alone, and the ensemble's mean prediction is
better than its members are on the average.

    python ensemble.py --members 16
"""

import argparse
import time

import torch

import fmegatron as fm
from fmegatron.primitives import cross_entropy, dropout, embedding, rms_norm, swiglu

VOCAB, EMBED, MLP, ROWS, SEQ, STEPS = 16, 16, 32, 8, 8, 20
SH = fm.Sharding(precision=fm.Precision(params=torch.float64))
SPEC = {
    "embed": fm.Param((VOCAB, EMBED), "vocab embed", fm.normal(0.5)),
    "norm": fm.Param((EMBED,), "embed", fm.ones()),
    "gate": fm.Param((EMBED, MLP), "embed mlp", fm.normal(0.3)),
    "up": fm.Param((EMBED, MLP), "embed mlp", fm.normal(0.3)),
    "down": fm.Param((MLP, EMBED), "mlp embed", fm.normal(0.3)),
    "head": fm.Param((EMBED, VOCAB), "embed vocab", fm.normal(0.3)),
}


def logits(params, tokens, key=None):
    """tokens[batch seq] -> [batch seq vocab]; with a key, dropout."""
    x = embedding(params["embed"], tokens)
    h = rms_norm(x, params["norm"])
    h = swiglu(h @ params["gate"], h @ params["up"])
    h = h if key is None else dropout(h, 0.1, key)
    return (x + h @ params["down"]) @ params["head"]


def loss(params, batch, ctx):
    each = cross_entropy(logits(params, batch["tokens"], ctx.key), batch["labels"])
    return fm.Term(each, "batch seq", weight=torch.ones_like(each)), None


def text(key, rows):
    """Noisy sequences: the next token is the last one and 3, or any one."""
    steps = fm.random.bernoulli(fm.fold_in(key, "kind"), 0.7, (rows, SEQ + 1))
    other = fm.random.randint(fm.fold_in(key, "other"), (rows, SEQ + 1), 0, VOCAB)
    tokens = torch.where(steps, 3, other).cumsum(1) % VOCAB
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def train(seed):
    """The whole training from one key: (parameters, the loss of every step)."""
    optimizer = fm.optim.chain(fm.optim.clip_by_global_norm(1.0), fm.optim.adamw(1e-2))
    step = fm.train_step(loss, optimizer, sh=SH)
    params = fm.init(SPEC, fm.fold_in(seed, "init"), sh=SH)
    state = fm.TrainState(0, params, optimizer.init(params), fm.fold_in(seed, "steps"))
    losses = []
    for i in range(STEPS):
        state, metrics = step(state, text(fm.fold_in(fm.fold_in(seed, "data"), i), ROWS))
        losses.append(metrics["loss"])
    return state.params, torch.stack(losses)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=16)
    members = parser.parse_args().members
    keys = [fm.random.to_tensor(fm.key(seed)) for seed in range(members)]
    every_key = fm.Key(torch.stack([key.words for key in keys]))  # keys as data, one a member

    start = time.perf_counter()
    params, losses = torch.func.vmap(train)(every_key)
    together = time.perf_counter() - start
    start = time.perf_counter()
    alone = [train(key) for key in keys]
    apart = time.perf_counter() - start
    error = 0.0
    for i, (p, curve) in enumerate(alone):
        pairs = zip(fm.tree.leaves(params), fm.tree.leaves(p), strict=True)
        error = max(error, float((losses[i] - curve).abs().max()), *(float((a[i] - b).abs().max()) for a, b in pairs))
    print(f"{members} members: {together:.2f} s together, {apart:.2f} s one by one; equal to {error:.0e}")
    assert error < 1e-11 and len({float(x) for x in losses[:, -1]}) == members

    held_out = text(fm.key(1000), 64)
    every = torch.func.vmap(logits, (0, None))(params, held_out["tokens"]).log_softmax(-1)
    mean = every.exp().mean(0).log()  # of the members' probabilities
    label = held_out["labels"][..., None]
    single, both = (-p.gather(-1, label.expand(*p.shape[:-1], 1)).mean() for p in (every, mean))
    print(f"held-out loss: {losses[:, 0].mean():.3f} at first, a member {single:.4f}, the ensemble {both:.4f}")
    assert both < single < losses[:, 0].mean()
