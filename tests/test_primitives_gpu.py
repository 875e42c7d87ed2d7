"""The CUDA kernels behind the primitives, against float64 on the same device."""

import pytest
import torch
from torch.nn import functional

from fmegatron.primitives import attention, cu_seqlens_of, embedding, linear_cross_entropy, rms_norm
from tests.test_primitives_attention import inputs, order, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-3, torch.float64: 1e-12}


def on_gpu(tensors, dtype):
    return [t.detach().to("cuda", dtype).requires_grad_() for t in tensors]


def near(got, want, dtype):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() < TOLERANCE[dtype] * b.norm()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("queries, keys, head", [(65, 65, 64), (65, 65, 20), (640, 640, 64), (3, 40, 64), (1, 40, 128)])
@pytest.mark.parametrize("mask", ["causal", "full", "segments", "cu_seqlens", "positions"])
def test_attention(dtype, queries, keys, head, mask):
    if queries != keys and mask not in ("causal", "full"):
        pytest.skip("needs as many keys as queries here")
    torch.manual_seed(0)
    args = on_gpu(inputs(queries=queries, keys=keys, head=head), dtype)
    exact = [a.detach().double().requires_grad_() for a in args]
    segments = (torch.arange(queries, device="cuda") // 13)[None].expand(2, -1).contiguous()
    at = torch.arange(queries, device="cuda").flip(0)
    given = {
        "causal": {},
        "full": dict(causal=False),
        "segments": dict(segments=segments),
        "cu_seqlens": dict(cu_seqlens=cu_seqlens_of(segments, 150)),
        "positions": dict(positions=at),
    }[mask]
    seen = order(queries, keys).cuda()[None]
    if mask == "full":
        seen = torch.ones_like(seen)
    if mask in ("segments", "cu_seqlens"):
        seen = seen & (segments[:, :, None] == segments[:, None])
    if mask == "positions":
        seen = (at[:, None] >= at)[None]
    ours, theirs = attention(*args, **given), reference(*exact, seen)
    g = torch.randn_like(ours)
    near([ours, *torch.autograd.grad(ours, args, g)], [theirs, *torch.autograd.grad(theirs, exact, g.double())], dtype)


def test_mapped_attention_of_documents_by_starts():
    q, k, v = on_gpu(inputs(queries=65, head=64), torch.bfloat16)
    starts = cu_seqlens_of((torch.arange(65, device="cuda") // 13)[None].expand(2, -1).contiguous())
    stacked = torch.stack([q, 2 * q, -q])
    got = torch.func.vmap(lambda q: attention(q, k, v, cu_seqlens=starts))(stacked)
    want = torch.stack([attention(t, k, v, cu_seqlens=starts) for t in stacked])
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mask", ["causal", "full", "segments"])
def test_memory_of_long_sequences_is_linear(mask):
    def peak(seq):
        q, k, v = on_gpu(inputs(batch=1, queries=seq, kv=4, group=2, head=64), torch.bfloat16)
        segments = (torch.arange(seq, device="cuda") // 3000)[None] if mask == "segments" else None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(attention(q, k, v, causal=mask != "full", segments=segments).sum(), (q, k, v))
        return torch.cuda.max_memory_allocated() - before

    assert peak(16384) < 2.1 * peak(8192)


def test_linear_cross_entropy():
    torch.manual_seed(0)
    x, w = on_gpu([torch.randn(2, 300, 64), torch.randn(1000, 64) * 0.2], torch.bfloat16)
    labels = torch.randint(1000, (2, 300), device="cuda")
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    tied = "batch seq embed, vocab embed -> batch seq vocab"
    ours = linear_cross_entropy(x, w, labels, equation=tied, chunk=128)
    theirs = functional.cross_entropy((exact[0] @ exact[1].t()).transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    g = torch.rand_like(ours)
    near(torch.autograd.grad(ours, (x, w), g), torch.autograd.grad(theirs, exact, g.double()), torch.bfloat16)


def test_rms_norm_and_embedding():
    torch.manual_seed(0)
    x, w = on_gpu([torch.randn(7, 96), torch.rand(96)], torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    ours, theirs = rms_norm(x, w), functional.rms_norm(exact[0], (96,), exact[1], 1e-6)
    g = torch.randn_like(ours)
    near(
        [ours, *torch.autograd.grad(ours, (x, w), g)],
        [theirs, *torch.autograd.grad(theirs, exact, g.double())],
        torch.bfloat16,
    )
    (table,), tokens = on_gpu([torch.randn(50, 8)], torch.bfloat16), torch.randint(50, (4, 5000), device="cuda")
    g = torch.randn(4, 5000, 8, device="cuda", dtype=torch.bfloat16)
    first, second = (torch.autograd.grad(embedding(table, tokens), table, g)[0] for _ in range(2))
    assert torch.equal(first, second)
