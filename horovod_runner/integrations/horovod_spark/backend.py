"""Backends of ``horovod.spark.common.backend``: where an estimator's training function runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

from horovod_runner.integrations.horovod_spark import launch
from horovod_runner.run.runner import HorovodRunner

__all__ = ["Backend", "SparkBackend"]

_DISPLAY: Final = ("nics", "prefix_output_with_timestamp", "stderr", "stdout")


class Backend:
    """Runs an estimator's training function somewhere; base of backends of your own."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank.

        Args:
            fn: the function; it calls ``hvd.init()`` itself.
            args: its positional arguments.
            kwargs: its other arguments.
            env: environment variables for the ranks.

        Returns:
            The values, in the order of the ranks.
        """
        raise NotImplementedError

    def num_processes(self) -> int:
        """How many ranks there are."""
        raise NotImplementedError


class SparkBackend(Backend):
    """Runs the training function as a HorovodRunner's ranks.

    Args:
        num_proc: how many ranks; None: as many as Spark has slots.
        env: environment variables for the ranks: those that differ from this process's.
        options: the other arguments of `launch.run`, and options of HorovodRunner such as
            ``max_restarts``.

    Subclasses of the user's read and write Horovod's attributes: ``_num_proc``, ``_env`` and
    ``_kwargs``, which has the options.
    """

    def __init__(
        self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        self._num_proc = num_proc
        self._env = env
        self._kwargs = options

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """See :class:`Backend`."""
        options = {"own_env": env, **self._kwargs}
        return launch.run(fn, args, kwargs, self._num_proc, env=self._env, **options)

    def runner(self, env: Mapping[str, str], **options: Any) -> HorovodRunner:
        """The HorovodRunner of this backend, with variables for the ranks and further options."""
        shared = {name: value for name, value in self._kwargs.items() if name not in _DISPLAY}
        options = {"own_env": env, **shared, **options}
        return launch.runner_of(num_proc=self._num_proc, env=self._env, **options)

    def output(self) -> ExitStack:
        """A context in which the ranks' output goes where the backend's arguments say."""
        return launch.output_to(self._kwargs.get("stdout"), self._kwargs.get("stderr"))

    def num_processes(self) -> int:
        """How many ranks there are; the cores of the cluster where no number was given."""
        return launch.cores() if self._num_proc is None else abs(self._num_proc)
