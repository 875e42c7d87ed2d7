"""Precision as an argument: what is stored, gathered, computed and summed in which dtype."""

import pytest
import torch

from fmegatron import collectives, tree
from fmegatron.accumulate import accumulate
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.mesh import make_mesh
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.optim import adamw, with_master
from fmegatron.precision import Precision, dtype_of
from fmegatron.random import key
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import simulate
from fmegatron.spec import Param, init
from fmegatron.step import TrainState, train_step

CONFIG = DecoderConfig(vocab=32, embed=16, layers=1, heads=4, kv_heads=2, mlp=32)
MODEL = Decoder(CONFIG)
G = torch.Generator().manual_seed(0)
BATCH = {n: torch.randint(0, CONFIG.vocab, (4, 8), generator=G) for n in ("tokens", "labels")}


def gradients(precision, sh=None, params=None, batch=None):
    sh = sh or Sharding(precision=precision)
    params = params if params is not None else init(MODEL.spec(), key(0), sh=sh)
    return accumulate(MODEL.loss, weights=MODEL.weights)(params, batch or BATCH, Ctx(sh=sh))


def test_names_of_dtypes():
    assert dtype_of("bf16") is dtype_of("bfloat16") is torch.bfloat16
    with pytest.raises(UserError, match="--precision.compute 'fp12' is not known"):
        dtype_of("fp12", argument="--precision.compute")
    assert Precision(compute=torch.bfloat16).reduce_dtype is torch.float32
    assert Precision(params=torch.float64).reduce_dtype is torch.float64
    assert Precision(compute=torch.bfloat16, reduce=torch.bfloat16).reduce_dtype is torch.bfloat16


def test_computing_in_bfloat16_stays_near_float32_and_gradients_come_back_wide():
    (exact, _), want = gradients(Precision())
    (value, _), got = gradients(Precision(compute=torch.bfloat16))
    assert abs(value - exact) < 2e-2 * exact and value != exact
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        assert a.dtype is torch.float32 and 0 < (a - b).norm() < 0.1 * b.norm()


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
def test_parameters_are_gathered_in_the_compute_dtype_and_gradients_reduced_in_the_reduce_dtype(reduce, monkeypatch):
    seen = []
    for name in ("_all_gather", "_reduce_scatter"):
        real = getattr(collectives, name)

        def spy(x, *args, _real=real, _name=name):
            seen.append((_name, x.dtype))
            return _real(x, *args)

        monkeypatch.setattr(collectives, name, spy)
    precision = Precision(compute=torch.bfloat16, reduce=reduce)
    whole = init(MODEL.spec(), key(0), sh=Sharding(precision=precision))
    with simulate(2):
        mesh = make_mesh("dp=2", device="cpu")
        sh = Sharding(mesh, standard_rules(mesh, store="dp"), precision=precision)
        params = sh.shard_params(whole, MODEL.spec())
        batch = {n: sh.shard(x, "batch seq") for n, x in BATCH.items()}
        _, grads = gradients(precision, sh, params, batch)
    assert {d for n, d in seen if n == "_all_gather"} == {torch.bfloat16}
    assert {d for n, d in seen if n == "_reduce_scatter"} == {reduce}
    assert {g.dtype for g in tree.leaves(grads)} <= {torch.float32, reduce}
    assert {p.dtype for p in tree.leaves(params)} == {torch.float32}


def test_a_parameter_s_own_dtype_is_kept_at_rest_and_in_equations():
    sh = Sharding(precision=Precision(compute=torch.bfloat16))
    spec = {"w": Param((2, 2), "embed mlp"), "scale": Param((2,), "embed", dtype=torch.float32)}
    params = init(spec, key(0), sh=sh)
    used = sh.use(params, spec)
    assert (
        params["w"].dtype is torch.float32
        and used["w"].dtype is torch.bfloat16
        and used["scale"].dtype is torch.float32
    )


def test_a_master_copy_takes_steps_that_are_too_small_for_the_parameters():
    """bf16 parameters with an fp32 master: 64 small steps add up; without one, each is rounded away."""
    finals = {}
    for name, precision in {
        "fp32": Precision(),
        "bf16": Precision(params=torch.bfloat16, master=torch.float32),
    }.items():
        sh = Sharding(precision=precision)
        optimizer = adamw(1e-4, weight_decay=0.0)
        if precision.master is not None:
            optimizer = with_master(optimizer, precision.master)
        step = train_step(MODEL.loss, optimizer, weights=MODEL.weights, sh=sh)
        params = init(MODEL.spec(), key(0), sh=sh)
        state = TrainState(0, params, optimizer.init(params))
        first = tree.leaves(params)
        for _ in range(64):
            state, _ = step(state, BATCH)
        finals[name] = torch.cat(
            [(a.float() - b.float()).flatten() for a, b in zip(tree.leaves(state.params), first, strict=True)]
        )
        assert {p.dtype for p in tree.leaves(state.params)} == {precision.params}
    cosine = torch.nn.functional.cosine_similarity(finals["fp32"], finals["bf16"], dim=0)
    assert cosine > 0.8
