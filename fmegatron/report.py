"""What a run tells: metrics.jsonl, TensorBoard, log.txt, a progress bar or lines, and the loss curve.

All of it is plain files in the run's folder; nothing is read back but metrics.jsonl, when a run goes on.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from fmegatron.heat_map import heat_map
from fmegatron.plot import loss_curve

if typing.TYPE_CHECKING:
    import torch


class Reporter:
    """Writes what happens in a run. Use as a context manager, or call `close`.

        with Reporter(out, steps=600, first_step=1, rank=rank) as report:
            report.print("…")
            report.step(1, loss=…, tokens=…, lr=…, grad_norm=…, ms=…)
            report.evaluation(100, val_loss=…)
            report.curve()

    A step's number counts from 1: it is the number of updates made when its row is written. `steps` is the last.
    `first_step` is the first that this attempt makes: rows of an earlier attempt from there on (it was killed after
    its last checkpoint) are dropped, so that every step appears once. With a `rank` other than 0 nothing is written or
    printed.

    `flops_per_token` (of the model, forward and backward) and `peak_flops` (floating-point operations a second that
    all devices together reach on a matrix product, see `measure_matmul_flops`) give model-FLOP utilisation.

    On a terminal a bar shows loss, speed and time left; elsewhere a line every `seconds` does. log.txt gets the lines.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        steps: int,
        first_step: int = 1,
        rank: int = 0,
        tensorboard: bool = True,
        seconds: float = 10.0,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.out = Path(out)
        self.steps, self.first_step, self.seconds = steps, first_step, seconds
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.train: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        self._active = rank == 0
        self._stream = stream or sys.stdout
        self._bar: _Bar | None = None
        self._board: Any = None
        if not self._active:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        self._log = open(self.out / "log.txt", "a", encoding="utf-8")
        for row in keep_rows_before(self.out / "metrics.jsonl", first_step):
            self._remember(row)
        keep_rows_before(self.out / "load.jsonl", first_step)
        self._metrics = open(self.out / "metrics.jsonl", "a", encoding="utf-8")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge = first_step if first_step > 1 else None
            self._board = SummaryWriter(str(self.out / "tensorboard"), purge_step=purge)
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def print(self, text: str = "") -> None:
        """Print the text, above the bar if there is one, and write it to log.txt."""
        if self._active:
            self._write_log(text)
            if self._bar:
                self._bar.print(text)
            else:
                self._say(text)

    def step(self, step: int, *, loss: Any, tokens: Any, ms: float, **more: Any) -> None:
        """Write the row of a training step and show progress.

        `loss`: mean over the global batch; `tokens`: those it was taken over; `ms`: the step's wall time. tokens_per_s
        and, if the FLOPs are known, mfu (a fraction) are added. Values are numbers or tensors of one element.
        """
        if not self._active:
            return
        row: dict[str, Any] = {"step": step, **numbers({"loss": loss, "tokens": tokens, **more, "ms": ms})}
        row["tokens_per_s"] = row["tokens"] / max(ms, 1e-6) * 1e3
        if self.flops_per_token and self.peak_flops:
            row["mfu"] = row["tokens_per_s"] * self.flops_per_token / self.peak_flops
        self._write(row)
        self._show(row)

    def evaluation(self, step: int, *, val_loss: Any, **more: Any) -> None:
        """Write the row of an evaluation made after `step` updates, and print it; once for each step."""
        if not self._active or (self.validation and self.validation[-1][0] >= step):
            return
        row = {"step": step, **numbers({"val_loss": val_loss, **more})}
        self._write(row)
        others = "".join(f"  {name} {_short(value)}" for name, value in row.items() if name not in ("step", "val_loss"))
        self.print(f"{self._step_text(step)}  validation loss {_short(row['val_loss'])}{others}")

    def curve(self, *, title: str = "Loss") -> Path:
        """Draw OUT/loss.svg from all steps of the run, those before a resume included, and give its path."""
        path = self.out / "loss.svg"
        if self._active:
            path.write_text(loss_curve(self.train, self.validation, title=title), encoding="utf-8")
        return path

    def load(self, step: int, tokens: Mapping[int, list[int]]) -> None:
        """Write a row of load.jsonl: how many tokens each expert got, {layer: a number for each}."""
        if self._active:
            row = {"step": step, "tokens": {str(layer): counts for layer, counts in tokens.items()}}
            with open(self.out / "load.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def load_map(self) -> Path | None:
        """Draw OUT/load.svg, how uneven the load of the experts was by step and layer, from all steps of the run, and give its
        path; None for a model without experts."""
        rows: dict[int, list[tuple[int, float]]] = {}
        path = self.out / "load.svg"
        if not self._active:
            return None
        for line in (self.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            for name, value in row.items():
                if name.startswith("max_load.") and value is not None:
                    rows.setdefault(int(name.removeprefix("max_load.")), []).append((row["step"], value))
        if not rows:
            return None
        path.write_text(heat_map(rows, title="Largest load of an expert over the mean, by layer"), encoding="utf-8")
        return path

    def end_progress(self) -> None:
        """Take the bar away: training is over, what is printed from here on is the end of the run."""
        if self._bar:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        """End the bar and close all files. A second call does nothing."""
        if self._active:
            self._active = False
            self.end_progress()
            self._metrics.close()
            self._log.close()
            if self._board:
                self._board.close()

    def _write(self, row: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(row, allow_nan=False) + "\n")
        self._metrics.flush()
        self._remember(row)
        if self._board:
            part = "validation" if "val_loss" in row else "train"
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self._board.add_scalar(f"{part}/{name}", value, row["step"])

    def _remember(self, row: Mapping[str, Any]) -> None:
        for name, points in (("loss", self.train), ("val_loss", self.validation)):
            if isinstance(row.get(name), int | float):
                points.append((row["step"], row[name]))

    def _show(self, row: dict[str, Any]) -> None:
        now = time.monotonic()
        step = row["step"]
        left = (now - self._started) / (step - self.first_step + 1) * (self.steps - step)
        loss = f"loss {_short(row['loss'])}"
        speed = [f"{_count(row['tokens_per_s'])} tokens/s"]
        if "mfu" in row:
            speed.append(f"MFU {100 * row['mfu']:.1f} %")
        speed.append(f"{_duration(left)} left")
        if self._stream.isatty():
            self._bar = self._bar or _Bar(self._stream, self.steps)
            self._bar.update(step, "  ".join([loss, *speed]))  # what a terminal of 80 columns has room for
        if step == self.first_step or step == self.steps or now - self._last_line >= self.seconds:
            self._last_line = now
            more = [f"lr {row['lr']:.2e}"] if "lr" in row else []
            more += [f"grad norm {_short(row['grad_norm'])}"] if "grad_norm" in row else []
            more += [f"loss scale {row['loss_scale']:g}"] if "loss_scale" in row else []
            more += ["skipped"] if row.get("skipped") else []
            line = "  ".join([self._step_text(step), loss, *more, *speed])
            self._write_log(line)
            if not self._bar:
                self._say(line)

    def _step_text(self, step: int) -> str:
        return f"step {step:>{len(str(self.steps))}}/{self.steps}"

    def _write_log(self, text: str) -> None:
        self._log.write(text + "\n")
        self._log.flush()

    def _say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class _Bar:
    """A progress bar at the bottom of a terminal."""

    def __init__(self, stream: TextIO, steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(10), TextColumn("{task.fields[text]}"))
        console = Console(file=stream, highlight=False, markup=False)
        self._progress = Progress(*columns, console=console, refresh_per_second=4, redirect_stdout=False)
        self._task = self._progress.add_task("", total=steps, text="")
        self._progress.start()

    def update(self, step: int, text: str) -> None:
        self._progress.update(self._task, completed=step, text=text)

    def print(self, text: str) -> None:
        self._progress.console.print(text, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def keep_rows_before(path: Path, first_step: int) -> list[dict[str, Any]]:
    """Drop the rows of a metrics file whose step is `first_step` or later, and a last line cut short by a kill.

    Gives the rows kept. The file is replaced in one move, so that a kill here loses nothing.
    """
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["step"] < first_step:
            kept.append(row)
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(part, path)
    return kept


def numbers(values: Mapping[str, Any]) -> dict[str, float | int | str | None]:
    """Values as JSON has them: tensors of one element become numbers, numbers that are not finite None."""
    result: dict[str, float | int | str | None] = {}
    for name, value in values.items():
        if hasattr(value, "item"):
            value = value.item()
        result[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return result


def measure_matmul_flops(device: torch.device | str, dtype: torch.dtype, *, seconds: float = 0.4) -> float:
    """Floating-point operations a second of one device on a square matrix product in `dtype`: what MFU refers to.

    The size doubles from 256 while a product takes less than 10 ms (or to 8192); the fastest product within `seconds`
    counts. It is what the machine reaches now, not what its maker states.
    """
    import torch

    device = torch.device(device)
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)

    def timed(a: torch.Tensor) -> float:
        repeats = 10 if device.type == "cuda" else 1  # launches are asynchronous: time several together
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            a @ a
        wait()
        return (time.perf_counter() - start) / repeats

    with torch.no_grad():
        size, best = 256, 0.0
        end = time.perf_counter() + seconds
        a = torch.ones(size, size, device=device, dtype=dtype)
        timed(a)  # the first product loads the library
        while time.perf_counter() < end or best == 0.0:
            took = min(timed(a) for _ in range(3))  # one alone may have waited for a core
            best = max(best, 2 * size**3 / took)
            if took < 0.01 and size < 8192:
                size *= 2
                a = torch.ones(size, size, device=device, dtype=dtype)
    return best


def _short(value: float | int | str | None) -> str:
    return "not finite" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _count(value: float) -> str:
    """A number with three digits: 950, 12.3k, 1.05M."""
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{suffix}" if value < 999.5 * unit else f"{value / unit:.0f}{suffix}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
