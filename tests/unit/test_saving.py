"""Saving checkpoints on rank 0, and loading them on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_runner.checkpoints import checkpoint
from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.checkpoints.saver import Saver
from horovod_runner.host.folders.local import LocalFolder
from horovod_runner.wire.job_file import CheckpointPlan
from tests.savers import Together, saving_to


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    """A folder that the rank and the driver see."""
    return LocalFolder(tmp_path)


@pytest.fixture
def saver(folder: LocalFolder) -> Iterator[Saver]:
    with saving_to(folder) as opened:
        yield opened


class Late(threading.Thread):
    """A thread that starts its work only when another one joins it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._awaited = threading.Event()

    def run(self) -> None:
        if self._awaited.wait(30):
            super().run()

    def join(self, timeout: float | None = None) -> None:
        self._awaited.set()
        super().join(timeout)


def test_a_checkpoint_written_late_has_the_state_at_the_time_of_the_call(
    saver: Saver, folder: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "Thread", Late)
    for step in range(3):
        saver.save({"x": np.full(5, step)}, step, None)
    saver.close()
    saved = [Checkpoint(folder, marker) for marker in checkpoint.find_complete(folder)]
    assert [each.step for each in saved] == [2, 1, 0]
    assert all((each.load()["x"] == each.step).all() for each in saved)


@pytest.mark.parametrize(
    ("step", "metrics", "refused"),
    [
        (-1, None, pytest.raises(ValueError, match=r"^step .* -1$")),
        (1, {0: 1.0}, pytest.raises(TypeError, match=r"^a metric's name .*int \(0\)")),
        (1, {"loss": "low"}, pytest.raises(TypeError, match=r"^the metric 'loss' .*str\.")),
        (1, 0.5, pytest.raises(TypeError, match=r"^metrics .*float")),
    ],
)
def test_a_step_or_metrics_that_a_marker_cannot_hold_are_refused(
    saver: Saver, folder: LocalFolder, step: int, metrics: Any, refused: Any
) -> None:
    with refused:
        saver.save(b"state", step, metrics)
    saver.save(b"state", 0, None)
    saver.close()
    assert [marker.step for marker in checkpoint.find_complete(folder)] == [0]


def test_if_the_latest_is_damaged_all_ranks_load_the_earlier_checkpoint(
    saver: Saver, folder: LocalFolder
) -> None:
    saver.save(b"earlier", 10, {"loss": 1.0})
    saver.save(b"latest", 20, {"loss": 0.5})
    saver.close()
    latest, earlier = checkpoint.find_complete(folder)
    (folder.path / latest.name).write_bytes(b"tsetal")
    plan = CheckpointPlan(folder.url, "run2", resume=(latest, earlier))
    together = Together(2)
    loaded = together.load(plan)
    assert [(each.step, each.state) for each in loaded if each] == [(10, b"earlier")] * 2
    assert [dict(each.metrics) for each in loaded if each] == [{"loss": 1.0}] * 2
    assert together.sent == [2, 0]  # which one, and its bytes
    (warning,) = together.warned
    assert "step 20) is damaged" in warning
