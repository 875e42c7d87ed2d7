"""Two engines, one answer; the pool of processes; `fmegatron verify`."""

import importlib
import os
import time

import pytest
import torch

from fmegatron.errors import UserError
from fmegatron.testing import Layout, compare, processes, small_model
from fmegatron.testing.engines import run_on
from fmegatron.testing.program import Program
from fmegatron.testing.running import Job, inputs_of
from fmegatron.verify import VerifyConfig, main, run

pytestmark = pytest.mark.xdist_group("gloo")
MODEL = small_model("llama", layers=1, dropout=0.2, tied=True)
LINES = [
    "tp=2 sp micro=2 mask=row",
    "fsdp=2 zero=1 remat=nothing packed mask=uneven",
    "cp=2 zero=3 context=ring packed",
]
MORE = [
    "dp=2,tp=2 sp zero=2 micro=2 mask=padded",
    "cp=2,tp=2 sp zero=3 context=ulysses packed",
    "cp=4 zero=1 context=ulysses+ring mask=uneven",
    "fsdp=2,dp=2 zero=3 store=fsdp state=dp packed mask=row",
]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def agree(line):
    layout, job, program = Layout.parse(line), Job(("gradients", "adamw")), Program(MODEL)
    assert compare(MODEL, layout, engine="processes").ok
    inputs = inputs_of(program, layout, job)
    found = [run_on(engine, program, layout, job, inputs) for engine in ("simulated", "processes")]
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        for what, leaves in one.items():
            for name, piece in leaves.items():
                mine, theirs = piece, other[what][name]
                assert mine.where == theirs.where and mine.placements == theirs.placements
                a, b = mine.value.double(), theirs.value.double()
                assert (a - b).norm() <= 1e-12 * a.norm() + 1e-14, (what, name)


@pytest.mark.parametrize("line", LINES)
def test_both_engines_give_every_rank_the_same_pieces(line):
    agree(line)


@pytest.mark.slow
@pytest.mark.parametrize("line", MORE)
def test_both_engines_on_four_ranks(line):
    agree(line)


def my_rank(*numbers):
    return torch.distributed.get_rank(), sum(numbers)


def fail_on_one(wait):
    if torch.distributed.get_rank() == 1:
        raise ValueError("of rank one")
    time.sleep(wait)


def test_the_pool_stays_alive_and_reports_the_rank_that_failed():
    pool = processes(2)
    assert pool.run(my_rank, 1, 2) == [(0, 3), (1, 3)]
    assert processes(2) is pool
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 of 2:\n(.|\n)*of rank one"):
        pool.run(fail_on_one, 60)
    assert time.monotonic() - start < 30  # it does not wait for the ranks that hang
    assert not pool.alive() and not os.path.exists(pool.folder)
    assert processes(2) is not pool and processes(2).run(my_rank) == [(0, 0), (1, 0)]


def test_a_rank_that_is_too_slow_ends_the_pool():
    with pytest.raises(TimeoutError, match="time.sleep|sleep: rank 0 of 2 gave no answer in 1 s"):
        processes(2).run(time.sleep, 60, timeout=1)


# ---------------------------------------------------------------------------------------------------------- verify


def test_verify_prints_a_table(capsys):
    config = VerifyConfig(model="llama,layers=1", world=2, examples=1, axes="tp", jobs=1)
    assert run(config) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].split()[:4] == ["#", "layout", "model", "worst"]
    assert "layouts of up to 2 ranks, all equal to one device: worst error" in lines[-1] and "(100 %)" in lines[-1]
    again = run(config)
    assert again == 0 and [x.split("  ")[1:3] for x in capsys.readouterr().out.splitlines()[:-1]] == [
        x.split("  ")[1:3] for x in lines[:-1]
    ]


def test_verify_one_layout_with_its_collectives(capsys):
    line = "tp=2 sp zero=0 mask=uneven"
    assert main(["llama,layers=1", "--layout", line.replace(" zero=0", ""), "--ledger"]) == 0
    text = capsys.readouterr().out
    assert "reduce-scatter  tp" in text and "equal to one device, worst error" in text


def test_verify_fails_with_the_smallest_layout(capsys, monkeypatch):
    accumulate = importlib.import_module("fmegatron.accumulate")
    kept = accumulate.cut_batch
    monkeypatch.setattr(accumulate, "cut_batch", lambda batch, ctx, n: kept(batch, ctx, n)[-1:])  # open-instruct #1498
    assert main(["llama,layers=1", "--layout", "tp=2,dp=2 sp zero=3 micro=2 remat=attention packed mask=uneven"]) == 1
    text = capsys.readouterr().out
    assert "does not compute what one device computes" in text
    assert text.splitlines()[-1] == ('smallest failing layout: fmegatron verify llama,layers=1 --layout "dp=1 micro=2"')


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lama"], "model 'lama' is no family"),
        (["llama", "--world", "0"], "both must be 1 or more"),
        (["llama", "--layout", "dp=2 ps"], "did you mean 'sp'"),
        (["llama", "--layout", "tp=4"], "do not divide by tp=4"),
        (["llama", "--layout", "dp=2", "--engine", "processes", "--device", "cuda"], "runs on gloo and CPU"),
    ],
)
def test_verify_refuses_what_is_not_there(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_errors_are_user_errors():
    with pytest.raises(UserError, match="check 'speed' is not known"):
        compare(MODEL, "dp=1", checks=("speed",))
    with pytest.raises(UserError, match="has no bound here"):
        compare(MODEL, "dp=1", dtype="float16")
