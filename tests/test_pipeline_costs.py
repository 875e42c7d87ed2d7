"""tests/bench/pipeline_costs.py at tiny sizes: it runs, what it predicts from what it measured, and a part that fails."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "bench" / "pipeline_costs.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("pipeline_costs", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pipeline_costs", module)
    spec.loader.exec_module(module)
    return module


def found(script: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> dict[str, Any]:
    out = folder / "costs.json"
    given = ("--small", "--repeats", "1", "--bandwidth", "inf", "--latency", "0", "--out", str(out), *more)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *given])
    script.main()
    return json.loads(out.read_text())


def test_predictions_from_measured_costs_are_the_closed_forms(script, monkeypatch, tmp_path, capsys) -> None:
    """Equal stages and messages that take no time: (p − 1) ÷ m, and ÷ v m, whatever the costs are."""
    got = found(script, monkeypatch, tmp_path)
    printed = capsys.readouterr().out
    assert "failed" not in got and "as run" in printed and "dualpipev" in printed
    rows = {(r["schedule"], r["microbatches"], r["times"], r["ends"]): r for r in got["predicted"]}
    assert len(rows) == 7 * 3 * 2 * 2
    for times in ("run", "device"):
        for m in (8, 16, 32):
            for name, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("bfs", 2)):
                assert rows[name, m, times, False]["bubble"] == pytest.approx(1 / (virtual * m)), name
    keeps = got["measured"]["1"]["middle"]["keeps"]
    assert rows["1f1b", 8, "run", False]["keeps"] == [2 * keeps["before B"], keeps["before B"]]
    assert rows["gpipe", 8, "run", False]["keeps"] == [8 * keeps["before B"]] * 2
    assert 0 < keeps["before W"] < 2 * keeps["before I"]
    held = {place: row["parameters"] for place, row in got["measured"]["1"].items()}
    config = got["model"]
    assert held["first"] - held["middle"] == config["vocab"] * config["embed"] == held["last"] - held["middle"] - 32


def test_a_part_that_fails_is_named_and_the_others_go_on(script, monkeypatch, tmp_path, capsys) -> None:
    plain = script.measure

    def measure(stages: Any, found: Any, place: str, virtual: int, stage: Any) -> None:
        if (place, virtual) == ("last", 2):
            raise RuntimeError("planted")
        plain(stages, found, place, virtual, stage)

    monkeypatch.setattr(script, "measure", measure)
    got = found(script, monkeypatch, tmp_path)
    assert got["failed"] == ["last stage of 2 a rank"] and "planted" in capsys.readouterr().out
    assert {r["schedule"] for r in got["predicted"]} == {"gpipe", "1f1b", "zbh1"}
