"""`cuda_graph`: a training step recorded once as a CUDA graph, and played from then on.

    step = cuda_graph(train_step(model.loss, optimizer, weights=model.weights, donate=True, check_finite=False))
    state, metrics = step(state, batch)          # the first calls run as ever, the third is recorded

A small model's step is some thousand kernels of a few microseconds, and the host takes longer to launch them than the
GPU to run them. A graph is launched as one (Gray, "Getting started with CUDA graphs", 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmegatron import tree
from fmegatron.capturing import Recorder
from fmegatron.dtensor import DTensor
from fmegatron.errors import UserError

Step = Callable[[Any, Any], tuple[Any, Any]]


def cuda_graph(step: Step, *, warmup: int = 2) -> Step:
    """step(state, batch) -> (state, metrics) whose calls after the first `warmup` play a recording.

    The numbers are those of the step itself. On a CPU it is the step itself, so that one program runs on both.

    The state's tensors become the recording's own: each call overwrites them and gives them back, whether the step
    donates or not (a step that does needs no copies), and a state whose tensors are others, such as a checkpoint's, is
    copied into them. The batch is copied into buffers too. Metrics are new tensors in every call.

    Python's numbers in the state, such as counts of steps, must change by a constant in every step, or not at all; what
    the step computes of them on the host (a learning rate by a schedule, a random key) is computed anew for every call,
    where it asks for it by `capturing.numbers`, as adamw and adam and `fold_in` do.

    Raises `UserError` for a batch or a state of other shapes, dtypes or values than the recorded ones (make another
    cuda_graph for those), a state divided over ranks, and a step that cannot be recorded: one that reads a value of the
    device on the host (check_finite=True, a loss scale) or copies from host memory.
    """
    if warmup < 1:
        raise UserError(f"cuda_graph needs a warmup of at least 1 step, but got warmup={warmup}")
    return _Graphed(step, warmup)


class _Graphed:
    """The calls of a step: eager ones, the recording, plays."""

    def __init__(self, step: Step, warmup: int, capture: Callable[[], Any] | None = None) -> None:
        self.step, self.left, self.capture = step, warmup, capture
        self.change: list[Any] | None = None  # of the state's numbers, by a step
        self.recorded: _Recorded | None = None

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        tensors = [t for t in tree.leaves((state, batch)) if tree.is_tensor(t)]
        if self.capture is None and not any(t.is_cuda for t in tensors):
            return self.step(state, batch)
        if self.recorded is None and self.left:
            self.left -= 1
            return self._warm(state, batch)
        if self.recorded is None:
            _check(tensors)
            assert self.change is not None
            self.recorded = _Recorded(self.step, state, batch, self.change, (self.capture or _Capture)())
        return self.recorded(state, batch)

    def _warm(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """A call as ever; how the state's numbers change by it."""
        before, names = _plain(state), tree.paths(state)
        new, metrics = self.step(state, batch)
        after = _plain(new)
        if len(before) != len(after):
            raise UserError("cuda_graph: the step changes the structure of the state: give it one that stays")
        change = [_change(name, a, b) for name, a, b in zip(names, before, after, strict=True)]
        for name, was, now in zip(names, self.change or change, change, strict=True):
            if was != now:
                raise UserError(f"cuda_graph: {name} of the state changes by {was} in one step and by {now} in another")
        self.change = change
        return new, metrics


