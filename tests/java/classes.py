"""Use of Spark as in the tests, so that its Java keeps the classes when it ends.

The Makefile runs it:
SPARK_SUBMIT_OPTS=-XX:ArchiveClassesAtExit=FILE spark-submit tests/java/classes.py
"""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

from pyspark.sql import SparkSession


def numbers(batches: Iterator[Any]) -> Iterator[Any]:
    """As they came."""
    yield from batches


with SparkSession.builder.getOrCreate() as spark, TemporaryDirectory() as folder:
    spark.range(4).repartition(2).mapInArrow(numbers, "id long").toPandas()
    spark.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(numbers).collect()
    frame = spark.createDataFrame([(1, "a", [1.0])] * 4, "id int, text string, x array<double>")
    frame.write.parquet(f"{folder}/rows")
    spark.read.parquet(f"{folder}/rows").filter("id > 0").groupBy("text").count().collect()
