"""A decoder with experts in fp8: gradients, microbatches, remat, command line."""

import dataclasses

import pytest
import torch

from fmegatron import tree
from fmegatron.accumulate import accumulate
from fmegatron.config import BatchConfig, ExpertConfig, ModelOverrides, TrainConfig
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.fp8 import Fp8, scaling
from fmegatron.job import check
from fmegatron.job_model import model_config
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.models.moe import MoE
from fmegatron.parallel.routing import Routing
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.remat import nothing
from fmegatron.sharding import Sharding
from fmegatron.spec import init

MIXTURE = MoE(routing=Routing(experts=4, top_k=2), mlp=48)
CONFIG = DecoderConfig(vocab=64, embed=64, layers=2, heads=4, kv_heads=4, head=16, mlp=64, moe=MIXTURE)
MODEL = Decoder(CONFIG)


def gradients(recipe, model=MODEL, **options):
    fp8 = None if recipe is None else Fp8(recipe, **options)
    sh = Sharding(precision=Precision(params=torch.float32, fp8=fp8))
    ids = torch.randint(64, (2, 65), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:]}
    params = init(model.spec(), key(0), sh=sh)
    now = scaling.begin(sh, None, params=params)
    return tree.named(accumulate(model.loss, weights=model.weights)(params, batch, Ctx(sh=now))[1])


def test_gradients_of_every_leaf_point_where_those_of_float32_do():
    # routers choose by what comes in: with the products before them kept, they choose as without fp8
    keep = ("embed", "head", "router", "q", "k", "v", "o")
    want, got = gradients(None), gradients("rowwise", keep=keep, keep_first=1)
    for path, g in got.items():
        assert torch.nn.functional.cosine_similarity(g.flatten(), want[path].flatten(), dim=0) > 0.98, path
    assert not any(torch.equal(got[p], want[p]) for p in want if p.startswith("layers.1.experts"))
    kept = gradients("rowwise", keep=(*keep, "experts_*"))
    assert all(torch.equal(kept[path], want[path]) for path in want)
    kept = gradients("delayed", keep=keep)
    assert all(torch.equal(kept[path], want[path]) for path in want)


def test_remat_is_bitwise_the_same():
    want, got = gradients("rowwise"), gradients("rowwise", Decoder(CONFIG, save=nothing))
    assert all(torch.equal(got[path], want[path]) for path in want)


def test_widths_of_experts_are_checked_at_once():
    sizes = ModelOverrides(layers=2, embed=64, heads=4, mlp=64)
    config = TrainConfig(
        model_overrides=sizes,
        batch=BatchConfig(4, 64),
        device="cpu",
        fp8="rowwise",
        moe=ExpertConfig(experts=4, mlp=40),
    )
    with pytest.raises(UserError, match=r"multiples of 16, but on a rank experts_up is 40 wide"):
        check(config, 1, model_config(config, None))
    for fp8, mlp in (("rowwise", 48), ("delayed", 40)):
        other = dataclasses.replace(config, fp8=fp8, moe=ExpertConfig(experts=4, mlp=mlp))
        check(other, 1, model_config(other, None))
