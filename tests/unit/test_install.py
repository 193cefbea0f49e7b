"""Tests of `horovod-runner install` without a compilation: plan, prerequisites, cache, download."""

from __future__ import annotations

import compileall
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from horovod_runner import InstallError
from horovod_runner.tools.commands import install
from horovod_runner.tools.hello import Greeting
from horovod_runner.tools.horovod_build import build, source, toolchain
from horovod_runner.tools.horovod_build.plan import BuildPlan, make_plan
from horovod_runner.tools.horovod_build.toolchain import Framework, Mpi, Nccl
from tests.programs import run, script

CPU_TORCH = Framework("torch", "2.13.0+cpu")
CUDA_TORCH = Framework("torch", "2.13.0", "13.0")
CUDA_TF = Framework("tensorflow", "2.21.0", "12.5.1")
SYSTEM_MPI = Mpi(False, "4.1.4")


@dataclass
class Machine:
    """What a machine has. A test changes it before it plans."""

    cuda: Path | None
    nccl: Nccl | None
    frameworks: list[Framework] = field(default_factory=lambda: [CUDA_TORCH])
    system: Mpi | None = SYSTEM_MPI
    mpich: Mpi | None = None
    architectures: str | None = None

    def plan(self, frameworks: list[str] | None = None, **options: Any) -> BuildPlan:
        by_name = {framework.name: framework for framework in self.frameworks}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(toolchain, "find_framework", lambda name, **_: by_name.get(name))
            patch.setattr(toolchain, "find_cuda_home", lambda: self.cuda)
            patch.setattr(toolchain, "find_nccl", lambda: self.nccl)
            patch.setattr(toolchain, "find_system_mpi", lambda: self.system)
            patch.setattr(toolchain, "find_mpich", lambda: self.mpich)
            patch.setattr(toolchain, "wanted_architectures", lambda: self.architectures)
            return make_plan(frameworks, **options)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with a CUDA build of torch, and all that a GPU build needs."""
    include = tmp_path / "cuda" / "include"
    include.mkdir(parents=True)
    (include / "cuda.h").write_text("#define CUDA_VERSION 13000\n")
    return Machine(tmp_path / "cuda", Nccl(tmp_path, tmp_path / "libnccl.so.2", "2.29.3"))


def test_nccl_is_used_if_its_requirements_are_met(machine: Machine) -> None:
    chosen = machine.plan()
    assert chosen.gpu
    assert chosen.describe() == "Horovod 0.28.1 for torch 2.13.0, with Gloo, NCCL"
    assert "cuda-13.0-nccl-2.29.3" in chosen.key()


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ({"frameworks": [CPU_TORCH]}, r"torch 2\.13\.0\+cpu .*--frameworks"),
        (
            {"frameworks": [CUDA_TORCH, CUDA_TF]},
            r"torch .*CUDA 13\.0 .*tensorflow .*CUDA 12\.5\.1: .*--frameworks",
        ),
        ({"frameworks": [CUDA_TF]}, r"CUDA 12\.5\.1.*tensorflow.* 13\.0: .*CUDA_HOME"),
        ({"cuda": None}, "nvcc .*CUDA_HOME"),
        ({"nccl": None}, r"nccl\.h .*pip install nvidia-nccl"),
    ],
)
def test_without_a_gpu_requirement_the_build_is_for_cpus_and_gpu_names_it(
    machine: Machine, missing: dict[str, Any], text: str
) -> None:
    vars(machine).update(missing)
    assert not machine.plan().gpu
    with pytest.raises(InstallError, match=rf"^--gpu needs .*{text}") as caught:
        machine.plan(gpu=True)
    assert "\n" not in str(caught.value)


def test_the_user_chooses_frameworks_gpu_and_mpi(machine: Machine) -> None:
    machine.frameworks = [CUDA_TORCH, CUDA_TF]
    assert [f.name for f in machine.plan(["tensorflow"]).frameworks] == ["tensorflow"]
    assert (
        machine.plan(["tensorflow", "torch"]).key() == machine.plan(["torch", "tensorflow"]).key()
    )
    assert not machine.plan(gpu=False).gpu
    described = machine.plan(gpu=False, mpi="system").describe()
    assert described.endswith("with Gloo, MPI (the system's, 4.1.4)")


def test_the_mpich_package_of_an_activated_environment_is_not_the_systems_mpi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, version in {"environment": "5.0.2", "system": "4.1.4"}.items():
        for name in ("mpicxx", "mpirun"):
            script(tmp_path / place / "bin" / name, f"echo {version}")
    folders = [str(tmp_path / place / "bin") for place in ("environment", "system")]
    monkeypatch.setenv("PATH", os.pathsep.join([*folders, os.environ["PATH"]]))
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "environment"))
    assert toolchain.find_system_mpi() == SYSTEM_MPI


def test_a_tool_is_the_first_program_that_prints_its_version(tmp_path: Path) -> None:
    script(tmp_path / "failing", "echo 1.2.3; exit 1")
    script(tmp_path / "silent", "true")
    script(tmp_path / "talking", "echo 'GNU make 4.3.1-x of 2.0' >&2")
    folder = str(tmp_path)
    assert toolchain.find_tool("missing", "failing", path=folder) is None
    found = toolchain.find_tool("missing", "failing", "talking", "silent", path=folder)
    assert found == toolchain.Tool(str(tmp_path / "talking"), "4.3.1")
    found = toolchain.find_tool("silent", "talking", path=folder)
    assert found == toolchain.Tool(str(tmp_path / "silent"), "unknown")


def test_java_is_that_of_java_home_alone_if_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "bin" / "java", "echo 'openjdk version \"17.0.9\"' >&2")
    java = toolchain.Tool(str(tmp_path / "bin" / "java"), "17.0.9")
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]]))
    for home, found in {"": java, str(tmp_path): java, "/nowhere": None}.items():
        monkeypatch.setenv("JAVA_HOME", home)
        assert toolchain.find_java() == found


def test_the_scripts_of_this_environment_are_on_path_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = os.path.realpath(sysconfig.get_path("scripts"))
    (tmp_path / "link").symlink_to(scripts)
    activated = str(tmp_path / "environment" / "bin")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "environment"))
    monkeypatch.setenv("PATH", f"/z:{tmp_path / 'link'}:{activated}:/a:{scripts}")
    assert toolchain.tool_path() == f"{scripts}:/z:{activated}:/a"
    assert toolchain.tool_path(scripts_first=False) == f"/z:/a:{activated}:{scripts}"


def test_the_mpich_package_is_used_if_it_is_installed(machine: Machine, tmp_path: Path) -> None:
    assert machine.plan().mpi is None
    lib = Path(os.path.realpath(sysconfig.get_path("data")), "lib")
    machine.mpich = Mpi(True, "5.0.2", lib)
    chosen = machine.plan()
    assert chosen.describe().endswith("with Gloo, NCCL, MPI (the mpich package, 5.0.2)")
    environment = build.build_environment(chosen, tmp_path)
    assert environment["HOROVOD_RUNNER_REQUIRES"] == "mpich>=4"
    # The path from Horovod's modules to the library, relative.
    origin, _, relative = environment["HOROVOD_RUNNER_RPATH"].partition("/")
    assert origin == "$ORIGIN"
    modules = Path(os.path.realpath(sysconfig.get_path("platlib")), "horovod", "torch")
    assert os.path.normpath(modules / relative) == str(lib)
    assert machine.plan(mpi="none").mpi is None
    system = build.build_environment(machine.plan(gpu=False, mpi="system"), tmp_path)
    assert "HOROVOD_RUNNER_RPATH" not in system


def test_the_cmake_that_was_checked_is_the_one_that_builds(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("old", "2.8"), ("own", "3.31")):
        script(tmp_path / name / "cmake", f"echo cmake version {version}")
    monkeypatch.setenv("PATH", str(tmp_path / "old"), prepend=":")
    plan = machine.plan(gpu=False, mpi="system")
    environment = build.build_environment(plan, tmp_path)
    # The system's programs come first, because mpicxx is one of them.
    assert shutil.which("cmake", path=environment["PATH"]) == str(tmp_path / "old" / "cmake")
    checked = toolchain.find_cmake()
    assert checked
    assert checked.path == environment["HOROVOD_CMAKE"] != str(tmp_path / "old" / "cmake")
    monkeypatch.setenv("HOROVOD_CMAKE", str(tmp_path / "own" / "cmake"))
    environment = build.build_environment(plan, tmp_path)
    assert environment["HOROVOD_CMAKE"] == str(tmp_path / "own" / "cmake")


@pytest.mark.parametrize(
    ("state", "arguments", "text"),
    [
        ({"frameworks": []}, {}, "torch .*tensorflow .*installed"),
        ({"frameworks": []}, {"frameworks": ["torch"]}, "pip install torch"),
        ({}, {"frameworks": ["mxnet"]}, "mxnet"),
        ({"system": None}, {"mpi": "system"}, "libopenmpi-dev"),
        ({}, {"mpi": "mpich"}, "pip install mpich"),
        ({"frameworks": [Framework("torch", "2", error="boom")]}, {}, r"torch 2 .*\(boom\)"),
    ],
)
def test_a_plan_that_is_impossible_is_a_one_line_error(
    machine: Machine, state: dict[str, Any], arguments: dict[str, Any], text: str
) -> None:
    vars(machine).update(state)
    with pytest.raises(InstallError, match=text) as caught:
        machine.plan(**arguments)
    assert "\n" not in str(caught.value)


def test_another_version_of_any_library_is_another_wheel(machine: Machine) -> None:
    plans = [machine.plan(), machine.plan(gpu=False), machine.plan(mpi="system")]
    keys = {chosen.key() for chosen in plans}
    machine.mpich = Mpi(True, "4.1.4", Path("lib"))
    keys.add(machine.plan().key())
    machine.frameworks = [Framework("torch", "2.12.0", "13.0")]
    keys.add(machine.plan().key())
    machine.nccl = Nccl(Path(), Path(), "2.30.1")
    keys.add(machine.plan().key())
    machine.architectures = "90"
    keys.add(machine.plan().key())
    # The older one of two C++ interfaces; all torches of today have the newer one.
    for abi in (False, True, None):
        machine.frameworks = [Framework("torch", "2.12.0", "13.0", cxx11_abi=abi)]
        keys.add(machine.plan().key())
    assert len(keys) == 8
    assert not any("/" in key for key in keys)


def test_another_patch_or_overlay_makes_another_wheel(
    tmp_path: Path,
) -> None:
    patches = shutil.copytree(source.PATCHES, tmp_path / "patches")
    overlay = shutil.copytree(source.OVERLAY, tmp_path / "overlay")
    first, *_ = sorted(patches.iterdir())
    (module,) = overlay.rglob("FindPytorch.cmake")
    before = source.digest(patches, overlay)
    assert f"-{before}_" in BuildPlan((CPU_TORCH,)).key()
    first.write_text(f"Another subject.\n{first.read_text()}")
    compileall.compile_dir(overlay, quiet=1)  # as pip does
    assert source.digest(patches, overlay) == before  # nor does a header change the source
    first.write_text(f"{first.read_text()}+\n")
    patched = source.digest(patches, overlay)
    module.write_text(f"{module.read_text()}\n")
    assert len({before, patched, source.digest(patches, overlay)}) == 3


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("find_compiler", r"apt-get install g\+\+.*HOROVOD_RUNNER_WHEELS"),
        ("make", "apt-get install make"),
        ("cmake", r"3\.18 .*none: pip install 'cmake<4'"),
        ("cmake 3.18", r"3\.18 .*3\.9\.1: pip install 'cmake<4'"),
        ("header", "python3-dev"),
        ("packaging", r"horovod_runner\[build\]"),
        ("disk", r" 0\.0 GiB .* 2 GiB.*TMPDIR"),
    ],
)
def test_a_missing_prerequisite_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str, text: str
) -> None:
    version = toolchain.distribution_version
    changes: dict[str, dict[str, Callable[..., Any]]] = {
        "find_compiler": {"find_compiler": lambda: None},
        "make": {
            "find_compiler": lambda: toolchain.Tool("c++", "14"),
            "find_tool": lambda *_: None,
        },
        "cmake": {"find_cmake": lambda: None},
        "cmake 3.18": {"find_cmake": lambda: toolchain.Tool("/usr/bin/cmake", "3.9.1")},
        "packaging": {"distribution_version": lambda name: version(name.replace(missing, "-"))},
    }
    for name, function in changes.get(missing, {}).items():
        monkeypatch.setattr(toolchain, name, function)
    if missing == "header":
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    if missing == "disk":
        usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InstallError, match=text) as caught:
        build.check_prerequisites(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: Machine) -> Path:
    """A wheel in the cache, built for this machine's plan."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wheel = install.cache_folder() / "wheels" / machine.plan().key() / "horovod.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    return wheel


