"""What an equation costs, in words: the text behind `sh.explain`."""

from __future__ import annotations

import math
from typing import Any

from fmegatron import uneven
from fmegatron.collectives import COST, Step, dual
from fmegatron.equations import Equation, Side, parse_equation
from fmegatron.layout import Layout, contraction_plan, held, reshape_plan
from fmegatron.overlap import entering
from fmegatron.placements import placement_of
from fmegatron.recording import Collective, by_axes
from fmegatron.rules import base


def explain(sh: Any, equation: str, sizes: dict[str, int]) -> str:
    """The placements of each operand and of the result, and each collective, forward and backward: what it is, over which
    axes, and with the sizes of all dims its elements and bytes, and the bytes of all of them by axes."""
    operands = len(equation.partition("->")[0].split(","))
    parsed = parse_equation(equation, operands)
    if sh.mesh is None:
        return f"{equation}\n  no mesh: plain mathematics on one device"
    parts = entering(parsed) if operands == 2 else None
    found: list[Collective] = []
    lines = [equation, *(_explained(sh, part, sizes, found) for part in parts or (parsed,))]  # two equations in one?
    for axes, some in by_axes(found).items():
        count = f"{len(some)} collective{'s' if len(some) > 1 else ''}"
        total, sent = (sum(getattr(c, n) for c in some) for n in ("bytes", "sent"))
        lines.append(f"  in all over {'×'.join(axes)}: {count} of {total:,} bytes, {sent:,} sent by each rank")
    return "\n".join(lines)


def _explained(sh: Any, parsed: Equation, sizes: dict[str, int], found: list[Collective]) -> str:
    """What is said of an arrow or a product; its collectives are added to `found`."""
    same = len(parsed.inputs) == 1 and [base(n) for n in parsed.inputs[0].dims] == [base(n) for n in parsed.output.dims]
    if same:
        steps, source, target = reshape_plan(parsed, sh.mesh, sh.rules)
        operand_types, raw = [source], source
    else:
        steps, operand_types, raw, target = contraction_plan(parsed, sh.mesh, sh.rules)
    lines = []
    for side, types in zip(parsed.inputs, operand_types, strict=True):
        lines.append(f"  operand {str(side)!r}: {_placed(sh, types)}{_shape(sh, side, types, sizes)}")
    if not same:
        lines.append(f"  local product: {_placed(sh, raw)}")
    lines.append(f"  result {str(parsed.output)!r}: {_placed(sh, target)}{_shape(sh, parsed.output, target, sizes)}")
    first = parsed.inputs[0] if same else parsed.output
    before = _elements(sh, first, source if same else raw, sizes)
    lines.append("  forward: " + _steps(sh, steps, before, found))
    lines.append("  backward: " + _steps(sh, dual(steps), _elements(sh, parsed.output, target, sizes), found))
    return "\n".join(lines)


def _placed(sh: Any, types: Layout) -> str:
    parts = [
        f"{a}:{placement_of(types[a]) if types[a] != '?' else 'as it is'}"
        for a in sh.mesh.order
        if sh.mesh.sizes[a] > 1
    ]
    return ", ".join(parts) or "one rank"


def _local(sh: Any, side: Side, types: Layout, sizes: dict[str, int]) -> list[int] | None:
    """What a rank holds of each dim in equations: as much as the largest part."""
    if any(base(n) not in sizes for n in side.dims):
        return None
    by = held(side, types, sh.mesh, sh.rules)
    return [
        uneven.largest(sizes[base(n)], tuple(sh.mesh.sizes[a] for a in sh.mesh.live(b)))
        for n, b in zip(side.dims, by, strict=True)
    ]


def _shape(sh: Any, side: Side, types: Layout, sizes: dict[str, int]) -> str:
    local = _local(sh, side, types, sizes)
    return f", {'×'.join(map(str, local)) or 'scalar'} a rank" if local is not None else ""


def _elements(sh: Any, side: Side, types: Layout, sizes: dict[str, int]) -> int | None:
    local = _local(sh, side, types, sizes)
    return math.prod(local) if local is not None else None


def _steps(sh: Any, steps: tuple[Step, ...], elements: int | None, found: list[Collective]) -> str:
    if not steps:
        return "nothing"
    shown, dtype = [], sh.precision.compute_dtype
    for step in steps:
        n, cost = sh.mesh.size(step.axes), COST[step.kind]
        text = f"{cost} over {'×'.join(step.axes)} ({step.kind.replace('>', ' -> ')}, {n} ranks)"
        if elements is not None:
            if cost not in ("nothing", "slice"):
                made = Collective(cost, tuple(step.axes), n, elements, dtype)
                found.append(made)
                sent = made.sent // dtype.itemsize
                text += f", {sent:,} elements sent by each rank (ring) of a buffer of {made.bytes:,} bytes"
            elements = {"all-gather": elements * n, "reduce-scatter": elements // n, "slice": elements // n}.get(
                cost, elements
            )
        shown.append(text)
    return "; ".join(shown)
