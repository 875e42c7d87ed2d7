"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1): keys and values come of a narrow latent.

    q_latent = norm(x W_q_down)                     latent, rope = x W_kv_down;  latent = norm(latent)
    q = q_latent W_q_up                             key, value = latent W_kv_up        of each head
    scores = q · [key, rope key] · scale            the rope key is one for all heads; rotary positions turn it and the
                                                    last features of q alone

In training keys and values are expanded to heads, so that any kernel, and any way of context parallelism, takes them.
In generation the cache holds latent and rope key alone, and W_kv_up is absorbed: its keys' half into the queries, its
values' half into the result, by which all heads attend to one "head" of the latent's width. The two are equal but for
rounding.

The down products and their norms are on the stream, between regions: of the two latents and not of the stream the
tokens are gathered where sequence parallelism cuts them.

Leaves: q_down [embed q_latent], q_down_norm, q_up [q_latent kv group head], or without a latent q [embed kv group head];
kv_down [embed latent_rope], whose last features are the rope key; kv_down_norm [kv_latent]; kv_up [kv_latent kv
nope_value], per head its key and then its value; o [kv group value embed]. `kv` counts the heads, `group` is 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fmegatron.context import Ctx
from fmegatron.initializers import Normal, Ones, Zeros
from fmegatron.models.config import MLA, DecoderConfig
from fmegatron.parallel.context import context_attention
from fmegatron.primitives import apply_rotary_both, attention, rms_norm
from fmegatron.spec import Param

QUERIES = "batch seq kv group head"


def spec(config: DecoderConfig) -> dict[str, Param]:
    """The leaves of one layer's attention."""
    m = _sizes(config)
    std, out = Normal(config.init_std), Normal(config.init_std / math.sqrt(2 * config.layers))
    ones = Zeros() if config.norm_zero_centred else Ones()
    stream, token, per_kv = "batch seq*", "batch seq", "batch seq group"
    heads = (config.kv_heads, config.group)

    def down(name: str, width: int, dim: str) -> dict[str, Param]:
        found = {name: Param((config.embed, width), f"embed {dim}", std, over=stream)}
        return found | ({f"{name}_bias": Param((width,), dim, Zeros(), over=stream)} if config.qkv_bias else {})

    found: dict[str, Param] = {}
    if m.q_rank is None:
        found["q"] = Param((config.embed, *heads, m.head), "embed kv group head", std, over=token)
    else:
        found |= down("q_down", m.q_rank, "q_latent")
        found["q_down_norm"] = Param((m.q_rank,), "q_latent", ones, over=stream)
        found["q_up"] = Param((m.q_rank, *heads, m.head), "q_latent kv group head", std, over=token)
    found |= down("kv_down", m.kv_rank + m.rope, "latent_rope")
    found["kv_down_norm"] = Param((m.kv_rank,), "kv_latent", ones, over=stream)
    found["kv_up"] = Param((m.kv_rank, heads[0], m.nope + m.value), "kv_latent kv nope_value", std, over=per_kv)
    if config.sinks:
        found["sinks"] = Param(heads, "kv group", Zeros(), over=token, decay=False)
    found["o"] = Param((*heads, m.value, config.embed), "kv group value embed", out, over=token)
    if config.out_bias:
        found["o_bias"] = Param((config.embed,), "embed", Zeros(), over=stream)
    return found


def attend(
    p: Mapping[str, Tensor],
    x: Tensor,
    config: DecoderConfig,
    ctx: Ctx,
    *,
    cache: Any = None,
    overlap: int = 0,
    kernel: Mapping[str, Any] | None = None,
) -> Tensor:
    """The normed stream x[batch seq* embed] -> what the heads read of each other, [batch seq kv group head], in front
    of `o`; a head has the size of a value.

    ctx.extras: "rotary", the tables of rope's features, and "window". cache: of all layers, as `make_cache` makes them;
    then ctx.extras also has "slots", the (start, end) of the new tokens in it, which are written there, and
    "kv_segments". overlap: see `sh.dot`. kernel: {"kernel": …} for primitives that take it.
    """
    m, kernel = _sizes(config), kernel or {}
    norm = {
        "eps": m.norm_eps,
        "zero_centred": config.norm_zero_centred,
        "wide_weight": config.norm_wide_weight,
        **kernel,
    }
    q = _queries(p, x, ctx, overlap, norm)
    latent, rope = _latents(p, x, m, ctx, norm)
    q_rope, rope = apply_rotary_both(
        q[..., m.nope :], rope, *ctx.extras["rotary"], interleaved=config.rope_interleaved, **kernel
    )
    options = {"window": ctx.extras["window"], "softcap": config.attention_softcap, "scale": scale_of(config), **kernel}
    if cache is None:
        k, v = _expanded(p, latent, rope, m, ctx, overlap)
        o = context_attention(
            *_of_one_size(torch.cat([q[..., : m.nope], q_rope], -1), k, v),
            segments=ctx.segments,
            sinks=p.get("sinks"),
            sh=ctx.sh,
            **options,
        )
        return o[..., : m.value]
    assert ctx.layer is not None
    held, (start, end) = cache[ctx.layer]["latent"], ctx.extras["slots"]
    entered = ctx.sh(latent, "batch seq* kv_latent -> batch seq kv_latent | kv group")
    held[:, start:end] = torch.cat([entered, rope], -1)
    kv_segments = ctx.extras["kv_segments"]
    masks = {} if kv_segments is None else {"kv_segments": kv_segments[:, :end]}
    if start == 0:  # a prompt, of which expanded heads cost fewer operations
        k, v = _expanded(p, latent, rope, m, ctx, overlap)
        q, k, v = _of_one_size(torch.cat([q[..., : m.nope], q_rope], -1), k, v)
        return attention(q, k, v, sinks=p.get("sinks"), sh=ctx.sh, **masks, **options)[..., : m.value]
    return _absorbed(p, q[..., : m.nope], q_rope, held[:, :end], m, ctx, {**masks, **options})


