"""The record of a run: ``runner.last_run``, readable while the run goes on."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from horovod_runner.checkpoints.checkpoint import Checkpoint
from horovod_runner.common.clocks import SteadyClock
from horovod_runner.common.slots import Controller, RankInfo
from horovod_runner.errors import CheckpointError, DataError
from horovod_runner.results.metrics_table import Metrics
from horovod_runner.results.slowness.diagnosis import Diagnosis, diagnose
from horovod_runner.results.slowness.profile import RunProfile
from horovod_runner.wire.events import Status, TraceFile

if TYPE_CHECKING:
    from collections.abc import Callable

    import matplotlib.figure
    import pyarrow as pa
    from mlflow.models.model import ModelInfo

    from horovod_runner.checkpoints.archive import Archive
    from horovod_runner.data.feed.options import Columns, Dtypes, PadRagged, Transform
    from horovod_runner.data.pack.images import Image
    from horovod_runner.data.scoring.outputs import OutputSpec
    from horovod_runner.data.sources import Source
_EXAMPLE_ROWS: Final = 5  # that are logged with a model
#: The details of an attempt whose error a record has in one line only.
DETAILS_LEFT_OUT: Final = (
    "The details are left out to save memory: a record keeps those of the first and of the latest "
    "attempts."
)


class Line(NamedTuple):
    """A text that the run printed.

    Attributes:
        time: when it arrived at the driver, in seconds since the epoch.
        rank: the rank that printed it; -1 for the runner's notices.
        stream: "stdout", "stderr", "log" for ``log_to_driver``, or "notice" for the runner.
        text: a piece of output, or a whole message.
    """

    time: float
    rank: int
    stream: Literal["stdout", "stderr", "log", "notice"]
    text: str


@dataclass
class Attempt:
    """One launch of all ranks, or the failure of a run before its first one.

    Attributes:
        number: 1 for the first launch, plus 1 for each restart.
        started: in seconds since the epoch.
        ended: in seconds since the epoch; None while the attempt runs.
        resumed_from: the step of the latest checkpoint when the attempt began; None if there was no
            checkpoint.
        error: the error in one line; empty if the attempt did not fail.
        details: the whole error with the traceback of the rank, at most 64 KB; empty if the attempt
            did not fail. A record keeps them of the first 16 and of the latest 16 attempts; of
            others :data:`DETAILS_LEFT_OUT`.
        size: how many ranks it had.
        hosts: the name of each rank's host; empty until all ranks have started, and where details
            are left out.
        change: why it ended in favour of another number of ranks (a range of np); empty if it did
            not.
        pause: the seconds without steps before it: from the last sign of a step of the attempt
            before to the first one of this. None for the first attempt, and until there is one.
    """

    number: int
    started: float
    ended: float | None = None
    resumed_from: int | None = None
    error: str = ""
    details: str = field(default="", repr=False)
    size: int = 0
    hosts: list[str] = field(default_factory=list, repr=False)
    change: str = ""
    pause: float | None = None


@dataclass
class Timings:
    """The times of a run's events, in seconds since the epoch; None for an event to come.

    Attributes:
        queued: ``run`` was called.
        launched: the launch of the first attempt began.
        first_line: the first rank called ``main``.
        first_report: the first report arrived at the driver.
        end: all ranks had ended.
        last_step: the last sign of a step arrived.
    """

    queued: float
    launched: float | None = None
    first_line: float | None = None
    first_report: float | None = None
    end: float | None = None
    last_step: float | None = None


@dataclass
class Run:
    """The record of one run.

    Attributes:
        run_id: the id in the names of the run's checkpoints and in Spark's UI.
        np: the argument ``np`` of HorovodRunner.
        params: ``np``, and the arguments of ``main`` that are numbers, strings or None. What looks
            like a password, a token or a key is hidden.
        main: the name of the function.
        where: "local", a Spark master, or "slurm job 12".
        software: the versions on the driver, by package.
        status: "running", "finished", "failed" or "cancelled".
        attempts: the launches, in order: the first 1,000 and the latest 1,000.
        attempts_cut: how many launches between those were removed to save memory.
        ranks: the ranks of the last attempt; empty until all have started.
        controller: the library that Horovod coordinates and reduces with on CPUs, "gloo" or "mpi";
            None until the ranks are placed.
        timings: the times of the run's events.
        logs_cut: the number of characters that were removed from :attr:`logs` to save memory.
        profile: where the time of each rank went; see :meth:`diagnose`.
        recorded: when this record was written, in seconds since the epoch, if it was read from a
            file; None for a run of this process.
        traces: the files of ``DebugConfig(timeline=, torch_profiler=)``; :meth:`trace` merges them.
        warnings: what was wrong with a run that may have ended well, at its end: checkpoints that
            are missing.
        result_text: what ``main`` returned on rank 0, in at most 200 characters; of an object only
            its type. Empty before the end.
    """

    run_id: str
    np: int | tuple[int, int]
    params: Mapping[str, Any] = field(default_factory=dict)
    main: str = ""
    where: str = ""
    software: Mapping[str, str] = field(default_factory=dict, repr=False)
    status: Status = "running"
    attempts: list[Attempt] = field(default_factory=list)
    attempts_cut: int = 0
    ranks: list[RankInfo] = field(default_factory=list)
    controller: Controller | None = None
    timings: Timings = field(default_factory=lambda: Timings(time.time()))
    logs_cut: int = 0
    profile: RunProfile = field(default_factory=RunProfile, repr=False)
    recorded: float | None = None
    traces: list[TraceFile] = field(default_factory=list, repr=False)
    warnings: list[str] = field(default_factory=list)
    result_text: str = ""
    _metrics: Metrics = field(default_factory=Metrics, repr=False)
    _lines: deque[Line] = field(default_factory=deque, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    # The clock of all moments of the driver.
    _clock: SteadyClock = field(default_factory=SteadyClock, repr=False)
    # For views: what diagnose() finds, and until when this holds by the monotonic clock.
    _verdict: tuple[str, float] = field(default=("", 0.0), repr=False)
    _archive: Archive | None = field(default=None, repr=False)
    _checkpoints: list[Checkpoint] = field(default_factory=list, repr=False)
    _sources: Mapping[str, Source] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        from horovod_runner.results.card import run_text

        return run_text(self)

    def _repr_html_(self) -> str:
        from horovod_runner.results.card import run_html

        return run_html(self)

    @property
    def _until(self) -> float:
        """When it ended, or until when it is known; in seconds since the epoch."""
        return self.timings.end or self.recorded or self._clock()

    @property
    def metrics(self) -> pa.Table:
        """All reports as a table; requires pyarrow and NumPy.

        One row per report: the columns rank, attempt, step, epoch, time, and one per metric, null
        if the report lacks it.
        """
        return self._metrics.table()

    @property
    def latest_metrics(self) -> dict[str, float | int]:
        """The latest value of each metric of rank 0."""
        reports = self._metrics.ranks.get(0)
        return {} if reports is None else dict(reports.latest)

    @property
    def dropped_reports(self) -> dict[int, int]:
        """By rank, the number of reports that have no row in :attr:`metrics`: there were too many.

        Ranks that lost no report are not listed.
        """
        return {rank: each.dropped for rank, each in self._metrics.ranks.items() if each.dropped}

    def diagnose(self) -> Diagnosis:
        """Say why the run is slow: where a step's time goes, which rank holds the others up.

            print(runner.last_run.diagnose())

        Also while the run goes on.
        """
        return diagnose(self.profile)

    def report(self, path: str | os.PathLike[str] | None = None) -> Path | str:
        """Write a page about the run: one HTML file that loads nothing from elsewhere.

            runner.last_run.report("run.html")

        Also while the run goes on. Only this user can read a new file: the page shows what the run
        printed.

        Args:
            path: the file: a path, or a URL of fsspec (``hdfs://``, ``s3://``); None:
                "<run id>.html" in the current folder.

        Returns:
            The file, or its URL.

        Raises:
            CheckpointError: a package for such a URL is not installed.
            OSError: the file cannot be written.
        """
        from horovod_runner.results.page.document import write_page

        return write_page(self, path)

    def trace(self, path: str | os.PathLike[str]) -> list[str]:
        """Write one trace of all ranks for Perfetto or Chrome.

            runner.last_run.trace("trace.json.gz")

        Open the file at https://ui.perfetto.dev. It shows each rank and each host as a process, and
        contains the traces of ``DebugConfig(timeline=, torch_profiler=)``. The clocks of all hosts
        are aligned. The call also works while the run goes on.

        Args:
            path: of the file; with a name that ends in ".gz" it is compressed.

        Returns:
            A sentence for each thing that the trace lacks; empty if it is complete.

        Raises:
            OSError: the file cannot be written.
        """
        from horovod_runner.results.trace.merge import write_trace

        return write_trace(self, path)

    @property
    def logs(self) -> list[Line]:
        """What ranks and runner printed: the last 16 million characters, in 500,000 pieces at most.

        A piece is mostly a line.
        """
        with self._lock:
            return list(self._lines)

    def last_lines(self, count: int) -> list[Line]:
        """The last pieces of :attr:`logs`, without a copy of all."""
        with self._lock:
            return list(islice(reversed(self._lines), count))[::-1]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints that still exist, oldest first."""
        return list(self._checkpoints) if self._archive is None else self._archive.checkpoints

    @property
    def best_checkpoint(self) -> Checkpoint | None:
        """The best checkpoint by ``CheckpointConfig(metric=)``; the latest if no metric is set."""
        return None if self._archive is None else self._archive.best

    @property
    def latest_checkpoint(self) -> Checkpoint | None:
        """The latest complete checkpoint; None if there is none."""
        checkpoints = self.checkpoints
        return checkpoints[-1] if checkpoints else None

    def log_model(
        self,
        name: str,
        build: Callable[[], Any] | None = None,
        *,
        columns: Columns,
        output: OutputSpec = "prediction",
        data: str | None = None,
        checkpoint: Checkpoint | None = None,
        registered_model_name: str | None = None,
        dtypes: Dtypes | None = None,
        pad_ragged: PadRagged | None = None,
        images: Mapping[str, Image] | None = None,
        transform: Transform | None = None,
    ) -> ModelInfo:
        """Log the trained model to MLflow: to the active run, or to a new one.

            info = runner.last_run.log_model("net", build=Net, columns={"x": ["age", "income"]})
            predict = mlflow.pyfunc.spark_udf(spark, info.model_uri)

        The logged model takes the columns of a DataFrame. Signature and input example come from the
        first rows of a dataset of the run, the requirements from what defines the model.

        Args:
            name: of the model.
            build: returns the network, for a checkpoint of weights.
            columns: the model's inputs, as in :func:`horovod_runner.predict`.
            output: the columns that the model returns.
            data: the name of the dataset among the arguments of ``run``; None: the first.
            checkpoint: the model's weights; None: :attr:`best_checkpoint`.
            registered_model_name: also register the model under this name.
            dtypes: like the arguments below, as in :func:`horovod_runner.predict`.
            pad_ragged: for ragged columns.
            images: for columns of images.
            transform: called with each batch.

        Returns:
            What MLflow knows of the model; its ``model_uri`` leads to it.

        Raises:
            CheckpointError: there is no checkpoint, or it holds no weights of the network.
            DataError: the run had no such dataset, or a column does not exist.
            ImportError: MLflow is not installed.
            PredictionError: the model fails on the first rows.
        """
        from horovod_runner.data.feed.options import FeedOptions
        from horovod_runner.data.scoring.logged_model import log_model
        from horovod_runner.data.scoring.models.recognize import recognize

        checkpoint = checkpoint or self.best_checkpoint
        if checkpoint is None:
            raise CheckpointError(
                "the run has no checkpoint to log a model from: call save_checkpoint in main"
            )
        source = self._source(data)
        kind, model = recognize(checkpoint, build)
        options = FeedOptions(
            columns=columns,
            framework=kind.framework,
            dtypes=dtypes,
            pad_ragged=pad_ragged,
            images=images,
            transform=transform,
        )
        return log_model(
            name,
            kind,
            model,
            options,
            example=source.head(_EXAMPLE_ROWS),
            output=output,
            registered_model_name=registered_model_name,
        )

    def _source(self, name: str | None) -> Source:
        """A dataset of the run; None: the first."""
        chosen = name or next(iter(self._sources), None)
        if chosen is None or chosen not in self._sources:
            what = ", ".join(self._sources) or "none"
            raise DataError(
                f"the run had no dataset{f' {name!r}' if name else ''}, from whose rows signature "
                f"and example are made: its datasets are {what}. Log the model with the functions "
                "of MLflow"
            )
        return self._sources[chosen]

    def plot(self, *names: str, rank: int = 0) -> matplotlib.figure.Figure:
        """Draw metrics by step, with marks at restarts; requires matplotlib.

        Args:
            names: the metrics to draw; if none is named, the first 20.
            rank: the rank whose reports are drawn; others than rank 0 need
                ``DebugConfig(report_ranks="all")``.

        Returns:
            A figure with one panel per metric.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: a metric in ``names`` was not reported.
        """
        from horovod_runner.results.plot import plot_run

        return plot_run(self, names, rank)
