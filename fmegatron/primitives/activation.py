"""Activations, plain and gated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional

from fmegatron.errors import UserError
from fmegatron.function import apply_function, linear_map
from fmegatron.kernels import chosen
from fmegatron.operators import custom_operator
from fmegatron.primitives._function import graph_wanted, may_overwrite, operator, wide


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None, *, dim: int = -2, kernel: str = "auto") -> torch.Tensor:
    """silu(gate) * up, of one shape (Shazeer 2020). Backward keeps the two arguments and nothing between.

    Without up: of gate[... 2 mlp], which holds both as halves, gate first; with dim=-1 of gate[... mlp 2], which holds them
        by turns: gate 0, up 0, gate 1, up 1, … (a decoder's `gate_up`). Their gradient is one tensor like it.
    dim: where the 2 is, of gate without up: -2 or -1.
    kernel: "triton": one pass forward and one backward; "torch": torch's operations; "auto": the first on CUDA (see
        `fmegatron.kernels`).

    Raises UserError when the shapes differ.
    """
    return _gated("swiglu", gate, up, dim, "silu", kernel)


def geglu(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    approximate: str = "none",
    dim: int = -2,
    kernel: str = "auto",
) -> torch.Tensor:
    """gelu(gate) * up, of one shape (Shazeer 2020); `approximate` as in `gelu` (Gemma: "tanh"). Backward keeps the two
    arguments and nothing between. Without up, `dim` and `kernel`: as `swiglu`.

    Raises UserError when the shapes differ and for an unknown `approximate`.
    """
    _check_approximate("geglu", approximate)
    return _gated("geglu", gate, up, dim, "gelu" if approximate == "none" else "gelu_tanh", kernel)


def clamped_swiglu(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    limit: float = 7.0,
    slant: float = 1.702,
    dim: int = -2,
    kernel: str = "auto",
) -> torch.Tensor:
    """g * sigmoid(slant * g) * (u + 1), with g = min(gate, limit) and u = up within ±limit, of one shape (GPT-OSS). Without up,
    and `dim`: as `swiglu`. By torch's operations, whatever `kernel` says: where it counts, in experts, `fmegatron.kernels.moe` has it.

    Raises UserError when the shapes differ.
    """
    _check_gated("clamped_swiglu", gate, up, dim)
    gate, up = (gate, up) if up is not None else _taken_apart(gate, dim)
    g, u = (x.to(wide(x.dtype)) for x in (gate, up))
    g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (g * (slant * g).sigmoid() * (u + 1)).to(gate.dtype)


def gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016), exactly ("none") or by their formula
    with tanh ("tanh": GPT-2, Gemma). Backward keeps x.

    Raises UserError for an unknown `approximate`.
    """
    _check_approximate("gelu", approximate)
    return apply_function(_Activation, x, "gelu" if approximate == "none" else "gelu_tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 x), the cheaper approximation of gelu (CLIP). Backward keeps x."""
    return apply_function(_Activation, x, "quick_gelu")


def relu2(x: torch.Tensor) -> torch.Tensor:
    """relu(x)² (So et al. 2021, Primer). Backward keeps x."""
    return apply_function(_Activation, x, "relu2")


def _gated(what: str, gate: torch.Tensor, up: torch.Tensor | None, dim: int, kind: str, kernel: str) -> torch.Tensor:
    _check_gated(what, gate, up, dim)
    fast = chosen(what, kernel, gate, up)
    if fast and up is None:
        return apply_function(_GatedPair, gate, dim, kind)
    gate, up = (gate, up) if up is not None else _taken_apart(gate, dim)
    return apply_function(_Gated, gate, up, kind, fast)


def _check_gated(what: str, gate: torch.Tensor, up: torch.Tensor | None, dim: int) -> None:
    if up is not None:
        if gate.shape != up.shape:
            raise UserError(
                f"{what}: gate has shape {tuple(gate.shape)} and up {tuple(up.shape)}: give two tensors of one shape"
            )
        return
    if dim not in (-2, -1):
        raise UserError(
            f"{what}(dim={dim!r}): give -2, for gate and up as halves [... 2 mlp], or -1, by turns [... mlp 2]"
        )
    if gate.ndim < 2 or gate.shape[dim] != 2:
        form = "[... 2 mlp], or [... mlp 2] with dim=-1" if dim == -2 else "[... mlp 2] for dim=-1"
        raise UserError(
            f"{what}: gate has shape {tuple(gate.shape)} and there is no up: give both, or one tensor {form}"
        )


def _taken_apart(both: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
    """(gate, up). Halves are views, and so are turns on a GPU; on a CPU, whose operations take every second number five times
    more slowly than a row, they are copies, in place of which `both` need not be kept."""
    if dim == -1 and both.is_cpu and not torch.compiler.is_compiling():
        return linear_map(_halves, _turns, [both])
    return both.unbind(dim)


def _halves(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone(memory_format=torch.contiguous_format) for x in xs[0].unbind(-1)]


def _turns(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    if not may_overwrite():
        return [torch.stack(xs, -1)]
    both = xs[0].new_empty((*xs[0].shape, 2))  # stack takes three times as long
    for i, x in enumerate(xs):
        both.select(-1, i).copy_(x)
    return [both]


def _check_approximate(what: str, approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise UserError(f'{what}(approximate={approximate!r}): give "none" (exact) or "tanh"')


class _Activation(Function):
    """(x, kind) -> activation(x).

    (torch's own gelu keeps x alone too, but the third derivative of its tanh form is NaN from |x| = 40 on.)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, kind: str) -> torch.Tensor:
        return _activation(x, kind)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.kind = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return _pulled_back(g, x, ctx.kind), None


class _Gated(Function):
    """(gate, up, kind, by Triton's kernels?) -> activation(gate) * up."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gate: torch.Tensor, up: torch.Tensor, kind: str, fast: bool) -> torch.Tensor:
        if fast:
            return _by_kernel(gate, up, kind)
        if torch.compiler.is_compiling() and kind == "silu":
            y, _ = _silu_and_slope(gate)
            return (y * up).to(gate.dtype)
        return _times(_activation(gate, kind), up)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.kind, ctx.fast = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        if ctx.fast and not graph_wanted():
            return *_gradients_by_kernel(g, gate, up, ctx.kind), None, None
        if torch.compiler.is_compiling() and not graph_wanted() and ctx.kind == "silu":
            y, slope = _silu_and_slope(gate)
            return (g * up * slope).to(gate.dtype), (g * y).to(up.dtype), None, None
        g_gate = g_up = None
        if ctx.needs_input_grad[0]:
            g_gate = _pulled_back(g * up, gate, ctx.kind)
        if ctx.needs_input_grad[1]:
            g_up = _times(_activation(gate, ctx.kind), g)
        return g_gate, g_up, None, None


class _GatedPair(Function):
    """(gate and up, halves or turns; the dim that says which, kind) -> activation(gate) * up, by Triton's kernels."""

    @staticmethod
    def forward(both: torch.Tensor, dim: int, kind: str) -> torch.Tensor:
        return _pair(both, dim, kind)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        both, ctx.dim, ctx.kind = inputs
        ctx.save_for_backward(both)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (both,) = ctx.saved_tensors
        if graph_wanted():
            gate, up = both.unbind(ctx.dim)
            act = _activation(gate, ctx.kind)
            return torch.stack([_pulled_back(g * up, gate, ctx.kind), act * g], ctx.dim), None, None
        return _pair_backward(g, both, ctx.dim, ctx.kind), None, None


def _by_kernel(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.fmegatron.gated(gate, up, kind)
    from fmegatron.kernels import gated

    return gated.forward(gate, up, kind)


def _gradients_by_kernel(
    g: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.compiler.is_compiling():
        return torch.ops.fmegatron.gated_backward(g, gate, up, kind)
    from fmegatron.kernels import gated

    return gated.backward(g, gate, up, kind)


# Operators, so that compiled code calls the kernels.


@custom_operator("fmegatron::gated")
def _gated_op(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    return _by_kernel(gate, up, kind)


@_gated_op.register_fake
def _(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    return gate.new_empty(gate.shape)


@custom_operator("fmegatron::gated_backward")
def _gated_backward_op(
    g: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return _gradients_by_kernel(g, gate, up, kind)


@_gated_backward_op.register_fake
def _(g: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


@operator("fmegatron::gated_pair")
def _pair(both: torch.Tensor, dim: int, kind: str) -> torch.Tensor:
    from fmegatron.kernels import gated

    return gated.forward_pair(both, dim, kind)


@_pair.register_fake
def _(both: torch.Tensor, dim: int, kind: str) -> torch.Tensor:
    return both.new_empty(both.select(dim, 0).shape)


@operator("fmegatron::gated_pair_backward")
def _pair_backward(g: torch.Tensor, both: torch.Tensor, dim: int, kind: str) -> torch.Tensor:
    from fmegatron.kernels import gated

    return gated.backward_pair(g, both, dim, kind)


@_pair_backward.register_fake
def _(g: torch.Tensor, both: torch.Tensor, dim: int, kind: str) -> torch.Tensor:
    return both.new_empty(both.shape)


def _silu_and_slope(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(silu, its derivative) at x in fp32 or wider, for compiled code: of one sigmoid, which forward and backward share
    where the first is recomputed in the second's kernel."""
    x = x.to(wide(x.dtype))
    s = x.sigmoid()
    y = x * s
    return y, s + y * (1 - s)


def _activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        return functional.silu(x)
    if kind == "quick_gelu":
        return _times((1.702 * x).sigmoid(), x)
    if kind == "relu2":
        y = x.relu()
        return _times(y, y)
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _pulled_back(g: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """g times the derivative of the activation at x: torch's kernel, or formulas that are differentiable again."""
    if kind == "quick_gelu":  # silu(1.702 x) / 1.702
        return _pulled_back(g, 1.702 * x, "silu")
    if kind == "relu2":
        return 2 * g * x.relu()
    if graph_wanted():
        return (g * _slope(x.to(wide(x.dtype)), kind)).to(x.dtype)
    if kind == "silu":
        return torch.ops.aten.silu_backward.default(g, x)
    return torch.ops.aten.gelu_backward.default(g, x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _slope(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        s = x.sigmoid()
        return s * (1 + x * (1 - s))
    if kind == "gelu":
        below = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return below + x * density
    k, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(k * (x + cubic * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * cubic * x * x)


def _times(new: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """new * other, where `new` was made just now and is of the result's shape and dtype."""
    in_place = may_overwrite() and not torch.is_grad_enabled() and new.dtype == other.dtype
    return new.mul_(other) if in_place else new * other
