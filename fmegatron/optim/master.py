"""Master copies: a wider copy of narrow parameters, which the updates go to."""

from __future__ import annotations

from typing import Any

import torch

from fmegatron import tree
from fmegatron.optim import leaves
from fmegatron.optim.core import Optimizer
from fmegatron.optim.leaves import buffer_of, grouped, holder_of, local_of, no_grad, wrapped
from fmegatron.simulation import simulating


def with_master(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Optimizer:
    """Keeps copies in `dtype` of the parameters that have a narrower one; updates those and rounds the parameters.

    So small updates are not lost to rounding (Micikevicius et al., "Mixed precision training", 2018). State: that of
    `optimizer` for the copies, and "master": the copies, None where the parameter is wide enough itself.
    """

    def master_of(p: Any) -> Any:
        return p.detach().to(dtype) if tree.is_float(p) and p.dtype.itemsize < dtype.itemsize else None

    def wide(master: Any, params: Any) -> Any:
        return tree.tree_map(lambda m, p: p if m is None else m, master, params)

    def init(params: Any) -> dict[str, Any]:
        with torch.no_grad():
            master = tree.tree_map(master_of, params)
        return {**optimizer.init(wide(master, params)), "master": master}

    def update(params: Any, grads: Any, state: Any, *, donate: bool = False, grad_norm: Any = None) -> Any:
        inner = {k: v for k, v in state.items() if k != "master"}
        options: dict[str, Any] = {"donate": donate, "grad_norm": grad_norm}
        copies = None
        if optimizer.casts and not leaves.plain_only() and not simulating():  # (simulated buffers are copies a rank)
            copies = _buffers(params, state["master"], grads, donate)
            options["copies"] = copies
        new, grads, inner = optimizer.update(wide(state["master"], params), grads, inner, **options)
        master = tree.tree_map(lambda m, p: None if m is None else p, state["master"], new)
        if copies is None:
            narrow = _rounded(params, master, new, donate)
        else:
            narrow = tree.tree_map(_narrow, params, master, copies, new)
        return narrow, grads, {**inner, "master": master}

    return Optimizer(init, update, optimizer.name, optimizer.rate)


def _buffers(params: Any, master: Any, grads: Any, donate: bool) -> Any:
    """Where the optimizer writes the rounded parameters: None where there is no copy or nothing changes."""

    def buffer(p: Any, m: Any, g: Any) -> Any:
        if m is None or g is None:
            return None
        return p if donate else wrapped(torch.empty_like(local_of(p)), p)

    with no_grad():
        return tree.tree_map(buffer, params, master, grads)


def _narrow(old: Any, master: Any, copy: Any, new: Any) -> Any:
    """The parameter after an update that has written `copy`."""
    return new if master is None else old if copy is None else copy


def _rounded(params: Any, master: Any, new: Any, donate: bool) -> Any:
    """The new parameters: `new` where there is no master copy, else the copy in the parameter's dtype."""
    old, copies, out = tree.leaves(params), tree.leaves(master), tree.leaves(new)
    rows = [i for i, m in enumerate(copies) if m is not None]
    with no_grad():
        if donate and not leaves.plain_only():
            for members in grouped(rows, lambda i: (old[i].device, old[i].dtype)).values():
                group = [buffer_of(old[i]) for i in members]
                torch._foreach_copy_(group, [buffer_of(copies[i]) for i in members])
                for i, local in zip(members, group, strict=True):
                    out[i] = holder_of(local, old[i])
        else:
            for i in rows:
                out[i] = wrapped(local_of(copies[i]).to(old[i].dtype), old[i])
    return tree.like(params, out)
