"""Two ways to run the ranks of a layout behind one name.

"simulated": all ranks in this process, on CPU or on one GPU; no point-to-point, Python does not differ by rank.
"processes": gloo processes on CPU, kept alive from call to call; nothing here runs on NCCL: for real GPUs run
    the training step itself under torchrun.
"""

from __future__ import annotations

from typing import Any

from fmegatron.errors import UserError
from fmegatron.simulation import simulate
from fmegatron.testing.layout import Layout
from fmegatron.testing.processes import processes
from fmegatron.testing.program import Program, packed, unpacked
from fmegatron.testing.running import Inputs, Job, Outcome, inputs_of, run

ENGINES = ("simulated", "processes")
MOST_PROCESSES = 16


def run_on(
    engine: str, program: Program, layout: Layout, job: Job, inputs: Inputs, *, device: str = "cpu"
) -> list[Outcome]:
    """What every rank of the layout computes. Raises UserError for what an engine cannot express, saying so."""
    check_engine(engine, layout, device)
    if layout.world == 1:
        return run(program, layout, job, inputs, device=device)
    if engine == "simulated":
        with simulate(layout.world):
            return run(program, layout, job, inputs, device=device)
    found = processes(layout.world).run(_on_rank, packed(program), layout, job)
    return [outcome for (outcome,) in found]


def check_engine(engine: str, layout: Layout, device: str) -> None:
    """Raises UserError where an engine cannot express a layout or run on a device."""
    if engine not in ENGINES:
        raise UserError(f"engine {engine!r} is not known: use {' or '.join(ENGINES)}")
    if engine == "processes" and device != "cpu":
        raise UserError(f"engine processes runs on gloo and CPU, not on {device}: use --engine simulated for a GPU")
    if engine == "processes" and layout.world > MOST_PROCESSES:
        raise UserError(f"layout {layout}: {layout.world} processes are too many: use the simulated engine")


def _on_rank(program: Any, layout: Layout, job: Job) -> list[Outcome]:
    made = unpacked(program)
    return run(made, layout, job, inputs_of(made, layout, job))
