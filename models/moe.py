"""Feed-forward parts that are a mixture of experts: their sizes, their leaves, and what a layer adds to the losses.

A decoder with experts carries from layer to layer, beside the stream, what its routers add up: {"x": the stream, "load":
tokens of each expert, [layer batch route], "kept": those that were not dropped, with a capacity, "balance": the switch loss of each sequence, [batch], "router_z": the z-loss of each
token, [batch seq*]}, the last two if they have a coefficient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmegatron.accumulate import Term, Weight
from fmegatron.context import PADDING, Ctx
from fmegatron.errors import UserError
from fmegatron.initializers import Normal, Zeros
from fmegatron.parallel.routing import Routed, Routing
from fmegatron.parallel.routing_losses import load, switch_loss, updated_bias, z_loss
from fmegatron.sharding import Sharding
from fmegatron.spec import Param

AMONG_EXPERTS = "batch' seq'"  # where the tokens are that an expert's leaves are applied to


@dataclass(frozen=True)
class MoE:
    """Sizes and form of a decoder's experts.

    routing: how tokens choose their experts (see `Routing`).
    mlp: width of one expert.
    shared, shared_gate: width of the expert that every token has beside the chosen ones (0: none), and whether a sigmoid of
        the token weighs it (Qwen2-MoE).
    dense_layers: indices of layers that have no experts, but a feed-forward part of the config's `mlp`.
    bias, router_bias: biases of the experts' products, and of the router (GPT-OSS).
    """

    routing: Routing
    mlp: int
    shared: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    bias: bool = False
    router_bias: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        if not isinstance(self.mlp, int) or self.mlp < 1:
            raise UserError(f"moe: mlp={self.mlp!r}, the width of an expert, must be an int of 1 or more")
        if not isinstance(self.shared, int) or self.shared < 0:
            raise UserError(f"moe: shared={self.shared!r} must be 0 (none) or the width of the shared expert")
        if self.shared_gate and not self.shared:
            raise UserError("moe: shared_gate=True without a shared expert: give its width shared=…")

    def layers(self, number: int) -> tuple[int, ...]:
        """Indices of the layers with experts, of so many layers."""
        return tuple(i for i in range(number) if i not in self.dense_layers)

    @property
    def recorded(self) -> tuple[str, ...]:
        """The terms of the loss that routers add to."""
        pairs = (("balance", self.routing.switch_loss), ("router_z", self.routing.z_loss))
        return tuple(name for name, coefficient in pairs if coefficient)


def moe_to_dict(moe: MoE) -> dict[str, Any]:
    """As JSON can hold it."""
    found = dataclasses.asdict(moe)
    found["routing"]["dtype"] = str(moe.routing.dtype).removeprefix("torch.")
    return found


def moe_from_dict(fields: Mapping[str, Any]) -> MoE:
    """What `moe_to_dict` wrote."""
    routing = dict(fields["routing"])
    routing["dtype"] = getattr(torch, routing["dtype"])
    return MoE(**{**fields, "routing": Routing(**routing)})


def expert_spec(moe: MoE, *, embed: int, gated: bool, std: Normal, out: Normal) -> dict[str, Param]:
    """The leaves of a layer's router, experts and shared expert."""
    number, among, stream = moe.routing.experts, AMONG_EXPERTS, "batch seq*"
    found = {"router": Param((embed, number), "embed route", std, over=stream)}
    if moe.router_bias:
        found["router_bias"] = Param((number,), "route", Zeros(), over=stream)
    if moe.routing.expert_bias:
        # moved by `updated_biases` alone: its gradient is 0
        found["expert_bias"] = Param((number,), "route", Zeros(), over=stream, dtype=torch.float32, decay=False)
    up, wide, dims = ("experts_gate_up", (2, moe.mlp), "gated emlp") if gated else ("experts_up", (moe.mlp,), "emlp")
    found[up] = Param((number, embed, *wide), f"expert embed {dims}", std, over=among)
    found["experts_down"] = Param((number, moe.mlp, embed), "expert emlp embed", out, over=among)
    if moe.bias:
        found[f"{up}_bias"] = Param((number, *wide), f"expert {dims}", Zeros(), over=among, decay=False)
        found["experts_down_bias"] = Param((number, embed), "expert embed", Zeros(), over=f"{among} emlp", decay=False)
    if moe.shared_gate:
        found["shared_weight"] = Param((embed,), "embed", std, over=stream, decay=True)
    return found


