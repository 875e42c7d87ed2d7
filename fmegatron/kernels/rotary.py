"""Queries and keys turned by their positions in one launch, and values beside them moved: a program takes all heads of one
token.

What is read and what is written may each be a part of one larger tensor: so queries, keys and values come out of one
product, and their gradients go back into one, in the pass that turns them.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    out_outer,
    out_inner,
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
    """Heads x[heads features] to out, head h of either at (h // inner) outer + (h % inner) inner."""
    features = 2 * half + REST
    pair = tl.arange(0, HALF)[None, :]
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        source = x + (head // inner) * x_outer + (head % inner) * x_inner
        target = out + (head // inner) * out_outer + (head % inner) * out_inner
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
def _move_heads(x, out, x_outer, out_outer, heads, features, HEADS: tl.constexpr, FEATURES: tl.constexpr):
    """Heads x[heads features] to out as they are, head h of either at h outer."""
    feature = tl.arange(0, FEATURES)[None, :]
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        inside = (head < heads) & (feature < features)
        found = tl.load(x + head * x_outer + feature, mask=inside)
        tl.store(out + head * out_outer + feature, found, mask=inside)


@triton.jit
def _rotary_turn(
    q,
    k,
    v,
    q_out,
    k_out,
    v_out,
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
    v_batch,
    v_token,
    v_outer,
    q_out_batch,
    q_out_token,
    q_out_outer,
    q_out_inner,
    k_out_batch,
    k_out_token,
    k_out_outer,
    k_out_inner,
    v_out_batch,
    v_out_token,
    v_out_outer,
    q_heads,
    group,
    k_heads,
    k_group,
    v_heads,
    table_batch,
    half,
    BACK: tl.constexpr,
    PARTS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
    FEATURES: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row, token = place // tokens, place % tokens
    pair = tl.arange(0, HALF)
    at = row * table_batch + token * half + pair
    c = tl.load(cos + at, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + at, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    if BACK:
        s = -s
    _turn_heads(
        q + row * q_batch + token * q_token,
        q_out + row * q_out_batch + token * q_out_token,
        q_outer,
        q_inner,
        q_out_outer,
        q_out_inner,
        q_heads,
        group,
        c,
        s,
        half,
        INTERLEAVED,
        REST,
        HEADS,
        HALF,
        TAIL,
    )
    if PARTS > 1:
        _turn_heads(
            k + row * k_batch + token * k_token,
            k_out + row * k_out_batch + token * k_out_token,
            k_outer,
            k_inner,
            k_out_outer,
            k_out_inner,
            k_heads,
            k_group,
            c,
            s,
            half,
            INTERLEAVED,
            REST,
            HEADS,
            HALF,
            TAIL,
        )
    if PARTS > 2:
        _move_heads(
            v + row * v_batch + token * v_token,
            v_out + row * v_out_batch + token * v_out_token,
            v_outer,
            v_out_outer,
            v_heads,
            2 * half + REST,
            HEADS,
            FEATURES,
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
    xs: Sequence[Tensor], cos: Tensor, sin: Tensor, *, interleaved: bool = False, back: bool = False
) -> list[Tensor]:
    """One to three of (q, k, v): the first two turned, the third as it is, all new tensors: x[batch seq … head] by tables
    [seq half] or [batch seq half], which are contiguous.

    back: by the opposite angles.
    """
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    turn_into(outs, xs, cos, sin, interleaved=interleaved, back=back)
    return outs


def turn_into(
    outs: Sequence[Tensor],
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    back: bool = False,
) -> None:
    """As `turn`, written to `outs`, which may be parts of one tensor, or `xs` themselves: evenly spaced, the head's features
    side by side; v [batch seq heads head]."""
    if outs[0].numel() == 0:
        return
    (a, b, c), (ao, bo, co) = (([*(_as_heads(x) for x in given)] * 3)[:3] for given in (xs, outs))
    half, features = cos.shape[-1], xs[0].shape[-1]
    rest, size = features - 2 * half, triton.next_power_of_2(half)
    heads, warps = _tile(a.shape[2] * a.shape[3], size)
    _rotary_turn[(a.shape[0] * a.shape[1],)](
        a,
        b,
        c,
        ao,
        bo,
        co,
        cos,
        sin,
        a.shape[1],
        *a.stride()[:4],
        *b.stride()[:4],
        *c.stride()[:3],
        *ao.stride()[:4],
        *bo.stride()[:4],
        *co.stride()[:3],
        a.shape[2] * a.shape[3],
        a.shape[3],
        b.shape[2] * b.shape[3],
        b.shape[3],
        c.shape[2],
        cos.stride(0) if cos.ndim == 3 else 0,
        half,
        BACK=back,
        PARTS=len(xs),
        INTERLEAVED=interleaved,
        REST=rest,
        HEADS=heads,
        HALF=size,
        TAIL=triton.next_power_of_2(max(rest, 1)),
        FEATURES=triton.next_power_of_2(features),
        num_warps=warps,
    )
