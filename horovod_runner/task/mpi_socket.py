"""Answers the startup requests of a worker's MPI, over the socket that the worker inherited."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from horovod_runner.wire.messages import Assignment, Fence, Lookup
from horovod_runner.worker.startup.pmi import Pmi

_READ_BYTES = 64 << 10


class MpiSocket:
    """The task's end of the socket. Every method returns whether the worker's MPI still uses it.

    Args:
        connection: the socket; it becomes non-blocking.
        send: sends the driver a request that needs all ranks.
    """

    def __init__(
        self,
        connection: socket.socket,
        assignment: Assignment,
        send: Callable[[Fence | Lookup], None],
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._pmi = Pmi(assignment, send)

    def fileno(self) -> int:
        """The socket's descriptor, for a poller."""
        return self._connection.fileno()

    def read(self) -> bool:
        """Read the requests that have arrived, and answer those that need no other rank."""
        try:
            data = self._connection.recv(_READ_BYTES)
            return bool(data) and self._answer(self._pmi.feed(data))
        except (OSError, ValueError):
            return False

    def fenced(self) -> bool:
        """All ranks have reached the fence."""
        return self._answer(self._pmi.fenced())

    def values(self, values: Mapping[str, str]) -> bool:
        """The driver has sent the values that all ranks published."""
        return self._answer(self._pmi.looked_up(values))

    def _answer(self, answer: bytes) -> bool:
        try:
            self._connection.sendall(answer)
        except OSError:  # the worker does not read, or has ended
            return False
        return True
