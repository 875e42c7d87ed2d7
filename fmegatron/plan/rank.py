"""What a rank of a layout runs: the traces of its parts for any number of rows, and the collectives of its parameters.

Traces are made at one and at two rows of a microbatch and are linear in between and beyond: all that depends on rows is in
proportion to them, but for weights. They are kept: layouts that differ in their data axes, ZeRO, microbatches or pipeline share
them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from fmegatron.axes import PIPELINE
from fmegatron.collectives import COST, wire_of
from fmegatron.errors import UserError
from fmegatron.parallel.pipeline_stage import Ends, find_ends, inside_stage
from fmegatron.parallel.stages import Stage, even, loop, parse_layout, vee
from fmegatron.plan.tracing import Halves, Parts, Trace, Work, ranks_not_there
from fmegatron.precision import Precision
from fmegatron.primitives.cross_entropy import KEPT_ELEMENTS
from fmegatron.recording import Collective
from fmegatron.sharding import Sharding
from fmegatron.spec import Param, params_of
from fmegatron.testing.layout import Layout
from fmegatron.testing.program import Program
from fmegatron.tree import leaves

HALF = (torch.bfloat16, torch.float16)
ENTRY = "mtp"  # of a model's parameters: prediction modules, which are layers behind the others
FOLDED = ("zbv", "dualpipev")  # schedules that place stages as a V,
SPLIT = ("zbh1", *FOLDED)  # and those that run the halves of a backward apart


@dataclass(frozen=True)
class Setting:
    """A layout with all else that a step's memory and time depend on.

    layout: its `micro` are the microbatches of a rank. rows, seq: of the global batch. moments, master: dtypes of the optimizer's
        state; master None: no copy. parameters, gradients and products are as `precision` says. offload: the optimizer's state rests in
        host memory. beside: which microbatches compute while tokens of another one are on their way to experts: "none", "pairs" or
        "1f1b" (see `fmegatron.accumulate`; of a pipeline the pairs that DualPipe-V joins).
    """

    layout: Layout
    rows: int
    seq: int
    precision: Precision
    moments: torch.dtype = torch.float32
    master: torch.dtype | None = None
    offload: bool = False
    beside: str = "none"

    @property
    def rank_rows(self) -> int:
        """Rows of a step on one rank, the largest part."""
        return -(-self.rows // size(self.layout, "dp", "fsdp"))

    @property
    def microbatch(self) -> int:
        """Rows of a microbatch on one rank, the largest."""
        return -(-self.rank_rows // self.layout.micro)

    @property
    def tokens(self) -> int:
        return self.rows * self.seq


@dataclass(eq=False)
class Model:
    """A model that is planned, with all that was found of it."""

    model: Any
    program: Program = field(init=False)
    traces: dict[Any, Trace] = field(default_factory=dict)
    _moves: dict[Any, Counter[Collective]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.program = Program(self.model)

    @functools.cached_property
    def spec(self) -> Any:
        return self.model.spec()

    @functools.cached_property
    def ends(self) -> Ends:
        return find_ends(self.model)

    @functools.cached_property
    def layers(self) -> int:
        return len(self.spec["layers"])

    @functools.cached_property
    def kinds(self) -> tuple[int, ...]:
        """Of each layer, the first one that is like it."""
        first: dict[Any, int] = {}
        config = getattr(self.model, "config", None)
        marks = getattr(config, "kinds", None) or [None] * self.layers
        found = []
        for index in sorted(self.spec["layers"]):
            key = marks[index], tuple((n, p.shape, p.dims) for n, p in params_of(self.spec["layers"][index]).items())
            found.append(first.setdefault(key, index))
        return tuple(found)

    @functools.cached_property
    def parameters(self) -> int:
        return sum(p.numel for p in leaves(self.spec))

    @functools.cached_property
    def active_parameters(self) -> int:
        """Those that a token meets: of experts as many as it has."""
        moe = getattr(getattr(self.model, "config", None), "moe", None)
        share = 1.0 if moe is None else moe.routing.top_k / moe.routing.experts
        return int(sum(p.numel * (share if p.names[:1] == ("expert",) else 1) for p in leaves(self.spec)))

    def sharding(self, setting: Setting) -> Sharding:
        """Of the stage of a layout, on a mesh that answers questions alone."""
        key = ("sharding", outer(setting.layout), setting.precision)
        return self.kept(key, lambda: self._sharding(setting.layout, setting.precision))

    def _sharding(self, layout: Layout, precision: Precision) -> Sharding:
        mesh = self.program.mesh(layout, device="meta", abstract=True)
        sh = Sharding(mesh, self.program.rules(mesh, layout), precision=precision)
        return inside_stage(sh, self._few, PIPELINE) if layout.pipelined else sh

    def unplaced(self, layout: Layout) -> str | None:
        """Why parameters have no place on the mesh of a layout with experts, or of its smaller one; None if they have."""
        try:
            for some in (layout, _inner(layout)):
                self._sharding(some, Precision()).check_spec(self._few)
        except UserError as error:
            return str(error)
        return None

    @functools.cached_property
    def _few(self) -> Any:
        """A spec with every dim: the ends and one layer of each kind."""
        return {**self.spec, "layers": {i: self.spec["layers"][i] for i in set(self.kinds)}}

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What make() gives, made once for a key."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    @functools.cached_property
    def _cache(self) -> dict[Any, Any]:
        return {}

    # --------------------------------------------------------------------------------------------------------- traces

    def trace(self, setting: Setting, part: str | int, rows: int, keep: bool | None = None) -> Trace:
        """Of "embed", "head" or a layer, with so many rows in a microbatch on a rank. keep: whether the loss keeps its
        probabilities; None: if it does with these rows."""
        given = setting.layout
        layout, text, ends = self.kept(("inner", given), lambda: _with_texts(_inner(given), ENTRY in self.spec))
        keep = part == "head" and self._keeps(setting, layout, rows) if keep is None else keep
        part = self.kinds[part] if isinstance(part, int) else part
        halves = given.schedule in SPLIT
        key = (
            text if isinstance(part, int) else ends,
            setting.precision,
            setting.seq,
            part,
            keep,
            halves,
        )
        if (*key, rows) not in self.traces:
            cut = part != "embed" and size(layout, "tp", "cp") > 1
            if layout.remat == "nothing" and isinstance(part, int):
                everything = dataclasses.replace(setting, layout=dataclasses.replace(given, remat="everything"))
                made = nothing_kept(self.trace(everything, part, rows))
            elif rows == 1 or (rows == 2 and cut):
                made = self._traced(setting, layout, part, rows, keep, halves)
            else:
                # gathers of several rows put them in order again, which one row needs not
                made = scaled(self.trace(setting, part, 1 + cut, keep), rows, 1 + cut)
            self.traces[*key, rows] = made
        return self.traces[*key, rows]

    def _keeps(self, setting: Setting, layout: Layout, rows: int) -> bool:
        """Does the loss keep its probabilities, as it does on a GPU?"""
        own = getattr(self.model, "keep_probabilities", None)
        vocab = self.program.sizes.get("vocab")
        softcap = getattr(getattr(self.model, "config", None), "logit_softcap", None)
        half = (setting.precision.compute_dtype or setting.precision.params) in HALF
        if own is not None or vocab is None:
            return bool(own)
        if softcap is not None or bool(getattr(self.model, "label_smoothing", 0.0)):
            return False
        tp = size(layout, "tp")
        return half and vocab % tp == 0 and rows * setting.seq // size(layout, "cp") * vocab // tp <= KEPT_ELEMENTS

    def _traced(
        self, setting: Setting, layout: Layout, part: str | int, rows: int, keep: bool, halves: bool = False
    ) -> Trace:
        model = self.program.on(layout).model
        fields = {f.name for f in dataclasses.fields(model)} if dataclasses.is_dataclass(model) else set()
        if "keep_probabilities" in fields:
            model = dataclasses.replace(model, keep_probabilities=keep)
        sh = self._sharding(layout, setting.precision)
        if sh.mesh is not None:
            sh = dataclasses.replace(sh, mesh=ranks_not_there(sh.mesh), _plans={})
        parts = Parts(model, sh, rows, setting.seq, self._few)
        return parts.layer(part, halves=halves) if isinstance(part, int) else getattr(parts, part)(halves=halves)

    def sums(self, setting: Setting) -> Counter[Collective]:
        """The collectives of the sums of a step's losses, statistics and weights, on the whole mesh of a stage."""
        sh = self.sharding(setting)
        if sh.mesh is None:
            return Counter()
        sh = dataclasses.replace(sh, mesh=ranks_not_there(sh.mesh), _plans={})
        return self.kept(
            ("sums", id(self.sharding(setting)), setting.seq),
            lambda: Parts(self.model, sh, setting.rank_rows, setting.seq, self._few).sums(),
        )

    # ---------------------------------------------------------------------------------------------------------- stages

    def stages(self, layout: Layout) -> tuple[Stage, ...]:
        """What each stage of the pipeline holds."""
        if layout.stages:
            return self.kept(("stages", layout.stages), lambda: parse_layout(layout.stages, layers=self.layers))
        count = size(layout, PIPELINE) * virtual_of(layout)
        return self.kept(("stages", count), lambda: even(self.layers, count))

    def alike(self, stage: Stage) -> tuple[tuple[tuple[int, int], ...], bool, bool]:
        """What stages that take and keep the same have in common: (how many layers of each kind, whether it has the embedding, the
        head)."""
        found = self._alike.get(id(stage))
        if found is None or found[0] is not stage:
            counts = Counter(self.kinds[i] for i in stage.layers)
            found = stage, (tuple(sorted(counts.items())), stage.embedding, stage.head)
            self._alike[id(stage)] = found
        return found[1]

    @functools.cached_property
    def _alike(self) -> dict[int, Any]:
        return {}

    def entries(self, stage: Stage) -> list[Param]:
        """The parameters outside the layers that a stage holds."""
        names = [*(self.ends.front if stage.embedding else ()), *(self.ends.back if stage.head else ())]
        return [p for n in dict.fromkeys(names) for p in leaves(self.spec[n])]

    # ------------------------------------------------------------------------------------------ parameters on their way

    def moves(self, sh: Sharding, key: Any, params: Iterable[Param], what: str) -> Counter[Collective]:
        """The collectives that take parameters along their arrows (`Sharding.steps_of`): as many as there are kinds, axes and
        dtypes. key: of the parameters."""
        full = (id(sh), key, what)
        if full not in self._moves:
            self._moves[full] = self._moved(sh.delaying(), params, what)
        return self._moves[full]

    @staticmethod
    def _moved(sh: Sharding, params: Iterable[Param], what: str) -> Counter[Collective]:
        if sh.mesh is None:
            return Counter()
        sums: dict[Any, int] = {}
        for p in params:
            dtype = sh.param_dtype(p)
            steps = sh.steps_of(p, what)
            if what == "enter":
                dtype = sh.compute_dtype(p)
            elif what in ("leave", "settle") and (what == "leave" or any(s.kind[0] == "P" for s in steps)):
                dtype = sh.reduce_dtype(p)
            elements = math.prod(sh.stored_shape(p, "optimizer" if what == "return" else "params"))
            if what == "leave":
                elements = math.prod(_read_shape(sh, p))
            for step in steps:
                cost, n = COST[step.kind], sh.mesh.size(step.axes)
                wire = wire_of(step)
                if wire is not None:
                    sends = [
                        ("all-to-all", elements),
                        *([("all-gather", elements // n)] if cost == "all-reduce" else ()),
                    ]
                    for kind, sent in sends:
                        at = (kind, step.axes, n, wire.sent)
                        sums[at] = sums.get(at, 0) + sent
                elif cost not in ("nothing", "slice"):
                    at = (cost, step.axes, n, dtype)
                    sums[at] = sums.get(at, 0) + elements
                elements = {"all-gather": elements * n, "reduce-scatter": elements // n, "slice": elements // n}.get(
                    cost, elements
                )
        return Counter(Collective(kind, axes, n, e, dtype) for (kind, axes, n, dtype), e in sums.items())


class Rough(Model):
    """A model that is traced less: layouts with context parallelism are parts of those without, as if that cost nothing, and one row
    is half of two. So it tells what a layout takes and keeps at least, or nearly so."""

    def __init__(self, exact: Model) -> None:
        super().__init__(exact.model)
        self.exact = exact

    def trace(self, setting: Setting, part: str | int, rows: int, keep: bool | None = None) -> Trace:
        layout = setting.layout
        cp, several = size(layout, "cp"), 1 + (size(layout, "tp") > 1)
        keep = part == "head" and self._keeps(setting, layout, rows) if keep is None else keep
        part = self.kinds[part] if isinstance(part, int) else part

        def made() -> Trace:
            data = size(layout, "dp", "fsdp") * cp
            whole = dataclasses.replace(layout, mesh=f"dp={data},tp={size(layout, 'tp')}", context="gather", **_PLAIN)
            alone = dataclasses.replace(setting, layout=whole)
            return scaled(self.exact.trace(alone, part, several, keep), rows, cp * several)

        if cp == 1 and rows >= several:
            return self.exact.trace(setting, part, rows, keep)
        return self.kept(("rough", outer(layout), layout.remat, setting.seq, part, rows, keep), made)


_PLAIN: dict[str, Any] = dict(zero=0, micro=1, schedule="1f1b", virtual=None, stages="", store="", state="")


def _read_shape(sh: Sharding, p: Param) -> tuple[int, ...]:
    """The shape of a parameter as equations read it."""
    return tuple(sh.local_size(name, n) for name, n in zip(p.names, p.shape, strict=True))


def read_elements(sh: Sharding, p: Param) -> int:
    return math.prod(_read_shape(sh, p))


def virtual_of(layout: Layout) -> int:
    """Stages of each rank of a pipeline."""
    return layout.virtual or (2 if layout.schedule in ("interleaved", "bfs", *FOLDED) else 1)


def placement(layout: Layout) -> tuple[int, ...]:
    """The rank of the pipeline that holds each stage."""
    return _placement(size(layout, PIPELINE), layout.schedule in FOLDED, virtual_of(layout))


@functools.lru_cache(maxsize=1024)
def _placement(ranks: int, folded: bool, virtual: int) -> tuple[int, ...]:
    return vee(ranks) if folded else loop(ranks, virtual)


@functools.lru_cache(maxsize=1024)
def of_ranks(owner: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank, of a placement."""
    found: list[list[int]] = [[] for _ in range(max(owner) + 1)]
    for stage, rank in enumerate(owner):
        found[rank].append(stage)
    return tuple(map(tuple, found))


@functools.lru_cache(maxsize=65536)
def outer(layout: Layout) -> str:
    """What the mesh and the rules depend on."""
    return str(dataclasses.replace(layout, micro=1, remat="everything", schedule="1f1b", virtual=None, stages=""))


def _inner(layout: Layout) -> Layout:
    """The layout of the smallest mesh on which a rank's parts are what they are on this one: of data ranks as many as experts
    lie on."""
    tp, cp, data = size(layout, "tp"), size(layout, "cp"), size(layout, "dp", "fsdp")
    of_experts = layout.ep * layout.etp
    needed = of_experts // math.gcd(of_experts, tp * cp)
    if data % needed:
        needed = data
    axes = {"dp": needed, "cp": cp, "tp": tp}
    order = [a for a in layout.axes if a in axes] or ["dp"]
    if "dp" not in order and needed > 1:
        order.insert(0, "dp")
    mesh = ",".join(f"{a}={axes[a]}" for a in order if a == "tp" or axes[a] > 1) or "dp=1"
    return Layout(
        mesh,
        sp=layout.sp and tp > 1,
        ep=of_experts // layout.etp,
        etp=layout.etp,
        dispatch=layout.dispatch,
        remat=layout.remat,
        context=layout.context if cp > 1 else "gather",
    )


def _with_texts(layout: Layout, modules: bool) -> tuple[Layout, str, str]:
    """(the layout, what a layer of it depends on, what the ends do)."""
    context = "gather" if layout.context == "ring" else layout.context  # whose axes are the same
    remat = layout.remat if modules else "everything"  # prediction modules are run again as layers are
    return layout, str(layout), str(dataclasses.replace(layout, remat=remat, context=context))


def nothing_kept(everything: Trace) -> Trace:
    """Of a layer that keeps its input alone, from that which keeps everything: its backward begins with a second forward."""
    forward, halves = everything.forward, everything.halves

    def again(backward: Work) -> Work:
        return Work(
            forward.products + backward.products,
            forward.attention + backward.attention,
            forward.bytes + backward.bytes,
            forward.kernels + backward.kernels,
            forward.collectives + backward.collectives,
            forward.of_weights + backward.of_weights,
            tuple(sorted({*forward.alive_in_all, *backward.alive_in_all})),
        )

    return Trace(
        dataclasses.replace(forward, alive=forward.alive_in_all),
        again(everything.backward),
        everything.out,
        everything.outs,
        None if halves is None else dataclasses.replace(halves, input=again(halves.input)),
    )


def scaled(trace: Trace, rows: int, of: int = 1) -> Trace:
    """A trace of some rows, from that of `of` rows."""

    def work(w: Work) -> Work:
        return Work(
            products=_each(w.products, lambda p: {"k": p.k * rows // of} if p.weight else {"m": p.m * rows // of}),
            attention=_each(w.attention, lambda a: {"pairs": a.pairs * rows / of, "rows": a.rows * rows // of}),
            bytes=w.of_weights + (w.bytes - w.of_weights) * rows / of,
            kernels=w.kernels,
            collectives=_each(
                w.collectives, lambda c: {"elements": c.elements if _counts(c) else c.elements * rows // of}
            ),
            of_weights=w.of_weights,
            alive=tuple((a, b * rows // of) for a, b in w.alive),
            alive_in_all=tuple((a, b * rows // of) for a, b in w.alive_in_all),
        )

    halves = trace.halves
    if halves is not None:
        halves = Halves(work(halves.input), work(halves.weight), halves.left * rows // of)
    outs = tuple((n * rows // of, dtype) for n, dtype in trace.outs)
    fixed = trace.saved_of_weights
    saved = fixed + (trace.saved - fixed) * rows // of
    return Trace(work(trace.forward), work(trace.backward), saved, outs, halves, fixed)


def _counts(c: Collective) -> bool:
    """Does it tell how many rows there are for each expert, whatever the number of rows?"""
    return c.kind == "all-to-all" and c.dtype == torch.int64


def _each(some: Counter[Any], change: Callable[[Any], dict[str, Any]]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for x, n in some.items():
        found[dataclasses.replace(x, **change(x))] += n
    return found


def size(layout: Layout, *names: str) -> int:
    """The product of the sizes of some axes; an absent one counts as 1."""
    found = layout.axes
    return math.prod(found.get(n, 1) for n in names)
