"""Training learns what transformers with torch.optim learns: the same losses, the same weights (see learning.py)."""

import pytest
import torch

from tests.learning import compare, picture

FAMILIES = ["llama", "gpt2"]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_losses_and_weights_in_float64(family, steps):
    found = compare(family, steps)
    assert found.loss < 1e-8 and found.norm < 1e-8 and found.weights < 1e-8
    assert any(norm > 1.0 for norm in found.their_norms)  # so that clipping acts
    assert found.ours[-1] < found.ours[0] - (2.0 if steps == 300 else 0.3)  # it learns
    assert "transformers" in picture({family: found})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [20, pytest.param(50, marks=pytest.mark.slow)])
def test_losses_in_float32(family, steps):
    assert compare(family, steps, torch.float32).loss < 1e-4
