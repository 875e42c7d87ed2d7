"""The products of experts in fp8: groups of rows with a matrix each, and their gradients.

    y = x w, of each group     x scaled by rows,             w by columns
    gx = g wᵀ                  g scaled by rows,             w by rows
    gw = xᵀ g                  x by the columns of a group,  g so too

This is what the matrix units of sm90 have for groups (`torch._scaled_grouped_mm`): both sides e4m3, a scale for each row
that is not summed over. So "tensorwise" too scales experts by rows, with gradients in e4m3, and "blockwise" and "delayed"
leave them in the compute dtype. Scales are agreed as those of other products: over the ranks that hold parts of a row (of a
width that is cut), and by columns over those that have rows of the same expert. (With the dense backend, where every token is
a row of every expert, tokens that are not an expert's count in its scales.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fmegatron.errors import UserError
from fmegatron.fp8 import dot
from fmegatron.fp8 import grouped_kernels as kernels
from fmegatron.fp8.cast import Operand
from fmegatron.fp8.kernels import chosen
from fmegatron.fp8.policy import ALIGNED, Fp8
from fmegatron.fp8.scaling import Casts, Layer, Step
from fmegatron.function import apply_function, under_torch_func
from fmegatron.layout import apart_among_experts
from fmegatron.mesh import Mesh
from fmegatron.tape import Tape


@dataclass(frozen=True, eq=False)
class GroupedUse:
    """How one grouped product runs in fp8. rows, sums, columns: the mesh axes that cut the rows of a group, and the matrices'
    dims; over these scales are agreed. casts: of parameters, as far as they are kept over microbatches."""

    fp8: Fp8
    mesh: Mesh | None = None
    rows: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    casts: Casts | None = None


def grouped_use(sh: Any, x: Tensor, w: Tensor, name: str, dims: str) -> GroupedUse | None:
    """How the product of x[row in] and w[expert in out …] runs in fp8; None where it stays in the compute dtype.

    dims: of a matrix, "embed -> gated emlp". Raises UserError for widths that are no multiples of 16, if the policy does not keep
    such products.
    """
    fp8: Fp8 | None = sh.precision.fp8
    if fp8 is None or not fp8.scales_groups or sh.check is not None or fp8.keeps(name):
        return None
    layer = sh.fp8 if isinstance(sh.fp8, Layer) else Layer(casts=sh.fp8.casts if isinstance(sh.fp8, Step) else None)
    if layer.wide or not _aligned(fp8, x.shape[1], w[0, 0].numel(), name):
        return None
    if sh.mesh is None or not fp8.agree:
        return GroupedUse(fp8, casts=layer.casts)

    def axes(dims: str) -> tuple[str, ...]:
        return sh.mesh.sorted({a for n in dims.split() for a in sh.axes(n)})

    sums, columns = (axes(side) for side in dims.split("->"))
    return GroupedUse(fp8, sh.mesh, apart_among_experts(sh.mesh, sh.rules), sums, columns, layer.casts)


def _aligned(fp8: Fp8, sums: int, columns: int, name: str) -> bool:
    if not (sums % ALIGNED or columns % ALIGNED):
        return True
    if fp8.unaligned == "keep":
        return False
    raise UserError(
        f"the fp8 product {name!r} of experts has matrices of [{sums}, {columns}] (on one rank), no multiples of {ALIGNED}: change "
        "their sizes, name it in keep=, or give Fp8(unaligned='keep')"
    )


def fp8_grouped_product(
    x: Tensor, w: Tensor, ends: Tensor, use: GroupedUse, *, tape: Tape | None = None, name: str = "dot"
) -> Tensor:
    """As `fmegatron.primitives.grouped.grouped_product` of x[row in] and w[expert in out], in fp8.

    Under torch.func, as for `fp8_product`: the value is this one, gradients are those of the compute dtype.
    """
    weight, saved = (w, None) if tape is None else tape.enter(name, w)
    tapped = tape is not None and (tape.leaf is not None or tape.tap is not None)
    by_w = tapped or (torch.is_grad_enabled() and weight.requires_grad)
    shape = weight.shape[1:]
    call = Call(use, x.dtype, dot.native_for(x, use.fp8))
    with torch.no_grad():
        turned, padded = call.by_group(x.detach(), ends) if by_w else (None, None)
        kept = None
        if saved is not None:
            y = saved[0]
        else:
            there, kept = call.cast_w(w.detach())
            y = call.multiply(call.by_row(x.detach(), use.sums), there, ends)
    if under_torch_func():
        from fmegatron.primitives.grouped import Grouped

        return apply_function(Grouped, x, weight.flatten(2), ends, y).unflatten(-1, shape[1:])
    flat = [*(turned or (None, None)), padded, *(kept or (None, None))]
    y = apply_function(Fp8Grouped, x, weight.flatten(2), ends, y, *flat, call)
    if tape is not None:
        inputs = [*turned, padded, ends] if tapped and turned is not None and padded is not None else []
        (y,) = tape.leave(name, [y], inputs, lambda *late: call.late_weight_gradient(*late).unflatten(-1, shape[1:]))
    return y.unflatten(-1, shape[1:])


class Call:
    """The casts and products of one call."""

    def __init__(self, use: GroupedUse, dtype: torch.dtype, native: bool) -> None:
        self.use, self.dtype, self.native = use, dtype, native

    def how(self, x: Tensor) -> str:
        return "torch" if not self.native else chosen(x, self.use.fp8.kernels)

    def by_row(self, x: Tensor, cut: tuple[str, ...]) -> Operand:
        """x[row width] for a sum over its width, which these axes cut."""
        return kernels.cast_rows(x, self.use.mesh, cut, self.use.fp8.margin, self.how(x))

    def by_group(self, x: Tensor, ends: Tensor) -> tuple[Operand, Tensor]:
        """(x[row width] for sums over the rows of each group, the ends of the groups there)."""
        return kernels.cast_groups(x, ends, self.use.mesh, self.use.rows, self.use.fp8.margin, self.how(x))

    def cast_w(self, w: Tensor) -> tuple[Operand, Operand | None]:
        """(w for the forward, w for the gradient by x: None unless it is kept for all microbatches)."""
        casts = self.use.casts
        key = None if casts is None else casts.key(w)
        if casts is not None and key is not None and key in casts.found:
            return casts.found[key]
        m = w.flatten(2)
        there = kernels.cast_columns(m, self.use.mesh, self.use.sums, self.use.fp8.margin, self.how(m))
        if casts is None or key is None:
            return there, None
        here = self.cast_w_by_x(m)
        casts.found[key] = there, here
        return there, here

    def cast_w_by_x(self, w: Tensor) -> Operand:
        """w[expert in out] for a sum over its columns."""
        rows = self.by_row(w.reshape(-1, w.shape[2]), self.use.columns)
        return Operand(rows.data.view(w.shape), rows.scale.view(w.shape[:2]))

    def multiply(self, x: Operand, w: Operand, ends: Tensor) -> Tensor:
        return kernels.products(x.data, x.scale, w.data, w.scale, ends, self.dtype, self.native)

    def multiply_groups(self, x: Operand, g: Operand, padded: Tensor) -> Tensor:
        return kernels.products_by_group(x.data, x.scale, g.data, g.scale, padded, self.dtype, self.native)

    def late_weight_gradient(self, data: Tensor, scale: Tensor, padded: Tensor, ends: Tensor, g: Tensor) -> Tensor:
        """The gradient by w of what the tape kept of x, and the output's gradient g[row out …]."""
        with torch.no_grad():
            turned, _ = self.by_group(g.reshape(g.shape[0], -1), ends)
            return self.multiply_groups(Operand(data, scale), turned, padded)


