"""Gated activations."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional

from fmegatron.function import apply_function
from fmegatron.primitives._function import graph_wanted, may_overwrite


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of one shape (Shazeer 2020). Backward keeps the two arguments and nothing between."""
    return apply_function(_SwiGLU, gate, up)


class _SwiGLU(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return _times(functional.silu(gate), up)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        g_gate = g_up = None
        if ctx.needs_input_grad[0]:
            if graph_wanted():
                s = gate.sigmoid()
                g_gate = g * up * (s * (1 + gate * (1 - s)))
            else:
                g_gate = torch.ops.aten.silu_backward(g * up, gate)
        if ctx.needs_input_grad[1]:
            g_up = _times(functional.silu(gate), g)
        return g_gate, g_up


def _times(new: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return new.mul_(other) if may_overwrite() and not torch.is_grad_enabled() else new * other
