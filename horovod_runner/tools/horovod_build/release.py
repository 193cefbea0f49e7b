"""Makes published wheels of built ones: a name that says what they fit, a record, an index.

    <folder>/<wheel>.whl         named horovod-0.28.1+cpu.torch2.13.0.mpich.p<patches>-cp313-...
             <wheel>.whl.json    its record, see provenance.py
             index.html          for pip install --find-links
             wheels.json         all records, for horovod-runner install
             SHA256SUMS          for sha256sum --check

All wheels of Horovod 0.28.1 for one Python would have one name. The part after the ``+`` tells
them apart, and pip installs the one that is named by it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
import platform
import re
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from horovod_runner.common.files import file_sha256
from horovod_runner.errors import InstallError
from horovod_runner.tools.horovod_build import source, toolchain
from horovod_runner.tools.horovod_build.build import build_flags
from horovod_runner.tools.horovod_build.libraries import LibraryNeeds, needs
from horovod_runner.tools.horovod_build.patching import read_patches
from horovod_runner.tools.horovod_build.plan import BuildPlan, arch_flags, python_tag
from horovod_runner.tools.horovod_build.provenance import (
    BuiltFor,
    GpuLibraries,
    Provenance,
    decode_provenance,
)

INDEX = "wheels.json"
_TIME = (1980, 1, 1, 0, 0, 0)  # of all files in a wheel: the same files make the same wheel


def release(
    wheel: Path, plan: BuildPlan, folder: Path, *, runner: str, container: str | None = None
) -> Provenance:
    """Copy a built wheel to a folder under the name that it is published by, with its record.

    Args:
        wheel: the wheel that pip built.
        plan: what it was built for.
        folder: the folder to publish. Call :func:`write_index` after its last wheel.
        runner: the version of this package.
        container: the container image that the wheel was built in, if it was.
    """
    if plan.mpi and not plan.mpi.package:
        raise InstallError(
            "a wheel for the system's MPI fits no other system: build it with the mpich package or "
            "with --mpi none."
        )
    with tempfile.TemporaryDirectory(prefix="horovod_runner-release-") as name:
        root = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(root)
            modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
        found = needs(sorted(root.rglob("*.so")))
        version = f"{source.VERSION}+{label(plan)}"
        # By it pip knows which C libraries a wheel loads with (PEP 600).
        libc = f"manylinux_{found.glibc.replace('.', '_')}"
        tag = f"{python_tag()}-{python_tag()}-{libc}_{platform.machine()}"
        files = _rewrite(root, modes, version, tag, plan)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"horovod-{version}-{tag}.whl"
        _pack(target, files)
    record = _record(target, plan, found, runner, container)
    (folder / f"{target.name}.json").write_bytes(_json(record))
    return record


def label(plan: BuildPlan) -> str:
    """The part of the version after the ``+``: what tells the wheels of one Python apart."""
    cuda = next((f.cuda for f in plan.frameworks if f.cuda), None) if plan.gpu else None
    parts = [f"cu{''.join(cuda.split('.')[:2])}" if cuda else "cpu"]
    for framework in plan.frameworks:
        # A nightly build's version has a dash, which would divide the name of the wheel.
        release = re.sub(r"[^a-z0-9.]+", ".", framework.version.partition("+")[0].lower())
        parts += [f"{framework.name}{release}"] + ["abi0"] * (framework.cxx11_abi is False)
    parts += ["mpich"] * (plan.mpi is not None)
    return ".".join([*parts, f"p{source.digest()}"])


def write_index(folder: Path, address: str | None = None) -> list[Provenance]:
    """Write the pages of a folder of published wheels, after a check of each wheel's digest.

    Args:
        folder: the folder.
        address: the URL that the wheels will have, for an index page that is published elsewhere;
            None for one that stays beside them.

    Returns:
        The records of its wheels, in the order of their names.

    Raises:
        InstallError: a wheel is missing, has no record, or is not what its record says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    records = [_read(path) for path in sorted(folder.glob("*.whl.json"))]
    strays = {path.name for path in folder.glob("*.whl")} - {record.file for record in records}
    if strays:
        raise InstallError(f"{folder} has wheels without a record: {', '.join(sorted(strays))}")
    for record in records:
        wheel = folder / record.file
        received = file_sha256(wheel) if wheel.exists() else "missing"
        if received != record.sha256:
            raise InstallError(
                f"{wheel} is not the wheel of its record: its SHA-256 is {received}, not "
                f"{record.sha256}. Build it again."
            )
    (folder / INDEX).write_bytes(_json(records))
    sums = [f"{record.sha256}  {record.file}\n" for record in records]
    (folder / "SHA256SUMS").write_text("".join(sums), "utf-8")
    (folder / "index.html").write_text(_page(records, address), "utf-8")
    return records


