"""An update in one pass over memory, and a norm in one, by Triton kernels for all leaves at once.

Where they run: on a GPU with triton, for contiguous leaves of float32 and narrower, whose local shards begin at a
multiple of 16 bytes. `apply` gives every other leaf to torch's own multi-tensor kernels, and so does a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fmegatron import capturing, kernels
from fmegatron.errors import UserError
from fmegatron.optim.apply import Work
from fmegatron.optim.core import Rate, rate_at
from fmegatron.optim.leaves import cuts_of
from fmegatron.optim.per_leaf import Setting
from fmegatron.precision import dtype_name

ALIGNED = 16  # bytes, for loads of that width
TREES = ("params", "grads", "m", "v")
MANY = 1 << 22  # elements from which a norm is worth a table
KEPT = 64  # tables of addresses on the device; a training step needs as many as there are kinds of leaves

_tables: dict[Any, Tensor] = {}
_blocks: dict[Any, Tensor] = {}


def check_kernel(name: str, kernel: str) -> None:
    """Raises `UserError` for a kernel that is unknown or not there."""
    if kernel not in kernels.KERNELS:
        raise UserError(f'{name} needs kernel="auto", "torch" or "triton", but got kernel={kernel!r}')
    if kernel == "triton" and not kernels.HAS_TRITON:
        raise UserError(f'{name}(kernel="triton"): triton is not installed; use kernel="auto"')


def adam_pass(
    work: Work,
    own: Setting,
    members: list[int],
    copies: list[Tensor] | None,
    scale: Tensor | None,
    *,
    kernel: str,
    lr: Rate,
    count: Any,
    betas: tuple[float, float],
    eps: float,
    decoupled: bool,
) -> list[int]:
    """Updates the leaves of one group that it can; those that are left.

    members: rows alike in dtypes and device. copies: beside them, where the new parameters are written too. scale: 0-d,
    what the gradients are multiplied by.
    """
    columns = [[work.local[n][i] for i in members] for n in TREES] + ([copies] if copies else [])
    by_chance = tuple(_by_chance(work, n, members) for n in ("params", "m", "v"))
    if not _able(kernel, [c[0] for c in columns]) or isinstance(lr, Tensor) or isinstance(own.scale, Tensor):
        return members
    if isinstance(own.decay, Tensor) or (any(by_chance) and not work.rounding.counted):  # type: ignore[union-attr]
        return members
    done = [n for n, i in enumerate(members) if all(_simple(c[n]) for c in columns) and _whole(work, i, by_chance)]
    if not done:
        return members
    from fmegatron.kernels.adam import BLOCK, adam

    def numbers(n: int) -> tuple[float, float, float]:
        rate, step = rate_at(lr, n) * own.scale, n + 1
        keep = 1 - rate * own.decay if decoupled else 1.0
        return keep, rate / (1 - betas[0] ** step), 1 / math.sqrt(1 - betas[1] ** step)

    device = columns[0][0].device
    local = [[column[n] for n in done] for column in columns]
    names = [*(dtype_name(c[0].dtype) for c in columns), None][:5]
    adam(
        _table(local, device),
        _places([x.numel() for x in local[0]], device, BLOCK),
        tuple(names),  # type: ignore[arg-type]
        capturing.numbers(numbers, count),
        scale=None if scale is None else scale.to(device),
        seeds=_seeds(work, [members[n] for n in done], device) if any(by_chance) else None,
        by_chance=by_chance,  # type: ignore[arg-type]
        decay=own.decay,
        betas=betas,
        eps=eps,
        decoupled=decoupled,
    )
    gone = set(done)
    return [i for n, i in enumerate(members) if n not in gone]


def squares_pass(group: list[Tensor], *, kernel: str = "auto") -> tuple[list[Tensor], list[Tensor]]:
    """(sums of squares, 0-d float32; what is left) of tensors of one dtype on one device."""
    few = kernel == "auto" and sum(x.numel() for x in group) < MANY
    if few or not _able(kernel, group):
        return [], group
    done = [x for x in group if _simple(x)]
    if not done:
        return [], group
    from fmegatron.kernels.squares import BLOCK, squares

    device = done[0].device
    table = _held([word for x in done for word in (x.data_ptr(), x.numel())], device)
    total = squares(table, _places([x.numel() for x in done], device, BLOCK), dtype_name(done[0].dtype))
    return [total], [x for x in group if not _simple(x)]


def _able(kernel: str, first: Sequence[Tensor]) -> bool:
    if kernel == "torch" or not kernels.HAS_TRITON or any(x.dtype not in kernels.DTYPES for x in first):
        return False
    on = "cpu" if kernel == "triton" and kernels.INTERPRETED else "cuda"
    return all(type(x) is Tensor and x.device.type in (on, "cuda") for x in first)


def _simple(x: Tensor) -> bool:
    return x.is_contiguous() and x.numel() > 0 and x.data_ptr() % ALIGNED == 0


def _by_chance(work: Work, name: str, members: list[int]) -> bool:
    return work.rounding is not None and work.rounding.applies(work.local[name][members[0]])


def _whole(work: Work, i: int, by_chance: tuple[bool, ...]) -> bool:
    """Are the positions of a local shard those of the leaf, as the kernel's random bits have it?"""
    return not any(by_chance) or not cuts_of(work.columns["params"][i])


def _table(columns: list[list[Tensor]], device: torch.device) -> Tensor:
    """int64[leaves, 6]: the addresses of each leaf's tensors, and its number of elements."""
    copies = columns[4] if len(columns) > 4 else columns[0]
    rows = zip(*columns[:4], copies, strict=True)
    return _held([word for row in rows for word in (*(x.data_ptr() for x in row), row[0].numel())], device)


def _places(sizes: list[int], device: torch.device, size: int) -> Tensor:
    """int64[programs]: which block, of `size` elements, of which leaf a program works on."""
    key = tuple(sizes), device, size
    if key not in _blocks:
        blocks = torch.tensor([-(-n // size) for n in sizes])
        leaf = torch.repeat_interleave(torch.arange(len(sizes)), blocks)
        first = torch.cumsum(blocks, 0) - blocks
        block = torch.arange(len(leaf)) - first[leaf]
        _keep(_blocks, key, _sent(leaf << 32 | block, device))
    recorder = capturing.recording()
    return _blocks[key] if recorder is None else recorder.keep(_blocks[key])


def _seeds(work: Work, rows: list[int], device: torch.device) -> Tensor:
    """int64[leaves, 3]: the keys of the random bits that parameters, means and mean squares are rounded by."""
    assert work.rounding is not None
    found = work.rounding.seeds([f"{work.paths[i]}:{n}" for i in rows for n in ("params", "m", "v")])
    return found if isinstance(found, Tensor) else _sent(torch.tensor(found), device)


def _held(words: list[int], device: torch.device) -> Tensor:
    """Words on the device, where they may be from the step before."""
    recorder = capturing.recording()
    if recorder is not None and device.type == "cuda":
        return recorder.constant(words)
    key = (tuple(words), device)
    if key not in _tables:
        _keep(_tables, key, _sent(torch.tensor(words), device))
    return _tables[key]


def _keep(among: dict[Any, Tensor], key: Any, value: Tensor) -> None:
    while len(among) >= KEPT:
        among.pop(next(iter(among)))
    among[key] = value


def _sent(host: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
