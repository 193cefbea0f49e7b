"""Limits that hold in a run of 100 days: 10^8 reports, 10^7 lines, 1,000 restarts.

The tests drive the objects that a run consists of, with clocks that they set. Each does something
very often and then ten times, or twice, as often, and compares what the object holds: what does not
grow between the two does not grow up to the numbers above either. Where a limit is large, the
argument that sets it makes it small. The 10^8 reports go through the real table at a limit of 1,024
rows, which it reaches every time the number of reports doubles; one report stands for many that a
rank has counted and not sent (``left_out``).
"""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from horovod_runner.checkpoints import checkpoint
from horovod_runner.checkpoints.archive import Archive
from horovod_runner.common.files import file_sha256
from horovod_runner.common.options import CheckpointConfig, Options
from horovod_runner.common.slots import RankInfo
from horovod_runner.data.feed.epochs import Epochs, FeedKey
from horovod_runner.driver.attempts import run_attempts
from horovod_runner.driver.detached import journal
from horovod_runner.driver.detached.journal import JournalReader, JournalWriter
from horovod_runner.driver.detached.keeper import Capacity, Keeper
from horovod_runner.driver.elastic.members import Members, PoolMember
from horovod_runner.driver.elastic.scaling import ScalingPolicy
from horovod_runner.driver.hangs import HangWatch
from horovod_runner.driver.launcher import Launch, Launcher, LaunchRequest
from horovod_runner.driver.requests import Requests
from horovod_runner.driver.restarts import RestartPolicy
from horovod_runner.driver.sync_check import NoteCheck
from horovod_runner.host.folders.folder import PART
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.host.scratch import RunFolder, memory_folder, rank_folder
from horovod_runner.results import run_log
from horovod_runner.results.live import live
from horovod_runner.results.metrics_table import Metrics
from horovod_runner.results.page.document import write_page
from horovod_runner.results.recorder import Recorder, failed
from horovod_runner.results.run import DETAILS_LEFT_OUT, Run
from horovod_runner.results.slowness.profile import MAX_ROWS, RunProfile
from horovod_runner.sinks import fan_out as fan_out_
from horovod_runner.sinks import tensorboard
from horovod_runner.sinks.progress import Progress
from horovod_runner.sinks.sink import Sink
from horovod_runner.sinks.terminal import TerminalSink
from horovod_runner.wire.events import (
    MOST_LEFT_OUT,
    AttemptBegan,
    Began,
    Notice,
    Output,
    RanksPlaced,
    Report,
    Saved,
    Unsaved,
)
from horovod_runner.wire.framing import frame
from horovod_runner.wire.job import Job, Outcome, Record
from horovod_runner.wire.job_file import CheckpointPlan, leave_file, remove_leave_files
from horovod_runner.wire.marker import Marker, file_name
from horovod_runner.wire.measurements import Lines, Machine, Note, Profile
from horovod_runner.wire.messages import Alive, FilePart, Stall, decode_batch
from horovod_runner.wire.spool import Spool
from horovod_runner.worker import reporter as reporter_
from horovod_runner.worker.checks import notes
from horovod_runner.worker.profiling.loader import LoaderWatch
from horovod_runner.worker.reporter import Reporter
from tests.events import telling, telling_threads
from tests.stand_ins import SetClock, as_rank

_SLACK = 200_000  # bytes: lists and dicts grow in steps, and Python keeps freed objects


def growth(few: Callable[[], object], many: Callable[[], object]) -> int:
    """By how many bytes Python's memory grows in ``many``, after ``few`` has filled all limits."""
    tracemalloc.start()
    try:
        few()
        before = _traced()
        many()
        return _traced() - before
    finally:
        tracemalloc.stop()


def _traced() -> int:
    """Bytes that are traced, without those of a table in which Python has all parts of paths.

    The parts come and go, but the table grows in large steps.
    """
    gc.collect()
    snapshot = tracemalloc.take_snapshot()
    traces = snapshot.filter_traces([tracemalloc.Filter(False, "*pathlib*")]).traces
    return sum(trace.size for trace in traces)


