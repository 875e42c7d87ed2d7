"""Which layouts to check: few that together have every pair of option values, then more at random. By seed alone."""

from __future__ import annotations

import functools
import itertools
import random as python_random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fmegatron.testing.layout import MASKS, PIPELINE, Layout
from fmegatron.testing.strategies import (
    AXES,
    PIPELINE_AXES,
    contexts,
    dispatches,
    foldings,
    meshes,
    overlaps,
    own_rules,
    pipelines,
    remats,
    stores,
)

Pair = tuple[tuple[str, Any], tuple[str, Any]]
TRIES = 80  # candidates among which the one with most new pairs for its cost is taken
MICROBATCHES = (1, 2)
ORDERS = ("usual", "other")
COUNTING = tuple(m for m in MASKS if m != "none")  # a batch of zeros shows nothing of the other options


@dataclass(frozen=True)
class Case:
    """A model, by the text that `find_model` reads, and a layout."""

    model: str
    layout: Layout

    @property
    def command(self) -> str:
        """What to type to check it again."""
        return f'fmegatron verify {self.model} --layout "{self.layout}"'


@dataclass(frozen=True)
class Space:
    """All legal cases: the meshes of each model, and options that go with any of them."""

    meshes: Mapping[str, Sequence[str]]
    axes: Sequence[str]
    kv_heads: Mapping[str, int]
    remats: Sequence[str]
    contexts: Mapping[tuple[str, str], Sequence[str]]
    pipelines: Mapping[tuple[str, str], Sequence[tuple[str, int | None, str]]]
    odd: Sequence[bool] = (False, True)
    dispatches: Sequence[str] = (Layout().dispatch,)
    experts: bool = False
    overlap: bool = False

    def foldings(self, model: str, mesh: str, context: str) -> Sequence[tuple[int, int]]:
        """(ep, etp) of a model on a mesh, its axes in any order."""
        return _foldings(model, mesh, context) if self.experts else ((1, 1),)

    def draw(self, random: python_random.Random) -> Case:
        model = random.choice(list(self.meshes))
        mesh = random.choice(self.meshes[model])
        sizes = Layout(mesh).axes
        ways, pipes = self.contexts[model, mesh], self.pipelines[model, mesh]
        order = list(sizes)
        random.shuffle(order)
        mesh = ",".join(f"{a}={sizes[a]}" for a in order)
        zero, store, state = random.choice(stores(mesh))
        # without a pipeline nothing is drawn for it, so that the draws behind are those of an earlier version
        schedule, virtual, stages = random.choice(pipes) if len(pipes) > 1 else pipes[0]
        layout = Layout(
            mesh,
            sp="tp" in sizes and random.random() < 0.5,
            zero=zero,
            store=store,
            state=state,
            context=random.choice(ways),
            micro=random.choice(MICROBATCHES),
            schedule=schedule,
            virtual=virtual,
            stages=stages,
            remat=random.choice(self.remats),
            packed=random.random() < 0.5,
            mask=random.choice(COUNTING),
            odd=random.choice(self.odd),
        )
        if self.experts:
            ep, etp = random.choice(self.foldings(model, mesh, layout.context))
            layout = replace(layout, ep=ep, etp=etp, dispatch=random.choice(self.dispatches))
        if (
            self.overlap and "tp" in sizes
        ):  # by what else it is, so that no other draw moves, and no pair is counted of it
            by_layout = python_random.Random(f"overlap {layout}")
            layout = replace(layout, overlap=by_layout.choice(overlaps(_program(model), mesh)))
        return Case(model, layout)

    def features(self, case: Case) -> dict[str, Any]:
        """{option: its value} as pairs are counted: axes as absent or not, tp by whether it exceeds the kv heads."""
        layout = case.layout
        found: dict[str, Any] = {a: layout.size(a) > 1 for a in self.axes}
        if "tp" in found:
            found["tp"] = tp_kind(layout.size("tp"), self.kv_heads.get(case.model, 1))
        held = layout.store_axes
        found |= {
            "order": order_of(layout),
            "sp": layout.sp,
            "zero": layout.zero,
            "hybrid": layout.store and ("state on the rest" if layout.state else "yes"),
            "store cp": "cp" in held,
            "context": layout.context if "cp" in layout.axes else "",
            "micro": layout.micro,
            "remat": layout.remat,
            "packed": layout.packed,
            "mask": layout.mask,
            "odd": layout.odd,
        }
        if PIPELINE in self.axes:
            found["schedule"] = layout.schedule if layout.pipelined else ""
            found["stages"] = (layout.virtual, bool(layout.stages))
        if self.experts:
            found |= {"ep": layout.ep > 1, "etp": layout.etp > 1, "dispatch": layout.dispatch}
        return found | options_of(case.model)

    def pairs(self) -> set[Pair]:
        """Every pair of values that some legal case has."""
        free: dict[str, Sequence[Any]] = {
            "micro": MICROBATCHES,
            "remat": self.remats,
            "mask": COUNTING,
            "odd": self.odd,
        }
        if self.experts:
            free["dispatch"] = self.dispatches
        found, seen = set[Pair](), set[Any]()
        for (a, xs), (b, ys) in itertools.combinations(free.items(), 2):
            found |= {pair((a, x), (b, y)) for x in xs for y in ys}
        for case in self._structures():
            fixed = {n: v for n, v in self.features(case).items() if n not in free}
            if (key := tuple(fixed.items())) in seen:
                continue
            seen.add(key)
            # `_structures` has a mesh's axes in the usual order alone
            for order in ORDERS if len(case.layout.axes) > 1 else ORDERS[:1]:
                fixed["order"] = order
                found |= pairs_of(fixed)
                found |= {pair(one, (n, v)) for one in fixed.items() for n, values in free.items() for v in values}
        return found

    def _structures(self) -> Iterator[Case]:
        """All legal cases, but for the options that go with any."""
        for model, legal in self.meshes.items():
            for mesh in legal:
                sps = (False, True) if "tp" in Layout(mesh).axes else (False,)
                ways = self.contexts[model, mesh]
                every = itertools.product(stores(mesh), ways, sps, (False, True), self.pipelines[model, mesh])
                for (zero, store, state), way, sp, packed, (schedule, virtual, stages) in every:
                    made = Layout(mesh, sp=sp, zero=zero, store=store, state=state, context=way, packed=packed)
                    if made.pipelined:
                        made = replace(made, schedule=schedule, virtual=virtual, stages=stages)
                    for ep, etp in self.foldings(model, mesh, way):
                        yield Case(model, replace(made, ep=ep, etp=etp) if ep * etp > 1 else made)

    def cases(self, examples: int, seed: int) -> Iterator[Case]:
        """Cases with distinct layouts: at least `examples`, and more until every pair of values is there; behind them
        some with rules of their own, and some of which no token counts."""
        random, left, made, layouts = python_random.Random(seed), self.pairs(), 0, set[str]()
        idle = 0
        while (made < examples or left) and idle < 50:
            some = [self.draw(random) for _ in range(TRIES if left else 1)]
            case = max(some, key=lambda c: len(pairs_of(self.features(c)) & left) / cost(c.layout))
            new = pairs_of(self.features(case)) & left
            if str(case.layout) in layouts or (left and not new and made >= examples):
                idle += 1
                continue
            if self.experts and _program(case.model).why_illegal(case.layout) is not None:
                idle += 1
                continue
            idle = 0
            left -= new
            layouts.add(str(case.layout))
            made += 1
            yield case
        yield from self._further(made // 6, python_random.Random(f"further {seed}"), layouts)

    def _further(self, number: int, random: python_random.Random, layouts: set[str]) -> Iterator[Case]:
        """So many cases of what no pair is counted of."""
        from fmegatron.testing.models import find_model
        from fmegatron.testing.program import program_of

        made = 0
        for _ in range(20 * number):
            if made == number:
                return
            case = self.draw(random)
            program = program_of(find_model(case.model))
            if made % 3 == 2:
                layout = replace(case.layout, mask="none")
            elif rules := own_rules(program, case.layout.mesh):
                layout = replace(case.layout, rules=random.choice(rules))
            else:
                continue
            if str(layout) in layouts or case.layout.pipelined or program.why_illegal(layout) is not None:
                continue
            layouts.add(str(layout))
            made += 1
            yield Case(case.model, layout)


def space(models: Sequence[str], world: int, *, axes: Sequence[str] = AXES) -> Space:
    """The legal cases of some models, as `find_model` reads them, with at most `world` ranks."""
    from fmegatron.testing.models import find_model
    from fmegatron.testing.program import program_of

    found, kv_heads, by_shape = {}, {}, dict[Any, list[str]]()
    ways: dict[tuple[str, str], tuple[str, ...]] = {}
    ways_by_shape: dict[Any, tuple[str, ...]] = {}
    pipes: dict[tuple[str, str], list[tuple[str, int | None, str]]] = {}
    policies: tuple[str, ...] = ("everything",)
    for text in models:
        program = program_of(find_model(text))
        policies = remats(program)
        shape = tuple(sorted(program.sizes.items()))
        if shape not in by_shape:
            by_shape[shape] = meshes(program, world, axes=axes)
        found[text], kv_heads[text] = by_shape[shape], program.sizes.get("kv", world)
        for mesh in by_shape[shape]:
            if (shape, mesh) not in ways_by_shape:
                ways_by_shape[shape, mesh] = contexts(program, mesh)
            ways[text, mesh] = ways_by_shape[shape, mesh]
            pipes[text, mesh] = pipelines(program, mesh)
    used = [a for a in axes if any(a in Layout(m).axes for legal in found.values() for m in legal)]
    first = program_of(find_model(models[0]))
    odd = (False, True) if first.fills_up else (False,)
    return Space(
        found, used, kv_heads, policies, ways, pipes, odd, dispatches(first), first.has_experts, first.has_overlap
    )


@functools.cache
def _program(model: str) -> Any:
    from fmegatron.testing.models import find_model
    from fmegatron.testing.program import program_of

    return program_of(find_model(model))


@functools.cache
def _foldings(model: str, mesh: str, context: str) -> Sequence[tuple[int, int]]:
    return foldings(_program(model), mesh, context)


def cost(layout: Layout) -> float:
    """Roughly how long a layout takes, in units of one device."""
    again = 1.3 if layout.remat != "everything" else 1.0
    return 2.0 + layout.world * layout.micro * again


def order_of(layout: Layout) -> str:
    """Whether the ranks' order is the usual one of a mesh's axes, that of `PIPELINE_AXES`."""
    axes = [*layout.axes]
    return ORDERS[axes != sorted(axes, key=PIPELINE_AXES.index)]


def tp_kind(tp: int, kv_heads: int) -> str:
    """How tp lies on the kv heads: absent, dividing them, or with some replicated."""
    return "no" if tp == 1 else "kv" if kv_heads % tp == 0 else "group"


def options_of(model: str) -> dict[str, str]:
    """The options in a model's text."""
    parts = [c.partition("=") for c in model.split(",")[1:]]
    found = {"tied": "0", "dropout": "0", "vocab": "even", "heads": "default"}
    return {**found, **{n: v for n, _, v in parts if n in found}} if ":" not in model else {}


def pair(a: tuple[str, Any], b: tuple[str, Any]) -> Pair:
    return (a, b) if a[0] < b[0] else (b, a)


def pairs_of(features: Mapping[str, Any]) -> set[Pair]:
    """All pairs of values of one case."""
    return set(itertools.combinations(sorted(features.items(), key=lambda x: x[0]), 2))
