"""The states of an attempt: what each one waits for, until when, and what ends it.

    STARTING -> GATHERING -> RUNNING -------------------------> SETTLING -> OVER
        |           |          |-> FAILING, LEAVING -.             ^
     SILENT      DETACHED      `-> AWAITING_CAUSE -> STOPPING -----|
                                                     CALLED_OFF ---|
                                                     ABANDONED ----'

`TABLE` has every transition. Pure: the supervisor reports triggers, and acts on the new state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Final, NamedTuple

from horovod_runner.common.limits import Limits


class State(Enum):
    """Where an attempt is."""

    STARTING = auto()
    SILENT = auto()
    GATHERING = auto()
    DETACHED = auto()
    RUNNING = auto()
    AWAITING_CAUSE = auto()
    FAILING = auto()
    LEAVING = auto()
    STOPPING = auto()
    CALLED_OFF = auto()
    ABANDONED = auto()
    SETTLING = auto()
    OVER = auto()


class Trigger(Enum):
    """What moves an attempt from one state to another."""

    HELLO = auto()  # a task has reported
    PLACED = auto()  # all tasks have reported, and have their ranks
    UNREACHABLE = auto()  # the tasks run, and cannot reach this process
    SECONDARY = auto()  # a rank failed because another one went away
    FAILURE = auto()  # a rank failed by itself
    CHANGE = auto()  # a rank has left at a commit, because the number of ranks is to change
    PROBLEM = auto()  # the run cannot go on: a lost rank, a hang, ranks that do not fit
    ALL_LOST = auto()  # no task is left that could end by itself
    CALL_OFF = auto()  # the caller cancelled or interrupted the run
    UNHEARD = auto()  # the same, where no task would hear of it
    LAUNCH_ENDED = auto()  # the launcher says that all tasks have ended
    ALL_LEFT = auto()  # the last message of every task has arrived
    TIMEOUT = auto()  # the state has lasted for as long as it may


class StateRow(NamedTuple):
    """What is known of a state.

    Attributes:
        limit: the field of :class:`Limits` that says how long it may last; None without limit, or
            by the launcher's own limit.
        then: the next state, by trigger. Other triggers change nothing.
    """

    waits_for: str
    limit: str | None
    then: Mapping[Trigger, State]


_BEFORE_RANKS = {
    Trigger.FAILURE: State.FAILING,
    Trigger.PROBLEM: State.STOPPING,
    Trigger.LAUNCH_ENDED: State.SETTLING,
}
_ENDING = {Trigger.ALL_LOST: State.ABANDONED, Trigger.LAUNCH_ENDED: State.SETTLING}

TABLE: Final[Mapping[State, StateRow]] = {
    State.STARTING: StateRow(
        "the first task to report",
        None,  # Launch.expected
        {
            Trigger.HELLO: State.GATHERING,
            Trigger.UNREACHABLE: State.SILENT,
            Trigger.TIMEOUT: State.STOPPING,
            Trigger.UNHEARD: State.ABANDONED,
            **_BEFORE_RANKS,
        },
    ),
    State.SILENT: StateRow(
        "a task to report after all, or the end of a launch that does without the driver",
        "detached_sign",  # then the user is told; the state lasts on
        {
            Trigger.HELLO: State.GATHERING,
            Trigger.TIMEOUT: State.SILENT,
            Trigger.UNHEARD: State.ABANDONED,
            **_BEFORE_RANKS,
        },
    ),
    State.GATHERING: StateRow(
        "all tasks to report",
        "all_tasks",
        {
            Trigger.PLACED: State.RUNNING,
            Trigger.UNREACHABLE: State.DETACHED,
            Trigger.TIMEOUT: State.STOPPING,
            Trigger.CALL_OFF: State.CALLED_OFF,
            **_BEFORE_RANKS,
        },
    ),
    State.DETACHED: StateRow(
        "the end of a launch whose ranks do without the driver",
        None,
        {Trigger.UNHEARD: State.ABANDONED, Trigger.LAUNCH_ENDED: State.SETTLING},
    ),
    State.RUNNING: StateRow(
        "main to return on all ranks",
        None,
        {
            Trigger.SECONDARY: State.AWAITING_CAUSE,
            Trigger.FAILURE: State.FAILING,
            Trigger.CHANGE: State.LEAVING,
            Trigger.PROBLEM: State.STOPPING,
            Trigger.CALL_OFF: State.CALLED_OFF,
            Trigger.LAUNCH_ENDED: State.SETTLING,
        },
    ),
    State.AWAITING_CAUSE: StateRow(
        "the rank whose end other ranks have noticed",
        "cause",
        {
            Trigger.FAILURE: State.FAILING,
            Trigger.CHANGE: State.LEAVING,
            Trigger.PROBLEM: State.STOPPING,
            Trigger.TIMEOUT: State.STOPPING,
            Trigger.CALL_OFF: State.CALLED_OFF,
            Trigger.LAUNCH_ENDED: State.SETTLING,
        },
    ),
    State.FAILING: StateRow(
        "other ranks that fail in the same way",
        "other_failures",
        {
            Trigger.FAILURE: State.FAILING,
            Trigger.PROBLEM: State.STOPPING,
            Trigger.TIMEOUT: State.STOPPING,
            Trigger.CALL_OFF: State.CALLED_OFF,
            Trigger.UNHEARD: State.ABANDONED,
            Trigger.LAUNCH_ENDED: State.SETTLING,
        },
    ),
    State.LEAVING: StateRow(
        "all ranks to leave at their commits: those of another host may still write it",
        "leaving",
        {
            Trigger.PROBLEM: State.STOPPING,
            Trigger.TIMEOUT: State.STOPPING,
            Trigger.CALL_OFF: State.CALLED_OFF,
            Trigger.UNHEARD: State.ABANDONED,
            Trigger.LAUNCH_ENDED: State.SETTLING,
        },
    ),
    State.STOPPING: StateRow(
        "the ranks to end, as they were told",
        None,
        {Trigger.CALL_OFF: State.CALLED_OFF, Trigger.UNHEARD: State.ABANDONED, **_ENDING},
    ),
    State.CALLED_OFF: StateRow(
        "the ranks to end, as the caller wants",
        "ranks_end",
        {Trigger.TIMEOUT: State.ABANDONED, **_ENDING},
    ),
    State.ABANDONED: StateRow(
        "the launcher to end the tasks by force",
        "launch_end",
        {Trigger.TIMEOUT: State.OVER, Trigger.LAUNCH_ENDED: State.SETTLING},
    ),
    State.SETTLING: StateRow(
        "the last messages of tasks that outlive their launch",
        "last_messages",
        {Trigger.ALL_LEFT: State.OVER, Trigger.TIMEOUT: State.OVER},
    ),
    State.OVER: StateRow("nothing", None, {}),
}

#: The states in which all ranks have been told to end.
ENDING: Final = frozenset(
    {State.STOPPING, State.CALLED_OFF, State.ABANDONED, State.SETTLING, State.OVER}
)


class Phase:
    """The state of one attempt, and until when it may last."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self.state = State.STARTING
        #: The moment by which the state has to end; None without limit.
        self.until: float | None = None

    def on(self, trigger: Trigger, seconds: float | None = None) -> bool:
        """Move to the next state; False where the trigger changes nothing in this one.

        The next state may last some seconds; by default what the table says.
        """
        target = TABLE[self.state].then.get(trigger)
        if target is None:
            return False
        self.state = target
        self.extend(self._limit(target) if seconds is None else seconds)
        return True

    def _limit(self, state: State) -> float | None:
        name = TABLE[state].limit
        return None if name is None else getattr(self._limits, name)

    def extend(self, seconds: float | None) -> None:
        """Let the state last so long from now on; None: without limit."""
        self.until = None if seconds is None else self._clock() + seconds

    @property
    def can_be_called_off(self) -> bool:
        """Whether a caller who gives up changes anything; where not, the end has a time limit."""
        return bool({Trigger.CALL_OFF, Trigger.UNHEARD} & TABLE[self.state].then.keys())

    @property
    def ending(self) -> bool:
        """Whether all ranks have been told to end."""
        return self.state in ENDING
