"""Feeds with global_batch: the same steps and the same gradients with any number of ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_runner.data.feed import inexact
from horovod_runner.data.shard import Shard
from horovod_runner.errors import DataError
from tests.shards import as_rank, shard_of

ROWS = 103
TABLE = pa.table({"label": np.arange(ROWS), "x": np.arange(ROWS) ** 2 / ROWS})


@pytest.fixture
def shard() -> Shard:
    return shard_of(TABLE)


def feeds(
    shard: Shard, patch: pytest.MonkeyPatch, size: int, global_batch: int, **options: Any
) -> list[Any]:
    """The feeds of all ranks."""
    made = []
    for rank in range(size):
        as_rank(patch, rank, size)
        made.append(shard.batches(global_batch=global_batch, shuffle=True, seed=3, **options))
    return made


def mean_over_ranks(feeds: list[Any], batches: tuple[Any, ...]) -> float:
    """What an optimizer that averages over the ranks makes of their weighted mean losses."""
    losses = [feed.weight * batch["x"].mean() for feed, batch in zip(feeds, batches, strict=True)]
    return float(np.mean(losses))


@given(st.integers(1, 9), st.integers(1, 120))
def test_each_step_has_the_mean_of_one_process(size: int, global_batch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        alone = feeds(shard_of(TABLE), patch, 1, global_batch)
        expected = [batch["x"].mean() for batch in alone[0]]
        together = feeds(shard_of(TABLE), patch, size, global_batch)
        seen: Counter[int] = Counter()
        means = []
        for batches in zip(*together, strict=True):
            means.append(mean_over_ranks(together, batches))
            for feed, batch in zip(together, batches, strict=True):
                seen.update(batch["label"][: feed.real].tolist())
        assert means == pytest.approx(expected)
        assert seen == Counter(range(ROWS))
        # Keras divides by the rows of the rank's batch, and the ranks' gradients are averaged.
        weighted = feeds(shard_of(TABLE), patch, size, global_batch, sample_weights=True)
        keras = [
            np.mean([(batch["x"] * batch["weight"]).mean() for batch in batches])
            for batches in zip(*weighted, strict=True)
        ]
        assert keras == pytest.approx(expected, rel=1e-6)


class Layer:
    """A layer of Keras for batch normalization."""

    trainable = False


def test_parts_are_equal_from_the_epoch_in_which_batch_normalization_is_trained(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer()
    monkeypatch.setattr(inexact, "keras_layers", {layer})
    feed = feeds(shard, monkeypatch, 3, 32, sample_weights=True)[2]
    assert [len(batch["x"]) for batch in feed] == [10, 10, 10, 2]
    layer.trainable = True
    assert [len(batch["x"]) for batch in feed] == [11, 11, 11, 11]


def test_equal_parts_keep_the_rows_and_the_weights_of_the_ranks(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = feeds(shard, monkeypatch, 3, 32, sample_weights=True)
    expected = [batch["x"].mean() for batch in feeds(shard, monkeypatch, 1, 32)[0]]
    together[1].use_equal_parts()  # before the first batch, and rank 2 in the middle
    seen: Counter[int] = Counter()
    for step, batches in enumerate(zip(*together, strict=True)):
        assert len(batches[1]["x"]) == 11
        assert len(batches[0]["x"]) == [11, 11, 11, 3][step]
        assert len(batches[2]["x"]) == [10, 10, 11, 11][step]
        for feed, batch in zip(together, batches, strict=True):
            seen.update(batch["label"][: feed.real].tolist())
        mean = np.mean([(batch["x"] * batch["weight"]).mean() for batch in batches])
        assert mean == pytest.approx(expected[step], rel=1e-6)
        if step == 1:
            together[2].use_equal_parts()
    assert step == 3
    assert seen == Counter(range(ROWS))


def test_the_rows_of_an_epoch_come_once_across_changes_of_the_number_of_ranks(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    steps: list[set[int]] = []
    state: dict[str, Any] | None = None
    for size, count in [(4, 3), (2, 5), (3, 1), (7, 6)]:
        together = feeds(shard, monkeypatch, size, 22)
        if state is not None:
            for feed in together:
                feed.load_state_dict(state)
        left = count
        while left:
            epoch = together[0].state_dict()["epoch"]
            for batches in zip(*together, strict=True):
                rows = [
                    row
                    for feed, batch in zip(together, batches, strict=True)
                    for row in batch["label"][: feed.real].tolist()
                ]
                seen[epoch] += rows
                steps.append(set(rows))
                left -= 1
                if not left:
                    break
        states = [feed.state_dict() for feed in together]
        state = states[0]
        assert states.count(state) == size
    assert sorted(seen[0]) == sorted(seen[1]) == sorted(seen[2]) == list(range(ROWS))
    [alone] = feeds(shard, monkeypatch, 1, 22)
    assert steps == [set(batch["label"].tolist()) for _ in range(3) for batch in alone]


def test_what_becomes_of_the_last_batch(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 2, 3)
    lengths = {
        how: [len(batch["label"]) for batch in shard.batches(global_batch=50, last_batch=how)]
        for how in ("short", "pad", "drop", None)
    }
    assert lengths == {"short": [16, 16, 1], "pad": [16] * 3, "drop": [16] * 2, None: [16, 16, 1]}
    feed = shard.batches(global_batch=50)
    weights = [(feed.weight, feed.real) for _ in feed]
    assert weights == [(16 * 3 / 50, 16), (16 * 3 / 50, 16), (1.0, 1)]


def test_a_dataset_that_is_split_among_the_ranks_is_refused(shard: Shard) -> None:
    assert shard.rows == ROWS
    shard._counts = [50, 53]  # as if the hosts shared no folder
    with pytest.raises(DataError, match=r"train .*global_batch=8 .*shared_dir="):
        shard.batches(global_batch=8)
