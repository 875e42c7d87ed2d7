"""Where the time of a training step goes on a GPU, and whether the kernels behind the primitives are worth it.

    python tests/bench/gpu_step.py kernels        each kernel beside torch's operations, eager and compiled, and the time
                                                  in which the memory could move what must be read and written
    python tests/bench/gpu_step.py tune           the same kernels with other sizes of block
    python tests/bench/gpu_step.py step           forward and backward of a 1.21B model, in every mode, beside the same
                                                  model written by hand: time, memory, and time by kind of kernel

Errors are those of results and gradients against float64. Needs torch and triton, and about a minute each. On a CPU with
TRITON_INTERPRET=1 the first runs in small sizes, for its errors.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import statistics
import subprocess
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fmegatron.accumulate import accumulate
from fmegatron.context import Ctx
from fmegatron.kernels import INTERPRETED
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.precision import Precision
from fmegatron.primitives import (
    add_rms_norm,
    apply_rotary_both,
    attention,
    geglu,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    rotary_table,
    swiglu,
)
from fmegatron.random import key
from fmegatron.sharding import Sharding
from fmegatron.spec import init

CUDA = torch.cuda.is_available()
DEVICE, HALF = ("cuda" if CUDA else "cpu"), torch.bfloat16
TOKENS, EMBED, MLP, HEADS, HEAD, VOCAB = (16384, 2048, 8192, 16, 128, 32768) if CUDA else (32, 64, 128, 2, 16, 200)
BATCH = 4


def timed(f: Callable[[], object], repeats: int = 10) -> float:
    """Milliseconds of device time: the host is given a lead, so that its own time does not count."""
    if not CUDA:
        return 0.0
    for _ in range(2):
        f()
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(8_000_000)
        begin.record()
        for _ in range(repeats):
            f()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / repeats)
    return min(found)


def bandwidth() -> float:
    """Bytes a millisecond of a large copy, read and written."""
    if not CUDA:
        return 1e12
    a = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return 2 * a.numel() / timed(lambda: b.copy_(a))


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = HALF) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


# ------------------------------------------------------------------------------------------------------- the kernels

# name: (function of (kernel, *args) -> tensors, the arguments of so many tokens, elements read and written for each
# token: forward, backward)
Case = tuple[Callable[..., Any], Callable[[int], list[Tensor]], int, int]


def kernels() -> dict[str, Case]:
    table = rotary_table(torch.arange(TOKENS // BATCH, device=DEVICE), HEAD)
    exact = rotary_table(torch.arange(TOKENS // BATCH, device=DEVICE), HEAD, dtype=torch.float64)

    def stream(n: int) -> Tensor:
        return draw(n, EMBED)

    def turn(kernel: str, q: Tensor, k: Tensor) -> Any:
        cos, sin = exact if q.dtype == torch.float64 else table
        return apply_rotary_both(q, k, cos[: q.shape[1]], sin[: q.shape[1]], kernel=kernel)

    def heads(n: int) -> Tensor:
        return draw(BATCH, n // BATCH, HEADS, HEAD)

    def gated(name: str, f: Callable[..., Tensor]) -> dict[str, Case]:
        return {
            name: (
                lambda kernel, gate, up: f(gate, up, kernel=kernel),
                lambda n: [draw(n, MLP, scale=2.0), draw(n, MLP)],
                3 * MLP,
                5 * MLP,
            ),
            f"{name} joined": (
                lambda kernel, both: f(both, kernel=kernel),
                lambda n: [draw(n, 2, MLP)],
                3 * MLP,
                5 * MLP,
            ),
            f"{name} by turns": (
                lambda kernel, both: f(both, dim=-1, kernel=kernel),
                lambda n: [draw(n, MLP, 2)],
                3 * MLP,
                5 * MLP,
            ),
        }

    def loss(**options: Any) -> Case:
        labels = torch.randint(0, VOCAB, (TOKENS,), device=DEVICE)
        equation = "batch seq embed, vocab embed -> batch seq vocab"

        def f(kernel: str, x: Tensor, w: Tensor) -> Tensor:
            return linear_cross_entropy(
                x[None], w, labels[None, : x.shape[0]], equation=equation, kernel=kernel, **options
            )

        return f, lambda n: [stream(n), draw(VOCAB, EMBED, scale=EMBED**-0.5)], 2 * VOCAB, 2 * VOCAB

    return {
        "rms_norm": (
            lambda kernel, x, w: rms_norm(x, w, kernel=kernel),
            lambda n: [stream(n), draw(EMBED)],
            2 * EMBED,
            3 * EMBED,
        ),
        "add, rms_norm": (
            lambda kernel, x, y, w: add_rms_norm(x, y, w, kernel=kernel),
            lambda n: [stream(n), stream(n), draw(EMBED)],
            4 * EMBED,
            4 * EMBED,
        ),
        "layer_norm": (
            lambda kernel, x, w, b: layer_norm(x, w, b, kernel=kernel),
            lambda n: [stream(n), draw(EMBED), draw(EMBED)],
            2 * EMBED,
            3 * EMBED,
        ),
        "rms_norm of heads": (
            lambda kernel, x, w: rms_norm(x, w, kernel=kernel),
            lambda n: [heads(n), draw(HEAD)],
            2 * HEADS * HEAD,
            3 * HEADS * HEAD,
        ),
        **gated("swiglu", swiglu),
        **gated("geglu tanh", functools.partial(geglu, approximate="tanh")),
        "rotary of q and k": (turn, lambda n: [heads(n), heads(n)], 4 * HEADS * HEAD, 4 * HEADS * HEAD),
        "loss, logits again": loss(keep=False),
        "loss, kept": loss(keep=True),
    }


COMPILED = ("rms_norm", "add, rms_norm", "swiglu", "rotary of q and k")  # by torch.compile too, which takes a while


def results(f: Callable[..., Any], kernel: str, args: list[Tensor]) -> list[Tensor]:
    """[results, gradients]"""
    leaves = [a.detach().requires_grad_() for a in args]
    y = f(kernel, *leaves)
    ys = [t for t in (y if isinstance(y, tuple) else (y,))]
    torch.manual_seed(1)
    gs = [torch.randn(t.shape, device=DEVICE).to(HALF).to(t.dtype) for t in ys]
    return [*(t.detach() for t in ys), *torch.autograd.grad(ys, leaves, gs)]


def error(f: Callable[..., Any], kernel: str, args: list[Tensor]) -> float:
    exact = results(f, "torch", [a.double() for a in args])
    found = results(f, kernel, args)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


def measured(f: Callable[..., Any], kernel: str, args: list[Tensor]) -> tuple[float, float]:
    """Milliseconds of (forward, backward)."""
    leaves = [a.detach().requires_grad_() for a in args]
    y = f(kernel, *leaves)
    ys = y if isinstance(y, tuple) else (y,)
    gs = [torch.randn_like(t) for t in ys]
    del y, ys

    def both() -> None:
        y = f(kernel, *leaves)
        torch.autograd.grad(y, leaves, gs if isinstance(y, tuple) else gs[0])

    with torch.no_grad():
        alone = timed(lambda: f(kernel, *leaves))
    return alone, timed(both) - alone


def show_kernels(only: str) -> None:
    speed = bandwidth()
    print(f"a copy moves {speed / 1e9:.2f} TB/s; times in ms, forward and backward; floor: at that speed", flush=True)
    modes = ["torch", "triton", *(["torch compiled"] if CUDA else [])]
    print(f"{'':20} {'floor':>15} " + " ".join(f"{m:>15} {'error':>8}" for m in modes))
    for name, (f, make, forward, backward) in kernels().items():
        if only not in name:
            continue
        few, floor = make(64 if CUDA else 8), [n * TOKENS * 2 / speed for n in (forward, backward)]
        row = f"{name:20} {floor[0]:7.3f} {floor[1]:7.3f} "
        for mode in modes:
            if mode == "torch compiled" and name not in COMPILED:
                row += f" {'':>24}"
                continue
            try:
                torch._dynamo.reset()
                run = torch.compile(f, dynamic=False) if "compiled" in mode else f
                wrong = error(f, mode.split()[0], few) if mode != "torch compiled" else float("nan")
                there, back = measured(run, mode.split()[0], make(TOKENS))
                row += f" {there:7.3f} {back:7.3f} {wrong:8.1e}"
            except Exception:
                traceback.print_exc(limit=-4)
                row += f" {'failed':>24}"
        print(row, flush=True)


@contextmanager
def replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    old = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, old)


def show_tuning() -> None:
    from fmegatron.kernels import gated, norm, rotary

    known, speed = kernels(), bandwidth()

    def line(name: str, choice: str) -> None:
        f, make, *_ = known[name]
        try:
            there, back = measured(f, "triton", make(TOKENS))
            print(f"{name:18} {choice:28} {there:7.3f} {back:7.3f}", flush=True)
        except Exception as e:
            print(f"{name:18} {choice:28} {type(e).__name__} {str(e)[:80]}", flush=True)

    for name in ("swiglu", "add, rms_norm", "rotary of q and k"):
        print(f"{name}: floor " + " ".join(f"{n * TOKENS * 2 / speed:.3f}" for n in known[name][2:]))
    for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8), (8192, 16)):

        def grid(rows: int, columns: int, block: int = block, warps: int = warps) -> Any:
            return (rows, -(-columns // block)), block, warps

        with replaced(gated, "_grid", grid):
            line("swiglu", f"block {block}, warps {warps}")
            line("swiglu by turns", f"block {block}, warps {warps}")
    for rows, warps, per in itertools.chain(
        ((1, w, 8) for w in (2, 4, 8)), ((2, w, 8) for w in (4, 8)), ((1, 4, n) for n in (2, 4, 16)), ((1, 8, 4),)
    ):

        def tile(columns: int, rows: int = rows, warps: int = warps) -> Any:
            return rows, 1 << (columns - 1).bit_length(), warps

        processors = torch.cuda.get_device_properties(0).multi_processor_count
        with replaced(norm, "_tile", tile), replaced(norm, "_programs", lambda x, n=per * processors: n):
            line("add, rms_norm", f"rows {rows}, warps {warps}, {per} a processor")
    for heads, warps in ((4, 1), (8, 1), (8, 2), (16, 2), (16, 4), (16, 8)):
        with replaced(rotary, "_tile", lambda n, pairs, heads=heads, warps=warps: (heads, warps)):
            line("rotary of q and k", f"heads {heads}, warps {warps}")


# ---------------------------------------------------------------------------------------------------------- the step

SIZES = dict(layers=16, embed=2048, heads=16, kv_heads=16, mlp=8192, vocab=32768)
SEQ = 4096
EPS = DecoderConfig(**SIZES).norm_eps
OURS = ("_norm_", "_gated_", "_turns_", "_rotary_turn", "_softmax_")
KINDS = {
    "products": ("nvjet", "gemm", "cutlass", "xmma", "cublas", "splitk"),
    "attention": ("fmha", "flash", "cudnn", "mha_"),
    "copies": ("copy", "memcpy", "catarray"),
    "elementwise": ("elementwise",),
    "reductions, norms": ("reduce", "softmax", "norm", "sort", "scan", "radix"),
    "embedding, indices": ("index", "embedding", "scatter", "gather"),
    "filling": ("memset", "fill"),
}


def kind_of(name: str) -> str:
    low = name.lower()
    if low.startswith(OURS):
        return "our kernels"
    if low.startswith("triton_"):
        return "inductor's"
    if "copy" in low and "elementwise" in low:
        return "copies"
    return next((kind for kind, words in KINDS.items() if any(w in low for w in words)), "other")


def profiled(step: Callable[[], object], top: int) -> None:
    """Prints device time by kind of kernel and the longest kernels of one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name][0] += event.device_time / 1e3
            found[event.name][1] += 1
    kinds: dict[str, float] = defaultdict(float)
    for name, (ms, _) in found.items():
        kinds[kind_of(name)] += ms
    total = sum(kinds.values())
    shown = ", ".join(f"{kind} {ms:.1f}" for kind, ms in sorted(kinds.items(), key=lambda p: -p[1]))
    print(f"  kernels {total:.1f} ms in {sum(int(n) for _, n in found.values())}: {shown}")
    for name, (ms, n) in sorted(found.items(), key=lambda p: -p[1][0])[:top]:
        print(f"    {ms:8.2f} ms {int(n):5} x {1e3 * ms / n:8.1f} us  {kind_of(name):18} {name[:110]}")


