"""The parts of a training run, each made from the settings by one function: mesh and rules, model, optimizer, step,
state, batches.

`fmegatron train` puts them together (train.py); a program may take those that it wants.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron import random, schedules
from fmegatron.config import TrainConfig, nearest_name
from fmegatron.data import TokenDataset, eval_batches
from fmegatron.errors import UserError
from fmegatron.mesh import Mesh, make_mesh, parse_axes
from fmegatron.models import PRESETS, Decoder, DecoderConfig
from fmegatron.optim import Optimizer, adamw, chain, clip_by_global_norm, decay_mask, with_master
from fmegatron.parallel.legality import check_layout
from fmegatron.precision import Precision, dtype_of
from fmegatron.remat import names, nothing
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.spec import abstract, init
from fmegatron.spec import describe as describe_spec
from fmegatron.split import everything
from fmegatron.step import TrainState, train_step

POLICIES: dict[str, Callable[[str], bool]] = {
    "everything": everything,
    "attention": names("attention"),
    "nothing": nothing,
}
VOCAB_MULTIPLE = 64  # the tiny preset's vocabulary is the tokenizer's rounded up, so that it divides over ranks


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
    model: Decoder
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
            f"--mesh {axes} has {total} ranks, but this run has {world}: add --nproc {total} "
            f"(or torchrun --nproc-per-node {total}), or change the mesh"
        )
    return axes


def make_setup(config: TrainConfig, device: torch.device, world: int, *, check_only: bool = False) -> Setup:
    """Mesh, rules and precision of a run. check_only: a mesh that runs nothing and needs no process group.

    Raises UserError for a layout that the model or the batch does not allow.
    """
    sizes = model_config(config, None)
    axes = mesh_axes(config, world)
    mesh = make_mesh(axes, kv_heads=sizes.kv_heads, device=device.type, world=world, abstract=check_only)
    check_layout(
        mesh,
        heads=sizes.heads,
        batch_size=config.batch.size,
        seq_len=config.batch.seq_len,
        microbatches=config.batch.microbatches,
        sequence_parallel=config.sp,
        store=config.store,
    )
    p = config.precision
    compute = p.compute or ("bfloat16" if device.type == "cuda" else None)
    dtypes = (None if d is None else dtype_of(d) for d in (p.params, compute, p.reduce, p.master))
    precision = Precision(*dtypes)  # type: ignore[arg-type]
    rules = standard_rules(mesh, sequence_parallel=config.sp, store=config.store)
    sh = Sharding(mesh, rules, precision=precision)
    sh.check_spec(Decoder(sizes).spec())
    return Setup(sh, mesh, device, precision)


def model_config(config: TrainConfig, tokenizer_vocab: int | None) -> DecoderConfig:
    """The sizes of the model: the preset's, then the overrides. The tiny preset takes the tokenizer's vocabulary.

    Raises UserError for an unknown preset, sizes that do not fit each other, and a vocabulary smaller than the
    tokenizer's.
    """
    if config.model not in PRESETS:
        near = nearest_name(config.model, list(PRESETS))
        raise UserError(f"--model {config.model} is no preset; did you mean {near}? Presets: {', '.join(PRESETS)}")
    given = {f.name: getattr(config.model_overrides, f.name) for f in dataclasses.fields(config.model_overrides)}
    given["rope_base"] = given.pop("rope_theta")
    given = {k: v for k, v in given.items() if v is not None}
    preset = PRESETS[config.model]
    if {"embed", "heads"} & given.keys():
        given.setdefault("head", None)
    if "heads" in given:
        given.setdefault("kv_heads", math.gcd(given["heads"], preset.kv_heads or 1))
    if config.model == "tiny" and tokenizer_vocab is not None and "vocab" not in given:
        given["vocab"] = -(-tokenizer_vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    given.setdefault("max_seq", max(preset.max_seq, config.batch.seq_len))
    try:
        sizes = dataclasses.replace(preset, dropout=config.dropout, **given)
    except UserError as error:
        raise UserError(f"--model {config.model} with --model-overrides: {error}") from None
    if tokenizer_vocab is not None and sizes.vocab < tokenizer_vocab:
        source = "--model-overrides.vocab" if "vocab" in given else f"--model {config.model}: its vocabulary of"
        raise UserError(
            f"{source} {sizes.vocab} is smaller than the tokenizer's {tokenizer_vocab} tokens: "
            f"set --model-overrides.vocab to {tokenizer_vocab} or more, or use the tokenizer that belongs to the model"
        )
    return sizes


def make_optimizer(config: TrainConfig, spec: Any, precision: Precision) -> Optimizer:
    """Clipping and AdamW with the schedule of the settings."""
    o, steps = config.optim, config.steps
    warmup = min(o.warmup, max(steps - 1, 0))
    decay = min(o.decay or max(1, steps // 5), steps - warmup)
    rates: dict[str, Callable[[], Any]] = {
        "constant": lambda: schedules.constant(o.lr, warmup=warmup),
        "linear": lambda: schedules.linear(o.lr, total=steps, warmup=warmup, end=o.min_lr),
        "cosine": lambda: schedules.cosine(o.lr, total=steps, warmup=warmup, end=o.min_lr),
        "wsd": lambda: schedules.wsd(o.lr, total=steps, warmup=warmup, decay=decay, end=o.min_lr),
    }
    rate = rates[o.schedule]()
    update = adamw(rate, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, mask=decay_mask(spec))
    pieces = ([clip_by_global_norm(o.clip)] if o.clip else []) + [update]
    optimizer = chain(*pieces)
    if precision.master is not None and precision.master != precision.params:
        optimizer = with_master(optimizer, precision.master)
    return dataclasses.replace(optimizer, rate=rate)


def make_run(config: TrainConfig, sizes: DecoderConfig, setup: Setup) -> Run:
    """Model, optimizer and step."""
    model = Decoder(sizes, save=POLICIES[config.remat], compile=config.compile)
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


def initial_state(config: TrainConfig, run: Run) -> TrainState:
    """The state of a new run; every rank makes its own shards alone."""
    root = random.key(config.seed)
    params = init(run.spec, random.fold_in(root, "init"), sh=run.sh, device=run.setup.device)
    return TrainState(0, params, run.optimizer.init(params), random.fold_in(root, "train"))


def abstract_state(config: TrainConfig, run: Run) -> TrainState:
    """The shapes, dtypes and placements of a state, for `checkpoint.load`; it holds no memory."""
    params = abstract(run.spec, sh=run.sh)
    return TrainState(0, params, run.optimizer.init(params), random.key(0))


class Batches:
    """The part of each global batch that this rank holds: its rows, and of the sequence its columns."""

    def __init__(self, config: TrainConfig, setup: Setup) -> None:
        sh = setup.sh
        self.size, self.device = config.batch.size, setup.device
        self.rows = sh.index("batch", config.batch.size, device="cpu")
        self.columns = sh.index("seq", config.batch.seq_len, device="cpu") if sh.axes("seq") else None

    def train(self, data: TokenDataset, step: int) -> dict[str, torch.Tensor]:
        """A pure function of (data, seed, step)."""
        return self._placed(data.batch(step, batch_size=self.size, rows=self.rows, columns=self.columns))

    def held_out(self, data: TokenDataset, limit: int | None) -> Iterator[dict[str, torch.Tensor]]:
        """Every held-out token once, in order; at most `limit` batches. The last is filled with rows that do not
        count."""
        for batch in eval_batches(data, self.size, rows=self.rows, columns=self.columns, limit=limit):
            yield self._placed(batch)

    def _placed(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: x.to(self.device, non_blocking=True) for name, x in batch.items()}


def describe(config: TrainConfig) -> int:
    """`fmegatron describe`: print the parameters with their placements on the mesh, without starting anything."""
    world = math.prod(parse_axes(config.mesh or "dp=1", argument="--mesh").values())
    setup = make_setup(config, torch.device("cpu"), world, check_only=True)
    model = Decoder(model_config(config, None))
    print(model.config)
    print(setup.mesh)
    print(describe_spec(model.spec(), sh=setup.sh))
    return 0
