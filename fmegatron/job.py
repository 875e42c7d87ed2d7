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

from fmegatron import random
from fmegatron.accumulate import accumulate
from fmegatron.axes import PIPELINE, parse_axes
from fmegatron.config import TrainConfig
from fmegatron.data import TokenDataset, eval_batches
from fmegatron.errors import UserError
from fmegatron.feeding import to_device
from fmegatron.fp8 import scaling as fp8
from fmegatron.graphs import recorded
from fmegatron.job_model import (
    check_fp8,
    export_problem,
    ignored_fields,
    make_fp8,
    model_config,
    remat_policy,
)
from fmegatron.job_optim import make_loss_scaling, make_optimizer
from fmegatron.loss_scale import LossScale, LossScaling
from fmegatron.mesh import Mesh, make_mesh
from fmegatron.models import Decoder, DecoderConfig, load_hf
from fmegatron.models.decoder import GATED
from fmegatron.models.fused import FUSED
from fmegatron.models.moe import running_counts
from fmegatron.models.mtp import layers_with_experts
from fmegatron.models.two_passes import in_two_passes, needs_two_passes
from fmegatron.models.upcycle import upcycled
from fmegatron.offload import on_host
from fmegatron.optim import Optimizer
from fmegatron.padding import held_positions, marked, overwritten
from fmegatron.parallel import schedule_text
from fmegatron.parallel.context import factoring
from fmegatron.parallel.folding import expert_factoring, problem_of_experts
from fmegatron.parallel.legality import FLAGS, check_layout, flags
from fmegatron.parallel.pipeline import Pipeline, inside_stage, pipeline
from fmegatron.parallel.routing_record import missing_step, read_record, recorded_steps, step_file
from fmegatron.parallel.schedules import COMPUTE, Schedule, make_schedule
from fmegatron.parallel.stages import Stage, by_cost, estimated_costs, even, parse_layout, uneven
from fmegatron.precision import Precision, dtype_of
from fmegatron.primitives.rotary import DynamicNTKScaling, LongRoPEScaling
from fmegatron.remat import offload
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.spec import abstract, init
from fmegatron.spec import describe as describe_spec
from fmegatron.step import TrainState, train_step
from fmegatron.zero import with_sharded_state

HOST = ":host"  # behind a name of --remat: what is kept goes to host memory


@dataclass(frozen=True)
class Setup:
    """Where and how a run computes."""

    sh: Sharding
    mesh: Mesh
    device: torch.device
    precision: Precision


@dataclass(frozen=True)
class Run:
    """The functions of a run.

    spec: of what this rank holds. pipe: of a mesh with the axis pp.
    late: is it left to who reads a step's metrics to find that they are not finite? So the host need not wait for a GPU
    in every step, and a recorded step need not read them.
    """

    setup: Setup
    model: Decoder
    spec: Any
    optimizer: Optimizer
    scaling: LossScaling | None
    step: Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]
    late: bool = False
    pipe: Pipeline | None = None

    @property
    def sh(self) -> Sharding:
        return self.setup.sh


def check_sizes(config: TrainConfig, world: int, sizes: DecoderConfig) -> None:
    """Raises UserError, with the nearest legal layouts as flags, for a layout that the model, the batch or the number of
    ranks does not allow. Asks nothing of torch."""
    words = dict(FLAGS)
    if config.init_from:  # whose parameters have the shapes that they have
        words |= {"vocab": "--resize-vocab {}", "mlp": "a model with an mlp width of {}"}
    check_layout(
        mesh_axes(config, world),
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        batch_size=config.batch.size,
        seq_len=config.batch.seq_len,
        vocab=sizes.vocab,
        mlp=sizes.mlp,
        positions=sizes.max_seq if sizes.positions == "learned" else None,
        microbatches=config.batch.microbatches,
        sequence_parallel=config.sp,
        store=config.store,
        zero=config.zero,
        context=config.cp,
        world=world,
        uneven=uneven_sizes(sizes),
        words=words,
        spelled=flags,
    )


