"""Sharded checkpoints: written by all ranks, read by any number of ranks, and by other programs."""

from __future__ import annotations

import gc
import os
import pickle
import re
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_runner import CheckpointError
from horovod_runner.checkpoints import checkpoint, loader
from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.checkpoints.problems import UnreachableError
from horovod_runner.common.limits import DEFAULTS
from horovod_runner.host.folders.folder import Folder
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.wire.events import Unsaved
from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.wire.marker import Marker, file_name
from tests.conftest import Ranks
from tests.preload import TORCH
from tests.real import sharded_training as training
from tests.savers import saving, saving_to
from tests.stores import mounted


@pytest.fixture
def runs() -> Ranks:
    return Ranks("local", warm=TORCH)


@pytest.mark.horovod
def test_a_sharded_training_resumes_with_other_numbers_of_ranks(
    runs: Ranks, tmp_path: Path
) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    options = {
        "checkpoint_dir": tmp_path,
        "resume": True,
        "num_to_keep": 1,
        "metric": "loss",
        "mode": "min",
    }
    runner = runs.runner((2, 2), max_restarts=1, **options)
    # In an elastic run, rank 1 is killed after step 3: the next attempt begins with what is there.
    first, _, _ = runner.run(training.with_fsdp, steps=4, stop=3)
    assert first in (3, 4)
    assert [each.step for each in runner.last_run.checkpoints] == [2, 4]
    assert runner.last_run.best_checkpoint.step == 2
    assert runner.last_run.warnings == []
    latest = runner.last_run.latest_checkpoint
    names = {path.name for path in Path(latest.path).iterdir()}
    assert names == {".metadata", "__0_2.distcp", "__1_2.distcp"}
    assert latest.size == sum(path.stat().st_size for path in Path(latest.path).iterdir())
    first, epoch, weights = runs.run(3, training.with_fsdp, options, steps=6)
    assert (first, epoch) == (5, 4)
    for name, value in training.in_one_process(6).items():
        assert weights[name] == pytest.approx(value, abs=1e-5)
    # The driver loads it whole, and torch's own reader reads it.
    assert not os.path.exists(latest.path)  # the second run's is later
    markers = checkpoint.find_complete(LocalFolder(tmp_path))
    assert [marker.step for marker in markers] == [6, 2]
    whole = Checkpoint(LocalFolder(tmp_path), markers[0]).load()
    for name, value in weights.items():
        assert whole["model"][name].numpy() == pytest.approx(value, abs=0)
    assert (whole["epoch"], whole["pair"], whole["empty"]) == (6, (1, "two"), {})
    bias = torch.zeros(3)
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(
            {"model": {"2.bias": bias}},
            storage_reader=dcp.FileSystemReader(tmp_path / markers[0].name),
        )
    assert bias.numpy() == pytest.approx(weights["2.bias"], abs=0)


@pytest.mark.horovod
def test_whole_checkpoints_are_loaded_into_shards(runs: Ranks, tmp_path: Path) -> None:
    import torch

    model = {"weight": torch.arange(15.0).view(3, 5), "bias": torch.zeros(3)}
    with saving_to(LocalFolder(tmp_path)) as saver:
        saver.save({"model": model, "epoch": 7}, 2, None)
    options = {"checkpoint_dir": tmp_path, "resume": True}
    step, epoch, weight = runs.run(2, training.into_shards, options)
    assert (step, epoch) == (2, 7)
    assert weight.ravel().tolist() == list(range(15))


