"""Memory and time of attention, forward and backward, at growing lengths for each mask and form, against torch's
own attention where it has the mask.

    python tests/bench/attention_memory.py [--device cuda] [--lengths 4096 8192 16384]

Linear memory doubles with the length; an S × S matrix would quadruple it. The last column is the growth per doubling.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F

from fmegatron.primitives import attention


def documents(seq: int, device: str) -> torch.Tensor:
    """Packed documents of unequal lengths: int[1 seq]."""
    bounds = torch.tensor([0.11, 0.3, 0.34, 0.7]) * seq
    return (torch.arange(seq)[None, :, None] >= bounds.long()).sum(-1).to(device)


def run(f, q, k, v, device):
    """(MiB above the inputs at the peak, ms) of forward and backward."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    for _ in range(2):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        start = time.perf_counter()
        out = f(*leaves)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        if device == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        peak = (torch.cuda.max_memory_allocated() - base) / 2**20 if device == "cuda" else float("nan")
        del out
    return peak, took * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    a = parser.parse_args()
    for dtype in (getattr(torch, d) for d in a.dtypes):
        print(f"{dtype}: peak MiB above the inputs (ms) by length; growth from the last but one length to the last")
        masks = {
            "causal": lambda q, k, v: attention(q, k, v),
            "full": lambda q, k, v: attention(q, k, v, causal=False),
            "documents": lambda q, k, v: attention(q, k, v, segments=documents(q.shape[1], a.device)),
            "documents, full": lambda q, k, v: attention(
                q, k, v, causal=False, segments=documents(q.shape[1], a.device)
            ),
            "positions": lambda q, k, v: attention(q, k, v, positions=torch.arange(q.shape[1], device=a.device)),
            "window of 1024": lambda q, k, v: attention(q, k, v, window=1024),
            "window, positions": lambda q, k, v: attention(
                q, k, v, window=1024, positions=torch.arange(q.shape[1], device=a.device)
            ),
            "sinks": lambda q, k, v: attention(q, k, v, sinks=q.new_zeros(q.shape[2:4])),
            "soft cap": lambda q, k, v: attention(q, k, v, softcap=50.0),
            "soft cap, window": lambda q, k, v: attention(q, k, v, softcap=50.0, window=1024),
            "torch, causal": lambda q, k, v: F.scaled_dot_product_attention(
                *(t.transpose(1, 2) for t in (q.flatten(2, 3), k, v)), is_causal=True, enable_gqa=True
            ),
        }
        for name, f in masks.items():
            row = []
            for seq in a.lengths:
                g = torch.Generator(a.device).manual_seed(0)
                q = torch.randn(1, seq, 2, 4, 128, device=a.device, dtype=dtype, generator=g)
                k, v = (torch.randn(1, seq, 2, 128, device=a.device, dtype=dtype, generator=g) for _ in "kv")
                row.append(run(f, q, k, v, a.device))
            growth = row[-1][0] / row[-2][0] if len(row) > 1 else float("nan")
            cells = "  ".join(f"{m:9.1f} ({t:7.1f})" for m, t in row)
            print(f"  {name:18} {cells}  ×{growth:.2f}", flush=True)


if __name__ == "__main__":
    main()
