"""Where did a value that is not finite arise?"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as torch_tree
from torch.utils._python_dispatch import TorchDispatchMode

from fmegatron import tree
from fmegatron.step import NonFiniteError

# Operations whose result says nothing: memory that is not written yet, and results of collectives that are on their
# way.
SILENT = ("empty", "new_empty", "_c10d_functional", "c10d")
# Operations that put an infinity where a mask says so; what is not a number is never meant.
MASKS = ("full", "fill", "new_full", "where", "scalar_tensor", "masked_fill", "scatter", "max_pool")


def explain_step(step: Callable[[Any, Any], Any], state: Any, batch: Any) -> str:
    """Make a step again from the state before it, and tell in words where its first value that is not finite arose.

    Every rank calls it and has the same answer. The operations of the backward are checked too, which is slow; compiled
    code is seen as a whole.
    """
    found = _together(_not_finite_leaf({"params": state.params, "opt": state.opt}))
    return found or find_non_finite(lambda: step(state, batch))


def find_non_finite(f: Callable[[], Any]) -> str:
    """Run f, and tell which operation made the first value that is not finite from finite ones: its shapes and the
    lines that called it. Of several ranks the one whose program came to it first tells."""
    with _Watch() as watch:
        try:
            f()
            leaf = None
        except NonFiniteError as error:
            leaf = error.leaf
    if found := _together(watch.found):
        return found
    if leaf is None:
        return "made again, the step has only finite values"
    return f"{leaf} is not finite, though no single operation made such a value from finite ones"


class _Watch(TorchDispatchMode):
    """Notes the first operation that makes a value that is not finite from finite ones.

    It goes on afterwards: the other ranks wait for this one in their collectives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: tuple[int, str] | None = None  # (number of the operation, what it was)
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        inputs = [x for x in torch_tree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        name = func._schema.name.removeprefix("aten::")
        if self.found is not None or name.startswith(SILENT) or any(_bad(x) for x in inputs):
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        masks = name.startswith(MASKS)
        if any(_bad(x, infinities=not masks) for x in torch_tree.tree_leaves(out)):
            shapes = ", ".join(str(list(x.shape)) for x in inputs)
            self.found = (
                self.number,
                f"{func} of finite inputs of shapes {shapes} gave values that are not finite, at\n{_place()}",
            )
        return out


def _bad(x: Any, *, infinities: bool = True) -> bool:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.numel() == 0 or x.is_meta:
        return False
    return not bool(torch.isfinite(x).all()) if infinities else bool(torch.isnan(x).any())


def _not_finite_leaf(trees: Any) -> tuple[int, str] | None:
    for name, leaf in tree.named(trees).items():
        if tree.is_float(leaf) and _bad(leaf.to_local() if hasattr(leaf, "to_local") else leaf):
            return 0, f"{name} is not finite already before the step"
    return None


def _together(found: tuple[int, str] | None) -> str | None:
    """Of what the ranks found, that with the lowest number."""
    everyone = [found]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
    told = [f for f in everyone if f is not None]
    return min(told)[1] if told else None


def _place() -> str:
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
    return "\n".join(f"    {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames[-4:])
