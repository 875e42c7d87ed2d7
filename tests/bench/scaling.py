"""Several GPUs of one host: does every kind of parallelism compute the same function over NCCL, and how fast is it per GPU
beside one GPU, Megatron-core and what the planner predicts?

    python tests/bench/scaling.py --out scaling.json              # all GPUs of this host, 8 minutes, the parts by their value
    python tests/bench/scaling.py --gpus 4 --minutes 3 --parts data,tensor
    python tests/bench/scaling.py --gpus 2 --device cpu --small   # every part at tiny sizes on gloo, to see that it runs

Parts: check (layouts of each parallelism against one device, in float64), data (FSDP, ZeRO-1), tensor (TP with SP), context (sequences
of 32k tokens: ring, gather, Ulysses), experts (a mixture with its experts over all GPUs), pipeline (1F1B and zero-bubble); then
further layouts: check-more, check-bf16, drawn (at random). The work is the 3.02B of `fmegatron bench`, 4 × 4096 tokens for each GPU,
bfloat16, eager; Megatron-core takes part where it is installed (with transformer-engine).

Items run in processes that `fmegatron.launch` starts, each with a limit: one that fails or hangs is told and left out, and those
behind it begin anew. Times are medians of rounds, each of the slowest GPU. "rate" is the model's floating-point operations a second
of each GPU, as a part of what one reaches by itself (all at once, in the same run). "exposed" is time in which kernels of NCCL run
and nothing else does, in a traced step, the mean of the GPUs; waiting for peers counts, and so a pipeline's bubble. Multicast over
NVLink is off. The exit code is 1 where something failed or is wrong, whatever the aims say.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fmegatron.launch import launch, report_error  # noqa: E402
from tests.bench import scaling_items as items_of  # noqa: E402
from tests.bench.scaling_items import LARGE, PARTS, SMALL, Item, Job, Sizes  # noqa: E402

BEGIN = 120.0  # seconds that processes may take until their first item
LEAST = 30.0  # seconds without which no job begins
LEAVE = 15.0  # seconds that they may take to end
POLL = 0.2
GIB = float(1 << 30)
# Of NVLink, in NCCL, torch and NVSHMEM: not every host has it in order.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def main() -> int:
    a = _arguments()
    if a.job is not None:
        return _in_a_job(a.job)
    started, sizes = time.time(), SMALL if a.small else LARGE
    run = Run(a, sizes, started + 60 * a.minutes)
    jobs = items_of.jobs(a.parts, a.gpus, sizes, a.seed)
    planner = threading.Thread(target=run.predict, args=([i for job in jobs for i in job.items],), daemon=True)
    planner.start()
    for job in jobs:
        run.work(job)
        run.save(started)
    planner.join(10.0)
    print(report(run, sizes), flush=True)
    run.save(started)
    print(f"\nsaved {a.out}, logs in {run.folder}; {time.time() - started:.0f} s")
    return 1 if run.failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="2, 4 or 8; by default as many as there are")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, behind commas")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--only", help="items alone whose name contains this")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn layouts")
    parser.add_argument(
        "--hardware", default="h200", help="by which the planner predicts: of its table, or a TOML file"
    )
    parser.add_argument("--out", type=Path, default=Path("scaling.json"))
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)  # how this program starts itself
    a = parser.parse_args()
    a.parts = [p.strip() for p in a.parts.split(",") if p.strip()]
    if wrong := [p for p in a.parts if p not in PARTS]:
        parser.error(f"--parts {wrong[0]}: there is none; there are {', '.join(PARTS)}")
    if a.job is None:
        _check(a, parser)
    return a


def _check(a: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    import torch

    there = torch.cuda.device_count() if a.device == "cuda" else 0
    a.gpus = a.gpus or max((n for n in (2, 4, 8) if n <= there), default=2)
    if a.gpus not in (2, 4, 8):
        parser.error(f"--gpus {a.gpus}: must be 2, 4 or 8")
    if a.device == "cuda" and there < a.gpus:
        parser.error(f"--gpus {a.gpus}: this host has {there}: give fewer, or --device cpu --small")
    if a.device == "cpu" and not a.small:
        parser.error("--device cpu: give --small too, since the work is of the size of GPUs")
    if not a.out.absolute().parent.is_dir():
        parser.error(f"--out {a.out}: there is no folder {a.out.absolute().parent}: make it first")


def _in_a_job(path: Path) -> int:
    """The parent of a job's processes, and each of them."""
    job = json.loads(path.read_text(encoding="utf-8"))
    if "RANK" not in os.environ:
        return launch([sys.executable, str(Path(__file__).resolve()), "--job", str(path)], job["ranks"])
    try:
        from tests.bench.scaling_rank import main as work

        work(job)
    except BaseException as error:
        return report_error(error)
    return 0


