"""Pytrees: nested dicts, lists, tuples and registered dataclasses whose leaves are tensors.

`None` is a leaf everywhere in fmegatron; it stands for "no value here", such as the gradient of a frozen parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch

NAMESPACE = "fmegatron"


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, in the order of `structure` (dicts by sorted key)."""
    return optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)


def structure(tree: Any) -> Any:
    """The shape of a tree without its leaves: hashable, comparable, and what `unflatten` rebuilds from."""
    return optree.tree_structure(tree, none_is_leaf=True, namespace=NAMESPACE)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """(leaves, structure) of a tree."""
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)


def unflatten(shape: Any, new_leaves: Any) -> Any:
    """The tree of this structure with these leaves."""
    return optree.tree_unflatten(shape, new_leaves)


def like(tree: Any, new_leaves: Any) -> Any:
    """A tree with the structure of `tree` and other leaves."""
    return unflatten(structure(tree), new_leaves)


def tree_map(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """f on every leaf of `tree`; further trees must have the same structure (a prefix of it is not enough)."""
    return optree.tree_map(f, tree, *rest, none_is_leaf=True, namespace=NAMESPACE)


def paths(tree: Any) -> list[str]:
    """The dotted name of every leaf, e.g. "layers.3.q", in the order of `leaves`."""
    found = optree.tree_paths(tree, none_is_leaf=True, namespace=NAMESPACE)
    return [".".join(str(part) for part in path) for path in found]


def named(tree: Any) -> dict[str, Any]:
    """{dotted name: leaf}, in the order of `leaves`."""
    return dict(zip(paths(tree), leaves(tree), strict=True))


def is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def is_float(x: Any) -> bool:
    """Is it a tensor that can have a gradient?"""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def detached(tree: Any) -> Any:
    """The same tree, its tensors cut off their graph."""
    return tree_map(lambda t: t.detach() if is_tensor(t) else t, tree)


def tensors(tree: Any) -> tuple[list[torch.Tensor], Callable[[Any], Any]]:
    """The tensors of a tree, and a function that puts others in their places (and keeps none of the first alive)."""
    flat, shape = flatten(tree)
    rest = [Ellipsis if is_tensor(t) else t for t in flat]

    def build(new: Any) -> Any:
        values = iter(new)
        return unflatten(shape, [next(values) if t is Ellipsis else t for t in rest])

    return [t for t in flat if is_tensor(t)], build


def add(a: Any, b: Any) -> Any:
    """a + b of two leaves, where None is nothing."""
    return b if a is None else a if b is None else a + b


def add_trees(a: Any, b: Any) -> Any:
    """The leafwise sum of two trees of one structure; None as a whole tree or a leaf is nothing."""
    if a is None or b is None:
        return b if a is None else a
    return like(a, [add(s, t) for s, t in zip(leaves(a), leaves(b), strict=True)])
