"""The fields of a Hugging Face config.json: none that changes the mathematics is ignored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from fmegatron.errors import UserError
from fmegatron.models.config import Activation, DecoderConfig
from fmegatron.models.moe import MoE
from fmegatron.primitives import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    YaRNScaling,
)

# Fields that say nothing about what a forward pass computes. Dropout is among them: it acts in training only, and
# training here starts from the settings of the run (`dropout=…`).
HARMLESS = frozenset(
    """
    architectures model_type auto_map transformers_version dtype torch_dtype _name_or_path _attn_implementation_autoset
    _attn_implementation attn_implementation use_cache cache_implementation return_dict output_attentions
    output_hidden_states torchscript use_bfloat16 tf_legacy_loss gradient_checkpointing use_return_dict
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id mask_token_id decoder_start_token_id
    bos_token eos_token pad_token tokenizer_class prefix suppress_tokens begin_suppress_tokens
    forced_bos_token_id forced_eos_token_id bad_words_ids
    id2label label2id num_labels problem_type finetuning_task task_specific_params
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    num_return_sequences output_scores return_dict_in_generate remove_invalid_values exponential_decay_length_penalty
    chunk_size_feed_forward initializer_range attention_dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout
    attention_probs_dropout_prob hidden_dropout_prob embedding_dropout
    """.split()
)
# Fields that every config may have, at the only values that leave the mathematics alone.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "pretraining_tp": (1,),
    "use_bidirectional_attention": (None, False),
}
ACTIVATIONS: dict[str, Activation] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"),
}


def check_fields(
    hf: Mapping[str, Any],
    *,
    used: Iterable[str],
    only: Mapping[str, tuple[Any, ...]] | None = None,
    ignore: Iterable[str] = (),
) -> None:
    """Refuse a config.json with a field that would be ignored.

    used: the fields that the family reads. only: further fields and the values at which they change nothing.
    ignore: fields that the caller takes the responsibility for.
    Raises UserError naming the first field that is neither used, nor known to be harmless, nor at a neutral value.
    """
    family = hf.get("model_type")
    neutral = {**NEUTRAL, **(only or {})}
    known = HARMLESS | set(used) | set(ignore)
    for name, value in hf.items():
        if name in known or (name in neutral and value in neutral[name]):
            continue
        if name in neutral:
            allowed = " or ".join(repr(v) for v in neutral[name])
            raise UserError(f"config.json: {name}={value!r} is not supported for {family}: only {allowed} is")
        if value is None:
            continue
        raise UserError(
            f"config.json: the field {name}={value!r} is not known for {family}, and may change what the model computes; "
            f"if it does not, load with ignore_fields=({name!r},)"
        )


def gated_activation(hf: Mapping[str, Any], *names: str) -> Activation:
    """Our name of the gated activation in the first of the fields `names` that is there (silu by default)."""
    name = next((n for n in names if hf.get(n) is not None), None)
    value = "silu" if name is None else hf[name]
    if value not in ACTIVATIONS:
        raise UserError(
            f"config.json: {name}={value!r} is not supported for {hf.get('model_type')}: only {', '.join(ACTIVATIONS)} are"
        )
    return ACTIVATIONS[value]


def activation_to_hf(config: DecoderConfig) -> str:
    """Hugging Face's name of a gated activation."""
    named = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    if config.activation not in named:
        raise UserError(
            f"activation={config.activation!r} has no name in {config.family}: use one of {', '.join(named)}"
        )
    return named[config.activation]


# ------------------------------------------------------------------------------------------------------------ rotary


