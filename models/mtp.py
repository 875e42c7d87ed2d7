"""Multi-token prediction: modules behind the layers that predict tokens further than the next one.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 2.2. Module k of N reads, for token i, the hidden
state h(k-1) of the module before and the embedding of the token k further; it predicts the token behind that one:

    h'(k, i) = [norm(embedding of token i + k); norm(h(k-1, i))] · join        of sizes 2 · embed -> embed
    h(k, i)  = norm(block(h'(k))(i))                                            a block as the model's last one
    loss(k)  = the mean of cross_entropy(h(k, i) · head, token i + k + 1)       of the i that have such a token

h(0) is what the model's own head reads, behind the last norm, as in implementations that serve DeepSeek's weights; embedding and
head are the model's. The loss of training has mtp_weight / N · loss(k) for each module, as the terms "mtp_loss.1", …. Without
them the model is what it would be without the modules.

Tokens are found by their place in the whole sequence, whatever ranks hold it. A token in another document (`segments`) is none:
what a module makes of the last tokens of a document is no prediction, and experts do not see it.

The leaves of module k are {"embed_norm", "hidden_norm", "join", the block's, "norm"}, in params["mtp"][layers + k - 1].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmegatron.accumulate import EachRow, Term, Weight
from fmegatron.context import PADDING, Ctx
from fmegatron.models.config import DecoderConfig
from fmegatron.models.moe import COUNTS_OF_MODULES, MoE, load_metrics, updated_biases
from fmegatron.sharding import Sharding

IGNORE = -100  # the label of a token without a loss
JOIN = "batch seq* both, both embed -> batch seq* embed"
ENTRY = "mtp"  # of a tree of parameters, and of statistics


def loss_name(depth: int) -> str:
    """The term of the loss, and its name in metrics, of the module that looks `depth` tokens further (1, 2, …)."""
    return f"mtp_loss.{depth}"


@dataclass(frozen=True)
class Further:
    """Of each token of a batch, what lies some tokens further; each [batch seq].

    tokens: ids, any number where there is none. labels: the token behind it, `IGNORE` where none counts. mask: by what its loss is
    multiplied, if the batch says so. there: is there such a token, of the same document?
    """

    tokens: Tensor
    labels: Tensor
    mask: Tensor | None
    there: Tensor

    @property
    def counts(self) -> Tensor:
        """By what each token's loss counts."""
        found = self.labels != IGNORE
        return found if self.mask is None else self.mask * found


def further(batch: Mapping[str, Tensor], depths: int, sh: Sharding) -> list[Further]:
    """What lies 1, …, `depths` tokens further in the whole sequence, of which ranks may hold parts in any order.

    batch: as this rank holds it: tokens, labels, and perhaps mask, segments and real. Its integers are gathered over the ranks
    of the sequence.
    """
    whole = {n: sh(batch[n], "batch seq -> batch all") for n in _READ if n in batch}
    length = whole["tokens"].shape[1]

    def moved(name: str, by: int, filling: Any) -> Tensor:
        x, by = whole[name], min(by, length)
        return torch.cat([x[:, by:], torch.full_like(x[:, :by], filling)], 1)

    def own(x: Tensor) -> Tensor:
        return sh(x, "batch all -> batch seq")

    found = []
    for depth in range(1, depths + 1):
        place = torch.arange(length, device=whole["tokens"].device) + depth
        there = (place < length).expand_as(whole["tokens"])
        labels = moved("labels", depth, IGNORE)
        if "segments" in whole:
            segments = whole["segments"]
            there = there & (moved("segments", depth, PADDING) == segments) & (segments != PADDING)
            # behind the end of the row nothing is known of the label but that it is one
            target = moved("segments", depth + 1, PADDING)
            labels = labels.masked_fill(~there | ((target != segments) & (target != PADDING)), IGNORE)
        if "real" in whole:
            there = there & moved("real", depth, False)
        mask = own(moved("mask", depth, 0)) if "mask" in whole else None
        found.append(Further(own(moved("tokens", depth, 0)), own(labels), mask, own(there)))
    return found


_READ = ("tokens", "labels", "mask", "segments", "real")


def weights(batch: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Weight]:
    """By what the terms are divided: the tokens that count at their depth; and their coefficients."""
    depths = config.mtp if config.mtp_weight else 0
    kept: dict[Any, list[Further]] = {}

    def of(depth: int) -> Callable[[Sharding], Tensor]:
        def items(sh: Sharding) -> Tensor:
            if not kept:
                kept[ENTRY] = further(batch, depths, sh)
            return kept[ENTRY][depth - 1].counts

        return items

    coefficient = config.mtp_weight / max(depths, 1)
    return {loss_name(k): Weight(of(k), "batch seq", coefficient) for k in range(1, depths + 1)}


def own_experts(config: DecoderConfig) -> MoE | None:
    """The experts of the modules as those of a model of their own, all of whose layers have some; None where they have none."""
    if config.moe is None or not config.has_experts(config.layers):
        return None
    return dataclasses.replace(config.moe, dense_layers=())


def layers_with_experts(config: DecoderConfig) -> int:
    """How many layers have experts, and modules that the loss reads: those whose choices are recorded and replayed."""
    if config.moe is None:
        return 0
    modules = config.mtp if config.mtp_weight and own_experts(config) is not None else 0
    return len(config.moe.layers(config.layers)) + modules


