"""The errors that fmegatron raises on purpose."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: the message names the argument, its value and the fix. The command line prints it and exits with 2."""


class ShardingError(UserError):
    """An equation, a rule table, a layout or, in the checking mode, a program is refused."""
