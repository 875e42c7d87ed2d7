"""Every example runs as its docstring says, from an empty folder, and prints what it proves (each program asserts it too).

On one process in this one, which has loaded torch already; on several by torchrun.
"""

import contextlib
import importlib
import io
import os
import re
import runpy
import subprocess
import sys
import warnings
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
import torch

from fmegatron.testing import assert_equivalent

torch.set_num_threads(1)
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RANKS = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"
NUMBER = r"-?\d+\.\d+"


def output(name: str, *arguments: str, folder: Path, launcher: tuple[str, ...] = ()) -> str:
    if not launcher:
        return output_here(name, *arguments, folder=folder)
    environment = {
        **os.environ,
        "PYTHONPATH": str(EXAMPLES.parent),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def output_here(name: str, *arguments: str, folder: Path) -> str:
    """What an example prints that runs in this process as a program, with torch's settings as they are at a start."""
    before, printed = (sys.argv, torch.get_default_dtype(), torch.get_rng_state()), io.StringIO()
    try:
        sys.argv = [str(EXAMPLES / name), *arguments]
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", module="torch")  # its own deprecations are no example's
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv, dtype, state = before
        torch.set_default_dtype(dtype)
        torch.set_rng_state(state)
    return printed.getvalue()


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers that the groups of a pattern find, once."""
    (found,) = re.findall(pattern, text)
    return [float(x) for x in ([found] if isinstance(found, str) else found)]


def test_per_example_gradients(tmp_path):
    text = output("per_example_gradients.py", folder=tmp_path)
    assert all(error < 1e-13 for error in numbers(r"gradient to (\S+), each is its example's alone to (\S+)", text))
    small, large = re.findall(
        rf"the example of norm ({NUMBER}) moves the clipped sum by ({NUMBER}) \(bound 7.0\)", text
    )
    assert small[0] == small[1] and float(large[0]) > float(large[1]) == 7
    first, last = numbers(rf"20 steps of DP-SGD: loss ({NUMBER}) -> ({NUMBER})", text)
    assert last < first


def sharpness(text: str) -> list[float]:
    return [float(x) for x in re.findall(rf"({NUMBER}) (?:on|by)", text)]


def test_hessian_vector_product(tmp_path):
    text = output("hessian_vector_product.py", folder=tmp_path)
    sharded, alone, converged, dense = sharpness(text)
    assert "on 4 simulated ranks" in text and abs(sharded - alone) < 1e-10 and abs(converged - dense) < 1e-10


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_hessian_vector_product_on_real_ranks(tmp_path):
    text = output("hessian_vector_product.py", "dp=2,tp=2", folder=tmp_path, launcher=(*RANKS, "4"))
    sharded, alone, *_ = sharpness(text)
    assert "on 4 real ranks" in text and abs(sharded - alone) < 1e-10


def test_ensemble(tmp_path):
    text = output("ensemble.py", "--members", "3", folder=tmp_path)
    assert numbers(r"3 members: .* equal to (\S+)", text)[0] < 1e-11
    first, member, both = numbers(rf"loss: ({NUMBER}) at first, a member ({NUMBER}), the ensemble ({NUMBER})", text)
    assert both < member < first


def test_maml(tmp_path):
    text = output("maml.py", "--steps", "50", folder=tmp_path)
    exact, first_order = numbers(r"off by (\S+) \(first-order MAML: (\S+)\)", text)
    assert exact < 1e-7 < 1e-3 < first_order
    before, after = numbers(rf"({NUMBER}), and ({NUMBER}) after 50 outer steps", text)
    assert after < before / 2


def test_custom_attention(tmp_path):
    text = output("custom_attention.py", folder=tmp_path)
    assert "annotations checked for every layout" in text
    assert "a mix of local heads is refused: einsum: reduces or merges the dim that on_heads shards" in text
    values = re.findall(rf"({NUMBER}) (?:alone|on \S+, gradients to \d)", text)
    assert len(values) == 4 and max(map(float, values)) - min(map(float, values)) < 1e-11


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_custom_attention_on_real_ranks(tmp_path):
    text = output("custom_attention.py", "dp=1,tp=2", folder=tmp_path, launcher=(*RANKS, "2"))
    alone, sharded = map(float, re.findall(rf"({NUMBER}) (?:alone|on dp=1,tp=2)", text))
    assert abs(alone - sharded) < 1e-11


def test_mup(tmp_path):
    text = output("mup.py", "--out", "coordinates.svg", "--widths", "64", "128", "256", folder=tmp_path)
    slopes = {scheme: [] for scheme in ("standard", "µP")}
    for scheme, slope in re.findall(rf"^(standard|µP) .* slope ([+-]{NUMBER})$", text, re.MULTILINE):
        slopes[scheme].append(float(slope))
    assert len(slopes["µP"]) == len(slopes["standard"]) == 3
    assert max(map(abs, slopes["µP"])) < 0.1 and min(slopes["standard"]) > 0.3
    picture = xml.parse(tmp_path / "coordinates.svg").getroot()
    assert len(picture.findall("{*}polyline")) == 6


def test_verify_own_model(tmp_path):
    lines = output("verify_own_model.py", folder=tmp_path).splitlines()
    assert len(lines) >= 10 and len({line.split(":")[0] for line in lines}) >= 5  # distinct layouts
    assert all("equal, worst" in line for line in lines) and any("tp=" in line for line in lines)


def losses(text: str) -> list[str]:
    return re.findall(rf"^ *\d+  ({NUMBER})$", text, re.MULTILINE)


def test_own_moe(tmp_path):
    printed = losses(output("own_moe.py", folder=tmp_path))
    assert len(printed) == 20 and float(printed[-1]) < float(printed[0]) / 3


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_own_moe_on_real_ranks(tmp_path):
    alone = losses(output("own_moe.py", folder=tmp_path))
    found = losses(output("own_moe.py", "dp=2,tp=2", "4", folder=tmp_path, launcher=(*RANKS, "4")))
    assert max(abs(float(a) - float(b)) for a, b in zip(alone, found, strict=True)) < 1e-4


@pytest.mark.parametrize("layout", ["dp=2 ep=2", "dp=2,tp=2 sp ep=4 zero=3"])
def test_own_moe_is_the_same_on_every_layout(layout, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    assert_equivalent(importlib.import_module("own_moe"), layout)


def test_own_moe_takes_less_than_100_lines():
    assert len((EXAMPLES / "own_moe.py").read_text().splitlines()) < 100


def test_every_example_is_tested_and_says_how_to_run_it():
    here = Path(__file__).read_text() + (Path(__file__).parent / "test_packaging.py").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in here, f"{path.name} has no test"
        assert f"python {path.name}" in path.read_text(), f"{path.name} does not say how to run it"
