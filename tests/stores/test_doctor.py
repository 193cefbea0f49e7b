"""`horovod-runner doctor --path`: what works in a folder, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_runner.tools.commands import cli, doctor
from tests.conftest import Ranks
from tests.stores.any_store import NEEDED, statuses
from tests.stores.s3 import Server


def test_a_folder_of_a_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = statuses(capsys, tmp_path / "new" / "folder")
    assert set(found.values()) == {"ok"}
    assert list(tmp_path.iterdir()) == []


def test_a_volume(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = statuses(capsys, volume)
    works = {"rename": "ok", "lock": "ok"}
    lacks = ("random write", "append", "link", "map into memory", "private files")
    assert found == {**NEEDED, **works, **dict.fromkeys(lacks, "absent")}
    assert list(volume.iterdir()) == []
    (volume.parent / "backing" / "fail-122").touch()
    assert cli.main(["doctor", "--path", str(volume)]) == 1
    told = capsys.readouterr().out
    assert "wrong   write" in told
    assert "write: The disk is full: free space" in told


def test_a_bucket(s3: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert statuses(capsys, "s3://mine/checkpoints") == NEEDED
    s3.faults.expired = ("first", ("trial",))
    assert cli.main(["doctor", "--path", "s3://mine/checkpoints"]) == 1
    assert "write: Renew the credentials" in capsys.readouterr().out


@pytest.mark.spark
@pytest.mark.places("spark")
def test_an_executor_tries_it_too(tmp_path: Path, ranks: Ranks) -> None:
    assert ranks.spark is not None
    findings = list(doctor.examine_folder_on_executor(str(tmp_path / "new"), ranks.spark))
    assert {finding.status for finding in findings} == {"ok"}
    assert [each.name for each in findings][:3] == [f"executor: {name}" for name in NEEDED][:3]
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert statuses(capsys, tmp_path / "file", 1) == {"folder": "wrong"}
    assert statuses(capsys, "nosuch://x", 1) == {"folder": "wrong"}
