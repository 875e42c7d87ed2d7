"""Cross-entropy of the next token, the vocabulary possibly sharded, with or without the last product inside.

A rank computes two numbers a token from the logits that it holds: the log of their summed exponentials, and their
mean under the target distribution, which is the label's logit (0 where another rank holds it) or with label smoothing
a weighted sum of all. These, not logits, are then combined over the ranks: as in Megatron's vocab-parallel
cross-entropy, but once for all chunks. Statistics are in fp32 (float64 for float64).

Every form of the loss is made of the two, lse and target: lse - target + z_loss · lse².
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
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
    label_smoothing, z_loss, softcap: as in `cross_entropy`.
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

    vocab_size = _global_vocabulary(vocab, sh, vocab_size)
    form = _form("linear_cross_entropy", label_smoothing, z_loss, softcap, vocab_size)

    def local(x: Tensor, w: Tensor, held: Tensor, filling: Tensor | None) -> tuple[Tensor, Tensor]:
        args = x.flatten(0, -2), w, held.flatten(), filling, rows, chunk, *form
        lse, target = apply_function(_LinearStatistics, *args)
        return lse.view(labels.shape), target.view(labels.shape)

    sides = "batch seq embed | vocab", side
    return _loss(local, (x, w), sides, labels, vocab, ignore_index, z_loss, sh, vocab_size)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    sh: Any = None,
    vocab_size: int | None = None,
) -> Tensor:
    """-log softmax(logits)[label] of each token: logits[batch seq vocab], labels int[batch seq] -> [batch seq], fp32
    or wider.

    0 at tokens whose label is `ignore_index`. Backward keeps the logits; `linear_cross_entropy` does not.

    label_smoothing: this part, 0 to 1, of the target distribution is uniform over the whole vocabulary, the label's
        own entry included (Szegedy et al. 2016; as in torch.nn.functional.cross_entropy).
    z_loss: adds z_loss · lse² for the log lse of the softmax's denominator, which keeps it near 0 (PaLM, Chowdhery et
        al. 2022, uses 1e-4).
    softcap: logits become softcap · tanh(logits / softcap) before anything else (Gemma 2 uses 30).
    sh: the vocabulary may be sharded; each form above is that of the whole one.
    vocab_size: the global size of vocab (default: that of equal shards).

    Raises UserError for options out of range and for shapes that disagree.
    """
    if logits.shape[:-1] != labels.shape:
        raise UserError(f"cross_entropy: logits {tuple(logits.shape)} and labels {tuple(labels.shape)} disagree")
    vocab = logits.shape[-1]
    vocab_size = _global_vocabulary(vocab, sh, vocab_size)
    form = _form("cross_entropy", label_smoothing, z_loss, softcap, vocab_size)

    def local(logits: Tensor, held: Tensor, filling: Tensor | None) -> tuple[Tensor, Tensor]:
        return apply_function(_Statistics, logits, held, filling, *form)

    return _loss(local, (logits,), ("batch seq vocab",), labels, vocab, ignore_index, z_loss, sh, vocab_size)


class _Form(NamedTuple):
    """What the two statistics of a token are made of."""

    cap: float | None  # logits are capped there
    label_share: float  # the label's part of the target distribution, beside
    every_share: float  # each entry's, the label's included; 0: no label smoothing


def _form(where: str, label_smoothing: float, z_loss: float, softcap: float | None, vocab_size: int) -> _Form:
    if not 0 <= label_smoothing <= 1:
        raise UserError(
            f"{where}(label_smoothing={label_smoothing}): a part of the target distribution, so between 0 and 1"
        )
    if not 0 <= z_loss < math.inf:
        raise UserError(f"{where}(z_loss={z_loss}): the factor of a penalty, so 0 or more")
    if softcap is not None and not 0 < softcap < math.inf:
        raise UserError(f"{where}(softcap={softcap}): a finite bound on logits above 0, or None for no cap")
    return _Form(softcap, 1.0 - label_smoothing, label_smoothing / vocab_size)


def _global_vocabulary(vocab: int, sh: Any, vocab_size: int | None) -> int:
    if not sharded(sh, "vocab"):
        return vocab
    return global_size(sh, "vocab", vocab) if vocab_size is None else vocab_size


def _capped(logits: Tensor, cap: float | None, in_place: bool = False) -> Tensor:
    if cap is None:
        return logits
    return logits.div_(cap).tanh_().mul_(cap) if in_place else (logits / cap).tanh() * cap


def _hidden(logits: Tensor, filling: Tensor | None, in_place: bool = False) -> Tensor:
    """Logits without those of what fills up an uneven part of the vocabulary: the least number, which no softmax sees.
    (Infinity would be NaN where a whole part is filling.)"""
    if filling is None:
        return logits
    least = torch.finfo(logits.dtype).min
    return logits.masked_fill_(filling, least) if in_place else logits.masked_fill(filling, least)


def _zeroed(values: Tensor, filling: Tensor | None) -> Tensor:
    return values if filling is None else values.masked_fill(filling, 0)


def _loss(
    local: Any,
    args: tuple[Tensor, ...],
    sides: tuple[str, ...],
    labels: Tensor,
    vocab: int,
    ignore_index: int,
    z_loss: float,
    sh: Any,
    vocab_size: int,
) -> Tensor:
    """From `local(*args, held labels, filling or None) -> (lse, target)`, both [batch seq], to the loss of each token.
    filling: bool[vocab], which entries only fill up this rank's part of a vocabulary that does not divide.

    Over a sharded vocab the last dim of the two is `vocab`, of which each rank holds one element.
    """
    ignored = labels == ignore_index
    if not sharded(sh, "vocab"):
        lse, target = local(*args, labels.masked_fill(ignored, -1), None)
    else:
        ids = sh.index("vocab", vocab_size, device=labels.device)

        def held_here(*args: Tensor) -> Any:
            *args, labels, ids = args  # type: ignore[assignment]
            at = labels - ids[:1]
            filling = None if sh.uneven_size("vocab") is None else ids < 0
            end = vocab if filling is None else (~filling).sum()
            lse, target = local(*args, at.where((at >= 0) & (at < end) & ~ignored, -1), filling)
            return lse[..., None], target[..., None]

        results = ("batch seq vocab", "batch seq vocab")
        lse, target = sh.primitive(held_here, (*args, labels, ids), (*sides, "batch seq", "vocab"), results)
        most = sh.max(lse, "batch seq vocab -> batch seq | vocab")
        total = sh.sum((lse - most[..., None]).exp(), "batch seq vocab -> batch seq")
        # `most` is equal everywhere and needs no gradient: it cancels
        lse, target = total.log() + most, sh.sum(target, "batch seq vocab -> batch seq")
    loss = lse - target
    if z_loss:
        loss = loss + z_loss * lse.square()
    return loss.masked_fill(ignored, 0)


class _Statistics(Function):
    """(logits[... vocab], labels[...], -1 for none, filling or None, cap, label_share, every_share) -> (lse, target),
    both [...]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor,
        labels: Tensor,
        filling: Tensor | None,
        cap: float | None,
        label_share: float,
        every_share: float,
    ) -> tuple[Tensor, Tensor]:
        capped = _capped(logits.to(wide(logits.dtype)), cap)
        lse = _hidden(capped, filling).logsumexp(-1)
        label = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0].to(lse.dtype)
        target = _capped(label, cap).masked_fill(labels < 0, 0)
        if every_share:
            target = target * label_share + _zeroed(capped, filling).sum(-1) * every_share
        return lse, target

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, labels, filling, *ctx.form = inputs
        ctx.save_for_backward(logits, labels, filling, output[0])

    @staticmethod
    def backward(ctx: Any, g_lse: Tensor, g_target: Tensor) -> Any:
        logits, labels, filling, lse = ctx.saved_tensors
        cap, label_share, every_share = ctx.form
        capped = _capped(logits if cap is None else logits.to(lse.dtype), cap)
        g = (_hidden(capped, filling) - lse[..., None]).exp() * g_lse[..., None]
        at, g_label = labels.clamp(min=0)[..., None], g_target.masked_fill(labels < 0, 0)
        if every_share:
            g, g_label = g + (g_target * every_share)[..., None], g_label * label_share
        g = g.scatter_add(-1, at, g_label[..., None])
        if cap is not None:
            g = g * (1 - (capped / cap).square())
        return _zeroed(g, filling).to(logits.dtype), *[None] * 5


