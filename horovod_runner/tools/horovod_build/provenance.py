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
    """A framework that a wheel was built against; see :class:`.toolchain.Framework`."""

    version: str
    cuda: str | None = None
    cxx11_abi: bool | None = None

    @property
    def release(self) -> str:
        """The version without its local suffix."""
        return self.version.partition("+")[0]


class GpuLibraries(msgspec.Struct, frozen=True):
    """The GPU libraries of a wheel."""

    cuda: str  # the release of the toolkit that compiled it
    nccl: str  # the version of its header
    architectures: str | None  # compute capabilities as "80,90"; None for Horovod's default

    def __post_init__(self) -> None:
        if self.architectures is not None and not _ARCHITECTURES.fullmatch(self.architectures):
            raise ValueError(f"not a list of compute capabilities: {self.architectures!r}")

    @property
    def capabilities(self) -> tuple[int, ...]:
        """The architectures as numbers (80, 90); empty if they are not known."""
        return tuple(map(int, self.architectures.split(","))) if self.architectures else ()


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a published wheel."""

    file: str
    size: int
    sha256: str
    horovod: str
    source_sha256: str  # the digest of Horovod's source archive
    horovod_runner: str  # the version of this package that patched and built it
    patches_digest: str  # see source.digest
    patches: dict[str, str]  # the SHA-256 digest of each patch and each file of the overlay
    python: str  # the interpreter's tag ("cp313")
    python_version: str
    machine: str  # the processor's architecture ("x86_64")
    # The oldest C library that the wheel loads with. libstdc++ counts too: its version stands for
    # the C library of the distributions that have it.
    glibc: str
    symbols: dict[str, str]  # the newest versions that its libraries need, as {"GLIBC": "2.34"}
    libraries: tuple[str, ...]  # those that its libraries need
    frameworks: dict[str, BuiltFor]
    gpu: GpuLibraries | None  # None for a wheel for CPUs
    mpich: str | None  # the version of the package; None for Gloo alone
    processor_flags: str  # the compiler's ("-mf16c -mavx -mfma")
    flags: dict[str, str]  # the variables that Horovod's build was given
    compiler: str
    cmake: str
    system: str  # with its C library
    container: str | None  # the image; without one `glibc` is what the machine's libraries led to

    def __post_init__(self) -> None:
        # A record comes from elsewhere: its name must not lead out of a folder.
        if not _FILE.fullmatch(self.file) or not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"not a wheel with a SHA-256 digest: {self.file!r}, {self.sha256!r}")
        if not _VERSION.fullmatch(self.glibc):
            raise ValueError(f"not a version of a C library: {self.glibc!r}")


decode_provenance: Final = msgspec.json.Decoder(Provenance).decode
