"""Attention's window, soft cap and sinks, in every combination with masks, against softmax over all scores at once in
float64 and against transformers' eager functions."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from fmegatron import random, tree
from fmegatron.checking import check
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.initializers import Normal
from fmegatron.mesh import everywhere, make_mesh, parse_axes
from fmegatron.precision import Precision
from fmegatron.primitives import attention, cu_seqlens_of
from fmegatron.primitives.attention import blocks, cpu, mask
from fmegatron.primitives.attention.mask import Mask
from fmegatron.remat import names, nothing, remat
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import Param, init
from tests.test_primitives import saved_bytes
from tests.test_primitives_attention import (
    DOUBLE,
    POSITIONS,
    ROWS_OF_POSITIONS,
    SEGMENTS,
    assert_same,
    in_plain_operations,
    inputs,
)
from tests.test_primitives_transforms import transforms


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few queries, and of a few keys where positions and documents are looked at."""
    monkeypatch.setattr(cpu, "CPU_BLOCK", 2)
    monkeypatch.setattr(blocks, "CPU_BLOCK_ELEMENTS", 2 * 6 * 8)
    monkeypatch.setattr(blocks, "WINDOW_ROWS", 2)
    monkeypatch.setattr(mask, "KEY_CHUNK", 2)


def forms_inputs(sinks=True, **sizes):
    q, k, v = inputs(**sizes)
    return [q, k, v, *([torch.randn(q.shape[2:4], dtype=q.dtype, requires_grad=True)] if sinks else [])]


def within(at, kv_at, causal, window):
    """bool[batch or 1, query, key] by positions [batch or 1, …]."""
    distance = at[:, :, None] - kv_at[:, None]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance < window) & (distance > -window)


def reference(q, k, v, sinks=None, *, seen, scale=None, softcap=None):
    """All scores at once; a sink is one more column."""
    s = torch.einsum("bqngh,bknh->bngqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    none = ~seen.any(-1, keepdim=True)  # such a query sees all here, so that no NaN arises, and then nothing
    s = s.masked_fill(~(seen | none)[:, None, None], -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, :, None, None].expand(*s.shape[:-1], 1)], -1)
    p = s.softmax(-1)[..., : k.shape[1]].masked_fill(none[:, None, None], 0)
    return torch.einsum("bngqk,bknh->bqngh", p, v)


def ours(q, k, v, sinks=None, **given):
    return attention(q, k, v, sinks=sinks, **given)


ORDER, DOCUMENTS = torch.arange(7)[None], SEGMENTS[:, :, None] == SEGMENTS[:, None]
LATE, KV_SEGMENTS = torch.tensor([[7, 8, 6], [2, 0, 1]]), torch.tensor([[-1, -1, 0, 0, 0, 0, 0, 1, 1], [0] * 9])
LATE_DOCUMENTS = torch.tensor([[0, 0, 1], [0, 0, 0]])
# name: (arguments, positions of queries, of keys, which documents go together)
MASKS = {
    "order": (dict(), ORDER, ORDER, True),
    "full": (dict(causal=False, scale=0.3), ORDER, ORDER, True),
    "documents": (dict(segments=SEGMENTS), ORDER, ORDER, DOCUMENTS),
    "full documents": (dict(segments=SEGMENTS, causal=False), ORDER, ORDER, DOCUMENTS),
    "cu_seqlens": (dict(cu_seqlens=cu_seqlens_of(SEGMENTS)), ORDER, ORDER, DOCUMENTS),
    "positions": (dict(positions=POSITIONS), POSITIONS[None], POSITIONS[None], True),
    "full positions": (dict(positions=POSITIONS, causal=False), POSITIONS[None], POSITIONS[None], True),
    "rows, documents": (
        dict(positions=ROWS_OF_POSITIONS, segments=SEGMENTS),
        ROWS_OF_POSITIONS,
        ROWS_OF_POSITIONS,
        DOCUMENTS,
    ),
    "cache": (dict(scale=0.7), torch.arange(6, 9)[None], torch.arange(9)[None], True),
    "full cache": (dict(causal=False), torch.arange(6, 9)[None], torch.arange(9)[None], True),
    "fewer keys": (dict(causal=False), torch.arange(-4, 2)[None], torch.arange(2)[None], True),
    "cache by position, documents": (
        dict(positions=LATE, kv_positions=torch.arange(9), segments=LATE_DOCUMENTS, kv_segments=KV_SEGMENTS),
        LATE,
        torch.arange(9)[None],
        LATE_DOCUMENTS[:, :, None] == KV_SEGMENTS[:, None],
    ),
}
WINDOWS, CAPS, SINKS = (None, 1, 3, 50), (None, 1.5), (False, True)


