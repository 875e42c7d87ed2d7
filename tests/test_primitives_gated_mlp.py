"""The gated MLP as one primitive: on a CPU with a stand-in for the kernels, on a Hopper GPU with quack-kernels' own."""

import dataclasses

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fmegatron import tree
from fmegatron.accumulate import accumulate
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.kernels import quack
from fmegatron.mesh import make_mesh
from fmegatron.models import Decoder
from fmegatron.precision import Precision
from fmegatron.primitives import gated_mlp, has_kernel
from fmegatron.random import key
from fmegatron.remat import names
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding
from fmegatron.spec import init
from fmegatron.split import everything
from tests.test_llama import MESHY, batch_of

ACTS = {"swiglu": functional.silu, "geglu_tanh": lambda x: functional.gelu(x, approximate="tanh")}


def by_definition(x, gate_up, down, activation):
    return (ACTS[activation](x @ gate_up[..., 0]) * (x @ gate_up[..., 1])) @ down


def forward(x, w, kind):
    """What `quack.forward` promises, of torch's operations."""
    y = x @ w
    act = {quack_kind: ACTS[name] for name, quack_kind in (("swiglu", "silu"), ("geglu_tanh", "gelu_tanh"))}[kind]
    return y, act(y[:, ::2]) * y[:, 1::2]


def backward(g, w, y, kind):
    with torch.enable_grad():
        y = y.detach().requires_grad_()
        h = forward(y, torch.eye(y.shape[1], dtype=y.dtype), kind)[1]
        return torch.autograd.grad(h, y, g @ w.t())[0], h.detach()


@pytest.fixture
def stand_in(monkeypatch):
    """As if the kernels were there, and took everything; how often each ran."""
    counts = dict(forward=0, backward=0)

    def counted(f, name):
        def run(*args):
            counts[name] += 1
            return f(*args)

        return run

    monkeypatch.setattr(quack, "takes", lambda x, kind, hidden: kind in quack.NAMES)
    monkeypatch.setattr(quack, "forward", counted(forward, "forward"))
    monkeypatch.setattr(quack, "backward", counted(backward, "backward"))
    return counts


def draw(*shapes, device="cpu"):
    torch.manual_seed(0)
    return [torch.randn(s, dtype=torch.float64, device=device).requires_grad_() for s in shapes]


