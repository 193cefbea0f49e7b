"""Tests of `make wheels` without a compilation: what is tried, published and kept out."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.programs import ROOT, run, run_python


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """wheels/make.py."""
    spec = importlib.util.spec_from_file_location("make_wheels", ROOT / "wheels" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_wheels", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("works", [True, False])
def test_a_wheel_is_published_once_it_was_tried(
    make: ModuleType, tmp_path: Path, works: bool
) -> None:
    out = tmp_path / "out"

    def build(row: object, python: str, folder: Path, staged: Path) -> None:
        staged.mkdir(parents=True)
        (staged / "x.whl").touch()
        (staged / "x.whl.json").touch()

    def try_out(row: object, python: str, folder: Path, staged: Path) -> float:
        # Beside no other wheel, which `install` might take as well.
        assert sorted(path.name for path in staged.iterdir()) == ["x.whl", "x.whl.json"]
        assert not out.exists()
        if works:
            return 1.0
        raise subprocess.CalledProcessError(1, ["install"])

    steps = make.Steps(build, try_out)
    result = make.make(make.rows()[0], out, sys.executable, steps, tmp_path / "rows")
    assert result.startswith("built" if works else "failed, exit code 1: install")
    published = sorted(path.name for path in out.iterdir()) if works else []
    assert published == (["x.whl", "x.whl.json"] if works else [])
    assert not list((tmp_path / "rows").iterdir())


def test_a_build_takes_no_flags_of_its_users_which_the_record_would_not_name(
    make: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CXXFLAGS", "PYTHONPATH", "HOROVOD_CUDA_HOME", "HOROVOD_RUNNER_WHEELS"):
        monkeypatch.setenv(name, "mine")
    environment = make.build_environment("x86_64")
    assert "mine" not in environment.values()
    assert environment["HOROVOD_BUILD_ARCH_FLAGS"] == "-mf16c -mavx -mfma"
    assert environment["PATH"]


def test_a_container_has_environments_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["make", "--dry-run", "--no-print-directory", "--always-make", "wheels"]
    for container in ("", "an/image"):
        monkeypatch.setenv("WHEELS_CONTAINER", container)
        try:
            pythons = (f"PYTHON={sys.executable}", f"PYTHON_PETASTORM={sys.executable}")
            done = run(*command, *pythons, check=True, cwd=ROOT)
        except FileNotFoundError:
            pytest.skip("needs make")
        code = "import make; print(make.BASE.name)"
        name = run_python(code, check=True, cwd=ROOT / "wheels").stdout.strip()
        assert name == (".venv-wheels-container" if container else ".venv-wheels")
        assert f"\n{name}/bin/python wheels/make.py" in f"\n{done.stdout}"
