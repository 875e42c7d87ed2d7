"""A product of named dims as a product of two matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Form:
    """How "bse,ehd->bshd" is [rows, sums] @ [sums, columns]: of each tensor, in which order its dims are rows and columns.

    x, w, y: the permutations that bring x to rows + sums, w to sums + columns, and rows + columns to y. rows, columns, sums: the
    number of their dims.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    rows: int
    sums: int
    columns: int

    def left(self, x: Tensor) -> Tensor:
        """x as [rows, sums]."""
        return _matrix(x, self.x, self.rows)

    def right(self, w: Tensor) -> Tensor:
        """w as [sums, columns]."""
        return _matrix(w, self.w, self.sums)

    def result(self, g: Tensor) -> Tensor:
        """A tensor like y as [rows, columns]."""
        return _matrix(g, inverse(self.y), self.rows)

    def sizes(self, x: tuple[int, ...], w: tuple[int, ...]) -> tuple[int, int, int]:
        """(rows, sums, columns) of the product of tensors of some shapes."""
        a, b = [x[i] for i in self.x], [w[i] for i in self.w]
        return math.prod(a[: self.rows]), math.prod(b[: self.sums]), math.prod(b[self.sums :])

    def to_x(self, m: Tensor, like: tuple[int, ...]) -> Tensor:
        """[rows, sums] as a tensor of x's shape."""
        return _tensor(m, inverse(self.x), [like[i] for i in self.x])

    def to_w(self, m: Tensor, like: tuple[int, ...]) -> Tensor:
        """[sums, columns] as a tensor of w's shape."""
        return _tensor(m, inverse(self.w), [like[i] for i in self.w])

    def to_y(self, m: Tensor, x: tuple[int, ...], w: tuple[int, ...]) -> Tensor:
        """[rows, columns] as y, of tensors of some shapes."""
        sizes = [x[i] for i in self.x][: self.rows] + [w[i] for i in self.w][self.sums :]
        return _tensor(m, self.y, sizes)


def form_of(equation: str) -> Form | None:
    """The form of an equation of single letters; None where a letter is in all three tensors, or nothing is summed."""
    x, w, y = equation.replace(" ", "").replace("->", ",").split(",")
    rows = [n for n in y if n in x and n not in w]
    sums = [n for n in x if n in w and n not in y]
    columns = [n for n in y if n in w and n not in x]
    if not rows or not sums or not columns:
        return None
    if (len(rows + sums), len(sums + columns), len(rows + columns)) != (len(x), len(w), len(y)):
        return None
    orders = ([x.index(n) for n in rows + sums], [w.index(n) for n in sums + columns])
    out = [(rows + columns).index(n) for n in y]
    return Form(tuple(orders[0]), tuple(orders[1]), tuple(out), len(rows), len(sums), len(columns))


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation that undoes another."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _matrix(t: Tensor, order: tuple[int, ...], first: int) -> Tensor:
    t = t if order == tuple(range(len(order))) else t.permute(order)
    return t.reshape(math.prod(t.shape[:first]), math.prod(t.shape[first:]))


def _tensor(m: Tensor, order: tuple[int, ...], sizes: list[int]) -> Tensor:
    t = m.view(sizes)
    return t if order == tuple(range(len(order))) else t.permute(order)
