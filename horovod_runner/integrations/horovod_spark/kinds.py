"""Kinds of models for scoring that may refer to modules which import ``horovod.spark``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from horovod_runner.data.feed.options import Framework
from horovod_runner.data.scoring.models.kind import Call, ModelKind, Parts
from horovod_runner.data.scoring.outputs import as_numpy
from horovod_runner.integrations.horovod_spark import names
from horovod_runner.integrations.horovod_spark.batches import rows_of


@dataclass(frozen=True)
class NamesKind:
    """A kind of model that is loaded where ``horovod.spark`` leads to this package."""

    kind: ModelKind

    @property
    def framework(self) -> Framework:
        """See ModelKind, as for the methods."""
        return self.kind.framework

    def write(self, model: Any, path: Path, ship_modules: Sequence[ModuleType]) -> None:
        """Write the model."""
        self.kind.write(model, path, ship_modules)

    def load(self, path: Path, device: str) -> Call:
        """Read the model."""
        names.install_where_missing()
        return self.kind.load(path, device)


@dataclass(frozen=True)
class RowByRow:
    """A model that a function of the user's calls with one row at a time."""

    model: Any
    # Of (model, row), with the row a dict by column; returns the outputs of a batch of one row.
    function: Callable[[Any, Mapping[str, Any]], Any]
    columns: Mapping[str, str]  # the column of each part

    def __call__(self, parts: Parts) -> Any:
        """The outputs for the rows of a batch: one array, or several."""
        rows: list[list[Any]] = []
        for row in rows_of(parts, self.columns):
            result = self.function(self.model, Row(row))
            several = result if isinstance(result, list | tuple) else [result]
            rows.append([np.asarray(as_numpy(each)).reshape(-1) for each in several])
        arrays = [np.stack(column) for column in zip(*rows, strict=True)]
        arrays = [each[:, 0] if each.shape[1] == 1 else each for each in arrays]
        return arrays[0] if len(arrays) == 1 else tuple(arrays)


class Row(dict[str, Any]):
    """A row of feature columns."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"the row has the feature columns {', '.join(self)}, not {name!r}: add it to "
            "feature_cols"
        )
