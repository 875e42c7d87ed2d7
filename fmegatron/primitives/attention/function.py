"""Attention as operators (so that compiled code and simulation see one operation, not a loop over blocks) and as
Functions that torch can differentiate twice, map and compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fmegatron.errors import UserError
from fmegatron.function import apply_function
from fmegatron.primitives._function import graph_wanted, operator, wide
from fmegatron.primitives.attention import blocks, cpu, cuda
from fmegatron.primitives.attention.mask import Mask
from fmegatron.primitives.attention.sinks import sinks_gradient, with_sinks


class Attention(Function):
    """(q, k, v, masks…, sinks, saved o, saved lse, causal, window, scale, softcap, kernel) -> (o, lse).

    masks: positions, kv_positions, segments, kv_segments, cu_seqlens. sinks: [kv group] or, where they are mapped,
    [batch kv group]. With saved outputs only the graph is made.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        *tensors, o, lse, causal, window, scale, softcap, kernel = rest
        if o is not None:
            return o.view_as(o), lse.view_as(lse)
        return attend(q, k, v, *tensors, causal, window, scale, softcap, kernel)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, _, _, causal, window, scale, softcap, kernel = inputs
        ctx.form = causal, window, scale, softcap, kernel
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, go: Tensor | None, glse: Tensor | None) -> Any:
        *tensors, sinks, o, lse = ctx.saved_tensors
        if go is None and glse is None:
            return (None,) * 16
        go = torch.zeros_like(o) if go is None else go
        if torch.compiler.is_compiling() and not graph_wanted():
            # Compiled code gives zeros for a gradient that there is not. Nobody outside gets lse, so that only the
            # graph of a backward can make one.
            glse = None
        args = *tensors, o, lse, go, glse, *ctx.form
        if graph_wanted():
            grads = apply_function(AttentionBackward, *args)
        else:
            grads = _attention_backward(*args)
        g_sinks = None if sinks is None else sinks_gradient(sinks, o, lse, go, glse)
        return *grads, *[None] * 5, g_sinks, *[None] * 7

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        in_dims, tensors = list(in_dims), list(args)
        if args[8] is not None:  # in the batch, as all that is mapped
            tensors[8], in_dims[8] = _by_row(args[8], in_dims[8], args[0].shape[1 if in_dims[0] is not None else 0])
        return _fold(Attention, info.batch_size, in_dims, tensors), (0, 0)


