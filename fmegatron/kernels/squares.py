"""The sum of squares of many tensors, each read once: a launch takes all of one dtype, found by a table of addresses as in
`adam`. (On an H200 two norms of 1.2 billion bfloat16 elements take 1.1 ms so, and 2.1 by torch's multi-tensor norm, which cuts them
into 58 launches each.)"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1 << 15  # elements of a program
TILE = 4096  # of them at a time
TYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}


@triton.jit
def _squares(table, places, out, X: tl.constexpr, RUN: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr):
    program = tl.program_id(0)
    place = tl.load(places + program)  # tensor << 32 | block of it
    row = table + (place >> 32) * 2
    x = tl.multiple_of(tl.load(row).to(tl.pointer_type(X)), RUN * X.primitive_bitwidth // 8)
    n = tl.load(row + 1)
    begin = (place & 0xFFFFFFFF) * SIZE
    total = tl.zeros([STEP], tl.float32)
    if begin + SIZE <= n:  # all of it: loads need no mask, and are wide
        for start in range(0, SIZE, STEP):
            found = tl.load(x + begin + start + tl.arange(0, STEP)).to(tl.float32)
            total += found * found
    else:
        for start in range(0, SIZE, STEP):
            at = begin + start + tl.arange(0, STEP)
            found = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
            total += found * found
    tl.store(out + program, tl.sum(total))


def squares(table: Tensor, places: Tensor, kind: str) -> Tensor:
    """The sum, 0-d fp32. table: int64[tensors, 2], address and number of elements. places: int64[programs], tensor << 32 |
    block. kind: the tensors' dtype. They begin at multiples of 16 bytes."""
    out = torch.empty(len(places), dtype=torch.float32, device=table.device)
    run = 16 // TYPES[kind].primitive_bitwidth * 8
    _squares[(len(places),)](table, places, out, X=TYPES[kind], RUN=run, SIZE=BLOCK, STEP=TILE, num_warps=8)
    return out.sum()
