"""The automatic sweep: every collective, arrow, divisor, offset and choice of axis of the core's sharding is changed, one
at a time, and the layouts that are drawn by default must notice.

    python -m tests.mutation_sweep --jobs 2              # all; goes on where it was stopped
    python -m tests.mutation_sweep --share 0.1           # every tenth
    python -m tests.mutation_sweep --conditions          # and every condition, flag and conversion
    python -m tests.mutation_sweep --retry --limit 300   # once more what survived without a reason
    python -m tests.mutation_sweep --no-tests            # by layouts alone
    python -m tests.mutation_sweep --report              # what is known so far
    python -m tests.mutation_sweep --list --modules fmegatron.zigzag

A change is made in the syntax tree of one function (tests/mutants/changes.py). It is caught if a layout reports a finite
difference, or raises, or gives what is not finite; or if the collectives that run (kind, axes, elements), or where a tree
rests, are others than before: these the ledger's closed forms hold. Each is tried in a process of its own on the layouts
that run its lines, those first that run most lines a second: what `fmegatron verify llama --world 8` draws, then some of
what it draws for families with windows, soft caps, norms over heads and learned positions. What survives is listed with
the reason that tests/mutants/survivors.py knows; the exit code is 1 if less than 95 % of what is neither equivalent nor
unreachable are caught. What no layout runs, and no test notices, counts as a survivor too.

Sources are read once, when it begins, so that they may be edited meanwhile. Results go to a file outside of the
repository, one line of JSON each; those of a function whose source has changed since are tried again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from fmegatron.recording import record_collectives
from fmegatron.testing import Layout, compare
from fmegatron.testing.covering import Case, space
from fmegatron.testing.engines import run_on
from fmegatron.testing.models import find_model, variants
from tests.mutants import by_tests
from tests.mutants.catching import Verdict, drawn, judged, reference, verdict
from tests.mutants.changes import CONSTANTS, MODULES, Change, Source, changes, with_change
from tests.mutants.edits import forget
from tests.mutants.lines import lines_run
from tests.mutants.survivors import SURVIVORS

QUICK, SLOW = ("init", "gradients"), ("init", "adamw", "sgd")
# Layouts beside those that are drawn for llama: the first that are drawn for other families, and parts of unequal size.
FAMILIES = {"gemma3_text": 20, "gemma2": 8, "olmo2": 8, "gpt2": 8}
UNEQUAL = (
    Case("llama,mlp=25,vocab=101", Layout("dp=2,tp=2", sp=True, zero=3)),
    Case("llama,mlp=25,vocab=101,heads=8,kv_heads=2", Layout("tp=4", micro=2, mask="uneven")),
)

# -------------------------------------------------------------------------------------------------- which layouts run it


def lines_of(case: Case, paths: Sequence[str]) -> dict[str, set[int]]:
    """{path: numbers of the lines that a layout runs}."""
    reference(case, QUICK)
    forget()
    with lines_run(paths) as found:
        assert verdict(case, QUICK).kind == "equal", f"{case} is not equal without a change"
    return found


def layouts() -> tuple[list[Case], int]:
    """(the layouts, how many of them are drawn by default)."""
    cases = list(drawn())
    more = [c for name, n in FAMILIES.items() for c in list(space(variants(name), 8).cases(1, 0))[:n]]
    return [*cases, *more, *UNEQUAL], len(cases)


@dataclass(frozen=True)
class Bench:
    """The layouts, cheap ones that run many lines first, and what each of them runs and takes."""

    cases: list[Case]
    lines: list[dict[str, set[int]]]
    seconds: list[float]
    costs: list[Any]  # of a run without a change, see `cost_of`
    default: int  # of the layouts, the first so many are drawn by default

    @staticmethod
    def of(paths: Sequence[str], kept: Path, version: str) -> Bench:
        """Runs them all; which lines they run an earlier sweep of the same sources may have kept."""
        (cases, default), lines = layouts(), []
        if kept.exists() and (known := json.loads(kept.read_text()))["version"] == version:
            lines = [{p: set(some) for p, some in zip(paths, row, strict=True)} for row in known["lines"]]
        seconds, costs = [], []
        for n, case in enumerate(cases):
            if n == len(lines):
                lines.append(lines_of(case, paths))
                rows = [[sorted(row[p]) for p in paths] for row in lines]
                kept.write_text(json.dumps({"version": version, "lines": rows}))
            start = time.process_time()
            found, cost = with_cost(case, QUICK)
            seconds.append(time.process_time() - start)
            assert found.kind == "equal", f"{case} is not equal without a change: {found}"
            costs.append(cost)
            _say(f"layout {n + 1} of {len(cases)} without a change: {seconds[-1]:.1f} s")
        order: list[int] = []
        seen: set[tuple[str, int]] = set()
        for left in (list(range(default)), list(range(default, len(cases)))):
            while left:
                new = {n: {(p, i) for p, some in lines[n].items() for i in some} - seen for n in left}
                best = max(left, key=lambda n: (len(new[n]) + 1) / seconds[n])
                seen |= new[best]
                order.append(best)
                left.remove(best)
        return Bench(*([x[n] for n in order] for x in (cases, lines, seconds, costs)), default)

    @property
    def cheapest(self) -> list[int]:
        """Some layouts on which steps of optimizers are tried too."""
        return sorted(range(self.default), key=lambda n: self.seconds[n])[:12]

    def running(self, change: Change, path: str) -> list[int]:
        """The layouts that run a changed line, in order."""
        return [n for n, lines in enumerate(self.lines) if lines[path] & set(change.lines)]


def with_cost(case: Case, checks: tuple[str, ...]) -> tuple[Verdict, Any]:
    """`verdict`, and what it took: every collective, and where on each rank the parts of all values lie."""
    known = reference(case, checks)
    with record_collectives() as found:
        try:
            ranks = run_on("simulated", known.program, case.layout, known.job, known.inputs)
        except Exception as error:
            return Verdict("error", message=f"{type(error).__name__}: {error}".splitlines()[0]), None
    places = [{(what, n): piece.where for what in rank for n, piece in rank[what].items()} for rank in ranks]
    return judged(ranks, known.want), (Counter(found), places)


# ------------------------------------------------------------------------------------------------------------- the sweep


@dataclass
class Found:
    """What became of a change. status: "difference", "error", "not finite", "hangs", "ledger" (collectives or places at
    rest are others, no number is), "tests" (a test of the project fails, no layout does); "survives", "not run". default:
    was it a layout that is drawn by default? tests: how many tests were tried, -1 for none yet."""

    id: str
    text: str
    line: int
    status: str
    layout: str = ""
    what: str = ""
    tried: int = 0
    seconds: float = 0.0
    default: bool = True
    tests: int = -1

    @property
    def caught(self) -> bool:
        return self.status in ("difference", "error", "not finite", "hangs", "ledger", "tests")


def attempt(change: Change, source: Source, bench: Bench, limit: float) -> Found:
    """Tries a change in a process of its own, of at most `limit` seconds of CPU."""
    found = Found(change.id, change.text, change.line, "not run")
    running = bench.running(change, source.path)
    if change.function in CONSTANTS.get(source.name, ()):
        running = list(range(len(bench.cases)))
    if not running:
        return found
    start = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reading)
            _in_child(change, source, bench, running, limit, writing)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as stream:
        lines = [json.loads(line) for line in stream.read().splitlines()]
    _, status = os.waitpid(child, 0)
    found.seconds = round(time.monotonic() - start, 1)
    found.tried = len(lines)
    last = next((row for row in reversed(lines) if row["kind"] != "equal"), None)
    if last is not None:
        found.status, found.layout, found.what = last["kind"], last["layout"], last["what"]
        found.default = last["default"]
    elif os.WIFSIGNALED(status):
        hangs = os.WTERMSIG(status) == signal.SIGXCPU and len(lines) == 0
        found.status = "hangs" if hangs else "survives" if os.WTERMSIG(status) == signal.SIGXCPU else "error"
        found.what = f"signal {os.WTERMSIG(status)}"
    else:
        found.status = "survives"
    return found


def as_verified(case: Case) -> Verdict:
    """`verdict` as `fmegatron verify` comes to it: what one device computes, and which layouts are legal, is changed too."""
    try:
        result = compare(find_model(case.model), case.layout, checks=QUICK)
    except Exception as error:
        return Verdict("error", message=f"{type(error).__name__}: {error}".splitlines()[0])
    if result.ok:
        return Verdict("equal", result.worst)
    return Verdict("difference" if math.isfinite(result.worst.error) else "not finite", result.worst)


def _in_child(change: Change, source: Source, bench: Bench, running: Sequence[int], limit: float, writing: int) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + int(limit), used + int(limit) + 5))
    torch.set_num_threads(1)
    quick = [(n, QUICK) for n in running]
    slow = [(n, SLOW) for n in bench.cheapest if n in running][:3]
    with os.fdopen(writing, "w") as stream:
        try:
            with_change(change, source)
        except SyntaxError as error:
            print(json.dumps({"kind": "error", "layout": "", "what": str(error)}), file=stream, flush=True)
            return
        another_cost = None
        for number, (n, checks) in enumerate([*quick[:4], *slow[:1], *quick[4:], *slow[1:]]):
            if number >= 5 and another_cost:
                return
            case, cost = bench.cases[n], None
            if number == 0:
                one = as_verified(case)
            elif checks is QUICK:
                one, cost = with_cost(case, checks)
            else:
                one = verdict(case, checks)
            what = f"{one.worst.what} {one.worst.leaf} {one.worst.error:.1e}" if one.worst else one.message[:160]
            row = {"kind": one.kind, "layout": f"{case.layout} | {case.model}", "what": what}
            row["default"] = n < bench.default
            if not one.caught and cost is not None and cost != bench.costs[n]:
                row["kind"] = another_cost = "ledger"
                row["what"] = _shown(cost, bench.costs[n])
            print(json.dumps(row), file=stream, flush=True)
            if one.caught:
                return


def _shown(cost: Any, without: Any) -> str:
    """A difference of costs in words."""
    (found, places), (known, there) = cost, without
    for one, other, word in ((found, known, "more"), (known, found, "fewer")):
        if gone := one - other:
            (c, n) = next(iter(gone.items()))
            return f"{n} {word} {c.kind} over {'×'.join(c.axes)} of {c.elements} elements"
    rank = next(r for r, (a, b) in enumerate(zip(places, there, strict=True)) if a != b)
    odd = next(k for k in there[rank] if places[rank].get(k) != there[rank][k])
    return f"{' '.join(odd)} lies at {places[rank].get(odd)} and not {there[rank][odd]} on rank {rank}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation_sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=str(Path(tempfile.gettempdir()) / "fmegatron_mutation_sweep.jsonl"))
    parser.add_argument("--modules", nargs="*", default=list(MODULES), help="change these alone")
    parser.add_argument("--share", type=float, default=1.0, help="of the changes, spread evenly")
    parser.add_argument("--conditions", action="store_true", help="change conditions, flags and conversions too")
    parser.add_argument("--jobs", type=int, default=1, help="changes at a time")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of CPU for a change")
    parser.add_argument("--retry", action="store_true", help="try again what survived and is not equivalent")
    parser.add_argument(
        "--no-tests", action="store_true", help="do not ask the project's tests where no layout notices"
    )
    parser.add_argument("--list", action="store_true", help="print the changes and stop")
    parser.add_argument("--report", action="store_true", help="print what is known and stop")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sources = {name: Source.of(name) for name in given.modules}
    every = [(c, sources[name]) for name in sources for c in changes(sources[name], given.conditions)]
    step = 1 / given.share
    chosen = [every[int(i * step)] for i in range(int(len(every) * given.share))]
    if given.list:
        for change, _ in chosen:
            print(f"{change.line:5} {change.id}")
        print(f"{len(chosen)} changes")
        return 0
    whole = [Source.of(name) for name in MODULES]
    version = hashlib.sha256("".join(s.text for s in whole).encode()).hexdigest()[:16]
    out, known = Path(given.out), _known(Path(given.out), [c for c, _ in every])
    todo = [pair for pair in chosen if pair[0].id not in known]
    if given.retry:
        todo = [p for p in chosen if (f := known.get(p[0].id)) and f.status == "survives" and not _equivalent(f)]
    if todo and not given.report:
        bench = Bench.of([s.path for s in whole], out.with_suffix(".lines.json"), version)
        for case in bench.cases:
            reference(case, QUICK)
        for n in bench.cheapest:
            reference(bench.cases[n], SLOW)
        _in_jobs(todo, lambda c, s: attempt(c, s, bench, given.limit), given.jobs, out)
        known = _known(out, [c for c, _ in every])
    left = [(c, s) for c, s in chosen if (f := known.get(c.id)) and not f.caught and f.tests < 0 and not _equivalent(f)]
    if left and not given.report and not given.no_tests:
        _on_tests(left, known, [s.path for s in whole], given.jobs, out, version)
        known = _known(out, [c for c, _ in every])
    return report([known[c.id] for c, _ in chosen if c.id in known], len(chosen))


Pair = tuple[Change, Source]


def _in_jobs(todo: Sequence[Pair], tried: Callable[[Change, Source], Found], jobs: int, out: Path) -> None:
    """Tries all of them, so many at a time; results go to the file one by one."""
    workers = []
    for job in range(jobs):
        if not (worker := os.fork()):
            status = 1
            try:
                with out.open("a") as stream:
                    for n, (change, source) in enumerate(todo[job::jobs], 1):
                        found = tried(change, source)
                        print(json.dumps({"version": change.version, **asdict(found)}), file=stream, flush=True)
                        if not found.caught or n % 50 == 0:
                            _say(f"{n} of {len(todo[job::jobs])}: {found.status} {found.id} ({found.seconds} s)")
                status = 0
            finally:
                os._exit(status)
        workers.append(worker)
    for worker in workers:
        os.waitpid(worker, 0)


def _on_tests(
    left: Sequence[Pair], known: dict[str, Found], paths: Sequence[str], jobs: int, out: Path, version: str
) -> None:
    """What no layout noticed, on the tests."""

    def body(items: Sequence[Any]) -> None:
        tests = by_tests.without_change(items, paths, out.with_suffix(".tests.json"), version)

        def tried(change: Change, source: Source) -> Found:
            start, everywhere = time.monotonic(), change.function in CONSTANTS.get(source.name, ())
            failed, number = by_tests.noticed(change, source, everywhere, items, tests, 60.0)
            found = replace(known[change.id], tests=number, seconds=round(time.monotonic() - start, 1))
            return replace(found, status="tests", what=failed) if failed else found

        _in_jobs(left, tried, jobs, out)

    by_tests.on_tests(body)


def _known(path: Path, every: Sequence[Change]) -> dict[str, Found]:
    """Results of functions whose source is what it was."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    now = {c.id: c.version for c in every}
    return {row["id"]: Found(**row) for row in rows if row.pop("version") == now.get(row["id"])}