class Fp8Grouped(Function):
    """(x, w[expert in out], ends, the products, x for the gradient by w (data, scale, ends), w for the gradient by x (data,
    scale), call) -> the products, with their gradients."""

    @staticmethod
    def forward(
        x: Tensor,
        w: Tensor,
        ends: Tensor,
        y: Tensor,
        x_data: Tensor | None,
        x_scale: Tensor | None,
        padded: Tensor | None,
        w_data: Tensor | None,
        w_scale: Tensor | None,
        call: Call,
    ) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, w, ends, _, x_data, x_scale, padded, w_data, w_scale, ctx.call = inputs
        by_x, by_w = ctx.needs_input_grad[:2]
        kept = w_data is not None
        of_x = (x_data, x_scale, padded) if by_w else (None, None, None)
        of_w = (w_data, w_scale) if by_x else (None, None)
        ctx.save_for_backward(ends, *of_x, *of_w, w if by_x and not kept else None)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UserError(
                "the gradients of an fp8 product are differentiated: use torch.func, which has them in the compute dtype"
            )
        ends, x_data, x_scale, padded, w_data, w_scale, w = ctx.saved_tensors
        by_x, by_w = ctx.needs_input_grad[:2]
        call: Call = ctx.call
        gx = gw = None
        if by_x:
            of_w = call.cast_w_by_x(w) if w_data is None else Operand(w_data, w_scale)
            gx = call.multiply(call.by_row(g, call.use.columns), of_w, ends)
        if by_w:
            gw = call.multiply_groups(Operand(x_data, x_scale), call.by_group(g, ends)[0], padded)
        return gx, gw, *(None,) * 8
