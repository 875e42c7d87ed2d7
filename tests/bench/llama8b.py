"""An 8B Llama 3 trained whole on one GPU: tokens a second, beside published figures for eight H100s.

    python tests/bench/llama8b.py                                   # on an H200, about two minutes
    python tests/bench/llama8b.py --variants "bf16;fp8-tensorwise"  # some of them
    python tests/bench/llama8b.py --small                           # tiny sizes on a CPU, to see that it runs

A step is forward, backward, the norm of the gradients, clipping and AdamW. Parameters, gradients and moments are bfloat16,
beside a float32 copy of the parameters; or without the copy, and the update rounded by chance, since to nearest it would
be lost. In GiB, of 8.03 × 10⁹ parameters:

    parameters 15.0, gradients 15.0, moments 29.9                                              60
    float32 copy                                                                               30
    with several microbatches: the sum of their gradients                                      15
    kept for the backward of 8192 tokens, 2 bytes a number, in 32 layers:
        everything, about 70 thousand numbers a token                                          34
        the products (and the layer's input), 47 thousand                                      23
    logits of 128,256 words, kept for the backward                                              2

so that one sequence fits into 139 GiB with the copy where products are kept and the rest, norms and activations, is
computed again (115), and four microbatches without the copy where everything is (111). A variant that finds no room is
tried again with less kept. The published figures are of eight H100s (tokens a second and GPU), with a batch of 128 sequences over many
microbatches, a distributed optimizer with float32 moments, and whatever parallelism was best there:
10,153 in bfloat16 (NVIDIA's dgxc-benchmarking, NeMo 24.09), 14,451 in fp8 (Megatron Bridge 25.11). Here one GPU with more
memory talks to nobody, and pays its whole optimizer by itself after 1 or 4 sequences.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fmegatron import tree
from fmegatron.bench.works import Work, flops
from fmegatron.fp8 import Fp8, scaling
from fmegatron.graphs import recorded
from fmegatron.models import PRESETS, Decoder, DecoderConfig
from fmegatron.optim import adamw, decay_mask, with_master, with_stochastic_rounding
from fmegatron.precision import Precision
from fmegatron.random import fold_in, key, randint
from fmegatron.remat import everything, names
from fmegatron.sharding import Sharding
from fmegatron.spec import count, init
from fmegatron.step import TrainState, train_step

PUBLISHED = {"bf16": 10_153.0, "fp8": 14_451.0}  # tokens a second on one of eight H100s
KEPT = {  # what layers keep, in the order in which it is tried
    "everything": everything,
    "products": names("attention", "q", "k", "v", "o", "gate", "up"),
    "attention": names("attention"),
}
SMALL = DecoderConfig(vocab=512, embed=128, layers=2, heads=4, kv_heads=2, mlp=256, max_seq=128)
GiB = 2**30


@dataclass(frozen=True)
class Variant:
    """One way to make the step. recipe: of fp8; None: bfloat16. master: with a float32 copy of the parameters. kept: of
    KEPT, the first that is tried."""

    recipe: str | None
    microbatches: int = 1
    master: bool = True
    kept: str = "products"
    recorded: bool = True


VARIANTS = {
    "bf16": Variant(None),
    "fp8-tensorwise": Variant("tensorwise"),
    "bf16, 4 microbatches": Variant(None, 4, master=False, kept="everything"),
    "fp8-tensorwise, 4 microbatches": Variant("tensorwise", 4, master=False, kept="everything"),
    "fp8-rowwise": Variant("rowwise"),
    "bf16, by chance": Variant(None, master=False, kept="everything"),
    "fp8-delayed": Variant("delayed"),
    "bf16, not recorded": Variant(None, recorded=False),
}
DEFAULT = list(VARIANTS)[:4]


def made(config: DecoderConfig, variant: Variant, save: Any, params: Any, *, compile: bool) -> tuple[Any, TrainState]:
    """(step, its first state)."""
    fp8 = None if variant.recipe is None else Fp8(variant.recipe)  # type: ignore[arg-type]
    sh = Sharding(precision=Precision(params=torch.bfloat16, reduce=torch.bfloat16, fp8=fp8))
    model = Decoder(config, save=save, compile=compile)
    spec = model.spec()
    options: dict[str, Any] = {"microbatches": variant.microbatches, "donate": True, "check_finite": False}
    plain = adamw(1e-4, mask=decay_mask(spec), moments=torch.bfloat16, clip=1.0)
    optimizer = with_master(plain) if variant.master else with_stochastic_rounding(plain, 0)
    step = train_step(model.loss, optimizer, weights=model.weights, sh=sh, spec=spec, **options)
    extras = scaling.init(fp8, spec, device=tree.leaves(params)[0].device)
    state = TrainState(0, params, optimizer.init(params), key(1), extras)
    return (recorded(step) if variant.recorded else step), state


def batch(config: DecoderConfig, rows: int, device: str) -> dict[str, torch.Tensor]:
    """Uniform tokens, each one's label the next."""
    ids = randint(fold_in(key(0), "tokens"), (rows, config.max_seq + 1), 0, config.vocab).to(device)
    return {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def measured(step: Any, state: TrainState, data: Any, *, repeats: int, gpu: bool) -> tuple[TrainState, dict[str, Any]]:
    """Steps one after the other, each waited for: (the last state, milliseconds of each, seconds of the first, losses)."""
    losses, samples, first = [], [], 0.0
    warm = 4  # compiled, run, recorded, played
    for n in range(warm + repeats):
        if n == warm and gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        state, metrics = step(state, data)
        if gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        first = seconds if n == 0 else first
        if n >= warm:
            samples.append(1e3 * seconds)
        losses.append(float(metrics["loss"]))
    return state, {"ms": samples, "first_s": first, "loss": losses, "grad_norm": float(metrics["grad_norm"])}


def tried(name: str, config: DecoderConfig, params: Any, a: argparse.Namespace) -> tuple[Any, Any]:
    """(the parameters after it, what was measured; None where it failed)."""
    variant, gpu = VARIANTS[name], not a.small
    repeats = max(2, a.repeats // variant.microbatches)
    data = batch(config, variant.microbatches, "cuda" if gpu else "cpu")
    for kept, save in list(KEPT.items())[list(KEPT).index(variant.kept) :]:
        step = state = None
        free(gpu)
        try:
            step, state = made(config, variant, save, params, compile=gpu)
            state, found = measured(step, state, data, repeats=repeats, gpu=gpu)
        except Exception as error:
            traceback.print_exc(limit=-4)
            if "out of memory" not in str(error).lower():
                return params, None
            print(f"{name}: no room with {kept} kept", flush=True)
            error.__traceback__ = None  # it holds what the step had allocated
            continue
        work = Work(name, config, variant.microbatches, config.max_seq)
        ms = statistics.median(found["ms"])
        rate = 1e3 * work.tokens / ms
        beside = PUBLISHED["bf16" if variant.recipe is None else "fp8"]
        peaks = (torch.cuda.max_memory_allocated() / GiB, torch.cuda.max_memory_reserved() / GiB) if gpu else (0.0, 0.0)
        tera = flops(config, work.batch, work.seq) / ms / 1e9
        found |= {"tokens": work.tokens, "tokens_per_s": rate, "published": beside, "ratio": rate / beside}
        found |= {"tflops": tera, "kept": kept, "allocated_gib": peaks[0], "reserved_gib": peaks[1]}
        print(
            f"{name:32} {ms:8.1f} ms  {rate:8,.0f} tokens/s  {rate / beside:.3f} of {beside:,.0f}  {tera:4.0f} TF  "
            f"{peaks[0]:.1f} GiB ({peaks[1]:.1f} reserved)  keeps {kept}; loss {found['loss'][0]:.4f} -> "
            f"{found['loss'][-1]:.4f}, first {found['first_s']:.1f} s",
            flush=True,
        )
        return state.params, found
    return params, None


def free(gpu: bool) -> None:
    """Memory of the variant before."""
    torch._dynamo.reset()
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default=";".join(DEFAULT), help=f"behind semicolons: {'; '.join(VARIANTS)}")
    parser.add_argument("--repeats", type=int, default=8, help="timed steps of each; fewer with microbatches")
    parser.add_argument("--small", action="store_true", help="tiny sizes on a CPU, without torch.compile")
    parser.add_argument("--out", type=Path, help="JSON, written behind every variant")
    a = parser.parse_args()
    config, device = (SMALL, "cpu") if a.small else (PRESETS["llama3-8b"], "cuda")
    chosen = [name.strip() for name in a.variants.split(";") if name.strip()]
    if unknown := [name for name in chosen if name not in VARIANTS]:
        parser.error(f"no variant {unknown[0]!r}")
    spec = Decoder(config).spec()
    where = "CPU, fp8 emulated" if a.small else torch.cuda.get_device_name()
    print(
        f"torch {torch.__version__}, {where}; {count(spec) / 1e9:.2f} × 10⁹ parameters, sequences of {config.max_seq}"
    )
    began = time.perf_counter()
    params = init(spec, key(0), sh=Sharding(precision=Precision(params=torch.bfloat16)), device=device)
    if not a.small:
        torch.cuda.synchronize()
        print(f"parameters made in {time.perf_counter() - began:.1f} s, {torch.cuda.memory_allocated() / GiB:.1f} GiB")
    found = {}
    for name in chosen:
        params, found[name] = tried(name, config, params, a)
        if a.out:
            a.out.write_text(json.dumps({"where": where, "torch": torch.__version__, "variants": found}, indent=1))
    print(f"took {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
