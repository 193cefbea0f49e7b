"""Progress that is printed as lines, because there is no terminal for a bar."""

from __future__ import annotations

import pytest

from horovod_runner.messages import Report
from horovod_runner.sinks import progress
from horovod_runner.sinks.progress import Progress


def test_rank_0_alone_moves_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_has_columns", lambda: False)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0)
    shown = Progress()
    for rank, step in ((1, 900), (0, 7), (2, 800)):
        shown.reports([Report(rank, {"loss": rank}, step=step)])
    assert capsys.readouterr().err == "HorovodRunner: step 7, loss=0\n"
