"""Receives the driver's messages in a task while no worker process runs yet."""

from __future__ import annotations

from typing import Final

from horovod_runner.errors import HorovodRunnerError
from horovod_runner.wire import messages
from horovod_runner.wire.link import Link
from horovod_runner.wire.messages import FromDriver

LOST_DRIVER: Final = (
    "the connection to the driver broke off and did not come back: the driver was killed, or the "
    "network to it is cut"
)


class CalledOffError(HorovodRunnerError):
    """The driver stopped this rank, or was lost, before the worker process was started."""


class DetachError(Exception):
    """The tasks must switch to detached mode: some of them cannot reach the driver."""


def receive(link: Link, seconds: float) -> list[FromDriver]:
    """Wait up to ``seconds`` for messages of the driver, and return them.

    Raises:
        CalledOffError: the driver stopped this rank, also where other messages came before the
            Stop; or the connection to it is lost.
    """
    received = link.wait(seconds)
    for message in received:
        if isinstance(message, messages.Stop):
            raise CalledOffError(message.reason)
    if link.lost:
        raise CalledOffError(LOST_DRIVER)
    return received
