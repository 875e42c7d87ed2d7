"""Decoder-only language models as pure functions: every dense family, by configuration.

    model = Decoder(PRESETS["tiny"])
    params = init(model.spec(), key(0))
    logits = model.logits(params, tokens)

A block adds attention and then a feed-forward part to the stream. What differs between families is a field of
`DecoderConfig`: where norms stand and which, how positions enter, biases, windows, soft-caps. Query heads are two dims,
`kv group`: each kv head serves a group of query heads, so kv heads fewer than the tensor-parallel ranks need no special
case. One product may make queries, keys and values, and one gate and up (see `fmegatron.models.fused`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fmegatron.accumulate import Term, Weight
from fmegatron.context import PADDING, Ctx
from fmegatron.errors import UserError
from fmegatron.initializers import Normal, Ones, Zeros
from fmegatron.models import mla, mtp
from fmegatron.models.config import DecoderConfig
from fmegatron.models.fused import SHARED, copied_qkv, own_rows
from fmegatron.models.moe import (
    COUNTS_OF_MODULES,
    add_records,
    expert_spec,
    first_records,
    record_terms,
    record_weights,
    updated_biases,
)
from fmegatron.parallel.context import context_attention
from fmegatron.parallel.dispatch import BACKENDS, PADDED, Backend
from fmegatron.parallel.experts import mlp_experts
from fmegatron.parallel.moe import moe, router
from fmegatron.parallel.stack import stack
from fmegatron.primitives import (
    add_layer_norm,
    add_rms_norm,
    apply_rotary_both,
    attention,
    clamped_swiglu,
    dropout,
    embedding,
    gated_mlp,
    geglu,
    gelu,
    has_kernel,
    has_rotary_attention,
    layer_norm,
    linear_cross_entropy,
    relu2,
    rms_norm,
    rotary_attention,
    rotary_table,
    split_qkv,
    split_rotary,
    swiglu,
)
from fmegatron.random import fold_in
from fmegatron.spec import Param
from fmegatron.split import everything
from fmegatron.zero import Ahead

IGNORE = mtp.IGNORE
TO_LOGITS = "batch seq embed, vocab embed -> batch seq vocab"
ENTER_ATTENTION = "batch seq* embed -> batch seq embed | kv group"
ENTER_MLP = "batch seq* embed -> batch seq embed | {}"
ENTER_VOCAB = "batch seq* embed -> batch seq embed | vocab"

# Feed-forward activations: gated ones take (gate, up), or both in one tensor (by turns: dim=-1); the others up alone.
GATED: dict[str, Callable[..., Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu_tanh": functools.partial(geglu, approximate="tanh"),
    "clamped_swiglu": clamped_swiglu,
}
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": functools.partial(gelu, approximate="tanh"),
    "relu2": relu2,
}


@dataclass(frozen=True)
class Decoder:
    """The functions of a model and its sizes; it holds no parameters.

    save: what a block keeps for its backward, a policy of `remat` (`nothing`, `everything`, `names("attention")`, a
        predicate).
    compile: compile the block (torch.compile), or its options.
    label_smoothing, z_loss: of the loss (see `linear_cross_entropy`).
    overlap: chunks in which products run beside their gathers and sums over ranks (`sh.dot`); 0: whole. Gathers take part
        where one product reads the normed stream: of fused leaves, and of `up` without a gate.
    kernel: of norms, activations, rotary embedding, attention and loss: "auto", "torch" or "triton" (see
        `fmegatron.kernels`; attention has none of Triton's).
    keep_probabilities: those of the loss, from forward to backward (`keep` of `linear_cross_entropy`).
    dispatch: how tokens reach their experts: "dense", "all-gather", "all-to-all" or "padded" (see `fmegatron.parallel.dispatch`).
    record_routing: the statistics of the loss have "routing"[layer batch seq* choice], what every token of this rank chose. A
        batch with "routing"[batch seq layer choice] replays it (see `fmegatron.parallel.routing_record`). Prediction modules
        follow the layers in both; of a batch without them they choose for themselves.
    """

    config: DecoderConfig
    save: Callable[[str], bool] = everything
    compile: bool | Mapping[str, Any] = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    overlap: int = 0
    kernel: str = "auto"
    keep_probabilities: bool | None = None
    dispatch: Backend = "all-to-all"
    record_routing: bool = False
    _kernel: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    _rms_options: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    _stack: Any = field(init=False, repr=False, compare=False, default=None)
    _modules: Any = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.dispatch not in (*BACKENDS, PADDED):
            raise UserError(f"dispatch={self.dispatch!r} is not known: use one of {', '.join((*BACKENDS, PADDED))}")
        moe = self.config.moe
        if self.dispatch == PADDED and (moe is None or not moe.routing.bounded):
            raise UserError(
                'dispatch="padded" fills experts up to their capacity: give the routing a capacity, or another dispatch'
            )
        c, spec = self.config, self.spec()
        # arguments of primitives
        kernel = {} if self.kernel == "auto" else {"kernel": self.kernel}
        norm = {"eps": c.norm_eps, "zero_centred": c.norm_zero_centred, "wide_weight": c.norm_wide_weight}
        object.__setattr__(self, "_kernel", kernel)
        object.__setattr__(self, "_rms_options", norm | kernel)
        options: dict[str, Any] = {"save": self.save, "compile": self.compile, "context": self._layer_context}
        object.__setattr__(self, "_stack", stack(self.block, spec["layers"], **options))
        if self.config.mtp:
            made = stack(functools.partial(mtp.module, self), spec[mtp.ENTRY], **options)
            object.__setattr__(self, "_modules", made)

    @property
    def stack(self) -> Callable[..., Any]:
        """The layers in turn: f(layers, carry, ctx, then=None) -> carry (see `fmegatron.parallel.stack`)."""
        return self._stack

    # --------------------------------------------------------------------------------------------------- parameters

    def spec(self) -> dict[str, Any]:
        """The parameters: {"embed", "positions" if they are learned, "layers": {index: …}, "norm", "norm_bias" of a
        layer norm, "head" unless tied, "mtp" with prediction modules: {index behind those of the layers: …}}."""
        c = self.config
        found = {**self._ends(), "layers": {i: self._block_spec(i) for i in range(c.layers)}}
        if c.mtp:
            found[mtp.ENTRY] = {i: self._module_spec(i) for i in range(c.layers, c.layers + c.mtp)}
        return found

    @functools.cached_property
    def _outside(self) -> dict[str, Param]:
        """`_ends`, made once."""
        return self._ends()

    def _ends(self) -> dict[str, Param]:
        """The parameters outside the layers."""
        c = self.config
        table = Param((c.vocab, c.embed), "vocab embed", Normal(c.init_std), over="batch seq")
        found = {"embed": table}
        if c.positions == "learned":
            found["positions"] = Param((c.max_seq, c.embed), "position embed", Normal(c.init_std), over="batch seq*")
        found |= self._norm_spec("norm")
        return found if c.tied else {**found, "head": table}

    def _norm_spec(self, name: str) -> dict[str, Param]:
        """A norm of the stream."""
        c = self.config
        scale = Zeros() if c.norm_zero_centred else Ones()
        found = {name: Param((c.embed,), "embed", scale, over="batch seq*")}
        if c.norm == "layer":
            found[f"{name}_bias"] = Param((c.embed,), "embed", Zeros(), over="batch seq*")
        return found

    def _module_spec(self, index: int) -> dict[str, Param]:
        """A prediction module (see `fmegatron.models.mtp`)."""
        c = self.config
        join = Param((2 * c.embed, c.embed), "both embed", Normal(c.init_std), over="batch seq*")
        found = {**self._norm_spec("embed_norm"), **self._norm_spec("hidden_norm"), "join": join}
        return {**found, **self._block_spec(index), **self._norm_spec("norm")}

    def _block_spec(self, index: int) -> dict[str, Param]:
        c = self.config
        # the two matrices that write to the stream start smaller, so that its variance does not grow with depth (GPT-2)
        std, out = Normal(c.init_std), Normal(c.init_std / math.sqrt(2 * c.layers))
        found = self._norm_spec("norm1") if c.norm_place != "post" else {}
        found |= self._attention_spec(std, out) if c.mla is None else mla.spec(c)
        if c.norm_place != "pre":
            found |= self._norm_spec("norm1_post")
        if c.norm_place != "post":
            found |= self._norm_spec("norm2")
        if c.moe is None or not c.has_experts(index):
            found |= self._mlp_spec("", c.mlp, std, out)
        else:
            found |= expert_spec(c.moe, embed=c.embed, gated=c.activation in GATED, std=std, out=out)
            if c.moe.shared:
                found |= self._mlp_spec(SHARED, c.moe.shared, std, out)
        if c.norm_place != "pre":
            found |= self._norm_spec("norm2_post")
        return found

    def _mlp_spec(self, prefix: str, width: int, std: Normal, out: Normal) -> dict[str, Param]:
        """A feed-forward part that every token meets."""
        c, token, found, mlp = self.config, "batch seq", {}, f"{prefix}mlp"
        names = ("gate", "up") if c.activation in GATED else ("up",)
        if c.fused_gate_up and c.activation in GATED:
            found["gate_up"] = Param((c.embed, width, 2), f"embed {mlp} gated", std, over=token)
            if c.mlp_bias:
                found["gate_up_bias"] = Param((width, 2), f"{mlp} gated", Zeros(), over=token, decay=False)
        else:
            found |= {n: Param((c.embed, width), f"embed {mlp}", std, over=token) for n in names}
            if c.mlp_bias:
                found |= {f"{n}_bias": Param((width,), mlp, Zeros(), over=token) for n in names}
        found["down"] = Param((width, c.embed), f"{mlp} embed", out, over=token)
        if c.mlp_bias:
            found["down_bias"] = Param((c.embed,), "embed", Zeros(), over="batch seq*")
        return {f"{prefix}{name}": param for name, param in found.items()}

    def _attention_spec(self, std: Normal, out: Normal) -> dict[str, Param]:
        c = self.config
        token, per_kv, stream = "batch seq", "batch seq group", "batch seq*"
        query, keys = (c.kv_heads, c.group, c.head), (c.kv_heads, c.head)
        found: dict[str, Param] = {}
        if c.fused_qkv:
            rows = (c.kv_heads, c.group + 2, c.head)
            found["qkv"] = Param((c.embed, *rows), "embed kv qkv head", std, over=per_kv)
            if c.qkv_bias:
                found["qkv_bias"] = Param(rows, "kv qkv head", Zeros(), over=per_kv, decay=False)
        else:
            found["q"] = Param((c.embed, *query), "embed kv group head", std, over=token)
            found["k"] = found["v"] = Param((c.embed, *keys), "embed kv head", std, over=per_kv)
            if c.qkv_bias:
                found["q_bias"] = Param(query, "kv group head", Zeros(), over=token, decay=False)
                found["k_bias"] = found["v_bias"] = Param(keys, "kv head", Zeros(), over=per_kv, decay=False)
        scale = Zeros() if c.norm_zero_centred else Ones()
        if c.qk_norm == "head":
            found["q_norm"] = found["k_norm"] = Param((c.head,), "head", scale, over="batch seq kv group")
        elif c.qk_norm == "all":
            found["q_norm"] = Param(query, "kv group head", scale, over=token, decay=False)
            found["k_norm"] = Param(keys, "kv head", scale, over=per_kv, decay=False)
        if c.sinks:
            found["sinks"] = Param(query[:2], "kv group", Zeros(), over=token, decay=False)
        found["o"] = Param((*query, c.embed), "kv group head embed", out, over=token)
        if c.out_bias:
            found["o_bias"] = Param((c.embed,), "embed", Zeros(), over=stream)
        return found

    # ------------------------------------------------------------------------------------- the parts of a pipeline

    def context(self, batch: Mapping[str, Tensor], ctx: Ctx) -> Ctx:
        """ctx with what every block reads of a batch: global positions, documents, and the rotary tables of the
        positions, one for each kind of layer."""
        c, sh, tokens = self.config, ctx.sh, batch["tokens"]
        ranks = math.prod(sh.mesh.sizes[a] for a in sh.axes("seq")) if sh.mesh is not None else 1
        extras = dict(ctx.extras or {})
        length = extras["slots"][1] if "slots" in extras else tokens.shape[1] * ranks
        if c.positions == "learned" and length > c.max_seq:
            raise UserError(
                f"{length} tokens are more than the {c.max_seq} learned positions of the model: use shorter sequences, "
                f"or a model with max_seq={length}"
            )
        positions = batch.get("positions", ctx.positions)
        in_order = positions is None and sh.mesh is None
        if positions is None:
            positions = sh.index("seq", tokens.shape[1] * ranks, device=tokens.device)
        if c.positions == "rotary":
            dtype = torch.promote_types(sh.precision.compute_dtype, torch.float32)
            for kind in sorted(set(c.kinds)):
                base, scaling = c.rope_of(kind)
                extras[f"rotary {kind}"] = rotary_table(
                    positions, c.turned, base=base, scaling=scaling, length=length, dtype=dtype, in_order=in_order
                )
        if c.moe is not None:
            extras |= {name: batch[name] for name in ("real", "routing") if name in batch}
            extras["expert_layers"] = torch.eye(len(c.moe.layers(c.layers)), device=tokens.device)
        return ctx.replace(positions=positions, segments=batch.get("segments", ctx.segments), extras=extras)

    def _layer_context(self, ctx: Ctx, index: int) -> Ctx:
        """What the blocks of one kind have in common; one graph a kind is compiled, not one a layer."""
        c, extras = self.config, ctx.extras
        kind = c.kinds[min(index, c.layers - 1)]
        mine = {n: t for n, t in extras.items() if not n.startswith("rotary ")}
        mine |= {"rotary": extras.get(f"rotary {kind}"), "window": c.window if kind == "window" else None}
        if index >= c.layers:
            mine = mtp.layer_extras(mine, c, index)
        elif c.moe is not None:
            experts = mine.pop("expert_layers")
            mine.pop(COUNTS_OF_MODULES, None)
            here = None if index in c.moe.dense_layers else c.moe.layers(c.layers).index(index)
            mine["expert_layer"] = None if here is None else experts[here]
            if "routing" in mine:
                mine["routing"] = None if here is None else mine["routing"][:, :, here]
        return ctx.replace(extras=mine)

    def embed(self, params: Mapping[str, Any], batch: Mapping[str, Tensor], ctx: Ctx) -> Any:
        """tokens[batch seq] -> stream[batch seq* embed], or with experts the carry that `fmegatron.models.moe` describes."""
        return self._carry(self._embedded(self._ahead(params, self._front, ctx)(), batch, ctx), ctx)

    def _carry(self, x: Tensor, ctx: Ctx) -> Any:
        """What the first layer gets: the stream, and with experts what routers add to."""
        c = self.config
        return x if c.moe is None else first_records(x, c.moe, c.layers, ctx.sh, record=self.record_routing)

    def _embedded(self, used: Mapping[str, Tensor], batch: Mapping[str, Tensor], ctx: Ctx) -> Tensor:
        c, sh = self.config, ctx.sh
        x = self._looked_up(used, batch["tokens"], ctx)
        if c.positions == "learned":
            positions = ctx.positions
            assert positions is not None
            side = "seq" if positions.ndim == 1 else "batch seq"
            x = x + embedding(used["positions"], sh(positions, f"{side} -> {side}*"))
        return x

    def _looked_up(self, used: Mapping[str, Tensor], tokens: Tensor, ctx: Ctx) -> Tensor:
        """The embeddings of tokens, without positions."""
        c = self.config
        x = embedding(used["embed"], tokens, sh=ctx.sh, vocab_size=c.vocab)
        return x if c.embed_scale is None else x * _rounded(c.embed_scale, x.dtype)

    def block(self, p: Mapping[str, Tensor], x: Any, ctx: Ctx) -> Any:
        """One layer: its gathered parameters and stream[batch seq* embed] -> stream[batch seq* embed].

        In generation the carry is (stream, cache) and the new keys and values are written to the cache (`cached`); with
        experts it is otherwise a dict (see `fmegatron.models.moe`).
        """
        x, cache = x if isinstance(x, tuple) else (x, None)
        x, records = (x["x"], x) if isinstance(x, dict) else (x, None)
        x, h = self._add_and_norm(p, "norm1", x)
        y = self._dropped(self._norm(p, "norm1_post", self._attend(p, h, cache, ctx)), "attention", ctx)
        x, h = self._add_and_norm(p, "norm2", x, y)
        if "router" in p:
            y, routed = self._experts(p, h, ctx)
            if records is not None and self.config.moe is not None:
                records = add_records(records, routed, self.config.moe, ctx)
        else:
            y = self._feed_forward(p, h, ctx)
        x = x + self._dropped(self._norm(p, "norm2_post", y), "mlp", ctx)
        if records is not None:
            return {**records, "x": x}
        return x if cache is None else (x, cache)

    def head(
        self, params: Mapping[str, Any], x: Any, batch: Mapping[str, Tensor], ctx: Ctx
    ) -> tuple[dict[str, Term], Any]:
        """stream[batch seq* embed] and labels[batch seq] -> ({"lm": loss of each token}, no statistics). With experts also
        the terms "balance" and "router_z", if they have coefficients, and {"load": tokens, [layer route]}; with prediction modules
        "mtp_loss.1", … (see `fmegatron.models.mtp`)."""
        return self._losses(params, self._ahead(params, self._back, ctx)(), x, batch, ctx)

    def _losses(
        self, params: Mapping[str, Any], used: Mapping[str, Tensor], x: Any, batch: Mapping[str, Tensor], ctx: Ctx
    ) -> tuple[dict[str, Term], Any]:
        c = self.config
        terms, stats = ({}, None) if c.moe is None else record_terms(x)
        modules = params[mtp.ENTRY] if c.mtp else {}
        h, more = self._norm(used, "norm", self._stream(x)), {}
        if modules and c.mtp_weight:
            found = mtp.further(batch, c.mtp, ctx.sh)
            states, records = self._predicted(modules, used, h, found, ctx)
            if records:
                terms, stats = mtp.with_terms(terms, stats or {}, *record_terms(records), found)
            depths = enumerate(zip(states, found, strict=True), 1)
            more = {mtp.loss_name(k): self._cross_entropy(used, y, f.labels, f.mask, ctx) for k, (y, f) in depths}
        return {"lm": self._cross_entropy(used, h, batch["labels"], batch.get("mask"), ctx), **more, **terms}, stats

    def _cross_entropy(
        self, used: Mapping[str, Tensor], h: Tensor, labels: Tensor, mask: Tensor | None, ctx: Ctx
    ) -> Term:
        """The loss of each token, of a normed stream h[batch seq* embed]."""
        h, table = self._into_vocab(used, h, ctx)
        per_token = linear_cross_entropy(
            h,
            table,
            labels,
            equation=TO_LOGITS,
            ignore_index=IGNORE,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.config.logit_softcap,
            sh=ctx.sh,
            vocab_size=self.config.vocab,
            keep=self.keep_probabilities,
            **self._kernel,
        )
        if mask is not None:
            per_token = per_token * mask.to(per_token.dtype)
        return Term(per_token, "batch seq")

    def _predicted(
        self, modules: Mapping[int, Any], used: Mapping[str, Tensor], h: Tensor, found: list[mtp.Further], ctx: Ctx
    ) -> tuple[list[Tensor], Any]:
        """(the normed stream of each prediction module, the records of their experts), behind h, that of the layers."""
        c, inner = self.config, mtp.context(ctx, self.config, found)

        def carry() -> dict[str, Any]:
            states = (*(self._looked_up(used, f.tokens, ctx) for f in found), h)
            moe = mtp.own_experts(c)
            records = {} if moe is None else first_records(h, moe, c.mtp, ctx.sh, record=self.record_routing)
            return {**{n: t for n, t in records.items() if n != "x"}, "states": states}

        out = self._modules(modules, carry, inner)
        return list(out["states"][1:]), {n: t for n, t in out.items() if n != "states"}

    @staticmethod
    def _stream(carry: Any) -> Tensor:
        return carry["x"] if isinstance(carry, dict) else carry

    # ----------------------------------------------------------------------------------------------------- the whole

    def loss(
        self, params: Mapping[str, Any], batch: Mapping[str, Tensor], ctx: Ctx | None = None
    ) -> tuple[dict[str, Term], Any]:
        """The cross-entropy of every token. batch: tokens and labels, int64[batch seq]; optionally mask[batch seq]
        (1: counts), segments[batch seq] (packed documents) and positions ([seq] or [batch seq])."""
        ctx = self.context(batch, ctx or Ctx())
        # beside the layers' gathers: what is read in front of them with the first, what behind with the last
        front, back = self._ahead(params, self._front, ctx), self._ahead(params, self._back, ctx)
        front.begin()
        x = self._stack(
            params["layers"], lambda: self._carry(self._embedded(front(), batch, ctx), ctx), ctx, back.begin
        )
        return self._losses(params, back(), x, batch, ctx)

    def routing_statistics(self, params: Mapping[str, Any], batch: Mapping[str, Tensor], ctx: Ctx) -> dict[str, Any]:
        """The statistics of `loss`, without its heads; of prediction modules where they have experts and are read."""
        ctx, c = self.context(batch, ctx), self.config
        x = self._stack(params["layers"], self.embed(params, batch, ctx), ctx)
        terms, stats = record_terms(x)
        if not (c.mtp and c.mtp_weight) or mtp.own_experts(c) is None:
            return stats
        used, found = self._ahead(params, self._back, ctx)(), mtp.further(batch, c.mtp, ctx.sh)
        h = self._norm(used, "norm", self._stream(x))
        _, records = self._predicted(params[mtp.ENTRY], used, h, found, ctx)
        return mtp.with_terms(terms, stats, *record_terms(records), found)[1]

    def weights(self, batch: Mapping[str, Tensor]) -> dict[str, Weight]:
        """By what each term is divided: the number of tokens that count."""
        counts = batch["labels"] != IGNORE
        if (mask := batch.get("mask")) is not None:
            counts = mask * counts
        more = {} if self.config.moe is None else record_weights(batch, self.config.moe)
        return {"lm": Weight(counts, "batch seq"), **mtp.weights(batch, self.config), **more}

    @property
    def update_params(self) -> Callable[[Any, Any, Any], Any] | None:
        """(params, stats, sh) -> params: what changes behind the optimizer's update by a step's statistics (see
        `train_step`): the biases by which experts are chosen. None where there are none."""
        moe = self.config.moe
        if moe is None or not moe.routing.expert_bias:
            return None

        def update(params: Any, stats: Any, sh: Any) -> Any:
            spec = self.spec()
            return mtp.updated(updated_biases(params, stats, spec, moe, sh), stats, spec, self.config, sh)

        return update

    def logits(self, params: Mapping[str, Any], tokens: Tensor, ctx: Ctx | None = None, **batch: Tensor) -> Tensor:
        """tokens[batch seq] -> logits[batch seq vocab] (each rank its part of the vocabulary)."""
        rest = {"tokens": tokens, **batch}
        ctx = self.context(rest, ctx or Ctx())
        x = self._stack(params["layers"], self.embed(params, rest, ctx), ctx)
        return self.unembed(params, self._stream(x), ctx)

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of forward and backward per token: 6 per element of a matrix that a token meets,
        and 12 · heads · head per layer and key that a query sees, of which there are seq_len / 2 on average under a
        causal mask, fewer in a window. Prediction modules count as layers, each with a head."""
        c = self.config
        matrices = 3 if c.activation in GATED else 2
        heads, score = c.embed * c.head * (2 * c.heads + 2 * c.kv_heads), 2.0 * c.head
        if c.mla is not None:
            heads, score = mla.matrix_elements(c), c.mla.head + c.mla.value
        modules = c.mtp if c.mtp_weight else 0
        blocks = range(c.layers + modules)
        experts = sum(map(c.has_experts, blocks))
        feed_forward = matrices * c.embed * c.mlp * (len(blocks) - experts)
        if c.moe is not None:
            each = matrices * (c.moe.routing.top_k * c.moe.mlp + c.moe.shared) + c.moe.routing.experts
            feed_forward += c.embed * each * experts
        w = min(c.window or seq_len, seq_len)
        seen = {"full": seq_len / 2, "window": w * (1 - w / (2 * seq_len))}
        keys = sum(seen[kind] for kind in (*c.kinds, *c.kinds[-1:] * modules))
        ends = c.embed * c.vocab * (1 + modules) + 2 * c.embed * c.embed * modules
        return 6.0 * (len(blocks) * heads + feed_forward + ends) + 6.0 * c.heads * score * keys

    # -------------------------------------------------------------------------------------------------- generation

    def cache(
        self, rows: int, slots: int, *, dtype: torch.dtype = torch.float32, device: Any = "cpu", modules: int = 0
    ) -> dict[int, Any]:
        """Room for the keys and values of `slots` tokens of each row: {layer: {"k", "v"}}, each [rows, slots, kv,
        head]; of latent attention {"latent"}, [rows, slots, latent_rope]. modules: also of so many prediction modules."""
        c = self.config
        if c.mla is not None:
            return mla.make_cache(c, rows, slots, layers=c.layers + modules, dtype=dtype, device=device)
        shape = (rows, slots, c.kv_heads, c.head)
        made = range(c.layers + modules)
        return {i: {n: torch.zeros(shape, dtype=dtype, device=device) for n in "kv"} for i in made}

    def cached(
        self, params: Mapping[str, Any], tokens: Tensor, cache: Any, start: int, ctx: Ctx | None = None, **batch: Tensor
    ) -> Tensor:
        """Logits[batch vocab] of the token behind `tokens`[batch seq], which fill the slots from `start` on. Keys
        and values are written into `cache` in place. batch: positions[batch seq], and segments[batch start+seq] when
        rows begin with padding."""
        rest, ctx = self.cached_context(tokens, start, ctx, **batch)
        x, _ = self.stack(params["layers"], (self._stream(self.embed(params, rest, ctx)), cache), ctx)
        return self.unembed(params, x[:, -1:], ctx)[:, -1]

    def cached_context(
        self, tokens: Tensor, start: int, ctx: Ctx | None = None, **batch: Tensor
    ) -> tuple[dict[str, Tensor], Ctx]:
        """(the batch, the context) of tokens[batch seq] in the slots from `start` on."""
        segments = batch.pop("segments", None)
        rest, ctx = {"tokens": tokens, **batch}, ctx or Ctx()
        if segments is not None and self.config.moe is not None:
            rest["real"] = segments[:, start:] != PADDING  # padding takes no place of an expert
        slots = (start, start + tokens.shape[1])
        ctx = ctx.replace(extras={**(ctx.extras or {}), "slots": slots, "kv_segments": segments})
        return rest, self.context(rest, ctx)

    def unembed(self, params: Mapping[str, Any], x: Tensor, ctx: Ctx) -> Tensor:
        """stream[batch seq* embed] -> logits[batch seq vocab] (each rank its part of the vocabulary)."""
        used = self.head_parameters(params, ctx)
        return self.logits_of(used, self._norm(used, "norm", x), ctx)

    def head_parameters(self, params: Mapping[str, Any], ctx: Ctx, *, embedding: bool = False) -> Mapping[str, Tensor]:
        """What makes logits of the stream, gathered. embedding: and the table of embeddings, if that is another one."""
        return self._ahead(params, list(dict.fromkeys([*self._head, *(["embed"] if embedding else [])])), ctx)()

    def logits_of(self, used: Mapping[str, Tensor], h: Tensor, ctx: Ctx) -> Tensor:
        """The normed stream h[batch seq* embed] -> logits[batch seq vocab]."""
        h, table = self._into_vocab(used, h, ctx)
        y = ctx.sh.dot(h, table, TO_LOGITS, name="head")
        cap = self.config.logit_softcap
        return y if cap is None else cap * torch.tanh(y / cap)

    # ----------------------------------------------------------------------------------------------------- the block

    def _attend(self, p: Mapping[str, Tensor], x: Tensor, cache: Any, ctx: Ctx) -> Tensor:
        sh, c = ctx.sh, self.config
        if c.mla is not None:
            a = mla.attend(p, x, c, ctx, cache=cache, overlap=self.overlap, kernel=self._kernel)
        else:
            a = self._heads(p, x, cache, ctx)
        y = sh.dot(
            a,
            p["o"],
            "batch seq kv group head, kv group head embed -> batch seq* embed",
            name="o",
            overlap=self.overlap,
        )
        return y + p["o_bias"] if "o_bias" in p else y

    def _heads(self, p: Mapping[str, Tensor], x: Tensor, cache: Any, ctx: Ctx) -> Tensor:
        """What the heads read of each other, [batch seq kv group head]."""
        rotary, options = ctx.extras["rotary"], {"interleaved": self.config.rope_interleaved, **self._kernel}
        turn_fused = "qkv" in p and rotary is not None and self.config.qk_norm is None
        if turn_fused:
            y = self._fused_qkv(p, x, ctx)
            if cache is None and self._turns_in_place(y, ctx):
                form = {"segments": ctx.segments, "sh": ctx.sh, **self._attention_options(p, ctx)}
                return rotary_attention(y, *rotary, interleaved=self.config.rope_interleaved, **form)
            q, k, v = self._split(y, ctx, lambda y: split_rotary(y, *rotary, **options))
        elif "qkv" in p:
            # what backward keeps by itself is copied, or the whole would be kept for it
            split = split_qkv if self.config.qk_norm is None else copied_qkv
            q, k, v = self._split(self._fused_qkv(p, x, ctx), ctx, split)
        else:
            q, k, v = self._qkv(p, ctx.sh(x, ENTER_ATTENTION), ctx)
        q, k = self._qk_norm(p, q, k, ctx)
        if rotary is not None and not turn_fused:
            q, k = apply_rotary_both(q, k, *rotary, **options)
        if cache is not None:
            return self._cached_attention(p, q, k, v, cache, ctx)
        return self._self_attention(p, q, k, v, ctx)

    def _qkv(self, p: Mapping[str, Tensor], h: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor, Tensor]:
        """Queries[batch seq kv group head], keys and values[batch seq kv head], each by a product of its own."""
        sh = ctx.sh
        q = sh.dot(h, p["q"], "batch seq embed, embed kv group head -> batch seq kv group head", name="q")
        k, v = (sh.dot(h, p[n], "batch seq embed, embed kv head -> batch seq kv head", name=n) for n in "kv")
        q, k, v = (t + p[f"{n}_bias"] if f"{n}_bias" in p else t for n, t in (("q", q), ("k", k), ("v", v)))
        return q, k, v

    def _fused_qkv(self, p: Mapping[str, Tensor], x: Tensor, ctx: Ctx) -> Tensor:
        """The same of the stream by one product, of which each is a part: y[batch seq kv qkv head]."""
        c, sh = self.config, ctx.sh
        w = own_rows(p["qkv"], 2, c.group, sh)
        equation = "batch seq* embed, embed kv qkv head -> batch seq kv qkv head | group"
        y = sh.dot(x, w, equation, name="qkv", overlap=self.overlap)
        if "qkv_bias" in p:
            y = y + own_rows(p["qkv_bias"], 1, c.group, sh)
        return y

    def _split(self, y: Tensor, ctx: Ctx, split: Callable[[Tensor], Any]) -> Any:
        results = ("batch seq kv group head", "batch seq kv head | group", "batch seq kv head | group")
        return ctx.sh.primitive(split, (y,), ("batch seq kv qkv head | group",), results)

    def _turns_in_place(self, y: Tensor, ctx: Ctx) -> bool:
        """May rotary embedding and attention be one primitive, which overwrites the product y? Where it has a kernel, all
        keys are on this rank, and nobody has kept y."""
        sh = ctx.sh
        if sh.check is not None or sh.axes("seq") or (sh.tape and sh.tape.save("qkv")):
            return False
        return has_rotary_attention(y, *ctx.extras["rotary"], softcap=self.config.attention_softcap, kernel=self.kernel)

    def _qk_norm(self, p: Mapping[str, Tensor], q: Tensor, k: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
        """Norms of queries and keys, each head alone (Qwen 3, Gemma 3) or all heads together (OLMo 2)."""
        c, options = self.config, self._rms_options
        if c.qk_norm == "head":
            return rms_norm(q, p["q_norm"], **options), rms_norm(k, p["k_norm"], **options)
        if c.qk_norm == "all":
            q = rms_norm(q, p["q_norm"], dims="batch seq kv group head", sh=ctx.sh, **options)
            k = rms_norm(k, p["k_norm"], dims="batch seq kv head", sh=ctx.sh, **options)
        return q, k

    def _self_attention(self, p: Mapping[str, Tensor], q: Tensor, k: Tensor, v: Tensor, ctx: Ctx) -> Tensor:
        return context_attention(q, k, v, segments=ctx.segments, sh=ctx.sh, **self._attention_options(p, ctx))

    def _cached_attention(
        self, p: Mapping[str, Tensor], q: Tensor, k: Tensor, v: Tensor, caches: Any, ctx: Ctx
    ) -> Tensor:
        """Attention of new tokens to all cached ones; writes the new keys and values into the cache's slots."""
        assert ctx.layer is not None
        cache, (start, end) = caches[ctx.layer], ctx.extras["slots"]
        cache["k"][:, start:end], cache["v"][:, start:end] = k, v
        kv_segments = ctx.extras["kv_segments"]
        masks = {} if kv_segments is None else {"kv_segments": kv_segments[:, :end]}
        k, v = (cache[n][:, :end] for n in "kv")
        return attention(q, k, v, sh=ctx.sh, **masks, **self._attention_options(p, ctx))

    def _attention_options(self, p: Mapping[str, Tensor], ctx: Ctx) -> dict[str, Any]:
        c = self.config
        return {
            "window": ctx.extras["window"],
            "scale": c.attention_scale,
            "softcap": c.attention_softcap,
            "sinks": p.get("sinks"),
            **self._kernel,
        }

    def _experts(self, p: Mapping[str, Tensor], x: Tensor, ctx: Ctx) -> tuple[Tensor, Any]:
        """(what its experts make of each token, what the router decided)."""
        sizes = self.config.moe
        assert sizes is not None
        if "expert_bias" in p:
            ctx = ctx.replace(extras={**ctx.extras, "expert_bias": p["expert_bias"]})
        layer = moe(
            router(sizes.routing),
            mlp_experts(
                self.config.activation if self.config.activation in GATED else PLAIN[self.config.activation],
                batched=self.dispatch == PADDED,
            ),
            number=sizes.routing.experts,
            backend=self.dispatch,
        )

        def shared() -> Tensor:
            y = self._feed_forward(p, x, ctx, SHARED)
            if "shared_weight" in p:
                y = y * torch.sigmoid((x * p["shared_weight"]).sum(-1, keepdim=True))
            return y

        return layer(p, x, ctx, beside=shared if sizes.shared else None)

    def _feed_forward(self, p: Mapping[str, Tensor], x: Tensor, ctx: Ctx, prefix: str = "") -> Tensor:
        sh, activation = ctx.sh, self.config.activation
        fused, mlp = f"{prefix}gate_up" in p, f"{prefix}mlp"
        several = activation in GATED and not fused  # products that read one gathered stream
        h, seq = (sh(x, ENTER_MLP.format(mlp)), "seq") if several else (x, "seq*")

        def into(n: str, dims: str = mlp) -> Tensor:
            equation, n = f"batch {seq} embed, embed {dims} -> batch seq {dims}", f"{prefix}{n}"
            y = sh.dot(h, p[n], equation, name=n, overlap=self.overlap)
            return y + p[f"{n}_bias"] if f"{n}_bias" in p else y

        down = f"{prefix}down"
        if fused and self._one_kernel(p, x, ctx, f"{prefix}gate_up", down, mlp):
            return gated_mlp(x, p[f"{prefix}gate_up"], p[down], activation=activation)
        if fused:
            a = GATED[activation](into("gate_up", f"{mlp} gated"), dim=-1, **self._kernel)
        elif activation in GATED:
            a = GATED[activation](into("gate"), into("up"), **self._kernel)
        else:
            a = PLAIN[activation](into("up"))
        equation = f"batch seq {mlp}, {mlp} embed -> batch seq* embed"
        y = sh.dot(a, p[down], equation, name=down, overlap=self.overlap)
        return y + p[f"{down}_bias"] if f"{down}_bias" in p else y

    def _one_kernel(self, p: Mapping[str, Tensor], x: Tensor, ctx: Ctx, gate_up: str, down: str, mlp: str) -> bool:
        """May the gated MLP be one primitive? Where it has a kernel, and nobody asks for one of its products: no transform,
        no precision of its own, no bias, no sum over ranks between."""
        sh = ctx.sh
        if sh.check is not None or sh.precision.fp8 is not None or sh.axes("seq*") != sh.axes("seq"):
            return False
        if any(sh.axes(dim) for dim in ("embed", "gated", mlp)):
            return False
        if any(f"{name}_bias" in p for name in (gate_up, down)) or (sh.tape and sh.tape.wants(gate_up, down)):
            return False
        return has_kernel(x, p[gate_up], p[down], self.config.activation, kernel=self.kernel)

    def _norm(self, p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
        """The norm of this name, if the family has it."""
        if name not in p:
            return x
        if self.config.norm == "layer":
            return layer_norm(x, p[name], p[f"{name}_bias"], eps=self.config.norm_eps, **self._kernel)
        return rms_norm(x, p[name], **self._rms_options)

    def _add_and_norm(
        self, p: Mapping[str, Tensor], name: str, x: Tensor, y: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(x + y, its norm of this name, if the family has it)."""
        if name not in p:
            x = x if y is None else x + y
            return x, x
        if self.config.norm == "layer":
            return add_layer_norm(x, y, p[name], p[f"{name}_bias"], eps=self.config.norm_eps, **self._kernel)
        return add_rms_norm(x, y, p[name], **self._rms_options)

    def _dropped(self, y: Tensor, where: str, ctx: Ctx) -> Tensor:
        if not self.config.dropout or ctx.key is None:
            return y
        return dropout(
            y, self.config.dropout, fold_in(ctx.key, where), sh=ctx.sh, dims="batch seq* embed", rows=ctx.rows
        )

    @property
    def _front(self) -> list[str]:
        """The parameters that are read in front of the layers."""
        return [n for n in ("embed", "positions") if n in self._outside]

    @property
    def _head(self) -> list[str]:
        """Those that make logits of the stream."""
        return [*self._norm_spec("norm"), "embed" if self.config.tied else "head"]

    @property
    def _back(self) -> list[str]:
        """Those that are read behind them by the loss: prediction modules read embeddings too."""
        more = self.config.mtp and self.config.mtp_weight and not self.config.tied
        return [*self._head, *(["embed"] if more else [])]

    def _ahead(self, params: Mapping[str, Any], names: list[str], ctx: Ctx) -> Ahead:
        spec = self._outside
        return Ahead({n: params[n] for n in names}, {n: spec[n] for n in names}, ctx.sh)

    def _into_vocab(self, used: Mapping[str, Tensor], h: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
        """(the normed stream in the region of the vocabulary, the output matrix [vocab embed])."""
        return ctx.sh(h, ENTER_VOCAB), used["embed" if self.config.tied else "head"]


@functools.cache
def _rounded(value: float, dtype: torch.dtype) -> float:
    """A constant as its tensor in `dtype` would hold it."""
    return float(torch.tensor(value, dtype=dtype))
