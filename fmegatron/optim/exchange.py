"""Shards of many matrices <-> whole matrices, a share of them a rank.

One all-to-all a mesh dim that cuts the matrices moves every rank's shards to the rank that will have the matrix: as much
as the shards themselves, where gathering all matrices everywhere would move that many times the number of ranks. Over
mesh dims on which leaves are replicated each rank takes a part without a message, and an all-gather joins the results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fmegatron.collectives import gather_single
from fmegatron.errors import UserError
from fmegatron.optim.leaves import cuts_of
from fmegatron.simulation import lift, simulating


@dataclass(frozen=True)
class Exchange:
    """How a stack [matrix, dims of one matrix …] of local shards becomes whole matrices.

    mesh: None without one. cuts: (mesh dim, dim of the stack) of the mesh dims that cut matrices, the inner split of a
    dim first. copies: the mesh dims on which they are replicated.
    """

    mesh: Any = None
    cuts: tuple[tuple[int, int], ...] = ()
    copies: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """Among how many the matrices of a leaf are shared."""
        return math.prod(self.mesh.size(d) for d in (*(d for d, _ in self.cuts), *self.copies))

    def gather(self, x: Tensor) -> Tensor:
        """Local shards of n matrices -> this rank's share of whole ones, zeros behind the last."""
        n = x.shape[0]
        x = _padded(x, self._shares(n)[1])
        if self.mesh is not None and simulating():
            x = lift(x, torch.distributed.get_world_size())
        for d in self._shares(n)[0]:
            x = _own_part(x, self.mesh, d)
        for d, dim in self.cuts:
            size = self.mesh.size(d)
            x = _all_to_all(x.unflatten(0, (size, -1)), self.mesh, d).movedim(0, dim).flatten(dim, dim + 1)
        return x

    def scatter(self, x: Tensor, n: int) -> Tensor:
        """The way back: this rank's share of whole matrices -> local shards of all n."""
        for d, dim in reversed(self.cuts):
            size = self.mesh.size(d)
            x = _all_to_all(x.unflatten(dim, (size, -1)).movedim(dim, 0), self.mesh, d).flatten(0, 1)
        for d in reversed(self._shares(n)[0]):
            x = functional.wait_tensor(gather_single(x.contiguous(), 0, (self.mesh, d)))
        return x[:n] if x.shape[0] != n else x

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

    Raises `UserError` where a dim does not divide by the ranks that hold it.
    """
    if not isinstance(p, DTensor):
        return Exchange()
    mesh, found = p.device_mesh, cuts_of(p)
    for dim in {dim for _, _, dim in found}:
        ranks = math.prod(mesh.size(d) for _, d, at in found if at == dim)
        if p.shape[dim] % ranks:
            raise UserError(
                f"muon: dim {dim} of a parameter of shape {tuple(p.shape)} does not divide by the {ranks} ranks that "
                "hold it: choose a mesh that divides, or leave the dim whole"
            )
    cuts = [(d, order.index(dim) - counts + 1) for _, d, dim in reversed(found) if order.index(dim) >= counts]
    copies = [d for d in range(mesh.ndim) if mesh.size(d) > 1 and isinstance(p.placements[d], Replicate)]
    return Exchange(mesh, tuple(cuts), tuple(copies))


def _padded(x: Tensor, n: int) -> Tensor:
    return torch.cat([x, x.new_zeros(n - x.shape[0], *x.shape[1:])]) if n != x.shape[0] else x


def _own_part(x: Tensor, mesh: Any, d: int) -> Tensor:
    """This rank's part of a stack along a mesh dim."""
    size = mesh.size(d)
    x = x.unflatten(0, (size, -1))
    if not simulating():
        return x[mesh.get_local_rank(d)]
    places = [Shard(0) if at == d else Replicate() for at in range(mesh.ndim)]
    here = distribute_tensor(torch.arange(size, device=x.device), mesh, places, src_data_rank=None).to_local()
    return x.index_select(0, here)[0]


def _all_to_all(x: Tensor, mesh: Any, d: int) -> Tensor:
    """x[rank of mesh dim d, …]: part r goes to rank r; the parts received, in order of ranks."""
    return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), None, None, (mesh, d)))
