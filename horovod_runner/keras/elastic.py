"""Horovod Elastic for Keras 3.

The public name of :mod:`horovod_runner.integrations.keras.elastic`.
"""

from horovod_runner.integrations.keras.elastic import (
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
