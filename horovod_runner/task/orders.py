"""Receives the driver's messages in a task while no worker process runs yet."""

from __future__ import annotations

from collections.abc import Iterator
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


def receive(link: Link, seconds: float) -> Iterator[FromDriver]:
    """Wait up to ``seconds`` for messages of the driver, and yield them.

    Raises:
        CalledOffError: the driver stopped this rank, or the connection to it is lost.
    """
    for message in link.wait(seconds):
        if isinstance(message, messages.Stop):
            raise CalledOffError(message.reason)
        yield message
    if link.lost:
        raise CalledOffError(LOST_DRIVER)


def stay_alive(link: Link) -> None:
    """Send the driver a heartbeat while the worker is being started; raises as :func:`receive`."""
    for _ in receive(link, 0):
        pass  # no message concerns a rank at this point, except Stop
