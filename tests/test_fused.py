"""Queries, keys and values in one leaf, and gate and up in one, against the same model with each apart.

tests/test_decoder.py draws models with such leaves too, for its layouts, its checking mode and its caches, and
tests/test_hf.py reads them rank by rank.
"""

import contextlib
import dataclasses

import pytest
import torch

from fmegatron import checkpoint, cli, job, optim, tree
from fmegatron.checking import infer_over
from fmegatron.config import TrainConfig
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.job_model import computations, resumed_model
from fmegatron.mesh import make_mesh
from fmegatron.models import PRESETS, Decoder, load_hf, save_hf
from fmegatron.models.fused import FUSED, fuse, unfuse, unfused
from fmegatron.random import fold_in, key, normal
from fmegatron.remat import names, nothing
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import count, init, params_of
from fmegatron.split import everything
from fmegatron.testing import assert_equivalent
from fmegatron.testing.ledger import ledger
from fmegatron.testing.models import find_model, model_text, small_config
from tests import families, train_runs
from tests import test_saved_bytes as saved
from tests.test_decoder import DOUBLE, batch, drawn, gradients, parameters
from tests.test_train_options import names_of

torch.set_num_threads(1)
BOTH = dict.fromkeys(FUSED, True)
ONE = [{name: True} for name in FUSED]


def fused_form(seed, **flags):
    return dataclasses.replace(drawn(seed), **(flags or BOTH))


# ------------------------------------------------------------------------------------------------- the same function


@pytest.mark.parametrize("seed", [0, 1, 2, 6, 7])
def test_every_form_computes_the_same(seed):
    """Loss and every gradient, to rounding, of drawn forms: gated or not, biases, norms, windows, soft-caps."""
    config = fused_form(seed, fused_qkv=seed != 6, fused_gate_up=seed != 7)
    apart, data, sh = unfused(config), batch(), Sharding(precision=DOUBLE)
    params = parameters(apart)
    (want, _), theirs = gradients(Decoder(apart), params, data, sh)
    (got, _), mine = gradients(Decoder(config), fuse(params, config), data, sh)
    assert abs(float(got - want)) <= 1e-14 * abs(float(want))
    floor = 1e-3 * float(torch.stack([g.norm() for g in tree.leaves(theirs)]).norm())
    for path, g in tree.named(unfuse(mine, config)).items():
        other = tree.named(theirs)[path]
        assert g.shape == other.shape and float((g - other).norm()) <= 1e-13 * max(float(other.norm()), floor), path


LINES = [
    ("llama,fused=1,mlp=26,layers=1", "tp=3 sp micro=2 mask=row"),  # an mlp that does not divide
    ("qwen2,fused=1,heads=8,kv_heads=2", "tp=4,fsdp=2 sp zero=3 packed"),  # more ranks than kv heads, biases
    ("olmo2,fused=1,heads=8,kv_heads=2", "dp=2,tp=4 micro=2 mask=row"),  # a norm over all heads, cut by two axes
]


@pytest.mark.parametrize(("model", "line"), LINES)
def test_layouts_are_equivalent(model, line):
    assert_equivalent(find_model(model), line, checks=("gradients",))


def test_the_checking_mode_confirms_what_gradients_are_summed_over():
    model, params = load_hf(families.folder_of("qwen3-biases-windows"), dtype=torch.float64, **BOTH)
    mesh = make_mesh("dp=2,cp=2,tp=2", kv_heads=3, abstract=True, device="cpu")
    rules, data = standard_rules(mesh, sequence_parallel=True), families.batch_of(model.config.vocab)

    silent = families.bare(model)

    def loss(params, batch, sh):
        return sh.sum(silent.loss(params, batch, Ctx(sh=sh))[0]["lm"].items, "batch seq ->")

    found = params_of(infer_over(loss, silent.spec(), params, data, rules))
    for path, p in params_of(model.spec()).items():
        assert set(p.over.split()) == set(found[path].over.split()), path


