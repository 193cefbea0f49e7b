"""What leaves a run holds no secrets of its arguments, its environment and its URLs."""

from __future__ import annotations

import gzip
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.programs import ROOT, Program


def command_lines() -> Iterator[bytes]:
    """Those of all processes of this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:  # it has just ended
            continue


def written(folder: Path) -> Iterator[Path]:
    """All files below a folder, and those in memory."""
    for root in (folder, Path("/dev/shm")):
        yield from (path for path in root.rglob("*") if path.is_file())


def leaks(planted: str, folder: Path) -> set[str]:
    """Files with a secret, with what follows the beginning of the secret there."""
    found = set()
    for path in written(folder):
        try:
            data = path.read_bytes()
        except OSError:  # it has just been removed
            continue
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        at = data.find(planted.encode())
        if at >= 0:
            around = data[max(0, at - 60) : at + 60].decode(errors="replace")
            found.add(f"{path}: {around}")
    return found


@pytest.mark.parametrize("where", ["local", pytest.param("spark", marks=pytest.mark.spark)])
def test_nothing_that_leaves_a_run_holds_a_secret(tmp_path: Path, where: str) -> None:
    pytest.importorskip("mlflow")
    planted, folder = f"planted{uuid4().hex}", tmp_path / "there"
    for name in ("tmp", "home"):
        (folder / name).mkdir(parents=True)
    environment = {
        **os.environ,
        "PLANTED": planted,
        "HF_TOKEN": f"{planted}-hf",
        "AWS_SECRET_ACCESS_KEY": f"{planted}-aws",
        "HOME": str(folder / "home"),
        "XDG_STATE_HOME": str(folder / "state"),
        "TMPDIR": str(folder / "tmp"),
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    program = [sys.executable, "-m", "tests.real.private_program", str(folder), where]
    seen: set[bytes] = set()
    leaked: set[str] = set()
    with (
        (folder / "printed").open("wb") as printed,
        Program(program, cwd=ROOT, env=environment, stdout=printed, stderr=printed) as driver,
    ):
        while driver.poll() is None:
            seen.update(command_lines())
            if (folder / "look").exists() and not (folder / "go").exists():
                leaked |= leaks(planted, folder)
                (folder / "go").touch()
            time.sleep(0.02)
    text = (folder / "printed").read_text()
    assert driver.returncode == 0, text[-5000:]
    assert text.endswith("done\n")
    assert any(b"horovod_runner.worker" in line for line in seen)
    assert [line for line in seen if planted.encode() in line] == []
    names = {path.name for path in written(folder)}
    assert {"heard", "during.html", "after.html", "recorded.html", "printed"} <= names
    for pattern in ("state/**/*.run", "mlruns/**/params/*", "events/**/events*", "*.html"):
        assert list(folder.glob(pattern)), pattern
    assert sorted(leaked | leaks(planted, folder)) == []
