"""Planning a build and naming what it would miss; the build itself is made by the set-up."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sysconfig
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from horovod_runner import InstallError, hello, horovod_source, install, inventory
from horovod_runner.hello import Greeting
from horovod_runner.inventory import Framework, Mpi, Nccl

CPU_TORCH = Framework("torch", "2.13.0+cpu")
CUDA_TORCH = Framework("torch", "2.13.0", "13.0")
CUDA_TF = Framework("tensorflow", "2.21.0", "12.5.1")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the inventory finds; a test changes it before it plans."""
    include = tmp_path / "cuda" / "include"
    include.mkdir(parents=True)
    (include / "cuda.h").write_text("#define CUDA_VERSION 13000\n")
    found: dict[str, Any] = {
        "frameworks": [CUDA_TORCH],
        "cuda": tmp_path / "cuda",
        "nccl": Nccl(tmp_path, tmp_path / "libnccl.so.2", "2.29.3"),
        "system": Mpi(False, "4.1.4"),
        "mpich": None,
        "architectures": None,
    }
    monkeypatch.setattr(
        inventory,
        "find_framework",
        lambda name: next((f for f in found["frameworks"] if f.name == name), None),
    )
    monkeypatch.setattr(inventory, "find_cuda_home", lambda: found["cuda"])
    monkeypatch.setattr(inventory, "find_nccl", lambda: found["nccl"])
    monkeypatch.setattr(inventory, "find_system_mpi", lambda: found["system"])
    monkeypatch.setattr(inventory, "find_mpich", lambda: found["mpich"])
    monkeypatch.setattr(install, "_gpu_architectures", lambda: found["architectures"])
    return found


def test_nccl_is_chosen_where_everything_for_it_is_here(machine: dict[str, Any]) -> None:
    plan = install.plan()
    assert plan.gpu
    assert plan.describe() == "Horovod 0.28.1 for torch 2.13.0, with Gloo, NCCL"
    assert "cuda-13.0-nccl-2.29.3" in plan.key()


@pytest.mark.parametrize(
    ("lacking", "text"),
    [
        ({"frameworks": [CPU_TORCH]}, "torch 2.13.0[+]cpu is a CPU build"),
        ({"frameworks": [CUDA_TORCH, CUDA_TF]}, "one CUDA release.*--frameworks"),
        ({"frameworks": [CUDA_TF]}, "CUDA 12.5.1, for which tensorflow was built.*has 13.0"),
        ({"cuda": None}, "CUDA_HOME"),
        ({"nccl": None}, "nccl.h"),
    ],
)
def test_a_cpu_build_is_chosen_where_something_lacks_and_gpu_says_what(
    machine: dict[str, Any], lacking: dict[str, Any], text: str
) -> None:
    machine.update(lacking)
    assert not install.plan().gpu
    with pytest.raises(InstallError, match=text):
        install.plan(gpu=True)


def test_the_user_may_decide(machine: dict[str, Any]) -> None:
    machine["frameworks"] = [CUDA_TORCH, CUDA_TF]
    assert [f.name for f in install.plan(["tensorflow"]).frameworks] == ["tensorflow"]
    assert not install.plan(gpu=False).gpu
    described = install.plan(gpu=False, mpi="system").describe()
    assert described.endswith("with Gloo, MPI (the system's, 4.1.4)")


def test_the_mpich_package_is_taken_where_it_is_installed(
    machine: dict[str, Any], tmp_path: Path
) -> None:
    assert install.plan().mpi is None
    lib = Path(sysconfig.get_path("data"), "lib")
    machine["mpich"] = Mpi(True, "5.0.2", lib)
    plan = install.plan()
    assert plan.describe().endswith("with Gloo, NCCL, MPI (the mpich package, 5.0.2)")
    environment = install._build_environment(plan, tmp_path)
    assert environment["HOROVOD_RUNNER_REQUIRES"] == "mpich>=4"
    # From where Horovod's modules are to where the library is, wherever both are.
    origin, _, way = environment["HOROVOD_RUNNER_RPATH"].partition("/")
    assert origin == "$ORIGIN"
    modules = Path(os.path.realpath(sysconfig.get_path("platlib")), "horovod", "torch")
    assert os.path.normpath(modules / way) == os.path.realpath(lib)
    assert install.plan(mpi="none").mpi is None
    system = install._build_environment(install.plan(gpu=False, mpi="system"), tmp_path)
    assert "HOROVOD_RUNNER_RPATH" not in system


