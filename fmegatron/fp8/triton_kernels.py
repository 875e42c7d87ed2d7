"""The Triton kernels of `fmegatron.fp8.kernels`: each reads a matrix once, tile by tile, and writes it in fp8 as it lies and
transposed. Imported only where Triton is installed and wanted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmegatron.fp8.kernels import block_scales
from fmegatron.fp8.policy import BLOCK

SPAN = 8192  # numbers that one program reads to find the largest
TILE = 128


@triton.jit
def _largest_kernel(x_ptr, out_ptr, n, SPAN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0), tl.max(tl.abs(x), 0))


@triton.jit
def _largest_by_tile_kernel(
    x_ptr, rows_ptr, columns_ptr, r, c, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr
):
    """Of every tile the largest of each row, to rows[tile of columns, row], and of each column, to columns[tile of rows,
    column]."""
    i, j = tl.program_id(0), tl.program_id(1)
    row, column = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < r) & (column[None, :] < c)
    x = tl.load(x_ptr + row[:, None].to(tl.int64) * c + column[None, :], mask=inside, other=0.0)
    size = tl.abs(x.to(tl.float32))
    if ROWS:
        tl.store(rows_ptr + j.to(tl.int64) * r + row, tl.max(size, 1), mask=row < r)
    if COLUMNS:
        tl.store(columns_ptr + i.to(tl.int64) * c + column, tl.max(size, 0), mask=column < c)


@triton.jit
def _narrow(y, MOST: tl.constexpr, TO: tl.constexpr):
    """y in fp8: what is too large becomes the largest number, but infinity (less itself) is not a number."""
    return (tl.minimum(tl.maximum(y, -MOST), MOST) + (y - y)).to(TO)


@triton.jit
def _cast_kernel(
    x_ptr,
    of_rows_ptr,
    of_columns_ptr,
    straight_ptr,
    turned_ptr,
    largest_ptr,
    r,
    c,
    ONE: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
    NOTE: tl.constexpr,
    MOST: tl.constexpr,
    TO: tl.constexpr,
    TILE: tl.constexpr,
):
    i, j = tl.program_id(0), tl.program_id(1)
    row, column = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < r) & (column[None, :] < c)
    x = tl.load(x_ptr + row[:, None].to(tl.int64) * c + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if NOTE:
        tl.store(largest_ptr + i * tl.num_programs(1) + j, tl.max(tl.max(tl.abs(x), 1), 0))
    if STRAIGHT:
        if ONE:
            y = x * tl.load(of_rows_ptr)
        else:
            y = x * tl.load(of_rows_ptr + row, mask=row < r, other=0.0)[:, None]
        y8 = _narrow(y, MOST, TO)
        tl.store(straight_ptr + row[:, None].to(tl.int64) * c + column[None, :], y8, mask=inside)
    if TURNED:
        if ONE:
            z = x * tl.load(of_columns_ptr)
        else:
            z = x * tl.load(of_columns_ptr + column, mask=column < c, other=0.0)[None, :]
        z8 = tl.trans(_narrow(z, MOST, TO))
        there = (column[:, None] < c) & (row[None, :] < r)
        tl.store(turned_ptr + column[:, None].to(tl.int64) * r + row[None, :], z8, mask=there)


@triton.jit
def _power_of_two(largest, MOST: tl.constexpr):
    """As `cast.scale_of`."""
    whole = MOST / tl.maximum(largest, 7.888609052210118e-31)
    return (whole.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _blocks_kernel(
    x_ptr,
    straight_ptr,
    straight_scale_ptr,
    turned_ptr,
    turned_scale_ptr,
    r,
    c,
    wide,
    turned_wide,
    lower,
    WHOLE: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
    MOST: tl.constexpr,
    TO: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of 128 × 128; all sizes are multiples of it. wide, turned_wide: of a row of tiles' scales."""
    i, j = tl.program_id(0), tl.program_id(1)
    row, column = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    here = row[:, None].to(tl.int64) * c + column[None, :]
    there = column[:, None].to(tl.int64) * r + row[None, :]
    x = tl.load(x_ptr + here).to(tl.float32)
    size = tl.abs(x)
    if WHOLE:
        scale = _power_of_two(tl.max(tl.max(size, 1), 0), MOST) * lower
        y8 = _narrow(x * scale, MOST, TO)
        if STRAIGHT:
            tl.store(straight_ptr + here, y8)
            tl.store(straight_scale_ptr + i * wide + j, 1.0 / scale)
        if TURNED:
            tl.store(turned_ptr + there, tl.trans(y8))
            tl.store(turned_scale_ptr + j * turned_wide + i, 1.0 / scale)
    else:
        if STRAIGHT:
            scales = _power_of_two(tl.max(size, 1), MOST) * lower
            tl.store(straight_ptr + here, _narrow(x * scales[:, None], MOST, TO))
            tl.store(straight_scale_ptr + j.to(tl.int64) * r + row, 1.0 / scales)
        if TURNED:
            scales_t = _power_of_two(tl.max(size, 0), MOST) * lower
            tl.store(turned_ptr + there, tl.trans(_narrow(x * scales_t[None, :], MOST, TO)))
            tl.store(turned_scale_ptr + i.to(tl.int64) * c + column, 1.0 / scales_t)


