"""Megatron-core on several ranks, beside which `scaling.py` measures: tensor parallelism with SP, or data parallelism with its
distributed optimizer. On a GPU with Transformer Engine's layers; on a CPU as `cpu_ranks.py` has it, to see that it runs."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmegatron.bench import peers_megatron as peers
from fmegatron.bench.ours import tokens_of
from fmegatron.bench.works import Work
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.sharding import Sharding
from fmegatron.spec import init
from fmegatron.testing.layout import Layout
from tests.bench.scaling_items import Item
from tests.bench.scaling_rank import Contender


@contextlib.contextmanager
def contender(item: Item, config: DecoderConfig, device: torch.device) -> Iterator[Contender]:
    """Its steps, while the body runs. Raises UserError where it is not installed."""
    gpu = device.type == "cuda"
    work = Work(item.name, config, item.rows, item.seq)
    peers.check(work, "bf16" if gpu else "fp32", device)
    warnings.simplefilter("ignore")
    state = importlib.import_module("megatron.core.parallel_state")
    guard = contextlib.nullcontext if gpu else peers._without_gpu
    with guard():
        try:
            yield _on_gpus(item, work, device) if gpu else _on_cpus(item, work, device)
        finally:
            if state.model_parallel_is_initialized():
                state.destroy_model_parallel()


def _on_cpus(item: Item, work: Work, device: torch.device) -> Contender:
    from tests.bench.cpu_ranks import megatron

    axes = item.layout.split()[0]
    backward, whole = megatron(work, axes, False, tokens_of(work, 0, device))  # it has no SP on a CPU
    return Contender(
        lambda: backward()[0], lambda: whole().detach(), notes="its own layers", mean=axes.startswith("dp")
    )


def _on_gpus(item: Item, work: Work, device: torch.device) -> Contender:
    layout, rank = Layout.parse(item.layout), dist.get_rank()
    tp, data = layout.size("tp"), layout.size("dp")
    state = importlib.import_module("megatron.core.parallel_state")
    state.initialize_model_parallel(tensor_model_parallel_size=tp)
    importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(0)
    precision = Precision(params=torch.bfloat16, reduce=torch.bfloat16)
    params = init(Decoder(work.config).spec(), key(0), sh=Sharding(precision=precision), device=device)
    options = f"tensor_model_parallel_size={tp},sequence_parallel={'true' if layout.sp else 'false'}"
    bare = peers.model_of(work, "bf16", params, device, options=options, part=(rank % tp, tp))
    del params
    distributed = importlib.import_module("megatron.core.distributed")
    split = data > 1
    ddp = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=False, overlap_grad_reduce=split, use_distributed_optimizer=split
    )
    model = distributed.DistributedDataParallel(bare.config, ddp, bare)  # type: ignore[attr-defined]
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads").finalize_model_grads
    trained: list[Any] = [p for p in model.parameters() if p.requires_grad]
    batch = {n: x.chunk(data)[rank // tp] for n, x in tokens_of(work, 0, device).items()}
    positions = torch.arange(work.seq, device=device).expand(len(batch["tokens"]), -1)
    update: list[Any] = []

    def backward() -> Tensor:
        model.zero_grad_buffer()
        loss = model(batch["tokens"], positions, None, labels=batch["labels"]).float().mean()
        loss.backward()
        finalize([model])
        return loss.detach()

    def prepare() -> None:
        update.append(
            peers.megatron_optimizer(model, torch.bfloat16, use_distributed_optimizer=True)
            if split
            else peers._Update(model, trained, device, optimizer="fused")
        )
        if not split:
            update[0].prepare()

    def step() -> Tensor:
        loss = backward()
        if split:
            update[0].step()
        else:
            for p in trained:
                p.grad = p.main_grad  # of the parameter's dtype; the update drops it
            update[0]()
        return loss

    kind = "distributed optimizer, float32 copies" if split else "Transformer Engine's FusedAdam"
    notes = f"{peers._versions(device)}; gradients in bf16; {kind}"
    return Contender(backward, step, prepare, notes, mean=split)
