"""Compiles Horovod's wheel: checks the prerequisites, patches the source, runs pip wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from horovod_runner.errors import InstallError
from horovod_runner.tools.horovod_build import source, toolchain
from horovod_runner.tools.horovod_build.plan import BuildPlan, arch_flags

_DISK_NEEDED = 2 << 30  # bytes; the unpacked source and the object files of both frameworks
_MEMORY_PER_COMPILER = 2 << 30  # bytes; one translation unit with torch's headers
# The lines of overlay/cmake/Modules/attempt.py begin with this. One of them is for people.
_BACKEND = "torch.distributed's backend"


def build_wheel(plan: BuildPlan, shelf: Path, say: Callable[[str], None]) -> Path:
    """Download, patch and compile Horovod; returns the wheel.

    Args:
        plan: what to build.
        shelf: the folder for the wheel and for the log, build.log.
        say: called with each line of progress.

    Raises:
        InstallError: a prerequisite is missing, the download failed, a patch does not fit, or the
            compilation failed; then the text has its first error and the path of the log.
    """
    with tempfile.TemporaryDirectory(prefix="horovod_runner-build-") as name:
        folder = Path(name)
        check_prerequisites(folder)
        root = source.fetch(folder)
        source.apply_patches(root)
        return compile_wheel(plan, root, shelf, say)


def compile_wheel(plan: BuildPlan, root: Path, shelf: Path, say: Callable[[str], None]) -> Path:
    """Compile Horovod's patched source, ``root``; see :func:`build_wheel`."""
    log, folder = shelf / "build.log", root.parent
    say(f"building; the log is {log}")
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps"]
    command += ["--no-cache-dir", "--no-build-isolation"]
    command += [f"--wheel-dir={folder / 'wheel'}", str(root)]
    code = _run_logged(command, build_environment(plan, folder), log, say)
    if code:
        raise InstallError(
            f"the build failed (exit code {code}): {_first_error(log)} The whole log is {log}"
        )
    (wheel,) = (folder / "wheel").glob("*.whl")
    # Renamed in one step, so that another process never reads half a wheel.
    partial = Path(shutil.copy(wheel, shelf / f".{wheel.name}.{os.getpid()}"))
    return partial.replace(shelf / wheel.name)


def check_prerequisites(folder: Path) -> None:
    """Check for the compiler, the tools, the headers and the disk space that a build needs."""
    if toolchain.find_compiler() is None:
        raise InstallError(
            "no C++ compiler found (c++, g++, clang++): apt-get install g++, or set "
            "HOROVOD_RUNNER_WHEELS to a folder or URL with a wheel for these versions "
            "(docs/where/wheels.md)"
        )
    if toolchain.find_tool("make", "gmake") is None:
        raise InstallError("make was not found: apt-get install make")
    cmake = toolchain.find_cmake()
    if cmake is None or tuple(map(int, cmake.version.split(".")[:2])) < (3, 18):
        version = f"found {cmake.version}" if cmake else "found none"
        raise InstallError(f"CMake 3.18 or later is needed, {version}: pip install 'cmake<4'")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise InstallError(f"Python's headers are missing ({header}): apt-get install python3-dev")
    for module in ("pip", "setuptools", "wheel", "packaging"):
        if toolchain.distribution_version(module) is None:
            raise InstallError(
                f"{module} is missing in {sys.prefix}: pip install horovod_runner[build]"
            )
    free = shutil.disk_usage(folder).free
    if free < _DISK_NEEDED:
        raise InstallError(
            f"{folder} has {free / 2**30:.1f} GiB free and the build needs "
            f"{_DISK_NEEDED / 2**30:.0f} GiB: free some, or set TMPDIR to a larger disk."
        )


