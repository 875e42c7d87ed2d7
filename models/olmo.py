"""OLMo 2 (OLMo Team 2025): norms behind each part, and over all query and all key heads together. Presets and Hugging
Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fmegatron.models.config import DecoderConfig
from fmegatron.models.hf_fields import (
    SIZES,
    activation_to_hf,
    check_fields,
    gated_activation,
    rope_from_hf,
    sizes_from_hf,
    sizes_to_hf,
)
from fmegatron.models.hf_names import HFTensor, llama_names

FORM: dict[str, Any] = {"norm_place": "post", "norm_wide_weight": True, "qk_norm": "all"}
_SHARED: dict[str, Any] = {
    **FORM,
    "family": "olmo2",
    "vocab": 100352,
    "rope_base": 500000.0,
    "norm_eps": 1e-6,
    "max_seq": 4096,
}
OLMO: dict[str, DecoderConfig] = {
    "olmo2-1b": DecoderConfig(embed=2048, layers=16, heads=16, mlp=8192, **_SHARED),
    "olmo2-7b": DecoderConfig(embed=4096, layers=32, heads=32, mlp=11008, **_SHARED),
    "olmo2-13b": DecoderConfig(embed=5120, layers=40, heads=40, mlp=13824, **_SHARED),
    "olmo2-32b": DecoderConfig(embed=5120, layers=64, heads=40, kv_heads=8, mlp=27648, **_SHARED),
}
NORMS = {
    "norm1_post": HFTensor("post_attention_layernorm.weight", "embed"),
    "norm2_post": HFTensor("post_feedforward_layernorm.weight", "embed"),
    "q_norm": HFTensor("self_attn.q_norm.weight", "(kv group head)"),
    "k_norm": HFTensor("self_attn.k_norm.weight", "(kv head)"),
}


def hf_map(config: DecoderConfig, spec: Any) -> dict[str, HFTensor]:
    """{our dotted name: the Hugging Face tensor and how it lays out our dims}."""
    return llama_names(config, spec, **NORMS)


def config_from_hf(hf: Mapping[str, Any], *, ignore: tuple[str, ...] = ()) -> DecoderConfig:
    """The model in a config.json. Raises UserError, by name, for a field that would be ignored."""
    check_fields(hf, used=(*SIZES, "hidden_act", "attention_bias"), ignore=ignore)
    biases = bool(hf.get("attention_bias"))
    return DecoderConfig(
        **sizes_from_hf(hf, eps=1e-5),
        **rope_from_hf(hf),
        **FORM,
        activation=gated_activation(hf, "hidden_act"),
        qkv_bias=biases,
        out_bias=biases,
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a config.json that transformers loads as the same model."""
    return {
        **sizes_to_hf(config, "Olmo2ForCausalLM"),
        "hidden_act": activation_to_hf(config),
        "attention_bias": config.qkv_bias,
    }
