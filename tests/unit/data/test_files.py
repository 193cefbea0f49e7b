"""Parquet files and Delta tables: which rows there are, and what happens when they change."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from horovod_runner.data import delta_table, files, parquet
from horovod_runner.data.files import Files
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


def rows_of(found: Files, names: list[str] | None = None) -> list[dict[str, Any]]:
    """All rows, each unit with as many as it was said to have."""
    rows = []
    for unit, count in enumerate(found.units):
        own = [row for b in found.read(unit, names or list(found.columns)) for row in b.to_pylist()]
        assert len(own) == count
        rows += own
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
    found = files.find(form.format(folder))
    assert [row["a"] for row in rows_of(found)] == list(range(ROWS))


def test_files_on_any_filesystem_are_read(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(folder) + "/", "/somewhere/", recursive=True)
    assert len(rows_of(files.find("memory://somewhere"))) == ROWS


def test_several_paths_make_one_dataset(folder: Path) -> None:
    found = files.find([f"{folder}/0.parquet", f"{folder}/2.parquet"])
    assert [row["a"] for row in rows_of(found)] == [*range(400), *range(800, 1000)]


def test_only_the_columns_that_are_wanted_are_read(folder: Path) -> None:
    found = files.find(str(folder), columns=["b"])
    assert list(found.columns) == ["b"]
    assert rows_of(found)[7] == {"b": 7.0}
    with pytest.raises(DataError, match="there is no column 'c': there are a, b, year, state"):
        files.find(str(folder), columns=["c"])


@pytest.mark.parametrize(
    "filter_",
    [
        [("a", "<", 150)],
        ds.field("a") < 150,
        [[("a", "<", 100)], [("a", "in", range(100, 150))]],
    ],
)
def test_only_the_rows_that_are_wanted_are_read(folder: Path, filter_: Any) -> None:
    found = files.find(str(folder), filter_=filter_, columns=["b"])
    assert [row["b"] for row in rows_of(found)] == list(range(150))


def test_row_groups_and_columns_that_a_filter_does_not_want_are_not_read(folder: Path) -> None:
    damage(folder / "0.parquet", group=2, column=0)
    damage(folder / "0.parquet", group=0, column=2)
    damage(folder / "1.parquet", group=0, column=0)
    found = files.find(str(folder), filter_=[("a", "<", 150)], columns=["b"])
    assert [row["b"] for row in rows_of(found)] == list(range(150))


def test_a_column_whose_name_is_part_of_another_ones_is_not_read(folder: Path) -> None:
    damage(folder / "2.parquet", group=0, column=0)  # "a", which "state" has in it
    path = str(folder / "2.parquet")
    found = files.find(path, filter_=[("state", "=", "x0")], columns=["b"])
    assert [row["b"] for row in rows_of(found)] == list(range(800, 1000, 2))


def test_a_file_that_was_written_again_is_filtered_anew(folder: Path) -> None:
    wanted = [("a", "<", 150)]
    assert files.find(str(folder), filter_=wanted).units == [100, 50]
    pq.write_table(TABLE.slice(100, 400), folder / "0.parquet", row_group_size=400)
    assert len(rows_of(files.find(str(folder), filter_=wanted))) == 50


@pytest.mark.parametrize("filter_", ["a < 5", [("a", "5")], [("a", "<>", 5)]])
def test_a_filter_of_another_form_is_told_what_one_looks_like(folder: Path, filter_: Any) -> None:
    with pytest.raises(DataError, match=r"the filter .* such as \[\('year', '>=', 2024\)\]"):
        files.find(str(folder), filter_=filter_)


@pytest.mark.parametrize("filter_", [[("nope", "=", 1)], [("a", "<", "text")]])
def test_a_filter_that_does_not_fit_is_named(folder: Path, filter_: Any) -> None:
    with pytest.raises(DataError, match=r"the filter .* cannot be applied to a, b.* of .*parquet"):
        files.find(str(folder), filter_=filter_)


def test_what_fills_nulls_of_no_column_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match="train: fill names 'nope'; the columns are a, b"):
        parquet(str(folder), fill={"nope": 1}).prepare("train", None)


@pytest.mark.parametrize(("name", "fill"), [("a", "x"), ("a", 0.5), ("state", 1), ("lists", [1])])
def test_what_cannot_stand_for_nulls_is_told_before_anything_is_read(
    tmp_path: Path, name: str, fill: object
) -> None:
    lists = pa.array([[n] for n in range(ROWS)])
    pq.write_table(TABLE.append_column("lists", lists), tmp_path / "0.parquet")
    with pytest.raises(DataError, match=f"train: fill says that .* nulls of column '{name}', whi"):
        parquet(str(tmp_path), fill={name: fill}).prepare("train", None)


def test_what_paths_tell_becomes_columns_below_the_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "k=v" / "data"
    pq.write_to_dataset(TABLE, folder, partition_cols=["year", "state"])
    found = files.find(str(folder))
    assert found.schema.names == ["a", "b", "state", "year"]
    assert found.schema.field("year").type == pa.int64()
    by_number = sorted(rows_of(found), key=lambda row: row["a"])
    assert by_number == TABLE.select(["a", "b", "state", "year"]).to_pylist()
    found = files.find(str(folder), filter_=[("year", "=", 2001), ("a", "<", 10)])
    assert sorted(row["a"] for row in rows_of(found)) == [1, 4, 7]


def test_what_a_path_has_to_quote_arrives_as_it_was(tmp_path: Path) -> None:
    cities = ["New York", "Sao Paulo/SP", "50%"]
    pq.write_to_dataset(
        pa.table({"a": [1, 2, 3], "city": cities}), tmp_path, partition_cols=["city"]
    )
    rows = sorted(rows_of(files.find(str(tmp_path))), key=lambda row: row["a"])
    assert [row["city"] for row in rows] == cities


def test_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no Parquet file at .*nowhere"):
        files.find(str(tmp_path / "nowhere"))


def test_files_that_do_not_fit_together_are_told(folder: Path) -> None:
    odd = TABLE.set_column(1, "b", pa.array(range(ROWS)))
    pq.write_table(odd, folder / "3.parquet")
    with pytest.raises(DataError, match=r"3.parquet has other columns than .*0.*: b is int64"):
        files.find(str(folder))


def test_a_file_that_is_no_parquet_is_named(folder: Path) -> None:
    (folder / "4.parquet").write_text("text")
    with pytest.raises(DataError, match=r"4.parquet cannot be read as Parquet"):
        files.find(str(folder))


def test_a_file_that_changes_under_the_run_is_named(folder: Path) -> None:
    found = files.find(str(folder))
    pq.write_table(TABLE.slice(5, 400), folder / "0.parquet", row_group_size=100)
    with pytest.raises(DataError, match=r"0.parquet was changed or removed since the run began"):
        rows_of(found)
    (folder / "0.parquet").unlink()
    with pytest.raises(DataError, match=r"0.parquet was changed or removed since the run began"):
        rows_of(found)


def damage(path: Path, group: int, column: int) -> None:
    """Overwrite a column's first page; whoever looks at the file's time sees nothing of it."""
    stamp = path.stat().st_mtime_ns
    data = bytearray(path.read_bytes())
    at = pq.ParquetFile(path).metadata.row_group(group).column(column).data_page_offset
    data[at : at + 40] = b"\xff" * 40
    path.write_bytes(data)
    os.utime(path, ns=(stamp, stamp))


def test_a_damaged_page_is_named(folder: Path) -> None:
    damage(folder / "1.parquet", group=0, column=0)
    with pytest.raises(DataError, match=r"1.parquet cannot be read \(row groups"):
        rows_of(files.find(str(folder)))


def test_the_fingerprint_is_that_of_the_rows(folder: Path) -> None:
    first = files.find(str(folder)).fingerprint
    assert files.find(str(folder)).fingerprint == first
    assert files.find(str(folder), filter_=[("a", "<", 5)]).fingerprint != first
    pq.write_table(TABLE.slice(0, 10), folder / "3.parquet")
    assert files.find(str(folder)).fingerprint != first


def test_a_file_that_was_written_again_has_another_fingerprint(folder: Path) -> None:
    first = files.find(str(folder)).fingerprint
    pq.write_table(TABLE.slice(1, 400), folder / "0.parquet", row_group_size=100)
    os.utime(folder / "0.parquet", (0, 0))  # another time, however coarse the clock is
    assert files.find(str(folder)).fingerprint != first


def test_many_row_groups_make_few_units(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "0.parquet", row_group_size=1)
    found = files.find(str(tmp_path))
    assert len(found.units) <= 64
    assert [row["a"] for row in rows_of(found)] == list(range(ROWS))


def deletion_vector(rows: list[int]) -> dict[str, Any]:
    """Of few rows, as Delta's protocol has it in the log itself: a roaring bitmap in Z85."""
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
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(
        tmp_path / "table",
        TABLE,
        partition_by=["state"],
        writer_properties=deltalake.WriterProperties(max_row_group_size=100),
    )
    return tmp_path / "table"


