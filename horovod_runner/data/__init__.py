"""Datasets for the ranks of a run: each rank gets its part of every batch.

>>> from horovod_runner.data import parquet
>>> HorovodRunner(np=4).run(main, train=df, valid=parquet("s3://bucket/valid/"))

A Spark DataFrame, a pandas or Arrow table, and the sources of this module arrive in ``main`` as a
:class:`Shard`. `sources` prepares them on the driver, `packed` makes one for several runs, and
`shard` is what ``main`` uses. All may import the rooms below them: `read` (where rows come from)
and `feed` (rows to batches), which do not import each other, and `pack` (rows on disk), which
imports neither. All of them raise DataError for data that they cannot use, and for a full disk.
"""

from __future__ import annotations

from horovod_runner.data.feed.evaluation import evaluate
from horovod_runner.data.feed.feed import Feed
from horovod_runner.data.pack.images import Image
from horovod_runner.data.packed import packed
from horovod_runner.data.shard import Shard
from horovod_runner.data.sources import Source, delta, parquet, petastorm

__all__ = [
    "Feed",
    "Image",
    "Shard",
    "Source",
    "delta",
    "evaluate",
    "packed",
    "parquet",
    "petastorm",
]
