"""All Keras callbacks of this package.

The public name of :mod:`horovod_runner.integrations.keras.callbacks`.
"""

from horovod_runner.integrations.keras.callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    EarlyStopping,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    LogCallback,
    MetricAverageCallback,
    ReduceLROnPlateau,
    ReportCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "EarlyStopping",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LogCallback",
    "MetricAverageCallback",
    "ReduceLROnPlateau",
    "ReportCallback",
]
