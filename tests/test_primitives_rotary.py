"""Rotary embedding: every published scaling and layout of pairs, against transformers."""

import types

import pytest
import torch

from fmegatron.errors import UserError
from fmegatron.primitives import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    ProportionalScaling,
    YaRNScaling,
    apply_rotary,
    rotary,
    rotary_table,
)
from tests.test_primitives import saved_bytes, third_derivatives
from tests.test_primitives_transforms import transforms

DOUBLE, HEAD, ORIGINAL = torch.float64, 32, 64
POSITIONS = torch.tensor([[0, 1, 3, 7, 50], [9, 2, 100, 63, 255]])


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


# scalings

SHORT, LONG = tuple(1 + 0.05 * i for i in range(16)), tuple(1 + 0.7 * i for i in range(16))
YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=ORIGINAL)
PHI = dict(rope_type="longrope", factor=4.0, short_factor=list(SHORT), long_factor=list(LONG))
PHI["original_max_position_embeddings"] = ORIGINAL
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3["original_max_position_embeddings"] = ORIGINAL
LONGROPE = LongRoPEScaling(SHORT, LONG, ORIGINAL, 4.0)
SCALINGS = {
    "linear": (dict(rope_type="linear", factor=2.5), LinearScaling(2.5), None),
    "dynamic, short": (dict(rope_type="dynamic", factor=2.0), DynamicNTKScaling(2.0, ORIGINAL), 40),
    "dynamic, long": (dict(rope_type="dynamic", factor=2.0), DynamicNTKScaling(2.0, ORIGINAL), 300),
    "yarn": (YARN, YaRNScaling(8.0, ORIGINAL), None),
    "yarn, deepseek": (
        YARN | dict(mscale=0.707, mscale_all_dim=1.3, beta_fast=20, beta_slow=2),
        YaRNScaling(8.0, ORIGINAL, beta_fast=20, beta_slow=2, mscale=0.707, mscale_all_dim=1.3),
        None,
    ),
    "yarn, gpt-oss": (YARN | dict(truncate=False), YaRNScaling(8.0, ORIGINAL, truncate=False), None),
    "yarn, factor given": (YARN | dict(attention_factor=1.7), YaRNScaling(8.0, ORIGINAL, attention_factor=1.7), None),
    "yarn, shrinking": (YARN | dict(factor=0.5), YaRNScaling(0.5, ORIGINAL), None),
    "yarn, both ends alike": (
        YARN | dict(beta_fast=1e-6, beta_slow=1e-7),
        YaRNScaling(8.0, ORIGINAL, beta_fast=1e-6, beta_slow=1e-7),
        None,
    ),
    "longrope, short": (PHI, LONGROPE, ORIGINAL),
    "longrope, long": (PHI, LONGROPE, ORIGINAL + 1),
    "longrope, factor given": (
        PHI | dict(attention_factor=1.1),
        LongRoPEScaling(SHORT, LONG, ORIGINAL, 4.0, 1.1),
        ORIGINAL + 1,
    ),
    "longrope, not longer": (PHI | dict(factor=1.0), LongRoPEScaling(SHORT, LONG, ORIGINAL, 1.0), 9),
    "llama3": (LLAMA3, Llama3Scaling(4.0, 1.0, 4.0, ORIGINAL), None),
    "proportional": (
        dict(rope_type="proportional", partial_rotary_factor=0.3, factor=2.0),
        ProportionalScaling(0.3, 2.0),
        None,
    ),
}


def config_of(parameters, base=500.0):
    from transformers import LlamaConfig

    parameters = dict(rope_theta=base) | parameters
    size = dict(hidden_size=4 * HEAD, num_attention_heads=4, head_dim=HEAD)
    return LlamaConfig(**size, max_position_embeddings=ORIGINAL, rope_parameters=parameters)


def transformers_frequencies(parameters, length, dtype, monkeypatch, base=500.0):
    """(frequencies, attention factor) of transformers, its fp32 replaced by another dtype."""
    from transformers import modeling_rope_utils

    class Torch(types.ModuleType):
        float, float32 = dtype, dtype

        def __getattr__(self, name):
            return getattr(torch, name)

    config = config_of(parameters, base)
    monkeypatch.setattr(modeling_rope_utils, "torch", Torch("torch"))
    return modeling_rope_utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None, seq_len=length)


@pytest.mark.parametrize("base", [500.0, 10000.0])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_transformers(name, dtype, base, monkeypatch):
    parameters, scaling, length = SCALINGS[name]
    theirs, factor = transformers_frequencies(parameters, length, dtype, monkeypatch, base)
    plain = 1.0 / base ** (torch.arange(0, HEAD, 2).to(dtype) / HEAD)
    ours, our_factor = scaling(plain, base=base, length=length)
    assert ours.dtype == dtype and abs(our_factor - factor) < 1e-15
    # (transformers' LongRoPE computes the exponents in fp32 whatever the dtype)
    loose = dtype == torch.float32 or "longrope" in name
    torch.testing.assert_close(ours, theirs.to(dtype), rtol=1e-6 if loose else 1e-14, atol=0)


