"""The primitives that work position by position: against torch, transformers and closed forms."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

from fmegatron import random
from fmegatron.errors import UserError
from fmegatron.mesh import make_mesh
from fmegatron.primitives import (
    Llama3Scaling,
    apply_rotary,
    dropout,
    embedding,
    grouped,
    rms_norm,
    rotary,
    rotary_table,
    swiglu,
)
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def randn(*shape, dtype=DOUBLE):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def differentiable_twice(f, *args):
    return gradcheck(f, args) and gradgradcheck(f, args)


def gradients(y, inputs, g=None):
    return torch.autograd.grad(y, inputs, torch.ones_like(y) if g is None else g)


def saved_bytes(f):
    """Bytes that the graph of f() keeps for backward, each storage once, inputs included."""
    kept = {}

    def pack(t):
        kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = f()
    return sum(kept.values()), y


def third_derivatives(f, args):
    """Gradients of a function of gradients of a function of gradients."""
    value = (f(*args) ** 4).sum()
    for _ in range(3):
        grads = torch.autograd.grad(value, args, create_graph=True)
        value = sum((g**2).sum() for g in grads)
    return grads


# rms_norm


def test_rms_norm_equals_torch():
    x, w, g = randn(2, 3, 7), randn(7), torch.randn(2, 3, 7, dtype=DOUBLE)
    ours, theirs = rms_norm(x, w, eps=1e-5), functional.rms_norm(x, (7,), w, 1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(gradients(ours, (x, w), g), gradients(theirs, (x, w), g), rtol=1e-13, atol=1e-13)
    assert differentiable_twice(lambda x, w: rms_norm(x, w, eps=1e-5), x, w)
    assert differentiable_twice(lambda x: rms_norm(x, w.detach()), randn(7))  # without leading dims


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_transformers_in_every_precision(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = LlamaRMSNorm(48, eps=1e-6).to(dtype)
    theirs.weight.data.normal_(1.0, 0.3)
    x = (torch.randn(5, 3, 48) * 3).to(dtype).requires_grad_()
    torch.testing.assert_close(
        rms_norm(x, theirs.weight), theirs(x), rtol=1e-6 if dtype == torch.float32 else 0, atol=0
    )
    g = torch.randn(5, 3, 48).to(dtype)
    ours = gradients(rms_norm(x, theirs.weight), (x, theirs.weight), g)
    # the exact gradient of the rounded arguments
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, theirs.weight))
    exact = gradients(functional.rms_norm(x64, (48,), w64, 1e-6), (x64, w64), g.double())
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() < (1e-6 if dtype == torch.float32 else 4e-3) * b.norm()


def test_rms_norm_of_zeros_is_finite():
    x = torch.zeros(2, 4, dtype=DOUBLE, requires_grad=True)
    g = gradients(rms_norm(x, torch.ones(4, dtype=DOUBLE)), x)[0]
    torch.testing.assert_close(g, torch.full((2, 4), 1e3, dtype=DOUBLE))  # 1 / sqrt(eps)


def test_rms_norm_keeps_x_and_a_number_per_row():
    x = torch.randn(64, 256).to(torch.bfloat16).requires_grad_()
    w = torch.ones(256, dtype=torch.bfloat16, requires_grad=True)
    size, _ = saved_bytes(lambda: rms_norm(x, w))
    assert size == 64 * 256 * 2 + 256 * 2 + 64 * 4


# swiglu


def test_swiglu():
    gate, up, g = randn(3, 5), randn(3, 5), torch.randn(3, 5, dtype=DOUBLE)
    ours, theirs = swiglu(gate, up), functional.silu(gate) * up
    torch.testing.assert_close(ours, theirs, rtol=1e-15, atol=0)
    torch.testing.assert_close(gradients(ours, (gate, up), g), gradients(theirs, (gate, up), g), rtol=1e-14, atol=1e-15)
    assert differentiable_twice(swiglu, gate, up)
    size, _ = saved_bytes(lambda: swiglu(gate, up))
    assert size == 2 * 3 * 5 * 8


# rotary


def hugging_face_rotary(config, positions):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=64, **config)
    return LlamaRotaryEmbedding(config)(torch.zeros(1), positions)


SCALED = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 = dict(rope_type="llama3", original_max_position_embeddings=32, rope_theta=500.0, **SCALED)


@pytest.mark.parametrize(
    "config, scaling",
    [
        (dict(rope_parameters=dict(rope_type="default", rope_theta=500.0)), None),
        (dict(rope_parameters=LLAMA3), Llama3Scaling(original_max_position=32, **SCALED)),
    ],
)
def test_rotary_is_transformers(config, scaling):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    positions = torch.randint(60, (2, 9))
    cos, sin = hugging_face_rotary(config, positions)
    x = torch.randn(2, 9, 3, 2, 16)
    theirs = apply_rotary_pos_emb(x.flatten(2, 3), x.flatten(2, 3), cos, sin, unsqueeze_dim=2)[0].unflatten(2, (3, 2))
    ours = rotary(x, positions, base=500.0, scaling=scaling)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    table = rotary_table(positions, 16, base=500.0, scaling=scaling)
    torch.testing.assert_close(apply_rotary(x, *table), ours, rtol=0, atol=0)
    torch.testing.assert_close(table[0], cos[..., :8], rtol=1e-6, atol=1e-5)
    one_row = rotary(x[:1], positions[0], base=500.0, scaling=scaling)
    torch.testing.assert_close(one_row, ours[:1], rtol=0, atol=0)


def test_rotary_is_a_rotation_by_position():
    x, positions = torch.randn(1, 4, 6, dtype=DOUBLE), torch.tensor([0, 1, 5, 7])
    y = rotary(x, positions, base=100.0)
    a, b = torch.complex(x[..., :3], x[..., 3:]), torch.complex(y[..., :3], y[..., 3:])
    angle = positions[:, None] * 100.0 ** (-torch.arange(3, dtype=DOUBLE) / 3)
    torch.testing.assert_close(b, a * torch.exp(1j * angle), rtol=1e-14, atol=1e-14)


def test_rotary_derivatives_partial_and_dtypes():
    positions = torch.tensor([[3, 0, 5], [1, 2, 9]])
    assert differentiable_twice(lambda x: rotary(x, positions, base=7.0, dim=4) ** 2, randn(2, 3, 2, 5))
    x = torch.randn(2, 3, 2, 8, dtype=torch.bfloat16)
    assert torch.equal(rotary(x, positions, dim=4)[..., 4:], x[..., 4:])
    exact = rotary(x.double(), positions)
    assert rotary(x, positions).dtype == torch.bfloat16
    torch.testing.assert_close(rotary(x, positions), exact.to(torch.bfloat16), rtol=2**-8, atol=2**-12)
    with pytest.raises(ValueError, match="dim=5"):
        rotary_table(positions, 5)


def test_rotary_keeps_the_table_alone():
    x = torch.randn(8, 16, 4, 1, 32, requires_grad=True)
    cos, sin = rotary_table(torch.arange(16), 32)
    size, _ = saved_bytes(lambda: apply_rotary(x, cos, sin))
    assert size == 2 * 16 * 16 * 4


# embedding


def test_embedding_equals_torch():
    table, tokens, g = randn(11, 5), torch.randint(11, (2, 7)), torch.randn(2, 7, 5, dtype=DOUBLE)
    ours, theirs = embedding(table, tokens), functional.embedding(tokens, table)
    assert torch.equal(ours, theirs)
    assert torch.equal(gradients(ours, table, g)[0], gradients(theirs, table, g)[0])
    assert differentiable_twice(lambda t: embedding(t, tokens) ** 3, table)


def test_embedding_takes_its_part_of_the_stream():
    """Where no axis holds the vocabulary too."""
    table, tokens = torch.randn(11, 5, dtype=DOUBLE), torch.randint(11, (2, 8))
    exact = table.clone().requires_grad_()
    (want,) = gradients(functional.embedding(tokens, exact) ** 3, exact)
    with simulate(2):
        rules = Rules({"batch": None, "seq": None, "seq*": "tp", "vocab": None, "embed": None})
        sh = Sharding(make_mesh("tp=2", device="cpu"), rules)
        held = table.clone().requires_grad_()
        y = embedding(held, tokens, sh=sh)
        assert y.shape == (2, 4, 5)
        (got,) = gradients(sh.sum(y**3, "batch seq* embed ->"), held)
        for part in per_rank(got):
            torch.testing.assert_close(part, want, rtol=1e-14, atol=1e-14)


def test_embedding_sums_a_bf16_gradient_in_fp32():
    table = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    y = embedding(table, torch.zeros(1, 1000, dtype=torch.int64))
    assert gradients(y, table)[0][0].item() == 1000  # one by one in bf16: 256


# dropout


def test_dropout_is_a_function_of_the_key():
    x, key = torch.randn(4, 50, 60, dtype=DOUBLE, requires_grad=True), random.key(1)
    y = dropout(x, 0.25, key)
    assert torch.equal(y, dropout(x, 0.25, random.to_tensor(key)))
    kept = y != 0
    assert not torch.equal(kept, dropout(x, 0.25, random.key(2)) != 0)
    assert abs(kept.double().mean().item() - 0.75) < 4 * (0.25 * 0.75 / x.numel()) ** 0.5
    torch.testing.assert_close(y[kept], x[kept] / 0.75, rtol=1e-15, atol=0)
    assert torch.equal(gradients(y, x)[0], kept.to(DOUBLE) / 0.75)


def test_dropout_of_rows_is_that_of_the_whole():
    x, key = torch.randn(6, 5, 4), random.key(1)
    whole, rows = dropout(x, 0.5, key), torch.tensor([4, 1])
    assert torch.equal(dropout(x[rows], 0.5, key, rows=rows), whole[rows])
    assert torch.equal(dropout(x, 0.5, key, rows=torch.arange(6)), whole)


def test_dropout_keeps_nothing_and_may_do_nothing():
    x, key = torch.randn(4, 50, 60, requires_grad=True), random.key(1)
    assert saved_bytes(lambda: dropout(x, 0.5, key))[0] == 0
    assert saved_bytes(lambda: dropout(x, 0.5, random.to_tensor(key)))[0] == 16
    assert dropout(x, 0.0, key) is x and dropout(x, 0.5, None) is x
    assert differentiable_twice(lambda x: dropout(x, 0.5, key) ** 3, randn(2, 3, 2))
    with pytest.raises(UserError, match="rate=1"):
        dropout(x, 1.0, key)
    with pytest.raises(UserError, match="names 2 dims"):
        dropout(x, 0.5, key, dims="batch embed")


def test_an_operator_that_is_not_within_an_autograd_function_says_that_it_has_no_gradient():
    assert grouped.products  # whose module makes the operator
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(2, 3, 5)
    y = torch.ops.fmegatron.grouped_products(x, w, torch.tensor([1, 4]))
    assert y.shape == (4, 5)
    with pytest.raises(RuntimeError, match="grouped_products has no gradient"):
        y.sum().backward()
