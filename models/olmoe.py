"""OLMoE (Muennighoff et al. 2024): norms of all query and all key heads together, and experts weighed by a softmax over all of
them. Presets and Hugging Face's names.

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
)
from fmegatron.models.hf_names import HFTensor, expert_names, llama_names
from fmegatron.models.moe import MoE, with_published_loss
from fmegatron.parallel.routing import Routing

OLMOE: dict[str, DecoderConfig] = {
    "olmoe-1b-7b": DecoderConfig(
        family="olmoe",
        vocab=50304,
        embed=2048,
        layers=16,
        heads=16,
        mlp=1024,
        qk_norm="all",
        moe=MoE(Routing(experts=64, top_k=8), 1024),
    )
}
# what transformers takes for fields that a config.json leaves out
DEFAULTS = {"max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8}
NORMS = {
    "q_norm": HFTensor("self_attn.q_norm.weight", "(kv group head)"),
    "k_norm": HFTensor("self_attn.k_norm.weight", "(kv head)"),
}


def hf_map(config: DecoderConfig, spec: Any) -> dict[str, Any]:
    """{our dotted name: the Hugging Face tensors and how they lay out our dims}."""
    return llama_names(config, spec, **NORMS, **expert_names(config, "mlp"))


def config_from_hf(hf: Mapping[str, Any], *, ignore: tuple[str, ...] = ()) -> DecoderConfig:
    """The model in a config.json. Raises UserError, by name, for a field that would be ignored."""
    own = ("hidden_act", "attention_bias", "num_experts", "num_experts_per_tok", "norm_topk_prob")
    check_fields(hf, used=(*SIZES, *ROUTER_TRAINING, *own), only={"clip_qkv": (None,)}, ignore=ignore)
    hf = {**DEFAULTS, **hf}
    biases, normalised = bool(hf.get("attention_bias")), bool(hf.get("norm_topk_prob"))
    routing = Routing(experts=hf["num_experts"], top_k=hf["num_experts_per_tok"], normalised=normalised)
    return DecoderConfig(
        **sizes_from_hf(hf, eps=1e-5),
        **rope_from_hf(hf),
        qk_norm="all",
        activation=gated_activation(hf, "hidden_act"),
        qkv_bias=biases,
        out_bias=biases,
        moe=with_published_loss(MoE(routing, hf["intermediate_size"]), hf, default=0.01),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a config.json that transformers loads as the same model."""
    moe = experts_of(config)
    return {
        **sizes_to_hf(config, "OlmoeForCausalLM"),
        "intermediate_size": moe.mlp,
        "hidden_act": activation_to_hf(config),
        "attention_bias": config.qkv_bias,
        "num_experts": moe.routing.experts,
        "num_experts_per_tok": moe.routing.top_k,
        "norm_topk_prob": moe.routing.normalised,
    }
