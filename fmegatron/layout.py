"""From equations and rules to layouts and arrows: pure functions of names, without tensors.

A *layout* maps every atomic mesh axis to the type of a value there: an int d (Shard of dim d), "P", "R", "I", or "?" for
an axis that the side of an equation does not name, where the value keeps whatever type it has.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from fmegatron.collectives import DUAL, Held, Orders, Step, Uneven
from fmegatron.equations import Equation, Side
from fmegatron.errors import ShardingError
from fmegatron.mesh import Mesh
from fmegatron.rules import Rules, base

# The type of a value on one atomic axis: an int d (Shard of dim d), "P", "R", "I", or "?" (whatever it was: kept).
Type = int | str
Layout = dict[str, Type]
HeldBy = list[tuple[str, ...]]  # per dim, the axes that hold it, the major one first
Zigzags = list[tuple[str, ...]]  # per dim, the axes in whose zigzag order it lies while one of them holds it
Sizes = list[int | None]  # per dim, its size if it need not divide by the axes that hold it


def axes_of(name: str, mesh: Mesh, rules: Rules) -> tuple[str, ...]:
    """The atomic axes on which a dim lies. A plain name without a row is an error, so that a typo never means
    unsharded."""
    row = rules.compute.get(name, ...)
    if row is ...:
        row = rules.compute.get(base(name), ...)
    if row is ...:
        near = difflib.get_close_matches(base(name), list(rules.compute), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ShardingError(f"the rules have no row for dim {name!r}: add {base(name)}=None if no axis holds it{hint}")
    return mesh.expand(row)  # type: ignore[arg-type]


def apart_among_experts(mesh: Mesh, rules: Rules) -> tuple[str, ...]:
    """The axes larger than one on which tokens lie, but neither experts nor parts of them: over these the gradients of an
    expert are summed, where tokens are not gathered first."""
    tokens = {*axes_of("batch", mesh, rules), *axes_of("seq*", mesh, rules)}
    return mesh.sorted(mesh.live(tokens.difference(axes_of("expert", mesh, rules), axes_of("emlp", mesh, rules))))


def layout(side: Side, mesh: Mesh, rules: Rules, rest: Type = "?") -> Layout:
    """The types that one side of an equation stands for. Raises ShardingError when one axis would shard two dims."""
    types: Layout = dict.fromkeys(mesh.sizes, rest)
    for name in side.region:
        types.update(dict.fromkeys(axes_of(name, mesh, rules), "R"))
    for dim, name in enumerate(side.dims):
        for axis in axes_of(name, mesh, rules):
            if isinstance(types[axis], int):
                other = side.dims[types[axis]]  # type: ignore[index]
                raise ShardingError(
                    f"mesh axis {axis!r} would shard both {other!r} and {name!r} of {str(side)!r}: change one of their rules"
                )
            types[axis] = dim
    return types


def held(side: Side, types: Layout, mesh: Mesh, rules: Rules) -> HeldBy:
    """Per dim of a side, the axes that hold it."""
    return [tuple(a for a in axes_of(n, mesh, rules) if types[a] == d) for d, n in enumerate(side.dims)]


def zigzag_axes(name: str, mesh: Mesh, rules: Rules) -> tuple[str, ...]:
    """The axes over which a dim is in zigzag order (see `Rules`); () for a dim in plain order."""
    return mesh.live(mesh.expand(rules.zigzag[base(name)])) if base(name) in rules.zigzag else ()


def zigzags(side: Side, mesh: Mesh, rules: Rules) -> Zigzags:
    """`zigzag_axes` of each dim of a side."""
    return [zigzag_axes(n, mesh, rules) for n in side.dims]


def free_sizes(side: Side, rules: Rules) -> Sizes:
    """The size of each dim of a side that need not divide by the axes that hold it (`Rules.uneven`)."""
    return [rules.uneven.get(base(n)) for n in side.dims]


def divides(n: int, axes: Sequence[str], mesh: Mesh) -> bool:
    """Are all parts of a dim of size n on these axes of one size?"""
    return n % mesh.size(axes) == 0


def steps_between(
    mesh: Mesh,
    source: Layout,
    target: Layout,
    have: HeldBy,
    want: HeldBy,
    where: object,
    orders: tuple[Zigzags, Zigzags] | None = None,
    sizes: Sizes | None = None,
) -> tuple[Step, ...]:
    """The arrows that take a value from one layout to another; all axes with the same arrow go in one collective.

    A dim loses its last axes first and gains them in order. Raises ShardingError for R -> I and R -> S, which have
    no arrow, and for a change that would need a permutation.

    orders: the zigzag axes of each dim, before and after; None: all dims are in plain order.
    sizes: of dims that need not divide by their axes (`free_sizes`).
    """
    todo: dict[str, list[str]] = {}
    have, want = [mesh.live(h) for h in have], [mesh.live(h) for h in want]
    before, after = orders or ([()] * len(have), [()] * len(want))
    for dim, (a, b) in enumerate(zip(before, after, strict=False)):
        if a != b and set(have[dim]) & set(want[dim]) & {*a, *b}:
            raise ShardingError(
                f"{where}: dim {dim} stays on mesh axes {', '.join(have[dim])}, but only one side is in zigzag order: "
                "list both names in the rules' zigzag, or gather the dim first"
            )
    for axis in mesh.sizes:
        s, d = source[axis], target[axis]
        if s == d or d == "?" or (s == "?" and not isinstance(d, int)):
            continue
        if s == "?":
            s = "I"  # a value that an equation does not name on an axis, and slices there, is taken to be Invariant
        kind = f"{'S' if isinstance(s, int) else s}>{'S' if isinstance(d, int) else d}"
        if kind not in DUAL:
            fix = "slice it with x.index_select(dim, sh.index(…))" if kind == "R>S" else "keep it R"
            raise ShardingError(f"{where}: {kind.replace('>', ' -> ')} on mesh axis {axis!r} has no arrow; {fix}")
        if mesh.sizes[axis] > 1:
            todo.setdefault(kind, []).append(axis)
    steps = []
    now = list(have) + [()] * (len(want) - len(have))
    while todo:
        step = next((s for s in _candidates(todo, mesh, now, have, want) if s is not None), None)
        if step is None:
            raise ShardingError(
                f"{where}: {have} -> {want} would permute the axes of a dim: list them in the same order"
            )
        changes: Orders = ()
        uneven: Uneven = ()
        for dim, gone in step.leaves:
            changes += _reordered(mesh, dim, before[dim], now[dim], now[dim][: -len(gone)])
            uneven += _unequal(mesh, dim, sizes, now[dim], now[dim][: -len(gone)], where)
            now[dim] = now[dim][: -len(gone)]
        for dim, come in step.enters:
            changes += _reordered(mesh, dim, after[dim], now[dim] + come, now[dim])
            uneven += _unequal(mesh, dim, sizes, now[dim] + come, now[dim], where)
            now[dim] = now[dim] + come
        steps.append(step._replace(zigzag=changes, uneven=uneven))
        left = {k: [a for a in axes if k != step.kind or a not in step.axes] for k, axes in todo.items()}
        todo = {k: axes for k, axes in left.items() if axes}
    return tuple(steps)


def _reordered(mesh: Mesh, dim: int, zigzag: tuple[str, ...], more: tuple[str, ...], less: tuple[str, ...]) -> Orders:
    """A dim is in zigzag order while one of its zigzag axes holds it, and in plain order when none does."""
    return ((dim, mesh.size(zigzag)),) if set(zigzag) & set(more) and not set(zigzag) & set(less) else ()


def _unequal(
    mesh: Mesh, dim: int, sizes: Sizes | None, more: tuple[str, ...], less: tuple[str, ...], where: object
) -> Uneven:
    """Where the parts of a dim on the axes `more` are of unequal size, it loses or gains all its axes at once."""
    n = None if sizes is None else sizes[dim]
    if n is None or divides(n, more, mesh):
        return ()
    if less:
        raise ShardingError(
            f"{where}: dim {dim} of size {n} does not divide by {mesh.size(more)}, the size of mesh axes "
            f"{', '.join(more)}, and would keep {', '.join(less)} of them: move it between none and all of them"
        )
    return ((dim, n),)


def _candidates(todo: dict[str, list[str]], mesh: Mesh, now: HeldBy, have: HeldBy, want: HeldBy) -> list[Step | None]:
    """Steps that may be taken next, the largest first: all axes of a kind together, else axis by axis."""
    tries = [*todo.items(), *((kind, [axis]) for kind, axes in todo.items() for axis in axes)]
    return [_step(kind, axes, mesh, now, have, want) for kind, axes in tries]


def _step(kind: str, axes: list[str], mesh: Mesh, now: HeldBy, have: HeldBy, want: HeldBy) -> Step | None:
    def among(by: HeldBy) -> Held:
        found = [(d, tuple(a for a in h if a in axes)) for d, h in enumerate(by)]
        return tuple((d, t) for d, t in found if t)

    leaves = among(have) if kind[0] == "S" else ()
    enters = among(want) if kind[2] == "S" else ()
    if any(now[d][len(now[d]) - len(t) :] != t for d, t in leaves):
        return None  # not the last axes of that dim
    if any(want[d][: len(now[d]) + len(t)] != now[d] + t for d, t in enters):
        return None  # not the next axes of that dim
    if {d for d, _ in leaves} & {d for d, _ in enters}:
        return None
    return Step(kind, mesh.sorted(axes), leaves, enters)


def reshape_plan(equation: Equation, mesh: Mesh, rules: Rules) -> tuple[tuple[Step, ...], Layout, Layout]:
    """(steps, source, target) of `sh(x, "… -> …")`. An axis named on one side only is I on the other."""
    (left,), right = equation.inputs, equation.output
    source, target = layout(left, mesh, rules), layout(right, mesh, rules)
    for axis in mesh.sizes:
        if source[axis] == "?" and target[axis] != "?":
            source[axis] = "I"
        elif target[axis] == "?" and source[axis] != "?":
            target[axis] = "I"
    have, want = held(left, source, mesh, rules), held(right, target, mesh, rules)
    orders = zigzags(left, mesh, rules), zigzags(right, mesh, rules)
    # a dim may have another name on each side ("all" for a whole "seq"), of which one is uneven
    sizes = [a or b for a, b in zip(free_sizes(left, rules), free_sizes(right, rules), strict=False)]
    steps = steps_between(mesh, source, target, have, want, repr(equation.text), orders, sizes)
    return steps, source, target


def contraction_plan(
    equation: Equation, mesh: Mesh, rules: Rules
) -> tuple[tuple[Step, ...], list[Layout], Layout, Layout]:
    """(steps, layouts of the operands, raw layout of the local result, target) of `sh.dot` and `sh.sum`.

    A contraction over a sharded dim leaves the local result Partial, and the output resolves it: to S where an
    output dim takes the axis, to R where a `|` names it, else to I.
    """
    text, out = repr(equation.text), equation.output
    lays = [layout(side, mesh, rules) for side in equation.inputs]
    target = layout(out, mesh, rules, rest="I")
    names = [base(n) for n in out.dims]
    raw: Layout = {}
    for axis in mesh.sizes:
        labels = [_sharded_dim(side, lay[axis]) for side, lay in zip(equation.inputs, lays, strict=True)]
        found = {n for n in labels if n}
        if len(found) > 1:
            raise ShardingError(
                f"{text}: mesh axis {axis!r} shards {' and '.join(sorted(found))}, two dims of one product"
            )
        name = next(iter(found), None)
        for side, label in zip(equation.inputs, labels, strict=True):
            if name and label is None and name in [base(n) for n in side.dims]:
                raise ShardingError(
                    f"{text}: {name!r} lies on mesh axis {axis!r} in one operand only: write it alike in both"
                )
        raw[axis] = "?" if name is None else names.index(name) if name in names else "P"
        # where no dim uses an axis, the value keeps its type: products neither enter nor leave a region
        if raw[axis] == "?" and not isinstance(target[axis], int):
            target[axis] = "?"
    now: HeldBy = [()] * len(out.dims)
    for side, lay in zip(equation.inputs, lays, strict=True):
        for dim, by in enumerate(held(side, lay, mesh, rules)):
            if by and base(side.dims[dim]) in names:
                now[names.index(base(side.dims[dim]))] = by
    order = zigzags(out, mesh, rules)
    sizes = free_sizes(out, rules)
    steps = steps_between(mesh, raw, target, now, held(out, target, mesh, rules), text, (order, order), sizes)
    return steps, lays, raw, target


def _sharded_dim(side: Side, kind: Type) -> str | None:
    return base(side.dims[kind]) if isinstance(kind, int) else None


def resolve_plan(
    side: Side, partial: Sequence[str], to: Side, mesh: Mesh, rules: Rules
) -> tuple[tuple[Step, ...], Layout, Layout]:
    """(steps, source, target) for a value that is Partial on the axes of the dims `partial`."""
    source = layout(side, mesh, rules)
    for name in partial:
        for axis in axes_of(name, mesh, rules):
            if isinstance(source[axis], int):
                raise ShardingError(
                    f"{str(side)!r}: mesh axis {axis!r} holds a dim and cannot be Partial over {name!r} too"
                )
            source[axis] = "P"
    target = layout(to, mesh, rules)
    for axis in mesh.sizes:
        if target[axis] == "?" and source[axis] != "?":
            target[axis] = "I"
    have, want = held(side, source, mesh, rules), held(to, target, mesh, rules)
    orders = zigzags(side, mesh, rules), zigzags(to, mesh, rules)
    sizes = free_sizes(side, rules)
    return steps_between(mesh, source, target, have, want, f"{side} -> {to}", orders, sizes), source, target


def check_size(name: str, n: int, axes: Sequence[str], mesh: Mesh, rules: Rules, where: str = "") -> None:
    """Raises ShardingError where some axes cannot hold a dim of this size."""
    if divides(n, axes, mesh):
        return
    known = rules.uneven.get(base(name))
    if known is None:
        raise ShardingError(
            f"dim {name!r} of size {n}{where} does not divide by {mesh.size(axes)}, the size of mesh axes "
            f"{', '.join(axes)}: choose a size or a mesh that divides, a rule without these axes, or rules with "
            f"uneven={{{base(name)!r}: {n}}}, which fill up the parts"
        )
    if known != n:
        raise ShardingError(f"dim {name!r}{where} has size {n}, but the rules say uneven={{{base(name)!r}: {known}}}")


def stored(
    names: Sequence[str],
    shape: Sequence[int],
    own: dict[str, Type],
    mesh: Mesh,
    rules: Rules,
    tree: str = "params",
) -> tuple[HeldBy, HeldBy]:
    """(held in equations, held at rest) of a parameter, per dim. `own`: types by atomic axis that replace the rules'.
    tree: "params", or "optimizer" for what the optimizer keeps of it.

    At rest the store axes that its dims do not use go together on the largest free dim that their product divides,
    else behind a sharded one as the inner split, else nowhere. Raises ShardingError when a size does not divide.
    """
    side = Side(tuple(names))
    compute: HeldBy = []
    for dim, name in enumerate(names):
        by_rule = tuple(a for a in axes_of(name, mesh, rules) if a not in own)
        by_hand = tuple(a for a in mesh.order if own.get(a) == dim)
        compute.append(tuple(a for a in mesh.order if a in by_hand + by_rule) if by_hand else by_rule)
    seen: dict[str, str] = {}
    for name, by in zip(names, compute, strict=True):
        for axis in by:
            if axis in seen:
                raise ShardingError(
                    f"mesh axis {axis!r} would shard both {seen[axis]!r} and {name!r} of {str(side)!r}: change one of their rules"
                )
            seen[axis] = name
    for name, size, by in zip(names, shape, compute, strict=True):
        check_size(name, size, by, mesh, rules, f" (in {str(side)!r})")
    rest = list(compute)
    for number, store in enumerate(rules.stores(tree)):
        used = {a for by in rest for a in by} | set(seen) | set(own)
        extra = tuple(a for a in mesh.order if a in mesh.expand(store) and a not in used)
        if mesh.live(extra):
            fits = [d for d, n in enumerate(shape) if n % mesh.size(rest[d] + extra) == 0]
            if number:  # a later group does not go where the mesh orders its axes before those of the first
                fits = [d for d in fits if list(rest[d] + extra) == [a for a in mesh.order if a in rest[d] + extra]]
            fits.sort(key=lambda d: (bool(mesh.live(rest[d])), -shape[d]))
            for dim in fits[:1]:
                rest[dim] = rest[dim] + extra
    for name, by in zip(names, rest, strict=True):
        if list(by) != [a for a in mesh.order if a in by]:
            raise ShardingError(
                f"dim {name!r} of {str(side)!r} lies on {by}, but the mesh orders its axes {mesh.order}: "
                "list the rule's axes in that order, or give make_mesh another order="
            )
    return compute, rest
