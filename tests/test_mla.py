"""Multi-head latent attention on every layout and in every form, its cache, and what it refuses. (Against transformers:
tests/test_deepseek.py.)"""

import dataclasses
import json
import math
import random as python_random

import pytest
import torch

from fmegatron import tree
from fmegatron.accumulate import accumulate
from fmegatron.checking import check, infer_over
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.generate import generate_tokens
from fmegatron.mesh import make_mesh, parse_axes
from fmegatron.models import Decoder, DecoderConfig, config_from_dict, config_to_dict, mla
from fmegatron.models.config import MLA
from fmegatron.parallel.context import factoring
from fmegatron.precision import Precision
from fmegatron.primitives import YaRNScaling
from fmegatron.random import key, normal
from fmegatron.remat import names, nothing
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import params_of
from fmegatron.split import everything

DOUBLE = Precision(params=torch.float64)
SMALL = dict(vocab=24, embed=16, layers=2, heads=8, mlp=12, max_seq=16)
LATENT = MLA(kv_rank=10, nope=4, rope=2, value=5, q_rank=8)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def drawn(seed: int) -> DecoderConfig:
    """A config with latent attention and everything beside it drawn at random."""
    draw = python_random.Random(seed)
    sizes = {"q_rank": draw.choice([None, 8]), "value": (5, 9, 6)[seed % 3]}  # less than a key's, more, as many
    flags = ("rope_interleaved", "sinks", "qkv_bias", "out_bias", "tied", "norm_zero_centred", "fused_gate_up")
    options = {
        "window": (None, None, 3),
        "rope_scaling": (None, YaRNScaling(factor=4.0, original_max_position=8, mscale=0.7, mscale_all_dim=1.3)),
        "attention_scale": (None, 0.3),
        "attention_softcap": (None, 2.0),
        "norm_place": ("pre", "both"),
        "norm": ("rms", "rms", "layer"),
    }
    chosen = {n: draw.random() < 0.5 for n in flags} | {n: draw.choice(values) for n, values in options.items()}
    if chosen["window"] is not None:
        chosen["pattern"] = ("window", "full")
    if chosen["norm"] == "layer":
        chosen["norm_zero_centred"] = False
    return DecoderConfig(**SMALL, mla=dataclasses.replace(LATENT, **sizes), **chosen)


def parameters(config):
    """All drawn, biases and norms too, so that nothing is trivially right."""
    spec = Decoder(config).spec()
    values = [normal(key(i), p.shape, dtype=torch.float64) * 0.4 for i, p in enumerate(params_of(spec).values())]
    return tree.like(spec, values)


def batch(rows=4, seq=8):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SMALL["vocab"], (rows, seq + 1), generator=g)
    mask = torch.rand(rows, seq, generator=g) < torch.linspace(0.3, 1.0, rows)[:, None]
    segments = (torch.arange(seq) >= torch.tensor([[3], [5], [8], [1]])).long()
    return {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous(), "mask": mask, "segments": segments}


def gradients(model, params, data, sh, microbatches=1):
    return accumulate(model.loss, microbatches, weights=model.weights)(params, data, Ctx(sh=sh))


LAYOUTS = [
    ("tp=4", True, (), "gather", everything),
    ("tp=2", False, (), "gather", names("attention")),
    ("dp=2,tp=2", True, ("dp",), "gather", names("attention", "kv_up")),
    ("cp=2,tp=2", True, ("cp",), "gather", nothing),
    ("cp=2,tp=2", True, (), "ring", everything),
    ("cp=2,tp=2", False, (), "ulysses", names("kv_down")),
    ("cp=4", False, ("cp",), "ulysses+ring", everything),
]


@pytest.mark.parametrize("seed", [*range(7), *(pytest.param(i, marks=pytest.mark.slow) for i in range(7, 42))])
def test_every_form_computes_the_same_on_every_layout(seed):
    config, data = drawn(seed), batch()
    params = parameters(config)
    (value, _), want = gradients(Decoder(config), params, data, Sharding(precision=DOUBLE))
    axes, sp, store, kind, save = LAYOUTS[seed % len(LAYOUTS)]
    with simulate(math.prod(parse_axes(axes).values())):
        also = factoring(axes, kind, heads=config.heads, kv_heads=config.kv_heads)
        mesh = make_mesh(axes, also=also, kv_heads=config.kv_heads, device="cpu")
        rules = standard_rules(mesh, sequence_parallel=sp, store=store, context=kind)
        sh, model = Sharding(mesh, rules, precision=DOUBLE), Decoder(config, save=save, overlap=2 * (seed % 2))
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


