"""The product of an activation with a weight in fp8, and its two gradients, which are such products too.

    y = x w        x cast along sums,     w along sums         kept for backward: x cast along rows, and w (a parameter)
    gx = g wᵀ      g cast along columns,  w along columns
    gw = xᵀ g      x cast along rows,     g along rows

Sums are in float32; results, and everything else, in the compute dtype. Gradients are those of the product itself: a cast
counts as the identity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from fmegatron.errors import UserError
from fmegatron.fp8 import kernels, te
from fmegatron.fp8.cast import Cut, Operand, Share, cast
from fmegatron.fp8.multiply import multiply
from fmegatron.fp8.policy import FORMATS, Fp8
from fmegatron.function import apply_function, under_torch_func
from fmegatron.tape import Tape

if TYPE_CHECKING:
    from fmegatron.fp8.use import Use

X, W, G = range(3)


def fp8_product(x: Tensor, w: Tensor, use: Use, *, tape: Tape | None = None, name: str = "dot") -> Tensor:
    """As `product.product`, in fp8.

    Where a transform of torch.func is around, and so gradients may be differentiated again, the value is this one and its
    gradients are those of the same product in the compute dtype.
    """
    weight, saved = (w, None) if tape is None else tape.enter(name, w)
    tapped = tape is not None and (tape.leaf is not None or tape.tap is not None)
    by_w = tapped or (torch.is_grad_enabled() and weight.requires_grad)
    with torch.no_grad():
        call = Call(use, tuple(x.shape), tuple(w.shape), x.dtype, native_for(x, use.fp8))
        x_here, x_turned = call.cast_x(x.detach(), forward=saved is None, backward=by_w)
        w_turned, w_here = call.cast_w(w.detach()) if saved is None else (None, None)
        if saved is not None:
            y = saved[0]
        else:
            assert x_here is not None and w_turned is not None
            y = call.output(multiply(x_here, w_turned, x.dtype, native=call.native, fast=True))
    if under_torch_func():
        from fmegatron.product import Dot

        return apply_function(Dot, x, weight, y, equation_of(use))
    flat = [*(x_turned or (None, None)), *(w_here or (None, None)), None if use.scales is None else use.scales]
    y = apply_function(Fp8Dot, x, weight, y, *flat, call)
    if tape is None:
        return y
    inputs = [] if x_turned is None or not tapped else [*x_turned, *([] if use.scales is None else [use.scales])]
    return tape.leave(name, [y], inputs, call.late_weight_gradient)[0]


class Call:
    """One product of tensors of some shapes: its casts and gradients. It holds what is the same for every layer; scales and
    notes of delayed scaling come from `use`, but for `late_weight_gradient`, which gets its scales."""

    def __init__(self, use: Use, x: tuple[int, ...], w: tuple[int, ...], dtype: torch.dtype, native: bool) -> None:
        self.use, self.x, self.w, self.dtype, self.native = use, x, w, dtype, native
        self.form, self.fp8 = use.plan.form, use.fp8

    def output(self, m: Tensor) -> Tensor:
        """[rows, columns] as the product's result."""
        return self.form.to_y(m, self.x, self.w)

    def cast_x(self, x: Tensor, *, forward: bool, backward: bool) -> tuple[Operand | None, Operand | None]:
        """(x for the forward, x for the gradient by w)."""
        m = self.form.left(x)
        return self._cast(m, X, self.use.plan.x, self._share("block"), columns=forward, rows=backward)

    def cast_w(self, w: Tensor) -> tuple[Operand, Operand | None]:
        """(w for the forward, w for the gradient by x: None unless it is kept for all microbatches)."""
        casts = self.use.casts
        key = None if casts is None else casts.key(w)
        if casts is not None and key is not None and key in casts.found:
            return casts.found[key]
        m = self.form.right(w)
        keep = key is not None
        here, turned = self._cast(m, W, self.use.plan.w, self._share("tile"), columns=keep, rows=True)
        assert turned is not None
        if casts is not None and keep and here is not None:
            casts.found[key] = turned, here
        return turned, here

    def gradients(
        self, g: Tensor, x: Operand | None, w: Tensor | Operand | None, by_x: bool, by_w: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """(by x, by w), of the output's gradient."""
        m = self.form.result(g)
        g_here, g_turned = self._cast(m, G, self.use.plan.y, self._share("block"), columns=by_x, rows=by_w)
        gx = gw = None
        if by_x and g_here is not None and w is not None:
            if not isinstance(w, Operand):
                m = self.form.right(w)
                w, _ = self._cast(m, W, self.use.plan.w, self._share("tile"), columns=True, rows=False)  # type: ignore[assignment]
            assert isinstance(w, Operand)
            gx = self.form.to_x(multiply(g_here, w, self.dtype, native=self.native), self.x)
        if by_w and g_turned is not None and x is not None:
            gw = self.form.to_w(multiply(x, g_turned, self.dtype, native=self.native), self.w)
        return gx, gw

    def late_weight_gradient(self, data: Tensor, scale: Tensor, *rest: Tensor) -> Tensor:
        """The gradient by w of inputs that the tape kept: x for it, the scales of delayed scaling, and the output's gradient,
        whose magnitude the gradient by x has noted."""
        *scales, g = rest
        m = self.form.result(g)
        with torch.no_grad():
            _, g_turned = self._cast(
                m,
                G,
                self.use.plan.y,
                self._share("block"),
                columns=False,
                rows=True,
                scales=scales[0] if scales else None,
            )
            assert g_turned is not None
            return self.form.to_w(multiply(Operand(data, scale), g_turned, self.dtype, native=self.native), self.w)

    def _share(self, blocks: Share) -> Share:
        return {"rowwise": "row", "blockwise": blocks}.get(self.fp8.recipe, "tensor")  # type: ignore[return-value]

    def _cast(
        self,
        m: Tensor,
        which: int,
        cut: Cut,
        share: Share,
        *,
        columns: bool,
        rows: bool,
        scales: Tensor | None = None,
    ) -> tuple[Operand | None, Operand | None]:
        if not columns and not rows:
            return None, None
        fp8, use = self.fp8, self.use
        late = scales is not None
        scales = use.scales if scales is None else scales
        dtype = fp8.gradient_dtype if which == G else FORMATS["e4m3"]
        if self.native and fp8.backend == "te":
            return te.cast(m, dtype, columns=columns, rows=rows, cut=cut)
        how = "torch" if not self.native else kernels.chosen(m, fp8.kernels)
        scale = None if scales is None else scales[which]
        noted = use.seen is not None and not late and not under_torch_func()
        here, turned, size = cast(
            m, dtype, share, columns=columns, rows=rows, cut=cut, margin=fp8.margin, scale=scale, use=how
        )
        if noted:
            if size is None:
                size = kernels.largest_of_all(m.contiguous(), how)
            note(use.seen, which, size)
        return here, turned


class Fp8Dot(Function):
    """(x, w, the product, x for the gradient by w (two), w for the gradient by x (two), scales, call) -> the product, with its
    gradients."""

    @staticmethod
    def forward(
        x: Tensor,
        w: Tensor,
        y: Tensor,
        x_data: Tensor | None,
        x_scale: Tensor | None,
        w_data: Tensor | None,
        w_scale: Tensor | None,
        scales: Tensor | None,
        call: Call,
    ) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, w, _, x_data, x_scale, w_data, w_scale, _, ctx.call = inputs
        by_x, by_w = ctx.needs_input_grad[:2]
        kept = w_data is not None
        ctx.save_for_backward(
            x_data if by_w else None,
            x_scale if by_w else None,
            w_data if by_x else None,
            w_scale if by_x else None,
            w if by_x and not kept else None,
        )

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UserError(
                "the gradients of an fp8 product are differentiated: use torch.func, which has them in the compute dtype"
            )
        x_data, x_scale, w_data, w_scale, w = ctx.saved_tensors
        by_x, by_w = ctx.needs_input_grad[:2]
        x = None if x_data is None else Operand(x_data, x_scale)
        other = w if w_data is None else Operand(w_data, w_scale)
        gx, gw = ctx.call.gradients(g, x, other, by_x, by_w)
        return gx, gw, None, None, None, None, None, None, None


def note(seen: Tensor | None, which: int, size: Tensor) -> None:
    """Notes the largest magnitude of an operand, in place: a second run of the same block notes the same."""
    if seen is not None:
        seen[which].copy_(torch.maximum(seen[which], size))


def native_for(x: Tensor, fp8: Fp8) -> bool:
    """Do the matrix units multiply? Raises UserError where they should but cannot."""
    if fp8.backend == "te":
        te.check()
    if fp8.backend == "emulated" or under_torch_func():
        return False
    if x.device.type != "cuda":
        if fp8.backend != "auto" and not torch.compiler.is_compiling() and x.device.type != "meta":
            raise UserError(
                f"Fp8(backend={fp8.backend!r}) needs a GPU, but the product is on {x.device.type}: use auto or emulated"
            )
        return False
    if not torch.compiler.is_compiling() and torch.cuda.get_device_capability(x.device) < (8, 9):
        raise UserError(
            "fp8 needs a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell): leave fp8 out, or use "
            "Fp8(backend='emulated')"
        )
    return True


def equation_of(use: Use) -> str:
    """The equation of a product's form, in single letters."""
    form = use.plan.form
    rows = [chr(97 + i) for i in range(form.rows)]
    sums = [chr(97 + form.rows + i) for i in range(form.sums)]
    columns = [chr(97 + form.rows + form.sums + i) for i in range(form.columns)]

    def placed(names: list[str], order: tuple[int, ...]) -> str:
        out = [""] * len(order)
        for name, at in zip(names, order, strict=True):
            out[at] = name
        return "".join(out)

    y = "".join((rows + columns)[i] for i in form.y)
    return f"{placed(rows + sums, form.x)},{placed(sums + columns, form.w)}->{y}"
