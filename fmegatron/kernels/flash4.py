"""Attention by flash-attn-4, the CuTe kernels for Hopper of Dao et al., where it is installed: `pip install
fmegatron[kernels]`.

Its time as a part of that of torch's kernels, forward and backward on an H200, bfloat16, heads of 128: causal 0.87 (4 × 4096
tokens, 16 heads), 0.92 (24 heads, 8 of keys), 0.86 (one sequence of 8192, 32 heads, 8 of keys); a window of 1024 0.54;
documents of 300 tokens 0.92; a soft cap, which torch's kernels lack, 0.37. Heads of 64: 1.16. A form (dtype, size of head,
mask, heads that share a key) is compiled when it is first met, in 5 to 15 s; its own
FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps the results for later runs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmegatron.errors import UserError
from fmegatron.kernels import is_hopper

KERNELS = ("auto", "torch", "triton", "flash4")
LENGTH = 512  # queries from which "auto" finds it worth being compiled
HEADS = (64, 96, 128, 256)  # sizes that were compared with float64; 4.0.0b36 has a wrong gradient of queries at 80
FASTER = 128  # the size of which "auto" knows that it is faster


def find() -> bool:
    """Is flash-attn-4 there? (Not flash-attn 2, which has the same modules. Imports neither.)"""
    try:
        importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return False
    found = importlib.util.find_spec("flash_attn")
    places = None if found is None else found.submodule_search_locations
    return any((Path(place) / "cute" / "interface.py").exists() for place in places or ())


INSTALLED = find()


def _on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and is_hopper(device.index)


def check(kernel: str, q: Tensor) -> None:
    """Raises UserError for an unknown `kernel` of attention, and for "flash4" where these queries[... head] cannot have
    it."""
    if kernel not in KERNELS:
        raise UserError(f'attention(kernel={kernel!r}): use "auto", "torch" or "flash4"')
    if kernel != "flash4":
        return
    on_hopper = q.device.type == "cuda" if torch.compiler.is_compiling() else _on_hopper(q.device)
    if not INSTALLED:
        why = "flash-attn-4 is not installed (pip install fmegatron[kernels])"
    elif not on_hopper:
        why = f"it is for Hopper GPUs (H100, H200), and q is on {q.device}"
    elif not _shaped(q):
        sizes = ", ".join(map(str, HEADS))
        why = f"q is {q.dtype} with heads of {q.shape[-1]}, not bfloat16 or float16 with heads of {sizes}"
    else:
        return
    raise UserError(f'attention(kernel="flash4"): {why}; use kernel="auto"')


def takes(kernel: str, q: Tensor, queries: int, keys: int, softcap: float | None) -> bool:
    """Is attention of queries[... head] in plain order, the last at the last key, with or without documents, a window or
    a soft cap, computed here? "auto": where it is faster. Not where torch must be deterministic."""
    if kernel not in ("auto", "flash4") or not (INSTALLED and _on_hopper(q.device) and _shaped(q)):
        return False
    if keys < queries or torch.are_deterministic_algorithms_enabled():
        return False
    return kernel == "flash4" or (queries >= LENGTH and (q.shape[-1] == FASTER or softcap is not None))


def _shaped(q: Tensor) -> bool:
    return q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] in HEADS


def _interface() -> Any:
    """The package's own functions. Raises UserError where it is there without what it needs."""
    try:
        return importlib.import_module("flash_attn.cute.interface")
    except ImportError as error:
        raise UserError(
            f"flash-attn-4 is installed and cannot be imported ({error}): pip install 'fmegatron[kernels]' brings the "
            'versions that go together; or leave it out with attention(kernel="torch"), which is --kernels torch of train'
        ) from error


def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(o, lse): q[batch seq heads head], lse[batch heads seq], fp32; of documents one behind another q[tokens heads
    head], lse[heads tokens].

    options, in its own words: causal, softmax_scale, softcap (None: without), window_size_left and -_right, cu_seqlens_q
    and -_k, max_seqlen_q and -_k.
    """
    o, lse, *_ = _interface()._flash_attn_fwd(*(t.detach() for t in (q, k, v)), return_lse=True, **options)
    return o, lse


def backward(
    go: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    into: Sequence[Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gq, gk, gv); shapes and options as of `forward`.

    into: where these are written, of any strides that are multiples of 16 bytes, but for the features of a head, which lie
        side by side.
    """
    softcap = options.pop("softcap", None) or 0.0
    if into is not None:
        options |= dict(zip(("dq", "dk", "dv"), into, strict=True))
    gq, gk, gv = _interface()._flash_attn_bwd(*(t.detach() for t in (q, k, v, o, go, lse)), softcap=softcap, **options)
    return gq, gk, gv
