"""Which tasks are lost: ticks and silence."""

from __future__ import annotations

import pytest

from horovod_runner.common.limits import DEFAULTS
from horovod_runner.driver.liveness import Liveness


def watched(
    tasks: int = 1, silent: float = DEFAULTS.silent_task, suspect: float = DEFAULTS.reconnect_task
) -> Liveness:
    """A watch over tasks that have just been heard."""
    liveness = Liveness(silent, suspect)
    for task in range(tasks):
        liveness.heard(task)
    return liveness


def ticks_until_lost(liveness: Liveness, alive: tuple[int, ...] = ()) -> tuple[int, list[int]]:
    for tick in range(1, 100):
        for task in alive:
            liveness.heard(task)
        lost = liveness.tick()
        if lost:
            return tick, lost
    raise AssertionError("nobody was lost in 100 ticks")


def test_a_silent_task_is_lost_and_the_others_are_not() -> None:
    liveness = watched(3)
    ticks, lost = ticks_until_lost(liveness, alive=(0, 2))
    assert lost == [1]
    assert 10 <= ticks <= 13


def test_a_broken_connection_shortens_the_wait() -> None:
    liveness = watched(2)
    liveness.suspect()
    assert liveness.suspicious
    ticks, lost = ticks_until_lost(liveness, alive=(0,))
    assert (ticks, lost) == (4, [1])
    assert not liveness.suspicious


def test_a_task_that_is_back_after_its_connection_broke_is_not_lost() -> None:
    liveness = watched()
    liveness.suspect()
    for _ in range(3):
        assert liveness.tick() == []
    liveness.heard(0)
    assert [liveness.tick() for _ in range(8)] == [[]] * 8


def test_a_task_that_has_left_is_neither_lost_nor_heard_again() -> None:
    liveness = watched()
    liveness.leave(0)
    liveness.heard(0)  # a beat that was under way
    assert not liveness.present
    assert [liveness.tick() for _ in range(30)] == [[]] * 30


def test_a_task_that_has_returned_is_lost_again_when_it_falls_silent() -> None:
    liveness = watched()
    liveness.leave(0)
    liveness.returned(0)
    assert ticks_until_lost(liveness) == (12, [0])


@pytest.mark.parametrize(("silent", "ticks"), [(3, 3), (2.5, 3), (0.1, 1)])
def test_a_part_of_a_tick_counts_as_a_whole_one(silent: float, ticks: int) -> None:
    assert ticks_until_lost(watched(silent=silent)) == (ticks, [0])
    liveness = watched(silent=100, suspect=silent)
    liveness.suspect()
    assert ticks_until_lost(liveness) == (ticks, [0])


def test_the_most_silent_are_those_that_went_first() -> None:
    liveness = watched(3)
    liveness.tick()
    liveness.heard(1)
    assert liveness.most_silent() == [0, 2]
