"""The training step: `step(state, batch) -> (state, metrics)`, a pure function of a state that is a pytree.

    step = train_step(model.loss, optimizer, weights=model.weights, sh=sh)
    state = TrainState(step=0, params=params, opt=optimizer.init(params), key=key(0))
    state, metrics = step(state, batch)

It is made of `accumulate`, an optimizer and `global_norm`; a user's own step takes the same parts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import optree
import torch

from fmegatron.accumulate import Weight, accumulate
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.fp8 import scaling as fp8
from fmegatron.function import readable, under_torch_func
from fmegatron.loss_scale import LossScale, LossScaling
from fmegatron.optim import Optimizer, global_norm
from fmegatron.optim.core import rate_at
from fmegatron.random import Key, fold_in
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulating
from fmegatron.tree import NAMESPACE, is_float, named


def _nothing() -> None:
    return None


@dataclass(frozen=True, eq=False)
class TrainState:
    """All that a step changes.

    step: steps made so far, skipped ones included: the number of the next batch. params, opt: trees at rest.
    key: from which each step folds its own.
    extras: what changes without a gradient (router biases, scaling histories), updated by `update_extras` of
        `train_step`.
    loss_scale: with fp16, the state of its policy. As a tree a state without it has no such leaf, so that it loads
        from checkpoints that were saved before there was one.
    """

    step: int
    params: Any
    opt: Any
    key: Key | None = field(default_factory=_nothing)
    extras: Any = field(default_factory=_nothing)
    loss_scale: LossScale | None = field(default_factory=_nothing)

    def __getattr__(self, name: str) -> Any:
        # reached only for a missing attribute: a donated state has none left
        if name in _FIELDS and not name.startswith("__"):
            raise RuntimeError(
                f"this state was donated to a later step, which reuses its buffers: read {name!r} of the state that step returned, "
                "or make the step with donate=False"
            )
        raise AttributeError(name)

    def _donate(self) -> TrainState:
        """A state with the same leaves; this one is empty afterwards."""
        fresh = TrainState(**{name: getattr(self, name) for name in _FIELDS})
        self.__dict__.clear()
        return fresh


_FIELDS = ("step", "params", "opt", "key", "extras", "loss_scale")


def _flatten(state: TrainState) -> tuple[tuple[Any, ...], None, tuple[str, ...]]:
    names = _FIELDS if state.loss_scale is not None else _FIELDS[:-1]
    return tuple(getattr(state, name) for name in names), None, names


def _unflatten(_: None, children: Any) -> TrainState:
    return TrainState(*children)


optree.register_pytree_node(TrainState, _flatten, _unflatten, namespace=NAMESPACE)  # type: ignore[arg-type]


class NonFiniteError(RuntimeError):
    """A loss or a gradient is infinite or not a number. step: the number of the step, from 1; leaf: the first such
    value's name; loss_scale: with loss scaling, the scale at which that was so, which cannot fall further."""

    def __init__(self, step: int, leaf: str, loss_scale: float | None = None) -> None:
        scale = "" if loss_scale is None else f", and the loss scale, {loss_scale:g}, cannot fall further"
        super().__init__(
            f"step {step}: {leaf} is not finite{scale}; the state before this step is unchanged. "
            "Lower the learning rate, or find where it arose with --debug"
        )
        self.step, self.leaf, self.loss_scale = step, leaf, loss_scale


