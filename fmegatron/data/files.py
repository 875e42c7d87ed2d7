"""Writing files so that a kill never leaves a half file under its final name."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from fmegatron.errors import UserError


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents; returns those that were new, innermost first (see `remove_folders`).

    Raises UserError if it cannot be made or is not writable.
    """
    missing = []
    for candidate in (folder, *folder.parents):
        if candidate.exists():
            break
        missing.append(candidate)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}; choose another output folder") from None
    if not os.access(folder, os.W_OK):
        remove_folders(missing)
        raise UserError(f"the folder {folder} is not writable: choose another output folder or change its permissions")
    return missing


def remove_folders(folders: list[Path]) -> None:
    """Remove folders that `make_folder` made, innermost first, as far as they are empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def partial_name(path: Path) -> Path:
    """The temporary name of a file that is being written: hidden, in the same folder, one per process."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def write_text(path: Path, text: str) -> None:
    """Write a whole text file at once: it appears complete or not at all."""
    partial = partial_name(path)
    try:
        with open(partial, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; free space or choose another folder") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