# -------------------------------------------------------------------------------------------------------------- the jobs


class Run:
    """What has been found so far: rows by key, and what failed."""

    def __init__(self, a: argparse.Namespace, sizes: Sizes, end: float) -> None:
        self.a, self.sizes, self.end = a, sizes, end
        self.rows: dict[str, dict[str, Any]] = {}
        self.failures: list[str] = []
        self.notes: list[str] = []
        self.about: dict[str, str] = {}
        self.predicted: dict[str, dict[str, float]] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="fmegatron-scaling-"))
        self.numbers = iter(range(10_000))

    @property
    def left(self) -> float:
        return self.end - time.time()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def work(self, job: Job) -> None:
        """Runs a job, again without what failed, as long as there is time."""
        wanted = [i for i in job.items if self.a.only is None or self.a.only in i.name]
        todo = {i.key: i for i in wanted if i.key not in self.rows}
        while todo:
            what = f"{', '.join(dict.fromkeys(i.part for i in todo.values()))} on {job.ranks}"
            if self.left < (LEAST if self.a.device == "cuda" else 5.0):
                self.notes.append(f"{what}: no time for {len(todo)} of {len(job.items)} items")
                self.say(f"-- {self.notes[-1]}")
                return
            self.say(f"-- {what}: {len(todo)} items, {self.left:.0f} s left")
            before = len(todo)
            log = self._attempt(job, todo)
            if len(todo) == before:  # nothing was even begun
                self.failures.append(f"{what}: its processes did not begin")
                self.say(f"   {self.failures[-1]}\n{_tail(log)}")
                return

    def _attempt(self, job: Job, todo: dict[str, Item]) -> Path:
        """Starts the processes of a job once, and takes what they find out of `todo`; where they wrote."""
        number = next(self.numbers)
        out, log, path = (self.folder / f"{number}.{ending}" for ending in ("jsonl", "log", "json"))
        first = next(iter(todo.values())).part == "check" and len(self.a.parts) > 1
        until = min(self.end - 5.0, time.time() + (0.25 if first else 1.0) * 60 * self.a.minutes)
        told = {"ranks": job.ranks, "items": [dataclasses.asdict(i) for i in todo.values()], "until": until}
        told |= {"device": self.a.device, "small": self.a.small, "out": str(out)}
        path.write_text(json.dumps(told), encoding="utf-8")
        environment = {**os.environ, **NO_MULTICAST, "NCCL_DEBUG": "WARN", "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment |= dict(job.environment)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            environment.pop(name, None)
        command = [sys.executable, str(Path(__file__).resolve()), "--job", str(path)]
        with log.open("w") as file:
            process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
            )
            try:
                why = self._watch(process, out, todo)
            finally:
                _end(process)
        if (current := self._take(out, todo)) in todo:
            self._lost(todo.pop(current), why, log)
        return log

    def _lost(self, item: Item, why: str, log: Path) -> None:
        """An item during which its processes ended."""
        if self.left <= 0:
            self.notes.append(f"{item.part}: no time for {item.name}")
            return
        self.failures.append(f"{item.part}: {item.name}: {why or 'its processes ended'}")
        self.say(f"   {self.failures[-1]}\n{_tail(log)}")

    def _watch(self, process: subprocess.Popen, out: Path, todo: dict[str, Item]) -> str:
        """Waits for the processes of a job; in words, why they ended early, or ""."""
        began, current = time.time(), ""
        while process.poll() is None:
            time.sleep(POLL)
            now = self._take(out, todo)
            if now != current:
                began, current = time.time(), now
            limit = todo[current].limit if current in todo else BEGIN if todo else LEAVE
            if time.time() > min(began + limit, self.end):
                return f"took longer than {limit:.0f} s"
        return "" if process.returncode == 0 else f"the processes ended with {process.returncode}"

    def _take(self, out: Path, todo: dict[str, Item]) -> str:
        """Reads what a job has written so far; the key of the item under way, or ""."""
        current = ""
        for line in _lines(out):
            if "about" in line:
                self.about = line["about"]
            elif "begun" in line:
                current = line["begun"]
            elif "skipped" in line:
                if (item := todo.pop(line["skipped"], None)) is not None:
                    self.notes.append(f"{item.part}: no time for {item.name}")
            elif "row" in line:
                current = ""
                if todo.pop(line["key"], None) is not None:
                    self._keep(line["key"], line["row"])
        return current

    def _keep(self, key: str, row: dict[str, Any]) -> None:
        self.rows[key] = row
        told = row["part"], row["name"]
        if "failed" in row:
            self.notes.append(f"{row['part']}: {row['name']}: {row['failed']}")
            self.say(f"   {row['name']}: left out: {row['failed']}")
        elif row["kind"] == "check":
            if not row["ok"]:
                self.failures.append(f"{row['part']}: {row['message']}")
            self.say(f"   {row['error']:8.1e}  {row['seconds']:5.1f} s  {row['name']}{'' if row['ok'] else '  WRONG'}")
        else:
            times = " ".join(f"{n} {statistics.median(row[n]):.1f} ms" for n in ("backward", "step") if n in row)
            self.say(f"   {told[1]}: {times}, loss {row['loss']:.5f} ({row['seconds']:.0f} s)")

    def predict(self, items: Sequence[Item]) -> None:
        """What the planner says of each item, beside the work of the processes."""
        from fmegatron.plan import hardware

        machine = hardware(self.a.hardware)
        models: dict[Any, Any] = {}
        for item in items:
            if item.kind == "train" and item.key not in self.predicted:
                with contextlib.suppress(Exception):  # a table without predictions is better than none
                    self.predicted[item.key] = prediction(item, self.sizes, machine, models)

    def save(self, started: float) -> None:
        found = {"about": self.about, "gpus": self.a.gpus, "parts": self.a.parts, "seconds": time.time() - started}
        found |= {"rows": list(self.rows.values()), "predicted": dict(self.predicted), "failures": self.failures}
        found |= {
            "notes": self.notes,
            "aims": [dataclasses.asdict(x) for x in aims(self.rows, self.sizes, self.a.gpus)],
        }
        self.a.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may still grow."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def _tail(path: Path) -> str:
    """The end of what a job's processes wrote."""
    return path.read_text(encoding="utf-8", errors="replace")[-3000:]


