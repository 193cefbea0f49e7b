"""A pass over a rank's rows, each once and without padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_runner.data.feed import feed as feeds
from horovod_runner.data.feed.rows_once import RowsOnce
from tests.shards import as_rank, shard_of


@given(
    rows=st.integers(1, 60),
    size=st.integers(1, 5),
    batch=st.sampled_from([{"batch_size": 1}, {"batch_size": 8}, {"global_batch": 7}]),
    shuffle=st.booleans(),
    chunk=st.sampled_from([1, 200, 1 << 22]),
)
def test_every_row_comes_once_with_the_weight_1(
    rows: int, size: int, batch: dict[str, int], shuffle: bool, chunk: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feeds, "_CHUNK_BYTES", chunk)  # no option: users have no use for it
        shard = shard_of(pa.table({"label": np.arange(rows)}))
        seen: list[int] = []
        for rank in range(size):
            as_rank(patch, rank, size)
            options: Any = {"columns": ["label"], "shuffle": shuffle, "sample_weights": True}
            feed = shard.batches(**options, **batch)
            once = RowsOnce(feed)
            batches = list(once)
            assert len(batches) == len(once)
            if once.rows:
                seen += [label for each in batches for label in each["label"]]
            else:
                assert [each["label"].shape for each in batches] == [(1,)]
            assert all((each["weight"] == 1).all() for each in batches)
            for other in (feed, shard.batches(**options, **batch)):
                assert other.state_dict()["epoch"] == 0
            assert next(iter(once))["label"].tolist() == batches[0]["label"].tolist()
    assert sorted(seen) == list(range(rows))
