"""One run under way: what `HorovodRunner.run` executes, and `HorovodRunner.start` returns."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from horovod_runner.checkpoints.archive import Archive
from horovod_runner.common.clocks import SteadyClock
from horovod_runner.common.options import Options
from horovod_runner.driver.attempts import run_attempts
from horovod_runner.driver.elastic.pool import Pool, refuse_dataframes
from horovod_runner.driver.elastic.scaling import ScalingPolicy
from horovod_runner.driver.requests import Requests
from horovod_runner.driver.restarts import RestartPolicy
from horovod_runner.errors import CancelledError, forget_passwords
from horovod_runner.host.folders.folder import is_elsewhere
from horovod_runner.host.folders.problems import describe
from horovod_runner.launchers.local import LocalLauncher
from horovod_runner.launchers.sessions import find_session
from horovod_runner.launchers.spark import SparkLauncher
from horovod_runner.results import saved_run
from horovod_runner.results.card import value_text
from horovod_runner.results.panel import progress_sink
from horovod_runner.results.recorder import failed, plain_params
from horovod_runner.results.registration import Registration
from horovod_runner.results.run import Run, Timings
from horovod_runner.results.run_log import RunLog
from horovod_runner.run.datasets import find_datasets
from horovod_runner.run.make_job import make_job
from horovod_runner.run.mlflow_run import active_run, find_mlflow_run
from horovod_runner.sinks.fan_out import FanOut
from horovod_runner.sinks.notebook_error import fold_error, from_ranks
from horovod_runner.sinks.summary import MeasuringSink
from horovod_runner.sinks.terminal import TerminalSink
from horovod_runner.wire.events import RunEnded, Status

if TYPE_CHECKING:
    import pyarrow as pa

    from horovod_runner.driver.launcher import Launcher, PoolKeeper
    from horovod_runner.wire.job import Job


class RunHandle:
    """A run that was started by :meth:`HorovodRunner.start`; like a future.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        options: Options,
        main: Callable[..., Any],
        kwargs: Mapping[str, Any],
        runs: Runs,
        *,
        all_values: bool = False,
    ) -> None:
        self._options = options
        self._main = main
        self._kwargs = kwargs
        self._all_values = all_values
        self._runs = runs
        self._clock = SteadyClock()
        self._timings = Timings(self._clock())
        self._requests = Requests()
        self._mlflow_run = active_run()  # of this thread: `start` makes another one
        self._future: Future[Any] = Future()
        #: The record of the run (status, attempts, metrics, logs, checkpoints); None until the job
        #: has been made.
        self.run: Run | None = None
        runs.under_way.append(self)

    def __repr__(self) -> str:
        return f"<RunHandle: {self.run or self.status}>"

    def _repr_html_(self) -> str | None:
        return None if self.run is None else self.run._repr_html_()

    def start(self) -> RunHandle:
        """Execute the run in a thread of its own; returns this handle."""

        def work() -> None:
            with suppress(BaseException):  # the future has it, for whoever asks
                self.execute()

        threading.Thread(target=work, name="horovod_runner-run").start()
        return self

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end of the run, and return rank 0's value.

        Args:
            timeout: seconds to wait; None waits without limit.

        Raises:
            TimeoutError: the run has not ended within ``timeout``. It goes on.
            Exception: whatever :meth:`HorovodRunner.run` would have raised.
        """
        __tracebackhide__ = True
        return self._future.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the run, and return its exception; None where it ended well.

        Args:
            timeout: seconds to wait; None waits without limit.

        Raises:
            TimeoutError: the run has not ended within ``timeout``. It goes on.
        """
        return self._future.exception(timeout)

    def done(self) -> bool:
        """Whether the run has ended, well or not."""
        return self._future.done()

    def cancel(self) -> None:
        """End all ranks. :meth:`result` then raises CancelledError; an ended run stays as it is."""
        self._requests.cancel()

    @property
    def status(self) -> Status:
        """Whether the run is "running", "finished", "failed" or "cancelled"."""
        if self.run is not None:
            return self.run.status
        if not self.done():
            return "running"
        return "cancelled" if isinstance(self.exception(), CancelledError) else "failed"

    @property
    def metrics(self) -> pa.Table:
        """All reports so far as a table, as :attr:`Run.metrics`; requires pyarrow and NumPy."""
        return (self.run or Run("", self._options.np)).metrics

    def dump_stacks(self) -> None:
        """Print every rank's Python stacks, within seconds; nothing happens before ranks run."""
        self._requests.show_stacks()

    def execute(self) -> Any:
        """Run to the end in the calling thread; returns rank 0's value."""
        __tracebackhide__ = True  # IPython and pytest leave this frame out
        self._future.set_running_or_notify_cancel()
        try:
            value = self._execute()
        except BaseException as error:
            if from_ranks(error):
                error = error.with_traceback(None)  # ten frames of this package
                fold_error(error)
            forget_passwords(error)
            self._runs.under_way.remove(self)
            self._future.set_exception(error)
            raise error
        self._runs.under_way.remove(self)
        self._future.set_result(value)
        return value

    def _execute(self) -> Any:
        options, requests = self._options, self._requests
        launcher = _launcher(options, requests)
        # Whether the ranks run in tasks that live as long as the run.
        pooled = options.elastic or launcher.needs_pool
        datasets = find_datasets(self._kwargs)
        job = make_job(
            self._main,
            {**self._kwargs, **datasets.shards},
            abs(options.most),
            options,
            all_values=self._all_values,
        )
        archive = Archive(job.run_id, options)
        params = plain_params(options.np, self._kwargs)
        run = Run(
            job.run_id,
            options.np,
            params,
            getattr(self._main, "__qualname__", type(self._main).__qualname__),
            launcher.where,
            job.software,
            timings=self._timings,
            _clock=self._clock,
            _archive=archive,
            _sources={name: each.for_examples() for name, each in datasets.sources.items()},
        )
        if launcher.driver_logs:
            # Of a user whose home folder need not exist there.
            os.environ.setdefault("XDG_STATE_HOME", os.getcwd())
        # Listed from here on: a run that waits for slots can be stopped, too.
        log = RunLog(run, saved_run.new_path(run.run_id))
        with Registration(run, requests.cancel, log.flush) as entry:
            if pooled:
                launcher.check_pool(abs(options.least))
            if not launcher.needs_pool:
                size = launcher.slots(abs(options.least if pooled else options.most))
                job = job if pooled else replace(job, size=size)
            # The archive first: a folder that cannot be used is an error before data are packed.
            prepared = datasets.prepared(job, launcher, options, requests.cancelled)
            with archive, prepared as (job, dataframes):
                weakref.finalize(run, archive.discard)
                if pooled:
                    refuse_dataframes(dataframes)
                self.run = self._runs.last = run
                return self._supervise(
                    run, log, job, launcher, dataframes=dataframes, archive=archive, entry=entry
                )

    def _own_sinks(self) -> list[Any]:
        """The user's sinks; those of this package in a copy for this run alone."""
        return [
            each.of_run(self._mlflow_run) if isinstance(each, MeasuringSink) else each
            for each in self._options.sinks
        ]

    def _supervise(
        self,
        run: Run,
        log: RunLog,
        job: Job,
        launcher: PoolKeeper,
        *,
        dataframes: Mapping[str, Any],
        archive: Archive,
        entry: Registration,
    ) -> Any:
        """Run the job to its end, and pass what happens to the sinks."""
        options = replace(self._options, sinks=self._own_sinks())
        progress = progress_sink() if options.progress else None
        terminal = TerminalSink(job.size, progress)
        ours = [entry, terminal, *([progress] if progress is not None else [])]
        sink = FanOut(log, ours, options.sinks, terminal.notice, limits=job.limits)
        sink.begin(run)
        if entry.problem:
            sink.notice(entry.problem)
        if launcher.driver_logs:
            sink.notice(_kept_of_container(launcher.driver_logs, archive.chosen, run.run_id))
        status: Status = "failed"
        result_text = ""
        try:
            job = replace(job, mlflow_run=find_mlflow_run(self._mlflow_run, options, sink.notice))
            with ExitStack() as stack:
                attempts_on: Launcher = launcher
                if options.elastic or launcher.needs_pool:
                    scaling = ScalingPolicy(
                        abs(options.least),
                        abs(options.most),
                        options.grow_after,
                        options.cluster_config.slot_timeout,
                    )
                    pool = Pool(launcher, job, scaling, sink.notice, self._requests.cancelled)
                    attempts_on = stack.enter_context(pool)
                    job = replace(job, size=pool.slots(job.size))
                value = run_attempts(
                    job,
                    attempts_on,
                    sink,
                    restarts=RestartPolicy(options.max_restarts, elastic=options.elastic),
                    archive=archive,
                    dataframes=dataframes,
                    requests=self._requests,
                )
            status, result_text = "finished", value_text(value)
            return value
        except (CancelledError, KeyboardInterrupt) as error:
            status = "cancelled"
            sink.tell(failed(error))
            raise
        except Exception as error:
            if not run.attempts:  # otherwise the last one has told it
                sink.tell(failed(error))
            raise
        finally:
            warnings = archive.warnings(finished=status == "finished")
            for warning in warnings:
                sink.notice(warning)
            sink.tell(RunEnded(status, warnings, result_text))
            log.close()
            problem = log.problem
            if launcher.driver_logs and is_elsewhere(archive.chosen):
                problem = problem or _copy_record(run.run_id, archive)
            if problem:
                sink.notice(problem)
            sink.end(run)
            sink.close()


