"""The rendezvous store as Horovod's C++ speaks to it: raw HTTP over real sockets."""

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
from horovod_runner.rendezvous import Rendezvous


@pytest.fixture
def store() -> Iterator[Rendezvous]:
    with Rendezvous("127.0.0.1", size=4) as opened:
        yield opened


def ask(
    store: Rendezvous, method: str, path: str, body: bytes = b"", token: str | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", store.port, timeout=20)
    own = store.address.partition("/")[2]
    connection.request(method, f"/{token or own}:{store.port}/{path}", body)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data


def test_a_value_is_stored_read_and_deleted(store: Rendezvous) -> None:
    assert ask(store, "PUT", "global/rank_0", b"address") == (200, b"")
    assert ask(store, "GET", "global/rank_0") == (200, b"address")
    assert ask(store, "PUT", "global/rank_0", b"another") == (200, b"")
    assert ask(store, "GET", "global/rank_0") == (200, b"another")
    assert ask(store, "DELETE", "global/rank_0") == (200, b"")
    assert ask(store, "GET", "global/rank_0") == (404, b"")
    assert store.requests == {"PUT": 2, "GET": 3, "DELETE": 1}


def test_a_get_answers_when_its_key_arrives(
    store: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than the client has patience: the key's arrival alone can wake it.
    monkeypatch.setattr("horovod_runner.rendezvous._LONG_POLL_SECONDS", 60)
    answers: list[tuple[int, bytes]] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(store, "GET", "local_host-1/2")))
    waiting.start()
    while not store.requests["GET"]:
        time.sleep(0.01)  # until the request is in the server's hands
    assert not answers
    ask(store, "PUT", "local_host-1/2", b"late")
    waiting.join(timeout=20)
    assert answers == [(200, b"late")]


def test_a_wrong_token_is_refused(store: Rendezvous) -> None:
    assert ask(store, "GET", "global/0", token="guess") == (403, b"")
    assert store.refused == 1


@pytest.mark.parametrize(
    "path", ["global/0/1", "other/0", "global/name", "global/", "", "../global/0", "cross_x/1"]
)
def test_only_gloos_scopes_and_keys_are_accepted(store: Rendezvous, path: str) -> None:
    assert ask(store, "PUT", path, b"x")[0] == 400


@pytest.mark.parametrize(
    "scope", ["global", "local_host-0af3.b", "cross_3", "global_process_set_hash_1f0"]
)
def test_all_of_gloos_scopes_are_accepted(store: Rendezvous, scope: str) -> None:
    assert ask(store, "PUT", f"{scope}/3", b"x")[0] == 200


def test_values_larger_than_gloos_are_refused(store: Rendezvous) -> None:
    assert ask(store, "PUT", "global/1", bytes(10_000))[0] == 413


def test_noise_changes_nothing(store: Rendezvous) -> None:
    noise = random.Random(3)
    for number in range(300):
        with socket.create_connection(("127.0.0.1", store.port)) as stranger:
            if number % 3:
                stranger.sendall(noise.randbytes(noise.randrange(1, 2000)))
            if number % 3 == 2:
                stranger.sendall(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", store.port)) as stranger:
        stranger.sendall(b"GET /" + b"x" * 20_000)  # a head without end
        assert ask(store, "PUT", "global/0", b"still here")[0] == 200
    assert ask(store, "GET", "global/0") == (200, b"still here")


def test_closing_ends_those_who_wait(store: Rendezvous) -> None:
    with socket.create_connection(("127.0.0.1", store.port)) as waiting:
        token = store.address.partition("/")[2]
        waiting.sendall(f"GET /{token}:{store.port}/global/9 HTTP/1.1\r\n\r\n".encode())
        while not store.requests["GET"]:
            time.sleep(0.01)
        store.close()
        waiting.settimeout(20)
        assert waiting.recv(100) == b""
    store.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port))


def test_an_address_of_no_interface_is_named() -> None:
    with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.77"):
        Rendezvous("192.0.2.77", size=2)


