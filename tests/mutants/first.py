"""By which layout each mutant was caught first, as `python -m tests.mutants --write` found it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
