"""ZeRO: trees whose layouts at rest differ, and how leaves go from one to the other (Rajbhandari et al., 2020).

Which tree lies where is a matter of `Rules` (`store`, `zero`, `store_optimizer`). Here is what follows from it: an
optimizer whose state is cut further than the parameters, and the moves of whole trees of leaves, in as few collectives
as there are axes and dtypes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fmegatron import buckets, tree
from fmegatron.collectives import COST, Move, wire_of
from fmegatron.dtensor import DTensor
from fmegatron.errors import UserError
from fmegatron.function import apply_function, under_torch_func
from fmegatron.optim import leaves
from fmegatron.optim.core import Optimizer
from fmegatron.sharding import NO_CAST, Sharding
from fmegatron.spec import Param, params_of

# Elements of the leaves that go together outside the layers: two such buckets are under way at a time.
BUCKET = 1 << 25
# Elements up to which the gradient of a leaf outside the layers waits for others to go with.
SMALL = 1 << 20


def with_sharded_state(optimizer: Optimizer, spec: Any, sh: Sharding) -> Optimizer:
    """An optimizer whose state lies as `sh.rules` say for it, cut further than the parameters: ZeRO-1 and -2.

        optimizer = with_sharded_state(with_master(chain(clip_by_global_norm(1.0), adamw(3e-4))), spec, sh)

    Put it outermost. Each rank updates its own part of every parameter, and the new parts are gathered, in buckets.
    `init` and `update` take and give parameters at rest. Gradients may be at rest like the parameters or already cut
    like the state, as `accumulate` gives them, and come back as they were. State: that of `optimizer` for the parts, so
    that it can be loaded under any other stage or mesh. Where the rules cut the state no further than the parameters
    (ZeRO-3, or none) this is `optimizer` itself. With donate the new parameters lie in the old buffers.
    """
    if not splits_state(spec, sh):
        return optimizer

    def cut(values: Any) -> Any:
        return tree.tree_map(lambda t, p: _cut(t, p, sh), values, spec)

    def init(params: Any) -> Any:
        with torch.no_grad():
            return optimizer.init(cut(params))

    def update(params: Any, grads: Any, state: Any, *, donate: bool = False, **options: Any) -> Any:
        with leaves.no_grad():
            mine, parts = cut(params), cut(grads)
        new, _, state = optimizer.update(mine, parts, state, donate=donate, **options)
        with leaves.no_grad():
            return _returned(new, params, grads, spec, sh, donate), grads, state

    return Optimizer(init, update, optimizer.name, optimizer.rate, optimizer.rounds)


def splits_state(spec: Any, sh: Sharding) -> bool:
    """Is the optimizer's state of some parameter cut further than the parameter?"""
    return any(sh.steps_of(p, "return") for p in params_of(spec).values())


def _cut(t: Any, param: Param, sh: Sharding) -> Any:
    """A leaf at rest cut as the optimizer's state; one that is already so, or is no floating tensor, stays."""
    if not tree.is_float(t):
        return t
    steps = sh.steps_of(param, "shard")
    if not steps or (isinstance(t, DTensor) and list(t.placements) == sh.stored_placements(param, "optimizer")):
        return t
    at_rest = isinstance(t, DTensor) or sh.mesh is None or sh.mesh.device_mesh is None
    if not at_rest and not leaves.plain_only():
        raise UserError(
            f"with_sharded_state needs leaves at rest (DTensors), but got a plain tensor for {param.dims!r}"
        )
    local = apply_function(Move, leaves.local_of(t), sh.mesh, steps, NO_CAST)
    return sh.at_rest(local, param, "optimizer") if isinstance(t, DTensor) else local


def _returned(new: Any, old: Any, grads: Any, spec: Any, sh: Sharding, donate: bool) -> Any:
    """The updated parts as parameters at rest."""
    parts, before, params = tree.leaves(new), tree.leaves(old), tree.leaves(spec)
    out = [b if g is None else p for p, b, g in zip(parts, before, tree.leaves(grads), strict=True)]
    rows = [i for i, p in enumerate(params) if out[i] is not before[i] and sh.steps_of(p, "return")]
    if leaves.plain_only():
        for i in rows:
            local = apply_function(Move, leaves.local_of(parts[i]), sh.mesh, sh.steps_of(params[i], "return"), NO_CAST)
            out[i] = leaves.wrapped(local, before[i])
        return tree.like(old, out)
    for i, x in _in_buckets_moved([parts[i] for i in rows], [params[i] for i in rows], sh, "return"):
        if donate:
            x = leaves.buffer_of(before[rows[i]]).copy_(x)
        out[rows[i]] = leaves.holder_of(x, before[rows[i]])
    return tree.like(old, out)


def cut_like_state(grads: Sequence[Any], params: Sequence[Param], sh: Sharding) -> list[Any]:
    """Local gradients in the layout at rest -> this rank's parts of them; differentiable. None stays."""
    steps = [() if g is None else sh.steps_of(p, "shard") for g, p in zip(grads, params, strict=True)]
    return [apply_function(Move, g, sh.mesh, s, NO_CAST) if s else g for g, s in zip(grads, steps, strict=True)]


