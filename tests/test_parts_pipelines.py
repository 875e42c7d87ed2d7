"""Parts of the core that pipelines, compiled blocks and fp8 use, one by one: what no simulated layout runs."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch

from fmegatron.accumulate import Term, Weight, accumulate, row_count
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.fp8 import Fp8
from fmegatron.mesh import Mesh, make_mesh
from fmegatron.parallel.stack import stack
from fmegatron.placements import Shard
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import Param
from tests.test_sharding_parts import as_rank

F64 = torch.float64
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
    monkeypatch.setattr(stacks, "at_layer", lambda sh, index, layers: told.append((index, layers)) or sh)
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
