"""Generation over the ranks of a pipeline: each has the layers of its stages, and their part of the cache.

    pipe = pipeline(model, make_schedule("gpipe", 2, 1), mesh=mesh)
    generate_tokens(pipe, params, prompts, tokens=20, sh=inside_stage(sh, model.spec()))      # on every rank

A token's stream goes through the stages in turn, and the logits of the last one to all ranks, which so draw alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.parallel.alarm import Alarm
from fmegatron.parallel.pipeline_stage import carry_like
from fmegatron.parallel.point_to_point import Messages
from fmegatron.tree import leaves, like


def cached(
    pipe: Any, params: Mapping[str, Any], tokens: Tensor, cache: Any, start: int, ctx: Ctx, batch: Any
) -> Tensor:
    """`model.cached` of a pipeline's model on the ranks of that pipeline, with what each holds: the logits, on all."""
    if not hasattr(pipe.model, "cached"):
        raise UserError(f"{type(pipe.model).__name__} has no `cached`, without which a model does not generate")
    if ctx.sh.mesh is not None and ctx.sh.mesh.world > 1:
        raise UserError(
            f"generation runs on a mesh of {pipe.axis!r} alone, but a stage of this one is on {ctx.sh.mesh.world} ranks"
        )
    with Alarm(pipe._stop) as alarm, torch.no_grad():
        messages = pipe.messages()
        if messages is not None:
            messages.check = alarm.check
        view: Any = _OverStages(pipe, messages)
        logits = type(pipe.model).cached(view, params, tokens, cache, start, ctx, **batch)
        if messages is not None:
            messages.finish()
        return logits


class _OverStages:
    """A model whose `cached` runs over the stages: embedding, layers and logits where they lie."""

    def __init__(self, pipe: Any, messages: Messages | None) -> None:
        self.pipe, self.model, self.messages = pipe, pipe.model, messages

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def embed(self, params: Any, batch: Any, ctx: Ctx) -> Any:
        """The stream; elsewhere one without data."""
        if self.pipe.table.placement[self.pipe.first] == self.pipe.rank:
            return self.model.embed(params, batch, ctx)
        key, cache = ("stream", tuple(batch["tokens"].shape), ctx.sh.precision), self.pipe._cache
        if key not in cache:
            cache[key] = carry_like(self.model, self.pipe.whole_spec, self.pipe.ends, batch, ctx)
        return cache[key]

    def _stack(self, layers: Any, carry: Any, ctx: Ctx) -> Any:
        """This rank's layers, at their turn."""
        x, cache = carry
        pipe, placement = self.pipe, self.pipe.table.placement
        run = getattr(self.model, "stack", None) or self.model._stack
        for s in range(pipe.first, pipe.last + 1):
            if placement[s] != pipe.rank:
                continue
            if s > pipe.first and placement[s - 1] != pipe.rank:
                x = self._received(placement[s - 1], x)
            if len(numbers := pipe.assignment[s].layers):
                x, _ = run({i: layers[i] for i in numbers}, (x, cache), ctx)
            if s < pipe.last and placement[s + 1] != pipe.rank:
                self._send(placement[s + 1], leaves(x))
        return x, cache

    def _send(self, peer: int, tensors: list[Tensor]) -> None:
        assert self.messages is not None
        self.messages.exchange([(peer, [t.contiguous() for t in tensors], True, self.messages.made())])

    def _received(self, peer: int, x: Any) -> Any:
        assert self.messages is not None
        empty = self.messages.empty([(tuple(t.shape), t.dtype) for t in leaves(x)])
        (arrival,) = self.messages.exchange([(peer, empty, False, None)])
        assert arrival is not None
        return like(x, arrival.wait())

    def _logits(self, params: Any, x: Tensor, ctx: Ctx) -> Tensor:
        """From the rank with the head to all."""
        pipe = self.pipe
        last = pipe.table.placement[pipe.last]
        if last == pipe.rank:
            y = self.model._logits(params, x, ctx).contiguous()
        else:
            dtype, device = ctx.sh.precision.compute_dtype, pipe.mesh.device
            y = torch.empty((*x.shape[:-1], self.model.config.vocab), dtype=dtype, device=device)
        if pipe.group is not None:
            dist.broadcast(y, dist.get_global_rank(pipe.group, last), group=pipe.group)
        return y
