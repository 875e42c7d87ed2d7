"""Plans in words: a table, a bar of where the time goes, one layout explained, the command that trains with it, and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import torch

from fmegatron.axes import PIPELINE
from fmegatron.optim.moments import moments_name
from fmegatron.plan.communication import entries
from fmegatron.plan.memory import memory
from fmegatron.plan.rank import Model, Setting, size, virtual_of
from fmegatron.plan.search import Estimate, Found
from fmegatron.precision import dtype_name
from fmegatron.testing.layout import Layout

GIB = float(1 << 30)
WIDTH = 40  # letters of a bar
LETTERS = {"products": "#", "attention": "a", "memory-bound": "m", "bubble": ".", "optimizer": "o"}

ERRORS = (
    "memory: parameters, gradients and optimizer from their placements (exact); activations from a trace of one rank's program "
    "(within 5 %); expected error of the peak 5 %, without what the allocator loses to fragments",
    "time: products and attention by saturating forms of their sizes, the rest by bytes, collectives as rings; expected error 10 % "
    "on one GPU of a calibrated machine, 25 % over several or with numbers of the table",
)
NOT_MODELLED = (
    "contention of networks and congestion, stragglers",
    "collectives that slow the products beside them (they are taken to fit beside 85 % of these)",
    "the host: kernels are taken to be launched ahead, and what lies between products to be one kernel each, as --compile or the fused "
    "kernels make it (--recorded takes the host out of the way; the graph's own memory is not counted)",
    "the host's wait for the numbers of rows of experts, once a layer and direction (dispatch=padded has none)",
    "copies and slow kernels of tensors whose rows are no multiples of 16 bytes, such as with an odd vocabulary, but for their products",
    "activations in host memory (--remat name:host is refused)",
    "rules of one's own; in the search also products cut for --overlap, exchanges beside another microbatch, hybrid sharding in a pipeline or below ZeRO-3, and stages more "
    "uneven than with lighter ends (--layout explains such a layout)",
    "uneven loads of experts; data loading, evaluation, checkpoints",
)


def table(found: Found) -> str:
    """The layouts, the fastest first."""
    rows = [("tokens/s/GPU", "util.", "GiB", "step s", "where the time goes", "layout")]
    for e in found.estimates:
        rows.append(
            (
                f"{e.tokens_per_second:,.0f}",
                f"{100 * e.utilisation:.1f} %",
                f"{e.memory.total / GIB:.1f}",
                f"{e.seconds:.3g}",
                bar(e),
                _layout(e.setting),
            )
        )
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]) - 1)]
    lines = [
        "  ".join(
            [*(c.rjust(w) if n < 4 else c.ljust(w) for n, (c, w) in enumerate(zip(r, widths, strict=False))), r[-1]]
        )
        for r in rows
    ]
    return "\n".join([*lines, "# products  a attention  m memory-bound  t tp  c cp  d dp  e ep  . bubble  o optimizer"])


def bar(e: Estimate, width: int = WIDTH) -> str:
    """The parts of a step's time, a letter each."""
    text, at = "", 0.0
    for name, seconds in e.spent.parts.items():
        at += seconds
        letter = LETTERS.get(name) or name.removeprefix("exposed ")[0]
        text += letter * (round(at / e.seconds * width) - len(text))
    return text


def why_slower(best: Estimate, other: Estimate) -> str:
    """What costs another layout more than the best, of the best's step."""
    a, b = best.spent.parts, other.spent.parts
    more = {n: b.get(n, 0.0) - a.get(n, 0.0) for n in {*a, *b}}
    largest = sorted(((t, n) for n, t in more.items() if t > 0.002 * best.seconds), reverse=True)[:3]
    return ", ".join(f"{n} +{100 * t / best.seconds:.1f} %" for t, n in largest) or "nearly the same"


def lost(found: Found) -> list[str]:
    """Why the runners-up lost."""
    lines = []
    for e in found.estimates[1:]:
        slower = 100 * (e.seconds / found.best.seconds - 1)
        lines.append(f"  +{slower:.1f} %  {_layout(e.setting)}: {why_slower(found.best, e)}")
    return lines


