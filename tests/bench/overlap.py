"""A pair of tensor-parallel products, forward and backward, cut into chunks or whole: "embed -> mlp" behind a gather of the
sequence, and "mlp -> embed" with its result scattered.

    python tests/bench/overlap.py [--ranks 2] [--delay 0.02]                  # gloo processes on this machine
    torchrun --nproc-per-node 2 tests/bench/overlap.py --device cuda          # GPUs

All numbers of chunks take turns in one process. Prints the median milliseconds of each on rank 0 and its ratio to the
whole. `--delay` adds seconds to every whole collective, and to a chunk's its share: a slower network, where processes
share the cores that would do the work of both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

from fmegatron import collectives
from fmegatron.mesh import make_mesh
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding

UP, DOWN = "batch seq* embed, embed mlp -> batch seq mlp", "batch seq mlp, mlp embed -> batch seq* embed"
SIZES = {
    "cuda": dict(batch=4, seq=4096, embed=8192, mlp=28672, repeats=20),
    "cpu": dict(batch=8, seq=256, embed=256, mlp=1024, repeats=7),
}


class Slow:
    """Collectives that end `delay` seconds later, a smaller one in proportion."""

    def __init__(self, delay: float, elements: int) -> None:
        self.delay, self.elements, self.ends = delay, elements, {}
        self.real = collectives.begin, collectives.end
        self.free = 0.0  # when the line is
        if delay:
            collectives.begin, collectives.end = self.begin, self.end

    def begin(self, kind: str, x: torch.Tensor, mesh, axes):
        whole = x.numel() * (mesh.size(axes) if kind == "all-gather" else 1)
        y = self.real[0](kind, x, mesh, axes)
        self.free = max(self.free, time.monotonic()) + self.delay * whole / self.elements
        self.ends[id(y)] = y, self.free
        return y

    def end(self, y: torch.Tensor) -> torch.Tensor:
        time.sleep(max(0.0, self.ends.pop(id(y))[1] - time.monotonic()))
        return self.real[1](y)


def measured(options: argparse.Namespace) -> dict[int, list[float]]:
    """{number of chunks: milliseconds of each run} on this rank."""
    cuda = options.device == "cuda"
    sh = Sharding(
        make_mesh(f"tp={dist.get_world_size()}", device=options.device),
        Rules({"batch": None, "seq": None, "seq*": "tp", "embed": None, "mlp": "tp"}),
    )
    ranks, dtype = dist.get_world_size(), torch.bfloat16 if cuda else torch.float32
    shapes = (
        (options.batch, options.seq // ranks, options.embed),
        (options.embed, options.mlp // ranks),
        (options.mlp // ranks, options.embed),
    )
    x, up, down = (torch.randn(s, dtype=dtype, device=sh.device).mul_(0.02).requires_grad_() for s in shapes)
    Slow(options.delay, options.batch * options.seq * options.embed)
    found: dict[int, list[float]] = {n: [] for n in options.chunks}
    for turn in range(options.repeats + 2):
        for n in options.chunks if turn % 2 else options.chunks[::-1]:
            dist.barrier()
            if cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            y = sh.dot(sh.dot(x, up, UP, overlap=n), down, DOWN, overlap=n)
            torch.autograd.grad(y, (x, up, down), y)
            if cuda:
                torch.cuda.synchronize()
            if turn > 1:
                found[n].append(1e3 * (time.perf_counter() - began))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=list(SIZES))
    parser.add_argument("--ranks", type=int, default=2, help="gloo processes to start, where torchrun has started none")
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--delay", type=float, default=0.0, help="seconds")
    for name in SIZES["cpu"]:
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args()
    for name, size in SIZES[options.device].items():
        setattr(options, name, getattr(options, name) or size)
    if "RANK" in os.environ:
        from fmegatron.launch import init_distributed

        init_distributed(options.device)
        found, first = measured(options), dist.get_rank() == 0
    else:
        from fmegatron.testing.processes import processes
        from tests.bench import overlap

        found, first = processes(options.ranks).run(overlap.measured, options, timeout=600)[0], True
    if first:
        whole = statistics.median(found[options.chunks[0]])
        for n, times in found.items():
            print(
                f"overlap={n}: {statistics.median(times):8.2f} ms, {statistics.median(times) / whole:.3f} of the first"
            )
    if "RANK" in os.environ:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