def ours(params: Any, batch: Any, **options: Any) -> Callable[[], object]:
    reduce = options.pop("reduce", HALF)
    model = Decoder(DecoderConfig(**SIZES, max_seq=SEQ, **options.pop("config", {})), **options)
    sh = Sharding(precision=Precision(params=HALF, reduce=reduce))
    run = accumulate(model.loss, 1, weights=model.weights)
    return lambda: run(params, batch, Ctx(sh=sh))


def by_hand(params: Any, batch: Any, compiled: bool) -> Callable[[], object]:
    """The model in torch alone, its loss with gradients made in the forward."""
    heads = SIZES["heads"]

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def block(p: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = functional.rms_norm(x, x.shape[-1:], p["norm1"], EPS)
        q, k, v = ((h @ p[n].flatten(1)).unflatten(-1, (heads, -1)) for n in "qkv")
        q, k, v = (t.transpose(1, 2) for t in (turned(q, cos, sin), turned(k, cos, sin), v))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + a.transpose(1, 2).flatten(2) @ p["o"].flatten(0, 2)
        h = functional.rms_norm(x, x.shape[-1:], p["norm2"], EPS)
        return x + (functional.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    run = torch.compile(block, dynamic=False) if compiled else block
    cos, sin = (t[:, None] for t in rotary_table(torch.arange(SEQ, device=DEVICE), HEAD))
    from tests.bench.step_memory import LastLayer

    def step() -> object:
        flat = {n: t.detach().requires_grad_() for n, t in params.items() if n != "layers"}
        layers = [{n: t.detach().requires_grad_() for n, t in p.items()} for p in params["layers"].values()]
        x = functional.embedding(batch["tokens"], flat["embed"])
        for p in layers:
            x = run(p, x, cos, sin)
        h = functional.rms_norm(x, x.shape[-1:], flat["norm"], EPS)
        loss = LastLayer.apply(h.flatten(0, 1), flat["head"], batch["labels"].flatten(), 8)
        return loss, torch.autograd.grad(loss, [*flat.values(), *(t for p in layers for t in p.values())])

    return step


def show_steps(only: list[str], repeats: int, top: int) -> None:
    sh = Sharding(precision=Precision(params=HALF))
    params = init(Decoder(DecoderConfig(**SIZES, max_seq=SEQ)).spec(), key(0), sh=sh, device=DEVICE)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    batch = {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    step = functools.partial(ours, params, batch)
    modes: dict[str, Callable[[], Callable[[], object]]] = {
        "by hand compiled": lambda: by_hand(params, batch, True),
        "eager torch": lambda: step(kernel="torch", keep_probabilities=False),
        "eager": lambda: step(),
        "compiled torch": lambda: step(compile=True, kernel="torch", keep_probabilities=False),
        "compiled": lambda: step(compile=True),
        "compiled triton": lambda: step(compile=True, kernel="triton"),
        "compiled fp32 gradients": lambda: step(compile=True, reduce=None),
    }
    for name, make in modes.items():
        if only and name not in only:
            continue
        try:
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = time.perf_counter()
            run = make()
            for _ in range(2):
                out = run()
            first = out[0]  # type: ignore[index]
            loss = float(first[0] if isinstance(first, tuple) else first)
            del out, first
            torch.cuda.synchronize()
            warm = time.perf_counter() - before
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                run()
                torch.cuda.synchronize()
                times.append(1e3 * (time.perf_counter() - start))
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(
                f"{name}: {statistics.median(times):.1f} ms ({min(times):.1f} to {max(times):.1f}), peak {peak:.1f} GiB, "
                f"loss {loss:.5f}, first two steps {warm:.0f} s",
                flush=True,
            )
            profiled(run, top)
            del run
        except Exception:
            print(f"{name}: failed")
            traceback.print_exc(limit=-6)
    ask = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"]
    print(subprocess.run(ask, capture_output=True, text=True).stdout.strip())


def check_attention() -> None:
    """Time of attention in the model's own layout, and the operations of a forward and backward that only copy."""
    q = draw(BATCH, SEQ, HEADS, 1, HEAD).requires_grad_()
    k, v = (draw(BATCH, SEQ, HEADS, HEAD).requires_grad_() for _ in "kv")
    g = torch.randn_like(q)

    def both() -> None:
        torch.autograd.grad(attention(q, k, v), [q, k, v], g)

    with torch.no_grad():
        alone = timed(lambda: attention(q, k, v))
    print(f"attention: forward {alone:.3f}, both {timed(both):.3f} ms", flush=True)
    profiled(both, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["kernels", "tune", "attention", "step"])
    parser.add_argument("--only", default="", help="kernels: part of the names to run")
    parser.add_argument("--modes", nargs="*", default=[], help="step: the modes to run; default: all")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--top", type=int, default=15)
    a = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    print(f"{torch.cuda.get_device_name() if CUDA else 'CPU'}, torch {torch.__version__}, interpreted: {INTERPRETED}")
    for part in a.parts:
        start = time.perf_counter()
        print(f"--- {part}", flush=True)
        if part == "kernels":
            show_kernels(a.only)
        elif part == "tune":
            show_tuning()
        elif part == "attention":
            check_attention()
        else:
            show_steps(a.modes, a.repeats, a.top)
        print(f"--- {part} took {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
