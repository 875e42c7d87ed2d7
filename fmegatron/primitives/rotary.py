"""Rotary position embedding (Su et al. 2021): pairs of features turned by an angle that grows with the position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from fmegatron.function import apply_function
from fmegatron.primitives._function import cast, graph_wanted, may_overwrite, wide


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low frequencies, names as in its config.json under `rope_scaling`.

    Wavelengths above original_max_position / low_freq_factor tokens are stretched by `factor`, those below
    original_max_position / high_freq_factor stay, those between are blended.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __call__(self, frequencies: torch.Tensor) -> torch.Tensor:
        wavelength = 2 * math.pi / frequencies
        smooth = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        smooth = smooth.clamp(0, 1)  # 0: a long wave, stretched; 1: a short one, kept
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies


def rotary_table(
    positions: torch.Tensor, dim: int, *, base: float = 10000.0, scaling: Any = None, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions[seq] or [batch seq] -> (cos, sin), each [seq dim/2] or [batch seq dim/2]: made once a step, used by
    every layer.

    `dim` is the number of features turned, `scaling` a function of the frequencies [dim/2] such as `Llama3Scaling`.
    The angles are computed in fp32 (float64 if `dtype` is that) and cast to `dtype` last, as in Hugging Face.
    """
    if dim % 2:
        raise ValueError(f"rotary_table(dim={dim}): features are turned in pairs, so dim must be even")
    exact = wide(dtype)
    power = torch.arange(0, dim, 2, dtype=torch.int64, device=positions.device).to(exact) / dim
    frequencies = 1.0 / base**power
    if scaling is not None:
        frequencies = scaling(frequencies)
    angle = positions.to(exact).unsqueeze(-1) * frequencies
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x[batch seq ... head] turned by a table of `rotary_table`; features (i, i + dim/2) are a pair, those behind dim
    pass through.

    Backward turns by the opposite angle and keeps the table alone. The result has x's dtype; with a table of higher
    precision the turn is computed in that.
    """
    for _ in range(x.ndim - 3):  # the dims between seq and head
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return apply_function(_Turn, x, cos, sin)


def rotary(
    x: torch.Tensor, positions: torch.Tensor, *, base: float = 10000.0, dim: int | None = None, scaling: Any = None
) -> torch.Tensor:
    """x[batch seq ... head] turned by its positions ([seq] or [batch seq], global): `rotary_table` and `apply_rotary`
    in one.

    `dim` (default: all of head) is how many leading features are turned.
    """
    table = rotary_table(
        positions, x.shape[-1] if dim is None else dim, base=base, scaling=scaling, dtype=wide(x.dtype)
    )
    return apply_rotary(x, *table)


class _Turn(Function):
    """(x, cos, sin) -> x turned; a linear map whose transpose is the turn back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = cos.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        y = torch.cat([b, a], -1).to(cos.dtype)
        x, cos, sin = x[..., : 2 * half].to(cos.dtype), torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        y = y.mul_(sin).addcmul_(x, cos) if may_overwrite() else y * sin + x * cos
        y = cast(y, rest.dtype)
        return y if rest.shape[-1] == 0 else torch.cat([y, rest], -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        if graph_wanted():
            return apply_function(_Turn, g, cos, -sin), None, None
        return _Turn.forward(g, cos, -sin), None, None
