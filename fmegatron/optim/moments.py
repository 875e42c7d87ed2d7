"""Formats of an optimizer's moments: dtypes, and Adam's two moments in a byte each.

`moments=torch.float8_e4m3fn` (`--precision.moments float8`) keeps Adam's moments m and v in 2 bytes a parameter, where float32
takes 8. What is stored:

    v   the root s = √v as one of 255 numbers from 7e-12 to 1e4, five to a factor of two, or 0
    m   the ratio m / s, with a sign, as one of 127 numbers from 5e-4 to 28, eight to a factor of two (as in e4m3), or 0

So there are no scales, and no blocks that share one (Dettmers et al., "8-bit optimizers via block-wise quantization", 2021): the
root has range enough for the gradients of any model, and |m| / √v is bounded by the betas, at 1.2 with (0.9, 0.95) and 7.3 with (0.9,
0.999). Each byte stands for its own element alone, hence a state is cut, gathered, saved and loaded like the parameter on any
layout. Both are bytes (torch.uint8): neither torch's checkpoints nor its kernels know its float8 dtypes well.

Rounding goes up or down so that the mean is right: what lies a third of the way to the next number goes up in a third of the
steps. Rounded to nearest, a moment whose gradient stays away would never decay, as a step takes less off it than half of the
distance. Which steps is a matter of the number of updates alone (multiples of an irrational number are spread evenly), and so it
is the same on every layout and after a resume. Roots below and above the range become 0 and 1e4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fmegatron.capturing import numbers
from fmegatron.errors import UserError

Dtype = torch.dtype | None
Moments = Dtype | tuple[Dtype, Dtype]

FLOAT8 = torch.float8_e4m3fn  # how a caller says it; what is stored is said above
NAMES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float8": FLOAT8}


def moments_of(name: str) -> torch.dtype:
    """The dtype to ask an optimizer for, of a setting's name for it."""
    return NAMES[name]


def moments_name(dtype: torch.dtype) -> str:
    """The setting's name."""
    return next(name for name, d in NAMES.items() if d == dtype)


def moment_dtypes(name: str, moments: Moments, *, float8: bool = False) -> tuple[Dtype, Dtype]:
    """(dtype of the mean, dtype of the mean square) from one dtype or a pair. float8: may both be FLOAT8? Raises `UserError` for
    anything else."""
    pair = moments if isinstance(moments, tuple) else (moments, moments)
    if len(pair) != 2 or any(d is not None and not (isinstance(d, torch.dtype) and d.is_floating_point) for d in pair):
        raise UserError(f"{name} needs moments of a float dtype, such as torch.bfloat16, or a pair, but got {moments}")
    if float8 and pair == (FLOAT8, FLOAT8):
        return pair
    if any(d is not None and d.itemsize < 2 for d in pair):
        known = (
            f"both moments in {FLOAT8} or torch.bfloat16" if float8 else "torch.bfloat16 (adamw and adam know float8)"
        )
        raise UserError(f"{name} cannot keep moments={moments}: use {known}")
    return pair


def moment_dtype(name: str, moments: Dtype) -> Dtype:
    """The dtype of the one moment of an optimizer. Raises `UserError` for anything else."""
    if isinstance(moments, tuple):
        raise UserError(f"{name} has one moment, so moments must be one dtype, but got {moments}")
    return moment_dtypes(name, moments)[0]


# ------------------------------------------------------------------------------------------------------- moments in bytes


@dataclass(frozen=True)
class Form:
    """Floats from 2^low on in equal steps of the bits of a float32, which are nearly equal ratios; `codes` of them, and 0."""

    low: int
    step: int
    codes: int

    def encoded(self, x: Tensor, up: Any) -> Tensor:
        """x, float32 and not negative -> its number, int32. up: how much of a step is added before it is rounded down."""
        bits = x.view(torch.int32) - self.first + up
        return (torch.div(bits, self.step, rounding_mode="floor") + 1).clamp(0, self.codes)

    def decoded(self, code: Tensor) -> Tensor:
        """The way back."""
        x = ((code - 1) * self.step + self.first).view(torch.float32)
        return x.masked_fill(code == 0, 0.0)

    @property
    def first(self) -> int:
        """The bits of the smallest one."""
        return (127 + self.low) << 23

    def range(self) -> tuple[float, float]:
        """The smallest and the largest one."""
        found = self.decoded(torch.tensor([1, self.codes], dtype=torch.int32)).tolist()
        return found[0], found[1]


ROOT = Form(low=-37, step=(1 << 23) // 5, codes=255)
RATIO = Form(low=-11, step=1 << 20, codes=127)  # a byte's other bit is the sign


@dataclass(frozen=True)
class Bytes:
    """Adam's moments in bytes, for `apply`: columns "m" and "v".

    up: how much of a step each form adds before it rounds down, numbers or 0-d tensors (see `of_step`).
    """

    up: tuple[Any, Any]
    columns: ClassVar[tuple[str, str]] = ("m", "v")

    @staticmethod
    def of_step(count: Any) -> Bytes:
        """Of the update behind `count` others."""
        found = numbers(_shares, count, dtype=torch.int64)
        return Bytes((found[0], found[1]))

    def decoded(self, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes -> (m, v) in float32."""
        root, ratio = ROOT.decoded(v.int()), RATIO.decoded(m.int() & 127)
        return torch.where(m > 127, -ratio, ratio) * root, root * root

    def encoded(self, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(m, v) -> bytes. Of an element whose root is 0 both are."""
        up_root, up_ratio = (x.to(m.device, torch.int32) if isinstance(x, Tensor) else x for x in self.up)
        code = ROOT.encoded(v.float().sqrt(), up_root)
        root = ROOT.decoded(code)
        ratio = (m.float() / root).masked_fill(code == 0, 0.0)
        size = RATIO.encoded(ratio.abs(), up_ratio)
        return torch.where(ratio < 0, size + 128, size).to(torch.uint8), code.to(torch.uint8)

    def opened(self, columns: Sequence[list[Tensor]], names: Sequence[str]) -> list[list[Tensor]]:
        """Columns of leaves, moments as floats. (A kernel that reads and writes bytes would be a `one_pass` of `apply`.)"""
        m, v = (columns[names.index(n)] for n in self.columns)
        pairs = [self.decoded(*pair) for pair in zip(m, v, strict=True)]
        found = dict(zip(self.columns, map(list, zip(*pairs, strict=True)), strict=True))
        return [found.get(n, column) for n, column in zip(names, columns, strict=True)]

    def close(self, columns: Sequence[list[Tensor]], names: Sequence[str], values: Sequence[list[Tensor]]) -> None:
        """Writes moments into columns of bytes."""
        (m, v), (new_m, new_v) = ([each[names.index(n)] for n in self.columns] for each in (columns, values))
        for targets in zip(m, v, new_m, new_v, strict=True):
            for target, x in zip(targets[:2], self.encoded(*targets[2:]), strict=True):
                target.copy_(x)


def _shares(count: int) -> tuple[int, int]:
    """How much of a step is added in an update, for root and ratio: two sequences that fill [0, 1) evenly, each by itself and
    both together (Roberts, "The unreasonable effectiveness of quasirandom sequences", 2018)."""
    plastic = 1.324717957244746
    return tuple(int((count + 1) / plastic**n % 1 * form.step) for n, form in ((1, ROOT), (2, RATIO)))  # type: ignore[return-value]
