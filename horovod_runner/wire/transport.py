"""What both ends of the message channel share: keys and socket settings."""

from __future__ import annotations

import secrets
import sys
from typing import Any, Final

import zmq

from horovod_runner.common.limits import Limits
from horovod_runner.wire.addresses import Call

# Larger batches travel in parts. The size of a part bounds how much memory a connection can take
# on the driver before it has shown a key.
PART_BYTES: Final = 1 << 20
_MOST_TTL_MS: Final = 6_553_000  # ZeroMQ's limit

# Below the ports that Linux gives to connections, and above the well-known ones.
_CALL_PORTS: Final = range(20_000, 32_000)


def new_call() -> Call:
    """Choose ports and keys for calling a stand-in."""
    ports = [_CALL_PORTS.start + secrets.randbelow(len(_CALL_PORTS)) for _ in range(4)]
    return Call(tuple(ports), *zmq.curve_keypair())


def guarded_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, keys: tuple[bytes, bytes], admits: Any
) -> tuple[zmq.Socket[bytes], Any]:
    """A server's socket, and the authenticator that lets clients in; stop it at the end.

    The keys are the server's, public and secret. ``admits`` says whose keys are let in, as
    :class:`OneKey`.
    """
    from zmq.auth.thread import ThreadAuthenticator  # late: it loads asyncio, which takes long

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=admits)
    opened = context.socket(kind)
    opened.curve_server = True
    opened.curve_publickey, opened.curve_secretkey = keys
    opened.linger = 0
    return opened, authenticator


class OneKey:
    """Accepts clients with one key, that of this run; for ZeroMQ's authenticator."""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client is let in."""
        return key == self._public_key


def routing_id(task: int) -> bytes:
    """The name by which the driver's socket addresses a task."""
    return str(task).encode()


def recv_event(monitor: zmq.Socket[bytes]) -> int:
    """Receive the next event of a monitor socket, as its number."""
    event = monitor.recv_multipart()[0]  # a 16-bit number and a value (zmq_socket_monitor)
    return int.from_bytes(event[:2], sys.byteorder)


def set_heartbeat(socket_: zmq.Socket[bytes], limits: Limits) -> None:
    """Make ZeroMQ detect a peer that vanished without closing the connection."""
    timeout = max(3, round(limits.heartbeat * 1000))
    socket_.setsockopt(zmq.HEARTBEAT_IVL, timeout // 3)
    socket_.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout)
    socket_.setsockopt(zmq.HEARTBEAT_TTL, min(timeout, _MOST_TTL_MS))
