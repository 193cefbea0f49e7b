"""Commits: a state in the memory of a host, written by one process and read by others."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from horovod_runner import CheckpointError, RanksChangedError, commit, save_checkpoint
from horovod_runner.checkpoints import checkpoint, loader
from horovod_runner.checkpoints.commits import Commit, Commits
from horovod_runner.checkpoints.saver import Saver
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.wire.job_file import CheckpointPlan, imported_file, leave_file
from horovod_runner.wire.marker import Marker
from horovod_runner.worker import context
from tests.savers import Together

PART = 1000  # a commit's state of this many numbers


def write(commits: Commits, state: Any, number: int = 1, *, attempt: int = 1) -> None:
    commits.write(state, Commit(attempt, number, number * 10, 1, {"loss": float("nan")}))


def latest_of(commits: Commits) -> Commit:
    latest = commits.latest()
    assert latest is not None
    return latest


def read(commits: Commits) -> Any:
    with commits.hold() as held:
        return None if held is None else held.read()


@pytest.fixture
def commits(tmp_path: Path) -> Commits:
    return Commits(str(tmp_path))


def test_a_commit_is_restored_by_another_process(tmp_path: Path) -> None:
    state = OrderedDict({"x": np.ones(3), 2**70: {}, 1: []})
    write(Commits(str(tmp_path)), state)
    other = Commits(str(tmp_path))
    restored = read(other)
    assert type(restored) is OrderedDict
    assert [*restored.items()][1:] == [*state.items()][1:]
    latest = latest_of(other)
    assert (latest.step, latest.order) == (10, (1, 1))
    assert np.isnan(latest.metrics["loss"])


def test_bytes_and_folders_are_restored(commits: Commits, tmp_path: Path) -> None:
    for number, data in enumerate([b"", b"\x00\x01", bytearray(b"abc")], start=1):
        write(commits, data, number)
        assert read(commits) == bytes(data)
    mine = tmp_path / "mine" / "deep"
    mine.mkdir(parents=True)
    (mine / "file.txt").write_text("here")
    write(commits, tmp_path / "mine", 4)
    assert (read(commits) / "deep" / "file.txt").read_text() == "here"
    with pytest.raises(TypeError, match=r"/nowhere' .*folder"):
        write(commits, tmp_path / "nowhere", 5)
    assert not list(tmp_path.glob(".part*"))


def test_the_latest_of_many_commits_of_any_size_is_read(commits: Commits, tmp_path: Path) -> None:
    for number, count in enumerate([10, 400_000, 1, 300_000, 0], start=1):
        state = {"x": np.full(count, number)}
        write(commits, state, number)
        state["x"][:] = 0  # the commit is a copy
        assert (read(commits)["x"] == number).all()
        assert len(read(commits)["x"]) == count
    files = {path.name: path.stat().st_size for path in tmp_path.glob("state-*")}
    assert files == {"state-0": 4 << 20, "state-1": 4 << 20}  # reused, and no more than needed


@pytest.mark.parametrize("spoil", ["tree", "half", "marker", "gone"])
def test_a_damaged_commit_is_not_used(commits: Commits, tmp_path: Path, spoil: str) -> None:
    write(commits, {"x": np.ones(PART)})
    latest = latest_of(commits)
    path, marker = tmp_path / f"state-{latest.slot}", tmp_path / "commit"
    match spoil:
        case "tree":
            with path.open("r+b") as file:
                file.seek(latest.tree_at)
                file.write(b"?")
        case "half":
            os.truncate(path, PART)
        case "marker":
            marker.write_bytes(marker.read_bytes()[:-1])
        case "gone":
            path.unlink()
    assert read(Commits(str(tmp_path))) is None


def child(folder: Path, body: str) -> subprocess.Popen[str]:
    """A process that writes a first commit, prints a line, and goes on with ``body``."""
    program = f"""
        import sys
        import numpy as np
        from horovod_runner.checkpoints import packed
        from horovod_runner.checkpoints.commits import Commit, Commits

        def announce():
            print("here", flush=True)
            sys.stdin.read()  # killed here

        commits = Commits({str(folder)!r})
        commits.write({{"x": np.ones({PART})}}, Commit(1, 1, 1, 1))
        commits.write({{"x": np.full({PART}, 2.0)}}, Commit(1, 2, 2, 1))
    """
    text = textwrap.dedent(program) + textwrap.dedent(body)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", text], stdin=pipe, stdout=pipe, text=True)


@pytest.mark.parametrize(
    "body",
    [
        # In the middle of the copy:
        """
        copy = np.copyto
        def copyto(target, source):
            copy(target[:10], source[:10])
            announce()
        np.copyto = copyto
        commits.write({"x": np.full(1000, 3.0)}, Commit(1, 3, 3, 1))
        """,
        # Between the copy and the marker:
        """
        from pathlib import Path
        Path.replace = lambda *_: announce()
        commits.write({"x": np.full(1000, 3.0)}, Commit(1, 3, 3, 1))
        """,
    ],
    ids=["in the copy", "before the marker"],
)
def test_a_process_killed_in_a_commit_leaves_the_earlier_one(
    commits: Commits, tmp_path: Path, body: str
) -> None:
    with child(tmp_path, body) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert (read(commits)["x"] == 2).all()
    # The next attempt goes on: the killed process holds no lock.
    write(commits, {"x": np.full(PART, 4.0)}, 1, attempt=2)
    assert (read(commits)["x"] == 4).all()
    assert latest_of(commits).order == (2, 1)


def test_a_commit_is_not_overwritten_while_it_is_read(commits: Commits, tmp_path: Path) -> None:
    write(commits, {"x": np.ones(PART)})
    with Commits(str(tmp_path)).hold() as held:
        assert held is not None
        path = tmp_path / f"state-{held.commit.slot}"
        with path.open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write(commits, {"x": np.full(PART, 2.0)}, 2)  # into the other file
        third = threading.Thread(target=write, args=(commits, {"x": np.full(PART, 3.0)}, 3))
        third.start()
        assert (held.read()["x"] == 1).all()
        assert latest_of(commits).number == 2
    third.join()
    assert (read(commits)["x"] == 3).all()


def test_a_rank_of_an_earlier_attempt_replaces_no_later_commit(
    commits: Commits, tmp_path: Path
) -> None:
    ending = Commits(str(tmp_path))
    write(ending, {"x": 1}, 8)
    write(commits, {"x": 2}, 1, attempt=2)
    write(ending, {"x": 3}, 9)
    assert read(commits) == {"x": 2}
    with (
        commits.writing(Commit(2, 2, 2, 1)),
        pytest.raises(BlockingIOError),
        ending.writing(Commit(1, 1, 1, 1), wait=False),
    ):
        raise AssertionError("two processes write")


def test_too_little_memory_is_an_error_with_numbers_before_anything_is_lost(
    commits: Commits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(commits, {"x": np.ones(PART)})
    free = shutil.disk_usage(tmp_path)._replace(free=3_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    write(commits, {"x": np.ones(250_000)}, 2)
    text = r" 4\.0 MB .* 4\.2 MB.* 3\.0 MB .*--shm-size"
    with pytest.raises(CheckpointError, match=text):
        write(commits, {"x": np.ones(500_000)}, 3)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match=r" 2\.1 MB .*No space left on device"):
        write(commits, {"x": np.ones(270_000)}, 4)
    assert len(read(commits)["x"]) == 250_000


# Order


def marker(number: int, attempt: int = 1, run_id: str = "run1") -> Marker:
    return Marker("name", number, 1, "bytes", 1, "", run_id, attempt)


def test_a_checkpoint_is_newer_if_it_was_saved_after_the_commit() -> None:
    made = Commit(2, 5, 100, next_checkpoint=7)
    assert made.is_older_than(marker(7, attempt=2), "run1")
    assert not made.is_older_than(marker(6, attempt=2), "run1")
    assert made.is_older_than(marker(7, attempt=3), "run1")
    assert not made.is_older_than(marker(9, attempt=1), "run1")
    assert not made.is_older_than(marker(9, attempt=3, run_id="run0"), "run1")


# In a rank


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[context.RankContext]:
    """The first rank of an elastic run's second attempt, on a host of its own."""
    made = make_rank(tmp_path)
    context.enter(made)
    yield made
    if made.saver is not None:
        made.saver.close()
    context.enter(None)


