"""Runs with ``resume=True`` in one folder: the latest that began owns it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from uuid import uuid4

import pytest

from horovod_runner import CheckpointError
from horovod_runner.checkpoints import checkpoint
from horovod_runner.checkpoints.archive import Archive
from horovod_runner.common.options import Options, grouped
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.wire import events, messages
from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.wire.marker import Marker, file_name
from tests.savers import saving


@pytest.fixture(params=["local", "remote"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path)
    pytest.importorskip("fsspec")
    return f"memory://{uuid4().hex}/checkpoints"


def archive_of(run_id: str, url: str) -> Archive:
    return Archive(run_id, Options(**grouped({"np": 1, "checkpoint_dir": url, "resume": True})))


def save(plan: CheckpointPlan, step: int) -> list[str]:
    """Save a checkpoint as rank 0 does; returns why that failed."""
    with saving(plan) as (saver, told):
        saver.save(f"step {step}".encode(), step, None)
    return [each.reason for each in told if isinstance(each, events.Unsaved)]


def test_the_earlier_run_completes_no_checkpoint_and_names_the_later(url: str) -> None:
    with archive_of("first", url) as first:
        assert save(first.plan(1), 1) == []
        with archive_of("later", url) as later:
            (reason,) = save(first.plan(1), 2)
            assert "run later" in reason
            assert url in reason
            assert save(later.plan(1), 3) == []
            assert save(later.plan(2), 4) == []  # its own restart changes nothing
            with pytest.raises(CheckpointError, match="run later"):
                first.plan(2)
    found = checkpoint.find_complete(open_folder(url))
    assert sorted(marker.step for marker in found) == [1, 3, 4]


def test_a_run_after_a_crash_owns_the_folder_at_once(url: str) -> None:
    crashed = archive_of("crashed", url).__enter__()
    assert save(crashed.plan(1), 1) == []
    with archive_of("next", url) as after:
        assert [marker.step for marker in after.plan(1).resume] == [1]
        assert save(after.plan(1), 2) == []


def test_another_file_of_that_name_is_replaced(url: str) -> None:
    folder = open_folder(url)
    folder.write(".resumed-by", b"not ours")
    with archive_of("run", url) as run:
        assert save(run.plan(1), 1) == []
        folder.remove(".resumed-by")  # by a user
        assert save(run.plan(1), 2) == []


@pytest.mark.parametrize("removable", [True, False])
def test_a_store_that_replaces_no_file_takes_a_run_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removable: bool
) -> None:
    write = LocalFolder.write

    def write_once(folder: LocalFolder, name: str, data: bytes) -> None:
        if folder.size(name) is not None:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        write(folder, name, data)

    def refuse(folder: LocalFolder, name: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(LocalFolder, "write", write_once)
    if not removable:
        monkeypatch.setattr(LocalFolder, "remove", refuse)
    first = archive_of("first", str(tmp_path)).__enter__()
    assert save(first.plan(1), 1) == []
    later = archive_of("later", str(tmp_path)).__enter__()
    assert save(later.plan(1), 2) == []
    assert bool(save(first.plan(1), 3)) == removable


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_run_that_takes_over_beside_the_marker_leaves_none(tmp_path: Path, moment: str) -> None:
    name = file_name(1, 10, "first", "bytes")
    marker = Marker(name, 1, 10, "bytes", 5, "", "first")

    class Overtaken(LocalFolder):
        def write(self, name: str, data: bytes) -> None:
            if moment == "before":
                archive_of("later", str(tmp_path)).__enter__()
            super().write(name, data)
            if moment == "after":
                archive_of("later", str(tmp_path)).__enter__()

    archive_of("first", str(tmp_path)).__enter__()
    part = tmp_path / f".part-{name}"
    part.write_bytes(b"state")
    with pytest.raises(CheckpointError, match="run later"):
        checkpoint.publish(Overtaken(tmp_path), part, marker, owned=True)
    assert sorted(os.listdir(tmp_path)) == [".resumed-by", ".seen-first", ".seen-later"]


def test_pieces_of_the_earlier_run_become_no_checkpoint(tmp_path: Path) -> None:
    name = file_name(1, 10, "first", "bytes")
    with archive_of("first", str(tmp_path)) as first:
        first.part(messages.FilePart(0, name, 0, b"state"))
        with (
            archive_of("later", str(tmp_path)),
            pytest.raises(CheckpointError, match="run later"),
        ):
            first.saved(Marker(name, 1, 10, "bytes", 5, "", "first"))
    assert checkpoint.find_complete(LocalFolder(tmp_path)) == []
