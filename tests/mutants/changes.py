"""Changes of source for the automatic sweep: one node of a syntax tree becomes another of its kind.

An arrow becomes another arrow, a sum loses a term, a divisor, an offset or a bound moves by one, an axis, a dim or a tree
becomes another, a statement in place falls out. What only chooses between ways (`_is_condition`) is left out unless it is
asked for, and refusals, assertions and messages always are.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import importlib
import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.mutants.edits import code_at, forget, function_at

# {module: functions whose bodies are changed, by patterns; a "!" before one takes functions out}
MODULES = {
    "fmegatron.sharding": ("*", "!*__post_init__", "!*check_spec", "!*explain", "!*others_refused", "!placements"),
    "fmegatron.layout": ("*", "!check_size"),
    "fmegatron.collectives": ("*", "!*.vmap"),
    "fmegatron.zero": ("*",),
    "fmegatron.buckets": ("*",),
    "fmegatron.overlap": ("*", "!check_overlap"),
    "fmegatron.zigzag": ("*",),
    "fmegatron.uneven": ("*",),
    "fmegatron.padding": ("divisible_size", "shard_batch"),
    "fmegatron.accumulate": ("*", "!_add_by_torch_func"),
    "fmegatron.mesh": ("Mesh.*", "!Mesh.__repr__", "_simulated_coordinate", "make_mesh", "_refine"),
    "fmegatron.rules": ("Rules.stores", "base", "standard_rules"),
    "fmegatron.primitives.embedding": ("*",),
    "fmegatron.primitives.cross_entropy": ("linear_cross_entropy", "_loss", "_form", "_global_vocabulary", "_hidden"),
    "fmegatron.primitives.dropout": ("*",),
    "fmegatron.primitives._function": ("sharded", "global_size"),
    "fmegatron.optim.norm": ("*",),
    "fmegatron.parallel.context": ("*", "!_checked"),
    "fmegatron.parallel.ring": ("*",),
    "fmegatron.parallel.stack": ("*", "!compiled", "!chain"),
}
CONSTANTS = {"fmegatron.collectives": ("DUAL", "COST"), "fmegatron.mesh": ("DATA_AXES",)}

# Another of its kind for words that mean something: arrows, collectives, types, trees, dims, axes.
WORDS = {
    **{"S>R": "S>I", "P>S": "P>I", "S>I": "S>R", "I>S": "I>R", "I>R": "P>I", "P>I": "P>R", "P>R": "P>I"},
    **{"S>S": "P>S", "fill": "cut", "cut": "fill"},
    **{"all-gather": "all-reduce", "all-reduce": "nothing", "reduce-scatter": "all-to-all"},
    **{"all-to-all": "reduce-scatter", "slice": "nothing", "nothing": "slice"},
    **{"P": "I", "R": "I", "I": "R", "?": "I", "S": "P", "sum": "max", "max": "sum"},
    **{"enter": "leave", "leave": "enter", "settle": "shard", "shard": "settle", "return": "shard"},
    **{"params": "optimizer", "optimizer": "params"},
    **{"batch": "seq", "seq": "batch", "kv": "group", "group": "kv", "mlp": "kv", "vocab": "kv"},
    **{"dp": "tp", "fsdp": "cp", "cp": "fsdp", "tp": "cp", "tp_kv": "tp", "tp_group": "tp_kv"},
    **{"cp_ring": "cp_kv", "cp_kv": "cp_group", "cp_group": "cp_kv", "seq*": "seq", "seq**": "seq"},
    **{"gather": "ring", "ring": "gather", "ulysses": "ulysses+ring", "ulysses+ring": "ulysses"},
    **{"none": "order", "order": "positions", "positions": "order"},
}
COMPARISONS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
}
SWAPS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Calls that may be left out, so that their receiver or first argument takes their place.
RECEIVERS = ("flip", "clamp", "masked_fill", "masked_fill_", "index_select", "permute", "where", "to", "double", "long")
FIRST_ARGUMENTS = (
    "reversed",
    "dual",
    "run_step",
    "sh",
    "to_zigzag",
    "from_zigzag",
    "zigzag_positions",
    "lift",
    "tuple",
)
NO_NUMBERS = ("note_collective", "keep_alive", "check_overlap", "check_size", "declared", "contiguous", "del")


@dataclass(frozen=True)
class Change:
    """One change: `put` makes it in the tree of its module, and gives what takes it back. version: of the function's
    source, by which a result of an earlier sweep is known to hold."""

    id: str
    version: str
    module: str
    function: str
    line: int
    lines: range
    old: str
    new: str
    put: Callable[[], Callable[[], None]] = field(compare=False)

    @property
    def text(self) -> str:
        """Without the number of a line, which changes with every edit."""
        return f"{self.module}:{self.function}: {self.old} -> {self.new}"


@dataclass
class Source:
    """A module as it was when the sweep began."""

    name: str
    path: str
    tree: ast.Module
    text: str

    @staticmethod
    def of(name: str) -> Source:
        path = inspect.getfile(importlib.import_module(name))
        text = Path(path).read_text()
        return Source(name, path, ast.parse(text), text)


# ----------------------------------------------------------------------------------------------------- what is changed


def changes(source: Source, conditions: bool = False) -> Iterator[Change]:
    """All changes of one module; conditions: those of `_is_condition` too."""
    numbers: Counter[str] = Counter()
    for name, node in _functions(source.tree, ""):
        if not _wanted(name, MODULES[source.name]):
            continue
        version = _version(node)
        for parent, key, index, old in _sites(node):
            for new in () if _is_condition(old) and not conditions else _others(old, parent):
                yield _change(source, name, version, parent, key, index, old, new, numbers)
    for constant in CONSTANTS.get(source.name, ()):
        where = next(n for n in source.tree.body if isinstance(n, ast.Assign) and n.targets[0].id == constant)  # type: ignore[attr-defined]
        values = where.value.values if isinstance(where.value, ast.Dict) else where.value.elts  # type: ignore[attr-defined]
        kind = "values" if isinstance(where.value, ast.Dict) else "elts"
        for index, old in enumerate(values):
            for new in _others(old, where.value):
                yield _change(source, constant, _version(where), where.value, kind, index, old, new, numbers)


def _version(node: ast.AST) -> str:
    return hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:16]


def _change(
    source: Source,
    name: str,
    version: str,
    parent: Any,
    key: str,
    index: int | None,
    old: Any,
    new: Any,
    numbers: Counter[str],
) -> Change:
    def put() -> Callable[[], None]:
        def place(x: Any) -> None:
            if index is None:
                setattr(parent, key, x)
            else:
                getattr(parent, key)[index] = x

        place(new)
        return lambda: place(old)

    ast.copy_location(new, old)
    ast.fix_missing_locations(new)
    shown, other = (" ".join(ast.unparse(n).split())[:100] for n in (old, new))
    key_text = f"{source.name}:{name}: {shown} -> {other}"
    numbers[key_text] += 1
    last = getattr(old, "end_lineno", old.lineno) if isinstance(old, ast.expr) else old.lineno
    return Change(
        f"{key_text} #{numbers[key_text]}",
        version,
        source.name,
        name,
        old.lineno,
        range(old.lineno, last + 1),
        shown,
        other,
        put,
    )


def _functions(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """The functions of a module and of its classes; what is nested in a function belongs to it."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and node.name != "_":
            yield f"{prefix}{node.name}", node