def make_rank(tmp_path: Path, number: int = 0, local_rank: int = 0) -> context.RankContext:
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    folder = LocalFolder(tmp_path / "checkpoints")
    checkpoint.write_probe(folder, "run1")
    (tmp_path / "commits").mkdir(exist_ok=True)
    nothing: Any = object()  # in place of the pipes to the task, which these calls do not use
    return context.RankContext(
        number,
        2,
        2,
        nothing,
        nothing,
        CheckpointPlan(folder.url, "run1", attempt=2, next_number=4),
        os.open(os.devnull, os.O_WRONLY),
        local_rank=local_rank,
        commits=str(tmp_path / "commits"),
    )


def test_outside_an_elastic_run_arguments_are_checked_and_nothing_is_kept(
    rank: context.RankContext, tmp_path: Path
) -> None:
    folder, rank.commits = rank.commits, ""
    for current in (rank, None):
        context.enter(current)
        commit({"x": 1}, 1, {"loss": 0.5})
        with pytest.raises(ValueError, match=r"step .* -1$"):
            commit({"x": 1}, -1)
        with pytest.raises(TypeError, match=r"step .*str \('1'\)"):
            commit({"x": 1}, "1")  # type: ignore[arg-type]
    assert os.listdir(folder) == []


def test_a_commit_knows_how_many_checkpoints_came_before_it(rank: context.RankContext) -> None:
    commit({"x": 1}, 1)
    save_checkpoint({"x": 2}, 2)
    with pytest.raises(TypeError):
        save_checkpoint({"x": object()}, 3)
    commit({"x": 4}, 4)
    save_checkpoint({"x": 5}, 5)
    latest = latest_of(Commits(rank.commits))
    assert (latest.order, latest.step, latest.next_checkpoint) == ((2, 2), 4, 6)
    assert isinstance(rank.saver, Saver)
    rank.saver.finish()
    plan = rank.checkpoints
    markers = checkpoint.find_complete(LocalFolder(Path(plan.folder)))
    assert [(each.step, each.number) for each in markers] == [(5, 6), (2, 4)]
    assert [latest.is_older_than(each, "run1") for each in markers] == [True, False]


