"""Precision as an argument: what is stored, gathered, computed and summed in which dtype."""

import pytest
import torch

from fmegatron import checkpoint, collectives, tree
from fmegatron.accumulate import accumulate
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.mesh import make_mesh
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.optim import adamw, with_master
from fmegatron.precision import Precision, dtype_of
from fmegatron.primitives import attention, cross_entropy, linear_cross_entropy, rms_norm
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
    assert (
        Precision(compute=torch.float16).reduce_dtype is Precision(params=torch.float16).reduce_dtype is torch.float32
    )
    assert Precision(compute=torch.float16).needs_loss_scale and Precision(params=torch.float16).needs_loss_scale
    assert Precision(reduce=torch.float16).needs_loss_scale  # gradients overflow in sums as well
    assert not Precision(params=torch.bfloat16, compute=torch.float32).needs_loss_scale


@pytest.mark.parametrize(("compute", "bound"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_computing_in_16_bits_stays_near_float32_and_gradients_come_back_wide(compute, bound):
    (exact, _), want = gradients(Precision())
    (value, _), got = gradients(Precision(compute=compute))
    assert abs(value - exact) < bound / 5 * exact and value != exact and value.dtype is torch.float32
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        assert a.dtype is torch.float32 and 0 < (a - b).norm() < bound * b.norm()


def near_double(f, *args):
    """f of these in fp16 and its gradients are f's in float64 of the rounded arguments, but for rounding: f's value."""
    half = [a.half().requires_grad_() for a in args]
    wide = [a.detach().double().requires_grad_() for a in half]
    got, want = f(*half), f(*wide)
    assert (got - want).abs().max() < 2e-3 * want.abs().max()
    seed = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view(got.shape)
    found = torch.autograd.grad(got, half, seed)
    for a, b in zip(found, torch.autograd.grad(want, wide, seed.double()), strict=True):
        assert a.dtype is torch.float16 and (a - b).norm() < 5e-3 * b.norm()
    return got


def test_statistics_of_fp16_are_not_in_fp16():
    """Squares, exponentials and sums that leave its range, 65,504: norm, softmax and cross-entropy stand them."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(8, 512, generator=g)
    near_double(lambda x, w: rms_norm(x, w) * 300, x * 300, torch.rand(512, generator=g))  # squares of 90,000
    q, k, v = (torch.randn(1, 16, 2, *rest, 8, generator=g) for rest in ((2,), (), ()))
    near_double(lambda q, k, v: attention(q, k, v, scale=1.0), q * 2, k * 2, v)  # exponentials of e30
    labels = torch.randint(0, 512, (1, 8), generator=g)
    loss = near_double(lambda z: cross_entropy(z[None], labels), x * 100)  # exponentials of e300
    assert loss.dtype is torch.float32
    w = torch.randn(16, 512, generator=g)
    loss = near_double(
        lambda x, w: linear_cross_entropy(x[None], w, labels), torch.randn(8, 16, generator=g) * 5, w * 5
    )
    assert loss.dtype is torch.float32


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
def test_parameters_are_gathered_in_the_compute_dtype_and_gradients_reduced_in_the_reduce_dtype(reduce, monkeypatch):
    seen = []
    for name in ("gather_single", "scatter_single"):
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
    assert {d for n, d in seen if n == "gather_single"} == {torch.bfloat16}
    assert {d for n, d in seen if n == "scatter_single"} == {reduce}
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


BF16_MASTER = Precision(params=torch.bfloat16, master=torch.float32)


def bf16_run():
    """(step, first state) of bf16 parameters with fp32 copies."""
    sh = Sharding(precision=BF16_MASTER)
    optimizer = with_master(adamw(1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1), torch.float32)
    step = train_step(MODEL.loss, optimizer, weights=MODEL.weights, sh=sh)
    params = init(MODEL.spec(), key(0), sh=sh)
    return step, TrainState(0, params, optimizer.init(params))


def test_a_master_copy_is_the_parameter_and_bfloat16_its_rounding():
    """Bitwise fp32 parameters, updated by torch.optim.AdamW, that are rounded where equations read them."""
    step, state = bf16_run()
    first = tree.leaves(state.params)
    kept = tree.tree_map(lambda p: p.float().requires_grad_(), state.params)
    peer = torch.optim.AdamW(tree.leaves(kept), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    for _ in range(8):
        (loss, _), grads = gradients(BF16_MASTER, params=tree.tree_map(lambda p: p.detach().bfloat16(), kept))
        for p, g in zip(tree.leaves(kept), tree.leaves(grads), strict=True):
            assert g.dtype is torch.float32
            p.grad = g
        peer.step()
        state, metrics = step(state, BATCH)
        assert metrics["loss"] == loss
        columns = (tree.leaves(t) for t in (state.params, state.opt["master"], kept))
        for rounded, master, p in zip(*columns, strict=True):
            assert rounded.dtype is torch.bfloat16 and master.dtype is torch.float32
            assert torch.equal(master, p) and torch.equal(rounded, p.bfloat16())
    assert not any(torch.equal(a, b) for a, b in zip(tree.leaves(state.params), first, strict=True))


def test_fp32_parameters_computed_in_bfloat16_are_the_same_arithmetic():
    step, state = bf16_run()
    optimizer = adamw(1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    sh = Sharding(precision=Precision(compute=torch.bfloat16))
    plain = train_step(MODEL.loss, optimizer, weights=MODEL.weights, sh=sh)
    params = tree.tree_map(lambda p: p.float(), state.params)
    other = TrainState(0, params, optimizer.init(params))
    for _ in range(4):
        (state, _), (other, _) = step(state, BATCH), plain(other, BATCH)
    for master, p in zip(tree.leaves(state.opt["master"]), tree.leaves(other.params), strict=True):
        assert torch.equal(master, p)


def test_a_run_with_master_copies_goes_on_bitwise(tmp_path):
    step, state = bf16_run()
    for i in range(6):
        if i == 3:
            checkpoint.save(tmp_path, state, step=3)
        state, _ = step(state, BATCH)
    again = checkpoint.load(tmp_path, bf16_run()[1])
    for _ in range(3):
        again, _ = step(again, BATCH)
    for a, b in zip(tree.leaves(state), tree.leaves(again), strict=True):
        assert a == b if not tree.is_tensor(a) else torch.equal(a, b) and a.dtype == b.dtype
