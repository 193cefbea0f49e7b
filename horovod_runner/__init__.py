"""Run a training function as Horovod ranks: in one Spark barrier job, or on this machine.

>>> from horovod_runner import HorovodRunner
>>> HorovodRunner(np=-1).run(main, learning_rate=0.1)  # this machine, no Spark
>>> HorovodRunner(np=4).run(main, learning_rate=0.1)   # four slots of the Spark cluster
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from horovod_runner.common.limits import Limits
    from horovod_runner.common.options import (
        CheckpointConfig,
        ClusterConfig,
        DataConfig,
        DebugConfig,
    )
    from horovod_runner.data.scoring.predict import predict
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
        PredictionError,
        RankFailedError,
        RanksChangedError,
        SerializationError,
        SlotError,
        SyncError,
    )
    from horovod_runner.integrations.loops.checkpointed import Checkpointed, checkpointed, epochs
    from horovod_runner.integrations.loops.prepare import prepare
    from horovod_runner.integrations.training.fit import fit
    from horovod_runner.integrations.training.fitted import Fitted
    from horovod_runner.results.saved_run import load_run
    from horovod_runner.run.handle import RunHandle
    from horovod_runner.run.runner import HorovodRunner
    from horovod_runner.worker.agreement import agree
    from horovod_runner.worker.api import (
        check_weights,
        commit,
        current_attempt,
        load_checkpoint,
        log_to_driver,
        report,
        save_checkpoint,
    )

__all__ = [
    "CancelledError",
    "ChannelError",
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointed",
    "ClusterConfig",
    "DataConfig",
    "DataError",
    "DebugConfig",
    "Fitted",
    "GpuError",
    "HangError",
    "HorovodRunner",
    "HorovodRunnerError",
    "InstallError",
    "LaunchError",
    "Limits",
    "PredictionError",
    "RankFailedError",
    "RanksChangedError",
    "RunHandle",
    "SerializationError",
    "SlotError",
    "SyncError",
    "agree",
    "check_weights",
    "checkpointed",
    "commit",
    "current_attempt",
    "epochs",
    "fit",
    "load_checkpoint",
    "load_run",
    "log_to_driver",
    "predict",
    "prepare",
    "report",
    "save_checkpoint",
]

_HOMES = {
    "CheckpointConfig": "common.options",
    "Checkpointed": "integrations.loops.checkpointed",
    "ClusterConfig": "common.options",
    "DataConfig": "common.options",
    "DebugConfig": "common.options",
    "Fitted": "integrations.training.fitted",
    "HorovodRunner": "run.runner",
    "Limits": "common.limits",
    "RunHandle": "run.handle",
    "agree": "worker.agreement",
    "check_weights": "worker.api",
    "checkpointed": "integrations.loops.checkpointed",
    "commit": "worker.api",
    "current_attempt": "worker.api",
    "epochs": "integrations.loops.checkpointed",
    "fit": "integrations.training.fit",
    "load_checkpoint": "worker.api",
    "load_run": "results.saved_run",
    "log_to_driver": "worker.api",
    "predict": "data.scoring.predict",
    "prepare": "integrations.loops.prepare",
    "report": "worker.api",
    "save_checkpoint": "worker.api",
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
