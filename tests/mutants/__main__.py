"""`python -m tests.mutants`: each mutant, the first layout that catches it, and the leaf that is furthest off.

Layouts are those of `fmegatron verify llama --world 8`, in their order, with its checks. Exit code 1 if one survives,
is caught by an exception or a value that is not finite, or changes what one device computes.

    python -m tests.mutants [--write] [--jobs N] [words of a name …]

--write: put what is found into first_layouts.json, by which tests/test_mutants.py runs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from tests.mutants.catching import checks_of, drawn, on_one_device, verdict
from tests.mutants.first import FIRST, First
from tests.mutants.table import MUTANTS


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="of the names of mutants; none: all of them")
    parser.add_argument("--write", action="store_true", help="put what is found into first_layouts.json")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, each in a process")
    given = parser.parse_args(arguments)
    names = [n for n in MUTANTS if all(w in n for w in given.words)]
    width = max(len(n) for n in names)
    print(f"{'mutant':{width}}   #  first failing layout, model: worst leaf, error", flush=True)
    survived, found = 0, {}
    for name, (first, problem) in zip(names, _each(names, given.jobs), strict=True):
        if first is None:
            survived += 1
            print(f"{name:{width}}   -  NOT KILLED: {problem}", flush=True)
            continue
        found[name] = first
        print(
            f"{name:{width}}  {first.number:2}  {first.layout}, {first.model}: {first.leaf}, {first.error:.1e}",
            flush=True,
        )
    print(f"{len(names) - survived} of {len(names)} mutants killed")
    if given.write:
        rows = {n: found.get(n) or FIRST.get(n) for n in MUTANTS}
        First.write({n: row for n, row in rows.items() if row is not None})
    return 1 if survived else 0


def _each(names: list[str], jobs: int) -> Any:
    if jobs == 1:
        yield from map(first_caught, names)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(first_caught, names)


if __name__ == "__main__":
    sys.exit(main())
