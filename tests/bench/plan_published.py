"""Predictions beside published figures on H100s, none of which any constant was fitted to, and what explains the difference.

    python tests/bench/plan_published.py          # on a CPU, some seconds

Tokens/s a GPU by NVIDIA's published layouts (Megatron Bridge's performance summary, releases 25.09 and 25.11: FP8 current scaling, one
sequence of 8,192 tokens a microbatch, two of 4,096 for Qwen). What we predict is this library on that layout with the table's H100,
not Megatron's kernels. So behind each line stands what the prediction would be if this library did as that run does, one thing after
another, as far as the planner can tell:

    tp beside products      tensor-parallel gathers and scatters run beside the products' chunks (its user buffers; here --overlap, which is
                            not there for fp8): all but a quarter, where products take long enough
    fused sums              a weight's gradient is added to the fp32 sum by the product that makes it, not in a pass of its own
    fused casts             operands are cast to fp8, with their scales, where they are made, and that takes nothing: an upper bound

and what no number of the planner stands for, in words.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron.fp8 import Fp8
from fmegatron.models import PRESETS, Decoder
from fmegatron.plan import Cluster, Model, Setting, estimate, hardware, timing
from fmegatron.precision import Precision
from fmegatron.testing.layout import Layout

HALF = Precision(params=torch.bfloat16)
QWEN = "pp=2,dp=8 zero=1 ep=8 micro=32 schedule=interleaved virtual=24"
DROPLESS = (
    "what a dropless run adds. With a capacity the same GPUs and layout are twice as fast (next line), and loads were forced to be even "
    "here; so it is neither the products of experts nor an imbalance, but 8 ms of every layer and direction, in which sizes are read on "
    "the host and kernels behind them are launched late: likely, not measured"
)


@dataclass(frozen=True)
class Run:
    """A published figure: tokens/s a GPU, at a layout. why: what the planner does not know of it."""

    name: str
    preset: str
    gpus: int
    layout: str
    rows: int
    seq: int
    published: int
    why: str


RUNS = (
    Run(
        "Llama 3 8B, 8 GPUs, sharded data-parallel",
        "llama3-8b",
        8,
        "dp=8 zero=3 micro=16",
        128,
        8192,
        14451,
        "that run's fused casts",
    ),
    Run(
        "Llama 3 70B, 64 GPUs, TP4 PP8 VP5",
        "llama3-70b",
        64,
        "pp=8,dp=2,tp=4 sp zero=1 micro=64 schedule=interleaved virtual=5",
        128,
        8192,
        1621,
        "memory: this library's activations would not fit (that run keeps inputs of products in fp8); releases: 1,602 to 1,621",
    ),
    Run(
        "Llama 3.1 405B, 1,024 GPUs, TP8 PP8 CP2 VP8",
        "llama3.1-405b",
        1024,
        "pp=8,dp=8,cp=2,tp=8 sp zero=1 micro=64 schedule=interleaved virtual=8 context=ring",
        512,
        8192,
        315,
        "memory, as for 70B; gathers of parameters beside the optimizer; releases: 292 to 315",
    ),
    Run("Qwen3 30B-A3B, 16 GPUs, PP2 VP24 EP8, dropless", "qwen3-30b-a3b", 16, QWEN, 512, 4096, 5275, DROPLESS),
    Run(
        "the same with a capacity (25.09)",
        "qwen3-30b-a3b",
        16,
        QWEN,
        512,
        4096,
        10494,
        "tokens beyond the capacity, which leave less work there",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = []
    print(f"{'':48} {'published':>10} {'plan':>10} {'error':>8} {'GiB':>7}")
    for run in RUNS:
        row = predicted(run, Cluster(hardware(args.gpu), run.gpus))
        rows.append(row)
        print(
            f"{run.name:48} {run.published:10,} {row['plan']:10,.0f} {100 * row['error']:+7.1f}% {row['GiB']:7.1f}",
            flush=True,
        )
        print(f"    {run.layout}: " + ", ".join(f"{n} {100 * t:.1f} %" for n, t in row["time"].items() if t > 0.0005))
        steps = [f"{n} {100 * e:+.1f} %" for n, e in row["as there"].items()]
        if steps:
            print(f"    if it did as that run does: {', then '.join(steps)}")
        print(f"    not modelled: {run.why}")
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


def predicted(run: Run, cluster: Cluster) -> dict[str, Any]:
    """The prediction of a run, and its errors if one thing after another was as there."""
    model = Model(Decoder(PRESETS[run.preset]))
    fp8 = dataclasses.replace(HALF, fp8=Fp8("tensorwise"))
    setting = Setting(Layout.parse(run.layout), run.rows, run.seq, fp8, torch.float32, torch.float32)
    found = estimate(model, setting, cluster)
    changed, seconds = {}, found.seconds
    if "tp" in setting.layout.axes:
        cut = dataclasses.replace(setting, layout=dataclasses.replace(setting.layout, overlap=4))
        seconds += estimate(model, cut, cluster).spent.exposed["tp"] - found.spent.exposed["tp"]
        changed["tp beside products"] = seconds
    with sums_for_nothing():
        seconds += estimate(Model(model.model), setting, cluster).spent.memory_bound - found.spent.memory_bound
    changed["fused sums"] = seconds
    half = estimate(model, dataclasses.replace(setting, precision=HALF), cluster)
    seconds += half.spent.memory_bound - found.spent.memory_bound
    changed["fused casts"] = seconds
    return {
        "name": run.name,
        "published": run.published,
        "plan": found.tokens_per_second,
        "error": found.tokens_per_second / run.published - 1,
        "GiB": found.memory.total / 2**30,
        "time": {n: t / found.seconds for n, t in found.spent.parts.items()},
        "as there": {n: run.rows * run.seq / s / run.gpus / run.published - 1 for n, s in changed.items()},
    }


@contextlib.contextmanager
def sums_for_nothing() -> Iterator[None]:
    """Times in which adding gradients to those before takes none."""
    own = timing._Work.accumulation
    timing._Work.accumulation = lambda self, kind: 0.0  # type: ignore[method-assign]
    try:
        yield
    finally:
        timing._Work.accumulation = own  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
