"""How matrices are cast to fp8: by torch's operations, anywhere, or by one Triton kernel that reads them once.

Every function takes `use`, "torch" or "triton", and gives the same numbers by either. `chosen` picks.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from fmegatron.fp8.policy import BLOCK
from fmegatron.function import under_torch_func
from fmegatron.operators import custom_operator

Pair = tuple[Tensor, Tensor]
HAS_TRITON = importlib.util.find_spec("triton") is not None


def chosen(x: Tensor, kernels: str) -> str:
    """ "triton" or "torch" for a tensor, as `Fp8.kernels` has it: Triton for plain tensors of a GPU alone."""
    if kernels == "torch" or x.device.type != "cuda" or under_torch_func():
        return "torch"
    plain = torch.compiler.is_compiling() or type(x) is Tensor or type(x) is torch.nn.Parameter
    return "triton" if plain and HAS_TRITON else "torch"


# ---------------------------------------------------------------------------------------------------- largest magnitudes


def largest_of_all(x: Tensor, use: str) -> Tensor:
    """float32[]: the largest magnitude of x[rows, columns]."""
    if use == "triton":
        return _largest_triton(x, False, False)[0]
    return x.abs().amax().float()


def largest(x: Tensor, rows: bool, columns: bool, use: str) -> tuple[Tensor | None, Tensor | None]:
    """(float32[rows], float32[columns]): the largest magnitude of each row, of each column; None for what is not wanted."""
    if use == "triton":
        of_rows, of_columns = _largest_triton(x, rows, columns)
        return of_rows if rows else None, of_columns if columns else None
    size = x.abs()
    return size.amax(1).float() if rows else None, size.amax(0).float() if columns else None


# ------------------------------------------------------------------------------------------------------------------ casts


def cast_scaled(
    x: Tensor,
    of_rows: Tensor | None,
    of_columns: Tensor | None,
    dtype: torch.dtype,
    straight: bool,
    turned: bool,
    note: bool,
    use: str,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(fp8[rows, columns], fp8[columns, rows], float32[]) of x: multiplied by `of_rows` ([] or a number a row) and cast;
    multiplied by `of_columns`, cast and transposed; its largest magnitude. None for what is not wanted."""
    if use == "triton":
        first, second = (s if s is not None else x.new_empty(0, dtype=torch.float32) for s in (of_rows, of_columns))
        here, there, size = _cast_triton(x, first, second, dtype, straight, turned, note)
        return here if straight else None, there if turned else None, size if note else None
    one = of_rows is not None and of_rows.dim() == 0
    a: Tensor | None = None
    b: Tensor | None = None
    if straight and of_rows is not None:
        a = narrow(x, of_rows if one else of_rows.unsqueeze(1), dtype)
    if turned and of_columns is not None:
        b = (a if one and a is not None else narrow(x, of_columns, dtype)).t().contiguous()
    return a, b, largest_of_all(x, use) if note else None


def cast_blocks(
    x: Tensor, dtype: torch.dtype, tile: bool, straight: bool, turned: bool, lower: float, use: str
) -> tuple[Pair | None, Pair | None]:
    """((fp8[rows, columns], scales back), (fp8[columns, rows], scales back)) of x, cast in blocks of 1 × 128 numbers along the
    last dim of either result, or with tile in blocks of 128 × 128. lower: by what scales are multiplied besides."""
    # (as one operation where code is compiled for a CPU: torch 2.13 fails to fuse what makes x into blocks there)
    if use == "triton" or (torch.compiler.is_compiling() and x.device.type == "cpu" and not under_torch_func()):
        a, sa, b, sb = _cast_blocks_at_once(x, dtype, tile, straight, turned, lower)
        return (a, sa) if straight else None, (b, sb) if turned else None
    return _blocks_by_torch(x, dtype, tile, straight, turned, lower)


def _blocks_by_torch(
    x: Tensor, dtype: torch.dtype, tile: bool, straight: bool, turned: bool, lower: float
) -> tuple[Pair | None, Pair | None]:
    first = second = None
    if tile:
        first = _in_blocks(x, dtype, BLOCK, lower)
        second = (first[0].t().contiguous(), first[1].t().clone()) if turned else None
        return first if straight else None, second
    if straight:
        first = _in_blocks(x, dtype, 1, lower)
    if turned:
        second = _in_blocks(x.t(), dtype, 1, lower)
    return first, second


