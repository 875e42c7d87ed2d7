"""Label smoothing, z-loss and capped logits of the two cross-entropies: against torch and closed forms, sharded too."""

import math
import sys

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fmegatron import random, tree
from fmegatron.checking import check
from fmegatron.errors import UserError
from fmegatron.initializers import Normal
from fmegatron.mesh import everywhere, make_mesh, parse_axes
from fmegatron.precision import Precision
from fmegatron.primitives import cross_entropy, embedding, linear_cross_entropy
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import Param, init
from tests.test_primitives import saved_bytes
from tests.test_primitives_loss import Largest, inputs
from tests.test_primitives_transforms import transforms

DOUBLE = torch.float64
TIED = "batch seq embed, vocab embed -> batch seq vocab"
FORMS = {
    "smoothing": dict(label_smoothing=0.1),
    "z-loss": dict(z_loss=0.3),
    "softcap": dict(softcap=1.5),
    "all": dict(label_smoothing=0.2, z_loss=0.1, softcap=2.0),
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
module = sys.modules["fmegatron.primitives.cross_entropy"]


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def reference(logits, labels, label_smoothing=0.0, z_loss=0.0, softcap=None):
    """The definition, with torch's own label smoothing."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat = logits.flatten(0, -2)
    loss = functional.cross_entropy(flat, labels.flatten(), reduction="none", label_smoothing=label_smoothing)
    penalty = z_loss * logits.logsumexp(-1).square()
    return loss.view(labels.shape) + penalty.masked_fill(labels == -100, 0)


def linear(x, w, labels, tied=False, **form):
    return linear_cross_entropy(x, w, labels, **(dict(equation=TIED) if tied else {}), **form)


@forms
@pytest.mark.parametrize("tied, chunk", [(False, None), (True, 1), (False, 3), (True, 3), (False, 64)])
def test_linear_equals_torch(form, tied, chunk):
    x, w, labels = inputs(tied)
    ours = linear(x, w, labels, tied, chunk=chunk, **form)
    theirs = reference(x @ (w.t() if tied else w), labels, **form)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    assert ours[0, 2] == 0 and ours[1, 4] == 0
    g = torch.rand(2, 5, dtype=DOUBLE)  # each token has a weight of its own
    got, want = (torch.autograd.grad(y, (x, w), g, create_graph=True) for y in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    along = [torch.randn_like(t) for t in (x, w)]
    got, want = (
        torch.autograd.grad(sum((a * b).sum() for a, b in zip(t, along, strict=True)), (x, w)) for t in (got, want)
    )
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("form", [*FORMS.values(), dict(keep=True)], ids=[*FORMS, "kept"])
@pytest.mark.parametrize("tied, chunk", [(False, 3), (True, None)])
def test_a_vocabulary_that_is_filled_up_equals_torch(monkeypatch, form, tied, chunk):
    """As on CUDA, where logits' rows would begin anywhere."""
    monkeypatch.setattr(module, "_entries_to_add", lambda x, vocab: 5)
    x, w, labels = inputs(tied)
    ours = linear(x, w, labels, tied, chunk=chunk, **form)
    theirs = reference(x @ (w.t() if tied else w), labels, **{n: v for n, v in form.items() if n != "keep"})
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    got, want = (torch.autograd.grad(y.sum(), (x, w)) for y in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@forms
def test_of_logits_equals_torch(form):
    logits, labels = torch.randn(2, 5, 11, dtype=DOUBLE, requires_grad=True), inputs()[2]
    ours, theirs = cross_entropy(logits, labels, **form), reference(logits, labels, **form)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    assert ours[0, 2] == 0 and ours[1, 4] == 0
    g = torch.rand(2, 5, dtype=DOUBLE)
    got, want = (torch.autograd.grad(y, logits, g) for y in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_closed_forms():
    """Of equal logits a and of two unequal ones, by hand."""
    a, size, labels = 3.0, 8, torch.tensor([[5]])
    equal = torch.full((1, 1, size), a, dtype=DOUBLE, requires_grad=True)
    lse = a + math.log(size)
    for smoothing in (0.0, 0.3, 1.0):  # the target distribution does not matter
        loss = cross_entropy(equal, labels, label_smoothing=smoothing, z_loss=0.5)
        assert loss.item() == pytest.approx(math.log(size) + 0.5 * lse**2, rel=1e-14)
    capped = 2 * math.tanh(a / 2)
    loss = cross_entropy(equal, labels, softcap=2.0, z_loss=0.5)
    assert loss.item() == pytest.approx(math.log(size) + 0.5 * (capped + math.log(size)) ** 2, rel=1e-14)
    # d loss / d logit = (p - onehot + 2 z lse p) · (1 - tanh²)
    (g,) = torch.autograd.grad(loss, equal)
    want = torch.full((size,), (1 + capped + math.log(size)) / size, dtype=DOUBLE)
    want[5] -= 1
    torch.testing.assert_close(g[0, 0], want * (1 - math.tanh(a / 2) ** 2), rtol=1e-13, atol=0)
    # 10% smoothing over two: the target is 0.95, 0.05
    two = torch.tensor([[[1.0, 0.0]]], dtype=DOUBLE)
    loss = cross_entropy(two, torch.tensor([[0]]), label_smoothing=0.1)
    assert loss.item() == pytest.approx(math.log1p(math.e) - 0.95, rel=1e-14)


@forms
def test_derivatives(form):
    x, w, labels = inputs()
    assert gradcheck(lambda x, w: linear(x, w, labels, chunk=3, **form), (x, w))
    assert gradgradcheck(lambda x, w: linear(x, w, labels, chunk=3, **form), (x, w))
    logits = torch.randn(2, 5, 11, dtype=DOUBLE, requires_grad=True)
    assert gradcheck(lambda t: cross_entropy(t, labels, **form), logits)
    assert gradgradcheck(lambda t: cross_entropy(t, labels, **form), logits)
    # frozen arguments
    both = torch.autograd.grad(linear(x, w, labels, **form).sum(), (x, w))
    assert torch.equal(torch.autograd.grad(linear(x, w.detach(), labels, **form).sum(), x)[0], both[0])
    assert torch.equal(torch.autograd.grad(linear(x.detach(), w, labels, **form).sum(), w)[0], both[1])


@pytest.mark.parametrize("what", ["linear", "logits"])
def test_third_derivatives(what):
    x, w, labels = inputs()

    def third(loss):
        value = (loss**4).sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(value, x, create_graph=True)
            value = (g**2).sum()
        return g

    form = FORMS["all"]
    ours = linear(x, w, labels, chunk=3, **form) if what == "linear" else cross_entropy(x @ w, labels, **form)
    a, b = third(ours), third(reference(x @ w, labels, **form))
    assert (a - b).norm() < 1e-10 * b.norm()


@forms
@pytest.mark.parametrize("what", ["linear", "logits"])
def test_torch_func(form, what):
    labels = torch.tensor([[1, -100, 0, 6], [3, 3, -100, 2]])
    shapes = [(2, 4, 5), (5, 7)] if what == "linear" else [(2, 4, 7)]
    args, others = ([torch.randn(s, dtype=DOUBLE) for s in shapes] for _ in range(2))
    if what == "linear":
        got = transforms(lambda x, w: linear(x, w, labels, chunk=3, **form), args, others)
        want = transforms(lambda x, w: reference(x @ w, labels, **form), args, others)
    else:
        got = transforms(lambda t: cross_entropy(t, labels, **form), args, others)
        want = transforms(lambda t: reference(t, labels, **form), args, others)
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], rtol=1e-11, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("form", [FORMS["smoothing"], FORMS["all"]], ids=["smoothing", "all"])
def test_compiled(form):
    x, w, labels = inputs()

    def loss(x, w):
        fused = linear(x, w, labels, chunk=3, **form)
        return ((fused + 0.1 * cross_entropy(x @ w, labels, **form)) ** 2).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    got, want = torch.autograd.grad(compiled(x, w), (x, w)), torch.autograd.grad(loss(x, w), (x, w))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(compiled(x.detach(), w.detach()), loss(x, w).detach(), rtol=1e-12, atol=1e-12)


@forms
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_statistics_are_wide(form, dtype, tolerance):
    x, w, labels = inputs(embed=32, vocab=50, dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    ours, theirs = linear(x, w, labels, chunk=4, **form), reference(exact[0] @ exact[1], labels, **form)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    g = torch.rand_like(ours)
    got, want = torch.autograd.grad(ours, (x, w), g), torch.autograd.grad(theirs, exact, g.double())
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() < tolerance * b.norm()
    logits = (x @ w).detach().requires_grad_()
    exact = logits.detach().double().requires_grad_()
    ours, theirs = cross_entropy(logits, labels, **form), reference(exact, labels, **form)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    (a,), (b,) = torch.autograd.grad(ours, logits, g), torch.autograd.grad(theirs, exact, g.double())
    assert a.dtype == dtype and (a.double() - b).norm() < tolerance * b.norm()


# memory and cost


@forms
def test_keeps_no_logits(form):
    x, w, labels = inputs(seq=64, embed=8, vocab=1000, dtype=torch.float32)
    size, _ = saved_bytes(lambda: linear(x, w, labels, chunk=16, **form))
    tokens, mask, lse = 2 * 64, 1, 4
    # the z-loss is a square of lse
    assert size == x.nbytes + w.nbytes + labels.nbytes + tokens * (mask + (lse if "z_loss" in form else 0))
    logits = (x @ w).detach().requires_grad_()
    size, _ = saved_bytes(lambda: cross_entropy(logits, labels, **form))
    held = labels.nbytes  # the labels of this rank, beside lse
    assert size == logits.nbytes + held + tokens * (lse + mask)


def kernels(dtype, *options):
    x, w, labels = inputs(seq=64, embed=2, vocab=1000, dtype=dtype)
    flat = x.detach().flatten(0, 1), w.detach(), labels.flatten().clamp(min=0), None
    lse, target, _ = module._linear_statistics_op.__wrapped__(*flat, *options, False, False)
    module._linear_statistics_backward_op.__wrapped__(*flat, lse, target, None, *options, True, True, False)


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_never_more_than_a_chunk_of_logits(form, dtype):
    form = module._form("", form.get("label_smoothing", 0.0), 0.0, form.get("softcap"), 1000)
    with Largest() as largest:
        kernels(dtype, False, 16, *form)
    assert largest.elements == 16 * 1000


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", [{}, dict(z_loss=0.1)])
def test_what_is_kept_gets_no_gradient_of_zeros(form):
    x, w, labels = inputs(seq=16, embed=2, vocab=100, dtype=torch.float32)
    loss = linear(x, w, labels, keep=True, **form).sum()
    with Operations() as seen:
        torch.autograd.grad(loss, (x, w))
    assert "mm" in seen.names and not {n for n in seen.names if n.startswith(("zeros", "new_zeros"))}


def test_options_cost_nothing_where_they_are_off():
    with Operations() as seen:
        kernels(torch.float32, False, 128, *module._form("", 0.0, 0.0, None, 1000))
    over_logits = ["mm", "amax", "_softmax", "amax", "mm", "_softmax", "mul", "mm", "mm"]
    other = set(seen.names) - set(over_logits)
    assert [n for n in seen.names if n in over_logits and n != "mul"] == [n for n in over_logits if n != "mul"]
    assert not other & {"tanh_", "sum", "addcmul", "div_", "square_"}
    with Operations() as forward:
        linear(*inputs())
    with Operations() as penalised:
        linear(*inputs(), z_loss=0.1)
    more = penalised.names.copy()
    for name in forward.names:
        more.remove(name)
    assert set(more) <= {"pow", "mul", "add"} and len(more) == 3  # over tokens, not over logits


# `sh`

V, E, S = 16, 8, 8
SPEC = dict(
    table=Param((V, E), "vocab embed", Normal(0.7), over="batch seq"),
    head=Param((E, V), "embed vocab", Normal(0.7), over="batch seq"),
)


def program(params, batch, sh, form, declared=True):
    p = sh.use(params, SPEC)
    x = embedding(p["table"], batch["tokens"], sh=sh, vocab_size=V)
    region = " | vocab" if declared else ""
    h = sh(x, "batch seq* embed -> batch seq embed" + region)
    fused = linear_cross_entropy(h, p["head"], batch["labels"], sh=sh, chunk=3, vocab_size=V, **form)
    logits = sh.dot(h, p["table"], "batch seq embed, vocab embed -> batch seq vocab")
    # the size of the vocabulary is then that of equal shards
    return sh.sum(fused + 0.3 * cross_entropy(logits, batch["labels"], sh=sh, **form), "batch seq ->")


def sharded_data():
    labels = torch.randint(V, (4, S))
    labels[0, 3] = labels[2, 7] = -100
    batch = dict(tokens=torch.randint(V, (4, S)), labels=labels)
    one = Sharding(precision=Precision(params=DOUBLE))
    return init(SPEC, random.key(0), sh=one), init(SPEC, random.key(1), sh=one), batch


def derivatives(f, params, vector, sh):
    flat = [w.detach().requires_grad_() for w in tree.leaves(sh.local(params))]
    loss = f(tree.like(params, flat))
    grads = torch.autograd.grad(loss, flat, create_graph=True)
    along = 0.0
    for g, v, p in zip(grads, tree.leaves(sh.local(vector)), tree.leaves(SPEC), strict=True):
        along = along + sh((g * v).sum(), **{a: ("P", "I") for a in sh.held_by(p)})
    return loss.detach(), [g.detach() for g in grads], torch.autograd.grad(along, flat)


@pytest.mark.parametrize(
    "axes, rows",
    [
        ("tp=4", dict(vocab="tp")),
        ("dp=2,tp=2", {"batch": "dp", "vocab": "tp", "seq*": "tp"}),
        ("dp=2,tp=2", dict(vocab=("tp", "dp"))),
        ("dp=2", dict(batch="dp")),
    ],
)
@forms
def test_of_a_sharded_vocabulary_is_that_of_the_whole(axes, rows, form):
    """Loss, gradients and a Hessian-vector product, against torch's own cross-entropy of whole logits."""
    params, vector, batch = sharded_data()

    def whole(p):
        x = functional.embedding(batch["tokens"], p["table"])
        fused = reference(x @ p["head"], batch["labels"], **form)
        return (fused + 0.3 * reference(x @ p["table"].t(), batch["labels"], **form)).sum()

    want = derivatives(whole, params, vector, Sharding(precision=Precision(params=DOUBLE)))
    with simulate(math.prod(parse_axes(axes).values())):
        mesh = make_mesh(axes, device="cpu")
        free = dict.fromkeys(("embed", "batch", "seq", "vocab"))
        sh = Sharding(mesh, Rules({**free, **rows}), precision=Precision(params=DOUBLE))
        local = {n: sh.shard(everywhere(mesh, x), "batch seq") for n, x in batch.items()}
        placed = [{n: sh.shard_param(everywhere(mesh, w), SPEC[n]) for n, w in t.items()} for t in (params, vector)]
        got = derivatives(lambda p: program(p, local, sh, form), *placed, sh)
        for x in per_rank(got[0]):
            torch.testing.assert_close(x, want[0], rtol=1e-12, atol=0)
        for mine, theirs in zip(got[1:], want[1:], strict=True):
            for g, r, p in zip(mine, theirs, tree.leaves(SPEC), strict=True):
                r = sh.local(sh.shard_param(everywhere(mesh, r.detach()), p))
                for a, b in zip(per_rank(g.detach()), per_rank(r), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@forms
def test_checking_mode(form):
    params, _, batch = sharded_data()
    rules = Rules({"embed": None, **{n: "x" for n in ("batch", "seq", "seq*", "vocab")}})
    check(lambda *a: program(*a, form), SPEC, params, batch, rules)
    with pytest.raises(ValueError, match="vocab"):
        check(lambda *a: program(*a, form, declared=False), SPEC, params, batch, rules)


def test_bad_input():
    x, w, labels = inputs()
    for bad in (dict(label_smoothing=-0.1), dict(label_smoothing=1.1), dict(z_loss=-1e-4), dict(softcap=0.0)):
        ((name, value),) = bad.items()
        with pytest.raises(UserError, match=rf"^linear_cross_entropy\({name}={value}\)"):
            linear_cross_entropy(x, w, labels, **bad)
        with pytest.raises(UserError, match=rf"^cross_entropy\({name}={value}\)"):
            cross_entropy(x @ w, labels, **bad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 2e-3)])
@pytest.mark.parametrize("form", [*FORMS.values(), {}], ids=[*FORMS, "plain"])
@pytest.mark.parametrize("vocab", [1000, 1001])  # 1001: filled up
def test_on_cuda(form, vocab, dtype, tolerance):
    x, w = (t.to("cuda", dtype).requires_grad_() for t in (torch.randn(2, 300, 64), torch.randn(vocab, 64) * 0.2))
    labels = torch.randint(vocab, (2, 300), device="cuda")
    labels[0, :7] = -100
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    ours = linear(x, w, labels, tied=True, chunk=128, **form)
    theirs = reference(exact[0] @ exact[1].t(), labels, **form)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3)
    g = torch.rand_like(ours)
    got, want = torch.autograd.grad(ours, (x, w), g), torch.autograd.grad(theirs, exact, g.double())
    logits = (x @ w.t()).detach().requires_grad_()
    whole = logits.detach().double().requires_grad_()
    got += torch.autograd.grad(cross_entropy(logits, labels, **form), logits, g)
    want += torch.autograd.grad(reference(whole, labels, **form), whole, g.double())
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() < tolerance * b.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@forms
def test_memory_on_cuda(form):
    """Far from the size of the logits, which would be 2 GiB in fp32; a chunk has 16 MiB."""
    x, w = (torch.randn(16384, n, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (64, 64))
    x, labels = x[None], torch.randint(32768, (1, 16384), device="cuda")
    w = torch.randn(32768, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    x[:, :128] @ w.t()  # cuBLAS takes its workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(linear(x, w, labels, tied=True, chunk=128, keep=False, **form).sum(), (x, w))
    chunk = 128 * 32768 * 4
    assert torch.cuda.max_memory_allocated() - before < 3.5 * chunk + 3 * w.numel() * 4 + 2 * x.nbytes
