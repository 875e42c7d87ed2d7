"""The softmax of the cross-entropy: its statistics in one pass over the logits of a token, its gradient in another.

A program reads the logits of one token, or a part of them. Where the probabilities are kept, they are rounded to half
precision, and the second reading of a row finds it in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _capped(x, cap):
    """cap · tanh(x / cap)"""
    return cap - 2.0 * cap / (1.0 + tl.exp2(x / cap * 2.8853900817779268))


@triton.jit
def _softmax_statistics(
    logits,
    labels,
    filling,
    lse,
    target,
    kept,
    vocab,
    cap,
    label_share,
    every_share,
    CAP: tl.constexpr,
    FILLING: tl.constexpr,
    EVERY: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mine = logits + row * vocab
    at = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    everything = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        inside = start + at < vocab
        if FILLING:
            inside = inside & (tl.load(filling + start + at, mask=inside, other=1) == 0)
        x = tl.load(mine + start + at, mask=inside, other=-float("inf"))
        if CAP:
            x = tl.where(inside, _capped(x, cap), -float("inf"))
        if EVERY:
            everything += tl.where(inside, x, 0.0)
        new = tl.maximum(most, x)
        shift = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp2((most - shift) * 1.4426950408889634) + tl.exp2((x - shift) * 1.4426950408889634)
        most = new
    largest = tl.max(most, 0)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    whole = tl.log(tl.sum(total * tl.exp2((most - shift) * 1.4426950408889634), 0)) + shift
    if FILLING:  # a part of a vocabulary that is filling alone counts for nothing, finite as it must be
        whole = tl.maximum(whole, -3.4028234663852886e38)
    tl.store(lse + row, whole)
    label = tl.load(labels + row)
    here = label >= 0
    y = tl.load(mine + tl.where(here, label, 0))
    if CAP:
        y = _capped(y, cap)
    y = tl.where(here, y, 0.0)
    if EVERY:
        y = y * label_share + tl.sum(everything, 0) * every_share
    tl.store(target + row, y)
    if KEEP:
        for start in range(0, vocab, BLOCK):
            inside = start + at < vocab
            x = tl.load(mine + start + at, mask=inside, other=-float("inf"))
            p = tl.exp2((x - whole) * 1.4426950408889634)
            if FILLING:
                p = tl.where(tl.load(filling + start + at, mask=inside, other=1) == 0, p, 0.0)
            tl.store(kept + row * vocab + start + at, p.to(kept.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_gradient(
    logits,
    labels,
    filling,
    lse,
    target,
    g_lse,
    g_target,
    out,
    vocab,
    cap,
    label_share,
    every_share,
    CAP: tl.constexpr,
    FILLING: tl.constexpr,
    EVERY: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    x = tl.load(logits + row * vocab + at, mask=inside, other=0.0).to(tl.float32)
    whole, by_lse, by_target = tl.load(lse + row), tl.load(g_lse + row), tl.load(g_target + row)
    label = tl.load(labels + row)
    own = (at == label) & (label >= 0)
    if KEPT:  # x is the probability, rounded; the label's own is known exactly
        p = tl.where(own, tl.exp2((tl.load(target + row) - whole) * 1.4426950408889634), x)
    else:
        if CAP:
            x = _capped(x, cap)
        p = tl.exp2((x - whole) * 1.4426950408889634)
    g = p * by_lse + tl.where(own, by_target * label_share, 0.0)
    if EVERY:
        g += by_target * every_share
    if CAP:
        g = g * (1.0 - (x / cap) * (x / cap))
    if FILLING:
        g = tl.where(tl.load(filling + at, mask=inside, other=1) == 0, g, 0.0)
    tl.store(out + row * vocab + at, g.to(out.dtype.element_ty), mask=inside)


def statistics(
    logits: Tensor,
    labels: Tensor,
    filling: Tensor | None,
    lse: Tensor,
    target: Tensor,
    kept: Tensor | None,
    cap: float | None,
    label_share: float,
    every_share: float,
) -> None:
    """Writes the log-sum-exp and the target of logits fp32[token vocab] into lse and target, and the probabilities into
    `kept`, contiguous: without cap and label smoothing only. labels: -1 for none; filling: bool[vocab]."""
    assert kept is None or (cap is None and not every_share)
    rows, vocab = logits.shape
    if rows == 0:
        return
    block = max(128, min(4096, triton.next_power_of_2(vocab)))
    _softmax_statistics[(rows,)](
        logits,
        labels,
        labels if filling is None else filling.view(torch.uint8),
        lse,
        target,
        logits if kept is None else kept,
        vocab,
        1.0 if cap is None else cap,
        label_share,
        every_share,
        CAP=cap is not None,
        FILLING=filling is not None,
        EVERY=bool(every_share),
        KEEP=kept is not None,
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
    )


def gradient(
    logits: Tensor,
    labels: Tensor,
    filling: Tensor | None,
    lse: Tensor,
    target: Tensor | None,
    g_lse: Tensor,
    g_target: Tensor,
    out: Tensor,
    cap: float | None,
    label_share: float,
    every_share: float,
) -> None:
    """Writes the gradient by logits into `out`: of contiguous logits fp32[token vocab] or, with `target`, of what
    `statistics` kept, and then `out` may be it."""
    rows, vocab = logits.shape
    if rows == 0:
        return
    block = max(128, min(4096, triton.next_power_of_2(vocab)))
    _softmax_gradient[(rows, triton.cdiv(vocab, block))](
        logits,
        labels,
        labels if filling is None else filling.view(torch.uint8),
        lse,
        lse if target is None else target,
        g_lse,
        g_target,
        out,
        vocab,
        1.0 if cap is None else cap,
        label_share,
        every_share,
        CAP=cap is not None,
        FILLING=filling is not None,
        EVERY=bool(every_share),
        KEPT=target is not None,
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
    )
