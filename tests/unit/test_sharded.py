"""Sharded checkpoints as the driver sees them, and states that are taken apart and put together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from horovod_runner.checkpoints import checkpoint
from horovod_runner.checkpoints.sharded.tree import Shape, flatten, merge, unflatten
from horovod_runner.errors import CheckpointError
from horovod_runner.host.folders.folder import Folder
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.host.folders.remote import RemoteFolder
from horovod_runner.task.transfer import fetch_checkpoint
from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.wire.marker import METADATA, Marker, file_name, marker_name

STATE: dict[str, Any] = {
    "model": {"weight": 1, "bias": 2},
    "optimizer": {
        "state": {0: {"step": 3}, 7: {"step": 4}},
        "param_groups": [{"lr": 0.1, "params": [0, 7]}, {"lr": 0.2, "betas": (0.9, 0.99)}],
    },
    "empty": {},
    "list": [],
    "none": None,
}


def test_a_state_is_put_together_as_it_was() -> None:
    leaves = flatten(STATE)
    assert leaves.values["optimizer.state.7.step"] == 4
    assert leaves.values["optimizer.param_groups.0.params"] == [0, 7]
    assert unflatten(leaves.values, leaves.shape) == STATE
    # In whatever order the values come, and if each rank knows a part.
    backward = dict(reversed(leaves.values.items()))
    assert unflatten(backward, leaves.shape) == STATE
    parts = [flatten({name: value}).shape for name, value in STATE.items()]
    assert unflatten(backward, merge([*parts, *parts])) == STATE


def test_an_empty_state_stays_one() -> None:
    leaves = flatten({})
    assert leaves.shape == Shape({}, [], [()])
    assert unflatten({}, leaves.shape) == {}


def test_keys_that_a_name_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(TypeError, match=r"'a' .*int, str"):
        flatten({"a": {0: 1, "0": 2}})
    with pytest.raises(ValueError, match=r"'a\.b'"):
        flatten({"a": {"b": 1}, "a.b": 2})


def write(folder: Folder, step: int, run: str = "run1", *, marked: bool = True) -> Marker:
    """A sharded checkpoint, but for the contents of its files."""
    name = file_name(step, step, run, "sharded")
    local = folder.local(name)
    if local is not None:
        local.mkdir()
    for file in ("__0_1.distcp", "__1_1.distcp", METADATA):
        folder.inside(name).write(file, b"12345")
    marker = Marker(name, step, step, "sharded", 15, "", run)
    if marked:
        checkpoint.publish(folder, None, marker)
    return marker


@pytest.fixture(params=["local", "remote"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "local":
        return LocalFolder(tmp_path)
    return RemoteFolder(f"memory://{tmp_path}")


def test_a_sharded_checkpoint_counts_with_its_marker_and_goes_with_all_its_files(
    folder: Folder,
) -> None:
    first, second = write(folder, 1), write(folder, 2)
    write(folder, 3, marked=False)
    folder.inside(second.name).remove(METADATA)
    assert checkpoint.find_complete(folder) == [first]
    assert folder.inside(first.name).read_range("__1_1.distcp", 1, 3) == b"234"
    checkpoint.remove(folder, second)
    checkpoint.clean_up(folder, "run1")
    assert sorted(folder.names()) == sorted([first.name, marker_name(first.name)])
    checkpoint.remove(folder, first)
    assert folder.names() == []
    assert folder.inside(first.name).names() == []
    checkpoint.remove(folder, first)  # it is gone already


def test_a_folder_without_a_marker_is_removed_if_the_marker_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = LocalFolder(tmp_path)
    marker = write(folder, 1, marked=False)

    def refuse(*_: object) -> None:
        raise OSError("refused")

    monkeypatch.setattr(LocalFolder, "write", refuse)
    with pytest.raises(OSError, match="refused"):
        checkpoint.publish(folder, None, marker)
    assert os.listdir(tmp_path) == []


def test_a_host_that_does_not_see_a_sharded_checkpoint_says_so(tmp_path: Path) -> None:
    markers = write(LocalFolder(tmp_path), 2), Marker("older.bin", 1, 1, "bytes", 5, "", "run1")
    plan = CheckpointPlan(str(tmp_path), "run2", resume=markers)  # without the driver's probe
    link: Any = None  # nothing is asked for
    with pytest.raises(CheckpointError, match=r"\(step 2\), .*sharded.*checkpoint_dir"):
        fetch_checkpoint(plan, link, tmp_path, 60)
