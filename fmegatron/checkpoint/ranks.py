"""Doing one thing on all ranks and failing on all of them alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fmegatron.errors import UserError
from fmegatron.simulation import simulating

T = TypeVar("T")


def distributed() -> bool:
    """Does this program run on several ranks?"""
    return dist.is_available() and dist.is_initialized()


def is_first() -> bool:
    """Is this rank 0 (or the only one)?"""
    return not distributed() or dist.get_rank() == 0


def together(f: Callable[[], T]) -> list[T]:
    """f() on every rank, and every rank's result by rank. Results must be small and picklable.

    Where f raises on one rank it raises on all: the same error where it arose, elsewhere a UserError if it was one,
    else a RuntimeError that names the rank. Without this the other ranks would wait for ever in their next collective.
    """
    if simulating():
        raise UserError("checkpoints and exports are not made inside simulate(): use real processes")
    error: Exception | None = None
    result: Any = None
    try:
        result = f()
    except Exception as e:
        error = e
    if not distributed():
        if error is not None:
            raise error
        return [result]
    failure = None
    if error is not None:
        failure = (isinstance(error, UserError), str(error), type(error).__name__)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (result, failure))
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(everyone):
        if failure is not None:
            by_user, message, name = failure
            raise UserError(message) if by_user else RuntimeError(f"rank {rank} failed: {name}: {message}")
    return [result for result, _ in everyone]


def on_first(f: Callable[[], T]) -> T:
    """f() on rank 0 only; every rank returns its result, or raises if it raised."""
    return together(lambda: f() if is_first() else None)[0]  # type: ignore[return-value]
