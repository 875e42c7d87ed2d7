"""The checking mode: does a program mean what its equations say, on every rule table?

It runs the program once in this process on a mesh whose axes all have size one, so that all types are there and
nothing is cut, on abstract tables in which every dim has an axis of its own. Each operation's types are carried
along. An equation whose left side does not match is refused, and so is a local operation that joins values in a way
that loses a sum of gradients.
With `probe`, each local operation is run again on half of a sharded dim and must give half of the result, so that
nothing reduces, merges or mixes along a sharded dim outside `sh`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as torch_tree
from torch.overrides import TorchFunctionMode

from fmegatron import tree
from fmegatron.equations import parse_side
from fmegatron.errors import ShardingError
from fmegatron.layout import Layout, axes_of
from fmegatron.mesh import Mesh
from fmegatron.precision import Precision
from fmegatron.rules import Rules, base
from fmegatron.spec import Param, params_of

_SILENT = {
    "__get__",
    "__set__",
    "requires_grad_",
    "backward",
    "detach_",
    "size",
    "dim",
    "stride",
    "numel",
    "is_floating_point",
}


class Unknown:
    """The type of a parameter on an axis, where `over` is left out: bound to R or I where the value is first used."""

    def __init__(self) -> None:
        self.bound: Any = None


def _known(kind: Any) -> Any:
    while isinstance(kind, Unknown) and kind.bound is not None:
        kind = kind.bound
    return kind


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in torch_tree.tree_leaves(value) if isinstance(x, torch.Tensor)]


class Checker(TorchFunctionMode):
    """Carries types through every torch function, every autograd Function and every equation while it is entered."""

    def __init__(self, mesh: Mesh, *, probe: bool = False) -> None:
        super().__init__()
        self.mesh, self.probe, self.pauses = mesh, probe, 0
        self.unknown: dict[Any, dict[str, Any]] = {}

    # -- entering: autograd Functions do not pass through torch-function modes, so `apply` is watched too
    def __enter__(self) -> Checker:
        self._apply = torch.autograd.Function.__dict__["apply"]
        descriptor = self._apply

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            real = descriptor.__get__(None, cls)
            if self.pauses:
                return real(*args, **kwargs)
            with self.paused():
                out = real(*args, **kwargs)
            self.operation(real, cls.__name__, args, kwargs, out)
            return out

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.autograd.Function.apply = self._apply  # type: ignore[method-assign]
        super().__exit__(*error)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the code of `sh` and of trusted primitives nothing is checked."""
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    # -- types of values
    def set(self, x: torch.Tensor, types: Mapping[str, Any]) -> torch.Tensor:
        """Say the types of a value. Without the probe it does not matter which dim an axis shards."""
        x._sh_types = {a: ("S" if isinstance(t, int) and not self.probe else t) for a, t in types.items()}  # type: ignore[attr-defined]
        return x

    def get(self, x: torch.Tensor) -> dict[str, Any]:
        types = getattr(x, "_sh_types", None)
        if types is None:
            if x.requires_grad:
                raise ShardingError(
                    f"a tensor of shape {tuple(x.shape)} that needs a gradient has no type: parameters enter a program through sh.use(params, spec)"
                )
            return dict.fromkeys(self.mesh.sizes, "I")
        return {a: _known(t) for a, t in types.items()}

    def match(self, x: torch.Tensor, axis: str, said: Any, where: str) -> None:
        """Is the type of x on an axis the one that the left side of an equation says?"""
        kind = self.get(x)[axis]
        if isinstance(kind, Unknown):
            if said in ("I", "R"):
                kind.bound = said
            if said in ("I", "R", "?"):
                return
        if kind in ("I", "R") and not x.requires_grad:
            right = said in ("I", "R", "?")  # equal everywhere and without a gradient: I and R are one
        elif said == "?":
            right = kind in ("I", "R")
        else:
            right = kind == said or (kind == "S" and isinstance(said, int))
        if not right:
            raise ShardingError(f"{where}: on {axis} the value is {_show(kind)}, the equation says {_show(said)}")

    # -- what sh reports
    def arrow(
        self, x: torch.Tensor, y: torch.Tensor, source: Layout, target: Layout, where: str, *, partial: bool = False
    ) -> torch.Tensor:
        """`partial`: where the source is P, that is the word of a trusted primitive, and no type carried here."""
        for axis in self.mesh.sizes:
            if source[axis] != "?" and not (partial and source[axis] == "P"):
                self.match(x, axis, source[axis], repr(where))
        kept = self.get(x)
        with self.paused():
            y = x.view_as(x) if y is x else y
        return self.set(y, {a: kept[a] if t == "?" else t for a, t in target.items()})

    def equation(
        self, xs: tuple[torch.Tensor, ...], lays: list[Layout], y: torch.Tensor, raw: Layout, target: Layout, text: str
    ) -> torch.Tensor:
        where, types = repr(text), {}
        for axis in self.mesh.sizes:
            for x in xs:
                kind = self.get(x)[axis]
                if isinstance(kind, Unknown) and raw[axis] != "?":
                    kind.bound = "R"  # the other operand is sharded there: work differs along the axis
            self.bind(xs, axis)
            for x in xs:
                kind = self.get(x)[axis]
                if isinstance(kind, Unknown) and isinstance(target[axis], int):
                    kind.bound = "I"  # the result is sliced there
            for x, lay in zip(xs, lays, strict=True):
                self.match(x, axis, lay[axis], where)
            kinds = {
                k if (k := self.get(x)[axis]) in ("R", "I") or isinstance(k, Unknown) else "S"
                for x in xs
                if x.requires_grad
            }
            differs = {"S"} if raw[axis] != "?" else set()
            if "I" in kinds and len(kinds | differs) > 1:
                raise ShardingError(
                    f'{where}: on {axis} an I value meets work that differs: enter the region with sh(x, "… | dim") first'
                )
            free = next((k for k in kinds if isinstance(k, Unknown)), "R" if "R" in kinds else "I")
            if raw[axis] == "?" and isinstance(target[axis], int) and free == "R":
                raise ShardingError(
                    f"{where}: R -> S on {axis} has no arrow; slice with x.index_select(dim, sh.index(…))"
                )
            types[axis] = target[axis] if target[axis] != "?" else free
        with self.paused():
            y = y.view_as(y) if any(y is x for x in xs) else y
        return self.set(y, types)

    def parameter(self, w: torch.Tensor, y: torch.Tensor, param: Param, target: Layout) -> torch.Tensor:
        """The value of a parameter in equations. Without `over`, its types on the axes that its dims do not use are
        unknown."""
        if param.over is not None:
            return self.set(y, target)
        mine = {a: t if isinstance(t, int) else Unknown() for a, t in target.items()}
        return self.set(y, self.unknown.setdefault(w, mine))

    def declared(self, x: torch.Tensor, types: Layout, where: str) -> None:
        """An argument of a trusted primitive."""
        for axis, kind in types.items():
            self.match(x, axis, kind, where)

    def applied(self, leaves: Mapping[str, Any], across: tuple[str, ...], where: str) -> None:
        """Parameters that a trusted primitive reads beside its arguments, in work that differs along these axes: on those that
        their own dims do not use they are R."""
        for name, x in leaves.items():
            for axis in across if isinstance(x, torch.Tensor) else ():
                if self.get(x)[axis] != "S" and not isinstance(self.get(x)[axis], int):
                    self.match(x, axis, "R", f"{where}: {name!r}")

    def result(self, y: torch.Tensor, args: Any, types: Layout) -> torch.Tensor:
        """A result of a trusted primitive; where its side names no dim, the type is what the arguments join to."""
        ins = _tensors(args)
        for axis, kind in types.items():
            self.bind(ins, axis)
            if isinstance(kind, int) and any(x.requires_grad and self.get(x)[axis] == "I" for x in ins):
                raise ShardingError(
                    f'primitive: on {axis} an I argument is used by work that differs; enter the region with sh(x, "… | dim") first'
                )
        found = {a: self.join("primitive", ins, a, sharded_is_free=True) if t == "?" else t for a, t in types.items()}
        return self.set(y, found)

    # -- local operations
    def bind(self, xs: Any, axis: str) -> None:
        """Unify unknown types among operands with what the others are."""
        kinds = [k for x in xs if (k := self.get(x)[axis]) not in ("I", "R") or x.requires_grad]
        known = {"I" if k == "I" else "R" for k in kinds if not isinstance(k, Unknown)}
        unknown = [k for k in kinds if isinstance(k, Unknown)]
        for kind in unknown:
            to = ("R" if "R" in known else "I") if known else unknown[0]
            if _known(kind) is kind and kind is not to:
                kind.bound = to

    def join(self, name: str, ins: list[torch.Tensor], axis: str, *, sharded_is_free: bool = False) -> Any:
        """The type on an axis of a local operation's result."""
        self.bind(ins, axis)
        unknown = next((k for x in ins if isinstance(k := self.get(x)[axis], Unknown)), None)
        kinds = {k for x in ins if (k := self.get(x)[axis]) not in ("I", "R") or x.requires_grad}
        kinds = {k for k in kinds if not isinstance(k, Unknown)}
        if "I" in kinds and len(kinds) > 1:
            raise ShardingError(
                f"{name}: joins {sorted(map(_show, kinds))} on {axis}: an I value is used by work that differs; "
                'enter the region with sh(x, "… | dim") first'
            )
        if kinds - {"R", "I"}:
            return "R" if sharded_is_free else "S"
        if unknown is not None and not kinds:
            return unknown
        return "R" if "R" in kinds else "I"

    def operation(self, f: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        ins, outs = _tensors((args, kwargs)), _tensors(out)
        if not ins or not outs:
            return
        types: dict[str, list[Any]] = {}
        for axis in self.mesh.sizes:
            kind = self.join(name, ins, axis)
            types[axis] = (
                self.halves(f, name, args, kwargs, out, axis) if kind == "S" and self.probe else [kind] * len(outs)
            )
        for i, y in enumerate(outs):
            if not any(y is x for x in ins):
                self.set(y, {a: t[i] for a, t in types.items()})

    def halves(self, f: Any, name: str, args: Any, kwargs: Any, out: Any, axis: str) -> list[Any]:
        """Which dim of each result the axis shards, found by running f on the first half of each input's sharded dim
        (where that
        has one element: on a second one added behind it)."""

        def other(x: Any) -> Any:
            dim = self.get(x)[axis] if isinstance(x, torch.Tensor) else None
            if not isinstance(dim, int):
                return x
            if x.shape[dim] > 1:
                return x.narrow(dim, 0, x.shape[dim] // 2)
            return torch.cat([x, x * 1.7 + 0.3 if x.is_floating_point() else x], dim)

        with self.paused(), torch.no_grad():
            try:
                changed = f(*torch_tree.tree_map(other, args), **torch_tree.tree_map(other, kwargs))
            except (RuntimeError, IndexError) as e:
                why = str(e).splitlines()[0][:80]
                raise ShardingError(f"{name}: fails on half of the dim that {axis} shards ({why})") from None
            dims: list[Any] = []
            for whole, part in zip(_tensors(out), _tensors(changed), strict=True):
                found = [i for i, (n, m) in enumerate(zip(whole.shape, part.shape, strict=False)) if n != m]
                if whole.ndim != part.ndim or len(found) != 1:
                    raise ShardingError(
                        f"{name}: reduces or merges the dim that {axis} shards: that takes sh.sum or an equation"
                    )
                shared = min(whole.shape[found[0]], part.shape[found[0]])
                a, b = (x.detach().narrow(found[0], 0, shared).double() for x in (whole, part))
                # a kernel may round another length of a tensor otherwise (its vector lanes end elsewhere)
                rounding = 16 * torch.finfo(whole.dtype).eps if whole.is_floating_point() else 0.0
                if not torch.allclose(a, b, rtol=max(1e-9, rounding), atol=max(1e-12, rounding), equal_nan=True):
                    raise ShardingError(f"{name}: mixes along the dim that {axis} shards")
                dims.append(found[0])
        return dims

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "?")
        out = func(*args, **kwargs)
        if not self.pauses and name not in _SILENT:
            self.operation(func, name, args, kwargs, out)
        return out

    def finish(self, loss: torch.Tensor) -> None:
        """The end of a program: a loss is Invariant on every axis."""
        for axis, kind in self.get(loss).items():
            if isinstance(kind, Unknown):
                kind.bound = "I"
            elif kind != "I":
                raise ShardingError(f"loss: on {axis} it is {_show(kind)}, not I: sum its items with sh.sum")


def _show(kind: Any) -> str:
    return f"S({kind})" if isinstance(kind, int) else str(kind)


def abstract_tables(rules: Rules) -> list[tuple[Mesh, Rules]]:
    """Two tables that stand for all: in the first every dim that has a row has an axis of its own; in the second the
    stream's dims also lie on the regions' axes, as with sequence and expert parallelism."""
    plain = [n for n, row in rules.compute.items() if row not in (None, ()) and n == base(n)]
    # "**" is the layout inside attention, which is a primitive here
    starred = [n for n in rules.compute if n.endswith("*") and not n.endswith("**")]
    primed = [n for n in rules.compute if n.endswith("'")]
    own = {n: f"on_{n}" for n in plain}
    star = {n: f"on_{base(n)}_between" for n in starred}
    nothing = {n: None for n, row in rules.compute.items() if n == base(n) and n not in own}
    sizes = dict.fromkeys([*own.values(), *star.values()], 1)
    experts = tuple(own[n] for n in plain if n == "expert")
    regions = tuple(a for n, a in own.items() if n not in rules.activations and n != "expert")

    def base_axis(name: str) -> tuple[str, ...]:
        return (own[base(name)],) if base(name) in own else ()

    first: dict[str, Any] = {**nothing, **{n: own[n] for n in plain}, **{n: base_axis(n) for n in primed}}
    first |= {n: (*base_axis(n), star[n]) for n in starred}
    second: dict[str, Any] = {**first, **{n: (*base_axis(n), *regions) for n in starred}}
    if "batch" in own:
        second["batch"] = (own["batch"], *experts)
    for table in (first, second):
        table |= _among_experts(table, primed, rules)
    tables = [first, second] if starred or experts else [first]
    return [
        (
            Mesh(sizes, {a: (a,) for a in sizes}, tuple(sizes), "cpu", False),
            replace(rules, compute=table, store=(), store_optimizer=(), zigzag={}),
        )
        for table in tables
    ]


def _among_experts(table: Mapping[str, Any], primed: list[str], rules: Rules) -> dict[str, Any]:
    """The rows of tokens among experts, for the marked names that a table has: without the axes of experts and of their width
    (batch', seq'), or of these alone (two marks); expert' are the experts' axes without tokens (see `standard_rules`)."""

    def row(name: str, of: Mapping[str, Any] = table) -> tuple[str, ...]:
        found = of.get(name) or ()
        return (found,) if isinstance(found, str) else tuple(found)

    expert, emlp = row("expert"), row("emlp")
    found: dict[str, Any] = {}
    for name in primed:
        if base(name) in ("batch", "seq"):
            # does it stay divided as between blocks, by these rules?
            star = f"{base(name)}*" in table and not {*row(name, rules.compute)} <= {*row(base(name), rules.compute)}
            out = emlp if name.endswith("''") else expert + emlp
            every = row(f"{base(name)}*" if star else base(name))
            found[name] = tuple(every[: next((i for i, a in enumerate(every) if a in out), len(every))])
    tokens = [a for n in ("batch''", "seq''") for a in found.get(n, ())]
    if "expert'" in primed:
        found["expert'"] = tuple(a for a in expert if a not in tokens)
    return found


def check(
    program: Any, spec: Any, params: Any, batch: Any, rules: Rules, *, dims: Any = None, probe: bool = True
) -> None:
    """Refuse a program that some layout would compute wrongly.

    program: (params, batch, sh) -> scalar loss, which calls sh.use(params, spec) itself.
    params, batch: small global values on one device; even sizes when `probe`.
    rules: which dims may be sharded at all; the abstract tables are made from them.
    dims: the dims of each batch leaf, as a tree of strings; by default "batch seq" for two dims and "batch" for one.

    Raises ShardingError that names the operation or equation.
    """
    for mesh, table in abstract_tables(rules):
        _run(program, spec, params, batch, mesh, table, dims, probe)


def infer_over(program: Any, spec: Any, params: Any, batch: Any, rules: Rules, *, dims: Any = None) -> Any:
    """The spec with every missing `over` filled in, as the program determines it. Arguments as for `check`."""
    mesh, table = abstract_tables(rules)[0]
    checker, values = _run(program, spec, params, batch, mesh, table, dims, False)
    names = [n for n in table.compute if axes_of(n, mesh, table)]
    filled = []
    for (_, param), value in zip(params_of(spec).items(), values, strict=True):
        if param.over is not None:
            filled.append(param)
            continue
        kinds = checker.unknown.get(value, {})
        across = {a for a, k in kinds.items() if _known(k) == "R"}
        fits: dict[str, str] = {}  # one name a dim: seq* where the value is R between blocks too, else seq
        for name in sorted((n for n in names if not n.endswith("'") and n not in param.names), key=len):
            if set(axes_of(name, mesh, table)) <= across:
                fits[base(name)] = name
        filled.append(replace(param, over=" ".join(fits.values())))
    return tree.like(spec, filled)


def _run(program: Any, spec: Any, params: Any, batch: Any, mesh: Mesh, rules: Rules, dims: Any, probe: bool) -> Any:
    from fmegatron.sharding import Sharding

    checker = Checker(mesh, probe=probe)
    flat, shape = tree.flatten(params)
    dtype = next((w.dtype for w in flat if tree.is_float(w)), torch.float32)
    sh = Sharding(mesh, rules, precision=Precision(params=dtype), check=checker)
    values = [w.detach().clone().requires_grad_(w.is_floating_point()) for w in flat]

    def typed(x: Any, side: str | None) -> Any:
        if not tree.is_tensor(x):
            return x
        text = side if side is not None else {0: "", 1: "batch", 2: "batch seq"}.get(x.ndim)
        if text is None:
            raise ShardingError(f"a batch leaf of shape {tuple(x.shape)} needs its dims: give dims={{…}}")
        types: Layout = dict.fromkeys(mesh.sizes, "I")
        types |= {a: d for d, n in enumerate(parse_side(text).dims) for a in axes_of(n, mesh, rules)}
        return checker.set(x.clone(), types)

    sides = tree.leaves(dims) if dims is not None else [None] * len(tree.leaves(batch))
    typed_batch = tree.like(batch, [typed(x, s) for x, s in zip(tree.leaves(batch), sides, strict=True)])
    with checker:
        loss = program(tree.unflatten(shape, values), typed_batch, sh)
        checker.finish(loss)
    return checker, values