def log_of(table: Path) -> list[dict[str, Any]]:
    text = (table / "_delta_log" / f"{0:020}.json").read_text()
    return [json.loads(line) for line in text.splitlines()]


def add_to_log(table: Path, *entries: dict[str, Any]) -> None:
    number = len(list((table / "_delta_log").glob("*.json")))
    path = table / "_delta_log" / f"{number:020}.json"
    path.write_text("\n".join(json.dumps(entry) for entry in entries))


def test_a_delta_tables_live_rows_are_read(delta: Path) -> None:
    import deltalake

    found = delta_table.find(str(delta))
    assert (
        sorted(rows_of(found), key=lambda row: row["a"])
        == TABLE.select(["a", "b", "year", "state"]).to_pylist()
    )
    deltalake.DeltaTable(delta).delete("a >= 10")
    assert sorted(row["a"] for row in rows_of(delta_table.find(str(delta)))) == list(range(10))
    old = delta_table.find(str(delta), version=0, columns=["a"], filter_=[("a", "<", 20)])
    assert sorted(row["a"] for row in rows_of(old)) == list(range(20))


def test_rows_that_deletion_vectors_delete_are_left_out(delta: Path) -> None:
    add = next(e["add"] for e in log_of(delta) if "add" in e and "state=x0" in e["add"]["path"])
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["deletionVectors"],
        "writerFeatures": ["deletionVectors"],
    }
    assert pq.ParquetFile(delta / add["path"]).num_row_groups == 5
    gone = [0, 3, 110, 499]
    add_to_log(
        delta,
        {"protocol": protocol},
        {"remove": {**add, "deletionTimestamp": 1, "extendedFileMetadata": True}},
        {"add": {**add, "deletionVector": deletion_vector(gone)}},
    )
    rows = rows_of(delta_table.find(str(delta)))
    assert sorted(row["a"] for row in rows) == sorted(set(range(ROWS)) - {2 * n for n in gone})


