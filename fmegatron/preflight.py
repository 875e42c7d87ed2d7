"""What can be said of a run's settings by looking at the disk alone. No torch here: a mistake is told before any
rank starts."""

from __future__ import annotations

import os
from pathlib import Path

from fmegatron.axes import parse_axes
from fmegatron.config import SETTINGS, PrecisionConfig, TrainConfig, load_config
from fmegatron.errors import UserError
from fmegatron.parallel.legality import Choice, Sizes, problem


def check_train(config: TrainConfig) -> None:
    """Raises UserError for settings that exclude each other, a run's folder that cannot be used, and data, a model or a
    tokenizer that is not there."""
    check_settings(config)
    check_out(config)
    check_same_data(config)
    if not config.resume:  # a run that goes on uses the data that it has made, and its own parameters
        check_init_from(config)
        check_data(config)
    check_mesh(config)


def check_settings(config: TrainConfig) -> None:
    """Raises UserError for settings of which one leaves the other without a meaning."""
    if config.init_from is not None and config.model is not None and not config.resume:
        raise UserError(
            f"--model {config.model} and --init-from {config.init_from} exclude each other: leave one of them out"
        )
    if config.init_from is None and config.resize_vocab is not None:
        raise UserError(
            f"--resize-vocab {config.resize_vocab} is for --init-from: a new model's vocabulary is --model-overrides.vocab"
        )
    if config.init_from is None and config.ignore_fields:
        raise UserError("--ignore-fields is for the config.json of --init-from: leave it out")
    check_optimizer(config)
    check_precision(config.precision)


def check_optimizer(config: TrainConfig) -> None:
    """Raises UserError for options of another optimizer or schedule than the one that is named."""
    o = config.optim
    belongs = {
        "muon-lr": (o.muon_lr is not None, "name", o.name, ("muon",)),
        "muon-adjust": (o.muon_adjust is not None, "name", o.name, ("muon",)),
        "momentum": (o.momentum is not None, "name", o.name, ("sgd", "adafactor", "muon")),
        "nesterov": (o.nesterov, "name", o.name, ("sgd",)),
        "wsd-form": (o.wsd_form is not None, "schedule", o.schedule, ("wsd",)),
        "decay": (o.decay is not None, "schedule", o.schedule, ("wsd",)),
    }
    for name, (given, setting, value, allowed) in belongs.items():
        if given and value not in allowed:
            raise UserError(
                f"--optim.{name} is for --optim.{setting} {' or '.join(allowed)}, but that is {value}: leave it out"
            )
    if config.precision.moments == "float8" and o.name not in ("adamw", "adam"):
        raise UserError(
            f"--precision.moments float8 is for --optim.name adamw or adam, but that is {o.name}: use bfloat16"
        )
    if o.nesterov and o.momentum == 0:
        raise UserError("--optim.nesterov needs an --optim.momentum above 0: leave one of them out")
    if o.min_lr > o.lr:
        raise UserError(f"--optim.min-lr {o.min_lr} is above --optim.lr {o.lr}: the schedule ends at the smaller one")


def check_precision(p: PrecisionConfig) -> None:
    """Raises UserError for formats that exclude each other."""
    if "float16" not in (p.params, p.compute):
        default = PrecisionConfig()
        for name in ("loss_scale", "loss_scale_initial", "loss_scale_window", "loss_scale_hysteresis"):
            if getattr(p, name) != getattr(default, name):
                raise UserError(
                    f"--precision.{name.replace('_', '-')} is for float16, and neither --precision.compute nor "
                    "--precision.params is float16: leave it out"
                )
    if p.loss_scale_minimum > p.loss_scale_initial:
        raise UserError(
            f"--precision.loss-scale-minimum {p.loss_scale_minimum} is above --precision.loss-scale-initial "
            f"{p.loss_scale_initial}: begin at the minimum or above"
        )
    if p.stochastic_rounding and p.params == "bfloat16" and p.master not in (None, "bfloat16"):
        raise UserError(
            f"--precision.stochastic-rounding takes the place of --precision.master {p.master}: leave one of them out"
        )
    if p.stochastic_rounding and "bfloat16" not in (p.params, p.moments):
        raise UserError(
            "--precision.stochastic-rounding rounds to bfloat16, and neither --precision.params nor --precision.moments "
            "is bfloat16: add one of them, or leave it out"
        )


