"""Ranks that cannot reach the driver: tasks are threads; driver, deputy and workers are real."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq

from horovod_runner import (
    CheckpointError,
    GpuError,
    HangError,
    LaunchError,
    log_to_driver,
    report,
    save_checkpoint,
)
from horovod_runner.checkpoints import checkpoint
from horovod_runner.checkpoints.archive import Archive
from horovod_runner.common.limits import Limits
from horovod_runner.common.options import CheckpointConfig, ClusterConfig, DebugConfig, Options
from horovod_runner.common.slots import RankInfo
from horovod_runner.driver.attempt import AttemptRunner
from horovod_runner.driver.detached import journal
from horovod_runner.driver.detached.journal import JournalReader, JournalWriter
from horovod_runner.driver.detached.keeper import CAPACITY, Capacity, Keeper
from horovod_runner.driver.detached.served import CalledFolder
from horovod_runner.driver.detached.stand_in import StandIn
from horovod_runner.driver.launcher import LaunchRequest
from horovod_runner.driver.requests import Requests
from horovod_runner.host import network
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.launchers.detached import Detached
from horovod_runner.launchers.local import LocalLaunch, LocalLauncher
from horovod_runner.results.run import Run
from horovod_runner.run.make_job import make_job
from horovod_runner.sinks import Sink
from horovod_runner.sinks.terminal import TerminalSink
from horovod_runner.task.task import run_rank
from horovod_runner.wire.events import Notice, Report
from horovod_runner.wire.job import Job, Record
from horovod_runner.wire.job_file import CheckpointPlan
from horovod_runner.wire.transport import new_call
from tests.events import telling

pytestmark = pytest.mark.usefixtures("nothing_left")


RUN_ID = "0a1b2c3d"
SOON = Limits(driver_reached=0.5, all_tasks=1)


class Meeting:
    """Where threads meet, as Spark's barrier tasks do."""

    def __init__(self, size: int) -> None:
        self.told = [""] * size
        self.barrier = threading.Barrier(size)

    def task(self, number: int, attempt: int = 0) -> Any:
        def gather(text: str) -> list[str]:
            self.told[number] = text
            self.barrier.wait()
            heard = list(self.told)
            self.barrier.wait()
            return heard

        return SimpleNamespace(
            partitionId=lambda: number,
            attemptNumber=lambda: attempt,
            getTaskInfos=lambda: [SimpleNamespace(address="127.0.0.1:1")],
            allGather=gather,
        )


class Here(Detached):
    """A task's part in detached mode, with as much room as the test wants."""

    def __init__(self, job: Job, task: Any, capacity: Capacity = CAPACITY) -> None:
        super().__init__(job, task)
        self._capacity = capacity

    def start_stand_in(self, host: str) -> StandIn:
        return StandIn(self._job, host, self._capacity)


class Blind(LocalLauncher):
    """Starts ranks of which some cannot reach the driver."""

    def __init__(self, blind: set[int], capacity: Capacity) -> None:
        self._blind = blind
        self._capacity = capacity

    def launch(self, request: LaunchRequest) -> LocalLaunch:
        return BlindLaunch(request, self._blind, self._capacity)


class BlindLaunch(LocalLaunch):
    running = True

    def __init__(self, request: LaunchRequest, blind: set[int], capacity: Capacity) -> None:
        self._blind = blind
        self._capacity = capacity
        self._meeting = Meeting(request.job.size)
        self.expected = time.monotonic() + 1.0
        super().__init__(request)

    def _run(self, task: int) -> None:
        detached = Here(self._job, self._meeting.task(task), self._capacity)
        setup = replace(self._setup, task=task, detached=detached, directory=None, owner=None)
        # Port 1 of this host: nobody listens.
        address = replace(self._address, port=1) if task in self._blind else self._address
        outcome = run_rank(self._job, address, setup)
        self._ended(msgspec.structs.replace(outcome, record=detached.record))


def run(
    main: Any,
    blind: set[int],
    size: int = 2,
    *,
    hang_timeout: float | None = None,
    gpus_per_rank: float = 0,
    capacity: Capacity = CAPACITY,
    archive: Archive | None = None,
    required: bool = False,
    sink: Sink | None = None,
    record: Run | None = None,
) -> Any:
    chosen = Options(
        np=-size,
        gpus_per_rank=gpus_per_rank,
        debug_config=DebugConfig(hang_timeout=hang_timeout),
        checkpoint_config=CheckpointConfig(required=required),
        cluster_config=ClusterConfig(limits=SOON),
    )
    job = make_job(main, {}, size, chosen)
    if archive is not None:
        job = replace(job, run_id=RUN_ID, checkpoints=archive.plan(1))
    to = telling(sink or TerminalSink(size), run=record)
    return AttemptRunner(job, Blind(blind, capacity), to, Requests(), archive).run()


