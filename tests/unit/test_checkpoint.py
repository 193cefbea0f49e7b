"""Checkpoints in a folder: completeness, retention, verification, and the driver's archive."""

from __future__ import annotations

import errno
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_runner import CheckpointError
from horovod_runner.checkpoints import checkpoint, retention
from horovod_runner.checkpoints.archive import Archive
from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.common.options import CheckpointConfig, Mode, Options, grouped
from horovod_runner.host.folders.folder import local_path
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.task.transfer import fetch_checkpoint
from horovod_runner.wire.channel import Channel
from horovod_runner.wire.events import Log
from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.wire.link import Link
from horovod_runner.wire.marker import Marker, file_name, marker_name
from horovod_runner.wire.messages import Fetch, FilePart


def marker(number: int, data: bytes = b"state", **fields: object) -> Marker:
    given_ = {"step": number * 10, "run_id": "run1", **fields}
    name = file_name(number, given_["step"], str(given_["run_id"]), "bytes")  # type: ignore[arg-type]
    digest = sha256(data).hexdigest()
    return Marker(name=name, number=number, kind="bytes", size=len(data), sha256=digest, **given_)  # type: ignore[arg-type]


def publish(folder: Path, number: int, data: bytes = b"state", **fields: object) -> Marker:
    made = marker(number, data, **fields)
    part = folder / f".part-{made.name}"
    part.write_bytes(data)
    checkpoint.publish(LocalFolder(folder), part, made)
    return made


def test_a_checkpoint_is_a_file_and_a_marker(tmp_path: Path) -> None:
    published = publish(tmp_path, 1, metrics={"loss": 0.5, "bad": math.nan})
    assert sorted(os.listdir(tmp_path)) == [
        "checkpoint-000001-step-10-run1.bin",
        "checkpoint-000001-step-10-run1.json",
    ]
    content = json.loads((tmp_path / "checkpoint-000001-step-10-run1.json").read_text())
    assert content["metrics"] == {"loss": 0.5}  # JSON has no NaN
    (complete,) = checkpoint.find_complete(LocalFolder(tmp_path))
    assert complete.name == published.name
    loaded = Checkpoint(LocalFolder(tmp_path), published)
    assert loaded.load() == b"state"
    assert loaded.step == 10
    assert loaded.path == str(tmp_path / published.name)


@pytest.mark.parametrize("spoil", ["no marker", "no file", "half a file", "half a marker"])
def test_an_incomplete_checkpoint_is_ignored(tmp_path: Path, spoil: str) -> None:
    earlier, latest = publish(tmp_path, 1), publish(tmp_path, 2)
    state, metadata = tmp_path / latest.name, tmp_path / marker_name(latest.name)
    match spoil:
        case "no marker":
            metadata.unlink()
        case "no file":
            state.unlink()
        case "half a file":
            state.write_bytes(b"st")
        case "half a marker":
            metadata.write_bytes(metadata.read_bytes()[:20])
    complete = checkpoint.find_complete(LocalFolder(tmp_path))
    assert [found.name for found in complete] == [earlier.name]


def test_the_marker_is_written_after_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, published = LocalFolder.move_in, marker(1)

    def move_in(folder: LocalFolder, part: Path, name: str) -> None:
        if name == published.name:
            assert os.listdir(tmp_path) == [part.name]
            raise OSError(errno.ENOSPC, "No space left on device")
        original(folder, part, name)

    monkeypatch.setattr(LocalFolder, "move_in", move_in)
    with pytest.raises(OSError, match="No space left"):
        publish(tmp_path, 1)
    assert os.listdir(tmp_path) == [f".part-{published.name}"]


