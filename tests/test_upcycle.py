"""A dense model made one with experts computes the same at the start, on one device and on several."""

from __future__ import annotations

import math

import pytest
import torch

from fmegatron import tree
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.mesh import make_mesh, parse_axes
from fmegatron.models import Decoder, hf
from fmegatron.models.upcycle import upcycled
from fmegatron.parallel.folding import expert_factoring
from fmegatron.parallel.routing import Routing
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import init, params_of
from fmegatron.testing.models import small_config

torch.set_num_threads(1)
DOUBLE = Sharding(precision=Precision(params=torch.float64))
MIXTRAL = Routing(experts=4, top_k=2, before=False)


def dense(name, **changes):
    """A small dense model with no leaf at its trivial initial value."""
    config = small_config(name, **changes)
    params = init(Decoder(config).spec(), key(0), sh=DOUBLE)
    g = torch.Generator().manual_seed(1)
    return config, tree.tree_map(lambda x: x + 0.2 * torch.randn(x.shape, generator=g, dtype=x.dtype), params)


def tokens_of(config):
    return torch.randint(0, config.vocab, (2, 7), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("name", "changes", "routing", "dense_layers"),
    [
        ("llama", {}, MIXTRAL, ()),
        ("llama", {"fused_gate_up": True, "mlp_bias": True}, MIXTRAL, (0,)),
        ("gpt2", {}, Routing(experts=3, top_k=2, normalised=True), ()),  # biases, no gate
        ("gemma2", {"mlp_bias": True}, Routing(experts=4, top_k=3, scores="sigmoid", normalised=True), (1,)),
    ],
)
def test_outputs_are_those_of_the_dense_model(name, changes, routing, dense_layers):
    config, params = dense(name, **changes)
    got, target = upcycled(params, config, routing, key=key(3), dense_layers=dense_layers)
    model, ctx = Decoder(target), Ctx(sh=DOUBLE)
    assert {p: x.shape for p, x in tree.named(got).items()} == {p: q.shape for p, q in params_of(model.spec()).items()}
    assert all(x.dtype == torch.float64 for x in tree.leaves(got))
    assert [i for i in got["layers"] if "router" not in got["layers"][i]] == list(dense_layers)
    want = Decoder(config).logits(params, tokens_of(config), ctx)
    assert (model.logits(got, tokens_of(config), ctx) - want).abs().max() < 1e-13 * want.abs().max()


def test_it_is_exported_as_the_family_with_experts():
    config, params = dense("llama")
    _, target = upcycled(params, config, MIXTRAL, key=key(0))
    assert hf.fields_of(Decoder(target))["model_type"] == "mixtral"


@pytest.mark.parametrize(("axes", "ep"), [("dp=4", 2), ("tp=2", 1)])
def test_shards_at_rest_are_those_of_the_whole(axes, ep):
    config, params = dense("llama", heads=8, kv_heads=2)
    whole, target = upcycled(params, config, MIXTRAL, key=key(3))
    with simulate(math.prod(parse_axes(axes).values())):
        mesh = make_mesh(axes, also=expert_factoring(axes, ep=ep), kv_heads=config.kv_heads, device="cpu")
        sh = Sharding(mesh, standard_rules(mesh, zero=3), precision=DOUBLE.precision)
        at_rest = sh.shard_params(params, Decoder(config).spec())
        with pytest.raises(UserError, match="give sh="):
            upcycled(at_rest, config, MIXTRAL, key=key(3))
        got, _ = upcycled(at_rest, config, MIXTRAL, key=key(3), sh=sh)
        want = sh.shard_params(whole, Decoder(target).spec())
        for (path, a), b in zip(tree.named(got).items(), tree.leaves(want), strict=True):
            assert a.placements == b.placements, path
            pairs = zip(per_rank(a.to_local()), per_rank(b.to_local()), strict=True)
            assert all(torch.equal(x, y) for x, y in pairs), path


def test_a_stage_is_made_of_its_own_layers_alone():
    config, params = dense("llama")

    def held(whole):
        return {"layers": {1: whole["layers"][1]}, "norm": whole["norm"]}

    want = upcycled(params, config, MIXTRAL, key=key(3))[0]
    got = upcycled(held(params), config, MIXTRAL, key=key(3), held=held)[0]
    assert set(got["layers"]) == {1} and all(torch.equal(x, want["layers"][1][n]) for n, x in got["layers"][1].items())


def test_routings_that_would_change_the_model_are_refused():
    config, params = dense("llama")
    for routing in (Routing(experts=4, top_k=2), Routing(experts=4, top_k=2, normalised=True, scale=2.0)):
        with pytest.raises(UserError, match="weights of a token's experts must sum to 1"):
            upcycled(params, config, routing, key=key(0))
    with pytest.raises(UserError, match=r"capacity=1.0 drops choices"):
        upcycled(params, config, Routing(experts=4, top_k=2, normalised=True, capacity=1.0), key=key(0))
    params, config = upcycled(params, config, MIXTRAL, key=key(0))
    with pytest.raises(UserError, match="has experts already"):
        upcycled(params, config, MIXTRAL, key=key(0))
    with pytest.raises(UserError, match="they differ in layers.0.down"):
        upcycled(params, small_config("llama"), MIXTRAL, key=key(0))