@pytest.mark.parametrize("family", ["llama3-8b", "qwen2.5-7b", "gpt2", "qwen3-8b", "gemma2-2b", "olmo2-7b"])
@pytest.mark.parametrize("policy", [everything, names("attention", "qkv", "q", "k", "v"), nothing])
def test_as_many_bytes_are_kept_for_backward(family, policy):
    """The parts of a product do not keep it alive for what nobody needs."""
    kept = []
    for config in (unfused(PRESETS[family]), dataclasses.replace(PRESETS[family], **BOTH)):
        model, params, data, ctx = saved.make(policy, config=dataclasses.replace(config, **saved.SIZES))
        x = model.embed(params, data, ctx).detach().requires_grad_()
        with saved.Alive() as alive:
            y = model._stack(params["layers"], x, ctx)
        kept.append(sum(alive.sizes()))
        del y
    assert kept[0] == kept[1] > 0


# ----------------------------------------------------------------------------------------------------------- the leaves


@pytest.mark.parametrize("preset", ["llama3.2-1b", "gpt2", "qwen2.5-0.5b", "gemma3-1b"])
def test_the_leaves_hold_the_same_parameters(preset):
    """As many, drawn with the same deviations, decayed where they are apart; as many operations."""
    apart = Decoder(PRESETS[preset])
    model = Decoder(dataclasses.replace(PRESETS[preset], **BOTH))
    assert count(model.spec()) == count(apart.spec())
    assert model.flops_per_token(512) == apart.flops_per_token(512)
    layers = [params_of(m.spec()["layers"][0]) for m in (apart, model)]
    for leaf, parts in {"qkv": "q k v", "qkv_bias": "q_bias", "gate_up": "gate up", "gate_up_bias": "up_bias"}.items():
        if leaf in layers[1]:
            for part in parts.split():
                assert layers[1][leaf].init == layers[0][part].init
                assert optim.decay_mask(layers[1][leaf]) == optim.decay_mask(layers[0][part]), leaf
    assert not {"q", "k", "v", "gate"} & layers[1].keys()


def test_biases_of_gate_and_up_do_not_decay():
    spec = Decoder(small_config("llama", **BOTH, mlp_bias=True, qkv_bias=True)).spec()["layers"][0]
    assert [n for n, p in spec.items() if n.endswith("bias") and optim.decay_mask(p)] == []


def test_initial_values_have_the_same_deviation():
    config = small_config("llama", embed=64, mlp=96, head=16, **BOTH)
    drawn = unfuse(init(Decoder(config).spec(), key(0)), config)["layers"][0]
    for name in ("q", "k", "v", "gate", "up"):
        assert abs(float(drawn[name].std()) / config.init_std - 1) < 0.1 and abs(float(drawn[name].mean())) < 2e-3


@pytest.mark.parametrize("flags", [BOTH, *ONE])
def test_there_and_back_is_bitwise(flags):
    for seed in range(4):
        config = fused_form(seed, **(dict.fromkeys(FUSED, False) | flags))
        params = parameters(unfused(config))
        joined = fuse(params, config)
        assert [x.shape for x in tree.leaves(joined)] == [p.shape for p in params_of(Decoder(config).spec()).values()]
        back = tree.named(unfuse(joined, config))
        assert back.keys() == tree.named(params).keys()
        assert all(torch.equal(x, back[path]) for path, x in tree.named(params).items())


def test_frozen_leaves_stay_none():
    config = small_config("llama", **BOTH)
    frozen = tree.tree_map(lambda p: None, Decoder(config).spec())
    assert set(tree.leaves(fuse(unfuse(frozen, config), config))) == {None}
    some = unfuse(init(Decoder(config).spec(), key(0)), config)
    some["layers"][1]["k"] = None
    with pytest.raises(UserError, match="of layers.1.qkv some parts are None"):
        fuse(some, config)


def test_a_checkpoint_with_gate_and_up_as_halves_is_refused(tmp_path):
    """As the leaf once was: by its shape."""
    spec = Decoder(small_config("llama", layers=1, **BOTH)).spec()
    params = init(spec, key(0))
    halves = {"layers": {0: {"gate_up": params["layers"][0]["gate_up"].mT.contiguous()}}}
    checkpoint.save(tmp_path / "run", halves, step=1)
    like = tree.tree_map(lambda x: x.mT, halves)
    with pytest.raises(UserError, match=r"layers.0.gate_up \(\[12, 2, 24\] in it, \[12, 24, 2\] here\)"):
        checkpoint.load(tmp_path / "run", like)