def first_records(x: Tensor, moe: MoE, layers: int) -> dict[str, Tensor]:
    """The carry in front of the first layer, for the stream x[batch seq* embed]."""
    rows, tokens = x.shape[:2]

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)

    found = {"x": x, "load": zeros(len(moe.layers(layers)), rows, moe.routing.experts)}
    if moe.routing.capacity is not None:
        found["kept"] = zeros(*found["load"].shape)
    shapes = {"balance": (rows,), "router_z": (rows, tokens)}
    return found | {name: zeros(*shapes[name]) for name in moe.recorded}


def add_records(records: Mapping[str, Tensor], routed: Routed, moe: MoE, ctx: Ctx) -> dict[str, Tensor]:
    """Records with those of one layer. ctx.extras: "expert_layer", 1 for this layer and 0 for others with experts, [layer]."""
    sh, routing, found = ctx.sh, moe.routing, dict(records)
    mine = load(routed, sh=sh).to(found["load"].dtype)
    found["load"] = found["load"] + ctx.extras["expert_layer"].to(mine.dtype)[:, None, None] * mine
    if "kept" in found:
        kept = load(routed, sh=sh, kept=True).to(mine.dtype)
        found["kept"] = found["kept"] + ctx.extras["expert_layer"].to(mine.dtype)[:, None, None] * kept
    if "balance" in found:  # weighed by the sequence's tokens, by whose number the term is divided
        mask = routed.mask
        real = torch.ones_like(routed.weights[..., 0]) if mask is None else mask.to(routed.weights.dtype)
        tokens = sh.sum(real.detach(), "batch seq* -> batch")
        found["balance"] = found["balance"] + switch_loss(routed, routing, sh=sh) * tokens
    if "router_z" in found:
        found["router_z"] = found["router_z"] + z_loss(routed.logits, routed.mask)
    return found


def record_terms(records: Mapping[str, Tensor]) -> tuple[dict[str, Term], dict[str, Term]]:
    """(terms of the loss, statistics) of the records behind the last layer."""
    dims = {"balance": "batch", "router_z": "batch seq*"}
    terms = {name: Term(records[name], dims[name]) for name in dims if name in records}
    counts = ("load", "kept")
    return terms, {name: Term(records[name], "layer batch route -> layer route") for name in counts if name in records}


def load_metrics(stats: Mapping[str, Tensor] | None, config: Any) -> dict[str, Tensor]:
    """Of a step's statistics, what a run writes for each layer with experts: "max_load.3", the largest expert's tokens over
    the mean of all, 1 if they are even; and with a capacity "dropped.3", the share of choices that found no place."""
    if config.moe is None or not stats or "load" not in stats:
        return {}
    load = stats["load"]
    names = config.moe.layers(config.layers)
    uneven = load.amax(-1) / load.mean(-1).clamp(min=1e-30)
    found = {f"max_load.{i}": v for i, v in zip(names, uneven.unbind(), strict=True)}
    if "kept" in stats:
        dropped = 1 - stats["kept"].sum(-1) / load.sum(-1).clamp(min=1e-30)
        found |= {f"dropped.{i}": v for i, v in zip(names, dropped.unbind(), strict=True)}
    return found


def record_weights(batch: Mapping[str, Tensor], moe: MoE) -> dict[str, Weight]:
    """Of these terms: the tokens that are some, and the coefficients."""
    segments = batch.get("segments")
    real = batch.get("real", torch.ones_like(batch["tokens"], dtype=torch.bool))  # False: only fills up a part
    real = real if segments is None else real & (segments != PADDING)
    every = {
        "balance": Weight(real, "batch seq", moe.routing.switch_loss),
        "router_z": Weight(real, "batch seq", moe.routing.z_loss),
    }
    return {name: every[name] for name in moe.recorded}


def updated_biases(
    params: Mapping[str, Any], stats: Mapping[str, Tensor], spec: Mapping[str, Any], moe: MoE, sh: Sharding
) -> dict[str, Any]:
    """Parameters with the biases of the choice moved by a step's load (Wang et al., 2024, as in DeepSeek-V3).

    stats: "load"[layer route], of the global batch."""
    layers, slots = dict(params["layers"]), moe.layers(len(spec["layers"]))
    for slot, index in enumerate(slots):
        if index not in layers or "expert_bias" not in layers[index]:
            continue
        param, old = spec["layers"][index]["expert_bias"], layers[index]["expert_bias"]
        zero = torch.zeros_like(stats["load"][slot])
        step = updated_bias(zero, stats["load"][slot], moe.routing.bias_rate).to(old.dtype)
        layers[index] = {
            **layers[index],
            "expert_bias": old + (step if sh.mesh is None else sh.shard_param(step, param)),
        }
    return {**params, "layers": layers}
