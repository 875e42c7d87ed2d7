"""Mixtures of experts as whole layers: every backend and layout computes what one device does."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import fmegatron as fm
from fmegatron import job, job_model
from fmegatron.config import ExpertConfig, ModelOverrides, TrainConfig
from fmegatron.errors import UserError
from fmegatron.exchange import exchange_counts, exchange_rows
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.models.moe import MoE
from fmegatron.parallel.dispatch import BACKENDS, dispatched
from fmegatron.parallel.experts import mlp_experts
from fmegatron.parallel.folding import expert_factoring
from fmegatron.parallel.routing import Routed, Routing
from fmegatron.precision import Precision
from fmegatron.recording import record_collectives
from fmegatron.rules import standard_rules
from fmegatron.simulation import per_rank, simulate
from fmegatron.testing import Layout, compare

F64 = torch.float64
DOUBLE = Precision(params=F64)
EMBED, EXPERTS, WIDTH, CHOICES, ROWS, SEQ = 6, 8, 4, 3, 4, 8
AMONG = "batch' seq'"
SPEC = {
    "router": fm.Param((EMBED, EXPERTS), "embed route", over="batch seq*"),
    "experts_gate_up": fm.Param((EXPERTS, EMBED, 2, WIDTH), "expert embed gated emlp", over=AMONG),
    "experts_gate_up_bias": fm.Param((EXPERTS, 2, WIDTH), "expert gated emlp", over=AMONG),
    "experts_down": fm.Param((EXPERTS, WIDTH, EMBED), "expert emlp embed", over=AMONG),
    "experts_down_bias": fm.Param((EXPERTS, EMBED), "expert embed", over=f"{AMONG} emlp"),
}
FOLDED = [
    ("dp=2,tp=2", "ep=4", {"sequence_parallel": True}),
    ("dp=2,tp=2", "edp=2,ep=2", {"sequence_parallel": True}),
    ("dp=2,tp=2", "ep=2,etp=2", {}),
    ("dp=2,tp=2", "ep=4", {}),
    ("dp=2,cp=2", "ep=4", {}),
    ("dp=2,tp=2", "", {"sequence_parallel": True}),
    ("dp=2,cp=2,tp=2", "edp=2,ep=2,etp=2", {"sequence_parallel": True}),
    ("dp=2,cp=2,tp=2", "ep=8", {"sequence_parallel": True}),
    ("dp=4,tp=2", "edp=2,ep=4", {"zero": 3}),
    ("dp=2,cp=2,tp=2", "ep=4,etp=2", {"sequence_parallel": True}),
    # axes in another order than those of batch and sequence: replicas of experts lie behind the experts
    ("fsdp=2,dp=2", "edp=2,ep=2", {"zero": 1}),
    ("fsdp=2,dp=2", "edp=2,etp=2", {}),
    ("tp=2,cp=2", "edp=2,ep=2", {"sequence_parallel": True}),
]


@functools.cache  # first called outside of a simulation, in which every rank would draw its own
def drawn():
    made = torch.Generator().manual_seed(0)
    params = {n: torch.randn(p.shape, generator=made, dtype=F64) * 0.5 for n, p in SPEC.items()}
    return params, {"x": torch.randn(ROWS, SEQ, EMBED, generator=made, dtype=F64)}


def decided(logits, sh):
    """Three experts a token, but none for each row's first token, and none to the last expert."""
    weights, experts = logits.softmax(-1).topk(CHOICES, -1)
    none = (sh.index("seq*", SEQ) == 0)[None, :, None] | (experts == EXPERTS - 1)
    experts, weights = experts.masked_fill(none, EXPERTS), weights.masked_fill(none, 0)
    return Routed(experts, weights, logits.softmax(-1), logits, experts)


def loss(params, batch, ctx, backend):
    sh = ctx.sh
    p = sh.use(params, SPEC)
    x = sh(batch["x"], "batch seq embed -> batch seq* embed")
    logits = sh.dot(x, p["router"], "batch seq* embed, embed route -> batch seq* route")
    y = dispatched(mlp_experts("swiglu"), x, decided(logits, sh), p, number=EXPERTS, sh=sh, backend=backend)
    items = y.square().sum(-1)
    return fm.Term(items, "batch seq*", weight=torch.ones_like(items)), None


def gradients(sh, backend):
    params, batch = drawn()
    if sh.mesh is not None:
        params, batch = sh.shard_params(params, SPEC), {"x": sh.shard(batch["x"], "batch seq embed")}
    f = fm.accumulate(lambda p, b, c: loss(p, b, c, backend), spec=SPEC if sh.mesh else None)
    (value, _), grads = f(params, batch, fm.Ctx(sh=sh))
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in grads.items()}
    return per_rank(value)[0], {n: per_rank(t)[0] for n, t in whole.items()}


