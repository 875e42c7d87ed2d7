"""Optimizers as pairs of pure functions that chain.

    optimizer = chain(clip_by_global_norm(1.0), adamw(cosine(3e-4, warmup=100, total=10_000), mask=decay_mask(spec)))
    state = optimizer.init(params)
    params, grads, state = optimizer.update(params, grads, state)

A piece may change the gradients (clipping), the parameters (adamw, muon) or only its state (ema). `update` is pure;
with `donate=True` it overwrites the buffers of params, grads and state and returns them, bitwise the same values,
without temporaries of the size of a tree. The states are dicts of trees like the parameters' and a count (a Python int).

Leaves may be plain tensors or DTensors (updated on the local shard; moments get the parameter's placements), of several
dtypes and devices: one multi-tensor call a group. Where the gradient is None, parameter and moments stay as they are.
Under torch.func (an ensemble by vmap) the same mathematics runs in plain operations and `donate` is ignored.
"""

from fmegatron.optim.adafactor import adafactor
from fmegatron.optim.adam import adam, adamw
from fmegatron.optim.clip import clip_by_global_norm
from fmegatron.optim.core import Optimizer, Rate, chain
from fmegatron.optim.ema import ema, ema_params
from fmegatron.optim.lion import lion
from fmegatron.optim.master import with_master
from fmegatron.optim.muon import muon
from fmegatron.optim.newton_schulz import newton_schulz
from fmegatron.optim.norm import global_norm, sum_of_squares
from fmegatron.optim.partition import muon_labels, partition
from fmegatron.optim.per_leaf import decay_mask, dims, per_leaf
from fmegatron.optim.rounding import with_stochastic_rounding
from fmegatron.optim.sgd import sgd

__all__ = [
    "Optimizer",
    "Rate",
    "adafactor",
    "adam",
    "adamw",
    "chain",
    "clip_by_global_norm",
    "decay_mask",
    "dims",
    "ema",
    "ema_params",
    "global_norm",
    "lion",
    "muon",
    "muon_labels",
    "newton_schulz",
    "partition",
    "per_leaf",
    "sgd",
    "sum_of_squares",
    "with_master",
    "with_stochastic_rounding",
]
