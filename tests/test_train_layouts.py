"""One training on several meshes: the same losses, and what each rank holds divided as the mesh says."""

from __future__ import annotations

import functools
import math
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fmegatron import checkpoint, cli, job, tree
from fmegatron.spec import local_bytes, params_of
from tests.processes import processes
from tests.test_train import on, start
from tests.train_runs import flags, go, losses, write_corpus

torch.set_num_threads(1)

DP_TP = ("--mesh", "dp=2,tp=2")
LAYOUTS = {
    "dp=2,tp=2": DP_TP,
    "sp": (*DP_TP, "--sp"),
    "store dp": (*DP_TP, "--store", "dp"),
    "sp and store dp": (*DP_TP, "--sp", "--store", "dp"),
    "tp=4, more than kv heads": ("--mesh", "tp=4", "--sp"),
    "dp=4 stored": ("--mesh", "dp=4", "--store", "dp"),
    "cp=2,tp=2": ("--mesh", "cp=2,tp=2", "--sp"),
    "zero 1, ring": ("--mesh", "dp=2,cp=2", "--zero", "1", "--cp", "ring"),
    "zero 2, ulysses": ("--mesh", "dp=2,cp=2", "--zero", "2", "--cp", "ulysses"),
}
SLOW = (
    "store dp",
    "dp=4 stored",
    "sp",
    "cp=2,tp=2",
    "zero 2, ulysses",
)  # covered by the others, or by the tests of transforms
ONE = ("--model-overrides.layers", "1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.jsonl")


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory):
    """reference(dtype): losses of 20 steps on one process."""

    @functools.cache
    def run(dtype: str) -> list[float]:
        out = tmp_path_factory.mktemp("one") / "run"
        assert go(flags(corpus, out, *ONE, steps=20, precision_params=dtype)) == 0
        return losses(out)

    return run


@pytest.mark.parametrize("layout", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in LAYOUTS])
def test_twenty_steps_equal_those_of_one_process_in_float64(tmp_path, corpus, reference, layout) -> None:
    out = tmp_path / "run"
    assert on(4, flags(corpus, out, *LAYOUTS[layout], *ONE, steps=20, precision_params="float64")) == 0
    assert len(losses(out)) == 20
    torch.testing.assert_close(losses(out), reference("float64"), rtol=1e-8, atol=0)


def test_twenty_steps_equal_those_of_one_process_in_float32(tmp_path, corpus, reference) -> None:
    out = tmp_path / "run"
    assert on(4, flags(corpus, out, *LAYOUTS["sp and store dp"], *ONE, steps=20)) == 0
    torch.testing.assert_close(losses(out), reference("float32"), rtol=1e-4, atol=0)


def test_gradients_that_travel_in_bfloat16_train_alike(tmp_path, corpus, reference) -> None:
    """Each step's gradients are off by a rounding of each rank's, also in a run that goes on."""
    out = tmp_path / "run"
    given = (*ONE, "--mesh", "dp=2", "--zero", "1", "--precision.wire", "bfloat16")
    assert on(2, flags(corpus, out, *given, steps=20), (8, "SIGTERM")) == 0
    assert on(2, ["--out", str(out), "--resume"]) == 0
    found, want = losses(out), reference("float32")
    torch.testing.assert_close(found, want, rtol=2e-3, atol=0)
    assert found[0] == pytest.approx(want[0], rel=1e-6)
    assert 'wire = "bfloat16"' in (out / "config.toml").read_text()
    assert max(abs(a / b - 1) for a, b in zip(found[1:], want[1:], strict=True)) > 1e-6


def test_microbatches_change_nothing_with_dropout(tmp_path, corpus) -> None:
    """One, two and four of them on one process, and two on a mesh of four: in float64 the same run."""
    common = dict(steps=4, dropout=0.2, precision_params="float64")
    found = []
    for n, mesh in ((1, ()), (2, ()), (4, ()), (2, LAYOUTS["sp and store dp"])):
        out = tmp_path / f"run{len(found)}"
        assert on(4 if mesh else 1, flags(corpus, out, *mesh, *ONE, batch_microbatches=n, **common)) == 0
        found.append(losses(out))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-10, atol=0)
    without = tmp_path / "without"
    assert go(flags(corpus, without, *ONE, **{**common, "dropout": 0.0})) == 0
    assert abs(losses(without)[0] / found[0][0] - 1) > 1e-6  # dropout does something