@pytest.mark.parametrize("token", ["é", "²", "\xff" * 32])
def test_a_token_of_odd_letters_is_refused_like_any_other(
    store: Rendezvous, caplog: pytest.LogCaptureFixture, token: str
) -> None:
    with socket.create_connection(("127.0.0.1", store.port), timeout=20) as stranger:
        stranger.sendall(f"GET /{token}:1/global/0 HTTP/1.1\r\n\r\n".encode("latin-1"))
        assert stranger.recv(100).startswith(b"HTTP/1.1 400 ")
    assert caplog.records == []


@pytest.mark.parametrize("length", ["10001", "9999999999", "9" * 5000])
def test_a_length_that_is_too_large_is_refused_however_large(
    store: Rendezvous, length: str
) -> None:
    token = store.address.partition("/")[2]
    with socket.create_connection(("127.0.0.1", store.port), timeout=20) as client:
        head = f"PUT /{token}:1/global/0 HTTP/1.1\r\nContent-Length: {length}\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")
    assert ask(store, "GET", "global/rank_0") == (404, b"")


def test_a_storm_of_connections_finds_room(store: Rendezvous) -> None:
    # Of a listening socket the kernel shows the length of its queue in the second column.
    shown = subprocess.run(["ss", "-ltn"], capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in shown.splitlines() if f"127.0.0.1:{store.port} " in line]
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert int(line.split()[2]) == min(4096, most)


def test_silent_strangers_are_sent_away_before_they_are_many(store: Rendezvous) -> None:
    token = store.address.partition("/")[2]
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as opened:

        def connect() -> socket.socket:
            return opened.enter_context(socket.create_connection(("127.0.0.1", store.port)))

        waiting = connect()  # a rank's: the oldest of all, and it knows the token
        waiting.sendall(f"GET /{token}:1/global/9 HTTP/1.1\r\n\r\n".encode())
        while not store.requests["GET"]:
            time.sleep(0.01)
        strangers = [connect() for _ in range(400)]
        strangers[0].settimeout(20)
        assert strangers[0].recv(1) == b""
        assert ask(store, "PUT", "global/9", b"still here") == (200, b"")
        waiting.settimeout(20)
        assert waiting.recv(100).endswith(b"still here")
        assert len(os.listdir("/proc/self/fd")) - before - len(strangers) < 300


def test_closing_among_strangers_is_silent(
    store: Rendezvous, caplog: pytest.LogCaptureFixture
) -> None:
    token = store.address.partition("/")[2]
    with contextlib.ExitStack() as opened:
        for number in range(100):
            client = socket.create_connection(("127.0.0.1", store.port))
            opened.enter_context(client)
            if number % 2:
                client.sendall(f"GET /{token}:1/global/{number} HTTP/1.1\r\n\r\n".encode())
        while store.requests["GET"] < 25:
            time.sleep(0.01)
        store.close()
    assert caplog.records == []


def test_keys_without_values_fill_the_store_too(
    store: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horovod_runner.rendezvous._STORE_BYTES", 10_000)
    answers = [ask(store, "PUT", f"global/{key}")[0] for key in range(50)]
    assert answers == [200] * answers.count(200) + [413] * answers.count(413)
    assert 0 < answers.count(200) < 50
    assert ask(store, "DELETE", "global/0") == (200, b"")
    assert ask(store, "PUT", "global/99") == (200, b"")


def test_a_key_that_never_comes_leaves_nothing_behind(
    store: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horovod_runner.rendezvous._LONG_POLL_SECONDS", 0.01)
    for key in range(20):
        assert ask(store, "GET", f"global/{key}") == (404, b"")
    while len(store._arrivals):
        gc.collect()  # an exception may still hold what waited
        time.sleep(0.01)


def test_a_client_that_never_reads_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("horovod_runner.rendezvous._REQUEST_SECONDS", 0.5)
    size = 60_000  # values of 15 MB, more than any socket holds
    with Rendezvous("127.0.0.1", size=size) as store:
        assert ask(store, "PUT", "global/0", bytes(15_000_000)) == (200, b"")
        token = store.address.partition("/")[2]
        with socket.create_connection(("127.0.0.1", store.port), timeout=20) as client:
            client.sendall(f"GET /{token}:1/global/0 HTTP/1.1\r\n\r\n".encode())
            while store._connections or store.requests["GET"] < 1:
                time.sleep(0.01)
            received = 0
            with contextlib.suppress(ConnectionResetError):
                while data := client.recv(1 << 20):
                    received += len(data)
            assert received < 15_000_000
