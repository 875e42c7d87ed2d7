"""Losses as weighted terms, microbatches, value_and_grad's arguments."""

import pytest
import torch

from fmegatron.accumulate import Term, Weight, accumulate
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.grad import value_and_grad
from fmegatron.parallel.stack import stack
from fmegatron.random import fold_in, key, uniform
from fmegatron.remat import nothing
from fmegatron.tree import leaves, tree_map
from tests.transforms_model import (
    COEFFICIENT,
    T,
    block,
    close,
    loop,
    loss_of,
    make_batch,
    make_params,
    ordinary,
    reference,
    weights,
)

P = {"a": torch.tensor([1.0, 2, 3], dtype=T), "b": torch.tensor(0.5, dtype=T)}
X = torch.arange(15, dtype=T).view(5, 3) / 7
MASK = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 1], [1, 1, 1]], dtype=torch.bool)
BATCH = {"x": X, "mask": MASK}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def items(p, x):
    return (x * p["a"]).sin() + p["b"] * x


def simple(p, batch, ctx):
    return Term(items(p, batch["x"]) * batch["mask"], "batch embed", weight=batch["mask"]), None


def mean(p, x=X, mask=MASK):
    return (items(p, x) * mask).sum() / mask.sum()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_one_term_with_its_own_weight(n):
    """Two of five microbatches hold most of the mask, and with n = 5 one holds none."""
    (total, metrics), grads = accumulate(simple, n)(P, BATCH)
    want, want_grads = value_and_grad(mean)(P)
    close((total, grads), (want, want_grads))
    assert metrics["weights"]["loss"] == MASK.sum() and metrics["terms"]["loss"] == total
    # The mean of the microbatches' means is something else.
    parts = [mean(P, x, m) for x, m in zip(X.tensor_split(n), MASK.tensor_split(n), strict=True) if m.any()]
    assert n == 1 or abs(sum(parts) / len(parts) - want) > 1e-4


