"""Does a layout catch a change of shipped code, and does one device not notice it?

The reference is one device without the change, computed once; what `fmegatron verify llama --world 8` draws is drawn
before any change.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fmegatron.testing.comparing import Difference, differences
from fmegatron.testing.covering import Case, space
from fmegatron.testing.engines import run_on
from fmegatron.testing.layout import Layout
from fmegatron.testing.models import find_model, variants
from fmegatron.testing.program import Program
from fmegatron.testing.running import Inputs, Job, Outcome, inputs_of, run
from fmegatron.verify import VerifyConfig


@dataclass(frozen=True)
class Reference:
    """What one device computes, and from what."""

    program: Program
    job: Job
    inputs: Inputs
    want: Outcome


@dataclass(frozen=True)
class Verdict:
    """How a layout did. kind: "equal"; "difference", a finite one; "not finite"; or "error", an exception (`message`)."""

    kind: str
    worst: Difference | None = None
    message: str = ""

    @property
    def caught(self) -> bool:
        return self.kind != "equal"


@functools.cache
def drawn(examples: int | None = None) -> list[Case]:
    """What is checked by default, in its order: layouts of up to 8 ranks, at CI's seed and budget."""
    config = VerifyConfig()
    return list(space(variants(config.model), config.world).cases(examples or config.examples, config.seed))


def checks_of(n: int) -> tuple[str, ...]:
    """What `verify` checks of case number n of a table."""
    return ("init", "gradients", ("adamw", "sgd")[n % 2])


@functools.cache
def reference(case: Case, checks: tuple[str, ...]) -> Reference:
    """One device on the batch of a case."""
    program, seed = Program(find_model(case.model)), VerifyConfig().seed
    inputs = inputs_of(program, case.layout, Job(seed=seed))
    first = Job(("gradients",), seed=seed, steps=1)
    (found,) = run(program, case.layout, first, inputs, reference=True)
    norm = math.sqrt(sum(float(p.value.double().square().sum()) for p in found["gradients"].values()))
    job = Job(checks, clip=norm / 2, seed=seed)
    (want,) = run(program, case.layout, job, inputs, reference=True)
    return Reference(program, job, inputs, want)


def verdict(case: Case, checks: tuple[str, ...]) -> Verdict:
    """Compares the ranks of a layout with one device, as `compare` does. Changes of code count for the ranks alone."""
    known = reference(case, checks)
    try:
        ranks = run_on("simulated", known.program, case.layout, known.job, known.inputs)
    except Exception as error:
        return Verdict("error", message=f"{type(error).__name__}: {error}".splitlines()[0])
    return judged(ranks, known.want)


def judged(ranks: Sequence[Outcome], want: Outcome) -> Verdict:
    found = differences(ranks, want)
    worst = max(found, key=lambda d: (d.share, d.error))
    if worst.share <= 1:
        return Verdict("equal", worst)
    return Verdict("difference" if math.isfinite(worst.error) else "not finite", worst)


def on_one_device(case: Case, checks: tuple[str, ...]) -> list[Verdict]:
    """The same batch, or one like it, on one device as it computes with the change in place: without a mesh, and with
    one of one rank."""
    layout = dataclasses.replace(Layout(), mask=case.layout.mask, packed=case.layout.packed)
    known = reference(Case(case.model, layout), checks)
    return [
        judged(run(known.program, layout, known.job, known.inputs, reference=alone), known.want)
        for alone in (True, False)
    ]


__all__: Sequence[Any] = ["Case", "Layout", "Verdict", "checks_of", "drawn", "on_one_device", "reference", "verdict"]
