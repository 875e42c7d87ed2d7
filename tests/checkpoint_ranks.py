"""Real processes for the checkpoint tests: `Ranks(4).run(3, function, …)` runs it on the first 3 of them, on gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fmegatron import checkpoint, tree

S, R = Shard, Replicate()

# name: (global shape, dtype, placements on two axes of 2, on one axis of 3, on one axis of 2)
LEAVES: dict[str, tuple[tuple[int, ...], torch.dtype, tuple[Placement, ...], Placement, Placement]] = {
    "both dims": ((12, 10), torch.float32, (S(0), S(1)), S(0), S(1)),
    "one dim twice": ((12, 4), torch.float32, (S(0), S(0)), S(0), R),
    "uneven": ((7, 5), torch.float64, (S(0), S(1)), S(1), S(0)),
    "fewer rows than ranks": ((3, 2), torch.float32, (S(0), S(0)), S(0), S(0)),
    "half": ((4, 6, 3), torch.bfloat16, (S(1), R), S(1), S(1)),
    "whole": ((3, 3), torch.float32, (R, R), R, R),
    "scalar": ((), torch.int64, (R, R), R, R),
}


def value(name: str) -> torch.Tensor:
    """The global value of a leaf, the same wherever it is made."""
    shape, dtype, *_ = LEAVES[name]
    generator = torch.Generator().manual_seed(len(name))
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


def state(world: int, *, meta: bool = False) -> dict[str, Any]:
    """A state of DTensors on `world` ranks (plain tensors on one), of plain tensors and plain values."""
    column = {4: 2, 3: 3, 2: 4}.get(world, 0)
    mesh = init_device_mesh("cpu", {4: (2, 2), 3: (3,), 2: (2,)}[world]) if world > 1 else None

    def leaf(name: str) -> torch.Tensor:
        x = value(name)
        if mesh is not None:
            placements = LEAVES[name][column]
            x = distribute_tensor(x, mesh, placements if isinstance(placements, tuple) else (placements,))
            if meta:
                part = torch.empty(x.to_local().shape, dtype=x.dtype, device="meta")
                return DTensor.from_local(part, mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
        return x.to("meta") if meta else x

    params = {name: leaf(name) for name in LEAVES}
    plain = torch.empty(5, device="meta") if meta else torch.arange(5.0)
    return {"params": {"layers": {0: params, 10: {"frozen": None}}}, "count": 0 if meta else 7, "plain": plain}


def save(folder: str, world: int, step: int) -> None:
    checkpoint.save(folder, state(world), step=step, meta={"world": world})


def load(folder: str, world: int) -> list[str]:
    """The names of the leaves that differ after loading on this many ranks; none should."""
    like = state(world, meta=True)
    loaded = checkpoint.load(folder, like)
    wrong = [] if loaded["count"] == 7 and loaded["params"]["layers"][10]["frozen"] is None else ["values"]
    for name, x in tree.named(loaded).items():
        if not isinstance(x, torch.Tensor):
            continue
        expected = torch.arange(5.0) if name == "plain" else value(name.removeprefix("params.layers.0."))
        wanted = tree.named(like)[name]
        full = x.full_tensor() if isinstance(x, DTensor) else x
        same_layout = type(x) is type(wanted) and getattr(x, "placements", 0) == getattr(wanted, "placements", 0)
        if x.is_meta or full.dtype != expected.dtype or not torch.equal(full, expected) or not same_layout:
            wrong.append(name)
    return wrong


def bytes_read(folder: str, world: int) -> tuple[int, int, int]:
    """(bytes of this rank's shards, bytes read, bytes of new tensors meanwhile)."""
    like = state(world, meta=True)
    with Counted() as counted:
        loaded = checkpoint.load(folder, like)
    held = [x.to_local() if isinstance(x, DTensor) else x for x in tree.leaves(loaded) if isinstance(x, torch.Tensor)]
    return sum(x.nbytes for x in held), counted.read, counted.made


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes that are read from safetensors files by slices, and those of new tensors meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        fresh = func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.clone, torch.ops.aten._to_copy)
        # bytes are pickles on their way between ranks
        if fresh and isinstance(out, torch.Tensor) and not out.is_meta and out.dtype != torch.uint8:
            self.made += out.nbytes
        return out

    def __enter__(self) -> Counted:
        import safetensors

        self.original, counted = safetensors.safe_open, self

        class Slice:
            def __init__(self, inner: Any) -> None:
                self.inner = inner

            def __getattr__(self, name: str) -> Any:
                return getattr(self.inner, name)

            def __getitem__(self, index: Any) -> torch.Tensor:
                part = self.inner[index]
                counted.read += part.nbytes
                return part

        class Open:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self.inner = counted.original(*args, **kwargs)

            def __enter__(self) -> Open:
                self.inner.__enter__()
                return self

            def __exit__(self, *error: Any) -> None:
                self.inner.__exit__(*error)

            def get_slice(self, name: str) -> Slice:
                return Slice(self.inner.get_slice(name))

            def get_tensor(self, name: str) -> torch.Tensor:
                whole = self.inner.get_tensor(name)
                counted.read += whole.nbytes
                return whole

            def __getattr__(self, name: str) -> Any:
                return getattr(self.inner, name)

        safetensors.safe_open = Open  # type: ignore[misc]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        import safetensors

        safetensors.safe_open = self.original  # type: ignore[misc]
        super().__exit__(*error)


