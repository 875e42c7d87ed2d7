"""Cross-entropy of the next token, the vocabulary possibly sharded, with or without the last product inside.

A rank computes two numbers a token from the logits that it holds: the log of their summed exponentials, and their
mean under the target distribution, which is the label's logit (0 where another rank holds it) or with label smoothing
a weighted sum of all. These, not logits, are then combined over the ranks: as in Megatron's vocab-parallel
cross-entropy, but once for all chunks. Statistics are in fp32 (float64 for float64).

Every form of the loss is made of the two, lse and target: lse - target + z_loss · lse².
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from fmegatron.errors import UserError
from fmegatron.function import apply_function
from fmegatron.kernels import chosen
from fmegatron.primitives._function import (
    cast,
    each_example,
    global_size,
    graph_wanted,
    may_overwrite,
    operator,
    sharded,
    wide,
)

CHUNK_ELEMENTS = {"cpu": 1 << 21}  # logits at once; on CPU they should stay in cache
CHUNK_ELEMENTS_ELSEWHERE = 1 << 26
KEPT_ELEMENTS = 1 << 30  # probabilities that are kept unless told otherwise, on CUDA in half precision: 2 GiB


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
    keep: bool | None = None,
    kernel: str = "auto",
) -> Tensor:
    """-log softmax(x w)[label] of each token: x[batch seq embed], w[embed vocab], labels int[batch seq] -> [batch
    seq], fp32 or wider.

    0 at tokens whose label is `ignore_index`. At most `chunk` tokens' logits exist at a time, in fp32. Backward keeps x,
    w and the labels, and computes logits again (as in Cut Your Losses, Wijmans et al. 2024), or with `keep` the
    probabilities too. Products take the arguments' dtype and sum in fp32. On CUDA a vocabulary with which rows of logits
    would begin anywhere, such as an odd one, is filled up in a copy of w.

    equation: "batch seq embed, vocab embed -> batch seq vocab" for a w of that order (a tied embedding).
    sh: x is in the region of vocab ("batch seq* embed -> batch seq embed | vocab"), where its gradient is summed;
        labels are global ids.
    vocab_size: the global size of vocab (default: that of equal shards).
    label_smoothing, z_loss, softcap: as in `cross_entropy`.
    chunk: tokens; default: by the size of the vocabulary.
    keep: the probabilities of every token, in x's dtype, from forward to backward, which then needs no logits: a quarter
        of the products less, for tokens · vocab elements of memory. Not with label_smoothing or softcap, nor a
        vocabulary that does not divide over ranks. None: on CUDA in half precision up to `KEPT_ELEMENTS`.
    kernel: "triton": one pass each over logits for their statistics and their gradient; "torch": torch's operations;
        "auto": the first on CUDA (see `fmegatron.kernels`).
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
    fast = chosen("linear_cross_entropy", kernel, x, w)
    keepable = form.cap is None and not form.every_share
    if keep and not keepable:
        raise UserError(
            "linear_cross_entropy(keep=True) with label_smoothing or softcap: these compute logits again; leave keep out"
        )

    tape = None if sh is None else sh.tape

    def local(x: Tensor, w: Tensor, held: Tensor, filling: Tensor | None) -> tuple[Tensor, Tensor]:
        kept = keep if keep is not None else _worth_keeping(x, vocab)
        kept = kept and keepable and filling is None
        w, logits = (w, None) if tape is None else _tapped(tape, x.flatten(0, -2), w, vocab, rows)
        if logits is None and (more := _entries_to_add(x, vocab)):
            w, filling = _filled(w, filling, more, rows)
        args = x, w, held, filling, logits, rows, chunk, *form, kept, fast
        lse, target, _ = apply_function(_LinearStatistics, *args)
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


def _worth_keeping(x: Tensor, vocab: int) -> bool:
    half = x.dtype in (torch.bfloat16, torch.float16)
    return x.device.type == "cuda" and half and x.numel() // x.shape[-1] * vocab <= KEPT_ELEMENTS


def _entries_to_add(x: Tensor, vocab: int) -> int:
    """With how many more entries the rows of logits would begin at multiples of 16 bytes. On CUDA products of others are slow:
    a recorded step of GPT-2 124M, with 50,257 entries, took 67 ms on an H200 without these and 39 with them."""
    return -vocab % 64 if x.device.type != "cpu" and vocab * x.element_size() % 16 else 0  # (meta: what a plan sees)


