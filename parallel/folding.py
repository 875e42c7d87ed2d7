"""The experts' own factoring of the ranks, folded over the axes that the rest of a model uses.

    make_mesh("dp=2,cp=2,tp=2", also=expert_factoring("dp=2,cp=2,tp=2", ep=4))      # edp=2,ep=4,etp=1 of the same ranks

Experts lie on `ep`, their width on `etp`, and copies of both on `edp`, whatever dp, cp and tp are ("parallel folding", Liu et
al., 2025): ep may exceed dp. A pipeline's axis is common to both.
"""

from __future__ import annotations

import math

from fmegatron.axes import parse_axes
from fmegatron.errors import UserError

PIPELINE = "pp"


def expert_factoring(axes: str, *, ep: int = 1, etp: int = 1, argument: str = "mesh") -> tuple[str, ...]:
    """The further factoring of a mesh that experts use, for `make_mesh(axes, also=…)`: () where ep and etp are 1. Ranks of etp
    are adjacent, and those of ep next; edp is what is left.

    argument: what `axes` is called in messages. Raises UserError where ep · etp does not divide the ranks of a stage, or
    the mesh has these axes already.
    """
    sizes = parse_axes(axes, argument=argument)
    for name, size in (("ep", ep), ("etp", etp)):
        if size < 1:
            raise UserError(f"{name}={size} must be 1 or more")
    if ep == etp == 1:
        return ()
    if both := [n for n in ("edp", "ep", "etp") if n in sizes]:
        raise UserError(f"{argument} {axes!r} has the axis {both[0]} already: leave it out, or ep={ep} and etp={etp}")
    order = list(sizes)
    stage = math.prod(n for name, n in sizes.items() if name != PIPELINE)
    if stage % (ep * etp):
        legal = [n for n in range(1, stage + 1) if stage % (n * etp) == 0]
        near = f"ep={min(legal, key=lambda n: abs(n - ep))}" if legal else "etp=1"
        raise UserError(
            f"ep={ep} × etp={etp} does not divide the {stage} ranks of {argument} {axes!r}"
            f"{' without pp' if PIPELINE in sizes else ''}: use {near}"
        )
    expert = f"edp={stage // (ep * etp)},ep={ep},etp={etp}"
    if PIPELINE not in sizes:
        return (expert,)
    if order[0] == PIPELINE:
        return (f"pp={sizes[PIPELINE]},{expert}",)
    if order[-1] == PIPELINE:
        return (f"{expert},pp={sizes[PIPELINE]}",)
    raise UserError(f"{argument} {axes!r} has pp between other axes: with experts on ranks put it first")
