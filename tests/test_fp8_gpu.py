"""fp8 on the matrix units of a GPU: the same numbers as emulated, eager and compiled."""

import functools

import pytest
import torch

from fmegatron.fp8 import Fp8
from fmegatron.fp8.grouped import GroupedUse
from fmegatron.precision import Precision
from fmegatron.primitives.grouped import grouped_product
from fmegatron.sharding import Sharding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs an sm90 GPU"
    ),
]
EQUATION = "batch seq embed, embed mlp -> batch seq mlp"


def found(fp8, x, w, g, compiled=False):
    sh = Sharding(precision=Precision(params=torch.bfloat16, fp8=fp8))
    dot = torch.compile(lambda x, w: sh.dot(x, w, EQUATION), fullgraph=True) if compiled else None
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = sh.dot(x, w, EQUATION) if dot is None else dot(x, w)
    return [y, *torch.autograd.grad(y, (x, w), g)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_native_products_are_the_emulated_ones(recipe, kernels, compiled):
    g = torch.Generator("cuda").manual_seed(0)
    x, w, seed = (
        torch.randn(*shape, generator=g, device="cuda", dtype=torch.bfloat16)
        for shape in ((1, 512, 640), (640, 256), (1, 512, 256))
    )
    torch._dynamo.reset()
    got = found(Fp8(recipe, kernels=kernels), x, w, seed, compiled)
    want = found(Fp8(recipe, backend="emulated"), x, w, seed)
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).norm() < 5e-3 * b.double().norm()


def grouped(fp8, x, w, ends, g, compiled=False):
    use = None if fp8 is None else GroupedUse(fp8)
    run = torch.compile(grouped_product, fullgraph=True) if compiled else grouped_product
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = run(x, w, ends, fp8=use)
    return [y, *torch.autograd.grad(y, (x, w), g)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_native_products_of_experts_are_the_emulated_ones(kernels, compiled):
    """Groups of any size, two of them empty, without a wait of the host."""
    g = torch.Generator("cuda").manual_seed(0)
    ends = torch.tensor([0, 1, 300, 300, 307, 1000], device="cuda", dtype=torch.int32)
    x, w, seed = (
        torch.randn(*shape, generator=g, device="cuda", dtype=torch.bfloat16)
        for shape in ((1000, 256), (6, 256, 384), (1000, 384))
    )
    torch._dynamo.reset()
    run = functools.partial(grouped, Fp8("rowwise", kernels=kernels), x, w, ends, seed, compiled)
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for other, most in ((Fp8("rowwise", backend="emulated"), 1e-2), (None, 0.06)):
        for a, b in zip(got, grouped(other, x, w, ends, seed), strict=True):
            assert (a.double() - b.double()).norm() < most * b.double().norm()
    assert (got[2][0] == 0).all() and (got[2][3] == 0).all()
