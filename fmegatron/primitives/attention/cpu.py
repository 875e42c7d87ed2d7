"""Attention by torch's flash kernel for CPUs.

It takes grouped heads, float64, and a mask that is added; its causal mask starts at the first key. Every other mask is
added to the scores of blocks of queries, each with the keys that it can see.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fmegatron.primitives._function import wide
from fmegatron.primitives.attention.blocks import finite
from fmegatron.primitives.attention.mask import Mask

CPU_BLOCK = 256  # queries a call when there is a mask

# By name, an operator that torch has no function for is looked up anew for every call.
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """(o, lse)"""
    heads, kt, vt = q.shape[2:4], k.transpose(1, 2), v.transpose(1, 2)
    qt = q.flatten(2, 3).transpose(1, 2)
    if _whole(mask):
        o, lse = torch._scaled_dot_product_flash_attention_for_cpu(qt, kt, vt, 0.0, mask.causal, scale=scale)
        return o.transpose(1, 2).reshape(q.shape), lse.transpose(1, 2).reshape(q.shape[:-1])
    parts = []
    for rows, columns, causal, added, some in _calls(q, mask):
        if columns.start == columns.stop:
            o = q.new_zeros(q[:, rows].shape)
            parts.append((o, o.new_full(o.shape[:-1], -torch.inf, dtype=wide(q.dtype))))
            continue
        o, lse = torch._scaled_dot_product_flash_attention_for_cpu(
            _part(qt, rows), _part(kt, columns), _part(vt, columns), 0.0, causal, attn_mask=added, scale=scale
        )
        o, lse = o.transpose(1, 2).unflatten(2, heads), lse.transpose(1, 2).unflatten(2, heads)
        parts.append((o, lse if some is None else lse.masked_fill(~some, -torch.inf)))
    if len(parts) == 1:
        return parts[0][0].contiguous(), parts[0][1].contiguous()
    return torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def backward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, o: Tensor, lse: Tensor, go: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(gq, gk, gv)"""
    heads, kt, vt = q.shape[2:4], k.transpose(1, 2), v.transpose(1, 2)
    qt, ot, gt = (t.flatten(2, 3).transpose(1, 2) for t in (q, o, go))
    lt = lse.flatten(2, 3).transpose(1, 2)
    if _whole(mask):
        grads = BACKWARD(gt, qt, kt, vt, ot, lt, 0.0, mask.causal, scale=scale)
        gq, gk, gv = [g.transpose(1, 2) for g in grads]
        return gq.reshape(q.shape), gk.contiguous(), gv.contiguous()
    rows_gq, gk, gv = [], None, None
    for rows, columns, causal, added, some in _calls(q, mask):
        if columns.start == columns.stop:
            rows_gq.append(q.new_zeros(q[:, rows].shape))
            continue
        part = _part(lt, rows) if some is None else finite(_part(lt, rows))
        gq, a, b = BACKWARD(
            _part(gt, rows),
            _part(qt, rows),
            _part(kt, columns),
            _part(vt, columns),
            _part(ot, rows),
            part,
            0.0,
            causal,
            attn_mask=added,
            scale=scale,
        )
        rows_gq.append(gq.transpose(1, 2).unflatten(2, heads))
        if rows == slice(0, mask.queries) and columns == slice(0, mask.keys):
            gk, gv = a.transpose(1, 2), b.transpose(1, 2)
            continue
        if gk is None or gv is None:
            gk, gv = (torch.zeros(k.shape, dtype=wide(k.dtype)) for _ in range(2))
        gk[:, columns] += a.transpose(1, 2)
        gv[:, columns] += b.transpose(1, 2)
    gq = rows_gq[0].contiguous() if len(rows_gq) == 1 else torch.cat(rows_gq, 1)
    if gk is None or gv is None:
        return gq, torch.zeros_like(k), torch.zeros_like(v)
    return gq, gk.to(k.dtype).contiguous(), gv.to(v.dtype).contiguous()


def _part(x: Tensor, some: slice) -> Tensor:
    """Some of the tokens of x[batch head token …]."""
    return x if some.stop - some.start == x.shape[2] else x[:, :, some]


def _whole(mask: Mask) -> bool:
    """Does one call of the kernel do it all?"""
    return mask.plain and mask.keys > 0 and (not mask.causal or mask.queries == mask.keys)


def _calls(q: Tensor, mask: Mask) -> Iterator[tuple[slice, slice, bool, Tensor | None, Tensor | None]]:
    """(queries, keys, causal?, added mask, which queries see a key) of each call."""
    dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    for rows, columns in mask.blocks(CPU_BLOCK):
        seen = mask.seen(rows, columns, q.device)
        if seen is None:
            yield rows, columns, False, None, None
        else:
            added = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)[:, None]
            added = added.expand(q.shape[0], 1, -1, -1)
            yield rows, columns, False, added, seen.any(-1)[..., None, None]
