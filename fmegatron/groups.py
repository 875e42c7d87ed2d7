"""Process groups of some ranks, made by these ranks alone, each once.

Programs that differ by rank, such as the stages of a pipeline, need groups at times of their own. torch's `new_group` has an
option for that (`use_local_synchronization`), but not for programs that made different groups before:
- it names a group after its ranks and the number of groups that this process has made so far, so that two ranks that have
  made different numbers of them wait for each other under different names, for ever;
- where the default group is bound to a device it splits that group's NCCL communicator, in which all ranks have to take part.
Here a group is named after its ranks alone, is the same one for every mesh, and has a communicator of its own. This is the
one file that touches these parts of torch.

Gloo's groups get one worker thread each (`one_gloo_thread`).
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_made: dict[tuple[int, ...], Any] = {}
_times: dict[tuple[int, ...], tuple[Any, int]] = {}  # (default group, how often these ranks have made one below it)


def group_of(ranks: Sequence[int]) -> Any:
    """The ProcessGroup of these ranks of the default group, in ascending order; it has that group's backends. Each of
    them must ask for it, at any time; this rank must be among them."""
    one_gloo_thread()
    c10d: Any = dist.distributed_c10d
    key = tuple(sorted(ranks))
    if key not in _made or _made[key] not in c10d._world.pg_map:  # or was destroyed, alone or with the default group
        default = c10d._get_default_group()
        below, times = _times.get(key, (None, 0))
        times = times + 1 if below is default else 0
        _times[key] = default, times
        _made[key] = _new(c10d, default, list(key), times)
    return _made[key]


def _new(c10d: Any, default: Any, ranks: list[int], times: int) -> Any:
    """times: a group that was destroyed left addresses in the store under its name."""
    backend, store = c10d._world.pg_map[default]
    text = "_".join(map(str, ranks)) + (f" again {times}" if times else "")
    name = "fmegatron-" + hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    bound = default.bound_device_id
    default.bound_device_id = None  # by which torch decides whether to split
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(default.rank()),
            ranks,
            c10d.Backend(backend),
            store,
            group_name=name,
            timeout=c10d._get_default_timeout(c10d.Backend(backend)),
        )
    finally:
        default.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {rank: n for n, rank in enumerate(ranks)}
    return group


@functools.cache
def one_gloo_thread() -> None:
    """Every gloo group that this process makes from here on has one worker thread, in place of torch's two.

    Each worker notes the name of the operation that it has ended in a string that both share, without a lock
    (`pgStatus_->lastCompletedWorkName` in torch's ProcessGroupGloo.cpp). The name of a functional all-gather,
    ALLGATHER_COALESCED, is too long to lie in the string itself, so that two workers that end at once free the same memory
    twice, and the process dies at some later allocation (read from its source; of two plain processes that gather four at a
    time, 10,000 times, one died in both runs that were tried with torch 2.13, and none in two with one worker). With one worker the collectives of a group run in the order in
    which they are issued, as with NCCL; other groups and point-to-point messages are not held up. torch passes no options
    on to gloo, so this stands in the constructor.
    """
    if not dist.is_gloo_available():
        return
    gloo: Any = dist.ProcessGroupGloo
    original = gloo.__init__

    @functools.wraps(original)
    def init(self: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        given = args[0] if args else kwargs.get("options", kwargs.get("timeout"))
        if isinstance(given, gloo._Options):
            options = given
        else:
            options = gloo._Options()
            interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
            options._devices = [gloo.create_device(interface=name) for name in interfaces.split(",") if name]
            options._devices = options._devices or [gloo.create_default_device()]
            if given is not None:
                options._timeout = given
        options._threads = 1
        original(self, store, rank, size, options)

    gloo.__init__ = init
