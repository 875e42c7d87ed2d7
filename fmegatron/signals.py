"""SIGTERM and Ctrl-C as a wish that a loop asks about, agreed on by all ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


class StopSignals:
    """Which signal has asked for an end, "" if none has."""

    def __init__(self) -> None:
        self.asked = ""

    def take(self, number: int, frame: Any) -> None:
        """The signal handler. A second signal ends the process at once."""
        if self.asked:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked = signal.Signals(number).name

    def agreed(self) -> bool:
        """Has any rank been asked? The same answer on all ranks, so that all end after the same step. Collective."""
        if not dist.is_initialized():
            return bool(self.asked)
        asked = self.asked  # a signal that comes during the collective counts at the next call
        number = torch.tensor([int(signal.Signals[asked]) if asked else 0])
        dist.all_reduce(number, dist.ReduceOp.MAX)
        if int(number):
            self.asked = signal.Signals(int(number)).name
        return bool(int(number))


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Take SIGTERM and SIGINT while the body runs."""
    stop = StopSignals()
    before = {number: signal.signal(number, stop.take) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
