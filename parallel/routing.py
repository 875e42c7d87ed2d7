"""Routing: which experts a token goes to, and with what weights. The first part of a mixture of experts.

    routing = Routing(experts=64, top_k=8, normalised=True)
    routed = route(logits, routing, sh=sh, mask=real)     # logits[batch seq* route]
    routed.experts, routed.weights                        # [batch seq* choice]

Decisions over several tokens (capacity, expert choice, Sinkhorn) act on a *routing group*, one sequence or the whole
batch, in the global order of its tokens: small tensors are gathered, every rank decides the same, and takes its own part
back. So no layout changes a choice. Padding takes part in nothing: it is not routed, not counted, and takes no place.

A decision has no gradient; weights, scores and logits have. Of equal values the lower expert, or the earlier token,
comes first, on every device. Nothing here waits for the device.

Dims beside those of the stream: `route` (the router's output), `choice` (a token's choices), `all` and `all_rows` (sequence and
batch in global order, gathered): rows without axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from fmegatron import random
from fmegatron.errors import UserError
from fmegatron.kernels.moe import top_experts
from fmegatron.primitives._function import global_size
from fmegatron.primitives.dropout import ANY_BATCH, ANY_SEQ

Scores = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["max", "top2"]
Choose = Literal["top_k", "expert_choice", "sinkhorn"]
Drop = Literal["probability", "position"]
Force = Literal["balanced", "random", "skewed"]
Group = Literal["sequence", "batch", "approximate"]

# What DeepSeek V3 adds to the sum of the chosen scores: sigmoids may all be 0. It changes no sum of softmax scores.
TINY = 1e-20

# Of Sinkhorn's algorithm, as Megatron-LM has them; the number of iterations is a bound of our own, as nothing may wait
# for the device: logits that differ by 10 take some 20.
SINKHORN_TOLERANCE, SINKHORN_EPS, SINKHORN_ITERATIONS = 1e-4, 1e-8, 50


@dataclass(frozen=True)
class Routing:
    """How tokens are routed, as a model's config says.

    experts, top_k: how many there are, and how many a token goes to (expert choice: on average).
    scores: of the logits, over all experts (softmax) or each by itself (sigmoid: DeepSeek V3; the root of softplus: V4).
    before: scores of all experts, the largest of which are chosen; False: the largest logits are chosen, and scored
        among themselves (GPT-OSS; for a softmax that is normalised scores).
    normalised: the weights of a token are divided by their sum. scale: and multiplied by this.
    groups, group_top_k, group_score: experts lie in so many groups, and a token's are among those of its best
        `group_top_k` groups, by their largest value ("max": DeepSeek V2, arXiv 2405.04434) or the sum of their two
        largest ("top2": V3, arXiv 2412.19437), selection biases included.
    choose: "top_k": every token its experts. "expert_choice": every expert its tokens, group's tokens · top_k ÷ experts of
        them, rounded up (Zhou et al., arXiv 2202.09368); a token may get none or all, and the choice depends on later
        tokens. "sinkhorn": top_k of the logits balanced by Sinkhorn's algorithm over the group (Clark et al., arXiv
        2202.01169). It concerns the choice alone: weights are `scores` as ever (in Megatron-LM a sigmoid for top_k=1,
        else a softmax).
    dtype: of the router, float32 or float64; float64 logits stay float64.
    jitter: the router's input is multiplied by noise in [1 - jitter, 1 + jitter] (see `fmegatron.primitives.jittered`).
    capacity: an expert takes at most capacity · group's tokens · top_k ÷ experts of a group, rounded up; None: all.
        drop: which choices of a full expert are dropped, those of least weight or the last ones. Weights of the others
        stay what they are.
    force: replaces the choice, for benchmarks: "balanced" (experts in turn), "random" (in turn over tokens in random
        order), "skewed": `skewed_share` of the tokens in turn to the first `skewed_experts` experts (None: top_k), the
        others to all. Weights are the scores of those experts.
    group: on what statistics, capacity, expert choice and Sinkhorn act: one "sequence", or the whole "batch", which must then
        be one microbatch, or be read in two passes (`fmegatron.models.two_passes`). "approximate": the switch loss
        reads the counts of the microbatches so far, so that it depends on their number and order (Megatron-LM's
        global_aux_loss): no two layouts with other microbatches are equal.
    switch_loss, z_loss: coefficients of the auxiliary losses (`fmegatron.parallel.routing_losses`).
    expert_bias: a bias is added to what is compared, never to the weights, and moves by bias_rate against the load
        (`updated_bias`; Wang et al., arXiv 2408.15664).

    Raises UserError for values that do not fit together.
    """

    experts: int
    top_k: int
    scores: Scores = "softmax"
    before: bool = True
    normalised: bool = False
    scale: float = 1.0
    groups: int = 1
    group_top_k: int = 1
    group_score: GroupScore = "max"
    choose: Choose = "top_k"
    dtype: torch.dtype = torch.float32
    jitter: float = 0.0
    capacity: float | None = None
    drop: Drop = "probability"
    force: Force | None = None
    skewed_share: float = 0.5
    skewed_experts: int | None = None
    group: Group = "sequence"
    switch_loss: float = 0.0
    z_loss: float = 0.0
    expert_bias: bool = False
    bias_rate: float = 1e-3

    def __post_init__(self) -> None:
        self._check_values()
        self._check_groups()
        self._check_together()

    def _check_values(self) -> None:
        for name, known in (
            ("scores", get_args(Scores)),
            ("group_score", get_args(GroupScore)),
            ("choose", get_args(Choose)),
            ("drop", get_args(Drop)),
            ("force", (None, *get_args(Force))),
            ("group", get_args(Group)),
            ("dtype", (torch.float32, torch.float64)),
        ):
            if (value := getattr(self, name)) not in known:
                raise UserError(f"{name}={value!r} of routing must be one of {', '.join(map(str, known))}")
        _check_int("experts", self.experts, 1, None)
        _check_int("top_k", self.top_k, 1, self.experts, "the number of experts")
        if self.skewed_experts is not None:
            _check_int("skewed_experts", self.skewed_experts, self.top_k, self.experts, "the number of experts")
        for name, low, high in (
            ("jitter", 0.0, 1.0),
            ("skewed_share", 0.0, 1.0),
            ("switch_loss", 0.0, math.inf),
            ("z_loss", 0.0, math.inf),
            ("bias_rate", 0.0, math.inf),
        ):
            if not low <= (value := getattr(self, name)) <= high or math.isinf(value):
                raise UserError(
                    f"{name}={value!r} of routing must be a number of {low:g} or more{f', at most {high:g}' * (high < 2)}"
                )
        for name in ("scale", "capacity"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise UserError(f"{name}={value!r} of routing must be a number above 0")

    def _check_groups(self) -> None:
        _check_int("groups", self.groups, 1, self.experts, "the number of experts")
        _check_int("group_top_k", self.group_top_k, 1, self.groups, "the number of groups")
        if self.groups == 1:
            return
        if self.experts % self.groups:
            raise UserError(f"groups={self.groups} must divide experts={self.experts}: they are of one size")
        size = self.experts // self.groups
        if self.group_top_k * size < self.top_k:
            raise UserError(
                f"group_top_k={self.group_top_k} groups of {size} experts are fewer than top_k={self.top_k}: choose more groups"
            )
        if self.group_score == "top2" and size < 2:
            raise UserError(
                f'group_score="top2" takes groups of two experts or more, but groups={self.groups} have one'
            )

    def _check_together(self) -> None:
        constant = self.normalised or (self.scores == "softmax" and not self.before)
        if self.top_k == 1 and constant and self.choose != "expert_choice" and not self.switch_loss:
            raise UserError(
                "top_k=1 makes every weight 1 where weights are normalised or a softmax of what is chosen, so that nothing "
                "trains the router: give before=True with normalised=False, or switch_loss"
            )
        if self.group == "approximate":
            if not self.switch_loss:
                raise UserError(
                    'group="approximate" is a form of the switch loss, which has no weight: give switch_loss, or group="sequence"'
                )
            if self.capacity is not None or self.choose != "top_k":
                what = f"choose={self.choose!r}" if self.capacity is None else f"capacity={self.capacity}"
                raise UserError(f'group="approximate" with {what}: running counts are for the switch loss alone')
        if self.choose == "top_k":
            return
        how = f"choose={self.choose!r}"
        if self.capacity is not None:
            raise UserError(f"capacity={self.capacity} with {how}, which balances experts itself: leave it out")
        if self.groups > 1:
            raise UserError(f'groups={self.groups} with {how}: only choose="top_k" limits a token to groups')
        if self.expert_bias:
            raise UserError(
                f"expert_bias with {how}: a bias of an expert changes nothing there, as its load is fixed: leave it out"
            )
        if self.force is not None:
            raise UserError(f'force={self.force!r} with {how}: a choice is forced with choose="top_k"')
        if self.choose == "expert_choice" and not self.before:
            raise UserError(f"before=False with {how}: experts compare scores, so leave it out")
        if self.choose == "expert_choice" and self.switch_loss:
            raise UserError(f"switch_loss={self.switch_loss} with {how}, whose load is even by itself: leave it out")

    @property
    def bounded(self) -> bool:
        """Is the number of choices that an expert takes bounded, whatever the values?"""
        return self.capacity is not None or self.choose == "expert_choice"

    @property
    def decides_on_batch(self) -> bool:
        """Does a choice depend on other sequences of the batch?"""
        return self.group == "batch" and (self.capacity is not None or self.choose != "top_k")

    @property
    def choices(self) -> int:
        """The size of the dim `choice`: how many experts a token can have."""
        return self.experts if self.choose == "expert_choice" else self.top_k


def _check_int(name: str, value: Any, low: int, high: int | None, what: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        most = f", at most {high}, {what}" if high is not None else ""
        raise UserError(f"{name}={value!r} of routing must be an int of {low} or more{most}")


@dataclass(frozen=True)
class Routed:
    """What a router decided.

    experts: int64[batch seq* choice]; the number of experts, one past the last, where a choice is none: dropped, padding,
        not chosen. The others of a token differ.
    weights: [batch seq* choice], 0 where a choice is none; differentiable.
    scores: [batch seq* route], of all experts; logits: [batch seq* route]; both differentiable, for the losses.
    chosen: int64[batch seq* choice], `experts` before any was dropped for capacity: the demand, and what a replay gives to
        `route`.
    mask: bool[batch seq*], False for padding; None: every token counts.
    bound: at most so many choices of this rank are real, whatever the values; None: all of them may be.
    places: at most so many of them are one expert's, of routings that bound it.
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor
    chosen: Tensor
    mask: Tensor | None = None
    bound: int | None = None
    places: int | None = None


