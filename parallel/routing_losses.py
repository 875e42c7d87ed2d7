"""What is computed of routed tokens beside the layer's output: auxiliary losses, load, and the biases that balance it.

Losses are items, to be summed and divided as any term of a loss (see `fmegatron.accumulate`): a switch loss of every sequence,
by the number of sequences that have a token, and a z-loss of every token, by their number. They need no factor for any
layout or number of microbatches.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fmegatron.parallel.routing import TINY, Routed, Routing, picked, top_experts


def switch_loss(routed: Routed, routing: Routing, *, sh: Any, counts: Tensor | None = None) -> Tensor:
    """items[batch]: experts · Σ_e f_e · P_e of each sequence, 1 for an even load (Fedus et al., arXiv 2101.03961, for top_k
    choices; DeepSeek V3, arXiv 2412.19437, equations 17 to 20). 0 where a sequence has no token.

    f_e: the share of the choices by score alone that went to expert e, as in V3: without biases, limits to groups, forced
        choices or drops. It has no gradient. P_e: the mean score of e, a token's scores being divided by their sum.
    With routing.group="batch" f is that of the whole batch, and P the sequence's: as the loss is linear in P, the mean of the
        items over tokens is the loss of the whole batch. counts: [route], by which f is then told, of `counts_by_score`;
        None: those of this (micro)batch.

    transformers' `router_aux_loss_coef` goes with top_k times this value, as its f sums to top_k.
    """
    scores, mask = routed.scores, routed.mask
    of_one = scores if routing.scores == "softmax" else scores / (scores.sum(-1, keepdim=True) + TINY)
    of_one = of_one if mask is None else of_one.masked_fill(~mask[..., None], 0)
    # counts of all experts sum to top_k for every token
    mine, sums = counts_by_score(routed, routing, sh=sh), sh.sum(of_one, "batch seq* route -> batch route")
    tokens = mine.sum(-1) / routing.top_k
    if routing.group == "sequence":
        return routing.experts / routing.top_k * (mine * sums).sum(-1) / tokens.square().clamp(min=1)
    counts = sh.sum(mine, "batch route -> route") if counts is None else counts.to(mine.dtype)
    shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    return routing.experts * (shares * sums).sum(-1) / tokens.clamp(min=1)


def counts_by_score(routed: Routed, routing: Routing, *, sh: Any) -> Tensor:
    """[batch route]: how many tokens of each sequence have each expert among their top_k by score alone. Without a gradient."""
    plain = routing.choose == "top_k" and not (routing.force or routing.expert_bias) and routing.groups == 1
    scores = routed.scores.detach()
    taken = picked(routed.chosen if plain else top_experts(scores, routing.top_k), scores)
    if routed.mask is not None:
        taken = taken.masked_fill(~routed.mask[..., None], 0)
    return sh.sum(taken, "batch seq* route -> batch route")


def z_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """items[batch seq*]: the squared log-sum-exp of logits[batch seq* route], which keeps them small (Zoph et al., arXiv
    2202.08906). 0 where mask[batch seq*] is False."""
    items = logits.logsumexp(-1).square()
    return items if mask is None else items.masked_fill(~mask, 0)


def load(routed: Routed, *, sh: Any, kept: bool = False) -> Tensor:
    """counts[batch route]: how many tokens of each sequence chose each expert, on every rank that has a part of it. Without a
    gradient.

    kept: without the choices that were dropped for capacity: 1 - kept load ÷ load is the share of them.
    """
    experts = routed.experts if kept else routed.chosen
    return sh.sum(picked(experts, routed.scores.detach()), "batch seq* route -> batch route")


def updated_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """The selection biases[route] of the next step: up by `rate` for experts with less than the mean of counts[route], the load of
    the global batch, and down for those with more (Wang et al., arXiv 2408.15664)."""
    counts = counts.to(bias.dtype)
    return bias + rate * (counts.mean(-1, keepdim=True) - counts).sign()
