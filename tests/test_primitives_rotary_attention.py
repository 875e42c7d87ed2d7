"""Rotary embedding and attention as one primitive: on a CPU with stand-ins for the kernels, on a Hopper GPU with flash-attn-4
itself."""

import dataclasses
import importlib
import sys

import pytest
import torch

from fmegatron import tree
from fmegatron.accumulate import accumulate
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.kernels import flash4
from fmegatron.mesh import make_mesh
from fmegatron.models import Decoder
from fmegatron.precision import Precision
from fmegatron.primitives import attention, has_rotary_attention, rotary_attention, rotary_table, split_rotary
from fmegatron.primitives.attention import cuda
from fmegatron.random import key
from fmegatron.remat import names
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding
from fmegatron.spec import init
from fmegatron.split import everything
from tests.test_kernels_flash4 import near, on_hopper, stand_in
from tests.test_llama import MESHY, batch_of

MODULE = importlib.import_module("fmegatron.primitives.rotary_attention")


@pytest.fixture
def there(monkeypatch):
    """As if flash-attn-4 were there, and took everything; in its place torch's operations, for a soft cap those that write
    gradients where they are told to. How often the primitive's parts ran."""
    counts = dict(turns=0, into=0)
    module, calls, turn = stand_in(), cuda.calls, MODULE.turn_in_place
    backward = module._flash_attn_bwd

    def counted_turn(*args):
        counts["turns"] += 1
        turn(*args)

    def counted_backward(*args, **options):
        counts["into"] += all(name in options and not options[name].is_contiguous() for name in ("dq", "dk", "dv"))
        return backward(*args, **options)

    def on_cuda(q, mask, form):
        if form.softcap is None or form.kernel == "torch":
            return calls(q, mask, form)
        return [cuda.Call(slice(0, mask.queries), slice(0, mask.keys), mask)]

    module._flash_attn_bwd = counted_backward
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cuda, "calls", on_cuda)
    monkeypatch.setattr(flash4, "takes", lambda *_: True)
    monkeypatch.setattr(MODULE, "has_turn", lambda *_: True)
    monkeypatch.setattr(MODULE, "turn_in_place", counted_turn)
    return counts


def draw(kv, group, *, seq=24, head=8, turned=8, dtype=torch.float64, device="cpu"):
    """(y, the table)"""
    torch.manual_seed(0)
    y = torch.randn(2, seq, kv, group + 2, head, dtype=dtype, device=device).requires_grad_()
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return y, rotary_table(torch.arange(seq, device=device), turned, dtype=exact)


def apart(y, cos, sin, *, interleaved=False, **form):
    return attention(*split_rotary(y, cos, sin, interleaved=interleaved, kernel="torch"), kernel="torch", **form)


