"""One pass of Adam over many leaves: gradients scaled, moments, parameters, and their copies in a narrower dtype.

A launch takes all leaves of one kind, whatever their number: a table on the device has their addresses, and a program
finds there the leaf that its block of elements belongs to. So each tensor is read once and written once, in the dtype
in which it lies, and the mathematics between is in fp32, as in torch's fused kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements of a program
COLUMNS = 6  # of the table: addresses of parameter, gradient, mean, mean square, copy; number of elements
TYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}


@triton.jit
def _rounded(x, seed, at, BY_CHANCE: tl.constexpr):
    """fp32 -> bfloat16 by chance: `optim.rounding.stochastic` with the bits of `random.bits` at these positions."""
    if BY_CHANCE:
        nothing = (at * 0).to(tl.uint32)
        low, high = (at & 0xFFFFFFFF).to(tl.uint32), (at >> 32).to(tl.uint32)
        drawn, _, _, _ = tl.philox(seed, low, high, nothing, nothing)
        bits = x.to(tl.int32, bitcast=True)
        carried = (bits + (drawn >> 16).to(tl.int32)) & -65536
        finite = (bits & 0x7F800000) != 0x7F800000
        return tl.where(finite, carried, bits).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def _block(
    p_at,
    g_at,
    m_at,
    v_at,
    copy_at,
    seeds,
    at,
    n,
    scale,
    keep,
    size,
    root,
    decay,
    beta1,
    beta2,
    eps,
    DECOUPLED: tl.constexpr,
    COPIED: tl.constexpr,
    BY_CHANCE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One block of one leaf. WHOLE: none of it lies behind the leaf's end, so that loads need no mask and are wide."""
    if WHOLE:
        p = tl.load(p_at + at).to(tl.float32)
        g = tl.load(g_at + at).to(tl.float32)
        m = tl.load(m_at + at).to(tl.float32)
        v = tl.load(v_at + at).to(tl.float32)
    else:
        inside = at < n
        p = tl.load(p_at + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_at + at, mask=inside, other=0.0).to(tl.float32)
        m = tl.load(m_at + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_at + at, mask=inside, other=0.0).to(tl.float32)
    g = g * scale
    if DECOUPLED:
        p = p * keep
    else:
        g = g + decay * p
    m = m + (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    p = p - size * m / (tl.sqrt_rn(v) * root + eps)
    p = _rounded(p, tl.load(seeds) if BY_CHANCE % 2 else 0, at, BY_CHANCE % 2)
    m = _rounded(m, tl.load(seeds + 1) if BY_CHANCE // 2 % 2 else 0, at, BY_CHANCE // 2 % 2)
    v = _rounded(v, tl.load(seeds + 2) if BY_CHANCE // 4 else 0, at, BY_CHANCE // 4)
    if WHOLE:
        tl.store(p_at + at, p.to(p_at.dtype.element_ty))
        tl.store(m_at + at, m.to(m_at.dtype.element_ty))
        tl.store(v_at + at, v.to(v_at.dtype.element_ty))
        if COPIED:
            tl.store(copy_at + at, p.to(copy_at.dtype.element_ty))
    else:
        inside = at < n
        tl.store(p_at + at, p.to(p_at.dtype.element_ty), mask=inside)
        tl.store(m_at + at, m.to(m_at.dtype.element_ty), mask=inside)
        tl.store(v_at + at, v.to(v_at.dtype.element_ty), mask=inside)
        if COPIED:
            tl.store(copy_at + at, p.to(copy_at.dtype.element_ty), mask=inside)


@triton.jit
def _adam(
    table,
    places,
    scale,
    numbers,
    seeds,
    keep,
    size,
    root,
    decay,
    beta1,
    beta2,
    eps,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    COPY: tl.constexpr,
    SCALED: tl.constexpr,
    IN_MEMORY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    COPIED: tl.constexpr,
    BY_CHANCE: tl.constexpr,
    RUN: tl.constexpr,
    ROW: tl.constexpr,
    SIZE: tl.constexpr,
):
    place = tl.load(places + tl.program_id(0))  # leaf << 32 | block of the leaf
    leaf, block = place >> 32, place & 0xFFFFFFFF
    row = table + leaf * ROW
    # Told how far addresses are multiples, the compiler gives a thread 4 elements in a row of every tensor, or 8 where
    # all are narrow; with 4 of one and 8 of another, values would go from thread to thread in between.
    p_at = tl.multiple_of(tl.load(row).to(tl.pointer_type(P)), RUN * P.primitive_bitwidth // 8)
    g_at = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(G)), RUN * G.primitive_bitwidth // 8)
    m_at = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(M)), RUN * M.primitive_bitwidth // 8)
    v_at = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(V)), RUN * V.primitive_bitwidth // 8)
    copy_at = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(COPY)), RUN * COPY.primitive_bitwidth // 8)
    n = tl.load(row + 5)
    factor = tl.load(scale).to(tl.float32) if SCALED else 1.0
    if IN_MEMORY:
        keep = tl.load(numbers).to(tl.float32)
        size = tl.load(numbers + 1).to(tl.float32)
        root = tl.load(numbers + 2).to(tl.float32)
    start = block * SIZE
    at = start + tl.arange(0, SIZE)
    own = seeds + leaf * 3
    if start + SIZE <= n:
        _block(
            p_at, g_at, m_at, v_at, copy_at, own, at, n, factor, keep, size, root, decay, beta1, beta2, eps,
            DECOUPLED, COPIED, BY_CHANCE, True,
        )  # fmt: skip
    else:
        _block(
            p_at, g_at, m_at, v_at, copy_at, own, at, n, factor, keep, size, root, decay, beta1, beta2, eps,
            DECOUPLED, COPIED, BY_CHANCE, False,
        )  # fmt: skip


