"""Predictions beside published figures on H100s, none of which any constant was fitted to.

    python tests/bench/plan_published.py          # on a CPU, some seconds

Tokens/s a GPU by NVIDIA's published layouts (Megatron Bridge 25.11 and Megatron-LM's examples of Llama), at 8,192 tokens a sequence
but where a source says otherwise. What we predict is this library on that layout with the table's H100, not Megatron's kernels: the
layouts are the sources', their global batches those of the sources, or 128 sequences where none is said.
"""

from __future__ import annotations

import argparse
import json

import torch

from fmegatron.fp8 import Fp8
from fmegatron.models import PRESETS, Decoder
from fmegatron.plan import Cluster, Model, Setting, estimate, hardware
from fmegatron.precision import Precision
from fmegatron.testing.layout import Layout

# (name, preset, GPUs, layout, sequences, tokens of one, published tokens/s a GPU)
PUBLISHED = (
    ("Llama 3 8B, 8 GPUs, sharded data-parallel", "llama3-8b", 8, "dp=8 zero=3 micro=16", 128, 8192, 14451),
    (
        "Llama 3 70B, 64 GPUs, TP4 PP8 VP5",
        "llama3-70b",
        64,
        "pp=8,dp=2,tp=4 sp zero=1 micro=64 schedule=interleaved virtual=5",
        128,
        8192,
        1621,
    ),
    (
        "Llama 3.1 405B, 1,024 GPUs, TP8 PP8 CP2 VP8",
        "llama3.1-405b",
        1024,
        "pp=8,dp=8,cp=2,tp=8 sp zero=1 micro=64 schedule=interleaved virtual=8 context=ring",
        512,
        8192,
        315,
    ),
    (
        "Qwen3 30B-A3B, 16 GPUs, PP2 VP24 EP8",
        "qwen3-30b-a3b",
        16,
        "pp=2,dp=8 zero=1 ep=8 micro=64 schedule=interleaved virtual=24",
        512,
        4096,
        5275,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = []
    print(f"{'':46} {'published':>10} {'plan':>10} {'error':>8} {'GiB':>7}")
    for name, preset, gpus, line, sequences, seq, published in PUBLISHED:
        precision = Precision(params=torch.bfloat16, fp8=Fp8("tensorwise"))
        setting = Setting(Layout.parse(line), sequences, seq, precision, torch.float32, torch.float32)
        found = estimate(Model(Decoder(PRESETS[preset])), setting, Cluster(hardware(args.gpu), gpus))
        error = found.tokens_per_second / published - 1
        print(
            f"{name:46} {published:10,} {found.tokens_per_second:10,.0f} {100 * error:+7.1f}% {found.memory.total / 2**30:7.1f}",
            flush=True,
        )
        parts = {n: round(t / found.seconds, 3) for n, t in found.spent.parts.items()}
        print(f"    {line}: {parts}")
        rows.append(
            {"name": name, "published": published, "plan": found.tokens_per_second, "error": error, "time": parts}
        )
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
