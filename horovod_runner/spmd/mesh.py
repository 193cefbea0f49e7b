r"""The ranks of a program without MPI, connected by encrypted ZeroMQ sockets.

    rank --PUSH, CURVE--> PULL of each other rank

First all ranks exchange the addresses and public keys of their sockets at a :class:`Meeting`. A
process whose key was not exchanged there fails the CURVE handshake. Large data are sent in frames;
only a few frames are in flight at a time.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
import zmq

from horovod_runner.errors import RankFailedError
from horovod_runner.spmd.meeting import Meeting
from horovod_runner.spmd.peers import Peers, RankBuffer, peer_error
from horovod_runner.spmd.trainers import Participant, address_towards
from horovod_runner.wire.transport import guarded_socket

_FRAME_BYTES = 1 << 20
_FRAMES_IN_FLIGHT = 4  # on each connection
_FAILURE_SEND_MS = 1_000
_LINGER_MS = 10_000  # for messages that a process sent before it ended
_VALUE, _DATA, _DONE, _FAILED = range(4)


class _Head(msgspec.Struct, array_like=True, frozen=True):
    """The head of a frame: its kind, the sender's rank, and the number of the sender's call."""

    kind: int
    rank: int
    call: int


_decode_head: Final = msgspec.msgpack.Decoder(_Head).decode


class _Introduction(msgspec.Struct, array_like=True, frozen=True):
    """The value that each rank sends to the meeting."""

    participant: Participant
    port: int
    public_key: bytes


_decode_contact: Final = msgspec.msgpack.Decoder(_Introduction).decode


class Mesh(Peers):
    """All ranks of the program, each connected to every other one.

    Args:
        meeting: where the ranks exchange addresses and keys.
        this: this process; its rank comes from the meeting.

    Raises:
        LaunchError: the ranks did not meet, or cannot reach each other.
    """

    by_mpi = False

    def __init__(self, meeting: Meeting, this: Participant) -> None:
        self.rank = meeting.rank
        self.size = meeting.size
        self._calls = 0
        self._values: dict[tuple[int, int], bytes] = {}
        self._frames: dict[tuple[int, int], list[zmq.Frame]] = defaultdict(list)
        self._done: set[int] = set()
        self._failure: RankFailedError | None = None
        self._context = zmq.Context()
        self._sending: dict[int, zmq.Socket[bytes]] = {}
        if self.size == 1:
            return
        self._public, self._secret = zmq.curve_keypair()
        self._keys = _Keys()
        self._receiving, self._authenticator = guarded_socket(
            self._context, zmq.PULL, (self._public, self._secret), self._keys
        )
        _bound(self._receiving)
        self._receiving.bind("tcp://0.0.0.0:*")  # CURVE guards it
        endpoint = self._receiving.getsockopt_string(zmq.LAST_ENDPOINT)
        participant = msgspec.structs.replace(this, rank=self.rank)
        contact = _Introduction(participant, int(endpoint.rsplit(":", 1)[1]), self._public)
        try:
            encoded = meeting.allgather(msgspec.msgpack.encode(contact))
            contacts = [_decode_contact(data) for data in encoded]
            self._keys.admit(other.public_key for other in contacts)
            for other in contacts:
                if other.participant.rank != self.rank:
                    self._connect(participant, other)
        except BaseException:
            self.close(together=False)
            raise

    def _connect(self, this: Participant, other: _Introduction) -> None:
        socket = self._context.socket(zmq.PUSH)
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        socket.curve_serverkey = other.public_key
        _bound(socket)
        socket.connect(f"tcp://{address_towards(this, other.participant)}:{other.port}")
        self._sending[other.participant.rank] = socket

    def allgather(self, value: bytes) -> list[bytes]:
        self._calls += 1
        for rank in self._sending:
            self._send(rank, _VALUE, value)
        self._values[self.rank, self._calls] = value
        keys = [(rank, self._calls) for rank in range(self.size)]
        self._receive_until(lambda: all(key in self._values for key in keys))
        return [self._values.pop(key) for key in keys]

    def exchange(self, outgoing: Iterator[RankBuffer], incoming: Sequence[RankBuffer]) -> None:
        self._calls += 1
        unfilled: dict[int, deque[memoryview]] = defaultdict(deque)
        for part in incoming:
            if part.data.nbytes:
                unfilled[part.rank].append(part.data)
        frames = _frames(outgoing)
        waiting = next(frames, None)
        while waiting is not None or any(unfilled.values()):
            sent = waiting is not None and self._try_send(waiting[0], _DATA, waiting[1])
            if sent:
                waiting = next(frames, None)
            # Wait 1 ms if the socket was full: it may accept a frame again soon.
            self._receive(0 if sent else 1)
            for rank, buffers in unfilled.items():
                for frame in self._frames.pop((rank, self._calls), ()):
                    _fill(buffers, frame.buffer)
        # All ranks finish together: frames of a later call would have to be stored.
        self.allgather(b"")

    def finish(self) -> None:
        for rank in self._sending:
            self._send(rank, _DONE)
        self._receive_until(lambda: len(self._done) == len(self._sending))
        self._done.clear()

    def fail(self, failure: bytes) -> None:
        for socket in self._sending.values():
            socket.sndtimeo = _FAILURE_SEND_MS
            head = msgspec.msgpack.encode(_Head(_FAILED, self.rank, self._calls))
            with suppress(zmq.Again):  # the other rank is gone
                socket.send_multipart([head, failure])

    def failure(self, seconds: float) -> RankFailedError | None:
        if self.size == 1:
            return None
        deadline = time.monotonic() + seconds
        with suppress(RankFailedError):
            while self._failure is None and (remaining := deadline - time.monotonic()) > 0:
                self._receive(math.ceil(remaining * 1000))
        return self._failure

    def subset(self, ranks: Sequence[int]) -> Any:
        return None

    def close(self, *, together: bool) -> None:
        if self.size > 1:
            for socket in (*self._sending.values(), self._receiving):
                socket.close()
            self._keys.admit(())
            self._authenticator.stop()
        self._context.term()

    def _send(self, rank: int, kind: int, value: bytes = b"") -> None:
        while not self._try_send(rank, kind, value):
            self._receive(10)

    def _try_send(self, rank: int, kind: int, data: bytes | memoryview) -> bool:
        head = msgspec.msgpack.encode(_Head(kind, self.rank, self._calls))
        try:
            self._sending[rank].send_multipart([head, data], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive_until(self, complete: Callable[[], bool]) -> None:
        while not complete():
            self._receive(None)

    def _receive(self, timeout_ms: int | None) -> None:
        """Receive one message if one arrives in time; None waits without limit."""
        if not self._receiving.poll(timeout_ms):
            return
        head_frame, value = self._receiving.recv_multipart(copy=False)
        head = _decode_head(head_frame.buffer)
        if head.kind == _FAILED:
            self._failure = peer_error(value.bytes)
            raise self._failure
        if head.kind == _VALUE:
            self._values[head.rank, head.call] = value.bytes
        elif head.kind == _DATA:
            self._frames[head.rank, head.call].append(value)
        else:
            self._done.add(head.rank)


def _bound(socket: zmq.Socket[bytes]) -> None:
    """Limit what a socket keeps in memory, and how long it does so after it was closed."""
    socket.sndhwm = socket.rcvhwm = _FRAMES_IN_FLIGHT
    socket.linger = _LINGER_MS


def _frames(parts: Iterator[RankBuffer]) -> Iterator[tuple[int, memoryview]]:
    for part in parts:
        for start in range(0, len(part.data), _FRAME_BYTES):
            yield part.rank, part.data[start : start + _FRAME_BYTES]


def _fill(unfilled: deque[memoryview], data: memoryview) -> None:
    """Write data to buffers in order; those that are full are removed."""
    while data:
        buffer = unfilled.popleft()
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        data = data[size:]
        if size < len(buffer):
            unfilled.appendleft(buffer[size:])


class _Keys:
    """Admits connections from ranks whose public key was exchanged at the meeting."""

    def __init__(self) -> None:
        self._admitted: frozenset[bytes] = frozenset()
        self._met = threading.Event()

    def admit(self, keys: Iterable[bytes]) -> None:
        self._admitted = frozenset(keys)
        self._met.set()

    def callback(self, domain: str, key: bytes) -> bool:
        self._met.wait()  # a faster rank may connect before this rank knows its key
        return key in self._admitted
