"""Does a layout catch a change of shipped code, and does one device not notice it?

The reference is one device without the change, computed once; what `fmegatron verify llama --world 8` draws is drawn
before any change.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fmegatron.testing.comparing import Difference, differences
from fmegatron.testing.covering import Case, space
from fmegatron.testing.engines import run_on
from fmegatron.testing.layout import Layout
from fmegatron.testing.models import find_model, variants
from fmegatron.testing.program import Program
from fmegatron.testing.running import Inputs, Job, Outcome, inputs_of, run
from fmegatron.verify import VerifyConfig
from tests.mutants.edits import Edit, applied

CLIP = 0.01  # below the norm of any gradient here, so that clipping is seen
ALONE = Layout(mask="uneven", packed=True)


@dataclass(frozen=True)
class Reference:
    """What one device computes, and from what."""

    program: Program
    job: Job
    inputs: Inputs
    want: Outcome


@dataclass(frozen=True)
class Verdict:
    """How a layout did. kind: "equal"; "difference", a finite one; "not finite"; or "error", an exception (`message`).
    dtypes: are those of all values the reference's?"""

    kind: str
    worst: Difference | None = None
    message: str = ""
    dtypes: bool = True

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
    job = Job(checks, clip=CLIP, seed=seed)
    (want,) = run(program, case.layout, job, inputs, reference=True)
    if case.layout.mask != "none":  # where no token counts, there is nothing to clip
        assert float(want["norms"]["raw"].value) > CLIP, f"clipping does nothing on {case}"
    return Reference(program, job, inputs, want)


def verdict(case: Case, checks: tuple[str, ...], edits: Sequence[Edit] = ()) -> Verdict:
    """Compares the ranks of a layout with one device, as `compare` does. The edits are in force for the ranks alone."""
    known = reference(case, checks)
    with applied(edits):
        try:
            ranks = run_on("simulated", known.program, case.layout, known.job, known.inputs)
        except Exception as error:
            return Verdict("error", message=f"{type(error).__name__}: {error}".splitlines()[0])
    return judged(ranks, known.want)


def judged(ranks: Sequence[Outcome], want: Outcome) -> Verdict:
    found = differences(ranks, want)
    worst = max(found, key=lambda d: (d.share, d.error))
    kind = "equal" if worst.share <= 1 else "difference" if math.isfinite(worst.error) else "not finite"
    same = all(
        p.value.dtype == want[n][path].value.dtype for r in ranks for n, of in r.items() for path, p in of.items()
    )
    return Verdict(kind, worst, dtypes=same)


def on_one_device(model: str, checks: tuple[str, ...], edits: Sequence[Edit]) -> list[Verdict]:
    """One device as it computes with the edits in force, without a mesh and with one of one rank, compared with what it
    computes without them."""
    known = reference(Case(model, ALONE), checks)
    with applied(edits):
        ran = [run(known.program, ALONE, known.job, known.inputs, reference=alone) for alone in (True, False)]
    return [judged(ranks, known.want) for ranks in ran]
