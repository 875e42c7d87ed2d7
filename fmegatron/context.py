"""What every block of a model may read besides its parameters and its input."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import optree
import torch

from fmegatron.random import Key
from fmegatron.sharding import Sharding
from fmegatron.tree import NAMESPACE

PADDING = -1  # the segment of what is no token: what fills up a row or a batch


@dataclass(frozen=True)
class Ctx:
    """The context of a block `f(params_of_one_layer, carry, ctx) -> carry`.

    sh: the mesh and the rules, which turn annotations into collectives; without a mesh it is plain mathematics.
    positions: global positions of the tokens, "seq" or "batch seq".
    segments: ids of the packed documents, "batch seq".
    layer: global index of the layer; `stack` sets it.
    key: random key; `stack` folds the layer's index into it.
    rows: global indices of the batch's rows, "batch", by which dropout draws its numbers; `accumulate` sets it.
    parts: of how many microbatches of the batch this is one, which what acts on a whole batch must know; `cut_batch` sets it.
    extras: any further tree.

    Its tensors need no gradient: a block is differentiated by its parameters and its input alone. As a pytree,
        tensors and the key are children; `sh`, `layer` and `parts` are part of the structure.
    """

    sh: Sharding = field(default_factory=Sharding)
    positions: torch.Tensor | None = None
    segments: torch.Tensor | None = None
    layer: int | None = None
    key: Key | None = None
    rows: torch.Tensor | None = None
    extras: Any = None
    parts: int = 1

    def replace(self, **changes: Any) -> Ctx:
        """A copy with some fields changed."""
        other = object.__new__(Ctx)  # without what makes a new one: this happens for every block
        other.__dict__.update(self.__dict__, **changes)
        return other

    def with_tape(self, tape: Any) -> Ctx:
        """A copy whose `sh` carries the tape of one run of a block; None takes it away."""
        return self if self.sh.tape is tape else self.replace(sh=self.sh.with_tape(tape))


CHILDREN = ("positions", "segments", "key", "rows", "extras")


def _flatten(ctx: Ctx) -> tuple[tuple, tuple, tuple]:
    return tuple(getattr(ctx, name) for name in CHILDREN), (ctx.sh, ctx.layer, ctx.parts), CHILDREN


def _unflatten(static: tuple, children: tuple) -> Ctx:
    sh, layer, parts = static
    return Ctx(sh=sh, layer=layer, parts=parts, **dict(zip(CHILDREN, children, strict=True)))


optree.register_pytree_node(Ctx, _flatten, _unflatten, namespace=NAMESPACE)  # type: ignore[arg-type, call-overload]
