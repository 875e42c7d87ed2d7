"""Batches ahead of a step and metrics behind it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fmegatron import cli, graphs, train
from fmegatron.feeding import Prefetched, fetched, no_waiting, to_device
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.optim import adamw, decay_mask, with_master
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.schedules import cosine
from fmegatron.sharding import Sharding
from fmegatron.spec import abstract
from fmegatron.step import TrainState, train_step
from tests.train_runs import flags, losses, write_corpus

torch.set_num_threads(1)
CPU = torch.device("cpu")


def test_on_a_cpu_batches_are_made_when_they_are_asked_for():
    made = []
    batches = Prefetched(lambda n: made.append(n) or {"tokens": torch.tensor([n])}, CPU, last=3)
    for n in range(3):
        batches.begin(n)
        assert made == list(range(n))
        assert batches(n)["tokens"].item() == n


def test_metrics_become_numbers():
    read = fetched({"loss": torch.tensor(1.5), "tokens": torch.tensor(7), "lr": 0.1, "nothing": None, "skipped": 0})
    found = read()
    assert found == {"loss": 1.5, "tokens": 7, "lr": 0.1, "nothing": None, "skipped": 0}
    assert isinstance(found["tokens"], int)
    with no_waiting(CPU):
        assert read()["loss"] == 1.5


class Waits(TorchDispatchMode):
    """Operations that read a value on the host, or copy between host and device, the device being torch's "meta"."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        there, here = (
            {t.device for t in pytree.tree_leaves(x) if isinstance(t, torch.Tensor)} for x in (out, (args, kwargs))
        )
        if "local_scalar" in str(func) or "nonzero" in str(func) or (here and there - here) or len(here) > 1:
            self.found.append(str(func))
        return out


def step_on_meta(**options):
    """(a step with dropout, master copies and clipping, its state, a batch), on the meta device."""
    sizes = DecoderConfig(vocab=40, embed=16, layers=2, heads=2, kv_heads=1, mlp=24, dropout=0.2)
    sh, model = Sharding(precision=Precision(torch.bfloat16, torch.bfloat16)), Decoder(sizes)
    optimizer = with_master(adamw(cosine(0.01, total=20, warmup=3), clip=0.5, mask=decay_mask(model.spec())))
    step = train_step(model.loss, optimizer, weights=model.weights, sh=sh, donate=True, **options)
    params, ids = abstract(model.spec(), sh=sh), torch.zeros(2, 8, dtype=torch.int64, device="meta")
    return step, TrainState(0, params, optimizer.init(params), key(1)), {"tokens": ids, "labels": ids}


def test_a_step_waits_for_nothing():
    """On the meta device whatever the host would wait for shows, without a GPU."""
    step, state, batch = step_on_meta(check_finite=False)
    with Waits() as waits:
        state, _ = step(state, batch)
    assert waits.found == [] and state.step == 1
    step, state, batch = step_on_meta(check_finite=True)
    with pytest.raises(RuntimeError, match="item"), Waits():
        step(state, batch)


def test_a_recorded_step_reads_and_copies_nothing(monkeypatch):
    waits = Waits()

    class Watched:
        def record(self, run):
            with waits:
                self.found = run()

        def play(self):
            return self.found

    monkeypatch.setattr(graphs, "Calls", Watched)
    step, state, batch = step_on_meta(check_finite=False)
    step = graphs.recorded(step, warmup=1)
    for _ in range(3):
        state, _ = step(state, batch)
    assert waits.found == [] and state.step == state.opt["count"] == 3


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_gets_its_batches_ahead_and_waits_for_nothing():
    made, gpu = [], torch.device("cuda")
    batches = Prefetched(lambda n: made.append(n) or to_device({"x": torch.full((4,), n)}, gpu), gpu, last=3)
    batches.begin(0)
    assert made == [0]
    with no_waiting(gpu):
        for n in range(3):
            x = batches(n)["x"]
            batches.begin(n + 1)
            read = fetched({"sum": x.sum(), "mean": x.double().mean(), "lr": 0.1})
    assert made == [0, 1, 2] and read() == {"sum": 8, "mean": 2.0, "lr": 0.1}
    batches.begin(0)
    assert batches(2)["x"].tolist() == [2] * 4  # another than was begun


@pytest.mark.gpu
@needs_cuda
def test_runs_on_a_gpu_with_and_without_a_graph(tmp_path: Path):
    corpus = write_corpus(tmp_path / "text.jsonl", documents=24)
    found = []
    for name, more in (("plain", ()), ("graph", ("--recorded",)), ("host", ("--offload-optimizer",))):
        given = flags(corpus, tmp_path / name, "--device", "cuda", "--dropout", "0.1", *more, steps=8, eval_every=3)
        assert train.run_here(cli.parse_train(given), torch.device("cuda"), time.monotonic()) == 0
        found.append(losses(tmp_path / name))
    assert len(found[0]) == 8
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[2], found[0], rtol=1e-5, atol=0)
