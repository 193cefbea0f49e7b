"""The journal over a connection that the driver opens: firewalls often let that one through.

    driver: CalledFolder --ZeroMQ, CURVE--> ServedFolder, beside the stand-in

For a classic Spark session where driver and executors share no folder. Spark tells the driver on
which host task 0 runs, and the driver has chosen the ports beforehand.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import zmq

from horovod_runner.common.limits import DEFAULTS, Limits
from horovod_runner.common.threads import start_thread
from horovod_runner.wire.addresses import Call
from horovod_runner.wire.transport import OneKey, guarded_socket, set_heartbeat

_AGAIN_MS: Final = 1_000
_REQUEST_BYTES: Final = 4 << 10
_READ, _REMOVE = b"read", b"remove"
_HERE, _ABSENT = b"here", b"absent"


class ServedFolder:
    """Files in memory that the driver may read and remove.

    Raises:
        OSError: none of the ports is free.
    """

    def __init__(self, call: Call, limits: Limits) -> None:
        self._files: dict[str, bytes] = {}
        self._called = False
        self._context = zmq.Context()
        keys = call.public_key, call.secret_key
        self._socket, self._authenticator = guarded_socket(
            self._context, zmq.REP, keys, OneKey(call.public_key)
        )
        self._socket.maxmsgsize = _REQUEST_BYTES
        set_heartbeat(self._socket, limits)
        if not any(self._bind(port) for port in call.ports):
            self._authenticator.stop()
            self._context.destroy()
            raise OSError(f"none of the ports {call.ports} is free")
        self._thread = start_thread("served", self._serve)

    def _bind(self, port: int) -> bool:
        with suppress(zmq.ZMQError):
            self._socket.bind(f"tcp://0.0.0.0:{port}")
            return True
        return False

    def size(self, name: str) -> int | None:
        """A file's size in bytes; None if it does not exist."""
        data = self._files.get(name)
        return None if data is None else len(data)

    def write(self, name: str, data: bytes) -> None:
        """Add a file. Raises an OSError until the driver has called, which perhaps it never can."""
        if not self._called:
            raise OSError("the driver has not called yet")
        self._files[name] = data

    def close(self) -> list[bytes]:
        """Stop serving; returns the files that the driver has not removed, oldest first."""
        self._authenticator.stop()
        self._context.term()
        self._thread.join()
        return list(self._files.values())

    def _serve(self) -> None:
        with suppress(zmq.ContextTerminated):
            while True:
                verb, name = self._socket.recv_multipart()
                self._called = True
                self._socket.send_multipart(self._answer(verb, name.decode()))
        self._socket.close()

    def _answer(self, verb: bytes, name: str) -> list[bytes]:
        if verb == _REMOVE:
            self._files.pop(name, None)
        data = self._files.get(name)
        return [_ABSENT] if data is None else [_HERE, data]


class CalledFolder:
    """The driver's end, for one thread at a time. At most one of the ports answers.

    Attributes:
        url: the host, for people.
    """

    def __init__(self, host: str, call: Call, limits: Limits = DEFAULTS) -> None:
        self.url = host
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.curve_serverkey = call.public_key
        self._socket.curve_publickey = call.public_key
        self._socket.curve_secretkey = call.secret_key
        self._socket.linger = 0
        self._socket.reconnect_ivl = _AGAIN_MS
        self._socket.rcvtimeo = round(limits.journal_answer * 1000)
        self._socket.sndtimeo = 0
        # A request goes only to the port that has shown its key; one without an answer is dropped.
        self._socket.immediate = 1
        self._socket.req_relaxed = 1
        self._socket.req_correlate = 1
        set_heartbeat(self._socket, limits)
        for port in call.ports:
            self._socket.connect(f"tcp://{host}:{port}")

    def read(self, name: str) -> bytes:
        """Read a file.

        Raises:
            FileNotFoundError: it does not exist.
            zmq.Again: nobody answers.
        """
        answer, *data = self._ask(_READ, name)
        if answer != _HERE:
            raise FileNotFoundError(name)
        return data[0]

    def remove(self, name: str) -> None:
        """Remove a file, if it exists. Raises zmq.Again if nobody answers."""
        self._ask(_REMOVE, name)

    def _ask(self, verb: bytes, name: str) -> list[bytes]:
        self._socket.send_multipart([verb, name.encode()])
        return self._socket.recv_multipart()

    def close(self) -> None:
        """Close the connection."""
        self._context.destroy(linger=0)
