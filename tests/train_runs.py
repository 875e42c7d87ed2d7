"""Tiny training runs for the tests of `fmegatron train`, in this process or on the ranks of a pool."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fmegatron import cli, train
from fmegatron.report import Reporter

WORDS = "def return import self value print range list dict open file é ü 日本 loop while for in if else".split()
SIZES = {"layers": 2, "embed": 32, "heads": 4, "kv-heads": 2, "head": 8, "mlp": 48}


def write_corpus(path: Path, *, documents: int = 40, words: int = 40, seed: int = 0) -> Path:
    """JSON lines of random words, some of several bytes a character."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choice(WORDS) for _ in range(words)) + "\n" for _ in range(documents)]
    path.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts), encoding="utf-8")
    return path


def flags(data: Path | str, out: Path | str, *more: object, **settings: object) -> list[str]:
    """Arguments of a tiny run: --data, --out, sizes, then `more`; settings by keyword, optim_lr=… for --optim.lr."""
    sizes = [x for name, value in SIZES.items() for x in (f"--model-overrides.{name}", value)]
    return flags_of(data, out, *sizes, *more, **settings)


def flags_of(data: Path | str, out: Path | str, *more: object, **settings: object) -> list[str]:
    """`flags` without sizes of a model."""
    given = ["--data", data, "--out", out, "--tokenizer-vocab", 300, "--batch.size", 8, "--batch.seq-len", 16]
    given += ["--optim.warmup", 2, "--eval.batches", 2, "--log.no-tensorboard", "--device", "cpu"]
    rest = []
    for name, value in settings.items():
        rest += ["--" + name.replace("_", ".", 1).replace("_", "-"), value]
    return [str(x) for x in (*given, *rest, *more)]


class Killed(BaseException):
    """Stands for a SIGKILL: nothing of the run's own is done any more."""


def go(arguments: list[str], stop: tuple[int, str] | None = None) -> int | str:
    """`fmegatron train` on this process, or this rank of the process group that there is; the exit code.

    stop: (step, "SIGTERM" or "kill"): after that step's row is written, the first rank gets the signal, or all ranks are
    killed ("killed" is the result).
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        patch(stack, train, "measure_matmul_flops", lambda *_: 1e9)
        if stop is not None:
            patch(stack, Reporter, "step", _stopping(Reporter.step, *stop))
        try:
            return train.run_here(cli.parse_train(arguments), torch.device("cpu"), time.monotonic())
        except Killed:
            return "killed"


def patch(stack: contextlib.ExitStack, where: Any, name: str, value: Any) -> None:
    stack.callback(setattr, where, name, getattr(where, name))
    setattr(where, name, value)


def patch_item(stack: contextlib.ExitStack, where: dict[str, Any], name: str, value: Any) -> None:
    stack.callback(where.__setitem__, name, where[name])
    where[name] = value


def _stopping(step: Any, at: int, how: str) -> Any:
    def stopping(self: Reporter, number: int, **row: Any) -> None:
        step(self, number, **row)
        if number == at and how == "kill":
            raise Killed
        if number == at and (not dist.is_initialized() or dist.get_rank() == 0):
            os.kill(os.getpid(), getattr(signal, how))

    return stopping


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in rows(out) if "loss" in row]


def numbers(out: Path) -> list[dict[str, Any]]:
    """All rows without what depends on the clock."""
    return [{k: v for k, v in row.items() if k not in ("ms", "tokens_per_s", "mfu")} for row in rows(out)]