class AttentionBackward(Function):
    """(q, k, v, masks…, o, lse, go, glse, causal, window, scale, softcap, kernel) -> (gq, gk, gv), whose own backward is in
    plain operations."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return tuple(_attention_backward(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, causal, window, scale, softcap, _ = inputs
        ctx.form = causal, window, scale, softcap
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        q, k, v, *masks, o, lse, go, glse = ctx.saved_tensors
        causal, window, scale, softcap = ctx.form
        mask = Mask(q.shape[1], k.shape[1], causal, window, *masks[:4])
        grads = blocks.second_order(q, k, v, mask, scale, softcap, o, lse, go, glse, *cotangents)
        gq, gk, gv, g_o, g_lse, g_go, g_glse = grads
        return gq, gk, gv, *[None] * 5, g_o, g_lse, g_go, None if glse is None else g_glse, *[None] * 5

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _fold(AttentionBackward, info.batch_size, in_dims, args), (0, 0, 0)


def _by_row(sinks: Tensor, mapped: int | None, batch: int) -> tuple[Tensor, int | None]:
    """Sinks with a row for each of the batch: [batch kv group], or with the mapped dim in front."""
    sinks = sinks if mapped is None else sinks.movedim(mapped, 0)
    if sinks.ndim - (mapped is not None) == 2:
        sinks = sinks.unsqueeze(-3).expand(*sinks.shape[:-2], batch, -1, -1)
    return sinks, None if mapped is None else 0


def _fold(function: type[Function], size: int, in_dims: Any, args: Any) -> Any:
    """vmap: the mapped dim becomes part of the batch."""
    args = [a if d is None else a.movedim(d, 0) for a, d in zip(args, in_dims, strict=True)]
    mapped = [isinstance(a, Tensor) and d is not None for a, d in zip(args, in_dims, strict=True)]
    q = args[0]
    batch, queries = q.shape[1:3] if mapped[0] else q.shape[:2]
    *masks, cu = args[3:8]
    if cu is not None:
        if mapped[7]:
            raise UserError("attention(cu_seqlens=…) cannot be mapped by vmap: give segments instead")
        total = batch * queries
        places = torch.arange(size, device=cu.device, dtype=cu.dtype)[:, None] * total + cu[:-1]
        cu = torch.cat([places.flatten(), cu[-1:] * size])
    for i, mask in enumerate(masks, 3):
        if mask is None or (mask.ndim == 1 and not mapped[i]):
            continue
        if mask.ndim - mapped[i] == 1:
            masks[i - 3] = mask[:, None].expand(size, batch, -1).flatten(0, 1)
        else:
            masks[i - 3] = (mask if mapped[i] else mask.expand(size, *mask.shape)).flatten(0, 1)

    def fold(a: Any, is_mapped: bool) -> Any:
        if not isinstance(a, Tensor):
            return a
        return (a if is_mapped else a.expand(size, *a.shape)).flatten(0, 1)

    folded = [fold(a, m) for a, m in zip(args, mapped, strict=True)]
    folded[3:8] = [*masks, cu]
    return tuple(o.unflatten(0, (size, batch)) for o in function.apply(*folded))


@operator("fmegatron::attention")
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    kv_positions: Tensor | None,
    segments: Tensor | None,
    kv_segments: Tensor | None,
    cu_seqlens: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    by: str = "auto",  # the kernel (inductor has an argument of that name itself)
) -> tuple[Tensor, Tensor]:
    mask = make_mask(q, k, causal, window, positions, kv_positions, segments, kv_segments)
    if softcap is None and q.device.type == "cpu":
        o, lse = cpu.forward(q, k, v, mask, scale)
    elif (calls := cuda.calls(q, mask, form := cuda.Form(scale, softcap, by))) is not None:
        o, lse = cuda.forward(q, k, v, calls, cu_seqlens, form)
    else:
        o, lse = blocks.forward(q, k, v, mask, scale, softcap)
    return (o, lse) if sinks is None else with_sinks(o, lse, sinks)


@attend.register_fake
def _(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


@operator("fmegatron::attention_backward")
def _attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    kv_positions: Tensor | None,
    segments: Tensor | None,
    kv_segments: Tensor | None,
    cu_seqlens: Tensor | None,
    o: Tensor,
    lse: Tensor,
    go: Tensor,
    glse: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    by: str = "auto",  # the kernel (inductor has an argument of that name itself)
) -> tuple[Tensor, Tensor, Tensor]:
    mask = make_mask(q, k, causal, window, positions, kv_positions, segments, kv_segments)
    return gradients(q, k, v, mask, cu_seqlens, o, lse, go, glse, cuda.Form(scale, softcap, by))


@_attention_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    cu_seqlens: Tensor | None,
    o: Tensor,
    lse: Tensor,
    go: Tensor,
    glse: Tensor | None,
    form: cuda.Form,
    *,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gq, gk, gv), which are those of `into` where the kernel can write there, as flash-attn-4's can (see
    `cuda.backward`)."""
    if glse is None:
        if form.softcap is None and q.device.type == "cpu":
            return cpu.backward(q, k, v, mask, form.scale, o, lse, go)
        if (calls := cuda.calls(q, mask, form)) is not None:
            return cuda.backward(q, k, v, calls, cu_seqlens, form, o, lse, go, into=into)
    return blocks.backward(q, k, v, mask, form.scale, form.softcap, o, lse, go, glse)


def make_mask(q: Tensor, k: Tensor, causal: bool, window: int | None, *tensors: Tensor | None) -> Mask:
    """Blocks are chosen by values of positions and documents too, where these lie on the CPU; elsewhere, where looking
    waits for the device, for a window only."""
    given = [t for t in tensors if t is not None]
    look = all(t.device.type == "cpu" for t in given) or (
        window is not None and not (q.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )
    return Mask(q.shape[1], k.shape[1], causal, window, *tensors, look=look)
