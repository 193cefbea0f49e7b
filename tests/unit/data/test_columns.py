"""Column types: the array that each Arrow type becomes, and the types that are refused."""

from __future__ import annotations

import datetime
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from horovod_runner.data.pack import arrow_rows, columns, nested
from horovod_runner.data.pack.columns import Column, Rows
from horovod_runner.errors import DataError
from tests.programs import run_python

DAY = datetime.date(1970, 1, 3)
MOMENT = datetime.datetime(1970, 1, 1, 0, 0, 1)


def read(array: pa.Array, fill_null: object = None) -> tuple[Column, Rows]:
    batch = pa.record_batch([array], ["c"])
    column = arrow_rows.settle(columns.columns_of(batch.schema)["c"], [batch])
    return column, arrow_rows.read(batch, column, fill_null)


@pytest.mark.parametrize(
    ("array", "dtype", "values"),
    [
        (pa.array([1, 2], pa.int8()), "int8", [1, 2]),
        (pa.array([1, 2], pa.uint64()), "uint64", [1, 2]),
        (pa.array(np.array([0.5, 2], np.float16)), "float16", [0.5, 2]),
        (pa.array([0.5, 2], pa.float32()), "float32", [0.5, 2]),
        (pa.array([True, False]), "bool", [True, False]),
        (pa.array([Decimal("1.25"), Decimal("-3")]), "float64", [1.25, -3]),
        (pa.array([DAY]), "int32", [2]),
        (pa.array([DAY], pa.date64()), "int32", [2]),
        (pa.array([MOMENT], pa.timestamp("ns")), "int64", [1_000_000]),
        (pa.array([MOMENT], pa.timestamp("s", "UTC")), "int64", [1_000_000]),
        (pa.array([datetime.timedelta(milliseconds=1)], pa.duration("ms")), "int64", [1000]),
        (pa.array([datetime.time(0, 0, 2)], pa.time32("s")), "int64", [2_000_000]),
        (pa.array([3, 4, 3]).dictionary_encode(), "int64", [3, 4, 3]),
        (pa.array([1, 2, 3, 4])[1:3], "int64", [2, 3]),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_numbers(array: pa.Array, dtype: str, values: list[Any]) -> None:
    column, rows = read(array)
    assert (column.kind, column.dtype, column.shape) == ("number", dtype, ())
    assert rows.values.dtype == dtype
    assert rows.values.tolist() == values


@pytest.mark.parametrize(
    ("array", "shape", "values"),
    [
        (pa.array([[1, 2], [3, 4]]), (2,), [[1, 2], [3, 4]]),
        (pa.array([[1, 2], [3, 4]], pa.large_list(pa.int64())), (2,), [[1, 2], [3, 4]]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)), (2,), [[1, 2], [3, 4]]),
        (
            pa.array([[[1, 2], [3, 4]]], pa.list_(pa.list_(pa.int64(), 2), 2)),
            (2, 2),
            [[[1, 2], [3, 4]]],
        ),
        (
            pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
            (2, 2),
            [[[1, 2], [3, 4]], [[5, 6], [7, 8]]],
        ),
        (pa.array([[1, 2], [3, 4], [5, 6]])[1:], (2,), [[3, 4], [5, 6]]),
        (pa.array([[9, 9], [3, 4]], pa.list_(pa.int64(), 2))[1:], (2,), [[3, 4]]),
    ],
)
def test_vectors(array: pa.Array, shape: tuple[int, ...], values: list[Any]) -> None:
    column, rows = read(array)
    assert (column.kind, column.shape) == ("vector", shape)
    assert rows.values.tolist() == values


@pytest.mark.parametrize(
    ("array", "kind", "values", "lengths"),
    [
        (pa.array([[1], [], [2, 3]]), "list", [1, 2, 3], [1, 0, 2]),
        (pa.array([[9], [1, 2], [3]])[1:], "list", [1, 2, 3], [2, 1]),
        (pa.array(["a", "", "äö"]), "text", list("aäö".encode()), [1, 0, 4]),
        (pa.array(["x", "a", "bc"])[1:], "text", list(b"abc"), [1, 2]),
        (pa.array([b"a", b"bc"], pa.large_binary()), "bytes", list(b"abc"), [1, 2]),
        (pa.array(["a", "b", "a"]).dictionary_encode(), "text", list(b"aba"), [1, 1, 1]),
    ],
)
def test_ragged_rows(array: pa.Array, kind: str, values: list[int], lengths: list[int]) -> None:
    column, rows = read(array)
    assert column.kind == kind
    assert rows.values.tolist() == values
    assert rows.lengths is not None
    assert rows.lengths.tolist() == lengths


