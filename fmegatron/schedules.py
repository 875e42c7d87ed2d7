"""Learning rates as functions of the number of updates made before: schedule(0) is the first update's.

All of them warm up linearly: update i of `warmup` has peak * (i + 1) / warmup, so that the first is not lost (where
transformers has i / warmup). At `total` and beyond, past the last of `total` updates, they give `end`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fmegatron.errors import UserError

DEFAULT_TIMESCALE = 10_000  # of inverse_sqrt without a warm-up, as in transformers


@dataclass(frozen=True)
class Constant:
    """`peak` after the warm-up, for ever."""

    peak: float
    warmup: int = 0

    def __post_init__(self) -> None:
        _check("constant", peak=self.peak, warmup=self.warmup)

    def __call__(self, count: int) -> float:
        return self.peak * _warming(count, self.warmup)


@dataclass(frozen=True)
class Linear:
    """A straight line from `peak`, after the warm-up, to `end` at `total`."""

    peak: float
    total: int
    warmup: int = 0
    end: float = 0.0

    def __post_init__(self) -> None:
        _check("linear", peak=self.peak, total=self.total, warmup=self.warmup, end=self.end)

    def __call__(self, count: int) -> float:
        if count < self.warmup:
            return self.peak * _warming(count, self.warmup)
        return self.end + (self.peak - self.end) * (1 - _progress(count, self.warmup, self.total))


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from `peak`, after the warm-up, to `end` at `total` (Loshchilov & Hutter, "SGDR", 2017)."""

    peak: float
    total: int
    warmup: int = 0
    end: float = 0.0

    def __post_init__(self) -> None:
        _check("cosine", peak=self.peak, total=self.total, warmup=self.warmup, end=self.end)

    def __call__(self, count: int) -> float:
        if count < self.warmup:
            return self.peak * _warming(count, self.warmup)
        wave = math.cos(math.pi * _progress(count, self.warmup, self.total))
        return self.end + (self.peak - self.end) * 0.5 * (1 + wave)


FORMS: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    "exponential": lambda x: 2 * 0.5**x - 1,
    "minus_sqrt": lambda x: 1 - math.sqrt(x),
}


@dataclass(frozen=True)
class WSD:
    """Warm-up, stable at `peak`, then down to `end` over the last `decay` updates before `total` (MiniCPM, 2024).

    form: what is left of peak - end at the part x of the decay, under the names that Megatron-LM gives them: "linear",
        1 - x; "cosine", (1 + cos(pi x)) / 2; "exponential", 2 * 0.5^x - 1; "minus_sqrt", 1 - sqrt(x) (Hägele et al.,
        "Scaling laws and compute-optimal training beyond fixed training durations", 2024).
    """

    peak: float
    total: int
    decay: int
    warmup: int = 0
    end: float = 0.0
    form: str = "linear"

    def __post_init__(self) -> None:
        _check("wsd", peak=self.peak, total=self.total, warmup=self.warmup, end=self.end, decay=self.decay)
        if self.form not in FORMS:
            raise UserError(f"wsd needs a form out of {', '.join(FORMS)}, but got form={self.form!r}")

    def __call__(self, count: int) -> float:
        if count < self.warmup:
            return self.peak * _warming(count, self.warmup)
        left = FORMS[self.form](_progress(count, self.total - self.decay, self.total))
        return self.end + (self.peak - self.end) * left


@dataclass(frozen=True)
class InverseSqrt:
    """`peak` after the warm-up, then peak * sqrt(timescale / (timescale + updates since)), but at least `end`.

    timescale: updates until the rate is peak / sqrt(2); None: `warmup`, or 10,000 without one. With None it is
    peak * sqrt(warmup / count): Noam's schedule (Vaswani et al., 2017), Megatron-LM's "inverse-square-root" and, past
    the warm-up, transformers' get_inverse_sqrt_schedule. There is no `total`: a run may go on for ever.
    """

    peak: float
    warmup: int = 0
    timescale: int | None = None
    end: float = 0.0

    def __post_init__(self) -> None:
        _check("inverse_sqrt", peak=self.peak, warmup=self.warmup, end=self.end)
        if self.timescale is not None and not self.timescale > 0:
            raise UserError(f"inverse_sqrt needs a timescale above 0, but got timescale={self.timescale}")

    def __call__(self, count: int) -> float:
        if count < self.warmup:
            return self.peak * _warming(count, self.warmup)
        scale = self.timescale or self.warmup or DEFAULT_TIMESCALE
        return max(self.end, self.peak * math.sqrt(scale / (scale + count - self.warmup)))


def constant(peak: float, *, warmup: int = 0) -> Constant:
    """See `Constant`. Raises `UserError` for a negative argument, as all schedules do."""
    return Constant(peak, warmup)


def linear(peak: float, *, total: int, warmup: int = 0, end: float = 0.0) -> Linear:
    """See `Linear`. Raises `UserError` if warmup > total."""
    return Linear(peak, total, warmup, end)


def cosine(peak: float, *, total: int, warmup: int = 0, end: float = 0.0) -> Cosine:
    """See `Cosine`. Raises `UserError` if warmup > total."""
    return Cosine(peak, total, warmup, end)


def wsd(peak: float, *, total: int, decay: int, warmup: int = 0, end: float = 0.0, form: str = "linear") -> WSD:
    """See `WSD`. Raises `UserError` if warmup + decay > total, and for an unknown form."""
    return WSD(peak, total, decay, warmup, end, form)


def inverse_sqrt(peak: float, *, warmup: int = 0, timescale: int | None = None, end: float = 0.0) -> InverseSqrt:
    """See `InverseSqrt`. Raises `UserError` for a timescale of 0 or less."""
    return InverseSqrt(peak, warmup, timescale, end)


def _warming(count: int, warmup: int) -> float:
    return min(1.0, (count + 1) / warmup) if warmup else 1.0


def _progress(count: int, start: int, stop: int) -> float:
    """0 up to `start`, 1 from `stop` on, a straight line between."""
    if count >= stop:
        return 1.0
    return (count - start) / (stop - start) if count > start else 0.0


def _check(name: str, **fields: float) -> None:
    for field, value in fields.items():
        if not (value >= 0 and math.isfinite(value)):
            raise UserError(f"{name} needs {field} of at least 0, but got {field}={value}")
    total = fields.get("total")
    used = fields.get("warmup", 0) + fields.get("decay", 0)
    if total is not None and used > total:
        what = "warmup + decay" if "decay" in fields else "warmup"
        raise UserError(f"{name} needs {what} of at most total={total}, but got {used}: raise total or lower it")
