"""`horovod-runner install`: build Horovod against the frameworks of this environment.

    inventory -> BuildPlan -> wheel from the cache, or from what hosts share (wheels.py), or
        check_prerequisites -> fetch -> mend -> pip wheel (progress shown, log kept) -> cache
    -> pip install -> prove: two ranks reduce a tensor with each framework

The wheel is cached under a key of everything that it was built against: pip's own wheel cache knows
only the source, and a wheel built against other headers loads and then misbehaves.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from horovod_runner import horovod_source, inventory, wheels
from horovod_runner.errors import InstallError

MpiChoice = Literal["mpich", "system", "none"]
_DISK_NEEDED = 2 << 30  # bytes; the unpacked source and the object files of both frameworks
_MEMORY_PER_COMPILER = 2 << 30  # bytes; one translation unit with torch's headers


@dataclass(frozen=True)
class BuildPlan:
    """What will be built, against what.

    Attributes:
        frameworks: the frameworks to support, as found in this environment.
        gpu: build CUDA kernels and NCCL collectives.
        mpi: the MPI whose controller and data plane are built beside Gloo.
        cuda_home: the CUDA toolkit of a GPU build.
        nccl: the NCCL of a GPU build.
        gpu_architectures: compute capabilities of a GPU build, as "80,90"; None leaves Horovod's
            default.
    """

    frameworks: tuple[inventory.Framework, ...]
    gpu: bool = False
    mpi: inventory.Mpi | None = None
    cuda_home: Path | None = None
    nccl: inventory.Nccl | None = None
    gpu_architectures: str | None = None

    def key(self) -> str:
        """Names the cached wheel: a build with any other of these versions is another wheel."""
        source = f"horovod-{horovod_source.VERSION}-{horovod_source.digest()}"
        parts = [source, sysconfig.get_config_var("SOABI")]
        parts += [f"{f.name}-{f.version}" for f in self.frameworks]
        if self.gpu and self.nccl:
            cuda = next((f.cuda for f in self.frameworks if f.cuda), "unknown")
            architectures = self.gpu_architectures or "default"
            parts.append(f"cuda-{cuda}-nccl-{self.nccl.version}-cc-{architectures}")
        if self.mpi:
            parts.append(f"{'mpich' if self.mpi.package else 'mpi'}-{self.mpi.version}")
        parts.append(f"{platform.machine()}{_arch_flags().replace(' ', '')}")
        parts.append("".join(platform.libc_ver()))
        return "_".join(re.sub(r"[^\w.+-]", "-", str(part)) for part in parts)

    def describe(self) -> str:
        """One line for a person."""
        against = " and ".join(f"{f.name} {f.version}" for f in self.frameworks)
        planes = ["Gloo"] + ["NCCL"] * self.gpu
        if self.mpi:
            kind = "the mpich package" if self.mpi.package else "the system's"
            planes.append(f"MPI ({kind}, {self.mpi.version})")
        return f"Horovod {horovod_source.VERSION} for {against}, with {', '.join(planes)}"


def plan(
    frameworks: Sequence[str] | None = None,
    gpu: bool | None = None,
    mpi: MpiChoice | None = None,
) -> BuildPlan:
    """Decide what to build from what is here.

    Args:
        frameworks: names to build for; None takes all that are installed.
        gpu: True demands an NCCL build, False a CPU build; None takes NCCL when a framework is a
            CUDA build and the CUDA toolkit and NCCL are found.
        mpi: also build the MPI controller, with the "mpich" package of this environment or with
            the "system"'s MPI, or with "none"; None takes the mpich package where it is installed.

    Raises:
        InstallError: a framework is missing or broken, or the build asked for cannot be made.
    """
    unknown = set(frameworks or ()) - set(inventory.FRAMEWORKS)
    if unknown:
        raise InstallError(
            f"unknown framework {', '.join(sorted(unknown))}; choose from torch and tensorflow."
        )
    found = []
    names = frameworks or inventory.FRAMEWORKS
    with ThreadPoolExecutor() as threads:  # each import takes seconds, in a process of its own
        looked_up = list(threads.map(inventory.find_framework, names))
    for name, framework in zip(names, looked_up, strict=True):
        if framework is None and frameworks:
            raise InstallError(f"{name} is not installed in {sys.prefix}: pip install {name}")
        if framework and framework.error:
            raise InstallError(
                f"{name} {framework.version} is installed but does not import "
                f"({framework.error}); mend it, or leave it out with --frameworks."
            )
        if framework:
            found.append(framework)
    if not found:
        raise InstallError(
            f"neither torch nor tensorflow is installed in {sys.prefix}: install one first."
        )
    found_mpi = _find_mpi(mpi)
    if gpu is False:
        return BuildPlan(tuple(found), mpi=found_mpi)
    cuda_home, nccl = inventory.find_cuda_home(), inventory.find_nccl()
    lacking = _lacking_for_gpu(found, cuda_home, nccl)
    if gpu and lacking:
        raise InstallError(f"--gpu needs {lacking}")
    use_gpu = not lacking
    return BuildPlan(
        tuple(found),
        gpu=use_gpu,
        mpi=found_mpi,
        cuda_home=cuda_home if use_gpu else None,
        nccl=nccl if use_gpu else None,
        gpu_architectures=_gpu_architectures() if use_gpu else None,
    )


def _find_mpi(wanted: MpiChoice | None) -> inventory.Mpi | None:
    if wanted == "none":
        return None
    found = inventory.find_system_mpi() if wanted == "system" else inventory.find_mpich()
    if found is None and wanted == "system":
        raise InstallError(
            "--mpi needs an MPI compiler wrapper (mpicxx) on PATH: install libopenmpi-dev, or load "
            "your site's MPI module. HorovodRunner itself takes the mpich package: pip install "
            "mpich, and leave --mpi out."
        )
    if found is None and wanted == "mpich":
        raise InstallError(f"mpich is not installed in {sys.prefix}: pip install mpich")
    return found


def _lacking_for_gpu(
    frameworks: Iterable[inventory.Framework],
    cuda_home: Path | None,
    nccl: inventory.Nccl | None,
) -> str | None:
    """What keeps these frameworks from a GPU build; None if nothing does."""
    frameworks = list(frameworks)
    for framework in frameworks:
        if framework.cuda is None:
            return (
                f"CUDA builds of all frameworks, and {framework.name} {framework.version} is a "
                "CPU build: install a CUDA build, or leave it out with --frameworks."
            )
    majors = {f.name: str(f.cuda).split(".")[0] for f in frameworks}
    if len(set(majors.values())) > 1:
        both = " and ".join(f"{f.name} is for CUDA {f.cuda}" for f in frameworks)
        return f"frameworks of one CUDA release, and {both}: name one, --frameworks."
    if cuda_home is None:
        return "nvcc and CUDA's headers: install the CUDA toolkit and set CUDA_HOME."
    found = inventory.cuda_version(cuda_home)
    if found.split(".")[0] not in majors.values():
        return (
            f"CUDA {frameworks[0].cuda}, for which {frameworks[0].name} was built, and "
            f"{cuda_home} has {found}: set CUDA_HOME to a toolkit of that release."
        )
    if nccl is None:
        return "NCCL's nccl.h and libnccl.so: pip install nvidia-nccl-cu12 (or -cu13)."
    return None


def check_prerequisites(build: BuildPlan, folder: Path) -> None:
    """Say in one line what a build would miss, before it begins.

    Raises:
        InstallError: something is missing; the text names it and how to get it.
    """
    if inventory.find_compiler() is None:
        raise InstallError("no C++ compiler found (c++, g++, clang++): apt-get install g++")
    if inventory.find_tool("make", "gmake") is None:
        raise InstallError("make was not found: apt-get install make")
    cmake = inventory.find_tool("cmake")
    if cmake is None or tuple(map(int, cmake.version.split(".")[:2])) < (3, 18):
        seen = f"found {cmake.version}" if cmake else "found none"
        raise InstallError(f"CMake 3.18 or later is needed, {seen}: pip install 'cmake<4'")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise InstallError(f"Python's headers are missing ({header}): apt-get install python3-dev")
    for module in ("pip", "setuptools", "wheel", "packaging"):
        if inventory.distribution_version(module) is None:
            raise InstallError(
                f"{module} is missing in {sys.prefix}: pip install horovod_runner[build]"
            )
    free = shutil.disk_usage(folder).free
    if free < _DISK_NEEDED:
        raise InstallError(
            f"{folder} has {free / 2**30:.1f} GiB free and the build needs "
            f"{_DISK_NEEDED / 2**30:.0f} GiB: free some, or set TMPDIR to a larger disk."
        )


def cache_folder() -> Path:
    """Where built wheels and logs are kept: ``$XDG_CACHE_HOME``/horovod_runner."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "horovod_runner")


