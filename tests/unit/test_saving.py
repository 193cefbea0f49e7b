"""Rank 0's checkpoints on their way to disk, and on their way from there to all ranks."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_runner import checkpoint, saving
from horovod_runner.checkpoint import Checkpoint
from horovod_runner.handover import CheckpointPlan
from horovod_runner.saving import Saver
from horovod_runner.stores import LocalFolder


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    """One that the rank and the driver see."""
    found = LocalFolder(tmp_path)
    checkpoint.show(found, "run1")
    return found


@pytest.fixture
def saver(folder: LocalFolder) -> Iterator[Saver]:
    read, write = os.pipe()
    opened = Saver(CheckpointPlan(folder.url, "run1"), write)
    yield opened
    opened.close()
    os.close(read)
    os.close(write)


class Late(threading.Thread):
    """A thread that comes to work as late as it may: once somebody waits for it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._awaited = threading.Event()

    def run(self) -> None:
        if self._awaited.wait(30):
            super().run()

    def join(self, timeout: float | None = None) -> None:
        self._awaited.set()
        super().join(timeout)


def test_each_checkpoint_is_what_was_given_however_late_it_is_written(
    saver: Saver, folder: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "Thread", Late)
    for step in range(3):
        saver.save({"x": np.full(5, step)}, step, None)
    saver.close()
    found = [Checkpoint(folder, marker) for marker in checkpoint.complete(folder)]
    assert [each.step for each in found] == [2, 1, 0]
    assert all((each.load()["x"] == each.step).all() for each in found)


@pytest.mark.parametrize("step", [-1, -100])
def test_a_step_below_0_is_refused(saver: Saver, folder: LocalFolder, step: int) -> None:
    with pytest.raises(ValueError, match=f"counts what has been done and cannot be {step}"):
        saver.save(b"state", step, None)
    saver.save(b"state", 0, None)
    saver.close()
    assert [marker.step for marker in checkpoint.complete(folder)] == [0]


def test_where_the_latest_is_damaged_all_ranks_go_on_from_the_one_before(
    saver: Saver, folder: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver.save(b"former", 10, {"loss": 1.0})
    saver.save(b"latest", 20, {"loss": 0.5})
    saver.close()
    latest, former = checkpoint.complete(folder)
    (folder.path / latest.name).write_bytes(b"tsetal")
    plan = CheckpointPlan(folder.url, "run2", resume=(latest, former))
    sent, warned = deque[bytes](), list[str]()

    def broadcast(data: bytes, count: int) -> bytes:  # rank 0 sends all before rank 1 asks
        if data:
            sent.append(data)
        given = data or sent.popleft()
        assert len(given) == count
        return given

    monkeypatch.setattr(saving, "_broadcast", lambda: broadcast)
    loaded = [saving.load(plan, rank, 2, warned.append) for rank in range(2)]
    assert [(each.step, each.state) for each in loaded if each] == [(10, b"former")] * 2
    assert [dict(each.metrics) for each in loaded if each] == [{"loss": 1.0}] * 2
    assert not sent
    (warning,) = warned
    assert "step 20) is damaged" in warning
