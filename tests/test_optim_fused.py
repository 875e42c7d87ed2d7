"""One pass of AdamW: clipping, moments, parameters and their narrow copies, against torch and against the passes apart.

The Triton kernel itself runs on a GPU, and on a CPU in a process with TRITON_INTERPRET=1 where triton is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from fmegatron import kernels, tree
from fmegatron.errors import UserError
from fmegatron.optim import (
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    ema,
    fused,
    sgd,
    with_master,
    with_stochastic_rounding,
)
from fmegatron.optim import apply as passes
from fmegatron.optim.rounding import stochastic
from fmegatron.random import bits, fold_in, key
from fmegatron.simulation import simulate
from tests.optim_trees import Count, close, made, ours, placed, same, same_on_ranks, simulated_mesh

torch.set_num_threads(1)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("make", [adamw, adam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_clip_is_that_of_a_piece_in_front(dtype, make, max_norm, donate, monkeypatch):
    """Bitwise but in bfloat16, where the product with the factor is no longer rounded, and where leaves are cut at other
    places than torch's vectors."""
    params, gradients = made(0, dtype), [made(i, dtype) for i in range(1, 4)]
    apart = chain(clip_by_global_norm(max_norm), make(0.02))
    for piece in (1 << 24, 7):
        monkeypatch.setattr(passes, "SCALED_PIECE", piece)
        got, state = ours(make(0.02, clip=max_norm), params, gradients, donate)
        want, before = ours(apart, params, gradients, donate)
        if dtype == torch.bfloat16:
            close((got, state["v"]), (want, before[make.__name__]["v"]), 1e-2)
        elif piece == 7:
            close((got, state), (want, before[make.__name__]), 1e-6)
        else:
            same((got, state), (want, before[make.__name__]))


def test_gradients_come_back_as_they_were():
    params, grads = made(0), made(1)
    optimizer = adamw(0.1, clip=0.1)
    before = tree.tree_map(torch.clone, grads)
    _, after, _ = optimizer.update(params, grads, optimizer.init(params), donate=True)
    same((after, grads), (before, before))


def test_a_clipped_update_is_equal_to_torch():
    params, gradients = made(0, torch.float64), [made(i, torch.float64) for i in range(1, 5)]
    leaves = [torch.nn.Parameter(p.clone()) for p in tree.leaves(params)]
    theirs = torch.optim.AdamW(leaves, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    for grads in gradients:
        for p, g in zip(leaves, tree.leaves(grads), strict=True):
            p.grad = g.clone()
        torch.nn.utils.clip_grad_norm_(leaves, 0.7)
        theirs.step()
    got, _ = ours(adamw(0.02, clip=0.7), params, gradients)
    close(got, tree.like(params, [p.detach() for p in leaves]), 1e-14)


def test_gradients_are_scaled_a_piece_at_a_time(monkeypatch):
    monkeypatch.setattr(passes, "SCALED_PIECE", 64)
    params = {"a": torch.randn(40, 50), "b": torch.randn(30), "c": torch.randn(30)}
    optimizer = adamw(0.1, clip=0.1)
    state, grads = optimizer.init(params), tree.tree_map(torch.randn_like, params)
    with Count() as count:
        optimizer.update(params, grads, state, donate=True)
    assert count.largest <= 64
    optimizer, loose = adamw(0.1, clip=1e9), Count()
    with loose:  # nothing to clip: no product at all
        optimizer.update(params, grads, state, donate=True)
    assert "aten._foreach_mul" not in loose.calls


@pytest.mark.parametrize("donate", [True, False])
def test_a_master_copy_is_rounded_in_the_same_update(donate):
    """As by a pass of its own: what a piece that cannot write copies makes `with_master` do."""
    params = made(0, torch.bfloat16) | {"frozen": torch.randn(3).bfloat16(), "wide": torch.randn(4)}
    gradients = [made(i) | {"frozen": None, "wide": torch.randn(4)} for i in range(1, 4)]
    one, apart = chain(adamw(0.02), ema(0.9)), chain(adamw(0.02), ema(0.9), sgd(0.0))
    assert one.casts and not apart.casts
    got, state = ours(with_master(one), params, gradients, donate)
    want, before = ours(with_master(apart), params, gradients, donate)
    same((got, state["master"], state["ema"]), (want, before["master"], before["ema"]))


def test_a_clipped_update_on_a_mesh():
    params, grads = made(0, torch.bfloat16), made(1)
    places = tree.tree_map(lambda p: (Shard(0) if p.ndim else Replicate(), Replicate()), params)
    with simulate(4):
        mesh = simulated_mesh(2, 2)
        p, g = placed(params, mesh, places), placed(grads, mesh, places)
        optimizer = with_master(adamw(0.1, clip=0.5))
        got, _, state = optimizer.update(p, g, optimizer.init(p))
        want, _, wide = (o := with_master(adamw(0.1, clip=0.5))).update(params, grads, o.init(params))
        same_on_ranks(got, placed(want, mesh, places), 1e-2)
        same_on_ranks(state["master"], placed(wide["master"], mesh, places), 1e-6)


def test_errors():
    with pytest.raises(UserError, match="clip=0.0"):
        adamw(0.1, clip=0.0)
    with pytest.raises(UserError, match="kernel='cuda'"):
        adamw(0.1, kernel="cuda")


# The kernel. sizes: one block and a part, a few elements, none at all, whole blocks, and one that torch's kernel takes.
SIZES = {"a": (70, 130), "b": (5,), "none": (0, 3), "whole": (4096, 2), "scale": ()}
KINDS = {
    "fp32": (torch.float32, torch.float32, {}),
    "bf16 moments": (torch.float32, torch.bfloat16, {"moments": torch.bfloat16}),
    "unclipped": (torch.float32, torch.float32, {"clip": None}),
}
interpreted = pytest.mark.skipif(not kernels.INTERPRETED, reason="TRITON_INTERPRET is not set")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
on_each = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])],
)


