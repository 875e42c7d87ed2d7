"""Attention: every mask against plain softmax in float64, derivatives, and the bytes that it keeps."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

from fmegatron.errors import UserError
from fmegatron.primitives import attention, cu_seqlens_of, segments_of
from fmegatron.primitives.attention import blocks, cpu, cuda
from fmegatron.primitives.attention.mask import Mask
from tests.test_primitives import saved_bytes

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def inputs(batch=2, queries=7, keys=None, kv=2, group=3, head=5, dtype=DOUBLE):
    keys = queries if keys is None else keys
    shapes = (batch, queries, kv, group, head), (batch, keys, kv, head), (batch, keys, kv, head)
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


def reference(q, k, v, seen, scale=None):
    """Softmax over the seen keys with all scores at once; seen[batch query key]."""
    s = torch.einsum("bqngh,bknh->bngqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = s.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("bngqk,bknh->bqngh", p.nan_to_num(0.0), v)


def order(queries, keys):
    """Plain causal order, the last query at the last key."""
    return torch.arange(queries)[:, None] + keys - queries >= torch.arange(keys)


SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [4, 5, 5, 5, 5, 5, 9]])
POSITIONS = torch.tensor([0, 1, 5, 6, 2, 3, 4])
ROWS_OF_POSITIONS = torch.stack([POSITIONS, POSITIONS.flip(0)])
CASES = {
    "causal": (dict(), lambda: order(7, 7)[None]),
    "full": (dict(causal=False), lambda: torch.ones(1, 7, 7, dtype=torch.bool)),
    "scaled": (dict(scale=0.3), lambda: order(7, 7)[None]),
    "documents": (dict(segments=SEGMENTS), lambda: order(7, 7) & (SEGMENTS[:, :, None] == SEGMENTS[:, None])),
    "full documents": (
        dict(segments=SEGMENTS, causal=False),
        lambda: SEGMENTS[:, :, None] == SEGMENTS[:, None],
    ),
    "cu_seqlens": (
        dict(cu_seqlens=torch.tensor([0, 3, 5, 8, 13, 14, 14], dtype=torch.int32)),
        lambda: order(7, 7) & (SEGMENTS[:, :, None] == SEGMENTS[:, None]),
    ),
    "positions": (dict(positions=POSITIONS), lambda: (POSITIONS[:, None] >= POSITIONS)[None]),
    "positions by row, documents": (
        dict(positions=ROWS_OF_POSITIONS, segments=SEGMENTS),
        lambda: (
            (ROWS_OF_POSITIONS[:, :, None] >= ROWS_OF_POSITIONS[:, None]) & (SEGMENTS[:, :, None] == SEGMENTS[:, None])
        ),
    ),
}


def assert_same(ours, theirs, args, rtol=1e-13):
    """One function, one gradient."""
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol)
    g = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad(ours, args, g), torch.autograd.grad(theirs, args, g), rtol=10 * rtol, atol=10 * rtol
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", [256, 3])
def test_every_mask(case, block, monkeypatch):
    monkeypatch.setattr(cpu, "CPU_BLOCK", block)
    args, (given, seen) = inputs(), CASES[case]
    assert_same(attention(*args, **given), reference(*args, seen(), given.get("scale")), args)


def in_plain_operations(monkeypatch):
    """What other devices run."""
    monkeypatch.setattr(cpu, "forward", lambda *a: blocks.forward(*a, None))
    monkeypatch.setattr(
        cpu, "backward", lambda q, k, v, mask, scale, *a: blocks.backward(q, k, v, mask, scale, None, *a, None)
    )


@pytest.mark.parametrize("case", CASES)
def test_plain_operations_give_the_same(case, monkeypatch):
    """In blocks of two queries."""
    args, (given, seen) = inputs(), CASES[case]
    in_plain_operations(monkeypatch)
    monkeypatch.setattr(blocks, "CPU_BLOCK_ELEMENTS", 2 * 2 * 6 * 7)
    assert_same(attention(*args, **given), reference(*args, seen(), given.get("scale")), args)


@pytest.mark.parametrize("case", ["causal", "full documents", "positions by row, documents"])
def test_derivatives(case, monkeypatch):
    monkeypatch.setattr(blocks, "CPU_BLOCK_ELEMENTS", 2 * 2 * 6 * 7)
    given = CASES[case][0]
    args = inputs(group=2, head=2)

    def f(q, k, v):
        return attention(q, k, v, **given)

    assert gradcheck(f, args, fast_mode=True)
    assert gradgradcheck(f, args, fast_mode=True)


def test_second_derivatives_equal_those_of_the_reference():
    args, given, seen = inputs(), CASES["documents"][0], CASES["documents"][1]()
    vectors = [torch.randn_like(a) for a in args]

    def hessian_vector(f):
        grads = torch.autograd.grad((f(*args) ** 2).sum(), args, create_graph=True)
        return torch.autograd.grad(sum((g * v).sum() for g, v in zip(grads, vectors, strict=True)), args)

    ours = hessian_vector(lambda *a: attention(*a, **given))
    theirs = hessian_vector(lambda *a: reference(*a, seen))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_queries_behind_a_cache(queries, causal):
    args = inputs(queries=queries, keys=9)
    seen = order(queries, 9)[None] if causal else torch.ones(1, queries, 9, dtype=torch.bool)
    assert_same(attention(*args, causal=causal), reference(*args, seen), args)
    at, kv_at = torch.arange(9 - queries, 9), torch.arange(9)
    if causal:
        assert_same(attention(*args, positions=at, kv_positions=kv_at), reference(*args, seen), args)


def test_prompts_of_unequal_length_in_one_cache():
    """Row 0 has two slots of padding in front: its keys carry another document's number."""
    args = inputs(queries=2, keys=6)
    kv_segments = torch.tensor([[-1, -1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    segments = torch.zeros(2, 2, dtype=torch.int64)
    seen = order(2, 6) & (kv_segments == 0)[:, None]
    assert_same(attention(*args, segments=segments, kv_segments=kv_segments), reference(*args, seen), args)


@pytest.mark.parametrize("form", [{}, dict(causal=False), dict(window=2)])
def test_documents_of_the_keys_alone(form):
    """A query's document is that of the key at its position; without positions, of the last keys."""
    args, kv_segments = inputs(queries=4, keys=7), SEGMENTS
    for given in ({}, dict(positions=torch.tensor([1, 2, 5, 6]), kv_positions=torch.arange(7))):
        held = given.get("positions", torch.arange(3, 7))
        rows = torch.stack([held, held])
        both = dict(given, segments=kv_segments[:, held], kv_segments=kv_segments, **form)
        alone = dict(given, kv_segments=kv_segments, **form)
        assert_same(attention(*args, **alone), attention(*args, **both), args)
        if "positions" in given:
            by_row = dict(positions=rows, kv_positions=torch.arange(7), kv_segments=kv_segments, **form)
            assert_same(attention(*args, **by_row), attention(*args, **both), args)
    second = [torch.autograd.grad((attention(*args, **m) ** 3).sum(), args, create_graph=True) for m in (alone, both)]
    again = [torch.autograd.grad(sum((g**2).sum() for g in grads), args) for grads in second]
    torch.testing.assert_close(*again, rtol=1e-12, atol=1e-12)


def test_which_masks_the_cuda_kernels_take():
    """Decided by sizes, and by positions on the CPU; nothing runs on a GPU here."""
    q = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(2, 8, 2, 2, 16))
    wide = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, shape=(2, 8, 2, 2, 16))
    segments, other = torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64)
    at, keys = torch.tensor([4, 5, 6, 7, 24, 25, 26, 27]), torch.arange(32)
    documents = (torch.arange(32) // 5).expand(2, 32)

    def taken(*mask, q=q, **more):
        found = cuda.calls(q, Mask(*mask, **more))
        return None if found is None else [(c.rows, c.columns) for c in found]

    whole = [(slice(0, 8), slice(0, 8))]
    assert taken(8, 8, True) == taken(8, 8, False) == taken(8, 8, True, segments=segments) == whole
    assert taken(8, 8, True, q=wide) is None
    # documents of keys that may be others than the queries' at their place
    assert taken(8, 8, True, segments=segments, kv_segments=other) is None
    assert taken(8, 32, True, segments=segments, kv_segments=documents) is None
    # queries behind a cache: the last keys' documents; where keys behind a query are seen, documents go on
    assert taken(8, 32, True, kv_segments=documents) == [(slice(0, 8), slice(0, 32))]
    assert taken(8, 32, False, kv_segments=documents) is None
    # runs of positions over keys in order
    runs = dict(positions=at, kv_positions=keys)
    assert taken(8, 32, True, **runs) == [(slice(0, 4), slice(0, 8)), (slice(4, 8), slice(0, 28))]
    assert taken(8, 32, True, 3, **runs) == [(slice(0, 4), slice(2, 8)), (slice(4, 8), slice(22, 28))]
    assert taken(8, 32, True, **runs, kv_segments=documents) == taken(8, 32, True, **runs)
    assert taken(8, 32, True, **runs, segments=segments, kv_segments=documents) is None
    assert taken(8, 32, False, 9, **runs) is None
    assert taken(8, 32, True, positions=at, kv_positions=keys.flip(0)) is None
    assert taken(8, 32, True, positions=at.flip(0), kv_positions=keys) is None  # eight runs
    assert taken(8, 32, True, positions=at - 5, kv_positions=keys) is None  # what fills up a part
    assert taken(8, 32, True, positions=at.expand(2, 8), kv_positions=keys) is None
    for c in cuda.calls(q, Mask(8, 32, True, 3, **runs, kv_segments=documents)):
        assert torch.equal(c.mask.kv_segments, documents[:, c.columns])
        assert torch.equal(c.mask.segments, documents[:, at[c.rows]])
        starts, kv_starts = cuda._document_starts(c.mask, None)
        sizes, kv_sizes = starts.diff(), kv_starts.diff()
        assert sizes.sum() == 2 * 4 and kv_sizes.sum() == 2 * (c.columns.stop - c.columns.start)
        expected = [(documents[b, at[c.rows]] == d).sum() for b in range(2) for d in c.mask.kv_segments[b].unique()]
        assert sizes.tolist() == expected


def test_a_query_that_sees_no_key_gives_zeros():
    args = inputs(queries=3, keys=2)
    o = attention(*args)  # the first query stands before the first key
    assert torch.equal(o[:, 0], torch.zeros_like(o[:, 0]))
    assert_same(o, reference(*args, order(3, 2)[None]), args)
    grads = torch.autograd.grad((attention(*args) ** 2).sum(), args, create_graph=True)
    assert all(g.isfinite().all() for g in torch.autograd.grad(sum(g.sum() for g in grads), args))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_lower_precision(dtype, tolerance):
    args = inputs(dtype=dtype)
    exact = [a.detach().double().requires_grad_() for a in args]
    for given, seen in (CASES["causal"], CASES["documents"]):
        ours, theirs = attention(*args, **given), reference(*exact, seen())
        g = torch.randn_like(ours)
        results = [ours, *torch.autograd.grad(ours, args, g)]
        for a, b in zip(results, [theirs, *torch.autograd.grad(theirs, exact, g.double())], strict=True):
            assert a.dtype == dtype
            assert (a.double() - b).norm() < tolerance * b.norm()


def test_equals_torch_with_grouped_heads():
    q, k, v = inputs(queries=33, head=16, dtype=torch.float32)
    theirs = functional.scaled_dot_product_attention(
        q.flatten(2, 3).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(attention(q, k, v).flatten(2, 3).transpose(1, 2), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["causal", "full", "documents", "positions"])
def test_memory_is_linear(case):
    """Kept for backward: q, k, v, the output, one number per query and head, and the masks."""

    def kept(seq):
        args = inputs(batch=1, queries=seq, kv=2, group=2, head=8, dtype=torch.float32)
        given = {
            "causal": {},
            "full": dict(causal=False),
            "documents": dict(segments=(torch.arange(seq) // 50)[None]),
            "positions": dict(positions=torch.arange(seq).flip(0)),
        }[case]
        size, _ = saved_bytes(lambda: attention(*args, **given))
        return size

    heads = 4 * 8 + 2 * 2 * 8 + 4 * 8 + 4
    mask = 0 if case in ("causal", "full") else 8
    assert kept(64) == 64 * (4 * heads + mask)
    assert kept(512) == 512 * (4 * heads + mask)


def test_outputs_saved_by_name():
    """A tape gets output and log-sum-exp; with them the computation is skipped, the gradient the same."""

    class Tape:
        def __init__(self, saved=None):
            self.saved, self.kept = saved, None

        def enter(self, name, w=None):
            assert name == "attention"
            return w, self.saved

        def leave(self, name, outs, *_):
            self.kept = [o.detach() for o in outs]
            return outs

    class Sh:
        check = mesh = None

        def __init__(self, tape):
            self.tape = tape

        def primitive(self, f, args, sides, out):
            return f(*args)

    args = inputs()
    first = Tape()
    y = attention(*args, sh=Sh(first))
    again = attention(*args, sh=Sh(Tape([t.clone() for t in first.kept])))
    assert torch.equal(again, y)
    g = torch.randn_like(y)
    assert all(map(torch.equal, torch.autograd.grad(again, args, g), torch.autograd.grad(y, args, g)))
    wrong = attention(*args, sh=Sh(Tape([torch.zeros_like(t) for t in first.kept])))
    assert not wrong.any()  # nothing was computed


def test_documents_by_starts():
    segments = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 2, 3, 3]])
    starts = torch.tensor([0, 2, 5, 7, 8, 10], dtype=torch.int32)
    assert torch.equal(cu_seqlens_of(segments), starts)
    padded = torch.cat([starts, starts.new_full((3,), 10)])
    assert torch.equal(cu_seqlens_of(segments, documents=8), padded)
    for cu in (starts, padded):
        again = segments_of(cu, 2, 5)
        assert torch.equal(again[:, 1:] != again[:, :-1], segments[:, 1:] != segments[:, :-1])


def test_bad_input():
    q, k, v = inputs()
    for args, given, says in (
        ((q.flatten(2, 3), k, v), {}, "q has 4 dims"),
        ((q, k[:, :, :1], v[:, :, :1]), {}, "disagree"),
        ((q, k[:, :3], v[:, :3]), dict(segments=SEGMENTS), "kv_segments must be given"),
        ((q, k[:, :3], v[:, :3]), dict(positions=POSITIONS), "kv_positions must be given"),
        ((q, k, v), dict(kv_positions=POSITIONS), "together"),
    ):
        with pytest.raises(UserError, match=says):
            attention(*args, **given)


def test_mapped_masks():
    """vmap over what decides the mask, and over keys alone."""
    q, k, v = inputs()
    positions = torch.stack([POSITIONS, POSITIONS.flip(0), torch.arange(7)])
    got = torch.func.vmap(lambda p: attention(q, k, v, positions=p))(positions)
    want = torch.stack([attention(q, k, v, positions=p) for p in positions])
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
    segments = torch.stack([SEGMENTS, SEGMENTS.flip(0)])
    keys = torch.stack([k, 2 * k]).movedim(0, 2)
    got = torch.func.vmap(lambda s, k: attention(q, k, v, segments=s), in_dims=(0, 2))(segments, keys)
    want = torch.stack([attention(q, f * k, v, segments=s) for s, f in zip(segments, (1, 2), strict=True)])
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
