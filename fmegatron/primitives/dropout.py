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


def dropout(
    x: torch.Tensor,
    rate: float,
    key: Any,
    *,
    sh: Any = None,
    dims: str = "batch seq* embed",
    sizes: dict[str, int] | None = None,
) -> torch.Tensor:
    """x[dims] with each element zeroed with probability `rate`, the others divided by 1 - rate.

    `key` is a `random.Key` (None, like a rate of 0: x itself). The bit of an element depends on the key and on its
    global position alone, so every layout drops the same ones. `sizes` gives the global size of each sharded dim, by
    its name. Backward makes the
    mask again: nothing of x's size is kept.
    """
    if not 0 <= rate < 1:
        raise UserError(f"dropout(rate={rate}): the rate is a probability, at least 0 and below 1")
    if key is None or rate == 0:
        return x
    names = dims.split()
    if len(names) != x.ndim:
        raise UserError(f"dropout(dims={dims!r}) names {len(names)} dims, x has {x.ndim}: name each dim of x")
    shape: list[int] = []
    index: list[torch.Tensor | None] = []
    for name, local in zip(names, x.shape, strict=True):
        if not sharded(sh, name):
            shape.append(local)
            index.append(None)
            continue
        shape.append(global_size(sh, name, local, (sizes or {}).get(name, (sizes or {}).get(base(name))), "dropout"))
        index.append(sh.index(name, shape[-1], device=x.device))
    if sh is None:
        return _drop(x, rate, key, tuple(shape), tuple(index))
    return sh.primitive(lambda x: _drop(x, rate, key, tuple(shape), tuple(index)), (x,), (dims,), dims)


def _drop(
    x: torch.Tensor, rate: float, key: random.Key, shape: tuple[int, ...], index: tuple[torch.Tensor | None, ...]
) -> torch.Tensor:
    words = None if isinstance(key.words, torch.Tensor) else tuple(key.words)
    held = tuple(i is not None for i in index)
    tensors = [t for t in index if t is not None]
    if isinstance(key.words, torch.Tensor):
        tensors = [key.words, *tensors]
    return apply_function(_Dropout, x, (rate, shape, held, words), *tensors)


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
        index = [next(given) if h else None for h in held]
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
