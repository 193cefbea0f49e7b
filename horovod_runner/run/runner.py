"""HorovodRunner, the public call."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from horovod_runner.common.arguments import did_you_mean, meant, suggest_fields
from horovod_runner.common.options import (
    ALIASES,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    DebugConfig,
    Options,
    where_options_are,
)
from horovod_runner.results.run import Run
from horovod_runner.run.handle import RunHandle, Runs
from horovod_runner.sinks import EVENTS, Sink

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@suggest_fields(ALIASES, where_options_are)
class HorovodRunner:
    """Runs a function as Horovod ranks.

    ``np``, ``driver_log_verbosity`` and :meth:`run` are those of Databricks' HorovodRunner; the
    other arguments are this package's.

    Args:
        np: how many ranks. Above 0: the tasks of one Spark barrier job, all started together; each
            rank takes one task slot. Below 0: ``-np`` child processes on this machine, without
            Spark. 0: as many as Spark has slots (deprecated: the number depends on which executors
            have registered). A pair, the least and the most ranks: the run goes on with those that
            are there when some go, and takes more when they come (``(2, 8)``; on this machine
            ``(-2, -8)``).
        driver_log_verbosity: "log_callback_only" shows what ``log_to_driver`` sends; "all" shows
            everything that the ranks print. With ``np`` below 0 the output is always shown. With
            more than 16 ranks, a line that several print at the same time is shown once.
        gpus_per_rank: GPUs for each rank. None takes what Spark gives a task
            (``spark.task.resource.gpu.amount``), or one each where the hosts have GPUs. Below 1,
            ranks share; 0 trains on CPUs.
        env: environment variables for the ranks.
        checkpoint_dir: where ``save_checkpoint`` writes: a path, or a URL that fsspec knows
            (``s3://``, ``gs://``, ``abfs://``, ``hdfs://``, ``dbfs:/``). Executors that do not see
            the path send their checkpoints to this machine. None: a temporary folder on this
            machine, which lasts as long as :attr:`last_run`.
        resume: whether ``load_checkpoint`` returns the latest checkpoint in ``checkpoint_dir``, if
            there is one. Otherwise a run leaves earlier runs' checkpoints alone.
        max_restarts: maximum number of relaunches from the latest checkpoint. Errors and lost
            processes or hosts are counted separately. An error that repeats at the same place
            without a newer checkpoint ends the run.
        grow_after: with a range of ``np``, the least number of seconds between the start of some
            ranks and their end in favour of more.
        progress: whether to show a progress bar of what is reported; a panel in a notebook, lines
            where there is no terminal.
        sinks: also receive output, reports and checkpoints: MLflow, TensorBoard, your own
            (:mod:`horovod_runner.sinks`).
        checkpoint_config: which checkpoints are kept.
        data_config: where the rows of datasets are cached.
        cluster_config: how the ranks are started, and what they reach each other with.
        debug_config: which mistakes are looked for, and what is recorded.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or two contradict each other.
    """

    def __init__(
        self,
        *,
        np: int | tuple[int, int],
        driver_log_verbosity: Literal["all", "log_callback_only"] = "log_callback_only",
        gpus_per_rank: float | None = None,
        env: Mapping[str, str] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        max_restarts: int = 0,
        grow_after: float = 60.0,
        progress: bool = True,
        sinks: Sequence[Sink] = (),
        checkpoint_config: CheckpointConfig | None = None,
        data_config: DataConfig | None = None,
        cluster_config: ClusterConfig | None = None,
        debug_config: DebugConfig | None = None,
    ) -> None:
        sinks = _checked_sinks(sinks)
        #: All of the above, as one frozen object.
        self.options = Options(
            np=np,
            driver_log_verbosity=driver_log_verbosity,
            gpus_per_rank=gpus_per_rank,
            env=env or {},
            checkpoint_dir=checkpoint_dir,
            resume=resume,
            max_restarts=max_restarts,
            grow_after=grow_after,
            progress=progress,
            sinks=sinks,
            checkpoint_config=checkpoint_config or CheckpointConfig(),
            data_config=data_config or DataConfig(),
            cluster_config=cluster_config or ClusterConfig(),
            debug_config=debug_config or DebugConfig(),
        )
        if np == 0:
            warnings.warn(
                "np=0 (all slots) is deprecated: the number of slots depends on which executors "
                "have registered. Give the number of ranks.",
                DeprecationWarning,
                stacklevel=3,
            )
        self._runs = Runs()

    @property
    def last_run(self) -> Run | None:
        """The run that is under way, or the last one; None before the first."""
        return self._runs.last

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call ``main(**kwargs)`` on every rank and return rank 0's value.

        ``main`` and the arguments are pickled with cloudpickle, so a function of a notebook or
        script will do; it calls ``hvd.init()`` itself. When this returns or raises, all ranks have
        ended.

        Datasets among the arguments (Spark, pandas and Arrow tables, and those of
        :mod:`horovod_runner.data`) arrive in ``main`` as a :class:`~horovod_runner.data.Shard`.

        Raises:
            TypeError: ``main`` is not callable, or not with these arguments.
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
            SyncError: the ranks' weights differ (``weight_check``).
            RankFailedError: a rank died without a Python exception.
            Exception: what ``main`` raised on the first rank that failed, with a RankFailedError
                as its ``__cause__`` that holds the remote traceback.
        """
        __tracebackhide__ = True  # IPython and pytest leave this frame out
        # In this thread: output lands in the right notebook cell, and Ctrl-C ends the run.
        return self._handle(main, kwargs).execute()

    def run_all(self, main: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Call ``main(**kwargs)`` on every rank, as :meth:`run`; return every rank's value.

        Returns:
            The values, in the order of the ranks.
        """
        __tracebackhide__ = True
        values: list[Any] = self._handle(main, kwargs, all_values=True).execute()
        return values

    def start(self, main: Callable[..., Any], **kwargs: Any) -> RunHandle:
        """Call ``main(**kwargs)`` on every rank, and return a handle at once.

        As :meth:`run`, in a thread of its own: the caller goes on while the ranks train. Several
        runs may be under way at once, where the cluster has slots for all their ranks.

            handle = runner.start(train, lr=0.1)
            handle.metrics, handle.status
            value = handle.result()

        Raises:
            TypeError: ``main`` is not callable, or not with these arguments. Everything else is
                raised by ``handle.result()``.
        """
        return self._handle(main, kwargs).start()

    def cancel(self) -> None:
        """End the runs that are under way, from another thread; without one nothing happens.

        :meth:`run` then raises :class:`~horovod_runner.errors.CancelledError`, when all ranks have
        ended.
        """
        for handle in list(self._runs.under_way):
            handle.cancel()

    def dump_stacks(self) -> None:
        """Print every rank's Python stacks, from another thread; without a run nothing happens.

        They are printed where ``run`` prints, within some seconds, also of ranks that are stuck in
        native code. The ranks continue undisturbed.
        """
        for handle in list(self._runs.under_way):
            handle.dump_stacks()

    def __repr__(self) -> str:
        from horovod_runner.results.card import runner_text

        if not hasattr(self, "options"):  # its constructor refuses an argument: for a debugger
            return object.__repr__(self)
        return runner_text(self.options, self.last_run)

    def _repr_html_(self) -> str:
        from horovod_runner.results.card import runner_html

        return runner_html(self.options, self.last_run)

    def _handle(
        self, main: Callable[..., Any], kwargs: Mapping[str, Any], *, all_values: bool = False
    ) -> RunHandle:
        if not callable(main):
            raise TypeError(
                f"main must be callable, not {type(main).__name__}: pass the function itself, "
                "run(train), not what it returns, run(train())"
            )
        _check_arguments(main, kwargs)
        return RunHandle(self.options, main, kwargs, self._runs, all_values=all_values)

    def __getstate__(self) -> dict[str, Any]:
        # main may be a method of an object that holds its runner: that object has to be picklable.
        return {"options": self.options.for_ranks(), "_runs": Runs()}


def _check_arguments(main: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError if ``main`` cannot be called with the arguments."""
    try:
        # Not that of a function inside: a decorator may pass other arguments to it.
        signature = inspect.signature(main, follow_wrapped=False)
    except (TypeError, ValueError):  # of a function in C
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        name = getattr(main, "__qualname__", type(main).__name__)
        given = ", ".join(f"{each}=..." for each in kwargs)
        parameters = signature.parameters
        free = [each for each, it in parameters.items() if it.kind in _NAMED and each not in kwargs]
        unknown = next((each for each in kwargs if each not in parameters), None)
        text = "" if unknown is None else meant(unknown, free)
        # Without default values, which may be secrets.
        plain = (each.replace(default=each.empty) for each in parameters.values())
        names = ", ".join(map(str, plain))
        raise TypeError(
            f"main cannot be called as {name}({given}): {error}.{did_you_mean(text)} Its "
            f"parameters are ({names}); run(main, name=value) passes them by name"
        ) from None


def _checked_sinks(given: Iterable[Sink]) -> tuple[Sink, ...]:
    if isinstance(given, str):
        raise TypeError(f"sinks must hold objects, and {given!r} is a string: sinks=[MLflowSink()]")
    sinks = tuple(given)
    for sink in sinks:
        if isinstance(sink, type):
            name = sink.__name__
            raise TypeError(f"sinks=[{name}]: that is the class; give an object, {name}(...)")
        if not any(hasattr(sink, event) for event in EVENTS):
            raise TypeError(
                f"sinks must hold sinks (horovod_runner.sinks.Sink), and {sink!r} has none of "
                f"the methods {', '.join(EVENTS)}"
            )
    return sinks
