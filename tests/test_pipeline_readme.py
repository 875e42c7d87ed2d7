"""The README's lines about pipelines, run as they stand there, on four processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fmegatron as fm
from fmegatron.models import Decoder
from fmegatron.testing.models import small_config
from tests.processes import processes
from tests.test_pipeline import whole

README = Path(__file__).parent.parent / "README.md"
UPDATE = "params, _, opt = optimizer.update("


def lines() -> str:
    """The block of the README that makes a pipeline."""
    blocks = [b.split("```")[0] for b in README.read_text().split("```python\n")[1:]]
    (found,) = [b for b in blocks if "fm.pipeline(" in b]
    assert found.count(UPDATE) == 1
    return found


def given() -> dict[str, Any]:
    """What the lines take as known."""
    model = Decoder(small_config("llama", layers=4, heads=4, kv_heads=2))
    tokens = torch.randint(0, 48, (2, 8, 6), generator=torch.Generator().manual_seed(0))
    optimizer = fm.optim.chain(fm.optim.clip_by_global_norm(0.5), fm.optim.adamw(1e-2))
    return {"fm": fm, "model": model, "optimizer": optimizer, "batch": {"tokens": tokens[0], "labels": tokens[1]}}


def as_written(text: str) -> tuple[Any, ...]:
    """On one rank: (loss, gradients, parameters behind the update, sums of the evaluation)."""
    known = given()
    rules = fm.standard_rules(fm.make_mesh("pp=2,tp=2", device="cpu"))
    before, after = text.split(UPDATE)
    exec(before, known | {"rules": rules}, known)
    opt = known["optimizer"].init(known["params"])
    grads = whole(known["grads"])
    exec(UPDATE + after, known | {"rules": rules, "opt": opt}, known)
    return known["loss"], grads, whole(known["params"]), known["sums"]


def test_the_lines_of_the_readme_do_what_one_device_does() -> None:
    known, sh = given(), fm.Sharding()
    model, optimizer = known["model"], known["optimizer"]
    params = fm.init(model.spec(), fm.key(0), sh=sh)
    gradients = fm.accumulate(model.loss, weights=model.weights)
    (loss, _), grads = gradients(params, known["batch"], fm.Ctx(sh=sh))
    new, *_ = optimizer.update(params, grads, optimizer.init(params))
    total, weight = fm.evaluate(model.loss, weights=model.weights, sh=sh)(new, known["batch"])["lm"]
    want, after = whole(grads), whole(new)
    for got, own, updated, sums in processes(4).run(as_written, lines()):
        torch.testing.assert_close(got, loss)
        assert own and all(torch.allclose(g, want[n], rtol=1e-4, atol=1e-6) for n, g in own.items())
        assert all(torch.allclose(p, after[n], rtol=1e-3, atol=1e-4) for n, p in updated.items())
        torch.testing.assert_close(sums["lm"][0], total, rtol=1e-4, atol=0)
        assert sums["lm"][1] == weight
