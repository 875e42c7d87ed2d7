"""Clipping of gradients by their global norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.errors import UserError
from fmegatron.optim import leaves
from fmegatron.optim.core import Optimizer
from fmegatron.optim.leaves import buffer_of, grouped, holder_of
from fmegatron.optim.norm import global_norm


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Scales the gradients by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does.

    The norm is `global_norm`, or the `grad_norm` given. No state. Raises `UserError` unless max_norm > 0.
    """
    if not max_norm > 0:
        raise UserError(f"clip_by_global_norm needs a max_norm above 0, but got max_norm={max_norm}")

    def update(params: Any, grads: Any, state: Any, *, donate: bool = False, grad_norm: Any = None) -> Any:
        norm = global_norm(grads) if grad_norm is None else grad_norm
        return params, _scaled(grads, clip_factor(norm, max_norm), donate), state

    return Optimizer(lambda params: {}, update, "clip", writes=False)


def clip_factor(norm: Any, max_norm: float) -> Tensor:
    """What clipping multiplies gradients of this norm by, 0-d."""
    return torch.as_tensor(max_norm / (norm + 1e-6)).clamp(max=1.0)


def _scaled(grads: Any, scale: Tensor, donate: bool) -> Any:
    """The gradients times a 0-d tensor, in their own dtypes."""
    old = tree.leaves(grads)
    new = list(old)
    rows = [i for i, g in enumerate(old) if tree.is_float(g)]
    if leaves.plain_only():
        for i in rows:
            new[i] = (old[i] * scale).to(old[i].dtype)
        return tree.like(grads, new)
    with torch.no_grad():
        for members in grouped(rows, lambda i: (old[i].device, old[i].dtype)).values():
            group = [buffer_of(old[i]) if donate else buffer_of(old[i]).clone() for i in members]
            torch._foreach_mul_(group, scale.to(group[0].device))
            for i, local in zip(members, group, strict=True):
                new[i] = holder_of(local, old[i])
    return tree.like(grads, new)