class _Recorded:
    """A recording, and all that it reads and writes."""

    def __init__(self, step: Step, state: Any, batch: Any, change: list[Any], capture: Any) -> None:
        self.step, self.change, self.capture = step, change, capture
        self.state, self.shape = tree.flatten(state)
        batch, self.batch_shape = tree.flatten(batch)
        self.batch = [t.clone() if tree.is_tensor(t) else t for t in batch]
        self.moving = [i for i, by in enumerate(change) if by]  # numbers that change
        device = next(t.device for t in self.state if tree.is_tensor(t))
        self.recorder = Recorder(device)
        self.stand_ins = [self.recorder.input(n, self.state[i]) for n, i in enumerate(self.moving)]
        self.recorder.values = [self.state[i] for i in self.moving]
        self.metrics: Any = None
        capture.record(self._run)
        self.recorder.upload()

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        given, shape = tree.flatten(state)
        if shape != self.shape:
            raise UserError(
                "cuda_graph: the state has another structure than the recorded one: make another cuda_graph"
            )
        _take("state", tree.paths(state), self.state, given, set(self.moving))
        flat, shape = tree.flatten(batch)
        if shape != self.batch_shape:
            raise UserError(
                "cuda_graph: the batch has another structure than the recorded one: make another cuda_graph"
            )
        _take("batch", tree.paths(batch), self.batch, flat, set())
        self.recorder.fill([given[i] for i in self.moving])
        if hasattr(state, "_donate"):
            state._donate()
        self.capture.play()
        new = [
            t if tree.is_tensor(t) else x + by if by else x
            for t, x, by in zip(self.state, given, self.change, strict=True)
        ]
        return tree.unflatten(self.shape, new), self._metrics()

    def _run(self) -> None:
        """What is recorded."""
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
            self.metrics = _packed(metrics)

    def _metrics(self) -> Any:
        """The metrics of the last play, in memory that the next one does not overwrite."""
        flat, shape, packs = self.metrics
        rows = {dtype: list(pack.clone().unbind()) for dtype, pack in packs.items()}
        out = [rows[x.dtype].pop(0) if _single(x) else x.clone() if tree.is_tensor(x) else x for x in flat]
        return tree.unflatten(shape, out)


class _Capture:
    """One CUDA graph."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()

    def record(self, run: Callable[[], None]) -> None:
        try:
            # other threads may go on with what is no part of the recording, such as writing a checkpoint
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                run()
        except (UserError, RuntimeError, TypeError) as error:
            _free_generator()
            if isinstance(error, UserError):
                raise
            raise UserError(
                "cuda_graph: the step cannot be recorded: it waits for the device, reads a value of it on the host, or copies "
                "from host memory; make it with check_finite=False, without a loss scale, and with adamw or adam "
                f"({str(error).splitlines()[0]})"
            ) from error

    def play(self) -> None:
        self.graph.replay()


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
            f"cuda_graph: the state lies on {ranks} ranks, and collectives are not recorded: run the step without it there"
        )
    devices = {t.device for t in tensors if t.ndim}
    if len(devices) > 1:
        raise UserError(
            f"cuda_graph: state and batch lie on {', '.join(sorted(map(str, devices)))}: bring all to one device (an optimizer "
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
        raise UserError(
            f"cuda_graph: {name} of the state changes from {before!r} to {after!r}: only numbers may change"
        )
    return 0


def _take(what: str, names: list[str], held: list[Any], given: list[Any], moving: set[int]) -> None:
    """Copies tensors into those that are recorded. Raises `UserError` where a leaf is of another kind."""
    there, back = [], []
    for i, (name, own, new) in enumerate(zip(names, held, given, strict=True)):
        if tree.is_tensor(own) and tree.is_tensor(new):
            if own is new:
                continue
            if own.shape != new.shape or own.dtype != new.dtype:
                raise UserError(
                    f"cuda_graph: {name} of the {what} is {new.dtype} of shape {tuple(new.shape)}, and was recorded as "
                    f"{own.dtype} of shape {tuple(own.shape)}: give one shape, or make another cuda_graph"
                )
            there.append(own)
            back.append(new)
        elif i not in moving and (tree.is_tensor(own) or tree.is_tensor(new) or own != new):
            raise UserError(
                f"cuda_graph: {name} of the {what} was {_shown(own)} when the step was recorded and is {_shown(new)} now: make "
                "another cuda_graph"
            )
    with torch.no_grad():
        for own, new in zip(there, back, strict=True):
            own.copy_(new, non_blocking=True)


def _shown(x: Any) -> str:
    return "a tensor" if tree.is_tensor(x) else repr(x)


def _single(x: Any) -> bool:
    return tree.is_tensor(x) and x.ndim == 0


def _packed(metrics: Any) -> tuple[list[Any], Any, dict[torch.dtype, Tensor]]:
    """(leaves, structure, {dtype: all 0-d tensors of it as one}), so that a play's are copied as one."""
    flat, shape = tree.flatten(metrics)
    groups: dict[torch.dtype, list[Tensor]] = {}
    for x in flat:
        if _single(x):
            groups.setdefault(x.dtype, []).append(x.detach())
    return flat, shape, {dtype: torch.stack(some) for dtype, some in groups.items()}
