"""Options of `fmegatron train`: families, losses, optimizers, number formats, what is recomputed.

Each is compared with something made by hand from torch's own parts, and goes on from a checkpoint bitwise.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fmegatron import checkpoint, cli, job, optim, train, tree
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.generate import load_run
from fmegatron.job import make_run
from fmegatron.job_model import computations
from fmegatron.job_optim import make_schedule
from fmegatron.models import PRESETS, Decoder, DecoderConfig
from fmegatron.random import key, normal
from fmegatron.sharding import Sharding
from fmegatron.spec import init
from fmegatron.step import TrainState
from tests.processes import processes
from tests.train_runs import flags, go, losses, numbers, rows, write_corpus

torch.set_num_threads(1)
ONE = ("--model-overrides.layers", "1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.jsonl", documents=24)


def options(*given: str) -> list[str]:
    """--optim.x y … from "optim.x=y", or "optim.x" alone."""
    found: list[str] = []
    for item in given:
        name, has, value = item.partition("=")
        found += [f"--{name}", *([value] if has else [])]
    return found


# ------------------------------------------------------------------------------------------------------------- resume

BFLOAT16 = ("precision.params=bfloat16",)
FLOAT16 = ("precision.compute=float16", "precision.loss-scale-hysteresis=1")
RESUMED: dict[str, tuple[str, ...]] = {
    "adam": ("optim.name=adam",),
    "sgd": ("optim.name=sgd", "optim.nesterov", "optim.momentum=0.8"),
    "lion": ("optim.name=lion", "optim.lr=3e-4", "optim.beta2=0.99"),
    "adafactor": ("optim.name=adafactor", "optim.momentum=0.9"),
    "muon": ("optim.name=muon", "optim.muon-lr=0.01", "optim.muon-adjust=match_rms_adamw"),
    "wsd": ("optim.schedule=wsd", "optim.decay=3", "optim.wsd-form=minus_sqrt", "optim.min-lr=1e-4"),
    "inverse_sqrt": ("optim.schedule=inverse_sqrt",),
    "by leaf": ("optim.lr-scale=embed=0.1,layers.*.q=0.5", "optim.weight-decay-of=dims:embed mlp=0.3,embed=0"),
    "ema": ("optim.ema=0.9",),
    "moments": ("precision.moments=bfloat16",),
    "stochastic rounding": (*BFLOAT16, "precision.stochastic-rounding", "precision.moments=bfloat16", "optim.ema=0.9"),
    "master copies": (*BFLOAT16, "optim.ema=0.9", "optim.name=muon"),
    "rounded moments under master copies": (
        *BFLOAT16,
        "precision.stochastic-rounding",
        "precision.moments=bfloat16",
        "precision.master=bfloat16",
    ),
    # overflows in the first steps, and grows again between the stop and the end
    "dynamic loss scale": (*FLOAT16, "precision.loss-scale-initial=1e30", "precision.loss-scale-window=2"),
    "fixed loss scale": (*FLOAT16[:1], "precision.loss-scale=512", "optim.name=muon"),
    "losses": ("loss.label-smoothing=0.1", "loss.z-loss=1e-3"),
    "remat": ("remat=attention,gate,up",),
    "in host memory": (
        *BFLOAT16,
        "offload-optimizer",
        "remat=attention:host,gate,up:host",
        "optim.ema=0.9",
        "precision.moments=float8",
    ),
}
# parts of these are in the others
SLOW = ("adam", "wsd", "inverse_sqrt", "moments", "rounded moments under master copies", "losses", "remat")


def fast_of(names: Any, slow: tuple[str, ...]) -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.slow if n in slow else ()) for n in names]


@pytest.mark.parametrize("name", fast_of(RESUMED, SLOW))
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, corpus, name) -> None:
    given = [*ONE, *options(*RESUMED[name])]
    steps = 40 if name == "dynamic loss scale" else 5
    common = dict(steps=steps, eval_every=2, eval_batches=1, dropout=0.1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert go(flags(corpus, whole, *given, **common)) == 0
    assert go(flags(corpus, parts, *given, **common), (steps // 2, "SIGTERM")) == 0
    assert go(["--out", str(parts), "--resume"]) == 0
    assert numbers(parts) == numbers(whole)
    held = [load_file(next(checkpoint.latest(out).glob("*.safetensors"))) for out in (whole, parts)]
    assert held[0].keys() == held[1].keys()
    assert all(torch.equal(held[0][k], held[1][k]) for k in held[0])
    ended = [checkpoint.info(out).values for out in (whole, parts)]
    assert ended[0] == ended[1]


def test_narrow_parameters_have_a_copy_unless_they_are_rounded_by_chance(tmp_path, corpus) -> None:
    for name, copy in (("master copies", True), ("stochastic rounding", False)):
        out = tmp_path / name.replace(" ", "-")
        assert go(flags(corpus, out, *ONE, *options(*RESUMED[name]), steps=1)) == 0
        held = checkpoint.info(out).tensors
        assert held["params.embed"][1] == "bfloat16"
        assert held.get("opt.master.embed", (0, None))[1] == ("float32" if copy else None)


def test_what_rests_in_host_memory_changes_nothing(tmp_path, corpus) -> None:
    plain, host = tmp_path / "plain", tmp_path / "host"
    common = options(*BFLOAT16, "optim.ema=0.9")
    assert go(flags(corpus, plain, *ONE, *common, "--remat", "attention,gate,up", steps=3)) == 0
    given = options("offload-optimizer", "remat=attention:host,gate,up:host")
    assert go(flags(corpus, host, *ONE, *common, *given, steps=3)) == 0
    assert numbers(host) == numbers(plain)
    more = ["--out", str(plain), "--resume", "--steps", "5", "--optim.schedule", "constant", "--offload-optimizer"]
    assert go(more) == 0  # the state is the same wherever it rests
    with pytest.raises(UserError, match="behind the name of a computation"):
        go(flags(corpus, tmp_path / "x", *ONE, "--remat", "everything:host"))
    with pytest.raises(UserError, match="'gates' is no computation"):
        go(flags(corpus, tmp_path / "x", *ONE, "--remat", "attention,gates:host"))


def test_rows_that_are_read_late_are_the_same(tmp_path, corpus, monkeypatch) -> None:
    """Also where an evaluation, a checkpoint and the end come between."""
    found = []
    for late in (False, True):
        monkeypatch.setattr(job, "make_run", late_run(late))
        out = tmp_path / str(late)
        assert go(flags(corpus, out, *ONE, steps=7, eval_every=3, eval_batches=1, checkpoint_every=2)) == 0
        found.append(numbers(out))
    assert found[0] == found[1]
    assert [row["step"] for row in found[1] if "loss" in row] == [1, 2, 3, 4, 5, 6, 7]


def test_a_loss_that_is_not_finite_is_found_late_and_not_saved(tmp_path, corpus, monkeypatch, capsys) -> None:
    monkeypatch.setattr(job, "make_run", late_run(True, broken=4))
    out = tmp_path / "out"
    wanted = flags(corpus, out, *ONE, steps=9, checkpoint_every=2)
    assert go(wanted) == 1
    assert checkpoint.info(out).step == 2  # that of the fourth step was due with it
    assert losses(out)[3:] == []
    assert "stopped at step 4: the loss is not finite. It was read after the update" in (out / "log.txt").read_text()


def late_run(late: bool, broken: int | None = None) -> Any:
    """job.make_run whose steps' numbers are read late; the loss of one step is no number."""

    def make(*given: Any) -> Any:
        made = make_run(*given)

        def step(state: Any, batch: Any) -> Any:
            state, metrics = made.step(state, batch)
            if state.step == broken:
                metrics["loss"] = metrics["loss"] * math.nan
            return state, metrics

        return dataclasses.replace(made, late=late, step=step)

    return make


