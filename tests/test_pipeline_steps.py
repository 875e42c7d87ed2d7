"""Steps of a pipeline: lengths that vary, recomputation, an overflow on one stage, and the memory of each rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import fmegatron as fm
from fmegatron.models import Decoder
from fmegatron.parallel import schedule_check
from fmegatron.precision import Precision
from fmegatron.testing.models import small_config
from fmegatron.tree import leaves, tree_map
from tests.processes import processes
from tests.test_pipeline import FLOAT64, close, whole
from tests.test_transforms import Live

ROWS = 4


def decoder(**changes: Any) -> Decoder:
    options = {n: changes.pop(n) for n in ("save", "compile") if n in changes}
    return Decoder(small_config("llama", **{"layers": 4, "heads": 4, "kv_heads": 2, **changes}), **options)


def batch(length: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 48, (2, rows, length), generator=torch.Generator().manual_seed(length))
    return {"tokens": tokens[0], "labels": tokens[1]}


def parts(model: Decoder, schedule: str, microbatches: int) -> tuple[fm.Pipeline, fm.Sharding]:
    """A pipeline over all ranks, and the sharding of one stage, by the public names."""
    world = torch.distributed.get_world_size()
    mesh = fm.make_mesh(f"pp={world}", device="cpu")
    sh = fm.inside_stage(fm.Sharding(mesh, fm.standard_rules(mesh), precision=FLOAT64), model.spec())
    return fm.pipeline(model, fm.make_schedule(schedule, world, microbatches), mesh=mesh), sh


# ------------------------------------------------------------------------------------------- one's own step, any length

LENGTHS = (6, 11, 3, 6, 1)


def own_steps(save: Any) -> list[tuple[Any, ...]]:
    """On one rank: (loss, gradients, norm, parameters behind an update) of a step for each length."""
    model = decoder(save=save)
    pipe, sh = parts(model, "zbv", 2)
    optimizer = fm.optim.chain(fm.optim.clip_by_global_norm(0.5), fm.optim.adamw(1e-2))
    params, found = fm.init(pipe.spec, fm.key(0), sh=sh), []
    opt = optimizer.init(params)
    for length in LENGTHS:
        (loss, _), grads = pipe(params, batch(length), fm.Ctx(sh=sh))
        norm = pipe.norm(grads)
        params, _, opt = optimizer.update(params, grads, opt, grad_norm=norm)
        found.append((loss, whole(grads), norm, whole(params)))
    return found


def test_lengths_that_vary_equal_one_device_with_and_without_recomputation() -> None:
    """A step of one's own, of the public names; every batch of another length than the one before."""
    model, sh = decoder(), fm.Sharding(precision=FLOAT64)
    gradients = fm.accumulate(model.loss, weights=model.weights)
    optimizer = fm.optim.chain(fm.optim.clip_by_global_norm(0.5), fm.optim.adamw(1e-2))
    params = fm.init(model.spec(), fm.key(0), sh=sh)
    opt, want = optimizer.init(params), []
    for length in LENGTHS:
        (loss, _), grads = gradients(params, batch(length), fm.Ctx(sh=sh))
        norm = fm.optim.global_norm(grads)
        params, _, opt = optimizer.update(params, grads, opt, grad_norm=norm)
        want.append((loss, whole(grads), norm, whole(params)))
    for save in (fm.everything, fm.nothing):
        for rank in processes(2).run(own_steps, save):
            for got, right in zip(rank, want, strict=True):
                close(got[0], right[0], "loss")
                close(got[2], right[2], "norm")
                for what in (1, 3):
                    for name, value in got[what].items():
                        close(value, right[what][name], name, 1e-3 * float(right[2]))


# --------------------------------------------------------------------------------------------------------- loss scale


class Planted:
    """The gradients of a pipeline, of which one element on one rank overflows in one call."""

    def __init__(self, pipe: fm.Pipeline, call: int, rank: int) -> None:
        self.pipe, self.norm, self.call, self.rank, self.calls = pipe, pipe.norm, call, rank, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        found, grads = self.pipe(*args, **options)
        if self.calls == self.call and self.pipe.rank == self.rank:
            first = leaves(grads["layers"])[0]
            first = first.to_local() if hasattr(first, "to_local") else first
            first.view(-1)[0] = torch.inf
        self.calls += 1
        return found, grads


def scaled_steps(rank: int) -> list[tuple[Any, ...]]:
    """On one rank: (skipped, scale, loss scale's state, have the parameters changed?) of four steps."""
    model = decoder()
    pipe, sh = parts(model, "1f1b", 2)
    policy = fm.dynamic_loss_scale(1024.0, hysteresis=1)
    optimizer = fm.optim.adamw(1e-2)
    step = fm.train_step(
        model.loss, optimizer, sh=sh, spec=pipe.spec, gradients=Planted(pipe, 1, rank), loss_scale=policy
    )
    params = fm.init(pipe.spec, fm.key(0), sh=sh)
    state = fm.TrainState(0, params, optimizer.init(params), fm.key(1), loss_scale=policy.init())
    found = []
    for n in range(4):
        old = whole(tree_map(torch.clone, state.params))
        state, seen = step(state, batch(5 + n))
        moved = any(not torch.equal(old[name], t) for name, t in whole(state.params).items())
        found.append((seen["skipped"], seen["loss_scale"], state.loss_scale, moved))
    return found


