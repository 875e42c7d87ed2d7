"""The local part of a mixture of experts: sorting choices by expert, rows of tokens, weighted gated activations.

A *choice* is one of the experts that a token has chosen; a *row* is a choice that is computed. Rows lie in groups, one
group behind the other for each expert:

    order, inverse, ends = sort_by_expert(experts, n)            # experts int64[token choice]
    x = gather_rows(tokens, order, inverse, choices)             # [row embed]
    w = gather_rows(weights.reshape(-1, 1), order, inverse, 1)   # [row one]
    h = grouped_product(x, gate_up, ends)                        # fmegatron.primitives.grouped
    a = weighted_gated(h, w[:, 0], ends)                         # activation(gate) · up · w
    y = sum_choices(grouped_product(a, down, ends), order, inverse, choices)

Sizes stay on the device, and nothing waits for it. Rows behind the last group (`ends[-1]`) belong to no choice: torch's
grouped product leaves them as its memory was, and no function here reads them or lets them reach a gradient. No kernel
adds atomically, so results are the same every time.

kernel, in all: "torch": torch's operations; "triton": one-pass kernels; "auto": the latter on CUDA (`kernels.chosen`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fmegatron.errors import UserError
from fmegatron.function import apply_function, under_torch_func
from fmegatron.kernels import chosen
from fmegatron.primitives._function import graph_wanted, operator, wide
from fmegatron.primitives.activation import _activation, _slope

GATED = ("swiglu", "geglu", "geglu_tanh", "clamped_swiglu")
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
_UNROLLED = 64  # most choices of a token that the kernels take


# -------------------------------------------------------------------------------------------------------------- sorting


def sort_by_expert(
    experts: Tensor, n_experts: int, *, rows: int | None = None, kernel: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Choices in the order of their experts, equal ones in the order of tokens (a stable counting sort).

    experts: int64 or int32, [token choice] or of any shape; a value outside of 0 … n_experts - 1 (as `n_experts`) is no
        choice, and gets no row.
    rows: how many rows to make, at least as many as there are choices with an expert (further ones are lost) and at
        most as many as there are choices; None: one for each.

    Returns (order int32[row], the choice of each row, -1 for a row without one; inverse int32[token · choice], the row of
    each choice, -1 for none; ends int32[expert], the row behind each expert's last).
    """
    total = experts.numel()
    rows = total if rows is None else rows
    fast = chosen("sort_by_expert", kernel, experts.new_empty(0, dtype=torch.float32))
    return (_sort.__wrapped__ if under_torch_func() else _sort)(experts.reshape(-1), n_experts, rows, fast)


