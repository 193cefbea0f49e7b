"""Learning rate schedules as factors: functions of (steps done, all steps)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Factor: TypeAlias = Callable[[int, int], float]
Curve: TypeAlias = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """A warm-up from 0, followed by a curve."""

    curve: Curve | Factor  # "linear" and "cosine" fall to 0 at the end, "constant" stays at 1
    warmup: int = 0  # steps

    def __call__(self, step: int, steps: int) -> float:
        """The factor of the learning rate for the step that follows ``step`` steps."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if callable(self.curve):
            return float(self.curve(step, steps))
        done = (step - self.warmup) / max(1, steps - self.warmup)
        if self.curve == "linear":
            return 1 - done
        return 1.0 if self.curve == "constant" else (1 + math.cos(math.pi * done)) / 2


def schedule_of(curve: Curve | Factor | None, warmup: int) -> Schedule | None:
    """The schedule that a user wants; None for a constant learning rate.

    Raises:
        ValueError: there is no such curve.
    """
    if not callable(curve) and curve not in (None, *get_args(Curve)):
        raise ValueError(
            f"schedule must be 'constant', 'linear' or 'cosine', or a function of (steps done, all "
            f"steps) that returns the factor of the learning rate, not {curve!r}"
        )
    if curve is None and not warmup:
        return None
    return Schedule(curve or "constant", warmup)
