"""What one process of `scaling.py` does: the items of a job, one behind the other. The first process writes what was found."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmegatron import optim
from fmegatron.accumulate import accumulate
from fmegatron.bench.exposed import Communication, traced
from fmegatron.bench.ours import ADAMW, CLIP, tokens_of
from fmegatron.bench.timing import waiter
from fmegatron.bench.works import Work
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.launch import close_distributed, init_distributed
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.padding import shard_batch
from fmegatron.parallel.context import context_attention
from fmegatron.precision import Precision
from fmegatron.random import fold_in, key
from fmegatron.sharding import Sharding
from fmegatron.spec import init
from fmegatron.step import TrainState, train_step
from fmegatron.testing.layout import Layout
from fmegatron.testing.program import Program
from fmegatron.zero import with_sharded_state
from tests.bench.scaling_items import LARGE, SMALL, Item, Sizes


@dataclass
class Rank:
    """This process among the others."""

    device: torch.device
    sizes: Sizes
    out: Path

    @property
    def precision(self) -> Precision:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return Precision(params=dtype, reduce=dtype)

    def meet(self) -> None:
        """Waits for the device and then for all processes (over gloo, beside NCCL's groups)."""
        waiter(self.device)()
        dist.all_reduce(torch.zeros(1))

    def gather(self, x: Any) -> list[Any]:
        """x of every process."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, x)
        return found

    def first_says(self, x: bool) -> bool:
        """What the first process says, on all."""
        answer = torch.tensor([float(x)])
        dist.broadcast(answer, 0)
        return bool(answer.item())

    def tell(self, **line: Any) -> None:
        """A line of the file of results."""
        if dist.get_rank() == 0:
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def config(self, item: Item) -> DecoderConfig:
        chosen = self.sizes.dense if item.model == "dense" else self.sizes.experts
        return dataclasses.replace(chosen, max_seq=item.seq)


def main(job: dict[str, Any]) -> None:
    """Works through a job, as `scaling.py` writes it."""
    items = [Item(**fields) for fields in job["items"]]
    if job["device"] == "cpu":
        torch.set_num_threads(1)
    device = init_distributed(job["device"], timeout=120.0)
    if device.type == "cuda" and any(i.kind == "megatron" for i in items):
        # behind the choice of this process's GPU; before torch first uses cuDNN, of which it brings another frontend
        with contextlib.suppress(Exception):  # then its items are left out
            import transformer_engine.pytorch  # noqa: F401
    rank = Rank(device, SMALL if job["small"] else LARGE, Path(job["out"]))
    rank.tell(about=_about(device))
    work(items, rank, job["until"])
    rank.meet()
    close_distributed()


def work(items: Sequence[Item], rank: Rank, until: float) -> None:
    """The items in turn; none begins behind a time. A failure other than a UserError is raised: the processes may be out of
    step then."""
    for item in items:
        if not rank.first_says(time.time() < until):
            rank.tell(skipped=item.key)
            continue
        rank.tell(begun=item.key)
        start = time.perf_counter()
        try:
            row = MEASURES[item.kind](item, rank)
        except UserError as error:  # the same on all ranks: a peer that is not installed, a layout that is not legal
            row = {"failed": str(error)}
        rank.tell(row={**dataclasses.asdict(item), **row, "seconds": time.perf_counter() - start}, key=item.key)
        gc.collect()
        if rank.device.type == "cuda":
            torch.cuda.empty_cache()


def _about(device: torch.device) -> dict[str, str]:
    found = {"torch": str(torch.__version__), "device": "CPU, gloo"}
    if device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call, unused-ignore]
        found |= {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda), "nccl": nccl}
    return found


# ----------------------------------------------------------------------------------------------------------- correctness


def check(item: Item, rank: Rank) -> dict[str, Any]:
    """Does the layout compute what one device computes?"""
    from fmegatron.testing.equivalence import compare
    from fmegatron.testing.models import find_model

    optimizer = ("adamw", "sgd")[sum(map(ord, item.layout)) % 2]
    found = compare(
        find_model(item.model),
        item.layout,
        engine="processes",
        dtype=item.dtype,
        device=rank.device.type,
        checks=("init", "gradients", optimizer),
    )
    worst = found.worst
    everyone = rank.gather((found.ok, worst.share, worst.error, f"{worst.what} {worst.leaf}", str(found)))
    ok, share, error, leaf, message = min(everyone, key=lambda x: (x[0], -x[1]))
    return {"ok": ok, "share": share, "error": error, "leaf": leaf, **({} if ok else {"message": message})}


# ----------------------------------------------------------------------------------------------------------------- speed


@dataclass
class Contender:
    """What is timed. gradients: forward and backward -> loss; step: a whole step -> loss, or None. prepare: before the first
    step. notes: what a reader should know."""

    gradients: Callable[[], Tensor]
    step: Callable[[], Tensor] | None
    prepare: Callable[[], None] = lambda: None
    notes: str = ""
    mean: bool = False  # is the loss of this rank's rows alone?


def train(item: Item, rank: Rank) -> dict[str, Any]:
    """Steps of a model of this library."""
    return _timed(item, rank, _ours(item, rank))


def _ours(item: Item, rank: Rank) -> Contender:
    layout, precision = Layout.parse(item.layout), rank.precision
    program = Program(Decoder(rank.config(item))).on(layout)
    model: Any = program.model
    spec, pipe, sh = model.spec(), None, Sharding(precision=precision)
    if not item.alone:
        mesh = program.mesh(layout, device=rank.device.type)
        sh = program.sharding(layout, precision, mesh=mesh)
        if layout.pipelined:
            pipe = program.pipeline(layout, spec, mesh)
            spec = pipe.spec
    work = Work(item.name, rank.config(item), item.rows, item.seq)
    batch = shard_batch(tokens_of(work, 0, rank.device), sh)
    params = init(spec, key(0), sh=sh, device=rank.device)
    optimizer = optim.adamw(**ADAMW, mask=optim.decay_mask(spec), clip=CLIP)
    optimizer = optim.with_master(optimizer) if precision.params.itemsize < 4 else optimizer
    optimizer = with_sharded_state(optimizer, spec, sh)
    gradients: Any = pipe or accumulate(model.loss, layout.micro, weights=model.weights, spec=spec)
    options: dict[str, Any] = {"microbatches": layout.micro, "spec": spec, "donate": True, "check_finite": False}
    step = train_step(model.loss, optimizer, weights=model.weights, sh=sh, gradients=pipe, **options)
    state: list[TrainState] = []

    def backward() -> Tensor:
        (loss, _), _ = gradients(state[0].params if state else params, batch, Ctx(sh=sh))
        return loss

    def prepare() -> None:
        nonlocal params
        state.append(TrainState(0, params, optimizer.init(params), fold_in(key(0), "step")))
        params = None

    def whole() -> Tensor:
        state[0], metrics = step(state[0], batch)
        return metrics["loss"]

    return Contender(backward, whole if item.whole else None, prepare)


def megatron(item: Item, rank: Rank) -> dict[str, Any]:
    """Steps of Megatron-core."""
    from tests.bench import scaling_megatron

    with scaling_megatron.contender(item, rank.config(item), rank.device) as made:
        return _timed(item, rank, made)


def attention(item: Item, rank: Rank) -> dict[str, Any]:
    """Attention alone, forward and backward."""
    layout, config = Layout.parse(item.layout), rank.config(item)
    program, sh = Program(Decoder(config)), Sharding(precision=rank.precision)
    if not item.alone:
        sh = program.sharding(layout, rank.precision, mesh=program.mesh(layout, device=rank.device.type))
    tokens = item.seq // layout.size("cp")
    heads = (config.kv_heads, config.heads // config.kv_heads, config.head)
    dtype = rank.precision.params

    def random(*shape: int) -> Tensor:
        return torch.randn(item.rows, tokens, *shape, device=rank.device, dtype=dtype)

    q, k, v = (x.requires_grad_() for x in (random(*heads), *(random(heads[0], heads[2]) for _ in range(2))))
    g = random(*heads)

    def backward() -> Tensor:
        o = context_attention(q, k, v, sh=sh, kind=layout.context)
        torch.autograd.grad(o, (q, k, v), g)
        return o.detach().float().square().mean()

    return _timed(item, rank, Contender(backward, None))


MEASURES: dict[str, Callable[[Item, Rank], dict[str, Any]]] = {
    "check": check,
    "train": train,
    "attention": attention,
    "megatron": megatron,
}


def _timed(item: Item, rank: Rank, made: Contender) -> dict[str, Any]:
    """Milliseconds of each round, of the slowest process; the communication of one more; the most memory of any process.

    Whole steps come first: what is compiled or tuned at first use has been so by then for both."""
    gpu = rank.device.type == "cuda"
    loss = float(made.gradients())
    losses = rank.gather(loss)
    loss = math.fsum(losses) / len(losses) if made.mean else loss
    if not math.isfinite(loss):
        raise RuntimeError(f"{item.name}: the loss is {loss}")
    row: dict[str, Any] = {"loss": loss, "notes": made.notes}
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    if made.step is not None:
        made.prepare()
        row["step"] = _samples(rank, made.step)
    row["backward"] = _samples(rank, made.gradients)
    if gpu:
        row["bytes"] = max(rank.gather(torch.cuda.max_memory_allocated()))
    rank.meet()
    seen = rank.gather(traced(made.step or made.gradients, rank.device))
    if all(isinstance(c, Communication) for c in seen):
        row["communication"] = [dataclasses.asdict(c) for c in seen]
    return row


def _samples(rank: Rank, call: Callable[[], Any]) -> list[float]:
    found = []
    for n in range(rank.sizes.warmup + rank.sizes.rounds):
        rank.meet()
        start = time.perf_counter()
        call()
        waiter(rank.device)()
        if n >= rank.sizes.warmup:
            found.append(1e3 * (time.perf_counter() - start))
    return [max(times) for times in zip(*rank.gather(found), strict=True)]
