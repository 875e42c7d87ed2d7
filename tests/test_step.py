"""The train step: pure and donating, its errors, and the bytes that each rank holds. (test_learning.py compares it with
transformers and torch.optim.)"""

import dataclasses

import pytest
import torch

from fmegatron import tree
from fmegatron.accumulate import Term, Weight
from fmegatron.context import Ctx
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.optim import adamw, chain, clip_by_global_norm, decay_mask, sgd
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.rules import standard_rules
from fmegatron.schedules import cosine
from fmegatron.sharding import Sharding
from fmegatron.spec import init, local_bytes, params_of
from fmegatron.step import NonFiniteError, TrainState, evaluate, train_step
from tests.processes import processes
from tests.test_llama import ODD, batch_of

DOUBLE = Precision(params=torch.float64)


def llama_step(config, *, donate=False, microbatches=1, sh=None, steps=6, dropout=0.0):
    model = Decoder(dataclasses.replace(config, dropout=dropout))
    schedule = cosine(1e-2, total=steps, warmup=2)
    optimizer = chain(clip_by_global_norm(0.5), adamw(schedule, betas=(0.9, 0.95), mask=decay_mask(model.spec())))
    sh = sh or Sharding(precision=DOUBLE)
    return (
        model,
        optimizer,
        train_step(model.loss, optimizer, weights=model.weights, sh=sh, donate=donate, microbatches=microbatches),
    )


def fresh(model, optimizer, sh=None):
    params = init(model.spec(), key(0), sh=sh or Sharding(precision=DOUBLE))
    return TrainState(0, params, optimizer.init(params), key(1))


def test_a_step_is_pure_and_donating_gives_bitwise_the_same():
    model, optimizer, pure = llama_step(ODD, dropout=0.1)
    _, _, donating = llama_step(ODD, dropout=0.1, donate=True)
    a, b = fresh(model, optimizer), fresh(model, optimizer)
    for i in range(3):
        batch = batch_of(ODD, seed=i)
        again = pure(a, batch)[0]
        old, (a, one), (b, two) = b, pure(a, batch), donating(b, batch)
        for x, y, z in zip(tree.leaves(a), tree.leaves(b), tree.leaves(again), strict=True):
            assert x is y is None or x == y if not tree.is_tensor(x) else torch.equal(x, y) and torch.equal(x, z)
        assert float(one["loss"]) == float(two["loss"]) and float(one["grad_norm"]) == float(two["grad_norm"])
    with pytest.raises(RuntimeError, match="donated to a later step"):
        donating(old, batch_of(ODD))
    with pytest.raises(RuntimeError, match="donated"):
        tree.leaves(old)


def test_donating_reuses_the_buffers():
    model, optimizer, step = llama_step(ODD, donate=True)
    state = fresh(model, optimizer)
    before = {t.data_ptr() for t in tree.leaves(state) if tree.is_tensor(t)}
    state, _ = step(state, batch_of(ODD))
    assert {t.data_ptr() for t in tree.leaves(state) if tree.is_tensor(t)} == before


@pytest.mark.parametrize("rows", [3, 4])
def test_microbatches_and_dropout_do_not_change_a_step(rows):
    """Masks go by global rows, weights by the global batch, so cutting it changes nothing but rounding."""
    model, optimizer, whole = llama_step(ODD, dropout=0.2)
    results = []
    for microbatches in (1, 2, 3):
        _, _, step = llama_step(ODD, dropout=0.2, microbatches=microbatches)
        results.append(step(fresh(model, optimizer), batch_of(ODD, rows=rows)))
    for state, metrics in results[1:]:
        assert abs(metrics["loss"] - results[0][1]["loss"]) < 1e-12
        for x, y in zip(tree.leaves(state.params), tree.leaves(results[0][0].params), strict=True):
            assert (x - y).abs().max() < 1e-9


