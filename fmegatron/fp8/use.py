"""How one product of `sh.dot` runs in fp8, if it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmegatron.equations import einsum_of, parse_equation
from fmegatron.errors import UserError
from fmegatron.fp8.cast import Cut
from fmegatron.fp8.form import Form, form_of
from fmegatron.fp8.policy import Fp8
from fmegatron.fp8.scaling import Casts, Layer, Step
from fmegatron.overlap import entering


@dataclass(frozen=True, eq=False)
class Plan:
    """Of one equation on one mesh: its matrices, and which axes cut those of x, w and y."""

    form: Form
    x: Cut
    w: Cut
    y: Cut


@dataclass(frozen=True, eq=False)
class Use:
    """One product in fp8. scales, seen: float32[operand] of delayed scaling, or None (see `scaling.Layer`)."""

    fp8: Fp8
    plan: Plan
    scales: Tensor | None = None
    seen: Tensor | None = None
    casts: Casts | None = None


def plan_of(text: str, sh: Any) -> Plan | None:
    """The plan of one equation; None for a product that is none of two matrices."""
    equation = parse_equation(text, 2)
    form = form_of(einsum_of(equation))
    if form is None:
        return None
    if sh.mesh is None or not sh.precision.fp8.agree:
        return Plan(form, Cut(), Cut(), Cut())
    parts = entering(equation)
    x, w = (side.dims for side in (equation if parts is None else parts[1]).inputs)

    def axes(dims: Any) -> tuple[str, ...]:
        return sh.mesh.sorted({a for n in dims for a in sh.axes(n)})

    rows = axes(x[i] for i in form.x[: form.rows])
    sums = axes(x[i] for i in form.x[form.rows :])
    columns = axes(w[i] for i in form.w[form.sums :])
    return Plan(form, Cut(sh.mesh, rows, sums), Cut(sh.mesh, sums, columns), Cut(sh.mesh, rows, columns))


def use_of(sh: Any, equation: str, x: Tensor, w: Tensor, name: str) -> Use | None:
    """How the product of x (behind its arrows) and w runs in fp8; None where it stays in the compute dtype.

    Raises UserError for sizes that are not aligned, if the policy does not keep such products.
    """
    fp8: Fp8 | None = sh.precision.fp8
    if fp8 is None or sh.check is not None or fp8.keeps(name):
        return None
    layer = sh.fp8 if isinstance(sh.fp8, Layer) else Layer(casts=sh.fp8.casts if isinstance(sh.fp8, Step) else None)
    if layer.wide:
        return None
    plan = sh._plan(("fp8", equation), plan_of, equation, sh)
    if plan is None or not aligned(fp8, plan.form, x, w, name):
        return None
    row = layer.row(name)
    if row is None:
        return Use(fp8, plan, casts=layer.casts)
    scales = None if layer.scales is None else layer.scales[row]
    return Use(fp8, plan, scales, None if layer.seen is None else layer.seen[row], layer.casts)


def aligned(fp8: Fp8, form: Form, x: Tensor, w: Tensor, name: str) -> bool:
    """Are all sizes that are summed over, forward or backward, multiples of what the matrix units take? (Without gradients
    the number of rows may be any.)"""
    rows, sums, columns = form.sizes(tuple(x.shape), tuple(w.shape))
    multiple = fp8.multiple
    if not (sums % multiple or columns % multiple or (rows % multiple and torch.is_grad_enabled())):
        return True
    if fp8.unaligned == "keep":
        return False
    raise UserError(
        f"the fp8 product {name!r} of [{rows}, {sums}] and [{sums}, {columns}] (on one rank) has sizes that are no multiples of "
        f"{multiple}, as recipe {fp8.recipe!r} needs: change them, name it in keep=, or give Fp8(unaligned='keep')"
    )
