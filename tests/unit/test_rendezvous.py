"""Horovod's rendezvous server over real sockets, with raw HTTP like Horovod's C++ client."""

from __future__ import annotations

import contextlib
import gc
import http.client
import os
import random
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod_runner import LaunchError
from horovod_runner.common.limits import Limits
from horovod_runner.worker.startup.rendezvous import Rendezvous
from tests.programs import await_condition


@pytest.fixture
def server() -> Iterator[Rendezvous]:
    with Rendezvous("127.0.0.1", size=4) as opened:
        yield opened


def ask(
    server: Rendezvous, method: str, path: str, body: bytes = b"", token: str | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    right = server.address.partition("/")[2]
    connection.request(method, f"/{token or right}:{server.port}/{path}", body)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data


def connected(server: Rendezvous) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def raw(server: Rendezvous, method: str, path: str, headers: str = "") -> bytes:
    token = server.address.partition("/")[2]
    return f"{method} /{token}:{server.port}/{path} HTTP/1.1\r\n{headers}\r\n".encode()


def test_a_value_is_stored_read_and_deleted(server: Rendezvous) -> None:
    assert ask(server, "PUT", "global/rank_0", b"address") == (200, b"")
    assert ask(server, "GET", "global/rank_0") == (200, b"address")
    assert ask(server, "PUT", "global/rank_0", b"another") == (200, b"")
    assert ask(server, "GET", "global/rank_0") == (200, b"another")
    assert ask(server, "DELETE", "global/rank_0") == (200, b"")
    assert ask(server, "GET", "global/rank_0") == (404, b"")
    assert server.requests == {"PUT": 2, "GET": 3, "DELETE": 1}


def test_a_get_waits_until_its_key_arrives() -> None:
    answers: list[tuple[int, bytes]] = []
    # Longer than the client's timeout: only the key's arrival can end the wait.
    with Rendezvous("127.0.0.1", size=4, limits=Limits(rendezvous_key=60)) as server:
        waiting = threading.Thread(
            target=lambda: answers.append(ask(server, "GET", "local_host-1/2"))
        )
        waiting.start()
        await_condition(lambda: server.requests["GET"])  # the server has read the request
        assert not answers
        ask(server, "PUT", "local_host-1/2", b"late")
        waiting.join(timeout=20)
    assert answers == [(200, b"late")]


def test_a_wrong_token_is_refused(server: Rendezvous) -> None:
    assert ask(server, "GET", "global/0", token="guess") == (403, b"")


def test_only_the_scopes_and_keys_of_gloo_and_small_values_are_accepted(
    server: Rendezvous,
) -> None:
    for path in ("global/0/1", "other/0", "global/name", "global/", "", "../global/0", "cross_x/1"):
        assert ask(server, "PUT", path, b"x")[0] == 400
    for scope in ("global", "local_host-0af3.b", "cross_3", "global_process_set_hash_1f0"):
        assert ask(server, "PUT", f"{scope}/3", b"x")[0] == 200
    assert ask(server, "PUT", "global/1", bytes(10_000))[0] == 413


def test_random_requests_do_no_harm(server: Rendezvous) -> None:
    noise = random.Random(3)
    for number in range(300):
        with connected(server) as stranger:
            if number % 3:
                stranger.sendall(noise.randbytes(noise.randrange(1, 2000)))
            if number % 3 == 2:
                stranger.sendall(b"\r\n\r\n")
    with connected(server) as stranger:
        stranger.sendall(b"GET /" + b"x" * 20_000)  # an HTTP head that never ends
        assert ask(server, "PUT", "global/0", b"still here")[0] == 200
    assert ask(server, "GET", "global/0") == (200, b"still here")


def test_closing_ends_all_connections_and_logs_nothing(
    server: Rendezvous, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(connected(server)) for _ in range(100)]
        for number, client in enumerate(clients[::2]):
            client.sendall(raw(server, "GET", f"global/{number}"))
        await_condition(lambda: server.requests["GET"] == 50)
        server.close()
        assert {client.recv(100) for client in clients} == {b""}
    server.close()
    with pytest.raises(ConnectionRefusedError):
        connected(server)
    assert caplog.records == []


def test_an_address_of_no_interface_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r" 192\.0\.2\.77: .*`ip addr`"):
        Rendezvous("192.0.2.77", size=2)