def context(ctx: Ctx, config: DecoderConfig, found: list[Further]) -> Ctx:
    """The context of the modules, made of that of the layers."""
    moe = own_experts(config)
    if config.moe is None or moe is None:
        return ctx
    extras = {
        n: x
        for n, x in ctx.extras.items()
        if n not in ("routing", "expert_layers", "routing_counts", COUNTS_OF_MODULES)
    }
    if COUNTS_OF_MODULES in ctx.extras:
        extras["routing_counts"] = ctx.extras[COUNTS_OF_MODULES]
    replayed, layers = ctx.extras.get("routing"), len(config.moe.layers(config.layers))
    if replayed is not None and replayed.shape[2] > layers:
        extras["routing"] = replayed[:, :, layers:]
    each = torch.eye(len(moe.layers(config.mtp)), device=found[0].tokens.device)
    extras |= {"real": [f.there for f in found], "expert_layers": each}
    return ctx.replace(extras=extras)


def layer_extras(extras: dict[str, Any], config: DecoderConfig, index: int) -> dict[str, Any]:
    """What the module of this index reads of them."""
    if own_experts(config) is None:
        return extras
    depth = index - config.layers
    rest = {n: x for n, x in extras.items() if n not in ("real", "expert_layers")}
    if "routing" in rest:
        rest["routing"] = rest["routing"][:, :, depth]
    return {**rest, "real": extras["real"][depth], "expert_layer": extras["expert_layers"][depth]}


def module(model: Any, p: Mapping[str, Tensor], carry: Mapping[str, Any], ctx: Ctx) -> dict[str, Any]:
    """One module, as a block of `stack`.

    carry: "states", the embeddings that this module and those behind it read and then the hidden states up to the one that this
    one reads, of which there are always N + 1; and the records of experts, where there are some. Its embedding is taken from
    the front, and its hidden state comes to the end.
    """
    embedded, *rest = carry["states"]
    x = joined(model, p, embedded, rest[-1], ctx)
    records = {n: t for n, t in carry.items() if n != "states"}
    y = model.block(p, {**records, "x": x} if records else x, ctx)
    if records:
        y, records = y["x"], {n: t for n, t in y.items() if n != "x"}
    return {**records, "states": (*rest, model._norm(p, "norm", y))}


def joined(model: Any, p: Mapping[str, Tensor], embedded: Tensor, hidden: Tensor, ctx: Ctx) -> Tensor:
    """What the block of a module reads, of embeddings and hidden states, all [batch seq* embed]."""
    parts, side = (model._norm(p, "embed_norm", embedded), model._norm(p, "hidden_norm", hidden)), "batch seq* embed"
    both = ctx.sh.primitive(lambda *xs: torch.cat(xs, -1), parts, (side, side), "batch seq* both")
    return ctx.sh.dot(both, p["join"], JOIN, name="join")


def with_terms(
    terms: Mapping[str, Term], stats: Mapping[str, Any], more: Mapping[str, Term], own: Any, found: list[Further]
) -> tuple[dict[str, Term], Any]:
    """Terms and statistics of the layers' routers and of the modules', whose losses add up. The modules' statistics are an entry
    of the others, with "there", the number of tokens that each sees; their choices follow those of the layers."""
    sums = {n: Term(t.items + more[n].items, t.dims) for n, t in terms.items()}
    if "routing" in stats:
        own = dict(own)
        both = stats["routing"].items, own.pop("routing").items
        stats = {**stats, "routing": EachRow(torch.cat(both), stats["routing"].dim)}
    there = Term(torch.stack([f.there for f in found]), "layer batch seq -> layer")
    return sums, {**stats, ENTRY: {**own, "there": there}}


def updated(params: Mapping[str, Any], stats: Mapping[str, Any], spec: Any, config: DecoderConfig, sh: Sharding) -> Any:
    """Parameters with the biases of the modules' routers moved by a step's load."""
    moe = own_experts(config)
    if moe is None or ENTRY not in params or ENTRY not in stats:
        return params
    first = config.layers
    trees = ({"layers": {i - first: p for i, p in tree[ENTRY].items()}} for tree in (params, spec))
    own, own_spec = trees
    moved = updated_biases(own, stats[ENTRY], own_spec, moe, sh)["layers"]
    return {**params, ENTRY: {i + first: p for i, p in moved.items()}}


def loads(stats: Mapping[str, Any], config: DecoderConfig) -> tuple[list[int], Tensor]:
    """Of a step's statistics, (the layers with experts, load[layer route]): how many tokens each expert of each got, those of the
    modules too, whose indices are those behind the layers'."""
    assert config.moe is not None
    layers, load = list(config.moe.layers(config.layers)), stats["load"]
    if own_experts(config) is None or ENTRY not in stats:
        return layers, load
    return layers + [config.layers + depth for depth in range(config.mtp)], torch.cat([load, stats[ENTRY]["load"]])


def metrics(stats: Mapping[str, Any] | None, config: DecoderConfig) -> dict[str, Tensor]:
    """Of a step's statistics, what a run writes of the modules' experts, as `fmegatron.models.moe.load_metrics` does of the
    layers': their indices are those behind the layers'."""
    moe = own_experts(config)
    if moe is None or not stats or ENTRY not in stats:
        return {}
    alone, found = dataclasses.replace(config, layers=1, mtp=0, moe=moe), {}
    each = {n: x for n, x in stats[ENTRY].items() if n not in ("tokens", "there")}
    for depth in range(config.mtp):
        of_one = {**{n: x[depth : depth + 1] for n, x in each.items()}, "tokens": stats[ENTRY]["there"][depth]}
        for name, value in load_metrics(of_one, alone).items():
            found[f"{name.rpartition('.')[0]}.{config.layers + depth}"] = value
    return found
