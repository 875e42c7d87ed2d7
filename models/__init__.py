"""Model families as pure functions, and folders of Hugging Face transformers."""

from fmegatron.models.hf import HFTensor, load_hf, save_hf
from fmegatron.models.llama import LLAMA, Llama, LlamaConfig

__all__ = ["LLAMA", "HFTensor", "Llama", "LlamaConfig", "load_hf", "save_hf"]