def test_what_a_recording_refuses(tmp_path, corpus) -> None:
    with pytest.raises(UserError, match="--recorded records what compiled code does on a GPU alone"):
        go(flags(corpus, tmp_path / "x", "--recorded", "--compile"))
    gpu = torch.device("cuda")
    for more, world, words in (
        ((), 2, "this run has 2, whose"),
        (("--debug",), 1, "--debug sees nothing"),
        (("--precision.compute", "float16"), 1, "use bfloat16"),
        (("--offload-optimizer",), 1, "--offload-optimizer out"),
        (("--optim.name", "lion"), 1, "not --optim.name lion"),
    ):
        with pytest.raises(UserError, match=words):
            train.check_recorded(cli.parse_train(flags(corpus, tmp_path / "x", "--recorded", *more)), gpu, world)
    train.check_recorded(cli.parse_train(flags(corpus, tmp_path / "x", "--recorded")), gpu, 1)


def test_two_ranks_equal_one(tmp_path, corpus) -> None:
    """Muon on shards that rest in host memory, an average of the weights, rates by leaf, both losses."""
    given = options("optim.name=muon", "optim.ema=0.8", "loss.z-loss=1e-3", "optim.lr-scale=*.norm*=0.5")
    found = []
    for world, mesh in ((1, ()), (2, ("--mesh", "dp=2", "--store", "dp", "--offload-optimizer"))):
        out = tmp_path / str(world)
        wanted = flags(corpus, out, *given, *ONE, *mesh, steps=3, precision_params="float64")
        assert (go(wanted) if world == 1 else processes(2).run(go, wanted)[0]) == 0
        found.append([*losses(out), rows(out)[-1]["val_loss"], rows(out)[-1]["val_loss_ema"]])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=0)


