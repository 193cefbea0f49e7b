"""Parquet files and Delta tables: which rows are read, and errors when files change."""

from __future__ import annotations

import json
import os
import shutil
import struct
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from horovod_runner.data import parquet, petastorm, sources
from horovod_runner.data.read import listing, petastorm_format
from horovod_runner.data.read.files import Files
from horovod_runner.data.read.listing import Reading
from horovod_runner.data.read.readers import ArrowReader
from horovod_runner.errors import DataError

ROWS = 1000
TABLE = pa.table(
    {
        "a": list(range(ROWS)),
        "b": [float(n) for n in range(ROWS)],
        "year": [2000 + n % 3 for n in range(ROWS)],
        "state": [f"x{n % 2}" for n in range(ROWS)],
    }
)


def find(path: str | list[str], **options: Any) -> Files:
    return listing.find(path, Reading(**options))


def find_delta(path: Path, **options: Any) -> Any:
    return sources.delta(path, **options).prepare("train", None)


def rows_of(files: ArrowReader, names: list[str] | None = None) -> list[dict[str, Any]]:
    """All rows; each unit must have the number of rows that it states."""
    rows = []
    for unit, count in enumerate(files.units):
        of_unit = [
            row for b in files.read(unit, names or list(files.columns)) for row in b.to_pylist()
        ]
        assert len(of_unit) == count
        rows += of_unit
    return rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        part = TABLE.slice(number * 400, 400)
        pq.write_table(part, tmp_path / f"{number}.parquet", row_group_size=100)
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".crc").touch()
    return tmp_path


@pytest.mark.parametrize("form", ["{}", "{}/*.parquet", "{}/[0-2].parquet", "file://{}"])
def test_all_files_are_read_in_order(folder: Path, form: str) -> None:
    files = find(form.format(folder))
    assert [row["a"] for row in rows_of(files)] == list(range(ROWS))


def test_files_on_any_filesystem_and_at_several_paths_are_read(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(folder) + "/", "/somewhere/", recursive=True)
    assert len(rows_of(find("memory://somewhere"))) == ROWS
    files = find([f"{folder}/0.parquet", f"{folder}/2.parquet"])
    assert [row["a"] for row in rows_of(files)] == [*range(400), *range(800, 1000)]


def test_only_the_given_columns_are_read(folder: Path) -> None:
    files = find(str(folder), columns=["b"])
    assert list(files.columns) == ["b"]
    assert rows_of(files)[7] == {"b": 7.0}


@pytest.mark.parametrize(
    "filter_",
    [
        [("a", "<", 150)],
        ds.field("a") < 150,
        [[("a", "<", 100)], [("a", "in", range(100, 150))]],
    ],
)
def test_only_rows_that_pass_the_filter_are_read(folder: Path, filter_: Any) -> None:
    files = find(str(folder), filter=filter_, columns=["b"])
    assert [row["b"] for row in rows_of(files)] == list(range(150))


def test_row_groups_and_columns_that_a_filter_excludes_are_not_read(folder: Path) -> None:
    damage(folder / "0.parquet", group=2, column=0)
    damage(folder / "0.parquet", group=0, column=2)
    damage(folder / "1.parquet", group=0, column=0)
    files = find(str(folder), filter=[("a", "<", 150)], columns=["b"])
    assert [row["b"] for row in rows_of(files)] == list(range(150))


def test_a_column_whose_name_is_part_of_another_name_is_not_read(folder: Path) -> None:
    damage(folder / "2.parquet", group=0, column=0)  # "a", which "state" has in it
    path = str(folder / "2.parquet")
    files = find(path, filter=[("state", "=", "x0")], columns=["b"])
    assert [row["b"] for row in rows_of(files)] == list(range(800, 1000, 2))


def test_a_file_that_was_written_again_is_filtered_again(folder: Path) -> None:
    wanted = [("a", "<", 150)]
    assert find(str(folder), filter=wanted).units == [100, 50]
    pq.write_table(TABLE.slice(100, 400), folder / "0.parquet", row_group_size=400)
    assert len(rows_of(find(str(folder), filter=wanted))) == 50


