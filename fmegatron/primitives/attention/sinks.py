"""Learned sinks: one logit per query head that joins the softmax's denominator and has no value (GPT-OSS; with zeros
the "off-by-one" softmax, Miller 2023, and StreamingLLM's zero sink, Xiao et al. 2024).

They are folded in behind the kernels. With the log-sum-exp of the keys alone, lse, and a sink's logit c:

    lse' = log(exp lse + exp c),    o' = o · exp(lse - lse').

A kernel's backward then takes o' and lse' as they are: it makes probabilities exp(s - lse') and counts their gradients
from sum(go o'), which is right, since the sink's own value is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fmegatron.primitives.attention.blocks import finite, shift


def with_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(o', lse') of a kernel's (o, lse), of which o is overwritten; sinks[kv group], or a row each: [batch kv group]."""
    total = torch.logaddexp(lse, _per_query(sinks, lse))
    return o.mul_((lse - finite(total)).exp_()[..., None]), total


def sinks_gradient(sinks: Tensor, o: Tensor, lse: Tensor, go: Tensor, glse: Tensor | None) -> Tensor:
    """The gradient of `sinks`: -exp(c - lse') (sum(go o') - glse), summed over the queries (and rows, if shared)."""
    each = (_per_query(sinks, lse) - finite(lse)).exp() * shift(o, go, glse)
    return -each.sum((0, 1) if sinks.ndim == 2 else 1).to(sinks.dtype)


def _per_query(sinks: Tensor, lse: Tensor) -> Tensor:
    sinks = sinks.to(lse.dtype)
    return sinks if sinks.ndim == 2 else sinks[:, None]