def _wanted(name: str, patterns: Sequence[str]) -> bool:
    no = [p[1:] for p in patterns if p.startswith("!")]
    yes = [p for p in patterns if not p.startswith("!")]
    return any(fnmatch(name, p) for p in yes) and not any(fnmatch(name, p) for p in no)


def _sites(function: Any) -> Iterator[tuple[Any, str, int | None, Any]]:
    """(parent, field, index, node) of all that may be changed in the body of a function. Refusals, assertions, messages,
    annotations and default values are left out: they change no number of a legal layout."""

    def walk(node: Any) -> Iterator[tuple[Any, str, int | None, Any]]:
        for key, value in ast.iter_fields(node):
            if key in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
                continue
            for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(child, ast.AST) or _is_aside(child):
                    continue
                if isinstance(child, ast.If) and all(isinstance(s, ast.Raise) for s in child.body):
                    for number, other in enumerate(child.orelse):
                        yield child, "orelse", number, other
                        yield from walk(other)
                    continue
                yield node, key, index, child
                yield from walk(child)

    yield from walk(function)


def _is_aside(node: Any) -> bool:
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Nonlocal):
        return not (isinstance(node, ast.JoinedStr) and "->" in ast.unparse(node))
    if isinstance(node, ast.Expr):
        constant = isinstance(node.value, ast.Constant)
        return constant or (isinstance(node.value, ast.Call) and _called(node.value) in NO_NUMBERS)
    return False


def _called(node: ast.Call) -> str:
    return getattr(node.func, "id", getattr(node.func, "attr", ""))


def _is_condition(node: Any) -> bool:
    """Is a node a choice of way, a flag or a conversion, and no collective, arrow, divisor, offset or choice of axis? Most
    changes of these are of refusals, of what has no mesh and of speed, and change no number."""
    if isinstance(node, ast.IfExp | ast.If | ast.BoolOp | ast.UnaryOp):
        return True
    if isinstance(node, ast.Compare):
        return isinstance(node.ops[0], ast.Is | ast.IsNot)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool)
    return isinstance(node, ast.Call) and _called(node) in ("to", "double", "long", "tuple", "lift")


