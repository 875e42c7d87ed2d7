"""Runs an elementwise update over the leaves of several trees: a multi-tensor call a group of leaves that are alike.

Pure, or overwriting with `donate`, without temporaries of the size of a tree; on the local shards of DTensors; in plain
operations under torch.func and where no kernel runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.capturing import recording
from fmegatron.errors import UserError
from fmegatron.optim import leaves
from fmegatron.optim.leaves import buffer_of, grouped, holder_of, layout_of
from fmegatron.optim.moments import Bytes
from fmegatron.optim.rounding import Rounding
from fmegatron.simulation import is_local

# Elements converted at once where a kernel cannot take a leaf's dtypes or strides as they are (64 MiB in float32).
PIECE = 1 << 24
# Elements whose gradients are scaled at once on a CPU: they stay in its cache until the kernel has read them.
SCALED_PIECE = 1 << 17

Span = tuple[int, int]  # (leaf, first element of its flat local shard)
# (work, setting, rows, copies beside them or None, what gradients are multiplied by or None) -> the rows that are left
OnePass = Callable[["Work", Any, list[int], "list[Tensor] | None", "Tensor | None"], list[int]]


@dataclass(frozen=True)
class Work:
    """The leaves of an update.

    columns: {name of a tree: its leaves}. rows: the leaves that have a gradient. written: the trees that change.
    local: {name: {row: the local shard that is read, and overwritten if the tree is in `written`}}.
    new: {name: leaves after the update}, filled in place. params: the tree of parameters.
    """

    columns: dict[str, list[Any]]
    rows: list[int]
    written: tuple[str, ...]
    local: dict[str, dict[int, Tensor]]
    new: dict[str, list[Any]]
    params: Any
    rounding: Rounding | None

    @functools.cached_property
    def paths(self) -> list[str]:
        """The leaves' dotted names."""
        return tree.paths(self.params)

    def store(self, name: str, row: int, value: Tensor, target: Tensor | None = None, start: int = 0) -> None:
        """Write a value into a leaf, or into `target`, the flat piece of it from `start` on, rounding as asked."""
        target = self.local[name][row] if target is None else target
        if self.rounding is None or not self.rounding.applies(target):
            target.copy_(value)
        else:
            self.rounding.store(target, value, self.columns[name][row], f"{self.paths[row]}:{name}", start)

    def keep(self, name: str, row: int, value: Tensor) -> None:
        """A value of the plain path as the new leaf."""
        old = self.columns[name][row]
        if self.rounding is None or not self.rounding.applies(old):
            self.new[name][row] = value.to(old.dtype)
        else:
            self.new[name][row] = self.rounding.rounded(value, old, f"{self.paths[row]}:{name}")

    def shard(self, name: str, row: int) -> Tensor:
        """The local shard of a leaf; the leaf itself on the plain path."""
        return self.columns[name][row] if leaves.plain_only() else self.local[name][row]

    def read(self, name: str, row: int) -> Tensor:
        """The local shard in the dtype to compute in."""
        return leaves.widened(self.shard(name, row))[0]

    def write(self, name: str, row: int, value: Tensor) -> None:
        """A value as the new local shard, on whichever path."""
        if leaves.plain_only():
            self.keep(name, row, value)
        else:
            self.store(name, row, value)

    def trees(self, like: dict[str, Any]) -> dict[str, Any]:
        """{name: new tree} of the trees written."""
        return {n: tree.like(like[n], self.new[n]) for n in self.written}


def opened(trees: dict[str, Any], written: Sequence[str], donate: bool, rounding: Rounding | None = None) -> Work:
    """The leaves of trees alike, "params" and "grads" among them, ready to be updated. Call it without gradients.

    Raises `UserError` where structures, shapes or placements disagree.
    """
    columns = columns_of(trees)
    written = tuple(n for n in written if n in columns)
    rows = [i for i, p in enumerate(columns["params"]) if tree.is_float(p) and columns["grads"][i] is not None]
    new = {n: list(columns[n]) for n in written}
    local: dict[str, dict[int, Tensor]] = {n: {} for n in columns}
    if not leaves.plain_only():
        for n, column in columns.items():
            copied = n in written and not donate
            local[n] = {i: buffer_of(column[i]).clone() if copied else buffer_of(column[i]) for i in rows}
        for n in written:
            for i, x in local[n].items():
                new[n][i] = holder_of(x, columns[n][i])
    return Work(columns, rows, written, local, new, trees["params"], rounding)


