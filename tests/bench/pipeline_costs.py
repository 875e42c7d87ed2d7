"""What the actions of a pipeline's stages cost on this device, and the bubble and memory that follow for every schedule.

    python tests/bench/pipeline_costs.py --out costs.json                 # one GPU, under a minute: 1.21B, 8 stages
    python tests/bench/pipeline_costs.py --compile                        # with compiled blocks
    python tests/bench/pipeline_costs.py --small                          # tiny sizes, on a CPU: to see that it runs

Measured are stages as a pipeline runs them, by their `split`: the first (with the embedding), one in the middle and the
last (with head and loss), each with the layers that it has at one and at two stages a rank. Actions: F forward, B the
whole backward, I by input, W by weight (B and W with the addition to the gradients so far); and what a microbatch keeps
after F, before B or I, and after I. Times are taken as a rank runs, one action behind the other ("as run"), and again
behind a kernel that lets the host run ahead ("device"); where they differ the host was the slower one. A message is
bytes ÷ --bandwidth + --latency.

The simulator then predicts a step of every schedule, from the times as run and from those of the device, twice each:
with equal stages, all like the one in the middle, which shows the schedule alone; and with embedding and head where they
are. bubble: how much longer the step takes than its busiest rank computes, as a part of that; used: the mean of all
ranks' computing, as a part of the step; keeps: residuals of the worst rank at most. Pairs that a schedule joins run one
after the other, as here they do. A part that fails prints its traceback, and the others go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fmegatron.context import Ctx
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.parallel.pipeline_stage import (
    Ends,
    Within,
    carry_like,
    find_ends,
    layers_of,
    stage_entries,
    stage_function,
    with_context,
)
from fmegatron.parallel.schedule_check import Residuals, check
from fmegatron.parallel.schedule_communication import with_communication
from fmegatron.parallel.schedule_simulation import Costs, simulate
from fmegatron.parallel.schedules import INPUT, SCHEDULES, Schedule, make_schedule
from fmegatron.parallel.stages import Stage, even
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.sharding import Sharding
from fmegatron.spec import init
from fmegatron.split import split
from fmegatron.tree import is_float, leaves, tensors, tree_map

LARGE = DecoderConfig(vocab=32768, embed=2048, layers=16, heads=16, kv_heads=16, mlp=8192)  # 1.21B
SMALL = DecoderConfig(vocab=64, embed=32, layers=4, heads=2, kv_heads=2, mlp=64)
MIB, AHEAD = 2**20, 40e-3  # seconds for which the device is kept busy while the host runs ahead


@dataclasses.dataclass
class Measured:
    """Of one stage: seconds of each action, as run and on the device; bytes that a microbatch keeps."""

    run: dict[str, float]
    device: dict[str, float]
    keeps: dict[str, float]


def main() -> None:
    a = arguments()
    device = torch.device(a.device)
    config = SMALL if a.small else LARGE
    narrow = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, sh = Decoder(config, compile=a.compile), Sharding(precision=Precision(params=narrow, reduce=narrow))
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    found: dict[str, Any] = {
        "device": name,
        "torch": torch.__version__,
        "model": dataclasses.asdict(config),
        "tokens": a.rows * a.seq,
        "compiled": a.compile,
        "dtype": str(narrow),
        "ranks": a.stages,
        "measured": {},
        "predicted": [],
    }
    print(f"{name}, torch {torch.__version__}: {a.rows} x {a.seq} tokens a microbatch, {narrow}")
    stages = Stages(model, sh, device, a)
    sizes = {v: even(config.layers, a.stages, virtual=v) for v in (1, 2) if config.layers >= a.stages * v}
    for v, layout in sizes.items():
        for place, stage in (("first", layout[0]), ("middle", Stage(layout[1].layers)), ("last", layout[-1])):
            attempt(
                f"{place} stage of {v} a rank", lambda v=v, p=place, s=stage: measure(stages, found, p, v, s), a, found
            )
    message = a.latency + stages.carry_bytes / a.bandwidth
    found["message"] = {"bytes": stages.carry_bytes, "seconds": message}
    print_measured(found)
    for times in ("run", "device"):
        attempt(f"predictions from {times}", lambda times=times: predict(found, sizes, times, message, a), a, found)
    print_predicted(found, a)
    save(found, a)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all numbers to this file, as JSON")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--device", default=None)
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--stages", type=int, default=None, help="ranks of the pipeline")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rows", type=int, default=1, help="sequences in a microbatch")
    parser.add_argument("--seq", type=int, default=None, help="tokens in a sequence")
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--bandwidth", type=float, default=50e9, help="of a message, in bytes a second")
    parser.add_argument("--latency", type=float, default=20e-6, help="of a message, in seconds")
    a = parser.parse_args()
    a.device = a.device or ("cuda" if torch.cuda.is_available() and not a.small else "cpu")
    a.stages = a.stages or (2 if a.small else 8)
    a.seq, a.repeats = a.seq or (16 if a.small else 4096), a.repeats or (3 if a.small else 10)
    return a


def attempt(what: str, f: Callable[[], None], a: argparse.Namespace, found: dict[str, Any]) -> None:
    """Runs a part; if it fails, says so and lets the others go on. What is known so far is saved either way."""
    try:
        f()
    except Exception:
        print(f"{what} failed:\n{traceback.format_exc()}", flush=True)
        found.setdefault("failed", []).append(what)
    save(found, a)


def save(found: dict[str, Any], a: argparse.Namespace) -> None:
    if a.out is not None:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text(json.dumps(found, indent=1))


# ------------------------------------------------------------------------------------------------------------- measuring


class Stages:
    """Stages of a model as functions, with a microbatch for them."""

    def __init__(self, model: Decoder, sh: Sharding, device: torch.device, a: argparse.Namespace) -> None:
        self.model, self.sh, self.device, self.repeats = model, sh, device, a.repeats
        self.spec, self.ends = model.spec(), find_ends(model)
        drawn = torch.randint(0, model.config.vocab, (2, a.rows, a.seq), generator=torch.Generator().manual_seed(0))
        self.batch = dict(zip(("tokens", "labels"), drawn.to(device), strict=True))
        ctx = with_context(model, self.batch, Ctx(sh=sh))
        self.within = Within(
            ctx, self.batch, lambda terms, stats: (terms["lm"].items.float().sum() / drawn[0].numel(), ())
        )
        shapes = carry_like(model, self.spec, Ends(self.ends.front, self.ends.back), *self.meta())
        self.carry = tree_map(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device).normal_(), shapes)
        self.carry_bytes = sum(t.nbytes for t in leaves(self.carry))

    def meta(self) -> tuple[Any, Ctx]:
        """A microbatch and its context on the CPU, where shapes are found."""
        batch = {n: t.cpu() for n, t in self.batch.items()}
        return batch, with_context(self.model, batch, Ctx(sh=self.sh))

    def function(self, stage: Stage) -> tuple[Any, Any]:
        """(the stage's split, its parameters)."""
        spec = stage_entries(self.spec, stage, self.ends)
        f = stage_function(self.model, layers_of(self.model, self.spec), stage, self.ends)
        return split(f), init(spec, key(0), sh=self.sh, device=self.device)

    def input(self, stage: Stage) -> Any:
        return None if stage.embedding else tree_map(torch.clone, self.carry)

    def gradient(self, y: Any) -> Any:
        """Of a stage's output: ones for the loss, else anything."""
        return tree_map(lambda t: torch.ones_like(t) if is_float(t) else None, y)


def measure(stages: Stages, found: dict[str, Any], place: str, virtual: int, stage: Stage) -> None:
    """Times and sizes of a stage."""
    halves, params = stages.function(stage)
    total = [torch.zeros_like(t) for t in leaves(params)]

    def add(own: Any) -> None:
        for t, g in zip(total, leaves(own), strict=True):
            if g is not None:
                t.add_(g)

    def whole(clock: Clock) -> None:
        x = stages.input(stage)
        clock.begin()
        y, residual = halves.forward(params, x, stages.within, True)
        clock.end("F of B")
        gy = stages.gradient(y)
        del x, y
        clock.begin()
        gx, own = halves.backward(residual, gy, params)
        add(own)
        clock.end("B")
        del gx

    def split_up(clock: Clock) -> None:
        x = stages.input(stage)
        clock.begin()
        y, residual = halves.forward(params, x, stages.within)
        clock.end("F")
        gy = stages.gradient(y)
        del x, y
        clock.begin()
        gx, left = halves.backward_input(residual, gy, params)
        clock.end("I")
        del gx
        clock.begin()
        add(halves.backward_weight(left))
        clock.end("W")

    times: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for way in ("run", "device"):
            clock = Clock(stages.device)
            for run in (whole, split_up):
                for n in range(stages.repeats + 2):
                    if way == "device" and clock.cuda:
                        torch.cuda._sleep(int(AHEAD * 1.7e9))
                    clock.on = n > 1  # the first ones compile kernels
                    run(clock)
            times[way] = clock.medians()
        keeps = kept(stages, halves, params, stage)
    held = sum(t.nbytes for t in leaves(params))
    rows = found["measured"].setdefault(str(virtual), {})
    rows[place] = dataclasses.asdict(Measured(times["run"], times["device"], keeps))
    rows[place] |= {"layers": len(stage.layers), "parameters": sum(t.numel() for t in leaves(params)), "bytes": held}


def kept(stages: Stages, halves: Any, params: Any, stage: Stage) -> dict[str, float]:
    """Bytes that a microbatch keeps between its actions, its input among them: what is alive then and was not before."""
    found: dict[str, float] = {}

    def forward(joint: bool) -> tuple[Any, Any, float]:
        """(residual, gradient of the output, its bytes)."""
        x = stages.input(stage)
        y, residual = halves.forward(params, x, stages.within, joint)
        gy = stages.gradient(y)
        return residual, gy, sum(t.nbytes for t in leaves(gy) if t is not None)

    with Alive(stages.device) as alive:
        residual, gy, own = forward(True)
        found["before B"] = alive.now() - own
        del residual, gy
    with Alive(stages.device) as alive:
        residual, gy, own = forward(False)
        found["before I"] = alive.now() - own
        gx, left = halves.backward_input(residual, gy, params)
        del residual, gx, gy
        found["before W"] = alive.now()
        halves.backward_weight(left)
    return found


class Clock:
    """Times of actions, without waiting for the device in between."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.on = device.type == "cuda", False
        self.seen: dict[str, list[tuple[Any, Any]]] = {}
        self.began: Any = None

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        self.began = self.now()

    def end(self, what: str) -> None:
        if self.on:
            self.seen.setdefault(what, []).append((self.began, self.now()))

    def medians(self) -> dict[str, float]:
        """Seconds of each action."""
        if not self.cuda:
            return {n: statistics.median(b - a for a, b in pairs) for n, pairs in self.seen.items()}
        torch.cuda.synchronize()
        return {n: statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3 for n, pairs in self.seen.items()}


class Alive(TorchDispatchMode):
    """Bytes that were made inside and are alive."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.cuda, self.before = device.type == "cuda", 0
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __enter__(self) -> Alive:
        if self.cuda:
            self.before = torch.cuda.memory_allocated()
            return self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if not self.cuda:
            super().__exit__(*error)

    def now(self) -> float:
        if self.cuda:
            return float(torch.cuda.memory_allocated() - self.before)
        return float(sum(n for ref, n in self.storages.values() if not ref.expired()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        old = {t.untyped_storage()._cdata for t in tensors((args, kwargs))[0]}
        for t in tensors(out)[0]:
            if (s := t.untyped_storage())._cdata not in old:
                self.storages[s._cdata] = StorageWeakRef(s), s.nbytes()
        return out


# ------------------------------------------------------------------------------------------------------------ predicting


def predict(found: dict[str, Any], sizes: dict[int, Any], times: str, message: float, a: argparse.Namespace) -> None:
    """A step of every schedule, with equal stages and with the ends where they are."""
    for name in SCHEDULES:
        for m in a.microbatches:
            plain = make_schedule(name, a.stages, m)
            rows = found["measured"].get(str(plain.stages // plain.ranks), {})
            if set(rows) != {"first", "middle", "last"}:
                continue
            for ends in (False, True):
                costs, residuals = costs_of(plain, rows, times, message, ends)
                schedule = with_communication(plain, costs)
                check(schedule)
                t = simulate(schedule, costs, residuals=residuals)
                found["predicted"].append(
                    {
                        "schedule": name,
                        "microbatches": m,
                        "times": times,
                        "ends": ends,
                        "step": t.makespan,
                        "bubble": t.bubble,
                        "used": statistics.fmean(t.busy) / t.makespan,
                        "keeps": list(t.peaks),
                        "holds": holds(plain, rows, ends),
                    }
                )


def costs_of(
    schedule: Schedule, rows: dict[str, Any], times: str, message: float, ends: bool
) -> tuple[Costs, Residuals]:
    """Of each stage, as measured. A schedule of whole backwards keeps what these need, and their two halves take as
    long as they do."""
    halves = any(x.kind == INPUT for program in schedule.programs for x in program)
    places = ["middle"] * schedule.stages
    if ends:
        places[0], places[-1] = "first", "last"
    t, keeps = [rows[p][times] for p in places], [rows[p]["keeps"] for p in places]
    if halves:
        costs = Costs(*(tuple(x[k] for x in t) for k in "FIW"), communication=message)
        return costs, Residuals(tuple(x["before I"] for x in keeps), tuple(x["before W"] for x in keeps))
    costs = Costs(tuple(x["F of B"] for x in t), tuple(x["B"] for x in t), 0.0, communication=message)
    return costs, Residuals(tuple(x["before B"] for x in keeps), 0.0)


def holds(schedule: Schedule, rows: dict[str, Any], ends: bool) -> list[int]:
    """Bytes of each rank's parameters; its gradients are as many."""
    found = [0] * schedule.ranks
    for s, rank in enumerate(schedule.placement):
        place = "middle" if not ends or 0 < s < schedule.stages - 1 else "last" if s else "first"
        found[rank] += rows[place]["bytes"]
    return found


# -------------------------------------------------------------------------------------------------------------- printing


def print_measured(found: dict[str, Any]) -> None:
    names = ("F", "I", "W", "F of B", "B")
    print(f"\n{'stage; ms':<30}{'':8}" + "".join(f"{n:>9}" for n in names) + f"{'I+W':>9}   MiB before B, I, W")
    for v, rows in found["measured"].items():
        for place, row in rows.items():
            title, sizes = f"{place} of {v} a rank, {row['layers']} layers", ""
            for way in ("run", "device"):
                t = row[way]
                cells = "".join(f"{1e3 * x:>9.3f}" for x in (*(t[n] for n in names), t["I"] + t["W"]))
                if way == "run":
                    sizes = "".join(f"{row['keeps'][n] / MIB:>8.1f}" for n in ("before B", "before I", "before W"))
                print(f"{title:<30}{'as run' if way == 'run' else way:<8}{cells}{sizes}")
                title = sizes = ""
    print(f"message: {found['message']['bytes'] / MIB:.2f} MiB, {1e3 * found['message']['seconds']:.3f} ms")


def print_predicted(found: dict[str, Any], a: argparse.Namespace) -> None:
    for times, ends in ((t, e) for t in ("run", "device") for e in (False, True)):
        rows = [r for r in found["predicted"] if (r["times"], r["ends"]) == (times, ends)]
        where = "embedding and head where they are" if ends else "equal stages"
        print(
            f"\n{a.stages} ranks, {where}, times {'as run' if times == 'run' else 'of the device'}: m, step ms, bubble, used, keeps MiB"
        )
        for name in SCHEDULES:
            cells = [
                f"{r['microbatches']:>4}{1e3 * r['step']:>9.2f}{100 * r['bubble']:>7.1f}%{100 * r['used']:>5.0f}%"
                f"{max(r['keeps']) / MIB:>8.0f}"
                for r in rows
                if r["schedule"] == name
            ]
            if cells:
                print(f"{name:<12}{'  |'.join(cells)}")


if __name__ == "__main__":
    main()