class _LinearStatistics(Function):
    """(x[token embed], w, labels[token], filling or None, w is [vocab embed]?, chunk, cap, label_share, every_share) ->
    (lse, target), both [token]."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, labels: Tensor, filling: Tensor | None, *options: Any) -> Any:
        return torch.ops.fmegatron.linear_statistics(x, w, labels, filling, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, labels, filling, *ctx.options = inputs
        ctx.save_for_backward(x, w, labels, filling)

    @staticmethod
    def backward(ctx: Any, g_lse: Tensor, g_target: Tensor) -> Any:
        need_x, need_w = ctx.needs_input_grad[:2]
        args = *ctx.saved_tensors, g_lse, g_target, *ctx.options
        if graph_wanted():
            gx, gw = apply_function(_LinearStatisticsBackward, *args)
        else:
            gx, gw = torch.ops.fmegatron.linear_statistics_backward(*args, need_x, need_w)
        return gx if need_x else None, gw if need_w else None, *[None] * 7

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return each_example(_LinearStatistics, info, in_dims, args)


class _LinearStatisticsBackward(Function):
    """(x, w, labels, filling or None, g_lse, g_target, options…) -> (gx, gw), whose own backward is in plain
    operations."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return tuple(torch.ops.fmegatron.linear_statistics_backward(*args, True, True))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.options = inputs[6:]
        ctx.save_for_backward(*inputs[:6])

    @staticmethod
    def backward(ctx: Any, ax: Tensor, aw: Tensor) -> Any:
        x, w, labels, filling, g_lse, g_target = ctx.saved_tensors
        gx, gw, *others = _second_order(x, w, labels, filling, g_lse, g_target, ax, aw, *ctx.options)
        return gx, gw, None, None, *others, *[None] * 5

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
def _linear_statistics_op(
    x: Tensor,
    w: Tensor,
    labels: Tensor,
    filling: Tensor | None,
    rows: bool,
    chunk: int,
    cap: float | None,
    label_share: float,
    every_share: float,
) -> tuple[Tensor, Tensor]:
    dtype = wide(x.dtype)
    w = w.t() if rows else w
    lse, target = (torch.empty(x.shape[0], dtype=dtype, device=x.device) for _ in range(2))
    for start in range(0, x.shape[0], chunk):
        part = slice(start, start + chunk)
        logits, at = _capped(_product(x[part], w, dtype), cap, in_place=True), labels[part]
        label = logits.gather(-1, at.clamp(min=0)[:, None])[:, 0].masked_fill_(at < 0, 0)
        if every_share:
            label = label * label_share + _zeroed(logits, filling).sum(-1) * every_share
        target[part] = label
        logits = _hidden(logits, filling, in_place=True)
        # softmax is torch's one fused pass; its largest value is 1 / sum(exp(logits - most))
        lse[part] = logits.amax(-1) - logits.softmax(-1).amax(-1).log()
    return lse, target


