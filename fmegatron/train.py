"""`fmegatron train`: from text and settings to a trained model.

`run` joins the ranks, prepares the data, makes or loads the state (job.py has the parts), and hands all of it to a
`Loop`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fmegatron import checkpoint, job, preflight, tree
from fmegatron.config import SETTINGS, TrainConfig, load_config, save_config
from fmegatron.context import Ctx
from fmegatron.data import (
    TokenDataset,
    Tokenizer,
    bits_per_byte,
    load_tokenizer,
    prepare,
    prepared,
    unigram_entropy,
    words,
)
from fmegatron.data.prepare import Prepared
from fmegatron.data.words import by_flags
from fmegatron.debug import explain_step
from fmegatron.dtensor import DTensor
from fmegatron.errors import UserError
from fmegatron.feeding import Prefetched, fetched
from fmegatron.fp8 import scaling as fp8
from fmegatron.generate import generate_tokens, most_tokens, prompt_ids
from fmegatron.job_model import export_problem, model_name, resumed_model
from fmegatron.job_optim import ADAMS, optimizer_form
from fmegatron.launch import close_distributed, init_distributed
from fmegatron.models import DecoderConfig, config_from_dict, config_to_dict, mtp
from fmegatron.models.hf import GENERATION, TOKENIZER_FILES
from fmegatron.models.moe import load_metrics, unread_counts
from fmegatron.offload import settle
from fmegatron.optim import ema_params
from fmegatron.parallel.routing_record import whole_record, write_record
from fmegatron.precision import dtype_name
from fmegatron.replicas import ReplicaError, check_replicas
from fmegatron.report import Reporter, measure_matmul_flops
from fmegatron.sharding import Sharding
from fmegatron.signals import StopSignals, stop_signals
from fmegatron.spec import count, local_bytes
from fmegatron.step import NonFiniteError, TrainState, evaluate

T = TypeVar("T")
Load = tuple[list[int], torch.Tensor]  # layers, and how many tokens each expert of each got: [layer route]
SAMPLE_PROMPT = "def "  # for the built-in corpus
SAMPLE_TOKENS = 80
SAMPLE_BYTES = 1 << 31  # parameters up to this size are brought together on the first rank for a sample
PATIENCE = datetime.timedelta(days=7)  # how long ranks wait for the first one to prepare the data


def run(config: TrainConfig, *, start: float | None = None) -> int:
    """Train as the settings say; the exit code. Every rank calls it.

    start: time.monotonic() from which times are counted.
    Raises UserError for bad input, with nothing written.
    """
    start = time.monotonic() if start is None else start
    preflight.check_train(config)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    job.check(config, world, first_sizes(config, newest_checkpoint(config)))  # before ranks are joined: at once
    device = init_distributed(config.device)
    try:
        return run_here(config, device, start)
    finally:
        close_distributed()


def run_here(config: TrainConfig, device: torch.device, start: float) -> int:
    """`run` on the ranks of a process group that exists already, or on one process."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    check_recorded(config, device, world)
    out = Path(config.out)
    with nothing_left_behind(out, rank):
        begun = newest_checkpoint(config)
        sizes = first_sizes(config, begun)
        setup = job.make_setup(config, device, world, sizes=sizes)
        if begun is not None:
            check_same_optimizer(config, begun, setup)
        data = on_first_rank(lambda: prepare_data(config, begun))
        if begun is None:
            sizes = job.model_config(config, data.vocab_size)
            job.check_sizes(config, world, sizes)  # of the vocabulary that its text has now
        tokenizer = load_tokenizer(data.tokenizer_path)
        train, valid = open_data(config, data)
        run_ = job.make_run(config, sizes, setup)
        state = job.initial_state(config, run_) if begun is None else saved_state(config, run_, begun)
        on_first_rank(lambda: job.check_replay(config, state.step))
    peak = measure_matmul_flops(device, setup.precision.compute_dtype)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        name = None if config.init_from else model_name(config)
        save_config(dataclasses.replace(config, resume=False, other_data=False, model=name), out / SETTINGS)
    with (
        Reporter(
            out,
            steps=config.steps,
            first_step=state.step + 1,
            rank=rank,
            tensorboard=config.log.tensorboard,
            seconds=config.log.seconds,
            flops_per_token=run_.model.flops_per_token(config.batch.seq_len),
            peak_flops=peak * world,
        ) as report,
        stop_signals() as stop,
    ):
        loop = Loop(config, run_, report, stop, train, valid, data, tokenizer, start)
        loop.introduce(state, peak, world, begun)
        try:
            state = loop.train(state)
        except NonFiniteError as error:
            loop.tell_non_finite(error)
            return 1
        except ReplicaError as error:
            loop.tell_replicas(error)
            return 1
        report.end_progress()
        if state.step == config.steps and loop.finish(state):
            return 0
        if state.step == config.steps:
            report.print(
                f"stopped by {stop.asked} in the last evaluation; all steps are made and saved in {loop.saved}"
            )
        else:
            again = f"fmegatron train --out {shlex.quote(config.out)} --resume"
            report.print(f"stopped by {stop.asked} after step {state.step}; go on with: {again}")
    return 0


