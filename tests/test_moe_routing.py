"""Routing: against transformers' own routers and losses, loops that decide token by token, and one device."""

from __future__ import annotations

import dataclasses
import importlib
import math
import types
from fractions import Fraction

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fmegatron.checking import check
from fmegatron.errors import UserError
from fmegatron.mesh import make_mesh
from fmegatron.parallel.routing import Routing, _balanced, capacity_of, route, top_experts
from fmegatron.parallel.routing_losses import load, switch_loss, updated_bias, z_loss
from fmegatron.precision import Precision
from fmegatron.primitives import jittered
from fmegatron.random import key, to_tensor
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import Param

F64 = torch.float64
ONE = Sharding()
BATCH, SEQ, EXPERTS, WIDTH = 4, 16, 8, 6


def close(found, expected, atol=1e-14):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def dense(experts, weights, n):
    """[… n]: the weight of every expert. Choices that are none have no weight."""
    out = weights.new_zeros(*experts.shape[:-1], n + 1).scatter_add(-1, experts, weights)
    assert not out[..., n].any()
    return out[..., :n]


def inputs(seed=0, batch=BATCH, seq=SEQ, experts=EXPERTS):
    g = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(batch, seq, experts, dtype=F64, generator=g)
    mask = torch.rand(batch, seq, generator=g) < 0.8
    if batch > 1:
        mask[1] = False  # a sequence without a token
    return logits, mask


# -------------------------------------------------------------------------------------------------------- transformers

ROUTERS = {
    "mixtral": ("MixtralTopKRouter", {}, Routing(8, 3, before=False)),
    "qwen3_moe": ("Qwen3MoeTopKRouter", {"norm_topk_prob": True}, Routing(8, 3, normalised=True)),
    "olmoe": ("OlmoeTopKRouter", {"norm_topk_prob": False}, Routing(8, 3)),
    "gpt_oss": ("GptOssTopKRouter", {}, Routing(8, 3, before=False)),
    "deepseek_v2": (
        "DeepseekV2TopkRouter",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
        Routing(8, 3, groups=4, group_top_k=2, scale=1.5),
    ),
    "deepseek_v3": (
        "DeepseekV3TopkRouter",
        {"norm_topk_prob": True, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5},
        Routing(8, 3, "sigmoid", groups=2, group_top_k=1, group_score="top2", scale=2.5, normalised=True, expert_bias=True),
    ),
    "deepseek_v4": (
        "DeepseekV4TopKRouter",
        {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5},
        Routing(8, 3, "sqrtsoftplus", scale=1.5, normalised=True, expert_bias=True),
    ),
}  # fmt: skip


def in_float64(module, monkeypatch):
    """The module of transformers, which casts to float32 at places, with float64 there."""
    wide = types.SimpleNamespace(**{**vars(torch), "float32": F64, "float": F64})
    monkeypatch.setattr(module, "torch", wide)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("family", ROUTERS)
def test_transformers_router(family, monkeypatch):
    name, fields, routing = ROUTERS[family]
    try:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ModuleNotFoundError:
        pytest.skip("this transformers has no such family")
    in_float64(module, monkeypatch)
    sizes = {"num_experts_per_tok": 3, "hidden_size": WIDTH, "num_experts": 8, "num_local_experts": 8}
    gate = getattr(module, name)(types.SimpleNamespace(**{**sizes, **fields})).double()
    torch.manual_seed(3)
    for p in (*gate.parameters(), *gate.buffers()):
        torch.nn.init.normal_(p)
    x = torch.randn(4, 8, WIDTH, dtype=F64)
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    _, weights, experts = gate(theirs.flatten(0, 1))
    expected = dense(experts.view(4, 8, -1), weights.view(4, 8, -1), 8)
    logits = torch.nn.functional.linear(ours, gate.weight, getattr(gate, "bias", None))
    routed = route(logits, routing, sh=ONE, bias=getattr(gate, "e_score_correction_bias", None))
    found = dense(routed.experts, routed.weights, 8)
    assert routed.weights.dtype == F64 and routed.bound is None
    close(found, expected)
    rates = torch.randn_like(found)
    (found * rates).sum().backward(), (expected * rates).sum().backward()
    close(ours.grad, theirs.grad)


