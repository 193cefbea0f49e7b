"""A relay that remembers what its clients said: real traffic to make inputs from."""

from __future__ import annotations

import contextlib
import os
import socket
import threading


class Relay:
    """Listens on a port of its own and passes everything on to another, and back.

    Attributes:
        port: where it listens.
        heard: what the clients sent, a connection each.
    """

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self.port: int = self._listener.getsockname()[1]
        self.heard: list[bytearray] = []
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            server = socket.create_connection(("127.0.0.1", self._to))
            self._sockets += client, server
            self.heard.append(bytearray())
            for args in ((client, server, self.heard[-1]), (server, client, bytearray())):
                self._threads.append(threading.Thread(target=self._pass_on, args=args, daemon=True))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket, heard: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                heard += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()


def start_horovod_twice() -> list[bytes]:
    """Everything that this rank's Horovod asks the rendezvous store; for ``HorovodRunner.run``."""
    import horovod.torch as hvd

    where, _, token = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")
    with Relay(int(where.rpartition(":")[2])) as relay:
        os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = f"127.0.0.1:{relay.port}/{token}"
        os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(relay.port)
        for _ in range(2):
            hvd.init()
            hvd.shutdown()
    return [bytes(request) for request in relay.heard]
