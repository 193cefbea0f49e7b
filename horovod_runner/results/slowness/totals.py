"""Adds up what a rank has measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Final

import msgspec

from horovod_runner.wire.measurements import Profile, steps_of

_MOST: Final = 2**63 - 1  # what a record can hold: a hostile rank may count further
#: What a rank's main thread spends its time with beside computing.
SPENT: Final = ("data", "waiting", "moving", "report", "checkpoint")


@dataclass
class RankTotals:
    """What a rank has measured in all.

    Attributes without a line here are those of :class:`~horovod_runner.wire.measurements.Profile`,
    added up.

    Attributes:
        last: in how many of the compared collectives this rank was the last.
        lateness: seconds, over those, by which the median of the other ranks was earlier.
        waited_in_compared: seconds, over all compared collectives, until the last rank began.
    """

    seconds: float = 0.0
    steps: dict[str, int] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    cells: int = 0
    threads: int = 0
    bytes: int = 0
    collectives: int = 0
    waited: float = 0.0
    moved: float = 0.0
    cpu: float = 0.0
    main_cpu: float = 0.0
    starved: float = 0.0
    late: float = 0.0
    last: int = 0
    lateness: float = 0.0
    waited_in_compared: float = 0.0

    def add(self, profile: Profile, sign: int = 1) -> None:
        """Add a summary; with the sign -1, take it away again."""
        for name, value in _added(self, profile, sign).items():
            setattr(self, name, value)
        self.threads = profile.threads or self.threads

    @property
    def step_count(self) -> int:
        """The number of steps."""
        return steps_of(self.steps)


# Attributes of a summary that are added up: numbers, and numbers by name.
_ADDED: Final = tuple(
    field.name
    for field in fields(RankTotals)
    if field.name in Profile.__struct_fields__ and field.name != "threads"
)


def _added(first: RankTotals | Profile, second: Profile, sign: int = 1) -> dict[str, Any]:
    return {name: _sum(getattr(first, name), getattr(second, name), sign) for name in _ADDED}


def _sum(first: Any, second: Any, sign: int) -> Any:
    if isinstance(second, dict):
        names = {**first, **second}
        return {name: _sum(first.get(name, 0), second.get(name, 0), sign) for name in names}
    total = first + sign * second
    return total if isinstance(total, float) else max(-_MOST, min(total, _MOST))


def spent_of(profile: Profile) -> dict[str, float]:
    """Seconds by kind, of :data:`SPENT`.

    Where waiting and moving cannot be told apart in a summary, they count as waiting.
    """
    spent = {name: profile.spent.get(name, 0.0) for name in SPENT}
    spent["waiting"] += profile.spent.get("blocked", 0.0)
    return spent


def merged(rows: Iterable[Profile]) -> Iterator[Profile]:
    """Merge each two rows into one."""
    pairs = iter(rows)
    for first in pairs:
        second = next(pairs, None)
        if second is None:
            yield first
            return
        yield msgspec.structs.replace(second, **_added(first, second))
