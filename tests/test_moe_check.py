"""The checking mode on decoders with experts, and what it infers about their leaves."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import fmegatron as fm
from fmegatron.checking import check, infer_over
from fmegatron.errors import ShardingError
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.models.moe import MoE
from fmegatron.parallel.routing import Routing
from fmegatron.precision import Precision
from fmegatron.rules import standard_rules
from fmegatron.spec import params_of
from fmegatron.testing import Layout, compare

ROUTING = Routing(4, 2, normalised=True, switch_loss=0.1, z_loss=0.1, capacity=0.8, group="batch")
EXPERTS = MoE(ROUTING, 4, shared=4, shared_gate=True, bias=True, router_bias=True)
CONFIG = DecoderConfig(vocab=24, embed=8, layers=1, heads=4, mlp=8, kv_heads=2, head=4, moe=EXPERTS)
TOKENS = torch.randint(0, 24, (4, 8), generator=torch.Generator().manual_seed(0))
BATCH = {"tokens": TOKENS, "labels": TOKENS.roll(1, 1)}


class Applied(Decoder):
    """A decoder whose leaves say nothing, or another thing, of what they are applied across."""

    said = None

    def _ends(self):
        return self._with(super()._ends())

    def _block_spec(self, index):
        return self._with(super()._block_spec(index))

    def _with(self, spec):
        return {n: dataclasses.replace(p, over=self.said) for n, p in spec.items()}


class TooFew(Applied):
    said = "batch"


class AcrossTheStream(Applied):
    """What is inferred of experts' leaves."""

    def _with(self, spec):
        found = {"experts_down_bias": "batch seq* emlp"}
        return {
            n: dataclasses.replace(p, over=found.get(n, "batch seq*")) if n.startswith("experts") else p
            for n, p in spec.items()
        }


def rules():
    mesh = fm.make_mesh("dp=1,cp=1,tp=1", also=["edp=1,ep=1,etp=1"], abstract=True, device="cpu")
    return standard_rules(mesh, sequence_parallel=True)


def inputs(model):
    def program(params, batch, sh):
        terms, _ = model.loss(params, batch, fm.Ctx(sh=sh))
        return functools.reduce(torch.add, [sh.sum(t.items, f"{t.dims} ->") for t in terms.values()])

    params = fm.init(Decoder(model.config).spec(), fm.key(0), sh=fm.Sharding(precision=Precision(params=torch.float64)))
    return program, model.spec(), params, BATCH, rules()


@pytest.mark.parametrize("dispatch", ["all-to-all", "padded", "dense"])
def test_decoders_with_experts_pass_the_check(dispatch):
    check(*inputs(Decoder(CONFIG, dispatch=dispatch, record_routing=dispatch == "padded")))


def test_leaves_of_experts_that_are_summed_over_too_little_are_refused():
    """They go into the experts beside a primitive's arguments."""
    model = TooFew(CONFIG)
    program, _, *rest = inputs(model)
    with pytest.raises(
        ShardingError, match=r"experts: 'experts_gate_up': on on_seq.* the value is I, the equation says R"
    ):
        moe_alone(program, model, *rest)


def moe_alone(program, model, params, batch, table):
    """The check of a program of the experts alone, in front of which nothing else is wrong."""
    from fmegatron.parallel.experts import mlp_experts
    from fmegatron.parallel.moe import moe, router

    full, spec = Decoder(model.config).spec()["layers"][0], model.spec()["layers"][0]
    names = ["router", "router_bias", *(n for n in spec if n.startswith("experts"))]
    spec = {n: spec[n] if n.startswith("experts") else full[n] for n in names}
    layer = moe(router(ROUTING), mlp_experts("swiglu"), number=4)

    def f(params, batch, sh):
        x = sh(batch["x"], "batch seq embed -> batch seq* embed")
        y, _ = layer(sh.use(params, spec), x, fm.Ctx(sh=sh))
        return sh.sum(y, "batch seq* embed ->")

    x = torch.randn(4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    check(f, spec, {n: params["layers"][0][n] for n in names}, {"x": x}, table, dims={"x": "batch seq embed"})


def test_what_leaves_of_experts_are_applied_across_is_inferred():
    """As they are declared; of experts every axis of the stream that their dims do not use, which is what "batch' seq'" means."""
    found, full = infer_over(*inputs(Applied(CONFIG))), params_of(Decoder(CONFIG).spec())
    for name, param in params_of(found).items():
        across, want = (set((p.over or "").split()) for p in (param, full[name]))
        if ".experts" in name:
            want = {{"batch'": "batch", "seq'": "seq*"}.get(n, n) for n in want}
        assert across == want - {"group"}, name  # which lies on no axis here


@pytest.mark.parametrize("text", ["dp=2,tp=2 sp ep=4", "dp=2,tp=2 ep=2 etp=2 zero=1"])
def test_what_is_inferred_has_the_gradients_of_one_device(text):
    result = compare(AcrossTheStream(CONFIG), Layout.parse(text), checks=("gradients",))
    assert result.ok, result.worst
