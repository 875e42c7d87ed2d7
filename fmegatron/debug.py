"""Where did a value that is not finite arise?"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as torch_tree
from torch.utils._python_dispatch import TorchDispatchMode

from fmegatron.step import NonFiniteError


class _Found(Exception):
    pass


class _Watch(TorchDispatchMode):
    """Raises at the first operation that makes a value that is not finite from finite ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(_bad(x) for x in torch_tree.tree_leaves(out)) and not _masks(func):
            inputs = [x for x in torch_tree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if not any(_bad(x) for x in inputs):
                shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
                raise _Found(f"{func} of finite inputs of shapes {shapes} gave values that are not finite, at\n{_place()}")
        return out


def _bad(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() > 0 and not bool(torch.isfinite(x).all())


def _masks(func: Any) -> bool:
    """Operations that put -inf on purpose, and those that leave memory as it was."""
    name = str(func)
    return any(part in name for part in ("empty", "fill", "full", "new_", "where", "scalar_tensor", "log"))


def _place() -> str:
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and not f.filename.endswith("debug.py")]
    return "\n".join(f"    {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames[-4:])


def find_non_finite(f: Callable[[], Any]) -> Any:
    """f(), or where its first value that is not finite arose, as text: the operation, its shapes and the lines that called it.

    Every operation, of the backward too, is checked as it runs, which is slow. Compiled code is seen as a whole.
    """
    try:
        with _Watch():
            return f()
    except _Found as found:
        return str(found)
    except NonFiniteError as error:
        return f"{error.leaf} is not finite, though no single operation made such a value from finite ones"
