"""Every planted defect of loading under another layout is caught as a numeric difference (see tests/mutants)."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fmegatron import checkpoint, tree
from tests.mutants.checkpoint_table import CHECKPOINT_MUTANTS
from tests.mutants.edits import applied
from tests.processes import processes
from tests.test_zero import run, sharding, started, whole

pytestmark = pytest.mark.xdist_group("gloo")

SAVED, LOADED = "zero 1", "tp sp zero 1"


def saved(layout: str | None, folder: str) -> None:
    """Two steps under a layout, whose state is written."""
    sh = sharding(layout)
    state, _ = run(sh, *started(sh), steps=2)
    checkpoint.save(folder, state, step=2)


def goes_on(layout: str | None, folder: str, edits: Any) -> dict[str, torch.Tensor]:
    """{leaf: whole value} of a state that is loaded with the edits in force, and has made one step more without them."""
    sh = sharding(layout)
    state, step = started(sh)
    with applied(edits):
        state = checkpoint.load(folder, state)
    state, _ = run(sh, state, step, 1)
    return {n: whole(x)[0] for n, x in tree.named(state).items() if isinstance(x, torch.Tensor)}


@functools.cache
def never_stopped() -> dict[str, torch.Tensor]:
    sh = sharding(None)
    state, _ = run(sh, *started(sh), steps=3)
    return {n: x for n, x in tree.named(state).items() if isinstance(x, torch.Tensor)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    processes(4).run(saved, SAVED, str(path))
    return path


def worst(found: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference of a parameter to a run that was never stopped, and the parameter."""
    return max((float((found[n] - x).abs().max()), n) for n, x in never_stopped().items() if n.startswith("params."))


@pytest.mark.parametrize("name", CHECKPOINT_MUTANTS)
def test_a_mutant_of_loading_is_caught(name: str, folder: Path) -> None:
    """By a finite difference of parameters after the next step, on all ranks; one device notices nothing."""
    edits = CHECKPOINT_MUTANTS[name].edits
    for found in processes(4).run(goes_on, LOADED, str(folder), edits):
        error, leaf = worst(found)
        assert math.isfinite(error) and error > 1e-5, (error, leaf)
    error, leaf = worst(goes_on(None, str(folder), edits))
    assert error < 1e-11, (error, leaf)


def test_without_a_mutant_all_is_equal(folder: Path) -> None:
    for found in processes(4).run(goes_on, LOADED, str(folder), ()):
        error, leaf = worst(found)
        assert error < 1e-11, (error, leaf)