@pytest.mark.parametrize("seed", range(3))
def test_the_checking_mode_accepts_every_form_and_finds_what_gradients_are_summed_over(seed):
    config = drawn(seed)
    params, data = parameters(config), {n: x for n, x in batch().items() if n in ("tokens", "labels")}
    mesh = make_mesh("dp=2,cp=2,tp=4", kv_heads=8, abstract=True, device="cpu")
    rules = standard_rules(mesh, sequence_parallel=True)

    class Silent(Decoder):
        def _block_spec(self, *index):
            return {n: dataclasses.replace(p, over=None) for n, p in super()._block_spec(*index).items()}

    def program(model):
        def loss(params, batch, sh):
            terms, _ = model.loss(params, batch, Ctx(sh=sh))
            return sh.sum(terms["lm"].items, "batch seq ->")

        return loss

    model, silent = Decoder(config), Silent(config)
    check(program(model), model.spec(), params, data, rules)
    found = params_of(infer_over(program(silent), silent.spec(), params, data, rules))
    for path, p in params_of(model.spec()).items():
        # the group is of one head, so that no axis lies on it
        assert set(p.over.split()) - {"group"} == set(found[path].over.split()) - {"group"}, path


@pytest.mark.parametrize("seed", range(6))
def test_the_absorbed_form_gives_what_expanded_heads_give(seed):
    """From a cache of latents and rope keys: a prompt at once, then several tokens, then one."""
    config = drawn(seed)
    model, params, ctx = Decoder(config), parameters(config), Ctx(sh=Sharding(precision=DOUBLE))
    tokens, cache = batch()["tokens"], model.cache(4, 8, dtype=torch.float64)
    assert {n: x.shape for n, x in cache[0].items()} == {"latent": (4, 8, LATENT.kv_rank + LATENT.rope)}
    with torch.no_grad():
        for start, stop in ((0, 3), (3, 4), (4, 7), (7, 8)):
            at = torch.arange(start, stop).expand(4, -1)
            got = model.cached(params, tokens[:, start:stop], cache, start, ctx, positions=at)
            whole = model.logits(params, tokens[:, :stop], ctx)[:, -1]
            assert (got - whole).abs().max() < 1e-12 * whole.abs().max(), (stop, config)


def test_prompts_of_unequal_length_generate_as_alone():
    config = drawn(3)
    model, params = Decoder(config), parameters(config)
    sh, prompts = Sharding(precision=DOUBLE), [[1, 2, 3, 4, 5], [7, 8]]
    together = generate_tokens(model, params, prompts, tokens=5, sh=sh)
    assert together == [generate_tokens(model, params, [p], tokens=5, sh=sh)[0] for p in prompts]


def test_compiled_blocks_compute_the_same():
    config, data = DecoderConfig(**{**SMALL, "layers": 1}, mla=LATENT), batch()
    params, sh = parameters(config), Sharding(precision=DOUBLE)
    torch._dynamo.reset()
    results = [
        gradients(Decoder(config, compile=c), params, data, sh)
        for c in (False, {"backend": "eager", "fullgraph": True})
    ]
    (a, want), (b, got) = results
    assert abs(float(a[0] - b[0])) < 1e-12
    for path, g in tree.named(got).items():
        assert (g - tree.named(want)[path]).norm() <= 1e-12 * tree.named(want)[path].norm() + 1e-15, path


def test_operations_per_token():
    """Against a count of every product and every key that a query sees."""
    config, seq = DecoderConfig(**SMALL, mla=LATENT), 8
    model = Decoder(config)
    layer = {n: p for n, p in params_of(model.spec()).items() if n.startswith("layers.0.") and len(p.shape) > 1}
    products = sum(math.prod(p.shape) for p in layer.values())
    assert mla.matrix_elements(config) + 3 * 16 * 12 == products
    scores = 6.0 * config.heads * (LATENT.head + LATENT.value) * seq / 2
    assert model.flops_per_token(seq) == 2 * (6.0 * products + scores) + 6.0 * 16 * 24


def test_configs_survive_json():
    for seed in range(4):
        config = drawn(seed)
        assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    assert DecoderConfig(**SMALL, mla=LATENT).head == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": 8}, "head=8 must be 6"),
        ({"kv_heads": 2}, "kv_heads=2 must be heads=8 with mla"),
        ({"rope_dim": 2}, "rope_dim=2 with mla"),
        ({"positions": "learned"}, "positions='learned' with mla"),
        ({"qk_norm": "head"}, "qk_norm='head' with mla"),
        ({"fused_qkv": True}, "fused_qkv with mla"),
    ],
)
def test_what_does_not_go_with_latents_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        DecoderConfig(**{**SMALL, "mla": LATENT, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rope": 3}, "rope=3 must be even"), ({"kv_rank": 0}, "kv_rank=0 must be"), ({"q_rank": 1.5}, "q_rank=1.5")],
)
def test_sizes_that_are_none_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(LATENT, **change)