def test_a_cached_wheel_is_used_again_except_for_a_rebuild(machine: Machine, cached: Path) -> None:
    said: list[str] = []
    assert install.find_or_build_wheel(machine.plan(), say=said.append) == cached
    assert "built before" in said[0]
    # Nothing was written: the cache may be one that this user can only read.
    assert [path.name for path in cached.parent.iterdir()] == [cached.name]
    options: dict[str, Any] = {"say": print, "build": lambda *_: Path("built.whl")}
    rebuilt = install.find_or_build_wheel(machine.plan(), rebuild=True, **options)
    assert rebuilt == Path("built.whl")


def test_the_cache_is_in_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert install.cache_folder().is_relative_to(tmp_path / ".cache")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A source archive like Horovod's, whose setup.py only creates a file."""
    path, setup = tmp_path / "horovod-0.28.1.tar.gz", tmp_path / "setup.py"
    setup.write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()")
    with tarfile.open(path, "w:gz") as tar:
        tar.add(setup, "horovod-0.28.1/setup.py")
    return path


def test_a_download_that_failed_or_has_another_digest_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, archive: Path
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/true")  # replaces pip: the archive exists
    with pytest.raises(InstallError, match="SHA-256"):
        source.fetch(tmp_path)
    assert not (tmp_path / "horovod-0.28.1").exists()
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(InstallError, match=r"Horovod 0\.28\.1.* pip .* 1\b"):
        source.fetch(tmp_path)


