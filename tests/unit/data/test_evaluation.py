"""Exact evaluation: the mean over all rows, without padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from horovod_runner.data import Shard, evaluate
from horovod_runner.data.feed import evaluation
from tests.shards import as_rank, shard_of

ROWS = 100
TABLE = pa.table({"label": np.arange(ROWS), "x": np.arange(ROWS) ** 2 / 8})


@pytest.fixture
def shard() -> Shard:
    return shard_of(TABLE)


def measure(batch: Any) -> dict[str, Any]:
    return {"x": batch["x"], "is_even": batch["label"] % 2 == 0}


EXACT = {"x": float(TABLE["x"].to_numpy().mean()), "is_even": 0.5}


@pytest.mark.parametrize("batch_size", [1, 7, 100, 64])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_mean_is_that_of_all_rows(shard: Shard, batch_size: int, shuffle: bool) -> None:
    feed = shard.batches(batch_size, shuffle=shuffle)
    for _ in range(2):
        means = evaluate(feed, measure)
        assert list(means) == ["x", "is_even"]
        assert means == pytest.approx(EXACT)


def test_the_sums_of_all_ranks_are_added(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    totals: list[Any] = []

    def add_up(own: Any) -> Any:
        totals.append(own)
        return sum(totals)

    # Users do not choose what adds up: it is what `main` has connected the ranks with.
    ranks = SimpleNamespace(add=add_up)
    monkeypatch.setattr(evaluation, "connected", lambda what: ranks)
    for rank in range(3):
        as_rank(monkeypatch, rank, 3)
        means = evaluate(shard.batches(8, shuffle=True), measure)
    assert means == pytest.approx(EXACT)
    assert [rows for rows, *_ in totals] == [36, 32, 32]


def test_an_evaluation_that_was_left_early_begins_again(shard: Shard) -> None:
    feed = shard.batches(8)
    next(iter(feed))
    assert evaluate(feed, measure) == pytest.approx(EXACT)


@pytest.mark.parametrize(
    ("measured", "kind", "message"),
    [
        ({"loss": 0.5}, ValueError, r"'loss'.*\(\).* 8 rows.*\(8,\)"),
        ({"loss": np.ones((8, 1))}, ValueError, r"'loss'.*\(8, 1\).*\(8,\)"),
        (0.5, TypeError, "measure .*dict.* float"),
    ],
)
def test_other_results_of_measure_are_refused(
    shard: Shard, measured: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        evaluate(shard.batches(8), lambda batch: measured)


def test_other_iterables_are_refused() -> None:
    with pytest.raises(TypeError, match=r"evaluate .*to_torch.* list"):
        evaluate([1, 2], measure)  # type: ignore[arg-type]


def test_several_ranks_that_cannot_reach_each_other_are_refused(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(monkeypatch, 0, 2)
    with pytest.raises(RuntimeError, match=r"evaluate .*hvd\.init\(\)"):
        evaluate(shard.batches(8), measure)