# ----------------------------------------------------------------------------------------------- against torch's own


def parts(arguments: list[str]) -> tuple[job.Run, TrainState, Any]:
    """The run, its state before the first step, and a function of the step to its batch; its data are there already."""
    config = cli.parse_train(arguments)
    data = train.prepared(Path(config.out) / "data")
    assert data is not None
    setup = job.make_setup(config, torch.device("cpu"), 1)
    run = job.make_run(config, job.model_config(config, data.vocab_size), setup)
    batches, tokens = job.Batches(config, setup), train.open_data(config, data)[0]
    return run, job.initial_state(config, run), lambda step: batches.train(tokens, step)


def groups_by_leaf(params: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """What "by leaf" above means, said again by hand."""
    found = []
    for path, p in params.items():
        lr = 0.1 if path == "embed" else 0.5 if path.endswith(".q") else 1.0
        decay = 0.1 if p.ndim > 1 else 0.0
        decay = 0.3 if path.endswith((".gate", ".up")) else 0.0 if path == "embed" else decay
        found.append({"params": [p], "lr": 3e-3 * lr, "weight_decay": decay})
    return found


def decayed(params: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    return [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in params.values()]


THEIRS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(decayed(p), lr=3e-3, betas=(0.9, 0.95)),
    "sgd": lambda p: torch.optim.SGD(decayed(p), lr=3e-3, momentum=0.8, nesterov=True),
    "by leaf": lambda p: torch.optim.AdamW(groups_by_leaf(p), betas=(0.9, 0.95)),
    "losses": lambda p: torch.optim.AdamW(decayed(p), lr=3e-3, betas=(0.9, 0.95)),
}


@pytest.mark.parametrize("name", THEIRS)
def test_losses_are_those_of_a_loop_with_torch_optim(tmp_path, corpus, name) -> None:
    """In float64: torch's optimizer, clipping, cross-entropy with label smoothing, and the z-loss from its formula."""
    out = tmp_path / "run"
    given = options(*RESUMED[name], "optim.schedule=constant", "optim.warmup=0", "optim.clip=0.7")
    arguments = flags(corpus, out, *ONE, *given, steps=6, precision_params="float64")
    assert go(arguments) == 0
    run, state, batch_of = parts(arguments)
    params = {path: p.clone().requires_grad_() for path, p in tree.named(state.params).items()}
    tied = tree.like(state.params, list(params.values()))
    optimizer = THEIRS[name](params)
    found = []
    for step in range(6):
        batch = batch_of(step)
        logits = run.model.logits(tied, batch["tokens"], Ctx(sh=run.sh)).flatten(0, 1)
        smooth, z = (0.1, 1e-3) if name == "losses" else (0.0, 0.0)
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), label_smoothing=smooth)
        loss = loss + z * logits.logsumexp(-1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params.values(), 0.7)
        optimizer.step()
        found.append(loss.item())
    torch.testing.assert_close(losses(out), found, rtol=1e-9, atol=0)


