"""Casts and products of groups of rows in fp8, on the matrix units or emulated.

Groups are summed over in places of 16: the matrix units read from multiples of 16 bytes. So a cast for a sum over rows has each
group behind zeros up to such a multiple, at least 16 of them for a group without rows; where groups end there is known to the
device alone, and the host knows a bound (`places`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fmegatron.collectives import all_reduce
from fmegatron.fp8.cast import UNCUT, Cut, Operand, cast, scale_of
from fmegatron.fp8.kernels import narrow
from fmegatron.fp8.policy import ALIGNED, FORMATS
from fmegatron.mesh import Mesh
from fmegatron.primitives._function import operator

E4M3 = FORMATS["e4m3"]
WIDEST = 8192  # columns of a row that one program holds


def places(rows: int, groups: int) -> int:
    """Room for so many rows of groups, each padded to a multiple of 16 and to 16 at least."""
    return -(-rows // ALIGNED) * ALIGNED + groups * ALIGNED


# ------------------------------------------------------------------------------------------------------------------ casts


def cast_rows(x: Tensor, mesh: Mesh | None, cut: tuple[str, ...], margin: int, use: str) -> Operand:
    """x[row width], a scale for each row: float8[row width], scale float32[row]. cut: the axes that cut the width."""
    x = x.contiguous()
    if use == "triton" and not cut and x.shape[1] <= WIDEST:
        return Operand(*_rows_at_once(x, margin))
    where = UNCUT if mesh is None else Cut(mesh, (), cut)
    found, _, _ = cast(x, E4M3, "row", columns=True, rows=False, cut=where, margin=margin, use=use)
    assert found is not None
    return Operand(found.data, found.scale.squeeze(1))


def cast_columns(w: Tensor, mesh: Mesh | None, cut: tuple[str, ...], margin: int, use: str) -> Operand:
    """w[group in out], a scale for each column of each matrix: float8[group out in], scale float32[group out]. cut: the axes that
    cut `in`."""
    w, fast = w.contiguous(), use == "triton"
    scale = scale_of(_agreed(_largest_of_columns(w, fast), mesh, cut), E4M3, margin)
    return Operand(_turned_columns(w, scale, fast), 1.0 / scale)


def cast_groups(
    x: Tensor, ends: Tensor, mesh: Mesh | None, cut: tuple[str, ...], margin: int, use: str
) -> tuple[Operand, Tensor]:
    """x[row width], a scale for each column of each group: (float8[width place] and scale float32[group width], int32[group], the
    place behind each group's last). cut: the axes that cut the rows of groups. Rows behind the last group count nowhere."""
    x, fast = x.contiguous(), use == "triton"
    scale = scale_of(_agreed(largest_of_groups(x, ends, fast), mesh, cut), E4M3, margin)
    data, padded = _turned_groups(x, ends, scale, fast)
    return Operand(data, 1.0 / scale), padded


def _agreed(largest: Tensor, mesh: Mesh | None, cut: tuple[str, ...]) -> Tensor:
    return all_reduce(largest, mesh, cut, "max") if mesh is not None and cut else largest


@operator("fmegatron::fp8_cast_rows")
def _rows_at_once(x: Tensor, margin: int) -> tuple[Tensor, Tensor]:
    from fmegatron.fp8 import triton_grouped

    return triton_grouped.cast_rows(x, 2.0**-margin)


@_rows_at_once.register_fake
def _(x: Tensor, margin: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(x.shape[0], dtype=torch.float32)


@operator("fmegatron::fp8_largest_of_columns")
def _largest_of_columns(w: Tensor, fast: bool) -> Tensor:
    if fast:
        from fmegatron.fp8 import triton_grouped

        return triton_grouped.largest_of_columns(w)
    return w.abs().amax(1).float()


@_largest_of_columns.register_fake
def _(w: Tensor, fast: bool) -> Tensor:
    return w.new_empty((w.shape[0], w.shape[2]), dtype=torch.float32)


@operator("fmegatron::fp8_turned_columns")
def _turned_columns(w: Tensor, scale: Tensor, fast: bool) -> Tensor:
    if fast:
        from fmegatron.fp8 import triton_grouped

        return triton_grouped.cast_columns(w, scale)
    return narrow(w, scale.unsqueeze(1), E4M3).transpose(1, 2).contiguous()


@_turned_columns.register_fake
def _(w: Tensor, scale: Tensor, fast: bool) -> Tensor:
    groups, rows, columns = w.shape
    return w.new_empty((groups, columns, rows), dtype=E4M3)


@operator("fmegatron::fp8_largest_of_groups")
def largest_of_groups(x: Tensor, ends: Tensor, fast: bool) -> Tensor:
    """float32[group width]: the largest magnitude of each column of each group."""
    if fast:
        from fmegatron.fp8 import triton_grouped

        return triton_grouped.largest_of_groups(x, ends)
    found = torch.zeros((len(ends) + 1, x.shape[1]), dtype=torch.float32, device=x.device)
    group = _group_of(ends, x.shape[0])[:, None].expand(x.shape)
    return found.scatter_reduce_(0, group, x.abs().float(), "amax")[:-1]


@largest_of_groups.register_fake
def _(x: Tensor, ends: Tensor, fast: bool) -> Tensor:
    return x.new_empty((ends.shape[0], x.shape[1]), dtype=torch.float32)


@operator("fmegatron::fp8_turned_groups")
def _turned_groups(x: Tensor, ends: Tensor, scale: Tensor, fast: bool) -> tuple[Tensor, Tensor]:
    """(float8[width place], int32[group]); scale: by what x is multiplied, float32[group width]."""
    rows, width = x.shape
    room = places(rows, len(ends))
    if fast:
        from fmegatron.fp8 import triton_grouped

        return triton_grouped.cast_groups(x, ends, scale, room)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    padded = ((sizes + ALIGNED - 1) // ALIGNED).clamp(min=1) * ALIGNED
    group = _group_of(ends, rows)
    real, group = group < len(ends), group.clamp(max=len(ends) - 1)
    shift = (padded - sizes).cumsum(0) - (padded - sizes)  # zeros in front of a group
    at = torch.where(real, torch.arange(rows, device=x.device) + shift[group], room - 1)  # (that is no group's)
    numbers = narrow(x, scale[group], E4M3).view(torch.uint8)
    data = numbers.new_zeros((room, width)).index_copy_(0, at, numbers).t().contiguous().view(E4M3)
    return data, padded.cumsum(0).to(torch.int32)


@_turned_groups.register_fake
def _(x: Tensor, ends: Tensor, scale: Tensor, fast: bool) -> tuple[Tensor, Tensor]:
    groups, width = ends.shape[0], x.shape[1]
    return x.new_empty((width, places(x.shape[0], groups)), dtype=E4M3), ends.new_empty(groups)


def _group_of(ends: Tensor, rows: int) -> Tensor:
    """int64[row]; the number of groups for rows behind the last."""
    return torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)


# --------------------------------------------------------------------------------------------------------------- products


@operator("fmegatron::fp8_grouped_products")
def products(
    x: Tensor, of_x: Tensor, w: Tensor, of_w: Tensor, ends: Tensor, dtype: torch.dtype, native: bool
) -> Tensor:
    """x[row in] (scales [row]), w[group out in] (scales [group out]) -> [row out] in `dtype`, each group's rows times its matrix.

    native: by the matrix units, which write bfloat16 and sum less exactly than float32 (what does better is three times slower);
    else the same numbers multiplied in float32 or wider.
    """
    if native:
        y = torch._scaled_grouped_mm(
            x, w.transpose(1, 2), of_x, of_w, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return y if y.dtype == dtype else y.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    y = of_x.new_empty((x.shape[0], w.shape[1]), dtype=dtype)
    for n, (start, end) in enumerate(_spans(ends)):
        rows = x[start:end].to(wide) * of_x[start:end, None].to(wide)
        y[start:end] = rows @ (w[n].to(wide) * of_w[n, :, None].to(wide)).t()
    return y


@products.register_fake
def _(x: Tensor, of_x: Tensor, w: Tensor, of_w: Tensor, ends: Tensor, dtype: torch.dtype, native: bool) -> Tensor:
    return of_x.new_empty((x.shape[0], w.shape[1]), dtype=dtype)


@operator("fmegatron::fp8_products_by_group")
def products_by_group(
    x: Tensor, of_x: Tensor, g: Tensor, of_g: Tensor, ends: Tensor, dtype: torch.dtype, native: bool
) -> Tensor:
    """x[in place] (scales [group in]), g[out place] (scales [group out]) -> [group in out] in `dtype`, sums over each group's
    places. ends: of `cast_groups`."""
    if native:
        y = torch._scaled_grouped_mm(
            x, g.t(), of_x.reshape(-1), of_g.reshape(-1), offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return y if y.dtype == dtype else y.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    y = of_x.new_empty((ends.shape[0], x.shape[0], g.shape[0]), dtype=dtype)
    for n, (start, end) in enumerate(_spans(ends)):
        left, right = (t[:, start:end].to(wide) * s[n, :, None].to(wide) for t, s in ((x, of_x), (g, of_g)))
        y[n] = left @ right.t()
    return y


@products_by_group.register_fake
def _(x: Tensor, of_x: Tensor, g: Tensor, of_g: Tensor, ends: Tensor, dtype: torch.dtype, native: bool) -> Tensor:
    return of_x.new_empty((ends.shape[0], x.shape[0], g.shape[0]), dtype=dtype)


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    """[(first, behind the last)] of each group, on the host."""
    bounds = [0, *ends.tolist()]
    return list(zip(bounds, bounds[1:], strict=False))
