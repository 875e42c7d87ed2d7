"""Small global batches with what goes wrong: unequal masks, a rank or a whole batch without a token that counts, packed
documents."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE = -100  # the label of a token without a loss


def make_batch(
    vocab: int, rows: int, seq: int, *, mask: str = "full", packed: bool = False, empty: int = 1, seed: int = 0
) -> dict[str, Tensor]:
    """tokens and labels, int64[batch seq], with some labels ignored.

    mask: "full"; "uneven": a tensor `mask`, from few to nearly all tokens a row; "padded": rows end early, behind which
        labels are ignored; "row": uneven, and nothing counts in the first `empty` rows; "none": nothing counts, in the
        first half of the rows by labels, in the others by `mask`.
    packed: `segments` and `positions`[batch seq] of two or more documents a row.
    """
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (rows, seq + 1), generator=g)
    labels = ids[:, 1:].masked_fill(torch.rand(rows, seq, generator=g) < 0.1, IGNORE)
    found = {"tokens": ids[:, :-1].contiguous(), "labels": labels}
    where = torch.arange(seq)
    if mask in ("uneven", "row"):
        share = torch.linspace(0.2, 0.95, rows)[:, None]
        counts = torch.rand(rows, seq, generator=g) < share
        counts[-1, :2] = True  # something counts
        counts[: empty if mask == "row" else 0] = False
        labels[-1, :2] = ids[-1, 1:3]
        found["mask"] = counts
    elif mask == "padded":
        lengths = torch.linspace(max(1, seq // 4), seq, rows).long()[:, None]
        found["labels"] = labels.masked_fill(where >= lengths, IGNORE)
        found["labels"][-1, 0] = ids[-1, 1]
    elif mask == "none":
        by_label = torch.arange(rows)[:, None] < rows // 2
        found["labels"] = labels.masked_fill(by_label, IGNORE)
        found["mask"] = by_label.expand(rows, seq).clone()
    if packed:
        starts = torch.rand(rows, seq, generator=g) < 2.0 / seq
        starts[:, 0] = True
        starts[:, seq // 2] = True
        found["segments"] = starts.long().cumsum(1) - 1
        first = torch.where(starts, where, 0).cummax(1).values
        found["positions"] = where - first
    return found
