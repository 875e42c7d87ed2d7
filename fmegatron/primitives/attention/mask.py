"""Which keys a query sees: by order or position, document and window, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

KEY_CHUNK = 64  # keys that are looked at together when blocks are chosen by what positions and documents say


def segments_of(cu_seqlens: Tensor, batch: int, seq: int) -> Tensor:
    """int32[batch seq] document numbers of the starts in `cu_seqlens` (see `attention`)."""
    token = torch.arange(batch * seq, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, token, right=True, out_int32=True).view(batch, seq)


def cu_seqlens_of(segments: Tensor, documents: int | None = None) -> Tensor:
    """int32[documents + 1] starts of the documents of segments[batch seq], then the number of tokens (see `attention`).

    documents: at least as many as there are, counted per row; None: counted, which waits for the device. With it the
        result's shape is known before, and the spare entries repeat the end.
    """
    starts = functional.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True).flatten()
    total = starts.numel()
    if documents is None:
        places = starts.nonzero().flatten()
        return torch.cat([places, places.new_full((1,), total)]).to(torch.int32)
    number = (starts.cumsum(0) - 1).where(starts, documents).clamp(max=documents)
    out = torch.full((documents + 1,), total, dtype=torch.int32, device=segments.device)
    token = torch.arange(total, dtype=torch.int32, device=segments.device)
    return out.scatter_reduce(0, number, token.where(starts, total), "amin")


class Mask:
    """The mask of one call. positions, segments: [seq] or [batch seq]; None for the keys' means the queries' own.

    kv_segments alone: keys are in plain order, and the document of a query is that of the key at its position.
    look: blocks may be chosen by the values of positions and segments (which waits for another device than the CPU);
        else by order alone.
    """

    def __init__(
        self,
        queries: int,
        keys: int,
        causal: bool,
        window: int | None = None,
        positions: Tensor | None = None,
        kv_positions: Tensor | None = None,
        segments: Tensor | None = None,
        kv_segments: Tensor | None = None,
        *,
        look: bool = False,
    ) -> None:
        self.queries, self.keys, self.causal, self.look = queries, keys, causal, look
        # Is the document of a query that of the key at its position, for certain?
        self.self_segments = kv_segments is None or segments is None
        if segments is None and kv_segments is not None:
            segments = _segments_at(kv_segments, positions, queries)
        self.positions, self.segments = positions, segments
        self.kv_positions = positions if kv_positions is None else kv_positions
        self.kv_segments = segments if kv_segments is None else kv_segments
        reach = keys if causal else max(queries, keys)
        self.window = None if window is None or (positions is None and window >= reach) else window

    @property
    def plain(self) -> bool:
        """Causal by order or not at all, without documents or window."""
        return self.positions is None and self.segments is None and self.window is None

    def blocks(self, size: int, elements: int | None = None) -> Iterator[tuple[slice, slice]]:
        """Blocks of at most `size` queries, and at most `elements` pairs of query and key where more than one query
        is left, each with the keys from the first to the last that one of them may see."""
        start = 0
        while start < self.queries:
            rows = slice(start, min(start + size, self.queries))
            columns = self.columns(rows)
            while elements is not None and rows.stop - start > 1 and _area(rows, columns) > elements:
                rows = slice(start, start + (rows.stop - start) // 2)
                columns = self.columns(rows)
            yield rows, columns
            start = rows.stop

    def columns(self, rows: slice) -> slice:
        """The keys from the first to the last that one of these queries may see."""
        start, stop = 0, self.keys
        if self.positions is None:
            first, last = (at + self.keys - self.queries for at in (rows.start, rows.stop - 1))
            if self.causal:
                stop = min(stop, max(last + 1, 0))
            elif self.window is not None:
                stop = min(stop, max(last + self.window, 0))
            if self.window is not None:
                start = min(max(first - self.window + 1, 0), stop)
        if not self.look:
            return slice(start, stop)
        return self._narrowed(rows, start, stop)

    def _narrowed(self, rows: slice, start: int, stop: int) -> slice:
        """Without the chunks of keys at either end of which no query sees one, by the values of the masks."""
        seen = []
        if self._positions is not None:
            at, low, high = self._positions
            first, last = at[:, rows].amin(1, keepdim=True), at[:, rows].amax(1, keepdim=True)
            if self.causal:
                seen.append(low <= last)
            elif self.window is not None:
                seen.append(low < last + self.window)
            if self.window is not None:
                seen.append(high > first - self.window)
        if self._segments is not None:
            at, low, high = self._segments
            first, last = at[:, rows].amin(1, keepdim=True), at[:, rows].amax(1, keepdim=True)
            seen.append((low <= last) & (high >= first))
        if not seen:
            return slice(start, stop)
        together = seen[0]
        for each in seen[1:]:
            together = together & each
        chunks = together.any(0).nonzero().flatten().tolist()
        if not chunks:
            return slice(start, start)
        start, stop = max(start, chunks[0] * KEY_CHUNK), min(stop, (chunks[-1] + 1) * KEY_CHUNK)
        return slice(start, max(start, stop))

    @cached_property
    def _positions(self) -> tuple[Tensor, Tensor, Tensor] | None:
        return _by_chunk(self.positions, self.kv_positions, self.queries, self.keys)

    @cached_property
    def _segments(self) -> tuple[Tensor, Tensor, Tensor] | None:
        return _by_chunk(self.segments, self.kv_segments, self.queries, self.keys)

    def seen(self, rows: slice, columns: slice, device: torch.device) -> Tensor | None:
        """bool[batch or 1, rows, columns]; None: all."""
        seen = None
        if self.segments is not None and self.kv_segments is not None:
            at, kv_at = self.segments.view(-1, self.queries), self.kv_segments.view(-1, self.keys)
            seen = at[:, rows, None] == kv_at[:, None, columns]
        if not self.causal and self.window is None:
            return seen
        if self.positions is None or self.kv_positions is None:
            first, last = (at + self.keys - self.queries for at in (rows.start, rows.stop - 1))
            if self._all_within(first, last, columns):
                return seen
            at = torch.arange(first, last + 1, device=device)[None, :, None]
            kv_at = torch.arange(columns.start, columns.stop, device=device)[None, None]
        else:
            at = self.positions.view(-1, self.queries)[:, rows, None].to(device)
            kv_at = self.kv_positions.view(-1, self.keys)[:, None, columns].to(device)
        if self.window is None:
            within = kv_at <= at
        else:
            within = (kv_at > at - self.window) & (kv_at <= at if self.causal else kv_at < at + self.window)
        return within if seen is None else seen & within

    def _all_within(self, first: int, last: int, columns: slice) -> bool:
        """Does order alone, causal and window, let every query from first to last see all of these keys?"""
        if self.causal:
            late = columns.stop - 1 > first
        else:
            late = self.window is not None and columns.stop - 1 >= first + self.window
        early = self.window is not None and columns.start <= last - self.window
        return columns.start == columns.stop or not (late or early)


def _segments_at(kv_segments: Tensor, positions: Tensor | None, queries: int) -> Tensor:
    """The documents of the keys at the queries' positions, which without any are the last ones."""
    if positions is None:
        return kv_segments[..., kv_segments.shape[-1] - queries :]
    positions = positions.to(kv_segments.device).clamp(min=0)
    if positions.ndim == 1:
        return kv_segments.index_select(-1, positions)
    return kv_segments.expand(positions.shape[0], -1).gather(-1, positions)


