"""Reads from a wheel's shared libraries which C library, C++ library and others they need."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from horovod_runner.errors import InstallError

# The oldest C library of the distributions whose libstdc++ has these symbols, as for the tags of
# PEP 600.
_LIBSTDCXX = {
    "GLIBCXX": {
        "3.4.19": "2.17",
        "3.4.22": "2.24",
        "3.4.24": "2.27",
        "3.4.28": "2.31",
        "3.4.29": "2.34",
        "3.4.30": "2.35",
        "3.4.33": "2.39",
    },
    "CXXABI": {
        "1.3.7": "2.17",
        "1.3.10": "2.24",
        "1.3.11": "2.27",
        "1.3.12": "2.31",
        "1.3.13": "2.34",
        "1.3.15": "2.39",
    },
}
# Libraries of every Linux, of the frameworks, of NVIDIA's packages and of the mpich package.
_EXPECTED = re.compile(
    r"(ld-linux-|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so|libc10|libtorch|libtensorflow|"
    r"libmpi\.so\.12$|libnccl\.so|libcudart\.so|libcuda\.so\.1$)"
)


@dataclass(frozen=True)
class LibraryNeeds:
    """Requirements of shared libraries on the machine that loads them, for a wheel's record."""

    glibc: str  # the oldest C library that they load with, as "2.35"
    symbols: dict[str, str]  # the newest symbol version of each kind, as {"GLIBC": "2.34"}
    libraries: tuple[str, ...]
    compiler: str  # the compilers that made them, as they name themselves


def needs(libraries: Iterable[Path]) -> LibraryNeeds:
    """Read what shared libraries need, with binutils' readelf."""
    return parse("".join(_readelf(library) for library in libraries))


def parse(text: str) -> LibraryNeeds:
    """See :func:`needs`, from what readelf has printed about all libraries."""
    newest: dict[str, str] = {}
    for kind, version in re.findall(r"\b(GLIBC|GLIBCXX|CXXABI)_(\d+(?:\.\d+)+)", text):
        newest[kind] = max(newest.get(kind, "0"), version, key=numbers)
    needed = sorted(set(re.findall(r"\(NEEDED\).*\[(.+)\]", text)))
    strange = [name for name in needed if not _EXPECTED.match(name)]
    if strange:
        raise InstallError(
            f"the wheel needs {', '.join(strange)}, which other machines may not have. Build it "
            "where these libraries are not found."
        )
    levels = [newest.get("GLIBC", "2.17")]
    if "GLIBC_ABI_DT_RELR" in text:  # relocations in a form that older loaders do not know
        levels.append("2.36")
    for kind, known in _LIBSTDCXX.items():
        if kind in newest:
            levels.append(_level(kind, newest[kind], known))
    compilers = sorted(set(re.findall(r"(GCC: .+|clang version .+)", text)))
    return LibraryNeeds(
        glibc=max(levels, key=numbers),
        symbols=dict(sorted(newest.items())),
        libraries=tuple(needed),
        compiler="; ".join(compilers) or "unknown",
    )


def numbers(version: str) -> tuple[int, ...]:
    """A version as numbers that compare: "2.9" is below "2.17"."""
    return tuple(map(int, version.split(".")))


def _level(kind: str, version: str, known: dict[str, str]) -> str:
    for newest, glibc in known.items():
        if numbers(version) <= numbers(newest):
            return glibc
    raise InstallError(
        f"the wheel needs {kind}_{version} of libstdc++, which is newer than any version known "
        "here. Build it with an older compiler, or in a manylinux container."
    )


def _readelf(library: Path) -> str:
    command = ["readelf", "--wide", "--dynamic", "--version-info", "--string-dump=.comment"]
    try:
        done = subprocess.run(
            [*command, str(library)],
            capture_output=True,
            text=True,
            check=False,
            errors="replace",
        )
    except FileNotFoundError:
        raise InstallError("readelf was not found: apt-get install binutils") from None
    if done.returncode:
        raise InstallError(f"readelf cannot read {library}: {done.stderr.strip()}")
    return done.stdout
