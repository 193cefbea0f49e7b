"""``horovod.spark.run``: a function on every rank, and the values of all."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import Any, NoReturn

from horovod_runner.options import grouped
from horovod_runner.runner import HorovodRunner

__all__ = ["run", "run_elastic"]


def run(  # noqa: PLR0917 - as Horovod's
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
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
        num_proc: how many ranks; None: as many as Spark has slots.
        start_timeout: seconds to wait for slots.
        use_mpi: whether CPU collectives go by MPI.
        use_gloo: whether they go by Gloo.
        extra_mpi_args: not supported, for nothing is started by mpirun.
        env: environment variables for the ranks: those that differ from this process's.
        stdout: where the ranks' output goes; None: ``sys.stdout``.
        stderr: where the ranks' errors go; None: ``sys.stderr``.
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


def run_elastic(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse to run: the number of ranks cannot change during a run yet.

    Raises:
        NotImplementedError: always; says what to use.
    """
    raise NotImplementedError(
        "horovod.spark.run_elastic changes the number of ranks during a run, and this package "
        "cannot do that yet. HorovodRunner(np=4, max_restarts=3) relaunches a failed run from its "
        "latest checkpoint (horovod_runner.save_checkpoint, load_checkpoint)"
    )


def runner_of(
    *,
    num_proc: int | None,
    env: Mapping[str, str] | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    verbose: int = 1,
    executable: str | None = None,
    **options: Any,
) -> HorovodRunner:
    """The HorovodRunner for arguments of :func:`run`.

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
            "env": changed,
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
        stack.enter_context(redirect_stdout(stdout))
    if stderr is not None and stderr is not sys.stderr:
        stack.enter_context(redirect_stderr(stderr))
    return stack
