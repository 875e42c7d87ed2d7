"""What one rank computes on a layout, and where in the whole each of its values lies.

The pieces are placed by what their DTensor says (placements and mesh), not by the functions that cut them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fmegatron import optim, random, tree
from fmegatron.accumulate import accumulate
from fmegatron.errors import ShardingError
from fmegatron.mesh import Mesh
from fmegatron.models.two_passes import in_two_passes, needs_two_passes
from fmegatron.optim import Optimizer, global_norm
from fmegatron.padding import shard_batch
from fmegatron.precision import Precision
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank
from fmegatron.spec import init
from fmegatron.step import TrainState, train_step
from fmegatron.testing.layout import Layout
from fmegatron.testing.program import Program
from fmegatron.zero import with_sharded_state

STEPS = 3
CHECKS = ("init", "gradients", "adamw", "sgd")
ADAMW_RATE, SGD_RATE = 1e-2, 1.0

Slices = tuple[tuple[int, int], ...]  # (start, length) of each dim


@dataclass(frozen=True)
class Piece:
    """A rank's part of one value, and where it lies. placements: in words, for messages."""

    value: Tensor
    where: Slices
    placements: str = ""


Outcome = dict[str, dict[str, Piece]]  # {what was computed: {leaf: piece}} of one rank


@dataclass(frozen=True)
class Job:
    """One run: which checks, in which precision, clipped at which norm."""

    checks: tuple[str, ...] = CHECKS
    precision: Precision = Precision(params=torch.float64)
    clip: float = 1.0
    seed: int = 0
    steps: int = STEPS


@dataclass(frozen=True)
class Inputs:
    """What a run begins with, whole and on one device. Made outside of a simulation, where every rank would draw
    random numbers of its own."""

    spec: Any
    params: Any
    batches: list[dict[str, Tensor]]


def inputs_of(program: Program, layout: Layout, job: Job) -> Inputs:
    """Parameters and a batch for each step; the same in every process."""
    spec = program.spec()
    batches = [program.batch_of(layout, seed=job.seed + n) for n in range(job.steps)]
    return Inputs(spec, program.params_of(spec, job.precision.params, seed=job.seed), batches)


def run(
    program: Program, layout: Layout, job: Job, inputs: Inputs, *, reference: bool = False, device: str = "cpu"
) -> list[Outcome]:
    """What the ranks of this process compute: all ranks in a simulation, else one.

    reference: on one device without a mesh, in one microbatch, with nothing computed again.
    """
    made = made_for = program if reference else program.on(layout)
    _, loss, weights = made.functions
    spec, whole, here = inputs.spec, inputs.params, torch.device(device)
    sh, pipe = Sharding(precision=job.precision), None
    if not reference:
        mesh = made.mesh(layout, device=device)
        sh = made.sharding(layout, job.precision, mesh=mesh)
        if layout.pipelined:
            pipe = made.pipeline(layout, spec, mesh)
            spec, whole = pipe.spec, pipe.held(whole)  # what this rank's stages hold
    params = sh.shard_params(tree.tree_map(lambda t: t.to(here), whole), spec)
    batches = [
        shard_batch({n: x.to(here) for n, x in b.items()}, sh, dims={n: program.dims_of(n, x) for n, x in b.items()})
        for b in inputs.batches[: job.steps]
    ]
    found: dict[str, Any] = {}
    if "init" in job.checks and program.params is None:
        found["init"] = init(spec, random.key(job.seed), sh=sh, device=here)
    kept: dict[str, Any] = {}

    def step_with(*pieces: Optimizer, donate: bool = False) -> Any:
        made = optim.chain(*pieces)
        if reference:
            return made, train_step(loss, made, weights=weights, sh=sh, donate=donate)
        made = with_sharded_state(made, spec, sh)
        gradients: Any = pipe
        if layout.micro > 1 and needs_two_passes(made_for.model):
            gradients = pipe or accumulate(loss, layout.micro, weights=weights, spec=spec)
            gradients = in_two_passes(made_for.model, gradients, microbatches=layout.micro)
        options: dict[str, Any] = {"microbatches": layout.micro, "spec": spec, "donate": donate, "gradients": gradients}
        return made, train_step(loss, made, weights=weights, sh=sh, **options)

    def steps(step: Any, state: TrainState, start: int) -> TrainState:
        for batch in batches[start:]:
            state, _ = step(state, batch)
        return state

    adamw = (
        _keep("gradients", kept),
        optim.clip_by_global_norm(job.clip),
        _keep("clipped", kept),
        optim.adamw(ADAMW_RATE),
    )
    optimizer, step = step_with(*adamw)
    key = random.key(job.seed)
    state = TrainState(0, params, optimizer.init(params), key)
    after, metrics = step(state, batches[0])
    gradients = kept["gradients"]
    found["loss"] = {n: metrics[n] for n in metrics if n not in ("grad_norm", "param_norm", "lr", "stats")}
    found["gradients"], found["clipped"] = gradients, kept["clipped"]
    found["norms"] = {
        "raw": metrics["grad_norm"],
        "clipped": (global_norm if pipe is None else pipe.norm)(kept["clipped"]),
        "params": metrics["param_norm"],
    }
    if "adamw" in job.checks:
        after = steps(step, after, 1)
        found["adamw parameters"] = after.params
        for name in ("m", "v"):
            found[f"adamw {name}"] = after.opt["adamw"][name]
    if "donate" in job.checks:
        again = TrainState(0, tree.tree_map(_copy, params), optimizer.init(params), key)
        donated = steps(step_with(*adamw, donate=True)[1], again, 0)
        found["donated parameters"] = donated.params
        for name in ("m", "v"):
            found[f"donated {name}"] = donated.opt["adamw"][name]
    if "sgd" in job.checks:
        optimizer, step = step_with(optim.sgd(SGD_RATE))
        moved, _, opt = optimizer.update(params, gradients, optimizer.init(params))
        found["sgd parameters"] = steps(step, TrainState(1, moved, opt, key), 1).params
    return _by_rank(found, sh.mesh)


