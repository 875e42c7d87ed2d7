"""Predictions of `fmegatron plan` beside measurements on one GPU: peak memory and time of a whole training step.

    python tests/bench/plan_gpu.py --out plan.json        # on an H200, under four minutes
    python tests/bench/plan_gpu.py --small                # tiny sizes on a CPU, to see that it runs

The machine is calibrated first, by kernels alone (`fmegatron.bench.calibrate`); no constant of the planner is fitted to what is
measured here. Peak memory is torch's max_memory_allocated of the third eager step, which donates its state; time the median of
steps played from a recording (`recorded`), and of eager ones beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fmegatron import optim
from fmegatron.bench.calibrate import calibrate, report
from fmegatron.fp8 import Fp8
from fmegatron.graphs import recorded
from fmegatron.job_model import computations
from fmegatron.models import PRESETS, Decoder, DecoderConfig, MoE
from fmegatron.parallel.routing import Routing
from fmegatron.plan import Cluster, Model, Setting, estimate
from fmegatron.plan.hardware import save
from fmegatron.precision import Precision
from fmegatron.random import fold_in, key, randint
from fmegatron.remat import names, nothing
from fmegatron.sharding import Sharding
from fmegatron.spec import count, init
from fmegatron.split import everything
from fmegatron.step import TrainState, train_step
from fmegatron.testing.layout import Layout
from fmegatron.tree import leaves

GIB = float(1 << 30)
SIZES = dict(vocab=32768, max_seq=4096)
B1 = DecoderConfig(embed=2048, layers=16, heads=16, kv_heads=16, mlp=8192, **SIZES)
B3 = DecoderConfig(embed=3072, layers=28, heads=24, kv_heads=8, mlp=8192, **SIZES)
EXPERTS = DecoderConfig(
    embed=2048, layers=8, heads=32, kv_heads=4, head=128, mlp=768, moe=MoE(Routing(experts=32, top_k=4), 768), **SIZES
)
TINY = DecoderConfig(vocab=512, embed=128, layers=2, heads=4, kv_heads=2, mlp=256, max_seq=256)


@dataclass(frozen=True)
class Case:
    name: str
    config: DecoderConfig
    rows: int
    seq: int
    micro: int = 1
    remat: str = "everything"
    fp8: str | None = None
    moments: torch.dtype = torch.float32
    master: torch.dtype | None = torch.float32


CASES = (
    Case("gpt2 124M, 16 x 1024", PRESETS["gpt2"], 16, 1024),
    Case("1.2B, 4 x 4096", B1, 4, 4096),
    Case("1.2B, remat attention", B1, 4, 4096, remat="attention"),
    Case("1.2B, remat nothing, 8 x 4096", B1, 8, 4096, remat="nothing"),
    Case("1.2B, 4 microbatches of 1", B1, 4, 4096, micro=4, moments=torch.bfloat16),
    Case("1.2B, fp8 tensorwise", B1, 4, 4096, fp8="tensorwise"),
    Case("3.0B, 2 x 4096", B3, 2, 4096),
    Case("3.0B, bf16 moments, no master", B3, 4, 4096, moments=torch.bfloat16, master=None),
    Case("3.0B, remat products", B3, 4, 4096, remat="products"),
    Case("experts 32 of 768, 4 of them, 4 x 4096", EXPERTS, 4, 4096),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", default="plan.json")
    parser.add_argument("--limit", type=float, default=225.0, help="seconds behind which no further case begins")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.perf_counter()
    machine = calibrate(device)
    print(report(machine), f"\ncalibrated in {time.perf_counter() - start:.0f} s", flush=True)
    out = Path(args.out)
    save(machine, out.with_suffix(".toml"))
    rows: list[dict[str, Any]] = []
    print(
        f"{'case':42} {'GiB':>8} {'plan':>8} {'error':>7} {'ms':>8} {'eager':>8} {'plan':>8} {'error':>7}", flush=True
    )
    for case in CASES:
        if time.perf_counter() - start > args.limit:
            print(f"{case.name}: left out, no time")
            continue
        if args.small:
            moe = None if case.config.moe is None else MoE(Routing(experts=4, top_k=2), 64)
            case = dataclasses.replace(case, config=dataclasses.replace(TINY, moe=moe), rows=case.micro * 2, seq=64)
        try:
            row = {**planned(case, machine), **measured(case, device)}
        except Exception:
            traceback.print_exc()
            print(f"{case.name}: failed", flush=True)
            continue
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        rows.append(row)
        memory, ms = row["peak"], row["ms"]
        shown = (
            f"{case.name:42} {memory / GIB:8.2f} {row['plan_bytes'] / GIB:8.2f} "
            f"{100 * (row['plan_bytes'] / memory - 1) if memory else 0:+6.1f}% {ms:8.1f} {row['eager_ms']:8.1f} "
            f"{row['plan_ms']:8.1f} {100 * (row['plan_ms'] / ms - 1):+6.1f}%"
        )
        print(shown, flush=True)
        out.write_text(json.dumps({"machine": machine.name, "rows": rows}, indent=1))
    for row in rows:
        print(
            row["name"],
            {k: round(v * 1e3, 1) for k, v in row["plan_parts"].items()},
            {k: round(v / GIB, 2) for k, v in row["plan_memory"].items() if v},
        )


def policy(case: Case) -> str:
    return "+".join(computations(case.config)) if case.remat == "products" else case.remat


def precision_of(case: Case) -> Precision:
    return Precision(params=torch.bfloat16, fp8=None if case.fp8 is None else Fp8(case.fp8))


def planned(case: Case, machine: Any) -> dict[str, Any]:
    """What the planner says."""
    layout = Layout("dp=1", micro=case.micro, remat=policy(case))
    setting = Setting(layout, case.rows, case.seq, precision_of(case), case.moments, case.master)
    found = estimate(Model(Decoder(case.config)), setting, Cluster(machine, 1))
    return {
        "name": case.name,
        "plan_bytes": found.memory.total,
        "plan_ms": 1e3 * found.seconds,
        "plan_parts": found.spent.parts,
        "plan_memory": found.memory.parts,
    }


def measured(case: Case, device: torch.device) -> dict[str, Any]:
    """Peak bytes and milliseconds of a step."""
    gpu = device.type == "cuda"
    save_policy = {"everything": everything, "nothing": nothing}.get(case.remat) or names(*policy(case).split("+"))
    model, sh = Decoder(case.config, save=save_policy), Sharding(precision=precision_of(case))
    spec = model.spec()
    before = torch.cuda.memory_allocated() if gpu else 0
    params = init(spec, key(0), sh=sh, device=device)
    optimizer = optim.adamw(1e-4, moments=case.moments, clip=1.0, mask=optim.decay_mask(spec))
    optimizer = optim.with_master(optimizer, case.master) if case.master is not None else optimizer
    ids = randint(fold_in(key(0), "tokens"), (case.rows, case.seq + 1), 0, case.config.vocab).to(device)
    batch = {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    state = TrainState(0, params, optimizer.init(params), None)
    del params
    step = train_step(
        model.loss, optimizer, weights=model.weights, sh=sh, microbatches=case.micro, donate=True, check_finite=False
    )

    def wait() -> None:
        if gpu:
            torch.cuda.synchronize()

    peak, eager = 0, []
    for n in range(4):
        wait()
        if gpu and n == 2:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        state, _ = step(state, batch)
        wait()
        eager.append(time.perf_counter() - begin)
        if gpu and n == 2:
            peak = torch.cuda.max_memory_allocated() - before
    times = eager[1:]
    if gpu:
        torch.cuda.empty_cache()
        played = recorded(step, warmup=1)
        for _ in range(3):
            state, _ = played(state, batch)
        times = []
        for _ in range(8):
            wait()
            begin = time.perf_counter()
            state, _ = played(state, batch)
            wait()
            times.append(time.perf_counter() - begin)
    held = sum(t.numel() * t.element_size() for t in leaves((state.params, state.opt)) if isinstance(t, torch.Tensor))
    return {
        "peak": peak,
        "ms": 1e3 * statistics.median(times),
        "eager_ms": 1e3 * statistics.median(eager[1:]),
        "held": held,
        "parameters": count(spec),
    }


if __name__ == "__main__":
    main()
