"""`fmegatron export`: a checkpoint as a folder that Hugging Face transformers loads."""

from __future__ import annotations

from pathlib import Path

import torch

from fmegatron.config import ExportConfig
from fmegatron.errors import UserError
from fmegatron.generate import load_run, tokenizer_of
from fmegatron.models.hf import save_hf
from fmegatron.precision import dtype_of


def run(config: ExportConfig) -> int:
    """Write config.json, safetensors and the tokenizer. Raises UserError when there is no checkpoint or `out` is not
    free."""
    out = Path(config.out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out {config.out} exists already: give a folder that does not exist or is empty")
    dtype = None if config.dtype is None else dtype_of(config.dtype)
    cpu = torch.device("cpu")
    model, params, _, folder = load_run(config.checkpoint, device=cpu, dtype=dtype, weights=config.weights)
    save_hf(config.out, model, params, tokenizer=tokenizer_of(folder))
    print(f"wrote {config.out}: load it with transformers.AutoModelForCausalLM.from_pretrained({config.out!r})")
    return 0