def make_cache(
    config: DecoderConfig,
    rows: int,
    slots: int,
    *,
    layers: int,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
) -> dict[int, Any]:
    """Room for the latents and rope keys of `slots` tokens of each row: {layer: {"latent": [rows, slots, latent_rope]}}."""
    m = _sizes(config)
    shape = (rows, slots, m.kv_rank + m.rope)
    return {i: {"latent": torch.zeros(shape, dtype=dtype, device=device)} for i in range(layers)}


def scale_of(config: DecoderConfig) -> float:
    """By what scores are multiplied."""
    return _sizes(config).head ** -0.5 if config.attention_scale is None else config.attention_scale


def matrix_elements(config: DecoderConfig) -> int:
    """Elements of one layer's attention matrices, which each token meets."""
    return sum(p.numel for n, p in spec(config).items() if len(p.shape) > 1 and n != "sinks")


def _sizes(config: DecoderConfig) -> MLA:
    assert config.mla is not None
    return config.mla


def _queries(p: Mapping[str, Tensor], x: Tensor, ctx: Ctx, overlap: int, norm: Mapping[str, Any]) -> Tensor:
    """Queries[batch seq kv group head], without positions."""
    sh, into = ctx.sh, f"kv group head -> {QUERIES}"
    if "q" in p:
        return sh.dot(x, p["q"], f"batch seq* embed, embed {into}", name="q", overlap=overlap)
    latent = rms_norm(_down(p, "q_down", "q_latent", x, ctx), p["q_down_norm"], **norm)
    return sh.dot(latent, p["q_up"], f"batch seq* q_latent, q_latent {into}", name="q_up", overlap=overlap)


def _latents(p: Mapping[str, Tensor], x: Tensor, m: MLA, ctx: Ctx, norm: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(the normed latent of keys and values[batch seq* kv_latent], on the stream; the rope key[batch seq head], in the
    region of heads, without positions)."""
    latent, rope = _down(p, "kv_down", "latent_rope", x, ctx).split([m.kv_rank, m.rope], -1)
    latent = rms_norm(latent, p["kv_down_norm"], **norm)
    return latent, ctx.sh(rope, "batch seq* head -> batch seq head | kv group")


def _down(p: Mapping[str, Tensor], name: str, dim: str, x: Tensor, ctx: Ctx) -> Tensor:
    y = ctx.sh.dot(x, p[name], f"batch seq* embed, embed {dim} -> batch seq* {dim}", name=name)
    return y + p[f"{name}_bias"] if f"{name}_bias" in p else y


def _expanded(
    p: Mapping[str, Tensor], latent: Tensor, rope: Tensor, m: MLA, ctx: Ctx, overlap: int
) -> tuple[Tensor, Tensor]:
    """Keys and values[batch seq kv head] of a latent[batch seq* kv_latent] and a turned rope key[batch seq head]."""
    sh, heads = ctx.sh, "batch seq kv head | group"
    equation = f"batch seq* kv_latent, kv_latent kv head -> {heads}"
    y = sh.dot(latent, p["kv_up"], equation, name="kv_up", overlap=overlap)

    def keys_and_values(y: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        key, value = y.split([m.nope, m.value], -1)
        return torch.cat([key, rope.unsqueeze(2).expand(-1, -1, y.shape[2], -1)], -1), value

    return sh.primitive(keys_and_values, (y, rope), (heads, "batch seq head | kv group"), (heads, heads))


def _of_one_size(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With zeros behind the shorter ones, which change nothing: kernels of attention take one size of head."""
    size = max(k.shape[-1], v.shape[-1])
    q, k, v = (functional.pad(t, (0, size - t.shape[-1])) if t.shape[-1] < size else t for t in (q, k, v))
    return q, k, v


def _absorbed(
    p: Mapping[str, Tensor], q: Tensor, q_rope: Tensor, held: Tensor, m: MLA, ctx: Ctx, options: Mapping[str, Any]
) -> Tensor:
    """Attention of q[batch seq kv group head], of which the rope part is apart, to held[batch kvseq latent_rope]: every
    head reads the same keys, the latents with their rope keys, and as values the latents."""
    sh, (key_half, value_half) = ctx.sh, p["kv_up"].split([m.nope, m.value], -1)
    q = sh.dot(q, key_half, f"{QUERIES}, kv_latent kv head -> batch seq kv group kv_latent", name="absorbed_q")
    q = torch.cat([q, q_rope], -1)
    heads = q.shape[2:4]
    sinks = p["sinks"].reshape(1, -1) if "sinks" in p else None
    one = held.unsqueeze(2)
    o = attention(q.flatten(2, 3).unsqueeze(2), one, one, sinks=sinks, **options)
    o = o[..., : m.kv_rank].squeeze(2).unflatten(2, heads)
    return sh.dot(o, value_half, f"batch seq kv group kv_latent, kv_latent kv head -> {QUERIES}", name="absorbed_v")
