"""Llama against itself on meshes of simulated and of real ranks, and compiled. Against transformers: test_families.py."""

import dataclasses
import math

import pytest
import torch

from fmegatron import tree
from fmegatron.accumulate import accumulate
from fmegatron.checking import check
from fmegatron.context import Ctx
from fmegatron.mesh import make_mesh, parse_axes
from fmegatron.models import PRESETS, Decoder, DecoderConfig
from fmegatron.models.llama import config_from_hf, config_to_hf
from fmegatron.precision import Precision
from fmegatron.primitives import Llama3Scaling
from fmegatron.random import key
from fmegatron.remat import names, nothing
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import init
from fmegatron.split import everything
from tests.processes import processes

DOUBLE = Precision(params=torch.float64)
ODD = DecoderConfig(vocab=101, embed=24, layers=2, heads=6, kv_heads=3, head=10, mlp=36, rope_base=500.0)
SCALED = dataclasses.replace(ODD, kv_heads=2, tied=True, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 16))


def batch_of(config, rows=4, seq=12, seed=1):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab, (rows, seq + 1), generator=g)
    mask = torch.rand(rows, seq, generator=g) < torch.linspace(0.2, 0.95, rows)[:, None]
    return {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous(), "mask": mask}


def test_config_round_trip_and_refusals():
    for config in (ODD, SCALED, PRESETS["llama3.1-8b"]):
        assert config_from_hf(config_to_hf(config)) == config
    wrong = {
        "hidden_act": "relu",
        "rope_scaling": {"rope_type": "spiral", "factor": 2.0},
        "pretraining_tp": 2,
        "new": 1,
    }
    for field, value in wrong.items():
        with pytest.raises(ValueError, match="spiral" if field == "rope_scaling" else field):
            config_from_hf({**config_to_hf(ODD), field: value})


def test_packed_documents_equal_documents_apart():
    params = init(Decoder(ODD).spec(), key(0), sh=Sharding(precision=DOUBLE))
    model, ctx = Decoder(ODD), Ctx(sh=Sharding(precision=DOUBLE))
    a, b = batch_of(ODD, rows=1, seq=5)["tokens"], batch_of(ODD, rows=1, seq=7, seed=2)["tokens"]
    segments = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    packed = model.logits(params, torch.cat([a, b], 1), ctx, segments=segments, positions=positions)
    apart = torch.cat([model.logits(params, t, ctx) for t in (a, b)], 1)
    assert (packed - apart).abs().max() < 1e-12


# ------------------------------------------------------------------------------------------------------------- layouts

MESHY = DecoderConfig(vocab=24, embed=16, layers=2, heads=8, kv_heads=2, head=4, mlp=24, tied=True)


def program(model):
    def loss(params, batch, sh):
        terms, _ = model.loss(params, batch, Ctx(sh=sh))
        return sh.sum(terms["lm"].items, "batch seq ->")

    return loss


@pytest.mark.parametrize("config", [ODD, MESHY])
def test_the_checking_mode_accepts_the_model(config):
    model = Decoder(config)
    params = init(model.spec(), key(0), sh=Sharding(precision=DOUBLE))
    mesh = make_mesh("dp=2,cp=2,tp=4", kv_heads=2, abstract=True, device="cpu")
    batch = {k: v for k, v in batch_of(config).items() if k != "mask"}
    check(program(model), model.spec(), params, batch, standard_rules(mesh, sequence_parallel=True))


def gradients(model, params, batch, sh, microbatches=1):
    return accumulate(model.loss, microbatches, weights=model.weights)(params, batch, Ctx(sh=sh))


def layout(axes, sp, store):
    mesh = make_mesh(axes, kv_heads=MESHY.kv_heads, device="cpu")
    return Sharding(mesh, standard_rules(mesh, sequence_parallel=sp, store=store), precision=DOUBLE)


PARAMS = init(Decoder(MESHY).spec(), key(0), sh=Sharding(precision=DOUBLE))
BATCH = batch_of(MESHY)
LAYOUTS = [
    ("dp=1,tp=4", True, (), "everything"),
    ("dp=2,tp=2", True, ("dp",), "nothing"),
    ("dp=4,tp=1", False, ("dp",), "attention"),
    ("dp=1,cp=2,tp=2", True, ("cp",), "everything"),
]
POLICIES = {"everything": everything, "nothing": nothing, "attention": names("attention")}


