"""Narrow moments of Adam: they learn as float32's do, and those that would need scales are refused."""

import pytest
import torch

from fmegatron.errors import UserError
from fmegatron.optim import adafactor, adam, adamw, lion, with_stochastic_rounding

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


def test_two_hundred_steps_with_moments_in_bfloat16_end_where_those_in_float32_do():
    want, narrow = learned(adamw(0.01)), adamw(0.01, moments=torch.bfloat16)
    assert want < 0.2 * float(Y.square().mean())
    for optimizer in (narrow, with_stochastic_rounding(narrow, 0)):
        assert 0 < abs(learned(optimizer) / want - 1) < 0.03


@pytest.mark.parametrize("make", [adamw, adam, lion, adafactor])
def test_moments_in_fp8_are_refused(make):
    with pytest.raises(UserError, match="float8_e4m3fn would need scales, .* use torch.bfloat16"):
        make(moments=torch.float8_e4m3fn) if make is adafactor else make(0.1, moments=torch.float8_e4m3fn)
