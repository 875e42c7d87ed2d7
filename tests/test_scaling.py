"""The benchmark of several GPUs: exposed communication, which layouts it checks, its aims, and some items on two processes."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from fmegatron.bench.exposed import Communication, communication, length, merged, traced, uncovered
from fmegatron.bench.peers_megatron import part_of
from fmegatron.testing import Layout, processes
from fmegatron.testing.models import find_model
from fmegatron.testing.program import Program
from tests.bench import scaling, scaling_items, scaling_rank
from tests.bench.scaling_items import LARGE, PARTS, SMALL

CPU = torch.device("cpu")


def test_unions_of_intervals():
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4), (7, 7)]) == [(0, 4), (5, 6)]
    assert length([(0, 2), (1, 3), (10, 11)]) == 4
    assert uncovered([(0, 10)], [(2, 3), (8, 12)]) == 7
    assert uncovered([(0, 10)], []) == 10
    assert uncovered([], [(0, 1)]) == 0


def test_communication_that_nothing_runs_beside():
    """By hand: NCCL in 0..4 (of which a product covers 1..3), 10..12 (under attention), 20..21 and on another stream
    20.5..22 (alone); nothing at all in 4..9, 13..20."""
    kernels = [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0.0, 4.0),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", 1.0, 3.0),
        ("flash_fwd", 9.0, 13.0),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 10.0, 12.0),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 20.0, 21.0),
        ("Memcpy PtoP (Device -> Device)", 20.5, 22.0),
    ]
    found = communication(kernels)
    assert found == Communication(total=4 + 2 + 2, exposed=1 + 1 + 2, span=22.0, idle=5 + 7)
    assert communication([]) == Communication(0, 0, 0, 0)
    assert traced(lambda: None, CPU) is None


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_all_layouts_are_legal_and_of_all_gpus(gpus):
    for model, line in (*scaling_items.first_layouts(gpus), *scaling_items.more_layouts(gpus)):
        layout = Layout.parse(line)
        assert layout.world == gpus and Program(find_model(model)).why_illegal(layout) is None, line
    for sizes in (LARGE, SMALL):
        jobs = scaling_items.jobs([p for p in PARTS if p != "drawn"], gpus, sizes)
        items = [i for job in jobs for i in job.items]
        assert all(i.ranks == job.ranks <= gpus for job in jobs for i in job.items)
        assert all(Layout.parse(i.layout).world in (1, i.ranks) for i in items)
        assert {i.part for i in items} == set(PARTS) - {"drawn"}
        keys = {i.key for i in items}
        assert all(scaling_items.reference_of(i, sizes) in keys for i in items if i.kind != "check")


def row(part, name, ms, *, sizes=LARGE, **fields):
    """A row of a job, as it was measured."""
    every = [i for job in scaling_items.jobs([part], 8, sizes) for i in job.items]
    item = next(i for i in every if (i.part, i.name) == (part, name))
    return item.key, {**asdict(item), "backward": [ms] * 3, "step": [ms + 20.0] * 3, "loss": 4.0, **fields}


def test_rates_and_aims():
    """500 and 520 ms on one GPU. With 8 times the batch on 8: 525 ms are 0.952. Attention: 80 ms alone, 11 on 8 ranks are 1.1
    of 10."""
    rows = dict(
        [
            row("data", "one GPU", 500.0),
            row("data", "FSDP", 526.0),
            row("data", "ZeRO-1", 530.0),
            row("tensor", "TP=2 with SP", 590.0),
            row("tensor", "Megatron-core TP=2 with SP", 600.0),
            row("context", "attention, one GPU", 80.0),
            row("context", "attention, ring", 11.0),
            row("context", "one GPU, long", 1900.0),
            row("context", "CP, ring", 1000.0),
        ]
    )
    assert scaling.ratio(rows["data: FSDP"], rows, LARGE, "step") == pytest.approx(520 / 546)
    # four sequences on eight GPUs: half of what one GPU computed
    assert scaling.ratio(rows["context: CP, ring"], rows, LARGE, "backward") == pytest.approx(0.95)
    found = [(round(a.value, 4), a.passed) if a.value else None for a in scaling.aims(rows, LARGE, 8)]
    assert found == [(0.9524, True), (0.9455, False), (0.9833, True), (0.9839, True), (1.1, True), None]


def test_what_a_job_wrote_is_taken_and_what_it_did_not_end_begins_anew(tmp_path):
    items = [i for job in scaling_items.jobs(["data"], 2, SMALL) for i in job.items][:3]
    todo = {i.key: i for i in items}
    a = Namespace(minutes=1.0, device="cpu", gpus=2, out=tmp_path / "x.json", parts=["data"], only=None)
    run = scaling.Run(a, SMALL, scaling.time.time() + 60)
    key, one = row("data", "one GPU", 5.0, sizes=SMALL, seconds=1.0)
    lines = [{"about": {"device": "none"}}, {"begun": key}, {"row": one, "key": key}, {"begun": items[1].key}]
    out = tmp_path / "0.jsonl"
    out.write_text("\n".join(map(json.dumps, lines)) + '\n{"row": {"na')
    assert run._take(out, todo) == items[1].key == "data: FSDP"
    assert list(todo) == [i.key for i in items[1:]] and list(run.rows) == [key]
    assert "5.0" in scaling.report(run, SMALL) and run.about == {"device": "none"}
    run.save(0.0)
    assert json.loads(a.out.read_text())["rows"][0]["name"] == "one GPU"


def test_a_rank_s_part_of_megatrons_weights():
    w = torch.arange(24.0).view(8, 3)
    parts = [part_of("decoder.layers.0.mlp.linear_fc1.weight", w, r, 2) for r in (0, 1)]
    assert torch.equal(torch.cat([x[i * 2 : i * 2 + 2] for i in (0, 1) for x in parts]), w)
    assert torch.equal(part_of("decoder.layers.0.self_attention.linear_qkv.weight", w, 1, 2), w[4:])
    assert torch.equal(part_of("decoder.layers.0.mlp.linear_fc2.weight", w.T, 1, 2), w.T[:, 4:])
    norm = torch.ones(4)
    assert part_of("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", norm, 1, 2) is norm


def measure(out, wanted):
    """Some items of the benchmark, on this process of the pool."""
    items = [i for job in scaling_items.jobs(PARTS[:-1], 2, SMALL) for i in job.items if i.name in wanted]
    rank = scaling_rank.Rank(CPU, replace(SMALL, dense=replace(SMALL.dense, layers=2), warmup=0, rounds=1), Path(out))
    scaling_rank.work(list({i.key: i for i in items}.values()), rank, scaling.time.time() + 60)


@pytest.mark.xdist_group("gloo")
def test_items_on_two_processes_compute_one_function(tmp_path):
    wanted = ["one GPU", "FSDP", "TP=2 with SP", "PP=2, zbv", "attention, ring"]
    processes(2).run(measure, str(tmp_path / "out.jsonl"), wanted)
    rows = [x["row"] for x in scaling._lines(tmp_path / "out.jsonl") if "row" in x]
    found = {r["name"]: r for r in rows}
    assert set(found) == set(wanted)
    assert all(len(r["backward"]) == 1 and "failed" not in r for r in rows)
    # of one global batch and one set of parameters
    losses = [found[n]["loss"] for n in ("FSDP", "TP=2 with SP", "PP=2, zbv")]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@pytest.mark.slow
def test_the_whole_benchmark_on_two_processes(tmp_path):
    program = Path(scaling.__file__)
    command = [
        sys.executable,
        str(program),
        "--gpus",
        "2",
        "--device",
        "cpu",
        "--small",
        "--out",
        str(tmp_path / "x.json"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "x.json").read_text())
    assert {r["part"] for r in found["rows"]} == set(PARTS)
