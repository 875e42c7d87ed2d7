"""Gemma 2 (Gemma Team 2024) and 3 (2025, the text model): presets and Hugging Face's names.

Norms on both sides of each part, scaled by 1 + weight; an embedding scaled by sqrt(embed); windowed layers between full
ones. Gemma 2 caps attention's and the final logits, Gemma 3 has norms of queries and keys instead, and another rotary
base in its windowed layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fmegatron.errors import UserError
from fmegatron.models.config import DecoderConfig
from fmegatron.models.hf_fields import (
    SIZES,
    activation_to_hf,
    check_fields,
    gated_activation,
    rope_from_hf,
    scaling_from_hf,
    scaling_to_hf,
    sizes_from_hf,
    sizes_to_hf,
    windows_from_hf,
    windows_to_hf,
)
from fmegatron.models.hf_names import HEAD_NORMS, HFTensor, llama_names
from fmegatron.primitives import LinearScaling

COMMON: dict[str, Any] = {
    "activation": "geglu_tanh",
    "norm_eps": 1e-6,
    "norm_place": "both",
    "norm_zero_centred": True,
    "norm_wide_weight": True,
    "tied": True,
}


def _gemma2(embed: int, layers: int, heads: int, kv_heads: int, mlp: int, head: int, scalar: float) -> DecoderConfig:
    return DecoderConfig(
        family="gemma2",
        vocab=256000,
        embed=embed,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head=head,
        mlp=mlp,
        embed_scale=math.sqrt(embed),
        attention_scale=scalar**-0.5,
        attention_softcap=50.0,
        logit_softcap=30.0,
        window=4096,
        pattern=("window", "full"),
        max_seq=8192,
        **COMMON,
    )


def _gemma3(embed: int, layers: int, heads: int, kv_heads: int, mlp: int, **more: Any) -> DecoderConfig:
    given = {"vocab": 262208, "head": 256, "window": 1024, "max_seq": 131072, "rope_scaling": LinearScaling(8.0)}
    scalar = more.pop("scalar", 256)
    return DecoderConfig(
        family="gemma3_text",
        embed=embed,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        mlp=mlp,
        embed_scale=math.sqrt(embed),
        attention_scale=scalar**-0.5,
        qk_norm="head",
        pattern=("window",) * 5 + ("full",),
        rope_base=1e6,
        window_rope_base=1e4,
        **{**COMMON, **given, **more},
    )


_SMALL: dict[str, Any] = {"vocab": 262144, "window": 512, "max_seq": 32768, "rope_scaling": None}
GEMMA: dict[str, DecoderConfig] = {
    "gemma2-2b": _gemma2(2304, 26, 8, 4, 9216, 256, 256),
    "gemma2-9b": _gemma2(3584, 42, 16, 8, 14336, 256, 256),
    "gemma2-27b": _gemma2(4608, 46, 32, 16, 36864, 128, 144),
    "gemma3-270m": _gemma3(640, 18, 4, 1, 2048, **_SMALL),
    "gemma3-1b": _gemma3(1152, 26, 4, 1, 6912, **_SMALL),
    "gemma3-4b": _gemma3(2560, 34, 8, 4, 10240),
    "gemma3-12b": _gemma3(3840, 48, 16, 8, 15360),
    "gemma3-27b": _gemma3(5376, 62, 32, 16, 21504, head=128, scalar=168),
}
ARCHITECTURES = {"gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
NORMS = {
    "norm1": HFTensor("input_layernorm.weight", "embed"),
    "norm1_post": HFTensor("post_attention_layernorm.weight", "embed"),
    "norm2": HFTensor("pre_feedforward_layernorm.weight", "embed"),
    "norm2_post": HFTensor("post_feedforward_layernorm.weight", "embed"),
}
# what transformers takes for fields that a config.json leaves out
DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
DEFAULTS_OF_2 = {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
DEFAULTS_OF_3 = {"max_position_embeddings": 131072}
USED = (
    *SIZES,
    "hidden_act",
    "hidden_activation",
    "attention_bias",
    "query_pre_attn_scalar",
    "sliding_window",
    "layer_types",
    "final_logit_softcapping",
)
USED_BY_2 = ("attn_logit_softcapping",)
USED_BY_3 = ("rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern")
# transformers' Gemma 3 has the field, but its attention does not read it: models with a value differ by who runs them
NEUTRAL_IN_3 = {"attn_logit_softcapping": (None,)}


def hf_map(config: DecoderConfig, spec: Any) -> dict[str, HFTensor]:
    """{our dotted name: the Hugging Face tensor and how it lays out our dims}."""
    return llama_names(config, spec, **NORMS, **HEAD_NORMS)


def config_from_hf(hf: Mapping[str, Any], *, ignore: tuple[str, ...] = ()) -> DecoderConfig:
    """The model in a config.json. Raises UserError, by name, for a field that would be ignored."""
    third = hf["model_type"] == "gemma3_text"
    used, only = (USED_BY_3, NEUTRAL_IN_3) if third else (USED_BY_2, {})
    check_fields(hf, used=(*USED, *used), only=only, ignore=ignore)
    hf = {**DEFAULTS, **(DEFAULTS_OF_3 if third else DEFAULTS_OF_2), **hf}
    every = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6 if third else 2
    default = [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(hf["num_hidden_layers"])
    ]
    biases = bool(hf.get("attention_bias"))
    # old files of Gemma 2 have hidden_act as well, which transformers does not read
    activation = gated_activation(hf, "hidden_activation")
    return DecoderConfig(
        **{**COMMON, **sizes_from_hf(hf, tied=True), "activation": activation},
        **(_two_ropes(hf) if third else rope_from_hf(hf)),
        **windows_from_hf(hf, default),
        embed_scale=math.sqrt(hf["hidden_size"]),
        attention_scale=hf["query_pre_attn_scalar"] ** -0.5,
        attention_softcap=hf.get("attn_logit_softcapping"),
        logit_softcap=hf.get("final_logit_softcapping"),
        qk_norm="head" if third else None,
        qkv_bias=biases,
        out_bias=biases,
    )


def _two_ropes(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma 3's rotary positions: those of the full layers, and the base of the windowed ones."""
    tables = hf.get("rope_parameters") or {}
    if "full_attention" not in tables:
        return {**rope_from_hf(hf, base=1e6), "window_rope_base": float(hf.get("rope_local_base_freq", 1e4))}
    full, local = dict(tables["full_attention"]), dict(tables["sliding_attention"])
    window_base = float(local.pop("rope_theta", 1e4))
    if scaling_from_hf(local, hf) is not None:
        raise UserError(
            "config.json: rope_parameters: a scaling of the sliding layers is not supported for gemma3_text"
        )
    base = float(full.pop("rope_theta", 1e6))
    return {"rope_base": base, "rope_scaling": scaling_from_hf(full, hf), "window_rope_base": window_base}


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a config.json that transformers loads as the same model."""
    assert config.attention_scale is not None
    fields = {
        **sizes_to_hf(config, ARCHITECTURES[config.family]),
        "hidden_activation": activation_to_hf(config),
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": _whole(config.attention_scale**-2),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        **windows_to_hf(config),
    }
    if config.window is None:  # transformers makes the windowed mask's function even where no layer has a window
        fields["sliding_window"] = DEFAULTS["sliding_window"]
    if config.family == "gemma3_text":
        full = {**scaling_to_hf(config.rope_scaling), "rope_theta": config.rope_base}
        local = {"rope_type": "default", "rope_theta": config.window_rope_base}
        fields["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
        fields["rope_local_base_freq"] = config.window_rope_base
    return fields


def _whole(x: float) -> float:
    """x, or the whole number that it is but for rounding."""
    return round(x) if abs(x - round(x)) < 1e-9 * abs(x) else x
