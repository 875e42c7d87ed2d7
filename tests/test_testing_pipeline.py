"""Pipelines under the harness: layouts with an axis pp, on real processes."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import Phase, given, settings

from fmegatron.errors import UserError
from fmegatron.parallel.schedules import SCHEDULES
from fmegatron.testing import Layout, assert_equivalent, layouts, ledger, shrink, small_model
from fmegatron.testing.comparing import differences
from fmegatron.testing.covering import space
from fmegatron.testing.program import Program
from fmegatron.testing.running import Piece
from fmegatron.testing.strategies import MICROBATCHES

EXAMPLES = Path(__file__).parent.parent / "examples"
MODEL = small_model("llama", layers=4, tied=True, dropout=0.2)
LINE = "pp=2,tp=2 zero=0 micro=4 schedule=zbv virtual=2 stages=Et|tt|t|L sp"


@pytest.fixture
def own_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """examples/own_model.py as a module; the processes find it by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("own_model")
    sys.modules.pop("own_model")


@pytest.mark.parametrize("line", ["pp=2,dp=1,tp=2 zero=1 micro=2", "pp=2,dp=2 zero=1 micro=2 schedule=zbh1"])
def test_a_model_of_ones_own_in_a_pipeline(own_model: ModuleType, line: str) -> None:
    """The README's, on 4 processes; zero=1 stores over dp."""
    assert_equivalent(own_model, line, engine="processes")


def test_a_ring_inside_a_stage() -> None:
    """Its neighbours are of the stage's part of the mesh."""
    assert_equivalent(MODEL, "pp=2,cp=2 context=ring micro=2 packed", engine="processes", checks=("gradients",))


@pytest.mark.slow
def test_a_model_of_ones_own_with_all_of_it(own_model: ModuleType) -> None:
    assert_equivalent(own_model, "pp=2,dp=2,tp=2 zero=1 micro=2 schedule=zbv", engine="processes")


def test_a_decoder_in_a_pipeline() -> None:
    """Tied, with dropout, on stages of unequal sizes, compared by the global names of parameters and state."""
    result = assert_equivalent(MODEL, LINE + " mask=uneven packed remat=nothing odd", engine="processes")
    names = {d.leaf for d in result.differences if d.what == "adamw m"}
    assert {"embed", "layers.0.norm1", "layers.3.norm1", "norm"} <= names


