"""Communication that nothing runs beside: time of NCCL's kernels that no other kernel covers, of one step, from torch.profiler.

A kernel of NCCL runs from the moment this rank begins until the last of its peers has come, so that waiting for peers counts: a
pipeline's bubble, and ranks that are late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Interval = tuple[float, float]


@dataclass(frozen=True)
class Communication:
    """Milliseconds of one step on one rank. total: some kernel of NCCL runs; exposed: and nothing else does; span: from the
    first kernel to the end of the last; idle: nothing runs at all."""

    total: float
    exposed: float
    span: float
    idle: float


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in intervals that do not meet, in order."""
    found: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Of their union."""
    return sum(end - start for start, end in merged(intervals))


def uncovered(intervals: Sequence[Interval], by: Sequence[Interval]) -> float:
    """The length of what `intervals` cover and `by` does not."""
    return length([*intervals, *by]) - length(by)


def communicates(name: str) -> bool:
    """Is this a kernel, or a copy, that brings data from one GPU to another?"""
    return "nccl" in name.lower() or "PtoP" in name


def communication(kernels: Iterable[tuple[str, float, float]]) -> Communication:
    """Of kernels (name, start, end), in the unit of these."""
    sent: list[Interval] = []
    others: list[Interval] = []
    for name, start, end in kernels:
        (sent if communicates(name) else others).append((start, end))
    every = merged([*sent, *others])
    span = every[-1][1] - every[0][0] if every else 0.0
    return Communication(length(sent), uncovered(sent, others), span, span - length(every))


def traced(call: Callable[[], Any], device: torch.device) -> Communication | None:
    """Of one call; None where there are no kernels to see, as on a CPU. Every rank must call it."""
    if device.type != "cuda":
        call()
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    kernels = []
    for event in found.events() or ():
        # annotations lie on the device's timeline too, round several kernels
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            kernels.append((event.name, event.time_range.start / 1e3, event.time_range.end / 1e3))
    return communication(kernels)
