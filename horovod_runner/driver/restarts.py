"""Decides whether a failed run is launched again, and when. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from horovod_runner.driver.launcher import JobCancelledError
from horovod_runner.errors import (
    CancelledError,
    ChannelError,
    DataError,
    GpuError,
    HangError,
    HorovodRunnerError,
    LaunchError,
    RankFailedError,
    SerializationError,
    SlotError,
)
from horovod_runner.results.failures import FRAME

_FIRST_SECONDS = 1.0
_LONGEST_SECONDS = 60.0
_PLACE_CHARACTERS = 1000  # of each failed attempt, which are all kept
# Another attempt would fail in the same way.
_FINAL = (
    CancelledError,
    ChannelError,
    DataError,
    GpuError,
    JobCancelledError,
    SerializationError,
    SlotError,
)


class Decision(NamedTuple):
    """What follows a failed attempt.

    Attributes:
        seconds: to wait before the next attempt; None: there is none.
        why: for the user; empty where the error says all.
    """

    seconds: float | None
    why: str = ""


class End(NamedTuple):
    """How an attempt failed.

    Attributes:
        kind: "error" where the ranks' own code failed or hung; "lost" where a process, an executor
            or a host went away.
        place: what failed and where, equal for failures that are the same.
        step: the furthest step of any checkpoint or commit by then; -1 where there is none.
    """

    kind: Literal["error", "lost"]
    place: str
    step: int


class RestartPolicy:
    """Allows so many attempts after errors, and so many after losses of a process or host.

    Errors and losses are counted separately, each up to ``max_restarts``. An error that repeats at
    the same place without a newer checkpoint or commit would repeat for ever: the second time ends
    the run. The wait doubles with each failure of the same kind in a row, from 1 s to 60 s.

    Args:
        elastic: whether the other ranks of a lost one are there: then the first wait is none.
    """

    def __init__(self, max_restarts: int, *, elastic: bool = False) -> None:
        self._max_restarts = max_restarts
        self._elastic = elastic
        self._ends: list[End] = []
        # Writing a checkpoint or commit again is not progress.
        self._reached = -1

    def decide(self, error: Exception, step: int) -> Decision:
        """Decide what follows an attempt that raised an error.

        ``step`` is the furthest of any checkpoint or commit that is there; -1 for none.
        """
        if isinstance(error, _FINAL) or self._max_restarts == 0:
            return Decision(None)
        self._reached = max(self._reached, step)
        last = end_of(error, self._reached)
        self._ends.append(last)
        if last.kind == "error" and self._ends[-2:-1] == [last]:
            return Decision(
                None,
                "the same error occurred again at the same place, and there was no newer "
                "checkpoint or commit meanwhile: it would occur in every attempt",
            )
        count = sum(end.kind == last.kind for end in self._ends)
        if count > self._max_restarts:
            what = "errors" if last.kind == "error" else "losses of a process or host"
            return Decision(None, f"there were {count} {what} (max_restarts)")
        what = "error" if last.kind == "error" else "loss of a process or host"
        return Decision(self._wait(), f"{what} {count}, max_restarts={self._max_restarts}")

    def _wait(self) -> float:
        last = self._ends[-1]
        in_a_row = 0
        for end in reversed(self._ends):
            if end.kind != last.kind or end.step != last.step:
                break
            in_a_row += 1
        if self._elastic and last.kind == "lost" and in_a_row == 1:
            return 0.0
        doublings = min(in_a_row - 1, 10)  # a float holds no 2**1024
        return float(min(_LONGEST_SECONDS, _FIRST_SECONDS * 2**doublings))


def end_of(error: Exception, step: int) -> End:
    """How an attempt ended, by the error that it raised."""
    if isinstance(error, HangError):
        return End("error", "hang", step)
    if isinstance(error, RankFailedError):
        code = error.exit_code
        if code is None or code < 0:
            return End("lost", f"rank {error.rank}: {code}", step)
        return End("error", f"exit code {code}", step)
    if isinstance(error, LaunchError):
        return End("lost", "launch", step)
    # The user's exception counts by its place: its text may hold numbers that change.
    frames = FRAME.findall(str(error.__cause__))
    where = ":".join(frames[-1]) if frames else ""
    if isinstance(error, HorovodRunnerError):
        where = where or str(error)[:_PLACE_CHARACTERS]
    return End("error", f"{type(error).__qualname__} at {where}", step)
