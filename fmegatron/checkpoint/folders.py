"""Checkpoints as folders: names, which are complete, which is the newest, and how a new one appears at once.

    RUN/checkpoints/step_00000100/state.json           written last: step, meta, values, tensors, and all files' sizes
    RUN/checkpoints/step_00000100/shard-…safetensors   tensors RUN/checkpoints/.tmp-…                             a
    save or a removal that is going on, or was killed: ignored

The newest checkpoint is the one saved last (`order` in state.json): after going back to an earlier one, that is not the
one with the highest step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmegatron.errors import UserError

log = logging.getLogger(__name__)

FORMAT = 1
STATE = "state.json"
SUFFIX = ".safetensors"
TEMPORARY = ".tmp-"
# The checkpoint before it while one of the same step takes its place: complete and used, should that be killed.
REPLACED = ".replaced"
NAME = re.compile(r"step_(\d+)(\.replaced)?")

GIVE = "give a run's folder or one checkpoint's"

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Info:
    """What a checkpoint says of itself.

    path: its folder; step: of the run; meta: what the caller of `save` gave.
    tensors: {name: (global shape, name of the dtype)}; values: {name: int, float, bool, str or None}.
    order: rises by one with each save into a run; files: {name: bytes}.
    """

    path: Path
    step: int
    meta: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], str]]
    values: dict[str, Any]
    order: int
    files: dict[str, int]


def checkpoints_of(run: PathLike) -> Path:
    """The folder in a run's folder that holds its checkpoints."""
    return Path(run) / "checkpoints"


def latest(folder: PathLike) -> Path | None:
    """The newest complete checkpoint of a run's folder, or None. Damaged and incomplete ones are logged and ignored."""
    found = complete(folder)
    return found[-1].path if found else None


def resolve(path: PathLike) -> Path:
    """The folder of the checkpoint that a path means: itself, or the newest complete one of a run's folder.

    Raises UserError when there is none, or when the one that was named is incomplete, naming the file.
    """
    given = Path(path)
    if not given.is_dir():
        what = "a file" if given.exists() else "nothing"
        raise UserError(f"checkpoint {str(path)!r}: there is {what} of this name; {GIVE}")
    if (given / STATE).exists() or NAME.fullmatch(given.name):
        read(given)
        return given
    run = given.parent if given.name == "checkpoints" else given
    if (newest := latest(run)) is not None:
        return newest
    broken = sorted(p for p in _entries(run) if NAME.fullmatch(p.name))
    for folder in broken[-1:]:
        try:
            read(folder)
        except UserError as e:
            why = f"none of the {len(broken)} there is complete; the last: {e}"
            raise UserError(f"checkpoint {str(path)!r}: {why}") from None
    raise UserError(f"checkpoint {str(path)!r}: no checkpoint in {checkpoints_of(run)}; {GIVE}")


def info(path: PathLike) -> Info:
    """What a checkpoint holds, without its tensors' contents. path as in `resolve`, which says what is raised."""
    return read(resolve(path))


def read_meta(path: PathLike) -> dict[str, Any]:
    """The meta that was given to `save`. path as in `resolve`, which says what is raised."""
    return info(path).meta


def complete(run: PathLike) -> list[Info]:
    """The complete checkpoints of a run, the oldest first."""
    found = []
    for folder in _entries(run):
        if NAME.fullmatch(folder.name):
            try:
                found.append(read(folder))
            except UserError as e:
                log.warning("ignored: %s", e)
    return sorted(found, key=lambda i: (i.order, i.path.name))


def read(folder: Path) -> Info:
    """state.json of one checkpoint; its files are checked by name and size.

    Raises UserError, naming the file, when one is missing or damaged. A changed bit inside a tensor is not noticed.
    """
    path = folder / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} is no complete checkpoint: it has no {STATE}; use an earlier one") from None
    except (OSError, ValueError) as e:
        raise UserError(f"{path} is damaged or cannot be read ({e}); use another checkpoint") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"{path} is no checkpoint of this library, or of another version: format {FORMAT} was expected")
    try:
        tensors = {n: (tuple(t["shape"]), t["dtype"]) for n, t in state["tensors"].items()}
        files = dict(state["files"])
        result = Info(folder, state["step"], state["meta"], tensors, state["values"], state["order"], files)
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path} is damaged: {e!r} is missing or of another type; use another checkpoint") from None
    for name, size in files.items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file} is missing: the checkpoint is damaged; use another one")
        if (now := file.stat().st_size) != size:
            raise UserError(f"{file} is damaged: it has {now:,} bytes, {size:,} were written; use another checkpoint")
    for stray in sorted(p.name for p in folder.glob(f"*{SUFFIX}") if p.name not in files):
        raise UserError(f"{folder / stray} is no part of this checkpoint: move it elsewhere")
    return result


# What rank 0 does around a save


def begin(run: PathLike, step: int) -> Path:
    """Remove what killed saves left, and make the empty temporary folder of a new one."""
    parent = checkpoints_of(run)
    temporary = parent / f"{TEMPORARY}step_{step:08d}"
    try:
        found = {i.path.name for i in complete(run)}
        for entry in _entries(run):
            if entry.name.startswith(TEMPORARY):
                shutil.rmtree(entry)
            elif entry.name.endswith(REPLACED) and entry.name.removesuffix(REPLACED) in found:
                _remove(entry)
        temporary.mkdir(parents=True)
    except OSError as e:
        raise UserError(f"cannot write to {parent}: {e.strerror or e}; choose another folder") from None
    return temporary


def abandon(temporary: Path) -> None:
    """Remove the folder of a save that failed, which frees its space."""
    shutil.rmtree(temporary, ignore_errors=True)


def publish(run: PathLike, temporary: Path, state: dict[str, Any], keep: int | None) -> Path:
    """Write state.json into a temporary folder whose tensors are all on disk, give it its name, remove the oldest.

    At every moment either the checkpoint before or the new one is complete and found by `latest`.
    """
    final = checkpoints_of(run) / f"step_{state['step']:08d}"
    before = complete(run)
    files = {p.name: p.stat().st_size for p in sorted(temporary.iterdir())}
    state = {"format": FORMAT, "order": before[-1].order + 1 if before else 0, **state, "files": files}
    try:
        _write(temporary / STATE, json.dumps(state, indent=1))
        _sync(temporary)
        replaced = final.with_name(final.name + REPLACED)
        if final.exists() and final in (i.path for i in before):
            _remove(replaced)
            os.rename(final, replaced)
        else:
            _remove(final)
        os.rename(temporary, final)
        _sync(final.parent)
        _remove(replaced)
        if keep is not None:
            for old in complete(run)[:-keep]:
                _remove(old.path)
        _sync(final.parent)
    except OSError as e:
        raise UserError(f"cannot write {final}: {e.strerror or e}; free space or choose another folder") from None
    return final


def _entries(run: PathLike) -> list[Path]:
    try:
        return sorted(checkpoints_of(run).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make names in a folder durable, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, hidden first: one that is half removed is never seen under its name."""
    if folder.exists():
        hidden = folder.with_name(f"{TEMPORARY}old-{folder.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(folder, hidden)
        shutil.rmtree(hidden)
