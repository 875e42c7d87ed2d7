"""Is a layout legal? Asked in one place, before anything is allocated, written or started.

    check_layout("dp=2,tp=4", heads=12, batch_size=16, seq_len=256, world=8)     # raises UserError, or says nothing
    problem(layout, sizes, world=8)                                              # the sentence alone; None: it is legal
    nearest(layout, sizes, world=8)                                              # the legal layouts that differ least

The message names the sizes and the rule that they break, and ends with the nearest legal layouts, written as the user
wrote theirs. All of it is arithmetic on a few whole numbers: nothing here needs torch, a mesh or a process group.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fmegatron.axes import parse_axes
from fmegatron.errors import UserError

if TYPE_CHECKING:
    from fmegatron.mesh import Mesh

AXES = {
    "pp": "layers",
    "dp": "batch rows",
    "fsdp": "batch rows",
    "cp": "sequence",
    "tp": "heads, mlp and vocabulary",
}
DATA = ("dp", "fsdp")
KINDS = ("ring", "gather", "ulysses", "ulysses+ring")  # of context parallelism, in the order in which they are proposed

# Which of "batch", "seq", "vocab" and "mlp" need not divide by their axes, because what is missing is filled up.
UNEVEN: tuple[str, ...] = ()

# How options are written where they were given: on the command line, and in a layout's line.
FLAGS = {
    "mesh": "--mesh {}",
    "sp": "--sp",
    "zero": "--zero {}",
    "store": "--store {}",
    "context": "--cp {}",
    "microbatches": "--batch.microbatches {}",
    "batch_size": "--batch.size {}",
    "seq_len": "--batch.seq-len {}",
    "vocab": "--model-overrides.vocab {}",
    "mlp": "--model-overrides.mlp {}",
}
WORDS = {
    "mesh": "layout {}",
    "sp": "sp",
    "zero": "zero={}",
    "store": "store={}",
    "context": "context={}",
    "microbatches": "micro={}",
    "batch_size": "rows={}",
    "seq_len": "seq={}",
    "vocab": "vocab={}",
    "mlp": "mlp={}",
}


@dataclass(frozen=True)
class Choice:
    """What a layout chooses. axes: {axis: size} in rank order. shares: of a mesh that is made already, among how many of
    cp's ranks it shares out kv heads and the query heads of each. The rest as for `check_layout`."""

    axes: Mapping[str, int]
    sequence_parallel: bool = False
    zero: int | None = None
    store: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    context: str = "gather"
    microbatches: int = 1
    shares: tuple[int, int] | None = None

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    @property
    def mesh(self) -> str:
        """The axes as text."""
        return ",".join(f"{a}={n}" for a, n in self.axes.items())

    def size(self, *axes: str) -> int:
        """The product of the sizes of some axes; an absent one counts as 1."""
        return math.prod([self.axes.get(a, 1) for a in axes])


@dataclass(frozen=True)
class Sizes:
    """What is divided; None: not known, or of any size. positions: rows of a table of learned positions. uneven: which
    of batch, seq, vocab and mlp need not divide."""

    heads: int | None = None
    kv_heads: int | None = None
    batch_size: int | None = None
    seq_len: int | None = None
    vocab: int | None = None
    mlp: int | None = None
    positions: int | None = None
    uneven: Collection[str] = UNEVEN


