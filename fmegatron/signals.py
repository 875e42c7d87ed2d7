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
        if dist.is_initialized():
            number = torch.tensor([int(signal.Signals[self.asked]) if self.asked else 0])
            dist.all_reduce(number, dist.ReduceOp.MAX)
            self.asked = signal.Signals(int(number)).name if int(number) else ""
        return bool(self.asked)


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
