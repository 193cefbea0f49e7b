"""Who belongs to a pool, and when the number of ranks is to change."""

from __future__ import annotations

import pytest

from horovod_runner.driver.elastic.members import Members, PoolMember
from horovod_runner.driver.elastic.scaling import ScalingPolicy
from tests.stand_ins import SetClock


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


def pool(clock: SetClock, seats: int, most: int = 4, grow_after: float = 60.0) -> Members:
    members = Members(ScalingPolicy(1, most, grow_after), clock)
    for seat in range(seats):
        join(members, seat)
    return members


def join(members: Members, seat: int, began: int = 0) -> None:
    members.join(PoolMember(seat, began))


def seats(members: list[PoolMember]) -> list[int]:
    return [member.seat for member in members]


def test_those_that_came_first_come_first(clock: SetClock) -> None:
    members = pool(clock, 0)
    for seat in (3, 1, 2):
        join(members, seat)
    assert seats(members.start(1, 2)) == [3, 1]
    assert seats(members.ready) == [2]
    assert seats(members.working) == [3, 1]


def test_a_task_that_was_started_again_comes_last_and_works_no_more(clock: SetClock) -> None:
    members = pool(clock, 2)
    members.start(1, 2)
    join(members, 0, began=1)
    assert seats(members.working) == [1]
    assert not members.finish(0, 1)
    assert members.finish(1, 1)
    assert seats(members.ready) == [1, 0]


def test_ranks_are_asked_once_to_leave_for_more_and_not_too_soon(clock: SetClock) -> None:
    members = pool(clock, 2)
    members.start(1, 2)
    join(members, 2)
    clock.now = 59.9
    assert members.change() == 0
    clock.now = 60.0
    assert members.change() == 1
    assert members.change() == 0


def test_no_more_ranks_than_wanted(clock: SetClock) -> None:
    members = pool(clock, 4, most=3, grow_after=0.0)
    members.start(1, 3)
    assert seats(members.ready) == [3]
    assert members.change() == 0


@pytest.mark.parametrize("leave", ["finish", "lose"])
def test_ranks_that_still_run_are_not_asked_when_another_has_ended(
    clock: SetClock, leave: str
) -> None:
    members = pool(clock, 3, most=3, grow_after=0.0)
    members.start(1, 3)
    members.finish(0, 1)
    if leave == "lose":  # and comes back
        members.lose(0)
        join(members, 0, began=1)
    join(members, 3)
    assert seats(members.working) == [1, 2]
    assert members.change() == 0
    members.leave(1, "executor 1 is being decommissioned")
    assert members.change() == 1


def test_nobody_is_asked_between_two_attempts(clock: SetClock) -> None:
    members = pool(clock, 3, grow_after=0.0)
    assert members.change() == 0
    members.start(1, 2)
    for seat in (0, 1):
        members.finish(seat, 1)
    assert members.change() == 0


def test_ranks_leave_at_once_for_an_executor_that_goes(clock: SetClock) -> None:
    members = pool(clock, 2)
    members.start(1, 2)
    members.leave(1, "executor 1 is being decommissioned")
    assert members.gone() == []  # it still works
    assert members.change() == 1
    members.finish(0, 1)
    members.finish(1, 1)
    assert seats(members.ready) == [0]
    assert members.gone() == [1]
    assert members.gone() == []
    assert members.find(1) is None


def test_a_member_of_an_earlier_attempt_ends_nothing(clock: SetClock) -> None:
    members = pool(clock, 1)
    members.start(2, 1)
    assert not members.finish(0, 1)
    assert seats(members.working) == [0]
