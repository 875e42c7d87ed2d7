"""By which layout each mutant was caught first, as `python -m tests.mutants --write` found it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.mutants.catching import checks_of, drawn, on_one_device, verdict
from tests.mutants.table import MUTANTS

FILE = Path(__file__).parent / "first_layouts.json"


@dataclass(frozen=True)
class First:
    """The number of a layout among those that are drawn, the layout, and what was furthest off."""

    number: int
    model: str
    layout: str
    leaf: str
    error: float

    @staticmethod
    def write(rows: Mapping[str, First]) -> None:
        lines = [f"  {json.dumps(name)}: {json.dumps(dataclasses.asdict(row))}" for name, row in rows.items()]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


FIRST = {name: First(**row) for name, row in json.loads(FILE.read_text()).items()} if FILE.exists() else {}


def first_caught(name: str) -> tuple[First | None, str]:
    """(the first layout that catches a mutant, None if none does; what is wrong with it or "")."""
    torch.set_num_threads(1)
    mutant = MUTANTS[name]
    for n, case in enumerate(drawn()):
        checks = checks_of(n)
        try:
            found = verdict(case, checks, mutant.edits)
            alone = on_one_device(case.model, checks, mutant.edits) if found.caught else []
        except AssertionError as stale:
            return None, str(stale)
        if found.kind == "equal":
            continue
        if found.kind != "difference":
            return None, f"{case.layout}: {found.message or found.kind}"
        if any(one.caught for one in alone):
            return None, f"one device notices it: {next(one.worst for one in alone if one.caught)}"
        assert found.worst is not None
        where = f"{found.worst.what} {found.worst.leaf}"
        return First(n, case.model, str(case.layout), where, float(f"{found.worst.error:.2g}")), ""
    return None, f"none of {len(drawn())} layouts catches it"
