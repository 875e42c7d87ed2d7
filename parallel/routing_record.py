"""Choices of experts, recorded in one run and replayed in another: the same choice, while weights and gradients are those of
the model that replays it (as in rollout and training of one model by reinforcement learning).

    record = recorded(routed)                        # of a layer: int[batch seq* choice]
    again = route(logits, routing, sh=sh, **replayed(record))

A record is one number a choice: the expert, -1 - expert where it was dropped for capacity, the number of experts where there
is none. On disk it is a file of a step, `step_00000012.npy`, int16 or int32 [row token layer choice] of the global
batch, so that a rank reads only what it holds, on any layout and in any number of microbatches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmegatron.errors import UserError
from fmegatron.parallel.routing import Routed


def recorded(routed: Routed) -> Tensor:
    """int32[batch seq* choice] of what a router decided."""
    return torch.where(routed.experts == routed.chosen, routed.chosen, -1 - routed.chosen).to(torch.int32)


def replayed(record: Tensor) -> dict[str, Tensor]:
    """{"chosen", "kept"} of `route`, each [batch seq* choice]."""
    record = record.to(torch.int64)
    return {"chosen": torch.where(record < 0, -1 - record, record), "kept": record >= 0}


def as_batch(record: Tensor, sh: Any) -> Tensor:
    """record[layer batch seq* choice], as a model's statistics have it -> [batch seq layer choice], as a batch has it."""
    return sh(record, "layer batch seq* choice -> layer batch seq choice").permute(1, 2, 0, 3).contiguous()


def whole_record(record: Tensor, sh: Any, *, rows: int, seq: int) -> Tensor:
    """The same in global order on every rank: [row token layer choice] of so many rows and tokens, without what fills up a
    batch. Collective."""
    every = sh(record, "layer batch seq* choice -> layer all_rows all choice")
    return every[:, :rows, :seq].permute(1, 2, 0, 3).contiguous()


def step_file(folder: str | Path, step: int) -> Path:
    """Where the choices of a step are, counted from 1."""
    return Path(folder) / f"step_{step:08d}.npy"


def recorded_steps(folder: str | Path) -> list[int]:
    """The steps whose choices are in a folder, in order."""
    return sorted(int(path.stem.removeprefix("step_")) for path in Path(folder).glob("step_*.npy"))


def missing_step(folder: str | Path, first: int, last: int) -> int | None:
    """The first of the steps `first` to `last` whose choices are not there."""
    there = set(recorded_steps(folder))
    return next((step for step in range(first, last + 1) if step not in there), None)


def write_record(folder: str | Path, step: int, record: Tensor, experts: int) -> None:
    """Writes a step's choices, [row token layer choice], in one move. experts: how many there are."""
    path = step_file(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        np.save(file, record.cpu().numpy().astype(np.int16 if experts < 2**15 else np.int32))
    part.replace(path)


def read_record(
    folder: str | Path, step: int, *, rows: Tensor, columns: Tensor, shape: tuple[int, int, int, int], experts: int
) -> Tensor:
    """int32[row token layer choice] of these rows and tokens of a step's global batch.

    shape: of the whole: rows, tokens, layers with experts, choices of a token. experts: of a layer. Raises UserError for a step
    that was not recorded, or one of other sizes.
    """
    path = step_file(folder, step)
    if not path.is_file():
        raise UserError(f"there is no recorded routing of step {step} in {folder}: {path.name} is missing")
    whole = np.load(path, mmap_mode="r")
    if whole.shape != shape:
        words = ("rows", "tokens", "layers with experts", "choices")
        told = ", ".join(f"{n} {w}" for n, w in zip(whole.shape, words, strict=False))
        raise UserError(
            f"the recorded routing {path} is of {told}, but this run has "
            f"{', '.join(f'{n} {w}' for n, w in zip(shape, words, strict=True))}: replay it with the batch and the experts of its run"
        )
    found = whole[rows.numpy()][:, columns.numpy()].astype(np.int32)
    if found.size and not -experts <= found.min() <= found.max() <= experts:  # `experts` itself is none
        raise UserError(
            f"the recorded routing {path} names expert {max(found.max(), -1 - found.min())}, but this run has {experts} experts a "
            "layer: replay it with the experts of its run"
        )
    return torch.from_numpy(found)