def find_or_build_wheel(
    build: BuildPlan,
    *,
    rebuild: bool = False,
    shared: str | None = None,
    say: Callable[[str], None],
) -> Path:
    """The wheel of a plan: from this user's cache, from a shared folder, or built now.

    Args:
        build: what the wheel is for.
        rebuild: build it even where there is one.
        shared: a path or URL with wheels that other hosts built, see :mod:`horovod_runner.wheels`.
            A wheel that is not there yet is copied to it.
        say: takes each line of progress.

    Raises:
        InstallError: the shared folder cannot be read or has a damaged wheel; a prerequisite is
            missing; or the build fails, and the text names its log.
    """
    shelf = cache_folder() / "wheels" / build.key()
    shelf.mkdir(parents=True, exist_ok=True)
    with _locked(shelf / ".lock", say):
        cached = sorted(shelf.glob("*.whl"))
        if cached and not rebuild:
            say(f"using the wheel built before: {cached[0]}")
            return cached[0]
        if shared and not rebuild:
            with tempfile.TemporaryDirectory(prefix=".fetched-", dir=shelf) as name:
                copy = wheels.fetch(shared, build.key(), Path(name))
                if copy:
                    say(f"using the wheel that another host built: {shared}/{build.key()}")
                    return copy.replace(shelf / copy.name)
        wheel = _build_wheel(build, shelf, say)
        if shared:
            wheels.publish(shared, build.key(), wheel, say)
        return wheel


@contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock that ends with this process, whatever ends it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process builds this very wheel: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_wheel(build: BuildPlan, shelf: Path, say: Callable[[str], None]) -> Path:
    log = shelf / "build.log"
    with tempfile.TemporaryDirectory(prefix="horovod_runner-build-") as name:
        folder = Path(name)
        check_prerequisites(build, folder)
        source = horovod_source.fetch(folder)
        horovod_source.mend(source)
        say(f"building; the log is {log}")
        command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps"]
        command += ["--no-cache-dir", "--no-build-isolation"]
        command += [f"--wheel-dir={folder / 'wheel'}", str(source)]
        code = _run_logged(command, _build_environment(build, folder), log, say)
        if code:
            raise InstallError(
                f"the build failed (exit code {code}): {_first_error(log)} The whole log is {log}"
            )
        (wheel,) = (folder / "wheel").glob("*.whl")
        # Moved in one step, so that a build beside this one never sees half a wheel.
        partial = Path(shutil.copy(wheel, shelf / f".{wheel.name}.{os.getpid()}"))
        return partial.replace(shelf / wheel.name)


def _build_environment(build: BuildPlan, folder: Path) -> dict[str, str]:
    names = {framework.name for framework in build.frameworks}
    environment = {
        **os.environ,
        "PATH": inventory.tool_path(own_first=build.mpi is None or build.mpi.package),
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if build.mpi else "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_PYTORCH" if "torch" in names else "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITH_TENSORFLOW" if "tensorflow" in names else "HOROVOD_WITHOUT_TENSORFLOW": "1",
        horovod_source.CPU_ONLY: str(int(not build.gpu)),
        "HOROVOD_BUILD_ARCH_FLAGS": _arch_flags(),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        # For ccache, where CMake finds it: what it keeps does not depend on the temporary folder.
        "CCACHE_BASEDIR": str(folder),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if build.mpi and build.mpi.library:
        modules = Path(sysconfig.get_path("platlib"), "horovod", "torch")
        way = os.path.relpath(build.mpi.library, os.path.realpath(modules))
        environment[horovod_source.RPATH] = f"$ORIGIN/{way}"
        environment[horovod_source.REQUIRES] = "mpich>=4"
    environment.setdefault("MAKEFLAGS", f"-j{_compilers()}")
    if build.gpu and build.cuda_home and build.nccl:
        home = str(build.cuda_home)
        environment |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CUDA_HOME": home,
            "CUDA_HOME": home,
            "HOROVOD_NCCL_HOME": str(_stage_nccl(build.nccl, folder / "nccl")),
            "HOROVOD_NCCL_LINK": "SHARED",
        }
        if build.gpu_architectures:
            environment["HOROVOD_BUILD_CUDA_CC_LIST"] = build.gpu_architectures
    return environment


