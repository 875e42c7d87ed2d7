"""One mesh of atomic axes, with names for ordered tuples of them.

    make_mesh("dp=2,tp=4")                        axes dp, tp; the ranks of the last axis are adjacent
    make_mesh("dp=2,tp=4", kv_heads=2)            tp is cut into two atomic axes, for kv heads and for query groups
    make_mesh("dp=4,tp=2", also=["edp=2,ep=4"])   the common refinement of two factorings of the same ranks

Every name of every factoring stands for an ordered tuple of atomic axes. There is one mesh and never two, since two
would break norms, multi-tensor updates and clipping.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fmegatron.axes import parse_axes
from fmegatron.errors import ShardingError, UserError
from fmegatron.groups import group_of, one_gloo_thread
from fmegatron.simulation import keep_alive, lift, simulating

# DTensor's mesh dims put these last: where a parameter's dim is cut both by a model axis and by a data axis, the data
# axis must be the inner split, so that gathering it is one collective over contiguous pieces.
DATA_AXES = ("dp", "fsdp", "hsdp", "data", "replica", "cp", "edp")

Axes = str | Sequence[str] | None


@dataclass(frozen=True, eq=False)
class Mesh:
    """Atomic axes over the ranks of this program. Make one with `make_mesh`.

    sizes: axis -> size, in rank order (the last axis' ranks are adjacent).
    names: name -> ordered tuple of atomic axes (the first is major).
    order: the atomic axes in the order of the dims of `device_mesh`: model axes first, data axes last.
    device_mesh: torch's DeviceMesh over all axes; None for a program of one rank.
    """

    sizes: Mapping[str, int]
    names: Mapping[str, tuple[str, ...]]
    order: tuple[str, ...]
    device_type: str
    simulated: bool
    device_mesh: DeviceMesh | None = None
    _ranks: torch.Tensor | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        if self.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device_type)

    def expand(self, axes: Axes) -> tuple[str, ...]:
        """None, a name or a sequence of names -> ordered tuple of atomic axes. Raises ShardingError for an unknown
        name."""
        if axes is None:
            return ()
        if not isinstance(axes, str):
            return tuple(a for name in axes for a in self.expand(name))
        if axes in self.names:
            return self.names[axes]
        if axes in self.sizes:
            return (axes,)
        known = [*self.names, *self.sizes]
        near = difflib.get_close_matches(axes, known, 1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ShardingError(f"no mesh axis is named {axes!r}: this mesh has {', '.join(dict.fromkeys(known))}{hint}")

    def live(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Those of some atomic axes that are larger than one."""
        return tuple(a for a in axes if self.sizes[a] > 1)

    def size(self, axes: Iterable[str]) -> int:
        """The product of the sizes of some atomic axes."""
        return math.prod([self.sizes[a] for a in axes])  # (dynamo takes no generator here)

    def sorted(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The axes in rank order, in which torch numbers the members of a group whatever order they are given in."""
        wanted = set(axes)
        return tuple(a for a in self.sizes if a in wanted)

    def group(self, axes: Iterable[str]) -> Any:
        """The flattened process group of some atomic axes, for functional collectives; members are in rank order."""
        key = self.sorted(axes)
        if key not in self._cache:
            self._cache[key] = self._make_group(key)
        return self._cache[key]

    def _make_group(self, key: tuple[str, ...]) -> Any:
        if self._ranks is None or self.device_mesh is None:
            raise UserError(
                "this mesh is abstract: it answers questions about layouts and runs nothing; make_mesh(…) without abstract=True"
            )
        if len(key) == 1:
            return (self.device_mesh, self.order.index(key[0]))
        every = list(self.sizes)
        rest = [i for i, a in enumerate(every) if a not in key]
        chosen = [i for i, a in enumerate(every) if a in key]
        rows = self._ranks.permute(rest + chosen).reshape(-1, self.size(key)).contiguous()
        if self.simulated:
            flat = DeviceMesh(self.device_type, rows, mesh_dim_names=("rest", "flat"))
            keep_alive(flat)
            return (flat, 1)
        mine = next(row for row in rows.tolist() if dist.get_rank() in row)
        return group_of(mine)

    def process_group(self, axes: Iterable[str]) -> Any:
        """`group` as torch's ProcessGroup, for point-to-point messages; not in a simulation."""
        group = self.group(axes)
        return group[0].get_group(group[1]) if isinstance(group, tuple) else group

    @property
    def ranks(self) -> list[int]:
        """The process of each rank of this mesh, by its number here: others than 0, 1, … on a part of a mesh (`without`)."""
        return list(range(self.world)) if self._ranks is None else self._ranks.flatten().tolist()

    @property
    def rank(self) -> int:
        """This process's number among the ranks of this mesh; not in a simulation."""
        return self.ranks.index(dist.get_rank())

    def coordinate(self, axis: str) -> Any:
        """This rank's number along an atomic axis: an int, or in simulation a tensor of shape [1]."""
        if self.sizes[axis] == 1 or self._ranks is None:
            return 0
        key = ("coordinate", axis)
        if key not in self._cache and self.simulated:
            self._cache[key] = _simulated_coordinate(self, axis)
        elif key not in self._cache:
            place = (self._ranks == dist.get_rank()).nonzero()[0].tolist()
            self._cache.update({("coordinate", a): n for a, n in zip(self.sizes, place, strict=True)})
        return self._cache[key]

    def position(self, axes: Iterable[str]) -> Any:
        """This rank's number along an ordered tuple of axes (the first is major): an int, or a tensor in simulation."""
        number: Any = 0
        for axis in self.live(axes):
            number = number * self.sizes[axis] + self.coordinate(axis)
        return number

    def without(self, axis: str) -> Mesh:
        """The mesh of the other axes, at this rank's place on `axis`: that of one pipeline stage, for axis "pp".

        Its ranks are those that share this rank's place. Raises ShardingError for an unknown axis or one that is cut
        into several.
        """
        cut = self.expand(axis)
        if len(cut) != 1:
            raise ShardingError(f"mesh axis {axis!r} is {cut}: only an axis that is not cut can be left out")
        axis = cut[0]
        if (found := self._cache.get(("without", axis))) is not None:
            return found
        sizes = {a: n for a, n in self.sizes.items() if a != axis}
        names = {n: t for n, t in self.names.items() if axis not in t}
        order = tuple(a for a in self.order if a != axis)
        device_mesh = ranks = None
        if self.device_mesh is not None and self._ranks is not None and math.prod(sizes.values()) > 1:
            if self.simulated:
                raise UserError(f"a simulated mesh cannot be left without {axis!r}: pipelines need real processes")
            device_mesh = self.device_mesh[order if len(order) > 1 else order[0]]
            ranks = self._ranks.select(list(self.sizes).index(axis), self.coordinate(axis))
        found = Mesh(sizes, names, order, self.device_type, self.simulated, device_mesh, ranks)
        self._cache["without", axis] = found
        return found

    def __repr__(self) -> str:
        sizes = ",".join(f"{a}={n}" for a, n in self.sizes.items())
        named = [f"{n}=({','.join(t)})" for n, t in self.names.items() if t != (n,)]
        return f"Mesh({sizes}{'; ' if named else ''}{' '.join(named)}; {self.device_type})"


def _simulated_coordinate(mesh: Mesh, axis: str) -> torch.Tensor:
    from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode

    every = list(mesh.sizes.values())
    index = list(mesh.sizes).index(axis)
    stride, size = math.prod(every[index + 1 :]), every[index]
    with maybe_disable_local_tensor_mode():
        return LocalTensor({r: torch.tensor([r // stride % size], device=mesh.device) for r in range(mesh.world)})


def make_mesh(
    axes: str | None = None,
    *,
    also: Sequence[str] = (),
    kv_heads: int | None = None,
    order: Sequence[str] | None = None,
    device: str | None = None,
    world: int | None = None,
    abstract: bool = False,
    **sizes: int,
) -> Mesh:
    """A mesh from "dp=2,tp=2" or from keywords (dp=2, tp=2); the ranks of the last axis are adjacent.

    also: other factorings of the same ranks, such as "edp=2,ep=4"; the atomic axes are the common refinement.
    kv_heads: cut `tp` so that kv heads lie on gcd(kv_heads, tp) of it (name `tp_kv`) and query groups on the rest
        (name `tp_group`): kv heads fewer than tp then need no special case.
    order: the atomic axes in the order of DTensor's mesh dims; by default model axes first, data axes last.
    device: "cpu" or "cuda"; by default cuda when it is available.
    world: number of ranks to fit; by default that of the process group (1 without one).
    abstract: a mesh of any size that answers questions about layouts and runs nothing.

    Raises UserError when the sizes do not multiply to the world size or two factorings have no common refinement.
    """
    first = parse_axes(axes) if axes else {}
    if overlap := first.keys() & sizes.keys():
        raise UserError(f"mesh axis {min(overlap)!r} is given both in {axes!r} and as a keyword")
    first |= sizes
    if not first:
        raise UserError('mesh is empty: name at least one axis, such as "dp=1"')
    factorings = [first, *(parse_axes(text, argument="also") for text in also)]
    if kv_heads is not None and first.get("tp", 1) > 1:
        on_kv = math.gcd(kv_heads, first["tp"])
        cut = {"tp_kv": on_kv, "tp_group": first["tp"] // on_kv}
        factorings.append({k: v for n, s in first.items() for k, v in (cut.items() if n == "tp" else [(n, s)])})
    if world is None:
        world = dist.get_world_size() if dist.is_initialized() else 1
    total = math.prod(first.values())
    if total != world and not abstract:
        shown = " × ".join(f"{a}={n}" for a, n in first.items())
        raise UserError(
            f"mesh {shown} has {total} ranks but this program runs on {world}: "
            f"start it on {total} processes (torchrun --nproc-per-node {total} …, or --nproc {total}) or change the mesh"
        )
    atoms, names = _refine(factorings)
    by_default = sorted(atoms, key=lambda a: a.split("_")[0].rstrip("0123456789") in DATA_AXES)
    chosen = tuple(order) if order is not None else tuple(by_default)
    if sorted(chosen) != sorted(atoms):
        raise UserError(f"order {chosen} must name each of the atomic axes {tuple(atoms)} once")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if total == 1 or abstract:
        return Mesh(atoms, names, chosen, device, simulated=False)
    simulated = simulating()
    ranks = _plain_arange(total).view(*atoms.values())
    permuted = ranks.permute([list(atoms).index(a) for a in chosen]).contiguous()
    one_gloo_thread()
    device_mesh = DeviceMesh(device, permuted, mesh_dim_names=chosen)
    keep_alive(device_mesh)
    return Mesh(atoms, names, chosen, device, simulated, device_mesh, ranks)


def _plain_arange(n: int) -> torch.Tensor:
    return torch.tensor(list(range(n)))


def _refine(factorings: list[dict[str, int]]) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """The common refinement of several factorings of one number of ranks: ({atomic axis: size}, {name: atomic
    axes})."""
    total = math.prod(factorings[0].values())
    spans: dict[
        str, tuple[int, int]
    ] = {}  # name -> (stride of its end, stride of its start), counted from the last axis
    cuts = {1, total}
    for factoring in factorings:
        if math.prod(factoring.values()) != total:
            raise UserError(f"also {factoring} has {math.prod(factoring.values())} ranks, the first factoring {total}")
        stride = total
        for name, size in factoring.items():
            span = (stride, stride // size)
            if spans.setdefault(name, span) != span:
                raise UserError(f"axis {name!r} stands for different ranks in {factorings[0]} and {factoring}")
            cuts |= set(span)
            stride = span[1]
    bounds = sorted(cuts, reverse=True)
    for high, low in zip(bounds, bounds[1:], strict=False):
        if high % low:
            raise UserError(f"the factorings {factorings} have no common refinement: {high} is no multiple of {low}")
    atoms: dict[str, int] = {}
    pieces: dict[tuple[int, int], str] = {}
    owners = [n for n in factorings[0]]
    for high, low in zip(bounds, bounds[1:], strict=False):
        exact = [n for n, s in spans.items() if s == (high, low)]
        owner = next((n for n in owners if spans[n][0] >= high and spans[n][1] <= low), "axis")
        name = exact[0] if exact else f"{owner}_{sum(k.startswith(owner + '_') for k in atoms)}"
        atoms[name] = high // low
        pieces[(high, low)] = name
    for name, (high, low) in spans.items():
        if high == low and name not in atoms:  # an axis of size one stays an axis, so that rules may name it
            atoms[name] = 1
    names = {}
    for name, (high, low) in spans.items():
        inside = tuple(a for (h, lo), a in pieces.items() if h <= high and lo >= low)
        names[name] = inside if high != low else (name,)
    return atoms, names


def everywhere(mesh: Mesh, x: torch.Tensor) -> torch.Tensor:
    """x on the device of the mesh, in simulation as a value per rank."""
    return lift(x, mesh.world) if mesh.simulated else x
