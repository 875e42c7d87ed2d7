"""Every family against transformers (tests/families.py has the cases and the checks), and the dense families' presets."""

import copy
import dataclasses
import importlib

import pytest
import torch
import transformers

from fmegatron import tree
from fmegatron.checking import check, infer_over
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.mesh import make_mesh
from fmegatron.models import PRESETS, Decoder, DecoderConfig, gemma, hf, load_hf, phi
from fmegatron.models.fused import FUSED
from fmegatron.rules import standard_rules
from fmegatron.spec import count, params_of
from tests import families
from tests.families import BETWEEN_LAYOUTS, BOUND, CASES, DOUBLE, SINGLE

torch.set_num_threads(1)
SIZES_ALONE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
every_case = pytest.mark.parametrize("name", CASES)


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
    different, tokens = families.generation(name)
    assert different == 0
    assert len({token for row in tokens for token in row}) >= 6  # not one token over and over


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.grows])
def test_cached_logits_equal_all_at_once(name):
    assert families.cache_error(name) <= BETWEEN_LAYOUTS


@every_case
def test_two_tensor_parallel_ranks_compute_the_same(name):
    assert families.layout_error(name) <= BETWEEN_LAYOUTS


@pytest.mark.parametrize(
    ("name", "axes", "packed"),
    [
        ("gpt2", "cp=2", True),
        ("gemma2", "cp=2,tp=2", False),
        ("gemma3-cap-biases-tied", "cp=2", True),
        ("llama-dynamic", "cp=2", False),
    ],
)
def test_context_parallel_ranks_compute_the_same(name, axes, packed):
    """Windows that reach over the cut beside full layers, two rotary tables, learned positions, a table made for the
    length of the whole text."""
    assert families.layout_error(name, axes, packed=packed) <= BETWEEN_LAYOUTS


def test_learned_positions_and_biases_rest_sharded():
    assert families.layout_error("gpt2", "dp=2", store=("dp",)) <= BETWEEN_LAYOUTS


def program(model):
    def loss(params, batch, sh):
        terms, _ = model.loss(params, batch, Ctx(sh=sh))
        return sh.sum(terms["lm"].items, "batch seq ->")

    return loss


@every_case
def test_the_checking_mode_accepts_and_confirms_what_gradients_are_summed_over(name):
    model, params = families.ours(name)
    mesh = make_mesh("dp=2,cp=2,tp=2", kv_heads=model.config.kv_heads, abstract=True, device="cpu")
    rules, batch = standard_rules(mesh, sequence_parallel=True), families.batch_of(model.config.vocab)
    check(program(model), model.spec(), params, batch, rules)
    silent = families.bare(model)
    found = infer_over(program(silent), silent.spec(), params, batch, rules)
    for (path, p), q in zip(params_of(model.spec()).items(), params_of(found).values(), strict=True):
        assert set(p.over.split()) == set(q.over.split()), path


# ------------------------------------------------------------------------------------------------- compiled blocks


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_compiled_blocks_are_one_graph_for_each_kind_of_layer(name):
    """… whose window and rotary table it is given, and not one graph for each layer. Gemma with fused leaves."""
    from torch._dynamo.backends.debugging import aot_eager

    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    fused = dict.fromkeys(FUSED, name == "gemma2")
    eager, params = load_hf(families.folder_of(name), dtype=DOUBLE, **fused)
    config, batch, results = eager.config, families.batch_of(eager.config.vocab), []
    for model in (eager, Decoder(config, compile={"backend": counting})):
        results.append(families.gradients(model, params, batch, families.sharding(DOUBLE)))
    (a, want), (b, got) = results
    assert abs(float(a - b)) < 1e-12
    for path, g in tree.named(got).items():
        assert (g - tree.named(want)[path]).norm() <= 1e-11 * tree.named(want)[path].norm() + 1e-15, path
    assert len(graphs) == len(set(config.kinds)) < config.layers


# ------------------------------------------------------------------------------------------------ what differs alone


@pytest.mark.parametrize("family", families.FAMILIES)
def test_fields_left_out_mean_what_transformers_takes(family, tmp_path):
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 6}
    if family != "gpt2":
        sizes = {n: families.SIZES[n] for n in SIZES_ALONE} | {"num_hidden_layers": 31}
    if family.startswith("qwen"):
        sizes["use_sliding_window"] = True
    given = {"vocab_size": 102, "pad_token_id": None, **sizes}
    transformers.AutoConfig.for_model(family, **given).save_pretrained(tmp_path)
    config_from_hf = importlib.import_module(hf.FAMILIES[family]).config_from_hf
    assert config_from_hf({"model_type": family, **given}) == config_from_hf(hf.read_config(tmp_path))


