"""Feed-forward parts that are a mixture of experts: their sizes, their leaves, and what a layer adds to the losses.

A decoder with experts carries from layer to layer, beside the stream, what its routers add up: {"x": the stream, "load":
tokens of each expert, [layer batch route], "kept": those that were not dropped, with a capacity, "by_score": those of each expert
by score alone, where the switch loss is of a whole batch, "balance": the switch loss of each sequence, [batch], "router_z": the
z-loss of each token, [batch seq*], if they have a coefficient, "balance of layers" and "router_z of layers", the part of each layer
in these sums, [layer batch], and "tokens", how many there are, [batch], "routing": what was chosen, [layer batch seq* choice], where it is recorded}.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmegatron.accumulate import EachRow, Term, Weight
from fmegatron.context import PADDING, Ctx
from fmegatron.errors import UserError
from fmegatron.initializers import Normal, Zeros
from fmegatron.parallel.moe import WHOLE
from fmegatron.parallel.routing import Routed, Routing
from fmegatron.parallel.routing_losses import counts_by_score, load, switch_loss, updated_bias, z_loss
from fmegatron.parallel.routing_record import recorded
from fmegatron.sharding import Sharding
from fmegatron.spec import Param

OF_LAYERS = " of layers"  # behind the name of a loss: what each layer adds to it
# of a context's extras: what prediction modules read as "routing_counts" (see `fmegatron.models.mtp`)
COUNTS_OF_MODULES = "mtp_routing_counts"
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

    @property
    def counts(self) -> bool:
        """Is the switch loss one of more than a sequence?"""
        return self.routing.group != "sequence" and bool(self.routing.switch_loss)

    @property
    def needs_two_passes(self) -> bool:
        """Must several microbatches be read twice, for what is about all of them?"""
        return self.routing.decides_on_batch or (self.routing.group == "batch" and self.counts)


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


def with_published_loss(moe: MoE, hf: Mapping[str, Any], *, default: float) -> MoE:
    """The experts with the auxiliary loss that a config.json turns on: `router_aux_loss_coef` (default: what transformers takes
    where it is left out) with `output_router_logits`, which published ones leave off.

    transformers takes one loss of all layers together, whose shares sum to top_k; ours is the sum over layers of losses that
    are 1 for an even load, so that a layer's coefficient here is top_k ÷ layers of it."""
    if not hf.get("output_router_logits"):
        return moe
    coefficient = hf.get("router_aux_loss_coef", default) * moe.routing.top_k / len(moe.layers(hf["num_hidden_layers"]))
    return dataclasses.replace(moe, routing=dataclasses.replace(moe.routing, switch_loss=coefficient))


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


def first_records(x: Tensor, moe: MoE, layers: int, sh: Sharding, *, record: bool = False) -> dict[str, Tensor]:
    """The carry in front of the first layer, for the stream x[batch seq* embed]. record: also of what is chosen."""
    number, routing = len(moe.layers(layers)), moe.routing
    rows, tokens = x.shape[:2]
    wide = torch.promote_types(x.dtype, torch.float32)

    def zeros(dims: str, *shape: int, dtype: torch.dtype = wide) -> Tensor:
        def made(_: Tensor) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=x.device)

        return sh.primitive(made, (x.detach(),), ("batch seq* embed",), dims)

    found = {"x": x}
    counts = {"load": True, "kept": routing.capacity is not None, "by_score": moe.counts}
    found |= {n: zeros("layer batch route", number, rows, routing.experts) for n, there in counts.items() if there}
    shapes = {"balance": ("batch", rows), "router_z": ("batch seq*", rows, tokens)}
    found |= {name: zeros(*shapes[name]) for name in moe.recorded}  # type: ignore[arg-type]
    if moe.recorded:
        found |= {f"{name}{OF_LAYERS}": zeros("layer batch", number, rows) for name in moe.recorded}
        found["tokens"] = zeros("batch", rows)
    if record:
        shape = (number, rows, tokens, routing.choices)
        found["routing"] = zeros("layer batch seq* choice", *shape, dtype=torch.int32)
    return found


def add_records(records: Mapping[str, Tensor], routed: Routed, moe: MoE, ctx: Ctx) -> dict[str, Tensor]:
    """Records with those of one layer. ctx.extras: "expert_layer", 1 for this layer and 0 for others with experts, [layer];
    "routing_counts"[layer route], where counts of more than this microbatch are known.

    Raises UserError for one of several microbatches without counts that the switch loss needs."""
    sh, routing, found, extras = ctx.sh, moe.routing, dict(records), ctx.extras or {}

    def add(name: str, mine: Tensor) -> None:
        old = found[name]
        here = extras["expert_layer"].to(old.dtype).view(-1, *(1 for _ in mine.shape))
        found[name] = old + here * mine.to(old.dtype)

    add("load", load(routed, sh=sh))
    if "kept" in found:
        add("kept", load(routed, sh=sh, kept=True))
    if "routing" in found:
        add("routing", recorded(routed))
    counts = None
    if "by_score" in found:
        mine = counts_by_score(routed, routing, sh=sh)
        add("by_score", mine)
        counts = _counts(mine, routing, ctx)
    if not moe.recorded:
        return found
    mask = routed.mask
    real = torch.ones_like(routed.weights[..., 0]) if mask is None else mask.to(routed.weights.dtype)
    tokens = sh.sum(real.detach(), "batch seq* -> batch")
    found["tokens"] = tokens.to(found["tokens"].dtype)  # of every layer the same
    if "balance" in found:  # weighed by the sequence's tokens, by whose number the term is divided
        balance = switch_loss(routed, routing, sh=sh, counts=counts) * tokens
        found["balance"] = found["balance"] + balance
        add(f"balance{OF_LAYERS}", balance.detach())
    if "router_z" in found:
        z = z_loss(routed.logits, routed.mask)
        found["router_z"] = found["router_z"] + z
        add(f"router_z{OF_LAYERS}", sh.sum(z.detach(), "batch seq* -> batch"))
    return found


