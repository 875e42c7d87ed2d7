"""One rank's failure ends all ranks within seconds, with that rank's traceback.

    with Alarm() as alarm:          # on every rank, the same number of times
        ...                         # work in which ranks wait for each other

A rank that raises writes why into the key-value store of the process group; a thread of every other rank looks there,
and `alarm.check()`, which those that wait call now and then, raises there too. A rank that cannot be reached that way,
because it waits inside a collective, ends itself some seconds later, having printed the cause. A rank that has left the
work when another one fails in it finds that out in the work that follows.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fmegatron.errors import UserError

POLL = 0.5  # seconds between looks at the store
LIMIT = 5.0  # seconds that a rank has to raise by itself

# How many failures this program has seen, on this rank as on all others: the place in the store for the next one.
_failures = 0


class RankFailed(RuntimeError):
    """Another rank failed; the message has its traceback."""

    elsewhere = True  # so that the launcher shows the rank that failed, and not this one


class Alarm:
    """While it is on, an exception on one rank raises on all: the same UserError, else RankFailed.

    stop: called, in another thread, when another rank has failed, to end what this rank waits for. Every rank of the
    program must be in one when another one fails, or enter one after that.
    """

    def __init__(self, stop: Callable[[], None] = lambda: None) -> None:
        self.stop = stop
        self.key = f"fmegatron/alarm/{_failures}"
        self.found: str | None = None
        self.over = threading.Event()
        self.store: Any = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.store = dist.distributed_c10d._get_default_store()

    def __enter__(self) -> Alarm:
        if self.store is not None:
            threading.Thread(target=self._watch, daemon=True, name="alarm").start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        global _failures
        self.over.set()
        if self.store is None or error is None:
            return
        _failures += 1
        if isinstance(error, RankFailed):
            return
        told = self.found or self._look()
        if told is not None:  # ours comes of it: a peer that is gone, say
            raise self._error(told) from None
        message = str(error) if isinstance(error, UserError) else "".join(traceback.format_exception(error))
        record = {"rank": dist.get_rank(), "user": isinstance(error, UserError), "message": message}
        try:
            self.store.set(self.key, json.dumps(record))
            time.sleep(2 * POLL)  # the store may end with this rank
        except Exception:  # the store is gone, and so are others
            pass

    def check(self) -> None:
        """Raises if another rank has failed."""
        if self.found is not None:
            raise self._error(self.found)

    def _look(self) -> str | None:
        try:
            return self.store.get(self.key).decode() if self.store.check([self.key]) else None
        except Exception:  # the store is gone: its rank will have told why, or was killed
            return json.dumps({"rank": 0, "user": False, "message": "the store of the process group is gone\n"})

    def _watch(self) -> None:
        while not self.over.wait(POLL):
            if (found := self._look()) is None:
                continue
            self.found = found
            self.stop()
            if not self.over.wait(LIMIT):
                print(f"fmegatron: {self._error(found)}", file=sys.stderr, flush=True)
                os._exit(1)
            return

    @staticmethod
    def _error(found: str) -> Exception:
        record = json.loads(found)
        if record["user"]:
            return UserError(record["message"])
        return RankFailed(f"rank {record['rank']} failed:\n{record['message']}")
