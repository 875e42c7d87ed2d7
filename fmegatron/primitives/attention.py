"""Attention with memory linear in the sequence, for every mask.

The output and its log-sum-exp are kept for backward, which computes the probabilities again, block by block (Dao et
al. 2022). Device, dtype and mask decide which kernel does it:

- CPU: torch's flash kernel, over blocks of queries where there is a mask that the kernel lacks;
- CUDA, half precision, queries and keys in plain order: cuDNN's or torch's flash kernel, with documents the
  latter's variable-length form;
- everything else: the same mathematics in plain torch operations, over blocks of queries.

Shapes inside: q[batch q kv group head], k and v[batch k kv head], lse[batch q kv group].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from fmegatron.errors import UserError
from fmegatron.function import apply_function
from fmegatron.primitives._function import graph_wanted, wide


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    segments: Tensor | None = None,
    kv_segments: Tensor | None = None,
    positions: Tensor | None = None,
    kv_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    sh: Any = None,
    name: str = "attention",
) -> Tensor:
    """softmax(q kᵀ · scale, masked) v: q[batch seq kv group head], k and v[batch kvseq kv head] -> [batch seq kv
    group head].

    Each group of query heads shares one key and value head (grouped-query attention; `group` of 1: multi-head).

    causal: a query sees keys at its own position and before.
    positions, kv_positions: global positions, [seq] or [batch seq], in any order. None: plain order, the last query
        at the last key (so a query behind a cache of keys needs none). Leave them out where the order is plain: that
        is what the fast kernels take.
    segments: the document of each token, int[batch seq]; a token sees tokens of its own document only. The tokens of
        one document are adjacent. Positions that start again in each document are for `rotary`; here plain order does
        the same.
    kv_segments: of the keys, where they are not the queries'.
    cu_seqlens: instead of segments, int32[documents + 1]: where each document of the flattened [batch * seq] tokens
        starts, then their number (repeated at will). A document that crosses into the next row is cut there.
    scale: default 1 / sqrt(head).
    name: under which a `remat` policy can save its outputs.

    A query that sees no key gives zeros. Under `sh` the heads are local, and keys and values are on one rank or
    gathered. Raises UserError for shapes or masks that do not fit.
    """
    _check(q, k, v, segments, kv_segments, positions, kv_positions, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if cu_seqlens is not None and segments is None:
        segments = segments_of(cu_seqlens, q.shape[0], q.shape[1])
    if not causal:
        positions = kv_positions = None
    # Below, None for the keys' means the queries' own: dynamo refuses a Function that gets one tensor twice.
    kv_positions = None if kv_positions is positions else kv_positions
    kv_segments = None if kv_segments is segments else kv_segments
    v = v.view_as(v) if v is k else v
    masks = [positions, kv_positions, segments, kv_segments, cu_seqlens]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tape = None if sh is None else sh.tape
        saved = None if tape is None else tape.enter(name)[1]
        o, lse = apply_function(_Attention, q, k, v, *masks, *(saved or (None, None)), causal, scale)
        return o if tape is None else tape.leave(name, [o, lse])[0]

    if sh is None:
        return run(q, k, v)
    key_side = "batch kvseq kv head | seq group"
    return sh.primitive(run, (q, k, v), ("batch seq kv group head", key_side, key_side), "batch seq kv group head")


def segments_of(cu_seqlens: Tensor, batch: int, seq: int) -> Tensor:
    """int32[batch seq] document numbers of the starts in `cu_seqlens` (see `attention`)."""
    token = torch.arange(batch * seq, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, token, right=True, out_int32=True).view(batch, seq)


def cu_seqlens_of(segments: Tensor, documents: int | None = None) -> Tensor:
    """int32[documents + 1] starts of the documents of segments[batch seq], then the number of tokens (see `attention`).

    documents: at least as many as there are, counted per row; None: counted, which waits for the device. With it the
        result's shape is known before, and the spare entries repeat the end.
    """
    starts = functional.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True).flatten()
    total = starts.numel()
    if documents is None:
        places = starts.nonzero().flatten()
        return torch.cat([places, places.new_full((1,), total)]).to(torch.int32)
    number = (starts.cumsum(0) - 1).where(starts, documents).clamp(max=documents)
    out = torch.full((documents + 1,), total, dtype=torch.int32, device=segments.device)
    token = torch.arange(total, dtype=torch.int32, device=segments.device)
    return out.scatter_reduce(0, number, token.where(starts, total), "amin")


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    kv_segments: Tensor | None,
    positions: Tensor | None,
    kv_positions: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    if q.ndim != 5 or k.ndim != 4:
        raise UserError(
            f"attention(q, k): q has {q.ndim} dims and k {k.ndim}, not 5 (batch seq kv group head) and "
            "4 (batch seq kv head)"
        )
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[2:] != (q.shape[2], q.shape[4]):
        raise UserError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} disagree in batch, kv or head"
        )
    if q.shape[1] != k.shape[1]:
        for given, other, what in ((segments, kv_segments, "segments"), (positions, kv_positions, "positions")):
            if given is not None and other is None:
                raise UserError(
                    f"attention: {q.shape[1]} queries and {k.shape[1]} keys, so kv_{what} must be given with {what}"
                )
        if cu_seqlens is not None:
            raise UserError(
                "attention(cu_seqlens=…) needs as many keys as queries; give segments and kv_segments instead"
            )
    if (segments is None and kv_segments is not None) or (positions is None and kv_positions is not None):
        raise UserError("attention: kv_segments and kv_positions are given together with segments and positions")


class _Attention(Function):
    """(q, k, v, masks…, saved o, saved lse, causal, scale) -> (o, lse). With saved outputs only the graph is made."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        *masks, o, lse, causal, scale = rest
        if o is not None:
            return o.view_as(o), lse.view_as(lse)
        return torch.ops.fmegatron.attention(q, k, v, *masks, causal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, _, _, ctx.causal, ctx.scale = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, go: Tensor | None, glse: Tensor | None) -> Any:
        *tensors, o, lse = ctx.saved_tensors
        if go is None and glse is None:
            return (None,) * 12
        go = torch.zeros_like(o) if go is None else go
        args = *tensors, o, lse, go, glse, ctx.causal, ctx.scale
        if graph_wanted():
            grads = apply_function(_AttentionBackward, *args)
        else:
            grads = torch.ops.fmegatron.attention_backward(*args)
        return *grads, *[None] * 9

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _fold(_Attention, info.batch_size, in_dims, args), (0, 0)