def test_a_value_that_is_not_finite_stops_before_anything_changes():
    model, optimizer, step = llama_step(ODD, donate=True)
    state = fresh(model, optimizer)
    state.params["layers"][1]["up"][0, 0] = float("inf")
    before = [t.clone() for t in tree.leaves(state.opt) if tree.is_tensor(t)]
    with pytest.raises(NonFiniteError, match="step 1: the loss term 'lm'"):
        step(state, batch_of(ODD))
    assert all(
        torch.equal(a, b) for a, b in zip(before, [t for t in tree.leaves(state.opt) if tree.is_tensor(t)], strict=True)
    )

    def loss(params, batch, ctx):  # the loss is finite, a gradient is not
        return Term((params["a"] + params["b"].abs().sqrt() * 0).sum(), "", weight=torch.ones(())), None

    params = {"a": torch.ones(()), "b": torch.zeros(2)}
    optimizer = sgd(0.1)
    with pytest.raises(NonFiniteError, match="step 5: the gradient of 'b'"):
        train_step(loss, optimizer)(TrainState(4, params, optimizer.init(params)), {"x": torch.ones(1)})


def test_extras_change_by_the_step_s_statistics_alone():
    def loss(params, batch, ctx):
        load = (batch["x"] * ctx.extras["bias"]).sum(0)
        return Term(batch["x"] @ params["w"], "batch", weight=torch.ones(len(batch["x"]))), {"load": load}

    params, optimizer = {"w": torch.ones(3)}, sgd(0.1)
    step = train_step(
        loss, optimizer, microbatches=2, update_extras=lambda e, stats: {"bias": e["bias"] + stats["load"]}
    )
    x = torch.arange(12.0).view(4, 3)
    state, metrics = step(TrainState(0, params, optimizer.init(params), extras={"bias": torch.ones(3)}), {"x": x})
    assert torch.equal(state.extras["bias"], 1 + x.sum(0))
    assert torch.allclose(state.params["w"], 1 - 0.1 * x.mean(0), rtol=1e-6)


def test_evaluation_is_the_mean_over_all_tokens():
    model = Decoder(ODD)
    params = init(model.spec(), key(0), sh=Sharding(precision=DOUBLE))
    f = evaluate(model.loss, weights=model.weights, sh=Sharding(precision=DOUBLE))
    batches = [batch_of(ODD, seed=i) for i in range(3)]
    found = [f(params, b)["lm"] for b in batches]
    mean = sum(float(s) for s, _ in found) / sum(float(w) for _, w in found)
    whole = {n: torch.cat([b[n] for b in batches]) for n in batches[0]}
    total, weight = f(params, whole)["lm"]
    assert abs(mean - float(total / weight)) < 1e-12 and not total.requires_grad


# ------------------------------------------------------------------------------------------- what each rank holds
# and gets

MESHY = DecoderConfig(vocab=64, embed=32, layers=2, heads=8, kv_heads=4, head=8, mlp=64)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree.leaves(out) if not isinstance(out, torch.Tensor) else [out]:
            if isinstance(t, torch.Tensor) and str(func) != "aten.detach.default":
                self.elements = max(self.elements, t.numel())
        return out


