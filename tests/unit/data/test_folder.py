"""A run's scratch folder on a host: private, removed by its last user, or after a crash."""

from __future__ import annotations

import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from horovod_runner.errors import DataError
from horovod_runner.host import scratch
from horovod_runner.host.scratch import RunFolder, check_room
from tests.programs import Program


def test_a_run_folder_is_private(tmp_path: Path) -> None:
    with RunFolder("run", tmp_path) as folder:
        for path in (folder.path, folder.path.parent):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_the_last_user_of_a_run_removes_its_folder(tmp_path: Path) -> None:
    with RunFolder("run", tmp_path) as folder:
        for name in ("run", "other"):
            with RunFolder(name, tmp_path) as used:
                (used.path / "rows").write_text("1")
            assert (folder.path / "rows").exists()
    assert list(tmp_path.iterdir()) == []


HOLD = """
import sys, time
from pathlib import Path
from horovod_runner.host.scratch import RunFolder
with RunFolder("killed", Path(sys.argv[1])) as folder:
    (folder.path / "rows").write_bytes(bytes(1000))
    print("there", flush=True)
    sys.stdin.read()
"""


def test_the_next_run_removes_the_folder_of_a_killed_process(tmp_path: Path) -> None:
    with Program(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (left,) = tmp_path.glob("*/killed")
        with RunFolder("other", tmp_path):
            assert left.exists()  # its process is alive
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert left.exists()
        with RunFolder("other", tmp_path):
            assert not left.exists()


def test_a_folder_that_is_not_private_or_cannot_be_created_is_refused(tmp_path: Path) -> None:
    with RunFolder("run", tmp_path) as folder:
        root = folder.path.parent
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(DataError, match=rf"{root} .*private.*TMPDIR"):
        RunFolder("run", tmp_path).__enter__()
    root.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=f"{root} .*private"):
        RunFolder("run", tmp_path).__enter__()
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"/file/horovod_runner.*Errno.*TMPDIR"):
        RunFolder("run", tmp_path / "file").__enter__()


def test_the_end_of_another_run_does_not_stop_one_that_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_another(root: Path) -> list[Path]:
        monkeypatch.undo()
        root.rmdir()  # as the last run there does
        return scratch.sweep(root)

    monkeypatch.setattr(scratch, "sweep", end_another)
    with RunFolder("run", tmp_path) as folder:
        assert folder.path.is_dir()


def test_existing_files_count_against_the_limit(tmp_path: Path) -> None:
    with RunFolder("run", tmp_path, limit=1_000_000) as folder:
        check_room(folder.path, 900_000)
        (folder.path / "rows").write_bytes(bytes(500_000))
        check_room(folder.path, 400_000)
        with pytest.raises(DataError, match=r" 600\.0 kB .* 1\.0 MB .* 50\d\.\d kB.*disk_limit"):
            check_room(folder.path, 600_000)


def test_some_of_the_disk_stays_free_unless_there_is_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(total=100 << 30, free=3 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    with RunFolder("run", tmp_path) as folder:
        check_room(folder.path, (2 << 30) - 1)
        with pytest.raises(DataError, match=r" 2,147,483,649 .* 2,147,483,648 .*TMPDIR"):
            check_room(folder.path, (2 << 30) + 1)
    with RunFolder("run", tmp_path, limit=100 << 30) as folder:
        check_room(folder.path, (3 << 30) - 1)
        with pytest.raises(DataError, match=r" 3,221,225,473 .* 3,221,225,472 .*TMPDIR"):
            check_room(folder.path, (3 << 30) + 1)
