"""Phi-3 (Abdin et al. 2024) and Phi-4: presets and Hugging Face's names. Queries, keys and values are one matrix in the
file, and so are gate and up."""

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
from fmegatron.models.hf_names import HFTensor, fused, llama_names

PHI: dict[str, DecoderConfig] = {
    "phi3-mini": DecoderConfig(
        family="phi3", vocab=32064, embed=3072, layers=32, heads=32, mlp=8192, window=2047, max_seq=4096
    ),
    "phi3-medium": DecoderConfig(
        family="phi3", vocab=32064, embed=5120, layers=40, heads=40, kv_heads=10, mlp=17920, window=2047, max_seq=4096
    ),
    "phi4": DecoderConfig(
        family="phi3",
        vocab=100352,
        embed=5120,
        layers=40,
        heads=40,
        kv_heads=10,
        mlp=17920,
        rope_base=250000.0,
        max_seq=16384,
    ),
}


def hf_map(config: DecoderConfig, spec: Any) -> dict[str, HFTensor]:
    """{our dotted name: the Hugging Face tensor and how it lays out our dims}."""
    q, kv = config.heads * config.head, config.kv_heads * config.head
    attention = {"q": ("(kv group head) embed", q), "k": ("(kv head) embed", kv), "v": ("(kv head) embed", kv)}
    gated = {"gate": ("mlp embed", config.mlp), "up": ("mlp embed", config.mlp)}
    parts = {**fused("self_attn.qkv_proj.weight", attention), **fused("mlp.gate_up_proj.weight", gated)}
    return llama_names(config, spec, **parts)


def config_from_hf(hf: Mapping[str, Any], *, ignore: tuple[str, ...] = ()) -> DecoderConfig:
    """The model in a config.json. Raises UserError, by name, for a field that would be ignored."""
    used = (*SIZES, "hidden_act", "sliding_window", "original_max_position_embeddings")
    neutral: dict[str, tuple[Any, ...]] = {"attention_bias": (False,), "mlp_bias": (False,)}
    neutral |= {"lm_head_bias": (False,), "full_attn_mod": (1,), "interpolate_factor": (1,)}  # Phi-4-mini's
    check_fields(hf, used=used, only=neutral, ignore=ignore)
    hf = {"max_position_embeddings": 4096, **hf}  # what transformers takes where it is left out
    return DecoderConfig(
        **sizes_from_hf(hf, eps=1e-5),
        **rope_from_hf(hf, partial=True),
        activation=gated_activation(hf, "hidden_act"),
        window=hf.get("sliding_window"),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a config.json that transformers loads as the same model."""
    scaling = config.rope_scaling
    original = getattr(scaling, "original_max_position", config.max_seq)
    return {
        **sizes_to_hf(config, "Phi3ForCausalLM"),
        "hidden_act": activation_to_hf(config),
        "sliding_window": config.window,
        "original_max_position_embeddings": original,
    }
