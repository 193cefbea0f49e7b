"""The log that a run keeps."""

from __future__ import annotations

import pytest

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
