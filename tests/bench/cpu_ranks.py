"""Training on two processes of a CPU (gloo) beside Megatron-core on the same two, in ratios of one run.

    python tests/bench/cpu_ranks.py [--mesh tp=2 dp=2] [--pairs 15] [--embed 256 --layers 4 --seq 256 --batch 4]

tp=2: tensor parallelism (Megatron has no sequence parallelism on a CPU: its norm refuses it). dp=2: replicas, whose gradients Megatron's
DistributedDataParallel sums in buckets, beside the backward. Both start from the same weights; the loss and the norm of the
gradients must agree before anything is timed. Timed are forward, backward and the sums of gradients, and the whole step
with clipping and AdamW; by the time of day, of the slower process, in turns whose order changes. Megatron's layers are
its own there, since Transformer Engine needs a GPU, as its Adam and its clipping do: torch's fused AdamW and its norms
stand for these; two places in which it asks for a GPU are patched (see `fmegatron.bench.peers_megatron`). Needs megatron-core (0.16.1 is the last for Python 3.11), and two free cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmegatron import optim, tree
from fmegatron.accumulate import accumulate
from fmegatron.bench import peers_megatron as peers
from fmegatron.bench.ours import ADAMW, CLIP, tokens_of
from fmegatron.bench.works import Work
from fmegatron.context import Ctx
from fmegatron.mesh import make_mesh
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.random import fold_in, key
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.spec import init
from fmegatron.step import TrainState, train_step
from fmegatron.testing.processes import processes
from tests.bench.cpu import interval

Run = Callable[[], tuple[Tensor, Any]]


# ----------------------------------------------------------------------------------------------------------------- ours


def ours(work: Work, axes: str, sp: bool, batch: dict[str, Tensor]) -> tuple[Run, Callable[[], Any]]:
    """(forward and backward -> loss, norm of the gradients; a whole step), of this rank."""
    mesh = make_mesh(axes)
    sh = Sharding(mesh, standard_rules(mesh, sequence_parallel=sp, zero=0))
    model = Decoder(work.config)
    spec = model.spec()
    params = init(spec, key(0), sh=sh)
    one = accumulate(model.loss, weights=model.weights, spec=spec)
    optimizer = optim.adamw(**ADAMW, mask=optim.decay_mask(spec), clip=CLIP)
    step = train_step(model.loss, optimizer, weights=model.weights, sh=sh, spec=spec, donate=True)
    state = [TrainState(0, params, optimizer.init(params), fold_in(key(0), "step"))]
    mine = {n: sh.shard(x, "batch seq") for n, x in batch.items()}

    def forward_backward() -> tuple[Tensor, Any]:
        (loss, _), grads = one(state[0].params, mine, Ctx(sh=sh))
        return loss, grads

    def whole() -> Any:
        state[0], metrics = step(state[0], mine)
        return metrics["loss"]

    return forward_backward, whole


# ------------------------------------------------------------------------------------------------------------- Megatron


def megatron(work: Work, axes: str, sp: bool, batch: dict[str, Tensor]) -> tuple[Run, Callable[[], Any]]:
    """The same of Megatron-core, inside `_without_gpu`."""
    name, ranks, rank = axes.split("=")[0], dist.get_world_size(), dist.get_rank()
    state = importlib.import_module("megatron.core.parallel_state")
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    tp = ranks if name == "tp" else 1
    state.initialize_model_parallel(tensor_model_parallel_size=tp)
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    c = work.config
    config = peers.transformer_config(work, "fp32", torch.float32, on_gpu=False)
    config = dataclasses.replace(config, tensor_model_parallel_size=tp, sequence_parallel=sp)
    model: Any = importlib.import_module("megatron.core.models.gpt").GPTModel(
        config,
        specs.get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=c.vocab,
        max_sequence_length=c.max_seq,
        position_embedding_type="rope",
        rotary_base=int(c.rope_base),
        share_embeddings_and_output_weights=c.tied,
        fp16_lm_cross_entropy=False,
    )
    weights = peers.weights_of(work, init(Decoder(c).spec(), key(0)), fused_norms=False)
    model.load_state_dict({n: peers.part_of(n, w, rank, tp) for n, w in weights.items()}, strict=False)
    model.train()
    distributed = importlib.import_module("megatron.core.distributed")
    options = distributed.DistributedDataParallelConfig(overlap_grad_reduce=name == "dp", bucket_size=40_000_000)
    model = distributed.DistributedDataParallel(config, options, model)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [[p for p in trained if (p.ndim > 1) == wide] for wide in (True, False)]
    adam = torch.optim.AdamW(
        [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}],
        **ADAMW,
        fused=True,
    )
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads").finalize_model_grads
    mine = batch if name == "tp" else {n: x.chunk(ranks)[rank] for n, x in batch.items()}
    positions = torch.arange(work.seq).expand(len(mine["tokens"]), -1)
    mask = torch.ones(1, 1, work.seq, work.seq, dtype=torch.bool).triu(1)

    def forward_backward() -> tuple[Tensor, Any]:
        model.zero_grad_buffer()
        loss = model(mine["tokens"], positions, mask, labels=mine["labels"]).float().mean()
        loss.backward()
        finalize([model])
        return loss.detach(), [p.main_grad for p in trained]

    def whole() -> Any:
        loss, grads = forward_backward()
        for p, g in zip(trained, grads, strict=True):
            p.grad = g
        counted = [p.grad for p in trained if tp == 1 or getattr(p, "tensor_model_parallel", False) or rank == 0]
        square = torch.stack(torch._foreach_norm(counted)).square().sum()
        if tp > 1:
            dist.all_reduce(square, group=state.get_model_parallel_group())
        torch._foreach_mul_([p.grad for p in trained], (CLIP / (square.sqrt() + 1e-6)).clamp(max=1.0))
        adam.step()
        for p in trained:
            p.grad = None
        return loss

    return forward_backward, whole


# -------------------------------------------------------------------------------------------------------------- timing


def rank_main(work: Work, axes: str, sp: bool, pairs: int) -> dict[str, Any]:
    """The times of one process: {"loss": (ours, peer), "times": {what: ([ours], [peer])}}."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    batch = tokens_of(work, 0, torch.device("cpu"))
    with peers._without_gpu():
        both = ours(work, axes, sp, batch), megatron(work, axes, sp, batch)
        losses = [float(run[0]()[0]) for run in both]
        if axes.startswith("dp"):  # Megatron's is that of this rank's rows
            peer = torch.tensor(losses[1])
            dist.all_reduce(peer)
            losses[1] = float(peer) / dist.get_world_size()
        norms = [_norm(run[0]()[1]) for run in both]
        times: dict[str, tuple[list[float], list[float]]] = {}
        for what in (0, 1):
            found: tuple[list[float], list[float]] = ([], [])
            for n in range(pairs + 2):
                for which in (0, 1) if n % 2 else (1, 0):
                    dist.barrier()
                    start = time.perf_counter()
                    both[which][what]()
                    if n >= 2:
                        found[which].append(time.perf_counter() - start)
            times[("forward, backward", "whole step")[what]] = found
    return {"losses": losses, "norms": norms, "times": times}


