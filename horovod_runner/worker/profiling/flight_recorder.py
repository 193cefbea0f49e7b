"""Reads which collectives torch.distributed has begun, for trainings with DDP or FSDP.

torch keeps its last collectives in memory, its "flight recorder", with the time at which this rank
has begun each one. worker/startup sets how many: of a rank with more collectives in a second, the
last ones are measured.
"""

from __future__ import annotations

import math
import pickle
import sys
import time
from typing import Any, Final

from horovod_runner.common.text import ranks_text
from horovod_runner.wire.measurements import Waiting
from horovod_runner.worker.profiling.collectives import Collective

_BYTES: Final = {"Double": 8, "Long": 8, "Half": 2, "BFloat16": 2, "Char": 1, "Byte": 1, "Bool": 1}
_MOST_WAITS: Final = 10


class FlightRecorder:
    """The collectives of this process since the last call of :meth:`take`."""

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0
        self._last = -1
        self._looked_at = -math.inf
        self._unended: list[dict[str, Any]] = []
        self._begun: dict[int, float] = {}  # those by number, in seconds of the monotonic clock

    def take(self) -> list[Collective]:
        """Return the collectives of all ranks that have begun since the last call.

        When they ended is not known for all backends, so nothing is said of it.
        """
        # The modules may be on their way in, in the main thread.
        is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
        c10d = sys.modules.get("torch._C._distributed_c10d")
        dump = getattr(c10d, "_dump_fr_trace", None)
        self._unended = []
        if is_initialized is None or dump is None or not is_initialized():
            return []
        # The bytes come from torch in this process, with no data of anybody else.
        trace = pickle.loads(  # noqa: S301
            dump(includeCollectives=True, includeStackTraces=False, onlyActive=False)
        )
        now = time.monotonic()
        ahead = time.time() - now
        since, self._looked_at = self._looked_at, now
        begun_before, self._begun = self._begun, {}
        before = self._last
        taken = []
        for entry in trace.get("entries", ()):
            number = entry["record_id"]
            # torch writes the time of a clock that may be set at any moment.
            begun = min(max(since, entry["time_created_ns"] * 1e-9 - ahead), now)
            if not (entry["retired"] or entry["is_p2p"]):
                self._unended.append(entry)
                self._begun[number] = begun_before.get(number, begun)
            if number <= before:
                continue
            self._last = max(self._last, number)
            if entry["pg_id"] == 0 and not entry["is_p2p"]:
                taken.append(_collective(entry, begun))
                self.bytes += taken[-1].bytes
        self.count += len(taken)
        return taken

    def waits(self, seconds: float) -> list[Waiting]:
        """The collectives that had not ended at the last call of :meth:`take`.

        This rank must have entered them so many seconds ago.
        """
        before = time.monotonic() - seconds
        entered = [each for each in self._unended if self._begun[each["record_id"]] < before]
        named = map(_waiting, entered[:_MOST_WAITS])
        return [waiting for waiting in named if waiting is not None]


def _collective(entry: dict[str, Any], begun: float) -> Collective:
    sizes = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    size = sum(math.prod(shape) * _BYTES.get(kind, 4) for shape, kind in sizes)
    return Collective(entry["collective_seq_id"], 0, size, begun, None, None)


def _waiting(entry: dict[str, Any]) -> Waiting | None:
    """The message's entry; None if the ranks of the group are not known."""
    _backend, _, operation = entry["profiling_name"].rpartition(":")
    name = f"{operation} number {entry['collective_seq_id']}"
    if operation == "all_reduce":  # the other ranks must have the same shapes
        name += f" of shape {', '.join(map(str, entry['input_sizes']))}"
    if entry["pg_id"] == 0:
        return Waiting(name)
    group, description = entry["process_group"]
    ranks = _ranks(group)
    if not ranks:
        return None
    return Waiting(f"{name} of the group {description or group} ({ranks_text(ranks)})", ranks)


def _ranks(group: str) -> list[int]:
    """The ranks of a process group; empty if they are not known."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    for process_group, name in dict(getattr(world, "pg_names", {})).items():
        if name == group:
            return sorted(world.pg_group_ranks[process_group])  # type: ignore[union-attr]
    return []
