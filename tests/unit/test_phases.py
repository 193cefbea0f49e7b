"""The states of an attempt, walked through by their table."""

from __future__ import annotations

import pytest

from horovod_runner.common.limits import DEFAULTS, Limits
from horovod_runner.driver.phases import ENDING, TABLE, Phase, State, Trigger
from tests.stand_ins import SetClock

# By default these three are the same.
LIMITS = Limits(ranks_end=9, launch_end=8, last_messages=7)


def way_to(target: State) -> list[Trigger]:
    """The shortest sequence of events that leads to a state."""
    ways: dict[State, list[Trigger]] = {State.STARTING: []}
    queue = [State.STARTING]
    for state in queue:
        for event, after in TABLE[state].then.items():
            if after not in ways:
                ways[after] = [*ways[state], event]
                queue.append(after)
    return ways[target]


def phase_in(state: State, clock: SetClock) -> Phase:
    phase = Phase(LIMITS, clock)
    for event in way_to(state):
        assert phase.on(event)
    assert phase.state is state
    return phase


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Trigger)
def test_an_event_does_what_the_table_says(state: State, event: Trigger) -> None:
    clock = SetClock(100.0)
    phase = phase_in(state, clock)
    until = phase.until
    clock.now += 1
    target = TABLE[state].then.get(event)
    assert phase.on(event) == (target is not None)
    assert phase.state is (target or state)
    if target is None:
        assert phase.until == until
    else:
        limit = TABLE[target].limit
        assert phase.until == (None if limit is None else clock.now + getattr(LIMITS, limit))


@pytest.mark.parametrize("state", State)
def test_every_state_has_a_row_can_be_reached_and_leads_to_the_end(state: State) -> None:
    phase, row = phase_in(state, SetClock(100.0)), TABLE[state]
    assert row.waits_for
    assert row.limit is None or {Trigger.TIMEOUT, Trigger.PLACED} & set(row.then)
    phase.on(Trigger.LAUNCH_ENDED)
    phase.on(Trigger.ALL_LEFT)
    assert phase.state is State.OVER


@pytest.mark.parametrize("state", sorted(ENDING, key=lambda state: state.value))
def test_ranks_that_were_told_to_end_never_go_on(state: State) -> None:
    assert set(TABLE[state].then.values()) <= ENDING
    assert phase_in(state, SetClock(100.0)).ending


@pytest.mark.parametrize("state", State)
def test_a_run_that_was_given_up_ends_within_half_a_minute(state: State) -> None:
    phase = Phase(DEFAULTS, SetClock(100.0))
    for event in way_to(state):
        phase.on(event)
    for event in (Trigger.CALL_OFF, Trigger.UNHEARD):
        phase.on(event)
    assert not phase.can_be_called_off
    seconds = 0.0
    while phase.state is not State.OVER:
        limit = TABLE[phase.state].limit
        assert limit is not None
        seconds += getattr(DEFAULTS, limit)
        assert seconds <= 30
        assert phase.on(Trigger.TIMEOUT)


def test_a_limit_can_be_given_and_extended() -> None:
    clock = SetClock(100.0)
    phase = Phase(LIMITS, clock)
    assert phase.until is None
    phase.on(Trigger.HELLO, 7.0)
    assert phase.until == 107.0
    clock.now = 106.0
    phase.extend(5.0)
    assert phase.until == 111.0


def test_when_a_rank_has_left_at_a_commit_other_hosts_have_time_to_end_theirs() -> None:
    clock = SetClock(100.0)
    phase = phase_in(State.RUNNING, clock)
    phase.on(Trigger.CHANGE)
    until = phase.until
    assert until == clock.now + 3
    clock.now += 1
    # The others leave, too, or notice the end of the first one.
    assert not phase.on(Trigger.FAILURE)
    assert not phase.on(Trigger.SECONDARY)
    assert (phase.state, phase.until, phase.ending) == (State.LEAVING, until, False)