# ranks, mesh, and the step behind which the run is stopped: then it goes on as the next one
ONWARD = [
    (4, ("--mesh", "dp=2,tp=2", "--sp", "--store", "dp", "--zero", "3"), 3),
    (2, ("--mesh", "dp=2", "--no-sp", "--store", "--zero", "None"), 7),  # data parallel alone
    (4, ("--mesh", "dp=4", "--store", "dp", "--zero", "1"), 9),
    (4, ("--mesh", "dp=2,tp=2", "--sp", "--store", "dp", "--zero", "3"), 12),
    (4, ("--mesh", "dp=2,fsdp=2", "--no-sp", "--store", "fsdp", "--zero", "3"), 14),  # hybrid
    (2, ("--mesh", "dp=2", "--store", "--zero", "None"), 17),
]


@pytest.mark.parametrize("legs", [2, pytest.param(len(ONWARD), marks=pytest.mark.slow)])
def test_checkpoints_go_on_under_other_stages_and_meshes(tmp_path, corpus, reference, legs) -> None:
    """ZeRO-3 with TP, then DP alone on half of the ranks for several steps, ZeRO-1, ZeRO-3 with TP again, HSDP and DP:
    the losses of one process in float64."""
    out = tmp_path / "run"
    arguments = flags(corpus, out, *ONE, steps=20, precision_params="float64")
    for n, (world, mesh, stop) in enumerate(ONWARD[:legs]):
        given = [*(["--out", str(out), "--resume"] if n else arguments), *mesh]
        assert on(world, given, (stop, "SIGTERM")) == 0
        assert checkpoint.latest(out).name == f"step_{stop:08}"
    assert len(losses(out)) == ONWARD[legs - 1][2]
    torch.testing.assert_close(losses(out), reference("float64")[: len(losses(out))], rtol=1e-10, atol=0)


# with 3 kv heads where the family has them, so that tp=2 divides the group and not the kv heads
FAMILIES = {
    "gpt2-tiny": ("--model-overrides.kv-heads", "6"),
    "llama3.2-1b": (),
    "mistral-7b-v0.1": ("--model-overrides.window", "5"),
    "qwen2.5-0.5b": (),
    "qwen3-0.6b": (),
    "gemma2-2b": ("--model-overrides.window", "5"),
    "gemma3-1b": ("--model-overrides.window", "5", "--model-overrides.layers", "6"),
    "phi3-mini": ("--model-overrides.window", "5"),
    "olmo2-1b": (),
}


@pytest.mark.parametrize(
    "family", [pytest.param(n, marks=pytest.mark.slow if n != "gpt2-tiny" else ()) for n in FAMILIES]
)
def test_every_family_on_a_mesh_equals_one_process(tmp_path, corpus, family) -> None:
    """Tensor and sequence parallel, and stored over the data ranks, in float64."""
    sizes = ("--model-overrides.heads", "6", "--model-overrides.kv-heads", "3", "--model-overrides.vocab", "320")
    given = ("--model", family, *ONE, *sizes, "--model-overrides.init-std", "0.1", *FAMILIES[family])
    found = []
    for world, mesh in ((1, ()), (4, LAYOUTS["sp and store dp"])):
        out = tmp_path / str(world)
        assert on(world, flags(corpus, out, *given, *mesh, steps=4, precision_params="float64")) == 0
        found.append(losses(out))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fmegatron train --nproc 4", "torchrun"])
def test_twenty_steps_of_the_true_commands(tmp_path, corpus, reference, command) -> None:
    """Each starts four processes; only the first prints."""
    out = tmp_path / "run"
    arguments = ["train", *flags(corpus, out, *DP_TP, *ONE, steps=20)]
    if command == "torchrun":
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m", "fmegatron"]
    else:
        launcher, arguments = ["fmegatron"], [*arguments, "--nproc", "4"]
    process = start(*launcher, *arguments, cwd=tmp_path)
    printed, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert command == "torchrun" or errors == ""
    assert printed == (out / "log.txt").read_text() and printed.count("validation loss       ") == 1
    torch.testing.assert_close(losses(out), reference("float32"), rtol=1e-4, atol=0)


# ------------------------------------------------------------------------------------------------------ what a rank holds


def parts(arguments: list[str]) -> tuple[job.Run, job.Batches]:
    config = cli.parse_train(arguments)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    setup = job.make_setup(config, torch.device("cpu"), world)
    return job.make_run(config, job.model_config(config, None), setup), job.Batches(config, setup)


def held(arguments: list[str]) -> dict[str, object]:
    """Bytes that this rank holds of parameters and moments, by name, and the rows and columns of its batch."""
    run, batches = parts(arguments)
    state = job.initial_state(cli.parse_train(arguments), run)
    params = {name: local_bytes(leaf) for name, leaf in tree.named(state.params).items()}
    opt = sum(local_bytes(leaf) for leaf in tree.leaves(state.opt) if isinstance(leaf, torch.Tensor))
    columns = 16 if batches.columns is None else len(batches.columns)
    return {"params": params, "opt": opt, "batch": (len(batches.rows), columns), "first row": int(batches.rows[0])}