def route(
    logits: Tensor,
    routing: Routing,
    *,
    sh: Any,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    key: random.Key | None = None,
    rows: Tensor | None = None,
    chosen: Tensor | None = None,
    kept: Tensor | None = None,
) -> Routed:
    """The choice of logits[batch seq* route].

    bias: [route], added to what is compared and to nothing else; it gets no gradient.
    mask: bool[batch seq*], False for padding (and for what fills up a part of a dim that does not divide).
    key: for force="random". rows: int[batch], the global positions of the rows of a microbatch, which forced choices
        depend on; None: those of `sh.index`.
    chosen: int64[batch seq* choice], a choice made before (`Routed.chosen`), in place of a new one. kept: bool of the same
        shape, which of it found a place then; None: a capacity decides anew.

    Raises UserError where logits do not fit, or force="random" has no key.
    """
    if logits.ndim != 3 or logits.shape[-1] != routing.experts:
        raise UserError(
            f"logits of shape {tuple(logits.shape)} do not fit experts={routing.experts}: they must be [batch seq* route]"
        )
    logits = logits.to(torch.promote_types(logits.dtype, routing.dtype))
    scores = score(logits, routing.scores)
    none, gaps = routing.experts, mask is not None or chosen is not None or routing.choose == "expert_choice"
    if chosen is None:
        values = (scores if routing.before else logits).detach()
        chosen = _choice(values, logits.detach(), routing, sh, bias, mask, key, rows)
    if mask is not None:
        chosen = chosen.masked_fill(~mask[..., None], none)
    weights = _weights(logits, scores, chosen, routing, gaps)
    experts, bound, places = chosen, None, None
    elsewhere = kept is not None  # by another capacity, or of a batch that is larger than this one: no bound is known
    if routing.capacity is not None and kept is None:
        kept = _within_capacity(chosen, weights.detach(), routing, sh, mask)
    if kept is not None:
        experts, weights = chosen.masked_fill(~kept, none), weights.masked_fill(~kept, 0)
    if routing.bounded:
        places, tokens = math.prod(logits.shape[:2]), _group_tokens(logits, routing, sh)
        if not elsewhere:
            groups = logits.shape[0] if routing.group == "sequence" else 1
            places = min(places, capacity_of(tokens, routing) * groups)
            bound = min(capacity_of(tokens, routing) * groups * routing.experts, math.prod(experts.shape))
    return Routed(experts, weights, scores, logits, chosen, mask, bound, places)