def vectors(*rows: dict[str, Any]) -> pa.Array:
    type_ = pa.struct(
        [
            ("type", pa.int8()),
            ("size", pa.int32()),
            ("indices", pa.list_(pa.int32())),
            ("values", pa.list_(pa.float64())),
        ]
    )
    return pa.array(rows, type_)


DENSE = {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]}
SPARSE = {"type": 0, "size": 3, "indices": [0, 2], "values": [4.0, 5.0]}


def test_spark_ml_vectors_become_a_dense_matrix() -> None:
    column, rows = read(vectors(DENSE, SPARSE, {**SPARSE, "indices": [], "values": []}, DENSE))
    assert column.shape == (3,)
    assert rows.values.tolist() == [[1, 2, 3], [4, 0, 5], [0, 0, 0], [1, 2, 3]]


def test_spark_ml_vectors_of_different_sizes_are_refused() -> None:
    with pytest.raises(DataError, match=r"'c'.* 3 .* 4 .*ragged=\['c'\]"):
        read(vectors(DENSE, {**SPARSE, "size": 4}))


def test_fields_of_a_struct_that_is_null_are_null() -> None:
    batch = pa.record_batch([pa.array([{"x": 1}, None])], ["s"])
    with pytest.raises(DataError, match=r"'s\.x'.*nulls \(1 .* 2 rows"):
        arrow_rows.read(batch, columns.columns_of(batch.schema)["s.x"])


@pytest.mark.parametrize(
    ("array", "can_be_filled"),
    [
        (pa.array([1, None]), True),
        (pa.array(["a", None]), True),
        (pa.array([[1, None], [1, 2]]), True),
        (pa.array([[1, 2], None]), False),
        (vectors(DENSE, None), False),  # type: ignore[arg-type]
    ],
    ids=["number", "text", "in a list", "list", "vector"],
)
def test_nulls_are_refused_with_the_name_of_the_column(
    array: pa.Array, can_be_filled: bool
) -> None:
    with pytest.raises(DataError, match=r"'c'.*nulls") as caught:
        read(array)
    assert ("fill_null=" in str(caught.value)) == can_be_filled


def test_fill_null_replaces_nulls() -> None:
    assert read(pa.array([1, None]), fill_null=7)[1].values.tolist() == [1, 7]
    assert read(pa.array([[1, None]]), fill_null=7)[1].values.tolist() == [[1, 7]]
    assert bytes(read(pa.array(["a", None]), fill_null="zz")[1].values) == b"azz"


@pytest.mark.parametrize(
    "type_",
    [
        pa.list_(pa.map_(pa.string(), pa.int64())),
        pa.null(),
        pa.month_day_nano_interval(),
    ],
    ids=str,
)
def test_a_column_that_cannot_become_a_tensor_is_refused_when_it_is_asked_for(
    type_: pa.DataType,
) -> None:
    known = columns.columns_of(pa.schema([("odd", type_), ("even", pa.int64())]))
    assert [column.name for column in known.find("even")] == ["even"]
    with pytest.raises(DataError, match=f"'odd'.* {re.escape(str(type_))} .*tensor"):
        known.find("odd")
    with pytest.raises(DataError, match=r"'odd'.*columns="):
        known.all()


STRUCTS = pa.struct([("price", pa.float64()), ("tags", pa.list_(pa.string()))])
PREFS = pa.map_(pa.string(), pa.int64())
NESTED = pa.table(
    {
        "items": pa.array(
            [[{"price": 1.0, "tags": ["a"]}], [], [{"price": 2.0, "tags": []}] * 2, None],
            pa.list_(STRUCTS),
        ),
        "prefs": pa.array([[("a", 1), ("a.b", 2)], [], [("b", 3), ("a", 4)], None], PREFS),
        "codes": pa.array(
            [[(1, {"price": 5.0, "tags": []})], [], [], []], pa.map_(pa.int64(), STRUCTS)
        ),
        "grid": pa.array([[[1, 2], [3]], [[4]], [], [[5]]], pa.list_(pa.list_(pa.int32()))),
        "point": pa.array(
            [{"at": {"x": 1}}, {"at": None}, None, {"at": {"x": 4}}],
            pa.struct([("at", pa.struct([("x", pa.int64())]))]),
        ),
    }
)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("items.price", [[1.0], [], [2.0, 2.0], None]),
        ("items.tags", [[["a"]], [], [[], []], None]),
        ("prefs.a", [1, None, 4, None]),
        ("prefs.a.b", [2, None, None, None]),
        ("codes.1.price", [5.0, None, None, None]),
        ("grid", [[[1, 2], [3]], [[4]], [], [[5]]]),
        ("point.at.x", [1, None, None, 4]),
    ],
)
def test_a_dotted_name_leads_into_structs_lists_of_structs_and_maps(
    name: str, values: list[Any]
) -> None:
    whole = NESTED.combine_chunks().to_batches()[0]
    assert [column.name for column in columns.columns_of(whole.schema).find(name)] == [name]
    for start, end in [(0, 4), (1, 3), (2, 4), (3, 4), (2, 2)]:
        part = whole.slice(start, end - start)
        assert nested.column_at(part, name).to_pylist() == values[start:end]


