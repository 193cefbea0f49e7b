"""Stores and pieces: complete or absent, filled by several processes, errors for damaged files."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from horovod_runner.data.pack import columns, store
from horovod_runner.data.pack.layout import Chunk, Layout
from horovod_runner.data.pack.store import PackedStore
from horovod_runner.data.read.pieces import join, write_together
from horovod_runner.data.read.readers import Table
from horovod_runner.errors import DataError

ROWS = 1000


def table(rows: int = ROWS) -> pa.Table:
    return pa.table(
        {
            "a": np.arange(rows, dtype=np.float32),
            "b": np.arange(rows) + 0.5,
            "c": -np.arange(rows, dtype=np.float32),
            "v": [[n, n + 1, n + 2] for n in range(rows)],
            "text": [f"row {n}" for n in range(rows)],
            "ragged": [[n] * (n % 4) for n in range(rows)],
        }
    )


class Parts:
    """Reads a table in units."""

    def __init__(self, units: list[int]) -> None:
        whole = table(sum(units))
        starts = np.cumsum([0, *units])
        self.readers = [
            Table(table=whole.slice(a, n), schema=whole.schema, units=[n], fingerprint="")
            for a, n in zip(starts, units, strict=False)
        ]
        names = list(self.readers[0].columns)
        self.layout = Layout(self.readers[0].settle(names), units)

    def __call__(self, unit: int) -> Iterator[Chunk]:
        return self.readers[unit].chunks(0, self.layout)


@pytest.fixture
def parts() -> Parts:
    return Parts([300, 0, 450, 250])


def filled(folder: Path, parts: Parts) -> PackedStore:
    packed = PackedStore.create(folder / "packed", parts.layout)
    packed.fill(parts)
    packed.open()
    return packed


def test_rows_are_gathered_in_any_order(tmp_path: Path, parts: Parts) -> None:
    packed = filled(tmp_path, parts)
    firsts = [0, 300, 750]  # of the units that have rows
    rows = np.append(np.random.default_rng(0).integers(0, ROWS, 500), firsts)
    taken = packed.take(rows, [c.name for c in parts.layout.columns])
    assert (taken["a"].values == rows).all()
    assert (taken["b"].values == rows + 0.5).all()
    assert (taken["c"].values == -rows).all()
    assert (taken["v"].values == rows[:, None] + np.arange(3)).all()
    assert bytes(taken["text"].values).decode() == "".join(f"row {n}" for n in rows)
    lengths = taken["ragged"].lengths
    assert lengths is not None
    assert (lengths == rows % 4).all()
    assert (taken["ragged"].values == np.repeat(rows, rows % 4)).all()
    assert list(packed.take(rows, ["b"])) == ["b"]


def test_chunks_give_all_rows_in_order(tmp_path: Path, parts: Parts) -> None:
    packed = filled(tmp_path, parts)
    chunks = [(chunk, packed.layout.split(chunk)) for chunk in packed.chunks(128)]
    assert sum(chunk.rows for chunk, _ in chunks) == ROWS
    values = np.concatenate([rows["a"].values for _, rows in chunks])
    assert (values == np.arange(ROWS)).all()
    text = b"".join(bytes(rows["text"].values) for _, rows in chunks)
    assert text.decode() == "".join(f"row {n}" for n in range(ROWS))


def _fill_and_report(folder: Path, parts: Parts, queue: Any) -> None:
    def read(unit: int) -> Iterator[Chunk]:
        queue.put((os.getpid(), unit))
        return parts(unit)

    packed = PackedStore.create(folder / "packed", parts.layout)
    packed.fill(read)
    packed.open()


def test_processes_share_the_units_of_a_store(tmp_path: Path) -> None:
    parts = Parts([100] * 8)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [
        context.Process(target=_fill_and_report, args=(tmp_path, parts, queue)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    units = [queue.get(timeout=200)[1] for _ in range(8)]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert sorted(units) == list(range(8))
    assert queue.empty()


def _die_in_the_middle(folder: Path, parts: Parts, queue: Any) -> None:
    def read(unit: int) -> Iterator[Chunk]:
        yield from parts(unit)
        queue.put(unit)
        signal.pause()

    PackedStore.create(folder / "packed", parts.layout).fill(read)


def test_the_unit_of_a_killed_process_is_packed_by_another(tmp_path: Path, parts: Parts) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=_die_in_the_middle, args=(tmp_path, parts, queue), daemon=True)
    worker.start()
    unit = queue.get(timeout=200)
    assert not (tmp_path / "packed" / f"unit-{unit}.json").exists()
    worker.kill()
    worker.join(60)
    packed = filled(tmp_path, parts)
    assert packed.take(np.arange(5), ["b"])["b"].values.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]


@pytest.mark.parametrize("name", ["fixed-0", "fixed-1", "ends-0", "values-0-2"])
def test_a_file_that_was_cut_or_removed_is_named(tmp_path: Path, parts: Parts, name: str) -> None:
    filled(tmp_path, parts)
    path = tmp_path / "packed" / name
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(DataError, match=rf"/packed/{name} .* {size - 1:,} bytes .* {size:,}\b"):
        PackedStore(tmp_path / "packed").open()
    path.unlink()
    with pytest.raises(DataError, match=f"/packed/{name} .*no longer exists"):
        PackedStore(tmp_path / "packed").open()


@pytest.mark.parametrize("name", ["unit-2.json", "layout.json"])
def test_a_missing_description_is_named(tmp_path: Path, parts: Parts, name: str) -> None:
    filled(tmp_path, parts)
    (tmp_path / "packed" / name).unlink()
    with pytest.raises(DataError, match=f"/packed.*{name}"):
        PackedStore(tmp_path / "packed").open()


def full(*_: object) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_too_small_is_noticed_before_rows_are_written(
    tmp_path: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"packed .* needs \d+\.\d kB, .*TMPDIR"):
        PackedStore.create(tmp_path / "packed", parts.layout)
    assert not (tmp_path / "packed").exists()


def test_a_disk_that_is_full_before_the_layout_is_written_leaves_no_store(
    tmp_path: Path, parts: Parts
) -> None:
    class Full(Layout):
        save = full

    with pytest.raises(DataError, match="free"):
        PackedStore.create(tmp_path / "packed", Full(parts.layout.columns, parts.layout.units))
    assert not (tmp_path / "packed").exists()


def test_no_incomplete_unit_is_used_after_the_disk_was_full(
    tmp_path: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = PackedStore.create(tmp_path / "packed", parts.layout)
    with monkeypatch.context() as patch:
        patch.setattr(store.os, "pwrite", full)
        with pytest.raises(DataError, match=r"packed .*TMPDIR"):
            packed.fill(parts)
    whole = {path.name for path in (tmp_path / "packed").glob("unit-*.json")}
    assert whole <= {"unit-1.json"}  # which has no rows
    packed.fill(parts)
    packed.open()


def test_a_unit_whose_number_of_rows_changed_is_refused(tmp_path: Path, parts: Parts) -> None:
    other = Parts([300, 0, 449, 251])
    packed = PackedStore.create(tmp_path / "packed", parts.layout)
    with pytest.raises(DataError, match=r"part 2 .* 449 .* 450 |part 3 .* 251 .* 250 "):
        packed.fill(other)


def test_other_users_cannot_read_the_files(tmp_path: Path, parts: Parts) -> None:
    filled(tmp_path, parts)
    for path in (tmp_path / "packed").iterdir():
        if not path.name.endswith(".json"):
            assert path.stat().st_mode & 0o077 == 0, path


def test_columns_of_one_type_share_a_matrix(parts: Parts) -> None:
    groups = [[column.name for column in group] for group in parts.layout.groups()]
    assert groups == [["a", "c"], ["b"], ["v"]]
    assert columns.Column("x", "vector", "int64", (2, 3)).width == 6


def test_a_piece_knows_the_shortest_and_the_longest_list_of_all_its_batches(tmp_path: Path) -> None:
    lists = [[[1.0, 2.0]], [[3.0, 4.0], [5.0]], [[6.0, 7.0, 8.0]]]
    batches = [pa.RecordBatch.from_pydict({"x": values}) for values in lists]
    (piece,) = write_together(tmp_path, "train", 1, lambda number: iter(batches))
    assert piece.rows == 4
    assert piece.lengths == {"x": [(1, 3)]}


@pytest.mark.parametrize(
    "columns",
    [
        [pa.array(texts) for texts in (["a", "bc"], ["ad", "bc"], ["ab", "c"], ["a", "bd"])],
        [pa.array(lists) for lists in ([[1, 2], [3]], [[1, 4], [3]], [[1], [2, 3]])],
        [pa.array(lists) for lists in ([[[1], [2]], [[3]]], [[[1], [2]], [[4]]])],
        [pa.array(numbers) for numbers in ([1.0, 2.0], [1.0, 3.0])],
        [pa.array([[("a", 1)], [("a", n)]], pa.map_(pa.string(), pa.int64())) for n in (2, 3)],
    ],
    ids=["text", "lists", "lists of lists", "numbers", "maps"],
)
def test_pieces_with_other_values_are_other_datasets(tmp_path: Path, columns: list[Any]) -> None:
    seen = set()
    for number, column in enumerate([*columns, columns[0]]):
        batch = pa.record_batch([column], ["x"])
        pieces = write_together(tmp_path, f"{number}", 1, [iter([batch])].__getitem__)
        seen.add(join(pieces, batch.schema, tmp_path).fingerprint)
    assert len(seen) == len(columns)
