"""Attention over a sequence that ranks hold in parts, with keys and values passed round a ring of them (Liu et al. 2023).

Every rank keeps its queries. Keys and values go to the next rank while those at hand are attended to; the partial
results are merged by their log-sum-exps. The backward is a ring again, round which the gradients of keys and values
travel with them. No rank ever holds more than two other ranks' keys and values, and none is kept for the backward.

The exchanges are the same on all ranks: global sizes and the mask's form decide them. Parts that a sliding window hides
from every rank are not sent for; since in zigzag order a rank's two chunks border on those of the rank before and of
the rank behind, keys and values then go a few steps round the ring one way and a few the other (`legs`). What a rank
computes between exchanges depends on its place: pairs of parts of which no query sees a key are left out, and pairs
that need no mask are given to the kernels without one.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from fmegatron.collectives import begin_exchange, ring_places
from fmegatron.errors import ShardingError
from fmegatron.mesh import Mesh
from fmegatron.operators import custom_operator
from fmegatron.primitives._function import graph_wanted, wide
from fmegatron.primitives.attention.blocks import finite
from fmegatron.primitives.attention.sinks import sinks_gradient, with_sinks
from fmegatron.simulation import on_each_rank


class Form(NamedTuple):
    """What attention computes: causal or not, the window, the scale and the soft cap."""

    causal: bool
    window: int | None
    scale: float
    softcap: float | None


class Call(NamedTuple):
    """One call of a kernel: these queries with these keys of a part.

    mask: "none" where all are seen, "order" where order alone says which, "positions" for everything else.
    """

    rows: slice
    columns: slice
    mask: str


# --------------------------------------------------------------------------------------------------- what to compute


def runs_of(place: int, part: int, ranks: int, zigzag: bool) -> list[int]:
    """The first global positions of the contiguous runs that the rank at a place of the ring holds, `part` positions
    in all: one run, or in zigzag order two equal ones."""
    if not zigzag:
        return [place * part]
    half = part // 2
    return [place * half, (2 * ranks - 1 - place) * half]


def plan(mine: Sequence[int], theirs: Sequence[int], length: int, causal: bool, window: int | None) -> Call | None:
    """The call that covers all pairs of runs (of one length) in which a query sees a key; None where there is none."""
    pairs = [(i, j) for i, q in enumerate(mine) for j, k in enumerate(theirs) if _sees(q, k, length, causal, window)]
    if not pairs:
        return None
    rows, columns = (range(min(p[n] for p in pairs), max(p[n] for p in pairs) + 1) for n in (0, 1))
    whole = all(_sees_all(mine[i], theirs[j], length, causal, window) for i, j in itertools.product(rows, columns))
    diagonal = list(mine) == list(theirs) and causal and (window is None or len(mine) == 1)
    mask = "none" if whole else "order" if diagonal else "positions"
    queries, keys = (slice(r.start * length, r.stop * length) for r in (rows, columns))
    return Call(queries, keys, mask)


@functools.lru_cache(maxsize=256)
def offsets_needed(ranks: int, part: int, zigzag: bool, causal: bool, window: int | None) -> frozenset[int]:
    """The offsets s, from 1 to ranks - 1, for which some rank's queries see a key of the rank s places before it."""
    if window is None:
        return frozenset(range(1, ranks))

    def seen(place: int, there: int) -> bool:
        mine, theirs = (runs_of(p, part, ranks, zigzag) for p in (place, there))
        return plan(mine, theirs, part // len(mine), causal, window) is not None

    return frozenset(s for s in range(1, ranks) if any(seen(p, (p - s) % ranks) for p in range(ranks)))


def legs(ranks: int, needed: Collection[int]) -> tuple[int, int]:
    """(steps round the ring, steps the other way) that bring the parts at these offsets with the fewest exchanges, and
    of as few, with the fewest the other way.

    All n - 1 offsets: (n - 1, 0). A causal window of w keys in plain order of parts of p: (⌈(w - 1) / p⌉, 0); in zigzag
    order, of chunks of c = p / 2: with m = ⌈(w - 1) / c⌉ chunks behind, (m, m) as long as 2 m < n - 1.
    """
    best = (ranks - 1, 0)
    for there in sorted({0, *needed}, reverse=True):
        back = max((ranks - s for s in needed if s > there), default=0)
        if there + back < sum(best):
            best = (there, back)
    return best


def _sees(q: int, k: int, length: int, causal: bool, window: int | None) -> bool:
    """Of two runs that start at q and k: does one query see one key, documents apart?"""
    nearest = max(0, q - k - length + 1)  # from a query back to a key
    ahead = max(0, k - q - length + 1)
    return (window is None or max(nearest, ahead) < window) and not (causal and k > q + length - 1)


def _sees_all(q: int, k: int, length: int, causal: bool, window: int | None) -> bool:
    farthest = max(q + length - 1 - k, k + length - 1 - q)
    return (window is None or farthest < window) and not (causal and k + length - 1 > q)


# ----------------------------------------------------------------------------------------------------------- the ring


@dataclass(frozen=True, eq=False)
class Ring:
    """Ranks in a ring along an ordered tuple of mesh axes. Make one with `ring_over`."""

    mesh: Mesh
    axes: tuple[str, ...]
    zigzag: bool
    places: tuple[int, ...]  # of each rank
    key: str  # by which operators find it

    @property
    def size(self) -> int:
        return self.mesh.size(self.axes)

    def on_ranks(self, f: Any, *args: Any) -> tuple[Tensor, ...]:
        """f(place, *args), which may branch on the place in the ring."""
        if self.mesh.simulated:
            return on_each_rank(lambda rank, *mine: f(self.places[rank], *mine), self.mesh.world, *args)
        return tuple(f(self.places[self.mesh.rank], *args))


_rings: weakref.WeakValueDictionary[str, Ring] = weakref.WeakValueDictionary()  # they live as long as their meshes
_numbers = itertools.count()


def ring_over(mesh: Mesh, axes: tuple[str, ...], zigzag: tuple[str, ...]) -> Ring:
    """The ring along the axes of a dim, whose order is zigzag over some of them. Raises ShardingError where these are
    neither all nor none."""
    if zigzag not in ((), axes):
        raise ShardingError(
            f"a ring over mesh axes {', '.join(axes)} needs their own zigzag order or none, not that of "
            f"{', '.join(zigzag)}: change the rules' zigzag"
        )
    key = ("ring", axes, bool(zigzag))
    if key not in mesh._cache:
        places = tuple(place for place, _ in ring_places(mesh, axes))
        made = Ring(mesh, axes, bool(zigzag), places, f"{'-'.join(axes)}-{next(_numbers)}")
        mesh._cache[key] = _rings[made.key] = made
    return mesh._cache[key]


def ring_forward(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, sinks: Tensor | None, form: Form
) -> tuple[Tensor, Tensor]:
    """(o, lse) of the queries of each rank and the keys and values of all. Without a graph."""
    part = q.shape[1]
    total: tuple[Tensor, ...] | None = None
    for offset, (k_, v_, *rest) in _passing(ring, [k, v, *_given(segments)], _legs(ring, part, form)):

        def merge(place: int, q: Tensor, k: Tensor, v: Tensor, mine: Any, theirs: Any, *total: Any) -> Sequence[Tensor]:
            holder = (place - offset) % ring.size  # noqa: B023 (used at once)
            return _merged(q, k, v, mine, theirs, form, *_runs(ring, place, holder, part), *total)

        total = ring.on_ranks(merge, q, k_, v_, segments, *(rest or (None,)), *(total or (None, None)))
        del k_, v_, rest  # before the next ones but one are sent for
    assert total is not None
    o, lse = total
    if sinks is not None:
        o, lse = with_sinks(o, lse, sinks)
    return o.to(q.dtype), lse


def ring_backward(
    ring: Ring,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    o: Tensor,
    lse: Tensor,
    go: Tensor,
    form: Form,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gq, gk, gv). Gradients of keys and values follow them, one step behind, and come home at the end of each leg:
    round the whole ring with one step more, else the way that they came. Without a graph."""
    part, gq, coming = q.shape[1], None, None
    there, back = _legs(ring, part, form)
    homes: list[list[Tensor]] = []
    for offset, (k_, v_, *rest) in _passing(ring, [k, v, *_given(segments)], (there, back)):

        def gradients(place: int, *given: Any) -> Sequence[Tensor]:
            q, k, v, mine, theirs, o, lse, go, gq = given
            holder = (place - offset) % ring.size  # noqa: B023 (used at once)
            return _gradients(q, k, v, mine, theirs, o, lse, go, gq, form, *_runs(ring, place, holder, part))

        gq, gk, gv = ring.on_ranks(gradients, q, k_, v_, segments, *(rest or (None,)), o, lse, go, gq)
        if coming is not None:
            gk, gv = (a + b for a, b in zip(coming.finish(), (gk, gv), strict=True))
        stays = offset == 0 and there < ring.size - 1  # its own, which would only travel back
        if stays or offset == there or offset == -back < 0:  # or the end of a leg
            homes.append(_sent_home(ring, [gk, gv], offset))
            coming = None
        else:
            coming = begin_exchange([gk, gv], ring.mesh, ring.axes, back=offset < 0)
        del gk, gv, k_, v_, rest
    assert gq is not None
    gk, gv = (functools.reduce(torch.add, grads) for grads in zip(*homes, strict=True))
    return gq.to(q.dtype), gk.to(k.dtype), gv.to(v.dtype)


def _legs(ring: Ring, part: int, form: Form) -> tuple[int, int]:
    return legs(ring.size, offsets_needed(ring.size, part, ring.zigzag, form.causal, form.window))


def _passing(ring: Ring, tensors: list[Tensor], there_and_back: tuple[int, int]) -> Iterable[tuple[int, list[Tensor]]]:
    """How far off, and the tensors of the rank so many places before: of this one, of that before it, …, then of that
    behind it (-1), …. The next ones are on their way while the caller works, who must let go of what it was given
    (`enumerate` would not)."""
    there, back = there_and_back
    held, order = tensors, [*range(there + 1), *range(-1, -back - 1, -1)]
    for offset, following in itertools.zip_longest(order, order[1:]):
        coming = None
        if following is not None:
            coming = begin_exchange(tensors if following == -1 else held, ring.mesh, ring.axes, back=following < 0)
        yield offset, held
        held = coming.finish() if coming is not None else []


def _sent_home(ring: Ring, grads: list[Tensor], offset: int) -> list[Tensor]:
    """Gradients of the part of the rank `offset` places before, with the rank that they belong to: the shorter way."""
    steps = offset % ring.size
    ahead = ring.size - steps <= steps  # on round the ring
    for _ in range(min(steps, ring.size - steps)):
        grads = begin_exchange(grads, ring.mesh, ring.axes, back=not ahead).finish()
    return grads


def _given(segments: Tensor | None) -> list[Tensor]:
    return [] if segments is None else [segments]


def _runs(ring: Ring, place: int, there: int, part: int) -> tuple[list[int], list[int], int]:
    """The runs of queries, the runs of keys, and their length."""
    mine, theirs = (runs_of(p, part, ring.size, ring.zigzag) for p in (place, there))
    return mine, theirs, part // len(mine)


# ------------------------------------------------------------------------------------------------------- on one rank


def _merged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mine: Tensor | None,
    theirs: Tensor | None,
    form: Form,
    q_runs: list[int],
    k_runs: list[int],
    length: int,
    o: Tensor | None,
    lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What the queries have so far (nothing yet: None), with what one part of the keys adds to it."""
    call = plan(q_runs, k_runs, length, form.causal, form.window)
    if o is None or lse is None:
        dtype = wide(q.dtype)
        o, lse = q.new_zeros(q.shape, dtype=dtype), q.new_full(q.shape[:-1], -torch.inf, dtype=dtype)
    if call is None:
        return o, lse
    rows, columns, _ = call
    masks, causal, window = _masks(call, q_runs, k_runs, length, mine, theirs, form, q.device)
    o2, lse2 = torch.ops.fmegatron.attention(
        q[:, rows], k[:, columns], v[:, columns], *masks, None, None, causal, window, form.scale, form.softcap
    )
    old = lse[:, rows]
    new = torch.logaddexp(old, lse2)
    o[:, rows] *= (old - finite(new)).exp_()[..., None]
    o[:, rows] += o2 * (lse2 - finite(new)).exp_()[..., None]
    lse[:, rows] = new
    return o, lse


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mine: Tensor | None,
    theirs: Tensor | None,
    o: Tensor,
    lse: Tensor,
    go: Tensor,
    gq: Tensor | None,
    form: Form,
    q_runs: list[int],
    k_runs: list[int],
    length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the queries so far, with those from one part of the keys, and the gradients of that part."""
    call = plan(q_runs, k_runs, length, form.causal, form.window)
    dtype = wide(q.dtype)
    gq = torch.zeros_like(q, dtype=dtype) if gq is None else gq
    gk, gv = (torch.zeros_like(t, dtype=dtype) for t in (k, v))
    if call is None:
        return gq, gk, gv
    rows, columns, _ = call
    masks, causal, window = _masks(call, q_runs, k_runs, length, mine, theirs, form, q.device)
    a, b, c = torch.ops.fmegatron.attention_backward(
        q[:, rows],
        k[:, columns],
        v[:, columns],
        *masks,
        None,
        o[:, rows],
        lse[:, rows],
        go[:, rows],
        None,
        causal,
        window,
        form.scale,
        form.softcap,
    )
    gq[:, rows] += a
    gk[:, columns] = b.to(dtype)
    gv[:, columns] = c.to(dtype)
    return gq, gk, gv


def _masks(
    call: Call,
    q_runs: list[int],
    k_runs: list[int],
    length: int,
    mine: Tensor | None,
    theirs: Tensor | None,
    form: Form,
    device: torch.device,
) -> tuple[list[Tensor | None], bool, int | None]:
    """([positions, kv_positions, segments, kv_segments], causal, window) of a call."""
    rows, columns, mask = call
    at = kv_at = None
    # The kernels for documents take queries and keys of one order: positions say that these are not.
    if mask == "positions" or (mask == "none" and mine is not None):
        at, kv_at = (_positions(r, s, length, device) for r, s in ((q_runs, rows), (k_runs, columns)))
    segments = kv_segments = None
    if mine is not None and theirs is not None:
        segments, kv_segments = mine[:, rows], None if mask == "order" else theirs[:, columns]
    if mask == "none":
        return [at, kv_at, segments, kv_segments], False, None
    return [at, kv_at, segments, kv_segments], form.causal, form.window


def _positions(runs: list[int], part: slice, length: int, device: torch.device) -> Tensor:
    held = runs[part.start // length : part.stop // length]
    return torch.cat([torch.arange(start, start + length, device=device) for start in held])


# ---------------------------------------------------------------------------------------------------- as one operation


class RingAttention(Function):
    """(q, k, v, segments, sinks, saved o, saved lse, ring, form, gather) -> (o, lse). lse has no gradient.

    gather(q, k, v, segments, sinks) -> o: the same by gathering keys and values, which gives the graph of a backward.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        segments, sinks, o, lse, ring, form, _ = rest
        if o is not None:
            return o.view_as(o), lse.view_as(lse)
        if ring.mesh.simulated:
            return ring_forward(ring, q, k, v, segments, sinks, form)
        return torch.ops.fmegatron.ring_attention(q, k, v, segments, sinks, ring.key, *form)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, _, _, ctx.ring, ctx.form, ctx.gather = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, go: Tensor | None, _: Any) -> Any:
        q, k, v, segments, sinks, o, lse = ctx.saved_tensors
        if go is None:
            return (None,) * 10
        if graph_wanted():
            given = [t for t in (q, k, v, sinks) if t is not None]
            pull = torch.func.vjp(lambda q, k, v, *s: ctx.gather(q, k, v, segments, *(s or (None,))), *given)[1]
            gq, gk, gv, *g_sinks = pull(go)
            return gq, gk, gv, None, *(g_sinks or (None,)), *[None] * 5
        if ctx.ring.mesh.simulated:
            grads = ring_backward(ctx.ring, q, k, v, segments, o, lse, go, ctx.form)
        else:
            grads = torch.ops.fmegatron.ring_attention_backward(q, k, v, segments, o, lse, go, ctx.ring.key, *ctx.form)
        g_sinks = None if sinks is None else sinks_gradient(sinks, o, lse, go, None)
        return *grads, None, g_sinks, *[None] * 5


# Operators, so that compiled code sees one operation. (A simulation would run them rank by rank, without exchanges.)


@custom_operator("fmegatron::ring_attention")
def _ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    sinks: Tensor | None,
    ring: str,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    return ring_forward(_rings[ring], q, k, v, segments, sinks, Form(causal, window, scale, softcap))


@_ring_attention.register_fake
def _(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


@custom_operator("fmegatron::ring_attention_backward")
def _ring_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    o: Tensor,
    lse: Tensor,
    go: Tensor,
    ring: str,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return ring_backward(_rings[ring], q, k, v, segments, o, lse, go, Form(causal, window, scale, softcap))


@_ring_attention_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
