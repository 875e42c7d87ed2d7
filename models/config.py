"""The sizes of a decoder-only model, and what distinguishes its family."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fmegatron import primitives
from fmegatron.errors import UserError
from fmegatron.models.moe import MoE, moe_from_dict, moe_to_dict

Kind = Literal["full", "window"]
Activation = Literal["swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "gelu", "gelu_tanh", "relu2"]
CHOICES = {
    "positions": ("rotary", "learned", "none"),
    "norm": ("rms", "layer"),
    "norm_place": ("pre", "post", "both"),
    "qk_norm": (None, "head", "all"),
    "activation": get_args(Activation),
}


@dataclass(frozen=True)
class MLA:
    """Sizes of multi-head latent attention (`fmegatron.models.mla`).

    q_rank, kv_rank: width of the latent of queries (None: they are made of the stream) and of keys and values.
    nope, rope, value: of one head: features of queries and keys without positions, those with rotary positions, and
        features of a value.
    norm_eps: of the norms of the latents.
    """

    kv_rank: int
    nope: int
    rope: int
    value: int
    q_rank: int | None = None
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("kv_rank", "nope", "rope", "value", "q_rank"):
            value = getattr(self, name)
            if name == "q_rank" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"mla: {name}={value!r} must be an int of 1 or more")
        if self.rope % 2:
            raise UserError(f"mla: rope={self.rope} must be even: rotary positions turn pairs of features")

    @property
    def head(self) -> int:
        """Features of a query or key."""
        return self.nope + self.rope


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and form of a decoder.

    vocab, embed, layers, mlp: vocabulary, width of the stream, number of blocks, width of the feed-forward part.
    heads, kv_heads, head: query heads, key and value heads (a divisor of `heads`), size of one head (None: embed /
        heads).
    family: the model_type of Hugging Face in whose names it is exported.

    positions: "rotary", "learned" (a table of max_seq rows) or "none".
    rope_base, rope_scaling, rope_dim, rope_interleaved: of rotary positions: wavelengths, their stretch, how many
        features of a head are turned (None: all), and whether pairs are (2i, 2i+1) instead of (i, i + rope_dim/2).
    window_rope_base: the base in windowed layers, without scaling (None: as in the others; Gemma 3).

    window: keys that a query sees in a windowed layer, its own included.
    pattern: kinds of the layers, "window" or "full", repeated over them; () means all windowed if there is a window.
    attention_scale, attention_softcap: of the scores; None: 1 / sqrt(head), and no cap.
    sinks: a learned logit per head in the softmax's denominator (GPT-OSS).
    mla: sizes of multi-head latent attention (DeepSeek V2, V3), None for plain heads. `head` is then that of queries and
        keys, qkv_bias adds biases to the down products, and of rotary positions turns the part that `mla` says.
    moe: the experts of layers that have them (see `fmegatron.models.moe`), None for a dense model.
    qk_norm: a norm of queries and keys, of each "head" (Qwen 3) or of "all" heads together (OLMo 2).
    qkv_bias, out_bias, mlp_bias: biases of the products.

    norm, norm_eps: "rms" or "layer".
    norm_place: "pre" (before each part), "post" (behind it; OLMo 2) or "both" (Gemma 2).
    norm_zero_centred: the scale is 1 + weight (Gemma). norm_wide_weight: the weight is applied before the result is
        rounded to the compute dtype.
    activation: "swiglu", "geglu", "geglu_tanh", "clamped_swiglu" (gated), "gelu", "gelu_tanh", "relu2".

    embed_scale: multiplies the embedding. logit_softcap: of the final logits. tied: the output matrix is the embedding.
    max_seq: the longest sequence that the model is made for; with learned positions the number of rows.
    dropout: on the output of each attention and feed-forward part.
    init_std: of the initial matrices; those that write to the stream start smaller by sqrt(2 · layers).
    mtp, mtp_weight: modules that predict further tokens (see `fmegatron.models.mtp`), and the weight of the mean of their
        losses in training; with a weight of 0 they are not computed.

    fused_qkv, fused_gate_up: queries, keys and values are one leaf `qkv`; gate and up are one leaf `gate_up`, by turns; one product
        makes what each of them would. The same function of other leaves: `fmegatron.models.fused` says when it is faster.
    """

    vocab: int
    embed: int
    layers: int
    heads: int
    mlp: int
    kv_heads: int = None  # type: ignore[assignment]  # None is replaced at once
    head: int = None  # type: ignore[assignment]
    family: str = "llama"
    positions: Literal["rotary", "learned", "none"] = "rotary"
    rope_base: float = 10000.0
    rope_scaling: Any = None
    rope_dim: int | None = None
    rope_interleaved: bool = False
    window_rope_base: float | None = None
    window: int | None = None
    pattern: tuple[Kind, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    sinks: bool = False
    mla: MLA | None = None
    moe: MoE | None = None
    qk_norm: Literal["head", "all"] | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_place: Literal["pre", "post", "both"] = "pre"
    norm_zero_centred: bool = False
    norm_wide_weight: bool = False
    activation: Activation = "swiglu"
    embed_scale: float | None = None
    logit_softcap: float | None = None
    tied: bool = False
    max_seq: int = 4096
    dropout: float = 0.0
    init_std: float = 0.02
    mtp: int = 0
    mtp_weight: float = 0.1
    fused_qkv: bool = False
    fused_gate_up: bool = False

    def __post_init__(self) -> None:
        self._fill()
        for name in ("vocab", "embed", "layers", "heads", "kv_heads", "head", "mlp", "max_seq", "rope_dim", "window"):
            value = getattr(self, name)
            if name in ("window", "rope_dim") and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name}={value!r} must be an int of 1 or more")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UserError(f"{name}={getattr(self, name)!r} is not known: use one of {known}")
        if self.heads % self.kv_heads:
            raise UserError(
                f"heads={self.heads} does not divide by kv_heads={self.kv_heads}: each kv head serves equally many"
            )
        if self.positions == "rotary" and (self.turned % 2 or self.turned > self.head):
            what = f"head={self.head}" if self.rope_dim is None else f"rope_dim={self.rope_dim}"
            raise UserError(
                f"{what} must be even and at most head={self.head}: rotary positions turn pairs of features"
            )
        if any(kind not in ("full", "window") for kind in self.pattern):
            raise UserError(f'pattern={self.pattern!r} must hold "full" and "window" only')
        if "window" in self.pattern and self.window is None:
            raise UserError(f"pattern={self.pattern!r} has windowed layers: give window=…, the keys that a query sees")
        if self.mla is not None:
            self._check_mla(self.mla)
        if not isinstance(self.mtp, int) or isinstance(self.mtp, bool) or self.mtp < 0:
            raise UserError(f"mtp={self.mtp!r}, the number of prediction modules, must be an int of 0 or more")
        if not 0 <= self.mtp_weight < math.inf:
            raise UserError(f"mtp_weight={self.mtp_weight!r} must be a number of 0 or more")
        if self.norm == "layer" and (self.norm_zero_centred or self.norm_wide_weight):
            raise UserError('norm="layer" takes neither norm_zero_centred nor norm_wide_weight')

    def _check_mla(self, mla: MLA) -> None:
        if self.head != mla.head:
            raise UserError(f"head={self.head} must be {mla.head}, nope + rope of mla: leave it out")
        if self.kv_heads != self.heads:
            raise UserError(f"kv_heads={self.kv_heads} must be heads={self.heads} with mla: leave it out")
        if self.rope_dim is not None:
            raise UserError(
                f"rope_dim={self.rope_dim} with mla: its `rope` says which features are turned; leave it out"
            )
        if self.positions != "rotary":
            raise UserError(f"positions={self.positions!r} with mla: its rope key takes rotary positions alone")
        if self.qk_norm is not None:
            raise UserError(f"qk_norm={self.qk_norm!r} with mla, which norms its latents: leave it out")
        if self.fused_qkv:
            raise UserError("fused_qkv with mla, which has no matrices to fuse: leave it out")

    def _fill(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head is None and self.mla is not None:
            object.__setattr__(self, "head", self.mla.head)
        if self.head is None:
            if self.embed % self.heads:
                raise UserError(
                    f"embed={self.embed} does not divide by heads={self.heads}: give the size of one head=…"
                )
            object.__setattr__(self, "head", self.embed // self.heads)
        object.__setattr__(self, "pattern", tuple(self.pattern))

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.heads // self.kv_heads

    @property
    def turned(self) -> int:
        """Features of a head that rotary positions turn."""
        if self.mla is not None:
            return self.mla.rope
        return self.head if self.rope_dim is None else self.rope_dim

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each layer."""
        pattern = self.pattern or (("window",) if self.window is not None else ("full",))
        return tuple(pattern[i % len(pattern)] for i in range(self.layers))

    def has_experts(self, index: int) -> bool:
        """Is the feed-forward part of a layer a mixture of experts? Prediction modules, which have the indices behind the
        layers', are as the last layer."""
        return self.moe is not None and min(index, self.layers - 1) not in self.moe.dense_layers

    def rope_of(self, kind: Kind) -> tuple[float, Any]:
        """(base, scaling) of the rotary positions in the layers of a kind."""
        if kind == "window" and self.window_rope_base is not None:
            return self.window_rope_base, None
        return self.rope_base, self.rope_scaling


def config_to_dict(config: DecoderConfig) -> dict[str, Any]:
    """The fields as JSON can hold them, for a checkpoint's metadata."""
    fields = dataclasses.asdict(config)
    if config.moe is not None:
        fields["moe"] = moe_to_dict(config.moe)
    if config.rope_scaling is not None:
        fields["rope_scaling"] = {"kind": type(config.rope_scaling).__name__, **fields["rope_scaling"]}
    return fields


def config_from_dict(fields: Mapping[str, Any]) -> DecoderConfig:
    """The config that `config_to_dict` wrote."""
    fields = dict(fields)
    if fields.get("moe") is not None:
        fields["moe"] = moe_from_dict(fields["moe"])
    if fields.get("mla") is not None:
        fields["mla"] = MLA(**fields["mla"])
    if (scaling := fields.get("rope_scaling")) is not None:
        given = {n: tuple(v) if isinstance(v, list) else v for n, v in scaling.items() if n != "kind"}
        fields["rope_scaling"] = getattr(primitives, scaling.get("kind", "Llama3Scaling"))(**given)
    return DecoderConfig(**{**fields, "pattern": tuple(fields.get("pattern", ()))})