# ------------------------------------------------------------------------------------------------------- before the
# steps


def check_recorded(config: TrainConfig, device: torch.device, world: int) -> None:
    """Raises UserError where --recorded cannot record a step."""
    if not config.recorded:
        return
    half = "float16" in (config.precision.params, config.precision.compute)
    for wrong, fix in (
        (world > 1, f"records a step of one rank, and this run has {world}, whose messages it cannot: leave it out"),
        (
            device.type == "cpu" and config.compile,
            "records what compiled code does on a GPU alone: leave it or --compile out",
        ),
        (config.debug, "plays steps in which --debug sees nothing: leave one of them out"),
        (half, "cannot record a loss scale, which the host decides: use bfloat16 in place of float16"),
        (config.offload_optimizer, "records the memory of one device: leave it or --offload-optimizer out"),
        (config.optim.name not in ADAMS, f"records adamw and adam, not --optim.name {config.optim.name}: leave it out"),
    ):
        if wrong:
            raise UserError(f"--recorded {fix}")


def newest_checkpoint(config: TrainConfig) -> checkpoint.Info | None:
    """With --resume the checkpoint to go on from; None where a run has to begin at its first step.

    Raises UserError when all checkpoints are damaged, or the newest has all steps behind it.
    """
    if not config.resume:
        return None
    if not any(Path(config.out, "checkpoints").glob("step_*")):
        return None  # it was killed before its first checkpoint
    found = checkpoint.info(config.out)
    if found.step >= config.steps:
        raise UserError(
            f"--steps {config.steps}: {found.path} has made {found.step} steps already; raise --steps to go on"
        )
    return found


def first_sizes(config: TrainConfig, begun: checkpoint.Info | None) -> DecoderConfig:
    """The model of a run as far as it is known before its data are prepared: its vocabulary may still be the
    preset's. Raises UserError for a model that the settings do not allow."""
    check_same_source(config)
    if begun is not None:
        return check_same_model(config, begun)
    given = config.tokenizer or config.init_from
    return job.model_config(config, None if given is None else load_tokenizer(given).vocab_size)


def check_layout(config: TrainConfig, world: int) -> None:
    """Raises UserError for a layout that the run's model, as far as it is known, does not allow on so many ranks."""
    job.check_sizes(config, world, first_sizes(config, newest_checkpoint(config)))


def check_same_model(config: TrainConfig, begun: checkpoint.Info) -> DecoderConfig:
    """The sizes of the run's model. Raises UserError when the settings ask for others than the checkpoint holds."""
    wanted = resumed_model(config, config_from_dict(begun.meta["model"]), str(begun.path))
    dtype = begun.tensors["params.embed"][1]
    if dtype != config.precision.params:
        raise UserError(
            f"--precision.params {config.precision.params}: {begun.path} holds {dtype}; leave it out or name another --out"
        )
    return wanted


