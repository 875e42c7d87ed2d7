"""A picture of numbers by step and layer, such as how uneven the load of experts is, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

COLUMNS = 200  # at most; steps between are averaged
LEFT, TOP, BOTTOM, LEGEND = 60, 40, 40, 90


def heat_map(
    rows: Mapping[int, Sequence[tuple[int, float]]],
    *,
    title: str,
    low: float = 1.0,
    high: float | None = None,
    width: int = 800,
    row_height: int = 18,
) -> str:
    """An SVG picture of {layer: [(step, value), …]}: one row a layer, the first on top, steps to the right.

    low, high: the values of the lightest and of the darkest colour; None: the largest that is there.
    """
    every = [v for points in rows.values() for _, v in points if math.isfinite(v)]
    steps = [s for points in rows.values() for s, _ in points]
    first, last = (min(steps), max(steps)) if steps else (0, 1)
    high = max([low * 1.0001, *every]) if high is None else high
    columns = max(1, min(COLUMNS, last - first + 1))
    inner = width - LEFT - LEGEND
    cell = inner / columns
    height = TOP + BOTTOM + row_height * max(1, len(rows))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for n, (layer, points) in enumerate(sorted(rows.items())):
        y = TOP + n * row_height
        out.append(f'<text x="{LEFT - 8}" y="{y + row_height * 0.75:.1f}" text-anchor="end">{layer}</text>')
        cells: dict[int, list[float]] = {}
        for step, value in points:
            if math.isfinite(value):
                cells.setdefault((step - first) * columns // (last - first + 1), []).append(value)
        for column, values in cells.items():
            colour = _colour((sum(values) / len(values) - low) / (high - low))
            x = LEFT + column * cell
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{cell + 0.3:.1f}" height="{row_height}" fill="{colour}"/>')
    y = height - BOTTOM + 18
    out.append(f'<text x="{LEFT}" y="{y}">{first}</text>')
    out.append(f'<text x="{width - LEGEND}" y="{y}" text-anchor="end">step {last}</text>')
    for n in range(11):
        colour = _colour(n / 10)
        out.append(f'<rect x="{width - LEGEND + 12}" y="{TOP + 66 - 6 * n}" width="14" height="6" fill="{colour}"/>')
    out.append(f'<text x="{width - LEGEND + 32}" y="{TOP + 12}">{high:.2f}</text>')
    out.append(f'<text x="{width - LEGEND + 32}" y="{TOP + 72}">{low:.2f}</text>')
    return "\n".join([*out, "</svg>\n"])


def _colour(share: float) -> str:
    """From white (0) over orange to dark red (1)."""
    share = min(1.0, max(0.0, share))
    stops = ((255, 255, 255), (244, 165, 66), (128, 0, 20))
    n, t = (0, share * 2) if share < 0.5 else (1, share * 2 - 1)
    mixed = (round(a + (b - a) * t) for a, b in zip(stops[n], stops[n + 1], strict=True))
    return "#" + "".join(f"{c:02x}" for c in mixed)
