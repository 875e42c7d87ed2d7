"""Experts padded to their capacity: each works on as many places as it may take choices at most, filled or not.

    y = dispatched(mlp_experts("swiglu", batched=True), x, routed, leaves, sh=sh, backend="padded")

Rows are [expert place embed], a place without a token being zeros of weight 0, so that an expert's product is one of a batch
of equal products, every message has one size, and all shapes are known before anything is routed: the host never waits
(nor where experts lie on several ranks), and a compiler or a CUDA graph sees static shapes. It costs the products of empty
places (Lepikhin et al., GShard, arXiv 2006.16668; Megatron-LM's drop-and-pad).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fmegatron.exchange import Splits, exchange_beside, exchange_several
from fmegatron.function import apply_function
from fmegatron.kernels.moe import gather_rows, sort_by_expert, sum_choices
from fmegatron.tape import Tape


def by_places(
    experts: Callable[[Tensor, Tensor, Tensor], Tensor],
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    places: int,
    ranks: Any,
    *,
    early: Callable[[], None] | None = None,
) -> Tensor:
    """x[token embed], chosen and weights[token choice] -> [token embed].

    experts(rows[row embed], weights[row], ends[expert]): rows are `places` for each expert and each rank from which they come.
    places: how many choices of these tokens an expert gets at most. ranks: who holds which experts (see
        `fmegatron.parallel.dispatch`). early: called while rows are on their way, where they can be left alone for that.
    """
    choices, served = chosen.shape[1], ranks.travelling * ranks.each
    keys = ranks.key(chosen).flatten()
    _, inverse, ends = sort_by_expert(keys, served)
    starts = torch.cat([ends.new_zeros(1), ends])  # the last for choices that are none
    total = served * places
    slot = torch.where(keys < served, keys * places + inverse - starts[keys], total)  # of each choice
    order = torch.full((total + 1,), -1, dtype=torch.int32, device=x.device)
    order = order.scatter(0, slot, torch.arange(len(keys), dtype=torch.int32, device=x.device))[:-1]
    slot = slot.masked_fill(slot == total, -1).to(torch.int32)
    taken = gather_rows(x, order, slot, choices)
    scales = gather_rows(weights.reshape(-1, 1), order, slot, 1)
    mesh, sharing = ranks.sh.mesh, ranks.sh.mesh.size(ranks.parts) if ranks.parts else 1
    if ranks.travelled:
        splits = _even(ranks.each * places, ranks.travelling, mesh)
        came = exchange_beside([taken, scales], mesh, ranks.travelled, splits, early)
        taken, scales = (_turned(t, ranks.travelling, ranks.each) for t in came)
    if ranks.parts:  # every rank that holds a part of these experts needs the rows of all of them
        among = _even(total, sharing, mesh)
        came = exchange_several([t.repeat(sharing, 1) for t in (taken, scales)], mesh, ranks.parts, among)
        taken, scales = (_turned(t, sharing, ranks.each) for t in came)
    each = taken.shape[0] // ranks.each
    ends = torch.arange(1, ranks.each + 1, dtype=torch.int32, device=x.device) * each
    y = experts(taken, scales[:, 0], ends)
    if ranks.parts:  # summands of each row, from all that hold a part of its expert
        (y,) = exchange_several([_turned(y, ranks.each, sharing)], mesh, ranks.parts, among)
        y = y.unflatten(0, (sharing, -1)).sum(0)
    if ranks.travelled:
        (y,) = exchange_several([_turned(y, ranks.each, ranks.travelling)], mesh, ranks.travelled, splits)
    return sum_choices(y, order, slot, choices)


def batched_product(x: Tensor, w: Tensor, *, tape: Tape | None = None, name: str = "dot") -> Tensor:
    """x[row in] with its rows in groups of one size, w[group in out …] -> [row out …]: each group's rows times the group's matrix.

    tape, name: as for `fmegatron.product.product`; the matrices can be tapped.
    """
    groups, shape = w.shape[0], w.shape[2:]
    x = x.unflatten(0, (groups, -1))
    if tape is None:
        y = apply_function(Batched, x, w.flatten(2), None)
    else:
        w, saved = tape.enter(name, w)
        y = apply_function(Batched, x, w.flatten(2), None if saved is None else saved[0])
        (y,) = tape.leave(name, [y], [x], lambda x, g: torch.bmm(x.mT, g).unflatten(-1, shape))
    return y.flatten(0, 1).unflatten(-1, shape)


class Batched(Function):
    """(x[group row in], w[group in out], saved) -> the products; given these as `saved`, only the graph is made."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, saved: Tensor | None) -> Tensor:
        return torch.bmm(x, w) if saved is None else saved.view_as(saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        x, w, _ = inputs
        by_x, by_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if by_w else None, w if by_x else None)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        x, w = ctx.saved_tensors
        by_x, by_w = ctx.needs_input_grad[:2]
        gx = apply_function(Batched, g, w.mT, None) if by_x else None
        return gx, apply_function(Batched, x.mT, g, None) if by_w else None, None


def _even(rows: int, ranks: int, mesh: Any) -> Splits:
    """So many rows from each rank to each."""
    sizes = ((rows,) * ranks,) * (mesh.world if mesh.simulated else 1)
    return Splits(sizes, sizes)


def _turned(rows: Tensor, outer: int, inner: int) -> Tensor:
    """rows[(outer inner place) …] -> [(inner outer place) …]."""
    return rows.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)
