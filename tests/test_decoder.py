"""Every form of decoder, also those that no published family has, on meshes; configs and their refusals."""

import dataclasses
import json
import random as python_random

import pytest
import torch

from fmegatron import primitives, tree
from fmegatron.accumulate import accumulate
from fmegatron.checking import check
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.mesh import make_mesh
from fmegatron.models import PRESETS, Decoder, DecoderConfig, config_from_dict, config_to_dict
from fmegatron.models.config import CHOICES
from fmegatron.models.fused import FUSED
from fmegatron.precision import Precision
from fmegatron.primitives import Llama3Scaling, LongRoPEScaling, YaRNScaling
from fmegatron.random import key, normal
from fmegatron.remat import names, nothing
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import init, params_of
from fmegatron.split import everything

DOUBLE = Precision(params=torch.float64)
SMALL = dict(vocab=24, embed=16, layers=2, heads=8, kv_heads=2, head=6, mlp=12, max_seq=16)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def drawn(seed: int) -> DecoderConfig:
    """A config with every choice drawn at random."""
    draw = python_random.Random(seed)
    chosen = {name: draw.choice(values) for name, values in CHOICES.items()}
    flags = ("rope_interleaved", "sinks", "qkv_bias", "out_bias", "mlp_bias", "tied")
    chosen |= {name: draw.random() < 0.5 for name in flags}
    if chosen["norm"] == "rms":
        chosen |= {name: draw.random() < 0.5 for name in ("norm_zero_centred", "norm_wide_weight")}
    options = {
        "rope_dim": (None, 4),
        "rope_scaling": (None, Llama3Scaling(4.0, 1.0, 4.0, 8), YaRNScaling(factor=4.0, original_max_position=8)),
        "window": (None, 3, 5),
        "window_rope_base": (None, 100.0),
        "attention_scale": (None, 0.3),
        "attention_softcap": (None, 2.0),
        "embed_scale": (None, 4.0),
        "logit_softcap": (None, 3.0),
    }
    chosen |= {name: draw.choice(values) for name, values in options.items()}
    if chosen["window"] is not None:
        chosen["pattern"] = draw.choice([(), ("window", "full"), ("full", "window", "window")])
    chosen |= {name: draw.random() < 0.5 for name in FUSED}
    return DecoderConfig(**SMALL, **chosen)


def parameters(config):
    """All drawn, biases and norms too, so that nothing is trivially right."""
    spec = Decoder(config).spec()
    drawn = [normal(key(i), p.shape, dtype=torch.float64) * 0.4 for i, p in enumerate(params_of(spec).values())]
    return tree.like(spec, drawn)


def batch(rows=4, seq=8):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SMALL["vocab"], (rows, seq + 1), generator=g)
    mask = torch.rand(rows, seq, generator=g) < torch.linspace(0.3, 1.0, rows)[:, None]
    segments = (torch.arange(seq) >= torch.tensor([[3], [5], [8], [1]])).long()
    return {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous(), "mask": mask, "segments": segments}


def gradients(model, params, data, sh, microbatches=1):
    return accumulate(model.loss, microbatches, weights=model.weights)(params, data, Ctx(sh=sh))


LAYOUTS = [
    ("tp=4", True, (), everything),
    ("dp=2,tp=2", True, ("dp",), names("attention")),
    ("cp=2,tp=2", True, ("cp",), nothing),
    ("dp=2,cp=2", False, ("dp",), everything),
]
LOSS = {"label_smoothing": 0.1, "z_loss": 0.01}


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(i, marks=pytest.mark.slow) for i in range(8, 60))])
def test_every_form_computes_the_same_on_every_layout(seed):
    config = drawn(seed)
    params, data = parameters(config), batch()
    (value, _), want = gradients(Decoder(config, **LOSS), params, data, Sharding(precision=DOUBLE))
    axes, sp, store, save = LAYOUTS[seed % len(LAYOUTS)]
    with simulate(4):
        mesh = make_mesh(axes, kv_heads=SMALL["kv_heads"], device="cpu")
        sh = Sharding(mesh, standard_rules(mesh, sequence_parallel=sp, store=store), precision=DOUBLE)
        model = Decoder(config, save=save, **LOSS)
        mine = sh.shard_params(params, model.spec())
        local = {n: sh.shard(x, "batch seq") for n, x in data.items()}
        (got, _), grads = gradients(model, mine, local, sh, microbatches=2)
        assert max(abs(float(v - value)) for v in per_rank(got)) < 1e-12 * abs(float(value))
        leaves = zip(tree.named(grads).items(), tree.leaves(want), tree.leaves(model.spec()), strict=True)
        floor = 1e-3 * float(torch.stack([r.norm() for r in tree.leaves(want)]).norm())
        for (path, g), r, p in leaves:
            theirs = per_rank(sh.local(sh.shard_param(r, p)))
            worst = max(float((a - b).norm()) for a, b in zip(per_rank(sh.local(g)), theirs, strict=True))
            assert worst <= 1e-11 * max(float(r.norm()), floor), (path, config)


