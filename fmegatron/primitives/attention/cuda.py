"""Attention by the CUDA kernels for half precision.

torch's flash kernel takes [batch seq heads head], or documents one behind another as [tokens heads head]; its causal
mask and its window end at the last key. cuDNN's, almost twice as fast on Hopper, takes [batch heads seq head] of any
strides, no window, and is not deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fmegatron.primitives.attention.mask import Mask, cu_seqlens_of

CUDNN_LENGTH = 512  # queries from which cuDNN is worth the time that it takes to plan for a new shape


def takes(q: Tensor, mask: Mask) -> bool:
    """Is there a kernel for these queries, and keys and values like them?"""
    ordered = mask.positions is None and (mask.segments is None or mask.queries == mask.keys)
    return q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256 and ordered


def _cudnn_takes(q: Tensor, mask: Mask) -> bool:
    return (
        mask.plain
        and mask.queries == mask.keys >= CUDNN_LENGTH
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 128
        and torch.backends.cudnn.is_available()
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
        and not torch.are_deterministic_algorithms_enabled()
    )


def _padded(*tensors: Tensor) -> list[Tensor]:
    """The flash kernel takes multiples of 8 features; zeros behind change nothing."""
    short = -tensors[0].shape[-1] % 8
    return [functional.pad(t, (0, short)) if short else t for t in tensors]


def _window(mask: Mask) -> dict[str, int]:
    """As the flash kernel counts: keys behind and before a query's own, which is seen in any case."""
    if mask.window is None:
        return {}
    return dict(window_size_left=mask.window - 1, window_size_right=0 if mask.causal else mask.window - 1)


def _document_starts(mask: Mask, cu_seqlens: Tensor | None) -> Tensor | None:
    if mask.segments is None:
        return None
    if cu_seqlens is None:
        return cu_seqlens_of(mask.segments)
    # rows end documents too
    rows = torch.arange(0, mask.segments.numel(), mask.queries, dtype=torch.int32, device=cu_seqlens.device)
    return torch.cat([cu_seqlens.to(torch.int32), rows]).sort().values


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, cu_seqlens: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(o, lse)"""
    shape = q.shape
    if _cudnn_takes(q, mask):
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(t.transpose(1, 2) for t in (q.flatten(2, 3), k, v)), None, True, 0.0, mask.causal, False, scale=scale
        )
        o, lse = o.transpose(1, 2), lse[..., 0].transpose(1, 2)
        return o.reshape(shape).contiguous(), lse.reshape(shape[:-1]).contiguous()
    starts = _document_starts(mask, cu_seqlens)
    q, k, v = _padded(q.flatten(2, 3), k, v)
    if starts is not None:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, mask.queries, mask.keys, 0.0, mask.causal, False, scale=scale, **_window(mask)
    )
    lse = lse.transpose(-1, -2)  # [heads tokens] or [batch heads seq] -> tokens first
    return o[..., : shape[-1]].reshape(shape).contiguous(), lse.reshape(shape[:-1]).contiguous()


def backward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, cu_seqlens: Tensor | None, scale: float, *results: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(gq, gk, gv); results: o, lse, go"""
    o, lse, go = (t.flatten(2, 3) for t in results)
    go, q_shape, k_shape = go.contiguous(), q.shape, k.shape
    q = q.flatten(2, 3)
    none = torch.empty(0, dtype=torch.int64, device=q.device)  # the state of dropout's generator
    if _cudnn_takes(q, mask):
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(t.transpose(1, 2) for t in (go, q, k, v, o)),
            lse.transpose(1, 2).contiguous()[..., None],
            none,
            none,
            None,
            None,
            None,
            mask.queries,
            mask.keys,
            0.0,
            mask.causal,
            scale=scale,
        )
        gq, gk, gv = (g.transpose(1, 2) for g in grads)
        return gq.reshape(q_shape).contiguous(), gk.contiguous(), gv.contiguous()
    starts = _document_starts(mask, cu_seqlens)
    q, k, v, o, go = _padded(q, k, v, o, go)
    if starts is not None:
        q, k, v, o, go, lse = (t.flatten(0, 1) for t in (q, k, v, o, go, lse))
    grads = torch.ops.aten._flash_attention_backward(
        go,
        q,
        k,
        v,
        o,
        lse.transpose(-1, -2).contiguous(),
        starts,
        starts,
        mask.queries,
        mask.keys,
        0.0,
        mask.causal,
        none.to(torch.uint64),
        none,
        scale=scale,
        **_window(mask),
    )
    gq, gk, gv = (g[..., : q_shape[-1]] for g in grads)
    return gq.reshape(q_shape).contiguous(), gk.reshape(k_shape).contiguous(), gv.reshape(k_shape).contiguous()