@pytest.mark.parametrize("n", [1, 3, 6])
def test_several_terms_by_weights_of_the_batch(n):
    p, batch = make_params(), make_batch()
    value, want = reference(p, batch)
    (total, metrics), grads = accumulate(loss_of(ordinary(loop(block))), n, weights=weights)(p, batch)
    close((total, grads), (value, want))
    close(sum(COEFFICIENT[k] * t for k, t in metrics["terms"].items()), value)
    assert metrics["stats"] == {"rows": 6 // n} and metrics["weights"]["aux"] == 6


def test_a_weight_of_zero_gives_zero():
    batch = {**BATCH, "mask": torch.zeros_like(MASK)}
    for f in (accumulate(simple, 2), accumulate(simple, weights=lambda b: {"t": Weight(b["mask"], "batch embed")})):
        (total, metrics), grads = f(P, batch)
        assert total == 0 and not any(g.any() for g in leaves(grads)) and not any(v for v in metrics["terms"].values())


def test_a_number_is_the_weight_of_the_whole_batch():
    def loss(p, batch, ctx):
        return {"t": Term(items(p, batch["x"]), "batch embed")}, None

    for w in (Weight(10.0, coefficient=3.0), Weight(torch.tensor(10), "", 3.0)):
        (total, _), grads = accumulate(loss, 2, weights=lambda b, w=w: {"t": w})(P, BATCH)
        close((total, grads), value_and_grad(lambda p: items(p, X).sum() * 0.3)(P))
        assert accumulate(loss, weights=lambda b: {"t": Weight(0.0)})(P, BATCH)[0][0] == 0


def test_stats_are_summed_over_microbatches():
    def loss(p, batch, ctx):
        stats = {
            "load": Term(batch["mask"], "batch embed -> embed"),
            "seen": torch.tensor(len(batch["x"])),
            "name": "x",
        }
        return Term(items(p, batch["x"]), "batch embed", weight=torch.ones_like(batch["x"])), stats

    (_, metrics), _ = accumulate(loss, 3)(P, BATCH)
    stats = metrics["stats"]
    assert stats["load"].tolist() == [3, 3, 3] and stats["seen"] == 5 and stats["name"] == "x"
    assert not any(t.requires_grad for t in leaves(metrics) if isinstance(t, torch.Tensor))


def test_random_masks_do_not_depend_on_the_cut():
    """Dropout draws by the global index of a row, in stack and remat too."""

    def drop(x, ctx):
        rows = len(BATCH["x"])
        return x * (uniform(ctx.key, (rows, 3), index=(ctx.rows, None), dtype=T) < 0.5)

    def layer(p, x, ctx):
        return drop((x * p["a"]).sin() + p["b"], ctx)

    def loss(p, batch, ctx):
        x = stack(layer, save=nothing)({0: p, 1: p}, batch["x"], ctx)
        return Term(x, "batch embed", weight=torch.ones_like(x)), {"kept": (x != 0).sum()}

    ctx = Ctx(key=key(3))
    want = accumulate(loss, 1)(P, BATCH, ctx)
    x = X
    for i in range(2):
        keep = uniform(fold_in(key(3), i), (5, 3), dtype=T) < 0.5
        x = ((x * P["a"]).sin() + P["b"]) * keep
    close(want[0][0], x.mean())
    assert 0 < want[0][1]["stats"]["kept"] < 15
    for n in (2, 5):
        got = accumulate(loss, n)(P, BATCH, ctx)
        close((got[0][0], got[1]), (want[0][0], want[1]))
        assert got[0][1]["stats"]["kept"] == want[0][1]["stats"]["kept"]


def test_gradients_are_accumulated_in_float32_or_wider():
    """Eight equal gradients of 1 + 2^-7 add up to more digits than bfloat16 has."""
    p = {"w": torch.ones(1, dtype=torch.bfloat16), "v": torch.ones(1, dtype=T)}
    x = torch.full((8, 1), 1 + 2**-7)

    def loss(p, batch, ctx):
        return Term(p["w"].float() * batch + p["v"].float(), "batch embed"), None

    one = {"loss": Weight(1.0)}
    for n in (1, 8):
        _, grads = accumulate(loss, n, weights=lambda b: one)(p, x)
        assert grads["w"].dtype == torch.float32 and grads["v"].dtype == T
        if n == 8:
            assert grads["w"].item() == 8 * (1 + 2**-7)
    _, grads = accumulate(loss, 8, weights=lambda b: one, dtype=torch.bfloat16)(p, x)
    assert grads["w"].dtype == torch.bfloat16


def test_parameters_entered_once():
    """Gathered before the first microbatch, gradients reduced behind the last one."""
    calls = []

    def enter(p):
        calls.append("enter")
        return tree_map(lambda t: torch.cat([t, t]), p)

    def leave(g):
        calls.append("leave")
        return tree_map(lambda t: t[:3] + t[3:], g)

    def loss(p, batch, ctx):
        return Term(
            items({"a": p["a"][1:4], "b": p["a"][5]}, batch["x"]), "batch embed", weight=torch.ones_like(batch["x"])
        ), None

    got = accumulate(loss, 5, enter=enter, leave=leave)({"a": P["a"]}, BATCH)
    want = value_and_grad(lambda p: items({"a": torch.cat([p["a"][1:], p["a"][:1]]), "b": p["a"][2]}, X).mean())(
        {"a": P["a"]}
    )
    close((got[0][0], got[1]), want)
    assert calls == ["enter", "leave"]


def test_the_state_of_leaves_is_left_alone():
    p = tree_map(torch.clone, P)
    accumulate(simple, 2)(p, BATCH)
    value_and_grad(mean)(p)
    assert not any(t.requires_grad or t.grad is not None for t in leaves(p))
    first, second = accumulate(simple, 2)(p, BATCH), accumulate(simple, 2)(p, BATCH)
    assert all(torch.equal(a, b) for a, b in zip(leaves(first[1]), leaves(second[1]), strict=True))


@pytest.mark.parametrize(
    "run", [lambda f, **k: accumulate(f, 2, **k)(P, BATCH)[1], lambda f, **k: value_and_grad(mean, **k)(P)[1]]
)
def test_frozen_and_integer_leaves(run):
    want = value_and_grad(mean)(P)[1]
    for trainable in ({"a": True, "b": False}, lambda path: path == "a"):
        grads = run(simple, trainable=trainable)
        assert grads["b"] is None
        close(grads["a"], want["a"])
    with pytest.raises(UserError, match="trainable"):
        run(simple, trainable={"a": True})
    grads = value_and_grad(lambda p: mean(p) * p["n"][1])({**P, "n": torch.arange(2), "none": None})[1]
    assert grads["n"] is None and grads["none"] is None
    close(grads["a"], want["a"])


def test_value_and_grad_of_unused_leaves_constants_and_aux():
    value, grads = value_and_grad(lambda p: torch.tensor(2.0))(P)
    assert value == 2 and not any(g.any() for g in leaves(grads))
    (value, aux), grads = value_and_grad(lambda p, x: (p["b"] * x, {"twice": p["b"] * 2, "text": "t"}), has_aux=True)(
        P, 3.0
    )
    assert value == 1.5 and aux["twice"] == 1 and aux["text"] == "t" and not aux["twice"].requires_grad
    assert grads["b"] == 3 and not grads["a"].any()
    want = torch.func.grad_and_value(lambda p: mean(p))(P)
    close(value_and_grad(mean)(P), want[::-1])


# What is refused


def test_a_value_that_is_no_scalar():
    for f in (lambda p: p["a"], lambda p: 1.0, lambda p: p["a"].long().sum()):
        with pytest.raises(UserError, match="0-d floating-point"):
            value_and_grad(f)(P)


def test_batches_that_cannot_be_cut():
    with pytest.raises(UserError, match="microbatches=6 .* holds 5"):
        accumulate(simple, 6)(P, BATCH)
    with pytest.raises(UserError, match="microbatches=0"):
        accumulate(simple, 0)
    with pytest.raises(UserError, match="mask: 4"):
        accumulate(simple, 2)(P, {**BATCH, "mask": MASK[:4]})


def test_terms_that_disagree_with_their_weights():
    def two(p, batch, ctx):
        t = Term(items(p, batch["x"]), "batch embed")
        return {"one": t, "two": t}, None

    with pytest.raises(UserError, match="needs weights="):
        accumulate(two)(P, BATCH)
    with pytest.raises(UserError, match="has the terms one, two, but .* gives one"):
        accumulate(two, weights=lambda b: {"one": Weight(1.0)})(P, BATCH)
    with pytest.raises(UserError, match="must return"):
        accumulate(lambda p, b, ctx: (p["b"], None))(P, BATCH)