def descriptors() -> int:
    """The number of open files; what earlier tests have left may be closed at any time."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A folder in memory: to save a checkpoint waits for the disk several times."""
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        yield Path(folder)


class _Cancelled(threading.Event):
    """A run that nobody cancels. Its waits return at once, and are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        self.waited += timeout or 0.0
        return False


class _Killing(Launch, Launcher):
    """A launcher whose ranks save a checkpoint, leave unfinished files, and are killed at once.

    It is the launch, too.
    """

    where = "test"
    channel_host = "127.0.0.1"
    shares_files = True
    finished = True

    def __init__(self, folder: Path) -> None:
        self._folder = LocalFolder(folder)
        self.most_names = 0

    def slots(self, size: int, patience: float = 0.0) -> int:
        return size

    def launch(self, request: LaunchRequest) -> _Killing:
        job, plan = request.job, request.job.checkpoints
        name = file_name(plan.next_number, job.attempt, plan.token, "bytes")
        part = self._folder.local(f"{PART}{name}")
        assert part is not None
        part.write_bytes(b"state")
        marker = Marker(name, plan.next_number, job.attempt, "bytes", 5, file_sha256(part), "")
        marker = msgspec.structs.replace(marker, run_id=plan.token, attempt=job.attempt)
        checkpoint.publish(self._folder, part, marker)
        self._folder.write(f"{PART}{file_name(plan.next_number + 1, 1, plan.token, 'bytes')}", b"x")
        self._folder.write(f"{checkpoint.LIVE}{plan.token}-{job.attempt}-1", b"x")
        # As the next rank does before it saves.
        for old in checkpoint.find_complete(self._folder)[3:]:
            checkpoint.remove(self._folder, old)
        self.most_names = max(self.most_names, len(self._folder.names()))
        return self

    def outcomes(self) -> list[Outcome]:
        tail = [f"line {number} {'x' * 1000}" for number in range(30)]
        return [Outcome(task, task, "host", exit_code=-9, tail=tail) for task in range(2)]


def test_a_thousand_restarts_leave_nothing_but_their_numbers_and_errors(fast_path: Path) -> None:
    folder, restarts = fast_path / "checkpoints", 1000
    options = Options(np=-2, max_restarts=restarts, checkpoint_dir=folder)
    run, job = Run("0a1b2c3d", -2), Job("0a1b2c3d", 2, options, b"")
    requests, looks = Requests(), dict[int, tuple[int, int, int]]()
    requests.cancelled = cancelled = _Cancelled()
    tracemalloc.start()
    try:
        with Archive(job.run_id, options) as archive:
            run._archive = archive
            killing = _Killing(folder)

            class Looking(Sink):
                def attempt(self, number: int) -> None:
                    if number in (100, restarts):
                        looks[number] = _traced(), descriptors(), threading.active_count()

            with pytest.raises(Exception, match="SIGKILL"):
                run_attempts(
                    job,
                    killing,
                    telling(Looking(), run=run),
                    archive=archive,
                    dataframes={},
                    requests=requests,
                    restarts=RestartPolicy(restarts),
                )
            assert len(archive.markers) == 3
    finally:
        tracemalloc.stop()
    assert len(run.attempts) == restarts + 1
    assert cancelled.waited == restarts  # each has a new checkpoint: a second each time
    (memory, files, threads), (memory_later, files_later, threads_later) = looks.values()
    assert (files_later, threads_later) == (files, threads)
    # Numbers, times and an error of one line: 900 attempts have some hundred bytes each, and would
    # have 30 kB each with their details.
    assert memory_later - memory < 2 << 20
    details = [attempt.details for attempt in run.attempts]
    assert details.count(DETAILS_LEFT_OUT) == restarts + 1 - 32
    assert all(len(text) > 30_000 for text in (*details[:16], *details[-16:]))
    assert all("SIGKILL" in attempt.error for attempt in run.attempts)
    assert killing.most_names < 20
    assert len(list(folder.iterdir())) == 2 * 3  # checkpoints and their markers


def test_of_very_many_attempts_the_first_and_the_latest_are_recorded(tmp_path: Path) -> None:
    run = Run("test", (1, 2))
    recorder = Recorder(run, most_attempts=20, most_details=4)
    for number in range(1, 1001):
        recorder.add([AttemptBegan(number)], 0.0)
        recorder.add([RanksPlaced([RankInfo(0, f"host{number}", 1, (), None)])], 0.0)
        recorder.add([failed(ValueError(f"{number} {'x' * 5000}"))], 0.0)
    recorder.add([AttemptBegan(1001)], 0.0)
    numbers = [attempt.number for attempt in run.attempts]
    assert numbers == [*range(1, 11), *range(992, 1002)]
    assert run.attempts_cut == 1001 - 20
    assert [bool(attempt.hosts) for attempt in run.attempts[:4]] == [True, True, False, False]
    assert run.attempts[2].details == DETAILS_LEFT_OUT
    assert len(run.attempts[9].error) < 1100
    assert "and 4,015 characters" in run.attempts[9].error
    assert live(run).attempt == 1001
    run_log.save(run, tmp_path / "test.run")
    again = run_log.load(tmp_path / "test.run")
    assert (again.attempts_cut, again.attempts) == (run.attempts_cut, run.attempts)
    assert "1,001; those before the last one" in run._repr_html_()
    page = write_page(again, tmp_path / "run.html").read_text()
    assert "981 launches between the first and the latest are left out" in page
    assert DETAILS_LEFT_OUT in page


def test_a_hundred_million_reports_of_a_hundred_days_fill_the_table_once() -> None:
    """Each of 20,000 reports stands for 5,000; the real limit is 2^20 rows, not 2^10."""
    metrics = Metrics(max_rows=1 << 10)
    day = 86400.0

    def reports(first: int, count: int) -> None:
        for step in range(first, first + count):
            when = 1e9 + step / 200 * day
            metrics.extend([Report(0, {"loss": 1.0}, step * 5000, step // 200, when, 4999)], 1)

    assert growth(lambda: reports(0, 2000), lambda: reports(2000, 18_000)) < _SLACK
    assert len(metrics.ranks[0].times) <= 1 << 10
    assert len(metrics.ranks[0].times) + metrics.ranks[0].dropped == 10**8
    assert metrics.ranks[0].latest == {"loss": 1.0}
    assert metrics.table()["step"].to_pylist()[-1] > 99_000_000


def test_at_its_real_limit_the_table_has_as_many_rows_after_twice_as_many_reports() -> None:
    metrics = Metrics()
    reports = [Report(0, {"loss": 1.0}, step=1)] * 50_000

    def send(times: int) -> None:
        for _ in range(times):
            metrics.extend(reports, 1)

    assert growth(lambda: send(21), lambda: send(21)) < _SLACK
    assert len(metrics.ranks[0].times) <= 1 << 20
    assert len(metrics.ranks[0].times) + metrics.ranks[0].dropped == 42 * 50_000


def test_lines_and_notices_are_cut_in_the_record_and_counted() -> None:
    """10^5 lines; 10^7 take only longer: the deque is full after 1,000."""
    run, days = Run("test", 2), SetClock(1e9)
    recorder = Recorder(run, most_pieces=1000)

    def lines(count: int) -> None:
        for number in range(count):
            days.now += 0.864
            recorder.add([Output(number % 2, "stdout", "12345678\n")], days.now)
            if not number % 1000:
                recorder.add([Notice("12345678\n")], days.now)

    assert growth(lambda: lines(10_000), lambda: lines(100_000)) < _SLACK
    assert len(run.logs) == 1000
    assert run.logs_cut == 9 * (110_000 + 110 - 1000)


def test_the_terminal_remembers_no_line_that_it_has_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    days = SetClock(1e9)
    terminal = TerminalSink(32, clock=days, width=lambda: 0)
    for number in range(50_000):
        days.now += 0.01
        terminal.output(number % 32, "stdout", f"line {number // 32}\n")
        terminal.idle()
        assert len(terminal._printed) <= 1100
        assert len(terminal._gathered) <= 1100
    capsys.readouterr()


def test_measurements_of_a_hundred_days_and_hosts_that_come_and_go_have_a_limit() -> None:
    """A summary stands for nine minutes: a rank sends one a second, and rows merge in pairs."""
    profile, days = RunProfile(), SetClock(1e9)

    def measure(attempts: int, first: int) -> None:
        for attempt in range(first, first + attempts):
            profile.begin([f"spot-{attempt}-{rank}" for rank in range(2)])
            for second in range(100):
                days.now += 540.0
                for rank in range(2):
                    # The ranks never tell of the same collectives.
                    arrivals = [(2 * second + rank, 10, 10)]
                    profile.add(
                        Profile(rank, days.now, 540.0, {"optimizer": 9}, arrivals=arrivals),
                        days.now,
                    )
                    profile.add_machine(Machine(rank, days.now, 5.0))
            profile.add_lines(Lines(0, attempt, [f"f\0g\0{attempt}"], [[0]], [1]))

    # A full list is halved: 54 attempts fill it three times, so there are as many rows as before.
    assert growth(lambda: measure(80, 0), lambda: measure(54, 80)) < _SLACK
    assert all(len(rows) <= MAX_ROWS for rows in profile.rows.values())
    assert profile.steps(0) == 134 * 100 * 9
    assert set(profile._comparison._delays) == {"spot-133-0", "spot-133-1"}


def test_a_bar_keeps_no_more_metrics_than_it_shows() -> None:
    progress = Progress(width=lambda: 0, line_seconds=1e9)
    progress.reports([Report(0, {"loss": 1.0}, 0)])

    def epochs(first: int, count: int) -> None:
        for epoch in range(first, first + count):
            progress.reports([Report(0, {f"loss of epoch {epoch}": 0.5, "loss": 0.25}, epoch)])

    assert growth(lambda: epochs(0, 1000), lambda: epochs(1000, 10_000)) < _SLACK
    assert "loss=0.25" in progress._values()


def test_an_event_file_grows_by_as_much_each_time_that_the_reports_double(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the real limit, 2^20, a metric with 10^8 values has 4.5 million of them in the file."""
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(tensorboard, "_MANY", 256)  # protobuf writes 50,000 events a second
    sink = tensorboard.TensorBoardSink(tmp_path, log_profile=False)
    run = Run("test", 1)
    sink.begin(run)
    sink.attempt(1)
    sizes = []
    for power in range(8, 14):
        for step in range(0 if power == 8 else 1 << (power - 1), 1 << power):
            numbers = {"loss": 0.5, **({} if step % 100 else {"accuracy": 0.5})}
            sink.report(Report(0, numbers, step, time=1.0))
        sink.idle()
        (file,) = tmp_path.iterdir()
        sizes.append(file.stat().st_size)
    grown = [after - before for before, after in itertools.pairwise(sizes)]
    assert max(grown) < 1.5 * min(grown)
    sink.end(run)
    written = file.read_bytes()
    assert written.count(b"accuracy") == (1 << 13) // 100 + 1  # seldom reported: all are there
    assert written.count(b"loss") == 255 + 5 * 128 + 1
    assert f"{(1 << 13) - written.count(b'loss'):,} values are left out".encode() in written


