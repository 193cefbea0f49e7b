"""What this environment and this machine hold: `install` builds against it, `doctor` shows it.

Frameworks are imported in a child process: importing both torch and TensorFlow here would cost
seconds and gigabytes, and a broken one may abort the process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

FRAMEWORKS = ("torch", "tensorflow")

_PROBES = {
    "torch": "import torch; version, cuda = torch.__version__, torch.version.cuda",
    "tensorflow": (
        "import tensorflow as tf; version = tf.__version__;"
        "info = tf.sysconfig.get_build_info();"
        "cuda = info.get('cuda_version') if info.get('is_cuda_build') else None"
    ),
}


_MARK = "horovod_runner:"  # before a probe's answers: frameworks print lines of their own
# What Horovod's libraries tell of themselves.
CAPABILITIES = ("gloo", "mpi", "nccl", "cuda", "ddl", "ccl", "rocm")


@dataclass(frozen=True)
class Horovod:
    """Horovod's library for a framework as it loads in this environment.

    Attributes:
        version: its version.
        built: what it was built with, of :data:`CAPABILITIES`.
        error: the last line of the error if it does not load.
    """

    version: str = ""
    built: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Framework:
    """A deep learning framework as it imports in this environment.

    Attributes:
        name: "torch" or "tensorflow".
        version: its version, with any local suffix ("2.13.0+cpu").
        cuda: the CUDA version that it was built for, None for a CPU build.
        error: the last line of the import error if it is installed and does not import.
        horovod: Horovod's library for it, if that was asked for.
    """

    name: str
    version: str
    cuda: str | None = None
    error: str | None = None
    horovod: Horovod | None = None


def distribution_version(name: str) -> str | None:
    """The installed version of a distribution, None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def find_framework(name: str, *, with_horovod: bool = False) -> Framework | None:
    """Import a framework in a child process and say what it is; None where it is not installed.

    Args:
        name: the framework's.
        with_horovod: load Horovod's library for it, too.
    """
    installed = next(
        (v for d in (name, f"{name}-cpu", f"{name}-gpu") if (v := distribution_version(d))), None
    )
    if installed is None:
        return None
    code = f"import json; {_PROBES[name]}\n"
    code += f"print('\\n{_MARK}' + json.dumps([version, cuda]), flush=True)\n"
    if with_horovod:
        calls = ",".join(f"'{c}': hvd.{c}_built()" for c in CAPABILITIES)
        code += f"import horovod, horovod.{name} as hvd\nbuilt = {{{calls}}}\n"
        code += "built = [name for name in built if built[name]]\n"
        code += f"print('\\n{_MARK}' + json.dumps([horovod.__version__, built]))"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    probe = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    lines = probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"]
    said = [line for line in probe.stdout.splitlines() if line.startswith(_MARK)]
    told = [json.loads(line.removeprefix(_MARK)) for line in said]
    if not told or (probe.returncode and not with_horovod):
        return Framework(name, installed, error=lines[-1])
    horovod = None
    if with_horovod:
        failed = probe.returncode != 0
        horovod = Horovod(error=lines[-1]) if failed else Horovod(told[1][0], tuple(told[1][1]))
    version, cuda = told[0]
    return Framework(name, version, cuda, horovod=horovod)


@dataclass(frozen=True)
class Tool:
    """A program outside Python: where it is and what it calls its version."""

    path: str
    version: str


def find_tool(
    *candidates: str, version_flag: str = "--version", path: str | None = None
) -> Tool | None:
    """The first of the candidate programs that is there and answers."""
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


def tool_path(*, own_first: bool = True) -> str:
    """PATH with this environment's scripts, whether or not it was activated.

    Args:
        own_first: in front of all others; else behind them.
    """
    scripts = sysconfig.get_path("scripts")
    others = os.environ.get("PATH", os.defpath).split(os.pathsep)
    others = [entry for entry in others if os.path.realpath(entry) != os.path.realpath(scripts)]
    return os.pathsep.join([scripts, *others] if own_first else [*others, scripts])


@dataclass(frozen=True)
class Mpi:
    """An MPI to build against.

    Attributes:
        package: whether it is the mpich package of this environment, which the ranks' launchers
            need no ``mpirun`` for; else the system's.
        library: the folder of the mpich package's library.
    """

    package: bool
    version: str
    library: Path | None = None


def find_mpich() -> Mpi | None:
    """The mpich package of this environment; None where it is not installed."""
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
    """The MPI whose compiler wrapper is on PATH outside this environment's scripts."""
    path = tool_path(own_first=False)
    compiler = find_tool("mpicxx", "mpic++", path=path)
    if compiler is None:
        return None
    # The wrapper's own --version is that of the compiler.
    launcher = find_tool("mpirun", "mpiexec", path=path)
    return Mpi(False, (launcher or compiler).version)


def find_compiler() -> Tool | None:
    """The C++ compiler that CMake would take: ``$CXX``, else c++, g++ or clang++."""
    return find_tool(*filter(None, [os.environ.get("CXX")]), "c++", "g++", "clang++")


def find_java() -> Tool | None:
    """Java as Spark looks for it: ``$JAVA_HOME``, then PATH."""
    home = os.environ.get("JAVA_HOME")
    candidates = [str(Path(home, "bin", "java"))] if home else []
    return find_tool(*candidates, "java", version_flag="-version")


def find_cuda_home() -> Path | None:
    """The CUDA toolkit: ``$CUDA_HOME``, the nvcc on PATH, or /usr/local/cuda."""
    named = [os.environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    beside_nvcc = str(Path(nvcc).resolve().parent.parent) if nvcc else None
    for home in (*named, beside_nvcc, "/usr/local/cuda"):
        # A wrapper script called nvcc may stand alone: the headers make it a toolkit.
        if home and Path(home, "bin/nvcc").exists() and Path(home, "include/cuda.h").exists():
            return Path(home)
    return None


def cuda_version(home: Path) -> str:
    """The CUDA version of a toolkit, as its header says ("13.0")."""
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
    """NCCL: ``$HOROVOD_NCCL_HOME``, the nvidia-nccl wheel that torch brings, or the system's."""
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
