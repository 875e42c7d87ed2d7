"""Triton's kernels behind the primitives: on a GPU, or (TRITON_INTERPRET=1) interpreted on the CPU, against float64; and
that `kernel=` chooses."""

import functools
import itertools

import pytest
import torch

from fmegatron import kernels
from fmegatron.errors import UserError
from fmegatron.primitives import (
    add_layer_norm,
    add_rms_norm,
    apply_rotary,
    apply_rotary_both,
    geglu,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    rotary_table,
    split_qkv,
    split_rotary,
    swiglu,
)

DEVICE = "cpu" if kernels.INTERPRETED else "cuda"
runs = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (kernels.INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"),
]
# the interpreter cuts bfloat16 off where a device rounds
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 2e-6}
ROWS = "batch seq embed, vocab embed -> batch seq vocab"


def draw(*shape, scale=1.0):
    return (scale * torch.randn(shape)).to(DEVICE)


def compare(f, args, dtype, slack=1):
    """f(kernel, *args) by Triton's kernels, with gradients, against torch's operations in float64."""
    args = [a.to(dtype).requires_grad_() for a in args]
    exact = [a.detach().double().requires_grad_() for a in args]
    found, right = (y if isinstance(y, tuple) else (y,) for y in (f("triton", *args), f("torch", *exact)))
    gs = [torch.randn_like(y) for y in found]
    found = [*found, *torch.autograd.grad(found, args, gs)]
    right = [*right, *torch.autograd.grad(right, exact, [g.double() for g in gs])]
    for i, (a, b) in enumerate(zip(found, right, strict=True)):
        assert a.shape == b.shape
        assert a.dtype == (dtype if i >= len(gs) else gs[i].dtype)
        assert (a.double() - b).norm() <= slack * TOLERANCE[dtype] * b.norm()


def each(*marks):
    return lambda test: functools.reduce(lambda t, mark: mark(t), [*runs, *marks], test)


dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


@each(dtypes, pytest.mark.parametrize("columns", [40, 300, 2048]))
@pytest.mark.parametrize("one_plus, wide", [(False, False), (True, True), (True, False), (False, True)])
def test_rms_norm(dtype, columns, one_plus, wide):
    torch.manual_seed(0)
    form = dict(zero_centred=one_plus, wide_weight=wide)
    x, y, w = draw(2, 5, columns), draw(2, 5, columns), draw(columns)
    compare(lambda kernel, x, w: rms_norm(x, w, kernel=kernel, **form), [x, w], dtype, 1.5)
    compare(lambda kernel, x, y, w: add_rms_norm(x, y, w, kernel=kernel, **form), [x, y, w], dtype, 1.5)
    compare(lambda kernel, x, w: add_rms_norm(x, None, w, kernel=kernel, **form), [x, w], dtype, 1.5)
    compare(lambda kernel, x: rms_norm(x, None, kernel=kernel), [x], dtype)


@each(dtypes)
def test_rms_norm_of_heads(dtype):
    torch.manual_seed(0)
    x = draw(3, 67, 4, 2, 16)
    compare(lambda kernel, x, w: rms_norm(x, w, kernel=kernel), [x, draw(16)], dtype)
    compare(lambda kernel, x, w: rms_norm(x[..., :1, :], w, kernel=kernel), [x, draw(16)], dtype)
    compare(lambda kernel, x, w: rms_norm(x, w, kernel=kernel), [x, draw(4, 2, 16)], dtype)


@each(dtypes, pytest.mark.parametrize("columns", [40, 300]))
def test_layer_norm(dtype, columns):
    torch.manual_seed(0)
    x, y, w, b = draw(70, columns), draw(70, columns), draw(columns), draw(columns)
    compare(lambda kernel, x, w, b: layer_norm(x, w, b, kernel=kernel), [x, w, b], dtype)
    compare(lambda kernel, x, w: layer_norm(x, w, kernel=kernel), [x, w], dtype)
    compare(lambda kernel, x: layer_norm(x, None, kernel=kernel), [x], dtype)
    compare(lambda kernel, x, y, w, b: add_layer_norm(x, y, w, b, kernel=kernel), [x, y, w, b], dtype)
    compare(lambda kernel, x, w, b: add_layer_norm(x, None, w, b, kernel=kernel), [x, w, b], dtype)