def score(logits: Tensor, kind: Scores) -> Tensor:
    """Scores of logits[… route]: over all of them (softmax), or each by itself."""
    if kind == "softmax":
        return logits.softmax(-1)
    if kind == "sigmoid":
        return logits.sigmoid()
    # the root has no derivative at 0, which softplus underflows to
    return functional.softplus(logits).clamp(min=torch.finfo(logits.dtype).tiny).sqrt()


def picked(experts: Tensor, like: Tensor) -> Tensor:
    """1 for the experts[… choice] of a token and 0 for others, in the shape and dtype of like[… route]."""
    zeros = functional.pad(torch.zeros_like(like), (0, 1))  # one column more, for choices that are none
    return zeros.scatter(-1, experts, 1)[..., :-1]


def capacity_of(tokens: Any, routing: Routing) -> Any:
    """How many choices an expert takes of a routing group with that many real tokens (an int, or a tensor of them): exact,
    so the same everywhere."""
    share = Fraction(1) if routing.capacity is None else Fraction(routing.capacity).limit_denominator(10**6)
    each = routing.experts * share.denominator
    return (tokens * (routing.top_k * share.numerator) + (each - 1)) // each


# ------------------------------------------------------------------------------------------------------- the choice


def _choice(
    values: Tensor,
    logits: Tensor,
    routing: Routing,
    sh: Any,
    bias: Tensor | None,
    mask: Tensor | None,
    key: random.Key | None,
    rows: Tensor | None,
) -> Tensor:
    """int64[batch seq* choice] of values[batch seq* route], what is compared."""
    if routing.force is not None:
        return _forced(values, routing, sh, mask, key, rows)
    if routing.choose == "expert_choice":
        return _chosen_by_experts(values, routing, sh, mask)
    if routing.choose == "sinkhorn":
        return top_experts(_balanced(logits, routing, sh, mask), routing.top_k)
    if bias is not None:
        values = values + bias.detach()
    if routing.groups > 1:
        values = _of_best_groups(values, routing)
    return top_experts(values, routing.top_k)