def test_transformers_loss(monkeypatch):
    """Of one sequence; its f sums to top_k, ours to 1."""
    import transformers.models.mixtral.modeling_mixtral as module

    in_float64(module, monkeypatch)
    logits, mask = inputs(batch=1)
    routing = Routing(EXPERTS, 3, before=False)
    for real in (None, mask):
        theirs, ours = logits[0].clone().requires_grad_(), logits.clone().requires_grad_()
        expected = module.load_balancing_loss_func(
            (theirs,), EXPERTS, 3, None if real is None else real.to(torch.int64)
        )
        found = switch_loss(route(ours, routing, sh=ONE, mask=real), routing, sh=ONE)
        close(found[0] * 3, expected)
        found.sum().mul(3).backward(), expected.backward()
        close(ours.grad[0], theirs.grad)


# ------------------------------------------------------------------------------------------------ decided token by token


def groups_of(x, routing):
    """Each routing group's tokens in global order: [(batch, position), …]."""
    rows = [[(b, s) for s in range(x.shape[1])] for b in range(x.shape[0])]
    return rows if routing.group == "sequence" else [sum(rows, [])]


def places_at(experts, routing, tokens, factor=1):
    return math.ceil(Fraction(tokens * routing.top_k) * Fraction(str(factor)) / experts)


@pytest.mark.parametrize("group", ["sequence", "batch"])
@pytest.mark.parametrize("drop", ["probability", "position"])
@pytest.mark.parametrize("factor", [0.6, 1.1])
def test_capacity(group, drop, factor):
    logits, mask = inputs()
    routing = Routing(EXPERTS, 3, "sigmoid", normalised=True, capacity=factor, drop=drop, group=group)
    free = route(logits, dataclasses.replace(routing, capacity=None), sh=ONE, mask=mask)
    found = route(logits, routing, sh=ONE, mask=mask)
    expected = dense(free.experts, free.weights, EXPERTS)
    for tokens in groups_of(logits, routing):
        n = places_at(EXPERTS, routing, sum(mask[t].item() for t in tokens), factor)
        for e in range(EXPERTS):
            mine = [t for t in tokens if expected[t][e] > 0]
            if drop == "probability":
                mine.sort(key=lambda t: -expected[t][e].item())
            for t in mine[n:]:
                expected[t][e] = 0
    close(dense(found.experts, found.weights, EXPERTS), expected, 0)
    assert torch.equal(found.chosen, free.experts)
    counts = load(found, sh=ONE, kept=True)
    close(counts, (expected > 0).sum(1).double(), 0)
    close(load(found, sh=ONE), (dense(free.experts, free.weights, EXPERTS) > 0).sum(1).double(), 0)
    assert 0 < counts.sum() <= found.bound < found.experts.numel() or factor > 1


def test_capacity_is_exact():
    """Not rounded up from 11.000000000000002."""
    assert capacity_of(10, Routing(8, 8, capacity=1.1)) == 11
    tokens = torch.tensor([0, 1, 10])
    assert capacity_of(tokens, Routing(8, 8, capacity=1.1)).tolist() == [0, 2, 11]


@pytest.mark.parametrize("group", ["sequence", "batch"])
def test_expert_choice(group):
    logits, mask = inputs()
    routing = Routing(EXPERTS, 3, choose="expert_choice", group=group)
    found = route(logits, routing, sh=ONE, mask=mask)
    scores = logits.softmax(-1)
    expected = torch.zeros_like(scores)
    for tokens in groups_of(logits, routing):
        real = [t for t in tokens if mask[t]]
        n = places_at(EXPERTS, routing, len(real))
        for e in range(EXPERTS):
            for t in sorted(real, key=lambda t: -scores[t][e].item())[:n]:
                expected[t][e] = scores[t][e]
    close(dense(found.experts, found.weights, EXPERTS), expected)
    every = BATCH * EXPERTS * places_at(EXPERTS, routing, SEQ)
    assert found.bound == every and found.experts.shape == logits.shape
    normalised = route(logits, dataclasses.replace(routing, normalised=True), sh=ONE, mask=mask)
    total = dense(normalised.experts, normalised.weights, EXPERTS).sum(-1)
    close(total, (expected.sum(-1) > 0).double(), 1e-15)


