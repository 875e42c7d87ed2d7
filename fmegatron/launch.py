"""Several processes on one machine, and the process group they share.

`launch` is the parent of `fmegatron train --nproc 4`. It starts the same program once a rank, with the variables that
torchrun would set, passes signals on, and sees that a failure is told once and that no process is left behind:
- a rank that fails writes why into a file of its own (see `report_error`) instead of printing it, because ranks that
  did nothing wrong fail too when their peer is gone; the parent prints the cause, and only that;
- ranks die with their parent, even when it is killed (PR_SET_PDEATHSIG, on Linux).
Under torchrun the ranks agree through its key-value store on who prints.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fmegatron.errors import UserError

if typing.TYPE_CHECKING:
    import torch

ERRORS = "FMEGATRON_ERRORS"  # environment variable: the folder in which a rank leaves its error for the parent
POLL = 0.05  # seconds between looks at the ranks
AGREE = 0.5  # seconds in which ranks that fail for the same reason do so


# --- The parent ---


def launch(command: Sequence[str], nproc: int, *, grace: float = 1.0) -> int:
    """Run `command` in `nproc` processes, one a rank, and give the exit code: 0 when all gave 0.

    SIGTERM and SIGINT go to all ranks, which may take as long as they need (to save a checkpoint); a second one kills
    them. When a rank fails the others have `grace` seconds, then SIGTERM, then as long again before SIGKILL, and its error
    is printed, or by which signal it was killed. The exit code is 2 for a UserError in any rank, else that of the first
    rank that failed (128 + n: signal n killed it). Ranks read nothing from standard input. OMP_NUM_THREADS, unless set, becomes a rank's share of the cores.
    """
    if nproc < 1:
        raise UserError(f"--nproc {nproc} must be at least 1")
    with tempfile.TemporaryDirectory(prefix="fmegatron-") as errors:
        ranks: list[subprocess.Popen] = []
        with _forwarding(ranks):
            try:
                shared = _environment(nproc, errors)
                for rank in range(nproc):
                    environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    ranks.append(_start(command, environment))
                first, rank = _wait(ranks, grace)
            finally:
                _kill(ranks)
        return _conclude(first, rank, Path(errors))


def _environment(nproc: int, errors: str) -> dict[str, str]:
    """The variables that all ranks share."""
    environment = dict(os.environ)
    environment.update(
        WORLD_SIZE=str(nproc),
        LOCAL_WORLD_SIZE=str(nproc),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        **{ERRORS: errors},
    )
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // nproc)))
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each peer's end is told with a C++ stack
    environment.setdefault("PYTHONUNBUFFERED", "1")
    if os.path.exists("/sys/class/net/lo"):
        # else gloo looks the host's name up, which may fail or take long
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # the terminal's Ctrl-C reaches the parent alone, so that a rank gets it once
        preexec_fn=_die_with_parent(os.getpid()),
    )


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """What a rank calls before it starts its program: be killed when the parent ends, however that happens.

    SIGKILL rather than SIGTERM: nobody is left to wait for a clean end, and a rank that went on to save would write
    beside the run that is started next.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    set_death_signal = 1  # PR_SET_PDEATHSIG, from linux/prctl.h

    def ask() -> None:
        prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(1)

    return ask


@contextlib.contextmanager
def _forwarding(ranks: list[subprocess.Popen]) -> Iterator[None]:
    """While active, SIGTERM and SIGINT go to the ranks; the second one kills them."""
    seen = 0

    def forward(number: int, frame: object) -> None:
        nonlocal seen
        seen += 1
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.send_signal(number if seen == 1 else signal.SIGKILL)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(ranks: list[subprocess.Popen], grace: float) -> tuple[int, int]:
    """Wait for all ranks; the code of the first that failed, or 0, and its number. After a failure the others are ended."""
    (first, number), failed_at, terminated = (0, 0), 0.0, False
    while None in [rank.poll() for rank in ranks]:
        now = time.monotonic()
        if not first:
            first, number = _failed(ranks)
            failed_at = now
        if first and not terminated and now > failed_at + grace:
            terminated = True
            for rank in ranks:
                rank.terminate()
        if first and now > failed_at + 2 * grace:
            _kill(ranks)
        time.sleep(POLL)
    return (first, number) if first else _failed(ranks)


def _failed(ranks: list[subprocess.Popen]) -> tuple[int, int]:
    """The code and the number of a rank that has failed: first of those that a signal killed, as others fail by that."""
    codes = [(rank.returncode, n) for n, rank in enumerate(ranks) if rank.returncode]
    return min(codes, key=lambda found: found[0] > 0, default=(0, 0))


