"""What the primitives share: how a backward knows that it must be differentiable, how kernels are mapped, what is
sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function

from fmegatron.capturing import as_one
from fmegatron.function import under_torch_func
from fmegatron.operators import custom_operator


def graph_wanted() -> bool:
    """In a backward: must its result be differentiable again? (torch.func always says yes; a compiled backward never
    is.)"""
    return torch.is_grad_enabled() and (not torch.compiler.is_compiling() or under_torch_func())


def may_overwrite() -> bool:
    """May a forward or backward work in place on what it has just made?

    On CPU a new large tensor costs several times more than the arithmetic on it. But vmap cannot write a mapped value
    into an unmapped one, and compiled code gains nothing (and see `cast`).
    """
    return not (torch.compiler.is_compiling() or under_torch_func())


def operator(name: str, *, reads: bool = False, overwrites: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """`custom_operator` where somebody looks (compiled code, simulation, tracing, torch.func); in eager code with plain
    tensors that hold data the function itself: the way through the dispatcher and back into Python costs time of the
    host.

    reads: it looks at values, on a CPU; so it is one call of a recorded step too.
    overwrites: the arguments that it writes to.
    """

    def made(body: Callable[..., Any]) -> Any:
        through_dispatcher = custom_operator(name, overwrites=overwrites)(body)

        def call(*args: Any) -> Any:
            x = args[0]
            if type(x) is not torch.Tensor or x.is_meta or torch.compiler.is_compiling() or under_torch_func():
                return through_dispatcher(*args)
            return as_one(body, *args) if reads else body(*args)

        call.register_fake = through_dispatcher.register_fake  # type: ignore[attr-defined]
        call.__wrapped__ = body  # type: ignore[attr-defined]
        return call

    return made


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x.to(dtype), for the last line of a forward: no operation where there is nothing to cast.

    In torch 2.11 compiled code silently loses the gradient of an output that two operations of the forward return, as
    an operation in place and a `.to` or `.contiguous` without effect do: dynamo makes every intermediate tensor an
    output of the forward, and of outputs that are one tensor the last gets the gradient, which is then not the one
    that the backward takes.
    """
    return x if x.dtype == dtype else x.to(dtype)


def each_example(function: type[Function], info: Any, in_dims: Any, args: Any) -> Any:
    """A vmap rule for kernels that torch cannot map: one call per example, which sees plain tensors and one example's
    memory."""

    def example(i: int) -> list[Any]:
        return [a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)]

    runs = [function.apply(*example(i)) for i in range(info.batch_size)]
    return tuple(torch.stack(run) for run in zip(*runs, strict=True)), (0,) * len(runs[0])


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sharded(sh: Any, dim: str) -> bool:
    """Must a primitive treat this dim as sharded? In the checking mode always: its axes have size one, and stand for
    larger ones."""
    return sh is not None and (sh.check is not None or bool(sh.axes(dim)))


def global_size(sh: Any, dim: str, local: int) -> int:
    """The global size of a dim of which this rank holds `local`: every rank holds as much, or the rules know it."""
    if not sh.axes(dim):
        return local
    known = sh.uneven_size(dim)
    return local * sh.mesh.size(sh.axes(dim)) if known is None else known
