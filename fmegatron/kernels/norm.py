"""RMS and layer norms of rows: the residual addition before them in the same pass, the residual gradient behind.

A program holds a row, or several short ones, in registers, so that each is read and written once. The gradients of weight and bias are summed in fp32
by the programs of the backward, each over its rows, and these sums by torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_forward(
    x,
    y,
    weight,
    bias,
    total,
    out,
    mean,
    scale,
    rows,
    columns,
    x_row,
    y_row,
    eps,
    CENTRED: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    held, within = row < rows, at[None, :] < columns
    inside = held[:, None] & within
    v = tl.load(x + row[:, None] * x_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
    place = row[:, None] * columns + at[None, :]
    if ADD:
        v += tl.load(y + row[:, None] * y_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
        added = v.to(total.dtype.element_ty)  # the sum that others read is the one that is normed
        tl.store(total + place, added, mask=inside)
        v = added.to(tl.float32)
    if CENTRED:
        m = tl.sum(v, 1) / columns
        v = tl.where(within, v - m[:, None], 0.0)
        tl.store(mean + row, m, mask=held)
    r = 1.0 / tl.sqrt(tl.sum(v * v, 1) / columns + eps)
    tl.store(scale + row, r, mask=held)
    n = v * r[:, None]
    if WEIGHT:
        w = tl.load(weight + at[None, :], mask=within, other=0.0).to(tl.float32)
        if ONE_PLUS:
            w = w + 1.0
        if not WIDE:
            n = n.to(out.dtype.element_ty).to(tl.float32)
            w = w.to(out.dtype.element_ty).to(tl.float32)
        n = n * w
    if BIAS:
        n = n + tl.load(bias + at[None, :], mask=within, other=0.0).to(tl.float32)
    tl.store(out + place, n.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    g,
    g_total,
    x,
    weight,
    mean,
    scale,
    gx,
    gw,
    gb,
    rows,
    columns,
    g_row,
    total_row,
    x_row,
    CENTRED: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    within = at[None, :] < columns
    if WEIGHT:
        w = tl.load(weight + at[None, :], mask=within, other=0.0).to(tl.float32)
        if ONE_PLUS:
            w = w + 1.0
        sum_w = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        sum_b = tl.zeros([BLOCK], tl.float32)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        held = row < rows
        inside = held[:, None] & within
        d = tl.load(g + row[:, None] * g_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + row[:, None] * x_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
        if ADD:
            kept = tl.load(g_total + row[:, None] * total_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
        r = tl.load(scale + row, mask=held, other=0.0)
        if CENTRED:
            m = tl.load(mean + row, mask=held, other=0.0)
            v = tl.where(within, v - m[:, None], 0.0)
        n = v * r[:, None]
        if BIAS:
            sum_b += tl.sum(d, 0)
        if WEIGHT:
            sum_w += tl.sum(d * n, 0)
            d = d * w
        change = d - n * (tl.sum(d * n, 1) / columns)[:, None]
        if CENTRED:
            change = change - (tl.sum(d, 1) / columns)[:, None]
        change = change * r[:, None]
        if ADD:
            change = change + kept
        tl.store(gx + row[:, None] * columns + at[None, :], change.to(gx.dtype.element_ty), mask=inside)
    place = program.to(tl.int64) * columns + at
    if WEIGHT:
        tl.store(gw + place, sum_w, mask=at < columns)
    if BIAS:
        tl.store(gb + place, sum_b, mask=at < columns)


def rows_of(x: Tensor) -> Tensor:
    """x as [rows, columns], a view where its rows are evenly spaced."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-1])


def _tile(columns: int) -> tuple[int, int, int]:
    """(rows, elements of a row, warps) of what a program holds at a time."""
    block = max(16, triton.next_power_of_2(columns))
    rows = max(1, 2048 // block)
    return rows, block, min(16, max(1, rows * block // 512))


def forward(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool = False,
    one_plus: bool = False,
    wide: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor]:
    """(x + y or None, its norm, mean of each row or None, 1 / its deviation), the last two fp32[... 1].

    centred: layer norm, not RMS norm. one_plus: multiply by 1 + weight. wide: multiply before rounding.
    """
    shape, columns = x.shape, x.shape[-1]
    a, b = rows_of(x), rows_of(x if y is None else y)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    total = None if y is None else torch.empty_like(out)
    scale = torch.empty((*shape[:-1], 1), dtype=torch.float32, device=x.device)
    mean = torch.empty_like(scale) if centred else None
    if out.numel() == 0:
        return total, out, mean, scale
    rows, block, warps = _tile(columns)
    _norm_forward[(triton.cdiv(a.shape[0], rows),)](
        a,
        b,
        a if weight is None else weight,
        a if bias is None else bias,
        out if total is None else total,
        out,
        scale if mean is None else mean,
        scale,
        a.shape[0],
        columns,
        a.stride(0),
        b.stride(0),
        eps,
        CENTRED=centred,
        ADD=y is not None,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        ONE_PLUS=one_plus,
        WIDE=wide,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
    return total, out, mean, scale


def backward(
    g: Tensor,
    g_total: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    scale: Tensor,
    bias: bool = False,
    one_plus: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(gradient of x, of weight, of bias), the last two fp32, of a norm of x of which `forward` gave mean and scale.

    g_total: what reaches x by another way, such as the residual stream, which is added.
    """
    columns = x.shape[-1]
    d, v = rows_of(g), rows_of(x)
    other = d if g_total is None else rows_of(g_total)
    gx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, block, warps = _tile(columns)
    programs = max(1, min(triton.cdiv(v.shape[0], rows), _programs(x)))
    some = weight is not None
    gw = torch.empty((programs if some else 0, columns), dtype=torch.float32, device=x.device)
    gb = torch.empty((programs if bias else 0, columns), dtype=torch.float32, device=x.device)
    if gx.numel():
        _norm_backward[(programs,)](
            d,
            other,
            v,
            v if weight is None else weight,
            scale if mean is None else mean,
            scale,
            gx,
            gw if some else gx,
            gb if bias else gx,
            v.shape[0],
            columns,
            d.stride(0),
            other.stride(0),
            v.stride(0),
            CENTRED=mean is not None,
            ADD=g_total is not None,
            WEIGHT=some,
            BIAS=bias,
            ONE_PLUS=one_plus,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    else:
        gw, gb = gw.zero_(), gb.zero_()
    return gx, gw.sum(0) if some else None, gb.sum(0) if bias else None


def _programs(x: Tensor) -> int:
    """Of the backward: as many as the device runs at a time."""
    if x.device.type != "cuda":
        return 4
    return 8 * torch.cuda.get_device_properties(x.device).multi_processor_count
