"""activation(gate) * up in one pass, and its gradients in another.

gate and up may be the halves of one product, rows of which lie further apart than they are long; their gradients are
then written side by side too. Or they take turns in its rows, which are then read and written as they lie.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * x))


@triton.jit
def _value_and_slope(x, KIND: tl.constexpr):
    """(activation, its derivative) at x, in fp32."""
    if KIND == 0:
        s = _sigmoid(x)
        y = x * s
        return y, s + y * (1.0 - s)
    elif KIND == 1:
        below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        return x * below, below + x * 0.3989422804014327 * tl.exp2(-0.7213475204444817 * x * x)
    else:
        square = x * x
        inner = 1.5957691216057308 * x * (1.0 + 0.044715 * square)  # of which tanh(half) is taken
        s = _sigmoid(inner)  # (1 + tanh(inner / 2)) / 2
        return x * s, s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * square)


@triton.jit
def _gated_forward(gate, up, out, columns, gate_row, up_row, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + at, mask=inside, other=0.0).to(tl.float32)
    y, _ = _value_and_slope(x, KIND)
    tl.store(out + row * columns + at, (y * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward(
    g,
    gate,
    up,
    g_gate,
    g_up,
    again,
    columns,
    g_row,
    gate_row,
    up_row,
    grad_row,
    KIND: tl.constexpr,
    AGAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(g + row * g_row + at, mask=inside, other=0.0).to(tl.float32)
    y, slope = _value_and_slope(x, KIND)
    tl.store(g_gate + row * grad_row + at, (d * u * slope).to(g_gate.dtype.element_ty), mask=inside)
    tl.store(g_up + row * grad_row + at, (d * y).to(g_up.dtype.element_ty), mask=inside)
    if AGAIN:
        tl.store(again + row * columns + at, (y * u).to(again.dtype.element_ty), mask=inside)


@triton.jit
def _read_turns(row, first, columns, BLOCK: tl.constexpr):
    """(gate, up) in columns `first` … of a row in which they take turns, in fp32: one contiguous read."""
    at = 2 * first + tl.arange(0, 2 * BLOCK)
    both = tl.load(row + at, mask=at < 2 * columns, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(both, [BLOCK, 2]))


@triton.jit
def _turns_forward(both, out, columns, both_row, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    x, u = _read_turns(both + row * both_row, first, columns, BLOCK)
    y, _ = _value_and_slope(x, KIND)
    tl.store(out + row * columns + at, (y * u).to(out.dtype.element_ty), mask=at < columns)


@triton.jit
def _turns_backward(g, both, g_both, columns, g_row, both_row, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    x, u = _read_turns(both + row * both_row, first, columns, BLOCK)
    d = tl.load(g + row * g_row + at, mask=at < columns, other=0.0).to(tl.float32)
    y, slope = _value_and_slope(x, KIND)
    at = 2 * first + tl.arange(0, 2 * BLOCK)
    found = tl.interleave(d * u * slope, d * y).to(g_both.dtype.element_ty)
    tl.store(g_both + row * (2 * columns) + at, found, mask=at < 2 * columns)


def rows_of(x: Tensor) -> Tensor:
    """x as [rows, columns], a view where its rows are evenly spaced."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-1])


def _grid(rows: int, columns: int) -> tuple[tuple[int, int], int, int]:
    """(programs, block, warps) of so many rows: evenly spaced rows without a gap are one."""
    block = min(4096, max(128, triton.next_power_of_2(columns)))
    return (rows, triton.cdiv(columns, block)), block, max(1, block // 512)


def forward(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """activation(gate) * up, a new tensor of their shape."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    x, u = rows_of(gate), rows_of(up)
    grid, block, warps = _grid(*x.shape)
    _gated_forward[grid](
        x, u, out, x.shape[1], x.stride(0), u.stride(0), KIND=KINDS[kind], BLOCK=block, num_warps=warps
    )
    return out


def backward(g: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(gradient of gate, of up), new tensors."""
    g_gate, g_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    _write(g, gate, up, kind, g_gate, g_up, None)
    return g_gate, g_up


def forward_pair(both: Tensor, dim: int, kind: str) -> Tensor:
    """activation(gate) * up of both[... 2 columns] (dim=-2: halves) or [... columns 2] (dim=-1: turns), a new tensor."""
    if dim == -2:
        gate, up = both.unbind(-2)
        return forward(gate, up, kind)
    out = torch.empty(both.shape[:-1], dtype=both.dtype, device=both.device)
    if out.numel() == 0:
        return out
    rows, columns = rows_of(both.flatten(-2)), out.shape[-1]
    grid, block, warps = _grid(rows.shape[0], columns)
    _turns_forward[grid](rows, out, columns, rows.stride(0), KIND=KINDS[kind], BLOCK=block, num_warps=warps)
    return out


def backward_pair(g: Tensor, both: Tensor, dim: int, kind: str) -> Tensor:
    """The gradient of both, a new tensor like it."""
    found = torch.empty(both.shape, dtype=both.dtype, device=both.device)
    if dim == -2:
        (gate, up), (g_gate, g_up) = both.unbind(-2), found.unbind(-2)
        _write(g, gate, up, kind, g_gate, g_up, None)
    elif g.numel():
        d, rows, columns = rows_of(g), rows_of(both.flatten(-2)), g.shape[-1]
        grid, block, warps = _grid(*d.shape)
        strides = d.stride(0), rows.stride(0)
        _turns_backward[grid](d, rows, found, columns, *strides, KIND=KINDS[kind], BLOCK=block, num_warps=warps)
    return found


def backward_again(g: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of gate, of up, activation(gate) * up once more), new tensors."""
    g_gate, g_up, again = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(3))
    _write(g, gate, up, kind, g_gate, g_up, again)
    return g_gate, g_up, again


def _write(g: Tensor, gate: Tensor, up: Tensor, kind: str, g_gate: Tensor, g_up: Tensor, again: Tensor | None) -> None:
    if g.numel() == 0:
        return
    d, x, u = rows_of(g), rows_of(gate), rows_of(up)
    grid, block, warps = _grid(*x.shape)
    _gated_backward[grid](
        d,
        x,
        u,
        g_gate,
        g_up,
        g_gate if again is None else again,
        x.shape[1],
        d.stride(0),
        x.stride(0),
        u.stride(0),
        rows_of(g_gate).stride(0),
        KIND=KINDS[kind],
        AGAIN=again is not None,
        BLOCK=block,
        num_warps=warps,
    )
