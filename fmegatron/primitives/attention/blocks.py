"""Attention in plain torch operations, over blocks of queries: the reference of the kernels, the only one that takes
every mask and form on every device, and all that is differentiable twice.

With z = scale q kᵀ, the scores are s = z, or softcap tanh(z / softcap), and masked; p = exp(s - lse). A learned sink
is in lse alone (see `sinks`), so that nothing here knows of it but by `lse`.

In half precision on CUDA the products take half operands and give float32, as the flash kernels' do: tensor cores take
nothing wider without loss. Scores and all sums are float32; probabilities and the gradients of scores are rounded to
the half dtype for their products alone. Memory bounds the rest, so that each pass over the scores counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fmegatron.primitives._function import wide
from fmegatron.primitives.attention.mask import Mask

BLOCK_ELEMENTS = 1 << 25  # of a block of scores
CPU_BLOCK_ELEMENTS = 1 << 21  # on the CPU, whose caches hold no more: 2.5 times faster than with the former
HALF_BLOCK_BYTES = 1 << 29  # of all of a block that is in memory at once: on CUDA launches bound smaller ones
ALIGNED = 8  # keys: rows of scores of 16 bytes' multiples, without which tensor cores are slow
WINDOW_ROWS = 64  # least queries a block where there is a window


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """(o, lse)"""
    if _halves(q):
        return _half_forward(q, k, v, mask, scale, softcap)
    o, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))
    kw, vw = k.to(wide(q.dtype)), v.to(wide(q.dtype))
    for rows, columns in _blocks(q, mask):
        if columns.start == columns.stop:
            o[:, rows], lse[:, rows] = 0, -torch.inf
            continue
        s = _raw(q[:, rows].to(kw.dtype), kw[:, columns], scale, softcap)
        if softcap is not None:
            s.mul_(softcap)
        _hide(s, mask.seen(rows, columns, q.device))
        top = finite(s.amax(-1, keepdim=True))
        p = s.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        lse[:, rows] = (total.log() + top).squeeze(-1).movedim(-1, 1)
        p.div_(total.clamp_(min=1))  # it is at least 1, or 0 for a query that sees no key
        o[:, rows] = torch.einsum("bngqk,bknh->bqngh", p, vw[:, columns]).to(o.dtype)
    return o, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    softcap: float | None,
    o: Tensor,
    lse: Tensor,
    go: Tensor,
    glse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gq, gk, gv)"""
    if _halves(q):
        return _half_backward(q, k, v, mask, scale, softcap, o, lse, go, glse)
    dtype = wide(q.dtype)
    gq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    kw, vw = k.to(dtype), v.to(dtype)
    gk, gv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (kw, vw))
    for rows, columns in _blocks(q, mask):
        if columns.start == columns.stop:
            continue
        qw, gow = q[:, rows].to(dtype), go[:, rows].to(dtype)
        s = t = _raw(qw, kw[:, columns], scale, softcap)
        if softcap is not None:
            s = t * softcap
        _hide(s, mask.seen(rows, columns, q.device))
        p = s.sub_(finite(lse[:, rows]).movedim(1, -1)[..., None]).exp_()
        gv[:, columns] += torch.einsum("bngqk,bqngh->bknh", p, gow)
        gs = torch.einsum("bqngh,bknh->bngqk", gow, vw[:, columns])
        gs.sub_(shift(o[:, rows], gow, None if glse is None else glse[:, rows]).movedim(1, -1)[..., None]).mul_(p)
        gz = gs.mul_(scale)
        if softcap is not None:
            gz.mul_(t.square_().neg_().add_(1))
        gq[:, rows] = torch.einsum("bngqk,bknh->bqngh", gz, kw[:, columns]).to(q.dtype)
        gk[:, columns] += torch.einsum("bngqk,bqngh->bknh", gz, qw)
    return gq, gk.to(k.dtype), gv.to(v.dtype)


def _halves(q: Tensor) -> bool:
    return q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16)


def _half_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """`forward` with products of halves."""
    o, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:-1], dtype=torch.float32)
    kh, vh = _by_head(k), _by_head(v)
    for rows, columns in _half_blocks(q, mask, softcap):
        if columns.start == columns.stop:
            o[:, rows], lse[:, rows] = 0, -torch.inf
            continue
        like = q[:, rows]
        s = _half_scores(_by_query(like), kh[:, columns], scale, softcap)
        if softcap is not None:
            s.mul_(softcap)
        _hide_within(_unfold(s, like), mask, rows, columns, -torch.inf)
        top = s.amax(-1, keepdim=True)
        p = s.softmax(-1)
        del s
        total = top - p.amax(-1, keepdim=True).log_()  # since the greatest score's is exp(top - lse)
        mean = _product(p.to(q.dtype), vh[:, columns])
        del p  # before the next block's are made
        none = top == -torch.inf  # a query that sees no key
        o[:, rows] = _unfold(mean.masked_fill_(none, 0), like).permute(0, 3, 1, 2, 4)
        lse[:, rows] = _unfold(total.masked_fill_(none, -torch.inf), like).permute(0, 3, 1, 2, 4)[..., 0]
    return o, lse


