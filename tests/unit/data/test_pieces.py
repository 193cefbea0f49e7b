"""Pieces: rows that are packed before their number is known."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from horovod_runner.data.read.pieces import write_together


def test_a_piece_knows_the_shortest_and_the_longest_list_of_all_its_batches(tmp_path: Path) -> None:
    lists = [[[1.0, 2.0]], [[3.0, 4.0], [5.0]], [[6.0, 7.0, 8.0]]]
    batches = [pa.RecordBatch.from_pydict({"x": values}) for values in lists]
    (piece,) = write_together(tmp_path, "train", 1, lambda number: iter(batches))
    assert piece.rows == 4
    assert piece.lengths == {"x": (1, 3)}
