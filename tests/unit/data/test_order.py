"""The order of rows: pure, the same for any number of ranks, every row once an epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_runner.data import order
from horovod_runner.data.order import Order, permute

# Windows so small that small datasets have several.
_SMALL = {"_SMALL_ROWS": 100, "_WINDOW_STEPS": 10, "_BLOCK_ROWS": 4}
orders = st.builds(
    dict,
    rows=st.integers(1, 1500),
    global_batch=st.integers(1, 200),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
    last=st.sampled_from(["pad", "drop"]),
)


@pytest.fixture(autouse=True, params=["real sizes", "small windows"])
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "small windows":
        for name, value in _SMALL.items():
            monkeypatch.setattr(order, name, value)


def epoch_of(made: Order, epoch: int, size: int = 1) -> list[list[int]]:
    """All global batches of an epoch, put together from the ranks' parts."""
    found = []
    for step in range(made.steps):
        parts = [made.take(epoch, step, 1, rank, size)[0] for rank in range(size)]
        found.append(np.concatenate(parts).tolist())
    return found


@given(orders)
def test_every_row_comes_once_an_epoch_but_for_stated_padding(given: dict[str, Any]) -> None:
    made = Order(**given)
    for epoch in (0, 3):
        batches = epoch_of(made, epoch)
        real = [row for step, b in enumerate(batches) for row in b[: made.real(step, 0, 1)]]
        assert len(set(real)) == len(real)
        assert all(len(batch) == given["global_batch"] for batch in batches)
        if given["last"] == "pad":
            assert set(real) == set(range(given["rows"]))
            assert {row for batch in batches for row in batch} == set(real)
        else:
            assert len(real) == given["rows"] // given["global_batch"] * given["global_batch"]


@given(orders, st.integers(2, 9))
def test_any_number_of_ranks_sees_the_same_global_batches(given: dict[str, Any], size: int) -> None:
    made = Order(**given)
    assert epoch_of(made, 1, size) == epoch_of(Order(**given), 1)
    for step in range(made.steps):
        assert sum(made.real(step, rank, size) for rank in range(size)) == made.real(step, 0, 1)


@given(orders, st.data())
def test_a_seek_gives_what_a_replay_does(given: dict[str, Any], data: st.DataObject) -> None:
    replayed = Order(**given)
    if not replayed.steps:
        return
    rank, size = data.draw(st.integers(0, 2)), 3
    batches = []
    while len(batches) < replayed.steps:
        wanted = data.draw(st.integers(1, 30))
        found = replayed.take(2, len(batches), wanted, rank, size)
        assert 1 <= len(found) <= wanted
        batches += found.tolist()
    step = data.draw(st.integers(0, replayed.steps - 1))
    assert Order(**given).take(2, step, 1, rank, size).tolist() == [batches[step]]


def test_epochs_seeds_and_global_batches_have_orders_of_their_own() -> None:
    first = epoch_of(Order(500, 10), 0)
    assert epoch_of(Order(500, 10), 0) == first
    assert epoch_of(Order(500, 10), 1) != first
    assert epoch_of(Order(500, 10, seed=1), 0) != first
    rows = [row for batch in epoch_of(Order(500, 20), 0) for row in batch]
    assert sorted(rows) == list(range(500))


def test_without_shuffling_rows_come_as_they_are() -> None:
    assert epoch_of(Order(10, 4, shuffle=False), 5) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def test_fewer_rows_than_ranks_are_padded_on_all() -> None:
    made = Order(3, 8)
    assert made.steps == 1
    parts = [made.take(0, 0, 1, rank, 8)[0] for rank in range(8)]
    assert {int(row) for part in parts for row in part} == {0, 1, 2}
    assert [made.real(0, rank, 8) for rank in range(8)] == [1, 1, 1, 0, 0, 0, 0, 0]


def test_a_step_behind_the_epoch_is_refused() -> None:
    with pytest.raises(IndexError, match="step 3 of an epoch of 3 steps"):
        Order(10, 4).take(0, 3, 1, 0, 1)


@given(st.integers(1, 5000), st.binary(max_size=8))
def test_a_permutation_takes_each_number_to_another(count: int, key: bytes) -> None:
    found = permute(np.arange(count), count, key)
    assert sorted(found.tolist()) == list(range(count))


def test_a_permutation_is_the_same_everywhere_and_for_ever() -> None:
    found = permute(np.arange(10), 10, b"key")
    assert found.tolist() == [3, 7, 4, 5, 0, 6, 2, 8, 9, 1]


def test_the_means_of_batches_of_sorted_rows_spread_as_those_of_independent_ones(
    request: pytest.FixtureRequest,
) -> None:
    if "small" in request.node.name:
        pytest.skip("five blocks for each row of a batch take the real sizes")
    rows, batch = 4_000_000, 1024
    made = Order(rows, batch, seed=1)
    found = np.concatenate([made.take(0, step, 1, 0, 1) for step in range(0, made.steps - 1, 3)])
    independent = rows / np.sqrt(12) / np.sqrt(batch)
    assert 0.9 < found.mean(axis=1).std() / independent < 1.1


def test_hundred_million_rows_take_the_memory_of_a_window() -> None:
    import tracemalloc

    made = Order(100_000_000, 2048)
    tracemalloc.start()
    made.take(7, made.steps // 2, 1, 3, 8)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20
