"""Batches as a pure function of (data, seed, step): the order depends neither on ranks nor on how long a run is.

The tokens of a split are one stream. Sample i of an epoch is seq_len + 1 of them, and the next sample begins on its
last one, so that every token is predicted once. Step s takes the global samples [s * batch_size, (s + 1) * batch_size);
sample g lies in epoch g // n (n samples an epoch) at place g % n of that epoch's permutation. A rank asks for the rows
(and columns) that it holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fmegatron import random
from fmegatron.data.indexed import Indexed, open_indexed
from fmegatron.data.megatron_order import megatron_order
from fmegatron.errors import UserError

ORDERS = ("shuffled", "sequential", "megatron")
Indices = Sequence[int] | np.ndarray | torch.Tensor
Batch = dict[str, torch.Tensor]


class TokenDataset:
    """Samples of seq_len + 1 tokens from a .bin/.idx pair.

    order: "shuffled", a new permutation every epoch, without end; "sequential", the samples of one pass in order, the
    last one short (for evaluation); "megatron", Megatron-LM's GPT order for `num_samples` (None: one epoch).
    split: the part [start, stop) of the documents, as fractions ("megatron": of the sequences).
    eod: the id that ends a document, needed for `packed` batches and for mask_eod.
    mask_eod: no loss where the input is `eod`, so that no document's first token is predicted from another document.

    Attributes: seq_len, samples (in an epoch), tokens (the stream; with "megatron" the whole file), data (the opened
    files).
    Raises UserError at once if the split has fewer than seq_len + 1 tokens ("sequential": 2), or for a bad argument.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        *,
        seq_len: int,
        seed: int = 0,
        split: tuple[float, float] = (0.0, 1.0),
        order: str = "shuffled",
        num_samples: int | None = None,
        eod: int | None = None,
        mask_eod: bool = False,
    ) -> None:
        if order not in ORDERS:
            raise UserError(f"order={order!r} is unknown: choose one of {', '.join(ORDERS)}")
        if num_samples is not None and order != "megatron":
            raise UserError(
                f"num_samples={num_samples} is for order='megatron': {order} does not depend on it; leave it out"
            )
        if seq_len < 1:
            raise UserError(f"seq_len={seq_len} is not positive: give the number of tokens in a sequence")
        if not 0 <= seed < 2**32:
            raise UserError(f"seed={seed} is outside [0, 2**32): give another")
        if mask_eod and eod is None:
            raise UserError("mask_eod=True needs the id of the end-of-document token: give eod")
        self.data: Indexed = open_indexed(prefix)
        if self.data.tokens.dtype.kind not in "iu":
            raise UserError(
                f"{self.data.prefix}.bin holds {self.data.tokens.dtype.name}, no token ids: give tokenized data"
            )
        self.seq_len, self.seed, self.order, self.split = seq_len, seed, order, split
        self.eod, self.mask_eod = eod, mask_eod
        self._permutations: dict[int, np.ndarray] = {}
        if order == "megatron":
            first, last = split_range(split, self.data.num_sequences)
            self.tokens = self.data.tokens
            self._starts = self.data.sequence_bounds
            self._index = megatron_order(
                self.data.lengths[first:last], seq_len=seq_len, seed=seed, num_samples=num_samples, first=first
            )
            self.samples = len(self._index.shuffle)
            return
        first, last = split_range(split, self.data.num_documents)
        bounds = self.data.document_bounds
        self.tokens = self.data.tokens[int(bounds[first]) : int(bounds[last])]
        available, needed = len(self.tokens), 2 if order == "sequential" else seq_len + 1
        if available < needed:
            part = "" if split == (0.0, 1.0) else f" in its part {split[0]:g} to {split[1]:g}"
            fix = "give more text" if available < 2 else f"set seq_len to at most {available - 1}, or give more text"
            raise UserError(
                f"seq_len={seq_len} needs at least {needed} tokens, "
                f"but {self.data.prefix}.bin has {available}{part}: {fix}"
            )
        short = order == "sequential"
        self.samples = -(-(available - 1) // seq_len) if short else (available - 1) // seq_len

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self.samples

    def sample(self, index: int) -> np.ndarray:
        """The ids of global sample `index`: seq_len + 1 of them, at the end of "sequential" fewer, past it none."""
        if self.order == "megatron":
            return self._megatron_sample(index)
        if self.order == "sequential":
            start = index * self.seq_len
            return self.tokens[start : start + self.seq_len + 1]
        epoch, place = divmod(index, self.samples)
        start = int(self._permutation(epoch)[place]) * self.seq_len
        return self.tokens[start : start + self.seq_len + 1]

    def batch(
        self,
        step: int,
        *,
        batch_size: int,
        rows: Indices | None = None,
        columns: Indices | None = None,
        packed: bool = False,
    ) -> Batch:
        """The batch of a step, or the global rows and columns of it that are asked for; see `make_batch`."""
        end = (step + 1) * batch_size * self.seq_len
        return make_batch(
            self.sample,
            step,
            seq_len=self.seq_len,
            batch_size=batch_size,
            rows=rows,
            columns=columns,
            eod=self.eod,
            mask_eod=self.mask_eod,
            packed=packed,
            filled=self.order == "sequential" and end > len(self.tokens) - 1,
        )

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            while len(self._permutations) > 1:  # a batch may reach over an epoch's end: two are enough
                self._permutations.pop(next(iter(self._permutations)))
            self._permutations[epoch] = epoch_permutation(self.seed, epoch, self.samples)
        return self._permutations[epoch]

    def _megatron_sample(self, index: int) -> np.ndarray:
        order = self._index
        if not 0 <= index < self.samples:
            raise UserError(f"sample {index} is outside the {self.samples} that were prepared: raise num_samples")
        number = int(order.shuffle[index])
        (first, begin), (last, end) = order.samples[number].tolist(), order.samples[number + 1].tolist()
        parts = []
        for place in range(first, last + 1):
            document = int(order.documents[place])
            start = int(self._starts[document])
            stop = start + end + 1 if place == last else int(self._starts[document + 1])
            parts.append(self.tokens[start + (begin if place == first else 0) : stop])
        return np.concatenate(parts)


def make_batch(
    sample: Callable[[int], np.ndarray],
    step: int,
    *,
    seq_len: int,
    batch_size: int,
    rows: Indices | None = None,
    columns: Indices | None = None,
    eod: int | None = None,
    mask_eod: bool = False,
    packed: bool = False,
    filled: bool = False,
) -> Batch:
    """The batch of a step from a function of the global sample number.

    rows and columns are global: which rows of [0, batch_size) and which positions of [0, seq_len) to return, in that
    order.
    Returns int64 "tokens" and "labels" (the next token) and bool "mask" (does the label count?), each [rows, columns];
    packed adds int64 "segments" (number of the document within the row) and "positions" (within the document), which
    change after each `eod`. Short samples are filled with id 0, mask False, in a segment of their own. filled adds bool
    "real", False where the batch is filled so, which what mixes tokens must know (see `fmegatron.padding`); all ranks must say
    the same of a batch.
    """
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size} is not positive: give the number of sequences in a global batch")
    if step < 0:
        raise UserError(f"step={step} is negative: steps count from 0")
    if packed and eod is None:
        raise UserError("packed=True needs the id of the end-of-document token to tell documents apart: give eod")
    chosen = _indices(rows, batch_size, "rows", "batch_size")
    read = np.zeros((len(chosen), seq_len + 1), np.int64)
    counts = np.zeros((len(chosen), 1), np.int64)
    for i, row in enumerate(chosen.tolist()):
        ids = sample(step * batch_size + row)
        read[i, : len(ids)] = ids
        counts[i] = max(len(ids) - 1, 0)

    tokens, labels = read[:, :-1], read[:, 1:]
    real = np.arange(seq_len) < counts
    mask = real & (tokens != eod) if mask_eod else real
    out = {"tokens": tokens, "labels": labels, "mask": mask}
    if filled:
        out["real"] = real
    if packed:
        starts = np.zeros(tokens.shape, bool)
        starts[:, 1:] = (tokens[:, :-1] == eod) & real[:, :-1]  # the filling may look like an end
        starts |= np.arange(seq_len) == counts  # where the filling begins
        starts[:, 0] = False
        where = np.where(starts, np.arange(seq_len), 0)
        out["segments"] = np.cumsum(starts, axis=1)
        out["positions"] = np.arange(seq_len) - np.maximum.accumulate(where, axis=1)
    if columns is not None:
        held = _indices(columns, seq_len, "columns", "seq_len")
        out = {name: value[:, held] for name, value in out.items()}
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in out.items()}


