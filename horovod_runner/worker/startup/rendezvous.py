"""Horovod's rendezvous server: the key-value server where ranks publish their Gloo addresses.

Horovod's client is its ``common/gloo/http_store.cc``: plain HTTP/1.1 over IPv4, one connection per
request, GET, PUT and DELETE of ``/scope/key``. The protocol has no authentication, so a random
token is put into the path: Horovod builds URLs as ``http://ADDR:PORT/scope/key``, and
``ADDR = "10.0.0.7:4711/<token>"`` makes the path ``/<token>:<port>/scope/key``.

Three things keep it fast with many ranks (Gloo connects a full mesh six times): a listen backlog
for all connections at once, a GET that waits for its key instead of a poll every 10 ms, and no
thread per request.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import socket
from collections import Counter
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from horovod_runner.common.limits import DEFAULTS, Limits
from horovod_runner.common.threads import start_thread
from horovod_runner.errors import LaunchError

# The scopes and keys of gloo_context.cc, of Gloo's rendezvous/context.cc, and of spmd/mesh.py.
_PATH = re.compile(
    r"/(?P<token>[\w-]+):\d+"
    r"/(?P<scope>(global|local_[\w.-]+|cross_\d+)(_process_set_hash_[0-9a-f]+)?|spmd_\d+)"
    r"/(?P<key>(rank_)?\d+)",
    re.ASCII,
)
_HEAD_BYTES = 8 << 10
_ADDRESS_BYTES = 256  # Gloo stores 136 bytes for each peer
_ENTRY_BYTES = 256  # memory of a key, without its value
_TOTAL_BYTES = 64 << 20
_BACKLOG = 4096
_STRANGERS = 256  # connections that have not sent the token yet; two per rank come on top
_STATUS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 413: "Too Large"}


class Rendezvous:
    """A server that runs in a thread, from construction to :meth:`close`.

    Args:
        host: the only IPv4 address to listen on.
        size: the number of ranks; bounds the size of values.

    Attributes:
        address: for ``HOROVOD_GLOO_RENDEZVOUS_ADDR``, including the token.
        requests: how many with the token were read, by method.

    Raises:
        LaunchError: the address cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        size: int,
        *,
        limits: Limits = DEFAULTS,
        total_bytes: int = _TOTAL_BYTES,
    ) -> None:
        self._limits = limits
        self._total_bytes = total_bytes
        self._token = secrets.token_urlsafe(24)
        self._value_limit = _ADDRESS_BYTES * max(size, 16)
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        # An entry vanishes with the last GET that waits for its key.
        self._arrivals: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        self._connections: set[asyncio.Task[Any]] = set()
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._strangers_limit = _STRANGERS + 2 * size
        self.requests: Counter[str] = Counter()
        try:
            listener = socket.create_server((host, 0), backlog=_BACKLOG)
        except OSError as error:
            raise LaunchError(
                f"Horovod's rendezvous server cannot listen on {host}: {error}. Probably no "
                "network interface of this host has that address: compare it with `ip addr`."
            ) from error
        self.port: int = listener.getsockname()[1]
        self.address = f"{host}:{self.port}/{self._token}"
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = start_thread("rendezvous", self._run, listener)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self, listener: socket.socket) -> None:
        try:
            self._loop.run_until_complete(self._serve(listener))
        finally:
            self._loop.close()

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._answer, sock=listener, limit=_HEAD_BYTES)
        # start_server has set its own backlog. That number is also how many connections it accepts
        # at a time, which must stay small; so only the listening socket gets the large one.
        listener.listen(_BACKLOG)
        await self._stop.wait()
        server.close()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for connection in self._connections:
                connection.cancel()
            await asyncio.wait(others)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stop.is_set():
            writer.close()
            return
        connection = asyncio.current_task()
        assert connection is not None  # noqa: S101 - a coroutine runs in one
        self._connections.add(connection)
        self._strangers[writer] = None
        if len(self._strangers) > self._strangers_limit:
            # Ranks send their request at once: the oldest silent connection is not a rank.
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        try:
            await asyncio.wait_for(self._exchange(reader, writer), self._limits.rendezvous_request)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            # The client went away, stalled or was disconnected, or the server closes.
            writer.transport.abort()
        except asyncio.LimitOverrunError:
            pass  # a head without an end
        finally:
            self._connections.discard(connection)
            self._strangers.pop(writer, None)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status, body = await self._request(reader, writer)
        head = f"HTTP/1.1 {status} {_STATUS[status]}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.transport.set_write_buffer_limits(high=0)  # drain until the kernel has it all
        writer.write(head.encode() + body)
        await writer.drain()

    async def _request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[int, bytes]:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request_line, _, headers = head.partition("\r\n")
        method, _, rest = request_line.partition(" ")
        match = _PATH.fullmatch(rest.partition(" ")[0])
        length = re.search(r"^content-length: *(\d+)\r$", headers, re.IGNORECASE | re.MULTILINE)
        size = int(length.group(1)[:10]) if length else 0  # ten digits are too large already
        if match is None or method not in ("GET", "PUT", "DELETE"):
            return 400, b""
        if not hmac.compare_digest(match["token"], self._token):
            return 403, b""
        self._strangers.pop(writer, None)
        cost = _ENTRY_BYTES + size
        if method == "PUT" and (size > self._value_limit or self._bytes + cost > self._total_bytes):
            return 413, b""
        self.requests[method] += 1
        name = f"{match['scope']}/{match['key']}"
        if method == "PUT":
            self._put(name, await reader.readexactly(size))
        elif method == "DELETE":
            self._delete(name)
        else:
            return await self._get(name, wait=not match["key"].startswith("rank_"))
        return 200, b""

    def _put(self, name: str, value: bytes) -> None:
        self._delete(name)
        self._values[name] = value
        self._bytes += _ENTRY_BYTES + len(value)
        arrival = self._arrivals.pop(name, None)
        if arrival is not None:
            arrival.set()

    def _delete(self, name: str) -> None:
        # After hvd.shutdown() and hvd.init() a rank must not read the old addresses.
        if name in self._values:
            self._bytes -= _ENTRY_BYTES + len(self._values.pop(name))

    async def _get(self, name: str, *, wait: bool) -> tuple[int, bytes]:
        if wait and name not in self._values:
            arrival = self._arrivals.setdefault(name, asyncio.Event())
            with suppress(asyncio.TimeoutError):  # the client asks again
                await asyncio.wait_for(arrival.wait(), self._limits.rendezvous_key)
        value = self._values.get(name)
        return (404, b"") if value is None else (200, value)