def test_files_of_other_programs_and_runs_are_ignored_and_kept(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    others = ["model.pt", "checkpoint-1.pt", "checkpoint-000001-step-10-run1.txt", ".part-mine"]
    others += [".seen-run2", f".part-{marker(2, run_id='run2').name}"]  # of a concurrent run
    for name in others:
        (tmp_path / name).write_text("{}")
    folder = LocalFolder(tmp_path)
    assert len(checkpoint.find_complete(folder)) == 1
    checkpoint.clean_up(folder, "run1")
    assert set(others) <= set(os.listdir(tmp_path))


def test_unfinished_files_of_a_run_are_removed(tmp_path: Path) -> None:
    kept, cut = publish(tmp_path, 1), publish(tmp_path, 2)
    folder = LocalFolder(tmp_path)
    (tmp_path / marker_name(cut.name)).unlink()
    (tmp_path / f".part-{marker(3).name}").write_bytes(b"half")
    checkpoint.write_probe(folder, "run1")
    assert checkpoint.has_probe(folder, "run1")
    checkpoint.clean_up(folder, "run1")
    assert sorted(os.listdir(tmp_path)) == [kept.name, marker_name(kept.name)]
    assert not checkpoint.has_probe(folder, "run1")


def test_a_run_of_more_than_a_day_keeps_its_own_probe(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    for token in ("run1", "run2"):
        checkpoint.write_probe(folder, token)
        for path in tmp_path.iterdir():
            os.utime(path, (0, 0))
    checkpoint.clean_up(folder, "run1", probes=False)  # as before another attempt
    assert checkpoint.has_probe(folder, "run1")
    assert not checkpoint.has_probe(folder, "run2")


def test_loading_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    published = publish(tmp_path, 1)
    (tmp_path / published.name).write_bytes(b"stat!")
    with pytest.raises(CheckpointError, match=r"\(step 10\).* 5 bytes .*SHA-256"):
        Checkpoint(LocalFolder(tmp_path), published).load()
    (tmp_path / published.name).unlink()
    with pytest.raises(CheckpointError, match=r"\(step 10\).*num_to_keep"):
        Checkpoint(LocalFolder(tmp_path), published).load()


_metrics = st.dictionaries(
    st.just("loss"), st.floats(allow_nan=True, allow_infinity=True) | st.integers(-5, 5)
)


def archive_of(run_id: str, **options: Any) -> Archive:
    return Archive(run_id, Options(**grouped({"np": 1, "num_to_keep": None, **options})))


def test_each_attempt_has_a_probe_also_if_another_run_removed_it(tmp_path: Path) -> None:
    with archive_of("run1", checkpoint_dir=str(tmp_path)) as archive:
        for path in tmp_path.iterdir():
            path.unlink()
        archive.plan(2)
        assert checkpoint.has_probe(LocalFolder(tmp_path), "run1")


@given(
    st.lists(_metrics, max_size=8),
    st.none() | st.integers(1, 4),
    st.sampled_from([None, "loss"]),
    st.sampled_from(["min", "max"]),
)
def test_retention_keeps_the_latest_and_the_best_checkpoints(
    metrics: list[dict[str, float]], keep: int | None, metric: str | None, mode: Mode
) -> None:
    saved = [marker(number, metrics=values) for number, values in enumerate(metrics, start=1)]
    if metric is None:
        mode = "min"
    config = CheckpointConfig(num_to_keep=keep, metric=metric, mode=mode)
    removed = retention.surplus(saved, config)
    kept = [each for each in saved if each not in removed]
    if keep is None:
        assert kept == saved
        return
    assert saved[-1:] == kept[-1:]
    assert min(keep, len(saved)) <= len(kept) <= keep + (metric is not None)
    if metric is None:
        assert kept == saved[-keep:]
        return

    def badness(each: Marker) -> float:
        number = float(each.metrics.get("loss", math.nan))
        if math.isnan(number):
            return math.inf
        return number if mode == "min" else -number

    for each in removed:
        as_good = [other for other in kept if badness(other) <= badness(each)]
        assert len(as_good) >= min(keep, len(kept) - 1)


def test_checkpoints_without_the_metric_rank_last() -> None:
    saved = [marker(1, metrics={"loss": 9.0}), marker(2), marker(3, metrics={"loss": math.nan})]
    assert [each.number for each in retention.ranked(saved, "loss", "min")] == [1, 3, 2]


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/data/x", "/data/x"),
        ("relative/x", "relative/x"),
        ("file:///data/x", "/data/x"),
        ("file:/data/x", "/data/x"),
        ("run-2026-01-31T08:15:30/x", "run-2026-01-31T08:15:30/x"),
        ("model:v2", "model:v2"),
        ("s3://bucket/x", None),
        ("dbfs:/not/mounted/here", None),
        ("simplecache::s3://bucket/x", None),
        ("hdfs://host/x", None),
    ],
)
def test_which_urls_are_paths_of_the_file_system(url: str, path: str | None) -> None:
    local = local_path(url)
    assert (None if local is None else str(local)) == path


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nosuch://x/y", "install the package that brings its scheme"),
        ("{}/file", r"checkpoint_dir='.*/file' [^']*\bfile\b"),
        ("{}/file/x", r"checkpoint_dir='.*/file/x' .*Not a directory"),
    ],
)
def test_a_folder_that_cannot_be_used_is_an_error_before_the_launch(
    tmp_path: Path, name: str, problem: str
) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match=problem),
        archive_of("run1", checkpoint_dir=name.format(tmp_path)),
    ):
        pass


