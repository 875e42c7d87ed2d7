"""Mixtral (Mistral AI 2024): Mistral's blocks with experts, whose weights are a softmax of the chosen logits. Presets and
Hugging Face's names.

A config.json's auxiliary loss is that of a loaded model where `output_router_logits` turns it on, which published ones do not;
its noise (`jitter` of a `Routing`) is a setting of training, and not read. Neither is written.
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
from fmegatron.models.hf_names import expert_names, llama_names
from fmegatron.models.moe import MoE, with_published_loss
from fmegatron.parallel.routing import Routing


def _moe(experts: int, top_k: int, width: int) -> MoE:
    return MoE(Routing(experts=experts, top_k=top_k, before=False), width)


def _preset(embed: int, layers: int, heads: int, mlp: int, max_seq: int) -> DecoderConfig:
    sizes = {"embed": embed, "layers": layers, "heads": heads, "kv_heads": 8, "mlp": mlp, "moe": _moe(8, 2, mlp)}
    return DecoderConfig(family="mixtral", vocab=32000, rope_base=1e6, max_seq=max_seq, **sizes)  # type: ignore[arg-type]


MIXTRAL: dict[str, DecoderConfig] = {
    "mixtral-8x7b": _preset(4096, 32, 32, 14336, 32768),
    "mixtral-8x22b": _preset(6144, 56, 48, 16384, 65536),
}
# what transformers takes for fields that a config.json leaves out
DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
DEFAULTS |= {"num_local_experts": 8, "num_experts_per_tok": 2}


def hf_map(config: DecoderConfig, spec: Any) -> dict[str, Any]:
    """{our dotted name: the Hugging Face tensors and how they lay out our dims}."""
    return llama_names(config, spec, **expert_names(config, "block_sparse_moe", matrices=("w1", "w3", "w2")))


def config_from_hf(hf: Mapping[str, Any], *, ignore: tuple[str, ...] = ()) -> DecoderConfig:
    """The model in a config.json. Raises UserError, by name, for a field that would be ignored."""
    own = ("hidden_act", "sliding_window", "num_local_experts", "num_experts_per_tok", "router_jitter_noise")
    check_fields(hf, used=(*SIZES, *ROUTER_TRAINING, *own), ignore=ignore)
    hf = {**DEFAULTS, **hf}
    moe = _moe(hf["num_local_experts"], hf["num_experts_per_tok"], hf["intermediate_size"])
    return DecoderConfig(
        **sizes_from_hf(hf, eps=1e-5),
        **rope_from_hf(hf, base=1e6),
        window=hf.get("sliding_window"),
        activation=gated_activation(hf, "hidden_act"),
        moe=with_published_loss(moe, hf, default=0.001),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a config.json that transformers loads as the same model."""
    moe = experts_of(config)
    return {
        **sizes_to_hf(config, "MixtralForCausalLM"),
        "intermediate_size": moe.mlp,
        "hidden_act": activation_to_hf(config),
        "sliding_window": config.window,
        "num_local_experts": moe.routing.experts,
        "num_experts_per_tok": moe.routing.top_k,
    }
