"""Stochastic rounding of what an update writes in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fmegatron import random
from fmegatron.errors import UserError
from fmegatron.optim.core import Optimizer
from fmegatron.optim.leaves import positions_of
from fmegatron.random import DRAW, MASK, Key, _linear_range, _strides, bits, fold_in, philox

LOW = 16  # bits that float32 has more than bfloat16
CHUNK = 1 << 22  # elements whose random bits are drawn at once


@dataclass(frozen=True)
class Rounding:
    """How one update rounds to bfloat16: up or down by chance, so that the mean is the value.

    The random bits of an element depend on the key, the leaf's name and the element's global position: any layout
    rounds alike.
    """

    key: Key
    _held: dict[str, Any] = field(default_factory=dict, repr=False)

    def applies(self, x: Tensor) -> bool:
        """Only bfloat16 is rounded by chance; other dtypes are rounded to nearest."""
        return x.dtype == torch.bfloat16

    def store(self, target: Tensor, value: Tensor, leaf: Tensor, name: str, start: int = 0) -> None:
        """target <- value rounded. Both are the local shard of `leaf`, or flat pieces of it from element `start` on."""
        if target.ndim == leaf.ndim and not start:
            target.copy_(self.rounded(value, leaf, name))
            return
        key, index = self._of(leaf, name)
        sizes = [n if at is None else len(at) for n, at in zip(leaf.shape, index, strict=True)]
        for at in range(0, target.numel(), CHUNK):
            part, values = target[at : at + CHUNK], value[at : at + CHUNK]
            stop = start + at + part.numel()
            linear = _linear_range(start + at, stop, sizes, _strides(leaf.shape), index, part.device)
            part.copy_(stochastic(values, _bits(key, linear, leaf.numel())))

    def rounded(self, value: Tensor, leaf: Tensor, name: str) -> Tensor:
        """The whole local shard of `leaf`, rounded."""
        key, index = self._of(leaf, name)
        return stochastic(value, bits(key, leaf.shape, index=index, device=value.device))

    def _of(self, leaf: Tensor, name: str) -> tuple[Key, list[Tensor | None]]:
        if name not in self._held:
            self._held[name] = fold_in(self.key, name), positions_of(leaf)
        return self._held[name]


def _bits(key: Key, linear: Tensor, total: int) -> Tensor:
    """`random.bits` of the elements at these global positions of a tensor of `total` elements."""
    words = key.words
    pair = (words.select(-1, 0), words.select(-1, 1)) if isinstance(words, Tensor) else words
    high: Any = linear >> 32 if total > 2**32 else 0
    return philox((linear & MASK, high, DRAW, 0), pair)[0]


def stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """x in bfloat16: one of its two neighbours, the nearer one more often, so that the mean is x.

    bits: uniform int64 in [0, 2^32), of x's shape. x is taken in float32, and added 16 random bits below the last that
    bfloat16 keeps. A value of bfloat16 stays, and so does one that is not finite.
    """
    x = x.to(torch.float32)
    carried = (x.view(torch.int32) + (bits >> (32 - LOW)).to(torch.int32)) & -(1 << LOW)
    return torch.where(torch.isfinite(x), carried.view(torch.float32), x).to(torch.bfloat16)


def with_stochastic_rounding(optimizer: Optimizer, seed: int | Key) -> Optimizer:
    """Rounds parameters and moments in bfloat16 by chance, in place of master copies: updates far below half a unit in
    the last place are right on average, not lost (Gupta et al., "Deep learning with limited numerical precision", 2015).

    Updates are computed in float32 as always. The random bits come from the seed (or key), the number of updates made,
    the leaf's name and the global position, so any layout and any resumed run rounds alike. State: that of `optimizer`,
    and "rounded", the number of updates. Raises `UserError` where no piece of `optimizer` writes parameters that it
    could round, as a user's own piece.
    """
    root = random.key(seed) if isinstance(seed, int) else seed
    if not optimizer.rounds:
        raise UserError(
            f"with_stochastic_rounding cannot reach into optimizer {optimizer.name or 'without a name'!r}: "
            "give it adamw, adam, sgd, lion, adafactor, muon, or a chain or partition of them (not with_master)"
        )

    def init(params: Any) -> dict[str, Any]:
        return {**optimizer.init(params), "rounded": 0}

    def update(params: Any, grads: Any, state: Any, *, donate: bool = False, grad_norm: Any = None) -> Any:
        inner = {k: v for k, v in state.items() if k != "rounded"}
        rounding = Rounding(fold_in(root, state["rounded"]))
        params, grads, inner = optimizer.update(
            params, grads, inner, donate=donate, grad_norm=grad_norm, rounding=rounding
        )
        return params, grads, {**inner, "rounded": state["rounded"] + 1}

    return Optimizer(init, update, optimizer.name, optimizer.rate)