def test_the_error_of_a_map_names_the_reading_that_it_takes() -> None:
    known = columns.columns_of(NESTED.schema)
    with pytest.raises(DataError, match=r"'prefs' is a map.*'prefs\.KEY'"):
        known.find("prefs")
    with pytest.raises(DataError, match=r"'nowhere'.*prefs\.\*"):
        known.find("nowhere")


def test_lists_of_lists_are_tensors_only_if_all_have_one_shape() -> None:
    column, _ = read(pa.array([[[1, 2], [3]], [[3]]]))
    assert (column.kind, column.shape, column.dtype) == ("object", (-1, -1), "int64")
    batch = pa.record_batch([pa.array([[[1], [2]], [[1], [2, 3]]])], ["c"])
    with pytest.raises(DataError, match=r"'c' .* 1 and of 2 values, as in row 11\b.*ragged="):
        arrow_rows.read(batch, Column("c", "vector", "int64", (2, 1)), first=10)


@pytest.mark.parametrize("cells", [[[["a"], None]], [[["a", None]]], [[[1], None]], [[[1, None]]]])
def test_nulls_inside_lists_of_lists_are_refused(cells: list[Any]) -> None:
    with pytest.raises(DataError, match=r"'c' has nulls in its lists \(1 of 2 "):
        read(pa.array(cells))


def test_a_list_with_one_length_at_first_and_others_later_is_refused() -> None:
    batch = pa.record_batch([pa.array([[1, 2]])], ["c"])
    column = arrow_rows.settle(columns.columns_of(batch.schema)["c"], [batch])
    longer = pa.record_batch([pa.array([[1, 2], [1, 2, 3]])], ["c"])
    with pytest.raises(DataError, match=r"'c'.* 2 .* 3 .*ragged=\['c'\]"):
        arrow_rows.read(longer, column)
    assert arrow_rows.settle(columns.columns_of(batch.schema)["c"], [batch], ["c"]).kind == "list"


@pytest.mark.parametrize("type_", [pa.float32(), pa.int64(), pa.bool_()])
def test_numbers_of_a_slice_are_its_own(type_: pa.DataType) -> None:
    array = pa.array([int(index in (0, 1, 2, 9, 11)) for index in range(100)]).cast(type_)
    for part in (array, array.slice(9, 20), array.slice(3, 0), array.slice(100)):
        numbers = arrow_rows.numbers_of(part)
        assert numbers.tolist() == part.to_pylist()
        assert numbers.dtype == type_.to_pandas_dtype()
        assert not (len(part) and numbers.flags.writeable)


def test_the_first_batch_does_not_wait_for_an_import_of_pandas(tmp_path: Path) -> None:
    names = ["a", "b", "c", "d"]
    arrays = [pa.array([1, 2]), pa.array([0.5, 2.0]), pa.array([True, False]), pa.array([[1], [2]])]
    path, batch = tmp_path / "rows.arrow", pa.record_batch(arrays, names)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    code = f"""
import sys
import pyarrow as pa
from horovod_runner.data.pack import arrow_rows, columns, nested
batch = pa.ipc.open_file(pa.memory_map({str(path)!r})).get_batch(0)
for column in columns.columns_of(batch.schema).values():
    print(arrow_rows.read(batch, column).values.tolist())
print("pandas" in sys.modules)
"""
    printed = run_python(code, check=True, timeout=60).stdout
    assert printed.splitlines() == ["[1, 2]", "[0.5, 2.0]", "[True, False]", "[1, 2]", "False"]
