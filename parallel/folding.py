"""The experts' own factoring of the ranks, folded over the axes that the rest of a model uses.

    make_mesh("dp=2,cp=2,tp=2", also=expert_factoring("dp=2,cp=2,tp=2", ep=4))      # edp=2,ep=4,etp=1 of the same ranks

Experts lie on `ep`, their width on `etp`, and copies of both on `edp`, whatever dp, cp and tp are ("parallel folding", Liu et
al., 2025): ep may exceed dp. A pipeline's axis is common to both.
"""

from __future__ import annotations

import math

from fmegatron.axes import PIPELINE, parse_axes
from fmegatron.errors import UserError


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


def problem_of_experts(
    *,
    ranks: int,
    ep: int,
    etp: int,
    experts: int | None,
    width: int | None,
    ep_flag: str = "ep=",
    etp_flag: str = "etp=",
) -> str | None:
    """Why so many ranks of a stage cannot share out a model's experts (ep) or their width (etp), as a sentence that names the
    nearest numbers that can; None if they can. experts, width: None for a model without."""
    for flag, value, size, what, other in (
        (ep_flag, ep, experts, "experts", etp),
        (etp_flag, etp, width, "features of an expert", ep),
    ):
        if value == 1:
            continue
        if size is None:
            return f"{flag}{value}: the model has no experts, which would lie on it: leave it out"
        if size % value:
            legal = [n for n in range(1, size + 1) if size % n == 0 and ranks % (n * other) == 0]
            below, above = [n for n in legal if n < value][-1:], [n for n in legal if n > value][:1]
            near = " or ".join(f"{flag}{n}" for n in (*below, *above)) or f"{flag}1"
            return f"{flag}{value} does not divide {size} {what}: use {near}"
    return None
