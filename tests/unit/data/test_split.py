"""Shard.split: rows to train with and rows to validate with."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from horovod_runner.data.shard import Shard
from horovod_runner.errors import DataError
from tests.shards import as_rank, shard_of


def table(rows: int) -> pa.Table:
    return pa.table({"row": np.arange(rows), "held_out": np.arange(rows) % 5 == 1})


def rows_of(shard: Shard, **options: Any) -> list[int]:
    return [int(row) for batch in shard.batches(global_batch=64, **options) for row in batch["row"]]


@pytest.mark.parametrize("rows", [7, 1000, 70_001])
def test_a_fraction_of_the_rows_is_validated_with_and_the_others_are_trained_with(
    rows: int,
) -> None:
    train, valid = shard_of(table(rows)).split(0.2, seed=4)
    assert abs(valid.rows - 0.2 * rows) < 128
    assert train.rows + valid.rows == rows
    seen = rows_of(train, shuffle=True), rows_of(valid)
    assert sorted(seen[0] + seen[1]) == list(range(rows))
    assert seen[1] == sorted(seen[1])  # unshuffled rows keep their order
    again = shard_of(table(rows)).split(0.2, seed=4)[1]
    assert rows_of(again) == seen[1]
    assert rows_of(shard_of(table(rows)).split(0.2, seed=5)[1]) != seen[1]


def test_a_column_says_which_rows_are_validated_with() -> None:
    train, valid = shard_of(table(1000)).split("held_out")
    assert [row for row in range(1000) if row % 5 == 1] == rows_of(valid)
    assert [row for row in range(1000) if row % 5 != 1] == rows_of(train)


def test_any_number_of_ranks_sees_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = set(rows_of(shard_of(table(999)).split(0.3)[1]))
    seen = []
    for rank in range(3):
        as_rank(monkeypatch, rank, 3)
        feed = shard_of(table(999)).split(0.3)[1].batches(global_batch=64)
        seen += [int(row) for batch in feed for row in batch["row"][: feed.real]]
    assert sorted(seen) == sorted(alone)


def test_a_saved_position_belongs_to_its_part() -> None:
    train, valid = shard_of(table(1000)).split(0.2)
    state = train.batches(global_batch=64).state_dict()
    shard_of(table(1000)).split(0.2)[0].batches(global_batch=64).load_state_dict(state)
    for other in (valid, shard_of(table(1000)), shard_of(table(1000)).split(0.3)[0]):
        with pytest.raises(DataError, match="part"):
            other.batches(global_batch=64).load_state_dict(state)


@pytest.mark.parametrize(
    ("validation", "error"),
    [(0.0001, DataError), ("no_such", DataError), (1.5, ValueError), (2, TypeError)],
)
def test_a_split_that_cannot_be_is_refused(validation: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"validation|no_such"):
        shard_of(table(100)).split(validation)


def test_a_split_is_not_split_again() -> None:
    with pytest.raises(ValueError, match="whole dataset"):
        shard_of(table(100)).split(0.5)[0].split(0.5)


def test_parts_that_are_pickled_are_packed_once(tmp_path: Path) -> None:
    for part in shard_of(table(100)).split(0.2):
        assert len(rows_of(pickle.loads(pickle.dumps(part)))) >= part.rows
    assert len(list(tmp_path.glob("*/layout.json"))) == 1
