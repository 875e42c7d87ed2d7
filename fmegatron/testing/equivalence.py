"""The promise: a layout computes the function that one device computes."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron.errors import UserError
from fmegatron.precision import Precision, dtype_of
from fmegatron.spec import params_of
from fmegatron.testing.comparing import Difference, differences, unequal
from fmegatron.testing.engines import check_engine, join, run_on
from fmegatron.testing.layout import Layout
from fmegatron.testing.models import model_text
from fmegatron.testing.program import Program, program_of
from fmegatron.testing.running import CHECKS, Job, inputs_of, run

ALL_CHECKS = (*CHECKS, "donate")


@dataclass(frozen=True)
class Result:
    """How a layout did. differences: of every leaf; problems: what is wrong besides numbers."""

    layout: Layout
    differences: tuple[Difference, ...]
    problems: tuple[str, ...]
    seconds: float

    @property
    def worst(self) -> Difference:
        """The leaf that uses most of what it is allowed."""
        return max(self.differences, key=lambda d: (d.share, d.error))

    @property
    def ok(self) -> bool:
        return not self.problems and self.worst.share <= 1.0

    def __str__(self) -> str:
        if self.ok:
            return f"{self.layout}: equal, worst {self.worst}"
        lines = [f"layout {self.layout} does not compute what one device computes"]
        lines += [f"  {p}" for p in self.problems]
        failed: dict[str, list[Difference]] = {}
        for d in self.differences:
            if d.share > 1:
                failed.setdefault(d.what, []).append(d)
        for what, found in failed.items():
            every = sum(d.what == what for d in self.differences)
            lines.append(f"  {max(found, key=lambda d: d.share)} ({len(found)} of {every} leaves are off)")
        return "\n".join(lines)


def compare(
    model: Any,
    layout: Layout | str,
    *,
    engine: str = "simulated",
    dtype: torch.dtype | str = torch.float64,
    checks: Sequence[str] = CHECKS,
    seed: int = 0,
    device: str = "cpu",
    **options: Any,
) -> Result:
    """Run a layout and one device, and say how far each leaf is off. Arguments as for `assert_equivalent`."""
    start = time.monotonic()
    program, layout = program_of(model, **options), Layout.parse(layout) if isinstance(layout, str) else layout
    for name in checks:
        if name not in ALL_CHECKS:
            raise UserError(f"check {name!r} is not known: use some of {', '.join(ALL_CHECKS)}")
    if (why := program.why_illegal(layout, propose=True)) is not None:
        raise UserError(f"layout {layout} is not legal for this model: {why}")
    check_engine(engine, layout, device)
    join(engine, device)  # before anything is computed
    dtype = dtype_of(dtype)
    inputs = inputs_of(program, layout, Job(seed=seed))
    first = Job(("gradients",), seed=seed, steps=1)
    gradients = run(program, layout, first, inputs, reference=True, device=device)[0]["gradients"]
    # clipping must bite: half of the norm, as a sum in float64 of the gradients that one device has
    norm = math.sqrt(sum(float(p.value.double().square().sum()) for p in gradients.values()))
    exact = Job(tuple(c for c in checks if c != "donate"), clip=norm / 2 or 1.0, seed=seed)
    (want,) = run(program, layout, exact, inputs, reference=True, device=device)
    job, low = dataclasses.replace(exact, checks=tuple(checks)), None
    if dtype != torch.float64:
        job = dataclasses.replace(job, precision=_precision(dtype))
        inputs = inputs_of(program, layout, job)
        lower = dataclasses.replace(job, checks=exact.checks)
        (low,) = run(program, layout, lower, inputs, reference=True, device=device)
    ranks = run_on(engine, program, layout, job, inputs, device=device)
    dims = {name: p.dims for name, p in params_of(inputs.spec).items()}
    found = differences(
        ranks, want, low=low, parts=layout.world * layout.micro, dtype=dtype, dims=dims, stages=layout.pipelined
    )
    problems = []
    if "donate" in checks:
        for one in ("parameters", "m", "v"):
            if (leaf := unequal(ranks, f"adamw {one}", f"donated {one}")) is not None:
                problems.append(f"donate=True and False give different bits: {leaf}")
    return Result(layout, tuple(found), tuple(problems), time.monotonic() - start)


def assert_equivalent(
    model: Any,
    layout: Layout | str,
    *,
    engine: str = "simulated",
    dtype: torch.dtype | str = torch.float64,
    checks: Sequence[str] = ALL_CHECKS,
    seed: int = 0,
    device: str = "cpu",
    rows: Mapping[str, Any] | None = None,
    batch: Any = None,
    dims: Mapping[str, str] | None = None,
    params: Any = None,
) -> Result:
    """Raises AssertionError, with the layout's line and the worst leaf of each kind (its dims and placements), unless the layout computes what one
    device computes: loss, every raw gradient, the norm before and after clipping, the clipped gradients, parameters and
    moments after 3 steps of AdamW, and parameters after 3 of SGD with learning rate 1 and no clipping.

    model: a Decoder; an object or module with `spec()`, `loss(params, batch, ctx)` and maybe `weights(batch)`; or these
        functions as a tuple (spec, loss) or (spec, loss, weights).
    layout: a `Layout` or its line.
    engine: "simulated" or "processes" (see `fmegatron.testing.engines`); a pipeline, "pp=2,tp=2 schedule=zbv micro=4",
        needs "processes", and a model with embed, block and head.
    dtype: float64: each leaf to 1e-10 of its norm. float32, bfloat16 (products in bfloat16, parameters and sums of
        gradients in float32): to the bound that `fmegatron.testing.comparing` derives.
    checks: some of "init" (initial values are those of one device), "gradients", "adamw", "sgd", "donate" (bitwise the
        same with and without).
    rows, batch, dims, params: as in `Program`: rules for the model's own dims, its batch, and its parameters.

    Raises UserError for a layout that is not legal for the model, and for what the engine cannot express.
    """
    result = compare(
        model,
        layout,
        engine=engine,
        dtype=dtype,
        checks=checks,
        seed=seed,
        device=device,
        **({} if isinstance(model, Program) else {"rows": rows, "batch": batch, "dims": dims, "params": params}),
    )
    assert result.ok, f"{result}\n  to check it again: {_again(model, result.layout)}"
    return result


def _again(model: Any, layout: Layout) -> str:
    """What to type to check a layout again."""
    text = model_text(model.model if isinstance(model, Program) else model)
    if not text:
        return f'assert_equivalent(…, "{layout}"' + (', engine="processes")' if layout.pipelined else ")")
    return f'fmegatron verify {text} --layout "{layout}"' + (" --engine processes" if layout.pipelined else "")


def _precision(dtype: torch.dtype) -> Precision:
    if dtype == torch.float32:
        return Precision()
    if dtype == torch.bfloat16:
        return Precision(compute=torch.bfloat16)
    raise UserError(f"dtype {dtype} has no bound here: use float64, float32 or bfloat16")
