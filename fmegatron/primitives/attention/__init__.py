"""Attention with memory linear in the sequence, for every mask and form, and work linear in it with a window.

The output and its log-sum-exp are kept for backward, which computes the probabilities again, block by block (Dao et
al. 2022). Device, dtype, mask and form decide which kernel does it:

- `cpu`: torch's flash kernel, over blocks of queries where there is a mask that the kernel lacks;
- `cuda`, half precision, queries and keys in plain order: flash-attn-4's kernel where it is installed, which has a
  soft cap too; else without one cuDNN's or torch's flash kernel, with documents the latter's variable-length form, with
  a window the latter's window; causal queries of a few runs of a sequence (as ranks hold them), whose positions lie on
  the CPU, run by run;
- `blocks`, everything else: the same mathematics in plain torch operations, over blocks of queries.

`mask` says what is seen, `sinks` folds learned sinks in behind any of them, `function` makes it one operation of torch.

Shapes inside: q[batch q kv group head], k and v[batch k kv head], lse[batch q kv group].
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fmegatron.errors import UserError
from fmegatron.function import apply_function
from fmegatron.kernels import flash4
from fmegatron.primitives.attention.function import Attention
from fmegatron.primitives.attention.mask import cu_seqlens_of, segments_of


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    segments: Tensor | None = None,
    kv_segments: Tensor | None = None,
    positions: Tensor | None = None,
    kv_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    sh: Any = None,
    name: str = "attention",
    kernel: str = "auto",
) -> Tensor:
    """softmax(q kᵀ · scale, masked) v: q[batch seq kv group head], k and v[batch kvseq kv head] -> [batch seq kv
    group head].

    Each group of query heads shares one key and value head (grouped-query attention; `group` of 1: multi-head).

    causal: a query sees keys at its own position and before.
    window: how many keys a query sees at most, its own included (sliding-window attention, as Mistral counts): those
        at positions > its own - window; where not causal, those at a distance < window to either side.
    softcap: scores become softcap · tanh(score / softcap) before the mask (Gemma 2).
    sinks: [kv group], a learned logit per query head that joins the softmax's denominator and has no value (GPT-OSS);
        zeros give the off-by-one softmax. It has a gradient, in its own dtype.
    positions, kv_positions: global positions, [seq] or [batch seq], in any order. None: plain order, the last query
        at the last key (so a query behind a cache of keys needs none). Leave them out where the order is plain: that
        is what the fast kernels take. On the CPU beside queries on CUDA they can be looked at without waiting, so that
        a few runs of adjacent positions, over keys in plain order, go to the fast kernels too.
    segments: the document of each token, int[batch seq]; a token sees tokens of its own document only. The tokens of
        one document are adjacent. Positions that start again in each document are for `rotary`; here plain order does
        the same.
    kv_segments: of the keys, where they are not the queries'. Alone, without segments: keys are in plain order, and
        the document of a query is that of the key at its position (without positions, of the last keys).
    cu_seqlens: instead of segments, int32[documents + 1]: where each document of the flattened [batch * seq] tokens
        starts, then their number (repeated at will). A document that crosses into the next row is cut there.
    scale: default 1 / sqrt(head).
    name: under which a `remat` policy can save its outputs.
    kernel: "torch" (or "triton", which has no attention): torch's kernels and operations; "flash4": flash-attn-4's in
        half precision on Hopper, for queries in plain order, else torch's; "auto": where it is installed and the fastest.

    A query that sees no key gives zeros. Under `sh` the heads are local, sinks like them, and keys and values are on
    one rank or gathered; the gradient of sinks is a summand of each rank of "batch seq" (a parameter's `over`). Raises
    UserError for shapes, masks or forms that do not fit.
    """
    _check(q, k, v, segments, kv_segments, positions, kv_positions, cu_seqlens)
    check_form(q, window, softcap, sinks)
    flash4.check(kernel, q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if cu_seqlens is not None and segments is None:
        segments = segments_of(cu_seqlens, q.shape[0], q.shape[1])
    if not causal and window is None and (segments is not None or kv_segments is None):
        positions = kv_positions = None  # which nothing depends on
    # Below, None for the keys' means the queries' own: dynamo refuses a Function that gets one tensor twice.
    kv_positions = None if kv_positions is positions else kv_positions
    kv_segments = None if kv_segments is segments else kv_segments
    v = v.view_as(v) if v is k else v
    masks = [positions, kv_positions, segments, kv_segments, cu_seqlens]
    form = causal, window, scale, softcap, kernel

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        tape = None if sh is None else sh.tape
        saved = None if tape is None else tape.enter(name)[1]
        o, lse = apply_function(Attention, q, k, v, *masks, sinks, *(saved or (None, None)), *form)
        return o if tape is None else tape.leave(name, [o, lse])[0]

    if sh is None or sh.check is None:
        return run(q, k, v, sinks)
    args = (q, k, v) if sinks is None else (q, k, v, sinks)
    key_side = "batch kvseq kv head | seq group"
    sides = ("batch seq kv group head", key_side, key_side, "kv group | batch seq")
    return sh.primitive(run, args, sides[: len(args)], "batch seq kv group head")


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
    if positions is None and kv_positions is not None:
        raise UserError("attention: kv_positions are given together with positions")


def check_form(q: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None) -> None:
    if window is not None and window < 1:
        raise UserError(
            f"attention(window={window}): a window counts the query's own key, so it is at least 1, or None for all"
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise UserError(f"attention(softcap={softcap}) must be finite and greater than 0, or None for no soft cap")
    if sinks is not None and sinks.shape != q.shape[2:4]:
        raise UserError(
            f"attention(sinks) has shape {tuple(sinks.shape)}, not {tuple(q.shape[2:4])}: one logit per query head, "
            "[kv group]"
        )


__all__ = ["attention", "cu_seqlens_of", "segments_of"]
