"""Rows that each rank sends to each other rank of some mesh axes, as many as it has for it: an all-to-all of unequal parts.

The numbers of rows must be known on the host (torch's all-to-all takes them there), so a program that routes by values
waits for the device once an exchange. It is linear; its transpose, and so its backward, is the exchange back.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.autograd import Function

from fmegatron.collectives import begin, end, ring_places
from fmegatron.function import apply_function
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
    return apply_function(_Exchange, x, mesh, mesh.sorted(mesh.live(axes)), splits)


class _Exchange(Function):
    @staticmethod
    def forward(x: Tensor, mesh: Mesh, axes: tuple[str, ...], splits: Splits) -> Tensor:
        note_collective("all-to-all", axes, mesh.size(axes), x)  # in a simulation, of the rank that sends most
        if mesh.simulated:
            return _simulated(lift(x, mesh.world), mesh, axes, splits)
        (sent,), (received,) = splits.sent, splits.received
        group = mesh.group(axes)
        return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), list(received), list(sent), group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, ctx.mesh, ctx.axes, ctx.splits = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return apply_function(_Exchange, g, ctx.mesh, ctx.axes, ctx.splits.back), None, None, None


def _simulated(x: Tensor, mesh: Mesh, axes: tuple[str, ...], splits: Splits) -> Tensor:
    """The exchange between the ranks of a simulation."""
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
