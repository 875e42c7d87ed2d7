"""Host memory as a place to rest: optimizer states, and activations by name (`remat.offload`).

    optimizer = offloaded(with_master(adamw(3e-4, clip=1.0)))       # 12 bytes a parameter in host memory, not on the GPU

On a GPU the host's tensors are pinned, and copied on streams of their own beside the work of the step (Ren et al.,
"ZeRO-Offload", 2021). On a CPU host and device are one: everything is copied all the same, so that a test there sees
the same numbers and the same life of each tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.dtensor import DTensor
from fmegatron.errors import UserError
from fmegatron.optim import leaves
from fmegatron.optim.core import Optimizer
from fmegatron.optim.leaves import local_of
from fmegatron.optim.norm import global_norm

# Bytes of optimizer state that are on the device at once; twice as many, as the next ones come while these are used.
BUCKET = 1 << 28
LINE = 256  # bytes that tensors of a bucket are aligned to


def offloaded(optimizer: Optimizer, *, bucket: int = BUCKET) -> Optimizer:
    """An optimizer whose state rests in host memory and is on the device a bucket at a time, while it is updated.

    The next bucket comes, and the one before goes back, while a bucket is updated: 24 bytes a parameter over PCIe for
    AdamW with master copies. The numbers are those of `optimizer`, to which it gives the leaves of a bucket at a time; so
    each leaf must be updated by itself, as in all of `fmegatron.optim` (the global norm is computed of all gradients,
    before). Put it inside of `with_sharded_state` and outside of the rest.

    State: that of `optimizer`, its tensors in (pinned) host memory; one that comes on a device, as from a checkpoint, is
    taken too. An update does not wait for the copies to the host: before reading a state on the host, as to save it, call
    `settle`. bucket: bytes of state; a larger leaf is a bucket of its own.

    Raises `UserError` for a bucket of less than one byte.
    """
    if bucket < 1:
        raise UserError(f"offloaded needs a bucket of at least 1 byte, but got bucket={bucket}")

    def init(params: Any) -> Any:
        if any(t.is_meta for t in tree.leaves(params) if tree.is_tensor(t)):
            return optimizer.init(params)  # shapes alone
        found: list[Any] = []
        shape = None
        for members in _buckets(_plan(optimizer, params), params, bucket):
            part, shape = tree.flatten(optimizer.init(_only(params, members)))
            part = [_to_host(t) if tree.is_tensor(t) else t for t in part]
            found = [a if b is None else b for a, b in zip(found or part, part, strict=True)]
        settle()
        return tree.unflatten(shape, found)

    def update(
        params: Any, grads: Any, state: Any, *, donate: bool = False, grad_norm: Any = None, **options: Any
    ) -> Any:
        norm = global_norm(grads) if grad_norm is None else grad_norm
        owners = _plan(optimizer, params)
        old, shape = tree.flatten(state)
        new_params, new_grads, new_state = tree.leaves(params), tree.leaves(grads), list(old)
        buckets = _buckets(owners, params, bucket)
        rows = [[i for i, owner in enumerate(owners) if owner in set(members)] for members in buckets]
        copies = copies_of(next(t.device for t in new_params if tree.is_tensor(t)))
        moving = copies.begin([[old[i] for i in some] for some in rows])
        for members, some in zip(buckets, rows, strict=True):
            here = dict(zip(some, moving.arrived(), strict=True))
            part = [here.get(i, None if tree.is_tensor(t) else t) for i, t in enumerate(old)]
            mine, own = _only(params, members), _only(grads, members)
            if not donate:
                mine, own = _cloned(mine), _cloned(own)
            mine, own, after = optimizer.update(
                mine, own, tree.unflatten(shape, part), donate=True, grad_norm=norm, **options
            )
            mine, own, after = tree.leaves(mine), tree.leaves(own), tree.leaves(after)
            for i in members:
                new_params[i], new_grads[i] = mine[i], own[i]
            for i, t in zip(some, moving.return_([after[i] for i in some], donate), strict=True):
                new_state[i] = t
            counts = {i: after[i] for i, owner in enumerate(owners) if owner is None}
        new_state = [counts.get(i, t) for i, t in enumerate(new_state)]
        return tree.like(params, new_params), tree.like(grads, new_grads), tree.unflatten(shape, new_state)

    return Optimizer(init, update, optimizer.name, optimizer.rate)


def settle() -> None:
    """Waits until what goes to host memory is there."""
    for copies in _by_device.values():
        copies.settle()


def on_host(state: Any) -> Any:
    """Empty tensors in host memory in the place of a state's: for `checkpoint.load`, which so loads it there."""

    def empty(t: Any) -> Any:
        if not tree.is_tensor(t):
            return t
        return _placed(torch.empty(local_of(t).shape, dtype=t.dtype), t)

    return tree.tree_map(empty, state)