@pytest.mark.parametrize("activation", ACTS)
def test_is_its_definition_with_and_without_kernels(stand_in, activation):
    args = draw((2, 5, 6), (6, 8, 2), (8, 6))
    want = by_definition(*args, activation)
    g = torch.randn_like(want)
    gradients = torch.autograd.grad(want, args, g)
    for kernel, runs in (("torch", 0), ("auto", 1)):
        got = gated_mlp(*args, activation=activation, kernel=kernel)
        for a, b in zip((got, *torch.autograd.grad(got, args, g)), (want, *gradients), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
        assert stand_in == dict(forward=runs, backward=runs)
    assert torch.autograd.gradgradcheck(
        lambda *t: gated_mlp(*t, activation=activation), draw((3, 2), (2, 2, 2), (2, 2))
    )


class Operations(TorchDispatchMode):
    """The names of all that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        self.names.append(f.overloadpacket.__name__)
        return f(*args, **(kwargs or {}))


def test_nothing_is_copied(stand_in, monkeypatch):
    """The products read the weight where it lies, and make its gradient as it will lie; nothing else runs."""
    args, weights = draw((2, 5, 6), (6, 8, 2), (8, 6)), []

    def alone(f):
        def run(x, w, *rest):
            weights.append((w.data_ptr(), w.shape))
            with _disable_current_modes():
                return f(x, w, *rest)

        return run

    for name, f in (("forward", forward), ("backward", backward)):
        monkeypatch.setattr(quack, name, alone(f))
    g = torch.randn(2, 5, 6, dtype=torch.float64)
    with Operations() as ran:
        gradients = torch.autograd.grad(gated_mlp(*args), args, g)
    assert weights == [(args[1].data_ptr(), (6, 16)), (args[2].data_ptr(), (8, 6))]
    assert {*ran.names} == {"mm", "view", "t"} and ran.names.count("mm") == 4
    assert [(x.shape, x.is_contiguous()) for x in gradients] == [(x.shape, True) for x in args]


def test_a_decoder_has_it_where_nobody_asks_for_a_product(stand_in):
    config = dataclasses.replace(MESHY, fused_gate_up=True, layers=2)
    sh = Sharding(precision=Precision(params=torch.float64))
    params = init(Decoder(config).spec(), key(0), sh=sh)
    batch = batch_of(config)
    found = {}
    for kernel in ("auto", "torch"):
        for save in (everything, names("attention"), names("down")):
            model = Decoder(config, kernel=kernel, save=save)
            before = dict(stand_in)
            (loss, _), grads = accumulate(model.loss, 1, weights=model.weights)(params, batch, Ctx(sh=sh))
            ran = stand_in["forward"] - before["forward"], stand_in["backward"] - before["backward"]
            found.setdefault((float(loss), *ran), grads)
    assert {runs[1:] for runs in found} == {(0, 0), (2, 2), (4, 2)}
    first, *rest = found.values()
    for grads in rest:
        for path, g in tree.named(grads).items():
            torch.testing.assert_close(g, tree.named(first)[path], rtol=1e-9, atol=1e-13, msg=path)


@pytest.mark.parametrize("row", [{"embed": "tp"}, {"mlp": "tp"}, {"gated": "tp"}, {"seq*": "tp"}, {"batch": "tp"}])
def test_products_stay_apart_where_ranks_hold_parts_of_what_is_summed(stand_in, row):
    """Whatever the rules of the user are. Rows of the batch alone leave each rank whole products."""
    model = Decoder(dataclasses.replace(MESHY, fused_gate_up=True))
    rows = {**dict.fromkeys(("batch", "seq", "embed", "gated", "mlp")), **row}
    rules = Rules(rows, activations=(*Rules.activations, "gated", "mlp", "embed"))
    sh = Sharding(make_mesh("tp=2", abstract=True), rules, precision=Precision(params=torch.float64))
    p = {"gate_up": torch.zeros(16, 24, 2), "down": torch.zeros(24, 16)}
    found = model._one_kernel(p, torch.zeros(2, 4, 16), Ctx(sh=sh), "gate_up", "down", "mlp")
    assert found == ("batch" in row)


def test_bad_input():
    x, gate_up, down = draw((2, 6), (6, 8, 2), (8, 6))
    with pytest.raises(UserError, match="activation='relu'.*swiglu, geglu, geglu_tanh"):
        gated_mlp(x, gate_up, down, activation="relu")
    for wrong in ((x, gate_up[:5], down), (x, gate_up[..., :1], down), (x, gate_up.mT, down), (x, gate_up, down[:7])):
        with pytest.raises(UserError, match="gated_mlp: x .* disagree"):
            gated_mlp(*wrong)


needs_hopper = pytest.mark.skipif(
    not (quack.INSTALLED and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9),
    reason="needs a Hopper GPU and quack-kernels",
)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("activation", ACTS)
def test_against_float64(activation, compiled):
    exact = draw((2, 2100, 1032), (1032, 1096, 2), (1096, 1032), device="cuda")
    exact = [
        t.detach().mul(t.shape[0] ** -0.5 if i else 1).bfloat16().double().requires_grad_() for i, t in enumerate(exact)
    ]
    args = [t.detach().bfloat16().requires_grad_() for t in exact]
    assert has_kernel(*args, activation)
    f = torch.compile(gated_mlp, fullgraph=True) if compiled else gated_mlp
    got, want = f(*args, activation=activation), by_definition(*exact, activation)
    g = torch.randn_like(got)
    found = [got, *torch.autograd.grad(got, args, g)]
    for a, b in zip(found, [want, *torch.autograd.grad(want, exact, g.double())], strict=True):
        assert a.dtype == torch.bfloat16 and a.is_contiguous()
        assert (a.double() - b).norm() < 8e-3 * b.norm()
