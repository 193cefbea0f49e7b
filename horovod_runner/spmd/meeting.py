"""Where ranks without MPI exchange addresses: Spark's barrier or Horovod's rendezvous server."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from typing import Protocol

from horovod_runner.errors import LaunchError

_MEET_SECONDS = 600.0


class Meeting(Protocol):
    """A service through which all ranks of a program can exchange one small value."""

    rank: int
    size: int

    def allgather(self, value: bytes) -> list[bytes]:
        """Return the values of all ranks, in the order of ranks; some hundred bytes, once."""


class Alone:
    """The meeting of a single process."""

    rank, size = 0, 1

    def allgather(self, value: bytes) -> list[bytes]:
        """Return the value of this process."""
        return [value]


class SparkMeeting:
    """The meeting of the tasks of a Spark barrier stage."""

    def __init__(self) -> None:
        from pyspark import BarrierTaskContext

        self._context = BarrierTaskContext.get()
        self.rank: int = self._context.partitionId()
        self.size: int = len(self._context.getTaskInfos())

    def allgather(self, value: bytes) -> list[bytes]:
        """As :class:`Meeting`; takes Spark about a second."""
        return [bytes.fromhex(text) for text in self._context.allGather(value.hex())]


class StoreMeeting:
    """The meeting at Horovod's rendezvous server: that of ``horovodrun`` or of HorovodRunner."""

    _count = 0  # meetings of this process

    def __init__(self) -> None:
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            raise LaunchError(
                "the number of ranks of an elastic job may change, but spmd.start() chooses the "
                "ranks that train once. Start the program without --min-np, --max-np and "
                "--host-discovery-script."
            )
        self.rank = int(os.environ["HOROVOD_RANK"])
        self.size = int(os.environ["HOROVOD_SIZE"])
        address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        if not address:
            raise LaunchError(
                "HOROVOD_SIZE is set but HOROVOD_GLOO_RENDEZVOUS_ADDR is not, so the other ranks "
                "cannot be found. Start the program with horovodrun, mpirun, srun or "
                "`horovod-runner run`."
            )
        StoreMeeting._count += 1
        port = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        self._url = f"http://{address}:{port}/spmd_{StoreMeeting._count}"

    def allgather(self, value: bytes) -> list[bytes]:
        """As :class:`Meeting`; LaunchError if a rank did not come within ten minutes."""
        deadline = time.monotonic() + _MEET_SECONDS
        try:
            self._request(self.rank, "PUT", value)
            return [self._get(rank, deadline) for rank in range(self.size)]
        except OSError as error:
            raise LaunchError(f"Horovod's rendezvous server does not answer: {error}") from error

    def _get(self, rank: int, deadline: float) -> bytes:
        while (value := self._request(rank, "GET")) is None:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"rank {rank} of {self.size} did not call spmd.start() within "
                    f"{_MEET_SECONDS:.0f} s. All ranks must call it: look at that rank's output."
                )
            time.sleep(0.05)
        return value

    def _request(self, key: int, method: str, value: bytes | None = None) -> bytes | None:
        request = urllib.request.Request(  # noqa: S310 - always http
            f"{self._url}/{key}", data=value, method=method
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy
        try:
            with opener.open(request, timeout=60) as response:
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
