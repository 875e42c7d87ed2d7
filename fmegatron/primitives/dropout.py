"""Dropout whose mask is a function of a key and of global positions, hence the same on every mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from fmegatron import random
from fmegatron.errors import UserError
from fmegatron.function import apply_function
from fmegatron.primitives._function import global_size, graph_wanted, sharded
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
    if key is None or rate == 0:
        return x
    names = dims.split()
    if len(names) != x.ndim:
        raise UserError(f"dropout(dims={dims!r}) names {len(names)} dims, x has {x.ndim}: name each dim of x")
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

    def drop(x: torch.Tensor) -> torch.Tensor:
        return _drop(x, rate, key, tuple(shape), tuple(index))

    return drop(x) if sh is None else sh.primitive(drop, (x,), (dims,), dims)


def _drop(
    x: torch.Tensor, rate: float, key: random.Key, shape: tuple[int, ...], index: tuple[torch.Tensor | None, ...]
) -> torch.Tensor:
    words = None if isinstance(key.words, torch.Tensor) else tuple(key.words)
    held = tuple(i is not None for i in index)
    tensors = [t for t in index if t is not None]
    if isinstance(key.words, torch.Tensor):
        tensors = [key.words, *tensors]
    return apply_function(_Dropout, x, (rate, shape, held, words), *tensors)


def _first(n: int, size: int, device: torch.device) -> torch.Tensor | None:
    """The index of the first n positions of a dim that counts as `size` long; None where these are all."""
    return None if n == size else torch.arange(n, device=device)


class _Dropout(Function):
    """(x, (rate, global shape, which dims have an index, key unless a tensor), key if a tensor, indices…) -> x dropped.

    A linear map of x, its own transpose.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, static: Any, *tensors: torch.Tensor) -> torch.Tensor:
        rate, shape, held, words = static
        if words is None:
            words, *tensors = tensors  # type: ignore[assignment]
        given = iter(tensors)
        index = [
            next(given) if h else _first(n, size, x.device) for h, n, size in zip(held, x.shape, shape, strict=True)
        ]
        keep = random.bernoulli(random.Key(words), 1 - rate, shape, index=index, device=x.device)
        return torch.where(keep, x * (1 / (1 - rate)), 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.static, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors
        if graph_wanted():
            gx = apply_function(_Dropout, g, ctx.static, *tensors)
        else:
            gx = _Dropout.forward(g, ctx.static, *tensors)
        return gx, None, *[None] * len(tensors)