def test_a_folder_of_fsspec_holds_checkpoints(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    folder = open_folder("memory://bucket/of/mine")
    for number in (1, 2):
        part = tmp_path / "part"
        part.write_bytes(b"state")
        checkpoint.publish(folder, part, marker(number))
        assert not part.exists()
    assert [each.number for each in checkpoint.find_complete(folder)] == [2, 1]
    loaded = Checkpoint(folder, marker(2))
    assert loaded.path == "memory://bucket/of/mine/checkpoint-000002-step-20-run1.bin"
    assert loaded.load() == b"state"
    checkpoint.remove(folder, marker(2))
    assert [each.number for each in checkpoint.find_complete(folder)] == [1]
    with pytest.raises(CheckpointError, match=r"\(step 20\).*num_to_keep"):
        loaded.load()


def test_pieces_become_a_checkpoint_when_all_have_arrived(tmp_path: Path) -> None:
    made = marker(1, b"first second")
    with archive_of("run1", checkpoint_dir=str(tmp_path), num_to_keep=3) as archive:
        archive.part(FilePart(0, made.name, 0, b"first "))
        archive.part(FilePart(0, made.name, 6, b"second"))
        assert checkpoint.find_complete(LocalFolder(tmp_path)) == []
        saved = archive.saved(made)
        assert saved is not None
        assert saved.load() == b"first second"
        assert archive.saved(made) is None  # known
    assert sorted(os.listdir(tmp_path)) == [made.name, marker_name(made.name)]


def test_missing_pieces_are_an_error_and_leave_no_file(tmp_path: Path) -> None:
    made = marker(1, b"first second")
    with archive_of("run1", checkpoint_dir=str(tmp_path)) as archive:
        archive.part(FilePart(0, made.name, 0, b"first "))
        with pytest.raises(ValueError, match=f"piece of {made.name}"):
            archive.part(FilePart(0, made.name, 7, b"econd"))
        assert archive.part(FilePart(0, made.name, 12, b"rest")) is None
        short = marker(2, b"longer")
        archive.part(FilePart(0, short.name, 0, b"long"))
        with pytest.raises(OSError, match=f"{short.name} .*pieces"):
            archive.saved(short)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_that_the_driver_cannot_write_does_not_count(tmp_path: Path) -> None:
    made = marker(1, b"first second")
    (tmp_path / f".part-{made.name}").mkdir()
    with archive_of("run1", checkpoint_dir=str(tmp_path)) as archive:
        with pytest.raises(IsADirectoryError):
            archive.part(FilePart(0, made.name, 0, b"first "))
        assert archive.part(FilePart(0, made.name, 6, b"second")) is None
        assert archive.saved(made) is None
        assert archive.checkpoints == []
        told = archive.unsaved("the checkpoint of step 10", "It is a folder.")
        assert told.endswith("It is a folder. The training goes on; there is no earlier one.")
        (warning,) = archive.warnings(finished=False)
        assert warning.startswith("1 checkpoint of this run could not be written. There is none.")


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "", "checkpoint-000001-step-1-a/b.pt", "timeline"]
)
def test_a_piece_of_an_unexpected_file_is_refused(tmp_path: Path, name: str) -> None:
    with (
        archive_of("run1", checkpoint_dir=str(tmp_path / "checkpoints")) as archive,
        pytest.raises(ValueError),  # noqa: PT011
    ):
        archive.part(FilePart(0, name, 0, b"x"))
    assert os.listdir(tmp_path) == ["checkpoints"]