def _read(path: Path) -> Provenance:
    try:
        return decode_provenance(path.read_bytes())
    except ValueError as error:  # one of msgspec's, or no UTF-8
        raise InstallError(
            f"{path} is not a record of a wheel ({error}): build it again."
        ) from error


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def _rewrite(
    root: Path, modes: dict[str, int], version: str, tag: str, plan: BuildPlan
) -> list[tuple[str, bytes, int]]:
    """The files of the wheel under its published version: their names, bytes and modes."""
    files = []
    for name in sorted(modes):
        path = root / name
        if not path.is_file() or name.endswith(".dist-info/RECORD"):
            continue
        data = path.read_bytes()
        # The folders of the metadata, and of scripts, have the version in their names.
        renamed = re.sub(r"^horovod-[^-/]+(\.dist-info|\.data)/", rf"horovod-{version}\1/", name)
        if name.endswith(".dist-info/METADATA"):
            data = _metadata(data.decode(), version, plan).encode()
        elif name.endswith(".dist-info/WHEEL"):
            data = re.sub(r"(?m)^Tag: .*$", f"Tag: {tag}", data.decode()).encode()
        files.append((renamed, data, modes[name]))
    return files


def _metadata(text: str, version: str, plan: BuildPlan) -> str:
    head, blank, body = text.partition("\n\n")
    head = re.sub(r"(?m)^Version: .*$", f"Version: {version}", head)
    # TensorFlow has several packages (tensorflow-cpu): a requirement would install a second one.
    torch = next((f for f in plan.frameworks if f.name == "torch"), None)
    if torch:
        head += f"\nRequires-Dist: torch=={torch.version.partition('+')[0]}"
        # torch does without NumPy, and Horovod's broadcasts of objects do not.
        head += "\nRequires-Dist: numpy"
    return head + blank + body


def _pack(target: Path, files: Sequence[tuple[str, bytes, int]]) -> None:
    folder = next(name for name, _, _ in files if ".dist-info/" in name).partition("/")[0]
    lines = []
    part = target.with_name(f".{target.name}.{os.getpid()}")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data, mode in files:
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}\n")
            _add(archive, name, data, mode)
        record = f"{folder}/RECORD"
        _add(archive, record, ("".join(lines) + f"{record},,\n").encode(), 0o100644)
    part.replace(target)


def _add(archive: zipfile.ZipFile, name: str, data: bytes, mode: int) -> None:
    info = zipfile.ZipInfo(name, _TIME)
    info.external_attr = (mode or 0o100644) << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, data)


def _record(
    wheel: Path, plan: BuildPlan, found: LibraryNeeds, runner: str, container: str | None
) -> Provenance:
    gpu = None
    if plan.gpu and plan.nccl and plan.cuda_home:
        cuda = toolchain.cuda_version(plan.cuda_home)
        gpu = GpuLibraries(cuda, plan.nccl.version, plan.gpu_architectures)
    cmake = toolchain.find_cmake()
    return Provenance(
        file=wheel.name,
        size=wheel.stat().st_size,
        sha256=file_sha256(wheel),
        horovod=source.VERSION,
        source_sha256=source.SHA256,
        horovod_runner=runner,
        patches=_patches(),
        patches_digest=source.digest(),
        python=python_tag(),
        python_version=platform.python_version(),
        machine=platform.machine(),
        frameworks={f.name: BuiltFor(f.version, f.cuda, f.cxx11_abi) for f in plan.frameworks},
        gpu=gpu,
        mpich=plan.mpi.version if plan.mpi else None,
        processor_flags=arch_flags(),
        flags=dict(sorted(build_flags(plan).items())),
        cmake=cmake.version if cmake else "unknown",
        system=f"{_system()}, {' '.join(platform.libc_ver())}",
        container=container,
        **vars(found),
    )


def _patches() -> dict[str, str]:
    """The digest of each patch's file and of each file of the overlay."""
    patches = read_patches(source.PATCHES)
    digests = {patch.name: file_sha256(source.PATCHES / patch.name) for patch in patches}
    for file in source.overlay_files():
        digests[f"overlay/{file.relative_to(source.OVERLAY)}"] = file_sha256(file)
    return digests


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return "Linux"


def _page(records: Sequence[Provenance], address: str | None) -> str:
    """The index: a link to each wheel, with its digest, as pip reads it, and a line about it."""
    rows = []
    for record in records:
        version = record.file.split("-")[1]
        rows.append(
            f'<li><a href="{quote(record.file)}#sha256={record.sha256}">{html.escape(record.file)}'
            f"</a><br>{html.escape(_about(record))} "
            f'(<a href="{quote(record.file)}.json">record</a>)<br>'
            f"<code>pip install --find-links URL 'horovod=={html.escape(version)}'</code></li>\n"
        )
    base = f'<base href="{html.escape(address.rstrip("/"))}/">' if address else ""
    return (
        "<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8><title>Horovod wheels</title>"
        f"{base}</head>\n<body><h1>Horovod wheels</h1>\n<p>URL is the address of this page. "
        "<code>horovod-runner install --wheels FOLDER</code> chooses the wheel that fits.</p>\n"
        f"<ul>\n{''.join(rows)}</ul></body></html>\n"
    )


def _about(record: Provenance) -> str:
    frameworks = [f"{name} {built.release}" for name, built in record.frameworks.items()]
    plane = f"CUDA {record.gpu.cuda} and NCCL {record.gpu.nccl}" if record.gpu else "CPUs"
    collectives = "MPI (mpich) and Gloo" if record.mpich else "Gloo"
    return (
        f"Python {record.python_version.rpartition('.')[0]}, {', '.join(frameworks)}, {plane}, "
        f"{collectives}, glibc {record.glibc} or later"
    )
