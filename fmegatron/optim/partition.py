"""Different optimizers for different leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fmegatron import tree
from fmegatron.errors import UserError
from fmegatron.optim.core import Optimizer, first_rate, updated
from fmegatron.optim.matrices import matrix_of

Labels = Any  # a tree of str, or a function params -> tree of str


def partition(labels: Labels, optimizers: Mapping[str, Optimizer]) -> Optimizer:
    """Each leaf is updated by the optimizer of its label.

        partition(muon_labels(spec), {"muon": muon(0.02, spec=spec), "adamw": adamw(3e-4)})

    labels: a tree of labels like the parameters, or a function params -> such a tree. An optimizer sees None in place
    of the leaves of others. Clipping by the global norm belongs before the partition: inside one, the norm that
    `grad_norm` gives is that of all gradients, but the one computed is that of its own.

    State: {label: the state of its optimizer}, with None for the leaves of others, so that each leaf's state is
    under its own path. Raises `UserError` for a label without an optimizer, or labels of another structure.
    """
    if not optimizers:
        raise UserError('partition needs optimizers by label, such as {"muon": muon(0.02), "adamw": adamw(3e-4)}')

    def labelled(params: Any) -> list[str]:
        chosen = labels(params) if callable(labels) else labels
        if tree.structure(chosen) != tree.structure(params):
            raise UserError(
                f"partition needs labels as a tree like params, {tree.structure(params)}, but they are "
                f"{tree.structure(chosen)}"
            )
        for path, label in tree.named(chosen).items():
            if label not in optimizers:
                raise UserError(
                    f"partition has no optimizer for label {label!r} of {path}: add it to {sorted(optimizers)}"
                )
        return tree.leaves(chosen)

    def only(values: Any, of: list[str], label: str) -> Any:
        return tree.like(values, [x if at == label else None for x, at in zip(tree.leaves(values), of, strict=True)])

    def merged(parts: dict[str, Any], of: list[str]) -> Any:
        flat = {label: tree.leaves(part) for label, part in parts.items()}
        return tree.like(next(iter(parts.values())), [flat[label][i] for i, label in enumerate(of)])

    def init(params: Any) -> dict[str, Any]:
        of = labelled(params)
        return {label: optimizer.init(only(params, of, label)) for label, optimizer in optimizers.items()}

    def update(params: Any, grads: Any, state: Any, **options: Any) -> Any:
        of = labelled(params)
        if tree.structure(grads) != tree.structure(params):
            raise UserError(f"grads must be a tree like params, but is {tree.structure(grads)}")
        new_params, new_grads, new_state = {}, {}, {}
        for label, optimizer in optimizers.items():
            new_params[label], new_grads[label], new_state[label] = updated(
                optimizer, only(params, of, label), only(grads, of, label), state[label], options
            )
        return merged(new_params, of), merged(new_grads, of), new_state

    rounds = any(o.rounds for o in optimizers.values())
    return Optimizer(init, update, "partition", first_rate(optimizers.values()), rounds)


def muon_labels(spec: Any, *, matrices: str = "muon", others: str = "adamw") -> Any:
    """The usual split for `partition`: the matrices inside layers are "muon", all else "adamw".

    So embeddings, the output matrix, norms and biases are with AdamW (Jordan et al., 2024). Inside layers is what has
    an index in its path ("layers.3.q"); a matrix is what `matrix_of` finds to be one.
    """
    labels = [
        matrices if any(part.isdigit() for part in path.split(".")) and matrix_of(p) is not None else others
        for path, p in tree.named(spec).items()
    ]
    return tree.like(spec, labels)
