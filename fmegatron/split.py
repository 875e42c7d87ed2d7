"""`split(f) -> forward, backward, backward_input, backward_weight`: what remat, stack, chain and pipeline are made of.

A block is a plain function f(params, x, ctx) -> y of pytrees. Its backward can be run at once, or in two halves: the
gradient of the input first (which the stage before waits for), the gradients of the weights whenever there is time,
as in zero-bubble pipelines (Qi et al. 2023). A residual, which is what lies between forward and backward, holds no
parameter: those are given again, so that gathered parameters can be dropped in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from fmegatron.errors import UserError
from fmegatron.function import apply_function
from fmegatron.tape import Call, Root, Tape, Unchanged, make_root
from fmegatron.tree import add, detached, is_float, is_tensor, leaves, like, structure, tensors, tree_map

CLOSURE = (
    "a block reads a tensor that needs a gradient and is no argument (by closure or in ctx): "
    "pass it in params or in the carry"
)


def everything(name: str) -> bool:
    """Policy: keep the whole graph, run nothing again."""
    return True


def nobody(name: str) -> bool:
    """No computation is kept by name."""
    return False


class Split(NamedTuple):
    """The four functions of `split`; gradient trees have None where there is no gradient.

    `forward(params, x, ctx, joint=False, trainable=None) -> (y, residual)`; joint: the residual is meant for
        `backward`; trainable: tree of bools like params, False where no gradient is wanted.
    `backward(residual, gy, params) -> (gx, gparams)` `backward_input(residual, gy, params) -> (gx, left)`: no
    product that gives a weight's gradient is run.
    `backward_weight(left) -> gparams`: those products alone, each half of the backward's work.
    """

    forward: Callable
    backward: Callable
    backward_input: Callable
    backward_weight: Callable


def split(f: Callable, save: Callable[[str], bool] = everything, *, hidden: bool = True) -> Split:
    """Splits the backward of a block f(params, x, ctx) -> y. `remat`, `stack` and `chain` carry a split of their own.

    save: which computations, by name, are kept for the backward; everything else is run again there.
    hidden: the residual holds no parameter. (Not needed where the parameters live on anyway; saves host time.)

    Products by a leaf of params itself, called as `sh.dot(x, params["w"], …)`, are left to `backward_weight`; what a
    leaf gets from other uses (`x @ w`, a norm's weight, an embedding) comes in `backward_input`. f may be compiled:
    it is then run once with abstract values per set of shapes. Raises UserError when f reads a tensor that needs a
    gradient without getting it as an argument, or changes in place what a backward needs.
    """
    if hasattr(f, "split"):
        return f.split
    plain = uncompiled(f)
    keep = nobody if save is everything else save  # with the whole graph nothing is kept beside it
    plans: dict[Any, list[Call]] = {}

    def planned(p: Any, x: Any, ctx: Any) -> list[Call]:
        """The calls of primitives in f, if f is compiled: its taps must exist before it runs."""
        if plain is f:
            return []
        key = structure((p, x)), *((t.shape, t.dtype) if is_tensor(t) else t for t in leaves((p, x)))
        if key not in plans:
            plans[key] = abstract_calls(plain, p, x, ctx, keep)
        return plans[key]

    def run(tape: Tape, p: Any, x: Any, ctx: Any) -> Any:
        y = f(p, x, ctx.with_tape(tape))
        tape.check()
        return y

    def graph(p: Any, x: Any, ctx: Any, joint: bool, trainable: Any, saved: Any = None) -> tuple[Any, Graph]:
        """Runs f with roots in front of its inputs; the graph that comes of it."""
        wanted = [is_float(t) for t in leaves(p)]
        if trainable is not None:
            wanted = [w and t for w, t in zip(wanted, leaves(trainable), strict=True)]
        calls, cell = [] if joint else planned(p, x, ctx), Cell()
        # A graph of a second run lives no longer than its parameters.
        hiding = hidden and save is everything
        with torch.enable_grad(), hide(leaves(p), cell) if hiding else contextlib.nullcontext():
            p_roots, p_in = behind_roots(p, wanted)
            x_roots, x_in = behind_roots(x, [is_float(t) for t in leaves(x)])
            taps: list[torch.Tensor | None] = []
            weights: list[Any] = []
            if calls:
                like_p = next(t for t in leaves(p) if is_tensor(t))
                tapped = [c.leaf is not None and wanted[c.leaf] for c in calls]
                taps = [make_root(like_p, c.shape, c.dtype) if t else None for c, t in zip(calls, tapped, strict=True)]
            elif not joint and plain is f:
                weights = [t if w else None for t, w in zip(leaves(p_in), wanted, strict=True)]
            tape = Tape(keep, weights, taps, saved)
            y = run(tape, p_in, x_in, ctx)
        outs = [(i, get_gradient_edge(o)) for i, o in enumerate(leaves(y)) if is_float(o) and o.requires_grad]
        calls = [c for c in tape.calls or calls if c.leaf is not None and wanted[c.leaf]]
        roots = x_roots, p_roots, [t for t in tape.taps if t is not None]
        refuse_other_leaves([edge for _, edge in outs], tensors(roots)[0])
        unchanged = Unchanged(t for inputs in tape.inputs for t in inputs)
        return detached(y), Graph(outs, roots, calls, tape.inputs, unchanged, cell)

    def pull(residual: Graph | Again, gy: Any, params: Any) -> tuple[Graph, Any, Any, list]:
        """The graph, and the gradients that arrive at x, at params and at the taps."""
        if isinstance(residual, Again):
            residual.unchanged.check()
            _, g = graph(params, residual.x, residual.ctx, residual.joint, residual.trainable, residual.kept)
        else:
            g = residual
        (roots, build), gy = tensors(g.roots), leaves(gy)
        outs = [(edge, gy[i]) for i, edge in g.outs if gy[i] is not None]
        got: Sequence = [None] * len(roots)
        if outs and roots:
            g.cell.params = leaves(params)
            got = torch.autograd.grad([e for e, _ in outs], roots, [c for _, c in outs], allow_unused=True)
            g.cell.params = []
        return g, *build(got)

    def forward(p: Any, x: Any, ctx: Any, joint: bool = False, trainable: Any = None) -> tuple[Any, Graph | Again]:
        if save is everything:
            return graph(p, x, ctx, joint, trainable)
        p, x = detached((p, x))
        planned(p, x, ctx)  # finds what a compiled block changes in place
        tape = Tape(save)
        with torch.enable_grad():  # nothing here needs a gradient, but a block may branch on grad mode
            y = run(tape, p, x, ctx)
        if any(t.requires_grad for t in tensors(y)[0]):
            raise UserError(CLOSURE)
        unchanged = Unchanged([*tensors(x)[0], *(t for outs in tape.kept for t in outs)])
        return y, Again(x, ctx, tape.kept, joint, trainable, unchanged)

    def backward(residual: Graph | Again, gy: Any, params: Any) -> tuple[Any, Any]:
        _, gx, gp, _ = pull(residual, gy, params)
        return gx, gp

    def backward_input(residual: Graph | Again, gy: Any, params: Any) -> tuple[Any, Left]:
        g, gx, gp, taps = pull(residual, gy, params)
        return gx, Left(gp, g.calls, g.inputs, taps, g.unchanged)

    def backward_weight(left: Left) -> Any:
        gp = leaves(left.gp)
        left.unchanged.check()
        left.unchanged.seen.clear()
        for call in left.calls:
            inputs, g = left.inputs.pop(0), left.taps.pop(0)  # dropped as they are used
            if g is not None and call.leaf is not None and call.weight_gradient is not None:
                gp[call.leaf] = add(gp[call.leaf], call.weight_gradient(*inputs, g))
        return like(left.gp, gp)

    return Split(forward, backward, backward_input, backward_weight)


class Cell:
    """Where the backward's parameters are put for the time of the backward."""

    params: Sequence[Any] = ()


@dataclass
class Graph:
    """A residual: a graph. `outs`: (which leaf of y, its edge); `roots`: (like x, like params, taps)."""

    outs: list[tuple[int, GradientEdge]]
    roots: tuple[Any, Any, list[torch.Tensor]]
    calls: list[Call]  # the tapped products,
    inputs: list[list[torch.Tensor]]  # and their inputs
    unchanged: Unchanged
    cell: Cell


@dataclass
class Again:
    """A residual: what a second run of the block needs besides its parameters."""

    x: Any
    ctx: Any
    kept: list[list[torch.Tensor]]
    joint: bool
    trainable: Any
    unchanged: Unchanged


@dataclass
class Left:
    """What is left to do for the weights: gp, their gradients so far, and inputs to multiply with gradients at taps."""

    gp: Any
    calls: list[Call]
    inputs: list[list[torch.Tensor]]
    taps: list[torch.Tensor | None]
    unchanged: Unchanged


def uncompiled(f: Callable) -> Callable:
    """The function inside torch.compile, or f itself."""
    return getattr(f, "_torchdynamo_orig_callable", f)


def behind_roots(tree: Any, wanted: Iterable[bool]) -> tuple[Any, Any]:
    """(roots, values): every wanted leaf cut off its graph and put behind a root; None for the root of another one."""
    flat = leaves(detached(tree))
    roots = [make_root(t, t.shape, t.dtype) if w else None for t, w in zip(flat, wanted, strict=True)]
    values = [t if r is None else apply_function(Root, r, t) for t, r in zip(flat, roots, strict=True)]
    return like(tree, roots), like(tree, values)


def abstract_calls(f: Callable, p: Any, x: Any, ctx: Any, save: Callable[[str], bool]) -> list[Call]:
    """The primitives that f calls, with the shapes of their outputs, by a run without data."""

    def fake(t: Any) -> Any:
        return torch.empty(t.shape, dtype=t.dtype, device=t.device) if is_tensor(t) else t

    active = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    with torch.enable_grad(), active or FakeTensorMode(allow_non_fake_inputs=True):
        p, x, ctx = tree_map(fake, (p, x, ctx))
        tape = Tape(save, leaves(p))
        f(p, x, ctx.with_tape(tape))
        tape.check()
    return tape.calls


def hide(params: Sequence[Any], cell: Cell) -> saved_tensors_hooks:
    """While on, tensors saved for backward that alias one of params are kept as (which one, the view of it).

    In backward they are read from `cell.params`, whose storages may be others. A saved tensor of another dtype is no
    view of a parameter but a cast of it.
    """
    at: dict[int, list[int]] = {}
    for i, t in enumerate(params):
        if is_tensor(t):
            at.setdefault(t.untyped_storage()._cdata, []).append(i)
    layout = [(t.dtype, t.stride(), t.storage_offset(), extent(t)) if is_tensor(t) else None for t in params]
    del params  # the hooks live as long as the graph

    def pack(t: torch.Tensor) -> Any:
        for i in at.get(t.untyped_storage()._cdata, ()):
            dtype, stride, start, length = layout[i]  # type: ignore[misc]
            offset = t.storage_offset() - start
            if t.dtype == dtype and offset >= 0 and offset + extent(t) <= length:
                return i, t.size(), t.stride(), offset
        return t

    def unpack(kept: Any) -> torch.Tensor:
        if is_tensor(kept):
            return kept
        i, size, stride, offset = kept
        if cell.params[i].stride() != layout[i][1]:  # type: ignore[index]
            raise UserError(f"parameter {i} of a block has other strides in backward than it had in forward")
        return cell.params[i].as_strided(size, stride, offset + cell.params[i].storage_offset())

    return saved_tensors_hooks(pack, unpack)


def extent(t: torch.Tensor) -> int:
    """How many elements of its storage a tensor spans."""
    if t.is_contiguous():
        return t.numel()
    return 0 if t.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def refuse_other_leaves(edges: Iterable[GradientEdge], roots: Iterable[torch.Tensor]) -> None:
    """Raises when a graph leads to leaves that are none of its roots: their gradient would silently vanish."""
    ours = {id(r) for r in roots}
    todo, seen = [e.node for e in edges], set()
    while todo:
        node = todo.pop()
        if hasattr(node, "variable") and id(node.variable) not in ours:
            raise UserError(CLOSURE)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
