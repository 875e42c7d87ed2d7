"""An optimizer is a pair of pure functions; `chain` joins several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fmegatron.capturing import numbers, recording
from fmegatron.errors import UserError

Rate = float | Callable[[int], float]


@dataclass(frozen=True)
class Optimizer:
    """init(params) -> state; update(params, grads, state, *, donate=False, grad_norm=None) -> (params, grads, state).

    grad_norm: the norm of `grads`, if the caller has it already (clipping then need not compute it).
    name: the key of the piece's state in a chain, hence part of checkpoint names.
    rate: the learning rate, for reports (None for a piece that has none).
    rounds: does `update` take `rounding=` too, by which `with_stochastic_rounding` rounds what it writes?
    casts: does `update` take `copies=` too, a tree like the parameters of buffers (or None) to which it writes the new
        parameters as well, in the buffers' dtypes? So `with_master` needs no pass of its own.
    writes: may `update` change the parameters?
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any, Any]]
    name: str = ""
    rate: Rate | None = None
    rounds: bool = False
    casts: bool = False
    writes: bool = True


def chain(*pieces: Optimizer) -> Optimizer:
    """One optimizer of several: each piece gets what the one before it returned.

    State: {name of the piece: its state}, numbered where a piece has no name or shares it. `grad_norm` reaches every
    piece, so it is the norm of the gradients that came in. Raises `UserError` without a piece.
    """
    if not pieces:
        raise UserError("chain needs at least one optimizer, such as chain(clip_by_global_norm(1.0), adamw(1e-3))")
    names = [p.name for p in pieces]
    keys = [n if n and names.count(n) == 1 else f"{n}{i}" for i, n in enumerate(names)]

    def init(params: Any) -> dict[str, Any]:
        return {key: piece.init(params) for key, piece in zip(keys, pieces, strict=True)}

    def update(params: Any, grads: Any, state: Any, **options: Any) -> Any:
        new = {}
        for key, piece in zip(keys, pieces, strict=True):
            params, grads, new[key] = updated(piece, params, grads, state[key], options)
        return params, grads, new

    writing = [p for p in pieces if p.writes]
    casts = len(writing) == 1 and writing[0].casts
    return Optimizer(init, update, rate=first_rate(pieces), rounds=any(p.rounds for p in pieces), casts=casts)


def updated(piece: Optimizer, params: Any, grads: Any, state: Any, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A piece's update with the options that it takes."""
    takes = {"rounding": piece.rounds, "copies": piece.casts}
    return piece.update(params, grads, state, **{k: v for k, v in options.items() if takes.get(k, True)})


def first_rate(pieces: Any) -> Rate | None:
    """The rate that a combination reports: that of the first piece which has one."""
    return next((p.rate for p in pieces if p.rate is not None), None)


# Arguments


def rate_at(lr: Rate | None, count: Any) -> Any:
    """The rate after `count` updates; in a recorded step, where the count is a tensor, a 0-d tensor of it."""
    if not callable(lr):
        return lr
    if isinstance(count, Tensor) and recording() is not None:
        return numbers(lambda n: (lr(n),), count)[0]
    return lr(count)


def check_rate(name: str, lr: Rate) -> None:
    """Raises `UserError` for a negative number; schedules check themselves, tensors are not read."""
    if not callable(lr) and not isinstance(lr, Tensor):
        check_not_negative(name, lr=lr)


def check_not_negative(name: str, **values: float) -> None:
    """Raises `UserError` for a value that is negative or no number."""
    for argument, value in values.items():
        if not value >= 0:
            raise UserError(f"{name} needs {argument} of at least 0, but got {argument}={value}")


def check_fractions(name: str, **values: Any) -> None:
    """Raises `UserError` for a value, or one of a tuple, outside [0, 1)."""
    for argument, value in values.items():
        if not all(0 <= v < 1 for v in (value if isinstance(value, tuple) else (value,))):
            raise UserError(f"{name} needs {argument} in [0, 1), but got {argument}={value}")