@pytest.mark.parametrize(
    ("state", "arguments", "text"),
    [
        ({"frameworks": []}, {}, "neither torch nor tensorflow is installed"),
        ({"frameworks": []}, {"frameworks": ["torch"]}, "pip install torch"),
        ({}, {"frameworks": ["mxnet"]}, "unknown framework mxnet"),
        ({"system": None}, {"mpi": "system"}, "libopenmpi-dev"),
        ({}, {"mpi": "mpich"}, "pip install mpich"),
        ({"frameworks": [Framework("torch", "2", error="boom")]}, {}, "does not import .boom."),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(
    machine: dict[str, Any], state: dict[str, Any], arguments: dict[str, Any], text: str
) -> None:
    machine.update(state)
    with pytest.raises(InstallError, match=text) as caught:
        install.plan(**arguments)
    assert "\n" not in str(caught.value)


def test_another_version_of_anything_is_another_wheel(machine: dict[str, Any]) -> None:
    plans = [install.plan(), install.plan(gpu=False), install.plan(mpi="system")]
    keys = {plan.key() for plan in plans}
    machine["mpich"] = Mpi(True, "4.1.4", Path("lib"))
    keys.add(install.plan().key())
    machine["frameworks"] = [Framework("torch", "2.12.0", "13.0")]
    keys.add(install.plan().key())
    machine["nccl"] = Nccl(Path(), Path(), "2.30.1")
    keys.add(install.plan().key())
    machine["architectures"] = "90"
    keys.add(install.plan().key())
    assert len(keys) == 7
    assert not any("/" in key for key in keys)


def test_a_source_that_is_mended_otherwise_is_another_wheel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = install.BuildPlan((CPU_TORCH,))
    before = plan.key()
    first, *others = horovod_source.EDITS
    edits = (replace(first, new=f"{first.new}\n"), *others)
    monkeypatch.setattr(horovod_source, "EDITS", edits)
    assert plan.key() != before


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("find_compiler", "apt-get install g"),
        ("make", "apt-get install make"),
        ("cmake", "found none: pip install 'cmake<4'"),
        ("cmake 3.18", "found 3.9.1: pip install 'cmake<4'"),
        ("header", "python3-dev"),
        ("packaging", r"horovod_runner\[build\]"),
        ("disk", "GiB free"),
    ],
)
def test_what_a_build_would_miss_is_said_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str, text: str
) -> None:
    find_tool = inventory.find_tool
    version = inventory.distribution_version
    if missing == "find_compiler":
        monkeypatch.setattr(inventory, "find_compiler", lambda: None)
    monkeypatch.setattr(
        inventory, "find_tool", lambda *names: None if missing in names else find_tool(*names)
    )
    monkeypatch.setattr(
        inventory, "distribution_version", lambda name: None if name == missing else version(name)
    )
    if missing == "cmake 3.18":
        old = inventory.Tool("/usr/bin/cmake", "3.9.1")
        monkeypatch.setattr(
            inventory, "find_tool", lambda *names: old if "cmake" in names else find_tool(*names)
        )
    if missing == "header":
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    if missing == "disk":
        usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InstallError, match=text) as caught:
        install.check_prerequisites(install.BuildPlan((CPU_TORCH,)), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: dict[str, Any]) -> Path:
    """A wheel that was built for this machine before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wheel = install.cache_folder() / "wheels" / install.plan().key() / "horovod.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    return wheel


def test_a_cached_wheel_is_used_again(cached: Path) -> None:
    said: list[str] = []
    assert install.find_or_build_wheel(install.plan(), say=said.append) == cached
    assert "built before" in said[0]


def test_rebuild_builds_what_is_cached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cached: Path
) -> None:
    built = tmp_path / "built.whl"
    monkeypatch.setattr(install, "_build_wheel", lambda *_: built)
    assert install.find_or_build_wheel(install.plan(), rebuild=True, say=print) == built


def test_every_edit_is_made_and_a_foreign_source_is_refused(tmp_path: Path) -> None:
    for edit in horovod_source.EDITS:
        file = tmp_path / edit.path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as source:
            source.write(f"before\n{edit.old}\nafter\n")
    horovod_source.mend(tmp_path)
    for edit in horovod_source.EDITS:
        assert edit.new in (tmp_path / edit.path).read_text()
    probe = "cmake/Modules/FindPytorch.cmake"
    assert (tmp_path / probe).read_text() == (horovod_source.OVERLAY / probe).read_text()
    with pytest.raises(InstallError, match="lacks the text to mend"):
        horovod_source.mend(tmp_path)


def test_a_download_that_is_not_the_release_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "horovod-0.28.1.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("horovod-0.28.1/setup.py"), io.BytesIO())
    monkeypatch.setattr("sys.executable", "/bin/true")  # stands for a pip that brought the above
    with pytest.raises(InstallError, match="SHA-256"):
        horovod_source.fetch(tmp_path)


def test_the_source_is_unpacked_by_a_tarfile_without_filters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("horovod-0.28.1/setup.py"), io.BytesIO())
    monkeypatch.setattr("sys.executable", "/bin/true")
    monkeypatch.setattr(horovod_source, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    extract = tarfile.TarFile.extractall
    monkeypatch.delattr(tarfile, "data_filter")  # as before Python 3.11.4

    def extractall(tar: tarfile.TarFile, path: Path) -> None:
        extract(tar, path)

    monkeypatch.setattr(tarfile.TarFile, "extractall", extractall)
    assert (horovod_source.fetch(tmp_path) / "setup.py").exists()


def test_a_registry_out_of_reach_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(InstallError, match="could not be downloaded: pip exit code 1"):
        horovod_source.fetch(tmp_path)


def test_a_failed_build_shows_its_first_error_and_its_log(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    said: list[str] = []
    script = "echo '[ 10%] Building CXX object a/b.cc.o'; echo 'x.cc:3: error: no such thing'; "
    script += "echo 'make: error: 2'; exit 3"
    assert install._run_logged(["sh", "-c", script], {}, log, said.append) == 3
    assert said == ["   10%  b.cc.o"]
    assert install._first_error(log) == "x.cc:3: error: no such thing"


def test_a_build_that_fails_ends_the_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip = tmp_path / "pip"
    pip.write_text("#!/bin/sh\necho 'x.cc:3: error: no such thing'\nexit 3\n")
    pip.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(pip))
    monkeypatch.setattr(install, "check_prerequisites", lambda *_: None)
    monkeypatch.setattr(horovod_source, "fetch", lambda folder: folder)
    monkeypatch.setattr(horovod_source, "mend", lambda _: None)
    told = r"failed \(exit code 3\): x.cc:3: error: no such thing The whole log is .*build.log"
    with pytest.raises(InstallError, match=told):
        install._build_wheel(install.BuildPlan((CPU_TORCH,)), tmp_path, print)


def greetings(*totals: float) -> list[Greeting]:
    return [Greeting(n, len(totals), n, "host", total, "cpu") for n, total in enumerate(totals)]


def test_an_install_is_proved_by_ranks_that_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hello, "hello", lambda *_, **__: greetings(3, 3))
    said: list[str] = []
    install.prove(install.BuildPlan((CPU_TORCH,)), said.append)
    assert said == ["two ranks reduced with torch: ok"]


@pytest.mark.parametrize("totals", [(3, 2), (6, 6)])
def test_a_wrong_sum_on_any_rank_is_no_proof(
    monkeypatch: pytest.MonkeyPatch, totals: tuple[float, float]
) -> None:
    monkeypatch.setattr(hello, "hello", lambda *_, **__: greetings(*totals))
    said: list[str] = []
    with pytest.raises(InstallError, match=r"reduced to \d on rank \d, not 3: run"):
        install.prove(install.BuildPlan((CPU_TORCH,)), said.append)
    assert said == []


def test_nccl_is_found_in_a_wheel_and_staged_for_the_linker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "nvidia" / "nccl"
    (root / "include").mkdir(parents=True)
    (root / "lib").mkdir()
    (root / "lib" / "libnccl.so.2").touch()
    (root / "include" / "nccl.h").write_text(
        "#define NCCL_MAJOR 2\n#define NCCL_MINOR 29\n#define NCCL_PATCH 3\n"
    )
    monkeypatch.delenv("HOROVOD_NCCL_HOME", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    nccl = inventory.find_nccl()
    assert nccl is not None
    assert nccl.version == "2.29.3"
    staged = install._stage_nccl(nccl, tmp_path / "stage")
    assert (staged / "lib" / "libnccl.so").resolve() == root / "lib" / "libnccl.so.2"
    assert (staged / "include" / "nccl.h").exists()


def test_a_gpu_build_is_told_where_everything_is(machine: dict[str, Any], tmp_path: Path) -> None:
    machine["architectures"] = "90"
    environment = install._build_environment(install.plan(), tmp_path)
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert environment["HOROVOD_CUDA_HOME"] == str(tmp_path / "cuda")
    assert environment["HOROVOD_BUILD_CUDA_CC_LIST"] == "90"
    assert environment["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert environment["HOROVOD_WITHOUT_MPI"] == "1"


def test_the_cuda_toolkit_is_found_beside_nvcc(
    machine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    (tmp_path / "cuda" / "bin").mkdir()
    (tmp_path / "cuda" / "bin" / "nvcc").touch(mode=0o755)
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "cuda" / "bin"))
    home = inventory.find_cuda_home()
    assert home == tmp_path / "cuda"
    assert inventory.cuda_version(home) == "13.0"
    (home / "include" / "cuda.h").unlink()
    assert inventory.find_cuda_home() != home