def by_hand():
    """The sum over each token's choices, one at a time."""
    params, batch = drawn()
    params = {n: t.clone().requires_grad_() for n, t in params.items()}
    x, total = batch["x"], 0.0
    logits = x @ params["router"]
    routed = decided(logits, fm.Sharding())
    for row in range(ROWS):
        for token in range(SEQ):
            y = torch.zeros(EMBED, dtype=F64)
            for e, w in zip(routed.experts[row, token].tolist(), routed.weights[row, token], strict=True):
                if e < EXPERTS:
                    h = torch.einsum("d,dgf->gf", x[row, token], params["experts_gate_up"][e])
                    h = h + params["experts_gate_up_bias"][e]
                    a = torch.nn.functional.silu(h[0]) * h[1]
                    y = y + w * (a @ params["experts_down"][e] + params["experts_down_bias"][e])
            total = total + y.square().sum()
    value = total / (ROWS * SEQ)
    return value.detach(), dict(zip(params, torch.autograd.grad(value, list(params.values())), strict=True))


@pytest.fixture(scope="module")
def expected():
    return by_hand()


def same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=0)
    for name, want in expected[1].items():
        assert (found[1][name] - want).norm() <= 1e-12 * want.norm(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_is_the_sum_over_choices(backend, expected):
    same(gradients(fm.Sharding(precision=DOUBLE), backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("axes", "also", "options"), FOLDED, ids=[f"{a} {b}" for a, b, _ in FOLDED])
def test_every_folding_computes_the_same(axes, also, options, backend, expected):
    world = 4 if axes.count("=") == 2 and "4" not in axes else 8
    with simulate(world):
        mesh = fm.make_mesh(axes, also=[also] if also else [])
        same(gradients(fm.Sharding(mesh, standard_rules(mesh, **options), DOUBLE), backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dispatch_and_combine_are_the_identity_for_identity_experts(backend):
    """Forward and backward, with weights that sum to one."""
    drawn()
    with simulate(4):
        mesh = fm.make_mesh("dp=2,tp=2", also=["ep=4"])
        sh = fm.Sharding(mesh, standard_rules(mesh, sequence_parallel=True), DOUBLE)
        whole = drawn()[1]["x"]
        x = sh.local(sh.shard(whole, "batch seq* embed")).detach().requires_grad_()
        logits = x.detach() @ drawn()[0]["router"]
        weights, experts = logits.topk(CHOICES, -1)
        routed = Routed(experts, weights.softmax(-1), logits, logits, experts)

        def identity(rows, weights, ends, leaves, *, sh):
            return rows * weights[:, None]

        y = dispatched(identity, x, routed, {}, number=EXPERTS, sh=sh, backend=backend)
        (g,) = torch.autograd.grad(y.sum(), [x])
        for found, want in zip(per_rank(y), per_rank(x), strict=True):
            torch.testing.assert_close(found, want.detach(), rtol=0, atol=1e-14)
        for found in per_rank(g):
            torch.testing.assert_close(found, torch.ones_like(found), rtol=0, atol=1e-14)


def test_only_routed_rows_travel():
    """The all-to-all of rows has as many elements as a rank has choices for others and itself; none for tokens without one."""
    drawn()
    with simulate(4):
        mesh = fm.make_mesh("dp=4", also=["ep=4"])
        sh = fm.Sharding(mesh, standard_rules(mesh), DOUBLE)
        x = sh.local(sh.shard(drawn()[1]["x"], "batch seq embed"))
        logits = x @ drawn()[0]["router"]
        routed = decided(logits, sh)
        most = max(int((t < EXPERTS).sum()) for t in per_rank(routed.experts))
        assert most < SEQ * CHOICES
        with record_collectives() as found:
            dispatched(lambda rows, w, *_, sh: rows, x, routed, {}, number=EXPERTS, sh=sh)
        moved = [c.elements for c in found if c.kind == "all-to-all" and c.dtype == F64]
        assert moved[0] == most * EMBED and moved[1] == most  # tokens, then weights


def test_rows_of_unequal_numbers_go_where_they_are_sent_and_back():
    with simulate(4):
        mesh = fm.make_mesh("dp=4")
        counts = torch.arange(4)[None] + mesh.coordinate("dp")[:, None]  # rank r sends r + s rows to rank s
        coming, splits = exchange_counts(counts.view(4, 1), mesh, ("dp",))
        assert [sum(s) for s in splits.sent] == [6, 10, 14, 18]
        assert [t.flatten().tolist() for t in per_rank(coming)] == [[s + r for s in range(4)] for r in range(4)]
        x = (mesh.coordinate("dp") * 100 + torch.arange(splits.rows_sent))[:, None].double()
        there = exchange_rows(x, mesh, ("dp",), splits)
        assert per_rank(there)[1][:4, 0].tolist() == [0.0, 101.0, 102.0, 202.0]
        back = exchange_rows(there, mesh, ("dp",), splits.back)
        for rank, (a, b) in enumerate(zip(per_rank(back), per_rank(x), strict=True)):
            torch.testing.assert_close(a[: sum(splits.sent[rank])], b[: sum(splits.sent[rank])])


# -------------------------------------------------------------------------------------------------------- whole models

ROUTING = Routing(4, 2, normalised=True, switch_loss=0.01, z_loss=0.001)


def model(routing=ROUTING, **changes):
    moe = MoE(routing, **{"mlp": 8, "shared": 24, **changes})
    return Decoder(DecoderConfig(vocab=48, embed=12, layers=2, heads=6, mlp=24, kv_heads=3, head=4, moe=moe))


MODELS = {
    "dropless": model(),
    "by probability": model(dataclasses.replace(ROUTING, capacity=0.8)),
    "by position": model(dataclasses.replace(ROUTING, capacity=0.7, drop="position"), shared=0),
    "biases": model(dataclasses.replace(ROUTING, scores="sigmoid", expert_bias=True, switch_loss=0.0)),
    "mixed": model(dense_layers=(0,), bias=True, router_bias=True, shared_gate=True),
    "expert choice": model(dataclasses.replace(ROUTING, choose="expert_choice", switch_loss=0.0)),
}
DRAWN = [
    ("by probability", "dp=2,tp=2 sp ep=4"),
    ("by probability", "tp=2 sp"),
    ("by position", "cp=2,dp=2 ep=4"),
    ("by probability", "cp=2 odd"),  # what fills up a batch is not routed
    ("biases", "dp=2,cp=2 ep=2 zero=3 micro=2"),
    ("mixed", "dp=2,tp=2 ep=2 etp=2 zero=1 dispatch=all-gather"),
    ("expert choice", "cp=2,tp=2 sp ep=2"),
    ("dropless", "dp=2,tp=2 sp ep=4 packed odd remat=nothing"),
]


@pytest.mark.parametrize(("name", "text"), DRAWN, ids=[f"{n}: {t}" for n, t in DRAWN])
def test_a_model_is_the_same_on_a_layout(name, text):
    result = compare(MODELS[name], Layout.parse(text))
    assert result.ok, result.worst


@pytest.mark.parametrize("text", ["dp=2,tp=2 sp ep=4", "pp=2,dp=2 ep=2 micro=2"])
def test_a_model_is_the_same_on_processes(text):
    result = compare(MODELS["dropless"], Layout.parse(text), engine="processes")
    assert result.ok, result.worst


def test_biases_of_the_choice_move_against_the_load():
    """After one step: up by the rate for experts with less than the mean load, down for those with more; nothing else moves
    them, decay and clipping included."""
    m, sh = MODELS["biases"], fm.Sharding(precision=DOUBLE)
    params = fm.init(m.spec(), fm.key(0))
    optimizer = fm.optim.adamw(1e-2, weight_decay=0.5)
    step = fm.train_step(m.loss, optimizer, weights=m.weights, sh=sh, update_params=m.update_params)
    tokens = torch.randint(0, 48, (2, 8), generator=torch.Generator().manual_seed(0))
    state = fm.TrainState(0, params, optimizer.init(params), fm.key(0))
    state, metrics = step(state, {"tokens": tokens, "labels": tokens})
    for slot, load in enumerate(metrics["stats"]["load"]):
        assert load.sum() == 2 * 8 * 2
        want = 1e-3 * (load.mean() - load).sign()
        torch.testing.assert_close(state.params["layers"][slot]["expert_bias"], want.float(), rtol=0, atol=0)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match="ep=3 × etp=1 does not divide the 4 ranks of mesh 'dp=2,tp=2': use ep=2"):
        expert_factoring("dp=2,tp=2", ep=3)
    assert expert_factoring("pp=2,dp=4", ep=2) == ("pp=2,edp=2,ep=2,etp=1",)
    with pytest.raises(UserError, match="dispatch='allgather' is not known"):
        Decoder(MODELS["dropless"].config, dispatch="allgather")
    with pytest.raises(UserError, match="shared_gate=True without a shared expert"):
        MoE(ROUTING, mlp=8, shared_gate=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ep": 2}, "--ep 2: the model has no experts, which would lie on it: leave it out"),
        ({"moe": ExpertConfig(experts=6), "ep": 4}, "--ep 4 does not divide 6 experts: use --ep 2"),
        ({"moe": ExpertConfig(experts=4, top_k=5)}, "--moe: top_k=5 of routing must be an int of 1 or more, at most 4"),
        (
            {"moe": ExpertConfig(top_k=2)},
            "--moe.top-k is for a model with experts, and tiny has none: add --moe.experts",
        ),
    ],
)
def test_settings_that_do_not_fit_are_told_before_anything_is_made(settings, message):
    config = TrainConfig(mesh="dp=4", **settings)
    with pytest.raises(UserError, match=message):
        job.make_setup(config, torch.device("cpu"), 4, check_only=True)


def test_the_width_of_experts_follows_where_a_family_has_one_for_all():
    overrides = ModelOverrides(layers=2, embed=64, heads=4, kv_heads=2, head=16, mlp=32)
    sizes = job_model.model_config(TrainConfig(model="mixtral-8x7b", model_overrides=overrides), None)
    assert sizes.mlp == sizes.moe.mlp == 32
    sizes = job_model.model_config(TrainConfig(model="qwen3-30b-a3b", model_overrides=overrides), None)
    assert sizes.mlp == 32 and sizes.moe.mlp == 768