def test_columns_that_were_renamed_have_their_new_names(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    table = tmp_path / "table"
    deltalake.write_deltalake(table, TABLE.select(["a", "b"]).rename_columns(["col-1", "b"]))
    metadata = next(entry["metaData"] for entry in log_of(table) if "metaData" in entry)
    schema = json.loads(metadata["schemaString"])
    for number, (column, name) in enumerate(zip(schema["fields"], ["new name", "b"], strict=True)):
        column["metadata"] = {
            "delta.columnMapping.id": number + 1,
            "delta.columnMapping.physicalName": column["name"],
        }
        column["name"] = name
    metadata["schemaString"] = json.dumps(schema)
    metadata["configuration"] = {
        "delta.columnMapping.mode": "name",
        "delta.columnMapping.maxColumnId": "2",
    }
    protocol = {"minReaderVersion": 2, "minWriterVersion": 5}
    add_to_log(table, {"protocol": protocol}, {"metaData": metadata})
    found = delta_table.find(str(table))
    assert list(found.columns) == ["new name", "b"]
    assert rows_of(found, ["new name"])[5] == {"new name": 5}


def test_what_is_no_delta_table_is_told(tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    with pytest.raises(DataError, match=r"cannot be read as a Delta table"):
        delta_table.find(str(tmp_path))
    shutil.rmtree(tmp_path)