def _half_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    softcap: float | None,
    o: Tensor,
    lse: Tensor,
    go: Tensor,
    glse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` with products of halves."""
    gq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    kh, vh = _by_head(k), _by_head(v)
    gk, gv = (torch.zeros_like(t, dtype=torch.float32) for t in (kh, vh))
    for rows, columns in _half_blocks(q, mask, softcap):
        if columns.start == columns.stop:
            continue
        like = q[:, rows]
        qr, gor, kc, vc = _by_query(like), _by_query(go[:, rows]), kh[:, columns], vh[:, columns]
        less = _by_query(finite(lse[:, rows])[..., None])
        less_gs = _by_query(shift(o[:, rows], go[:, rows], None if glse is None else glse[:, rows])[..., None])
        s = t = _half_scores(qr, kc, scale, softcap)
        if softcap is None:
            s.sub_(less)
        else:
            s = torch.add(-less, t, alpha=softcap)
        p = torch.exp(s, out=torch.empty_like(s, dtype=q.dtype))
        _hide_within(_unfold(p, like), mask, rows, columns, 0)  # after exp, where an element is two bytes
        _product(p.mT, gor, out=gv[:, columns], add=True)
        gs = _product(gor, vc.mT, out=s).sub_(less_gs)
        if softcap is None:
            gz = torch.mul(gs, p, out=p)
        else:
            gz = torch.ops.aten.tanh_backward.grad_input(gs.mul_(p), t, grad_input=p)
        _product(gz.mT, qr, scale, out=gk[:, columns], add=True)
        gq[:, rows] = _unfold(_product(gz, kc, scale), like).permute(0, 3, 1, 2, 4)
        del s, t, p, gs, gz  # before the next block's are made
    gk, gv = (g.unflatten(0, (k.shape[0], k.shape[2])).transpose(1, 2) for g in (gk, gv))
    return gq, gk.to(k.dtype).contiguous(), gv.to(v.dtype).contiguous()


def _half_blocks(q: Tensor, mask: Mask, softcap: float | None) -> Iterator[tuple[slice, slice]]:
    """As `_blocks`, but of twice as many queries where they see few keys, and with keys from a multiple of ALIGNED to
    another or the end, which adds some that no query sees."""
    elements = HALF_BLOCK_BYTES // (8 if softcap is None else 10)  # the most bytes that an element of a block takes
    elements = max(1, elements // max(1, q.shape[0] * q.shape[2] * q.shape[3]))
    size = 2 * elements // max(1, mask.keys) if mask.window is None else max(WINDOW_ROWS, mask.window)
    for rows, columns in mask.blocks(max(1, size), elements):
        if columns.start < columns.stop:
            stop = min(mask.keys, -(-columns.stop // ALIGNED) * ALIGNED)
            columns = slice(columns.start // ALIGNED * ALIGNED, stop)
        yield rows, columns


def _by_head(x: Tensor) -> Tensor:
    """[batch seq kv …] -> [batch·kv seq …]"""
    return x.transpose(1, 2).flatten(0, 1)


def _by_query(x: Tensor) -> Tensor:
    """[batch q kv group head] -> [batch·kv group·q head]: a matrix for each head of the keys."""
    return x.permute(0, 2, 3, 1, 4).flatten(0, 1).flatten(1, 2)


def _unfold(x: Tensor, like: Tensor) -> Tensor:
    """[batch·kv group·q …] -> [batch kv group q …], by like[batch q kv group head]."""
    batch, queries, kv, group, _ = like.shape
    return x.view(batch, kv, group, queries, x.shape[-1])


def _half_scores(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """z, or with a soft cap tanh(z / softcap): float32[batch·kv group·q k]."""
    if softcap is None:
        return _product(q, k.mT, scale)
    return _product(q, k.mT, scale / softcap).tanh_()


def _product(a: Tensor, b: Tensor, scale: float = 1, *, out: Tensor | None = None, add: bool = False) -> Tensor:
    """scale a b, in float32, of matrices in half precision; add: to what `out` holds."""
    if out is None:
        out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=torch.float32, device=a.device)
    return torch.baddbmm(out, a, b, out_dtype=torch.float32, beta=int(add), alpha=scale, out=out)


def _hide_within(s: Tensor, mask: Mask, rows: slice, columns: slice, value: float) -> None:
    """`value`, in place, where a key is not seen: s[batch kv group q k]. By order alone, the keys that the first query
    sees are left out, since all queries see them."""
    start = columns.start
    if mask.plain:
        start = min(max(start, rows.start + mask.keys - mask.queries + 1), columns.stop)
    seen = mask.seen(rows, slice(start, columns.stop), s.device)
    if seen is not None:
        s[..., start - columns.start :].masked_fill_(~seen[:, None, None], value)


def second_order(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    softcap: float | None,
    o: Tensor,
    lse: Tensor,
    go: Tensor,
    glse: Tensor | None,
    aq: Tensor,
    ak: Tensor,
    av: Tensor,
) -> list[Tensor]:
    """Gradients of sum(aq gq + ak gk + av gv), of `backward`'s results, by (q, k, v, o, lse, go, glse).

    With t = tanh(z / softcap), d = ds/dz = 1 - t² (without softcap 1), shift = sum(go o) - glse, gs = p (go vᵀ - shift)
    and gz = gs d:  gq = scale gz k,  gk = scale gzᵀ q,  gv = pᵀ go. Functional throughout, so that torch can map it
    and differentiate it again.
    """
    dtype = wide(q.dtype)
    by_rows: list[list[Tensor]] = []
    gk: Any = 0
    gv: Any = 0
    given = (k, v, ak, av)
    for rows, columns in _blocks(q, mask):
        qr, orow, gor, aqr = (t[:, rows].to(dtype) for t in (q, o, go, aq))
        kc, vc, akc, avc = (t[:, columns].to(dtype) for t in given)
        s = z = scale * _to_scores(qr, kc)
        if softcap is not None:
            t = (z / softcap).tanh()
            s = t * softcap
        seen = mask.seen(rows, columns, q.device)
        s = s if seen is None else s.masked_fill(~seen[:, None, None], -torch.inf)
        p = (s - finite(lse[:, rows]).movedim(1, -1)[..., None]).exp()
        inner = (
            _to_scores(gor, vc) - shift(orow, gor, None if glse is None else glse[:, rows]).movedim(1, -1)[..., None]
        )
        gz = gs = p * inner
        g_gz = g_gs = scale * (_to_scores(aqr, kc) + _to_scores(qr, akc))
        if softcap is not None:
            d = 1 - t * t
            gz, g_gs = gs * d, g_gz * d
        g_inner = g_gs * p
        g_shift = -g_inner.sum(-1).movedim(-1, 1)
        g_s = g_z = (g_gs * inner + _to_scores(gor, avc)) * p
        if softcap is not None:
            g_z = g_s * d - g_gz * gz * t * (2 / softcap)
        by_rows.append(
            [
                scale * (_to_rows(g_z, kc) + _to_rows(gz, akc)),  # q
                g_shift[..., None] * gor,  # o
                -g_s.sum(-1).movedim(-1, 1),  # lse
                _to_rows(p, avc) + _to_rows(g_inner, vc) + g_shift[..., None] * orow,  # go
                -g_shift,  # glse
            ]
        )
        around = (0, 0, 0, 0, columns.start, mask.keys - columns.stop)
        gk = gk + functional.pad(scale * (_to_columns(g_z, qr) + _to_columns(gz, aqr)), around)
        gv = gv + functional.pad(_to_columns(g_inner, gor), around)
    gq, g_o, g_lse, g_go, g_glse = (torch.cat(parts, 1) for parts in zip(*by_rows, strict=True))
    return [gq.to(q.dtype), gk.to(k.dtype), gv.to(v.dtype), g_o.to(o.dtype), g_lse, g_go.to(go.dtype), g_glse]


def finite(lse: Tensor) -> Tensor:
    """With 0 for a query that sees no key, so that exp(-inf - lse) is 0."""
    return lse.masked_fill(lse == -torch.inf, 0)


def shift(o: Tensor, go: Tensor, glse: Tensor | None) -> Tensor:
    """sum(go o) - glse: what the gradient of each probability is counted from. [batch q kv group], in the wide dtype."""
    dtype = wide(o.dtype)
    total = (go.to(dtype) * o).sum(-1)
    return total if glse is None else total - glse


def _blocks(q: Tensor, mask: Mask) -> Iterator[tuple[slice, slice]]:
    elements = CPU_BLOCK_ELEMENTS if q.device.type == "cpu" else BLOCK_ELEMENTS
    elements = max(1, elements // max(1, q.shape[0] * q.shape[2] * q.shape[3]))
    if mask.window is None:
        size = max(1, elements // max(1, mask.keys))
    else:
        size = max(WINDOW_ROWS, mask.window)  # with the window's own width half of the block is seen
    return mask.blocks(size, elements)


def _raw(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """z, or with a soft cap tanh(z / softcap): [batch kv group q k]."""
    if softcap is None:
        return _to_scores(q * scale, k)
    return _to_scores(q * (scale / softcap), k).tanh_()


def _hide(s: Tensor, seen: Tensor | None) -> None:
    """-inf, in place, where a key is not seen."""
    if seen is not None:
        s.masked_fill_(~seen[:, None, None], -torch.inf)


def _to_scores(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("bqngh,bknh->bngqk", a, b)


def _to_rows(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("bngqk,bknh->bqngh", a, b)


def _to_columns(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("bngqk,bqngh->bknh", a, b)
