"""Routing recorded in one run and replayed in another, and what a run writes about the load of its experts."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

import fmegatron as fm
from fmegatron import job
from fmegatron.config import ExpertConfig, TrainConfig
from fmegatron.errors import UserError
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.models.moe import MoE
from fmegatron.models.mtp import layers_with_experts
from fmegatron.padding import shard_batch
from fmegatron.parallel.dispatch import dispatched
from fmegatron.parallel.routing import Routing, route
from fmegatron.parallel.routing_record import as_batch, read_record, recorded, replayed, whole_record, write_record
from fmegatron.precision import Precision
from fmegatron.simulation import per_rank, simulate
from fmegatron.testing import Layout, compare
from fmegatron.testing.program import Program
from tests.train_runs import flags, go, write_corpus

ROWS, SEQ, EXPERTS = 4, 8, 4
ROUTING = Routing(EXPERTS, 2, normalised=True, switch_loss=0.1, z_loss=0.1, capacity=1.0)
DIMS = {"routing": "batch seq layer choice"}


def model(mtp=0, **changes):
    moe = MoE(dataclasses.replace(ROUTING, **changes), 4, dense_layers=(1,))
    return Decoder(DecoderConfig(vocab=24, embed=8, layers=3, heads=4, mlp=8, kv_heads=2, head=4, moe=moe, mtp=mtp))


def batch(rows=ROWS, seq=SEQ, seed=0, layers=2):
    """With choices that no router makes: by chance, some of them dropped."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 24, (rows, seq), generator=g)
    chosen = torch.rand(rows, seq, layers, EXPERTS, generator=g).argsort(-1)[..., :2].to(torch.int32)
    chosen = torch.where(torch.rand(chosen.shape, generator=g) < 0.2, -1 - chosen, chosen)
    return {"tokens": tokens, "labels": tokens.roll(1, 1), "routing": chosen}