def test_the_rank_that_writes_leaves_at_a_commit(rank: context.RankContext) -> None:
    Path(leave_file(rank.commits, 1)).touch()  # of the attempt before
    commit({"x": 1}, 10)
    Path(leave_file(rank.commits, 2)).touch()
    with pytest.raises(RanksChangedError, match=r"\bcommit .*step 20\b"):
        commit({"x": 2}, 20)
    assert read(Commits(rank.commits)) == {"x": 2}


def test_other_ranks_leave_only_once_their_host_has_the_commit(
    rank: context.RankContext, tmp_path: Path
) -> None:
    other = make_rank(tmp_path, 1, local_rank=1)
    Path(leave_file(rank.commits, 2)).touch()
    context.enter(other)
    commit({"x": 1}, 10)  # goes on: the first rank has not written yet
    for number in (1, 2):
        write(Commits(rank.commits), {"x": number}, number, attempt=2)
    with pytest.raises(RanksChangedError, match="step 20"):
        commit({"x": 2}, 20)


def test_rank_0_leaves_at_a_checkpoint_once_that_is_written(
    rank: context.RankContext, tmp_path: Path
) -> None:
    Path(leave_file(rank.commits, 2)).touch()
    with pytest.raises(RanksChangedError, match=r"\bcheckpoint .*step 30\b"):
        save_checkpoint({"x": 3}, 30)
    complete = checkpoint.find_complete(LocalFolder(tmp_path / "checkpoints"))
    assert [each.step for each in complete] == [30]
    context.enter(make_rank(tmp_path, 1, local_rank=1))
    save_checkpoint({"x": 3}, 30)