def check_experts(config: TrainConfig, world: int, sizes: DecoderConfig) -> None:
    """Raises UserError for numbers of ranks that cannot share out a model's experts, or their width."""
    moe = sizes.moe
    wrong = problem_of_experts(
        ranks=world // parse_axes(mesh_axes(config, world), argument="--mesh").get(PIPELINE, 1),
        ep=config.ep,
        etp=config.etp,
        experts=None if moe is None else moe.routing.experts,
        width=None if moe is None else moe.mlp,
        ep_flag="--ep ",
        etp_flag="--etp ",
    )
    if wrong is not None:
        raise UserError(wrong)


def uneven_sizes(sizes: DecoderConfig) -> tuple[str, ...]:
    """What need not divide by its ranks, as it is filled up: not the sequence where frequencies depend on its length."""
    by_length = isinstance(sizes.rope_scaling, DynamicNTKScaling | LongRoPEScaling)
    return ("batch", "vocab", "mlp") if by_length else ("batch", "seq", "vocab", "mlp")


def mesh_axes(config: TrainConfig, world: int) -> str:
    """The mesh of a run as text."""
    return config.mesh or f"dp={world}"


def make_setup(
    config: TrainConfig,
    device: torch.device,
    world: int,
    *,
    sizes: DecoderConfig | None = None,
    check_only: bool = False,
) -> Setup:
    """Mesh, rules and precision of a run. sizes: its model, None: that of the settings. check_only: a mesh that runs
    nothing and needs no process group.

    Raises UserError for a layout that the model or the batch does not allow.
    """
    sizes = sizes or model_config(config, None)
    check_sizes(config, world, sizes)
    check_experts(config, world, sizes)
    axes = mesh_axes(config, world)
    also = (
        *factoring(axes, config.cp, heads=sizes.heads, kv_heads=sizes.kv_heads, argument="--mesh"),
        *expert_factoring(axes, ep=config.ep, etp=config.etp, argument="--mesh"),
    )
    mesh = make_mesh(axes, also=also, kv_heads=sizes.kv_heads, device=device.type, world=world, abstract=check_only)
    precision = make_precision(config, device)
    layout = {"sequence_parallel": config.sp, "store": config.store, "zero": config.zero, "context": config.cp}
    rules = standard_rules(mesh, uneven={"vocab": sizes.vocab, "mlp": sizes.mlp}, **layout)  # type: ignore[arg-type]
    sh = Sharding(mesh, rules, precision=precision)
    sh.check_spec(Decoder(sizes).spec())
    check_fp8(config, sizes, sh)
    sh = inside_stage(sh, Decoder(sizes).spec()) if PIPELINE in mesh.sizes else sh
    return Setup(sh, mesh, device, precision)


def make_pipeline(config: TrainConfig, model: Decoder, setup: Setup) -> Pipeline | None:
    """The pipeline of a run whose mesh has the axis pp. Raises UserError for a schedule or stages that do not fit."""
    ranks = setup.mesh.sizes.get(PIPELINE, 1)
    if PIPELINE not in setup.mesh.sizes:
        default = TrainConfig()
        for name in ("schedule", "virtual", "group", "stages"):
            if getattr(config, name) != getattr(default, name):
                raise UserError(
                    f"--{name} {getattr(config, name)} is for a mesh with pp: add it to --mesh, or leave it out"
                )
        return None
    for flag, given in (("--recorded", config.recorded), ("--debug", config.debug)):
        if given:
            raise UserError(f"{flag} does not work in a pipeline: leave it out, or pp out of --mesh {config.mesh}")
    try:
        schedule = schedule_of(config, ranks)
    except UserError as error:
        raise UserError(f"--schedule {config.schedule}: {error}") from None
    stages = None
    if config.stages is not None:
        stages = stages_of(config, model.config, schedule.stages)
        if len(stages) != schedule.stages:
            raise UserError(
                f"--stages {config.stages} has {len(stages)} stages, but --schedule {config.schedule} on pp={ranks} has "
                f"{schedule.stages}"
            )
    overlap = config.microbatch_overlap != "none"
    if overlap and not any(a.joined and a.kind in COMPUTE for program in schedule.programs for a in program):
        raise UserError(
            f"--microbatch-overlap {config.microbatch_overlap} in a pipeline is for a schedule that joins forwards and backwards: use "
            f"--schedule dualpipev in place of {config.schedule}, or leave it out"
        )
    return pipeline(model, schedule, mesh=setup.mesh, axis=PIPELINE, assignment=stages, overlap=overlap)


