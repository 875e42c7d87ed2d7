"""Attention over a sequence that ranks hold in parts: every kind against a plain float64 softmax and against one device,
what it sends, what it keeps, and how evenly it shares the work."""

import dataclasses
import functools
import itertools
import math
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from fmegatron import collectives, tree
from fmegatron.accumulate import accumulate
from fmegatron.checking import check
from fmegatron.context import Ctx
from fmegatron.errors import ShardingError, UserError
from fmegatron.mesh import make_mesh, parse_axes
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.parallel import ring
from fmegatron.parallel.context import context_attention, factoring
from fmegatron.parallel.legality import check_layout
from fmegatron.precision import Precision
from fmegatron.primitives.attention import cuda
from fmegatron.primitives.attention.mask import Mask
from fmegatron.random import key, normal
from fmegatron.recording import record_collectives
from fmegatron.remat import names, nothing
from fmegatron.rules import CONTEXTS, Rules, standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import params_of
from fmegatron.split import everything
from fmegatron.zigzag import from_zigzag, to_zigzag, zigzag_positions
from tests import test_sharding
from tests.processes import processes

DOUBLE = Precision(params=torch.float64)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


# ------------------------------------------------------------------------------------------------------------- zigzag


def test_the_zigzag_order():
    """As published: of 2n chunks rank r of n holds r and 2n - 1 - r."""
    assert zigzag_positions(torch.arange(8), 8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    for n in (1, 2, 3, 4):
        x = torch.arange(12 * n)
        z = zigzag_positions(x, 12 * n, n)
        for rank, held in enumerate(z.view(n, -1)):
            chunks = x.view(2 * n, -1)
            assert n == 1 or torch.equal(held, torch.cat([chunks[rank], chunks[2 * n - 1 - rank]]))
        assert torch.equal(to_zigzag(x[:, None], 0, n)[:, 0], z)
        assert torch.equal(from_zigzag(z[None, :, None], 1, n)[0, :, 0], x)


ZIGZAG = [t for t in test_sharding.TABLES if "cp=2" in t.mesh and t.mesh != "dp=1,cp=2,tp=4"]


@pytest.mark.parametrize("table", ZIGZAG, ids=str)
def test_every_arrow_respects_the_zigzag_order(table, monkeypatch):
    """The program with every kind of annotation, whose attention, rotary, masks and loss follow `sh.index`."""
    params, vector, batch = test_sharding.DATA_SET
    make, spec, second = test_sharding.M.rules, test_sharding.M.spec(), table.kind == "dense"
    loss, grads, products = test_sharding.derivatives(
        params, vector, batch, Sharding(precision=DOUBLE), spec, table.kind, second=second
    )
    zigzag = lambda *a, **k: dataclasses.replace(make(*a, **k), zigzag={"seq": "cp"})  # noqa: E731
    monkeypatch.setattr(test_sharding.M, "rules", zigzag)
    with simulate(math.prod(parse_axes(table.mesh).values())):
        sh, (got, got_grads, got_products) = test_sharding.run(table, second=second)
        assert per_rank(sh.index("seq", 8))[0].tolist() == [0, 1, 6, 7]
        assert max(abs(float(x) - float(loss)) for x in per_rank(got)) < 1e-12 * abs(float(loss))
        assert test_sharding.worst(got_grads, grads, sh, spec) < (1e-12,)
        assert not second or test_sharding.worst(got_products, products, sh, spec) < (1e-12,)


def test_arrows_and_index_agree():
    """Whatever a dim gains or loses, alone or with other dims, its parts are those that the index says."""
    compute = dict(a=None, b=None, seq=("cp", "tp"), whole=None, c=("dp",))
    compute |= {"seq*": "cp", "seq**": None, "a*": ("dp", "cp"), "b*": ("tp",), "a**": "tp"}
    x = torch.randn(8, 16, 8, dtype=torch.float64)
    with simulate(8):
        for zigzag in ({}, {"seq": "cp"}, {"seq": ("cp", "tp")}):
            sh = Sharding(make_mesh("dp=2,cp=2,tp=2", device="cpu"), Rules(compute=compute, zigzag=zigzag))
            sides = ["a seq b", "a seq* b", "a seq** b", "a* seq** b", "a seq* b*", "a* seq** b*", "a** seq* b"]
            for one, two in itertools.permutations(sides, 2):
                y = sh(sh.shard(x, one), f"{one} -> {two}")
                pairs = zip(per_rank(y), per_rank(sh.shard(x, two)), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs), (zigzag, one, two)


def test_zigzags_that_do_not_fit_are_refused():
    rows = dict(seq="cp", plain="cp", mlp="tp")
    mesh = make_mesh("cp=2,tp=2", device="cpu", abstract=True)
    with pytest.raises(ShardingError, match="zigzag seq='tp' must be the first axes of the dim's row"):
        Sharding(mesh, Rules(compute=rows, zigzag={"seq": "tp"}))
    with pytest.raises(ShardingError, match="divide by 4, twice the 2 ranks of its zigzag order"):
        Sharding(mesh, Rules(compute=rows, zigzag={"seq": "cp"})).local_size("seq", 6)
    with pytest.raises(UserError, match="context='spiral' must be one of gather, ring"):
        Rules(context="spiral")
    with simulate(4):
        sh = Sharding(make_mesh("cp=2,tp=2", device="cpu"), Rules(compute=rows, zigzag={"seq": "cp"}))
        with pytest.raises(ShardingError, match="only one side is in zigzag order"):
            sh(torch.zeros(2), "seq -> plain")


# ---------------------------------------------------------------------------------------------- attention by itself

ROWS, S, KV, GROUP, HEAD = 2, 16, 2, 2, 3
DOCUMENTS = (torch.arange(S) >= torch.tensor([[3], [9]])).long() + (
    torch.arange(S) >= torch.tensor([[12], [10]])
).long()
FORMS = {
    "causal": {},
    "full": dict(causal=False),
    "documents": dict(segments=DOCUMENTS),
    "window": dict(window=3, segments=DOCUMENTS, softcap=1.5),
    "narrow": dict(window=2),
    "both sides": dict(causal=False, window=4, scale=0.9),
    "sinks": dict(sinks=torch.randn(KV, GROUP, dtype=torch.float64), window=7),
    "sinks, documents": dict(sinks=torch.randn(KV, GROUP, dtype=torch.float64), segments=DOCUMENTS, causal=False),
}


def reference(q, k, v, *, causal=True, window=None, softcap=None, sinks=None, segments=None, scale=None):
    """The definition: a softmax over all keys of a row."""
    s = torch.einsum("bqngd,bknd->bngqk", q, k) * (HEAD**-0.5 if scale is None else scale)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    i = torch.arange(S)
    seen = torch.ones(ROWS, S, S, dtype=torch.bool)
    seen &= i[None, :] <= i[:, None] if causal else seen
    seen &= (i[:, None] - i[None, :]).abs() < (window or S)
    seen &= segments[:, :, None] == segments[:, None, :] if segments is not None else seen
    s = s.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, :, None, None].expand(*s.shape[:-1], 1)], -1)
    return torch.einsum("bngqk,bknd->bqngd", s.softmax(-1)[..., :S], v)


