"""Context parallelism: attention over a sequence that mesh axes cut, four ways behind one function.

    gather        all-gather of keys and values; each rank attends with its own queries
    ring          keys and values go round a ring of ranks, two parts at a time (`ring`)
    ulysses       all-to-all: each rank gets the whole sequence of some heads (DeepSpeed-Ulysses, Jacobs et al. 2023)
    ulysses+ring  all-to-all between near ranks, a ring between far ones (Fang & Zhao 2024)

Which one is part of the rules (`Rules.context`, `standard_rules(…, context=…)`), so that a model's program is the same
for all. Sequences lie in zigzag order (fmegatron.zigzag) in all but the third.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from fmegatron.errors import ShardingError, UserError
from fmegatron.function import apply_function, under_torch_func
from fmegatron.layout import axes_of, zigzag_axes
from fmegatron.mesh import parse_axes
from fmegatron.parallel.ring import Form, RingAttention, ring_over
from fmegatron.primitives import attention
from fmegatron.rules import CONTEXTS

QUERIES, KEYS = "batch seq kv group head", "batch seq kv head"
QUERIES_INSIDE, KEYS_INSIDE = "batch seq** kv** group** head", "batch seq** kv** head"


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sh: Any,
    kind: str | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    segments: Tensor | None = None,
    scale: float | None = None,
    name: str = "attention",
    kernel: str = "auto",
) -> Tensor:
    """Self-attention of local parts: q[batch seq kv group head], k and v[batch seq kv head] -> [batch seq kv group
    head], as `attention` gives it for the whole sequence. Masks are by global position and by document.

    sh: mesh and rules. kind: "gather", "ring", "ulysses" or "ulysses+ring"; None: what the rules say.
    segments: the document of each token of this rank, int[batch seq]. Other arguments: see `attention`; a ring has calls of
    its own, whatever `kernel` says.

    Second derivatives, and torch.func, gather keys and values whatever the kind of ring. Raises UserError for heads
    that ranks cannot share out, ShardingError for rules without the rows that a kind needs.
    """
    kind = sh.rules.context if kind is None and sh is not None else kind or "gather"
    if kind not in CONTEXTS:
        raise UserError(f"context_attention(kind={kind!r}) must be one of {', '.join(CONTEXTS)}")
    options: dict[str, Any] = dict(causal=causal, window=window, softcap=softcap, scale=scale, name=name, kernel=kernel)
    if sh is None or sh.mesh is None:
        return attention(q, k, v, segments=segments, sinks=sinks, sh=sh, **options)
    if kind == "gather":
        return _gathered(q, k, v, segments, sinks, sh, options, "seq", KEYS)
    if sh.check is not None:
        return _checked(q, k, v, segments, sinks, sh, options)
    if not sh.axes("seq"):
        return attention(q, k, v, segments=segments, sinks=sinks, sh=sh, **options)
    if kind == "ring":
        return _ring(q, k, v, segments, sinks, sh, options, "seq", KEYS)
    return _all_to_all(q, k, v, segments, sinks, sh, options, kind)


def _gathered(
    q: Tensor, k: Tensor, v: Tensor, segments: Any, sinks: Any, sh: Any, options: Any, seq: str, keys: str
) -> Tensor:
    """Every rank reads all keys, each for queries of its own."""
    to_all = f"{keys} -> {keys.replace(seq, 'kvseq')} | {seq}"
    k, v = sh(k, to_all), sh(v, to_all)
    if not sh.axes(seq):
        return attention(q, k, v, segments=segments, sinks=sinks, sh=sh, **options)
    positions = sh.index(seq, k.shape[1], device=q.device if sh.mesh.simulated else "cpu")
    # On the CPU the runs of positions that a rank holds can be seen, which fast kernels take one by one.
    where = "cpu" if options["causal"] and options["softcap"] is None else q.device
    given = {"positions": positions.to(where), "kv_positions": torch.arange(k.shape[1], device=where)}
    if segments is not None:
        given["kv_segments"] = sh(segments, f"batch {seq} -> batch kvseq | {seq}")
        if not options["causal"]:
            given["segments"] = segments
    return attention(q, k, v, sinks=sinks, sh=sh, **given, **options)


def _ring(
    q: Tensor, k: Tensor, v: Tensor, segments: Any, sinks: Any, sh: Any, options: Any, seq: str, keys: str
) -> Tensor:
    if under_torch_func():
        return _gathered(q, k, v, segments, sinks, sh, options, seq, keys)
    form = Form(
        options["causal"],
        options["window"],
        q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"],
        options["softcap"],
    )
    ring = ring_over(sh.mesh, sh.axes(seq), zigzag_axes(seq, sh.mesh, sh.rules))
    plain = sh.with_tape(None)

    def gather(q: Tensor, k: Tensor, v: Tensor, segments: Any, sinks: Any) -> Tensor:
        return _gathered(q, k, v, segments, sinks, plain, options, seq, keys)

    saved = None if sh.tape is None else sh.tape.enter(options["name"])[1]
    o, lse = apply_function(RingAttention, q, k, v, segments, sinks, *(saved or (None, None)), ring, form, gather)
    return o if sh.tape is None else sh.tape.leave(options["name"], [o, lse])[0]


def _all_to_all(q: Tensor, k: Tensor, v: Tensor, segments: Any, sinks: Any, sh: Any, options: Any, kind: str) -> Tensor:
    """Whole sequences (or, beside a ring, longer parts) of fewer heads. Keys and values of fewer heads than there are
    ranks go to several, whose gradients are summed."""
    for row in ("seq**", "kv**", "group**"):
        if row not in sh.rules.compute:
            raise ShardingError(f"context={kind!r} needs a row {row!r}: standard_rules(mesh, context={kind!r}) has it")
    new = [_new_axes(sh, name) for name in ("kv", "group")]
    for dim, (what, axes) in enumerate(zip(("kv heads", "query heads of each kv head"), new, strict=True), 2):
        if q.shape[dim] % sh.mesh.size(axes):
            raise UserError(
                f"context={kind!r}: the {q.shape[dim]} {what} on a rank do not divide by {sh.mesh.size(axes)}, the size "
                f"of mesh axes {', '.join(axes)}: make_mesh(axes, also=factoring(axes, {kind!r}, heads=…, kv_heads=…)) "
                "shares them out"
            )
    q = sh(q, f"{QUERIES} -> {QUERIES_INSIDE}")
    k, v = (sh(t, f"{KEYS} -> {KEYS_INSIDE} | seq") for t in (k, v))
    if segments is not None:
        segments = sh(segments, "batch seq -> batch seq** | seq")
    if sinks is not None:
        for dim, axes in enumerate(new):
            sinks = sinks.index_select(dim, sh.positions(axes, sinks.shape[dim], "sinks", sinks.device))
    if sh.axes("seq**"):
        o = _ring(q, k, v, segments, sinks, sh, options, "seq**", KEYS_INSIDE)
    else:
        o = attention(q, k, v, segments=segments, sinks=sinks, sh=sh, **options)
    return sh(o, f"{QUERIES_INSIDE} -> {QUERIES}")


def _new_axes(sh: Any, name: str) -> tuple[str, ...]:
    """The axes that a dim of heads has inside attention alone."""
    inside, outside = (axes_of(n, sh.mesh, sh.rules) for n in (f"{name}**", name))
    return sh.mesh.live(inside[len(outside) :])


def _checked(q: Tensor, k: Tensor, v: Tensor, segments: Any, sinks: Any, sh: Any, options: Any) -> Tensor:
    """In the checking mode: one primitive that mixes along the sequence."""
    plain = dataclasses.replace(sh, check=None)

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Any = None) -> Tensor:
        return attention(q, k, v, segments=segments, sinks=sinks, sh=plain, **options)

    args = (q, k, v) if sinks is None else (q, k, v, sinks)
    sides = (QUERIES, f"{KEYS} | group", f"{KEYS} | group", "kv group | batch seq")
    return sh.primitive(run, args, sides[: len(args)], QUERIES)


# --------------------------------------------------------------------------------------------------------- the mesh


def factoring(
    axes: str, kind: str, *, heads: int, kv_heads: int, ulysses: int | None = None, argument: str = "mesh"
) -> tuple[str, ...]:
    """What `make_mesh(axes, also=…)` needs for a kind: cp as cp_ring × cp_kv × cp_group, so that kv heads lie on tp's
    and cp_kv's ranks and the query heads of each on the rest.

        make_mesh("cp=4,tp=2", kv_heads=2, also=factoring("cp=4,tp=2", "ulysses", heads=8, kv_heads=2))

    ulysses: ranks between which heads are shared out, for "ulysses+ring"; None: the most that the heads allow, but not
    all of cp. () for the kinds that need nothing. Raises UserError, which names `argument`, where heads do not suffice.
    """
    sizes = parse_axes(axes, argument=argument)
    cp, tp = sizes.get("cp", 1), sizes.get("tp", 1)
    if kind in ("gather", "ring") or cp == 1:
        return ()
    on_tp = math.gcd(kv_heads, tp)
    kv, group = kv_heads // on_tp, heads // kv_heads // (tp // on_tp)

    def fits(n: int) -> bool:
        return cp % n == 0 and (group % (n // math.gcd(kv, n)) == 0)

    legal = [n for n in range(1, cp + 1) if fits(n)]
    inner = cp
    if kind == "ulysses+ring":
        inner = max([n for n in legal if n < cp]) if ulysses is None else ulysses
    if inner not in legal:
        shown = f"{axes} with {inner} ranks for heads" if kind == "ulysses+ring" else axes
        raise UserError(
            f"{argument} {shown}: {kind} cannot share {heads} query and {kv_heads} kv heads, on tp={tp}, among {inner} "
            f"context-parallel ranks: use {' or '.join(map(str, legal))} of them, or the kinds ring or gather"
        )
    on_kv = math.gcd(kv, inner)
    cut = {"cp_ring": cp // inner, "cp_kv": on_kv, "cp_group": inner // on_kv}
    found = {k: v for n, s in sizes.items() for k, v in (cut.items() if n == "cp" else [(n, s)])}
    return (",".join(f"{n}={s}" for n, s in found.items()),)
