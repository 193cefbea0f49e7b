"""Datasets for the ranks of a run.

>>> from horovod_runner.data import parquet
>>> HorovodRunner(np=4).run(main, train=df, valid=parquet("s3://bucket/valid/"))

A Spark DataFrame, a pandas or Arrow table and what is listed here arrive in ``main`` as a
:class:`Shard`, which gives each rank its part of every batch.
"""

from __future__ import annotations

from horovod_runner.data.feed import Feed
from horovod_runner.data.images import Image
from horovod_runner.data.shard import Shard
from horovod_runner.data.sources import Source, delta, parquet, petastorm

__all__ = ["Feed", "Image", "Shard", "Source", "delta", "parquet", "petastorm"]
