"""Normalisation over trailing dims: RMSNorm, whose dims may be sharded, and LayerNorm; each also with the residual
addition before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from fmegatron.collectives import Move, Step, run_step
from fmegatron.errors import UserError
from fmegatron.function import apply_function, under_torch_func
from fmegatron.kernels import chosen
from fmegatron.mesh import Mesh
from fmegatron.operators import custom_operator
from fmegatron.primitives._function import cast, global_size, graph_wanted, may_overwrite, sharded, wide


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float = 1e-6,
    zero_centred: bool = False,
    wide_weight: bool = False,
    dims: str | None = None,
    sh: Any = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """x[... embed], weight[embed] -> x / sqrt(mean(x²) + eps) * weight, mean over embed (Zhang and Sennrich 2019).

    The mean runs over as many trailing dims as the weight has: weight[kv group head] normalises each token's heads
    together (OLMo 2). Statistics are in fp32 (float64 for float64). Backward keeps x, the weight and one number per
    row. A weight of None means no weight, over the last dim.

    zero_centred: multiply by 1 + weight (Gemma), so that a weight decayed to zero means no scaling.
    wide_weight: multiply before the cast back to x's dtype (Gemma, OLMo 2) and not after it (Llama, Qwen, Mistral).
    dims, sh: needed where a normalised dim may be sharded. `dims` names all dims of x, such as
        "batch seq kv group head"; the last ones are the weight's, and statistics are summed over the ranks that hold
        them: one all-reduce of a number per row, and one in backward. What fills up a dim that does not divide (see
        `Rules.uneven`) is in no mean, and 0 in the result.
    kernel: "triton": one pass forward and one backward, for rows of up to 16384; "torch": torch's operations; "auto":
        the first on CUDA (see `fmegatron.kernels`).

    Raises UserError for a weight or dims that do not fit.
    """
    n = 1 if weight is None else weight.ndim
    _check_weight("rms_norm", x, weight)
    form = eps, zero_centred, wide_weight
    if dims is None and sh is None:
        return _rms_norm(x, weight, *form, kernel)
    names = [] if dims is None else dims.split()
    if len(names) != x.ndim:
        raise UserError(
            f"rms_norm(dims={dims!r}) names {len(names)} dims, x of shape {tuple(x.shape)} has {x.ndim}: with sh "
            "give dims, which names each dim of x"
        )
    if not any(sharded(sh, name) for name in names[-n:]):
        return _rms_norm(x, weight, *form, kernel)
    size = math.prod([global_size(sh, name, held) for name, held in zip(names[-n:], x.shape[-n:], strict=True)])
    x = _without_filling(x, names[-n:], sh)
    axes = sh.mesh.sorted([axis for name in names[-n:] for axis in sh.axes(name)])

    def norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return _rms_norm(x, weight, *form, kernel, sh.mesh, axes, size)

    return sh.primitive(norm, (x, weight), (" ".join(names), " ".join(names[-n:])), " ".join(names))


def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    zero_centred: bool,
    wide_weight: bool,
    kernel: str,
    mesh: Mesh | None = None,
    axes: tuple[str, ...] = (),
    size: int | None = None,
) -> torch.Tensor:
    """`rms_norm` of what a rank holds; mesh, axes, size: see `_RMSNorm`."""
    n = 1 if weight is None else weight.ndim
    rows, w = (x.flatten(-n), weight.flatten()) if weight is not None and n > 1 else (x, weight)
    if not axes and _by_kernel("rms_norm", kernel, rows, w):
        y = apply_function(_NormByKernel, rows, None, w, None, eps, False, zero_centred, wide_weight, False)[0]
    else:
        y = apply_function(_RMSNorm, rows, w, eps, zero_centred, wide_weight, mesh, axes, size)[0]
    return y.unflatten(-1, x.shape[-n:]) if n > 1 else y


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    kernel: str = "auto",
) -> torch.Tensor:
    """x[... embed], weight[embed], bias[embed] -> (x - mean) / sqrt(variance + eps) * weight + bias, over embed (Ba,
    Kiros and Hinton 2016), as torch.nn.LayerNorm.

    Statistics are in fp32 (float64 for float64) and the result is rounded once, to x's dtype. Backward keeps x, the
    weight and two numbers per row. Both weight and bias may be None (OLMo 1). `kernel` as for `rms_norm`.

    Raises UserError for a weight or bias that does not fit.
    """
    _check_bias("layer_norm", x, weight, bias)
    if _by_kernel("layer_norm", kernel, x, weight, bias):
        return apply_function(_NormByKernel, x, None, weight, bias, eps, True, False, True, False)[0]
    return apply_function(_LayerNorm, x, weight, bias, eps)[0]


def add_rms_norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor | None,
    *,
    eps: float = 1e-6,
    zero_centred: bool = False,
    wide_weight: bool = False,
    kernel: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + y, its `rms_norm`), x and y[... embed]: the end of one residual branch and the beginning of the next.

    Triton's kernel reads and writes each once; in the backward it adds the gradient that reaches the sum by another way
    to that of the norm. With y None the sum is x, handed on for that addition alone: read it instead of x.
    """
    _check_weight("add_rms_norm", x, weight, dims=1)
    if _by_kernel("add_rms_norm", kernel, x, y, weight):
        out, _, total = apply_function(_NormByKernel, x, y, weight, None, eps, False, zero_centred, wide_weight, True)
        return total, out
    total = x if y is None else x + y
    return total, _rms_norm(total, weight, eps, zero_centred, wide_weight, "torch")


