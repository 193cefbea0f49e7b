"""Step numbers of reports, also for a rank that reports without steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horovod_runner.wire.events import Report


class StepCounter:
    """Finds the step of each report of one rank."""

    def __init__(self) -> None:
        self._count = 0
        self._last: int | None = None

    def step_of(self, report: Report) -> int:
        """Return the report's step, otherwise the last known step, otherwise the report count."""
        self._count += 1
        self._last = self._last if report.step is None else report.step
        return self._count if self._last is None else self._last
