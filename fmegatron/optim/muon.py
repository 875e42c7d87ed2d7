"""Muon: momentum with orthogonalised steps, for the matrices of hidden layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.errors import UserError
from fmegatron.optim import apply as kernels
from fmegatron.optim import leaves
from fmegatron.optim.apply import Work, opened
from fmegatron.optim.core import Optimizer, Rate, check_fractions, check_not_negative, check_rate, rate_at
from fmegatron.optim.exchange import Exchange, exchange_of
from fmegatron.optim.leaves import grouped, no_grad, wide, zeros_of
from fmegatron.optim.matrices import MatrixDims, matrices_of, matrix_without_spec
from fmegatron.optim.moments import Dtype, moment_dtype
from fmegatron.optim.newton_schulz import JORDAN, Quintic, newton_schulz
from fmegatron.optim.per_leaf import Mask, Pattern, Setting, Values, check_values, settings_of

ADJUSTMENTS = ("original", "match_rms_adamw", None)


def muon(
    lr: Rate,
    *,
    spec: Any = None,
    matrices: Mapping[Pattern, str] | None = None,
    inputs_first: bool = True,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: Values = 0.1,
    mask: Mask = None,
    lr_scale: Values = None,
    adjust_lr: str | None = "original",
    coefficients: Quintic | Sequence[Quintic] = JORDAN,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    moments: Dtype = None,
) -> Optimizer:
    """Muon (Jordan et al., 2024), equal to torch.optim.Muon, for leaves that are matrices.

        m <- momentum * m + (1 - momentum) * g;  u = momentum * m + (1 - momentum) * g with nesterov, else m
        p <- p - lr * weight_decay * p - lr * adjustment * newton_schulz(u)

    Of a sharded leaf it is the global matrix that is made orthogonal: the ranks exchange shards so that each gets whole
    matrices, its share of those of equal shape, and exchange the results back. Other leaves (embeddings, the output
    matrix, norms, biases) belong to another optimizer: see `partition` and `muon_labels`.

    spec: from which leaves of more than two dims are matrices (`matrix_of`). Without it leaves have two dims.
    matrices: {pattern: "embed -> kv group head"}: inputs and outputs of leaves, in place of what the spec says; dims left
        out count matrices, each made orthogonal by itself. Patterns as in `per_leaf`.
    inputs_first: without a spec, are leaves [inputs, outputs] as this package has them, or [outputs, inputs] as
        torch.nn.Linear?
    weight_decay, mask, lr_scale: as for `adamw`.
    adjust_lr: factor of the rate by the matrix' sizes: "original", sqrt(max(1, outputs / inputs)); "match_rms_adamw",
        0.2 * sqrt(max(outputs, inputs)), with which AdamW's rates and decay fit (Liu et al., "Muon is scalable for LLM
        training", 2025); None, 1.
    coefficients: of the Newton-Schulz step, for all `steps` of them, or a sequence, one triple a step.
    eps: the least norm that a matrix is divided by.
    dtype: of the iteration and of what is exchanged; None: bfloat16 on a GPU, elsewhere that of the mathematics.
    moments: dtype of the momentum; None: float64 for float64 parameters, else float32.

    State: {"count", "momentum"}. Raises `UserError` for arguments out of range, and for a leaf that is no matrix.
    """
    check_rate("muon", lr)
    check_not_negative("muon", eps=eps, steps=steps)
    check_fractions("muon", momentum=momentum)
    check_values("muon", weight_decay=weight_decay, lr_scale=lr_scale)
    if adjust_lr not in ADJUSTMENTS:
        raise UserError(f'muon needs adjust_lr of "original", "match_rms_adamw" or None, but got {adjust_lr!r}')
    if matrices and spec is None:
        raise UserError("muon needs spec=, by which matrices= names dims")
    triples = _triples(coefficients, steps)
    buffer_dtype = moment_dtype("muon", moments)
    known = None if spec is None else matrices_of(spec, matrices)

    def matrix(path: str, p: Tensor) -> MatrixDims:
        dims = matrix_without_spec(p, inputs_first) if known is None else known.get(path)
        if dims is None:
            how = f'matrices={{{path!r}: "inputs -> outputs"}}' if known is not None else "spec="
            raise UserError(
                f"muon needs matrices, but {path} of shape {tuple(p.shape)} is none: say its sides with {how}, or give "
                'it to another optimizer, partition(muon_labels(spec), {"muon": muon(…), "adamw": adamw(…)})'
            )
        return dims

    def init(params: Any) -> dict[str, Any]:
        for path, p in tree.named(params).items():
            if tree.is_float(p):
                matrix(path, p)
        return {"count": 0, "momentum": tree.tree_map(lambda p: zeros_of(p, buffer_dtype), params)}

    def update(
        params: Any, grads: Any, state: Any, *, donate: bool = False, grad_norm: Any = None, rounding: Any = None
    ) -> Any:
        rate = rate_at(lr, state["count"])
        trees = {"params": params, "grads": grads, "momentum": state["momentum"]}
        settings = settings_of(params, lr_scale, weight_decay, mask)
        with no_grad():
            work = opened(trees, ("params", "momentum"), donate, rounding)
            views = {
                (i, *piece): _view(work.columns["params"][i], dims, piece)
                for i, dims in ((i, matrix(work.paths[i], work.columns["params"][i])) for i in work.rows)
                for piece in dims.pieces(work.columns["params"][i].shape)
            }
            of_leaf: dict[int, list[Key]] = {}
            for key in views:
                of_leaf.setdefault(key[0], []).append(key)
            directions: dict[int, Tensor] = {}  # of leaves of which some matrices are still to do
            found: dict[Key, Tensor] = {}

            def direction(key: Key) -> Tensor:
                i = key[0]
                if i not in directions:
                    directions[i] = _moved(work, i, momentum, nesterov, dtype)
                whole = directions[i] if key != of_leaf[i][-1] else directions.pop(i)
                return views[key].of(whole)

            def step(i: int, own: Setting, p: Tensor) -> Tensor:
                size = rate * own.scale
                parts = [_adjustment(adjust_lr, views[key]) * found.pop(key).to(p.dtype) for key in of_leaf[i]]
                return p * (1 - size * own.decay) - size * views[of_leaf[i][0]].join(parts)

            for members, exchange in _batches(work, views):
                moved = [direction(key) for key in members]
                outs = _orthogonal(moved, [views[key] for key in members], exchange, triples, eps)
                found |= zip(members, outs, strict=True)
                for i in dict.fromkeys(key[0] for key in members):
                    if all(key in found for key in of_leaf[i]):
                        work.write("params", i, step(i, settings[i], work.read("params", i)))
            new = work.trees(trees)
        return new["params"], grads, {**state, "count": state["count"] + 1, "momentum": new["momentum"]}

    return Optimizer(init, update, "muon", lr, rounds=True)


def _triples(coefficients: Any, steps: int) -> tuple[Quintic, ...]:
    one = all(isinstance(c, int | float) for c in coefficients)
    triples = (tuple(coefficients),) * steps if one else tuple(tuple(c) for c in coefficients)
    if not all(len(t) == 3 for t in triples):
        raise UserError(f"muon needs coefficients (a, b, c), or such a triple a step, but got {coefficients}")
    return triples


@dataclass(frozen=True)
class _View:
    """How a leaf is read as matrices that are not higher than wide.

    order: its dims, those that count matrices first, then the shorter side's, then the longer's. counts, short: how many
    dims count matrices and how many the shorter side has. sizes: the global shape in that order. inputs, outputs: of
    the matrix. dim, start, length: of a leaf that joins several, where this one lies along which dim.
    """

    order: tuple[int, ...]
    counts: int
    short: int
    sizes: tuple[int, ...]
    inputs: int
    outputs: int
    dim: int | None = None
    start: int = 0
    length: int = 0

    def of(self, leaf: Tensor) -> Tensor:
        """The part of a leaf, or of a shard of it, that this matrix is."""
        return leaf if self.dim is None else leaf.narrow(self.dim, self.start, self.length)

    def join(self, parts: list[Tensor]) -> Tensor:
        """A leaf of its parts."""
        return parts[0] if self.dim is None else torch.cat(parts, self.dim)

    @property
    def shape(self) -> tuple[int, int]:
        return min(self.inputs, self.outputs), max(self.inputs, self.outputs)


Key = tuple[int, int, int]  # (leaf, start, length) of a matrix


def _view(p: Tensor, dims: MatrixDims, piece: tuple[int, int]) -> _View:
    shape = list(p.shape)
    if dims.joined is not None:
        if any(d == dims.joined for _, _, d in leaves.cuts_of(p)):
            raise UserError(
                f"muon: dim {dims.joined} of a parameter of shape {tuple(p.shape)} joins several matrices and is cut over "
                "ranks: choose a mesh whose store axes divide another dim, or leaves apart (fused_qkv=False)"
            )
        shape[dims.joined] = piece[1]
    rows, columns = (math.prod(shape[d] for d in side) for side in (dims.rows, dims.columns))
    short, long = (dims.rows, dims.columns) if rows <= columns else (dims.columns, dims.rows)
    order = (*dims.counts, *short, *long)
    inputs, outputs = (rows, columns) if dims.inputs_first else (columns, rows)
    sizes = tuple(shape[d] for d in order)
    return _View(order, len(dims.counts), len(short), sizes, inputs, outputs, dims.joined, *piece)


def _adjustment(kind: str | None, view: _View) -> float:
    if kind == "original":
        return math.sqrt(max(1.0, view.outputs / view.inputs))
    return 0.2 * math.sqrt(max(view.inputs, view.outputs)) if kind else 1.0


def _batches(work: Work, views: dict[Key, _View]) -> list[tuple[list[Key], Exchange]]:
    """The leaves in batches that go through one exchange and one iteration, of a bounded size a rank."""

    def kind(key: Key) -> Any:
        i, view = key[0], views[key]
        p = work.columns["params"][i]
        exchange = exchange_of(p, view.order, view.counts)
        # without a mesh dim that cuts them, any leaves of one matrix shape go together
        sides = (view.sizes[view.counts :], view.short) if exchange.cuts else view.shape
        return sides, exchange, p.device, work.columns["grads"][i].dtype == torch.float64 or p.dtype == torch.float64

    found = []
    for (_, exchange, *_), members in grouped(views, kind).items():
        view = views[members[0]]
        each = math.prod(view.sizes[: view.counts])  # matrices a leaf
        most = max(exchange.ranks, exchange.ranks * kernels.PIECE // math.prod(view.shape))
        at_once = max(1, most // each)
        found += [(members[i : i + at_once], exchange) for i in range(0, len(members), at_once)]
    return found


def _moved(work: Work, i: int, momentum: float, nesterov: bool, dtype: torch.dtype | None) -> Tensor:
    """Updates the momentum of a leaf; the step's direction, in the dtype of the iteration."""
    g, old = work.shard("grads", i), work.shard("momentum", i)
    computed = wide(g, old)
    g = g.to(computed)
    if leaves.plain_only() or old.dtype != computed:
        new = torch.lerp(old.to(computed), g, 1 - momentum)
        work.write("momentum", i, new)
    else:
        new = old.lerp_(g, 1 - momentum)
    direction = torch.lerp(g, new, momentum) if nesterov else new
    return direction.to(dtype or (torch.bfloat16 if g.device.type == "cuda" else computed))


def _orthogonal(
    values: list[Tensor], views: list[_View], exchange: Exchange, triples: Sequence[Quintic], eps: float
) -> list[Tensor]:
    """The orthogonal factors of the global matrices of some leaves: local shards in and out."""
    view = views[0]
    inside = 1 if not exchange.cuts else view.short
    parts = []
    for x, v in zip(values, views, strict=True):
        x = x.permute(v.order)
        if exchange.cuts:
            parts.append(x.flatten(0, v.counts - 1) if v.counts else x[None])
        else:
            parts.append(x.reshape(-1, *v.shape))
    counts = [len(x) for x in parts]
    whole = exchange.gather(torch.cat(parts))
    sides = whole.shape[1:]
    matrices = whole.flatten(1 + inside).flatten(1, inside)
    out = exchange.scatter(newton_schulz(matrices, coefficients=triples, eps=eps).view(-1, *sides), sum(counts))
    found = []
    for part, x, v in zip(out.split(counts), values, views, strict=True):
        back = [v.order.index(d) for d in range(len(v.order))]
        found.append(part.reshape([x.shape[d] for d in v.order]).permute(back))
    return found
