"""DeepSeek V2 (DeepSeek-AI, May 2024) and V3 (December 2024): presets and Hugging Face's names.

Both have multi-head latent attention (`fmegatron.models.mla`) and rotary positions of adjacent pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fmegatron.errors import UserError
from fmegatron.models.config import MLA, DecoderConfig
from fmegatron.models.hf_fields import (
    SIZES,
    activation_to_hf,
    check_fields,
    gated_activation,
    rope_from_hf,
    sizes_from_hf,
    sizes_to_hf,
)
from fmegatron.models.hf_names import PREFIX, HFStack, HFTensor, expert_names, llama_names
from fmegatron.models.moe import MoE
from fmegatron.parallel.routing import Routing
from fmegatron.primitives import YaRNScaling
from fmegatron.spec import params_of


def _yarn(mscale: float) -> YaRNScaling:
    return YaRNScaling(factor=40.0, original_max_position=4096, mscale=mscale, mscale_all_dim=mscale)


def _preset(
    family: str,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    *,
    q_rank: int | None,
    moe: MoE,
    mscale: float,
    **more: Any,
) -> DecoderConfig:
    latent, scaling = MLA(kv_rank=512, nope=128, rope=64, value=128, q_rank=q_rank), _yarn(mscale)
    sizes: dict[str, Any] = {"embed": embed, "layers": layers, "heads": heads, "mlp": mlp, "mla": latent, "moe": moe}
    rope = {"rope_scaling": scaling, "rope_interleaved": True, "attention_scale": scale_of_scores(latent, scaling)}
    given = {"family": family, "vocab": 102400, "norm_eps": 1e-6, "max_seq": 163840, **sizes, **rope}
    return DecoderConfig(**{**given, **more})


def scale_of_scores(mla: MLA, scaling: Any) -> float | None:
    """Of attention: stretched with YaRN's mscale_all_dim, which multiplies the scores of all features, not those of the turned
    ones alone, by the square of 0.1 mscale_all_dim ln(factor) + 1. None: 1 / sqrt(head)."""
    if not isinstance(scaling, YaRNScaling) or not scaling.mscale_all_dim or scaling.factor <= 1:
        return None
    return mla.head**-0.5 * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2


# Coefficients of the losses are those of the reports: of V2-Lite 0.001 (arXiv 2405.04434, appendix B.1), of V3 0.0001 for each
# sequence, with biases that move by 0.001 (arXiv 2412.19437, section 4.2). The config.json published with V3 says 0.001, which
# a loaded model then has.
DEEPSEEK: dict[str, DecoderConfig] = {
    "deepseek-v2-lite": _preset(
        "deepseek_v2",
        2048,
        27,
        16,
        10944,
        q_rank=None,
        mscale=0.707,
        moe=MoE(Routing(experts=64, top_k=6, switch_loss=1e-3), 1408, shared=2 * 1408, dense_layers=(0,)),
    ),
    "deepseek-v2": _preset(
        "deepseek_v2",
        5120,
        60,
        128,
        12288,
        q_rank=1536,
        mscale=0.707,
        moe=MoE(
            Routing(experts=160, top_k=6, scale=16.0, groups=8, group_top_k=3, switch_loss=1e-3),
            1536,
            shared=2 * 1536,
            dense_layers=(0,),
        ),
    ),
    "deepseek-v3": _preset(
        "deepseek_v3",
        7168,
        61,
        128,
        18432,
        vocab=129280,
        q_rank=1536,
        mscale=1.0,
        moe=MoE(
            Routing(
                experts=256,
                top_k=8,
                scores="sigmoid",
                normalised=True,
                scale=2.5,
                groups=8,
                group_top_k=4,
                group_score="top2",
                switch_loss=1e-4,
                expert_bias=True,
            ),
            2048,
            shared=2048,
            dense_layers=(0, 1, 2),
        ),
    ),
}
ARCHITECTURES = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
# what transformers takes for fields that a config.json leaves out
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": {
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
    },
}
# fields of transformers: ours of MLA, and what stands for one that is left out
MLA_FIELDS = {
    "q_lora_rank": ("q_rank", 1536),
    "kv_lora_rank": ("kv_rank", 512),
    "qk_nope_head_dim": ("nope", 128),
    "qk_rope_head_dim": ("rope", 64),
    "v_head_dim": ("value", 128),
}
# fields of experts, which mean nothing where all layers are dense
MOE_FIELDS = (
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "routed_scaling_factor",
    "norm_topk_prob",
    "n_group",
    "topk_group",
    "aux_loss_alpha",
)
# … and those that say nothing more about what is computed, at these values
MOE_NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "deepseek_v2": {"scoring_func": ("softmax",), "norm_topk_prob": (False, None)},
    "deepseek_v3": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
}
EITHER: dict[str, tuple[Any, ...]] = {
    "moe_layer_freq": (1,),
    "seq_aux": (True,),
    "ep_size": (1,),
    "output_router_logits": (False,),
}
# Prediction modules (`fmegatron.models.mtp`) come as layers behind the last one, with copies of the model's embedding and head.
PREDICTION = {
    "embed_norm": HFTensor("enorm.weight", "embed"),
    "hidden_norm": HFTensor("hnorm.weight", "embed"),
    "join": HFTensor("eh_proj.weight", "embed both"),
    "norm": HFTensor("shared_head.norm.weight", "embed"),
}
MODULES = ("num_nextn_predict_layers", "num_mtp_layers")  # the fields of their number
ATTENTION = {
    "q": HFTensor("self_attn.q_proj.weight", "(kv group head) embed"),
    "q_down": HFTensor("self_attn.q_a_proj.weight", "q_latent embed"),
    "q_down_bias": HFTensor("self_attn.q_a_proj.bias", "q_latent"),
    "q_down_norm": HFTensor("self_attn.q_a_layernorm.weight", "q_latent"),
    "q_up": HFTensor("self_attn.q_b_proj.weight", "(kv group head) q_latent"),
    "kv_down": HFTensor("self_attn.kv_a_proj_with_mqa.weight", "latent_rope embed"),
    "kv_down_bias": HFTensor("self_attn.kv_a_proj_with_mqa.bias", "latent_rope"),
    "kv_down_norm": HFTensor("self_attn.kv_a_layernorm.weight", "kv_latent"),
    "kv_up": HFTensor("self_attn.kv_b_proj.weight", "(kv nope_value) kv_latent"),
    "o": HFTensor("self_attn.o_proj.weight", "embed (kv group value)"),
}


def hf_map(config: DecoderConfig, spec: Any) -> dict[str, Any]:
    """{our dotted name: the Hugging Face tensor and how it lays out our dims}."""
    more = PREDICTION if config.mtp else {}
    return llama_names(config, spec, **ATTENTION, **_experts(config, spec), **more)


def modules_from_hf(hf: Mapping[str, Any]) -> int:
    """How many prediction modules a config.json says there are. Files may lack them: transformers does not save them."""
    return next((int(hf[n]) for n in MODULES if hf.get(n) is not None), 0)


def module_tensor(config: DecoderConfig, depth: int) -> str:
    """A tensor that the prediction module of a depth (0, 1, …) has, and nothing else."""
    return f"{PREFIX}.{config.layers + depth}.{PREDICTION['join'].name}"


def copies(config: DecoderConfig) -> dict[str, str]:
    """{tensor: our parameter that it repeats}: what files with prediction modules have twice."""
    each = {"embed_tokens.weight": "embed", "shared_head.head.weight": "embed" if config.tied else "head"}
    numbers = range(config.layers, config.layers + config.mtp)
    return {f"{PREFIX}.{i}.{name}": ours for i in numbers for name, ours in each.items()}


def _experts(config: DecoderConfig, spec: Any) -> dict[str, HFTensor | HFStack]:
    if config.moe is None:
        return {}
    found = {
        **expert_names(config, "mlp"),
        "expert_bias": HFTensor("mlp.gate.e_score_correction_bias", "route"),
    }
    width = next((p.names[0] for path, p in params_of(spec).items() if path.endswith("shared_down")), "mlp")
    for name, dims in (("gate", (width, "embed")), ("up", (width, "embed")), ("down", ("embed", width))):
        found[f"shared_{name}"] = HFTensor(f"mlp.shared_experts.{name}_proj.weight", " ".join(dims))
        found[f"shared_{name}_bias"] = HFTensor(f"mlp.shared_experts.{name}_proj.bias", dims[0])
    return found


def config_from_hf(hf: Mapping[str, Any], *, ignore: tuple[str, ...] = ()) -> DecoderConfig:
    """The model in a config.json. Raises UserError, by name, for a field that would be ignored."""
    family = hf["model_type"]
    third = family == "deepseek_v3"
    used = (
        *SIZES,
        *MLA_FIELDS,
        *MOE_FIELDS,
        "first_k_dense_replace",
        "hidden_act",
        "attention_bias",
        "qk_head_dim",
        *MODULES,
    )
    used = (*used, "rope_interleave") if third else (*used, "mlp_bias", "topk_method")
    check_fields(
        hf, used=[n for n in used if n not in MOE_NEUTRAL[family]], only=MOE_NEUTRAL[family] | EITHER, ignore=ignore
    )
    hf = {**DEFAULTS[family], **hf}
    mla = MLA(**{ours: hf.get(theirs, default) for theirs, (ours, default) in MLA_FIELDS.items()})
    rope = rope_from_hf(hf)
    biases = bool(hf.get("attention_bias"))
    return DecoderConfig(
        **{**sizes_from_hf(hf), "head": None},
        **rope,
        mla=mla,
        moe=_moe(hf),
        attention_scale=scale_of_scores(mla, rope["rope_scaling"]),
        rope_interleaved=bool(hf.get("rope_interleave", True)),
        activation=gated_activation(hf, "hidden_act"),
        qkv_bias=biases,
        out_bias=biases,
        mlp_bias=bool(hf.get("mlp_bias")),
        mtp=modules_from_hf(hf),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a config.json that transformers loads as the same model."""
    mla = config.mla
    if mla is None:
        raise UserError(f"mla=None has no form in {config.family}, whose attention is latent: use another family")
    fields = {
        **sizes_to_hf(config, ARCHITECTURES[config.family]),
        "head_dim": mla.rope,
        **{theirs: getattr(mla, ours) for theirs, (ours, _) in MLA_FIELDS.items()},
        "qk_head_dim": mla.head,
        "hidden_act": activation_to_hf(config),
        "attention_bias": config.qkv_bias,
        **_moe_to_hf(config),
    }
    if config.family == "deepseek_v3":
        return {**fields, "rope_interleave": config.rope_interleaved, MODULES[0]: config.mtp}
    return {**fields, "mlp_bias": config.mlp_bias, **({MODULES[0]: config.mtp} if config.mtp else {})}