def check_layout(
    mesh: Mesh | str,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    vocab: int | None = None,
    mlp: int | None = None,
    positions: int | None = None,
    microbatches: int = 1,
    sequence_parallel: bool = False,
    store: Sequence[str] = (),
    zero: int | None = None,
    state: Sequence[str] = (),
    context: str = "gather",
    world: int | None = None,
    uneven: Collection[str] = UNEVEN,
    words: Mapping[str, str] = FLAGS,
    spelled: Callable[[Choice, Choice, int | None], str | None] | None = None,
) -> None:
    """Raises UserError for a layout on which a model and its batch cannot be divided.

    mesh: sizes of the axes, "dp=2,tp=4", or a mesh.
    heads, kv_heads: of the model's attention; kv_heads None: as many as heads. vocab, mlp: its dims on tp. positions:
        rows of its table of learned positions. batch_size: sequences of the global batch. seq_len: tokens of a sequence.
        None for any of them: not known, or none, and not asked about.
    store: axes that hold trees at rest; zero: which trees (see `Rules`; None: all); state: further axes that hold the
        optimizer's state alone. context: how attention reads a sequence on cp (see `Rules`).
    world: number of ranks that there are; None: as many as the mesh has.
    uneven: which of "batch", "seq", "vocab", "mlp" may be of a size that does not divide.
    words: how options are written (`FLAGS`, `WORDS`).
    spelled: (a layout, the one that was asked for, world) -> the line that means it, such as `flags`; None for one that
        must not be proposed. With it the message ends with the lines of the nearest legal layouts.
    """
    layout = Choice(
        parse_axes(mesh, argument=words["mesh"].format("").strip()) if isinstance(mesh, str) else _axes_of(mesh),
        sequence_parallel,
        zero,
        tuple(store),
        tuple(state),
        context,
        microbatches,
        None if isinstance(mesh, str) else _shares_of(mesh),
    )
    sizes = Sizes(heads, kv_heads, batch_size, seq_len, vocab, mlp, positions, uneven)
    found = problem(layout, sizes, world=world, words=words)
    if found is None:
        return
    lines: list[str] = []
    if spelled is not None:
        near = (spelled(other, layout, world) for other in _legal(layout, sizes, world))
        lines = list(itertools.islice((line for line in near if line is not None), 3))
    raise UserError(found if not lines else "\n  ".join([f"{found}. Nearest legal layouts:", *lines]))


def problem(layout: Choice, sizes: Sizes, *, world: int | None = None, words: Mapping[str, str] = FLAGS) -> str | None:
    """The rule that a layout breaks, as a sentence with the sizes and a fix; None: it is legal."""
    if (broken := _check_axes(layout, sizes)) is not None:
        return broken(words)
    if world is not None and layout.world != world:
        return (
            f"{_of(layout, words)} has {layout.world} ranks, but this run has {world}: add --nproc {layout.world} (or "
            f"torchrun --nproc-per-node {layout.world}), or change the mesh"
        )
    for rule in RULES:
        if (broken := rule(layout, sizes)) is not None:
            return broken(words)
    return None


def nearest(layout: Choice, sizes: Sizes, *, world: int | None = None, limit: int = 3) -> list[Choice]:
    """At most `limit` legal layouts, those first that differ least from one: in as few axes as possible, then in as few
    options, then by the smallest factors. They have as many ranks as asked for (world; None: as the layout has) where
    any such layout is legal, else as near to it as possible. Always the same for the same arguments."""
    return list(itertools.islice(_legal(layout, sizes, world), limit))


def flags(layout: Choice, asked: Choice, world: int | None = None) -> str:
    """A layout as flags that can be typed behind those that asked for another one.

    world: number of ranks that there are; None: as many as --mesh says.
    """
    found = [f"--mesh {layout.mesh}"]
    if world is not None and layout.world != world:
        found.append(f"--nproc {layout.world}")
    if layout.sequence_parallel or asked.sequence_parallel:
        found.append("--sp" if layout.sequence_parallel else "--no-sp")
    if layout.zero is not None or asked.zero is not None:
        found.append(f"--zero {layout.zero}")
    if layout.store or asked.store:
        found.append(" ".join(["--store", *layout.store]))
    if layout.context != "gather" or asked.context != "gather":
        found.append(f"--cp {layout.context}")
    if layout.microbatches > 1 or asked.microbatches > 1:
        found.append(f"--batch.microbatches {layout.microbatches}")
    return " ".join(found)


# ----------------------------------------------------------------------------------------------------------- the rules

# A rule gives None, or the function that writes what is wrong: most answers are only asked for whether there is one.
Broken = Callable[[Mapping[str, str]], str]


def _check_axes(layout: Choice, sizes: Sizes) -> Broken | None:
    """Every axis divides something."""
    for name in layout.axes:
        if name not in AXES:
            near = _near_axis(name, AXES)
            known = ", ".join(f"{axis} ({what})" for axis, what in AXES.items())
            hint = f"; did you mean {near}?" if near else "."
            return lambda w: f"{_of(layout, w)}: nothing is divided over an axis {name!r}{hint} The axes are {known}"
    return None


