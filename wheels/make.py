"""Builds the wheels of table.toml, tries each in an empty environment, and writes their index.

    python wheels/make.py --out dist/wheels                    # all rows, for hours
    python wheels/make.py --out dist/wheels 3.13-torch-cpu     # one
    python wheels/make.py --out dist/wheels --index            # the index alone

`make wheels` calls it. Needs this package, uv, and what Horovod's build needs. A row whose Python
is not on the machine is left out, and said so. A wheel gets into the folder once it was tried.

WHEELS_CONTAINER names the container image that this runs in, for the wheels' records. TORCH_INDEX
names a package index from which rows for CPUs take torch.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
# A container that sees this folder of its host has environments of its own, as in the Makefile.
BASE = ROOT / (".venv-wheels-container" if os.environ.get("WHEELS_CONTAINER") else ".venv-wheels")
WORK = BASE / "rows"
TABLE = Path(__file__).with_name("table.toml")
PROCESSOR_FLAGS = {"x86_64": "-mf16c -mavx -mfma"}  # every x86 processor since 2013
# Variables that change a build and are not in the wheel's record; and HOROVOD_*.
FLAGS = ("CFLAGS", "CPPFLAGS", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS", "CUDA_HOME", "CUDA_PATH")
MODULES = ("PYTHONPATH", "PYTHONHOME")  # lead out of a row's environment
NO_COMPILER = ("gcc", "g++", "cc", "c++", "clang++", "cmake", "make", "nvcc")


@dataclass(frozen=True)
class Row:
    """One wheel of the table: "3.13-torch-cpu" and its entry."""

    python: str
    name: str
    entry: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.python}-{self.name}"

    @property
    def frameworks(self) -> list[str]:
        """The frameworks that the wheel supports."""
        return list(self.entry["frameworks"])

    @property
    def plane(self) -> str:
        """The option of `horovod-runner install` for it."""
        return "--gpu" if "cuda" in self.entry else "--cpu"


def rows() -> list[Row]:
    """All rows, for each Python."""
    table = tomllib.loads(TABLE.read_text())
    entries = table["rows"].items()
    return [Row(python, name, entry) for python in table["pythons"] for name, entry in entries]


def main() -> int:
    """Build what is asked for; 1 if a wheel could not be built or tried."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="3.13-torch-cpu ... (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "wheels")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--index", action="store_true", help="write the index, build nothing")
    parser.add_argument("--address", metavar="URL", help="where the wheels will lie, for the index")
    options = parser.parse_args()
    known = {str(row): row for row in rows()}
    if options.list:
        print("\n".join(known))
        return 0
    unknown = set(options.rows) - set(known)
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))}; --list shows all")
    out = options.out.resolve()
    results = {}
    for name in [] if options.index else options.rows or known:
        row = known[name]
        results[name] = make(row, out, find_python(row.python), Steps(build, try_out))
    for name, result in results.items():
        print(f"{name}: {result}")
    for name, why in tomllib.loads(TABLE.read_text())["left_out"].items():
        print(f"left out: {name}: {why}")
    records = write_index(out, options.address)
    print(f"{len(records)} wheels in {out}, index {out / 'index.html'}")
    return int(any(result.startswith("failed") for result in results.values()))


def write_index(out: Path, address: str | None = None) -> list[Any]:
    """Write the pages about the wheels; returns their records."""
    from horovod_runner.errors import InstallError  # --list needs no package
    from horovod_runner.tools.horovod_build import release

    try:
        records: list[Any] = release.write_index(out, address)
    except InstallError as error:
        raise SystemExit(f"no index was written: {error}") from error
    return records


class Steps(NamedTuple):
    """What is done for a wheel; each gets the row, its Python and two folders.

    Attributes:
        build: builds the wheel into the second folder.
        try_out: installs it from there in an empty environment; returns seconds.
    """

    build: Callable[[Row, str, Path, Path], None]
    try_out: Callable[[Row, str, Path, Path], float]


def make(row: Row, out: Path, python: str | None, steps: Steps, work: Path = WORK) -> str:
    """Build one wheel and try it; returns a line about the result."""
    if python is None:
        return f"left out, Python {row.python} with venv and Python.h is not on this machine"
    # The same path each time: ccache knows the framework's headers by it.
    folder = work / str(row)
    shutil.rmtree(folder, ignore_errors=True)
    # Not in `out` before it was tried, and tried beside no other wheel, which might fit as well.
    staged = folder / "wheels"
    try:
        steps.build(row, python, folder / "build", staged)
        seconds = steps.try_out(row, python, folder / "empty", staged)
        publish(staged, out)
    except subprocess.CalledProcessError as error:
        return f"failed, exit code {error.returncode}: {' '.join(map(str, error.cmd))}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return f"built; in an empty environment two ranks reduced {seconds:.0f} s after the packages"


def publish(staged: Path, out: Path) -> None:
    """Move the wheel and then its record to the folder that is published."""
    out.mkdir(parents=True, exist_ok=True)
    for kind in ("*.whl", "*.whl.json"):
        for file in staged.glob(kind):
            shutil.move(file, out / file.name)


def clean_environment(*left_out: str) -> dict[str, str]:
    """This process's environment without some variables, and without other folders of modules."""
    return {name: os.environ[name] for name in os.environ if name not in (*MODULES, *left_out)}


