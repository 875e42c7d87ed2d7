"""Families with experts against transformers, logits and all gradients, folders both ways, MXFP4 files, and presets."""

from __future__ import annotations

import dataclasses
import importlib
import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fmegatron import tree
from fmegatron.errors import UserError
from fmegatron.models import PRESETS, Decoder, gpt_oss, hf, load_hf, mixtral, mxfp4, olmoe, qwen_moe, save_hf
from fmegatron.primitives import clamped_swiglu
from fmegatron.sharding import Sharding
from fmegatron.spec import count
from tests import families
from tests.families import BETWEEN_LAYOUTS, BOUND, DOUBLE, SIZES, YARN, Case, kinds, rope

MIXTRAL = dict(num_local_experts=5, num_experts_per_tok=2)
QWEN = dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=10)
QWEN2 = {**QWEN, "shared_expert_intermediate_size": 14}
# transformers' OLMoE has norms of embed / heads features a head
OLMOE = {**{n: v for n, v in SIZES.items() if n != "head_dim"}, "num_experts": 5, "num_experts_per_tok": 2}
CASES = {
    "mixtral-window": Case("mixtral", {**SIZES, **MIXTRAL, **rope("default"), "sliding_window": 5}),
    "qwen3-moe-normalised": Case("qwen3_moe", {**SIZES, **QWEN, **rope("default"), "norm_topk_prob": True}),
    "qwen3-moe-dense-windows": Case(
        "qwen3_moe",
        {**SIZES, **QWEN, **YARN, "mlp_only_layers": [2], "decoder_sparse_step": 2, "num_hidden_layers": 4}
        | {"attention_bias": True, "use_sliding_window": True, "sliding_window": 4, "tie_word_embeddings": True},
    ),
    "qwen2-moe-windows": Case(
        "qwen2_moe", {**SIZES, **QWEN2, **rope("default"), "use_sliding_window": True, "sliding_window": 4}
    ),
    "olmoe": Case("olmoe", {**OLMOE, **rope("default")}),
    "olmoe-biases-normalised": Case(
        "olmoe", {**OLMOE, **rope("linear", factor=3.0), "attention_bias": True, "norm_topk_prob": True}
    ),
    # 64 features, which MXFP4 cuts into two blocks
    "gpt-oss": Case(
        "gpt_oss", {**SIZES, **MIXTRAL, **YARN, "sliding_window": 5, "hidden_size": 64, "intermediate_size": 64}
    ),
    "gpt-oss-no-biases": Case(
        "gpt_oss",
        {**SIZES, **MIXTRAL, **rope("default"), "attention_bias": False, "sliding_window": 4, **kinds("ffw")},
    ),
}
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True, scope="module")
def cases():
    """The cases among those of tests/families.py, whose checks read them there."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, case in CASES.items():
            patch.setitem(families.CASES, name, case)
        yield


@every_case
def test_logits_and_gradients_equal_transformers(name):
    worst = families.errors(name, DOUBLE)
    assert max(worst.values()) <= BOUND[DOUBLE], worst


@every_case
def test_round_trip_is_bitwise(name):
    assert families.round_trip(name) == 0


@pytest.mark.parametrize("name", ["mixtral-window", "gpt-oss"])
def test_generation_equals_transformers_token_by_token(name):
    different, tokens = families.generation(name)
    assert different == 0
    assert len({token for row in tokens for token in row}) >= 6


@pytest.mark.parametrize(("name", "axes"), [("gpt-oss", "cp=2,tp=2"), ("qwen2-moe-windows", "tp=2")])
def test_ranks_compute_the_same(name, axes):
    assert families.layout_error(name, axes) <= BETWEEN_LAYOUTS


def test_a_shared_expert_is_read_into_a_fused_leaf_and_written_from_it(tmp_path):
    folder, tokens = families.folder_of("qwen2-moe-windows"), families.batch_of(SIZES["vocab_size"])["tokens"]
    model, params = load_hf(folder, dtype=DOUBLE, fused_qkv=True, fused_gate_up=True)
    assert "shared_gate_up" in params["layers"][0]
    apart, others = load_hf(folder, dtype=DOUBLE)
    assert (model.logits(params, tokens) - apart.logits(others, tokens)).abs().max() < 1e-5
    save_hf(tmp_path / "out", model, params, dtype="float32")
    assert families._difference(families.tensors_in(tmp_path / "out"), families.tensors_in(folder)) == 0


# ------------------------------------------------------------------------------------------- one tensor for all experts


@pytest.fixture(scope="module", params=["mixtral-window", "qwen2-moe-windows"])
def forms(request, tmp_path_factory):
    """(a folder in the original form, the same model as transformers saves it when it is not to keep that form)."""
    plain, joined = families.folder_of(request.param), tmp_path_factory.mktemp("joined")
    families.reference(request.param, torch.float32).save_pretrained(joined, save_original_format=False)
    return plain, joined


def test_joined_experts_are_read_as_those_apart(forms, tmp_path):
    assert "model.layers.1.mlp.experts.gate_up_proj" in families.tensors_in(forms[1])
    (_, apart), (model, joined) = map(load_hf, forms)
    apart, named = tree.named(apart), tree.named(joined)
    assert apart.keys() == named.keys() and all(torch.equal(apart[path], named[path]) for path in apart)
    save_hf(tmp_path / "out", model, joined)  # in the form that every version reads
    assert families._difference(families.tensors_in(tmp_path / "out"), families.tensors_in(forms[0])) == 0


def test_of_joined_experts_a_rank_reads_its_part(forms, monkeypatch):
    cut = {"embed": (5, 20), "emlp": (3, 9), "expert": (1, 4)}

    def held(_, param):
        return tuple(torch.arange(*cut[name]) if name in cut else None for name in param.names)

    monkeypatch.setattr(Sharding, "stored_index", held)
    monkeypatch.setattr(Sharding, "at_rest", lambda sh, x, param: x)
    apart, joined = (tree.named(load_hf(folder)[1]) for folder in forms)
    assert joined["layers.0.experts_gate_up"].shape == (3, 15, 2, 6)
    assert all(torch.equal(apart[path], joined[path]) for path in apart)


def test_joined_experts_of_another_shape_are_named(forms, tmp_path):
    name = "model.layers.1.mlp.experts.down_proj"
    tensors = families.tensors_in(forms[1])
    save_file({**tensors, name: tensors[name].mT.contiguous()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((forms[1] / "config.json").read_text())
    with pytest.raises(UserError, match=f"of another shape: {name}"):
        load_hf(tmp_path)


# ------------------------------------------------------------------------------------------------------ config.json


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"])
def test_fields_left_out_mean_what_transformers_takes(family, tmp_path):
    sizes = {n: SIZES[n] for n in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")}
    given = {**sizes, "intermediate_size": 36, "num_hidden_layers": 31, "pad_token_id": None}
    given |= {"use_sliding_window": True} if family.startswith("qwen") else {}
    transformers.AutoConfig.for_model(family, **given).save_pretrained(tmp_path)
    config_from_hf = importlib.import_module(hf.FAMILIES[family]).config_from_hf
    assert config_from_hf({"model_type": family, **given}) == config_from_hf(hf.read_config(tmp_path))


def test_the_published_fields_of_gpt_oss():
    """… of which some say twice the same, make the preset."""
    scaling = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    fields = {
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {**scaling, "rope_type": "yarn", "truncate": False},
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    }
    assert gpt_oss.config_from_hf(fields) == PRESETS["gpt-oss-20b"]
    with pytest.raises(UserError, match="swiglu_limit=5.0 is not supported for gpt_oss"):
        gpt_oss.config_from_hf({**fields, "swiglu_limit": 5.0})


def test_settings_of_training_do_not_hinder_a_save():
    config = mixtral.config_from_hf(mixtral.config_to_hf(PRESETS["mixtral-8x7b"]))
    assert config == PRESETS["mixtral-8x7b"] and config.moe.routing.switch_loss == 0
    routing = dataclasses.replace(config.moe.routing, switch_loss=0.01, jitter=0.1, capacity=1.5)
    trained = dataclasses.replace(config, moe=dataclasses.replace(config.moe, routing=routing))
    assert hf.fields_of(small(trained)) == hf.fields_of(small(config))
    alike = dataclasses.replace(routing, before=True, normalised=True)  # the same weights
    assert hf.fields_of(small(config, moe=dataclasses.replace(config.moe, routing=alike))) == hf.fields_of(
        small(config)
    )
    with pytest.raises(UserError, match="moe=.* cannot be written"):
        other = dataclasses.replace(routing, before=True, normalised=False)
        hf.fields_of(small(config, moe=dataclasses.replace(config.moe, routing=other)))


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "gpt-oss-20b"])
def test_an_auxiliary_loss_is_what_a_config_turns_on(name):
    """That of transformers is top_k for an even load of all layers together, ours 1 in each."""
    modules = {"mixtral-8x7b": mixtral, "qwen3-30b-a3b": qwen_moe, "olmoe-1b-7b": olmoe, "gpt-oss-20b": gpt_oss}
    module, fields = modules[name], hf.fields_of(Decoder(dataclasses.replace(PRESETS[name], layers=2)))
    for on, loss in ((False, 0.0), (True, 0.02)):
        routing = module.config_from_hf(
            {**fields, "router_aux_loss_coef": 0.02, "output_router_logits": on}
        ).moe.routing
        assert 2 * routing.switch_loss == pytest.approx(loss * routing.top_k)


def small(config, **changes):
    return Decoder(dataclasses.replace(config, layers=1, **changes))


def test_what_a_config_cannot_say_is_refused():
    config = PRESETS["mixtral-8x7b"]
    routing = dataclasses.replace(config.moe.routing, scale=2.0)
    with pytest.raises(UserError, match="moe=.*scale=2.0.* cannot be written"):
        hf.fields_of(small(config, moe=dataclasses.replace(config.moe, routing=routing)))
    with pytest.raises(UserError, match="moe=None has no form in mixtral"):
        hf.fields_of(small(config, moe=None))
    with pytest.raises(UserError, match="clip_qkv=8.0 is not supported for olmoe"):
        olmoe.config_from_hf({**olmoe.config_to_hf(PRESETS["olmoe-1b-7b"]), "clip_qkv": 8.0})


# -------------------------------------------------------------------------------------------------------------- MXFP4


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """(a folder of GPT-OSS with its experts' matrices in MXFP4, one with the values that transformers reads in these)."""
    folder, g = families.folder_of("gpt-oss"), torch.Generator().manual_seed(5)
    config = {**hf.read_config(folder), "quantization_config": {"quant_method": "mxfp4"}}
    stored, meant = {}, {}
    for name, x in families.tensors_in(folder).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = meant[name] = x
            continue
        experts, inner, outer = x.shape
        blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), generator=g, dtype=torch.uint8)
        scales = torch.randint(120, 128, blocks.shape[:-1], generator=g, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert meant[name].shape == x.shape
    made = tmp_path_factory.mktemp("mxfp4")
    for place, tensors, fields in (("packed", stored, config), ("plain", meant, hf.read_config(folder))):
        (made / place).mkdir()
        save_file(tensors, made / place / "model.safetensors", metadata={"format": "pt"})
        (made / place / "config.json").write_text(json.dumps(fields))
    return made / "packed", made / "plain"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_read_as_transformers_reads_it(quantized, dtype):
    packed, plain = (tree.named(load_hf(folder, dtype=dtype)[1]) for folder in quantized)
    assert all(torch.equal(packed[path], plain[path]) for path in plain) and packed.keys() == plain.keys()


def some(_, param):
    """What a rank holds at rest that has a third of some dims, which cuts blocks."""
    sizes, cut = zip(param.names, param.shape, strict=True), {"embed": (40, 61), "emlp": (13, 45), "expert": (1, 4)}
    return tuple(torch.arange(*cut[name]) if name in cut else None for name, _ in sizes)


def test_parts_of_mxfp4_tensors_are_read_alone(quantized, monkeypatch):
    monkeypatch.setattr(Sharding, "stored_index", some)
    monkeypatch.setattr(Sharding, "at_rest", lambda sh, x, param: x)
    packed, plain = (tree.named(load_hf(folder)[1]) for folder in quantized)
    assert packed["layers.0.experts_down"].shape == (3, 32, 21)
    assert all(torch.equal(packed[path], plain[path]) for path in plain)


def test_a_folder_in_mxfp4_is_saved_plain(quantized, tmp_path):
    packed, plain = quantized
    save_hf(tmp_path / "out", *load_hf(packed))
    assert families._difference(families.tensors_in(tmp_path / "out"), families.tensors_in(plain)) == 0
    assert "quantization_config" not in hf.read_config(tmp_path / "out")


def test_mxfp4_tensors_that_do_not_fit_are_named(quantized, tmp_path):
    tensors = families.tensors_in(quantized[0])
    name = "model.layers.0.mlp.experts.down_proj"
    (tmp_path / "config.json").write_text((quantized[0] / "config.json").read_text())
    save_file({n: x for n, x in tensors.items() if n != f"{name}_scales"}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"1 missing: {name}_scales"):
        load_hf(tmp_path)
    save_file({**tensors, f"{name}_blocks": tensors[f"{name}_blocks"].float()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"{name}_blocks \(F32\)"):
        load_hf(tmp_path)


def test_values_of_mxfp4():
    """By hand: the lower half of a byte is first, and a scale of 128 doubles."""
    blocks = torch.tensor([[0x2F] + [0] * 15], dtype=torch.uint8)
    got = mxfp4.values(blocks, torch.tensor([128], dtype=torch.uint8), torch.float32)
    assert got[:3].tolist() == [-12.0, 2.0, 0.0] and got.shape == (32,)


# ------------------------------------------------------------------------------------------------------------- presets

# As the models' authors or transformers' own pages count them.
PUBLISHED = {
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(preset):
    assert count(Decoder(PRESETS[preset]).spec()) == PUBLISHED[preset]
    assert hf.fields_of(Decoder(PRESETS[preset]))["model_type"] == PRESETS[preset].family


def test_the_clamped_activation_and_its_gradient():
    """… at gates and ups on both sides of the limit, by finite differences."""
    x = (torch.linspace(-12, 12, 26, dtype=DOUBLE)).reshape(2, 13).requires_grad_()
    assert torch.autograd.gradcheck(clamped_swiglu, (x,))
    assert float(clamped_swiglu(torch.tensor(9.0), torch.tensor(-9.0))) == pytest.approx(-42.0, rel=1e-5)
    with pytest.raises(UserError, match="clamped_swiglu: gate has shape"):
        clamped_swiglu(torch.zeros(2), torch.zeros(3))
