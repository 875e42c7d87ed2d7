"""Tokens drawn from logits, with temperature, top-k and top-p."""

from __future__ import annotations

import torch
from torch import Tensor

from fmegatron import random


def draw(
    logits: Tensor, key: random.Key, *, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """logits[batch vocab] -> token ids[batch]: the likeliest at temperature 0, else drawn among the likeliest.

    The draw takes the largest of logit + Gumbel noise, so that it is a function of the key and the row alone.
    """
    if temperature == 0:
        return logits.argmax(-1)
    scaled = among_likeliest(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    u = random.uniform(key, tuple(scaled.shape), dtype=torch.float64, device=scaled.device)
    return (scaled.double() - (-(u.clamp(min=1e-300)).log()).log()).argmax(-1)


def among_likeliest(
    logits: Tensor, *, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The logits[batch vocab] of what is drawn, -inf for tokens that are not among the likeliest."""
    scaled = logits.float() / temperature
    if top_k is not None and top_k < scaled.shape[-1]:
        least = scaled.topk(top_k, -1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = scaled.sort(-1, descending=True)
        p = ordered.softmax(-1)
        beyond = p.cumsum(-1) - p >= top_p  # the probabilities before a token reach top_p already
        scaled = scaled.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    return scaled
