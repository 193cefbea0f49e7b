"""Gathers the warnings of a host's ranks that memory is nearly used up, and shows them as one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from horovod_runner.results.memory import warning
from horovod_runner.wire.measurements import MemoryShort
from horovod_runner.wire.slots import Slot

_GATHER_SECONDS: Final = 1.5  # each task looks once a second


class Shortage:
    """Receives the warnings of an attempt's ranks.

    Args:
        notice: shows a text to the user.
    """

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        # By host: when to show them, its name, and the warnings by rank.
        self._waiting: dict[str, tuple[float, str, dict[int, MemoryShort]]] = {}

    def take(self, slot: Slot, message: MemoryShort) -> None:
        """Receive a rank's warning; those of the host's other ranks follow within a second."""
        if slot.host not in self._waiting:
            due = time.monotonic() + _GATHER_SECONDS
            self._waiting[slot.host] = (due, slot.hostname, {})
        self._waiting[slot.host][2][message.rank] = message

    def show(self, *, all_: bool = False) -> None:
        """Show the warnings that are complete; or all of them, before a run ends."""
        now = time.monotonic()
        for host, (due, name, messages) in list(self._waiting.items()):
            if all_ or now >= due:
                del self._waiting[host]
                self._notice(warning(name, messages))
