"""HorovodRunner, the public call."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

from horovod_runner.archive import Archive
from horovod_runner.attempts import run_attempts
from horovod_runner.datasets import find_datasets
from horovod_runner.deputy import Deputy
from horovod_runner.driver import Driver
from horovod_runner.errors import CancelledError
from horovod_runner.gpu import Pinning
from horovod_runner.hang import DEFAULT_SECONDS
from horovod_runner.job import Job, ReportRanks, make_job
from horovod_runner.launchers import Launcher
from horovod_runner.launchers.local import LocalLauncher
from horovod_runner.launchers.spark import SparkLauncher, find_session
from horovod_runner.marker import Mode
from horovod_runner.messages import ControllerChoice
from horovod_runner.recorder import Recorder
from horovod_runner.result import Run, Status, Timings, plain_params
from horovod_runner.runs import Registration
from horovod_runner.sinks import Sink, Sinks
from horovod_runner.sinks.progress import Progress
from horovod_runner.sinks.terminal import TerminalSink

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

Verbosity = Literal["all", "log_callback_only"]
StartedBy = Literal["spark", "slurm"]
_EVENTS = tuple(name for name in vars(Sink) if not name.startswith("_"))


class HorovodRunner:
    """Runs a function as Horovod ranks.

    The contract of ``np``, ``driver_log_verbosity`` and :meth:`run` is that of Databricks'
    HorovodRunner; the other arguments are this package's.

    Args:
        np: how many ranks. Above 0: the tasks of one Spark barrier job, all started together; a
            rank takes one task slot. Below 0: ``-np`` child processes on this machine, without
            Spark. 0: as many as Spark has slots (deprecated: the number depends on which executors
            have registered).
        driver_log_verbosity: "log_callback_only" shows what ``log_to_driver`` sends; "all" shows
            everything that the ranks print. With ``np`` below 0 the output is always shown. Of more
            than 16 ranks, a line that several print at the same time is shown once.
        slot_timeout: seconds to wait for slots that a cluster may still bring up. None waits while
            the application is younger than 30 s, and on ``local[n]`` not at all.
        gpus_per_rank: GPUs for each rank. None takes what Spark gives a task
            (``spark.task.resource.gpu.amount``), else one each where the hosts have GPUs. Below 1,
            ranks share; 0 trains on CPUs.
        gpu_pinning: "current" shows a rank all GPUs of its host's ranks in local_rank order and
            makes its own the current one; "mask" shows it its own alone.
        hang_timeout: seconds without any progress after which the run ends with a HangError; a
            warning that says who waits for whom comes earlier. None never ends it.
        env: environment variables for the ranks.
        ship_modules: modules of your own that the executors lack: what ``main`` uses of them goes
            along with it.
        data_dir: a folder that the driver and all executors share (NFS, ``/dbfs``): DataFrames
            are written there once, and any number of ranks sees the same batches. None: their rows
            go to the ranks' own disks, unless all ranks are on this machine.
        data_limit: how many bytes the datasets of a run may take on each host's disk. None: all
            that is free but 1 GiB (or a twentieth of the disk, if that is less).
        checkpoint_dir: where ``save_checkpoint`` writes: a path, or an URL that fsspec knows
            (``s3://``, ``gs://``, ``abfs://``, ``hdfs://``, ``dbfs:/``). Executors that do not see
            a path as this machine does send their checkpoints here. None: a temporary folder of
            this machine, which lasts as long as :attr:`last_run`.
        keep: how many checkpoints to keep; None keeps all.
        best: the metric by which they are kept, the latest one in any case; None keeps the latest.
        mode: whether "min" or "max" of it is good.
        resume: whether ``load_checkpoint`` gives the latest checkpoint of ``checkpoint_dir``, if
            there is one. Without, a run leaves those of former runs alone.
        max_restarts: how often a failed run is launched again, from its latest checkpoint: so
            often after errors, and so often after losses of a process or host. An error that comes
            back at the same place without a checkpoint between ends the run.
        report_ranks: whose ``report`` counts: rank 0's, or "all".
        progress: whether to show a progress bar, or lines where there is no terminal, of what is
            reported.
        sinks: take what comes back, too: MLflow, TensorBoard, your own
            (:mod:`horovod_runner.sinks`).
        timeline: a file of this machine for Horovod's timeline.
        check_sync: "epoch" compares the ranks' weights after each epoch, and fails the run where
            they are not equal (:func:`horovod_runner.check_sync`).
        warn_pickle_bytes: above this size of ``main`` and its arguments a warning names the
            largest part.
        spark: the session for ``np`` >= 0; None takes the active one, or creates one.
        resource_profile: what a task of the barrier job takes (Spark's stage-level scheduling, from
            4.0 on); None takes the application's settings.
        launcher: what starts the ranks of ``np`` >= 0: "spark", or in a Slurm allocation "slurm",
            which needs no Spark; a slot is a task of the allocation then.
        controller: what Horovod negotiates and reduces on CPUs with: "mpi" (MPICH), "gloo", or
            "auto", the first of them that all hosts' Horovod has.
        warm: whether each host keeps a process that has imported the frameworks that ``main`` did,
            from which the ranks of the next such run start within milliseconds. It runs nothing of
            yours, and goes with the session, after ten minutes without a run, or when memory is
            short. Where the ranks are on Linux; not under Slurm.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value that means nothing.
    """

    def __init__(
        self,
        *,
        np: int,
        driver_log_verbosity: Verbosity = "log_callback_only",
        slot_timeout: float | None = None,
        gpus_per_rank: float | None = None,
        gpu_pinning: Pinning = "current",
        hang_timeout: float | None = DEFAULT_SECONDS,
        env: Mapping[str, str] | None = None,
        ship_modules: Sequence[ModuleType] = (),
        data_dir: str | os.PathLike[str] | None = None,
        data_limit: int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        keep: int | None = 3,
        best: str | None = None,
        mode: Mode = "min",
        resume: bool = False,
        max_restarts: int = 0,
        report_ranks: ReportRanks = 0,
        progress: bool = True,
        sinks: Sequence[Sink] = (),
        timeline: str | os.PathLike[str] | None = None,
        check_sync: Literal["epoch"] | None = None,
        warn_pickle_bytes: int = 64 << 20,
        spark: SparkSession | None = None,
        resource_profile: ResourceProfile | None = None,
        launcher: StartedBy = "spark",
        controller: ControllerChoice = "auto",
        warm: bool = False,
    ) -> None:
        if isinstance(np, bool) or not isinstance(np, int):
            raise TypeError(f"np must be an int, not {type(np).__name__}")
        for name, chosen, choices in (
            ("driver_log_verbosity", driver_log_verbosity, get_args(Verbosity)),
            ("gpu_pinning", gpu_pinning, get_args(Pinning)),
            ("check_sync", check_sync, (None, "epoch")),
            ("launcher", launcher, get_args(StartedBy)),
            ("controller", controller, get_args(ControllerChoice)),
        ):
            _one_of(name, chosen, choices)
        if slot_timeout is not None and slot_timeout < 0:
            raise ValueError(f"slot_timeout is in seconds and cannot be {slot_timeout}")
        if hang_timeout is not None and not hang_timeout > 0:
            raise ValueError(f"hang_timeout is in seconds, above 0, and cannot be {hang_timeout}")
        if gpus_per_rank is not None and (
            gpus_per_rank < 0 or (gpus_per_rank > 1 and gpus_per_rank != int(gpus_per_rank))
        ):
            raise ValueError(
                f"gpus_per_rank must be 0, a fraction below 1, or a whole number, "
                f"not {gpus_per_rank}"
            )
        for name, value in (env or {}).items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"env must map str to str; {name!r} maps to {value!r}")
        if data_dir is not None and not Path(data_dir).is_dir():
            raise ValueError(f"data_dir must be a folder that is there, and {data_dir} is none")
        if data_limit is not None and data_limit < 0:
            raise ValueError(f"data_limit is in bytes and cannot be {data_limit}")
        _check_modules(ship_modules)
        _check_checkpoints(
            keep,
            best,
            mode,
            resume=resume,
            checkpoint_dir=checkpoint_dir,
            max_restarts=max_restarts,
        )
        _check_sinks(report_ranks, sinks)
        _check_warm(warm, launcher)
        if np == 0:
            warnings.warn(
                "np=0 (all slots) is deprecated: the number of slots depends on which executors "
                "have registered. Give the number of ranks.",
                DeprecationWarning,
                stacklevel=2,
            )
        self._np = np
        self._verbosity = driver_log_verbosity
        self._slot_timeout = slot_timeout
        self._gpus_per_rank = gpus_per_rank
        self._gpu_pinning = gpu_pinning
        self._hang_timeout = hang_timeout
        self._env = dict(env or {})
        self._ship_modules = tuple(ship_modules)
        self._data_dir = None if data_dir is None else Path(data_dir).absolute()
        self._data_limit = data_limit
        self._checkpoint_dir = None if checkpoint_dir is None else os.fspath(checkpoint_dir)
        self._keep = keep
        self._best = best
        self._mode: Mode = mode
        self._resume = resume
        self._max_restarts = max_restarts
        self._report_ranks: ReportRanks = report_ranks
        self._progress = progress
        self._sinks = tuple(sinks)
        self._timeline = None if timeline is None else _timeline_path(timeline)
        self._check_sync = check_sync is not None
        self._warn_pickle_bytes = warn_pickle_bytes
        self._spark = spark
        self._resource_profile = resource_profile
        self._started_by = launcher
        self._controller: ControllerChoice = controller
        self._warm = warm
        self._runs: dict[threading.Event, Driver | None] = {}
        #: The run that is under way, or the last one; None before the first.
        self.last_run: Run | None = None

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call ``main(**kwargs)`` on every rank and return rank 0's value.

        ``main`` and the arguments are pickled with cloudpickle, so a function of a notebook or
        script will do; it calls ``hvd.init()`` itself. When this returns or raises, all ranks are
        gone.

        Datasets among the arguments (Spark, pandas and Arrow tables, and those of
        :mod:`horovod_runner.data`) arrive in ``main`` as a :class:`~horovod_runner.data.Shard`.

        Raises:
            SlotError: the cluster has fewer than ``np`` slots.
            GpuError: a host has too few GPUs for its ranks.
            CheckpointError: ``checkpoint_dir`` cannot be used.
            DataError: a dataset among the arguments cannot be read, has nulls, or has a column that
                cannot become a tensor.
            SerializationError: ``main`` or an argument cannot be pickled; names the object and the
                way to it.
            LaunchError: the ranks could not be started, or Spark ended them.
            CancelledError: :meth:`cancel` was called.
            HangError: the ranks made no progress for ``hang_timeout`` seconds.
            SyncError: the ranks' weights are not equal (``check_sync``).
            RankFailedError: a rank died without a Python exception.
            Exception: what ``main`` raised on the first rank that failed, with a RankFailedError
                as its ``__cause__`` that holds the remote traceback.
        """
        if not callable(main):
            raise TypeError(
                f"main must be callable, not {type(main).__name__}: pass the function itself, "
                "run(train), not what it returns, run(train())"
            )
        timings = Timings(time.time())
        cancelled = threading.Event()
        self._runs[cancelled] = None
        try:
            launcher = self._launcher(cancelled)
            size = launcher.slots(max(0, self._np) or -self._np)
            datasets = find_datasets(kwargs)
            job = make_job(
                main,
                {**kwargs, **datasets.shards},
                size=size,
                environment=self._env,
                gpus_per_rank=self._gpus_per_rank,
                gpu_pinning=self._gpu_pinning,
                stream_output=self._np < 0 or self._verbosity == "all",
                hang_timeout=self._hang_timeout,
                ship_modules=self._ship_modules,
                warn_bytes=self._warn_pickle_bytes,
                report_ranks=self._report_ranks,
                timeline=self._timeline is not None,
                check_sync=self._check_sync,
                controller=self._controller,
                warm=self._warm,
            )
            archive = Archive(
                job.run_id,
                self._checkpoint_dir,
                keep=self._keep,
                best=self._best,
                mode=self._mode,
                resume=self._resume,
                timeline=self._timeline,
            )
            params = plain_params(self._np, kwargs)
            run = Run(job.run_id, self._np, params, timings=timings, _archive=archive)
            # A folder that cannot be used is told before any data are packed.
            with (
                archive,
                datasets.prepared(
                    job,
                    launcher,
                    data_dir=self._data_dir,
                    data_limit=self._data_limit,
                    ship_modules=self._ship_modules,
                ) as job,
            ):
                weakref.finalize(run, archive.discard)
                self.last_run = run
                name = getattr(main, "__qualname__", type(main).__qualname__)
                with Registration(run, name, launcher.where, lambda: self._end(cancelled)) as entry:
                    return self._supervise(
                        run, job, launcher, cancelled, archive=archive, entry=entry
                    )
        finally:
            del self._runs[cancelled]

    def _supervise(
        self,
        run: Run,
        job: Job,
        launcher: Launcher,
        cancelled: threading.Event,
        *,
        archive: Archive,
        entry: Registration,
    ) -> Any:
        """Run the job to its end, and tell the sinks of it."""

        def entered(driver: Driver) -> None:
            self._runs[cancelled] = driver

        progress = Progress() if self._progress else None
        terminal, recorder = TerminalSink(job.size, progress), Recorder(run)
        own = [recorder, entry, terminal, *([progress] if progress is not None else [])]
        sink = Sinks(own, self._sinks, terminal.notice)
        sink.begin(run)
        status: Status = "failed"
        try:
            value = run_attempts(
                job,
                launcher,
                sink,
                recorder,
                archive=archive,
                cancelled=cancelled,
                max_restarts=self._max_restarts,
                entered=entered,
            )
            status = "finished"
            return value
        except (CancelledError, KeyboardInterrupt) as error:
            status = "cancelled"
            recorder.failed(error)
            raise
        finally:
            recorder.ended(status)
            sink.end(run)
            sink.close()

    def __getstate__(self) -> dict[str, Any]:
        # A main that is a method of an object that holds its runner has to be picklable.
        left_here: dict[str, Any] = {
            "_runs": {},
            "_ship_modules": (),
            "_sinks": (),
            "_resource_profile": None,
            "last_run": None,
        }
        return {**self.__dict__, **left_here}

    def cancel(self) -> None:
        """End the run that is under way, from another thread; without one nothing happens.

        :meth:`run` then raises :class:`~horovod_runner.errors.CancelledError`, when all ranks are
        gone.
        """
        for cancelled in list(self._runs):
            self._end(cancelled)

    def _end(self, cancelled: threading.Event) -> None:
        cancelled.set()
        driver = self._runs.get(cancelled)
        if driver is not None:
            driver.wake()

    def dump_stacks(self) -> None:
        """Print every rank's Python stacks, from another thread; without a run nothing happens.

        They are printed where ``run`` prints, within some seconds, also of ranks that are stuck in
        native code. The ranks go on undisturbed.
        """
        for driver in list(self._runs.values()):
            if driver is not None:
                driver.show_stacks()

    def _launcher(self, cancelled: threading.Event) -> Launcher:
        if self._np < 0:
            return LocalLauncher()
        if self._started_by == "slurm":
            from horovod_runner.launchers.slurm import SlurmLauncher

            return SlurmLauncher(self._slot_timeout)
        spark = self._spark or find_session()
        notice = TerminalSink(1).notice
        return SparkLauncher(
            spark,
            self._slot_timeout,
            notice,
            cancelled,
            Deputy,
            profile=self._resource_profile,
        )


def _whole(name: str, value: object, least: int, note: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}; {note}")


def _check_modules(ship_modules: Sequence[object]) -> None:
    if not isinstance(ship_modules, Iterable):
        raise TypeError(f"ship_modules must be a list of modules, not {ship_modules!r}")
    for module in ship_modules:
        if not isinstance(module, ModuleType):
            raise TypeError(
                f"ship_modules must hold modules, not {type(module).__name__}: "
                "import mymodule, then ship_modules=[mymodule]"
            )


def _check_checkpoints(
    keep: int | None,
    best: object,
    mode: str,
    *,
    resume: bool,
    checkpoint_dir: object,
    max_restarts: int,
) -> None:
    _one_of("mode", mode, get_args(Mode))
    if keep is not None:
        _whole("keep", keep, 1, "None keeps all")
    _whole("max_restarts", max_restarts, 0, "0 restarts nothing")
    if checkpoint_dir is not None and not isinstance(checkpoint_dir, (str, os.PathLike)):
        kind = type(checkpoint_dir).__name__
        raise TypeError(f"checkpoint_dir must be a path or an URL, not {kind}")
    if checkpoint_dir is not None and not os.fspath(checkpoint_dir):
        raise ValueError("checkpoint_dir is empty: name a folder or an URL, or leave it out")
    if best is not None and not isinstance(best, str):
        raise TypeError(f"best must be the name of a metric, not {type(best).__name__}")
    if mode != "min" and best is None:
        raise ValueError(f"mode={mode!r} ranks checkpoints by a metric: name it, best='accuracy'")
    if resume and checkpoint_dir is None:
        raise ValueError(
            "resume=True goes on from the checkpoints in checkpoint_dir, and none is given: "
            "name the folder or URL that the former run wrote to"
        )


def _check_warm(warm: object, launcher: StartedBy) -> None:
    if not isinstance(warm, bool):
        raise TypeError(f"warm must be True or False, not {type(warm).__name__}")
    if warm and launcher == "slurm":
        raise ValueError(
            "warm=True keeps a process on each host for the next run, and Slurm ends all that a "
            "step leaves behind: leave it out under launcher='slurm'"
        )


def _timeline_path(timeline: str | os.PathLike[str]) -> Path:
    path = Path(timeline).absolute()
    if not path.parent.is_dir():
        raise ValueError(f"timeline={timeline!r}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"timeline={timeline!r} is a folder; name a file")
    return path


def _check_sinks(report_ranks: object, sinks: Sequence[Sink]) -> None:
    _one_of("report_ranks", report_ranks, get_args(ReportRanks))
    if isinstance(sinks, str):
        raise TypeError(f"sinks must hold objects, and {sinks!r} is a string: sinks=[MLflowSink()]")
    for sink in sinks:
        if isinstance(sink, type):
            name = sink.__name__
            raise TypeError(f"sinks=[{name}]: that is the class; give an object, {name}(...)")
        if not any(hasattr(sink, event) for event in _EVENTS):
            raise TypeError(
                f"sinks must hold sinks (horovod_runner.sinks.Sink), and {sink!r} has none of "
                f"the methods {', '.join(_EVENTS)}"
            )


def _one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {listed}, not {value!r}")