def schedule_of(config: TrainConfig, ranks: int) -> Schedule:
    """The schedule of a run by its name, or of its file. Raises UserError for one that does not fit the run."""
    microbatches = config.batch.microbatches
    if not {"/", "\\", "."} & set(config.schedule):
        return make_schedule(config.schedule, ranks, microbatches, virtual=config.virtual, group=config.group)
    for name in ("virtual", "group"):
        if (given := getattr(config, name)) is not None:
            raise UserError(f"--{name} {given} is for a schedule by its name: the file has its own order, leave it out")
    found = schedule_text.read(config.schedule)
    for what, have, wanted, flag in (
        ("ranks", found.ranks, ranks, f"pp={found.ranks} in --mesh"),
        ("microbatches", found.microbatches, microbatches, f"--batch.microbatches {found.microbatches}"),
    ):
        if have != wanted:
            raise UserError(f"the table has {have} {what}, and the run {wanted}: use {flag}, or another table")
    return found


def stages_of(config: TrainConfig, sizes: DecoderConfig, count: int) -> tuple[Stage, ...]:
    """What --stages means for so many stages. Raises UserError for what means nothing, or does not fit the model."""
    text = config.stages or ""
    if text == "ends":
        return even(sizes.layers, count, count_embedding=True, count_head=True)
    if text == "cost":
        if sizes.moe is not None or sizes.mla is not None:
            raise UserError(
                "--stages cost estimates layers of plain attention and a dense feed-forward: give a layout such as Et|tt|ttL"
            )
        costs, head = estimated_costs(
            layers=sizes.layers,
            embed=sizes.embed,
            heads=sizes.heads,
            mlp=sizes.mlp,
            vocab=sizes.vocab,
            seq_len=config.batch.seq_len,
            kv_heads=sizes.kv_heads,
            head=sizes.head,
            gated=sizes.activation in GATED,
            mtp=sizes.mtp,
        )
        return by_cost(costs, count, head=head)
    if "=" in text:
        found = parse_axes(text, argument="--stages")
        if wrong := [name for name in found if name not in ("first", "last")]:
            raise UserError(f"--stages {text}: {wrong[0]} is neither first nor last: write first=2,last=1")
        return uneven(sizes.layers, count, **found)
    return parse_layout(text, layers=sizes.layers, mtp=sizes.mtp)


def make_precision(config: TrainConfig, device: torch.device) -> Precision:
    """The number formats of a run: those of the settings, and where they say nothing bfloat16 products on a GPU, and a
    float32 copy of narrower parameters for the optimizer."""
    p = config.precision
    params = dtype_of(p.params)
    compute = p.compute or ("bfloat16" if device.type == "cuda" else None)
    narrow = params.itemsize < torch.float32.itemsize
    master = p.master or ("float32" if narrow and not p.stochastic_rounding else None)
    compute_, reduce, master_, wire = (None if d is None else dtype_of(d) for d in (compute, p.reduce, master, p.wire))
    fp8 = make_fp8(config)
    try:
        return Precision(params, compute_, reduce, master_, fp8, wire)
    except UserError as error:
        raise UserError(f"--precision.wire {p.wire}: {error}") from None


