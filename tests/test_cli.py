"""Settings, the command line, and processes started by it."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fmegatron import cli, config, launch
from fmegatron.config import GenerateConfig, ModelOverrides, OptimConfig, TrainConfig, load_config, save_config
from fmegatron.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", launch.ERRORS):
    ENVIRONMENT.pop(name, None)


def fmegatron(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "fmegatron", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)


# --- Settings ---


def configs(cls: type) -> st.SearchStrategy:
    """Any values that the types of a config allow (nan is left out: it does not equal itself)."""
    fields = {}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            fields[name] = configs(typing.cast(type, hint))
        else:
            fields[name] = st.from_type(hint).filter(lambda value: value == value)
    return st.builds(cls, **fields)


@given(config=configs(TrainConfig))
@hypothesis_settings(max_examples=60, deadline=None)
def test_saved_settings_load_back_equal(tmp_path_factory: pytest.TempPathFactory, config: TrainConfig) -> None:
    path = tmp_path_factory.getbasetemp() / "config.toml"
    save_config(config, path)
    assert load_config(TrainConfig, path) == config


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("lr = 1e-3", "unknown key 'lr'; the nearest known key is 'optim.lr'"),
        ("[optim]\nbeta_2 = 0.9", "unknown key 'optim.beta_2'; the nearest known key is 'optim.beta2'"),
        ("[optimizer]\nlr = 1", "unknown key 'optimizer'; the nearest known key is 'optim."),
        ("[evaluate]\nevery = 3", "unknown key 'evaluate'; the nearest known key is 'eval."),
        ("step = 10", "unknown key 'step'; the nearest known key is 'steps'"),
        ("[optim]\nseq_len = 3", "unknown key 'optim.seq_len'; the nearest known key is 'batch.seq_len'"),
        ("steps = 1.5", "key 'steps' is 1.5, but must be an integer"),
        ("steps = true", "key 'steps' is True, but must be an integer"),
        ("out = 3", "key 'out' is 3, but must be a string"),
        ("resume = 1", "key 'resume' is 1, but must be true or false"),
        ("store = 'dp'", "key 'store' is 'dp', but must be a list of strings"),
        ("optim = 3", "key 'optim' is 3, but must be a table [optim]"),
        ("[optim]\nlr = 'big'", "key 'optim.lr' is 'big', but must be a number"),
        (
            "[optim]\nschedule = 'cos'",
            "key 'optim.schedule' is 'cos', but must be one of 'constant', 'linear', 'cosine', 'wsd', 'inverse_sqrt'",
        ),
        ("steps 3", "not valid TOML"),
    ],
)
def test_bad_toml(tmp_path: Path, toml: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(toml)
    with pytest.raises(UserError) as error:
        load_config(TrainConfig, path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_toml_and_missing_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read it .no such file"):
        load_config(TrainConfig, tmp_path / "none.toml")
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(UserError, match="'checkpoint' is missing"):
        load_config(GenerateConfig, tmp_path / "empty.toml")


def test_the_flags_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "steps = 7\nmesh = 'dp=2'\nstore = ['dp']\n[optim]\nlr = 1\nclip = 0.5\n[model_overrides]\nlayers = 3\n"
    )
    flags = ["--config", str(path), "--optim.lr", "3e-4", "--mesh", "None", "--sp", "--batch.seq-len", "64"]
    config = cli.parse_train(flags)
    expected = TrainConfig(
        steps=7,
        store=("dp",),
        sp=True,
        optim=OptimConfig(lr=3e-4, clip=0.5),
        batch=dataclasses.replace(TrainConfig().batch, seq_len=64),
        model_overrides=ModelOverrides(layers=3),
    )
    assert config == expected
    assert cli.parse_train([]) == TrainConfig()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps 0 must be greater than 0"),
        (["--optim.lr", "nan"], "--optim.lr nan must be greater than 0"),
        (["--optim.lr", "inf"], "--optim.lr inf must be greater than 0"),
        (["--optim.beta2", "1"], "--optim.beta2 1.0 must be at least 0 and less than 1"),
        (["--dropout", "-0.1"], "--dropout -0.1 must be at least 0 and less than 1"),
        (["--checkpoint.every", "-1"], "--checkpoint.every -1 must be"),
        (["--model-overrides.kv-heads", "0"], "--model-overrides.kv-heads 0 must be greater than 0"),
        (["--seed", "-1"], "--seed -1 must be"),
        (
            ["--batch.size", "3", "--batch.microbatches", "4"],
            "--batch.size 3 is less than --batch.microbatches 4",
        ),
    ],
)
def test_meaningless_numbers(flags: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        cli.parse_train(flags)
    assert message in str(error.value)


def test_every_setting_has_help(capsys: pytest.CaptureFixture) -> None:
    classes = [value for value in vars(config).values() if dataclasses.is_dataclass(value) and isinstance(value, type)]
    assert TrainConfig in classes
    source = Path(config.__file__).read_text()
    for cls in classes:
        body = source.split(f"class {cls.__name__}:")[1].split("@dataclass")[0].split("\ndef ")[0]
        for f in dataclasses.fields(cls):
            if not dataclasses.is_dataclass(typing.get_type_hints(cls)[f.name]):
                after = body.split(f"\n    {f.name}:")[1].split("\n")[1]
                assert after.strip().startswith('"""'), (cls, f.name)
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for flag in ("--batch.size", "--optim.lr", "--model-overrides.layers", "--no-resume", "Learning rate after"):
        assert flag in out


