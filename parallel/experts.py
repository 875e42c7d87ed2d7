"""What experts compute: rows in the order of their experts, one grouped product for all of them.

    experts(rows[row embed], weights[row], ends[expert], leaves, sh=sh) -> [row embed]

A function of this type is what `fmegatron.parallel.moe.moe` takes. A row's result is its expert's, times the row's weight.
Where ranks hold parts of every expert (`emlp`), it is a summand over them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fmegatron.kernels.moe import add_group_bias, weighted_gated
from fmegatron.parallel.padded import batched_product
from fmegatron.primitives.grouped import grouped_product


def mlp_experts(activation: str | Callable[[Tensor], Tensor], *, batched: bool = False) -> Callable[..., Tensor]:
    """Experts that are feed-forward parts: down(activation(up(x)) · weight).

    activation: of h[row emlp], or h[row gated emlp] where a leaf makes gate and up; or the name of a gated one ("swiglu",
        "geglu", "geglu_tanh", "clamped_swiglu"), which is then one pass with the weight (see `weighted_gated`).

    batched: every expert has as many rows (see `fmegatron.parallel.padded`), so that their products are a batch of equal ones.
        (In fp8 they are a grouped product all the same.)

    Leaves: `experts_gate_up`[expert embed gated emlp] or `experts_up`[expert embed emlp], `experts_down`[expert emlp embed];
    optionally biases: the name with _bias, [expert gated emlp] or [expert emlp], and [expert embed].
    """

    def multiply(x: Tensor, w: Tensor, ends: Tensor, sh: Any, dims: str, name: str) -> Tensor:
        fp8 = None
        if sh.precision.fp8 is not None:
            from fmegatron.fp8.grouped import grouped_use  # imported where something is in fp8

            fp8 = grouped_use(sh, x, w, name, dims)
        if batched and fp8 is None:
            return batched_product(x, w, tape=sh.tape, name=name)
        return grouped_product(x, w, ends, tape=sh.tape, name=name, fp8=fp8)

    def experts(rows: Tensor, weights: Tensor, ends: Tensor, leaves: Mapping[str, Tensor], *, sh: Any) -> Tensor:
        up = "experts_gate_up" if "experts_gate_up" in leaves else "experts_up"
        h = multiply(rows, leaves[up], ends, sh, "embed -> emlp", "experts_up")
        if f"{up}_bias" in leaves:
            h = add_group_bias(h.flatten(1), leaves[f"{up}_bias"].flatten(1), ends).view_as(h)
        if isinstance(activation, str):
            a = weighted_gated(h, weights, activation=activation)
        else:
            a = activation(h)
            a = a * weights[:, None].to(a.dtype)
        y = multiply(a, leaves["experts_down"], ends, sh, "emlp -> embed", "experts_down")
        if "experts_down_bias" in leaves:
            bias = leaves["experts_down_bias"]
            y = add_group_bias(y, bias if not sh.axes("emlp") else bias * _first(sh, y), ends, scale=weights)
        return y

    return experts


def _first(sh: Any, like: Tensor) -> Tensor | int:
    """1 on the first of the ranks that hold parts of an expert, 0 on the others: of their summands one has the bias."""
    place = sh.mesh.position(sh.axes("emlp"))
    return int(place == 0) if isinstance(place, int) else (place == 0).to(like.dtype)
