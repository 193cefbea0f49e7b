"""The rendezvous store as Horovod's C++ speaks to it: raw HTTP over real sockets."""

from __future__ import annotations

import http.client
import random
import socket
import threading
import time
from collections.abc import Iterator

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
    assert ask(store, "PUT", "global/0", b"address") == (200, b"")
    assert ask(store, "GET", "global/0") == (200, b"address")
    assert ask(store, "PUT", "global/0", b"another") == (200, b"")
    assert ask(store, "GET", "global/0") == (200, b"another")
    assert ask(store, "DELETE", "global/0") == (200, b"")
    assert ask(store, "GET", "global/rank_0") == (404, b"")
    assert store.requests == {"PUT": 2, "GET": 3, "DELETE": 1}


def test_a_get_answers_when_its_key_arrives(store: Rendezvous) -> None:
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