def apply(
    trees: dict[str, Any],
    settings: Sequence[Any],
    plain: Callable[..., tuple[Tensor, ...]],
    kernel: Callable[..., None],
    donate: bool,
    written: tuple[str, ...],
    *,
    temporaries: bool = False,
    half: tuple[str, ...] = ("cpu", "cuda"),
    rounding: Rounding | None = None,
    scale: Tensor | None = None,
    copies: Any = None,
    one_pass: OnePass | None = None,
    coded: Bytes | None = None,
) -> dict[str, Any]:
    """Run an update over the leaves that have a gradient: {name: new tree} of the trees in `written`.

    settings: what each leaf has of its own; leaves with one setting go together.
    plain(setting, *leaves of one parameter) returns its new leaves, in the order of `written`.
    kernel(setting, *lists of leaves) overwrites them; temporaries: it makes some of the size of what it gets, so it
        gets a bounded piece at a time. half: devices on which it is right for leaves that are all in half precision,
        that is, computes in float32 and rounds once; elsewhere it gets them in float32.
    scale: a 0-d tensor by which gradients are multiplied as they are read; they themselves stay.
    copies: a tree like the parameters, of buffers to which the new ones are written too, in their dtypes, or None.
    one_pass: a kernel that does all of it for the rows that it can take, and gives those that it cannot.
    coded: how moments in bytes are read and written; the kernel gets floats, `plain` bytes.
    """
    with leaves.no_grad():
        work = opened(trees, written, donate, rounding)
        names = list(work.columns)
        if leaves.plain_only():
            for i in work.rows:
                row = [work.columns[n][i] for n in names]
                if scale is not None:
                    row[1] = row[1] * scale
                values = plain(settings[i], *row)
                for n, value in zip(work.written, values, strict=True):
                    work.keep(n, i, value)
            return work.trees(trees)

        given = [None] * len(settings) if copies is None else tree.leaves(copies)
        targets: list[Any] = [None if t is None else buffer_of(t) for t in given]
        locals_ = [work.local[n] for n in names]

        def kind(i: int) -> Any:
            found = [column[i] for column in locals_]
            if targets[i] is not None:
                found.append(targets[i])
            return settings[i], *[(x.device, x.dtype, x.is_contiguous()) for x in found]

        for (setting, *_), members in grouped(work.rows, kind).items():
            copied = None if targets[members[0]] is None else [targets[i] for i in members]
            left = members if one_pass is None else one_pass(work, setting, members, copied, scale)
            if left:
                _run(work, setting, left, plain, kernel, temporaries, half, scale, coded)
                if copied:
                    torch._foreach_copy_([targets[i] for i in left], [work.local["params"][i] for i in left])
        return work.trees(trees)


def _run(
    work: Work,
    setting: Any,
    members: list[int],
    plain: Any,
    kernel: Any,
    temporaries: bool,
    half: tuple[str, ...],
    scale: Tensor | None,
    coded: Bytes | None,
) -> None:
    """Overwrite one group, whose rows are alike in devices, dtypes and contiguity."""
    scale = _factor(scale, work.local["grads"][members[0]])
    names = list(work.columns)
    lists = [[work.local[n][i] for i in members] for n in names]
    first = [column[0] for column in lists]
    if first[0].device.type not in ("cpu", "cuda"):
        for i, (p, g, *rest) in zip(members, zip(*lists, strict=True), strict=True):
            g = g if scale is None else g * scale
            for n, value in zip(work.written, plain(setting, p, g, *rest), strict=True):
                work.store(n, i, value)
        return
    rounded = {n for n in work.written if work.rounding and work.rounding.applies(work.local[n][members[0]])}
    alike = len({x.dtype for x in first}) == 1 and all(x.is_contiguous() for x in first)
    taken = first[0].dtype.itemsize >= torch.float32.itemsize or first[0].device.type in half
    if alike and taken and not rounded:
        for piece, _ in pieces(lists, members, scale) if temporaries or scale is not None else [(lists, [])]:
            kernel(setting, *_scaled(piece, scale))
        return
    # the kernels take one dtype, not all of them a narrow one, and read strided tensors wrongly on CPU: convert a bounded piece at a time
    dtype = leaves.wide(*first)
    for piece, spans in pieces(lists, members, scale):
        read = piece if coded is None else coded.opened(piece, names)
        ready = _scaled([_converted(column, dtype) for column in read], scale)
        kernel(setting, *ready)
        if coded is not None:
            coded.close(piece, names, ready)
        for n, column, source in zip(names, piece, ready, strict=True):
            if coded is not None and n in coded.columns:
                continue
            if n in rounded:
                for (i, start), target, value in zip(spans, column, source, strict=True):
                    work.store(n, i, value, target, start)
            elif n in work.written and source is not column:
                torch._foreach_copy_(column, source)


