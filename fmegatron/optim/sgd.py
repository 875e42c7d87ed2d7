"""Gradient descent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.errors import UserError
from fmegatron.optim.apply import apply
from fmegatron.optim.core import Optimizer, Rate, check_not_negative, check_rate, rate_at
from fmegatron.optim.leaves import widened, zeros_of
from fmegatron.optim.moments import Dtype, moment_dtype
from fmegatron.optim.per_leaf import Mask, Setting, Values, check_values, settings_of


def sgd(
    lr: Rate,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: Values = 0.0,
    mask: Mask = None,
    lr_scale: Values = None,
    moments: Dtype = None,
) -> Optimizer:
    """Gradient descent with momentum, equal to torch.optim.SGD.

    Arguments as for `adamw`; weight_decay times the parameter is added to the gradient. State: {"count", "momentum"},
    or {"count"} without momentum. Raises `UserError` for a negative rate, momentum or decay, or nesterov without
    momentum.
    """
    check_rate("sgd", lr)
    check_not_negative("sgd", momentum=momentum)
    check_values("sgd", weight_decay=weight_decay, lr_scale=lr_scale)
    dtype = moment_dtype("sgd", moments)
    if nesterov and not momentum:
        raise UserError("sgd with nesterov=True needs a momentum above 0, such as momentum=0.9")

    def init(params: Any) -> dict[str, Any]:
        if not momentum:
            return {"count": 0}
        return {"count": 0, "momentum": tree.tree_map(lambda p: zeros_of(p, dtype), params)}

    def update(
        params: Any, grads: Any, state: Any, *, donate: bool = False, grad_norm: Any = None, rounding: Any = None
    ) -> Any:
        rate = rate_at(lr, state["count"])
        trees = {"params": params, "grads": grads}
        if momentum:
            trees["momentum"] = state["momentum"]

        def plain(own: Setting, p: Tensor, g: Tensor, *buffer: Tensor) -> tuple[Tensor, ...]:
            return _plain(p, g, *buffer, lr=rate * own.scale, momentum=momentum, nesterov=nesterov, decay=own.decay)

        def fused(own: Setting, p: list[Tensor], g: list[Tensor], *buffer: list[Tensor]) -> None:
            torch._fused_sgd_(
                p,
                g,
                buffer[0] if buffer else [],
                lr=rate * own.scale,
                momentum=momentum,
                nesterov=nesterov,
                weight_decay=own.decay,
                dampening=0.0,
                maximize=False,
                is_first_step=False,  # a buffer of zeros gives the first step's values
            )

        settings = settings_of(params, lr_scale, weight_decay, mask)
        written = ("params", "momentum")
        # torch's kernel for half precision on CPU reads memory that it has not written (torch 2.13)
        new = apply(trees, settings, plain, fused, donate, written=written, half=("cuda",), rounding=rounding)
        return new.pop("params"), grads, {**state, "count": state["count"] + 1, **new}

    return Optimizer(init, update, "sgd", lr, rounds=True)


def _plain(
    p: Tensor, g: Tensor, *buffer: Tensor, lr: Any, momentum: float, nesterov: bool, decay: float
) -> tuple[Tensor, ...]:
    """One parameter in plain operations."""
    p, g, *buffers = widened(p, g, *buffer)
    g = g + decay * p
    if not buffers:
        return (p - lr * g,)
    moving = momentum * buffers[0] + g
    return p - lr * (g + momentum * moving if nesterov else moving), moving