@pytest.mark.parametrize("token", ["é", "²", "\xff" * 32])
def test_a_token_of_non_ascii_letters_is_refused(
    server: Rendezvous, caplog: pytest.LogCaptureFixture, token: str
) -> None:
    with connected(server) as stranger:
        stranger.sendall(f"GET /{token}:1/global/0 HTTP/1.1\r\n\r\n".encode("latin-1"))
        assert stranger.recv(100).startswith(b"HTTP/1.1 400 ")
    assert caplog.records == []


@pytest.mark.parametrize("length", ["10001", "9999999999", "9" * 5000])
def test_any_content_length_above_the_limit_is_refused(server: Rendezvous, length: str) -> None:
    with connected(server) as client:
        client.sendall(raw(server, "PUT", "global/0", f"Content-Length: {length}\r\n"))
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")
    assert ask(server, "GET", "global/rank_0") == (404, b"")


def test_the_listen_backlog_fits_many_connections(server: Rendezvous) -> None:
    # For a listening socket the second number is its backlog.
    shown = subprocess.run(["ss", "-ltn"], capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in shown.splitlines() if f"127.0.0.1:{server.port} " in line]
    system_limit = int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert int(line.split()[2]) == min(4096, system_limit)


def test_the_oldest_silent_connections_are_closed_above_a_limit(server: Rendezvous) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as opened:

        def connect() -> socket.socket:
            return opened.enter_context(connected(server))

        waiting = connect()  # a rank: the oldest connection, but it has sent the token
        waiting.sendall(raw(server, "GET", "global/9"))
        await_condition(lambda: server.requests["GET"])
        strangers = [connect() for _ in range(400)]
        assert strangers[0].recv(1) == b""
        assert ask(server, "PUT", "global/9", b"still here") == (200, b"")
        assert waiting.recv(100).endswith(b"still here")
        assert len(os.listdir("/proc/self/fd")) - before - len(strangers) < 300


def test_keys_without_values_count_against_the_size_limit() -> None:
    with Rendezvous("127.0.0.1", size=4, total_bytes=10_000) as server:
        answers = [ask(server, "PUT", f"global/{key}")[0] for key in range(50)]
        assert answers == [200] * answers.count(200) + [413] * answers.count(413)
        assert 0 < answers.count(200) < 50
        assert ask(server, "DELETE", "global/0") == (200, b"")
        assert ask(server, "PUT", "global/99") == (200, b"")


def test_a_get_that_times_out_leaves_no_state() -> None:
    with Rendezvous("127.0.0.1", size=4, limits=Limits(rendezvous_key=0.01)) as server:
        for key in range(20):
            assert ask(server, "GET", f"global/{key}") == (404, b"")
        while len(server._arrivals):
            gc.collect()  # an exception may still refer to the event
            time.sleep(0.01)


def test_a_client_that_never_reads_is_disconnected() -> None:
    size = 60_000  # allows values of 15 MB, more than socket buffers hold
    with Rendezvous("127.0.0.1", size=size, limits=Limits(rendezvous_request=0.5)) as server:
        assert ask(server, "PUT", "global/0", bytes(15_000_000)) == (200, b"")
        with connected(server) as client:
            client.sendall(raw(server, "GET", "global/0"))
            await_condition(lambda: server.requests["GET"] and not server._connections)
            received = 0
            with contextlib.suppress(ConnectionResetError):
                while data := client.recv(1 << 20):
                    received += len(data)
            assert received < 15_000_000