def _norm(grads: Any) -> float:
    """What this rank holds, summed over ranks: the same for both where leaves are cut alike."""
    some = [g.to_local() if hasattr(g, "to_local") else g for g in tree.leaves(grads) if g is not None]
    return float(sum(g.double().square().sum() for g in some)) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="+", default=["tp=2", "dp=2"])
    for name, value in {"pairs": 15, "embed": 256, "layers": 4, "heads": 8, "kv": 4, "mlp": 768, "vocab": 4096}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in {"seq": 256, "batch": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    config = DecoderConfig(
        vocab=a.vocab, embed=a.embed, layers=a.layers, heads=a.heads, kv_heads=a.kv, mlp=a.mlp, max_seq=a.seq
    )
    work = Work("cpu", config, a.batch, a.seq)
    for text in a.mesh:
        axes, _, sp = text.partition(" ")
        ranks = processes(math.prod(int(part.split("=")[1]) for part in axes.split(",")))
        found = ranks.run(rank_main, work, axes, bool(sp), a.pairs, timeout=1200)
        for row in found:
            assert math.isclose(*row["losses"], rel_tol=1e-4), row["losses"]
            assert math.isclose(*row["norms"], rel_tol=1e-3), row["norms"]
        for what in found[0]["times"]:
            slower = [[max(t) for t in zip(*(r["times"][what][w] for r in found), strict=True)] for w in (0, 1)]
            ratios = [x / y for x, y in zip(*slower, strict=True)]
            low, high = interval(ratios)
            mine, theirs = (1e3 * statistics.median(t) for t in slower)
            print(
                f"{text:8} {what:18} {mine:8.1f} ms, Megatron {theirs:8.1f} ms  ratio {statistics.median(ratios):.3f}"
                f"  95 % of the median: {low:.3f} to {high:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
