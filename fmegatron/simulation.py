"""All ranks of an SPMD program in one process: the only module that touches torch's private `_local_tensor`.

    with simulate(8):
        mesh = make_mesh("dp=2,tp=4")
        ...                          # tensors made from sharded ones hold one value per rank

Collectives work, point-to-point does not. Values may differ by rank, Python cannot: nothing may branch on a rank,
a value or a local size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# Meshes made inside a simulation stay alive until it ends: the mode caches coordinates by id(mesh), and a mesh that was
# freed would pass its coordinates on to the next one at the same address.
_alive: list[Any] = []


def simulating() -> bool:
    """Does this code run inside `simulate`?"""
    return any(type(mode).__name__ == "LocalTensorMode" for mode in _get_current_dispatch_mode_stack())


def is_local(x: Any) -> bool:
    """Is x a simulated tensor, which holds one value per rank?"""
    return type(x).__name__ == "LocalTensor"


@contextlib.contextmanager
def simulate(world: int) -> Iterator[None]:
    """Run the body as `world` ranks at once, on CPU or on one GPU. Must not be nested, nor used beside real
    processes."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if simulating():
        raise RuntimeError("simulate() inside simulate(): leave the outer one first")
    if dist.is_initialized():
        raise RuntimeError("simulate() needs a process without a process group; call destroy_process_group() first")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        with LocalTensorMode(world):
            yield
    finally:
        _alive.clear()
        dist.destroy_process_group()


def keep_alive(mesh: Any) -> None:
    """Keep a mesh until the simulation ends (see `_alive`)."""
    if simulating():
        _alive.append(mesh)


def lift(x: torch.Tensor, world: int) -> torch.Tensor:
    """A plain tensor as a simulated one with the same value on every rank.

    In a simulation a collective of a plain tensor silently returns its input, so `sh` lifts before every collective.
    """
    if is_local(x):
        return x
    from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode

    with maybe_disable_local_tensor_mode():
        return LocalTensor({rank: x.detach().clone() for rank in range(world)})


def per_rank(x: torch.Tensor) -> list[torch.Tensor]:
    """The values of a simulated tensor, by rank; a plain tensor counts as one rank."""
    return [x._local_tensors[r] for r in sorted(x._local_tensors)] if is_local(x) else [x]  # type: ignore[attr-defined]


def from_ranks(x: torch.Tensor, sources: Sequence[int]) -> torch.Tensor:
    """A simulated tensor whose value on rank r is what x is on rank sources[r]: messages from rank to rank."""
    from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode

    with maybe_disable_local_tensor_mode():
        return LocalTensor({r: x._local_tensors[s].clone() for r, s in enumerate(sources)})  # type: ignore[attr-defined]


def on_each_rank(f: Callable[..., Sequence[torch.Tensor]], world: int, *args: Any) -> tuple[torch.Tensor, ...]:
    """f(rank, *args) rank by rank, where it may branch on the rank; args are tensors or None. Without a graph."""
    from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode

    with maybe_disable_local_tensor_mode():
        runs = [f(r, *(x._local_tensors[r] if is_local(x) else x for x in args)) for r in range(world)]
        return tuple(LocalTensor(dict(enumerate(values))) for values in zip(*runs, strict=True))


def each_rank(f: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    """f(*args) rank by rank where an argument is simulated: much faster than through the dispatcher for an f of many
    operations.

    Without a graph: for use inside a Function, where gradients are not recorded.
    """
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active() or not all(is_local(x) for x in args):
        return f(*args)
    from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode

    ranks = next(sorted(x._local_tensors) for x in args if is_local(x))  # type: ignore[attr-defined]
    with maybe_disable_local_tensor_mode():
        return LocalTensor({r: f(*(x._local_tensors[r] if is_local(x) else x for x in args)) for r in ranks})  # type: ignore[attr-defined]
