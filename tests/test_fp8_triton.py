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
from fmegatron.fp8.grouped_kernels import largest_of_groups, places

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


@pytest.mark.parametrize("dtype", FORMATS[:1])
def test_casts_of_groups(x, dtype):
    """Rows, matrices and groups, some without rows."""
    triton_grouped = pytest.importorskip("fmegatron.fp8.triton_grouped")
    x = x if GPU else x.masked_fill(x == 0, 1.0) * 1e12  # (in the range that float32's scales keep)

    def cast(m, by):
        of = scale_of(m.abs().amax(by).float(), dtype) * 0.5
        return kernels.narrow(m, of.unsqueeze(by), dtype), 1 / of

    for m in (x, odd(x)):
        ends = torch.tensor([0, 40, 173, 173, len(m) - 3], dtype=torch.int32, device=DEVICE).clamp(max=len(m) - 3)
        assert all(same(a, b) for a, b in zip(triton_grouped.cast_rows(m, 0.5, dtype), cast(m, 1), strict=True))
        sizes, room = triton_grouped.largest_of_groups(m, ends), places(len(m), len(ends))
        assert same(sizes, largest_of_groups(m, ends, False))
        scale = scale_of(sizes.clamp(min=0 if GPU else 1), dtype) * 0.5
        data, padded = triton_grouped.cast_groups(m, ends, scale, room, dtype)
        start = place = 0
        for end, behind in zip(ends.tolist(), padded.tolist(), strict=True):
            assert behind - place == max(16, -(-(end - start) // 16) * 16)
            assert (data[:, place + end - start : behind].float() == 0).all()
            if end > start:
                assert same(data[:, place : place + end - start], cast(m[start:end], 0)[0].t())
            start, place = end, behind
        w = m.view(4, -1, m.shape[1])
        sizes = triton_grouped.largest_of_columns(w)
        assert same(sizes, w.abs().amax(1).float())
        data = triton_grouped.cast_columns(w, scale_of(sizes, dtype) * 0.5, dtype)
        assert all(same(data[n], cast(w[n], 0)[0].t()) for n in range(4))
