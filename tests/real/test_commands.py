"""The commands on this very environment: what they print is checked, nothing is faked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from horovod_runner.host import software

pytestmark = [pytest.mark.spark, pytest.mark.horovod]
ROOT = Path(__file__).parents[2]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "horovod-runner"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, **environment},
    )


def test_doctor_finds_all_well_here() -> None:
    done = command("doctor", "--master", "local[2]", "--json")
    report = json.loads(done.stdout)
    assert report["ok"], report
    assert done.returncode == 0
    found = {finding["name"]: finding for finding in report["findings"]}
    assert found["system"]["detail"].startswith("Linux-")
    assert found["Python"]["detail"].startswith(sys.version.split()[0])
    assert found["Horovod for torch"]["detail"].startswith("0.28.1, built with gloo")
    assert "rank 1 of 2, local 1" in found["two ranks with torch"]["detail"]
    assert "reduced to 3" in found["two ranks with tensorflow"]["detail"]
    assert found["slots"]["detail"] == "2 on local[2]"
    assert "reduced to 3" in found["2 rank(s) on Spark"]["detail"]


def test_doctor_says_what_to_do_about_what_is_wrong(tmp_path: Path) -> None:
    # A horovod whose library does not load stands before the real one.
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.28.1'\n")
    (package / "torch.py").write_text("raise ImportError('undefined symbol: torch_of_before')\n")
    done = command("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "undefined symbol: torch_of_before" in done.stdout
    advice = "run: horovod-runner install --frameworks torch --rebuild"
    assert f"Horovod for torch: {advice}" in done.stdout.splitlines()


def test_install_takes_the_cached_wheel_and_proves_it(tmp_path: Path) -> None:
    import horovod.torch as hvd

    # Into an environment beside this one, whose Horovod other tests use meanwhile.
    beside = tmp_path / "beside"
    venv.create(beside)
    [packages] = beside.glob("lib/*/site-packages")
    (packages / "others.pth").write_text("\n".join([str(ROOT), *sys.path]))
    python = str(beside / "bin" / "python")
    if hvd.mpi_built():  # Horovod looks for it in its own environment
        mpich = f"mpich=={software.installed()['mpich']}"
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*uv, "--python", python, mpich], check=True, timeout=400)
    home = Path(hvd.__file__).parents[1]
    built = [name for name in ("tensorflow", "torch") if any(home.glob(f"{name}/mpi_lib*.so"))]
    same = ["--frameworks", ",".join(built), "--gpu" if hvd.cuda_built() else "--cpu"]
    if not hvd.mpi_built():
        same += ["--mpi", "none"]
    install = [python, "-m", "horovod_runner.commands.cli", "install", *same]
    done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "using the wheel built before" in done.stdout
    assert done.stdout.count("two ranks reduced with") == len(built)
    assert (packages / "horovod").is_dir()


def test_a_gpu_build_that_cannot_be_made_is_refused_in_one_line() -> None:
    # TensorFlow's wheels are for CUDA 12, torch's for CUDA 13 or for CPUs.
    done = command("install", "--gpu", "--frameworks", "tensorflow,torch")
    assert "--gpu needs" in done.stderr
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
