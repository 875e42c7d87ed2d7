"""Kernels for GPUs. In Triton, one pass each: what `fmegatron.primitives` runs instead of several torch operations.

    norm           RMS and layer norms, with the residual addition before them and the residual gradient behind
    gated          gated activations, and both their gradients
    rotary         queries and keys turned in one launch, in the product that made them and values or taken out of it
    softmax        the softmax and its gradient of the cross-entropy
    moe            choices of experts sorted, tokens as rows and rows summed, gated activations with the router's weight
    adam, squares  an update, and a norm, of all leaves in one launch

Each has its torch operations right beside in the primitive, which are what defines it; `kernel="auto" | "torch" |
"triton"` of the primitive chooses (of `moe`, in the module itself, before moe_triton). No kernel is imported before it
runs, so triton need not be installed. Of other packages, with the same rules, on Hopper GPUs:

    flash4         flash-attn-4, for attention
    quack          quack-kernels, for a gated MLP: products with the activation inside
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from fmegatron.errors import UserError
from fmegatron.function import under_torch_func
from fmegatron.simulation import is_local

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own mode for tests: kernels run on the CPU
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KERNELS = ("auto", "torch", "triton")


def is_hopper(index: int | None) -> bool:
    """Is this CUDA device a Hopper GPU?"""
    return _capability(index)[0] == 9


# What torch.compiler.assume_constant_result does; calling that imports the compiler, which takes a second.
is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def chosen(what: str, kernel: str, *tensors: torch.Tensor | None) -> bool:
    """Do Triton's kernels take this call of a primitive?

    kernel: "torch": never. "auto": on CUDA, where the tensors are of one dtype of `DTYPES` and triton is installed, in
        compiled code too (on an H200 a compiled step of 1.21B takes 222.4 ms with them, 225.4 with inductor's own).
        "triton": there, or an error.
    what: the primitive, for messages.

    Never under torch.func, in simulation, and in a run for shapes alone, whose tensors are no plain ones (they have no
    memory that a kernel could read): there the torch operations give the same. Raises UserError for an unknown `kernel`, and for "triton" where it cannot be.
    """
    if kernel == "torch" or (kernel == "auto" and not tensors[0].is_cuda):  # type: ignore[union-attr]
        return False  # (the first of the tensors is never None)
    if kernel not in KERNELS:
        raise UserError(f'{what}(kernel={kernel!r}): use "auto", "torch" or "triton"')
    given = [t for t in tensors if t is not None]
    dtype = given[0].dtype
    able = HAS_TRITON and dtype in DTYPES
    for t in given:
        able = able and t.dtype == dtype and (t.device.type == "cuda" or (INTERPRETED and kernel == "triton"))
    if kernel == "triton" and not able:
        why = (
            f"tensors of {', '.join(sorted({f'{t.dtype} on {t.device.type}' for t in given}))} are not all of one half "
            "or single precision on CUDA"
        )
        raise UserError(
            f'{what}(kernel="triton"): {why if HAS_TRITON else "triton is not installed"}; use kernel="auto"'
        )
    if not able or under_torch_func() or any(is_local(t) for t in given):
        return False
    return torch.compiler.is_compiling() or not any(type(t).__name__ == "FakeTensor" for t in given)