@pytest.mark.parametrize("name", [n for n in SCALINGS if n != "proportional"])
def test_tables_are_transformers(name):
    """cos and sin, the attention factor multiplied in."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters, scaling, length = SCALINGS[name]
    length = length or 300
    positions = torch.arange(length)
    theirs = LlamaRotaryEmbedding(config_of(parameters))(torch.zeros(1), positions[None])
    ours = rotary_table(positions, HEAD, base=500.0, scaling=scaling, length=length)
    exact = rotary_table(positions, HEAD, base=500.0, scaling=scaling, length=length, dtype=DOUBLE)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        torch.testing.assert_close(a, b[0, :, : HEAD // 2], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(a.double(), c, rtol=1e-5, atol=1e-4)  # angles up to 300 in fp32


def test_scalings_refuse():
    with pytest.raises(UserError, match=r"DynamicNTKScaling .* give length="):
        rotary_table(POSITIONS, HEAD, scaling=DynamicNTKScaling(2.0, ORIGINAL))
    with pytest.raises(UserError, match=r"LongRoPEScaling .* give length="):
        rotary(torch.zeros(2, 5, 1, HEAD), POSITIONS, scaling=LONGROPE)
    with pytest.raises(UserError, match=r"long_factor=…\) has 16 numbers for 4 frequencies"):
        rotary_table(POSITIONS, 8, scaling=LONGROPE, length=100)
    with pytest.raises(UserError, match="at least 4"):
        rotary_table(POSITIONS, 2, scaling=DynamicNTKScaling(2.0, ORIGINAL), length=100)


# pairs


def default(name):
    """transformers' table for head dim 32, and its turn of x[batch seq heads head]."""
    from transformers.models.cohere import modeling_cohere as cohere
    from transformers.models.glm import modeling_glm as glm
    from transformers.models.gpt_neox import modeling_gpt_neox as neox
    from transformers.models.gptj import modeling_gptj as gptj
    from transformers.models.llama import modeling_llama as llama

    size = dict(hidden_size=4 * HEAD, num_attention_heads=4, num_key_value_heads=4)
    partial = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
    if name == "gptj":
        sincos = gptj.create_sinusoidal_positions(300, HEAD // 2)[POSITIONS]

        def turn(x):
            turned = gptj.apply_rotary_pos_emb(x[..., : HEAD // 2], *sincos.to(x.dtype).chunk(2, -1))
            return torch.cat([turned, x[..., HEAD // 2 :]], -1)

        return turn
    module, embedding, config = {
        "llama": (llama, llama.LlamaRotaryEmbedding, llama.LlamaConfig(**size)),
        "cohere": (cohere, cohere.CohereRotaryEmbedding, cohere.CohereConfig(**size)),
        "neox": (neox, neox.GPTNeoXRotaryEmbedding, neox.GPTNeoXConfig(**size, rope_parameters=partial)),
        "glm": (glm, glm.GlmRotaryEmbedding, glm.GlmConfig(**size, head_dim=HEAD, rope_parameters=partial)),
    }[name]
    table = embedding(config)(torch.zeros(1, dtype=torch.float32), POSITIONS)

    def turn(x):
        return module.apply_rotary_pos_emb(x, x, *(t.to(x.dtype) for t in table), unsqueeze_dim=2)[0]

    return turn


FAMILIES = {
    "llama": (HEAD, False),
    "cohere": (HEAD, True),
    "neox": (HEAD // 2, False),
    "glm": (HEAD // 2, True),
    "gptj": (HEAD // 2, True),
}


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("name", FAMILIES)
def test_turns_are_transformers(name, dtype):
    dim, interleaved = FAMILIES[name]
    base = getattr(default(name), "base", None) or {"cohere": 500000.0}.get(name, 10000.0)
    x = torch.randn(2, 5, 2, 2, HEAD, dtype=dtype, requires_grad=True)
    theirs = default(name)(x.flatten(2, 3)).unflatten(2, (2, 2))
    # transformers' table is of fp32, so ours is too
    table = [t.to(dtype) for t in rotary_table(POSITIONS, dim, base=base)]
    ours = apply_rotary(x, *table, interleaved=interleaved)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    if dtype == torch.float32:
        assert torch.equal(ours, rotary(x, POSITIONS, base=base, dim=dim, interleaved=interleaved))
    g = torch.randn_like(ours)
    got, want = (torch.autograd.grad(y, x, g)[0] for y in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_turns_are_complex_products(interleaved):
    x, positions = torch.randn(1, 4, 6, dtype=DOUBLE), torch.tensor([0, 1, 5, 7])
    y = rotary(x, positions, base=100.0, interleaved=interleaved)

    def numbers(t):
        return torch.complex(*((t[..., ::2], t[..., 1::2]) if interleaved else (t[..., :3], t[..., 3:])))

    angle = positions[:, None] * 100.0 ** (-torch.arange(3, dtype=DOUBLE) / 3)
    torch.testing.assert_close(numbers(y), numbers(x) * torch.exp(1j * angle), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("interleaved", [False, True])
def test_half_precision_and_saved_bytes(interleaved):
    x = torch.randn(2, 5, 2, HEAD).to(torch.bfloat16).requires_grad_()
    cos, sin = rotary_table(POSITIONS, HEAD // 2)
    y = apply_rotary(x, cos, sin, interleaved=interleaved)
    exact = apply_rotary(x.double(), cos.double(), sin.double(), interleaved=interleaved)
    assert y.dtype == torch.bfloat16 and torch.equal(y[..., HEAD // 2 :], x[..., HEAD // 2 :])
    torch.testing.assert_close(y, exact.to(torch.bfloat16), rtol=2**-8, atol=2**-12)
    table = sum(t.untyped_storage().nbytes() for t in (cos, sin))
    assert saved_bytes(lambda: apply_rotary(x, cos, sin, interleaved=interleaved))[0] == table


def test_a_table_that_does_not_fit():
    cos, sin = rotary_table(POSITIONS, HEAD)
    with pytest.raises(UserError, match="do not fit x"):
        apply_rotary(torch.zeros(2, 5, 1, HEAD - 2), cos, sin)
    with pytest.raises(UserError, match="do not fit x"):
        apply_rotary(torch.zeros(2, 5, 1, HEAD), cos, sin[0])
    for dim in (5, 0):
        with pytest.raises(UserError, match=f"dim={dim}"):
            rotary_table(POSITIONS, dim)


# torch.func and torch.compile

TABLE = rotary_table(torch.arange(4), 4, scaling=YaRNScaling(8.0, ORIGINAL), dtype=DOUBLE)


def ours(x):
    return apply_rotary(x, *TABLE, interleaved=True)


def plain(x):
    cos, sin = (t[:, None] for t in TABLE)
    a, b = x[..., 0:4:2], x[..., 1:4:2]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([turned, x[..., 4:]], -1)


def test_torch_func():
    args, others = ([torch.randn(2, 4, 3, 6, dtype=DOUBLE)] for _ in range(2))
    got, want = transforms(ours, args, others), transforms(plain, args, others)
    for what in want:
        torch.testing.assert_close(got[what], want[what], rtol=1e-11, atol=1e-11, msg=what)


def test_third_derivative():
    x = torch.randn(2, 4, 3, 6, dtype=DOUBLE, requires_grad=True)
    torch.testing.assert_close(third_derivatives(ours, [x]), third_derivatives(plain, [x]), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["yarn", "longrope, long", "dynamic, long"])
def test_compiled(name, backend):
    _, scaling, length = SCALINGS[name]

    def f(x, positions):
        return rotary(x, positions, scaling=scaling, length=length, interleaved=True)

    x = torch.randn(2, 5, 2, HEAD, dtype=DOUBLE, requires_grad=True)
    compiled = torch.compile(f, backend=backend, fullgraph=True)
    got, want = (torch.autograd.grad((g(x, POSITIONS) ** 3).sum(), x)[0] for g in (compiled, f))
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(compiled(x.detach(), POSITIONS), f(x, POSITIONS), rtol=1e-11, atol=1e-11)


# on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, DOUBLE])
@pytest.mark.parametrize("name", SCALINGS)
def test_on_gpu(name, dtype):
    _, scaling, length = SCALINGS[name]
    x = torch.randn(2, 5, 2, HEAD + 4, dtype=dtype)
    args = dict(dim=HEAD, scaling=scaling, length=length, interleaved=True)
    here, there = x.requires_grad_(), x.detach().cuda().requires_grad_()
    a, b = rotary(here, POSITIONS, **args), rotary(there, POSITIONS.cuda(), **args)
    g = torch.randn_like(a)
    tolerance = {torch.bfloat16: 2**-7, torch.float32: 1e-4, DOUBLE: 1e-12}[dtype]
    torch.testing.assert_close(b.cpu(), a, rtol=tolerance, atol=tolerance)
    got, want = torch.autograd.grad(b, there, g.cuda())[0].cpu(), torch.autograd.grad(a, here, g)[0]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
