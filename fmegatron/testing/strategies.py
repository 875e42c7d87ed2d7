"""Hypothesis strategies: layouts that are legal for a model, small configs of a family, batches.

All of them shrink towards what asks for least: few ranks, plain options, the smallest model.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from fmegatron.errors import UserError
from fmegatron.models import DecoderConfig
from fmegatron.parallel.dispatch import BACKENDS
from fmegatron.parallel.schedules import SCHEDULES
from fmegatron.parallel.stages import format_layout, uneven
from fmegatron.rules import CONTEXTS
from fmegatron.testing.batches import make_batch
from fmegatron.testing.layout import DATA, MASKS, PIPELINE, STORES, Layout
from fmegatron.testing.models import LEGAL_VOCAB, ODD_VOCAB, SHAPES, small_config
from fmegatron.testing.program import program_of

AXES = ("dp", "fsdp", "cp", "tp")
PIPELINE_AXES = (PIPELINE, *AXES)
MICROBATCHES = (1, 2, 3)
REMAT = ("everything", "attention", "nothing")


def meshes(model: Any, world_size: int, *, axes: Sequence[str] = AXES) -> list[str]:
    """The meshes of at most `world_size` ranks that are legal for a model, the smallest first. Axes of size one are
    left out."""
    program, found = program_of(model), []
    sizes = [range(1, world_size + 1)] * len(axes)
    for chosen in itertools.product(*sizes):
        if math.prod(chosen) <= world_size:
            text = ",".join(f"{a}={n}" for a, n in zip(axes, chosen, strict=True) if n > 1) or "dp=1"
            if program.why_illegal(Layout(text)) is None:
                found.append((math.prod(chosen), sum(n > 1 for n in chosen), text))
    return [text for *_, text in sorted(found)]


def stores(mesh: str) -> list[tuple[int, str, str]]:
    """(zero, store, state) that a mesh allows, the plainest first: nothing, each stage over all axes that can hold
    trees at rest, over some of them, and with the optimizer's state on the others too."""
    usable = [a for a in Layout(mesh).axes if a in STORES]
    if Layout(mesh).size(*usable) == 1:
        return [(0, "", "")]
    some = [c for n in range(1, len(usable)) for c in itertools.combinations(usable, n)]
    found = [(0, "", ""), *((zero, "", "") for zero in (3, 2, 1))]
    for held in some:
        rest = "+".join(a for a in usable if a not in held)
        found += [(zero, "+".join(held), "") for zero in (3, 2, 1)]
        found.append((3, "+".join(held), rest))
    return found


def contexts(model: Any, mesh: str) -> tuple[str, ...]:
    """How attention may read the sequence on a mesh: one way where nothing cuts it or there are no heads."""
    program = program_of(model)
    if Layout(mesh).size("cp") == 1 or "kv" not in program.sizes:
        return CONTEXTS[:1]
    return tuple(c for c in CONTEXTS if program.why_illegal(Layout(mesh, context=c)) is None)


def remats(model: Any) -> tuple[str, ...]:
    """The remat policies that can be given to a model."""
    return REMAT if program_of(model).has_remat else REMAT[:1]


def pipelines(model: Any, mesh: str) -> list[tuple[str, int | None, str]]:
    """(schedule, virtual, stages) of a mesh with pp, the plainest first: each schedule with layers spread evenly, those
    of several stages a rank with three too, 1F1B with all layers but one on the last stage, and interleaved with empty stages
    in the middle; one plain way without."""
    layout = Layout(mesh)
    if not layout.pipelined:
        return [("1f1b", None, "")]
    found: list[tuple[str, int | None, str]] = [("1f1b", None, "")]
    found += [(name, None, "") for name in SCHEDULES if name != "1f1b"]
    found += [("interleaved", 3, ""), ("bfs", 3, "")]
    layers, count = len(program_of(model).spec()["layers"]), layout.size(PIPELINE)
    if count > 1:
        uneven_ = uneven(layers, count, last=layers - 1 if count == 2 else layers)
        found.append(("1f1b", None, format_layout(uneven_)))
        found.append(("interleaved", None, f"E{'t' * (layers - 1)}{'|' * (2 * count - 1)}tL"))
    return found


