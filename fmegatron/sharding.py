"""`sh`: a mesh, a table of rules, and the equations in which a program says what lies where.

    sh = Sharding(mesh, rules)
    h = sh(rms_norm(x, scale), "batch seq* embed -> batch seq embed | heads")
    q = sh.dot(h, w, "batch seq embed, embed heads -> batch seq heads")

Inside a step values are local tensors, and collectives happen only where an equation asks for another layout.
Without a mesh every method is plain mathematics. An axis that no dim and no `|` of an equation names keeps its type;
one named on the left only becomes Invariant; `|` names the dims whose axes a value enters to be read by work that
differs along them.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fmegatron import layout as lay
from fmegatron import tree, uneven
from fmegatron.collectives import LargestOverRanks, Move, Step, Wire, dual, run_step
from fmegatron.dtensor import DTensor
from fmegatron.equations import Side, dot_form, parse_equation, parse_side, reduced_dims
from fmegatron.errors import ShardingError
from fmegatron.function import apply_function
from fmegatron.mesh import Mesh, everywhere
from fmegatron.overlap import check_overlap, overlapped, plan_of
from fmegatron.precision import Precision
from fmegatron.product import product
from fmegatron.rules import Rules, base
from fmegatron.spec import Param, params_of
from fmegatron.zigzag import zigzag_positions

if TYPE_CHECKING:
    from fmegatron.placements import Placement

NO_CAST = (None, None, None)


@dataclass(frozen=True, eq=False)
class Sharding:
    """The explicit `sh` argument. Frozen: `with_tape` and `dataclasses.replace` make another one.

    mesh: None means one device and plain mathematics.
    rules: on which mesh axes each dim lies. Raises ShardingError when a row names an axis that the mesh lacks.
    precision: dtypes at rest, in equations and in gradient sums.
    tape, check: belong to the transforms (`split`) and to the checking mode (`checking.check`).
    delayed: gradients of parameters stay summands on the axes that hold no part of a parameter at rest, to be reduced
        once behind all microbatches (`accumulate`).
    fp8: what fp8 products of one step read and note (`fmegatron.fp8.scaling`); `precision.fp8` says how they run.
    """

    mesh: Mesh | None = None
    rules: Rules = field(default_factory=Rules)
    precision: Precision = field(default_factory=Precision)
    tape: Any = None
    check: Any = None
    delayed: bool = False
    turns: bool = False
    fp8: Any = None
    _plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.mesh is None:
            return
        for name, row in self.rules.compute.items():
            try:
                self.mesh.expand(row)
            except ShardingError as e:
                raise ShardingError(f"rule {name}={row!r}: {e}") from None
        for argument in ("store", "store_optimizer"):
            axes = getattr(self.rules, argument)
            try:
                self.mesh.expand(axes)
            except ShardingError as e:
                raise ShardingError(f"{argument}={axes!r}: {e}") from None
        for name, row in self.rules.zigzag.items():
            axes, held = self.mesh.expand(row), lay.axes_of(name, self.mesh, self.rules)
            if axes != held[: len(axes)]:
                raise ShardingError(f"zigzag {name}={row!r} must be the first axes of the dim's row, which is {held}")

    def with_tape(self, tape: Any) -> Sharding:
        """The same sharding with the tape of one run of a block."""
        other = object.__new__(Sharding)  # without the checks of a new one: this happens for every block
        other.__dict__.update(self.__dict__, tape=tape)
        return other

    def delaying(self) -> Sharding:
        """The same sharding with `delayed` gradients: `settle` reduces them in the end."""
        other = object.__new__(Sharding)
        other.__dict__.update(self.__dict__, delayed=True)
        return other

    def passing_turns(self) -> Sharding:
        """The same sharding, whose values leave time for another program while they are on their way (see
        `fmegatron.interleave`)."""
        other = object.__new__(Sharding)
        other.__dict__.update(self.__dict__, turns=True)
        return other

    @contextlib.contextmanager
    def others_refused(self) -> Iterator[None]:
        """While gradients are `delayed`: parameters that are used by the sharding of which this one was made raise, as
        their gradients would be summed twice."""
        self._plans["delayed"] = self._plans.get("delayed", 0) + 1
        try:
            yield
        finally:
            self._plans["delayed"] -= 1

    @property
    def refused(self) -> bool:
        """May this sharding not use parameters now, as another one of the same plans `others_refused`?"""
        return not self.delayed and bool(self._plans.get("delayed"))

    # ------------------------------------------------------------------------------------------------------- equations

    def __call__(self, x: torch.Tensor, equation: str | None = None, **placements: tuple[Any, Any]) -> torch.Tensor:
        """x in another layout: by names, sh(x, "batch seq* embed -> batch seq embed | heads"), or by placements per
        mesh axis, source and target, sh(x, tp=(Partial(), Shard(1))). Both sides of an equation name the same dims
        in the same order."""
        if self.mesh is None:
            return x
        if equation is None:
            steps, source, target = self._by_placements(x.ndim, placements)
            return self._moved(x, steps, source, target, f"sh(…, {placements})")
        ndim, (steps, source, target) = self._plan(("move", equation), self._plan_move, equation)
        if x.ndim != ndim:
            raise ShardingError(f"{equation!r} names {ndim} dims, the tensor of shape {tuple(x.shape)} has {x.ndim}")
        return self._moved(x, steps, source, target, equation)

    def dot(
        self, x: torch.Tensor, w: torch.Tensor, equation: str, *, name: str = "dot", overlap: int = 0
    ) -> torch.Tensor:
        """The product of two values over named dims: sh.dot(x, w, "batch seq embed, embed mlp -> batch seq mlp").

        A contraction over a sharded dim is summed before it returns: by reduce-scatter where an output dim takes the
        axis, else by all-reduce. x may still be in the layout between regions, which a `*` marks: then it first enters
        the region of the dims that w brings, so that "batch seq* embed, embed mlp -> batch seq mlp" is sh(x, "batch
        seq* embed -> batch seq embed | mlp") and its product in one.

        name: what `remat` policies call this computation. overlap: cut it into as many chunks, so that the gather of x
        or the sum of the result runs beside the product (see fmegatron.overlap): the same elements, to the rounding
        of a product of fewer rows. 0: whole. Where fewer chunks divide batch or sequence, it is as many as do.
        With `precision.fp8` all products are whole.
        """
        if overlap != 0:
            check_overlap(overlap, equation)
        form = dot_form(equation)
        if (x.ndim, w.ndim) != form.dims:
            self._refuse_operands(x, w, equation)
        if self.mesh is None:
            fp8 = None if self.precision.fp8 is None else self._fp8_use(equation, x, w, name)
            return product(x, w, form.einsum, tape=self.tape, name=name, fp8=fp8)
        parsed = parse_equation(equation, 2)
        plan = self._plan(("dot", equation, overlap), plan_of, parsed, self.mesh, self.rules, overlap)
        x = self._without_filling(x, parsed.inputs[0].dims, parsed.output.dims)
        if plan.call is not None and self.check is None and self.precision.fp8 is None:
            return overlapped(x, w, plan.call, tape=self.tape, name=name)
        if plan.enter is not None:
            steps, source, target = plan.enter
            x = self._moved(x, steps, source, target, equation)
        with self._unchecked():
            fp8 = None if self.precision.fp8 is None else self._fp8_use(equation, x, w, name)
            y = product(x, w, form.einsum, tape=self.tape, name=name, fp8=fp8)
            y = self._run(y, plan.steps)
        return self.check.equation((x, w), plan.lays, y, plan.raw, plan.target, equation) if self.check else y

    def _fp8_use(self, equation: str, x: torch.Tensor, w: torch.Tensor, name: str) -> Any:
        from fmegatron.fp8.use import use_of  # imported where something is in fp8

        return use_of(self, equation, x, w, name)

    @staticmethod
    def _refuse_operands(x: torch.Tensor, w: torch.Tensor, equation: str) -> None:
        for value, side in zip((x, w), parse_equation(equation, 2).inputs, strict=True):
            if value.ndim != len(side.dims):
                raise ShardingError(
                    f"{equation!r}: operand {str(side)!r} names {len(side.dims)} dims, the tensor of shape {tuple(value.shape)} has {value.ndim}"
                )

    def sum(self, x: torch.Tensor, equation: str) -> torch.Tensor:
        """The sum over the dims that the output lacks, over all ranks that hold them: sh.sum(x, "batch seq ->")."""
        if self.check is None:
            return self._run(*self.local_sum(x, equation))
        with self._unchecked():
            y, steps = self.local_sum(x, equation)
            y = self._run(y, steps)
        _, lays, raw, target = self._plan(("sum", equation), self._plan_contraction, equation, 1)
        return self.check.equation((x,), lays, y, raw, target, equation)

    def local_sum(self, x: torch.Tensor, equation: str) -> tuple[torch.Tensor, tuple[Step, ...]]:
        """`sum` in two parts: the sum over what this rank holds, and the arrows that are left."""
        gone = self._reduced_dims(x, equation)
        if self.mesh is None:
            return (x.sum(gone) if gone else x), ()
        steps, *_ = self._plan(("sum", equation), self._plan_contraction, equation, 1)
        parsed = parse_equation(equation, 1)
        x = self._without_filling(x, parsed.inputs[0].dims, parsed.output.dims)
        return (x.sum(gone) if gone else x), steps

    def max(self, x: torch.Tensor, equation: str) -> torch.Tensor:
        """The maximum over the dims that the output lacks, over all ranks that hold them. It has no gradient."""
        gone = self._reduced_dims(x, equation)
        if self.mesh is None:
            return x.detach().amax(gone) if gone else x.detach()
        _, lays, raw, target = self._plan(("max", equation), self._plan_max, equation)
        parsed = parse_equation(equation, 1)
        x = self._without_filling(x, parsed.inputs[0].dims, parsed.output.dims, least=True)
        with self._unchecked():
            y = x.detach().amax(gone) if gone else x.detach()
            axes = self.mesh.live(a for a in raw if raw[a] == "P")
            y = apply_function(LargestOverRanks, y, self.mesh, axes) if axes else y
        return self.check.equation((x,), lays, y, raw, target, equation) if self.check else y

    def resolve(self, x: torch.Tensor, side: str, *, partial: str, to: str) -> torch.Tensor:
        """x, of the layout `side` but Partial on the axes of the dims `partial`, in the layout `to`: what a
        primitive says of a result of which each rank has a summand, such as a lookup in a sharded vocabulary."""
        if self.mesh is None:
            return x
        steps, source, target = self._plan(("resolve", side, partial, to), self._plan_resolve, side, partial, to)
        return self._moved(x, steps, source, target, f"{side} -> {to}", partial=True)

    def primitive(
        self, f: Callable[..., Any], args: Sequence[Any], sides: Sequence[str | None], out: str | Sequence[str]
    ) -> Any:
        """f(*args), a local function that mixes or indexes along dims and is trusted for it. It declares one side of an
        equation per argument (None for what is no tensor) and one per result, which the checking mode compares."""
        if self.check is None:
            return f(*args)
        with self._unchecked():
            y = f(*args)
        results = y if isinstance(y, tuple) else (y,)
        texts: Sequence[str] = (out,) if isinstance(out, str) else out
        for x, side in zip(args, sides, strict=True):
            if side is not None and tree.is_tensor(x):
                self.check.declared(x, self._layout(side), f"argument {side!r}")
        for x, text in zip(results, texts, strict=True):
            self.check.result(x, args, self._layout(text))
        return y

    # ---------------------------------------------------------------------------------------------------- global
    # indices

    def axes(self, dim: str) -> tuple[str, ...]:
        """The atomic mesh axes larger than one on which a dim lies; () without a mesh."""
        return () if self.mesh is None else self._plan(("axes", dim), self._plan_axes, dim)

    def _plan_axes(self, dim: str) -> tuple[str, ...]:
        assert self.mesh is not None
        return self.mesh.live(lay.axes_of(dim, self.mesh, self.rules))

    def index(self, dim: str, n: int, *, device: torch.device | str | None = None) -> torch.Tensor:
        """The global positions that this rank holds of a dim of global size n: int64, one dim. The only source of
        positions, masks, counters of dropout and token order, whatever the placement. -1 (`uneven.NOTHING`) stands for
        what fills up a part of a dim that does not divide."""
        if self.mesh is None:
            return torch.arange(n, device="cpu" if device is None else device)
        axes = lay.axes_of(dim, self.mesh, self.rules)
        positions = self._filled_positions(axes, n, dim, device)
        if (ranks := self._zigzag(dim, axes)) > 1:
            self._part(n, axes, dim, ranks)
            positions = zigzag_positions(positions, n, ranks)
        if self.check is None:
            return positions
        return self.check.set(positions, lay.layout(parse_side(dim), self.mesh, self.rules, rest="I"))

    def positions(self, axes: tuple[str, ...], n: int, what: str = "a dim", device: Any = None) -> torch.Tensor:
        """The global positions that this rank holds of a dim of size n that an ordered tuple of axes cuts."""
        where = torch.device(device) if device is not None else self.device
        with self._unchecked():
            live = self.mesh.live(axes) if self.mesh is not None else ()
            if self.mesh is None or not live:
                return torch.arange(n, device=where)
            if not lay.divides(n, live, self.mesh):
                return self._cut(self._filled_positions(axes, n, what, device), 0, n, live)
            part = self._part(n, live, what)
            return self.mesh.position(live) * part + torch.arange(part, device=where)

    def _filled_positions(self, axes: tuple[str, ...], n: int, what: str, device: Any) -> torch.Tensor:
        """`positions` as equations hold them: as many on every rank."""
        live = self.mesh.live(axes) if self.mesh is not None else ()
        if self.mesh is None or not live or lay.divides(n, live, self.mesh):
            return self.positions(axes, n, what, device)
        lay.check_size(what, n, live, self.mesh, self.rules)
        with self._unchecked():
            where = torch.device(device) if device is not None else self.device
            rows, place = uneven.positions(n, tuple(self.mesh.sizes[a] for a in live), where), self.mesh.position(live)
            return rows[place] if isinstance(place, int) else rows.index_select(0, place.to(where))[0]

    def _cut(self, x: torch.Tensor, dim: int, n: int, axes: tuple[str, ...]) -> torch.Tensor:
        """x without what fills up its part of a dim of size n on some axes."""
        assert self.mesh is not None
        return run_step(x, self.mesh, Step("cut", axes, ((dim, axes),), (), uneven=((dim, n),)))

    def _without_filling(
        self, x: torch.Tensor, dims: Sequence[str], kept: Sequence[str], least: bool = False
    ) -> torch.Tensor:
        """x with zeros (least: its dtype's least value) in what fills up its dims, where an equation sums over them."""
        if not self.rules.uneven:
            return x
        names = {base(n) for n in kept}
        for d, name in enumerate(dims):
            if base(name) not in names and (n := self.uneven_size(name)) is not None:
                held = self.index(name, n, device=x.device)
                if x.shape[d] != held.shape[0]:
                    continue  # one number a rank, such as a sum over its part
                filling = (held < 0).view(-1, *[1] * (x.ndim - d - 1))
                x = x.masked_fill(filling, torch.finfo(x.dtype).min if least else 0)
        return x

    def uneven_size(self, dim: str) -> int | None:
        """The global size of a dim whose parts are filled up (`Rules.uneven`); None where it divides by its axes."""
        n = self.rules.uneven.get(base(dim))
        return None if n is None or self.mesh is None or lay.divides(n, self.axes(dim), self.mesh) else n

    def local_size(self, dim: str, n: int) -> int:
        """How much of a dim of global size n each rank holds in equations. Raises ShardingError when it does not divide
        and the rules do not list it as uneven."""
        axes = self.axes(dim)
        return self._part(n, axes, dim, self._zigzag(dim, axes)) if axes else n

    def _zigzag(self, dim: str, axes: tuple[str, ...]) -> int:
        """The number of ranks in whose zigzag order a dim on these axes is; 1 for the plain order."""
        if self.mesh is None or not self.rules.zigzag:
            return 1
        zigzag = lay.zigzag_axes(dim, self.mesh, self.rules)
        return self.mesh.size(zigzag) if set(zigzag) & set(axes) else 1

    def _part(self, n: int, axes: tuple[str, ...], what: str, zigzag: int = 1) -> int:
        assert self.mesh is not None
        if zigzag > 1 and n % (2 * zigzag):
            raise ShardingError(
                f"dim {what!r} of size {n} does not divide by {2 * zigzag}, twice the {zigzag} ranks of its zigzag "
                "order: choose a size or a mesh that divides, or rules whose zigzag does not list it"
            )
        lay.check_size(what, n, axes, self.mesh, self.rules)
        return uneven.largest(n, tuple(self.mesh.sizes[a] for a in self.mesh.live(axes)))

    # --------------------------------------------------------------------------------------------------------
    # parameters

    def use(self, params: Any, spec: Any) -> Any:
        """Parameters at rest -> the values that equations read: cast to the compute dtype, then gathered.
        Differentiable: gradients arrive in the layout at rest, summed over the dims in `over`, reduced in
        `precision.reduce`.

        params, spec: trees of one structure (or one leaf and its Param).
        """
        return _map_params(self._use_one, params, spec)

    def _use_one(self, w: torch.Tensor, param: Param) -> torch.Tensor:
        if isinstance(w, DTensor):
            w = w.to_local(grad_placements=w.placements)
        compute = self.compute_dtype(param)
        if self.mesh is None:
            return w.to(compute)
        if not torch.compiler.is_compiling() and self.refused:
            raise ShardingError(
                f"parameter {param.dims!r} is used by a Sharding that is not ctx.sh, while accumulate(…, spec=…) delays the "
                "sums of gradients: read parameters by ctx.sh in the loss"
            )
        steps, _, target = self._uses(param)
        with self._unchecked():
            if steps:
                y = apply_function(Move, w, self.mesh, steps, (compute, None, self.reduce_dtype(param)))
            else:
                y = w.to(compute)
            if self.check and y is w:
                y = w.view_as(w)
        return self.check.parameter(w, y, param, target) if self.check else y

    def leave(self, g: torch.Tensor, param: Param) -> torch.Tensor:
        """The backward half of `use` on the gradient of one leaf: summed, and in the layout and dtype at rest."""
        if self.mesh is not None:
            steps = self._uses(param)[0]
            g = g.to(self.reduce_dtype(param)) if steps else g
            for step in dual(steps):
                g = run_step(g, self.mesh, step)
        return g.to(self.param_dtype(param))

    def at_rest(self, x: torch.Tensor, param: Param, of: str = "params") -> torch.Tensor:
        """This rank's shard of a parameter as the leaf that trees hold: a DTensor, or x itself on one rank. of:
        "params", or "optimizer" for what the optimizer keeps of it."""
        if self.mesh is None or self.mesh.device_mesh is None:
            return x
        return self._dtensor(x, self.stored_placements(param, of), param.shape)

    def shard(self, x: torch.Tensor, dims: str) -> torch.Tensor:
        """This rank's part of a global tensor: local, of the layout that `dims` stands for."""
        side = parse_side(dims)
        if x.ndim != len(side.dims):
            raise ShardingError(
                f"{dims!r} names {len(side.dims)} dims, the tensor of shape {tuple(x.shape)} has {x.ndim}"
            )
        x = x if self.mesh is None else everywhere(self.mesh, x)
        for d, name in enumerate(side.dims):
            if self.axes(name):
                at = self.index(name, x.shape[d], device=x.device)
                part = x.index_select(d, at.clamp(min=0))
                if self.uneven_size(name) is not None:
                    part = part.masked_fill((at < 0).view(-1, *[1] * (x.ndim - d - 1)), 0)
                x = part
        return x

    def shard_param(self, x: torch.Tensor, param: Param) -> torch.Tensor:
        """This rank's stored shard of a parameter's global value, as a leaf at rest."""
        if self.mesh is not None:
            x = everywhere(self.mesh, x)
            for d, held in enumerate(self._stored(param)[1]):
                if self.mesh.live(held):
                    x = x.index_select(d, self.positions(held, param.shape[d], param.names[d], x.device))
        return self.at_rest(x.to(self.param_dtype(param)), param)

    def shard_params(self, values: Any, spec: Any) -> Any:
        """A tree of global values as parameters at rest: `shard_param` of every leaf."""
        return _map_params(self.shard_param, values, spec)

    def place(self, x: torch.Tensor, dims: str, shape: Sequence[int]) -> torch.Tensor:
        """A local part of a value of global `shape` as a DTensor at rest; x itself on one rank. Dims that lie on
        several axes must list them in the mesh's order. Raises ShardingError for a dim in zigzag order, which a DTensor
        cannot say."""
        if self.mesh is None or self.mesh.device_mesh is None:
            return x
        for name in parse_side(dims).dims:
            if self._zigzag(name, self.axes(name)) > 1:
                raise ShardingError(f"{dims!r}: a DTensor has no zigzag order; gather {name!r} with sh(x, …) first")
        from fmegatron.placements import Invariant, Replicate

        placements = [Replicate() if isinstance(p, Invariant) else p for p in self.placements(dims)]
        for d, name in enumerate(parse_side(dims).dims):
            if (n := self.uneven_size(name)) is not None:
                x = self._cut(x, d, n, self.axes(name))
        return self._dtensor(x, placements, tuple(shape))

    def local(self, values: Any) -> Any:
        """The tree with every DTensor replaced by this rank's local tensor."""
        return tree.tree_map(lambda t: t.to_local() if isinstance(t, DTensor) else t, values)

    def _dtensor(self, x: torch.Tensor, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
        assert self.mesh is not None and self.mesh.device_mesh is not None
        stride = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        return DTensor.from_local(
            x, self.mesh.device_mesh, list(placements), run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )

    def compute_dtype(self, param: Param) -> torch.dtype:
        return param.dtype or self.precision.compute_dtype

    def param_dtype(self, param: Param) -> torch.dtype:
        return param.dtype or self.precision.params

    def reduce_dtype(self, param: Param) -> torch.dtype:
        return (
            torch.promote_types(self.precision.reduce_dtype, param.dtype)
            if param.dtype
            else self.precision.reduce_dtype
        )

    def _by_wire(self, param: Param, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """Arrows whose sums, or whose duals' sums, are of a parameter's gradient: how their summands travel."""
        if self.precision.wire is None or param.dtype is not None:
            return steps
        return tuple(s._replace(wire=Wire(self.precision.wire, self.reduce_dtype(param))) for s in steps)

    @property
    def device(self) -> torch.device:
        """Where new tensors are made."""
        return self.mesh.device if self.mesh is not None else torch.device("cpu")

    def inner(self, a: Any, b: Any, spec: Any) -> torch.Tensor:
        """The inner product of two trees of parameters at rest (local tensors, as in a step), over all elements of
        all ranks: a penalty, or the directional derivative whose gradient is a Hessian-vector product.
        Differentiable."""
        total: Any = 0.0
        for x, y, param in zip(tree.leaves(a), tree.leaves(b), params_of(spec).values(), strict=True):
            part = (x * y).sum()
            held = self.held_by(param)
            steps = {axis: ("P", "I") for axis in held}
            total = total + (self(part, None, **steps) if held else part)
        return total

    # --------------------------------------------------------------------------------------------- layouts, for the
    # reader

    @property
    def axis_order(self) -> tuple[str, ...]:
        """The atomic axes in the order in which placements are listed."""
        return self.mesh.order if self.mesh is not None else ()

    def placements(self, dims: str) -> list[Placement]:
        """The placements that one side of an equation stands for, in the order of `axis_order`; Invariant where no
        dim lies."""
        if self.mesh is None:
            return []
        from fmegatron.placements import placement_of

        types = lay.layout(parse_side(dims), self.mesh, self.rules, rest="I")
        return [placement_of(types[a]) for a in self.mesh.order]

    def stored_placements(self, param: Param, of: str = "params") -> list[Placement]:
        """The placements of a parameter at rest, in the order of `axis_order` (which is that of the DeviceMesh); with
        of="optimizer", of the optimizer's state for it."""
        if self.mesh is None:
            return []
        from fmegatron.placements import Replicate, placement_of

        at_rest = self._stored(param, of)[1]
        types: dict[str, lay.Type] = {a: d for d, by in enumerate(at_rest) for a in by}
        return [placement_of(types[a]) if a in types else Replicate() for a in self.mesh.order]

    def stored_shape(self, param: Param, of: str = "params") -> tuple[int, ...]:
        """The shape of this rank's shard of a parameter at rest; with of="optimizer", of the optimizer's state. On an
        abstract mesh and in a simulation: that of the largest shard."""
        if self.mesh is None:
            return param.shape
        return tuple(self._stored_size(n, by) for n, by in zip(param.shape, self._stored(param, of)[1], strict=True))

    def _stored_size(self, n: int, axes: tuple[str, ...]) -> int:
        assert self.mesh is not None
        live = self.mesh.live(axes)
        place = self.mesh.position(live)
        return uneven.part(n, tuple(self.mesh.sizes[a] for a in live), place if isinstance(place, int) else 0)

    def stored_index(self, param: Param) -> tuple[torch.Tensor | None, ...] | None:
        """Per dim the global positions of this rank's shard at rest (None: all of them); None without a mesh."""
        if self.mesh is None:
            return None
        return tuple(
            self.positions(by, n, name) if self.mesh.live(by) else None
            for n, by, name in zip(param.shape, self._stored(param)[1], param.names, strict=True)
        )

    def state_axes(self) -> tuple[str, ...]:
        """The axes larger than one that the rules name for the optimizer's state beyond those for parameters."""
        if self.mesh is None:
            return ()
        further = self.rules.stores("optimizer")[len(self.rules.stores()) :]
        return self.mesh.live(a for axes in further for a in self.mesh.expand(axes))

    def held_by(self, param: Param) -> tuple[str, ...]:
        """The axes larger than one that cut a parameter at rest: those over which a sum of its elements must run."""
        return self.mesh.live(a for by in self._stored(param)[1] for a in by) if self.mesh is not None else ()

    def check_spec(self, spec: Any) -> None:
        """Raises ShardingError, naming parameter and sizes, when a spec has no layout under these rules; and when a
        row of the rules is for a dim that neither the spec nor `rules.activations` knows."""
        if self.mesh is None:
            return
        known = {base(n) for n in self.rules.activations}
        for path, param in params_of(spec).items():
            known |= {base(n) for n in (*param.names, *(parse_side(param.over).dims if param.over else ()))}
            try:
                self._stored(param)
                if param.over is not None:
                    self._over(param)
            except ShardingError as e:
                raise ShardingError(f"parameter {path!r}: {e}") from None
        for name in self.rules.compute:
            if base(name) not in known:
                near = difflib.get_close_matches(base(name), sorted(known), 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ShardingError(
                    f"rule {name!r} is for a dim that no parameter has and rules.activations ({', '.join(self.rules.activations)}) "
                    f"does not list{hint}"
                )

    def explain(self, equation: str, **sizes: int) -> str:
        """What an equation costs: each operand's placements, the collectives forward and backward, and with the global
        sizes of all dims (embed=4096, …) the elements that each rank sends through them."""
        from fmegatron.explain import explain

        return explain(self, equation, sizes)

    # -------------------------------------------------------------------------------------------------------------
    # plans

    def _plan(self, key: Any, make: Callable[..., Any], *args: Any) -> Any:
        """A plan is made once per equation. Under torch.compile it is made while tracing and costs nothing later."""
        if torch.compiler.is_compiling():
            return make(*args)
        try:
            found = self._plans.get(key)
        except TypeError:  # a Param with unhashable placements
            return make(*args)
        if found is None:
            found = self._plans[key] = make(*args)
        return found

    def _plan_move(self, equation: str) -> Any:
        parsed = parse_equation(equation, 1)
        left, right = parsed.inputs[0].dims, parsed.output.dims
        if len(left) != len(right):
            raise ShardingError(
                f"{equation!r} has {len(left)} dims on its left and {len(right)} on its right: sh(x, …) only moves a value"
            )
        return len(left), lay.reshape_plan(parsed, self.mesh, self.rules)  # type: ignore[arg-type]

    def _plan_contraction(self, equation: str, operands: int) -> Any:
        return lay.contraction_plan(parse_equation(equation, operands), self.mesh, self.rules)  # type: ignore[arg-type]

    def _plan_max(self, equation: str) -> Any:
        steps, lays, raw, target = self._plan_contraction(equation, 1)
        if any(step.kind not in ("P>I", "P>R") for step in steps):
            raise ShardingError(
                f"{equation!r}: sh.max only reduces; move the value to another layout with sh(x, …) first"
            )
        return steps, lays, raw, target

    def _plan_resolve(self, side: str, partial: str, to: str) -> Any:
        return lay.resolve_plan(parse_side(side), partial.split(), parse_side(to), self.mesh, self.rules)  # type: ignore[arg-type]

    def steps_of(self, param: Param, what: str) -> tuple[Step, ...]:
        """The arrows of a local leaf. "enter": from rest to what equations read; "leave": of its gradient, back;
        "settle": of its gradient from there to the layout of the optimizer's state, by the sums that `delayed` left or
        by a cut; "return": of new values from that layout to the parameter's; "shard": the way there."""
        if self.mesh is None:
            return ()
        if what == "enter":
            return self._uses(param)[0]
        if what == "leave":
            return dual(self._uses(param)[0])
        return self._plan((what, param, self.delayed), self._plan_optimizer, param, what)

    def _uses(self, param: Param) -> tuple[tuple[Step, ...], lay.Layout, lay.Layout]:
        return self._plan(("use", param, self.delayed), self._plan_use, param)

    def _plan_use(self, param: Param) -> tuple[tuple[Step, ...], lay.Layout, lay.Layout]:
        assert self.mesh is not None
        compute, at_rest = self._stored(param)
        source: lay.Layout = dict.fromkeys(self.mesh.sizes, "I")
        source |= {a: d for d, by in enumerate(at_rest) for a in by}
        target: lay.Layout = dict.fromkeys(self.mesh.sizes, "I")
        target |= dict.fromkeys(self._over(param), "R")
        target |= {a: "R" for a, t in self._own(param).items() if t == "R"}
        target |= {a: d for d, by in enumerate(compute) for a in by}
        steps = lay.steps_between(self.mesh, source, target, at_rest, compute, f"parameter {param.dims!r}")
        steps = (*self._filling(param, at_rest), *steps)
        if self.delayed:  # an arrow that costs nothing; its backward is the sum that is left for later
            steps = tuple(step for step in steps if step.kind != "I>R")
        return self._by_wire(param, steps), source, target

    def _plan_optimizer(self, param: Param, what: str) -> tuple[Step, ...]:
        assert self.mesh is not None
        _, here, there = *self._stored(param), self._stored(param, "optimizer")[1]
        rest, cut = (
            dict.fromkeys(self.mesh.sizes, "I") | {a: d for d, by in enumerate(held) for a in by}
            for held in (here, there)
        )
        if what == "return":
            return self._filled_between(
                param, lay.steps_between(self.mesh, cut, rest, there, here, f"new values of {param.dims!r}")
            )
        if what == "settle" and self.delayed:
            _, source, target = self._plan_use(param)
            rest = {a: "P" if t == "I" and target[a] == "R" else t for a, t in source.items()}
        steps = lay.steps_between(self.mesh, rest, cut, here, there, f"gradient of {param.dims!r}")
        return self._filled_between(param, self._by_wire(param, steps))

    def _filling(self, param: Param, at_rest: lay.HeldBy) -> tuple[Step, ...]:
        """The step that makes the shards of a parameter at rest equally large on all ranks."""
        assert self.mesh is not None
        dims = [(d, n, by) for d, (n, by) in enumerate(zip(param.shape, at_rest, strict=True))]
        dims = [(d, n, by) for d, n, by in dims if not lay.divides(n, by, self.mesh)]
        if not dims:
            return ()
        axes = self.mesh.sorted(a for _, _, by in dims for a in by)
        return (Step("fill", axes, (), tuple((d, by) for d, _, by in dims), uneven=tuple((d, n) for d, n, _ in dims)),)

    def _filled_between(self, param: Param, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """Steps between two layouts at rest, with equally large shards on the way: dims that do not divide are on the
        same axes in both."""
        filling = self._filling(param, self._stored(param)[0])
        return (*filling, *steps, *dual(filling)) if steps else steps

    def _over(self, param: Param) -> tuple[str, ...]:
        assert self.mesh is not None
        if param.over is None:
            if (
                self.mesh.world == 1 or self.check is not None
            ):  # nothing is summed; the checking mode finds the types itself
                return ()
            raise ShardingError(
                f'Param {param.dims!r} does not say what it is applied `over`: give over="batch seq" or the like, '
                "or infer it with spec = infer_over(loss, spec, batch)"
            )
        return tuple(a for n in parse_side(param.over).dims for a in lay.axes_of(n, self.mesh, self.rules))

    def _own(self, param: Param) -> dict[str, lay.Type]:
        """A parameter's own placements by atomic axis."""
        if self.mesh is None or param.placements is None:
            return {}
        from fmegatron.placements import type_of

        found: dict[str, lay.Type] = {}
        for name, placement in param.placements.items():
            kind = type_of(placement)
            if kind == "P" or isinstance(kind, int) and kind >= len(param.shape):
                raise ShardingError(
                    f"Param {param.dims!r}: placement {placement} on {name!r} is no layout of a parameter of {len(param.shape)} dims"
                )
            found |= dict.fromkeys(self.mesh.expand(name), kind)
        return found

    def _stored(self, param: Param, of: str = "params") -> tuple[lay.HeldBy, lay.HeldBy]:
        assert self.mesh is not None
        return self._plan(("stored", param, of), self._plan_stored, param, of)

    def _plan_stored(self, param: Param, of: str) -> tuple[lay.HeldBy, lay.HeldBy]:
        assert self.mesh is not None
        return lay.stored(param.names, param.shape, self._own(param), self.mesh, self.rules, of)

    def _layout(self, side: str) -> lay.Layout:
        assert self.mesh is not None
        return lay.layout(parse_side(side), self.mesh, self.rules)

    def _by_placements(
        self, ndim: int, placements: dict[str, tuple[Any, Any]]
    ) -> tuple[tuple[Step, ...], lay.Layout, lay.Layout]:
        from fmegatron.placements import type_of

        assert self.mesh is not None
        source: lay.Layout = dict.fromkeys(self.mesh.sizes, "?")
        target: lay.Layout = dict.fromkeys(self.mesh.sizes, "?")
        for name, pair in placements.items():
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ShardingError(
                    f"sh(x, {name}={pair!r}): give (source, target), such as {name}=(Partial(), Shard(1))"
                )
            for axis in self.mesh.expand(name):
                source[axis], target[axis] = type_of(pair[0]), type_of(pair[1])
        for types in (source, target):
            for axis, kind in types.items():
                if isinstance(kind, int) and not 0 <= kind < ndim:
                    raise ShardingError(f"sh(x, {axis}=…): Shard({kind}) of a tensor of {ndim} dims")
        have, want = ([tuple(a for a in self.mesh.order if t[a] == d) for d in range(ndim)] for t in (source, target))
        return lay.steps_between(self.mesh, source, target, have, want, f"sh(x, {placements})"), source, target

    # -----------------------------------------------------------------------------------------------------------
    # running

    def _run(self, x: torch.Tensor, steps: tuple[Step, ...]) -> torch.Tensor:
        steps = tuple(s._replace(turn=True) for s in steps) if self.turns else steps
        return apply_function(Move, x, self.mesh, steps, NO_CAST) if steps else x

    def _moved(
        self,
        x: torch.Tensor,
        steps: tuple[Step, ...],
        source: lay.Layout,
        target: lay.Layout,
        where: str,
        *,
        partial: bool = False,
    ) -> torch.Tensor:
        if self.check is None:
            return self._run(x, steps)
        with self._unchecked():
            y = self._run(x, steps)
        return self.check.arrow(x, y, source, target, where, partial=partial)

    def _unchecked(self) -> Any:
        return self.check.paused() if self.check else contextlib.nullcontext()

    def _reduced_dims(self, x: torch.Tensor, equation: str) -> tuple[int, ...]:
        ndim, gone = reduced_dims(equation)
        if ndim != x.ndim:
            raise ShardingError(f"{equation!r} names {ndim} dims, the tensor of shape {tuple(x.shape)} has {x.ndim}")
        return gone


def _map_params(f: Callable[[torch.Tensor, Param], torch.Tensor], params: Any, spec: Any) -> Any:
    """f over two trees of one structure. Written out for dicts, so that torch.compile sees plain Python."""
    if isinstance(spec, Param):
        return params if params is None else f(params, spec)
    if isinstance(spec, dict):
        if not isinstance(params, dict) or params.keys() != spec.keys():
            got = sorted(map(str, params)) if isinstance(params, dict) else type(params).__name__
            raise ShardingError(f"parameters and spec differ: parameters have {got}, the spec {sorted(map(str, spec))}")
        return {k: _map_params(f, params[k], spec[k]) for k in spec}
    if isinstance(spec, list | tuple):
        made = [_map_params(f, p, s) for p, s in zip(params, spec, strict=True)]
        return type(spec)(*made) if hasattr(spec, "_fields") else type(spec)(made)
    return tree.tree_map(f, params, spec)


def placements(spec: Any, mesh: Mesh, rules: Rules) -> Any:
    """The DTensor placements of every parameter at rest, as a tree like `spec` of tuples in the order of the mesh's
    DeviceMesh.

    Raises ShardingError for rules, sizes or dims that do not fit, naming the parameter.
    """
    sh = Sharding(mesh, rules)
    sh.check_spec(spec)
    return tree.like(spec, [tuple(sh.stored_placements(p)) for p in params_of(spec).values()])


__all__ = ["Sharding", "Side", "placements"]
