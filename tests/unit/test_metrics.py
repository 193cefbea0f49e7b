"""The table of reports."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_runner.results.metrics_table import MAX_METRICS, Metrics
from horovod_runner.wire.events import Report

pa = pytest.importorskip("pyarrow")


def test_a_row_has_null_for_a_metric_that_its_report_lacks() -> None:
    metrics = Metrics()
    metrics.extend([Report(0, {"loss": 0.5}, step=1, time=1.5)], 1)
    metrics.extend([Report(1, {"loss": math.nan}, step=1)], 1)
    metrics.extend([Report(0, {"accuracy": 1}, epoch=2)], 2)
    table = metrics.table()
    assert table.column_names == ["rank", "attempt", "step", "epoch", "time", "loss", "accuracy"]
    rows = table.drop(["time"]).to_pylist()
    first = {"rank": 0, "attempt": 1, "step": 1, "epoch": None, "loss": 0.5, "accuracy": None}
    second = {"rank": 0, "attempt": 2, "step": None, "epoch": 2, "loss": None, "accuracy": 1.0}
    assert rows[:2] == [first, second]
    assert math.isnan(rows[2].pop("loss"))  # NaN is stored as NaN, not as null
    assert rows[2] == {"rank": 1, "attempt": 1, "step": 1, "epoch": None, "accuracy": None}
    assert table["time"][0].as_py().timestamp() == 1.5


def test_without_reports_the_table_has_no_rows() -> None:
    assert Metrics().table().num_rows == 0


@given(st.integers(1, 500), st.integers(1, 50))
def test_rows_and_dropped_reports_add_up_and_the_latest_value_is_kept(
    count: int, limit: int
) -> None:
    metrics = Metrics(limit)
    for step in range(count):
        metrics.extend([Report(0, {"loss": float(step)}, step=step, left_out=1)], 1)
    table = metrics.table()
    assert table.num_rows <= limit
    assert table.num_rows + metrics.ranks[0].dropped == 2 * count
    steps = table["step"].to_pylist()
    assert table["loss"].to_pylist() == steps
    assert len({b - a for a, b in itertools.pairwise(steps)}) <= 1  # equal intervals
    assert metrics.ranks[0].latest == {"loss": count - 1}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20), st.integers(1, 5)), max_size=40))
def test_the_reports_of_all_ranks_together_have_a_limit(calls: list[tuple[int, int, int]]) -> None:
    limit, sent = 300, dict.fromkeys(range(10), 0)
    metrics = Metrics(max_cells=limit)
    for rank, count, width in calls:
        numbers = {f"m{number}": 0.5 for number in range(width)}
        metrics.extend([Report(rank, numbers, step=step) for step in range(count)], 1)
        sent[rank] += count
    rows = metrics.table().to_pylist()
    # All values are kept but the rank.
    values = sum(value is not None for row in rows for value in row.values())
    assert values - len(rows) <= limit
    for rank, count in sent.items():
        kept = sum(row["rank"] == rank for row in rows)
        assert kept + (metrics.ranks[rank].dropped if rank in metrics.ranks else 0) == count
        assert (kept > 0) == (count > 0)


def test_points_have_their_step_and_attempt() -> None:
    metrics = Metrics()
    for attempt, step in [(1, 0), (1, 5), (2, 5)]:
        metrics.extend([Report(0, {"loss": step / 2}, step=step)], attempt)
    assert metrics.series() == {"loss": [(1, 0, 0.0), (1, 5, 2.5), (2, 5, 2.5)]}
    assert metrics.series(rank=3) == {}


def test_above_the_limit_of_metrics_new_ones_are_ignored() -> None:
    metrics = Metrics()
    many = {f"m{number}": 0.0 for number in range(MAX_METRICS)}
    metrics.extend([Report(0, many), Report(0, {"m0": 1.0, "new": 2.0})], 1)
    assert metrics.ranks[0].latest == {**many, "m0": 1.0}
    assert "new" not in metrics.series()