def find_python(version: str) -> str | None:
    """The interpreter of a version that can build Horovod here; None if there is none."""
    found = subprocess.run(
        [ROOT / ".ci" / "find-python", version], stdout=subprocess.PIPE, text=True, check=False
    )
    return found.stdout.strip() or None


def build_environment(machine: str) -> dict[str, str]:
    """The variables of a build: none that would change it and that the record would not name."""
    horovods = [name for name in os.environ if name.startswith("HOROVOD_")]
    environment = clean_environment(*FLAGS, *horovods)
    flags = PROCESSOR_FLAGS.get(machine)
    if flags is not None:
        environment["HOROVOD_BUILD_ARCH_FLAGS"] = flags
    return environment


def build(row: Row, python: str, folder: Path, out: Path) -> None:
    """Build the wheel of a row in an environment of its own."""
    environment = build_environment(platform.machine())
    install(row, python, folder, f"{ROOT}[build,mpich]", *row.entry.get("cuda", ()))
    if "cuda" in row.entry:
        [packages] = folder.glob("lib/*/site-packages")
        environment["CUDA_HOME"] = str(stage_cuda(packages, folder / "cuda"))
        environment["HOROVOD_BUILD_CUDA_CC_LIST"] = row.entry["architectures"]
    command: list[str | Path] = [folder / "bin" / "python", ROOT / "wheels" / "build.py"]
    command += ["--out", out, "--cache", BASE / "built"]
    command += ["--frameworks", ",".join(row.frameworks)]
    command += ["--gpu"] * (row.plane == "--gpu")
    subprocess.run(command, env=environment, cwd=folder, check=True)


def stage_cuda(packages: Path, folder: Path) -> Path:
    """Link NVIDIA's packages into a toolkit's layout, which has libraries without a version."""
    [toolkit] = packages.glob("nvidia/cu[0-9]*")
    # Copied: nvcc looks for bin/../lib64, and a link's .. is where the link leads.
    shutil.copytree(toolkit / "bin", folder / "bin")
    for name in ("include", "nvvm"):
        (folder / name).symlink_to(toolkit / name)
    for name in ("lib", "lib64"):
        (folder / name).mkdir()
        for library in (toolkit / "lib").iterdir():
            (folder / name / library.name).symlink_to(library)
            plain = folder / name / f"{library.name.partition('.so')[0]}.so"
            if ".so." in library.name and not plain.exists():
                plain.symlink_to(library)
    return folder


def try_out(row: Row, python: str, folder: Path, out: Path) -> float:
    """Install the wheel in an empty environment without a compiler, and reduce with two ranks.

    Returns:
        The seconds from the environment with its packages to the reduced tensor.
    """
    install(row, python, folder, str(ROOT), "pip")
    programs = without_compilers(folder / "programs")
    environment = {
        **clean_environment("CXX"),
        "PATH": f"{folder / 'bin'}:{programs}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HOROVOD_RUNNER_WHEELS": str(out),
    }
    write_index(out)
    command: list[str | Path] = [folder / "bin" / "horovod-runner", "install", row.plane]
    command += ["--frameworks", ",".join(row.frameworks)]
    began = time.monotonic()
    done = subprocess.run(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=False
    )
    seconds = time.monotonic() - began
    print(done.stdout, end="", flush=True)
    # A build would have taken minutes and a compiler.
    if done.returncode or f"from {out}, SHA-256" not in done.stdout:
        raise subprocess.CalledProcessError(done.returncode or 1, command)
    with_pip(folder, out, environment)
    return seconds


def with_pip(folder: Path, out: Path, environment: dict[str, str]) -> None:
    """Install the same wheel with pip alone, from the index page."""
    python = folder / "bin" / "python"
    ask = "import importlib.metadata as m; print(m.version('horovod'))"
    version = subprocess.check_output([python, "-c", ask], text=True).strip()
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--force-reinstall", "--find-links", out / "index.html", f"horovod=={version}"]
    subprocess.run(pip, env=environment, check=True)


def install(row: Row, python: str, folder: Path, *packages: str) -> None:
    """Make an environment with a row's frameworks and more, in the versions of the constraints."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "uv"
    subprocess.run([uv, "venv", "--quiet", "--python", python, folder], check=True)
    command: list[str | Path] = [uv, "pip", "install", "--quiet"]
    command += ["--python", folder / "bin" / "python"]
    command += ["--constraint", ROOT / "constraints" / "latest.txt"]
    command += ["--excludes", ROOT / "constraints" / "excludes.txt"]
    if os.environ.get("TORCH_INDEX") and row.plane == "--cpu":
        # It has torch for CPUs, which is smaller; the wheel fits either.
        command += ["--index", os.environ["TORCH_INDEX"], "--index-strategy", "unsafe-best-match"]
    subprocess.run([*command, *row.frameworks, *packages], check=True)


def without_compilers(folder: Path) -> Path:
    """Make a folder with links to the programs on PATH, except those that compile."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in sorted(Path(place).iterdir()) if Path(place).is_dir() else ():
            name = program.name
            compiles = name.startswith(("gcc", "g++", "clang", "x86_64-linux")) or (
                name in NO_COMPILER
            )
            link = folder / name
            if not compiles and not link.is_symlink():
                link.symlink_to(program)
    return folder


if __name__ == "__main__":
    sys.exit(main())