def test_an_overflow_on_one_stage_skips_the_step_on_all() -> None:
    for rank in (0, 1):
        first, second = processes(2).run(scaled_steps, rank)
        assert first == second
        assert [(skipped, moved) for skipped, *_, moved in first] == [(0, True), (1, False), (0, True), (0, True)]
        assert [scale for _, scale, *_ in first] == [1024.0, 1024.0, 512.0, 512.0]


HALF = Precision(params=torch.float32, compute=torch.float16)


def half_steps(pipelined: bool) -> list[tuple[Any, ...]]:
    """(skipped, scale, loss, have the parameters changed?) of steps in fp16, from a scale that overflows at first."""
    model, policy = decoder(layers=2), fm.dynamic_loss_scale(2.0**40, hysteresis=1, backoff=2.0**-12)
    optimizer = fm.optim.adamw(1e-2)
    if pipelined:
        pipe, sh = parts(model, "1f1b", 2)
        sh = dataclasses.replace(sh, precision=HALF)
        step = fm.train_step(model.loss, optimizer, sh=sh, spec=pipe.spec, gradients=pipe, loss_scale=policy)
        params = fm.init(pipe.spec, fm.key(0), sh=sh)
    else:
        sh = fm.Sharding(precision=HALF)
        gradients = fm.accumulate(model.loss, 2, weights=model.weights)
        step = fm.train_step(model.loss, optimizer, sh=sh, gradients=gradients, loss_scale=policy)
        params = fm.init(model.spec(), fm.key(0), sh=sh)
    state, found = fm.TrainState(0, params, optimizer.init(params), fm.key(1), loss_scale=policy.init()), []
    for n in range(5):
        old = whole(tree_map(torch.clone, state.params))
        state, seen = step(state, batch(5 + n))
        moved = any(not torch.equal(old[name], t) for name, t in whole(state.params).items())
        found.append((seen["skipped"], seen["loss_scale"], float(seen["loss"]), moved))
    return found


def test_steps_in_fp16_skip_alike_and_have_the_losses_of_one_device() -> None:
    want = half_steps(False)
    assert 0 < sum(skipped for skipped, *_ in want) < 4 and not want[-1][0]
    for got in processes(2).run(half_steps, True):
        assert [(skipped, scale) for skipped, scale, *_ in got] == [(skipped, scale) for skipped, scale, *_ in want]
        assert [moved for *_, moved in got] == [not skipped for skipped, *_ in got]
        for (_, _, a, _), (_, _, b, _) in zip(got, want, strict=True):
            assert abs(a - b) <= 1e-3 * b


# --------------------------------------------------------------------------------------- compiled blocks, recomputation


def compiled_gradients(ranks: tuple[int, ...]) -> Any:
    """On one rank: (loss, gradients), by compiled blocks if it is one of these."""
    compile = {"backend": "aot_eager"} if torch.distributed.get_rank() in ranks else False
    model = decoder(layers=2, dropout=0.2, compile=compile, save=fm.names("attention"))
    pipe, sh = parts(model, "zbh1", 2)
    params = fm.init(pipe.spec, fm.key(0), sh=sh)
    (loss, _), grads = pipe(params, batch(6), fm.Ctx(sh=sh, key=fm.key(7)))
    return loss, whole(grads)


@pytest.mark.parametrize("ranks", [(0,), pytest.param((0, 1), marks=pytest.mark.slow)])
def test_compiled_blocks_that_are_run_again_inside_stages_equal_one_device(ranks: tuple[int, ...]) -> None:
    """Both at once; attention is kept by its name."""
    model, sh = decoder(layers=2, dropout=0.2), fm.Sharding(precision=FLOAT64)
    params = fm.init(model.spec(), fm.key(0), sh=sh)
    (loss, _), grads = fm.accumulate(model.loss, weights=model.weights)(params, batch(6), fm.Ctx(sh=sh, key=fm.key(7)))
    want = whole(grads)
    for got, own in processes(2).run(compiled_gradients, ranks, timeout=300):
        close(got, loss, "loss")
        for name, g in own.items():
            close(g, want[name], name, 1e-3 * float(fm.optim.global_norm(grads)))


# ------------------------------------------------------------------------------------------------------------- memory

MICROBATCHES, NAMES = 8, ("gpipe", "1f1b", "zbh1")


def peaks(names: tuple[str, ...]) -> list[int]:
    """On one rank, for each schedule: the most bytes made in the step and alive at a time."""
    found = []
    for name in names:
        model = decoder()
        pipe, sh = parts(model, name, MICROBATCHES)
        params = fm.init(pipe.spec, fm.key(0), sh=sh)
        data = batch(48, MICROBATCHES)
        pipe(params, data, fm.Ctx(sh=sh))  # what is made once
        with Live() as live:
            pipe(params, data, fm.Ctx(sh=sh))
        found.append(live.peak)
    return found


def test_measured_memory_of_each_rank_is_ordered_as_the_table_predicts() -> None:
    """By the residuals that are alive at most on each rank: between schedules, and between ranks."""
    measured = processes(4).run(peaks, NAMES)
    predicted = [schedule_check.peaks(fm.make_schedule(n, 4, MICROBATCHES)) for n in NAMES]
    inner = [(n, r) for n in range(len(NAMES)) for r in (1, 2)]  # ranks with nothing but a layer
    for n, r in inner:
        for m, q in inner:
            if predicted[n][r] > predicted[m][q]:
                assert measured[r][n] > measured[q][m], (NAMES[n], r, NAMES[m], q, measured, predicted)
    assert (
        measured[0][0] > measured[0][1] > measured[1][1]
    )  # GPipe keeps all microbatches, 1F1B fewer on every next rank
