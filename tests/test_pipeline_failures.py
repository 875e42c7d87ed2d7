"""What becomes of a pipeline when one rank fails, wherever that is: all ranks end within seconds, and the cause is told."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fmegatron as fm
from fmegatron.errors import UserError
from fmegatron.models import Decoder
from fmegatron.parallel import alarm
from fmegatron.parallel.pipeline import pipeline
from fmegatron.parallel.schedules import make_schedule
from fmegatron.parallel.stages import parse_layout
from fmegatron.testing.processes import Pool
from tests.processes import processes
from tests.test_pipeline_steps import batch, decoder, parts

POLL, LIMIT = 0.1, 0.5  # seconds, in place of some more: between looks, and that a rank has to raise by itself


class Breaks(torch.autograd.Function):
    """The identity, whose backward does something else."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, does: Any) -> torch.Tensor:
        ctx.does = does
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        ctx.does()
        return g, None


class Breaking:
    """A decoder whose head does something in its backward."""

    def __init__(self, model: Decoder, does: Any) -> None:
        self.model, self.does = model, does

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def head(self, params: Any, x: Any, batch: Any, ctx: fm.Ctx) -> Any:
        return self.model.head(params, Breaks.apply(x, self.does), batch, ctx)


def fails(*args: Any, **options: Any) -> Any:
    raise ZeroDivisionError("on purpose")


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failing(where: str, folder: str) -> None:
    """A step in which rank 1, with the last stage, fails; what it and the other rank raise and print goes into files."""
    alarm.POLL, alarm.LIMIT = POLL, LIMIT
    rank = dist.get_rank()
    printed = os.open(f"{folder}/printed-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(printed, 2)
    model: Any = decoder()
    if where in ("backward", "killed"):
        model = Breaking(model, fails if where == "backward" else dies)
    pipe, sh = parts(model, "1f1b", 2)
    optimizer = fm.optim.adamw(1e-2)
    if where == "optimizer" and rank == 1:
        optimizer = dataclasses.replace(optimizer, update=fails)
    params = fm.init(pipe.spec, fm.key(0), sh=sh)
    state = fm.TrainState(0, params, optimizer.init(params), fm.key(1))
    step = fm.train_step(model.loss, optimizer, sh=sh, spec=pipe.spec, gradients=pipe)
    if where == "collective" and rank == 1:
        dist.broadcast = fails
    try:
        step(state, batch(6))
    except Exception:
        Path(folder, f"raised-{rank}").write_text(traceback.format_exc())


@pytest.mark.parametrize("where", ["backward", "optimizer", "collective", "killed"])
def test_a_rank_that_fails_ends_all(where: str, tmp_path: Path) -> None:
    """By raising on all; where the other rank is in a collective it ends itself, having printed the cause. What a signal has
    killed can tell nothing: its number and the signal are told by who started it."""
    pool, error = Pool(2), ""
    began = time.monotonic()
    try:
        pool.run(failing, where, str(tmp_path), timeout=60)
    except RuntimeError as raised:
        error = str(raised)
    finally:
        pool.close()
    assert time.monotonic() - began < 30
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    if where == "killed":
        assert error == "rank 1 of 2:\nthe process was killed by SIGKILL"
        assert "raised-0" in texts or "failed" in texts["printed-0"]
        return
    assert "ZeroDivisionError: on purpose" in texts["raised-1"]
    told = texts["raised-0"] if where == "backward" else texts["printed-0"]
    assert "rank 1 failed:" in told and "in fails" in told and "ZeroDivisionError: on purpose" in told
    assert ("RankFailed" in told) == (where == "backward") == (error == "")


# --------------------------------------------------------------------------------------------------- tables that differ


def differing(given: dict[str, tuple[Any, Any]]) -> str:
    """What a rank raises that makes a pipeline by other settings than the other: {what: (for rank 0, for rank 1)}."""
    mine = {name: both[dist.get_rank()] for name, both in given.items()}
    schedule = make_schedule(mine.get("schedule", "1f1b"), 2, mine.get("microbatches", 4))
    if mine.get("swapped"):  # two microbatches change places
        row = list(schedule.programs[1])
        row[2], row[4] = row[4], row[2]
        row[3], row[5] = row[5], row[3]
        schedule = dataclasses.replace(schedule, programs=(schedule.programs[0], tuple(row)))
    assignment = parse_layout(mine["assignment"]) if "assignment" in mine else None
    try:
        pipeline(decoder(), schedule, mesh=fm.make_mesh("pp=2", device="cpu"), assignment=assignment)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("given", "difference"),
    [
        ({"schedule": ("1f1b", "gpipe")}, "the schedule is 'gpipe' there, and '1f1b' in process 0"),
        ({"microbatches": (4, 6)}, "the number of microbatches is 6 there, and 4 in process 0"),
        ({"assignment": ("Ett|ttL", "Et|tttL")}, "layout of stages is Et|tttL there, and Ett|ttL in process 0"),
        ({"swapped": (False, True)}, "action 7 of rank 0 in the table is 0SEND_F2 there, and 0RECV_B1 in process 0"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_tables_that_differ_are_refused_before_the_first_step(given: Any, difference: str) -> None:
    """On all ranks, by the first difference."""
    found = processes(2).run(differing, given)
    assert found[0] == found[1] and found[0].startswith(f"process 1 has another pipeline than process 0: {difference}")
