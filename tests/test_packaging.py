"""A wheel, an editable install and a bare checkout import the same names; nothing generic is installed."""

import math
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from fmegatron.mesh import parse_axes

ROOT = Path(__file__).resolve().parent.parent
NAMES = ["fmegatron.cli", "fmegatron.models", "fmegatron.parallel"]


def run(*command: object, cwd: Path | None = None) -> str:
    result = subprocess.run(
        [str(c) for c in command], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: a build leaves files beside them."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("fmegatron", "models", "parallel"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist that was built from the checkout, as for a release."""
    out = tmp_path_factory.mktemp("dist")
    hooks = (
        "import sys, tarfile\n"
        "from setuptools import build_meta\n"
        "out = sys.argv[1]\n"
        "tarfile.open(f'{out}/{build_meta.build_sdist(out)}').extractall(out, filter='data')\n"
    )
    run(sys.executable, "-c", hooks, out, cwd=checkout)
    (source,) = (path for path in out.iterdir() if path.is_dir())
    pip_wheel(source, out)
    return next(out.glob("*.whl"))


def pip_wheel(source: Path, out: Path) -> None:
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source)


def install(wheel: Path, target: Path) -> None:
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target, wheel)


def files_of(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def check_imports(setup: str, where: Path, *, generic: bool, cwd: Path) -> None:
    """NAMES come from `where` in a process that sees the standard library, our dependencies and what `setup` adds.

    generic: whether plain `models` is importable too.
    """
    program = (
        "import importlib, importlib.util, os, sys, site\n"
        f"sys.path.append({sysconfig.get_path('purelib')!r})\n"  # not its .pth files: one may be an editable install's
        f"{setup}\n"
        f"for name in {NAMES}:\n"
        "    module = importlib.import_module(name)\n"
        "    assert module.__name__ == name, module\n"
        f"    assert os.path.realpath(module.__file__).startswith({os.path.realpath(where)!r}), module.__file__\n"
        "for name in ('models', 'parallel'):\n"
        f"    assert (importlib.util.find_spec(name) is not None) == {generic}, name\n"
    )
    run(sys.executable, "-I", "-S", "-c", program, cwd=cwd)


def test_wheel(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install(wheel, target)
    check_imports(f"site.addsitedir({str(target)!r})", target, generic=False, cwd=tmp_path)
    top = {path.name for path in target.iterdir() if not path.name.endswith(".dist-info")}
    assert top <= {"fmegatron", "bin"}
    assert (target / "fmegatron" / "py.typed").exists()


def test_wheel_from_the_checkout_has_every_source(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    pip_wheel(checkout, tmp_path)
    (direct,) = tmp_path.glob("*.whl")
    sources = {f"fmegatron/{p.relative_to(ROOT / 'fmegatron')}" for p in (ROOT / "fmegatron").rglob("*.py")}
    for name in ("models", "parallel"):
        sources |= {f"fmegatron/{p.relative_to(ROOT)}" for p in (ROOT / name).rglob("*.py")}
    assert files_of(direct) == files_of(wheel) == sources | {"fmegatron/py.typed"}


def test_editable_install(checkout: Path, tmp_path: Path) -> None:
    hook = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    run(sys.executable, "-c", hook, tmp_path, cwd=checkout)
    target = tmp_path / "site"
    install(next(tmp_path.glob("*.whl")), target)
    # first on the path: another editable install of ours brings a module of the same name
    setup = f"sys.path.insert(0, {str(target)!r})\nsite.addsitedir({str(target)!r})"
    check_imports(setup, checkout, generic=False, cwd=tmp_path)


def test_bare_checkout(checkout: Path, tmp_path: Path) -> None:
    check_imports(f"sys.path.insert(0, {str(checkout)!r})", checkout, generic=True, cwd=tmp_path)
    for name in ("models", "parallel"):
        assert (ROOT / "fmegatron" / name).is_symlink()


def losses(output: str) -> list[str]:
    """What own_model.py prints, without what torchrun adds."""
    return [line for line in output.splitlines() if line[:3].strip().isdigit()]


@pytest.mark.parametrize("mesh", ["", *(pytest.param(m, marks=pytest.mark.slow) for m in ("dp=1,tp=2", "dp=2,tp=2"))])
def test_the_readme_s_program_runs_alone_on_the_installed_wheel(wheel: Path, tmp_path: Path, mesh: str) -> None:
    """On one process and (slow) on several, from an empty folder, with the same losses. (Its layouts in a simulation:
    `test_examples`.)"""
    target, alone = tmp_path / "site", tmp_path / "alone"
    install(wheel, target)
    alone.mkdir()
    shutil.copy(ROOT / "examples" / "own_model.py", alone)
    environment = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def output(*command: object) -> str:
        done = subprocess.run(
            [str(c) for c in command],
            cwd=alone,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = output(sys.executable, "-c", "import fmegatron; print(fmegatron.__file__)")
    assert os.path.realpath(where.strip()).startswith(os.path.realpath(target))
    one = losses(output(sys.executable, "own_model.py"))
    assert len(one) == 20
    if mesh:
        world = math.prod(parse_axes(mesh).values())
        several = losses(
            output(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", world, "own_model.py", mesh)
        )
        for a, b in zip(one, several, strict=True):
            assert abs(float(a.split()[1]) - float(b.split()[1])) <= 1e-4 * float(a.split()[1])
    assert float(one[-1].split()[1]) < 0.5 * float(one[0].split()[1])


def test_the_readme_shows_the_program_whole() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = readme.split("<!-- own-model -->\n```python\n")[1].split("```")[0]
    assert shown == (ROOT / "examples" / "own_model.py").read_text()
    assert len([line for line in shown.splitlines() if line.strip()]) <= 60
