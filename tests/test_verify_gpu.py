"""Layouts on one GPU: simulated ranks against one device in float64, and which fused kernels the ranks run."""

import dataclasses

import pytest
import torch

from fmegatron.precision import Precision
from fmegatron.testing.engines import run_on
from fmegatron.testing.equivalence import compare
from fmegatron.testing.layout import Layout
from fmegatron.testing.models import small_model
from fmegatron.testing.program import program_of
from fmegatron.testing.running import Job, inputs_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FLASH = "aten::_flash_attention_forward"
CUDNN = "aten::_scaled_dot_product_cudnn_attention"


@pytest.mark.parametrize(
    ("layout", "kernels"),
    [
        ("dp=2,cp=2,tp=2 sp zero=3 packed", [FLASH]),
        ("cp=2,tp=2 sp context=ring seq=2048", [FLASH, CUDNN]),
        ("dp=2,cp=2 zero=1 context=ulysses micro=2 seq=512", [CUDNN]),
    ],
)
def test_fused_kernels_on_simulated_ranks(layout, kernels):
    model = small_model("llama", heads=8, kv_heads=2, head=64)
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, max_seq=2048))
    result = compare(model, layout, dtype="bfloat16", device="cuda", checks=("gradients", "adamw"))
    assert result.ok, str(result)
    program, job = program_of(model), Job(("gradients",), Precision(compute=torch.bfloat16), steps=1)
    inputs = inputs_of(program, Layout.parse(layout), job)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run_on("simulated", program, Layout.parse(layout), job, inputs, device="cuda")
    ran = {e.key for e in profile.key_averages()}
    for kernel in (*kernels, "aten::_fused_adamw_", "aten::_fused_rms_norm"):
        assert kernel in ran, (kernel, sorted(n for n in ran if "attention" in n or "fused" in n))


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen3"])
def test_other_families_in_float64(family):
    result = compare(small_model(family), "cp=2,tp=2 sp zero=3 context=ring packed", device="cuda", checks=("sgd",))
    assert result.ok, str(result)
