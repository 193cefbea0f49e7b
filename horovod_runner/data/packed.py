"""A Spark DataFrame whose rows are packed once, for several runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from horovod_runner.common.arguments import suggest_arguments
from horovod_runner.common.options import ALIASES, DataConfig, where_options_are
from horovod_runner.common.spark_session import is_on_this_machine
from horovod_runner.data.read import staging
from horovod_runner.data.sources import DataFrameSource, Source, Staged, source_of
from horovod_runner.errors import DataError
from horovod_runner.host.scratch import RunFolder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@contextmanager
@suggest_arguments(ALIASES, where_options_are)
def packed(
    dataframe: DataFrame,
    *,
    shared_dir: str | os.PathLike[str] | None = None,
    disk_limit: int | None = None,
) -> Iterator[Source]:
    """Pack the rows of a Spark DataFrame once, for all runs inside a ``with`` block.

    Without it each run executes the DataFrame's query again. The rows are removed at the end of the
    block, so wait for the runs that use them first.

        with packed(df) as rows:
            handles = [runner.start(train, data=rows, rate=rate) for rate in (0.01, 0.1)]
            losses = [handle.result() for handle in handles]

    Args:
        dataframe: the Spark DataFrame. Select the columns that are needed first: all are packed.
        shared_dir: a folder that the driver and all executors share. None is enough where Spark is
            on this machine (``local[n]``).
        disk_limit: how many bytes the rows may take; None for all that is free except 1 GiB, or a
            twentieth of the disk if that is less.

    Yields:
        A dataset, for an argument of :meth:`HorovodRunner.run` and ``start``.

    Raises:
        TypeError: it is not a Spark DataFrame.
        ValueError: ``shared_dir`` is not a folder, or ``disk_limit`` is below 0.
        DataError: a column cannot become a tensor or has nulls, there are no rows, there is too
            little room, or ``shared_dir`` is missing on a cluster.
    """
    if not isinstance(source_of(dataframe), DataFrameSource):
        kind = f"{type(dataframe).__module__}.{type(dataframe).__qualname__}"
        raise TypeError(
            f"packed takes a Spark DataFrame, not {kind}: pass other datasets to the run as they "
            "are"
        )
    config = DataConfig(shared_dir=shared_dir, disk_limit=disk_limit)
    if config.shared_dir is None and not is_on_this_machine(dataframe.sparkSession):
        raise DataError(
            "packed(df) writes the rows to a folder, and the executors of this cluster may not see "
            "the driver's temporary folder: name one that all of them share, "
            "packed(df, shared_dir='/Volumes/...'), or write the rows to Parquet files once and "
            "pass parquet(path) to the runs"
        )
    parent = None if config.shared_dir is None else Path(config.shared_dir)
    with RunFolder(f"packed-{uuid4().hex[:8]}", parent, limit=config.disk_limit) as folder:
        rows = Staged(staging.stage(dataframe, folder.path))
        rows.prepare("packed(df)", None)  # refuses a DataFrame without rows
        yield rows
