"""`recorded`: a training step recorded once, and played from then on: as a CUDA graph, on a CPU as a list of calls.

    step = recorded(train_step(model.loss, optimizer, weights=model.weights, donate=True, check_finite=False))
    state, metrics = step(state, batch)          # the first calls run as ever, the third is recorded

A small model's step is some thousand kernels of a few microseconds, and the host takes longer to launch them than the
GPU to run them. A graph is launched as one (Gray, "Getting started with CUDA graphs", 2019). On a CPU Python and
autograd take longer than such kernels, and a list of calls (calls.py) has neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmegatron import tree
from fmegatron.calls import Calls
from fmegatron.capturing import Recorder, refusal
from fmegatron.dtensor import DTensor
from fmegatron.errors import UserError

Step = Callable[[Any, Any], tuple[Any, Any]]


def recorded(step: Step, *, warmup: int = 2) -> Step:
    """step(state, batch) -> (state, metrics) whose calls after the first `warmup` play a recording.

    The numbers are those of the step itself. What Python alone makes, such as tensors of its numbers, stays what it was
    in the recording; torch's own random numbers are drawn anew in every play. On a CPU compiled functions are recorded
    as they were written, without the compiler.

    The state's tensors become the recording's own: each call overwrites them and gives them back, whether the step
    donates or not (a step that does needs no copies), and a state whose tensors are others, such as a checkpoint's, is
    copied into them. The batch is copied into buffers too. Metrics are new tensors in every call.

    Python's numbers in the state, such as counts of steps, must change by a constant in every step, or not at all; what
    the step computes of them on the host (a learning rate by a schedule, a random key) is computed anew for every call,
    where it asks for it by `capturing.numbers`, as adamw and adam and `fold_in` do. (Where it computes with the count
    itself, that is a tensor in a recording, and the last bits may be others.)

    Raises `UserError` for a batch or a state of other shapes, dtypes or values than the recorded ones (make another
    recording for those), a state divided over ranks, and a step that cannot be recorded: one that reads a value on the
    host (check_finite=True, a loss scale, shapes that depend on values), or on a GPU copies from host memory.
    """
    if warmup < 1:
        raise UserError(f"recorded needs a warmup of at least 1 step, but got warmup={warmup}")
    return _Graphed(step, warmup)


class _Graphed:
    """The calls of a step: eager ones, the recording, plays."""

    def __init__(self, step: Step, warmup: int) -> None:
        self.step, self.left = step, warmup
        self.change: list[Any] | None = None  # of the state's numbers, by a step
        self.recorded: _Recorded | None = None

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        if self.recorded is not None:
            return self.recorded(state, batch)
        if self.left:
            self.left -= 1
            return self._warm(state, batch)
        assert self.change is not None
        tensors = [t for t in tree.leaves((state, batch)) if tree.is_tensor(t)]
        _check(tensors)
        capture = _Capture() if any(t.is_cuda for t in tensors) else Calls()
        self.recorded = _Recorded(self.step, state, batch, self.change, capture)
        return self.recorded(state, batch)

    def _warm(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """A call as ever; how the state's numbers change by it."""
        before, names = _plain(state), tree.paths(state)
        new, metrics = self.step(state, batch)
        after = _plain(new)
        if len(before) != len(after):
            raise UserError("recorded: the step changes the structure of the state: give it one that stays")
        change = [_change(name, a, b) for name, a, b in zip(names, before, after, strict=True)]
        for name, was, now in zip(names, self.change or change, change, strict=True):
            if was != now:
                raise UserError(f"recorded: {name} of the state changes by {was} in one step and by {now} in another")
        self.change = change
        return new, metrics


class _Recorded:
    """A recording, and all that it reads and writes."""

    def __init__(self, step: Step, state: Any, batch: Any, change: list[Any], capture: _Capture | Calls) -> None:
        self.step, self.change, self.capture = step, change, capture
        self.state, self.shape = tree.flatten(state)
        batch, self.batch_shape = tree.flatten(batch)
        self.batch = [t.clone() if tree.is_tensor(t) else t for t in batch]
        self.moving = [i for i, by in enumerate(change) if by]  # numbers that change
        device = next((t.device for t in self.state if tree.is_tensor(t)), torch.device("cpu"))
        self.recorder = Recorder(device)
        self.recorder.values = [self.state[i] for i in self.moving]
        self.stand_ins = [self.recorder.input(n) for n in range(len(self.moving))]
        self.metrics: Any = None
        capture.record(self._run)
        self.recorder.upload()

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        given, shape = tree.flatten(state)
        if shape != self.shape:
            raise UserError("recorded: the state has another structure than the recorded one: make another recording")
        _take("state", state, self.state, given, self.moving)
        flat, shape = tree.flatten(batch)
        if shape != self.batch_shape:
            raise UserError("recorded: the batch has another structure than the recorded one: make another recording")
        _take("batch", batch, self.batch, flat, [])
        self.recorder.fill([given[i] for i in self.moving])
        if hasattr(state, "_donate"):
            state._donate()
        metrics = self._metrics(self.capture.play())
        new = [
            t if tree.is_tensor(t) else x + by if by else x
            for t, x, by in zip(self.state, given, self.change, strict=True)
        ]
        return tree.unflatten(self.shape, new), metrics

    def _run(self) -> list[Tensor]:
        """What is recorded; the metrics' tensors, all 0-d ones of a dtype as one."""
        leaves = list(self.state)
        for i, held in zip(self.moving, self.stand_ins, strict=True):
            leaves[i] = held
        with self.recorder.active():
            new, metrics = self.step(tree.unflatten(self.shape, leaves), tree.unflatten(self.batch_shape, self.batch))
        there, back = [], []
        for old, made in zip(self.state, tree.leaves(new), strict=True):
            if tree.is_tensor(old) and made is not old:
                there.append(old)
                back.append(made.detach())
        with torch.no_grad():
            if there:
                torch._foreach_copy_(there, back)
            self.metrics, tensors = _packed(metrics)
        return tensors

    def _metrics(self, tensors: list[Tensor]) -> Any:
        """The metrics of a play, whose tensors are these."""
        flat, shape, packs = self.metrics
        rows = [list(x.unbind()) if i < packs else [x] for i, x in enumerate(tensors)]
        return tree.unflatten(shape, [x if row is None else rows[row].pop(0) for x, row in flat])


