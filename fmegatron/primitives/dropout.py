"""Dropout and multiplicative noise, by a key and global positions, hence the same on every mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from fmegatron import random
from fmegatron.errors import UserError
from fmegatron.function import apply_function
from fmegatron.primitives._function import cast, global_size, graph_wanted, sharded, wide
from fmegatron.rules import base

# Stands for the size of a leading dim whose global positions are given. What it is changes no number.
ANY_BATCH = 1 << 31
# Stands for the length of a sequence, which a layout may fill up to one that it can cut: the bits of an element may not
# depend on that. Longer sequences count as so many times longer ones.
ANY_SEQ = 1 << 20


def dropout(
    x: torch.Tensor,
    rate: float,
    key: random.Key | None,
    *,
    sh: Any = None,
    dims: str = "batch seq* embed",
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """x[dims] with each element zeroed with probability `rate`, the others divided by 1 - rate.

    The bit of an element depends on the key and on its global position alone, so every layout drops the same ones.
    Backward makes the mask again: nothing of x's size is kept.

    key: None, like a rate of 0, gives x itself.
    rows: int[batch], the global positions of the rows that x holds of its first dim, where these are not those of
        `sh.index` (a microbatch).

    Raises UserError for a rate outside of [0, 1) or dims that do not fit.
    """
    if not 0 <= rate < 1:
        raise UserError(f"dropout(rate={rate}): the rate is a probability, at least 0 and below 1")
    return _by_position("dropout", x, rate, key, sh, dims, rows)


def jittered(
    x: torch.Tensor,
    eps: float,
    key: random.Key | None,
    *,
    sh: Any = None,
    dims: str = "batch seq* embed",
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """x[dims] with each element multiplied by a number that is uniform in [1 - eps, 1 + eps], as for a router's input (Fedus
    et al., arXiv 2101.03961). key, rows: as for `dropout`. Raises UserError for an eps outside of [0, 1) or dims that do
    not fit."""
    if not 0 <= eps < 1:
        raise UserError(f"jitter={eps}: noise in [1 - jitter, 1 + jitter] takes a jitter of 0 or more and below 1")
    return _by_position("jitter", x, eps, key, sh, dims, rows)


def _by_position(
    kind: str, x: torch.Tensor, amount: float, key: random.Key | None, sh: Any, dims: str, rows: torch.Tensor | None
) -> torch.Tensor:
    """x through one of `FACTORS`, which draws by key and global position."""
    if key is None or amount == 0:
        return x
    names = dims.split()
    if len(names) != x.ndim:
        raise UserError(f"{kind}(dims={dims!r}) names {len(names)} dims, x has {x.ndim}: name each dim of x")
    shape: list[int] = list(x.shape)
    index: list[torch.Tensor | None] = [None] * x.ndim
    for dim, name in enumerate(names):
        if dim == 0 and rows is not None:
            shape[0], index[0] = ANY_BATCH, rows
        elif sharded(sh, name):
            shape[dim] = global_size(sh, name, x.shape[dim])
            index[dim] = sh.index(name, shape[dim], device=x.device)
        if base(name) == "seq":
            shape[dim] = -(-shape[dim] // ANY_SEQ) * ANY_SEQ
    words = None if isinstance(key.words, torch.Tensor) else tuple(key.words)
    held = tuple(i is not None for i in index)
    tensors = [t for t in index if t is not None]
    if isinstance(key.words, torch.Tensor):
        tensors = [key.words, *tensors]

    def multiplied(x: torch.Tensor) -> torch.Tensor:
        return apply_function(_Noise, x, (kind, amount, tuple(shape), held, words), *tensors)

    return multiplied(x) if sh is None else sh.primitive(multiplied, (x,), (dims,), dims)


def _first(n: int, size: int, device: torch.device) -> torch.Tensor | None:
    """The index of the first n positions of a dim that counts as `size` long; None where these are all."""
    return None if n == size else torch.arange(n, device=device)


def _dropped(x: torch.Tensor, rate: float, key: random.Key, shape: Any, index: Any) -> torch.Tensor:
    keep = random.bernoulli(key, 1 - rate, shape, index=index, device=x.device)
    return torch.where(keep, x * (1 / (1 - rate)), 0)


def _shaken(x: torch.Tensor, eps: float, key: random.Key, shape: Any, index: Any) -> torch.Tensor:
    dtype = wide(x.dtype)
    noise = random.uniform(key, shape, low=1 - eps, high=1 + eps, index=index, dtype=dtype, device=x.device)
    return cast(x.to(dtype) * noise, x.dtype)


FACTORS = {"dropout": _dropped, "jitter": _shaken}


class _Noise(Function):
    """(x, (kind, amount, global shape, which dims have an index, key unless a tensor), key if a tensor, indices…) -> x times
    its factors.

    A linear map of x, its own transpose.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, static: Any, *tensors: torch.Tensor) -> torch.Tensor:
        kind, amount, shape, held, words = static
        if words is None:
            words, *tensors = tensors  # type: ignore[assignment]
        given = iter(tensors)
        index = [
            next(given) if h else _first(n, size, x.device) for h, n, size in zip(held, x.shape, shape, strict=True)
        ]
        return FACTORS[kind](x, amount, random.Key(words), shape, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.static, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors
        if graph_wanted():
            gx = apply_function(_Noise, g, ctx.static, *tensors)
        else:
            gx = _Noise.forward(g, ctx.static, *tensors)
        return gx, None, *[None] * len(tensors)
