"""Batches as Horovod's estimators make them: rows transformed one by one, shapes, and types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_runner.errors import DataError

if TYPE_CHECKING:
    from horovod_runner.integrations.training.training import Training


@dataclass(frozen=True)
class Arrange:
    """Changes a batch, a dict of arrays or lists by part; pickled to the ranks."""

    columns: Mapping[str, Any]  # the column of each part
    # What a part becomes, with -1 for the rows; parts that are not there stay as they are.
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)  # what the numbers of a part become
    # Called with each row, a dict by column; what it returns replaces the row.
    row: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    # The NumPy types of columns that row adds, or returns in another type.
    edited: Mapping[str, str] = field(default_factory=dict)
    removed: Sequence[str] = ()  # columns that row does not return

    @classmethod
    def of_training(
        cls,
        training: Training,
        *,
        input_shapes: Sequence[Sequence[int]],
        label_shapes: Sequence[Sequence[int]],
        dtypes: Mapping[str, str] | str,
        row: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None,
    ) -> Arrange:
        """What makes the batches of a training as Horovod's estimator makes them.

        Shapes are in the order of inputs and labels; fewer leave the others as they are. ``dtypes``
        are by part, or one for all.
        """
        columns = training.columns
        inputs, labels, _ = training.split_parts(list(columns))
        shapes = {
            **dict(zip(inputs, input_shapes, strict=False)),
            **dict(zip(labels, label_shapes, strict=False)),
        }
        by_part = dict.fromkeys(columns, dtypes) if isinstance(dtypes, str) else dtypes
        return cls(columns, shapes, by_part, row)

    def __call__(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """The changed batch."""
        changed = dict(parts) if self.row is None else self._rows(parts)
        return {name: self._part(name, value) for name, value in changed.items()}

    def _rows(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        assert self.row is not None  # noqa: S101 - the caller has looked
        rows = [self.row(row) for row in rows_of(parts, self.columns)]
        # A removed column may be added again, with another type.
        changing = {*self.removed, *self.edited}
        kept = {name: self.columns[name] for name in parts if self.columns[name] not in changing}
        changed: dict[str, Any] = {}
        for name, column in {**kept, **dict(zip(self.edited, self.edited, strict=True))}.items():
            if column not in rows[0]:
                raise DataError(
                    f"transformation_fn returned a row without {column!r}, only "
                    f"{', '.join(rows[0])}: it must return all columns of feature_cols, label_cols "
                    "and transformation_edit_fields, but those of transformation_removed_fields"
                )
            values = np.stack([np.asarray(row[column]) for row in rows])
            changed[name] = values.astype(self.edited.get(column, values.dtype), copy=False)
        return changed

    def _part(self, name: str, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        if name in self.dtypes:
            value = value.astype(self.dtypes[name], copy=False)
        shape = self.shapes.get(name)
        if shape is None or _fits(value.shape, shape):
            return value
        try:
            # Users may leave the rows out.
            return value.reshape(shape if -1 in shape else [-1, *shape])
        except ValueError:
            raise DataError(
                f"column {self.columns[name]!r} has the shape {value.shape[1:]} in each row, which "
                f"does not fit the shape {list(shape)} that the model takes: change the column, "
                "input_shapes or label_shapes, or the model"
            ) from None


def rows_of(parts: Mapping[str, Any], columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a batch, each a dict by column; ``columns`` has the column of each part."""
    for number in range(len(next(iter(parts.values())))):
        yield {columns[name]: values[number] for name, values in parts.items()}


def _fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a shape is the wanted one, in which several sizes may be free: -1."""
    if len(shape) != len(wanted):
        return False
    return all(free in (-1, size) for size, free in zip(shape, wanted, strict=True))


def in_order(columns: Sequence[str]) -> dict[str, str]:
    """The parts of a batch that a model takes by position: the column of each, by its number."""
    return {f"{number}: {name}": name for number, name in enumerate(columns)}
