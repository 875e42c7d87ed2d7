"""Peak memory and time of a training step against the same step written with torch.autograd.grad in place.

    python tests/bench/step_memory.py [--device cuda] [--layers 8] [--embed 1024] [--seq 1024] [--batch 8]

The peer is the same mathematics as a plain function on the same parameters, differentiated by torch.autograd.grad
and updated in place by torch's fused AdamW: what someone would write by hand. Prints both and their ratio, measured
in one run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch
import torch.nn.functional as F

from fmegatron import tree
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.optim import adamw, chain, clip_by_global_norm
from fmegatron.precision import Precision, dtype_of
from fmegatron.random import key
from fmegatron.sharding import Sharding
from fmegatron.spec import init
from fmegatron.step import TrainState, train_step


def plain_loss(p, c, batch, dtype):
    """The model by hand: sdpa, rms_norm and cross_entropy of torch, chunked as ours."""
    x = F.embedding(batch["tokens"], p["embed"].to(dtype))
    pos = torch.arange(x.shape[1], device=x.device)
    freq = 1.0 / c.rope_base ** (torch.arange(0, c.head, 2, device=x.device) / c.head)
    angle = pos[:, None] * freq
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]

    def turn(t):
        a, b = t.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(t.dtype)

    for layer in p["layers"].values():
        w = {n: t.to(dtype) for n, t in layer.items()}
        h = F.rms_norm(x, (c.embed,), w["norm1"], c.norm_eps)
        q = turn((h @ w["q"].flatten(1)).unflatten(-1, (c.heads, c.head)))
        k = turn((h @ w["k"].flatten(1)).unflatten(-1, (c.kv_heads, c.head)))
        v = (h @ w["v"].flatten(1)).unflatten(-1, (c.kv_heads, c.head))
        a = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True)
        x = x + a.transpose(1, 2).flatten(2) @ w["o"].flatten(0, 2)
        h = F.rms_norm(x, (c.embed,), w["norm2"], c.norm_eps)
        x = x + (F.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
    h = F.rms_norm(x, (c.embed,), p["norm"].to(dtype), c.norm_eps)
    return LastLayer.apply(h.flatten(0, 1), p["head"].to(dtype), batch["labels"].flatten())


class LastLayer(torch.autograd.Function):
    """Chunked cross-entropy whose gradients are made in the forward pass."""

    @staticmethod
    def forward(ctx, x, w, labels, chunks=16):
        gx, gw, total = torch.empty_like(x), torch.zeros_like(w, dtype=torch.float32), torch.zeros((), device=x.device)
        for xs, ls, gs in zip(x.chunk(chunks), labels.chunk(chunks), gx.chunk(chunks), strict=True):
            logits = (xs @ w.T).float()
            lse = logits.logsumexp(-1)
            total += (lse - logits.gather(1, ls[:, None])[:, 0]).sum()
            p = (logits - lse[:, None]).exp_()
            p.scatter_add_(1, ls[:, None], torch.full_like(ls[:, None], -1, dtype=p.dtype))
            p = (p / len(x)).to(x.dtype)
            gs.copy_(p @ w)
            gw += p.T @ xs
        ctx.save_for_backward(gx, gw.to(w.dtype))
        return total / len(x)

    @staticmethod
    def backward(ctx, g):
        gx, gw = ctx.saved_tensors
        return gx * g, gw * g, None, None


def by_hand(params, c, dtype):
    flat = tree.leaves(params)
    m, v = [torch.zeros_like(t) for t in flat], [torch.zeros_like(t) for t in flat]
    count = [0]

    def step(batch):
        leaves = [t.detach().requires_grad_() for t in flat]
        loss = plain_loss(tree.like(params, leaves), c, batch, dtype)
        grads = torch.autograd.grad(loss, leaves)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        count[0] += 1
        n = [torch.tensor(float(count[0]), device=flat[0].device)] * len(flat)
        with torch.no_grad():
            torch._fused_adamw_(
                flat,
                grads,
                m,
                v,
                [],
                n,
                lr=1e-4,
                beta1=0.9,
                beta2=0.95,
                weight_decay=0.1,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
        return loss.detach()

    return step


def ours(params, model, sh):
    optimizer = chain(clip_by_global_norm(1.0), adamw(1e-4))
    step = train_step(model.loss, optimizer, weights=model.weights, sh=sh, donate=True)
    box = [TrainState(0, params, optimizer.init(params), key(1))]

    def run(batch):
        box[0], metrics = step(box[0], batch)
        return metrics["loss"]

    return run


def measure(step, batch, device, repeats):
    losses = [float(step(batch)) for _ in range(2)]
    times, peak = [], 0.0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        start = time.perf_counter()
        losses.append(float(step(batch)))
        times.append(time.perf_counter() - start)
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    return statistics.median(times), peak, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compute", default=None)
    for name, value in dict(
        layers=8, embed=1024, heads=16, kv_heads=4, mlp=4096, vocab=32768, seq=1024, batch=8, repeats=5
    ).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    dtype = dtype_of(a.compute or ("bfloat16" if a.device == "cuda" else "float32"))
    c = DecoderConfig(vocab=a.vocab, embed=a.embed, layers=a.layers, heads=a.heads, kv_heads=a.kv_heads, mlp=a.mlp)
    model, sh = Decoder(c), Sharding(precision=Precision(compute=dtype))
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, a.vocab, (a.batch, a.seq + 1), generator=g).to(a.device)
    batch = {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    found = {}
    for name, make in {
        "by hand": lambda p: by_hand(p, c, dtype),
        "fmegatron": lambda p: ours(p, model, sh),
    }.items():
        step = make(init(model.spec(), key(0), sh=sh, device=a.device))
        found[name] = measure(step, batch, a.device, a.repeats)
        del step
        gc.collect()
        if a.device == "cuda":
            torch.cuda.empty_cache()
        t, peak, losses = found[name]
        print(
            f"{name:10} {t * 1e3:9.1f} ms  peak {peak:9.1f} MiB  losses {' '.join(f'{x:.4f}' for x in losses)}",
            flush=True,
        )
    (t0, p0, _), (t1, p1, _) = found.values()
    print(f"ratio fmegatron / by hand: time {t1 / t0:.3f}" + (f", peak memory {p1 / p0:.3f}" if p0 else ""))


if __name__ == "__main__":
    main()
