"""Batches of rows in a Spark task: rows that fail, their number, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from horovod_runner.data.feed.options import FeedOptions
from horovod_runner.data.pack.columns import columns_of
from horovod_runner.data.scoring.first_rows import try_first_rows
from horovod_runner.data.scoring.inputs import Inputs
from horovod_runner.data.scoring.model_file import ModelFile
from horovod_runner.data.scoring.models.kind import FunctionKind
from horovod_runner.data.scoring.outputs import OutputType
from horovod_runner.data.scoring.predict import predict
from horovod_runner.data.scoring.scorer import OnError, Scorer
from horovod_runner.errors import DataError, PredictionError

Model = Callable[[Mapping[str, Any]], Any]


def scorer_of(
    model: Model,
    batch: pa.RecordBatch,
    *,
    on_error: OnError = "raise",
    batch_size: int = 3,
    output: OutputType | None = None,
) -> Scorer:
    """A scorer of a function of all columns."""
    inputs = Inputs(FeedOptions(framework="numpy"), columns_of(batch.schema))
    return Scorer(inputs, model, {"p": output or OutputType("double")}, batch_size, on_error)


def scored(scorer: Scorer, *batches: pa.RecordBatch) -> list[list[Any]]:
    """The columns that a scorer returns for some record batches, joined."""
    columns = list(scorer.columns(iter(batches)))
    joined = zip(*columns, strict=True)
    return [[value for part in parts for value in part.to_pylist()] for parts in joined]


def doubled(parts: Mapping[str, Any]) -> Any:
    return parts["x"] * 2.0


def with_size(parts: Mapping[str, Any]) -> Any:
    """Twice each number, and the rows of the batch that it is in."""
    return np.stack([parts["x"] * 2.0, np.full(len(parts["x"]), len(parts["x"]))], axis=1)


def test_rows_are_scored_in_batches_and_keep_their_order() -> None:
    batch = pa.record_batch({"x": np.arange(7.0)})
    empty = batch.slice(0, 0)
    scorer = scorer_of(with_size, batch, output=OutputType("double", 1))
    values = [[2.0 * x, 3 if x < 6 else 1] for x in range(7)]
    assert scored(scorer, batch, empty, batch) == [values * 2]


def test_a_null_is_named_with_its_rows_and_columns() -> None:
    batch = pa.record_batch({"x": pa.array([1.0, 2.0, 3.0, None])})
    before = pa.record_batch({"x": pa.array([1.0, 2.0])})
    scorer = scorer_of(doubled, batch)
    with pytest.raises(DataError, match=r"row 5 \(columns x\): .*'x' .*nulls"):
        scored(scorer, before, batch)


def test_the_error_of_a_model_names_the_batch() -> None:
    def model(parts: Mapping[str, Any]) -> Any:
        raise KeyError("weights")

    batch = pa.record_batch({"x": np.arange(4.0)})
    scorer = scorer_of(model, batch)
    with pytest.raises(PredictionError, match=r"rows 0 to 2 .*x: float64 \(3,\): KeyError"):
        scored(scorer, batch)


def test_rows_that_fail_are_null_and_the_others_are_not() -> None:
    def model(parts: Mapping[str, Any]) -> Any:
        if (parts["x"] == 5).any():
            raise ValueError("five")
        return parts["x"] * 2.0

    batch = pa.record_batch({"x": pa.array([0.0, None, 2.0, 3.0, 4.0, 5.0, 6.0])})
    scorer = scorer_of(model, batch, on_error="null", batch_size=7)
    values, errors = scored(scorer, batch)
    assert values == [0.0, None, 4.0, 6.0, 8.0, None, 12.0]
    assert errors[1] == "row 1: 'x' is null"
    assert errors[5].startswith("row 5: the model failed on a batch of x: float64 (1,): ValueError")
    assert [error is None for error in errors] == [True, False, True, True, True, False, True]


def unchanged(parts: Mapping[str, Any]) -> Any:
    return parts["x"]


def refuses_small(parts: Mapping[str, Any]) -> Any:
    if (parts["x"] < 2).any():
        raise ValueError("below two")
    return {"x": parts["x"] * 2.0}


@pytest.mark.parametrize(
    "functions", [{"model": refuses_small}, {"model": unchanged, "transform": refuses_small}]
)
def test_the_first_row_that_does_not_fail_decides_the_type_of_an_output(functions: Any) -> None:
    rows = pa.table({"x": [0.0, 1.0, 2.0, 3.0]})
    options = {"columns": ["x"], "output": "p", **functions}
    scored_rows: Any = predict(rows, on_error="null", **options)
    assert scored_rows["p"].to_pylist() == [None, None, 4.0, 6.0]
    with pytest.raises((DataError, PredictionError), match=r"failed on .*below two"):
        predict(rows, **options)


@pytest.mark.parametrize("functions", [(refuses_small, None), (unchanged, refuses_small)])
def test_a_model_that_does_not_take_zeros_is_told_where_there_are_no_rows(functions: Any) -> None:
    model, transform = functions
    schema = pa.schema({"x": pa.float64()})
    inputs = Inputs.of(schema, FeedOptions(framework="numpy", transform=transform))
    stream: Any = SimpleNamespace(isStreaming=True)
    with pytest.raises(PredictionError, match=r"a stream, .*zeros: .*below two.*output="):
        try_first_rows(stream, inputs, {"p": None}, model, "raise")


def test_a_batch_of_failing_rows_alone_is_null() -> None:
    batch = pa.record_batch({"x": pa.array([None, None], pa.float64())})
    scorer = scorer_of(doubled, batch, on_error="null")
    assert scored(scorer, batch) == [
        [None, None],
        ["row 0: 'x' is null", "row 1: 'x' is null"],
    ]


def test_a_wrong_number_of_rows_is_never_passed_over() -> None:
    """A mean over the batch would fit a batch of one row."""

    def model(parts: Mapping[str, Any]) -> Any:
        return parts["x"].mean(keepdims=True)

    batch = pa.record_batch({"x": np.arange(3.0)})
    scorer = scorer_of(model, batch, on_error="null")
    with pytest.raises(PredictionError, match=r" 1 rows .*'p' .* 3 rows"):
        scored(scorer, batch)


def test_a_model_is_loaded_once_for_several_partitions(tmp_path: Path) -> None:
    FunctionKind().write(doubled, tmp_path / "model", ())
    shipped = ModelFile(FunctionKind(), "model", path=str(tmp_path / "model"))
    assert shipped.load("cpu") is shipped.load("cpu")


def test_lists_of_one_length_are_vectors_in_each_worker() -> None:
    def model(parts: Mapping[str, Any]) -> Any:
        return parts["x"].sum(axis=1)

    batch = pa.record_batch({"x": pa.array([[1.0, 2.0], [3.0, 4.0]])})
    scorer = scorer_of(model, batch)
    assert scored(scorer, batch) == [[3.0, 7.0]]
    other = pa.record_batch({"x": pa.array([[1.0, 2.0, 3.0]])})
    with pytest.raises(DataError, match=r"'x' .* 2 .* 3 .*ragged=\['x'\]"):
        scored(scorer, batch, other)