def disagree(folder: str) -> str:
    """What a rank sees when the ranks' plain values differ."""
    try:
        checkpoint.save(folder, {"w": torch.ones(2), "count": dist.get_rank()}, step=1)
    except ValueError as e:
        return str(e)
    return ""


def fail_on_one(folder: str) -> str:
    """What a rank sees when another's leaf cannot be saved, which it would else wait for."""
    bad = object() if dist.get_rank() == 1 else 1
    try:
        checkpoint.save(folder, {"w": torch.ones(2), "bad": bad}, step=1)
    except ValueError as e:
        return str(e)
    return ""


def misfit_on_one(folder: str) -> str:
    """What a rank sees when the checkpoint does not fit what another asks for."""
    checkpoint.save(folder, {"w": torch.ones(2)}, step=1)
    try:
        checkpoint.load(folder, {"w": torch.empty(3 if dist.get_rank() == 1 else 2)})
    except ValueError as e:
        return str(e)
    return ""


def stages(folder: str) -> tuple[list[str], int]:
    """Each rank holds a layer of its own, as in a pipeline: (names that differ, problems when it asks for less)."""
    rank = dist.get_rank()
    mine = {"layers": {rank: {"w": torch.full((3, 2), float(rank))}}, "shared": torch.ones(4), "count": 3}
    checkpoint.save(folder, mine, step=1)
    like = tree.tree_map(lambda x: torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) else 0, mine)
    loaded = checkpoint.load(folder, like)
    wrong = [
        n
        for n, x in tree.named(loaded).items()
        if not torch.equal(torch.as_tensor(x), torch.as_tensor(tree.named(mine)[n]))
    ]
    try:
        checkpoint.load(folder, {"shared": like["shared"], "count": 0})
    except ValueError as e:
        return wrong, str(e).count("layers.")
    return wrong, 0


class Ranks:
    """Worker processes that stay alive between calls."""

    def __init__(self, world: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # torch is imported once, not by every worker
        self.pipes, self.workers = [], []
        for rank in range(world):
            here, there = context.Pipe()
            worker = context.Process(target=_work, args=(rank, there), daemon=True)
            worker.start()
            there.close()  # so that a dead worker is an EOFError here
            self.pipes.append(here)
            self.workers.append(worker)

    def run(self, world: int, function: Any, *args: Any) -> list[Any]:
        """function(*args) on the first `world` processes, in a process group of theirs; their results by rank."""
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self.pipes[:world]:
                pipe.send((world, os.path.join(folder, "store"), function, args))
            results = [pipe.recv() for pipe in self.pipes[:world] if pipe.poll(60)]
        assert len(results) == world, "a rank hangs"
        for failed, result in results:
            assert not failed, result
        return [result for _, result in results]

    def close(self) -> None:
        for pipe, worker in zip(self.pipes, self.workers, strict=True):
            pipe.close()
            worker.join(5)
            worker.kill()


def _work(rank: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            world, store, function, args = pipe.recv()
        except EOFError:
            return
        except Exception:  # the module of the function cannot be imported
            pipe.send((True, traceback.format_exc()))
            continue
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
        try:
            pipe.send((False, function(*args)))
        except Exception:
            pipe.send((True, traceback.format_exc()))
        finally:
            dist.destroy_process_group()
