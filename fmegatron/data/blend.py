"""Several datasets as one, in the proportions of their weights and in the order of Megatron-LM's BlendedDataset."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fmegatron.data.dataset import Batch, Indices, TokenDataset, make_batch
from fmegatron.errors import UserError

SURPLUS = 0.005
FIRST_CHUNK = 1 << 16


class Blend:
    """A mixture of datasets of one seq_len; `sample` and `batch` as in TokenDataset.

    Sample i comes from the dataset that lags its weight most (the greedy rule below), so the order depends on the
    weights alone, not on how many samples a run takes. weights=None reads every sample of every dataset exactly once,
    in proportion to their sizes. Datasets of order "shuffled" have no end; of the others a sample past the end is an
    error.
    Raises UserError for no dataset, more than 32,767, unequal seq_len, or weights that are not positive numbers.
    """

    def __init__(self, datasets: Sequence[TokenDataset], weights: Sequence[float] | None = None) -> None:
        if not datasets or len(datasets) > np.iinfo(np.int16).max:
            raise UserError(f"datasets has {len(datasets)} entries: give 1 to {np.iinfo(np.int16).max}")
        for dataset in datasets:
            if dataset.order == "sequential":
                raise UserError(
                    "a dataset of the blend has order='sequential', which ends: open it with order='shuffled'"
                )
            if dataset.seq_len != datasets[0].seq_len:
                raise UserError(
                    f"datasets have seq_len {datasets[0].seq_len} and {dataset.seq_len}: open all with one seq_len"
                )
        self.datasets = list(datasets)
        self.seq_len = datasets[0].seq_len
        self.eod, self.mask_eod = datasets[0].eod, datasets[0].mask_eod
        self.samples: int | None = None
        if weights is None:
            self._choice, self._number = blend_exhaustive([len(dataset) for dataset in datasets])
            self.samples = len(self._choice)
            return
        self.weights = normalized(weights, len(datasets))
        self._choice, self._number = np.zeros(0, np.int16), np.zeros(0, np.int64)

    def sample(self, index: int) -> np.ndarray:
        """The ids of sample `index` of the blend."""
        if index >= len(self._choice):
            if self.samples is not None:
                raise UserError(
                    f"sample {index} is outside the {self.samples} of the blend: give weights for one without end"
                )
            size = max(index + 1, 2 * len(self._choice), FIRST_CHUNK)
            self._choice, self._number = _extend(self.weights, size, self._choice, self._number)
        return self.datasets[int(self._choice[index])].sample(int(self._number[index]))

    def batch(
        self,
        step: int,
        *,
        batch_size: int,
        rows: Indices | None = None,
        columns: Indices | None = None,
        packed: bool = False,
    ) -> Batch:
        """The batch of a step; see `make_batch`."""
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
        )


def blend(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """(dataset int16 [size], number of the sample within its dataset int64 [size]).

    Sample i goes to the dataset d with the largest w_d * max(i, 1) - count_d, the first of equals.
    """
    empty = np.zeros(0, np.int16), np.zeros(0, np.int64)
    return _extend(normalized(weights, len(weights)), size, *empty)


def blend_exhaustive(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """As `blend`, with weights in proportion to the sizes and every dataset read exactly once."""
    total = sum(sizes)
    if total == 0 or min(sizes) < 0:
        raise UserError(f"sizes={list(sizes)} has no sample: give datasets that are not empty")
    weights = [size / total for size in sizes]
    counts = [0] * len(sizes)
    left = [d for d, size in enumerate(sizes) if size > 0]
    choice, number = np.zeros(total, np.int16), np.zeros(total, np.int64)
    for i in range(total):
        best = max(left, key=lambda d: weights[d] * max(i, 1) - counts[d])  # max takes the first of equals
        choice[i], number[i] = best, counts[best]
        counts[best] += 1
        if counts[best] == sizes[best]:
            left.remove(best)
    return choice, number


def blend_sizes(weights: Sequence[float], size: int) -> tuple[list[int], int]:
    """Megatron's sizes: (samples to prepare of each dataset, with 0.5 % to spare; length of the blend)."""
    shares = [math.ceil(size * weight) for weight in normalized(weights, len(weights))]
    return [math.ceil(share * (1 + SURPLUS)) for share in shares], sum(shares)


def parse_blend(parts: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """(prefixes, weights) of a list such as `0.3 a 0.7 b`; prefixes alone give weights None.

    Raises UserError for an empty list.
    """
    if not parts:
        raise UserError("the blend is empty: give PREFIX…, or WEIGHT PREFIX WEIGHT PREFIX…")
    if len(parts) % 2 == 0:
        try:
            return list(parts[1::2]), [float(weight) for weight in parts[0::2]]
        except ValueError:
            pass
    return list(parts), None


def normalized(weights: Sequence[float], count: int) -> list[float]:
    """Weights that add up to 1 (float64)."""
    good = len(weights) == count and all(math.isfinite(weight) and weight > 0 for weight in weights)
    if not good:
        raise UserError(f"weights={list(weights)} are not {count} positive numbers: give one for each dataset")
    total = np.sum(np.asarray(weights, np.float64))
    return [float(weight / total) for weight in np.asarray(weights, np.float64)]


def _extend(weights: list[float], size: int, choice: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Continue a blend to `size` samples."""
    done = len(choice)
    counts = np.bincount(choice, minlength=len(weights)).tolist()
    new_choice, new_number = np.zeros(size, np.int16), np.zeros(size, np.int64)
    new_choice[:done], new_number[:done] = choice, number
    datasets = range(len(weights))
    for i in range(done, size):
        scale = max(i, 1)
        lag = [weights[d] * scale - counts[d] for d in datasets]
        best = lag.index(max(lag))
        new_choice[i], new_number[i] = best, counts[best]
        counts[best] += 1
    return new_choice, new_number
