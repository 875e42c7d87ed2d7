"""The two products around a gated activation with the activation in their epilogues, by quack-kernels (Dao et al.), where
it is installed: `pip install fmegatron[kernels]`.

On one H200, bfloat16, forward and backward of 16384 tokens through a gated MLP of 2048 × 8192: 7.44 ms, where
cuBLAS's products with Triton's activation between take 7.74. They take gate and up by turns, as the weight is stored
for them (see `fmegatron.primitives.gated_mlp`). The activated product, 256 MiB, is made again in backward in place of
being kept. One tile for all sizes: the fastest at this one of five that were tried. Compiled when first met, in two
seconds each.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from typing import Any

import torch
from torch import Tensor

from fmegatron.errors import UserError
from fmegatron.kernels import is_hopper

NAMES = {
    "silu": "swiglu",
    "gelu_tanh": "geglu",
}  # of what this library calls an activation, what that one calls it gated
# Tokens and widths from which it is taken. (Measured were models of 2048 and 3072 features with 16384 tokens: smaller sizes
# were compared with float64, not timed.)
ROWS, WIDTH = 4096, 1024


VERSION = "0.6.4"  # whose calls are known here, and which `fmegatron[kernels]` brings


def find() -> bool:
    """Is quack-kernels there? (Imports nothing.)"""
    try:
        return importlib.metadata.version("quack-kernels") == VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


INSTALLED = find()


def takes(x: Tensor, kind: str, hidden: int) -> bool:
    """Is a gated MLP of x[… embed] with `hidden` features computed here?"""
    if not (INSTALLED and kind in NAMES and x.is_cuda and x.dtype == torch.bfloat16):
        return False
    width = x.shape[-1]
    large = x.numel() // width >= ROWS and width >= WIDTH and hidden >= WIDTH
    return large and width % 8 == 0 and hidden % 8 == 0 and is_hopper(x.device.index)


@functools.cache
def _functions() -> tuple[Any, Any, Any]:
    try:
        interface = importlib.import_module("quack.gemm_interface")
    except ImportError as error:
        raise UserError(
            f"quack-kernels is installed and cannot be imported ({error}): pip install 'fmegatron[kernels]' brings the versions "
            'that go together; or leave it out with kernel="torch", which is --kernels torch of train'
        ) from error
    config = importlib.import_module("quack.gemm_config").GemmConfig(
        tile_m=128,
        tile_n=192,
        pingpong=True,
        cluster_m=2,
        cluster_n=1,
        is_dynamic_persistent=False,
        device_capacity=9,
    )
    return interface.gemm_gated, interface.gemm_dgated, config


def forward(x: Tensor, w: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(y, activation(gate) * up): y = x[rows embed] w[embed 2 hidden], in which gate and up take turns."""
    gated, _, config = _functions()
    return gated(x, w, activation=NAMES[kind], tuned=False, config=config)


def backward(g: Tensor, w: Tensor, y: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(gradient of y[rows 2 hidden], activation(gate) * up once more): g[rows embed], that of the activated product times
    w[hidden embed]."""
    _, dgated, config = _functions()
    return dgated(g, w.t(), y, activation=NAMES[kind], tuned=False, config=config)[:2]