def _end(process: subprocess.Popen) -> None:
    """Kills a job's parent, with which its processes die (see `fmegatron.launch`)."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def prediction(item: Item, sizes: Sizes, machine: Any, models: dict[Any, Any]) -> dict[str, float]:
    """The planner's milliseconds of a whole step and without its update, exposed milliseconds (with a pipeline's bubble),
    and GiB. models: those whose traces are known, by size."""
    import torch

    from fmegatron.models import Decoder
    from fmegatron.plan import Cluster, Model, Setting, estimate
    from fmegatron.precision import Precision
    from fmegatron.testing.layout import Layout

    layout = Layout.parse(item.layout)
    config = dataclasses.replace(sizes.dense if item.model == "dense" else sizes.experts, max_seq=item.seq)
    model = models.setdefault((item.model, item.seq), Model(Decoder(config)))
    precision = Precision(params=torch.bfloat16, reduce=torch.bfloat16)
    setting = Setting(layout, item.rows, item.seq, precision, torch.float32, torch.float32)
    found = estimate(model, setting, Cluster(machine, layout.world))
    spent, memory = found.spent, found.memory
    state = 0 if item.whole else memory.moments + memory.master  # which are not even made
    return {
        "step": 1e3 * spent.total,
        "backward": 1e3 * (spent.total - spent.optimizer),
        "exposed": 1e3 * (sum(spent.exposed.values()) + spent.bubble),
        "gib": (memory.total - state) / GIB,
    }


# ------------------------------------------------------------------------------------------------------------ the report


@dataclasses.dataclass(frozen=True)
class Aim:
    """What was to be reached. value: what was; None: not measured."""

    text: str
    value: float | None
    passed: bool | None


def ratio(row: dict[str, Any], rows: dict[str, dict[str, Any]], sizes: Sizes, what: str) -> float | None:
    """Floating-point operations a second for each GPU, as a part of one GPU's. what: "step" or "backward"."""
    item = Item(**{f.name: row[f.name] for f in dataclasses.fields(Item)})
    alone = rows.get(items_of.reference_of(item, sizes))
    if what not in row or alone is None or what not in alone or item.alone:
        return None
    one = Item(**{f.name: alone[f.name] for f in dataclasses.fields(Item)})
    share = items_of.flops_of(item, sizes) / item.ranks / items_of.flops_of(one, sizes)
    return share * statistics.median(alone[what]) / statistics.median(row[what])


