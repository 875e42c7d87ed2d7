"""A state as named tensors and named plain values, and back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from fmegatron import tree
from fmegatron.dtensor import DTensor
from fmegatron.errors import UserError

VALUES = (int, float, bool, str, type(None))


def split(state: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """({dotted name: tensor}, {dotted name: int, float, bool, str or None}) of a pytree.

    Raises UserError for a leaf of another type, a Partial DTensor, or two leaves of one name.
    """
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    names = tree.paths(state)
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise UserError(f"two leaves of the state have the dotted name {twice[0]!r}: rename a key that contains a dot")
    for name, leaf in zip(names, tree.leaves(state), strict=True):
        if isinstance(leaf, torch.Tensor):
            if isinstance(leaf, DTensor) and any(p.is_partial() for p in leaf.placements):
                raise UserError(f"leaf {name!r} of the state is Partial: reduce it before it is saved or loaded")
            tensors[name] = leaf
        elif isinstance(leaf, VALUES):
            values[name] = leaf
        else:
            held = "a checkpoint holds tensors, int, float, bool, str and None"
            raise UserError(f"leaf {name!r} of the state is a {type(leaf).__name__}: {held}")
    return tensors, values


def local(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a leaf, cut off any graph."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def with_local(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A leaf like x that holds another local part."""
    if not isinstance(x, DTensor):
        return part
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def kind(x: Any) -> str:
    """What a leaf is, in words."""
    if isinstance(x, torch.Tensor):
        return "a tensor"
    if x is None:
        return "None"
    return {bool: "a bool", str: "a str"}.get(type(x), "a number")
