"""Mixture of experts on one GPU: kernels against their floors, the expert layer alone, a whole model beside Megatron-core.

    python tests/bench/moe.py --out moe.json          # on an H200, about five minutes
    python tests/bench/moe.py --parts kernels,layer   # some of: check, kernels, layer, model
    python tests/bench/moe.py --small                 # tiny sizes on a CPU, to see that it runs; without peers

The work: 8 layers, width 2048, 32 heads of 128 (4 of keys and values), 128 experts of width 768, 8 of them for each token,
vocabulary 32768, 4 × 4096 tokens, bfloat16, forward and backward. Contenders take turns in one run, and medians are
compared. FLOPs are those of active experts; attention is counted with its causal mask. The model runs as it is, recorded as a
CUDA graph (nothing in it waits for the device), and both in fp8, experts too.

balanced: whatever routers with random weights choose. skewed: every other token has its experts among the first `top_k` alone,
so these have half of all rows.

Floors are bytes that have to move ÷ the speed of a large copy, measured in the same run. Published rates of SonicMoE (Guo et
al., arXiv 2512.14080, section 6.2.1, one layer on an H100): "over 500 TFLOPS in forward and backward" at its 30B and 120B sizes,
480 backward and 535 forward at the 685B size; no figure is given for the shape here.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmegatron import tree
from fmegatron.accumulate import accumulate
from fmegatron.context import Ctx
from fmegatron.fp8 import Fp8, scaling
from fmegatron.fp8.grouped import Call, GroupedUse
from fmegatron.graphs import recorded
from fmegatron.kernels.moe import gather_rows, sort_by_expert, sum_choices, top_experts, weighted_gated, wide_product
from fmegatron.precision import Precision
from fmegatron.primitives.grouped import by_group, grouped_product, products
from fmegatron.random import key
from fmegatron.sharding import Sharding
from fmegatron.spec import count, init

GiB = 2**30
PUBLISHED = {"SonicMoE on an H100, 30B and 120B sizes, forward and backward (arXiv 2512.14080): more than": 500.0}
PARTS = ("check", "kernels", "layer", "model")
LOADS = ("balanced", "skewed")


@dataclass(frozen=True)
class Size:
    layers: int = 8
    embed: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head: int = 128
    experts: int = 128
    top_k: int = 8
    mlp: int = 768
    vocab: int = 32768
    batch: int = 4
    seq: int = 4096

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def layer_flops(self) -> float:
        """Forward and backward of one layer's experts."""
        return 3 * 2.0 * self.rows * 3 * self.embed * self.mlp

    @property
    def flops(self) -> float:
        """Forward and backward of the model."""
        attention = self.embed * self.head * 2 * (self.heads + self.kv_heads)
        each = attention + self.embed * self.experts + self.top_k * 3 * self.embed * self.mlp
        matrices = self.layers * each + self.embed * self.vocab
        return self.tokens * (6.0 * matrices + 6.0 * self.layers * self.seq * self.heads * self.head)


SMALL = Size(layers=2, embed=32, heads=4, kv_heads=2, head=8, experts=8, top_k=2, mlp=16, vocab=64, batch=2, seq=16)


class Run:
    """What parts share: where, what was found so far, and where it is saved."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.gpu = not a.small
        self.device = "cuda" if self.gpu else "cpu"
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        self.size = SMALL if a.small else Size()
        self.rounds, self.out, self.began = (2 if a.small else a.rounds), a.out, time.perf_counter()
        self.limit, self.alone = a.limit, a.alone
        self.found: dict[str, Any] = {"torch": torch.__version__, "size": dataclasses.asdict(self.size)}
        self.found["where"] = torch.cuda.get_device_name() if self.gpu else "CPU"
        self.bandwidth = 0.0

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    @property
    def left(self) -> float:
        """Seconds of the limit."""
        return self.limit - (time.perf_counter() - self.began)

    def save(self) -> None:
        if self.out:
            self.out.write_text(json.dumps(self.found, indent=1))

    def free(self) -> None:
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(self.dtype)


def guarded(name: str, f: Callable[[], Any]) -> Any:
    """f(), or None with its traceback printed."""
    try:
        return f()
    except Exception:
        print(f"FAILED {name}\n{traceback.format_exc(limit=-5)}", flush=True)
        return None


def no_sync(run: Run) -> contextlib.AbstractContextManager[None]:
    """Where the host must not wait for the device."""

    @contextlib.contextmanager
    def guard() -> Any:
        if run.gpu:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if run.gpu:
                torch.cuda.set_sync_debug_mode("default")

    return guard()


def choices_of(run: Run, load: str) -> tuple[Tensor, Tensor]:
    """(experts int64[token choice], weights fp32[token choice])"""
    s = run.size
    scores = torch.randn(s.tokens, s.experts, device=run.device)
    if load == "skewed":
        scores[::2, : s.top_k] += 100.0
    weights, experts = torch.softmax(scores, -1).topk(s.top_k, -1)
    return experts, weights


# ---------------------------------------------------------------------------------------------------------------- check


def layer_ours(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    kernel: str = "auto",
    fp8: GroupedUse | None = None,
) -> Tensor:
    """x[token embed]: the expert layer made of this library's parts."""
    choices = experts.shape[1]
    order, inverse, ends = sort_by_expert(experts, len(down), kernel=kernel)
    rows = gather_rows(x, order, inverse, choices, kernel=kernel)
    w = gather_rows(weights.reshape(-1, 1), order, inverse, 1)[:, 0]
    h = weighted_gated(grouped_product(rows, gate_up, ends, fp8=fp8), w, ends, kernel=kernel)
    return sum_choices(grouped_product(h, down, ends, fp8=fp8), order, inverse, choices, kernel=kernel)


