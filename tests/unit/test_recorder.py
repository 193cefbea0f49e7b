"""What a run keeps of its events."""

from __future__ import annotations

from horovod_runner.errors import RankFailedError
from horovod_runner.results.recorder import Recorder, failed
from horovod_runner.results.run import Run
from horovod_runner.wire.events import AttemptBegan, Output, Report, TraceFile, TraceWritten


def test_only_the_last_lines_of_a_long_output_are_kept() -> None:
    run = Run("test", 1)
    recorder = Recorder(run, most_characters=100)
    for number in range(25):
        recorder.add([Output(0, "stdout", f"{number:10}")], 0.0)
    assert [int(line.text) for line in run.logs] == list(range(15, 25))
    assert run.logs_cut == 150


def test_the_error_of_an_attempt_is_kept_with_what_caused_it() -> None:
    error = ValueError("too few\nin all rows")
    error.__cause__ = RankFailedError("rank 1 failed\n\nTraceback on rank 1:\n  | line 3", rank=1)
    event = failed(error)
    assert event.error == "ValueError: too few"
    assert event.details == (
        "ValueError: too few\nin all rows\n\nCaused by RankFailedError: rank 1 failed\n\n"
        "Traceback on rank 1:\n  | line 3"
    )


def test_of_a_long_error_the_beginning_and_the_end_are_kept() -> None:
    details = failed(ValueError(f"first {'x' * 200_000} last")).details
    assert details.startswith("ValueError: first x")
    assert details.endswith("x last")
    assert len(details) < 66_000
    assert "134,487 characters are left out" in details


def test_the_pause_of_an_attempt_ends_with_its_first_step() -> None:
    run = Run("test", 1)
    recorder = Recorder(run)
    # When each attempt reports; the second one fails before its first step.
    for number, steps in enumerate([(10, 11, 12), (), (30, 31, 33), (40, 41)], 1):
        recorder.add([AttemptBegan(number)], 0.0)
        for now in steps:
            recorder.add([Report(0, {"loss": 0.5})], now)
    assert [attempt.pause for attempt in run.attempts] == [None, None, 18, 7]


def test_a_trace_that_is_told_twice_is_kept_once() -> None:
    run = Run("test", 1)
    for rank, name in [(0, "first"), (1, "other"), (0, "first")]:
        Recorder(run).add([TraceWritten(TraceFile(rank, "torch", f"/{name}"))], 0.0)
    assert [trace.path for trace in run.traces] == ["/other", "/first"]
