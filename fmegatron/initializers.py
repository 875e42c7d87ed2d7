"""Initial values of parameters: `init(key, shape, index=…, dtype=…, device=…)` gives the part held of a tensor of
global `shape`.

The value at a global position depends on the key and the position alone (see `fmegatron.random`), never on the mesh. A
user's own initializer is any function with this signature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmegatron import random
from fmegatron.errors import UserError


@dataclass(frozen=True)
class Normal:
    """Normal with mean 0 and this standard deviation."""

    std: float

    def __call__(self, key, shape, *, index=None, dtype=torch.float32, device=None) -> Tensor:
        return random.normal(key, shape, std=self.std, index=index, dtype=dtype, device=device)


@dataclass(frozen=True)
class TruncatedNormal:
    """`std` times a normal value that lies within `bound` deviations (its own is then a little below `std`)."""

    std: float
    bound: float = 3.0

    def __call__(self, key, shape, *, index=None, dtype=torch.float32, device=None) -> Tensor:
        return random.truncated_normal(
            key, shape, lower=-self.bound, upper=self.bound, std=self.std, index=index, dtype=dtype, device=device
        )


@dataclass(frozen=True)
class Uniform:
    """Uniform in [low, high)."""

    low: float
    high: float

    def __call__(self, key, shape, *, index=None, dtype=torch.float32, device=None) -> Tensor:
        return random.uniform(key, shape, low=self.low, high=self.high, index=index, dtype=dtype, device=device)


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float

    def __call__(self, key, shape, *, index=None, dtype=torch.float32, device=None) -> Tensor:
        return _full(self.value, shape, index, dtype, device)


@dataclass(frozen=True)
class Zeros:
    """0 everywhere."""

    def __call__(self, key, shape, *, index=None, dtype=torch.float32, device=None) -> Tensor:
        return _full(0.0, shape, index, dtype, device)


@dataclass(frozen=True)
class Ones:
    """1 everywhere."""

    def __call__(self, key, shape, *, index=None, dtype=torch.float32, device=None) -> Tensor:
        return _full(1.0, shape, index, dtype, device)


def normal(std: float = 0.02) -> Normal:
    return Normal(std)


def scaled(std: float, fan: int) -> Normal:
    """Normal with deviation std / sqrt(fan).

    scaled(1, inputs) is the classic fan-in rule (LeCun et al., 1998); scaled(0.02, 2 * layers) is GPT-2's for the
    matrices that write to the residual stream. Raises `UserError` unless fan >= 1.
    """
    if fan < 1:
        raise UserError(f"scaled needs a fan of at least 1, but got fan={fan}")
    return Normal(std / math.sqrt(fan))


def truncated_normal(std: float = 0.02, bound: float = 3.0) -> TruncatedNormal:
    return TruncatedNormal(std, bound)


def uniform(low: float, high: float) -> Uniform:
    return Uniform(low, high)


def constant(value: float) -> Constant:
    return Constant(value)


def zeros() -> Zeros:
    return Zeros()


def ones() -> Ones:
    return Ones()


def _full(value: float, shape: Sequence[int], index: random.Index, dtype: torch.dtype, device: Any) -> Tensor:
    if index is None or all(held is None for held in index):
        return torch.full(tuple(shape), value, dtype=dtype, device=device)
    # of the shape of the positions: a simulated tensor has no single size
    return torch.full_like(random.linear_index(shape, index, device), value, dtype=dtype)
