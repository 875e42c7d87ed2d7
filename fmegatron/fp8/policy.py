"""Which products run in fp8, and how: the argument `Precision(fp8=Fp8(…))`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from fmegatron.errors import UserError

Recipe = Literal["tensorwise", "rowwise", "blockwise", "delayed"]
Format = Literal["e4m3", "e5m2"]
Backend = Literal["auto", "native", "emulated", "te"]
Kernels = Literal["auto", "torch", "triton"]

BLOCK = 128  # length and width of blockwise's blocks
ALIGNED = 16  # what the sizes of a product must be multiples of for the matrix units
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Fp8:
    """fp8 products of activations with weights (`sh.dot`, experts): forward, gradient by input, gradient by weight.

    recipe: what shares one scale.
        "tensorwise": all of an operand, by its own largest magnitude.
        "delayed": all of an operand, by its largest magnitude in the last `history` steps (Micikevicius et al. 2022, "FP8
            formats for deep learning"; Transformer Engine's). One pass over memory less. The magnitudes are a leaf of
            `TrainState.extras`.
        "rowwise": each row of a left operand, each column of a right one.
        "blockwise": 1 × 128 numbers of activations and gradients, 128 × 128 of weights (DeepSeek-V3's).
    gradients: format of output gradients; activations and weights are e4m3. None: e5m2, whose range is wider, where an
        operand has one scale, else e4m3 (rowwise and blockwise take no other).
    margin: powers of two that scales are lower than they might be.
    history: steps that "delayed" looks back.
    keep: products of these names, of which one * may stand for any letters, stay in the compute dtype. Embedding and loss are no products of
        `sh.dot` and always do.
    keep_first, keep_last: so many layers of `stack` at either end stay in the compute dtype too.
    unaligned: a product whose sizes are no multiples of 16 (blockwise: 128): "refuse", or "keep" it in the compute dtype.
    agree: the largest magnitude is that over all ranks which hold a part of the operand, so that no layout changes the
        result. It costs an all-reduce of one number an operand ("rowwise": of one a row, where the rows are cut; "delayed":
        one for all, once a step). If not, each rank scales its own part.
    backend: "native" (torch._scaled_mm), "emulated" (the same numbers, rounded to fp8 and multiplied in float32), "te"
        (Transformer Engine's casts); "auto": native on a GPU, emulated on CPU.
    kernels: what casts on a GPU, "triton" or "torch" operations; "auto": triton where it is installed.

    Experts' products (`experts_up`, `experts_down`) are scaled by rows and e4m3 alone, gradients too, with "tensorwise" and
    "rowwise"; with the other recipes they stay in the compute dtype (see `fmegatron.fp8.grouped`). So does the router.

    All scales are powers of two: a cast rounds once, in the fp8 format, and scaling back is exact. Numbers beyond the format's
    range become its largest ones; what is not finite stays not finite. Raises UserError for values that mean nothing.
    """

    recipe: Recipe = "tensorwise"
    gradients: Format | None = None
    margin: int = 0
    history: int = 16
    keep: tuple[str, ...] = ("embed", "head", "router")
    keep_first: int = 0
    keep_last: int = 0
    unaligned: Literal["refuse", "keep"] = "refuse"
    agree: bool = True
    backend: Backend = "auto"
    kernels: Kernels = "auto"

    def __post_init__(self) -> None:
        choices = {"recipe": Recipe, "backend": Backend, "kernels": Kernels}
        for name, kind in choices.items():
            if getattr(self, name) not in get_args(kind):
                raise UserError(f"Fp8({name}={getattr(self, name)!r}) must be one of {', '.join(get_args(kind))}")
        if self.unaligned not in ("refuse", "keep"):
            raise UserError(f"Fp8(unaligned={self.unaligned!r}) must be refuse or keep")
        if self.gradients not in (None, *FORMATS):
            raise UserError(f"Fp8(gradients={self.gradients!r}) must be e5m2, e4m3 or None")
        if self.gradients == "e5m2" and self.recipe in ("rowwise", "blockwise"):
            raise UserError(f"Fp8(recipe={self.recipe!r}, gradients='e5m2'): with several scales an operand use e4m3")
        for name, least in (("margin", 0), ("history", 1), ("keep_first", 0), ("keep_last", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(f"Fp8({name}={value!r}) must be an integer of {least} or more")
        if self.backend == "te" and self.recipe != "tensorwise":
            raise UserError(
                f"Fp8(backend='te', recipe={self.recipe!r}): its casts are tensorwise here; use backend='native'"
            )
        if self.backend == "te" and self.margin:
            raise UserError(f"Fp8(backend='te', margin={self.margin}): its casts take no margin; use backend='native'")
        object.__setattr__(self, "keep", tuple(self.keep))

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The format of output gradients."""
        several = self.recipe in ("rowwise", "blockwise")
        return FORMATS[self.gradients or ("e4m3" if several else "e5m2")]

    @property
    def scales_groups(self) -> bool:
        """Do experts' products run in fp8?"""
        return self.recipe in ("tensorwise", "rowwise")

    @property
    def multiple(self) -> int:
        """What the sizes of a product must be multiples of."""
        return BLOCK if self.recipe == "blockwise" else ALIGNED

    def keeps(self, name: str) -> bool:
        """Does the product of this name stay in the compute dtype?"""
        for pattern in self.keep:  # (by hand, so that torch.compile can follow)
            before, star, behind = pattern.partition("*")
            if name == pattern:
                return True
            if star and len(name) >= len(pattern) - 1 and name.startswith(before) and name.endswith(behind):
                return True
        return False

    def keeps_layer(self, index: int, layers: int) -> bool:
        """Do the products of this one of so many layers?"""
        return index < self.keep_first or index >= layers - self.keep_last