def _kept_of_container(logs: str, folder: str, run_id: str) -> str:
    """What is left of a run whose driver runs in a container, and where."""
    if is_elsewhere(folder):
        record = f"{folder.rstrip('/')}/{saved_run.path_of(run_id).name}"
        kept = f"The record of this run will be kept: horovod-runner report {record}"
    else:
        kept = (
            "The record of this run and its checkpoints go, too. Set checkpoint_dir to a folder of "
            "a store (hdfs://, s3://) or to an absolute path that all hosts share"
        )
    return (
        "this driver runs in a container: its working folder and its temporary files are deleted "
        f"after the run. {kept}. Its output: {logs}"
    )


def _copy_record(run_id: str, archive: Archive) -> str:
    """Copy the record of a run to its checkpoints; returns what was wrong, empty if nothing."""
    try:
        archive.keep_record(saved_run.path_of(run_id))
    except Exception as error:  # every kind of folder raises different ones
        return f"the record of this run could not be copied to {archive.chosen}: {describe(error)}"
    return ""


@dataclass
class Runs:
    """The runs of one runner."""

    under_way: list[RunHandle] = field(default_factory=list)
    last: Run | None = None


def _launcher(options: Options, requests: Requests) -> PoolKeeper:
    """What starts the ranks."""
    cluster = options.cluster_config
    if options.local:
        return LocalLauncher()
    if cluster.launcher == "slurm":
        from horovod_runner.launchers.slurm import SlurmLauncher

        return SlurmLauncher(cluster.slot_timeout, cluster.limits)
    return SparkLauncher(
        cluster.spark or find_session(),
        cluster.slot_timeout,
        TerminalSink(1).notice,
        requests.cancelled,
        profile=cluster.resource_profile,
        limits=cluster.limits,
    )
