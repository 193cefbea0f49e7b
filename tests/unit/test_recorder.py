"""What a run's result keeps."""

from __future__ import annotations

import pytest

from horovod_runner import recorder
from horovod_runner.recorder import Recorder
from horovod_runner.result import Run


def test_of_very_much_output_the_last_lines_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_KEPT_CHARACTERS", 100)
    run = Run("test", 1)
    kept = Recorder(run)
    for number in range(25):
        kept.output(0, "stdout", f"{number:10}")
    assert [int(line.text) for line in run.logs] == list(range(15, 25))
    assert run.logs_cut == 150
