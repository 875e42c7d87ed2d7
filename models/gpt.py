"""GPT-2 (Radford et al. 2019) and GPT-3's sizes (Brown et al. 2020): layer norms, learned positions, biases, and a
feed-forward part without a gate. Presets and Hugging Face's names.

GPT-3's presets are dense; the original has windowed layers between the dense ones, in a form that was not published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fmegatron.errors import UserError
from fmegatron.models.config import DecoderConfig
from fmegatron.models.hf_fields import check_fields
from fmegatron.models.hf_names import HFTensor, fused, names_of

FORM: dict[str, Any] = {
    "family": "gpt2",
    "positions": "learned",
    "norm": "layer",
    "activation": "gelu_tanh",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "tied": True,
}
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def _gpt(embed: int, layers: int, heads: int, *, vocab: int = 50257, max_seq: int = 2048) -> DecoderConfig:
    return DecoderConfig(vocab=vocab, embed=embed, layers=layers, heads=heads, mlp=4 * embed, max_seq=max_seq, **FORM)


GPT: dict[str, DecoderConfig] = {
    "gpt2-tiny": _gpt(192, 4, 6, vocab=4096, max_seq=1024),
    "gpt2": _gpt(768, 12, 12, max_seq=1024),
    "gpt2-medium": _gpt(1024, 24, 16, max_seq=1024),
    "gpt2-large": _gpt(1280, 36, 20, max_seq=1024),
    "gpt2-xl": _gpt(1600, 48, 25, max_seq=1024),
    "gpt3-125m": _gpt(768, 12, 12),
    "gpt3-350m": _gpt(1024, 24, 16),
    "gpt3-760m": _gpt(1536, 24, 16),
    "gpt3-1.3b": _gpt(2048, 24, 16),  # the paper's 24 heads of 128 do not make 2048
    "gpt3-2.7b": _gpt(2560, 32, 32),
    "gpt3-6.7b": _gpt(4096, 32, 32),
    "gpt3-13b": _gpt(5120, 40, 40),  # the paper's 5140 does not divide by its heads
    "gpt3-175b": _gpt(12288, 96, 96),
}
USED = (
    "vocab_size",
    "n_positions",
    "n_ctx",
    "n_embd",
    "n_layer",
    "n_head",
    "n_inner",
    "activation_function",
    "layer_norm_epsilon",
    "tie_word_embeddings",
    # of another head, which a language model does not have
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
    "n_special",
    "predict_special_tokens",
    # of how, not what, is computed
    "reorder_and_upcast_attn",
    "output_past",
)
NEUTRAL = {"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)}
TOP = {
    "embed": HFTensor("transformer.wte.weight", "vocab embed"),
    "positions": HFTensor("transformer.wpe.weight", "position embed"),
    "norm": HFTensor("transformer.ln_f.weight", "embed"),
    "norm_bias": HFTensor("transformer.ln_f.bias", "embed"),
    "head": HFTensor("lm_head.weight", "vocab embed"),
}
LAYER = {
    "norm1": HFTensor("ln_1.weight", "embed"),
    "norm1_bias": HFTensor("ln_1.bias", "embed"),
    "o": HFTensor("attn.c_proj.weight", "(kv group head) embed"),
    "o_bias": HFTensor("attn.c_proj.bias", "embed"),
    "norm2": HFTensor("ln_2.weight", "embed"),
    "norm2_bias": HFTensor("ln_2.bias", "embed"),
    "up": HFTensor("mlp.c_fc.weight", "embed mlp"),
    "up_bias": HFTensor("mlp.c_fc.bias", "mlp"),
    "down": HFTensor("mlp.c_proj.weight", "mlp embed"),
    "down_bias": HFTensor("mlp.c_proj.bias", "embed"),
}


def hf_map(config: DecoderConfig, spec: Any) -> dict[str, HFTensor]:
    """{our dotted name: the Hugging Face tensor and how it lays out our dims}. GPT-2's matrices are stored [in, out]."""
    n = config.heads * config.head
    weights = {"q": ("embed (kv group head)", n), "k": ("embed (kv head)", n), "v": ("embed (kv head)", n)}
    biases = {"q_bias": ("(kv group head)", n), "k_bias": ("(kv head)", n), "v_bias": ("(kv head)", n)}
    qkv = {**fused("attn.c_attn.weight", weights, dim=1), **fused("attn.c_attn.bias", biases)}
    return names_of(spec, top=TOP, layer={**LAYER, **qkv}, prefix="transformer.h")


def config_from_hf(hf: Mapping[str, Any], *, ignore: tuple[str, ...] = ()) -> DecoderConfig:
    """The model in a config.json. Raises UserError, by name, for a field that would be ignored."""
    check_fields(hf, used=USED, only=NEUTRAL, ignore=ignore)
    activation = hf.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise UserError(
            f"config.json: activation_function={activation!r} is not supported for gpt2: only {', '.join(ACTIVATIONS)} are"
        )
    embed = hf["n_embd"]
    changes = {"activation": ACTIVATIONS[activation], "tied": bool(hf.get("tie_word_embeddings", True))}
    return DecoderConfig(
        vocab=hf["vocab_size"],
        embed=embed,
        layers=hf["n_layer"],
        heads=hf["n_head"],
        mlp=hf.get("n_inner") or 4 * embed,
        norm_eps=float(hf.get("layer_norm_epsilon", 1e-5)),
        max_seq=int(hf.get("n_positions", 1024)),
        init_std=float(hf.get("initializer_range", 0.02)),
        **{**FORM, **changes},
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a config.json that transformers loads as the same model."""
    c = config
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": c.vocab,
        "n_positions": c.max_seq,
        "n_embd": c.embed,
        "n_layer": c.layers,
        "n_head": c.heads,
        "n_inner": c.mlp,
        "activation_function": {"gelu_tanh": "gelu_new", "gelu": "gelu"}.get(c.activation),
        "layer_norm_epsilon": c.norm_eps,
        "initializer_range": c.init_std,
        "tie_word_embeddings": c.tied,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
