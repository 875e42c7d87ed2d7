"""Do ranks that hold the same part of a leaf hold the same bits? A check by hashes.

Replicas are never compared by the arithmetic of a step: a rank whose memory, kernel or random numbers went astray trains
on by itself, and all ranks see is a loss that is a little worse. `check_replicas` sends one number a leaf.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fmegatron import tree
from fmegatron.collectives import begin, end, ring_places
from fmegatron.dtensor import DTensor
from fmegatron.mesh import Mesh
from fmegatron.optim.leaves import local_of
from fmegatron.simulation import lift, per_rank

SHOWN = 4  # leaves that an error names
CHUNK = 1 << 22  # elements that are hashed at a time
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element

# {leaf: ranks by what they hold}
Found = dict[str, tuple[tuple[int, ...], ...]]


class ReplicaError(RuntimeError):
    """Ranks that should hold the same part of a leaf do not. leaves: {name: ranks, those together that hold the same};
    step: the number of the step behind which that was found, or None."""

    def __init__(self, leaves: Found, step: int | None = None) -> None:
        some = "; ".join(f"{name} ({_told(groups)})" for name, groups in list(leaves.items())[:SHOWN])
        more = f", and {len(leaves) - SHOWN} leaves more" if len(leaves) > SHOWN else ""
        at = "" if step is None else f"step {step}: "
        super().__init__(f"{at}replicas differ: {some}{more}")
        self.leaves, self.step = leaves, step


def _told(groups: Sequence[Sequence[int]]) -> str:
    parts = [f"rank{'s' if len(g) > 1 else ''} {', '.join(map(str, g))}" for g in groups]
    return " unlike ".join(parts)


def check_replicas(state: Any, mesh: Mesh | None, *, stages: Any = None, step: int | None = None) -> None:
    """Raises ReplicaError, on all ranks, where a leaf of a state is not bitwise the same on all ranks that hold the same
    part of it. Every rank must call it.

    state: a pytree at rest, such as a `TrainState`. Of a DTensor the ranks along its replicated axes are compared; of a
        plain tensor, a number or a string all ranks of the mesh.
    mesh: None, or of one rank: nothing is compared. stages: the process group of a pipeline's ranks; leaves of parameters
        and optimizer state that several stages hold, such as tied embeddings, are then compared as well.
    step: for the message.

    One all-gather of a number a leaf for each way in which leaves are replicated. A leaf in which one element differs is
    always found, another but for one case in some 2^64.
    """
    leaves = tree.named(state)
    with torch.no_grad():
        hashes = {name: hash_of(x) for name, x in leaves.items()}
        found = {} if mesh is None else _over_axes(leaves, hashes, mesh)
        if stages is not None:
            found |= _over_stages({n: h for n, h in hashes.items() if n.startswith(("params", "opt"))}, stages)
    if dist.is_initialized() and (mesh is None or not mesh.simulated):
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        found = {name: groups for one in everyone for name, groups in one.items()}
    if found:
        raise ReplicaError(found, step)


def hash_of(x: Any) -> torch.Tensor:
    """A number for the bits of a leaf, int64[]: the sum, modulo 2^64, of its elements' bits and places, mixed. (One element's
    bits are mixed one to one, so that a change of one is a change of the sum.)"""
    if not isinstance(x, torch.Tensor):
        digest = hashlib.blake2b(repr(x).encode(), digest_size=8).digest()
        return torch.tensor(int.from_bytes(digest, "big", signed=True))
    bits = local_of(x).detach().reshape(-1)
    bits = bits.view(INTEGERS[bits.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, bits.shape[0], CHUNK):
        part = bits[first : first + CHUNK].long()
        place = torch.arange(first + 1, first + 1 + part.shape[0], device=part.device)
        total = total + _mixed(part + place * -7046029254386353131).sum()
    return total


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """The function of splitmix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014), one to one."""
    x = (x ^ _shifted(x, 30)) * -4658895280553007687
    x = (x ^ _shifted(x, 27)) * -7723592293110705685
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, n: int) -> torch.Tensor:
    """To the right, with zeros from the left."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _over_axes(leaves: Mapping[str, Any], hashes: Mapping[str, torch.Tensor], mesh: Mesh) -> Found:
    """Leaves that differ between ranks of this process's groups (in a simulation, of all)."""
    ways: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, x in leaves.items():
        if axes := _replicated(x, mesh):
            ways[axes].append(name)
    found: Found = {}
    for axes, names in ways.items():
        mine = torch.stack([hashes[n].to(mesh.device) for n in names])[None]
        mine = lift(mine, mesh.world) if mesh.simulated else mine
        rows = [x.tolist() for x in per_rank(end(begin("all-gather", mine, mesh, axes)))]
        for rank, table in enumerate(rows) if mesh.simulated else [(mesh.rank, rows[0])]:
            members = _members(mesh, axes, rank)
            for i, name in enumerate(names):
                if name not in found:
                    found |= _differing(name, [row[i] for row in table], members)
    return found


def _replicated(x: Any, mesh: Mesh) -> tuple[str, ...]:
    """The axes larger than one along which ranks hold the same part of a leaf, in rank order."""
    axes: Iterable[str] = mesh.sizes
    if isinstance(x, DTensor):
        pairs = zip(x.device_mesh.mesh_dim_names or (), x.placements, strict=True)
        axes = [a for a, p in pairs if p.is_replicate()]
    return mesh.live(mesh.sorted(axes))


def _members(mesh: Mesh, axes: tuple[str, ...], rank: int) -> list[int]:
    """The processes of a rank's group over some axes, in the group's order."""
    places = ring_places(mesh, axes)
    others = [a for a in mesh.sizes if a not in axes]
    here = [places[rank][1][a] for a in others]
    group = sorted((place, r) for r, (place, c) in enumerate(places) if [c[a] for a in others] == here)
    return [mesh.ranks[r] for _, r in group]


def _over_stages(hashes: Mapping[str, torch.Tensor], stages: Any) -> Found:
    """Leaves of one name that differ between the stages of a pipeline."""
    names = list(hashes)
    mine = dict(zip(names, [int(hashes[n]) for n in names], strict=True))
    every: list[Any] = [None] * dist.get_world_size(stages)
    dist.all_gather_object(every, mine, group=stages)
    ranks = dist.get_process_group_ranks(stages)
    found: Found = {}
    for name in dict.fromkeys(n for one in every for n in one):
        held = [(one[name], rank) for one, rank in zip(every, ranks, strict=True) if name in one]
        found |= _differing(name, [h for h, _ in held], [r for _, r in held])
    return found


def _differing(name: str, hashes: Sequence[int], ranks: Sequence[int]) -> Found:
    groups: dict[int, list[int]] = defaultdict(list)
    for h, rank in zip(hashes, ranks, strict=True):
        groups[h].append(rank)
    if len(groups) == 1:
        return {}
    return {name: tuple(tuple(g) for g in sorted(groups.values(), key=lambda g: (-len(g), g)))}


__all__ = ["ReplicaError", "check_replicas", "hash_of"]
