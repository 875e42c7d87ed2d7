"""Two ways to run the ranks of a layout behind one name.

"simulated": all ranks in this process, on CPU or on one GPU; no point-to-point, Python does not differ by rank, so no
    pipelines.
"processes": one process a rank. Started by torchrun, these are its processes, over gloo on CPU and NCCL on GPUs, and every
    one gets all answers; a layout must then have as many ranks as torchrun started:

        torchrun --nproc-per-node 4 -m fmegatron verify llama --engine processes --layout "dp=2,tp=2" --device cuda

    Else a pool of gloo processes on CPU, kept alive from call to call.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch.distributed as dist

from fmegatron.errors import UserError
from fmegatron.launch import close_distributed, init_distributed
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
    if started_by_torchrun():
        return _as_one_rank(program, layout, job, inputs, device)
    found = processes(layout.world).run(_on_rank, packed(program), layout, job)
    return [outcome for (outcome,) in found]


def started_by_torchrun() -> int:
    """The number of processes that torchrun, or another launcher with its variables, started with this one; else 0."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else 0


def check_engine(engine: str, layout: Layout, device: str) -> None:
    """Raises UserError where an engine cannot express a layout or run on a device."""
    if engine not in ENGINES:
        raise UserError(f"engine {engine!r} is not known: use {' or '.join(ENGINES)}")
    if engine == "simulated":
        if layout.pipelined:
            raise UserError(
                f"layout {layout}: the simulated engine runs all ranks as one program, and the stages of a pipeline are "
                "different ones: use the engine processes"
            )
        if started_by_torchrun() > 1 and dist.is_initialized():
            raise UserError(f"layout {layout}: this process is a rank of torchrun's: use the engine processes")
        return
    if ranks := started_by_torchrun():
        if layout.world != ranks:
            raise UserError(
                f"layout {layout} has {layout.world} ranks, but torchrun started {ranks} processes: "
                f"use --nproc-per-node {layout.world}, or a layout of {ranks} ranks"
            )
        return
    if device != "cpu":
        raise UserError(
            f"engine processes runs on gloo and CPU, not on {device}: use --engine simulated for one GPU, or torchrun "
            "--nproc-per-node … for a GPU a rank"
        )
    if layout.world > MOST_PROCESSES:
        raise UserError(f"layout {layout}: {layout.world} processes are too many: use the simulated engine")


def join(engine: str, device: str) -> None:
    """Joins torchrun's other processes, where this is one of them and has not yet: its GPU is its own from here on, and not
    every rank's first."""
    if engine == "processes" and started_by_torchrun() and not dist.is_initialized():
        init_distributed(device)
        atexit.register(close_distributed)


def _as_one_rank(program: Program, layout: Layout, job: Job, inputs: Inputs, device: str) -> list[Outcome]:
    """What all of torchrun's processes compute, of which this is one."""
    join("processes", device)
    (mine,) = run(program, layout, job, inputs, device=device)
    found: list[Any] = [None] * layout.world
    dist.all_gather_object(found, mine)
    return found


def _on_rank(program: Any, layout: Layout, job: Job) -> list[Outcome]:
    made = unpacked(program)
    return run(made, layout, job, inputs_of(made, layout, job))