def eval_batches(
    dataset: TokenDataset,
    batch_size: int,
    *,
    rows: Indices | None = None,
    columns: Indices | None = None,
    packed: bool = False,
    limit: int | None = None,
) -> Iterator[Batch]:
    """Batches that have every token of the split (but the first) exactly once as a label that counts, in order.

    Takes a dataset of any order and reads its stream in sequence. The last batch is as large as the others, filled with
    rows whose mask is False; where it is, it has "real", which tells tokens apart. limit: at most so many batches. See `make_batch` for rows, columns and packed.
    """
    if dataset.order == "megatron":
        raise UserError("dataset has order='megatron': evaluate one with order='sequential'")
    stream, length = dataset.tokens, dataset.seq_len

    def sample(index: int) -> np.ndarray:
        return stream[index * length : index * length + length + 1]

    batches = -(-(len(stream) - 1) // (length * batch_size))
    for step in range(batches if limit is None else min(batches, limit)):
        yield make_batch(
            sample,
            step,
            seq_len=length,
            batch_size=batch_size,
            rows=rows,
            columns=columns,
            eod=dataset.eod,
            mask_eod=dataset.mask_eod,
            packed=packed,
            filled=(step + 1) * batch_size * length > len(stream) - 1,
        )


def epoch_permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """A permutation of range(size), int64, that depends on (seed, epoch) alone."""
    return random.permutation(random.fold_in(random.key(seed), epoch), size)


def split_range(split: tuple[float, float], size: int) -> tuple[int, int]:
    """The part of range(size) between two fractions: neighbouring splits share no item and leave none out."""
    start, stop = split
    if not 0 <= start < stop <= 1:
        raise UserError(f"split={split} is no part of the data: give two fractions, 0 <= start < stop <= 1")
    return int(round(start * size)), int(round(stop * size))


def unigram_entropy(tokens: np.ndarray, vocab_size: int | None = None, *, chunk: int = 1 << 24) -> float:
    """Entropy of the token frequencies, in nats per token: the loss of the best model that ignores context.

    Raises UserError for an empty stream or an id outside vocab_size.
    """
    if len(tokens) == 0:
        raise UserError("tokens is empty: the entropy of no token is undefined; give a stream with at least one")
    counts = np.zeros(vocab_size or 0, np.int64)
    for start in range(0, len(tokens), chunk):
        part = np.bincount(tokens[start : start + chunk], minlength=len(counts))
        if vocab_size is not None and len(part) > vocab_size:
            raise UserError(
                f"token id {len(part) - 1} is outside vocab_size={vocab_size}: give the tokenizer's vocab_size"
            )
        part[: len(counts)] += counts
        counts = part
    p = counts[counts > 0] / len(tokens)
    return float(-(p * np.log(p)).sum())


def _indices(wanted: Indices | None, size: int, name: str, limit: str) -> np.ndarray:
    """The wanted indices as a 1-D int64 array, checked; None is all."""
    if wanted is None:
        return np.arange(size)
    array: Any = wanted.detach().cpu().numpy() if isinstance(wanted, torch.Tensor) else np.asarray(wanted)
    array = array.astype(np.int64, copy=False)
    if array.ndim != 1 or (array.size and (array.min() < 0 or array.max() >= size)):
        raise UserError(f"{name}={array.tolist()} is not a list of indices below {limit}={size}: give global ones")
    return array
