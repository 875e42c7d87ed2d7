"""Experts padded to their capacity: the values of the other ways to them, and shapes that no value changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fmegatron as fm
from fmegatron.errors import UserError
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.models.moe import MoE
from fmegatron.parallel.dispatch import dispatched
from fmegatron.parallel.routing import Routing, route
from fmegatron.precision import Precision
from fmegatron.recording import record_collectives
from fmegatron.remat import names
from fmegatron.rules import standard_rules
from fmegatron.simulation import simulate
from fmegatron.testing import Layout, compare, ledger
from fmegatron.testing.program import Program

F64 = torch.float64
ROUTING = Routing(4, 2, normalised=True, switch_loss=0.1, capacity=0.8)


def model(routing=ROUTING, **changes):
    moe = MoE(routing, **{"mlp": 4, "bias": True, **changes})
    return Decoder(DecoderConfig(vocab=24, embed=8, layers=2, heads=4, mlp=8, kv_heads=2, head=4, moe=moe))


CHOICE = dataclasses.replace(ROUTING, capacity=None, choose="expert_choice", switch_loss=0.0)
MODELS = {
    "by probability": model(),
    "by position": model(dataclasses.replace(ROUTING, drop="position", group="batch")),
    "expert choice": model(CHOICE, bias=False),
}
LAYOUTS = [
    ("by probability", "dp=2,tp=2 sp ep=4"),
    ("by position", "dp=2,cp=2 ep=2 etp=2 zero=1"),
    ("by position", "dp=2 ep=2 micro=2 odd"),
    ("expert choice", "tp=2 ep=2"),
    ("by probability", "dp=4 ep=2 etp=2 odd packed"),  # rows go over ep before they are gathered over etp
]


@pytest.mark.parametrize(("name", "text"), LAYOUTS, ids=[f"{n}: {t}" for n, t in LAYOUTS])
def test_padded_experts_are_the_same(name, text):
    """As one device has them by rows."""
    result = compare(MODELS[name], Layout.parse(f"{text} dispatch=padded"), checks=("gradients",))
    assert result.ok, result.worst


def test_kept_by_name_and_in_halves_they_are_the_same():
    """With products of the experts kept, by which the backward's taps go."""
    data = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(0))
    found = []
    for m in (
        MODELS["by probability"],
        dataclasses.replace(MODELS["by probability"], dispatch="padded", save=names("experts_up")),
    ):
        sh = fm.Sharding(precision=Precision(params=F64))
        params = fm.init(m.spec(), fm.key(0), sh=sh)
        f = fm.accumulate(m.loss, weights=m.weights)
        found.append(f(params, {"tokens": data, "labels": data}, fm.Ctx(sh=sh)))
    (a, _), grads = found[0]
    (b, _), others = found[1]
    torch.testing.assert_close(a, b, rtol=1e-14, atol=0)
    for name, g in fm.tree.named(grads).items():
        assert (g - fm.tree.named(others)[name]).norm() <= 1e-13 * g.norm() + 1e-18, name


def test_what_travels_has_one_size():
    """However uneven the load: places · experts rows of a rank, so that no rank waits for numbers from the device."""
    moved = []
    for slope in (0.0, 9.0):
        x, logits = torch.randn(4, 8, 8, dtype=F64), torch.randn(4, 8, 4, dtype=F64) + slope * torch.arange(4)
        with simulate(4):
            mesh = fm.make_mesh("dp=4", also=["ep=4"])
            sh = fm.Sharding(mesh, standard_rules(mesh), Precision(params=F64))
            x, logits = (sh.local(sh.shard(t, "batch seq embed")) for t in (x, logits))
            routed = route(logits, ROUTING, sh=sh)
            with record_collectives() as found:
                dispatched(lambda rows, w, *_, sh: rows, x, routed, {}, number=4, sh=sh, backend="padded")
        moved.append([(c.kind, c.elements) for c in found])
    assert moved[0] == moved[1]
    places = 4  # 8 tokens · 2 choices · 0.8 / 4 experts, rounded up
    assert [n for _, n in moved[0]] == [4 * places * 8, 4 * places, 4 * places * 8]


def test_rows_cross_ep_once_and_are_gathered_where_that_is_fewer():
    """Experts on two ranks, the width of each on two, other tokens on all four: all places of a rank go over ep, and once more to
    either part; there and back, forward and backward, and their weights there and back."""
    m, text = dataclasses.replace(MODELS["by probability"], dispatch="padded"), "dp=4 ep=2 etp=2 dispatch=padded"
    rows, seq = Program(m).batch_of(Layout.parse(text))["tokens"].shape
    places = rows // 4 * -(-seq * 2 * 4 // (4 * 5))
    found = ledger(m, text, part="gradients", precision=Precision(params=F64)).entries
    moved, over_ep = [e.bytes for e in found if e.kind == "all-to-all"], 8 * m.config.layers * 4 * places * (4 * 8 + 2)
    assert sorted(moved) == [over_ep, 2 * over_ep]


def test_a_routing_without_a_bound_is_refused():
    with pytest.raises(
        UserError, match='dispatch="padded" fills experts up to their capacity: give the routing a capacity'
    ):
        dataclasses.replace(model(dataclasses.replace(ROUTING, capacity=None)), dispatch="padded")
