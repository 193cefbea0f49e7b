"""All Keras callbacks of this package: Horovod's, and those that report to the driver.

Horovod's callbacks run collectives, so every rank must have them in ``model.fit(callbacks=[...])``.
"""

from __future__ import annotations

from horovod_runner.integrations.keras.collective_callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    EarlyStopping,
    MetricAverageCallback,
    ReduceLROnPlateau,
)
from horovod_runner.integrations.keras.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from horovod_runner.integrations.keras.reporting import LogCallback, ReportCallback

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
