"""What a stage of a pipeline holds and computes: its parameters' spec, its sharding, and its function with a `split`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.parallel.stack import chain, stack
from fmegatron.parallel.stages import Stage
from fmegatron.rules import base
from fmegatron.sharding import Sharding
from fmegatron.spec import Param, params_of
from fmegatron.split import split
from fmegatron.tree import is_tensor, leaves, like, named, tree_map


@dataclass(frozen=True)
class Ends:
    """The entries of a model's parameters that are read before the layers, and those that are read behind them.

    What is in both is tied: it lies on the first and on the last stage.
    """

    front: tuple[str, ...]
    back: tuple[str, ...]

    @property
    def tied(self) -> tuple[str, ...]:
        return tuple(n for n in self.front if n in self.back)


class _Seen(dict):
    """Parameters that remember which of them were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.seen: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.seen.append(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default


def find_ends(model: Any, batch: Any = None) -> Ends:
    """Which entries of `model.spec()` `model.embed` and `model.head` read, by a run of both without data.

    batch: a small batch of the model's; by default one of tokens and labels. Raises UserError where that does not run,
    and for entries that neither reads.
    """
    spec = model.spec()
    if batch is None:
        zeros = torch.zeros(1, 2, dtype=torch.int64)
        batch = {"tokens": zeros, "labels": zeros}
    entries = {n: v for n, v in spec.items() if n != "layers"}
    try:
        ctx = with_context(model, batch, Ctx())
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            values = tree_map(lambda p: torch.empty(p.shape, dtype=p.dtype or torch.float32), entries)
            front, back = _Seen(values), _Seen(values)
            model.head(back, model.embed(front, batch, ctx), batch, ctx)
    except Exception as error:
        raise UserError(
            "pipeline could not find which parameters the model's embed and head read "
            f"({type(error).__name__}: {error}): give ends=Ends(front=(…), back=(…)) with their names"
        ) from error
    ends = Ends(*(tuple(n for n in entries if n in read.seen) for read in (front, back)))
    _check_ends(ends, spec)
    return ends


def _check_ends(ends: Ends, spec: Mapping[str, Any]) -> None:
    for name in (*ends.front, *ends.back):
        if name not in spec or name == "layers":
            raise UserError(f"ends name {name!r}, but the model's parameters outside its layers have no such entry")
    if unread := [n for n in spec if n != "layers" and n not in (*ends.front, *ends.back)]:
        raise UserError(
            f"the parameters {unread[0]!r} are read neither before the layers nor behind them, so no stage would hold "
            "them: give ends=Ends(front=(…), back=(…)) that has them"
        )


def with_context(model: Any, batch: Any, ctx: Ctx) -> Ctx:
    """ctx with what the model's blocks read of a batch."""
    return model.context(batch, ctx) if hasattr(model, "context") else ctx


def stage_names(stage: Stage, ends: Ends) -> tuple[str, ...]:
    """The entries outside the layers that a stage holds."""
    front = ends.front if stage.embedding else ()
    return (*front, *(n for n in (ends.back if stage.head else ()) if n not in front))


def rank_entries(tree: Mapping[str, Any], stages: Sequence[Stage], ends: Ends) -> dict[str, Any]:
    """Of a tree like the whole model's parameters what some stages hold, in a tree of their rank."""
    layers = sorted({i for s in stages for i in s.layers})
    names = dict.fromkeys(n for s in stages for n in stage_names(s, ends))
    return {**{n: tree[n] for n in names}, "layers": {i: tree["layers"][i] for i in layers}}


def stage_entries(tree: Mapping[str, Any], stage: Stage, ends: Ends) -> dict[str, Any]:
    """Of a tree of a rank what one of its stages holds."""
    return rank_entries(tree, (stage,), ends)


def stage_parts(tree: Mapping[str, Any], stage: Stage, ends: Ends) -> list[dict[Any, Any]]:
    """Of a tree of a rank what each part of a stage's function reads, in turn: the embedding, the layers, the head."""
    front = [{n: tree[n] for n in ends.front}] if stage.embedding else []
    layers = [{i: tree["layers"][i] for i in stage.layers}] if len(stage.layers) else []
    back = [{n: tree[n] for n in ends.back}] if stage.head else []
    return [*front, *layers, *back]


def inside_stage(sh: Sharding, spec: Any, axis: str = "pp") -> Sharding:
    """The sharding of what one stage holds and computes: the mesh without `axis`, at this rank's place on it.

    sh: of the whole mesh. spec: of the whole model; its dims need not all occur in each stage.
    Raises UserError where a rule names the axis, since layers lie on it, and no dim.
    """
    if sh.mesh is None:
        return sh
    (atom,) = sh.mesh.expand(axis)
    rows = {**sh.rules.compute, "store": sh.rules.store, "store_optimizer": sh.rules.store_optimizer}
    for name, row in rows.items():
        if atom in sh.mesh.expand(row):
            raise UserError(f"rule {name}={row!r} names the axis {axis!r}, on which the layers lie: leave it out there")
    dims = {base(n) for p in params_of(spec).values() for n in (*p.names, *_over(p))}
    known = tuple(dict.fromkeys((*sh.rules.activations, *sorted(dims))))
    return dataclasses.replace(
        sh, mesh=sh.mesh.without(axis), rules=dataclasses.replace(sh.rules, activations=known), _plans={}
    )


def _over(param: Param) -> tuple[str, ...]:
    return tuple((param.over or "").split())


@dataclass(frozen=True)
class Within:
    """The context of a stage's parts: that of the blocks, the microbatch, and what becomes of the head's terms:
    value(terms, stats) -> (what to differentiate, sums)."""

    ctx: Ctx
    batch: Any
    value: Callable[[Any, Any], Any]

    def with_tape(self, tape: Any) -> Within:
        return dataclasses.replace(self, ctx=self.ctx.with_tape(tape))


def stage_function(model: Any, layers: Callable, stage: Stage, ends: Ends) -> Callable:
    """f(params, x, within) of a stage, with a `split`: x is the output of the stage before it, whatever it is for the
    stage with the embedding; the stage with the head gives (value, sums). layers: the model's `stack`."""

    def embed(p: Any, x: Any, within: Within) -> Any:
        return model.embed(p, within.batch, within.ctx)

    def head(p: Any, x: Any, within: Within) -> Any:
        return within.value(*model.head(p, x, within.batch, within.ctx))

    parts: list[tuple[Callable, Callable]] = []
    if stage.embedding:
        parts.append((lambda p: {n: p[n] for n in ends.front}, embed))
    if len(stage.layers):
        parts.append((lambda p: p["layers"], _of_blocks(layers)))
    if stage.head:
        parts.append((lambda p: {n: p[n] for n in ends.back}, head))
    return chain(*parts)


def _of_blocks(layers: Callable) -> Callable:
    """The layers as a part of a stage, whose context is that of the blocks."""
    s = split(layers, hidden=False)

    def f(p: Any, x: Any, within: Within) -> Any:
        return layers(p, x, within.ctx)

    def forward(p: Any, x: Any, within: Within, joint: bool = False, trainable: Any = None) -> tuple[Any, Any]:
        return s.forward(p, x, within.ctx, joint, trainable)

    f.split = s._replace(forward=forward)  # type: ignore[attr-defined]
    return f


def layers_of(model: Any, spec: Mapping[str, Any]) -> Callable:
    """The model's own `stack` of its layers, or one of its blocks."""
    own = getattr(model, "stack", None) or getattr(model, "_stack", None)
    return stack(model.block, spec["layers"]) if own is None else own


def carry_like(model: Any, spec: Mapping[str, Any], ends: Ends, batch: Any, ctx: Ctx) -> Any:
    """What goes from stage to stage for a microbatch, as a tree of tensors without data: that of `model.embed`, which
    blocks map to the same shapes. Found by a run of it without data, of this rank's sizes. ctx: `with_context`."""
    sh = ctx.sh
    if sh.mesh is not None:  # which is found by computing, and kept
        sh.mesh.position(tuple(sh.mesh.sizes))
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):

        def fake(t: Any) -> Any:
            return torch.empty(t.shape, dtype=t.dtype, device=t.device) if is_tensor(t) else t

        params = {
            n: tree_map(lambda p: torch.empty(sh.stored_shape(p), dtype=sh.param_dtype(p), device=sh.device), spec[n])
            for n in ends.front
        }
        batch, ctx = tree_map(fake, (batch, ctx))
        x = model.embed(params, batch, ctx)
    for path, t in named(x).items():
        if not is_tensor(t):
            raise UserError(
                f"the carry of a model in a pipeline must be a tree of tensors, but {path or 'it'!r} is a {type(t).__name__}"
            )
    return like(x, [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in leaves(x)])
