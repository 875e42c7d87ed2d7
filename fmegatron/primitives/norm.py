"""Normalisation over the last dim."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from fmegatron.function import apply_function, under_torch_func
from fmegatron.primitives._function import graph_wanted, may_overwrite, wide


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """x[... embed], weight[embed] -> x / sqrt(mean(x²) + eps) * weight, mean over embed (Zhang and Sennrich 2019).

    As in Hugging Face's Llama, x is normalised in fp32 (float64 stays float64) and cast back before it meets the
    weight. Backward keeps x and one number per row.
    """
    return apply_function(_RMSNorm, x, weight, eps)[0]


class _RMSNorm(Function):
    """(x, weight, eps) -> (y, 1 / rms)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        if _fused(x, weight):
            y, scale = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], None, eps)
            return y * weight, scale
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide(x.dtype))
        scale = torch.rsqrt(length.square() / x.shape[-1] + eps)
        y = (x * scale).to(x.dtype)
        return (y.mul_(weight) if may_overwrite() and y.dtype == weight.dtype else y * weight), scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, ctx.eps = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor | None, _: Any) -> Any:
        if g is None:
            return None, None, None
        x, weight, scale = ctx.saved_tensors
        if graph_wanted():
            wide_x = x.to(scale.dtype)
            scale = torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + ctx.eps)  # a function of x again
        if _fused(x, weight) and not graph_wanted():
            need = ctx.needs_input_grad[:2]
            gx, gw = torch.ops.aten._fused_rms_norm_backward(g.contiguous(), x, [x.shape[-1]], scale, weight, need)
        else:
            gx, gw = _gradients(x, weight, scale, g)
        return gx if ctx.needs_input_grad[0] else None, gw if ctx.needs_input_grad[1] else None, None


def _fused(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Is torch's fused kernel the fastest? (Compiled code makes one of its own.)"""
    eager = not (torch.compiler.is_compiling() or under_torch_func())
    return eager and x.device.type == "cuda" and x.dtype == weight.dtype and x.is_contiguous()


def _gradients(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, in_place = scale.dtype, may_overwrite() and not torch.is_grad_enabled()
    normal, w = x * scale, weight.to(dtype)
    by_weight = g * normal
    gw = (by_weight.flatten(0, -2).sum(0) if x.ndim > 1 else by_weight).to(weight.dtype)
    # compiled, a product with a vector would be a kernel of its own
    along = (by_weight * w).sum(-1) if torch.compiler.is_compiling() else by_weight @ w
    along = along.unsqueeze(-1) / x.shape[-1]
    gx = g * w
    gx = gx.addcmul_(normal, along, value=-1).mul_(scale) if in_place else (gx - normal * along) * scale
    return gx.to(x.dtype), gw
