"""The Triton kernels of `fmegatron.fp8.grouped_kernels`: casts by rows, largest magnitudes of groups, casts of groups. Each reads a
matrix once. Imported only where Triton is installed and wanted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmegatron.fp8.policy import ALIGNED
from fmegatron.fp8.triton_kernels import _format, _narrow, _power_of_two

HELD = 8192  # numbers that a program of rows holds
ROWS, COLUMNS = 128, 64  # of a tile that is transposed
PARTS = 4  # of the rows of a group, whose largest numbers are looked for apart


@triton.jit
def _rows_kernel(
    x_ptr, out_ptr, scale_ptr, rows, columns, lower,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, TO: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None].to(tl.int64) * columns + tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < rows) & (tl.arange(0, BLOCK)[None, :] < columns)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = _power_of_two(tl.max(tl.abs(x), 1), MOST) * lower
    tl.store(out_ptr + at, _narrow(x * scale[:, None], MOST, TO), mask=inside)
    tl.store(scale_ptr + row, 1.0 / scale, mask=row < rows)


@triton.jit
def _largest_kernel(
    x_ptr, ends_ptr, out_ptr, groups, columns, each,
    MATRICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The largest magnitudes of some columns in a part of one group's rows. MATRICES: all groups have `each` rows."""
    group, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part, parts = tl.program_id(2), tl.num_programs(2)
    if MATRICES:
        start, end = group * each, group * each + each
    else:
        start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
        end = tl.load(ends_ptr + group)
    span = (end - start + parts - 1) // parts
    start += part * span
    end = tl.minimum(end, start + span)
    there = column < columns
    size = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & there[None, :]
        x = tl.load(x_ptr + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)
        size = tl.maximum(size, tl.abs(x.to(tl.float32)))
    at = (part * groups + group).to(tl.int64) * columns + column
    tl.store(out_ptr + at, tl.max(size, 0), mask=there)


@triton.jit
def _turn_kernel(
    x_ptr, ends_ptr, scale_ptr, out_ptr, padded_ptr, groups, columns, each, room,
    MATRICES: tl.constexpr, BINS: tl.constexpr, PLACES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MOST: tl.constexpr, TO: tl.constexpr,
):  # fmt: skip
    """A part of one group, multiplied by the group's scales of its columns, cast and transposed. MATRICES: all groups have `each`
    rows, and each lies for itself; else all lie in rows of `room` places, each group behind zeros up to a multiple of PLACES."""
    group, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    if MATRICES:
        start, end, last = group * each, group * each + each, each
        to = out_ptr + group.to(tl.int64) * each * columns + column[:, None].to(tl.int64) * each
    else:
        start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
        end = tl.load(ends_ptr + group)
        bins = tl.arange(0, BINS)
        behind = tl.load(ends_ptr + bins, mask=bins < groups, other=0)
        size = behind - tl.load(ends_ptr + bins - 1, mask=(bins > 0) & (bins < groups), other=0)
        padded = tl.maximum((size + PLACES - 1) // PLACES, 1) * PLACES
        before = tl.sum(tl.where(bins < group, padded, 0), 0)
        last = tl.maximum((end - start + PLACES - 1) // PLACES, 1) * PLACES
        to = out_ptr + column[:, None].to(tl.int64) * room + before
        if tl.program_id(1) == 0:
            if tl.program_id(2) == 0:
                tl.store(padded_ptr + group, before + last)
    scale = tl.load(scale_ptr + group.to(tl.int64) * columns + column, mask=there, other=1.0)
    for first in range(tl.program_id(2) * ROWS, last, tl.num_programs(2) * ROWS):
        place = first + tl.arange(0, ROWS)
        row = start + place
        inside = (row < end)[:, None] & there[None, :]
        x = tl.load(x_ptr + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)
        y = tl.trans(_narrow(x.to(tl.float32) * scale[None, :], MOST, TO))
        tl.store(to + place[None, :], y, mask=there[:, None] & (place < last)[None, :])


def cast_rows(x: Tensor, lower: float, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """(fp8[row column], what to multiply each row by to have it back, float32[row]) of a contiguous x."""
    rows, columns = x.shape
    out, scale = x.new_empty(x.shape, dtype=dtype), x.new_empty(rows, dtype=torch.float32)
    if out.numel():
        block = triton.next_power_of_2(columns)
        tile = max(1, HELD // block)
        _rows_kernel[(triton.cdiv(rows, tile),)](
            x, out, scale, rows, columns, lower, ROWS=tile, BLOCK=block, **_format(dtype), num_warps=8
        )
    return out, scale


def cast_columns(w: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """fp8[group column row] of a contiguous w[group row column], multiplied by scale[group column]."""
    groups, rows, columns = w.shape
    out = w.new_empty((groups, columns, rows), dtype=dtype)
    _turn(w, w, scale, out, w, rows, 0, dtype, matrices=True)
    return out


def cast_groups(
    x: Tensor, ends: Tensor, scale: Tensor, room: int, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """(fp8[column place], int32[group]), see `grouped_kernels.cast_groups`, of a contiguous x[row column], multiplied by
    scale[group column]."""
    out, padded = x.new_empty((x.shape[1], room), dtype=dtype), torch.empty_like(ends)
    _turn(x, ends, scale, out, padded, 0, room, dtype, matrices=False)
    return out, padded


def _turn(
    x: Tensor,
    ends: Tensor,
    scale: Tensor,
    out: Tensor,
    padded: Tensor,
    each: int,
    room: int,
    dtype: torch.dtype,
    *,
    matrices: bool,
) -> None:
    groups, columns = scale.shape
    if not out.numel():
        return
    tiles = triton.cdiv(each if matrices else room // groups, ROWS)  # of the mean group, for a program each
    _turn_kernel[(groups, triton.cdiv(columns, COLUMNS), min(tiles, 65535))](
        *(x, ends, scale, out, padded, groups, columns, each, room),
        MATRICES=matrices,
        BINS=triton.next_power_of_2(max(groups, 2)),
        PLACES=ALIGNED,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        **_format(dtype),
        num_warps=8,
    )


def largest_of_columns(w: Tensor) -> Tensor:
    """float32[group column] of a contiguous w[group row column]: the largest magnitudes."""
    return _largest(w, w, w.shape[0], w.shape[1], matrices=True)


def largest_of_groups(x: Tensor, ends: Tensor) -> Tensor:
    """float32[group column] of a contiguous x[row column]: the largest magnitudes."""
    return _largest(x, ends, ends.shape[0], 0, matrices=False)


def _largest(x: Tensor, ends: Tensor, groups: int, each: int, *, matrices: bool) -> Tensor:
    columns = x.shape[-1]
    found = x.new_empty((PARTS, groups, columns), dtype=torch.float32)
    if found.numel():
        _largest_kernel[(groups, triton.cdiv(columns, 128), PARTS)](
            x, ends, found, groups, columns, each, MATRICES=matrices, ROWS=32, COLUMNS=128, num_warps=4
        )
    return found.amax(0)