def foldings(model: Any, mesh: str, context: str = "gather") -> list[tuple[int, int]]:
    """(ep, etp) that are legal for a model's experts on a mesh, the plainest first; (1, 1) alone without experts."""
    program, layout = program_of(model), Layout(mesh)
    if not program.has_experts:
        return [(1, 1)]
    stage = layout.inside.world
    every = ((ep, etp) for ep in range(1, stage + 1) for etp in range(1, stage + 1) if stage % (ep * etp) == 0)
    found = [
        (ep, etp)
        for ep, etp in every
        if program.why_illegal(Layout(mesh, ep=ep, etp=etp, context=context)) is None or ep == etp == 1
    ]
    return sorted(found, key=lambda pair: (math.prod(pair), pair[1]))


def dispatches(model: Any) -> tuple[str, ...]:
    """The ways by which a model's tokens may reach its experts, the default first."""
    others = tuple(b for b in BACKENDS if b != Layout().dispatch)
    return (Layout().dispatch, *(others if program_of(model).has_dispatch else ()))


def overlaps(model: Any, mesh: str) -> tuple[int, ...]:
    """Into how many chunks a model's products may be cut on a mesh, the default first."""
    return (0, 2) if "tp" in Layout(mesh).axes and program_of(model).has_overlap else (0,)


def own_rules(model: Any, mesh: str) -> list[str]:
    """Rules of one's own that are legal for a model on a mesh, the plainest first (`Layout.rules`): what lies on tp left
    whole, or on a part of it, or on further axes; the batch on fewer data axes, in another order, or on tp and cp too."""
    program, layout = program_of(model), Layout(mesh)
    data, heads = [a for a in layout.axes if a in DATA], "kv:none,group:none"

    def batch(*axes: str) -> str:
        return f"batch:{'+'.join(axes) or 'none'}"

    found = []
    if "tp" in layout.axes:
        found += ["mlp:none", "vocab:none", heads, "mlp:none,vocab:none", "mlp:tp_group,vocab:tp_kv"]
        found += [",".join([batch(*data, "tp"), heads, "mlp:none,vocab:none"])]
    for axis in data:
        rest = [a for a in data if a != axis]
        wide = "tp+" + axis if "tp" in layout.axes else axis
        found += [batch(*rest), f"{batch(*rest)},mlp:{wide}", f"{batch(*rest)},vocab:{wide}"]
    if len(data) > 1:
        found.append(batch(*reversed(data)))
    if "cp" in layout.axes:
        wide = "tp+cp" if "tp" in layout.axes else "cp"
        found += ["seq:none", f"seq:none,{batch(*data, 'cp')}", f"seq:none,mlp:{wide}"]
    return [rules for rules in found if program.why_illegal(Layout(mesh, rules=rules)) is None]


