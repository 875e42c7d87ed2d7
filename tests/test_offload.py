"""Optimizer states and activations in host memory: the numbers are the same, and what rests is there."""

from __future__ import annotations

import importlib
import weakref

import pytest
import torch

from fmegatron import tree
from fmegatron.accumulate import accumulate
from fmegatron.errors import UserError
from fmegatron.offload import offloaded, on_host, settle
from fmegatron.optim import (
    adafactor,
    adamw,
    chain,
    clip_by_global_norm,
    ema,
    lion,
    muon,
    muon_labels,
    partition,
    with_master,
    with_stochastic_rounding,
)
from fmegatron.parallel.stack import stack
from fmegatron.remat import names, offload, remat
from fmegatron.spec import Param
from fmegatron.split import split
from tests.optim_trees import SHAPES, cloned, made, same
from tests.transforms_model import (
    block,
    close,
    context,
    embed,
    loss_of,
    make_batch,
    make_params,
    ordinary,
    reference,
    small_block,
    weights,
)

module = importlib.import_module("fmegatron.offload")  # `fm.offload` is a function

torch.set_num_threads(1)

SPEC = {
    "embed": Param(SHAPES["embed"], "vocab embed"),
    "layers": {
        i: {"q": Param((5, 3, 2), "embed heads head"), "norm": Param((5,), "embed")} for i in range(2)
    },
    "scale": Param((), ""),
}  # fmt: skip
OPTIMIZERS = {
    "adamw": lambda: adamw(0.02, clip=0.5),
    "chain": lambda: chain(clip_by_global_norm(0.5), adamw(0.02), ema(0.9, debias=True)),
    "master": lambda: with_master(adamw(0.02, clip=0.5)),
    "rounded": lambda: with_stochastic_rounding(lion(0.02, moments=torch.bfloat16), 3),
    "adafactor": lambda: adafactor(0.02, beta1=0.9),
    "muon": lambda: partition(muon_labels(SPEC), {"muon": muon(0.02, spec=SPEC), "adamw": adamw(0.02)}),
}


def run(optimizer, dtype, donate, device="cpu", steps=3):
    params, state, found = made(0, dtype, device=device), None, []
    state = optimizer.init(params)
    for n in range(1, steps + 1):
        params, grads, state = optimizer.update(params, made(n, device=device), state, donate=donate)
        settle()
        found.append(cloned((params, grads, state)))
    return found


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("bucket", [1, 300, 1 << 20])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_offloaded_updates_are_the_same(name, bucket, donate):
    dtype = torch.bfloat16 if name in ("master", "rounded") else torch.float32
    got, want = (run(o, dtype, donate) for o in (offloaded(OPTIMIZERS[name](), bucket=bucket), OPTIMIZERS[name]()))
    same(got, want)


def test_a_pure_update_changes_nothing_and_a_donated_one_reuses_the_host_s_memory():
    optimizer, params, grads = offloaded(OPTIMIZERS["chain"](), bucket=100), made(0), made(1)
    state = optimizer.init(params)
    before = cloned((params, grads, state))
    optimizer.update(params, grads, state)
    same((params, grads, state), before)
    new, _, after = optimizer.update(params, grads, state, donate=True)
    for a, b in zip(tree.leaves((params, state)), tree.leaves((new, after)), strict=True):
        assert not torch.is_tensor(a) or a is b


def test_frozen_leaves_and_those_without_a_gradient():
    params = {"a": torch.randn(4), "n": torch.arange(3), "none": None, "b": torch.randn(3)}
    grads = {"a": torch.randn(4), "n": None, "none": None, "b": None}
    results = []
    for optimizer in (offloaded(adamw(0.1), bucket=1), adamw(0.1)):
        results.append(optimizer.update(params, grads, optimizer.init(params)))
    same(*results)


def test_a_checkpoint_s_state_goes_to_the_host():
    optimizer = offloaded(with_master(adamw(0.1)))
    params = tree.tree_map(lambda t: t.to("meta"), made(0, torch.bfloat16))
    state = optimizer.init(params)
    assert all(t.is_meta for t in tree.leaves(state) if torch.is_tensor(t))
    assert all(t.device.type == "cpu" for t in tree.leaves(on_host(state)) if torch.is_tensor(t))
    assert on_host(state)["count"] == 0
    with pytest.raises(UserError, match="bucket=0"):
        offloaded(adamw(0.1), bucket=0)