class _Capture:
    """One CUDA graph. It gives the tensors that the run returned, in memory that no other play overwrites."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.found: list[Tensor] = []

    def record(self, run: Callable[[], list[Tensor]]) -> None:
        try:
            # other threads may go on with what is no part of the recording, such as writing a checkpoint
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.found = run()
        except (UserError, RuntimeError, TypeError) as error:
            _free_generator()
            if isinstance(error, UserError):
                raise
            why = "waits for the device, reads a value of it on the host, or copies from host memory"
            raise UserError(f"{refusal(why)} ({str(error).splitlines()[0]})") from error

    def play(self) -> list[Tensor]:
        self.graph.replay()
        return [x.clone() for x in self.found]


def _free_generator() -> None:
    """Where a recording ends in an error, torch leaves the device's generator as if it were being recorded, and every later
    random number on that device would be refused: give it a state that is not, with the same seed and offset."""
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    fresh = torch.Generator(default.device)
    fresh.set_state(default.get_state())
    default.graphsafe_set_state(fresh.graphsafe_get_state())


def _check(tensors: Sequence[Tensor]) -> None:
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 or any(isinstance(t, DTensor) for t in tensors):
        raise UserError(
            f"recorded: the state lies on {ranks} ranks, and collectives are not recorded: run the step without it there"
        )
    devices = {t.device for t in tensors if t.ndim}
    if len(devices) > 1:
        raise UserError(
            f"recorded: state and batch lie on {', '.join(sorted(map(str, devices)))}: bring all to one device (an optimizer "
            "state in host memory cannot be recorded)"
        )


def _plain(state: Any) -> list[Any]:
    """The leaves that are no tensors, None in the place of the others."""
    return [None if tree.is_tensor(t) else t for t in tree.leaves(state)]


def _change(name: str, before: Any, after: Any) -> Any:
    """By how much a number changes; 0 for what is no number."""
    number = isinstance(before, int | float) and not isinstance(before, bool)
    if number and type(after) is type(before):
        return after - before
    if before != after:
        raise UserError(f"recorded: {name} of the state changes from {before!r} to {after!r}: only numbers may change")
    return 0


def _take(what: str, whole: Any, held: list[Any], given: list[Any], moving: Sequence[int]) -> None:
    """Copies the tensors among the leaves `given` of a tree into those that are recorded. Raises `UserError` where a leaf
    is of another kind."""
    there, back = [], []
    for i, (own, new) in enumerate(zip(held, given, strict=True)):
        if own is new:
            continue
        if tree.is_tensor(own) and tree.is_tensor(new):
            if own.shape != new.shape or own.dtype != new.dtype:
                raise UserError(
                    f"recorded: {tree.paths(whole)[i]} of the {what} is {new.dtype} of shape {tuple(new.shape)}, and was recorded as "
                    f"{own.dtype} of shape {tuple(own.shape)}: give one shape, or make another recording"
                )
            there.append(own)
            back.append(new)
        elif i not in moving and (tree.is_tensor(own) or tree.is_tensor(new) or own != new):
            raise UserError(
                f"recorded: {tree.paths(whole)[i]} of the {what} was {_shown(own)} when the step was recorded and is {_shown(new)} now: make "
                "another recording"
            )
    with torch.no_grad():
        for own, new in zip(there, back, strict=True):
            own.copy_(new, non_blocking=True)


def _shown(x: Any) -> str:
    return "a tensor" if tree.is_tensor(x) else repr(x)


def _single(x: Any) -> bool:
    return tree.is_tensor(x) and x.ndim == 0


def _packed(metrics: Any) -> tuple[Any, list[Tensor]]:
    """((leaves, each with the number of the tensor that holds it, structure, how many tensors hold several), tensors): all
    0-d ones of a dtype are one, so that a play's are copied as one."""
    flat, shape = tree.flatten(metrics)
    kinds = list(dict.fromkeys(x.dtype for x in flat if _single(x)))
    tensors = [torch.stack([x.detach() for x in flat if _single(x) and x.dtype == kind]) for kind in kinds]
    found: list[tuple[Any, int | None]] = []
    for x in flat:
        if not tree.is_tensor(x):
            found.append((x, None))
        elif _single(x):
            found.append((None, kinds.index(x.dtype)))
        else:
            found.append((None, len(tensors)))
            tensors.append(x.detach())
    return (found, shape, len(kinds)), tensors
