"""`accumulate`: the gradient of a loss over the global batch, in microbatches, every term exactly weighted.

A loss is sums. `loss(params, batch, ctx) -> (terms, stats)` gives each term's *unsummed* items; its weight (unmasked
tokens, sequences, …) is known from the batch alone. The value is

    Σ over terms: coefficient · Σ items ÷ Σ weight          (sums over the global batch; a weight of 0 gives 0)

whatever the number of microbatches and ranks, however unequal they are. (The mean over ranks of a mean over local
tokens is not that, and its gradients are wrong for unequal masks: a bug that several frameworks have shipped.)
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fmegatron import buckets
from fmegatron.collectives import Step
from fmegatron.context import Ctx
from fmegatron.dtensor import DTensor, any_dtensor
from fmegatron.errors import UserError
from fmegatron.function import readable, under_torch_func
from fmegatron.grad import Trainable, as_at_rest, higher_order, scalar, to_local, trainable_leaves, unscaled
from fmegatron.interleave import by_turns, halfway
from fmegatron.sharding import Sharding
from fmegatron.tree import flatten, is_tensor, leaves, like, named, tensors, tree_map, unflatten
from fmegatron.zero import Reducer, cut_like_state, splits_state

Overlap = Literal["none", "pairs", "1f1b"]
OVERLAPS = ("none", "pairs", "1f1b")


@dataclass(frozen=True)
class Term:
    """One term of a loss: its unsummed items and their dims, e.g. Term(per_token, "batch seq").

    weight: in a loss of this term alone, what its sum is divided by, instead of a function `weights`: items of the
        same dims, such as the mask. Among `stats`, dims may keep some: Term(load, "batch seq expert -> expert").
    """

    items: torch.Tensor
    dims: str = ""
    weight: torch.Tensor | None = None


@dataclass(frozen=True)
class EachRow:
    """A statistic that is not summed: its parts of a rank's microbatches follow each other along the dim of their rows."""

    items: torch.Tensor
    dim: int = 0


@dataclass(frozen=True)
class Weight:
    """What a term's sum is divided by: Weight(mask, "batch seq"); and the term's coefficient in the loss.

    With dims "" a number or a 0-d tensor is the weight of the whole global batch as it stands. items may be a function of `sh`
    that gives them, where they take what other ranks hold of the batch.
    """

    items: torch.Tensor | float | Callable[[Sharding], torch.Tensor]
    dims: str = ""
    coefficient: float = 1.0