def _check_store(layout: Choice, sizes: Sizes) -> Broken | None:
    """Trees rest on axes that there are."""
    given = list(layout.axes)
    for what, names in (("store", layout.store), ("state", layout.state)):
        for name in names:
            if not name.strip():
                return lambda w: (
                    f"{w.get(what, what + '={}').format(repr(name))} names no mesh axis: give {' or '.join(given)}, or "
                    "leave it out"
                )
            if name not in layout.axes:
                return lambda w: (
                    f"{w.get(what, what + '={}').format(name)}: the mesh {layout.mesh} has no axis of this name; use "
                    f"{' or '.join(given)}, or add it to the mesh"
                )
    return None


def _check_stage(layout: Choice, sizes: Sizes) -> Broken | None:
    """The stage of ZeRO says what the stored axes hold."""
    zero, held = layout.zero, (*layout.store, *layout.state)
    if zero not in (None, 0, 1, 2, 3):
        return lambda w: (
            f"{w['zero'].format(zero)}: the stages are 0 (nothing is stored over data ranks), 1 (optimizer state), 2 "
            "(gradients too) and 3 (parameters too)"
        )
    if zero == 0 and held:
        return lambda w: (
            f"{w['zero'].format(0)} stores nothing, so {w['store'].format(','.join(held))} means nothing: leave one of "
            "them out"
        )
    if zero and not layout.store and not any(a in layout.axes for a in DATA):
        return lambda w: (
            f"{w['zero'].format(zero)}: the mesh {layout.mesh} has no data axis to store over; add dp to the mesh"
        )
    return None


def _check_heads(layout: Choice, sizes: Sizes) -> Broken | None:
    """Query heads divide over tp; kv heads fewer than its ranks lie on several."""
    heads, tp = sizes.heads, layout.size("tp")
    if heads is None or heads % tp == 0:
        return None
    return lambda w: (
        f"the model has {heads} query heads, which do not divide by tp={tp} ({_of(layout, w)}): use a tp of "
        f"{_near_divisors(heads, tp)} or a model whose heads divide"
    )


def _check_tp_sizes(layout: Choice, sizes: Sizes) -> Broken | None:
    """Vocabulary and mlp divide over tp, unless they are filled up."""
    tp = layout.size("tp")
    for name, what, n in (("vocab", "vocabulary", sizes.vocab), ("mlp", "mlp width", sizes.mlp)):
        if n is not None and n % tp and name not in sizes.uneven:
            return lambda w: (
                f"the {what} of {n} does not divide by {tp}, the tensor-parallel ranks of {_of(layout, w)}: use "
                f"{w[name].format(-(-n // tp) * tp)}{', whose last rows no token has' if name == 'vocab' else ''}"
            )
    return None


def _check_batch(layout: Choice, sizes: Sizes) -> Broken | None:
    """Rows divide over the data ranks, unless they are filled up; not every rank's rows may be filling."""
    n, data = sizes.batch_size, layout.size(*DATA)
    if n is None or n % data == 0 or ("batch" in sizes.uneven and n > data):
        return None
    return lambda w: (
        f"{w['batch_size'].format(n)} does not divide by {data}, the data-parallel ranks of {_of(layout, w)}: use "
        f"{_near_multiples(n, data)}"
    )


