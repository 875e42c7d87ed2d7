"""Dims whose size does not divide by the mesh axes that hold them.

At rest the parts are those of DTensor and torch.chunk: axis by axis, the first parts the larger ones, the last ones
maybe empty. In equations every rank holds as much as the largest part, filled up with zeros, so that all collectives,
kernels and graphs have one shape on all ranks (as in GSPMD, Xu et al. 2021). A dim is *whole* where no axis holds it,
and *laid out* where all parts stand one after the other, each filled up.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

NOTHING = -1  # the global position of what fills up a part


def parts(n: int, counts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(start, size) of every part of a dim of size n that axes of some sizes cut in turn, the major one first."""
    found = [(0, n)]
    for count in counts:
        cut = []
        for start, size in found:
            each = -(-size // count)
            cut += [(start + min(i * each, size), max(0, min(each, size - i * each))) for i in range(count)]
        found = cut
    return tuple(found)


def part(n: int, counts: tuple[int, ...], place: int) -> int:
    """The size of one of these parts, without the others."""
    ranks = math.prod(counts)
    for count in counts:
        each, ranks = -(-n // count), ranks // count
        i, place = divmod(place, ranks)
        n = max(0, min(each, n - i * each))
    return n


def largest(n: int, counts: tuple[int, ...]) -> int:
    """The size of the largest part, which is what each rank holds in equations."""
    for count in counts:
        n = -(-n // count)
    return n


def positions(n: int, counts: tuple[int, ...], device: torch.device) -> Tensor:
    """int64[part, place]: the global position at each place of each part, `NOTHING` where a part is filled up."""
    place = torch.arange(largest(n, counts), device=device)
    starts, sizes = torch.tensor(parts(n, counts), device=device).T[..., None]
    return torch.where(place < sizes, starts + place, NOTHING)


def lay_out(x: Tensor, dim: int, counts: tuple[int, ...]) -> Tensor:
    """x, whole along a dim -> laid out along it."""
    n = x.shape[dim]
    if len(counts) == 1:  # only the end is filled up
        return _longer(x, dim, counts[0] * largest(n, counts))
    at = positions(n, counts, x.device).flatten()
    there = (at >= 0).view([-1 if d == dim % x.ndim else 1 for d in range(x.ndim)])
    return x.index_select(dim, at.clamp(min=0)).masked_fill(~there, 0)


def whole(x: Tensor, dim: int, n: int, counts: tuple[int, ...]) -> Tensor:
    """x, laid out along a dim of size n -> whole along it."""
    if len(counts) == 1:
        return x.narrow(dim, 0, n)
    each = largest(n, counts)
    kept = [torch.arange(i * each, i * each + size) for i, (_, size) in enumerate(parts(n, counts))]
    return x.index_select(dim, torch.cat(kept).to(x.device))


def filled(x: Tensor, dim: int, n: int, counts: tuple[int, ...]) -> Tensor:
    """One part at rest -> as equations hold it."""
    return _longer(x, dim, largest(n, counts))


def cut(x: Tensor, dim: int, n: int, counts: tuple[int, ...], part: int) -> Tensor:
    """Part number `part` as equations hold it -> at rest."""
    return x.narrow(dim, 0, parts(n, counts)[part][1])


def _longer(x: Tensor, dim: int, size: int) -> Tensor:
    """x with zeros behind it along a dim."""
    dim = dim % x.ndim
    return functional.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, size - x.shape[dim]])
