"""The arrows of `sh`: what a value costs to go from one layout to another, forward and backward.

A layout gives a value one type per mesh axis: S (Shard of a dim), P (Partial: a summand), R (Replicate: equal on all
ranks, read by work that differs along the axis) or I (Invariant: equal, used alike). Gradients have the dual type:
S with S, P with R, I with I. So the backward of every arrow is its *dual* arrow, and calls the same primitive: second
derivatives are right.

    forward        cost             backward
    S -> R         all-gather       reduce-scatter
    S -> I         all-gather       slice
    I -> S         slice            all-gather
    I -> R         nothing          all-reduce
    P -> I         all-reduce       nothing
    P -> R         all-reduce       all-reduce
    P -> S         reduce-scatter   all-gather
    S -> S'        all-to-all       all-to-all

Two more steps are no arrows and change no type: "fill" makes a part of a parameter at rest as large as every rank's
where its size does not divide, and "cut" is the way back (see fmegatron.uneven).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from fmegatron import uneven
from fmegatron.dtensor import DTensor
from fmegatron.errors import ShardingError, UserError
from fmegatron.function import apply_function
from fmegatron.interleave import pass_turn
from fmegatron.mesh import Mesh
from fmegatron.recording import note_collective
from fmegatron.simulation import from_ranks, lift, on_each_rank
from fmegatron.zigzag import from_zigzag, to_zigzag, zigzag_positions

DUAL = {
    "S>R": "P>S",
    "P>S": "S>R",
    "S>I": "I>S",
    "I>S": "S>I",
    "I>R": "P>I",
    "P>I": "I>R",
    "P>R": "P>R",
    "S>S": "S>S",
    "fill": "cut",
    "cut": "fill",
}

COST = {
    "S>R": "all-gather",
    "S>I": "all-gather",
    "I>S": "slice",
    "I>R": "nothing",
    "P>I": "all-reduce",
    "P>R": "all-reduce",
    "P>S": "reduce-scatter",
    "S>S": "all-to-all",
    "fill": "nothing",
    "cut": "nothing",
}

# torch 2.13 renamed two of its functional collectives.
gather_single = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
scatter_single = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor

# Which axes enter or leave which dim: ((dim, axes with the major one first), ...)
Held = tuple[tuple[int, tuple[str, ...]], ...]
# Which dims are in the zigzag order of how many ranks while some axis cuts them: ((dim, ranks), ...)
Orders = tuple[tuple[int, int], ...]
# Which dims have parts of unequal size, and their global sizes: ((dim, size), ...)
Uneven = tuple[tuple[int, int], ...]


class Wire(NamedTuple):
    """How the summands of a sum over ranks travel: rounded to one dtype, and added in another where they arrive."""

    sent: torch.dtype
    summed: torch.dtype


class Step(NamedTuple):
    """One arrow over several axes at once, which is one collective on their flattened group."""

    kind: str
    axes: tuple[str, ...]  # in rank order
    leaves: Held  # dims that stop being sharded, and by which axes
    enters: Held  # dims that start to be
    zigzag: Orders = ()  # dims whose order changes with it
    uneven: Uneven = ()  # dims among them whose size does not divide
    wire: Wire | None = None  # of its sum, or its dual's; None: the network adds, in the value's own dtype
    turn: bool = False  # may another program compute meanwhile (see `fmegatron.interleave`)?


def dual(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps of the backward."""
    return tuple(s._replace(kind=DUAL[s.kind], leaves=s.enters, enters=s.leaves) for s in reversed(steps))


class Move(torch.autograd.Function):
    """A value cast to `work`, taken through the steps, and cast to `out`. The backward is the dual move, cast to
    `back` while it is under way. dtypes: (work, out, back), each a dtype or None for no cast."""

    @staticmethod
    def forward(x: torch.Tensor, mesh: Mesh, steps: tuple[Step, ...], dtypes: tuple[Any, Any, Any]) -> torch.Tensor:
        if isinstance(x, DTensor):
            raise UserError(
                "torch.func was given DTensor parameters, which it hides from annotations: pass sh.local(params)"
            )
        work, out, _ = dtypes
        y = x if work is None else x.to(work)
        for step in steps:
            y = run_step(y, mesh, step)
        y = y if out is None else y.to(out)
        return y.view_as(y) if y is x else y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.mesh, ctx.steps, ctx.dtypes = inputs
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        work, _, back = ctx.dtypes
        return apply_function(Move, g, ctx.mesh, dual(ctx.steps), (back, ctx.dtype, work)), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, mesh: Mesh, steps: tuple[Step, ...], dtypes: Any) -> Any:
        def later(held: Held) -> Held:
            return tuple((d + 1, axes) for d, axes in held)

        shifted = tuple(
            s._replace(
                leaves=later(s.leaves),
                enters=later(s.enters),
                zigzag=tuple((d + 1, n) for d, n in s.zigzag),
                uneven=tuple((d + 1, n) for d, n in s.uneven),
            )
            for s in steps
        )
        return apply_function(Move, x.movedim(in_dims[0], 0), mesh, shifted, dtypes), 0


