"""Row order: deterministic, equal for any number of ranks, every row once an epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_runner.data.feed import order
from horovod_runner.data.feed.order import Order, permute

# Small windows, so that small datasets have several.
_SMALL = {"_SMALL_ROWS": 100, "_WINDOW_STEPS": 10, "_BLOCK_ROWS": 4}
orders = st.builds(
    dict,
    rows=st.integers(1, 1500),
    global_batch=st.integers(1, 200),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
    last_batch=st.sampled_from(["pad", "drop", "short"]),
)


@pytest.fixture(autouse=True, params=["real sizes", "small windows"])
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "small windows":
        for name, value in _SMALL.items():
            # No arguments: with other sizes the rows would have another order in every training.
            monkeypatch.setattr(order, name, value)


def epoch_of(planned: Order, epoch: int, size: int = 1) -> list[list[int]]:
    """All global batches of an epoch, joined from the parts of the ranks."""
    batches = []
    for step in range(planned.steps):
        parts = [
            planned.take(epoch, step, 1, rank, size)[0][: planned.part_rows(step, rank, size)]
            for rank in range(size)
        ]
        batches.append(np.concatenate(parts).tolist())
    return batches


@given(orders)
def test_every_row_comes_once_an_epoch_besides_padding(given: dict[str, Any]) -> None:
    planned = Order(**given)
    for epoch in (0, 3):
        batches = epoch_of(planned, epoch)
        real = [row for step, b in enumerate(batches) for row in b[: planned.real(step, 0, 1)]]
        assert len(set(real)) == len(real)
        assert all(len(batch) == given["global_batch"] for batch in batches[:-1])
        if given["last_batch"] == "short":
            assert sorted(row for batch in batches for row in batch) == list(range(given["rows"]))
            return
        assert all(len(batch) == given["global_batch"] for batch in batches)
        if given["last_batch"] == "pad":
            assert set(real) == set(range(given["rows"]))
            assert {row for batch in batches for row in batch} == set(real)
        else:
            assert len(real) == given["rows"] // given["global_batch"] * given["global_batch"]


# Slow: hypothesis tries a hundred orders, and each epoch of each is computed for all ranks.
@given(orders, st.integers(2, 9))
def test_any_number_of_ranks_sees_the_same_global_batches(given: dict[str, Any], size: int) -> None:
    planned = Order(**given)
    assert epoch_of(planned, 1, size) == epoch_of(Order(**given), 1)
    for step in range(planned.steps):
        assert sum(planned.real(step, rank, size) for rank in range(size)) == planned.real(
            step, 0, 1
        )


@given(orders, st.integers(1, 9))
def test_parts_differ_by_a_row_at_most_and_their_weights_add_up(
    given: dict[str, Any], size: int
) -> None:
    planned = Order(**given)
    for step in range(planned.steps):
        parts = [planned.part_rows(step, rank, size) for rank in range(size)]
        assert sum(parts) == planned.global_rows(step)
        assert max(parts) - min(parts) <= 1
        assert parts[0] == max(parts)
        for rank, part in enumerate(parts):
            assert planned.batch_rows(step, rank, size) == max(1, part)
            [rows] = planned.take(1, step, 1, rank, size)
            assert len(rows) == max(1, part)


@given(orders, st.integers(1, 9))
def test_equal_parts_begin_with_the_rows_of_the_rank_and_repeat_others_of_the_step(
    given: dict[str, Any], size: int
) -> None:
    planned = Order(**given)
    for step, batch in enumerate(epoch_of(planned, 1)):
        for rank in range(size):
            [own] = planned.take(1, step, 1, rank, size)
            [rows] = planned.take(1, step, 1, rank, size, equal=True)
            assert len(rows) == planned.batch_rows(step, rank, size, equal=True)
            assert len(rows) == -(-given["global_batch"] // size)
            assert rows[: len(own)].tolist() == own.tolist()
            assert set(rows.tolist()) <= set(batch)
            if given["last_batch"] == "short" and len(batch) < given["global_batch"]:
                assert len(set(rows.tolist())) == min(len(rows), len(set(batch)))


@given(orders, st.data())
def test_a_seek_gives_the_same_rows_as_a_replay(given: dict[str, Any], data: st.DataObject) -> None:
    replayed = Order(**given)
    if not replayed.steps:
        return
    rank, size = data.draw(st.integers(0, 2)), 3
    batches = []
    while len(batches) < replayed.steps:
        wanted = data.draw(st.integers(1, 30))
        taken = replayed.take(2, len(batches), wanted, rank, size)
        assert 1 <= len(taken) <= wanted
        batches += taken.tolist()
    step = data.draw(st.integers(0, replayed.steps - 1))
    assert Order(**given).take(2, step, 1, rank, size).tolist() == [batches[step]]


def test_the_order_depends_on_epoch_seed_and_global_batch() -> None:
    first = epoch_of(Order(500, 10), 0)
    assert epoch_of(Order(500, 10), 0) == first
    assert epoch_of(Order(500, 10), 1) != first
    assert epoch_of(Order(500, 10, seed=1), 0) != first
    rows = [row for batch in epoch_of(Order(500, 20), 0) for row in batch]
    assert sorted(rows) == list(range(500))


def test_without_shuffling_rows_keep_their_order() -> None:
    assert epoch_of(Order(10, 4, shuffle=False), 5) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def test_ranks_without_rows_get_padding() -> None:
    planned = Order(3, 8)
    assert planned.steps == 1
    parts = [planned.take(0, 0, 1, rank, 8)[0] for rank in range(8)]
    assert {int(row) for part in parts for row in part} == {0, 1, 2}
    assert [planned.real(0, rank, 8) for rank in range(8)] == [1, 1, 1, 0, 0, 0, 0, 0]


def test_a_rank_whose_part_is_empty_gets_one_row() -> None:
    planned = Order(2, 8, last_batch="short")
    parts = [planned.take(0, 0, 1, rank, 4)[0] for rank in range(4)]
    assert [len(part) for part in parts] == [1, 1, 1, 1]
    assert [planned.real(0, rank, 4) for rank in range(4)] == [1, 0, 1, 0]
    assert sorted([*parts[0], *parts[2]]) == [0, 1]
    full = Order(10, 2, last_batch="short")  # fewer rows than ranks in every step
    assert [full.real(0, rank, 3) for rank in range(3)] == [1, 1, 0]
    assert full.take(0, 0, 9, 2, 3).shape == (5, 1)


@given(st.integers(1, 5000), st.binary(max_size=8))
def test_a_permutation_maps_each_number_once(count: int, key: bytes) -> None:
    permuted = permute(np.arange(count), count, key)
    assert sorted(permuted.tolist()) == list(range(count))


def test_a_permutation_never_changes() -> None:
    permuted = permute(np.arange(10), 10, b"key")
    assert permuted.tolist() == [3, 7, 4, 5, 0, 6, 2, 8, 9, 1]


def test_batches_of_sorted_rows_vary_like_batches_of_independent_rows(
    request: pytest.FixtureRequest,
) -> None:
    if "small" in request.node.name:
        pytest.skip("five blocks for each row of a batch need the real sizes")
    rows, batch = 4_000_000, 1024
    planned = Order(rows, batch, seed=1)
    batches = np.concatenate(
        [planned.take(0, step, 1, 0, 1) for step in range(0, planned.steps - 1, 3)]
    )
    independent = rows / np.sqrt(12) / np.sqrt(batch)
    assert 0.9 < batches.mean(axis=1).std() / independent < 1.1


def test_memory_is_bounded_for_a_hundred_million_rows() -> None:
    import tracemalloc

    planned = Order(100_000_000, 2048)
    tracemalloc.start()
    planned.take(7, planned.steps // 2, 1, 3, 8)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20
