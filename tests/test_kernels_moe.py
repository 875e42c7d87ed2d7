"""The local part of a mixture of experts: torch's operations against numpy and plain loops, Triton's kernels (on a GPU, or
interpreted on the CPU with TRITON_INTERPRET=1) against torch's in float64."""

import functools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fmegatron import kernels
from fmegatron.errors import UserError
from fmegatron.kernels.moe import (
    add_group_bias,
    gather_rows,
    sort_by_expert,
    sum_choices,
    top_experts,
    weighted_gated,
    wide_product,
)
from fmegatron.primitives.grouped import grouped_product
from fmegatron.simulation import per_rank, simulate

DEVICE = "cpu" if kernels.INTERPRETED else "cuda"
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (kernels.INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"),
]
# the interpreter cuts bfloat16 off where a device rounds
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 2e-6}
ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "clamped_swiglu")


def on_gpu(test):
    return functools.reduce(lambda t, mark: mark(t), gpu, test)


def routed(tokens, choices, experts, device="cpu", none=0.2):
    """Choices of which some are none, and experts[0] has no row."""
    found = torch.randint(1, experts, (tokens, choices), device=device)
    return torch.where(torch.rand(tokens, choices, device=device) < none, experts, found)


def sorted_by_numpy(experts, n):
    flat = experts.cpu().numpy().reshape(-1)
    order = np.argsort(flat, kind="stable")
    real = int((flat < n).sum())
    inverse = np.full(flat.size, -1)
    inverse[order[:real]] = np.arange(real)
    order[real:] = -1
    return order, inverse, np.cumsum(np.bincount(flat, minlength=n + 1)[:n])


SIZES = [(1, 1, 1), (5, 2, 3), (70, 4, 7), (300, 3, 130), (1, 200, 5), (0, 2, 4)]


