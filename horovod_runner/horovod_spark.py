"""Lets code that was written for ``horovod.spark`` run with this package instead.

The public name of :mod:`horovod_runner.integrations.horovod_spark`.
"""

from horovod_runner.integrations.horovod_spark import install

__all__ = ["install"]
