"""Gradients of a model whose routing is about the whole batch, in microbatches: read twice, once without gradients.

    gradients = in_two_passes(model, accumulate(model.loss, 4, weights=model.weights), microbatches=4)
    step = train_step(model.loss, optimizer, weights=model.weights, gradients=gradients)

What a router needs of other sequences are its counts and choices, which have no gradient. So the first pass finds them, and
the second has them as constants; value and gradients are those of one microbatch. For the switch loss alone, which needs
the shares of the load of the whole batch, the first pass goes by microbatches too. A capacity, expert choice or Sinkhorn's
algorithm over the batch decide layer by layer over all tokens: there the first pass is one microbatch, which without
gradients holds one layer's activations, and the second replays what it chose. Prediction modules with experts are read in
both passes, as layers are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fmegatron.accumulate import Term, cut_batch, summed, with_rows
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.grad import higher_order, to_local
from fmegatron.models.moe import counts_of, unread_counts
from fmegatron.parallel.pipeline import Pipeline
from fmegatron.parallel.routing_record import as_batch
from fmegatron.tree import add_trees, leaves, like


def needs_two_passes(model: Any) -> bool:
    """Is the model's routing, if it has one, about more than a microbatch?"""
    moe = getattr(getattr(model, "config", None), "moe", None)
    return moe is not None and moe.needs_two_passes


def in_two_passes(model: Any, gradients: Callable[..., Any], *, microbatches: int) -> Callable[..., Any]:
    """f(params, batch, ctx=Ctx(), *, loss_scale=None) of the type of `gradients`, that of `accumulate` or a `Pipeline` with so
    many microbatches, for a `Decoder`; `gradients` itself where the model needs no second pass.

    Each call costs a forward more. Raises UserError under torch.func.
    """
    if microbatches == 1 or not needs_two_passes(model):
        return gradients
    moe = model.config.moe
    whole = moe.routing.decides_on_batch
    parts = 1 if whole else microbatches
    first = dataclasses.replace(model, record_routing=True) if whole else model
    pipe = gradients.of(first) if isinstance(gradients, Pipeline) else None

    def run(params: Any, batch: Any, ctx: Ctx | None = None, *, loss_scale: float | None = None) -> Any:
        ctx = Ctx() if ctx is None else ctx
        if higher_order((params, to_local(batch))):
            raise UserError("two passes give gradients once, not inside torch.func: use one microbatch there")
        batch = to_local(batch)
        device = next(t.device for t in leaves(batch))
        extras = ctx.extras or {}
        # no counts are known yet, and the loss of this pass is read by nobody
        before = ctx.replace(extras={**extras, **unread_counts(model.config, device=device)})
        if pipe is not None:
            stats = pipe.statistics(params, batch, before, microbatches=parts)
        else:
            stats = _statistics(first, to_local(params), batch, before, parts)
        if moe.counts:
            extras = {**extras, **counts_of(stats, model.config)}
        if whole:
            batch = {**batch, "routing": as_batch(stats["routing"], ctx.sh)}
        return gradients(params, batch, ctx.replace(extras=extras), loss_scale=loss_scale)

    for name in ("norm", "alarm"):
        if hasattr(gradients, name):
            setattr(run, name, getattr(gradients, name))
    return run


def _statistics(model: Any, params: Any, batch: Any, ctx: Ctx, microbatches: int) -> Mapping[str, Any]:
    """What the routers of all layers and prediction modules count over the global batch, and choose in this rank's rows."""
    total: Any = None
    with torch.no_grad():
        for part, inner in cut_batch(batch, with_rows(ctx, batch), microbatches):
            stats = model.routing_statistics(params, part, inner)
            rows = [summed(t.items, t.dims, ctx.sh) if isinstance(t, Term) else t.items for t in leaves(stats)]
            found = like(stats, rows)
            total = add_trees(total, found)
    return total
