"""Cross-entropy with and without the last product, against torch; on sharded vocabularies against one device."""

import sys

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fmegatron.errors import UserError
from fmegatron.primitives import cross_entropy, linear_cross_entropy
from tests.test_primitives import saved_bytes

DOUBLE = torch.float64
TIED = "batch seq embed, vocab embed -> batch seq vocab"
module = sys.modules["fmegatron.primitives.cross_entropy"]


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def inputs(tied=False, batch=2, seq=5, embed=4, vocab=11, dtype=DOUBLE):
    x = torch.randn(batch, seq, embed, dtype=dtype, requires_grad=True)
    w = torch.randn((vocab, embed) if tied else (embed, vocab), dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab, (batch, seq))
    labels[0, 2] = labels[1, 4] = -100
    return x, w, labels


def reference(logits, labels, ignore_index=-100):
    logits, flat = logits.flatten(0, -2), labels.flatten()
    loss = functional.cross_entropy(logits, flat, reduction="none", ignore_index=ignore_index)
    return loss.view(labels.shape)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [None, 1, 3, 10, 64])
def test_linear_equals_torch(tied, chunk):
    x, w, labels = inputs(tied)
    ours = linear_cross_entropy(x, w, labels, chunk=chunk, **(dict(equation=TIED) if tied else {}))
    theirs = reference(x @ (w.t() if tied else w), labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)
    assert ours[0, 2] == 0 and ours[1, 4] == 0
    g = torch.rand(2, 5, dtype=DOUBLE)  # each token has a weight of its own
    torch.testing.assert_close(
        torch.autograd.grad(ours, (x, w), g), torch.autograd.grad(theirs, (x, w), g), rtol=1e-13, atol=1e-14
    )


@pytest.mark.parametrize("tied", [False, True])
def test_linear_derivatives(tied):
    x, w, labels = inputs(tied)

    def f(x, w):
        return linear_cross_entropy(x, w, labels, chunk=3, **(dict(equation=TIED) if tied else {}))

    assert gradcheck(f, (x, w)) and gradgradcheck(f, (x, w))
    # frozen arguments
    only_x = torch.autograd.grad(f(x, w.detach()).sum(), x)[0]
    only_w = torch.autograd.grad(f(x.detach(), w).sum(), w)[0]
    both = torch.autograd.grad(f(x, w).sum(), (x, w))
    assert torch.equal(only_x, both[0]) and torch.equal(only_w, both[1])


def test_of_logits_equals_torch():
    logits = torch.randn(2, 5, 11, dtype=DOUBLE, requires_grad=True)
    labels = inputs()[2]
    ours, theirs = cross_entropy(logits, labels), reference(logits, labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)
    g = torch.rand(2, 5, dtype=DOUBLE)
    torch.testing.assert_close(
        torch.autograd.grad(ours, logits, g), torch.autograd.grad(theirs, logits, g), rtol=1e-13, atol=1e-14
    )
    assert gradcheck(lambda t: cross_entropy(t, labels), logits)
    assert gradgradcheck(lambda t: cross_entropy(t, labels), logits)


def test_all_labels_ignored():
    x, w, labels = inputs()
    loss = linear_cross_entropy(x, w, labels.fill_(7), ignore_index=7)
    assert not loss.any()
    assert all(not g.any() for g in torch.autograd.grad(loss.sum(), (x, w)))
    assert not cross_entropy(x @ w, labels, ignore_index=7).any()


def test_large_logits():
    x, w, labels = inputs()
    ours, theirs = linear_cross_entropy(x * 1e4, w, labels), reference(x * 1e4 @ w, labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-9)
    assert all(g.isfinite().all() for g in torch.autograd.grad(ours.sum(), (x, w)))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_statistics_are_wide(dtype, tolerance):
    x, w, labels = inputs(embed=32, vocab=50, dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    ours, theirs = linear_cross_entropy(x, w, labels, chunk=4), reference(exact[0] @ exact[1], labels)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)  # in bf16 too: logits are never rounded
    g = torch.rand_like(ours)
    grads = torch.autograd.grad(ours, (x, w), g), torch.autograd.grad(theirs, exact, g.double())
    for a, b in zip(*grads, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() < tolerance * b.norm()


def test_keeps_no_logits():
    x, w, labels = inputs(seq=64, embed=8, vocab=1000, dtype=torch.float32)
    size, loss = saved_bytes(lambda: linear_cross_entropy(x, w, labels, chunk=16))
    tokens, mask = 2 * 64, 1
    assert size == x.nbytes + w.nbytes + labels.nbytes + tokens * mask


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple) else (out,):
            self.elements = max(self.elements, t.numel() if isinstance(t, torch.Tensor) else 0)
        return out


def test_never_more_than_a_chunk_of_logits():
    x, w, labels = inputs(seq=64, embed=2, vocab=1000, dtype=torch.float32)
    kernels = module._linear_statistics_op.__wrapped__, module._linear_statistics_backward_op.__wrapped__
    flat = x.detach().flatten(0, 1), w.detach(), labels.flatten().clamp(min=0), None
    options = False, 16, None, 1.0, 0.0
    with Largest() as largest:
        lse, _, _ = kernels[0](*flat, *options, False, False)
        kernels[1](*flat, torch.ones_like(lse), torch.ones_like(lse), None, *options, True, True, False)
    assert largest.elements == 16 * 1000


def test_bad_input():
    x, w, labels = inputs()
    with pytest.raises(UserError, match="vocab embed"):
        linear_cross_entropy(x, w, labels, equation="batch seq embed, embed out -> batch seq out")
    with pytest.raises(UserError, match="disagree"):
        linear_cross_entropy(x, w.t(), labels)
    with pytest.raises(UserError, match="chunk=0"):
        linear_cross_entropy(x, w, labels, chunk=0)
    with pytest.raises(UserError, match="disagree"):
        cross_entropy(x @ w, labels[:, :3])
