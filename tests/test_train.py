"""`fmegatron train`: stop and resume, what a run leaves, and values that are not finite."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fmegatron import checkpoint, cli, config, job, train, tree
from fmegatron.config import TrainConfig
from fmegatron.errors import UserError
from fmegatron.models.decoder import GATED
from fmegatron.signals import StopSignals
from tests.processes import processes
from tests.test_cli import ENVIRONMENT
from tests.train_runs import Killed, flags, go, losses, numbers, patch, patch_item, rows, write_corpus

torch.set_num_threads(1)
FOUR = ("--mesh", "dp=2,tp=2", "--sp", "--store", "dp")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.jsonl")


def on(world: int, arguments: list[str], stop=None):
    """`go` on so many ranks: the result that all of them share."""
    if world == 1:
        return go(arguments, stop)
    found = processes(world).run(go, arguments, stop)
    assert len(set(found)) == 1
    return found[0]


# ------------------------------------------------------------------------------------------------------ stop and resume


@pytest.mark.parametrize(("world", "mesh"), [(1, ()), (4, FOUR)])
def test_stopped_and_resumed_runs_equal_the_uninterrupted_one_bitwise(tmp_path, world, mesh) -> None:
    """Stopped off the save interval by SIGTERM, then killed, over the ends of epochs, with dropout and microbatches."""
    corpus = write_corpus(tmp_path / "text.jsonl", documents=9, words=20)
    mesh = (*mesh, "--model-overrides.layers", "1")
    common = dict(steps=6, dropout=0.1, batch_microbatches=2, checkpoint_every=3, eval_every=2, eval_batches=1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert on(world, flags(corpus, whole, *mesh, **common)) == 0
    assert on(world, flags(corpus, parts, *mesh, **common), (2, "SIGTERM")) == 0
    assert checkpoint.latest(parts).name == "step_00000002"
    corpus.unlink()  # a run that goes on has what it needs
    again = ["--out", str(parts), "--resume"]
    assert on(world, again, (5, "kill")) == "killed"
    assert checkpoint.latest(parts).name == "step_00000003"
    assert len(losses(parts)) == 5
    assert on(world, again) == 0
    assert numbers(parts) == numbers(whole)
    assert [row["step"] for row in rows(parts) if "loss" in row] == list(range(1, 7))
    assert [row["step"] for row in rows(parts) if "val_loss" in row] == [2, 4, 6]
    config_, data = cli.parse_train(again), train.prepared(parts / "data")
    epoch = len(train.open_data(config_, data)[0])
    assert 3 * 8 < 2 * epoch < 6 * 8 and epoch % 8  # it did go over the ends of epochs, inside of batches
    ended = [checkpoint.latest(out) for out in (whole, parts)]
    for name in checkpoint.info(ended[0]).files:
        if name.endswith(".safetensors"):
            held = [load_file(folder / name) for folder in ended]
            assert held[0].keys() == held[1].keys()
            assert all(torch.equal(held[0][k], held[1][k]) for k in held[0])


def test_a_run_goes_on_with_another_mesh(tmp_path, corpus) -> None:
    """Four ranks, then one, then four: as close as two meshes are, in float64."""
    common = dict(steps=9, precision_params="float64", dropout=0.1, optim_schedule="constant")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert on(1, flags(corpus, whole, **common)) == 0
    assert on(4, flags(corpus, parts, *FOUR, **common), (3, "SIGTERM")) == 0
    again = ["--out", str(parts), "--resume"]
    assert on(1, [*again, "--mesh", "None", "--no-sp", "--store"], (6, "SIGTERM")) == 0
    assert on(4, [*again, *FOUR]) == 0
    torch.testing.assert_close(losses(parts), losses(whole), rtol=1e-8, atol=0)


def test_a_recorded_run_is_the_run(tmp_path, corpus) -> None:
    """Bitwise, its evaluations too, and where it goes on, recorded anew or not."""
    common = dict(steps=9, dropout=0.1, eval_every=4, checkpoint_every=4)
    plain, played = tmp_path / "plain", tmp_path / "played"
    one = ("--model-overrides.layers", "1")
    assert go(flags(corpus, plain, *one, **common)) == 0
    assert go(flags(corpus, played, "--recorded", *one, **common), (4, "SIGTERM")) == 0
    assert go(["--out", str(played), "--resume"]) == 0
    assert numbers(played) == numbers(plain)


def test_more_steps_change_nothing_of_the_data(tmp_path, corpus) -> None:
    common = dict(optim_schedule="constant", dropout=0.1)
    long, short = tmp_path / "long", tmp_path / "short"
    assert go(flags(corpus, long, steps=8, **common)) == 0
    assert go(flags(corpus, short, steps=3, **common)) == 0
    assert go(["--out", str(short), "--resume", "--steps", "8"]) == 0
    assert losses(short) == losses(long)
    assert len(checkpoint_steps(short)) == 2 and checkpoint_steps(long) == [8]


def checkpoint_steps(out: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in (out / "checkpoints").glob("step_*"))


def test_a_run_killed_before_its_first_checkpoint_begins_anew(tmp_path, corpus) -> None:
    out = tmp_path / "run"
    assert go(flags(corpus, out, steps=6), (2, "kill")) == "killed"
    assert checkpoint.latest(out) is None
    assert go(["--out", str(out), "--resume"]) == 0
    assert [row["step"] for row in rows(out) if "loss" in row] == list(range(1, 7))
    assert ", from the first step" in (out / "log.txt").read_text()


def test_settings_of_a_resume(tmp_path) -> None:
    """Those of the run, then those of the file, then the flags; the folder may have been moved."""
    saved = TrainConfig(
        out="elsewhere", steps=9, store=("dp",), optim=dataclasses.replace(TrainConfig().optim, lr=1.0, clip=7.0)
    )
    config.save_config(saved, tmp_path / config.SETTINGS)
    (tmp_path / "file.toml").write_text("steps = 20\n[optim]\nlr = 2.0\n")
    arguments = ["--resume", "--out", str(tmp_path), "--config", str(tmp_path / "file.toml"), "--steps", "30"]
    expected = dataclasses.replace(
        saved, out=str(tmp_path), resume=True, steps=30, optim=dataclasses.replace(saved.optim, lr=2.0)
    )
    assert cli.parse_train(arguments) == expected
    assert cli.parse_train(arguments[1:]).store == ()  # without --resume they are not looked at
    (tmp_path / config.SETTINGS).write_text("stepz = 3")
    with pytest.raises(UserError, match="config.toml: unknown key 'stepz'; the nearest known key is 'steps'"):
        cli.parse_train(arguments)


def test_the_tokenizer_of_a_resumed_run_stays(tmp_path, corpus) -> None:
    out, other = tmp_path / "run", tmp_path / "other"
    assert go(flags(corpus, out, steps=2)) == 0
    more = write_corpus(tmp_path / "more.jsonl", words=80, seed=1)
    assert go(flags(more, other, steps=2)) == 0
    kept = (out / "data/tokenizer/tokenizer.json").read_bytes()
    assert kept != (other / "data/tokenizer/tokenizer.json").read_bytes()
    again = ["--out", str(out), "--resume"]
    with pytest.raises(UserError, match="--tokenizer .* is not the one that .*step_00000002 was trained with"):
        go([*again, "--steps", "4", "--tokenizer", str(other / "data/tokenizer")])
    assert go([*again, "--steps", "4", "--data", str(more)]) == 0  # other text, the same tokenizer
    assert (out / "data/tokenizer/tokenizer.json").read_bytes() == kept
    first = TrainConfig(), train.prepared(out / "data").train.tokens
    assert first[1] > 1.5 * 56 * 40
    write_corpus(corpus.with_name("changed.jsonl"), seed=5)
    shutil.rmtree(out / "data")  # and where it was removed, a text that makes another tokenizer is refused
    with pytest.raises(UserError, match="is not the one that .* was trained with"):
        go([*again, "--steps", "6", "--data", str(corpus.with_name("changed.jsonl"))])


# ------------------------------------------------------------------------------------------------- signals to real programs


def start(*arguments: object, cwd: Path, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_steps(out: Path, steps: int, process: subprocess.Popen) -> None:
    end = time.monotonic() + 90
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_bytes().splitlines()) < steps:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)


def test_ctrl_c_under_nproc_saves_and_ends_cleanly(tmp_path, corpus) -> None:
    """One command starts two ranks; they stop after the same step, print once, and the run goes on bitwise equal."""
    out = tmp_path / "run"
    common = dict(steps=100000, optim_schedule="constant", dropout=0.1)
    process = start("fmegatron", "train", *flags(corpus, out, **common), "--nproc", 2, "--mesh", "tp=2", cwd=tmp_path)
    wait_for_steps(out, 5, process)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    (step,) = checkpoint_steps(out)
    assert f"stopped by SIGINT after step {step}; go on with: fmegatron train --out {out} --resume\n" in printed
    assert printed.count("first step after") == 1
    assert (out / "log.txt").read_text() == printed
    whole = tmp_path / "whole"
    assert on(2, flags(corpus, whole, "--mesh", "tp=2", **{**common, "steps": step + 3})) == 0
    assert on(2, ["--out", str(out), "--resume", "--steps", str(step + 3)]) == 0
    assert losses(out) == losses(whole)


def test_a_sigkill_loses_nothing_but_the_steps_since_the_last_checkpoint(tmp_path, corpus) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"
    common = dict(optim_schedule="constant", dropout=0.1, checkpoint_every=7)
    process = start("fmegatron", "train", *flags(corpus, out, steps=100000, **common), cwd=tmp_path)
    wait_for_steps(out, 17, process)
    process.kill()
    process.communicate()
    step = checkpoint.info(out).step
    assert step % 7 == 0 and step >= 7
    assert go(["--out", str(out), "--resume", "--steps", str(step + 2)]) == 0
    assert go(flags(corpus, whole, steps=step + 2, **common)) == 0
    assert [row["step"] for row in rows(out) if "loss" in row] == list(range(1, step + 3))
    assert losses(out) == losses(whole)


def test_a_signal_that_comes_while_the_ranks_agree_is_not_lost(monkeypatch) -> None:
    """It comes in the middle of the collective, when this rank has given its answer already: then at the next call."""
    stop = StopSignals()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, op: stop.take(signal.SIGTERM, None))
    assert not stop.agreed()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, op: None)
    assert stop.agreed() and stop.asked == "SIGTERM"


def test_a_signal_during_the_last_evaluation(tmp_path, corpus) -> None:
    out = tmp_path / "run"
    with contextlib.ExitStack() as stack:

        def held_out(self, *arguments, real=train.Loop.held_out, **options):
            os.kill(os.getpid(), signal.SIGTERM)
            return real(self, *arguments, **options)

        patch(stack, train.Loop, "held_out", held_out)
        assert go(flags(corpus, out, steps=3)) == 0
    assert checkpoint_steps(out) == [3]
    assert "stopped by SIGTERM in the last evaluation; all steps are made" in (out / "log.txt").read_text()


# ------------------------------------------------------------------------------------------------------- what a run leaves


def test_what_a_run_leaves_and_prints(tmp_path, corpus, capsys) -> None:
    out = tmp_path / "run"
    arguments = flags(corpus, out, "--log.tensorboard", steps=6, eval_every=2, checkpoint_every=2, checkpoint_keep=0)
    assert cli.main(["train", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert (out / "log.txt").read_text() == printed.out
    for text in (
        "tokens; 6 steps read the training text",
        "GFLOP/s measured on each rank: what MFU refers to",
        "first step after",
        "MFU",
        " left",
        "validation loss       ",
        "unigram entropy       ",
        "bits per byte         ",
        "\nsample\n    ",
        f"checkpoint            {out}/checkpoints/step_00000006\n",
        f"fmegatron train --out {out} --resume --steps 12\n",
        f"fmegatron generate --checkpoint {out} --prompt ",
        f"fmegatron export --checkpoint {out} --to hf --out {out}/hf\n",
    ):
        assert text in printed.out, text
    steps = [row for row in rows(out) if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 7))
    for row in steps:
        assert {"step", "loss", "tokens", "lr", "grad_norm", "ms", "tokens_per_s", "mfu", "param_norm"} <= row.keys()
        assert row["tokens"] == 8 * 16
    evaluations = [row for row in rows(out) if "val_loss" in row]
    assert [row["step"] for row in evaluations] == [2, 4, 6]
    assert all("loss" not in row for row in evaluations)
    assert (out / "loss.svg").read_text().startswith("<svg")
    assert any((out / "tensorboard").iterdir())
    assert checkpoint_steps(out) == [2, 4, 6]
    resolved = config.load_config(TrainConfig, out / "config.toml")
    assert resolved == dataclasses.replace(cli.parse_train(arguments), model="tiny")
    assert cli.main(["train", "--config", str(out / "config.toml"), "--out", str(tmp_path / "again")]) == 0
    assert losses(tmp_path / "again") == losses(out)


def test_the_last_loss_is_that_of_all_held_out_tokens(tmp_path, corpus) -> None:
    """Against a plain loop over the held-out stream, one sequence at a time, in float64."""
    out = tmp_path / "run"
    assert go(flags(corpus, out, steps=2, precision_params="float64")) == 0
    from fmegatron.generate import load_run

    model, params, tokenizer, _ = load_run(str(out), device=torch.device("cpu"))
    stream = torch.from_numpy(
        train.TokenDataset(out / "data/valid_text_document", seq_len=1, order="sequential").tokens.astype("int64")
    )
    total, sh = 0.0, train.Sharding(precision=job.Precision(params=torch.float64))
    for at in range(0, len(stream) - 1, 16):
        part = stream[at : at + 17]
        logits = model.logits(params, part[None, :-1], job_context(sh))[0]
        total += float(torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum"))
    last = rows(out)[-1]
    assert last["val_loss"] == pytest.approx(total / (len(stream) - 1), rel=1e-12)
    size = len("".join(tokenizer.decode(d) for d in [stream.tolist()]).encode())
    assert last["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-12)


def job_context(sh):
    from fmegatron.context import Ctx

    return Ctx(sh=sh)


def test_held_out_text_smaller_than_a_batch(tmp_path) -> None:
    """Two short documents, one of them held out: less than one sequence for a batch of 8; on 1 and on 4 ranks alike."""
    corpus = tmp_path / "two.jsonl"
    corpus.write_text(
        '{"text": "' + "one two three four " * 12 + '"}\n{"text": "five"}\n{"text": "' + "six seven " * 30 + '"}\n'
    )
    common = dict(steps=2, eval_every=1, batch_size=4, precision_params="float64")
    assert on(1, flags(corpus, tmp_path / "one", **common)) == 0
    assert on(4, flags(corpus, tmp_path / "four", "--mesh", "dp=4", **common)) == 0
    one, four = ([r["val_loss"] for r in rows(tmp_path / n) if "val_loss" in r] for n in ("one", "four"))
    assert len(one) == 2 and all(math.isfinite(x) for x in one)
    torch.testing.assert_close(four, one, rtol=1e-10, atol=0)


def test_every_setting_is_a_flag(tmp_path) -> None:
    """One command line that changes all of them; its settings, saved and loaded, are the same."""
    by_type = {int: "3", float: "0.5", str: "word", tuple: "axis"}
    special = {
        "optim.schedule": "wsd",
        "optim.name": "muon",
        "optim.wsd_form": "minus_sqrt",
        "optim.muon_adjust": "none",
        "optim.momentum": "0.5",
        "optim.ema": "0.5",
        "remat": "nothing",
        "cp": "ring",
        "schedule": "zbv",
        "fp8": "rowwise",
        "kernels": "torch",
        "microbatch_overlap": "pairs",
        "precision.fp8_gradients": "e4m3",
        "precision.wire": "bfloat16",
        "precision.fp8_unaligned": "keep",
        "precision.fp8_backend": "native",
        "keep_probabilities": "True",
        "model_overrides.pattern": "window",
        "model_overrides.qk_norm": "head",
        "model_overrides.activation": "relu2",
        "precision.loss_scale": "dynamic",
        **dict.fromkeys([f"model_overrides.{n}_bias" for n in ("qkv", "out", "mlp")], "True"),
        **dict.fromkeys([f"model_overrides.fused_{n}" for n in ("qkv", "gate_up")], "True"),
        "model_overrides.family": "gpt2",
        "moe.scores": "sigmoid",
        "moe.choose": "sinkhorn",
        "moe.dtype": "float64",
        "moe.drop": "position",
        "moe.group": "batch",
        "moe.force": "balanced",
        **dict.fromkeys(("moe.normalised", "moe.expert_bias", "moe.two_passes"), "True"),
        "moe.dense_layers": "0,1",
        "dispatch": "dense",
        "batch.size": "6",
        "model_overrides.tied": "True",
        "model_overrides.rope_theta": "500.0",
        **dict.fromkeys(("data", "tokenizer", "mesh"), "word"),
        **dict.fromkeys(
            [f"precision.{name}" for name in ("params", "compute", "reduce", "master", "moments")], "float64"
        ),
    }
    default = {path: value for path, _, value in config._settings(TrainConfig())}
    arguments = []
    for path, value in default.items():
        *group, name = path.replace("_", "-").split(".")
        if path in ("config", "out", "resume"):
            continue
        if isinstance(value, bool):
            arguments.append("--" + ".".join([*group, f"no-{name}" if value else name]))
        else:
            arguments += ["--" + ".".join([*group, name]), special.get(path) or by_type.get(type(value), "3")]
    got = cli.parse_train(arguments)
    unchanged = {path for path, _, value in config._settings(got) if value == default[path]}
    assert unchanged == {"config", "out", "resume"}
    config.save_config(got, tmp_path / "config.toml")
    assert cli.parse_train(["--config", str(tmp_path / "config.toml")]) == got


def test_the_sample_of_divided_parameters_is_that_of_whole_ones(tmp_path, corpus) -> None:
    one, four = tmp_path / "one", tmp_path / "four"
    assert on(1, flags(corpus, one, steps=2, precision_params="float64")) == 0
    assert on(4, flags(corpus, four, *FOUR, steps=2, precision_params="float64")) == 0
    samples = [(out / "log.txt").read_text().split("\nsample\n")[1].split("\ncheckpoint")[0] for out in (one, four)]
    assert samples[0] == samples[1] and len(samples[0]) > 40


# --------------------------------------------------------------------------------------------------- values not finite


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, corpus, capsys) -> None:
    out = tmp_path / "run"
    arguments = flags(
        corpus, out, "--debug", steps=40, optim_lr="1e30", optim_warmup=0, optim_schedule="constant", checkpoint_every=1
    )
    assert cli.main(["train", *arguments]) == 1
    printed = capsys.readouterr().out
    failed = len(losses(out)) + 1
    assert failed > 1
    assert (
        f"stopped at step {failed}: the gradient of 'embed' is not finite. Nothing was changed by this step" in printed
    )
    assert checkpoint.info(out).step == failed - 1 and f"checkpoints/step_{failed - 1:08}" in printed
    saved = checkpoint.load(out, initial(arguments))
    assert all(bool(torch.isfinite(t).all()) for t in tree.leaves(saved) if isinstance(t, torch.Tensor))
    assert f"--debug: step {failed}: aten." in printed and "of finite inputs of shapes [" in printed
    assert "primitives/norm.py" in printed.split("--debug: ")[1]  # the norm of numbers whose squares are too large


def initial(arguments: list[str]):
    config_ = cli.parse_train(arguments)
    setup = job.make_setup(config_, torch.device("cpu"), 1)
    sizes = job.model_config(config_, train.prepared(Path(config_.out) / "data").vocab_size)
    return job.initial_state(config_, job.make_run(config_, sizes, setup))


def spoilt(arguments: list[str], path: str, stop=None):
    """`go` with a NaN put into one parameter of the initial state, on the last rank that holds it."""
    with contextlib.ExitStack() as stack:

        def initial_state(*arguments, real=job.initial_state):
            state = real(*arguments)
            leaf = tree.named(state.params)[path]
            (leaf.to_local() if hasattr(leaf, "to_local") else leaf).view(-1)[-1] = float("nan")
            return state

        patch(stack, job, "initial_state", initial_state)
        return go(arguments)


def test_debug_names_a_parameter_that_was_not_finite_before(tmp_path, corpus) -> None:
    out = tmp_path / "run"
    assert processes(2).run(spoilt, flags(corpus, out, "--debug", "--mesh", "tp=2", steps=3), "layers.1.up") == [1, 1]
    log = (out / "log.txt").read_text()
    assert "stopped at step 1: the loss term 'lm' is not finite" in log and "there is no checkpoint yet" in log
    assert "--debug: step 1: params.layers.1.up is not finite already before the step" in log


def overflowing(arguments: list[str]) -> object:
    """`go` where on the second rank alone the rotary table of step 3 becomes infinite, by a division of finite numbers."""
    import torch.distributed as dist

    calls = 0
    with contextlib.ExitStack() as stack:

        def swiglu(gate, up, real=GATED["swiglu"]):
            nonlocal calls
            calls += 1
            y = real(gate, up)
            return y / torch.zeros(()) if dist.get_rank() == 1 and calls > 4 else y

        patch_item(stack, GATED, "swiglu", swiglu)
        return go(arguments)


def test_debug_on_several_ranks_names_the_operation_of_the_rank_where_it_arose(tmp_path, corpus) -> None:
    out = tmp_path / "run"
    found = processes(2).run(overflowing, flags(corpus, out, "--debug", "--mesh", "tp=2", steps=5))
    assert found == [1, 1]
    log = (out / "log.txt").read_text()
    assert "stopped at step 3: the loss term 'lm' is not finite" in log
    assert "--debug: step 3: aten.div.Tensor of finite inputs of shapes [" in log and "in swiglu" in log


def test_a_gradient_that_is_not_finite_is_named(tmp_path, corpus) -> None:
    """The loss is finite; only the gradient of one leaf is not."""
    out = tmp_path / "run"
    with contextlib.ExitStack() as stack:

        def swiglu(gate, up, real=GATED["swiglu"]):
            y = real(gate, up)
            if gate.requires_grad:
                gate.register_hook(lambda g: g * float("inf"))
            return y

        patch_item(stack, GATED, "swiglu", swiglu)
        assert go(flags(corpus, out, steps=3, checkpoint_every=1, remat="everything")) == 1
    assert "stopped at step 1: the gradient of " in (out / "log.txt").read_text()
    assert checkpoint.latest(out) is None and losses(out) == []


def test_a_killed_run_is_no_exception_that_the_run_takes(tmp_path, corpus) -> None:
    """The stand-in for SIGKILL of these tests does end the run where it is raised."""
    assert not issubclass(Killed, Exception)
    assert go(flags(corpus, tmp_path / "run", steps=3), (3, "kill")) == "killed"
    assert checkpoint_steps(tmp_path / "run") == []
