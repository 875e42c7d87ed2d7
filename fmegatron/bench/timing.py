"""Contenders, and how they take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Contender:
    """One way to train the model.

    gradients: one forward and backward; gives the loss (0-d) and the gradients. forget: drop what `gradients` left.
    prepare: make the optimizer's state. step: one whole step, with clipping and the update; gives the loss.
    held: bytes of parameters, optimizer state and kept buffers, as they now are.
    notes: what a reader should know of it: versions, backends.
    """

    name: str
    gradients: Callable[[], tuple[Tensor, Sequence[Tensor]]]
    prepare: Callable[[], None]
    step: Callable[[], Tensor]
    held: Callable[[], int]
    forget: Callable[[], None] = lambda: None
    notes: dict[str, str] = field(default_factory=dict)
    peer: bool = False


@dataclass
class Phase:
    """What was measured of one contender, for one kind of step.

    samples: milliseconds, one a round. first: seconds of the first step, in which things are compiled.
    peak: bytes at most, those of its own parameters and state included and others' left out; None on a CPU.
    """

    samples: list[float] = field(default_factory=list)
    first: float = 0.0
    peak: int | None = None

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.samples)


def waiter(device: torch.device) -> Callable[[], None]:
    """What waits for the device."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def first(call: Callable[[], Any], wait: Callable[[], None]) -> tuple[Any, float]:
    """(what a first call gives, its seconds)."""
    wait()
    start = time.perf_counter()
    found = call()
    wait()
    return found, time.perf_counter() - start


def peak_of(call: Callable[[], Any], held: int, device: torch.device) -> int | None:
    """Bytes that one call takes at most, with the `held` ones that are its own; None on a CPU."""
    if device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before + held


def take_turns(
    calls: dict[str, Callable[[], Any]],
    rounds: int,
    wait: Callable[[], None],
    after: Callable[[str], None] = lambda name: None,
    failed: Callable[[str, Exception], None] | None = None,
    finished: Callable[[dict[str, list[float]]], None] = lambda samples: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Milliseconds of every call in every round; each second round goes the other way, so that neither a drift of the
    clock rate nor a neighbour's leftovers favour one.

    after: what to do behind a call, untimed. failed: told of a call that raises, which then has no samples and no
    further turns; without it the error is raised. finished: told of all samples so far, behind every round, untimed.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(rounds):
        for name in list(samples) if n % 2 == 0 else list(samples)[::-1]:
            wait()
            start = clock()
            try:
                calls[name]()
                wait()
            except Exception as error:
                if failed is None:
                    raise
                del samples[name]
                failed(name, error)
                continue
            samples[name].append(1e3 * (clock() - start))
            after(name)
        finished(samples)
    return samples


def paired_ratio(samples: Sequence[float], reference: Sequence[float]) -> float:
    """The median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(samples, reference, strict=True))


def norm_of(tensors: Iterable[Tensor]) -> float:
    """The 2-norm of all elements."""
    with torch.no_grad():
        parts = [
            torch.linalg.vector_norm(x, dtype=torch.float64 if x.device.type == "cpu" else torch.float32)
            for x in tensors
        ]
        return float(torch.stack([x.double() for x in parts]).norm())


def bytes_of(tensors: Iterable[Any]) -> int:
    """Bytes of some tensors' storage; what is no tensor counts nothing."""
    found = {}
    for x in tensors:
        if isinstance(x, Tensor):
            found[x.untyped_storage().data_ptr(), x.device] = x.untyped_storage().nbytes()
    return sum(found.values())
