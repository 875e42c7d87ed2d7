"""A product whose gather or scatter runs beside it: what `sh.dot(x, w, equation, overlap=n)` does.

Under tensor parallelism a product waits for the gather of its left operand, or its result for the sum over ranks. Cut
into n chunks along rows of the left operand (batch or sequence), chunk i + 1 is gathered while chunk i is multiplied,
and chunk i is summed while chunk i + 1 is multiplied: only 1/n of the communication is not hidden. (Wang et al. 2023,
"Overlap communication with dependent computation via decomposition"; Megatron's and torch's tensor-parallel overlap.
These cut along the ranks' parts and send them round a ring. Chunks across all parts leave the sums to the library's
own collectives, which add in the same order as for the whole.)

The backward by x is such a product again, with the dual arrows. The gradient by w is one whole product, as without
overlap, which runs beside the last of them. For it a gathered operand is not kept but gathered again, so that a graph
holds each rank's part alone (Megatron's sequence parallelism does the same); in the second run of a `remat`, whose
graph lives for a moment, it is kept. So a product with a gather costs one more gather where its graph is that of the
first run.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

from fmegatron.buckets import Moving, move, start
from fmegatron.collectives import COST, Move, Step, dual
from fmegatron.equations import Equation, Side, einsum_of
from fmegatron.errors import UserError
from fmegatron.function import apply_function, under_torch_func
from fmegatron.layout import Layout, contraction_plan, reshape_plan
from fmegatron.mesh import Mesh
from fmegatron.primitives._function import graph_wanted
from fmegatron.product import Dot, einsum, operands, product, weight_gradient
from fmegatron.rules import Rules, base
from fmegatron.simulation import each_rank, lift
from fmegatron.tape import Tape

NO_CAST = (None, None, None)
# The arrows that can be taken chunk by chunk: those into a product, and those behind one.
BEFORE = ("S>R", "S>I", "I>R", "P>R")
AFTER = ("P>S", "P>I", "P>R", "I>S")


class Row(NamedTuple):
    """A dim along which a product may be cut: its place in x and in y, and of how many ranks the parts are joined
    before it, or handed out behind it (1: it stays as it is)."""

    x: int
    y: int
    joined: int
    handed: int


@dataclass(frozen=True, eq=False)
class Call:
    """What one product computes on every rank: after(einsum(equation, before(x), w)), in up to `chunks` chunks."""

    mesh: Mesh
    equation: str
    before: tuple[Step, ...]
    after: tuple[Step, ...]
    rows: tuple[Row, ...]
    chunks: int

    @functools.cached_property
    def back(self) -> Call:
        """The product that takes the gradient of y to that of x."""
        a, b, o = operands(self.equation)
        rows = tuple(Row(r.y, r.x, r.handed, r.joined) for r in self.rows)
        return Call(self.mesh, f"{o},{b}->{a}", dual(self.after), dual(self.before), rows, self.chunks)

    @property
    def communicates(self) -> bool:
        """Is there a collective, forward or backward?"""
        return any(costs(s) for s in (self.before, self.after, dual(self.before), dual(self.after)))


class Plan(NamedTuple):
    """What `sh.dot` does for one equation. enter: (steps, source, target) of what happens to x first, or None; steps,
    lays, raw, target: of the product, as `contraction_plan` has them; call: both, to be run in chunks; None without
    `overlap` or where there is nothing to run beside."""

    enter: tuple[tuple[Step, ...], Layout, Layout] | None
    steps: tuple[Step, ...]
    lays: list[Layout]
    raw: Layout
    target: Layout
    call: Call | None


def plan_of(equation: Equation, mesh: Mesh, rules: Rules, overlap: int = 0) -> Plan:
    """The plan of one equation, in `overlap` chunks. Raises ShardingError for an equation that has no layout."""
    parts = entering(equation)
    enter = None if parts is None else reshape_plan(parts[0], mesh, rules)
    steps, lays, raw, target = contraction_plan(equation if parts is None else parts[1], mesh, rules)
    call = None
    if overlap > 1:
        before = () if enter is None else enter[0]
        rows = rows_of(einsum_of(equation), mesh, before, steps)
        call = Call(mesh, einsum_of(equation), before, steps, rows, overlap)
        call = call if call.communicates and rows else None
    return Plan(enter, steps, lays, raw, target, call)


def check_overlap(overlap: Any, text: str) -> None:
    """Raises UserError unless `overlap` is a number of chunks."""
    if not isinstance(overlap, int) or isinstance(overlap, bool) or overlap < 0:
        raise UserError(
            f"overlap={overlap!r} of sh.dot(…, {text!r}) must be 0 (no overlap) or a number of chunks, such as 2 or 4"
        )


def entering(equation: Equation) -> tuple[Equation, Equation] | None:
    """The two equations that a product stands for when its left operand is still in the layout between regions, which
    a `*` marks: that of sh(x, …), and the product inside. None for other products.

    "batch seq* embed, embed mlp -> batch seq mlp" is "batch seq* embed -> batch seq embed | mlp" and then
    "batch seq embed, embed mlp -> batch seq mlp". The region is that of the dims which w brings, and of the result's own
    `|`.
    """
    left, right = equation.inputs
    out = {base(n): n for n in equation.output.dims}
    shared = {base(n) for n in right.dims}
    names = tuple(_inside(n, out, shared) for n in left.dims)
    if names == left.dims:
        return None
    have = {base(n) for n in left.dims}
    region = tuple(n for n in equation.output.dims if base(n) not in have) + equation.output.region
    inside = Side(names)
    first = Equation((left,), Side(names, tuple(dict.fromkeys(region))), equation.text)
    return first, Equation((inside, right), equation.output, equation.text)


def _inside(name: str, out: dict[str, str], shared: set[str]) -> str:
    """The name that a dim of the left operand has inside the product."""
    other = out.get(base(name), name)
    return other if base(name) not in shared and name.count("*") > other.count("*") else name


def rows_of(equation: str, mesh: Mesh, before: tuple[Step, ...], after: tuple[Step, ...]) -> tuple[Row, ...]:
    """The dims of x along which the product may be cut, those that no arrow moves first. None where an arrow is one
    that needs the whole value."""
    if any(s.kind not in BEFORE for s in before) or any(s.kind not in AFTER for s in after):
        return ()
    a, b, o = operands(equation)
    rows = []
    for x, letter in enumerate(a):
        if letter in b or letter not in o:
            continue
        y = o.index(letter)
        joined, handed = (_parts(mesh, steps, dim) for steps, dim in ((before, x), (after, y)))
        if joined and handed and 1 in (joined, handed):
            rows.append(Row(x, y, joined, handed))
    return tuple(sorted(rows, key=lambda r: r.joined * r.handed))


def _parts(mesh: Mesh, steps: tuple[Step, ...], dim: int) -> int:
    """Of how many parts a dim is joined, or into how many it is cut; 0 where a part is not one run of it."""
    if any(dim in dict(s.zigzag) or dim in dict(s.uneven) for s in steps):
        return 0
    return math.prod(mesh.size(held) for s in steps for d, held in (*s.leaves, *s.enters) if d == dim)


def costs(steps: tuple[Step, ...]) -> bool:
    """Is there a collective among the arrows?"""
    return any(COST[s.kind] not in ("nothing", "slice") for s in steps)


# ---------------------------------------------------------------------------------------------------------- the product


def overlapped(x: Tensor, w: Tensor, call: Call, *, tape: Tape | None = None, name: str = "dot") -> Tensor:
    """The product of x, in its layout before all arrows, and w, in the layout behind all of them.

    Where fewer chunks divide the rows, as many as do are taken (one, in the worst case). Under torch.compile nothing
    is cut. tape: see `product`; what is saved by name is the result behind the arrows.
    """
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return undivided(x, w, call, tape=tape, name=name)
    if tape is None:
        return apply_function(Overlapped, x, w, None, None, None, call)
    w, saved = tape.enter(name, w)
    result = None if saved is None else saved[0]
    if tape.leaf is None and tape.tap is None:
        again = tape.saved is not None and costs(call.before) and not under_torch_func()
        y = apply_function(Overlapped, x, w, None, result, [] if again else None, call)
        return tape.leave(name, [y], [x])[0]
    x = lift(x, call.mesh.world) if call.mesh.simulated else x
    # The gradient by w needs that of the local product, which is here no tensor: one without storage stands for it.
    local = x.new_zeros(()).expand(_shape(call.equation, _entered_shape(x, call), w.shape))
    local = tape.leave(name, [local], [x], lambda x, g: weight_gradient(_moved(x, call), g, call.equation))[0]
    return apply_function(Overlapped, x, w, local, result, None, call)


def undivided(x: Tensor, w: Tensor, call: Call, *, tape: Tape | None = None, name: str = "dot") -> Tensor:
    """The same, arrow by arrow and whole."""
    x = _arrows(x, call.mesh, call.before)
    return _arrows(product(x, w, call.equation, tape=tape, name=name), call.mesh, call.after)


class Overlapped(Function):
    """(x, w, stand-in of the local product or None, saved result or None, list for the gathered x or None, call) -> y.

    The stand-in's gradient is that of the local product.
    """

    @staticmethod
    def forward(x: Tensor, w: Tensor, local: Tensor | None, saved: Tensor | None, kept: Any, call: Call) -> Tensor:
        if saved is not None:
            return saved.view_as(saved)
        under_way = Running(call, x, w, keep=kept is not None)
        if kept is not None:
            kept.append(under_way.entered)
        return under_way.finish()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        x, w, _, _, kept, ctx.call = inputs
        by_x, by_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if by_w else None, w if by_x else None, *((kept or ()) if by_w else ()))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        x, w, *kept = ctx.saved_tensors
        by_x, by_w, by_local = ctx.needs_input_grad[:3]
        run = _dual_gradients if graph_wanted() else _gradients
        gx, gw, full = run(ctx.call, x, w, g, by_x, by_w, by_local, kept)
        return gx, gw, full if by_local else None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor, local: Any, saved: Any, kept: Any, call: Call) -> Any:
        return torch.func.vmap(lambda x, w: undivided(x, w, call), in_dims[:2])(x, w), 0


def _gradients(
    call: Call, x: Any, w: Any, g: Tensor, by_x: bool, by_w: bool, by_local: bool, kept: list[Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(by x, by w, by the local product), without a graph. The last sums of the first run beside the second."""
    wanted = by_w or by_local
    entered = None if kept or not by_w else start(call.mesh, [x], [call.before])
    under_way = Running(call.back, g, w, keep=wanted) if by_x else None
    full = gw = None
    if wanted:
        full = move(call.mesh, [g], [call.back.before])[0] if under_way is None else under_way.entered
    if by_w:
        assert full is not None
        gw = weight_gradient(kept[0] if entered is None else entered.finish()[0], full, call.equation)
    return None if under_way is None else under_way.finish(), gw, full


