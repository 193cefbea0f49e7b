"""Run a training function as Horovod ranks: in one Spark barrier job, or on this machine.

>>> from horovod_runner import HorovodRunner
>>> HorovodRunner(np=-1).run(main, learning_rate=0.1)  # this machine, no Spark
>>> HorovodRunner(np=4).run(main, learning_rate=0.1)   # four slots of the Spark cluster
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from horovod_runner.context import (
        check_sync,
        current_attempt,
        load_checkpoint,
        log_to_driver,
        report,
        save_checkpoint,
    )
    from horovod_runner.errors import (
        CancelledError,
        ChannelError,
        CheckpointError,
        DataError,
        GpuError,
        HangError,
        HorovodRunnerError,
        InstallError,
        LaunchError,
        RankFailedError,
        SerializationError,
        SlotError,
        SyncError,
    )
    from horovod_runner.runner import HorovodRunner

__all__ = [
    "CancelledError",
    "ChannelError",
    "CheckpointError",
    "DataError",
    "GpuError",
    "HangError",
    "HorovodRunner",
    "HorovodRunnerError",
    "InstallError",
    "LaunchError",
    "RankFailedError",
    "SerializationError",
    "SlotError",
    "SyncError",
    "check_sync",
    "current_attempt",
    "load_checkpoint",
    "log_to_driver",
    "report",
    "save_checkpoint",
]

_HOMES = {
    "HorovodRunner": "runner",
    "check_sync": "context",
    "current_attempt": "context",
    "load_checkpoint": "context",
    "log_to_driver": "context",
    "report": "context",
    "save_checkpoint": "context",
}


def __getattr__(name: str) -> Any:
    # Lazily, so that importing the package in a worker imports no more than the worker needs.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = _HOMES.get(name, "errors")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
