"""The kernels of `fmegatron.kernels.moe`, in Triton: a counting sort, rows of tokens, the gated activation with a weight.

All sizes that depend on the routing stay on the device. No kernel adds atomically, so results are the same every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmegatron.kernels.gated import _sigmoid, _value_and_slope, rows_of

KINDS = {"swiglu": 0, "geglu": 1, "geglu_tanh": 2, "clamped_swiglu": 3}
SORTED = 128  # choices that a program of the sort takes
UNROLLED = 64  # most choices of a token that the kernels of rows take


# -------------------------------------------------------------------------------------------------------- counting sort


@triton.jit
def _ranks_in_block(experts, ranks, counts, total, groups, blocks, BLOCK: tl.constexpr):
    """Of each choice: how many of its block before it have the same expert. Of each block: how many have each expert."""
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = block * BLOCK + lane
    expert = tl.load(experts + at, mask=at < total, other=-1).to(tl.int32)
    real = (expert >= 0) & (expert < groups)
    same = expert[:, None] == expert[None, :]
    rank = tl.sum((same & (lane[None, :] < lane[:, None])).to(tl.int32), 1)
    equal = tl.sum(same.to(tl.int32), 1)
    tl.store(ranks + at, rank, mask=real)
    tl.store(counts + expert.to(tl.int64) * blocks + block, equal, mask=real & (rank == equal - 1))


@triton.jit
def _scan_counts(counts, totals, blocks, BLOCK: tl.constexpr):
    """counts[expert block] becomes the count in all earlier blocks; totals[expert]."""
    group = tl.program_id(0)
    mine = counts + group.to(tl.int64) * blocks
    at = tl.arange(0, BLOCK)
    seen = tl.zeros([1], tl.int32)
    for start in range(0, blocks, BLOCK):
        inside = start + at < blocks
        n = tl.load(mine + start + at, mask=inside, other=0)
        tl.store(mine + start + at, tl.cumsum(n, 0) - n + seen, mask=inside)
        seen += tl.sum(n, 0)
    tl.store(totals + group + tl.arange(0, 1), seen)


@triton.jit
def _place(
    experts,
    ranks,
    counts,
    totals,
    order,
    inverse,
    ends,
    total,
    rows,
    groups,
    blocks,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    expert = tl.load(experts + at, mask=inside, other=-1).to(tl.int32)
    real = (expert >= 0) & (expert < groups)
    start = tl.zeros([BLOCK], tl.int32)  # of the expert's rows
    behind = tl.zeros([1], tl.int32)
    bins = tl.arange(0, BINS)
    for first in range(0, groups, BINS):
        n = tl.load(totals + first + bins, mask=first + bins < groups, other=0)
        start += tl.sum(tl.where((first + bins)[None, :] < expert[:, None], n[None, :], 0), 1)
        if block == 0:
            tl.store(ends + first + bins, behind + tl.cumsum(n, 0), mask=first + bins < groups)
        behind += tl.sum(n, 0)
    earlier = tl.load(counts + expert.to(tl.int64) * blocks + block, mask=real, other=0)
    row = start + earlier + tl.load(ranks + at, mask=real, other=0)
    tl.store(inverse + at, tl.where(real, row, -1), mask=inside)
    tl.store(order + row, at, mask=real & (row < rows))
    tl.store(order + at, tl.full([BLOCK], -1, tl.int32), mask=(at >= behind) & (at < rows))


def sort(experts: Tensor, groups: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order[row], inverse[choice], ends[group]) of experts[choice], contiguous: see `fmegatron.kernels.moe`."""
    total = experts.numel()
    order, inverse, ends, totals, ranks = (
        torch.empty(n, dtype=torch.int32, device=experts.device) for n in (rows, total, groups, groups, total)
    )
    if total == 0:
        return order, inverse, ends.zero_()
    blocks = triton.cdiv(total, SORTED)
    counts = torch.zeros(groups * blocks, dtype=torch.int32, device=experts.device)
    _ranks_in_block[(blocks,)](experts, ranks, counts, total, groups, blocks, BLOCK=SORTED, num_warps=4)
    scan = min(1024, max(16, triton.next_power_of_2(blocks)))
    _scan_counts[(groups,)](counts, totals, blocks, BLOCK=scan, num_warps=4)
    _place[(blocks,)](
        experts, ranks, counts, totals, order, inverse, ends, total, rows, groups, blocks, BLOCK=SORTED, BINS=128, num_warps=4
    )  # fmt: skip
    return order, inverse, ends