def sinkhorn(logits):
    """Megatron-LM's loop, of one group [token expert]."""
    cost, n, experts = logits.exp(), *logits.shape
    by_expert, error = torch.ones(experts, dtype=F64), 1.0
    while error > 1e-4:
        by_token = 1 / n / ((cost * by_expert).sum(1) + 1e-8)
        new = 1 / experts / ((cost * by_token[:, None]).sum(0) + 1e-8)
        error, by_expert = (new - by_expert).abs().mean(), new
    return cost * by_expert * by_token[:, None], by_expert


@pytest.mark.parametrize("group", ["sequence", "batch"])
@pytest.mark.parametrize(("k", "scores"), [(1, "sigmoid"), (2, "softmax")])
def test_sinkhorn(group, k, scores):
    logits, mask = inputs(seed=5)
    logits = logits + torch.tensor([2.0, 1, 0, 0, 0, 0, -1, -1], dtype=F64)  # a load that needs balance
    routing = Routing(EXPERTS, k, scores, choose="sinkhorn", group=group)
    found = route(logits, routing, sh=ONE, mask=mask)
    weights = getattr(logits, scores)(*([-1] if scores == "softmax" else []))
    expected, added = torch.zeros_like(logits), _balanced(logits, routing, ONE, mask) - logits
    for tokens in groups_of(logits, routing):
        real = [t for t in tokens if mask[t]]
        if not real:
            continue
        matrix, by_expert = sinkhorn(torch.stack([logits[t] for t in real]))
        for t, experts in zip(real, matrix.topk(k).indices, strict=True):
            expected[t][experts] = weights[t][experts]
            close(added[t].exp(), by_expert, 1e-6)  # it stops where the loop does: one more round would move it by 1e-5
    close(dense(found.experts, found.weights, EXPERTS), expected)
    plain = route(logits, dataclasses.replace(routing, choose="top_k"), sh=ONE, mask=mask)
    assert load(found, sh=ONE).sum(0).max() < load(plain, sh=ONE).sum(0).max()


def test_sinkhorn_takes_large_logits():
    routing = Routing(EXPERTS, 2, choose="sinkhorn")
    logits, _ = inputs()
    a, b = (route(x, routing, sh=ONE) for x in (logits, logits + 1000 * torch.arange(SEQ)[:, None]))
    assert torch.equal(a.experts, b.experts)


# -------------------------------------------------------------------------------------------------------------- losses


def test_losses_are_the_published_sums():
    logits, mask = inputs()
    for group in ("sequence", "batch"):
        routing = Routing(EXPERTS, 3, "sigmoid", groups=2, capacity=0.5, expert_bias=True, group=group, switch_loss=1.0)
        bias = torch.linspace(-1, 1, EXPERTS, dtype=F64)
        items = switch_loss(route(logits, routing, sh=ONE, mask=mask, bias=bias), routing, sh=ONE)
        p = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        best = torch.zeros_like(p).scatter(-1, p.topk(3).indices, 1.0)  # without bias, groups and drops
        for tokens in groups_of(logits, routing):
            real = [t for t in tokens if mask[t]]
            weighted = (items * mask.sum(1))[sorted({b for b, _ in tokens})].sum() / max(len(real), 1)
            f = sum((best[t] for t in real), torch.zeros(EXPERTS, dtype=F64)) / max(3 * len(real), 1)
            mean = sum((p[t] for t in real), torch.zeros(EXPERTS, dtype=F64)) / max(len(real), 1)
            close(weighted, EXPERTS * (f * mean).sum())  # the mean over the group's tokens
        assert not items[1].any()  # a sequence without a token
    close(z_loss(logits), logits.exp().sum(-1).log() ** 2)
    close(z_loss(logits, mask), torch.where(mask, logits.exp().sum(-1).log() ** 2, 0))


def test_an_even_load_has_a_loss_of_one():
    logits = torch.eye(EXPERTS, dtype=F64)[None] * 1e-9
    routing = Routing(EXPERTS, 1, switch_loss=1.0)
    close(switch_loss(route(logits, routing, sh=ONE), routing, sh=ONE), torch.ones(1, dtype=F64), 1e-8)


