r"""The encrypted message channel between the driver and the ranks' hosts.

    worker --pipe--> Link (spool) --ZeroMQ, CURVE--> Channel --> Driver
                        ^                               |
                        +-------- Assignment, Stop -----+

Both ends authenticate with a key pair made for this run. A connection without the keys fails the
handshake and is counted. Messages travel in batches of frames, so many small ones cost little.

Memory is bounded on both ends. ZeroMQ's queues hold a few batches. Messages that the driver has not
received yet wait in the rank's spool, which moves to disk when it grows.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress

import msgspec
import zmq

from horovod_runner.common.limits import DEFAULTS, Limits
from horovod_runner.common.text import count_text
from horovod_runner.common.threads import start_thread
from horovod_runner.errors import ChannelError
from horovod_runner.wire import messages
from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.framing import frame
from horovod_runner.wire.messages import FromDriver, FromRank
from horovod_runner.wire.transport import (
    PART_BYTES,
    OneKey,
    guarded_socket,
    recv_event,
    routing_id,
    set_heartbeat,
)

_QUEUED_BATCHES = 64  # on the driver, over all ranks; 32 MiB of a checkpoint
_ENCRYPTION_BYTES = 1 << 10  # far more than CURVE adds to a part
# Files that Python, Spark and the user's code may open during a run: wanted, and at least.
_OTHER_FILES, _LEAST_OTHER_FILES = 512, 64
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Channel:
    """The driver's end.

    Args:
        host: the IPv4 address or name by which the ranks reach this machine. If it is an address of
            this machine that others can reach, the channel listens on it only, otherwise on all
            addresses.

    Attributes:
        refused: failed handshakes: missing or wrong keys.
        dropped: batches with the right keys that were not valid messages or came from no task of
            the run. The caller adds the messages that it drops.
        broken: ranks' hosts' connections that broke off or were closed. Those of strangers do not
            count; while they are open it may be too low.

    Raises:
        ChannelError: no socket could be opened on ``host``, it has only an IPv6 address, or the
            limit of open files is too low.
    """

    def __init__(self, host: str, size: int, limits: Limits = DEFAULTS) -> None:
        make_room(size, size)
        address = _ipv4(host)
        self.refused = 0
        self.dropped = 0
        self.broken = 0
        self._limits = limits
        self.received = dict.fromkeys(range(size), 0)
        self._tasks = {routing_id(task): task for task in range(size)}
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._socket, self._authenticator = guarded_socket(
            self._context, zmq.ROUTER, (server_public, server_secret), OneKey(client_public)
        )
        self._socket.rcvhwm = max(2, _QUEUED_BATCHES // max(1, size))
        self._socket.maxmsgsize = PART_BYTES + _ENCRYPTION_BYTES
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        set_heartbeat(self._socket, limits)
        self._monitor = self._socket.get_monitor_socket(
            _HANDSHAKE_FAILED
            | zmq.EVENT_ACCEPTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_MONITOR_STOPPED
        )
        # In a separate thread: all of ZeroMQ stalls when these events are not read, and the
        # receiving thread may be busy with a slow terminal.
        self._counter = start_thread("events", self._count_events)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._poller = zmq.Poller()
        for source in (self._socket, self._wake):
            self._poller.register(source, zmq.POLLIN)
        try:
            port = self._bind(host, address)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise _no_socket(host, error) from error
        self.address = ChannelAddress(host, port, server_public, client_public, client_secret)

    def _bind(self, host: str, address: str) -> int:
        if address.startswith("127.") and host not in (address, "localhost"):
            # Many systems map the machine's name to loopback; other hosts get its real address.
            address = "0.0.0.0"  # noqa: S104 - CURVE protects it
        try:
            self._socket.bind(f"tcp://{address}:*")
        except zmq.ZMQError:
            # An address in front of this machine (a Kubernetes service, NAT): listen on all.
            self._socket.bind("tcp://0.0.0.0:*")
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return int(endpoint.rsplit(":", 1)[1])

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def batches(self, timeout: float | None = None) -> Iterator[tuple[int, list[FromRank]]]:
        """Yield the messages that have arrived: the number of a task and a batch of its messages.

        Waits at most ``timeout`` seconds (None: without limit) for a message or :meth:`wake`.
        """
        ready = dict(self._poller.poll(None if timeout is None else math.ceil(timeout * 1000)))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if self._socket in ready:
            yield from self._take()

    def _take(self) -> Iterator[tuple[int, list[FromRank]]]:
        for _ in range(256):  # then return to the caller, who has other work
            try:
                # Copied: a frame of pyzmq's that is freed swallows an interrupt of that moment.
                sender, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                task = self._tasks[sender]
                decoded = messages.decode_batch(b"".join(parts))
            except (KeyError, ValueError, msgspec.MsgspecError):
                self.dropped += 1
                continue
            self.received[task] += 1
            yield task, decoded

    def _count_events(self) -> None:
        seen = Counter[int]()
        while (event := recv_event(self._monitor)) != zmq.EVENT_MONITOR_STOPPED:
            if event & _HANDSHAKE_FAILED:
                self.refused += 1
            seen[event] += 1
            # The event of an end does not say whether there was a handshake.
            strangers = seen[zmq.EVENT_ACCEPTED] - seen[zmq.EVENT_HANDSHAKE_SUCCEEDED]
            self.broken = max(self.broken, seen[zmq.EVENT_DISCONNECTED] - strangers)

    def send(self, task: int, message: FromDriver) -> None:
        """Send to one task. Does nothing if the task has gone."""
        self.send_all([task], message)

    def send_all(self, tasks: Iterable[int], message: FromDriver) -> None:
        """Send the same message to several tasks."""
        batch = frame(messages.encode(message))
        for task in tasks:
            # These messages are few: only a task that reads nothing has a full queue.
            with suppress(zmq.Again):
                self._socket.send_multipart([routing_id(task), batch], zmq.NOBLOCK)

    def wake(self) -> None:
        """Make :meth:`batches` go on. Safe to call from other threads."""
        with self._wake_lock:
            if not self._socket.closed:  # a closed descriptor's number may be in use again
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the socket, the threads and the descriptors. May be called twice."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._counter.join()
        self._monitor.close(linger=0)
        with self._wake_lock:
            self._socket.close(linger=round(self._limits.last_orders * 1000))
            os.close(self._wake)
        self._authenticator.stop()
        self._context.term()


def make_room(size: int, files: int) -> None:
    """Raise this process's limit of open files for ``size`` ranks, as far as the hard limit allows.

    ZeroMQ ends the process if it can open no more files, so that is prevented.

    Raises:
        ChannelError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = _open_files(soft)
    least = opened + files + _LEAST_OTHER_FILES
    wanted = max(least, files + _OTHER_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < least:
        raise ChannelError(
            f"the driver needs about {files + _LEAST_OTHER_FILES} more open files for "
            f"{count_text(size, 'rank')}, and has {opened} of the {hard} that this process may "
            f"open: {max(0, hard - opened)} are left. Raise the limit (ulimit -n {wanted}, or "
            "LimitNOFILE in systemd), or start fewer ranks on this machine."
        )
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, raised), hard))


def _open_files(limit: int) -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError as error:  # EMFILE: none is left for this look
        return limit if error.errno == errno.EMFILE else 0


def _ipv4(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        with suppress(OSError):
            socket.getaddrinfo(host.strip("[]"), None, socket.AF_INET6)
            raise ChannelError(
                f"the driver's host {host} has only an IPv6 address, and ranks on several hosts "
                "meet over IPv4: Horovod's Gloo knows nothing else. Give the driver and the "
                "executors' hosts IPv4 addresses, too (private ones are enough), and set "
                "spark.driver.host to the driver's. np=-n runs n ranks on this host alone."
            ) from None
        raise _no_socket(host, error) from error


def _no_socket(host: str, error: Exception) -> ChannelError:
    return ChannelError(
        f"no socket could be opened on {host} for the ranks' messages: {error}. Set "
        "spark.driver.host (or the environment variable HOROVOD_RUNNER_DRIVER_HOST) to an address "
        "of this machine."
    )