def _filled(w: Tensor, filling: Tensor | None, more: int, rows: bool) -> tuple[Tensor, Tensor]:
    """(w with entries of zeros behind its own, filling with these)."""
    dim = 0 if rows else 1
    shape = (more, w.shape[1]) if rows else (w.shape[0], more)
    mine = torch.zeros(w.shape[dim], dtype=torch.bool, device=w.device) if filling is None else filling
    return torch.cat([w, w.new_zeros(shape)], dim), torch.cat([mine, mine.new_ones(more)])


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


def _tapped(tape: Any, x: Tensor, w: Tensor, vocab: int, rows: bool) -> tuple[Tensor, Tensor | None]:
    """(w, a tensor without data that stands for the logits, whose gradient the loss gives it instead of w's), where
    the product is to be tapped (see `fmegatron.tape`); else (w, None)."""
    w, _ = tape.enter("linear_cross_entropy", w)
    tapped = tape.leaf is not None or tape.tap is not None

    def weight_gradient(x: Tensor, g: Tensor) -> Tensor:
        return g.t() @ x if rows else x.t() @ g

    logits = x.new_zeros(()).expand(x.shape[0], vocab)
    logits, *_ = tape.leave("linear_cross_entropy", [logits], [x], weight_gradient)
    return w, logits if tapped else None


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
    """(x[... embed], w, labels[...], filling or None, logits[token vocab] or None, w is [vocab embed]?, chunk, cap,
    label_share, every_share, keep, fast) -> (lse, target, both [token]; probabilities[token vocab] if they are kept,
    else empty).

    logits: stands for x w, without data; it gets a gradient, so that w's can be made of it later.
    fast: by Triton's kernels.
    """

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, labels: Tensor, filling: Tensor | None, logits: Tensor | None, *options: Any
    ) -> Any:
        return _linear_statistics_op(x.flatten(0, -2), w, labels.flatten(), filling, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, labels, filling, _, *ctx.options = inputs
        (lse, target, kept), (keep, fast) = output, ctx.options[-2:]
        ctx.mark_non_differentiable(kept)
        ctx.set_materialize_grads(False)  # or zeros would be made as the gradient of what is kept
        ctx.overwritten = False
        of_kept = (lse if keep or fast else None, target if keep else None, kept if keep else None)
        ctx.save_for_backward(x, w, labels, filling, *of_kept)

    @staticmethod
    def backward(ctx: Any, g_lse: Tensor | None, g_target: Tensor | None, _: Any) -> Any:
        if g_lse is None:
            if g_target is None:
                return (None,) * 12
            g_lse = torch.zeros_like(g_target)
        g_target = torch.zeros_like(g_lse) if g_target is None else g_target
        need_x, need_w, _, _, need_logits = ctx.needs_input_grad[:5]
        x, w, labels, filling, lse, target, kept = ctx.saved_tensors
        *options, keep, fast = ctx.options
        shape, x = x.shape, x.flatten(0, -2)
        labels = labels.flatten()
        args = x, w, labels, filling, g_lse, g_target
        g = None
        if need_logits:
            once = kept if keep and not ctx.overwritten else None  # see below
            ctx.overwritten = ctx.overwritten or once is not None
            gx, gw, g = _with_logits(args, lse, target, once, *options, need_x, need_w, fast)
        elif graph_wanted():
            gx, gw = apply_function(_LinearStatisticsBackward, *args, *options)
        elif keep and not ctx.overwritten:
            # in place, once: a second backward of one graph computes logits again
            ctx.overwritten = may_overwrite()
            of = kept.data if ctx.overwritten else kept  # (whose version, which autograd checks, stays)
            how = _kept_gradients if ctx.overwritten else torch.ops.fmegatron.kept_statistics_backward
            gx, gw = how(x, w, labels, lse, target, of, g_lse, g_target, options[0], need_x, need_w, fast)
        else:
            gx, gw = _linear_statistics_backward_op(*args, lse, *options, need_x, need_w, fast)
        return gx.view(shape) if need_x else None, gw if need_w else None, None, None, g, *[None] * 7

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return each_example(_LinearStatistics, info, in_dims, args)


class _LinearStatisticsBackward(Function):
    """(x, w, labels, filling or None, g_lse, g_target, options…) -> (gx, gw), whose own backward is in plain
    operations."""

    @staticmethod
    def forward(*args: Any) -> Any:
        tensors, options = args[:6], args[6:]
        return tuple(_linear_statistics_backward_op(*tensors, None, *options, True, True, False))

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


@operator("fmegatron::linear_statistics")
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
    keep: bool,
    fast: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = wide(x.dtype)
    w = w.t() if rows else w
    form = _Form(cap, label_share, every_share)
    if x.shape[0] <= chunk and not fast:
        lse, target, p = _statistics_of(_product(x, w, dtype), labels, filling, form)
        return lse, target, cast(p, x.dtype) if keep else x.new_empty(_kept_shape(x, w.shape[1], keep))
    lse, target = (torch.empty(x.shape[0], dtype=dtype, device=x.device) for _ in range(2))
    kept = torch.empty(_kept_shape(x, w.shape[1], keep), dtype=x.dtype, device=x.device)
    for start in range(0, x.shape[0], chunk):
        part = slice(start, start + chunk)
        logits, at = _product(x[part], w, dtype), labels[part]
        if fast:
            from fmegatron.kernels import softmax

            into = lse[part], target[part], kept[part] if keep else None
            softmax.statistics(logits, at, filling, *into, *form)
            continue
        lse[part], target[part], p = _statistics_of(logits, at, filling, form)
        if keep:
            kept[part] = p
    return lse, target, kept


def _statistics_of(
    logits: Tensor, labels: Tensor, filling: Tensor | None, form: _Form
) -> tuple[Tensor, Tensor, Tensor]:
    """(lse, target, softmax) of logits[token vocab], which may be overwritten."""
    logits = _capped(logits, form.cap, in_place=True)
    target = -functional.nll_loss(logits, labels, reduction="none", ignore_index=-1)  # the label's logit, or 0
    if form.every_share:
        target = target * form.label_share + _zeroed(logits, filling).sum(-1) * form.every_share
    logits = _hidden(logits, filling, in_place=True)
    # softmax is torch's one fused pass; its largest value is 1 / sum(exp(logits - most))
    most, p = logits.amax(-1), logits.softmax(-1)
    return most - p.amax(-1).log(), target, p


@_linear_statistics_op.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, keep = rest[2], rest[-2]
    lse, target = (x.new_empty(x.shape[0], dtype=wide(x.dtype)) for _ in range(2))
    return lse, target, x.new_empty(_kept_shape(x, w.shape[0 if rows else 1], keep))


def _kept_shape(x: Tensor, vocab: int, keep: bool) -> tuple[int, int]:
    return (x.shape[0], vocab) if keep else (0, 0)


@operator("fmegatron::linear_statistics_backward")
def _linear_statistics_backward_op(
    x: Tensor,
    w: Tensor,
    labels: Tensor,
    filling: Tensor | None,
    g_lse: Tensor,
    g_target: Tensor,
    lse: Tensor | None,
    rows: bool,
    chunk: int,
    cap: float | None,
    label_share: float,
    every_share: float,
    need_x: bool,
    need_w: bool,
    fast: bool,
) -> tuple[Tensor, Tensor]:
    """(gx, gw), an empty tensor for one that is not needed. gw is summed over chunks in fp32 or wider. lse: needed if
    `fast`."""
    dtype, wt = wide(x.dtype), w if rows else w.t()
    form = _Form(cap, label_share, every_share)
    if x.shape[0] <= chunk:
        ((_, g),) = _logits_gradients(x, w, labels, filling, g_lse, g_target, lse, rows, chunk, form, fast)
        gx = g @ wt if need_x else x.new_empty(0)
        gw = _product(*((g.t(), x) if rows else (x.t(), g)), dtype) if need_w else w.new_empty(0)
        return gx, cast(gw, w.dtype)
    gx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else x.new_empty(0)
    gw = torch.zeros(w.shape, dtype=dtype, device=w.device) if need_w else w.new_empty(0)
    for part, g in _logits_gradients(x, w, labels, filling, g_lse, g_target, lse, rows, chunk, form, fast):
        if need_x:
            gx[part] = g @ wt
        if need_w:
            _add_product(gw, *((g.t(), x[part]) if rows else (x[part].t(), g)))
    return gx, gw.to(w.dtype)


@_linear_statistics_backward_op.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    need_x, need_w = rest[-3:-1]
    return x.new_empty(x.shape if need_x else 0), w.new_empty(w.shape if need_w else 0)


def _kept_gradients(
    x: Tensor,
    w: Tensor,
    labels: Tensor,
    lse: Tensor,
    target: Tensor,
    kept: Tensor,
    g_lse: Tensor,
    g_target: Tensor,
    rows: bool,
    need_x: bool,
    need_w: bool,
    fast: bool,
    overwrite: bool = True,
) -> tuple[Tensor, Tensor]:
    """(gx, gw) from kept probabilities, of which the gradient by logits may take the place."""
    g = kept if overwrite else torch.empty_like(kept)
    if fast:
        from fmegatron.kernels import softmax

        softmax.gradient(kept, labels, None, lse, target, g_lse.contiguous(), g_target.contiguous(), g, None, 1.0, 0.0)
    else:
        here, at = labels >= 0, labels.clamp(min=0)[:, None]
        own = (target - lse).exp().where(here, kept.gather(-1, at)[:, 0].to(lse.dtype))  # not rounded
        torch.mul(kept, g_lse[:, None].to(kept.dtype), out=g)
        g.scatter_(-1, at, (own * g_lse + g_target * here).to(g.dtype)[:, None])
    gx = g @ (w if rows else w.t()) if need_x else x.new_empty(0)
    gw = (g.t() @ x if rows else x.t() @ g) if need_w else w.new_empty(0)
    return gx, gw


@operator("fmegatron::kept_statistics_backward")
def _kept_statistics_backward_op(
    x: Tensor,
    w: Tensor,
    labels: Tensor,
    lse: Tensor,
    target: Tensor,
    kept: Tensor,
    g_lse: Tensor,
    g_target: Tensor,
    rows: bool,
    need_x: bool,
    need_w: bool,
    fast: bool,
) -> tuple[Tensor, Tensor]:
    args = x, w, labels, lse, target, kept, g_lse, g_target, rows, need_x, need_w, fast
    return _kept_gradients(*args, overwrite=False)


@_kept_statistics_backward_op.register_fake
def _(x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    need_x, need_w = rest[-3:-1]
    return x.new_empty(x.shape if need_x else 0), w.new_empty(w.shape if need_w else 0)


def _with_logits(
    args: tuple[Any, ...],
    lse: Tensor | None,
    target: Tensor | None,
    kept: Tensor | None,
    rows: bool,
    chunk: int,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gx, gw, the gradient by all logits in x's dtype, in memory of that size, or in place of the kept probabilities)."""
    x, w, labels, filling, g_lse, g_target = args
    *form, need_x, need_w, fast = rest
    if kept is not None:
        assert lse is not None and target is not None
        g = kept.data
        gx, gw = _kept_gradients(x, w, labels, lse, target, g, g_lse, g_target, rows, need_x, need_w, fast)
        return gx, gw, g
    g = torch.empty((x.shape[0], w.shape[0 if rows else 1]), dtype=x.dtype, device=x.device)
    for _ in _logits_gradients(x, w, labels, filling, g_lse, g_target, lse, rows, chunk, _Form(*form), fast, g):
        pass
    wt = w if rows else w.t()
    gx = g @ wt if need_x else x.new_empty(0)
    gw = (g.t() @ x if rows else x.t() @ g) if need_w else w.new_empty(0)
    return gx, gw, g


def _logits_gradients(
    x: Tensor,
    w: Tensor,
    labels: Tensor,
    filling: Tensor | None,
    g_lse: Tensor,
    g_target: Tensor,
    lse: Tensor | None,
    rows: bool,
    chunk: int,
    form: _Form,
    fast: bool,
    whole: Tensor | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """(tokens, the gradient by their logits in x's dtype) of every chunk: its rows of `whole`[token vocab], or memory that
    the next may take over. lse: needed if `fast`."""
    w = w.t() if rows else w
    room = (
        torch.empty((min(chunk, x.shape[0]), w.shape[1]), dtype=x.dtype, device=x.device)
        if fast and whole is None
        else x
    )
    for start in range(0, x.shape[0], chunk):
        part = slice(start, start + chunk)
        mine, at, by_lse, by_target = (t if t.shape[0] <= chunk else t[part] for t in (x, labels, g_lse, g_target))
        logits = _product(mine, w, wide(x.dtype))
        if fast:
            from fmegatron.kernels import softmax

            assert lse is not None
            g = room[: logits.shape[0]] if whole is None else whole[part]
            by_lse, by_target = by_lse.contiguous(), by_target.contiguous()
            softmax.gradient(logits, at, filling, lse[part], None, by_lse, by_target, g, *form)
            del logits
        else:
            logits = _capped(logits, form.cap, in_place=True)
            p = _hidden(logits, filling).softmax(-1)
            slope = None if form.cap is None else logits.div_(form.cap).square_().neg_().add_(1)
            del logits
            shares = form.label_share, form.every_share
            g = _logits_gradient(p, slope, at, by_lse, by_target, *shares, x.dtype)
            g = g if filling is None else g.masked_fill_(filling, 0)
            del p, slope
            if whole is not None:
                whole[part] = g
        yield part, g


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