def _counts(mine: Tensor, routing: Routing, ctx: Ctx) -> Tensor:
    """[route], by which the switch loss of more than a sequence tells shares; mine[batch route]: those of this microbatch."""
    known = (ctx.extras or {}).get("routing_counts")
    if known is None and ctx.parts > 1:
        if routing.group == "batch":
            raise UserError(WHOLE.format(what="the switch loss", parts=ctx.parts))
        raise UserError(
            f'routing has group="approximate": the counts of the microbatches so far are missing, of which this is one of {ctx.parts}: '
            "give accumulate(…, running=fmegatron.models.moe.running_counts(config)), or use one microbatch (a pipeline has no "
            "running counts)"
        )
    if known is not None:
        known = (ctx.extras["expert_layer"].to(mine)[:, None] * known.to(mine)).sum(0)
        if routing.group == "batch":
            return known
    so_far = ctx.sh.sum(mine, "batch route -> route")
    return so_far if known is None else known + so_far


def unread_counts(config: Any, *, device: Any = None) -> dict[str, Tensor]:
    """Extras for microbatches whose switch loss nobody reads, by a decoder's config."""
    if config.moe is None or not config.moe.counts:
        return {}
    sizes = len(config.moe.layers(config.layers)), config.moe.routing.experts
    return counts_of({"by_score": torch.zeros(sizes, device=device)}, config)


def counts_of(stats: Mapping[str, Any], config: Any) -> dict[str, Tensor]:
    """Extras with the counts by score of statistics, those of the layers and those of prediction modules; zeros where statistics have
    none of these."""
    counts = stats["by_score"]
    found = {"routing_counts": counts}
    if config.mtp and config.has_experts(config.layers):
        own = stats.get("mtp", {"by_score": counts.new_zeros(config.mtp, counts.shape[-1])})
        found[COUNTS_OF_MODULES] = own["by_score"]
    return found


def running_counts(config: Any, *, device: Any = None) -> Any:
    """`running` of `accumulate` for a decoder's config with group="approximate"; None for another."""
    if config.moe is None or config.moe.routing.group != "approximate":
        return None

    def running(extras: Any, stats: Any) -> Any:
        if stats is None:
            return {**(extras or {}), **unread_counts(config, device=device)}
        return {**extras, **{n: extras[n].to(x) + x for n, x in counts_of(stats, config).items()}}

    return running


def record_terms(records: Mapping[str, Tensor]) -> tuple[dict[str, Term], dict[str, Any]]:
    """(terms of the loss, statistics) of the records behind the last layer."""
    dims = {"balance": "batch", "router_z": "batch seq*"}
    terms = {name: Term(records[name], dims[name]) for name in dims if name in records}
    counts = ("load", "kept", "by_score")
    stats: dict[str, Any] = {n: Term(records[n], "layer batch route -> layer route") for n in counts if n in records}
    stats |= {n: Term(x, "layer batch -> layer") for n, x in records.items() if n.endswith(OF_LAYERS)}
    if "tokens" in records:
        stats["tokens"] = Term(records["tokens"], "batch")
    if "routing" in records:
        stats["routing"] = EachRow(records["routing"], 1)
    return terms, stats


def load_metrics(stats: Mapping[str, Tensor] | None, config: Any) -> dict[str, Tensor]:
    """Of a step's statistics, what a run writes for each layer with experts: "max_load.3", the largest expert's tokens over
    the mean of all, 1 if they are even; with a capacity "dropped.3", the share of choices that found no place; and
    "balance.3" and "router_z.3", a layer's part of these losses, where they have a coefficient."""
    if config.moe is None or not stats or "load" not in stats:
        return {}
    load = stats["load"]
    names = config.moe.layers(config.layers)
    uneven = load.amax(-1) / load.mean(-1).clamp(min=1e-30)
    found = {f"max_load.{i}": v for i, v in zip(names, uneven.unbind(), strict=True)}
    if "kept" in stats:
        dropped = 1 - stats["kept"].sum(-1) / load.sum(-1).clamp(min=1e-30)
        found |= {f"dropped.{i}": v for i, v in zip(names, dropped.unbind(), strict=True)}
    for name in config.moe.recorded:
        each = stats[f"{name}{OF_LAYERS}"] / stats["tokens"].clamp(min=1)
        found |= {f"{name}.{i}": v for i, v in zip(names, each.unbind(), strict=True)}
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