def test_a_record_is_the_choice_and_what_was_dropped():
    logits = torch.randn(2, SEQ, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(SEQ) < torch.tensor([[SEQ], [5]])
    sh = fm.Sharding()
    first = route(logits, ROUTING, sh=sh, mask=mask)
    again = route(logits, ROUTING, sh=sh, mask=mask, **replayed(recorded(first)))
    for name in ("experts", "weights", "chosen"):
        assert torch.equal(getattr(again, name), getattr(first, name)), name
    assert (first.experts != first.chosen).any() and (recorded(first)[1, 5:] == EXPERTS).all()


@pytest.mark.parametrize(
    ("backend", "capacity"),
    [("all-to-all", None), ("all-to-all", 0.5), ("all-to-all", 2.0), ("padded", 0.5), ("padded", 2.0)],
)
def test_a_replay_does_not_depend_on_the_capacity_of_this_run(backend, capacity):
    """The record has more choices of one expert than this run's capacity, or drops that this run's would keep."""
    routing = Routing(EXPERTS, 1, capacity=capacity)
    x, logits = torch.randn(1, SEQ, 4, dtype=torch.float64), torch.randn(1, SEQ, EXPERTS, dtype=torch.float64)
    record = torch.tensor([0, 0, 0, 0, 0, -1, 3, 3], dtype=torch.int32).view(1, SEQ, 1)  # one of expert 0 was dropped
    sh, matrices = fm.Sharding(), torch.randn(EXPERTS, 4, 4, dtype=torch.float64)
    routed = route(logits, routing, sh=sh, **replayed(record))

    def experts(rows, weights, ends, leaves, *, sh):
        if rows.ndim == 3:  # [expert place embed]
            return torch.bmm(rows, matrices) * weights[..., None]
        starts = [0, *ends.tolist()]
        parts = [rows[a:b] @ m for a, b, m in zip(starts[:-1], starts[1:], matrices, strict=True)]
        return torch.cat(parts) * weights[:, None]

    y = dispatched(experts, x, routed, {}, number=EXPERTS, sh=sh, backend=backend)
    scores = logits.softmax(-1)
    want = torch.stack(
        [
            torch.zeros(4).double() if e < 0 else scores[0, t, e] * (x[0, t] @ matrices[e])
            for t, e in enumerate(record.flatten())
        ]
    )
    torch.testing.assert_close(y[0], want)


@pytest.mark.parametrize(
    ("text", "modules"),
    [("dp=2,tp=2 sp ep=4 micro=2", 0), ("cp=2,tp=2 ep=2 etp=2 zero=3", 0), ("cp=2,tp=2 sp ep=4", 1)],
)
def test_a_replay_is_the_same_on_a_layout(text, modules):
    given = batch(layers=2 + modules)
    result = compare(model(modules), Layout.parse(text), batch=given, dims=DIMS, checks=("gradients",))
    assert result.ok, result.worst


@pytest.mark.parametrize("modules", [0, 2])
def test_what_is_recorded_on_a_layout_is_what_was_replayed(modules):
    """Prediction modules too, whose last tokens have nothing further and are not routed."""
    m, layout = dataclasses.replace(model(modules), record_routing=True), Layout.parse("dp=2,cp=2 micro=2")
    assert layers_with_experts(m.config) == 2 + modules
    data = batch(layers=2 + modules)
    for depth in range(1, modules + 1):
        data["routing"][:, SEQ - depth :, 1 + depth] = EXPERTS  # none
    program = Program(m, batch=data, dims=DIMS)
    params = program.params_of(m.spec(), torch.float64)
    with simulate(4):
        sh = program.sharding(layout, Precision(params=torch.float64))
        f = fm.accumulate(m.loss, 2, weights=m.weights)
        (_, metrics), _ = f(sh.shard_params(params, m.spec()), shard_batch(data, sh, dims=DIMS), fm.Ctx(sh=sh))
        stats = metrics["stats"]
        for found in per_rank(whole_record(stats["routing"], sh, rows=ROWS, seq=SEQ)):
            assert torch.equal(found, data["routing"])
        for found, want in zip(
            per_rank(as_batch(stats["routing"], sh)), per_rank(sh.shard(data["routing"], DIMS["routing"])), strict=True
        ):
            assert torch.equal(found, want)
        counted = torch.where(data["routing"] < 0, EXPERTS, data["routing"])
        kept = [torch.bincount(c.flatten(), minlength=EXPERTS + 1)[:EXPERTS] for c in counted.unbind(2)]
        own = [stats["mtp"]["kept"]] if modules else []
        for found in per_rank(torch.cat([stats["kept"], *own])):
            assert torch.equal(found, torch.stack(kept).to(found))


def test_modules_choose_for_themselves_where_the_record_has_none_of_them():
    m, data = model(1), batch()
    program = Program(m, batch=data, dims=DIMS)
    params, sh = program.params_of(m.spec(), torch.float64), fm.Sharding(precision=Precision(params=torch.float64))
    f = fm.accumulate(dataclasses.replace(m, record_routing=True).loss, weights=m.weights)
    (_, metrics), _ = f(params, data, fm.Ctx(sh=sh))
    found = as_batch(metrics["stats"]["routing"], sh)
    assert torch.equal(found[:, :, :2], data["routing"]) and found[0, : SEQ - 1, 2].abs().max() <= EXPERTS
    # the modules' own choice, replayed, is the same loss
    (again, _), _ = f(params, {**data, "routing": found}, fm.Ctx(sh=sh))
    (value, _), _ = f(params, data, fm.Ctx(sh=sh))
    torch.testing.assert_close(again, value, rtol=1e-14, atol=0)


def test_files_of_another_run_are_refused(tmp_path):
    write_record(tmp_path, 3, batch()["routing"], EXPERTS)
    every = torch.arange(ROWS), torch.arange(SEQ)
    found = read_record(tmp_path, 3, rows=every[0][1:3], columns=every[1], shape=(ROWS, SEQ, 2, 2), experts=4)
    assert torch.equal(found, batch()["routing"][1:3])
    with pytest.raises(
        UserError, match="4 rows, 8 tokens, 2 layers with experts, 2 choices, but this run has 4 rows, 9 tok"
    ):
        read_record(tmp_path, 3, rows=every[0], columns=every[1], shape=(ROWS, 9, 2, 2), experts=4)
    with pytest.raises(UserError, match="names expert 3, but this run has 2 experts a layer"):
        read_record(tmp_path, 3, rows=every[0], columns=every[1], shape=(ROWS, SEQ, 2, 2), experts=2)
    write_record(tmp_path, 1, batch()["routing"], EXPERTS)
    settings = {"replay_routing": str(tmp_path), "moe": ExpertConfig(experts=4), "steps": 3}
    with pytest.raises(UserError, match="has no step 2, and this run needs steps 1 to 3"):
        job.check_replay(TrainConfig(**settings), 0)
    job.check_replay(TrainConfig(**settings), 2)
    moe = ExpertConfig(experts=4)
    for settings, message in (
        (
            {"replay_routing": str(tmp_path), "moe": moe, "steps": 4},
            "has no step 4, the last one there is 3: use --steps 3",
        ),
        ({"replay_routing": str(tmp_path / "none"), "moe": moe}, "has no recorded step"),
        ({"record_routing": "x"}, "--record-routing x: the model has no experts"),
    ):
        config = TrainConfig(**settings)
        with pytest.raises(UserError, match=message):
            job.check(config, 1, job.model_config(config, None))


def rows_of(out, name="metrics.jsonl"):
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def test_a_run_replays_another_and_writes_its_load(tmp_path):
    """The second run's own choice would be another one: its experts are forced in turn."""
    data, moe = write_corpus(tmp_path / "text.jsonl"), {"moe_experts": 4, "moe_capacity": 1.0, "steps": 3}
    moe |= {"moe_switch_loss": 0.1, "log_load": 2, "moe_z_loss": 0.01, "mtp": 1}  # its module is layer 2
    record, length = tmp_path / "choices", 16
    assert go(flags(data, tmp_path / "a", "--record-routing", record, batch_microbatches=2, **moe)) == 0
    again = flags(data, tmp_path / "b", "--replay-routing", record, moe_force="balanced", **moe)
    assert go(again) == 0 and go(flags(data, tmp_path / "c", moe_force="balanced", **moe)) == 0
    a, b, c = ([r for r in rows_of(tmp_path / n) if "loss" in r] for n in "abc")
    for one, other, alone in zip(a, b, c, strict=True):
        assert abs(one["lm"] - other["lm"]) < 1e-5 < abs(one["lm"] - alone["lm"])
        for layer in (0, 1):
            assert one[f"max_load.{layer}"] == other[f"max_load.{layer}"] > 1 == alone[f"max_load.{layer}"]
            assert one[f"dropped.{layer}"] == other[f"dropped.{layer}"] > 0
        for name in ("balance", "router_z"):  # the module does not see the last token
            each = [one[f"{name}.{i}"] * n / length for i, n in enumerate((length, length, length - 1))]
            assert sum(each) == pytest.approx(one[name], rel=1e-5)
    (row,) = rows_of(tmp_path / "a", "load.jsonl")
    chosen = np.load(record / "step_00000002.npy")
    assert chosen.shape[1] == length
    chosen = np.where(chosen < 0, -1 - chosen, chosen)
    counts = {str(i): np.bincount(chosen[:, :, i].ravel(), minlength=4)[:4].tolist() for i in range(3)}
    assert row == {"step": 2, "tokens": counts}
    assert ">2</text>" in (tmp_path / "a" / "load.svg").read_text()
