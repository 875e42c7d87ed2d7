"""Schedules as text, to look at, to keep and to write by hand.

    # two ranks, two microbatches: GPipe
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1F1 1B0 1B1

A line is a rank's program, in order; "rank N:" may be left out, lines are then ranks 0, 1, 2, … Actions stand apart by
spaces or commas. 2F5 is stage 2's forward of microbatch 5, and likewise B (backward), I and W (its halves, by input and
by weight), SEND_F, RECV_F, SEND_B, RECV_B; 2GATHER and 2REDUCE have no microbatch. A + in front of an action joins it
with the one before: sends and receives as one batch, or a forward with a backward that overlaps it. Empty cells and -
are nothing, # begins a comment. Which rank holds a stage follows from where its actions are; stages and microbatches
are counted from 0. Sends and receives may be left out, all of them: `with_communication` adds them.

The notation of actions is that of PyTorch's pipeline schedules, so that the CSV files that those write are read too
((0F1;3B2)OVERLAP_F_B is a joined pair, UNSHARD a GATHER, REDUCE_GRAD a REDUCE, RESHARD nothing).
"""

from __future__ import annotations

import re
from pathlib import Path

from fmegatron.errors import UserError
from fmegatron.parallel.schedules import COLLECTIVE, KINDS, Action, Schedule

_RANK = re.compile(r"\s*rank\s+(\d+)\s*:", re.IGNORECASE)
_CELL = re.compile(r"\([^)]*\)OVERLAP_F_B|[^\s,]+")
_ACTION = re.compile(r"(\+?)(\d+)([A-Z_]*[A-Z])(\d*)")
_OTHER_NAMES = {"UNSHARD": "GATHER", "REDUCE_GRAD": "REDUCE"}
_FORM = "an action is a stage, what it does and a microbatch, such as 2F5, 2B5, 2SEND_F5, or 2REDUCE without one"


def read(path: str | Path) -> Schedule:
    """The schedule of a file, named like it. It is not proven yet: `check` does that.

    Raises UserError that names the file, for one that cannot be read and for what `parse` refuses.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    try:
        return parse(text, name=Path(path).stem)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def parse(text: str, *, name: str = "table") -> Schedule:
    """The schedule that a text holds. It is not proven yet: `check` does that.

    Raises UserError that names line and action: for what is no action, a stage on two ranks, a rank that is there twice
    or not at all, and for stages or microbatches that nobody has.
    """
    programs: dict[int, list[Action]] = {}
    placement: dict[int, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0]
        if not line.strip():
            continue
        head = _RANK.match(line)
        rank = int(head[1]) if head else len(programs)
        if rank in programs:
            raise UserError(f"line {number}: rank {rank} has a line already: write all its actions in one")
        row = programs[rank] = []
        for n, cell in enumerate(_CELL.findall(line[head.end() :] if head else line), 1):
            for a in _actions(cell, f"line {number}, action {n}"):
                if placement.setdefault(a.stage, rank) != rank:
                    raise UserError(
                        f"line {number}, action {n} ({a}): stage {a.stage} is on rank {placement[a.stage]} already, and "
                        "can be on one rank only"
                    )
                row.append(a)
    if not programs or not placement:
        raise UserError("the table has no actions: write a line for each rank, such as 'rank 0: 0F0 0F1 0B0 0B1'")
    for what, have in (("rank", programs), ("stage", placement)):
        for n in range(max(have)):
            if n not in have:
                raise UserError(f"the table has no {what} {n}, but a {what} {max(have)}: {what}s are counted from 0")
    microbatches = 1 + max(
        (a.microbatch for row in programs.values() for a in row if a.microbatch is not None), default=-1
    )
    if not microbatches:
        raise UserError("the table has no microbatch: write actions with one, such as 0F0")
    return Schedule(
        name,
        tuple(placement[s] for s in range(len(placement))),
        microbatches,
        tuple(tuple(programs[r]) for r in range(len(programs))),
    )


def format(schedule: Schedule) -> str:
    """A schedule as text that `parse` reads."""
    lines = [
        f"# {schedule.name}: ranks {schedule.ranks}, stages {schedule.stages}, microbatches {schedule.microbatches}",
    ]
    for rank, program in enumerate(schedule.programs):
        lines.append(f"rank {rank}: " + " ".join(f"{'+' * a.joined}{a}" for a in program))
    return "\n".join([*lines, ""])


def _actions(cell: str, place: str) -> list[Action]:
    """The actions of one cell of the table."""
    if cell == "-":
        return []
    if cell.endswith(")OVERLAP_F_B"):
        inner = [a for part in cell[1 : cell.index(")")].split(";") for a in _actions(part.strip(), place)]
        return [a._replace(joined=i > 0) for i, a in enumerate(inner)]
    found = _ACTION.fullmatch(cell)
    if found is None:
        raise UserError(f"{place} {cell!r}: {_FORM}")
    kind, microbatch = _OTHER_NAMES.get(found[3], found[3]), int(found[4]) if found[4] else None
    if kind == "RESHARD":
        return []
    if kind not in KINDS:
        raise UserError(f"{place} {cell!r}: {found[3]} is no kind of action; {_FORM}")
    if (microbatch is None) != (kind in COLLECTIVE):
        raise UserError(
            f"{place} {cell!r}: {found[3]} "
            + ("is of all microbatches" if microbatch is not None else "of which microbatch?")
        )
    return [Action(kind, int(found[2]), microbatch, bool(found[1]))]