def explained(model: Model, e: Estimate) -> str:
    """One layout: bytes of ranks and time, by part."""
    s, ranks = e.setting, size(e.setting.layout, PIPELINE)
    some = sorted({0, ranks // 2, ranks - 1})
    every = [memory(model, s, rank=r) for r in some]
    heads = [f"pp rank {r}" if ranks > 1 else "GiB" for r in some]
    lines = [
        f"{_layout(s)}: {e.setting.rows} sequences of {s.seq} tokens, {s.microbatch} in a microbatch of a rank",
        "",
        "bytes of a rank, in GiB",
    ]
    names = list(every[0].parts)
    wide = max(map(len, names)) + 2
    lines.append("  " + "".ljust(wide) + "".join(h.rjust(12) for h in heads))
    lines += ["  " + n.ljust(wide) + "".join(f"{m.parts[n] / GIB:12.3f}" for m in every) for n in names]
    lines.append("  " + "total".ljust(wide) + "".join(f"{m.total / GIB:12.3f}" for m in every))
    at = len(lines)
    lines += ["", f"what {heads[0] if ranks > 1 else 'a rank'} communicates in a step"]
    lines += [
        f"  {f'{c.kind} over {chr(215).join(c.axes)}'.ljust(wide + 12)}{c.ranks:6} ranks {c.sent / GIB:12.3f} GiB sent"
        for c in entries(model, s)
    ]
    h = e.cluster.hardware
    lines.insert(
        at,
        f"  of {(h.memory - h.reserved) / GIB:.1f} GiB ({h.memory / GIB:.1f} less {h.reserved / GIB:.1f} for context and communicators)",
    )
    lines += [
        "",
        f"time of a step, {e.seconds:.4g} s: {e.tokens_per_second:,.0f} tokens/s/GPU, {100 * e.utilisation:.1f} % of the bf16 peak",
    ]
    for name, seconds in e.spent.parts.items():
        lines.append(
            f"  {name.ljust(wide)}{seconds:12.4f} s {100 * seconds / e.seconds:6.1f} %  {'#' * round(WIDTH * seconds / e.seconds)}"
        )
    if e.why_not is not None:
        lines += ["", f"It does not fit: {e.why_not}."]
    return "\n".join(lines)


def honesty(e: Estimate) -> list[str]:
    """How the numbers arose, their expected errors, and what is not modelled."""
    return [
        "How the numbers arose:",
        *(f"  {line}" for line in ERRORS),
        f"  hardware {e.cluster.hardware.name}: {e.cluster.hardware.source or 'a file of your own'}",
        "Not modelled:",
        *(f"  {line}" for line in NOT_MODELLED),
    ]


def command(setting: Setting, model: Sequence[str]) -> str:
    """The line that trains with a layout. model: the flags that name the model."""
    layout, p = setting.layout, setting.precision
    words = ["fmegatron train", *model, f"--mesh {layout.mesh}"]
    words += ["--sp"] if layout.sp else []
    words += [f"--zero {layout.zero}", *([f"--store {' '.join(layout.store_axes)}"] if layout.zero else [])]
    if size(layout, "cp") > 1:
        words.append(f"--cp {layout.context}")
    words += [
        f"--{n} {getattr(layout, n)}" for n in ("ep", "etp") if getattr(layout, n) > 1 or (n == "etp" and layout.ep > 1)
    ]
    if layout.pipelined:
        words.append(f"--schedule {layout.schedule}")
        words += [f"--virtual {virtual_of(layout)}"] if layout.virtual else []
        words += [f"--stages {layout.stages}"] if layout.stages else []
    words += [f"--batch.size {setting.rows}", f"--batch.seq-len {setting.seq}", f"--batch.microbatches {layout.micro}"]
    words += [f"--dispatch {layout.dispatch}"] if layout.dispatch != Layout().dispatch else []
    words += [f"--overlap {layout.overlap}"] if layout.overlap else []
    words += [f"--remat {layout.remat.replace('+', ',')}"] if layout.remat != "everything" else []
    words.append(f"--precision.params {dtype_name(p.params)}")
    if p.compute_dtype == torch.float32:  # a GPU computes in bfloat16 unless told otherwise
        words.append("--precision.compute float32")
    words += [f"--precision.reduce {dtype_name(p.reduce)}"] if p.reduce is not None else []
    words += [f"--precision.wire {dtype_name(p.wire)}"] if p.wire is not None else []
    words += [f"--precision.moments {moments_name(setting.moments)}"] if setting.moments.itemsize != 4 else []
    if setting.master is None and p.params.itemsize < 4:
        words.append(f"--precision.master {dtype_name(p.params)}")
    words += [f"--fp8 {p.fp8.recipe}"] if p.fp8 is not None else []
    words += ["--offload-optimizer"] if setting.offload else []
    words += [f"--microbatch-overlap {setting.beside}"] if setting.beside != "none" else []
    return " ".join(words)


def as_dict(e: Estimate, model: Sequence[str]) -> dict[str, Any]:
    """An estimate as JSON holds it: seconds and bytes."""
    return {
        "layout": str(e.setting.layout),
        "rows": e.setting.rows,
        "seq": e.setting.seq,
        "tokens_per_second_per_gpu": e.tokens_per_second,
        "utilisation": e.utilisation,
        "seconds": e.seconds,
        "time": e.spent.parts,
        "memory": e.memory.parts,
        "memory_total": e.memory.total,
        "fits": e.why_not is None,
        "command": command(e.setting, model),
    }


def as_json(estimates: Sequence[Estimate], model: Sequence[str], explained: Model | None = None) -> str:
    """All of them, with how they arose. explained: the model, of whose one layout what each rank communicates is told too."""
    first = estimates[0]
    data = {
        "gpus": first.cluster.gpus,
        "hardware": first.cluster.hardware.name,
        "source": first.cluster.hardware.source,
        "errors": list(ERRORS),
        "not_modelled": list(NOT_MODELLED),
        "layouts": [as_dict(e, model) for e in estimates],
    }
    if explained is not None:
        ranks = range(size(first.setting.layout, PIPELINE))
        data["communication"] = [
            [dataclasses.asdict(c) for c in entries(explained, first.setting, rank=r)] for r in ranks
        ]
    return json.dumps(data, indent=2)


def _layout(s: Setting) -> str:
    """The layout in one line, its long remat policies by a word."""
    text = str(s.layout)
    before, found, after = text.partition("remat=")
    if found and after.count("+") > 4:
        names, *rest = after.split(" ")
        return " ".join([before + f"remat={len(names.split('+'))} products", *rest])
    return text
