r"""The ranks of a program without MPI: every one holds a socket that the others send to.

    rank --PUSH, CURVE--> PULL of each other rank

They meet first, to tell each other the sockets' addresses and keys, through what has started them:
Horovod's rendezvous store, or Spark. Whoever lacks a key that was told there gets no further than
the handshake. What is large travels in frames, of which few are under way at a time.
"""

from __future__ import annotations

import math
import os
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from horovod_runner.errors import LaunchError
from horovod_runner.spmd.neighbours import NeighbourFailedError, Part
from horovod_runner.spmd.placement import Member, address_towards

_FRAME_BYTES = 1 << 20
_FRAMES_UNDER_WAY = 4  # on each connection
_MEET_SECONDS = 600.0
_LAST_WORD_MS = 1_000
_LINGER_MS = 10_000  # for what a process that ends has sent
_VALUE, _DATA, _DONE, _FAILED = range(4)


class Meeting(Protocol):
    """A place where all ranks of the program can leave a word for the others."""

    rank: int
    size: int

    def allgather(self, value: bytes) -> list[bytes]:
        """Everybody's value, in the order of ranks; some hundred bytes, once."""


class Alone:
    """There is nobody else."""

    rank, size = 0, 1

    def allgather(self, value: bytes) -> list[bytes]:
        """Just that."""
        return [value]


class SparkMeeting:
    """The tasks of a Spark barrier stage."""

    def __init__(self) -> None:
        from pyspark import BarrierTaskContext

        self._context = BarrierTaskContext.get()
        self.rank: int = self._context.partitionId()
        self.size: int = len(self._context.getTaskInfos())

    def allgather(self, value: bytes) -> list[bytes]:
        """As :class:`Meeting`; takes Spark a second."""
        return [bytes.fromhex(text) for text in self._context.allGather(value.hex())]


class StoreMeeting:
    """Horovod's rendezvous store: that of ``horovodrun``, or of HorovodRunner."""

    _met = 0  # how often, in this process

    def __init__(self) -> None:
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            raise LaunchError(
                "the number of ranks of an elastic job changes, and the ranks that train are "
                "chosen once: start the program without --min-np, --max-np and "
                "--host-discovery-script."
            )
        self.rank = int(os.environ["HOROVOD_RANK"])
        self.size = int(os.environ["HOROVOD_SIZE"])
        address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        if not address:
            raise LaunchError(
                "HOROVOD_SIZE is set and HOROVOD_GLOO_RENDEZVOUS_ADDR is not, so the other ranks "
                "cannot be found: start the program with horovodrun, mpirun, srun or "
                "`horovod-runner run`."
            )
        StoreMeeting._met += 1
        port = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        self._url = f"http://{address}:{port}/spmd_{StoreMeeting._met}"

    def allgather(self, value: bytes) -> list[bytes]:
        """As :class:`Meeting`.

        Raises:
            LaunchError: the store does not answer, or somebody did not come.
        """
        deadline = time.monotonic() + _MEET_SECONDS
        try:
            self._ask(self.rank, "PUT", value)
            return [self._get(rank, deadline) for rank in range(self.size)]
        except OSError as error:
            raise LaunchError(f"Horovod's rendezvous store does not answer: {error}") from error

    def _get(self, rank: int, deadline: float) -> bytes:
        while (found := self._ask(rank, "GET")) is None:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"rank {rank} of {self.size} did not call start within {_MEET_SECONDS:.0f} s."
                )
            time.sleep(0.05)
        return found

    def _ask(self, key: int, method: str, value: bytes | None = None) -> bytes | None:
        request = urllib.request.Request(  # noqa: S310 - http, always
            f"{self._url}/{key}", data=value, method=method
        )
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request, timeout=60) as answer:
                found: bytes = answer.read()
                return found
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise


class _Head(msgspec.Struct, array_like=True, frozen=True):
    """What stands in front of each frame: its kind, who sends it, and of which call it is."""

    kind: int
    rank: int
    call: int


class _Word(msgspec.Struct, array_like=True, frozen=True):
    """What the ranks tell each other where they meet."""

    member: Member
    port: int
    public_key: bytes