def _check_microbatches(layout: Choice, sizes: Sizes) -> Broken | None:
    """Every rank has a row for each microbatch."""
    n, data = sizes.batch_size, layout.size(*DATA)
    if n is None or -(-n // data) >= layout.microbatches:
        return None
    return lambda w: (
        f"{w['microbatches'].format(layout.microbatches)} needs as many sequences on every rank, but "
        f"{w['batch_size'].format(n)} gives each of the {data} data-parallel ranks {-(-n // data)}: use fewer "
        "microbatches or a larger batch"
    )


def _check_shared_heads(layout: Choice, sizes: Sizes) -> Broken | None:
    """The ranks between which an all-to-all moves heads can share them out."""
    kind, cp, heads = layout.context, layout.size("cp"), sizes.heads
    if kind == "ulysses+ring" and cp == 1:
        return lambda w: (
            f"{w['context'].format(kind)} needs a mesh with an axis cp of 2 ranks or more, and {_of(layout, w)} has none: "
            "add one, or leave it out"
        )
    if heads is None or cp == 1 or kind not in ("ulysses", "ulysses+ring"):
        return None
    kv, group = heads_on_tp(heads, sizes.kv_heads or heads, layout.size("tp"))
    if layout.shares is None:
        legal = head_shares(cp, kv, group)
        if kind == "ulysses+ring" or cp in legal:  # one rank for heads, with a ring of all, is always possible
            return None
        return lambda w: (
            f"{w['context'].format(kind)}: the {kv} kv heads on a tensor-parallel rank, with {group} query heads each, "
            f"cannot be shared out among the {cp} cp ranks of {_of(layout, w)}: {' or '.join(map(str, legal))} of them "
            "could, or use the kinds ring or gather"
        )
    for what, n, by in (
        ("kv heads", kv, layout.shares[0]),
        ("query heads of each kv head", group, layout.shares[1]),
    ):
        if n % by:
            return lambda w: (
                f"{w['context'].format(kind)}: the {n} {what} on a tensor-parallel rank do not divide by {by} of the "
                f"cp ranks of {_of(layout, w)}: make the mesh with also=factoring(…) of fmegatron.parallel.context, "
                f"use a cp of {_near_divisors(n, by)}, or the kinds ring or gather"
            )
    return None


def _check_sequence(layout: Choice, sizes: Sizes) -> Broken | None:
    """Tokens divide as the layout cuts them, unless they are filled up."""
    n, (of, what) = sizes.seq_len, _sequence_parts(layout, sizes)
    if n is None or n % of == 0 or "seq" in sizes.uneven:
        return None
    return lambda w: (
        f"{w['seq_len'].format(n)} does not divide by {of}, {what} in {_of(layout, w)}: use {_near_multiples(n, of)}"
    )


def _sequence_parts(layout: Choice, sizes: Sizes) -> tuple[int, str]:
    """By what a sequence must divide, and why: over cp (with sequence parallelism over tp too), and into a zigzag
    order's 2 parts a rank."""
    cp, tp = layout.size("cp"), layout.size("tp")
    cuts = cp * (tp if layout.sequence_parallel else 1)
    ring = cp
    if layout.context == "ulysses+ring" and cp > 1 and sizes.heads is not None:
        ring = cp // _shared_among(layout, sizes)
    zigzag = 2 * ring if layout.context != "ulysses" and ring > 1 else 1
    of, axes = math.lcm(cuts, zigzag), "cp × tp (sequence parallelism)" if layout.sequence_parallel else "cp"
    return of, f"the size of {axes}" if of == cuts else f"the least multiple of {axes} and twice the ranks of cp"


def _check_positions(layout: Choice, sizes: Sizes) -> Broken | None:
    """Every token has a learned position, those that fill up a sequence too."""
    n, rows = sizes.seq_len, sizes.positions
    if n is None or rows is None:
        return None
    of, _ = _sequence_parts(layout, sizes)
    filled = -(-n // of) * of
    if filled <= rows:
        return None
    if n <= rows:
        return lambda w: (
            f"{w['seq_len'].format(n)} is filled up to {filled}, a multiple of {of}, in {_of(layout, w)}, which is longer "
            f"than the model's {rows} learned positions: use at most {rows - rows % of}"
        )
    return lambda w: f"{w['seq_len'].format(n)} is longer than the model's {rows} learned positions: use at most {rows}"


RULES: tuple[Callable[[Choice, Sizes], Broken | None], ...] = (
    _check_store,
    _check_stage,
    _check_heads,
    _check_tp_sizes,
    _check_batch,
    _check_microbatches,
    _check_shared_heads,
    _check_sequence,
    _check_positions,
)


def heads_on_tp(heads: int, kv_heads: int, tp: int) -> tuple[int, int]:
    """(kv heads, query heads of each) on one of tp's ranks: kv heads lie on as many of them as divide both."""
    on_kv = math.gcd(kv_heads, tp)
    return kv_heads // on_kv, heads // kv_heads // (tp // on_kv)


def head_shares(cp: int, kv: int, group: int) -> list[int]:
    """Among how many of cp's ranks `kv` kv heads with `group` query heads each can be shared out: kv heads over what
    divides both, the query heads of each over the rest."""
    return [n for n in _divisors(cp) if group % (n // math.gcd(kv, n)) == 0]


def _shared_among(layout: Choice, sizes: Sizes) -> int:
    """Among how many ranks "ulysses+ring" shares heads out; the rest of cp is the ring."""
    if layout.shares is not None:
        return math.prod(layout.shares)
    assert sizes.heads is not None
    cp = layout.size("cp")
    kv, group = heads_on_tp(sizes.heads, sizes.kv_heads or sizes.heads, layout.size("tp"))
    return max(n for n in head_shares(cp, kv, group) if n < cp)


def _of(layout: Choice, words: Mapping[str, str]) -> str:
    return words["mesh"].format(layout.mesh)


def _near_axis(name: str, among: Collection[str]) -> str:
    """The axis that was meant, perhaps with its letters in another order; "" where none is like it."""
    same = [a for a in among if sorted(a) == sorted(name)]
    return "".join((same or difflib.get_close_matches(name, among, 1))[:1])


def _near_divisors(n: int, near: int) -> str:
    found = _divisors(n)
    return " or ".join(str(d) for d in (*[d for d in found if d < near][-1:], *[d for d in found if d > near][:1]))


def _near_multiples(n: int, of: int) -> str:
    return " or ".join(str(m) for m in (n - n % of, n + of - n % of) if m)


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def _axes_of(mesh: Mesh) -> dict[str, int]:
    """The axes that a mesh was made with."""
    return {name: mesh.size(axes) for name, axes in mesh.names.items() if not name.startswith(("tp_", "cp_"))}


def _shares_of(mesh: Mesh) -> tuple[int, int]:
    """How many of cp's ranks share kv heads, and how many the query heads of each."""

    def size(name: str) -> int:
        return mesh.size(mesh.expand(name)) if name in mesh.names or name in mesh.sizes else 1

    cut = "cp_kv" in mesh.names or "cp_kv" in mesh.sizes
    return (size("cp_kv"), size("cp_group")) if cut else (size("cp"), 1)


# ---------------------------------------------------------------------------------------------- the nearest legal layouts

OPTIONS = ("sequence_parallel", "zero", "store", "state", "context", "microbatches")
WIDEST = 6  # sizes of each axis that are tried where no layout of as many ranks is legal


def _legal(asked: Choice, sizes: Sizes, world: int | None) -> Iterator[Choice]:
    """The legal layouts, the nearest first; each is only looked for when it is asked for."""
    wanted = asked.world if world is None else world
    bases = _with_sense(asked)
    seen = set[tuple]()

    def of(meshes: Sequence[dict[str, int]]) -> Iterator[Choice]:
        """The legal ones on some meshes, with the options as they were, then with one changed, then with two."""
        for changes in range(3):
            for axes, base in itertools.product(meshes, bases):
                for layout in _changed(_on(base, axes), sizes, changes):
                    key = (tuple(layout.axes.items()), *[getattr(layout, name) for name in OPTIONS])
                    if key not in seen and problem(layout, sizes) is None:
                        yield layout
                    seen.add(key)

    if world is not None and asked.world != wanted:  # it may be the number of ranks that was a mistake
        yield from itertools.islice(of([dict(bases[0].axes)]), 1)
    near = _meshes(bases[0], sizes, wanted)
    found = False
    for _, group in itertools.groupby(near, key=lambda axes: _changes(bases[0].axes, axes)):
        for layout in of(list(group)):
            found = True
            yield layout
    if not found:
        yield from of(_meshes_of_other_sizes(bases[0], sizes, wanted))


def _with_sense(asked: Choice) -> list[Choice]:
    """The layout with what means nothing on any mesh taken out or put right, in one or two ways: axes and stages that
    there are, and trees stored on axes of the mesh."""
    axes: dict[str, int] = {}
    for name, n in asked.axes.items():
        if name not in AXES:
            name = _near_axis(name, [a for a in AXES if a not in asked.axes and a not in axes])
        if name:
            axes[name] = n
    axes = axes or {"dp": 1}

    def stored(names: Sequence[str]) -> tuple[str, ...]:
        data = [a for a in DATA if a in axes]
        right = [n if n in axes else _near_axis(n, axes) or "".join(data[:1]) for n in names if n.strip()]
        return tuple(dict.fromkeys(filter(None, right)))

    zero = asked.zero if asked.zero is None else min(max(asked.zero, 0), 3)
    base = replace(asked, axes=axes, zero=zero, store=stored(asked.store), state=stored(asked.state), shares=None)
    if zero == 0 and (base.store or base.state):
        return [replace(base, store=(), state=()), replace(base, zero=None)]
    return [base]


def _on(base: Choice, axes: Mapping[str, int]) -> Choice:
    """The options on another mesh, without those that it leaves nothing to."""
    return replace(
        base,
        axes=dict(axes),
        sequence_parallel=base.sequence_parallel and "tp" in axes,
        store=tuple(a for a in base.store if a in axes),
        state=tuple(a for a in base.state if a in axes),
        context=base.context if "cp" in axes else "gather",
    )


def _changed(layout: Choice, sizes: Sizes, changes: int) -> Iterator[Choice]:
    """The layout with so many of its options changed, where that may help."""
    if changes == 0:
        yield layout
        return
    for other in _changed(layout, sizes, changes - 1):
        for kind in KINDS if "cp" in layout.axes and other.context == layout.context else ():
            if kind != other.context:
                yield replace(other, context=kind)
        if other.sequence_parallel:
            yield replace(other, sequence_parallel=False)
        if other.zero:
            yield replace(other, zero=0, store=(), state=())
        if sizes.batch_size is not None and other.microbatches > 1:
            rows = max(-(-sizes.batch_size // other.size(*DATA)), 1)
            yield replace(other, microbatches=max(d for d in _divisors(other.microbatches) if d <= rows))


def _meshes(base: Choice, sizes: Sizes, world: int) -> list[dict[str, int]]:
    """The meshes of so many ranks with every axis of a size that alone is legal, the nearest first."""
    names = _usable(base)
    fits = {name: [n for n in _divisors(world) if n == 1 or _alone(name, n, sizes)] for name in names}

    def factored(left: int, rest: Sequence[str]) -> Iterator[dict[str, int]]:
        if not rest:
            if left == 1:
                yield {}
            return
        for n in fits[rest[0]]:
            if left % n == 0:
                for more in factored(left // n, rest[1:]):
                    yield {rest[0]: n, **more}

    found = [_plain(axes) for axes in factored(world, names)]
    return sorted(found, key=lambda axes: (*_distance(base.axes, axes), *_order(axes)))


def _meshes_of_other_sizes(base: Choice, sizes: Sizes, world: int) -> list[dict[str, int]]:
    """Meshes of about so many ranks, with the axes that there are, the nearest first."""
    choices = []
    for name, size in base.axes.items():
        some = [n for n in range(1, 2 * size + 1) if n == 1 or _alone(name, n, sizes)]
        choices.append(sorted(some, key=lambda n: (abs(math.log(n / size)), n))[:WIDEST] + [1])
    found = {tuple(_plain(dict(zip(base.axes, chosen, strict=True))).items()) for chosen in itertools.product(*choices)}
    meshes = [axes for axes in map(dict, found) if math.prod(axes.values()) != world]

    def distance(axes: dict[str, int]) -> tuple:
        ranks = math.prod(axes.values())
        return abs(ranks - world), ranks, *_distance(base.axes, axes), *_order(axes)

    return sorted(meshes, key=distance)


def _usable(base: Choice) -> list[str]:
    """The axes of a layout and the other usual ones, each where it stands in AXES."""
    names = list(base.axes)
    for name in AXES:
        if name not in names and not (name in DATA and any(a in names for a in DATA)) and name not in ("fsdp", "pp"):
            later = list(AXES)[list(AXES).index(name) :]
            names.insert(next((i for i, n in enumerate(names) if n in later), len(names)), name)
    return names


def _alone(name: str, n: int, sizes: Sizes) -> bool:
    """Is an axis of this size legal where there is no other? If not, then on no mesh: rules only get stricter."""
    kinds = KINDS if name == "cp" else KINDS[:1]
    return any(problem(Choice({name: n}, context=kind), sizes) is None for kind in kinds)


def _plain(axes: Mapping[str, int]) -> dict[str, int]:
    return {a: n for a, n in axes.items() if n > 1} or {"dp": 1}


def _order(axes: Mapping[str, int]) -> list[tuple[int, int]]:
    """By what two meshes that are equally near are put in order."""
    return [(list(AXES).index(a), n) for a, n in axes.items()]


def _changes(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """In how many axes two meshes differ."""
    return sum(before.get(a, 1) != after.get(a, 1) for a in {**before, **after})


def _distance(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[int, int, float]:
    """How far one mesh is from another: axes that differ, axes that are new, and the logarithm of all factors."""
    factors = [after.get(a, 1) / before.get(a, 1) for a in {**before, **after}]
    new = sum(a not in before for a in after)
    return _changes(before, after), new, round(sum(abs(math.log2(f)) for f in factors), 6)