def test_no_code_of_a_download_with_another_digest_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, archive: Path
) -> None:
    (tmp_path / "build").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archive.parent))
    with pytest.raises(InstallError, match="HASHES"):
        source.fetch(tmp_path / "build")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("compilers_exit", "exit_code"), [(0, 0), (1, 0), (4, 4)])
def test_a_backend_that_does_not_compile_is_replaced_by_the_reason(
    tmp_path: Path, compilers_exit: int, exit_code: int
) -> None:
    compiler = script(
        tmp_path / "c++",
        'echo "$*" >> given\n'
        'case "$*" in *MISSING*) exit 0; esac\n'
        f"echo 'a.cc:1: fatal error: \"c10d/Work.hpp\" is gone' >&2\nexit {compilers_exit}",
    )
    attempt = source.OVERLAY / "cmake" / "Modules" / "attempt.py"
    command = [sys.executable, attempt, compiler, "-c", "a.cc"]
    done = run(*command, cwd=tmp_path)
    assert done.returncode == exit_code
    reason = '"a.cc:1: fatal error: \\"c10d/Work.hpp\\" is gone"'
    again = [f"-c a.cc -DHOROVOD_RUNNER_MISSING={reason}"] if compilers_exit == 1 else []
    assert (tmp_path / "given").read_text().splitlines() == ["-c a.cc", *again]
    assert ("hvd is left out" in done.stderr) == (compilers_exit == 1)