@pytest.mark.horovod
def test_states_that_all_ranks_have_are_divided_and_need_horovod_alone(
    runs: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"checkpoint_dir": tmp_path, "resume": True}
    runner = runs.runner(2, **options)
    runner.run(training.with_horovod, steps=3)
    latest = Path(runner.last_run.latest_checkpoint.path)
    sizes = [path.stat().st_size for path in latest.glob("*.distcp")]
    assert len(sizes) == 2
    whole = 3 * 4 * (400 * 50 + 50 + 50 * 10 + 10)
    assert whole < sum(sizes) < 1.5 * whole
    assert min(sizes) > 0.25 * whole
    whole_state = runner.last_run.latest_checkpoint.load()
    assert list(whole_state["optimizer"]["state"]) == [0, 1, 2, 3]
    assert float(whole_state["model"]["0.weight"].min()) == pytest.approx(2.999)
    # A byte of one part: every rank goes back to the checkpoint before.
    part = latest / "__1_1.distcp"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    capsys.readouterr()
    first, *others = runs.run(3, training.with_horovod, options, steps=0)
    assert first == [2, []]
    assert others == [[2, [pytest.approx(1.999)]]] * 2
    text = capsys.readouterr().out
    assert "is damaged: its file __1_1.distcp has other bytes" in text
    assert "The earlier one is used" in text


