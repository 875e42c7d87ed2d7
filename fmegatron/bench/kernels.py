"""The time of one step by kinds of kernels, from torch.profiler."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

GEMM, ATTENTION, NORM, ACTIVATION = "GEMM", "attention", "norm", "activation"
LOSS, ROTARY, OPTIMIZER, COPIES, OTHER = "loss", "rotary", "optimizer and clipping", "copies and casts", "other"
KINDS = (GEMM, ATTENTION, NORM, ACTIVATION, LOSS, ROTARY, OPTIMIZER, COPIES, OTHER)

# The first that is found in a kernel's name counts. Compiled kernels are named after the operations fused into them.
RULES = (
    (ATTENTION, r"sdpa|flash|fmha|attention|fused_attn"),
    (GEMM, r"gemm|nvjet|splitk|cublas|scaled_mm|aten::(mm|bmm|addmm|baddbmm)\b|triton_tem_|mkldnn|gemv"),
    (OPTIMIZER, r"multi_tensor|adam|l2_?norm|lp_?norm|foreach|vector_norm|^_squares"),
    (LOSS, r"cross_entropy|softmax|nll_loss|logsumexp|loss"),
    (NORM, r"rms_?norm|layer_?norm|rsqrt|ln_(fwd|bwd)|^_norm_(forward|backward)"),
    (ACTIVATION, r"silu|swiglu|gelu|geglu|_glu|sigmoid|relu|tanh|gated|dact"),
    (ROTARY, r"rope|rotary"),
    (GEMM, r"cutlass|xmma|wgmma"),
    (COPIES, r"memcpy|memset|copy|cast|transpose|clone|fill|\bcat\b|catarray|quantize|amax|contiguous|zero_"),
)
_RULES = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in RULES)
# A compiled kernel that reads or writes another format names the cast beside what it computes.
_COMPILED = re.compile(r"^triton_(poi|red|per|for)_fused_(?P<operations>.*?)_?\d*$")
_MOVES = re.compile(
    r"_to_copy|clone|copy_|_unsafe_view|view|permute|transpose|slice|select|unsqueeze|squeeze|expand|cat|t|_"
)


@dataclass(frozen=True)
class Profile:
    """One step. kinds: {kind of kernel: milliseconds}; slowest: (milliseconds, calls, kind, name) of kernels;
    attention: names of the attention kernels."""

    kinds: dict[str, float]
    slowest: list[tuple[float, int, str, str]]
    attention: list[str]

    @property
    def total(self) -> float:
        """Milliseconds of all kernels."""
        return sum(self.kinds.values())


def kind_of(name: str) -> str:
    """Which of KINDS a kernel (on a CPU: an operation) is, by its name."""
    compiled = _COMPILED.match(name)
    if compiled is not None:
        operations = compiled["operations"]
        if not _MOVES.sub("", operations):
            return COPIES
        name = operations.replace("_to_copy", "").replace("clone", "")
        return next((kind for kind, rule in _RULES if kind != COPIES and rule.search(name)), OTHER)
    return next((kind for kind, rule in _RULES if rule.search(name)), OTHER)


def profiled(call: Callable[[], Any], device: torch.device, *, shown: int = 30) -> Profile:
    """The kernels of one call, after one that is not looked at."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    call()
    if on_gpu:
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    kinds = dict.fromkeys(KINDS, 0.0)
    slowest, attention = [], set()
    for event in found.key_averages():
        if event.device_type != wanted or getattr(event, "is_user_annotation", False):
            continue
        spent = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3
        if spent <= 0.0 or event.key.startswith(("ProfilerStep", "Optimizer.", "Torch-Compiled", "## ")):
            continue
        kind = kind_of(event.key)
        kinds[kind] += spent
        slowest.append((spent, event.count, kind, event.key))
        if kind == ATTENTION and (on_gpu or event.key.startswith("aten::")):
            attention.add(event.key)
    return Profile(kinds, sorted(slowest, reverse=True)[:shown], sorted(attention))
