"""Numbers that the host computes anew for every step, in a step that is recorded once and played again (graphs.py).

A played step runs no Python: a learning rate that Python computes would stay what it was when the step was recorded.
So code that computes numbers from a count of steps asks `numbers` for them. Outside a recording these are the numbers;
in one they are memory on the device, which the recording fills anew before every play.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmegatron.errors import UserError

Numbers = Callable[[Any], Sequence[float]]

ROOM = 1 << 14  # numbers that change from step to step, in a recording
ROOM_FIXED = 1 << 20  # those that do not, such as addresses


def numbers(f: Numbers, count: Any, *, dtype: torch.dtype = torch.float64) -> Any:
    """f(count), some numbers made of a count of steps; in a recording, where the count is a tensor, a tensor of them.

    dtype: of that tensor, float64 or int64. f must be a pure function: a recording calls it before every play.
    """
    found = recording()
    return found.slot(f, count, dtype) if found is not None and isinstance(count, Tensor) else f(count)


def folded(key: Any, data: Any, fold: Callable[[Any, Any], Any]) -> Any:
    """In a recording, `fold(key, data)` of a count of the state, or of a key that is made of one: the host folds it anew
    before every play, where on the device it would take a hundred small kernels. None: fold it as ever."""
    if torch.compiler.is_compiling() or _active is None:
        return None
    found = _active
    if not isinstance(key.words, Tensor):
        if id(data) not in found.inputs:
            return None
        number = found.inputs[id(data)][1]
        return type(key)(found.key(key, ("number", number), lambda n: fold(key, n).words, number))
    if id(key.words) not in found.keys or isinstance(data, Tensor):
        return None
    _, f, number = found.keys[id(key.words)]
    return type(key)(found.key(key, data, lambda n: fold(type(key)(tuple(f(n))), data).words, number))


def as_one(f: Callable[..., Any], *args: Any) -> Any:
    """f(*args), for a function of tensors that looks at their values and gives new ones, of shapes that do not depend on
    them: where a step is recorded as a list of calls, it is one of them."""
    return f(*args) if torch.compiler.is_compiling() or _whole is None else _whole(f, args)


def recording() -> Recorder | None:
    """The recording that is under way."""
    return None if torch.compiler.is_compiling() else _active


def watched() -> bool:
    """Is a mode of torch's dispatcher around, other than the one that lists the calls of a recording?"""
    return torch._C._len_torch_dispatch_stack() > (_whole is not None)


def refusal(what: str) -> str:
    """Why a step cannot be recorded."""
    return (
        f"recorded: the step cannot be recorded: it {what}; make it with check_finite=False, without a loss scale, and with "
        "adamw or adam"
    )


# No context variables: what a backward's own thread runs again must see them too.
_active: Recorder | None = None
_whole: Callable[..., Any] | None = None


@contextmanager
def listed(whole: Callable[[Callable[..., Any], tuple[Any, ...]], Any]) -> Iterator[None]:
    """The body's calls are listed, by a mode of torch's dispatcher; whole(f, args) lists one function (`as_one`)."""
    global _whole
    _whole = whole
    try:
        yield
    finally:
        _whole = None


