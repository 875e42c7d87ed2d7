"""Optimizers as pairs of pure functions that chain.

    optimizer = chain(clip_by_global_norm(1.0), adamw(cosine(3e-4, warmup=100, total=10_000), mask=decay_mask(spec)))
    state = optimizer.init(params) params, grads, state = optimizer.update(params, grads, state)

A piece may change the gradients (clipping), the parameters (adamw, sgd) or only its state. `update` is pure; with
`donate=True` it overwrites the buffers of params, grads and state and returns them, bitwise the same values, without
temporaries of the size of a tree. The states are dicts of trees like the parameters' and a count (a Python int).

Leaves may be plain tensors or DTensors (updated on the local shard; moments get the parameter's placements), of several
dtypes and devices: one fused multi-tensor call a group. Where the gradient is None, parameter and moments stay as they
are. Under torch.func (an ensemble by vmap) the same mathematics runs in plain operations and `donate` is ignored.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fmegatron import tree
from fmegatron.errors import UserError
from fmegatron.simulation import is_local, lift, simulating

Rate = float | Callable[[int], float]
Mask = Any  # a tree of bools, or a function params -> tree of bools

# Elements converted at once where a kernel cannot take a leaf's dtypes or strides as they are (64 MiB in float32).
PIECE = 1 << 24
# Elements summed in one run on a CPU: torch's float32 norm there adds in sequence, 0.4 % off after 67 million elements.
RUN = 1 << 14


@dataclass(frozen=True)
class Optimizer:
    """init(params) -> state; update(params, grads, state, *, donate=False, grad_norm=None) -> (params, grads, state).

    grad_norm: the norm of `grads`, if the caller has it already (clipping then need not compute it).
    name: the key of the piece's state in a chain, hence part of checkpoint names.
    rate: the learning rate, for reports (None for a piece that has none).
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any, Any]]
    name: str = ""
    rate: Rate | None = None


# Pieces


def adamw(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    mask: Mask = None,
    moments: torch.dtype | None = None,
) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019), equal to torch.optim.AdamW.

    lr: a rate, or a schedule of the number of updates made before. weight_decay is multiplied by it.
    mask: where decay applies: a tree of bools like the parameters, or a function params -> tree. None: everywhere.
    moments: dtype of the two moments; None: float64 for float64 parameters, else float32.

    State: {"count", "m", "v"}. Raises `UserError` for a negative rate, eps or decay, or betas outside [0, 1).
    """
    _check_rate("adamw", lr)
    _not_negative("adamw", eps=eps, weight_decay=weight_decay)
    if not all(0 <= b < 1 for b in betas):
        raise UserError(f"adamw needs betas in [0, 1), but got betas={betas}")

    def init(params: Any) -> dict[str, Any]:
        zeros = lambda p: _zeros(p, moments)  # noqa: E731
        return {"count": 0, "m": tree.tree_map(zeros, params), "v": tree.tree_map(zeros, params)}

    def update(params: Any, grads: Any, state: Any, *, donate: bool = False, grad_norm: Any = None) -> Any:
        step, rate = state["count"] + 1, _rate(lr, state["count"])
        trees = {"params": params, "grads": grads, "m": state["m"], "v": state["v"]}
        constants = {"lr": rate, "beta1": betas[0], "beta2": betas[1], "eps": eps}

        def plain(decay: bool, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return _adamw_plain(p, g, m, v, step=step, weight_decay=weight_decay if decay else 0.0, **constants)

        def fused(decay: bool, p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor]) -> None:
            count = torch.full((), float(step), dtype=torch.float32, device=p[0].device)
            wd = weight_decay if decay else 0.0
            torch._fused_adamw_(
                p, g, m, v, [], [count] * len(p), **constants, weight_decay=wd, amsgrad=False, maximize=False
            )

        new = _apply(trees, _decays(mask, params), plain, fused, donate, written=("params", "m", "v"))
        return new["params"], grads, {**state, "count": step, "m": new["m"], "v": new["v"]}

    return Optimizer(init, update, "adamw", lr)


def sgd(
    lr: Rate, *, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0, mask: Mask = None
) -> Optimizer:
    """Gradient descent with momentum, equal to torch.optim.SGD.

    lr and mask as in `adamw`. weight_decay times the parameter is added to the gradient. State: {"count", "momentum"},
    or {"count"} without momentum. Raises `UserError` for a negative rate, momentum or decay, or nesterov without
    momentum.
    """
    _check_rate("sgd", lr)
    _not_negative("sgd", momentum=momentum, weight_decay=weight_decay)
    if nesterov and not momentum:
        raise UserError("sgd with nesterov=True needs a momentum above 0, such as momentum=0.9")

    def init(params: Any) -> dict[str, Any]:
        if not momentum:
            return {"count": 0}
        return {"count": 0, "momentum": tree.tree_map(_zeros, params)}

    def update(params: Any, grads: Any, state: Any, *, donate: bool = False, grad_norm: Any = None) -> Any:
        rate = _rate(lr, state["count"])
        trees = {"params": params, "grads": grads}
        if momentum:
            trees["momentum"] = state["momentum"]

        def plain(decay: bool, p: Tensor, g: Tensor, *buffer: Tensor) -> tuple[Tensor, ...]:
            wd = weight_decay if decay else 0.0
            return _sgd_plain(p, g, *buffer, lr=rate, momentum=momentum, nesterov=nesterov, weight_decay=wd)

        def fused(decay: bool, p: list[Tensor], g: list[Tensor], *buffer: list[Tensor]) -> None:
            torch._fused_sgd_(
                p,
                g,
                buffer[0] if buffer else [],
                lr=rate,
                momentum=momentum,
                nesterov=nesterov,
                weight_decay=weight_decay if decay else 0.0,
                dampening=0.0,
                maximize=False,
                is_first_step=False,  # a buffer of zeros gives the first step's values
            )

        new = _apply(trees, _decays(mask, params), plain, fused, donate, written=("params", "momentum"))
        return new.pop("params"), grads, {**state, "count": state["count"] + 1, **new}

    return Optimizer(init, update, "sgd", lr)


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Scales the gradients by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does.

    The norm is `global_norm`, or the `grad_norm` given. No state. Raises `UserError` unless max_norm > 0.
    """
    if not max_norm > 0:
        raise UserError(f"clip_by_global_norm needs a max_norm above 0, but got max_norm={max_norm}")

    def update(params: Any, grads: Any, state: Any, *, donate: bool = False, grad_norm: Any = None) -> Any:
        norm = global_norm(grads) if grad_norm is None else grad_norm
        scale = torch.as_tensor(max_norm / (norm + 1e-6)).clamp(max=1.0)
        return params, _scaled(grads, scale, donate), state

    return Optimizer(lambda params: {}, update, "clip")


