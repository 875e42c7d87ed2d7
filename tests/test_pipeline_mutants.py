"""Every planted defect of pipelines is caught as a numeric difference on real processes (see tests/mutants)."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from fmegatron.testing.comparing import differences
from fmegatron.testing.covering import Case
from fmegatron.testing.engines import run_on
from fmegatron.testing.layout import Layout
from tests.mutants.by_tests import in_child, pools
from tests.mutants.catching import reference
from tests.mutants.edits import applied
from tests.mutants.pipeline_table import LAYOUT, MODEL, PIPELINE_MUTANTS

CASE, CHECKS = Case(MODEL, Layout.parse(LAYOUT)), ("gradients",)
LIMIT = 100.0  # seconds


def worst_with(edits: Any) -> dict[str, Any]:
    """{leaf, error, share} of what is furthest off on ranks that are forked behind the edits."""
    torch.set_num_threads(1)
    known = reference(CASE, CHECKS)

    def body(stream: Any) -> None:
        pools._pools.clear()  # they are the parent's
        with applied(edits):
            try:
                ranks = run_on("processes", known.program, CASE.layout, known.job, known.inputs)
            except Exception as error:
                print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), file=stream)
                return
        worst = max(differences(ranks, known.want, stages=True), key=lambda d: (d.share, d.error))
        print(json.dumps({"leaf": str(worst), "error": worst.error, "share": worst.share}), file=stream)

    with in_child(body, LIMIT) as rows:
        assert rows, f"no answer in {LIMIT:g} s"
    assert "failed" not in rows[0], rows[0]["failed"]
    return rows[0]


@pytest.mark.parametrize("name", PIPELINE_MUTANTS)
def test_a_mutant_of_a_pipeline_is_caught(name: str) -> None:
    """By a finite difference, by no exception and no hang."""
    found = worst_with(PIPELINE_MUTANTS[name].edits)
    assert found["share"] > 1 and math.isfinite(found["error"]), found["leaf"]


def test_without_a_mutant_all_is_equal() -> None:
    found = worst_with(())
    assert found["share"] <= 1, found["leaf"]
    assert len({m.edits for m in PIPELINE_MUTANTS.values()}) == len(PIPELINE_MUTANTS) >= 6
