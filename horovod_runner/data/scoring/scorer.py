"""Scores record batches in a Spark task: inputs, model, outputs, and rows that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from horovod_runner.data.pack.columns import Array
from horovod_runner.data.scoring.inputs import Inputs
from horovod_runner.data.scoring.model_file import ModelFile, task_device
from horovod_runner.data.scoring.models.kind import Call
from horovod_runner.data.scoring.outputs import OutputType, named
from horovod_runner.errors import DataError, PredictionError

OnError: TypeAlias = Literal["raise", "null"]
_MESSAGE_LENGTH = 500


@dataclass(frozen=True)
class Scorer:
    """All that scores rows; pickled to Spark's Python workers."""

    inputs: Inputs
    model: ModelFile | Call
    outputs: Mapping[str, OutputType]  # by name
    batch_size: int  # the most rows that the model gets at a time
    on_error: OnError = "raise"  # "null" leaves the outputs of a row that fails empty
    device: str = ""  # "cpu" or "cuda:1"; empty for the task's
    postprocess: Callable[[Any], Any] | None = None  # changes what the model returned

    def columns(self, batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.Array]]:
        """Score a partition, of which record batches have the columns of ``inputs``.

        Yields:
            For each record batch the outputs, and with on_error="null" the errors as text.
        """
        model = self.model
        if isinstance(model, ModelFile):
            model = model.load(self.device or task_device())
        call = with_postprocess(model, self.postprocess)
        inputs, row = self.inputs, 0
        for batch in batches:
            if not inputs.settled:
                inputs = inputs.settle(batch)
            step = inputs.rows_at_once(self.batch_size)
            scored: list[list[pa.Array]] = []
            for start in range(0, batch.num_rows, step):
                scored += self._slices(call, inputs, batch.slice(start, step), row + start)
            yield self._joined(scored)
            row += batch.num_rows

    def _joined(self, scored: list[list[pa.Array]]) -> list[pa.Array]:
        """The outputs of a record batch from those of its slices."""
        if not scored:
            types = [type_.arrow for type_ in self.outputs.values()]
            types += [pa.string()] if self.on_error == "null" else []
            return [pa.array([], type_) for type_ in types]
        if len(scored) == 1:
            return scored[0]
        return [pa.concat_arrays(parts) for parts in zip(*scored, strict=True)]

    def _slices(
        self, call: Call, inputs: Inputs, rows: pa.RecordBatch, first: int
    ) -> list[list[pa.Array]]:
        size = self.batch_size
        if self.on_error == "null":
            return [
                self._row_errors(call, inputs, rows.slice(start, size), first + start)
                for start in range(0, rows.num_rows, size)
            ]
        scored: list[list[pa.Array]] = []
        try:
            for parts in inputs.batches(rows, size):
                count = min(size, rows.num_rows - len(scored) * size)
                scored.append(self._arrays(compute(call, inputs, parts), count))
        except DataError:  # in one of the batches that were read together
            for start in range(0, rows.num_rows, size):
                batch = rows.slice(start, size)
                try:
                    inputs.arrays(batch)
                except DataError as error:
                    where = _where(inputs, first + start, batch.num_rows)
                    raise DataError(
                        f"{where}: {error}. on_error='null' leaves the outputs of such rows empty"
                    ) from error.__cause__
            raise
        except PredictionError as error:
            begin = len(scored) * size
            where = _where(inputs, first + begin, min(size, rows.num_rows - begin))
            raise PredictionError(f"{where}: {error}") from error.__cause__
        return scored

    def _arrays(self, result: Any, rows: int) -> list[pa.Array]:
        values = named(result, self.outputs, rows)
        return [type_.to_arrow(name, values[name]) for name, type_ in self.outputs.items()]

    def _row_errors(
        self, call: Call, inputs: Inputs, batch: pa.RecordBatch, first: int
    ) -> list[pa.Array]:
        """The outputs of one batch, null in the rows that fail, and what failed there."""
        errors: list[str | None] = [None] * batch.num_rows
        scored: list[tuple[Array, list[pa.Array]]] = []  # row numbers and their outputs

        def halve(numbers: Array) -> None:
            part = batch if len(numbers) == batch.num_rows else batch.take(pa.array(numbers))
            try:
                result = compute(call, inputs, inputs.arrays(part))
            except (DataError, PredictionError) as error:
                if len(numbers) == 1:
                    errors[numbers[0]] = f"row {first + numbers[0]}: {error}"[:_MESSAGE_LENGTH]
                    return
                middle = len(numbers) // 2
                halve(numbers[:middle])
                halve(numbers[middle:])
                return
            # Outputs that do not fit are the model's mistake in every row, and always raise.
            scored.append((numbers, self._arrays(result, len(numbers))))

        nulls = _nulls(batch, inputs)
        bad = np.any([np.zeros(batch.num_rows, bool), *nulls.values()], axis=0)
        for number in np.flatnonzero(bad):
            empty = ", ".join(repr(name) for name, rows in nulls.items() if rows[number])
            errors[number] = f"row {first + number}: {empty} is null"
        good = np.flatnonzero(~bad)
        if len(good):
            halve(good)
        places = np.full(batch.num_rows, -1)
        if scored:
            order = np.concatenate([numbers for numbers, _ in scored])
            places[order] = np.arange(len(order))
        taken = pa.array(places, mask=places < 0)
        outputs = []
        for at, type_ in enumerate(self.outputs.values()):
            parts = [arrays[at] for _, arrays in scored]
            whole = pa.concat_arrays(parts) if parts else pa.array([], type_.arrow)
            outputs.append(whole.take(taken))
        return [*outputs, pa.array(errors, pa.string())]


def with_postprocess(call: Call, postprocess: Callable[[Any], Any] | None) -> Call:
    """A model whose results are passed through the user's function."""
    if postprocess is None:
        return call
    return lambda parts: postprocess(call(parts))


def compute(call: Call, inputs: Inputs, parts: dict[str, Any]) -> Any:
    """What a model returns for the parts of a batch."""
    try:
        return call(parts)
    except PredictionError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise PredictionError(
            f"the model failed on a batch of {inputs.describe(parts)}: "
            f"{type(error).__name__}: {error}. Check columns=, dtypes= and images= against what "
            "the model takes"
        ) from error


def _where(inputs: Inputs, first: int, rows: int) -> str:
    """The place of some rows, for error messages."""
    from pyspark import TaskContext

    context = TaskContext.get()
    partition = "" if context is None else f"partition {context.partitionId()}, "
    numbers = f"row {first}" if rows == 1 else f"rows {first} to {first + rows - 1}"
    return f"{partition}{numbers} (columns {', '.join(inputs.names)})"


def _nulls(batch: pa.RecordBatch, inputs: Inputs) -> dict[str, Array]:
    """Where columns have a null that no value replaces, by name; those without are left out."""
    return {
        name: batch.column(name).is_null().to_numpy(zero_copy_only=False)
        for name in inputs.names
        if batch.column(name).null_count and not _is_filled(inputs, name)
    }


def _is_filled(inputs: Inputs, name: str) -> bool:
    """Whether nulls of a column are replaced: not those of a whole list."""
    return name in inputs.fill_null and inputs.columns[name].kind not in ("vector", "list")