def accumulate(
    loss: Callable,
    microbatches: int = 1,
    *,
    weights: Callable[[Any], Mapping[str, Weight]] | None = None,
    trainable: Trainable = None,
    dtype: torch.dtype | None = None,
    spec: Any = None,
    enter: Callable[[Any], Any] | None = None,
    leave: Callable[[Any], Any] | None = None,
    running: Callable[[Any, Any], Any] | None = None,
    overlap: Overlap = "none",
) -> Callable:
    """f(params, batch, ctx=Ctx(), *, loss_scale=None) -> ((total, metrics), gradients) of a loss given as
    `loss(params, batch, ctx) -> (terms, stats)`.

    loss: terms is a dict of `Term`s, or one Term; stats is a tree of further tensors or Terms (or None), summed over
        the batch, or `EachRow`s.
    microbatches: into how many parts each rank cuts its rows (the first dim of every tensor of the batch), as evenly
        as they go.
    weights: weights(batch) -> {name: Weight} with a Weight for every term; it is called once, on the batch as this
        rank holds it. May be left out for a loss of one term that has a `weight` of its own.
    trainable: as for `value_and_grad`.
    dtype: gradients are accumulated in this type or their own, whichever is wider, and so come back; None means
        `ctx.sh.precision.reduce_dtype`, which is float32 or wider unless told otherwise.
    spec: the parameters' spec tree, on a mesh. Sums over ranks that hold the same parameter are then made once, in the
        last microbatch: in `precision.reduce`, a layer's in one bucket, beside the backward of the layer before. (With
        ZeRO-2, and where a parameter is cut, ZeRO-3, in every microbatch, as such gradients are nowhere whole.) They
        come back in the layout of the optimizer's state (`Rules.zero`). The loss must read parameters by `ctx.sh`.
        Without a spec each microbatch reduces, and gradients lie like the parameters.
    enter, leave: how parameters are changed once before the first microbatch, and gradients once behind the last one.
        Functions of a tree whose leaves may be None; the second is the first's transpose.
    running: (extras, stats) -> extras: what ctx.extras is for the next microbatch, by the stats of one, summed over ranks; for
        the first one it gets None. Results then depend on the number of microbatches.
    overlap: which microbatches compute while another one's tokens are on their way to experts and back (see
        `fmegatron.interleave`). "pairs": two at a time, forward beside forward and backward beside backward, with the
        activations of two; "1f1b": the forward of each beside the backward of the one before, with the activations of one
        and a part of another. Sums are those of "none", but for the order in which more than two microbatches are
        added. Nothing changes where no token goes to other ranks.

    metrics: {"terms": {name: mean}, "sums": …, "weights": …, "stats": …} of the global batch, without gradients. With
        a key in ctx, ctx.rows tells every microbatch the global indices of its rows, so that dropout masks do not
        depend on the cut.

    f's loss_scale: a number by which what is differentiated is multiplied, in fp32 or wider, and the sum of the
        gradients divided, in fp32 or wider, so that gradients in between do not vanish in fp16 (`dynamic_loss_scale`).
        total and metrics are without it. Gradients that overflowed are infinite or not a number.

    Gradients are added in place as the backward makes them: memory holds one set of them. Inside a torch.func
    transform they can be differentiated again. Leaves at rest (DTensors) are unwrapped, and their gradients placed, as
    by `value_and_grad`. Raises UserError for a batch with fewer rows than microbatches, and for terms that disagree
    with their weights.
    """
    if microbatches < 1:
        raise UserError(f"microbatches={microbatches} must be at least 1")
    if overlap not in OVERLAPS:
        raise UserError(f"overlap={overlap!r} is not known: use one of {', '.join(OVERLAPS)}")
    if overlap == "pairs" and running is not None:
        raise UserError(
            "overlap='pairs' runs two forwards at once, and running=… has each wait for the last: use '1f1b'"
        )

    def run(
        params: Any, batch: Any, ctx: Ctx | None = None, *, loss_scale: float | None = None
    ) -> tuple[tuple[torch.Tensor, dict[str, Any]], Any]:
        ctx = Ctx() if ctx is None else ctx
        at_rest, batch, flat = params, to_local(batch), leaves(params)
        wanted = trainable_leaves(params, trainable, flat)
        params = to_local(params) if any_dtensor(flat) else params
        composable = higher_order((flat, batch))
        late = spec is not None and ctx.sh.mesh is not None and ctx.sh.check is None and not composable
        ctx = ctx.replace(sh=ctx.sh.delaying()) if late else ctx
        wide = dtype or ctx.sh.precision.reduce_dtype
        if enter is not None:
            params = enter(params)
        parts = cut_batch(batch, with_rows(ctx, batch), microbatches)
        known = None if weights is None else dict(weights(batch))
        scale = None if known is None else scales(known, ctx.sh)
        at_once = composable or ctx.sh.check is not None or ctx.sh.mesh is None
        sums = Sums(ctx.sh, len(parts), at_once)
        grads: list[Any] = [None] * len(wanted)
        extras = ctx.extras if running is None else running(ctx.extras, None)

        def add(aux: dict[str, Any], number: int) -> None:
            nonlocal extras
            sums.add(aux, number)
            if running is not None:
                extras = running(extras, aux["stats"] if at_once else _Reduced(aux["stats"], ctx.sh).finish())

        together = None if composable or overlap == "none" or len(parts) < 2 else _Together(grads, len(parts))

        def one(number: int) -> None:
            """The gradients and sums of one microbatch."""
            part, part_ctx = parts[number]
            part_ctx = part_ctx if running is None else part_ctx.replace(extras=extras)

            def of(p: Any) -> tuple[torch.Tensor, dict[str, Any]]:
                terms, stats = loss(p, part, part_ctx)
                return evaluate(terms, stats, known, scale, ctx.sh, loss_scale, at_once)

            if composable:
                add(_add_by_torch_func(of, params, wanted, grads, wide), number)
                return
            reduce = late and (ctx.sh.rules.zero == 2 or number == len(parts) - 1)
            to = (spec, ctx.sh) if reduce or (late and together is not None) else None
            with ctx.sh.others_refused() if late else contextlib.nullcontext():
                _add_in_place(of, functools.partial(add, number=number), params, wanted, grads, wide, to, together)

        runs = [functools.partial(one, number) for number in range(len(parts))]
        if together is None:
            for run_one in runs:
                run_one()
        else:
            by_turns(runs, staggered=overlap == "1f1b")
        total, metrics, factor = sums.finish(scale, known)
        if factor is not None:
            for i, g in enumerate(grads):
                if g is not None:
                    c = as_factor(factor, g)
                    grads[i] = g * c if composable else g.mul_(c)
        if leave is not None:
            grads = leaves(leave(like(params, grads)))
        sharded = spec is not None and ctx.sh.mesh is not None
        if sharded and not late:
            grads = cut_like_state(grads, leaves(spec), ctx.sh)
        if loss_scale is not None:  # behind the sums over ranks, which may be in a narrow dtype
            grads = [unscaled(g, loss_scale, in_place=not composable) for g in grads]
        if sharded and splits_state(spec, ctx.sh):
            return (total, metrics), like_state(grads, at_rest, spec, ctx.sh)
        return (total, metrics), as_at_rest(grads, at_rest)

    return run