# Slow: the import of torch.distributed.checkpoint in the ranks.
@pytest.mark.horovod
def test_a_part_that_cannot_be_written_fails_its_checkpoint_alone(
    runs: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = runs.runner(2, checkpoint_dir=tmp_path)
    assert runner.run(training.with_full_disk) == "done, [[], [4]]"
    assert [each.step for each in runner.last_run.checkpoints] == [1, 3, 5]
    (warning,) = runner.last_run.warnings
    assert "2 checkpoints of this run could not be written." in warning
    assert "the checkpoint of step 4 could not be written: rank 1: Cannot copy" in warning
    text = capsys.readouterr().err
    assert (
        "the checkpoint of step 2 could not be written: rank 1: [Errno 27] File too large" in text
    )
    assert len(os.listdir(tmp_path)) == 6


@pytest.mark.horovod
def test_a_rank_killed_while_it_writes_its_part_leaves_the_earlier_checkpoint(
    runs: Ranks, tmp_path: Path
) -> None:
    runner = runs.runner(2, max_restarts=1, checkpoint_dir=tmp_path)
    found = runner.run(training.killed_while_writing, folder=str(tmp_path))
    for step, left in found:
        assert step == 1
        assert [Path(name).suffix for name in left] == [".dcp", ".json"]


@pytest.mark.horovod
def test_calls_that_cannot_work_are_refused_before_anything_is_written(
    runs: Ranks, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    runner = runs.runner(2, checkpoint_dir=tmp_path)
    early, unknown, no_dict, different = runner.run(training.refused)
    assert re.match(r"RuntimeError: save_checkpoint\(sharded=True\) .*hvd\.init\(\)", early)
    assert re.match(r"TypeError: state\['x'\] .*builtin_function", unknown)
    assert re.match(r"TypeError: .*sharded=True .*dict, .*bytes", no_dict)
    assert re.search(r"rank 0 .* 4 of step 1, .*rank 1 .* 4 of step 2", different)
    request.getfixturevalue("hidden")
    with pytest.raises(CheckpointError, match=r"sharded=True: ranks 0-1 .*checkpoint_dir"):
        runs.run(2, training.with_horovod, {"checkpoint_dir": tmp_path}, steps=1)
    assert os.listdir(tmp_path) == []


def save(folder: Folder, *states: Any) -> list[Marker]:
    """Save states; returns the complete checkpoints, the latest first."""
    with saving_to(folder) as saver:
        for number, state in enumerate(states, start=1):
            saver.save_sharded(state, number, None, calls=number, rank=0, size=1)
    return checkpoint.find_complete(folder)


def load(folder: Folder, markers: list[Marker], into: Any = None) -> Any:
    plan = CheckpointPlan(folder.url, "run1", resume=tuple(markers))
    loaded = loader.load(plan, 0, 1, print, into=lambda: into)
    assert loaded is not None
    return loaded.state


@pytest.fixture(params=["volume", "store without rename", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    if request.param == "memory":
        yield open_folder(f"memory://{tmp_path}")
        return
    options = ["--no-rename"] if "rename" in request.param else []
    with mounted(tmp_path / "backing", tmp_path / "mounted", *options) as path:
        yield LocalFolder(path)


def test_every_kind_of_folder_takes_them(folder: Folder) -> None:
    import torch

    state = {"x": torch.arange(10_000), "n": np.arange(3), "deep": [{"y": torch.ones(2)}, None]}
    markers = save(folder, {"first": 1}, state)
    assert [marker.step for marker in markers] == [2, 1]
    loaded = Checkpoint(folder, markers[0]).load()
    assert loaded["x"].equal(state["x"])
    assert loaded["n"].tolist() == [0, 1, 2]
    assert loaded["deep"][0]["y"].tolist() == [1, 1]
    assert Checkpoint(folder, markers[1]).load() == {"first": 1}
    into = {"deep": [{"y": torch.zeros(2)}, 7]}
    assert load(folder, markers, into) is into
    assert into["deep"][0]["y"].tolist() == [1, 1]
    assert into["deep"][1] is None
    checkpoint.remove(folder, markers[0])
    checkpoint.clean_up(folder, "run1")
    assert len(folder.names()) == 2


def test_files_that_another_run_removed_are_noticed_before_the_marker_is_written(
    folder: Folder,
) -> None:
    import torch

    from horovod_runner.checkpoints.sharded.writer import Sharder

    plan = CheckpointPlan(folder.url, "run1")
    name = file_name(1, 10, "run1", "sharded")
    part = Sharder(plan, 0, 1, DEFAULTS, sees=True).take({"w": torch.ones(3)}, 1, 10)
    part.write(folder, name, Path)
    folder.remove_inside(name)
    with pytest.raises(CheckpointError, match=r"^file __0_1\.distcp disappeared"):
        part.complete(folder, name)


def test_a_state_that_does_not_fit_is_an_error_that_names_the_difference(tmp_path: Path) -> None:
    import torch

    folder = LocalFolder(tmp_path)
    markers = save(folder, {"model": {"w": torch.ones(3), "b": torch.ones(1)}, "epoch": 1})
    with pytest.raises(
        CheckpointError, match=r"step 1 .*into= .*: model\.extra\. .* epoch, model\.b, model\.w\."
    ):
        load(folder, markers, {"model": {"extra": torch.ones(3)}})
    with pytest.raises(CheckpointError, match=r"step 1 .*into= .*[Ss]ize mismatch .*model\.w"):
        load(folder, markers, {"model": {"w": torch.ones(4)}})
    with pytest.raises(CheckpointError, match=r"step 1 .* fit .*into= .*model\.w"):
        load(folder, markers, {"model": {"w": None}})


def test_an_optimizer_without_a_state_is_refused_where_the_checkpoint_has_one(
    tmp_path: Path,
) -> None:
    import torch

    from horovod_runner.checkpoints.sharded import reader

    folder = LocalFolder(tmp_path)
    saved = training.plain_state(3)
    markers = save(folder, {**saved, "more": {}})
    model = torch.nn.Sequential(torch.nn.Linear(400, 50), torch.nn.Linear(50, 10))
    optimizer = torch.optim.Adam(model.parameters()).state_dict()
    text = r"into= .*'optimizer\.state', .*step 1 .* 12 values"
    with pytest.raises(CheckpointError, match=text):
        load(folder, markers, {"optimizer": optimizer})
    with pytest.raises(CheckpointError, match=text):
        reader.fill({"optimizer": optimizer}, saved, 1)
    del optimizer["state"]
    state = load(folder, markers, {"optimizer": optimizer, "more": {}})
    assert state["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]


class OneOfTwo:
    """Rank 0 beside a rank 1 that does not see the folder."""

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers), [1]]

    def broadcast(self, data: bytes, count: int, root: int = 0) -> bytes:
        return data


def test_if_a_rank_does_not_see_the_folder_no_rank_makes_its_state(tmp_path: Path) -> None:
    import torch

    folder = LocalFolder(tmp_path)
    (marker,) = save(folder, {"x": torch.ones(3)})
    plan = CheckpointPlan(folder.url, "run1", resume=(marker,))
    made: list[str] = []
    with pytest.raises(CheckpointError, match=r"\(step 1\), .*Rank 1 does not .*checkpoint_dir"):
        loader.load(plan, 0, 2, print, into=lambda: made.append("state"), connect=OneOfTwo)
    assert made == []


def test_a_rank_that_outlived_its_attempt_leaves_the_next_ones_checkpoint_as_it_is(
    tmp_path: Path,
) -> None:
    import torch

    folder = LocalFolder(tmp_path)
    checkpoint.write_probe(folder, "run1")
    # Both save the checkpoint with the number 1; the older attempt is the last to write.
    for attempt in (2, 1):
        with saving(CheckpointPlan(folder.url, "run1", attempt=attempt)) as (saver, told):
            saver.save_sharded({"x": torch.full((3,), attempt)}, 5, None, calls=1, rank=0, size=1)
        (marker,) = checkpoint.find_complete(folder)
        assert marker.attempt == 2
        assert set(os.listdir(tmp_path / marker.name)) == {".metadata", "__0_2.distcp"}
        assert Checkpoint(folder, marker).load()["x"].tolist() == [2, 2, 2]
    (unsaved,) = told
    assert isinstance(unsaved, Unsaved)
    assert "another attempt has written it already" in unsaved.reason


def test_copies_are_used_again_and_freed_once_the_state_has_no_such_tensor(tmp_path: Path) -> None:
    import torch

    from horovod_runner.checkpoints.sharded.writer import Sharder

    plan = CheckpointPlan(LocalFolder(tmp_path).url, "run1")
    sharder = Sharder(plan, 0, 1, DEFAULTS, sees=True)
    first = {
        copy.numel(): copy
        for copy in sharder.take({"a": torch.ones(3), "b": torch.ones(5)}, 1, 1).copies
    }
    freed = weakref.ref(first.pop(5))
    (copy,) = sharder.take({"a": torch.zeros(3)}, 2, 2).copies
    assert copy is first[3]
    assert copy.tolist() == [0, 0, 0]
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize("change", ["metadata", "part", "marker"])
def test_what_was_changed_is_not_loaded(tmp_path: Path, change: str) -> None:
    import torch

    folder = LocalFolder(tmp_path)
    (marker,) = save(folder, {"x": torch.ones(3)})
    inside = tmp_path / marker.name
    path = inside / (".metadata" if change == "metadata" else "__0_1.distcp")
    if change == "marker":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-200] ^= 1
        path.write_bytes(data)
    told = "exists" if change == "marker" else "bytes"
    with pytest.raises(CheckpointError, match=rf"\(step 1\) .*file {path.name} .*{told}"):
        Checkpoint(folder, marker).load()


def test_a_part_that_cannot_be_read_names_the_error_of_its_folder(tmp_path: Path) -> None:
    import torch

    folder = LocalFolder(tmp_path)
    (marker,) = save(folder, {"x": torch.ones(3)})
    path = tmp_path / marker.name / "__0_1.distcp"
    path.unlink()
    path.mkdir()
    with pytest.raises(UnreachableError, match=r"\(step 1\) cannot be read: .*[Dd]irectory"):
        Checkpoint(folder, marker).load()


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("code ran",)


def test_reading_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from horovod_runner.checkpoints.sharded import metadata

    monkeypatch.chdir(tmp_path)
    evils = {"mkdir": Evil(), "load": {"x": torch.load}, "partial": {"x": partial(print)}}
    for called, evil in evils.items():
        with pytest.raises(CheckpointError, match=rf"\.{called} .*expected"):
            metadata.read(pickle.dumps(evil), "name")
    assert not (tmp_path / "code ran").exists()