class Reducer:
    """Takes `delayed` gradients to the layout of the optimizer's state while a backward makes them.

    Those of a layer go together as soon as it has all of them, and are waited for when the next layer has its own. A
    large leaf outside the layers goes alone and at once; a small one, such as the last norm, with the next that go.
    take: (number of the leaf, reduced gradient), called for every leaf. wait=False: nothing is waited for until the end, where
        other ranks wait for what this one does next, as in a pipeline.
    """

    def __init__(
        self,
        spec: Any,
        wanted: Sequence[bool],
        sh: Sharding,
        take: Callable[[int, Any], None],
        *,
        wait: bool = True,
    ) -> None:
        self.params, self.sh, self.take, self.waits = tree.leaves(spec), sh, take, wait
        self.layer = [_layer_of(path) for path in tree.paths(spec)]
        self.missing = Counter(layer for layer, w in zip(self.layer, wanted, strict=True) if w)
        self.open: dict[str, list[tuple[int, Any]]] = {}
        self.small: list[tuple[int, Any]] = []
        self.started: list[tuple[list[int], Arriving]] = []

    def add(self, i: int, g: Any) -> None:
        """The gradient of leaf i, which must come once."""
        layer = self.layer[i]
        if layer is None:
            self.small.append((i, g))
            if self.params[i].numel > SMALL:
                self._start()
            return
        self.open.setdefault(layer, []).append((i, g))
        del g
        self.missing[layer] -= 1
        if not self.missing[layer]:
            if self.waits:
                self.wait(halfway=True)
            self._start(self.open.pop(layer))

    def _start(self, more: Sequence[tuple[int, Any]] = ()) -> None:
        members, xs = zip(*self.small, *more, strict=True)
        self.small = []
        self.started.append((list(members), moving(xs, [self.params[i] for i in members], self.sh, "settle")))

    def wait(self, halfway: bool = False) -> None:
        """Waits for all that is under way; halfway: of sums that travel twice (`Precision.wire`) first for the first half, so
        that the second runs beside what follows too."""
        started, self.started = self.started, []
        while started:
            members, arrive = started.pop(0)
            if halfway and arrive.advance():
                self.started.append((members, arrive))
                continue
            for i, x in zip(members, arrive(), strict=True):
                self.take(i, x)

    def finish(self) -> None:
        """Waits for all there is, once the last gradient has come."""
        if self.small:
            self._start()
        self.wait()


def _layer_of(path: str) -> str | None:
    """The layer of a leaf, whose index is in the path; None for a leaf outside the layers."""
    parts = path.split(".")
    return next((".".join(parts[: n + 1]) for n, part in enumerate(parts) if part.isdigit()), None)


class Ahead:
    """Parameters outside the layers, gathered before they are used: `sh.use` in two parts.

        last = Ahead({"head": params["head"]}, {"head": spec["head"]}, ctx.sh)
        x = layers(params["layers"], x, ctx, then=last.begin)         # gathered while the last block runs
        table = last()["head"]

    params, spec: trees of one structure; all leaves go in one collective per axes and dtype. What `begin` begins in the
    forward is awaited, the other way round, in the backward: gradients begin to be reduced when the backward has left
    their use, and are awaited when it is back where `begin` was called. Without a call of `begin`, calling the object
    begins too. Nothing gathered is kept here, nor for the backward but by what computes with it. Once per object.
    """

    def __init__(self, params: Any, spec: Any, sh: Sharding) -> None:
        self.params, self.spec, self.sh = params, spec, sh
        self.rows: list[Param] = []
        self.arrive: Callable[[], list[Any]] | None = None
        self.reduced: Callable[[], list[Any]] | None = None

    def begin(self) -> None:
        """Begins to gather, unless that has begun or costs nothing."""
        if self.rows or self.sh.mesh is None:
            return
        params = tree.leaves(self.spec)
        if not self._costs(params):
            return
        flat = [leaves.local_of(t) for t in tree.leaves(self.params)]
        self.rows = params
        if torch.is_grad_enabled() and any(t.requires_grad for t in flat):
            flat = list(apply_function(Awaited, self._awaited, *flat))
        self.params = tree.like(self.params, flat)
        self.arrive = moving(flat, params, self.sh, "enter")

    def __call__(self) -> Any:
        """The values that equations read, as a tree like params."""
        self.begin()
        if not self.rows:
            return self.sh.use(self.params, self.spec)
        return tree.like(self.params, list(apply_function(_Used, self, *tree.leaves(self.params))))

    def _costs(self, params: Sequence[Param]) -> bool:
        sh = self.sh
        if sh.mesh is None or sh.check is not None or under_torch_func() or torch.compiler.is_compiling():
            return False
        if sh.refused:  # by `use`
            return False
        return all(map(tree.is_float, tree.leaves(self.params))) and _collective(params, sh)

    def _awaited(self) -> list[Any] | None:
        reduced, self.reduced = self.reduced, None
        return None if reduced is None else reduced()