class _Stuck(Sink):
    """Never returns, until it is told to."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.last = 0
        self.has_ended = False

    def began(self, rank: int) -> None:
        self.entered.set()
        self.go_on.wait()

    def attempt(self, number: int) -> None:
        self.last = number

    def end(self, run: Run) -> None:
        self.has_ended = True


def test_a_sink_that_never_returns_costs_no_more_memory_than_twice_its_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fan_out_, "_MAX_QUEUED_BYTES", 64 << 10)  # to fill it takes no memory
    sink, notices = _Stuck(), list[str]()
    fan_out = telling_threads(sink, notice=notices.append)
    fan_out.tell(Began(0))
    sink.entered.wait()
    for _ in range(500):
        fan_out.notice("x" * (1 << 10))
    assert len(fan_out._threads[0]._calls) == 128  # 128 KiB
    fan_out.tell(AttemptBegan(7))
    fan_out.end(Run("test", 1))
    sink.go_on.set()
    fan_out.close()
    assert (sink.last, sink.has_ended) == (7, True)  # these are never dropped
    assert notices == [
        f"the sink _Stuck was too slow: 0 reports and lines were dropped, and {500 - 128} other "
        "events. Report less often"
    ]


def _unsaved(archive: Archive, first: int, count: int) -> None:
    for step in range(first, first + count):
        archive.unsaved(f"the checkpoint of step {step}", "the disk is full: " + "x" * 200)


def test_checkpoints_that_cannot_be_written_are_counted(tmp_path: Path) -> None:
    with Archive("0a1b2c3d", Options(np=2, checkpoint_dir=tmp_path)) as archive:
        grown = growth(lambda: _unsaved(archive, 0, 1000), lambda: _unsaved(archive, 1000, 100_000))
        (warning,) = archive.warnings(finished=True)
    assert grown < _SLACK
    assert warning.startswith("101000 checkpoints of this run could not be written.")
    assert "The last error: the checkpoint of step 100999" in warning


def test_a_checkpoint_a_minute_for_a_hundred_days_leaves_those_that_are_kept(
    fast_path: Path,
) -> None:
    """2,000 checkpoints through the driver, in pieces; 144,000 take only longer."""
    config = CheckpointConfig(num_to_keep=2)
    options = Options(np=2, checkpoint_dir=fast_path, checkpoint_config=config)
    with Archive("0a1b2c3d", options) as archive:

        def save(first: int, count: int) -> None:
            for number in range(first, first + count):
                name = file_name(number, number, "0a1b2c3d", "bytes")
                archive.part(FilePart(0, name, 0, b"state"))
                archive.saved(Marker(name, number, number, "bytes", 5, "0" * 64, "0a1b2c3d"))

        save(1, 10)
        files, names = descriptors(), len(os.listdir(fast_path))
        grown = growth(lambda: save(11, 190), lambda: save(201, 1800))
        assert descriptors() <= files
        assert len(os.listdir(fast_path)) == names
        assert [each.step for each in archive.checkpoints] == [1999, 2000]
    assert grown < _SLACK


def test_a_stand_in_without_a_journal_keeps_the_latest_and_says_how_many_are_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keeper = Keeper(capacity=Capacity(few=100, reports=100, characters=1000))

    def day(first: int, count: int) -> None:
        for number in range(first, first + count):
            name = file_name(number, number, "0a1b2c3d", "bytes")
            keeper.take(Notice("no progress for 60 s"))
            keeper.take(FilePart(0, name, 0, b"state"))
            keeper.take(Saved(0, Marker(name, number, number, "bytes", 5, "0" * 64, "0a1b2c3d")))
            keeper.take(Unsaved(0, number, "the disk is full"))
            keeper.reports([Report(0, {"loss": 0.5}, number, left_out=9)])
            keeper.take(Profile(0, float(number), 1.0))
            keeper.take(Lines(0, number))

    def drained(first: int, count: int) -> None:
        for start in range(first, first + count, 100):
            day(start, 100)
            capsys.readouterr()

    assert growth(lambda: drained(1, 1000), lambda: drained(1001, 10_000)) < _SLACK
    kept = keeper.kept
    assert kept[0] == Notice(
        "32,900 notices and messages about checkpoints were too many to keep: the latest 100 are "
        "here"
    )
    reports = [each for each in kept if isinstance(each, Report)]
    pending = keeper._left_out
    assert sum(1 + each.left_out for each in reports) + pending == 10 * 11_000
    assert not keeper._in_parts


def test_counts_of_left_out_reports_that_a_rank_makes_up_fit_into_64_bits() -> None:
    for count in (-1, MOST_LEFT_OUT + 1):
        with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
            decode_batch(frame(msgspec.msgpack.encode(Report(0, {}, left_out=count))))
    keeper = Keeper(capacity=Capacity(reports=3))
    keeper.reports([Report(0, {}, step, left_out=MOST_LEFT_OUT) for step in range(20)])
    kept = [each for each in keeper.kept if isinstance(each, Report)]
    assert kept
    assert [each.left_out for each in kept] == [MOST_LEFT_OUT] * len(kept)
    metrics = Metrics(1)
    metrics.extend(kept, 1)
    assert MOST_LEFT_OUT <= metrics.ranks[0].dropped < 2**63


def test_a_journal_of_very_many_files_has_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_PERIOD_SECONDS", 0.001)  # between two looks for the next file
    plan = CheckpointPlan(str(tmp_path), "0a1b2c3d")
    writer = JournalWriter(plan, LocalFolder(tmp_path))
    read = threading.Event()
    before = descriptors()
    reader = JournalReader(plan, [LocalFolder(tmp_path)], read.set)
    shown, most = 0, 0
    for number in range(500):
        read.clear()
        writer.put([Notice(str(number))])
        assert read.wait(60)
        shown += len(reader.take())
        most = max(most, len(os.listdir(tmp_path)))
    writer.close()
    shown += len(reader.finish(Record([], [], written=writer.written)))
    assert (shown, writer.written) == (500, 500)
    assert most <= 2
    assert descriptors() <= before
    assert not os.listdir(tmp_path)


def test_a_driver_that_shows_nothing_does_not_gather_the_journal(tmp_path: Path) -> None:
    plan, folder = CheckpointPlan(str(tmp_path), "0a1b2c3d"), LocalFolder(tmp_path)
    for number in range(1, 101):
        folder.write(f"{checkpoint.LIVE}0a1b2c3d-1-{number}", msgspec.msgpack.encode([Notice("x")]))
    some = threading.Semaphore(0)
    reader = JournalReader(plan, [folder], some.release)
    for _ in range(8):
        assert some.acquire(timeout=60)
    assert not some.acquire(timeout=0.2)  # it reads no more
    assert len(os.listdir(tmp_path)) == 92
    assert len(reader.take()) == 8
    assert some.acquire(timeout=60)  # and goes on
    assert len(reader.finish(Record([], [], written=100))) == 92


def test_a_feed_or_another_seed_for_each_epoch_is_forgotten_again() -> None:
    with as_rank(0, 1) as rank:
        epochs = Epochs("train")

        def train(first: int, count: int) -> None:
            for epoch in range(first, first + count):
                key = FeedKey("batch_size=32", epoch, (0, 1))
                made = epochs.make(key)
                epochs.open(made, epoch, 0, resumed=True)
                epochs.begin(key, epoch)

        assert growth(lambda: train(0, 20_000), lambda: train(20_000, 40_000)) < _SLACK
        assert epochs.make(FeedKey("batch_size=32", 59_999, (0, 1))).epoch == 60_000
        assert len(rank.notes) <= 1001
        assert notes.count("feed") == 60_000


def test_notes_of_ranks_that_go_on_for_ever_fill_the_comparison_once() -> None:
    shown = list[str]()
    check = NoteCheck(2, lambda rank: "host", shown.append, clock=lambda: 0.0)

    def note(first: int, count: int) -> None:
        for number in range(first, first + count):
            for rank in range(2):
                check.take(Note(rank, "feed", f"train\n{number}", "same", ""))
                check.take(Note(rank, "mistake", f"kind {number}", "wrong", ""))

    assert growth(lambda: note(0, 2000), lambda: note(2000, 20_000)) < _SLACK
    assert len(shown) == 1000


def test_a_rank_that_makes_up_names_of_metrics_holds_back_a_limited_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reporter_, "_MOST_HELD", 100)  # each report looks at all of them
    read, write = os.pipe()
    reporter = Reporter(0, write, True)

    def report(first: int, count: int) -> None:
        for step in range(first, first + count):
            reporter.report({f"loss of step {step}": 1.0}, step, None)

    try:
        while not reporter._held:  # nobody reads: the pipe fills
            reporter.report({"loss": 1.0}, 0, None)
        report(0, 200)
        names, left_out = len(reporter._held), reporter._left_out
        report(200, 2000)
        assert len(reporter._held) == names
        assert reporter._left_out == left_out + 2000
        assert "loss" in reporter._held
    finally:
        os.close(read)
        os.close(write)


def test_what_processes_of_a_dataloader_write_is_freed_once_it_is_read() -> None:
    watch = LoaderWatch()
    watch.begin()
    calls = [[(f"file{number}.py", "load", number) for number in range(20)]]

    def write(first: int, count: int) -> None:
        for number in range(first, first + count):
            stack = [*calls[0], ("main.py", f"f{number}", number)]
            data = frame(msgspec.msgpack.encode((1000, [[stack, 1000]])))
            os.write(watch._file, data * 10)
        watch.read()

    try:
        for first in range(0, 2000, 100):
            write(first, 100)
        pages = os.fstat(watch._file).st_blocks * 512
        stacks = len(watch.stacks)
        for first in range(2000, 6000, 100):
            write(first, 100)
        assert os.fstat(watch._file).st_size > 10 << 20
        assert os.fstat(watch._file).st_blocks * 512 <= max(pages, 64 << 10)
        assert len(watch.stacks) == stacks == 2000
        assert watch.total == 6000 * 10 * 1000
    finally:
        os.close(watch._file)


def test_messages_that_wait_for_the_driver_again_and_again_leave_no_file_behind() -> None:
    before, spool = descriptors(), Spool(memory=10_000)
    for _ in range(300):
        for _ in range(30):
            spool.put(b"x" * 1000)
        while len(spool):
            spool.get()
    file = spool._file
    assert file is not None
    assert os.fstat(file.fileno()).st_size == 0
    spool.close()
    assert descriptors() <= before


def test_stalls_with_other_names_in_each_step_are_forgotten_with_their_time() -> None:
    days = SetClock(1e9)
    watch = HangWatch(None, 60.0)
    for rank in range(4):
        watch.started(rank)

    def hang(count: int) -> int:
        """Each day some tensors stall for a while; returns how many warnings there were."""
        warned = 0
        for number in range(count):
            for second in range(0, 200, 20):
                watch.stalled([Stall(f"gradient {number}.{second}", (1,))], days.now)
                for rank in range(4):
                    watch.alive(rank, Alive(idle=30.0, quiet=100.0), days.now)
                    watch.shown(rank, "stack")
                warned += watch.step(days.now) == "warn"
                days.now += 20
            days.now += 86400
            watch.step(days.now)
        return warned

    assert growth(lambda: hang(100), lambda: hang(1000)) < _SLACK
    assert hang(5) == 5  # each hang is said once


def test_a_pool_remembers_only_the_members_that_it_has() -> None:
    days = SetClock(1e9)
    members = Members(ScalingPolicy(1, 8), days)

    def preempt(first: int, count: int) -> None:
        for began in range(first, first + count):
            days.now += 60
            members.join(PoolMember(began % 8, began))
            members.start(began, 1)
            members.change()
            members.leave(began % 8, "preempted")
            members.finish(began % 8, began)
            members.gone()

    assert growth(lambda: preempt(1, 1000), lambda: preempt(1001, 50_000)) < _SLACK
    assert members.seats == []


def test_the_signs_to_leave_of_earlier_attempts_are_removed(tmp_path: Path) -> None:
    (tmp_path / "state-0").write_bytes(b"a commit")
    for attempt in range(1, 1001):
        remove_leave_files(str(tmp_path), attempt)
        Path(leave_file(str(tmp_path), attempt)).touch()
        assert len(os.listdir(tmp_path)) <= 2 + 1
    assert sorted(os.listdir(tmp_path)) == ["leave-1000", "state-0"]


def test_what_killed_ranks_leave_on_a_host_is_removed(tmp_path: Path) -> None:
    with RunFolder("0a1b2c3d", tmp_path) as run:
        (run.path / "rows-1").write_bytes(b"packed")  # for the next attempt
        for attempt in range(1, 201):
            for rank in range(2):
                with rank_folder(run.path, rank, attempt) as folder:
                    (folder / "checkpoint-copy").write_bytes(b"x" * 1000)
        # A task that is killed itself removes nothing, and the next one does.
        killed = rank_folder(run.path, 1, 201)
        (killed.__enter__() / "checkpoint-copy").write_bytes(b"x")
        with rank_folder(run.path, 0, 202) as folder:
            names = sorted(os.listdir(run.path))
            assert names == sorted({"rows-1", folder.name, "in-use"})
        # Another rank of the same attempt uses its folder, and so does one of a later attempt.
        with (
            rank_folder(run.path, 0, 301) as later,
            rank_folder(run.path, 0, 300) as first,
            rank_folder(run.path, 1, 300),
        ):
            assert later.exists()
            assert first.exists()
