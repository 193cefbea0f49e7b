r"""The encrypted message channel between the driver and the ranks' hosts.

    worker --pipe--> Link (spool) --ZeroMQ, CURVE--> Channel --> Driver
                        ^                               |
                        +-------- Assignment, Stop -----+

Both ends prove themselves with a key pair made for this run: whoever lacks them gets no further
than the handshake, and is counted. A message on the wire is a batch: framed messages one after the
other, so that a flood of small ones costs little.

Memory is bounded on both ends. What the driver does not take stays in the rank's spool, on disk
once it is large; ZeroMQ's own queues hold a few batches.
"""

from __future__ import annotations

import math
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import zmq

from horovod_runner import messages
from horovod_runner.errors import ChannelError
from horovod_runner.frames import frame, unframe
from horovod_runner.messages import FromDriver, FromRank, Message
from horovod_runner.spool import Spool

_QUEUED_BATCHES = 64  # on the driver, over all ranks: of a checkpoint 64 MiB
# A larger batch travels in parts: what bounds a part bounds what a stranger, who has shaken no
# hands yet, makes the driver hold.
_PART_BYTES = 1 << 20
_ENCRYPTION_BYTES = 1 << 10  # far more than CURVE adds to a part
_OTHER_DESCRIPTORS = 512  # Python's, Spark's, the user's own
# Together at most 13 s from a cut network to a rank that gives up.
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 6_000
_LOST_SECONDS = 5.0
_BEAT_SECONDS = 1.0
_ALIVE = messages.Alive()
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(frozen=True)
class ChannelAddress:
    """How a rank reaches the driver; travels inside the pickled job and nowhere else."""

    host: str
    port: int
    server_key: bytes = field(repr=False)
    client_public_key: bytes = field(repr=False)
    client_secret_key: bytes = field(repr=False)