def _factor(scale: Tensor | None, like: Tensor) -> Tensor | None:
    """What to multiply by on the device of a leaf; None where that is a one, which a CPU may ask
    outside of a recording."""
    if scale is None or is_local(scale) or is_local(like):
        return scale
    if scale.device.type == like.device.type == "cpu" and recording() is None:
        return scale if float(scale) != 1.0 else None
    return scale.to(like.device)


def _scaled(piece: list[list[Tensor]], scale: Tensor | None) -> list[list[Tensor]]:
    """The columns with the gradients, the second of them, multiplied."""
    if scale is None:
        return piece
    return [piece[0], list(torch._foreach_mul(piece[1], scale)), *piece[2:]]


def _converted(column: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if column[0].dtype == dtype and column[0].is_contiguous():
        return column
    out = [torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in column]
    torch._foreach_copy_(out, column)
    return out


def pieces(
    lists: list[list[Tensor]], members: Sequence[int], scale: Tensor | None = None
) -> Iterator[tuple[list[list[Tensor]], list[Span]]]:
    """The rows in batches of at most PIECE elements, each with what it is of which leaf; a larger row that is
    contiguous is cut. scale: the gradients of each are multiplied."""
    if any(is_local(x) for column in lists for x in column):
        yield lists, [(i, 0) for i in members]  # simulated: no branch on a local size
        return
    most = min(PIECE, SCALED_PIECE) if scale is not None and lists[0][0].device.type == "cpu" else PIECE
    batch: list[tuple[Tensor, ...]] = []
    spans: list[Span] = []
    held = 0
    for i, row in zip(members, zip(*lists, strict=True), strict=True):
        cut = row[0].numel() > most and all(x.is_contiguous() for x in row)
        parts = zip(*(x.view(-1).split(most) for x in row), strict=True) if cut else [row]
        start = 0
        for part in parts:
            if batch and held + part[0].numel() > most:
                yield [list(column) for column in zip(*batch, strict=True)], spans
                batch, spans, held = [], [], 0
            batch.append(tuple(part))
            spans.append((i, start))
            start += part[0].numel()
            held += part[0].numel()
    if batch:
        yield [list(column) for column in zip(*batch, strict=True)], spans


def columns_of(trees: dict[str, Any]) -> dict[str, list[Any]]:
    """The leaves of each tree. Raises `UserError` where structures, shapes or placements disagree."""
    flat, shape = tree.flatten(trees["params"])
    columns = {"params": flat}
    for name, t in trees.items():
        columns[name], found = tree.flatten(t)
        if found != shape:
            raise UserError(f"{name} must be a tree like params, but is {found} and not {shape}")
    for i, p in enumerate(flat):
        if not tree.is_float(p) or is_local(p):
            continue
        for name, column in columns.items():
            x = column[i]
            if x is None or x is p or (type(x) is type(p) is Tensor and x.shape == p.shape):
                continue
            if layout_of(x) != layout_of(p):
                path = tree.paths(trees["params"])[i]
                raise UserError(
                    f"{name} of {path} must have the parameter's shape and placements, {layout_of(p)}, "
                    f"but has {layout_of(x)}: redistribute it before the update"
                )
    return columns