def tensors_of_attention():
    g = torch.Generator().manual_seed(0)
    shapes = [(ROWS, S, KV, GROUP, HEAD), (ROWS, S, KV, HEAD), (ROWS, S, KV, HEAD), (ROWS, S, KV, GROUP, HEAD)]
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]


def sharding(axes, kind, *, heads=KV * GROUP, kv_heads=KV, sp=False, precision=DOUBLE, ulysses=None, **options):
    also = factoring(axes, kind, heads=heads, kv_heads=kv_heads, ulysses=ulysses)
    mesh = make_mesh(axes, also=also, kv_heads=kv_heads, device="cpu")
    rules = standard_rules(mesh, sequence_parallel=sp, context=kind, **options)
    return Sharding(mesh, rules, precision=precision)


Q, K = "batch seq kv group head", "batch seq kv head"


def local_gradients(sh, q, k, v, go, form):
    """(o, gradients of q, k, v and sinks) with local parts of global values."""
    q, go = (sh.shard(t, Q) for t in (q, go))
    k, v = (sh.shard(t, K) for t in (k, v))
    form = dict(form)
    if "segments" in form:
        form["segments"] = sh.shard(form["segments"], "batch seq")
    leaves = [q, k, v]
    if "sinks" in form:
        form["sinks"] = sh.shard(form["sinks"], "kv group")
        leaves.append(form["sinks"])
    leaves = [t.detach().requires_grad_() for t in leaves]
    if "sinks" in form:
        form["sinks"] = leaves[3]
    o = context_attention(*leaves[:3], sh=sh, **form)
    return o.detach(), torch.autograd.grad(o, leaves, go)