def every(mask_name):
    """(arguments, ours, the reference) of every form with one mask."""
    given, at, kv_at, together = MASKS[mask_name]
    for window, softcap, sinks in itertools.product(WINDOWS, CAPS, SINKS):
        form = dict(window=window, softcap=softcap, **given)
        seen = within(at, kv_at, given.get("causal", True), window) & together
        args = forms_inputs(sinks, queries=at.shape[1], keys=kv_at.shape[1], head=3)
        theirs = dict(seen=seen, scale=given.get("scale"), softcap=softcap)
        yield args, form, theirs


@pytest.mark.parametrize("name", MASKS)
def test_every_combination(name, small_blocks):
    for args, form, theirs in every(name):
        assert_same(ours(*args, **form), reference(*args, **theirs), args)


@pytest.mark.parametrize("name", MASKS)
def test_in_one_block_and_in_plain_operations(name, monkeypatch):
    for args, form, theirs in every(name):
        assert_same(ours(*args, **form), reference(*args, **theirs), args)
    in_plain_operations(monkeypatch)
    for args, form, theirs in every(name):
        assert_same(ours(*args, **form), reference(*args, **theirs), args)


@pytest.mark.parametrize("name", MASKS)
def test_second_derivatives(name, small_blocks):
    for args, form, theirs in every(name):
        vectors = [torch.randn_like(a) for a in args]

        def hessian_vector(f, given, args=args, vectors=vectors):
            grads = torch.autograd.grad((f(*args, **given) ** 3).sum(), args, create_graph=True)
            return torch.autograd.grad(sum((g * v).sum() for g, v in zip(grads, vectors, strict=True)), args)

        got, want = hessian_vector(ours, form), hessian_vector(reference, theirs)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_numerical_derivatives(small_blocks):
    args = forms_inputs(batch=1, queries=5, kv=1, group=2, head=2)

    def f(*args):
        return ours(*args, window=3, softcap=1.5)

    assert gradcheck(f, args, fast_mode=True)
    assert gradgradcheck(f, args, fast_mode=True)


def test_zero_sinks_are_the_off_by_one_softmax():
    q, k, v = inputs(queries=4)
    s = torch.einsum("bqngh,bknh->bngqk", q, k) / q.shape[-1] ** 0.5
    e = s.exp() * torch.ones(4, 4, dtype=DOUBLE).tril()
    theirs = torch.einsum("bngqk,bknh->bqngh", e / (1 + e.sum(-1, keepdim=True)), v)
    torch.testing.assert_close(attention(q, k, v, sinks=q.new_zeros(2, 3)), theirs, rtol=1e-13, atol=1e-13)


def test_extreme_sinks():
    """Logits far above and below the scores: all of the weight, or none of it."""
    q, k, v = inputs(queries=5, keys=4)  # the first query sees no key
    for value, weight in ((1e4, 0.0), (-1e4, 1.0), (-math.inf, 1.0)):
        sinks = q.new_full((2, 3), value).requires_grad_()
        o = attention(q, k, v, sinks=sinks)
        torch.testing.assert_close(o, weight * attention(q, k, v), rtol=1e-13, atol=1e-13)
        assert all(g.isfinite().all() for g in torch.autograd.grad(o.sum(), [q, k, v, sinks]))


