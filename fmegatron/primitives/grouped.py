"""The product of groups of rows with a matrix each, as a primitive that can be tapped and saved by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from fmegatron.function import apply_function
from fmegatron.primitives._function import operator
from fmegatron.tape import Tape

if TYPE_CHECKING:
    from fmegatron.fp8.grouped import GroupedUse


def grouped_product(
    x: Tensor, w: Tensor, ends: Tensor, *, tape: Tape | None = None, name: str = "dot", fp8: GroupedUse | None = None
) -> Tensor:
    """x[row in] with its rows in groups, w[group in out …] -> [row out …]: each group's rows times the group's matrix.

    ends: int32[group], the row behind each group's last one; the last of them is the number of rows. Sizes of groups
        stay on the device. tape, name: as for `fmegatron.product.product`; the matrices can be tapped.
    fp8: how it runs in fp8 (`fmegatron.fp8.grouped.grouped_use`), or None.
    """
    if fp8 is not None:
        from fmegatron.fp8.grouped import fp8_grouped_product

        return fp8_grouped_product(x, w, ends, fp8, tape=tape, name=name)
    shape = w.shape[1:]
    if tape is None:
        y = apply_function(Grouped, x, w.flatten(2), ends, None)
    else:
        w, saved = tape.enter(name, w)
        y = apply_function(Grouped, x, w.flatten(2), ends, None if saved is None else saved[0])
        (y,) = tape.leave(name, [y], [x, ends], lambda x, ends, g: by_group(x, g, ends).unflatten(-1, shape[1:]))
    return y.unflatten(-1, shape[1:])


class Grouped(Function):
    """(x, w[group in out], ends, saved) -> the products; given these as `saved`, only the graph is made."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, ends: Tensor, saved: Tensor | None) -> Tensor:
        return products(x, w, ends) if saved is None else saved.view_as(saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        x, w, ends, _ = inputs
        by_x, by_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if by_w else None, w if by_x else None, ends)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        x, w, ends = ctx.saved_tensors
        by_x, by_w = ctx.needs_input_grad[:2]
        gx = apply_function(Grouped, g, w.transpose(-1, -2), ends, None) if by_x else None
        return gx, apply_function(ByGroup, x, g, ends) if by_w else None, None, None


class ByGroup(Function):
    """(x, g, ends) -> x transposed times g, of each group alone: the gradient of `Grouped` by its matrices."""

    @staticmethod
    def forward(x: Tensor, g: Tensor, ends: Tensor) -> Tensor:
        return by_group(x, g, ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gw: Tensor) -> tuple:
        x, g, ends = ctx.saved_tensors
        by_x, by_g = ctx.needs_input_grad[:2]
        gx = apply_function(Grouped, g, gw.transpose(-1, -2), ends, None) if by_x else None
        return gx, apply_function(Grouped, x, gw, ends, None) if by_g else None, None


@operator("fmegatron::grouped_products", reads=True)
def products(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """x[row in], w[group in out] -> [row out], without a graph."""
    if _native(x):
        return torch.nn.functional.grouped_mm(x, w, offs=ends)
    y = x.new_empty(x.shape[0], w.shape[-1])
    for n, (start, end) in enumerate(_groups(ends)):
        torch.mm(x[start:end], w[n], out=y[start:end])
    return y


@products.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[-1])


@operator("fmegatron::products_by_group", reads=True)
def by_group(x: Tensor, g: Tensor, ends: Tensor) -> Tensor:
    """x[row in], g[row out] -> [group in out], the sum over each group's rows, without a graph."""
    if _native(x):
        return torch.nn.functional.grouped_mm(x.t(), g, offs=ends)
    y = x.new_empty(ends.shape[0], x.shape[1], g.shape[1])
    for n, (start, end) in enumerate(_groups(ends)):
        torch.mm(x[start:end].t(), g[start:end], out=y[n])
    return y


@by_group.register_fake
def _(x: Tensor, g: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], g.shape[1])


def _native(x: Tensor) -> bool:
    """Does torch's own grouped product serve? It is for bf16 on a GPU."""
    return x.device.type == "cuda" and x.dtype == torch.bfloat16


def _groups(ends: Tensor) -> list[tuple[int, int]]:
    """[(first row, row behind the last)] of each group, on the host."""
    bounds = [0, *ends.tolist()]
    return list(zip(bounds, bounds[1:], strict=False))