class LargestOverRanks(torch.autograd.Function):
    """Elementwise maximum over the ranks of some axes; it has no gradient."""

    @staticmethod
    def forward(x: torch.Tensor, mesh: Mesh, axes: tuple[str, ...]) -> torch.Tensor:
        return all_reduce(x, mesh, axes, "max")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Any:
        return apply_function(LargestOverRanks, x.movedim(in_dims[0], 0), mesh, axes), 0


def all_reduce(x: torch.Tensor, mesh: Mesh, axes: tuple[str, ...], op: str = "sum") -> torch.Tensor:
    """The sum (or "max", …) over the ranks of some axes, as a new tensor: the input is never overwritten."""
    if not mesh.live(axes):
        return x
    x = lift(x, mesh.world) if mesh.simulated else x
    note_collective("all-reduce", mesh.sorted(axes), mesh.size(axes), x)
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), op, mesh.group(axes)))


def run_step(x: torch.Tensor, mesh: Mesh, step: Step) -> torch.Tensor:
    """One arrow on a local tensor, without a gradient."""
    kind, axes = step.kind, step.axes
    if mesh.simulated:
        x = lift(x, mesh.world)
    if kind == "I>R":
        return x.view_as(x)
    if kind == "I>S":
        for dim, held in step.enters:
            x = _my_part(_laid_out(x, mesh, step, dim, dim, held), mesh, dim, held, _ranks_of(step, dim))
        return x
    if kind in ("fill", "cut"):
        for dim, held in (*step.enters, *step.leaves):
            x = _at_rest(x, mesh, step, dim, held)
        return x
    if kind not in DUAL:
        raise ShardingError(f"{kind} is no arrow")
    sent = packed(x, mesh, step)  # alive until it has left
    if (wire := wire_of(step)) is not None:
        finish = NarrowSum(COST[kind], sent, mesh, axes, wire).finish
    else:
        finish = functools.partial(end, begin(COST[kind], sent, mesh, axes))
    if step.turn:
        pass_turn()
    return unpacked(finish(), mesh, step)


def wire_of(step: Step) -> Wire | None:
    """How the summands of a step travel; None for one that adds nothing, or whose sum is the network's."""
    return step.wire if COST[step.kind] in ("all-reduce", "reduce-scatter") else None


def packed(x: torch.Tensor, mesh: Mesh, step: Step) -> torch.Tensor:
    """What the collective of a step takes: [1, …] to gather, [group, …] where each rank has a piece for every rank."""
    if step.kind in ("S>R", "S>I"):
        return x.contiguous()[None]
    return x.contiguous() if COST[step.kind] == "all-reduce" else _split(x, mesh, step).contiguous()


def unpacked(y: torch.Tensor, mesh: Mesh, step: Step) -> torch.Tensor:
    """The value behind a step, from what its collective gave."""
    if step.kind in ("S>R", "S>I", "S>S"):
        return _join(y, mesh, step)
    return y if COST[step.kind] == "all-reduce" else y[0]


def begin(collective: str, x: torch.Tensor, mesh: Mesh, axes: tuple[str, ...]) -> torch.Tensor:
    """Issues a collective of a packed value over some axes; `end` waits for its result."""
    note_collective(collective, axes, mesh.size(axes), x)
    group = mesh.group(axes)
    if collective == "all-gather":
        y = gather_single(x, 0, group)
    elif collective == "all-reduce":
        y = functional.all_reduce(x, "sum", group)
    elif collective == "reduce-scatter":
        y = scatter_single(x, "sum", 0, group)
    else:
        y = functional.all_to_all_single(x, None, None, group)
    # In a simulation nothing travels, and what is refused before `end` leaves nothing that torch would miss.
    return end(y) if mesh.simulated else y


def end(x: torch.Tensor) -> torch.Tensor:
    """Waits for what `begin` gave."""
    return functional.wait_tensor(x)