def _dual_gradients(
    call: Call, x: Any, w: Any, g: Tensor, by_x: bool, by_w: bool, by_local: bool, kept: list[Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The same by differentiable functions."""
    gx = apply_function(Overlapped, g, w, None, None, None, call.back) if by_x else None
    full = _arrows(g, call.mesh, call.back.before) if by_w or by_local else None
    gw = None
    if by_w:
        a, b, o = operands(call.equation)
        gw = apply_function(Dot, _arrows(x, call.mesh, call.before), full, None, f"{a},{o}->{b}")
    return gx, gw, full


class Running:
    """A product under way, without a graph; `finish` gives its result.

    keep: `entered` is x behind the arrows `before`, whole. At any time one chunk of it is under way, one is multiplied,
    and one of the results is under way.
    """

    def __init__(self, call: Call, x: Tensor, w: Tensor, *, keep: bool = False) -> None:
        self.call, self.result, self.entered = call, Whole(), None
        self.going: tuple[int, Moving] | None = None
        before, mesh = call.before, call.mesh
        x = lift(x, mesh.world) if mesh.simulated else x
        if not costs(before):  # what needs no other rank is done for the whole
            x, before = move(mesh, [x], [before])[0], ()
            self.entered, keep = x if keep else None, False
        self.count, self.row = division(call, x, before)
        inputs = Whole()
        coming = start(mesh, [self._piece(x, 0)], [before])
        for i in range(self.count):
            following = start(mesh, [self._piece(x, i + 1)], [before]) if i + 1 < self.count else None
            h = coming.finish()[0]
            if keep:
                inputs.put(h, self.row.x, self.row.joined, self.count, i)
            self._multiply(h, w, i)
            del h
            if following is not None:
                coming = following
        if keep:
            self.entered = inputs.value

    def finish(self) -> Tensor:
        """The result, behind the arrows `after`."""
        self._take()
        assert self.result.value is not None
        return self.result.value

    def _piece(self, x: Tensor, i: int) -> Tensor:
        """Chunk i of x."""
        if self.count == 1:
            return x
        piece = slot(x, self.row.x, self.row.handed, self.count, i)
        return piece.flatten(self.row.x, self.row.x + 1) if self.row.handed > 1 else piece

    def _multiply(self, h: Tensor, w: Tensor, i: int) -> None:
        call, row = self.call, self.row
        if not call.after:
            shape = _shape(call.equation, h.shape, w.shape)
            if self.count == 1:
                self.result.value = multiply(call.equation, h, w)
            else:
                there = self.result.room(h, shape, row.y, row.joined, self.count, i)
                multiply(call.equation, h, w, into=there, parts=(row.y, row.joined))
            return
        going = start(call.mesh, [multiply(call.equation, h, w)], [call.after])
        self._take()
        self.going = i, going

    def _take(self) -> None:
        """The chunk of the result that is under way, put into its place."""
        if self.going is not None:
            i, going = self.going
            self.going = None
            self.result.put(going.finish()[0], self.row.y, self.row.joined, self.count, i)


def division(call: Call, x: Tensor, before: tuple[Step, ...]) -> tuple[int, Row]:
    """(number of chunks, along which rows): as many chunks up to `call.chunks` as divide."""
    if costs(before) or costs(call.after):
        for count in range(call.chunks, 1, -1):
            for row in call.rows:
                size = x.shape[row.x]
                if size % (row.handed * count) == 0 and size > 0:
                    return count, row
    return 1, Row(0, 0, 1, 1)


class Whole:
    """A tensor that is filled chunk by chunk."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def room(self, like: Tensor, shape: tuple[int, ...], dim: int, parts: int, count: int, i: int) -> Tensor:
        """Where chunk i of this shape goes, of `count` along a dim that is made of the parts of some ranks: a view
        [part, place in it] of that dim, or plain for one part."""
        if self.value is None:
            self.value = like.new_empty((*shape[:dim], shape[dim] * count, *shape[dim + 1 :]))
        return slot(self.value, dim, parts, count, i)

    def put(self, chunk: Tensor, dim: int, parts: int, count: int, i: int) -> None:
        """Chunk i into its place."""
        if count == 1:
            self.value = chunk
        else:
            _copy(self.room(chunk, tuple(chunk.shape), dim, parts, count, i), chunk, dim, parts)


def slot(x: Tensor, dim: int, parts: int, count: int, i: int) -> Tensor:
    """Chunk i of `count` of every one of the parts of a dim, as a view: [parts, size] where there is more than one."""
    if parts == 1:
        size = x.shape[dim] // count
        return x.narrow(dim, i * size, size)
    return x.unflatten(dim, (parts, count, x.shape[dim] // (parts * count))).select(dim + 1, i)


def _copy(there: Tensor, chunk: Tensor, dim: int, parts: int) -> Tensor:
    there.copy_(chunk if parts == 1 else chunk.unflatten(dim, (parts, chunk.shape[dim] // parts)))
    return there


# ------------------------------------------------------------------------------------------------------------- products


def multiply(
    equation: str, x: Tensor, w: Tensor, *, into: Tensor | None = None, parts: tuple[int, int] = (0, 1)
) -> Tensor:
    """The local product of one chunk; `into`: where to write it (parts: see `_copy`)."""
    if into is None:
        return einsum(equation, x, w)
    return each_rank(lambda there, x, w: _multiply_into(equation, there, x, w, parts), into, x, w)


def _multiply_into(equation: str, there: Tensor, x: Tensor, w: Tensor, parts: tuple[int, int]) -> Tensor:
    """The product written where it belongs, without a copy where that is one matrix."""
    a, b, o = operands(equation)
    rows, columns, sums = ([n for n in s if n in t and n not in u] for s, t, u in ((o, a, b), (o, b, a), (a, b, o)))
    plain = rows and columns and sums and list(o) == rows + columns
    if not plain or parts[1] > 1 or not there.is_contiguous():
        return _copy(there, torch.einsum(equation, x, w), *parts)
    left = x.permute([a.index(n) for n in rows + sums]).flatten(len(rows)).flatten(0, len(rows) - 1)
    right = w.permute([b.index(n) for n in sums + columns]).flatten(len(sums)).flatten(0, len(sums) - 1)
    # a batch of one matrix, as einsum has it: the same kernel
    torch.bmm(left[None], right[None], out=there.view(1, left.shape[0], right.shape[1]))
    return there


def _shape(equation: str, x: Any, w: Any) -> tuple[int, ...]:
    """The shape of a product of operands of some shapes."""
    a, b, o = operands(equation)
    sizes = dict(zip(a, x, strict=True)) | dict(zip(b, w, strict=True))
    return tuple(sizes[n] for n in o)


def _entered_shape(x: Tensor, call: Call) -> list[int]:
    """The shape of x behind the arrows `before`."""
    shape = list(x.shape)
    for step in call.before:
        for dim, held in step.leaves:
            shape[dim] = dict(step.uneven).get(dim, shape[dim] * call.mesh.size(held))
    return shape


def _moved(x: Tensor, call: Call) -> Tensor:
    return move(call.mesh, [x], [call.before])[0]


def _arrows(x: Tensor, mesh: Mesh, steps: tuple[Step, ...]) -> Tensor:
    return apply_function(Move, x, mesh, steps, NO_CAST) if steps else x
