"""The optimizer, its schedule and the loss scale that the settings of a run mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fmegatron import optim, random, schedules
from fmegatron.config import OptimConfig, TrainConfig
from fmegatron.errors import UserError
from fmegatron.loss_scale import LossScaling, dynamic_loss_scale, static_loss_scale
from fmegatron.offload import offloaded
from fmegatron.optim import Optimizer
from fmegatron.optim.moments import moments_of
from fmegatron.precision import Precision, dtype_name

MUON_LR = 0.02
DIMS = "dims:"  # begins a pattern over dims, not paths
ADAMS: dict[str, Callable[..., Optimizer]] = {"adamw": optim.adamw, "adam": optim.adam}


def make_optimizer(
    config: TrainConfig, spec: Any, precision: Precision, held: Callable[[Any], Any] = lambda tree: tree
) -> Optimizer:
    """The optimizer of what `held` takes of a tree like the whole model's spec: all, or a pipeline stage's part. Clipping, the update with its schedule, and what else the settings ask for: an average of the weights, master
    copies, stochastic rounding, a state in host memory. Raises UserError for a leaf pattern that is wrong or matches nothing."""
    o = config.optim
    # adam and adamw clip as they read the gradients
    pieces = [optim.clip_by_global_norm(o.clip)] if o.clip and o.name not in ADAMS else []
    pieces.append(_update(config, spec, held))
    if o.ema is not None:
        pieces.append(optim.ema(o.ema))
    optimizer = optim.chain(*pieces)
    if config.precision.stochastic_rounding:
        optimizer = optim.with_stochastic_rounding(optimizer, random.fold_in(random.key(config.seed), "rounding"))
    if precision.master is not None and precision.master != precision.params:
        optimizer = optim.with_master(optimizer, precision.master)
    if config.offload_optimizer:
        optimizer = offloaded(optimizer)
    return dataclasses.replace(optimizer, rate=make_schedule(config, o.lr))


def make_schedule(config: TrainConfig, peak: float) -> Callable[[int], float]:
    """The learning rate by the number of updates before, for a rate after the warm-up; `min_lr` keeps its ratio to
    `lr`."""
    o, steps = config.optim, config.steps
    end = o.min_lr * peak / o.lr
    warmup = min(o.warmup, max(steps - 1, 0))
    decay = min(o.decay or max(1, steps // 5), steps - warmup)
    rates: dict[str, Callable[[], Any]] = {
        "constant": lambda: schedules.constant(peak, warmup=warmup),
        "linear": lambda: schedules.linear(peak, total=steps, warmup=warmup, end=end),
        "cosine": lambda: schedules.cosine(peak, total=steps, warmup=warmup, end=end),
        "wsd": lambda: schedules.wsd(
            peak, total=steps, warmup=warmup, decay=decay, end=end, form=o.wsd_form or "linear"
        ),
        # of the length of the warm-up alone, so that more steps on a resume change nothing
        "inverse_sqrt": lambda: schedules.inverse_sqrt(peak, warmup=o.warmup, end=end),
    }
    try:
        return rates[o.schedule]()
    except UserError as error:
        raise UserError(f"--optim.schedule {o.schedule}: {error}") from None


def make_loss_scaling(config: TrainConfig, precision: Precision) -> LossScaling | None:
    """The policy of the loss scale; None where nothing is in float16."""
    p = config.precision
    if not precision.needs_loss_scale:
        return None
    try:
        if isinstance(p.loss_scale, float):
            return static_loss_scale(p.loss_scale)
        return dynamic_loss_scale(
            p.loss_scale_initial,
            growth_interval=p.loss_scale_window,
            hysteresis=p.loss_scale_hysteresis,
            minimum=p.loss_scale_minimum,
        )
    except UserError as error:
        raise UserError(f"--precision.loss-scale: {error}") from None


def optimizer_form(config: TrainConfig, precision: Precision) -> dict[str, Any]:
    """{flag: value} of the settings that decide what an optimizer's state holds, as far as they do: a run can only go
    on with the same."""
    o, p = config.optim, config.precision
    # whether there is a buffer of momentum counts, not how fast it decays
    buffer = {"sgd": o.momentum != 0.0, "adafactor": bool(o.momentum)}.get(o.name)
    master = precision.master if precision.master != precision.params else None
    return {
        "optim.name": o.name,
        "optim.momentum": buffer,
        "optim.ema": o.ema is not None,
        "precision.moments": p.moments,
        "precision.master": None if master is None else dtype_name(master),
        "precision.stochastic-rounding": p.stochastic_rounding,
    }


# -------------------------------------------------------------------------------------------------------------- parts


def _update(config: TrainConfig, whole: Any, held: Callable[[Any], Any]) -> Optimizer:
    """The piece that changes the parameters. Patterns are of the whole model's leaves."""
    o = config.optim
    rate = make_schedule(config, o.lr)
    scale = None if o.lr_scale is None else held(_by_leaf("lr-scale", o.lr_scale, whole, 1.0))
    common: dict[str, Any] = {"weight_decay": held(_decays(o, whole)), "lr_scale": scale}
    spec = held(whole)
    if config.precision.moments is not None:
        common["moments"] = moments_of(config.precision.moments)
    adam: dict[str, Any] = {"betas": (o.beta1, o.beta2), "eps": o.eps}
    if o.name in ADAMS:
        return ADAMS[o.name](rate, clip=o.clip or None, **adam, **common)
    if o.name == "lion":
        return optim.lion(rate, betas=(o.beta1, o.beta2), **common)
    if o.name == "sgd":
        momentum = 0.9 if o.momentum is None else o.momentum
        return optim.sgd(rate, momentum=momentum, nesterov=o.nesterov, **common)
    if o.name == "adafactor":
        return optim.adafactor(rate, beta1=o.momentum or None, spec=spec, **common)
    adjust = None if o.muon_adjust == "none" else o.muon_adjust or "original"
    matrices = optim.muon(
        make_schedule(config, o.muon_lr or MUON_LR),
        spec=spec,
        momentum=0.95 if o.momentum is None else o.momentum,
        adjust_lr=adjust,
        **common,
    )
    return optim.partition(optim.muon_labels(spec), {"muon": matrices, "adamw": optim.adamw(rate, **adam, **common)})


def _decays(o: OptimConfig, spec: Any) -> Any:
    """The weight decay of every leaf: the general one where `decay_mask` has it, and what --optim.weight-decay-of
    says."""

    def general(param: Any) -> float:
        return o.weight_decay if optim.decay_mask(param) else 0.0

    return _by_leaf("weight-decay-of", o.weight_decay_of or "", spec, general)


def _by_leaf(flag: str, text: str, spec: Any, default: Any) -> Any:
    """A tree of numbers from PATTERN=NUMBER,… with a default."""
    values: dict[Any, float] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        pattern, found, number = item.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        pattern = pattern.strip()
        if not found or not pattern or not 0 <= value < float("inf"):
            raise UserError(
                f"--optim.{flag} {text}: {item!r} is not PATTERN=NUMBER with a number of 0 or more; "
                "write such as embed=0.1,layers.*.q=0.5,dims:embed mlp=0.2"
            )
        values[optim.dims(pattern.removeprefix(DIMS).strip()) if pattern.startswith(DIMS) else pattern] = value
    try:
        return optim.per_leaf(spec, default, values)
    except UserError as error:
        raise UserError(f"--optim.{flag} {text}: {str(error).removeprefix('per_leaf: ')}") from None
