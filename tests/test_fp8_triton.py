"""The Triton kernels of fp8 against the same by torch's operations.

On a GPU to fp8; elsewhere, with Triton installed, by its interpreter (TRITON_INTERPRET=1 in the environment), which does not
round to fp8 as a GPU does, so that the kernels write float32.
"""

import importlib.util
import os

import pytest
import torch

from fmegatron.fp8 import kernels
from fmegatron.fp8.cast import scale_of

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not GPU
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (GPU or INTERPRETED),
    reason="needs Triton, and a GPU or TRITON_INTERPRET=1",
)
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2] if GPU else [torch.float32]
DEVICE = "cuda" if GPU else "cpu"


def same(a, b):
    assert a.dtype is b.dtype and a.shape == b.shape
    return torch.equal(a.float(), b.float())


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def x(request):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 384, generator=g) * torch.logspace(-6, 3, 384)
    x[7] = 0
    return (x if GPU else x * 1e9).to(DEVICE, request.param)  # (in the range that float32's scales keep)


def odd(x):
    return x[:160, :272].contiguous()


def test_largest_magnitudes(x):
    for m in (x, odd(x)):
        assert same(kernels.largest_of_all(m, "triton"), kernels.largest_of_all(m, "torch"))
        for rows, columns in ((True, True), (True, False), (False, True)):
            pairs = zip(*(kernels.largest(m, rows, columns, use) for use in ("triton", "torch")), strict=True)
            assert all(a is b is None or same(a, b) for a, b in pairs)


@pytest.mark.parametrize("dtype", FORMATS)
def test_casts_with_given_scales(x, dtype):
    lower = 1.0 if GPU else 2.0**-100
    for m in (x, odd(x)):
        one = scale_of(kernels.largest_of_all(m, "torch"), dtype) * lower * 4  # some saturate
        of_rows, of_columns = (
            scale_of(s.clamp(min=1e-9 if GPU else 1.0), dtype) * lower for s in kernels.largest(m, True, True, "torch")
        )
        for a, b in ((one, one), (of_rows, of_columns)):
            for straight, turned, note in ((True, True, True), (True, False, False), (False, True, True)):
                found = [
                    kernels.cast_scaled(m, a, b, dtype, straight, turned, note, use) for use in ("triton", "torch")
                ]
                assert all(p is q is None or same(p, q) for p, q in zip(*found, strict=True))


@pytest.mark.parametrize("tile", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
def test_casts_in_blocks(x, dtype, tile):
    x = x.masked_fill(x == 0, 1.0) if not GPU else x
    lower = 0.5 if GPU else 2.0**-100
    for straight, turned in ((True, True), (True, False), (False, True)):
        got, want = (kernels.cast_blocks(x, dtype, tile, straight, turned, lower, use) for use in ("triton", "torch"))
        for a, b in zip(got, want, strict=True):
            assert a is b is None or all(same(p, q) for p, q in zip(a, b, strict=True))
            assert a is None or a[1].stride() == kernels.laid_out(b[1], b[0]).stride()
