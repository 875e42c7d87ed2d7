"""Which lines of some files a process runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def lines_run(paths: Sequence[str]) -> Iterator[dict[str, set[int]]]:
    """{path: numbers of the lines that this process runs inside}; a process forked inside has a copy of its own, to which
    it adds."""
    found: dict[str, set[int]] = {p: set() for p in paths}

    def lines(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            found[frame.f_code.co_filename].add(frame.f_lineno)
        return lines

    def calls(frame: Any, event: str, _: Any) -> Any:
        there = found.get(frame.f_code.co_filename)
        if there is None:
            return None
        there.add(frame.f_lineno)
        return lines

    sys.settrace(calls)
    try:
        yield found
    finally:
        sys.settrace(None)