GATED = {"swiglu": swiglu, "geglu": geglu, "geglu tanh": functools.partial(geglu, approximate="tanh")}


@each(dtypes, pytest.mark.parametrize("name", GATED))
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_gated(dtype, name, scale):
    torch.manual_seed(0)
    f = GATED[name]
    compare(lambda kernel, g, u: f(g, u, kernel=kernel), [draw(3, 5, 300, scale=scale), draw(3, 5, 300)], dtype)
    compare(lambda kernel, both: f(both, kernel=kernel), [draw(3, 5, 2, 300, scale=scale)], dtype)
    compare(lambda kernel, both: f(both, dim=-1, kernel=kernel), [draw(3, 5, 300, 2, scale=scale)], dtype)
    compare(lambda kernel, both: f(*both.unbind(2), kernel=kernel), [draw(3, 5, 2, 140)], dtype)


@each(
    dtypes,
    pytest.mark.parametrize("by_row, dim, interleaved", list(itertools.product([0, 1], [16, 10], [False, True]))),
)
def test_rotary(dtype, by_row, dim, interleaved):
    torch.manual_seed(0)
    positions = torch.arange(14, device=DEVICE).view(2, 7) if by_row else torch.arange(7, device=DEVICE)
    tables = {t: rotary_table(positions, dim, dtype=t) for t in (torch.float32, torch.float64)}

    def one(kernel, q):
        table = tables[torch.promote_types(q.dtype, torch.float32)]
        return apply_rotary(q, *table, interleaved=interleaved, kernel=kernel)

    def both(kernel, q, k):
        table = tables[torch.promote_types(q.dtype, torch.float32)]
        return apply_rotary_both(q, k, *table, interleaved=interleaved, kernel=kernel)

    compare(one, [draw(2, 7, 3, 16)], dtype)
    compare(both, [draw(2, 7, 3, 4, 16), draw(2, 7, 3, 16)], dtype)
    compare(lambda kernel, y: both(kernel, y[:, :, :, :3], y[:, :, :, 3]), [draw(2, 7, 2, 5, 16)], dtype)

    def split(kernel, y):
        table = tables[torch.promote_types(y.dtype, torch.float32)]
        return split_rotary(y, *table, interleaved=interleaved, kernel=kernel)

    for group in (1, 3):
        compare(split, [draw(2, 7, 2, group + 2, 16)], dtype)

    y = draw(2, 7, 2, 3, 16).to(dtype)
    for back in (False, True):
        form = dict(interleaved=interleaved, back=back)
        q, k, v = kernels.rotary.turn(split_qkv(y), *tables[torch.float32], **form)
        turned = y.clone()
        kernels.rotary.turn_into(split_qkv(turned)[:2], split_qkv(turned)[:2], *tables[torch.float32], **form)
        assert torch.equal(turned, torch.stack([q[:, :, :, 0], k, v], 3))


FORMS = [{}, dict(label_smoothing=0.1), dict(z_loss=1e-2), dict(softcap=5.0)]
FORMS += [dict(softcap=5.0, label_smoothing=0.1, z_loss=0.01)]


@each(dtypes, pytest.mark.parametrize("form", FORMS, ids=str), pytest.mark.parametrize("keep", [False, True]))
@pytest.mark.parametrize("chunk", [4, 100])
def test_linear_cross_entropy(dtype, form, keep, chunk):
    if keep and form.keys() & {"softcap", "label_smoothing"}:
        pytest.skip("not kept")
    torch.manual_seed(0)
    labels = torch.randint(300, (2, 9), device=DEVICE)
    labels[0, 3] = -100
    options = dict(keep=keep, chunk=chunk, **form)
    x, w = draw(2, 9, 20), draw(300, 20)
    compare(
        lambda kernel, x, w: linear_cross_entropy(x, w, labels, equation=ROWS, kernel=kernel, **options), [x, w], dtype
    )
    compare(
        lambda kernel, x, w: linear_cross_entropy(x, w, labels, kernel=kernel, **options), [x, w.t().clone()], dtype
    )


