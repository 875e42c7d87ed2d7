"""What a rank communicates in a step, to the byte: collectives of the traced parts, and of parameters and gradients by their arrows.

    entries(model, setting)         # as `fmegatron.testing.ledger` counts them when the step runs

Of a mixture of experts bytes are those of an even load, where the program itself decides by values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fmegatron.errors import UserError
from fmegatron.plan.rank import Model, Setting
from fmegatron.recording import Collective
from fmegatron.sharding import Sharding
from fmegatron.spec import Param
from fmegatron.testing.ledger import Entry, summed_up
from fmegatron.tree import leaves


def collectives(model: Model, setting: Setting) -> Counter[Collective]:
    """Of a step of a layout without a pipeline: forward, backward, reduction and gather of parameters, and the sums of losses, weights
    and norms. Raises UserError for a pipeline, whose stages differ."""
    layout, sh = setting.layout, model.sharding(setting)
    if layout.pipelined:
        raise UserError(
            f"layout {layout}: what a stage of a pipeline communicates is not counted as one step: leave pp out"
        )
    found: Counter[Collective] = Counter()
    if sh.mesh is None or sh.mesh.world == 1:
        return found
    for rows in _microbatches(setting):
        parts: list[tuple[str | int, int]] = [("embed", 1), ("head", 1), *Counter(model.kinds).items()]
        for part, times in parts:
            trace = model.trace(setting, part, rows)
            for work in (trace.forward, trace.backward):
                for c, n in work.collectives.items():
                    found[c] += n * times
    micro = layout.micro
    for key, params, times, again in _groups(model):

        def add(what: str, n: int) -> None:
            for c, count in model.moves(sh, key, params, what).items():  # noqa: B023
                found[c] += count * n * times  # noqa: B023

        add("enter", micro * again)
        add("leave", micro)
        add("settle", micro if layout.zero == 2 else 1)
        add("return", 1)
    found.update(_sums(model, setting, sh))
    return found


def entries(model: Model, setting: Setting) -> list[Entry]:
    """The same, of one kind and group together, the most bytes first."""
    sh = model.sharding(setting)
    return [] if sh.mesh is None else summed_up(list(collectives(model, setting).elements()), sh.mesh)


def _microbatches(setting: Setting) -> list[int]:
    """Rows of each microbatch on a rank, as evenly as they go."""
    each, more = divmod(setting.rank_rows, setting.layout.micro)
    return [each + (n < more) for n in range(setting.layout.micro)]


def _groups(model: Model) -> Iterator[tuple[Any, list[Param], int, int]]:
    """(key, parameters, how many such, how often in a microbatch they are gathered): a layer's twice."""
    for kind, n in Counter(model.kinds).items():
        yield ("layer", kind), leaves(model.spec["layers"][kind]), n, 2
    yield ("front",), [p for name in model.ends.front for p in leaves(model.spec[name])], 1, 1
    back = [p for name in model.ends.back if name not in model.ends.front for p in leaves(model.spec[name])]
    yield ("back",), back, 1, 1


def _sums(model: Model, setting: Setting, sh: Sharding) -> Counter[Collective]:
    """Small ones: weights and sums of the loss, and the norms of gradients and parameters."""
    found = model.sums(setting)
    params = leaves(model.spec)
    wide = torch.float64 if sh.precision.params == torch.float64 else torch.float32
    for tree in ("optimizer" if setting.layout.zero in (1, 2) else "params", "params"):
        found.update(_norm(sh, params, tree, wide))
    return found


def _norm(sh: Sharding, params: Iterable[Param], tree: str, dtype: torch.dtype) -> list[Collective]:
    """The sums of a global norm: a mesh dim after the other, of as many numbers as there are layouts that it cuts."""
    assert sh.mesh is not None
    cuts = set()
    for p in params:
        placed = zip(sh.mesh.order, sh.stored_placements(p, tree), strict=True)
        cuts.add(frozenset(a for a, x in placed if sh.mesh.sizes[a] > 1 and not x.is_replicate()))
    counts = Counter(a for cut in cuts for a in cut)
    return [Collective("all-reduce", (a,), sh.mesh.sizes[a], n, dtype) for a, n in counts.items()]
