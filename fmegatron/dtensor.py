"""torch's DTensor, imported when the first one is made.

torch.distributed.tensor takes 0.6 s to import, and a program of one rank never needs it. `DTensor` here answers
`isinstance` and `issubclass` as the real class does (no, as long as nobody has imported it) and hands on everything
else, such as `DTensor.from_local`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
else:

    class _Late(type):
        def __instancecheck__(cls, x: object) -> bool:
            module = sys.modules.get("torch.distributed.tensor")
            return module is not None and isinstance(x, module.DTensor)

        def __subclasscheck__(cls, other: type) -> bool:
            module = sys.modules.get("torch.distributed.tensor")
            return module is not None and issubclass(other, module.DTensor)

        def __getattr__(cls, name: str) -> Any:
            return getattr(importlib.import_module("torch.distributed.tensor").DTensor, name)

    class DTensor(metaclass=_Late):
        """torch.distributed.tensor.DTensor, late."""


def any_dtensor(values: Iterable[Any]) -> bool:
    """Is one of these values a DTensor?"""
    return any(issubclass(kind, DTensor) for kind in set(map(type, values)))


__all__ = ["DTensor", "any_dtensor"]
