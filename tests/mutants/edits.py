"""Deliberate defects as edits of shipped source: the text of a function is changed, compiled, and put in its place.

    with applied([Edit("fmegatron.zero:Reducer.wait", "self.take(i, x)", "self.take(i, x * 2)")]):
        ...

Only the code of the function object is exchanged, so that every module that imported it, every method and every
`torch.autograd.Function` that has it meets the change, and nothing of it is left behind.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Edit:
    """In the function `where`, "module:name" with dots for methods, `old` is replaced by `new`. It must be there exactly
    once, so that an edit of what has changed since fails loudly."""

    where: str
    old: str
    new: str


@contextlib.contextmanager
def applied(edits: Sequence[Edit]) -> Iterator[None]:
    """Runs the body with some functions changed. Raises AssertionError for a text that is not there exactly once."""
    by_function: dict[str, list[Edit]] = {}
    for edit in edits:
        by_function.setdefault(edit.where, []).append(edit)
    ready = [(function_at(where), edited_code(where, some)) for where, some in by_function.items()]
    kept = [(f, f.__code__) for f, _ in ready]
    forget()
    try:
        for f, code in ready:
            f.__code__ = code
        yield
    finally:
        for f, code in kept:
            f.__code__ = code
        forget()


def edited_code(where: str, edits: Sequence[Edit]) -> types.CodeType:
    """The code of a function with some edits, compiled in its own file, so that its lines have their numbers."""
    module, _, name = where.partition(":")
    path = Path(inspect.getfile(importlib.import_module(module)))
    lines = path.read_text().splitlines(keepends=True)
    node = node_at(ast.parse("".join(lines)), name)
    assert node is not None, f"{where}: no function of this name"
    first, last = node.lineno - 1, node.end_lineno
    text = "".join(lines[first:last])
    for edit in edits:
        found = text.count(edit.old)
        assert found == 1, f"{where}: the text {edit.old!r} is there {found} times, not once"
        text = text.replace(edit.old, edit.new)
    whole = "".join([*lines[:first], text, *lines[last:]])
    return code_at(compile(whole, str(path), "exec", dont_inherit=True), name)


def function_at(where: str) -> types.FunctionType:
    """The function behind "module:name", whatever it is wrapped in."""
    module, _, name = where.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    for attribute in (
        "__func__",
        "fget",
        "func",
        "_init_fn",
        "__wrapped__",
    ):  # static, property, cached, operator, cache
        found = getattr(found, attribute, found) if not isinstance(found, types.FunctionType) else found
    assert isinstance(found, types.FunctionType), f"{where} is no function but {found!r}"
    return found


def node_at(tree: ast.AST, name: str) -> Any:
    """The definition of a dotted name in a module."""
    found: Any = tree
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = next((n for n in found.body if isinstance(n, kinds) and n.name == part), None)
        if found is None:
            return None
    return found


def code_at(code: types.CodeType, name: str) -> types.CodeType:
    """The code of a function in that of its module."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_qualname == name:
                return constant
            if name.startswith(constant.co_qualname + "."):
                return code_at(constant, name)
    raise AssertionError(f"no code of {name}")


def forget() -> None:
    """Clears what functions of the library keep of earlier calls."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fmegatron"):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
