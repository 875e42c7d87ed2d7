"""flash-attn-4 behind attention: which calls it gets and how, on the CPU; on a Hopper GPU against float64."""

import importlib
import sys
import types

import pytest
import torch

from fmegatron.errors import UserError
from fmegatron.kernels import flash4
from fmegatron.primitives import attention, cu_seqlens_of
from fmegatron.primitives.attention import cuda
from fmegatron.primitives.attention.mask import Mask

HALF = torch.zeros(1, dtype=torch.bfloat16).expand(1, 1024, 2, 1, 128)
on_hopper = pytest.mark.skipif(
    not (torch.cuda.is_available() and flash4.INSTALLED and torch.cuda.get_device_capability()[0] == 9),
    reason="needs flash-attn-4 and a Hopper GPU",
)


@pytest.fixture
def there(monkeypatch):
    """As if it were installed, on a Hopper GPU."""
    monkeypatch.setattr(flash4, "INSTALLED", True)
    monkeypatch.setattr(flash4, "_on_hopper", lambda device: True)


def test_what_auto_takes(there, monkeypatch):
    def takes(q=HALF, queries=1024, keys=1024, softcap=None, kernel="auto"):
        return flash4.takes(kernel, q, queries, keys, softcap)

    assert takes() and takes(keys=2048) and takes(q=HALF.half()) and takes(kernel="flash4")
    assert not any(takes(kernel=kernel) for kernel in ("torch", "triton"))
    assert not takes(q=HALF.float(), kernel="flash4")
    assert not takes(keys=1000, kernel="flash4")  # queries that see no key
    short, narrow, odd = (HALF[..., :head] for head in (96, 64, 80))
    assert not takes(queries=8) and takes(queries=8, kernel="flash4")
    assert not takes(q=short) and not takes(q=narrow) and takes(q=narrow, kernel="flash4")
    assert takes(q=narrow, softcap=30.0)
    assert not takes(q=odd, kernel="flash4")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not takes() and not takes(kernel="flash4")


def test_soft_caps_need_it(there, monkeypatch):
    class Halves:
        device, dtype, shape = torch.device("cuda"), torch.bfloat16, HALF.shape

    mask = Mask(1024, 1024, True)
    capped = cuda.Form(1.0, 30.0, "auto")
    assert len(cuda.calls(Halves, mask, capped)) == 1
    assert cuda.calls(Halves, mask, capped._replace(kernel="torch")) is None
    assert len(cuda.calls(Halves, mask, capped._replace(softcap=None, kernel="torch"))) == 1
    monkeypatch.setattr(flash4, "INSTALLED", False)
    assert cuda.calls(Halves, mask, capped) is None


def test_errors_where_asked_for_by_name(monkeypatch):
    q = HALF.contiguous()

    def asked(q=q, kernel="flash4"):
        return attention(q, q[..., 0, :], q[..., 0, :], kernel=kernel)

    with pytest.raises(UserError, match=r"kernel='flash5'.*: use \"auto\""):
        asked(kernel="flash5")
    monkeypatch.setattr(flash4, "INSTALLED", False)
    with pytest.raises(UserError, match=r"flash-attn-4 is not installed .*fmegatron\[kernels\]"):
        asked()
    monkeypatch.setattr(flash4, "INSTALLED", True)
    with pytest.raises(UserError, match="for Hopper GPUs .* on cpu"):
        asked()
    monkeypatch.setattr(flash4, "_on_hopper", lambda device: True)
    with pytest.raises(UserError, match=r"torch\.bfloat16 with heads of 80"):
        asked(q[..., :80])


def test_an_older_flash_attn_is_not_it(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not flash4.find()
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    importlib.invalidate_caches()
    assert not flash4.find()
    (tmp_path / "flash_attn" / "cute" / "interface.py").touch()
    assert not flash4.find()  # flash-attn 2.8 has it too
    (tmp_path / "flash_attn_4-4.0.0.dist-info").mkdir()
    (tmp_path / "flash_attn_4-4.0.0.dist-info" / "METADATA").write_text("Name: flash-attn-4\nVersion: 4.0.0\n")
    importlib.invalidate_caches()
    assert flash4.find()


def test_a_package_without_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)  # an import of it fails
    q = torch.zeros(1, 8, 2, 128, dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"cannot be imported .*fmegatron\[kernels\].*--kernels torch"):
        flash4.forward(q, q, q, causal=True)


