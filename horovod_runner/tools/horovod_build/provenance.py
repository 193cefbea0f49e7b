"""The record beside a published wheel of Horovod: what it was built from, with what, for what."""

from __future__ import annotations

import re
from typing import Final

import msgspec

_FILE = re.compile(r"[\w.+-]{1,200}\.whl", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"\d{1,9}(\.\d{1,9})+", re.ASCII)
_ARCHITECTURES = re.compile(r"\d{2,3}(, ?\d{2,3})*", re.ASCII)


class BuiltFor(msgspec.Struct, frozen=True):
    """A framework that a wheel was built against.

    Attributes:
        version: its version, with any local suffix ("2.13.0+cpu").
        cuda: the CUDA release of that framework; None for a CPU build.
        cxx11_abi: whether torch has libstdc++'s newer names of strings and lists (PyPI's has them
            since 2.7); None for TensorFlow, and where it is not known.
    """

    version: str
    cuda: str | None = None
    cxx11_abi: bool | None = None

    @property
    def release(self) -> str:
        """The version without its local suffix."""
        return self.version.partition("+")[0]


class GpuLibraries(msgspec.Struct, frozen=True):
    """The GPU libraries of a wheel.

    Attributes:
        cuda: the release of the CUDA toolkit that compiled it.
        nccl: the version of NCCL's header.
        architectures: compute capabilities as "80,90"; None for Horovod's default.
    """

    cuda: str
    nccl: str
    architectures: str | None

    def __post_init__(self) -> None:
        if self.architectures is not None and not _ARCHITECTURES.fullmatch(self.architectures):
            raise ValueError(f"not a list of compute capabilities: {self.architectures!r}")

    @property
    def capabilities(self) -> tuple[int, ...]:
        """The architectures as numbers (80, 90); empty if they are not known."""
        return tuple(map(int, self.architectures.split(","))) if self.architectures else ()


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a published wheel.

    Attributes:
        file: the wheel's name, ``size`` its bytes, ``sha256`` its digest.
        horovod: the release of Horovod, ``source_sha256`` the digest of its source archive.
        horovod_runner: the version of this package that patched and built it.
        patches: the SHA-256 digest of each patch and each file of the overlay, by name.
        patches_digest: eight digits for all patches, see
            :func:`horovod_runner.tools.horovod_build.source.digest`.
        python: the interpreter's tag ("cp313"), ``python_version`` the full version.
        machine: the processor's architecture ("x86_64").
        glibc: the oldest C library that the wheel loads with. libstdc++ counts too: its version
            stands for the C library of the distributions that have it.
        symbols: the newest symbol versions that its libraries need, as {"GLIBC": "2.34"}.
        libraries: the shared libraries that its libraries need.
        frameworks: the frameworks that it was built against, by name.
        gpu: its GPU libraries; None for a wheel for CPUs.
        mpich: the version of the mpich package that it was built with; None for Gloo alone.
        processor_flags: the compiler's flags for the processor ("-mf16c -mavx -mfma").
        flags: the variables that Horovod's build was given.
        compiler: the compiler, from the libraries; ``cmake`` its CMake.
        system: the operating system and the C library of the machine that built it.
        container: the container image it was built in; None for a build in no container, whose
            ``glibc`` then is whatever that machine's libraries led to.
    """

    file: str
    size: int
    sha256: str
    horovod: str
    source_sha256: str
    horovod_runner: str
    patches_digest: str
    patches: dict[str, str]
    python: str
    python_version: str
    machine: str
    glibc: str
    symbols: dict[str, str]
    libraries: tuple[str, ...]
    frameworks: dict[str, BuiltFor]
    gpu: GpuLibraries | None
    mpich: str | None
    processor_flags: str
    flags: dict[str, str]
    compiler: str
    cmake: str
    system: str
    container: str | None

    def __post_init__(self) -> None:
        # A record comes from elsewhere: its name must not lead out of a folder.
        if not _FILE.fullmatch(self.file) or not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"not a wheel with a SHA-256 digest: {self.file!r}, {self.sha256!r}")
        if not _VERSION.fullmatch(self.glibc):
            raise ValueError(f"not a version of a C library: {self.glibc!r}")


decode_provenance: Final = msgspec.json.Decoder(Provenance).decode