def test_a_line_is_read_and_written() -> None:
    layout = Layout.parse(LINE)
    assert (layout.schedule, layout.virtual, layout.stages, layout.pipelined) == ("zbv", 2, "Et|tt|t|L", True)
    assert str(layout) == "pp=2,tp=2 sp micro=4 schedule=zbv virtual=2 stages=Et|tt|t|L"
    assert Layout.parse(str(layout)) == layout and str(layout.inside) == "tp=2 sp micro=4"
    assert not Layout("dp=2").pipelined


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dp=2 schedule=zbv", "schedule=zbv needs an axis pp"),
        ("dp=2 virtual=2", "virtual=2 needs an axis pp"),
        ("pp=2 schedule=fastest", "schedule=fastest is not known: use one of gpipe"),
        ("pp=2 virtual=0", "virtual=0 must be 1 or more"),
    ],
)
def test_words_that_do_not_fit_are_refused(line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Layout.parse(line)


def test_what_cannot_run_says_so() -> None:
    with pytest.raises(UserError, match="simulated engine runs all ranks as one program.*use the engine processes"):
        assert_equivalent(MODEL, "pp=2")
    with pytest.raises(UserError, match="use the engine processes"):
        ledger(MODEL, "pp=2")
    with pytest.raises(UserError, match="embed, block and head beside spec and loss, but a tuple has no embed"):
        assert_equivalent((MODEL.spec, MODEL.loss), "pp=2", engine="processes")
    with pytest.raises(UserError, match="assignment has 3 stages"):
        assert_equivalent(MODEL, "pp=2 stages=Et|tt|tL", engine="processes")
    with pytest.raises(UserError, match="virtual=3: the schedule zbv has 2 stages"):
        assert_equivalent(MODEL, "pp=2 schedule=zbv virtual=3", engine="processes")
    with pytest.raises(UserError, match="engine='processes'"):
        layouts(MODEL, 4, axes=("pp", "tp"))


@functools.cache
def drawn(number: int, ranks: int) -> list[Layout]:
    """So many layouts of the engine "processes", by the strategy; the same in every run."""
    seen: list[Layout] = []

    @settings(max_examples=number, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(layout=layouts(MODEL, ranks, engine="processes"))
    def draw(layout: Layout) -> None:
        seen.append(layout)

    draw()
    return seen


# What a layout may have beside a pipeline, by name.
BESIDE = {
    "tp": lambda x: x.size("tp") > 1,
    "sp": lambda x: x.sp and x.size("tp") > 1,
    "cp": lambda x: x.size("cp") > 1,
    "dp": lambda x: x.size("dp", "fsdp") > 1,
    **{f"zero {n}": lambda x, n=n: x.zero == n for n in (1, 2, 3)},
    **{f"micro {n}": lambda x, n=n: x.micro == n for n in MICROBATCHES},
    "virtual": lambda x: x.virtual is not None and x.virtual > 2,
    "stages": lambda x: bool(x.stages),
    "remat": lambda x: x.remat != "everything",
    "packed": lambda x: x.packed,
    **{f"schedule {s}": lambda x, s=s: x.schedule == s for s in SCHEDULES},
}


def test_layouts_of_processes_are_drawn_with_pipelines() -> None:
    """All are legal and can be pasted back; for a model of two functions alone there are none. Many have a pipeline, and
    beside it every other option is drawn."""
    seen = drawn(400, 8)
    for layout in seen[:100]:
        assert Program(MODEL).why_illegal(layout) is None and Layout.parse(str(layout)) == layout
    piped = [layout for layout in seen if layout.size("pp") > 1]
    assert len(piped) > len(seen) // 5
    assert {name for name, has in BESIDE.items() if any(has(x) for x in piped)} == set(BESIDE)
    assert not Program((MODEL.spec, MODEL.loss)).has_stages


def chosen(number: int) -> list[Layout]:
    """Of the drawn layouts of a pipeline on four ranks those few that together have most options."""
    left, found = set(BESIDE), list[Layout]()
    some = [x for x in drawn(150, 4) if x.size("pp") > 1 and x.world == 4 and x.mask != "none"]
    while len(found) < number:
        found.append(max(some, key=lambda x: sum(BESIDE[name](x) for name in left)))
        left -= {name for name in left if BESIDE[name](found[-1])}
    return found


@pytest.mark.parametrize("number", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 6))])
def test_drawn_layouts_with_pipelines_equal_one_device(number: int) -> None:
    assert_equivalent(MODEL, chosen(number + 1)[number], engine="processes", checks=("gradients",))


def test_every_schedule_is_in_a_table_of_processes() -> None:
    text = "llama,layers=4"
    cases = list(space([text], 2, axes=("pp", "dp")).cases(1, 0))
    drawn = {c.layout.schedule for c in cases if c.layout.pipelined}
    assert drawn == {"gpipe", "1f1b", "interleaved", "bfs", "zbh1", "zbv", "dualpipev"}


def test_a_pipeline_shrinks() -> None:
    layout = Layout.parse("dp=2,pp=2 zero=1 micro=3 schedule=interleaved virtual=2 stages=Et|t|t|tL packed")
    small = shrink(MODEL, layout, lambda one: one.pipelined and one.micro > 1)
    assert str(small) == "pp=2 micro=2"


def test_a_leaf_that_no_stage_has_whole_is_off() -> None:
    ones = torch.ones(4)
    want = {"gradients": {"w": Piece(ones, ((0, 4),))}, "norms": {"raw": Piece(ones[0], ())}}
    first = {"gradients": {"w": Piece(ones[:2], ((0, 2),))}, "norms": want["norms"]}
    second = {"gradients": {"w": Piece(ones[2:], ((2, 2),))}, "norms": want["norms"]}
    other = {"gradients": {}, "norms": want["norms"]}
    assert all(d.share <= 1 for d in differences([first, second, other], want, stages=True))
    assert any(d.share > 1 for d in differences([first, other], want, stages=True))
    assert any(d.share > 1 for d in differences([first, second, {"gradients": {}, "norms": {}}], want, stages=True))
    assert any(d.share > 1 for d in differences([first, second, other], want))