def muon_of(spec: Any) -> optim.Optimizer:
    common: dict[str, Any] = {"weight_decay": 0.1, "mask": optim.decay_mask(spec)}
    matrices = optim.muon(0.01, spec=spec, adjust_lr="match_rms_adamw", **common)
    return optim.partition(optim.muon_labels(spec), {"muon": matrices, "adamw": optim.adamw(3e-3, **common)})


MADE: dict[str, Any] = {
    "lion": lambda spec: optim.lion(3e-4, betas=(0.9, 0.99), weight_decay=0.1, mask=optim.decay_mask(spec)),
    "adafactor": lambda spec: optim.adafactor(
        3e-3, beta1=0.9, weight_decay=0.1, mask=optim.decay_mask(spec), spec=spec
    ),
    "muon": muon_of,
}


@pytest.mark.parametrize("name", MADE)
def test_settings_reach_the_optimizers_that_torch_lacks(name) -> None:
    """Two updates are those of the optimizer called with the numbers themselves."""
    given = options(*RESUMED[name], "optim.schedule=constant", "optim.warmup=0", "optim.clip=0")
    config = cli.parse_train(flags("-", "-", *ONE, "--model-overrides.vocab", "64", *given))
    run = job.make_run(config, job.model_config(config, None), job.make_setup(config, torch.device("cpu"), 1))
    found = []
    for optimizer in (run.optimizer, MADE[name](run.spec)):
        params = init(run.spec, key(0))
        state = optimizer.init(params)
        for seed in (1, 2):
            grads = tree.tree_map(lambda p, s=seed: normal(key(s), p.shape), params)
            params, _, state = optimizer.update(params, grads, state)
        found.append(tree.named(params))
    assert all(torch.equal(found[0][path], found[1][path]) for path in found[0])


def test_evaluations_are_the_plain_cross_entropy(tmp_path, corpus) -> None:
    plain, extra = tmp_path / "plain", tmp_path / "extra"
    common = dict(steps=1, optim_lr="1e-30")
    assert go(flags(corpus, plain, *ONE, **common)) == 0
    assert go(flags(corpus, extra, *ONE, *options(*RESUMED["losses"]), **common)) == 0
    assert rows(plain)[-1]["val_loss"] == rows(extra)[-1]["val_loss"]
    assert losses(extra)[0] > losses(plain)[0] * 1.001


@pytest.mark.parametrize("form", ["linear", "cosine", "exponential", "minus_sqrt"])
def test_the_forms_of_wsd(form) -> None:
    """The rate half way down; muon's goes along with its ratio."""
    config = cli.parse_train(options("optim.schedule=wsd", f"optim.wsd-form={form}", "optim.decay=10", "steps=50"))
    half = {"linear": 0.5, "cosine": 0.5, "exponential": 2 * 0.5**0.5 - 1, "minus_sqrt": 1 - math.sqrt(0.5)}[form]
    assert make_schedule(config, 2.0)(45) == pytest.approx(2 * half)
    assert make_schedule(config, 2.0)(39) == 2.0 and make_schedule(config, 2.0)(50) == pytest.approx(0, abs=1e-12)


