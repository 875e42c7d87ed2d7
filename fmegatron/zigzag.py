"""The zigzag order of a sequence, in which every rank has as much to do under a causal mask.

A query sees the keys before it, so of contiguous parts the last rank's would cost n times the first's. Cut into 2n
chunks instead, of which rank r of n holds chunks r and 2n - 1 - r, every rank sees the same number of keys (Zhu 2024,
ring-flash-attention; Megatron-LM's context parallelism).

The order is one permutation of the whole dim, 0, 2n-1, 1, 2n-2, …, of which each rank holds a contiguous part, so that
further axes cut a rank's part as they would any other.
"""

from __future__ import annotations

import torch
from torch import Tensor


def zigzag_positions(places: Tensor, size: int, ranks: int) -> Tensor:
    """The global positions of some places of the zigzag order of a dim of `size` over `ranks`."""
    if ranks == 1:
        return places
    chunk = size // (2 * ranks)
    number, within = places // chunk, places % chunk
    pair = number // 2
    return torch.where(number % 2 == 0, pair, 2 * ranks - 1 - pair) * chunk + within


def to_zigzag(x: Tensor, dim: int, ranks: int) -> Tensor:
    """x with a dim in global order -> in zigzag order."""
    if ranks == 1:
        return x
    chunks = x.unflatten(dim, (2, ranks, -1))
    late = chunks.select(dim, 1).flip(dim)
    return torch.stack([chunks.select(dim, 0), late], dim + 1).flatten(dim, dim + 2)


def from_zigzag(x: Tensor, dim: int, ranks: int) -> Tensor:
    """x with a dim in zigzag order -> in global order."""
    if ranks == 1:
        return x
    chunks = x.unflatten(dim, (ranks, 2, -1))
    late = chunks.select(dim + 1, 1).flip(dim)
    return torch.cat([chunks.select(dim + 1, 0), late], dim).flatten(dim, dim + 1)
