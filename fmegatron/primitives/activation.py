"""Activations, plain and gated."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional

from fmegatron.errors import UserError
from fmegatron.function import apply_function
from fmegatron.primitives._function import graph_wanted, may_overwrite, wide


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of one shape (Shazeer 2020). Backward keeps the two arguments and nothing between.

    Raises UserError when the shapes differ.
    """
    _check_shapes("swiglu", gate, up)
    return apply_function(_Gated, gate, up, "silu")


def geglu(gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """gelu(gate) * up, of one shape (Shazeer 2020); `approximate` as in `gelu` (Gemma: "tanh"). Backward keeps the two
    arguments and nothing between.

    Raises UserError when the shapes differ and for an unknown `approximate`.
    """
    _check_shapes("geglu", gate, up)
    _check_approximate("geglu", approximate)
    return apply_function(_Gated, gate, up, "gelu" if approximate == "none" else "gelu_tanh")


def gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016), exactly ("none") or by their formula
    with tanh ("tanh": GPT-2, Gemma). Backward keeps x.

    Raises UserError for an unknown `approximate`.
    """
    _check_approximate("gelu", approximate)
    return apply_function(_Activation, x, "gelu" if approximate == "none" else "gelu_tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 x), the cheaper approximation of gelu (CLIP). Backward keeps x."""
    return apply_function(_Activation, x, "quick_gelu")


def relu2(x: torch.Tensor) -> torch.Tensor:
    """relu(x)² (So et al. 2021, Primer). Backward keeps x."""
    return apply_function(_Activation, x, "relu2")


def _check_shapes(what: str, gate: torch.Tensor, up: torch.Tensor) -> None:
    if gate.shape != up.shape:
        raise UserError(
            f"{what}: gate has shape {tuple(gate.shape)} and up {tuple(up.shape)}: give two tensors of one shape"
        )


def _check_approximate(what: str, approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise UserError(f'{what}(approximate={approximate!r}): give "none" (exact) or "tanh"')


class _Activation(Function):
    """(x, kind) -> activation(x).

    (torch's own gelu keeps x alone too, but the third derivative of its tanh form is NaN from |x| = 40 on.)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, kind: str) -> torch.Tensor:
        return _activation(x, kind)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.kind = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return _pulled_back(g, x, ctx.kind), None


class _Gated(Function):
    """(gate, up, kind) -> activation(gate) * up."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        return _times(_activation(gate, kind), up)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.kind = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        g_gate = g_up = None
        if ctx.needs_input_grad[0]:
            g_gate = _pulled_back(g * up, gate, ctx.kind)
        if ctx.needs_input_grad[1]:
            g_up = _times(_activation(gate, ctx.kind), g)
        return g_gate, g_up, None


def _activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        return functional.silu(x)
    if kind == "quick_gelu":
        return _times((1.702 * x).sigmoid(), x)
    if kind == "relu2":
        y = x.relu()
        return _times(y, y)
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _pulled_back(g: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """g times the derivative of the activation at x: torch's kernel, or formulas that are differentiable again."""
    if kind == "quick_gelu":  # silu(1.702 x) / 1.702
        return _pulled_back(g, 1.702 * x, "silu")
    if kind == "relu2":
        return 2 * g * x.relu()
    if graph_wanted():
        return (g * _slope(x.to(wide(x.dtype)), kind)).to(x.dtype)
    if kind == "silu":
        return torch.ops.aten.silu_backward(g, x)
    return torch.ops.aten.gelu_backward(g, x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _slope(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        s = x.sigmoid()
        return s * (1 + x * (1 - s))
    if kind == "gelu":
        below = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return below + x * density
    k, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(k * (x + cubic * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * cubic * x * x)


def _times(new: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """new * other, where `new` was made just now and is of the result's shape and dtype."""
    in_place = may_overwrite() and not torch.is_grad_enabled() and new.dtype == other.dtype
    return new.mul_(other) if in_place else new * other
