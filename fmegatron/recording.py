"""A record of the collectives that run: kind, axes, elements. The communication ledger of `fmegatron.testing` is made of it.

    with record_collectives() as found:
        step(state, batch)

Only this process is recorded. In a simulation, where all ranks are one program, each collective counts once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor

_open: list[list[Collective]] = []


@dataclass(frozen=True)
class Collective:
    """One collective as one rank takes part in it.

    kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", or "exchange" with a neighbour in a ring. axes: mesh
        axes, in rank order. ranks: members. elements: of the tensor that each rank puts in.
    """

    kind: str
    axes: tuple[str, ...]
    ranks: int
    elements: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of the whole buffer, as bandwidth tests count it: what an all-gather gives, what any other kind is given."""
        return self.elements * self.dtype.itemsize * (self.ranks if self.kind == "all-gather" else 1)

    @property
    def sent(self) -> int:
        """Bytes that each rank sends: in a ring (n - 1)/n of the buffer, twice that for an all-reduce; all of it in an
        exchange."""
        if self.kind == "exchange":
            return self.bytes
        return (2 if self.kind == "all-reduce" else 1) * self.bytes * (self.ranks - 1) // self.ranks


def note_collective(kind: str, axes: Sequence[str], ranks: int, x: torch.Tensor) -> None:
    """Called where a collective is issued; does nothing unless a record is open, nothing in a compiled graph
    (`fmegatron.testing.ledger` counts those), and nothing where shapes alone are asked for."""
    if not torch.compiler.is_compiling() and _open and not isinstance(x, FakeTensor):
        note(Collective(kind, tuple(axes), ranks, x.numel(), x.dtype))


def note(collective: Collective) -> None:
    """Adds a collective to the open records."""
    for record in _open:
        record.append(collective)


def by_axes(found: Iterable[Collective]) -> dict[tuple[str, ...], list[Collective]]:
    """Collectives by the axes they go over, in the order in which these come first."""
    groups: dict[tuple[str, ...], list[Collective]] = {}
    for c in found:
        groups.setdefault(c.axes, []).append(c)
    return groups


@contextlib.contextmanager
def record_collectives() -> Iterator[list[Collective]]:
    """The list to which every collective of the body is added, whatever thread issues it."""
    found: list[Collective] = []
    _open.append(found)
    try:
        yield found
    finally:
        _open[:] = [record for record in _open if record is not found]