MESHES = [("cp=2", None), ("cp=4", 2)]


@pytest.mark.parametrize("kind", CONTEXTS)
def test_every_form_equals_the_plain_softmax(kind):
    q, k, v, go = tensors_of_attention()
    for (axes, inner), (name, form) in itertools.product(MESHES, FORMS.items()):
        if axes == "cp=2" and (kind == "ulysses+ring" or name not in ("causal", "window")):
            continue  # a ring alone; what two ranks do differently does not depend on the form
        leaves = [t.clone().requires_grad_() for t in (q, k, v, *([form["sinks"]] if "sinks" in form else []))]
        want = reference(*leaves[:3], **{**form, **({"sinks": leaves[3]} if "sinks" in form else {})})
        grads = torch.autograd.grad(want, leaves, go)
        with simulate(math.prod(parse_axes(axes).values())):
            sh = sharding(axes, kind, ulysses=inner if kind == "ulysses+ring" else None)
            o, got = local_gradients(sh, q, k, v, go, form)
            sides = [Q, Q, K, K]
            for side, mine, theirs in zip(sides, (o, *got), (want.detach(), *grads), strict=False):
                for a, b in zip(per_rank(mine), per_rank(sh.shard(theirs, side)), strict=True):
                    assert (a - b).abs().max() < 1e-12, (axes, name, side)
            if "sinks" in form:  # each rank's is a summand
                assert (sum(per_rank(got[3])) - grads[3]).abs().max() < 1e-12, (axes, name)


@pytest.mark.parametrize("how", ["create_graph", "torch.func"])
def test_second_derivatives_of_the_ring(how):
    q, k, v, go = tensors_of_attention()
    form = dict(segments=DOCUMENTS, window=5, sinks=FORMS["sinks"]["sinks"])
    along = [torch.randn(t.shape, dtype=torch.float64) for t in (q, k, v)]

    def products(f, leaves, go, along):
        """Of the Hessian of sum(f · go) with `along`."""
        if how == "torch.func":
            return torch.func.grad(
                lambda ts: sum(
                    (g * a).sum() for g, a in zip(torch.func.grad(lambda u: (f(*u) * go).sum())(ts), along, strict=True)
                )
            )(tuple(leaves))
        leaves = [t.detach().requires_grad_() for t in leaves]
        grads = torch.autograd.grad(f(*leaves), leaves, go, create_graph=True)
        return torch.autograd.grad([*grads], leaves, along)

    want = products(lambda q, k, v: reference(q, k, v, **form), [q, k, v], go, along)
    with simulate(2):
        sh = sharding("cp=2", "ring")
        mine = [sh.shard(t, side) for t, side in zip((q, k, v, go, *along), (Q, K, K, Q, Q, K, K), strict=True)]
        local = {**form, "segments": sh.shard(DOCUMENTS, "batch seq")}
        got = products(lambda q, k, v: context_attention(q, k, v, sh=sh, **local), mine[:3], mine[3], mine[4:])
        for side, a, b in zip((Q, K, K), got, want, strict=True):
            for x, y in zip(per_rank(a), per_rank(sh.shard(b, side)), strict=True):
                assert (x - y).abs().max() < 1e-11


# ----------------------------------------------------------------------------------------- what it costs and keeps


