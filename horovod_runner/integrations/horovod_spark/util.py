"""Functions of ``horovod.spark.common.util`` and ``horovod.spark.task`` that users call."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from horovod_runner.common.spark_session import quoted
from horovod_runner.host.gpus import visible_gpus
from horovod_runner.integrations.training.rows import only, split

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from horovod_runner.integrations.horovod_spark.store import FilesystemStore

__all__ = ["get_available_devices", "prepare_data"]

_numbers = itertools.count()


def get_available_devices() -> list[str]:
    """The addresses of this rank's GPUs, as in CUDA_VISIBLE_DEVICES; empty without one."""
    shown, own = visible_gpus(), os.environ.get("HOROVOD_RUNNER_DEVICE")
    return [] if own is None else [shown[int(own)]]


@contextmanager
def prepare_data(  # noqa: PLR0917 - as Horovod's
    num_processes: int,
    store: FilesystemStore,
    df: DataFrame,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    validation: Any = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
) -> Iterator[int]:
    """Write rows into a store as Parquet files, for ``fit_on_parquet``.

    Args:
        num_processes: how many ranks will read them.
        store: where.
        df: the rows.
        label_columns: the labels.
        feature_columns: the features; vectors become arrays.
        validation: a fraction of the rows, or a column that is True in rows to validate with.
        sample_weight_col: the column of the rows' weights.
        compress_sparse: not used.
        partitions_per_process: how many files there are for each rank, at most.
        verbose: not used.

    Returns:
        A context; its value is the number to give to ``fit_on_parquet``, as ``dataset_idx``.
    """
    del compress_sparse, verbose
    number = next(_numbers)
    weight = [] if sample_weight_col is None else [sample_weight_col]
    columns = [*feature_columns, *label_columns, *weight]
    train, valid = split(df, validation, seed=0)
    for rows, path in (
        (train, store.get_train_data_path(number)),
        (valid, store.get_val_data_path(number)),
    ):
        if rows is not None:
            write_parquet(only(rows, columns), path, num_processes * partitions_per_process)
    yield number


def write_parquet(df: DataFrame, path: str, parts: int) -> None:
    """Write rows as at most so many Parquet files."""
    _without_vectors(df).coalesce(max(1, parts)).write.mode("overwrite").parquet(path)


def _without_vectors(df: DataFrame) -> DataFrame:
    """A DataFrame whose vectors of Spark ML are arrays, which Parquet has."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import functions

    columns = []
    for field in df.schema:
        column = functions.col(quoted(field.name))
        is_vector = isinstance(field.dataType, VectorUDT)
        columns.append(vector_to_array(column).alias(field.name) if is_vector else column)
    return df.select(*columns)


def doubles_of(df: DataFrame) -> dict[str, bool]:
    """The columns of doubles, by name: whether each row has one number, and not a list of them."""
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import ArrayType, DoubleType

    def has_doubles(type_: Any) -> bool:
        if isinstance(type_, ArrayType):
            return has_doubles(type_.elementType)
        return isinstance(type_, DoubleType | VectorUDT)

    return {
        field.name: isinstance(field.dataType, DoubleType)
        for field in df.schema
        if has_doubles(field.dataType)
    }


def metadata_of(df: DataFrame) -> dict[str, dict[str, Any]]:
    """What a model remembers of the columns: the type of each, by name.

    As in Horovod, "spark_data_type" is a class: of Spark's types, or of Spark ML's vectors.
    """
    from pyspark.ml.linalg import DenseVector, VectorUDT

    return {
        field.name: {
            "spark_data_type": DenseVector
            if isinstance(field.dataType, VectorUDT)
            else type(field.dataType)
        }
        for field in df.schema
    }


#: Horovod's name, which users' tests call.
_get_metadata = metadata_of