def test_a_bias_moves_against_the_load():
    bias = torch.tensor([0.5, 0.0, -0.5, 0.25])
    close(updated_bias(bias, torch.tensor([4.0, 1, 7, 4]), 0.1), torch.tensor([0.5, 0.1, -0.6, 0.25]), 1e-7)


def test_a_bias_counts_in_the_choice_alone():
    logits, _ = inputs()
    logits.requires_grad_()
    bias = torch.tensor([9.0, 9.0, *[0.0] * (EXPERTS - 2)], dtype=F64).requires_grad_()
    for before in (True, False):
        routing = Routing(EXPERTS, 2, "sigmoid", before=before, expert_bias=True)
        routed = route(logits, routing, sh=ONE, bias=bias)
        assert torch.equal(routed.experts.sort(-1).values, torch.tensor([0, 1]).expand(BATCH, SEQ, 2))
        close(routed.weights.sum(-1), logits[..., :2].sigmoid().sum(-1))
        routed.weights.sum().backward()
        assert bias.grad is None


# ------------------------------------------------------------------------------------------------- ties, padding, force


def test_of_equal_values_the_lower_expert_and_the_earlier_token_come_first():
    values = torch.tensor([1.0, 3, 3, 1, 3, 0]).repeat(40)  # torch's own topk takes others of so many
    assert top_experts(values, 4).tolist() == [1, 2, 4, 7]
    logits = torch.zeros(2, 64, EXPERTS, dtype=F64)
    assert torch.equal(route(logits, Routing(EXPERTS, 3), sh=ONE).experts, torch.arange(3).expand(2, 64, 3))
    for routing in (Routing(EXPERTS, 3, capacity=0.25), Routing(EXPERTS, 3, capacity=0.25, drop="position")):
        kept = route(logits, routing, sh=ONE).experts
        assert torch.equal(kept[:, :6], torch.arange(3).expand(2, 6, 3)) and (kept[:, 6:] == EXPERTS).all()
    chosen = route(logits, Routing(EXPERTS, 3, choose="expert_choice"), sh=ONE).experts
    assert torch.equal(chosen != EXPERTS, (torch.arange(64) < 24)[:, None].expand(2, 64, EXPERTS))
    grouped = route(logits, Routing(EXPERTS, 3, groups=4, group_top_k=2), sh=ONE).experts
    assert torch.equal(grouped, torch.arange(3).expand(2, 64, 3))


ROUTINGS = {
    "plain": Routing(EXPERTS, 3, normalised=True, scale=1.5),
    "bias and groups": Routing(EXPERTS, 3, "sigmoid", groups=4, group_top_k=2, group_score="top2", expert_bias=True),
    "whole batch": Routing(EXPERTS, 3, group="batch", before=False),
    "capacity": Routing(EXPERTS, 3, capacity=0.75),
    "by position": Routing(EXPERTS, 3, "sqrtsoftplus", normalised=True, capacity=0.75, drop="position"),
    "capacity of the batch": Routing(EXPERTS, 3, capacity=0.75, drop="position", group="batch"),
    "by probability of the batch": Routing(EXPERTS, 3, capacity=0.75, group="batch"),
    "expert choice": Routing(EXPERTS, 3, choose="expert_choice"),
    "expert choice of the batch": Routing(EXPERTS, 3, choose="expert_choice", group="batch"),
    "sinkhorn": Routing(EXPERTS, 3, choose="sinkhorn"),
    "sinkhorn of the batch": Routing(EXPERTS, 3, choose="sinkhorn", group="batch"),
    "balanced": Routing(EXPERTS, 3, force="balanced"),
    "random": Routing(EXPERTS, 3, force="random"),
    "skewed": Routing(EXPERTS, 3, force="skewed"),
}
BIAS = torch.linspace(-0.2, 0.2, EXPERTS, dtype=F64)


