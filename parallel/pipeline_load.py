"""A pretrained model's layers, of which each rank of a pipeline reads its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fmegatron import tree
from fmegatron.checkpoint.ranks import together
from fmegatron.models import hf
from fmegatron.models import safetensors_files as files
from fmegatron.models.decoder import Decoder
from fmegatron.precision import dtype_of
from fmegatron.random import fold_in, key
from fmegatron.sharding import Sharding
from fmegatron.spec import params_of


def load_held(
    folder: str | os.PathLike[str],
    held: Callable[[Any], Any],
    *,
    dtype: torch.dtype | str | None = None,
    sh: Sharding | None = None,
    device: torch.device | str | None = None,
    vocab: int | None = None,
    seed: int = 0,
    ignore_fields: tuple[str, ...] = (),
    **overrides: Any,
) -> tuple[Decoder, Any]:
    """(model, params of this rank) of a folder that transformers wrote: `load_hf`, of whose tensors it reads no more than
    this rank's layers and ends.

    held: of a tree like the model's parameters what this rank holds, such as `Pipeline.held`. All others as for
    `load_hf`; sh is that of a stage. The files are checked whole, by their headers. Every rank must call it, and what is
    raised on one is raised on all.
    """
    folder = Path(folder)
    sh = sh or Sharding()
    model = hf.model_of(folder, vocab=vocab, ignore_fields=ignore_fields, **overrides)
    spec = held(model.spec())
    params = params_of(spec)
    found = files.tensors_of(folder)
    apart, layout = hf._apart(model)
    layout = hf._as_in_file(layout, found)
    saved_vocab = hf.read_config(folder)["vocab_size"]

    def check() -> None:
        sh.check_spec(spec)
        hf._check(folder, found, apart, layout, model.config.tied, saved_vocab)
        if model.config.tied and "embed" in params:
            hf._check_tied(folder, found, layout["embed"].name)

    together(check)

    with contextlib.ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def source(path: str) -> hf.Source:
            file = found[layout[path].name].file
            if file not in opened:
                opened[file] = stack.enter_context(files.opened(file))
            return hf.Source(opened[file], apart[path], layout[path])

        leaves: dict[str, torch.Tensor] = {}
        for path, param in params.items():
            wanted = param.dtype or (sh.precision.params if dtype is None else dtype_of(dtype))
            if path not in apart:
                pieces = {p: source(hf._sibling(path, p.name)) for p in hf._pieces(path, model)}
                x = hf._read_joined(pieces, param, sh, wanted)
            elif "vocab" in param.names and model.config.vocab > saved_vocab:
                x = hf._read_with_new_rows(source(path), sh, wanted, saved_vocab, fold_in(key(seed), path))
            else:
                x = hf._read(source(path), sh, wanted)
            leaves[path] = sh.at_rest(x.to(device if device is not None else sh.device), param)
    return model, tree.like(spec, [leaves[path] for path in params])
