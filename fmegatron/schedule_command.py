"""`fmegatron schedule NAME`: draws a pipeline's schedule, proves that it cannot hang, and tells its bubble and memory.

fmegatron schedule 1f1b --stages 4 --microbatches 8
fmegatron schedule interleaved --stages 4 --microbatches 8 --virtual 2 --svg schedule.svg
fmegatron schedule zbv --stages 8 --microbatches 32 --costs f=1,b=1.1,w=0.9,comm=0.05
fmegatron schedule zbv --stages 8 --microbatches 32 --costs f=1,b=1.4,w=0.7 --place-weights --out mine.txt
fmegatron schedule --file mine.txt
fmegatron schedule all --stages 8 --microbatches 32           # a table of all of them
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fmegatron.errors import UserError
from fmegatron.parallel import schedule_text
from fmegatron.parallel.schedule_check import Residuals, check
from fmegatron.parallel.schedule_communication import with_communication
from fmegatron.parallel.schedule_drawing import draw, svg
from fmegatron.parallel.schedule_placing import place_weights
from fmegatron.parallel.schedule_simulation import Costs, Timeline, parse_costs, simulate
from fmegatron.parallel.schedule_theory import theory
from fmegatron.parallel.schedules import SCHEDULES, Schedule, make_schedule


@dataclass(frozen=True)
class ScheduleConfig:
    """Draw a pipeline schedule, prove that it is complete and cannot hang, and tell its bubble and memory.

    fmegatron schedule 1f1b --stages 4 --microbatches 8
    """

    name: str | None = None
    """gpipe, 1f1b, interleaved, bfs, zbh1, zbv or dualpipev; all: a table of them; None: 1f1b, or the table of --file."""
    stages: int = 4
    """Ranks of the pipeline."""
    microbatches: int = 8
    """Microbatches of a step."""
    virtual: int | None = None
    """Stages of the model on each rank, for interleaved and bfs; None: 2."""
    group: int | None = None
    """Microbatches that run through one stage of a rank before its next stage has its turn, for interleaved; None: as
    many as there are ranks, or a little more where that does not divide the microbatches."""
    costs: str = "f=1,b=1,w=1,comm=0"
    """What a stage takes for a microbatch: f forward, b backward by input, w backward by weight, comm a message, fb a
    forward and a backward that overlap, gather, reduce, a2a the exchanges of experts, which such a pair hides; f=1:1:1:2 gives every stage its own. With all: of everything on
    a rank."""
    after_input: float = 1.0
    """What a microbatch keeps between backward by input and backward by weight, if it keeps 1 after its forward."""
    place_weights: bool = False
    """Put the backwards by weight where these costs leave a rank waiting, within the memory that the schedule has anyway."""
    file: str | None = None
    """A table of your own to take instead; see --out for how one looks."""
    out: str | None = None
    """Write the table, with its sends and receives, to this file."""
    svg: str | None = None
    """Write the picture to this file."""
    width: int | None = None
    """Columns of the picture in the terminal; None: those that there are."""


def run(config: ScheduleConfig) -> int:
    """Draw what was asked for. Raises UserError for a schedule that is not there, not complete, or would hang."""
    costs = parse_costs(config.costs)
    if not 0 <= config.after_input < float("inf"):
        raise UserError(f"--after-input {config.after_input:g} must be finite and not negative")
    if config.name == "all":
        print(_table(config, costs))
        return 0
    residuals = Residuals(1.0, config.after_input)
    plain = _schedule(config)
    if config.place_weights:
        plain = place_weights(plain, costs, residuals=residuals)
    schedule = plain if plain.communicates else with_communication(plain, costs)
    report = check(schedule, residuals=residuals, backward=_has_backward(schedule))
    timeline = simulate(schedule, costs, residuals=residuals)
    if config.out is not None:
        _write(config.out, schedule_text.format(schedule), "--out")
    if config.svg is not None:
        _write(config.svg, svg(timeline), "--svg")
    width = config.width or shutil.get_terminal_size((120, 24)).columns
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    unicode = (sys.stdout.encoding or "ascii").lower().replace("-", "") == "utf8"
    print(draw(timeline, width=width, colour=colour, unicode=unicode))
    text = "\n".join(["", *_summary(config, costs, timeline), f"complete, and cannot hang: {report.messages} messages"])
    print(text if unicode else text.translate({ord("−"): "-", ord("÷"): "/", ord("·"): "*"}))
    return 0


def _schedule(config: ScheduleConfig) -> Schedule:
    if config.file is None:
        name = "1f1b" if config.name is None else config.name
        return make_schedule(name, config.stages, config.microbatches, virtual=config.virtual, group=config.group)
    if config.name is not None:
        raise UserError(f"schedule {config.name} and --file {config.file}: give one of them")
    try:
        return schedule_text.read(config.file)
    except UserError as error:
        raise UserError(f"--file {error}") from None


def _summary(config: ScheduleConfig, costs: Costs, timeline: Timeline) -> list[str]:
    schedule = timeline.schedule
    lines = [
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches",
        f"step {timeline.makespan:.6g}, work of the busiest rank {max(timeline.busy):.6g}, "
        f"bubble {timeline.idle:.6g}, {100 * timeline.bubble:.3g} % of that work",
        f"residuals alive at most: {', '.join(f'{x:g}' for x in timeline.peaks)} (ranks in order)",
    ]
    known = None
    if config.file is None and not config.place_weights:
        virtual = schedule.stages // schedule.ranks
        known = theory(
            schedule.name,
            schedule.ranks,
            schedule.microbatches,
            virtual=virtual,
            group=config.group,
            costs=costs,
        )
    if known is not None and known.idle is not None:
        what, here = "bubble", timeline.idle
        if known.span:
            what, here = "idle time between a rank's first and last action", timeline.span_idle
        lines.append(f"published {what}: {known.formula}, here {known.idle:.6g}; simulated {here:.6g} ({known.source})")
    return lines


def _table(config: ScheduleConfig, costs: Costs) -> str:
    """All schedules of these sizes, one a line; a rank's work is the same in each."""
    if config.file is not None or config.svg is not None or config.out is not None or config.place_weights:
        raise UserError(
            "schedule all draws nothing: leave --file, --svg, --out and --place-weights away, or name one schedule"
        )
    if any(isinstance(t, Sequence) for t in vars(costs).values()):
        raise UserError(f"--costs {config.costs}: schedule all has other stages in every row; give one number for each")
    lines = [f"{'schedule':<12}{'stages':>7}{'step':>10}{'bubble':>9}{'peak':>8}   (residuals of all stages of a rank)"]
    for name in SCHEDULES:
        options = {"virtual": config.virtual} if name in ("interleaved", "bfs") else {}
        options |= {"group": config.group} if name == "interleaved" else {}
        plain = make_schedule(name, config.stages, config.microbatches, **options)
        each = plain.stages // plain.ranks
        own = replace(
            costs,
            **{n: t / each for n, t in vars(costs).items() if n != "communication" and t is not None},
        )
        schedule = with_communication(plain, own)
        timeline = simulate(schedule, own, residuals=Residuals(1 / each, config.after_input / each))
        check(schedule)
        lines.append(
            f"{name:<12}{schedule.stages:>7}{timeline.makespan:>10.5g}{100 * timeline.bubble:>8.1f}%{max(timeline.peaks):>8.4g}"
        )
    return "\n".join(lines)


def _has_backward(schedule: Schedule) -> bool:
    return any(a.kind in "BIW" for program in schedule.programs for a in program)


def _write(path: str, text: str, flag: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be written: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command alone: `python -m fmegatron.schedule_command 1f1b --stages 4`."""
    from fmegatron.cli import parse
    from fmegatron.launch import report_error

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--name", *arguments]
    try:
        return run(parse(ScheduleConfig, "schedule", arguments))
    except Exception as error:
        return report_error(error)


if __name__ == "__main__":
    sys.exit(main())