def check_same_data(config: TrainConfig) -> None:
    """Raises UserError when a run that goes on is given other data, or a number that reads them in another way, without
    --other-data."""
    path = Path(config.out) / SETTINGS
    if not config.resume or config.other_data or not path.exists():
        return
    began = load_config(TrainConfig, path)
    for flag, was, now in (
        ("data", _absolute(began.data), _absolute(config.data)),
        ("text-key", began.text_key, config.text_key),
        ("eval.fraction", began.eval.fraction, config.eval.fraction),
    ):
        if was != now:
            raise UserError(
                f"--{flag} {now}: the run in --out {config.out} has had {was}: leave --{flag} out to go on with that, or "
                "add --other-data to go on with what is given now"
            )


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def check_mesh(config: TrainConfig) -> None:
    """Raises UserError for a layout that is illegal whatever the model is; the rest is asked when the model is known."""
    world = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else config.nproc
    layout = Choice(
        parse_axes(config.mesh or f"dp={world}", argument="--mesh"),
        config.sp,
        config.zero,
        config.store,
        context=config.cp,
        microbatches=config.batch.microbatches,
    )
    sizes = Sizes(batch_size=config.batch.size, seq_len=config.batch.seq_len, uneven=("batch", "seq"))
    if problem(layout, sizes, world=world) is not None:
        from fmegatron.train import check_layout  # what it proposes is legal for the model too

        check_layout(config, world)


def check_init_from(config: TrainConfig) -> None:
    """Raises UserError when --init-from names no folder of a Hugging Face model, or one without a tokenizer."""
    if config.init_from is None:
        return
    folder = Path(config.init_from)
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is no folder"
        raise UserError(
            f"--init-from {config.init_from} {what}: give a folder that transformers wrote by save_pretrained, with "
            "config.json, safetensors and tokenizer.json"
        )
    if config.tokenizer is None and not (folder / "tokenizer.json").is_file():
        raise UserError(f"--init-from {config.init_from} has no tokenizer.json: name one by --tokenizer")


def holds_run(out: Path) -> bool:
    """Has a run begun in this folder?"""
    return any((out / name).exists() for name in (SETTINGS, "checkpoints", "metrics.jsonl"))


def check_out(config: TrainConfig) -> None:
    """Raises UserError when the run's folder holds a run already (without --resume), none (with it), or cannot be
    written."""
    out = Path(config.out)
    existing = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--out {config.out}: {existing} is not a folder that can be written; name another folder")
    if config.resume and not holds_run(out):
        raise UserError(f"--resume: --out {config.out} holds no run; leave --resume out to start one there")
    if holds_run(out) and not config.resume:
        raise UserError(
            f"--out {config.out} holds a run already: add --resume to go on with it, or name another folder"
        )


def check_data(config: TrainConfig) -> None:
    """Raises UserError when --data or --tokenizer names nothing, or a .bin/.idx pair comes without a tokenizer."""
    tokenizer = None if config.tokenizer is None else Path(config.tokenizer)
    if tokenizer is not None and not (tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer).is_file():
        raise UserError(
            f"--tokenizer {config.tokenizer}: there is no such tokenizer; give a tokenizer.json or a folder with one"
        )
    if config.data is None or Path(config.data).exists():
        return
    pair = [config.data + end for end in (".bin", ".idx")]
    found = [name for name in pair if os.path.isfile(name)]
    if not found:
        raise UserError(
            f"--data {config.data}: there is no such file, folder or .bin/.idx pair; give the path of a JSONL or text file, "
            "a folder of text, or the prefix that fmegatron preprocess wrote"
        )
    if len(found) == 1:
        raise UserError(f"--data {config.data}: there is {found[0]}, but not the other of the pair; write both again")
    if tokenizer is None and config.init_from is None:
        raise UserError(
            f"--data {config.data} is tokenized already: name the tokenizer that made it, --tokenizer FOLDER, "
            "a folder with its tokenizer.json"
        )
