"""Rows that each rank sends to each other rank of some mesh axes, as many as it has for it: an all-to-all of unequal parts.

The numbers of rows must be known on the host (torch's all-to-all takes them there), so a program that routes by values
waits for the device once an exchange. It is linear; its transpose, and so its backward, is the exchange back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.autograd import Function

from fmegatron.collectives import begin, end, ring_places
from fmegatron.function import apply_function, under_torch_func
from fmegatron.interleave import pass_turn
from fmegatron.mesh import Mesh
from fmegatron.recording import note_collective
from fmegatron.simulation import lift, on_each_rank, per_rank


@dataclass(frozen=True)
class Splits:
    """How many rows this rank sends to, and receives from, each rank of some axes, in rank order; in a simulation, of
    every rank."""

    sent: tuple[tuple[int, ...], ...]
    received: tuple[tuple[int, ...], ...]

    @property
    def rows_sent(self) -> int:
        """Rows that go out; in a simulation as many as on the rank that sends most, with rows behind them that stay."""
        return max(map(sum, self.sent))

    @property
    def rows_received(self) -> int:
        """Rows that come in; in a simulation as many as on the rank that gets most, filled up with zeros."""
        return max(map(sum, self.received))

    @property
    def back(self) -> Splits:
        """Of the exchange back."""
        return Splits(self.received, self.sent)


def exchange_counts(counts: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Tensor, Splits]:
    """counts: int64[ranks kinds], the rows of each kind that this rank has for each rank -> (the rows of each kind that
    come from each rank, int64[ranks kinds]; the splits of the exchange)."""
    axes = mesh.sorted(mesh.live(axes))
    counts = lift(counts, mesh.world) if mesh.simulated else counts
    received = end(begin("all-to-all", counts.contiguous(), mesh, axes))
    both = torch.stack([counts.sum(1), received.sum(1)])
    here = [t.tolist() for t in per_rank(both)]
    return received, Splits(tuple(tuple(s) for s, _ in here), tuple(tuple(r) for _, r in here))


def exchange_rows(x: Tensor, mesh: Mesh, axes: tuple[str, ...], splits: Splits) -> Tensor:
    """x[row …], first the rows for the first rank of some axes, and so on -> the rows from these ranks, in their order.
    Differentiable any number of times."""
    return exchange_several([x], mesh, axes, splits)[0]


def exchange_several(xs: Sequence[Tensor], mesh: Mesh, axes: tuple[str, ...], splits: Splits) -> list[Tensor]:
    """The same for tensors whose rows go the same ways, all under way at once, and so in the backward.

    Until they have come another program may compute (see `fmegatron.interleave`)."""
    return list(apply_function(_Exchange, mesh, mesh.sorted(mesh.live(axes)), splits, *xs))


def exchange_beside(
    xs: Sequence[Tensor],
    mesh: Mesh,
    axes: tuple[str, ...],
    splits: Splits,
    work: Callable[[], None] | None,
) -> list[Tensor]:
    """The same, with `work` done while the rows are on their way, where they can be left alone for that; elsewhere it is not
    called."""
    if work is None or mesh.simulated or under_torch_func() or torch.compiler.is_compiling():
        return exchange_several(xs, mesh, axes, splits)
    way = UnderWay(xs, mesh, axes, splits)
    work()
    return way.finish()


class UnderWay:
    """Rows on their way: an exchange of several tensors that has begun. What is computed until `finish` runs beside it, and its
    backward beside the exchange of the gradients."""

    def __init__(self, xs: Sequence[Tensor], mesh: Mesh, axes: tuple[str, ...], splits: Splits) -> None:
        self.mesh, self.axes, self.splits = mesh, mesh.sorted(mesh.live(axes)), splits
        self.started: list[Tensor] = []
        self.back: list[Tensor | None] | None = None  # gradients on their way
        self.sent: tuple[Tensor, ...] = apply_function(_Begin, self, *xs)

    def finish(self) -> list[Tensor]:
        """The rows that have come, as `exchange_several` gives them."""
        sent, self.sent = self.sent, ()  # which hold this object
        return list(apply_function(_Finish, self, *sent))


class _Begin(Function):
    """(way, x, …) -> the same tensors, of which an exchange is under way."""

    @staticmethod
    def forward(way: UnderWay, *xs: Tensor) -> tuple[Tensor, ...]:
        way.started = [begin_rows(x.contiguous(), way.mesh, way.axes, way.splits) for x in xs]
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.way = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple:
        back, ctx.way.back = ctx.way.back, None
        if back is None:  # they have come
            return None, *gs
        pass_turn()
        return None, *(None if g is None else end_rows(g) for g in back)


class _Finish(Function):
    """(way, x, …) -> what the exchange gives. Its backward begins the exchange back, and `_Begin`'s waits for it."""

    @staticmethod
    def forward(way: UnderWay, *xs: Tensor) -> tuple[Tensor, ...]:
        started, way.started = way.started, []
        pass_turn()
        return tuple(end_rows(y) for y in started)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.way, *xs = inputs
        ctx.shapes = [x.shape for x in xs]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple:
        way, wanted = ctx.way, ctx.needs_input_grad[1:]
        back = [g if g is not None and w else None for g, w in zip(gs, wanted, strict=True)]
        if torch.is_grad_enabled():  # a derivative of it is wanted too: one after the other
            here = (way.mesh, way.axes, way.splits.back)
            return None, *(None if g is None else exchange_rows(g, *here) for g in back)
        way.back = [
            None if g is None else begin_rows(g.contiguous(), way.mesh, way.axes, way.splits.back) for g in back
        ]
        empty = (None if g is None else g.new_zeros(()).expand(s) for g, s in zip(back, ctx.shapes, strict=True))
        return None, *empty  # in place of what is to come