def held(axes, sp, store):
    """(bytes of parameters, of moments, the most elements that init makes at once, largest shard) on this rank."""
    from fmegatron.mesh import make_mesh

    mesh = make_mesh(axes, kv_heads=MESHY.kv_heads, device="cpu")
    sh = Sharding(mesh, standard_rules(mesh, sequence_parallel=sp, store=store))
    model = Decoder(MESHY)
    with Largest() as largest:
        params = init(model.spec(), key(0), sh=sh)
    opt = adamw(1e-3).init(params)
    shard = max(p.to_local().numel() for p in tree.leaves(params))
    rows = sh.shard(torch.zeros(8, 16), "batch seq").shape
    return local_bytes(params), local_bytes(opt), largest.elements, shard, tuple(rows)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    ("axes", "store", "divides"),
    [("dp=2,tp=2", (), {"kv": 2, "mlp": 2, "vocab": 2}), ("dp=2,tp=2", ("dp",), None), ("dp=4,tp=1", ("dp",), None)],
)
def test_each_rank_holds_its_share(axes, store, divides):
    params, moments, largest, shard, rows = processes(4).run(held, axes, True, store)[0]
    total = sum(p.numel for p in params_of(Decoder(MESHY).spec()).values())
    if divides is None:  # all leaves divide by all four ranks, but norms that no axis of tp cuts
        norms = sum(p.numel for n, p in params_of(Decoder(MESHY).spec()).items() if "norm" in n)
        cut = 2 if axes == "dp=2,tp=2" else 4
        expected = 4 * ((total - norms) // 4 + norms // cut)
    else:
        expected = 0
        for p in params_of(Decoder(MESHY).spec()).values():
            parts = max((divides[n] for n in p.names if n in divides), default=1)
            expected += 4 * p.numel // parts
    assert params == expected and moments == 2 * expected
    assert largest <= shard  # no rank makes more than its largest shard at once
    assert rows == (8 // int(axes[3]), 16)


def sharded_steps(axes, sp, store, steps):
    """Losses of a run on this mesh, all ranks together."""
    from fmegatron.mesh import make_mesh

    mesh = make_mesh(axes, kv_heads=ODD_MESH.kv_heads, device="cpu")
    sh = Sharding(mesh, standard_rules(mesh, sequence_parallel=sp, store=store), precision=DOUBLE)
    model, optimizer, step = llama_step(ODD_MESH, sh=sh, donate=True, steps=20, dropout=0.1)
    state = fresh(model, optimizer, sh)
    losses = []
    for i in range(steps):
        batch = {n: sh.shard(x, "batch seq") for n, x in batch_of(ODD_MESH, seed=i).items()}
        state, metrics = step(state, batch)
        losses.append((float(metrics["loss"]), float(metrics["grad_norm"]), float(metrics["param_norm"])))
    return losses


ODD_MESH = dataclasses.replace(MESHY, vocab=24, embed=16, head=2, mlp=20)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(("axes", "sp", "store"), [("dp=2,tp=2", True, ("dp",)), ("dp=1,cp=2,tp=2", False, ())])
def test_twenty_steps_on_four_processes_equal_one(axes, sp, store):
    """Loss, gradient norm and parameter norm, with dropout, to 1e-8 in float64."""
    model, optimizer, step = llama_step(ODD_MESH, steps=20, dropout=0.1)
    state = fresh(model, optimizer)
    every = processes(4).run(sharded_steps, axes, sp, store, 20)
    assert every[0] == every[1] == every[2] == every[3]
    for i, (loss, norm, size) in enumerate(every[0]):
        state, metrics = step(state, batch_of(ODD_MESH, seed=i))
        for got, want in ((loss, metrics["loss"]), (norm, metrics["grad_norm"]), (size, metrics["param_norm"])):
            assert abs(got - float(want)) < 1e-8 * float(want), i


def test_a_step_of_one_s_own_is_a_few_lines():
    """The parts compose into the step that train_step gives, bitwise."""
    from fmegatron import accumulate, fold_in
    from fmegatron.optim import global_norm

    model, optimizer, ready = llama_step(ODD, dropout=0.1)
    sh = Sharding(precision=DOUBLE)
    gradients = accumulate(model.loss, 1, weights=model.weights)

    def own(state, batch):
        ctx = Ctx(sh=sh, key=fold_in(state.key, state.step))
        (loss, _), grads = gradients(state.params, batch, ctx)
        params, _, opt = optimizer.update(state.params, grads, state.opt, grad_norm=global_norm(grads))
        return TrainState(state.step + 1, params, opt, state.key), loss

    a, b = fresh(model, optimizer), fresh(model, optimizer)
    for i in range(2):
        (a, loss), (b, metrics) = own(a, batch_of(ODD, seed=i)), ready(b, batch_of(ODD, seed=i))
        assert torch.equal(loss, metrics["loss"])
    assert all(torch.equal(x, y) for x, y in zip(tree.leaves(a.params), tree.leaves(b.params), strict=True))


def test_terms_have_weights_and_coefficients():
    def loss(params, batch, ctx):
        y = batch["x"] @ params["w"]
        return {"a": Term(y, "batch"), "b": Term(y.square(), "batch")}, None

    def weights(batch):
        return {"a": Weight(batch["m"], "batch", 2.0), "b": Weight(0.0, "", 5.0)}

    params, optimizer = {"w": torch.ones(3, dtype=torch.float64)}, sgd(1.0)
    x, m = torch.arange(6.0, dtype=torch.float64).view(2, 3), torch.tensor([1.0, 0.5], dtype=torch.float64)
    _, metrics = train_step(loss, optimizer, weights=weights)(
        TrainState(0, params, optimizer.init(params)), {"x": x, "m": m}
    )
    assert float(metrics["loss"]) == pytest.approx(2.0 * 15.0 / 1.5)  # a weight of 0 gives 0
    assert float(metrics["a"]) == pytest.approx(10.0) and float(metrics["b"]) == 0.0
