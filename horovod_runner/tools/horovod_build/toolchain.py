"""Finds frameworks, compilers, MPI, CUDA and NCCL, for `horovod-runner install` and `doctor`.

Frameworks are imported in a child process. An import here would cost seconds and gigabytes, and a
broken framework may abort the process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from horovod_runner.host.gpus import ask_nvidia_smi

FRAMEWORKS = ("torch", "tensorflow")

_PROBES = {
    "torch": (
        "import torch; version, cuda = torch.__version__, torch.version.cuda;"
        "abi = torch.compiled_with_cxx11_abi()"
    ),
    "tensorflow": (
        "import tensorflow as tf; version = tf.__version__; abi = None;"
        "info = tf.sysconfig.get_build_info();"
        "cuda = info.get('cuda_version') if info.get('is_cuda_build') else None"
    ),
}
_MARK = "horovod_runner:"  # before each answer of a probe: frameworks print other lines
# The names of Horovod's functions hvd.<name>_built().
CAPABILITIES = ("gloo", "mpi", "nccl", "cuda", "ddl", "ccl", "rocm")


# Features that Linux names in another way than the compiler's flags, and the levels of -march=.
_FEATURES = {
    "sse3": "pni",
    "sse4": "sse4_2",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "lzcnt": "abm",
    "bmi": "bmi1",
    "pclmul": "pclmulqdq",
    "sha": "sha_ni",
    "avx512vnni": "avx512_vnni",
}
_V2 = frozenset(("cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"))
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_LEVELS: dict[str, frozenset[str]] = {
    "x86-64": frozenset(),
    "x86-64-v2": _V2,
    "x86-64-v3": _V3,
    "x86-64-v4": _V4,
}


@dataclass(frozen=True)
class Horovod:
    """Horovod's library for a framework as it loads in this environment."""

    version: str = ""
    built: tuple[str, ...] = ()  # those of CAPABILITIES that it was built with
    error: str | None = None  # the last line of the error if it does not load
    backend: str = ""  # why it has no backend for torch.distributed although it has MPI and torch


@dataclass(frozen=True)
class Framework:
    """A deep learning framework, "torch" or "tensorflow", as it imports in this environment."""

    name: str
    version: str  # with any local suffix ("2.13.0+cpu")
    cuda: str | None = None  # the version that it was built for; None for a CPU build
    error: str | None = None  # the last line of the error if it does not import
    horovod: Horovod | None = None  # None unless requested
    # Whether torch has libstdc++'s newer names of strings and lists, as all builds since 2.7 have.
    # Older ones of one version differ in it. None for TensorFlow.
    cxx11_abi: bool | None = None

    @property
    def kind(self) -> str:
        """What it was built for, as text: "CUDA 13.0" or "CPU build"."""
        return f"CUDA {self.cuda}" if self.cuda else "CPU build"


