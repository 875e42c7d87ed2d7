"""Dtypes of an optimizer's moments."""

from __future__ import annotations

import torch

from fmegatron.errors import UserError

Dtype = torch.dtype | None
Moments = Dtype | tuple[Dtype, Dtype]


def moment_dtypes(name: str, moments: Moments) -> tuple[Dtype, Dtype]:
    """(dtype of the mean, dtype of the mean square) from one dtype or a pair. Raises `UserError` for anything else."""
    pair = moments if isinstance(moments, tuple) else (moments, moments)
    if len(pair) != 2 or any(d is not None and not (isinstance(d, torch.dtype) and d.is_floating_point) for d in pair):
        raise UserError(f"{name} needs moments of a float dtype, such as torch.bfloat16, or a pair, but got {moments}")
    if any(d is not None and d.itemsize < 2 for d in pair):
        raise UserError(f"{name}: moments={moments} would need scales, which it does not keep: use torch.bfloat16")
    return pair


def moment_dtype(name: str, moments: Dtype) -> Dtype:
    """The dtype of the one moment of an optimizer. Raises `UserError` for anything else."""
    if isinstance(moments, tuple):
        raise UserError(f"{name} has one moment, so moments must be one dtype, but got {moments}")
    return moment_dtypes(name, moments)[0]