def add_layer_norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    kernel: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + y, its `layer_norm`); see `add_rms_norm`."""
    _check_bias("add_layer_norm", x, weight, bias)
    if _by_kernel("add_layer_norm", kernel, x, y, weight, bias):
        out, _, _, total = apply_function(_NormByKernel, x, y, weight, bias, eps, True, False, True, True)
        return total, out
    total = x if y is None else x + y
    return total, layer_norm(total, weight, bias, eps=eps, kernel="torch")


MOST_COLUMNS = 16384  # of a row that a kernel holds


def _by_kernel(what: str, kernel: str, x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Does Triton's kernel take these?"""
    if not chosen(what, kernel, x, *others):
        return False
    y = others[0] if what.startswith("add") else None
    return x.ndim >= 1 and x.shape[-1] <= MOST_COLUMNS and (y is None or y.shape == x.shape)


def _check_bias(what: str, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    _check_weight(what, x, weight, dims=1)
    if bias is not None and (weight is None or bias.shape != weight.shape):
        has = "no weight" if weight is None else f"weight of shape {tuple(weight.shape)}"
        raise UserError(f"{what}(bias of shape {tuple(bias.shape)}) with {has}: give a weight of the bias's shape")


def _check_weight(what: str, x: torch.Tensor, weight: torch.Tensor | None, *, dims: int | None = None) -> None:
    if weight is None:
        return
    if weight.ndim == 0 or dims not in (None, weight.ndim) or weight.shape != x.shape[-weight.ndim :]:
        raise UserError(
            f"{what}(weight of shape {tuple(weight.shape)}) of x of shape {tuple(x.shape)}: the weight has the shape "
            f"of x's last dim{'s' if dims is None else ''}"
        )


class _RMSNorm(Function):
    """(x, weight, eps, zero_centred, wide_weight, mesh, the axes that hold the last dim, its global size or None where none
    does) -> (y, 1 / rms)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        zero_centred: bool,
        wide_weight: bool,
        mesh: Mesh | None,
        axes: tuple[str, ...],
        size: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not axes and not zero_centred and _fused(x, weight):
            # the kernel multiplies by a weight before it rounds
            y, scale = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight if wide_weight else None, eps)
            return (y if wide_weight or weight is None else y * weight), scale
        scale = _inverse_rms(x, eps, mesh, axes, size)
        y = x * scale
        if weight is None:
            return cast(y, x.dtype), scale
        if not wide_weight:
            y = cast(y, x.dtype)
        w = cast(weight, y.dtype) if wide_weight else weight
        w = w + 1 if zero_centred else w
        y = y.mul_(w) if y.dtype == w.dtype and may_overwrite() else y * w
        return (cast(y, x.dtype) if wide_weight else y), scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, ctx.eps, ctx.zero_centred, _, ctx.mesh, ctx.axes, ctx.size = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor | None, _: Any) -> Any:
        gx = gw = None
        if g is not None:
            x, weight, scale = ctx.saved_tensors
            need, again = ctx.needs_input_grad[:2], graph_wanted()
            if again:
                scale = _inverse_rms(x, ctx.eps, ctx.mesh, ctx.axes, ctx.size)  # a function of x again
            if not again and not ctx.axes and not ctx.zero_centred and _fused(x, weight):
                size = [x.shape[-1]]
                gx, gw = torch.ops.aten._fused_rms_norm_backward(
                    g.contiguous().to(x.dtype), x, size, scale, weight, need
                )
            else:
                gx, gw = _rms_gradients(x, weight, scale, g, ctx.zero_centred, ctx.mesh, ctx.axes, ctx.size)
            gx, gw = gx if need[0] else None, gw if need[1] else None
        return gx, gw, None, None, None, None, None, None


def _fused(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Is torch's fused kernel the fastest? (Compiled code makes one of its own.)"""
    if not x.is_cuda or torch.compiler.is_compiling() or under_torch_func():
        return False
    return (weight is None or x.dtype == weight.dtype) and x.is_contiguous()


def _without_filling(x: torch.Tensor, names: Sequence[str], sh: Any) -> torch.Tensor:
    """x with zeros in what fills up its last dims, whose names these are."""
    for d, name in enumerate(reversed(names)):
        if (n := sh.uneven_size(name)) is not None:
            x = x.masked_fill((sh.index(name, n, device=x.device) < 0).view(-1, *[1] * d), 0)
    return x


def _inverse_rms(
    x: torch.Tensor, eps: float, mesh: Mesh | None, axes: tuple[str, ...], size: int | None
) -> torch.Tensor:
    """1 / sqrt(mean(x²) + eps) of each row, its `size` elements on the ranks of `axes`; None: it is here."""
    if graph_wanted():
        total = x.to(wide(x.dtype)).square().sum(-1, keepdim=True)
    else:
        total = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide(x.dtype)).square()
    return torch.rsqrt(_sum_over_ranks(total, mesh, axes) / (size or x.shape[-1]) + eps)