def plain(q, k, v, seen, scale, softcap):
    """(o, lse[batch heads seq]) of q[batch seq heads head]."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def seen_by(queries, keys, causal, left, right, starts):
    at, kv_at = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen &= kv_at <= at
    if left is not None:
        seen &= (kv_at >= at - left) & (kv_at <= at + right)
    if starts is not None:
        document = torch.searchsorted(starts, torch.arange(queries, dtype=starts.dtype), right=True)
        seen &= document[:, None] == document
    return seen


def stand_in():
    """A module like flash-attn-4's, by torch in its place."""

    def results(q, k, v, softmax_scale, causal, softcap, window_size_left=None, window_size_right=None, **documents):
        starts, many = documents.get("cu_seqlens_q"), q.ndim == 3
        if many:
            assert documents["max_seqlen_q"] == documents["max_seqlen_k"]
        q, k, v = (t[None] if many else t for t in (q, k, v))
        seen = seen_by(q.shape[1], k.shape[1], causal, window_size_left, window_size_right, starts)
        o, lse = plain(q, k, v, seen, softmax_scale, softcap)
        return (o[0], lse[0]) if many else (o, lse)

    def forward(q, k, v, return_lse, **options):
        assert return_lse and not (q.requires_grad or k.requires_grad)
        return *results(q, k, v, **options), None, None, None

    def backward(q, k, v, o, go, lse, softcap, dq=None, dk=None, dv=None, **options):
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        with torch.enable_grad():
            again, again_lse = results(q, k, v, softcap=softcap or None, **options)
        assert torch.allclose(again, o, atol=1e-6) and torch.allclose(again_lse, lse, atol=1e-5)
        grads = torch.autograd.grad(again, (q, k, v), go)
        return grads if dq is None else [place.copy_(g) for place, g in zip((dq, dk, dv), grads, strict=True)]

    module = types.ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd, module._flash_attn_bwd = forward, backward
    return module


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"causal": False},
        {"window": 5},
        {"causal": False, "window": 5},
        {"softcap": 2.0},
        {"documents": 7},
        {"documents": 7, "window": 4, "softcap": 2.0},
        {"keys": 31},
    ],
    ids=str,
)
def test_what_it_is_asked(form, monkeypatch):
    """The calls' arguments, shapes and order, with torch's operations behind its names."""
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", stand_in())
    monkeypatch.setattr(flash4, "takes", lambda *_: True)
    torch.manual_seed(0)
    form, queries = {"causal": True, **form}, 24
    keys, each = form.pop("keys", queries), form.pop("documents", None)
    q = torch.randn(2, queries, 2, 3, 8, requires_grad=True)
    k, v = (torch.randn(2, keys, 2, 8, requires_grad=True) for _ in range(2))
    segments = None if each is None else (torch.arange(queries) // each)[None].expand(2, -1).contiguous()
    right = attention(q, k, v, segments=segments, **form)
    go = torch.randn_like(right)
    wanted = torch.autograd.grad(right, (q, k, v), go)
    mask = Mask(queries, keys, form["causal"], form.get("window"), None, None, segments)
    how = [cuda.Call(slice(0, queries), slice(0, keys), mask)], None, cuda.Form(8**-0.5, form.get("softcap"), "flash4")
    o, lse = cuda.forward(q, k, v, *how)
    assert o.shape == q.shape and lse.shape == q.shape[:-1]
    got = cuda.backward(q, k, v, *how, o, lse, go)
    for a, b in zip((o, *got), (right, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def near(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() < tolerance * b.norm()


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("group, head", [(1, 64), (3, 96), (1, 128), (4, 128), (2, 256)])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"causal": False},
        {"window": 200},
        {"causal": False, "window": 100},
        {"softcap": 3.0, "window": 200},
        {"documents": 150},
        {"documents": 150, "window": 60, "cu_seqlens": True},
        {"keys": 900, "sinks": True},
    ],
    ids=str,
)
@pytest.mark.gpu
@on_hopper
def test_against_float64(form, group, head, dtype, tolerance):
    torch.manual_seed(0)
    form, queries = dict(form), 601
    keys, each = form.pop("keys", queries), form.pop("documents", None)
    shapes = [(2, queries, 2, group, head), *[(2, keys, 2, head)] * 2]
    args = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]
    if form.pop("sinks", False):
        args.append(torch.randn(2, group, device="cuda").to(dtype).requires_grad_())
    if each is not None:
        form["segments"] = (torch.arange(queries, device="cuda") // each)[None].expand(2, -1).contiguous()
        if form.pop("cu_seqlens", False):
            form["cu_seqlens"] = cu_seqlens_of(form.pop("segments"), 20)

    def run(args, kernel):
        q, k, v, *sinks = args
        o = attention(q, k, v, sinks=sinks[0] if sinks else None, kernel=kernel, **form)
        return o, lambda g: torch.autograd.grad(o, args, g)

    o, pull = run(args, "flash4")
    exact, pull_exact = run([a.detach().double().requires_grad_() for a in args], "torch")
    g = torch.randn_like(o)
    near([o, *pull(g)], [exact, *pull_exact(g.double())], tolerance)


@pytest.mark.gpu
@on_hopper
def test_compiled_and_recorded():
    """Compiled code and CUDA graphs call the same kernel."""
    torch.manual_seed(0)
    q = torch.randn(1, 512, 2, 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(1, 512, 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))

    def step(q, k, v):
        o = attention(q, k, v, kernel="flash4")
        return o, *torch.autograd.grad(o.float().square().sum(), (q, k, v))

    right = step(q, k, v)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, kernel="flash4"), fullgraph=True)
    assert torch.equal(compiled(q, k, v), right[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(q, k, v)
    graph.replay()
    near(found, [r.double() for r in right], 2e-3)
