"""How primitives (`torch.autograd.Function`s of the new style: `forward` and `setup_context`) are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._functorch import unwrap_if_dead
from torch.autograd import Function


def under_torch_func() -> bool:
    """Is a torch.func transform (grad, vjp, vmap, …) running around the caller?"""
    return torch._C._are_functorch_transforms_active()


def readable(x: Any) -> bool:
    """May the host read the value of x without waiting? (A plain tensor on the CPU, in eager code outside of torch.func,
    where no mode watches what is run.)"""
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or not x.is_cpu:
        return False
    return not (under_torch_func() or torch._C._len_torch_dispatch_stack())


def apply_function(cls: type[Function], *args: Any) -> Any:
    """`cls.apply(*args)` without the 10 to 30 µs in which `apply` inspects signatures on the host.

    Every argument of `forward` must be given, by position. Under torch.func it is `cls.apply` itself, and in compiled
    code too where something needs a gradient.
    """
    if torch.compiler.is_compiling():
        if under_torch_func() or _gradient_needed(args):
            return cls.apply(*args)
        # What `apply` comes to. Dynamo, before torch 2.15, takes a forward of variable length (*args) for one of the
        # old style here, and passes it a context as well.
        return cls.forward(*args)
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_function_stack():
        return cls.apply(*args)  # (a torch-function mode, such as the checking mode, watches `apply`)
    # A tensor that outlived its torch.func transform is still wrapped; `apply` unwraps it as well.
    args = tuple([unwrap_if_dead(a) if isinstance(a, torch.Tensor) else a for a in args])
    return super(Function, cls).apply(*args)  # type: ignore[misc]


def _gradient_needed(args: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)


class Linear(Function):
    """A linear map of tensors and its transpose, each the other's derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(there: Callable, back: Callable, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(there(list(xs)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.there, ctx.back = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *gs: torch.Tensor) -> tuple:
        return None, None, *apply_function(Linear, ctx.back, ctx.there, *gs)


def linear_map(there: Callable, back: Callable, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`there(xs)` for a linear function of a list of tensors whose transpose is `back`.

    Differentiable any number of times. Both take and give lists of equal length; what they do inside (collectives, say)
    is not differentiated.
    """
    return list(apply_function(Linear, there, back, *xs)) if xs else []