def like_state(grads: list[Any], at_rest: Any, spec: Any, sh: Sharding) -> Any:
    """Local gradients as a tree like the parameters, DTensors of the layout of the optimizer's state."""
    rows = zip(grads, leaves(at_rest), leaves(spec), strict=True)
    return like(
        at_rest,
        [sh.at_rest(g, p, "optimizer") if g is not None and isinstance(t, DTensor) else g for g, t, p in rows],
    )


class Scales(Mapping[str, tuple[Any, Any]]):
    """{name: (weight of the global batch, coefficient ÷ weight)} as numbers or 0-d tensors.

    The second is 0 for a weight of 0. The sums over ranks are under way from the start, and awaited at the first look.
    """

    def __init__(self, weights: Mapping[str, Weight], sh: Sharding) -> None:
        self.weights = weights
        self.totals = _Reduced({n: _counted(w.items, w.dims, sh) for n, w in weights.items()}, sh)

    @functools.cached_property
    def found(self) -> dict[str, tuple[Any, Any]]:
        totals = self.totals.finish()
        each = {n: reciprocal(totals[n]) for n in self.weights}
        return {n: (totals[n], _times(each[n], w.coefficient)) for n, w in self.weights.items()}

    def __getitem__(self, name: str) -> tuple[Any, Any]:
        return self.found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def scales(weights: Mapping[str, Weight], sh: Sharding) -> Mapping[str, tuple[Any, Any]]:
    """{name: (weight of the global batch, coefficient ÷ weight)}; needs no forward (see `Scales`)."""
    return Scales(weights, sh)


@dataclass(frozen=True)
class _Summand:
    """This rank's summand of a sum, and the arrows to the sum. In a tree it is one leaf."""

    x: Any
    steps: tuple[Step, ...] = ()


def _counted(items: Any, dims: str, sh: Sharding) -> _Summand:
    """What `summed` sums, as far as this rank can."""
    items = items(sh) if callable(items) else items
    if not isinstance(items, torch.Tensor):
        return _Summand(items)
    if sh.mesh is None or sh.check is not None or under_torch_func() or (not dims and not items.dim()):
        return _Summand(summed(items, dims, sh))
    items = items.long() if items.dtype == torch.bool else items
    return _Summand(*_local_sum(items, dims if "->" in dims else f"{dims} ->", sh))


def _local_sum(x: torch.Tensor, equation: str, sh: Sharding) -> tuple[torch.Tensor, tuple[Step, ...]]:
    """`sh.sum` without its arrows, and these; where they are no mere all-reduce, all of it."""
    y, steps = sh.local_sum(x, equation)
    return (sh.sum(x, equation), ()) if any(step.kind != "P>I" for step in steps) else (y, steps)


@dataclass(frozen=True)
class _Rows:
    """What microbatches have of an `EachRow`, by their numbers. In a tree it is one leaf."""

    dim: int
    parts: dict[int, torch.Tensor]

    def whole(self) -> torch.Tensor:
        return torch.cat([self.parts[n] for n in sorted(self.parts)], self.dim)


class _Reduced:
    """A tree of `_Summand`s whose sums over ranks are under way, in one collective per axes and dtype."""

    def __init__(self, values: Any, sh: Sharding) -> None:
        self.values, flat = values, leaves(values)
        self.rows = [i for i, t in enumerate(flat) if isinstance(t, _Summand) and t.steps]
        self.moving = None
        if self.rows and sh.mesh is not None:
            self.moving = buckets.start(sh.mesh, [flat[i].x for i in self.rows], [flat[i].steps for i in self.rows])

    def finish(self) -> Any:
        """The sums, when they have arrived."""
        out = [t.x if isinstance(t, _Summand) else t for t in leaves(self.values)]
        if self.moving is not None:
            for i, x in zip(self.rows, self.moving.finish(), strict=True):
                out[i] = x
        return like(self.values, out)


