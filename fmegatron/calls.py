"""A run listed as the calls that torch's dispatcher sees below autograd, and played again as one flat function.

A step of a small model is some hundreds of such calls, of forward, backward and optimizer alike, at one to three
microseconds each; what Python and autograd do around them takes longer. All of that is gone from the list: it has no
graph, no pytrees, no code of the step, and it lacks

- views that lie where another tensor lies, and those of tensors that outlive a play: these are made once;
- what is the same in every play, as it is made of no tensor of the state or batch, such as positions and masks;
- what nothing needs.

A tensor is dropped behind its last use, so that a play holds no more than the run did. Results are bitwise those of the
run: the same operations on the same numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fmegatron import capturing
from fmegatron.errors import UserError

KEPT_BYTES = 1 << 20  # of a tensor that is made once, and not in every play
BUILT_IN = (type(torch.add), type(torch.Tensor.add))


class Calls:
    """What `record` has run, to be run again by `play`; both give the tensors that the run returned.

    A play reads and writes the tensors that the run found: state, batch, numbers. What it returns is new in each.
    """

    def __init__(self) -> None:
        self.first: list[Tensor] | None = None
        self.function: Callable[[], list[Tensor]] | None = None
        self.source = ""

    def record(self, run: Callable[[], list[Tensor]]) -> None:
        """Runs it, and lists what it calls. Its results are those of the first `play`, which runs nothing.

        Raises `UserError` where the run reads a value on the host, or does what no list of calls can stand for.
        """
        listing = _Listing()
        with _uncompiled(), _Readers(listing), listing, capturing.listed(listing.whole):
            found = run()
        slots = [listing.slot(t) for t in found]
        self.function, self.source = _function(listing.calls, slots)
        self.first = [t.detach().clone() if s.memory.held else t.detach() for t, s in zip(found, slots, strict=True)]

    def play(self) -> list[Tensor]:
        """Runs the calls."""
        if self.first is not None:
            found, self.first = self.first, None
            return found
        assert self.function is not None
        with torch.no_grad():
            return self.function()


# ------------------------------------------------------------------------------------------------------------ the list


@dataclass(eq=False)
class _Memory:
    """What tensors lie in. held: it was there before the run, and may hold other numbers in every play; steady: its numbers
    are the same in every play; written: a call writes to it, other than the one that made it. slots: its tensors by
    where they lie in it."""

    held: bool
    steady: bool
    written: bool = False
    slots: dict[Any, _Slot] = field(default_factory=dict)


@dataclass(eq=False)
class _Slot:
    """A tensor of the run. value: the tensor itself, where every play has the same."""

    memory: _Memory
    bytes: int
    value: Tensor | None = None


@dataclass(eq=False)
class _Call:
    """One call. args, kwargs: with slots in the place of tensors, which are `inputs`; outs: of what it makes, None for
    what was there; one: it returns a tensor and no sequence; writes: memory that was there; view: what it makes lies in
    such memory; kept: it must run whoever needs it."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[_Slot]
    outs: list[_Slot | None]
    one: bool
    writes: list[_Memory]
    view: bool
    kept: bool


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in it, and what keeps the compiler out would import it, which takes a second."""
        return False


class _Listing(_Mode):
    """Lists what is called in it. No tensor of the run is held by the list."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.memories: dict[int, _Memory] = {}
        self.storages: list[StorageWeakRef] = []  # as long as one of these is there, no other storage has its address
        self.quickest: dict[Any, Callable[..., Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not all(issubclass(t, Tensor) and t.__torch_dispatch__ is Tensor.__torch_dispatch__ for t in types):
            raise _refusal(f"works on {', '.join(t.__name__ for t in types)}")
        if func is torch.ops.aten.lift_fresh.default and not self._known(args[0]):
            # A tensor that Python has made of numbers. Who writes to it must find it as it was in every play.
            found = func(*args)
            self._add(torch.clone, (args[0].clone(),), {}, found, [], kept=False)
            return found
        self._check(func, args, kwargs)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        args = tuple(_as_played(a) for a in args)
        there, named = _replaced(args, self.slot), _replaced(kwargs, self.slot)
        kind = func, _kind(args), _kind(kwargs)
        if kind in self.quickest:
            run, found = self.quickest[kind], func(*args, **kwargs)
        else:
            run, found = _called(func, args, kwargs)
            self.quickest[kind] = run
        writes = [s.memory for s in _written(func, there, named)]
        kept = seeded or not (writes or func._schema.returns)
        self._add(run, there, named, found, writes, kept=kept, seeded=seeded)
        return found

    def whole(self, f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """f(*args) as one call: a function of tensors that looks at their values, and makes new ones of shapes that do
        not depend on them."""
        there = _replaced(args, self.slot)
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            found = f(*args)
        self._add(f, there, {}, found, [], kept=False)
        return found

    def slot(self, x: Tensor) -> _Slot:
        """That of a tensor; one that no call has made is held."""
        known = self._known(x)
        memory = self._memory(x, _Memory(held=True, steady=False))
        place = _place(x)
        if place not in memory.slots:
            if known and not memory.held:
                raise _refusal(f"makes a view of shape {tuple(x.shape)} that torch's dispatcher does not see")
            memory.slots[place] = _Slot(memory, x.nbytes, x.detach() if memory.held else None)
        return memory.slots[place]

    def steady(self, x: Tensor) -> bool:
        """Has it the same values in every play?"""
        return self._known(x) and self._memory(x).steady

    def _add(
        self,
        run: Any,
        args: tuple,
        kwargs: dict,
        found: Any,
        writes: list[_Memory],
        *,
        kept: bool,
        seeded: bool = False,
    ) -> None:
        inputs = [x for x in _flat((args, kwargs)) if isinstance(x, _Slot)]
        call = _Call(run, args, kwargs, inputs, [], isinstance(found, Tensor), writes, True, kept)
        steady = not seeded and all([s.memory.steady for s in inputs])
        for memory in writes:
            memory.steady, memory.written = memory.steady and steady, True
        news = False
        for x in [found] if call.one else found if isinstance(found, list | tuple) else []:
            out = None
            if isinstance(x, Tensor):
                call.view = call.view and self._known(x)
                memory = self._memory(x, _Memory(held=False, steady=steady))
                place = _place(x)
                if place not in memory.slots:
                    out = memory.slots[place] = _Slot(memory, x.nbytes)
                    news = True
            call.outs.append(out)
        if news or writes or kept:
            self.calls.append(call)

    def _known(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self.memories

    def _memory(self, x: Tensor, new: _Memory | None = None) -> _Memory:
        storage = x.untyped_storage()
        if storage._cdata not in self.memories and new is not None:
            self.memories[storage._cdata] = new
            self.storages.append(StorageWeakRef(storage))
        return self.memories[storage._cdata]

    def _check(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Raises `UserError` for what a list cannot stand for."""
        given = [x for x in _flat((args, kwargs)) if isinstance(x, Tensor)]
        if torch.Tag.inplace_view in func.tags:
            raise _refusal(f"changes the shape of a tensor in place ({func})")
        if any(x.layout != torch.strided for x in given):
            raise _refusal(f"works on sparse tensors ({func})")
        by_value = torch.Tag.dynamic_output_shape in func.tags
        if func is torch.ops.aten.index.Tensor:  # a mask's shape depends on its values, that of positions does not
            by_value = any(x.dtype in (torch.bool, torch.uint8) for x in _flat(args[1]) if isinstance(x, Tensor))
        reads = torch.Tag.data_dependent_output in func.tags or func is torch.ops.aten.is_nonzero.default
        if by_value or (reads and not all(map(self.steady, given))):
            raise _refusal(f"reads a value on the host ({func})")


class _Readers(TorchFunctionMode):
    """Refuses what reads values without torch's dispatcher."""

    FUNCTIONS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)

    def __init__(self, listing: _Listing) -> None:
        super().__init__()
        self.listing = listing

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func in self.FUNCTIONS and not self.listing.steady(args[0]):
            raise _refusal(f"reads a value on the host ({func.__name__})")
        return func(*args, **(kwargs or {}))


def _uncompiled() -> Any:
    """Compiled functions run as they were written: torch's dispatcher does not see what compiled code does."""
    there = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if there else contextlib.nullcontext()


def _refusal(what: str) -> UserError:
    return UserError(capturing.refusal(what))


def _place(x: Tensor) -> Any:
    return x.dtype, x.shape, x.stride(), x.storage_offset(), x.is_conj(), x.is_neg()


def _flat(x: Any) -> list[Any]:
    """The leaves of arguments."""
    found: list[Any] = []
    for item in x.values() if isinstance(x, dict) else x:
        if isinstance(item, list | tuple | dict):
            found += _flat(item)
        else:
            found.append(item)
    return found


def _replaced(x: Any, slot: Callable[[Tensor], _Slot]) -> Any:
    """Arguments with slots in the place of tensors."""
    if isinstance(x, Tensor):
        return slot(x)
    if isinstance(x, list | tuple):
        return type(x)([_replaced(item, slot) for item in x])
    return {name: _replaced(item, slot) for name, item in x.items()} if isinstance(x, dict) else x


def _kind(x: Any) -> Any:
    """The types of arguments, by which torch's bindings choose an operator."""
    if isinstance(x, dict):
        return tuple(x), _kind(list(x.values()))
    return (type(x), *map(_kind, x)) if isinstance(x, list | tuple) else type(x)


def _as_played(x: Any) -> Any:
    """Sizes as a tuple, which is a constant of the code."""
    return tuple(x) if isinstance(x, list) and x and all(type(item) is int for item in x) else x


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[_Slot]:
    """Slots of the arguments that a call overwrites."""
    for n, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[n] if n < len(args) else kwargs.get(argument.name)
            yield from (x for x in _flat([given]) if isinstance(x, _Slot))


# ------------------------------------------------------------------------------------------------ the quickest call of it


def _called(func: Any, args: tuple, kwargs: dict) -> tuple[Callable[..., Any], Any]:
    """(what to call in a play, the result). torch's own bindings take a microsecond less than the dispatcher's operator;
    that one is called comes to the same operator with the same arguments is found by calling it."""
    for quick in _bindings(func):
        watch = _Same(func, args, kwargs)
        try:
            with watch:
                quick(*args, **kwargs)
            if watch.called:
                return quick, watch.found
        except _OtherError:
            if watch.called:
                return func._op, watch.found
        except (TypeError, RuntimeError):
            if watch.called:
                raise
    return func._op, func(*args, **kwargs)


def _bindings(func: Any) -> Iterable[Callable[..., Any]]:
    space, _, name = func._schema.name.partition("::")
    if space != "aten":
        return
    for owner in (torch._C._VariableFunctions, torch.Tensor, torch._C._nn):
        found = getattr(owner, name, None)
        if isinstance(found, BUILT_IN):
            yield found


class _OtherError(Exception):
    """A binding does not come to the one operator."""


class _Same(_Mode):
    """Lets one call pass, of this operator with these arguments."""

    def __init__(self, func: Any, args: tuple, kwargs: dict) -> None:
        super().__init__()
        self.func, self.given, self.called, self.found = func, (args, kwargs), False, None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if self.called or func is not self.func or not _alike((args, kwargs or {}), self.given):
            raise _OtherError
        self.called = True
        self.found = func(*args, **(kwargs or {}))
        return self.found


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[name], b[name]) for name in a)
    return a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else type(a) is type(b) and a == b


# ---------------------------------------------------------------------------------------------------------- the function


def _function(calls: Sequence[_Call], outs: Sequence[_Slot]) -> tuple[Callable[[], list[Tensor]], str]:
    """(a function of what is needed of the calls, its source)."""
    with torch.no_grad():
        calls = [call for call in calls if not _made_once(call)]
    calls = _needed(calls, outs)
    names: dict[_Slot, str] = {}
    space: dict[str, Any] = {"clone": torch.clone}
    number = itertools.count()

    def shown(x: Any) -> str:
        if isinstance(x, _Slot):
            if x.value is None:
                return names[x]
            return held(x.value)
        if x is None or type(x) in (bool, int) or (type(x) is float and math.isfinite(x)):
            return repr(x)
        if isinstance(x, list | tuple):
            inside = "".join(f"{shown(item)}, " for item in x)
            return f"[{inside}]" if isinstance(x, list) else f"({inside})"
        return held(x)

    known: dict[int, str] = {}

    def held(x: Any) -> str:
        if id(x) not in known:
            known[id(x)] = f"c{next(number)}"
            space[known[id(x)]] = x
        return known[id(x)]

    last: dict[_Slot, int] = {}
    for n, call in enumerate(calls):
        last |= dict.fromkeys(
            (s for s in (*call.inputs, *call.outs) if s is not None and s.value is None), n
        )  # the last one stays
    for s in outs:
        last[s] = len(calls)
    lines = []
    for n, call in enumerate(calls):
        given = [*map(shown, call.args), *(f"{name}={shown(x)}" for name, x in call.kwargs.items())]
        line = f"{held(call.run)}({', '.join(given)})"
        gone = [names[s] for s in dict.fromkeys(call.inputs) if last.get(s) == n]
        if any(call.outs):
            made = []
            for out in call.outs:
                name = f"v{next(number)}"
                made.append(name)
                if out is not None:
                    names[out] = name
                if out is None or last[out] == n:
                    gone.append(name)
            line = f"{made[0] if call.one else ', '.join(made) + ','} = {line}"
        lines += [line, f"del {', '.join(gone)}"] if gone else [line]
    found = ", ".join(f"clone({shown(s)})" if s.value is not None or s.memory.held else names[s] for s in outs)
    source = "\n    ".join(["def play():", *lines, f"return [{found}]"])
    exec(compile(source, "<recorded calls>", "exec"), space)
    return space["play"], source


def _made_once(call: _Call) -> bool:
    """Makes now what every play would make alike. Is the call then done with?"""
    if call.kept or call.writes or any(s.value is None for s in call.inputs):
        return False
    made = [s for s in call.outs if s is not None]
    if not call.view:
        memories = [s.memory for s in (*call.inputs, *made)]
        if not all(m.steady and not m.written and not m.held for m in memories):
            return False
        if any(s.bytes > KEPT_BYTES for s in made):
            return False
    there = [_values(x) for x in (call.args, call.kwargs)]
    found = call.run(*there[0], **there[1])
    for s, x in zip(call.outs, [found] if call.one else found, strict=True):
        if s is not None:
            s.value = x
    return True


def _values(x: Any) -> Any:
    """Arguments with tensors in the place of slots."""
    if isinstance(x, _Slot):
        return x.value
    if isinstance(x, list | tuple):
        return type(x)([_values(item) for item in x])
    return {name: _values(item) for name, item in x.items()} if isinstance(x, dict) else x


def _needed(calls: Sequence[_Call], outs: Sequence[_Slot]) -> list[_Call]:
    """The calls without those whose results nothing needs."""
    slots = set(outs)
    memories = {s.memory for s in outs}
    found = []
    for call in reversed(calls):
        made = any(s in slots for s in call.outs if s is not None)
        if call.kept or made or any(m.held or m in memories for m in call.writes):
            found.append(call)
            slots.update(call.inputs)
            memories.update(s.memory for s in call.inputs)
    return found[::-1]
