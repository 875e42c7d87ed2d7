"""`recorded`: what is recorded and what is computed anew, on a CPU as a list of calls and on a GPU as a CUDA graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fmegatron import capturing, tree
from fmegatron.calls import Calls
from fmegatron.capturing import Recorder
from fmegatron.errors import UserError
from fmegatron.fp8 import Fp8, scaling
from fmegatron.graphs import recorded
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.optim import adamw, chain, clip_by_global_norm, ema, sgd, with_master, with_stochastic_rounding
from fmegatron.precision import Precision
from fmegatron.random import key
from fmegatron.remat import names, nothing
from fmegatron.schedules import cosine
from fmegatron.sharding import Sharding
from fmegatron.spec import init
from fmegatron.split import everything
from fmegatron.step import TrainState, train_step
from fmegatron.testing.models import small_model
from tests.optim_trees import same

torch.set_num_threads(1)
SIZES = DecoderConfig(vocab=40, embed=16, layers=2, heads=2, kv_heads=1, mlp=24, dropout=0.2)
RATE = cosine(0.01, total=20, warmup=3)


def batch(seed: int, rows: int = 3, device: str = "cpu") -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 40, (rows, 9), generator=torch.Generator().manual_seed(seed)).to(device)
    return {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


OPTIMIZERS = {
    "adamw": lambda: adamw(RATE, clip=0.5),
    "chain": lambda: chain(clip_by_global_norm(0.5), adamw(RATE), ema(0.9)),
    "master": lambda: with_master(adamw(RATE, clip=0.5)),
    "rounded": lambda: with_stochastic_rounding(adamw(RATE, clip=0.5, moments=torch.bfloat16), 3),
}


def made(
    name: str, donate: bool = True, device: str = "cpu", sizes: DecoderConfig = SIZES, **options: Any
) -> tuple[Any, TrainState]:
    """(a step that reads nothing on the host, its first state)."""
    narrow = name in ("master", "rounded")
    precision = Precision(torch.bfloat16 if narrow else torch.float32, torch.float32)
    sh, model, optimizer = Sharding(precision=precision), Decoder(sizes), OPTIMIZERS[name]()
    step = train_step(
        model.loss,
        optimizer,
        weights=model.weights,
        sh=sh,
        donate=donate,
        microbatches=2,
        **{"check_finite": False, **options},
    )
    params = init(model.spec(), key(0), sh=sh, device=device)
    return step, TrainState(0, params, optimizer.init(params), key(1))


def run(
    step: Any, state: TrainState, steps: int = 6, device: str = "cpu", rows: int = 3
) -> tuple[TrainState, list[dict[str, Any]]]:
    found = []
    for n in range(steps):
        state, metrics = step(state, batch(n, rows=rows, device=device))
        found.append(metrics)
    return state, found


def equal(graphed: tuple[Any, Any], plain: tuple[Any, Any]) -> None:
    """Bitwise; numbers that the host computes are tensors of a recording."""
    same(graphed[0], plain[0])
    for a, b in zip(graphed[1], plain[1], strict=True):
        assert {n: float(x) for n, x in a.items() if x is not None} == {
            n: float(x) for n, x in b.items() if x is not None
        }


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "rounded" else n for n in OPTIMIZERS])
def test_a_recorded_step_is_the_step(name) -> None:
    step, state = made(name, donate=name != "adamw")
    graphed = run(recorded(step), state, steps=5)
    equal(graphed, run(*made(name), steps=5))
    assert graphed[0].step == 5  # numbers stay numbers


def test_the_state_goes_on_from_another() -> None:
    """A checkpoint's tensors are copied into the recording's, and its numbers count."""
    step, state = made("adamw")
    graphed = recorded(step, warmup=1)
    run(graphed, state, steps=3)
    step, state = made("adamw")
    state, _ = run(step, state, steps=4)
    kept = tree.tree_map(lambda x: x.clone() if torch.is_tensor(x) else x, state)
    got = graphed(state, batch(9))[0]
    same(got, step(kept, batch(9))[0])
    assert got.step == 5
    with pytest.raises(RuntimeError, match="donated"):
        _ = state.params


def test_metrics_outlive_the_next_play() -> None:
    step, state = made("adamw")
    _, rows = run(recorded(step, warmup=1), state, steps=4)
    assert len({float(r["loss"]) for r in rows}) == 4


def test_what_a_recording_refuses() -> None:
    step, state = made("adamw")
    graphed = recorded(step, warmup=1)
    s, _ = run(graphed, state, steps=2)
    b = batch(0)
    for given, part in (
        ((s, batch(0, rows=5)), "labels of the batch is torch.int64 of shape (5, 8)"),
        ((s, {**b, "mask": b["tokens"]}), "the batch has another structure"),
        ((TrainState(s.step, s.params, s.opt, key(5)), b), "key.words.0 of the state was 1"),
        ((TrainState(s.step, s.params["embed"], s.opt, s.key), b), "the state has another structure"),
    ):
        with pytest.raises(UserError) as error:
            graphed(*given)
        assert part in str(error.value)


def test_a_number_that_does_not_change_by_a_constant() -> None:
    def doubling(state: Any, batch: Any) -> Any:
        return {"n": 2 * state["n"], "x": state["x"] + 1}, {}

    graphed = recorded(doubling)
    state, _ = graphed({"n": 1, "x": torch.zeros(2)}, {})
    with pytest.raises(UserError, match="n of the state changes by 1 in one step and by 2 in another"):
        graphed(state, {})


def test_a_count_that_the_host_cannot_know() -> None:
    def step(state: Any, batch: Any) -> Any:
        capturing.numbers(lambda n: (float(n),), state["n"] + 1)
        return {"n": state["n"] + 1, "x": state["x"] + 1}, {}

    graphed = recorded(step, warmup=1)
    state, _ = graphed({"n": 1, "x": torch.zeros(2)}, {})
    with pytest.raises(UserError, match="from the count that is in the state"):
        graphed(state, {})
    assert capturing.recording() is None


def delayed(device: str = "cpu", **options: Any) -> tuple[Any, TrainState]:
    """(a step with delayed fp8 scaling, its first state)."""
    fp8 = Fp8("delayed", history=3)
    sh = Sharding(precision=Precision(torch.bfloat16 if device == "cuda" else torch.float32, fp8=fp8))
    model = Decoder(DecoderConfig(vocab=40, embed=128, layers=2, heads=2, kv_heads=2, mlp=128), **options)
    optimizer, spec = adamw(RATE), model.spec()
    step = train_step(model.loss, optimizer, weights=model.weights, sh=sh, spec=spec, donate=True, check_finite=False)
    params = init(spec, key(0), sh=sh, device=device)
    return step, TrainState(0, params, optimizer.init(params), extras=scaling.init(fp8, spec, device=device))


def test_delayed_scaling_is_recorded(monkeypatch) -> None:
    """Its history is written into the same memory in every play, and nothing asks on the host how many steps there were."""
    real = torch.Tensor.__bool__

    def asked(x: torch.Tensor) -> bool:
        assert capturing.recording() is None, "a recorded step reads a number on the host"
        return real(x)

    monkeypatch.setattr(torch.Tensor, "__bool__", asked)
    step, state = delayed()
    graphed = recorded(step, warmup=1)
    got = run(graphed, state, steps=5, rows=16)
    step, state = delayed()
    equal(got, run(step, state, steps=5, rows=16))
    history = got[0].extras["fp8"]["history"]
    assert got[0].extras["fp8"]["steps"] == 5 and (history > 0).all() and not torch.equal(history[0], history[1])
    _, first = delayed()
    with pytest.raises(UserError, match="delayed fp8 scaling was recorded with a history"):
        graphed(first, batch(0, rows=16))
    assert first.step == 0  # still whole


@pytest.mark.parametrize(
    ("family", "keep"), [("gpt2", nothing), ("gemma3_text", names("attention", "q")), ("deepseek_v3", everything)]
)
def test_models_and_what_they_keep(family, keep) -> None:
    model = dataclasses.replace(small_model(family), save=keep)
    optimizer = adamw(RATE, clip=0.5)
    options: dict[str, Any] = {"weights": model.weights, "update_params": model.update_params, "check_finite": False}
    step = train_step(model.loss, optimizer, donate=True, **options)
    found = []
    for wrap in (recorded, lambda step: step):
        params = init(model.spec(), key(0))
        state, rows = run(wrap(step), TrainState(0, params, optimizer.init(params), key(1)), steps=4)
        found.append((state, [{n: x for n, x in row.items() if n != "stats"} for row in rows]))
    equal(*found)


class Held(TorchDispatchMode):
    """The most bytes that what is made in it holds at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.there = 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree.leaves((args, kwargs or {})) if torch.is_tensor(t)}
        found = func(*args, **(kwargs or {}))
        for t in tree.leaves(found):
            if torch.is_tensor(t) and t.untyped_storage()._cdata not in inputs:
                self.there[StorageWeakRef(t.untyped_storage())] = t.untyped_storage().nbytes()
        self.there = {ref: size for ref, size in self.there.items() if not ref.expired()}
        self.most = max(self.most, sum(self.there.values()))
        return found


