"""HorovodRunner, the public call."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

from horovod_runner.datasets import find_datasets
from horovod_runner.deputy import Deputy
from horovod_runner.driver import Driver
from horovod_runner.gpu import Pinning
from horovod_runner.hang import DEFAULT_SECONDS
from horovod_runner.job import make_job
from horovod_runner.launchers import Launcher
from horovod_runner.launchers.local import LocalLauncher
from horovod_runner.launchers.spark import SparkLauncher, find_session
from horovod_runner.sinks.terminal import TerminalSink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Verbosity = Literal["all", "log_callback_only"]


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
            everything that the ranks print. With ``np`` below 0 the output is always shown.
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
        warn_pickle_bytes: above this size of ``main`` and its arguments a warning names the
            largest part.
        spark: the session for ``np`` >= 0; None takes the active one, or creates one.

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
        warn_pickle_bytes: int = 64 << 20,
        spark: SparkSession | None = None,
    ) -> None:
        if isinstance(np, bool) or not isinstance(np, int):
            raise TypeError(f"np must be an int, not {type(np).__name__}")
        _one_of("driver_log_verbosity", driver_log_verbosity, get_args(Verbosity))
        _one_of("gpu_pinning", gpu_pinning, get_args(Pinning))
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
        for module in ship_modules:
            if not isinstance(module, ModuleType):
                raise TypeError(
                    f"ship_modules must hold modules, not {type(module).__name__}: "
                    "import mymodule, then ship_modules=[mymodule]"
                )
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
        self._warn_pickle_bytes = warn_pickle_bytes
        self._spark = spark
        self._runs: dict[threading.Event, Driver | None] = {}

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
            DataError: a dataset among the arguments cannot be read, has nulls, or has a column that
                cannot become a tensor.
            SerializationError: ``main`` or an argument cannot be pickled; names the object and the
                way to it.
            LaunchError: the ranks could not be started, or Spark ended them.
            CancelledError: :meth:`cancel` was called.
            HangError: the ranks made no progress for ``hang_timeout`` seconds.
            RankFailedError: a rank died without a Python exception.
            Exception: what ``main`` raised on the first rank that failed, with a RankFailedError
                as its ``__cause__`` that holds the remote traceback.
        """
        if not callable(main):
            raise TypeError(
                f"main must be callable, not {type(main).__name__}: pass the function itself, "
                "run(train), not what it returns, run(train())"
            )
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
            )
            with datasets.prepared(
                job,
                launcher,
                data_dir=self._data_dir,
                data_limit=self._data_limit,
                ship_modules=self._ship_modules,
            ) as job:
                driver = Driver(job, launcher, TerminalSink(size), cancelled)
                self._runs[cancelled] = driver
                return driver.run()
        finally:
            del self._runs[cancelled]

    def __getstate__(self) -> dict[str, Any]:
        # A main that is a method of an object that holds its runner has to be picklable.
        return {**self.__dict__, "_runs": {}, "_ship_modules": ()}

    def cancel(self) -> None:
        """End the run that is under way, from another thread; without one nothing happens.

        :meth:`run` then raises :class:`~horovod_runner.errors.CancelledError`, when all ranks are
        gone.
        """
        for cancelled, driver in list(self._runs.items()):
            cancelled.set()
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
        spark = self._spark or find_session()
        notice = TerminalSink(1).notice
        return SparkLauncher(spark, self._slot_timeout, notice, cancelled, Deputy)


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {listed}, not {value!r}")