class Channel:
    """The driver's end.

    Args:
        host: the IPv4 address or name by which the ranks reach this machine. Listened on alone
            where it is an address of this machine that others can reach, else on all.
        size: how many ranks there are; bounds the memory that each may take.

    Attributes:
        address: for the ranks.
        refused: handshakes that failed: strangers, wrong keys.
        dropped: batches with right keys that were no messages or came from none of the run's
            tasks, and messages that the caller dropped.
        broken: connections that broke off or were closed.

    Raises:
        ChannelError: no socket could be opened on ``host``, or this process may not have so many.
    """

    def __init__(self, host: str, size: int) -> None:
        # Here, not above: a task imports this module too, and needs no asyncio.
        from zmq.auth.thread import ThreadAuthenticator

        _make_room(size)
        self.refused = 0
        self.dropped = 0
        self.broken = 0
        self._received = dict.fromkeys(range(size), 0)
        self._tasks = {_routing_id(task): task for task in range(size)}
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(
            domain="*", credentials_provider=_OneKey(client_public)
        )
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_publickey = server_public
        self._socket.curve_secretkey = server_secret
        self._socket.rcvhwm = max(2, _QUEUED_BATCHES // max(1, size))
        self._socket.linger = 0
        self._socket.maxmsgsize = _PART_BYTES + _ENCRYPTION_BYTES
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        _set_heartbeat(self._socket)
        self._monitor = self._socket.get_monitor_socket(
            _HANDSHAKE_FAILED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        )
        # In a thread of its own: ZeroMQ stands still for all when nobody takes these events, and
        # the one that receives may be busy with a slow terminal.
        self._counter = threading.Thread(
            target=self._count_events, name="horovod_runner-events", daemon=True
        )
        self._counter.start()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._wake_lock = threading.Lock()
        self._poller = zmq.Poller()
        for source in (self._socket, self._wake_read):
            self._poller.register(source, zmq.POLLIN)
        try:
            port = self._bind(host)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise ChannelError(
                f"no socket could be opened on {host} for the ranks' messages: {error}. "
                "On Spark the address is spark.driver.host, on Spark Connect "
                "HOROVOD_RUNNER_DRIVER_HOST; set it to one of this machine's."
            ) from error
        self.address = ChannelAddress(host, port, server_public, client_public, client_secret)

    def _bind(self, host: str) -> int:
        address = socket.gethostbyname(host)
        if address.startswith("127.") and host not in (address, "localhost"):
            # The machine's own name, as many set it up; elsewhere it leads to a real address.
            address = "0.0.0.0"  # noqa: S104 - CURVE guards it
        try:
            self._socket.bind(f"tcp://{address}:*")
        except zmq.ZMQError:
            # A name in front of this machine (a Kubernetes service, NAT): CURVE guards the rest.
            self._socket.bind("tcp://0.0.0.0:*")
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return int(endpoint.rsplit(":", 1)[1])

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def receive(self, timeout: float | None = None) -> Iterator[tuple[int, FromRank]]:
        """The messages that are there, each with the number of the task that sent it.

        Waits for at most ``timeout`` seconds (None: without end) for a message or :meth:`wake`.
        """
        for task, batch in self.batches(timeout):
            for message in batch:
                yield task, message

    def batches(self, timeout: float | None = None) -> Iterator[tuple[int, list[FromRank]]]:
        """As :meth:`receive`, the messages that came together together."""
        ready = dict(self._poller.poll(None if timeout is None else math.ceil(timeout * 1000)))
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        if self._socket in ready:
            yield from self._take()

    def _take(self) -> Iterator[tuple[int, list[FromRank]]]:
        for _ in range(256):  # then let the caller look at other things
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                task = self._tasks[parts[0]]
                batch = parts[1] if len(parts) == 2 else b"".join(parts[1:])
                found = messages.decode_batch(batch)
            except (KeyError, ValueError, msgspec.MsgspecError):
                self.dropped += 1
                continue
            self._received[task] += 1
            yield task, found

    def received(self, task: int) -> int:
        """How many batches came from a task."""
        return self._received[task]

    def _count_events(self) -> None:
        while (event := _recv_event(self._monitor)) != zmq.EVENT_MONITOR_STOPPED:
            if event == zmq.EVENT_DISCONNECTED:
                self.broken += 1
            else:
                self.refused += 1

    def send(self, task: int, message: FromDriver) -> None:
        """Send to one task; silently nothing where it has gone."""
        self.send_all([task], message)

    def send_all(self, tasks: Iterable[int], message: FromDriver) -> None:
        """Send the same to many."""
        batch = frame(messages.encode(message))
        for task in tasks:
            # Only a task that takes nothing at all has a full queue of these few messages.
            with suppress(zmq.Again):
                self._socket.send_multipart([_routing_id(task), batch], zmq.NOBLOCK)

    def wake(self) -> None:
        """Make :meth:`receive` return; for other threads."""
        with self._wake_lock:
            if not self._socket.closed:  # else its number may be another file's by now
                with suppress(BlockingIOError):  # it is awake already
                    os.write(self._wake_write, b"w")

    def close(self) -> None:
        """Free the socket, the threads and the descriptors; may be called twice."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._counter.join()
        self._monitor.close(linger=0)
        with self._wake_lock:
            self._socket.close(linger=200)  # ms, for the last Taken and Stop
            os.close(self._wake_read)
            os.close(self._wake_write)
        self._authenticator.stop()
        self._context.term()


def _make_room(size: int) -> None:
    """See to it that this process may have a connection to each rank."""
    needed = size + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ChannelError(
                f"the driver needs about {needed} descriptors for {size} ranks, and this process "
                f"may have {hard}: raise its limit (ulimit -n {needed}, LimitNOFILE)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class _OneKey:
    """Lets in whoever holds the one client key of this run."""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public_key


class Link:
    """A rank's end, owned by the process that watches over the rank's worker.

    Args:
        address: the driver's.
        task: the number of the task, which names this end.

    Attributes:
        sent: how many batches ZeroMQ has taken.
        monitor: for a poller: something has happened to the connection.
    """

    def __init__(self, address: ChannelAddress, task: int) -> None:
        self.sent = 0
        self._reached = False
        self._spool = Spool()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.routing_id = _routing_id(task)
        self._socket.curve_serverkey = address.server_key
        self._socket.curve_publickey = address.client_public_key
        self._socket.curve_secretkey = address.client_secret_key
        self._socket.sndhwm = 16
        self._socket.linger = 0
        self._socket.reconnect_ivl = 100  # ms
        _set_heartbeat(self._socket)
        self._lost_at: float | None = None
        self._beat_at = 0.0
        self.monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._socket.connect(f"tcp://{address.host}:{address.port}")

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a poller; see :attr:`wanted`."""
        return self._socket

    @property
    def wanted(self) -> int:
        """The events to poll for: input always, output while something waits."""
        return zmq.POLLIN | (zmq.POLLOUT if len(self._spool) else 0)

    @property
    def waiting(self) -> int:
        """How many batches wait to be sent."""
        return len(self._spool)

    def reaches(self, seconds: float) -> bool:
        """Whether the driver answers within so many seconds; asked before anything is sent."""
        deadline = time.monotonic() + seconds
        while not self._reached and (left := deadline - time.monotonic()) > 0:
            self.monitor.poll(math.ceil(left * 1000))
            self.observe()
        return self._reached

    def observe(self) -> None:
        """Take in what :attr:`monitor` has to say; :meth:`wait` does so by itself."""
        while self.monitor.poll(0):
            event = _recv_event(self.monitor)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._reached = True
                self._lost_at = None
            elif self._lost_at is None:
                self._lost_at = time.monotonic()

    @property
    def shaky(self) -> bool:
        """Whether the connection to the driver has broken off and not yet come back."""
        return self._lost_at is not None

    @property
    def lost(self) -> bool:
        """Whether it has been so for too long: the driver or the network to it is gone."""
        return self._lost_at is not None and time.monotonic() - self._lost_at > _LOST_SECONDS

    def beat(self, activity: messages.Alive = _ALIVE) -> None:
        """Tell the driver that this end is alive, if it is time to; :meth:`wait` does so too."""
        now = time.monotonic()
        # What still waits to be sent says as much.
        if now - self._beat_at >= _BEAT_SECONDS and not len(self._spool):
            self._beat_at = now
            self.put(activity)

    def give_up(self) -> None:
        """Count the driver as lost from here on."""
        self._lost_at = -math.inf

    def put(self, message: Message) -> None:
        """Queue a message.

        Raises:
            OSError: the disk is full.
        """
        self.put_batch(frame(messages.encode(message)))

    def put_batch(self, batch: bytes) -> None:
        """Queue framed messages as they are; raises as :meth:`put`."""
        self._spool.put(batch)

    def flush(self) -> None:
        """Hand ZeroMQ what it takes now."""
        while len(self._spool) and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            batch = self._spool.get()
            parts = [batch[at : at + _PART_BYTES] for at in range(0, len(batch), _PART_BYTES)]
            # POLLOUT was there, and this thread alone sends: it cannot block.
            self._socket.send_multipart(parts)
            self.sent += 1

    def receive(self) -> list[FromDriver]:
        """The driver's messages that are there."""
        found: list[FromDriver] = []
        while True:
            try:
                batch = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return found
            found += _decode_all(batch)

    def wait(self, timeout: float) -> list[FromDriver]:
        """Send what waits and return the driver's messages, after ``timeout`` seconds at most."""
        self.beat()
        self.flush()
        self._socket.poll(round(timeout * 1000), self.wanted)
        self.observe()
        self.flush()
        return self.receive()

    def close(self) -> None:
        """Free the socket; what still waits is dropped. May be called twice."""
        self._spool.close()
        if not self._socket.closed:
            self._socket.disable_monitor()
            self.monitor.close(linger=0)
            self._socket.close(linger=0)
            self._context.term()


def _routing_id(task: int) -> bytes:
    return str(task).encode()


def _decode_all(batch: bytes) -> list[FromDriver]:
    try:
        return [messages.decode_from_driver(data) for data in unframe(batch)]
    except (ValueError, msgspec.MsgspecError):
        return []


def _recv_event(monitor: zmq.Socket[bytes]) -> int:
    """The next event of a monitor socket."""
    event = monitor.recv_multipart()[0]  # its number, 16 bits, and a value (zmq_socket_monitor)
    return int.from_bytes(event[:2], sys.byteorder)


def _set_heartbeat(socket_: zmq.Socket[bytes]) -> None:
    socket_.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket_.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket_.setsockopt(zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT_MS)
