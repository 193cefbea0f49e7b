"""Parses the warnings of Horovod's stall inspector: which tensor waits for which ranks.

Rank 0 prints them on stderr, in lines of this form (horovod 0.28.1, common/stall_inspector.cc):

    [2026-01-31 12:00:00.000000: W .../stall_inspector.cc:107] One or more tensors were submitted
    Missing ranks:
    1: [allreduce.grad.fc1, allreduce.grad.fc2]
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from horovod_runner.wire.messages import Stall

_HEAD = "stall_inspector.cc:"
_SECOND = "Missing ranks:"
_RANK = re.compile(r"(\d+)!?: \[(.*)\]$")


class StallReader:
    """Finds the stall inspector's warnings among a worker's lines."""

    def __init__(self) -> None:
        self._inside = False

    def feed(self, lines: Iterable[str]) -> tuple[list[Stall], bool]:
        """Parse the next lines; returns the stalls, and whether there were any other lines."""
        missing: dict[str, list[int]] = {}
        other = False
        for line in lines:
            if _HEAD in line:
                self._inside = True
            elif self._inside and (match := _RANK.match(line)):
                for tensor in match.group(2).removesuffix(" ...").split(", "):
                    missing.setdefault(tensor, []).append(int(match.group(1)))
            elif not (self._inside and line.startswith(_SECOND)):
                self._inside = False
                other = True
        return [Stall(tensor, tuple(ranks)) for tensor, ranks in missing.items()], other