def check_same_source(config: TrainConfig) -> None:
    """Raises UserError when a run that goes on is said to have begun from another --init-from than it did."""
    path = Path(config.out) / SETTINGS
    if not config.resume or not path.exists():
        return
    source = load_config(TrainConfig, path).init_from
    if _absolute(source) != _absolute(config.init_from):
        began = f"began from --init-from {source}" if source else "did not begin from a Hugging Face folder"
        raise UserError(f"--init-from {config.init_from}: the run in --out {config.out} {began}: leave --init-from out")
    if source is not None and config.model is not None:
        raise UserError(
            f"--model {config.model}: the run in --out {config.out} began from --init-from {source}: leave --model out"
        )


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def check_same_optimizer(config: TrainConfig, begun: checkpoint.Info, setup: job.Setup) -> None:
    """Raises UserError when the settings ask for an optimizer whose state is not the checkpoint's."""
    saved = begun.meta.get("optimizer")  # older checkpoints do not say
    for flag, value in optimizer_form(config, setup.precision).items():
        if saved is not None and saved.get(flag) != value:
            raise UserError(
                f"--{flag}: {begun.path} was trained with {saved.get(flag)}, not {value}: leave --{flag} as it was, "
                "or name another --out"
            )


def saved_state(config: TrainConfig, run: job.Run, begun: checkpoint.Info) -> TrainState:
    """The state of a checkpoint. A run that turns to float16, or to another fixed loss scale, begins with that one; one that
    turns to delayed fp8 scaling, or to a longer or shorter history, begins with none."""
    scaled = "loss_scale.scale" in begun.values
    extras = fp8.abstract(begun.tensors)
    state = checkpoint.load(
        begun.path, job.abstract_state(config, run, scaled=scaled, extras=extras), device=run.setup.device
    )
    state = dataclasses.replace(state, extras=fp8.resumed(state.extras, job.first_extras(run)))
    if run.scaling is None:
        return state
    new, old = run.scaling.init(), state.loss_scale
    if old is None:
        state = dataclasses.replace(state, loss_scale=new)
    elif isinstance(config.precision.loss_scale, float) and old.scale != new.scale:
        state = dataclasses.replace(state, loss_scale=dataclasses.replace(new, skipped=old.skipped))
    return state


