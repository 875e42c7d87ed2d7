"""Shards of many matrices <-> whole matrices, a share of them a rank.

One all-to-all a mesh dim that cuts the matrices moves every rank's shards to the rank that will have the matrix: as much
as the shards themselves, where gathering all matrices everywhere would move that many times the number of ranks. Over
mesh dims on which leaves are replicated each rank takes a part without a message, and an all-gather joins the results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor

from fmegatron.collectives import gather_single
from fmegatron.dtensor import DTensor
from fmegatron.errors import UserError
from fmegatron.optim.leaves import cuts_of
from fmegatron.recording import note_collective
from fmegatron.simulation import lift, on_each_rank, simulating
from fmegatron.uneven import cut, filled, lay_out, whole


@dataclass(frozen=True)
class Exchange:
    """How a stack [matrix, dims of one matrix …] of local shards becomes whole matrices.

    mesh: None without one. cuts: (mesh dim, dim of the stack) of the mesh dims that cut matrices, the inner split of a
    dim first. copies: the mesh dims on which they are replicated. uneven: (dim of the stack, its size, mesh dims that cut
    it, the major one first) of dims that do not divide; on the way their parts are filled up.
    """

    mesh: Any = None
    cuts: tuple[tuple[int, int], ...] = ()
    copies: tuple[int, ...] = ()
    uneven: tuple[tuple[int, int, tuple[int, ...]], ...] = ()

    @property
    def ranks(self) -> int:
        """Among how many the matrices of a leaf are shared."""
        return math.prod(self.mesh.size(d) for d in (*(d for d, _ in self.cuts), *self.copies))

    def gather(self, x: Tensor) -> Tensor:
        """Local shards of n matrices -> this rank's share of whole ones, zeros behind the last."""
        n = x.shape[0]
        if self.mesh is not None and simulating():
            x = lift(x, torch.distributed.get_world_size())
        for dim, size, cuts in self.uneven:
            x = self._each_part(functools.partial(_fill, dim, size, self._counts(cuts)), x, cuts)
        x = _padded(x, self._shares(n)[1])
        for d in self._shares(n)[0]:
            x = _own_part(x, self.mesh, d)
        for d, dim in self.cuts:
            size = self.mesh.size(d)
            x = _all_to_all(x.unflatten(0, (size, -1)), self.mesh, d).movedim(0, dim).flatten(dim, dim + 1)
        for dim, size, cuts in self.uneven:
            x = whole(x, dim, size, self._counts(cuts))
        return x

    def scatter(self, x: Tensor, n: int) -> Tensor:
        """The way back: this rank's share of whole matrices -> local shards of all n."""
        for dim, _, cuts in self.uneven:
            x = lay_out(x, dim, self._counts(cuts))
        for d, dim in reversed(self.cuts):
            size = self.mesh.size(d)
            x = _all_to_all(x.unflatten(dim, (size, -1)).movedim(dim, 0), self.mesh, d).flatten(0, 1)
        for d in reversed(self._shares(n)[0]):
            _note("all-gather", x, self.mesh, d)
            x = functional.wait_tensor(gather_single(x.contiguous(), 0, (self.mesh, d)))
        x = x[:n] if x.shape[0] != n else x
        for dim, size, cuts in self.uneven:
            x = self._each_part(functools.partial(_cut, dim, size, self._counts(cuts)), x, cuts)
        return x

    def _counts(self, cuts: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.mesh.size(d) for d in cuts)

    def _each_part(self, f: Callable[[Tensor, int], Tensor], x: Tensor, cuts: tuple[int, ...]) -> Tensor:
        """f(this rank's x, its number along the mesh dims `cuts`)."""

        def on(rank: int, x: Tensor) -> tuple[Tensor]:
            at, number = (self.mesh.mesh == rank).nonzero()[0].tolist(), 0
            for d in cuts:
                number = number * self.mesh.size(d) + at[d]
            return (f(x, number).contiguous(),)

        if simulating():
            return on_each_rank(on, torch.distributed.get_world_size(), x)[0]
        return on(torch.distributed.get_rank(), x)[0]

    def _shares(self, n: int) -> tuple[list[int], int]:
        """(the replicated mesh dims over which n matrices are shared out, n rounded up to a multiple of all shares)."""
        ranks = math.prod(self.mesh.size(d) for d, _ in self.cuts)
        taken = []
        for d in self.copies:
            if n > ranks:  # else some ranks would have nothing but zeros, and the all-gather costs more than it saves
                taken.append(d)
                ranks *= self.mesh.size(d)
        return taken, -(-n // ranks) * ranks


def exchange_of(p: Tensor, order: tuple[int, ...], counts: int) -> Exchange:
    """The exchange of a leaf whose dims are read in some order, the first `counts` of them counting matrices.

    Raises `UserError` where a dim that counts matrices does not divide by the ranks that hold it.
    """
    if not isinstance(p, DTensor):
        return Exchange()
    mesh, found = p.device_mesh, cuts_of(p)
    uneven = []
    for dim in sorted({dim for _, _, dim in found}):
        axes = tuple(d for _, d, at in found if at == dim)
        ranks = math.prod(mesh.size(d) for d in axes)
        if p.shape[dim] % ranks and order.index(dim) >= counts:
            uneven.append((order.index(dim) - counts + 1, p.shape[dim], axes))
        elif p.shape[dim] % ranks:
            raise UserError(
                f"muon: dim {dim} of a parameter of shape {tuple(p.shape)} does not divide by the {ranks} ranks that "
                "hold it: choose a mesh that divides, or leave the dim whole"
            )
    cuts = [(d, order.index(dim) - counts + 1) for _, d, dim in reversed(found) if order.index(dim) >= counts]
    copies = [d for d in range(mesh.ndim) if mesh.size(d) > 1 and p.placements[d].is_replicate()]
    return Exchange(mesh, tuple(cuts), tuple(copies), tuple(uneven))


def _fill(dim: int, n: int, counts: tuple[int, ...], x: Tensor, part: int) -> Tensor:
    return filled(x, dim, n, counts)


def _cut(dim: int, n: int, counts: tuple[int, ...], x: Tensor, part: int) -> Tensor:
    return cut(x, dim, n, counts, part)


def _padded(x: Tensor, n: int) -> Tensor:
    return torch.cat([x, x.new_zeros(n - x.shape[0], *x.shape[1:])]) if n != x.shape[0] else x


def _own_part(x: Tensor, mesh: Any, d: int) -> Tensor:
    """This rank's part of a stack along a mesh dim."""
    size = mesh.size(d)
    x = x.unflatten(0, (size, -1))
    if not simulating():
        return x[mesh.get_local_rank(d)]
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    places = [Shard(0) if at == d else Replicate() for at in range(mesh.ndim)]
    here = distribute_tensor(torch.arange(size, device=x.device), mesh, places, src_data_rank=None).to_local()
    return x.index_select(0, here)[0]


def _note(kind: str, x: Tensor, mesh: Any, d: int) -> None:
    """Into the records of collectives that are open; mesh dims are named after the axes."""
    note_collective(kind, (mesh.mesh_dim_names[d] if mesh.mesh_dim_names else str(d),), mesh.size(d), x)


def _all_to_all(x: Tensor, mesh: Any, d: int) -> Tensor:
    """x[rank of mesh dim d, …]: part r goes to rank r; the parts received, in order of ranks."""
    _note("all-to-all", x, mesh, d)
    return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), None, None, (mesh, d)))