def largest_of_all(x: Tensor) -> Tensor:
    """float32[]: the largest magnitude of a contiguous x. (Maxima here pass over what is not a number; casts keep it.)"""
    count = triton.cdiv(x.numel(), SPAN)
    parts = x.new_empty(count, dtype=torch.float32)
    _largest_kernel[(count,)](x, parts, x.numel(), SPAN=SPAN, num_warps=8)
    return parts.amax()


def largest(x: Tensor, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """(float32[rows], float32[columns]) of x[rows, columns]; an empty tensor for what is not wanted."""
    r, c = x.shape
    grid = triton.cdiv(r, TILE), triton.cdiv(c, TILE)
    of_rows = x.new_empty((grid[1], r) if rows else (0, 0), dtype=torch.float32)
    of_columns = x.new_empty((grid[0], c) if columns else (0, 0), dtype=torch.float32)
    _largest_by_tile_kernel[grid](x, of_rows, of_columns, r, c, ROWS=rows, COLUMNS=columns, TILE=TILE, num_warps=8)
    empty = x.new_empty(0, dtype=torch.float32)
    return of_rows.amax(0) if rows else empty, of_columns.amax(0) if columns else empty


def cast_scaled(
    x: Tensor, of_rows: Tensor, of_columns: Tensor, dtype: torch.dtype, straight: bool, turned: bool, note: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.cast_scaled`; an empty tensor for what is not wanted."""
    r, c = x.shape
    grid = triton.cdiv(r, TILE), triton.cdiv(c, TILE)
    a = x.new_empty((r, c) if straight else 0, dtype=dtype)
    b = x.new_empty((c, r) if turned else 0, dtype=dtype)
    parts = x.new_empty(grid[0] * grid[1] if note else 0, dtype=torch.float32)
    one = of_rows.dim() == 0 and of_columns.dim() == 0
    _cast_kernel[grid](
        *(x, of_rows, of_columns, a, b, parts, r, c),
        ONE=one,
        STRAIGHT=straight,
        TURNED=turned,
        NOTE=note,
        **_format(dtype),
        TILE=TILE,
        num_warps=8,
    )
    return a, b, parts.amax() if note else parts


def cast_blocks(
    x: Tensor, dtype: torch.dtype, tile: bool, straight: bool, turned: bool, lower: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `kernels.cast_blocks`; an empty tensor for what is not wanted."""
    r, c = x.shape
    empty = x.new_empty(0, dtype=torch.float32)
    a, sa = (x.new_empty((r, c), dtype=dtype), block_scales(x, r, c, tile)) if straight else (empty, empty)
    b, sb = (x.new_empty((c, r), dtype=dtype), block_scales(x, c, r, tile)) if turned else (empty, empty)
    _blocks_kernel[(r // BLOCK, c // BLOCK)](
        *(x, a, sa, b, sb, r, c, sa.stride(0), sb.stride(0), lower),
        WHOLE=tile,
        STRAIGHT=straight,
        TURNED=turned,
        **_format(dtype),
        TILE=BLOCK,
        num_warps=8,
    )
    as_cast = [t if t.numel() else t.to(dtype) for t in (a, b)]
    return as_cast[0], sa, as_cast[1], sb


# float32: for tests, as Triton's interpreter does not round to fp8 as a GPU does
NAMES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5, torch.float32: tl.float32}


def _format(dtype: torch.dtype) -> dict:
    return {"MOST": torch.finfo(dtype).max, "TO": NAMES[dtype]}
