"""Stochastic rounding to bfloat16: its distribution, and that layouts, pieces and resumed runs round alike."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from fmegatron import random, tree
from fmegatron.errors import UserError
from fmegatron.optim import (
    Optimizer,
    adafactor,
    adam,
    adamw,
    apply,
    chain,
    clip_by_global_norm,
    ema,
    ema_params,
    lion,
    muon,
    partition,
    rounding,
    sgd,
    with_master,
    with_stochastic_rounding,
)
from fmegatron.optim.moments import FLOAT8
from fmegatron.optim.rounding import stochastic
from fmegatron.simulation import simulate
from tests.optim_trees import Count, cloned, made, ours, placed, same, same_on_ranks, simulated_mesh

SHAPES = {"a": (6, 10), "layers": {0: {"q": (4, 3, 8), "norm": (16,)}}, "scale": ()}
R, S = Replicate(), Shard


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def bits(seed, n):
    return random.bits(random.key(seed), (n,))


# One rounding


@pytest.mark.parametrize("value", [1.001, 1.00390625, 3.14159, -2.7182818, 1e-30, -6.5e37, 1e-40])
def test_unbiased_between_two_neighbours(value):
    """Up with the probability of the distance from below, exactly in 1/65536ths; here to five deviations."""
    n = 1 << 18
    x = torch.full((n,), value)
    got = stochastic(x, bits(7, n))
    low, high = sorted(set(got.tolist()))
    step = high - low
    assert low <= x[0].item() <= high
    nearest = x[0].bfloat16().item()
    assert nearest in (low, high) and step == pytest.approx(2.0 ** (max(torch.frexp(x[0]).exponent.item(), -125) - 8))
    part = (x[0].double().item() - low) / step
    mean = ((got.double() - low) / step).mean().item()
    assert abs(mean - part) < 5 * (part * (1 - part) / n) ** 0.5 + 2.0**-16


def test_probabilities_are_exact():
    """All 65536 draws of 16 bits once: the mean is the value."""
    every = torch.arange(1 << 16) << 16
    for value in (1.001, -0.3, 7.77e5):
        x = torch.full((1 << 16,), value)
        assert stochastic(x, every).double().mean().item() == x[0].double().item()


def test_values_that_stay():
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.5, 2.0**-133])
    for seed in range(50):
        got = stochastic(odd, bits(seed, 8))
        assert torch.equal(got.view(torch.int16)[1:], odd.bfloat16().view(torch.int16)[1:]) and got[0].isnan()


# An optimizer that rounds


def half(seed):
    return made(seed, torch.bfloat16, SHAPES)


def test_small_updates_are_kept_on_average():
    """400 steps of 1e-5 below 1, where bfloat16 has steps of 2^-8 = 4e-3: rounding to nearest loses all of them."""
    n = 20_000
    params, grads = {"p": torch.ones(n).bfloat16()}, {"p": torch.ones(n).bfloat16()}
    lost, _ = ours(sgd(1e-5), params, [grads] * 3)
    assert torch.equal(lost["p"], params["p"])
    optimizer = with_stochastic_rounding(sgd(1e-5), 0)
    state = optimizer.init(params)
    for _ in range(400):
        params, _, state = optimizer.update(params, grads, state, donate=True)
    fallen = 1 - params["p"].double().mean().item()
    assert abs(fallen - 4e-3) < 5 * (4e-3 * 2**-8 / n) ** 0.5
    assert params["p"].float().unique().numel() > 2


def test_bfloat16_moments_follow_on_average():
    """A mean square that moves by a thousandth a step stands still in bfloat16, but not with stochastic rounding."""
    n = 20_000
    params, grads = {"p": torch.zeros(n).bfloat16()}, {"p": torch.full((n,), 1.0).bfloat16()}
    options = {"betas": (0.9, 0.999), "moments": torch.bfloat16}
    for optimizer, follows in (
        (adam(0.0, **options), False),
        (with_stochastic_rounding(adam(0.0, **options), 0), True),
    ):
        state = optimizer.init(params)
        state["v"]["p"].fill_(0.5)
        for _ in range(100):
            _, _, state = optimizer.update(params, grads, state, donate=True)
        want = 1 - 0.5 * 0.999**100
        assert (abs(state["v"]["p"].double().mean().item() - want) < 2e-3) == follows


MAKES = {
    "sgd": lambda: sgd(2.0**-9),
    "adamw": lambda: adamw(1e-3),
    "adam": lambda: adam(1e-3, moments=torch.bfloat16),
    "lion": lambda: lion(1e-3, moments=torch.bfloat16),
    "adafactor": lambda: adafactor(1e-3, beta1=0.9, moments=torch.bfloat16),
    "chain": lambda: chain(clip_by_global_norm(1.0), adamw(1e-3), ema(0.9)),
    "partition": lambda: partition(
        lambda p: tree.tree_map(lambda x: "muon" if x.ndim == 2 else "rest", p),
        {"muon": muon(1e-3, moments=torch.bfloat16), "rest": adamw(1e-3, moments=FLOAT8)},
    ),
}
each_make = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


@each_make
@pytest.mark.parametrize("piece", [1 << 24, 16])
def test_donation_pieces_and_resumption_are_bitwise(make, piece, monkeypatch):
    params, gradients = half(0), [half(i) for i in range(1, 5)]
    optimizer = with_stochastic_rounding(make(), 3)
    want = ours(optimizer, params, gradients)
    assert want[1]["rounded"] == 4
    monkeypatch.setattr(apply, "PIECE", piece)
    same(ours(optimizer, params, gradients, donate=True), want)
    p, state = ours(optimizer, params, gradients[:2])
    again = with_stochastic_rounding(make(), 3)  # as a program that starts anew from the checkpoint
    p, state = cloned(p), cloned(state)
    for grads in gradients[2:]:
        p, _, state = again.update(p, grads, state)
    same((p, state), want)
    other, _ = ours(with_stochastic_rounding(make(), 4), params, gradients)
    assert any(not torch.equal(x, y) for x, y in zip(tree.leaves(other), tree.leaves(want[0]), strict=True))


@each_make
def test_rounds_what_the_wide_update_computes(make):
    """One update of the same parameters in float32 gives the values between whose neighbours each is rounded."""
    params, grads = half(0), half(1)
    wide, state = ours(make(), tree.tree_map(lambda x: x.float(), params), [grads])
    seen = []
    for seed in range(40):
        got, mine = ours(with_stochastic_rounding(make(), seed), params, [grads])
        seen.append(got)
        assert all(x.dtype == torch.bfloat16 for x in tree.leaves(got))
    for path, x in tree.named(wide).items():
        values = torch.stack([tree.named(s)[path] for s in seen]).double()
        ulp = 2.0 ** (torch.frexp(x).exponent.double() - 8)
        assert ((values - x).abs() <= ulp * 1.01).all(), path
        assert ((values.mean(0) - x).abs() <= ulp * 0.5).all(), path
    if "ema" in mine:  # the average is of the rounded weights
        assert tree.leaves(ema_params(mine))[0].dtype == torch.float32


LAYOUTS = {
    "one axis": {"a": (R, R, S(1)), "layers": {0: {"q": (S(2), R, R), "norm": (R, S(0), R)}}, "scale": (R, R, R)},
    "two axes": {"a": (S(0), R, S(1)), "layers": {0: {"q": (S(2), S(0), R), "norm": (S(0), S(0), R)}}, "scale": (R, R, R)},
    "one dim": {"a": (R, R, S(0)), "layers": {0: {"q": (S(2), S(2), S(2)), "norm": (S(0), S(0), S(0))}},
                "scale": (R, R, R)},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_layout_rounds_alike(layout):
    """Bitwise, for updates that float32 computes exactly."""
    params, gradients = half(0), [half(i) for i in range(1, 4)]
    optimizer = with_stochastic_rounding(sgd(2.0**-9), 11)
    want, _ = ours(optimizer, params, gradients)
    plain, _ = ours(sgd(2.0**-9), params, gradients)
    assert not torch.equal(want["a"], plain["a"])
    with simulate(8):
        mesh = simulated_mesh(2, 2, 2)
        p = placed(params, mesh, layout)
        s = optimizer.init(p)
        for grads in gradients:
            p, _, s = optimizer.update(p, placed(grads, mesh, layout), s, donate=True)
        same_on_ranks(p, placed(want, mesh, layout))


@pytest.mark.parametrize(
    ("shape", "held"),
    [
        ((6, 10), {}),
        ((6, 10), {0: [1, 3, 5]}),
        ((6, 10), {1: [2, 4, 7, 9]}),
        ((1 << 17, 1 << 17), {0: [1, 70_000], 1: [2, 4, 131_000]}),
        ((3, 6, 2, 10, 5), {1: [2, 3], 2: [1]}),
        ((3, 6, 2, 10, 5), {4: [0, 4]}),
    ],
)
def test_pieces_round_by_global_position(shape, held, monkeypatch):
    """Pieces of a shard have the bits of their places in the whole, for leaves of more than 2^32 elements too."""
    index = [torch.tensor(held[d]) if d in held else None for d in range(len(shape))]
    monkeypatch.setattr(rounding, "positions_of", lambda leaf: index)
    rule, leaf = rounding.Rounding(random.key(5)), torch.empty(shape, device="meta")
    key = random.fold_in(random.key(5), "a")
    want = random.bits(key, shape, index=index)
    x = torch.randn(want.shape)
    whole, parts = torch.empty_like(x).bfloat16(), torch.empty_like(x).bfloat16().view(-1)
    rule.store(whole, x, leaf, "a")
    for at in range(0, x.numel(), 7):
        rule.store(parts[at : at + 7], x.view(-1)[at : at + 7], leaf, "a", at)
    assert torch.equal(whole, stochastic(x, want)) and torch.equal(parts, whole.view(-1))


def test_donation_makes_no_temporaries(monkeypatch):
    monkeypatch.setattr(apply, "PIECE", 64)
    optimizer = with_stochastic_rounding(adamw(0.02, moments=torch.bfloat16), 0)
    params = {"a": torch.randn(40, 50).bfloat16(), "b": torch.randn(64).bfloat16()}
    state, grads = optimizer.init(params), tree.tree_map(torch.randn_like, params)
    with Count() as count:
        optimizer.update(params, grads, state, donate=True)
    assert count.largest <= 64


def test_by_vmap():
    optimizer = with_stochastic_rounding(adamw(1e-3), 0)

    def one(p):
        return optimizer.update([p], [p.float().sin()], optimizer.init([p]))[0][0]

    x = torch.randn(3, 50).bfloat16()
    got = torch.func.vmap(one)(x)
    want = torch.stack([one(row) for row in x])
    assert got.dtype == torch.bfloat16 and (got == want).float().mean() > 0.98  # float32 may differ in the last bit
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=0)


def test_other_dtypes_are_rounded_to_nearest():
    params = {"wide": torch.randn(4), "half": torch.randn(4).half(), "brain": torch.randn(4).bfloat16()}
    grads = tree.tree_map(torch.randn_like, params)
    want, _ = ours(adamw(0.01), params, [grads])
    got, _ = ours(with_stochastic_rounding(adamw(0.01), 0), params, [grads])
    assert torch.equal(got["wide"], want["wide"]) and torch.equal(got["half"], want["half"])


def test_what_cannot_round_is_refused():
    user = Optimizer(lambda p: {}, lambda p, g, s, *, donate=False, grad_norm=None: (p, g, s), "mine")
    for optimizer in (user, with_master(adamw(0.1)), chain(clip_by_global_norm(1.0), user)):
        with pytest.raises(UserError, match="with_stochastic_rounding cannot reach"):
            with_stochastic_rounding(optimizer, 0)
    got, _ = ours(with_stochastic_rounding(chain(user, sgd(0.1)), 0), half(0), [half(1)])  # beside one that can
    assert got["a"].dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compile", [False, True])
def test_cuda_rounds_as_the_cpu(compile):
    params, gradients = half(0), [half(i) for i in range(1, 4)]
    optimizer = with_stochastic_rounding(sgd(2.0**-9), 11, compile=compile)
    want, _ = ours(optimizer, params, gradients)
    there = lambda t: tree.tree_map(lambda x: x.cuda(), t)  # noqa: E731
    got, _ = ours(optimizer, there(params), [there(g) for g in gradients], donate=True)
    same(tree.tree_map(lambda x: x.cpu(), got), want)
