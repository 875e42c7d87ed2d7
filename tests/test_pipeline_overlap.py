"""Sums of gradients over data axes inside the last backward of a stage: what is issued and awaited when, on gloo, and that
each parameter is summed once a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fmegatron as fm
from fmegatron.accumulate import Term, Weight
from fmegatron.parallel.pipeline import Ends
from fmegatron.parallel.schedules import make_schedule
from fmegatron.precision import Precision
from fmegatron.rules import Rules
from fmegatron.spec import params_of
from tests.processes import processes
from tests.test_pipeline_halves import told
from tests.test_zero_overlap import Noted, Watched, spec_of

ENDS = Ends(("in",), ("norm", "out"))
MICROBATCHES, LAYERS = 3, 4
LAST = MICROBATCHES - 1
R, A = "reduce-scatter", "all-reduce"


class Noting:
    """A model of layers of two products, and leaves outside of them; `when` is called with "backward i" before the backward
    of a block, and "done i" behind that."""

    def __init__(self, when: Any) -> None:
        self.when = when

    def spec(self) -> Any:
        return spec_of(LAYERS, ends=True)

    def embed(self, params: Any, batch: Any, ctx: fm.Ctx) -> Any:
        first = ctx.sh.use(params["in"], self.spec()["in"])
        return ctx.sh.dot(batch["x"], first, "batch seq embed, embed mlp -> batch seq mlp")

    def block(self, p: Any, x: Any, ctx: fm.Ctx) -> Any:
        x = Noted.apply(x, self.when, None, f"done {ctx.layer}")
        h = ctx.sh.dot(x, p["a"], "batch seq embed, embed mlp -> batch seq mlp").tanh()
        y = x + ctx.sh.dot(h, p["b"], "batch seq mlp, mlp embed -> batch seq embed")
        return Noted.apply(y, self.when, None, f"backward {ctx.layer}")

    def head(self, params: Any, x: Any, batch: Any, ctx: fm.Ctx) -> Any:
        norm, out = (ctx.sh.use(params[n], self.spec()[n]) for n in ("norm", "out"))
        y = ctx.sh.dot(x * norm, out, "batch seq embed, embed mlp -> batch seq mlp")
        return Term(y.square().sum(-1), "batch seq"), None

    def weights(self, batch: Any) -> Any:
        return {"loss": Weight(torch.ones(batch["x"].shape[:2]), "batch seq")}


class Products(TorchDispatchMode):
    """Calls `when("product")` for every product of matrices."""

    def __init__(self, when: Any) -> None:
        super().__init__()
        self.when = when

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.split("::")[1] in ("mm", "bmm", "addmm"):
            self.when("product")
        return func(*args, **(kwargs or {}))


class Sizes(Watched):
    """It also adds up the elements of what is summed."""

    def __init__(self) -> None:
        super().__init__()
        self.summed: Counter[str] = Counter()

    def begin(self, collective: Any, x: Any, mesh: Any, axes: Any) -> Any:
        if x.numel() > 8:
            self.summed[collective] += x.numel()
        return super().begin(collective, x, mesh, axes)


def step_of(schedule: str, zero: int) -> tuple[list[str], dict[str, int], int]:
    """On one rank, of one step: what happened, elements summed by collective, and elements of the parameters held."""
    mesh = fm.make_mesh("pp=2,dp=2", device="cpu")
    rows = {"batch": "dp", "seq": None, "embed": None, "mlp": None}
    with Sizes() as watched:

        def when(what: str | None) -> None:
            if what is not None:
                watched.events.append(what)

        model = Noting(when)
        pipe = fm.pipeline(model, make_schedule(schedule, 2, MICROBATCHES), mesh=mesh, ends=ENDS)
        whole = fm.Sharding(mesh, Rules(rows, store="dp", zero=zero), precision=Precision(params=torch.float64))
        sh = fm.inside_stage(whole, model.spec())
        params = fm.init(pipe.spec, fm.key(0), sh=sh)
        watched.events.clear()
        watched.summed.clear()
        batch = {"x": sh.shard(torch.randn(2 * MICROBATCHES, 3, 8, dtype=torch.float64), "batch seq embed")}
        with told(when), Products(when):
            pipe(params, batch, fm.Ctx(sh))
    return watched.events, dict(watched.summed), sum(p.numel for p in params_of(pipe.spec).values())


def since(events: list[str], what: str, *, but: tuple[str, ...] = ("product", "all-gather")) -> list[str]:
    """The events from the last of a kind on, without some, and without what is sent."""
    last = len(events) - 1 - events[::-1].index(what)
    kept = [e for e in events[last:] if "SEND" not in e and "RECV" not in e]
    return [e for e in kept if not any(e == name or e.endswith(name) for name in but)]


def before(events: list[str], what: str) -> list[str]:
    """The events before the last of a kind."""
    return events[: len(events) - 1 - events[::-1].index(what)]


@pytest.mark.parametrize(("zero", "r"), [(0, A), (1, R)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_block_is_reduced_while_the_one_before_runs_its_last_backward(schedule: str, zero: int, r: str) -> None:
    """Not before the last one, and awaited at the end of the step. Small leaves behind the layers go with the last layer,
    those in front of them by themselves."""
    found = processes(4).run(step_of, schedule, zero)
    for rank, (events, *_) in enumerate(found):
        low = 2 * (rank // 2)  # the first layer of the stage
        stage = rank // 2
        ends = 2 if stage else 3
        assert since(events, f"{stage}B{LAST}") == [
            *(f"{stage}B{LAST}", f"backward {low + 1}", f"done {low + 1}", f"begin {r}"),
            *(f"backward {low}", f"done {low}", f"begin {r}", *[f"begin {r}"] * (ends - 2), *[f"end {r}"] * ends),
        ]
        assert f"begin {r}" not in before(events, f"{stage}B{LAST}")


@pytest.mark.parametrize("zero", [2, 3])
def test_where_gradients_are_nowhere_whole_each_backward_reduces_beside_its_blocks(zero: int) -> None:
    """Those of a block are awaited behind the backward of the block before; with ZeRO-2 those of the last part of a
    backward when the next one has some."""
    for rank, (events, *_) in enumerate(processes(4).run(step_of, "1f1b", zero)):
        high, low, stage = 2 * (rank // 2) + 1, 2 * (rank // 2), rank // 2
        for m in range(MICROBATCHES):
            found = since(before([*events, f"{stage}B{m + 1}"], f"{stage}B{m + 1}"), f"{stage}B{m}")
            start = found.index(f"backward {high}")
            end = found.index(f"done {low}")
            assert found[start + 1 : end + 3][-6:] == [
                *((f"end {R}", f"begin {R}") if zero == 2 and (stage or m) else (f"done {high}", f"begin {R}")),
                *(f"backward {low}", f"done {low}", f"end {R}", f"begin {R}"),
            ]


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("schedule", ["zbh1", "zbv"])
def test_a_block_is_reduced_in_the_last_backward_by_weights(schedule: str, zero: int) -> None:
    """Behind the products of its two matrices, before those of the next block."""
    for events, *_ in processes(4).run(step_of, schedule, zero):
        for what in {e for e in events if e.endswith(f"W{LAST}")}:
            expected = ["product", "product", f"begin {R}"] * (2 if schedule == "zbh1" else 1)
            if what[0] == "0":  # what is in front of the layers; with ZeRO-1 it goes with the first of them
                expected = ["product", *([f"begin {R}"] if zero == 2 else []), *expected]
            assert since(events, what, but=("all-gather", f"end {R}"))[1 : len(expected) + 1] == expected


SCHEDULES = ("1f1b", "interleaved", "bfs", "zbh1", "zbv", "dualpipev")


@pytest.mark.parametrize(("schedule", "zero"), [(s, z) for s in SCHEDULES for z in (0, 1)] + [("zbh1", 2), ("1f1b", 2)])
def test_every_parameter_is_reduced_once_a_step(schedule: str, zero: int) -> None:
    """By the elements that are summed: with ZeRO-2, once in each microbatch, as gradients are nowhere whole."""
    for _, summed, held in processes(4).run(step_of, schedule, zero):
        assert summed == {A if zero == 0 else R: held * (MICROBATCHES if zero == 2 else 1)}