def runs_of(positions: Tensor, most: int) -> list[tuple[slice, int]] | None:
    """[(queries, the position of the first)] of the runs of adjacent positions in positions[seq]; None for more than
    `most` runs. Looks at values."""
    breaks = ((positions[1:] - positions[:-1]) != 1).nonzero().flatten().tolist()
    if len(breaks) >= most:
        return None
    starts = [0, *(b + 1 for b in breaks)]
    firsts = positions[starts].tolist()
    ends = [*starts[1:], positions.shape[0]]
    return [(slice(a, b), first) for a, b, first in zip(starts, ends, firsts, strict=True)]


def _area(rows: slice, columns: slice) -> int:
    return (rows.stop - rows.start) * (columns.stop - columns.start)


def _by_chunk(of: Tensor | None, kv: Tensor | None, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """On the CPU: the queries' values [batch or 1, queries], the least and the greatest of each chunk of keys."""
    if of is None or kv is None or not queries or not keys:
        return None
    chunks = -(-keys // KEY_CHUNK)
    places = torch.arange(chunks * KEY_CHUNK).clamp(max=keys - 1)
    by_chunk = kv.cpu().view(-1, keys)[:, places].unflatten(1, (chunks, KEY_CHUNK))
    return of.cpu().view(-1, queries), by_chunk.amin(2), by_chunk.amax(2)