# ------------------------------------------------------------------------------------------- which leaves go together


def _plan(optimizer: Optimizer, params: Any) -> list[int | None]:
    """For every leaf of the state the leaf of the parameters that it belongs to; None for a number."""
    kinds = tuple((tuple(t.shape), t.dtype) if tree.is_tensor(t) else None for t in tree.leaves(params))
    return _planned(optimizer, tree.structure(params), kinds)


@functools.lru_cache(maxsize=16)
def _planned(optimizer: Optimizer, shape: Any, kinds: tuple[Any, ...]) -> list[int | None]:
    meta = [None if k is None else torch.empty(k[0], dtype=k[1], device="meta") for k in kinds]
    params = tree.unflatten(shape, meta)
    owners: list[int | None] = [None] * len(tree.leaves(optimizer.init(params)))
    for i, t in enumerate(meta):
        if t is not None:
            for n, leaf in enumerate(tree.leaves(optimizer.init(_only(params, [i])))):
                owners[n] = i if tree.is_tensor(leaf) else owners[n]
    return owners


def _buckets(owners: Sequence[int | None], params: Any, size: int) -> list[list[int]]:
    """The leaves of the parameters in groups of at most so many bytes of state, four bytes an element counted."""
    groups: list[list[int]] = [[]]
    held = 0
    for i, t in enumerate(tree.leaves(params)):
        mine = 4 * sum(owner == i for owner in owners) * local_of(t).numel() if tree.is_tensor(t) else 0
        if groups[-1] and held + mine > size:
            groups.append([])
            held = 0
        groups[-1].append(i)
        held += mine
    return groups


def _only(values: Any, members: Sequence[int]) -> Any:
    """The tree with None in the place of all other leaves."""
    some = set(members)
    return tree.like(values, [t if i in some else None for i, t in enumerate(tree.leaves(values))])


def _cloned(values: Any) -> Any:
    return tree.tree_map(lambda t: leaves.wrapped(local_of(t).clone(), t) if tree.is_tensor(t) else t, values)


# ------------------------------------------------------------------------------------------------- to the host and back


class Copies:
    """The copies between a device and host memory. On a GPU each way has a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.into: Any = torch.cuda.Stream(device) if self.cuda else None
        self.out: Any = torch.cuda.Stream(device) if self.cuda else None
        self.slots: list[Tensor] = []  # memory for two buckets,
        self.free: list[Any] = [None, None]  # and when each of them may be filled again

    def begin(self, buckets: list[list[Any]]) -> _Moving:
        """Begins to bring the buckets to the device, two at a time."""
        size = max((sum(_lines(t) for t in some) for some in buckets), default=0)
        if not self.slots or len(self.slots[0]) < size:
            self.settle()
            self.slots = []
            self.slots = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
            self.free = [None, None]
            if self.cuda:
                self.into.wait_stream(torch.cuda.current_stream(self.device))
        return _Moving(self, buckets)

    def to_host(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x in host memory, when its stream has come so far; the memory of x is kept until then."""
        host = host_like(x) if out is None else out
        if not self.cuda:
            return host.copy_(x)
        stream = self.out
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(stream)
        return host

    def to_device(self, host: Tensor) -> Tensor:
        """A host tensor on the device, when its stream has come so far: before it is read, `wait_arrived`."""
        new = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        if not self.cuda:
            return new.copy_(host)
        stream = self.into
        # behind what used the new memory before, and behind its own way to the host
        stream.wait_stream(torch.cuda.current_stream(self.device))
        stream.wait_stream(self.out)
        with torch.cuda.stream(stream):
            new.copy_(host, non_blocking=True)
        new.record_stream(stream)
        return new

    def wait_arrived(self) -> None:
        """What runs now waits for all that has begun to come to the device; the host does not."""
        if self.cuda:
            torch.cuda.current_stream(self.device).wait_stream(self.into)

    def settle(self) -> None:
        """The host waits for all copies to it."""
        if self.cuda:
            self.out.synchronize()


