"""Every mutant is caught by a layout that is drawn by default, named here, and by no one device (see tests/mutants)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fmegatron.testing import Layout
from fmegatron.testing.covering import Case
from tests.mutants.catching import drawn, on_one_device, verdict
from tests.mutants.edits import Edit, applied
from tests.mutants.first import FIRST, first_caught
from tests.mutants.table import MUTANTS

RENEW = "`python -m tests.mutants --write` finds and records the first layouts anew"


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name):
    """By a finite difference on the layout that is recorded; on one device, with a mesh and without, all is equal."""
    assert name in FIRST, f"no layout is recorded for it: {RENEW}"
    mutant, first = MUTANTS[name], FIRST[name]
    case = Case(first.model, Layout.parse(first.layout))
    assert case in drawn(), f"{case.layout} of {case.model} is not drawn any more: {RENEW}"
    checks = ("gradients", *mutant.checks)
    found, alone = verdict(case, checks, mutant.edits), on_one_device(case.model, checks, mutant.edits)
    assert found.kind == "difference", f"{found.kind} on {case.layout}, {case.model}: {found.message}; {RENEW}"
    assert found.dtypes, f"it changes a dtype on {case.layout}, which would be noticed without any layout"
    assert [one.kind for one in alone] == ["equal", "equal"], alone


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_the_first_layout_that_catches_a_mutant(name):
    """None that is drawn before it does."""
    first, problem = first_caught(name)
    assert first is not None, problem
    kept = FIRST[name]
    assert (first.number, first.model, first.layout) == (kept.number, kept.model, kept.layout), RENEW


@pytest.mark.slow
def test_a_share_of_the_automatic_sweep(tmp_path):
    """Whose exit code is 1 where less than 95 % of its changes are caught."""
    command = [sys.executable, "-m", "tests.mutation_sweep", "--share", "0.02", "--out", str(tmp_path / "sweep.jsonl")]
    root = Path(__file__).parent.parent
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_mutants_differ_and_leave_nothing_behind():
    assert len(MUTANTS) >= 30 and FIRST.keys() == MUTANTS.keys()
    assert len({m.edits for m in MUTANTS.values()}) == len(MUTANTS)
    case = next(c for c in drawn() if c.layout.world == 2)
    edit = Edit("fmegatron.zero:Reducer.wait", "self.take(i, x)", "self.take(i, x * 2)")
    assert verdict(case, ("gradients",), [edit]).kind == "difference"
    assert verdict(case, ("gradients",)).kind == "equal"


@pytest.mark.parametrize("old", ["self.take(i, y)", "self"])
def test_an_edit_of_text_that_is_not_there_once_fails(old):
    with pytest.raises(AssertionError, match="not once"), applied([Edit("fmegatron.zero:Reducer.wait", old, "")]):
        pass
