"""Generation with guesses of the prediction module: the same text, the same distribution, and guesses that are the module's."""

from __future__ import annotations

import pytest
import torch

from fmegatron import cli, speculate
from fmegatron.context import Ctx
from fmegatron.drawing import draw
from fmegatron.errors import UserError
from fmegatron.generate import generate_tokens
from fmegatron.models import Decoder, DecoderConfig, drafting, mtp
from fmegatron.models.moe import MoE
from fmegatron.parallel.routing import Routing
from fmegatron.random import key
from fmegatron.sharding import Sharding
from fmegatron.spec import init
from fmegatron.speculate import Guesses, decided
from fmegatron.testing.models import small_model
from tests.train_runs import flags, go, write_corpus

torch.set_num_threads(1)
SMALL = DecoderConfig(vocab=5, embed=16, layers=2, heads=4, kv_heads=2, mlp=32, init_std=0.3, mtp=1)
PROMPTS = [[1, 4, 3], [2], [1, 2, 3, 4, 0, 1, 2, 2, 1], [4, 4]]
MODELS = {
    "dense": Decoder(SMALL),
    "latent attention, experts": small_model("deepseek_v3", vocab=5, mtp=1),
}


def drawn(model):
    params = init(model.spec(), key(3))
    g = torch.Generator().manual_seed(1)  # larger than at the beginning of training, so that tokens differ
    return {
        n: x if not isinstance(x, torch.Tensor) else x + 0.3 * torch.randn(x.shape, generator=g)
        for n, x in params.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_greedy_output_is_the_same_in_fewer_passes(name, monkeypatch):
    """For prompts of unequal length in one batch and alone, with guesses that are kept and others that are not."""
    model, total = MODELS[name], Guesses()
    params, passes = drawn(model), []
    monkeypatch.setattr(speculate, "read", lambda *args, **more: (passes.append(1), drafting.read(*args, **more))[1])
    for prompts in (PROMPTS, *([p] for p in PROMPTS)):
        for tokens in (1, 2, 13):
            guesses = Guesses()
            passes.clear()
            found = generate_tokens(model, params, prompts, tokens=tokens, guesses=guesses)
            assert found == generate_tokens(model, params, prompts, tokens=tokens)
            if len(prompts) == 1:
                assert tokens - guesses.kept <= len(passes) <= tokens - guesses.kept + 1
            total.made, total.kept = total.made + guesses.made, total.kept + guesses.kept
    assert 0 < total.kept < total.made and f"{total.kept} of {total.made}" in str(total)


@pytest.mark.parametrize("name", MODELS)
def test_guesses_are_those_of_the_module_without_a_cache(name, monkeypatch):
    model, seen = MODELS[name], []
    params, sh = drawn(model), Sharding()

    def noted(model, params, further, states, cache, start, **inputs):
        logits = drafting.drafted(model, params, further, states, cache, start, **inputs)
        seen.append((start + further.shape[1], logits[0]))
        return logits

    monkeypatch.setattr(speculate, "drafted", noted)
    (new,) = generate_tokens(model, params, PROMPTS[:1], tokens=12, guesses=Guesses())
    tokens = torch.tensor([[*PROMPTS[0], *new]])
    batch = {"tokens": tokens, "labels": tokens}
    ctx = model.context(batch, Ctx(sh=sh))
    used = model.head_parameters(params, ctx, embedding=True)
    x = model._stream(model.stack(params["layers"], model.embed(params, batch, ctx), ctx))
    found = mtp.further(batch, 1, sh)
    states, _ = model._predicted(params["mtp"], used, model._norm(used, "norm", x), found, ctx)
    want = model.logits_of(used, states[0], ctx)[0]
    assert len(seen) > 3
    for end, logits in seen:
        torch.testing.assert_close(logits, want[end - 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 4, "top_p": 0.9}])
def test_what_is_decided_has_the_distribution_of_a_draw(options):
    """Of many rows with one p and one q; kept are as many as p and q have in common."""
    rows, n = 40_000, 5
    logits, guessed = (torch.randn(1, n, generator=torch.Generator().manual_seed(s)).expand(rows, n) for s in (0, 1))
    guess = draw(guessed, key(0), **options)
    kept, token = decided(logits, guessed, guess, key(1), **options)
    plain = draw(logits, key(2), **options)
    p, q, found = (torch.bincount(x, minlength=n).double() / rows for x in (plain, guess, token))
    assert (found - p).abs().max() < 4 * (2 * 0.25 / rows) ** 0.5 and (p - q).abs().max() > 0.1
    assert abs(kept.double().mean() - torch.minimum(p, q).sum()) < 0.02
    assert ((found > 0) == (p > 0)).all()


def test_drawn_text_is_a_function_of_the_seed():
    model = MODELS["dense"]
    params = drawn(model)
    a, b, c = (
        generate_tokens(model, params, PROMPTS, tokens=9, temperature=1.0, seed=s, guesses=Guesses()) for s in (1, 1, 2)
    )
    assert a == b != c and all(len(row) == 9 for row in a)


def test_rows_end_each_at_its_end():
    model = MODELS["dense"]
    params = drawn(model)
    whole = generate_tokens(model, params, PROMPTS, tokens=13)
    end = whole[0][5]
    found = generate_tokens(model, params, PROMPTS, tokens=13, eod=end, guesses=Guesses())
    assert found == generate_tokens(model, params, PROMPTS, tokens=13, eod=end)


def test_a_model_that_cannot_guess_is_refused():
    def refused(model, message):
        with pytest.raises(UserError, match=message):
            generate_tokens(model, {}, PROMPTS, tokens=2, guesses=Guesses())

    refused(Decoder(DecoderConfig(vocab=5, embed=16, layers=1, heads=2, mlp=8)), "needs a prediction module")
    moe = MoE(Routing(4, 2, capacity=1.0), 8)
    refused(Decoder(DecoderConfig(vocab=5, embed=16, layers=1, heads=2, mlp=8, mtp=1, moe=moe)), "depend on the others")
    refused(object(), "leave --mesh out")


def test_the_flag(tmp_path, capsys):
    data = write_corpus(tmp_path / "text.jsonl")
    assert go(flags(data, tmp_path / "run", steps=2, mtp=1)) == 0
    capsys.readouterr()
    texts = []
    for more in ([], ["--speculate"]):
        asked = ["--checkpoint", str(tmp_path / "run"), "--prompt", "def ", "--tokens", "8", "--temperature", "0"]
        assert cli.main(["generate", *asked, *more]) == 0
        texts.append(capsys.readouterr())
    assert texts[0].out == texts[1].out and "guessed tokens were kept" in texts[1].err and not texts[0].err