def test_the_first_commit_tells_the_task_what_to_preload(rank: context.RankContext) -> None:
    class Imports:
        def preloadable(self, *, quiet: bool) -> tuple[str, ...]:
            assert quiet
            return ("numpy", "torch")

    rank.imports = Imports()  # type: ignore[assignment]
    commit({"x": 1}, 1)
    assert msgspec.json.decode(Path(imported_file(rank.commits)).read_bytes()) == ["numpy", "torch"]
    Path(imported_file(rank.commits)).unlink()
    commit({"x": 1}, 2)
    assert not Path(imported_file(rank.commits)).exists()


# Loading


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Together:
    # A commit of several pieces would have to have a hundred megabytes.
    monkeypatch.setattr(loader, "_BROADCAST_BYTES", 3000)
    return Together(3)


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    """The folders of two hosts; the first one has two ranks."""
    for name in "ab":
        (tmp_path / name).mkdir()
    return [tmp_path / "a", tmp_path / "a", tmp_path / "b"]


PLAN = CheckpointPlan("nowhere", "run1", attempt=3)


def test_every_host_reads_its_own_copy_of_the_newest_commit(
    together: Together, hosts: list[Path]
) -> None:
    assert together.load(PLAN, hosts) == [None] * 3
    for host in hosts[1:]:
        write(Commits(str(host)), {"x": np.ones(PART)}, 7)
    loaded = together.load(PLAN, hosts)
    assert [each and each.step for each in loaded] == [70] * 3
    assert all(each and each.state["x"].sum() == PART for each in loaded)
    assert together.sent == [0, 0, 0]


def test_ranks_may_have_commits_of_different_sizes(together: Together, tmp_path: Path) -> None:
    hosts = [tmp_path / name for name in "abc"]
    for count, host in zip((PART, 3 * PART), hosts, strict=False):
        host.mkdir()
        write(Commits(str(host)), {"x": np.ones(count)}, 7)
    hosts[2].mkdir()  # has none, and gets another one's
    loaded = together.load(PLAN, hosts)
    assert [each and len(each.state["x"]) for each in loaded][:2] == [PART, 3 * PART]
    assert loaded[2] is not None
    assert len(loaded[2].state["x"]) in (PART, 3 * PART)


@pytest.mark.parametrize("earlier", [True, False])
def test_a_host_without_the_newest_commit_gets_and_keeps_it(
    together: Together, hosts: list[Path], earlier: bool
) -> None:
    if earlier:
        write(Commits(str(hosts[0])), {"x": np.zeros(PART)}, 9, attempt=1)
    write(Commits(str(hosts[2])), {"x": np.ones(PART)}, 1, attempt=2)
    loaded = together.load(PLAN, hosts)
    assert [each and each.step for each in loaded] == [10] * 3
    assert all(each and each.state["x"].sum() == PART for each in loaded)
    assert together.sent[:2] == [0, 0]
    assert together.sent[2] > 3
    # If the host that had it is lost now, nothing is lost.
    assert read(Commits(str(hosts[0])))["x"].sum() == PART
    assert together.load(PLAN, [hosts[0]] * 3)[2] is not None


def test_the_newer_one_of_commit_and_checkpoint_is_loaded(
    together: Together, hosts: list[Path], rank: context.RankContext
) -> None:
    save_checkpoint(b"earlier", 1)
    commit(b"committed", 2)
    save_checkpoint(b"later", 3)
    assert rank.saver is not None
    rank.saver.finish()
    folder = LocalFolder(Path(rank.checkpoints.folder))
    later, earlier = checkpoint.find_complete(folder)
    here = [Path(rank.commits), hosts[0], hosts[2]]
    plan = rank.checkpoints._replace(attempt=3, resume=(later, earlier))

    def states(plan: CheckpointPlan) -> list[Any]:
        return [each and each.state for each in together.load(plan, here)]

    assert states(plan) == [b"later"] * 3
    assert states(plan._replace(resume=(earlier,))) == [b"committed"] * 3
    assert states(plan._replace(fetched=f"/there/{earlier.name}")) == [b"committed"] * 3
    (folder.path / later.name).write_bytes(b"retal")
    assert states(plan) == [b"committed"] * 3
    (warning,) = together.warned
    assert "step 3) is damaged" in warning
    assert warning.endswith("The commit is used.")
