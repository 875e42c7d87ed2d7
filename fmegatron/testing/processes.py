"""A pool of real gloo processes that stays alive from call to call: starting four takes a second, a call milliseconds.

    results = processes(4).run(function, *args)        # function(*args) on every rank; its results by rank

The function is found by its module and name in the workers, so it must live at the top of a module.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

GRACE = 5.0  # seconds that other ranks get behind one that failed; they may wait for it in a collective
KILLED = "the process was killed by"
# Process groups of a rank, each of which has a gloo thread that wakes a hundred times a second, used or not: where there
# are more the next call gets new processes.
MOST_GROUPS = 16

_pools: dict[int, Pool] = {}


def processes(world: int) -> Pool:
    """The pool of this many ranks, started at first use."""
    pool = _pools.get(world)
    if pool is not None and pool.groups > MOST_GROUPS:
        pool.close()
    if pool is None or not pool.alive():
        pool = _pools[world] = Pool(world)
    return pool


class Pool:
    """`world` processes with a gloo process group. They end with this program, or at `close`."""

    def __init__(self, world: int) -> None:
        self.world = world
        context = _context()
        self.folder = tempfile.mkdtemp(prefix="fmegatron-ranks-")
        self.pipes: list[Any] = []
        self.workers: list[Any] = []
        self.groups = 0  # most process groups of a rank
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for rank in range(world):
            mine, theirs = context.Pipe()
            worker = context.Process(
                target=_serve, args=(rank, world, self.folder, list(sys.path), theirs), daemon=True
            )
            worker.start()
            theirs.close()
            self.pipes.append(mine)
            self.workers.append(worker)
        atexit.register(self.close)

    def alive(self) -> bool:
        return bool(self.workers) and all(w.is_alive() for w in self.workers)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """function(*args) on every rank: the list of results.

        Raises RuntimeError with a failing rank's traceback, or the signal that killed it, and TimeoutError after `timeout`
        seconds; both end the pool, since its collectives may be out of step.
        """
        call = pickle.dumps((function.__module__, function.__qualname__, args))
        for pipe in self.pipes:
            pipe.send_bytes(call)
        found: dict[int, tuple[bool, Any]] = {}
        until = time.monotonic() + timeout
        while len(found) < self.world:
            waiting = {self.pipes[r]: r for r in range(self.world) if r not in found}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, until - time.monotonic()))
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    *answer, groups = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                    found[rank] = tuple(answer)
                    self.groups = max(self.groups, groups)
                except (EOFError, OSError):
                    found[rank] = (False, self._ended(rank))
                if not found[rank][0]:
                    until = min(until, time.monotonic() + GRACE)
            if not ready:
                break
        failed = sorted((not value.startswith(KILLED), rank) for rank, (ok, value) in found.items() if not ok)
        if failed:  # first of those that were killed: others fail by that
            rank = failed[0][1]
            self.close()
            raise RuntimeError(f"rank {rank} of {self.world}:\n{found[rank][1]}")
        if len(found) < self.world:
            late = min(set(range(self.world)) - set(found))
            self.close()
            raise TimeoutError(f"{function.__qualname__}: rank {late} of {self.world} gave no answer in {timeout:g} s")
        return [found[rank][1] for rank in range(self.world)]

    def _ended(self, rank: int) -> str:
        """How a process ended."""
        self.workers[rank].join(1)
        code = self.workers[rank].exitcode
        if code is not None and code < 0:
            return f"{KILLED} {signal.Signals(-code).name}"
        return "the process ended without an answer"

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(pickle.dumps(None))
        for worker in self.workers:
            worker.join(2)
            if worker.is_alive():
                worker.kill()
        self.pipes, self.workers = [], []
        shutil.rmtree(self.folder, ignore_errors=True)
        if _pools.get(self.world) is self:
            del _pools[self.world]


def _context() -> Any:
    """How processes are started: by a server that has imported what they need and forks, which is many times quicker than a
    new interpreter each. Not beside a GPU, whose driver does not survive a fork."""
    import torch

    if torch.cuda.is_available() or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed.tensor", "fmegatron.models.presets", "fmegatron.checking", "fmegatron.parallel.pipeline"]
    )
    return context


def _groups() -> int:
    """How many process groups this process has."""
    from torch.distributed import distributed_c10d

    return len(distributed_c10d._world.pg_map)


def _serve(rank: int, world: int, folder: str, path: list[str], pipe: Any) -> None:
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    from fmegatron.groups import one_gloo_thread

    torch.set_num_threads(1)
    one_gloo_thread()
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    while (call := pickle.loads(pipe.recv_bytes())) is not None:
        module, name, args = call
        try:
            found = True, getattr(importlib.import_module(module), name)(*args)
            answer = pickle.dumps((*found, _groups()))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc(), _groups()))
        pipe.send_bytes(answer)
    dist.destroy_process_group()
