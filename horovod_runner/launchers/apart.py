"""How the tasks of a barrier job meet without the driver: task 0's host gives it a deputy.

All tasks enter, and leave together: two meetings through Spark, of a second each.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from horovod_runner import host
from horovod_runner.channel import ChannelAddress
from horovod_runner.errors import LaunchError
from horovod_runner.job import Job, Record

# Longer than tasks that do reach the driver may wait there for the others.
_MEET_SECONDS = 300.0


class Deputy(Protocol):
    """What is asked of the driver's deputy (deputy.py)."""

    address: ChannelAddress

    def close(self) -> Record:
        """Leave, when all ranks have ended."""


class Apart:
    """One task's part; a context that gives the deputy's address.

    Args:
        job: what is run.
        task: Spark's BarrierTaskContext.
        deputy: makes the deputy, of a job and an address of this host.

    Attributes:
        record: on task 0, once it has been left.
    """

    def __init__(self, job: Job, task: Any, deputy: Callable[[Job, str], Deputy]) -> None:
        self.record: Record | None = None
        self._job = job
        self._task = task
        self._make = deputy
        self._deputy: Deputy | None = None

    def __enter__(self) -> ChannelAddress:
        if self._task.attemptNumber() > 0:
            # The driver would know, but nobody can ask it: never train twice.
            raise LaunchError("Spark started this task again, and the run may have begun already")
        told = ""
        if self._task.partitionId() == 0:
            self._deputy = self._make(self._job, self._own_address())
            told = _encode(self._deputy.address)
        try:
            return _decode(self._meet(told, _MEET_SECONDS)[0])
        except BaseException:
            self._close()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._meet("", None)  # the ranks of other tasks still need the deputy
        finally:
            self._close()

    def _close(self) -> None:
        if self._deputy is not None:
            self.record = self._deputy.close()

    def _own_address(self) -> str:
        """The address of this host that the other tasks' hosts see."""
        names = [info.address.rpartition(":")[0] for info in self._task.getTaskInfos()]
        others = [name for name in names if name != names[0]]
        try:
            return host.address_towards((others or names)[0])
        except OSError:  # a name that is not known here
            return socket.gethostbyname(socket.gethostname())

    def _meet(self, told: str, seconds: float | None) -> list[str]:
        """What all tasks tell, once all have come.

        Raises:
            LaunchError: not all came; Spark then ends the whole job.
        """
        heard: list[str] = []
        errors: list[Exception] = []

        def gather() -> None:
            try:
                heard.extend(self._task.allGather(told))
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=gather, daemon=True)
        thread.start()
        thread.join(seconds)
        if errors:
            raise errors[0]
        if not heard:
            raise LaunchError(
                f"no task can reach the driver without all doing so, and within {seconds:.0f} s "
                f"not all {self._job.size} tasks met to go on without it"
            )
        return heard


def _encode(address: ChannelAddress) -> str:
    fields = asdict(address).items()
    return json.dumps({k: v.decode() if isinstance(v, bytes) else v for k, v in fields})


def _decode(told: str) -> ChannelAddress:
    fields = json.loads(told).items()
    return ChannelAddress(**{k: v.encode() if k.endswith("_key") else v for k, v in fields})