def make_run(config: TrainConfig, sizes: DecoderConfig, setup: Setup) -> Run:
    """Model, optimizer and step."""
    if config.kernels == "triton" and setup.device.type != "cuda":
        raise UserError(f"--kernels triton needs a GPU, and this run is on {setup.device.type}: leave it out")
    model = Decoder(
        sizes,
        save=kept_policy(config, sizes),
        compile=config.compile,
        label_smoothing=config.loss.label_smoothing,
        z_loss=config.loss.z_loss,
        overlap=config.overlap,
        kernel=config.kernels,
        keep_probabilities=config.keep_probabilities,
        dispatch=config.dispatch,
        record_routing=config.record_routing is not None,
    )
    check_routing_files(config, sizes)
    pipe = make_pipeline(config, model, setup)
    held = pipe.held if pipe is not None else lambda tree: tree
    spec = held(model.spec())
    setup.sh.check_spec(spec)
    optimizer = with_sharded_state(make_optimizer(config, model.spec(), setup.precision, held), spec, setup.sh)
    scaling = make_loss_scaling(config, setup.precision)
    late = (setup.device.type == "cuda" or config.recorded) and scaling is None and not config.debug
    step = train_step(
        model.loss,
        optimizer,
        weights=model.weights,
        sh=setup.sh,
        spec=spec,
        microbatches=config.batch.microbatches,
        donate=True,
        check_finite=not late,
        loss_scale=scaling,
        gradients=make_gradients(config, model, setup, spec, pipe),
        update_params=model.update_params,
    )
    step = recorded(step) if config.recorded else step
    return Run(setup, model, spec, optimizer, scaling, step, late, pipe)


def make_gradients(
    config: TrainConfig, model: Decoder, setup: Setup, spec: Any, pipe: Pipeline | None
) -> Callable[..., Any] | None:
    """What stands for `accumulate(model.loss, …)` in a step; None for that itself. Raises UserError for microbatches that routing
    does not allow."""
    n, moe = config.batch.microbatches, model.config.moe
    check_overlap(config, model.config)
    if config.moe.two_passes and (moe is None or moe.routing.group != "batch"):
        raise UserError("--moe.two-passes is for --moe.group batch: add it, or leave --moe.two-passes out")
    if n == 1 or moe is None:
        return pipe
    running = running_counts(model.config, device=setup.device)
    if running is not None and pipe is not None:
        raise UserError(
            f"--moe.group approximate with --mesh {config.mesh}: a pipeline has no running counts: use --moe.group sequence, or "
            "batch with --moe.two-passes"
        )
    two = needs_two_passes(model)
    if two and not config.moe.two_passes:
        raise UserError(
            f"--moe.group batch with --batch.microbatches {n}: it is about the whole batch: add --moe.two-passes True (a forward "
            "pass more), use --batch.microbatches 1, or --moe.group sequence"
        )
    overlap = config.microbatch_overlap
    if pipe is not None or not (two or running or overlap != "none"):
        return in_two_passes(model, pipe, microbatches=n) if pipe is not None else None
    gradients = accumulate(model.loss, n, weights=model.weights, spec=spec, running=running, overlap=overlap)
    return in_two_passes(model, gradients, microbatches=n)


def check_overlap(config: TrainConfig, sizes: DecoderConfig) -> None:
    """Raises UserError for --microbatch-overlap where it would mean nothing, or is not possible."""
    flag = f"--microbatch-overlap {config.microbatch_overlap}"
    for wrong, message in (
        (sizes.moe is None, "the model has no experts, whose exchanges it hides: leave it out"),
        (config.batch.microbatches == 1, "there is one microbatch: add --batch.microbatches 2, or leave it out"),
        (
            PIPELINE in parse_axes(config.mesh or "dp=1", argument="--mesh") and config.microbatch_overlap == "pairs",
            "a pipeline joins a forward and a backward: use --microbatch-overlap 1f1b",
        ),
        (
            config.microbatch_overlap == "pairs" and config.moe.group == "approximate",
            "--moe.group approximate counts the microbatches before: use --microbatch-overlap 1f1b",
        ),
    ):
        if wrong and config.microbatch_overlap != "none":
            raise UserError(f"{flag}: {message}")


