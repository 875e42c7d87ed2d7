"""The benchmark's bars, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from fmegatron.bench.report import Row
from fmegatron.bench.works import Work
from fmegatron.plot import GRID, INK, TRAIN, VALIDATION, nice_ticks, tick_labels


def bars(rows: Sequence[Row], work: Work, *, title: str, width: int = 920) -> str:
    """Milliseconds of each row: forward and backward as a full bar, the whole step as a faint one behind it. Peers have
    another colour."""
    left, right, top, each = 350, width - 110, 76, 38
    bottom = top + each * len(rows)
    longest = [max(row.backward.median, row.whole.median if row.whole else 0.0) for row in rows]
    ticks = nice_ticks(0.0, max(longest, default=1.0), 8)
    scale = (right - left) / ticks[-1]
    height = bottom + 56
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="16" y="28" font-size="16" font-weight="bold">{escape(title)}</text>',
        f'<text x="16" y="50">forward and backward (full), whole step (faint): {work.tokens:,} tokens; shorter is faster</text>',
    ]
    for tick, text in zip(ticks, tick_labels(ticks), strict=True):
        x = left + scale * tick
        parts.append(f'<line x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{bottom}" stroke="{GRID}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{text}</text>')
    for number, row in enumerate(rows):
        y, colour = top + each * number, VALIDATION if row.peer else TRAIN
        parts.append(
            f'<text x="{left - 10}" y="{y + 20}" text-anchor="end">{escape(f"{row.name}, {row.precision}")}</text>'
        )
        if row.whole is not None:
            parts.append(_bar(left, y, scale * row.whole.median, colour, 0.3))
        parts.append(_bar(left, y, scale * row.backward.median, colour, 1.0))
        shown = [row.backward.median, *([row.whole.median] if row.whole is not None else [])]
        x = left + scale * max(shown) + 8
        parts.append(f'<text x="{x:.1f}" y="{y + 20}">{" / ".join(f"{ms:.1f}" for ms in shown)}</text>')
    parts.append(f'<text x="{(left + right) / 2}" y="{height - 12}" text-anchor="middle">milliseconds (median)</text>')
    return "\n".join([*parts, "</svg>", ""])


def _bar(left: float, y: float, length: float, colour: str, opacity: float) -> str:
    return f'<rect x="{left}" y="{y + 4}" width="{length:.1f}" height="24" fill="{colour}" opacity="{opacity:g}"/>'
