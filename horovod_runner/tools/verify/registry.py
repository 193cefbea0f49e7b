"""All checks, in the order in which they run: what has to work for the next ones comes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from horovod_runner.errors import HorovodRunnerError
from horovod_runner.tools.verify.check import VerifyCheck
from horovod_runner.tools.verify.checks import (
    bandwidth,
    build,
    failures,
    feed,
    keras_training,
    placement,
    profile,
    sharded,
    training,
)

CHECKS: Final[Sequence[VerifyCheck]] = tuple(
    found
    for module in (
        *(build, placement, bandwidth, training, feed, keras_training, sharded, failures, profile),
    )
    for found in vars(module).values()
    if isinstance(found, VerifyCheck)
)


def find(name: str) -> VerifyCheck:
    """Return a check."""
    for check in CHECKS:
        if check.name == name:
            return check
    names = ", ".join(check.name for check in CHECKS)
    raise HorovodRunnerError(f"there is no check {name!r}; the checks are {names}")