class NarrowSum:
    """A sum over ranks on its way whose summands travel in a narrow dtype and are added in a wide one.

    Each rank owns a part of the sum and receives the others' summands of it, by an all-to-all; for an all-reduce the sums
    are then gathered in the narrow dtype, so that all ranks, the owner too, have the same. Packed values as for `begin`.
    """

    def __init__(self, collective: str, x: torch.Tensor, mesh: Mesh, axes: tuple[str, ...], wire: Wire) -> None:
        self.mesh, self.axes, self.wire = mesh, axes, wire
        self.shape = x.shape if collective == "all-reduce" else None
        x = x.to(wire.sent)
        if self.shape is not None:
            n = mesh.size(axes)
            x = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % n)).view(n, -1)
        self.sent = begin("all-to-all", x, mesh, axes)
        self.gathered: torch.Tensor | None = None

    def advance(self) -> bool:
        """Waits for the summands and begins to gather the sums, where they are gathered and that has not begun: has it now?"""
        if self.shape is None or self.gathered is not None:
            return False
        self.gathered = begin("all-gather", self._own().to(self.wire.sent), self.mesh, self.axes)
        del self.sent
        return True

    def finish(self) -> torch.Tensor:
        """The sum, in the wide dtype: [1, …] of what this rank owns, or the whole one."""
        if self.shape is None:
            return self._own()
        self.advance()
        assert self.gathered is not None
        whole = end(self.gathered).reshape(-1)[: self.shape.numel()]
        return whole.view(self.shape).to(self.wire.summed)

    def _own(self) -> torch.Tensor:
        return end(self.sent).sum(0, keepdim=True, dtype=self.wire.summed)


def begin_exchange(xs: Sequence[torch.Tensor], mesh: Mesh, axes: tuple[str, ...], *, back: bool = False) -> Exchange:
    """Begins to send tensors to the next rank along an ordered tuple of axes (the last rank's go to the first), or `back`
    to the one before: `.finish()` waits for those that come from the other side. Shapes are the same on all ranks.
    Without a gradient."""
    return Exchange(xs, mesh, axes, back)


class Exchange:
    """Tensors on their way to a neighbour."""

    def __init__(self, xs: Sequence[torch.Tensor], mesh: Mesh, axes: tuple[str, ...], back: bool) -> None:
        self.sent = [x.contiguous() for x in xs]  # alive until they have left
        self.pending: list[Any] = []
        for x in self.sent:
            note_collective("exchange", mesh.sorted(axes), mesh.size(axes), x)
        sources, targets = neighbours(mesh, axes)[:: -1 if back else 1]
        if mesh.simulated:
            self.received = [from_ranks(lift(x, mesh.world), sources) for x in self.sent]
            return
        ranks, group = mesh.ranks, mesh.process_group(axes)
        to, of = ranks[targets[mesh.rank]], ranks[sources[mesh.rank]]
        self.received = [torch.empty_like(x) for x in self.sent]
        sends = [dist.P2POp(dist.isend, x, to, group) for x in self.sent]
        receives = [dist.P2POp(dist.irecv, x, of, group) for x in self.received]
        self.pending = dist.batch_isend_irecv([*sends, *receives])

    def finish(self) -> list[torch.Tensor]:
        """The tensors of the neighbour, once they have come."""
        for request in self.pending:
            request.wait()
        received, self.received, self.sent, self.pending = self.received, [], [], []
        return received