@pytest.mark.parametrize(("axes", "sp", "store", "save"), LAYOUTS)
def test_every_layout_computes_the_same_function(axes, sp, store, save):
    (value, _), want = gradients(Decoder(MESHY), PARAMS, BATCH, Sharding(precision=DOUBLE))
    with simulate(4):
        sh, model = layout(axes, sp, store), Decoder(MESHY, save=POLICIES[save])
        params = sh.shard_params(PARAMS, model.spec())
        local = {n: sh.shard(x, "batch seq") for n, x in BATCH.items()}
        (got, _), grads = gradients(model, params, local, sh, microbatches=2 if "dp=1" in axes else 1)
        assert max(abs(float(v - value)) for v in per_rank(got)) < 1e-12
        for (path, g), r, p in zip(
            tree.named(grads).items(), tree.leaves(want), tree.leaves(model.spec()), strict=True
        ):
            mine = per_rank(sh.local(g))
            theirs = per_rank(sh.local(sh.shard_param(r, p)))
            assert max(float((a - b).norm()) for a, b in zip(mine, theirs, strict=True)) <= 1e-12 * float(r.norm()), (
                path
            )


def on_processes(axes, sp, store, save, options=False):
    """Worst relative error of this rank's loss and gradients. options: of `compile`."""
    sh, model = layout(axes, sp, store), Decoder(MESHY, save=POLICIES[save], compile=options)
    (value, _), want = gradients(Decoder(MESHY), PARAMS, BATCH, Sharding(precision=DOUBLE))
    params = init(model.spec(), key(0), sh=sh)
    local = {n: sh.shard(x, "batch seq") for n, x in BATCH.items()}
    (got, _), grads = gradients(model, params, local, sh)
    worst = abs(float(got - value))
    for g, r, p in zip(tree.leaves(sh.local(grads)), tree.leaves(want), tree.leaves(model.spec()), strict=True):
        worst = max(worst, float((g - sh.local(sh.shard_param(r, p))).norm() / r.norm()))
    return worst


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(("axes", "sp", "store", "save"), LAYOUTS)
def test_real_processes_agree(axes, sp, store, save):
    assert max(processes(4).run(on_processes, axes, sp, store, save)) < 1e-12


@pytest.mark.parametrize(
    ("axes", "save"),
    [
        (None, "everything"),
        # (as the ledger, and the stages of a pipeline, have them)
        pytest.param("dp=1,cp=1,tp=1", "nothing", marks=pytest.mark.slow),
        pytest.param("dp=1,cp=1,tp=1", "attention", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_compute_the_same(axes, save):
    """aot_eager, without and with a mesh, with dropout, for every policy of recomputation; by inductor the slow case below."""
    compiled_equals_eager(axes, save, "aot_eager")


@pytest.mark.slow
def test_blocks_compiled_by_inductor_compute_the_same():
    compiled_equals_eager("dp=1,cp=1,tp=1", "attention", "inductor")


def compiled_equals_eager(axes, save, backend):
    torch._dynamo.reset()
    mesh = None if axes is None else make_mesh(axes, device="cpu")
    sh = Sharding(precision=DOUBLE) if mesh is None else Sharding(mesh, standard_rules(mesh), precision=DOUBLE)
    config = dataclasses.replace(MESHY, layers=2, dropout=0.1)
    results = []
    for compile_ in (False, {"backend": backend}):
        model = Decoder(config, save=POLICIES[save], compile=compile_)
        f = accumulate(model.loss, 1, weights=model.weights)
        results.append(f(PARAMS, BATCH, Ctx(sh=sh, key=key(1))))
    ((a, _), want), ((b, _), got) = results
    assert abs(float(a - b)) < 1e-12
    for path, g in tree.named(got).items():
        r = tree.named(want)[path]
        assert (g - r).norm() <= 1e-11 * r.norm(), path


COMPILED_LAYOUTS = [("dp=2,tp=2", True, ("dp",), "everything"), ("dp=2,tp=2", False, (), "attention"), *LAYOUTS]


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    ("axes", "sp", "store", "save"),
    [
        ("dp=1,tp=2", True, (), "everything"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in COMPILED_LAYOUTS),
    ],
)
def test_compiled_blocks_on_real_processes(axes, sp, store, save):
    options, world = {"backend": "aot_eager"}, math.prod(parse_axes(axes).values())
    assert max(processes(world).run(on_processes, axes, sp, store, save, options, timeout=600)) < 1e-12