def _others(node: Any, parent: Any) -> Iterator[Any]:
    """What a node may be changed to."""
    if isinstance(node, ast.BinOp):
        yield from _of_arithmetic(node)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        for gone in range(len(node.values)):
            kept = [v for n, v in enumerate(node.values) if n != gone]
            yield kept[0] if len(kept) == 1 else ast.BoolOp(node.op, kept)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.If):
        for value in (True, False):
            made = copy.copy(node)
            made.test = ast.copy_location(ast.Constant(value), node.test)
            yield made
    elif isinstance(node, ast.comprehension):
        pass
    elif isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp):
        if any(g.ifs for g in node.generators):
            made = copy.deepcopy(node)
            for g in made.generators:
                g.ifs = []
            yield made
    elif isinstance(node, ast.Call):
        yield from _of_call(node)
    elif isinstance(node, ast.Constant):
        yield from _of_constant(node)
    elif isinstance(node, ast.JoinedStr):
        yield from _without_region(node)
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield ast.Pass()


def _of_arithmetic(node: ast.BinOp) -> Iterator[Any]:
    lists = ast.Tuple | ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.JoinedStr
    joins = any(isinstance(n, lists) or isinstance(getattr(n, "value", None), str) for n in ast.walk(node))
    yield node.left
    if isinstance(node.op, ast.Add):
        yield node.right if joins else ast.BinOp(node.left, ast.Sub(), node.right)
    elif isinstance(node.op, ast.Sub):
        yield ast.BinOp(node.left, ast.Add(), node.right)
    elif isinstance(node.op, ast.FloorDiv):
        yield ast.BinOp(ast.BinOp(node.left, ast.Add(), ast.Constant(1)), ast.FloorDiv(), node.right)
    elif isinstance(node.op, ast.Mult | ast.BitOr | ast.BitAnd):
        yield node.right
    elif isinstance(node.op, ast.Div):
        yield ast.BinOp(node.left, ast.Mult(), node.right)


def _of_call(node: ast.Call) -> Iterator[Any]:
    name = _called(node)
    if name in SWAPS and isinstance(node.func, ast.Name):
        yield ast.Call(ast.Name(SWAPS[name], ast.Load()), node.args, node.keywords)
    if name in FIRST_ARGUMENTS and node.args and not isinstance(node.args[0], ast.GeneratorExp):
        yield node.args[0]
    if name in RECEIVERS and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) != "torch":
        yield node.func.value
    if name == "where" and len(node.args) == 3:
        yield ast.Call(node.func, [node.args[0], node.args[2], node.args[1]], node.keywords)
    if name == "steps_between":
        mesh, source, target, have, want, *rest = node.args
        yield ast.Call(node.func, [mesh, target, source, want, have, *rest], node.keywords)


def _of_constant(node: ast.Constant) -> Iterator[Any]:
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield ast.Constant(value + 1)
        if value:
            yield ast.Constant(value - 1)
    elif isinstance(value, float):
        yield ast.Constant(value + 1)
    elif isinstance(value, str):
        if value in WORDS:
            yield ast.Constant(WORDS[value])
        if " | " in value and "->" in value:
            yield ast.Constant(value.split(" | ")[0])
        if "*" in value and "->" in value:
            yield ast.Constant(value.replace("*", ""))


def _without_region(node: ast.JoinedStr) -> Iterator[Any]:
    for n, part in enumerate(node.values):
        if isinstance(part, ast.Constant) and " | " in part.value:
            yield ast.JoinedStr([*node.values[:n], ast.Constant(part.value.split(" | ")[0])])


def with_change(change: Change, source: Source) -> None:
    """Puts the change in force in this process, for good."""
    back = change.put()
    try:
        code = compile(source.tree, source.path, "exec", dont_inherit=True)
    finally:
        back()
    module = importlib.import_module(source.name)
    forget()
    if change.function not in CONSTANTS.get(source.name, ()):
        function_at(f"{source.name}:{change.function}").__code__ = code_at(code, change.function)
        return
    fresh = types.ModuleType(source.name)  # the constant alone is taken of it
    fresh.__dict__.update({"__file__": source.path, "__package__": module.__package__})
    exec(code, fresh.__dict__)
    old, new = getattr(module, change.function), getattr(fresh, change.function)
    for name, other in list(sys.modules.items()):
        if name.startswith("fmegatron") and vars(other).get(change.function) is old:
            setattr(other, change.function, new)