def layer_plain(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same as torch's operations say it."""
    order = experts.reshape(-1).argsort(stable=True)
    ends = torch.zeros(len(down), device=x.device, dtype=torch.int32)
    ends = ends.index_add(0, experts.reshape(-1), torch.ones_like(order, dtype=torch.int32)).cumsum(0).to(torch.int32)
    token = order // experts.shape[1]
    mm = grouped_product if x.dtype != torch.bfloat16 else lambda x, w, ends: F.grouped_mm(x, w, offs=ends)
    gate, up = mm(x[token], gate_up, ends).chunk(2, -1)
    y = mm(F.silu(gate) * up, down, ends) * weights.reshape(-1)[order].to(x.dtype)[:, None]
    return torch.zeros_like(x).index_add(0, token, y)


def layer_exact(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(len(down)):
        token, choice = (experts == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[e]).chunk(2, -1)
        y = y.index_add(0, token, (F.silu(gate) * up * weights[token, choice][:, None]) @ down[e])
    return y


def check(run: Run) -> None:
    """Results and gradients against float64, equal twice, without a wait of the host."""
    torch.manual_seed(0)
    s, device, found = run.size, run.device, {}
    tokens, n, embed, mlp = (700, 24, 512, 256) if run.gpu else (20, 8, 32, 16)
    for load in LOADS:
        experts, _ = choices_of(run, load)
        experts = torch.where(torch.rand(experts.shape, device=device) < 0.1, s.experts, experts)
        fast, plain = (sort_by_expert(experts, s.experts, kernel=k) for k in ("auto", "torch"))
        assert all(torch.equal(a, b) for a, b in zip(fast, plain, strict=True)), "the sorts differ"
    values = torch.randn(s.tokens, s.experts, device=device).mul(8).round()  # with many equal ones
    best = (top_experts(values, s.top_k, kernel=k) for k in ("auto", "torch"))
    assert torch.equal(*best), "the best experts differ"
    experts = torch.randn(tokens, n - 1, device=device).topk(min(4, n - 1), -1).indices  # the last has no row
    experts = torch.where(torch.rand(experts.shape, device=device) < 0.1, n, experts)
    leaves = [
        run.randn(tokens, embed),
        torch.rand(experts.shape, device=device),
        run.randn(n, embed, 2 * mlp, scale=embed**-0.5),
        run.randn(n, mlp, embed, scale=mlp**-0.5),
    ]
    g = run.randn(tokens, embed)

    def gradients(f: Callable[..., Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        x, w, gate_up, down = (t.to(dtype or t.dtype).detach().requires_grad_() for t in leaves)
        y = f(x, experts, w, gate_up, down)
        return [y.detach(), *torch.autograd.grad(y, [x, w, gate_up, down], g.to(y.dtype))]

    exact = gradients(layer_exact, torch.float64)
    gradients(layer_ours, None)  # which compiles

    def compared(kernel: str) -> None:
        with no_sync(run):
            ours, again = (gradients(functools.partial(layer_ours, kernel=kernel), None) for _ in range(2))
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True)]
        same = all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
        text = ", ".join(f"{e:.1e}" for e in errors)
        print(
            f"layer, kernel={kernel}: errors {text} (y, x, w, gate_up, down); equal twice: {same}; largest gradient of the "
            f"expert without rows: {float(ours[3][-1].abs().max())}",
            flush=True,
        )
        found[kernel] = {"errors": errors, "equal_twice": same}
        assert max(errors) < (2e-2 if run.gpu else 1e-5) and math.isfinite(max(errors))

    for kernel in ("auto", "torch"):
        guarded(f"layer, kernel={kernel}", functools.partial(compared, kernel))
    x, w, g = run.randn(300, embed), run.randn(embed, n, scale=embed**-0.5), torch.randn(300, n, device=device)
    results = []
    for f, dtype in ((wide_product, None), (torch.matmul, torch.float64)):
        a, b = (t.to(dtype or t.dtype).detach().requires_grad_() for t in (x, w))
        y = f(a, b)
        results.append([y.detach(), *torch.autograd.grad(y, [a, b], g.to(y.dtype))])
    found["wide_product"] = [float((a.double() - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
    print(f"wide_product: errors {', '.join(f'{e:.1e}' for e in found['wide_product'])} (y, x, w)")
    for activation in ("swiglu", "geglu", "geglu_tanh", "clamped_swiglu"):
        h, w, g = run.randn(300, 2 * mlp), torch.rand(300, device=device), run.randn(300, mlp)
        results = []
        for kernel, dtype in (("auto", None), ("torch", torch.float64)):
            a, b = (t.to(dtype or t.dtype).requires_grad_() for t in (h, w))
            y = weighted_gated(a, b, activation=activation, limit=1.0, kernel=kernel)
            results.append([y.detach(), *torch.autograd.grad(y, [a, b], g.to(y.dtype))])
        found[activation] = [float((a.double() - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
        print(f"{activation}: errors {', '.join(f'{e:.1e}' for e in found[activation])}")
    run.found["check"] = found


# -------------------------------------------------------------------------------------------------------------- kernels


def milliseconds(run: Run, call: Callable[[], Any], repeats: int = 20) -> float:
    """Of the device, median."""
    for _ in range(3):
        call()
    samples = []
    for _ in range(repeats if run.gpu else 2):
        if run.gpu:
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)  # so that launches wait on the device, not the device on the host
            a.record()
            call()
            b.record()
            b.synchronize()
            samples.append(a.elapsed_time(b))
        else:
            start = time.perf_counter()
            call()
            samples.append(1e3 * (time.perf_counter() - start))
    return statistics.median(samples)


def kernels(run: Run) -> None:
    size = (2**30 if run.gpu else 2**16) // 2
    pair = [torch.empty(size, dtype=torch.bfloat16, device=run.device) for _ in range(2)]
    run.bandwidth = 2 * pair[0].nbytes / milliseconds(run, lambda: pair[0].copy_(pair[1])) * 1e3
    pair.clear()
    print(f"copy: {run.bandwidth / 1e12:.2f} TB/s")
    run.found["kernels"] = {"copy_tb_s": run.bandwidth / 1e12}
    for load in LOADS:
        run.found["kernels"][load] = found = {}
        guarded(f"kernels, {load}", functools.partial(kernels_of, run, load, found))
        run.save()
        run.free()


def timed(run: Run, name: str, calls: dict[str, Callable[[], Any]]) -> dict[str, float | None]:
    return {k: guarded(f"{name}: {k}", functools.partial(milliseconds, run, f)) for k, f in calls.items()}


def kernels_of(run: Run, load: str, found: dict[str, Any]) -> None:
    torch.manual_seed(0)
    s = run.size
    tokens, rows, embed, mlp = s.tokens, s.rows, s.embed, s.mlp

    def row(name: str, values: float, calls: dict[str, Callable[[], Any]]) -> None:
        """values: how many of two bytes have to move."""
        times, lowest = timed(run, name, calls), 1e3 * 2 * values / run.bandwidth
        text = "  ".join(f"{k} {'failed' if t is None else f'{t:.3f}'}" for k, t in times.items())
        print(f"{name:24} floor {lowest:.3f} ms  {text}", flush=True)
        found[name] = {"floor_ms": lowest, **times}

    def product(name: str, width: int, calls: dict[str, Callable[[], Any]]) -> None:
        times, work = timed(run, name, calls), 2.0 * rows * embed * width
        rates = {k: None if t is None else {"ms": t, "tflops": work / t / 1e9} for k, t in times.items()}
        text = (f"{k} failed" if r is None else f"{k} {r['ms']:.3f} ms {r['tflops']:.0f} TF" for k, r in rates.items())
        print(f"{name:24} {'  '.join(text)}", flush=True)
        found[name] = rates

    experts, weights = choices_of(run, load)
    order, inverse, ends = sort_by_expert(experts, s.experts)
    x, y = run.randn(tokens, embed), run.randn(rows, embed)
    h, a, w = run.randn(rows, 2 * mlp), run.randn(rows, mlp), weights.reshape(-1)
    gate_up, down = run.randn(s.experts, embed, 2 * mlp), run.randn(s.experts, mlp, embed)
    token = order.long() // s.top_k
    found["fullest / mean"] = int(torch.diff(ends, prepend=ends.new_zeros(1)).max()) * s.experts / rows
    print(f"-- {load}: the fullest expert has {found['fullest / mean']:.2f} of the mean")
    both = ("auto", "torch") if run.gpu else ("torch",)

    sorts: dict[str, Any] = {k: functools.partial(sort_by_expert, experts, s.experts, kernel=k) for k in both}
    sorts["argsort of int64"] = lambda: experts.reshape(-1).argsort(stable=True)
    row("sort", 8.0 * rows, sorts)
    gathers: dict[str, Any] = {k: functools.partial(gather_rows, x, order, inverse, s.top_k, kernel=k) for k in both}
    row("gather_rows", embed * (tokens + rows), gathers | {"x[token]": lambda: x[token]})
    sums: dict[str, Any] = {k: functools.partial(sum_choices, y, order, inverse, s.top_k, kernel=k) for k in both}
    row(
        "sum_choices",
        embed * (tokens + rows),
        sums | {"index_add": lambda: torch.zeros_like(x).index_add_(0, token, y)},
    )
    if load == "balanced":
        gated: dict[str, Any] = {k: functools.partial(weighted_gated, h, w, ends, kernel=k) for k in both}
        row("weighted_gated", rows * 3 * mlp, gated | {"silu(gate) * up": lambda: F.silu(h[:, :mlp]) * h[:, mlp:]})
        leaves = [h.detach().requires_grad_(), w.detach().requires_grad_()]
        graphs = {k: weighted_gated(*leaves, ends, kernel=k) for k in both}
        backward = functools.partial(torch.autograd.grad, inputs=leaves, grad_outputs=a, retain_graph=True)
        row("its backward", rows * 5 * mlp, {k: functools.partial(backward, y) for k, y in graphs.items()})
        del graphs, gated, leaves, backward
        guarded("router", functools.partial(router_of, run, row))
        dense = (run.randn(rows, embed), run.randn(embed, 2 * mlp))
        product("one dense product", 2 * mlp, {"torch": lambda: dense[0] @ dense[1]})

    column_major = gate_up.mT.contiguous().mT
    forward: dict[str, Any] = {
        "torch": lambda: products(y, gate_up, ends),
        "torch, other layout": lambda: products(y, column_major, ends),
    }
    if (quack := guarded("quack", _quack) if run.gpu else None) is not None:
        starts = torch.cat([ends.new_zeros(1), ends])
        forward["quack"] = lambda: quack(y, gate_up, cu_seqlens_m=starts, tuned=False)
        forward["quack, with the gather"] = lambda: quack(
            x, gate_up, cu_seqlens_m=starts, A_idx=token.int(), tuned=False
        )
    product("gate_up", 2 * mlp, forward)
    by_x = {
        "torch": lambda: products(h, gate_up.mT, ends),
        "torch, other layout": lambda: products(h, column_major.mT, ends),
    }
    product("gate_up by x", 2 * mlp, by_x)
    product("gate_up by weight", 2 * mlp, {"torch": lambda: by_group(y, h, ends)})
    product("down", mlp, {"torch": lambda: products(a, down, ends)})
    product("down by x", mlp, {"torch": lambda: products(y, down.mT, ends)})
    product("down by weight", mlp, {"torch": lambda: by_group(a, y, ends)})
    if run.gpu and load == "balanced":
        guarded("kernels of fp8", functools.partial(fp8_of, run, row, product, y, h, gate_up, down, ends))


def fp8_of(
    run: Run,
    row: Callable[..., None],
    product: Callable[..., None],
    x: Tensor,
    h: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ends: Tensor,
) -> None:
    """Casts and products of the experts in fp8: x[row embed], h[row 2 mlp] as activations or gradients."""
    s, call = run.size, Call(GroupedUse(Fp8("rowwise")), run.dtype, True)
    rows, embed, wide = s.rows, s.embed, 2 * s.mlp
    row("fp8 x by rows", 1.5 * rows * embed, {"auto": lambda: call.by_row(x, ())})
    row("fp8 x by groups", 1.5 * rows * embed, {"auto": lambda: call.by_group(x, ends)})
    row("fp8 h by groups", 1.5 * rows * wide, {"auto": lambda: call.by_group(h, ends)})
    row("fp8 gate_up", 1.5 * gate_up.numel(), {"auto": lambda: call.cast_w(gate_up)})
    row("fp8 gate_up by x", 1.5 * gate_up.numel(), {"auto": lambda: call.cast_w_by_x(gate_up)})
    x8, h8, a8 = (call.by_row(t, ()) for t in (x, h, h[:, : s.mlp].contiguous()))
    w8, w8x = call.cast_w(gate_up)[0], call.cast_w_by_x(gate_up)
    d8, d8x = call.cast_w(down)[0], call.cast_w_by_x(down)
    (xg, at), (hg, _), (ag, _) = (call.by_group(t, ends) for t in (x, h, h[:, : s.mlp]))
    product("fp8 gate_up", wide, {"torch": functools.partial(call.multiply, x8, w8, ends)})
    product("fp8 gate_up by x", wide, {"torch": functools.partial(call.multiply, h8, w8x, ends)})
    product("fp8 gate_up by weight", wide, {"torch": lambda: call.multiply_groups(xg, hg, at)})
    product("fp8 down", s.mlp, {"torch": functools.partial(call.multiply, a8, d8, ends)})
    product("fp8 down by x", s.mlp, {"torch": functools.partial(call.multiply, x8, d8x, ends)})
    product("fp8 down by weight", s.mlp, {"torch": lambda: call.multiply_groups(ag, xg, at)})


def router_of(run: Run, row: Callable[..., None]) -> None:
    """Forward and backward of the router's product in fp32, and of what is decided from it."""
    from fmegatron.parallel.routing import Routing, route

    s, sh, routing = run.size, Sharding(), Routing(experts=run.size.experts, top_k=run.size.top_k)
    x, w = (t.requires_grad_() for t in (run.randn(s.tokens, s.embed), run.randn(s.embed, s.experts, scale=0.02)))
    g = torch.randn(s.tokens, s.experts, device=run.device)
    logits = torch.randn(s.batch, s.seq, s.experts, device=run.device).requires_grad_()

    def product(f: Callable[[Tensor, Tensor], Tensor]) -> Any:
        return torch.autograd.grad(f(x, w), [x, w], g)

    def decided(f: Callable[[Tensor], Tensor]) -> Any:
        weights = f(logits)
        return torch.autograd.grad(weights, logits, torch.ones_like(weights))

    plain = functools.partial(product, lambda x, w: x.float() @ w.float())
    row("router, both ways", s.tokens * (3 * s.embed + 6 * s.experts), {
        "wide_product": functools.partial(product, wide_product), "casts to fp32": plain,
    })  # fmt: skip
    values = torch.softmax(logits.detach(), -1)
    row("top_experts", s.tokens * (2 * s.experts + 4 * s.top_k), {
        "auto": lambda: top_experts(values, s.top_k),
        "torch": lambda: top_experts(values, s.top_k, kernel="torch"),
        "topk": lambda: values.topk(s.top_k, -1),
    })  # fmt: skip
    row("its decision, both ways", s.tokens * s.experts * 8, {
        "route": functools.partial(decided, lambda z: route(z, routing, sh=sh).weights),
        "softmax, topk": functools.partial(decided, lambda z: torch.softmax(z, -1).topk(s.top_k, -1)[0]),
    })  # fmt: skip


def _quack() -> Any:
    try:
        from quack.gemm_interface import gemm
    except ImportError:
        print("quack-kernels is not installed")
        return None
    return gemm


# ---------------------------------------------------------------------------------------------------------------- turns


@dataclass
class Contender:
    """call: forward and backward, giving (loss, or anything; gradients). own: bytes of its parameters."""

    name: str
    call: Callable[[], Any]
    own: int = 0
    peak: float = 0.0
    first: float = 0.0


def take_turns(run: Run, contenders: list[Contender], work: float, reference: str) -> dict[str, Any]:
    """Medians of interleaved rounds, in which the order changes; a contender that fails drops out."""
    alive, samples = [], {}
    for c in contenders:

        def begin(c: Contender = c) -> bool:
            run.free()
            start = time.perf_counter()
            for _ in range(3):
                c.call()
            run.wait()
            c.first = time.perf_counter() - start
            if run.gpu:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                c.call()
                run.wait()
                c.peak = (torch.cuda.max_memory_allocated() - before + c.own) / GiB
            print(f"   {c.name}: first {c.first:.1f} s, peak {c.peak:.1f} GiB; {run.left:.0f} s left", flush=True)
            return True

        if guarded(c.name, begin):
            alive.append(c)
            samples[c.name] = []
    for n in range(run.rounds):
        for c in alive if n % 2 == 0 else alive[::-1]:
            run.wait()
            start = time.perf_counter()
            c.call()
            run.wait()
            samples[c.name].append(1e3 * (time.perf_counter() - start))
        if n >= 4 and run.left < 5:
            break
    found = {}
    for c in alive:
        ms = statistics.median(samples[c.name])
        found[c.name] = {
            "ms": ms,
            "tflops": work / ms / 1e9,
            "peak_gib": c.peak,
            "first_s": c.first,
            "samples": samples[c.name],
        }
        if reference in samples:
            found[c.name]["ratio"] = statistics.median(
                a / b for a, b in zip(samples[c.name], samples[reference], strict=True)
            )
        ratio = f"  {found[c.name]['ratio']:.3f} of {reference}" if reference in samples else ""
        print(f"{c.name:44} {ms:8.2f} ms  {work / ms / 1e9:5.0f} TF  {c.peak:5.1f} GiB{ratio}", flush=True)
    return found


# ---------------------------------------------------------------------------------------------------------------- layer


def layer(run: Run) -> None:
    """Dispatch, products, activation and sum of one layer, without the router."""
    s, found = run.size, {}
    for load in LOADS:
        torch.manual_seed(0)
        experts, weights = choices_of(run, load)
        x, g = run.randn(s.tokens, s.embed), run.randn(s.tokens, s.embed)
        gate_up = run.randn(s.experts, s.embed, 2 * s.mlp, scale=0.02)
        down = run.randn(s.experts, s.mlp, s.embed, scale=0.02)
        leaves = [t.requires_grad_() for t in (x, weights, gate_up, down)]

        def timed(f: Callable[..., Tensor], experts: Tensor = experts, leaves: Any = leaves, g: Tensor = g) -> Any:
            return lambda: torch.autograd.grad(f(leaves[0], experts, *leaves[1:]), leaves, g)

        all_of = [
            Contender("ours", timed(layer_ours)),
            Contender("ours, fp8", timed(functools.partial(layer_ours, fp8=GroupedUse(Fp8("rowwise"))))),
            Contender("ours, torch's operations", timed(lambda *args: layer_ours(*args, kernel="torch"))),
            Contender("fmegatron.parallel.moe", timed(guarded("parallel.moe", lambda: _dispatched(run)) or _absent)),
            Contender("plain", timed(layer_plain)),
        ]
        if run.gpu:
            all_of.append(Contender("plain, compiled", timed(torch.compile(layer_plain, dynamic=False))))
        print(f"-- one expert layer, {load}")
        found[load] = take_turns(run, all_of, s.layer_flops, "plain")
        if run.gpu:
            with no_sync(run):
                guarded("ours without a wait", all_of[0].call)
                guarded("ours, fp8, without a wait", all_of[1].call)
                guarded("fmegatron.parallel.moe without a wait", all_of[3].call)
        run.found["layer"] = {**found, "published TF": PUBLISHED}
        run.save()
        del all_of, leaves
        run.free()
    for name, rate in PUBLISHED.items():
        print(f"published: {name} {rate:.0f} TF")


def _absent(*args: Any) -> Tensor:
    raise RuntimeError("it could not be made")


def _dispatched(run: Run) -> Callable[..., Tensor]:
    """The layer as the model has it."""
    from fmegatron.models.decoder import GATED
    from fmegatron.parallel import experts as parts
    from fmegatron.parallel.dispatch import dispatched
    from fmegatron.parallel.routing import Routed

    s, sh = run.size, Sharding()
    compute = parts.mlp_experts("swiglu" if hasattr(parts, "weighted_gated") else GATED["swiglu"])

    def f(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        shape = (s.batch, s.seq)
        fields: dict[str, Any] = {"experts": experts.view(*shape, -1), "weights": weights.view(*shape, -1)}
        fields |= {"scores": fields["weights"], "logits": fields["weights"], "bound": None}
        routed = Routed(**{k.name: fields.get(k.name) for k in dataclasses.fields(Routed)})
        leaves = {"experts_gate_up": gate_up.unflatten(-1, (2, s.mlp)), "experts_down": down}
        y = dispatched(compute, x.view(*shape, -1), routed, leaves, number=s.experts, sh=sh)
        return y.flatten(0, 1)

    return f


# ---------------------------------------------------------------------------------------------------------------- model


def model(run: Run, loads: list[str], megatron: bool) -> None:
    reference = "megatron-core" if megatron and run.gpu else "fmegatron" if run.alone else "plain sketch"
    with contextlib.ExitStack() as held:
        if megatron and run.gpu:
            megatron = bool(guarded("Megatron's session", functools.partial(session, held)))
        for load in loads:
            if run.left < 45:
                print(f"no time for the model, {load}")
                break
            print(f"-- model, {load}")
            guarded(f"model, {load}", functools.partial(model_of, run, load, megatron and run.gpu, reference))
            torch._dynamo.reset()
            run.free()


def session(held: contextlib.ExitStack) -> bool:
    from fmegatron.bench import peers_megatron

    held.enter_context(peers_megatron.session(torch.device("cuda")))
    return True


def model_of(run: Run, load: str, megatron: bool, reference: str) -> None:
    torch.manual_seed(0)
    s = run.size
    ids = torch.randint(s.vocab, (s.batch, s.seq + 1), device=run.device)
    hot = torch.zeros(s.tokens, s.experts, device=run.device)
    if load == "skewed":
        hot[::2, : s.top_k] = 20.0
    mine = guarded("Decoder", lambda: ours(run, load, ids)) or []
    everyone = list(mine)
    if not run.alone:
        everyone += guarded("sketches", lambda: sketches(run, ids, hot)) or []
    if megatron:
        everyone.append(guarded("Megatron", lambda: megatron_peer(run, ids, hot)))
    found = take_turns(run, [c for c in everyone if c is not None], s.flops, reference)
    run.found.setdefault("model", {})[load] = found
    run.save()
    del everyone
    for c in mine[::2]:  # not those that are recorded
        with no_sync(run):
            guarded(f"{c.name}, without a wait of the host", c.call)
        print(f"   {c.name}:")
        found.setdefault("profile", {})[c.name] = guarded("profile", functools.partial(profile, run, c.call))
        run.save()


def profile(run: Run, call: Callable[[], Any]) -> Any:
    """Milliseconds by kinds of kernels, and the slowest of them."""
    from fmegatron.bench.kernels import profiled

    found = profiled(call, torch.device(run.device), shown=30)
    print(f"   {found.total:.1f} ms of kernels: " + ", ".join(f"{k} {ms:.1f}" for k, ms in found.kinds.items() if ms))
    for ms, calls, kind, name in found.slowest[:24]:
        print(f"   {ms:8.2f} ms x{calls:4d}  {kind:12} {name[:110]}")
    return {"kinds": found.kinds, "slowest": found.slowest}


def ours(run: Run, load: str, ids: Tensor) -> list[Contender]:
    """The Decoder of this library, in bfloat16 and in fp8, each as it is and recorded as a CUDA graph."""
    from fmegatron.models import Decoder, DecoderConfig
    from fmegatron.models.moe import MoE
    from fmegatron.parallel.routing import Routing

    s = run.size
    routing = Routing(experts=s.experts, top_k=s.top_k, force="skewed" if load == "skewed" else None)
    config = DecoderConfig(
        vocab=s.vocab, embed=s.embed, layers=s.layers, heads=s.heads, kv_heads=s.kv_heads, head=s.head, mlp=s.mlp,
        max_seq=s.seq, moe=MoE(routing=routing, mlp=s.mlp),
    )  # fmt: skip
    decoder = Decoder(config, compile=run.gpu)
    params = init(decoder.spec(), key(0), sh=Sharding(precision=Precision(params=run.dtype)), device=run.device)
    batch = {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    one = accumulate(decoder.loss, weights=decoder.weights)
    own = sum(x.nbytes for x in tree.leaves(params))
    print(f"   Decoder: {count(decoder.spec()) / 1e9:.2f} × 10⁹ parameters")
    found = []
    for name, fp8 in (("fmegatron", None), ("fmegatron, fp8 rowwise", Fp8("rowwise", unaligned="keep"))):
        sh = Sharding(precision=Precision(params=run.dtype, reduce=run.dtype, fp8=fp8))

        def call(name: str = name, sh: Sharding = sh, said: list[float] = []) -> Any:  # noqa: B006
            now = sh if sh.precision.fp8 is None else scaling.begin(sh, None)
            (loss, _), grads = one(params, batch, Ctx(sh=now))
            if not said:
                said.append(float(loss))
                print(f"   {name}: loss {said[0]:.4f}")
            return loss, grads

        def kept(state: Any, batch: Any, call: Callable[[], Any] = call, into: list[Any] = []) -> Any:  # noqa: B006
            loss, grads = call()
            into[:] = [grads]  # in the recording's memory, which each play overwrites
            return state, {"loss": loss}

        step = recorded(kept)
        found.append(Contender(name, call, own))
        found.append(Contender(f"{name}, recorded", functools.partial(step, {"params": params}, batch), own))
    return found


def sketches(run: Run, ids: Tensor, hot: Tensor) -> list[Contender]:
    """Plain functions of torch's operations, and the same with this library's expert layer."""
    s, dtype = run.size, run.dtype

    def r(*shape: int) -> Tensor:
        return run.randn(*shape, scale=0.02)

    def one() -> Tensor:
        return torch.ones(s.embed, device=run.device, dtype=dtype)

    heads = s.heads + 2 * s.kv_heads
    blocks = [
        {
            "norm1": one(),
            "norm2": one(),
            "qkv": r(s.embed, heads * s.head),
            "o": r(s.heads * s.head, s.embed),
            "router": r(s.embed, s.experts),
            "gate_up": r(s.experts, s.embed, 2 * s.mlp),
            "down": r(s.experts, s.mlp, s.embed),
        }
        for _ in range(s.layers)
    ]
    params = {"embed": r(s.vocab, s.embed), "head": r(s.embed, s.vocab), "blocks": blocks}
    leaves, shape = tree.flatten(params)

    def attend(p: Any, x: Tensor) -> Tensor:
        q, k, v = (
            (F.rms_norm(x, (s.embed,), p["norm1"]) @ p["qkv"])
            .view(s.batch, s.seq, heads, s.head)
            .transpose(1, 2)
            .split([s.heads, s.kv_heads, s.kv_heads], 1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + y.transpose(1, 2).reshape(s.batch, s.seq, -1) @ p["o"]

    def experts(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def block(p: Any, x: Tensor) -> Tensor:
            h = F.rms_norm(x, (s.embed,), p["norm2"]).view(-1, s.embed)
            w, chosen = torch.softmax((h @ p["router"]).float() + hot, -1).topk(s.top_k, -1)
            return x + f(h, chosen, w, p["gate_up"], p["down"]).view_as(x)

        return block

    def entropy(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((x @ w).float().view(-1, s.vocab), y.reshape(-1))

    def whole(attend: Any, block: Any, entropy: Any) -> Callable[[], Any]:
        def call() -> Any:
            given = [t.detach().requires_grad_() for t in leaves]
            p = tree.unflatten(shape, given)
            x = F.embedding(ids[:, :-1], p["embed"])
            for b in p["blocks"]:
                x = block(b, attend(b, x))
            loss = entropy(x, p["head"], ids[:, 1:])
            return loss, torch.autograd.grad(loss, given)

        return call

    def compiled(f: Any) -> Any:
        return torch.compile(f, dynamic=False) if run.gpu else f

    attend, entropy = compiled(attend), compiled(entropy)
    own = sum(t.nbytes for t in leaves)
    return [
        Contender("sketch with our expert layer", whole(attend, compiled(experts(layer_ours)), entropy), own),
        Contender("plain sketch", whole(attend, compiled(experts(layer_plain)), entropy), own),
    ]


def megatron_peer(run: Run, ids: Tensor, hot: Tensor) -> Contender:
    """Megatron-core's GPTModel on Transformer Engine's layers, with what helps it."""
    import importlib

    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    models = importlib.import_module("megatron.core.models.gpt")
    made = importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig
    s, known = run.size, {f.name for f in dataclasses.fields(made)}
    plain: dict[str, Any] = dict(
        num_layers=s.layers,
        hidden_size=s.embed,
        num_attention_heads=s.heads,
        num_query_groups=s.kv_heads,
        kv_channels=s.head,
        ffn_hidden_size=s.mlp,
        moe_ffn_hidden_size=s.mlp,
        num_moe_experts=s.experts,
        moe_router_topk=s.top_k,
        moe_grouped_gemm=True,
        moe_permute_fusion=True,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_router_dtype="fp32",
        moe_router_pre_softmax=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=True,
        persist_layer_norm=True,
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="te",
        apply_rope_fusion=True,
    )
    positions = torch.arange(s.seq, device="cuda").expand(s.batch, -1)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def built(**more: Any) -> Any:
        config = made(**{k: v for k, v in {**plain, **more}.items() if k in known})
        found = models.GPTModel(
            config,
            specs.get_gpt_layer_with_transformer_engine_spec(num_experts=s.experts, moe_grouped_gemm=True),
            vocab_size=s.vocab,
            max_sequence_length=s.seq,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        found = found.cuda().to(torch.bfloat16).train()
        if bool(hot.any()):
            for m in found.modules():
                if type(m).__name__ == "TopKRouter":
                    m.gating = lambda x, old=m.gating: (lambda y: y + hot.to(y.dtype).view_as(y))(old(x))
        return found

    def caller(m: Any) -> Callable[[], Any]:
        def call() -> Any:
            for p in m.parameters():
                p.grad = None
            loss = m(tokens, positions, None, labels=labels).float().mean()
            loss.backward()
            return loss.detach()

        return call

    def quick(call: Callable[[], Any]) -> float:
        for _ in range(2):
            call()
        samples = []
        for _ in range(4):
            run.wait()
            start = time.perf_counter()
            call()
            run.wait()
            samples.append(1e3 * (time.perf_counter() - start))
        return statistics.median(samples)

    # what helps it is kept
    tried: dict[str, float | None] = {}
    best: tuple[float, str, dict[str, Any], str] | None = None
    for name, more in (("router fusion", {"moe_router_fusion": True}), ("no router fusion", {})):
        m = guarded(f"Megatron, {name}", lambda more=more: built(**more))
        if m is None:
            continue
        for cutlass in ("1", "0"):
            os.environ["NVTE_USE_CUTLASS_GROUPED_GEMM"] = cutlass
            label = f"{name}, CUTLASS grouped product {cutlass}"
            ms = guarded(label, lambda m=m: quick(caller(m)))
            tried[label] = ms
            print(f"   megatron-core, {label}: {'failed' if ms is None else f'{ms:.1f} ms'}", flush=True)
            if ms is not None and (best is None or ms < best[0]):
                best = (ms, label, more, cutlass)
        del m
        run.free()
        if best is not None and run.left < 100:
            break
    if best is None:
        raise RuntimeError("no form of Megatron's model ran")
    os.environ["NVTE_USE_CUTLASS_GROUPED_GEMM"] = best[3]
    m = built(**best[2])
    call = caller(m)
    versions = {
        n: guarded(n, lambda n=n: importlib.import_module(n).__version__)
        for n in ("megatron.core", "transformer_engine")
    }
    run.found.setdefault("megatron", []).append({"tried_ms": tried, "kept": best[1], "versions": versions})
    print(f"   megatron-core {versions}: kept {best[1]}; loss {float(call()):.4f}", flush=True)
    for p in m.parameters():
        p.grad = None

    def clean() -> Any:
        loss = call()
        for p in m.parameters():
            p.grad = None  # others need the room
        return loss

    return Contender("megatron-core", clean, sum(p.nbytes for p in m.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"behind commas: {', '.join(PARTS)}")
    parser.add_argument("--loads", default=",".join(LOADS), help="of the whole model: balanced, skewed")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each contender")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds, behind which nothing new is begun")
    parser.add_argument("--no-megatron", action="store_true", help="leave the peer out")
    parser.add_argument("--alone", action="store_true", help="leave peers and sketches of the model out")
    parser.add_argument("--small", action="store_true", help="tiny sizes on a CPU, without torch.compile and peers")
    parser.add_argument("--out", type=Path, help="JSON, written behind every part")
    a = parser.parse_args()
    if not (a.small or a.no_megatron or a.alone) and "model" in a.parts:
        with contextlib.suppress(Exception):
            import transformer_engine.pytorch  # noqa: F401  # brings another cuDNN frontend: in front of torch's
    run = Run(a)
    print(f"torch {torch.__version__}, {run.found['where']}")
    parts: dict[str, Callable[[], Any]] = {
        "check": lambda: check(run),
        "kernels": lambda: kernels(run),
        "layer": lambda: layer(run),
        "model": lambda: model(run, a.loads.split(","), not (a.no_megatron or a.alone)),
    }
    for name in a.parts.split(","):
        print(f"== {name} ({time.perf_counter() - run.began:.0f} s)", flush=True)
        guarded(name, parts[name])
        run.save()
        run.free()
    print(f"took {time.perf_counter() - run.began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
