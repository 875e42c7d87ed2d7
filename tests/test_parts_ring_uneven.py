"""Small parts by themselves, against what they are defined to do: which pairs of runs a ring plans, what goes in which
bucket, which gradients wait for which, and dims counted from the end."""

import itertools

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fmegatron import buckets, uneven, zero
from fmegatron.accumulate import Term, Weight, accumulate
from fmegatron.collectives import Step
from fmegatron.context import Ctx
from fmegatron.grad import to_local
from fmegatron.mesh import make_mesh
from fmegatron.optim import sgd
from fmegatron.padding import divisible_size, shard_batch
from fmegatron.parallel import ring
from fmegatron.parallel.context import context_attention
from fmegatron.precision import Precision
from fmegatron.recording import record_collectives
from fmegatron.rules import Rules, standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import Param
from fmegatron.zero import Ahead, Reducer, in_buckets, moving, with_sharded_state

DOUBLE = Precision(params=torch.float64)


# ---------------------------------------------------------------------------------------------------------- a ring


@pytest.mark.parametrize("zigzag", [True, False], ids=["zigzag", "plain"])
def test_every_pair_of_parts_is_planned_as_brute_force_says(zigzag):
    """What is covered, and by which mask: none exactly where all pairs are seen, the order exactly where queries and keys
    are the same positions and places alone say which are seen (in a window: of one run)."""
    windows = (None, 1, 2, 3, 4, 5, 8, 9, 12, 15, 16, 40)
    for n, part, causal, window in itertools.product((2, 3, 4), (8, 2 if zigzag else 1), (True, False), windows):
        for place, there in itertools.product(range(n), repeat=2):
            mine, theirs = (ring.runs_of(p, part, n, zigzag) for p in (place, there))
            length = part // len(mine)
            q, k = (torch.cat([torch.arange(s, s + length) for s in runs]) for runs in (mine, theirs))
            seen = (q[:, None] - k).abs() < (window or n * part)
            seen &= q[:, None] >= k if causal else seen
            call = ring.plan(mine, theirs, length, causal, window)
            if not seen.any():
                assert call is None
                continue
            runs = seen.view(len(mine), length, len(theirs), length).any(3).any(1)
            for held, side in ((runs.any(1), call.rows), (runs.any(0), call.columns)):
                at = held.nonzero().flatten().tolist()
                assert side == slice(at[0] * length, (at[-1] + 1) * length)
            if seen[call.rows, call.columns].all():
                assert call.mask == "none"
            else:
                ordered = place == there and causal and (window is None or not zigzag)
                assert call.mask == ("order" if ordered else "positions")


def test_the_runs_and_offsets_of_a_ring():
    """Of 2n chunks rank r of n holds r and 2n - 1 - r; offsets are of other ranks."""
    for n in (1, 2, 3, 5):
        chunks = torch.arange(0, 6 * n, 3)
        for r in range(n):
            assert ring.runs_of(r, 6, n, False) == [6 * r]
            assert ring.runs_of(r, 6, n, True) == [int(chunks[r]), int(chunks[2 * n - 1 - r])]
        for zigzag, window in itertools.product((True, False), (None, 6 * n)):
            assert ring.offsets_needed(n, 6, zigzag, True, window) == set(range(1, n))
        assert ring.offsets_needed(n, 6, False, True, 2) == ({1} if n > 1 else set())
        assert ring.offsets_needed(n, 6, False, True, 1) == set()


FORMS = {
    "plain order": (3, False, dict(segments=True)),
    "plain order, one part not sent": (4, False, dict(window=10)),
    "plain order, a narrow window on both sides": (6, False, dict(window=5, causal=False)),
    "two chunks behind": (6, True, dict(window=5)),
    "two chunks behind, documents": (6, True, dict(window=4, segments=True)),
    "three ranks": (3, True, dict(segments=True, softcap=1.5)),
    "three ranks, all seen": (3, True, dict(causal=False)),
}
# [exchanges of keys or values forward, as many backward, those of their gradients]: one for each step of the legs
# forward and backward; of gradients one less (a rank's own stays where it is), and those home. None: all n - 1 and n.
STEPS = {
    "plain order, one part not sent": (2, 1 + 2),
    "plain order, a narrow window on both sides": (2, 1 + 1),
    "two chunks behind": (4, 2 * (1 + 2)),
    "two chunks behind, documents": (4, 2 * (1 + 2)),
}