def train_step(
    loss: Callable[..., Any],
    optimizer: Optimizer,
    *,
    weights: Callable[[Any], Mapping[str, Weight]] | None = None,
    sh: Sharding | None = None,
    microbatches: int = 1,
    trainable: Any = None,
    spec: Any = None,
    donate: bool = False,
    check_finite: bool = True,
    update_extras: Callable[[Any, Any], Any] | None = None,
    update_params: Callable[[Any, Any, Sharding], Any] | None = None,
    loss_scale: LossScaling | None = None,
    gradients: Callable[..., Any] | None = None,
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]:
    """step(state, batch) -> (state, metrics) for `loss(params, batch, ctx) -> (terms, stats)`.

    weights, microbatches, trainable: as for `accumulate`.
    spec: the parameters' spec tree, by which gradients are reduced once a step and not in every microbatch (see
        `accumulate`). With ZeRO-1 or -2 it is needed, and `optimizer` is `with_sharded_state(…, spec, sh)`.
    donate: reuse the old state's buffers, with the memory of an in-place trainer; using that state again is an
        error. By default a step is pure. Both give bitwise the same values.
    check_finite: raise NonFiniteError, before anything is changed, for a loss or gradient that is not finite.
    update_extras: (extras, stats) -> extras, by the step's reduced statistics, outside optimizer and norm. With delayed fp8
        scaling (`precision.fp8`) the extras have a part "fp8", made by `fmegatron.fp8.scaling.init`, which it hands on.
    update_params: (params, stats, sh) -> params, behind the optimizer's update: what changes by statistics and not by a
        gradient, such as the biases of a router's choice (`Decoder.update_params`).
    gradients: in place of `accumulate(loss, …)`, such as `fmegatron.parallel.pipeline.pipeline`: a function of its type.
        loss, weights, microbatches and trainable are then unused. Where it has a `norm`, that is the global norm; where it
        has an `alarm`, the update runs in it.
    loss_scale: a policy for fp16, such as `dynamic_loss_scale()`; the first state has TrainState(…,
        loss_scale=policy.init()). The loss is multiplied by the scale, the summed gradients divided by it in fp32 or
        wider, before norm, clipping and update.

    A step whose loss or gradients are not finite is skipped with a loss scale: parameters, optimizer state (its count,
    and so the learning rate) and extras come back as they were, the same tensors; the scale changes by its policy.
    `state.step` goes on by one all the same, so the batch and the step's key are used up, as in Megatron-LM. All ranks
    agree, since loss and norm are equal on all. NonFiniteError is raised only where the policy says that skipping can
    no longer help, and never with check_finite=False.

    metrics: "loss", each term's mean by its name, "tokens" (the first term's weight), "grad_norm", "param_norm",
        "lr" (that of this update: the schedule at the number of updates before it), "stats"; with a loss scale also
        "loss_scale", the one that this step used, and "skipped", 0 or 1. Numbers are 0-d tensors or Python's, equal on
        all ranks; losses and norms are without the scale.

    Inside a torch.func transform no value can be read: nothing is checked or skipped, and state.loss_scale, by which
    losses are multiplied and gradients divided as ever, stays.

    Raises UserError with a loss_scale for a state without one. A state with one and no policy keeps it, unused.
    """
    sh = sh or Sharding()
    if spec is None and sh.state_axes():
        raise UserError(
            f"train_step needs spec=… on a mesh with zero={sh.rules.zero}, store={sh.rules.store!r}: the spec tree of the "
            "parameters, by which gradients go to the ranks that hold the optimizer's state"
        )
    if gradients is None:
        gradients = accumulate(loss, microbatches, weights=weights, trainable=trainable, spec=spec)
    norm_of = getattr(gradients, "norm", global_norm)
    alarm = getattr(gradients, "alarm", contextlib.nullcontext)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        now = fp8.begin(sh, state.extras, spec=spec, params=state.params if microbatches > 1 else None)
        key = None if state.key is None else fold_in(state.key, state.step)
        ctx = Ctx(sh=now, key=key, extras=fp8.without(state.extras))
        policy, scaling = loss_scale, state.loss_scale
        if policy is not None and scaling is None:
            raise UserError(
                "train_step has a loss_scale, but the state has none: begin with TrainState(…, loss_scale=policy.init())"
            )
        scale = scaling.scale if policy and scaling else None
        (total, found), grads = gradients(state.params, batch, ctx, loss_scale=scale)
        fp8.drop_casts(now)
        norm = norm_of(grads)
        finite, readable = True, not under_torch_func()
        if readable and (check_finite or policy):
            finite = _finite(total, norm)
        if not finite and check_finite and not (policy and scaling and not policy.exhausted(scaling)):
            raise NonFiniteError(state.step + 1, _first_not_finite(total, found["terms"], grads), scale)
        old = state._donate() if donate else state
        params, opt, extras = old.params, old.opt, old.extras
        updates = old.step - scaling.skipped if scaling else old.step
        with alarm():  # a rank that fails in it ends all, which would wait for it in the next step
            if finite:
                params, _, opt = optimizer.update(params, grads, opt, donate=donate, grad_norm=norm)
                if update_params is not None:
                    with torch.no_grad():
                        params = update_params(params, found["stats"], sh)
                extras = extras if update_extras is None else update_extras(extras, found["stats"])
                extras = fp8.end(now, extras)
            param_norm = norm_of(params)
        if policy and scaling and readable:
            scaling = policy.update(scaling, finite)
        new = TrainState(old.step + 1, params, opt, old.key, extras, scaling)
        weight = next(iter(found["weights"].values()))
        metrics = {
            "loss": total,
            **found["terms"],
            "tokens": weight,
            "grad_norm": norm,
            "param_norm": param_norm,
            "lr": rate_at(optimizer.rate, updates),
            "stats": found["stats"],
        }
        if policy:
            metrics |= {"loss_scale": scale, "skipped": int(not finite)}
        return new, metrics

    return step


def _finite(*values: torch.Tensor) -> bool:
    """Are all of these 0-d tensors finite? Of each device one number is read, and waited for."""
    if simulating():
        return all(bool(torch.isfinite(v)) for x in values for v in per_rank(x))
    if all(map(readable, values)):
        return all(math.isfinite(float(x)) for x in values)
    by_device: dict[torch.device, Any] = {}
    for x in values:  # x - x is 0, or NaN where x is infinite or NaN
        by_device[x.device] = by_device.get(x.device, 0) + (x - x)
    return all(float(found) == 0 for found in by_device.values())


def _first_not_finite(total: torch.Tensor, terms: Mapping[str, Any], grads: Any) -> str:
    """In words, the first value that is not finite."""
    for name, value in terms.items():
        if not _finite(value):
            return f"the loss term {name!r}"
    if not _finite(total):
        return "the loss"
    for path, g in named(grads).items():
        if is_float(g) and not _finite(global_norm(g)):
            return f"the gradient of {path!r}"
    return "the norm of the gradients (each of them is finite)"


def evaluate(
    loss: Callable[..., Any], *, weights: Callable[[Any], Mapping[str, Weight]], sh: Sharding | None = None
) -> Callable[[Any, Any], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """f(params, batch) -> {term: (sum of its items, weight)}, both of the global batch, without gradients.

    Sums and weights of several batches are added before they are divided: the mean over all tokens, not a mean of
        means.
    """
    from fmegatron.accumulate import summed

    sh = sh or Sharding()

    @torch.no_grad()
    def run(params: Any, batch: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        terms, _ = loss(params, batch, Ctx(sh=sh))
        known = weights(batch)

        def weight(w: Weight) -> torch.Tensor:
            return summed(torch.as_tensor(w.items(sh) if callable(w.items) else w.items), w.dims, sh)

        return {name: (summed(t.items, t.dims, sh), weight(known[name])) for name, t in terms.items()}

    return run
