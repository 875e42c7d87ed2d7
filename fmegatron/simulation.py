"""All ranks of an SPMD program in one process: the only module that touches torch's private `_local_tensor`.

    with simulate(8):
        mesh = make_mesh("dp=2,tp=4")
        ...                          # tensors made from sharded ones hold one value per rank

Collectives work, point-to-point does not. Values may differ by rank, Python cannot: nothing may branch on a rank,
a value or a local size.
"""

from __future__ import annotations

import contextlib
import functools
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
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(type(mode).__name__ in _MODES for mode in _get_current_dispatch_mode_stack())


def is_local(x: Any) -> bool:
    """Is x a simulated tensor, which holds one value per rank?"""
    return type(x).__name__ == "LocalTensor"


@contextlib.contextmanager
def simulate(world: int) -> Iterator[None]:
    """Run the body as `world` ranks at once, on CPU or on one GPU. Must not be nested, nor used beside real
    processes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if simulating():
        raise RuntimeError("simulate() inside simulate(): leave the outer one first")
    if dist.is_initialized():
        raise RuntimeError("simulate() needs a process without a process group; call destroy_process_group() first")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        # One thread for the backward, on a GPU too: modes belong to threads.
        with _mode()(world), torch.autograd.set_multithreading_enabled(False):
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


# ------------------------------------------------------------------------------------------------- operations by rank
#
# torch's mode flattens the arguments of every operation anew for every rank, saves and sets the state of all random
# generators around each, and makes two more modes for a view: four fifths of a simulated step. What nearly all
# operations are, functions of tensors without random numbers, takes a shorter way here; the rest is torch's.

_QUESTIONS = ("sym_stride", "sym_storage_offset", "sym_numel", "is_contiguous", "is_non_overlapping_and_dense")
_MODES = ("LocalTensorMode", "ByRank")


@functools.cache
def _mode() -> Any:
    """The class of the mode of a simulation."""
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten

    class Sizes(TorchDispatchMode):
        """Answers what `_functionalize_unsafe_set` asks of a simulated tensor whose ranks' have one size."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(next(iter(args[0]._local_tensors.values())), *args[1:], **(kwargs or {}))

    # Its constructor's work can be done here as long as this is all that it keeps.
    quick = getattr(LocalTensor, "__slots__", None) == ["_local_tensors", "_ranks", "_size"]
    refuse_pointer = getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)

    def joined(values: dict[int, torch.Tensor]) -> Any:
        """A simulated tensor of those of all ranks: as `LocalTensor` makes it, which compares them dim by dim."""
        first, *rest = values.values()
        shape, strides = first.shape, first.stride()
        alike = all(t.shape == shape and t.stride() == strides and t.dtype == first.dtype for t in rest)
        if not (quick and alike) or first.layout != torch.strided or first.is_conj() or first.is_neg():
            return LocalTensor(values)
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            LocalTensor,
            shape,
            strides=strides,
            dtype=first.dtype,
            device=first.device,
            dispatch_sizes_strides_policy="sizes",
        )
        if refuse_pointer is not None:
            refuse_pointer(made)  # an error, where a kernel would read what is not there
        made._local_tensors, made._ranks, made._size = values, frozenset(values), list(shape)
        return made

    class ByRank(LocalTensorMode):
        """torch's mode, with a shorter way for plain operations."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not types and (self._disable or _any_tensor(args)):
                return func(*args, **(kwargs or {}))  # of one rank's tensors
            if func is aten.sym_size.default:
                return tuple(args[0]._size)
            if func is aten.dim.default:
                return len(args[0]._size)
            kind = None if self._disable or any(t is not LocalTensor for t in types) else _kind(func)
            if kind == "view" and not (args and type(args[0]) is LocalTensor):
                kind = None
            where = None if kind is None else _places(args, kwargs, LocalTensor)
            if where is None:
                return super().__torch_dispatch__(func, types, args, kwargs)
            results = {}
            for rank in sorted(self.ranks):
                mine = list(args)
                for i, values in where:
                    if isinstance(values, dict):
                        mine[i] = values[rank]
                    else:
                        mine[i] = [x._local_tensors[rank] if type(x) is LocalTensor else x for x in values]
                results[rank] = func(*mine, **(kwargs or {}))
            first = next(iter(results.values()))
            if kind == "in place":
                return args[0] if func._schema.returns else None
            if isinstance(first, torch.Tensor):
                made = joined(results)
                return _as_view(made, args[0]) if kind == "view" else made
            if kind == "question":
                if all(found == first for found in results.values()):
                    return first
            elif all(len(found) == len(first) for found in results.values()):
                several = [
                    None if x is None else joined({r: found[i] for r, found in results.items()})
                    for i, x in enumerate(first)
                ]
                return type(first)(_as_view(x, args[0]) if kind == "view" else x for x in several)
            return super().__torch_dispatch__(func, types, args, kwargs)  # sizes of parts that are not equal

    def _as_view(view: Any, of: Any) -> Any:
        """The view with the storage of what it is a view of: by their storages `split` knows parameters again."""
        if any(isinstance(n, torch.SymInt) for n in (*view._size, *of._size)):
            torch._functionalize_unsafe_set(view, of)
        else:
            with Sizes():
                torch._functionalize_unsafe_set(view, of)
        return view

    return ByRank


@functools.cache
def _kind(func: Any) -> str | None:
    """ "new", "view" (of its first argument) or "in place" (its first argument, or nothing, is what it gives); None for
    an operation that only torch's mode knows to run."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "prims", "fmegatron"):
        return None
    schema = func._schema
    if func.overloadpacket.__name__ in _QUESTIONS:
        return "question"
    given = [(str(r.type), r.alias_info) for r in schema.returns]
    if {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & set(func.tags):
        return None
    if any(kind not in ("Tensor", "List[Tensor]") for kind, _ in given):
        return None
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    if written:
        returned = written == [0] and len(given) == 1 and schema.name.endswith("_")
        return "in place" if returned or not given else None
    seen = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None]
    if not seen:
        return "new"
    return "view" if seen == [0] and len(given) == 1 else None


def _any_tensor(args: Sequence[Any]) -> bool:
    for a in args:
        if isinstance(a, torch.Tensor):
            return True
        if isinstance(a, (list, tuple)) and any(isinstance(x, torch.Tensor) for x in a):
            return True
    return False


def _places(args: Sequence[Any], kwargs: Any, local: type) -> list[tuple[int, Any]] | None:
    """Where simulated tensors are among the arguments: (which, its tensors by rank, or a list of several). None where
    there is something else that differs by rank."""
    if kwargs and any(isinstance(x, (torch.Tensor, torch.SymInt, list, tuple)) for x in kwargs.values()):
        return None
    where: list[tuple[int, Any]] = []
    for i, a in enumerate(args):
        if type(a) is local:
            where.append((i, a._local_tensors))  # type: ignore[attr-defined]
        elif isinstance(a, torch.SymInt):
            return None
        elif isinstance(a, (list, tuple)):
            if any(isinstance(x, (torch.SymInt, list, tuple)) for x in a):
                return None
            if any(type(x) is local for x in a):
                where.append((i, a))
    return where