def updated(kernel, device, optimizer=adamw, dtype=torch.float32, grads=torch.float32, wrap=lambda o: o, **options):
    options = {"weight_decay": {"a": 0.1, "b": 0.0, "none": 0.1, "whole": 0.1, "scale": 0.0}, "clip": 0.3, **options}
    params = made(0, dtype, SIZES, device)
    gradients = [made(i, grads, SIZES, device) for i in range(1, 4)]
    return ours(wrap(optimizer(lambda n: 0.01 * (n + 1), kernel=kernel, **options)), params, gradients, donate=True)


@on_each
@pytest.mark.parametrize("optimizer", [adamw, adam])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_is_torch_s(kind, optimizer, device):
    dtype, grads, options = KINDS[kind]
    got = updated("triton", device, optimizer, dtype, grads, **options)
    want = updated("torch", device, optimizer, dtype, grads, **options)
    # (the interpreter rounds to bfloat16 towards zero)
    close(got, want, 2e-2 if "moments" in options else 1e-6)


@on_each
def test_the_kernel_writes_narrow_copies(device):
    got = updated("triton", device, dtype=torch.bfloat16, wrap=with_master)
    want = updated("torch", device, dtype=torch.bfloat16, wrap=with_master)
    close(got[1], want[1], 1e-6)
    close(got[0], want[0], 1e-2)


@on_each
def test_the_kernel_rounds_by_the_library_s_bits(device):
    """Bitwise: what the kernel computes in float32, rounded by `stochastic` with the bits of the leaf."""
    params, grads = made(0, torch.bfloat16, SIZES, device), made(1, torch.float32, SIZES, device)
    wide = tree.tree_map(lambda p: p.float(), params)
    optimizer = adamw(0.1, kernel="triton")
    exact, _, moments = optimizer.update(wide, grads, optimizer.init(wide))
    rounded = with_stochastic_rounding(adamw(0.1, kernel="triton", moments=torch.bfloat16), 3)
    got, _, state = rounded.update(params, grads, rounded.init(params))
    root = fold_in(key(3), 0)
    for name, found in (("params", got), ("m", state["m"]), ("v", state["v"])):
        for path, x in tree.named(found).items():
            value = tree.named(exact if name == "params" else moments[name])[path]
            drawn = bits(fold_in(root, f"{path}:{name}"), x.shape, device=device)
            assert x.dtype == torch.bfloat16 and torch.equal(x, stochastic(value, drawn)), (name, path)


@on_each
def test_leaves_that_the_kernel_cannot_take(device):
    """Strided, and beginning at an odd address; beside one that it takes."""
    base = torch.randn(65, generator=torch.Generator().manual_seed(0)).to(device)

    def leaves():
        return {"odd": base.clone()[1:], "strided": base.clone()[:64].view(8, 8).t(), "plain": base.clone()}

    grads = tree.tree_map(lambda t: torch.ones_like(t) * 0.1, leaves())
    results = []
    for kernel in ("triton", "torch"):
        optimizer, params = adamw(0.1, kernel=kernel), leaves()
        results.append(optimizer.update(params, grads, optimizer.init(params))[0])
    close(*results, 1e-6)


@on_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_the_norm_is_the_sum_of_squares(device, dtype):
    """One larger than a program's block, one of odd size, an empty one; one at an odd address is left."""
    group = [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(device, dtype) for n in (70001, 33, 0, 4096)]
    group.append(group[0][1:])
    sums, left = fused.squares_pass(group, kernel="triton")
    assert [x.numel() for x in left] == [0, 70000]
    want = sum(x.double().square().sum() for x in group[:-1])
    torch.testing.assert_close(sums[0].double(), want, rtol=1e-6, atol=0)
    assert fused.squares_pass(group) == ([], group)  # too few for it to be worth a table


@pytest.mark.skipif(importlib.util.find_spec("triton") is None or kernels.INTERPRETED, reason="no triton to interpret")
def test_the_kernel_by_triton_s_interpreter():
    """The tests of the kernel above, on a CPU in a process of its own, as triton must be told before it is imported."""
    root = Path(__file__).parent.parent
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    run = [
        sys.executable,
        "-m",
        "pytest",
        __file__,
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "kernel and not cuda",
        "-n",
        "0",
    ]
    done = subprocess.run(run, env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.gpu
@needs_cuda
def test_cuda_takes_the_kernel_by_itself(monkeypatch):
    taken = []
    pass_ = fused.adam_pass
    module = importlib.import_module("fmegatron.optim.adam")  # the package has a function of this name
    monkeypatch.setattr(module, "adam_pass", lambda *a, **k: taken.append(pass_(*a, **k)) or taken[-1])
    got = updated("auto", "cuda")
    close(got, updated("torch", "cuda"), 1e-6)
    assert taken[0] == [2]  # only the empty leaf is left to torch


@pytest.mark.gpu
@needs_cuda
def test_an_update_does_not_wait_for_the_host():
    params, grads = made(0, torch.bfloat16, SIZES, "cuda"), made(1, torch.float32, SIZES, "cuda")
    optimizer = with_master(adamw(0.1, clip=0.5))
    state = optimizer.init(params)
    params, _, state = optimizer.update(params, grads, state, donate=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.update(params, grads, state, donate=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