def test_the_average_is_that_of_the_weights_after_each_step(tmp_path, corpus) -> None:
    """By hand from a checkpoint of every step; it is evaluated, exported and generated from."""
    out = tmp_path / "run"
    arguments = flags(
        corpus, out, *ONE, *options("optim.ema=0.7"), steps=4, checkpoint_every=1, checkpoint_keep=0, optim_lr=0.02
    )
    assert go(arguments) == 0
    cpu = torch.device("cpu")
    average = tree.named(parts(arguments)[1].params)
    for folder in sorted((out / "checkpoints").iterdir()):
        weights = tree.named(load_run(str(folder), device=cpu)[1])
        average = {path: 0.7 * average[path] + 0.3 * weights[path] for path in average}
    model, found, *_ = load_run(str(out), device=cpu, weights="ema")
    for path, p in tree.named(found).items():
        torch.testing.assert_close(p, average[path], rtol=1e-6, atol=1e-7)
    last = rows(out)[-1]
    assert abs(last["val_loss_ema"] - last["val_loss"]) > 1e-3
    assert "  of averaged weights " in (out / "log.txt").read_text()
    hf = tmp_path / "hf"
    assert cli.main(["export", "--checkpoint", str(out), "--weights", "ema", "--out", str(hf)]) == 0
    exported = load_file(hf / "model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(exported, average["embed"], rtol=1e-6, atol=1e-7)


def test_weights_of_an_average_that_is_not_there(tmp_path, corpus, capsys) -> None:
    out = tmp_path / "run"
    assert go(flags(corpus, out, *ONE, steps=1)) == 0
    assert cli.main(["generate", "--checkpoint", str(out), "--weights", "ema"]) == 2
    assert "has no averaged weights: leave --weights out, or train with --optim.ema" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ float16


def test_steps_that_overflow_are_skipped(tmp_path, corpus) -> None:
    """The scale halves until the gradients fit; a skipped step leaves the learning rate where it was."""
    out = tmp_path / "run"
    given = options(*FLOAT16, "precision.loss-scale-initial=1e30", "precision.loss-scale-window=1000")
    assert go(flags(corpus, out, *ONE, *given, steps=110, optim_schedule="linear")) == 0
    steps = [row for row in rows(out) if "loss_scale" in row]
    skipped = [row["skipped"] for row in steps]
    assert all(skipped[:40]) and not any(skipped[-5:]) and 40 < sum(skipped) < 100
    for before, after in zip(steps, steps[1:], strict=False):
        assert after["loss_scale"] == pytest.approx(before["loss_scale"] * (0.5 if before["skipped"] else 1))
    for i, row in enumerate(steps):
        updates = i - sum(skipped[:i])
        expected = 3e-3 * ((updates + 1) / 2 if updates < 2 else (110 - updates) / 108)
        assert row["lr"] == pytest.approx(expected)
    text = (out / "log.txt").read_text()
    assert "products float16, loss scale 1e+30" in text and "skipped" in text
    assert steps[-1]["loss"] < steps[0]["loss"]
    state = checkpoint.info(out).values
    assert state["loss_scale.skipped"] == sum(skipped) and state["opt.adamw.count"] == 110 - sum(skipped)


def test_a_scale_at_its_minimum_ends_the_run(tmp_path, corpus) -> None:
    out = tmp_path / "run"
    given = options("precision.compute=float16", "precision.loss-scale=1e30")
    assert go(flags(corpus, out, *ONE, *given, steps=20)) == 1
    text = (out / "log.txt").read_text()
    assert "stopped at step 8: " in text and "and the loss scale, 1e+30, cannot fall further. Nothing was" in text


def test_a_run_turns_to_float16_and_back(tmp_path, corpus) -> None:
    out = tmp_path / "run"
    assert go(flags(corpus, out, *ONE, steps=2, optim_schedule="constant")) == 0
    again = ["--out", str(out), "--resume"]
    assert go([*again, "--steps", "4", "--precision.compute", "float16"]) == 0
    assert rows(out)[-2]["loss_scale"] == 65536.0
    assert go([*again, "--steps", "5", "--precision.loss-scale", "512"]) == 0
    assert rows(out)[-2]["loss_scale"] == 512.0
    assert go([*again, "--steps", "6", "--precision.compute", "None", "--precision.loss-scale", "None"]) == 0
    assert "loss_scale" not in rows(out)[-2]


# -------------------------------------------------------------------------------------------------------------- remat


def names_of(sizes: DecoderConfig) -> set[str]:
    """The names that a layer really asks its policy about."""
    seen: set[str] = set()

    def save(name: str) -> bool:
        seen.add(name)
        return False

    model = Decoder(sizes, save=save)
    params = tree.tree_map(lambda p: p.requires_grad_(), init(model.spec(), key(0)))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    terms, _ = model.loss(params, {"tokens": tokens, "labels": tokens}, Ctx(sh=Sharding()))
    terms["lm"].items.sum().backward()
    return seen


@pytest.mark.parametrize("preset", ["llama3-8b", "gpt2", "gemma2-2b", "phi3-mini", "olmo2-1b", "qwen3-8b"])
def test_the_names_of_computations_are_those_of_the_layers(preset) -> None:
    config = cli.parse_train(flags("-", "-", "--model", preset, "--model-overrides.kv-heads", "4"))
    sizes = job.model_config(config, None)
    assert names_of(sizes) == set(computations(sizes))


def test_remat_changes_no_loss(tmp_path, corpus) -> None:
    found = []
    for policy in ("everything", "nothing", "attention", "q,k,v,attention,o,gate,up,down", "gate, up"):
        out = tmp_path / str(len(found))
        assert go(flags(corpus, out, *ONE, "--remat", policy, steps=3, precision_params="float64")) == 0
        found.append(losses(out))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=0)