def _weights(logits: Tensor, scores: Tensor, chosen: Tensor, routing: Routing, gaps: bool) -> Tensor:
    """[batch seq* choice], 0 where a choice is none. gaps: may there be such?"""
    at = chosen.clamp(max=routing.experts - 1) if gaps else chosen
    weights = scores.gather(-1, at) if routing.before else score(logits.gather(-1, at), routing.scores)
    if gaps:
        weights = weights.masked_fill(chosen == routing.experts, 0)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights * routing.scale if routing.scale != 1 else weights


def _of_best_groups(values: Tensor, routing: Routing) -> Tensor:
    """values[… route] with -inf for the experts of groups that are not among a token's best."""
    by_group = values.unflatten(-1, (routing.groups, -1))
    best = by_group.amax(-1) if routing.group_score == "max" else by_group.topk(2).values.sum(-1)
    kept = picked(top_experts(best, routing.group_top_k), best)
    return by_group.masked_fill(kept[..., None] == 0, -math.inf).flatten(-2)


def _chosen_by_experts(values: Tensor, routing: Routing, sh: Any, mask: Tensor | None) -> Tensor:
    """Expert e at place e of the dim `choice` where it chose the token."""
    real = values if mask is None else values.masked_fill(~mask[..., None], -math.inf)
    taken = _places(_without_rounding(_gathered(real, "route", routing, sh))) < _group_capacity(
        values, routing, sh, mask
    )
    mine = _own_part(taken, "route", values, routing, sh)
    return torch.where(mine, torch.arange(routing.experts, device=values.device), routing.experts)