def test_pieces_of_the_timeline_are_written_to_its_file(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text("of an earlier run")
    with archive_of("run1", timeline=path) as archive:
        assert archive.part(FilePart(0, "timeline", 0, b"[{}")) == path
        assert archive.part(FilePart(0, "timeline", 3, b"]")) is None
    assert path.read_text() == "[{}]"


def test_a_rank_that_does_not_see_the_folder_gets_checkpoints_in_pieces(tmp_path: Path) -> None:
    intact, bad = publish(tmp_path, 1, b"0123456789"), publish(tmp_path, 2)
    (tmp_path / bad.name).write_bytes(b"stat!")
    with archive_of("run2", checkpoint_dir=str(tmp_path), resume=True) as archive:
        assert archive.plan(1).resume == (bad, intact)
        assert archive.fetch(Fetch(0, intact.name, 4)).data == b"456789"
        assert archive.fetch(Fetch(0, intact.name, 10)).data == b""
        assert "is not a checkpoint of this run" in archive.fetch(Fetch(0, "../x", 0)).problem


def fetch(plan: CheckpointPlan, archive: Archive, folder: Path) -> tuple[CheckpointPlan, list[str]]:
    """Fetch what rank 0 resumes from over a real channel; also returns what the user is told."""
    told: list[str] = []
    with Channel("127.0.0.1", size=1) as channel, ThreadPoolExecutor(1) as threads:

        def work() -> CheckpointPlan:
            link = Link(channel.address, 0)
            try:
                return fetch_checkpoint(plan, link, folder, 60)
            finally:
                link.close()
                channel.wake()

        working = threads.submit(work)
        while not working.done():
            for task, batch in channel.batches(1):
                told += [each.text for each in batch if isinstance(each, Log)]
                for each in batch:
                    if isinstance(each, Fetch):
                        channel.send(task, archive.fetch(each))
        return working.result(), told


@pytest.mark.parametrize("how", ["other bytes", "cut", "gone"])
def test_a_damaged_checkpoint_is_not_fetched_and_the_user_is_told(tmp_path: Path, how: str) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    intact, bad = publish(there, 1, b"0123456789"), publish(there, 2)
    with archive_of("run2", checkpoint_dir=str(there), resume=True) as archive:
        plan = archive.plan(1)._replace(folder=str(tmp_path / "not seen"))
        assert plan.resume == (bad, intact)
        if how == "gone":
            (there / bad.name).unlink()
        else:
            (there / bad.name).write_bytes(b"stat!"[: 5 if how == "other bytes" else 3])
        fetched, (told,) = fetch(plan, archive, here)
    assert fetched.fetched == str(here / intact.name)
    assert (here / intact.name).read_bytes() == b"0123456789"
    assert os.listdir(here) == [intact.name]
    assert bad.name in told
    assert "(step 20)" in told
    assert told.endswith("The earlier one is used.")


def test_a_driver_reads_no_more_of_a_checkpoint_than_the_piece_that_it_sends(
    tmp_path: Path,
) -> None:
    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar

    large = publish(tmp_path, 1, bytes(64 << 20))
    with archive_of("run2", checkpoint_dir=str(tmp_path), resume=True) as archive:
        before = read()
        assert archive.fetch(Fetch(0, large.name, 0)).data
        assert read() - before < 8 << 20


def test_a_run_without_resume_keeps_earlier_checkpoints_and_continues_their_numbers(
    tmp_path: Path,
) -> None:
    publish(tmp_path, 7)
    with archive_of("run2", checkpoint_dir=str(tmp_path), num_to_keep=1) as archive:
        plan = archive.plan(1)
        assert (plan.resume, plan.next_number, plan.lineage) == ((), 8, False)
        archive.saved(publish(tmp_path, 8, run_id="run2"))
        assert [each.step for each in archive.checkpoints] == [80]
        assert [each.number for each in archive.plan(2).resume] == [8]
    assert len(checkpoint.find_complete(LocalFolder(tmp_path))) == 2


def test_without_a_folder_checkpoints_exist_as_long_as_the_result(tmp_path: Path) -> None:
    with archive_of("run1") as archive:
        folder = Path(archive.plan(1).folder)
        assert folder.is_dir()
        archive.saved(publish(folder, 1))
    assert archive.checkpoints[0].load() == b"state"
    archive.discard()
    assert not folder.exists()
    with archive_of("run2") as archive:
        folder = Path(archive.plan(1).folder)
    assert not folder.exists()  # there was no checkpoint


def test_a_checkpoint_without_the_metric_is_warned_about_once_and_never_best(
    tmp_path: Path,
) -> None:
    with archive_of("run1", checkpoint_dir=str(tmp_path), metric="accuracy", mode="max") as archive:
        first, second = (publish(tmp_path, number, metrics={"loss": 1.0}) for number in (1, 2))
        archive.saved(first)
        assert "step 10 has no such metric (it has: loss)" in archive.metric_warning(first)
        archive.saved(second)
        assert archive.metric_warning(second) == ""
        assert archive.best is None
        archive.saved(publish(tmp_path, 3, metrics={"accuracy": 0.5}))
        assert archive.best is not None
        assert archive.best.step == 30


def test_a_checkpoint_that_a_killed_rank_completed_counts_and_its_unfinished_files_go(
    tmp_path: Path,
) -> None:
    with archive_of("run1", checkpoint_dir=str(tmp_path)) as archive:
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


def test_a_run_that_resumes_removes_files_of_the_crashed_run_and_of_no_other(
    tmp_path: Path,
) -> None:
    options = {"checkpoint_dir": str(tmp_path), "resume": True}
    archive_of("run1", **options).__enter__()
    kept, cut = publish(tmp_path, 1), publish(tmp_path, 2)
    (tmp_path / marker_name(cut.name)).unlink()
    (tmp_path / f".part-{marker(3).name}").write_bytes(b"half")
    with archive_of("other", checkpoint_dir=str(tmp_path)) as other:
        half = tmp_path / f".part-{marker(4, run_id='other').name}"
        half.write_bytes(b"half")
        with archive_of("run2", **options):
            names = set(os.listdir(tmp_path))
        assert {".seen-other", half.name} <= names
        assert other.plan(2).resume == ()
    left = {kept.name, marker_name(kept.name), ".resumed-by", ".seen-run1"}
    assert set(os.listdir(tmp_path)) == left


def test_a_resumed_run_that_fails_before_it_saves_resumes_from_the_same_checkpoint_again(
    tmp_path: Path,
) -> None:
    earlier = publish(tmp_path, 1)
    with archive_of("run2", checkpoint_dir=str(tmp_path), resume=True) as archive:
        assert archive.catch_up() == []
        assert archive.plan(2).resume == (earlier,)