def _keep(name: str, into: dict[str, Any]) -> Optimizer:
    """A piece of an optimizer that changes nothing and keeps the first gradients that pass."""

    def update(params: Any, grads: Any, state: Any, **_: Any) -> Any:
        if name not in into:
            into[name] = tree.tree_map(_copy, grads)
        return params, grads, state

    return Optimizer(lambda params: {}, update, name)


def _copy(t: Any) -> Any:
    if isinstance(t, DTensor):
        local = t.to_local().clone()
        return DTensor.from_local(local, t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride())
    return t.clone() if isinstance(t, Tensor) else t


# ------------------------------------------------------------------------------------------------- who holds what


def _by_rank(found: dict[str, Any], mesh: Mesh | None) -> list[Outcome]:
    ranks = mesh.world if mesh is not None and mesh.simulated else 1
    made: list[Outcome] = [{} for _ in range(ranks)]
    for what, values in found.items():
        for outcome in made:
            outcome[what] = {}
        for path, x in tree.named(values).items():
            if not isinstance(x, Tensor):
                continue
            for outcome, piece in zip(made, _pieces(x, mesh, ranks, f"{what} {path}"), strict=True):
                outcome[what][path] = piece
    return made


def _pieces(x: Tensor, mesh: Mesh | None, ranks: int, where: str) -> list[Piece]:
    """The piece of each rank of this process."""
    if not isinstance(x, DTensor):
        whole = tuple((0, n) for n in x.shape)
        values = per_rank(x.detach())
        values = values * ranks if len(values) == 1 else values
        return [Piece(v.cpu(), whole, "") for v in values]
    order = x.device_mesh.mesh
    values = per_rank(x.to_local().detach())
    assert mesh is not None
    names = x.device_mesh.mesh_dim_names or ()
    sizes = order.shape
    shown = ", ".join(f"{n}:{p}" for n, p, size in zip(names, x.placements, sizes, strict=True) if size > 1)
    if len(values) == 1 and ranks == 1:
        coordinates = [list(x.device_mesh.get_coordinate() or ())]
    else:
        values = values * ranks if len(values) == 1 else values
        coordinates = [(order == r).nonzero()[0].tolist() for r in range(ranks)]
    found = []
    for value, at in zip(values, coordinates, strict=True):
        there = slices_of(x.shape, x.placements, sizes, at, where)
        found.append(Piece(value.cpu(), there, shown or "one rank"))
    return found


def slices_of(
    shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int], at: Sequence[int], where: str = "a value"
) -> Slices:
    """(start, length) per dim of the shard at a coordinate, by DTensor's rule: mesh dims cut from left to right, in
    chunks as torch.chunk makes them."""
    found = [[0, n] for n in shape]
    for placement, size, c in zip(placements, sizes, at, strict=True):
        if isinstance(placement, Shard):
            start, n = found[placement.dim]
            each = -(-n // size)
            found[placement.dim] = [start + min(c * each, n), max(0, min(each, n - c * each))]
        elif not isinstance(placement, Replicate):
            raise ShardingError(f"{where} is at rest as {placement}, which is no layout of a finished value")
    return tuple((a, b) for a, b in found)


__all__ = ["CHECKS", "Inputs", "Job", "Outcome", "Piece", "inputs_of", "run", "slices_of"]
