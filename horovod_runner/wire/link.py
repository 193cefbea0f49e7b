"""A rank's end of the message channel."""

from __future__ import annotations

import math
import time
from contextlib import suppress

import msgspec
import zmq

from horovod_runner.common.limits import DEFAULTS, Limits
from horovod_runner.wire import messages
from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.events import Message
from horovod_runner.wire.framing import frame
from horovod_runner.wire.messages import FromDriver
from horovod_runner.wire.spool import Spool
from horovod_runner.wire.transport import (
    PART_BYTES,
    recv_event,
    routing_id,
    set_heartbeat,
)

_BEAT_SECONDS = 1.0
_FULL_SECONDS = 0.1  # between two tries to queue a message on a full disk
_ALIVE = messages.Alive()


class Link:
    """A rank's end, in the task process that supervises the rank's worker.

    Attributes:
        sent: how many batches ZeroMQ has accepted.
        dropped: how many batches were discarded because they could not be queued.
        socket: to poll for :attr:`wanted`.
        monitor: a socket to poll; readable when the connection has changed.
    """

    def __init__(self, address: ChannelAddress, task: int, limits: Limits = DEFAULTS) -> None:
        self._limits = limits
        self.sent = self.dropped = 0
        self._reached = False
        self._spool = Spool()
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.routing_id = routing_id(task)
        self.socket.curve_serverkey = address.server_key
        self.socket.curve_publickey = address.client_public_key
        self.socket.curve_secretkey = address.client_secret_key
        self.socket.sndhwm = 16
        self.socket.linger = 0
        self.socket.reconnect_ivl = 100  # ms
        set_heartbeat(self.socket, limits)
        self._lost_at: float | None = None
        self._beat_at = 0.0
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self.socket.connect(f"tcp://{address.host}:{address.port}")

    @property
    def wanted(self) -> int:
        """The events to poll for: input always, output while batches wait."""
        return zmq.POLLIN | (zmq.POLLOUT if self.waiting else 0)

    @property
    def waiting(self) -> int:
        """How many batches wait to be sent."""
        return len(self._spool)

    def reaches(self, seconds: float) -> bool:
        """Whether the driver answers within ``seconds``; call it before anything is sent."""
        deadline = time.monotonic() + seconds
        while not self._reached and (left := deadline - time.monotonic()) > 0:
            self.monitor.poll(math.ceil(left * 1000))
            self.observe()
        return self._reached

    def observe(self) -> None:
        """Read the events of :attr:`monitor`; :meth:`wait` does so by itself."""
        while self.monitor.poll(0):
            event = recv_event(self.monitor)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._reached = True
                self._lost_at = None
            elif self._lost_at is None:
                self._lost_at = time.monotonic()

    @property
    def disconnected(self) -> bool:
        """Whether the connection to the driver broke off and has not come back yet."""
        return self._lost_at is not None

    @property
    def lost(self) -> bool:
        """Whether the connection was broken for too long: the driver or the network is gone."""
        limit = self._limits.reconnect_driver
        return self._lost_at is not None and time.monotonic() - self._lost_at > limit

    def beat(self, activity: messages.Alive = _ALIVE) -> None:
        """Send the driver a heartbeat if one is due; :meth:`wait` does so by itself."""
        now = time.monotonic()
        # Batches that wait to be sent are as good as a heartbeat.
        if now - self._beat_at >= _BEAT_SECONDS and not len(self._spool):
            self._beat_at = now
            self.put(activity)

    def mark_lost(self) -> None:
        """Count the driver as lost from here on."""
        self._lost_at = -math.inf

    def put(self, message: Message) -> None:
        """Queue a message. Raises an OSError if the disk is full."""
        self.put_batch(frame(messages.encode(message)))

    def put_batch(self, batch: bytes) -> None:
        """Queue a batch of frames; raises as :meth:`put`."""
        self._spool.put(batch)

    def put_patiently(self, message: Message, patience: float) -> bool:
        """Queue a message; on a full disk wait until the driver has taken others.

        The driver's messages that arrive meanwhile are dropped. If the driver takes nothing for
        ``patience`` seconds the message is dropped, and this returns False.
        """
        sent, deadline = self.sent, time.monotonic() + patience
        while True:
            try:
                self.put(message)
                return True
            except OSError:
                if self.lost or time.monotonic() > deadline:
                    self.dropped += 1
                    return False
            self.wait(_FULL_SECONDS)
            if self.sent > sent:
                sent, deadline = self.sent, time.monotonic() + patience

    def flush(self) -> None:
        """Send what ZeroMQ accepts without blocking."""
        while len(self._spool) and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            batch = self._spool.get()
            parts = [batch[at : at + PART_BYTES] for at in range(0, len(batch), PART_BYTES)]
            # This cannot block: POLLOUT was set, and no other thread sends.
            self.socket.send_multipart(parts)
            self.sent += 1

    def receive(self) -> list[FromDriver]:
        """The driver's messages that have arrived."""
        received: list[FromDriver] = []
        while True:
            try:
                batch = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return received
            with suppress(ValueError, msgspec.MsgspecError):
                received += messages.decode_orders(batch)

    def wait(self, timeout: float) -> list[FromDriver]:
        """Send what waits and return the driver's messages, after at most ``timeout`` seconds."""
        self.beat()
        self.flush()
        self.socket.poll(round(timeout * 1000), self.wanted)
        self.observe()
        self.flush()
        return self.receive()

    def close(self) -> None:
        """Close the socket and drop what still waits. May be called twice."""
        self._spool.close()
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=0)
            self._context.term()
