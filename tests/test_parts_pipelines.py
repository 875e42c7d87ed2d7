"""Parts of the core one by one, which no simulated layout runs or tells apart: what pipelines, compiled blocks and fp8 use,
and what exchanges cost."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch

from fmegatron import layout as layouts
from fmegatron import zero
from fmegatron.accumulate import Term, Weight, accumulate, reciprocal, row_count
from fmegatron.collectives import Step, run_step
from fmegatron.context import Ctx
from fmegatron.errors import ShardingError, UserError
from fmegatron.fp8 import Fp8, scaling
from fmegatron.mesh import Mesh, make_mesh
from fmegatron.padding import shard_batch
from fmegatron.parallel.stack import stack
from fmegatron.placements import Shard
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.recording import record_collectives
from fmegatron.rules import Rules, standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import lift, on_each_rank, per_rank, simulate
from fmegatron.spec import Param
from tests.test_sharding_parts import as_rank

F64 = torch.float64
losses = importlib.import_module("fmegatron.primitives.cross_entropy")
stacks = importlib.import_module("fmegatron.parallel.stack")


class Device:
    """A device mesh of which parts are taken by the names of their axes."""

    def __getitem__(self, names: str | tuple[str, ...]) -> tuple[str, str | tuple[str, ...]]:
        return ("part", names)


def process(axes: str, rank: int, **options) -> Mesh:
    return dataclasses.replace(as_rank(make_mesh(axes, abstract=True, **options), rank), device_mesh=Device())


def test_a_mesh_without_an_axis():
    mesh = process("pp=2,dp=2,tp=2", 6, also=("pp=2,ep=4",))
    part = mesh.without("pp")
    assert part.sizes == {"dp": 2, "tp": 2} and part.order == tuple(a for a in mesh.order if a != "pp")
    assert set(part.order) == {"dp", "tp"} and part.device_mesh == ("part", part.order)
    assert part.ranks == [4, 5, 6, 7] and part.world == 4
    assert part.names.keys() == {n for n, t in mesh.names.items() if "pp" not in t} and "pp" not in part.names
    assert mesh.without("pp") is part
    assert process("pp=2,dp=2,tp=2", 3).without("pp").ranks == [0, 1, 2, 3]
    alone = process("pp=2,tp=2", 1).without("pp")
    assert alone.device_mesh == ("part", "tp") and alone.ranks == [0, 1]
    for axes in ("pp=2", "pp=2,tp=1"):
        none = process(axes, 1).without("pp")
        assert none.device_mesh is None and none.ranks == [0] and none.world == 1
    with pytest.raises(UserError, match="pp"):
        dataclasses.replace(process("pp=2,tp=2", 1), simulated=True).without("pp")


def test_a_rank_of_an_axis_of_one_is_its_first():
    mesh = make_mesh("dp=1,tp=2", abstract=True)
    assert mesh.coordinate("dp") == 0 and as_rank(mesh, 1).coordinate("dp") == 0
    assert as_rank(mesh, 1).coordinate("tp") == 1


def test_what_is_begun_before_the_last_layer():
    events = []

    def block(p, x, ctx):
        events.append(ctx.layer)
        return x * p

    layers = {i: torch.tensor(float(i + 1)) for i in (0, 3, 5)}
    out = stack(block)(layers, torch.tensor(1.0), Ctx(sh=Sharding(None)), lambda: events.append("then"))
    assert out.item() == 24 and events == [0, 3, "then", 5]
    events.clear()
    assert (
        stack(block)({2: torch.tensor(3.0)}, torch.tensor(1.0), Ctx(sh=Sharding(None)), lambda: events.append("then"))
        == 3
    )
    assert events == ["then", 2]


def test_layers_of_fp8_are_told_their_place_among_all(monkeypatch):
    told = []
    monkeypatch.setattr(scaling, "at_layer", lambda sh, index, layers: told.append((index, layers)) or sh)
    ctx = Ctx(sh=Sharding(None, precision=Precision(fp8=Fp8())))
    spec = {i: None for i in range(6)}
    assert stack(lambda p, x, ctx: x * p, spec)({1: 2.0, 3: 2.0}, 1.0, ctx) == 4.0
    assert told == [(1, 6), (3, 6)]
    told.clear()
    stack(lambda p, x, ctx: x * p)({1: 2.0}, 1.0, ctx)
    assert told == [(1, None)]


def test_compiled_layers_have_their_key_where_their_parameters_are():
    found = []

    def block(p, x, ctx):
        found.append(ctx.key)
        return x * p["w"]

    run = stack(block, compile={"backend": "eager", "fullgraph": False})
    with torch.no_grad():
        run({0: {"n": 3, "w": torch.tensor(2.0)}}, torch.tensor(1.0), Ctx(sh=Sharding(None), key=key(0)))
    (made,) = found
    assert isinstance(made.words, torch.Tensor) and made.words.device.type == "cpu"


def test_rows_that_differ_are_named_without_what_has_no_rows():
    batch = {"tokens": torch.zeros(4, 2), "labels": torch.zeros(3, 2), "rate": torch.tensor(1.0), "name": "x"}
    with pytest.raises(UserError, match=r"\((tokens: 4, labels: 3|labels: 3, tokens: 4)\)"):
        row_count(batch)


def test_a_factor_that_is_known_at_the_end_scales_gradients_under_torch_func():
    """Terms that bring their own weight: the sum is divided behind the last microbatch."""
    x = torch.tensor([1.0, 2.0, 4.0], dtype=F64)

    def loss(p, batch, ctx):
        return Term((batch["x"] * p) ** 2, "batch", weight=torch.ones_like(batch["x"])), {}

    run = accumulate(loss, 3)
    p = torch.tensor(3.0, dtype=F64)
    first, second = torch.func.jacrev(lambda p: run(p, {"x": x})[1], has_aux=False)(p), run(p.clone(), {"x": x})[1]
    torch.testing.assert_close(second, 2 * p * (x**2).mean())
    torch.testing.assert_close(first, 2 * (x**2).mean())


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_the_loss_does_not_use_has_a_gradient_of_zero_in_the_layout_of_the_state(zero, microbatches):
    spec = {"w": Param((4,), "embed", over="batch"), "unused": Param((4,), "embed", over="batch")}
    with simulate(2):
        mesh = make_mesh("dp=2")
        sh = Sharding(mesh, Rules({"batch": "dp", "embed": None}, store=("dp",), zero=zero), Precision(params=F64))
        params = sh.shard_params({n: torch.arange(4.0, dtype=F64) for n in spec}, spec)
        x = sh.shard(torch.arange(4.0, dtype=F64), "batch")

        def loss(p, batch, ctx):
            return {"one": Term(batch["x"] * ctx.sh.use(p, spec)["w"].sum(), "batch")}, {}

        run = accumulate(loss, microbatches, spec=spec, weights=lambda batch: {"one": Weight(1.0)})
        _, grads = run(params, {"x": x}, Ctx(sh=sh))
        assert grads["unused"].placements == grads["w"].placements == (Shard(0),)
        for name, want in (("unused", 0.0), ("w", 6.0)):
            for part in per_rank(grads[name].to_local()):
                torch.testing.assert_close(part, torch.full((2,), want, dtype=F64))


def rules(mlp: str | None = "tp", **options) -> Rules:
    return Rules({"batch": "dp", "embed": None, "mlp": mlp}, **options)


def test_what_costs_a_collective():
    """In one direction or the other: what is gathered and sliced, what is only summed; not what is filled up."""
    gathered, held = Param((4,), "embed", over=""), Param((3,), "mlp", over="")
    with simulate(4):
        sh = Sharding(make_mesh("dp=2,tp=2"), rules(store=("dp",), uneven={"mlp": 3}))
        assert [[s.kind for s in sh.steps_of(gathered, w)] for w in ("enter", "leave")] == [["S>I"], ["I>S"]]
        assert [[s.kind for s in sh.steps_of(held, w)] for w in ("enter", "leave")] == [["fill"], ["cut"]]
        assert zero._collective([gathered], sh) and zero._collective([held, gathered], sh)
        assert not zero._collective([held], sh)
        sh, summed = Sharding(make_mesh("dp=2,tp=2"), rules(zero=0)), Param((4,), "embed", over="batch")
        assert [[s.kind for s in sh.steps_of(summed, w)] for w in ("enter", "leave")] == [["I>R"], ["P>I"]]
        assert zero._collective([summed], sh) and not zero._collective([Param((4,), "embed", over="")], sh)
        assert stacks.sharded_store(sh, {0: [gathered, summed], 1: [gathered]}).reduces(0)
        assert not stacks.sharded_store(sh, {0: [gathered, summed], 1: [gathered]}).reduces(1)


def test_sums_that_were_put_off_are_made_in_the_dtype_for_sums():
    """Also those of a gradient that is cut after them: in bfloat16 1 + 2⁻⁸ + 2⁻⁸ + 2⁻⁸ would be 1, not 1 + 2⁻⁶, its nearest."""
    param = Param((4,), "embed", over="batch")
    with simulate(8):
        mesh = make_mesh("dp=4,fsdp=2")
        sh = Sharding(mesh, rules(None, store=("fsdp",), zero=1), Precision(reduce=torch.float32)).delaying()
        assert {s.kind for s in sh.steps_of(param, "settle")} == {"P>I", "I>S"}
        x = torch.full((4,), 2.0**-8, dtype=torch.bfloat16)
        mine = on_each_rank(lambda rank, x: (torch.ones_like(x) if rank < 2 else x.clone(),), 8, lift(x, 8))
        (found,) = zero.moving(list(mine), [param], sh, "settle")()
        for part in per_rank(found):
            assert part.dtype == torch.bfloat16 and part.tolist() == [1 + 2.0**-6] * 2


def test_parameters_that_nobody_began_to_gather_are_gathered_at_once():
    spec = {"a": Param((4,), "embed", over="batch"), "b": Param((2,), "embed", over="batch")}
    with simulate(2):
        sh = Sharding(make_mesh("dp=2"), rules(None, store=("dp",)))
        params = sh.shard_params({"a": torch.arange(4.0), "b": torch.arange(2.0)}, spec)
        with record_collectives() as log:
            found = zero.Ahead(params, spec, sh)()
        assert [e.kind for e in log] == ["all-gather"]
        for name, n in (("a", 4), ("b", 2)):
            assert all(t.tolist() == list(range(n)) for t in per_rank(found[name]))
        mixed = {"a": params["a"], "n": torch.tensor([1, 2])}
        found = zero.Ahead(
            mixed,
            {"a": spec["a"], "n": Param((2,), "embed", over="", dtype=torch.int64)},
            Sharding(sh.mesh, rules(None, zero=0)),
        )
        assert found()["n"].dtype == torch.int64


def test_layers_without_a_mesh_are_cast_one_by_one():
    """A leaf in the dtype of products already does not stand for the others; whole numbers stay what they are."""
    sh = Sharding(None, precision=Precision(params=torch.float32, compute=F64))
    spec = {0: {"w": Param((2,), "embed"), "v": Param((2,), "embed"), "n": Param((2,), "embed")}}

    def block(p, x, ctx):
        assert [p[n].dtype for n in ("w", "v", "n")] == [F64, F64, torch.int64]
        return x + p["w"] * p["v"] + p["n"]

    for v in (torch.float32, F64):
        layers = {0: {"w": torch.ones(2), "v": torch.ones(2, dtype=v), "n": torch.arange(2)}}
        run = stack(block, spec)
        assert run(layers, torch.zeros(2, dtype=F64), Ctx(sh=sh)).tolist() == [1, 2]
        jacobian = torch.func.jacrev(lambda w: run({0: {**layers[0], "w": w}}, torch.zeros(2, dtype=F64), Ctx(sh=sh)))  # noqa: B023
        assert jacobian(layers[0]["w"]).tolist() == [[1, 0], [0, 1]]
    kept = {"w": torch.ones(2, dtype=F64), "v": torch.ones(2, dtype=F64), "n": torch.arange(2)}
    assert stacks.sharded_store(sh, spec).differentiable(kept, 0) is kept


def test_whole_numbers_among_the_parameters_have_no_gradient():
    def loss(p, batch, ctx):
        return Term(batch["x"] * p["w"] * p["n"], "batch", weight=torch.ones_like(batch["x"])), {}

    params = {"w": torch.tensor(3.0), "n": torch.tensor(2)}
    _, grads = accumulate(loss, 2)(params, {"x": torch.tensor([1.0, 3.0])})
    assert grads["w"].item() == 4 and grads["n"] is None


def test_a_weight_of_nothing_gives_nothing():
    assert reciprocal(0) == 0 and reciprocal(4) == 0.25
    assert reciprocal(torch.tensor([0.0, 2.0])).tolist() == [0, 0.5]


def test_tokens_that_fill_up_a_batch_are_told_apart():
    tokens = torch.arange(1, 7).view(3, 2)
    with simulate(2):
        sh = Sharding(make_mesh("dp=2"), standard_rules(make_mesh("dp=2")))
        for dims in (None, {"tokens": "batch seq"}):
            found = shard_batch({"tokens": tokens}, sh, dims=dims)
            parts = [t.tolist() for t in per_rank(found["real"])]
            assert parts == [[[True, True]] * 2, [[True, True], [False, False]]]
        assert "real" not in shard_batch({"tokens": tokens[:2]}, sh)


def test_a_dim_that_does_not_divide_is_not_cut():
    with simulate(2):
        mesh = make_mesh("dp=2")
        with pytest.raises(ShardingError, match="does not divide by 2"):
            run_step(lift(torch.arange(3.0), 2), mesh, Step("P>S", ("dp",), enters=((0, ("dp",)),), leaves=()))


def test_a_model_without_an_mlp_fits_the_standard_rules():
    mesh = make_mesh("dp=2,tp=2", abstract=True)
    spec = {"q": Param((4, 2, 2, 2), "embed kv group head"), "embed": Param((8, 4), "vocab embed")}
    Sharding(mesh, standard_rules(mesh)).check_spec(spec)


def test_a_vocabulary_that_is_larger_than_a_chunk_goes_token_by_token(monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", {"cpu": 3})
    x, w, labels = torch.randn(2, 3, 4, dtype=F64), torch.randn(4, 7, dtype=F64), torch.randint(0, 7, (2, 3))
    found = losses.linear_cross_entropy(x, w, labels)
    want = torch.nn.functional.cross_entropy((x @ w).flatten(0, 1), labels.flatten(), reduction="none").view(2, 3)
    torch.testing.assert_close(found, want)


PLACED = [
    # by hand on another dim than the rule's; on the rule's dim beside it; and held alike where the store would cut it
    ({"tp": 1}, ("mlp", "embed"), [(), ("tp",)], [("dp",), ("tp",)]),
    ({"cp": 0}, ("mlp", "embed"), [("tp", "cp"), ()], [("tp", "cp"), ("dp",)]),
    ({"dp": "R"}, ("mlp", "embed"), [("tp",), ()], [("tp",), ()]),
]


@pytest.mark.parametrize(("own", "names", "compute", "rest"), PLACED)
def test_where_a_parameter_that_is_placed_by_hand_lies(own, names, compute, rest):
    mesh = make_mesh("dp=2,cp=2,tp=2", abstract=True)
    found = layouts.stored(names, (8, 8), own, mesh, rules(store=("dp",)))
    order = lambda dims: [tuple(sorted(d, key=mesh.order.index)) for d in dims]  # noqa: E731
    assert (found[0], found[1]) == (order(compute), order(rest))


def test_an_axis_holds_a_parameter_at_rest_once():
    """Where the state is cut by axes that hold the parameters already."""
    mesh = make_mesh("dp=2,fsdp=2", abstract=True)
    some = rules(None, store=("fsdp",), store_optimizer=("fsdp", "dp"))
    _, rest = layouts.stored(("embed", "embed"), (8, 4), {}, mesh, some, "optimizer")
    assert sorted(a for by in rest for a in by) == ["dp", "fsdp"]
