"""Makes the job of a run: pickles main and its arguments, and adds the driver's settings."""

from __future__ import annotations

import linecache
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from horovod_runner.common.options import STALL_CHECK, CpuCollectives, Options
from horovod_runner.common.text import bytes_text
from horovod_runner.errors import SerializationError
from horovod_runner.host import network, software
from horovod_runner.run import pickling
from horovod_runner.run.import_hooks import IMPORT_HOOKS
from horovod_runner.wire.job import Job
from horovod_runner.worker.imports import replacements
from horovod_runner.worker.interpreter import settings

# Variables of the driver with these prefixes are set for every rank: the user's settings of Horovod
# and of the libraries below it.
_FORWARDED = ("HOROVOD_", "NCCL_", "GLOO_", "TORCH_DISTRIBUTED_", "MPIR_CVAR_", "UCX_", "FI_")
_CELL_CHARACTERS = 1 << 18  # of a notebook's source code, for tracebacks


def make_job(
    main: Callable[..., Any],
    kwargs: Mapping[str, Any],
    size: int,
    options: Options,
    *,
    all_values: bool = False,
) -> Job:
    """Pickle a function and its arguments into a job.

    Warns (UserWarning) where the pickle exceeds ``warn_pickle_bytes``.

    Raises:
        SerializationError: something that ``main`` captures or is given cannot be pickled, or is
            too large.
    """
    ship_modules = options.cluster_config.ship_modules
    name = getattr(main, "__qualname__", repr(main))
    try:
        pickled = pickling.pickle_call(main, dict(kwargs), ship_modules)
    except Exception as error:
        culprit = (
            pickling.find_culprit(main, kwargs, ship_modules) or f"{type(error).__name__}: {error}"
        )
        raise SerializationError(
            f"{name} and its arguments are sent to the ranks by pickle, and something in them "
            f"cannot be pickled: {culprit}"
        ) from error
    if len(pickled) > min(options.debug_config.warn_pickle_bytes, pickling.MAX_BYTES):
        large, largest = bytes_text(len(pickled)), pickling.find_largest(main, kwargs)
        problem = (
            f"{name} and its arguments take {large} as a pickle, and every rank receives all of "
            f"it. The largest part is {largest}. Write data to files that the ranks can read, and "
            "load it inside main"
        )
        if len(pickled) > pickling.MAX_BYTES:
            raise SerializationError(f"{problem}: a task can receive at most 2 GB.")
        # The caller of HorovodRunner.run, above this function and two of handle.py.
        warnings.warn(f"{problem}, or raise warn_pickle_bytes.", stacklevel=5)
    forwarded = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_FORWARDED) and "RENDEZVOUS" not in name
    }
    forwarded = {STALL_CHECK: str(options.stall_check_seconds), **forwarded}
    environment = {**forwarded, **options.env}
    log_settings, filters = settings.taken()
    return Job(
        run_id=os.urandom(4).hex(),
        size=size,
        options=options.for_ranks(),
        main=pickled,
        environment=environment,
        path=tuple(sys.path),
        argv=tuple(getattr(sys, "argv", ())),
        directory=_directory(),
        host=network.host_id(),
        logs=log_settings,
        warning_filters=filters,
        controller=_controller(options.cluster_config.cpu_collectives, environment),
        software=software.installed(),
        replacements=replacements.installed(),
        import_hooks=IMPORT_HOOKS,
        all_values=all_values,
        sources=_cells(),
    )


def _directory() -> str:
    """The working directory; empty if it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _controller(wanted: CpuCollectives, environment: Mapping[str, str]) -> CpuCollectives:
    """The option; where it is "auto", Horovod's variable HOROVOD_CONTROLLER."""
    choices: dict[str, CpuCollectives] = {"": wanted, "gloo": "gloo", "mpi": "mpi"}
    name = environment.get("HOROVOD_CONTROLLER", "")
    if name.lower() not in choices:
        raise ValueError(f"HOROVOD_CONTROLLER must be gloo or mpi, not {name!r}; or leave it unset")
    return choices[name.lower()] if wanted == "auto" else wanted


def _cells() -> dict[str, str]:
    """The source of a notebook's last executed cells, by their names in tracebacks."""
    cells: dict[str, str] = {}
    room = _CELL_CHARACTERS
    for name, entry in reversed([*linecache.cache.items()]):
        # IPython enters cells without a time; other packages use names like "<string>".
        made_up = name.startswith("<") and not name.startswith("<ipython")
        if len(entry) != 4 or entry[1] is not None or made_up or os.path.exists(name):
            continue
        text = "".join(entry[2])
        room -= len(text)
        if room < 0:
            break
        cells[name] = text
    return cells