def check_routing_files(config: TrainConfig, sizes: DecoderConfig) -> None:
    """Raises UserError for a recording or a replay of what is not there."""
    for flag, folder in (("--record-routing", config.record_routing), ("--replay-routing", config.replay_routing)):
        if folder is not None and sizes.moe is None:
            raise UserError(f"{flag} {folder}: the model has no experts: leave it out")
    folder = config.replay_routing
    if folder is None or step_file(folder, config.steps).is_file():
        return
    if not (there := recorded_steps(folder)):
        raise UserError(
            f"--replay-routing {folder} has no recorded step: give the folder of a run with --record-routing"
        )
    raise UserError(
        f"--replay-routing {folder} has no step {config.steps}, the last one there is {there[-1]}: use --steps {there[-1]}"
    )


def check_replay(config: TrainConfig, step: int) -> None:
    """Raises UserError where a step behind `step` is not among those that are to be replayed."""
    folder = config.replay_routing
    if folder is None or (missing := missing_step(folder, step + 1, config.steps)) is None:
        return
    raise UserError(
        f"--replay-routing {folder} has no step {missing}, and this run needs steps {step + 1} to {config.steps}: give the "
        "folder of a run that recorded them all"
    )


def kept_policy(config: TrainConfig, sizes: DecoderConfig) -> Callable[[str], bool]:
    """What a layer keeps for its backward, and what of that in host memory: names with HOST behind them. Raises UserError
    for a name that the model's layers do not have."""
    given = [name.strip() for name in config.remat.split(",")]
    host = [name.removesuffix(HOST) for name in given if name.endswith(HOST)]
    every = [name.removesuffix(HOST) for name in given]
    policy = remat_policy(dataclasses.replace(config, remat=",".join(every)), sizes)
    if not host:
        return policy
    if len(given) == 1 and host[0] in ("everything", "nothing"):
        raise UserError(
            f"--remat {config.remat}: {HOST} goes behind the name of a computation, such as attention{HOST},gate,up"
        )
    return offload(*host, keep=[name for name in every if name not in host])


def check(config: TrainConfig, world: int, sizes: DecoderConfig) -> None:
    """Make all parts of a run without memory and without other ranks, so that a mistake in the settings is told at
    once. Raises UserError."""
    make_run(config, sizes, make_setup(config, torch.device("cpu"), world, sizes=sizes, check_only=True))


def initial_state(config: TrainConfig, run: Run) -> TrainState:
    """The state of a new run; every rank makes, or reads of --init-from, its own shards alone."""
    root = random.key(config.seed)
    if config.init_from is None:
        params = init(run.spec, random.fold_in(root, "init"), sh=run.sh, device=run.setup.device)
    else:
        params = load_pretrained(config, run)
    scale = None if run.scaling is None else run.scaling.init()
    extras = first_extras(run)
    return TrainState(0, params, run.optimizer.init(params), random.fold_in(root, "train"), extras, scale)


def first_extras(run: Run) -> Any:
    """What the first state of a run holds besides parameters and optimizer: the history of delayed fp8 scaling."""
    return fp8.init(run.setup.precision.fp8, run.spec, device=run.setup.device)


