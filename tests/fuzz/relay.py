"""A TCP relay that records what its clients send, as material for fuzz inputs."""

from __future__ import annotations

import contextlib
import os
import socket
import threading


class Relay:
    """Forwards connections to another port, in both directions.

    Attributes:
        port: the port that it listens on.
        received: what the clients sent, one item per connection.
    """

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self.port: int = self._listener.getsockname()[1]
        self.received: list[bytearray] = []
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            server = socket.create_connection(("127.0.0.1", self._to))
            self._sockets += client, server
            self.received.append(bytearray())
            for args in ((client, server, self.received[-1]), (server, client, bytearray())):
                self._threads.append(threading.Thread(target=self._forward, args=args, daemon=True))
                self._threads[-1].start()

    def _forward(self, source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                record += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in self._sockets:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for opened in self._sockets:
            opened.close()


def start_horovod_twice() -> list[bytes]:
    """Record all requests of this rank's Horovod to its rendezvous server; a ``main`` for run()."""
    import horovod.torch as hvd

    address, _, token = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")
    with Relay(int(address.rpartition(":")[2])) as relay:
        os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = f"127.0.0.1:{relay.port}/{token}"
        os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(relay.port)
        for _ in range(2):
            hvd.init()
            hvd.shutdown()
    return [bytes(request) for request in relay.received]
