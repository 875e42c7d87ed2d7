"""Lion: steps of one size, along the sign of an interpolated momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.optim.apply import apply
from fmegatron.optim.core import Optimizer, Rate, check_fractions, check_rate, rate_at
from fmegatron.optim.leaves import widened, zeros_of
from fmegatron.optim.moments import Dtype, moment_dtype
from fmegatron.optim.per_leaf import Mask, Setting, Values, check_values, settings_of


def lion(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: Values = 0.0,
    mask: Mask = None,
    lr_scale: Values = None,
    moments: Dtype = None,
) -> Optimizer:
    """Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023).

        p <- p - lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p);  m <- beta2 * m + (1 - beta2) * g

    Its rates are 3 to 10 times smaller than Adam's, and the decay is as much larger. Arguments as for `adamw`. State:
    {"count", "m"}. Raises `UserError` for a negative rate or decay, or betas outside [0, 1).
    """
    check_rate("lion", lr)
    check_fractions("lion", betas=betas)
    check_values("lion", weight_decay=weight_decay, lr_scale=lr_scale)
    dtype = moment_dtype("lion", moments)
    beta1, beta2 = betas

    def init(params: Any) -> dict[str, Any]:
        return {"count": 0, "m": tree.tree_map(lambda p: zeros_of(p, dtype), params)}

    def update(
        params: Any, grads: Any, state: Any, *, donate: bool = False, grad_norm: Any = None, rounding: Any = None
    ) -> Any:
        rate = rate_at(lr, state["count"])
        trees = {"params": params, "grads": grads, "m": state["m"]}

        def plain(own: Setting, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
            p, g, m = widened(p, g, m)
            step = (m + (g - m) * (1 - beta1)).sign()
            return p * (1 - rate * own.scale * own.decay) - rate * own.scale * step, m + (g - m) * (1 - beta2)

        def kernel(own: Setting, p: list[Tensor], g: list[Tensor], m: list[Tensor]) -> None:
            step = torch._foreach_lerp(m, g, 1 - beta1)
            torch._foreach_sign_(step)
            torch._foreach_mul_(p, 1 - rate * own.scale * own.decay)
            torch._foreach_add_(p, step, alpha=-rate * own.scale)
            torch._foreach_lerp_(m, g, 1 - beta2)

        settings = settings_of(params, lr_scale, weight_decay, mask)
        options = {"written": ("params", "m"), "temporaries": True, "half": (), "rounding": rounding}
        new = apply(trees, settings, plain, kernel, donate, **options)  # (each operation of the kernel would round)
        return new["params"], grads, {**state, "count": state["count"] + 1, "m": new["m"]}

    return Optimizer(init, update, "lion", lr, rounds=True)
