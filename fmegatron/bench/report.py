"""What the benchmark tells: rows, the table, and the file that holds every sample."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fmegatron.bench.kernels import KINDS, Profile
from fmegatron.bench.timing import Phase, paired_ratio
from fmegatron.bench.works import Work
from fmegatron.kernels import flash4


@dataclass
class Row:
    """What was measured of one contender.

    loss, norm: of the first forward and backward, before any update. backward: forward and backward; whole: with
    clipping and the update, None where it was not asked for or failed. peak: FLOP/s that utilisation refers to.
    """

    name: str
    precision: str
    peer: bool
    loss: float
    norm: float
    backward: Phase
    whole: Phase | None
    peak: float
    notes: dict[str, str] = field(default_factory=dict)
    profile: Profile | None = None


def numbers(row: Row, work: Work, reference: Row | None) -> dict[str, float | None]:
    """The figures of a row: milliseconds, TFLOP/s and utilisation (0 to 1) of forward and backward, milliseconds and
    tokens/s of whole steps, GiB, and the median over rounds of the ratio to the reference's time."""
    seconds = row.backward.median / 1e3
    found: dict[str, float | None] = {
        "backward_ms": row.backward.median,
        "tflops": work.flops / seconds / 1e12,
        "utilisation": work.flops / seconds / row.peak,
        "backward_gib": _gib(row.backward.peak),
        "backward_ratio": None,
        "whole_ms": None,
        "whole_ratio": None,
        "whole_gib": None,
        # without whole steps, of forward and backward
        "tokens_per_second": work.tokens / seconds,
        "first_s": row.backward.first,
    }
    if reference is not None:
        found["backward_ratio"] = paired_ratio(row.backward.samples, reference.backward.samples)
    if row.whole is not None:
        found |= {
            "whole_ms": row.whole.median,
            "whole_gib": _gib(row.whole.peak),
            "tokens_per_second": 1e3 * work.tokens / row.whole.median,
        }
        if reference is not None and reference.whole is not None:
            found["whole_ratio"] = paired_ratio(row.whole.samples, reference.whole.samples)
    return found


def reference_of(rows: Sequence[Row], precision: str) -> Row | None:
    """The row that ratios of this precision refer to: Megatron's, else another peer's, else none."""
    peers = [row for row in rows if row.peer and row.precision == precision]
    return next((row for row in peers if "megatron" in row.name), peers[0] if peers else None)


def table(rows: Sequence[Row], work: Work) -> str:
    """The rows as a table of Markdown, with all columns aligned."""
    head = ["", "precision", "fwd+bwd ms", "÷ ref", "TFLOP/s", "of peak", "GiB"]
    head += ["step ms", "÷ ref", "tokens/s", "GiB", "loss", "grad norm", "first s"]
    lines = [head]
    for row in rows:
        n = numbers(row, work, reference_of(rows, row.precision))
        lines.append(
            [
                row.name,
                row.precision,
                _shown(n["backward_ms"], 1),
                _shown(n["backward_ratio"], 3),
                _shown(n["tflops"], 0 if (n["tflops"] or 0) >= 100 else 3),
                f"{100 * (n['utilisation'] or 0):.1f} %",
                _shown(n["backward_gib"], 1),
                _shown(n["whole_ms"], 1),
                _shown(n["whole_ratio"], 3),
                f"{n['tokens_per_second']:,.0f}",
                _shown(n["whole_gib"], 1),
                f"{row.loss:.5f}",
                f"{row.norm:.5g}",
                _shown(n["first_s"], 1),
            ]
        )
    return _aligned(lines)


def profile_table(rows: Sequence[Row]) -> str:
    """Milliseconds of one step by kinds of kernels, a column a row of the benchmark."""
    shown = [row for row in rows if row.profile is not None]
    lines = [["ms of one step", *(f"{row.name} {row.precision}" for row in shown)]]
    for kind in KINDS:
        spent = [row.profile.kinds[kind] for row in shown if row.profile is not None]
        if any(spent):
            lines.append([kind, *(f"{ms:.2f}" for ms in spent)])
    lines.append(["all kernels", *(f"{row.profile.total:.2f}" for row in shown if row.profile is not None)])
    return _aligned(lines)


def notes(rows: Sequence[Row]) -> str:
    """What a reader should know of each row, a line a row."""
    lines = []
    for row in rows:
        said = dict(row.notes)
        if row.profile is not None and row.profile.attention:
            said["attention kernels"] = ", ".join(name[:80] for name in row.profile.attention)
        lines.append(f"{row.name} {row.precision}: " + "; ".join(f"{key}: {text}" for key, text in said.items()))
    return "\n".join(lines)


def versions(device: torch.device) -> dict[str, str]:
    """Of this library, torch and what lies below it, and the device."""
    import fmegatron

    found = {"date": time.strftime("%Y-%m-%d"), "fmegatron": fmegatron.__version__, "python": platform.python_version()}
    found["torch"] = str(torch.__version__)
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = _cudnn_version()
        found["device"] = torch.cuda.get_device_name(device)
        try:
            import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]

            found["triton"] = triton.__version__
        except ImportError:
            pass
        if flash4.INSTALLED:
            found["flash-attn-4"] = metadata.version("flash-attn-4")
    else:
        found["device"] = f"CPU, {torch.get_num_threads()} threads"
    return found


def save(path: Path, work: Work, rows: Sequence[Row], known: dict[str, Any]) -> None:
    """Everything as JSON: the work, versions, and each row with its figures and samples. A file that is there is replaced
    as a whole, so that a run that is ended meanwhile leaves the one before."""
    entries = []
    for row in rows:
        figures = numbers(row, work, reference_of(rows, row.precision))
        entries.append({**asdict(row), "figures": figures})
    config = {k: v for k, v in asdict(work.config).items() if isinstance(v, int | float | str | bool | None)}
    about = {"model": work.name, "batch": work.batch, "seq": work.seq, "tokens": work.tokens, "flops": work.flops}
    text = json.dumps({**known, "work": {**about, "config": config}, "rows": entries}, indent=1)
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def _gib(count: int | None) -> float | None:
    return None if count is None else count / 2**30


def _shown(value: float | None, digits: int) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [
        "| "
        + " | ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        + " |"
        for line in lines
    ]
    rule = "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([text[0], rule, *text[1:]])


def _cudnn_version() -> str:
    """torch's own check refuses the version that another package has loaded first."""
    try:
        return str(torch.backends.cudnn.version())
    except RuntimeError:
        return "of another package"
