"""Checkpoints: plain safetensors shards by torch.distributed.checkpoint, everything else as JSON, no pickle.

    save("runs/a", state, step=100, meta={"config": …}, keep=3)
    state = load("runs/a", like)                # like: the state's structure, shapes, dtypes and placements
    params = load_part("runs/a", "params", like)

On disk a checkpoint is RUN/checkpoints/step_00000100/ with one or more safetensors files a rank and state.json, written
last. A save goes to a hidden folder beside and is renamed when it is complete, so a kill at any moment leaves the
checkpoint before it usable. Any mesh loads what any other saved. All ranks must see one file system.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmegatron.checkpoint.folders import Info, info, latest, read_meta, resolve
    from fmegatron.checkpoint.reading import load, load_part, saved_dtype
    from fmegatron.checkpoint.writing import save

__all__ = ["Info", "info", "latest", "load", "load_part", "read_meta", "resolve", "save", "saved_dtype"]

_READING, _WRITING = ("load", "load_part", "saved_dtype"), ("save",)


def __getattr__(name: str) -> Any:
    """What is asked for, with torch.distributed.checkpoint only where it is needed: importing that takes 0.7 s."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "reading" if name in _READING else "writing" if name in _WRITING else "folders"
    return getattr(importlib.import_module(f"fmegatron.checkpoint.{module}"), name)
