"""The command line: `fmegatron train | generate | export | preprocess | describe | verify | schedule | bench`.

Only the settings are imported here; a command's own module, and torch, is imported when the command runs.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fmegatron import config as settings
from fmegatron.config import ExportConfig, GenerateConfig, PreprocessConfig, TrainConfig, nearest_name
from fmegatron.errors import UserError
from fmegatron.launch import is_first_process, launch, report_error
from fmegatron.preflight import check_settings, check_train

C = TypeVar("C")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code: 0 done, 2 bad input (one line on standard error), else a crash."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    command, rest = arguments[0], arguments[1:]
    try:
        if command not in COMMANDS:
            raise UserError(f"unknown command {command!r}; did you mean {nearest_name(command, list(COMMANDS))!r}?")
        return COMMANDS[command](rest) or 0
    except KeyboardInterrupt:
        if is_first_process():
            print("fmegatron: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return report_error(error)


def train(arguments: Sequence[str]) -> int | None:
    """Train a language model."""
    start = time.monotonic()
    config = parse_train(arguments)
    check_train(config)
    if config.nproc > 1 and "RANK" not in os.environ:
        return launch([sys.executable, "-m", "fmegatron", "train", *arguments], config.nproc)
    from fmegatron.train import run

    return run(config, start=start)


def describe(arguments: Sequence[str]) -> int | None:
    """Show the parameters, sizes and layout that `train` with the same arguments would have."""
    config = parse_train(arguments, command="describe")
    check_settings(config)
    from fmegatron.job import describe

    return describe(config)


def generate(arguments: Sequence[str]) -> int | None:
    """Continue prompts with a trained model."""
    config = parse(GenerateConfig, "generate", arguments)
    if config.ranks() > 1 and "RANK" not in os.environ:
        return launch([sys.executable, "-m", "fmegatron", "generate", *arguments], config.ranks())
    from fmegatron.generate import run

    return run(config)


def export(arguments: Sequence[str]) -> int | None:
    """Write a checkpoint in another format, such as Hugging Face's."""
    config = parse(ExportConfig, "export", arguments)
    from fmegatron.export import run

    return run(config)


def preprocess(arguments: Sequence[str]) -> int | None:
    """Turn JSONL into Megatron-format .bin and .idx files."""
    config = parse(PreprocessConfig, "preprocess", arguments)
    from fmegatron.data.preprocess import preprocess
    from fmegatron.data.words import PREPROCESS, by_flags

    with by_flags(PREPROCESS):
        stats = preprocess(
            config.data,
            config.out,
            config.tokenizer,
            key=config.text_key,
            append_eod=config.append_eod,
            workers=config.workers,
        )
    print(
        f"{stats.documents:,} documents, {stats.tokens:,} tokens in {stats.seconds:.1f} s: {stats.prefix}.bin and .idx"
    )
    return 0


def verify(arguments: Sequence[str]) -> int | None:
    """Check that every layout of a model computes the same function."""
    from fmegatron.verify import VerifyConfig, run

    arguments = list(arguments)
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    return run(parse(VerifyConfig, "verify", arguments))


def bench(arguments: Sequence[str]) -> int | None:
    """Time training steps beside other libraries, in one run."""
    from fmegatron.bench.settings import BenchConfig

    config = parse(BenchConfig, "bench", arguments)
    from fmegatron.bench.run import run

    return run(config)


def schedule(arguments: Sequence[str]) -> int | None:
    """Draw a pipeline schedule, prove that it cannot hang, and tell its bubble and memory."""
    from fmegatron.schedule_command import ScheduleConfig, run

    arguments = list(arguments)
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--name", *arguments]
    return run(parse(ScheduleConfig, "schedule", arguments))


def plan(arguments: Sequence[str]) -> int | None:
    """Find the fastest layouts that fit, for GPUs that need not be there; tell where memory and time go."""
    from fmegatron.plan_command import PlanConfig, run

    return run(parse(PlanConfig, "plan", arguments))


COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "train": train,
    "generate": generate,
    "export": export,
    "preprocess": preprocess,
    "describe": describe,
    "verify": verify,
    "schedule": schedule,
    "plan": plan,
    "bench": bench,
}


def parse_train(arguments: Sequence[str], *, command: str = "train") -> TrainConfig:
    """The settings of `train`: defaults, then with --resume those of the run's folder, then the file of --config,
    then flags.

    `config` is None in the result: what the file said is in the other fields.

    Raises UserError for a bad file or a meaningless number; a bad flag exits with code 2 and a message.
    """
    flags = parse(TrainConfig, command, arguments)  # all flags are checked, and --help answered, before any file
    files: list[str | Path] = [] if flags.config is None else [flags.config]
    config = flags
    if files:
        config = parse(TrainConfig, command, arguments, default=settings.load_config(TrainConfig, files[0]))
    saved = Path(config.out) / settings.SETTINGS
    if config.resume and saved.is_file():
        default = settings.load_configs(TrainConfig, saved, *files)
        default = dataclasses.replace(default, out=config.out, resume=True)  # the folder may have been moved
        config = parse(TrainConfig, command, arguments, default=default)
    config = dataclasses.replace(config, config=None)
    settings.check_config(config)
    return config


def parse(cls: type[C], command: str, arguments: Sequence[str], *, default: C | None = None) -> C:
    """A config from flags. A bad flag exits with code 2; of several ranks only the first says why.

    Raises UserError for a value that is none of its flag's choices.
    """
    import tyro

    settings.check_choices(cls, arguments)

    options: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(
        cls,
        description=COMMANDS[command].__doc__ if command == "describe" else None,  # it shares the settings of train
        prog=f"fmegatron {command}",
        args=list(arguments),
        console_outputs=os.environ.get("RANK", "0") == "0",
        **options,
    )


def _usage() -> str:
    lines = ["usage: fmegatron COMMAND [flags]    (fmegatron COMMAND --help lists a command's flags)", ""]
    lines += [f"  {name:<12}{(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    return "\n".join(lines)
