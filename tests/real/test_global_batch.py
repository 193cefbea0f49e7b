"""global_batch: weights that do not depend on the number of ranks, nor on changes of it."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest

from horovod_runner import HorovodRunner
from horovod_runner.options import grouped
from tests.real.global_batch_training import (
    ROWS,
    STEPS,
    TRAININGS,
    normalized,
    some_steps,
    table,
    train_all,
)

# One run trains all, and pytest-xdist's processes do not share runs.
pytestmark = [pytest.mark.horovod, pytest.mark.xdist_group("global batch")]
TOLERANCE = 1e-6


def run(size: int, main: Any, **arguments: Any) -> Any:
    options = grouped(
        {"preload_frameworks": True, "cpu_collectives": "gloo"}
    )  # more ranks than cores
    return HorovodRunner(np=-size, **options).run(main, **arguments)


@cache
def trained(size: int) -> dict[str, list[Any]]:
    return dict(run(size, train_all, train=table(), valid=table(40)))


def assert_equal(weights: list[Any], expected: list[Any]) -> None:
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_number_of_ranks_learns_what_one_process_learns(size: int, name: str) -> None:
    assert_equal(trained(size)[name], trained(1)[name])


def test_a_training_goes_on_with_other_numbers_of_ranks_as_if_nothing_had_happened() -> None:
    undisturbed = run(1, some_steps, train=table(), until=3 * STEPS, saved=None)
    saved: dict[str, Any] | None = None
    rows: dict[int, Counter[int]] = {}
    for size, until in [(4, STEPS - 3), (2, 2 * STEPS - 4), (3, 3 * STEPS)]:
        saved = run(size, some_steps, train=table(), until=until, saved=saved)
        assert saved is not None
        for epoch, numbers in saved["rows"].items():
            rows.setdefault(epoch, Counter()).update(numbers)
    assert saved is not None
    assert_equal(saved["weights"], undisturbed["weights"])
    assert rows == {epoch: Counter(range(ROWS)) for epoch in range(3)}


def test_batch_normalization_is_said_once_and_gets_equal_parts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    taken = run(3, normalized, train=table(67))  # 32 + 32 + 3 rows: 11, 11, 10 and 1, 1, 1
    text = capfd.readouterr().out
    assert text.count("the model has batch normalization") == 1
    assert text.count("equal parts, 11 rows on each of 3 ranks") == 1
    for rank, real in enumerate([11, 11, 10]):
        first = [real, real] if rank == 2 else [11, real]  # before the first loss was seen
        assert taken[rank] == [first, [11, real], [11, 1], [11, real], [11, real], [11, 1]]