def load_pretrained(config: TrainConfig, run: Run) -> Any:
    """The parameters of --init-from that this rank holds; it reads no others. Raises UserError for a folder whose tensors
    are not those of its config.json."""
    assert config.init_from is not None
    # without the other overrides, none of which changes a parameter
    options: dict[str, Any] = {
        "sh": run.sh,
        "device": run.setup.device,
        "vocab": run.model.config.vocab,
        "mtp": run.model.config.mtp,
        "seed": config.seed,
        "ignore_fields": ignored_fields(config),
        **{name: getattr(run.model.config, name) for name in FUSED},
    }
    held = None if run.pipe is None else run.pipe.held
    model, params = load_hf(config.init_from, held=held, **options)
    if (moe := run.model.config.moe) is None or model.config.moe is not None:
        return params
    root = random.fold_in(random.key(config.seed), "upcycled")
    dense_layers = moe.dense_layers
    return upcycled(params, model.config, moe.routing, key=root, dense_layers=dense_layers, sh=run.sh, held=held)[0]


def abstract_state(config: TrainConfig, run: Run, *, scaled: bool | None = None, extras: Any = None) -> TrainState:
    """The shapes, dtypes and placements of a state, for `checkpoint.load`; it holds no memory, but that of a state that is
    to come into host memory.

    scaled: has the checkpoint a loss scale? None: where the run has one. extras: the same of its extras.
    """
    params = abstract(run.spec, sh=run.sh)
    scaled = run.scaling is not None if scaled is None else scaled
    scale = LossScale(0.0, 0, 0, 0) if scaled else None
    opt = run.optimizer.init(params)
    return TrainState(0, params, on_host(opt) if config.offload_optimizer else opt, random.key(0), extras, scale)


class Batches:
    """The part of each global batch that this rank holds: its rows, and of the sequence its columns; filled up where
    the batch does not divide."""

    def __init__(self, config: TrainConfig, setup: Setup, *, sizes: DecoderConfig | None = None) -> None:
        sh = setup.sh
        self.size, self.seq_len, self.sh, self.device = config.batch.size, config.batch.seq_len, sh, setup.device
        self.rows, self.no_rows = held_positions(config.batch.size, "batch", sh)
        self.columns, self.no_columns = held_positions(config.batch.seq_len, "seq", sh)
        self.replayed, self.choices, self.experts = config.replay_routing, (0, 0), 0
        if sizes is not None and sizes.moe is not None:
            routing = sizes.moe.routing
            self.choices, self.experts = (layers_with_experts(sizes), routing.choices), routing.experts

    def train(self, data: TokenDataset, step: int) -> dict[str, torch.Tensor]:
        """A pure function of (data, seed, step)."""
        batch = data.batch(step, batch_size=self.size, rows=self.rows, columns=self.columns)
        if self.replayed is not None:
            shape = (self.size, self.seq_len, *self.choices)
            found = read_record(
                self.replayed, step + 1, rows=self.rows, columns=self.columns, shape=shape, experts=self.experts
            )
            batch = {**batch, "routing": found}
        return self._placed(batch)

    def held_out(self, data: TokenDataset, limit: int | None) -> Iterator[dict[str, torch.Tensor]]:
        """Every held-out token once, in order; at most `limit` batches. The last is filled with rows that do not
        count."""
        for batch in eval_batches(data, self.size, rows=self.rows, columns=self.columns, limit=limit):
            yield self._placed(batch)

    def _placed(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch = marked(batch, self.size, self.seq_len, self.sh)
        batch = overwritten(batch, self.no_rows, self.no_columns)
        return to_device(batch, self.device)


def describe(config: TrainConfig) -> int:
    """`fmegatron describe`: print the parameters with their placements on the mesh, without starting anything."""
    world = math.prod(parse_axes(config.mesh or "dp=1", argument="--mesh").values())
    sizes = model_config(config, None)
    setup = make_setup(config, torch.device("cpu"), world, sizes=sizes, check_only=True)
    make_run(config, sizes, setup)
    print(sizes)
    print(setup.mesh)
    print(describe_spec(Decoder(sizes).spec(), sh=setup.sh))
    if problem := export_problem(sizes):
        print(f"no export to Hugging Face: {problem}")
    return 0
