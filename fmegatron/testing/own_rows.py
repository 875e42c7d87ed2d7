"""Rules of one's own in place of the standard table's: how they are written, and are they legal?

    rows = parse_rows("mlp:none,vocab:tp+dp,batch:fsdp", argument="rules")      # {"mlp": (), "vocab": ("tp", "dp"), …}
    problem_of_rows(rows, standard_rules(mesh), mesh)                            # what is wrong, as a sentence; None: nothing

Any dim may lie on any axes that no other dim of the same value lies on, in the order in which the mesh has them. What
divides is asked where sizes are known (`Sharding.check_spec`). As in `legality`, nothing here allocates.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping, Sequence

from fmegatron.errors import ShardingError, UserError
from fmegatron.mesh import Mesh
from fmegatron.rules import Rules, base

Row = tuple[str, ...]
WHOLE = "none"  # how a row of no axes is written

# The values that a dense model holds, by their dims that axes may cut.
VALUES = (
    ("batch", "seq*"),
    ("batch", "seq", "kv", "group"),
    ("batch", "seq", "mlp"),
    ("batch", "seq", "vocab"),
)
FREE = tuple(dict.fromkeys(n for dims in VALUES for n in dims))


def parse_rows(text: str, *, argument: str = "rules") -> dict[str, Row]:
    """{dim: its axes, the major one first} of "mlp:none,vocab:tp+dp". Raises UserError, which names the row."""
    found: dict[str, Row] = {}
    for row in filter(None, text.split(",")):
        dim, colon, axes = row.partition(":")
        names = () if axes == WHOLE else tuple(axes.split("+"))
        if not colon or not dim or not all(names) or not axes:
            raise UserError(
                f"{argument}={text}: {row!r} is no row: write dim:axis+axis, or dim:{WHOLE}, such as mlp:tp"
            )
        if dim in found or len(set(names)) < len(names):
            what = f"dim {dim!r} has two rows" if dim in found else f"row {row!r} names an axis twice"
            raise UserError(f"{argument}={text}: {what}: leave one of them out")
        found[dim] = names
    return found


def format_rows(rows: Mapping[str, Row]) -> str:
    """What `parse_rows` reads."""
    return ",".join(f"{dim}:{'+'.join(axes) or WHOLE}" for dim, axes in rows.items())


def with_rows(rules: Rules, rows: Mapping[str, Row], mesh: Mesh) -> Rules:
    """The rules with some rows in place of theirs. A sequence that no longer begins with the axes of its zigzag order is
    in plain order."""
    made = {**rules.compute, **rows}
    kept = {
        dim: axes
        for dim, axes in rules.zigzag.items()
        if mesh.expand(made.get(dim))[: len(mesh.expand(axes))] == mesh.expand(axes)
    }
    return dataclasses.replace(rules, compute=made, zigzag=kept)


def problem_of_rows(
    rows: Mapping[str, Row], rules: Rules, mesh: Mesh, *, free: Collection[str] = (), argument: str = "rules"
) -> str | None:
    """What is wrong with rows that take the place of those of `rules`, naming the row; None if nothing is.

    free: further dims, of a model of one's own, that any axes may hold.
    """
    for dim, axes in rows.items():
        row = f"{argument}={format_rows({dim: axes})}"
        if dim not in rules.compute:
            near = difflib.get_close_matches(dim, list(rules.compute), 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            return f"{row}: the model has no dim {dim!r}{hint} Its dims are {', '.join(rules.compute)}"
        try:
            mesh.expand(axes)
        except ShardingError as error:
            return f"{row}: {error}"
        if dim not in (*FREE, *free) and axes:
            return (
                f"{row}: no axis may hold {dim!r}, which the model reads whole: give it no row, or cut parameters at rest "
                "with zero=3 and store=…"
            )
        if base(dim) in ("kv", "group", "seq") and rules.context in ("ulysses", "ulysses+ring"):
            return (
                f"{row}: context={rules.context} gives heads and sequence rows of its own: leave {dim!r} out, or use "
                "context=gather or ring"
            )
    made = with_rows(rules, rows, mesh)
    expanded = {n: mesh.live(mesh.expand(row)) for n, row in made.compute.items()}
    if rules.context == "ring" and expanded.get("seq") != mesh.live(mesh.expand(rules.compute.get("seq"))):
        return f"{argument}={format_rows(rows)}: context=ring needs the sequence on cp: leave seq out, or use context=gather"
    between = expanded.get("seq*", expanded.get("seq", ()))
    if between[: len(expanded.get("seq", ()))] != expanded.get("seq", ()):
        return (
            f"{argument}={format_rows(rows)}: the sequence between blocks, seq* on {_shown(between)}, must begin with the "
            f"axes of seq, {_shown(expanded['seq'])}: give seq* a row, or leave sp out"
        )
    for dims in VALUES:
        owner: dict[str, str] = {}
        for dim in dims:
            for axis in expanded.get(dim, expanded.get(base(dim), ())):
                if axis in owner:
                    return (
                        f"{argument}={format_rows(rows)}: mesh axis {axis!r} would hold both {owner[axis]!r} and {dim!r} of one "
                        f"value: give one of them a row without it, such as {_without(dim, axis, made, mesh, rows, owner)}"
                    )
                owner[axis] = dim
    return None


def _shown(axes: Sequence[str]) -> str:
    return "+".join(axes) or WHOLE


def _without(dim: str, axis: str, rules: Rules, mesh: Mesh, rows: Mapping[str, Row], owner: Mapping[str, str]) -> str:
    """A row of one of two dims without an axis: of the one that was not given, if one was not."""
    chosen = owner[axis] if dim in rows and owner[axis] not in rows else dim
    left = tuple(a for a in mesh.expand(rules.compute.get(chosen, rules.compute.get(base(chosen)))) if a != axis)
    return format_rows({chosen: left})


__all__ = ["format_rows", "parse_rows", "problem_of_rows", "with_rows"]