NO_FILTER = r"filter .* \[\('year', '>=', 2024\)\]"
NOT_OF_COLUMNS = r"filter .* a, b, year.*/0\.parquet"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ["c"]}, "'c'.* a, b, year, state"),
        ({"filter": "a < 5"}, NO_FILTER),
        ({"filter": [("a", "5")]}, NO_FILTER),
        ({"filter": [("a", "<>", 5)]}, NO_FILTER),
        ({"filter": [("nope", "=", 1)]}, NOT_OF_COLUMNS),
        ({"filter": [("a", "<", "text")]}, NOT_OF_COLUMNS),
        ({"fill_null": {"nope": 1}}, "fill_null .*'nope'.* a, b"),
        ({"fill_null": {"a": "x"}}, "fill_null .*column 'a'"),
        ({"fill_null": {"a": 0.5}}, "fill_null .*column 'a'"),
        ({"fill_null": {"state": 1}}, "fill_null .*column 'state'"),
        ({"fill_null": {"lists": [1]}}, "fill_null .*column 'lists'"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_the_launch(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    lists = pa.array([[n] for n in range(ROWS)])
    pq.write_table(TABLE.append_column("lists", lists), tmp_path / "0.parquet")
    with pytest.raises(DataError, match=f"^train: .*{message}"):
        parquet(str(tmp_path), **options).prepare("train", None)


def test_hive_partitions_below_the_folder_become_columns(tmp_path: Path) -> None:
    folder = tmp_path / "k=v" / "data"
    pq.write_to_dataset(TABLE, folder, partition_cols=["year", "state"])
    files = find(str(folder))
    assert files.schema.names == ["a", "b", "state", "year"]
    assert files.schema.field("year").type == pa.int64()
    by_number = sorted(rows_of(files), key=lambda row: row["a"])
    assert by_number == TABLE.select(["a", "b", "state", "year"]).to_pylist()
    files = find(str(folder), filter=[("year", "=", 2001), ("a", "<", 10)])
    assert sorted(row["a"] for row in rows_of(files)) == [1, 4, 7]


@pytest.mark.parametrize(
    ("column", "texts", "values"),
    [
        ("year", ["1", "__HIVE_DEFAULT_PARTITION__"], [1, None]),
        ("year", ["__HIVE_DEFAULT_PARTITION__"] * 2, [None, None]),
        ("_date", ["2024", "2025"], [2024, 2025]),
        ("a b", ["1", "x"], ["1", "x"]),
        ("city", ["New York", "Sao Paulo/SP", "50%"], ["New York", "Sao Paulo/SP", "50%"]),
        ("n", ["1", "9" * 20], ["1", "9" * 20]),
        ("n", ["1", "²"], ["1", "²"]),
    ],
)
@pytest.mark.parametrize("is_in_files", [False, True])
def test_partitions_have_the_values_of_spark(
    tmp_path: Path, column: str, texts: list[str], values: list[Any], is_in_files: bool
) -> None:
    for number, text in enumerate(texts):
        path = tmp_path / str(number) / f"{quote(column)}={quote(text, safe='')}" / "0.parquet"
        path.parent.mkdir(parents=True)
        others = {column: [0.5]} if is_in_files else {}
        pq.write_table(pa.table({"row": [number], **others}), path)
    expected = [{"row": number, column: value} for number, value in enumerate(values)]
    assert rows_of(find(str(tmp_path))) == expected
    is_null = ds.field(column).is_null()
    assert rows_of(find(str(tmp_path), filter=is_null)) == [
        row for row in expected if row[column] is None
    ]


@pytest.mark.parametrize("kind", [parquet, lambda paths: parquet([paths]), petastorm])
def test_a_path_may_be_a_path_object(folder: Path, kind: Any) -> None:
    assert sum(kind(folder).prepare("train", None).units) == ROWS


def test_an_empty_list_of_paths_is_refused() -> None:
    with pytest.raises(ValueError, match="no path"):
        parquet([])


def test_a_filter_of_petastorm_may_need_a_column_that_is_not_read(folder: Path) -> None:
    files = find(str(folder), columns=["b"], filter=[("a", "<", 5)])
    reader = petastorm_format.decoding(files, {"a": petastorm_format.Codec("", "int64")})
    assert rows_of(reader) == [{"b": float(n)} for n in range(5)]


def test_files_that_are_missing_or_do_not_fit_are_named(folder: Path) -> None:
    with pytest.raises(DataError, match=r"Parquet .*/nowhere\b"):
        find(str(folder / "nowhere"))
    pq.write_table(TABLE.set_column(1, "b", pa.array(range(ROWS))), folder / "3.parquet")
    with pytest.raises(DataError, match=r"/3\.parquet .*/0\.parquet: b .*int64"):
        find(str(folder)).columns.find("b")
    with pytest.raises(DataError, match=r"/3\.parquet .*/0\.parquet: b .*int64"):
        find(str(folder), columns=["b"])
    assert find(str(folder)).settle(["a"])[0].name == "a"
    (folder / "3.parquet").write_text("text")
    with pytest.raises(DataError, match=r"/3\.parquet .*'folder/\*\.parquet'"):
        find(str(folder))


def test_a_file_that_changes_during_the_run_is_named(folder: Path) -> None:
    files = find(str(folder))
    pq.write_table(TABLE.slice(5, 400), folder / "0.parquet", row_group_size=100)
    with pytest.raises(DataError, match=r"/0\.parquet .*changed"):
        rows_of(files)
    (folder / "0.parquet").unlink()
    with pytest.raises(DataError, match=r"/0\.parquet .*changed"):
        rows_of(files)


def damage(path: Path, group: int, column: int) -> None:
    """Overwrite a column's first page, and keep the file's modification time."""
    stamp = path.stat().st_mtime_ns
    data = bytearray(path.read_bytes())
    at = pq.ParquetFile(path).metadata.row_group(group).column(column).data_page_offset
    data[at : at + 40] = b"\xff" * 40
    path.write_bytes(data)
    os.utime(path, ns=(stamp, stamp))


def test_a_damaged_page_is_named(folder: Path) -> None:
    damage(folder / "1.parquet", group=0, column=0)
    with pytest.raises(DataError, match=r"/1\.parquet .*\(row groups \[0\]\)"):
        rows_of(find(str(folder)))


def test_the_fingerprint_changes_with_the_rows(folder: Path) -> None:
    first = find(str(folder)).fingerprint
    assert find(str(folder)).fingerprint == first
    pq.write_table(TABLE.slice(1, 400), folder / "0.parquet", row_group_size=100)
    os.utime(folder / "0.parquet", (0, 0))  # differs however coarse the clock is
    written_again = find(str(folder)).fingerprint
    pq.write_table(TABLE.slice(0, 10), folder / "3.parquet")
    with_another = find(str(folder)).fingerprint
    filtered = find(str(folder), filter=[("a", "<", 5)]).fingerprint
    assert len({first, written_again, with_another, filtered}) == 4


def test_many_row_groups_make_few_units(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "0.parquet", row_group_size=1)
    files = find(str(tmp_path))
    assert len(files.units) <= 64
    assert [row["a"] for row in rows_of(files)] == list(range(ROWS))


def deletion_vector(rows: list[int]) -> dict[str, Any]:
    """An inline deletion vector of Delta's protocol: a roaring bitmap, encoded in Z85."""
    container = struct.pack("<iiHHI", 12346, 1, 0, len(rows) - 1, 16)
    container += struct.pack(f"<{len(rows)}H", *rows)
    data = struct.pack("<iqi", 1681511377, 1, 0) + container
    padded = data + bytes(-len(data) % 4)
    letters = (
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    )
    text = ""
    for (number,) in struct.iter_unpack(">I", padded):
        digits = [number // 85**power % 85 for power in (4, 3, 2, 1, 0)]
        text += "".join(letters[digit] for digit in digits)
    return {
        "storageType": "i",
        "pathOrInlineDv": text,
        "sizeInBytes": len(data),
        "cardinality": len(rows),
    }


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    small = pytest.importorskip("deltalake").WriterProperties(max_row_group_size=100)
    return write_delta(tmp_path / "table", TABLE, partition_by=["state"], writer_properties=small)


def write_delta(table: Path, rows: pa.Table, **options: Any) -> Path:
    pytest.importorskip("deltalake").write_deltalake(table, rows, **options)
    return table


def log_of(table: Path) -> list[dict[str, Any]]:
    text = (table / "_delta_log" / f"{0:020}.json").read_text()
    return [json.loads(line) for line in text.splitlines()]


def add_to_log(table: Path, *entries: dict[str, Any]) -> None:
    number = len(list((table / "_delta_log").glob("*.json")))
    path = table / "_delta_log" / f"{number:020}.json"
    path.write_text("\n".join(json.dumps(entry) for entry in entries))


def delete_rows(table: Path, add: dict[str, Any], rows: list[int]) -> None:
    """Add a deletion vector to a file, which the log has added."""
    add_to_log(
        table,
        {"protocol": protocol("deletionVectors")},
        {"remove": {**add, "deletionTimestamp": 1, "extendedFileMetadata": True}},
        {"add": {**add, "deletionVector": deletion_vector(rows)}},
    )


def map_columns(table: Path, fields: list[dict[str, Any]], versions: dict[str, Any]) -> None:
    """Replace the table's schema by fields of :func:`column`."""
    metadata = next(entry["metaData"] for entry in log_of(table) if "metaData" in entry)
    metadata["schemaString"] = json.dumps({"type": "struct", "fields": fields})
    metadata["configuration"] = {"delta.columnMapping.mode": "name"}
    add_to_log(table, {"protocol": versions}, {"metaData": metadata})


def test_the_current_rows_of_a_delta_table_are_read(delta: Path) -> None:
    import deltalake

    files = find_delta(delta)
    assert (
        sorted(rows_of(files), key=lambda row: row["a"])
        == TABLE.select(["a", "b", "year", "state"]).to_pylist()
    )
    deltalake.DeltaTable(delta).delete("a >= 10")
    assert sorted(row["a"] for row in rows_of(find_delta(delta))) == list(range(10))
    old = find_delta(delta, version=0, columns=["a"], filter=[("a", "<", 20)])
    assert sorted(row["a"] for row in rows_of(old)) == list(range(20))


def test_rows_that_deletion_vectors_delete_are_not_read(delta: Path) -> None:
    add = next(e["add"] for e in log_of(delta) if "add" in e and "state=x0" in e["add"]["path"])
    assert pq.ParquetFile(delta / add["path"]).num_row_groups == 5
    gone = [0, 3, 110, 499]
    delete_rows(delta, add, gone)
    rows = rows_of(find_delta(delta))
    assert sorted(row["a"] for row in rows) == sorted(set(range(ROWS)) - {2 * n for n in gone})


def test_deletion_vectors_of_files_with_unusual_paths_count(tmp_path: Path) -> None:
    rows = pa.table({"a": list(range(10)), "p": ["é b/=%?#"] * 10})
    table = write_delta(tmp_path / "ta ble", rows, partition_by=["p"])
    (add,) = (entry["add"] for entry in log_of(table) if "add" in entry)
    delete_rows(table, add, [3])
    assert [row["a"] for row in rows_of(find_delta(table))] == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def protocol(feature: str) -> dict[str, Any]:
    versions = {"minReaderVersion": 3, "minWriterVersion": 7}
    return {**versions, "readerFeatures": [feature], "writerFeatures": [feature]}


def column(name: str, type_: Any, number: int, name_in_file: str) -> dict[str, Any]:
    """A field of a schema with column mapping."""
    metadata = {
        "delta.columnMapping.id": number,
        "delta.columnMapping.physicalName": name_in_file,
    }
    return {"name": name, "type": type_, "nullable": True, "metadata": metadata}


def test_the_log_says_which_columns_there_are(tmp_path: Path) -> None:
    rows = {"a": [1, 2], "b": [0.5, 1.5], "s": [{"u": 1}] * 2, "t": [{"u": 1, "v": 2}] * 2}
    table = write_delta(tmp_path / "table", pa.table(rows))
    renamed = {"type": "struct", "fields": [column("w", "long", 5, "u")]}
    shorter = {"type": "struct", "fields": [column("u", "long", 7, "u")]}
    fields = [
        column("a", "long", 1, "a"),
        column("b", "double", 3, "col-b"),  # another than the b of the files, which was dropped
        column("s", renamed, 4, "s"),
        column("t", shorter, 6, "t"),
    ]
    map_columns(table, fields, protocol("columnMapping"))
    files = find_delta(table)
    assert rows_of(files) == [{"a": 1, "b": None}, {"a": 2, "b": None}]
    with pytest.raises(DataError, match="no rows"):
        find_delta(table, filter=[("b", ">", 0.0)])
    with pytest.raises(DataError, match=r"'s' has fields with other names.*DataFrame"):
        find_delta(table, columns=["s"])
    with pytest.raises(DataError, match=r"'t' has other fields in .*DataFrame"):
        find_delta(table, columns=["t.u"])


def test_a_table_with_another_feature_is_refused_by_its_name(delta: Path) -> None:
    add_to_log(delta, {"protocol": protocol("typeWidening")})
    with pytest.raises(DataError, match=r"typeWidening\. Pass a Spark.*DROP FEATURE"):
        find_delta(delta)


def test_null_is_a_value_of_a_partition(tmp_path: Path) -> None:
    rows = pa.table({"a": [1, 2, 3], "p": pa.array([7, None, 8], pa.int32())})
    table = write_delta(tmp_path / "table", rows, partition_by=["p"])
    assert {row["a"]: row["p"] for row in rows_of(find_delta(table))} == {1: 7, 2: None, 3: 8}
    some = find_delta(table, filter=[("p", ">", 7)])
    assert [row["a"] for row in rows_of(some)] == [3]


def test_spark_timestamps_of_any_year_are_read(tmp_path: Path) -> None:
    far = datetime(9999, 12, 31)
    times = pa.table({"t": pa.array([far], pa.timestamp("us"))})
    pq.write_table(times, tmp_path / "0.parquet", use_deprecated_int96_timestamps=True)
    assert rows_of(find(str(tmp_path))) == [{"t": far}]


def test_renamed_columns_have_their_new_names(tmp_path: Path) -> None:
    rows = TABLE.select(["a", "b"]).rename_columns(["col-1", "b"])
    table = write_delta(tmp_path / "table", rows)
    fields = [column("new name", "long", 1, "col-1"), column("b", "double", 2, "b")]
    map_columns(table, fields, {"minReaderVersion": 2, "minWriterVersion": 5})
    files = find_delta(table)
    assert list(files.columns) == ["new name", "b"]
    assert rows_of(files, ["new name"])[5] == {"new name": 5}


def test_a_folder_that_is_not_a_delta_table_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    with pytest.raises(DataError, match=r"Delta.*storage_options"):
        find_delta(tmp_path)
    shutil.rmtree(tmp_path)
