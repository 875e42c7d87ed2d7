"""Model families as pure functions, and folders of Hugging Face transformers."""

import importlib
from typing import TYPE_CHECKING, Any

from fmegatron.models.config import DecoderConfig, config_from_dict, config_to_dict
from fmegatron.models.decoder import Decoder
from fmegatron.models.fused import fuse, unfuse
from fmegatron.models.moe import MoE

if TYPE_CHECKING:
    from fmegatron.models.hf import load_hf, save_hf
    from fmegatron.models.hf_names import HFTensor
    from fmegatron.models.presets import PRESETS
    from fmegatron.models.upcycle import upcycled

# What many programs do without, imported with its first name: the families, and what reads and writes tokenizers and files.
_LATER = {
    "fmegatron.models.hf": ("load_hf", "save_hf"),
    "fmegatron.models.hf_names": ("HFTensor",),
    "fmegatron.models.presets": ("PRESETS",),
    "fmegatron.models.upcycle": ("upcycled",),
}

__all__ = [
    "PRESETS",
    "Decoder",
    "DecoderConfig",
    "HFTensor",
    "MoE",
    "config_from_dict",
    "config_to_dict",
    "fuse",
    "load_hf",
    "save_hf",
    "unfuse",
    "upcycled",
]


def __getattr__(name: str) -> Any:
    for module, its_names in _LATER.items():
        if name in its_names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
