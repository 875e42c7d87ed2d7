"""Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024): presets and Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from fmegatron.primitives import Llama3Scaling

LLAMA: dict[str, DecoderConfig] = {
    "tiny": DecoderConfig(vocab=4096, embed=192, layers=4, heads=6, kv_heads=2, mlp=512, tied=True, max_seq=1024),
    "llama2-7b": DecoderConfig(vocab=32000, embed=4096, layers=32, heads=32, mlp=11008),
    "llama2-13b": DecoderConfig(vocab=32000, embed=5120, layers=40, heads=40, mlp=13824),
    "llama2-70b": DecoderConfig(vocab=32000, embed=8192, layers=80, heads=64, kv_heads=8, mlp=28672),
    "llama3-8b": DecoderConfig(
        vocab=128256, embed=4096, layers=32, heads=32, kv_heads=8, mlp=14336, rope_base=500000.0, max_seq=8192
    ),
    "llama3-70b": DecoderConfig(
        vocab=128256, embed=8192, layers=80, heads=64, kv_heads=8, mlp=28672, rope_base=500000.0, max_seq=8192
    ),
}
_LONG: dict[str, Any] = {"rope_base": 500000.0, "rope_scaling": Llama3Scaling(), "max_seq": 131072}
_SMALL: dict[str, Any] = {**_LONG, "rope_scaling": Llama3Scaling(factor=32.0), "tied": True}
LLAMA |= {
    "llama3.1-8b": replace(LLAMA["llama3-8b"], **_LONG),
    "llama3.1-70b": replace(LLAMA["llama3-70b"], **_LONG),
    "llama3.1-405b": DecoderConfig(vocab=128256, embed=16384, layers=126, heads=128, kv_heads=8, mlp=53248, **_LONG),
    "llama3.2-1b": DecoderConfig(vocab=128256, embed=2048, layers=16, heads=32, kv_heads=8, mlp=8192, **_SMALL),
    "llama3.2-3b": DecoderConfig(vocab=128256, embed=3072, layers=28, heads=24, kv_heads=8, mlp=8192, **_SMALL),
}


def hf_map(config: DecoderConfig, spec: Any) -> dict[str, HFTensor]:
    """{our dotted name: the Hugging Face tensor and how it lays out our dims}."""
    return llama_names(config, spec)


def config_from_hf(hf: Mapping[str, Any], *, ignore: tuple[str, ...] = ()) -> DecoderConfig:
    """The model in a config.json. Raises UserError, by name, for a field that would be ignored."""
    check_fields(hf, used=(*SIZES, "hidden_act", "attention_bias", "mlp_bias"), ignore=ignore)
    biases = bool(hf.get("attention_bias"))
    return DecoderConfig(
        **sizes_from_hf(hf),
        **rope_from_hf(hf),
        activation=gated_activation(hf, "hidden_act"),
        qkv_bias=biases,
        out_bias=biases,
        mlp_bias=bool(hf.get("mlp_bias")),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a config.json that transformers loads as the same model."""
    return {
        **sizes_to_hf(config, "LlamaForCausalLM"),
        "hidden_act": activation_to_hf(config),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }
