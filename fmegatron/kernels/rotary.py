"""Queries and keys turned by their positions, both in one launch: a program turns all heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn_heads(
    x,
    out,
    x_outer,
    x_inner,
    heads,
    inner,
    cos,
    sin,
    half,
    INTERLEAVED: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Heads x[heads features], head h at (h // inner) x_outer + (h % inner) x_inner, to contiguous out."""
    features = 2 * half + REST
    pair = tl.arange(0, HALF)[None, :]
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        source = x + (head // inner) * x_outer + (head % inner) * x_inner
        target = out + head * features
        inside = (head < heads) & (pair < half)
        if INTERLEAVED:
            first, second = 2 * pair, 2 * pair + 1
        else:
            first, second = pair, half + pair
        a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + first, (a * cos - b * sin).to(out.dtype.element_ty), mask=inside)
        tl.store(target + second, (b * cos + a * sin).to(out.dtype.element_ty), mask=inside)
        if REST > 0:
            tail = 2 * half + tl.arange(0, TAIL)[None, :]
            passed = (head < heads) & (tail < features)
            tl.store(target + tail, tl.load(source + tail, mask=passed), mask=passed)


@triton.jit
def _rotary_turn(
    q,
    k,
    q_out,
    k_out,
    cos,
    sin,
    tokens,
    q_batch,
    q_token,
    q_outer,
    q_inner,
    k_batch,
    k_token,
    k_outer,
    k_inner,
    q_heads,
    group,
    k_heads,
    k_group,
    table_batch,
    half,
    BACK: tl.constexpr,
    KEYS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row, token = place // tokens, place % tokens
    pair = tl.arange(0, HALF)
    at = row * table_batch + token * half + pair
    c = tl.load(cos + at, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + at, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    if BACK:
        s = -s
    features = 2 * half + REST
    source = q + row * q_batch + token * q_token
    target = q_out + place * q_heads * features
    _turn_heads(source, target, q_outer, q_inner, q_heads, group, c, s, half, INTERLEAVED, REST, HEADS, HALF, TAIL)
    if KEYS:
        source = k + row * k_batch + token * k_token
        target = k_out + place * k_heads * features
        _turn_heads(
            source, target, k_outer, k_inner, k_heads, k_group, c, s, half, INTERLEAVED, REST, HEADS, HALF, TAIL
        )


def _as_heads(x: Tensor) -> Tensor:
    """x[batch seq … head] as [batch seq outer inner head], a view where its dims allow it."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    if x.ndim == 3:
        return x[:, :, None, None]
    return x.unsqueeze(3) if x.ndim == 4 else x.reshape(*x.shape[:2], -1, *x.shape[-2:])


def _tile(heads: int, pairs: int) -> tuple[int, int]:
    """(heads, warps) of what a program turns at a time."""
    heads = min(triton.next_power_of_2(heads), max(1, 2048 // pairs))
    return heads, max(1, min(4, heads * pairs // 256))


def turn(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, interleaved: bool = False, back: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(q, k) turned, new tensors: x[batch seq … head] by tables [seq half] or [batch seq half], which are contiguous.

    back: by the opposite angles.
    """
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = None if k is None else torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if q_out.numel() == 0:
        return q_out, k_out
    a = _as_heads(q)
    b = a if k is None else _as_heads(k)
    half, features = cos.shape[-1], q.shape[-1]
    rest, size = features - 2 * half, triton.next_power_of_2(half)
    heads, warps = _tile(a.shape[2] * a.shape[3], size)
    _rotary_turn[(q.shape[0] * q.shape[1],)](
        a,
        b,
        q_out,
        q_out if k_out is None else k_out,
        cos,
        sin,
        q.shape[1],
        *a.stride()[:4],
        *b.stride()[:4],
        a.shape[2] * a.shape[3],
        a.shape[3],
        b.shape[2] * b.shape[3],
        b.shape[3],
        cos.stride(0) if cos.ndim == 3 else 0,
        half,
        BACK=back,
        KEYS=k is not None,
        INTERLEAVED=interleaved,
        REST=rest,
        HEADS=heads,
        HALF=size,
        TAIL=triton.next_power_of_2(max(rest, 1)),
        num_warps=warps,
    )
    return q_out, k_out
