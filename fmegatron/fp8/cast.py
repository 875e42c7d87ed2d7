"""Numbers in fp8: a matrix, cast with scales so that one of its dims can be contracted.

An `Operand` is float8[outer, inner] of which `inner` is contracted, in memory the last dim: what the matrix units of sm90
want of both sides. A matrix that occurs in two products (an activation in the forward and in the gradient by the weight) is
therefore cast twice, as it lies and transposed, by one read of memory where the kernels allow.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fmegatron.collectives import all_reduce
from fmegatron.fp8 import kernels
from fmegatron.fp8.policy import BLOCK
from fmegatron.mesh import Mesh

# What of a matrix shares a scale: all of it, a row (of the outer dim), 1 × 128 numbers of a row, 128 × 128 numbers.
Share = Literal["tensor", "row", "block", "tile"]
LEAST = 2.0**-100  # a largest magnitude below counts as this one, so that scales and their products stay finite


class Operand(NamedTuple):
    """data: float8[outer, inner], contiguous, of which inner is contracted. scale: float32, by what its numbers are to be
    multiplied: [] or [outer, 1] or [outer, inner / 128] or [outer / 128, inner / 128]."""

    data: Tensor
    scale: Tensor


class Cut(NamedTuple):
    """Which mesh axes cut the rows and the columns of a matrix."""

    mesh: Mesh | None = None
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


UNCUT = Cut()


def cast(
    x: Tensor,
    dtype: torch.dtype,
    share: Share,
    *,
    columns: bool,
    rows: bool,
    cut: Cut = UNCUT,
    margin: int = 0,
    scale: Tensor | None = None,
    use: str = "torch",
) -> tuple[Operand | None, Operand | None, Tensor | None]:
    """(x for a contraction over its columns, x for one over its rows, its largest magnitude) of a matrix.

    columns, rows: which of the two are wanted; the first is float8 of x's shape, the second of its transpose's. scale: of
    share "tensor", by what x is multiplied; None: by its largest magnitude over all ranks in `cut`. The third result is given
    with a scale only, of this rank. use: "torch" or "triton".
    """
    x = x.contiguous()
    if share in ("block", "tile"):
        data = kernels.cast_blocks(x, dtype, share == "tile", columns, rows, 2.0**-margin, use)
        pairs = [Operand(*pair) if pair is not None else None for pair in data]
        return pairs[0], pairs[1], None
    noted = None
    if share == "tensor":
        known = scale is not None
        if scale is None:
            scale = scale_of(_largest_of_all(x, cut, use), dtype, margin)
        data_c, data_r, noted = kernels.cast_scaled(x, scale, scale, dtype, columns, rows, known, use)
        back_c: Tensor | None = 1.0 / scale
        back_r = back_c
    else:
        of_rows, of_columns = kernels.largest(x, columns, rows, use)
        scale_c = scale_of(_agreed(of_rows, cut.mesh, cut.columns), dtype, margin) if columns else None
        scale_r = scale_of(_agreed(of_columns, cut.mesh, cut.rows), dtype, margin) if rows else None
        data_c, data_r, _ = kernels.cast_scaled(x, scale_c, scale_r, dtype, columns, rows, False, use)
        back_c, back_r = (None if s is None else (1.0 / s).unsqueeze(1) for s in (scale_c, scale_r))
    first = Operand(data_c, back_c) if data_c is not None and back_c is not None else None
    second = Operand(data_r, back_r) if data_r is not None and back_r is not None else None
    return first, second, noted


def scale_of(largest: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """The power of two by which numbers of this largest magnitude are multiplied before they are cast: the largest one that
    keeps them in the format's range. float32 -> float32; of infinity 0, of NaN infinity."""
    whole = torch.finfo(dtype).max / largest.clamp(min=LEAST)
    bits = whole.view(torch.int32).bitwise_and(0x7F800000)  # without its mantissa
    return bits.view(torch.float32) * 2.0**-margin


def dequantised(x: Operand, dtype: torch.dtype) -> Tensor:
    """The numbers that an operand stands for."""
    scale = x.scale.to(dtype)
    for d in range(scale.dim()):
        if scale.shape[d] not in (1, x.data.shape[d]):
            scale = scale.repeat_interleave(BLOCK, d)
    return x.data.to(dtype) * scale


def _largest_of_all(x: Tensor, cut: Cut, use: str) -> Tensor:
    return _agreed(kernels.largest_of_all(x, use), cut.mesh, (*cut.rows, *cut.columns))


def _agreed(largest: Any, mesh: Mesh | None, axes: tuple[str, ...]) -> Tensor:
    """The largest over the ranks of some axes."""
    return all_reduce(largest, mesh, axes, "max") if mesh is not None and axes else largest