@pytest.mark.parametrize("name", ROUTINGS)
def test_padding_takes_part_in_nothing(name):
    """Other values in padding, and more of it behind, change nothing elsewhere."""
    routing = ROUTINGS[name]
    logits, mask = inputs()
    other = torch.where(mask[..., None], logits, 5 * torch.randn_like(logits))
    other = torch.cat([other, torch.full((BATCH, 4, EXPERTS), 9.0, dtype=F64)], 1)
    longer = torch.nn.functional.pad(mask, (0, 4))
    results = []
    for x, real in ((logits, mask), (other, longer)):
        x.requires_grad_()
        routed = route(x, routing, sh=ONE, mask=real, bias=BIAS if routing.expert_bias else None, key=key(1))
        assert (routed.experts[~real] == EXPERTS).all() and not routed.weights[~real].any()
        found = [
            routed.experts[:, :SEQ],
            routed.weights[:, :SEQ],
            load(routed, sh=ONE),
            z_loss(routed.logits, real)[:, :SEQ],
        ]
        total = routed.weights.square().sum()
        found.append(switch_loss(routed, routing, sh=ONE))
        (total + found[-1].sum() + found[-2].sum()).backward()
        assert not x.grad[~real].any() and x.grad.isfinite().all()
        results.append([*found, x.grad[:, :SEQ]])
    for a, b in zip(*results, strict=True):
        close(a, b)
    assert not results[0][4][1].any() and not results[0][2][1].any()  # the sequence without a token


