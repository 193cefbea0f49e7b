"""Spark's daemon of Python workers, but lighter: for sessions that many tests share.

A worker does not search for garbage after each task, which takes 0.3 s with pandas and torch
imported: 7% of what all tests used of the CPU. And it is forked with what a task imports.
"""

from __future__ import annotations

import gc

import pyspark.sql.pandas.types
import pyspark.worker  # noqa: F401 - for the workers, as the others
from pyspark import daemon

import horovod_runner.launchers.spark_task  # noqa: F401
from tests.preload import preload_what_tests_import

if __name__ == "__main__":
    preload_what_tests_import()
    gc.collect = lambda generation=2: 0
    gc.freeze()
    daemon.manager()
