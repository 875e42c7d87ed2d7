"""Rotary position embedding (Su et al. 2021): pairs of features turned by an angle that grows with the position.

A *scaling* stretches the table to longer texts than a model was trained on. It is a function
`scaling(frequencies, *, base, length) -> (frequencies, attention_factor)` of the frequencies [dim/2] in radians per
token, the fastest first: `base` is the rotary base that they come from, `length` the number of positions in use (None:
not said), and cos and sin are multiplied by attention_factor. The published ones are frozen dataclasses here, their
fields named as in Hugging Face's config.json (`original_max_position`: `original_max_position_embeddings`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from fmegatron.errors import UserError
from fmegatron.function import apply_function, readable
from fmegatron.kernels import chosen
from fmegatron.operators import custom_operator
from fmegatron.primitives._function import cast, graph_wanted, may_overwrite, operator, wide

KEPT_ELEMENTS = 1 << 18  # of a table that is kept from one call to the next

Scaled = tuple[torch.Tensor, float]


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): all positions divided by `factor`."""

    factor: float

    def __call__(self, frequencies: torch.Tensor, *, base: float, length: int | None) -> Scaled:
        return frequencies / self.factor, 1.0


@dataclass(frozen=True)
class DynamicNTKScaling:
    """A base that grows with the length in use (bloc97 and emozilla 2023): up to original_max_position nothing
    changes, beyond it slow frequencies are stretched and fast ones hardly."""

    factor: float
    original_max_position: int

    def __call__(self, frequencies: torch.Tensor, *, base: float, length: int | None) -> Scaled:
        dim = 2 * frequencies.shape[-1]
        if dim < 4:
            raise UserError(f"DynamicNTKScaling of dim={dim}: it needs at least 4 rotary features")
        length = _needed(length, "DynamicNTKScaling", self.original_max_position)
        stretch = self.factor * max(length, self.original_max_position) / self.original_max_position - (self.factor - 1)
        return frequencies * (stretch ** (dim / (dim - 2))) ** -_powers(frequencies), 1.0


@dataclass(frozen=True)
class YaRNScaling:
    """YaRN (Peng et al. 2023): frequencies with fewer than `beta_slow` turns in original_max_position tokens are
    stretched by `factor`, those with more than `beta_fast` stay, those between are blended by their index.

    attention_factor: default 0.1 ln(factor) + 1; with both mscale and mscale_all_dim (DeepSeek) the quotient of
        0.1 mscale ln(factor) + 1 and 0.1 mscale_all_dim ln(factor) + 1.
    truncate: round the two ends of the blend outwards to whole indices (GPT-OSS does not).
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __call__(self, frequencies: torch.Tensor, *, base: float, length: int | None) -> Scaled:
        half = frequencies.shape[-1]
        first, last = (self._index(turns, half, base) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        last = last if last != first else first + 0.001
        index = torch.arange(half, dtype=frequencies.dtype, device=frequencies.device)
        stretched = ((index - first) / (last - first)).clamp(0, 1)
        scaled = frequencies / self.factor * stretched + frequencies * (1 - stretched)
        return scaled, self._attention_factor()

    def _index(self, turns: float, half: int, base: float) -> float:
        """The index of the frequency that makes so many turns in original_max_position tokens."""
        return half * math.log(self.original_max_position / (turns * 2 * math.pi)) / math.log(base)

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        growth = 0.1 * math.log(self.factor) if self.factor > 1 else 0.0
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * growth + 1) / (self.mscale_all_dim * growth + 1)
        return growth + 1


@dataclass(frozen=True)
class LongRoPEScaling:
    """LongRoPE (Ding et al. 2024, Phi-3): each frequency divided by a factor of its own, `long_factor` where more than
    original_max_position positions are in use, else `short_factor` (one number per pair of features each).

    factor: the longest length divided by original_max_position, which sets the attention factor
        sqrt(1 + ln(factor) / ln(original_max_position)) unless `attention_factor` gives it.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position: int
    factor: float
    attention_factor: float | None = None

    def __call__(self, frequencies: torch.Tensor, *, base: float, length: int | None) -> Scaled:
        length = _needed(length, "LongRoPEScaling", self.original_max_position)
        name = "long_factor" if length > self.original_max_position else "short_factor"
        factors = getattr(self, name)
        if len(factors) != frequencies.shape[-1]:
            raise UserError(
                f"LongRoPEScaling({name}=…) has {len(factors)} numbers for {frequencies.shape[-1]} frequencies: give "
                "one per pair of features turned"
            )
        divisors = torch.tensor(factors, dtype=frequencies.dtype, device=frequencies.device)
        return frequencies / divisors, self._attention_factor()

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position)) if self.factor > 1 else 1.0


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low frequencies.

    Wavelengths above original_max_position / low_freq_factor tokens are stretched by `factor`, those below
    original_max_position / high_freq_factor stay, those between are blended.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __call__(self, frequencies: torch.Tensor, *, base: float, length: int | None) -> Scaled:
        wavelength = 2 * math.pi / frequencies
        smooth = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        smooth = smooth.clamp(0, 1)  # 0: a long wave, stretched; 1: a short one, kept
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies, 1.0


