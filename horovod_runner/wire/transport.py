"""What both ends of the message channel share: its address, keys and socket settings."""

from __future__ import annotations

import sys
from typing import Final

import zmq

from horovod_runner.wire.slots import ChannelAddress

__all__ = ["PART_BYTES", "ChannelAddress", "recv_event", "routing_id", "set_heartbeat"]

# Larger batches travel in parts. The size of a part bounds how much memory a connection can take
# on the driver before it has shown a key.
PART_BYTES: Final = 1 << 20
# With link._LOST_SECONDS: at most 13 s from a cut network to a rank that ends itself.
_HEARTBEAT_MS: Final = 2_000
_HEARTBEAT_TIMEOUT_MS: Final = 6_000


def routing_id(task: int) -> bytes:
    """The name by which the driver's socket addresses a task."""
    return str(task).encode()


def recv_event(monitor: zmq.Socket[bytes]) -> int:
    """Receive the next event of a monitor socket, as its number."""
    event = monitor.recv_multipart()[0]  # a 16-bit number and a value (zmq_socket_monitor)
    return int.from_bytes(event[:2], sys.byteorder)


def set_heartbeat(socket_: zmq.Socket[bytes]) -> None:
    """Make ZeroMQ detect a peer that vanished without closing the connection."""
    socket_.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket_.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket_.setsockopt(zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT_MS)