def documents(seq, each, device="cpu"):
    return (torch.arange(seq, device=device) // each)[None].expand(2, -1).contiguous()


FORMS = [{}, {"causal": False}, {"window": 5, "sinks": True}, {"documents": 7, "interleaved": True}, {"scale": 0.3}]
FORMS += [{"softcap": 2.0, **more} for more in ({}, {"window": 4, "documents": 7}, {"causal": False})]


@pytest.mark.parametrize("kv, group", [(3, 1), (1, 3)])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_is_both_one_after_the_other(there, form, kv, group):
    form = dict(form)
    y, table = draw(kv, group, turned=6)
    args = [y]
    if form.pop("sinks", False):
        args.append(torch.randn(kv, group, dtype=y.dtype).requires_grad_())
    if "documents" in form:
        form["segments"] = documents(24, form.pop("documents"))

    def run(f, y, sinks=None):
        return f(y, *table, sinks=sinks, **form)

    want = run(apart, *args)
    g = torch.randn_like(want)
    gradients = torch.autograd.grad(want, args, g)
    product = args[0].clone()  # is given up
    got = run(rotary_attention, product, *args[1:])
    for a, b in zip((got, *torch.autograd.grad(got, args, g)), (want, *gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    assert there == dict(turns=2, into="softcap" in form)
    assert torch.equal(product[:, :, :, -1], y[:, :, :, -1]) and not torch.equal(product, y)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_twice(there, softcap):
    y, table = draw(2, 1, seq=4, head=2, turned=2)
    assert torch.autograd.gradgradcheck(
        lambda y: rotary_attention(y.clone(), *table, softcap=softcap), y, fast_mode=True
    )


def test_who_has_kept_the_product_is_told(there):
    y, table = draw(2, 1)
    product = y.clone()
    other = product.square()
    o = rotary_attention(product, *table)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(o.sum() + other.sum(), y)


def test_compiled(there):
    torch.manual_seed(0)
    y, table = draw(2, 1)
    x, w = torch.randn(2, 24, 5, dtype=y.dtype, requires_grad=True), torch.randn(5, 48, dtype=y.dtype)
    w.requires_grad_()

    def run(f):
        return f((x @ w).view(y.shape), *table, segments=documents(24, 7)).square()

    want = run(apart)
    gradients = torch.autograd.grad(want.sum(), (x, w))
    got = torch.compile(run, backend="aot_eager", fullgraph=True)(rotary_attention)
    for a, b in zip((got, *torch.autograd.grad(got.sum(), (x, w))), (want, *gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_what_has_it(there):
    y, table = draw(3, 1)
    assert has_rotary_attention(y, *table) and has_rotary_attention(draw(1, 3)[0], *table)
    assert not has_rotary_attention(draw(3, 2)[0], *table)  # queries are not evenly spaced
    assert not has_rotary_attention(y.transpose(0, 1), *table)
    assert not has_rotary_attention(y, *table, kernel="torch")
    torch.func.vmap(lambda y: (has_rotary_attention(y, *table) and pytest.fail()) or y)(y[None])
    for wrong in (y[0], y.transpose(0, 1)):
        with pytest.raises(UserError, match="overwrites y, .* contiguous"):
            rotary_attention(wrong, *table)
    with pytest.raises(UserError, match="not under torch.func"):
        torch.func.grad(lambda y: rotary_attention(y, *table).sum())(y)
    with pytest.raises(UserError, match=r"softcap=-1"):
        rotary_attention(y, *table, softcap=-1)


def test_a_decoder_has_it_where_nobody_keeps_the_product(there):
    config = dataclasses.replace(MESHY, fused_qkv=True, kv_heads=8, head=8, attention_softcap=5.0)
    sh = Sharding(precision=Precision(params=torch.float64))
    params = init(Decoder(config).spec(), key(0), sh=sh)
    batch, found = batch_of(config), []
    for kernel in ("auto", "torch"):
        for save in (everything, names("attention"), names("down"), names("qkv")):
            there.update(turns=0, into=0)
            model = Decoder(config, kernel=kernel, save=save)
            (loss, _), grads = accumulate(model.loss, 1, weights=model.weights)(params, batch, Ctx(sh=sh))
            found.append((dict(there), float(loss), grads))
    assert [counts["turns"] for counts, *_ in found] == [4, 6, 6, 0, *[0] * 4]  # forward, backward, in between again
    assert [counts["into"] for counts, *_ in found] == [2, 2, 2, 0, *[0] * 4]
    (_, loss, first), *rest = found
    for _, other, grads in rest:
        assert other == pytest.approx(loss, rel=1e-12)
        for path, g in tree.named(grads).items():
            torch.testing.assert_close(g, tree.named(first)[path], rtol=1e-9, atol=1e-13, msg=path)


@pytest.mark.parametrize("row", ["seq", "kv", "batch"])
def test_keys_of_other_ranks_are_gathered_first(there, row):
    model = Decoder(dataclasses.replace(MESHY, fused_qkv=True))
    rules = Rules(dict.fromkeys(("batch", "seq", "kv", "group")) | {row: "cp"})
    y, table = draw(2, 1)
    ctx = Ctx(sh=Sharding(make_mesh("cp=2", abstract=True), rules), extras={"rotary": table})
    assert model._turns_in_place(y, ctx) == (row != "seq")


GPU_FORMS = [{}, {"window": 200}, {"softcap": 3.0}, {"documents": 150, "window": 60}, {"sinks": True}]
GPU_FORMS += [{"causal": False}]


@pytest.mark.parametrize(
    "kv, group, head, compiled",
    [
        (3, 1, 128, False),
        (3, 1, 128, True),
        (1, 1, 128, False),
        (1, 4, 128, False),
        (2, 1, 64, False),
        (2, 1, 256, False),
    ],
)
@pytest.mark.parametrize("form", GPU_FORMS, ids=str)
@pytest.mark.gpu
@on_hopper
def test_against_float64(form, kv, group, head, compiled, monkeypatch):
    form, seq = dict(form), 601
    torch._dynamo.reset()
    monkeypatch.setattr(flash4, "FASTER", head)
    (x, w), table = draw_product(kv, group, head, seq)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    exact_table = rotary_table(torch.arange(seq, device="cuda"), head, dtype=torch.float64)
    if "documents" in form:
        form["segments"] = documents(seq, form.pop("documents"), "cuda")
    sinks = torch.randn(kv, group, device="cuda").bfloat16() if form.pop("sinks", False) else None

    def run(x, w):
        y = multiplied(x, w)
        assert has_rotary_attention(y, *table, softcap=form.get("softcap"))
        return rotary_attention(y, *table, sinks=sinks, **form)

    f = torch.compile(run, fullgraph=True, dynamic=False) if compiled else run
    got = f(x, w)
    exact_sinks = None if sinks is None else sinks.double()
    want = apart(multiplied(*exact), *exact_table, sinks=exact_sinks, **form)
    g = torch.randn_like(got)
    gradients = torch.autograd.grad(want, exact, g.double())
    near([got, *torch.autograd.grad(got, (x, w), g)], [want, *gradients], 1.5e-2)


def multiplied(x, w):
    return (x @ w.flatten(1)).unflatten(-1, w.shape[1:])


def draw_product(kv, group, head, seq):
    torch.manual_seed(0)
    x = torch.randn(2, seq, 256, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(256, kv, group + 2, head, device="cuda") / 16).bfloat16().requires_grad_()
    return (x, w), rotary_table(torch.arange(seq, device="cuda"), head)


@pytest.mark.gpu
@on_hopper
def test_nothing_is_copied():
    """Neither eagerly nor in compiled code, forward nor backward."""
    torch._dynamo.reset()
    (x, w), table = draw_product(8, 1, 128, 4096)
    size = 2 * 4096 * 8 * 3 * 128 * 2  # bytes of the product

    def run(x, w):
        return rotary_attention(multiplied(x, w), *table)

    def peak(f):
        """(what f returns, the memory it took at most, in products)"""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = f()
        return result, (torch.cuda.max_memory_allocated() - before) / size

    for f in (run, torch.compile(run, fullgraph=True)):
        for again in (False, True):
            o, forward = peak(lambda f=f: f(x, w))
            g = torch.randn_like(o)
            _, backward = peak(lambda o=o, g=g: torch.autograd.grad(o, (x, w), g))
            if again:  # the first run plans and compiles
                assert forward < 1.6  # the product; a third for o
                assert backward < 1.85  # its gradient; two thirds for the float32 sums of the queries' gradients
