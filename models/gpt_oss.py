"""GPT-OSS (OpenAI, August 2025): presets and Hugging Face's names.

Every other layer sees a window; each head has a sink, a learned logit that takes part in its softmax; experts have biases and a
clamped activation, and their weights are a softmax of the chosen logits. The matrices of the published files are in MXFP4 (see
`fmegatron.models.mxfp4`), which is read, not written.

A config.json's auxiliary loss is that of a loaded model where `output_router_logits` turns it on, which published ones do not;
it is a setting of training, and not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fmegatron.errors import UserError
from fmegatron.models.config import DecoderConfig
from fmegatron.models.hf_fields import (
    ROUTER_TRAINING,
    SIZES,
    check_fields,
    experts_of,
    rope_from_hf,
    sizes_from_hf,
    sizes_to_hf,
    windows_from_hf,
    windows_to_hf,
)
from fmegatron.models.hf_names import HFTensor, llama_names
from fmegatron.models.moe import MoE, with_published_loss
from fmegatron.parallel.routing import Routing
from fmegatron.primitives import YaRNScaling

FORM: dict[str, Any] = {"sinks": True, "activation": "clamped_swiglu"}


def _moe(experts: int, top_k: int, width: int) -> MoE:
    return MoE(Routing(experts=experts, top_k=top_k, before=False), width, bias=True, router_bias=True)


def _preset(layers: int, experts: int) -> DecoderConfig:
    return DecoderConfig(
        family="gpt_oss",
        vocab=201088,
        embed=2880,
        layers=layers,
        heads=64,
        kv_heads=8,
        head=64,
        mlp=2880,
        window=128,
        pattern=("window", "full"),
        rope_base=150000.0,
        rope_scaling=YaRNScaling(factor=32.0, original_max_position=4096, truncate=False),
        qkv_bias=True,
        out_bias=True,
        max_seq=131072,
        moe=_moe(experts, 4, 2880),
        **FORM,
    )


GPT_OSS: dict[str, DecoderConfig] = {"gpt-oss-20b": _preset(24, 32), "gpt-oss-120b": _preset(36, 128)}
# what transformers takes for fields that a config.json leaves out
DEFAULTS: dict[str, Any] = {
    "head_dim": 64,
    "sliding_window": 128,
    "attention_bias": True,
    "max_position_embeddings": 131072,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
DEFAULT_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
LEAVES = {
    "sinks": HFTensor("self_attn.sinks", "(kv group)"),
    "router": HFTensor("mlp.router.weight", "route embed"),
    "router_bias": HFTensor("mlp.router.bias", "route"),
    "experts_gate_up": HFTensor("mlp.experts.gate_up_proj", "expert embed (emlp gated)"),
    "experts_gate_up_bias": HFTensor("mlp.experts.gate_up_proj_bias", "expert (emlp gated)"),
    "experts_down": HFTensor("mlp.experts.down_proj", "expert emlp embed"),
    "experts_down_bias": HFTensor("mlp.experts.down_proj_bias", "expert embed"),
}


def hf_map(config: DecoderConfig, spec: Any) -> dict[str, Any]:
    """{our dotted name: the Hugging Face tensor and how it lays out our dims}."""
    return llama_names(config, spec, **LEAVES)


def config_from_hf(hf: Mapping[str, Any], *, ignore: tuple[str, ...] = ()) -> DecoderConfig:
    """The model in a config.json. Raises UserError, by name, for a field that would be ignored."""
    own = ("sliding_window", "layer_types", "attention_bias", "num_local_experts", "num_experts_per_tok")
    twice = ("experts_per_token", "initial_context_length")  # published beside fields that say the same
    only = {"hidden_act": ("silu",), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)}
    check_fields(hf, used=(*SIZES, *ROUTER_TRAINING, *own, *twice), only=only, ignore=ignore)
    hf = {**DEFAULTS, **hf}
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf["rope_parameters"] = DEFAULT_ROPE
    default = [("sliding_attention", "full_attention")[i % 2] for i in range(hf["num_hidden_layers"])]
    biases = bool(hf["attention_bias"])
    moe = _moe(hf["num_local_experts"], hf["num_experts_per_tok"], hf["intermediate_size"])
    return DecoderConfig(
        **sizes_from_hf(hf, eps=1e-5),
        **rope_from_hf(hf, base=150000.0),
        **windows_from_hf(hf, default),
        **FORM,
        qkv_bias=biases,
        out_bias=biases,
        moe=with_published_loss(moe, hf, default=0.9),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a config.json that transformers loads as the same model."""
    moe = experts_of(config)
    if config.activation != "clamped_swiglu":
        raise UserError(f'activation={config.activation!r} has no name in gpt_oss: only "clamped_swiglu" has')
    return {
        **sizes_to_hf(config, "GptOssForCausalLM"),
        "intermediate_size": moe.mlp,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "attention_bias": config.qkv_bias,
        **windows_to_hf(config),
        "num_local_experts": moe.routing.experts,
        "num_experts_per_tok": moe.routing.top_k,
    }
