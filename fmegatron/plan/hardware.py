"""What machines can do: a small table, from the makers' sheets, and a form of one's own in TOML.

    hardware("h100"), hardware("my-machine.toml")         # the latter written by `fmegatron bench --calibrate`

Times that follow from it: of a matrix product by its sizes, of attention, of what is bound by memory, of a collective over some
ranks. Peaks are dense. How much of a peak is reached is a simple saturating form, whose numbers in the table are those of an
H200 or estimates (see `Hardware.source`); a calibration measures them, by kernels alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fmegatron.errors import UserError
from fmegatron.plan.tracing import Attention, Product
from fmegatron.recording import Collective

GB, TB, GIB = 1e9, 1e12, float(1 << 30)


@dataclass(frozen=True)
class Reach:
    """How much of a peak is reached: `most` · m/(m + by_m) · n/(n + by_n) · k/(k + by_k)."""

    most: float = 0.75
    by_m: float = 96.0
    by_n: float = 96.0
    by_k: float = 192.0

    def of(self, m: int, n: int, k: int) -> float:
        return self.most * m / (m + self.by_m) * n / (n + self.by_n) * k / (k + self.by_k)


@dataclass(frozen=True, eq=False)
class Hardware:
    """One kind of GPU and how it is connected.

    peaks: FLOP/s of matrix products by dtype ("bf16", "fp8", "fp32"), dense. reach: how much of these by the sizes of a product.
    attention, attention_backward: FLOP/s that attention's kernels reach over long sequences, with heads of 128; half of it is
        reached at `attention_half` queries. bandwidth: bytes/s of memory; streamed: the part of it that a fused kernel reaches,
        which reduces rows on its way; copied: that of plain passes over long arrays (sums of gradients, the optimizer).
    unaligned: the part of its speed that a product in half precision keeps whose rows are no multiples of 16 bytes, such as with
        an odd vocabulary.
    launch: seconds that a kernel takes whatever it does. memory: bytes; reserved: of which a process cannot have (context,
        communicators, what the allocator cannot use).
    intra, inter: bytes/s that a GPU sends to others of its node, and out of it, as collectives reach it; latency in seconds, of
        one step of a collective, inside and between nodes. node: GPUs of a node. host: bytes/s to host memory, and from it.
    source: where the numbers are from.
    """

    name: str
    peaks: Mapping[str, float]
    bandwidth: float
    memory: float
    intra: float
    inter: float
    node: int = 8
    host: float = 5.0e10
    reach: Mapping[str, Reach] = field(
        default_factory=lambda: {"bf16": Reach(), "fp8": Reach(0.62), "fp32": Reach(0.8)}
    )
    attention: float = 5.5e14
    attention_backward: float = 4.6e14
    attention_half: float = 700.0
    streamed: float = 0.82
    copied: float = 0.85
    unaligned: float = 0.25
    launch: float = 3e-6
    latency_intra: float = 4e-6
    latency_inter: float = 1.2e-5
    reserved: float = 3 * GIB
    source: str = ""

    def __post_init__(self) -> None:
        for f in (
            "bandwidth",
            "memory",
            "intra",
            "inter",
            "node",
            "host",
            "attention",
            "attention_backward",
            "streamed",
            "copied",
            "unaligned",
        ):
            value = getattr(self, f)
            if not value > 0:
                raise UserError(f"hardware {self.name!r}: {f}={value} must be greater than 0")
        if not self.peaks or any(not v > 0 for v in self.peaks.values()):
            raise UserError(f"hardware {self.name!r}: peaks={dict(self.peaks)} must be FLOP/s by dtype, greater than 0")

    def peak(self, dtype: str) -> float:
        """FLOP/s of a dtype: half precision alike; where there is no fp8, that of bf16."""
        for known in (dtype, "bf16", *self.peaks):
            if known in self.peaks:
                return self.peaks[known]
        raise AssertionError(dtype)

    @functools.cache  # noqa: B019 (a few objects, all alive to the end)
    def product(self, p: Product) -> float:
        """Seconds of a matrix product (a few of one size in one call count as so many)."""
        dtype = {"fp16": "bf16", "fp64": "fp32"}.get(p.dtype, p.dtype)
        dtype = dtype if dtype in self.peaks else "bf16"
        reach = self.reach.get(dtype) or self.reach.get("bf16") or Reach()
        flops = p.flops / (self.peak(dtype) * reach.of(p.m, p.n, p.k))
        if dtype == "bf16" and (p.n % 8 or p.k % 8 or (p.weight and p.m % 8)):
            flops /= self.unaligned
        return max(flops, p.bytes / (self.bandwidth * self.streamed)) + self.launch

    @functools.cache  # noqa: B019
    def attend(self, a: Attention) -> float:
        """Seconds of one call of attention. Heads narrower than 128 reach less, in proportion to sqrt(head / 128)."""
        rate = self.attention_backward if a.backward else self.attention
        if a.dtype in ("fp32", "fp64"):
            rate *= self.peak("fp32") / self.peak("bf16")
        rate *= min(1.0, math.sqrt(a.head / 128)) * a.queries / (a.queries + self.attention_half)
        return a.flops / rate + self.launch * (3 if a.backward else 1)

    def stream(self, size: float, kernels: int = 1, *, plain: bool = False) -> float:
        """Seconds of kernels that read and write so many bytes; plain: element by element, over long arrays."""
        return size / (self.bandwidth * (self.copied if plain else self.streamed)) + kernels * self.launch

    def collective(self, c: Collective, per_node: int) -> float:
        """Seconds of a collective of which `per_node` ranks are on one node (in rings, or directly for an all-to-all)."""
        n = c.ranks
        if n == 1:
            return 0.0
        near = min(per_node, n)
        if c.kind == "exchange":
            return c.bytes / (self.intra if near > 1 else self.inter) + (
                self.latency_intra if near > 1 else self.latency_inter
            )
        steps = 2 if c.kind == "all-reduce" else 1
        if n <= near:
            return c.sent / self.intra + self.latency_intra * steps * math.log2(n)
        latency = self.latency_inter * steps * math.log2(n / near) + self.latency_intra * steps * math.log2(near)
        if c.kind == "all-to-all":
            out, inside = c.bytes * (n - near) / n, c.bytes * (near - 1) / n
            return max(out / self.inter, inside / self.intra) + latency
        # rings that enter and leave a node by all of the GPUs that take part
        return c.sent / min(self.intra, self.inter * near) + latency

    def message(self, size: float, *, far: bool) -> float:
        """Seconds of a message to another rank."""
        return size / (self.inter if far else self.intra) + (self.latency_inter if far else self.latency_intra)


def _nvidia(
    name: str, half: float, eighth: float, single: float, bandwidth: float, memory: float, **rest: Any
) -> Hardware:
    peaks = {"bf16": half * TB, "fp32": single * TB} | ({"fp8": eighth * TB} if eighth else {})
    return Hardware(name, peaks, bandwidth * TB, memory, **rest)


# PCIe 5 × 16 carries 64 GB/s each way, and 80 % of it pinned memory (PCIe 4: half; GB200's NVLink-C2C: 450 GB/s each way).
# NVLink counts what a GPU sends (half of the sheets' two directions), 80 % of it as collectives reach it; networks one adapter
# a GPU, 90 % of it.
_SHEET = "the maker's data sheet (dense peaks, memory); share reached: bf16 and fp8 products and attention of an H200, else estimated"
# Measured on an H200 by kernels alone, played long enough for its power limit (`fmegatron bench --calibrate`, torch 2.11, CUDA 13),
# rounded; taken for the H100 too.
_HOPPER = {
    "reach": {"bf16": Reach(0.72, 50.0, 2.0, 140.0), "fp8": Reach(0.64, 50.0, 10.0, 340.0), "fp32": Reach(0.8)},
    "attention": 5.7e14,
    "attention_backward": 5.4e14,
    "attention_half": 410.0,
    "streamed": 0.82,
    "copied": 0.88,
    "launch": 1e-6,
}
TABLE: dict[str, Hardware] = {
    # NVIDIA H100 SXM data sheet: 989 / 1979 TFLOP/s, 67 (fp32), 3.35 TB/s, 80 GB, NVLink 900 GB/s; DGX H100: 8 × 400 Gb/s
    "h100-sxm": _nvidia(
        "h100-sxm", 989, 1979, 67, 3.35, 79.1 * GIB, intra=360 * GB, inter=45 * GB, source=_SHEET, **_HOPPER
    ),
    # H200 SXM data sheet: as H100, 4.8 TB/s, 141 GB
    "h200": _nvidia("h200", 989, 1979, 67, 4.8, 139.8 * GIB, intra=360 * GB, inter=45 * GB, source=_SHEET, **_HOPPER),
    # H100 PCIe data sheet: 756 / 1513, 2.0 TB/s, 80 GB, PCIe 5 × 16
    "h100-pcie": _nvidia(
        "h100-pcie",
        756,
        1513,
        51,
        2.0,
        79.1 * GIB,
        intra=50 * GB,
        inter=23 * GB,
        source=_SHEET,
        attention=3.6e14,
        attention_backward=2.9e14,
    ),
    # A100 80GB SXM data sheet: 312, 19.5 (fp32), 2.04 TB/s, NVLink 600 GB/s; DGX A100: 8 × 200 Gb/s
    "a100": _nvidia(
        "a100",
        312,
        0,
        19.5,
        2.04,
        79.1 * GIB,
        intra=240 * GB,
        inter=22.5 * GB,
        host=25 * GB,
        source=_SHEET,
        attention=1.9e14,
        attention_backward=1.5e14,
    ),
    # HGX B200 data sheet: 2250 / 4500, 80 (fp32), 8 TB/s, 180 GB usable, NVLink 1.8 TB/s; 8 × 400 Gb/s
    "b200": _nvidia(
        "b200",
        2250,
        4500,
        80,
        8.0,
        178 * GIB,
        intra=720 * GB,
        inter=45 * GB,
        source=_SHEET,
        attention=1.2e15,
        attention_backward=0.95e15,
    ),
    # GB200 NVL72: the same chip, 72 of one NVLink domain
    "gb200": _nvidia(
        "gb200",
        2500,
        5000,
        80,
        8.0,
        184 * GIB,
        intra=720 * GB,
        inter=45 * GB,
        node=72,
        host=360 * GB,
        source=_SHEET,
        attention=1.2e15,
        attention_backward=0.95e15,
    ),
    # L40S data sheet: 362 / 733, 91.6 (fp32), 0.864 TB/s, 48 GB, PCIe 4 × 16
    "l40s": _nvidia(
        "l40s",
        362,
        733,
        91.6,
        0.864,
        44.5 * GIB,
        intra=22 * GB,
        inter=11 * GB,
        host=25 * GB,
        source=_SHEET,
        attention=1.5e14,
        attention_backward=1.2e14,
    ),
}
ALIASES = {"h100": "h100-sxm", "a100-sxm": "a100", "h200-sxm": "h200"}


def hardware(name: str) -> Hardware:
    """The hardware of a name of the table, or of a TOML file.

    Raises UserError for a name that is not known, and a file that cannot be read as one.
    """
    if name.endswith(".toml"):
        return load(name)
    found = TABLE.get(ALIASES.get(name, name))
    if found is None:
        near = difflib.get_close_matches(name, [*TABLE, *ALIASES], 1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise UserError(
            f"--gpu {name} is not in the table{hint} It has {', '.join(TABLE)}; or give a file NAME.toml, as "
            "fmegatron bench --calibrate writes it"
        )
    return found


def load(path: str | Path) -> Hardware:
    """Hardware of a file. Raises UserError, which names the file and the field."""
    try:
        data = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(
            f"--gpu {path}: cannot be read ({error.strerror}): give a file that bench --calibrate wrote"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--gpu {path} is no TOML: {error}") from None
    known = {f.name for f in dataclasses.fields(Hardware)}
    if unknown := [n for n in data if n not in known]:
        raise UserError(f"--gpu {path}: {unknown[0]!r} is no field of a hardware file: {', '.join(sorted(known))}")
    try:
        if "reach" in data:
            data["reach"] = {n: Reach(**v) for n, v in data["reach"].items()}
        return Hardware(**{"name": Path(path).stem, **data})
    except TypeError as error:
        raise UserError(f"--gpu {path}: {error}: it needs name, peaks, bandwidth, memory, intra and inter") from None


def save(machine: Hardware, path: str | Path) -> None:
    """Writes hardware as a file that `load` reads."""
    plain: list[str] = []
    tables: list[str] = []
    for f in dataclasses.fields(Hardware):
        value = getattr(machine, f.name)
        if f.name == "reach":
            for dtype, reach in value.items():
                tables += ["", f"[reach.{dtype}]", *(f"{n} = {v:.6g}" for n, v in dataclasses.asdict(reach).items())]
        elif isinstance(value, Mapping):
            tables += ["", f"[{f.name}]", *(f"{n} = {v:.6g}" for n, v in value.items())]
        else:
            plain.append(f"{f.name} = {_text(value)}")
    Path(path).write_text("\n".join([*plain, *tables, ""]))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value) if isinstance(value, int) else f"{value:.8g}"
