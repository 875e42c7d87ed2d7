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

from tests.mutants.first import FIRST, First, first_caught
from tests.mutants.table import MUTANTS


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