def chain(*pieces: Optimizer) -> Optimizer:
    """One optimizer of several: each piece gets what the one before it returned.

    State: {name of the piece: its state}, numbered where a piece has no name or shares it. `grad_norm` reaches every
    piece, so it is the norm of the gradients that came in. Raises `UserError` without a piece.
    """
    if not pieces:
        raise UserError("chain needs at least one optimizer, such as chain(clip_by_global_norm(1.0), adamw(1e-3))")
    names = [p.name for p in pieces]
    keys = [n if n and names.count(n) == 1 else f"{n}{i}" for i, n in enumerate(names)]

    def init(params: Any) -> dict[str, Any]:
        return {key: piece.init(params) for key, piece in zip(keys, pieces, strict=True)}

    def update(params: Any, grads: Any, state: Any, *, donate: bool = False, grad_norm: Any = None) -> Any:
        new = {}
        for key, piece in zip(keys, pieces, strict=True):
            params, grads, new[key] = piece.update(params, grads, state[key], donate=donate, grad_norm=grad_norm)
        return params, grads, new

    return Optimizer(init, update, rate=next((p.rate for p in pieces if p.rate is not None), None))


def with_master(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Optimizer:
    """Keeps copies in `dtype` of the parameters that have a narrower one; updates those and rounds the parameters.

    So small updates are not lost to rounding (Micikevicius et al., "Mixed precision training", 2018). State: that of
    `optimizer` for the copies, and "master": the copies, None where the parameter is wide enough itself.
    """

    def master_of(p: Any) -> Any:
        return p.detach().to(dtype) if tree.is_float(p) and p.dtype.itemsize < dtype.itemsize else None

    def wide(master: Any, params: Any) -> Any:
        return tree.tree_map(lambda m, p: p if m is None else m, master, params)

    def init(params: Any) -> dict[str, Any]:
        with torch.no_grad():
            master = tree.tree_map(master_of, params)
        return {**optimizer.init(wide(master, params)), "master": master}

    def update(params: Any, grads: Any, state: Any, *, donate: bool = False, grad_norm: Any = None) -> Any:
        inner = {k: v for k, v in state.items() if k != "master"}
        new, grads, inner = optimizer.update(
            wide(state["master"], params), grads, inner, donate=donate, grad_norm=grad_norm
        )
        master = tree.tree_map(lambda m, p: None if m is None else p, state["master"], new)
        return _rounded(params, master, new, donate), grads, {**inner, "master": master}

    return Optimizer(init, update, optimizer.name, optimizer.rate)


def decay_mask(spec: Any) -> Any:
    """Where weight decay applies, from a spec tree: `Param.decay` if it is set, else True for two dims or more."""
    return tree.tree_map(lambda p: p.decay if p.decay is not None else len(p.dims.split()) >= 2, spec)


# Norms


def global_norm(values: Any) -> Tensor:
    """The 2-norm of all elements of a tree, each global element counted once: a plain 0-d tensor, equal on all ranks.

    In float32, or float64 if a leaf is. None and integer leaves count nothing; an empty tree gives 0. Raises
    `UserError` for a DTensor that is a partial sum.
    """
    return sum_of_squares(values).sqrt()


def sum_of_squares(values: Any) -> Tensor:
    """The square of `global_norm`, to be summed further (over pipeline stages)."""
    leaves = [x for x in tree.leaves(values) if tree.is_float(x)]
    if not leaves:
        return torch.zeros(())
    wide = torch.float64 if any(x.dtype == torch.float64 for x in leaves) else torch.float32
    with _no_grad():
        groups: dict[Any, Any] = defaultdict(list)  # one kernel call each; a layout's sums are then added
        for x in leaves:
            groups[_sharded(x), x.device, x.dtype].append(_local(x))
        sums: dict[Any, Any] = {}
        for (layout, _, _), group in groups.items():
            square = _square(group, wide).to(leaves[0].device)
            sums[layout] = sums[layout] + square if layout in sums else square
        return torch.stack(list(_reduced(sums).values())).sum()


def _sharded(x: Tensor) -> tuple[Any, tuple[int, ...]]:
    """(mesh, the mesh dims larger than one over which a leaf is cut); (None, ()) for a plain tensor."""
    if not isinstance(x, DTensor):
        return None, ()
    if any(p.is_partial() for p in x.placements):
        raise UserError(f"global_norm of a partial sum, placements {x.placements}: reduce it before")
    mesh = x.device_mesh
    cut = tuple(d for d, p in enumerate(x.placements) if mesh.size(d) > 1 and not p.is_replicate())
    return (mesh, cut) if cut else (None, ())


def _square(group: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of squares of tensors of one dtype on one device."""
    if _functorch():
        return torch.stack([x.to(dtype).square().sum() for x in group]).sum()
    return torch.stack(torch._foreach_norm([run for x in group for run in _runs(x)], 2, dtype)).square().sum()


def _runs(x: Tensor) -> Sequence[Tensor]:
    if is_local(x) or x.device.type != "cpu" or x.numel() <= RUN:
        return [x]
    return x.reshape(-1).split(RUN)


def _reduced(sums: dict[Any, Tensor]) -> dict[Any, Tensor]:
    """Sums of local squares -> sums over the mesh dims that cut them, by one all-reduce a mesh dim."""
    from torch.distributed import _functional_collectives as collectives

    sums = dict(sums)
    meshes = [mesh for mesh, _ in sums if mesh is not None]
    for mesh in dict.fromkeys(meshes):
        for dim in range(mesh.ndim):
            cut = [layout for layout in sums if layout[0] == mesh and dim in layout[1]]
            if not cut:
                continue
            total = torch.stack([sums[layout] for layout in cut])
            if simulating():
                total = lift(total, torch.distributed.get_world_size())
            total = collectives.wait_tensor(collectives.all_reduce(total, "sum", (mesh, dim)))
            sums.update(zip(cut, total.unbind(), strict=True))
    return sums


# Leaves


def _apply(
    trees: dict[str, Any],
    decays: list[bool],
    plain: Callable[..., tuple[Tensor, ...]],
    fused: Callable[..., None],
    donate: bool,
    written: tuple[str, ...],
) -> dict[str, Any]:
    """Run an update over the leaves that have a gradient: {name: new tree} of the trees in `written`.

    plain(decay, *leaves of one parameter) returns its new leaves, in the order of `written`.
    fused(decay, *lists of leaves) overwrites them.
    """
    columns = _columns(trees)
    names = list(columns)
    written = tuple(n for n in written if n in columns)
    rows = [i for i, p in enumerate(columns["params"]) if tree.is_float(p) and columns["grads"][i] is not None]
    new = {n: list(columns[n]) for n in written}
    if _functorch():
        for i in rows:
            values = plain(decays[i], *(columns[n][i] for n in names))
            for n, value in zip(written, values, strict=True):
                new[n][i] = value.to(columns[n][i].dtype)
    else:
        with torch.no_grad():
            local = {n: {i: _buffer(columns[n][i]) for i in rows} for n in names}
            for n in written:
                if not donate:
                    local[n] = {i: x.clone() for i, x in local[n].items()}
                for i, x in local[n].items():
                    new[n][i] = _holder(x, columns[n][i])

            def kind(i: int) -> Any:
                return decays[i], *((x.device, x.dtype, x.is_contiguous()) for x in (local[n][i] for n in names))

            for (decay, *_), members in _grouped(rows, kind).items():
                lists = [[local[n][i] for i in members] for n in names]
                _run(plain, fused, decay, lists, [n in written for n in names])
    return {n: tree.like(trees[n], new[n]) for n in written}


def _run(plain: Any, fused: Any, decay: bool, lists: list[list[Tensor]], written: list[bool]) -> None:
    """Overwrite the written lists of one group, whose rows are alike in devices, dtypes and contiguity."""
    first = [column[0] for column in lists]
    if first[0].device.type not in ("cpu", "cuda"):
        for row in zip(*lists, strict=True):
            targets = [x for x, w in zip(row, written, strict=True) if w]
            for target, value in zip(targets, plain(decay, *row), strict=True):
                target.copy_(value)
    elif len({x.dtype for x in first}) == 1 and all(x.is_contiguous() for x in first):
        fused(decay, *lists)
    else:
        # the kernels take one dtype, and read strided tensors wrongly on CPU: convert a bounded piece at a time
        dtype = torch.float64 if any(x.dtype == torch.float64 for x in first) else torch.float32
        for piece in _pieces(lists):
            ready = [_converted(column, dtype) for column in piece]
            fused(decay, *ready)
            for column, source, write in zip(piece, ready, written, strict=True):
                if write and source is not column:
                    torch._foreach_copy_(column, source)


def _converted(column: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if column[0].dtype == dtype and column[0].is_contiguous():
        return column
    out = [torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in column]
    torch._foreach_copy_(out, column)
    return out


def _pieces(lists: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """The rows in batches of at most PIECE elements; a larger row that is contiguous is cut."""
    if any(is_local(x) for column in lists for x in column):
        yield lists  # simulated: no branch on a local size
        return
    batch: list[tuple[Tensor, ...]] = []
    held = 0
    for row in zip(*lists, strict=True):
        cut = row[0].numel() > PIECE and all(x.is_contiguous() for x in row)
        parts = zip(*(x.view(-1).split(PIECE) for x in row), strict=True) if cut else [row]
        for part in parts:
            if batch and held + part[0].numel() > PIECE:
                yield [list(column) for column in zip(*batch, strict=True)]
                batch, held = [], 0
            batch.append(tuple(part))
            held += part[0].numel()
    if batch:
        yield [list(column) for column in zip(*batch, strict=True)]


def _columns(trees: dict[str, Any]) -> dict[str, list[Any]]:
    """The leaves of each tree. Raises `UserError` where structures, shapes or placements disagree."""
    shape = tree.structure(trees["params"])
    for name, t in trees.items():
        if tree.structure(t) != shape:
            raise UserError(f"{name} must be a tree like params, but is {tree.structure(t)} and not {shape}")
    columns = {name: tree.leaves(t) for name, t in trees.items()}
    for i, p in enumerate(columns["params"]):
        for name, column in columns.items():
            if column[i] is None or not tree.is_float(p) or is_local(p):
                continue
            if _layout(column[i]) != _layout(p):
                path = tree.paths(trees["params"])[i]
                raise UserError(
                    f"{name} of {path} must have the parameter's shape and placements, {_layout(p)}, "
                    f"but has {_layout(column[i])}: redistribute it before the update"
                )
    return columns


def _layout(x: Tensor) -> tuple[Any, ...]:
    return (tuple(x.shape), x.placements) if isinstance(x, DTensor) else (tuple(x.shape),)


def _scaled(grads: Any, scale: Tensor, donate: bool) -> Any:
    """The gradients times a 0-d tensor, in their own dtypes."""
    leaves = tree.leaves(grads)
    new = list(leaves)
    rows = [i for i, g in enumerate(leaves) if tree.is_float(g)]
    if _functorch():
        for i in rows:
            new[i] = (leaves[i] * scale).to(leaves[i].dtype)
        return tree.like(grads, new)
    with torch.no_grad():
        for members in _grouped(rows, lambda i: (leaves[i].device, leaves[i].dtype)).values():
            group = [_buffer(leaves[i]) if donate else _buffer(leaves[i]).clone() for i in members]
            torch._foreach_mul_(group, scale.to(group[0].device))
            for i, local in zip(members, group, strict=True):
                new[i] = _holder(local, leaves[i])
    return tree.like(grads, new)


def _rounded(params: Any, master: Any, new: Any, donate: bool) -> Any:
    """The new parameters: `new` where there is no master copy, else the copy in the parameter's dtype."""
    old, copies, out = tree.leaves(params), tree.leaves(master), tree.leaves(new)
    rows = [i for i, m in enumerate(copies) if m is not None]
    with _no_grad():
        if donate and not _functorch():
            for members in _grouped(rows, lambda i: (old[i].device, old[i].dtype)).values():
                group = [_buffer(old[i]) for i in members]
                torch._foreach_copy_(group, [_buffer(copies[i]) for i in members])
                for i, local in zip(members, group, strict=True):
                    out[i] = _holder(local, old[i])
        else:
            for i in rows:
                out[i] = _wrap(_local(copies[i]).to(old[i].dtype), old[i])
    return tree.like(params, out)


def _zeros(p: Any, dtype: torch.dtype | None = None) -> Any:
    """Zeros at a parameter's placements, or None where there is nothing to train."""
    if not tree.is_float(p):
        return None
    if dtype is None:
        dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    with _no_grad():
        return _wrap(torch.zeros_like(_local(p), dtype=dtype, memory_format=torch.contiguous_format), p)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _buffer(x: Tensor) -> Tensor:
    """The local shard, which a kernel may write to. In a simulation a plain tensor gets a copy a rank: a kernel that
    writes to it beside simulated tensors would run once a rank."""
    return lift(_local(x), torch.distributed.get_world_size()) if simulating() else _local(x)


def _holder(local: Tensor, leaf: Tensor) -> Tensor:
    """The leaf itself if `local` is its buffer, else a new one at its placements."""
    return leaf if _local(leaf) is local else _wrap(local, leaf)


def _wrap(local: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _grouped(members: Iterable[int], kind: Callable[[int], Any]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = defaultdict(list)
    for i in members:
        groups[kind(i)].append(i)
    return groups


def _functorch() -> bool:
    """Plain operations only: under torch.func, or in a compiled graph."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def _no_grad() -> Any:
    """Updates and norms are not differentiated, but by torch.func."""
    return nullcontext() if _functorch() else torch.no_grad()


# One parameter in plain operations


def _adamw_plain(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    step: int,
    lr: Any,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    p, g, m, v = _widened(p, g, m, v)
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    spread = v.sqrt() / math.sqrt(1 - beta2**step) + eps
    return p * (1 - lr * weight_decay) - (lr / (1 - beta1**step)) * m / spread, m, v


def _sgd_plain(
    p: Tensor, g: Tensor, *buffer: Tensor, lr: Any, momentum: float, nesterov: bool, weight_decay: float
) -> tuple[Tensor, ...]:
    p, g, *buffers = _widened(p, g, *buffer)
    g = g + weight_decay * p
    if not buffers:
        return (p - lr * g,)
    moving = momentum * buffers[0] + g
    return p - lr * (g + momentum * moving if nesterov else moving), moving


def _widened(*tensors: Tensor) -> list[Tensor]:
    """In float64 if one is, else in float32."""
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    return [x.to(dtype) for x in tensors]


# Arguments


def _rate(lr: Rate, count: int) -> Any:
    return lr(count) if callable(lr) else lr


def _check_rate(name: str, lr: Rate) -> None:
    if not callable(lr) and not isinstance(lr, Tensor):
        _not_negative(name, lr=lr)


def _not_negative(name: str, **values: float) -> None:
    for argument, value in values.items():
        if not value >= 0:
            raise UserError(f"{name} needs {argument} of at least 0, but got {argument}={value}")


def _decays(mask: Mask, params: Any) -> list[bool]:
    """One bool a leaf of the parameters. Raises `UserError` for a mask of another structure."""
    shape = tree.structure(params)
    if mask is None:
        return [True] * shape.num_leaves
    chosen = mask(params) if callable(mask) else mask
    if tree.structure(chosen) != shape:
        raise UserError(f"mask must be a tree of bools like params, {shape}, but is {tree.structure(chosen)}")
    return [bool(x) for x in tree.leaves(chosen)]