# --- The command line ---


def test_help_is_quick_and_imports_no_torch(tmp_path: Path) -> None:
    program = "import sys\nfrom fmegatron.cli import main\nmain(['--help'])\nmain(['train', '--help'])"
    checked = f"try:\n    {program.replace(chr(10), chr(10) + '    ')}\nfinally:\n    print('torch' in sys.modules)"
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", checked], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert result.stdout.endswith("False\n"), result.stderr
    for command in cli.COMMANDS:
        assert f"  {command} " in result.stdout
    assert time.monotonic() - start < 4  # 0.5 s when nothing else runs


def test_bad_input_is_one_line_and_code_2(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("steps = 'many'")
    for arguments, message in (
        (["tarin"], "unknown command 'tarin'; did you mean 'train'?"),
        (["train", "--config", "run.toml"], "--config run.toml: key 'steps' is 'many', but must be an integer"),
        (
            ["train", "--config", "run.toml", "--nproc", "4"],
            "--config run.toml: key 'steps' is 'many', but must be an integer",
        ),
    ):
        result = fmegatron(*arguments, cwd=tmp_path)
        assert (result.returncode, result.stdout, result.stderr) == (2, "", f"fmegatron: error: {message}\n")
    result = fmegatron("train", "--optim.lrr", "3", cwd=tmp_path)
    assert result.returncode == 2
    assert "--optim.lr " in result.stderr and "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "run.toml"]


# --- Several processes ---

RANK = """
import os, signal, sys, time
from pathlib import Path
from fmegatron.errors import UserError
from fmegatron.launch import close_distributed, init_distributed, report_error
rank = int(os.environ["RANK"])
def body():
{body}
try:
    body()
except Exception as error:
    sys.exit(report_error(error))
"""


@pytest.fixture
def start(tmp_path: Path):
    """start(nproc, body): a process that launches `body` on nproc ranks, in tmp_path. All are ended with the test."""
    started = []

    def start(nproc: int, body: str, *, program: str = "launch", **environment: str) -> subprocess.Popen:
        script = tmp_path / "rank.py"
        script.write_text(RANK.format(body=textwrap.indent(textwrap.dedent(body), "    ")))
        if program == "torchrun":
            command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", str(script)]
        else:
            parent = (
                "import sys\nfrom fmegatron.launch import launch\nsys.exit(launch([sys.executable, 'rank.py'], %d))"
            )
            command = ["-c", parent % nproc]
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**ENVIRONMENT, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_for(condition: typing.Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ranks_get_what_torchrun_would_give_them(start) -> None:
    body = """
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS".split()
    os.write(1, (" ".join(os.environ[name] for name in names) + "\\n").encode())
    """
    out, err = start(3, body, OMP_NUM_THREADS="5").communicate(timeout=20)
    rows = sorted(line.split() for line in out.splitlines())
    assert err == ""
    assert [row[:5] for row in rows] == [[str(rank), str(rank), "3", "3", "127.0.0.1"] for rank in range(3)]
    assert len({row[5] for row in rows}) == 1
    assert {row[6] for row in rows} == {"5"}
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "OMP_NUM_THREADS"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", environment)
        patch.setattr(launch, "_cores", lambda: 7)
        assert [launch._environment(n, "")["OMP_NUM_THREADS"] for n in (1, 3, 8)] == ["7", "2", "1"]


@pytest.mark.parametrize("who", ["rank == 1", "rank > 0", "True"])
def test_a_user_error_is_told_once_and_ends_all(start, tmp_path: Path, who: str) -> None:
    body = f"""
    Path(f"pid-{{rank}}").write_text(str(os.getpid()))
    while len(list(Path().glob("pid-*"))) < 4:
        time.sleep(0.01)
    if {who}:
        raise UserError("data 'x' is empty")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if rank else signal.SIG_DFL)  # others must be killed
    time.sleep(60)
    """
    began = time.monotonic()
    process = start(4, body)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (2, "", "fmegatron: error: data 'x' is empty\n")
    assert time.monotonic() - began < 10
    assert not any(alive(int(path.read_text())) for path in tmp_path.glob("pid-*"))


def test_a_crash_shows_the_first_rank_that_failed(start) -> None:
    body = """
    if rank == 1:
        1 / 0
    time.sleep(0.5)
    raise RuntimeError("connection closed by peer")
    """
    process = start(2, body)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert err.startswith("fmegatron: rank 1 failed:\nTraceback") and "ZeroDivisionError" in err
    assert "by peer" not in err


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_killed_rank_ends_all_and_is_named(start, name: str) -> None:
    """Also where another rank fails by it."""
    body = f"""
    if rank == 1:
        os.kill(os.getpid(), signal.{name})
    time.sleep(0.2)
    if rank == 0:
        raise RuntimeError("connection closed by peer")
    time.sleep(60)
    """
    process = start(3, body)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.Signals[name]
    assert err.startswith(f"fmegatron: rank 1 was killed by {name}") and err.count("\n") == 1


def test_the_rank_that_failed_is_shown_and_not_those_that_were_told_of_it(start) -> None:
    body = """
    class Told(RuntimeError):
        elsewhere = True
    time.sleep(0.3 * rank)
    raise KeyError("the cause") if rank else Told("rank 1 failed")
    """
    process = start(2, body)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert err.startswith("fmegatron: rank 1 failed:\nTraceback") and "the cause" in err


WAITING = """
stop = False
def handler(number, frame):
    nonlocal stop
    stop = True
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, handler)
Path(f"pid-{rank}").write_text(str(os.getpid()))
while not (stop and obedient):
    time.sleep(0.02)
time.sleep(0.3)
Path(f"saved-{rank}").touch()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_all_ranks_which_end_in_peace(start, tmp_path: Path, number: int) -> None:
    process = start(3, "obedient = True" + WAITING)
    wait_for(lambda: len([p for p in tmp_path.glob("pid-*") if p.read_text()]) == 3)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")
    assert len(list(tmp_path.glob("saved-*"))) == 3


def test_a_second_signal_kills(start, tmp_path: Path) -> None:
    process = start(2, "obedient = False" + WAITING)
    wait_for(lambda: len([p for p in tmp_path.glob("pid-*") if p.read_text()]) == 2)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=10)
    assert process.returncode == 137
    assert not list(tmp_path.glob("saved-*"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_ranks_die_with_a_killed_parent(start, tmp_path: Path) -> None:
    process = start(2, "obedient = False" + WAITING)
    wait_for(lambda: len([p for p in tmp_path.glob("pid-*") if p.read_text()]) == 2)
    pids = [int(p.read_text()) for p in tmp_path.glob("pid-*")]
    assert all(map(alive, pids))
    process.kill()
    wait_for(lambda: not any(map(alive, pids)), 5)


GLOO = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
device = init_distributed("cpu", timeout=30)
assert device == torch.device("cpu")
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
assert total.item() == 3.0 and dist.get_backend() == "gloo"
"""


def test_a_user_error_while_a_peer_is_in_a_collective(start) -> None:
    body = GLOO + "if rank == 1:\n    raise UserError('bad shard')\ndist.barrier()\nclose_distributed()"
    process = start(2, body)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (2, "fmegatron: error: bad shard\n")


def test_the_group_opens_and_closes(start) -> None:
    process = start(2, GLOO + "close_distributed()\nassert not dist.is_initialized()")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("joined", [False, True])
def test_under_torchrun_the_lowest_rank_tells(start, joined: bool) -> None:
    process = start(
        3,
        (GLOO.replace("3.0", "6.0") if joined else "") + "if rank:\n    raise UserError('bad shard')",
        program="torchrun",
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert err.count("fmegatron: error: bad shard") == 1
    assert "UserError" not in err


def test_without_a_launcher_there_is_no_group() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        assert launch.init_distributed("cpu").type == "cpu"
    with pytest.raises(UserError, match="--device 'gpu' is not known"):
        launch.init_distributed("gpu")


def test_verify_checks_a_layout_and_refuses_what_it_does_not_know(capsys):
    assert cli.main(["verify", "gpt2", "--layout", "tp=2 sp"]) == 0
    out = capsys.readouterr().out
    assert "tp=2 sp" in out and "equal to one device, worst error" in out
    assert cli.main(["verify", "lama"]) == 2
    assert "lama" in capsys.readouterr().err
    assert cli.main(["verify", "llama", "--layout", "tp=2 zero=9"]) == 2
    assert "zero=9 is not known" in capsys.readouterr().err


def test_stages_and_kinds_that_do_not_exist_are_refused(capsys, tmp_path):
    for flag, value, message in (
        ("--zero", "4", "--zero 4: the stages are 0"),
        ("--zero", "1", "has no data axis to store over; add dp to the mesh"),
        ("--cp", "rings", "--cp rings is not known; did you mean ring?"),
    ):
        assert cli.main(["train", "--out", str(tmp_path / "x"), "--nproc", "1", "--mesh", "tp=1", flag, value]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_the_help_of_layouts_says_what_their_defaults_do(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for part in ("None: dp of all ranks", "None: 3 with --store, else 0", "Off by default", "hybrid sharding (HSDP)"):
        assert part in shown, part
