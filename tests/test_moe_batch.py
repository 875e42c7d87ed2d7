"""Routing that is about the whole batch: one microbatch or two passes, on every layout, and running counts."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import fmegatron as fm
from fmegatron import job
from fmegatron.config import BatchConfig, ExpertConfig, TrainConfig
from fmegatron.errors import UserError
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.models.moe import MoE, running_counts
from fmegatron.models.two_passes import in_two_passes
from fmegatron.parallel.routing import Routing
from fmegatron.precision import Precision
from fmegatron.testing import Layout, compare
from fmegatron.tree import named, tree_map
from tests.train_runs import flags, go, write_corpus

F64 = torch.float64
ROUTING = Routing(4, 2, normalised=True, switch_loss=0.5, group="batch")


def model(routing=ROUTING, mtp=0, **changes):
    moe = MoE(routing, **{"mlp": 4, **changes})
    return Decoder(DecoderConfig(vocab=24, embed=8, layers=2, heads=4, mlp=8, kv_heads=2, head=4, moe=moe, mtp=mtp))


MODELS = {
    "switch loss": model(),
    "biases": model(dataclasses.replace(ROUTING, scores="sigmoid", expert_bias=True), mtp=2),
    "capacity": model(dataclasses.replace(ROUTING, capacity=0.7), dense_layers=(0,), mtp=1),
    "expert choice": model(dataclasses.replace(ROUTING, switch_loss=0.0, choose="expert_choice")),
}
LAYOUTS = [
    ("switch loss", "cp=2 micro=2 odd packed"),
    ("biases", "dp=2,tp=2 sp ep=4 micro=2 zero=3 remat=nothing"),
    ("capacity", "cp=2,tp=2 sp ep=2 micro=4 odd"),
    ("expert choice", "tp=2 micro=4"),
]


@pytest.mark.parametrize(("name", "text"), LAYOUTS, ids=[f"{n}: {t}" for n, t in LAYOUTS])
def test_two_passes_give_what_one_microbatch_gives(name, text):
    result = compare(MODELS[name], Layout.parse(text), checks=("gradients",))
    assert result.ok, result.worst


@pytest.mark.slow
def test_two_passes_through_the_stages_of_a_pipeline():
    result = compare(MODELS["capacity"], Layout.parse("pp=2 micro=2"), engine="processes", checks=("gradients",))
    assert result.ok, result.worst


@pytest.fixture(scope="module")
def inputs():
    params = fm.init(MODELS["switch loss"].spec(), fm.key(3), sh=fm.Sharding(precision=Precision(params=F64)))
    params = tree_map(lambda t: t * 20, params)
    tokens = torch.randint(0, 24, (4, 6), generator=torch.Generator().manual_seed(0))
    return (
        params,
        {"tokens": tokens, "labels": tokens.roll(1, 1)},
        fm.Ctx(sh=fm.Sharding(precision=Precision(params=F64))),
    )


def gradients(m, n, inputs, **options):
    (value, metrics), grads = fm.accumulate(m.loss, n, weights=m.weights, **options)(*inputs)
    return value, metrics, named(grads)


def test_the_loss_of_a_batch_is_its_formula(inputs):
    """experts · Σ f · P of the tokens of all sequences, by hand for a layer's own scores."""
    m = dataclasses.replace(MODELS["switch loss"], record_routing=True)
    value, metrics, _ = gradients(m, 1, inputs)
    load = metrics["stats"]["by_score"]
    chosen = metrics["stats"]["routing"]  # [layer row token choice]
    for layer in range(2):
        counted = torch.bincount(chosen[layer].flatten(), minlength=4)
        assert torch.equal(counted.to(load), load[layer])
    terms = metrics["terms"]
    assert value == terms["lm"] + 0.5 * terms["balance"]
    by_layer = metrics["stats"]["balance of layers"] / metrics["stats"]["tokens"]
    torch.testing.assert_close(by_layer.sum(), terms["balance"], rtol=1e-14, atol=0)


