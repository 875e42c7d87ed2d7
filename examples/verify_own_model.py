"""Does a model of one's own compute the same function on every layout?

`python verify_own_model.py` draws ten layouts of up to 4 ranks, all of them simulated in this process, and compares the
loss, every gradient, and the parameters after steps of AdamW and SGD with one device, in float64. `fmegatron verify
verify_own_model:model` does the same on more layouts, in a table.
"""

import torch
from hypothesis import given, settings

import fmegatron as fm
from fmegatron.primitives import embedding, linear_cross_entropy, rms_norm
from fmegatron.testing import assert_equivalent, layouts

VOCAB, EMBED, MLP = 24, 12, 24


def spec():
    """Which parameters exist."""
    return {
        "embed": fm.Param((VOCAB, EMBED), "vocab embed", fm.normal(0.5), over="batch seq"),
        "norm": fm.Param((EMBED,), "embed", fm.ones(), over="batch seq*"),
        "up": fm.Param((EMBED, MLP), "embed mlp", over="batch seq"),
        "down": fm.Param((MLP, EMBED), "mlp embed", over="batch seq"),
    }


def loss(params, batch, ctx):
    """What they compute: the loss of each token that counts."""
    sh, p = ctx.sh, ctx.sh.use(params, spec())
    x = embedding(p["embed"], batch["tokens"], sh=sh, vocab_size=VOCAB)
    h = sh(rms_norm(x, p["norm"]), "batch seq* embed -> batch seq embed | mlp")
    h = torch.nn.functional.silu(sh.dot(h, p["up"], "batch seq embed, embed mlp -> batch seq mlp"))
    x = x + sh.dot(h, p["down"], "batch seq mlp, mlp embed -> batch seq* embed")
    equation = "batch seq embed, vocab embed -> batch seq vocab"
    h = sh(x, "batch seq* embed -> batch seq embed | vocab")
    each = linear_cross_entropy(h, p["embed"], batch["labels"], equation=equation, sh=sh, vocab_size=VOCAB)
    return fm.Term(each, "batch seq", weight=batch["labels"] >= 0), None


model = (spec, loss)


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(layout=layouts(model, 4))
def check(layout):
    print(assert_equivalent(model, layout))


if __name__ == "__main__":
    check()
