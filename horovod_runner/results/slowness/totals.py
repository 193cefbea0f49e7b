"""Adds up what a rank has measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from horovod_runner.wire.measurements import Profile, steps_of

# Numbers that are added up.
_ADDED: Final = (
    "seconds",
    "cells",
    "bytes",
    "collectives",
    "waited",
    "moved",
    "cpu",
    "main_cpu",
    "starved",
    "late",
)


@dataclass
class RankTotals:
    """What a rank has measured in all.

    Attributes:
        seconds: the time that the summaries cover.
        steps: counts, by what was counted.
        spent: seconds of the main thread by kind.
        stages: seconds of any thread by what it does for a feed.
        cells: numbers in the first part of the batches.
        threads: how many threads torch computes with; 0 if that is not known.
        cpu, main_cpu: CPU seconds of the process, and of its main thread.
        starved: seconds in which the main thread could have run and had no core.
        late: seconds by which the sampling thread waited for the interpreter lock.
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
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + sign * getattr(profile, name))
        for name in ("steps", "spent", "stages"):
            setattr(self, name, _sum(getattr(self, name), getattr(profile, name), sign))
        self.threads = profile.threads or self.threads

    @property
    def step_count(self) -> int:
        """The number of steps."""
        return steps_of(self.steps)


def spent_of(profile: Profile) -> dict[str, float]:
    """Seconds by kind. Where waiting and moving cannot be told apart in a summary: as waiting."""
    spent = dict(profile.spent)
    blocked = spent.pop("blocked", 0.0)
    if blocked:
        spent["waiting"] = spent.get("waiting", 0.0) + blocked
    return spent


def merged(rows: Iterable[Profile]) -> Iterator[Profile]:
    """Merge each two rows into one."""
    pairs = iter(rows)
    for first in pairs:
        second = next(pairs, None)
        if second is None:
            yield first
            return
        yield msgspec.structs.replace(
            second,
            seconds=first.seconds + second.seconds,
            steps=_sum(first.steps, second.steps),
            spent=_sum(first.spent, second.spent),
            stages=_sum(first.stages, second.stages),
            cells=first.cells + second.cells,
            bytes=first.bytes + second.bytes,
            collectives=first.collectives + second.collectives,
            waited=first.waited + second.waited,
            moved=first.moved + second.moved,
            cpu=first.cpu + second.cpu,
            main_cpu=first.main_cpu + second.main_cpu,
            starved=first.starved + second.starved,
            late=first.late + second.late,
        )


def _sum(first: Mapping[str, Any], second: Mapping[str, Any], sign: int = 1) -> dict[str, Any]:
    return {name: first.get(name, 0) + sign * second.get(name, 0) for name in {**first, **second}}
