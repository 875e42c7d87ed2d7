"""The training step: `step(state, batch) -> (state, metrics)`, a pure function of a state that is a pytree.

    step = train_step(model.loss, optimizer, weights=model.weights, sh=sh)
    state = TrainState(step=0, params=params, opt=optimizer.init(params), key=key(0))
    state, metrics = step(state, batch)

It is made of `accumulate`, an optimizer and `global_norm`; a user's own step takes the same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import optree
import torch

from fmegatron.accumulate import Weight, accumulate
from fmegatron.context import Ctx
from fmegatron.function import under_torch_func
from fmegatron.optim import Optimizer, global_norm
from fmegatron.random import Key, fold_in
from fmegatron.sharding import Sharding
from fmegatron.simulation import per_rank, simulating
from fmegatron.tree import NAMESPACE, is_float, named


def _nothing() -> None:
    return None


@dataclass(frozen=True, eq=False)
class TrainState:
    """All that a step changes.

    step: steps made so far. params, opt: trees at rest. key: from which each step folds its own.
    extras: what changes without a gradient (router biases, scaling histories), updated by `update_extras` of
        `train_step`.
    """

    step: int
    params: Any
    opt: Any
    key: Key | None = field(default_factory=_nothing)
    extras: Any = field(default_factory=_nothing)

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


_FIELDS = ("step", "params", "opt", "key", "extras")
optree.register_pytree_node(
    TrainState,
    lambda s: (tuple(getattr(s, name) for name in _FIELDS), None, _FIELDS),
    lambda _, children: TrainState(*children),  # type: ignore[arg-type]
    namespace=NAMESPACE,
)


class NonFiniteError(RuntimeError):
    """A loss or a gradient is infinite or not a number. step: the number of the step, from 1; leaf: the first such
    value's name."""

    def __init__(self, step: int, leaf: str) -> None:
        super().__init__(
            f"step {step}: {leaf} is not finite; the state before this step is unchanged. "
            "Lower the learning rate, or find where it arose with --debug"
        )
        self.step, self.leaf = step, leaf


def train_step(
    loss: Callable[..., Any],
    optimizer: Optimizer,
    *,
    weights: Callable[[Any], Mapping[str, Weight]] | None = None,
    sh: Sharding | None = None,
    microbatches: int = 1,
    trainable: Any = None,
    donate: bool = False,
    check_finite: bool = True,
    update_extras: Callable[[Any, Any], Any] | None = None,
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]:
    """step(state, batch) -> (state, metrics) for `loss(params, batch, ctx) -> (terms, stats)`.

    weights, microbatches, trainable: as for `accumulate`.
    donate: reuse the old state's buffers, with the memory of an in-place trainer; using that state again is an
        error. By default a step is pure. Both give bitwise the same values.
    check_finite: raise NonFiniteError, before anything is changed, for a loss or gradient that is not finite.
    update_extras: (extras, stats) -> extras, by the step's reduced statistics, outside optimizer and norm.

    metrics: "loss", each term's mean by its name, "tokens" (the first term's weight), "grad_norm", "param_norm",
        "lr", "stats". Numbers are
    0-d tensors, equal on all ranks.
    """
    sh = sh or Sharding()
    gradients = accumulate(loss, microbatches, weights=weights, trainable=trainable)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        ctx = Ctx(sh=sh, key=None if state.key is None else fold_in(state.key, state.step), extras=state.extras)
        (total, found), grads = gradients(state.params, batch, ctx)
        norm = global_norm(grads)
        if check_finite and not under_torch_func():
            _refuse_non_finite(state.step + 1, total, norm, found["terms"], grads)
        old = state._donate() if donate else state
        rate = optimizer.rate(old.step) if callable(optimizer.rate) else optimizer.rate
        params, _, opt = optimizer.update(old.params, grads, old.opt, donate=donate, grad_norm=norm)
        extras = old.extras if update_extras is None else update_extras(old.extras, found["stats"])
        new = TrainState(old.step + 1, params, opt, old.key, extras)
        weight = next(iter(found["weights"].values()))
        metrics = {
            "loss": total,
            **found["terms"],
            "tokens": weight,
            "grad_norm": norm,
            "param_norm": global_norm(params),
            "lr": rate,
            "stats": found["stats"],
        }
        return new, metrics

    return step


def _refuse_non_finite(
    step: int, total: torch.Tensor, norm: torch.Tensor, terms: Mapping[str, Any], grads: Any
) -> None:
    def finite(x: torch.Tensor) -> bool:
        return (
            all(bool(torch.isfinite(v).all()) for v in per_rank(x)) if simulating() else bool(torch.isfinite(x).all())
        )

    if finite(total) and finite(norm):
        return
    for name, value in terms.items():
        if not finite(value):
            raise NonFiniteError(step, f"the loss term {name!r}")
    if not finite(total):
        raise NonFiniteError(step, "the loss")
    for path, g in named(grads).items():
        if is_float(g) and not finite(global_norm(g)):
            raise NonFiniteError(step, f"the gradient of {path!r}")
    raise NonFiniteError(step, "the norm of the gradients (each of them is finite)")


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
        return {
            name: (summed(t.items, t.dims, sh), summed(torch.as_tensor(known[name].items), known[name].dims, sh))
            for name, t in terms.items()
        }

    return run