def reciprocal(w: Any) -> Any:
    """1 ÷ w, in float64; 0 for a weight of 0."""
    if readable(w) and not w.dim():
        w = float(w)
    if not is_tensor(w):
        return 1.0 / w if w else 0.0
    w = w.detach().double()
    return w.reciprocal().masked_fill(w == 0, 0.0)


def summed(items: torch.Tensor, dims: str, sh: Sharding) -> torch.Tensor:
    """The sum of items over all ranks and dims, or all dims but those behind an arrow in `dims`; bools are counted."""
    alone = not dims and not items.dim()
    if items.dtype == torch.bool and (alone or sh.mesh is not None):  # (torch's own sum counts them as well)
        items = items.long()
    if alone:
        return items
    return sh.sum(items, dims if "->" in dims else f"{dims} ->")


def evaluate(
    terms: Any,
    stats: Any,
    known: Mapping[str, Weight] | None,
    scale: Mapping[str, tuple[Any, Any]] | None,
    sh: Sharding,
    loss_scale: float | None = None,
    at_once: bool = True,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """(what to differentiate, sums) of one microbatch. loss_scale multiplies the first alone.

    at_once: sums are over all ranks. If not, the first is this rank's summand, whose gradient is the same (that of an
    Invariant sum is nothing but handed on), and the second has `_Summand`s.
    """

    def over(items: torch.Tensor, dims: str) -> Any:
        return summed(items, dims, sh) if at_once else _counted(items, dims, sh)

    if isinstance(terms, Term):
        terms = {next(iter(known)) if known and len(known) == 1 else "loss": terms}
    if not isinstance(terms, Mapping) or not terms or not all(isinstance(t, Term) for t in terms.values()):
        raise UserError(
            f"a loss must return (terms, stats) with terms a Term or a dict of Terms, not {type(terms).__name__}"
        )
    found = {name: over(t.items, t.dims) for name, t in terms.items()}
    sums = found if at_once else {name: s.x for name, s in found.items()}
    aux: dict[str, Any] = {
        "sums": found,
        "stats": tree_map(lambda t: over(t.items, t.dims) if isinstance(t, Term) else t, stats),
    }
    if known is None or scale is None:
        (term,) = terms.values() if len(terms) == 1 else (None,)
        if term is None or term.weight is None:
            raise UserError(
                f"a loss with the terms {', '.join(terms)} needs weights=…, a function of the batch that gives each "
                "term's Weight (only a loss of one Term with a weight of its own can do without)"
            )
        aux["weight"] = over(term.weight, term.dims)
        value = next(iter(sums.values()))
        value = value if loss_scale is None else scaled(value, 1.0, loss_scale)
    else:
        if terms.keys() != known.keys():
            raise UserError(
                f"the loss has the terms {', '.join(sorted(terms))}, "
                f"but weights(batch) gives {', '.join(sorted(known))}: give every term one Weight"
            )
        parts = [scaled(s, scale[name][1], loss_scale) for name, s in sums.items()]
        value = sum(parts[1:], start=parts[0])
    return scalar(value), aux


def scaled(x: torch.Tensor, c: Any, loss_scale: float | None) -> torch.Tensor:
    """x · c · loss_scale. The two factors are multiplied first: the gradient of an fp16 x is their product, while either
    alone may leave fp16."""
    if loss_scale is None:
        return x * as_factor(c, x)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * as_factor(c * loss_scale, x)


def _times(x: Any, coefficient: float) -> Any:
    return x if coefficient == 1.0 else x * coefficient


def as_factor(c: Any, of: torch.Tensor) -> Any:
    """A number, or a 0-d tensor in the dtype of what it multiplies."""
    return c.to(of.dtype) if isinstance(c, torch.Tensor) else c


class Sums:
    """Sums over microbatches, and what they give in the end. They go over the ranks with the last microbatch, beside its
    backward."""

    def __init__(self, sh: Sharding, microbatches: int, at_once: bool) -> None:
        self.sh, self.left, self.at_once = sh, microbatches, at_once
        self.total: Any = None

    def add(self, aux: dict[str, Any], number: int) -> None:
        """number: that of the microbatch; they need not come in turn."""
        aux = tree_map(lambda t: _Rows(t.dim, {number: t.items}) if isinstance(t, EachRow) else t, aux)
        if self.total is None:
            self.total = aux
        else:
            pairs = zip(leaves(self.total), leaves(aux), strict=True)
            self.total = like(aux, [self._both(a, b) for a, b in pairs])
        self.left -= 1
        if not self.left and not self.at_once:
            self.total = _Reduced(self.total, self.sh)

    @staticmethod
    def _both(a: Any, b: Any) -> Any:
        if isinstance(a, _Summand):
            return _Summand(a.x + b.x, b.steps)
        if isinstance(a, _Rows):
            return _Rows(a.dim, {**a.parts, **b.parts})
        return a + b if is_tensor(a) else b

    def finish(
        self, scale: Mapping[str, tuple[Any, Any]] | None, known: Mapping[str, Weight] | None
    ) -> tuple[torch.Tensor, dict[str, Any], Any]:
        """(value of the loss, metrics, by what the gradients are still to be multiplied or None)."""
        found = self.total if self.at_once else self.total.finish()
        sums, stats, factor = found["sums"], found["stats"], None
        if scale is None:
            (name,), weight = sums, found["weight"]
            factor = reciprocal(weight)
            scale = {name: (weight, factor)}
        parts = [s * as_factor(scale[name][1], s) for name, s in sums.items()]
        means = {
            name: part
            if known is None or known[name].coefficient == 1.0
            else s * as_factor(reciprocal(scale[name][0]), s)
            for part, (name, s) in zip(parts, sums.items(), strict=True)
        }
        weights = {name: scale[name][0] for name in sums}
        stats = tree_map(lambda t: t.whole() if isinstance(t, _Rows) else t, stats)
        metrics = {"terms": means, "sums": sums, "weights": weights, "stats": stats}
        return sum(parts[1:], start=parts[0]), metrics, factor


def _add_in_place(
    of: Callable,
    add_sums: Callable[[Any], None],
    params: Any,
    wanted: list[bool],
    grads: list[Any],
    dtype: torch.dtype,
    reduce: tuple[Any, Sharding] | None = None,
    together: _Together | None = None,
) -> None:
    """Adds of's gradients to `grads`, each leaf's as soon as the backward has it; and first its sums by `add_sums`.

    reduce: (spec, sh): take them on to the layout of the optimizer's state: the sums so far and these (in the last
    microbatch), or with ZeRO-2 these, which are then added to the sums, which are there already. together: of the
    microbatches that are under way at the same time; reduce is then given for all of them.
    """
    each = reduce is not None and reduce[1].rules.zero == 2
    flat, shape = flatten(params)
    flat = [t.detach() if is_tensor(t) else t for t in flat]
    inputs = [t.requires_grad_() for t, w in zip(flat, wanted, strict=True) if w]
    with torch.enable_grad():
        value, aux = of(unflatten(shape, flat))
    add_sums(tree_map(cut_off, aux))
    del aux
    seen = [False] * len(flat)

    def add(i: int, g: Any) -> None:
        if grads[i] is None:
            grads[i] = g.to(torch.promote_types(g.dtype, dtype))
        else:
            grads[i].add_(g)

    reducer = None if reduce is None else Reducer(reduce[0], wanted, reduce[1], add)
    if together is not None and reducer is not None and not each:
        reducer = together.reducer(reducer)

    def take(i: int) -> Callable:
        def hook(leaf: torch.Tensor) -> None:
            if leaf.grad is None:  # it was handed to something that does not use it
                return
            g, leaf.grad, seen[i] = leaf.grad, None, True
            if not each:
                add(i, g)
            if reducer is not None:
                g, grads[i] = (g.to(torch.promote_types(g.dtype, dtype)), grads[i]) if each else (grads[i], None)
                reducer.add(i, g)

        return hook

    for i, leaf in enumerate(flat):
        if not wanted[i]:
            continue
        if reducer is None and together is None and torch.promote_types(leaf.dtype, dtype) == leaf.dtype:
            leaf.grad = grads[i]  # autograd adds by itself
        else:
            leaf.register_post_accumulate_grad_hook(take(i))
    halfway()
    if value.requires_grad and inputs:
        torch.autograd.backward(value, inputs=inputs)
    for i, leaf in enumerate(flat):
        if not wanted[i] or seen[i]:
            continue
        if leaf.grad is not None:
            grads[i], leaf.grad = leaf.grad, None
        else:  # the loss does not use it
            zeros = torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, dtype), requires_grad=False)
            if reducer is not None:
                g, grads[i] = (zeros, grads[i]) if each or grads[i] is None else (grads[i], None)
                reducer.add(i, g)
            elif grads[i] is None:
                grads[i] = zeros
    if reducer is not None:
        reducer.finish()


