"""A loss curve as SVG, without a plotting library."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

Points = Sequence[tuple[float, float]]

TRAIN, VALIDATION, INK, GRID = "#2563a8", "#c4500c", "#333333", "#e3e3e3"


def loss_curve(
    train: Points,
    validation: Points = (),
    *,
    title: str = "Loss",
    y_label: str = "loss (nats per token)",
    width: int = 800,
    height: int = 480,
) -> str:
    """An SVG picture of (step, loss) points: training loss as it is (faint) and smoothed, validation as dots.

    Points that are not finite are left out. The picture reaches up to the largest smoothed or validation loss, so
    that one spike does not flatten the rest.
    """
    train = [(x, y) for x, y in train if math.isfinite(y)]
    validation = [(x, y) for x, y in validation if math.isfinite(y)]
    smooth = smoothed(train)
    left, right, top, bottom = 70, width - 24, 48, height - 56
    shown = [*smooth, *validation] or [(1.0, 1.0)]
    x_ticks = nice_ticks(0.0, max(x for x, _ in shown), 8)
    y_ticks = nice_ticks(min(y for _, y in [*shown, *train]), max(y for _, y in shown), 7)

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x, y = point
        return (
            left + (right - left) * (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]),
            bottom - (bottom - top) * (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]),
        )

    def line(points: Points, style: str) -> str:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, points))
        return f'<polyline points="{path}" fill="none" stroke-linejoin="round" clip-path="url(#inside)" {style}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<clipPath id="inside"><rect x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"/></clipPath>',
        f'<text x="{left}" y="28" font-size="16" font-weight="bold">{escape(title)}</text>',
    ]
    for tick, text in zip(x_ticks, tick_labels(x_ticks), strict=True):
        x, _ = at((tick, y_ticks[0]))
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="{GRID}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{text}</text>')
    for tick, text in zip(y_ticks, tick_labels(y_ticks), strict=True):
        _, y = at((x_ticks[0], tick))
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4.5:.1f}" text-anchor="end">{text}</text>')
    parts.append(f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="{INK}"/>')
    parts.append(f'<text x="{(left + right) / 2}" y="{height - 14}" text-anchor="middle">step</text>')
    middle = (top + bottom) / 2
    parts.append(
        f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">{escape(y_label)}</text>'
    )
    legend = []
    if train:
        parts.append(line(thinned(train), f'stroke="{TRAIN}" stroke-width="1" opacity="0.3"'))
        parts.append(line(thinned(smooth), f'stroke="{TRAIN}" stroke-width="2"'))
        legend.append((TRAIN, f"training {smooth[-1 - len(smooth) // 100][1]:.3f}"))
    if validation:
        parts.append(line(validation, f'stroke="{VALIDATION}" stroke-width="1.5" stroke-dasharray="5 3"'))
        for x, y in map(at, validation):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{VALIDATION}"/>')
        legend.append((VALIDATION, f"validation {validation[-1][1]:.3f}"))
    for row, (colour, text) in enumerate(legend):
        y = top + 22 + 22 * row
        parts.append(f'<rect x="{right - 150}" y="{y - 11}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{right - 130}" y="{y + 1}">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


def smoothed(points: Points, reach: int | None = None) -> list[tuple[float, float]]:
    """Mean of each point and its `reach` neighbours on either side (default: a hundredth of all), fewer at the ends."""
    reach = len(points) // 100 if reach is None else reach
    sums = list(itertools.accumulate((y for _, y in points), initial=0.0))
    result = []
    for i, (x, _) in enumerate(points):
        near = min(reach, i, len(points) - 1 - i)  # as many before as after, so that a slope is not shifted
        result.append((x, (sums[i + near + 1] - sums[i - near]) / (2 * near + 1)))
    return result


def thinned(points: Points, most: int = 1500) -> list[tuple[float, float]]:
    """At most about `most` of the points: of each run of neighbours the lowest and the highest, in order of step."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        chunk = points[start : start + size]
        kept += sorted({min(chunk, key=lambda p: p[1]), max(chunk, key=lambda p: p[1])})
    return kept


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` + 1 round numbers, a step of 1, 2 or 5 times a power of ten apart, that enclose low and high."""
    if high <= low:
        low, high = low - 0.5, low + 0.5
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most:
            break
    return [index * step for index in range(first, last + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """The ticks as text, all with the digits that tell neighbours apart; thousands as k, millions as M."""
    step = ticks[1] - ticks[0]
    largest = max(abs(tick) for tick in ticks)
    unit, suffix = (1e6, "M") if largest >= 2e6 else (1e3, "k") if largest >= 1e4 else (1.0, "")
    digits = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return [f"{tick / unit:.{digits}f}{suffix if tick else ''}" for tick in ticks]
