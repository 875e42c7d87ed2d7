"""Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024) as pure functions.

    model = Llama(LLAMA["tiny"])
    params = init(model.spec(), key(0))
    logits = model.logits(params, tokens)

Pre-norm blocks of grouped-query attention with rotary positions and a gated MLP. Query heads are two dims, `kv
group`: each kv head serves a group of query heads, so kv heads fewer than the tensor-parallel ranks need no special
case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fmegatron.accumulate import Term, Weight
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.initializers import Normal, Ones
from fmegatron.models.hf import HFTensor
from fmegatron.parallel.stack import stack
from fmegatron.primitives import (
    Llama3Scaling,
    apply_rotary,
    attention,
    dropout,
    embedding,
    linear_cross_entropy,
    rms_norm,
    rotary_table,
    swiglu,
)
from fmegatron.random import fold_in
from fmegatron.spec import Param
from fmegatron.split import everything

IGNORE = -100  # the label of a token without a loss


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama.

    vocab, embed, layers, mlp: vocabulary, width of the stream, number of blocks, width of the feed-forward part.
    heads, kv_heads, head: query heads, key and value heads (a divisor of `heads`), size of one head (None: embed /
        heads).
    rope_base, rope_scaling: rotary positions, and Llama 3.1's stretch of them.
    tied: the output matrix is the embedding.
    max_seq: the longest sequence that the model is made for; only a label here.
    dropout: on the output of each attention and MLP.
    """

    vocab: int
    embed: int
    layers: int
    heads: int
    mlp: int
    kv_heads: int = None  # type: ignore[assignment]  # None is replaced at once
    head: int = None  # type: ignore[assignment]
    rope_base: float = 10000.0
    rope_scaling: Llama3Scaling | None = None
    norm_eps: float = 1e-5
    tied: bool = False
    max_seq: int = 4096
    dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head is None:
            if self.embed % self.heads:
                raise UserError(
                    f"embed={self.embed} does not divide by heads={self.heads}: give the size of one head=…"
                )
            object.__setattr__(self, "head", self.embed // self.heads)
        for name in ("vocab", "embed", "layers", "heads", "kv_heads", "head", "mlp"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name}={value!r} must be an int of 1 or more")
        if self.heads % self.kv_heads:
            raise UserError(
                f"heads={self.heads} does not divide by kv_heads={self.kv_heads}: each kv head serves equally many"
            )
        if self.head % 2:
            raise UserError(f"head={self.head} must be even: rotary positions turn features in pairs")

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Llama:
    """The functions of a Llama and its sizes; it holds no parameters.

    save: what a block keeps for its backward, a policy of `remat` (`nothing`, `everything`, `names("attention")`, a
        predicate).
    compile: compile the block (torch.compile), or its options.
    """

    config: LlamaConfig
    save: Callable[[str], bool] = everything
    compile: bool | Mapping[str, Any] = False
    _stack: Any = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        layers = self.spec()["layers"]
        made = stack(self.block, layers, save=self.save, compile=self.compile)
        object.__setattr__(self, "_stack", made)

    # --------------------------------------------------------------------------------------------------- parameters

    def spec(self) -> dict[str, Any]:
        """The parameters: {"embed", "layers": {index: …}, "norm", "head" unless tied}."""
        c = self.config
        table = Param((c.vocab, c.embed), "vocab embed", Normal(c.init_std), over="batch seq")
        norm = Param((c.embed,), "embed", Ones(), over="batch seq*")
        found = {"embed": table, "layers": {i: self._block_spec() for i in range(c.layers)}, "norm": norm}
        return found if c.tied else {**found, "head": table}

    def _block_spec(self) -> dict[str, Param]:
        c = self.config
        # the two matrices that write to the stream start smaller, so that its variance does not grow with depth (GPT-2)
        std, out = Normal(c.init_std), Normal(c.init_std / math.sqrt(2 * c.layers))
        token, norm = "batch seq", Param((c.embed,), "embed", Ones(), over="batch seq*")
        kv = Param((c.embed, c.kv_heads, c.head), "embed kv head", std, over="batch seq group")
        return {
            "norm1": norm,
            "q": Param((c.embed, c.kv_heads, c.group, c.head), "embed kv group head", std, over=token),
            "k": kv,
            "v": kv,
            "o": Param((c.kv_heads, c.group, c.head, c.embed), "kv group head embed", out, over=token),
            "norm2": norm,
            "gate": Param((c.embed, c.mlp), "embed mlp", std, over=token),
            "up": Param((c.embed, c.mlp), "embed mlp", std, over=token),
            "down": Param((c.mlp, c.embed), "mlp embed", out, over=token),
        }

    # ------------------------------------------------------------------------------------------- the parts of a
    # pipeline

    def context(self, batch: Mapping[str, Tensor], ctx: Ctx) -> Ctx:
        """ctx with what every block reads of a batch: global positions, documents, and the rotary table of the
        positions."""
        sh, tokens = ctx.sh, batch["tokens"]
        positions = batch.get("positions", ctx.positions)
        if positions is None:
            ranks = math.prod(sh.mesh.sizes[a] for a in sh.axes("seq")) if sh.mesh is not None else 1
            positions = sh.index("seq", tokens.shape[1] * ranks, device=tokens.device)
        c = self.config
        dtype = torch.promote_types(sh.precision.compute_dtype, torch.float32)
        table = rotary_table(positions, c.head, base=c.rope_base, scaling=c.rope_scaling, dtype=dtype)
        extras = {**(ctx.extras or {}), "rotary": table}
        return ctx.replace(positions=positions, segments=batch.get("segments", ctx.segments), extras=extras)

    def embed(self, params: Mapping[str, Any], batch: Mapping[str, Tensor], ctx: Ctx) -> Tensor:
        """tokens[batch seq] -> stream[batch seq* embed]."""
        table = ctx.sh.use(params["embed"], self._leaf("embed"))
        return embedding(table, batch["tokens"], sh=ctx.sh, vocab_size=self.config.vocab)

    def block(self, p: Mapping[str, Tensor], x: Any, ctx: Ctx) -> Any:
        """One layer: its gathered parameters and stream[batch seq* embed] -> stream[batch seq* embed].

        In generation the carry is (stream, cache) and the new keys and values are written to the cache (`cached`).
        """
        x, cache = x if isinstance(x, tuple) else (x, None)
        x = x + self._attend(p, x, cache, ctx)
        x = x + self._feed_forward(p, x, ctx)
        return x if cache is None else (x, cache)

    def head(
        self, params: Mapping[str, Any], x: Tensor, batch: Mapping[str, Tensor], ctx: Ctx
    ) -> tuple[dict[str, Term], Any]:
        """stream[batch seq* embed] and labels[batch seq] -> ({"lm": loss of each token}, no statistics)."""
        h, table = self._last(params, x, ctx)
        per_token = linear_cross_entropy(
            h,
            table,
            batch["labels"],
            equation="batch seq embed, vocab embed -> batch seq vocab",
            ignore_index=IGNORE,
            sh=ctx.sh,
            vocab_size=self.config.vocab,
        )
        if (mask := batch.get("mask")) is not None:
            per_token = per_token * mask.to(per_token.dtype)
        return {"lm": Term(per_token, "batch seq")}, None

    # ----------------------------------------------------------------------------------------------------- the whole

    def loss(
        self, params: Mapping[str, Any], batch: Mapping[str, Tensor], ctx: Ctx | None = None
    ) -> tuple[dict[str, Term], Any]:
        """The cross-entropy of every token. batch: tokens and labels, int64[batch seq]; optionally mask[batch seq]
        (1: counts), segments[batch seq] (packed documents) and positions ([seq] or [batch seq])."""
        ctx = self.context(batch, ctx or Ctx())
        x = self._stack(params["layers"], self.embed(params, batch, ctx), ctx)
        return self.head(params, x, batch, ctx)

    def weights(self, batch: Mapping[str, Tensor]) -> dict[str, Weight]:
        """By what each term is divided: the number of tokens that count."""
        counts = batch["labels"] != IGNORE
        if (mask := batch.get("mask")) is not None:
            return {"lm": Weight(mask * counts, "batch seq")}
        return {"lm": Weight(counts, "batch seq")}

    def logits(self, params: Mapping[str, Any], tokens: Tensor, ctx: Ctx | None = None, **batch: Tensor) -> Tensor:
        """tokens[batch seq] -> logits[batch seq vocab] (each rank its part of the vocabulary)."""
        rest = {"tokens": tokens, **batch}
        ctx = self.context(rest, ctx or Ctx())
        x = self._stack(params["layers"], self.embed(params, rest, ctx), ctx)
        h, table = self._last(params, x, ctx)
        return ctx.sh.dot(h, table, "batch seq embed, vocab embed -> batch seq vocab", name="head")

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of forward and backward per token: 6 per element of a matrix that a token meets,
        and 6 · seq_len · heads · head per layer for causal attention (each query sees half of the keys on
        average)."""
        c = self.config
        per_layer = c.embed * c.head * (2 * c.heads + 2 * c.kv_heads) + 3 * c.embed * c.mlp
        matrices = c.layers * per_layer + c.embed * c.vocab
        return 6.0 * matrices + 6.0 * c.layers * seq_len * c.heads * c.head

    # -------------------------------------------------------------------------------------------------- generation

    def cache(
        self, rows: int, slots: int, *, dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> dict[int, Any]:
        """Room for the keys and values of `slots` tokens of each row: {layer: {"k", "v"}}, each [rows, slots, kv,
        head]."""
        c = self.config
        shape = (rows, slots, c.kv_heads, c.head)
        return {i: {n: torch.zeros(shape, dtype=dtype, device=device) for n in "kv"} for i in range(c.layers)}

    def cached(
        self, params: Mapping[str, Any], tokens: Tensor, cache: Any, start: int, ctx: Ctx | None = None, **batch: Tensor
    ) -> Tensor:
        """Logits[batch vocab] of the token behind `tokens`[batch seq], which fill the slots from `start` on. Keys
        and values are written into `cache` in place. batch: positions[batch seq], and segments[batch start+seq] when
        rows begin with padding."""
        segments = batch.pop("segments", None)
        rest = {"tokens": tokens, **batch}
        ctx = self.context(rest, ctx or Ctx())
        ctx = ctx.replace(extras={**ctx.extras, "slots": (start, start + tokens.shape[1]), "kv_segments": segments})
        x, _ = self._stack(params["layers"], (self.embed(params, rest, ctx), cache), ctx)
        h, table = self._last(params, x[:, -1:], ctx)
        return ctx.sh.dot(h, table, "batch seq embed, vocab embed -> batch seq vocab", name="head")[:, -1]

    # ----------------------------------------------------------------------------------------------------- the block

    def _attend(self, p: Mapping[str, Tensor], x: Tensor, cache: Any, ctx: Ctx) -> Tensor:
        sh, c = ctx.sh, self.config
        h = sh(rms_norm(x, p["norm1"], eps=c.norm_eps), "batch seq* embed -> batch seq embed | kv group")
        q = sh.dot(h, p["q"], "batch seq embed, embed kv group head -> batch seq kv group head", name="q")
        k, v = (sh.dot(h, p[n], "batch seq embed, embed kv head -> batch seq kv head", name=n) for n in "kv")
        q, k = (apply_rotary(t, *ctx.extras["rotary"]) for t in (q, k))
        if cache is None:
            a = self._self_attention(q, k, v, ctx)
        else:
            a = _cached_attention(q, k, v, cache[ctx.layer], ctx)
        y = sh.dot(a, p["o"], "batch seq kv group head, kv group head embed -> batch seq* embed", name="o")
        return self._dropped(y, "attention", ctx)

    def _self_attention(self, q: Tensor, k: Tensor, v: Tensor, ctx: Ctx) -> Tensor:
        sh, segments = ctx.sh, ctx.segments
        # context parallel: every rank reads all keys, each for queries of its own
        k, v = (sh(t, "batch seq kv head -> batch kvseq kv head | seq") for t in (k, v))
        if not sh.axes("seq"):
            return attention(q, k, v, segments=segments, sh=sh)
        positions = sh.index("seq", k.shape[1], device=q.device)
        every = sh(positions, "seq -> kvseq | seq")
        kv_segments = None if segments is None else sh(segments, "batch seq -> batch kvseq | seq")
        return attention(
            q, k, v, positions=positions, kv_positions=every, segments=segments, kv_segments=kv_segments, sh=sh
        )

    def _feed_forward(self, p: Mapping[str, Tensor], x: Tensor, ctx: Ctx) -> Tensor:
        sh = ctx.sh
        h = sh(rms_norm(x, p["norm2"], eps=self.config.norm_eps), "batch seq* embed -> batch seq embed | mlp")
        gate, up = (sh.dot(h, p[n], "batch seq embed, embed mlp -> batch seq mlp", name=n) for n in ("gate", "up"))
        y = sh.dot(swiglu(gate, up), p["down"], "batch seq mlp, mlp embed -> batch seq* embed", name="down")
        return self._dropped(y, "mlp", ctx)

    def _dropped(self, y: Tensor, where: str, ctx: Ctx) -> Tensor:
        if not self.config.dropout or ctx.key is None:
            return y
        return dropout(
            y, self.config.dropout, fold_in(ctx.key, where), sh=ctx.sh, dims="batch seq* embed", rows=ctx.rows
        )

    def _last(self, params: Mapping[str, Any], x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
        """(the normed stream in the region of the vocabulary, the output matrix [vocab embed])."""
        sh, name = ctx.sh, "embed" if self.config.tied else "head"
        scale = sh.use(params["norm"], self._leaf("norm"))
        h = sh(rms_norm(x, scale, eps=self.config.norm_eps), "batch seq* embed -> batch seq embed | vocab")
        return h, sh.use(params[name], self._leaf("embed"))

    def _leaf(self, name: str) -> Param:
        c = self.config
        if name == "norm":
            return Param((c.embed,), "embed", Ones(), over="batch seq*")
        return Param((c.vocab, c.embed), "vocab embed", Normal(c.init_std), over="batch seq")


def _cached_attention(q: Tensor, k: Tensor, v: Tensor, cache: Mapping[str, Tensor], ctx: Ctx) -> Tensor:
    """Attention of new tokens to all cached ones; writes the new keys and values into the cache's slots."""
    start, end = ctx.extras["slots"]
    cache["k"][:, start:end], cache["v"][:, start:end] = k, v
    kv_segments = ctx.extras["kv_segments"]
    segments = None if kv_segments is None else kv_segments[:, start:end]
    if kv_segments is not None:
        kv_segments = kv_segments[:, :end]
    return attention(q, cache["k"][:, :end], cache["v"][:, :end], segments=segments, kv_segments=kv_segments, sh=ctx.sh)


# ------------------------------------------------------------------------------------------------------------ presets

LLAMA: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(vocab=4096, embed=192, layers=4, heads=6, kv_heads=2, mlp=512, tied=True, max_seq=1024),
    "llama2-7b": LlamaConfig(vocab=32000, embed=4096, layers=32, heads=32, mlp=11008),
    "llama2-13b": LlamaConfig(vocab=32000, embed=5120, layers=40, heads=40, mlp=13824),
    "llama2-70b": LlamaConfig(vocab=32000, embed=8192, layers=80, heads=64, kv_heads=8, mlp=28672),
    "llama3-8b": LlamaConfig(
        vocab=128256, embed=4096, layers=32, heads=32, kv_heads=8, mlp=14336, rope_base=500000.0, max_seq=8192
    ),
    "llama3-70b": LlamaConfig(
        vocab=128256, embed=8192, layers=80, heads=64, kv_heads=8, mlp=28672, rope_base=500000.0, max_seq=8192
    ),
}
_LONG: dict[str, Any] = {"rope_base": 500000.0, "rope_scaling": Llama3Scaling(), "max_seq": 131072}
LLAMA |= {
    "llama3.1-8b": replace(LLAMA["llama3-8b"], **_LONG),
    "llama3.1-70b": replace(LLAMA["llama3-70b"], **_LONG),
    "llama3.1-405b": LlamaConfig(vocab=128256, embed=16384, layers=126, heads=128, kv_heads=8, mlp=53248, **_LONG),
    "llama3.2-1b": LlamaConfig(
        vocab=128256,
        embed=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        mlp=8192,
        tied=True,
        **{**_LONG, "rope_scaling": Llama3Scaling(factor=32.0)},
    ),
    "llama3.2-3b": LlamaConfig(
        vocab=128256,
        embed=3072,
        layers=28,
        heads=24,
        kv_heads=8,
        mlp=8192,
        tied=True,
        **{**_LONG, "rope_scaling": Llama3Scaling(factor=32.0)},
    ),
}


