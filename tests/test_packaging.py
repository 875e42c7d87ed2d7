"""A wheel, an editable install and a bare checkout import the same names; nothing generic is installed."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

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
