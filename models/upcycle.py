"""Upcycling: a mixture of experts that begins as a trained dense model (Komatsuzaki et al., arXiv 2212.05055).

    params, config = upcycled(params, dense, Routing(experts=8, top_k=2, before=False), key=key(0))

Every expert is a copy of the dense feed-forward part and a token's weights sum to 1, so that the model computes what it
did, whatever the router says. From there on experts differ, as each sees other tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fmegatron import tree
from fmegatron.dtensor import DTensor
from fmegatron.errors import UserError
from fmegatron.models.config import DecoderConfig
from fmegatron.models.decoder import Decoder
from fmegatron.models.moe import MoE
from fmegatron.parallel.routing import Routing
from fmegatron.random import Key, fold_in
from fmegatron.sharding import Sharding
from fmegatron.spec import Param, params_of

# The family in whose names the result is exported, where there is one of the same form.
FAMILIES = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
EXPERTS = "experts_"


def upcycled_config(
    config: DecoderConfig, routing: Routing, *, dense_layers: Iterable[int] = (), family: str | None = None
) -> DecoderConfig:
    """The model that `upcycled` makes of a dense one. Arguments and errors as there."""
    if config.moe is not None:
        raise UserError("upcycled: the model has experts already: give a dense one")
    sums = routing.normalised or (routing.scores == "softmax" and not routing.before)
    if not sums or routing.scale != 1 or routing.choose == "expert_choice":
        raise UserError(
            "upcycled: the weights of a token's experts must sum to 1, or the model would start as another one: give a routing "
            "with normalised=True (or softmax scores with before=False), scale=1 and every token its experts"
        )
    if routing.capacity is not None:
        raise UserError(
            f"upcycled: capacity={routing.capacity} drops choices, so that the model would start as another one: leave it out"
        )
    moe = MoE(routing, config.mlp, dense_layers=tuple(dense_layers), bias=config.mlp_bias)
    return dataclasses.replace(config, moe=moe, family=family or FAMILIES.get(config.family, config.family))


def upcycled(
    params: Any,
    config: DecoderConfig,
    routing: Routing,
    *,
    key: Key,
    dense_layers: Iterable[int] = (),
    family: str | None = None,
    sh: Sharding | None = None,
    held: Callable[[Any], Any] | None = None,
) -> tuple[Any, DecoderConfig]:
    """(params, config) of the model in which experts stand for the feed-forward part of every layer but `dense_layers`.

    params: of the dense model `config`, plain tensors or DTensors; other leaves than those of feed-forward parts are returned
        as they are, not copied.
    routing: how tokens choose. Its weights must sum to 1: normalised=True, or before=False with softmax scores; no scale, and
        no capacity, beyond which choices would be dropped.
    key: of the routers, drawn with the config's init_std.
    family: of the result; None: the one with experts that has the form of the dense one (Mixtral of Llama), if there is one.
    sh: where parameters lie at rest, needed for leaves that are DTensors, which every rank gathers one at a time.
    held: of a tree like a model's parameters what this rank of a pipeline holds (`Pipeline.held`), if params are those alone.

    Raises UserError for a routing whose weights do not sum to 1, a model that has experts, and params that are not its.
    """
    target = upcycled_config(config, routing, dense_layers=dense_layers, family=family)
    before, spec = (Decoder(c).spec() for c in (config, target))
    if held is not None:
        before, spec = held(before), held(spec)
    have, old = tree.named(params), params_of(before)
    if have.keys() != old.keys():
        wrong = ", ".join(sorted(have.keys() ^ old.keys())[:4])
        raise UserError(f"upcycled: params are not those of this dense model: they differ in {wrong}")
    if sh is None and any(isinstance(x, DTensor) for x in have.values()):
        raise UserError("params are DTensors: give sh=, the Sharding by which the experts lie at rest")
    sh = sh or Sharding()
    sh.check_spec(spec)

    def leaf(path: str, param: Param) -> Any:
        if path in have:
            return have[path]
        layer, _, name = path.rpartition(".")
        if name.startswith(EXPERTS):
            return _experts(have, layer, name.removeprefix(EXPERTS), param, sh)
        like = have[f"{layer}.down"]
        if like is None:
            return None
        held, dtype = sh.stored_index(param), param.dtype or like.dtype
        return sh.at_rest(
            param.init(fold_in(key, path), param.shape, index=held, dtype=dtype, device=like.device), param
        )

    return tree.like(spec, [leaf(path, param) for path, param in params_of(spec).items()]), target


def _experts(have: dict[str, Any], layer: str, name: str, param: Param, sh: Sharding) -> Any:
    """A leaf of the experts of a layer, all of which are the dense part: this rank's shard of it."""
    bias = "_bias" if name.endswith("_bias") else ""
    names = [name] if f"{layer}.{name}" in have else [f"{n}{bias}" for n in ("gate", "up")]
    parts = [have[f"{layer}.{n}"] for n in names]
    if all(x is None for x in parts):
        return None
    if any(x is None for x in parts):
        raise UserError(
            f"upcycled: of {layer} some of {', '.join(names)} are None and some are not: they become one leaf"
        )
    whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in parts]
    if len(whole) == 2:
        one = torch.stack(whole, -2)
    else:  # a fused leaf has gate and up by turns, the experts' has them as halves
        one = whole[0].movedim(-1, -2) if "gated" in param.names else whole[0]
    found = one.expand(param.shape)  # no copies yet
    for d, held in enumerate(sh.stored_index(param) or ()):
        found = found if held is None else found.index_select(d, held.to(found.device))
    return sh.at_rest(found.contiguous(), param)
