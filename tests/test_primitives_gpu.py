"""The CUDA kernels behind the primitives, against float64 on the same device."""

import pytest
import torch
from torch.nn import functional

from fmegatron.primitives import attention, cu_seqlens_of, embedding, linear_cross_entropy, rms_norm
from fmegatron.primitives.attention import blocks
from fmegatron.primitives.attention.mask import Mask
from tests.test_primitives_attention import inputs, order, reference
from tests.test_primitives_attention_forms import forms_inputs, within
from tests.test_primitives_attention_forms import reference as reference_of_forms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-3, torch.float64: 1e-12}


def on_gpu(tensors, dtype):
    return [t.detach().to("cuda", dtype).requires_grad_() for t in tensors]


def near(got, want, dtype, slack=1):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() < slack * TOLERANCE[dtype] * b.norm()


def with_masks(*shapes):
    """Each shape (queries, keys, head) with every mask; behind a cache of keys, with those that need no more."""
    every, few = ("causal", "full", "segments", "cu_seqlens", "positions"), ("causal", "full")
    return pytest.mark.parametrize(
        "queries, keys, head, mask", [(q, k, h, m) for q, k, h in shapes for m in (every if q == k else few)]
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@with_masks((65, 65, 64), (65, 65, 20), (640, 640, 64), (3, 40, 64), (1, 40, 128))
def test_attention(dtype, queries, keys, head, mask):
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@with_masks((65, 65, 20), (640, 640, 64), (3, 200, 64), (1, 200, 128))
@pytest.mark.parametrize(
    "window, softcap, sinks",
    [
        (40, None, False),
        (1, None, True),
        (5000, None, False),
        (None, None, True),
        (40, None, True),
        (None, 2.0, False),
        (40, 2.0, True),
    ],
)
def test_forms_of_attention(dtype, queries, keys, head, mask, window, softcap, sinks):
    torch.manual_seed(0)
    args = on_gpu(forms_inputs(sinks, queries=queries, keys=keys, head=head), dtype)
    exact = [a.detach().double().requires_grad_() for a in args]
    segments = (torch.arange(queries, device="cuda") // 50)[None].expand(2, -1).contiguous()
    at, kv_at = torch.arange(keys - queries, keys, device="cuda")[None], torch.arange(keys, device="cuda")[None]
    given, together = {}, True
    if mask == "full":
        given = dict(causal=False)
    if mask in ("segments", "cu_seqlens"):
        given = {mask: segments if mask == "segments" else cu_seqlens_of(segments, 150)}
        together = segments[:, :, None] == segments[:, None]
    if mask == "positions":
        at = kv_at = kv_at.flip(1)
        given = dict(positions=at[0])
    seen = within(at, kv_at, mask != "full", window) & together
    form = dict(sinks=args[3] if sinks else None, window=window, softcap=softcap)
    ours = attention(*args[:3], **form, **given)
    theirs = reference_of_forms(*exact, seen=seen, softcap=softcap)
    g = torch.randn_like(ours)
    got, want = torch.autograd.grad(ours, args, g), torch.autograd.grad(theirs, exact, g.double())
    # With one key, the gradient of its score is the small difference of go v and go o, and o is rounded.
    slack = 5 if window == 1 else 1
    near([ours, *got[:3]], [theirs, *want[:3]], dtype, slack)
    near(got[3:], want[3:], dtype, max(slack, 3))  # the sinks': a small difference of large sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window, softcap, by", [(None, 2.0, "order"), (40, 2.0, "order"), (None, None, "positions")])
def test_many_blocks_of_halves(monkeypatch, dtype, window, softcap, by):
    """At sizes of which all keys are in no block, and where queries see no key by positions."""
    torch.manual_seed(0)
    args = on_gpu(forms_inputs(queries=203, head=64), dtype)
    exact = [a.detach().double().requires_grad_() for a in args]
    at = kv_at = torch.arange(203, device="cuda")[None]
    given = {}
    if by == "positions":
        kv_at = torch.randperm(203, device="cuda")[None] + 20
        given = dict(positions=at[0], kv_positions=kv_at[0])
    seen = within(at, kv_at, True, window)
    monkeypatch.setattr(blocks, "HALF_BLOCK_BYTES", 1 << 17)
    assert len(list(blocks._half_blocks(args[0], Mask(203, 203, True, window), softcap))) > 3
    ours = attention(*args[:3], sinks=args[3], window=window, softcap=softcap, **given)
    theirs = reference_of_forms(*exact, seen=seen, softcap=softcap)
    g = torch.randn_like(ours)
    got, want = torch.autograd.grad(ours, args, g), torch.autograd.grad(theirs, exact, g.double())
    near([ours, *got[:3]], [theirs, *want[:3]], dtype)
    near(got[3:], want[3:], dtype, slack=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("documents", [None, 7, 50, 1000])
@pytest.mark.parametrize("window, sinks", [(None, False), (None, True), (40, False), (200, True)])
@pytest.mark.parametrize("place", [0, 2])
def test_runs_of_a_sequence(monkeypatch, dtype, documents, window, sinks, place):
    """Queries of two runs, as a rank holds them in zigzag order, run by run in the flash kernel."""
    torch.manual_seed(0)
    keys, part = 480, 60  # of 4 ranks
    args = on_gpu(forms_inputs(sinks, queries=2 * part, keys=keys, head=20), dtype)
    exact = [a.detach().double().requires_grad_() for a in args]
    at = torch.cat([torch.arange(part) + n * part for n in (place, 7 - place)])
    seen, given = within(at[None].cuda(), torch.arange(keys, device="cuda")[None], True, window), {}
    if documents is not None:
        rows = torch.stack([torch.arange(keys) // documents, (torch.arange(keys) + 30) // documents]).cuda()
        given, seen = dict(kv_segments=rows), seen & (rows[:, at, None] == rows[:, None])

    def never(*_):
        raise AssertionError("plain operations ran")

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "forward", never)
        patch.setattr(blocks, "backward", never)
        more = dict(sinks=args[3] if sinks else None, window=window, **given)
        ours = attention(*args[:3], positions=at, kv_positions=torch.arange(keys), **more)
        g = torch.randn_like(ours)
        got = torch.autograd.grad(ours, args, g)
    theirs = reference_of_forms(*exact, seen=seen)
    want = torch.autograd.grad(theirs, exact, g.double())
    near([ours, *got[:3]], [theirs, *want[:3]], dtype)
    near(got[3:], want[3:], dtype, slack=3)


def test_documents_behind_a_cache():
    """Queries that are the last of the keys, whose documents alone are given."""
    torch.manual_seed(0)
    args = on_gpu(inputs(queries=5, keys=70, head=64), torch.bfloat16)
    exact = [a.detach().double().requires_grad_() for a in args]
    kv_segments = torch.zeros(2, 70, dtype=torch.int64, device="cuda")
    kv_segments[0, :33] = -1
    seen = order(5, 70).cuda() & (kv_segments == 0)[:, None]
    ours, theirs = attention(*args, kv_segments=kv_segments), reference(*exact, seen)
    g = torch.randn_like(ours)
    got, want = torch.autograd.grad(ours, args, g), torch.autograd.grad(theirs, exact, g.double())
    near([ours, *got], [theirs, *want], torch.bfloat16)


def test_second_derivatives_of_forms():
    """The first order in the flash kernel, the second in plain operations."""
    torch.manual_seed(0)
    args = on_gpu(forms_inputs(queries=300, head=64), torch.bfloat16)
    exact = [a.detach().double().requires_grad_() for a in args]
    at = torch.arange(300, device="cuda")[None]
    seen = within(at, at, True, 40)

    def second(f, args):
        grads = torch.autograd.grad((f(*args).double() ** 3).sum(), args, create_graph=True)
        return torch.autograd.grad(sum((g.double() ** 2).sum() for g in grads), args)

    got = second(lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, window=40), args)
    want = second(lambda *a: reference_of_forms(*a, seen=seen), exact)
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() < 5e-2 * b.norm()


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("by", ["order", "positions"])
def test_memory_of_a_window_is_linear(softcap, by):
    def peak(seq):
        q, k, v, sinks = args = on_gpu(forms_inputs(batch=1, queries=seq, kv=4, group=2, head=64), torch.bfloat16)
        positions = torch.arange(seq, device="cuda") if by == "positions" else None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        o = attention(q, k, v, window=1024, softcap=softcap, sinks=sinks, positions=positions)
        torch.autograd.grad(o.sum(), args)
        return torch.cuda.max_memory_allocated() - before

    assert peak(32768) < 2.1 * peak(16384)


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
