"""Equations over named dimensions: "batch seq* embed -> batch seq embed | heads"."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fmegatron.errors import ShardingError
from fmegatron.rules import base


class Side(NamedTuple):
    """One side of an equation: its dims, and the dims behind `|` whose axes it enters (R there)."""

    dims: tuple[str, ...]
    region: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(self.dims) + (" | " + " ".join(self.region) if self.region else "")


class Equation(NamedTuple):
    """Operands and result of an equation."""

    inputs: tuple[Side, ...]
    output: Side
    text: str


def parse_side(text: str) -> Side:
    """ "batch seq embed | heads" -> Side(("batch", "seq", "embed"), ("heads",)). An empty text is a scalar."""
    return _once(_side, text)


def parse_equation(text: str, operands: int) -> Equation:
    """ "a b, b c -> a c" with this many operands on the left. Raises ShardingError for anything else."""
    return _once(_equation, text, operands)


class DotForm(NamedTuple):
    """A product of two operands: how many dims each has, and how torch.einsum spells it."""

    dims: tuple[int, int]
    einsum: str


def dot_form(text: str) -> DotForm:
    """The form of "a b, b c -> a c". Raises ShardingError as `parse_equation` and `einsum_of` do."""
    return _once(_dot_form, text)


def reduced_dims(text: str) -> tuple[int, tuple[int, ...]]:
    """Of a reduction "a b c -> b": (how many dims its operand has, which of them the result lacks). Raises ShardingError
    where the result has others, or another order."""
    return _once(_reduced, text)


def einsum_of(equation: Equation) -> str:
    """The same product as torch.einsum spells it, one letter a dim. Raises ShardingError for a dim that no operand
    has."""
    return _once(_einsum, equation)


def _once(f: Callable[..., Any], *args: Any) -> Any:
    """f(*args), kept from one call to the next. (torch.compile, which would trace through the cache, runs it while
    tracing.)"""
    return f(*args) if torch.compiler.is_compiling() else _kept(f, *args)


@lru_cache(maxsize=8192)
def _kept(f: Callable[..., Any], *args: Any) -> Any:
    return f(*args)


def _side(text: str) -> Side:
    dims, _, region = text.partition("|")
    side = Side(tuple(dims.split()), tuple(region.split()))
    names = [base(d) for d in side.dims]
    for name in (*names, *(base(r) for r in side.region)):
        if not name.isidentifier():
            raise ShardingError(f"{text!r}: {name!r} is no name of a dim (letters, digits and _, then marks * or ')")
    if len(set(names)) != len(names):
        raise ShardingError(f"{text!r} names a dim twice: two dims of one value need two names")
    return side


def _equation(text: str, operands: int) -> Equation:
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise ShardingError(f'{text!r} is no equation: write "dims -> dims" with one arrow')
    parts = left.split(",")
    if len(parts) != operands:
        raise ShardingError(f"{text!r} has {len(parts)} operand(s) on its left, this call has {operands}")
    inputs = tuple(parse_side(p) for p in parts)
    if entered := [s for s in inputs if s.region]:
        raise ShardingError(
            f"{text!r}: a `|` names what a value enters, so it belongs behind the arrow, not to {str(entered[0])!r}"
        )
    return Equation(inputs, parse_side(right), text)


def _reduced(text: str) -> tuple[int, tuple[int, ...]]:
    parsed = _equation(text, 1)
    left, right = [base(n) for n in parsed.inputs[0].dims], [base(n) for n in parsed.output.dims]
    if [n for n in left if n in right] != right:
        raise ShardingError(f"{text!r}: the output must name dims of the input, in their order")
    return len(left), tuple(d for d, n in enumerate(left) if n not in right)


def _dot_form(text: str) -> DotForm:
    parsed = _equation(text, 2)
    x, w = parsed.inputs
    return DotForm((len(x.dims), len(w.dims)), _einsum(parsed))


def _einsum(equation: Equation) -> str:
    names = dict.fromkeys(base(n) for side in equation.inputs for n in side.dims)
    letter = {n: chr(97 + i) for i, n in enumerate(names)}
    if missing := [n for n in equation.output.dims if base(n) not in letter]:
        raise ShardingError(f"{equation.text!r}: output dim {missing[0]!r} is in no operand")
    left = ",".join("".join(letter[base(n)] for n in side.dims) for side in equation.inputs)
    return left + "->" + "".join(letter[base(n)] for n in equation.output.dims)
