"""Tokens to their experts and back: `dispatch` in the functional sense, a pair of linear maps around what experts do.

    y = dispatched(experts, x, routed, leaves, sh=sh, backend="all-to-all")

A token's choices are rows. `experts(rows, weights, ends, leaves, sh=sh)` gets the rows of this rank's experts, one expert
behind the other, and gives as many rows, each multiplied by its weight; a token's result is the sum over its choices.
So identity experts, `rows * weights[:, None]`, with weights that sum to one, make the identity of the whole.

Backends, each the same function of the values:

    dense        every expert works on every token of the ranks that share it: the reference, which costs experts / top_k
                 times as much
    all-gather   tokens and choices are gathered over the experts' axes; each rank takes the rows that are for its experts, and
                 results are summed (reduce-scatter)
    all-to-all   rows travel to the rank of their expert and back, routed ones alone
    padded       the same with as many rows for every expert as it may take (see `fmegatron.parallel.padded`)

Rows and gathered tokens on their way leave time for another program, such as that of another microbatch (see `fmegatron.interleave`).

Where ranks hold parts of the width of the same experts (`emlp`), each of them needs a row. All-to-all and padded have two ways: the
tokens of these ranks are gathered, and each sends the rows of all of them; or each sends the rows of its own tokens, and what has
come is gathered among them (as in Megatron-LM), its results being summed on the way back. `_rows_first` says which.

Where no axis holds experts they move nothing, and sizes stay on the device. Over several ranks the number of rows is
read by the host once a layer (torch's all-to-all and any buffer of the right size want it).

Dims: tokens lie on `batch seq*`; batch', seq' are rows without the axes of `expert` and `emlp`, and those behind them; batch'',
seq'' without those of `emlp` alone; expert' has the axes of `expert` on which no token lies (tensor parallelism without sequence parallelism):
there every rank of them has all tokens, and takes those for its own experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fmegatron.collectives import Move, Step
from fmegatron.errors import UserError
from fmegatron.exchange import Splits, exchange_beside, exchange_counts, exchange_rows, exchange_several
from fmegatron.function import apply_function
from fmegatron.kernels.moe import gather_rows, sort_by_expert, sum_choices
from fmegatron.layout import apart_among_experts, axes_of
from fmegatron.parallel.padded import by_places
from fmegatron.parallel.routing import Routed
from fmegatron.simulation import lift, on_each_rank, per_rank

Backend = Literal["dense", "all-gather", "all-to-all", "padded"]
BACKENDS = ("dense", "all-gather", "all-to-all")
PADDED = "padded"  # needs a routing that bounds what an expert takes


def dispatched(
    experts: Callable[..., Tensor],
    x: Tensor,
    routed: Routed,
    leaves: Any,
    *,
    number: int,
    sh: Any,
    backend: Backend = "all-to-all",
    beside: Callable[[], Tensor] | None = None,
) -> Tensor:
    """What a token's experts make of it, summed over its choices: x[batch seq* embed] -> [batch seq* embed].

    experts(rows[row embed], weights[row], ends[expert], leaves, sh=sh) -> [row embed]: `ends`, int32, is the row behind each local
        expert's last one. Its result is a summand over the axes of `emlp`.
    routed: each token's experts and weights. leaves: what experts read, gathered. number: of all experts.
    beside: a function of what is added, [batch seq* embed], such as a shared expert. Where rows travel it is computed while they
        are on their way to their experts, and its backward while their gradients are on the way back.

    Raises UserError for a backend that is not known, and for "padded" without a bound of an expert's choices.
    """
    if backend not in (*BACKENDS, PADDED):
        raise UserError(f"dispatch={backend!r} is not known: use one of {', '.join((*BACKENDS, PADDED))}")
    if backend == PADDED and routed.places is None:
        raise UserError(
            'dispatch="padded" fills experts up to their capacity: give routing a capacity, or another dispatch'
        )
    whole, chosen, weights = backend in ("dense", "all-gather"), routed.experts, routed.weights
    each: float = chosen.shape[-1]  # rows of a token
    if backend == PADDED and routed.places is not None:
        each = routed.places * number / math.prod(chosen.shape[:2])
    rows_first = not whole and _rows_first(sh, each)
    tokens = "batch seq*" if rows_first else "batch' seq'" if whole else "batch'' seq''"
    partial = "expert emlp" if whole else "expert' emlp"
    # gathered tokens, as rows, leave time for another program; what goes along with them is on its way before
    way = sh.passing_turns() if whole else sh
    if not rows_first:
        chosen = sh(chosen, f"batch seq* choice -> {tokens} choice | {partial}")
        weights = sh(weights, f"batch seq* choice -> {tokens} choice | {partial}")
        x = way(x, f"batch seq* embed -> {tokens} embed | {partial}")
    ranks = _Ranks.of(sh, whole, number, rows_first=rows_first)
    apply: Callable[..., Tensor] = _densely if backend == "dense" else _by_rows
    added: list[Tensor] = []
    early = None if beside is None else lambda: added.append(beside())
    if backend == "all-to-all":
        apply = functools.partial(_by_rows, early=early)

    # what a rank's choices are at most, times the ranks whose tokens were gathered
    bound = None if routed.bound is None else routed.bound * (chosen.numel() // routed.experts.numel())
    if backend == PADDED:
        assert routed.places is not None
        places = min(routed.places * (chosen.numel() // routed.experts.numel()), math.prod(chosen.shape[:2]))
        apply = functools.partial(_padded, places=places, early=early)

    def local(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        def run(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
            return experts(rows, weights, ends, leaves, sh=sh)

        y = apply(run, x.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1), bound, ranks)
        return y.unflatten(0, x.shape[:2])

    beyond = () if whole or sh.mesh is None else _beyond(sh, tokens)
    read: dict[str, Tensor] = {}
    if sh.check is not None:
        leaves = _Read(leaves, lambda name, leaf: read.setdefault(name, leaf))
    if beyond:
        leaves = _Read(leaves, lambda _, leaf: _entered(leaf, sh, beyond))
    sides = (f"{tokens} embed", f"{tokens} choice", f"{tokens} choice")
    y = sh.primitive(local, (x, chosen, weights), sides, f"{tokens} embed")
    if sh.check is not None:  # experts see tokens of all ranks, in parts of their width
        across = tuple(a for n in ("batch'", "seq'", "emlp") for a in axes_of(n, sh.mesh, sh.rules))
        sh.check.applied(read, across, "experts")
    y = y if rows_first else way.resolve(y, f"{tokens} embed", partial=partial, to="batch seq* embed")
    if beside is None:
        return y
    return y + (added[0] if added else beside())


def _rows_first(sh: Any, choices: float) -> bool:
    """Do rows go to their experts before they are gathered over the ranks that hold parts of these?

    choices: rows of a token, which of padded experts are those of all places, filled or not.

    Of one token, in units of its row, with k choices, ep ranks of experts and etp that hold parts of each, rows first take
    k (ep - 1) / ep over ep and k (etp - 1) over etp, each way; tokens first take etp times the former, and etp - 1. So rows first
    are fewer in all where ep > k, and always fewer over ep, whose ranks are further apart; at ep = k both are as many. They
    need other tokens on every rank, as they have with sequence parallelism.
    """
    if sh.mesh is None:
        return False
    parts, held = sh.axes("emlp"), sh.axes("expert")
    tokens = {*sh.axes("batch"), *sh.axes("seq*")}
    return bool(parts) and bool(held) and tokens.issuperset((*parts, *held)) and sh.mesh.size(held) >= choices


def _beyond(sh: Any, tokens: str) -> tuple[str, ...]:
    """The axes on which tokens are apart though experts' leaves are not said to be applied across them: batch' and seq' end at
    the first axis of `expert`, whatever is behind it, as gathered tokens must. (A mesh with tp in front of cp, or fsdp in
    front of dp, has such.)"""
    lie, said = ({a for n in dims.split() for a in sh.axes(n)} for dims in (tokens, "batch' seq'"))
    return tuple(a for a in apart_among_experts(sh.mesh, sh.rules) if a in lie - said)


def _entered(leaf: Tensor, sh: Any, axes: tuple[str, ...]) -> Tensor:
    """A leaf that is read by work that differs along some axes: its gradient is summed over these."""
    dtypes = (None, None, sh.precision.reduce_dtype)
    return apply_function(Move, leaf, sh.mesh, (Step("I>R", axes, (), ()),), dtypes)


class _Read(Mapping[str, Tensor]):
    """Leaves, of which each goes through `seen(name, leaf)` when it is read."""

    def __init__(self, values: Mapping[str, Tensor], seen: Callable[[str, Tensor], Tensor]) -> None:
        self.values_, self.seen = values, seen

    def __getitem__(self, name: str) -> Tensor:
        return self.seen(name, self.values_[name])

    def __contains__(self, name: object) -> bool:
        return name in self.values_

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


@dataclass(frozen=True)
class _Ranks:
    """Who holds which experts: equally many in turn on each rank of the axes `held`, of which rows travel over
    `travelled`; over the others every rank has the same tokens and takes those for its own experts. Rows that have travelled
    are gathered over `parts`, whose ranks hold parts of the same experts."""

    sh: Any
    number: int  # of all experts
    held: tuple[str, ...] = ()
    travelled: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    @staticmethod
    def of(sh: Any, whole: bool, number: int, *, rows_first: bool = False) -> _Ranks:
        if sh.mesh is None:
            return _Ranks(sh, number)
        sh.local_size("expert", number)  # which refuses a number that does not divide
        held = sh.axes("expert")
        if rows_first:
            return _Ranks(sh, number, held, held, sh.axes("emlp"))
        stay = held if whole else sh.axes("expert'")
        return _Ranks(sh, number, held, tuple(a for a in held if a not in stay))

    @property
    def each(self) -> int:
        """Experts on each rank."""
        return self.number // (self.sh.mesh.size(self.held) if self.held else 1)

    @property
    def travelling(self) -> int:
        """Ranks between which rows travel."""
        return self.sh.mesh.size(self.travelled) if self.travelled else 1

    def key(self, chosen: Tensor) -> Tensor:
        """The number of a choice's expert among those that this rank serves: its own, and on ranks to which its rows travel
        those ranks', in their order; `travelling * each` for no expert, or one that another rank serves."""
        if not self.held:
            return chosen
        mesh, none = self.sh.mesh, self.travelling * self.each
        left, there, mine = chosen // self.each, torch.zeros_like(chosen), chosen < self.number
        digits = {}
        for axis in reversed(self.held):
            digits[axis], left = left % mesh.sizes[axis], left // mesh.sizes[axis]
        for axis in mesh.sorted(self.held):  # in which order the ranks of a group are
            if axis in self.travelled:
                there = there * mesh.sizes[axis] + digits[axis]
            else:
                mine = mine & (digits[axis] == mesh.coordinate(axis))
        return torch.where(mine, there * self.each + chosen % self.each, none)

    def arranged(self, coming: Tensor, splits: Splits) -> tuple[Tensor, Tensor, Tensor]:
        """Rows that come from every rank, of each in the order of its experts, in the order of these: (order, inverse, ends)
        as `sort_by_expert` gives them. coming: int64[… expert], how many, with the ranks in front."""
        mesh, total = self.sh.mesh, splits.rows_received

        def one(rank: int, coming: Tensor) -> tuple[Tensor, ...]:
            kinds = torch.arange(self.each, device=coming.device).repeat(coming.numel() // self.each)
            keys = kinds.repeat_interleave(coming.flatten(), output_size=sum(splits.received[rank]))
            if len(keys) < total:  # in a simulation: as many as on every rank
                keys = torch.cat([keys, keys.new_full((total - len(keys),), self.each)])
            order, inverse, ends = sort_by_expert(keys, self.each)
            return order, inverse, torch.cat([ends[:-1], ends.new_full((1,), total)])

        if mesh.simulated:
            order, inverse, ends = on_each_rank(one, mesh.world, lift(coming, mesh.world))
        else:
            order, inverse, ends = one(0, coming)
        return order, inverse, ends

    def copies(self, splits: Splits, *, device: torch.device) -> tuple[Tensor, Tensor]:
        """Every row that has travelled once for each rank of `parts`: (order, inverse) of `gather_rows`, as if a row had
        chosen all of them."""
        mesh, n = self.sh.mesh, self.sh.mesh.size(self.parts)
        total = n * splits.rows_received

        def one(rank: int) -> tuple[Tensor, Tensor]:
            rows = sum(splits.received[rank])
            at, to = torch.arange(rows, device=device), torch.arange(n, device=device)
            order, inverse = (at + 0 * to[:, None]) * n + to[:, None], to * rows + at[:, None]
            filling = torch.full((total - n * rows,), -1, device=device)  # in a simulation: as many as on every rank
            return tuple(torch.cat([t.flatten(), filling]).to(torch.int32) for t in (order, inverse))  # type: ignore[return-value]

        return on_each_rank(one, mesh.world) if mesh.simulated else one(0)  # type: ignore[return-value]


def _by_rows(
    experts: Callable[[Tensor, Tensor, Tensor], Tensor],
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    bound: int | None,
    ranks: _Ranks,
    *,
    early: Callable[[], None] | None = None,
) -> Tensor:
    """x[token embed], chosen and weights[token choice] -> [token embed], by rows in the order of their experts.

    early: called while rows are on their way, where they can be left alone for that (`exchange_beside`).
    """
    choices, none, keys = chosen.shape[1], ranks.travelling * ranks.each, ranks.key(chosen)
    order, inverse, ends = sort_by_expert(keys.flatten(), none)
    splits: Splits | None = None
    if not ranks.held:
        rows = chosen.numel() if bound is None else min(bound, chosen.numel())
    elif not ranks.travelled:
        rows = max(int(t) for t in per_rank(ends[-1]))
    else:
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).view(ranks.travelling, ranks.each).long()
        coming, splits = exchange_counts(counts, ranks.sh.mesh, ranks.travelled)
        rows = splits.rows_sent
    order = order[:rows]
    if splits is None:
        # Rows that are none's may follow those of the last expert, and count as its: the number need not be known, and in a
        # simulation is that of every rank. Their weight is 0.
        ends = torch.cat([ends[:-1], ends.new_full((1,), rows)])
    weights = weights if not ranks.held else weights.masked_fill(keys == none, 0)
    taken, scales = gather_rows(x, order, inverse, choices), gather_rows(weights.reshape(-1, 1), order, inverse, 1)
    if splits is None:
        y = experts(taken, scales[:, 0], ends)
    else:
        mesh, n, among = ranks.sh.mesh, ranks.sh.mesh.size(ranks.parts), splits
        if ranks.parts:
            coming, among = exchange_counts(coming.flatten().expand(n, -1), mesh, ranks.parts)
        came = exchange_beside([taken, scales], mesh, ranks.travelled, splits, early)
        if ranks.parts:
            copies = ranks.copies(splits, device=x.device)
            came = exchange_several([gather_rows(t, *copies, n) for t in came], mesh, ranks.parts, among)
        there, back, ends = ranks.arranged(coming, among)
        taken, scales = (gather_rows(t, there, back, 1) for t in came)
        y = gather_rows(experts(taken, scales[:, 0], ends), back, there, 1)
        if ranks.parts:  # summands of each row, from all that hold a part of its expert
            y = sum_choices(exchange_rows(y, mesh, ranks.parts, among.back), *copies, n)
        y = exchange_rows(y, mesh, ranks.travelled, splits.back)
    return sum_choices(y, order, inverse, choices)


def _padded(
    experts: Any,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    bound: int | None,
    ranks: _Ranks,
    *,
    places: int,
    early: Callable[[], None] | None,
) -> Tensor:
    return by_places(experts, x, chosen, weights, places, ranks, early=early)


def _densely(
    experts: Callable[[Tensor, Tensor, Tensor], Tensor],
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    bound: int | None,
    ranks: _Ranks,
) -> Tensor:
    """The same with every token a row of every expert of this rank."""
    tokens, each = x.shape[0], ranks.each
    own = ranks.sh.index("expert", ranks.number, device=x.device)
    scales = (weights[:, None] * (chosen[:, None] == own[:, None])).sum(-1)  # [token expert]
    rows = x.expand(each, *x.shape).flatten(0, 1)
    ends = torch.arange(1, each + 1, dtype=torch.int32, device=x.device) * tokens
    return experts(rows, scales.t().flatten(), ends).unflatten(0, (each, tokens)).sum(0)
