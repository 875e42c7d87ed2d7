"""The automatic sweep: every collective, arrow, divisor, offset and choice of axis of the core's sharding is changed, one
at a time, and the layouts that are drawn by default must notice.

    python -m tests.mutation_sweep                       # all; goes on where it was stopped
    python -m tests.mutation_sweep --share 0.1           # every tenth
    python -m tests.mutation_sweep --conditions          # and every condition, flag and conversion
    python -m tests.mutation_sweep --report              # what is known so far
    python -m tests.mutation_sweep --list fmegatron.zigzag

A change is made in the syntax tree of one function (`changes`). It is caught if a layout reports a finite difference, or
raises, or gives what is not finite. Each is tried in a process of its own on the layouts that run its lines, those first
that run most lines a second. What survives is listed with the reason that SURVIVORS knows; the exit code is 1 if less than
95 % of what is not equivalent are caught.

Sources are read once, when it begins, so that they may be edited meanwhile. Results go to a file outside of the
repository, one line of JSON each.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import importlib
import inspect
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from fmegatron.testing import compare
from fmegatron.testing.covering import Case
from fmegatron.testing.models import find_model
from tests.mutants.catching import Verdict, drawn, reference, verdict
from tests.mutants.edits import code_at, forget, function_at
from tests.mutants.survivors import SURVIVORS

# {module: functions whose bodies are changed, by patterns; a "!" before one takes functions out}
MODULES = {
    "fmegatron.sharding": ("*", "!*__post_init__", "!*check_spec", "!*explain", "!*others_refused", "!placements"),
    "fmegatron.layout": ("*", "!check_size"),
    "fmegatron.collectives": ("*", "!*.vmap"),
    "fmegatron.zero": ("*",),
    "fmegatron.buckets": ("*",),
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
    """One change: `put` makes it in the tree of its module, and gives what takes it back."""

    id: str
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
        for parent, key, index, old in _sites(node):
            for new in () if _is_condition(old) and not conditions else _others(old, parent):
                yield _change(source, name, parent, key, index, old, new, numbers)
    for constant in CONSTANTS.get(source.name, ()):
        where = next(n for n in source.tree.body if isinstance(n, ast.Assign) and n.targets[0].id == constant)  # type: ignore[attr-defined]
        values = where.value.values if isinstance(where.value, ast.Dict) else where.value.elts  # type: ignore[attr-defined]
        kind = "values" if isinstance(where.value, ast.Dict) else "elts"
        for index, old in enumerate(values):
            for new in _others(old, where.value):
                yield _change(source, constant, where.value, kind, index, old, new, numbers)


def _change(
    source: Source, name: str, parent: Any, key: str, index: int | None, old: Any, new: Any, numbers: Counter[str]
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


# -------------------------------------------------------------------------------------------------- which layouts run it


def lines_run(case: Case, paths: Sequence[str]) -> dict[str, set[int]]:
    """{path: numbers of the lines that a layout runs}."""
    found: dict[str, set[int]] = {p: set() for p in paths}

    def lines(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            found[frame.f_code.co_filename].add(frame.f_lineno)
        return lines

    def calls(frame: Any, event: str, _: Any) -> Any:
        there = found.get(frame.f_code.co_filename)
        if there is None:
            return None
        there.add(frame.f_lineno)
        return lines

    reference(case, QUICK)
    forget()
    sys.settrace(calls)
    try:
        assert verdict(case, QUICK).kind == "equal", f"{case} is not equal without a change"
    finally:
        sys.settrace(None)
    return found


QUICK, SLOW = ("init", "gradients"), ("init", "adamw", "sgd")


@dataclass(frozen=True)
class Bench:
    """The layouts, cheap ones that run many lines first, and what each of them runs and takes."""

    cases: list[Case]
    lines: list[dict[str, set[int]]]
    seconds: list[float]

    @staticmethod
    def of(paths: Sequence[str], kept: Path, version: str) -> Bench:
        """Runs them all, or takes what an earlier sweep of the same sources kept of that."""
        cases, lines, seconds = drawn(), [], []
        if kept.exists() and (known := json.loads(kept.read_text()))["version"] == version:
            lines = [{p: set(some) for p, some in zip(paths, row, strict=True)} for row in known["lines"]]
            seconds = known["seconds"]
        for n, case in enumerate(cases):
            if n == len(seconds):
                lines.append(lines_run(case, paths))
                start = time.process_time()
                verdict(case, QUICK)
                seconds.append(time.process_time() - start)
                _say(f"lines of layout {n + 1} of {len(cases)} ({seconds[-1]:.1f} s)")
                rows = [[sorted(row[p]) for p in paths] for row in lines]
                kept.write_text(json.dumps({"version": version, "seconds": seconds, "lines": rows}))
        order, left = [], list(range(len(cases)))
        seen: set[tuple[str, int]] = set()
        while left:
            new = {n: {(p, i) for p, some in lines[n].items() for i in some} - seen for n in left}
            best = max(left, key=lambda n: (len(new[n]) + 1) / seconds[n])
            seen |= new[best]
            order.append(best)
            left.remove(best)
        return Bench([cases[n] for n in order], [lines[n] for n in order], [seconds[n] for n in order])

    @property
    def cheapest(self) -> list[int]:
        """Some layouts on which steps of optimizers are tried too."""
        return sorted(range(len(self.cases)), key=lambda n: self.seconds[n])[:12]

    def running(self, change: Change, path: str) -> list[int]:
        """The layouts that run a changed line, in order."""
        return [n for n, lines in enumerate(self.lines) if lines[path] & set(change.lines)]


# ------------------------------------------------------------------------------------------------------------- the sweep


@dataclass
class Found:
    """What became of a change. status: "difference", "error", "not finite", "hangs"; "survives", "not run"."""

    id: str
    text: str
    line: int
    status: str
    layout: str = ""
    what: str = ""
    tried: int = 0
    seconds: float = 0.0

    @property
    def caught(self) -> bool:
        return self.status in ("difference", "error", "not finite", "hangs")


def attempt(change: Change, source: Source, bench: Bench, limit: float) -> Found:
    """Tries a change in a process of its own, of at most `limit` seconds of CPU."""
    found = Found(change.id, change.text, change.line, "not run")
    running = bench.running(change, source.path)
    if change.function in CONSTANTS.get(source.name, ()):
        running = list(range(len(bench.cases)))
    if not running:
        return found
    start = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reading)
            _in_child(change, source, bench, running, limit, writing)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as stream:
        lines = [json.loads(line) for line in stream.read().splitlines()]
    _, status = os.waitpid(child, 0)
    found.seconds = round(time.monotonic() - start, 1)
    found.tried = len(lines)
    last = lines[-1] if lines else None
    if last is not None and last["kind"] != "equal":
        found.status, found.layout, found.what = last["kind"], last["layout"], last["what"]
    elif os.WIFSIGNALED(status):
        hangs = os.WTERMSIG(status) == signal.SIGXCPU and len(lines) == 0
        found.status = "hangs" if hangs else "survives" if os.WTERMSIG(status) == signal.SIGXCPU else "error"
        found.what = f"signal {os.WTERMSIG(status)}"
    else:
        found.status = "survives"
    return found


def as_verified(case: Case) -> Verdict:
    """`verdict` as `fmegatron verify` comes to it: what one device computes, and which layouts are legal, is changed too."""
    try:
        result = compare(find_model(case.model), case.layout, checks=QUICK)
    except Exception as error:
        return Verdict("error", message=f"{type(error).__name__}: {error}".splitlines()[0])
    if result.ok:
        return Verdict("equal", result.worst)
    return Verdict("difference" if math.isfinite(result.worst.error) else "not finite", result.worst)


def _in_child(change: Change, source: Source, bench: Bench, running: Sequence[int], limit: float, writing: int) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + int(limit), used + int(limit) + 5))
    torch.set_num_threads(1)
    quick = [(n, QUICK) for n in running]
    slow = [(n, SLOW) for n in bench.cheapest if n in running][:3]
    with os.fdopen(writing, "w") as stream:
        try:
            with_change(change, source)
        except SyntaxError as error:
            print(json.dumps({"kind": "error", "layout": "", "what": str(error)}), file=stream, flush=True)
            return
        for number, (n, checks) in enumerate([*quick[:4], *slow[:1], *quick[4:], *slow[1:]]):
            case = bench.cases[n]
            one = as_verified(case) if number < 2 else verdict(case, checks)
            what = f"{one.worst.what} {one.worst.leaf} {one.worst.error:.1e}" if one.worst else one.message[:160]
            row = {"kind": one.kind, "layout": f"{case.layout} | {case.model}", "what": what}
            print(json.dumps(row), file=stream, flush=True)
            if one.caught:
                return


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation_sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=str(Path(tempfile.gettempdir()) / "fmegatron_mutation_sweep.jsonl"))
    parser.add_argument("--modules", nargs="*", default=list(MODULES), help="change these alone")
    parser.add_argument("--share", type=float, default=1.0, help="of the changes, spread evenly")
    parser.add_argument("--conditions", action="store_true", help="change conditions, flags and conversions too")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of CPU for a change")
    parser.add_argument("--retry", action="store_true", help="try again what survived and is not equivalent")
    parser.add_argument("--list", action="store_true", help="print the changes and stop")
    parser.add_argument("--report", action="store_true", help="print what is known and stop")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sources = {name: Source.of(name) for name in given.modules}
    every = [(c, sources[name]) for name in sources for c in changes(sources[name], given.conditions)]
    step = 1 / given.share
    chosen = [every[int(i * step)] for i in range(int(len(every) * given.share))]
    if given.list:
        for change, _ in chosen:
            print(f"{change.line:5} {change.id}")
        print(f"{len(chosen)} changes")
        return 0
    whole = [Source.of(name) for name in MODULES]
    version = hashlib.sha256("".join(s.text for s in whole).encode()).hexdigest()[:16]
    out, known = Path(given.out), _known(Path(given.out), version)
    todo = [pair for pair in chosen if pair[0].id not in known]
    if given.retry:
        todo = [p for p in chosen if (f := known.get(p[0].id)) and f.status == "survives" and not _equivalent(f)]
    if todo and not given.report:
        bench = Bench.of([s.path for s in whole], out.with_suffix(".lines.json"), version)
        for case in bench.cases:
            reference(case, QUICK)
        for n in bench.cheapest:
            reference(bench.cases[n], SLOW)
        with out.open("a") as stream:
            for n, (change, source) in enumerate(todo, 1):
                found = attempt(change, source, bench, given.limit)
                known[found.id] = found
                print(json.dumps({"version": version, **asdict(found)}), file=stream, flush=True)
                if not found.caught or n % 50 == 0:
                    _say(f"{n}/{len(todo)} {found.status} {found.id} ({found.seconds} s)")
    return report([known[c.id] for c, _ in chosen if c.id in known], len(chosen))


def _known(path: Path, version: str) -> dict[str, Found]:
    """Results of these sources. Raises SystemExit for those of others."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if any(row.pop("version") != version for row in rows):
        raise SystemExit(f"{path} has results of other sources: remove it, or give another --out")
    return {row["id"]: Found(**row) for row in rows}


