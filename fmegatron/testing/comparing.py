"""Are the values of all ranks those of one device? By which bound, and if not, which leaf is furthest off?

In float64 the bound is ‖g - r‖ <= 1e-10 · max(‖r‖, floor), floor = 1e-3 · ‖all‖ ÷ √leaves over the leaves of one tree:
some leaves have a zero gradient (a key's bias without rotary positions), which is pure rounding.

In a lower precision p nothing is guessed. One device computes in float64 (r) and in p (q), so that ‖q - r‖ is what the
roundings of p do to this leaf in this program. A layout makes the same roundings, and others where a sum is cut into n
parts of which each is rounded: by the probabilistic model of rounding (Higham & Mary 2019) independent errors add as
their root, at most √n times one. So ‖g - r‖ <= FACTOR · √(1 + n) · max(‖q - r‖, share · max(‖r‖, floor)), where n is
ranks × microbatches, share = ‖q - r‖ ÷ ‖r‖ over the whole tree (the error of one leaf may be small by luck; the tree's
is a mean over many), and FACTOR = 3 allows for three standard deviations. Where a tree is but a few numbers (the loss,
norms), its mean may be small by luck as well: there the share is at least one rounding, the eps of p.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fmegatron.testing.running import Outcome, Piece

FLOAT64_BOUND = 1e-10
FLOOR = 1e-3
FACTOR = 3.0
FEW = 16  # numbers of a tree, whose mean error is one of a few samples
TINY = 1e-300
EVERYWHERE = ("loss", "norms")  # what every rank has, whatever stages it holds


@dataclass(frozen=True)
class Difference:
    """How far one leaf is off. error: relative, ‖g - r‖ ÷ max(‖r‖, floor); allowed: by the bound, in the same unit. dims:
    those of a parameter, by its spec."""

    what: str
    leaf: str
    error: float
    allowed: float
    placements: str = ""
    shape: tuple[int, ...] = ()
    rank: int = 0
    dims: str = ""

    @property
    def share(self) -> float:
        """Of what is allowed; over 1 is a failure."""
        return self.error / self.allowed if self.allowed else math.inf if self.error else 0.0

    def __str__(self) -> str:
        names = self.dims.split()
        sizes = [f"{n} {size}" for n, size in zip(names, self.shape, strict=True)] if names else map(str, self.shape)
        where = f" {' × '.join(sizes)} at ({self.placements})" if self.placements else ""
        return (
            f"{self.what} {self.leaf}{where}: off by {self.error:.1e} on rank {self.rank}, allowed {self.allowed:.1e}"
        )


def differences(
    ranks: Sequence[Outcome],
    want: Outcome,
    *,
    low: Outcome | None = None,
    parts: int = 1,
    dtype: torch.dtype = torch.float32,
    dims: Mapping[str, str] | None = None,
    stages: bool = False,
) -> list[Difference]:
    """The difference of every leaf. want: of one device in float64. low: of one device in the ranks' precision, for the
    bound of a lower precision; parts: into how many a sum may be cut; dtype: in which the ranks compute. dims:
    {parameter: its dims}, for messages. stages: each rank has the parameters of its stages of a pipeline alone, and all
    of them together must have every parameter whole."""
    found, dims = [], dims or {}
    for what, leaves in want.items():
        floor = FLOOR * _norm([p.value for p in leaves.values()]) / math.sqrt(max(1, len(leaves)))
        scales = {n: max(_norm([p.value]), floor, TINY) for n, p in leaves.items()}
        allowed = dict.fromkeys(leaves, FLOAT64_BOUND)
        if low is not None:
            allowed = _allowed(leaves, low[what], scales, parts, dtype)
        for name, piece in leaves.items():
            pieces = [outcome[what].get(name) for outcome in ranks]
            error, rank = _off(pieces, piece.value.double(), some=stages and what not in EVERYWHERE)
            mine = ranks[rank][what].get(name)
            shown = mine.placements if mine else ""
            shape = tuple(piece.value.shape)
            named = dims.get(name, "") if len(dims.get(name, "").split()) == len(shape) else ""
            found.append(Difference(what, name, error / scales[name], allowed[name], shown, shape, rank, named))
    return found


def _allowed(
    want: dict[str, Piece], low: dict[str, Piece], scales: dict[str, float], parts: int, dtype: torch.dtype
) -> dict[str, float]:
    errors = {n: _norm([low[n].value.double() - p.value.double()]) for n, p in want.items()}
    whole = math.sqrt(sum(e * e for e in errors.values())) / max(_norm([p.value for p in want.values()]), TINY)
    grow = FACTOR * math.sqrt(1 + parts)
    few = sum(p.value.numel() for p in want.values()) < FEW
    least = torch.finfo(dtype if few else torch.float32).eps
    return {n: grow * max(errors[n] / scales[n], whole, least) for n in want}


def _off(pieces: Sequence[Piece | None], want: Tensor, *, some: bool = False) -> tuple[float, int]:
    """(‖g - r‖ of the whole leaf, the rank that is furthest off). Of replicas the worst counts; a value that is not
    finite, has another shape or is missing is infinitely far off. some: a rank may lack it, if others have it whole."""
    if some and sum(math.prod(n for _, n in where) for where in {p.where for p in pieces if p}) < want.numel():
        return math.inf, 0
    worst: dict[tuple, float] = {}
    off, rank = -1.0, 0
    for r, piece in enumerate(pieces):
        if some and piece is None:
            continue
        error = math.inf
        if piece is not None:
            theirs = want
            for d, (start, n) in enumerate(piece.where):
                theirs = theirs.narrow(d, start, n)
            if theirs.shape == piece.value.shape:
                error = float((piece.value.double() - theirs).norm())
                error = error if math.isfinite(error) else math.inf
        if error > off:
            off, rank = error, r
        where = piece.where if piece is not None else ()
        worst[where] = max(worst.get(where, 0.0), error)
    return math.sqrt(sum(e * e for e in worst.values())), rank


def _norm(values: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(v.double().square().sum()) for v in values))


def unequal(ranks: Sequence[Outcome], one: str, other: str) -> str | None:
    """The first leaf whose values under two names are not bitwise equal on some rank."""
    for r, outcome in enumerate(ranks):
        for name, piece in outcome[one].items():
            if not torch.equal(piece.value, outcome[other][name].value):
                return f"{other} {name} on rank {r}"
    return None