class Recorder:
    """The numbers of one recorded step: `inputs`, the plain numbers of its state, and what the host makes of them.

    They lie side by side on the device, and are filled by one copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Not made when first asked for: in a CUDA graph, making it would be recorded, and every play would empty it.
        self.words, self.fixed_words = (torch.zeros(n, dtype=torch.int64, device=device) for n in (ROOM, ROOM_FIXED))
        # On a CPU the numbers are written where they lie, and at once: there the run that is listed computes with them.
        self.here = self.words.numpy() if self.words.is_cpu else None
        self.inputs: dict[int, tuple[Tensor, int]] = {}  # by id: which number of the state a tensor stands for
        self.asked: list[Tensor] = []  # what `slot` has given, in order
        self.folded: dict[Any, Tensor] = {}  # (key, data): words
        self.keys: dict[
            int, tuple[Tensor, Numbers, int]
        ] = {}  # by id: words of random keys, what they are of which number
        self.parts: list[tuple[Numbers, int, Tensor]] = []  # what fills `words`, in order: f, of which number
        self.fixed: list[int] = []
        self.kept: list[Tensor] = []
        self.used = self.again = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """The body is recorded. A second time it must ask for the same numbers in the same order, and gets the same
        memory."""
        global _active
        _active, self.again = self, 0
        try:
            yield
        finally:
            _active = None

    def input(self, number: int) -> Tensor:
        """A 0-d tensor that stands for a number of the state, int64 or float64."""
        kind = torch.int64 if isinstance(self.values[number], int) else torch.float64
        held = self._added(lambda x: (x,), number, kind)[0]
        self.inputs[id(held)] = (held, number)
        return held

    def slot(self, f: Numbers, count: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory of f's numbers of a number of the state. Raises `UserError` for any other count."""
        if id(count) not in self.inputs:
            raise UserError(
                "recorded: a number is computed on the host from a count that the step has changed before: compute it "
                "from the count that is in the state"
            )
        if self.again == len(self.asked):
            self.asked.append(self._added(f, self.inputs[id(count)][1], dtype))
        self.again += 1
        return self.asked[self.again - 1]

    def key(self, key: Any, data: Any, f: Numbers, number: int) -> Tensor:
        """Memory of the two words of a random key, f of a number of the state: that of `data` under `key`."""
        name = key.words if isinstance(key.words, tuple) else id(key.words), data
        if name not in self.folded:
            held = self.folded[name] = self._added(f, number, torch.int64)
            self.keys[id(held)] = held, f, number
        return self.folded[name]

    def _added(self, f: Numbers, number: int, dtype: torch.dtype) -> Tensor:
        made = _words(f(self.values[number]), dtype)
        held = self._take(len(made), dtype)
        if self.here is not None:
            self.here[held.storage_offset() :][: len(made)] = made
        self.parts.append((f, number, held))
        return held

    def constant(self, values: Sequence[int]) -> Tensor:
        """int64 numbers that are the same in every play, such as addresses: a copy from host memory cannot be recorded.

        Only in the recording itself is what they are known; `upload` brings them to the device.
        """
        start = len(self.fixed)
        self.fixed.extend(values)
        if len(self.fixed) > ROOM_FIXED:
            raise UserError("recorded: the step has too many leaves for one graph: record it in parts")
        return self.fixed_words[start : start + len(values)]

    values: Sequence[Any] = ()  # of the state's numbers, in the play that is next

    def keep(self, x: Tensor) -> Tensor:
        """x, which the recording reads and therefore must not be freed while it is played."""
        self.kept.append(x)
        return x

    def fill(self, values: Sequence[Any]) -> None:
        """Brings the numbers that belong to these numbers of the state to the device; nothing waits for it."""
        self.values = values
        found = [0] * self.used
        for f, number, held in self.parts:
            made, at = _words(f(values[number]), held.dtype), held.storage_offset()
            found[at : at + len(made)] = made
        if self.here is not None:
            self.here[: len(found)] = found
        elif found:
            self._copy(self.words, found)

    def upload(self) -> None:
        """Brings the constants to the device."""
        if self.fixed:
            self._copy(self.fixed_words, self.fixed)

    def _copy(self, to: Tensor, values: list[int]) -> None:
        # a new pinned tensor each time: the one before may still be on its way
        host = torch.from_numpy(np.array(values, dtype=np.int64))
        host = host.pin_memory() if self.device.type == "cuda" else host
        to[: len(values)].copy_(host, non_blocking=True)

    def _take(self, n: int, dtype: torch.dtype) -> Tensor:
        if self.used + n > ROOM:
            raise UserError(f"recorded: a step with more than {ROOM} numbers that the host computes cannot be recorded")
        held = self.words[self.used : self.used + n]
        self.used += n + n % 2  # compiled code reads aligned to 16 bytes
        return held if dtype == torch.int64 else held.view(torch.float64)


def _words(numbers: Sequence[float], dtype: torch.dtype) -> list[int]:
    """Numbers as the int64 that have their bits."""
    return [_signed(int(x)) if dtype == torch.int64 else _bits(x) for x in numbers]


def _bits(x: float) -> int:
    """The float64 as the int64 of the same bits."""
    return struct.unpack("<q", struct.pack("<d", float(x)))[0]


def _signed(x: int) -> int:
    """An unsigned word of 64 bits as the int64 of the same bits."""
    return x - (1 << 64) if x >= 1 << 63 else x
