"""Adafactor: Adam's second moments factored into those of rows and columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.dtensor import DTensor
from fmegatron.errors import UserError
from fmegatron.optim import leaves
from fmegatron.optim.apply import Work, opened
from fmegatron.optim.core import Optimizer, Rate, check_fractions, check_not_negative, check_rate, rate_at
from fmegatron.optim.leaves import buffer_of, cuts_of, holder_of, local_of, no_grad, wide, wrapped, zeros_of
from fmegatron.optim.matrices import MatrixDims, matrices_of
from fmegatron.optim.moments import Moments, moment_dtypes
from fmegatron.optim.norm import square_of, summed
from fmegatron.optim.per_leaf import Mask, Pattern, Setting, Values, check_values, settings_of
from fmegatron.optim.rounding import Rounding

LARGEST_STEP = 1e-2  # of the relative step; the paper's
FIRST_STEP = 1e-6  # and its growth per update with warmup_init


def adafactor(
    lr: Rate | None = None,
    *,
    eps: tuple[float, float] = (1e-30, 1e-3),
    clip_threshold: float = 1.0,
    beta2_decay: float = -0.8,
    beta1: float | None = None,
    weight_decay: Values = 0.0,
    mask: Mask = None,
    lr_scale: Values = None,
    scale_parameter: bool = True,
    warmup_init: bool = False,
    spec: Any = None,
    matrices: Mapping[Pattern, str] | None = None,
    moments: Moments = None,
) -> Optimizer:
    """Adafactor (Shazeer & Stern, 2018), equal to transformers.optimization.Adafactor.

    Of a matrix it keeps the mean squares of rows and of columns in place of those of all elements: of the global matrix,
    however it is sharded.

    lr: a rate or a schedule; None: the paper's relative step min(1e-2, 1 / sqrt(t)) at update t = 1, 2, …, and with
        warmup_init min(1e-6 t, 1 / sqrt(t)).
    scale_parameter: the rate is multiplied by max(eps[1], root mean square of the parameter).
    eps: added to squared gradients; least scale of a parameter.
    clip_threshold: an update's root mean square is at most this, before the rate.
    beta2_decay: the second moments' decay at update t is 1 - t ** beta2_decay.
    beta1: decay of a mean of the updates; None: no such mean, and no memory for it.
    weight_decay, mask, lr_scale: as for `adamw`; the decay is multiplied by the leaf's rate, its scale included.
    spec: from which leaves of more than two dims are matrices (`matrix_of`); matrices: {pattern: "inputs -> outputs"}
        for others. Without a spec the last two dims are the matrix.
    moments: dtype of the state, or a pair (mean, mean squares).

    State: {"count", "rows", "columns", "v"} and "m" with beta1; leaves that are no matrix have only v. Raises
    `UserError` for arguments out of range, and warmup_init together with lr.
    """
    check_rate("adafactor", 0.0 if lr is None else lr)
    check_not_negative("adafactor", eps=min(eps), clip_threshold=clip_threshold)
    check_fractions("adafactor", beta1=beta1 or 0.0)
    check_values("adafactor", weight_decay=weight_decay, lr_scale=lr_scale)
    if not clip_threshold > 0:
        raise UserError("adafactor needs a clip_threshold above 0, such as 1.0")
    if not beta2_decay < 0:
        raise UserError(f"adafactor needs a beta2_decay below 0, such as -0.8, but got beta2_decay={beta2_decay}")
    if warmup_init and lr is not None:
        raise UserError("adafactor: warmup_init is for the relative step, so leave lr out, or give lr a schedule")
    if matrices and spec is None:
        raise UserError("adafactor needs spec=, by which matrices= names dims")
    mean_dtype, square_dtype = moment_dtypes("adafactor", moments)
    rate: Rate = _relative_step(warmup_init) if lr is None else lr
    known = None if spec is None else matrices_of(spec, matrices)

    def matrix(path: str, p: Tensor) -> MatrixDims | None:
        if known is not None:
            return known.get(path)
        n = p.ndim
        return MatrixDims(tuple(range(n - 2)), (n - 2,), (n - 1,)) if n >= 2 else None

    def init(params: Any) -> dict[str, Any]:
        state: dict[str, list[Any]] = {"rows": [], "columns": [], "v": []}
        for path, p in tree.named(params).items():
            dims = matrix(path, p) if tree.is_float(p) else None
            state["rows"].append(_reduced_zeros(p, dims.columns, square_dtype) if dims else None)
            state["columns"].append(_reduced_zeros(p, dims.rows, square_dtype) if dims else None)
            state["v"].append(None if dims else zeros_of(p, square_dtype))
        found = {name: tree.like(params, values) for name, values in state.items()}
        if beta1 is not None:
            found["m"] = tree.tree_map(lambda p: zeros_of(p, mean_dtype), params)
        return {"count": 0, **found}

    def update(
        params: Any, grads: Any, state: Any, *, donate: bool = False, grad_norm: Any = None, rounding: Any = None
    ) -> Any:
        step = state["count"] + 1
        keep2 = 1 - step**beta2_decay
        trees = {"params": params, "grads": grads} | ({"m": state["m"]} if beta1 is not None else {})
        settings = settings_of(params, lr_scale, weight_decay, mask)
        with no_grad():
            work = opened(trees, ("params", "m"), donate, rounding)
            squares = _Squares(work, state, matrix, keep2, eps[0])
            scales = _parameter_scales(work, eps[1]) if scale_parameter else {}
            clips = _clips(work, squares, clip_threshold)
            for i in work.rows:
                own: Setting = settings[i]
                size = rate_at(rate, state["count"]) * own.scale * scales.get(i, 1.0)
                change = squares.scaled(i) / clips[i] * size
                if beta1 is not None:
                    change = torch.lerp(work.read("m", i), change, 1 - beta1)
                    work.write("m", i, change)
                p = work.read("params", i)
                work.write("params", i, p - own.decay * size * p - change)
            new = work.trees(trees)
            kept = {name: squares.written(name, donate, rounding) for name in ("rows", "columns", "v")}
        if "m" in new:
            kept["m"] = new["m"]
        return new["params"], grads, {**state, "count": step, **kept}

    return Optimizer(init, update, "adafactor", rate, rounds=True)


def _relative_step(warmup_init: bool) -> Callable[[int], float]:
    def rate(count: int) -> float:
        step = count + 1
        return min(FIRST_STEP * step if warmup_init else LARGEST_STEP, 1 / math.sqrt(step))

    return rate


class _Squares:
    """The mean squares after this update, by leaf, of global rows and columns."""

    def __init__(self, work: Work, state: Any, matrix: Callable[..., Any], keep: float, eps: float) -> None:
        self.work = work
        self.matrix = {i: matrix(work.paths[i], work.columns["params"][i]) for i in work.rows}
        self.old = {name: tree.leaves(state[name]) for name in ("rows", "columns", "v")}
        self.like = {name: state[name] for name in self.old}
        self.new: dict[str, dict[int, Tensor]] = {name: {} for name in self.old}
        sums: dict[tuple[str, int], Tensor] = {}
        for i in work.rows:
            square = work.read("grads", i).square() + eps
            if (dims := self.matrix[i]) is None:
                self.new["v"][i] = torch.lerp(square, local_of(self.old["v"][i]).to(square.dtype), keep)
            else:
                sums["rows", i] = square.sum(dims.columns)
                sums["columns", i] = square.sum(dims.rows)
        gone = {(n, i): self._dims(n, i) for n, i in sums}
        for (name, i), mean in self._means(sums, gone).items():
            self.new[name][i] = torch.lerp(mean, local_of(self.old[name][i]).to(mean.dtype), keep)
        factored = [i for i in work.rows if self.matrix[i] is not None]
        rows = {("rows", i): self._spread("rows", i).sum(self.matrix[i].rows, keepdim=True) for i in factored}
        totals = self._means(rows, {("rows", i): self.matrix[i].rows for i in factored})
        self.mean_row = {i: mean for (_, i), mean in totals.items()}

    def _dims(self, name: str, i: int) -> tuple[int, ...]:
        """The dims that a mean is over."""
        return self.matrix[i].columns if name == "rows" else self.matrix[i].rows

    def _means(self, sums: dict[Any, Tensor], over: dict[Any, tuple[int, ...]]) -> dict[Any, Tensor]:
        """Global means from local sums over some dims of leaves."""
        layouts = [_cut_by(self.work.columns["params"][i], over[name, i]) for name, i in sums]
        totals = summed(list(sums.values()), layouts)
        sizes = [_size(self.work.columns["params"][i], over[name, i]) for name, i in sums]
        return {key: total / n for key, total, n in zip(sums, totals, sizes, strict=True)}

    def _spread(self, name: str, i: int) -> Tensor:
        """With size one in the dims that the mean is over."""
        x = self.new[name][i]
        for d in sorted(self._dims(name, i)):
            x = x.unsqueeze(d)
        return x

    def scaled(self, i: int) -> Tensor:
        """The gradient over its root mean square."""
        g = self.work.read("grads", i)
        if self.matrix[i] is None:
            return g * self.new["v"][i].rsqrt()
        return g * (self._spread("rows", i) / self.mean_row[i]).rsqrt() * self._spread("columns", i).rsqrt()

    def written(self, name: str, donate: bool, rounding: Rounding | None) -> Any:
        """The new tree of the state."""
        out = list(self.old[name])
        for i, value in self.new[name].items():
            out[i] = _stored(out[i], value, donate, rounding, f"{self.work.paths[i]}:{name}")
        return tree.like(self.like[name], out)


def _stored(old: Tensor, value: Tensor, donate: bool, rounding: Rounding | None, name: str) -> Tensor:
    if rounding is not None and rounding.applies(old):
        value = rounding.rounded(value, old, name)
    if leaves.plain_only():
        return value.to(old.dtype)
    if not donate:
        return wrapped(value.to(old.dtype), old)
    buffer = buffer_of(old)
    buffer.copy_(value)
    return holder_of(buffer, old)


def _parameter_scales(work: Work, least: float) -> dict[int, Tensor]:
    """max(least, root mean square) of each parameter."""
    return {i: rms.clamp(min=least) for i, rms in _rms(work, lambda i: work.read("params", i)).items()}


def _clips(work: Work, squares: _Squares, threshold: float) -> dict[int, Tensor]:
    """What each update is divided by."""
    return {i: (rms / threshold).clamp(min=1.0) for i, rms in _rms(work, squares.scaled).items()}


def _rms(work: Work, value: Callable[[int], Tensor]) -> dict[int, Tensor]:
    """The root mean square of a value of each leaf: of all its global elements."""
    sums, layouts = [], []
    for i in work.rows:
        x = value(i)
        sums.append(square_of([x], x.dtype))
        layouts.append(_cut_by(work.columns["params"][i], range(x.ndim)))
    totals = summed(sums, layouts)
    return {i: (t / work.columns["params"][i].numel()).sqrt() for i, t in zip(work.rows, totals, strict=True)}


def _cut_by(p: Tensor, over: Collection[int]) -> tuple[Any, tuple[int, ...]]:
    """The mesh and its dims that cut some dims of a leaf."""
    found = [(mesh, d) for mesh, d, dim in cuts_of(p) if dim in over]
    return (found[0][0], tuple(d for _, d in found)) if found else (None, ())


def _size(p: Tensor, dims: Collection[int]) -> int:
    return math.prod(p.shape[d] for d in dims)


def _reduced_zeros(p: Tensor, gone: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    """Zeros of the shape and placements that a parameter has without some dims."""
    with no_grad():
        local = local_of(p)
        zeros = torch.zeros_like(local.sum(gone), dtype=dtype or wide(p))
    if not isinstance(p, DTensor):
        return zeros
    from torch.distributed.tensor import Replicate, Shard

    left = [d for d in range(p.ndim) if d not in gone]
    placements = [
        Shard(left.index(x.dim)) if isinstance(x, Shard) and x.dim in left else Replicate() for x in p.placements
    ]
    shape = torch.Size(p.shape[d] for d in left)
    stride = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    return DTensor.from_local(zeros, p.device_mesh, placements, run_check=False, shape=shape, stride=stride)
