"""Do the project's own tests notice a change? What the sweep asks where no layout does.

Tests are collected once. Which lines of the library each of them runs is found without a change; then each change is
made in a process of its own, which runs the tests that run its lines, quick ones first, until one fails. Pools of gloo
processes are forked there, so that their ranks have the change too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.mutants.changes import Change, Source, with_change
from tests.mutants.lines import lines_run

pools: Any = importlib.import_module("fmegatron.testing.processes")

FILES = (
    *(
        "sharding",
        "layout",
        "context",
        "uneven",
        "zero",
        "zero_overlap",
        "overlap",
        "ledger",
        "simulation",
        "func",
        "step",
    ),
    *(
        "transforms_accumulate",
        "transforms_sharded",
        "optim",
        "optim_ranks",
        "random",
        "loss_scale",
        "decoder",
        "checking",
    ),
    *("parts_ring_uneven", "sharding_parts", "stack_order", "parts_pipelines", "moe_routing", "wire"),
    *("primitives", "primitives_loss", "primitives_loss_forms", "primitives_transforms"),
)
TIMED = ("*delay*", "*hidden*", "*seconds*")  # a busy machine is not a defect
LONGEST = 12.0  # seconds; tests above are left out


def on_tests(body: Callable[[list[pytest.Item]], None]) -> None:
    """Collects the tests, and calls body with them where pytest would run them."""

    class Loop:
        @pytest.hookimpl(tryfirst=True)
        def pytest_runtestloop(self, session: pytest.Session) -> bool:
            body(session.items)
            return True

    files = [f"tests/test_{name}.py" for name in FILES]
    pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", *files], plugins=[Loop()])


@dataclass(frozen=True)
class Tried:
    """A test without a change: how it ended, what it takes, and which lines it runs."""

    passed: bool
    seconds: float
    lines: dict[str, list[int]]


def without_change(items: Sequence[pytest.Item], paths: Sequence[str], kept: Path, version: str) -> dict[str, Tried]:
    """{id of a test: Tried}; from the file where an earlier sweep of the same sources has kept it."""
    found: dict[str, Tried] = {}
    if kept.exists() and (known := json.loads(kept.read_text()))["version"] == version:
        found = {name: Tried(**row) for name, row in known["tests"].items()}
    for item in items:
        if item.nodeid in found or any(fnmatch(item.name, p) for p in TIMED):
            continue
        with in_child(lambda stream, item=item: _traced(item, paths, stream), 120.0) as rows:
            found[item.nodeid] = Tried(**rows[0]) if rows else Tried(False, 0.0, {})
        if not found[item.nodeid].passed:
            print(f"left out: {item.nodeid}", file=sys.stderr, flush=True)
        kept.write_text(json.dumps({"version": version, "tests": {k: vars(v) for k, v in found.items()}}))
    return found


def noticed(
    change: Change,
    source: Source,
    everywhere: bool,
    items: Sequence[pytest.Item],
    known: dict[str, Tried],
    limit: float,
) -> tuple[str, int]:
    """(the first test that fails with a change, or "", and how many were run). everywhere: the change is of a constant.

    limit: seconds in which a test must end, and within which no further one is begun: a change that outlasts many tests
    survives, one that a test does not end with hangs.
    """

    def concerned(one: Tried) -> bool:
        lines = set(one.lines.get(source.path, ()))
        return one.passed and one.seconds < LONGEST and bool(lines if everywhere else lines & set(change.lines))

    some = [i for i in items if i.nodeid in known and concerned(known[i.nodeid])]
    some.sort(key=lambda i: known[i.nodeid].seconds)
    with in_child(lambda stream: _until_one_fails(change, source, some, stream, limit), limit) as rows:
        names = [row["test"] for row in rows]
        failed = next((row["test"] for row in rows if not row["passed"]), "")
    if not failed and (not rows or rows[-1]["test"] != "end"):  # it hangs, or it killed the process
        failed = (next((i.nodeid for i in some if i.nodeid not in names), "") + " (no end)") if some else ""
    return failed, max(0, len(rows) - 1)


@contextlib.contextmanager
def in_child(body: Callable[[Any], None], limit: float) -> Iterator[list[dict[str, Any]]]:
    """Runs body(stream) in a forked process, and those that it forks, for at most `limit` seconds: the lines of JSON that
    it wrote."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setpgid(0, 0)
            os.close(reading)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, limit)
            pools.multiprocessing = _Forking()
            with os.fdopen(writing, "w") as stream:
                body(stream)
                stream.flush()
        finally:
            os.killpg(0, signal.SIGKILL)
    os.close(writing)
    try:
        text = b""
        while part := os.read(reading, 1 << 16):
            text += part
        lines = text.decode().splitlines()
        yield [json.loads(line) for line in lines]
    finally:
        os.close(reading)
        os.waitpid(child, 0)


class _Forking:
    """`multiprocessing` for the pool of processes, with fork in place of spawn. found, folder: the lines that this process
    has run, and where ranks write those that they ran."""

    def __init__(self, found: dict[str, set[int]] | None = None, folder: str = ""):
        self.context, self.connection = multiprocessing.get_context("fork"), multiprocessing.connection
        self.found, self.folder = found, folder

    def get_context(self, _: str) -> _Forking:
        return self

    def get_all_start_methods(self) -> list[str]:
        return ["fork"]

    def Pipe(self) -> Any:
        return self.context.Pipe()

    def Process(self, *, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> Any:
        def rank() -> None:
            try:
                target(*args)
            finally:
                if self.found is not None:
                    rows = {p: sorted(some) for p, some in self.found.items()}
                    Path(self.folder, f"{os.getpid()}.json").write_text(json.dumps(rows))

        return self.context.Process(target=rank, daemon=daemon)


def _passes(item: pytest.Item) -> tuple[bool, bool]:
    """(does no part of a test fail, was it run?)"""
    reports = runtestprotocol(item, log=False, nextitem=None)
    return not any(r.failed for r in reports), not any(r.skipped for r in reports)


def _traced(item: pytest.Item, paths: Sequence[str], stream: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        with lines_run(paths) as found:
            pools.multiprocessing = _Forking(found, folder)
            good, run = _passes(item)
        seconds = time.monotonic() - start
        for pool in list(pools._pools.values()):
            pool.close()
        for file in Path(folder).glob("*.json"):
            for path, some in json.loads(file.read_text()).items():
                found[path].update(some)
    rows = {p: sorted(some) for p, some in found.items() if some}
    print(json.dumps({"passed": good and run, "seconds": seconds, "lines": rows}), file=stream)


def _until_one_fails(change: Change, source: Source, items: Sequence[pytest.Item], stream: Any, limit: float) -> None:
    with_change(change, source)
    start = time.monotonic()
    for item in items:
        if time.monotonic() - start > limit:
            break
        signal.setitimer(signal.ITIMER_REAL, limit)
        good, _ = _passes(item)
        print(json.dumps({"test": item.nodeid, "passed": good}), file=stream, flush=True)
        if not good:
            return
    print(json.dumps({"test": "end", "passed": True}), file=stream, flush=True)
