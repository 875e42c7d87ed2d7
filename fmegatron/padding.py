"""Batches whose rows or tokens do not divide by the ranks: filled up with what does not count.

    batch = shard_batch(batch, sh)          # a global batch -> this rank's part, of one shape on every rank

Rows are added behind the last one and tokens behind the last one of each row, with labels that have no loss. Under a
causal mask no token sees them; `segments`, where a batch has them, put them into a document of their own. What mixes
tokens otherwise, as experts do, reads `real`[batch seq], which tells them apart in a batch that is filled up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.errors import UserError
from fmegatron.rules import base
from fmegatron.sharding import Sharding

# What fills up each tensor of a batch: no loss, no document.
FILLING: dict[str, Any] = {
    "tokens": 0,
    "labels": -100,
    "mask": 0,
    "segments": -1,
    "positions": 0,
    "real": False,
    "routing": 0,
}


def divisible_size(n: int, dim: str, sh: Sharding) -> int:
    """The least size, n or more, that divides by the axes of a dim in every layout that the rules have for it."""
    if sh.mesh is None:
        return n
    of = [sh.mesh.size(sh.axes(name)) for name in sh.rules.compute if base(name) == dim]
    if dim in sh.rules.zigzag and sh.axes(dim):
        of.append(2 * sh.mesh.size(sh.mesh.expand(sh.rules.zigzag[dim])))
    each = math.lcm(*of)
    return -(-n // each) * each


def marked(batch: Mapping[str, Any], rows: int, seq: int, sh: Sharding) -> dict[str, Any]:
    """The batch, global or local, with `real`, true everywhere so far, if one of so many rows and tokens is filled up."""
    filled = divisible_size(rows, "batch", sh) > rows or divisible_size(seq, "seq", sh) > seq
    return {"real": torch.ones_like(batch["tokens"], dtype=torch.bool), **batch} if filled else dict(batch)


def shard_batch(
    batch: Mapping[str, Tensor],
    sh: Sharding,
    *,
    dims: Mapping[str, str] | None = None,
    filling: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """A global batch -> this rank's part of it, filled up where rows or tokens do not divide.

    dims: the dims of each tensor, by default "batch seq" for two and "batch" for one. filling: values that fill up
        tensors beside those of `FILLING`, which must not count in the loss.

    Raises UserError for a tensor that would have to be filled up without a value for it.
    """
    values, found = {**FILLING, **(filling or {})}, {}
    if "tokens" in batch and (dims or {}).get("tokens", "batch seq") == "batch seq":
        rows, seq = batch["tokens"].shape
        batch = marked(batch, rows, seq, sh)
    for name, x in batch.items():
        if not tree.is_tensor(x) or x.ndim == 0:
            found[name] = x
            continue
        text = (dims or {}).get(name) or {1: "batch", 2: "batch seq"}.get(x.ndim, "")
        if len(text.split()) != x.ndim:
            raise UserError(f"the batch's {name!r} of shape {tuple(x.shape)} needs its dims: give dims={{{name!r}: …}}")
        for d, dim in enumerate(text.split()):
            more = divisible_size(x.shape[d], base(dim), sh) - x.shape[d]
            if not more:
                continue
            if name not in values:
                raise UserError(
                    f"dim {dim!r} of the batch's {name!r}, of size {x.shape[d]}, does not divide by its mesh axes "
                    f"{', '.join(sh.axes(dim))}: give a size that divides, or filling={{{name!r}: value}} with what does "
                    "not count in the loss"
                )
            shape = [*x.shape[:d], more, *x.shape[d + 1 :]]
            x = torch.cat([x, torch.full(shape, values[name], dtype=x.dtype, device=x.device)], d)
        found[name] = sh.shard(x, text)
    return found


def held_positions(n: int, dim: str, sh: Sharding) -> tuple[Tensor, Tensor]:
    """(the positions of a dim of size n that this rank holds, which of them only fill it up): for a loader that reads
    these alone. Those that fill up read the last position, to be overwritten by `overwritten`."""
    at = sh.index(dim, divisible_size(n, dim, sh), device="cpu")
    return at.clamp(max=n - 1), at >= n


def overwritten(batch: Mapping[str, Tensor], rows: Tensor | None, columns: Tensor | None) -> dict[str, Tensor]:
    """A local batch, tensors[batch seq], with what only fills it up (bool[batch], bool[seq]) put in."""
    out = dict(batch)
    for d, there in enumerate((rows, columns)):
        if there is not None and bool(there.any()):
            for name, x in out.items():
                out[name] = x.index_fill(d, there.nonzero()[:, 0], FILLING[name])
    return out
