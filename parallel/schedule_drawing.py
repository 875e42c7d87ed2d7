"""A schedule's timeline and memory as a picture: in a terminal, plain or in colours, and as SVG."""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from fmegatron.parallel.schedule_simulation import Event, Timeline
from fmegatron.parallel.schedules import BACKWARD, FORWARD, INPUT, WEIGHT
from fmegatron.plot import nice_ticks, tick_labels

NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward by input", WEIGHT: "backward by weight"}
# For a rank's first stage and for its others, in the colours of a terminal (of 256) and of a picture.
TERMINAL = {FORWARD: (75, 110), BACKWARD: (114, 71), INPUT: (80, 37), WEIGHT: (221, 178)}
PICTURE = {
    FORWARD: ("#8db8e8", "#5b8fc7"),
    BACKWARD: ("#9fd39a", "#6bb068"),
    INPUT: ("#8fd6d2", "#55b0ab"),
    WEIGHT: ("#f2d27a", "#d9ab3c"),
}
INK, GRID = "#333333", "#e3e3e3"
LEVELS, PLAIN_LEVELS = " ▁▂▃▄▅▆▇█", "0123456789"


def draw(timeline: Timeline, *, width: int = 120, colour: bool = False, unicode: bool = True) -> str:
    """The timeline, a line per rank, and below it how much is alive on each, for a terminal of `width` columns.

    An action is its letter and its microbatch, F3, in small letters (f3) on every second stage of a rank.
    """
    ranks = timeline.schedule.ranks
    lead = max(len(f"rank {ranks - 1} "), len("rank 0 "))
    longest = max((len(_label(timeline, e)) for some in timeline.events for e in some), default=1)
    lengths = [e.end - e.start for some in timeline.events for e in some if e.end > e.start]
    total = timeline.makespan
    scale = 1.0
    if lengths:
        room = max(width - lead, 20) / total
        each = min(
            int(room * min(lengths)), longest + 1
        )  # columns of the shortest action: whole ones, if there are two
        scale = each / min(lengths) if each > 1 else room
    columns = max(round(total * scale), 1)
    idle, fill = ("·", "─") if unicode else (".", "-")
    lines = []
    for rank, some in enumerate(timeline.events):
        cells = [idle] * columns
        for e in _apart(timeline, some):
            start, end = round(e.start * scale), round(e.end * scale)
            if end <= start:
                continue
            label = _label(timeline, e)
            label = label if len(label) <= end - start else label[0]
            text = label.ljust(end - start, " " if colour else fill)
            if colour:
                shade = TERMINAL[e.action.kind][_chunk(timeline, e) % 2]
                cells[start] = f"\x1b[48;5;{shade};38;5;16m{text}\x1b[0m"
            else:
                cells[start] = text
            cells[start + 1 : end] = [""] * (end - start - 1)
        lines.append(f"rank {rank}".ljust(lead) + "".join(cells).rstrip())
    most = max(timeline.peaks, default=0.0)
    levels = LEVELS if unicode else PLAIN_LEVELS
    lines.append("")
    lines.append(f"residuals alive, {levels[-1]} = {most:g}")
    for rank in range(ranks):
        heights = _sampled(timeline.memory(rank), columns, scale)
        bars = "".join(levels[math.ceil(h / most * (len(levels) - 1)) if most else 0] for h in heights)
        lines.append(f"rank {rank}".ljust(lead) + bars.rstrip() + f"  peak {timeline.peaks[rank]:g}")
    return "\n".join(lines)