def test_trees_of_another_model_are_refused():
    config = small_config("llama", **BOTH)
    params = init(Decoder(config).spec(), key(0))
    with pytest.raises(UserError, match="fuse: params are not those of this model apart: they differ in layers.0.gate"):
        fuse(params, config)
    with pytest.raises(UserError, match="unfuse: params are not those of this model fused: they differ in layers.0"):
        unfuse(unfuse(params, config), config)


@pytest.mark.parametrize("axes", ["dp=2,tp=3", "tp=4", "dp=4"])
def test_shards_at_rest_are_converted(axes):
    """To what the other leaves' rest would be, whatever axes hold the parts."""
    config = small_config("llama", heads=12, kv_heads=6 if "tp=3" in axes else 2, **BOTH)
    whole = init(Decoder(unfused(config)).spec(), key(0))
    world = 6 if "tp=3" in axes else 4
    with simulate(world):
        mesh = make_mesh(axes, kv_heads=config.kv_heads, device="cpu")
        sh = Sharding(mesh, standard_rules(mesh, store=("dp",) if "dp" in axes else ()))
        apart = sh.shard_params(whole, Decoder(unfused(config)).spec())
        with pytest.raises(UserError, match="give sh="):
            fuse(apart, config)
        joined = fuse(apart, config, sh=sh)
        for got, want in (
            (joined, sh.shard_params(fuse(whole, config), Decoder(config).spec())),
            (unfuse(joined, config, sh=sh), apart),
        ):
            for (path, a), b in zip(tree.named(got).items(), tree.leaves(want), strict=True):
                assert a.placements == b.placements, path
                pairs = zip(per_rank(a.to_local()), per_rank(b.to_local()), strict=True)
                assert all(torch.equal(x, y) for x, y in pairs), path


def test_as_many_bytes_are_communicated():
    line = "dp=2,tp=2 sp zero=3"
    totals = [ledger(find_model(text), line).entries for text in ("llama,fused=1,kv_heads=2", "llama,kv_heads=2")]
    assert [(e.kind, e.axes, e.count, e.bytes) for e in totals[0]] == [
        (e.kind, e.axes, e.count, e.bytes) for e in totals[1]
    ]


# ---------------------------------------------------------------------------------------------------- files and runs


@pytest.mark.parametrize("name", ["llama-biases-linear", "phi3-long", "gpt2", "gemma3"])
def test_folders_of_hugging_face_are_read_and_written_alike(name, tmp_path):
    """phi3 and gpt2 have fused tensors of their own, in another order."""
    folder = families.folder_of(name)
    plain, params = load_hf(folder)
    for flags in (BOTH, ONE[0]):
        model, got = load_hf(folder, **flags)
        want = tree.named(fuse(params, model.config))
        assert unfused(model.config) == plain.config and got.keys() == params.keys()
        assert all(torch.equal(x, want[path]) for path, x in tree.named(got).items())
        save_hf(tmp_path / "out", model, got, max_shard_bytes=8000)
        assert families._difference(families.tensors_in(folder), families.tensors_in(tmp_path / "out")) == 0


@pytest.mark.parametrize("rows", [{"qkv": [1, 3], "gated": [1]}, {"qkv": [2], "gated": [0]}])
def test_a_rank_may_hold_some_rows_of_the_joined_dim(rows, monkeypatch):
    """As a rank does where store axes divide no other dim: here of two queries, key and value."""
    folder = families.folder_of("llama-biases-linear")
    model, whole = load_hf(folder, **BOTH)
    held = {n: torch.tensor(i) for n, i in rows.items()}
    monkeypatch.setattr(Sharding, "stored_index", lambda self, p: tuple(held.get(n) for n in p.names))
    loaded = tree.named(load_hf(folder, **BOTH)[1])
    for path, param in params_of(model.spec()).items():
        want = tree.named(whole)[path]
        for d, name in enumerate(param.names):
            want = want.index_select(d, held[name]) if name in held else want
        assert torch.equal(loaded[path], want), path


