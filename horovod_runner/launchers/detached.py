"""Detached mode: the tasks of a barrier job run without the driver, which they cannot reach.

A stand-in for the driver starts on task 0's host. All tasks enter and leave detached mode together:
two barriers of Spark, which take about a second each.
"""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any, Final

import msgspec

from horovod_runner.errors import LaunchError
from horovod_runner.host import network
from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.job import Job, Record

if TYPE_CHECKING:
    from horovod_runner.driver.detached.stand_in import StandIn

_decode_address: Final = msgspec.json.Decoder(ChannelAddress).decode


class Detached:
    """One task's part in detached mode: a context that gives the address of the stand-in.

    Attributes:
        record: on task 0, after the context: what the stand-in kept for the driver. None elsewhere.
    """

    def __init__(self, job: Job, task: Any) -> None:
        self.record: Record | None = None
        self._job = job
        self._task = task
        self._stand_in: StandIn | None = None

    def __enter__(self) -> ChannelAddress:
        if self._task.attemptNumber() > 0:
            # Only the driver knows whether the ranks began, and it cannot be asked: never train
            # twice.
            raise LaunchError(
                "Spark started this task again, and the driver cannot be reached to ask whether "
                "the run had begun. Set HOROVOD_RUNNER_DRIVER_HOST to an address of the driver "
                "that the executors reach."
            )
        text = ""
        if self._task.partitionId() == 0:
            self._stand_in = self.start_stand_in(self._own_address())
            text = msgspec.json.encode(self._stand_in.address).decode()
        try:
            return _decode_address(self._gather(text, self._job.limits.detached_tasks)[0])
        except BaseException:
            self._close()
            raise

    def start_stand_in(self, host: str) -> StandIn:
        """Start the driver's stand-in, given an address of this host; on task 0 alone."""
        from horovod_runner.driver.detached.stand_in import StandIn  # late: few tasks need it

        return StandIn(self._job, host)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._gather("", None)  # the ranks of other tasks still need the stand-in
        finally:
            self._close()

    def _close(self) -> None:
        if self._stand_in is not None:
            self.record = self._stand_in.close()

    def _own_address(self) -> str:
        """The address of this host that the other tasks' hosts see."""
        names = [info.address.rpartition(":")[0] for info in self._task.getTaskInfos()]
        others = [name for name in names if name != names[0]]
        try:
            return network.address_towards((others or names)[0])
        except OSError:  # this host cannot resolve the name
            return network.default_address() or network.address_towards(socket.gethostname())

    def _gather(self, text: str, seconds: float | None) -> list[str]:
        """Exchange texts with all tasks, through Spark's barrier; in order of the tasks."""
        texts: list[str] = []
        errors: list[Exception] = []

        def gather() -> None:
            try:
                texts.extend(self._task.allGather(text))
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=gather, daemon=True)
        thread.start()
        thread.join(seconds)
        if errors:
            raise errors[0]
        if not texts:
            raise LaunchError(
                f"not all {self._job.size} tasks met within {seconds:g} s to run in detached "
                "mode, without the driver: some tasks may reach the driver, and others not. Set "
                "HOROVOD_RUNNER_DRIVER_HOST to an address of the driver that all executors reach."
            )
        return texts
