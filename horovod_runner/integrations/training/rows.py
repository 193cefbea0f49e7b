"""The rows of a fit: split, reduced to the columns that are read, packed once for several fits."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from horovod_runner.common.spark_session import quoted
from horovod_runner.data.read import staging
from horovod_runner.data.sources import DataFrameSource, Staged
from horovod_runner.host.scratch import RunFolder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """The rows of a fit."""

    train: DataFrame
    valid: DataFrame | None = None  # None without validation
    packed: Mapping[str, Staged] | None = None  # both; None before they are packed

    def datasets(self, columns: Iterable[str]) -> dict[str, Any]:
        """The rows as arguments of ``run``, with some columns."""
        if self.packed is not None:
            return dict(self.packed)
        return {
            name: DataFrameSource(dataframe, columns)
            for name, dataframe in self.dataframes(columns).items()
        }

    def dataframes(self, columns: Iterable[str]) -> dict[str, DataFrame]:
        """The rows with some columns."""
        parts = {"train": self.train, "valid": self.valid}
        return {name: only(part, columns) for name, part in parts.items() if part is not None}


def only(dataframe: DataFrame, columns: Iterable[str]) -> DataFrame:
    """A DataFrame with the columns of some names, and the structs of fields."""
    from pyspark.sql import functions

    wanted = set(columns)
    names = [
        name
        for name in dataframe.columns
        if name in wanted or any(other.startswith(f"{name}.") for other in wanted)
    ]
    return dataframe.select(*(functions.col(quoted(name)) for name in names))


def split(
    dataset: DataFrame, validation: float | str | None, seed: int
) -> tuple[DataFrame, DataFrame | None]:
    """The rows to train with, and those to validate with; None without validation.

    ``validation`` is a fraction, drawn by ``seed``; or a column that is True or 1 in the rows to
    validate with.

    Raises:
        ValueError: ``validation`` is neither a fraction nor a column.
    """
    from pyspark.sql import functions

    if validation is None or validation == 0:
        return dataset, None
    if isinstance(validation, str):
        if validation not in dataset.columns:
            raise ValueError(
                f"validation names the column {validation!r}, and the DataFrame has "
                f"{', '.join(dataset.columns)}"
            )
        marked = functions.col(quoted(validation)).cast("boolean")
        is_valid = functions.coalesce(marked, functions.lit(False))  # or NULL would be in no part
        return dataset.filter(~is_valid), dataset.filter(is_valid)
    if isinstance(validation, bool) or not 0 < validation < 1:
        raise ValueError(
            f"validation must be a fraction from 0 to 1 or the name of a column, not {validation!r}"
        )
    train, valid = dataset.randomSplit([1 - validation, validation], seed)
    return train, valid


def pack_once(
    rows: TrainingRows, columns: Iterable[str], folder: Path | None, limit: int | None
) -> TrainingRows:
    """The same rows, packed for several fits; they are removed once nothing refers to them.

    They have the columns that any of the fits reads, and take at most ``limit`` bytes of a folder.
    None means no limit, and this machine's scratch folder.
    """
    packed: dict[str, Staged] = {}
    shared = TrainingRows(rows.train, rows.valid, packed)
    with ExitStack() as stack:
        trials = stack.enter_context(RunFolder(f"trials-{uuid4().hex[:8]}", folder, limit=limit))
        for name, dataframe in rows.dataframes(columns).items():
            (trials.path / name).mkdir()
            packed[name] = Staged(staging.stage(dataframe, trials.path / name))
        weakref.finalize(shared, stack.pop_all().close)
    return shared
