"""`fmegatron train`: from text and settings to a trained model. Each step of it is a function that a program can call itself."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fmegatron import checkpoint, random, schedules
from fmegatron.config import TrainConfig, nearest_name, save_config
from fmegatron.data import TokenDataset, bits_per_byte, check_tokens, check_vocab, eval_batches, load_tokenizer, prepare, unigram_entropy
from fmegatron.data.prepare import Prepared
from fmegatron.errors import UserError
from fmegatron.generate import generate
from fmegatron.launch import close_distributed, init_distributed
from fmegatron.mesh import Mesh, make_mesh, parse_axes
from fmegatron.models.llama import LLAMA, Llama, LlamaConfig
from fmegatron.optim import Optimizer, adamw, chain, clip_by_global_norm, decay_mask, with_master
from fmegatron.parallel.legality import check_layout
from fmegatron.precision import Precision, dtype_name, dtype_of
from fmegatron.remat import names, nothing
from fmegatron.report import Reporter, measure_matmul_flops
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.spec import abstract, count, init, local_bytes
from fmegatron.spec import describe as describe_spec
from fmegatron.split import everything
from fmegatron.step import NonFiniteError, TrainState, evaluate, train_step

POLICIES: dict[str, Callable[[str], bool]] = {"everything": everything, "attention": names("attention"), "nothing": nothing}
SAMPLE_PROMPT = "def "


def run(config: TrainConfig) -> int:
    """Train as the settings say; the exit code. Raises UserError for bad input, before anything is written."""
    start = time.monotonic()
    model_config(config, None)  # settings first: nothing starts for a misspelt preset
    world = int(os.environ.get("WORLD_SIZE", "1"))
    mesh_axes(config, world)
    check_out(config)
    device = init_distributed(config.device)
    try:
        return _run(config, device, start)
    finally:
        close_distributed()


def _run(config: TrainConfig, device: torch.device, start: float) -> int:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    out = Path(config.out)
    resumed = checkpoint.latest(out) if config.resume else None
    setup = make_setup(config, device, world)
    with nothing_left_behind(out, rank):
        data = prepare_data(config, rank)
        model_cfg = model_config(config, data.vocab_size)
        tokenizer = load_tokenizer(data.tokenizer_path)
        check_vocab(tokenizer, model_cfg.vocab)
        train, valid = open_data(config, data, model_cfg.vocab)
        run_ = make_run(config, model_cfg, setup)
        if resumed is None:
            state = initial_state(config, run_)
        else:
            state = checkpoint.load(resumed, abstract_state(config, run_), device=device)
        if state.step >= config.steps and resumed is not None:
            raise UserError(f"--steps {config.steps}: {resumed} has made {state.step} steps already; raise --steps to go on")
    peak = measure_matmul_flops(device, setup.precision.compute_dtype)
    if rank == 0:
        save_config(config, out / "config.toml")
    with Reporter(
        out,
        steps=config.steps,
        first_step=state.step + 1,
        rank=rank,
        tensorboard=config.log.tensorboard,
        seconds=config.log.seconds,
        flops_per_token=run_.model.flops_per_token(config.batch.seq_len),
        peak_flops=peak * world,
    ) as report:
        _introduce(report, config, data, run_, state, train, peak, world, resumed)
        loop = Loop(config, run_, report, train, valid, data, start)
        with stop_signals() as stop:
            try:
                state = loop.train(state, stop)
            except NonFiniteError as error:
                report.end_progress()
                report.print(f"stopped: {error}")
                if config.debug:
                    report.print(explain_non_finite(run_, state_before(config, run_, out), train, config))
                return 1
        report.end_progress()
        if stop.asked and state.step < config.steps:
            report.print(f"stopped by {stop.asked} after step {state.step}; go on with: fmegatron train --out {config.out} --resume")
            return 0
        loop.finish(state, tokenizer)
    return 0


# ------------------------------------------------------------------------------------------------------------- the parts


@dataclass(frozen=True)
class Setup:
    """Where and how a run computes."""

    sh: Sharding
    mesh: Mesh
    device: torch.device
    precision: Precision


@dataclass(frozen=True)
class Run:
    """The functions of a run."""

    setup: Setup
    model: Llama
    spec: Any
    optimizer: Optimizer
    step: Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]

    @property
    def sh(self) -> Sharding:
        return self.setup.sh


def mesh_axes(config: TrainConfig, world: int) -> str:
    """The mesh of a run as text. Raises UserError when it does not multiply to the number of ranks."""
    axes = config.mesh or f"dp={world}"
    total = math.prod(parse_axes(axes, argument="--mesh").values())
    if total != world:
        raise UserError(
            f"--mesh {axes} has {total} ranks, but this run has {world}: add --nproc {total} (or torchrun --nproc-per-node {total}), "
            "or change the mesh"
        )
    return axes


def make_setup(config: TrainConfig, device: torch.device, world: int, *, abstract_mesh: bool = False) -> Setup:
    """Mesh, rules and precision of a run. Raises UserError for a layout that the model or the batch does not allow."""
    sizes = model_config(config, None)
    axes = mesh_axes(config, world)
    mesh = make_mesh(axes, kv_heads=sizes.kv_heads, device=device.type, world=world, abstract=abstract_mesh)
    check_layout(
        mesh,
        heads=sizes.heads,
        batch_size=config.batch.size,
        seq_len=config.batch.seq_len,
        microbatches=config.batch.microbatches,
        sequence_parallel=config.sp,
    )
    p = config.precision
    compute = p.compute or ("bfloat16" if device.type == "cuda" else None)
    precision = Precision(*(None if d is None else dtype_of(d) for d in (p.params, compute, p.reduce, p.master)))  # type: ignore[arg-type]
    rules = standard_rules(mesh, sequence_parallel=config.sp, store=config.store)
    return Setup(Sharding(mesh, rules, precision=precision), mesh, device, precision)


def model_config(config: TrainConfig, tokenizer_vocab: int | None) -> LlamaConfig:
    """The sizes of the model: the preset's, then the overrides. The tiny preset takes the tokenizer's vocabulary."""
    if config.model not in LLAMA:
        raise UserError(
            f"--model {config.model!r} is no preset; did you mean {nearest_name(config.model, list(LLAMA))!r}? Presets: {', '.join(LLAMA)}"
        )
    given = {f.name: getattr(config.model_overrides, f.name) for f in dataclasses.fields(config.model_overrides)}
    given["rope_base"] = given.pop("rope_theta")
    given = {k: v for k, v in given.items() if v is not None}
    preset = LLAMA[config.model]
    if {"embed", "heads"} & given.keys():
        given.setdefault("head", None)
    if "heads" in given:
        given.setdefault("kv_heads", math.gcd(given["heads"], preset.kv_heads or 1))
    if config.model == "tiny" and tokenizer_vocab is not None and "vocab" not in given:
        given["vocab"] = -(-tokenizer_vocab // 64) * 64
    given.setdefault("max_seq", max(preset.max_seq, config.batch.seq_len))
    return dataclasses.replace(preset, dropout=config.dropout, **given)


def check_out(config: TrainConfig) -> None:
    """Raises UserError when the run's folder holds a run already (without --resume), none (with it), or cannot be written."""
    out = Path(config.out)
    has_run = (out / "config.toml").exists()
    if config.resume and checkpoint.latest(out) is None:
        raise UserError(f"--resume: there is no checkpoint in --out {config.out}; leave --resume out to start a run there")
    if has_run and not config.resume:
        raise UserError(f"--out {config.out} holds a run already: add --resume to go on with it, or name another folder")
    existing = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--out {config.out}: {existing} is not a folder that can be written; name another folder")