@pytest.mark.parametrize("form", ["causal", "full", "window", "documents"])
def test_the_ring_sends_to_neighbours_alone(form):
    """n - 1 exchanges of keys and values forward; as many backward, and n of their gradients. In a window of one chunk
    beside a query's own, one exchange each way; so backward, and gradients go home the same ways."""
    q, k, v, go = tensors_of_attention()
    n = 4
    with simulate(n), record_collectives() as found:
        local_gradients(sharding(f"cp={n}", "ring"), q, k, v, go, FORMS[form])
    assert {c.kind for c in found} == {"exchange"} and {c.axes for c in found} == {("cp",)}
    keys, documents = ROWS * S // n * KV * HEAD, ROWS * S // n
    steps = 2 if form == "window" else n - 1
    sent = (2 * steps + (2 if form == "window" else n)) * 2 * [keys * 8]
    if "segments" in FORMS[form]:
        sent += 2 * steps * [documents * 8]
    assert sorted(c.elements * c.dtype.itemsize for c in found) == sorted(sent)


def test_parts_that_no_rank_sees_are_not_sent_for():
    """The fewest exchanges between neighbours that bring every part which some rank sees, by brute force over pairs of
    positions; by the closed forms too."""
    part = 8
    for n, zigzag, causal in itertools.product((2, 3, 4, 8), (True, False), (True, False)):
        held = [
            torch.cat([torch.arange(s, s + part // (1 + zigzag)) for s in ring.runs_of(p, part, n, zigzag)])
            for p in range(n)
        ]
        for window in (None, 1, 2, 4, 5, 6, 8, 9, 10, 17, 40):
            needed = ring.offsets_needed(n, part, zigzag, causal, window)
            for s in range(1, n):
                seen = False
                for p in range(n):
                    away = held[p][:, None] - held[(p - s) % n]
                    mask = away.abs() < (window or n * part)
                    seen |= bool((mask & (away >= 0) if causal else mask).any())
                assert (s in needed) == seen
            there, back = ring.legs(n, needed)
            assert all(s <= there or n - s <= back for s in needed)
            fewest = min(f + b for f in range(n) for b in range(n) if all(s <= f or n - s <= b for s in needed))
            assert there + back == fewest
            behind = n - 1 if window is None else -(-(window - 1) // (part // (1 + zigzag)))
            if causal and not zigzag:
                assert (there, back) == (min(n - 1, behind), 0)
            if zigzag:
                assert (there, back) == ((behind, behind) if 2 * behind < n - 1 else (n - 1, 0))


def test_the_other_kinds_send_what_their_arrows_say():
    q, k, v, go = tensors_of_attention()
    queries, keys = ROWS * S // 4 * KV * GROUP * HEAD, ROWS * S // 4 * KV * HEAD

    def sent(kind, axes="cp=4", **options):
        with simulate(4), record_collectives() as found:
            local_gradients(sharding(axes, kind, **options), q, k, v, go, {})
        return sorted((c.kind, "+".join(c.axes), c.elements) for c in found)

    gather = [("all-gather", "cp", keys)] * 2 + [("reduce-scatter", "cp", 4 * keys)] * 2
    assert sent("gather") == sorted(gather)
    # kv heads on cp_kv, of which there are two for four ranks: each goes to the two ranks of cp_group
    ulysses = [("all-to-all", "cp_kv+cp_group", queries)] * 4  # q and o, and back
    ulysses += [("all-gather", "cp_group", keys)] * 2 + [("all-to-all", "cp_kv", 2 * keys)] * 4
    ulysses += [("reduce-scatter", "cp_group", 2 * keys)] * 2
    assert sent("ulysses") == sorted(ulysses)
    both = [("all-to-all", "cp_kv", queries)] * 4 + [("all-to-all", "cp_kv", keys)] * 4
    both += [("exchange", "cp_ring", keys)] * (2 * (1 + 1 + 2))
    assert sent("ulysses+ring", ulysses=2) == sorted(both)


def watched(monkeypatch, log, alive, keys=None):
    """Log the exchanges and the work of the ring; keep weak references to what comes, and count those alive: of everything
    in `log`, in `keys` of keys and values alone, not of the gradients that travel beside them."""
    coming = []
    begin, merged, gradients = ring.begin_exchange, ring._merged, ring._gradients

    class Watched:
        def __init__(self, *args, **options):
            self.inner = begin(*args, **options)
            log.append("begin")
            found = [weakref.ref(x) for x in self.inner.received]
            alive.extend(found)
            coming.extend(found if sys._getframe(1).f_code is ring._passing.__code__ else ())
            log.append(sum(r() is not None for r in alive))
            (keys if keys is not None else []).append(sum(r() is not None for r in coming))

        def finish(self):
            log.append("wait")
            return self.inner.finish()

    def count():
        log.append("compute")
        log.append(sum(r() is not None for r in alive))
        (keys if keys is not None else []).append(sum(r() is not None for r in coming))

    monkeypatch.setattr(ring, "begin_exchange", Watched)
    monkeypatch.setattr(ring, "_merged", lambda *a: (count(), merged(*a))[1])
    monkeypatch.setattr(ring, "_gradients", lambda *a: (count(), gradients(*a))[1])


def on_ring(**form):
    """The forward of a ring of four and its backward, by hand, so that nothing else is alive."""
    q, k, v, go = tensors_of_attention()
    sh = sharding("cp=4", "ring")
    q, go, k, v = sh.shard(q, Q), sh.shard(go, Q), sh.shard(k, K), sh.shard(v, K)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    o = context_attention(*leaves, sh=sh, **form)
    yield o
    yield torch.autograd.grad(o, leaves, go)


@pytest.mark.parametrize("window", [None, 3])
def test_two_remote_parts_at_most_and_none_is_kept(window, monkeypatch):
    log, alive, keys = [], [], []
    watched(monkeypatch, log, alive, keys)
    with simulate(4):
        run = on_ring(window=window)
        o = next(run)
        forward = [x for x in log if isinstance(x, int)]
        sent = 3 if window is None else 2
        assert max(forward) == 2 * 2 and len(forward) == sent + 4 * (sent + 1)  # two parts, of keys and of values
        assert not any(r() is not None for r in alive)
        log.clear(), alive.clear(), keys.clear()
        next(run)
        # two parts of keys and of values again; beside them a pair of gradients under way, and one that comes
        assert max(keys) == 2 * 2 and max(x for x in log if isinstance(x, int)) <= 2 * 2 + 2
        assert o is not None


def test_exchanges_run_beside_the_work(monkeypatch):
    log = []
    watched(monkeypatch, log, [])
    with simulate(4):
        run = on_ring()
        o = next(run)
        steps = [k for k, _ in itertools.groupby(x for x in log if not isinstance(x, int))]
        assert steps == ["begin", "compute", "wait"] * 3 + ["compute"]
        log.clear()
        next(run)
        steps = [k for k, _ in itertools.groupby(x for x in log if not isinstance(x, int))]
        # keys and values for the next step, work, the gradients of the last step and these ones' on, keys and values
        first, middle, last = (
            ["begin", "compute", "begin", "wait"],
            ["begin", "compute", "wait", "begin", "wait"],
            ["compute", "wait", "begin", "wait"],
        )
        assert steps == first + middle * 2 + last
        assert o is not None


HALVES = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 1024, 1, 1, 64))


def _triangle(rows, columns):
    """Pairs under the diagonal of queries that are the last of the keys."""
    queries, keys = rows.stop - rows.start, columns.stop - columns.start
    return queries * (keys - queries) + queries * (queries + 1) // 2


def test_the_work_is_shared_evenly():
    """Pairs of query and key that are seen, and pairs that the kernels look at; in plain order the last rank has most."""

    def areas(places, ranks, zigzag, part):
        total = []
        for place in places:
            here = 0
            for there in range(ranks):
                mine, theirs = (ring.runs_of(p, part, ranks, zigzag) for p in (place, there))
                call = ring.plan(mine, theirs, part // len(mine), True, None)
                if call is None:
                    continue
                rows, columns = (s.stop - s.start for s in call[:2])
                mask = Mask(rows, columns, call.mask == "order")
                here += sum((r.stop - r.start) * (c.stop - c.start) for r, c in mask.blocks(64))
            total.append(here)
        return total

    n, seq = 4, 4096
    seen = {}
    with simulate(n):
        for zigzag in (True, False):
            for kind in ("gather", "ring"):
                sh = sharding(f"cp={n}", kind, zigzag=zigzag)
                seen[kind, zigzag] = [int((p + 1).sum()) for p in per_rank(sh.index("seq", seq))]
            seen["kernels", zigzag] = areas(range(n), n, zigzag, seq // n)
        # a ring of longer parts, each with the heads of one rank of two
        for zigzag in (True, False):
            sh = sharding(f"cp={n}", "ulysses+ring", ulysses=2, zigzag=zigzag)
            seen["ulysses+ring", zigzag] = [int((p + 1).sum()) for p in per_rank(sh.index("seq**", seq))]
            assert sh.mesh.size(sh.axes("seq**")) == 2 and sh.mesh.size(sh.axes("kv**")) == 2
            seen["its kernels", zigzag] = areas(range(2), 2, zigzag, seq // 2)
        # what gathered keys cost: blocks of queries, each with the keys up to its last
        for zigzag in (True, False):
            sh = sharding(f"cp={n}", "gather", zigzag=zigzag)
            masks = [
                Mask(seq // n, seq, True, None, p, torch.arange(seq), look=True) for p in per_rank(sh.index("seq", seq))
            ]
            blocks = [[(r.stop - r.start) * (c.stop - c.start) for r, c in m.blocks(64)] for m in masks]
            seen["gathered kernels", zigzag] = [sum(b) for b in blocks]
            runs = [cuda.calls(HALVES, m) for m in masks]  # under whose diagonals the CUDA kernel looks
            triangles = [[_triangle(c.rows, c.columns) for c in calls] for calls in runs]
            seen["gathered CUDA kernels", zigzag] = [sum(t) for t in triangles]
    assert seen["gathered CUDA kernels", True] == seen["gather", True]
    for what in {what for what, _ in seen}:
        assert max(seen[what, True]) <= 1.05 * min(seen[what, True]), (what, seen[what, True])
        assert max(seen[what, False]) > 2.5 * min(seen[what, False]), what
    assert sum(seen["ring", True]) == seq * (seq + 1) // 2
    assert sum(seen["kernels", True]) < 1.05 * sum(seen["ring", True])


def test_parts_of_which_nothing_is_seen_are_left_out():
    """In a ring of 8 in zigzag order a window of two chunks meets few of the other ranks' parts; every pair of runs is
    planned as brute force says."""
    n, part = 8, 8
    calls = 0
    for place, there, window, causal in itertools.product(range(n), range(n), (None, 1, 3, 8), (True, False)):
        mine, theirs = (ring.runs_of(p, part, n, True) for p in (place, there))
        call = ring.plan(mine, theirs, part // 2, causal, window)
        q, k = (torch.cat([torch.arange(s, s + part // 2) for s in runs]) for runs in (mine, theirs))
        seen = (q[:, None] - k[None]).abs() < (window or 99)
        seen &= q[:, None] >= k[None] if causal else seen
        assert (call is None) == (not seen.any())
        calls += call is not None and window == 3 and causal
        if call is None:
            continue
        outside = seen.clone()
        outside[call.rows, call.columns] = False
        inside, length = seen[call.rows, call.columns], part // 2
        assert (
            inside[:length].any() and inside[-length:].any() and inside[:, :length].any() and inside[:, -length:].any()
        )
        assert not outside.any() and (call.mask != "none" or seen[call.rows, call.columns].all())
        order = torch.ones(part, part, dtype=torch.bool).tril()
        assert call.mask != "order" or torch.equal(seen, order)
    assert calls <= 3 * n


# ------------------------------------------------------------------------------------------------------- whole models

SMALL = dict(vocab=24, embed=16, layers=2, heads=4, kv_heads=2, head=6, mlp=12, max_seq=16)
WINDOWED = DecoderConfig(**SMALL, window=3, pattern=("window", "full"), attention_softcap=2.0, sinks=True, dropout=0.2)
LAYOUTS = [
    ("cp=2", "gather", False, everything),
    ("cp=2", "ring", False, nothing),
    ("cp=4", "ring", False, names("attention")),
    ("cp=4", "ulysses", False, names("attention")),
    ("cp=4", "ulysses+ring", False, nothing),
    ("cp=2,tp=2", "gather", True, nothing),
    ("cp=2,tp=2", "ring", True, names("attention")),
    ("cp=2,tp=2", "ulysses", True, everything),
    ("cp=4,tp=2", "ulysses+ring", True, names("attention")),
]


def parameters(config):
    spec = Decoder(config).spec()
    drawn = [normal(key(i), p.shape, dtype=torch.float64) * 0.4 for i, p in enumerate(params_of(spec).values())]
    return tree.like(spec, drawn)


def batch():
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SMALL["vocab"], (ROWS, S + 1), generator=g)
    mask = torch.rand(ROWS, S, generator=g) < 0.7
    return {
        "tokens": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "mask": mask,
        "segments": DOCUMENTS,
    }


def gradients(model, params, data, sh):
    return accumulate(model.loss, 1, weights=model.weights)(params, data, Ctx(sh=sh, key=key(7)))


BATCH = batch()  # made outside of simulation, where torch's own generators differ by rank


@functools.cache
def on_one_device():
    return gradients(Decoder(WINDOWED), parameters(WINDOWED), BATCH, Sharding(precision=DOUBLE))


def errors(layout, want):
    """The worst relative error of loss and raw gradients over all (local) ranks, and where."""
    axes, kind, sp, save = layout
    (value, _), grads = want
    sh = sharding(axes, kind, sp=sp, ulysses=2 if kind == "ulysses+ring" else None)
    model = Decoder(WINDOWED, save=save)
    params = sh.shard_params(parameters(WINDOWED), model.spec())
    (got, _), mine = gradients(model, params, {n: sh.shard(x, "batch seq") for n, x in BATCH.items()}, sh)
    worst = (max(abs(float(v - value)) for v in per_rank(got)) / abs(float(value)), "loss")
    floor = 1e-3 * float(torch.stack([r.norm() for r in tree.leaves(grads)]).norm())
    leaves = zip(tree.named(mine).items(), tree.leaves(grads), tree.leaves(model.spec()), strict=True)
    for (path, g), r, p in leaves:
        theirs = per_rank(sh.local(sh.shard_param(r, p)))
        error = max(float((a - b).norm()) for a, b in zip(per_rank(sh.local(g)), theirs, strict=True))
        worst = max(worst, (error / max(float(r.norm()), floor), path))
    return worst


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x[0]}-{x[1]}")
def test_every_kind_computes_the_same_model(layout):
    """With windows, soft caps, sinks, packed documents, masked tokens, dropout, sequence parallelism, recomputation."""
    want = on_one_device()
    with simulate(math.prod(parse_axes(layout[0]).values())):
        assert errors(layout, want) < (1e-11,)


GLOO = [
    ("cp=4", "gather", False, everything),
    ("cp=4", "ring", False, names("attention")),
    ("cp=2,tp=2", "ring", True, everything),
    ("cp=4", "ulysses", False, nothing),
    ("cp=4", "ulysses+ring", False, everything),
]


def on_processes(i):
    torch.set_num_threads(1)
    return errors(GLOO[i], on_one_device())


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("i", range(len(GLOO)), ids=[f"{x[0]}-{x[1]}" for x in GLOO])
def test_every_kind_on_real_processes(i):
    assert max(processes(4).run(on_processes, i)) < (1e-11,)


def compiled():
    torch._dynamo.reset()
    config = dataclasses.replace(WINDOWED, layers=1, pattern=())
    sh, params, found = sharding("cp=2", "ring"), parameters(config), []
    data = {n: sh.shard(x, "batch seq") for n, x in BATCH.items()}
    for how in (False, {"backend": "aot_eager"}):
        model = Decoder(config, compile=how)
        (_, _), grads = gradients(model, sh.shard_params(params, model.spec()), data, sh)
        found.append(tree.leaves(sh.local(grads)))
    return max(float((a - b).norm() / a.norm()) for a, b in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_compiled_blocks_with_a_ring():
    assert max(processes(2).run(compiled, timeout=300)) < 1e-12


@pytest.mark.parametrize("kind", CONTEXTS)
def test_the_checking_mode_accepts_every_kind(kind):
    config = dataclasses.replace(WINDOWED, dropout=0.0)
    model = Decoder(config)
    also = factoring("dp=2,cp=2,tp=2", kind, heads=4, kv_heads=2)
    mesh = make_mesh("dp=2,cp=2,tp=2", kv_heads=2, also=also, abstract=True, device="cpu")
    data = {n: x for n, x in BATCH.items() if n not in ("mask", "segments")}

    def program(params, batch, sh):
        terms, _ = model.loss(params, batch, Ctx(sh=sh))
        return sh.sum(terms["lm"].items, "batch seq ->")

    check(program, model.spec(), parameters(config), data, standard_rules(mesh, sequence_parallel=True, context=kind))


# ------------------------------------------------------------------------------------------------- what does not fit


def test_heads_that_ranks_cannot_share_are_refused():
    with pytest.raises(UserError, match=r"cannot share 4 query and 2 kv heads, on tp=1, among 8 .* use 1 or 2 or 4"):
        factoring("cp=8", "ulysses", heads=4, kv_heads=2)
    assert factoring("dp=2,cp=8", "ulysses+ring", heads=4, kv_heads=2) == ("dp=2,cp_ring=2,cp_kv=2,cp_group=2",)
    assert factoring("cp=4,tp=4", "ulysses", heads=32, kv_heads=2) == ("cp_ring=1,cp_kv=1,cp_group=4,tp=4",)
    assert factoring("cp=4", "ring", heads=4, kv_heads=2) == factoring("dp=4", "ulysses", heads=4, kv_heads=2) == ()
    q, k, v, _ = tensors_of_attention()
    with simulate(4):
        mesh = make_mesh("cp=4", device="cpu")
        sh = Sharding(mesh, standard_rules(mesh, context="ulysses"))
        local = sh.shard(q, Q), sh.shard(k, K), sh.shard(v, K)
        with pytest.raises(UserError, match=r"the 2 kv heads on a rank do not divide by 4, the size of mesh axes cp"):
            context_attention(*local, sh=sh)
        with pytest.raises(UserError, match="needs mesh axes cp_ring"):
            standard_rules(mesh, context="ulysses+ring")
        with pytest.raises(ShardingError, match=r"needs a row 'seq\*\*'"):
            context_attention(*local, sh=Sharding(mesh, standard_rules(mesh)), kind="ulysses")
        with pytest.raises(UserError, match="kind='star'"):
            context_attention(*local, sh=sh, kind="star")


@pytest.mark.parametrize(
    ("axes", "kind", "sizes", "message"),
    [
        ("cp=4", "ring", dict(seq_len=20), "--batch.seq-len 20 does not divide by 8, .*: use 16 or 24"),
        ("cp=3,tp=4", "gather", dict(seq_len=24, sp=True), None),
        ("cp=2,tp=3", "gather", dict(seq_len=18, sp=True), "does not divide by 12, .*: use 12 or 24"),
        ("cp=4", "ulysses", dict(seq_len=20, kv_heads=4), None),
        ("cp=4", "ulysses", dict(kv_heads=2), "the 2 kv heads on a tensor-parallel rank do not divide by 4"),
        ("cp=4", "gather", dict(seq_len=18), "use 16 or 24"),
    ],
)
def test_legality_knows_the_kinds(axes, kind, sizes, message):
    mesh = make_mesh(axes, abstract=True, device="cpu")
    sizes = {"seq_len": 24, "kv_heads": 4, "sp": False, **sizes}
    asked = dict(
        heads=12, kv_heads=sizes["kv_heads"], batch_size=4, seq_len=sizes["seq_len"], sequence_parallel=sizes["sp"]
    )
    if message is None:
        return check_layout(mesh, context=kind, **asked)
    with pytest.raises(UserError, match=message):
        check_layout(mesh, context=kind, **asked)


def test_neighbours_on_a_mesh():
    """Of ranks (dp, cp_0, cp_1, tp) in their order, along (cp_0, cp_1) and along the other order."""
    mesh = make_mesh("dp=2,a=2,b=3,tp=2", abstract=True, device="cpu")
    before, behind = collectives.neighbours(mesh, ("a", "b"))
    assert behind[:4] == [2, 3, 4, 5] and behind[10] == 0 and behind[11] == 1 and behind[12 + 10] == 12
    assert all(before[behind[r]] == r for r in range(24))
    assert (
        collectives.neighbours(mesh, ("b", "a"))[1][:3] == [6, 7, 8]
        and collectives.neighbours(mesh, ("b", "a"))[1][6] == 2
    )
