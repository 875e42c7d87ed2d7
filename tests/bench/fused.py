"""Forward and backward of a model whose queries, keys and values are one leaf, and gate and up another, against the
same model with each apart.

    python tests/bench/fused.py [--device cuda] [--layers 16] [--embed 2048] … [--modes compiled eager] [--parts]

Both models have the same values and take turns in one process. Prints the median time of each, that of the ratio of
two neighbours with its range, and with a GPU the peak memory. `--parts` times the two products alone, with what is behind
them, in the sizes that a rank of tensor parallelism has. On CPU the sizes are small and the dtype is float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import torch

from fmegatron.accumulate import accumulate
from fmegatron.context import Ctx
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.models.fused import FUSED, fuse
from fmegatron.precision import Precision
from fmegatron.primitives import split_qkv, swiglu
from fmegatron.product import product
from fmegatron.random import key
from fmegatron.sharding import Sharding
from fmegatron.spec import init

SIZES = {
    "cuda": dict(layers=16, embed=2048, heads=16, kv_heads=16, mlp=8192, vocab=32768, seq=4096, batch=4, repeats=15),
    "cpu": dict(layers=4, embed=256, heads=4, kv_heads=4, mlp=1024, vocab=2048, seq=256, batch=2, repeats=25),
}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def compared(steps: dict[str, Callable[[], object]], device: str, repeats: int, warm_up: int = 3) -> dict[str, float]:
    """Prints and returns the median milliseconds of each step; they take turns, and the order changes."""
    clock = time.perf_counter if device == "cuda" else time.process_time  # others may use the processor too
    times: dict[str, list[float]] = {name: [] for name in steps}
    for n in range(repeats + warm_up):
        for name in list(steps) if n % 2 else list(steps)[::-1]:
            wait(device)
            start = clock()
            steps[name]()
            wait(device)
            if n >= warm_up:
                times[name].append(1e3 * (clock() - start))
    first, *others = steps
    for name in others:
        ratios = sorted(b / a for a, b in zip(times[first], times[name], strict=True))
        medians = [statistics.median(times[n]) for n in (first, name)]
        print(
            f"  {first} {medians[0]:8.3f} ms  {name} {medians[1]:8.3f} ms  ratio {statistics.median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )
    return {name: statistics.median(t) for name, t in times.items()}


def models(a: argparse.Namespace, compile: bool) -> dict[str, Callable[[], object]]:
    """{storage: one forward and backward}."""
    sizes = {n: getattr(a, n) for n in ("layers", "embed", "heads", "kv_heads", "mlp", "vocab")}
    config = DecoderConfig(**sizes, max_seq=a.seq)
    sh = Sharding(precision=Precision(params=torch.bfloat16 if a.device == "cuda" else torch.float32))
    ids = torch.randint(0, a.vocab, (a.batch, a.seq + 1), generator=torch.Generator().manual_seed(0)).to(a.device)
    batch = {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    params = init(Decoder(config).spec(), key(0), sh=sh, device=a.device)
    joined = dataclasses.replace(config, fused_qkv="fused_qkv" in a.fused, fused_gate_up="fused_gate_up" in a.fused)
    both = {"apart": (config, params), "fused": (joined, fuse(params, joined))}
    steps: dict[str, Callable[[], object]] = {}
    for name, (c, p) in both.items():
        model = Decoder(c, compile=compile)
        run = accumulate(model.loss, 1, weights=model.weights)
        steps[name] = functools.partial(run, p, batch, Ctx(sh=sh))
    return steps


def whole(a: argparse.Namespace, mode: str) -> None:
    """The whole model in one mode."""
    torch._dynamo.reset()
    steps = models(a, mode == "compiled")
    losses = {name: float(step()[0][0]) for name, step in steps.items()}  # type: ignore[index]
    tokens = a.batch * a.seq
    print(f"{mode}: {a.layers} layers of {a.embed}, {a.heads} heads on {a.kv_heads}, mlp {a.mlp}, {tokens} tokens")
    print("  losses " + ", ".join(f"{name} {loss:.5f}" for name, loss in losses.items()))
    compared(steps, a.device, a.repeats)
    if a.device == "cuda":
        for name, step in steps.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            print(f"  {name}: {(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB beyond the parameters")


# -------------------------------------------------------------------------------------------------- the products alone


def gradients(f: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Callable[[], object]:
    inputs = [x.detach().requires_grad_() for x in leaves]
    with torch.no_grad():
        g = torch.randn_like(f(*inputs))
    return lambda: torch.autograd.grad(f(*inputs), inputs, g)


def qkv_steps(rows: torch.Tensor, kv: int, group: int, head: int) -> dict[str, Callable[[], object]]:
    """Queries, keys and values of a token; joined behind, as a stand-in for attention that reads all three."""
    wide = [rows.shape[-1], kv, group + 2, head]
    w = torch.randn(wide, device=rows.device, dtype=rows.dtype) * 0.02
    q, k, v = (x.contiguous() for x in (w[:, :, :group], w[:, :, group], w[:, :, group + 1]))

    def apart(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        a, b, c = product(x, q, "bse,ekgh->bskgh"), product(x, k, "bse,ekh->bskh"), product(x, v, "bse,ekh->bskh")
        return behind(a, b, c)

    def fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return behind(*split_qkv(product(x, w, "bse,ekqh->bskqh")))

    def behind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q * (k + v).unsqueeze(3)

    return {"apart": gradients(apart, rows, q, k, v), "fused": gradients(fused, rows, w)}


def mlp_steps(rows: torch.Tensor, mlp: int) -> dict[str, Callable[[], object]]:
    """swiglu of gate and up."""
    w = torch.randn([rows.shape[-1], mlp, 2], device=rows.device, dtype=rows.dtype) * 0.02
    gate, up = (x.contiguous() for x in w.unbind(2))

    def apart(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return swiglu(product(x, gate, "bse,em->bsm"), product(x, up, "bse,em->bsm"))

    def fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return swiglu(product(x, w, "bse,emg->bsmg"), dim=-1)

    return {"apart": gradients(apart, rows, gate, up), "fused": gradients(fused, rows, w)}


def alone(a: argparse.Namespace) -> None:
    """The two products, forward and backward, in eager mode."""
    dtype, head = torch.bfloat16 if a.device == "cuda" else torch.float32, a.embed // a.heads
    rows = torch.randn(a.batch, a.seq, a.embed, device=a.device, dtype=dtype)
    for tp in (1, 2, 4, 8):
        for kv in sorted({a.heads, max(a.heads // 4, 1)}):
            if kv % tp == 0:
                print(f"tp={tp}, {a.heads // tp} query heads on {kv // tp} kv heads of {head}, eager")
                compared(qkv_steps(rows, kv // tp, a.heads // kv, head), a.device, a.repeats)
        if a.mlp % tp == 0:
            print(f"tp={tp}, mlp {a.mlp // tp}, eager")
            compared(mlp_steps(rows, a.mlp // tp), a.device, a.repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--modes", nargs="*", default=["compiled", "eager"], choices=["compiled", "eager"])
    parser.add_argument("--fused", nargs="*", default=list(FUSED), choices=FUSED)
    parser.add_argument("--parts", action="store_true")
    for name in SIZES["cpu"]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    a = parser.parse_args()
    for name, value in SIZES[a.device].items():
        if getattr(a, name) is None:
            setattr(a, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for mode in a.modes:
            whole(a, mode)
        if a.parts:
            alone(a)


if __name__ == "__main__":
    main()
