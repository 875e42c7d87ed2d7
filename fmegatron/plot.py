"""Charts as SVG, the loss curve above all, without a plotting library."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

Points = Sequence[tuple[float, float]]

TRAIN, VALIDATION, INK, GRID = "#2563a8", "#c4500c", "#333333", "#e3e3e3"


@dataclass(frozen=True)
class Series:
    """Points of a chart that belong together.

    name: in the legend; None: not there. width: of the line, in pixels; 0: no line. dots: a dot at each point.
    """

    name: str | None
    points: Points
    colour: str = TRAIN
    width: float = 2.0
    opacity: float = 1.0
    dashed: bool = False
    dots: bool = False


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
    series = []
    if train:
        last = smooth[-1 - len(smooth) // 100][1]
        series.append(Series(None, thinned(train), width=1, opacity=0.3))
        series.append(Series(f"training {last:.3f}", thinned(smooth)))
    if validation:
        name = f"validation {validation[-1][1]:.3f}"
        series.append(Series(name, validation, VALIDATION, width=1.5, dashed=True, dots=True))
    shown = [y for _, y in [*smooth, *validation]] or [1.0]
    lowest = min([y for _, y in train] + shown)
    size = {"width": width, "height": height}
    return chart(series, title=title, x_label="step", y_label=y_label, x_from=0.0, y_range=(lowest, max(shown)), **size)


def chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "step",
    y_label: str = "",
    x_from: float | None = None,
    y_range: tuple[float, float] | None = None,
    width: int = 800,
    height: int = 480,
) -> str:
    """An SVG picture of several lines, with axes, a grid and a legend.

    x_from: where the horizontal axis begins (default: the smallest x). y_range: what the vertical one encloses
    (default: all points); what lies outside is cut off.
    """
    every = [point for one in series for point in one.points] or [(1.0, 1.0)]
    left, right, top, bottom = 70, width - 24, 48, height - 56
    x_ticks = nice_ticks(min(x for x, _ in every) if x_from is None else x_from, max(x for x, _ in every), 8)
    low, high = (min(y for _, y in every), max(y for _, y in every)) if y_range is None else y_range
    y_ticks = nice_ticks(low, high, 7)

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x, y = point
        return (
            left + (right - left) * (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]),
            bottom - (bottom - top) * (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]),
        )

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
    middle = (left + right) / 2
    parts.append(f'<text x="{middle}" y="{height - 14}" text-anchor="middle">{escape(x_label)}</text>')
    middle = (top + bottom) / 2
    parts.append(
        f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">{escape(y_label)}</text>'
    )
    legend = []
    for one in series:
        places = [at(point) for point in one.points]
        if one.width:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            style = f'stroke="{one.colour}" stroke-width="{one.width:g}"'
            style += f' opacity="{one.opacity:g}"' if one.opacity < 1 else ""
            style += ' stroke-dasharray="5 3"' if one.dashed else ""
            parts.append(
                f'<polyline points="{path}" fill="none" stroke-linejoin="round" clip-path="url(#inside)" {style}/>'
            )
        if one.dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{one.colour}"/>' for x, y in places]
        if one.name is not None:
            legend.append((one.colour, one.name))
    reach = 18 + 7 * max((len(name) for _, name in legend), default=0)
    for row, (colour, text) in enumerate(legend):
        y = top + 22 + 22 * row
        parts.append(f'<rect x="{right - reach - 8}" y="{y - 11}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{right - reach + 12}" y="{y + 1}">{escape(text)}</text>')
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
