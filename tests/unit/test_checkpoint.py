"""Checkpoints in a folder: complete or not there, retained, checked."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_runner import CheckpointError, checkpoint, stores
from horovod_runner import marker as markers
from horovod_runner.archive import Archive
from horovod_runner.checkpoint import Checkpoint
from horovod_runner.marker import Marker, Mode
from horovod_runner.messages import Fetch, FilePart
from horovod_runner.stores import LocalFolder


def marker(number: int, data: bytes = b"state", **fields: object) -> Marker:
    given_ = {"step": number * 10, "run_id": "run1", **fields}
    name = markers.file_name(number, given_["step"], str(given_["run_id"]), "bytes")  # type: ignore[arg-type]
    return Marker(
        name=name, number=number, kind="bytes", size=len(data), sha256=_sha256(data), **given_
    )  # type: ignore[arg-type]


def _sha256(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def publish(folder: Path, number: int, data: bytes = b"state", **fields: object) -> Marker:
    made = marker(number, data, **fields)
    part = folder / f".part-{made.name}"
    part.write_bytes(data)
    checkpoint.publish(LocalFolder(folder), part, made)
    return made


def test_a_checkpoint_is_a_file_and_a_marker(tmp_path: Path) -> None:
    made = publish(tmp_path, 1, metrics={"loss": 0.5, "bad": math.nan})
    assert sorted(os.listdir(tmp_path)) == [
        "checkpoint-000001-step-10-run1.bin",
        "checkpoint-000001-step-10-run1.json",
    ]
    told = json.loads((tmp_path / "checkpoint-000001-step-10-run1.json").read_text())
    assert told["metrics"] == {"loss": 0.5}  # JSON has no NaN
    (found,) = checkpoint.complete(LocalFolder(tmp_path))
    assert found.name == made.name
    shown = Checkpoint(LocalFolder(tmp_path), made)
    assert shown.load() == b"state"
    assert shown.step == 10
    assert shown.path == str(tmp_path / made.name)


@pytest.mark.parametrize("spoil", ["no marker", "no file", "half a file", "half a marker"])
def test_one_that_was_cut_off_does_not_count_and_the_former_does(
    tmp_path: Path, spoil: str
) -> None:
    former, last = publish(tmp_path, 1), publish(tmp_path, 2)
    state, told = tmp_path / last.name, tmp_path / markers.marker_name(last.name)
    match spoil:
        case "no marker":
            told.unlink()
        case "no file":
            state.unlink()
        case "half a file":
            state.write_bytes(b"st")
        case "half a marker":
            told.write_bytes(told.read_bytes()[:20])
    assert [each.name for each in checkpoint.complete(LocalFolder(tmp_path))] == [former.name]


def test_a_checkpoint_is_told_of_once_its_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, made = LocalFolder.take, marker(1)

    def take(folder: LocalFolder, part: Path, name: str) -> None:
        if name == made.name:
            assert os.listdir(tmp_path) == [part.name]
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(folder, part, name)

    monkeypatch.setattr(LocalFolder, "take", take)
    with pytest.raises(OSError, match="No space left"):
        publish(tmp_path, 1)
    assert os.listdir(tmp_path) == [f".part-{made.name}"]


def test_files_of_others_are_no_checkpoints_and_stay(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    others = ["model.pt", "checkpoint-1.pt", "checkpoint-000001-step-10-run1.txt", ".part-mine"]
    others += [".seen-run2", f".part-{marker(2, run_id='run2').name}"]  # of a run beside this one
    for name in others:
        (tmp_path / name).write_text("{}")
    folder = LocalFolder(tmp_path)
    assert len(checkpoint.complete(folder)) == 1
    checkpoint.tidy(folder, "run1")
    assert set(others) <= set(os.listdir(tmp_path))


def test_what_a_run_left_unfinished_is_removed(tmp_path: Path) -> None:
    kept, cut = publish(tmp_path, 1), publish(tmp_path, 2)
    folder = LocalFolder(tmp_path)
    (tmp_path / markers.marker_name(cut.name)).unlink()
    (tmp_path / f".part-{marker(3).name}").write_bytes(b"half")
    checkpoint.show(folder, "run1")
    assert checkpoint.is_seen(folder, "run1")
    checkpoint.tidy(folder, "run1")
    assert sorted(os.listdir(tmp_path)) == [kept.name, markers.marker_name(kept.name)]
    assert not checkpoint.is_seen(folder, "run1")


def test_a_damaged_file_is_told_and_not_loaded(tmp_path: Path) -> None:
    made = publish(tmp_path, 1)
    (tmp_path / made.name).write_bytes(b"stat!")
    with pytest.raises(CheckpointError, match=r"step 10\) is damaged: 5 bytes"):
        Checkpoint(LocalFolder(tmp_path), made).load()
    (tmp_path / made.name).unlink()
    with pytest.raises(CheckpointError, match=r"step 10\) is gone"):
        Checkpoint(LocalFolder(tmp_path), made).load()


_metrics = st.dictionaries(
    st.just("loss"), st.floats(allow_nan=True, allow_infinity=True) | st.integers(-5, 5)
)


@given(
    st.lists(_metrics, max_size=8),
    st.none() | st.integers(1, 4),
    st.sampled_from([None, "loss"]),
    st.sampled_from(["min", "max"]),
)
def test_retention_keeps_the_latest_and_the_best(
    metrics: list[dict[str, float]], keep: int | None, best: str | None, mode: Mode
) -> None:
    there = [marker(number + 1, metrics=each) for number, each in enumerate(metrics)]
    gone = markers.surplus(there, keep, best, mode)
    kept = [each for each in there if each not in gone]
    if keep is None:
        assert kept == there
        return
    assert there[-1:] == kept[-1:]
    assert min(keep, len(there)) <= len(kept) <= keep + (best is not None)
    if best is None:
        assert kept == there[-keep:]
        return

    def value(each: Marker) -> float:
        number = float(each.metrics.get("loss", math.nan))
        worst = math.inf if mode == "min" else -math.inf
        return worst if math.isnan(number) else number

    better = min if mode == "min" else max
    for each in gone:
        worst_kept = better(map(value, [each]))
        assert sum(
            (value(k) <= worst_kept) if mode == "min" else (value(k) >= worst_kept) for k in kept
        ) >= min(keep, len(kept) - 1)


def test_without_the_metric_a_checkpoint_is_no_better_than_any() -> None:
    there = [marker(1, metrics={"loss": 9.0}), marker(2), marker(3, metrics={"loss": math.nan})]
    assert [each.number for each in markers.ranked(there, "loss", "min")] == [1, 3, 2]


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/data/x", "/data/x"),
        ("relative/x", "relative/x"),
        ("file:///data/x", "/data/x"),
        ("file:/data/x", "/data/x"),
        ("s3://bucket/x", None),
        ("hdfs://host/x", None),
    ],
)
def test_paths_are_the_file_systems_and_urls_a_stores(url: str, path: str | None) -> None:
    found = stores.local_path(url)
    assert (None if found is None else str(found)) == path


def test_a_store_that_nothing_here_knows_is_told_with_what_to_install() -> None:
    with pytest.raises(CheckpointError, match="s3fs for s3://"), Archive("run1", "nosuch://x/y"):
        pass


def test_a_store_of_fsspec_holds_checkpoints_too(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    folder = stores.open_folder("memory://bucket/of/mine")
    for number in (1, 2):
        part = tmp_path / "part"
        part.write_bytes(b"state")
        checkpoint.publish(folder, part, marker(number))
        assert not part.exists()
    assert [each.number for each in checkpoint.complete(folder)] == [2, 1]
    shown = Checkpoint(folder, marker(2))
    assert shown.path == "memory://bucket/of/mine/checkpoint-000002-step-20-run1.bin"
    assert shown.load() == b"state"
    checkpoint.remove(folder, marker(2))
    assert [each.number for each in checkpoint.complete(folder)] == [1]
    with pytest.raises(CheckpointError, match="is gone"):
        shown.load()


def test_pieces_become_a_checkpoint_when_all_are_there(tmp_path: Path) -> None:
    made = marker(1, b"first second")
    with Archive("run1", str(tmp_path), keep=3) as archive:
        archive.part(FilePart(0, made.name, 0, b"first "))
        archive.part(FilePart(0, made.name, 6, b"second"))
        assert checkpoint.complete(LocalFolder(tmp_path)) == []
        saved = archive.saved(made)
        assert saved is not None
        assert saved.load() == b"first second"
        assert archive.saved(made) is None  # known
    assert sorted(os.listdir(tmp_path)) == [made.name, markers.marker_name(made.name)]


def test_pieces_with_a_gap_are_no_checkpoint_and_leave_nothing(tmp_path: Path) -> None:
    made = marker(1, b"first second")
    with Archive("run1", str(tmp_path)) as archive:
        archive.part(FilePart(0, made.name, 0, b"first "))
        with pytest.raises(ValueError, match="not where the one before it ended"):
            archive.part(FilePart(0, made.name, 7, b"econd"))
        assert archive.part(FilePart(0, made.name, 12, b"rest")) is None
        short = marker(2, b"longer")
        archive.part(FilePart(0, short.name, 0, b"long"))
        with pytest.raises(OSError, match="lacks pieces"):
            archive.saved(short)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "", "checkpoint-000001-step-1-a/b.pt", "timeline"]
)
def test_a_piece_of_anything_else_is_refused(tmp_path: Path, name: str) -> None:
    with Archive("run1", str(tmp_path / "own")) as archive, pytest.raises(ValueError):  # noqa: PT011
        archive.part(FilePart(0, name, 0, b"x"))
    assert os.listdir(tmp_path) == ["own"]


def test_pieces_of_the_timeline_go_to_its_file(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text("of an earlier run")
    with Archive("run1", timeline=path) as archive:
        assert archive.part(FilePart(0, "timeline", 0, b"[{}")) == path
        assert archive.part(FilePart(0, "timeline", 3, b"]")) is None
    assert path.read_text() == "[{}]"


def test_a_rank_that_sees_no_folder_gets_checkpoints_in_pieces(tmp_path: Path) -> None:
    made, bad = publish(tmp_path, 1, b"0123456789"), publish(tmp_path, 2)
    (tmp_path / bad.name).write_bytes(b"stat!")
    with Archive("run2", str(tmp_path), resume=True) as archive:
        assert archive.plan(1).resume == (bad, made)
        assert "is damaged" in archive.fetch(Fetch(0, bad.name, 0)).problem
        assert archive.fetch(Fetch(0, made.name, 4)).data == b"456789"
        assert archive.fetch(Fetch(0, made.name, 10)).data == b""
        assert "is no checkpoint of this run" in archive.fetch(Fetch(0, "../x", 0)).problem


def test_a_run_that_does_not_resume_counts_on_and_leaves_the_others_alone(tmp_path: Path) -> None:
    publish(tmp_path, 7)
    with Archive("run2", str(tmp_path), keep=1) as archive:
        plan = archive.plan(1)
        assert (plan.resume, plan.next_number, plan.lineage) == ((), 8, False)
        archive.saved(publish(tmp_path, 8, run_id="run2"))
        assert [each.step for each in archive.checkpoints] == [80]
        assert [each.number for each in archive.plan(2).resume] == [8]
    assert len(checkpoint.complete(LocalFolder(tmp_path))) == 2


def test_without_a_folder_checkpoints_last_as_long_as_the_run(tmp_path: Path) -> None:
    with Archive("run1") as archive:
        folder = Path(archive.plan(1).folder)
        assert folder.is_dir()
        archive.saved(publish(folder, 1))
    assert archive.checkpoints[0].load() == b"state"
    archive.discard()
    assert not folder.exists()
    with Archive("run2") as archive:
        folder = Path(archive.plan(1).folder)
    assert not folder.exists()  # there was no checkpoint


def test_a_checkpoint_without_the_metric_that_ranks_is_told_once_and_is_not_the_best(
    tmp_path: Path,
) -> None:
    with Archive("run1", str(tmp_path), best="accuracy", mode="max") as archive:
        first, second = (publish(tmp_path, number, metrics={"loss": 1.0}) for number in (1, 2))
        archive.saved(first)
        assert "step 10 has no such metric (it has: loss)" in archive.unranked(first)
        archive.saved(second)
        assert archive.unranked(second) == ""
        assert archive.best is None
        archive.saved(publish(tmp_path, 3, metrics={"accuracy": 0.5}))
        assert archive.best is not None
        assert archive.best.step == 30


def test_a_file_in_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match="it is a file; name a folder"),
        Archive("run1", str(tmp_path / "file")),
    ):
        pass


def test_a_folder_that_cannot_be_made_is_told_before_the_launch(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match="look at its name, permissions"),
        Archive("run1", str(tmp_path / "file" / "x")),
    ):
        pass


def test_what_a_killed_rank_did_not_live_to_tell_counts_and_what_it_began_goes(
    tmp_path: Path,
) -> None:
    with Archive("run1", str(tmp_path)) as archive:
        archive.saved(publish(tmp_path, 1))
        publish(tmp_path, 2)
        (tmp_path / f".part-{marker(3).name}").write_bytes(b"half")
        publish(tmp_path, 9, run_id="other")
        assert [each.step for each in archive.catch_up()] == [20]
        assert [each.step for each in archive.checkpoints] == [10, 20]
        assert archive.catch_up() == []
        assert archive.plan(2).next_number == 3
        assert not list(tmp_path.glob(".part-*"))
        assert list(tmp_path.glob(".seen-*"))  # for the next attempt's ranks


def test_a_run_that_goes_on_clears_up_after_the_one_that_crashed(tmp_path: Path) -> None:
    kept, cut = publish(tmp_path, 1), publish(tmp_path, 2)
    (tmp_path / markers.marker_name(cut.name)).unlink()
    (tmp_path / f".part-{marker(3).name}").write_bytes(b"half")
    with Archive("run2", str(tmp_path), resume=True):
        pass
    assert sorted(os.listdir(tmp_path)) == [kept.name, markers.marker_name(kept.name)]
