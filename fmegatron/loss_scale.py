"""Loss scaling for fp16: what the loss is multiplied by, and how that changes from step to step.

    policy = dynamic_loss_scale()
    step = train_step(model.loss, optimizer, weights=model.weights, sh=sh, loss_scale=policy)
    state = TrainState(0, params, optimizer.init(params), key(0), loss_scale=policy.init())

fp16 holds 6e-8 to 65,504. Gradients are often smaller and become zeros; multiplied by a large number, and divided by
it again once they are in fp32, they survive (Micikevicius et al., "Mixed precision training", 2018). A step whose
gradients overflow for it is left out. A policy is a pair of pure functions, `init` and `update`, of a state of four
numbers, which is a part of the train state and of checkpoints. bf16 has fp32's range and needs none of this.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

import optree

from fmegatron.errors import UserError
from fmegatron.tree import NAMESPACE

SMALLEST, LARGEST = 2.0**-126, 2.0**127  # of the scales that one can begin with: normal numbers of fp32


@dataclass(frozen=True)
class LossScale:
    """The state of loss scaling: Python numbers, equal on all ranks.

    scale: what the next step multiplies its loss by; exact in fp32.
    good_steps: steps with finite gradients since the scale last changed or a step was skipped.
    hysteresis: how many more steps may be skipped before the scale backs off; 0 when the next one, or the last, did it.
    skipped: all steps skipped since the first. `TrainState.step` less this is the number of updates made.
    """

    scale: float
    good_steps: int
    hysteresis: int
    skipped: int


_FIELDS = ("scale", "good_steps", "hysteresis", "skipped")
_register: Any = optree.register_pytree_node
_register(
    LossScale,
    lambda s: (tuple(getattr(s, name) for name in _FIELDS), None, _FIELDS),
    lambda _, children: LossScale(*children),
    namespace=NAMESPACE,
)


@dataclass(frozen=True)
class LossScaling:
    """How a loss scale begins and changes; made by `dynamic_loss_scale` or `static_loss_scale`, which say the rule."""

    initial: float
    growth_interval: int
    factor: float
    backoff: float
    hysteresis: int
    minimum: float

    def init(self) -> LossScale:
        """The state before the first step."""
        return LossScale(_fp32(self.initial), 0, self.hysteresis, 0)

    def update(self, state: LossScale, finite: bool) -> LossScale:
        """The state after a step. finite: were its loss and gradients finite? If not, the step was skipped."""
        if finite:
            if state.good_steps + 1 < self.growth_interval:
                return replace(state, good_steps=state.good_steps + 1)
            return replace(state, scale=_grown(state.scale, self.factor), good_steps=0, hysteresis=self.hysteresis)
        left = max(state.hysteresis - 1, 0)
        scale = state.scale if left else max(_fp32(state.scale * self.backoff), self.minimum)
        return LossScale(scale, 0, left, state.skipped + 1)

    def exhausted(self, state: LossScale) -> bool:
        """Can skipping no longer help? If the next step is not finite, the scale had to fall, and is at its minimum."""
        return state.hysteresis <= 1 and state.scale <= self.minimum


def dynamic_loss_scale(
    initial: float = 2.0**16,
    *,
    growth_interval: int = 1000,
    factor: float = 2.0,
    backoff: float = 0.5,
    hysteresis: int = 2,
    minimum: float = 1.0,
) -> LossScaling:
    """A scale as large as the gradients allow.

    A step whose loss or gradients are not finite is skipped; after `hysteresis` such steps the scale is multiplied by
    `backoff`, but stays at `minimum` or above. After `growth_interval` finite steps in a row it is multiplied by
    `factor`, unless that leaves fp32. As in Megatron-LM, whose defaults these are but for the first scale (its
    --initial-loss-scale is 2**32, which takes 17 skipped steps to come down to this one; the others are
    --loss-scale-window, --hysteresis and --min-loss-scale): the steps that `hysteresis` counts need not be
    consecutive; once they are used up every further overflow backs off; and they are given anew only when the scale
    grows. With hysteresis=1 and a minimum that is not reached, it is the rule of torch.amp.GradScaler
    (growth_interval=2000 there).

    A step that would have to back off from `minimum` raises `NonFiniteError` instead of being skipped. A loss that is
    not finite itself, which no scale cures, counts as an overflow: when it persists, the scale falls and the error
    comes with the 18th such step in a row (16 halvings from the first scale, and hysteresis).

    Raises UserError unless 0 < minimum <= initial (in fp32's range), 0 < backoff < 1 < factor, growth_interval >= 1
    and hysteresis >= 1.
    """
    if not SMALLEST <= minimum <= initial < LARGEST:
        raise UserError(
            f"dynamic_loss_scale(initial={initial}, minimum={minimum}): give numbers that fp32 holds, the minimum above 0 "
            "and not above initial"
        )
    if not 0 < backoff < 1 < factor < LARGEST:
        raise UserError(
            f"dynamic_loss_scale(factor={factor}, backoff={backoff}): give a factor above 1 and a backoff between 0 and 1"
        )
    _at_least_one("dynamic_loss_scale", growth_interval=growth_interval, hysteresis=hysteresis)
    return LossScaling(float(initial), growth_interval, factor, backoff, hysteresis, _fp32(minimum))


def static_loss_scale(value: float, *, patience: int = 8) -> LossScaling:
    """One scale for ever (Megatron-LM's --loss-scale). Steps that are not finite are skipped, but the last of
    `patience` in a row raises `NonFiniteError`.

    Raises UserError unless value is above 0 and patience at least 1.
    """
    if not SMALLEST <= value < LARGEST:
        raise UserError(f"static_loss_scale({value}): give a number above 0 that fp32 holds, such as a power of two")
    _at_least_one("static_loss_scale", patience=patience)
    # every finite step "grows" by 1, which gives all of the hysteresis anew
    return LossScaling(float(value), 1, 1.0, 1.0, patience, _fp32(value))


def _fp32(x: float) -> float:
    """x rounded to fp32, in which losses are multiplied. Raises OverflowError beyond its range."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def _grown(scale: float, factor: float) -> float:
    try:
        return _fp32(scale * factor)
    except OverflowError:
        return scale


def _at_least_one(name: str, **values: int) -> None:
    for argument, value in values.items():
        if value < 1:
            raise UserError(f"{name}({argument}={value}): it must be at least 1")


__all__ = ["LossScale", "LossScaling", "dynamic_loss_scale", "static_loss_scale"]