def _balanced(logits: Tensor, routing: Routing, sh: Any, mask: Tensor | None) -> Tensor:
    """logits[batch seq* route] plus what Sinkhorn's algorithm gives each expert of a group, so that the exponentials of all
    tokens sum to about the same for each, a token's being divided by their sum.

    Iterations as in Megatron-LM, until an expert's factor moves by less than the tolerance on average; a group that
    has come so far stays, as the others go on.
    """
    real = logits if mask is None else logits.masked_fill(~mask[..., None], -math.inf)
    every = _gathered(real, "route", routing, sh)
    # a factor of a token's own drops out, so its largest may be taken out: nothing overflows. Of padding they are 0.
    largest = every.amax(-1, keepdim=True).clamp(min=torch.finfo(every.dtype).min)
    cost = (every - largest).exp()
    number = (every > -math.inf).any(-1).sum(-1, keepdim=True).clamp(min=1)
    by_expert, moves = torch.ones_like(cost[:, 0]), None
    for _ in range(SINKHORN_ITERATIONS):
        by_token = 1 / (((by_expert[:, None] * cost).sum(-1) + SINKHORN_EPS) * number)
        new = 1 / (((by_token[..., None] * cost).sum(-2) + SINKHORN_EPS) * routing.experts)
        far = (new - by_expert).abs().mean(-1, keepdim=True) > SINKHORN_TOLERANCE
        by_expert = new if moves is None else torch.where(moves, new, by_expert)
        moves = far if moves is None else moves & far
    return logits + by_expert.log()[:, None]


def _within_capacity(chosen: Tensor, weights: Tensor, routing: Routing, sh: Any, mask: Tensor | None) -> Tensor:
    """bool[batch seq* choice]: which choices find a place at their expert."""
    experts, none = _gathered(chosen, "choice", routing, sh), routing.experts
    if routing.drop == "position":
        there = picked(experts, torch.zeros_like(experts[..., :1]).expand(-1, -1, none))
        places = there.cumsum(1) - there
    else:
        every = _gathered(weights, "choice", routing, sh)
        nothing = torch.full_like(every[..., :1], -math.inf).expand(-1, -1, none + 1)
        places = _places(_without_rounding(nothing.scatter(-1, experts, every)[..., :-1]))
    kept = places < _group_capacity(chosen, routing, sh, mask)
    found = kept.gather(-1, experts.clamp(max=none - 1)) & (experts < none)
    return _own_part(found, "choice", chosen, routing, sh)


def _without_rounding(values: Tensor) -> Tensor:
    """Values to a fixed step far above rounding: tokens that are alike (a word twice at the beginning of a row, say) are
    exactly equal then, and their order does not depend on how a layout's sums were rounded."""
    step = 2.0**36 if values.dtype == torch.float64 else 2.0**16
    return (values * step).round()


def _places(values: Tensor) -> Tensor:
    """The place of each token of a group among all for an expert, values[group token route]: 0 for the largest value; of equal
    ones the earlier token comes first."""
    order = values.sort(dim=1, descending=True, stable=True).indices
    numbers = torch.arange(values.shape[1], device=values.device)[:, None].expand_as(order)
    return torch.zeros_like(order).scatter(1, order, numbers)


# ------------------------------------------------------------------------------------------------------ routing groups


def _gathered(x: Tensor, last: str, routing: Routing, sh: Any) -> Tensor:
    """x[batch seq* last] -> [group token last], every group whole, in global order."""
    if routing.group == "sequence":
        return sh(x, f"batch seq* {last} -> batch all {last}")
    return sh(x, f"batch seq* {last} -> all_rows all {last}").flatten(0, 1)[None]


