"""What can be said of a run's settings by looking at the disk alone. No torch here: a mistake is told before any
rank starts."""

from __future__ import annotations

import os
from pathlib import Path

from fmegatron.config import SETTINGS, TrainConfig
from fmegatron.errors import UserError


def check_train(config: TrainConfig) -> None:
    """Raises UserError for a run's folder that cannot be used, and for data or a tokenizer that is not there."""
    check_out(config)
    if not config.resume:  # a run that goes on uses the data that it has made
        check_data(config)


def holds_run(out: Path) -> bool:
    """Has a run begun in this folder?"""
    return any((out / name).exists() for name in (SETTINGS, "checkpoints", "metrics.jsonl"))


def check_out(config: TrainConfig) -> None:
    """Raises UserError when the run's folder holds a run already (without --resume), none (with it), or cannot be
    written."""
    out = Path(config.out)
    existing = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--out {config.out}: {existing} is not a folder that can be written; name another folder")
    if config.resume and not holds_run(out):
        raise UserError(f"--resume: --out {config.out} holds no run; leave --resume out to start one there")
    if holds_run(out) and not config.resume:
        raise UserError(
            f"--out {config.out} holds a run already: add --resume to go on with it, or name another folder"
        )


def check_data(config: TrainConfig) -> None:
    """Raises UserError when --data or --tokenizer names nothing, or a .bin/.idx pair comes without a tokenizer."""
    tokenizer = None if config.tokenizer is None else Path(config.tokenizer)
    if tokenizer is not None and not (tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer).is_file():
        raise UserError(
            f"--tokenizer {config.tokenizer}: there is no such tokenizer; give a tokenizer.json or a folder with one"
        )
    if config.data is None or Path(config.data).exists():
        return
    pair = [config.data + end for end in (".bin", ".idx")]
    found = [name for name in pair if os.path.isfile(name)]
    if not found:
        raise UserError(
            f"--data {config.data}: there is no such file, folder or .bin/.idx pair; give the path of a JSONL or text file, "
            "a folder of text, or the prefix that fmegatron preprocess wrote"
        )
    if len(found) == 1:
        raise UserError(f"--data {config.data}: there is {found[0]}, but not the other of the pair; write both again")
    if tokenizer is None:
        raise UserError(
            f"--data {config.data} is tokenized already: name the tokenizer that made it, --tokenizer FOLDER, "
            "a folder with its tokenizer.json"
        )