@_linear_statistics_op.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], dtype=wide(x.dtype)), x.new_empty(x.shape[0], dtype=wide(x.dtype))


@torch.library.custom_op("fmegatron::linear_statistics_backward", mutates_args=())
def _linear_statistics_backward_op(
    x: Tensor,
    w: Tensor,
    labels: Tensor,
    filling: Tensor | None,
    g_lse: Tensor,
    g_target: Tensor,
    rows: bool,
    chunk: int,
    cap: float | None,
    label_share: float,
    every_share: float,
    need_x: bool,
    need_w: bool,
) -> tuple[Tensor, Tensor]:
    """(gx, gw), an empty tensor for one that is not needed. gw is summed over chunks in fp32 or wider."""
    dtype, wt = wide(x.dtype), w if rows else w.t()
    gx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else x.new_empty(0)
    gw = torch.zeros(w.shape, dtype=dtype, device=w.device) if need_w else w.new_empty(0)
    for start in range(0, x.shape[0], chunk):
        part = slice(start, start + chunk)
        logits = _capped(_product(x[part], wt.t(), dtype), cap, in_place=True)
        p = _hidden(logits, filling).softmax(-1)
        slope = None if cap is None else logits.div_(cap).square_().neg_().add_(1)
        del logits
        g = _logits_gradient(p, slope, labels[part], g_lse[part], g_target[part], label_share, every_share, x.dtype)
        g = g if filling is None else g.masked_fill_(filling, 0)
        del p, slope
        if need_x:
            gx[part] = g @ wt
        if need_w:
            _add_product(gw, *((g.t(), x[part]) if rows else (x[part].t(), g)))
    return gx, gw.to(w.dtype)