@dataclass(frozen=True)
class ProportionalScaling:
    """The fastest `fraction` of the frequencies, divided by `factor`, and zero for the slower ones, whose features pass
    ("proportional" in Hugging Face).

    Not the same as turning fewer features: frequencies and pairs stay those of all features.
    """

    fraction: float
    factor: float = 1.0

    def __call__(self, frequencies: torch.Tensor, *, base: float, length: int | None) -> Scaled:
        half = frequencies.shape[-1]
        turned = torch.arange(half, device=frequencies.device) < int(self.fraction * half)
        return torch.where(turned, frequencies / self.factor, 0.0), 1.0


def _needed(length: int | None, what: str, original: int) -> int:
    if length is None:
        raise UserError(
            f"{what} depends on how many positions are in use: give length= (up to {original} nothing is stretched)"
        )
    return length


def _powers(frequencies: torch.Tensor) -> torch.Tensor:
    """0, 2/dim, 4/dim, …: the exponents of the base, negated."""
    dim = 2 * frequencies.shape[-1]
    return torch.arange(0, dim, 2, dtype=torch.int64, device=frequencies.device).to(frequencies.dtype) / dim


def rotary_table(
    positions: torch.Tensor,
    dim: int,
    *,
    base: float = 10000.0,
    scaling: Any = None,
    length: int | None = None,
    dtype: torch.dtype = torch.float32,
    in_order: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions[seq] or [batch seq] -> (cos, sin), each [seq dim/2] or [batch seq dim/2]: made once a step, used by
    every layer.

    dim: the number of features turned, fewer than a head has for partial rotary.
    scaling: None, or one of this module's dataclasses or another function of that protocol. Raises UserError when it
        needs a `length`.
    length: how many positions are in use, over all ranks; only DynamicNTKScaling and LongRoPEScaling read it.
    dtype: of the result; angles are computed in fp32 (float64 if `dtype` is that) and cast last, as in Hugging Face.
    in_order: the positions are 0, 1, 2, … A small table on a CPU is then kept from one call to the next (do not write to
        it): to make one takes the host as long as a small layer.
    """
    if dim % 2 or dim <= 0:
        raise UserError(f"rotary_table(dim={dim}): features are turned in pairs, so dim must be even and positive")
    n = positions.shape[-1]
    keep = in_order and n * dim <= KEPT_ELEMENTS and type(scaling).__hash__ is not None
    if keep and readable(positions):
        return _kept_table(n, dim, base, scaling, length, dtype)
    return _table(positions, dim, base, scaling, length, dtype)


@functools.lru_cache(maxsize=16)
def _kept_table(
    n: int, dim: int, base: float, scaling: Any, length: int | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode(False):  # or no graph could keep it
        return _table(torch.arange(n, device="cpu"), dim, base, scaling, length, dtype)


def _table(
    positions: torch.Tensor, dim: int, base: float, scaling: Any, length: int | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    exact = wide(dtype)
    power = torch.arange(0, dim, 2, dtype=torch.int64, device=positions.device).to(exact) / dim
    frequencies, factor = 1.0 / base**power, 1.0
    if scaling is not None:
        frequencies, factor = scaling(frequencies, base=base, length=length)
    angle = positions.to(exact).unsqueeze(-1) * frequencies
    cos, sin = angle.cos(), angle.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype), sin.to(dtype)


def apply_rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False, kernel: str = "auto"
) -> torch.Tensor:
    """x[batch seq ... head] turned by a table of `rotary_table`; features behind its dim pass through.

    Features (i, i + dim/2) are a pair (Llama, GPT-NeoX), or with `interleaved` (2i, 2i + 1) (GPT-J, Cohere, GLM).
    Backward turns by the opposite angle and keeps the table alone. The result has x's dtype; with a table of higher
    precision the turn is computed in that.
    kernel: "triton": one pass; "torch": torch's operations; "auto": the first on CUDA (see `fmegatron.kernels`).

    Raises UserError for a table with more features than x has.
    """
    check_table(x, cos, sin)
    if _fast(kernel, cos, sin, x):
        return apply_function(_TurnByKernel, x, None, cos, sin, interleaved)[0]
    return apply_function(_Turn, x, None, cos, sin, interleaved)[0]


def apply_rotary_both(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    kernel: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_rotary` of queries and of keys, whose dims between seq and head may differ; Triton's kernel turns both in
    one pass."""
    check_table(q, cos, sin)
    check_table(k, cos, sin)
    if _fast(kernel, cos, sin, q, k) and q.shape[:2] == k.shape[:2] and q.shape[-1] == k.shape[-1]:
        return apply_function(_TurnByKernel, q, k, cos, sin, interleaved)
    if not torch.compiler.is_compiling() and torch._C._len_torch_function_stack():
        # the checking mode, for which each has a type of its own
        turned = (apply_rotary(x, cos, sin, interleaved=interleaved, kernel=kernel) for x in (q, k))
        return next(turned), next(turned)
    return apply_function(_Turn, q, k, cos, sin, interleaved)


def split_rotary(
    y: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    kernel: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y[batch seq kv qkv head], of each kv head its queries, its key and its value one behind another, ->
    (q[batch seq kv group head] turned, k[batch seq kv head] turned, v[batch seq kv head]), none of which keeps y.

    What `apply_rotary_both` gives of y's parts; Triton's kernel reads y once, and writes its gradient once.
    """
    check_table(y, cos, sin)
    if y.ndim == 5 and _fast(kernel, cos, sin, y):
        return apply_function(_SplitAndTurn, y, cos, sin, interleaved)
    q, k, v = split_qkv(y)
    q, k = apply_rotary_both(q, k, cos, sin, interleaved=interleaved, kernel=kernel)
    return q, k, v.contiguous()


def split_qkv(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y[batch seq kv qkv head] -> (q[batch seq kv group head], k[batch seq kv head], v[batch seq kv head]), views."""
    q, k, v = y.split([y.shape[3] - 2, 1, 1], 3)
    return q, k.squeeze(3), v.squeeze(3)


def check_table(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if cos.shape != sin.shape or 2 * cos.shape[-1] > x.shape[-1] or cos.ndim not in (2, 3):
        raise UserError(
            f"apply_rotary: cos of shape {tuple(cos.shape)} and sin of shape {tuple(sin.shape)} do not fit x of shape "
            f"{tuple(x.shape)}: make them with rotary_table(positions, dim), dim at most x's last dim"
        )


def _fast(kernel: str, cos: torch.Tensor, sin: torch.Tensor, *xs: torch.Tensor) -> bool:
    """Does Triton's kernel take these, with a table for each token?"""
    if not chosen("apply_rotary", kernel, *xs) or not chosen("apply_rotary", kernel, cos, sin):
        return False
    table = (*xs[0].shape[:2], cos.shape[-1])
    each = cos.shape in (table, table[1:])
    return each and xs[0].ndim >= 3 and cos.is_contiguous() and sin.is_contiguous()


def rotary(
    x: torch.Tensor,
    positions: torch.Tensor,
    *,
    base: float = 10000.0,
    dim: int | None = None,
    scaling: Any = None,
    length: int | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """x[batch seq ... head] turned by its positions ([seq] or [batch seq], global): `rotary_table` and `apply_rotary`
    in one.

    `dim` (default: all of head) is how many leading features are turned.
    """
    dim = x.shape[-1] if dim is None else dim
    cos, sin = rotary_table(positions, dim, base=base, scaling=scaling, length=length, dtype=wide(x.dtype))
    return apply_rotary(x, cos, sin, interleaved=interleaved)


class _Turn(Function):
    """(q, k or None, cos, sin, interleaved) -> (q, k) turned, or (q,); a linear map whose transpose is the turn back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> tuple[torch.Tensor, ...]:
        return _turn((q, k), cos, sin, interleaved)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, cos, sin, ctx.interleaved = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx: Any, *gs: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        if graph_wanted():
            found = apply_function(_Turn, gs[0], gs[1] if len(gs) > 1 else None, cos, -sin, ctx.interleaved)
        else:
            found = _turn(gs, cos, sin, ctx.interleaved, back=True)
        return *found, *[None] * (5 - len(found))


def _turn(
    xs: Sequence[torch.Tensor | None],
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    back: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Each x[batch seq ... head], but for None, turned by the table's angles, or back."""
    found, in_place = [], may_overwrite()
    for x in xs:
        if x is None:
            continue
        c, s = _for_pairs(cos, sin, interleaved, x.ndim - 3, back)
        turned = c.shape[-1]
        rest = x[..., turned:] if turned < x.shape[-1] else None
        part = cast(x if rest is None else x[..., :turned], c.dtype)
        # the other of each pair
        y = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else part.roll(turned // 2, -1)
        y = y.mul_(s).addcmul_(part, c) if in_place else y * s + part * c
        y = cast(y, x.dtype)
        found.append(y if rest is None else torch.cat([y, rest], -1))
    return tuple(found)


def _for_pairs(
    cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, between: int, back: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What both features of each pair are multiplied by, and what the other of the pair, with so many dims between seq and
    head. All layers turn by one table, which therefore keeps them, as an attribute of the tensor."""
    key = interleaved, between, back
    forms: dict[Any, Any] = {}
    keeps = readable(cos) and not (cos.is_inference() or sin.is_inference())
    if keeps:
        versions = cos._version, sin._version
        known = getattr(cos, "_forms", None)
        if known is None or known[0] is not sin or known[1] != versions:
            cos._forms = known = sin, versions, forms  # type: ignore[attr-defined]
        forms = known[2]
        if key in forms:
            return forms[key]
    c, s = _pairs(cos, cos, interleaved), _pairs(sin, -sin, interleaved) if back else _pairs(-sin, sin, interleaved)
    for _ in range(between):
        c, s = c.unsqueeze(-2), s.unsqueeze(-2)
    forms[key] = c, s
    return c, s


class _TurnByKernel(Function):
    """(q, k or None, cos, sin, interleaved) -> (q, k) turned, by Triton's kernel, or (q,)."""

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> tuple[torch.Tensor, ...]:
        return _turned([q] if k is None else [q, k], cos, sin, interleaved, False)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.k, cos, sin, ctx.interleaved = inputs
        ctx.k = ctx.k is not None
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx: Any, *gs: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        if graph_wanted():
            found = tuple(apply_rotary(g, cos, -sin, interleaved=ctx.interleaved, kernel="torch") for g in gs)
        else:
            found = _turned(list(gs), cos, sin, ctx.interleaved, True)
        return *found, *[None] * (5 - len(found))


class _SplitAndTurn(Function):
    """(y, cos, sin, interleaved) -> (q, k, v) of `split_rotary`, by Triton's kernel."""

    @staticmethod
    def forward(y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, ...]:
        return _turned(list(split_qkv(y)), cos, sin, interleaved, False)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, cos, sin, ctx.interleaved = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx: Any, *gs: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        if graph_wanted():
            q, k, v = gs
            q, k = apply_rotary_both(q, k, cos, -sin, interleaved=ctx.interleaved, kernel="torch")
            return torch.cat([q, k.unsqueeze(3), v.unsqueeze(3)], 3), None, None, None
        return _turned_back(*gs, cos, sin, ctx.interleaved), None, None, None


def _turned(
    xs: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, back: bool
) -> tuple[torch.Tensor, ...]:
    if torch.compiler.is_compiling():
        return tuple(torch.ops.fmegatron.turn(xs, cos, sin, interleaved, back))
    from fmegatron.kernels import rotary

    return tuple(rotary.turn(xs, cos, sin, interleaved=interleaved, back=back))


@custom_operator("fmegatron::turn")
def _turn_op(
    xs: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, back: bool
) -> list[torch.Tensor]:
    return list(_turned(xs, cos, sin, interleaved, back))


@_turn_op.register_fake
def _(
    xs: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, back: bool
) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x in xs]


@operator("fmegatron::turn_back_and_join")
def _turned_back(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """The gradient of y of those of (q, k, v)."""
    from fmegatron.kernels import rotary

    y = q.new_empty((*q.shape[:3], q.shape[3] + 2, q.shape[4]))
    rotary.turn_into(split_qkv(y), (q, k, v), cos, sin, interleaved=interleaved, back=True)
    return y


@_turned_back.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    return q.new_empty((*q.shape[:3], q.shape[3] + 2, q.shape[4]))


def has_turn(y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Has `turn_in_place` a kernel for these?"""
    return _fast("auto", cos, sin, y)


@operator("fmegatron::turn_in_place", overwrites=("y",))
def turn_in_place(y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, back: bool) -> None:
    """Turns the queries and keys of y[batch seq kv qkv head], or turns them back, where they lie; values stay."""
    parts = split_qkv(y)[:2]
    if not has_turn(y, cos, sin):
        for part, turned in zip(parts, _turn(parts, cos, sin, interleaved, back), strict=True):
            part.copy_(turned)
        return
    from fmegatron.kernels import rotary

    rotary.turn_into(parts, parts, cos, sin, interleaved=interleaved, back=back)
    if not y.is_inference():
        torch.autograd.graph.increment_version(y)  # as torch's own operations in place do


@turn_in_place.register_fake
def _(y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, back: bool) -> None:
    return None


def _pairs(a: torch.Tensor, b: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The features of which a and b hold the first and the second of each pair."""
    return torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
