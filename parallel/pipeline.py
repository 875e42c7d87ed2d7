"""`pipeline`: a model's layers over ranks, any schedule, with the type of `accumulate`.

    mesh = make_mesh("pp=2,tp=2")
    sh = inside_stage(Sharding(mesh, rules), model.spec())         # of what one stage holds: the mesh without pp
    gradients = pipeline(model, one_f_one_b(2, 8), mesh=mesh)
    params = init(gradients.spec, key, sh=sh)                      # this rank's layers and ends, under their global names
    (total, metrics), grads = gradients(params, batch, Ctx(sh=sh))

A schedule is data (`schedules`), proven before it runs (`schedule_check`), and interpreted here action by action: the
forward of a stage for a microbatch, its backward whole or in halves by the `split` of the stage's function, and messages
in the table's order (`point_to_point`). Everything else is as on one device: weights of the global batch first, keys by
layer, dropout by row, sums over data axes once, block by block in a stage's last backward.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmegatron.accumulate import (
    Sums,
    Weight,
    as_factor,
    cut_batch,
    cut_off,
    evaluate,
    like_state,
    row_count,
    scales,
    with_rows,
)
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.grad import Trainable, as_at_rest, higher_order, to_local, trainable_leaves, unscaled
from fmegatron.interleave import by_turns
from fmegatron.mesh import Mesh
from fmegatron.optim.norm import sum_of_squares
from fmegatron.parallel import pipeline_generate
from fmegatron.parallel.alarm import Alarm
from fmegatron.parallel.pipeline_stage import (
    Ends,
    Within,
    carry_like,
    find_ends,
    inside_stage,
    layers_of,
    rank_entries,
    stage_entries,
    stage_function,
    stage_parts,
    with_context,
)
from fmegatron.parallel.point_to_point import Arrival, Messages
from fmegatron.parallel.schedule_check import check, steps
from fmegatron.parallel.schedule_communication import with_collectives, with_communication
from fmegatron.parallel.schedule_simulation import Costs
from fmegatron.parallel.schedules import (
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    GATHER,
    INPUT,
    RECV_B,
    RECV_F,
    REDUCE,
    SEND_B,
    SEND_F,
    WEIGHT,
    Action,
    Schedule,
    forward_only,
)
from fmegatron.parallel.stack import Giving
from fmegatron.parallel.stages import Stage, even, format_layout
from fmegatron.sharding import Sharding
from fmegatron.split import split
from fmegatron.tree import flatten, is_float, is_tensor, leaves, like, named, paths, structure, tree_map, unflatten
from fmegatron.zero import Reducer, moving, splits_state

__all__ = ["Ends", "Pipeline", "find_ends", "inside_stage", "pipeline"]


def pipeline(
    model: Any,
    schedule: Schedule,
    *,
    mesh: Mesh,
    axis: str = "pp",
    assignment: Sequence[Stage] | None = None,
    ends: Ends | None = None,
    weights: Callable[[Any], Mapping[str, Weight]] | None = None,
    trainable: Trainable = None,
    dtype: torch.dtype | None = None,
    costs: Costs | None = None,
    overlap: bool = False,
) -> Pipeline:
    """f(params, batch, ctx=Ctx(), *, loss_scale=None) -> ((total, metrics), gradients), as `accumulate` gives it.

    model: `spec()`, `context(batch, ctx)` (if it has one), `embed(params, batch, ctx)`, `block(params, x, ctx)`,
        `head(params, x, batch, ctx) -> (terms, stats)` and perhaps `weights(batch)`; its spec has {"layers": {index: …}}.
        Where it has a `stack`, that runs its layers, else a plain `stack` of its blocks does.
    schedule: of as many ranks as `axis` of the mesh has. Without sends and receives it gets them (`costs` are those by
        which their order is chosen), and it gets the reductions of gradients over data axes. GATHERs are left
        out: layers gather their parameters one ahead, for every microbatch. It is proven here.
    mesh: the whole mesh. ctx.sh is `inside_stage` of it: without `axis`.
    assignment: what each stage holds (`stages`); None: layers as evenly as they go.
    ends: which parameters are read before the layers and behind them; None: `find_ends`. Those in both are tied: they
        lie on both stages, their gradients are summed, and they count once in `norm`.
    weights, trainable, dtype: as for `accumulate`; weights None: the model's, if it has them.
    overlap: a forward and a backward that the schedule joins (DualPipe-V) run by turns, each under the exchanges of the
        other's experts (see `fmegatron.interleave`).

    f.spec is what this rank holds, a part of the model's spec with the same names; params, gradients and optimizer state
    have its structure. Every rank of `axis` gets the same rows of the batch. total and metrics are equal on all ranks;
    f.norm(gradients) is the global norm over all stages. f.evaluate is the same without gradients. f.log is what the
    last call did, noted where it was done. `fmegatron.generate.generate_tokens` takes f in place of a model that has `cached` (and in it goes
    through its own `embed`, `stack` and `unembed`).

    Raises UserError for a schedule of other sizes, one that is not complete or would hang (ScheduleError), or differs
    between ranks, whose first difference is named; and, on all ranks within seconds, what any rank raises in a step (RankFailed elsewhere, with that
    rank's traceback).
    """
    (atom,) = mesh.expand(axis)
    if schedule.ranks != mesh.sizes[atom]:
        raise UserError(
            f"schedule {schedule.name!r} has {schedule.ranks} ranks, but mesh axis {axis!r} has {mesh.sizes[atom]}: "
            f"make it for stages={mesh.sizes[atom]}"
        )
    spec = model.spec()
    count = len(spec["layers"])
    assignment = tuple(even(count, schedule.stages) if assignment is None else assignment)
    if len(assignment) != schedule.stages:
        raise UserError(
            f"assignment has {len(assignment)} stages, but schedule {schedule.name!r} has {schedule.stages} on "
            f"{schedule.ranks} ranks"
        )
    held = [i for s in assignment for i in s.layers]
    if held != sorted(spec["layers"]) or [sum(s.embedding for s in assignment), sum(s.head for s in assignment)] != [
        1,
        1,
    ]:
        raise UserError(
            f"assignment must hold each of the model's {count} layers once and in order, one embedding and one head"
        )
    table = schedule if schedule.communicates else with_communication(schedule, costs)
    if not any(a.kind == REDUCE for program in table.programs for a in program):
        table = with_collectives(table, gather=False)
    # a stage gathers its parameters itself, layer by layer, one ahead
    without_gathers = (tuple(a for a in program if a.kind != GATHER) for program in table.programs)
    table = replace(table, programs=tuple(without_gathers))
    check(table)
    ends = find_ends(model) if ends is None else ends
    made = Pipeline(
        model,
        table,
        mesh,
        atom,
        assignment,
        ends,
        mesh.coordinate(atom),
        spec,
        getattr(model, "weights", None) if weights is None else weights,
        trainable,
        dtype,
        costs,
        overlap,
    )
    made.compare_tables()
    return made


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A model over the ranks of a pipeline; see `pipeline`, which makes it.

    table: the schedule with all its actions. rank: this one's number on the axis. log: the actions of the last call, as
    text.
    """

    model: Any
    table: Schedule
    mesh: Mesh
    axis: str
    assignment: tuple[Stage, ...]
    ends: Ends
    rank: int
    whole_spec: Any
    weights: Callable[[Any], Mapping[str, Weight]] | None
    trainable: Trainable
    dtype: torch.dtype | None
    costs: Costs | None
    overlap: bool = False
    log: list[str] = field(default_factory=list)
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def spec(self) -> dict[str, Any]:
        """The spec of what this rank holds."""
        return self.held(self.whole_spec)

    def held(self, tree: Any) -> dict[str, Any]:
        """Of a tree like the whole model's parameters what this rank holds."""
        return rank_entries(tree, [self.assignment[s] for s in self.table.stages_of(self.rank)], self.ends)

    @property
    def group(self) -> Any:
        """The ranks of the pipeline that this one belongs to; None for one rank."""
        if self.table.ranks == 1 or self.mesh.device_mesh is None:  # or an abstract mesh, which runs nothing
            return None
        return self.mesh.process_group((self.axis,))

    @property
    def first(self) -> int:
        """The stage with the embedding."""
        return next(n for n, s in enumerate(self.assignment) if s.embedding)

    @property
    def last(self) -> int:
        """The stage with the head."""
        return next(n for n, s in enumerate(self.assignment) if s.head)

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks that hold tied parameters, the one that counts them first."""
        return tuple(dict.fromkeys((self.table.placement[self.first], self.table.placement[self.last])))

    def __call__(
        self, params: Any, batch: Any, ctx: Ctx | None = None, *, loss_scale: float | None = None
    ) -> tuple[tuple[Tensor, dict[str, Any]], Any]:
        """((total, metrics), gradients of what this rank holds); see `pipeline`."""
        ctx = Ctx() if ctx is None else ctx
        self._check_call(params, batch, ctx)
        with self.alarm() as alarm, torch.no_grad():
            return _Training(self, alarm, params, batch, ctx, loss_scale).run()

    def evaluate(self, params: Any, batch: Any, ctx: Ctx | None = None) -> dict[str, tuple[Tensor, Any]]:
        """{term: (sum of its items, weight)} of the global batch on all ranks, without gradients, as
        `fmegatron.step.evaluate` gives it."""
        ctx = Ctx() if ctx is None else ctx
        self._check_call(params, batch, ctx)
        with self.alarm() as alarm, torch.no_grad():
            found = _Forwards(self, alarm, params, batch, ctx, self._evaluated_in).run()
        return {name: (total, found["weights"][name]) for name, total in found["sums"].items()}

    def statistics(self, params: Any, batch: Any, ctx: Ctx, *, microbatches: int) -> Any:
        """The statistics of the loss on all ranks, in at most so many microbatches, without gradients."""
        self._check_call(params, batch, ctx)
        with self.alarm() as alarm, torch.no_grad():
            return _Forwards(self, alarm, params, batch, ctx, microbatches).run()["stats"]

    @property
    def _evaluated_in(self) -> int:
        """Microbatches of an evaluation: one where routing decides on the whole batch."""
        moe = getattr(self.config, "moe", None)
        return 1 if moe is not None and moe.routing.decides_on_batch else self.table.microbatches

    @property
    def config(self) -> Any:
        """The model's sizes, where it has them."""
        return getattr(self.model, "config", None)

    def cache(self, rows: int, slots: int, *, sh: Sharding | None = None, **options: Any) -> Any:
        """This rank's part of the model's cache: room for the keys and values of its own layers, and with `sh` of its
        own heads."""
        return pipeline_generate.make_cache(self, rows, slots, sh, options)

    def cached(
        self, params: Any, tokens: Tensor, cache: Any, start: int, ctx: Ctx | None = None, **batch: Any
    ) -> Tensor:
        """The model's `cached` through the stages: the logits behind `tokens`, on all ranks, each of which must call it.

        Raises UserError for a model without `cached`."""
        ctx = Ctx() if ctx is None else ctx
        self._check_call(params, tokens, ctx)
        return pipeline_generate.cached(self, params, tokens, cache, start, ctx, batch)

    def alarm(self) -> Alarm:
        """To be entered, on all ranks, for work beside the pipeline's own, such as an update: what one rank raises in it,
        all do (see `fmegatron.parallel.alarm`)."""
        return Alarm(self._stop)

    def norm(self, values: Any) -> Tensor:
        """The 2-norm of all elements of all stages, of a tree like this rank's parameters: tied ones count once. A 0-d
        tensor, equal on all ranks, in float32, or float64 if a leaf is. Every rank of the pipeline must call it."""
        if self.owners[0] != self.rank and self.ends.tied:
            values = {n: v for n, v in values.items() if n not in self.ends.tied}
        mine = sum_of_squares(values)
        if self.group is None:
            return mine.sqrt()
        wide = mine.dtype == torch.float64 and any(is_float(t) for t in leaves(values))
        both = torch.stack([mine.double(), torch.full_like(mine, float(wide)).double()]).to(self.mesh.device)
        dist.all_reduce(both, group=self.group)
        return both[0].sqrt().to(torch.float64 if bool(both[1] > 0) else torch.float32)

    def of(self, model: Any) -> Pipeline:
        """The same pipeline of a model of the same parameters, such as one whose loss has no smoothing."""
        return replace(self, model=model, weights=getattr(model, "weights", self.weights), log=[], _cache={})

    def trainable_here(self) -> Trainable:
        """`trainable` as it is for this rank's tree."""
        if self.trainable is None or callable(self.trainable):
            return self.trainable
        return self.held(self.trainable)

    def stage(self, number: int) -> Callable:
        """The function of a stage, with its `split`."""
        if (key := ("stage", number)) not in self._cache:
            layers = self._cache.setdefault("layers", layers_of(self.model, self.whole_spec))
            self._cache[key] = stage_function(self.model, layers, self.assignment[number], self.ends)
        return self._cache[key]

    def carries(self, stage: int) -> bool:
        """Does the model's stream go from a stage to the next one? (Not in front of the embedding, nor behind the
        head.)"""
        return self.first <= stage < self.last

    def messages(self) -> Messages | None:
        """The messages of this rank."""
        if self.group is None:
            return None
        if "messages" not in self._cache:
            self._cache["messages"] = Messages(self.group, self.mesh.device)
        return self._cache["messages"]

    def forwards(self, microbatches: int) -> Schedule:
        """The table of an evaluation."""
        if (key := ("forwards", microbatches)) not in self._cache:
            table = with_communication(forward_only(self.table.placement, microbatches), self.costs)
            check(table, backward=False)
            self._cache[key] = table
        return self._cache[key]

    def compare_tables(self) -> None:
        """Raises UserError, on all ranks of the mesh, unless they all have the same table and assignment: a different one
        would hang. The message names the first difference."""
        if self.mesh.world == 1 or self.mesh.device_mesh is None:
            return
        own = self._described()
        digests: list[Any] = [None] * self.mesh.world
        dist.all_gather_object(digests, hashlib.sha256(repr(own).encode()).hexdigest())
        if len(set(digests)) == 1:
            return
        found: list[Any] = [None] * self.mesh.world
        dist.all_gather_object(found, own)
        other = next(r for r, each in enumerate(found) if each != found[0])
        what, first, here = next((a, x, y) for (a, x), (_, y) in zip(found[0], found[other], strict=False) if x != y)
        raise UserError(
            f"process {other} has another pipeline than process 0: {what} is {here or 'nothing'} there, and "
            f"{first or 'nothing'} in process 0. Make schedule and assignment from the same settings on all of them, with "
            "the same costs"
        )

    def _described(self) -> list[tuple[str, str]]:
        """(what, its value) of all that ranks must have in common, the most telling first."""
        table = self.table
        rows = [("the schedule", repr(table.name)), ("the number of microbatches", str(table.microbatches))]
        rows += [("the rank of each stage", str(table.placement)), ("layout of stages", format_layout(self.assignment))]
        rows += [("ends", str(self.ends)), ("overlap", str(self.overlap))]
        for rank, program in enumerate(table.programs):
            actions = [f"{'+' * a.joined}{a}" for a in program]
            rows += [(f"action {n} of rank {rank} in the table", a) for n, a in enumerate([*actions, ""])]
        return rows

    def _check_call(self, params: Any, batch: Any, ctx: Ctx) -> None:
        sh = ctx.sh
        if sh.mesh is not None and self.axis in sh.mesh.sizes:
            raise UserError(
                f"ctx.sh has the mesh with {self.axis!r}: give that of a stage, inside_stage(sh, model.spec())"
            )
        inside = math.prod(n for a, n in self.mesh.sizes.items() if a != self.axis)
        if (1 if sh.mesh is None else sh.mesh.world) != inside:
            raise UserError(
                f"ctx.sh is of {1 if sh.mesh is None else sh.mesh.world} ranks, but a stage of {self.mesh} is on {inside}: "
                "give that of a stage, inside_stage(sh, model.spec())"
            )
        if sh.check is not None or higher_order((params, to_local(batch))):
            raise UserError(
                "a pipeline runs once and forwards no derivatives: not inside torch.func or the checking mode"
            )
        if paths(params) != paths(self.spec):
            odd = sorted(set(paths(params)) ^ set(paths(self.spec)))
            raise UserError(
                f"params must have the structure of this rank's spec (Pipeline.spec), but {odd[:3]} occur in only one of them"
            )

    def _stop(self) -> None:
        """Ends what this rank waits for, when another one has failed."""
        if self.group is not None and self.mesh.device.type == "cuda":
            with contextlib.suppress(Exception):
                dist.distributed_c10d._abort_process_group(self.group)


class _Run:
    """One run of a table on one rank.

    Everything between two actions is in dicts by (stage, microbatch), and leaves them when it is used: `inputs` and
    `gradients` of outputs, received or handed over on the same rank; `outputs` that wait for their send.
    """

    def __init__(self, pipe: Pipeline, alarm: Alarm, table: Schedule, params: Any, batch: Any, ctx: Ctx) -> None:
        self.pipe, self.alarm, self.table, self.ctx = pipe, alarm, table, ctx
        self.sh: Sharding = ctx.sh
        self.batch = to_local(batch)
        self.at_rest, self.params = params, to_local(params)
        self.parts = cut_batch(self.batch, with_rows(ctx, self.batch), table.microbatches)
        self.messages = pipe.messages()
        if self.messages is not None:
            self.messages.check = alarm.check
        self.inputs: dict[tuple[int, int], Any] = {}
        self.gradients: dict[tuple[int, int], Any] = {}
        self.outputs: dict[tuple[str, int, int], tuple[list[Tensor], Any]] = {}
        self.mine = {s: stage_entries(self.params, pipe.assignment[s], pipe.ends) for s in table.stages_of(pipe.rank)}
        self.last_rank = table.placement[pipe.last]
        self.known: Mapping[str, Weight] | None = None
        self.scale: Any = None
        if self.last_rank == pipe.rank:
            self.known = None if pipe.weights is None else dict(pipe.weights(self.batch))
            self.scale = None if self.known is None else scales(self.known, self.sh)
        self.sums = Sums(self.sh, table.microbatches, at_once=False)
        pipe.log.clear()

    # ------------------------------------------------------------------------------------------------------ the table

    def act(self, compute: Callable[[Action], None]) -> None:
        """Runs this rank's program: its messages, and compute(action) for all other actions."""
        for step in steps(self.table.programs[self.pipe.rank]):
            self.alarm.check()
            if step[0].kind in COMMUNICATION:
                self.communicate(step)
            else:
                parts = [functools.partial(compute, action) for action in step]
                if self.pipe.overlap:
                    by_turns(parts)
                else:
                    for part in parts:
                        part()
            if self.messages is not None:
                self.messages.drop_sent()
        if self.messages is not None:
            self.messages.finish()

    def note(self, kind: str, stage: int, microbatch: int | None = None) -> None:
        """An action that has been done: called where it is, so that the log is of what ran and not of the table."""
        self.pipe.log.append(str(Action(kind, stage, microbatch)))

    def communicate(self, step: tuple[Action, ...]) -> None:
        """Posts sends and receives as one batch."""
        assert self.messages is not None
        moves = []
        for a in step:
            assert a.microbatch is not None
            peer = self.table.peer(a)
            if a.kind in (SEND_F, SEND_B):
                tensors, after = self.outputs.pop((a.kind, a.stage, a.microbatch))
                moves.append((peer, tensors, True, after))
            else:
                forward = a.kind == RECV_F
                carry = self.carry(a.microbatch) if self.pipe.carries(a.stage - 1 if forward else a.stage) else []
                shapes = [(tuple(t.shape), t.dtype) for t in leaves(carry) if forward or is_float(t)]
                moves.append((peer, self.messages.empty(shapes), False, None))
        arrivals = self.messages.exchange(moves)
        for a, arrival in zip(step, arrivals, strict=True):
            self.note(a.kind, a.stage, a.microbatch)
            if a.kind == RECV_F:
                self.inputs[a.stage, a.microbatch] = arrival  # type: ignore[index]
            elif a.kind == RECV_B and a.stage != self.pipe.last:  # which has the loss's own gradient
                self.gradients[a.stage, a.microbatch] = arrival  # type: ignore[index]

    def within(self, m: int, loss_scale: float | None = None) -> Within:
        """The context of a microbatch."""
        part, ctx = self.parts[m]

        def value(terms: Any, stats: Any) -> Any:
            x, aux = evaluate(terms, stats, self.known, self.scale, self.sh, loss_scale, at_once=False)
            return x, tree_map(cut_off, aux)

        return Within(with_context(self.pipe.model, part, ctx), part, value)

    # ----------------------------------------------------------------------------------------------------- messages

    def carry(self, m: int) -> Any:
        """The stream of a microbatch, without data."""
        part, ctx = self.parts[m]
        shapes = [(tuple(t.shape), t.dtype) if is_tensor(t) else t for t in leaves(part)]
        key = ("carry", id(self.sh.mesh), self.sh.precision, structure(part), repr(shapes))
        cache = self.pipe._cache
        if key not in cache:
            inner = with_context(self.pipe.model, part, ctx)
            cache[key] = carry_like(self.pipe.model, self.pipe.whole_spec, self.pipe.ends, part, inner)
        return cache[key]

    def take_input(self, s: int, m: int) -> Any:
        """The input of a stage."""
        if not self.pipe.carries(s - 1):
            self.inputs.pop((s, m), None)
            return None
        x = self.inputs.pop((s, m))
        return unflatten(structure(self.carry(m)), x.wait()) if isinstance(x, Arrival) else x

    def hand_on(self, s: int, m: int, y: Any) -> None:
        """The output of a stage goes to the next one: on this rank, or by a send to come."""
        if s == self.table.stages - 1:
            return
        carries = self.pipe.carries(s)
        if carries:
            self.check_output(s, m, y)
        if self.table.placement[s + 1] == self.pipe.rank:
            self.inputs[s + 1, m] = y if carries else None
        else:
            self.put_out(SEND_F, s, m, leaves(y) if carries else [])

    def put_out(self, kind: str, s: int, m: int, tensors: list[Tensor]) -> None:
        assert self.messages is not None
        self.outputs[kind, s, m] = [t.contiguous() for t in tensors], self.messages.made()

    def check_output(self, s: int, m: int, y: Any) -> None:
        wanted = self.carry(m)
        same = structure(y) == structure(wanted)
        for t, w in zip(leaves(y), leaves(wanted), strict=True) if same else ():
            same = same and is_tensor(t) and t.shape == w.shape and t.dtype == w.dtype
        if not same:
            shown = [{p: (tuple(t.shape), t.dtype) for p, t in named(x).items()} for x in (y, wanted)]
            raise UserError(
                f"stage {s} of the pipeline gives {shown[0]}, but the model's embed gives {shown[1]}: blocks must map "
                "their carry to one of the same shapes and dtypes"
            )

    # --------------------------------------------------------------------------------------------------------- the end

    def agreed(self, own: Any) -> Any:
        """A tree of numbers and tensors of the rank with the head, on all ranks."""
        group, cache = self.pipe.group, self.pipe._cache
        if group is None:
            return own
        here = self.last_rank == self.pipe.rank
        shapes = [(tuple(t.shape), t.dtype) if is_tensor(t) else t for t in leaves(self.batch)]
        key = ("agreed", type(self), structure(self.batch), repr(shapes))
        form = tree_map(_form_of, own) if here else None
        source = dist.get_global_rank(group, self.last_rank)
        if key not in cache:
            box = [form]
            dist.broadcast_object_list(box, source, group=group)
            cache[key] = box[0]
        elif here and (structure(cache[key]), leaves(cache[key])) != (structure(form), leaves(form)):
            raise RuntimeError("the statistics of the loss changed their structure or shapes from step to step")
        forms, shape = flatten(cache[key])
        sizes = [form.numel for form in forms]
        options: dict[str, Any] = {"dtype": torch.float64, "device": self.pipe.mesh.device}
        values = torch.empty(sum(sizes), **options)
        if here:
            numbers = [torch.as_tensor(t, **options).reshape(-1) for t, n in zip(leaves(own), sizes, strict=True) if n]
            values = torch.cat(numbers) if numbers else values
        if sum(sizes):
            dist.broadcast(values, source, group=group)
        if here:
            return own
        return unflatten(shape, [f.of(x) for f, x in zip(forms, values.split(sizes), strict=True)])


class _Training(_Run):
    """A step: forwards, backwards, and gradients accumulated on the way."""

    def __init__(
        self, pipe: Pipeline, alarm: Alarm, params: Any, batch: Any, ctx: Ctx, loss_scale: float | None
    ) -> None:
        self.late = ctx.sh.mesh is not None
        self.outer = ctx.sh
        ctx = ctx.replace(sh=ctx.sh.delaying()) if self.late else ctx
        super().__init__(pipe, alarm, pipe.table, params, batch, ctx)
        self.loss_scale, self.spec = loss_scale, pipe.spec
        self.wanted = trainable_leaves(params, pipe.trainable_here())
        self.wide = pipe.dtype or self.sh.precision.reduce_dtype
        self.grads: list[Any] = [None] * len(self.wanted)
        number = like(self.params, range(len(self.wanted)))
        trainable = like(self.params, self.wanted)
        picked = {s: (pipe.assignment[s], pipe.ends) for s in self.mine}
        self.numbers = {s: stage_entries(number, *p) for s, p in picked.items()}
        self.trainable = {s: stage_entries(trainable, *p) for s, p in picked.items()}
        shared = pipe.ends.tied if len(pipe.owners) > 1 else ()
        self.shared = {
            i for n in shared if n in number for i in leaves(number[n]) if self.wanted[i]
        }  # leaves that another rank holds too
        self.residuals: dict[tuple[int, int], Any] = {}
        self.left: dict[tuple[int, int], Any] = {}
        self.joint = {(a.stage, a.microbatch) for p in self.table.programs for a in p if a.kind == BACKWARD}
        # Gradients are summed over data axes once, each in the last backward of its stage as soon as it is there; with
        # ZeRO-2, which never holds them whole, in each backward.
        self.each = self.late and self.sh.rules.zero == 2
        self.reducer = (
            Reducer(self.spec, self.wanted, self.sh, self.take, wait=False) if self.late and not self.each else None
        )
        self.last = {a.stage: a for a in self.table.programs[pipe.rank] if a.kind in (BACKWARD, WEIGHT)}
        # in how many parts of this rank's stages a leaf is whose last gradient is to come: a tied one may be in two
        parts = [] if self.each else [part for s in self.mine for part in stage_parts(number, *picked[s])]
        self.owed = Counter(i for part in parts for i in leaves(part))
        self.reduced: set[int] = set()  # leaves whose sums have begun
        self.under_way: Callable[[], None] | None = None  # of ZeRO-2: adds the gradients whose sums have begun

    def run(self) -> tuple[tuple[Tensor, dict[str, Any]], Any]:
        with self.outer.others_refused() if self.late else contextlib.nullcontext():
            self.act(self.compute)
        here = self.last_rank == self.pipe.rank
        found = self.sums.finish(self.scale, self.known) if here else None
        self.settle()
        self.share_tied()
        for s in self.mine:
            self.begin(leaves(self.numbers[s]), tied=True)
        if self.reducer is not None:
            self.reducer.finish()
        total, metrics, factor = self.agreed(found)
        grads: list[Any] = self.grads
        if factor is not None:
            grads = [None if g is None else g.mul_(as_factor(factor, g)) for g in grads]
        if self.loss_scale is not None:
            grads = [unscaled(g, self.loss_scale, in_place=True) for g in grads]
        if self.late and splits_state(self.spec, self.sh):
            return (total, metrics), like_state(grads, self.at_rest, self.spec, self.sh)
        return (total, metrics), as_at_rest(grads, self.at_rest)

    def compute(self, action: Action) -> None:
        kind, s, m, _ = action
        if kind == REDUCE:
            self.reduce(s)
        else:
            assert m is not None
            {FORWARD: self.forward, BACKWARD: self.backward, INPUT: self.backward_input, WEIGHT: self.backward_weight}[
                kind
            ](s, m)

    def forward(self, s: int, m: int) -> None:
        halves = split(self.pipe.stage(s))
        x, joint = self.take_input(s, m), (s, m) in self.joint
        within = self.within(m, self.loss_scale)
        y, self.residuals[s, m] = halves.forward(self.mine[s], x, within, joint, self.trainable[s])
        if s == self.pipe.last:
            value, aux = y
            self.sums.add(aux, m)
            flat = [None] * len(leaves(y))
            self.gradients[s, m] = like(y, [torch.ones_like(value), *flat[1:]])
            y = None
        self.note(FORWARD, s, m)
        self.hand_on(s, m, y)

    def backward(self, s: int, m: int) -> None:
        halves, giving = split(self.pipe.stage(s)), self.giving(BACKWARD, s, m)
        gx, _ = halves.backward(self.residuals.pop((s, m)), self.take_gradient(s, m), self.mine[s], giving)
        self.note(BACKWARD, s, m)
        self.hand_back(s, m, gx)

    def backward_input(self, s: int, m: int) -> None:
        halves = split(self.pipe.stage(s))
        gx, self.left[s, m] = halves.backward_input(self.residuals.pop((s, m)), self.take_gradient(s, m), self.mine[s])
        self.note(INPUT, s, m)
        self.hand_back(s, m, gx)

    def backward_weight(self, s: int, m: int) -> None:
        split(self.pipe.stage(s)).backward_weight(self.left.pop((s, m)), self.giving(WEIGHT, s, m))
        self.note(WEIGHT, s, m)

    def take_gradient(self, s: int, m: int) -> Any:
        """The gradient of a stage's output."""
        if s == self.pipe.last:
            return self.gradients.pop((s, m))
        if not self.pipe.carries(s):
            self.gradients.pop((s, m), None)
            return None
        g = self.gradients.pop((s, m))
        if not isinstance(g, Arrival):
            return g
        arrived = iter(g.wait())
        carry = self.carry(m)
        return like(carry, [next(arrived) if is_float(t) else None for t in leaves(carry)])

    def hand_back(self, s: int, m: int, gx: Any) -> None:
        """The gradient of a stage's input goes to the stage before: on this rank, or by a send to come."""
        if s == 0:
            return
        carries = self.pipe.carries(s - 1)
        if self.table.placement[s - 1] == self.pipe.rank:
            if s - 1 != self.pipe.last:
                self.gradients[s - 1, m] = gx if carries else None
            return
        tensors = []
        if carries:
            device = self.pipe.mesh.device
            for g, t in zip(leaves(gx), leaves(self.carry(m)), strict=True):
                if is_float(t):
                    tensors.append(torch.zeros(t.shape, dtype=t.dtype, device=device) if g is None else g.to(t.dtype))
        self.put_out(SEND_B, s, m, tensors)

    # ---------------------------------------------------------------------------------------------------- gradients

    def giving(self, kind: str, s: int, m: int) -> Giving:
        """How the gradients of a backward go on, part by part: into the sums so far, and in the last one, with these, over
        data axes, while the backward of the next part runs."""
        last = self.last[s][:3] == (kind, s, m)

        def take(numbers: Any, own: Any) -> None:
            rows = leaves(numbers)
            found = [(i, g) for i, g in zip(rows, leaves(own), strict=True) if g is not None]
            if self.each:
                self.begin_each(found)
                return
            self.add(found)
            if last:
                self.owed.subtract(rows)
                self.begin(rows)

        return Giving(self.numbers[s], take)

    def add(self, found: list[tuple[int, Tensor]]) -> None:
        """Adds gradients of a microbatch, by the numbers of their leaves."""
        for i, g in found:
            if self.grads[i] is None:  # a copy: the gradient of an addition may be two gradients, or a message as well
                self.grads[i] = g.to(torch.promote_types(g.dtype, self.wide), copy=True)
            else:
                self.grads[i].add_(g)

    def begin_each(self, found: list[tuple[int, Tensor]]) -> None:
        """Begins to sum gradients of a microbatch over data axes, and adds those of the part before."""
        self.settle()
        params = leaves(self.spec)
        wide = [g.to(torch.promote_types(g.dtype, self.wide)) for _, g in found]
        arrive = moving(wide, [params[i] for i, _ in found], self.sh, "settle")
        rows = [i for i, _ in found]
        self.under_way = lambda: self.add(list(zip(rows, arrive(), strict=True)))

    def settle(self) -> None:
        """Waits for the sums that `begin_each` has begun."""
        if self.under_way is not None:
            arrive, self.under_way = self.under_way, None
            arrive()

    def begin(self, rows: Sequence[int], tied: bool = False) -> None:
        """Begins to sum over data axes those of some leaves that are owed no gradient. Leaves that another rank holds too
        come last (tied)."""
        for i in rows:
            if not self.wanted[i] or i in self.reduced or self.owed[i] or (i in self.shared and not tied):
                continue
            self.reduced.add(i)
            g = self.gradient(i)
            if self.reducer is not None:
                self.grads[i] = None
                self.reducer.add(i, g)
            else:
                self.grads[i] = g

    def take(self, i: int, g: Any) -> None:
        self.grads[i] = g

    def reduce(self, s: int) -> None:
        """The last backward of a stage has been: its gradients are on their way, or there, but for tied ones."""
        self.note(REDUCE, s)
        self.settle()
        self.begin(leaves(self.numbers[s]))

    def gradient(self, i: int) -> Tensor:
        """What has been accumulated; zeros for a leaf that the loss does not use."""
        if self.grads[i] is not None:
            return self.grads[i]
        leaf = leaves(self.params)[i]
        dtype = torch.promote_types(leaf.dtype, self.wide)
        shape = self.sh.stored_shape(leaves(self.spec)[i], "optimizer") if self.each else leaf.shape
        return torch.zeros(shape, dtype=dtype, device=leaf.device)

    def share_tied(self) -> None:
        """Sums the gradients of tied leaves over the two ranks that hold them: the same sum on both."""
        if not self.shared:
            return
        assert self.messages is not None
        rows = sorted(self.shared)
        (peer,) = (r for r in self.pipe.owners if r != self.pipe.rank)
        own = [self.gradient(i).contiguous() for i in rows]
        there = self.messages.empty([(tuple(g.shape), g.dtype) for g in own])
        after = self.messages.made()
        _, arrival = self.messages.exchange([(peer, own, True, after), (peer, there, False, None)])
        assert arrival is not None
        others = arrival.wait()
        self.messages.finish()
        for i, g, other in zip(rows, own, others, strict=True):
            self.grads[i] = g + other


class _Forwards(_Run):
    """An evaluation."""

    def __init__(self, pipe: Pipeline, alarm: Alarm, params: Any, batch: Any, ctx: Ctx, microbatches: int) -> None:
        rows = row_count(to_local(batch)) or 0
        if rows < 1:
            raise UserError("a pipeline needs a batch of at least one row on every rank")
        table = pipe.forwards(min(microbatches, rows))
        super().__init__(pipe, alarm, table, params, batch, ctx)

    def run(self) -> dict[str, Any]:
        self.act(self.compute)
        here = self.last_rank == self.pipe.rank
        return self.agreed(self.sums.finish(self.scale, self.known)[1] if here else None)

    def compute(self, action: Action) -> None:
        kind, s, m, _ = action
        assert kind == FORWARD and m is not None
        y = self.pipe.stage(s)(self.mine[s], self.take_input(s, m), self.within(m))
        if s == self.pipe.last:
            self.sums.add(y[1], m)
            y = None
        self.note(FORWARD, s, m)
        self.hand_on(s, m, y)


# ------------------------------------------------------------------------------------------------ what goes to all ranks


@dataclass(frozen=True)
class _Form:
    """What a leaf is without its value: a tensor's shape and dtype, or a number's type. Another leaf is kept whole."""

    shape: tuple[int, ...] = ()
    kind: Any = None
    whole: Any = None

    @property
    def numel(self) -> int:
        return 0 if self.kind is None else math.prod(self.shape)

    def of(self, x: Tensor) -> Any:
        """The leaf with these values, float64[numel]."""
        if self.kind is None:
            return self.whole
        return self.kind(x.item()) if isinstance(self.kind, type) else x.view(self.shape).to(self.kind)


def _form_of(t: Any) -> _Form:
    if is_tensor(t):
        return _Form(tuple(t.shape), t.dtype)
    if isinstance(t, int | float) and not isinstance(t, bool):
        return _Form((), type(t))
    return _Form(whole=t)
