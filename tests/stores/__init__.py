"""The stores that users have: mounted ones by a real FUSE, S3 by moto's, Azure's by Azurite."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.programs import ROOT, Program


def require(*modules: str) -> None:
    """Skip a test that lacks a package; fail if CI is set.

    Args:
        modules: Python packages. mfusepy also needs Debian's fuse3, and skips without /dev/fuse.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if "mfusepy" in modules:
        if not os.access("/dev/fuse", os.W_OK):
            pytest.skip("/dev/fuse is not here, or not for this user")
        if shutil.which("fusermount3") is None:
            missing.append("Debian's fuse3 (make packages)")
    if missing:
        told = f"not installed: {', '.join(missing)}"
        pytest.fail(told) if os.environ.get("CI") else pytest.skip(told)


@contextlib.contextmanager
def mounted(backing: Path, mountpoint: Path, *options: str) -> Iterator[Path]:
    """A folder of this machine, mounted by tests/stores/volume.py."""
    require("mfusepy")
    for folder in (backing, mountpoint):
        folder.mkdir(exist_ok=True)
    program = [sys.executable, "-m", "tests.stores.volume", str(backing), str(mountpoint)]
    with Program([*program, *options], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it says that it is ready
        try:
            if not mountpoint.is_mount():
                pytest.skip("this user may not mount")
            yield mountpoint
        finally:
            subprocess.run(["fusermount3", "-u", "-z", str(mountpoint)], check=False)
            process.terminate()
