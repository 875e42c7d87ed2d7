"""The whole training step: against its forward and backward, the optimizer's pass, graphs, and memory against time.

    python tests/bench/whole_step.py                          # on a GPU, about 100 s: 1.21B and a 124M GPT-2
    python tests/bench/whole_step.py --only adamw,graph --compile
    python tests/bench/whole_step.py --device cpu             # tiny sizes, to see that it runs

Parts (--only): checks, adamw, step, graph, remat, offload. Each prints a table; one that fails prints its traceback and
the others go on. --svg FILE: the picture of memory against time. --json FILE: all numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
import traceback
from pathlib import Path

import torch

from fmegatron import tree
from fmegatron.accumulate import accumulate
from fmegatron.context import Ctx
from fmegatron.feeding import no_waiting
from fmegatron.graphs import recorded
from fmegatron.models import PRESETS, Decoder, DecoderConfig
from fmegatron.offload import offloaded, settle
from fmegatron.optim import (
    adamw,
    chain,
    clip_by_global_norm,
    decay_mask,
    global_norm,
    with_master,
    with_stochastic_rounding,
)
from fmegatron.plot import Series, chart
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.remat import everything, names, nothing, offload
from fmegatron.sharding import Sharding
from fmegatron.spec import count, init
from fmegatron.step import TrainState, train_step

LARGE = DecoderConfig(vocab=32768, embed=2048, layers=16, heads=16, kv_heads=16, mlp=8192)  # 1.21B
TINY = DecoderConfig(vocab=64, embed=32, layers=2, heads=2, kv_heads=2, mlp=64)
GiB = 2**30
COLOURS = ("#2563a8", "#c4500c", "#2e8540", "#8a3ffc", "#b0851e", "#d12765", "#0f8b8d", "#555555")
POLICIES = {
    "everything": everything,
    "all products": names("q", "k", "v", "attention", "o", "gate", "up", "down"),
    "attention, q, k, v, gate, up": names("attention", "q", "k", "v", "gate", "up"),
    "attention": names("attention"),
    "nothing": nothing,
    "attention on the host": offload("attention"),
    "gate, up on the host": offload("gate", "up", keep=("attention", "q", "k", "v")),
}


class Bench:
    def __init__(self, a: argparse.Namespace) -> None:
        self.device, self.gpu, self.compile = a.device, a.device == "cuda", a.compile
        self.repeats = a.repeats
        self.found: dict[str, dict[str, float]] = {}
        self.large, self.rows, self.seq = (LARGE, 4, 4096) if self.gpu else (TINY, 2, 16)
        narrow = torch.bfloat16 if self.gpu else torch.float32
        self.precision = Precision(params=narrow, compute=narrow, reduce=narrow)
        self.svg, self.json = a.svg, a.json

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def fresh(self) -> None:
        if self.gpu:
            settle()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        return torch.cuda.max_memory_allocated() / GiB if self.gpu else 0.0

    def time(self, run, warm: int = 2, repeats: int | None = None) -> float:
        """Median milliseconds of a call, as the device has them."""
        samples = []
        for n in range(warm + (repeats or self.repeats)):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            if n >= warm:
                samples.append((time.perf_counter() - start) * 1e3)
        return statistics.median(samples)

    def say(self, part: str, name: str, **values: float) -> None:
        self.found.setdefault(part, {}).update({f"{name}: {k}": v for k, v in values.items()})
        print(f"{part:8} {name:44} " + "  ".join(f"{k} {_shown(v)}" for k, v in values.items()), flush=True)
        if self.json:  # a run may be ended before its last part
            Path(self.json).write_text(json.dumps(self.found, indent=1))

    # ------------------------------------------------------------------------------------------------------ what runs

    def batch(self, config: DecoderConfig, rows: int, seq: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, config.vocab, (rows, seq + 1), generator=torch.Generator().manual_seed(0)).to(
            self.device
        )
        return {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def optimizer(self, spec, **options):
        made = adamw(1e-4, mask=decay_mask(spec), clip=1.0, **options)
        return with_master(made) if self.precision.params == torch.bfloat16 and "moments" not in options else made

    def made(self, config, save=everything, wrap=lambda o: o, **options):
        model, sh, step, optimizer = self.stepped(config, save, wrap, **options)
        params = init(model.spec(), key(0), sh=sh, device=self.device)
        return model, sh, step, TrainState(0, params, optimizer.init(params), key(1))

    def stepped(self, config, save=everything, wrap=lambda o: o, **options):
        model = Decoder(config, save=save, compile=self.compile)
        sh = Sharding(precision=self.precision)
        optimizer = wrap(self.optimizer(model.spec(), **options))
        step = train_step(model.loss, optimizer, weights=model.weights, sh=sh, donate=True, check_finite=False)
        return model, sh, step, optimizer

    def stepping(self, step, state, batch):
        """A call that makes one step after the other."""
        box = self.box = [state]
        del state

        def run():
            box[0], self.metrics = step(box[0], batch)

        return run

    # ---------------------------------------------------------------------------------------------------------- parts

    def checks(self) -> None:
        """AdamW against float64, a graph against the step, host memory against none, and a step that waits for nothing."""
        shapes = {"a": (300, 517), "b": (7,), "c": (64, 64), "d": ()}
        g = torch.Generator().manual_seed(0)
        first = {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()}
        gradients = [{n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()} for _ in range(5)]

        def run(optimizer, dtype, grads):
            p = {n: x.to(self.device, dtype, copy=True) for n, x in first.items()}
            state = optimizer.init(p)
            for given in gradients:
                given = {n: x.to(torch.bfloat16).to(self.device, grads) for n, x in given.items()}
                p, _, state = optimizer.update(p, given, state, donate=True)
            return {n: x.double().cpu() for n, x in p.items()}, state

        want, _ = run(adamw(0.01, clip=0.5, kernel="torch"), torch.float64, torch.float64)
        bf16, fp32 = torch.bfloat16, torch.float32
        cases = {
            "fp32": (adamw(0.01, clip=0.5), fp32, fp32),
            "fp32, gradients bf16": (adamw(0.01, clip=0.5), fp32, bf16),
            "bf16 moments": (adamw(0.01, clip=0.5, moments=bf16), fp32, fp32),
            "master": (with_master(adamw(0.01, clip=0.5)), bf16, bf16),
            "rounded by chance": (with_stochastic_rounding(adamw(0.01, clip=0.5, moments=bf16), 1), bf16, fp32),
            "chain (clipping apart)": (chain(clip_by_global_norm(0.5), adamw(0.01)), fp32, fp32),
        }
        for name, (optimizer, dtype, grads) in cases.items():
            got, _ = run(optimizer, dtype, grads)
            self.say("checks", f"AdamW {name}", error=max(_error(got[n], want[n]) for n in got))
        tiny = dataclasses.replace(TINY, dropout=0.1)
        batch = self.batch(tiny, 2, 16)
        ends = {}
        for name, wrap in {"plain": lambda s: s, "graph": recorded}.items():
            _, _, step, state = self.made(tiny)
            step = wrap(step)
            for _ in range(6):
                state, metrics = step(state, batch)
            ends[name] = (state, metrics)
        self.say("checks", "graph against the step", differences=_differ(ends["graph"][0], ends["plain"][0]))
        for name, wrap, save in (
            ("optimizer in host memory", lambda o: offloaded(o, bucket=1 << 12), everything),
            ("activations in host memory", lambda o: o, offload("attention", "q", keep=("up",))),
        ):
            _, _, step, state = self.made(tiny, save, wrap)
            for _ in range(6):
                state, metrics = step(state, batch)
            settle()
            self.say("checks", name, differences=_differ(state, ends["plain"][0]))
        _, _, step, state = self.made(tiny)
        run = self.stepping(step, state, batch)
        run(), run()
        with no_waiting(torch.device(self.device)):
            run()
        self.say("checks", "a step waits for nothing", passed=1.0)

    def adamw(self) -> None:
        """The pass alone, on the leaves of the 1.21B model."""
        spec = Decoder(self.large).spec()
        shapes, n = [p.shape for p in tree.leaves(spec)], count(spec)
        source = torch.empty(n // 2 if self.gpu else 1000, dtype=torch.float32, device=self.device)
        there = torch.empty_like(source)
        rate = 8 * source.numel() / self.time(functools.partial(there.copy_, source)) / 1e6  # GB/s
        self.say("adamw", "copy on the device", GB_per_s=rate)
        del source, there
        bf16, fp32 = torch.bfloat16, torch.float32
        for name, p_dtype, g_dtype, m_dtype, bytes_ in (
            ("fp32", fp32, fp32, fp32, 28),
            ("bf16, fp32 master and moments", bf16, bf16, fp32, 28),
            ("bf16, fp32 gradients, master, moments", bf16, fp32, fp32, 30),
            ("bf16, bf16 moments by chance", bf16, bf16, bf16, 14),
        ):
            self.fresh()
            params = [torch.randn(s, device=self.device).to(p_dtype) for s in shapes]
            grads = [torch.randn(s, device=self.device).to(g_dtype) * 1e-3 for s in shapes]
            floor = n * bytes_ / rate / 1e6
            both = ("triton", "torch") if m_dtype == fp32 else ("triton",)  # torch's rounds by a kernel to be compiled
            for kernel in both if self.gpu else ("torch",):
                o = adamw(1e-4, clip=1.0, kernel=kernel, moments=m_dtype)
                o = with_stochastic_rounding(o, 0) if m_dtype == bf16 else with_master(o) if p_dtype == bf16 else o
                state = [o.init(params)]

                def update(o=o, state=state, params=params, grads=grads):
                    norm = global_norm(grads)
                    _, _, state[0] = o.update(params, grads, state[0], donate=True, grad_norm=norm)

                ms = self.time(update, repeats=self.repeats if kernel == "triton" else 3)
                norm = self.time(lambda grads=grads: global_norm(grads))
                self.say(
                    "adamw",
                    f"{name}, {kernel}",
                    ms=ms,
                    norm=norm,
                    pass_=ms - norm,
                    floor=floor,
                    ratio=(ms - norm) / floor,
                )
                del state, update
            if p_dtype == fp32:
                leaves = [torch.nn.Parameter(p) for p in params]
                for p, g in zip(leaves, grads, strict=True):
                    p.grad = g
                theirs = torch.optim.AdamW(leaves, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=self.gpu)

                def clipped(leaves=leaves, theirs=theirs):
                    torch.nn.utils.clip_grad_norm_(leaves, 1.0, foreach=True)
                    theirs.step()

                self.say("adamw", "torch.optim.AdamW(fused), alone", ms=self.time(theirs.step))
                self.say("adamw", "  and clip_grad_norm_", ms=self.time(clipped))
                del leaves, theirs, clipped
            del params, grads

    def step(self) -> None:
        """A whole step over its forward and backward, in turns."""
        self.fresh()
        model, sh, step, state = self.made(self.large)
        batch, params = self.batch(self.large, self.rows, self.seq), state.params
        gradients = accumulate(model.loss, weights=model.weights)
        run, half = self.stepping(step, state, batch), lambda: gradients(params, batch, Ctx(sh=sh))
        rounds = [(self.time(half, 1, 3), self.time(run, 1, 3)) for _ in range(4)][1:]
        parts = statistics.median(a for a, _ in rounds)
        whole = statistics.median(b for _, b in rounds)
        with no_waiting(torch.device(self.device)):
            run()
        tokens = self.rows * self.seq / whole * 1e3
        self.say(
            "step",
            "1.21B" if self.gpu else "tiny",
            forward_backward=parts,
            step=whole,
            ratio=whole / parts,
            peak_GiB=self.peak(),
        )
        self.say("step", "  tokens a second", tokens_per_s=tokens)

    def graph(self) -> None:
        """GPT-2 124M, with and without a graph."""
        config = PRESETS["gpt2"] if self.gpu else TINY
        for rows, seq in ((1, 1024), (8, 1024)) if self.gpu else ((2, 16),):
            found = {}
            for name, wrap in {"as it is": lambda s: s, "graph": recorded}.items():
                self.fresh()
                _, _, step, state = self.made(config)
                run = self.stepping(wrap(step), state, self.batch(config, rows, seq))
                del state
                found[name] = ms = self.time(run, warm=5, repeats=2 * self.repeats)
                self.say(
                    "graph",
                    f"124M, {rows} x {seq}, {name}",
                    ms=ms,
                    tokens_per_s=rows * seq / ms * 1e3,
                    peak_GiB=self.peak(),
                )
                del run
            self.say("graph", "  speed-up", ratio=found["as it is"] / found["graph"])

    def remat(self) -> None:
        """Memory against time, by policy."""
        batch, points = self.batch(self.large, self.rows, self.seq), []
        _, _, _, state = self.made(self.large)
        for name, save in POLICIES.items():
            torch._dynamo.reset()
            run = self.stepping(self.stepped(self.large, save)[2], state, batch)
            try:
                run()
                self.fresh()
                ms = self.time(run, warm=1, repeats=5)
            except Exception:  # the other policies go on
                traceback.print_exc(limit=-4)
                state = self.made(self.large)[3]
                continue
            state = self.box[0]
            self.say("remat", name, ms=ms, peak_GiB=self.peak())
            points.append((name, self.peak(), ms))
            if self.svg:
                self.draw(points)

    def draw(self, points: list[tuple[str, float, float]]) -> None:
        """The picture of (policy, peak in GiB, ms)."""
        size = "1.21B, 4 x 4096 tokens" if self.gpu else "tiny"
        series = [Series(n, [(x, y)], c, width=0, dots=True) for (n, x, y), c in zip(points, COLOURS, strict=False)]
        title = f"What a layer keeps for its backward: a step of {size}"
        Path(self.svg).write_text(chart(series, title=title, x_label="peak memory (GiB)", y_label="ms a step"))

    def offload(self) -> None:
        """The optimizer's state in host memory."""
        batch = self.batch(self.large, self.rows, self.seq)
        for name, wrap in {"state on the device": lambda o: o, "state in host memory": offloaded}.items():
            self.fresh()
            _, _, step, state = self.made(self.large, names("attention"), wrap)
            run = self.stepping(step, state, batch)
            del state
            self.fresh()
            ms = self.time(run, warm=2, repeats=3)
            self.say("offload", name, ms=ms, peak_GiB=self.peak())
            del run


def _shown(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def _differ(a, b) -> float:
    """The largest relative difference of two trees."""
    pairs = [(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True) if torch.is_tensor(x)]
    return max(_error(x.double().cpu(), y.double().cpu()) for x, y in pairs if x.numel())


PARTS = ("checks", "adamw", "step", "graph", "remat", "offload")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--svg")
    parser.add_argument("--json")
    a = parser.parse_args()
    name = torch.cuda.get_device_name() if a.device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}, {'compiled' if a.compile else 'eager'}")
    bench = Bench(a)
    for part in a.only.split(","):
        start = time.perf_counter()
        try:
            getattr(bench, part)()
        except Exception:  # the other parts go on
            traceback.print_exc()
        print(f"{part:8} took {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
