"""Every planted defect of mixtures of experts is caught on the layout that it names, and by no one device (see tests/mutants)."""

from __future__ import annotations

import pytest
import torch

import fmegatron as fm
from fmegatron.padding import shard_batch
from fmegatron.precision import Precision
from fmegatron.simulation import per_rank, simulate
from fmegatron.testing import Layout
from fmegatron.testing.covering import Case
from fmegatron.testing.program import Program
from tests.mutants.catching import on_one_device, verdict
from tests.mutants.edits import applied
from tests.mutants.moe_table import BIAS_MUTANTS, MOE_MUTANTS, MOVING

LARGE = Layout("dp=1", rows=8, seq=16)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", MOE_MUTANTS)
def test_a_mutant_of_experts_is_caught(name: str) -> None:
    """By a finite difference; on one device, with a mesh and without, all is equal."""
    planted = MOE_MUTANTS[name]
    case, checks = Case(planted.text, Layout.parse(planted.layout)), ("gradients", *planted.mutant.checks)
    found, alone = (
        verdict(case, checks, planted.mutant.edits),
        on_one_device(planted.text, checks, planted.mutant.edits),
    )
    assert found.kind == "difference", f"{found.kind} on {case.layout}: {found.message or found.worst}"
    assert [one.kind for one in alone] == ["equal", "equal"], alone


@pytest.mark.parametrize("case", sorted({(p.text, p.layout) for p in MOE_MUTANTS.values()}), ids=" ".join)
def test_without_a_mutant_all_is_equal(case: tuple[str, str]) -> None:
    text, layout = case
    found = verdict(Case(text, Layout.parse(layout)), ("gradients",))
    assert found.kind == "equal", found


def test_mutants_differ() -> None:
    assert len({p.mutant.edits for p in MOE_MUTANTS.values()}) == len(MOE_MUTANTS) >= 10


def moved_biases(layout: Layout | None) -> list[torch.Tensor]:
    """The biases of the choice on each rank after one step; None: on one device without a mesh."""
    program, precision = Program(MOVING), Precision(params=torch.float64)
    sh = fm.Sharding(precision=precision) if layout is None else program.sharding(layout, precision)
    spec = MOVING.spec()
    params = sh.shard_params(program.params_of(spec, torch.float64), spec)
    optimizer = fm.optim.sgd(0.1)
    options = {"weights": MOVING.weights, "update_params": MOVING.update_params}
    step = fm.train_step(MOVING.loss, optimizer, sh=sh, spec=spec, **options)
    state = fm.TrainState(0, params, optimizer.init(params), fm.key(0))
    state, _ = step(state, shard_batch(program.batch_of(LARGE), sh))
    found = state.params["layers"][0]["expert_bias"]
    return per_rank(found.to_local() if hasattr(found, "to_local") else found)


@pytest.mark.parametrize("name", BIAS_MUTANTS)
def test_a_mutant_of_the_biases_is_caught(name: str) -> None:
    """On some rank; without the mutant every rank has what one device has, and one device has the same with it."""
    planted = BIAS_MUTANTS[name]
    (want,), layout = moved_biases(None), Layout.parse(planted.layout)

    def off() -> float:
        with simulate(layout.world):
            return max(float((x - want).abs().max()) for x in moved_biases(layout))

    assert off() == 0
    with applied(planted.mutant.edits):
        (alone,) = moved_biases(None)
        assert torch.equal(alone, want) and 0.05 < off() < 1