def _sum_over_ranks(x: torch.Tensor, mesh: Mesh | None, axes: tuple[str, ...]) -> torch.Tensor:
    """A summand on each rank -> the sum, read by work that differs along the axes; so its gradient is summed alike."""
    if mesh is None or not axes:
        return x
    step = Step("P>R", axes, (), ())
    if graph_wanted() or under_torch_func():
        return apply_function(Move, x, mesh, (step,), (None, None, None))
    return run_step(x, mesh, step)


def _rms_gradients(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    g: torch.Tensor,
    zero_centred: bool,
    mesh: Mesh | None,
    axes: tuple[str, ...],
    size: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    dtype, in_place = scale.dtype, may_overwrite() and not torch.is_grad_enabled()
    normal, gw = x * scale, None
    by_weight = g * normal
    if weight is None:
        along, gx = by_weight.sum(-1), g.to(dtype)
    else:
        gw = cast(by_weight.sum(tuple(range(x.ndim - 1))) if x.ndim > 1 else by_weight, weight.dtype)
        w = cast(weight, dtype) + 1 if zero_centred else cast(weight, dtype)
        # compiled, a product with a vector would be a kernel of its own
        along = (by_weight * w).sum(-1) if torch.compiler.is_compiling() else by_weight @ w
        gx = g * w
    along, size = _sum_over_ranks(along.unsqueeze(-1), mesh, axes), size or x.shape[-1]
    if in_place and gx is not g:
        gx = gx.addcmul_(normal, along, value=-1 / size).mul_(scale)
    else:
        gx = (gx - normal * (along / size)) * scale
    return cast(gx, x.dtype), gw


class _LayerNorm(Function):
    """(x, weight, bias, eps) -> (y, mean, 1 / standard deviation)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        size = [x.shape[-1]]
        if _half_on_cpu(x):
            w = torch.ones(size, device=x.device) if weight is None else weight.float()
            y, mean, scale = torch.native_layer_norm(x, size, w, None if bias is None else bias.float(), eps)
        else:
            exact, w, b = _alike(x, weight, bias)
            y, mean, scale = torch.native_layer_norm(exact, size, w, b, eps)
        return cast(y, x.dtype), mean, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, ctx.eps = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor | None, *_: Any) -> Any:
        if g is None:
            return None, None, None, None
        x, weight, mean, scale = ctx.saved_tensors
        need = ctx.needs_input_grad[:3]
        if graph_wanted():
            gx, gw, gb = _layer_gradients(x, weight, g, ctx.eps)
        else:
            exact, w, _ = _alike(x.float() if _half_on_cpu(x) else x, weight, None)
            # (the kernel reads of the bias its shape and dtype alone)
            gx, gw, gb = torch.ops.aten.native_layer_norm_backward(
                g.to(exact.dtype), exact, [x.shape[-1]], mean, scale, w, w, list(need)
            )
        return (
            gx.to(x.dtype) if need[0] else None,
            gw.to(weight.dtype) if need[1] else None,
            gb.to(ctx.bias_dtype) if need[2] else None,
            None,
        )


def _alike(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Any:
    """x, weight and bias in one dtype, as torch's kernel wants them."""
    if len({t.dtype for t in (x, weight, bias) if t is not None}) == 1:
        return x, weight, bias
    return tuple(None if t is None else t.to(wide(x.dtype)) for t in (x, weight, bias))


def _half_on_cpu(x: torch.Tensor) -> bool:
    """Must torch's kernel be kept from its low precision? On CPU it rounds the statistics of a half-precision x like x
    itself, unless the weight is wider, and adds up the gradients of weight and bias in half precision: after 5000 rows
    of bf16 they are 8 % off."""
    return x.device.type == "cpu" and x.dtype != wide(x.dtype)


def _layer_gradients(x: torch.Tensor, weight: torch.Tensor | None, g: torch.Tensor, eps: float) -> Any:
    """The gradients of x, weight and bias as differentiable functions of x, weight and g."""
    dtype = wide(x.dtype)
    x, g = x.to(dtype), g.to(dtype)
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normal = centred * scale
    by_weight = g * normal
    gw, gb = ((t.flatten(0, -2).sum(0) if x.ndim > 1 else t) for t in (by_weight, g))
    gn = g if weight is None else g * weight.to(dtype)
    along = (gn * normal).mean(-1, keepdim=True)
    return (gn - gn.mean(-1, keepdim=True) - normal * along) * scale, gw, gb


class _NormByKernel(Function):
    """(x, y or None, weight, bias, eps, centred (a layer norm), zero_centred, wide_weight, residual) -> (norm of x + y,
    1 / its deviation, then the mean if centred, then x + y if residual)."""

    @staticmethod
    def forward(
        x: torch.Tensor,
        y: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        centred: bool,
        zero_centred: bool,
        wide_weight: bool,
        residual: bool,
    ) -> tuple[torch.Tensor, ...]:
        form = centred, zero_centred, wide_weight
        if torch.compiler.is_compiling():
            total, out, mean, scale = torch.ops.fmegatron.norm(x, y, weight, bias, eps, *form)
        else:
            from fmegatron.kernels import norm

            total, out, mean, scale = norm.forward(x, y, weight, bias, eps, *form)
        total = x.view_as(x) if y is None else total
        return out, scale, *([mean] if centred else []), *([total] if residual else [])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, y, weight, bias, ctx.eps, ctx.centred, ctx.zero_centred, _, ctx.residual = inputs
        ctx.added, ctx.bias_dtype = y is not None, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(*output[1 : 2 + ctx.centred])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[-1] if ctx.added else x, weight, *output[1 : 2 + ctx.centred])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor | None, *others: torch.Tensor | None) -> Any:
        x, weight, scale, *mean = ctx.saved_tensors
        g_total = others[-1] if ctx.residual else None
        gx, gw, gb = g_total, None, None
        if g is not None:
            gx, gw, gb = _NormByKernel._gradients(ctx, g, g_total, x, weight, scale, *mean)
            gw = gw.to(weight.dtype) if gw is not None and ctx.needs_input_grad[2] else None
            gb = gb.to(ctx.bias_dtype) if gb is not None and ctx.bias_dtype is not None else None
        return gx, gx if ctx.added else None, gw, gb, *[None] * 5

    @staticmethod
    def _gradients(
        ctx: Any,
        g: torch.Tensor,
        g_total: torch.Tensor | None,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        scale: torch.Tensor,
        mean: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if graph_wanted():
            if ctx.centred:
                gx, gw, gb = _layer_gradients(x, weight, g, ctx.eps)
                gx = gx.to(x.dtype)
            else:
                scale, gb = _inverse_rms(x, ctx.eps, None, (), None), None
                gx, gw = _rms_gradients(x, weight, scale, g, ctx.zero_centred, None, (), None)
            return (gx if g_total is None else gx + g_total), gw, gb
        form = ctx.bias_dtype is not None, ctx.zero_centred
        if torch.compiler.is_compiling():
            gx, gw, gb = torch.ops.fmegatron.norm_backward(g, g_total, x, weight, mean, scale, *form)
        else:
            from fmegatron.kernels import norm

            gx, gw, gb = norm.backward(g, g_total, x, weight, mean, scale, *form)
        return gx, None if weight is None else gw, gb


# Operators, so that compiled code calls the kernels; an empty tensor stands for what there is not.


@custom_operator("fmegatron::norm")
def _norm_op(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centred: bool,
    zero_centred: bool,
    wide_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from fmegatron.kernels import norm

    total, out, mean, scale = norm.forward(x, y, weight, bias, eps, centred, zero_centred, wide_weight)
    return x.new_empty(0) if total is None else total, out, scale.new_empty(0) if mean is None else mean, scale


@_norm_op.register_fake
def _(x: torch.Tensor, y: torch.Tensor | None, *rest: Any) -> tuple[torch.Tensor, ...]:
    centred, rows = rest[3], (*x.shape[:-1], 1)
    total, out = x.new_empty(0 if y is None else x.shape), x.new_empty(x.shape)
    mean, scale = (x.new_empty(shape, dtype=torch.float32) for shape in (rows if centred else 0, rows))
    return total, out, mean, scale


@custom_operator("fmegatron::norm_backward")
def _norm_backward_op(
    g: torch.Tensor,
    g_total: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    scale: torch.Tensor,
    bias: bool,
    zero_centred: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from fmegatron.kernels import norm

    gx, gw, gb = norm.backward(g, g_total, x, weight, mean, scale, bias, zero_centred)
    return gx, scale.new_empty(0) if gw is None else gw, scale.new_empty(0) if gb is None else gb


@_norm_backward_op.register_fake
def _(g: torch.Tensor, g_total: Any, x: torch.Tensor, weight: Any, mean: Any, scale: torch.Tensor, *form: bool) -> Any:
    columns = x.shape[-1:]
    gw, gb = (scale.new_empty(columns if there else 0) for there in (weight is not None, form[0]))
    return x.new_empty(x.shape), gw, gb
