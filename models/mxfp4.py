"""Matrices in MXFP4 (OCP Microscaling Formats, 2023), as GPT-OSS publishes those of its experts.

A tensor is two in the file: name_blocks, uint8[… blocks 16], two elements a byte, the lower half first; and name_scales,
uint8[… blocks], the exponent that 32 elements have in common, plus 127. An element is a sign, two bits of exponent and one
of fraction (e2m1). The last dim of the values, cut into blocks, is the one that a product sums over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fmegatron.models import safetensors_files as files
from fmegatron.models.hf_names import HFTensor

BLOCK = 32  # elements with one scale
BLOCKS, SCALES = "_blocks", "_scales"
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*POSITIVE, *(-v for v in POSITIVE))


def packed(tensor: HFTensor) -> HFTensor:
    """The layout of a tensor's blocks: the values' last two dims change places."""
    *rest, inner, outer = (f"({' '.join(group)})" for group in tensor.groups)
    return replace(tensor, name=tensor.name + BLOCKS, dims=" ".join([*rest, outer, inner]))


def is_packed(name: str) -> bool:
    """Is a tensor of this name one of blocks?"""
    return name.endswith(BLOCKS)


def scales_of(name: str) -> str:
    """The name of the scales that belong to a tensor of blocks."""
    return name.removesuffix(BLOCKS) + SCALES


def shapes(name: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the two tensors in the file that hold values of a shape, `name` being that of the blocks."""
    scales = (*shape[:-1], -(-shape[-1] // BLOCK))
    return {name: (*scales, BLOCK // 2), scales_of(name): scales}


def values(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8[… blocks 16] and uint8[… blocks] -> [… 32·blocks]. Exact in every dtype with the range of the exponents."""
    table = torch.tensor(VALUES)
    pairs = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], -1)
    return torch.ldexp(pairs.flatten(-2), scales.int()[..., None] - 127).flatten(-2).to(dtype)


def part_of(
    f: Any, scales: Any, name: str, runs: Sequence[Sequence[tuple[int, int]]], dtype: torch.dtype
) -> torch.Tensor:
    """The values of a part: per dim, the ranges (start, stop) wanted, joined. f, scales: the open files of the tensor of blocks
    `name` and of its scales, of which only blocks with a wanted element are read."""
    *outer, last = runs
    touched = [(start // BLOCK, -(-stop // BLOCK)) for start, stop in last]
    codes = files.part_of(f, name, [*outer, touched, [(0, BLOCK // 2)]], torch.uint8)
    exponents = files.part_of(scales, scales_of(name), [*outer, touched], torch.uint8)
    places, before = [], 0  # of the wanted elements among those read
    for (start, stop), (first, end) in zip(last, touched, strict=True):
        places.append(torch.arange(start, stop) + BLOCK * (before - first))
        before += end - first
    wanted = torch.cat(places)
    out = torch.empty([*codes.shape[:-2], len(wanted)], dtype=dtype)
    for one, code, exponent in zip(
        out, codes, exponents, strict=True
    ):  # an expert at a time: what is read is a quarter
        one.copy_(values(code, exponent, torch.float32).index_select(-1, wanted))
    return out
