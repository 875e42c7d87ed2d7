"""The product of an activation with a weight, as a primitive that can be tapped and saved by name."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from fmegatron.function import apply_function
from fmegatron.simulation import each_rank
from fmegatron.tape import Tape


def product(
    x: torch.Tensor, w: torch.Tensor, equation: str, *, tape: Tape | None = None, name: str = "dot"
) -> torch.Tensor:
    """`torch.einsum(equation, x, w)` of an activation x and a weight w.

    equation: single letters, e.g. "bse,ehd->bshd"; every letter of an operand occurs in the other one or in the
        output, none twice in one operand.
    tape: where a transform is listening (`sh.tape`). The product is then tapped, if w itself is a leaf of the block's
        parameters (`x @ w`, `w.T`, a cast weight stay right but are not), and can be saved under `name`.
    """
    if tape is None:
        return apply_function(Dot, x, w, None, equation)
    w, saved = tape.enter(name, w)
    y = apply_function(Dot, x, w, None if saved is None else saved[0], equation)
    return tape.leave(name, [y], [x], lambda x, g: weight_gradient(x, g, equation))[0]


class Dot(Function):
    """(x, w, saved, equation) -> einsum; given the product itself as `saved`, only the graph is made.

    On host time: einsum takes 5 µs more than a hand-written matrix product, and makes no further copies.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor, saved: torch.Tensor | None, equation: str) -> torch.Tensor:
        return einsum(equation, x, w) if saved is None else saved.view_as(saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        x, w, _, ctx.equation = inputs
        by_x, by_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if by_w else None, w if by_x else None)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple:
        x, w = ctx.saved_tensors
        by_x, by_w = ctx.needs_input_grad[:2]
        gx = input_gradient(g, w, ctx.equation) if by_x else None
        gw = weight_gradient(x, g, ctx.equation) if by_w else None
        return gx, gw, None, None


def input_gradient(g: torch.Tensor, w: torch.Tensor, equation: str) -> torch.Tensor:
    """The gradient by x, given the output's."""
    a, b, o = operands(equation)
    return einsum(f"{o},{b}->{a}", g, w)


def weight_gradient(x: torch.Tensor, g: torch.Tensor, equation: str) -> torch.Tensor:
    """The gradient by w, given the output's."""
    a, b, o = operands(equation)
    return einsum(f"{a},{o}->{b}", x, g)


def einsum(equation: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """torch.einsum of two tensors, simulated ones rank by rank."""
    if torch.compiler.is_compiling():
        return torch.einsum(equation, x, y)
    return each_rank(lambda x, y: torch.einsum(equation, x, y), x, y)


def operands(equation: str) -> list[str]:
    """["bse", "ehd", "bshd"] of "bse,ehd->bshd"."""
    return equation.replace(" ", "").replace("->", ",").split(",")
