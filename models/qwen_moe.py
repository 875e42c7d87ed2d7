"""Qwen 1.5 and 2 with experts (Qwen Team 2024) and Qwen 3 with experts (2025): presets and Hugging Face's names.

The former have an expert that every token has, weighed by a sigmoid of the token, and biases on queries, keys and values; the
latter norms of each query and key head. Experts are weighed by a softmax over all of them.

A config.json's auxiliary loss is that of a loaded model where `output_router_logits` turns it on, which published ones do not;
it is a setting of training, and not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fmegatron.models.config import DecoderConfig
from fmegatron.models.hf_fields import (
    ROUTER_TRAINING,
    SIZES,
    activation_to_hf,
    check_fields,
    experts_of,
    gated_activation,
    rope_from_hf,
    sizes_from_hf,
    sizes_to_hf,
    windows_from_hf,
    windows_to_hf,
)
from fmegatron.models.hf_names import HEAD_NORMS, HFStack, HFTensor, expert_names, llama_names
from fmegatron.models.moe import MoE, with_published_loss
from fmegatron.parallel.routing import Routing


def _qwen3(embed: int, layers: int, heads: int, mlp: int, width: int) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3_moe",
        vocab=151936,
        embed=embed,
        layers=layers,
        heads=heads,
        kv_heads=4,
        head=128,
        mlp=mlp,
        qk_norm="head",
        rope_base=1e6,
        norm_eps=1e-6,
        max_seq=40960,
        moe=MoE(Routing(experts=128, top_k=8, normalised=True), width),
    )


QWEN_MOE: dict[str, DecoderConfig] = {
    "qwen1.5-moe-a2.7b": DecoderConfig(
        family="qwen2_moe",
        vocab=151936,
        embed=2048,
        layers=24,
        heads=16,
        mlp=5632,
        qkv_bias=True,
        rope_base=1e6,
        norm_eps=1e-6,
        max_seq=8192,
        moe=MoE(Routing(experts=60, top_k=4), 1408, shared=5632, shared_gate=True),
    ),
    "qwen3-30b-a3b": _qwen3(2048, 48, 32, 6144, 768),
    "qwen3-235b-a22b": _qwen3(4096, 94, 64, 12288, 1536),
}
ARCHITECTURES = {"qwen2_moe": "Qwen2MoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
# what transformers takes for fields that a config.json leaves out
EITHER: dict[str, Any] = {"sliding_window": 4096, "max_position_embeddings": 32768, "decoder_sparse_step": 1}
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        **EITHER,
        "max_window_layers": 28,
        "qkv_bias": True,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    },
    "qwen3_moe": {**EITHER, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
}
EXPERTS = (
    *ROUTER_TRAINING,
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)
OWN = {
    "qwen2_moe": ("layer_types", "qkv_bias", "shared_expert_intermediate_size"),
    "qwen3_moe": ("attention_bias", "num_local_experts"),
}
SHARED = {
    "shared_gate": HFTensor("mlp.shared_expert.gate_proj.weight", "shared_mlp embed"),
    "shared_up": HFTensor("mlp.shared_expert.up_proj.weight", "shared_mlp embed"),
    "shared_down": HFTensor("mlp.shared_expert.down_proj.weight", "embed shared_mlp"),
    "shared_weight": HFTensor("mlp.shared_expert_gate.weight", "() embed"),
}


def hf_map(config: DecoderConfig, spec: Any) -> dict[str, Any]:
    """{our dotted name: the Hugging Face tensors and how they lay out our dims}."""
    more: dict[str, HFTensor | HFStack] = {**HEAD_NORMS, **SHARED, **expert_names(config, "mlp")}
    return llama_names(config, spec, **more)


def config_from_hf(hf: Mapping[str, Any], *, ignore: tuple[str, ...] = ()) -> DecoderConfig:
    """The model in a config.json. Raises UserError, by name, for a field that would be ignored."""
    third = hf["model_type"] == "qwen3_moe"
    own = OWN[hf["model_type"]]
    used = (*SIZES, *EXPERTS, *own, "hidden_act", "use_sliding_window", "sliding_window", "max_window_layers")
    check_fields(hf, used=used, only={"use_mrope": (False,)}, ignore=ignore)
    if third and hf.get("num_local_experts") is not None:  # as version 5 of transformers calls it
        hf = {"num_experts": hf["num_local_experts"], **hf}
    hf = {**DEFAULTS[hf["model_type"]], **hf}
    layers = range(hf["num_hidden_layers"])
    windows = {}
    if hf.get("use_sliding_window"):  # in the third all layers, in the second every other of the first ones
        here = [third or (i % 2 == 0 and i < hf["max_window_layers"]) for i in layers]
        windows = windows_from_hf(hf, ["sliding_attention" if w else "full_attention" for w in here])
    biases = bool(hf["attention_bias"] if third and "attention_bias" in hf else hf.get("qkv_bias"))
    shared = 0 if third else hf["shared_expert_intermediate_size"]
    dense, step = hf.get("mlp_only_layers") or (), hf["decoder_sparse_step"]
    moe = MoE(
        Routing(
            experts=hf["num_experts"],
            top_k=hf["num_experts_per_tok"],
            normalised=bool(hf.get("norm_topk_prob")),
        ),
        hf["moe_intermediate_size"],
        shared=shared,
        shared_gate=shared > 0,
        dense_layers=tuple(i for i in layers if i in dense or (i + 1) % step),
    )
    return DecoderConfig(
        **sizes_from_hf(hf),
        **rope_from_hf(hf),
        **windows,
        activation=gated_activation(hf, "hidden_act"),
        qk_norm="head" if third else None,
        qkv_bias=biases,
        out_bias=third and biases,
        moe=with_published_loss(moe, hf, default=0.001),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a config.json that transformers loads as the same model."""
    moe = experts_of(config)
    fields = {
        **sizes_to_hf(config, ARCHITECTURES[config.family]),
        "hidden_act": activation_to_hf(config),
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "num_experts": moe.routing.experts,
        "num_experts_per_tok": moe.routing.top_k,
        "moe_intermediate_size": moe.mlp,
        "norm_topk_prob": moe.routing.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(moe.dense_layers),
    }
    if config.family == "qwen3_moe":
        return {**fields, "attention_bias": config.qkv_bias}
    return {
        **fields,
        **windows_to_hf(config),
        "qkv_bias": config.qkv_bias,
        "shared_expert_intermediate_size": moe.shared,
    }
