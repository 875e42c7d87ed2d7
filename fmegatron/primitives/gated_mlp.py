"""A gated MLP as one primitive, for kernels that run the activation inside the products on both sides of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fmegatron.errors import UserError
from fmegatron.function import apply_function, under_torch_func
from fmegatron.kernels import quack
from fmegatron.primitives._function import graph_wanted, operator
from fmegatron.primitives.activation import _gated

KINDS = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}


def has_kernel(x: Tensor, gate_up: Tensor, down: Tensor, activation: str, *, kernel: str = "auto") -> bool:
    """Would `gated_mlp` of these run its activation inside its products? (Where not, products and activation are better
    called one by one: they can then be cut, saved and named.)"""
    if kernel != "auto" or activation not in KINDS or type(x) is not torch.Tensor or under_torch_func():
        return False
    return x.dtype == gate_up.dtype == down.dtype and quack.takes(x, KINDS[activation], gate_up.shape[1])


def gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor, *, activation: str = "swiglu", kernel: str = "auto") -> Tensor:
    """(activation(x gate) * (x up)) down: x[… embed], gate_up[embed mlp 2], down[mlp embed] -> [… embed].

    gate_up: gate and up by turns, torch.stack([gate, up], -1), as a decoder's `gate_up` leaf is stored. So they are in the
        matrix [embed, 2 mlp] that kernels multiply by, which is a view, and so is its gradient.
    activation: "swiglu", "geglu" or "geglu_tanh" (Shazeer 2020).
    kernel: "torch" or "triton": products one by one, and the activation between as `swiglu` has it. "auto": where
        `has_kernel` says so, quack-kernels' products, which keep x and the first product for backward (and not what comes
        of the activation).

    Raises UserError for another activation, and for shapes that disagree.
    """
    if activation not in KINDS:
        raise UserError(f"gated_mlp(activation={activation!r}): use one of {', '.join(KINDS)}")
    embed, hidden = x.shape[-1], down.shape[0] if down.ndim == 2 else None
    if gate_up.shape != (embed, hidden, 2):
        raise UserError(
            f"gated_mlp: x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} disagree: give "
            "x[… embed], gate_up[embed mlp 2] (torch.stack([gate, up], -1)) and down[mlp embed]"
        )
    if has_kernel(x, gate_up, down, activation, kernel=kernel):
        return apply_function(_GatedMlp, x, gate_up, down, KINDS[activation])[0]
    return _one_by_one(x, gate_up, down, KINDS[activation], kernel)


def _one_by_one(x: Tensor, gate_up: Tensor, down: Tensor, kind: str, kernel: str = "auto") -> Tensor:
    both = (x @ gate_up.flatten(1)).unflatten(-1, gate_up.shape[1:])
    return _gated("gated_mlp", both, None, -1, kind, kernel) @ down


class _GatedMlp(Function):
    """(x, gate_up, down, kind) -> (y, both): x gate_up, in which gate and up take turns, which is for backward alone."""

    @staticmethod
    def forward(x: Tensor, gate_up: Tensor, down: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        both, h = _product(x.reshape(-1, x.shape[-1]), gate_up.flatten(1), kind)
        return torch.mm(h, down).view(*x.shape[:-1], down.shape[1]), both

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.kind = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # or zeros would be made as its gradient
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Any) -> Any:
        if g is None:
            return None, None, None, None
        x, gate_up, down, both = ctx.saved_tensors
        if graph_wanted():
            with torch.enable_grad():
                y = _one_by_one(x, gate_up, down, ctx.kind, "torch")
            return *torch.autograd.grad(y, (x, gate_up, down), g, create_graph=True), None
        rows, g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        g_both, h = _product_backward(g, down, both, ctx.kind)
        gx = torch.mm(g_both, gate_up.flatten(1).t()).view(x.shape)
        return gx, torch.mm(rows.t(), g_both).view(gate_up.shape), torch.mm(h.t(), g), None


@operator("fmegatron::gated_product")
def _product(x: Tensor, w: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return quack.forward(x, w, kind)


@_product.register_fake
def _(x: Tensor, w: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], w.shape[1]), x.new_empty(x.shape[0], w.shape[1] // 2)


@operator("fmegatron::gated_product_backward")
def _product_backward(g: Tensor, w: Tensor, y: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return quack.backward(g.contiguous(), w, y, kind)


@_product_backward.register_fake
def _(g: Tensor, w: Tensor, y: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), y.new_empty(y.shape[0], y.shape[1] // 2)