def test_names_for_the_command_line():
    model = find_model("llama,fused=1")
    assert model.config.fused_qkv and model.config.fused_gate_up
    assert model_text(model) == "llama,fused_qkv=1,fused_gate_up=1" and find_model(model_text(model)) == model
    for preset in ("tiny", "gpt2-tiny"):
        for flags in (BOTH, *ONE):
            sizes = dataclasses.replace(PRESETS[preset], embed=48, head=8, mlp=32, vocab=64, layers=1, **flags)
            assert names_of(sizes) == set(computations(sizes))


@pytest.mark.parametrize("name", FUSED)
def test_a_run_goes_on_with_the_leaves_it_has(name):
    saved = dataclasses.replace(PRESETS["tiny"], **{name: True})
    flag = name.replace("_", "-")
    with pytest.raises(
        UserError, match=f"--model-overrides.{flag} is False, but ckpt was trained with True.*init-from"
    ):
        resumed_model(TrainConfig(), saved, "ckpt")


def test_settings_reach_the_model_and_what_it_begins_with():
    config = cli.parse_train(train_runs.flags("-", "-", "--model-overrides.fused-qkv", "True"))
    sizes = job.model_config(config, None)
    assert sizes.fused_qkv and not sizes.fused_gate_up
    folder = families.folder_of("llama")
    overrides = [x for name in FUSED for x in (f"--model-overrides.{name.replace('_', '-')}", "True")]
    config = cli.parse_train(train_runs.flags_of("-", "-", "--init-from", folder, *overrides))
    sizes = job.model_config(config, None)
    run = job.make_run(config, sizes, job.make_setup(config, torch.device("cpu"), 1, sizes=sizes))
    got, want = (tree.named(x) for x in (job.load_pretrained(config, run), load_hf(folder, **BOTH)[1]))
    assert got.keys() == want.keys() and all(torch.equal(x, want[path]) for path, x in got.items())


# -------------------------------------------------------------------------------------------------------------- muon


def two_steps(spec, params, grads, donate=False):
    matrices = optim.muon(0.1, spec=spec, weight_decay=0.1, adjust_lr="match_rms_adamw")
    optimizer = optim.partition(optim.muon_labels(spec), {"muon": matrices, "adamw": optim.adamw(0.01)})
    state = optimizer.init(params)
    for g in grads:
        params, _, state = optimizer.update(params, g, state, donate=donate)
    return params


def values(spec, seed):
    params = params_of(spec).values()
    return tree.like(spec, [normal(fold_in(key(seed), i), p.shape, dtype=torch.float64) for i, p in enumerate(params)])


@pytest.mark.parametrize("axes", [None, "dp=2,tp=2", "tp=4"])
def test_muon_finds_the_matrices_in_a_leaf(axes):
    """Queries, keys, values, gate and up are each made orthogonal by themselves, whatever leaf they are in; biases
    are with AdamW."""
    config = small_config("llama", heads=8, kv_heads=2, layers=1, qkv_bias=True, mlp_bias=True, **BOTH)
    apart, spec = Decoder(unfused(config)).spec(), Decoder(config).spec()
    params, grads = values(apart, 1), [values(apart, 2), values(apart, 3)]
    want = fuse(two_steps(apart, params, grads), config)
    params, grads = fuse(params, config), [fuse(g, config) for g in grads]
    with simulate(4) if axes else contextlib.nullcontext():
        mesh = None if axes is None else make_mesh(axes, kv_heads=2, device="cpu")
        rules = None if mesh is None else standard_rules(mesh, store=("dp",) if "dp" in axes else ())
        sh = Sharding(precision=DOUBLE) if mesh is None else Sharding(mesh, rules, precision=DOUBLE)
        params, *grads = (sh.shard_params(x, spec) for x in (params, *grads))
        got = two_steps(spec, params, grads, donate=axes is not None)
        for (path, x), y in zip(tree.named(got).items(), tree.leaves(sh.shard_params(want, spec)), strict=True):
            if axes is None:
                assert (x - y).abs().max() < 1e-12, path
            else:
                pairs = zip(per_rank(x.to_local()), per_rank(y.to_local()), strict=True)
                assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-12, path
