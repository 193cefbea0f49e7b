"""What a run has brought back: ``runner.last_run``, readable while it goes on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from horovod_runner.checkpoint import Checkpoint
from horovod_runner.metrics import Metrics
from horovod_runner.topology import RankInfo

if TYPE_CHECKING:
    import matplotlib.figure
    import pyarrow as pa

    from horovod_runner.archive import Archive
    from horovod_runner.messages import Controller

Status = Literal["running", "finished", "failed", "cancelled"]


class Line(NamedTuple):
    """Something that was shown.

    Attributes:
        time: when it arrived, in seconds since the epoch.
        rank: whose it is; -1 for what the runner itself said.
        stream: "log" for ``log_to_driver``, "notice" for the runner.
        text: a piece of output, or a whole text.
    """

    time: float
    rank: int
    stream: Literal["stdout", "stderr", "log", "notice"]
    text: str


@dataclass
class Attempt:
    """One launch of all ranks.

    Attributes:
        number: from 1 on.
        started: seconds since the epoch.
        ended: seconds since the epoch; None while it runs.
        resumed_from: the step of the latest checkpoint when it began; None for a start.
        error: why it failed, in one line; empty if it did not.
    """

    number: int
    started: float
    ended: float | None = None
    resumed_from: int | None = None
    error: str = ""


@dataclass
class Timings:
    """When what happened, in seconds since the epoch; None for what has not (yet).

    Attributes:
        queued: ``run`` was called.
        launched: the ranks of the first attempt were.
        first_line: ``main`` was called on the first rank.
        first_report: the first report arrived.
        end: all ranks were gone.
    """

    queued: float
    launched: float | None = None
    first_line: float | None = None
    first_report: float | None = None
    end: float | None = None


@dataclass
class Run:
    """One run.

    Attributes:
        run_id: its id, as in the names of its checkpoints and in Spark's UI.
        np: as given to HorovodRunner.
        params: ``np``, and those arguments of ``main`` that are numbers, texts or None.
        status: how it stands.
        attempts: the launches, the first one first.
        ranks: of the last attempt, once all have started.
        controller: what Horovod negotiates and reduces on CPUs with; None before the ranks are
            placed.
        timings: when what happened.
        logs_cut: how many characters of :attr:`logs` were too many to keep.
    """

    run_id: str
    np: int
    params: Mapping[str, Any] = field(default_factory=dict)
    status: Status = "running"
    attempts: list[Attempt] = field(default_factory=list)
    ranks: list[RankInfo] = field(default_factory=list)
    controller: Controller | None = None
    timings: Timings = field(default_factory=lambda: Timings(time.time()))
    logs_cut: int = 0
    _metrics: Metrics = field(default_factory=Metrics, repr=False)
    _lines: deque[Line] = field(default_factory=deque, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _archive: Archive | None = field(default=None, repr=False)

    @property
    def metrics(self) -> pa.Table:
        """All reports as a table; takes pyarrow and NumPy.

        A row for each report, with columns rank, attempt, step, epoch, time and one for each
        metric, null where a report had not that one.
        """
        return self._metrics.table()

    @property
    def latest_metrics(self) -> dict[str, float | int]:
        """The latest value of each of rank 0's metrics."""
        return dict(self._metrics.latest.get(0, {}))

    @property
    def thinned(self) -> dict[int, int]:
        """By rank, how many reports have no row in :attr:`metrics`, because they were too many."""
        return {rank: count for rank, count in self._metrics.left_out.items() if count}

    @property
    def logs(self) -> list[Line]:
        """What was shown: of very much, the last 16 million characters."""
        with self._lock:
            return list(self._lines)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints that are kept, the oldest first."""
        return [] if self._archive is None else self._archive.checkpoints

    @property
    def best_checkpoint(self) -> Checkpoint | None:
        """The best one by the metric ``best``; without that, the latest."""
        return None if self._archive is None else self._archive.best

    @property
    def latest(self) -> Checkpoint | None:
        """The latest one."""
        found = self.checkpoints
        return found[-1] if found else None

    def plot(self, *names: str, rank: int = 0) -> matplotlib.figure.Figure:
        """Draw metrics by step, restarts marked; takes matplotlib.

        Args:
            names: the metrics; if none is named, the first 20 that there are.
            rank: whose.

        Raises:
            ValueError: there is no such metric.
        """
        from horovod_runner.plot import plot

        resumed = {attempt.number: attempt.resumed_from for attempt in self.attempts}
        return plot(self._metrics.series(rank), names, f"np={self.np}, {self.status}", resumed)


def plain_params(np: int, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What of a run's arguments can be told in a word."""
    plain = (bool, int, float, str, type(None))
    return {"np": np, **{name: value for name, value in kwargs.items() if type(value) in plain}}