def test_a_play_holds_no_more_than_the_step() -> None:
    step, state = made("adamw", sizes=dataclasses.replace(SIZES, dropout=0.0))
    with Held() as eager:
        state, _ = step(state, batch(0))
    graphed = recorded(step, warmup=1)
    state, _ = run(graphed, state, steps=2)
    with Held() as played:
        graphed(state, batch(2))
    assert 0 < played.most <= eager.most


def test_writes_views_and_random_numbers() -> None:
    """Writes to a tensor of Python's numbers, views, random numbers of torch, what nothing needs."""

    def step(state: Any, batch: Any) -> Any:
        x, total = state["x"], torch.tensor([1.0, 2.0])
        total += x.sum()
        again = torch.tensor([1.0, 2.0])
        again += 1
        noise = torch.rand(2) + torch.arange(2)
        x.t()[0].add_(total[:1])
        torch.rand(3)  # drawn all the same
        return {"x": x}, {"total": total, "again": again, "x": x[0, 0], "noise": noise}

    found = []
    for wrap in (recorded, lambda step: step):
        torch.manual_seed(0)
        played, state, rows = wrap(step), {"x": torch.eye(2)}, []
        for _ in range(5):
            state, metrics = played(state, {})
            rows.append({n: x.tolist() for n, x in metrics.items()})
        found.append((state["x"].tolist(), rows))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("reads", "part"),
    [
        (lambda x: x.new_full((2,), x.sum().item()), "reads a value on the host (aten._local_scalar_dense"),
        (lambda x: x * len(x.tolist()), "reads a value on the host (tolist)"),
        (lambda x: x + torch.from_numpy(x.detach().numpy()), "reads a value on the host (numpy)"),
        (lambda x: x + x[x > 0].sum(), "reads a value on the host (aten.index"),
        (lambda x: x.clone().unsqueeze_(0)[0], "changes the shape of a tensor in place"),
    ],
)
def test_what_a_list_of_calls_refuses(reads, part) -> None:
    graphed = recorded(lambda state, batch: ({"x": reads(state["x"])}, {}), warmup=1)
    state, _ = graphed({"x": torch.ones(2)}, {})
    with pytest.raises(UserError) as error:
        graphed(state, {})
    assert part in str(error.value) and "check_finite=False" in str(error.value)
    assert capturing.recording() is None and not capturing.watched()


