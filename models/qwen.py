"""Qwen 2, 2.5 (Qwen Team 2024) and 3 (2025): presets and Hugging Face's names.

Qwen 2 has biases on queries, keys and values; Qwen 3 has none, but a norm of each query and key head.
"""

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
    windows_from_hf,
    windows_to_hf,
)
from fmegatron.models.hf_names import HEAD_NORMS, HFTensor, llama_names


def _qwen2(embed: int, layers: int, heads: int, kv_heads: int, mlp: int, **more: Any) -> DecoderConfig:
    given = {"family": "qwen2", "vocab": 152064, "qkv_bias": True, "rope_base": 1e6, "norm_eps": 1e-6, "max_seq": 32768}
    return DecoderConfig(embed=embed, layers=layers, heads=heads, kv_heads=kv_heads, mlp=mlp, **{**given, **more})


def _qwen3(embed: int, layers: int, heads: int, mlp: int, **more: Any) -> DecoderConfig:
    given = {"family": "qwen3", "vocab": 151936, "kv_heads": 8, "head": 128, "qk_norm": "head"}
    rest = {"rope_base": 1e6, "norm_eps": 1e-6, "max_seq": 40960}
    return DecoderConfig(embed=embed, layers=layers, heads=heads, mlp=mlp, **{**given, **rest, **more})


QWEN: dict[str, DecoderConfig] = {
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, vocab=151936, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, vocab=151936, tied=True),
    "qwen2.5-3b": _qwen2(2048, 36, 16, 2, 11008, vocab=151936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18944),
    "qwen2.5-14b": _qwen2(5120, 48, 40, 8, 13824),
    "qwen2.5-32b": _qwen2(5120, 64, 40, 8, 27648),
    "qwen2.5-72b": _qwen2(8192, 80, 64, 8, 29568),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600),
}
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# what transformers takes for fields that a config.json leaves out
DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32768}
WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def hf_map(config: DecoderConfig, spec: Any) -> dict[str, HFTensor]:
    """{our dotted name: the Hugging Face tensor and how it lays out our dims}."""
    return llama_names(config, spec, **HEAD_NORMS)


def config_from_hf(hf: Mapping[str, Any], *, ignore: tuple[str, ...] = ()) -> DecoderConfig:
    """The model in a config.json. Raises UserError, by name, for a field that would be ignored."""
    third = hf["model_type"] == "qwen3"
    used = (*SIZES, *WINDOWS, "hidden_act", *(("attention_bias",) if third else ()))
    check_fields(hf, used=used, only={"use_mrope": (False,)}, ignore=ignore)
    hf = {**DEFAULTS, **hf}
    first = hf["max_window_layers"]
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(hf["num_hidden_layers"])]
    windows = windows_from_hf(hf, default) if hf.get("use_sliding_window") else {}
    biases = bool(hf.get("attention_bias"))
    head = {} if hf.get("head_dim") or not third else {"head": 128}  # what transformers takes where there is none
    return DecoderConfig(
        **{**sizes_from_hf(hf), **head},
        **rope_from_hf(hf),
        **windows,
        activation=gated_activation(hf, "hidden_act"),
        qk_norm="head" if third else None,
        qkv_bias=biases if third else True,
        out_bias=biases,
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a config.json that transformers loads as the same model."""
    fields = {
        **sizes_to_hf(config, ARCHITECTURES[config.family]),
        "hidden_act": activation_to_hf(config),
        "use_sliding_window": config.window is not None,
        **windows_to_hf(config),
    }
    return {**fields, "attention_bias": config.qkv_bias} if config.family == "qwen3" else fields