def _kill(ranks: list[subprocess.Popen]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    for rank in ranks:
        rank.wait()


def _conclude(first: int, rank: int, errors: Path) -> int:
    """Print the cause of a failure, once, and give the exit code of the whole."""
    records = [json.loads(path.read_text()) for path in sorted(errors.glob("rank-*.json"))]
    wrong = sorted((r["rank"], r["message"]) for r in records if r["user"])
    if wrong:
        _print_error(wrong[0][1])
        return 2
    if first < 0:  # what the others tell comes of it
        name = signal.Signals(-first).name
        hint = " (if you did not, memory may have run out)" if -first == signal.SIGKILL else ""
        print(f"fmegatron: rank {rank} was killed by {name}{hint}", file=sys.stderr, flush=True)
    elif records:  # a crash: the earliest is the cause, the later ones are peers that lost it, or were told of it
        cause = min(records, key=lambda r: (r.get("elsewhere", False), r["time"]))
        print(f"fmegatron: rank {cause['rank']} failed:\n{cause['message']}", end="", file=sys.stderr, flush=True)
    return 128 - first if first < 0 else first


# --- A rank ---


def report_error(error: BaseException) -> int:
    """Tell of the error that ends this process, and give the exit code: 2 for a UserError, else 1.

    One process: a UserError is one line on standard error; anything else is raised again. A rank started by `launch`
    leaves it to the parent. Under torchrun, of the ranks that have a UserError the lowest prints it. A rank ends here
    and now: the usual end of the interpreter would wait for peers.
    """
    user = isinstance(error, UserError)
    if folder := os.environ.get(ERRORS):
        message = str(error) if user else "".join(traceback.format_exception(error))
        record = {"rank": int(os.environ["RANK"]), "user": user, "time": time.time(), "message": message}
        record["elsewhere"] = getattr(error, "elsewhere", False)  # it stands for another rank's
        path = Path(folder, f"rank-{record['rank']}.json")
        path.with_suffix(".part").write_text(json.dumps(record))
        path.with_suffix(".part").replace(path)
    elif user:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or _speaks():
            _print_error(str(error))
    elif "RANK" in os.environ:
        traceback.print_exception(error)
    else:
        raise error
    code = 2 if user else 1
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _print_error(message: str) -> None:
    print(f"fmegatron: error: {message}", file=sys.stderr, flush=True)


def _speaks() -> bool:
    """Whether this rank prints its error: of those that fail within AGREE seconds the lowest, and one at most.

    Without a store each node's first rank does. The others return only when that is done, because torchrun ends all
    ranks when one exits.
    """
    rank = int(os.environ["RANK"])
    try:
        store = _store()
        key = f"fmegatron/error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        store.set(f"{key}/{rank}", "1")
        time.sleep(AGREE)
        if not any(store.check([f"{key}/{lower}"]) for lower in range(rank)) and store.add(f"{key}/told", 1) == 1:
            return True
        time.sleep(2 * AGREE)
        return False
    except Exception:  # no store, or its owner is gone: better told twice than not at all
        return os.environ.get("LOCAL_RANK", "0") == "0"


def _store() -> typing.Any:
    """The store of the process group or, before there is one, of torchrun's agent."""
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise RuntimeError("no store")
    timeout = datetime.timedelta(seconds=5)
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)


def init_distributed(device: str = "auto", *, timeout: float = 600.0) -> torch.device:
    """Join the process group that RANK, WORLD_SIZE and MASTER_ADDR describe, and give this rank's device.

    gloo on the CPU; NCCL on CUDA, one GPU for each LOCAL_RANK, with gloo beside it for CPU tensors. Without RANK in the
    environment there is one process and no group. `timeout`: seconds after which a collective that a peer never joins
    fails. Raises UserError: an unknown device, no CUDA, more local ranks than GPUs.
    """
    import torch
    import torch.distributed as dist

    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {device!r} is not known; give cpu, cuda or auto")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    local = int(os.environ.get("LOCAL_RANK", "0"))
    place = torch.device("cpu")
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise UserError(
                f"--device cuda: local rank {local} has no GPU, as this machine has {torch.cuda.device_count()}; "
                "start fewer processes or give --device cpu"
            )
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
    if "RANK" in os.environ and not dist.is_initialized():
        # Without device_id: with it torch makes every group by splitting one NCCL communicator, in which all ranks have to
        # take part at once, hands NCCL's options to gloo, and names groups by counters that differ between stages.
        from fmegatron.groups import one_gloo_thread

        one_gloo_thread()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=timeout)
        )
    return place


def is_first_process() -> bool:
    """Whether this is rank 0, the one that prints and writes; so is a process without a group."""
    return int(os.environ.get("RANK", "0")) == 0


def close_distributed() -> None:
    """Leave the process group, if there is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
