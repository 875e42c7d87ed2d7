"""`value_and_grad`: with the memory of torch.autograd.grad, and composable like torch.func's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fmegatron.dtensor import DTensor, any_dtensor
from fmegatron.errors import UserError
from fmegatron.function import under_torch_func
from fmegatron.tree import detached, flatten, is_float, is_tensor, leaves, like, paths, tensors, unflatten

# A tree of bools like the parameters, a predicate on a leaf's dotted name, or None: every floating leaf.
Trainable = Any


def value_and_grad(f: Callable, has_aux: bool = False, *, trainable: Trainable = None) -> Callable:
    """f(params, *args) -> scalar becomes (params, *args, *, loss_scale=None) -> (value, gradients).

    has_aux: f returns (scalar, aux), and the result is ((value, aux), gradients).
    loss_scale: a number by which the value is multiplied, in fp32 or wider, before it is differentiated, and the
        gradients divided, in fp32 or wider, so that those in between do not vanish in fp16 (`dynamic_loss_scale`). The
        value comes back without it.

    trainable: which leaves get a gradient: a tree of bools like params, or a predicate on a leaf's dotted name such as
        "layers.3.q". The others, and integer leaves, are constants and have None in place of a gradient.
    Leaves at rest (DTensors, in params or args) reach f as this rank's local tensors; their gradients are DTensors of
    the same placements. A leaf that f does not use has a gradient of zeros.

    The graph is freed as the gradients are made. Inside a torch.func transform, or when an argument needs a gradient
    already, the gradients are torch.func's and can be differentiated again; `aux` is never differentiated. Raises
    UserError when f's value is no 0-d floating-point tensor.
    """

    def run(params: Any, *args: Any, loss_scale: float | None = None) -> tuple[Any, Any]:
        wanted = trainable_leaves(params, trainable)
        flat, args = leaves(to_local(params)), to_local(args)
        aux_builder: list[Callable] = []

        def of(some: Iterable[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
            new = iter(some)
            p = like(params, [next(new) if w else t for t, w in zip(flat, wanted, strict=True)])
            value, aux = f(p, *args) if has_aux else (f(p, *args), None)
            aux, build = tensors(aux)
            aux_builder.append(build)
            value = scalar(value)
            if loss_scale is not None:
                value = value.to(torch.promote_types(value.dtype, torch.float32)) * loss_scale
            return value, aux

        if higher_order((flat, args)):
            got, (value, aux) = torch.func.grad_and_value(of, has_aux=True)(
                [t for t, w in zip(flat, wanted, strict=True) if w]
            )
        else:
            some = cut([t for t, w in zip(flat, wanted, strict=True) if w])
            flat = detached(flat)
            with torch.enable_grad():
                value, aux = of(some)
            got = gradients(value, some)
            value, aux = value.detach(), detached(aux)
        if loss_scale is not None:
            value, got = value / loss_scale, list(got)
            for i in range(len(got)):  # not in place: autograd may give one tensor to two leaves
                got[i] = unscaled(got[i], loss_scale)
        found = iter(got)
        grads = as_at_rest([next(found) if w else None for w in wanted], params)
        return ((value, aux_builder[0](aux)) if has_aux else value), grads

    return run


def trainable_leaves(params: Any, trainable: Trainable, flat: list[Any] | None = None) -> list[bool]:
    """For every leaf: is its gradient wanted? flat: the leaves, if the caller has them.

    Raises UserError when `trainable` is a tree of another structure.
    """
    flat = leaves(params) if flat is None else flat
    if trainable is None:
        return [is_float(t) for t in flat]
    if callable(trainable):
        return [is_float(t) and bool(trainable(path)) for path, t in zip(paths(params), flat, strict=True)]
    if paths(trainable) != paths(params):
        odd = sorted(set(paths(trainable)) ^ set(paths(params)))
        raise UserError(
            f"trainable must be a tree of bools like the parameters, but {odd[:3]} occur in only one of them"
        )
    return [is_float(t) and bool(choice) for t, choice in zip(flat, leaves(trainable), strict=True)]


def higher_order(tree: Any) -> bool:
    """Must gradients be differentiable again? (Inside torch.func, or a tensor of the tree needs a gradient already.)"""
    if under_torch_func() or not torch.is_grad_enabled():
        return under_torch_func()
    return any(is_tensor(t) and t.requires_grad for t in leaves(tree))


def cut(some: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Leaves of a new graph with these values."""
    return [t.detach().requires_grad_() for t in some]


def gradients(value: torch.Tensor, some: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    """torch.autograd.grad of a scalar that may depend on some, or on none, of the leaves."""
    if not some:
        return []
    if not value.requires_grad:
        return [torch.zeros_like(t) for t in some]
    return torch.autograd.grad(value, some, allow_unused=True, materialize_grads=True)


def unscaled(g: torch.Tensor | None, loss_scale: float, *, in_place: bool = False) -> torch.Tensor | None:
    """A gradient divided by the loss scale, in fp32 or wider; None stays."""
    if g is None:
        return None
    wide = g.to(torch.promote_types(g.dtype, torch.float32))
    return wide.mul_(1 / loss_scale) if in_place else wide * (1 / loss_scale)


def scalar(value: Any) -> torch.Tensor:
    """The value of a loss, checked."""
    if not is_float(value) or value.dim() != 0:
        what = type(value).__name__
        if isinstance(value, torch.Tensor):
            what = f"one of shape {tuple(value.shape)} and {value.dtype}"
        raise UserError(
            f"the function to differentiate must return a 0-d floating-point tensor, not {what}: take a sum or a mean"
        )
    return value


def to_local(tree: Any) -> Any:
    """The tree with every DTensor replaced by this rank's local tensor."""
    flat, shape = flatten(tree)
    if not any_dtensor(flat):
        return tree
    return unflatten(shape, [t.to_local() if isinstance(t, DTensor) else t for t in flat])


def as_at_rest(flat: list[Any], params: Any) -> Any:
    """Local gradients as a tree like params, each a DTensor where its parameter is one."""

    def place(g: Any, p: Any) -> Any:
        if g is None or not isinstance(p, DTensor):
            return g
        return DTensor.from_local(g, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())

    old, shape = flatten(params)
    placed = [place(g, p) for g, p in zip(flat, old, strict=True)] if any_dtensor(old) else flat
    return unflatten(shape, placed)
