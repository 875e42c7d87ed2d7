"""Cross-entropy of the next token, the vocabulary possibly sharded, with or without the last product inside.

A rank computes two numbers a token from the logits that it holds, the log of their summed exponentials and the
label's logit (0 where another rank holds it). These, not logits, are then combined over the ranks: as in Megatron's
vocab-parallel cross-entropy, but once for all chunks. Statistics are in fp32 (float64 for float64).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fmegatron.errors import UserError
from fmegatron.function import apply_function
from fmegatron.primitives._function import each_example, global_size, graph_wanted, sharded, wide

CHUNK_ELEMENTS = {"cpu": 1 << 21}  # logits at once; on CPU they should stay in cache
CHUNK_ELEMENTS_ELSEWHERE = 1 << 26


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    labels: Tensor,
    *,
    equation: str = "batch seq embed, embed vocab -> batch seq vocab",
    ignore_index: int = -100,
    sh: Any = None,
    vocab_size: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """-log softmax(x w)[label] of each token: x[batch seq embed], w[embed vocab], labels int[batch seq] -> [batch
    seq], fp32 or wider.

    0 at tokens whose label is `ignore_index`. At most `chunk` tokens' logits exist at a time, in fp32, forward and
    backward; backward keeps x, w and the labels, and computes logits again (as in Cut Your Losses, Wijmans et al.
    2024). Products take the arguments' dtype and sum in fp32.

    equation: "batch seq embed, vocab embed -> batch seq vocab" for a w of that order (a tied embedding).
    sh: x is in the region of vocab ("batch seq* embed -> batch seq embed | vocab"), where its gradient is summed;
        labels are global ids.
    vocab_size: the global size of vocab (default: that of equal shards).
    chunk: tokens; default: by the size of the vocabulary.
    """
    orders = {"embed vocab": False, "vocab embed": True}
    side = equation.split("->")[0].split(",")[-1].strip()
    if side not in orders:
        raise UserError(f'linear_cross_entropy(equation={equation!r}): w is "embed vocab" or "vocab embed"')
    rows = orders[side]
    embed, vocab = (w.shape[1], w.shape[0]) if rows else (w.shape[0], w.shape[1])
    if x.shape[:-1] != labels.shape or x.shape[-1] != embed:
        raise UserError(
            f"linear_cross_entropy: x {tuple(x.shape)}, w {tuple(w.shape)} as {side!r} and labels "
            f"{tuple(labels.shape)} disagree"
        )
    if chunk is None:
        chunk = max(1, CHUNK_ELEMENTS.get(x.device.type, CHUNK_ELEMENTS_ELSEWHERE) // vocab)
    elif chunk < 1:
        raise UserError(f"linear_cross_entropy(chunk={chunk}): at least one token at a time")

    def local(x: Tensor, w: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        lse, label = apply_function(_LinearStatistics, x.flatten(0, -2), w, held.flatten(), rows, chunk)
        return lse.view(labels.shape)[..., None], label.view(labels.shape)[..., None]

    return _loss(local, (x, w), ("batch seq embed | vocab", side), labels, vocab, ignore_index, sh, vocab_size)


def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, sh: Any = None, vocab_size: int | None = None
) -> Tensor:
    """-log softmax(logits)[label] of each token: logits[batch seq vocab], labels int[batch seq] -> [batch seq], fp32
    or wider.

    0 at tokens whose label is `ignore_index`. Under `sh` the vocabulary may be sharded (`vocab_size`: its global
    size). Backward keeps the logits; `linear_cross_entropy` does not.
    """
    if logits.shape[:-1] != labels.shape:
        raise UserError(f"cross_entropy: logits {tuple(logits.shape)} and labels {tuple(labels.shape)} disagree")

    def local(logits: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        lse, label = apply_function(_Statistics, logits, held)
        return lse[..., None], label[..., None]

    return _loss(local, (logits,), ("batch seq vocab",), labels, logits.shape[-1], ignore_index, sh, vocab_size)


def _loss(
    local: Any,
    args: tuple[Tensor, ...],
    sides: tuple[str, ...],
    labels: Tensor,
    vocab: int,
    ignore_index: int,
    sh: Any,
    vocab_size: int | None,
) -> Tensor:
    """From `local(*args, held labels) -> (lse, label's logit)`, both [batch seq 1], to the loss of each token.

    Over a sharded vocab the last dim of the two is `vocab`, of which each rank holds one element.
    """
    ignored = labels == ignore_index
    if not sharded(sh, "vocab"):
        lse, label = local(*args, labels.masked_fill(ignored, -1))
        loss = (lse - label)[..., 0]
    else:
        size = global_size(sh, "vocab", vocab) if vocab_size is None else vocab_size
        ids = sh.index("vocab", size, device=labels.device)

        def held_here(*args: Tensor) -> Any:
            *args, labels, ids = args  # type: ignore[assignment]
            at = labels - ids[:1]
            return local(*args, at.where((at >= 0) & (at < vocab) & ~ignored, -1))

        results = ("batch seq vocab", "batch seq vocab")
        lse, label = sh.primitive(held_here, (*args, labels, ids), (*sides, "batch seq", "vocab"), results)
        most = sh.max(lse, "batch seq vocab -> batch seq | vocab")
        total = sh.sum((lse - most[..., None]).exp(), "batch seq vocab -> batch seq")
        # `most` is equal everywhere and needs no gradient: it cancels
        loss = total.log() + most - sh.sum(label, "batch seq vocab -> batch seq")
    return loss.masked_fill(ignored, 0)


class _Statistics(Function):
    """(logits[... vocab], labels[...], -1 for none) -> (log-sum-exp, the label's logit or 0), both [...]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        lse = logits.to(wide(logits.dtype)).logsumexp(-1)
        label = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0].to(lse.dtype)
        return lse, label.masked_fill(labels < 0, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[0])

    @staticmethod
    def backward(ctx: Any, g_lse: Tensor, g_label: Tensor) -> Any:
        logits, labels, lse = ctx.saved_tensors
        g = (logits - lse[..., None]).exp() * g_lse[..., None]
        at = labels.clamp(min=0)[..., None]
        g = g.scatter_add(-1, at, g_label.masked_fill(labels < 0, 0)[..., None])
        return g.to(logits.dtype), None


