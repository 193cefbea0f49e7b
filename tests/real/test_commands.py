"""The commands on this very environment: what they print is checked, nothing is faked."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Literal

import pytest

from horovod_runner import __version__
from horovod_runner.host import software
from horovod_runner.tools.commands.install import find_or_build_wheel
from horovod_runner.tools.horovod_build.plan import make_plan
from horovod_runner.tools.horovod_build.release import release, write_index
from tests.preload import COMMAND
from tests.programs import ROOT, run

pytestmark = [pytest.mark.spark, pytest.mark.horovod]


# Slow: doctor starts Spark, and ranks with each framework, all of them cold.
def test_doctor_finds_all_well_here() -> None:
    prints_to_stdout = {"JAVA_TOOL_OPTIONS": "-XX:+PrintCommandLineFlags"}
    done = run(COMMAND, "doctor", "--master", "local[2]", "--json", variables=prints_to_stdout)
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
    done = run(COMMAND, "doctor", variables={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "undefined symbol: torch_of_before" in done.stdout
    advice = "run: horovod-runner install --frameworks torch --rebuild"
    assert f"Horovod for torch: {advice}" in done.stdout.splitlines()


class Beside:
    """An environment beside this one, whose Horovod other tests use meanwhile.

    Attributes:
        built: the frameworks that this environment's Horovod was built for.
        gpu, mpi: what else it was built for, as `make_plan` takes it.
        packages: where the other environment's packages go.
    """

    def __init__(self, folder: Path) -> None:
        import horovod.torch as hvd

        venv.create(folder)
        [self.packages] = folder.glob("lib/*/site-packages")
        (self.packages / "others.pth").write_text("\n".join([str(ROOT), *sys.path]))
        self.scripts = folder / "bin"
        if hvd.mpi_built():  # Horovod looks for it in its own environment
            mpich = f"mpich=={software.installed()['mpich']}"
            uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps"]
            uv += ["--python", str(self.scripts / "python"), mpich]
            subprocess.run(uv, check=True, timeout=400)
        home = Path(hvd.__file__).parents[1]
        names = ("tensorflow", "torch")
        self.built = [name for name in names if any(home.glob(f"{name}/mpi_lib*.so"))]
        self.gpu: bool = hvd.cuda_built()
        self.mpi: Literal["none"] | None = None if hvd.mpi_built() else "none"

    def install(self, **environment: str) -> str:
        """Install what this environment has; returns what was printed."""
        command = ["-m", "horovod_runner.tools.commands.cli", "install"]
        command += ["--frameworks", ",".join(self.built), "--gpu" if self.gpu else "--cpu"]
        if self.mpi:
            command += ["--mpi", self.mpi]
        done = run(self.scripts / "python", *command, variables=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("two ranks reduced with") == len(self.built)
        assert (self.packages / "horovod").is_dir()
        return done.stdout


def test_install_takes_the_cached_wheel_and_proves_it(tmp_path: Path) -> None:
    assert "using the wheel built before" in Beside(tmp_path / "beside").install()


# Slow: a new environment, and two ranks with each framework that prove its Horovod.
def test_install_takes_a_published_wheel_where_there_is_no_compiler(tmp_path: Path) -> None:
    beside = Beside(tmp_path / "beside")
    plan = make_plan(beside.built, beside.gpu, beside.mpi)
    record = release(
        find_or_build_wheel(plan, say=print), plan, tmp_path / "wheels", runner=__version__
    )
    write_index(tmp_path / "wheels")
    printed = beside.install(
        HOROVOD_RUNNER_WHEELS=str(tmp_path / "wheels"),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        PATH=str(beside.scripts),
        CXX="",
    )
    assert f"using {record.file} from {tmp_path / 'wheels'}, SHA-256" in printed
    [metadata] = beside.packages.glob("horovod-*.dist-info")
    assert metadata.name == f"horovod-{record.file.split('-')[1]}.dist-info"