@pytest.mark.parametrize("tokens, choices, n", SIZES)
@pytest.mark.parametrize("kernel", ["torch", pytest.param("triton", marks=gpu)])
def test_sort(tokens, choices, n, kernel):
    torch.manual_seed(0)
    device = DEVICE if kernel == "triton" else "cpu"
    for none in (0.0, 0.3, 1.0):
        experts = torch.where(
            torch.rand(tokens, choices, device=device) < none, n, torch.randint(n, (tokens, choices), device=device)
        )
        right = sorted_by_numpy(experts, n)
        real = int(right[2][-1])
        for rows in (None, real, (real + experts.numel()) // 2):
            found = sort_by_expert(experts, n, rows=rows, kernel=kernel)
            for a, b in zip(found, (right[0][:rows], *right[1:]), strict=True):
                assert a.dtype == torch.int32 and np.array_equal(a.cpu().numpy(), b)


def test_sort_takes_no_other_experts():
    order, inverse, ends = sort_by_expert(torch.tensor([[3, -1], [1, 9]], dtype=torch.int32), 4, rows=2)
    assert order.tolist() == [2, 0] and inverse.tolist() == [1, -1, 0, -1] and ends.tolist() == [0, 1, 1, 2]
    with pytest.raises(UserError, match="rows=5"):
        sort_by_expert(torch.zeros(2, 2, dtype=torch.int64), 4, rows=5)


@pytest.mark.parametrize("kernel", ["torch", pytest.param("triton", marks=gpu)])
@pytest.mark.parametrize("columns, k", [(1, 1), (5, 5), (128, 8), (130, 4)])
def test_top_experts(columns, k, kernel):
    torch.manual_seed(0)
    values = torch.randn(3, 7, columns).mul(2).round().div(2)  # with many equal ones, and zeros of both signs
    values[0, 0, columns // 2 :] = -torch.inf
    values[1, 1] = -torch.inf
    right = torch.from_numpy(np.argsort(-values.numpy(), axis=-1, kind="stable")[..., :k])
    device = DEVICE if kernel == "triton" else "cpu"
    assert torch.equal(top_experts(values.to(device), k, kernel=kernel).cpu(), right)


def a_case(dtype=torch.float64, device="cpu", tokens=6, choices=3, n=4, embed=5, emlp=3):
    torch.manual_seed(1)
    order, inverse, ends = sort_by_expert(routed(tokens, choices, n, device), n)
    x = torch.randn(tokens, embed, dtype=dtype, device=device, requires_grad=True)
    h = torch.randn(tokens * choices, 2 * emlp, dtype=dtype, device=device, requires_grad=True)
    w = torch.rand(tokens * choices, dtype=dtype, device=device, requires_grad=True)
    return order, inverse, ends, x, h, w


def test_rows_and_sums():
    order, inverse, ends, x, _, _ = a_case()
    real = int(ends[-1])
    assert 0 < real < len(order)
    rows = gather_rows(x, order, inverse, 3)
    assert torch.equal(rows[:real], x[order[:real] // 3]) and not rows[real:].any()
    y = torch.randn_like(rows)
    y[real:] = torch.nan  # as torch's grouped product leaves them
    y.requires_grad_()
    sums = sum_choices(y, order, inverse, 3)
    right = torch.zeros_like(x).index_add(0, order[:real] // 3, y[:real])
    torch.testing.assert_close(sums, right)
    (g,) = torch.autograd.grad((sums * x).sum(), y)
    assert torch.equal(g, rows)  # transposes of each other
    (g,) = torch.autograd.grad((rows[:real] * y[:real]).sum(), x)
    torch.testing.assert_close(g, sums)
    f = functools.partial(gather_rows, order=order, inverse=inverse, choices=3)
    assert torch.autograd.gradcheck(f, x) and torch.autograd.gradgradcheck(f, x)
    nobody = torch.full((18,), -1, dtype=torch.int32)
    assert not sum_choices(torch.full_like(rows, torch.nan), nobody, nobody, 3).any()
    behind = torch.where(inverse < 0, len(rows), inverse)  # the other way to say that a choice has no row
    assert torch.equal(sum_choices(y, order, behind, 3), sums)
    half = sort_by_expert(torch.tensor([[0, 2], [2, 0]]), 2, rows=2)
    assert torch.equal(gather_rows(x[:2], *half[:2], 2), x[:2])
    with pytest.raises(UserError, match="6 tokens of 2 choices"):
        gather_rows(x, order, inverse, 2)


def by_definition(h, w, activation, limit=7.0):
    gate, up = h.chunk(2, -1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1) * w[:, None]
    act = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": functools.partial(F.gelu, approximate="tanh")}[activation]
    return act(gate) * up * w[:, None]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_weighted_gated(activation):
    _, _, ends, _, h, w = a_case()
    real, form = int(ends[-1]), dict(activation=activation, limit=0.7)
    f = functools.partial(weighted_gated, ends=ends, **form)
    assert torch.autograd.gradcheck(f, (h, w)) and torch.autograd.gradgradcheck(f, (h, w))
    y = weighted_gated(h, w, **form)
    torch.testing.assert_close(y, by_definition(h, w, activation, 0.7))
    torch.testing.assert_close(weighted_gated(h.unflatten(1, (2, -1)), w, **form), y)
    g = torch.randn_like(y)
    right = torch.autograd.grad(y, [h, w], g)
    bad, g = h.detach().clone(), g.clone()
    bad[real:], g[real:] = torch.nan, torch.nan
    bad.requires_grad_()
    found = f(bad, w)
    assert torch.equal(found[:real], y[:real]) and not found[real:].any()
    for a, b in zip(torch.autograd.grad(found, [bad, w], g), right, strict=True):
        assert torch.equal(a[:real], b[:real]) and not a[real:].any()


def test_weighted_gated_refuses():
    with pytest.raises(UserError, match="activation='relu'.*clamped_swiglu"):
        weighted_gated(torch.randn(2, 4), torch.ones(2), activation="relu")
    with pytest.raises(UserError, match=r"h has shape \(2, 3\)"):
        weighted_gated(torch.randn(2, 3), torch.ones(2))


def test_group_bias():
    _, _, ends, _, h, w = a_case()
    bias = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    expert = torch.repeat_interleave(torch.arange(4), torch.diff(ends, prepend=ends.new_zeros(1)).long())
    right = h.clone()
    right[: len(expert)] += bias[expert] * w[: len(expert), None]
    found = add_group_bias(h, bias, ends, scale=w)
    torch.testing.assert_close(found, right)
    g = torch.randn_like(h)
    for a, b in zip(*(torch.autograd.grad(y, [h, bias, w], g) for y in (found, right)), strict=True):
        torch.testing.assert_close(a, b)
    g[len(expert) :] = torch.nan
    assert torch.autograd.grad(add_group_bias(h, bias, ends), bias, g)[0].isfinite().all()
    f = functools.partial(add_group_bias, ends=ends)
    assert torch.autograd.gradcheck(f, (h, bias)) and torch.autograd.gradgradcheck(f, (h, bias))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[gpu[0], gpu[1]])])
def test_wide_product(device):
    """Of half-precision numbers; the interpreter has no part in it."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    x, w = (torch.randn(s, device=device).bfloat16().requires_grad_() for s in ((3, 50, 64), (64, 16)))
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    y, right = wide_product(x, w), exact[0] @ exact[1]
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-5)
    g = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, w], g, retain_graph=True)
    for a, b in zip(found, torch.autograd.grad(right, exact, g.double()), strict=True):  # rounded once
        torch.testing.assert_close(a, b.bfloat16(), rtol=8e-3, atol=1e-4)
    again = torch.autograd.grad(y, [x, w], g, create_graph=True)
    assert all(torch.allclose(a, b, rtol=8e-3, atol=1e-4) for a, b in zip(found, again, strict=True))
    (twice,) = torch.autograd.grad(again[0].float().square().sum(), w)
    assert twice.isfinite().all() and twice.any()


def layer(x, experts, weights, gate_up, down, *, kernel="torch"):
    choices = experts.shape[1]
    order, inverse, ends = sort_by_expert(experts, len(down), kernel=kernel)
    rows = gather_rows(x, order, inverse, choices, kernel=kernel)
    w = gather_rows(weights.reshape(-1, 1), order, inverse, 1, kernel=kernel)[:, 0]
    a = weighted_gated(grouped_product(rows, gate_up, ends), w, ends, kernel=kernel)
    return sum_choices(grouped_product(a, down, ends), order, inverse, choices, kernel=kernel)


def layer_by_loops(x, experts, weights, gate_up, down):
    y = torch.zeros_like(x)
    for e in range(len(down)):
        token, choice = (experts == e).nonzero(as_tuple=True)
        h = by_definition(x[token] @ gate_up[e], weights[token, choice], "swiglu")
        y = y.index_add(0, token, h @ down[e])
    return y


def layer_arguments(dtype=torch.float64, device="cpu", tokens=9, choices=2, n=5, embed=8, emlp=8):
    torch.manual_seed(2)
    experts = routed(tokens, choices, n, device)
    shapes = (tokens, embed), (tokens, choices), (n, embed, 2 * emlp), (n, emlp, embed)
    x, weights, gate_up, down = (torch.randn(s, device=device) / s[-2] ** 0.5 for s in shapes)
    return [t.to(dtype).requires_grad_() for t in (x, weights.abs(), gate_up, down)], experts


def gradients(f, leaves, experts):
    x, weights, gate_up, down = leaves
    y = f(x, experts, weights, gate_up, down)
    return [
        y,
        *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)),
    ]


def test_layer():
    leaves, experts = layer_arguments()
    for a, b in zip(gradients(layer, leaves, experts), gradients(layer_by_loops, leaves, experts), strict=True):
        torch.testing.assert_close(a, b)


def test_layer_compiled():
    leaves, experts = layer_arguments()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    for a, b in zip(gradients(compiled, leaves, experts), gradients(layer, leaves, experts), strict=True):
        torch.testing.assert_close(a, b)


def test_layer_under_torch_func():
    leaves, experts = layer_arguments()
    x, weights, gate_up, down = (t.detach() for t in leaves)

    def loss(f, x, weights):
        return f(x, experts, weights, gate_up, down).square().sum()

    found = torch.func.grad(functools.partial(loss, layer), (0, 1))(x, weights)
    for a, b in zip(found, torch.func.grad(functools.partial(loss, layer_by_loops), (0, 1))(x, weights), strict=True):
        torch.testing.assert_close(a, b)
    best = torch.func.vmap(lambda x: top_experts(x, 2))(torch.stack([x, -x]))
    assert torch.equal(best[1], top_experts(-x, 2))
    order, inverse, ends = sort_by_expert(experts, 5)
    many = torch.func.vmap(lambda e: sort_by_expert(e, 5))(torch.stack([experts, experts.flip(0)]))
    assert all(torch.equal(a[0], b) for a, b in zip(many, (order, inverse, ends), strict=True))
    rows = torch.func.vmap(lambda x: gather_rows(x, order, inverse, 2))(torch.stack([x, 2 * x]))
    assert torch.equal(rows[1], gather_rows(2 * x, order, inverse, 2))
    gated = torch.func.vmap(lambda h: weighted_gated(h, rows[0, :, 0], ends))(rows)
    assert torch.equal(gated[1], weighted_gated(rows[1], rows[0, :, 0], ends))


def test_layer_in_simulation():
    """Every rank routes its own tokens."""
    leaves, experts = layer_arguments()
    alone = [gradients(layer, leaves, experts.roll(rank, 1).clone()) for rank in range(2)]
    with simulate(2):
        from torch.distributed._local_tensor import LocalTensor

        each = LocalTensor({rank: experts.roll(rank, 1).clone() for rank in range(2)})
        lifted = [LocalTensor({r: t.detach().clone() for r in range(2)}).requires_grad_() for t in leaves]
        found = [per_rank(t) for t in gradients(layer, lifted, each)]
    for n, right in enumerate(alone):
        for a, b in zip(found, right, strict=True):
            assert torch.equal(a[n], b)


# Triton's kernels


def compare(f, args, dtype, slack=1):
    """f(kernel, *args) by Triton's kernels, with gradients, against torch's operations in float64."""
    args = [a.to(dtype).requires_grad_() for a in args]
    exact = [a.detach().double().requires_grad_() for a in args]
    found, right = f("triton", *args), f("torch", *exact)
    g = torch.randn_like(found)
    found = [found, *torch.autograd.grad(found, args, g)]
    right = [right, *torch.autograd.grad(right, exact, g.double())]
    for a, b in zip(found, right, strict=True):
        assert a.shape == b.shape and a.dtype == dtype
        assert (a.double() - b).norm() <= slack * TOLERANCE[dtype] * b.norm()


dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


@on_gpu
@dtypes
@pytest.mark.parametrize("columns", [1, 40, 256, 2100])
def test_rows_by_kernel(dtype, columns):
    torch.manual_seed(0)
    order, inverse, ends = sort_by_expert(routed(7, 3, 4, DEVICE), 4)
    assert 0 < ends[-1] < 21
    for n, choices in ((7, 3), (21, 1)):
        x = torch.randn(n, columns, device=DEVICE)
        compare(lambda kernel, x, k=choices: gather_rows(x, order, inverse, k, kernel=kernel), [x], dtype)
        y = torch.randn(21, columns, device=DEVICE)
        compare(lambda kernel, y, k=choices: sum_choices(y, order, inverse, k, kernel=kernel), [y], dtype)
    y = torch.where(torch.arange(21, device=DEVICE)[:, None] < ends[-1], y, torch.nan)
    sums = sum_choices(y, order, inverse, 3, kernel="triton")
    assert sums.isfinite().all()
    behind = torch.where(inverse < 0, 21, inverse)  # the other way to say that a choice has no row
    assert torch.equal(sum_choices(y, order, behind, 3, kernel="triton"), sums)
    assert torch.equal(*(gather_rows(sums, order, i, 3, kernel="triton") for i in (inverse, behind)))


@on_gpu
@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("emlp, scale", [(40, 1.0), (768, 1.0), (700, 30.0), (4700, 1.0)])
def test_weighted_gated_by_kernel(dtype, activation, emlp, scale):
    torch.manual_seed(0)
    h, w = torch.randn(11, 2 * emlp, device=DEVICE) * scale, torch.rand(11, device=DEVICE)
    ends = torch.tensor([3, 3, 9], dtype=torch.int32, device=DEVICE)
    form = dict(activation=activation, limit=1.5)
    compare(lambda kernel, h, w: weighted_gated(h, w, kernel=kernel, **form), [h, w], dtype)
    compare(lambda kernel, h, w: weighted_gated(h, w, ends, kernel=kernel, **form), [h, w], dtype)
    bad, g = h.detach().to(dtype).clone(), torch.randn(11, emlp, device=DEVICE, dtype=dtype)
    bad[9:], g[9:] = torch.nan, torch.nan
    bad.requires_grad_()
    y = weighted_gated(bad, w, ends, kernel="triton", **form)
    found = [y, *torch.autograd.grad(y, [bad], g)]
    assert all(t.isfinite().all() and not t[9:].any() for t in found)


@on_gpu
@dtypes
def test_group_bias_by_kernel(dtype):
    torch.manual_seed(0)
    ends = torch.tensor([3, 3, 70], dtype=torch.int32, device=DEVICE)
    x, bias = torch.randn(75, 100, device=DEVICE), torch.randn(3, 100, device=DEVICE)
    scale = torch.rand(75, device=DEVICE)
    compare(lambda kernel, x, b, s: add_group_bias(x, b, ends, scale=s, kernel=kernel), [x, bias, scale], dtype)


@on_gpu
@pytest.mark.skipif(kernels.INTERPRETED, reason="torch's grouped product of half precision is a GPU's")
def test_layer_by_kernel():
    leaves, experts = layer_arguments(torch.bfloat16, "cuda", 300, 4, 16, 256, 128)
    leaves = [t.detach().requires_grad_() for t in leaves]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    right = gradients(layer_by_loops, exact, experts)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = gradients(functools.partial(layer, kernel="triton"), leaves, experts)
        plain = gradients(functools.partial(layer, kernel="torch"), leaves, experts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    again = gradients(functools.partial(layer, kernel="triton"), leaves, experts)
    for a, b, c, d in zip(found, plain, again, right, strict=True):
        assert (a.double() - d).norm() <= 2e-2 * d.norm() and (b.double() - d).norm() <= 2e-2 * d.norm()
        assert torch.equal(a, c)
