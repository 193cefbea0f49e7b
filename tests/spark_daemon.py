"""Spark's daemon of Python workers, but for the search for garbage after each task.

With pandas and torch imported that takes 0.3 s each time: 7% of what all tests used of the CPU.
"""

from __future__ import annotations

import gc

from pyspark import daemon

if __name__ == "__main__":
    gc.collect = lambda generation=2: 0
    daemon.manager()
