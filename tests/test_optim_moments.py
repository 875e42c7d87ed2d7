"""Narrow moments of Adam: they learn as float32's do, also in a byte each; what a byte holds; and what is refused."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from fmegatron.errors import UserError
from fmegatron.optim import adafactor, adam, adamw, lion, muon, sgd, with_stochastic_rounding
from fmegatron.optim.moments import FLOAT8, RATIO, ROOT, Bytes
from fmegatron.simulation import simulate
from tests.optim_trees import made, ours, placed, same_on_ranks, simulated_mesh

G = torch.Generator().manual_seed(0)
X, TRUE = torch.randn(64, 16, generator=G), torch.randn(16, 8, generator=G)
Y = torch.tanh(X @ TRUE) + 0.1 * torch.randn(64, 8, generator=G)


def loss(params):
    return (torch.tanh(X @ params["a"]) @ params["b"] - Y).square().mean()


def learned(optimizer):
    g = torch.Generator().manual_seed(1)
    params = {"a": torch.randn(16, 12, generator=g) / 4, "b": torch.randn(12, 8, generator=g) / 4}
    state = optimizer.init(params)
    for _ in range(200):
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        grads = dict(zip(leaves, torch.autograd.grad(loss(leaves), list(leaves.values())), strict=True))
        params, _, state = optimizer.update(params, grads, state)
    return float(loss(params))


def test_two_hundred_steps_with_narrow_moments_end_where_those_in_float32_do():
    def rate(n):
        return 0.01 * (1 - n / 200)  # constant, a byte's rounding would stay visible in a loss without noise

    want, narrow = learned(adamw(rate)), adamw(rate, moments=torch.bfloat16)
    assert want < 0.2 * float(Y.square().mean())
    for optimizer in (narrow, with_stochastic_rounding(narrow, 0)):
        assert 0 < abs(learned(optimizer) / want - 1) < 0.03
    assert 0 < abs(learned(adamw(rate, moments=FLOAT8)) / want - 1) < 0.1  # rounded to nearest 0.6


def test_numbers_of_a_byte():
    """Of each form all are kept, and others go to one of their two neighbours, in such shares that the mean is right."""
    for form, ratio in ((ROOT, 1.2), (RATIO, 1.125)):
        code = torch.arange(form.codes + 1, dtype=torch.int32)
        held = form.decoded(code)
        for up in (0, form.step // 2, form.step - 1):
            assert torch.equal(form.encoded(held, up), code)
        assert held[0] == 0 and (held[2:] / held[1:-1] <= ratio).all() and (held[2:] > held[1:-1]).all()
        assert form.range() == (held[1], held[-1]) and held[-1] < form.encoded(torch.tensor([1e30]), 0) * torch.inf
        x = torch.tensor([0.013])
        ups = [Bytes.of_step(n).up[form is RATIO] for n in range(1000)]
        mean = torch.cat([form.decoded(form.encoded(x, up)) for up in ups]).mean()
        assert mean == pytest.approx(0.013, rel=2e-3)


@pytest.mark.parametrize("make", [adamw, adam])
def test_each_update_is_that_of_torch_from_the_moments_held(make):
    """And the new moments are those of torch up to one step of the format: of the root to a neighbour at 1.2 times it, of the
    ratio to one at 1.125 times it, or from the smallest one to 0."""
    shapes = {"a": (40, 30), "b": (7,)}
    params, optimizer = made(0, shapes=shapes), make(1e-2, weight_decay=0.1, betas=(0.9, 0.95), moments=FLOAT8)
    state = optimizer.init(params)
    peer = {n: torch.nn.Parameter(p.clone()) for n, p in params.items()}
    cls = torch.optim.AdamW if make is adamw else torch.optim.Adam
    theirs = cls(peer.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for n in range(6):
        grads = {k: g * 10.0 ** -torch.arange(g.shape[-1]).div(4) for k, g in made(n + 1, shapes=shapes).items()}
        for k, p in peer.items():
            p.grad = grads[k]
            if n:
                with torch.no_grad():
                    p.copy_(params[k])
                m, v = Bytes.of_step(n).decoded(state["m"][k], state["v"][k])
                theirs.state[p] |= {"exp_avg": m, "exp_avg_sq": v}
        params, _, state = optimizer.update(params, grads, state)
        theirs.step()
        for k, p in peer.items():
            torch.testing.assert_close(params[k], p.detach(), rtol=1e-5, atol=1e-6)
            assert state["m"][k].dtype == state["v"][k].dtype == torch.uint8
            m, v = Bytes.of_step(n).decoded(state["m"][k], state["v"][k])
            want = theirs.state[p]["exp_avg"], theirs.state[p]["exp_avg_sq"]
            root = (v / want[1]).sqrt()
            assert (root > 1 / 1.2001).all() and (root < 1.2001).all()
            assert ((m - want[0]).abs() <= 0.12501 * want[0].abs() + RATIO.range()[0] * v.sqrt()).all()
            assert (m * want[0] >= 0).all()


def test_moments_in_bytes_decay_where_the_gradient_stays_away():
    """By e^-4 in 200 steps, each of which takes less off a root than half of the distance to the next number."""
    params, gradients = {"a": torch.zeros(64)}, [{"a": torch.logspace(-4, 2, 64)}, *[{"a": torch.zeros(64)}] * 200]
    _, found = ours(adamw(1e-3, betas=(0.98, 0.98), moments=FLOAT8), params, gradients)
    _, want = ours(adamw(1e-3, betas=(0.98, 0.98)), params, gradients)
    m, v = Bytes.of_step(0).decoded(found["m"]["a"], found["v"]["a"])
    assert (v / want["v"]["a"]).log().abs().max() < 1 and (m / want["m"]["a"]).log().abs().max() < 1


R, S = Replicate(), Shard
LAYOUT = {"embed": (S(1), S(0), R), "layers": {i: {"q": (S(2), S(0), S(0)), "norm": (S(0), R, S(0))} for i in (0, 1)},
          "scale": (R, R, R)}  # fmt: skip


def test_any_layout_holds_the_bytes_of_one_device():
    params, gradients = made(0), [made(i) for i in range(1, 5)]
    optimizer = adamw(1e-2, moments=FLOAT8)
    want, held = ours(optimizer, params, gradients)
    with simulate(8):
        mesh = simulated_mesh(2, 2, 2)
        p = placed(params, mesh, LAYOUT)
        s = optimizer.init(p)
        for grads in gradients:
            p, _, s = optimizer.update(p, placed(grads, mesh, LAYOUT), s, donate=True)
        same_on_ranks(p, placed(want, mesh, LAYOUT))
        for name in ("m", "v"):
            same_on_ranks(s[name], placed(held[name], mesh, LAYOUT))


def test_moments_that_are_refused():
    for make in (lion, sgd, muon, adafactor):
        with pytest.raises(UserError, match="float8_e4m3fn: use torch.bfloat16 .adamw and adam know float8"):
            make(moments=FLOAT8) if make is adafactor else make(0.1, moments=FLOAT8)
    for moments in (torch.float8_e5m2, (torch.bfloat16, FLOAT8)):
        with pytest.raises(UserError, match="adamw cannot keep moments=.*: use both moments in torch.float8_e4m3fn"):
            adamw(0.1, moments=moments)
