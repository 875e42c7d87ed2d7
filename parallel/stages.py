"""Which layers each stage of a pipeline holds, and which rank holds each stage.

A stage is a run of consecutive layers; the first one that has anything holds the embedding, the last one the head. A
rank of the pipeline holds one stage or several ("virtual stages"). Stages may be empty. Layers keep their global
numbers, so that a parameter's name is the same whatever the stage.

    even(24, 4)                                # 6 layers each
    even(22, 4, count_embedding=True, count_head=True)        # 5, 6, 6, 5: embedding and head count as a layer each
    uneven(26, 4, first=4, last=6)             # 4, 8, 8, 6
    by_cost([1.0] * 24, 4, head=2.5)           # as even in cost, measured or estimated, as can be
    parse_layout("Et*3|(tt|)*29,L")            # Megatron-LM's layout string
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fmegatron.errors import UserError


@dataclass(frozen=True)
class Stage:
    """What a stage holds: `layers`, the global numbers of its layers, and perhaps the model's embedding and head. Prediction
    modules (`fmegatron.models.mtp`) are with the head; modules: how many a layout names there."""

    layers: range = range(0)
    embedding: bool = False
    head: bool = False
    modules: int = 0

    @property
    def empty(self) -> bool:
        """Does it only hand on what it gets?"""
        return not (len(self.layers) or self.embedding or self.head)


def even(
    layers: int, stages: int, *, count_embedding: bool = False, count_head: bool = False, virtual: int = 1
) -> tuple[Stage, ...]:
    """`stages` × `virtual` stages with as many layers each as can be, within one.

    count_embedding, count_head: the embedding, the head (with the loss), count as a layer, so that the stage that holds
        it has one layer less (Megatron-LM's account-for-embedding-in-pipeline-split, and -loss-).
    Where the number does not divide, the layers that remain go to the last stages before the very last one: early
        stages keep residuals of more microbatches, and the last one has the head.
    Raises UserError for fewer than one stage, or a negative number of layers.
    """
    return _even(layers, _stage_count(stages, virtual), count_embedding, count_head)


def uneven(
    layers: int, stages: int, *, first: int | None = None, last: int | None = None, virtual: int = 1
) -> tuple[Stage, ...]:
    """The first of `stages` × `virtual` stages with `first` layers, the last with `last`, the others even.

    None: as many as the others. Raises UserError where the numbers leave the other stages no layers to share, or layers
    no stage.
    """
    count = _stage_count(stages, virtual)
    for name, n in (("first", first), ("last", last)):
        if n is not None and not 0 <= n <= layers:
            raise UserError(f"{name}={n} layers must be between 0 and the {layers} layers of the model")
    if count == 1:
        if any(n not in (None, layers) for n in (first, last)):
            raise UserError(f"first={first}, last={last}: the only stage holds all {layers} layers; leave them out")
        return _with_ends([layers])
    rest = layers - (first or 0) - (last or 0)
    others = count - (first is not None) - (last is not None)
    if rest < 0 or (others == 0 and rest):
        raise UserError(
            f"first={first} and last={last} layers do not fit the {layers} layers of the model on {count} stages: "
            f"{'they are too many' if rest < 0 else f'{rest} layers would be on no stage'}"
        )
    middle = [len(s.layers) for s in _even(rest, others, False, False)] if others else []
    return _with_ends([*([] if first is None else [first]), *middle, *([] if last is None else [last])])


def by_cost(
    costs: Sequence[float], stages: int, *, embedding: float = 0.0, head: float = 0.0, virtual: int = 1
) -> tuple[Stage, ...]:
    """Consecutive layers over `stages` × `virtual` stages so that the costliest stage is as cheap as can be.

    costs: of each layer, measured or estimated, such as seconds of forward and backward; embedding, head: theirs. (The
        slowest stage sets the pace of all, so nothing else counts for speed. Of the ways to do that, the one with the
        least sum of squares is taken, which is the most even one.)
    Raises UserError for costs that are negative or not finite.
    """
    count = _stage_count(stages, virtual)
    every = [embedding, *costs, head]
    if not all(0 <= c < float("inf") for c in every):
        raise UserError(f"costs of layers must be finite and not negative, unlike {min(every):g} or {max(every):g}")
    n = len(costs)
    up_to = [0.0, *itertools.accumulate(costs)]

    def cost(stage: int, start: int, end: int) -> float:
        own = up_to[end] - up_to[start]
        return own + (embedding if stage == 0 else 0) + (head if stage == count - 1 else 0)

    # The costliest stage of the best way to put the first `end` layers on the stages so far,
    worst = [cost(0, 0, end) for end in range(n + 1)]
    for stage in range(1, count):
        worst = [min(max(worst[k], cost(stage, k, end)) for k in range(end + 1)) for end in range(n + 1)]
    most = worst[n] * (1 + 1e-12)
    # then the least sum of squares with no stage above that.
    never = float("inf")
    squares = [c * c if (c := cost(0, 0, end)) <= most else never for end in range(n + 1)]
    cuts: list[list[int]] = []
    for stage in range(1, count):
        new, cut = [never] * (n + 1), [0] * (n + 1)
        for end in range(n + 1):
            for k in range(end + 1):
                c = cost(stage, k, end)
                if c <= most and squares[k] + c * c < new[end]:
                    new[end], cut[end] = squares[k] + c * c, k
        squares = new
        cuts.append(cut)
    ends = [n]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    edges = [0, *reversed(ends)]
    return _with_ends([b - a for a, b in itertools.pairwise(edges)])


def estimated_costs(
    *,
    layers: int,
    embed: int,
    heads: int,
    mlp: int,
    vocab: int,
    seq_len: int,
    kv_heads: int | None = None,
    head: int | None = None,
    gated: bool = True,
    windows: Sequence[int | None] = (None,),
    mtp: int = 0,
) -> tuple[list[float], float]:
    """(each layer's cost, the head's) for `by_cost`, of a decoder of these sizes: floating-point operations of a token's
    forward. A backward is twice that in both, and looking up an embedding costs nothing.

    windows: keys that a query sees, by layer, repeated; None: all before it. gated: the feed-forward part has three
        matrices, not two. mtp: prediction modules, each a layer like the last, a product that joins its inputs, and a head; they
        are in the cost of the head.
    """
    kv_heads, head = kv_heads or heads, head or embed // heads
    matrices = embed * head * (2 * heads + 2 * kv_heads) + (3 if gated else 2) * embed * mlp
    costs = []
    for n in range(layers):
        width = min(windows[n % len(windows)] or seq_len, seq_len)
        keys = width * (1 - width / (2 * seq_len))  # on average, under a causal mask
        costs.append(2.0 * matrices + 4.0 * heads * head * keys)
    head_cost = 2.0 * embed * vocab
    return costs, head_cost + mtp * (head_cost + 4.0 * embed * embed + (costs[-1] if costs else 0.0))


def parse_layout(text: str, *, layers: int | None = None, mtp: int | None = None) -> tuple[Stage, ...]:
    """The stages that a string in Megatron-LM's notation lays out, such as "Et*3|(tt|)*29,L".

    E: the embedding; t: a layer; m: a module of multi-token prediction; L: the head with the loss; | ends a stage; *3 behind a
        letter or behind a group in brackets repeats it; commas and spaces mean nothing. An empty stage, "t||t", is legal.
        m stands on the stage of L, in front of it; it may be left out, and the modules are there all the same.
    layers, mtp: of the model; the string must have as many t, and as many m or none.
    Raises UserError that names the place: for another letter, brackets that do not match, an E that is not the first
        or an L that is not the last, and an m elsewhere than in front of L.
    """
    flat = _unrolled(text)
    stages: list[list[str]] = [[]]
    for letter in flat:
        if letter == "|":
            stages.append([])
        else:
            stages[-1].append(letter)
    letters = [x for x in flat if x != "|"]
    for letter, what, place in (("E", "the embedding", 0), ("L", "the head with the loss", len(letters) - 1)):
        if letters.count(letter) != 1:
            raise UserError(
                f"layout {text!r} has {letters.count(letter)} {letter}, {what}: every model has one, so write it once"
            )
        if letters.index(letter) != place:
            raise UserError(f"layout {text!r}: {letter}, {what}, must come {'behind' if place else 'before'} all else")
    modules = letters.count("m")
    with_head = next(s for s in stages if "L" in s)
    if modules != with_head.count("m") or "mt" in "".join(letters):
        raise UserError(
            f"layout {text!r}: m, a prediction module, reads what the head reads and is held with it: write it on the stage of L, "
            "behind its layers, such as Et|tmL"
        )
    if modules and mtp is not None and modules != mtp:
        has = f"{mtp} prediction modules: write as many m, or none" if mtp else "no prediction modules: leave m out"
        raise UserError(f"layout {text!r} has {modules} m, but the model has {has}")
    if layers is not None and letters.count("t") != layers:
        raise UserError(f"layout {text!r} has {letters.count('t')} layers t, but the model has {layers}")
    ends = [i for i, s in enumerate(stages) if "E" in s or "L" in s]
    return _with_ends([s.count("t") for s in stages], ends, modules=modules)


def format_layout(stages: Sequence[Stage]) -> str:
    """The stages in Megatron-LM's notation, the inverse of `parse_layout`: "Ettt|tt|ttL"."""
    return "|".join(f"{'E' * s.embedding}{'t' * len(s.layers)}{'m' * s.modules}{'L' * s.head}" for s in stages)


def loop(stages: int, virtual: int = 1) -> tuple[int, ...]:
    """The rank of each of `stages` × `virtual` stages, once around all ranks and again: 0 1 2 3 0 1 2 3.

    As in interleaved schedules (Narayanan et al. 2021). A rank's own stages are then `stages` apart.
    """
    _stage_count(stages, virtual)
    return tuple(range(stages)) * virtual


def vee(stages: int, virtual: int = 2) -> tuple[int, ...]:
    """The rank of each of `stages` × `virtual` stages, to the last rank and back: 0 1 2 3 3 2 1 0.

    As in ZB-V and DualPipe-V (Qi et al. 2023, 2025). Rank 0 holds both ends of the model: embedding and head.
    """
    _stage_count(stages, virtual)
    there = tuple(range(stages))
    return tuple(itertools.chain.from_iterable(there[:: -1 if c % 2 else 1] for c in range(virtual)))


def layers_of_rank(stages: Sequence[Stage], placement: Sequence[int], rank: int) -> tuple[int, ...]:
    """The global numbers of the layers that a rank holds, in order."""
    return tuple(sorted(n for s, r in zip(stages, placement, strict=True) if r == rank for n in s.layers))


def _stage_count(stages: int, virtual: int) -> int:
    if stages < 1 or virtual < 1:
        raise UserError(f"stages={stages}, virtual={virtual} must both be at least 1")
    return stages * virtual


def _even(layers: int, count: int, embedding: bool, head: bool) -> tuple[Stage, ...]:
    if layers < 0:
        raise UserError(f"layers={layers} must not be negative")
    taken = [0] * count
    taken[0] += embedding
    taken[-1] += head
    each, more = divmod(layers + sum(taken), count)
    order = [*range(count - 2, -1, -1), count - 1]  # who gets one of the layers that remain first
    sizes = [each + (order.index(i) < more) - taken[i] for i in range(count)]
    for i, n in enumerate(sizes):  # embedding and head can be more than a stage's share
        while n < 0:
            n += 1
            sizes[max(range(count), key=sizes.__getitem__)] -= 1
            sizes[i] = n
    return _with_ends(sizes)


def _with_ends(sizes: Sequence[int], ends: Sequence[int] = (), *, modules: int = 0) -> tuple[Stage, ...]:
    """Stages of so many layers each. ends: which ones hold the embedding and the head; by default first and last.
    modules: prediction modules that are named with the head."""
    first, last = (ends[0], ends[-1]) if ends else (0, len(sizes) - 1)
    starts = [0, *itertools.accumulate(sizes)]
    return tuple(
        Stage(range(a, a + n), embedding=i == first, head=i == last, modules=modules if i == last else 0)
        for i, (a, n) in enumerate(zip(starts, sizes, strict=False))
    )


def _unrolled(text: str) -> str:
    """A layout's letters and bars with all repetitions written out."""
    groups: list[tuple[int, list[str]]] = [(0, [])]  # (where it opened, its items)
    at = 0
    while at < len(text):
        c, items = text[at], groups[-1][1]
        place = f"layout {text!r}, character {at + 1}"
        if c in "EtmL|":
            items.append(c)
        elif c == "(":
            groups.append((at, []))
        elif c == ")":
            if len(groups) == 1:
                raise UserError(f"{place}: this ) closes no (")
            _, inside = groups.pop()
            groups[-1][1].append("".join(inside))
        elif c == "*":
            number = re.compile(r"\s*(\d+)").match(text, at + 1)
            if number is None or not items:
                raise UserError(f"{place}: * stands behind a letter or a group and before a number, as in t*3")
            items[-1] *= int(number[1])
            at = number.end() - 1
        elif c not in ", ":
            raise UserError(f"{place}: {c!r} is none of E, t, m, L, |, ( ), *, comma")
        at += 1
    if len(groups) > 1:
        raise UserError(f"layout {text!r}, character {groups[-1][0] + 1}: this ( is never closed")
    return "".join(groups[0][1])
