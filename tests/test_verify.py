"""`fmegatron verify` says what its way to run the ranks does not show."""

import pytest
import torch

from fmegatron.verify import main


@pytest.mark.parametrize(("engine", "says"), [("simulated", "real processes"), ("processes", "GPUs and NCCL")])
def test_what_is_not_covered(engine, says, capsys):
    assert main(["gpt2", "--layout", "dp=1", "--engine", engine]) == 0
    *_, told, last = capsys.readouterr().out.splitlines()
    assert "on cpu in float64; not covered: " in told and says in told and last.startswith("equal to one device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_gpu_that_is_not_there(capsys):
    assert main(["gpt2", "--layout", "dp=1", "--device", "cuda"]) == 2
    assert "--device cuda: torch sees no GPU" in capsys.readouterr().err
