"""A pool of real gloo processes that stays alive across tests: starting four of them takes seconds, a call milliseconds.

    results = processes(4).run(function, *args)        # function(*args) on every rank; its results by rank

The function is found by its module and name in the workers, so it must live at the top of a test module.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback

_pools: dict[int, Pool] = {}


def processes(world: int) -> Pool:
    """The pool of this many ranks, started at first use."""
    if world not in _pools or not _pools[world].alive():
        _pools[world] = Pool(world)
    return _pools[world]


class Pool:
    def __init__(self, world: int) -> None:
        self.world = world
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.mkdtemp()
        self.pipes, self.workers = [], []
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for rank in range(world):
            mine, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(rank, world, self.folder, theirs), daemon=True)
            worker.start()
            theirs.close()
            self.pipes.append(mine)
            self.workers.append(worker)
        atexit.register(self.close)

    def alive(self) -> bool:
        return all(w.is_alive() for w in self.workers)

    def run(self, function, *args, timeout=120):
        """function(*args) on every rank: the list of results. Raises with the first failing rank's traceback."""
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__qualname__, args))
        found = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout):
                self.close()
                raise TimeoutError(
                    f"{function.__qualname__}: rank {rank} of {self.world} gave no answer in {timeout} s"
                )
            found.append(pipe.recv())
        for rank, (ok, value) in enumerate(found):
            if not ok:
                self.close()  # its collectives may be out of step with the others'
                raise RuntimeError(f"rank {rank} of {self.world}:\n{value}")
        return [value for _, value in found]

    def close(self) -> None:
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:
                pass
        for worker in self.workers:
            worker.join(2)
            if worker.is_alive():
                worker.kill()
        _pools.pop(self.world, None)


def _serve(rank, world, folder, pipe):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    while (call := pipe.recv()) is not None:
        module, name, args = call
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
