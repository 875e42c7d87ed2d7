"""Mistral (Jiang et al. 2023): Llama with a sliding window in every layer. Presets and Hugging Face's names."""

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

_7B: dict[str, Any] = dict(family="mistral", embed=4096, layers=32, heads=32, kv_heads=8, mlp=14336, max_seq=32768)
MISTRAL: dict[str, DecoderConfig] = {
    "mistral-7b-v0.1": DecoderConfig(vocab=32000, window=4096, **_7B),
    "mistral-7b-v0.3": DecoderConfig(vocab=32768, rope_base=1e6, **_7B),
    "mistral-nemo-12b": DecoderConfig(
        family="mistral",
        vocab=131072,
        embed=5120,
        layers=40,
        heads=32,
        kv_heads=8,
        head=128,
        mlp=14336,
        rope_base=1e6,
        max_seq=131072,
    ),
}
# what transformers takes for fields that a config.json leaves out
DEFAULTS = {"sliding_window": 4096, "max_position_embeddings": 131072}


def hf_map(config: DecoderConfig, spec: Any) -> dict[str, HFTensor]:
    """{our dotted name: the Hugging Face tensor and how it lays out our dims}."""
    return llama_names(config, spec)


def config_from_hf(hf: Mapping[str, Any], *, ignore: tuple[str, ...] = ()) -> DecoderConfig:
    """The model in a config.json. Raises UserError, by name, for a field that would be ignored."""
    check_fields(hf, used=(*SIZES, "hidden_act", "sliding_window"), ignore=ignore)
    hf = {**DEFAULTS, **hf}
    return DecoderConfig(
        **sizes_from_hf(hf),
        **rope_from_hf(hf),
        activation=gated_activation(hf, "hidden_act"),
        window=hf["sliding_window"],
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a config.json that transformers loads as the same model."""
    return {
        **sizes_to_hf(config, "MistralForCausalLM"),
        "hidden_act": activation_to_hf(config),
        "sliding_window": config.window,
    }
