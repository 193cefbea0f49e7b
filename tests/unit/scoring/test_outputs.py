"""Results of models become columns, or errors that say what to change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from horovod_runner.data.scoring.outputs import (
    OutputType,
    check_free,
    named,
    parse_outputs,
)
from horovod_runner.errors import DataError, PredictionError


@pytest.mark.parametrize(
    ("values", "ddl"),
    [
        (np.zeros(3, np.float32), "float"),
        (np.zeros((3, 1), np.float32), "float"),
        (np.zeros((3, 2), np.float64), "array<double>"),
        (np.zeros((3, 2, 2), np.int8), "array<array<tinyint>>"),
        (np.zeros(3, np.uint8), "smallint"),
        (np.zeros(3, np.uint32), "bigint"),
        (np.zeros(3, bool), "boolean"),
        (np.array(["a", "b", "c"]), "string"),
        (["a", None, "c"], "string"),
        ([b"a", b"b", b"c"], "binary"),
        ([np.zeros(2, np.float32), np.zeros(1, np.float32)], "array<float>"),
    ],
)
def test_the_type_of_a_column_follows_from_the_values(values: Any, ddl: str) -> None:
    assert OutputType.of(values).ddl == ddl


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (np.zeros(2, np.complex64), "complex64"),
        ([object()], "list of object"),
        ([None], "list of NoneType"),
    ],
)
def test_values_without_a_type_in_spark_are_refused(values: Any, named: str) -> None:
    with pytest.raises(PredictionError, match=named):
        OutputType.of(values)


@pytest.mark.parametrize(
    ("given", "ddl"),
    [("float", "float"), ("Array<Int>", "array<int>"), ("long", "bigint"), ("string", "string")],
)
def test_a_type_may_be_given_in_the_words_of_spark(given: str, ddl: str) -> None:
    assert OutputType.parse(given).ddl == ddl


def test_a_type_that_no_output_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'map<int,int>'.*'array<float>'"):
        OutputType.parse("map<int,int>")


@pytest.mark.parametrize("shape", [(2, 3, 2), (2, 0), (0, 2), (0, 3, 2), (2, 3, 0)])
def test_arrays_of_any_shape_keep_their_rows(shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    type_ = OutputType("float", len(shape) - 1)
    array = type_.to_arrow("p", values)
    assert array.type == type_.arrow
    assert array.to_pylist() == values.tolist()


def test_one_number_per_row_fits_a_number_and_an_array() -> None:
    values = np.array([[1.0], [2.0]], np.float32)
    assert OutputType("float").to_arrow("p", values).to_pylist() == [1.0, 2.0]
    assert OutputType("float", 1).to_arrow("p", values).to_pylist() == [[1.0], [2.0]]


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        (OutputType("float"), np.zeros((2, 3), np.float32)),
        (OutputType("float", 1), np.zeros(2, np.float32)),
        (OutputType("string"), np.zeros(2, np.float32)),
        (OutputType("float"), ["a", "b"]),
    ],
)
def test_values_that_do_not_fit_the_given_type_name_the_output(
    type_: OutputType, values: Any
) -> None:
    with pytest.raises(PredictionError, match=r"output 'p' .*output={'p': "):
        type_.to_arrow("p", values)


def test_results_are_found_by_name_or_in_order() -> None:
    one, two = np.zeros(2), np.ones(2)
    assert named({"b": two, "a": one, "c": one}, "ab", 2) == {"a": one, "b": two}
    assert list(named((one, two), "ab", 2)) == ["a", "b"]
    assert list(named({"logits": one}, "p", 2)) == ["p"]


FRAME = pd.DataFrame(
    {"text": ["a", None], "list": [[1.0, 2.0], [3.0]], "array": [np.zeros(2)] * 2, "n": [1, 2]}
)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (FRAME, FRAME),
        (FRAME[["n", "text"]], FRAME[["text"]]),
        (FRAME[["text"]], {"p": FRAME["text"]}),
        (FRAME["text"], {"p": FRAME["text"]}),
        (FRAME["list"], {"p": FRAME["list"]}),
        (FRAME[["n", "n"]], {"p": [[1, 1], [2, 2]]}),
        (np.array(["a", "b"], object), {"p": ["a", "b"]}),
    ],
)
def test_results_of_pandas_are_outputs(result: Any, expected: Any) -> None:
    values = named(result, expected, 2)
    for name, wanted in expected.items():
        column = OutputType.of(values[name]).to_arrow(name, values[name])
        assert column.to_pylist() == pa.array(wanted, from_pandas=True).to_pylist()


@pytest.mark.parametrize(
    ("result", "names", "message"),
    [
        ({"x": np.zeros(2), "y": np.zeros(2)}, "a", "outputs x, y.*'a'"),
        ((np.zeros(2), np.zeros(2)), "a", "2 outputs.* 1: a"),
        (np.zeros(2), "ab", "ndarray.* 2: a, b"),
        (np.zeros(3), "a", " 3 rows .*'a' .* 2 rows"),
        (np.float32(1), "a", "single value .*'a' .* 2 rows"),
        (FRAME[["n", "text"]], "p", "outputs n, text.*'p'"),
        (FRAME[["n", "list"]], "ab", "outputs n, list.*'a', 'b'"),
    ],
)
def test_results_that_do_not_fit_say_what_was_returned(
    result: Any, names: str, message: str
) -> None:
    with pytest.raises(PredictionError, match=message):
        named(result, names, 2)


def test_output_names_are_checked() -> None:
    assert list(parse_outputs(["a", "b"])) == ["a", "b"]
    assert parse_outputs({"a": "float", "b": None}) == {"a": OutputType("float"), "b": None}
    with pytest.raises(ValueError, match="twice: a, a"):
        parse_outputs(["a", "a"])
    with pytest.raises(ValueError, match=r"output .* \[\]"):
        parse_outputs([])
    with pytest.raises(TypeError, match=r"output .* 3$"):
        parse_outputs(3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"column 'a'.*output='a_2'"):
        check_free(["a"], ["a", "b"])
