"""Rows of a table by token, the table's rows possibly sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from fmegatron.primitives._function import global_size, sharded


def embedding(
    table: torch.Tensor, tokens: torch.Tensor, *, sh: Any = None, vocab_size: int | None = None
) -> torch.Tensor:
    """table[vocab embed], tokens[batch seq] (global ids) -> [batch seq* embed].

    Where `vocab` is sharded each rank looks up the rows that it holds and leaves zeros for the rest; the sum over
    vocab's axes is resolved into the layout of `batch seq* embed` (a reduce-scatter, an all-reduce or nothing), as in
    Megatron's VocabParallelEmbedding. Elsewhere each rank takes its part of `seq*`. `vocab_size` is the global size of `vocab` (default: that of equal shards). Ids
    are not checked here (that would cost a sync): data does it.
    """
    if not sharded(sh, "vocab"):
        rows = _rows(table, tokens)
        return rows if sh is None else sh(rows, "batch seq embed -> batch seq* embed")
    size = global_size(sh, "vocab", table.shape[0]) if vocab_size is None else vocab_size
    ids = sh.index("vocab", size, device=table.device)
    y = sh.primitive(_rows_held, (table, tokens, ids), ("vocab embed", "batch seq", "vocab"), "batch seq embed")
    return sh.resolve(y, "batch seq embed", partial="vocab", to="batch seq* embed")


def _rows(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    # On CPU torch sums a bf16 gradient in bf16, one row at a time; the cast makes that sum fp32.
    if table.device.type == "cpu" and table.dtype in (torch.bfloat16, torch.float16) and table.requires_grad:
        return functional.embedding(tokens, table.float()).to(table.dtype)
    return functional.embedding(tokens, table)


def _rows_held(table: torch.Tensor, tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows of the tokens that are among `ids` (consecutive global ids, one per row of this table, but for rows that
    fill it up), zeros for the others."""
    local = tokens - ids[:1]
    inside = (local >= 0) & (local < (ids >= 0).sum())
    return _rows(table, local.where(inside, 0)).masked_fill(~inside.unsqueeze(-1), 0)
