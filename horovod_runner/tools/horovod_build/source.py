"""Downloads Horovod's source, checks its digest and applies our patches before it is built.

Horovod 0.28.1 is the last release. It does not compile against current frameworks. Under Gloo its
stall inspector does not work and its process sets ignore the job's network interface, TensorFlow's
second ``join`` returns at once, and a rank that waits for a collective keeps a core busy.

``patches/`` has one file for each problem, with the reason in its header. They are applied in the
order of their names. ``overlay/`` has whole files that replace Horovod's. No patch changes the
result of a collective. The lines of Horovod that the patches quote are under Horovod's license,
Apache 2.0.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from horovod_runner.common.files import file_sha256, unpack
from horovod_runner.errors import InstallError
from horovod_runner.tools.horovod_build.patching import apply, read_patches

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# Environment variables of the build. The patches and overlay/ read them.
RPATH = "HOROVOD_RUNNER_RPATH"  # where the libraries look for the mpich package
REQUIRES = "HOROVOD_RUNNER_REQUIRES"  # a requirement to add to the wheel
CPU_ONLY = "HOROVOD_RUNNER_CPU"  # "1" for a build without CUDA
PATCHES = Path(__file__).parent / "patches"
OVERLAY = Path(__file__).parent / "overlay"


def fetch(folder: Path) -> Path:
    """Download the source, unpack it into ``folder`` and return its root folder."""
    wanted = folder / "requirements.txt"
    # pip runs the archive's setup.py for its metadata, and compares the digest before that.
    wanted.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    command += ["--no-build-isolation", f"--dest={folder}", f"--requirement={wanted}"]
    download = subprocess.run(command, capture_output=True, text=True, check=False)
    archive = folder / f"horovod-{VERSION}.tar.gz"
    if download.returncode or not archive.exists():
        lines = [line for line in download.stderr.splitlines() if "ERROR" in line]
        reason = lines[-1] if lines else f"pip exit code {download.returncode}"
        raise InstallError(
            f"Horovod {VERSION}'s source could not be downloaded: {reason}. "
            "Check pip's package index (pip config list) and the network."
        )
    received = file_sha256(archive)
    if received != SHA256:
        raise InstallError(
            f"the downloaded {archive.name} is not Horovod {VERSION}: its SHA-256 is {received}, "
            f"not {SHA256}. Check pip's package index (pip config list)."
        )
    unpack(archive, folder)
    return folder / f"horovod-{VERSION}"


def apply_patches(root: Path) -> None:
    """Apply all patches to the source below ``root``, then copy the overlay over it."""
    for patch in read_patches(PATCHES):
        apply(patch, root)
    shutil.copytree(OVERLAY, root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def overlay_files(overlay: Path = OVERLAY) -> list[Path]:
    """The files that replace Horovod's. pip compiles Python files among them: bytecode is none."""
    found = sorted(overlay.rglob("*"))
    return [file for file in found if file.is_file() and file.parent.name != "__pycache__"]


def digest(patches: Path = PATCHES, overlay: Path = OVERLAY) -> str:
    """Eight hexadecimal digits that change with the diff of any patch and any file of the overlay.

    They are part of a wheel's name in the cache. The headers of patches do not count.
    """
    texts = [patch.diff for patch in read_patches(patches)]
    for file in overlay_files(overlay):
        texts += [str(file.relative_to(overlay)), file.read_text("utf-8")]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:8]