# As models were published, in the fields of earlier versions of transformers (sizes shortened).
_OLD = {"hidden_size": 384, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
_OLD |= {"vocab_size": 128, "num_hidden_layers": 13, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}
_FACTORS = {"short_factor": [1.0 + i / 100 for i in range(36)], "long_factor": [1.5 + i for i in range(36)]}
PUBLISHED_FIELDS = {
    "gpt2-medium": {"model_type": "gpt2", "n_ctx": 96, "n_positions": 96, "n_embd": 24, "n_layer": 2, "n_head": 4}
    | {"vocab_size": 128, "n_special": 0, "predict_special_tokens": True, "output_past": True, "embd_pdrop": 0.1},
    "gemma-3-1b": {**_OLD, "model_type": "gemma3_text", "rope_local_base_freq": 20000, "rope_theta": 1000000}
    | {"sliding_window": 512, "sliding_window_pattern": 4, "rope_scaling": None, "cache_implementation": "hybrid"},
    "gemma-3-4b": {**_OLD, "model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "gemma-2-2b": {**_OLD, "model_type": "gemma2", "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
    "phi-4-mini": {
        **_OLD,
        "model_type": "phi3",
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4096,
    }
    | {"rope_scaling": {"type": "longrope", **_FACTORS}, "full_attn_mod": 1, "interpolate_factor": 1, "pad_token_id": 0}
    | {"lm_head_bias": False, "mlp_bias": False, "attention_bias": False, "sliding_window": 262144},
    "qwen2.5-7b-yarn": {**_OLD, "model_type": "qwen2", "use_mrope": False, "use_sliding_window": False}
    | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    "llama-3.1-8b": {**_OLD, "model_type": "llama", "rope_theta": 500000.0, "pretraining_tp": 1}
    | {"rope_scaling": {k: v for k, v in families.LLAMA3["rope_parameters"].items() if k != "rope_theta"}},
    "llama-2-dynamic": {**_OLD, "model_type": "llama", "rope_scaling": {"factor": 4.0, "type": "dynamic"}},
    "mistral-7b-v0.3": {**_OLD, "model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0},
}


@pytest.mark.parametrize("model", PUBLISHED_FIELDS)
def test_fields_of_earlier_versions_mean_what_transformers_takes(model, tmp_path):
    """They are read as transformers rewrites them for its present version."""
    given = PUBLISHED_FIELDS[model]
    transformers.AutoConfig.for_model(**copy.deepcopy(given)).save_pretrained(tmp_path)
    config_from_hf = importlib.import_module(hf.FAMILIES[given["model_type"]]).config_from_hf
    assert config_from_hf(given) == config_from_hf(hf.read_config(tmp_path))


@pytest.mark.parametrize("head", [10, 44, 47, 49, 67, 80, 96, 128, 256])
def test_every_number_of_turned_features_can_be_written(head):
    for dim in range(2, head, 2):
        config = DecoderConfig(vocab=8, embed=8, layers=1, heads=1, head=head, mlp=8, family="phi3", rope_dim=dim)
        assert phi.config_from_hf(phi.config_to_hf(config)).rope_dim == dim


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "olmo2"])
def test_packed_documents_equal_documents_apart(name):
    model, params = families.ours(name)
    ctx = Ctx(sh=families.sharding(DOUBLE))
    tokens = families.batch_of(model.config.vocab)["tokens"][:1]
    segments = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    packed = model.logits(params, tokens, ctx, segments=segments, positions=positions)
    apart = torch.cat([model.logits(params, t, ctx) for t in (tokens[:, :5], tokens[:, 5:])], 1)
    assert (packed - apart).abs().max() < 1e-12 * apart.abs().max()


def test_more_tokens_than_learned_positions_are_refused():
    model, params = families.ours("gpt2")
    with pytest.raises(UserError, match="41 tokens are more than the 40 learned positions"):
        model.logits(params, torch.zeros(1, 41, dtype=torch.int64))


def test_a_cap_that_transformers_ignores_is_refused():
    """The config of its Gemma 3 has a soft-cap of attention that its attention does not read."""
    config = families.ours("gemma3")[0].config
    fields = gemma.config_to_hf(config)
    with pytest.raises(UserError, match="attn_logit_softcapping=2.0 is not supported for gemma3_text"):
        gemma.config_from_hf({**fields, "attn_logit_softcapping": 2.0})
    with pytest.raises(UserError, match="attn_logit_softcapping=2.0"):
        hf.fields_of(Decoder(dataclasses.replace(config, attention_softcap=2.0)))


def test_the_table_has_a_line_for_each_family():
    head, rule, line = families.table(("olmo2",)).splitlines()
    assert line.startswith("| olmo2 ") and " 0 of 48 " in line
    assert head.count("|") == rule.count("|") == line.count("|") and len(head) == len(line)


# --------------------------------------------------------------------------------------------------------- presets

# As the models' authors or transformers' own pages count them.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "phi3-mini": 3_821_079_552,
    "phi3-medium": 13_960_238_080,
    "phi4": 14_659_507_200,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(preset):
    assert count(Decoder(PRESETS[preset]).spec()) == PUBLISHED[preset]
