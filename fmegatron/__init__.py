"""fmegatron: functional parallel training on PyTorch. Models are pure functions over parameter pytrees, parallelism
is a table.

The core is here; `fmegatron.models` has model families, `fmegatron.parallel` what is built on `sh`,
`fmegatron.primitives` the operations of a model, `fmegatron.optim` optimizers, `fmegatron.schedules` learning rates,
`fmegatron.random` random numbers.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmegatron.api import *  # noqa: F403

__version__ = "0.1.0"


# Functions that share their module's name: `fm.remat` is the function, `from fmegatron.remat import …` reaches the
# module.
_FUNCTIONS = ("accumulate", "offload", "placements", "remat", "split")


def __getattr__(name: str) -> Any:
    """A public name, imported at its first use, so that the command line can answer without importing torch."""
    if name not in _FUNCTIONS and not name.startswith("_") and importlib.util.find_spec(f"fmegatron.{name}"):
        return importlib.import_module(f"fmegatron.{name}")
    if not name.startswith("_"):
        api = importlib.import_module("fmegatron.api")
        if name in api.__all__:
            globals()[name] = found = getattr(api, name)  # asked once
            return found
    raise AttributeError(f"module 'fmegatron' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module("fmegatron.api").__all__})


class _Package(types.ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        """Python stores each imported submodule in its package; those of `_FUNCTIONS` would hide the functions."""
        if not (name in _FUNCTIONS and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