def test_a_check_is_refused_and_the_state_stays() -> None:
    step, state = made("adamw", check_finite=True)
    graphed = recorded(step, warmup=1)
    state, _ = graphed(state, batch(0))
    kept = tree.tree_map(lambda x: x.clone() if torch.is_tensor(x) else x, state)
    with pytest.raises(UserError, match="check_finite=False"):
        graphed(state, batch(1))
    same(state, kept)
    with pytest.raises(UserError, match="warmup"):
        recorded(step, warmup=0)


@pytest.mark.slow
def test_compiled_code_is_recorded_as_written() -> None:
    f = torch.compile(lambda x: (x * 2).sin(), backend="eager")
    graphed = recorded(lambda state, batch: ({"x": f(state["x"])}, {"y": f(batch)}), warmup=1)
    state, want = {"x": torch.ones(3)}, torch.ones(3)
    for n in range(4):
        state, metrics = graphed(state, torch.full((2,), float(n)))
        want = (want * 2).sin()
        assert torch.equal(state["x"], want) and torch.equal(metrics["y"], (torch.full((2,), float(n)) * 2).sin())


def test_constants_of_a_recording_outlive_its_plays() -> None:
    """They come to the device behind the recording: what a play makes anew would be empty."""
    recorder, calls = Recorder(torch.device("cpu")), Calls()
    calls.record(lambda: [recorder.constant([3, 5]) + 1])
    recorder.upload()
    calls.play()  # what the recording itself ran
    for _ in range(2):
        assert calls.play()[0].tolist() == [4, 6]


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_cuda_graph_equals_the_step(name, donate) -> None:
    step, state = made(name, donate, "cuda")
    graphed = run(recorded(step), state, device="cuda")
    equal(graphed, run(*made(name, device="cuda"), device="cuda"))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("compile", [False, True])
def test_a_cuda_graph_with_delayed_scaling(compile) -> None:
    step, state = delayed("cuda", compile=compile)
    graphed = run(recorded(step), state, device="cuda", rows=16)
    step, state = delayed("cuda", compile=compile)
    equal(graphed, run(step, state, device="cuda", rows=16))


@pytest.mark.gpu
@needs_cuda
def test_what_cannot_be_recorded_on_a_gpu() -> None:
    sh, model, optimizer = Sharding(), Decoder(SIZES), sgd(0.1)
    params = init(model.spec(), key(0), device="cuda")
    step = recorded(train_step(model.loss, optimizer, weights=model.weights, sh=sh, donate=True), warmup=1)
    state = TrainState(0, params, optimizer.init(params), key(1))
    state, _ = step(state, batch(0, device="cuda"))
    torch.manual_seed(3)
    numbers = torch.randn(5, device="cuda")
    with pytest.raises(UserError, match="check_finite=False"):
        step(state, batch(1, device="cuda"))
    torch.manual_seed(3)  # the device's random numbers go on
    assert torch.equal(torch.randn(5, device="cuda"), numbers)
