"""Rotary embedding and attention as one primitive, for a kernel that reads queries, keys and values where the product that
made them left them, and writes their gradients side by side: nothing is copied out of the product or into its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fmegatron.errors import UserError
from fmegatron.function import apply_function, under_torch_func
from fmegatron.kernels import flash4
from fmegatron.primitives._function import graph_wanted, operator
from fmegatron.primitives.attention import check_form
from fmegatron.primitives.attention.cuda import Form
from fmegatron.primitives.attention.function import AttentionBackward, attend, gradients, make_mask
from fmegatron.primitives.attention.sinks import sinks_gradient
from fmegatron.primitives.rotary import apply_rotary_both, check_table, has_turn, split_qkv, turn_in_place


def has_rotary_attention(
    y: Tensor, cos: Tensor, sin: Tensor, *, softcap: float | None = None, kernel: str = "auto"
) -> bool:
    """Would `rotary_attention` of y[batch seq kv qkv head] copy nothing? (Where not, `split_rotary` and `attention` do the
    same.) With flash-attn-4, where the heads of the queries are evenly spaced in y: one of each key head, or a single key
    head."""
    if kernel != "auto" or type(y) is not Tensor or under_torch_func() or y.ndim != 5 or not y.is_contiguous():
        return False
    evenly = y.shape[2] == 1 or y.shape[3] == 3
    return evenly and has_turn(y, cos, sin) and flash4.takes(kernel, y, y.shape[1], y.shape[1], softcap)


def rotary_attention(
    y: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    segments: Tensor | None = None,
    scale: float | None = None,
    sh: Any = None,
    name: str = "attention",
    kernel: str = "auto",
) -> Tensor:
    """`attention` of what `split_rotary` gives of y[batch seq kv qkv head]: [batch seq kv group head].

    y is **overwritten** with its queries and keys turned, and kept for backward: give a value that nobody else reads, as
    the result of a product that is not saved by name. (Where autograd has saved it, the backward raises torch's error about
    changes in place.)

    Other arguments, and errors: see `split_rotary` and `attention`; and UserError for a y that is not contiguous, under
    torch.func and in the checking mode, where nothing can be overwritten.
    """
    if y.ndim != 5 or not y.is_contiguous() or under_torch_func() or (sh is not None and sh.check is not None):
        raise UserError(
            f"rotary_attention overwrites y, of shape {tuple(y.shape)}: that must be a contiguous [batch seq kv qkv head], not "
            "under torch.func or in the checking mode; use split_rotary and attention there"
        )
    check_table(y, cos, sin)
    check_form(split_qkv(y)[0], window, softcap, sinks)
    scale = y.shape[-1] ** -0.5 if scale is None else scale
    tape = None if sh is None else sh.tape
    saved = None if tape is None else tape.enter(name)[1]
    form = interleaved, causal, window, scale, softcap, kernel
    of_y = apply_function(_Link, y)
    o, lse = apply_function(
        _RotaryAttention, of_y, y.detach(), cos, sin, segments, sinks, *(saved or (None, None)), *form
    )
    return o if tape is None else tape.leave(name, [o, lse])[0]


class _Link(Function):
    """y -> a tensor of its shape without storage, to which gradients of y can go when y itself is overwritten."""

    @staticmethod
    def forward(y: Tensor) -> Tensor:
        return y.new_empty(()).expand(y.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class _RotaryAttention(Function):
    """(a link to y, y, cos, sin, segments, sinks, saved o, saved lse, interleaved, causal, window, scale, softcap, kernel) ->
    (o, lse). The gradient goes to the link; y, without a graph, is overwritten."""

    @staticmethod
    def forward(link: Tensor, y: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        segments, sinks, o, lse, interleaved, *form = rest
        turn_in_place(y, cos, sin, interleaved, False)
        if o is not None:
            return o.view_as(o), lse.view_as(lse)
        return attend(*split_qkv(y), None, None, segments, None, None, sinks, *form)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, _, _, ctx.interleaved, causal, window, scale, softcap, kernel = inputs
        ctx.form = causal, window, scale, softcap, kernel
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, go: Tensor | None, glse: Tensor | None) -> Any:
        link, y, cos, sin, segments, sinks, o, lse = ctx.saved_tensors
        if go is None and glse is None:
            return (None,) * 14
        go = torch.zeros_like(o) if go is None else go
        if torch.compiler.is_compiling() and not graph_wanted():
            glse = None  # as in `Attention`
        if graph_wanted():
            q, k, v = split_qkv(apply_function(_Turned, link, y, cos, sin, ctx.interleaved))
            masks = None, None, segments, None, None
            gq, gk, gv = apply_function(AttentionBackward, q, k, v, *masks, o, lse, go, glse, *ctx.form)
            gy = _turned_back(gq, gk, gv, cos, sin, ctx.interleaved)
        else:
            gy = _gradient(y, cos, sin, segments, o, lse, go, glse, ctx.interleaved, *ctx.form)
        g_sinks = None if sinks is None else sinks_gradient(sinks, o, lse, go, glse)
        return gy, None, None, None, None, g_sinks, *[None] * 8


class _Turned(Function):
    """(a link to y before it was turned, y, cos, sin, interleaved) -> y, whose gradient goes to the link."""

    @staticmethod
    def forward(link: Tensor, y: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, cos, sin, ctx.interleaved = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _turned_back(*split_qkv(g), cos, sin, ctx.interleaved), None, None, None, None


def _turned_back(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The gradient of y of those of turned queries and keys, and of values, by operations that are differentiable."""
    q, k = apply_rotary_both(q, k, cos, -sin, interleaved=interleaved, kernel="torch")
    return torch.cat([q, k.unsqueeze(3), v.unsqueeze(3)], 3)


@operator("fmegatron::rotary_attention_backward")
def _gradient(
    y: Tensor,
    cos: Tensor,
    sin: Tensor,
    segments: Tensor | None,
    o: Tensor,
    lse: Tensor,
    go: Tensor,
    glse: Tensor | None,
    interleaved: bool,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    by: str,  # the kernel (inductor has an argument of that name itself)
) -> Tensor:
    """The gradient of y before it was turned, given it turned."""
    gy = torch.empty_like(y)
    parts, (q, k, v) = split_qkv(gy), split_qkv(y)
    mask = make_mask(q, k, causal, window, None, None, segments, None)
    found = gradients(q, k, v, mask, None, o, lse, go, glse, Form(scale, softcap, by), into=parts)
    for part, g in zip(parts, found, strict=True):
        if g is not part:
            part.copy_(g)
    turn_in_place(gy, cos, sin, interleaved, True)
    return gy


@_gradient.register_fake
def _(y: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(y)
