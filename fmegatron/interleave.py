"""Programs by turns: while one waits for an exchange between ranks, another one computes.

    a, b = interleaved(f, g)                 # f(), g()
    results = by_turns(steps, staggered=True)

Two microbatches of a mixture of experts share no value until their gradients are added, so the all-to-all of one (or the
gathers and sums of tokens, where these are exchanged in that way) can run under the computation of the other (DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1). Here this is a transform of two
functions as they stand, forward and backward in any mixture: each is a program of its own, and only one of them runs at a
time. Where a program has begun an exchange and would wait for it, it passes the turn (`pass_turn`), and the other goes on from
where it was, until that one begins an exchange. So what runs when depends on the programs alone, not on time: all ranks issue
their collectives in the same order, and nothing runs at once with anything else.

Every program needs a stack of its own, as the turn may pass in the middle of a backward: the first is the caller's thread,
the second another one. Their backwards run in these threads, on a GPU too, where they use the caller's stream.

`by_turns` is that for a row of functions, of which two are under way at a time.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from fmegatron.function import under_torch_func

A = TypeVar("A")
B = TypeVar("B")

_here = threading.local()  # .lane, of a thread that runs one


def interleaved(f: Callable[[], A], g: Callable[[], B]) -> tuple[A, B]:
    """(f(), g()), g under the exchanges of f and f under those of g. f begins.

    Both must be such that their order does not matter, as no value of one may depend on the other's. What one of them
    raises is raised, when the other has been ended at its next exchange.

    They run one after the other where some state of the calling thread would be missing in another one: under torch.func, in a
    simulation or another of torch's modes, under autocast or hooks of saved tensors, in inference mode, and while a CUDA
    graph is recorded. The results are the same.
    """
    first, second = by_turns([f, g])
    return first, second


def by_turns(functions: Sequence[Callable[[], Any]], *, staggered: bool = False) -> list[Any]:
    """The results of functions of which two at a time are under way (see `interleaved`): the first and the second, then
    the third as soon as the first has ended, and so on.

    staggered: a function begins when the one before it comes to `halfway`, and goes beyond its own when that one has ended: the
        forward of a microbatch runs with the backward of the one before it.
    """
    if len(functions) < 2 or _alone():
        return [f() for f in functions]
    return _Lanes(functions, staggered).run()


def pass_turn() -> None:
    """Called between the issue of an exchange and the wait for it: lets the other program compute. Comes back when that one
    passes the turn, or has ended. Outside of `interleaved` nothing happens."""
    if torch.compiler.is_compiling():
        return
    if (lane := getattr(_here, "lane", None)) is not None:
        lane.pass_turn()


def halfway() -> None:
    """Called between the forward and the backward of a function of `by_turns`. Elsewhere nothing happens."""
    if (lane := getattr(_here, "lane", None)) is not None:
        lane.halfway()


def _alone() -> bool:
    """Has this thread a state that another one would lack?"""
    if torch.compiler.is_compiling() or under_torch_func() or torch.is_inference_mode_enabled():
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return True
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return True
    cuda = torch.cuda.is_initialized()
    if torch.is_autocast_enabled("cpu") or (cuda and torch.is_autocast_enabled("cuda")):
        return True
    return cuda and torch.cuda.is_current_stream_capturing()


class _Ended(BaseException):
    """Ends a program whose partner has failed. No user's `except Exception` takes it."""


class _Lanes:
    """Functions in two lanes, every other one in the same, of which one has the turn."""

    def __init__(self, functions: Sequence[Callable[[], Any]], staggered: bool) -> None:
        self.functions, self.staggered = functions, staggered
        self.lanes = (_Lane(self, 0), _Lane(self, 1))
        self.results: list[Any] = [None] * len(functions)
        # how far each function is: 1 behind its forward, 2 at its end
        self.progress = [0] * len(functions)
        self.failed: BaseException | None = None

    def run(self) -> list[Any]:
        first, second = self.lanes
        context, enter = contextvars.copy_context(), _entering()

        def other() -> None:
            second.turn.acquire()
            with enter():
                context.run(second.run)

        thread = threading.Thread(target=other, name="interleaved", daemon=True)
        thread.start()
        try:
            with torch.autograd.set_multithreading_enabled(False):
                first.run()
        finally:
            thread.join()
        if self.failed is not None:
            raise self.failed
        return self.results


class _Lane:
    """The program of every other function: numbers `place`, `place` + 2, …"""

    def __init__(self, lanes: _Lanes, place: int) -> None:
        self.all, self.place = lanes, place
        self.turn = threading.Semaphore(0)  # open when it is this lane's turn
        self.over = False
        self.number = place

    @property
    def other(self) -> _Lane:
        return self.all.lanes[1 - self.place]

    def run(self) -> None:
        """Runs the functions of this lane, and gives the turn away for good."""
        before = getattr(_here, "lane", None)
        _here.lane = self
        try:
            self.check()
            for number in range(self.place, len(self.all.functions), 2):
                self.number = number
                self.wait_for(number - 1, 1)
                self.all.results[number] = self.all.functions[number]()
                self.all.progress[number] = 2
        except _Ended:
            pass
        except BaseException as error:
            if self.all.failed is None:
                self.all.failed = error
        finally:
            _here.lane = before
            self.over = True
            self.other.turn.release()

    def pass_turn(self) -> None:
        self.check()
        if not self.other.over:
            self.other.turn.release()
            self.turn.acquire()
            self.check()

    def halfway(self) -> None:
        self.all.progress[self.number] = 1
        self.wait_for(self.number - 1, 2)

    def wait_for(self, number: int, progress: int) -> None:
        """Passes the turn until the function before is so far, in a staggered row."""
        while self.all.staggered and number >= 0 and self.all.progress[number] < progress:
            self.pass_turn()

    def check(self) -> None:
        """Ends this program where the other one has failed."""
        if self.all.failed is not None:
            raise _Ended


def _entering() -> Callable[[], contextlib.ExitStack]:
    """What brings the state of this thread, as far as `_alone` lets it be another's, into a thread: a context."""
    graph = torch.is_grad_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def enter() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(torch.set_grad_enabled(graph))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if stream is not None:
            stack.enter_context(torch.cuda.device(stream.device))
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    return enter
