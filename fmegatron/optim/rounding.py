"""Stochastic rounding of what an update writes in bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fmegatron import random
from fmegatron.capturing import numbers
from fmegatron.errors import UserError
from fmegatron.function import apply_function, under_torch_func
from fmegatron.optim.core import Optimizer
from fmegatron.optim.leaves import positions_of
from fmegatron.random import DRAW, MASK, Key, bits, fold_in, linear_range, philox, strides_of
from fmegatron.simulation import is_local

LOW = 16  # bits that float32 has more than bfloat16
CHUNK = 1 << 22  # elements whose random bits are drawn at once, where each takes some temporaries
COMPILED_CHUNK = 1 << 24


@dataclass(frozen=True)
class Rounding:
    """How one update rounds to bfloat16: up or down by chance, so that the mean is the value.

    The random bits of an element depend on the key, the leaf's name and the element's global position: any layout
    rounds alike. compile: one compiled kernel on a GPU in place of some hundred calls; the values are the same.
    counted: (root, count), where the key is that of a count of updates under a root.
    """

    key: Key
    compile: bool = False
    counted: tuple[Key, Any] | None = None
    _held: dict[str, Any] = field(default_factory=dict, repr=False)

    def applies(self, x: Tensor) -> bool:
        """Only bfloat16 is rounded by chance; other dtypes are rounded to nearest."""
        return x.dtype == torch.bfloat16

    def store(self, target: Tensor, value: Tensor, leaf: Tensor, name: str, start: int = 0) -> None:
        """target <- value rounded. Both are the local shard of `leaf`, or flat pieces of it from element `start` on."""
        if is_local(target) or not target.is_contiguous():
            target.copy_(self.rounded(value, leaf, name))  # (only whole shards are simulated, or strided)
            return
        key, index = self._of(leaf, name)
        sizes, strides, held = _merged(leaf.shape, index)
        target, value = target.view(-1), value.reshape(-1)
        compiled = self.compile and target.is_cuda
        if compiled:
            key = random.to_tensor(key, target.device)
        kernel, chunk = (_compiled(), COMPILED_CHUNK) if compiled else (_at_positions, CHUNK)
        for at in range(0, target.numel(), chunk):
            part, values = target[at : at + chunk], value[at : at + chunk]
            stop = start + at + part.numel()
            linear = linear_range(start + at, stop, sizes, strides, held, part.device)
            part.copy_(kernel(values, linear, key.words))

    def rounded(self, value: Tensor, leaf: Tensor, name: str) -> Tensor:
        """The whole local shard of `leaf`, rounded."""
        key, index = self._of(leaf, name)
        return stochastic(value, bits(key, leaf.shape, index=index, device=value.device))

    def seeds(self, names: Sequence[str]) -> Any:
        """The keys of leaves by their names, each as one int64; a tensor in a recorded step (`capturing`)."""
        assert self.counted is not None
        root, count = self.counted

        def of(n: int) -> list[int]:
            key = fold_in(root, n)
            return [_signed(fold_in(key, name)) for name in names]

        return numbers(of, count, dtype=torch.int64)

    def _of(self, leaf: Tensor, name: str) -> tuple[Key, list[Tensor | None]]:
        if name not in self._held:
            self._held[name] = fold_in(self.key, name), positions_of(leaf)
        return self._held[name]


def _signed(key: Key) -> int:
    """The 64 bits of a key as int64."""
    low, high = key.words
    return (high - (1 << 32) if high >= 1 << 31 else high) << 32 | low


def _merged(shape: Sequence[int], index: Sequence[Tensor | None]) -> tuple[list[int], list[int], list[Tensor | None]]:
    """(local sizes, global strides, positions held) with neighbouring whole dims as one."""
    sizes: list[int] = []
    strides: list[int] = []
    held: list[Tensor | None] = []
    for n, stride, at in zip(shape, strides_of(shape), index, strict=True):
        if held and at is None and held[-1] is None:
            sizes[-1], strides[-1] = sizes[-1] * n, stride
        else:
            sizes, strides, held = [*sizes, n if at is None else len(at)], [*strides, stride], [*held, at]
    return sizes, strides, held


def _at_positions(x: Tensor, linear: Tensor, words: Any) -> Tensor:
    """x rounded, its elements being at these positions of their leaf: the bits are those of `random.bits`."""
    key = (words[0], words[1])
    return stochastic(x, philox((linear & MASK, linear >> 32, DRAW, 0), key)[0])


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_at_positions, dynamic=True)


def stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """x in bfloat16: one of its two neighbours, the nearer one more often, so that the mean is x.

    bits: uniform int64 in [0, 2^32), of x's shape. x is taken in float32, and added 16 random bits below the last that
    bfloat16 keeps. A value of bfloat16 stays, and so does one that is not finite. It has no derivative.
    """
    return apply_function(_Stochastic, x, bits) if under_torch_func() else _stochastic(x, bits)


def _stochastic(x: Tensor, bits: Tensor) -> Tensor:
    x = x.to(torch.float32)
    carried = (x.view(torch.int32) + (bits >> (32 - LOW)).to(torch.int32)) & -(1 << LOW)
    return torch.where(torch.isfinite(x), carried.view(torch.float32), x).to(torch.bfloat16)


class _Stochastic(torch.autograd.Function):
    """For torch.func, which cannot batch the view of a float as an integer (torch 2.11)."""

    @staticmethod
    def forward(x: Tensor, bits: Tensor) -> Tensor:
        return _stochastic(x, bits)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, bits: Tensor) -> Any:
        x, bits = (t if d is None else t.movedim(d, 0) for t, d in zip((x, bits), in_dims, strict=True))
        return apply_function(_Stochastic, *torch.broadcast_tensors(x, bits)), 0


def with_stochastic_rounding(optimizer: Optimizer, seed: int | Key, *, compile: bool = True) -> Optimizer:
    """Rounds parameters and moments in bfloat16 by chance, in place of master copies: updates far below half a unit in
    the last place are right on average, not lost (Gupta et al., "Deep learning with limited numerical precision", 2015).

    Updates are computed in float32 as always. The random bits come from the seed (or key), the number of updates made,
    the leaf's name and the global position, so any layout and any resumed run rounds alike. compile: on a GPU draw the
    bits by a compiled kernel, which takes seconds once and makes an update some 15 times faster, bitwise the same. State: that of `optimizer`,
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

    def update(params: Any, grads: Any, state: Any, **options: Any) -> Any:
        inner = {k: v for k, v in state.items() if k != "rounded"}
        count = state["rounded"]
        counted = None if isinstance(root.words, Tensor) else (root, count)
        rounding = Rounding(fold_in(root, count), compile, counted)
        params, grads, inner = optimizer.update(params, grads, inner, rounding=rounding, **options)
        return params, grads, {**inner, "rounded": count + 1}

    return Optimizer(init, update, optimizer.name, optimizer.rate, casts=optimizer.casts)
