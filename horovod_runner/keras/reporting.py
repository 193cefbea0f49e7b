"""The Keras callbacks that report to the driver.

The public name of :mod:`horovod_runner.integrations.keras.reporting`.
"""

from horovod_runner.integrations.keras.reporting import LogCallback, ReportCallback

__all__ = ["LogCallback", "ReportCallback"]
