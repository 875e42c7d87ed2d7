"""What a model says of tokens whose keys and values are cached, and what its first prediction module says of the token behind
(see `fmegatron.models.mtp`): the two halves of `fmegatron.speculate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fmegatron.context import Ctx
from fmegatron.models import mtp
from fmegatron.models.decoder import Decoder


def read(
    model: Decoder, params: Mapping[str, Any], tokens: Tensor, cache: Any, start: int, *, ctx: Ctx, **batch: Tensor
) -> tuple[Tensor, Tensor]:
    """(the normed stream[batch seq embed], logits[batch seq vocab]) of tokens[batch seq], which fill the slots from `start` on.
    cache and batch: as for `Decoder.cached`; what slots behind hold is never read."""
    rest, ctx = model.cached_context(tokens, start, ctx, **batch)
    x, _ = model.stack(params["layers"], (model._stream(model.embed(params, rest, ctx)), cache), ctx)
    used = model.head_parameters(params, ctx)
    h = model._norm(used, "norm", x)
    return h, model.logits_of(used, h, ctx)


def drafted(
    model: Decoder,
    params: Mapping[str, Any],
    further: Tensor,
    states: Tensor,
    cache: Any,
    start: int,
    *,
    ctx: Ctx,
    **batch: Tensor,
) -> Tensor:
    """Logits[batch vocab] of the token two behind the last of the slots from `start` on, whose states[batch seq embed] `read`
    gave. further[batch seq]: the token one behind each."""
    index, sh = model.config.layers, ctx.sh
    rest, ctx = model.cached_context(further, start, ctx, **batch)
    extras = dict(ctx.extras)
    if mtp.own_experts(model.config) is not None:
        real = rest.get("real", torch.ones_like(further, dtype=torch.bool))
        extras |= {"real": [real], "expert_layers": torch.eye(model.config.mtp, device=further.device)}
    ctx = model._layer_context(ctx.replace(extras=extras), index).replace(layer=index)
    p = sh.use(params[mtp.ENTRY][index], model.spec()[mtp.ENTRY][index])
    used = model.head_parameters(params, ctx, embedding=True)
    x = mtp.joined(model, p, model._looked_up(used, further, ctx), states, ctx)
    y, _ = model.block(p, (x, cache), ctx)
    return model.logits_of(used, model._norm(p, "norm", y[:, -1:]), ctx)[:, -1]