def narrow(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x · scale in fp8. What is too large becomes the format's largest number, but infinity does not."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y, most = x.to(wide) * scale.to(wide), torch.finfo(dtype).max
    return (y.clamp(-most, most) + (y - y)).to(dtype)  # infinity less infinity is not a number, anything else 0


def _in_blocks(x: Tensor, dtype: torch.dtype, height: int, lower: float) -> Pair:
    from fmegatron.fp8.cast import scale_of

    rows, columns = x.shape
    blocks = x.reshape(rows // height, height, columns // BLOCK, BLOCK)
    scale = scale_of(blocks.abs().amax((1, 3)).float(), dtype) * lower
    return narrow(blocks, scale[:, None, :, None], dtype).reshape(rows, columns).contiguous(), 1.0 / scale


# ----------------------------------------------------------------------------------------------------------------- Triton
#
# As operations of torch, so that compiled code may hold them; called at once, without their dispatch, where nothing is traced.


def _largest_triton(x: Tensor, rows: bool, columns: bool) -> Pair:
    return fp8_largest(x, rows, columns) if torch.compiler.is_compiling() else _largest(x, rows, columns)


def _cast_triton(x: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *which: bool) -> tuple[Tensor, Tensor, Tensor]:
    return fp8_cast(x, a, b, dtype, *which) if torch.compiler.is_compiling() else _cast(x, a, b, dtype, *which)


def _cast_blocks_at_once(
    x: Tensor, dtype: torch.dtype, tile: bool, straight: bool, turned: bool, lower: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    run = fp8_cast_blocks if torch.compiler.is_compiling() else _blocks
    return run(x, dtype, tile, straight, turned, lower)


def _largest(x: Tensor, rows: bool, columns: bool) -> Pair:
    from fmegatron.fp8 import triton_kernels

    if not rows and not columns:
        return triton_kernels.largest_of_all(x), x.new_empty(0, dtype=torch.float32)
    return triton_kernels.largest(x, rows, columns)


def _cast(
    x: Tensor, of_rows: Tensor, of_columns: Tensor, dtype: torch.dtype, straight: bool, turned: bool, note: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from fmegatron.fp8 import triton_kernels

    return triton_kernels.cast_scaled(x, of_rows, of_columns, dtype, straight, turned, note)


def _blocks(
    x: Tensor, dtype: torch.dtype, tile: bool, straight: bool, turned: bool, lower: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from fmegatron.fp8 import triton_kernels

    return triton_kernels.cast_blocks(x, dtype, tile, straight, turned, lower)


@custom_operator("fmegatron::fp8_largest")
def fp8_largest(x: Tensor, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """`largest`, or with neither `largest_of_all`, by Triton; an empty tensor for what is not wanted."""
    return _largest(x, rows, columns)


@fp8_largest.register_fake
def _(x: Tensor, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    new = functools.partial(x.new_empty, dtype=torch.float32)
    if not rows and not columns:
        return new(()), new(0)
    return new(x.shape[0] if rows else 0), new(x.shape[1] if columns else 0)


@custom_operator("fmegatron::fp8_cast")
def fp8_cast(
    x: Tensor, of_rows: Tensor, of_columns: Tensor, dtype: torch.dtype, straight: bool, turned: bool, note: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`cast_scaled` by Triton; an empty tensor for what is not wanted."""
    return _cast(x, of_rows, of_columns, dtype, straight, turned, note)


@fp8_cast.register_fake
def _(
    x: Tensor, of_rows: Tensor, of_columns: Tensor, dtype: torch.dtype, straight: bool, turned: bool, note: bool
) -> tuple[Tensor, Tensor, Tensor]:
    r, c = x.shape
    return (
        x.new_empty((r, c) if straight else 0, dtype=dtype),
        x.new_empty((c, r) if turned else 0, dtype=dtype),
        x.new_empty(() if note else 0, dtype=torch.float32),
    )


@custom_operator("fmegatron::fp8_cast_blocks")
def fp8_cast_blocks(
    x: Tensor, dtype: torch.dtype, tile: bool, straight: bool, turned: bool, lower: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cast_blocks` by Triton, on CPU by torch; an empty tensor for what is not wanted."""
    if x.device.type == "cpu":
        out: list[Tensor] = []
        for pair in _blocks_by_torch(x, dtype, tile, straight, turned, lower):
            if pair is None:
                out += [x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=torch.float32)]
            else:
                out += [pair[0], laid_out(pair[1], pair[0])]
        return out[0], out[1], out[2], out[3]
    return _blocks(x, dtype, tile, straight, turned, lower)


@fp8_cast_blocks.register_fake
def _(
    x: Tensor, dtype: torch.dtype, tile: bool, straight: bool, turned: bool, lower: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out: list[Tensor] = []
    for wanted, (r, c) in ((straight, x.shape), (turned, x.shape[::-1])):
        out.append(x.new_empty((r, c) if wanted else 0, dtype=dtype))
        scales = block_scales(x, r, c, tile) if wanted else x.new_empty(0, dtype=torch.float32)
        out.append(scales)
    return out[0], out[1], out[2], out[3]


def block_scales(x: Tensor, rows: int, columns: int, tile: bool) -> Tensor:
    """Room for the scales of a matrix in blocks, laid out as cuBLAS wants them (see `laid_out`)."""
    if not tile:
        return x.new_empty((columns // BLOCK, rows), dtype=torch.float32).t()
    width = -(-(columns // BLOCK) // 4) * 4
    return x.new_empty((rows // BLOCK, width), dtype=torch.float32).narrow(1, 0, columns // BLOCK)


def laid_out(scale: Tensor, data: Tensor) -> Tensor:
    """Scales of blocks as cuBLAS wants them in memory: those of 1 × 128 blocks column by column, those of 128 × 128 ones row
    by row, each row padded to a multiple of four."""
    if scale.shape[0] == data.shape[0]:
        return scale if scale.stride() == (1, scale.shape[0]) else scale.t().contiguous().t()
    width = -(-scale.shape[1] // 4) * 4
    if scale.stride() == (width, 1):
        return scale
    return torch.nn.functional.pad(scale, (0, width - scale.shape[1])).narrow(1, 0, scale.shape[1])