@operator("fmegatron::sort_by_expert")
def _sort(experts: Tensor, groups: int, rows: int, fast: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not 0 <= rows <= experts.numel():
        raise UserError(f"sort_by_expert(rows={rows}): give at most {experts.numel()}, the number of choices, or None")
    if fast:
        from fmegatron.kernels import moe_triton

        return moe_triton.sort(experts.contiguous(), groups, rows)
    small = torch.int16 if groups < 2**15 else torch.int32  # a radix sort takes as many passes as the type has bytes
    real = (experts >= 0) & (experts < groups)
    keys, choice = torch.where(real, experts, groups).to(small).sort(stable=True)
    ends = torch.searchsorted(keys, torch.arange(groups, dtype=small, device=keys.device), right=True, out_int32=True)
    real, at = keys < groups, torch.arange(len(keys), device=keys.device)
    order = torch.where(real, choice, -1).to(torch.int32)[:rows].clone()
    inverse = torch.zeros_like(at).scatter(0, choice, torch.where(real, at, -1)).to(torch.int32)
    return order, inverse, ends


@_sort.register_fake
def _(experts: Tensor, groups: int, rows: int, fast: bool) -> tuple[Tensor, Tensor, Tensor]:
    order, inverse, ends = (experts.new_empty(n, dtype=torch.int32) for n in (rows, experts.shape[0], groups))
    return order, inverse, ends


# --------------------------------------------------------------------------------------------------------- best experts


def top_experts(values: Tensor, k: int, *, kernel: str = "auto") -> Tensor:
    """int64[… k]: the places of the k largest of values[… route], the largest first, of equal ones the first. No gradient.

    The same everywhere, which torch.topk does not promise of equal values.
    """
    values = values.detach()
    fast = values.dtype == torch.float32 and k <= _UNROLLED and values.shape[-1] <= 1024
    fast = chosen("top_experts", kernel, values) and fast
    return (_top.__wrapped__ if under_torch_func() else _top)(values, k, fast)


@operator("fmegatron::moe_top_experts")
def _top(values: Tensor, k: int, fast: bool) -> Tensor:
    if fast:
        from fmegatron.kernels import moe_triton

        return moe_triton.best(values.reshape(-1, values.shape[-1]), k).view(*values.shape[:-1], k)
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


@_top.register_fake
def _(values: Tensor, k: int, fast: bool) -> Tensor:
    return values.new_empty(*values.shape[:-1], k, dtype=torch.int64)


# ------------------------------------------------------------------------------------------------------- rows of tokens


def gather_rows(x: Tensor, order: Tensor, inverse: Tensor, choices: int, *, kernel: str = "auto") -> Tensor:
    """x[token embed] -> [row embed]: the token of each row's choice, zeros for a row without one.

    order, inverse: of `sort_by_expert`, or any two that say the same: a row's choice, below 0 for none; a choice's row, below
        0 or from the number of rows on for none. choices: how many each token has: choice n is of token n // choices.
    The backward is `sum_choices`, in one pass. Differentiable any number of times.
    """
    return apply_function(_GatherRows, x, order, inverse, choices, _fast_rows("gather_rows", kernel, x, choices))


def sum_choices(y: Tensor, order: Tensor, inverse: Tensor, choices: int, *, kernel: str = "auto") -> Tensor:
    """y[row embed] -> [token embed]: the sum of the rows of each token's choices, in fp32 or wider.

    A choice without a row adds nothing. The transpose of `gather_rows`, whose arguments it takes; its backward.
    """
    return apply_function(_SumChoices, y, order, inverse, choices, _fast_rows("sum_choices", kernel, y, choices))


def _fast_rows(what: str, kernel: str, x: Tensor, choices: int) -> bool:
    # one number a row, as weights are, is work for torch's own gather
    fits = choices <= _UNROLLED and (x.shape[-1] > 1 or kernel != "auto")
    return chosen(what, kernel, x) and fits


class _GatherRows(Function):
    """(x, order, inverse, choices, by Triton's kernels?) -> rows."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor, choices: int, fast: bool) -> Tensor:
        return _gather(x, order, inverse, choices, fast)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, order, inverse, ctx.choices, ctx.fast = inputs
        ctx.save_for_backward(order, inverse)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        order, inverse = ctx.saved_tensors
        return apply_function(_SumChoices, g, order, inverse, ctx.choices, ctx.fast), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        return _each(_GatherRows, info, in_dims, args)


class _SumChoices(Function):
    """(rows, order, inverse, choices, by Triton's kernels?) -> sums."""

    @staticmethod
    def forward(y: Tensor, order: Tensor, inverse: Tensor, choices: int, fast: bool) -> Tensor:
        return _sum(y, order, inverse, choices, fast)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, order, inverse, ctx.choices, ctx.fast = inputs
        ctx.save_for_backward(order, inverse)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        order, inverse = ctx.saved_tensors
        return apply_function(_GatherRows, g, order, inverse, ctx.choices, ctx.fast), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        return _each(_SumChoices, info, in_dims, args)


def _each(function: type[Function], info: Any, in_dims: Any, args: Any) -> tuple[Tensor, int]:
    runs = []
    for i in range(info.batch_size):
        runs.append(function.apply(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True))))
    return torch.stack(runs), 0


