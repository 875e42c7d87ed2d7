"""Generation over the ranks of a pipeline: each has the layers of its stages, and their part of the cache.

    pipe = pipeline(model, make_schedule("gpipe", 2, 1), mesh=mesh)
    generate_tokens(pipe, params, prompts, tokens=20, sh=inside_stage(sh, model.spec()))      # on every rank

A token's stream goes through the stages in turn, and the logits of the last one to all ranks, which so draw alike. A
stage may lie on several ranks: heads and vocabulary are divided as in training, rows and tokens are not. Any model does
whose `cached` goes through its own `embed`, `stack` and `unembed` (stream -> logits), which here run where they lie.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.grad import to_local
from fmegatron.parallel.pipeline_stage import carry_like, layers_of
from fmegatron.parallel.point_to_point import Messages
from fmegatron.sharding import Sharding
from fmegatron.tree import leaves, like, tree_map


def cached(
    pipe: Any, params: Mapping[str, Any], tokens: Tensor, cache: Any, start: int, ctx: Ctx, batch: Any
) -> Tensor:
    """`model.cached` of a pipeline's model on the ranks of that pipeline, with what each holds: the logits, on all."""
    if not hasattr(pipe.model, "cached"):
        raise UserError(f"{type(pipe.model).__name__} has no `cached`, without which a model does not generate")
    ctx = ctx.replace(sh=_undivided(pipe, ctx.sh))
    with pipe.alarm() as alarm, torch.no_grad():
        messages = pipe.messages()
        if messages is not None:
            messages.check = alarm.check
        view: Any = _OverStages(pipe, messages)
        logits = type(pipe.model).cached(view, to_local(params), tokens, cache, start, ctx, **batch)
        if messages is not None:
            messages.finish()
        return logits


def make_cache(pipe: Any, rows: int, slots: int, sh: Sharding | None, options: Mapping[str, Any]) -> Any:
    """`model.cache` of what this rank holds: its own layers, and of keys and values its own heads."""
    whole = pipe.model.cache(rows, slots, **{**options, "device": "meta"})
    ranks = 1 if sh is None or sh.mesh is None else math.prod(sh.mesh.sizes[a] for a in sh.axes("kv"))

    def own(t: Tensor) -> Tensor:
        shape = (*t.shape[:2], t.shape[2] // ranks, t.shape[3]) if t.ndim == 4 else t.shape
        return torch.zeros(shape, dtype=t.dtype, device=options.get("device", "cpu"))

    return tree_map(own, {i: whole[i] for i in pipe.spec["layers"]})


def _undivided(pipe: Any, sh: Sharding) -> Sharding:
    """`sh` with whole rows and tokens on every rank, and a layout "vocab*" that is whole."""
    if sh.mesh is None:
        return sh
    key = ("undivided", id(sh))
    if key not in pipe._cache:
        whole = dict.fromkeys(("batch", "seq", "seq*", "vocab*", "batch'", "seq'", "batch''", "seq''"))
        uneven = {n: size for n, size in sh.rules.uneven.items() if n not in whole}
        compute = {**sh.rules.compute, **whole, "expert'": sh.rules.compute.get("expert")}
        rules = dataclasses.replace(sh.rules, compute=compute, zigzag={}, uneven=uneven)
        pipe._cache[key] = sh, dataclasses.replace(sh, rules=rules, _plans={})  # and sh, whose id it is
    return pipe._cache[key][1]


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

    def stack(self, layers: Any, carry: Any, ctx: Ctx) -> Any:
        """This rank's layers, at their turn."""
        x, cache = carry
        pipe, placement = self.pipe, self.pipe.table.placement
        run = layers_of(self.model, pipe.whole_spec)
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

    def unembed(self, params: Any, x: Tensor, ctx: Ctx) -> Tensor:
        """From the rank with the head to all."""
        pipe, cache = self.pipe, self.pipe._cache
        last = pipe.table.placement[pipe.last]
        y = None
        if last == pipe.rank:
            y = self.model.unembed(params, x, ctx)
            if ctx.sh.mesh is not None:
                y = ctx.sh(y, "batch seq vocab -> batch seq vocab*")
                y = y[..., : ctx.sh.rules.uneven.get("vocab", y.shape[-1])].contiguous()
            y = y.contiguous()
        if pipe.group is not None:
            source = dist.get_global_rank(pipe.group, last)
            key = ("logits", ctx.sh.precision)
            if key not in cache:
                box = [None if y is None else (y.shape[-1], y.dtype)]
                dist.broadcast_object_list(box, source, group=pipe.group)
                cache[key] = box[0]
            if y is None:
                vocab, dtype = cache[key]
                y = torch.empty((*x.shape[:-1], vocab), dtype=dtype, device=pipe.mesh.device)
            dist.broadcast(y, source, group=pipe.group)
        assert y is not None
        others = () if ctx.sh.mesh is None else tuple(a for a, n in ctx.sh.mesh.sizes.items() if n > 1)
        if others:  # equal on all but for rounding: a rank that drew another token would be out of step
            group = pipe.mesh.process_group(others)
            dist.broadcast(y, dist.get_global_rank(group, 0), group=group)
        return y