# ----------------------------------------------------------------------------------------------------------- families

FAMILIES = {
    "gpt2-tiny": ("model-overrides.kv-heads=4",),
    "llama3.2-1b": (),
    "mistral-7b-v0.1": ("model-overrides.window=9",),
    "qwen2.5-0.5b": (),
    "qwen3-0.6b": (),
    "gemma2-2b": ("model-overrides.window=9",),
    "gemma3-1b": ("model-overrides.window=9",),
    "phi3-mini": ("model-overrides.window=9",),
    "olmo2-1b": (),
}


@pytest.mark.parametrize("preset", fast_of(FAMILIES, tuple(n for n in FAMILIES if n[:4] not in ("gpt2", "gemm"))))
def test_every_family_trains_goes_on_writes_and_is_exported(tmp_path, corpus, capsys, preset) -> None:
    """The text of the run, of its export by the same command, and of transformers are one."""
    import transformers

    out, hf = tmp_path / "run", tmp_path / "hf"
    given = ("--model", preset, "--model-overrides.vocab", "320", *options(*FAMILIES[preset]))
    assert go(flags(corpus, out, *given, steps=3, optim_lr=0.02)) == 0
    assert go(["--out", str(out), "--resume", "--steps", "4"]) == 0
    assert checkpoint.read_meta(out)["model"]["family"] == PRESETS[preset].family
    assert f"model                 {preset}, " in (out / "log.txt").read_text()
    assert cli.main(["export", "--checkpoint", str(out), "--out", str(hf)]) == 0
    capsys.readouterr()
    prompt, texts = "def return import self value", []
    for folder in (out, hf):
        common = ["--checkpoint", str(folder), "--tokens", "15", "--temperature", "0", "--no-stream"]
        assert cli.main(["generate", *common, "--prompt", prompt]) == 0
        texts.append(capsys.readouterr().out)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    ids = tokenizer(prompt, return_tensors="pt")
    expected = theirs.generate(**ids, do_sample=False, max_new_tokens=15, pad_token_id=1)[0]
    assert texts == [tokenizer.decode(expected, skip_special_tokens=True) + "\n"] * 2


def test_describe_every_preset(capsys) -> None:
    for preset in ("llama3.1-405b", "gpt3-175b", "gemma3-27b", "phi4", "olmo2-32b"):
        assert cli.main(["describe", "--model", preset, "--mesh", "dp=2", "--store", "dp"]) == 0
        assert "total" in capsys.readouterr().out