@_linear_statistics_backward_op.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    need_x, need_w = rest[-2:]
    return x.new_empty(x.shape if need_x else 0), w.new_empty(w.shape if need_w else 0)


def _logits_gradient(
    p: Tensor,
    slope: Tensor | None,
    labels: Tensor,
    g_lse: Tensor,
    g_target: Tensor,
    label_share: float,
    every_share: float,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient, in `dtype`, by logits[token vocab] before their cap, whose derivative is `slope`; p is the softmax
    behind it and may be overwritten."""
    here, at = labels >= 0, labels.clamp(min=0)[:, None]
    share = here.to(p.dtype) * label_share + every_share if every_share else here
    at_label = p.gather(-1, at)[:, 0] * g_lse + g_target * share
    # only the last operation over all logits rounds
    g = p if p.dtype == dtype or slope is not None else torch.empty_like(p, dtype=dtype)
    if every_share:
        torch.addcmul((g_target * every_share)[:, None], p, g_lse[:, None], out=g)
    else:
        torch.mul(p, g_lse[:, None], out=g)
    g.scatter_(-1, at, at_label.to(g.dtype)[:, None])
    if slope is None:
        return g
    return torch.mul(g, slope, out=g if g.dtype == dtype else torch.empty_like(g, dtype=dtype))


def _second_order(
    x: Tensor,
    w: Tensor,
    labels: Tensor,
    filling: Tensor | None,
    g_lse: Tensor,
    g_target: Tensor,
    ax: Tensor,
    aw: Tensor,
    rows: bool,
    chunk: int,
    cap: float | None,
    label_share: float,
    every_share: float,
) -> list[Tensor]:
    """Gradients of sum(ax gx) + sum(aw gw), of the backward's results, by (x, w, g_lse, g_target).

    With logits c = cap(x w), p = softmax(c), q the target distribution and s = dc/d(x w) = 1 - (c / cap)²:
    g_c = p g_lse + q g_target,  g = g_c s,  gx = g wᵀ,  gw = xᵀ g. Functional throughout, so that torch can map it
    and differentiate it again.
    """
    dtype = g_lse.dtype
    we, awe = (t.to(dtype).t() if rows else t.to(dtype) for t in (w, aw))
    by_token: list[list[Tensor]] = []
    gw: Any = 0
    for start in range(0, x.shape[0], chunk):
        part = slice(start, start + chunk)
        xp, axp, at = x[part].to(dtype), ax[part].to(dtype), labels[part].clamp(min=0)[:, None]
        here = labels[part] >= 0
        share = here.to(dtype) * label_share if every_share else here
        c = _capped(xp @ we, cap)
        p = _hidden(c, filling).softmax(-1)
        g = (p * g_lse[part, None]).scatter_add(-1, at, (g_target[part] * share)[:, None])
        if every_share:
            g = g + (g_target[part] * every_share)[:, None]
        g, g_g = _zeroed(g, filling), _zeroed(axp @ we + xp @ awe, filling)
        slope: Any = 1
        if cap is not None:
            slope = 1 - (c / cap).square()
            through_slope = g_g * g * c * (-2 / cap**2)
            g, g_g = g * slope, g_g * slope
        along = (g_g * p).sum(-1)
        g_logits = (g_g - along[:, None]) * p * g_lse[part, None]
        if cap is not None:
            g_logits = (g_logits + through_slope) * slope
        g_target_here = g_g.gather(-1, at)[:, 0] * share
        if every_share:
            g_target_here = g_target_here + g_g.sum(-1) * every_share
        by_token.append([g @ awe.t() + g_logits @ we.t(), along, g_target_here])  # by x, g_lse, g_target
        gw = gw + axp.t() @ g + xp.t() @ g_logits
    gx, *others = (torch.cat(parts) for parts in zip(*by_token, strict=True))
    return [gx.to(x.dtype), (gw.t() if rows else gw).to(w.dtype), *others]