def report(found: Sequence[Found], chosen: int) -> int:
    """Prints how many are caught and what survives; 1 if too few, or a survivor has no reason, else 0."""
    by_status = Counter(f.status for f in found)
    survivors = [f for f in found if not f.caught]
    reasons = {f.id: reason_for(f) for f in survivors}
    equivalent = [f for f in survivors if _equivalent(f)]
    for title, some in (
        ("equivalent or unreachable", equivalent),
        ("not run by any of the layouts", [f for f in survivors if f.status == "not run" and f not in equivalent]),
        ("survivors", [f for f in survivors if f.status != "not run" and f not in equivalent]),
    ):
        print(f"\n{title}: {len(some)}")
        for f in some:
            reason = reasons[f.id] or "NO REASON"
            print(f"  {f.id} (line {f.line}{f', {f.tried} tried' if f.tried else ''}){': ' if reason else ''}{reason}")
    caught = [f for f in found if f.caught]
    counted = len(caught) + len(survivors) - len(equivalent)
    share = len(caught) / max(1, counted)
    print(f"\n{len(found)} of {chosen} changes tried: " + ", ".join(f"{n} {s}" for s, n in by_status.most_common()))
    print(
        f"caught {len(caught)} of {counted} that are neither equivalent nor unreachable: {100 * share:.1f} %; of these "
        f"{sum(f.status == 'ledger' for f in caught)} by collectives or places at rest alone, "
        f"{sum(not f.default for f in caught)} by layouts of other families or of parts of unequal size"
    )
    return 0 if share >= 0.95 and all(reasons.values()) else 1


def _equivalent(found: Found) -> bool:
    """May it not be counted: can no number differ, or nothing reach it?"""
    return (reason_for(found) or "").startswith(("equivalent", "unreachable"))


def reason_for(found: Found) -> str | None:
    """Why a change cannot be seen, or is not; by the first pattern that fits its text, or its text with its number."""
    texts = found.text, found.id
    return next((why for p, why in SURVIVORS.items() if any(fnmatch(t, p.replace("[", "[[]")) for t in texts)), None)


if __name__ == "__main__":
    sys.exit(main())