def build_environment(plan: BuildPlan, folder: Path) -> dict[str, str]:
    """This process's environment and the variables that Horovod's setup.py and patches read."""
    environment = {
        **os.environ,
        **build_flags(plan),
        "PATH": toolchain.tool_path(scripts_first=plan.mpi is None or plan.mpi.package),
        # CMake takes an empty variable for none, and would ask the compiler about this processor.
        "HOROVOD_BUILD_ARCH_FLAGS": arch_flags() or " ",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        # If CMake finds ccache: its entries do not depend on the path of the temporary folder.
        "CCACHE_BASEDIR": str(folder),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    # With the system's MPI its programs come first on PATH, and its CMake may be too old.
    if cmake := toolchain.find_cmake():
        environment["HOROVOD_CMAKE"] = cmake.path
    if plan.mpi and plan.mpi.library:
        modules = Path(sysconfig.get_path("platlib"), "horovod", "torch")
        relative = os.path.relpath(plan.mpi.library, os.path.realpath(modules))
        environment[source.RPATH] = f"$ORIGIN/{relative}"
        environment[source.REQUIRES] = "mpich>=4"
    # Horovod's setup.py starts eight compilers where MAKEFLAGS is empty, as make sets it.
    if "MAKELEVEL" in environment or not environment.get("MAKEFLAGS"):
        environment["MAKEFLAGS"] = f"-j{_compilers()}"
    if plan.gpu and plan.cuda_home and plan.nccl:
        home = str(plan.cuda_home)
        environment |= {
            "HOROVOD_CUDA_HOME": home,
            "CUDA_HOME": home,
            "HOROVOD_NCCL_HOME": str(_stage_nccl(plan.nccl, folder / "nccl")),
        }
    return environment


def build_flags(plan: BuildPlan) -> dict[str, str]:
    """The variables that decide what is built, without the paths of this machine."""
    names = {framework.name for framework in plan.frameworks}
    flags = {
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if plan.mpi else "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_PYTORCH" if "torch" in names else "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITH_TENSORFLOW" if "tensorflow" in names else "HOROVOD_WITHOUT_TENSORFLOW": "1",
        source.CPU_ONLY: str(int(not plan.gpu)),
        "HOROVOD_BUILD_ARCH_FLAGS": arch_flags(),
    }
    if plan.gpu:
        flags |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED"}
        if plan.gpu_architectures:
            flags["HOROVOD_BUILD_CUDA_CC_LIST"] = plan.gpu_architectures
    return flags


def _stage_nccl(nccl: toolchain.Nccl, folder: Path) -> Path:
    """Link NCCL into a folder for the linker: NVIDIA's wheel has no plain ``libnccl.so``."""
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(nccl.include)
    (folder / "lib" / "libnccl.so").symlink_to(nccl.library)
    return folder


def _compilers() -> int:
    """The number of compilers to run at a time: one for each core, if memory allows."""
    import psutil

    by_memory = psutil.virtual_memory().available // _MEMORY_PER_COMPILER
    return max(1, min(len(os.sched_getaffinity(0)), by_memory))


def _run_logged(
    command: Sequence[str], environment: dict[str, str], log: Path, say: Callable[[str], None]
) -> int:
    """Run a build, log its output, and report notices and each 10%; returns the exit code."""
    reported = -1  # tenths
    with (
        log.open("w") as file,
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None  # noqa: S101 - for the type checker
        for line in process.stdout:
            file.write(line)
            if line.strip().startswith(f"{_BACKEND} hvd"):
                say(f"  {line.strip()}")
            match = re.match(r"\s*\[\s*(\d+)%\]\s*(Building|Linking)?.*?([\w.]+)\s*$", line)
            if match and int(match.group(1)) // 10 > reported:
                reported = int(match.group(1)) // 10
                say(f"  {match.group(1):>3}%  {match.group(3)}")
    return process.returncode


def _first_error(log: Path) -> str:
    """The first line of a build's log that looks like an error; otherwise its last line."""
    lines = log.read_text(errors="replace").splitlines()
    pattern = re.compile(r"(\berror:|CMake Error|fatal error|No space left)", re.IGNORECASE)
    errors = [
        line.strip()
        for line in lines
        if pattern.search(line) and not line.strip().startswith(_BACKEND)
    ]
    return (errors or lines[-1:] or ["no output."])[0]