class Mesh:
    """The ranks that met somewhere.

    Raises:
        LaunchError: they did not meet, or cannot reach each other.
    """

    by_mpi = False

    def __init__(self, meeting: Meeting, own: Member) -> None:
        self.rank = meeting.rank
        self.size = meeting.size
        self._calls = 0
        self._values: dict[tuple[int, int], bytes] = {}
        self._frames: dict[tuple[int, int], list[zmq.Frame]] = defaultdict(list)
        self._done: set[int] = set()
        self._failure: bytes | None = None
        self._context = zmq.Context()
        self._sending: dict[int, zmq.Socket[bytes]] = {}
        if self.size == 1:
            return
        self._public, self._secret = zmq.curve_keypair()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._keys = _Keys()
        self._authenticator.configure_curve_callback("*", credentials_provider=self._keys)
        self._receiving = self._socket(zmq.PULL)
        self._receiving.curve_server = True
        self._receiving.bind("tcp://0.0.0.0:*")  # CURVE guards it
        endpoint = self._receiving.getsockopt_string(zmq.LAST_ENDPOINT)
        member = msgspec.structs.replace(own, rank=self.rank)
        word = _Word(member, int(endpoint.rsplit(":", 1)[1]), self._public)
        try:
            said = meeting.allgather(msgspec.msgpack.encode(word))
            words = [msgspec.msgpack.decode(text, type=_Word) for text in said]
            self._keys.tell(each.public_key for each in words)
            for other in words:
                if other.member.rank != self.rank:
                    self._connect(member, other)
        except BaseException:
            self.close(together=False)
            raise

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        socket.sndhwm = socket.rcvhwm = _FRAMES_UNDER_WAY
        socket.linger = _LINGER_MS
        return socket

    def _connect(self, own: Member, other: _Word) -> None:
        socket = self._socket(zmq.PUSH)
        socket.curve_serverkey = other.public_key
        socket.connect(f"tcp://{address_towards(own, other.member)}:{other.port}")
        self._sending[other.member.rank] = socket

    def allgather(self, value: bytes) -> list[bytes]:
        """As :class:`Neighbours`."""
        self._calls += 1
        for rank in self._sending:
            self._send(rank, _VALUE, value)
        self._values[self.rank, self._calls] = value
        keys = [(rank, self._calls) for rank in range(self.size)]
        self._receive_until(lambda: all(key in self._values for key in keys))
        return [self._values.pop(key) for key in keys]

    def exchange(self, outgoing: Iterator[Part], incoming: Sequence[Part]) -> None:
        """As :class:`Neighbours`."""
        self._calls += 1
        inward: dict[int, _Inward] = defaultdict(_Inward)
        for part in incoming:
            inward[part.rank].add(part.data)
        frames = _frames(outgoing)
        waiting = next(frames, None)
        while waiting is not None or not all(each.full for each in inward.values()):
            moved = waiting is not None and self._try_send(waiting[0], _DATA, waiting[1])
            if moved:
                waiting = next(frames, None)
            # A moment's wait: a socket that takes nothing may do so again soon.
            self._receive(0 if moved else 1)
            for rank, room in inward.items():
                for frame in self._frames.pop((rank, self._calls), ()):
                    room.take(frame.buffer)
        # Nobody goes on before: what comes early would have to be kept.
        self.allgather(b"")

    def finish(self) -> None:
        """As :class:`Neighbours`."""
        for rank in self._sending:
            self._send(rank, _DONE)
        self._receive_until(lambda: len(self._done) == len(self._sending))
        self._done.clear()

    def fail(self, failure: bytes) -> None:
        """As :class:`Neighbours`."""
        for socket in self._sending.values():
            socket.sndtimeo = _LAST_WORD_MS
            head = msgspec.msgpack.encode(_Head(_FAILED, self.rank, self._calls))
            with suppress(zmq.Again):  # it takes nothing in: it has gone
                socket.send_multipart([head, failure])

    def failure(self, seconds: float) -> bytes | None:
        """As :class:`Neighbours`."""
        if self._failure is None and self.size > 1:
            try:
                deadline = time.monotonic() + seconds
                while (left := deadline - time.monotonic()) > 0:
                    self._receive(math.ceil(left * 1000))
            except NeighbourFailedError as error:
                return error.failure
        return self._failure

    def subset(self, ranks: Sequence[int]) -> Any:
        """As :class:`Neighbours`."""
        return None

    def close(self, *, together: bool) -> None:
        """As :class:`Neighbours`."""
        if self.size > 1:
            for socket in (*self._sending.values(), self._receiving):
                socket.close()
            self._keys.tell(())
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

    def _receive_until(self, there: Callable[[], bool]) -> None:
        while not there():
            self._receive(None)

    def _receive(self, timeout_ms: int | None) -> bool:
        """Take in what is there; says whether something was.

        Raises:
            NeighbourFailedError: a rank has failed.
        """
        if self.size == 1 or not self._receiving.poll(timeout_ms):
            return False
        head_frame, value = self._receiving.recv_multipart(copy=False)
        head = msgspec.msgpack.decode(head_frame.buffer, type=_Head)
        if head.kind == _FAILED:
            self._failure = value.bytes
            raise NeighbourFailedError(self._failure)
        if head.kind == _VALUE:
            self._values[head.rank, head.call] = value.bytes
        elif head.kind == _DATA:
            self._frames[head.rank, head.call].append(value)
        else:
            self._done.add(head.rank)
        return True


def _frames(parts: Iterator[Part]) -> Iterator[tuple[int, memoryview]]:
    for part in parts:
        for at in range(0, len(part.data), _FRAME_BYTES):
            yield part.rank, part.data[at : at + _FRAME_BYTES]


class _Inward:
    """Buffers that fill up in order."""

    def __init__(self) -> None:
        self._left: deque[memoryview] = deque()

    def add(self, buffer: memoryview) -> None:
        if buffer.nbytes:
            self._left.append(buffer)

    @property
    def full(self) -> bool:
        return not self._left

    def take(self, data: memoryview) -> None:
        while data:
            room = self._left.popleft()
            size = min(len(room), len(data))
            room[:size] = data[:size]
            data = data[size:]
            if size < len(room):
                self._left.appendleft(room[size:])


class _Keys:
    """Lets in whoever has a key that was told where the ranks met."""

    def __init__(self) -> None:
        self._known: frozenset[bytes] = frozenset()
        self._told = threading.Event()

    def tell(self, known: Iterable[bytes]) -> None:
        self._known = frozenset(known)
        self._told.set()

    def callback(self, domain: str, key: bytes) -> bool:
        self._told.wait()  # a quick neighbour may have met all before this rank has
        return key in self._known
