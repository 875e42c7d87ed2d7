"""The arithmetic policy, as an argument."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fmegatron.errors import UserError
from fmegatron.fp8 import Fp8

_NAMES = {
    "float64": torch.float64,
    "fp64": torch.float64,
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def dtype_of(name: str | torch.dtype, *, argument: str = "dtype") -> torch.dtype:
    """ "fp32", "float32", "bf16", … -> torch dtype. Raises UserError naming the argument."""
    if isinstance(name, torch.dtype):
        return name
    if name not in _NAMES:
        raise UserError(f"{argument} {name!r} is not known: use one of {', '.join(_NAMES)}")
    return _NAMES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> "float32"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Precision:
    """Which dtype each kind of number has.

    params: parameters at rest, unless a `Param` says its own.
    compute: what equations read; None means as `params`. Parameters are cast before they are gathered.
    reduce: gradients while they are summed over ranks and microbatches; None means fp32, or as compute when that is
        wider.
    wire: gradients of parameters while they travel between ranks; None means as `reduce`, and that the network's own
        sum is used. Else each rank rounds its summands to `wire` and sends them to the ranks that own the sums, which
        add what they receive in `reduce` (Megatron-LM's reduce-scatter with fp32 accumulation): one rounding a term,
        where a sum in `wire` rounds every partial sum. A sum that all ranks need is gathered in `wire`: one rounding
        more, and the bytes of an all-reduce in `wire`. A `Param` with a dtype of its own keeps the dtype of its sum.
    master: the copy that the optimizer updates; None means `params`. A wider copy lives in the optimizer's state
        (`optim.with_master`).
    fp8: how products with weights run in fp8; None: in `compute`.

    Whatever compute is, norms' statistics, softmax and the cross-entropy are in fp32, and so is the loss. With fp16,
    most gradients are too small for the format: give `train_step` a loss scale (`needs_loss_scale`).
    """

    params: torch.dtype = torch.float32
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None
    fp8: Fp8 | None = None
    wire: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.wire is None:
            return
        if torch.promote_types(self.wire, self.reduce_dtype) != self.reduce_dtype:
            raise UserError(
                f"wire={dtype_name(self.wire)} does not fit into reduce={dtype_name(self.reduce_dtype)}, in which gradients are "
                "summed: choose a wire that is narrower, or a wider reduce"
            )
        if self.wire == torch.float16 and not self.needs_loss_scale:
            raise UserError(
                "wire=float16 is for fp16 products or sums, whose loss scale keeps gradients in its range: use bfloat16"
            )

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.compute or self.params

    @property
    def needs_loss_scale(self) -> bool:
        """Do gradients pass through fp16, in a product, at rest, or in their sums over ranks and microbatches? Without a
        loss scale most of them are zeros there, and one that overflows ends the run."""
        return torch.float16 in (self.params, self.compute_dtype, self.reduce_dtype)

    @property
    def reduce_dtype(self) -> torch.dtype:
        if self.reduce is not None:
            return self.reduce
        return torch.promote_types(self.compute_dtype, torch.float32)
