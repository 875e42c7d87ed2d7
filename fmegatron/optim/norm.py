"""The global norm, and sums over the ranks that hold a leaf's shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.dtensor import DTensor
from fmegatron.errors import UserError
from fmegatron.optim import leaves
from fmegatron.optim.fused import squares_pass
from fmegatron.optim.leaves import local_of, no_grad
from fmegatron.recording import note_collective
from fmegatron.simulation import is_local, lift, simulating

# Elements summed in one run on a CPU: torch's float32 norm there adds in sequence, 0.4 % off after 67 million elements.
RUN = 1 << 14


def global_norm(values: Any) -> Tensor:
    """The 2-norm of all elements of a tree, each global element counted once: a plain 0-d tensor, equal on all ranks.

    In float32, or float64 if a leaf is. None and integer leaves count nothing; an empty tree gives 0. Raises
    `UserError` for a DTensor that is a partial sum.
    """
    return sum_of_squares(values).sqrt()


def sum_of_squares(values: Any) -> Tensor:
    """The square of `global_norm`, to be summed further (over pipeline stages)."""
    found = [x for x in tree.leaves(values) if tree.is_float(x)]
    if not found:
        return torch.zeros(())
    with no_grad():
        dtype = leaves.wide(*found)
        if set(map(type, found)) == {Tensor} and len({(x.device, x.dtype) for x in found}) == 1:
            return square_of(found, dtype)
        groups: dict[Any, Any] = defaultdict(list)  # one kernel call each; a layout's sums are then added
        for x in found:
            groups[_sharded(x), x.device, x.dtype].append(local_of(x))
        sums: dict[Any, Any] = {}
        for (layout, _, _), group in groups.items():
            square = square_of(group, dtype).to(found[0].device)
            sums[layout] = sums[layout] + square if layout in sums else square
        layouts = list(sums)
        return torch.stack(summed([sums[at] for at in layouts], layouts)).sum()


def square_of(group: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of squares of tensors of one dtype on one device."""
    if leaves.plain_only():
        return torch.stack([x.to(dtype).square().sum() for x in group]).sum()
    sums, left = squares_pass(group)
    if left:
        sums.append(torch.stack(torch._foreach_norm([run for x in left for run in _runs(x)], 2, dtype)).square().sum())
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _runs(x: Tensor) -> Sequence[Tensor]:
    if is_local(x) or not x.is_cpu or x.numel() <= RUN:
        return [x]
    return x.reshape(-1).split(RUN)


def _sharded(x: Tensor) -> tuple[Any, tuple[int, ...]]:
    """(mesh, the mesh dims larger than one over which a leaf is cut); (None, ()) for a plain tensor."""
    if not isinstance(x, DTensor):
        return None, ()
    if any(p.is_partial() for p in x.placements):
        raise UserError(f"global_norm of a partial sum, placements {x.placements}: reduce it before")
    mesh = x.device_mesh
    cut = tuple(d for d, p in enumerate(x.placements) if mesh.size(d) > 1 and not p.is_replicate())
    return (mesh, cut) if cut else (None, ())


def summed(values: Sequence[Tensor], layouts: Sequence[tuple[Any, tuple[int, ...]]]) -> list[Tensor]:
    """Local sums -> sums over the ranks: values[i] over the mesh dims layouts[i] = (mesh, dims), or (None, ()).

    The values, of any shapes on one device, go together: one all-reduce a mesh dim and dtype. In a simulation shapes
    may not differ by rank.
    """
    from torch.distributed import _functional_collectives as collectives

    values = list(values)
    for mesh in dict.fromkeys(mesh for mesh, dims in layouts if dims):
        for dim in range(mesh.ndim):
            cut = [i for i, (m, dims) in enumerate(layouts) if m == mesh and dim in dims]
            for dtype in dict.fromkeys(values[i].dtype for i in cut):
                members = [i for i in cut if values[i].dtype == dtype]
                flat = torch.cat([values[i].reshape(-1) for i in members])
                if simulating():
                    flat = lift(flat, torch.distributed.get_world_size())
                note_collective("all-reduce", (mesh.mesh_dim_names or ())[dim : dim + 1], mesh.size(dim), flat)
                flat = collectives.wait_tensor(collectives.all_reduce(flat, "sum", (mesh, dim)))
                parts = flat.split([values[i].numel() for i in members])
                for i, part in zip(members, parts, strict=True):
                    values[i] = part.view(values[i].shape)
    return values
