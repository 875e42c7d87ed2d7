"""Products of two fp8 operands."""

from __future__ import annotations

import torch
from torch import Tensor

from fmegatron.fp8.cast import Operand, dequantised
from fmegatron.fp8.kernels import laid_out


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


@torch.library.custom_op("fmegatron::fp8_multiply_blocks", mutates_args=())
def multiply_blocks(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of operands with scales of blocks: an operation of its own because torch, while it traces, refuses such
    scales of torch._scaled_mm."""
    for padded in (True, False):  # torch 2.11 refuses padded rows of scales, later versions refuse others
        scales = laid_out(scale_a, a, padded=padded), laid_out(scale_b, b, padded=padded).t()
        try:
            return torch._scaled_mm(a, b.t(), *scales, out_dtype=dtype, use_fast_accum=False)
        except RuntimeError as error:
            if not padded or "scaling configuration" not in str(error):
                raise
    raise AssertionError


@multiply_blocks.register_fake
def _shape(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
