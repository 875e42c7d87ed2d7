"""The product of an activation with a weight, as a primitive that can be tapped and saved by name."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.autograd import Function

from fmegatron.function import apply_function
from fmegatron.simulation import each_rank
from fmegatron.tape import Tape


def product(
    x: torch.Tensor, w: torch.Tensor, equation: str, *, tape: Tape | None = None, name: str = "dot", fp8: Any = None
) -> torch.Tensor:
    """`torch.einsum(equation, x, w)` of an activation x and a weight w.

    equation: single letters, e.g. "bse,ehd->bshd"; every letter of an operand occurs in the other one or in the
        output, none twice in one operand.
    tape: where a transform is listening (`sh.tape`). The product is then tapped, if w itself is a leaf of the block's
        parameters (`x @ w`, `w.T`, a cast weight stay right but are not), and can be saved under `name`.
    fp8: how it runs in fp8 (`fmegatron.fp8.use.Use`); None: in the operands' dtype.
    """
    if fp8 is not None:
        from fmegatron.fp8.dot import fp8_product  # imported where something is in fp8

        return fp8_product(x, w, fp8, tape=tape, name=name)
    if tape is None:
        if type(x) is type(w) is torch.Tensor and not (
            torch.compiler.is_compiling() or torch._C._len_torch_function_stack()
        ):
            return matrix_product(x, w, equation)
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
    if type(x) is type(y) is torch.Tensor:
        return matrix_product(x, y, equation)
    return each_rank(lambda x, y: matrix_product(x, y, equation), x, y)


def matrix_product(x: torch.Tensor, y: torch.Tensor, equation: str) -> torch.Tensor:
    """torch.einsum(equation, x, y), with a third of its host time where it is a product of two matrices that need no
    permutation, as those of a model are, forward and backward."""
    form = _as_matrices(equation)
    if form is None:
        return torch.einsum(equation, x, y)
    rows, columns, x_turned, y_turned, swapped = form
    if not (x_turned or y_turned or swapped) and x.is_contiguous():  # torch.matmul has the rest in one call
        inner = x.ndim - rows
        z = torch.matmul(x.flatten(rows) if inner > 1 else x, _matrix(y, inner))
        return z if columns == 1 else z.view(x.shape[:rows] + y.shape[inner:])
    left, right = x.shape[-rows:] if x_turned else x.shape[:rows], y.shape[:columns] if y_turned else y.shape[-columns:]
    a = _matrix(x, x.ndim - rows if x_turned else rows)
    b = _matrix(y, columns if y_turned else y.ndim - columns)
    a, b = a.t() if x_turned else a, b.t() if y_turned else b
    if swapped:
        z = torch.mm(b.t(), a.t())
        return z if rows == columns == 1 else z.view(right + left)
    z = torch.mm(a, b)
    return z if rows == columns == 1 else z.view(left + right)


def _matrix(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x with its first dims as one, and the others as one."""
    x = x.flatten(rows) if x.ndim - rows > 1 else x
    return x.flatten(0, rows - 1) if rows > 1 else x


@lru_cache(maxsize=4096)
def _as_matrices(equation: str) -> tuple[int, int, bool, bool, bool] | None:
    """How a product is one of two matrices: (how many dims of x are its rows, how many of y its columns; are these the
    last ones of x, and the first ones of y; does y come first in the result?). None where a dim is shared by all three,
    one operand has no dim of its own, or dims would have to be permuted."""
    a, b, o = operands(equation)
    inner = "".join(c for c in a if c in b)
    left, right = ("".join(c for c in t if c not in inner) for t in (a, b))
    if (
        not (left and right and inner)
        or a not in (left + inner, inner + left)
        or b not in (inner + right, right + inner)
    ):
        return None
    if o not in (left + right, right + left):
        return None
    return len(left), len(right), a != left + inner, b != inner + right, o != left + right


def operands(equation: str) -> list[str]:
    """["bse", "ehd", "bshd"] of "bse,ehd->bshd"."""
    return equation.replace(" ", "").replace("->", ",").split(",")
