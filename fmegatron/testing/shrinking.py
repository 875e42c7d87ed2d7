"""The smallest layout that still fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fmegatron.testing.layout import Layout
from fmegatron.testing.program import program_of


def shrink(model: Any, layout: Layout, fails: Callable[[Layout], bool], *, tries: int = 60) -> Layout:
    """A simpler layout for which `fails` is true, such that none of its `simpler` ones fails; or the best found after
    so many tries. Legal layouts only."""
    program, seen, left = program_of(model), {layout}, tries
    while True:
        for simpler in layout.simpler():
            if simpler in seen or program.why_illegal(simpler) is not None:
                continue
            if left == 0:
                return layout
            seen.add(simpler)
            left -= 1
            if fails(simpler):
                layout = simpler
                break
        else:
            return layout