def test_queries_that_see_only_their_sink():
    """Zeros, and derivatives without NaN."""
    args = forms_inputs(queries=3, keys=2)
    o = ours(*args, window=1)
    assert torch.equal(o[:, 0], torch.zeros_like(o[:, 0]))
    grads = torch.autograd.grad((o**2).sum(), args, create_graph=True)
    assert all(g.isfinite().all() for g in torch.autograd.grad(sum(g.sum() for g in grads), args))


# transformers


def heads_first(q, k, v):
    return q.flatten(2, 3).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def added(seen, dtype=DOUBLE):
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def test_soft_cap_equals_gemma2(monkeypatch):
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2

    softmax = torch.nn.functional.softmax  # theirs casts to float32
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
    args = inputs()
    module = SimpleNamespace(num_key_value_groups=3, training=False)
    seen = within(ORDER, ORDER, True, None)[None]
    theirs, _ = gemma2(module, *heads_first(*args), added(seen), scaling=0.4, softcap=2.0)
    assert_same(attention(*args, scale=0.4, softcap=2.0).flatten(2, 3), theirs, args, 1e-12)


def test_sinks_equal_gpt_oss():
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss

    args = forms_inputs()
    module = SimpleNamespace(num_key_value_groups=3, training=False, sinks=args[3].flatten())
    seen = within(ORDER, ORDER, True, 4)[None]
    theirs, _ = gpt_oss(module, *heads_first(*args[:3]), added(seen), scaling=0.4)
    assert_same(ours(*args, window=4, scale=0.4).flatten(2, 3), theirs, args, 1e-12)


@pytest.mark.parametrize("window", [1, 3, 8, 9])
def test_window_equals_transformers_mask(window):
    from transformers import masking_utils

    args = inputs(queries=9)
    see = masking_utils.sliding_window_causal_mask_function(window)
    seen = torch.tensor([[bool(see(0, 0, torch.tensor(i), torch.tensor(j))) for j in range(9)] for i in range(9)])
    theirs = torch.nn.functional.scaled_dot_product_attention(*heads_first(*args), seen, enable_gqa=True)
    assert_same(attention(*args, window=window).flatten(2, 3), theirs.transpose(1, 2), args, 1e-12)


