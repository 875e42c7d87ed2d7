"""Time and memory of one donated update on a GPU, by optimizer: python tests/bench/optim_speed.py

A model of matrices like a 1B decoder's, in bfloat16 with gradients in bfloat16.
"""

import time

import torch

from fmegatron.optim import adafactor, adamw, lion, muon, with_master, with_stochastic_rounding
from fmegatron.spec import Param

SHAPES = {"gate": (2048, 8192), "up": (2048, 8192), "down": (8192, 2048), "q": (2048, 2048), "o": (2048, 2048)}
LAYERS = 16


def main():
    spec = {f"{n}{i}": Param(s, "rows columns") for i in range(LAYERS) for n, s in SHAPES.items()}
    total = sum(p.numel for p in spec.values())
    makes = {
        "adamw": lambda: adamw(1e-4),
        "adamw, master": lambda: with_master(adamw(1e-4)),
        "adamw, stochastic": lambda: with_stochastic_rounding(adamw(1e-4), 0),
        "lion": lambda: lion(1e-4),
        "adafactor": lambda: adafactor(1e-4),
        "muon": lambda: muon(1e-4, spec=spec),
    }
    print(f"{total / 1e6:.0f} M parameters, {len(spec)} leaves, torch {torch.__version__}")
    for name, make in makes.items():
        optimizer = make()
        params = {n: torch.randn(p.shape, device="cuda", dtype=torch.bfloat16) for n, p in spec.items()}
        grads = {n: torch.randn_like(p) for n, p in params.items()}
        state = optimizer.init(params)
        for _ in range(2):
            params, grads, state = optimizer.update(params, grads, state, donate=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        for _ in range(5):
            params, grads, state = optimizer.update(params, grads, state, donate=True)
        torch.cuda.synchronize()
        spent = (time.perf_counter() - start) / 5
        more = (torch.cuda.max_memory_allocated() - before) / 2**20
        print(f"{name:20} {spent * 1e3:8.1f} ms  {more:8.0f} MiB of temporaries")
        del params, grads, state


if __name__ == "__main__":
    main()