def _stage_nccl(nccl: inventory.Nccl, folder: Path) -> Path:
    """A folder as the linker wants it: NVIDIA's wheel lacks the plain ``libnccl.so``."""
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(nccl.include)
    (folder / "lib" / "libnccl.so").symlink_to(nccl.library)
    return folder


def _arch_flags() -> str:
    """Compiler flags for what this processor can do: Horovod's own choice, where none is set."""
    chosen = os.environ.get("HOROVOD_BUILD_ARCH_FLAGS")
    if chosen is not None:
        return chosen
    known = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = known.group(1).split() if known else []
    return " ".join(f"-m{flag}" for flag in ("f16c", "avx", "fma") if flag in flags)


def _gpu_architectures() -> str | None:
    """The compute capabilities of this machine's GPUs as "80,90"; None leaves Horovod's default."""
    chosen = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST")
    if chosen:
        return chosen
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    found = {line.strip().replace(".", "") for line in answer.stdout.splitlines() if line.strip()}
    return ",".join(sorted(found)) if answer.returncode == 0 and found else None


def _compilers() -> int:
    """How many compilers run side by side: one a core, as far as memory allows."""
    import psutil

    by_memory = psutil.virtual_memory().available // _MEMORY_PER_COMPILER
    return max(1, min(len(os.sched_getaffinity(0)), by_memory))


def _run_logged(
    command: Sequence[str], environment: dict[str, str], log: Path, say: Callable[[str], None]
) -> int:
    """Run a build, keep its output, and say each tenth of make's progress once."""
    said = -1
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
            match = re.match(r"\s*\[\s*(\d+)%\]\s*(Building|Linking)?.*?([\w.]+)\s*$", line)
            if match and int(match.group(1)) // 10 > said:
                said = int(match.group(1)) // 10
                say(f"  {match.group(1):>3}%  {match.group(3)}")
    return process.returncode


def _first_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    pattern = re.compile(r"(\berror:|CMake Error|fatal error|No space left)", re.IGNORECASE)
    found = [line.strip() for line in lines if pattern.search(line)]
    return (found or lines[-1:] or ["no output."])[0]


def install(
    frameworks: Sequence[str] | None = None,
    *,
    gpu: bool | None = None,
    mpi: MpiChoice | None = None,
    rebuild: bool = False,
    shared: str | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Build Horovod against this environment's frameworks, install it and prove that it reduces.

    Args:
        frameworks: see :func:`plan`.
        gpu: see :func:`plan`.
        mpi: see :func:`plan`.
        rebuild: build even if a wheel of the same key is cached.
        shared: a path or URL with wheels, see :func:`find_or_build_wheel`.
        say: takes each line of progress.

    Raises:
        InstallError: see :func:`plan` and :func:`find_or_build_wheel`; or what was installed does
            not reduce.
    """
    build = plan(frameworks, gpu, mpi)
    say(build.describe())
    wheel = find_or_build_wheel(build, rebuild=rebuild, shared=shared, say=say)
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    for command in ([*pip, str(wheel)], [*pip, "--no-deps", "--force-reinstall", str(wheel)]):
        # First what Horovod itself needs, then this very wheel over any other of its version.
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InstallError(f"pip could not install {wheel}: {done.stderr.strip()}")
    prove(build, say)


def prove(build: BuildPlan, say: Callable[[str], None]) -> None:
    """Reduce a tensor over two ranks with each framework of the plan."""
    from horovod_runner.hello import expected_total, hello

    for framework in build.frameworks:
        ranks = hello(framework.name, np=-2)
        total = expected_total(ranks)
        wrong = [seen for seen in ranks if seen.total != total]
        if wrong:
            raise InstallError(
                f"Horovod was built but {framework.name} reduced to {wrong[0].total} on rank "
                f"{wrong[0].rank}, not {total}: run `horovod-runner doctor`."
            )
        say(f"two ranks reduced with {framework.name}: ok")
