"""Generation that guesses a token ahead: the model's own prediction module drafts it, and the model checks it with the next
one, so that a pass through the layers may yield two tokens.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192): a guess x drawn from q is kept
with probability min(1, p(x) / q(x)), p being the model's; else the token is drawn from what p exceeds q by. So tokens are
distributed as without guesses; at temperature 0 they are the same. The first module of DeepSeek-V3 (arXiv 2412.19437, section
5.4.3) is right for 85 to 90 % of them.

Rows of a batch go on together: where one of them rejects its guess, all read one token in the next pass but one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmegatron import random
from fmegatron.drawing import among_likeliest, draw
from fmegatron.errors import UserError
from fmegatron.models import Decoder
from fmegatron.models.drafting import drafted, read


@dataclass
class Guesses:
    """How many tokens were guessed, and how many of them were kept."""

    made: int = 0
    kept: int = 0

    def __str__(self) -> str:
        share = f" ({100 * self.kept / self.made:.0f} %)" if self.made else ""
        return f"{self.kept} of {self.made} guessed tokens were kept{share}"


def check_speculation(model: Any) -> None:
    """Raises UserError for a model that cannot guess."""
    if not isinstance(model, Decoder):
        raise UserError("--speculate runs on one process: leave --mesh out, or --speculate")
    if not model.config.mtp:
        raise UserError("--speculate needs a prediction module, which the model lacks: train one with --mtp 1")
    moe = model.config.moe
    if moe is not None and (moe.routing.bounded or moe.routing.choose != "top_k"):
        raise UserError(
            "--speculate: the experts of a token depend on the others that are read with it (capacity, expert choice or Sinkhorn), "
            "so that guesses would change the text: leave it out"
        )


def speculated(
    model: Decoder,
    params: Any,
    ids: Tensor,
    *,
    tokens: int,
    cache: Any,
    inputs: Callable[[int, int], dict[str, Any]],
    emit: Callable[[Tensor], bool],
    ended: list[bool],
    guesses: Guesses,
    key: random.Key,
    **options: Any,
) -> None:
    """Gives `tokens` tokens of each row behind the prompts ids[batch seq] to `emit`, one of each row at a time, until it says
    that it needs no more.

    cache: with room for the module's. inputs(start, end): what the model reads of these slots beside tokens. ended: of each
    row, is it behind its end? options: of `draw`.
    """

    def keyed(number: int, what: str = "") -> random.Key:
        one = random.fold_in(key, number)
        return random.fold_in(one, what) if what else one

    states, logits = read(model, params, ids, cache, 0, **inputs(0, ids.shape[1]))
    start, end, number = 0, ids.shape[1], 1
    new = draw(logits[:, -1], keyed(0), **options)
    further = torch.cat([ids[:, 1:], new[:, None]], 1)  # of each state, the token behind it
    done = emit(new)
    while not done and number < tokens:
        if number == tokens - 1:
            logits = read(model, params, new[:, None], cache, end, **inputs(end, end + 1))[1]
            emit(draw(logits[:, -1], keyed(number), **options))
            return
        q = drafted(model, params, further, states, cache, start, **inputs(start, end))
        guess = draw(q, keyed(number, "guess"), **options)
        states, logits = read(model, params, torch.stack([new, guess], 1), cache, end, **inputs(end, end + 2))
        kept, token = decided(logits[:, 0], q, guess, keyed(number), **options)
        live = [r for r, over in enumerate(ended) if not over]
        right = kept.tolist()
        guesses.made += len(live)
        guesses.kept += sum(right[r] for r in live)
        done, number = emit(token), number + 1
        if all(right[r] for r in live):
            new = draw(logits[:, 1], keyed(number), **options)
            done, number = done or emit(new), number + 1
            further, start, end = torch.stack([token, new], 1), end, end + 2
        else:
            states, further, start, end, new = states[:, :1], token[:, None], end, end + 1, token


def decided(
    logits: Tensor, guessed: Tensor, guess: Tensor, key: random.Key, *, temperature: float, **options: Any
) -> tuple[Tensor, Tensor]:
    """(was the guess kept, bool[batch]; the token, [batch]), distributed as `draw` of logits[batch vocab] is. guess: drawn from
    guessed[batch vocab]."""
    if temperature == 0:
        token = logits.argmax(-1)
        return token == guess, token
    p, q = (among_likeliest(x, temperature=temperature, **options).double().softmax(-1) for x in (logits, guessed))
    of_guess = [x.gather(-1, guess[:, None])[:, 0] for x in (p, q)]
    u = random.uniform(random.fold_in(key, "keep"), tuple(guess.shape), dtype=torch.float64, device=guess.device)
    kept = u * of_guess[1] < of_guess[0]
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
    return kept, torch.where(kept, guess, draw(rest.log(), key, temperature=1.0))
