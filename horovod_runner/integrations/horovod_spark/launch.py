"""``horovod.spark.run``: a function on every rank, and the values of all."""

from __future__ import annotations

import functools
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import Any, Final

from horovod_runner.common.options import grouped
from horovod_runner.run.runner import HorovodRunner

__all__ = ["run", "run_elastic"]

_RANKS: Final = re.compile(r"^\[([\d, -]+|\d+ ranks)\] ", re.MULTILINE)


def run(  # noqa: PLR0917 - as Horovod's
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | tuple[Any, Any] | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    **options: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank, as ``horovod.spark.run``.

    Args:
        fn: the function; it calls ``hvd.init()`` itself.
        args: its positional arguments.
        kwargs: its other arguments.
        num_proc: how many ranks; None: as many as Spark has slots, which is refused under dynamic
            allocation. A pair makes the run elastic: the least and the most ranks.
        start_timeout: seconds to wait for slots.
        use_mpi: whether CPU collectives go by MPI.
        use_gloo: whether they go by Gloo.
        extra_mpi_args: not supported, for nothing is started by mpirun.
        env: environment variables for the ranks: those that differ from this process's.
        stdout: where the ranks' output goes, in lines that begin with ``[0]<stdout>:``; None:
            ``sys.stdout``.
        stderr: where the ranks' errors go, in lines that begin with ``[0]<stderr>:``; None:
            ``sys.stderr``.
        verbose: 0 shows no progress bar.
        nics: not needed: the network is found.
        prefix_output_with_timestamp: not supported; lines begin with the rank.
        executable: not supported, but for this interpreter.
        options: options of HorovodRunner and its groups, such as ``max_restarts``.

    Returns:
        The values, in the order of the ranks.

    Raises:
        ValueError: an argument has no counterpart here.
        Exception: as :meth:`horovod_runner.HorovodRunner.run` raises it.
    """
    del nics, prefix_output_with_timestamp
    runner = runner_of(
        num_proc=num_proc,
        start_timeout=start_timeout,
        use_mpi=use_mpi,
        use_gloo=use_gloo,
        extra_mpi_args=extra_mpi_args,
        env=env,
        verbose=verbose,
        executable=executable,
        **options,
    )
    call = functools.partial(fn, *args, **(kwargs or {}))
    functools.update_wrapper(call, fn)
    with output_to(stdout, stderr):
        return runner.run_all(call)


def run_elastic(  # noqa: PLR0917 - as Horovod's
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    **options: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank of an elastic run: ranks may be lost, and come.

    ``fn`` is called again on all ranks when their number changes, in new processes. What it has
    committed comes back: with ``hvd.elastic.run``, or :func:`horovod_runner.load_checkpoint`.

    The arguments are those of :func:`run`, and these:

    - ``num_proc``: how many ranks, if a limit is None; None: as many as Spark has cores.
    - ``min_num_proc`` and ``max_num_proc``: the least and the most ranks; ``min_np`` and ``max_np``
      are older names.
    - ``start_timeout``: seconds to wait for ``max_num_proc`` slots. None begins with those that the
      cluster has.
    - ``elastic_timeout``: without effect: a relaunch waits 60 s for the least number of slots.
    - ``reset_limit``: how often ``fn`` is called again after a loss, and how often after an error;
      None: 100 times.

    Returns:
        The values of the last launch's ranks, in their order.

    Raises:
        ValueError: the least number of ranks is above the most, or there is none.
        Exception: as :meth:`horovod_runner.HorovodRunner.run` raises it.
    """
    del elastic_timeout, nics, prefix_output_with_timestamp
    least = min_num_proc if min_np is None else min_np
    most = max_num_proc if max_np is None else max_np
    if num_proc is None and None in (least, most):
        num_proc = cores()
    restarts = {"max_restarts": 100 if reset_limit is None else reset_limit}
    return run(
        fn,
        args,
        kwargs,
        (num_proc if least is None else least, num_proc if most is None else most),
        start_timeout,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        **{**restarts, **options},
    )


def cores() -> int:
    """How many cores the cluster has, for a number of ranks that is not given."""
    from horovod_runner.common.spark_session import spark_context
    from horovod_runner.launchers.sessions import find_session

    context = spark_context(find_session())
    return 1 if context is None else int(context.defaultParallelism)


def runner_of(
    *,
    num_proc: int | tuple[Any, Any] | None,
    env: Mapping[str, str] | None = None,
    own_env: Mapping[str, str] | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    verbose: int = 1,
    executable: str | None = None,
    **options: Any,
) -> HorovodRunner:
    """The HorovodRunner for arguments of :func:`run`; the ranks get all variables of ``own_env``.

    Raises:
        TypeError: there is no option of a name.
        ValueError: an argument has no counterpart here.
    """
    _refuse("extra_mpi_args", extra_mpi_args, "set MPI's options as environment variables, env=")
    if executable != sys.executable:
        _refuse("executable", executable, "set PYSPARK_PYTHON, or spark.pyspark.python")
    # Callers pass a copy of all variables, which are not those of other hosts.
    changed = {name: value for name, value in (env or {}).items() if os.environ.get(name) != value}
    arguments = grouped(
        {
            "np": 0 if num_proc is None else num_proc,
            "driver_log_verbosity": "all",
            "progress": verbose > 0,
            "env": {**changed, **(own_env or {})},
            "slot_timeout": start_timeout,
            "cpu_collectives": "mpi" if use_mpi else "gloo" if use_gloo else "auto",
            **options,
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # np=0 is no mistake here
        return HorovodRunner(**arguments)


def _refuse(name: str, value: object, instead: str) -> None:
    if value is not None:
        raise ValueError(f"{name}={value!r} has no counterpart in horovod_runner: {instead}")


def output_to(stdout: Any, stderr: Any) -> ExitStack:
    """A context in which output goes to some streams; None leaves a stream as it is."""
    stack = ExitStack()
    if stdout is not None and stdout is not sys.stdout:
        stack.enter_context(redirect_stdout(_Prefixed(stdout, "stdout")))
    if stderr is not None and stderr is not sys.stderr:
        stack.enter_context(redirect_stderr(_Prefixed(stderr, "stderr")))
    return stack


class _Prefixed(io.TextIOBase):
    """A stream whose lines begin as Horovod's do: ``[0]<stdout>:`` in place of ``[0] ``."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream = stream
        self._prefix = rf"[\1]<{name}>:"

    def write(self, text: str) -> int:
        # Text always consists of whole lines here.
        self._stream.write(_RANKS.sub(self._prefix, text))
        return len(text)

    def flush(self) -> None:
        getattr(self._stream, "flush", lambda: None)()