# -------------------------------------------------------------------------------------------------- Hugging Face names


def hf_map(config: LlamaConfig) -> dict[str, HFTensor]:
    """{our dotted name: the Hugging Face tensor and how it lays out our dims}."""
    found = {
        "embed": HFTensor("model.embed_tokens.weight", "vocab embed"),
        "norm": HFTensor("model.norm.weight", "embed"),
    }
    if not config.tied:
        found["head"] = HFTensor("lm_head.weight", "vocab embed")
    block = {
        "norm1": ("input_layernorm", "embed"),
        "q": ("self_attn.q_proj", "(kv group head) embed"),
        "k": ("self_attn.k_proj", "(kv head) embed"),
        "v": ("self_attn.v_proj", "(kv head) embed"),
        "o": ("self_attn.o_proj", "embed (kv group head)"),
        "norm2": ("post_attention_layernorm", "embed"),
        "gate": ("mlp.gate_proj", "mlp embed"),
        "up": ("mlp.up_proj", "mlp embed"),
        "down": ("mlp.down_proj", "embed mlp"),
    }
    for i in range(config.layers):
        found |= {
            f"layers.{i}.{ours}": HFTensor(f"model.layers.{i}.{name}.weight", dims)
            for ours, (name, dims) in block.items()
        }
    return found


