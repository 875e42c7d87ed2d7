"""Attention by the CUDA kernels for half precision.

torch's flash kernel takes [batch seq heads head], or documents one behind another as [tokens heads head]; its causal
mask and its window end at the last key. cuDNN's, almost twice as fast on Hopper, takes [batch heads seq head] of any
strides, no window, and is not deterministic. flash-attn-4, where it is installed, goes before both on Hopper, and alone
has a soft cap (see `fmegatron.kernels.flash4`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fmegatron.kernels import flash4
from fmegatron.primitives.attention.mask import Mask, cu_seqlens_of, runs_of

CUDNN_LENGTH = 512  # queries from which cuDNN is worth the time that it takes to plan for a new shape


MOST_RUNS = 4  # of adjacent positions that are worth a call each: a zigzag order has two


Grads = tuple[Tensor, Tensor, Tensor]


class Call(NamedTuple):
    """One call of a kernel: these queries, the last of these keys."""

    rows: slice
    columns: slice
    mask: Mask


class Form(NamedTuple):
    """What a call depends on beside its mask. kernel: as of `attention`."""

    scale: float
    softcap: float | None = None
    kernel: str = "auto"


def calls(q: Any, mask: Mask, form: Form | None = None) -> list[Call] | None:
    """The calls that give attention of these queries, and keys and values like them; None where no kernel can."""
    found = _calls(q, mask)
    if found is not None and form is not None and form.softcap is not None:
        return found if all(_flash4_takes(q, call.mask, form) for call in found) else None
    return found


def _calls(q: Any, mask: Mask) -> list[Call] | None:
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] > 256:
        return None
    if not mask.self_segments:
        return None  # of queries that may lie in another document than the key at their place
    if mask.positions is None:
        if mask.segments is not None and mask.queries != mask.keys and not mask.causal:
            return None  # documents go on behind the last query
        return [Call(slice(0, mask.queries), slice(0, mask.keys), mask)]
    return _calls_by_run(mask)


def _calls_by_run(mask: Mask) -> list[Call] | None:
    """A call for each run of adjacent positions, with the keys up to its end."""
    assert mask.positions is not None and mask.kv_positions is not None
    positions, kv = mask.positions, mask.kv_positions
    known = positions.ndim == kv.ndim == 1 and positions.device.type == kv.device.type == "cpu"
    if not (known and mask.causal) or not torch.equal(kv, torch.arange(mask.keys)):
        return None
    runs = runs_of(positions, MOST_RUNS)
    if runs is None or any(first < 0 or first + r.stop - r.start > mask.keys for r, first in runs):
        return None
    found = []
    for rows, first in runs:
        end, start = first + rows.stop - rows.start, 0
        if mask.window is not None:
            start = max(0, first - mask.window + 1)
        segments = None if mask.kv_segments is None else mask.kv_segments[..., start:end]
        part = Mask(end - first, end - start, True, mask.window, kv_segments=segments)
        found.append(Call(rows, slice(start, end), part))
    return found


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


def _flash4_takes(q: Tensor, mask: Mask, form: Form) -> bool:
    return flash4.takes(form.kernel, q, mask.queries, mask.keys, form.softcap)


def _of_flash4(mask: Mask, starts: Tensor | None, kv_starts: Tensor | None, form: Form) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": mask.causal, "softcap": form.softcap, "softmax_scale": form.scale}
    if starts is not None:
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": kv_starts}
        options |= {"max_seqlen_q": mask.queries, "max_seqlen_k": mask.keys}
    return options | _window(mask)


def _padded(*tensors: Tensor) -> list[Tensor]:
    """The flash kernel takes multiples of 8 features; zeros behind change nothing."""
    short = -tensors[0].shape[-1] % 8
    return [functional.pad(t, (0, short)) if short else t for t in tensors]


def _window(mask: Mask) -> dict[str, int]:
    """As the flash kernels count: keys behind and before a query's own, which is seen in any case."""
    if mask.window is None:
        return {}
    return dict(window_size_left=mask.window - 1, window_size_right=0 if mask.causal else mask.window - 1)


