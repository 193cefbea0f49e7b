"""The log that a run keeps."""

from __future__ import annotations

import pytest

from horovod_runner.errors import RankFailedError
from horovod_runner.results import recorder
from horovod_runner.results.recorder import Recorder
from horovod_runner.results.run import Run


def test_only_the_last_lines_of_a_long_output_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_KEPT_CHARACTERS", 100)
    run = Run("test", 1)
    sink = Recorder(run)
    for number in range(25):
        sink.output(0, "stdout", f"{number:10}")
    assert [int(line.text) for line in run.logs] == list(range(15, 25))
    assert run.logs_cut == 150


def test_the_error_of_an_attempt_is_kept_with_what_caused_it() -> None:
    run = Run("test", 1)
    sink = Recorder(run)
    sink.attempt(1)
    error = ValueError("too few\nin all rows")
    error.__cause__ = RankFailedError("rank 1 failed\n\nTraceback on rank 1:\n  | line 3", rank=1)
    sink.failed(error)
    assert run.attempts[0].error == "ValueError: too few"
    assert run.attempts[0].details == (
        "ValueError: too few\nin all rows\n\nCaused by RankFailedError: rank 1 failed\n\n"
        "Traceback on rank 1:\n  | line 3"
    )


def test_of_a_long_error_the_beginning_and_the_end_are_kept() -> None:
    run = Run("test", 1)
    sink = Recorder(run)
    sink.attempt(1)
    sink.failed(ValueError(f"first {'x' * 200_000} last"))
    details = run.attempts[0].details
    assert details.startswith("ValueError: first x")
    assert details.endswith("x last")
    assert len(details) < 66_000
    assert "134,487 characters are left out" in details
