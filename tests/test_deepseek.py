"""DeepSeek V2 and V3 against transformers, logits and all gradients, folders both ways, and what is not supported."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from fmegatron import tree
from fmegatron.errors import UserError
from fmegatron.models import Decoder, deepseek, hf, load_hf
from fmegatron.models import safetensors_files as files
from fmegatron.sharding import Sharding
from fmegatron.spec import count, params_of
from tests import families
from tests.families import BETWEEN_LAYOUTS, BOUND, DOUBLE, SINGLE, YARN_DEEPSEEK, Case, rope

# 6 heads, whose sizes for queries and for values differ; all layers dense.
SIZES = {n: v for n, v in families.SIZES.items() if n not in ("head_dim", "num_key_value_heads")}
SIZES |= dict(kv_lora_rank=10, q_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)
SIZES |= dict(num_key_value_heads=6, first_k_dense_replace=2)
EXPERTS = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=10, n_shared_experts=2)
EXPERTS |= dict(first_k_dense_replace=1, routed_scaling_factor=1.7)
CASES = {
    "deepseek-v3-yarn-biases": Case("deepseek_v3", {**SIZES, **YARN_DEEPSEEK, "attention_bias": True}),
    "deepseek-v3-halves": Case("deepseek_v3", {**SIZES, **rope("default"), "rope_interleave": False}),
    "deepseek-v3-experts": Case("deepseek_v3", {**SIZES, **EXPERTS, **rope("default"), "n_group": 4, "topk_group": 2}),
    "deepseek-v3-one-group": Case(
        "deepseek_v3", {**SIZES, **EXPERTS, **YARN_DEEPSEEK, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
    ),
    "deepseek-v2-experts": Case(
        "deepseek_v2",
        {**SIZES, **EXPERTS, **rope("default"), "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v2-greedy": Case("deepseek_v2", {**SIZES, **EXPERTS, **YARN_DEEPSEEK, "first_k_dense_replace": 0}),
    "deepseek-v2-no-query-latent": Case(
        "deepseek_v2", {**SIZES, **rope("default"), "q_lora_rank": None, "v_head_dim": 12, "mlp_bias": True}
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
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=["fp32", "float64"])
def test_logits_and_gradients_equal_transformers(name, dtype):
    worst = families.errors(name, dtype)
    assert max(worst.values()) <= BOUND[dtype], worst


@every_case
def test_round_trip_is_bitwise(name):
    assert families.round_trip(name) == 0


@every_case
def test_generation_equals_transformers_token_by_token(name):
    """Which expands latents to heads in every step; here heads are absorbed."""
    different, tokens = families.generation(name)
    assert different == 0
    assert len({token for row in tokens for token in row}) >= 6


@pytest.mark.parametrize(
    ("name", "axes", "packed"),
    [("deepseek-v3-yarn-biases", "cp=2,tp=2", True), ("deepseek-v2-experts", "tp=2", False)],
)
def test_ranks_compute_the_same(name, axes, packed):
    assert families.layout_error(name, axes, packed=packed) <= BETWEEN_LAYOUTS


def test_yarn_stretches_the_scores_of_all_features():
    """… by mscale_all_dim alone: with it the published factor of 40 gives 1.3688² for 1."""
    config = families.ours("deepseek-v3-yarn-biases")[0].config
    fields = {**deepseek.config_to_hf(config), "rope_scaling": None}
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16, "mscale_all_dim": 1.0}
    scaled = deepseek.config_from_hf({**fields, "rope_parameters": {**yarn, "mscale": 1.0}})
    assert abs(scaled.attention_scale - 10**-0.5 * 1.3688879454113936**2) < 1e-12
    del yarn["mscale_all_dim"]
    assert deepseek.config_from_hf({**fields, "rope_parameters": yarn}).attention_scale is None


def test_what_a_config_cannot_say_is_refused():
    config = families.ours("deepseek-v3-yarn-biases")[0].config
    with pytest.raises(UserError, match="attention_scale=0.3 cannot be written"):
        hf.fields_of(Decoder(dataclasses.replace(config, attention_scale=0.3)))
    with pytest.raises(UserError, match="mla=None has no form in deepseek_v3"):
        hf.fields_of(Decoder(dataclasses.replace(config, mla=None, head=10)))
    with pytest.raises(UserError, match="num_key_value_heads|kv_heads=3"):
        deepseek.config_from_hf({**deepseek.config_to_hf(config), "num_key_value_heads": 3})


BLOCK = 4  # DeepSeek's is 128


def in_fp8(folder, target):
    """The model of a folder with its matrices in fp8, one scale for each block of rows and columns, and the folder of the
    values that these stand for."""
    config = hf.read_config(folder)
    stored, meant = {}, {}
    for name, x in families.tensors_in(folder).items():
        if x.ndim != 2 or "embed" in name or "head" in name or name.endswith("mlp.gate.weight"):
            stored[name] = meant[name] = x
            continue
        rows, columns = (-(-n // BLOCK) for n in x.shape)
        scales = torch.empty(rows, columns)
        stored[name], meant[name] = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty_like(x)
        for i in range(rows):
            for j in range(columns):
                at = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
                scales[i, j] = x[at].abs().max() / 448
                stored[name][at] = (x[at] / scales[i, j]).to(torch.float8_e4m3fn)
                meant[name][at] = stored[name][at].float() * scales[i, j]
        stored[f"{name}_scale_inv"] = scales
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    quantized["weight_block_size"] = [BLOCK, BLOCK]
    for place, tensors, more in (("fp8", stored, {"quantization_config": quantized}), ("plain", meant, {})):
        (target / place).mkdir()
        save_file(tensors, target / place / "model.safetensors", metadata={"format": "pt"})
        (target / place / "config.json").write_text(json.dumps({**config, **more}))
    return target / "fp8", target / "plain"


def test_block_scaled_fp8_is_read(tmp_path):
    """… experts too."""
    scaled, plain = in_fp8(families.folder_of("deepseek-v2-experts"), tmp_path)
    want = tree.named(load_hf(plain)[1])
    for path, x in tree.named(load_hf(scaled)[1]).items():
        assert torch.equal(x, want[path]), path


def second_half(_, param):
    """What a rank holds at rest that has the second half of some dims, which cuts blocks."""
    sizes, cut = zip(param.names, param.shape, strict=True), ("expert", "kv", "emlp", "embed", "mlp")
    return tuple(torch.arange(n // 2, n) if name in cut else None for name, n in sizes)


@pytest.mark.parametrize("quantized", [True, False], ids=["fp8", "plain"])
def test_a_rank_reads_its_own_experts_and_parts_of_blocks(tmp_path, quantized, monkeypatch):
    folder = in_fp8(families.folder_of("deepseek-v2-experts"), tmp_path)[not quantized]
    model, params = load_hf(folder)
    whole, spec, read = tree.named(params), params_of(model.spec()), []
    part_of = files.part_of

    def counted(f, name, *rest):
        read.append(name)
        return part_of(f, name, *rest)

    monkeypatch.setattr(files, "part_of", counted)
    monkeypatch.setattr(Sharding, "stored_index", second_half)
    for path, x in tree.named(load_hf(folder)[1]).items():
        want = whole[path]
        for dim, at in enumerate(second_half(None, spec[path])):
            want = want if at is None else want.index_select(dim, at)
        assert torch.equal(x, want), path
    # an expert that it does not hold is not read
    assert not any(f"experts.{i}." in name for name in read for i in range(4))
    assert any("experts.4." in name for name in read)


def test_fp8_without_scales_or_of_another_kind_is_refused(tmp_path):
    scaled, _ = in_fp8(families.folder_of("deepseek-v2-experts"), tmp_path)
    tensors = families.tensors_in(scaled)
    missing = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    save_file({n: x for n, x in tensors.items() if n != missing}, scaled / "model.safetensors")
    with pytest.raises(UserError, match=f"1 missing: {missing}"):
        load_hf(scaled)
    fields = hf.read_config(scaled)
    fields["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (scaled / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match="quant_method 'gptq': quantized weights are not supported, but for fp8"):
        load_hf(scaled)


# As the models' authors count them.
PUBLISHED = {"deepseek-v2-lite": 15_706_484_224, "deepseek-v2": 235_741_434_880, "deepseek-v3": 671_026_419_200}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(preset):
    config = deepseek.DEEPSEEK[preset]
    assert count(Decoder(config).spec()) == PUBLISHED[preset]
    assert deepseek.config_from_hf(deepseek.config_to_hf(config)) == config