def rope_from_hf(hf: Mapping[str, Any], *, base: float = 10000.0, partial: bool = False) -> dict[str, Any]:
    """{rope_base, rope_scaling, and rope_dim if it is partial} of a config.json.

    transformers 5 writes `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`; both are read. base: the
    family's default. partial: does the family turn a part of each head only, where partial_rotary_factor says so?
    Raises UserError for a form or a key that is not known.
    """
    rope = dict(hf.get("rope_parameters") or {}) | dict(hf.get("rope_scaling") or {})
    fraction = rope.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or 1.0
    if fraction != 1 and not partial:  # transformers ignores it there, or fails
        raise UserError(
            f"config.json: partial_rotary_factor={fraction!r} is not supported for {hf.get('model_type')}: only 1.0 is"
        )
    found: dict[str, Any] = {
        "rope_base": float(rope.pop("rope_theta", None) or hf.get("rope_theta") or base),
        "rope_scaling": scaling_from_hf(rope, hf),
    }
    if fraction != 1:
        head = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        found["rope_dim"] = int(head * fraction)
    return found


def scaling_from_hf(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> Any:
    """The scaling that a table of rope parameters describes; None for plain rotary positions."""
    rope = dict(rope)
    kind = rope.pop("type", None)
    kind = rope.pop("rope_type", kind) or "default"
    kind = "longrope" if kind == "su" else kind
    family = hf.get("model_type")
    if kind not in ROPE_KEYS:
        raise UserError(
            f"config.json: rope type {kind!r} is not supported for {family}: only {', '.join(ROPE_KEYS)} are"
        )
    if unknown := [n for n in rope if n not in ROPE_KEYS[kind] and rope[n] is not None]:
        if not (kind == "default" and set(unknown) <= {"original_max_position_embeddings", "factor"}):
            raise UserError(f"config.json: {unknown[0]!r} is not known for {family}'s rope type {kind!r}")
    rope = _some(rope)
    longest: Any = hf.get("max_position_embeddings", 2048)
    original = rope.get("original_max_position_embeddings") or hf.get("original_max_position_embeddings") or longest
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=float(rope["factor"]))
    if kind == "dynamic":
        return DynamicNTKScaling(factor=float(rope["factor"]), original_max_position=int(longest or original))
    if kind == "llama3":
        return Llama3Scaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position=int(original),
        )
    if kind == "yarn":
        given = {
            n: rope[n]
            for n in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
            if n in rope
        }
        return YaRNScaling(factor=float(rope["factor"]), original_max_position=int(original), **given)
    factor = rope.get("factor") or (longest or original) / original
    return LongRoPEScaling(
        short_factor=tuple(map(float, rope["short_factor"])),
        long_factor=tuple(map(float, rope["long_factor"])),
        original_max_position=int(original),
        factor=float(factor),
        attention_factor=rope.get("attention_factor"),
    )


