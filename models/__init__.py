"""Model families as pure functions, and folders of Hugging Face transformers."""

from fmegatron.models.config import DecoderConfig, config_from_dict, config_to_dict
from fmegatron.models.decoder import Decoder
from fmegatron.models.fused import fuse, unfuse
from fmegatron.models.hf import load_hf, save_hf
from fmegatron.models.hf_names import HFTensor
from fmegatron.models.presets import PRESETS

__all__ = [
    "PRESETS",
    "Decoder",
    "DecoderConfig",
    "HFTensor",
    "config_from_dict",
    "config_to_dict",
    "fuse",
    "load_hf",
    "save_hf",
    "unfuse",
]
