"""Parts of the core one by one, against closed forms: what whole layouts of models rarely reach."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from fmegatron import mesh as meshes
from fmegatron.accumulate import cut_batch, scaled, summed, with_rows
from fmegatron.collectives import Step, run_step
from fmegatron.context import Ctx
from fmegatron.errors import ShardingError, UserError
from fmegatron.function import apply_function
from fmegatron.mesh import Mesh, make_mesh
from fmegatron.optim import norm
from fmegatron.parallel.context import context_attention, factoring
from fmegatron.placements import Invariant, Replicate, Shard
from fmegatron.precision import Precision
from fmegatron.primitives import attention, cross_entropy, dropout, embedding
from fmegatron.primitives import dropout as dropout_function
from fmegatron.random import key
from fmegatron.rules import Rules, standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import Param
from fmegatron.zero import Awaited
from fmegatron.zigzag import from_zigzag, to_zigzag, zigzag_positions

F64 = torch.float64
DOUBLE = Precision(params=F64)


def sharding(axes, uneven=(), store=(), also=(), kv_heads=None, abstract=False, **rows):
    mesh = make_mesh(axes, also=also, kv_heads=kv_heads, abstract=abstract)
    return Sharding(mesh, Rules(rows, store=store, uneven=dict(uneven)), DOUBLE)


def as_rank(mesh: Mesh, rank: int) -> Mesh:
    """An abstract mesh as the process of one rank has it, for what runs no collective."""
    places = torch.unravel_index(torch.tensor(rank), tuple(mesh.sizes.values()))
    known = {("coordinate", a): int(n) for a, n in zip(mesh.sizes, places, strict=True)}
    return dataclasses.replace(mesh, _ranks=torch.arange(mesh.world).view(*mesh.sizes.values()), _cache=known)


def on_all(value, expected):
    for rank in per_rank(value):
        torch.testing.assert_close(rank, expected, rtol=0, atol=1e-13)


# --------------------------------------------------------------------------------------------------------- uneven dims

N = 5
PARTS = [(0, 1), (2, 3), (4, None), (None, None)]  # of N on four ranks; None: what fills up


def test_parts_of_a_dim_that_is_not_the_last_are_filled_with_zeros():
    x = torch.arange(1.0, 2 * N * 3 + 1, dtype=F64).view(2, N, 3)
    with simulate(4):
        sh = sharding("tp=4", {"mlp": N}, row=None, mlp="tp", out=None)
        for part, held in zip(per_rank(sh.shard(x, "row mlp out")), PARTS, strict=True):
            for place, position in enumerate(held):
                expected = torch.zeros(2, 3, dtype=F64) if position is None else x[:, position]
                assert torch.equal(part[:, place], expected)


def test_what_fills_up_an_inner_dim_is_in_no_sum_product_or_maximum():
    x, w = torch.randn(N, 3, dtype=F64), torch.randn(N, 4, dtype=F64)
    with simulate(4):
        sh = sharding("tp=4", {"mlp": N}, mlp="tp", out=None, row=None)
        part, weight = sh.shard(x, "mlp row").sigmoid(), sh.shard(w, "mlp out").cos()
        on_all(sh.sum(part, "mlp row -> row"), x.sigmoid().sum(0))
        on_all(sh.max(part - 2, "mlp row -> row"), x.sigmoid().amax(0) - 2)
        on_all(sh.dot(part, weight, "mlp row, mlp out -> row out"), x.sigmoid().T @ w.cos())
        deep = x.sigmoid()[:, :, None].expand(N, 3, 2)
        part = sh.shard(x, "mlp row").sigmoid()[:, :, None].expand(-1, 3, 2)
        on_all(sh.sum(part, "mlp row out -> row out"), deep.sum(0))


def test_whole_dims_are_cut_into_uneven_parts_and_joined():
    """Two dims in one collective, neither the first, and their gradients."""
    rows = {"row": None, "out": None, "mlp": "tp", "mlp'": None, "vocab": "cp", "vocab'": None}
    x = torch.randn(2, 5, 3, 7, dtype=F64)
    names, whole, region = "row mlp out vocab", "row mlp' out vocab'", "row mlp' out vocab' | mlp vocab"
    with simulate(4):
        sh = sharding("tp=2,cp=2", {"mlp": 5, "vocab": 7}, **rows)
        part = sh.shard(x, names)
        for one, other in zip(per_rank(sh(x, f"{whole} -> {names}")), per_rank(part), strict=True):
            assert torch.equal(one, other)
        held = part.detach().requires_grad_()
        on_all(sh(held, f"{names} -> {whole}"), x)
        # each rank's number times the value: the gradient is the sum of the numbers, in the parts of a reduce-scatter
        number = sh.index("mlp", 5).sum() * 0 + 1 + 2 * sh.mesh.position(("tp", "cp"))[0]
        (sh(held, f"{names} -> {region}") * torch.ones_like(x).cumsum(3) * number).sum().backward()
        expected = sh.shard(torch.ones_like(x).cumsum(3) * (1 + 3 + 5 + 7), names)
        filled = sh.shard(torch.ones_like(x), names)
        for one, other, there in zip(per_rank(held.grad), per_rank(expected), per_rank(filled), strict=True):
            assert torch.equal(one * there, other)


@pytest.mark.parametrize("rank", range(4))
def test_a_process_fills_and_cuts_its_part(rank):
    mesh, held = as_rank(make_mesh("tp=4", abstract=True), rank), ((1, ("tp",)),)
    size = sum(p is not None for p in PARTS[rank])
    x = torch.arange(1.0, 2 * size + 1).view(2, size)
    filled = run_step(x, mesh, Step("fill", ("tp",), (), held, uneven=((1, N),)))
    assert torch.equal(filled, functional.pad(x, (0, 2 - size)))
    assert torch.equal(run_step(filled, mesh, Step("cut", ("tp",), held, (), uneven=((1, N),))), x)


def test_the_largest_shard_stands_for_all_in_a_simulation():
    with simulate(2):
        sh = sharding("tp=2", {"mlp": 3}, mlp="tp")
        assert sh.stored_shape(Param((3,), "mlp")) == (2,)


# ------------------------------------------------------------------------------------------------------- zigzag orders


@pytest.mark.parametrize("rank", range(4))
def test_a_process_takes_its_part_of_a_zigzag_order(rank):
    mesh = as_rank(make_mesh("dp=2,cp=4", abstract=True), 4 + rank)
    step = Step("I>S", ("cp",), (), ((1, ("cp",)),))
    x = torch.arange(32).view(2, 16)
    early, late = (slice(2 * c, 2 * c + 2) for c in (rank, 7 - rank))
    part = run_step(x, mesh, step._replace(zigzag=((1, 4),)))
    assert torch.equal(part, torch.cat([x[:, early], x[:, late]], 1))
    assert torch.equal(run_step(x, mesh, step), x[:, 4 * rank : 4 * rank + 4])
    pair = as_rank(make_mesh("cp=2", abstract=True), rank % 2)
    part = run_step(torch.arange(8), pair, Step("I>S", ("cp",), (), ((0, ("cp",)),), zigzag=((0, 2),)))
    assert part.tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]][rank % 2]


def test_over_one_rank_the_order_is_the_plain_one_for_odd_sizes():
    x = torch.arange(3)
    assert torch.equal(to_zigzag(x, 0, 1), x) and torch.equal(from_zigzag(x, 0, 1), x)
    assert torch.equal(zigzag_positions(x, 3, 1), x)


# ---------------------------------------------------------------------------------------------------------- parameters


def test_leaves_at_rest_have_the_strides_of_the_whole():
    x = torch.randn(2, 4, 6, dtype=F64)
    with simulate(2):
        sh = sharding("tp=2", row=None, mlp="tp", out=None)
        for leaf in (
            sh.shard_param(x, Param((2, 4, 6), "row mlp out")),
            sh.place(sh.shard(x, "row mlp out"), "row mlp out", (2, 4, 6)),
        ):
            assert isinstance(leaf, DTensor) and leaf.shape == x.shape and leaf.stride() == x.stride()


@pytest.mark.parametrize("kind", [list, tuple])
def test_trees_of_lists_and_tuples(kind):
    w = torch.arange(4.0, dtype=F64)
    spec = kind([Param((4,), "mlp", over=""), {"b": Param((4,), "out", over="")}, Param((4,), "out", over="")])
    with simulate(2):
        sh = sharding("tp=2", mlp="tp", out=None)
        made = sh.shard_params(kind([w, {"b": w}, None]), spec)  # None: nothing there
        assert type(made) is kind and made[2] is None
        used = sh.use(made, spec)
        assert [p.tolist() for p in per_rank(used[0])] == [[0, 1], [2, 3]]
        on_all(used[1]["b"], w)
    with pytest.raises(ValueError):
        sh.use(kind([w]), spec)


def test_values_that_are_awaited_without_a_gradient_get_none():
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    y, _ = apply_function(Awaited, lambda: None, a, b)
    ga, gb = torch.autograd.grad(y.sum(), [a, b], allow_unused=True)
    assert torch.equal(ga, torch.ones(2)) and gb is None


def test_an_all_to_all_without_its_row_is_refused():
    """Else the row of seq would stand for it, and attention see a part of the sequence."""
    with simulate(2):
        mesh = make_mesh("cp=2")
        rules = standard_rules(mesh, context="ulysses")
        rows = {n: row for n, row in rules.compute.items() if n != "seq**"}
        sh = Sharding(mesh, dataclasses.replace(rules, compute=rows), DOUBLE)
        q = sh.shard(torch.randn(1, 4, 2, 1, 4, dtype=F64), "batch seq kv group head")
        with pytest.raises(ShardingError, match="needs a row 'seq\\*\\*'"):
            context_attention(q, q[:, :, :, 0], q[:, :, :, 0], sh=sh)


def test_an_all_to_all_over_all_ranks_runs_no_ring(monkeypatch):
    monkeypatch.setattr("fmegatron.parallel.context._ring", lambda *a: pytest.fail("a ring of one rank"))
    with simulate(2):
        mesh = make_mesh("cp=2")
        sh = Sharding(mesh, standard_rules(mesh, context="ulysses"), DOUBLE)
        q = sh.shard(torch.randn(1, 4, 2, 1, 4, dtype=F64), "batch seq kv group head")
        context_attention(q, q[:, :, :, 0], q[:, :, :, 0], sh=sh)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_trees_of_named_tuples():
    """What comes back is one too; a field that is missing is an error."""
    w = torch.arange(4.0, dtype=F64)
    spec = {"pair": Pair(Param((4,), "mlp", over=""), [Param((4,), "out", over="")])}
    with simulate(2):
        sh = sharding("tp=2", mlp="tp", out=None)
        used = sh.use(sh.shard_params({"pair": Pair(w, [w])}, spec), spec)["pair"]
        assert type(used) is Pair and [p.tolist() for p in per_rank(used.first)] == [[0, 1], [2, 3]]
        on_all(used.second[0], w)
    with pytest.raises(ValueError):
        sh.use({"pair": (w,)}, spec)


def test_the_inner_product_of_shards_is_that_of_the_whole():
    a = {"w": torch.randn(4, 3, dtype=F64), "b": torch.randn(3, dtype=F64)}
    b = {k: torch.randn_like(v) for k, v in a.items()}
    spec = {"w": Param((4, 3), "mlp out"), "b": Param((3,), "out")}
    expected = sum((a[k] * b[k]).sum() for k in a)
    with simulate(4):
        sh = sharding("dp=2,tp=2", mlp="tp", out=None, store="dp")
        assert sh.held_by(spec["w"]) == ("tp", "dp")  # dp as the inner split
        one, other = (sh.local(sh.shard_params(t, spec)) for t in (a, b))
        one = {k: v.detach().requires_grad_() for k, v in one.items()}
        total = sh.inner(one, other, spec)
        on_all(total, expected)
        total.backward()
        for k in one:
            for g, x in zip(per_rank(one[k].grad), per_rank(other[k]), strict=True):
                torch.testing.assert_close(g, x, rtol=0, atol=1e-14)
    torch.testing.assert_close(Sharding(precision=DOUBLE).inner(a, b, spec), expected)


@pytest.mark.parametrize("placement", [Replicate(), Invariant()], ids=str)
def test_parameters_that_are_placed_by_hand(placement):
    """Replicate is read by work that differs along the axis, so its gradient is summed there; Invariant is used alike."""
    param = Param((3,), "out", over="", placements={"tp": placement})
    w, x = torch.randn(3, dtype=F64), torch.randn(4, 3, dtype=F64)
    with simulate(2):
        sh = sharding("tp=2", out=None, mlp="tp")
        leaf = w.clone().requires_grad_()
        held = sh.shard(x, "mlp out") if type(placement) is Replicate else x
        (sh.use(leaf, param) * held).sum().backward()
        on_all(leaf.grad, x.sum(0))


def test_a_parameter_may_be_cut_by_hand():
    param = Param((4,), "out", over="", placements={"tp": Shard(0)})
    w = torch.arange(4.0, dtype=F64)
    with simulate(2):
        sh = sharding("tp=2", out=None)
        assert [p.tolist() for p in per_rank(sh.use(sh.shard_param(w, param), param))] == [[0, 1], [2, 3]]


def test_over_need_not_be_said_where_nothing_is_summed():
    w, param = torch.ones(2, dtype=F64), Param((2,), "out")
    assert torch.equal(sharding("dp=1", out=None).use(w, param), w)
    with simulate(2), pytest.raises(ShardingError, match="does not say what it is applied"):
        sharding("dp=2", out=None).use(w, param)


def test_axes_that_no_placement_names_keep_their_type():
    x = torch.arange(8.0, dtype=F64).view(2, 4)
    with simulate(4):
        sh = sharding("dp=2,tp=2", batch="dp", mlp="tp")
        part = sh.shard(x, "batch mlp")
        rows = [x[:1], x[:1], x[1:], x[1:]]
        for found, row in zip(per_rank(sh(part, tp=(Shard(1), Invariant()))), rows, strict=True):
            assert torch.equal(found, row)
        with pytest.raises(ShardingError, match="Shard"):
            sh(part, tp=(Shard(2), Invariant()))


# ------------------------------------------------------------------------------------------------------ mesh and rules


@pytest.mark.parametrize(
    ("axes", "also", "sizes"),
    [
        ("dp=2,tp=4", "e=4,f=2", {"dp": 2, "tp_0": 2, "f": 2}),
        ("a=4,b=4", "c=2,d=8", {"c": 2, "a_0": 2, "b": 4}),
    ],
)
def test_pieces_without_a_name_are_named_after_the_axis_that_they_cut(axes, also, sizes):
    mesh = make_mesh(axes, also=(also,), abstract=True)
    assert dict(mesh.sizes) == sizes
    assert all(mesh.expand(name) == (name,) for name in sizes)


def test_the_axes_of_a_mesh():
    assert dict(make_mesh(dp=2, tp=4, abstract=True).sizes) == {"dp": 2, "tp": 4}
    assert dict(make_mesh("dp=2", tp=4, abstract=True).sizes) == {"dp": 2, "tp": 4}
    assert dict(make_mesh("dp=2,tp=1", kv_heads=2, abstract=True).sizes) == {"dp": 2, "tp": 1}
    assert dict(make_mesh("dp=2", kv_heads=2, abstract=True).sizes) == {"dp": 2}
    assert make_mesh("cp=2,fsdp=2,tp=2", abstract=True).order == ("tp", "cp", "fsdp")
    for axis in meshes.DATA_AXES:
        assert make_mesh(f"{axis}=2,tp=2", abstract=True).order == ("tp", axis)
    assert {"dp", "fsdp", "cp", "edp"} < set(meshes.DATA_AXES)
    with pytest.raises(UserError, match="no common refinement: 3 is no multiple of 2"):
        make_mesh("a=2,b=3", also=("c=3,d=2",), abstract=True)


@pytest.mark.parametrize("rank", [0, 3, 6])
def test_the_group_of_several_axes_has_the_ranks_that_share_the_others(rank, monkeypatch):
    made = []
    monkeypatch.setattr(meshes.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(meshes, "group_of", lambda ranks: made.append(ranks) or ["group", *ranks])

    class Device:
        def get_group(self, dim):
            return ("of dim", dim)

    mesh = dataclasses.replace(as_rank(make_mesh("a=2,b=2,c=2", abstract=True), rank), device_mesh=Device())
    b = rank // 2 % 2
    members = [r for r in range(8) if r // 2 % 2 == b]
    assert mesh.process_group(("c", "a")) == ["group", *members] and made == [members]
    assert mesh.process_group(("b",)) == ("of dim", 1)


def test_the_standard_rules():
    def of(axes, also=(), kv_heads=None, **options):
        return standard_rules(make_mesh(axes, also=also, kv_heads=kv_heads, abstract=True), **options)

    assert of("dp=2,tp=4").compute["kv"] == ("tp",) and of("dp=2,tp=4").compute["group"] is None
    assert of("tp=4", kv_heads=2).compute["kv"] == ("tp_kv",)
    assert of("tp=4", kv_heads=2).compute["group"] == ("tp_group",)
    assert of("dp=2").zero == 3 and of("dp=2", zero=0).zero == 0
    assert of("dp=2,cp=2,tp=2", zero=1).store == ("dp",)
    assert of("dp=2,cp=2,fsdp=2", zero=1).store == ("fsdp",)
    assert of("cp=2").zigzag == {"seq": ("cp",)} and of("cp=2", context="ring").zigzag == {"seq": ("cp",)}
    assert of("cp=2", context="ulysses").zigzag == {}
    assert of("cp=2", context="ulysses").compute["kv**"] == ("cp",)
    both = ("cp_ring=2,cp_kv=2,cp_group=1",)
    assert of("cp=4", both, context="ulysses+ring").zigzag == {"seq": ("cp_ring",)}
    # the heads of keys alone, or the query heads alone, may take cp
    assert of("cp=2", ("cp_kv=2",), context="ulysses").compute["kv**"] == ("cp_kv",)
    alone = of("cp=2", ("cp_group=2",), context="ulysses").compute
    assert alone["kv**"] == () and alone["group**"] == ("cp_group",)


@pytest.mark.parametrize(
    ("axes", "kind", "sizes", "found"),
    [
        ("cp=4", "gather", (8, 2, None), ()),
        ("cp=4", "ring", (8, 2, None), ()),
        ("tp=2", "ulysses", (8, 2, None), ()),
        ("cp=1,tp=2", "ulysses", (8, 2, None), ()),
        ("cp=4", "ulysses", (8, 2, None), ("cp_ring=1,cp_kv=2,cp_group=2",)),
        ("dp=2,cp=4,tp=4", "ulysses", (16, 2, None), ("dp=2,cp_ring=1,cp_kv=1,cp_group=4,tp=4",)),
        ("cp=2,tp=4", "ulysses", (8, 2, None), ("cp_ring=1,cp_kv=1,cp_group=2,tp=4",)),
        ("cp=4,tp=4", "ulysses", (8, 2, None), "use 1 or 2 of them"),
        ("cp=4,tp=2", "ulysses", (4, 2, None), "use 1 or 2 of them"),
        ("cp=7", "ulysses", (7, 1, None), ("cp_ring=1,cp_kv=1,cp_group=7",)),
        ("cp=4", "ulysses+ring", (4, 4, None), ("cp_ring=2,cp_kv=2,cp_group=1",)),
        ("cp=2", "ulysses+ring", (4, 4, None), ("cp_ring=2,cp_kv=1,cp_group=1",)),
        ("cp=8", "ulysses+ring", (8, 4, 2), ("cp_ring=4,cp_kv=2,cp_group=1",)),
        ("cp=4", "ulysses+ring", (2, 2, 4), "mesh cp=4 with 4 ranks for heads: ulysses\\+ring cannot share"),
    ],
)
def test_how_heads_are_shared_out(axes, kind, sizes, found):
    options = dict(zip(("heads", "kv_heads", "ulysses"), sizes, strict=True))
    if isinstance(found, tuple):
        assert factoring(axes, kind, **options) == found
    else:
        with pytest.raises(UserError, match=found):
            factoring(axes, kind, **options)


# ---------------------------------------------------------------------------------------------------------- primitives


@pytest.mark.parametrize(
    ("cp", "kind", "heads", "kv"),
    [(2, "ulysses", 2, 2), (2, "ulysses", 6, 3), (4, "ulysses", 4, 2), (4, "ulysses+ring", 2, 2)],
)
def test_attention_with_sinks_where_ranks_share_out_heads(cp, kind, heads, kv):
    if heads == 6:
        heads, kv = 2, 1  # a single kv head: two ranks share its queries
    g, size = torch.Generator().manual_seed(0), (2, 8)
    q = torch.randn(*size, kv, heads // kv, 4, dtype=F64, generator=g)
    k, v = (torch.randn(*size, kv, 4, dtype=F64, generator=g) for _ in range(2))
    sinks = torch.randn(kv, heads // kv, dtype=F64, generator=g)
    segments = (torch.arange(8) >= 3).long().expand(2, 8)
    expected = attention(q, k, v, segments=segments, sinks=sinks)
    with simulate(cp):
        mesh = make_mesh(f"cp={cp}", also=factoring(f"cp={cp}", kind, heads=heads, kv_heads=kv))
        sh = Sharding(mesh, standard_rules(mesh, context=kind))
        dims = {"q": "batch seq kv group head", "k": "batch seq kv head"}
        parts = [sh.shard(q, dims["q"]), sh.shard(k, dims["k"]), sh.shard(v, dims["k"])]
        found = context_attention(*parts, sh=sh, sinks=sinks, segments=sh.shard(segments, "batch seq"))
        for one, other in zip(per_rank(found), per_rank(sh.shard(expected, dims["q"])), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("vocab", ["tp", None])
def test_rows_of_a_table(vocab):
    """As many rows as ranks, the size of the vocabulary not given, the sequence between blocks on the same axis."""
    table, tokens = torch.randn(2, 3, dtype=F64), torch.tensor([[1, 0, 0, 1], [0, 0, 1, 1]])
    with simulate(2):
        sh = sharding("tp=2", batch=None, seq=None, embed=None, vocab=vocab, kv=None, **{"seq*": "tp"})
        leaf = sh.shard(table, "vocab embed").detach().requires_grad_()
        found = embedding(leaf, tokens, sh=sh)
        expected = sh.shard(table[tokens], "batch seq* embed")
        for one, other in zip(per_rank(found), per_rank(expected), strict=True):
            assert torch.equal(one, other)
    assert torch.equal(embedding(table, tokens), table[tokens])


def test_label_smoothing_over_a_sharded_vocabulary_of_unsaid_size():
    logits, labels = torch.randn(2, 3, 8, dtype=F64), torch.tensor([[1, 7, 4], [0, 100, 100]])
    options = dict(ignore_index=100, label_smoothing=0.2)  # an index behind the vocabulary is no label either
    expected = functional.cross_entropy(logits.movedim(-1, 1), labels, reduction="none", **options)
    torch.testing.assert_close(cross_entropy(logits, labels, **options), expected)
    with simulate(2):
        sh = sharding("tp=2", batch=None, seq=None, vocab="tp", kv=None)
        on_all(cross_entropy(sh.shard(logits, "batch seq vocab"), labels, sh=sh, **options), expected)


def test_dropout_of_an_inner_dim_is_by_global_position():
    x, k = torch.ones(2, 8, 4), key(1)
    expected = dropout(x, 0.5, k, dims="batch seq embed")
    assert 0 < int((expected == 0).sum()) < x.numel()
    assert dropout(x, 0.0, k) is x
    with simulate(2):
        sh = sharding("cp=2", batch=None, seq="cp", embed=None)
        parts = per_rank(dropout(sh.shard(x, "batch seq embed"), 0.5, k, sh=sh, dims="batch seq embed"))
        assert torch.equal(torch.cat(parts, 1), expected)


def test_no_two_elements_of_a_long_sequence_share_their_bit(monkeypatch):
    """A sequence one longer than the unit in which its elements are numbered: rows do not overlap."""
    monkeypatch.setitem(dropout_function.__globals__, "ANY_SEQ", 4)
    for size in (5, 9):
        kept = dropout(torch.ones(2, size, 64), 0.5, key(2), dims="batch seq embed") != 0
        rows = [row.tolist() for row in kept.view(-1, 64)]
        assert len({tuple(row) for row in rows}) == 2 * size


# --------------------------------------------------------------------------------------------------------- sums, norms


def test_the_norm_of_trees_of_all_kinds():
    one = torch.full((3,), 2.0)
    assert norm.global_norm(one).item() == pytest.approx(12**0.5)
    mixed = {"a": one, "b": one.to(torch.bfloat16), "c": one.double(), "n": torch.arange(9), "none": None}
    assert norm.global_norm(mixed).item() == pytest.approx(6.0)
    assert norm.global_norm(torch.ones(2, norm.RUN)).item() == pytest.approx((2 * norm.RUN) ** 0.5)


def test_sums_of_two_dtypes_are_each_taken_once():
    with simulate(2):
        sh = sharding("tp=2", mlp="tp")
        layout = (sh.mesh.device_mesh, (0,))
        wide, narrow = norm.summed([torch.tensor(2.0, dtype=F64), torch.tensor([3.0])], [layout] * 2)
        on_all(wide, torch.tensor(4.0, dtype=F64))
        on_all(narrow, torch.tensor([6.0]))
        assert narrow.dtype == torch.float32


def test_sums_and_factors_of_terms():
    sh, half = Sharding(), torch.tensor([[0.5, 0.25], [1.0, 2.0]])
    assert summed(half, "batch seq", sh).item() == 3.75
    assert summed(half, "batch seq -> batch", sh).tolist() == [0.75, 3.0]
    assert summed(half > 0.3, "batch seq", sh).item() == 3
    assert summed(torch.tensor(True), "", sh).dtype == torch.int64
    assert scaled(torch.tensor(3.0, dtype=torch.float16), 0.5, 2.0**17).item() == 3 * 2**16
    assert scaled(torch.tensor(3.0), 0.5, None).item() == 1.5


def test_rows_are_numbered_where_a_batch_has_other_leaves_too():
    ctx = Ctx(sh=Sharding(), key=key(0))
    assert with_rows(ctx, {"a": 3, "x": torch.zeros(4, 2)}).rows.tolist() == [0, 1, 2, 3]


def test_a_batch_without_tensors_is_one_microbatch():
    batch, ctx = {"a": 3}, Ctx(sh=Sharding())
    ((part, same),) = cut_batch(batch, ctx, 1)
    assert part is batch and same is ctx
    with pytest.raises(UserError, match="at least as many rows"):
        cut_batch(batch, ctx, 2)