def aims(rows: dict[str, dict[str, Any]], sizes: Sizes, gpus: int) -> list[Aim]:
    """The aims, and what of them was reached."""

    def rate(part: str, name: str, what: str) -> float | None:
        row = rows.get(f"{part}: {name}")
        return None if row is None else ratio(row, rows, sizes, what)

    def at_least(text: str, value: float | None, bound: float) -> Aim:
        return Aim(f"{text}: at least {bound:g} of one GPU's rate", value, None if value is None else value >= bound)

    found = [at_least(f"{name}, whole steps", rate("data", name, "step"), 0.95) for name in ("FSDP", "ZeRO-1")]
    ours, theirs = (rows.get(f"tensor: {who}TP=2 with SP") for who in ("", "Megatron-core "))
    for what, text in (("backward", "forward and backward"), ("step", "whole steps")):
        times = [statistics.median(r[what]) for r in (ours, theirs) if r is not None and what in r]
        value = times[0] / times[1] if len(times) == 2 else None
        text = f"TP=2 with SP, {text}: at most Megatron-core's time"
        found.append(Aim(text, value, None if value is None else value <= 1.0))
    ring = rate("context", "attention, ring", "backward")
    value = None if ring is None else 1 / ring
    text = f"ring attention of {sizes.long_seq} tokens: at most 1.1 of one GPU's time divided by {gpus}"
    found.append(Aim(text, value, None if value is None else value <= 1.1))
    found.append(at_least(f"experts, EP={gpus}", rate("experts", f"EP={gpus}", "backward"), 0.85))
    return found


def report(run: Run, sizes: Sizes) -> str:
    """Everything that was found, in words."""
    lines = ["", ", ".join(f"{n} {v}" for n, v in run.about.items()), ""]
    for part in items_of.CHECKS:
        some = [r for r in run.rows.values() if r["part"] == part and "ok" in r]
        if some:
            worst = max(some, key=lambda r: r["share"])
            lines.append(
                f"{part}: {len(some)} layouts on {run.a.gpus} in {worst['dtype']}, {sum(not r['ok'] for r in some)} wrong; the "
                f"worst error, {worst['error']:.1e}, is {worst['share']:.2g} of what is allowed ({worst['name']})"
            )
    table = [_HEAD, *(_cells(row, run, sizes) for row in run.rows.values() if "backward" in row)]
    if len(table) > 1:
        lines += ["", *_aligned(table), "", _LEGEND]
        lines += ["", "aims" + ("" if run.a.device == "cuda" else " (of GPUs; here nothing follows from them)") + ":"]
        for aim in aims(run.rows, sizes, run.a.gpus):
            word = "not measured" if aim.value is None else f"{'reached' if aim.passed else 'MISSED'} {aim.value:.3f}"
            lines.append(f"  {word:14} {aim.text}")
    lines += [f"left out: {x}" for x in run.notes] + [f"FAILED: {x}" for x in run.failures]
    return "\n".join(lines)


_HEAD = ["", "GPUs", "tokens/GPU", "fwd+bwd ms", "rate", "step ms", "rate", "exposed ms", "NCCL ms", "GiB"]
_HEAD += ["plan ms", "off", "plan exposed", "plan GiB", "loss"]
_LEGEND = (
    "rate: for each GPU, of one GPU's. exposed, NCCL: of a step (of forward and backward where there are no steps). plan: "
    "predicted, of\nthe same; its exposed time has a pipeline's bubble in it, as the measured one has."
)


def _cells(row: dict[str, Any], run: Run, sizes: Sizes) -> list[str]:
    def shown(x: float | None, form: str) -> str:
        return "" if x is None else format(x, form)

    what = "step" if "step" in row else "backward"
    key = Item(**{f.name: row[f.name] for f in dataclasses.fields(Item)}).key
    times = {n: statistics.median(row[n]) if n in row else None for n in ("backward", "step")}
    rates = {n: ratio(row, run.rows, sizes, n) for n in times}
    seen, plan = row.get("communication"), run.predicted.get(key, {})
    exposed, total = (None if not seen else statistics.fmean(c[n] for c in seen) for n in ("exposed", "total"))
    off = None if what not in plan else plan[what] / (times[what] or 1.0) - 1
    alone = row["layout"].split()[0] == "dp=1"
    return [
        row["name"],
        "1" if alone else str(row["ranks"]),
        f"{row['rows'] * row['seq'] // (1 if alone else row['ranks']):,}",
        shown(times["backward"], ".1f"),
        shown(rates["backward"], ".3f"),
        shown(times["step"], ".1f"),
        shown(rates["step"], ".3f"),
        shown(exposed, ".1f"),
        shown(total, ".1f"),
        shown(row["bytes"] / GIB if "bytes" in row else None, ".1f"),
        shown(plan.get(what), ".1f"),
        shown(off, "+.1%"),
        shown(plan.get("exposed"), ".1f"),
        shown(plan.get("gib"), ".1f"),
        f"{row['loss']:.5f}",
    ]


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    made = [
        "| "
        + " | ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(x, widths, strict=True)))
        + " |"
        for x in lines
    ]
    rule = "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|"
    return [made[0], rule, *made[1:]]


if __name__ == "__main__":
    sys.exit(main())
