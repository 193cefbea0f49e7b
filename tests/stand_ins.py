"""What tests put in place of a run: a rank that keeps what it sends, a clock, a kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_runner.wire.job_file import NO_CHECKPOINTS
from horovod_runner.worker import context


class Rank(SimpleNamespace):
    """A rank as `main` and the patches of frameworks find it.

    Attributes:
        sent: the messages to the driver.
        reported: the arguments of each report.
        checkpoints_saved: the arguments of each saved checkpoint.
    """

    def __init__(self, rank: int, size: int, **attributes: Any) -> None:
        self.sent: list[Any] = []
        self.reported: list[tuple[Any, ...]] = []
        self.checkpoints_saved: list[tuple[Any, ...]] = []
        defaults = {
            "local_rank": rank,
            "notes": Counter(),
            "checkpoints": NO_CHECKPOINTS,
            "commits": "",
            "host_commits": None,
            "saved": 0,
            "weight_check": False,
            "pipe": SimpleNamespace(send=self.sent.append),
            "reporter": SimpleNamespace(report=lambda *given: self.reported.append(given)),
            "saver": SimpleNamespace(save=lambda *given: self.checkpoints_saved.append(given)),
        }
        super().__init__(rank=rank, size=size, **{**defaults, **attributes})


class StrictError(Exception):
    """One that refuses attributes, as a frozen dataclass."""

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(name)


class SetClock:
    """A clock that stands still until the test sets it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class LaunchedError(Exception):
    """A run was to begin, where `refuse_launches` keeps it from it."""


def refuse_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let HorovodRunner.run raise LaunchedError: the mistake has to be found before the launch."""

    def run(*args: Any, **options: Any) -> Any:
        raise LaunchedError

    monkeypatch.setattr("horovod_runner.HorovodRunner.run", run)


@contextmanager
def as_rank(rank: int, size: int, **attributes: Any) -> Iterator[Rank]:
    """Let this process be a rank."""
    made: Any = Rank(rank, size, **attributes)
    before = context.current()
    context.enter(made)
    try:
        yield made
    finally:
        context.enter(before)


#: A module IPython whose shell is a notebook's kernel, for ``sys.modules``.
KERNEL: Any = SimpleNamespace(get_ipython=lambda: SimpleNamespace(config={"IPKernelApp": {}}))
#: One of a terminal.
SHELL: Any = SimpleNamespace(get_ipython=lambda: None)