def _own_part(x: Tensor, last: str, like: Tensor, routing: Routing, sh: Any) -> Tensor:
    """The way back of `_gathered`, to the tokens of like[batch seq* …]."""
    if routing.group == "sequence":
        return sh(x, f"batch all {last} -> batch seq* {last}")
    x = x[0].unflatten(0, (global_size(sh, "batch", like.shape[0]), -1))
    return sh(x, f"all_rows all {last} -> batch seq* {last}")


def _group_tokens(like: Tensor, routing: Routing, sh: Any) -> int:
    """How many tokens a group of like[batch seq* …] has, padding included."""
    tokens = global_size(sh, "seq*", like.shape[1])
    return tokens if routing.group == "sequence" else tokens * global_size(sh, "batch", like.shape[0])


def _group_capacity(like: Tensor, routing: Routing, sh: Any, mask: Tensor | None) -> Any:
    """`capacity_of` each group's real tokens, [group one one]; an int where there is no padding."""
    if mask is None:
        return capacity_of(_group_tokens(like, routing, sh), routing)
    to = "batch" if routing.group == "sequence" else ""
    return capacity_of(sh.sum(mask.to(torch.int64), f"batch seq* -> {to}"), routing).view(-1, 1, 1)


# -------------------------------------------------------------------------------------------------------- forced choices


def _forced(
    values: Tensor, routing: Routing, sh: Any, mask: Tensor | None, key: random.Key | None, rows: Tensor | None
) -> Tensor:
    """int64[batch seq* choice], whatever the values: experts in turn."""
    device, k = values.device, routing.top_k
    if rows is None:
        rows = sh.index("batch", global_size(sh, "batch", values.shape[0]), device=device)
    token = sh.index("seq*", global_size(sh, "seq*", values.shape[1]), device=device)
    if routing.force == "skewed":
        return _skewed(rows, token, routing)
    if routing.force == "random":
        token = _random_places(values, sh, mask, key, rows)
    return _in_turn(token * k + rows[:, None], k, routing.experts)


def _in_turn(first: Tensor, k: int, n: int) -> Tensor:
    """first[batch seq] -> int64[batch seq choice]: the k numbers from `first` on, modulo n, spread out, so that the experts of a
    token do not all lie on one rank."""
    stride = next(s for s in range(max(n // k, 1), n + 2) if math.gcd(s, n) == 1)
    return (first[..., None] + torch.arange(k, device=first.device)) % n * stride % n


def _skewed(rows: Tensor, token: Tensor, routing: Routing) -> Tensor:
    k, hot = routing.top_k, routing.skewed_experts or routing.top_k
    share = Fraction(routing.skewed_share).limit_denominator(1000)
    # so many of the tokens before this one went to the few
    before = token * share.numerator // share.denominator
    is_hot = (token + 1) * share.numerator // share.denominator > before
    few = _in_turn(before * k + rows[:, None], k, hot)
    others = _in_turn((token - before) * k + rows[:, None], k, routing.experts)
    return torch.where(is_hot[:, None], few, others)


def _random_places(values: Tensor, sh: Any, mask: Tensor | None, key: random.Key | None, rows: Tensor) -> Tensor:
    """int64[batch seq*]: the place of each token in a random order of its sequence's, padding last."""
    if key is None:
        raise UserError('force="random" of routing needs key=…: give one, or force="balanced"')
    n, of = global_size(sh, "seq*", values.shape[1]), random.fold_in(key, "force")
    every = torch.arange(n, device=values.device)
    longest = -(-n // ANY_SEQ) * ANY_SEQ

    def draw(rows: Tensor) -> Tensor:
        return random.bits(of, (ANY_BATCH, longest), index=(rows, every), device=values.device)

    order = sh.primitive(draw, (rows,), ("batch",), "batch all")
    if mask is not None:
        order = order + sh((~mask).to(torch.int64), "batch seq* -> batch all") * 2**32
    return sh(_places(-order[..., None])[..., 0], "batch all -> batch seq*")