def layouts(
    model: Any,
    world_size: int = 8,
    *,
    axes: Sequence[str] | None = None,
    masks: Sequence[str] = MASKS,
    engine: str = "simulated",
) -> st.SearchStrategy[Layout]:
    """Legal layouts of at most `world_size` ranks for a model (or a `Program`).

    axes: the mesh axes to draw from; leave out those that the model cannot use, such as cp for attention of its own
        that does not gather keys. None: dp, fsdp, cp and tp, and with the engine "processes" pp too, if the model has
        the parts that a pipeline needs. masks: of the batch. engine: which one will run them.
    """
    program = program_of(model)
    if axes is None:
        axes = PIPELINE_AXES if engine == "processes" and program.has_stages else AXES
    elif PIPELINE in axes and engine != "processes":
        raise UserError(f"axes={tuple(axes)}: only the engine processes runs pipelines: give engine='processes'")
    ways = functools.cache(lambda mesh: contexts(program, mesh))
    rows = functools.cache(lambda mesh: own_rules(program, mesh))
    folded = functools.cache(lambda mesh, context: foldings(program, mesh, context))

    # As many numbers are drawn for every layout, whatever those before: a smaller one in the place of any is a layout too,
    # so that each option shrinks by itself.
    @st.composite
    def drawn(draw: st.DrawFn) -> Layout:
        def one_of(options: Sequence[Any]) -> Any:
            return options[draw(st.integers(0, 63)) % len(options)]

        left = known
        turns = list(
            reversed(axes)
        )  # the first has most ranks to take: beside a pipeline each one comes first at times
        for axis in draw(st.permutations(turns)) if PIPELINE in axes else turns:
            most = draw(st.integers(1, world_size))
            n = max(size for size in {sizes.get(axis, 1) for sizes in left} if size <= most)
            left = [sizes for sizes in left if sizes.get(axis, 1) == n]
        (sizes,) = left
        mesh = ",".join(f"{a}={n}" for a, n in sizes.items())
        order = [a for a in draw(st.permutations(list(axes))) if a in sizes]
        zero, store, state = one_of(stores(mesh))
        schedule, virtual, stages = one_of(pipelines(program, mesh)) if PIPELINE in axes else ("1f1b", None, "")
        sp, context, packed, odd = draw(st.booleans()), one_of(ways(mesh)), draw(st.booleans()), draw(st.booleans())
        rules = one_of(rows(mesh) or [""]) if draw(st.booleans()) else ""
        if rules and zero and "tp" in sizes and draw(st.booleans()):
            store = "+".join([*(store.split("+") if store else Layout(mesh, zero=zero).store_axes), "tp"])
        mesh = ",".join(f"{a}={sizes[a]}" for a in order) or mesh
        # nothing is drawn where there are no experts
        ep, etp = one_of(folded(mesh, context)) if program.has_experts else (1, 1)
        dispatch = one_of(dispatches(program)) if program.has_dispatch else Layout().dispatch
        overlap = one_of(overlaps(program, mesh))
        return Layout(
            mesh,
            ep=ep,
            etp=etp,
            dispatch=dispatch,
            overlap=overlap,
            rules=rules,
            sp=sp and "tp" in sizes,
            zero=zero,
            store=store,
            state=state,
            micro=draw(st.sampled_from(MICROBATCHES)),
            schedule=schedule,
            virtual=virtual,
            stages=stages,
            remat=draw(st.sampled_from(remats(program))),
            context=context,
            packed=packed,
            mask=draw(st.sampled_from(list(masks))),
            odd=odd and program.fills_up,
        )

    known = [Layout(mesh).axes for mesh in meshes(program, world_size, axes=axes)]
    return drawn().filter(lambda layout: program.why_illegal(layout) is None)


@st.composite
def configs(draw: st.DrawFn, family: str = "llama") -> DecoderConfig:
    """A small config of a family or preset: 3 kv heads or few, one or two layers, vocab 101 or one that divides over
    ranks, tied or not, dropout or not."""
    base = small_config(family)
    heads, kv_heads = draw(st.sampled_from(SHAPES + ((3, 3), (4, 1))))
    return small_config(
        family,
        heads=heads,
        kv_heads=heads if base.kv_heads == base.heads else kv_heads,
        layers=draw(st.sampled_from((1, 2, 3))),
        vocab=draw(st.sampled_from((LEGAL_VOCAB, ODD_VOCAB))),
        tied=draw(st.booleans()),
        dropout=draw(st.sampled_from((0.0, 0.2))),
    )


@st.composite
def batches(draw: st.DrawFn, vocab: int, *, rows: int = 4, seq: int = 8) -> dict[str, Any]:
    """A global batch: uneven masks, a row or all of them without a token that counts, rows that end early, packed
    documents."""
    return make_batch(
        vocab,
        rows,
        seq,
        mask=draw(st.sampled_from(MASKS)),
        packed=draw(st.booleans()),
        empty=draw(st.integers(1, max(1, rows - 1))),
        seed=draw(st.integers(0, 2**16)),
    )


__all__ = [
    "batches",
    "configs",
    "contexts",
    "dispatches",
    "foldings",
    "layouts",
    "meshes",
    "overlaps",
    "own_rules",
    "pipelines",
    "remats",
    "stores",
]