class _AttentionBackward(Function):
    """(q, k, v, masks…, o, lse, go, glse, causal, scale) -> (gq, gk, gv), whose own backward is in plain operations."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return tuple(torch.ops.fmegatron.attention_backward(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        q, k, v, *masks, o, lse, go, glse = ctx.saved_tensors
        mask = _Mask(q.shape[1], k.shape[1], ctx.causal, *masks[:4])
        grads = _second_order(q, k, v, mask, ctx.scale, o, lse, go, glse, *cotangents)
        gq, gk, gv, g_o, g_lse, g_go, g_glse = grads
        return gq, gk, gv, *[None] * 5, g_o, g_lse, g_go, None if glse is None else g_glse, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _fold(_AttentionBackward, info.batch_size, in_dims, args), (0, 0, 0)


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


# Kernels. They are operators of their own, so that compiled code and simulation see one operation, not a loop over
# blocks.


@torch.library.custom_op("fmegatron::attention", mutates_args=())
def _attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    kv_positions: Tensor | None,
    segments: Tensor | None,
    kv_segments: Tensor | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    mask = _Mask(q.shape[1], k.shape[1], causal, positions, kv_positions, segments, kv_segments)
    if q.device.type == "cpu":
        return _cpu_forward(q, k, v, mask, scale)
    if _flash_takes(q, mask):
        return _cuda_forward(q, k, v, mask, cu_seqlens, scale)
    return _block_forward(q, k, v, mask, scale)


@_attention_op.register_fake
def _(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


@torch.library.custom_op("fmegatron::attention_backward", mutates_args=())
def _attention_backward_op(
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
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    mask = _Mask(q.shape[1], k.shape[1], causal, positions, kv_positions, segments, kv_segments)
    if glse is None and q.device.type == "cpu":
        return _cpu_backward(q, k, v, mask, scale, o, lse, go)
    if glse is None and _flash_takes(q, mask):
        return _cuda_backward(q, k, v, mask, cu_seqlens, scale, o, lse, go)
    return _block_backward(q, k, v, mask, scale, o, lse, go, glse)


@_attention_backward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Mask:
    """Which of `keys` keys each of `queries` queries sees."""

    def __init__(
        self,
        queries: int,
        keys: int,
        causal: bool,
        positions: Tensor | None = None,
        kv_positions: Tensor | None = None,
        segments: Tensor | None = None,
        kv_segments: Tensor | None = None,
    ) -> None:
        self.queries, self.keys, self.causal = queries, keys, causal
        self.positions, self.segments = positions, segments
        self.kv_positions = positions if kv_positions is None else kv_positions
        self.kv_segments = segments if kv_segments is None else kv_segments

    @property
    def plain(self) -> bool:
        """Causal by order or not at all, and no documents."""
        return self.positions is None and self.segments is None

    def blocks(self, size: int) -> Iterator[tuple[slice, slice]]:
        """Blocks of at most `size` queries, each with the keys that it can see by order alone."""
        for start in range(0, self.queries, size):
            stop = min(start + size, self.queries)
            last = self.keys
            if self.causal and self.positions is None:
                last = min(max(stop + self.keys - self.queries, 0), self.keys)
            yield slice(start, stop), slice(0, last)

    def seen(self, rows: slice, columns: slice, device: torch.device) -> Tensor | None:
        """bool[batch or 1, rows, columns]; None: all."""
        seen = None
        if self.segments is not None and self.kv_segments is not None:
            seen = self.segments[:, rows, None] == self.kv_segments[:, None, columns]
        if not self.causal:
            return seen
        if self.positions is None or self.kv_positions is None:
            first = rows.start + self.keys - self.queries
            if columns.stop <= first + 1:
                return seen
            at = torch.arange(first, first + rows.stop - rows.start, device=device)[None]
            kv_at = torch.arange(columns.stop, device=device)[None]
        else:
            at = self.positions.view(-1, self.queries)[:, rows]
            kv_at = self.kv_positions.view(-1, self.keys)[:, columns]
        past = at[:, :, None] >= kv_at[:, None]
        return past if seen is None else seen & past


# In plain torch operations: the reference of the others, and all that is differentiable twice.

BLOCK_ELEMENTS = 1 << 25  # of a block of scores


def _block_size(q: Tensor, mask: _Mask) -> int:
    heads = q.shape[0] * q.shape[2] * q.shape[3]
    return max(1, BLOCK_ELEMENTS // max(1, heads * mask.keys))


def _scores(q: Tensor, k: Tensor, scale: float, seen: Tensor | None) -> Tensor:
    """[batch kv group q k]"""
    s = torch.einsum("bqngh,bknh->bngqk", q, k) * scale
    return s if seen is None else s.masked_fill(~seen[:, None, None], -torch.inf)


def _finite(lse: Tensor) -> Tensor:
    """With 0 for a query that sees no key, so that exp(-inf - lse) is 0."""
    return lse.masked_fill(lse == -torch.inf, 0)


def _block_forward(q: Tensor, k: Tensor, v: Tensor, mask: _Mask, scale: float) -> tuple[Tensor, Tensor]:
    o, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))
    kw, vw = k.to(wide(q.dtype)), v.to(wide(q.dtype))
    for rows, columns in mask.blocks(_block_size(q, mask)):
        s = _scores(q[:, rows].to(kw.dtype), kw[:, columns], scale, mask.seen(rows, columns, q.device))
        part = s.logsumexp(-1) if columns.stop else s.new_full(s.shape[:-1], -torch.inf)
        p = s.sub_(_finite(part)[..., None]).exp_()
        lse[:, rows] = part.movedim(-1, 1)
        o[:, rows] = torch.einsum("bngqk,bknh->bqngh", p, vw[:, columns]).to(o.dtype)
    return o, lse


def _block_backward(
    q: Tensor, k: Tensor, v: Tensor, mask: _Mask, scale: float, o: Tensor, lse: Tensor, go: Tensor, glse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = wide(q.dtype)
    gq = torch.empty_like(q, memory_format=torch.contiguous_format)
    kw, vw = k.to(dtype), v.to(dtype)
    gk, gv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (kw, vw))
    for rows, columns in mask.blocks(_block_size(q, mask)):
        qw, gow = q[:, rows].to(dtype), go[:, rows].to(dtype)
        s = _scores(qw, kw[:, columns], scale, mask.seen(rows, columns, q.device))
        p = s.sub_(_finite(lse[:, rows]).movedim(1, -1)[..., None]).exp_()
        shift = (gow * o[:, rows]).sum(-1)
        if glse is not None:
            shift = shift - glse[:, rows]
        gv[:, columns] += torch.einsum("bngqk,bqngh->bknh", p, gow)
        gp = torch.einsum("bqngh,bknh->bngqk", gow, vw[:, columns])
        gs = gp.sub_(shift.movedim(1, -1)[..., None]).mul_(p).mul_(scale)
        gq[:, rows] = torch.einsum("bngqk,bknh->bqngh", gs, kw[:, columns]).to(q.dtype)
        gk[:, columns] += torch.einsum("bngqk,bqngh->bknh", gs, qw)
    return gq, gk.to(k.dtype), gv.to(v.dtype)


def _second_order(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: _Mask,
    scale: float,
    o: Tensor,
    lse: Tensor,
    go: Tensor,
    glse: Tensor | None,
    aq: Tensor,
    ak: Tensor,
    av: Tensor,
) -> list[Tensor]:
    """Gradients of sum(aq gq + ak gk + av gv), of `_block_backward`'s results, by (q, k, v, o, lse, go, glse).

    With p = exp(s - lse), shift = sum(go o) - glse and gs = p (go vᵀ - shift):  gq = scale gs k,  gk = scale gsᵀ q,
    gv = pᵀ go. Functional throughout, so that torch can map it and differentiate it again.
    """
    dtype = wide(q.dtype)
    by_rows: list[list[Tensor]] = []
    gk: Any = 0
    gv: Any = 0
    given = (k, v, ak, av)
    for rows, columns in mask.blocks(_block_size(q, mask)):
        qr, orow, gor, aqr = (t[:, rows].to(dtype) for t in (q, o, go, aq))
        kc, vc, akc, avc = (t[:, columns].to(dtype) for t in given)
        s = _scores(qr, kc, scale, mask.seen(rows, columns, q.device))
        p = (s - _finite(lse[:, rows]).movedim(1, -1)[..., None]).exp()
        shift = (gor * orow).sum(-1) - (0 if glse is None else glse[:, rows])

        def to_scores(a: Tensor, b: Tensor) -> Tensor:
            return torch.einsum("bqngh,bknh->bngqk", a, b)

        def to_rows(a: Tensor, b: Tensor) -> Tensor:
            return torch.einsum("bngqk,bknh->bqngh", a, b)

        def to_columns(a: Tensor, b: Tensor) -> Tensor:
            return torch.einsum("bngqk,bqngh->bknh", a, b)

        inner = to_scores(gor, vc) - shift.movedim(1, -1)[..., None]
        gs = p * inner
        g_gs = scale * (to_scores(aqr, kc) + to_scores(qr, akc))
        g_inner = g_gs * p
        g_shift = -g_inner.sum(-1).movedim(-1, 1)
        g_s = (g_gs * inner + to_scores(gor, avc)) * p
        by_rows.append(
            [
                scale * (to_rows(g_s, kc) + to_rows(gs, akc)),  # q
                g_shift[..., None] * gor,  # o
                -g_s.sum(-1).movedim(-1, 1),  # lse
                to_rows(p, avc) + to_rows(g_inner, vc) + g_shift[..., None] * orow,  # go
                -g_shift,  # glse
            ]
        )
        tail = (0, 0, 0, 0, 0, mask.keys - columns.stop)
        gk = gk + functional.pad(scale * (to_columns(g_s, qr) + to_columns(gs, aqr)), tail)
        gv = gv + functional.pad(to_columns(g_inner, gor), tail)
    gq, g_o, g_lse, g_go, g_glse = (torch.cat(parts, 1) for parts in zip(*by_rows, strict=True))
    return [gq.to(q.dtype), gk.to(k.dtype), gv.to(v.dtype), g_o.to(o.dtype), g_lse, g_go.to(go.dtype), g_glse]


# CPU: torch's flash kernel takes grouped heads, float64, and a mask that is added; its causal mask starts at the
# first key.

CPU_BLOCK = 256  # queries a call when there is a mask


def _cpu_calls(q: Tensor, mask: _Mask) -> Iterator[tuple[slice, slice, bool, Tensor | None, Tensor | None]]:
    """(queries, keys, causal?, added mask, which queries see a key) of each call."""
    if mask.plain and (not mask.causal or mask.queries == mask.keys):
        yield slice(0, mask.queries), slice(0, mask.keys), mask.causal, None, None
        return
    dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    for rows, columns in mask.blocks(CPU_BLOCK):
        seen = mask.seen(rows, columns, q.device)
        if seen is None:
            yield rows, columns, False, None, None
        else:
            added = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)[:, None]
            added = added.expand(q.shape[0], 1, -1, -1)
            yield rows, columns, False, added, seen.any(-1)[..., None, None]


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, mask: _Mask, scale: float) -> tuple[Tensor, Tensor]:
    heads, kt, vt = q.shape[2:4], k.transpose(1, 2), v.transpose(1, 2)
    qt = q.flatten(2, 3).transpose(1, 2)
    parts = []
    for rows, columns, causal, added, some in _cpu_calls(q, mask):
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            qt[:, :, rows], kt[:, :, columns], vt[:, :, columns], 0.0, causal, attn_mask=added, scale=scale
        )
        o, lse = o.transpose(1, 2).unflatten(2, heads), lse.transpose(1, 2).unflatten(2, heads)
        parts.append((o, lse if some is None else lse.masked_fill(~some, -torch.inf)))
    if len(parts) == 1:
        return parts[0][0].contiguous(), parts[0][1].contiguous()
    return torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def _cpu_backward(
    q: Tensor, k: Tensor, v: Tensor, mask: _Mask, scale: float, o: Tensor, lse: Tensor, go: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kt, vt = q.shape[2:4], k.transpose(1, 2), v.transpose(1, 2)
    qt, ot, gt = (t.flatten(2, 3).transpose(1, 2) for t in (q, o, go))
    lt = lse.flatten(2, 3).transpose(1, 2)
    rows_gq, gk, gv = [], None, None
    for rows, columns, causal, added, some in _cpu_calls(q, mask):
        part = lt[:, :, rows] if some is None else _finite(lt[:, :, rows])
        gq, a, b = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gt[:, :, rows],
            qt[:, :, rows],
            kt[:, :, columns],
            vt[:, :, columns],
            ot[:, :, rows],
            part,
            0.0,
            causal,
            attn_mask=added,
            scale=scale,
        )
        rows_gq.append(gq.transpose(1, 2).unflatten(2, heads))
        if gk is None and columns.stop == mask.keys:
            gk, gv = a.transpose(1, 2), b.transpose(1, 2)
            continue
        if gk is None or gv is None:
            gk, gv = (torch.zeros(k.shape, dtype=wide(k.dtype)) for _ in range(2))
        gk[:, columns] += a.transpose(1, 2)
        gv[:, columns] += b.transpose(1, 2)
    assert gk is not None and gv is not None
    gq = rows_gq[0].contiguous() if len(rows_gq) == 1 else torch.cat(rows_gq, 1)
    return gq, gk.to(k.dtype).contiguous(), gv.to(v.dtype).contiguous()


# CUDA: torch's flash kernel takes [batch seq heads head]; its causal mask ends at the last key. cuDNN's, almost twice as fast
# on Hopper, takes [batch heads seq head] of any strides and is not deterministic.

CUDNN_LENGTH = 512  # queries from which cuDNN is worth the time that it takes to plan for a new shape


def _flash_takes(q: Tensor, mask: _Mask) -> bool:
    ordered = mask.positions is None and (mask.segments is None or mask.queries == mask.keys)
    return q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256 and ordered


def _cudnn_takes(q: Tensor, mask: _Mask) -> bool:
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


def _document_starts(mask: _Mask, cu_seqlens: Tensor | None) -> Tensor | None:
    if mask.segments is None:
        return None
    if cu_seqlens is None:
        return cu_seqlens_of(mask.segments)
    # rows end documents too
    rows = torch.arange(0, mask.segments.numel(), mask.queries, dtype=torch.int32, device=cu_seqlens.device)
    return torch.cat([cu_seqlens.to(torch.int32), rows]).sort().values


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: _Mask, cu_seqlens: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
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
        q, k, v, starts, starts, mask.queries, mask.keys, 0.0, mask.causal, False, scale=scale
    )
    lse = lse.transpose(-1, -2)  # [heads tokens] or [batch heads seq] -> tokens first
    return o[..., : shape[-1]].reshape(shape).contiguous(), lse.reshape(shape[:-1]).contiguous()


def _cuda_backward(
    q: Tensor, k: Tensor, v: Tensor, mask: _Mask, cu_seqlens: Tensor | None, scale: float, *results: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
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
    )
    gq, gk, gv = (g[..., : q_shape[-1]] for g in grads)
    return gq.reshape(q_shape).contiguous(), gk.reshape(k_shape).contiguous(), gv.reshape(k_shape).contiguous()