def test_forced_loads():
    logits, mask = inputs(batch=2, seq=64)

    def counts(force, k=3, mask=None, **also):
        routed = route(logits, Routing(EXPERTS, k, force=force, **also), sh=ONE, key=key(2), mask=mask)
        chosen = routed.experts
        picked = torch.zeros(2, 64, EXPERTS + 1).scatter(-1, chosen, 1)[..., :-1]
        real = 64 if mask is None else mask[0].sum()
        assert (picked[0].sum() == k * real) and (mask is not None or (picked.sum(-1) == k).all())
        close(routed.weights, logits.softmax(-1).gather(-1, chosen.clamp(max=EXPERTS - 1)) * (chosen < EXPERTS))
        return chosen, picked.sum(1)

    for force in ("balanced", "random"):
        for k in (1, 3, 8):
            assert (counts(force, k)[1] == 64 * k / EXPERTS).all()
    uneven = counts("random", mask=mask)[1][0]
    assert uneven.max() - uneven.min() <= 1  # though tokens are missing
    a, b = counts("balanced")[0]
    assert not torch.equal(a, b)  # a sequence starts one expert behind the one before
    a, b = counts("random")[0]
    assert not torch.equal(a, b) and not torch.equal(a, counts("balanced")[0][0])
    assert len({e // 2 for e in counts("balanced", 4)[0][0, 0].tolist()}) >= 3  # not all on one rank of four
    skewed = counts("skewed", 2, skewed_share=0.75, skewed_experts=3)[1][0]
    assert skewed[:3].sum() == 0.75 * 128 + 12 and skewed[3:].sum() == 20 and skewed[:3].max() - skewed[:3].min() <= 2
    assert (counts("skewed", 2, skewed_share=1.0)[1][:, 2:] == 0).all()
    with pytest.raises(UserError, match="key"):
        route(logits, Routing(EXPERTS, 2, force="random"), sh=ONE)


def test_a_choice_is_replayed():
    logits, mask = inputs()
    other = logits.flip(0)
    for routing in (Routing(EXPERTS, 3, normalised=True, capacity=0.75), Routing(EXPERTS, 3, choose="expert_choice")):
        first = route(logits, routing, sh=ONE, mask=mask)
        again = route(logits, routing, sh=ONE, mask=mask, chosen=first.chosen)
        assert torch.equal(again.experts, first.experts) and torch.equal(again.weights, first.weights)
        routed = route(other, routing, sh=ONE, mask=mask, chosen=first.chosen)
        assert torch.equal(routed.chosen, first.chosen) and not torch.equal(routed.weights, first.weights)


# -------------------------------------------------------------------------------------------------------------- layouts

LAYOUTS = {
    "dp and cp": ("dp=2,cp=2", False, True),
    "cp and tp with sp": ("cp=2,tp=2", True, True),
    "all of them": ("dp=2,cp=2,tp=2", True, True),
    "plain order": ("cp=4,tp=2", True, False),
}


def sharding(axes, sequence_parallel, zigzag, **also):
    mesh = make_mesh(axes)

    def of(*names):
        return tuple(n for n in names if n in mesh.sizes)

    rows = {"batch": of("dp"), "seq": of("cp"), "seq*": of("cp", "tp") if sequence_parallel else of("cp")}
    rows |= dict.fromkeys(("route", "choice", "all", "all_rows", "embed"))
    return Sharding(mesh, Rules(rows, zigzag={"seq": of("cp")} if zigzag else {}, **also), Precision(params=F64))


def results(logits, mask, rates, routing, sh, rows=None):
    """(values with the dims that they have, the loss). rates[batch seq* route]: how much a weight counts."""
    bias = BIAS if routing.expert_bias else None
    routed = route(logits, routing, sh=sh, mask=mask, bias=bias, key=key(4), rows=rows)
    switch, z = switch_loss(routed, routing, sh=sh), z_loss(routed.logits, mask)
    weighted = (routed.weights * rates.gather(-1, routed.experts.clamp(max=EXPERTS - 1))).sum(-1)
    loss = sh.sum(weighted + 0.1 * z, "batch seq* ->") + sh.sum(switch, "batch ->")
    values = {
        "batch seq* choice": (routed.experts, routed.weights),
        "batch seq*": (z,),
        "batch": (switch,),
        "batch route": (load(routed, sh=sh), load(routed, sh=sh, kept=True)),
        "": (loss,),
    }
    return values, loss


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masked", [False, True])
def test_layouts_route_alike(layout, masked):
    logits, mask = inputs(seed=7)
    logits[:, 3] = logits[:, 12]  # ties between tokens of two ranks
    logits[:, :, 2] = logits[:, :, 5]
    mask, rates = mask if masked else None, torch.randn_like(logits)
    names = [n for i, n in enumerate(ROUTINGS) if (i + masked) % 2 or layout == "all of them"]
    expected = {}
    for name in names:
        x = logits.clone().requires_grad_()
        values, loss = results(x, mask, rates, ROUTINGS[name], ONE)
        loss.backward()
        expected[name] = values, x.grad
    axes, *also = LAYOUTS[layout]
    with simulate(math.prod(int(a.split("=")[1]) for a in axes.split(","))):
        sh = sharding(axes, *also)
        held = None if mask is None else sh.shard(mask, "batch seq*")
        for name in names:
            x = sh.shard(logits, "batch seq* route").detach().requires_grad_()
            values, loss = results(x, held, sh.shard(rates, "batch seq* route"), ROUTINGS[name], sh)
            loss.backward()
            for dims, tensors in (*values.items(), ("batch seq* route", (x.grad,))):
                whole = expected[name][0].get(dims, (expected[name][1],))
                for found, of_one in zip(tensors, whole, strict=True):
                    of_ranks = (
                        per_rank(sh.shard(of_one.detach(), dims)) if dims else [of_one.detach()] * len(per_rank(found))
                    )
                    for a, b in zip(per_rank(found.detach()), of_ranks, strict=True):
                        torch.testing.assert_close(
                            a, b, rtol=0, atol=1e-12, msg=lambda m, of=(name, dims): f"{of}: {m}"
                        )


def test_what_fills_up_a_sequence_is_not_routed():
    """15 tokens on two ranks: the mask is False for the sixteenth, which is nowhere once a sequence is whole."""
    logits, mask = (x[:, :15] for x in inputs(seed=9))
    expected = {n: results(logits, mask, logits, r, ONE) for n, r in ROUTINGS.items()}
    with simulate(2):
        sh = sharding("cp=2", False, False, uneven={"seq": 15, "all": 15})
        held, real = sh.shard(logits, "batch seq* route"), sh.shard(mask, "batch seq*")
        for name, routing in ROUTINGS.items():
            values, loss = results(held, real, held, routing, sh)
            for found, of_one in zip(values["batch seq* choice"], expected[name][0]["batch seq* choice"], strict=True):
                for a in per_rank(sh(found, "batch seq* choice -> batch all choice")):
                    close(a, of_one, 1e-13)
            for a in per_rank(loss):
                close(a, expected[name][1], 1e-12)


def test_microbatches_route_as_the_whole():
    logits, mask = inputs()
    for routing in ROUTINGS.values():
        if routing.group == "sequence":
            whole = results(logits, mask, logits, routing, ONE)[0]
            rows = torch.tensor([2, 3])
            part = results(logits[2:], mask[2:], logits[2:], routing, ONE, rows)[0]
            for dims in ("batch seq* choice", "batch"):
                for a, b in zip(whole[dims], part[dims], strict=True):
                    close(b, a[2:])


def test_types_are_right_on_every_rule_table():
    """In the checking mode, the probe included: nothing reduces or mixes a sharded dim outside of an equation."""
    rows = {"batch": "dp", "seq": "cp", "seq*": ("cp", "tp"), "mlp": "tp"}
    rules = Rules({**rows, **dict.fromkeys(("route", "choice", "all", "all_rows", "embed"))})
    spec = {"router": Param((WIDTH, EXPERTS), "embed route", over="batch seq*")}
    x, mask = torch.randn(BATCH, SEQ, WIDTH, dtype=F64), inputs()[1]
    params = {"router": torch.randn(WIDTH, EXPERTS, dtype=F64)}
    for routing in ROUTINGS.values():

        def loss(params, batch, sh, routing=routing):
            w = sh.use(params["router"], spec["router"])
            h = jittered(sh(batch["x"], "batch seq embed -> batch seq* embed"), 0.1, key(1), sh=sh)
            logits = sh.dot(h, w, "batch seq* embed, embed route -> batch seq* route")
            return results(logits, sh(batch["mask"], "batch seq -> batch seq*"), logits.detach(), routing, sh)[1]

        check(loss, spec, params, {"x": x, "mask": mask}, rules, dims={"x": "batch seq embed", "mask": "batch seq"})


# -------------------------------------------------------------------------------------------------------------- jitter


def test_jitter():
    x = torch.randn(BATCH, SEQ, WIDTH, dtype=F64)
    ones = torch.ones_like(x).requires_grad_()
    noise = jittered(ones, 0.1, key(3))
    assert 0.9 <= noise.min() < 0.91 and 1.09 < noise.max() <= 1.1 and abs(noise.mean() - 1) < 0.01
    assert noise.unique().numel() == noise.numel()
    noise.sum().backward()
    close(ones.grad, noise.detach(), 0)  # a linear map that is its own transpose
    noise = noise.detach()
    close(jittered(x, 0.1, key(3)), x * noise, 0)
    close(jittered(x, 0.1, to_tensor(key(3))), x * noise, 0)
    close(jittered(x[2:], 0.1, key(3), rows=torch.tensor([2, 3])), (x * noise)[2:], 0)
    close(jittered(x[:, :5], 0.1, key(3)), (x * noise)[:, :5], 0)
    assert not torch.equal(jittered(x, 0.1, key(4)), x * noise)
    assert jittered(x, 0.1, None) is x and jittered(x, 0.0, key(3)) is x
    low = jittered(x.bfloat16(), 0.1, key(3))
    assert low.dtype == torch.bfloat16 and torch.allclose(low.double(), x * noise, rtol=0.02)
    with simulate(8):
        sh = sharding(*LAYOUTS["all of them"])
        part = jittered(sh.shard(x, "batch seq* embed"), 0.1, key(3), sh=sh)
        for a, b in zip(per_rank(part), per_rank(sh.shard(x * noise, "batch seq* embed")), strict=True):
            close(a, b, 0)
    with pytest.raises(UserError, match=r"jitter=1\.0"):
        jittered(x, 1.0, key(3))
    with pytest.raises(UserError, match="dims"):
        jittered(x, 0.1, key(3), dims="batch seq*")


# ------------------------------------------------------------------------------------------------ devices, dtypes, errors


@pytest.mark.parametrize("name", ROUTINGS)
def test_nothing_waits_for_the_device(name):
    """Tensors without values: reading one, or a size that depends on one, raises."""
    routing = ROUTINGS[name]
    with FakeTensorMode():
        logits = torch.empty(2, 4, EXPERTS, requires_grad=True)
        mask = torch.empty(2, 4, dtype=torch.bool)
        routed = route(logits, routing, sh=ONE, mask=mask, key=key(1), bias=torch.empty(EXPERTS))
        loss = routed.weights.sum() + switch_loss(routed, routing, sh=ONE).sum() + z_loss(routed.logits, mask).sum()
        (loss + load(routed, sh=ONE).sum()).backward()
        assert routed.weights.dtype == torch.float32 and logits.grad is not None


@pytest.mark.parametrize("name", ["plain", "bias and groups", "capacity", "expert choice", "sinkhorn", "random"])
def test_compiles_as_one_graph(name):
    routing = ROUTINGS[name]
    logits, mask = inputs()
    bias = BIAS if routing.expert_bias else None

    def f(x, mask):
        routed = route(x, routing, sh=ONE, mask=mask, bias=bias, key=key(1))
        return routed.experts, routed.weights, switch_loss(routed, routing, sh=ONE)

    for a, b in zip(torch.compile(f, backend="eager", fullgraph=True)(logits, mask), f(logits, mask), strict=True):
        assert torch.equal(a, b)


def test_the_dtype_of_the_router():
    x = torch.randn(2, 4, EXPERTS)
    assert route(x.bfloat16(), Routing(EXPERTS, 2), sh=ONE).scores.dtype == torch.float32
    assert route(x, Routing(EXPERTS, 2, dtype=F64), sh=ONE).weights.dtype == F64
    assert route(x.double(), Routing(EXPERTS, 2), sh=ONE).weights.dtype == F64
    low = torch.full((1, 1, EXPERTS), -200.0, requires_grad=True)  # softplus underflows to 0 in float32
    routed = route(low, Routing(EXPERTS, 2, "sqrtsoftplus", normalised=True), sh=ONE)
    routed.weights.sum().backward()
    assert routed.weights.isfinite().all() and low.grad.isfinite().all()


BAD = {
    "top_k=9": {"top_k": 9},
    "top_k=0": {"top_k": 0},
    "experts=0": {"experts": 0},
    "groups=3": {"groups": 3},
    "groups=16": {"groups": 16},
    "group_top_k=3": {"groups": 2, "group_top_k": 3},
    "group_top_k=1 groups of 1 experts": {"groups": 8},
    "top2": {"groups": 8, "group_top_k": 2, "group_score": "top2"},
    "scores='tanh'": {"scores": "tanh"},
    "choose='best'": {"choose": "best"},
    "dtype=torch.bfloat16": {"dtype": torch.bfloat16},
    "jitter=-1": {"jitter": -1},
    "scale=0": {"scale": 0},
    "capacity=0.0": {"capacity": 0.0},
    "z_loss=-1": {"z_loss": -1},
    "switch_loss=nan": {"switch_loss": math.nan},
    "skewed_experts=1": {"skewed_experts": 1},
    "capacity=1.0 with choose='sinkhorn'": {"choose": "sinkhorn", "capacity": 1.0},
    "capacity=1.0 with choose='expert_choice'": {"choose": "expert_choice", "capacity": 1.0},
    "groups=2 with": {"choose": "sinkhorn", "groups": 2},
    "expert_bias with choose='expert_choice'": {"choose": "expert_choice", "expert_bias": True},
    "force='balanced' with": {"choose": "sinkhorn", "force": "balanced"},
    "before=False with": {"choose": "expert_choice", "before": False},
    "switch_loss=0.1 with": {"choose": "expert_choice", "switch_loss": 0.1},
    "top_k=1 makes every weight 1": {"top_k": 1, "before": False},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_settings_are_refused(message):
    with pytest.raises(UserError) as error:
        Routing(**{"experts": 8, "top_k": 2, **BAD[message]})
    assert message in str(error.value)


def test_logits_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="experts=8"):
        route(torch.zeros(2, 4, 6), Routing(8, 2), sh=ONE)


def test_a_router_with_constant_weights_is_trained_by_a_loss():
    Routing(8, 1, before=False, switch_loss=0.01)
    Routing(8, 2, "softmax", expert_bias=True)