# Activations

ATTENTION, MIXED = offload("attention"), offload("attention", "q", keep=("up", "o"))


@pytest.mark.parametrize(
    "policy", [ATTENTION, MIXED, offload("q", "gate", "down")], ids=["attention", "mixed", "products"]
)
def test_one_gradient_whatever_is_in_host_memory(policy):
    p, batch = make_params(), make_batch()
    for n in (1, 3):
        value, want = reference(p, batch)
        layers = ordinary(stack(block, save=policy))
        (got, _), grads = accumulate(loss_of(layers), n, weights=weights)(p, batch)
        close((got, grads), (value, want))


def test_one_gradient_compiled():
    """The order in which a compiled block keeps its outputs is that of a run without data."""
    p, batch = make_params(layers=2, only={"norm1", "q", "o", "bias", "up"}), make_batch(rows=2)
    f = torch.compile(small_block, backend="aot_eager", fullgraph=True)
    _, grads = accumulate(loss_of(ordinary(stack(remat(f, MIXED)))), 1, weights=weights)(p, batch)
    close(grads, reference(p, batch, layer=small_block)[1])


def test_residuals_hold_host_copies_and_nothing_else(monkeypatch):
    """What is named is copied to the host and not held; what is kept on the device is the same tensor."""
    made, sent = [], []
    plain = split(block, names("attention", "q", "up", "o"))
    monkeypatch.setattr(
        module.Copies, "to_host", lambda c, x, *a: sent.append(x.clone()) or made.append(weakref.ref(x)) or sent[-1]
    )
    p, batch = make_params(layers=1), make_batch()
    ctx = context(batch)
    x = embed(p, None, ctx)
    y, want = plain.forward(p["layers"][0], x, ctx)
    z, box = remat(block, MIXED).split.forward(p["layers"][0], x, ctx)
    close(z, y)
    close(box.residual.kept, want.kept)
    here = {id(t) for outs in box.residual.kept for t in outs}
    assert sum(id(t) in here for t in sent) == 3 and all(r() is None for r in made)  # q, attention's output and its lse


def test_what_is_away_comes_back_a_layer_ahead(monkeypatch):
    happened = []
    to_device = module.Copies.to_device
    monkeypatch.setattr(module.Copies, "to_device", lambda c, x: happened.append("copy") or to_device(c, x))

    def noting(p, carry, ctx):
        happened.append(ctx.layer)
        return block(p, carry, ctx)

    p, batch = make_params(layers=3), make_batch()
    layers = ordinary(stack(noting, save=offload("q")))
    accumulate(loss_of(layers), 1, weights=weights)(p, batch)
    assert happened == [0, 1, 2, "copy", "copy", 2, "copy", 1, 0]


def test_a_second_run_may_come_in_another_order():
    """Only how far ahead a copy comes depends on the order, as in pipelines."""
    f = remat(block, ATTENTION)
    p, batch = make_params(layers=2), make_batch()
    ctx = context(batch)
    x = embed(p, None, ctx)
    results = []
    for order in ((0, 1), (1, 0)):
        boxes = [f.split.forward(p["layers"][i], x, ctx) for i in range(2)]
        found = {}
        for i in order:
            y, box = boxes[i]
            found[i] = f.split.backward(box, tree.tree_map(torch.ones_like, y), p["layers"][i])
        results.append([found[0], found[1]])
    close(*results)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("name", ["adamw", "chain", "master", "rounded"])
def test_cuda_states_rest_in_pinned_memory(name, donate):
    dtype = torch.bfloat16 if name in ("master", "rounded") else torch.float32
    optimizers = offloaded(OPTIMIZERS[name](), bucket=300), OPTIMIZERS[name]()
    got, want = (run(o, dtype, donate, "cuda") for o in optimizers)
    same(*(tree.tree_map(lambda t: t.cpu() if torch.is_tensor(t) else t, x) for x in (got, want)))
    held = optimizers[0].init(made(0, dtype, device="cuda"))
    assert all(t.is_pinned() for t in tree.leaves(held) if torch.is_tensor(t))
