"""Errors in the words of whoever gave the input: `vocab_size=100` of a function is `--tokenizer-vocab 100` of a command."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from fmegatron.errors import UserError

TRAIN = {"data": "--data", "tokenizer": "--tokenizer", "vocab_size": "--tokenizer-vocab", "key": "--text-key"}
PREPROCESS = {
    "input": "--data",
    "tokenizer": "--tokenizer",
    "workers": "--workers",
    "append_eod": "--append-eod",
    "key": "--text-key",
}


@contextlib.contextmanager
def by_flags(flags: Mapping[str, str]) -> Iterator[None]:
    """While active, a UserError names flags, as {argument: flag} says, in place of a function's arguments."""
    try:
        yield
    except UserError as error:
        raise UserError(renamed(str(error), flags)) from None


def renamed(message: str, flags: Mapping[str, str]) -> str:
    """The message with `argument=value` as `--flag value`; True and False as the flag alone and its opposite."""

    def flag(found: re.Match) -> str:
        name, value = flags[found[1]], found[2].strip("'")
        if value in ("True", "False"):
            return name if value == "True" else f"--no-{name.removeprefix('--')}"
        return f"{name} {value}"

    return re.sub(rf"\b({'|'.join(flags)})=('[^']*'|[\w.]+)", flag, message)
