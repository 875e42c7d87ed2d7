"""Each primitive against the same mathematics written naively in torch operations: time and peak memory of forward and
backward, and the largest relative error of a result or gradient (on a GPU against the naive one in bfloat16, elsewhere
against float64).

`python tests/bench/primitives.py` prints a table; on a GPU in bfloat16 at the sizes of a 1.2B model, elsewhere small in
float32 (and without memory). Ratios are ours ÷ naive, measured alternately in one run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fmegatron.primitives import (
    apply_rotary,
    attention,
    geglu,
    gelu,
    layer_norm,
    linear_cross_entropy,
    relu2,
    rms_norm,
    rotary_table,
    swiglu,
)


@dataclass(frozen=True)
class Sizes:
    batch: int
    seq: int
    kv: int
    group: int
    head: int
    embed: int
    mlp: int
    vocab: int


@dataclass(frozen=True)
class Case:
    """Two functions of the same arguments, all of which need a gradient."""

    name: str
    ours: Callable[..., Tensor]
    naive: Callable[..., Tensor]
    args: tuple[Tensor, ...]


def cases(s: Sizes, device: str, dtype: torch.dtype) -> list[Callable[[], Case]]:
    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device) * scale).to(dtype)

    def attend(name: str, **options: Any) -> Callable[[], Case]:
        def make() -> Case:
            q = draw(s.batch, s.seq, s.kv, s.group, s.head)
            k, v = (draw(s.batch, s.seq, s.kv, s.head) for _ in "kv")
            chosen = dict(options)
            if chosen.pop("documents", False):
                at = torch.arange(s.seq, device=device)
                chosen["segments"] = (at // (s.seq // 5 + 1)).expand(s.batch, -1).to(torch.int32).contiguous()
            if chosen.pop("explicit", False):
                chosen["positions"] = torch.arange(s.seq, device=device)
            args = (q, k, v)
            if chosen.pop("with_sinks", False):
                args = (*args, draw(s.kv, s.group))
            return Case(
                f"attention {name}",
                lambda q, k, v, *sinks: attention(q, k, v, sinks=sinks[0] if sinks else None, **chosen),
                lambda q, k, v, *sinks: naive_attention(q, k, v, *sinks, **chosen),
                args,
            )

        return make

    def stream(scale: float = 1.0) -> Tensor:
        return draw(s.batch, s.seq, s.embed, scale=scale)

    def wide() -> tuple[Tensor, Tensor]:
        return draw(s.batch, s.seq, s.mlp), draw(s.batch, s.seq, s.mlp)

    labels = torch.randint(0, s.vocab, (s.batch, s.seq), device=device)

    def loss(name: str, **options: Any) -> Callable[[], Case]:
        def make() -> Case:
            w = draw(s.vocab, s.embed, scale=s.embed**-0.5)
            equation = "batch seq embed, vocab embed -> batch seq vocab"
            return Case(
                f"linear cross-entropy {name}",
                lambda x, w: linear_cross_entropy(x, w, labels, equation=equation, **options),
                lambda x, w: naive_loss(x, w, labels, **options),
                (stream(), w),
            )

        return make

    def table() -> tuple[Tensor, Tensor]:
        return rotary_table(torch.arange(s.seq, device=device), s.head)

    def turned(name: str, interleaved: bool) -> Callable[[], Case]:
        def make() -> Case:
            cos, sin = table()
            x = draw(s.batch, s.seq, s.kv * s.group, s.head)
            return Case(
                f"rotary {name}",
                lambda x: apply_rotary(x, cos, sin, interleaved=interleaved),
                lambda x: naive_rotary(x, cos, sin, interleaved),
                (x,),
            )

        return make

    return [
        attend("causal"),
        attend("full", causal=False),
        attend("window 1/8", window=max(1, s.seq // 8)),
        attend("sinks", with_sinks=True),
        attend("window, sinks", window=max(1, s.seq // 8), with_sinks=True),
        attend("soft-cap", softcap=30.0),
        attend("soft-cap, window", softcap=30.0, window=max(1, s.seq // 8)),
        attend("documents", documents=True),
        attend("explicit positions", explicit=True),
        lambda: Case("rms_norm", rms_norm, naive_rms, (stream(), draw(s.embed))),
        lambda: Case(
            "rms_norm 1 + w",
            lambda x, w: rms_norm(x, w, zero_centred=True, wide_weight=True),
            lambda x, w: (naive_rms(x.float(), 1 + w.float())).to(x.dtype),
            (stream(), draw(s.embed)),
        ),
        lambda: Case("layer_norm", layer_norm, naive_layer_norm, (stream(), draw(s.embed), draw(s.embed))),
        turned("half-split", False),
        turned("interleaved", True),
        lambda: Case("swiglu", swiglu, lambda g, u: F.silu(g) * u, wide()),
        lambda: Case("geglu", geglu, lambda g, u: F.gelu(g) * u, wide()),
        lambda: Case(
            "geglu tanh",
            lambda g, u: geglu(g, u, approximate="tanh"),
            lambda g, u: 0.5 * g * (1 + torch.tanh(0.7978845608 * (g + 0.044715 * g * g * g))) * u,
            wide(),
        ),
        lambda: Case(
            "gelu tanh",
            lambda x: gelu(x, approximate="tanh"),
            lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x))),
            wide()[:1],
        ),
        lambda: Case("relu²", relu2, lambda x: F.relu(x) * F.relu(x), wide()[:1]),
        loss("plain"),
        loss("smoothing", label_smoothing=0.1),
        loss("z-loss", z_loss=1e-4),
        loss("soft-cap", softcap=30.0),
        loss("all three", label_smoothing=0.1, z_loss=1e-4, softcap=30.0),
    ]


# The same mathematics, naively.


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    segments: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    scores = torch.einsum("bqngh,bknh->bngqk", q, k) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(q.shape[1], device=q.device)
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device)
    if causal:
        seen = at[:, None] >= at
    if window is not None:
        seen = seen & ((at[:, None] - at).abs() < window)
    if segments is not None:
        seen = seen & (segments[0][:, None] == segments[0])
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks[None, :, :, None, None].expand(*scores.shape[:-1], 1)
        p = torch.cat([scores, column], -1).softmax(-1, dtype=torch.float32)[..., :-1].to(q.dtype)
    else:
        p = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return torch.einsum("bngqk,bknh->bqngh", p, v)


def naive_rms(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def naive_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    return (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * w + b).to(x.dtype)


def naive_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    half = cos.shape[-1]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    parts = (a * cos - b * sin, a * sin + b * cos)
    y = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return y.to(x.dtype)


def naive_loss(
    x: Tensor,
    w: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    logits = (x @ w.t()).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat = logits.flatten(0, -2)
    each = F.cross_entropy(flat, labels.flatten(), reduction="none", label_smoothing=label_smoothing)
    return (each + z_loss * flat.logsumexp(-1).square()).view(labels.shape)


# Measuring


def run(f: Callable[..., Tensor], args: tuple[Tensor, ...], g: Tensor) -> list[Tensor]:
    """[result, gradients of the arguments]"""
    leaves = [a.detach().requires_grad_() for a in args]
    y = f(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, exact, strict=True))


def measure(case: Case, device: str, repeats: int, wide: torch.dtype) -> tuple[float, ...]:
    """(ms of ours, of the naive one, MiB of both, the error of ours)"""
    g = torch.randn_like(case.ours(*case.args))
    functions = (case.ours, case.naive)
    if device == "cuda":
        exact = run(case.naive, case.args, g)  # in float32 it would not fit at this size
    else:
        exact = run(case.naive, tuple(a.to(wide) for a in case.args), g.to(wide))
    wrong = error(run(case.ours, case.args, g), exact)
    del exact
    times: list[list[float]] = [[], []]
    peaks = [0.0, 0.0]
    for n in range(repeats + 2):
        for i, f in enumerate(functions):
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            run(f, case.args, g)
            if device == "cuda":
                torch.cuda.synchronize()
                peaks[i] = (torch.cuda.max_memory_allocated() - before) / 2**20
            if n >= 2:
                times[i].append((time.perf_counter() - start) * 1e3)
    a, b = (statistics.median(t) for t in times)
    return a, b, *peaks, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", default="", help="part of the names to run")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, dtype, wide = ("cuda", torch.bfloat16, torch.float32) if cuda else ("cpu", torch.float32, torch.float64)
    large = Sizes(batch=4, seq=4096, kv=4, group=4, head=128, embed=2048, mlp=8192, vocab=32768)
    small = Sizes(batch=2, seq=128, kv=2, group=2, head=16, embed=64, mlp=128, vocab=512)
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name() if cuda else 'CPU'}, {dtype}, {large if cuda else small}")
    print(f"{'':32} {'ms':>8} {'naive':>8} {'ratio':>6} {'MiB':>9} {'naive':>9} {'ratio':>6} {'error':>8}")
    for make in cases(large if cuda else small, device, dtype):
        case = make()
        if args.only not in case.name:
            continue
        ms, naive_ms, mib, naive_mib, wrong = measure(case, device, args.repeats, wide)
        memory = (
            f"{mib:9.0f} {naive_mib:9.0f} {mib / max(naive_mib, 1e-9):6.2f}" if cuda else f"{'-':>9} {'-':>9} {'-':>6}"
        )
        print(f"{case.name:32} {ms:8.3f} {naive_ms:8.3f} {ms / naive_ms:6.2f} {memory} {wrong:8.1e}", flush=True)
        del case


if __name__ == "__main__":
    main()