def _document_starts(mask: Mask, cu_seqlens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Where the documents of queries and of keys start, as many of both: some keys' have no query."""
    if mask.kv_segments is None:
        return None, None
    if mask.queries == mask.keys:
        starts = cu_seqlens_of(mask.kv_segments) if cu_seqlens is None else _with_rows(cu_seqlens, mask)
        return starts, starts
    starts = cu_seqlens_of(mask.kv_segments)
    row, place = starts.div(mask.keys, rounding_mode="floor"), starts % mask.keys
    before = (place - (mask.keys - mask.queries)).clamp(min=0)
    return (row * mask.queries + before).to(torch.int32), starts


def _with_rows(cu_seqlens: Tensor, mask: Mask) -> Tensor:
    """Rows end documents too."""
    assert mask.segments is not None
    rows = torch.arange(0, mask.segments.numel(), mask.queries, dtype=torch.int32, device=cu_seqlens.device)
    return torch.cat([cu_seqlens.to(torch.int32), rows]).sort().values


def forward(
    q: Tensor, k: Tensor, v: Tensor, calls: list[Call], cu_seqlens: Tensor | None, form: Form
) -> tuple[Tensor, Tensor]:
    """(o, lse)"""
    if len(calls) == 1 and calls[0].columns == slice(0, k.shape[1]):
        return _forward(q, k, v, calls[0].mask, cu_seqlens, form)
    parts = [_forward(q[:, c.rows], k[:, c.columns], v[:, c.columns], c.mask, None, form) for c in calls]
    return torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    calls: list[Call],
    cu_seqlens: Tensor | None,
    form: Form,
    *results: Tensor,
    into: Grads | None = None,
) -> Grads:
    """(gq, gk, gv); results: o, lse, go

    into: where flash-attn-4 writes them, heads evenly spaced, and what is then given back.
    """
    if len(calls) == 1 and calls[0].columns == slice(0, k.shape[1]):
        return _backward(q, k, v, calls[0].mask, cu_seqlens, form, *results, into=into)
    rows_gq, (gk, gv) = [], (torch.zeros_like(t, dtype=torch.float32) for t in (k, v))
    for rows, columns, mask in calls:
        mine = (t[:, rows] for t in results)
        gq, a, b = _backward(q[:, rows], k[:, columns], v[:, columns], mask, None, form, *mine)
        rows_gq.append(gq)
        gk[:, columns] += a
        gv[:, columns] += b
    return torch.cat(rows_gq, 1), gk.to(k.dtype), gv.to(v.dtype)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, cu_seqlens: Tensor | None, form: Form
) -> tuple[Tensor, Tensor]:
    """(o, lse) of one call."""
    shape = q.shape
    of_flash4 = _flash4_takes(q, mask, form)
    if not of_flash4 and _cudnn_takes(q, mask):
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(t.transpose(1, 2) for t in (q.flatten(2, 3), k, v)), None, True, 0.0, mask.causal, False, scale=form.scale
        )
        o, lse = o.transpose(1, 2), lse[..., 0].transpose(1, 2)
        return o.reshape(shape).contiguous(), lse.reshape(shape[:-1]).contiguous()
    starts, kv_starts = _document_starts(mask, cu_seqlens)
    q, k, v = _padded(q.flatten(2, 3), k, v)
    if starts is not None:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    if of_flash4:
        o, lse = flash4.forward(q, k, v, **_of_flash4(mask, starts, kv_starts, form))
    else:
        o, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            starts,
            kv_starts,
            mask.queries,
            mask.keys,
            0.0,
            mask.causal,
            False,
            scale=form.scale,
            **_window(mask),
        )
    lse = lse.transpose(-1, -2)  # [heads tokens] or [batch heads seq] -> tokens first
    return o[..., : shape[-1]].reshape(shape).contiguous(), lse.reshape(shape[:-1]).contiguous()


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    cu_seqlens: Tensor | None,
    form: Form,
    *results: Tensor,
    into: Grads | None = None,
) -> Grads:
    """(gq, gk, gv) of one call."""
    o, lse, go = (t.flatten(2, 3) for t in results)
    go, q_shape, k_shape = go.contiguous(), q.shape, k.shape
    q = q.flatten(2, 3)
    none = torch.empty(0, dtype=torch.int64, device=q.device)  # the state of dropout's generator
    of_flash4 = _flash4_takes(q, mask, form)
    if not of_flash4 and _cudnn_takes(q, mask):
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
            scale=form.scale,
        )
        gq, gk, gv = (g.transpose(1, 2) for g in grads)
        return gq.reshape(q_shape).contiguous(), gk.contiguous(), gv.contiguous()
    starts, kv_starts = _document_starts(mask, cu_seqlens)
    q, k, v, o, go = _padded(q, k, v, o, go)
    if starts is not None:
        q, k, v, o, go, lse = (t.flatten(0, 1) for t in (q, k, v, o, go, lse))
    lse = lse.transpose(-1, -2).contiguous()
    if of_flash4:
        options = _of_flash4(mask, starts, kv_starts, form)
        if into is not None:
            places = [t.view(x.shape) for t, x in zip(into, (q, k, v), strict=True)]
            flash4.backward(go, q, k, v, o, lse, into=places, **options)
            return into
        grads = flash4.backward(go, q, k, v, o, lse, **options)
    else:
        grads = torch.ops.aten._flash_attention_backward(
            go,
            q,
            k,
            v,
            o,
            lse,
            starts,
            kv_starts,
            mask.queries,
            mask.keys,
            0.0,
            mask.causal,
            none.to(torch.uint64),
            none,
            scale=form.scale,
            **_window(mask),
        )
    gq, gk, gv = (g[..., : q_shape[-1]] for g in grads)
    return gq.reshape(q_shape).contiguous(), gk.reshape(k_shape).contiguous(), gv.reshape(k_shape).contiguous()
