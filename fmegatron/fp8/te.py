"""Casts by Transformer Engine (2.x), where it is installed: `Fp8(backend="te")`. Its cast kernels, torch's product."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from fmegatron.errors import UserError
from fmegatron.fp8.cast import Cut, Operand
from fmegatron.mesh import Mesh


def check() -> None:
    """Raises UserError where Transformer Engine cannot run."""
    if torch.compiler.is_compiling():
        raise UserError("Fp8(backend='te') cannot be compiled: use backend='native', or leave compile out")
    if not installed():
        raise UserError(
            "Fp8(backend='te') needs Transformer Engine: pip install --no-build-isolation transformer-engine[pytorch], or use "
            "backend='native'"
        )


@functools.cache
def installed() -> bool:
    """Is Transformer Engine for torch there?"""
    return importlib.util.find_spec("transformer_engine_torch") is not None


def cast(
    x: Tensor, dtype: torch.dtype, *, columns: bool, rows: bool, cut: Cut
) -> tuple[Operand | None, Operand | None]:
    """As `cast.cast` with one scale, by Transformer Engine's kernels: largest magnitude, then both casts in one pass."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine_torch import DType

    axes = () if cut.mesh is None else cut.mesh.live((*cut.rows, *cut.columns))
    cast_by = Float8CurrentScalingQuantizer(
        DType.kFloat8E5M2 if dtype == torch.float8_e5m2 else DType.kFloat8E4M3,
        x.device,
        rowwise=columns,
        columnwise=rows,
        with_amax_reduction=bool(axes),
        amax_reduction_group=_group(cut.mesh, axes) if cut.mesh is not None and axes else None,
        force_pow_2_scales=True,
    )
    made = cast_by(x.contiguous())
    scale = made._scale_inv.reshape(())
    pair = [
        Operand(data.view(dtype), scale) if wanted else None
        for data, wanted in ((made._data, columns), (made._transpose, rows))
    ]
    return pair[0], pair[1]


def _group(mesh: Mesh, axes: tuple[str, ...]) -> Any:
    """The process group of some axes."""
    found = mesh.group(axes)
    return found[0].get_group(found[1]) if isinstance(found, tuple) else found