def rope_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of config.json for the rotary positions, in both spellings: transformers 4 reads rope_theta and
    rope_scaling, 5 reads rope_parameters."""
    table = scaling_to_hf(config.rope_scaling)
    partial = {} if config.rope_dim is None else {"partial_rotary_factor": _share(config.rope_dim, config.head)}
    scaled = table if config.rope_scaling is not None else None
    return {
        "rope_theta": config.rope_base,
        "rope_scaling": scaled,
        "rope_parameters": {**table, "rope_theta": config.rope_base, **partial},
        **partial,
    }


def _share(part: int, whole: int) -> float:
    """part / whole, so that int(whole · it) is part again: the quotient alone may round down."""
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, math.inf)


def scaling_to_hf(scaling: Any) -> dict[str, Any]:
    """A table of rope parameters, without the base."""
    if scaling is None:
        return {"rope_type": "default"}
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    original = {"original_max_position_embeddings": scaling.original_max_position}
    if isinstance(scaling, DynamicNTKScaling):
        return {"rope_type": "dynamic", "factor": scaling.factor, **original}
    if isinstance(scaling, Llama3Scaling):
        factors = {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        return {"rope_type": "llama3", "factor": scaling.factor, **factors, **original}
    if isinstance(scaling, YaRNScaling):
        names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
        given = {n: getattr(scaling, n) for n in names}
        return {"rope_type": "yarn", "factor": scaling.factor, **original, **_some(given)}
    if isinstance(scaling, LongRoPEScaling):
        lists = {"short_factor": list(scaling.short_factor), "long_factor": list(scaling.long_factor)}
        more = _some({"attention_factor": scaling.attention_factor})
        return {"rope_type": "longrope", "factor": scaling.factor, **lists, **more, **original}
    raise UserError(f"rope_scaling {scaling!r} has no form in Hugging Face's config.json")


def _some(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in fields.items() if v is not None}


# ----------------------------------------------------------------------------------------- what most families share

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "tie_word_embeddings",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
)


# Of experts, what acts in training only; training here starts from the settings of the run, as with dropout.
ROUTER_TRAINING = ("router_aux_loss_coef", "output_router_logits")


def experts_of(config: DecoderConfig) -> MoE:
    """The experts of a model whose family always has some. Raises UserError where it has none."""
    if config.moe is None:
        raise UserError(f"moe=None has no form in {config.family}, which has experts: use the family of a dense model")
    return config.moe


def sizes_from_hf(hf: Mapping[str, Any], *, eps: float = 1e-6, tied: bool = False) -> dict[str, Any]:
    """Our fields from those of `SIZES`, the rotary ones excepted. eps, tied: the family's defaults."""
    return {
        "family": hf["model_type"],
        "vocab": hf["vocab_size"],
        "embed": hf["hidden_size"],
        "layers": hf["num_hidden_layers"],
        "heads": hf["num_attention_heads"],
        "kv_heads": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "head": hf.get("head_dim"),
        "mlp": hf["intermediate_size"],
        "norm_eps": float(hf.get("rms_norm_eps", eps)),
        "tied": bool(hf.get("tie_word_embeddings", tied)),
        "max_seq": int(hf.get("max_position_embeddings", 2048)),
        "init_std": float(hf.get("initializer_range", 0.02)),
    }


def sizes_to_hf(config: DecoderConfig, architecture: str) -> dict[str, Any]:
    """The reverse of `sizes_from_hf`, with the rotary fields."""
    c = config
    return {
        "architectures": [architecture],
        "model_type": c.family,
        "vocab_size": c.vocab,
        "hidden_size": c.embed,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head,
        "intermediate_size": c.mlp,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "max_position_embeddings": c.max_seq,
        "initializer_range": c.init_std,
        "attention_dropout": 0.0,
        **rope_to_hf(c),
    }


def windows_from_hf(hf: Mapping[str, Any], default: list[str]) -> dict[str, Any]:
    """{window, pattern} from sliding_window and layer_types; default: the family's layer_types where there are none."""
    window = hf.get("sliding_window")
    kinds = hf.get("layer_types") or default
    if window is None:
        return {}
    known = {"sliding_attention": "window", "full_attention": "full"}
    for kind in kinds:
        if kind not in known:
            raise UserError(
                f"config.json: layer_types has {kind!r}, which is not supported for {hf.get('model_type')}: only "
                f"{' and '.join(known)} are"
            )
    if len(kinds) != hf["num_hidden_layers"]:
        raise UserError(
            f"config.json: layer_types has {len(kinds)} entries for num_hidden_layers={hf['num_hidden_layers']} layers"
        )
    if "sliding_attention" not in kinds:
        return {}
    return {"window": window, "pattern": shortest([known[kind] for kind in kinds])}


def shortest(kinds: list[str]) -> tuple[str, ...]:
    """The shortest pattern that gives these kinds when it is repeated: () for windows everywhere."""
    if set(kinds) == {"window"}:
        return ()
    for n in range(1, len(kinds) + 1):
        if all(kind == kinds[i % n] for i, kind in enumerate(kinds)):
            return tuple(kinds[:n])
    return tuple(kinds)


def windows_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """sliding_window and layer_types."""
    named = {"window": "sliding_attention", "full": "full_attention"}
    return {"sliding_window": config.window, "layer_types": [named[kind] for kind in config.kinds]}
