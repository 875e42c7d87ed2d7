"""Two engines, one answer; the pool of processes; `fmegatron verify`."""

import functools
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fmegatron.errors import UserError
from fmegatron.testing import Layout, compare, processes, small_model
from fmegatron.testing.covering import space
from fmegatron.testing.engines import run_on
from fmegatron.testing.models import find_model
from fmegatron.testing.program import Program
from fmegatron.testing.running import Job, inputs_of
from fmegatron.verify import VerifyConfig, main, run

pytestmark = pytest.mark.xdist_group("gloo")
MODEL = small_model("llama", layers=1, dropout=0.2, tied=True)
# 20 layouts of up to 4 ranks as they are drawn, and those of them that always run
DRAWN = ["llama,layers=1", "llama,layers=1,tied=1,dropout=0.2", "llama,layers=1,heads=4,kv_heads=2,vocab=101"]
ALWAYS = (1, 2, 3, 4, 9)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@functools.cache
def drawn():
    return [c for c in space(DRAWN, 4).cases(30, 0) if c.layout.world > 1][:20]


def furthest(model, layout, checks):
    """The largest ‖a - b‖ ÷ ‖a‖ of what a rank has in a simulation and as a process, of one that is not 0 but for
    rounding; pieces lie alike."""
    program, job = Program(model), Job(checks)
    inputs, worst = inputs_of(program, layout, job), (0.0, "")
    simulated, processes = (run_on(engine, program, layout, job, inputs) for engine in ("simulated", "processes"))
    for one, other in zip(simulated, processes, strict=True):
        assert one.keys() == other.keys()
        for what, leaves in one.items():
            assert leaves.keys() == other[what].keys()
            for name, mine in leaves.items():
                theirs = other[what][name]
                assert mine.where == theirs.where and mine.placements == theirs.placements
                a, b = mine.value.double(), theirs.value.double()
                worst = max(worst, (float((a - b).norm() / (a.norm() + 1e-3)), f"{what} {name}"))
    return worst


@pytest.mark.parametrize("n", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.slow) for n in range(20)])
def test_both_engines_give_every_rank_the_same_pieces(n):
    """Both run the same operations and the same collectives, whose sums over ranks may be in another order: a sum of n
    numbers is then off by (n - 1) times the unit roundoff of 1.1e-16, and some tens of sums follow one another."""
    case = drawn()[n]
    worst = furthest(find_model(case.model), case.layout, ("init", "gradients"))
    print(f"{case.command}: {worst}")
    assert worst < (1e-13,), case.command


def test_an_engine_of_processes_is_compared_like_the_other():
    line = Layout.parse("fsdp=2 zero=1 packed mask=uneven")
    assert compare(MODEL, line, engine="processes", checks=("adamw",)).ok
    assert furthest(MODEL, line, ("adamw",)) < (1e-12,)


def test_processes_have_rules_of_one_s_own():
    line = Layout.parse("dp=2,tp=2 sp zero=3 store=dp+tp rules=mlp:none,vocab:none mask=uneven")
    assert compare(MODEL, line, engine="processes", checks=("gradients",)).ok
    assert furthest(MODEL, line, ("gradients",)) < (1e-13,)


def test_under_torchrun_layouts_have_its_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="layout dp=2 has 2 ranks, but torchrun started 4 processes: use --nproc-per-n"):
        compare(MODEL, "dp=2", engine="processes")


@pytest.mark.slow
def test_torchrun_s_processes_are_the_ranks(tmp_path):
    """Every process has the answers of all."""
    program = tmp_path / "check.py"
    program.write_text(
        "import os, torch\n"
        "from fmegatron.testing import assert_equivalent, small_model\n"
        "torch.set_num_threads(1)\n"
        "for line in ('tp=2 sp mask=uneven', 'cp=2 zero=3 context=ring packed'):\n"
        "    result = assert_equivalent(small_model('llama', layers=1), line, engine='processes')\n"
        "    print(os.environ['RANK'], result)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    root = str(Path(__file__).parents[1])
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}, timeout=300)
    assert run.returncode == 0, run.stderr
    told = run.stdout.splitlines()
    assert sorted(x.split(":")[0] for x in told) == sorted(
        f"{r} {line}" for r in (0, 1) for line in ("tp=2 sp mask=uneven", "cp=2 zero=3 context=ring packed")
    )


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
    lines = text[text.index("  #  layout") :].splitlines()
    assert lines[0].split()[:4] == ["#", "layout", "model", "worst"]
    assert "layouts of up to 2 ranks, all equal to one device: worst error" in lines[-1] and "(100 %)" in lines[-1]
    assert run(config) == 0
    again = capsys.readouterr().out
    again = again[again.index("  #  layout") :].splitlines()
    assert [x.split("  ")[1:3] for x in again[:-1]] == [x.split("  ")[1:3] for x in lines[:-1]]


def test_verify_one_layout_with_its_collectives(capsys):
    line = "tp=2 sp zero=0 rules=vocab:none mask=uneven"
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