class _LinearStatistics(Function):
    """(x[token embed], w, labels[token], w is [vocab embed]?, chunk) -> (log-sum-exp, the label's logit or 0), both
    [token]."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, labels: Tensor, rows: bool, chunk: int) -> Any:
        return torch.ops.fmegatron.linear_statistics(x, w, labels, rows, chunk)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, labels, ctx.rows, ctx.chunk = inputs
        ctx.save_for_backward(x, w, labels)

    @staticmethod
    def backward(ctx: Any, g_lse: Tensor, g_label: Tensor) -> Any:
        need_x, need_w = ctx.needs_input_grad[:2]
        args = *ctx.saved_tensors, g_lse, g_label, ctx.rows, ctx.chunk
        if graph_wanted():
            gx, gw = apply_function(_LinearStatisticsBackward, *args)
        else:
            gx, gw = torch.ops.fmegatron.linear_statistics_backward(*args, need_x, need_w)
        return gx if need_x else None, gw if need_w else None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return each_example(_LinearStatistics, info, in_dims, args)


class _LinearStatisticsBackward(Function):
    """(x, w, labels, g_lse, g_label, rows, chunk) -> (gx, gw), whose own backward is in plain operations."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return tuple(torch.ops.fmegatron.linear_statistics_backward(*args, True, True))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.rows, ctx.chunk = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, ax: Tensor, aw: Tensor) -> Any:
        x, w, labels, g_lse, g_label = ctx.saved_tensors
        gx, gw, *others = _second_order(x, w, labels, g_lse, g_label, ax, aw, ctx.rows, ctx.chunk)
        return gx, gw, None, *others, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return each_example(_LinearStatisticsBackward, info, in_dims, args)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b summed in and returned as `dtype`."""
    if a.dtype == dtype:
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in total's dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)  # type: ignore[call-overload]
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


# Operators of their own, so that compiled code and simulation see one operation, not a loop over chunks.


@torch.library.custom_op("fmegatron::linear_statistics", mutates_args=())
def _linear_statistics_op(x: Tensor, w: Tensor, labels: Tensor, rows: bool, chunk: int) -> tuple[Tensor, Tensor]:
    dtype = wide(x.dtype)
    w = w.t() if rows else w
    lse, label = (torch.empty(x.shape[0], dtype=dtype, device=x.device) for _ in range(2))
    for start in range(0, x.shape[0], chunk):
        part = slice(start, start + chunk)
        logits, at = _product(x[part], w, dtype), labels[part]
        label[part] = logits.gather(-1, at.clamp(min=0)[:, None])[:, 0].masked_fill_(at < 0, 0)
        # softmax is torch's one fused pass; its largest value is 1 / sum(exp(logits - most))
        lse[part] = logits.amax(-1) - logits.softmax(-1).amax(-1).log()
    return lse, label


@_linear_statistics_op.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], dtype=wide(x.dtype)), x.new_empty(x.shape[0], dtype=wide(x.dtype))


@torch.library.custom_op("fmegatron::linear_statistics_backward", mutates_args=())
def _linear_statistics_backward_op(
    x: Tensor,
    w: Tensor,
    labels: Tensor,
    g_lse: Tensor,
    g_label: Tensor,
    rows: bool,
    chunk: int,
    need_x: bool,
    need_w: bool,
) -> tuple[Tensor, Tensor]:
    """(gx, gw), an empty tensor for one that is not needed. gw is summed over chunks in fp32 or wider."""
    dtype, wt = wide(x.dtype), w if rows else w.t()
    gx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else x.new_empty(0)
    gw = torch.zeros(w.shape, dtype=dtype, device=w.device) if need_w else w.new_empty(0)
    for start in range(0, x.shape[0], chunk):
        part = slice(start, start + chunk)
        here, at = labels[part] >= 0, labels[part].clamp(min=0)[:, None]
        p = _product(x[part], wt.t(), dtype).softmax(-1)
        at_label = p.gather(-1, at)[:, 0] * g_lse[part] + g_label[part] * here
        g = torch.mul(p, g_lse[part, None], out=p if dtype == x.dtype else torch.empty_like(p, dtype=x.dtype))
        g.scatter_(-1, at, at_label.to(x.dtype)[:, None])
        if need_x:
            gx[part] = g @ wt
        if need_w:
            _add_product(gw, *((g.t(), x[part]) if rows else (x[part].t(), g)))
    return gx, gw.to(w.dtype)


@_linear_statistics_backward_op.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    need_x, need_w = rest[-2:]
    return x.new_empty(x.shape if need_x else 0), w.new_empty(w.shape if need_w else 0)


def _second_order(
    x: Tensor, w: Tensor, labels: Tensor, g_lse: Tensor, g_label: Tensor, ax: Tensor, aw: Tensor, rows: bool, chunk: int
) -> list[Tensor]:
    """Gradients of sum(ax gx) + sum(aw gw), of the backward's results, by (x, w, g_lse, g_label).

    With p = softmax(x w) and g = p g_lse + onehot(label) g_label:  gx = g wᵀ,  gw = xᵀ g. Functional throughout, so
    that torch can map it and differentiate it again.
    """
    dtype = g_lse.dtype
    we, awe = (t.to(dtype).t() if rows else t.to(dtype) for t in (w, aw))
    by_token: list[list[Tensor]] = []
    gw: Any = 0
    for start in range(0, x.shape[0], chunk):
        part = slice(start, start + chunk)
        xp, axp, at, here = x[part].to(dtype), ax[part].to(dtype), labels[part].clamp(min=0)[:, None], labels[part] >= 0
        p = (xp @ we).softmax(-1)
        g = (p * g_lse[part, None]).scatter_add(-1, at, (g_label[part] * here)[:, None])
        g_g = axp @ we + xp @ awe
        along = (g_g * p).sum(-1)
        g_logits = (g_g - along[:, None]) * p * g_lse[part, None]
        by_token.append(
            [
                g @ awe.t() + g_logits @ we.t(),  # x
                along,  # g_lse
                g_g.gather(-1, at)[:, 0] * here,  # g_label
            ]
        )
        gw = gw + axp.t() @ g + xp.t() @ g_logits
    gx, *others = (torch.cat(parts) for parts in zip(*by_token, strict=True))
    return [gx.to(x.dtype), (gw.t() if rows else gw).to(w.dtype), *others]