def prepare_data(config: TrainConfig, begun: checkpoint.Info | None) -> Prepared:
    """The token files of a run, made from its text or left from before.

    A run that goes on keeps its tokenizer, and its token files too unless other data are named now: the text that they
    were made from need not be there any more. Raises UserError for bad data, or another tokenizer than the
    checkpoint's.
    """
    folder = Path(config.out) / "data"
    tokenizer: str | Path | None = config.tokenizer or config.init_from
    if begun is not None:
        found = prepared(folder)
        if found is not None and _same_data(config):
            _check_tokenizer(found.tokenizer_path, begun)
            return found
        if (folder / "tokenizer").is_dir() and (config.tokenizer is None or _same_data(config)):
            tokenizer = folder / "tokenizer"
        if tokenizer is not None:
            _check_tokenizer(tokenizer, begun)
    with by_flags(words.TRAIN):
        result = prepare(
            config.data,
            folder,
            tokenizer=tokenizer,
            vocab_size=config.tokenizer_vocab,
            text_key=config.text_key,
            valid_fraction=config.eval.fraction,
            workers=max(1, (os.cpu_count() or 1) // 2),
        )
    if begun is not None:
        _check_tokenizer(result.tokenizer_path, begun)
    elif tokenizer is not None:
        carry_files(Path(tokenizer), Path(result.tokenizer_path), generation=config.tokenizer is None)
    return result


def carry_files(source: Path, target: Path, *, generation: bool) -> None:
    """Copy the files that came with a tokenizer and that an export will want, where they are not there already.

    generation: also the defaults of text generation that came with a model.
    """
    for name in (*TOKENIZER_FILES, *([GENERATION] if generation else [])):
        if source.is_dir() and (source / name).is_file() and not (target / name).exists():
            shutil.copyfile(source / name, target / name)


def _same_data(config: TrainConfig) -> bool:
    """Do the settings name the data and the tokenizer that the run in `out` began with?"""
    path = Path(config.out) / SETTINGS
    if not path.exists():
        return True

    def of(c: TrainConfig) -> tuple:
        return c.data, c.tokenizer, c.tokenizer_vocab, c.text_key, c.eval.fraction

    return of(load_config(TrainConfig, path)) == of(config)


def _check_tokenizer(path: str | Path, begun: checkpoint.Info) -> None:
    if fingerprint(load_tokenizer(path)) != begun.meta["tokenizer_fingerprint"]:
        raise UserError(
            f"--tokenizer {path} is not the one that {begun.path} was trained with: leave --tokenizer out, "
            "or start a new run in another --out"
        )


def fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of all that makes text into ids."""
    return hashlib.blake2b(tokenizer.backend.to_str().encode(), digest_size=16).hexdigest()


def open_data(config: TrainConfig, data: Prepared) -> tuple[TokenDataset, TokenDataset]:
    """(training data in their order, held-out data in sequence). Raises UserError for sequences longer than the
    data."""
    length, name = config.batch.seq_len, config.data or "the standard library"
    if data.train.tokens <= length:
        fix = f"use at most {data.train.tokens - 1}, or give more text" if data.train.tokens > 1 else "give more text"
        raise UserError(
            f"--batch.seq-len {length} needs {length + 1} tokens, but the training part of {name} has {data.train.tokens}: {fix}"
        )
    train = TokenDataset(data.train_prefix, seq_len=length, seed=config.seed, split=data.train_split, eod=data.eod)
    valid = TokenDataset(data.valid_prefix, seq_len=length, split=data.valid_split, order="sequential", eod=data.eod)
    return train, valid


def on_first_rank(f: Callable[[], T]) -> T:
    """f() on the first rank, its result on all. The others wait as long as it takes; a UserError is raised on all."""
    if not dist.is_initialized():
        return f()
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = f()
        except UserError as error:
            box[1] = str(error)
    dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    dist.destroy_process_group(group)
    if box[1] is not None:
        raise UserError(box[1])
    return box[0]


@contextmanager
def nothing_left_behind(out: Path, rank: int) -> Iterator[None]:
    """When the body ends in a UserError, the first rank takes away what it wrote: a refused run leaves the disk as
    it was."""
    missing = [p for p in (out / "data", out, *out.parents) if not p.exists()]  # the innermost first
    try:
        yield
    except UserError:
        if rank == 0 and missing:
            shutil.rmtree(out / "data", ignore_errors=True)
            for folder in missing[1:]:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        raise


# --------------------------------------------------------------------------------------------------------------- the
# loop


class Loop:
    """The steps of a run and what they leave: checkpoints, evaluations, the first and the last words."""

    def __init__(
        self,
        config: TrainConfig,
        run: job.Run,
        report: Reporter,
        stop: StopSignals,
        train: TokenDataset,
        valid: TokenDataset,
        data: Prepared,
        tokenizer: Tokenizer,
        start: float,
    ) -> None:
        self.config, self.run, self.report, self.stop, self.start = config, run, report, stop, start
        self.train_data, self.valid_data, self.data, self.tokenizer = train, valid, data, tokenizer
        sizes = run.model.config
        self.batches = job.Batches(config, run.setup, sizes=sizes)
        self.ahead = Prefetched(lambda n: self.batches.train(train, n), run.setup.device, last=config.steps)
        # the last step, whose row is to come, and the load of its experts if that is to be written
        self.untold: tuple[int, Callable[[], dict[str, Any]], Load | None] | None = None
        self.told = time.perf_counter()  # when the row before came
        plain = dataclasses.replace(
            run.model,
            config=dataclasses.replace(sizes, mtp_weight=0.0),  # without prediction modules
            label_smoothing=0.0,
            z_loss=0.0,
            record_routing=False,
        )
        self.evaluate = evaluate(plain.loss, weights=plain.weights, sh=run.sh)
        if run.pipe is not None:
            extras = unread_counts(sizes, device=run.setup.device)
            self.evaluate = functools.partial(run.pipe.of(plain).evaluate, ctx=Ctx(sh=run.sh, extras=extras))
        self.out = Path(config.out)
        self.saved: Path | None = None
        self.state: TrainState | None = None  # before the step under way

    def train(self, state: TrainState) -> TrainState:
        """Steps until the last, or until a signal asks for an end; a checkpoint is saved at the end of either."""
        config, first = self.config, state.step
        if config.init_from is not None and first == 0:
            self.evaluation(state)  # what the pretrained model can do
        stopping = self.stop.agreed()
        while state.step < config.steps and not stopping:
            self.state = state
            state = self.step(state)
            if state.step == first + 1:
                self.report.print(f"first step after {time.monotonic() - self.start:.1f} s")
            last, stopping = state.step == config.steps, self.stop.agreed()
            due = _due(state.step, config.eval.every) or _due(state.step, config.checkpoint.every)
            if last or stopping or due:
                self.tell_all()  # before anything is kept: the step may not have been finite
            if _due(state.step, config.check_replicas):
                self.check_replicas(state)
            if last or stopping:
                self.save(state)
            if _due(state.step, config.eval.every) and not last:
                self.evaluation(state)
            if _due(state.step, config.checkpoint.every) and not (last or stopping):
                self.save(state)  # after the evaluation, which a kill in between would leave out for good
        return state

    def step(self, state: TrainState) -> TrainState:
        """One step and its row; where a step's numbers are read late, the row of the step before, so that the GPU has the
        next step to run while the host waits for them."""
        if self.untold is None:
            self.told = time.perf_counter()
        state, metrics = self.run.step(state, self.ahead(state.step))
        stats = metrics.pop("stats")
        metrics |= load_metrics(stats, self.run.model.config) | mtp.metrics(stats, self.run.model.config)
        if self.config.record_routing is not None:
            self.record_routing(state.step, stats["routing"])
        due = self.run.model.config.moe and _due(state.step, self.config.log.load)
        load = mtp.loads(stats, self.run.model.config) if due else None
        before, self.untold = self.untold, (state.step, fetched(metrics), load)
        self.ahead.begin(state.step)
        if not self.run.late:
            self.tell_all()
        elif before is not None:
            self.tell(*before)
        return state

    def tell_all(self) -> None:
        """Reads what is not yet read."""
        before, self.untold = self.untold, None
        if before is not None:
            self.tell(*before)

    def record_routing(self, step: int, chosen: torch.Tensor) -> None:
        """Writes what every token of a step chose; chosen[layer batch seq* choice]."""
        batch, moe = self.config.batch, self.run.model.config.moe
        assert self.config.record_routing is not None and moe is not None
        whole = whole_record(chosen, self.run.sh, rows=batch.size, seq=batch.seq_len)
        if not dist.is_initialized() or dist.get_rank() == 0:
            write_record(self.config.record_routing, step, whole, moe.routing.experts)

    def tell(self, step: int, read: Callable[[], dict[str, Any]], load: Load | None = None) -> None:
        """The row of a step. ms: the time since the row before, which is that of a step when one follows the other.
        Raises NonFiniteError where the step itself has left that to us."""
        metrics = read()
        now = time.perf_counter()
        ms, self.told = (now - self.told) * 1e3, now
        if self.run.late:
            for name, what in (("loss", "the loss"), ("grad_norm", "the norm of the gradients")):
                if not math.isfinite(metrics[name]):
                    raise NonFiniteError(step, what)
        self.report.step(step, loss=metrics.pop("loss"), tokens=metrics.pop("tokens"), ms=ms, **metrics)
        if load is not None:
            layers, tokens = load
            self.report.load(step, dict(zip(layers, tokens.long().tolist(), strict=True)))

    def check_replicas(self, state: TrainState) -> None:
        """Raises ReplicaError, on all ranks, where replicas differ; the row of the step is written before."""
        self.tell_all()
        settle()
        pipe = self.run.pipe
        check_replicas(state, self.run.sh.mesh, stages=None if pipe is None else pipe.group, step=state.step)

    def save(self, state: TrainState) -> None:
        settle()
        meta = {
            "model": config_to_dict(self.run.model.config),
            "tokenizer": os.path.relpath(self.data.tokenizer_path, self.out),
            "tokenizer_fingerprint": fingerprint(self.tokenizer),
            "seq_len": self.config.batch.seq_len,
            "optimizer": optimizer_form(self.config, self.run.setup.precision),
        }
        keep = self.config.checkpoint.keep or None
        self.saved = checkpoint.save(self.out, state, step=state.step, meta=meta, keep=keep)

    def evaluation(self, state: TrainState) -> None:
        """The loss of some held-out batches, also that of the averaged weights where there are such."""
        limit = self.config.eval.batches
        loss, _ = self.held_out(state.params, limit)
        average = {} if self.config.optim.ema is None else {"val_loss_ema": self.held_out(averaged(state), limit)[0]}
        self.report.evaluation(state.step, val_loss=loss, **average)

    def held_out(self, params: Any, limit: int | None, *, until_stopped: bool = False) -> tuple[float, int]:
        """(mean cross-entropy of the held-out tokens, their number), of all of them with limit=None.

        Sums are added before they are divided. until_stopped: a signal ends it early, with (nan, 0).
        """
        total = weight = 0.0
        for batch in self.batches.held_out(self.valid_data, limit):
            if until_stopped and self.stop.agreed():
                return float("nan"), 0
            found = self.evaluate(params, batch)["lm"]
            total, weight = total + float(found[0]), weight + float(found[1])
        return total / max(weight, 1.0), int(weight)

    def introduce(self, state: TrainState, peak: float, world: int, begun: checkpoint.Info | None) -> None:
        """What is trained, on what, and where."""
        say, config, data, setup = self.report.print, self.config, self.data, self.run.setup
        say(f"data                  {config.data or 'the sources of the Python standard library'}")
        for name, part in (("training", data.train), ("held out", data.valid)):
            size = f", {part.bytes:,} bytes" if part.bytes else ""
            say(f"  {name}            {part.documents:,} documents, {part.tokens:,} tokens{size}")
        epochs = config.steps * config.batch.size / len(self.train_data)
        read = f"{config.steps} steps read the training text {epochs:.2f} times"
        say(f"  vocabulary          {data.vocab_size:,} tokens; {read}")
        say(f"model                 {model_name(config)}, {count(self.run.model.spec()):,} parameters")
        if problem := export_problem(self.run.model.config):
            say(f"  no export           to Hugging Face: {problem}")
        held = [f"{local_bytes(part) / 2**20:.1f} MiB" for part in (state.params, state.opt)]
        say(f"  held by each rank   {held[0]} of parameters, {held[1]} of optimizer state")
        p = setup.precision
        where = f"{setup.device.type}, mesh {job.mesh_axes(config, world)}"
        scale = state.loss_scale if self.run.scaling else None
        scaled = "" if scale is None else f", loss scale {scale.scale:g}"
        formats = f"parameters {dtype_name(p.params)}, products {dtype_name(p.compute_dtype)}{scaled}"
        say(f"machine               {where}, {formats}")
        say(f"  matrix product      {peak / 1e9:,.0f} GFLOP/s measured on each rank: what MFU refers to")
        going_on = f", going on from {begun.path.name}" if begun else ", from the first step" if config.resume else ""
        say(f"out                   {config.out}{going_on}")

    def finish(self, state: TrainState) -> bool:
        """Evaluate on all held-out text, draw the curve, show a sample, and say what can be done next. False:
        stopped."""
        report, config, data = self.report, self.config, self.data
        loss, tokens = self.held_out(state.params, None, until_stopped=True)
        average = {}
        if config.optim.ema is not None:
            average = {"val_loss_ema": self.held_out(averaged(state), None, until_stopped=True)[0]}
        if self.stop.agreed():
            return False
        entropy = unigram_entropy(self.valid_data.tokens, self.run.model.config.vocab)
        per_byte = bits_per_byte(loss, tokens, data.valid.bytes) if data.valid.bytes else None
        report.evaluation(state.step, val_loss=loss, bits_per_byte=per_byte, **average)
        curve = report.curve(title=f"{model_name(config)}, {count(self.run.model.spec()):,} parameters")
        better = 100 * (1 - loss / entropy) if entropy else 0.0
        compared = f"{abs(better):.1f} % {'below' if better >= 0 else 'above'} it"
        report.print("")
        report.print(f"validation loss       {loss:.4f} nats per token ({tokens:,} tokens, all held-out text)")
        for value in average.values():
            report.print(f"  of averaged weights {value:.4f}")
        report.print(f"unigram entropy       {entropy:.4f} nats per token: the loss is {compared}")
        if per_byte is not None:
            report.print(f"bits per byte         {per_byte:.3f} ({data.valid.bytes:,} bytes)")
        report.print(f"loss curve            {curve}")
        if (picture := report.load_map()) is not None:
            report.print(f"load of experts       {picture}")
        self.show_sample(state)
        out, prompt = shlex.quote(config.out), shlex.quote(self.prompt())
        report.print("")
        report.print(f"checkpoint            {self.saved}")
        report.print(f"to continue           fmegatron train --out {out} --resume --steps {2 * config.steps}")
        report.print(f"to generate           fmegatron generate --checkpoint {out} --prompt {prompt}")
        if export_problem(self.run.model.config) is None:
            report.print(f"to export             fmegatron export --checkpoint {out} --to hf --out {out}/hf")
        report.print(f"time                  {time.monotonic() - self.start:.1f} s")
        return True

    def prompt(self) -> str:
        """What the sample continues: the beginning of the held-out text, or of a Python function."""
        if self.config.data is None:
            return SAMPLE_PROMPT
        text = self.tokenizer.decode(self.valid_data.tokens[:8].tolist()).strip()
        return text.splitlines()[0] if text else "The "

    def show_sample(self, state: TrainState) -> None:
        """Text that the model writes: on the first rank from all parameters, which on several ranks must be few, or
        through the stages of a pipeline."""
        run, setup, report = self.run, self.run.setup, self.report
        model: Any = dataclasses.replace(run.model, compile=False)
        params, sh = state.params, run.sh
        if run.pipe is None:
            size = count(run.spec) * setup.precision.params.itemsize
            if setup.mesh.world > 1 and size > SAMPLE_BYTES:
                report.print(
                    f"sample                none: {size / 2**30:.1f} GiB of parameters are divided over the ranks"
                )
                return
            params, sh = on_one_rank(params), Sharding(precision=setup.precision)
        if params is None:
            return
        ids = prompt_ids(self.tokenizer, self.prompt())
        tokens = min(SAMPLE_TOKENS, most_tokens(model, len(ids)))
        if tokens < 1:
            return
        model = model if run.pipe is None else run.pipe.of(model)
        options = {"tokens": tokens, "temperature": 0.8, "eod": self.tokenizer.eod, "sh": sh}
        new = generate_tokens(model, params, [ids], **options)[0]  # type: ignore[arg-type]
        text = self.tokenizer.decode(ids + new)
        report.print("\nsample\n" + "\n".join("    " + line for line in text.splitlines()))

    def tell_replicas(self, error: ReplicaError) -> None:
        """Which leaves differ between which ranks, and from where to go on."""
        self.report.end_progress()
        found = checkpoint.latest(self.out)
        newest = f"the newest checkpoint is {found}" if found else "there is no checkpoint yet"
        self.report.print(
            f"stopped: {error}. A check every {self.config.check_replicas} steps found no difference before; {newest}. Memory, a "
            "kernel or the network of one of these ranks may be at fault"
        )

    def tell_non_finite(self, error: NonFiniteError) -> None:
        """The step and the first leaf, by --debug also where it arose, and from where to go on."""
        self.report.end_progress()
        found = checkpoint.latest(self.out)
        newest = f"the newest checkpoint is {found}" if found else "there is no checkpoint yet"
        scale = "" if error.loss_scale is None else f", and the loss scale, {error.loss_scale:g}, cannot fall further"
        changed = "It was read after the update" if self.run.late else "Nothing was changed by this step"
        self.report.print(
            f"stopped at step {error.step}: {error.leaf} is not finite{scale}. {changed}, and {newest}. "
            "Lower --optim.lr" + ("" if self.config.debug else ", or find where it arose with --debug")
        )
        if self.config.debug:
            state = self.state  # the step refuses before it changes anything
            assert state is not None
            batch = self.batches.train(self.train_data, state.step)
            self.report.print(f"--debug: step {error.step}: {explain_step(self.run.step, state, batch)}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def averaged(state: TrainState) -> Any:
    """The moving average of the weights, in the parameters' dtypes and placements."""
    return ema_params(state.opt, like=state.params)


def on_one_rank(params: Any) -> Any:
    """The parameters as plain tensors on the first rank, gathered leaf by leaf; None on the others. Collective."""
    first = not dist.is_initialized() or dist.get_rank() == 0

    def whole(leaf: Any) -> Any:
        full = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        return full if first else None

    gathered = tree.tree_map(whole, params)
    return gathered if first else None