@pytest.mark.parametrize(
    ("mesh", "on_tp", "stored", "batch", "firsts"),
    [
        (DP_TP, 2, 1, (4, 16), [0, 0, 4, 4]),
        ((*DP_TP, "--sp", "--store", "dp"), 2, 2, (4, 16), [0, 0, 4, 4]),
        (("--mesh", "dp=4", "--store", "dp"), 1, 4, (2, 16), [0, 2, 4, 6]),
        (("--mesh", "cp=2,tp=2"), 2, 1, (8, 8), [0, 0, 0, 0]),
    ],
)
def test_parameters_moments_and_batches_are_divided(tmp_path, mesh, on_tp, stored, batch, firsts) -> None:
    """Matrices over tp, all of it over the stored axes too; norms and the stream's width not over tp."""
    arguments = flags("none", tmp_path, *mesh)
    found = processes(4).run(held, arguments)
    spec = parts(flags("none", tmp_path))[0].spec
    for name, param in params_of(spec).items():
        cut = (1 if "norm" in name else on_tp) * stored
        assert [f["params"][name] for f in found] == [4 * math.prod(param.shape) // cut] * 4, name
    for f in found:
        assert f["opt"] == 2 * sum(f["params"].values())
        assert f["batch"] == batch
    assert [f["first row"] for f in found] == firsts


class Allocations(TorchDispatchMode):
    """The largest tensor that was made, in elements, and the most bytes that were alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.live = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        mapped = func.overloadpacket is torch.ops.aten.set_  # a file mapped into memory, of which nothing is read yet
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and not t.is_meta:
                self.add(t, 0 if mapped else t.untyped_storage().nbytes())
        return out

    def add(self, t: torch.Tensor, size: int) -> None:
        storage = t.untyped_storage()
        if storage._cdata in self.seen:
            return
        self.seen.add(storage._cdata)
        self.largest = max(self.largest, size // t.element_size())
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.drop, storage._cdata, size)

    def drop(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size


def made(arguments: list[str], folder: str | None) -> tuple[int, int, int]:
    """(elements of the largest tensor made by init, or by loading from a folder; of the largest shard; of all shards)."""
    config = cli.parse_train(arguments)
    run, _ = parts(arguments)
    with Allocations() as seen:
        if folder is None:
            state = job.initial_state(config, run)
        else:
            state = checkpoint.load(folder, job.abstract_state(config, run))
    sizes = [local_bytes(leaf) // 4 for leaf in tree.leaves(state.params)]
    return seen.largest, max(sizes), sum(sizes)


@pytest.mark.parametrize("mesh", [(*DP_TP, "--store", "dp"), ("--mesh", "dp=4", "--store", "dp")])
def test_init_and_load_make_no_more_than_the_shard(tmp_path, corpus, mesh) -> None:
    """Not even for a moment: no tensor larger than this rank's largest shard, though the whole one is four times that."""
    big = ("--model-overrides.vocab", "4096", "--model-overrides.layers", "1")
    arguments = flags(corpus, tmp_path / "run", *big, steps=1)
    assert go(arguments) == 0
    for folder in (None, str(tmp_path / "run")):
        for largest, shard, _ in processes(4).run(made, [*arguments, *mesh], folder):
            assert shard == 4096 * 32 // 4
            assert largest <= shard, folder


def activations(arguments: list[str]) -> float:
    """Bytes by which the peak of a step grows for each sequence of the global batch."""
    from fmegatron.accumulate import accumulate
    from fmegatron.context import Ctx

    peaks = []
    for size in (32, 64):  # so large that the peak is one of activations, not of a layer's gradients in their bucket
        given = [*arguments, "--batch.size", str(size)]
        run, batches = parts(given)
        state = job.initial_state(cli.parse_train(given), run)
        tokens = torch.zeros(size, 16, dtype=torch.int64)[batches.rows]
        batch = {"tokens": tokens, "labels": tokens}
        gradients = accumulate(run.model.loss, 1, weights=run.model.weights)
        gradients(state.params, batch, Ctx(sh=run.sh))
        with Allocations() as seen:
            gradients(state.params, batch, Ctx(sh=run.sh))
        peaks.append(seen.peak)
    return (peaks[1] - peaks[0]) / 32


def test_activations_are_divided(tmp_path) -> None:
    """By dp exactly; by tp with sequence parallelism nearly, as products read the whole sequence for a moment."""
    arguments = flags(
        "none", tmp_path, "--model-overrides.layers", "4", "--model-overrides.vocab", "64", remat="everything"
    )
    whole = activations(arguments)
    assert whole > 0
    for mesh, share in ((("--mesh", "dp=4"), 0.26), ((*DP_TP, "--sp"), 0.32)):
        found = processes(4).run(activations, [*arguments, *mesh])
        assert all(0.2 * whole < f <= share * whole for f in found), (mesh, [f / whole for f in found])
