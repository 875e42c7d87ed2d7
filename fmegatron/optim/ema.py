"""A moving average of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.dtensor import DTensor
from fmegatron.errors import UserError
from fmegatron.optim.apply import apply
from fmegatron.optim.core import Optimizer
from fmegatron.optim.leaves import local_of, no_grad, wide, wrapped, zeros_of

WARMING = 10  # TensorFlow's ExponentialMovingAverage(num_updates=…)


def ema(decay: float | Callable[[int], float] = 0.9999, *, warmup: bool = False, debias: bool = False) -> Optimizer:
    """Keeps an exponential moving average of the weights; `ema_params(state)` reads it. Changes nothing else.

    Put it behind the piece that updates: chain(adamw(3e-4), ema(0.9999)), inside of `with_master` to average the master
    copies. After each update: average <- decay * average + (1 - decay) * parameters, in float32 (float64 for float64
    parameters), beginning at the parameters that `init` got, as torch.optim.swa_utils.get_ema_avg_fn does.

    decay: in [0, 1), or a function of the number of updates made before.
    warmup: decay is min(decay, (1 + t) / (10 + t)) at update t = 0, 1, …, so that early weights are soon forgotten.
    debias: begin at zero and divide by the sum of the weights when reading, as Adam does: the first weights count
        nothing.

    State: {"count", "ema"}, and "left" with debias: the product of all decays. Raises `UserError` for a decay
    outside [0, 1).
    """
    if not callable(decay) and not 0 <= decay < 1:
        raise UserError(f"ema needs a decay in [0, 1), but got decay={decay}")

    def init(params: Any) -> dict[str, Any]:
        if debias:
            return {"count": 0, "ema": tree.tree_map(zeros_of, params), "left": 1.0}
        with no_grad():
            return {"count": 0, "ema": tree.tree_map(_copy, params)}

    def update(params: Any, grads: Any, state: Any, *, donate: bool = False, grad_norm: Any = None) -> Any:
        count = state["count"]
        kept = decay(count) if callable(decay) else decay
        kept = min(kept, (1 + count) / (WARMING + count)) if warmup else kept

        def plain(own: None, average: Tensor, p: Tensor) -> tuple[Tensor]:
            return (torch.lerp(average, p.to(average.dtype), 1 - kept),)

        def kernel(own: None, average: list[Tensor], p: list[Tensor]) -> None:
            torch._foreach_lerp_(average, p, 1 - kept)

        # frozen parameters are averaged too, whatever their gradients
        trees = {"params": state["ema"], "grads": params}
        new = apply(trees, [None] * len(tree.leaves(params)), plain, kernel, donate, written=("params",))
        left = {"left": state["left"] * kept} if debias else {}
        return params, grads, {"count": count + 1, "ema": new["params"], **left}

    return Optimizer(init, update, "ema", writes=False)


def _copy(p: Any) -> Any:
    if not tree.is_float(p):
        return None
    return wrapped(local_of(p).to(wide(p), copy=True, memory_format=torch.contiguous_format), p)


def ema_params(state: Any, *, like: Any = None) -> Any:
    """The averaged weights in an optimizer's state, wherever its `ema` is: a tree like the parameters.

    like: parameters whose dtypes and placements the averages get; their leaves stand in where there is no average (integer leaves).
    With debias the averages are divided by the sum of their weights (before the first update they are zero). Without
    either the result shares the state's buffers, which a later donated update overwrites.

    Raises `UserError` unless exactly one `ema` is in the state.
    """
    found = list(_states(state))
    if len(found) != 1:
        raise UserError(
            f"ema_params needs the state of one ema, but found {len(found)}: "
            "give the state of an optimizer such as chain(adamw(3e-4), ema(0.9999))"
        )
    (own,) = found
    weight = 1 - own["left"] if "left" in own and own["count"] else 1.0

    def read(average: Any, p: Any = None) -> Any:
        if average is None:
            return p
        local = local_of(average) / weight if weight != 1.0 else local_of(average)
        found = wrapped(local.to(p.dtype) if p is not None else local, average)
        if isinstance(p, DTensor) and isinstance(found, DTensor) and found.placements != p.placements:
            found = found.redistribute(p.device_mesh, p.placements)  # the state is cut further: ZeRO-1 and -2
        return found

    with no_grad():
        return tree.tree_map(read, own["ema"], *([] if like is None else [like]))


def _states(state: Any) -> Any:
    if isinstance(state, dict):
        if "ema" in state and "count" in state:
            yield state
        else:
            for value in state.values():
                yield from _states(value)
