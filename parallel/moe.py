"""Mixture of experts as a transform of functions: route → dispatch → experts → combine.

    layer = moe(router(routing), mlp_experts(swiglu), number=8)
    y, routed = layer(leaves, x, ctx)                       # x and y[batch seq* embed]

Each part can be replaced: a router is any function (leaves, x, ctx) -> Routed, experts any function of rows (see
`fmegatron.parallel.experts`), the backend any of `fmegatron.parallel.dispatch`. Losses and statistics of what was decided are
functions of `Routed` (see `fmegatron.parallel.routing_losses`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fmegatron.context import PADDING, Ctx
from fmegatron.errors import UserError
from fmegatron.kernels.moe import wide_product
from fmegatron.parallel.dispatch import Backend, dispatched
from fmegatron.parallel.routing import Routed, Routing, route
from fmegatron.parallel.routing_record import replayed
from fmegatron.primitives import jittered
from fmegatron.random import fold_in

# Why one of several microbatches cannot have statistics of a batch.
WHOLE = (
    'routing has group="batch": {what} is about the whole batch, of which this is one of {parts} microbatches: use one '
    'microbatch, two passes (fmegatron.models.two_passes), or group="sequence"'
)
TO_ROUTE = "batch seq* embed, embed route -> batch seq* route"


def moe(
    router: Callable[[Mapping[str, Tensor], Tensor, Ctx], Routed],
    experts: Callable[..., Tensor],
    *,
    number: int,
    backend: Backend = "all-to-all",
) -> Callable[..., tuple[Tensor, Routed]]:
    """f(leaves, x, ctx, beside=None) -> (y, routed): what a token's experts make of it, weighted and summed; x and y[batch seq*
    embed]. beside: a function of what is added to it, computed while rows travel (see `dispatched`).

    router(leaves, x, ctx) -> Routed, on the stream. experts(rows, weights, ends, leaves, sh=sh), see `mlp_experts`. number: of all
    experts; it divides by the size of `expert`'s axes. backend: see `fmegatron.parallel.dispatch`.
    """

    def layer(
        leaves: Mapping[str, Tensor], x: Tensor, ctx: Ctx, beside: Callable[[], Tensor] | None = None
    ) -> tuple[Tensor, Routed]:
        routed = router(leaves, x, ctx)
        y = dispatched(experts, x, routed, leaves, number=number, sh=ctx.sh, backend=backend, beside=beside)
        return y, routed

    return layer


def router(routing: Routing) -> Callable[[Mapping[str, Tensor], Tensor, Ctx], Routed]:
    """The router of these settings: f(leaves, x[batch seq* embed], ctx) -> Routed.

    Leaves: `router`[embed route], optionally `router_bias`[route], added to the logits. ctx.extras may have
    "expert_bias"[route], which counts in the choice alone, and "routing"[batch seq choice], a choice made before, in place of
    one (see `fmegatron.parallel.routing_record`). Tokens of the segment `PADDING` are not routed.

    Raises UserError for one of several microbatches where a decision is about the whole batch.
    """

    def f(leaves: Mapping[str, Tensor], x: Tensor, ctx: Ctx) -> Routed:
        sh, dtype = ctx.sh, torch.promote_types(x.dtype, routing.dtype)
        if routing.jitter and ctx.key is not None:
            x = jittered(x, routing.jitter, fold_in(ctx.key, "jitter"), rows=ctx.rows, sh=sh)
        if dtype == torch.float32 and x.dtype == leaves["router"].dtype != dtype:  # without the casts
            sides = TO_ROUTE.split(" -> ")
            logits = sh.primitive(wide_product, (x, leaves["router"]), sides[0].split(", "), sides[1])
        else:
            logits = sh.dot(x.to(dtype), leaves["router"].to(dtype), TO_ROUTE, name="router")
        if "router_bias" in leaves:
            logits = logits + leaves["router_bias"].to(dtype)
        extras = ctx.extras or {}
        before: Mapping[str, Tensor] = {}
        if extras.get("routing") is not None:
            before = replayed(sh(extras["routing"], "batch seq choice -> batch seq* choice"))
        elif routing.decides_on_batch and ctx.parts > 1:
            raise UserError(WHOLE.format(what="the choice of experts", parts=ctx.parts))
        mask, bias = real_tokens(ctx, x.shape), extras.get("expert_bias")
        return route(logits, routing, sh=sh, bias=bias, mask=mask, key=ctx.key, rows=ctx.rows, **before)

    return f


def real_tokens(ctx: Ctx, shape: torch.Size) -> Tensor | None:
    """Which tokens of the stream are some, bool[batch seq*]; None: all of them."""
    sh, found = ctx.sh, None
    if ctx.segments is not None:
        found = sh(ctx.segments != PADDING, "batch seq -> batch seq*")
    if (real := (ctx.extras or {}).get("real")) is not None:  # see `fmegatron.padding`
        real = sh(real, "batch seq -> batch seq*")
        found = real if found is None else found & real
    for dim, at in (("batch", 0), ("seq*", 1)):
        if (n := sh.uneven_size(dim)) is not None:  # some positions only fill up a part
            held = sh.index(dim, n, device=None if found is None else found.device) >= 0
            held = held.view(-1, 1) if at == 0 else held.view(1, -1)
            found = held.expand(shape[0], shape[1]) if found is None else found & held
    return found