def test_several_microbatches_are_refused_without_a_second_pass(inputs):
    for name, what in (("switch loss", "the switch loss"), ("capacity", "the choice of experts")):
        m = MODELS[name]
        params = inputs[0] if name == "switch loss" else fm.init(m.spec(), fm.key(0))
        with pytest.raises(
            UserError, match=f'group="batch": {what} is about the whole batch, .* one of 2 microbatches'
        ):
            fm.accumulate(m.loss, 2, weights=m.weights)(params, inputs[1])
    for changes, message in (
        ({"capacity": 1.0}, 'group="approximate" with capacity=1.0'),
        ({"choose": "sinkhorn"}, "group=\"approximate\" with choose='sinkhorn'"),
        ({"switch_loss": 0.0}, "give switch_loss"),
    ):
        with pytest.raises(UserError, match=message):
            dataclasses.replace(ROUTING, **{"group": "approximate", **changes})


def test_running_counts_are_those_so_far(inputs):
    """The first of four microbatches has its own counts, the last those of the batch; and of one microbatch it is exact."""
    approximate = model(dataclasses.replace(ROUTING, group="approximate"))
    with pytest.raises(UserError, match="counts of the microbatches so far are missing"):
        gradients(approximate, 2, inputs)
    exact, running = MODELS["switch loss"], running_counts(approximate.config)
    assert running_counts(exact.config) is None
    want, _, whole = gradients(exact, 1, inputs)
    found, _, grads = gradients(approximate, 1, inputs, running=running)
    assert found == want and all(torch.equal(grads[n], whole[n]) for n in grads)

    params, batch, ctx = inputs
    found, metrics, _ = gradients(approximate, 4, inputs, running=running)
    counts, total = torch.zeros(2, 4, dtype=F64), 0.0
    for row in range(4):
        part = {n: x[row : row + 1] for n, x in batch.items()}
        counts = counts + gradients(exact, 1, (params, part, ctx))[1]["stats"]["by_score"]
        known = ctx.replace(extras={"routing_counts": counts}, parts=4)
        total = total + gradients(exact, 1, (params, part, known))[1]["terms"]["balance"] / 4
    torch.testing.assert_close(metrics["terms"]["balance"], total, rtol=1e-13, atol=0)
    assert abs(total - gradients(exact, 1, inputs)[1]["terms"]["balance"]) > 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"moe": ExpertConfig(experts=4, group="batch", switch_loss=0.1)},
            "--moe.group batch with --batch.microbatches 2",
        ),
        (
            {"moe": ExpertConfig(experts=4, group="approximate", switch_loss=0.1), "mesh": "pp=2"},
            "--moe.group approximate with --mesh pp=2: a pipeline has no running counts",
        ),
        ({"moe": ExpertConfig(experts=4, two_passes=True)}, "--moe.two-passes is for --moe.group batch"),
    ],
)
def test_settings_that_do_not_fit_are_told_before_anything_is_made(settings, message):
    config = TrainConfig(batch=BatchConfig(microbatches=2), **settings)
    with pytest.raises(UserError, match=message):
        job.check(config, 2, job.model_config(config, None))


def test_a_run_in_two_passes_is_that_of_one_microbatch(tmp_path):
    data, losses = write_corpus(tmp_path / "text.jsonl"), []
    moe = {"moe_experts": 4, "moe_group": "batch", "moe_switch_loss": 1.0, "moe_capacity": 1.0}
    moe |= {"mtp": 1, "steps": 2}
    for out, more in (("a", {}), ("b", {"batch_microbatches": 4, "moe_two_passes": True})):
        assert go(flags(data, tmp_path / out, **moe, **more)) == 0
        rows = [json.loads(line) for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]
        losses.append([r[n] for r in rows if "loss" in r for n in ("loss", "balance", "grad_norm")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_two_passes_are_the_gradients_themselves_where_one_is_enough():
    plain = model(dataclasses.replace(ROUTING, group="sequence"))
    f = fm.accumulate(plain.loss, 2, weights=plain.weights)
    assert in_two_passes(plain, f, microbatches=2) is f
    assert in_two_passes(MODELS["capacity"], f, microbatches=1) is f
