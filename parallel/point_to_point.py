"""Messages between the ranks of a pipeline: batches of sends and receives that run beside the computing.

Shapes are known on both sides, so a message is its tensors and nothing else. Messages between two ranks arrive in the
order in which they are sent, and every batch is posted at its place in the schedule's table; the table is proven for
sends that wait for their receives (`schedule_check`), so nothing hangs whatever the backend buffers.

On a GPU messages have a stream of their own: a send waits for what made its tensors, a receive for nothing, and who
reads a received tensor waits for its arrival. With gloo threads wait, one for each peer and direction, so that a rank
that waits can be told that another one has failed; a thread drops what it has sent.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

POLL = 0.5  # seconds after which a rank that waits looks for failures elsewhere


class Arrival:
    """Tensors that are on their way: wait() -> them."""

    def __init__(self, tensors: list[Tensor], wait: Callable[[], None]) -> None:
        self.tensors, self._wait = tensors, wait

    def wait(self) -> list[Tensor]:
        self._wait()
        return self.tensors


class Messages:
    """The messages of one rank of a process group, each peer named by its number in the group.

    check: raises when another rank has failed; called while this one waits.
    """

    def __init__(self, group: Any, device: torch.device, check: Callable[[], None] = lambda: None) -> None:
        self.group, self.device, self.check = group, device, check
        self.cuda = device.type == "cuda"
        self.stream: Any = torch.cuda.Stream(device) if self.cuda else None
        self.channels: dict[tuple[int, bool], _Channel] = {}
        self.under_way: list[tuple[Any, list[Tensor]]] = []  # on a GPU: sends
        if self.cuda:  # NCCL's first operation of a group must be one of all its ranks, as a batch of messages is not
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def made(self) -> Any:
        """What a send of tensors that the last work makes has to wait for."""
        return torch.cuda.current_stream(self.device).record_event() if self.cuda else None

    def empty(self, like: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
        """Tensors to receive into."""
        with torch.cuda.stream(self.stream) if self.cuda else contextlib.nullcontext():
            return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in like]

    def exchange(self, moves: Sequence[tuple[int, list[Tensor], bool, Any]]) -> list[Arrival | None]:
        """Posts a batch of (peer, tensors, is it a send?, what the send waits for). For each receive an Arrival."""
        ops, owner = [], []
        for n, (peer, tensors, send, after) in enumerate(moves):
            if self.cuda and after is not None:
                self.stream.wait_event(after)
            for t in tensors:
                what = dist.isend if send else dist.irecv
                ops.append(dist.P2POp(what, t, group=self.group, group_peer=peer))
                owner.append(n)
        if not ops:
            return [None if send else Arrival(tensors, lambda: None) for _, tensors, send, _ in moves]
        with torch.cuda.stream(self.stream) if self.cuda else contextlib.nullcontext():
            works = dist.batch_isend_irecv(ops)
        if self.cuda:
            return self._on_streams(moves, works)
        found: list[Arrival | None] = []
        for n, (peer, tensors, send, _) in enumerate(moves):
            channel = self.channels.setdefault((peer, send), _Channel())
            mine = [w for w, o in zip(works, owner, strict=True) if o == n]
            done = channel.add(mine, tensors) if mine else None
            found.append(None if send else Arrival(tensors, self._waiting(done)))
        return found

    def _on_streams(self, moves: Sequence[Any], works: list[Any]) -> list[Arrival | None]:
        """With NCCL a batch is one piece of work (or several, of all of its ops): who waits, waits for all of it."""

        def wait() -> None:
            self.check()
            for w in works:
                w.wait()

        found: list[Arrival | None] = []
        for _, tensors, send, _ in moves:
            if send:
                self.under_way.append((works, tensors))
                found.append(None)
                continue

            def arrived(tensors: list[Tensor] = tensors) -> None:
                wait()
                for t in tensors:  # made on the other stream
                    t.record_stream(torch.cuda.current_stream(self.device))

            found.append(Arrival(tensors, arrived))
        return found

    def drop_sent(self) -> None:
        """Lets go of what has been sent."""
        self.under_way = [(works, ts) for works, ts in self.under_way if not all(w.is_completed() for w in works)]

    def finish(self) -> None:
        """Waits until all is sent."""
        for works, _ in self.under_way:
            for w in works:
                w.wait()
        self.under_way = []
        for (_, send), channel in self.channels.items():
            if send:
                self._waiting(channel.last)()

    def _waiting(self, done: _Done | None) -> Callable[[], None]:
        def wait() -> None:
            while done is not None and not done.event.wait(POLL):
                self.check()
            if done is not None and done.error is not None:
                self.check()
                raise done.error

        return wait


class _Done:
    """Has some work ended, and how?"""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.error: BaseException | None = None


class _Channel:
    """A thread that waits for the messages to, or from, one peer in turn."""

    def __init__(self) -> None:
        self.todo: queue.SimpleQueue = queue.SimpleQueue()
        self.last: _Done | None = None
        threading.Thread(target=_wait_in_turn, args=(self.todo,), daemon=True, name="messages").start()

    def add(self, works: list[Any], tensors: list[Tensor]) -> _Done:
        self.last = _Done()
        self.todo.put((works, tensors, self.last))
        return self.last

    def __del__(self) -> None:
        self.todo.put(None)


def _wait_in_turn(todo: queue.SimpleQueue) -> None:
    while (item := todo.get()) is not None:
        works, tensors, done = item
        work = None
        try:
            for work in works:
                work.wait()
        except Exception as error:
            done.error = error
        del item, works, work, tensors  # sent, or read by now: nobody else holds it, and a work holds its tensor
        done.event.set()
        del done