def softmax_of_torch(q, k, v, *, causal=True, window=None, segments=None, softcap=None):
    """Attention by torch alone: over all keys, with a mask that is written out."""
    seq, group = q.shape[1], q.shape[3]
    i = torch.arange(seq)
    seen = (i[:, None] - i).abs() < (window or seq)
    seen = seen & (i <= i[:, None]) if causal else seen
    seen = seen & (segments[:, :, None] == segments[:, None]) if segments is not None else seen.expand(len(q), -1, -1)
    flat, k, v = q.flatten(2, 3), k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    if softcap is None:
        heads_first = [t.transpose(1, 2) for t in (flat, k, v)]
        with sdpa_kernel(SDPBackend.MATH):  # which has second derivatives
            mixed = functional.scaled_dot_product_attention(*heads_first, attn_mask=seen[:, None])
        return mixed.transpose(1, 2).view_as(q)
    scores = softcap * (torch.einsum("bqnd,bknd->bnqk", flat, k) / q.shape[-1] ** 0.5 / softcap).tanh()
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bnqk,bknd->bqnd", weights, v).view_as(q)


@pytest.mark.parametrize("name", FORMS)
def test_rings_of_several_sizes_in_both_orders(name):
    """Values, gradients and what is sent: of legs longer than one step each way, and of parts that stay at home."""
    n, zigzag, form = FORMS[name]
    seq = 24
    g = torch.Generator().manual_seed(0)
    q, go = torch.randn(2, 2, seq, 1, 2, 3, generator=g, dtype=torch.float64)
    k, v = torch.randn(2, 2, seq, 1, 3, generator=g, dtype=torch.float64)
    if form.get("segments"):
        form = {**form, "segments": (torch.arange(seq) >= torch.tensor([[5], [14]])).long()}
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    want = softmax_of_torch(*leaves, **form)
    grads = torch.autograd.grad(want, leaves, go)
    sides = ["batch seq kv group head", "batch seq kv head", "batch seq kv head"]
    with simulate(n):
        mesh = make_mesh(f"cp={n}", device="cpu")
        sh = Sharding(mesh, standard_rules(mesh, context="ring", zigzag=zigzag), precision=DOUBLE)
        local = [sh.shard(t, side).requires_grad_() for t, side in zip((q, k, v), sides, strict=True)]
        options = {**form, "segments": sh.shard(form["segments"], "batch seq")} if "segments" in form else form
        with record_collectives() as found:
            o = context_attention(*local, sh=sh, **options)
            got = torch.autograd.grad(o, local, sh.shard(go, sides[0]))
        for mine, theirs, side in zip((o, *got), (want, *grads), (sides[0], *sides), strict=True):
            for a, b in zip(per_rank(mine), per_rank(sh.shard(theirs.detach(), side)), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    steps, back = STEPS.get(name, (n - 1, n))
    assert {c.kind for c in found} == {"exchange"}
    sent = [c for c in found if c.dtype == torch.float64]
    assert len(sent) == 2 * (steps + steps + back)
    assert len(found) - len(sent) == (2 * steps if "segments" in form else 0)


def test_documents_of_other_parts_come_with_their_positions():
    """Kernels for documents take queries and keys in one order, unless positions say otherwise; for a rank's own part
    they are in one."""
    form, documents = ring.Form(True, None, 1.0, None), torch.zeros(1, 4, dtype=torch.long)
    whole = slice(0, 4)

    def masks(mask, mine):
        return ring._masks(ring.Call(whole, whole, mask), [8], [0], 4, mine, mine, form, torch.device("cpu"))

    (at, kv_at, segments, kv_segments), causal, _ = masks("none", documents)
    assert at.tolist() == [8, 9, 10, 11] and kv_at.tolist() == [0, 1, 2, 3] and not causal
    assert segments.equal(documents) and kv_segments.equal(documents)
    (at, kv_at, segments, kv_segments), causal, _ = masks("order", documents)
    assert at is kv_at is kv_segments is None and segments.equal(documents) and causal
    assert masks("none", None)[0] == masks("order", None)[0] == [None] * 4
    assert masks("positions", None)[0][0].tolist() == [8, 9, 10, 11]
    for length, held in ((1, [20]), (2, [20, 21])):  # the second of two runs, then the first
        assert ring._positions([8, 20], slice(length, 2 * length), length, torch.device("cpu")).tolist() == held
        assert ring._positions([8, 20], slice(0, length), length, torch.device("cpu")).tolist() == [
            h - 12 for h in held
        ]


class Ignored(torch.autograd.Function):
    """A zero, that says of its input that it has no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, g):
        return None


def test_derivatives_of_a_ring_that_nothing_reads_and_second_ones():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((1, 8, 1, 2, 3), (1, 8, 1, 3), (1, 8, 1, 3)))
    sides = ["batch seq kv group head", "batch seq kv head", "batch seq kv head"]

    def second(f, leaves):
        """The derivatives of the squares of those of the squares."""
        grads = torch.autograd.grad(f(*leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(t.square().sum() for t in grads), leaves)

    want = second(softmax_of_torch, [t.clone().requires_grad_() for t in (q, k, v)])
    with simulate(2):
        mesh = make_mesh("cp=2", device="cpu")
        sh = Sharding(mesh, standard_rules(mesh, context="ring"), precision=DOUBLE)
        local = [sh.shard(t, side).requires_grad_() for t, side in zip((q, k, v), sides, strict=True)]
        ignored = Ignored.apply(context_attention(*local, sh=sh))
        assert torch.autograd.grad(ignored, local, allow_unused=True) == (None,) * 3
        got = second(lambda *leaves: context_attention(*leaves, sh=sh), local)
        for mine, theirs, side in zip(got, want, sides, strict=True):
            for a, b in zip(per_rank(mine), per_rank(sh.shard(theirs, side)), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


# -------------------------------------------------------------------------------------------------------- buckets


def summed(*axes):
    return tuple(Step("P>I", (a,), (), ()) for a in axes)


def on_their_way(plans):
    """(collectives under way at once at the start, all that run), for summands of ones on a mesh of 2 × 2; the values are
    checked."""
    with simulate(4), record_collectives() as found:
        mesh = make_mesh("dp=2,tp=2", device="cpu")
        going = buckets.start(mesh, [torch.ones(i + 1, dtype=torch.float64) for i in range(len(plans))], plans)
        first = len(going.pending)
        for i, (x, plan) in enumerate(zip(going.finish(), plans, strict=True)):
            assert all(torch.equal(r, torch.full((i + 1,), 2.0 ** len(plan), dtype=torch.float64)) for r in per_rank(x))
    return first, [("+".join(c.axes), c.elements) for c in found]


def test_leaves_share_a_collective_that_one_of_them_comes_to_later():
    assert on_their_way([summed("dp", "tp"), summed("tp")]) == (1, [("dp", 1), ("tp", 3)])
    assert on_their_way([summed("tp"), summed("dp"), summed("tp")]) == (2, [("tp", 4), ("dp", 2)])  # both at once
    # each waits for the other: the first of them goes
    both = [summed("dp", "tp"), summed("tp", "dp")]
    assert on_their_way(both) == (1, [("dp", 1), ("tp", 3), ("dp", 2)])


def test_a_slice_among_buckets_is_no_collective():
    x = torch.arange(6.0)
    with simulate(2), record_collectives() as found:
        mesh = make_mesh("dp=2", device="cpu")
        (y,) = buckets.move(mesh, [x], [(Step("I>S", ("dp",), (), ((0, ("dp",)),)),)])
        assert [r.tolist() for r in per_rank(y)] == [[0, 1, 2], [3, 4, 5]]
    assert not found


def test_leaves_are_cut_into_groups_of_a_bucket(monkeypatch):
    """At most so many elements, or one leaf, and never fewer than fit."""
    monkeypatch.setattr(zero, "BUCKET", 4)
    assert list(in_buckets([2, 2, 1, 3, 1, 9, 4, 1])) == [[0, 1], [2, 3], [4], [5], [6], [7]]
    assert list(in_buckets([1, 1, 1, 1, 1, 1, 1, 1, 1])) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert list(in_buckets([])) == []


def test_one_bucket_is_under_way_while_another_is_put_back(monkeypatch):
    monkeypatch.setattr(zero, "BUCKET", 1)
    begin, log = zero.moving, []

    def logged(xs, *rest):
        log.append(("begin", xs[0].item()))
        arrive = begin(xs, *rest)
        return lambda: (log.append(("wait", xs[0].item())), arrive())[1]

    monkeypatch.setattr(zero, "moving", logged)
    params = [Param((1,), "embed")] * 3
    found = list(zero._in_buckets_moved([torch.tensor([float(i)]) for i in range(3)], params, Sharding(), "return"))
    assert [(i, x.item()) for i, x in found] == [(0, 0), (1, 1), (2, 2)]
    steps = [("begin", 0), ("begin", 1), ("wait", 0), ("begin", 2), ("wait", 1), ("wait", 2)]
    assert log == steps


# ----------------------------------------------------------------------------------------------------------- ZeRO


def data_parallel(precision=DOUBLE, **options):
    rows = {"batch": "dp", **dict.fromkeys(("seq", "embed", "mlp"))}
    return Sharding(make_mesh("dp=2", device="cpu"), Rules(rows, store="dp", **options), precision=precision)


def test_small_gradients_outside_the_layers_wait_for_a_large_one(monkeypatch):
    monkeypatch.setattr(zero, "SMALL", 4)
    spec = {
        "a": Param((4,), "embed", over="batch"),
        "b": Param((6,), "embed", over="batch"),
        "c": Param((2,), "embed", over="batch"),
    }
    taken = {}
    with simulate(2):
        reducer = Reducer(spec, [True] * 3, data_parallel(zero=1).delaying(), taken.__setitem__)
        for i, started in enumerate([[], [[0, 1]], [[0, 1]]]):
            reducer.add(i, torch.full((spec["abc"[i]].numel,), i + 1.0, dtype=torch.float64))
            assert [members for members, _ in reducer.started] == started
        reducer.finish()
        for i, n in enumerate((2, 3, 1)):  # the sum of two ranks, and half of it
            assert all(r.tolist() == [2 * (i + 1)] * n for r in per_rank(taken[i]))


def test_a_layer_of_which_some_leaves_are_not_trained_is_reduced():
    layer = {"w": Param((4,), "embed", over="batch seq"), "fixed": Param((4,), "embed", over="batch seq")}
    spec = {"layers": [layer, layer], "last": Param((4,), "embed", over="batch seq")}
    g = torch.Generator().manual_seed(0)
    drawn = [torch.randn(4, generator=g, dtype=torch.float64) for _ in range(5)]
    params = {"layers": [{"w": drawn[0], "fixed": drawn[1]}, {"w": drawn[2], "fixed": drawn[3]}], "last": drawn[4]}
    x = torch.randn(4, 3, 4, generator=g, dtype=torch.float64)
    trained = {"layers": [{"w": True, "fixed": False}] * 2, "last": True}

    def loss(p, x, ctx):
        for one, of in zip(p["layers"], spec["layers"], strict=True):
            w = ctx.sh.use(one, of)
            x = (x * w["w"] + w["fixed"]).sin()
        return {"a": Term((x * ctx.sh.use(p["last"], spec["last"])).sum(-1), "batch seq")}, {}

    f = accumulate(loss, weights=lambda x: {"a": Weight(x[..., 0] < 9, "batch seq")}, spec=spec, trainable=trained)
    want = f(params, x, Ctx(Sharding(precision=DOUBLE)))[1]
    with simulate(2):
        sh = data_parallel(zero=1)
        stored = to_local(sh.shard_params(params, spec))
        got = f(stored, sh.shard(x, "batch seq embed"), Ctx(sh))[1]
        for mine, theirs in (
            *((got["layers"][i]["w"], want["layers"][i]["w"]) for i in range(2)),
            (got["last"], want["last"]),
        ):
            torch.testing.assert_close(torch.cat(per_rank(mine)), theirs, rtol=0, atol=1e-14)
        assert all(got["layers"][i]["fixed"] is None for i in range(2))


def test_parameters_without_a_gradient_are_not_sent_back():
    spec = {"w": Param((4,), "embed", over="batch"), "fixed": Param((8,), "embed", over="batch")}
    with simulate(2):
        sh = data_parallel(zero=1)
        params = sh.shard_params({n: torch.ones(p.shape, dtype=torch.float64) for n, p in spec.items()}, spec)
        optimizer = with_sharded_state(sgd(0.5), spec, sh)
        state = optimizer.init(params)
        with record_collectives() as found:
            new, _, _ = optimizer.update(params, {"w": params["w"], "fixed": None}, state)
        assert new["fixed"] is params["fixed"]
        assert all(r.tolist() == [0.5] * 4 for r in per_rank(new["w"].to_local()))
    assert [(c.kind, c.elements) for c in found] == [("all-gather", 2)]


def test_an_update_under_torch_func_gives_whole_parameters():
    """Where nothing is moved in buckets: the derivative of an SGD step by the gradient is minus the rate."""
    spec = {"w": Param((4,), "embed", over="batch")}
    w, g = torch.arange(4.0, dtype=torch.float64), torch.arange(1.0, 5.0, dtype=torch.float64)
    with simulate(2):
        sh = data_parallel(zero=1)
        optimizer = with_sharded_state(sgd(0.5), spec, sh)
        state = optimizer.init(sh.shard_params({"w": w}, spec))

        def updated(t):
            return optimizer.update({"w": w}, {"w": t}, state)[0]["w"]

        new, pull = torch.func.vjp(updated, g)
        for x, y in zip(per_rank(new), per_rank(pull(w)[0]), strict=True):
            assert x.tolist() == (w - 0.5 * g).tolist() and y.tolist() == (-0.5 * w).tolist()


def test_leaves_that_are_ahead_may_be_fixed_in_part():
    spec = {"w": Param((4,), "embed", over="batch"), "fixed": Param((4,), "embed", over="batch")}
    x = torch.arange(8.0, dtype=torch.float64).view(2, 4)
    values = {"w": torch.arange(1.0, 5.0, dtype=torch.float64), "fixed": torch.full((4,), 3.0, dtype=torch.float64)}
    with simulate(2):
        sh = data_parallel(zero=3)
        local = to_local(sh.shard_params(values, spec))
        local["w"].requires_grad_()
        ahead = Ahead(local, spec, sh)
        ahead.begin()
        used = ahead()
        y = (sh.shard(x, "batch embed") * used["w"] * used["fixed"]).sum()
        (g,) = torch.autograd.grad(y, local["w"])
        torch.testing.assert_close(torch.cat(per_rank(g)), 3 * x.sum(0), rtol=0, atol=0)


def test_gradients_travel_in_the_dtype_of_sums_where_they_are_summed():
    """In bf16 where that is asked for, also below wider parameters; and what is only cut is rounded alike everywhere."""
    low = Precision(params=torch.float32, reduce=torch.bfloat16)
    g = torch.tensor([1 + 2**-12, 2.0, 3.0, 4.0])
    with simulate(2):
        p = Param((4,), "embed", over="batch")
        with record_collectives() as found:
            (x,) = moving([g], [p], data_parallel(low, zero=1).delaying(), "settle")()
        assert [(c.kind, c.dtype) for c in found] == [("reduce-scatter", torch.bfloat16)]
        assert x.dtype == torch.float32 and [r.tolist() for r in per_rank(x)] == [[2, 4], [6, 8]]
        # used alike on all ranks, so that its gradient is cut and not summed
        with record_collectives() as found:
            sh = data_parallel(low, zero=3)
            (x,) = moving([g], [Param((4,), "embed", over="")], sh, "leave")()
        assert not found and [r.tolist() for r in per_rank(x)] == [[1, 2], [3, 4]]
        # where the layout of the state is only a further cut, nothing is summed, and nothing rounded
        (x,) = moving([g], [p], data_parallel(low, zero=1), "shard")()
        assert per_rank(x)[0].tolist() == g[:2].tolist()
        # what enters arrives in the dtype of equations, what leaves in that of the parameter
        sh = data_parallel(Precision(params=torch.float32, compute=torch.bfloat16), zero=3)
        assert moving([g[:2]], [p], sh, "enter")()[0].dtype == torch.bfloat16
        assert moving([g.bfloat16()], [p], sh, "leave")()[0].dtype == torch.float32


# ------------------------------------------------------------------------------------------- sizes that do not divide


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_dims_may_be_counted_from_the_end(dim):
    x = torch.randn(5, 7, 6, dtype=torch.float64)
    n, counts = x.shape[dim], (2, 2)
    y = uneven.lay_out(x, dim, counts)
    assert torch.equal(uneven.lay_out(x, dim - 3, counts), y)
    assert torch.equal(uneven.whole(y, dim - 3, n, counts), x)
    once = uneven.lay_out(x, dim - 3, (4,))
    assert torch.equal(once, torch.cat([x, torch.zeros_like(once.narrow(dim, n, once.shape[dim] - n))], dim))
    for part, (start, size) in enumerate(uneven.parts(n, counts)):
        rest = x.narrow(dim, start, size)
        filled = uneven.filled(rest, dim - 3, n, counts)
        assert filled.shape[dim] == uneven.largest(n, counts)
        assert torch.equal(uneven.cut(filled, dim - 3, n, counts, part), rest)
        assert not filled.narrow(dim, size, filled.shape[dim] - size).any()


def test_batches_of_one_dim_and_of_none():
    with simulate(2):
        mesh = make_mesh("dp=2", device="cpu")
        sh = Sharding(mesh, standard_rules(mesh))
        found = shard_batch({"mask": torch.ones(3), "step": torch.tensor(7), "name": "text"}, sh)
        assert [r.tolist() for r in per_rank(found["mask"])] == [[1, 1], [1, 0]]
        assert found["step"].item() == 7 and found["name"] == "text"
        mesh = make_mesh("cp=2", device="cpu")
        sh = Sharding(mesh, standard_rules(mesh))
        assert [divisible_size(n, "seq", sh) for n in (1, 4, 5, 9)] == [4, 4, 8, 12]
        assert divisible_size(3, "batch", sh) == 3