_by_device: dict[torch.device, Copies] = {}


def copies_of(device: torch.device) -> Copies:
    """The copies of a device; every user of it shares their streams."""
    if device not in _by_device:
        _by_device[device] = Copies(device)
    return _by_device[device]


@dataclass
class _Moving:
    """The buckets of one update on their way: `arrived` and `return_` in turn."""

    copies: Copies
    buckets: list[list[Any]]

    def __post_init__(self) -> None:
        self.coming: list[tuple[list[Tensor], Any]] = []
        self.next = self.done = 0
        if self.copies.cuda:
            self.copies.into.wait_stream(self.copies.out)
        for _ in self.buckets[:2]:
            self._start()

    def _start(self) -> None:
        c, slot = self.copies, self.next % 2
        found, at = [], 0
        with torch.cuda.stream(c.into) if c.cuda else torch.no_grad():
            if c.cuda and c.free[slot] is not None:
                c.into.wait_event(c.free[slot])
            for leaf in self.buckets[self.next]:
                x = local_of(leaf)
                held = c.slots[slot][at : at + x.numel() * x.itemsize].view(x.dtype).view(x.shape)
                held.copy_(x, non_blocking=True)
                found.append(held)
                at += _lines(leaf)
            event = c.into.record_event() if c.cuda else None
        self.coming.append((found, event))
        self.next += 1

    def arrived(self) -> list[Any]:
        """The leaves of the next bucket on the device."""
        found, event = self.coming.pop(0)
        if event is not None:
            torch.cuda.current_stream(self.copies.device).wait_event(event)
        self.held = found
        return [leaves.wrapped(x, leaf) for x, leaf in zip(found, self.buckets[self.done], strict=True)]

    def return_(self, new: list[Any], donate: bool) -> list[Any]:
        """The updated leaves of that bucket as leaves in host memory, into the old ones' with `donate`."""
        c, old, out = self.copies, self.buckets[self.done], []
        for before, after in zip(old, new, strict=True):
            own = local_of(before)
            reuse = donate and own.device.type == "cpu" and (own.is_pinned() or not c.cuda)
            out.append(_placed(c.to_host(local_of(after), own if reuse else None), before))
        if c.cuda:
            c.free[self.done % 2] = c.out.record_event()
        self.done += 1
        if self.next < len(self.buckets):
            self._start()
        return out


def host_like(x: Tensor) -> Tensor:
    """An empty tensor in host memory, pinned for a GPU."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)


def _to_host(leaf: Tensor) -> Tensor:
    x = local_of(leaf)
    return _placed(copies_of(x.device).to_host(x), leaf)


def _placed(host: Tensor, like: Tensor) -> Tensor:
    """A leaf like another whose local shard is in host memory, wherever its mesh is."""
    return type(like)(host, like._spec, requires_grad=False) if isinstance(like, DTensor) else host  # type: ignore[call-arg]


def _lines(leaf: Tensor) -> int:
    """Bytes that a leaf takes of a bucket."""
    x = local_of(leaf)
    return -(-x.numel() * x.itemsize // LINE) * LINE