def talk() -> int:
    print("printed\n", end="")  # one write, also where Python buffers nothing
    log_to_driver(f"logged {os.environ['RANK']}")
    return 10 + int(os.environ["RANK"])


@pytest.mark.parametrize("blind", [{0, 1}, {0}, {1}, set()])  # without one, no deputy is needed
def test_ranks_that_cannot_reach_the_driver_run_all_the_same(
    blind: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(talk, blind) == 10
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == [
        "[0] printed",
        "[1] printed",
        "logged 0",
        "logged 1",
    ]
    told = captured.err.count("executors cannot reach this process at 127.0.0.1:")
    assert told == captured.err.count("HOROVOD_RUNNER_DRIVER_HOST") == bool(blind)
    table = [line.split()[1] for line in captured.err.splitlines()[-4:]]
    assert table == ["rank", "0", "1", "controller:"]


def test_a_failing_rank_ends_the_others_without_the_driver() -> None:
    def main() -> None:
        if os.environ["RANK"] == "1":
            raise KeyError("the true cause")
        threading.Event().wait()

    with pytest.raises(KeyError, match="the true cause") as caught:
        run(main, {0, 1, 2}, size=3)
    assert "rank 1 of 3" in str(caught.value.__cause__)


@pytest.mark.parametrize("method", ["idle", "take"])  # before tasks report, and afterwards
def test_a_fault_beside_rank_0_ends_all_ranks(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TypeError("a fault")

    def main() -> None:
        log_to_driver("waits")
        threading.Event().wait()

    monkeypatch.setattr(Keeper, method, fail)
    with pytest.raises(LaunchError, match=r"supervisor beside rank 0 failed: .*a fault"):
        run(main, {0, 1})


def test_a_supervisor_that_cannot_start_leaves_no_variable_of_the_run_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing:
        """A capacity that cannot be read."""

        def __getattr__(self, name: str) -> int:
            assert os.environ["OF_THE_RUN"] == "secret"
            raise OSError("refused")

    monkeypatch.delenv("OF_THE_RUN", raising=False)
    job = replace(make_job(print, {}, 1, Options(np=-1)), environment={"OF_THE_RUN": "secret"})
    with pytest.raises(OSError, match="refused"):
        StandIn(job, "127.0.0.1", cast("Capacity", Refusing()))
    assert "OF_THE_RUN" not in os.environ


def test_gpus_that_are_too_few_are_told_without_the_driver() -> None:
    with pytest.raises(GpuError, match=r" 2 ranks .* 64 .*gpus_per_rank=32"):
        run(print, {0, 1}, gpus_per_rank=32)


def test_a_hang_ends_without_the_driver() -> None:
    def main() -> None:
        threading.Event().wait()

    with pytest.raises(HangError, match=r"threading\.py"):
        run(main, {0, 1}, hang_timeout=1.0)


def test_output_beyond_the_limit_is_cut_in_front_and_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main() -> None:
        for number in range(100):
            log_to_driver(f"{number:100}")

    run(main, {0}, size=1, capacity=Capacity(characters=1000))
    captured = capsys.readouterr()
    assert [int(line) for line in captured.out.splitlines()] == list(range(90, 100))
    assert "9000 characters of what the ranks printed were too many" in captured.err


@pytest.mark.parametrize("capacity", [Capacity(reports=100), Capacity(numbers=100)])
def test_reports_come_to_the_driver_at_the_end(capacity: Capacity) -> None:
    def main() -> None:
        for step in range(1000):
            report(loss=float(step), step=step)

    record = Run("test", 1)
    run(main, {0}, size=1, record=record, capacity=capacity)
    reports = record._metrics.ranks[0]
    count = len(reports.times)
    assert 50 <= count <= 100
    assert count + reports.dropped >= 1000 - 2 * (1000 // count)
    assert record.timings.first_line is not None


def hide(folder: Path, run_id: str) -> None:
    """Remove the driver's probe, as if the ranks' hosts had another folder of that path."""
    checkpoint.clean_up(LocalFolder(folder), run_id)


def test_a_checkpoint_that_is_required_ends_the_run(tmp_path: Path) -> None:
    def main() -> None:
        save_checkpoint(b"state", 7)
        signal.alarm(60)  # otherwise it would go on for hours
        signal.pause()

    config = CheckpointConfig(required=True)
    options = Options(np=2, checkpoint_dir=tmp_path, checkpoint_config=config)
    with Archive(RUN_ID, options) as archive:
        hide(tmp_path, RUN_ID)
        with pytest.raises(CheckpointError, match=r"step 7 .*checkpoint_dir .*required=True"):
            run(main, {0}, size=1, archive=archive, required=True)


@pytest.mark.parametrize("seen", [True, False])
def test_checkpoints_are_kept_where_the_ranks_see_the_folder(
    tmp_path: Path, seen: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        save_checkpoint(b"state", 7)

    with Archive(RUN_ID, Options(np=2, checkpoint_dir=tmp_path)) as archive:
        if not seen:
            hide(tmp_path, RUN_ID)
        run(main, {0}, size=1, archive=archive)
    assert [each.step for each in archive.checkpoints] == ([7] if seen else [])
    told = "the checkpoint of step 7 could not be written: the ranks reach neither the driver"
    assert (told in capsys.readouterr().err) is not seen


def test_the_driver_hears_of_a_run_through_the_folder_while_it_lasts(tmp_path: Path) -> None:
    heard = threading.Event()

    class Ear(Sink):
        """Answers what it hears: the ranks wait for that."""

        def __init__(self) -> None:
            self.logged: list[str] = []
            self.notices: list[str] = []
            self.placed: list[int] = []

        def log(self, rank: int, text: str) -> None:
            self.logged.append(text)
            (tmp_path / f"heard-{text}").touch()

        def reports(self, reports: Sequence[Report]) -> None:
            for each in reports:
                (tmp_path / f"heard-{each.step}").touch()
            heard.set()

        def ranks(self, ranks: list[RankInfo]) -> None:
            self.placed = [info.rank for info in ranks if info.pid]

        def notice(self, text: str) -> None:
            self.notices.append(text)

    def main() -> None:
        def wait_for(name: str) -> None:
            while not (tmp_path / f"heard-{name}").exists():
                threading.Event().wait(0.05)

        rank = os.environ["RANK"]
        log_to_driver(rank)
        wait_for(rank)
        for step in (3, 4):
            report(loss=1.0, step=step)
            wait_for(str(step))
        save_checkpoint(b"state", 7)
        log_to_driver("the last")

    ear = Ear()
    with Archive(RUN_ID, Options(np=2, checkpoint_dir=tmp_path / "kept")) as archive:
        run(main, {0, 1}, archive=archive, sink=ear)
    assert sorted(ear.logged) == ["0", "1", "the last", "the last"]
    assert heard.is_set()
    assert ear.placed == [0, 1]
    assert f"comes through files in {tmp_path}/kept" in ear.notices[0]
    assert [each.step for each in archive.checkpoints] == [7]
    assert not list((tmp_path / "kept").glob(".*"))


def test_what_the_folder_does_not_take_comes_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Archive(RUN_ID, Options(np=2, checkpoint_dir=tmp_path)) as archive:
        # A folder has the name of the journal's first file, so that this cannot be written.
        (tmp_path / f"{checkpoint.LIVE}{RUN_ID}-1-1" / "full").mkdir(parents=True)
        assert run(talk, {0}, size=1, archive=archive) == 10
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == ["logged 0", "printed"]
    assert "is shown at the end of the run" in captured.err


def test_a_driver_that_reads_nothing_stops_the_journal_from_growing(tmp_path: Path) -> None:
    plan = CheckpointPlan(str(tmp_path), RUN_ID)
    writer = JournalWriter(plan, LocalFolder(tmp_path))
    try:
        for number in range(journal._MOST_UNREAD):
            writer.put([Notice(str(number))])
            while writer.unwritten is not None:
                threading.Event().wait(0.01)
        assert not writer._write(b"one too many")
        writer.put([Notice("one too many")])
    finally:
        writer.close()
    assert writer.written == journal._MOST_UNREAD
    assert writer.unwritten == [Notice("one too many")]
    reader = JournalReader(plan, [LocalFolder(tmp_path)], lambda: None)
    files = reader.finish(Record([], [], written=writer.written))
    assert files == [[Notice(str(n))] for n in range(journal._MOST_UNREAD)]
    assert not list(tmp_path.iterdir())


def test_files_that_are_no_journal_are_passed_over(tmp_path: Path) -> None:
    plan = CheckpointPlan(str(tmp_path), RUN_ID)
    (tmp_path / ".live-0a1b2c3d-1-1").write_bytes(b"torn")
    (tmp_path / ".live-0a1b2c3d-1-2").write_bytes(msgspec.msgpack.encode([Notice("whole")]))
    reader = JournalReader(plan, [LocalFolder(tmp_path)], lambda: None, most_broken=2)
    assert reader.finish(Record([], [], written=2)) == [[Notice("whole")]]


def test_the_driver_may_call_the_stand_in() -> None:
    call = new_call()
    job = Job("test", 2, Options(np=2), b"", call=call)
    writer = journal.open_writer(job)
    assert writer is not None
    read = threading.Event()
    writer.put([Notice("first")])
    reader = JournalReader(job.checkpoints, [CalledFolder("127.0.0.1", call)], read.set)
    assert read.wait(60)
    reader._over.set()
    reader._thread.join()
    writer.put([Notice("second")])  # nobody reads it
    while writer.unwritten is not None:
        threading.Event().wait(0.01)
    writer.close()
    record = Record([], [], written=writer.written, unread=writer.unread)
    assert reader.finish(record) == [[Notice("first")], [Notice("second")]]


def test_a_stand_in_that_nobody_calls_keeps_all_for_the_end() -> None:
    call = new_call()
    writer = journal.open_writer(Job("test", 2, Options(np=2), b"", call=call))
    assert writer is not None
    writer.put([Notice("first")])
    writer.close()
    assert (writer.written, writer.unread, writer.unwritten) == (0, [], [Notice("first")])


def test_nobody_without_the_key_may_call_the_stand_in() -> None:
    call = new_call()
    writer = journal.open_writer(Job("test", 2, Options(np=2), b"", call=call))
    assert writer is not None
    stranger = CalledFolder("127.0.0.1", replace(new_call(), ports=call.ports))
    halfway = replace(call, secret_key=zmq.curve_keypair()[1])
    try:
        for folder in (stranger, CalledFolder("127.0.0.1", halfway)):
            folder._socket.sndtimeo = 500  # ms, for a handshake that fails
            with pytest.raises(zmq.Again):
                folder.read("any")
            folder.close()
    finally:
        writer.close()
    assert writer.written == 0


def test_a_task_that_spark_starts_again_never_goes_on_alone() -> None:
    job = Job("test", 1, Options(np=1), b"")
    with pytest.raises(LaunchError, match=r" again, .*HOROVOD_RUNNER_DRIVER_HOST"):
        Detached(job, Meeting(1).task(0, attempt=1)).__enter__()


def test_tasks_that_do_not_all_meet_give_up() -> None:
    cluster = ClusterConfig(limits=Limits(detached_tasks=0.1))
    job = Job("test", 2, Options(np=2, cluster_config=cluster), b"")
    meeting = Meeting(2)
    with pytest.raises(LaunchError, match=r" 2 tasks .* 0\.1 s .*HOROVOD_RUNNER_DRIVER_HOST"):
        Detached(job, meeting.task(0)).__enter__()
    meeting.barrier.abort()


@pytest.mark.parametrize(
    ("tasks", "default", "address"),
    [
        (["a:1"], "", "seen from a"),
        (["a:1", "a:2", "b:1", "c:1"], "", "seen from b"),
        (["a:1", "unknown:1"], "10.0.0.1", "10.0.0.1"),
        (["a:1", "unknown:1"], "", f"seen from {socket.gethostname()}"),
    ],
)
def test_the_stand_in_has_the_address_that_the_other_hosts_see(
    tasks: Sequence[str], default: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def towards(peer: str) -> str:
        if peer == "unknown":
            raise OSError
        return f"seen from {peer}"

    class Asked(Detached):
        def start_stand_in(self, host: str) -> StandIn:
            raise LookupError(host)

    monkeypatch.setattr(network, "address_towards", towards)
    monkeypatch.setattr(network, "default_address", lambda: default)
    task = Meeting(1).task(0)
    task.getTaskInfos = lambda: [SimpleNamespace(address=each) for each in tasks]
    with pytest.raises(LookupError, match=f"^{address}$"):
        Asked(Job("test", 1, Options(np=1), b""), task).__enter__()