class _Together:
    """What microbatches share that are under way at the same time: a leaf's sum is reduced when all of them have added to
    it. A reducer for their own eyes, which each of them gives every leaf and ends."""

    def __init__(self, grads: list[Any], microbatches: int) -> None:
        self.grads, self.running = grads, microbatches
        self.left = [microbatches] * len(grads)
        self.behind: Reducer | None = None

    def reducer(self, made: Reducer) -> Any:
        """This object; what reduces in the end is the first that any of them made."""
        self.behind = made if self.behind is None else self.behind
        return self

    def add(self, i: int, g: Any) -> None:
        """The sum of leaf i, with this microbatch's gradient."""
        assert self.behind is not None
        self.left[i] -= 1
        if self.left[i]:
            self.grads[i] = g
        else:
            self.behind.add(i, g)

    def finish(self) -> None:
        assert self.behind is not None
        self.running -= 1
        if not self.running:
            self.behind.finish()


def cut_off(t: Any) -> Any:
    """A leaf without its graph."""
    if isinstance(t, _Summand):
        return _Summand(cut_off(t.x), t.steps)
    return t.detach() if is_tensor(t) else t


def _add_by_torch_func(
    of: Callable, params: Any, wanted: list[bool], grads: list[Any], dtype: torch.dtype
) -> dict[str, Any]:
    """The same where the gradients may be differentiated again: nothing in place."""
    flat = leaves(params)
    builder: list[Callable] = []

    def flat_of(some: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        new = iter(some)
        value, aux = of(like(params, [next(new) if w else t for t, w in zip(flat, wanted, strict=True)]))
        aux, build = tensors(aux)
        builder.append(build)
        return value, aux

    got, aux = torch.func.grad(flat_of, has_aux=True)([t for t, w in zip(flat, wanted, strict=True) if w])
    found = iter(got)
    for i, w in enumerate(wanted):
        if w:
            g = next(found)
            g = g.to(torch.promote_types(g.dtype, dtype))
            grads[i] = g if grads[i] is None else grads[i] + g
    return builder[0](aux)


def with_rows(ctx: Ctx, batch: Any) -> Ctx:
    """ctx with the global indices of this rank's rows, where random numbers need them."""
    rows = row_count(batch)
    if ctx.key is None or ctx.rows is not None or rows is None:
        return ctx
    sh = ctx.sh
    n = rows * math.prod(sh.mesh.sizes[a] for a in sh.axes("batch")) if sh.mesh is not None else rows
    device = next(t.device for t in leaves(batch) if is_tensor(t) and t.dim())
    return ctx.replace(rows=sh.index("batch", n, device=device))


def row_count(batch: Any) -> int | None:
    """How many rows a batch has here: the first dim that all its tensors share.

    Raises UserError where they differ.
    """
    sizes = {t.shape[0] for t in leaves(batch) if is_tensor(t) and t.dim()}
    if len(sizes) > 1:
        shown = ", ".join(f"{path}: {t.shape[0]}" for path, t in named(batch).items() if is_tensor(t) and t.dim())
        raise UserError(
            f"the batch's tensors differ in their first dim, its rows ({shown}): put what is no row-wise data in ctx.extras"
        )
    return next(iter(sizes), None)


def cut_batch(batch: Any, ctx: Ctx, n: int) -> list[tuple[Any, Ctx]]:
    """The n microbatches of what this rank holds, each with its context. 0-d tensors and other leaves go to all."""
    if n == 1:
        return [(batch, ctx)]
    rows = row_count(batch)
    if rows is None or rows < n:
        raise UserError(
            f"microbatches={n} needs at least as many rows of the batch on every rank, which holds {rows or 0}: use fewer"
        )

    def part(t: Any, i: int) -> Any:
        return torch.tensor_split(t, n)[i] if is_tensor(t) and t.dim() else t

    return [
        (tree_map(lambda t, i=i: part(t, i), batch), ctx.replace(rows=part(ctx.rows, i), parts=n)) for i in range(n)
    ]