def _moe(hf: Mapping[str, Any]) -> MoE | None:
    """The experts of a config.json; None where all layers are dense."""
    dense = min(hf["first_k_dense_replace"], hf["num_hidden_layers"])
    if dense == hf["num_hidden_layers"]:
        return None
    third, method = hf["model_type"] == "deepseek_v3", hf.get("topk_method") or "greedy"
    if not third and method not in ("greedy", "group_limited_greedy"):
        raise UserError(
            f"config.json: topk_method={method!r} is not supported: only greedy and group_limited_greedy are"
        )
    grouped = third or method == "group_limited_greedy"
    groups = (hf.get("n_group") or 1) if grouped else 1
    routing = Routing(
        experts=hf["n_routed_experts"],
        top_k=hf["num_experts_per_tok"],
        scores="sigmoid" if third else "softmax",
        normalised=third and bool(hf["norm_topk_prob"]),
        scale=float(hf["routed_scaling_factor"]),
        groups=groups,
        group_top_k=(hf.get("topk_group") or 1) if groups > 1 else 1,
        group_score="top2" if third else "max",
        switch_loss=float(hf.get("aux_loss_alpha") or 0.0),
        expert_bias=third,
    )
    width = hf["moe_intermediate_size"]
    return MoE(routing, width, shared=(hf["n_shared_experts"] or 0) * width, dense_layers=tuple(range(dense)))


def _moe_to_hf(config: DecoderConfig) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        return {"first_k_dense_replace": config.layers}
    routing = moe.routing
    if not moe.shared or moe.shared % moe.mlp:
        raise UserError(
            f"moe: shared={moe.shared} cannot be written: {config.family} has shared experts as wide as the others, mlp={moe.mlp}"
        )
    fields = {
        "first_k_dense_replace": len(moe.dense_layers),
        "n_routed_experts": routing.experts,
        "n_shared_experts": moe.shared // moe.mlp,
        "num_experts_per_tok": routing.top_k,
        "moe_intermediate_size": moe.mlp,
        "routed_scaling_factor": routing.scale,
        "norm_topk_prob": routing.normalised,
        "n_group": routing.groups,
        "topk_group": routing.group_top_k,
        "aux_loss_alpha": routing.switch_loss,
        "moe_layer_freq": 1,
    }
    if config.family == "deepseek_v3":
        return {**fields, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return {
        **fields,
        "scoring_func": "softmax",
        "topk_method": "greedy" if routing.groups == 1 else "group_limited_greedy",
    }
