"""Both ends of a training step that keep a GPU from waiting for the host: batches are there before the step begins, and
metrics are read when it has long ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fmegatron import tree

Batch = dict[str, Tensor]


class Prefetched:
    """The batches of a run by their numbers, each begun while the step before it runs.

        batches = Prefetched(make, device, last=steps)
        state, metrics = step(state, batches(state.step))
        batches.begin(state.step)

    make(number) -> a batch on the device, by copies from pinned memory that do not wait (`to_device`). last: the number
    of batches that there are. On a CPU nothing is begun before it is asked for: the host has the step to run.
    """

    def __init__(self, make: Callable[[int], Batch], device: torch.device, *, last: int) -> None:
        self.make, self.device, self.last = make, device, last
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.ahead: tuple[int, Batch, Any] | None = None

    def begin(self, number: int) -> None:
        """Makes a batch, and sends it on a stream of its own."""
        if self.stream is None or number >= self.last:
            return
        with torch.cuda.stream(self.stream):
            batch = self.make(number)
            self.ahead = number, batch, self.stream.record_event()

    def __call__(self, number: int) -> Batch:
        """The batch of this number."""
        found, self.ahead = self.ahead, None
        if found is None or found[0] != number:
            return self.make(number)
        _, batch, event = found
        here = torch.cuda.current_stream(self.device)
        here.wait_event(event)
        for x in batch.values():
            x.record_stream(here)  # its memory belongs to the other stream
        return batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device; a GPU gets it from pinned memory, while the host goes on."""
    if device.type == "cuda":
        batch = {name: x.pin_memory() for name, x in batch.items()}
    return {name: x.to(device, non_blocking=True) for name, x in batch.items()}


def fetched(metrics: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Begins to bring metrics to the host, 0-d tensors and numbers: the function that comes back waits for them, and
    gives them as numbers, None where there is none."""
    single = {name: x for name, x in metrics.items() if tree.is_tensor(x)}
    on_gpu = {name: x for name, x in single.items() if x.is_cuda}
    host, event = None, None
    if on_gpu:
        rows = torch.stack([x.detach().double() for x in on_gpu.values()])  # exact for counts of tokens too
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        host.copy_(rows, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(rows.device))
    whole = {name for name, x in on_gpu.items() if not x.is_floating_point()}

    def read() -> dict[str, Any]:
        if event is not None:
            event.synchronize()
        values = dict(zip(on_gpu, host.tolist(), strict=True)) if host is not None else {}
        values = {name: int(x) if name in whole else x for name, x in values.items()}
        return {n: values[n] if n in values else x.item() if n in single else x for n, x in metrics.items()}

    return read


@contextlib.contextmanager
def no_waiting(device: torch.device) -> Any:
    """On a GPU an operation in the body for which the host would wait is an error; for tests and for looking why."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
