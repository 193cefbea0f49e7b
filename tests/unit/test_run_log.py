"""The log of a run: what is read from it, however it was written."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest

from horovod_runner.common.slots import RankInfo
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.results.recorder import failed, plain_params
from horovod_runner.results.run import Run
from horovod_runner.results.run_log import LogReader, RunLog, RunState, load, save, summary
from horovod_runner.sinks.fan_out import FanOut
from horovod_runner.wire import events
from horovod_runner.wire.events import Event, Notice, Output, Report
from horovod_runner.wire.framing import frame
from horovod_runner.wire.marker import Marker
from horovod_runner.wire.measurements import Lines, Machine, Profile

RANKS = [RankInfo(rank, "abc"[rank], 10 + rank, (), None) for rank in range(2)]
SAVED = Marker("checkpoint-000001-step-3-1a2b.bin", 1, 3, "bytes", 5, "00", "1a2b", 1, 9.0)
HAPPENED: list[Sequence[Event]] = [
    [events.AttemptBegan(1)],
    [events.ControllerChosen("mpi")],
    [events.RanksPlaced(RANKS)],
    [events.Began(0)],
    [Output(0, "stdout", "printed\n")],
    [events.Log(1, "logged")],
    [Report(0, {"loss": 2.0}, step=1), Report(0, {"loss": 1.0}, step=2, epoch=0)],
    [Profile(0, 10.0, 1.0, {"optimizer": 10}, {"data": 0.5})],
    [Machine(0, 10.0, 5.0, cores=1.5)],
    [Lines(0, 10, ["a.py\0f\x001"], [[0]], [10])],
    [events.CheckpointKept("/folder", SAVED)],
    [events.TraceWritten(events.TraceFile(0, "torch", "/trace"))],
    [failed(ValueError("no good"))],
    [events.AttemptBegan(2, resumed_from=3)],
    [Report(0, {"loss": 0.5}, step=4)],
    [events.AttemptChanged("from 2 to 3 ranks")],
    [Notice("noted")],
    [events.RunEnded("finished", ["a warning"], "3")],
]


def shown(run: Run) -> list[object]:
    """All that is known of a run now."""
    names = ("status", "attempts", "ranks", "controller", "timings", "logs", "traces", "warnings")
    known = [getattr(run, name) for name in (*names, "result_text")]
    known += [run.metrics.to_pylist(), [each.position for each in run._metrics.ranks.values()]]
    known.append(run.profile.saved())
    return deepcopy([*known, [(each.folder, each.marker) for each in run.checkpoints]])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "1a2b.run"


@pytest.mark.parametrize("options", [{"flush_seconds": 1.0}, {"least_appended": -1}])
def test_what_is_read_is_what_was_known_at_each_moment(
    path: Path, options: dict[str, float]
) -> None:
    run = Run("1a2b", 2)
    seconds = itertools.count(100.0).__next__  # a second passes with each look
    log = RunLog(run, path, clock=seconds, **options)  # type: ignore[arg-type]
    log.flush()
    reader = LogReader(path)
    for some in HAPPENED:
        log.add(some)
        log.flush()
        reader.read()
        assert shown(reader.run) == shown(run)
        assert shown(load(path)) == shown(run)


def test_a_log_that_was_closed_says_its_end_at_its_begin(path: Path) -> None:
    run = Run("1a2b", 2)
    log = RunLog(run, path)
    for some in HAPPENED:
        log.add(some)
    log.close()
    log.add([Notice("too late")])
    log.flush()
    assert shown(load(path))[0] == "finished"
    assert "too late" not in [line.text for line in load(path).logs]
    recorded, state = summary(path)
    assert (state.status, state.result_text) == ("finished", "3")
    assert recorded > 1e9
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_is_read_wherever_its_writer_was_killed(path: Path) -> None:
    log = RunLog(Run("1a2b", 2), path)
    for some in HAPPENED:
        log.add(some)
        log.flush()
    data = path.read_bytes()
    save(Run("1a2b", 2), path)
    begin = path.stat().st_size
    known = 0
    for end in range(begin, len(data) + 1):
        path.write_bytes(data[:end])
        assert len(load(path).logs) >= known
        known = len(load(path).logs)
    assert known == 3


def test_events_of_a_later_version_are_left_out(path: Path) -> None:
    class Later(Event, frozen=True, tag="SomethingNew"):
        text: str

    class Output(Event, frozen=True, tag="Output"):  # with a field more
        rank: int
        stream: str
        text: str
        color: str

    save(Run("1a2b", 1), path)
    with path.open("ab") as file:
        for event in (Later("?"), Output(0, "stdout", "known\n", "red"), Notice("noted")):
            file.write(frame(msgspec.msgpack.encode((5.0, event))))
    assert [line.text for line in load(path).logs] == ["known\n", "noted"]


@pytest.mark.parametrize(
    "content", [b"", b"horovod_runner run 1\n", b"\x80", b"horovod_runner run 2\n"]
)
def test_other_files_are_not_taken_for_logs(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(HorovodRunnerError, match=r"1a2b\.run is not the record of a run"):
        load(path)
    with pytest.raises(HorovodRunnerError, match="is not the record"):
        summary(path)


def test_a_log_stays_small_however_much_happens(path: Path) -> None:
    run = Run("1a2b", 1)
    log = RunLog(run, path, least_appended=10_000)
    line = "x" * 1000
    sizes = []
    for number in range(2000):
        log.add([Output(0, "stdout", line), Report(0, {"loss": 1.0}, number)])
        if number == 1000:
            run._lines.clear()  # as if the limit had been reached
        log.flush()
        sizes.append(path.stat().st_size)
    assert max(sizes) < 4 * 2000 * 1100
    assert load(path).latest_metrics == {"loss": 1.0}


def test_a_log_that_cannot_be_written_is_written_as_soon_as_it_can(tmp_path: Path) -> None:
    path = tmp_path / "records" / "1a2b.run"
    path.parent.write_bytes(b"a file")
    run = Run("1a2b", 1)
    log = RunLog(run, path)
    log.add([Notice("first")])
    log.flush()
    path.parent.unlink()
    log.add([Notice("second")])
    log.flush()
    assert [line.text for line in load(path).logs] == ["first", "second"]
    assert os.listdir(path.parent) == ["1a2b.run"]


def test_events_are_written_after_some_seconds_or_when_they_are_many(path: Path) -> None:
    run, now = Run("1a2b", 1), 100.0
    log = RunLog(run, path, clock=lambda: now, flush_seconds=5.0)
    log.add([Notice("first")])
    log.idle()
    assert not path.exists()
    now += 5
    log.idle()
    assert path.exists()
    log.add([Output(0, "stdout", "x")] * 20_000)
    assert len(load(path).logs) > 10_000


def test_a_password_is_not_written(path: Path) -> None:
    log = RunLog(Run("1a2b", 1), path)
    log.flush()
    log.add([events.CheckpointKept("s3://me:my-password@bucket", SAVED)])
    log.flush()
    assert b"my-password" not in path.read_bytes()


def test_a_run_whose_values_the_file_cannot_hold_has_a_record(path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.csv")
    run = Run("1a2b", 1, plain_params(1, {"seed": 2**70, "low": -5, "file": name}))
    log = RunLog(run, path)
    told = FanOut(log, [], [], print)
    told.tell(events.AttemptBegan(1))
    told.tell(failed(OSError(f"no {name}")))
    told.notice(f"no {name}")
    log.flush()
    shown = r"caf\udce9.csv"
    told.tell(events.CheckpointKept(f"/{name}", SAVED))
    for write in (log.flush, log.close):
        write()
        assert [each.folder for each in load(path).checkpoints] == [f"/{shown}"]
    params = {"np": 1, "seed": "0x400000000000000000", "low": -5, "file": shown}
    for found in (run, load(path)):
        assert found.params == params
        (attempt,) = found.attempts
        assert (attempt.error, attempt.details) == (f"OSError: no {shown}",) * 2
        assert [line.text for line in found.logs] == [f"no {shown}"]


def test_all_attributes_of_a_run_are_in_its_file() -> None:
    # The profile has an event for itself, and "recorded" is when the file was written.
    apart = {"profile", "recorded"}
    attributes = {each.name for each in fields(Run) if not each.name.startswith("_")}
    assert attributes - apart == set(RunState.__struct_fields__) - {"checkpoints"}
