"""Lets code that imports Databricks' ``sparkdl`` run with this package instead.

The public name of :mod:`horovod_runner.integrations.sparkdl`.
"""

from horovod_runner.integrations.sparkdl import install, is_installed

__all__ = ["install", "is_installed"]