# what needs neither


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("twice", [False, True])
def test_kept_probabilities_change_nothing(dtype, twice):
    """They are overwritten by the first backward: a second one of the same graph computes logits again."""
    torch.manual_seed(0)
    x, w, labels = torch.randn(2, 9, 20, dtype=dtype), torch.randn(20, 300, dtype=dtype), torch.randint(300, (2, 9))
    x, w = 3 * x, w.requires_grad_()  # so that some probabilities are almost 1
    labels[0, 3] = -100
    results = []
    for keep in (False, True):
        leaf = x.detach().requires_grad_()
        loss = linear_cross_entropy(leaf, w, labels, keep=keep, z_loss=0.01, chunk=4)
        g = torch.linspace(0.5, 2, 18, dtype=loss.dtype).view(2, 9)
        found = torch.autograd.grad(loss, [leaf, w], g, retain_graph=twice)
        if twice:
            found = torch.autograd.grad(loss, [leaf, w], g)
        results.append([loss, *found])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype] * b.norm()


def test_keep_and_forms():
    x, w, labels = torch.randn(1, 3, 4), torch.randn(4, 5), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(UserError, match="keep=True.*softcap"):
        linear_cross_entropy(x, w, labels, keep=True, softcap=3.0)
    assert torch.equal(linear_cross_entropy(x, w, labels, softcap=3.0), linear_cross_entropy(x, w, labels, softcap=3.0))


@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter takes tensors on the CPU")
def test_kernel_is_chosen_or_refused():
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4)
    assert not kernels.chosen("f", "auto", x) and not kernels.chosen("f", "torch", x)
    assert torch.equal(rms_norm(x, w, kernel="auto"), rms_norm(x, w, kernel="torch"))
    with pytest.raises(UserError, match=r"swiglu\(kernel=\"triton\"\)"):
        swiglu(x, x, kernel="triton")
    with pytest.raises(UserError, match='rms_norm.*use "auto"'):
        rms_norm(x, w, kernel="fast")


def test_sum_and_norm():
    torch.manual_seed(0)
    x, y, w, b = (torch.randn(s, dtype=torch.float64) for s in ((3, 8), (3, 8), (8,), (8,)))
    total, normed = add_rms_norm(x, y, w, eps=1e-5)
    assert torch.equal(total, x + y) and torch.equal(normed, rms_norm(x + y, w, eps=1e-5))
    total, normed = add_layer_norm(x, None, w, b)
    assert torch.equal(total, x) and torch.equal(normed, layer_norm(x, w, b))


def test_gate_and_up_in_one():
    both = torch.randn(3, 2, 8, dtype=torch.float64)
    assert torch.equal(swiglu(both), swiglu(*both.unbind(1)))
    with pytest.raises(UserError, match="no up"):
        swiglu(torch.randn(3, 8))
    with pytest.raises(UserError, match=r"no up: .*\[... mlp 2\] for dim=-1"):
        swiglu(both, dim=-1)
    with pytest.raises(UserError, match=r"swiglu\(dim=1\): give -2"):
        swiglu(both, dim=1)


def test_a_run_for_shapes_alone_starts_no_kernel(monkeypatch) -> None:
    """Its tensors have no memory: a kernel of ours would read what is at address 0 (an illegal access, and the end of the
    process)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fmegatron import kernels

    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    with FakeTensorMode():
        x = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16)
        assert not kernels.chosen("rms_norm", "auto", x)
        assert not kernels.chosen("rms_norm", "triton", x)