def config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """The sizes in a config.json. Raises UserError, by name, for a field that changes the mathematics and is not
    supported."""
    for name in ("attention_bias", "mlp_bias"):
        if hf.get(name):
            raise UserError(
                f"config.json: {name}={hf[name]!r} is not supported for llama: only models without biases are"
            )
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UserError(f"config.json: hidden_act={hf['hidden_act']!r} is not supported for llama: only silu is")
    if hf.get("pretraining_tp", 1) != 1:
        raise UserError(f"config.json: pretraining_tp={hf['pretraining_tp']!r} is not supported: only 1 is")
    rope = dict(hf.get("rope_parameters") or {}) | dict(hf.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = None
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position=int(rope["original_max_position_embeddings"]),
        )
    elif kind != "default":
        raise UserError(f"config.json: rope type {kind!r} is not supported for llama: only default and llama3 are")
    if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        raise UserError("config.json: partial_rotary_factor other than 1 is not supported for llama")
    return LlamaConfig(
        vocab=hf["vocab_size"],
        embed=hf["hidden_size"],
        layers=hf["num_hidden_layers"],
        heads=hf["num_attention_heads"],
        kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        head=hf.get("head_dim"),  # type: ignore[arg-type]
        mlp=hf["intermediate_size"],
        rope_base=float(rope.get("rope_theta", hf.get("rope_theta", 10000.0))),
        rope_scaling=scaling,
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        tied=bool(hf.get("tie_word_embeddings", False)),
        max_seq=int(hf.get("max_position_embeddings", 2048)),
        init_std=float(hf.get("initializer_range", 0.02)),
    )


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The fields of a config.json that transformers loads as the same model."""
    c = config
    rope: dict[str, Any] = {"rope_type": "default"}
    if c.rope_scaling is not None:
        s = c.rope_scaling
        rope = {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_max_position_embeddings": s.original_max_position,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab,
        "hidden_size": c.embed,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head,
        "intermediate_size": c.mlp,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        # both spellings: transformers 4 reads rope_theta and rope_scaling, 5 reads rope_parameters
        "rope_theta": c.rope_base,
        "rope_scaling": rope if c.rope_scaling is not None else None,
        "rope_parameters": {**rope, "rope_theta": c.rope_base},
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "max_position_embeddings": c.max_seq,
        "initializer_range": c.init_std,
    }