def neighbours(mesh: Mesh, axes: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """For every rank of the mesh, by its number there, the one before it and the one behind it in the ring along an
    ordered tuple of axes."""
    places = ring_places(mesh, axes)
    others = [a for a in mesh.sizes if a not in axes]
    at = {}
    for rank, (place, coordinates) in enumerate(places):
        at[(place, *(coordinates[a] for a in others))] = rank
    size = mesh.size(axes)

    def shifted(by: int) -> list[int]:
        return [at[((place + by) % size, *(c[a] for a in others))] for place, c in places]

    return shifted(-1), shifted(1)


def ring_places(mesh: Mesh, axes: tuple[str, ...]) -> list[tuple[int, dict[str, int]]]:
    """Of every rank: its number along an ordered tuple of axes, and its coordinate on each axis."""
    found = []
    for numbers in itertools.product(*(range(n) for n in mesh.sizes.values())):
        coordinates = dict(zip(mesh.sizes, numbers, strict=True))
        place = 0
        for axis in axes:
            place = place * mesh.sizes[axis] + coordinates[axis]
        found.append((place, coordinates))
    return found


def _ranks_of(step: Step, dim: int) -> int:
    """The number of ranks in whose zigzag order a step puts a dim, or from which it takes it; 1 for the plain order."""
    for d, n in step.zigzag:
        if d == dim:
            return n
    return 1


def _my_part(x: torch.Tensor, mesh: Mesh, dim: int, axes: tuple[str, ...], ranks: int) -> torch.Tensor:
    """The part of a dim that this rank holds when some axes cut it."""
    part = _divide(x, dim, mesh.size(axes), axes)
    place = mesh.position(axes)
    if not mesh.simulated and ranks == 1:
        return x.narrow(dim, place * part, part)
    held = place * part + torch.arange(part, device=x.device)
    return x.index_select(dim, zigzag_positions(held, x.shape[dim], ranks))


def _divide(x: torch.Tensor, dim: int, n: int, axes: tuple[str, ...]) -> int:
    if x.shape[dim] % n:
        raise ShardingError(
            f"a dim of size {x.shape[dim]} (dim {dim} of a local {tuple(x.shape)}) does not divide by {n}, "
            f"the size of mesh axes {', '.join(axes)}: choose a size that divides, or a rule without these axes"
        )
    return x.shape[dim] // n


def _split(x: torch.Tensor, mesh: Mesh, step: Step) -> torch.Tensor:
    """Cut the dims that `step.enters`: [group, ...], the pieces in the group's (that is rank) order."""
    order = [a for _, held in step.enters for a in held]
    for k, (dim, held) in enumerate(step.enters):
        n = mesh.size(held)
        x = _laid_out(x, mesh, step, dim, dim + k, held)
        _divide(x, dim + k, n, held)
        x = to_zigzag(x, dim + k, _ranks_of(step, dim))
        x = x.unflatten(dim + k, (n, -1)).movedim(dim + k, k)
    if order == list(step.axes):
        return x.flatten(0, len(step.enters) - 1)
    # torch sorts the ranks of a group, so chunks in the order of a tuple of axes are permuted into rank order
    x = x.reshape(*(mesh.sizes[a] for a in order), *x.shape[len(step.enters) :])
    n = len(order)
    return x.permute(*(order.index(a) for a in step.axes), *range(n, x.ndim)).flatten(0, n - 1)


def _join(y: torch.Tensor, mesh: Mesh, step: Step) -> torch.Tensor:
    """[group, ...] in rank order -> joined along the dims that `step.leaves`."""
    order = [a for _, held in step.leaves for a in held]
    if len(step.leaves) == 1 and order == list(step.axes):
        dim, held = step.leaves[0]
        y = from_zigzag(y.movedim(0, dim).flatten(dim, dim + 1), dim, _ranks_of(step, dim))
        return _whole(y, mesh, step, dim, dim, held)
    n = len(order)
    y = y.unflatten(0, [mesh.sizes[a] for a in step.axes])
    y = y.permute(*(step.axes.index(a) for a in order), *range(n, y.ndim))
    for k, (dim, held) in enumerate(step.leaves):
        waiting = sum(len(u) for _, u in step.leaves[k + 1 :])  # leading dims of the joins still to come
        y = y.flatten(0, len(held) - 1).movedim(0, waiting + dim).flatten(waiting + dim, waiting + dim + 1)
        y = from_zigzag(y, waiting + dim, _ranks_of(step, dim))
        y = _whole(y, mesh, step, dim, waiting + dim, held)
    return y


def _counts(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(mesh.sizes[a] for a in mesh.live(axes))


def _laid_out(x: torch.Tensor, mesh: Mesh, step: Step, dim: int, at: int, axes: tuple[str, ...]) -> torch.Tensor:
    """A whole dim, where its parts are of unequal size, with each of them filled up. at: where the dim is in x."""
    return uneven.lay_out(x, at, _counts(mesh, axes)) if dim in dict(step.uneven) else x


def _whole(x: torch.Tensor, mesh: Mesh, step: Step, dim: int, at: int, axes: tuple[str, ...]) -> torch.Tensor:
    """The way back."""
    n = dict(step.uneven).get(dim)
    return x if n is None else uneven.whole(x, at, n, _counts(mesh, axes))


def _at_rest(x: torch.Tensor, mesh: Mesh, step: Step, dim: int, axes: tuple[str, ...]) -> torch.Tensor:
    """This rank's part of a dim: from rest to equations ("fill") or back ("cut")."""
    n, counts = dict(step.uneven)[dim], _counts(mesh, axes)
    if not mesh.simulated:
        if step.kind == "fill":
            return uneven.filled(x, dim, n, counts)
        return uneven.cut(x, dim, n, counts, mesh.position(axes))
    places = [place for place, _ in ring_places(mesh, mesh.live(axes))]

    def one(rank: int, x: torch.Tensor) -> tuple[torch.Tensor]:
        if step.kind == "fill":
            return (uneven.filled(x, dim, n, counts),)
        return (uneven.cut(x, dim, n, counts, places[rank]).contiguous(),)

    return on_each_rank(one, mesh.world, x)[0]