def adam(
    table: Tensor,
    places: Tensor,
    types: tuple[str, str, str, str, str | None],
    numbers: Tensor | tuple[float, float, float],
    *,
    scale: Tensor | None,
    seeds: Tensor | None,
    by_chance: tuple[bool, bool, bool],
    decay: float,
    betas: tuple[float, float],
    eps: float,
    decoupled: bool,
) -> None:
    """Overwrites parameters, means, mean squares and copies of all leaves in a table.

    table: int64[leaves, COLUMNS]. places: int64[programs], leaf << 32 | block. types: dtypes of parameters, gradients,
    means, mean squares and copies (None: no copies). numbers: (1 - rate * decay, rate / (1 - beta1^t), 1 / sqrt(1 -
    beta2^t)), or float64[3] that holds them. scale: 0-d, what gradients are multiplied by. seeds: int64[leaves, 3] for
    rounding by chance of parameters, means and mean squares; by_chance: of which of them. decay: what is added to the
    gradient, unless decoupled.
    """
    in_memory = isinstance(numbers, Tensor)
    keep, size, root = (1.0, 1.0, 1.0) if in_memory else numbers
    p, g, m, v, copy = types
    _adam[(len(places),)](
        table,
        places,
        table if scale is None else scale,
        numbers if in_memory else table,
        table if seeds is None else seeds,
        keep,
        size,
        root,
        decay,
        betas[0],
        betas[1],
        eps,
        P=TYPES[p],
        G=TYPES[g],
        M=TYPES[m],
        V=TYPES[v],
        COPY=TYPES[copy or p],
        SCALED=scale is not None,
        IN_MEMORY=in_memory,
        DECOUPLED=decoupled,
        COPIED=copy is not None,
        BY_CHANCE=sum(by << i for i, by in enumerate(by_chance)),
        RUN=4 if "float32" in types else 8,
        ROW=COLUMNS,
        SIZE=BLOCK,
        num_warps=8,
    )