@contextmanager
def nothing_left_behind(out: Path, rank: int) -> Iterator[None]:
    """When the body ends in a UserError, the first rank takes away what it wrote: a refused run leaves the disk as it was."""
    made = out / "data" if out.exists() else out
    new = not made.exists()
    try:
        yield
    except UserError:
        if new and rank == 0:
            shutil.rmtree(made, ignore_errors=True)
        raise


def prepare_data(config: TrainConfig, rank: int) -> Prepared:
    """Token files of the run, made by the first rank; the others wait for it."""

    def make() -> Prepared:
        return prepare(
            config.data,
            Path(config.out) / "data",
            tokenizer=config.tokenizer,
            vocab_size=config.tokenizer_vocab,
            text_key=config.text_key,
            valid_fraction=config.eval.fraction,
            workers=max(1, (os.cpu_count() or 1) // 2),
        )

    if not dist.is_initialized():
        return make()
    box: list[Any] = [make() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def open_data(config: TrainConfig, data: Prepared, vocab: int) -> tuple[TokenDataset, TokenDataset]:
    """(training data in its order, held-out data in sequence). Raises UserError for sequences longer than the data, or a token
    that the model has no row for."""
    train = TokenDataset(data.train_prefix, seq_len=config.batch.seq_len, seed=config.seed, split=data.train_split, eod=data.eod)
    valid = TokenDataset(data.valid_prefix, seq_len=config.batch.seq_len, split=data.valid_split, order="sequential", eod=data.eod)
    for part in (train, valid) if data.train_prefix != data.valid_prefix else (train,):
        check_tokens(part.data, vocab)
    return train, valid


def make_optimizer(config: TrainConfig, spec: Any, precision: Precision) -> Optimizer:
    """Clipping and AdamW with the schedule of the settings."""
    o, steps = config.optim, config.steps
    warmup = min(o.warmup, max(steps - 1, 0))
    rates: dict[str, Callable[[], Any]] = {
        "constant": lambda: schedules.constant(o.lr, warmup=warmup),
        "linear": lambda: schedules.linear(o.lr, total=steps, warmup=warmup, end=o.min_lr),
        "cosine": lambda: schedules.cosine(o.lr, total=steps, warmup=warmup, end=o.min_lr),
        "wsd": lambda: schedules.wsd(
            o.lr, total=steps, warmup=warmup, decay=min(o.decay or max(1, steps // 5), steps - warmup), end=o.min_lr
        ),
    }
    rate = rates[o.schedule]()
    update = adamw(rate, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, mask=decay_mask(spec))
    pieces = ([clip_by_global_norm(o.clip)] if o.clip else []) + [update]
    optimizer = chain(*pieces)
    if precision.master is not None and precision.master != precision.params:
        optimizer = with_master(optimizer, precision.master)
    return dataclasses.replace(optimizer, rate=rate)


def make_run(config: TrainConfig, sizes: LlamaConfig, setup: Setup) -> Run:
    """Model, optimizer and step."""
    model = Llama(sizes, save=POLICIES[config.remat], compile=config.compile)
    spec = model.spec()
    setup.sh.check_spec(spec)
    optimizer = make_optimizer(config, spec, setup.precision)
    step = train_step(
        model.loss,
        optimizer,
        weights=model.weights,
        sh=setup.sh,
        microbatches=config.batch.microbatches,
        donate=True,
    )
    return Run(setup, model, spec, optimizer, step)


def initial_state(config: TrainConfig, run_: Run) -> TrainState:
    """The state of a new run; every rank makes its own shards alone."""
    root = random.key(config.seed)
    params = init(run_.spec, random.fold_in(root, "init"), sh=run_.sh, device=run_.setup.device)
    return TrainState(0, params, run_.optimizer.init(params), random.fold_in(root, "train"))


def abstract_state(config: TrainConfig, run_: Run) -> TrainState:
    """The shapes, dtypes and placements of a state, for `checkpoint.load`; it holds no memory."""
    params = abstract(run_.spec, sh=run_.sh)
    return TrainState(0, params, run_.optimizer.init(params), random.key(0))


class Batches:
    """The part of each global batch that this rank holds."""

    def __init__(self, config: TrainConfig, setup: Setup) -> None:
        sh = setup.sh
        self.size, self.device = config.batch.size, setup.device
        self.rows = sh.index("batch", config.batch.size, device="cpu")
        self.columns = sh.index("seq", config.batch.seq_len, device="cpu") if sh.axes("seq") else None

    def train(self, data: TokenDataset, step: int) -> dict[str, torch.Tensor]:
        """A pure function of (data, seed, step)."""
        return self._placed(data.batch(step, batch_size=self.size, rows=self.rows, columns=self.columns))

    def held_out(self, data: TokenDataset, limit: int | None) -> Iterator[dict[str, torch.Tensor]]:
        for batch in eval_batches(data, self.size, rows=self.rows, columns=self.columns, limit=limit):
            yield self._placed(batch)

    def _placed(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: x.to(self.device, non_blocking=True) for name, x in batch.items()}


class Loop:
    """The loop of a run and what it leaves: checkpoints, evaluations, the last words."""

    def __init__(
        self,
        config: TrainConfig,
        run_: Run,
        report: Reporter,
        train: TokenDataset,
        valid: TokenDataset,
        data: Prepared,
        start: float,
    ) -> None:
        self.config, self.run, self.report, self.data, self.start = config, run_, report, data, start
        self.train_data, self.valid_data = train, valid
        self.batches = Batches(config, run_.setup)
        self.evaluate = evaluate(run_.model.loss, weights=run_.model.weights, sh=run_.sh)
        self.out = Path(config.out)
        self.saved: Path | None = None

    def train(self, state: TrainState, stop: StopSignals) -> TrainState:
        """Steps until the last, or until a signal asks to stop; a checkpoint is saved at the end of either."""
        config, report, first = self.config, self.report, state.step
        if state.step == 0 and config.steps == 0:
            self.save(state)
        while state.step < config.steps:
            began = time.perf_counter()
            batch = self.batches.train(self.train_data, state.step)
            state, metrics = self.run.step(state, batch)
            if self.run.setup.device.type == "cuda":
                torch.cuda.synchronize()
            shown = {k: v for k, v in metrics.items() if k not in ("loss", "tokens", "stats")}
            report.step(state.step, loss=metrics["loss"], tokens=metrics["tokens"], ms=(time.perf_counter() - began) * 1e3, **shown)
            if state.step == first + 1:
                report.print(f"first step after {time.monotonic() - self.start:.1f} s")
            last = state.step == config.steps
            stopping = stop.agreed()
            if config.eval.every and state.step % config.eval.every == 0 and not last and not stopping:
                report.evaluation(state.step, val_loss=self.held_out_loss(state, config.eval.batches))
            if last or stopping or (config.checkpoint.every and state.step % config.checkpoint.every == 0):
                self.save(state)
            if stopping:
                break
        return state

    def save(self, state: TrainState) -> None:
        meta = {
            "model": dataclasses.asdict(self.run.model.config),
            "family": "llama",
            "tokenizer": os.path.relpath(self.data.tokenizer_path, self.out),
            "seq_len": self.config.batch.seq_len,
        }
        self.saved = checkpoint.save(self.out, state, step=state.step, meta=meta, keep=self.config.checkpoint.keep)

    def held_out_loss(self, state: TrainState, limit: int | None) -> float:
        """Mean loss of the held-out tokens, of all of them with limit=None: sums are added before they are divided."""
        return self._held_out(state, limit)[0]

    def _held_out(self, state: TrainState, limit: int | None) -> tuple[float, int]:
        total = weight = 0.0
        for batch in self.batches.held_out(self.valid_data, limit):
            found = self.evaluate(state.params, batch)["lm"]
            total, weight = total + float(found[0]), weight + float(found[1])
        return total / max(weight, 1.0), int(weight)

    def finish(self, state: TrainState, tokenizer: Any) -> None:
        """Evaluate on all held-out text, draw the curve, show a sample, and say what can be done next."""
        report, config = self.report, self.config
        loss, tokens = self._held_out(state, None)
        stream, size = self.valid_data.tokens, self.data.valid.bytes
        entropy = unigram_entropy(stream, self.run.model.config.vocab)
        per_byte = bits_per_byte(loss, tokens, size) if size else None
        report.evaluation(state.step, val_loss=loss, bits_per_byte=per_byte)
        curve = report.curve(title=f"{config.model}, {count(self.run.spec):,} parameters")
        report.print("")
        report.print(f"validation loss       {loss:.4f} nats per token ({tokens:,} tokens, all held-out text)")
        report.print(f"unigram entropy       {entropy:.4f} nats per token: the loss is {100 * (1 - loss / entropy):.1f} % below")
        if per_byte is not None:
            report.print(f"bits per byte         {per_byte:.3f} ({size:,} bytes)")
        report.print(f"loss curve            {curve}")
        sample = self.sample(state, tokenizer)
        if sample is not None:
            report.print("\nsample\n" + "\n".join("    " + line for line in sample.splitlines()))
        report.print("")
        report.print(f"checkpoint            {self.saved}")
        report.print(f"to continue           fmegatron train --out {config.out} --resume --steps {2 * config.steps}")
        report.print(f"to generate           fmegatron generate --checkpoint {config.out} --prompt {SAMPLE_PROMPT!r}")
        report.print(f"to export             fmegatron export --checkpoint {config.out} --to hf --out {config.out}/hf")
        report.print(f"time                  {time.monotonic() - self.start:.1f} s")

    def sample(self, state: TrainState, tokenizer: Any) -> str | None:
        """Text that the model writes; None where the parameters are divided over ranks."""
        if self.run.setup.mesh.world > 1:
            return None
        texts = generate(self.run.model, state.params, tokenizer, [SAMPLE_PROMPT], tokens=80, seed=0)
        return SAMPLE_PROMPT + texts[0]


# --------------------------------------------------------------------------------------------------------------- signals


class StopSignals:
    """SIGTERM and Ctrl-C ask for an end after the step under way."""

    def __init__(self) -> None:
        self.asked = ""

    def take(self, number: int, frame: Any) -> None:
        self.asked = signal.Signals(number).name

    def agreed(self) -> bool:
        """Has any rank been asked? The same answer on all ranks, so that all stop after one step."""
        if not dist.is_initialized():
            return bool(self.asked)
        flag = torch.tensor([int(getattr(signal, self.asked)) if self.asked else 0])
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        if flag.item():
            self.asked = signal.Signals(int(flag.item())).name
        return bool(self.asked)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Take SIGTERM and SIGINT while the body runs."""
    stop = StopSignals()
    old = {number: signal.signal(number, stop.take) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------------------------------------------- reporting


def _introduce(
    report: Reporter,
    config: TrainConfig,
    data: Prepared,
    run_: Run,
    state: TrainState,
    train: TokenDataset,
    peak: float,
    world: int,
    resumed: Path | None,
) -> None:
    report.print(f"data                  {config.data or 'the sources of the Python standard library'}")
    for name, part in (("training", data.train), ("held out", data.valid)):
        size = f", {part.bytes:,} bytes" if part.bytes else ""
        report.print(f"  {name}            {part.documents:,} documents, {part.tokens:,} tokens{size}")
    epochs = config.steps * config.batch.size / len(train)
    report.print(f"  vocabulary          {data.vocab_size:,} tokens; {config.steps} steps read the training text {epochs:.2f} times")
    report.print(f"model                 {config.model}, {count(run_.spec):,} parameters")
    held = local_bytes(state.params), local_bytes(state.opt)
    report.print(f"  held by each rank   {held[0] / 2**20:.1f} MiB of parameters, {held[1] / 2**20:.1f} MiB of optimizer state")
    p = run_.setup.precision
    where = f"{run_.setup.device.type}, mesh {mesh_axes(config, world)}"
    report.print(f"machine               {where}, parameters {dtype_name(p.params)}, products {dtype_name(p.compute_dtype)}")
    report.print(f"  matrix product      {peak / 1e9:,.0f} GFLOP/s measured on each rank: what MFU refers to")
    report.print(f"out                   {config.out}" + (f", going on from {resumed}" if resumed else ""))


def describe(config: TrainConfig) -> int:
    """Print the table of parameters with their placements on the mesh, without starting anything."""
    world = math.prod(parse_axes(config.mesh or "dp=1", argument="--mesh").values())
    setup = make_setup(config, torch.device("cpu"), world, abstract_mesh=True)
    model = Llama(model_config(config, None))
    print(model.config)
    print(setup.mesh)
    print(describe_spec(model.spec(), sh=setup.sh))
    return 0


def state_before(config: TrainConfig, run_: Run, out: Path) -> TrainState:
    """The newest saved state, or the initial one."""
    found = checkpoint.latest(out)
    return checkpoint.load(found, abstract_state(config, run_)) if found else initial_state(config, run_)


def explain_non_finite(run_: Run, state: TrainState, train: TokenDataset, config: TrainConfig) -> str:
    """Step again from a saved state until a value is not finite, and name the operation that made the first one."""
    from fmegatron.debug import find_non_finite

    batches = Batches(config, run_.setup)
    while state.step < config.steps:
        batch = batches.train(train, state.step)
        found = find_non_finite(lambda state=state, batch=batch: run_.step(state, batch))  # type: ignore[misc]
        if isinstance(found, str):
            return f"--debug: step {state.step}: {found}"
        state = found[0]
    return "--debug: the steps made again had only finite values"
