"""Adam, with decoupled weight decay or L2 regularisation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.capturing import numbers
from fmegatron.errors import UserError
from fmegatron.optim.apply import Work, apply
from fmegatron.optim.clip import clip_factor
from fmegatron.optim.core import Optimizer, Rate, check_fractions, check_not_negative, check_rate, rate_at
from fmegatron.optim.fused import adam_pass, check_kernel
from fmegatron.optim.leaves import widened, zeros_of
from fmegatron.optim.moments import FLOAT8, Bytes, Moments, moment_dtypes
from fmegatron.optim.norm import global_norm
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
    clip: float | None = None,
    kernel: str = "auto",
) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019), equal to torch.optim.AdamW.

    lr: a rate, or a schedule of the number of updates made before.
    weight_decay: a number, or a tree of numbers like the parameters (`per_leaf`). It is multiplied by the leaf's rate.
    mask: where decay applies: a tree of bools like the parameters, or a function params -> tree. None: everywhere.
    lr_scale: multipliers of the rate: a number, or a tree of numbers (`per_leaf`). None: 1.
    moments: dtype of the two moments, or a pair of dtypes (mean, mean square); None: float64 for float64 parameters,
        else float32. torch.float8_e4m3fn: both in a byte each, 2 bytes a parameter (see `fmegatron.optim.moments`).
    clip: the largest global norm of the gradients, as `clip_by_global_norm` in front has it, but without a pass of its
        own over the gradients: they are multiplied as they are read, and come back as they were. None: no clipping.
    kernel: "auto": on a GPU with triton one pass of a single kernel over gradients, moments, parameters and the copies
        of `with_master`. "torch": never. "triton": that kernel, or an error where triton is not installed.

    State: {"count", "m", "v"}. Raises `UserError` for a negative rate, eps or decay, betas outside [0, 1), or a clip
    that is not above 0.
    """
    return _adam("adamw", True, lr, betas, eps, weight_decay, mask, lr_scale, moments, clip, kernel)


def adam(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: Values = 0.0,
    mask: Mask = None,
    lr_scale: Values = None,
    moments: Moments = None,
    clip: float | None = None,
    kernel: str = "auto",
) -> Optimizer:
    """Adam (Kingma & Ba, 2015), equal to torch.optim.Adam: weight_decay times the parameter is added to the gradient.

    Arguments, state and errors as for `adamw`.
    """
    return _adam("adam", False, lr, betas, eps, weight_decay, mask, lr_scale, moments, clip, kernel)


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
    clip: float | None,
    kernel: str,
) -> Optimizer:
    check_rate(name, lr)
    check_not_negative(name, eps=eps)
    check_values(name, weight_decay=weight_decay, lr_scale=lr_scale)
    check_fractions(name, betas=betas)
    dtypes = moment_dtypes(name, moments, float8=True)
    in_bytes = dtypes[0] == FLOAT8
    if clip is not None and not clip > 0:
        raise UserError(f"{name} needs a clip above 0, or None, but got clip={clip}")
    check_kernel(name, kernel)

    def init(params: Any) -> dict[str, Any]:
        held = (torch.uint8,) * 2 if in_bytes else dtypes
        m, v = (tree.tree_map(lambda p, d=d: zeros_of(p, d), params) for d in held)
        return {"count": 0, "m": m, "v": v}

    def update(
        params: Any,
        grads: Any,
        state: Any,
        *,
        donate: bool = False,
        grad_norm: Any = None,
        rounding: Any = None,
        copies: Any = None,
    ) -> Any:
        before = state["count"]
        step, rate = before + 1, rate_at(lr, before)
        scale = None
        if clip is not None:
            scale = clip_factor(global_norm(grads) if grad_norm is None else grad_norm, clip)
        trees = {"params": params, "grads": grads, "m": state["m"], "v": state["v"]}
        coded = Bytes.of_step(before) if in_bytes else None
        constants: dict[str, Any] = {"beta1": betas[0], "beta2": betas[1], "eps": eps}

        def plain(own: Setting, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            lr = rate * own.scale
            m, v = (m, v) if coded is None else coded.decoded(m, v)
            p, m, v = _plain(p, g, m, v, step=step, lr=lr, weight_decay=own.decay, decoupled=decoupled, **constants)
            return p, *((m, v) if coded is None else coded.encoded(m, v))

        def fused(own: Setting, p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor]) -> None:
            run = torch._fused_adamw_ if decoupled else torch._fused_adam_
            device = p[0].device
            if isinstance(before, Tensor):
                count = numbers(lambda n: (float(n + 1),), before)[0].float()
            else:
                count = torch.full((), float(step), dtype=torch.float32, device=device)
            size = rate * own.scale
            if isinstance(size, Tensor) and device.type == "cuda":
                size = size.float()  # what the kernel reads
            run(
                p,
                g,
                m,
                v,
                [],
                [count] * len(p),
                lr=size,
                weight_decay=own.decay,
                amsgrad=False,
                maximize=False,
                **constants,
            )

        def one_pass(work: Work, own: Setting, members: list[int], copies: Any, scale: Tensor | None) -> list[int]:
            options: dict[str, Any] = {"lr": lr, "count": before, "betas": betas, "eps": eps, "decoupled": decoupled}
            return adam_pass(work, own, members, copies, scale, kernel=kernel, **options)

        settings = settings_of(params, lr_scale, weight_decay, mask)
        options: dict[str, Any] = {"rounding": rounding, "scale": scale, "copies": copies, "one_pass": one_pass}
        new = apply(trees, settings, plain, fused, donate, written=("params", "m", "v"), coded=coded, **options)
        return new["params"], grads, {**state, "count": step, "m": new["m"], "v": new["v"]}

    return Optimizer(init, update, name, lr, rounds=True, casts=True)


def _plain(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    step: Any,
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
    seen = 1 - beta2**step
    spread = v.sqrt() / (seen.sqrt() if isinstance(seen, Tensor) else math.sqrt(seen)) + eps
    p = p * (1 - lr * weight_decay) if decoupled else p
    return p - (lr / (1 - beta1**step)) * m / spread, m, v