def test_a_model_of_another_form(tmp_path, corpus) -> None:
    """Overrides that change the form, and what the start and the end say where there is no export."""
    out = tmp_path / "run"
    given = options("model-overrides.qk-norm=head", "model-overrides.window=5", "model-overrides.activation=relu2")
    assert go(flags(corpus, out, *given, *ONE, steps=1)) == 0
    text = (out / "log.txt").read_text()
    assert "no export           to Hugging Face: " in text and "to export" not in text
    again = tmp_path / "again"
    given = options("model-overrides.family=qwen3", "model-overrides.qk-norm=head")
    assert go(flags(corpus, again, *given, *ONE, steps=1)) == 0
    assert "to export" in (again / "log.txt").read_text()


# ----------------------------------------------------------------------------------------------------------- refusals

BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "muon's rate": (
        ("optim.muon-lr=0.1",),
        "--optim.muon-lr is for --optim.name muon, but that is adamw: leave it out",
    ),
    "muon's factor": (("optim.muon-adjust=none",), "--optim.muon-adjust is for --optim.name muon"),
    "momentum": (("optim.momentum=0.9",), "--optim.momentum is for --optim.name sgd or adafactor or muon"),
    "nesterov": (("optim.nesterov",), "--optim.nesterov is for --optim.name sgd"),
    "nesterov of nothing": (
        ("optim.nesterov", "optim.name=sgd", "optim.momentum=0"),
        "--optim.nesterov needs an --optim.momentum above 0",
    ),
    "form": (("optim.wsd-form=cosine",), "--optim.wsd-form is for --optim.schedule wsd, but that is cosine"),
    "decay": (("optim.decay=3",), "--optim.decay is for --optim.schedule wsd"),
    "end above": (("optim.min-lr=1",), "--optim.min-lr 1.0 is above --optim.lr 0.003"),
    "average": (("optim.ema=1",), "--optim.ema 1.0 must be at least 0 and less than 1"),
    "no leaf": (("optim.lr-scale=embedd=1",), "--optim.lr-scale embedd=1: pattern 'embedd' matches no leaf"),
    "no dims": (("optim.lr-scale=dims:embed expert=1",), "pattern dims('embed expert') matches no leaf"),
    "no number": (("optim.lr-scale=embed=x",), "--optim.lr-scale embed=x: 'embed=x' is not PATTERN=NUMBER"),
    "negative": (("optim.weight-decay-of=embed=-1",), "--optim.weight-decay-of embed=-1: 'embed=-1' is not"),
    "scale without float16": (("precision.loss-scale=dynamic",), "--precision.loss-scale is for float16"),
    "a scale of nothing": (
        ("precision.loss-scale=0", "precision.compute=float16"),
        "--precision.loss-scale 0.0 must be greater than 0",
    ),
    "minimum above": (
        ("precision.loss-scale-minimum=9", "precision.loss-scale-initial=8", "precision.compute=float16"),
        "--precision.loss-scale-minimum 9.0 is above --precision.loss-scale-initial 8.0",
    ),
    "a wide wire": (
        ("precision.wire=float64",),
        "--precision.wire float64: wire=float64 does not fit into reduce=float32",
    ),
    "bytes for one moment": (
        ("precision.moments=float8", "optim.name=lion"),
        "--precision.moments float8 is for --optim.name adamw or adam, but that is lion",
    ),
    "rounding of float32": (("precision.stochastic-rounding",), "--precision.stochastic-rounding rounds to bfloat16"),
    "rounding and copies": (
        (*BFLOAT16, "precision.stochastic-rounding", "precision.master=float32"),
        "--precision.stochastic-rounding takes the place of --precision.master float32",
    ),
    "smoothing": (("loss.label-smoothing=1",), "--loss.label-smoothing 1.0 must be at least 0 and less than 1"),
    "z-loss": (("loss.z-loss=-1",), "--loss.z-loss -1.0 must be a number that is not negative"),
    "remat": (
        ("remat=attention,sausage",),
        "'sausage' is no computation of this model's layers: use everything, nothing, or some of "
        "q,k,v,attention,o,gate,up,down",
    ),
    "gates": (("remat=gate", "model=gpt2-tiny", "model-overrides.kv-heads=4"), "some of q,k,v,attention,o,up,down"),
    "rotary base": (
        ("model=gpt2-tiny", "model-overrides.rope-theta=5e5", "model-overrides.kv-heads=4"),
        "--model-overrides.rope-theta 500000.0: gpt2-tiny has learned positions, not rotary ones: leave it out",
    ),
    "positions": (
        ("model=gpt2-tiny", "batch.seq-len=2000", "model-overrides.kv-heads=4"),
        "--batch.seq-len 2000 is longer than the 1024 learned positions of gpt2-tiny: use at most 1024, or more "
        "positions, --model-overrides.max-seq 2000",
    ),
    "family": (("model-overrides.family=gemma",), "--model-overrides.family gemma is not known; did you mean gemma2?"),
    "windows": (("model-overrides.window=0", "model-overrides.pattern=window"), "--model-overrides.window 0 takes all"),
    "pattern": (("model-overrides.pattern=window",), "has windowed layers: give window="),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_told_in_one_line_and_nothing_is_written(corpus, monkeypatch, tmp_path, capsys, name) -> None:
    monkeypatch.chdir(tmp_path)
    more, message = BAD[name]
    assert cli.main(["train", *flags(corpus, "new", *options(*more), steps=2)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("fmegatron: error: ") and printed.err.count("\n") == 1
    assert message in printed.err
    assert list(tmp_path.iterdir()) == []


def test_another_optimizer_on_a_resume(tmp_path, corpus, capsys) -> None:
    out = tmp_path / "run"
    assert go(flags(corpus, out, *ONE, steps=1)) == 0
    for more, message in (
        (("optim.name=lion",), "--optim.name: {} was trained with adamw, not lion: leave --optim.name as it was"),
        (("init-from=hf",), "--init-from hf: the run in --out {run} did not begin from a Hugging Face folder: leave"),
        (("optim.ema=0.9",), "--optim.ema: {} was trained with False, not True"),
        (("precision.moments=bfloat16",), "--precision.moments: {} was trained with None, not bfloat16"),
    ):
        assert cli.main(["train", "--out", str(out), "--resume", "--steps", "2", *options(*more)]) == 2
        assert message.format(checkpoint.latest(out), run=out) in capsys.readouterr().err


def test_debug_of_a_run_with_a_loss_scale(tmp_path, corpus) -> None:
    """The operation is found although the steps before were skipped."""
    out = tmp_path / "run"
    given = options("precision.compute=float16", "precision.loss-scale=1e30")
    assert go(flags(corpus, out, *ONE, *given, "--debug", steps=20)) == 1
    found = (out / "log.txt").read_text().split("--debug: step 8: ")[1]
    assert " of finite inputs of shapes [" in found and "gave values that are not finite" in found


# ---------------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("preset", ["tiny", "gpt2-tiny", "gemma2-2b", "olmo2-1b"])
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_training_on_a_gpu(tmp_path, corpus, preset, compute) -> None:
    """Half precision of either kind starts at the loss of float32 and comes down with it; a resume restores it."""
    sizes = ("--model-overrides.kv-heads", "4", "--model-overrides.vocab", "320", "--model-overrides.head", "16")
    given = ("--model", preset, *sizes, "--precision.compute", compute, "--device", "cuda", "--optim.name", "muon")
    out, plain = tmp_path / "run", tmp_path / "plain"
    common = dict(steps=8, optim_ema=0.9)
    # so small that no step is skipped (at 2**16 OLMo 2 skips four of the first): then losses can be compared by step
    scale = ("--precision.loss-scale-initial", "1024") if compute == "float16" else ()
    assert cli.main(["train", *flags(corpus, out, *given, *scale, **common)]) == 0
    assert cli.main(["train", "--out", str(out), "--resume", "--steps", "12"]) == 0
    assert cli.main(["train", *flags(corpus, plain, *given, "--precision.compute", "float32", **common)]) == 0
    for ours, theirs in zip(losses(out), losses(plain), strict=False):
        assert ours == pytest.approx(theirs, rel=0.02)
    assert losses(out)[-1] < losses(out)[0] - 0.2
    assert ("loss_scale" in rows(out)[-2]) == (compute == "float16")
