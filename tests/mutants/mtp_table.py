"""Defects of multi-token prediction, each as a small edit of this library: easily made, and seen on the layout that is named or
against a reference of one's own (tests/test_mtp.py), as none changes a shape."""

from __future__ import annotations

from dataclasses import dataclass

from fmegatron.models import Decoder, DecoderConfig
from tests.mutants.table import Mutant, mutant

# as `find_model` reads it: "tests.mutants.mtp_table:TINY"
TINY = Decoder(DecoderConfig(vocab=24, embed=8, layers=1, heads=4, mlp=8, kv_heads=2, head=4, mtp=2, mtp_weight=0.6))


@dataclass(frozen=True)
class Planted:
    """A defect, and the layout that shows it; "": one device shows it, against the reference."""

    mutant: Mutant
    layout: str = ""


def planted(name: str, bug: str, *edits: tuple[str, str, str], on: str = "") -> Planted:
    return Planted(mutant(name, bug, *edits), on)


MODULES = "fmegatron.models.mtp"

MTP_MUTANTS = {
    p.mutant.name: p
    for p in (
        planted(
            "tokens are shifted among a rank's own",
            "a roll of the local part of the sequence: with context parallelism its last tokens get the wrong targets",
            (
                f"{MODULES}:further",
                'whole = {n: sh(batch[n], "batch seq -> batch all") for n in _READ if n in batch}',
                "whole = {n: batch[n] for n in _READ if n in batch}",
            ),
            (f"{MODULES}:further", 'return sh(x, "batch all -> batch seq")', "return x"),
            on="cp=2",
        ),
        planted(
            "a document's end is no end",
            "the last tokens of a document are taught to predict the next one's first",
            (f"{MODULES}:further", 'if "segments" in whole:', "if False:"),
        ),
        planted(
            "the target may be in another document",
            "the token that is read is of the same document, and the one behind it is not looked at",
            (
                f"{MODULES}:further",
                "labels.masked_fill(~there | ((target != segments) & (target != PADDING)), IGNORE)",
                "labels.masked_fill(~there, IGNORE)",
            ),
        ),
        planted(
            "the weight is divided by the number of modules twice",
            "once in the coefficient and once in the mean over modules",
            (f"{MODULES}:weights", "config.mtp_weight / max(depths, 1)", "config.mtp_weight / max(depths, 1) ** 2"),
        ),
        planted(
            "the token that is read is the one before",
            "the embedding of the token itself in place of the next one's",
            (f"{MODULES}:further", 'own(moved("tokens", depth, 0))', 'own(moved("tokens", depth - 1, 0))'),
        ),
        planted(
            "every module reads the hidden state of the layers",
            "modules beside each other in place of one behind the other, as in earlier multi-token prediction",
            (
                f"{MODULES}:module",
                "joined(model, p, embedded, rest[-1], ctx)",
                "joined(model, p, embedded, rest[max(0, len(rest) - 1 - (ctx.layer - model.config.layers))], ctx)",
            ),
        ),
        planted(
            "a module's loss is divided by the tokens of the next one's",
            "by as many tokens as count in the main loss, of which there are more",
            (
                f"{MODULES}:Further.counts",
                "found = self.labels != IGNORE",
                "found = torch.ones_like(self.labels, dtype=torch.bool)",
            ),
        ),
    )
}
