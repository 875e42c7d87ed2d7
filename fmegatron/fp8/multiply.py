"""Products of two fp8 operands."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fmegatron.fp8.cast import Operand, dequantised
from fmegatron.fp8.kernels import BLOCK, laid_out
from fmegatron.operators import custom_operator


def multiply(a: Operand, b: Operand, dtype: torch.dtype, *, native: bool, fast: bool = False) -> Tensor:
    """[outer of a, outer of b] in `dtype`: the sum of products over both operands' inner dims.

    native: by the matrix units, through torch._scaled_mm, which sums in float32; else the same numbers multiplied in float32
    or, for float64, in float64. fast: sum less exactly, as Transformer Engine does in the forward.
    """
    if not native:
        wide = torch.promote_types(dtype, torch.float32)
        y = dequantised(a, wide) @ dequantised(b, wide).t()
        return y if y.dtype == dtype else y.to(dtype)
    if a.scale.dim() == 0:
        return torch._scaled_mm(
            a.data, b.data.t(), scale_a=a.scale, scale_b=b.scale, out_dtype=dtype, use_fast_accum=fast
        )
    if all(x.scale.shape == (x.data.shape[0], 1) for x in (a, b)):
        y = torch._scaled_mm(  # whose kernels for it write bfloat16 alone
            a.data, b.data.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=torch.bfloat16, use_fast_accum=fast
        )
        return y if y.dtype == dtype else y.to(dtype)
    return multiply_blocks(a.data, a.scale, b.data, b.scale, dtype)


@custom_operator("fmegatron::fp8_multiply_blocks")
def multiply_blocks(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of operands with scales of blocks: an operation of its own because torch, while it traces, refuses such
    scales of torch._scaled_mm."""
    a, scale_a = _in_fours(a, scale_a)
    b, scale_b = _in_fours(b, scale_b)
    return torch._scaled_mm(
        a, b.t(), scale_a=laid_out(scale_a, a), scale_b=laid_out(scale_b, b).t(), out_dtype=dtype, use_fast_accum=False
    )


def _in_fours(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """With zeros behind the inner dim up to a multiple of four blocks: cuBLAS reads rows of scales of such a length, and
    torch 2.11 takes none that are padded in memory."""
    more = -scale.shape[1] % 4
    if not more:
        return x, scale
    data = functional.pad(x.view(torch.uint8), (0, more * BLOCK)).view(x.dtype)
    return data, functional.pad(scale, (0, more), value=1.0)


@multiply_blocks.register_fake
def _shape(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
