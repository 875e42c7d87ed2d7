"""Everything that `import fmegatron as fm` offers, collected from the modules of the core."""

import importlib
from typing import TYPE_CHECKING, Any

from fmegatron import optim, random, schedules
from fmegatron.accumulate import Term, Weight, accumulate
from fmegatron.context import Ctx
from fmegatron.errors import ShardingError, UserError
from fmegatron.grad import value_and_grad
from fmegatron.initializers import constant, normal, ones, truncated_normal, uniform, zeros
from fmegatron.interleave import interleaved
from fmegatron.launch import close_distributed as leave_processes
from fmegatron.launch import init_distributed as join_processes
from fmegatron.launch import is_first_process
from fmegatron.loss_scale import LossScale, LossScaling, dynamic_loss_scale, static_loss_scale
from fmegatron.mesh import Mesh, make_mesh
from fmegatron.padding import shard_batch
from fmegatron.precision import Precision
from fmegatron.random import Key, fold_in, key
from fmegatron.random import split as split_key
from fmegatron.remat import names, nothing, offload, remat
from fmegatron.rules import Rules, standard_rules
from fmegatron.sharding import Sharding, placements
from fmegatron.simulation import per_rank, simulate
from fmegatron.spec import Param, abstract, count, describe, init
from fmegatron.split import everything, split
from fmegatron.step import NonFiniteError, TrainState, evaluate, train_step
from fmegatron.zero import with_sharded_state

if TYPE_CHECKING:
    from fmegatron.checking import check, infer_over
    from fmegatron.graphs import recorded
    from fmegatron.offload import offloaded
    from fmegatron.parallel.experts import mlp_experts
    from fmegatron.parallel.folding import expert_factoring
    from fmegatron.parallel.moe import moe, router
    from fmegatron.parallel.pipeline import Ends, Pipeline, find_ends, inside_stage, pipeline
    from fmegatron.parallel.routing import Routed, Routing, route
    from fmegatron.parallel.schedules import make_schedule
    from fmegatron.parallel.stages import parse_layout
    from fmegatron.placements import Invariant, Partial, Replicate, Shard
    from fmegatron.replicas import ReplicaError, check_replicas

# What many programs do without, imported with the first of its names.
_LATER = {
    "fmegatron.checking": ("check", "infer_over"),
    "fmegatron.graphs": ("recorded",),
    "fmegatron.offload": ("offloaded",),
    "fmegatron.parallel.experts": ("mlp_experts",),
    "fmegatron.parallel.folding": ("expert_factoring",),
    "fmegatron.parallel.moe": ("moe", "router"),
    "fmegatron.parallel.pipeline": ("Ends", "Pipeline", "find_ends", "inside_stage", "pipeline"),
    "fmegatron.parallel.routing": ("Routed", "Routing", "route"),
    "fmegatron.parallel.schedules": ("make_schedule",),
    "fmegatron.parallel.stages": ("parse_layout",),
    "fmegatron.placements": ("Invariant", "Partial", "Replicate", "Shard"),
    "fmegatron.replicas": ("ReplicaError", "check_replicas"),
}


def __getattr__(name: str) -> Any:
    for module, its_names in _LATER.items():
        if name in its_names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Ctx",
    "Ends",
    "Invariant",
    "Key",
    "LossScale",
    "LossScaling",
    "Mesh",
    "NonFiniteError",
    "Param",
    "Partial",
    "Pipeline",
    "Precision",
    "ReplicaError",
    "Replicate",
    "Routed",
    "Routing",
    "Rules",
    "Shard",
    "Sharding",
    "ShardingError",
    "Term",
    "TrainState",
    "UserError",
    "Weight",
    "abstract",
    "accumulate",
    "check",
    "check_replicas",
    "constant",
    "count",
    "recorded",
    "describe",
    "dynamic_loss_scale",
    "evaluate",
    "everything",
    "expert_factoring",
    "find_ends",
    "fold_in",
    "infer_over",
    "init",
    "inside_stage",
    "interleaved",
    "is_first_process",
    "join_processes",
    "key",
    "leave_processes",
    "make_mesh",
    "make_schedule",
    "mlp_experts",
    "moe",
    "names",
    "normal",
    "nothing",
    "offload",
    "offloaded",
    "ones",
    "optim",
    "parse_layout",
    "per_rank",
    "pipeline",
    "placements",
    "random",
    "remat",
    "route",
    "router",
    "schedules",
    "shard_batch",
    "simulate",
    "split",
    "split_key",
    "standard_rules",
    "static_loss_scale",
    "train_step",
    "truncated_normal",
    "uniform",
    "value_and_grad",
    "with_sharded_state",
    "zeros",
]
