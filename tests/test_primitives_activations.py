"""Activations: against torch and transformers, with derivatives of every order and nothing kept but arguments."""

import pytest
import torch

from fmegatron.checking import check
from fmegatron.errors import UserError
from fmegatron.initializers import Normal
from fmegatron.primitives import geglu, gelu, quick_gelu, relu2, swiglu
from fmegatron.rules import Rules
from fmegatron.spec import Param
from tests.test_primitives import differentiable_twice, gradients, saved_bytes, third_derivatives
from tests.test_primitives_transforms import transforms

DOUBLE, HALF = torch.float64, torch.bfloat16


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def transformers_activation(name):
    from transformers.activations import ACT2FN

    return ACT2FN[name]


def gated(f):
    return lambda gate, up: f(gate) * up


# ours, and transformers' name of the activation
ACTIVATIONS = {
    "gelu": (gelu, "gelu"),
    "gelu tanh": (lambda x: gelu(x, approximate="tanh"), "gelu_pytorch_tanh"),
    "quick_gelu": (quick_gelu, "quick_gelu"),
    "relu2": (relu2, "relu2"),
    "swiglu": (swiglu, "silu"),
    "swiglu by turns": (lambda gate, up: swiglu(torch.stack([gate, up], -1), dim=-1), "silu"),
    "geglu": (geglu, "gelu"),
    "geglu tanh": (lambda gate, up: geglu(gate, up, approximate="tanh"), "gelu_pytorch_tanh"),
}


def case(name, *shape):
    """(ours, transformers', arguments)."""
    ours, act = ACTIVATIONS[name]
    theirs = transformers_activation(act)
    arguments = 2 if "glu" in name else 1
    return (
        ours,
        gated(theirs) if arguments == 2 else theirs,
        [torch.randn(shape, dtype=DOUBLE) for _ in range(arguments)],
    )


@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32, DOUBLE])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_is_transformers(name, dtype):
    ours, theirs, args = case(name, 50, 7)
    args = [(2 * a).to(dtype).requires_grad_() for a in args]
    exact = [a.detach().double().requires_grad_() for a in args]
    y, want = ours(*args), theirs(*args)
    assert y.dtype == dtype
    assert torch.equal(y, want)
    g = torch.randn(50, 7).to(dtype)
    got, right = gradients(y, args, g), gradients(theirs(*exact), exact, g.double())
    for a, b in zip(got, right, strict=True):
        assert a.dtype == dtype
        rounding = {HALF: 2**-7, torch.float16: 2**-10, torch.float32: 1e-6, DOUBLE: 1e-14}[dtype]
        assert (a.double() - b).norm() < rounding * b.norm()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_and_saved_bytes(name):
    ours, theirs, args = case(name, 3, 5)
    args = [a.requires_grad_() for a in args]
    assert differentiable_twice(ours, *args)
    assert saved_bytes(lambda: ours(*args))[0] == len(args) * 3 * 5 * 8

    for a, b in zip(third_derivatives(ours, args), third_derivatives(theirs, args), strict=True):
        assert (a - b).norm() < 1e-11 * b.norm()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_far_out(name):
    """Large arguments of both signs give no NaN in any derivative."""
    ours, _, args = case(name, 1)
    x = torch.tensor([-1e3, -40.0, -8.0, 0.0, 8.0, 40.0, 1e3], dtype=DOUBLE, requires_grad=True)
    value = ours(x, *[torch.ones_like(x)] * (len(args) - 1))
    for _ in range(3):
        (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        assert value.isfinite().all()
        if not value.requires_grad:
            break


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_torch_func(name):
    ours, theirs, args = case(name, 2, 3, 4)
    others = [torch.randn_like(a) for a in args]
    got, want = transforms(ours, args, others), transforms(theirs, args, others)
    for what in want:
        torch.testing.assert_close(got[what], want[what], rtol=1e-11, atol=1e-11, msg=what)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_half_precision_under_torch_func(name):
    ours, theirs, args = case(name, 50)
    args[0] = torch.linspace(-4, -1.5, 50)  # where 1 + tanh and the like cancel
    args = [a.to(HALF) for a in args]
    g = torch.randn(50).to(HALF)
    got = torch.func.vjp(ours, *args)[1](g)
    exact = torch.func.vjp(theirs, *(a.double() for a in args))[1](g.double())
    for a, b in zip(got, exact, strict=True):
        assert a.dtype == HALF and (a.double() - b).norm() <= 2**-6 * b.norm()


@pytest.mark.parametrize(
    "name, backend",
    [*((n, "aot_eager") for n in ACTIVATIONS), pytest.param("geglu tanh", "inductor", marks=pytest.mark.slow)],
)
def test_compiled(name, backend):
    ours, theirs, args = case(name, 3, 5)
    args = [a.requires_grad_() for a in args]
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    got, want = (gradients(f(*args) ** 3, args) for f in (compiled, theirs))
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    constants = [a.detach() for a in args]
    torch.testing.assert_close(compiled(*constants), theirs(*constants), rtol=1e-11, atol=1e-11)


def test_refusals():
    x = torch.randn(2, 3)
    for f in (swiglu, geglu):
        with pytest.raises(UserError, match=r"gate has shape \(2, 3\) and up \(3,\)"):
            f(x, x[0])
    with pytest.raises(UserError, match="approximate='erf'"):
        geglu(x, x, approximate="erf")
    with pytest.raises(UserError, match="approximate=True"):
        gelu(x, approximate=True)


def test_checking_mode():
    """Elementwise, so right on a sharded dim without `sh`."""
    spec = {"w": Param((4, 8), "embed mlp", Normal(1.0), over="batch")}

    def program(params, batch, sh):
        h = sh.dot(batch["x"], sh.use(params["w"], spec["w"]), "batch embed, embed mlp -> batch mlp")
        y = relu2(gelu(h)) + quick_gelu(h) + geglu(h, h, approximate="tanh") + swiglu(h, h)
        return sh.sum(y, "batch mlp ->")

    rules = Rules({"batch": "x", "mlp": "x", "embed": None}, activations=("batch",))
    batch = {"x": torch.randn(4, 4, dtype=DOUBLE)}
    check(program, spec, {"w": torch.randn(4, 8, dtype=DOUBLE)}, batch, rules, dims={"x": "batch embed"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32, DOUBLE])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_on_gpu(name, dtype):
    ours, theirs, args = case(name, 50, 37)
    args = [a.to("cuda", dtype).requires_grad_() for a in args]
    exact = [a.detach().double().requires_grad_() for a in args]
    y, want = ours(*args), theirs(*exact)
    g = torch.randn_like(y)
    double = [want, *gradients(want, exact, g.double())]
    for a, b in zip([y, *gradients(y, args, g)], double, strict=True):
        rounding = {HALF: 2**-7, torch.float16: 2**-10, torch.float32: 1e-6, DOUBLE: 1e-14}[dtype]
        assert a.dtype == dtype and (a.double() - b).norm() < rounding * b.norm()