def report(found: Sequence[Found], chosen: int) -> int:
    """Prints how many are caught and what survives; 1 if too few, or a survivor has no reason, else 0."""
    by_status = Counter(f.status for f in found)
    survivors = [f for f in found if f.status == "survives"]
    reasons = {f.id: reason_for(f) for f in survivors}
    equivalent = [f for f in survivors if _equivalent(f)]
    for title, some in (
        ("not run by any of the layouts", [f for f in found if f.status == "not run"]),
        ("equivalent", equivalent),
        ("survivors", [f for f in survivors if f not in equivalent]),
    ):
        print(f"\n{title}: {len(some)}")
        for f in some:
            reason = reasons.get(f.id) or reason_for(f) or ("" if f.status == "not run" else "NO REASON")
            print(f"  {f.id} (line {f.line}{f', {f.tried} tried' if f.tried else ''}){': ' if reason else ''}{reason}")
    caught = sum(f.caught for f in found)
    counted = caught + len(survivors) - len(equivalent)
    share = caught / max(1, counted)
    print(f"\n{len(found)} of {chosen} changes tried: " + ", ".join(f"{n} {s}" for s, n in by_status.most_common()))
    print(f"caught {caught} of {counted} that run and are not equivalent: {100 * share:.1f} %")
    return 0 if share >= 0.95 and all(reasons.values()) else 1


def _equivalent(found: Found) -> bool:
    return (reason_for(found) or "").startswith("equivalent")


def reason_for(found: Found) -> str | None:
    """Why a change cannot be seen, or is not; by the first pattern that fits its text."""
    return next((why for p, why in SURVIVORS.items() if fnmatch(found.text, p.replace("[", "[[]"))), None)


if __name__ == "__main__":
    sys.exit(main())
