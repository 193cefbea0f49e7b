"""Whether a failed run is launched again, and when: a pure function of how it ended before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

_FIRST_SECONDS = 1.0
_LONGEST_SECONDS = 60.0


class End(NamedTuple):
    """How an attempt failed.

    Attributes:
        kind: "error" where the ranks' own code failed or hung; "lost" where a process, an executor
            or a host went away.
        place: what failed and where, equal for failures that are the same.
        checkpoint: the furthest step of any checkpoint by then; -1 where there is none.
    """

    kind: Literal["error", "lost"]
    place: str
    checkpoint: int


def wait_before_restart(ends: Sequence[End], max_restarts: int) -> float | None:
    """The seconds to wait before the next attempt; None: there is none.

    Errors and losses are counted apart, each up to ``max_restarts``. An error that comes back at
    the same place without any checkpoint further on would come back for ever: the second time
    ends the run. The wait doubles with each failure of a kind in a row, from a second to a minute.

    Args:
        ends: how all attempts so far failed, in order.
        max_restarts: as given to HorovodRunner.
    """
    last = ends[-1]
    if sum(end.kind == last.kind for end in ends) > max_restarts:
        return None
    if len(ends) > 1 and last.kind == "error" and ends[-2] == last:
        return None
    in_a_row = 0
    for end in reversed(ends):
        if end.kind != last.kind or end.checkpoint != last.checkpoint:
            break
        in_a_row += 1
    return float(min(_LONGEST_SECONDS, _FIRST_SECONDS * 2 ** (in_a_row - 1)))
