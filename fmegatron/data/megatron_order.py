"""The order in which Megatron-LM's GPT dataset reads a corpus, index for index.

Follows `gpt_dataset.py` of Megatron-LM (megatron-core 0.20): a document index, a sample index and a shuffle index,
drawn from one numpy RandomState(seed). In it every sequence of the .idx counts as a document. The order depends on the
number of samples asked for (it sets the number of epochs); fmegatron's own order in `dataset.py` does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from fmegatron.errors import UserError


@dataclass(frozen=True, eq=False)
class MegatronOrder:
    """The three indices: item i of the dataset is sample number shuffle[i], read from samples[number] to the next.

    documents [epochs * sequences] int32; samples [n + 1, 2] int32 (place in documents, token offset); shuffle [n]
    uint32. The last two are int64 where they would overflow.
    """

    documents: np.ndarray
    samples: np.ndarray
    shuffle: np.ndarray
    epochs: int


def megatron_order(
    lengths: np.ndarray, *, seq_len: int, seed: int, num_samples: int | None = None, first: int = 0
) -> MegatronOrder:
    """The three indices for sequences `first`, `first` + 1, … of these lengths in tokens.

    num_samples=None is one epoch. Sample i reads seq_len + 1 tokens and begins on the last token of sample i - 1.
    Raises UserError where there are no tokens (Megatron-LM loops for ever there) or too few for one sample.
    """
    per_epoch = int(lengths.sum(dtype=np.int64))
    if per_epoch == 0:
        raise UserError(
            f"there are no tokens in these {len(lengths)} sequences: give a larger part of the data (split)"
        )
    epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_len + 1) // per_epoch))
    total = (epochs * per_epoch - 1) // seq_len
    if total == 0:
        fix = f"set seq_len to at most {per_epoch - 1}" if per_epoch > 1 else "give more text"
        raise UserError(f"seq_len={seq_len} needs {seq_len + 1} tokens but the data have {per_epoch}: {fix}")

    separate = False
    without_last = ((epochs - 1) * per_epoch - 1) // seq_len
    if epochs > 1:
        assert num_samples is not None
        separate = num_samples - without_last < int(0.80 * ((per_epoch - 1) // seq_len))

    rng = np.random.RandomState(seed)
    indices = np.arange(first, first + len(lengths), dtype=np.int32)
    documents = np.concatenate(
        [_shuffled(np.tile(indices, epochs - 1), rng), _shuffled(indices, rng)]
        if separate
        else [_shuffled(np.tile(indices, epochs), rng)]
    )
    samples = _sample_index(lengths[documents - first], total, seq_len)
    shuffle_dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    numbers = np.arange(total, dtype=shuffle_dtype)
    cut = without_last if separate else total
    shuffle = np.concatenate([_shuffled(numbers[:cut].copy(), rng), _shuffled(numbers[cut:].copy(), rng)])
    return MegatronOrder(documents, samples, shuffle, epochs)


def megatron_split(split: str, size: int) -> list[tuple[int, int] | None]:
    """The ranges [start, stop) of `size` sequences for training, validation and test, from "969, 30, 1" or such.

    A part without a share is None. Raises UserError for a string without a positive number.
    """
    numbers = [float(number) for number in re.findall(r"[.0-9]+", split)][:3]
    numbers += [0.0] * (3 - len(numbers))
    if sum(numbers) <= 0:
        raise UserError(f"split={split!r} has no positive number: give such as '969, 30, 1'")
    shares = [number / sum(numbers) for number in numbers]
    ends = [0.0]
    for share in shares:
        ends.append(ends[-1] + share)
    ranges: list[tuple[int, int] | None] = []
    for start, stop, share in zip(ends, ends[1:], shares, strict=False):
        ranges.append((int(round(start * size)), int(round(stop * size))) if share > 0 else None)
    return ranges


def _shuffled(x: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
    rng.shuffle(x)
    return x


def _sample_index(lengths: np.ndarray, total: int, seq_len: int) -> np.ndarray:
    """[total + 1, 2]: where the tokens number 0, seq_len, 2 seq_len, … of the concatenated documents lie."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    wanted = np.arange(total + 1, dtype=np.int64) * seq_len
    document = np.searchsorted(ends, wanted, side="right")  # skips empty documents, as a walk does
    offset = wanted - starts[document]
    document[0] = 0  # a walk starts on the first document, even an empty one
    dtype = np.int32 if max(len(lengths), int(lengths.max())) < np.iinfo(np.int32).max else np.int64
    return np.stack([document, offset], axis=1).astype(dtype)
