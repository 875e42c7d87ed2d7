"""A SIGKILL at any moment of a save loses nothing. FMEGATRON_KILLS says at how many random moments (20)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# Forks from one process that has imported torch and computed nothing: a child costs milliseconds, not an import.
PROGRAM = '''
import json, os, random, shutil, signal, sys, time
import torch
from fmegatron import checkpoint

torch.set_num_threads(1)
run, how = sys.argv[1], sys.argv[2]
like = {"w": torch.empty(1000), "step": 0}


def save(step):
    checkpoint.save(run, {"w": torch.full((1000,), float(step)), "step": step}, step=step, keep=1)


def say(step):  # what was surely saved, written before a kill can come
    with open(run + ".new", "w") as file:
        file.write(str(step))
    os.replace(run + ".new", run + ".saved")


def check(step):
    """Whatever was saved is there; perhaps a newer one is, which was complete before the kill."""
    state = checkpoint.load(run, like)
    assert state["step"] >= step, (state["step"], step, os.listdir(run + "/checkpoints"))
    assert (state["w"] == state["step"]).all(), state
    return state["step"]


def child(start):
    step = start
    while True:
        step += 1
        save(step if how == "random" else start)
        say(step)


def in_child(f):
    pid = os.fork()
    if pid == 0:
        try:
            f()
        finally:
            os._exit(1)
    return pid


def at_random(kills):
    generator, step = random.Random(0), 0
    save(0), say(0)
    for _ in range(kills):
        before = int(open(run + ".saved").read())
        pid = in_child(lambda: child(step))
        while int(open(run + ".saved").read()) < before + 1:
            time.sleep(0.0005)
        time.sleep(generator.random() * 0.03)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        step = check(int(open(run + ".saved").read()))
    print(json.dumps({"steps": step}))


def at_every_change(again):
    """Kill before the n-th change of the file system, for every n; `again` saves the step that is there already."""
    n = done = 0
    while not done:
        shutil.rmtree(run, ignore_errors=True)
        save(1)
        pid = in_child(lambda: (count_down(n), save(1 if again else 2), os._exit(0)))
        done = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert done or n < 200
        check(1)
        save(3)
        assert os.listdir(run + "/checkpoints") == ["step_00000003"] and check(3) == 3
        n += 1
    print(json.dumps({"moments": n - 1}))


def count_down(n):
    left = [n]

    def counted(original):
        def call(*args, **kwargs):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return original(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir", "replace"):
        setattr(os, name, counted(getattr(os, name)))


if how == "random":
    at_random(int(sys.argv[3]))
else:
    at_every_change(how == "again")
'''


def run(folder: Path, *arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kills_at_random_moments(tmp_path):
    result = run(tmp_path / "run", "random", os.environ.get("FMEGATRON_KILLS", "20"))
    assert result["steps"] > 0


def test_kills_before_every_change_of_the_file_system(tmp_path):
    assert run(tmp_path / "run", "next")["moments"] >= 10


def test_kills_while_a_step_is_saved_again(tmp_path):
    assert run(tmp_path / "run", "again")["moments"] >= 10