def svg(timeline: Timeline, *, title: str | None = None, width: int = 1200) -> str:
    """The same as an SVG picture: a row per rank, and below these a curve of what is alive on each."""
    schedule, total = timeline.schedule, timeline.makespan or 1.0
    title = f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} microbatches" if title is None else title
    left, right, top, row, curve = 70, width - 24, 62, 24, 34
    x_ticks = [t for t in nice_ticks(0.0, total, 10) if t <= total * (1 + 1e-9)]
    below = top + schedule.ranks * row + 54
    height = below + schedule.ranks * curve + 46

    def x(time: float) -> float:
        return left + (right - left) * time / total

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="24" font-size="16" font-weight="bold">{escape(title)}</text>',
    ]
    place = left
    for kind in (k for k in NAMES if any(e.action.kind == k for some in timeline.events for e in some)):
        parts.append(f'<rect x="{place}" y="36" width="14" height="14" fill="{PICTURE[kind][0]}"/>')
        parts.append(f'<text x="{place + 19}" y="48">{NAMES[kind]}</text>')
        place += 40 + 7 * len(NAMES[kind])
    for tick, text in zip(x_ticks, tick_labels(x_ticks), strict=True):
        parts.append(f'<line x1="{x(tick):.1f}" y1="{top}" x2="{x(tick):.1f}" y2="{height - 40}" stroke="{GRID}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{height - 24}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{(left + right) / 2}" y="{height - 8}" text-anchor="middle">time</text>')
    for rank, some in enumerate(timeline.events):
        y = top + rank * row
        parts.append(f'<text x="{left - 8}" y="{y + row / 2 + 4}" text-anchor="end">rank {rank}</text>')
        for e in _apart(timeline, some):
            shade = PICTURE[e.action.kind][min(_chunk(timeline, e), 1)]
            wide = x(e.end) - x(e.start)
            parts.append(
                f'<rect x="{x(e.start):.2f}" y="{y + 1}" width="{wide:.2f}" height="{row - 2}" fill="{shade}" '
                f'stroke="white" stroke-width="0.5"><title>{e.action}: {e.start:g} to {e.end:g}</title></rect>'
            )
            label = str(e.action.microbatch)
            if wide >= 7 * len(label):
                middle = (x(e.start) + x(e.end)) / 2
                parts.append(f'<text x="{middle:.1f}" y="{y + row / 2 + 4}" text-anchor="middle">{label}</text>')
    most = max(timeline.peaks, default=0.0) or 1.0
    parts.append(f'<text x="{left}" y="{below - 12}" font-weight="bold">residuals alive (at most {most:g})</text>')
    for rank in range(schedule.ranks):
        base = below + (rank + 1) * curve - 4
        points, level = [f"{left},{base}"], 0.0
        for time, alive in timeline.memory(rank):
            points += [f"{x(time):.1f},{base - (curve - 8) * level / most:.1f}"]
            points += [f"{x(time):.1f},{base - (curve - 8) * alive / most:.1f}"]
            level = alive
        points.append(f"{right},{base - (curve - 8) * level / most:.1f}")
        points.append(f"{right},{base}")
        parts.append(f'<polygon points="{" ".join(points)}" fill="#d9d4ea" stroke="#6a5fa8"/>')
        parts.append(f'<text x="{left - 8}" y="{base - 4}" text-anchor="end">{timeline.peaks[rank]:g}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _chunk(timeline: Timeline, e: Event) -> int:
    """Which of its rank's stages an action is of."""
    placement = timeline.schedule.placement
    return placement[: e.action.stage].count(placement[e.action.stage])


def _label(timeline: Timeline, e: Event) -> str:
    kind = e.action.kind.lower() if _chunk(timeline, e) % 2 else e.action.kind
    return f"{kind}{e.action.microbatch}"


def _apart(timeline: Timeline, some: tuple[Event, ...]) -> list[Event]:
    """A rank's events; a forward and a backward that overlap share their time by their own costs, to be seen both."""
    found: list[Event] = []
    for e in some:
        if e.action.joined and found and found[-1].start == e.start:
            own, other = timeline.costs.of((found[-1].action,)), timeline.costs.of((e.action,))
            middle = e.start + (e.end - e.start) * (own / (own + other) if own + other else 0.5)
            found[-1] = Event(found[-1].action, e.start, middle)
            e = Event(e.action, middle, e.end)
        found.append(e)
    return found


def _sampled(curve: list[tuple[float, float]], columns: int, scale: float) -> list[float]:
    """The most that is alive in each column."""
    heights, level, at = [0.0] * columns, 0.0, 0
    for time, alive in [*curve, (math.inf, 0.0)]:
        until = columns if time == math.inf else min(int(time * scale + 1e-9), columns)
        for column in range(at, until):
            heights[column] = max(heights[column], level)
        at, level = max(at, until), alive
        if at < columns:
            heights[at] = max(heights[at], level)
    return heights
