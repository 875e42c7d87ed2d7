"""Adam, with decoupled weight decay or L2 regularisation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.optim.apply import apply
from fmegatron.optim.core import Optimizer, Rate, check_fractions, check_not_negative, check_rate, rate_at
from fmegatron.optim.leaves import widened, zeros_of
from fmegatron.optim.moments import Moments, moment_dtypes
from fmegatron.optim.per_leaf import Mask, Setting, Values, check_values, settings_of


def adamw(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: Values = 0.1,
    mask: Mask = None,
    lr_scale: Values = None,
    moments: Moments = None,
) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019), equal to torch.optim.AdamW.

    lr: a rate, or a schedule of the number of updates made before.
    weight_decay: a number, or a tree of numbers like the parameters (`per_leaf`). It is multiplied by the leaf's rate.
    mask: where decay applies: a tree of bools like the parameters, or a function params -> tree. None: everywhere.
    lr_scale: multipliers of the rate: a number, or a tree of numbers (`per_leaf`). None: 1.
    moments: dtype of the two moments, or a pair of dtypes (mean, mean square); None: float64 for float64 parameters,
        else float32.

    State: {"count", "m", "v"}. Raises `UserError` for a negative rate, eps or decay, or betas outside [0, 1).
    """
    return _adam("adamw", True, lr, betas, eps, weight_decay, mask, lr_scale, moments)


def adam(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: Values = 0.0,
    mask: Mask = None,
    lr_scale: Values = None,
    moments: Moments = None,
) -> Optimizer:
    """Adam (Kingma & Ba, 2015), equal to torch.optim.Adam: weight_decay times the parameter is added to the gradient.

    Arguments, state and errors as for `adamw`.
    """
    return _adam("adam", False, lr, betas, eps, weight_decay, mask, lr_scale, moments)


def _adam(
    name: str,
    decoupled: bool,
    lr: Rate,
    betas: tuple[float, float],
    eps: float,
    weight_decay: Values,
    mask: Mask,
    lr_scale: Values,
    moments: Moments,
) -> Optimizer:
    check_rate(name, lr)
    check_not_negative(name, eps=eps)
    check_values(name, weight_decay=weight_decay, lr_scale=lr_scale)
    check_fractions(name, betas=betas)
    dtypes = moment_dtypes(name, moments)

    def init(params: Any) -> dict[str, Any]:
        m, v = (tree.tree_map(lambda p, d=d: zeros_of(p, d), params) for d in dtypes)
        return {"count": 0, "m": m, "v": v}

    def update(
        params: Any, grads: Any, state: Any, *, donate: bool = False, grad_norm: Any = None, rounding: Any = None
    ) -> Any:
        step, rate = state["count"] + 1, rate_at(lr, state["count"])
        trees = {"params": params, "grads": grads, "m": state["m"], "v": state["v"]}
        constants: dict[str, Any] = {"beta1": betas[0], "beta2": betas[1], "eps": eps}

        def plain(own: Setting, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            lr = rate * own.scale
            return _plain(p, g, m, v, step=step, lr=lr, weight_decay=own.decay, decoupled=decoupled, **constants)

        def fused(own: Setting, p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor]) -> None:
            kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
            count = torch.full((), float(step), dtype=torch.float32, device=p[0].device)
            kernel(
                p,
                g,
                m,
                v,
                [],
                [count] * len(p),
                lr=rate * own.scale,
                weight_decay=own.decay,
                amsgrad=False,
                maximize=False,
                **constants,
            )

        settings = settings_of(params, lr_scale, weight_decay, mask)
        new = apply(trees, settings, plain, fused, donate, written=("params", "m", "v"), rounding=rounding)
        return new["params"], grads, {**state, "count": step, "m": new["m"], "v": new["v"]}

    return Optimizer(init, update, name, lr, rounds=True)


def _plain(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    step: int,
    lr: Any,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One parameter in plain operations."""
    p, g, m, v = widened(p, g, m, v)
    if not decoupled:
        g = g + weight_decay * p
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    spread = v.sqrt() / math.sqrt(1 - beta2**step) + eps
    p = p * (1 - lr * weight_decay) if decoupled else p
    return p - (lr / (1 - beta1**step)) * m / spread, m, v