# --------------------------------------------------------------------------------------------------------- best experts


@triton.jit
def _best(values, out, rows, columns, row_stride, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < columns)[None, :]
    x = tl.load(values + row.to(tl.int64)[:, None] * row_stride + at[None, :], mask=inside, other=0.0)
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # (-0 and 0 are equal)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # ordered as the numbers are
    place = (BLOCK - 1 - at).to(tl.int64)  # so that of equal values the first is the largest
    none = tl.full([ROWS, BLOCK], -(2**63), tl.int64)
    keys = tl.where((at < columns)[None, :], (bits.to(tl.int64) << 32) + place[None, :], none)
    for n in tl.static_range(K):
        best = tl.max(keys, 1)
        tl.store(out + row.to(tl.int64) * K + n, BLOCK - 1 - (best & 0xFFFFFFFF), mask=row < rows)
        keys = tl.where(keys == best[:, None], none, keys)


def best(values: Tensor, k: int) -> Tensor:
    """values fp32[row column] -> int64[row k], see `fmegatron.kernels.moe.top_experts`."""
    values = rows_of(values)
    rows, columns = values.shape
    out = torch.empty((rows, k), dtype=torch.int64, device=values.device)
    if rows == 0 or k == 0:
        return out
    block = triton.next_power_of_2(columns)
    tile = max(1, 1024 // block)
    _best[(triton.cdiv(rows, tile),)](
        values, out, rows, columns, values.stride(0), K=k, ROWS=tile, BLOCK=block, num_warps=4
    )
    return out


# ------------------------------------------------------------------------------------------------------- rows of tokens


@triton.jit
def _write_rows(
    x, order, inverse, out, rows, columns, x_row, CHOICES: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr
):
    """A token is read once and written to the row of each of its choices; besides, its share of the rows that belong to
    no choice are filled with zeros."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    v = tl.load(x + token * x_row + at, mask=inside, other=0.0)
    for n in tl.static_range(CHOICES):
        row = tl.load(inverse + token * CHOICES + n).to(tl.int64)
        tl.store(out + row * columns + at, v, mask=inside & (row >= 0) & (row < rows))
    for n in tl.static_range(SHARE):
        row = token * SHARE + n
        empty = tl.load(order + row, mask=row < rows, other=0) < 0
        tl.store(out + row * columns + at, tl.zeros_like(v), mask=inside & empty)


@triton.jit
def _sum_rows(y, inverse, out, rows, columns, y_row, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    total = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(CHOICES):
        row = tl.load(inverse + token * CHOICES + n).to(tl.int64)
        there = inside & (row >= 0) & (row < rows)
        total += tl.load(y + row * y_row + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + token * columns + at, total.to(out.dtype.element_ty), mask=inside)


def _columns(n: int) -> tuple[int, int, int]:
    """(programs, block, warps)"""
    block = min(2048, max(128, triton.next_power_of_2(n)))
    return triton.cdiv(n, block), block, max(1, block // 512)


def gather(x: Tensor, order: Tensor, inverse: Tensor, choices: int) -> Tensor:
    """x[token embed] -> [row embed]"""
    tokens, columns = x.shape
    rows = order.shape[0]
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if tokens == 0 or columns == 0:
        return out.zero_()
    x = rows_of(x)
    parts, block, warps = _columns(columns)
    share = triton.cdiv(rows, tokens)
    _write_rows[(tokens, parts)](
        x, order, inverse, out, rows, columns, x.stride(0), CHOICES=choices, SHARE=share, BLOCK=block, num_warps=warps
    )
    return out


def add_up(y: Tensor, inverse: Tensor, choices: int) -> Tensor:
    """y[row embed] -> [token embed]"""
    tokens, columns = inverse.shape[0] // choices, y.shape[1]
    out = torch.empty((tokens, columns), dtype=y.dtype, device=y.device)
    if out.numel() == 0 or y.shape[0] == 0:
        return out.zero_()
    y = rows_of(y)
    parts, block, warps = _columns(columns)
    _sum_rows[(tokens, parts)](
        y, inverse, out, y.shape[0], columns, y.stride(0), CHOICES=choices, BLOCK=block, num_warps=warps
    )
    return out


@triton.jit
def _sum_groups(x, ends, out, columns, x_row, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        there = (row < end)[:, None] & (at < columns)[None, :]
        total += tl.load(x + row.to(tl.int64)[:, None] * x_row + at[None, :], mask=there, other=0.0).to(tl.float32)
    sums = tl.sum(total, 0)
    tl.store(out + group.to(tl.int64) * columns + at, sums.to(out.dtype.element_ty), mask=at < columns)


def sum_groups(x: Tensor, ends: Tensor) -> Tensor:
    """x[row columns] -> [group columns], the sum over the rows of each group."""
    x = rows_of(x)
    out = torch.empty((ends.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    if x.shape[0] == 0:
        return out.zero_()
    grid = (ends.shape[0], triton.cdiv(x.shape[1], 64))
    _sum_groups[grid](x, ends, out, x.shape[1], x.stride(0), ROWS=32, BLOCK=64, num_warps=4)
    return out


# ----------------------------------------------------------------------------------------- gated activation with weight


@triton.jit
def _parts(x, u, limit, slant, KIND: tl.constexpr):
    """(activation of the gate, its derivative, the factor that up becomes, its derivative)"""
    if KIND == 3:
        free = x <= limit
        x = tl.minimum(x, limit)
        s = _sigmoid(slant * x)
        y = x * s
        slope = tl.where(free, s + slant * y * (1.0 - s), 0.0)
        by_up = tl.where((u <= limit) & (u >= -limit), 1.0, 0.0)
        return y, slope, tl.minimum(tl.maximum(u, -limit), limit) + 1.0, by_up
    else:
        y, slope = _value_and_slope(x, KIND)
        return y, slope, u, tl.full(u.shape, 1.0, tl.float32)


@triton.jit
def _weighted_forward(
    h, w, ends, out, rows, groups, columns, limit, slant, h_row,
    KIND: tl.constexpr, ENDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = rows
    if ENDS:
        used = tl.load(ends + groups - 1)
    wide = row.to(tl.int64)[:, None]
    inside = (at < columns)[None, :]
    read = inside & (row < used)[:, None]
    x = tl.load(h + wide * h_row + at[None, :], mask=read, other=0.0).to(tl.float32)
    u = tl.load(h + wide * h_row + columns + at[None, :], mask=read, other=0.0).to(tl.float32)
    weight = tl.load(w + row, mask=row < used, other=0.0).to(tl.float32)
    y, _, v, _ = _parts(x, u, limit, slant, KIND)
    z = y * v * weight[:, None]
    tl.store(out + wide * columns + at[None, :], z.to(out.dtype.element_ty), mask=inside & (row < rows)[:, None])


@triton.jit
def _weighted_part(
    part,
    g,
    h,
    g_h,
    row,
    weight,
    used,
    rows,
    columns,
    limit,
    slant,
    g_row,
    h_row,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of a part of the columns, and what they give to that of the weight."""
    wide = row.to(tl.int64)[:, None]
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = (at < columns)[None, :]
    read = inside & (row < used)[:, None]
    write = inside & (row < rows)[:, None]
    x = tl.load(h + wide * h_row + at[None, :], mask=read, other=0.0).to(tl.float32)
    u = tl.load(h + wide * h_row + columns + at[None, :], mask=read, other=0.0).to(tl.float32)
    d = tl.load(g + wide * g_row + at[None, :], mask=read, other=0.0).to(tl.float32)
    y, slope, v, by_up = _parts(x, u, limit, slant, KIND)
    by_weight = tl.sum(d * y * v, 1)
    d = d * weight[:, None]
    gate_at = g_h + wide * (2 * columns) + at[None, :]
    tl.store(gate_at, (d * v * slope).to(g_h.dtype.element_ty), mask=write)
    tl.store(gate_at + columns, (d * y * by_up).to(g_h.dtype.element_ty), mask=write)
    return by_weight


@triton.jit
def _weighted_backward(
    g, h, w, ends, g_h, g_w, rows, groups, columns, limit, slant, g_row, h_row,
    KIND: tl.constexpr, ENDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = rows
    if ENDS:
        used = tl.load(ends + groups - 1)
    weight = tl.load(w + row, mask=row < used, other=0.0).to(tl.float32)
    by_weight = tl.zeros([ROWS], tl.float32)
    if PARTS <= 8:
        for part in tl.static_range(PARTS):
            by_weight += _weighted_part(
                part, g, h, g_h, row, weight, used, rows, columns, limit, slant, g_row, h_row, KIND, BLOCK
            )
    else:
        for part in range(PARTS):
            by_weight += _weighted_part(
                part, g, h, g_h, row, weight, used, rows, columns, limit, slant, g_row, h_row, KIND, BLOCK
            )
    tl.store(g_w + row, by_weight.to(g_w.dtype.element_ty), mask=row < rows)


def _tile(columns: int) -> tuple[int, int]:
    """(rows, columns) of a program, which has 4 warps."""
    block = next((b for b in (512, 256) if columns % b == 0), min(512, max(64, triton.next_power_of_2(columns))))
    return 1024 // block, block


def weighted(h: Tensor, w: Tensor, ends: Tensor | None, kind: str, limit: float, slant: float) -> Tensor:
    """h[row 2·emlp] -> [row emlp]"""
    rows, columns = h.shape[0], h.shape[1] // 2
    out = torch.empty((rows, columns), dtype=h.dtype, device=h.device)
    if out.numel() == 0:
        return out
    h, w = rows_of(h), w.contiguous()
    tile, block = _tile(columns)
    _weighted_forward[(triton.cdiv(rows, tile), triton.cdiv(columns, block))](
        h, w, w if ends is None else ends, out, rows, 0 if ends is None else ends.shape[0], columns, limit, slant,
        h.stride(0), KIND=KINDS[kind], ENDS=ends is not None, ROWS=tile, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def weighted_backward(
    g: Tensor, h: Tensor, w: Tensor, ends: Tensor | None, kind: str, limit: float, slant: float
) -> tuple[Tensor, Tensor]:
    """(gradient of h, of w), new tensors."""
    rows, columns = g.shape
    g_h = torch.empty((rows, 2 * columns), dtype=h.dtype, device=h.device)
    g_w = torch.empty(rows, dtype=w.dtype, device=w.device)
    if g_h.numel() == 0:
        return g_h, g_w.zero_()
    g, h, w = rows_of(g), rows_of(h), w.contiguous()
    tile, block = _tile(columns)
    _weighted_backward[(triton.cdiv(rows, tile),)](
        g, h, w, w if ends is None else ends, g_h, g_w, rows, 0 if ends is None else ends.shape[0], columns, limit, slant,
        g.stride(0), h.stride(0), KIND=KINDS[kind], ENDS=ends is not None, ROWS=tile, BLOCK=block,
        PARTS=triton.cdiv(columns, block), num_warps=4,
    )  # fmt: skip
    return g_h, g_w
