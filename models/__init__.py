"""Model families as pure functions, and folders of Hugging Face transformers."""

from typing import TYPE_CHECKING, Any

from fmegatron.models.config import DecoderConfig, config_from_dict, config_to_dict
from fmegatron.models.decoder import Decoder
from fmegatron.models.fused import fuse, unfuse
from fmegatron.models.hf_names import HFTensor
from fmegatron.models.moe import MoE
from fmegatron.models.presets import PRESETS
from fmegatron.models.upcycle import upcycled

if TYPE_CHECKING:
    from fmegatron.models.hf import load_hf, save_hf

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
    """`load_hf` and `save_hf`, with the modules for tokenizers and files, where they are used."""
    if name not in ("load_hf", "save_hf"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fmegatron.models import hf

    return getattr(hf, name)