def distribution_version(name: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def find_framework(name: str, *, with_horovod: bool = False) -> Framework | None:
    """Import a framework in a child process; None if it is not installed.

    Args:
        name: "torch" or "tensorflow".
        with_horovod: also load Horovod's library for it, if Horovod is installed.
    """
    installed = next(
        (v for d in (name, f"{name}-cpu", f"{name}-gpu") if (v := distribution_version(d))), None
    )
    if installed is None:
        return None
    with_horovod = with_horovod and distribution_version("horovod") is not None
    # A fifth of the time of an import would be a search for garbage, of which there is none; and so
    # would be a second at the end.
    code = f"import gc, json; gc.disable(); {_PROBES[name]}\n"
    code += f"print('\\n{_MARK}' + json.dumps([version, cuda, abi]), flush=True)\n"
    if with_horovod:
        calls = ",".join(f"'{c}': hvd.{c}_built()" for c in CAPABILITIES)
        code += f"import horovod, horovod.{name} as hvd\nbuilt = {{{calls}}}\n"
        code += "built = [name for name in built if built[name]]\n"
        code += "backend = ''\n"
        if name == "torch":
            code += "from horovod_runner.integrations.torch_backend import fault\n"
            code += "backend = fault()\n"
        code += f"print('\\n{_MARK}' + json.dumps([horovod.__version__, built, backend]))\n"
    code += "gc.freeze()"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    probe = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    lines = probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"]
    marked = [line for line in probe.stdout.splitlines() if line.startswith(_MARK)]
    answers = [json.loads(line.removeprefix(_MARK)) for line in marked]
    if not answers or (probe.returncode and not with_horovod):
        return Framework(name, installed, error=lines[-1])
    horovod = None
    if with_horovod and probe.returncode:
        horovod = Horovod(error=lines[-1])
    elif with_horovod:
        release, built, backend = answers[1]
        horovod = Horovod(release, tuple(built), backend=backend)
    version, cuda, abi = answers[0]
    return Framework(name, version, cuda, horovod=horovod, cxx11_abi=abi)


def find_frameworks(names: Sequence[str], *, with_horovod: bool = False) -> list[Framework]:
    """The installed ones of some frameworks, imported in parallel: each takes seconds."""
    with ThreadPoolExecutor() as threads:
        found = threads.map(partial(find_framework, with_horovod=with_horovod), names)
        return [framework for framework in found if framework is not None]


@dataclass(frozen=True)
class Tool:
    """A program outside Python: its path and the version that it prints."""

    path: str
    version: str


def find_tool(
    *candidates: str, version_flag: str = "--version", path: str | None = None
) -> Tool | None:
    """The first of some programs that exists and prints its version; None if there is none.

    ``path`` has the folders to search, as in PATH; None means :func:`tool_path`.
    """
    for candidate in candidates:
        program = shutil.which(candidate, path=path or tool_path())
        if program is None:
            continue
        command = [program, version_flag]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            match = re.search(r"\d+(\.\d+)+", answer.stdout + answer.stderr)
            return Tool(program, match.group() if match else "unknown")
    return None


def tool_path(*, scripts_first: bool = True) -> str:
    """PATH with the scripts folder of this Python environment, even if it is not activated.

    Without ``scripts_first`` the system's programs come before those of this environment, and of
    the one that is activated: its mpich package is not the system's MPI, either.
    """
    scripts = os.path.realpath(sysconfig.get_path("scripts"))
    activated = os.path.realpath(Path(os.environ.get("VIRTUAL_ENV", sys.prefix), "bin"))
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    others = [entry for entry in entries if os.path.realpath(entry) != scripts]
    if scripts_first:
        return os.pathsep.join([scripts, *others])
    others.sort(key=lambda entry: os.path.realpath(entry) == activated)
    return os.pathsep.join([*others, scripts])


@dataclass(frozen=True)
class Mpi:
    """An MPI to build against: this environment's mpich package, or the system's MPI."""

    package: bool  # which needs no mpirun
    version: str
    library: Path | None = None  # the folder of the package's library


def find_mpich() -> Mpi | None:
    """The mpich package of this environment; None if it is not installed."""
    try:
        distribution = metadata.distribution("mpich")
    except metadata.PackageNotFoundError:
        return None
    for file in distribution.files or ():
        if file.name.startswith("libmpi.so"):
            library = Path(os.path.realpath(str(distribution.locate_file(file)))).parent
            return Mpi(True, distribution.version, library)
    return None


def find_system_mpi() -> Mpi | None:
    """The MPI whose compiler wrapper is on PATH, other than the mpich package's; None without."""
    path = tool_path(scripts_first=False)
    compiler = find_tool("mpicxx", "mpic++", path=path)
    if compiler is None:
        return None
    # The wrapper's --version prints the compiler's version.
    launcher = find_tool("mpirun", "mpiexec", path=path)
    return Mpi(False, (launcher or compiler).version)


def processor_features() -> frozenset[str]:
    """The features of this processor, as Linux names them ("avx"); empty on other architectures."""
    listed = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return frozenset(listed.group(1).split() if listed else ())


def needed_features(flags: str) -> frozenset[str]:
    """The features that code needs which was compiled with flags for x86 ("-mavx -mfma").

    A processor that a flag names (-march=haswell) counts as a feature that no processor has.
    """
    needed: set[str] = set()
    for flag in flags.split():
        if flag.startswith("-march="):
            name = flag.removeprefix("-march=")
            needed |= _LEVELS.get(name, {name})
        elif flag.startswith("-m") and "=" not in flag and not flag.startswith(("-mno-", "-m64")):
            name = flag.removeprefix("-m")
            needed.add(_FEATURES.get(name, name))
    return frozenset(needed)


def find_compiler() -> Tool | None:
    """The C++ compiler that CMake would use: ``$CXX``, otherwise c++, g++ or clang++."""
    return find_tool(*filter(None, [os.environ.get("CXX")]), "c++", "g++", "clang++")


def find_cmake() -> Tool | None:
    """The CMake to build with: ``$HOROVOD_CMAKE``, this environment's, or the first on PATH."""
    return find_tool(*filter(None, [os.environ.get("HOROVOD_CMAKE")]), "cmake")


def find_java() -> Tool | None:
    """The Java that Spark would use: from ``$JAVA_HOME`` alone if that is set, else from PATH."""
    home = os.environ.get("JAVA_HOME")
    return find_tool(str(Path(home, "bin", "java")) if home else "java", version_flag="-version")


def find_cuda_home() -> Path | None:
    """The folder of the CUDA toolkit: ``$CUDA_HOME``, that of nvcc on PATH, or /usr/local/cuda."""
    named = [os.environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    beside_nvcc = str(Path(nvcc).resolve().parent.parent) if nvcc else None
    for home in (*named, beside_nvcc, "/usr/local/cuda"):
        # A script called nvcc may be a wrapper without a toolkit, so check for the headers too.
        if home and Path(home, "bin/nvcc").exists() and Path(home, "include/cuda.h").exists():
            return Path(home)
    return None


def cuda_version(home: Path) -> str:
    """The CUDA version of a toolkit, from its header ("13.0"). It is "0.0" if that has none."""
    text = (home / "include" / "cuda.h").read_text(errors="replace")
    match = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", text)
    number = int(match.group(1)) if match else 0
    return f"{number // 1000}.{number % 1000 // 10}"


@dataclass(frozen=True)
class Nccl:
    """NCCL's header folder and shared library."""

    include: Path
    library: Path
    version: str


def find_nccl() -> Nccl | None:
    """NCCL from ``$HOROVOD_NCCL_HOME``, torch's nvidia-nccl wheel, or the system; else None."""
    home = os.environ.get("HOROVOD_NCCL_HOME")
    roots = [Path(home)] if home else []
    roots += [Path(entry, "nvidia", "nccl") for entry in sys.path if entry]
    roots += [Path("/usr"), Path("/usr/local")]
    for root in roots:
        header = root / "include" / "nccl.h"
        if not header.exists():
            continue
        for folder in ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu"):
            for library in sorted(root.glob(f"{folder}/libnccl.so*")):
                return Nccl(header.parent, library, _nccl_version(header))
    return None


def _nccl_version(header: Path) -> str:
    text = header.read_text(errors="replace")
    parts = [re.search(rf"#define\s+NCCL_{p}\s+(\d+)", text) for p in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(match.group(1) if match else "?" for match in parts)


def wanted_architectures() -> str | None:
    """The compute capabilities to build for as "80,90"; None leaves Horovod's default.

    Those of ``$HOROVOD_BUILD_CUDA_CC_LIST``, or of this machine's GPUs.
    """
    chosen = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST")
    if chosen:
        return chosen
    # An old driver answers "[N/A]", or with an error.
    told = [line.strip() for line in ask_nvidia_smi("compute_cap")]
    capabilities = {each.replace(".", "") for each in told if re.fullmatch(r"\d+\.\d", each)}
    return ",".join(sorted(capabilities)) or None