@pytest.mark.parametrize("seed", range(4))
def test_the_checking_mode_accepts_every_form(seed):
    config = drawn(seed)
    model, params = Decoder(config), parameters(config)
    mesh = make_mesh("dp=2,cp=2,tp=4", kv_heads=2, abstract=True, device="cpu")
    data = {n: x for n, x in batch().items() if n not in ("mask", "segments")}

    def program(params, batch, sh):
        terms, _ = model.loss(params, batch, Ctx(sh=sh))
        return sh.sum(terms["lm"].items, "batch seq ->")

    check(program, model.spec(), params, data, standard_rules(mesh, sequence_parallel=True))


@pytest.mark.parametrize("seed", range(8))
def test_the_cache_gives_the_logits_of_the_whole(seed):
    config = drawn(seed)
    model, params, ctx = Decoder(config), parameters(config), Ctx(sh=Sharding(precision=DOUBLE))
    tokens = batch()["tokens"]
    cache = model.cache(4, 8, dtype=torch.float64)
    with torch.no_grad():
        for start, stop in ((0, 3), (3, 4), (4, 8)):
            at = torch.arange(start, stop).expand(4, -1)
            got = model.cached(params, tokens[:, start:stop], cache, start, ctx, positions=at)
            whole = model.logits(params, tokens[:, :stop], ctx)[:, -1]
            assert (got - whole).abs().max() < 1e-12 * whole.abs().max(), (stop, config)


def test_configs_survive_json():
    long = dataclasses.replace(PRESETS["phi3-mini"], rope_scaling=LongRoPEScaling((1.0,) * 48, (2.0,) * 48, 4096, 32.0))
    for config in (*PRESETS.values(), *map(drawn, range(8)), long):
        assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    # as older checkpoints wrote it
    fields = {**config_to_dict(PRESETS["llama3.1-8b"]), "rope_scaling": dataclasses.asdict(Llama3Scaling())}
    assert config_from_dict(fields) == PRESETS["llama3.1-8b"]
    assert primitives.Llama3Scaling is Llama3Scaling


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embed": 17, "head": None}, "embed=17 does not divide by heads=8"),
        ({"kv_heads": 3}, "heads=8 does not divide by kv_heads=3"),
        ({"head": 5}, "head=5 must be even"),
        ({"rope_dim": 8}, "rope_dim=8 must be even and at most head=6"),
        ({"vocab": 0}, "vocab=0 must be an int of 1 or more"),
        ({"window": 0}, "window=0 must be an int of 1 or more"),
        ({"activation": "tanh"}, "activation='tanh' is not known: use one of"),
        ({"norm_place": "middle"}, "norm_place='middle' is not known"),
        ({"pattern": ("window",)}, "give window=…"),
        ({"pattern": ("local",), "window": 2}, 'must hold "full" and "window" only'),
        ({"norm": "layer", "norm_zero_centred": True}, 'norm="layer" takes neither'),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        DecoderConfig(**{**SMALL, **change})


def test_more_tokens_than_learned_positions_are_refused():
    model = Decoder(DecoderConfig(**{**SMALL, "max_seq": 4}, positions="learned"))
    params = init(model.spec(), key(0))
    with pytest.raises(UserError, match="8 tokens are more than the 4 learned positions of the model"):
        model.logits(params, batch()["tokens"])


def test_operations_per_token():
    """Against a count of every product and every key that a query sees."""
    config = DecoderConfig(**SMALL, window=3, pattern=("window", "full"), activation="gelu", mlp_bias=True)
    model, seq = Decoder(config), 8
    matrices = [p for n, p in params_of(model.spec()).items() if n.split(".")[-1] in ("q", "k", "v", "o", "up", "down")]
    expected = 6.0 * (sum(p.numel for p in matrices) + config.vocab * config.embed)
    for kind in config.kinds:
        pairs = sum(min(i + 1, 3 if kind == "window" else seq) for i in range(seq))
        exact = 12.0 * config.heads * config.head * pairs / seq
        expected += exact
    # half a key more or less: the usual formula takes the mean of the keys before and up to each query
    assert abs(model.flops_per_token(seq) - expected) <= 12.0 * config.heads * config.head * 0.5 * config.layers