class _Exchange(Function):
    @staticmethod
    def forward(mesh: Mesh, axes: tuple[str, ...], splits: Splits, *xs: Tensor) -> tuple[Tensor, ...]:
        if mesh.simulated:
            return tuple(_simulated(lift(x, mesh.world), mesh, axes, splits) for x in xs)
        sent = [x.contiguous() for x in xs]  # alive until they have left
        started = [begin_rows(x, mesh, axes, splits) for x in sent]
        pass_turn()
        return tuple(end_rows(y) for y in started)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.mesh, ctx.axes, ctx.splits, *_ = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple:
        back = [(i, g) for i, g in enumerate(gs) if g is not None and ctx.needs_input_grad[3 + i]]
        found: list[Tensor | None] = [None] * len(gs)
        if back:
            rows, some = zip(*back, strict=True)
            for i, g in zip(rows, apply_function(_Exchange, ctx.mesh, ctx.axes, ctx.splits.back, *some), strict=True):
                found[i] = g
        return None, None, None, *found


def begin_rows(x: Tensor, mesh: Mesh, axes: tuple[str, ...], splits: Splits) -> Tensor:
    """Issues the exchange of one tensor; `end_rows` waits for its result. Without a gradient."""
    note_collective("all-to-all", axes, mesh.size(axes), x)
    (sent,), (received,) = splits.sent, splits.received
    return functional.all_to_all_single(x, list(received), list(sent), mesh.group(axes))


def end_rows(x: Tensor) -> Tensor:
    """Waits for what `begin_rows` gave."""
    return functional.wait_tensor(x)


def _simulated(x: Tensor, mesh: Mesh, axes: tuple[str, ...], splits: Splits) -> Tensor:
    """The exchange between the ranks of a simulation."""
    note_collective("all-to-all", axes, mesh.size(axes), x)  # of the rank that sends most
    values, places = per_rank(x), ring_places(mesh, axes)
    others = [a for a in mesh.sizes if a not in axes]
    groups: dict[tuple[int, ...], dict[int, int]] = {}
    for rank, (place, coordinates) in enumerate(places):
        groups.setdefault(tuple(coordinates[a] for a in others), {})[place] = rank

    def one(rank: int) -> tuple[Tensor]:
        place, coordinates = places[rank]
        members = groups[tuple(coordinates[a] for a in others)]
        parts = []
        for _, source in sorted(members.items()):
            bounds = [0, *itertools.accumulate(splits.sent[source])]
            parts.append(values[source][bounds[place] : bounds[place + 1]])
        parts.append(values[rank].new_zeros(splits.rows_received - sum(splits.received[rank]), *x.shape[1:]))
        return (torch.cat(parts),)

    return on_each_rank(one, mesh.world)[0]
