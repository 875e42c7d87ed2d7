"""What papers say about schedules in closed form: the bubble, and the residuals alive at most.

Each form holds under conditions, and there is none where they are not met. F, I, W are the times of a stage's forward,
backward by input and backward by weight, the same for all stages, and messages take none; p ranks, v stages each, m
microbatches. Times are those of one stage: where papers write the time of all v stages of a rank, theirs is v times
that. All forms, the conditions included, are those of the tables of `schedules`: a test compares them with simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fmegatron.parallel.schedule_simulation import Costs

MEGATRON = "Narayanan et al. 2021, arXiv:2104.04473, section 2.2"
ZERO_BUBBLE = "Qi et al. 2023, arXiv:2401.10241"


@dataclass(frozen=True)
class Theory:
    """idle: what a step takes beyond the work of a rank. formula: that, and what it is for these sizes, in words.
    peaks: the most residuals alive on each rank. source: of the forms.

    span: the form is for `Timeline.span_idle`, each rank's own from its first to its last action, not for the step.
    None where no form is known."""

    idle: float | None
    formula: str
    peaks: tuple[int, ...] | None
    source: str
    span: bool = False


def theory(
    name: str, stages: int, microbatches: int, *, virtual: int = 2, group: int | None = None, costs: Costs | None = None
) -> Theory | None:
    """The closed forms of a schedule of `schedules.SCHEDULES`; None where none holds.

    GPipe and 1F1B: (p − 1)(F + I + W), which is (p − 1) ÷ m of the work.
    interleaved: the same of a stage that is v times smaller, so (p − 1) ÷ (v m), for m ≥ p in groups of at least p that
        divide m. At most (v − 1) group + 2 (p − 1 − rank) + 1 residuals: with groups of p, p (1 + (p − 1) ÷ (p v)) of v
        stages (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3).
    bfs: (p − 1) ÷ (v m) too, for m ≥ p (Lamy-Poirier 2023, arXiv:2211.05953), with the residuals of all m.
    ZB-H1: (p − 1)(F + I − W), for m ≥ p and W no larger than F and I; at most min(p, m) residuals.
    ZB-V: none, for F = I = W and m ≥ 2 p − 1, as the span of each rank; 2 p residuals of a stage, which is half of a
        rank's part of the model: 1F1B's p.
    DualPipe-V: (p − 1)(F&B + B − 3 W), for m ≥ 2 p, where a joined pair F&B takes as long as its parts, F = I and
        W ≤ I; 2 p + 1 residuals. (With B = I + W the whole backward. A pair that is faster than its parts makes the
        bubble smaller, but not as the form says: pairs are not all that fills the pipeline.)
    """
    p, m, v, costs = stages, microbatches, virtual, costs or Costs()
    times = costs.forward, costs.backward_input, costs.backward_weight
    if any(isinstance(t, Sequence) for t in times) or costs.communication:
        return None
    f, i, w = (float(t) for t in times)  # type: ignore[arg-type]
    back = [p - 1 - r for r in range(p)]
    if name == "gpipe":
        source = "Huang et al. 2019, arXiv:1811.06965; " + MEGATRON
        return Theory((p - 1) * (f + i + w), "(p − 1) ÷ m", (m,) * p, source)
    if name == "1f1b" or (name == "interleaved" and v == 1):
        return Theory((p - 1) * (f + i + w), "(p − 1) ÷ m", tuple(min(b + 1, m) for b in back), MEGATRON)
    if name == "interleaved":
        group = -(-m // max(m // p, 1)) if group is None else min(group, m)
        if group < p or m % group:
            return None
        peaks = tuple(min((v - 1) * group + 2 * b + 1, v * m) for b in back)
        return Theory((p - 1) * (f + i + w), "(p − 1) ÷ (v m)", peaks, MEGATRON)
    if name == "bfs" and m >= p:
        source = "Lamy-Poirier 2023, arXiv:2211.05953"
        return Theory((p - 1) * (f + i + w), "(p − 1) ÷ (v m)", (v * m,) * p, source)
    if name == "zbh1" and m >= p and w <= min(f, i):
        return Theory((p - 1) * (f + i - w), "(p − 1)(F + I − W)", (p,) * p, ZERO_BUBBLE + ", section 2.3")
    if name == "zbv" and m >= 2 * p - 1 and f == i == w:
        return Theory(0.0, "0 on each rank", (2 * p,) * p, ZERO_BUBBLE + ", section 6", span=True)
    if name == "dualpipev" and m >= 2 * p and f == i >= w and costs.overlapped in (None, f + i + w):
        source = "DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe"
        return Theory((p - 1) * (f + 2 * i - w), "(p − 1)(F&B + B − 3 W)", (2 * p + 1,) * p, source)
    return None
