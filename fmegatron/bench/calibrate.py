"""Measures this machine for `fmegatron plan`: kernels alone, never steps of a model.

    machine = calibrate(torch.device("cuda"))          # half a minute on a GPU
    save(machine, "my-machine.toml")                   # fmegatron plan --gpu my-machine.toml

Matrix products of some sizes in each dtype (from which the saturating form is fitted), attention forward and backward, plain passes
and norms bound by memory, and an empty kernel. On a GPU each is played from a recording, without a host between its calls, and long
enough for the clocks to fall to those that the GPU's power allows: in a training step products run at these, some percent below those
of a short burst. Collectives between several GPUs are not measured: their numbers are those of the table, where it knows the device.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fmegatron.plan.hardware import GB, GIB, TABLE, Hardware, Reach, hardware
from fmegatron.plan.tracing import Product
from fmegatron.primitives import attention, rms_norm

# (m, n, k) of products like those of models: forward, by input, by weight; wide and narrow
SHAPES = (
    (16384, 2048, 2048),
    (16384, 8192, 2048),
    (16384, 2048, 8192),
    (2048, 8192, 16384),
    (8192, 3072, 3072),
    (8192, 1024, 4096),
    (16384, 768, 768),
    (768, 3072, 16384),
    (4096, 4096, 4096),
    (8192, 32768, 2048),
    (1024, 4096, 1024),
)
SUSTAINED = 0.25  # seconds that a kernel is played for
SMALL = ((512, 256, 256), (256, 512, 128), (512, 64, 256), (128, 256, 512))


def calibrate(device: torch.device, *, small: bool | None = None) -> Hardware:
    """What this device reaches. small: tiny sizes; None: on a CPU."""
    small = device.type != "cuda" if small is None else small
    timer = _Timer(device)
    timer.warm()
    base = _known(device)
    launch = timer.launch()
    bandwidth = timer.passes(small)
    streamed = timer.norms(small) / bandwidth
    dtypes = ["bf16", "fp8"] if device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 9) else ["bf16"]
    dtypes += ["fp32"] if device.type != "cuda" else []
    reach, peaks = {}, dict(base.peaks)
    for dtype in dtypes:
        found = [(shape, timer.product(shape, dtype)) for shape in (SMALL if small else SHAPES)]
        if device.type != "cuda":
            peaks[dtype] = max(2.0 * math.prod(s) / t for s, t in found)
        machine = dataclasses.replace(
            base, peaks=peaks, bandwidth=bandwidth, streamed=min(1.0, streamed), launch=launch
        )
        reach[dtype] = fitted(found, dtype, machine)
    wide, odd = ((256, n, 256) if small else (8192, n, 2048) for n in ((256, 257) if small else (32768, 32769)))
    unaligned = min(1.0, timer.product(wide, "bf16") / timer.product(odd, "bf16"))
    (forward, half), (backward, _) = (timer.attention(small, backward=b) for b in (False, True))
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else base.memory
    return dataclasses.replace(
        base,
        name=_name(device),
        peaks=peaks,
        reach={**base.reach, **reach},
        bandwidth=bandwidth,
        streamed=min(1.0, streamed),
        copied=1.0,  # the bandwidth is that of plain passes
        unaligned=unaligned,
        launch=launch,
        attention=forward,
        attention_backward=backward,
        attention_half=half,
        memory=float(memory),
        source=f"measured here by kernels alone ({_name(device)}, torch {torch.__version__}); links between GPUs as in the table",
    )


def fitted(found: Sequence[tuple[tuple[int, int, int], float]], dtype: str, machine: Hardware) -> Reach:
    """The saturating form that is nearest to measured seconds, in the logarithm, by looking about on a grid ever finer."""

    def error(reach: Reach) -> float:
        tried = dataclasses.replace(machine, reach={dtype: reach})
        return sum(math.log(tried.product(Product(*s, 1, dtype)) / t) ** 2 for s, t in found)

    steps = (0.5, 0.8, 0.95, 0.99, 1.01, 1.05, 1.25, 2.0)

    def descended(best: Reach) -> Reach:
        least = error(best)
        for _ in range(60):
            before = best
            for name, step in itertools.product(("most", "by_m", "by_n", "by_k"), steps):
                value = min(max(getattr(best, name) * step, 0.01), 1.0 if name == "most" else 4096.0)
                tried = dataclasses.replace(best, **{name: value})
                if (now := error(tried)) < least - 1e-9:
                    best, least = tried, now
            if best == before:
                break
        return best

    starts = itertools.product((0.7, 0.95), ((64.0, 64.0, 128.0), (300.0, 20.0, 300.0), (20.0, 300.0, 300.0)))
    return min((descended(Reach(most, *by)) for most, by in starts), key=error)


class _Timer:
    """Seconds of calls on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gpu = device.type == "cuda"

    def warm(self) -> None:
        """Runs products until the clocks are those of steady work, below those of a GPU that was idle."""
        x = torch.randn(8192 if self.gpu else 64, 8192 if self.gpu else 64, device=self.device).bfloat16()
        until = time.perf_counter() + (2.0 if self.gpu else 0.0)
        while time.perf_counter() < until:
            for _ in range(20):
                x @ x
            self.wait()

    def seconds(self, call: Callable[[], Any], times: int = 3, *, record: bool = True) -> float:
        """The median over some rounds of so many calls each."""
        call()
        if self.gpu:
            play = self.recorded(call, times) if record else lambda: [call() for _ in range(times)]
            return self.sustained(play, SUSTAINED) / times
        found = []
        for _ in range(3):
            start = time.perf_counter()
            for _ in range(times):
                call()
            found.append((time.perf_counter() - start) / times)
        return statistics.median(found)

    def recorded(self, call: Callable[[], Any], times: int) -> Callable[[], None]:
        """So many calls as one CUDA graph."""
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            call()
        torch.cuda.current_stream(self.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                call()
        return graph.replay

    def sustained(self, play: Callable[[], Any], span: float) -> float:
        """The median time of plays, back to back, in the second half of a span of seconds."""
        found: list[float] = []
        begin = time.perf_counter()
        while len(found) < 6 or time.perf_counter() - begin < span:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
            for mark in marks:
                mark.record()
                play()
            last = torch.cuda.Event(enable_timing=True)
            last.record()
            self.wait()
            found += [1e-3 * a.elapsed_time(b) for a, b in itertools.pairwise([*marks, last])]
        return statistics.median(found[len(found) // 2 :])

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def launch(self) -> float:
        """Of a kernel that does nothing much, among others in a recorded graph."""
        x = torch.zeros(256, device=self.device)
        return self.seconds(lambda: x.add_(1), times=200)

    def passes(self, small: bool) -> float:
        """Bytes/s of a plain pass over a large array, read and written. (Not of a copy, which a GPU may give to its copy engines.)"""
        n = 1 << 20 if small else 1 << 27
        x, y = (torch.zeros(n, device=self.device) for _ in range(2))
        return 2 * x.nbytes / self.seconds(lambda: torch.add(x, 1.0, out=y))

    def norms(self, small: bool) -> float:
        """Bytes/s of an RMS norm."""
        shape = (256, 256) if small else (16384, 4096)
        x = torch.randn(shape, device=self.device, dtype=torch.bfloat16)
        w = torch.ones(shape[-1], device=self.device, dtype=torch.bfloat16)
        with torch.no_grad():
            return 2 * x.numel() * 2 / self.seconds(lambda: rms_norm(x, w))

    def product(self, shape: tuple[int, int, int], dtype: str) -> float:
        """Of a matrix product."""
        m, n, k = shape
        if dtype == "fp8":
            a, b = (
                torch.randn(s, device=self.device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
                for s in ((m, k), (n, k))
            )
            one = torch.ones((), device=self.device)
            return self.seconds(lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
        half = torch.bfloat16 if dtype == "bf16" else torch.float32
        x, y = (torch.randn(s, device=self.device, dtype=half) for s in ((m, k), (k, n)))
        return self.seconds(lambda: x @ y)

    def attention(self, small: bool, *, backward: bool) -> tuple[float, float]:
        """(FLOP/s over long sequences, queries at which half of it is reached) of causal attention with heads of 128."""
        found = []
        for rows, length, heads in (
            ((2, 128, 2), (1, 256, 2)) if small else ((16, 1024, 16), (4, 4096, 16), (2, 8192, 16))
        ):
            shape = (rows, length, heads, 1, 128)
            q = torch.randn(shape, device=self.device, dtype=torch.bfloat16, requires_grad=backward)
            k, v = (
                torch.randn(
                    (rows, length, heads, 128), device=self.device, dtype=torch.bfloat16, requires_grad=backward
                )
                for _ in range(2)
            )
            flops = 4.0 * rows * heads * length * length / 2 * 128
            if backward:
                o, g = attention(q, k, v), torch.randn(shape, device=self.device, dtype=torch.bfloat16)
                t = self.seconds(lambda: torch.autograd.grad(o, (q, k, v), g, retain_graph=True), record=False)  # noqa: B023
                flops *= 2.5
            else:
                with torch.no_grad():
                    t = self.seconds(lambda: attention(q, k, v))  # noqa: B023
            found.append((length, flops / t))
        return _saturating(found)


def _saturating(found: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(most, half) of rate = most · x / (x + half), a line in 1 / rate over 1 / x."""
    points = [(1 / x, 1 / rate) for x, rate in found]
    mean = [sum(p[i] for p in points) / len(points) for i in (0, 1)]
    spread = sum((x - mean[0]) ** 2 for x, _ in points)
    slope = sum((x - mean[0]) * (y - mean[1]) for x, y in points) / spread
    first = max(mean[1] - slope * mean[0], 0.2 * mean[1])
    return 1 / first, max(0.0, slope / first)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _known(device: torch.device) -> Hardware:
    """What the table says of this device, for what is not measured."""
    name = _name(device).lower()
    for part in ("gb200", "b200", "h200", "h100-pcie", "h100", "a100", "l40s"):
        if all(word in name for word in part.split("-")):
            return hardware(part)
    if device.type == "cuda":
        return TABLE["h100-sxm"]
    return Hardware("cpu", {"bf16": 1e11, "fp32": 1e11}, 1e10, 16 * GIB, intra=5 * GB, inter=1 * GB, reserved=1 * GIB)


def report(machine: Hardware) -> str:
    """What was measured, in a few lines."""
    lines = [
        f"{machine.name}: {machine.bandwidth / 1e9:.0f} GB/s ({100 * machine.streamed:.0f} % by norms), {machine.launch * 1e6:.1f} µs a kernel"
    ]
    for dtype, reach in machine.reach.items():
        at = 100 * reach.of(8192, 8192, 8192)
        lines.append(f"  {dtype}: {at:.0f} % of {machine.peak(dtype) / 1e12:.0f} TFLOP/s at 8192³ ({reach})")
    lines.append(
        f"  attention: {machine.attention / 1e12:.0f} TFLOP/s forward, {machine.attention_backward / 1e12:.0f} backward, half at "
        f"{machine.attention_half:.0f} queries"
    )
    return "\n".join(lines)
