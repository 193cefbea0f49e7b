"""What is to be known of a Spark session, and the Python that its tasks run."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def conf_of(spark: SparkSession, name: str) -> str | None:
    """A setting of the session's; Connect tells those of the server's SparkContext as well."""
    value = spark.conf.get(name, None)
    return None if value is None else str(value)


def spark_context(spark: SparkSession) -> Any:
    """The SparkContext of a classic session; None on Spark Connect, which has none."""
    try:
        return spark.sparkContext
    except Exception:
        return None


def map_in_arrow(
    frame: DataFrame, function: Callable[[Any], Any], schema: str, **options: Any
) -> DataFrame:
    """``frame.mapInArrow(...)``, run by this Python.

    PySpark 4 warns of pandas 3 at each such call, although Arrow's batches never meet pandas.
    """
    with _own_python(frame.sparkSession), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
        return frame.mapInArrow(function, schema, **options)


@contextmanager
def _own_python(spark: SparkSession) -> Iterator[None]:
    """On ``local[n]``, let tasks of what is made here run this interpreter, if the user named none.

    Left alone Spark runs the first ``python3`` on PATH, which is another environment whenever this
    one was not activated.
    """
    context = spark_context(spark)
    named = "PYSPARK_PYTHON" in os.environ or conf_of(spark, "spark.pyspark.python")
    if context is None or named or not context.master.startswith("local"):
        yield
        return
    before = context.pythonExec
    context.pythonExec = sys.executable
    try:
        yield
    finally:
        context.pythonExec = before