class Awaited(torch.autograd.Function):
    """The identity. Its backward waits for gradients that are under way: wait() -> those of all values, or None where
    they have come by the graph. Autograd runs, of all that it can, what was made last; so they are awaited when it is
    back where this was called."""

    @staticmethod
    def forward(wait: Callable[[], list[Any] | None], *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.wait = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gs: Any) -> Any:
        found = ctx.wait()
        return None, *(gs if found is None else found)


class _Used(torch.autograd.Function):
    """The values that `Ahead` gathers, of its leaves at rest. The backward begins to reduce their gradients, and gives
    what stands for them until they are awaited; where it is itself differentiated, it gives them."""

    @staticmethod
    def forward(ahead: Ahead, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert ahead.arrive is not None
        arrive, ahead.arrive = ahead.arrive, None
        return tuple(y.view_as(y) for y in arrive())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.ahead = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gs: torch.Tensor) -> Any:
        ahead, stored = ctx.ahead, ctx.saved_tensors
        sh, rows = ahead.sh, ahead.rows
        if torch.is_grad_enabled():
            moved = zip(gs, stored, rows, strict=True)
            return None, *(
                apply_function(
                    Move, g, sh.mesh, sh.steps_of(p, "leave"), (sh.reduce_dtype(p), x.dtype, sh.compute_dtype(p))
                )
                for g, x, p in moved
            )
        ahead.reduced = moving(gs, rows, sh, "leave")
        return None, *(x.detach() for x in stored)


def _collective(params: Sequence[Param], sh: Sharding) -> bool:
    """Does it take a collective to read these, or to bring back their gradients?"""
    steps = [step for p in params for what in ("enter", "leave") for step in sh.steps_of(p, what)]
    return any(COST[step.kind] not in ("nothing", "slice") for step in steps)


def _in_buckets_moved(xs: list[Any], params: list[Param], sh: Sharding, what: str) -> Iterator[tuple[int, Any]]:
    """(number, local tensor) of the leaves behind their arrows, bucket by bucket, the next one under way meanwhile. The
    list of leaves is emptied as they go."""
    waiting: list[tuple[list[int], Callable[[], list[Any]]]] = []
    for members in [*in_buckets([math.prod(leaves.local_of(x).shape) for x in xs]), []]:
        if members:
            waiting.append((members, moving([xs[i] for i in members], [params[i] for i in members], sh, what)))
        for i in members:
            xs[i] = None
        while len(waiting) > (1 if members else 0):
            done, wait = waiting.pop(0)
            yield from zip(done, wait(), strict=True)


class Arriving:
    """Leaves on their way: calling it waits for them and gives the local tensors."""

    def __init__(self, started: buckets.Moving | None, here: list[Any], behind: list[torch.dtype]) -> None:
        self.started, self.here, self.behind = started, here, behind

    def __call__(self) -> list[Any]:
        found = self.here if self.started is None else self.started.finish()
        return [x.to(d) for x, d in zip(found, self.behind, strict=True)]

    def advance(self) -> bool:
        """Begins what follows on the first half of sums that travel twice: was there any?"""
        return self.started is not None and self.started.advance()


def moving(xs: Sequence[Any], params: Sequence[Param], sh: Sharding, what: str) -> Arriving:
    """Begins to take leaves through their arrows (`Sharding.steps_of`), in as few collectives as there are axes and
    dtypes, without a graph. What comes back waits for them.

    Parameters that enter are cast before, gradients that leave or settle are summed in `precision.reduce`, and travel in
    `precision.wire`.
    """
    plans = [sh.steps_of(p, what) for p in params]
    flat = [leaves.local_of(x).detach() for x in xs]
    behind: list[torch.dtype] = []
    for i, (x, p, steps) in enumerate(zip(flat, params, plans, strict=True)):
        dtype = x.dtype
        if what == "enter":
            dtype = sh.compute_dtype(p)
        elif what == "leave" and steps or any(step.kind[0] == "P" for step in steps):
            dtype = sh.reduce_dtype(p)
            if x.dtype in [wire.sent for step in steps[:1] if (wire := wire_of(step)) is not None]:
                dtype = x.dtype  # it is sent as it is, and what comes is in the wide dtype
        behind.append({"enter": dtype, "leave": sh.param_dtype(p)}.get(what, x.dtype))
        flat[i] = x.to(dtype)
    started = None if sh.mesh is None else buckets.start(sh.mesh, flat, plans)
    return Arriving(started, flat if started is None else [], behind)  # what is under way holds what it needs


def in_buckets(sizes: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of leaves of some sizes in their order, cut into groups of at most BUCKET elements or one leaf."""
    group: list[int] = []
    held = 0
    for i, size in enumerate(sizes):
        if group and held + size > BUCKET:
            yield group
            group, held = [], 0
        group.append(i)
        held += size
    if group:
        yield group