# Lines that cost the backend only.
NO_BACKEND = "torch.distributed's backend: y.cc:1: error: gone"
LEFT_OUT = "torch.distributed's backend hvd is left out, because of error: y"


@pytest.mark.parametrize(
    ("lines", "reason", "told"),
    [
        (
            [
                *("[ 10%] Building CXX object a/b.cc.o", NO_BACKEND, LEFT_OUT),
                *("x.cc:3: error: no such thing", "make: error: 2"),
            ],
            "x.cc:3: error: no such thing",
            ["   10%  b.cc.o", f"  {LEFT_OUT}"],
        ),
        (["compiling", "Killed"], "Killed", []),
        ([NO_BACKEND, "last"], "last", []),
        ([], "no output.", []),
    ],
)
def test_a_build_that_fails_shows_its_first_error_or_its_last_line(
    lines: list[str],
    reason: str,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    body = "\n".join([*(f'echo "{line}"' for line in lines), "exit 3"])
    monkeypatch.setattr("sys.executable", str(script(tmp_path / "pip", body)))
    said: list[str] = []
    with pytest.raises(InstallError, match=rf" 3\): {reason} The whole log is .*/build\.log$"):
        build.compile_wheel(BuildPlan((CPU_TORCH,)), tmp_path / "horovod", tmp_path, said.append)
    assert said[1:] == told


def test_no_flags_for_the_processor_are_not_a_question_to_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An empty variable is none for CMake, which would then add flags for this very processor.
    monkeypatch.setenv("HOROVOD_BUILD_ARCH_FLAGS", "")
    chosen = BuildPlan((CPU_TORCH,))
    assert build.build_environment(chosen, tmp_path)["HOROVOD_BUILD_ARCH_FLAGS"] == " "
    assert build.build_flags(chosen)["HOROVOD_BUILD_ARCH_FLAGS"] == ""


@pytest.mark.parametrize(
    ("flags", "features"),
    [
        ("", set()),
        ("-mf16c  -mavx -mfma", {"f16c", "avx", "fma"}),
        ("-O3 -m64 -mtune=native -mno-avx512f -msse4.2 -mlzcnt", {"sse4_2", "abm"}),
        ("-march=x86-64", set()),
        ("-march=haswell", {"haswell"}),  # no processor has it: such a wheel fits none
    ],
)
def test_the_features_that_flags_need(flags: str, features: set[str]) -> None:
    assert toolchain.needed_features(flags) == features


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A wheel, in a folder whose name pip would take apart if it were a part of a requirement."""
    folder = tmp_path / "räder; zwei [x]"
    folder.mkdir()
    wheel = folder / "tiny-1.0+a-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        text = "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0+a\n"
        archive.writestr("tiny-1.0+a.dist-info/METADATA", text)
        archive.writestr("tiny-1.0+a.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0+a.dist-info/RECORD", "tiny.py,,\n")
    return wheel


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder into which pip installs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "target"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "target"


def test_a_wheel_that_is_exchanged_after_the_check_is_not_installed(
    tiny: Path, target: Path
) -> None:
    with pytest.raises(InstallError, match="DO NOT MATCH THE HASHES"):
        install.pip_install(tiny, print, sha256="0" * 64)
    assert not target.exists()
    install.pip_install(tiny, print, sha256=hashlib.sha256(tiny.read_bytes()).hexdigest())
    assert (target / "tiny.py").exists()


def test_without_pip_it_is_said_how_to_get_it(
    tiny: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(InstallError, match=r"pip .*python -m ensurepip"):
        install.pip_install(tiny, print)


def test_two_installs_into_one_environment_take_turns(
    tiny: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, waits, ended = threading.Event(), threading.Event(), threading.Event()

    def pip(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        if not first.is_set():
            first.set()
            assert waits.wait(60)
            ended.set()
        assert ended.is_set()
        return subprocess.CompletedProcess([], 0)

    def say(line: str) -> None:
        assert line == "another process installs into this environment: waiting for it"
        waits.set()

    monkeypatch.setattr(subprocess, "run", pip)
    with ThreadPoolExecutor() as threads:
        one = threads.submit(install.pip_install, tiny, say)
        assert first.wait(60)
        two = threads.submit(install.pip_install, tiny, say)
        one.result(60)
        two.result(60)


def greetings(*totals: float) -> list[Greeting]:
    return [Greeting(n, len(totals), n, "host", total, "cpu") for n, total in enumerate(totals)]


def test_a_wrong_sum_on_any_rank_is_an_error() -> None:
    said: list[str] = []
    for totals, told in (((3, 2), "2 on rank 1"), ((6, 6), "6 on rank 0")):
        with pytest.raises(InstallError, match=rf"torch .* {told}, .* 3\b.*doctor"):
            install.prove((CPU_TORCH,), said.append, lambda *_, t=totals: greetings(*t))
    assert said == []
    install.prove((CPU_TORCH,), said.append, lambda *_: greetings(3, 3))
    assert said == ["two ranks reduced with torch: ok"]


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
    nccl = toolchain.find_nccl()
    assert nccl is not None
    assert nccl.version == "2.29.3"
    staged = build._stage_nccl(nccl, tmp_path / "stage")
    assert (staged / "lib" / "libnccl.so").resolve() == root / "lib" / "libnccl.so.2"
    assert (staged / "include" / "nccl.h").exists()


def test_a_gpu_build_gets_the_paths_of_cuda_and_nccl(machine: Machine, tmp_path: Path) -> None:
    machine.architectures = "90"
    environment = build.build_environment(machine.plan(), tmp_path)
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert environment["HOROVOD_CUDA_HOME"] == str(tmp_path / "cuda")
    assert environment["HOROVOD_BUILD_CUDA_CC_LIST"] == "90"
    assert environment["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert environment["HOROVOD_WITHOUT_MPI"] == "1"


def test_the_cuda_toolkit_is_found_beside_nvcc(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cuda" / "bin").mkdir()
    (tmp_path / "cuda" / "bin" / "nvcc").touch(mode=0o755)
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "cuda" / "bin"))
    home = toolchain.find_cuda_home()
    assert home == tmp_path / "cuda"
    assert toolchain.cuda_version(home) == "13.0"
    (home / "include" / "cuda.h").unlink()
    assert toolchain.find_cuda_home() != home