@operator("fmegatron::moe_gather_rows")
def _gather(x: Tensor, order: Tensor, inverse: Tensor, choices: int, fast: bool) -> Tensor:
    if inverse.numel() != x.shape[0] * choices:
        raise UserError(
            f"gather_rows: {x.shape[0]} tokens of {choices} choices each do not fit inverse, which has {inverse.numel()} "
            "choices: give the choices of a token as `choices`"
        )
    if fast:
        from fmegatron.kernels import moe_triton

        return moe_triton.gather(x, order, inverse, choices)
    if x.shape[0] == 0:
        return x.new_zeros(order.shape[0], x.shape[1])
    found = x.index_select(0, order.clamp(min=0) // choices)
    return found.masked_fill_((order < 0)[:, None], 0)


@_gather.register_fake
def _(x: Tensor, order: Tensor, inverse: Tensor, choices: int, fast: bool) -> Tensor:
    return x.new_empty(order.shape[0], x.shape[1])


@operator("fmegatron::moe_sum_choices")
def _sum(y: Tensor, order: Tensor, inverse: Tensor, choices: int, fast: bool) -> Tensor:
    if inverse.numel() % choices or y.shape[0] != order.shape[0]:
        raise UserError(
            f"sum_choices: y has {y.shape[0]} rows, order {order.shape[0]}, and inverse {inverse.numel()} choices, "
            f"{choices} of each token: give all of one sort_by_expert"
        )
    if fast:
        from fmegatron.kernels import moe_triton

        return moe_triton.add_up(y, inverse, choices)
    inverse = inverse.view(-1, choices)
    if y.shape[0] == 0:
        return y.new_zeros(inverse.shape[0], y.shape[1])
    total = y.new_zeros(inverse.shape[0], y.shape[1], dtype=wide(y.dtype))
    for row in inverse.unbind(1):  # one choice of all tokens at a time, so that memory is that of tokens
        none = (row < 0) | (row >= len(y))
        total += y.index_select(0, row.masked_fill(none, 0)).masked_fill_(none[:, None], 0)
    return total.to(y.dtype)


@_sum.register_fake
def _(y: Tensor, order: Tensor, inverse: Tensor, choices: int, fast: bool) -> Tensor:
    return y.new_empty(inverse.shape[0] // choices, y.shape[1])


# ----------------------------------------------------------------------------------------- gated activation with weight


def weighted_gated(
    h: Tensor,
    w: Tensor,
    ends: Tensor | None = None,
    *,
    activation: str = "swiglu",
    limit: float = 7.0,
    slant: float = 1.702,
    kernel: str = "auto",
) -> Tensor:
    """activation(gate) · up · w of each row, in one pass: h[row 2 emlp] or [row 2·emlp], gate first -> [row emlp].

    w: [row], of any floating dtype: the weight that the router gave to the row's expert. Applied here and not behind the
        next product, it costs no pass of its own, and its gradient needs no output of that product.
    ends: int32[expert] of `sort_by_expert`: rows behind the last group give zeros and get zero gradients, whatever is in
        them; None: all rows are real.
    activation: "swiglu", "geglu", "geglu_tanh" as in the dense feed-forward; "clamped_swiglu": GPT-OSS's
        g · sigmoid(slant · g) · (u + 1), with g = min(gate, limit) and u = up within ±limit.

    The backward keeps h and w, computes the activation again, and sums the weight's gradient in fp32 or wider.
    Raises UserError for an unknown activation, and for shapes that do not fit.
    """
    if activation not in GATED:
        raise UserError(f"weighted_gated(activation={activation!r}): use one of {', '.join(GATED)}")
    if h.ndim == 3 and h.shape[1] == 2:
        h = h.flatten(1)
    if h.ndim != 2 or h.shape[1] % 2 or w.ndim != 1:
        raise UserError(
            f"weighted_gated: h has shape {tuple(h.shape)} and w {tuple(w.shape)}: give h[row 2 emlp] and w[row]"
        )
    fast = chosen("weighted_gated", kernel, h)
    return apply_function(_WeightedGated, h, w, ends, activation, float(limit), float(slant), fast)


class _WeightedGated(Function):
    """(h, w, ends, activation, limit, slant, by Triton's kernels?) -> activation(gate) · up · w."""

    @staticmethod
    def forward(h: Tensor, w: Tensor, ends: Tensor | None, kind: str, limit: float, slant: float, fast: bool) -> Tensor:
        return _weighted(h, w, ends, kind, limit, slant, fast)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        h, w, ends, *ctx.form = inputs
        ctx.save_for_backward(h, w, ends)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        h, w, ends = ctx.saved_tensors
        *form, fast = ctx.form
        if graph_wanted():
            return *_gradients(g, h, w, ends, *form), None, None, None, None, None
        return *_weighted_backward(g, h, w, ends, *form, fast), None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        return _each(_WeightedGated, info, in_dims, args)


@operator("fmegatron::moe_weighted_gated")
def _weighted(h: Tensor, w: Tensor, ends: Tensor | None, kind: str, limit: float, slant: float, fast: bool) -> Tensor:
    if fast:
        from fmegatron.kernels import moe_triton

        return moe_triton.weighted(h, w, ends, kind, limit, slant)
    act, _, up, _ = _halves(h, kind, limit, slant)
    return _only_real((act * up * w[:, None].to(act.dtype)).to(h.dtype), ends)


@_weighted.register_fake
def _(h: Tensor, w: Tensor, ends: Tensor | None, kind: str, limit: float, slant: float, fast: bool) -> Tensor:
    return h.new_empty(h.shape[0], h.shape[1] // 2)


@operator("fmegatron::moe_weighted_gated_backward")
def _weighted_backward(
    g: Tensor, h: Tensor, w: Tensor, ends: Tensor | None, kind: str, limit: float, slant: float, fast: bool
) -> tuple[Tensor, Tensor]:
    if fast:
        from fmegatron.kernels import moe_triton

        return moe_triton.weighted_backward(g, h, w, ends, kind, limit, slant)
    return _gradients(g, h, w, ends, kind, limit, slant)


@_weighted_backward.register_fake
def _(
    g: Tensor, h: Tensor, w: Tensor, ends: Tensor | None, kind: str, limit: float, slant: float, fast: bool
) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape), w.new_empty(w.shape)


def _gradients(
    g: Tensor, h: Tensor, w: Tensor, ends: Tensor | None, kind: str, limit: float, slant: float
) -> tuple[Tensor, Tensor]:
    """(of h, of w) in torch's operations, differentiable again."""
    h, g = _only_real(h, ends), _only_real(g, ends)
    act, slope, up, by_up = _halves(h, kind, limit, slant)
    g = g.to(act.dtype)
    by_product = g * w[:, None].to(act.dtype)
    by_h = torch.cat([by_product * up * slope, by_product * act * by_up], 1)
    return by_h.to(h.dtype), (g * act * up).sum(1).to(w.dtype)


def _halves(h: Tensor, kind: str, limit: float, slant: float) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
    """(activation of the gate, its derivative, the factor that up becomes, its derivative), in fp32 or wider."""
    gate, up = h.to(wide(h.dtype)).chunk(2, 1)
    if kind != "clamped_swiglu":
        name = _ACTIVATIONS[kind]
        return _activation(gate, name), _slope(gate, name), up, 1.0
    x = gate.clamp(max=limit)
    s = (slant * x).sigmoid()
    act = x * s
    slope = (s + slant * act * (1 - s)) * (gate <= limit)
    return act, slope, up.clamp(-limit, limit) + 1, ((up <= limit) & (up >= -limit)).to(up.dtype)


def _only_real(x: Tensor, ends: Tensor | None) -> Tensor:
    """x[row …] with zeros behind the last group."""
    if ends is None:
        return x
    real = torch.arange(x.shape[0], device=x.device) < ends[-1]
    return torch.where(real[:, None], x, torch.zeros((), dtype=x.dtype, device=x.device))


# --------------------------------------------------------------------------------------------------------------- biases


def add_group_bias(
    x: Tensor, bias: Tensor, ends: Tensor, *, scale: Tensor | None = None, kernel: str = "auto"
) -> Tensor:
    """x[row columns] + bias[expert columns] of each row's expert, times scale[row] where it is given.

    ends: as in `weighted_gated`; rows behind the last group stay what they are. The bias's gradient is summed in fp32 or
    wider, without atomics. With the weight applied in front of a product, the product's bias needs it as `scale`.
    """
    spread = apply_function(_Spread, bias, ends, x.detach(), chosen("add_group_bias", kernel, x, bias))
    return x + (spread if scale is None else spread * scale[:, None].to(x.dtype))


class _Spread(Function):
    """(values[group columns], ends, x, by Triton's kernels?) -> [row columns] for x's rows, each its group's; else zeros."""

    @staticmethod
    def forward(values: Tensor, ends: Tensor, x: Tensor, fast: bool) -> Tensor:
        return _spread_groups(values, ends, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, ends, _, ctx.fast = inputs
        ctx.save_for_backward(ends)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return apply_function(_SumGroups, g, ctx.saved_tensors[0], ctx.fast), None, None, None


class _SumGroups(Function):
    """(x[row columns], ends, by Triton's kernels?) -> [group columns], the sum of each group's rows."""

    @staticmethod
    def forward(x: Tensor, ends: Tensor, fast: bool) -> Tensor:
        return _sum_groups(x, ends, fast)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        x, ends, ctx.fast = inputs
        ctx.save_for_backward(ends, x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        ends, x = ctx.saved_tensors
        return apply_function(_Spread, g, ends, x.detach(), ctx.fast), None, None


def _group_of(ends: Tensor, rows: int) -> Tensor:
    """int64[row]; the number of groups for rows behind the last."""
    return torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)


@operator("fmegatron::moe_spread_groups")
def _spread_groups(values: Tensor, ends: Tensor, x: Tensor) -> Tensor:
    group = _group_of(ends, x.shape[0])
    found = values.index_select(0, group.clamp(max=ends.shape[0] - 1))
    return found.masked_fill_((group == ends.shape[0])[:, None], 0)


@_spread_groups.register_fake
def _(values: Tensor, ends: Tensor, x: Tensor) -> Tensor:
    return values.new_empty(x.shape[0], values.shape[1])


@operator("fmegatron::moe_sum_groups")
def _sum_groups(x: Tensor, ends: Tensor, fast: bool) -> Tensor:
    if fast:
        from fmegatron.kernels import moe_triton

        return moe_triton.sum_groups(x, ends)
    total = x.new_zeros(ends.shape[0] + 1, x.shape[1], dtype=wide(x.dtype))
    return total.index_add_(0, _group_of(ends, x.shape[0]), x.to(total.dtype))[:-1].to(x.dtype)


@_sum_groups.register_fake
def _(x: Tensor, ends: Tensor, fast: bool) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1])


# --------------------------------------------------------------------------------------------------------------- router


def wide_product(x: Tensor, w: Tensor) -> Tensor:
    """x[… in] @ w[in out] -> fp32[… out] of x and w in half precision, as if both were cast to fp32 before: for the router.

    On a GPU the matrix units make it, whose products of half-precision numbers are exact and whose sums are fp32, without
    casts. Backward the fp32 gradient is taken as the sum of two half-precision numbers, 16 bits of it in bfloat16; sums
    are fp32 again, and rounded to x's and w's formats.
    """
    return apply_function(_WideProduct, x.reshape(-1, x.shape[-1]), w).unflatten(0, x.shape[:-1])


class _WideProduct(Function):
    """(x[token in], w[in out]) -> fp32[token out]"""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return _multiply_wide(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        x, w = ctx.saved_tensors
        if graph_wanted():
            return (g @ w.to(g.dtype).t()).to(x.dtype), (x.to(g.dtype).t() @ g).to(w.dtype)
        return _wide_gradients(g, x, w)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        return _each(_WideProduct, info, in_dims, args)


@operator("fmegatron::moe_wide_product")
def _multiply_wide(x: Tensor, w: Tensor) -> Tensor:
    if x.device.type == "cuda" and x.dtype == w.dtype and x.dtype != torch.float32:
        return torch.mm(x, w, out_dtype=torch.float32)
    return x.float() @ w.float()


@_multiply_wide.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1], dtype=torch.float32)


@operator("fmegatron::moe_wide_gradients")
def _wide_gradients(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    if x.device.type != "cuda" or x.dtype != torch.bfloat16:  # (fp16 has not the range of a gradient)
        return (g @ w.float().t()).to(x.dtype), (x.float().t() @ g).to(w.dtype)
    high = g.to(x.dtype)
    both = torch.cat([high, (g - high).to(x.dtype)], 1)
    by_w = torch.mm(x.t(), both, out_dtype=torch.float32)
    return both @ torch.cat([w, w], 1).t(), (by_w[:, : w.shape[1]] + by_w[:, w.shape[1] :]).to(w.dtype)


@_wide_gradients.register_fake
def _(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), w.new_empty(w.shape)