# precision, memory and work


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("softcap", CAPS)
def test_lower_precision(dtype, tolerance, softcap):
    args = forms_inputs(queries=40, dtype=dtype)
    exact = [a.detach().double().requires_grad_() for a in args]
    at = torch.arange(40)[None]
    got = ours(*args, window=9, softcap=softcap)
    want = reference(*exact, seen=within(at, at, True, 9), softcap=softcap)
    g = torch.randn_like(got)
    results = [got, *torch.autograd.grad(got, args, g)]
    for a, b in zip(results, [want, *torch.autograd.grad(want, exact, g.double())], strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() < tolerance * b.norm()


def test_gradients_of_half_precision_are_summed_in_float32(monkeypatch):
    """Of many blocks of queries, each of which sees all keys."""
    monkeypatch.setattr(cpu, "CPU_BLOCK", 1)
    args = inputs(batch=1, queries=300, keys=4, kv=1, group=1, dtype=torch.bfloat16)
    exact = [a.detach().double().requires_grad_() for a in args]
    given = dict(causal=False, segments=torch.zeros(1, 300, dtype=torch.int64), kv_segments=torch.zeros(1, 4).long())
    got = torch.autograd.grad(attention(*args, **given).sum(), args[2])[0]
    want = torch.autograd.grad(attention(*exact, **given).sum(), exact[2])[0]
    assert (got.double() - want).norm() < 5e-3 * want.norm()


@pytest.mark.parametrize("softcap", CAPS)
def test_memory_is_linear(softcap):
    """Kept for backward: q, k, v, the output, one number per query and head, the masks and the sinks."""

    def kept(seq):
        args = forms_inputs(batch=1, queries=seq, kv=2, group=2, head=8, dtype=torch.float32)
        given = dict(positions=torch.arange(seq), segments=(torch.arange(seq) // 50)[None])
        size, _ = saved_bytes(lambda: ours(*args, window=10, softcap=softcap, **given))
        return size

    heads = 4 * 8 + 2 * 2 * 8 + 4 * 8 + 4
    assert kept(64) == 64 * (4 * heads + 2 * 8) + 4 * 4
    assert kept(512) == 512 * (4 * heads + 2 * 8) + 4 * 4


class Work(TorchDispatchMode):
    """Counts scores, of the kernel's calls and of products with a block of scores, and the largest tensor made."""

    def __init__(self):
        super().__init__()
        self.scores = self.largest = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        y = f(*args, **(kwargs or {}))
        if f == torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.scores += args[0].shape[:3].numel() * args[1].shape[2]
        if f == torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            self.scores += args[1].shape[:3].numel() * args[2].shape[2]
        if f == torch.ops.aten.tanh.default or f == torch.ops.aten.tanh_.default:
            self.scores += y.numel()
        for t in y if isinstance(y, tuple | list) else [y]:
            self.largest = max(self.largest, t.numel() if isinstance(t, torch.Tensor) else 0)
        return y


def work(path, seq, window, causal, positions):
    """(scores, largest tensor) of forward and backward."""
    q, k, v = (t.detach() for t in inputs(batch=1, queries=seq, kv=1, group=1, head=2, dtype=torch.float32))
    seen = Mask(seq, seq, causal, window, positions, look=True)
    more = (20.0,) if path is blocks else ()
    with Work() as count:
        o, lse = path.forward(q, k, v, seen, 1.0, *more)
        path.backward(q, k, v, seen, 1.0, *more, o, lse, o, *((None,) if path is blocks else ()))
    return count.scores, count.largest


@pytest.mark.parametrize("path", [cpu, blocks])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("by", ["order", "positions", "zigzag"])
def test_work_of_a_window_is_linear(path, causal, by):
    window, slack = 50, 2 * mask.KEY_CHUNK  # keys are skipped in chunks
    rows = cpu.CPU_BLOCK if path is cpu else blocks.WINDOW_ROWS
    reach = rows + (window if causal else 2 * window) + (0 if by == "order" else slack)

    def positions(seq):
        if by == "zigzag":  # as two ranks hold it: parts 0 and 3, then 1 and 2
            return torch.arange(seq).view(4, -1)[[0, 3, 1, 2]].flatten()
        return torch.arange(seq) if by == "positions" else None

    for seq in (1024, 4096):
        scores, largest = work(path, seq, window, causal, positions(seq))
        jumps = 6 * rows * seq if by == "zigzag" else 0  # blocks beside a seam see both sides of it
        assert 2 * seq * min(window, reach) <= scores <= 2 * seq * reach + jumps
        assert largest <= max(rows * reach, rows * seq if by == "zigzag" else 0, 2 * seq)


@pytest.mark.parametrize("path", [cpu, blocks])
def test_work_of_documents_is_theirs(path, monkeypatch):
    """Documents far from a block of queries are skipped too."""
    monkeypatch.setattr(blocks, "CPU_BLOCK_ELEMENTS", 256 * 4096)
    q, k, v = (t.detach() for t in inputs(batch=1, queries=4096, kv=1, group=1, head=2, dtype=torch.float32))
    seen = Mask(4096, 4096, False, segments=(torch.arange(4096) // 256)[None], look=True)
    with Work() as count:
        path.forward(q, k, v, seen, 1.0, *((20.0,) if path is blocks else ()))
    assert count.scores == 4096 * 256


def test_no_more_than_a_block_of_scores(monkeypatch):
    """Without a window too, and where positions in any order make the hull of a window wide."""
    monkeypatch.setattr(blocks, "CPU_BLOCK_ELEMENTS", 1 << 14)
    for window, positions in ((None, None), (200, torch.randperm(512)), (200, None)):
        _, largest = work(blocks, 512, window, True, positions)
        assert largest <= 1 << 14


# transforms


def form(q, k, v, sinks):
    return attention(q, k, v, sinks=sinks, window=2, softcap=1.5, segments=SEGMENTS[:, :4])


def plain_form(q, k, v, sinks):
    seen = within(ORDER[:, :4], ORDER[:, :4], True, 2) & DOCUMENTS[:, :4, :4]
    return reference(q, k, v, sinks, seen=seen, softcap=1.5)


def uncapped(q, k, v, sinks):
    return attention(q, k, v, sinks=sinks, window=2, causal=False)


def plain_uncapped(q, k, v, sinks):
    return reference(q, k, v, sinks, seen=within(ORDER[:, :4], ORDER[:, :4], False, 2))


FORMS = {"capped": (form, plain_form), "not capped": (uncapped, plain_uncapped)}
SHAPES = [(2, 4, 1, 2, 2), (2, 4, 1, 2), (2, 4, 1, 2), (1, 2)]


@pytest.mark.parametrize("name", FORMS)
def test_torch_func(name):
    f, plain = FORMS[name]
    args, others = ([torch.randn(s, dtype=DOUBLE) for s in SHAPES] for _ in range(2))
    got, want = transforms(f, args, others), transforms(plain, args, others)
    for what in want:
        torch.testing.assert_close(
            got[what], want[what], rtol=1e-11, atol=1e-11, msg=lambda m, what=what: f"{what}: {m}"
        )


def test_mapped_sinks():
    """Alone, twice, along another dim, and their gradients; with mapped queries."""
    q, k, v, _ = args = [torch.randn(s, dtype=DOUBLE) for s in SHAPES]
    sinks = torch.randn(3, 1, 5, 2, dtype=DOUBLE)
    for f in (torch.func.grad(lambda s: (form(q, k, v, s) ** 2).sum()), lambda s: form(q, k, v, s)):
        got = torch.func.vmap(torch.func.vmap(f), in_dims=2)(sinks)
        want = torch.stack([torch.stack([f(sinks[i, :, j]) for i in range(3)]) for j in range(5)])
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    stacked, queries = torch.randn(3, 1, 2, dtype=DOUBLE), torch.randn(3, *SHAPES[0], dtype=DOUBLE)
    got = torch.func.vmap(form, in_dims=(0, None, None, None))(queries, *args[1:])
    torch.testing.assert_close(got, torch.stack([form(q, *args[1:]) for q in queries]), rtol=1e-12, atol=1e-12)
    got = torch.func.vmap(form, in_dims=(0, None, None, 0))(queries, k, v, stacked)
    want = torch.stack([form(q, k, v, s) for q, s in zip(queries, stacked, strict=True)])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    got = torch.func.grad(lambda s: (torch.func.vmap(lambda s: form(*args[:3], s))(s) ** 2).sum())(stacked)
    want = torch.stack([torch.func.grad(lambda s: (form(q, k, v, s) ** 2).sum())(s) for s in stacked])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name, dtype", [("capped", DOUBLE), ("not capped", DOUBLE), ("not capped", torch.bfloat16)])
def test_compiled(name, dtype):
    f, plain = FORMS[name]
    args = [torch.randn(s, dtype=dtype, requires_grad=True) for s in SHAPES]
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    tolerance = 1e-11 if dtype == DOUBLE else 3e-2
    exact = [a.detach().double().requires_grad_() for a in args]
    got = torch.autograd.grad((compiled(*args).double() ** 3).sum(), args)
    want = torch.autograd.grad((plain(*exact) ** 3).sum(), exact)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype and (a.double() - b).norm() <= tolerance * b.norm()
    constants = [a.detach() for a in args]  # dynamo takes another way for them: the first run of a remat
    torch.testing.assert_close(compiled(*constants), f(*constants), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("save", [names("attention"), nothing])
def test_remat(save):
    """The gradient of sinks too, and with saved outputs no second forward."""
    args = [torch.randn(s, dtype=DOUBLE, requires_grad=True) for s in SHAPES]
    ran = []

    def block(p, x, ctx):
        ran.append(ctx)
        return attention(x["q"], x["k"], x["v"], sinks=p["sinks"], window=2, segments=SEGMENTS[:, :4], sh=ctx.sh)

    def gradients(f):
        x = dict(zip("qkv", args, strict=False))
        return torch.autograd.grad((f({"sinks": args[3]}, x, Ctx()) ** 3).sum(), args)

    want = gradients(block)
    ran.clear()
    torch.testing.assert_close(gradients(remat(block, save)), want, rtol=1e-12, atol=1e-12)
    assert len(ran) == 2


# `sh`

E, S, KV, G, H = 8, 8, 2, 2, 4
TOKEN = "batch seq"
SPEC = dict(
    q=Param((E, KV, G, H), "embed kv group head", Normal(0.7), over=TOKEN),
    k=Param((E, KV, H), "embed kv head", Normal(0.7), over="batch seq group"),
    v=Param((E, KV, H), "embed kv head", Normal(0.7), over="batch seq group"),
    sinks=Param((KV, G), "kv group", Normal(0.7), over=TOKEN),
    o=Param((KV, G, H, E), "kv group head embed", Normal(0.7), over=TOKEN),
)
FREE = dict.fromkeys(("embed", "head", "kvseq"))


def program(params, batch, sh, spec=SPEC, softcap=1.5):
    p = sh.use(params, spec)
    h = sh(batch["x"], "batch seq* embed -> batch seq embed | kv group")
    q = sh.dot(h, p["q"], "batch seq embed, embed kv group head -> batch seq kv group head")
    k, v = (sh.dot(h, p[n], "batch seq embed, embed kv head -> batch seq kv head") for n in "kv")
    k, v = (sh(t, "batch seq kv head -> batch kvseq kv head | seq") for t in (k, v))
    positions = sh.index("seq", S)
    where = dict(
        positions=positions,
        kv_positions=sh(positions, "seq -> kvseq | seq"),
        segments=batch["segments"],
        kv_segments=sh(batch["segments"], "batch seq -> batch kvseq | seq"),
    )
    a = attention(q, k, v, sinks=p["sinks"], window=3, softcap=softcap, sh=sh, **where)
    y = sh.dot(a, p["o"], "batch seq kv group head, kv group head embed -> batch seq* embed")
    return sh.sum(y**3, "batch seq* embed ->")


def sharded_data():
    torch.manual_seed(3)
    batch = dict(x=torch.randn(4, S, E, dtype=DOUBLE), segments=(torch.arange(S) // 5).expand(4, S).contiguous())
    sh = Sharding(precision=Precision(params=DOUBLE))
    return init(SPEC, random.key(0), sh=sh), init(SPEC, random.key(1), sh=sh), batch


def derivatives(params, vector, batch, sh, softcap):
    flat = [w.detach().requires_grad_() for w in tree.leaves(sh.local(params))]
    loss = program(tree.like(params, flat), batch, sh, softcap=softcap)
    grads = torch.autograd.grad(loss, flat, create_graph=True)
    along = 0.0
    for g, v, p in zip(grads, tree.leaves(sh.local(vector)), tree.leaves(SPEC), strict=True):
        along = along + sh((g * v).sum(), **{a: ("P", "I") for a in sh.held_by(p)})
    return loss.detach(), [g.detach() for g in grads], torch.autograd.grad(along, flat)


@pytest.mark.parametrize(
    "axes, rows, softcap",
    [
        ("tp=2", {"kv": "tp", "seq*": "tp"}, None),
        ("tp=2,gp=2", {"kv": "tp", "group": "gp", "seq*": ("tp", "gp")}, 1.5),
        ("dp=2,cp=2", dict(batch="dp", seq="cp"), None),
        ("dp=2,cp=2,tp=2", {"batch": "dp", "seq": "cp", "seq*": ("cp", "tp"), "group": "tp"}, 1.5),
    ],
)
def test_sharded(axes, rows, softcap):
    params, vector, batch = sharded_data()
    want = derivatives(params, vector, batch, Sharding(precision=Precision(params=DOUBLE)), softcap)
    with simulate(math.prod(parse_axes(axes).values())):
        mesh = make_mesh(axes, device="cpu")
        rules = Rules({**FREE, **dict.fromkeys(("batch", "seq", "kv", "group")), **rows})
        sh = Sharding(mesh, rules, precision=Precision(params=DOUBLE))

        def place(values):
            return {n: sh.shard_param(everywhere(mesh, w), SPEC[n]) for n, w in values.items()}

        local = {
            "x": sh.shard(everywhere(mesh, batch["x"]), "batch seq* embed"),
            "segments": sh.shard(everywhere(mesh, batch["segments"]), "batch seq"),
        }
        got = derivatives(place(params), place(vector), local, sh, softcap)
        for x in per_rank(got[0]):
            torch.testing.assert_close(x, want[0], rtol=1e-11, atol=0)
        for mine, theirs in zip(got[1:], want[1:], strict=True):
            for g, r, p in zip(mine, theirs, tree.leaves(SPEC), strict=True):
                r = sh.local(sh.shard_param(everywhere(mesh, r.detach()), p))
                for a, b in zip(per_rank(g.detach()), per_rank(r), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_checking_mode():
    """It also finds sinks whose gradient is not summed over the tokens."""
    params, _, batch = sharded_data()
    rules = Rules({**FREE, **{n: "x" for n in ("batch", "seq", "seq*", "kv", "group")}})
    dims = {"x": "batch seq* embed", "segments": "batch seq"}
    check(program, SPEC, params, batch, rules, dims=dims)
    wrong = {**SPEC, "sinks": Param((KV, G), "kv group", Normal(0.7), over="seq")}
    with pytest.raises(ValueError, match="batch"):
        check(lambda *a: program(*a, spec=wrong), wrong, params, batch, rules, dims=dims)


def test_bad_forms():
    q, k, v = inputs()
    for given, says in (
        (dict(window=0), r"window=0\).* at least 1"),
        (dict(window=-1), "window=-1"),
        (dict(softcap=0.0), r"softcap=0.0\) must be"),
        (dict(softcap=-2.0), "softcap=-2.0"),
        (dict(softcap=math.nan), "softcap=nan"),
        (dict(sinks=torch.zeros(6)), r"shape \(6,\), not \(2, 3\)"),
        (dict(sinks=torch.zeros(3, 2)), r"shape \(3, 2\)"),
    ):
        with pytest.raises(UserError, match=says):
            attention(q, k, v, **given)


@pytest.mark.parametrize("form", [{}, {"window": 3}, {"segments": torch.tensor([[0, 0, 1, 1, 1, 2]])}])
def test_compiled_code_runs_the_fast_backward(form, monkeypatch):
    """The kernel, not the plain blocks, which are for what it cannot do (compiled code hands zeros for lse's gradient)."""
    torch._dynamo.reset()
    q, k = torch.randn(1, 6, 2, 2, 4, dtype=DOUBLE), torch.randn(1, 6, 2, 4, dtype=DOUBLE)
    leaves = [t.requires_grad_() for t in (q, k, torch.randn_like(k))]
    g = torch.randn_like(q)
    want = torch.autograd.grad(attention(*leaves, **form), leaves, g)
    monkeypatch.setattr(blocks, "backward", lambda *args: pytest.fail("plain blocks"))
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, **form), backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(*leaves), leaves, g)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
