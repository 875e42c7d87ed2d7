"""`fmegatron train` with sizes that do not divide by the mesh: the same losses, on every mesh, over a resume and in an
export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fmegatron import cli, job
from fmegatron.errors import UserError
from fmegatron.models import PRESETS, load_hf
from fmegatron.primitives.rotary import DynamicNTKScaling
from fmegatron.tree import leaves
from tests.test_train import on
from tests.train_runs import flags, go, losses, write_corpus

torch.set_num_threads(1)

# 5 rows, 15 tokens, a vocabulary of 301 and an mlp of 37 on meshes whose axes are even
ODD = ("--model-overrides.layers", "1", "--model-overrides.vocab", "301", "--model-overrides.mlp", "37")
ODD += ("--batch.size", "5", "--batch.seq-len", "15")
STEPS = {"steps": 6, "precision_params": "float64", "dropout": 0.2, "eval_every": 3}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.jsonl")


def test_losses_resume_and_export_on_meshes_that_do_not_divide(tmp_path, corpus):
    one, first, second = tmp_path / "one", tmp_path / "run", tmp_path / "run"
    assert go(flags(corpus, one, *ODD, **STEPS)) == 0
    mesh = ("--mesh", "dp=2,tp=2", "--sp", "--store", "dp", "--batch.microbatches", "2")
    assert on(4, flags(corpus, first, *ODD, *mesh, **{**STEPS, "steps": 3})) == 0
    assert (
        on(4, flags(corpus, second, *ODD, "--mesh", "cp=2,tp=2", "--store", "cp", "--cp", "ring", "--resume", **STEPS))
        == 0
    )
    torch.testing.assert_close(losses(second), losses(one), rtol=1e-9, atol=0)
    exported = []
    for run in (one, second):
        assert (
            cli.main(["export", "--checkpoint", str(run), "--to", "hf", "--out", str(tmp_path / f"hf-{run.name}")]) == 0
        )
        exported.append(load_hf(tmp_path / f"hf-{run.name}")[1])
    for a, b in zip(leaves(exported[0]), leaves(exported[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_what_is_still_refused():
    config = cli.parse_train([*ODD, "--nproc", "4", "--mesh", "dp=4", "--batch.size", "3"])
    with pytest.raises(UserError, match="--batch.size 3 does not divide by 4"):
        job.make_setup(config, torch.device("cpu"), 4, check_only=True)
    config = cli.parse_train([*ODD, "--nproc", "4", "--mesh", "cp=4"])
    by_length = replace(PRESETS["tiny"], rope_scaling=DynamicNTKScaling(2.0, 8))
    with pytest.raises(UserError, match="--batch.seq-len 15 does not divide by 8"):
        job.make_setup(config, torch.device("cpu"), 4, sizes=by_length, check_only=True)
