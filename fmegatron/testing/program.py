"""What is checked: a model as two functions, made for one layout, with its parameters and batches on one device."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmegatron import random, tree
from fmegatron.checking import infer_over
from fmegatron.context import Ctx
from fmegatron.errors import ShardingError, UserError
from fmegatron.mesh import Mesh, make_mesh
from fmegatron.parallel.context import factoring
from fmegatron.parallel.folding import expert_factoring, problem_of_experts
from fmegatron.parallel.legality import WORDS, Choice, check_layout
from fmegatron.parallel.pipeline import Ends, Pipeline, find_ends, inside_stage, pipeline
from fmegatron.parallel.schedules import make_schedule
from fmegatron.parallel.stages import parse_layout
from fmegatron.precision import Precision
from fmegatron.remat import names, nothing
from fmegatron.rules import Rules, base, standard_rules
from fmegatron.sharding import Sharding
from fmegatron.spec import init, params_of
from fmegatron.testing.batches import make_batch
from fmegatron.testing.layout import PIPELINE, Layout
from fmegatron.testing.own_rows import problem_of_rows, with_rows

WHOLE = ("kv", "group")  # dims whose parts are of one size on every layout
NOISE = 0.3  # standard deviation of what is added to initial values, so that no norm or bias is trivially right


@dataclass(frozen=True)
class Program:
    """A model as the harness runs it.

    model: an object or module with `spec()`, `loss(params, batch, ctx)` and maybe `weights(batch)`; or these functions
        as a tuple. For a pipeline also `embed`, `block` and `head` (see `fmegatron.parallel.pipeline.pipeline`).
    rows: rules for its dims in place of, or beside, the standard ones: {"expert": "dp"}. Axes that a mesh lacks are
        left out.
    batch: a dict of global tensors, or a function (rows, seq, seed) -> dict; None: tokens and labels of the spec's
        `vocab`, as `make_batch` draws them.
    dims: the dims of each tensor of the batch; by default "batch seq" for two dims and "batch" for one.
    params: global values in place of drawn ones.
    """

    model: Any
    rows: Mapping[str, Any] | None = None
    batch: Any = None
    dims: Mapping[str, str] | None = None
    params: Any = None

    @property
    def functions(self) -> tuple[Callable[[], Any], Callable[..., Any], Callable[..., Any] | None]:
        """(spec, loss, weights or None)."""
        if isinstance(self.model, tuple):
            spec, loss, *rest = self.model
            return spec, loss, rest[0] if rest else None
        if not callable(getattr(self.model, "spec", None)) or not callable(getattr(self.model, "loss", None)):
            raise UserError(
                f"{self.model!r} is no model: it needs spec() and loss(params, batch, ctx), or give (spec, loss)"
            )
        return self.model.spec, self.model.loss, getattr(self.model, "weights", None)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """{dim: size} of the spec's dims."""
        found = params_of(self.functions[0]()).values()
        return {base(n): size for p in found for n, size in zip(p.names, p.shape, strict=True)}

    @functools.cached_property
    def has_remat(self) -> bool:
        """Can the layout's remat policy be given to the model, a dataclass with a field `save`?"""
        return dataclasses.is_dataclass(self.model) and any(f.name == "save" for f in dataclasses.fields(self.model))

    @functools.cached_property
    def has_experts(self) -> bool:
        """Is there a mixture of experts in it?"""
        return "expert" in self.sizes

    @functools.cached_property
    def has_dispatch(self) -> bool:
        """Can the layout's way to the experts be given to the model, a dataclass with a field `dispatch`?"""
        fields = dataclasses.fields(self.model) if dataclasses.is_dataclass(self.model) else ()
        return self.has_experts and any(f.name == "dispatch" for f in fields)

    @functools.cached_property
    def has_overlap(self) -> bool:
        """Can the layout's overlapped products be given to the model, a dataclass with a field `overlap`?"""
        fields = dataclasses.fields(self.model) if dataclasses.is_dataclass(self.model) else ()
        return any(f.name == "overlap" for f in fields)

    @property
    def has_stages(self) -> bool:
        """Can the model lie on the stages of a pipeline?"""
        return not self._missing()

    def _missing(self) -> list[str]:
        """Which of the parts that a pipeline needs the model lacks."""
        return [n for n in ("embed", "block", "head") if not callable(getattr(self.model, n, None))]

    @functools.cached_property
    def ends(self) -> Ends:
        """Which parameters are read before the layers and behind them."""
        return find_ends(self.model, self.batch_of(Layout()))

    @property
    def fills_up(self) -> bool:
        """May rows and tokens be added to the batch that do not count in the loss?"""
        return self.batch is None

    def on(self, layout: Layout) -> Program:
        """The model with the layout's options that are its own."""
        if layout.dispatch != Layout().dispatch and self.has_dispatch:
            model: Any = dataclasses.replace(self.model, dispatch=layout.dispatch)  # type: ignore[type-var]
            return dataclasses.replace(self, model=model).on(dataclasses.replace(layout, dispatch=Layout().dispatch))
        if layout.overlap and self.has_overlap:
            cut: Any = dataclasses.replace(self.model, overlap=layout.overlap)  # type: ignore[type-var]
            return dataclasses.replace(self, model=cut).on(dataclasses.replace(layout, overlap=0))
        if layout.remat == "everything":
            return self
        if not self.has_remat:
            raise UserError(
                f"layout {layout}: remat={layout.remat} needs a model that is a dataclass with a field `save`, as Decoder is"
            )
        policy = nothing if layout.remat == "nothing" else names(*layout.remat.split("+"))
        return dataclasses.replace(self, model=dataclasses.replace(self.model, save=policy))

    def spec(self) -> Any:
        """The spec, with what each parameter is applied `over` inferred where it is left out."""
        spec, loss, _ = self.functions
        found = spec()
        if all(p.over is not None for p in params_of(found).values()):
            return found
        params = init(found, random.key(0))
        also = ["edp=1,ep=1,etp=1"] if self.has_experts else []
        mesh = make_mesh("dp=1,cp=1,tp=1", also=also, abstract=True, device="cpu")

        def program(params: Any, batch: Any, sh: Sharding) -> Tensor:
            terms, _ = loss(params, batch, Ctx(sh=sh))
            terms = {"": terms} if not isinstance(terms, Mapping) else terms
            return functools.reduce(torch.add, [sh.sum(t.items, f"{t.dims} ->") for t in terms.values()])

        batch = self.batch_of(Layout())
        dims = {n: self.dims_of(n, x) for n, x in batch.items()}
        return infer_over(program, found, params, batch, self.rules(mesh, Layout(sp=True)), dims=dims)

    # ------------------------------------------------------------------------------------------------ mesh and rules

    def mesh(self, layout: Layout, *, device: str = "cpu", abstract: bool = False) -> Mesh:
        """The layout's mesh over the ranks of this program, or of any number if it is abstract."""
        kv_heads = self.sizes.get("kv")
        also = expert_factoring(layout.mesh, ep=layout.ep, etp=layout.etp, argument="layout")
        if kv_heads is not None:
            also += factoring(
                layout.mesh, layout.context, heads=self.heads(layout), kv_heads=kv_heads, argument="layout"
            )
        return make_mesh(layout.mesh, also=also, kv_heads=kv_heads, device=device, abstract=abstract)

    def heads(self, layout: Layout) -> int:
        """Query heads; of a model without attention as many as any layout needs."""
        return self.sizes["kv"] * self.sizes.get("group", 1) if "kv" in self.sizes else layout.size("tp", "cp")

    def rules(self, mesh: Mesh, layout: Layout) -> Rules:
        """The standard rules for the dims that the model has, with its own rows."""
        standard = standard_rules(
            mesh,
            sequence_parallel=layout.sp,
            store=layout.store_axes,
            zero=layout.zero,
            store_optimizer=layout.state_axes,
            context=layout.context,
            uneven={n: size for n, size in self.sizes.items() if n not in WHOLE},
        )
        known = {*self.sizes, *map(base, standard.activations)}
        rows = {n: row for n, row in standard.compute.items() if base(n) in known}
        for name, row in (self.rows or {}).items():
            given = (row,) if isinstance(row, str) else tuple(row or ())
            rows[name] = tuple(a for a in given if a in mesh.names or a in mesh.sizes)
        made = dataclasses.replace(standard, compute=rows, activations=(*standard.activations, *(self.rows or {})))
        return with_rows(made, layout.own_rows, mesh) if layout.rules else made

    def sharding(self, layout: Layout, precision: Precision, *, mesh: Mesh | None = None) -> Sharding:
        """`sh` for the layout on its mesh, by default one of this process's ranks; of a pipeline that of one stage."""
        mesh = self.mesh(layout) if mesh is None else mesh
        sh = Sharding(mesh, self.rules(mesh, layout), precision=precision)
        return inside_stage(sh, self.functions[0](), PIPELINE) if layout.pipelined else sh

    def pipeline(self, layout: Layout, spec: Any, mesh: Mesh) -> Pipeline:
        """The model over the stages of a layout. spec: of the whole model, with what `over` was inferred.

        Raises UserError for a model without the parts of a pipeline, and for stages that do not fit it."""
        if missing := self._missing():
            raise UserError(
                f"layout {layout}: a pipeline needs a model with embed, block and head beside spec and loss, but "
                f"{'a tuple' if isinstance(self.model, tuple) else repr(self.model)} has no {' and no '.join(missing)}"
            )
        if "layers" not in spec:
            raise UserError(f"layout {layout}: a pipeline needs a spec with {{'layers': {{0: …, 1: …}}}}")
        table = make_schedule(layout.schedule, layout.size(PIPELINE), layout.micro, virtual=layout.virtual)
        stages = parse_layout(layout.stages, layers=len(spec["layers"])) if layout.stages else None
        return pipeline(_WithSpec(self.model, spec), table, mesh=mesh, axis=PIPELINE, assignment=stages, ends=self.ends)

    def why_illegal(self, layout: Layout, *, propose: bool = False) -> str | None:
        """The message that refuses the layout; None if it is legal. propose: it ends with the nearest legal ones."""
        attention = "kv" in self.sizes
        free = layout.rows is None and (self.fills_up or not layout.odd)  # rows and tokens as the layout needs them
        try:
            if layout.remat != "everything":
                self.on(layout)
            check_layout(
                layout.inside.mesh,
                heads=self.heads(layout) if attention else None,
                kv_heads=self.sizes.get("kv"),
                batch_size=None if free else layout.batch[0],
                seq_len=layout.batch[1],
                positions=self.sizes.get("position"),
                microbatches=layout.micro,
                sequence_parallel=layout.sp,
                store=layout.store_axes,
                zero=layout.zero,
                state=layout.state_axes,
                context=layout.context,
                uneven=("batch", "seq", "vocab", "mlp") if self.fills_up else ("vocab", "mlp"),
                words=WORDS,
                spelled=functools.partial(self._spelled, layout) if propose else None,
            )
            spec = self.functions[0]()
            if (wrong := self._wrong_experts(layout)) is not None:
                return wrong
            mesh = self.mesh(layout, abstract=True)
            if layout.rules and (wrong := self._wrong_row(layout, mesh)) is not None:
                return wrong
            if layout.pipelined:
                self.pipeline(layout, spec, mesh)
            self.sharding(layout, Precision(), mesh=mesh).check_spec(spec)
        except UserError as error:
            return str(error)
        return None

    def _wrong_experts(self, layout: Layout) -> str | None:
        """What is wrong with how the layout spreads experts and sends tokens to them; None if nothing is."""
        wrong = problem_of_experts(
            ranks=layout.inside.world,
            ep=layout.ep,
            etp=layout.etp,
            experts=self.sizes.get("expert"),
            width=self.sizes.get("emlp"),
        )
        if wrong is not None:
            return wrong
        if layout.overlap and not self.has_overlap:
            return f"overlap={layout.overlap}: the model has no field `overlap`: leave it out"
        if layout.dispatch != Layout.dispatch and not self.has_dispatch:
            lacks = "has no field `dispatch`" if self.has_experts else "has no experts"
            return f"dispatch={layout.dispatch}: the model {lacks}: leave it out"
        return None

    def _wrong_row(self, layout: Layout, mesh: Mesh) -> str | None:
        """What is wrong with the rows that the layout has of its own; None if nothing is."""
        rows, standard = layout.own_rows, self.rules(mesh, dataclasses.replace(layout, rules=""))
        if "expert" in self.sizes and (moved := [n for n in rows if n.startswith(("batch", "seq"))]):
            return f"rules={layout.rules}: tokens lie among experts by rows that follow from {moved[0]}: leave it out"
        if (wrong := problem_of_rows(rows, standard, mesh, free=self.rows or {})) is not None:
            return wrong
        try:
            Sharding(mesh, with_rows(standard, rows, mesh)).check_spec(self.functions[0]())
        except ShardingError as error:
            return f"rules={layout.rules}: {error}"
        return None

    def _spelled(self, layout: Layout, choice: Choice, *_: Any) -> str | None:
        """The line of a layout with other axes and options, if it is legal in all else."""
        try:
            found = dataclasses.replace(
                layout,
                mesh=f"{PIPELINE}={layout.size(PIPELINE)},{choice.mesh}" if layout.pipelined else choice.mesh,
                sp=choice.sequence_parallel,
                zero=choice.zero or 0,
                store="+".join(choice.store) if layout.store and choice.zero else "",
                state="+".join(choice.state),
                context=choice.context,
                micro=choice.microbatches,
            )
        except UserError:
            return None
        return str(found) if self.why_illegal(found) is None else None

    # ------------------------------------------------------------------------------------------------------- values

    def batch_of(self, layout: Layout, *, seed: int = 0) -> dict[str, Tensor]:
        """The global batch."""
        rows, seq = layout.batch
        if callable(self.batch):
            return self.batch(rows, seq, seed)
        if self.batch is not None:
            return dict(self.batch)
        if "vocab" not in self.sizes:
            raise UserError(
                "no parameter has a dim `vocab`: give batch=, a function (rows, seq, seed) -> dict of tensors"
            )
        empty = max(1, -(-rows // layout.data // layout.micro))
        return make_batch(
            self.sizes["vocab"],
            rows,
            seq,
            mask=layout.mask,
            packed=layout.packed,
            empty=min(empty, rows - 1),
            seed=seed,
        )

    def dims_of(self, name: str, x: Tensor) -> str:
        """The dims of one tensor of the batch."""
        if self.dims and name in self.dims:
            return self.dims[name]
        if x.ndim not in (1, 2):
            raise UserError(f"the batch's {name!r} of shape {tuple(x.shape)} needs its dims: give dims={{{name!r}: …}}")
        return "batch seq" if x.ndim == 2 else "batch"

    def params_of(self, spec: Any, dtype: torch.dtype, *, seed: int = 0) -> Any:
        """Global parameters: initial values with noise on all of them, in `dtype`."""
        if self.params is not None:
            return tree.tree_map(lambda t: t.to(dtype), self.params)
        start = init(spec, random.key(seed), sh=Sharding(precision=Precision(params=torch.float64)))
        noise = [
            random.normal(random.fold_in(random.key(seed + 1), i), x.shape, dtype=torch.float64) * NOISE
            for i, x in enumerate(tree.leaves(start))
        ]
        return tree.like(start, [(a + b.to(a.dtype)).to(dtype) for a, b in zip(tree.leaves(start), noise, strict=True)])


class _WithSpec:
    """A model with another spec: its own with what was inferred."""

    def __init__(self, model: Any, spec: Any) -> None:
        self._model, self._spec = model, spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def spec(self) -> Any:
        return self._spec


def program_of(model: Any, **options: Any) -> Program:
    """A model, or a program as it is."""
    return model if isinstance(model, Program) else Program(model, **options)


# A Decoder holds functions made when it is made, so what travels to another process is how to make it.


def packed(program: Program) -> Any:
    """The program as something that pickles."""
    model = program.model
    if dataclasses.is_dataclass(model) and not isinstance(model, type):
        fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init}
        how: tuple[str, Any] = ("fields", (type(model), fields))
    elif isinstance(model, types.ModuleType):
        how = ("module", (model.__name__, str(Path(model.__file__ or "").resolve().parents[model.__name__.count(".")])))
    else:
        how = ("object", model)
    return how, program.rows, program.batch, program.dims, program.params


def unpacked(found: Any) -> Program:
    """What `packed` packed."""
    import importlib

    (kind, what), *rest = found
    if kind == "fields":
        what = what[0](**what[1])
    elif kind == "module":
        name, folder = what
        try:
            what = importlib.import_module(name)
        except ModuleNotFoundError:  # a pool that is older than the path by which its parent found the module
            sys.path.append(folder)
            what = importlib.import_module(name)
    return Program(what, *rest)


__all__: Sequence[str] = ("Program", "packed", "program_of", "unpacked")
