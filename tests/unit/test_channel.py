"""The message channel over real sockets: order, back-pressure, connections without keys."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from horovod_runner import ChannelError
from horovod_runner.common.limits import Limits
from horovod_runner.wire import events, framing, messages
from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.channel import Channel
from horovod_runner.wire.link import Link

_SECONDS = 60.0


@pytest.fixture
def channel() -> Iterator[Channel]:
    with Channel("127.0.0.1", size=2) as opened:
        yield opened


@pytest.fixture
def connect(channel: Channel) -> Iterator[Callable[..., Link]]:
    """Opens links and closes them after the test: an open one would delay its exit."""
    with contextlib.ExitStack() as links:
        yield lambda address=channel.address, task=0, **options: links.enter_context(
            contextlib.closing(Link(address, task, **options))
        )


def receive(
    channel: Channel, timeout: float | None = None
) -> Iterator[tuple[int, messages.FromRank]]:
    """The received messages without heartbeats, which depend on time."""
    for task, batch in channel.batches(timeout):
        for message in batch:
            if not isinstance(message, messages.Alive):
                yield task, message


def until(done: Callable[[], object], *work: Callable[[], object]) -> None:
    """Do some work again and again until something is so; for a minute at most."""
    deadline = time.monotonic() + _SECONDS
    while not done() and time.monotonic() < deadline:
        for each in work:
            each()


def collect(channel: Channel, count: int, link: Link | None = None) -> list[messages.FromRank]:
    """So many messages of a channel, while a link sends."""
    received: list[messages.FromRank] = []

    def take() -> None:
        if link is not None:
            link.wait(0.01)
        received.extend(message for _, message in receive(channel, 0.05))

    until(lambda: len(received) >= count, take)
    return received


def refuse(channel: Channel) -> None:
    """Look for messages where only such may have come that are refused or dropped."""
    assert list(receive(channel, 0.1)) == []


@pytest.mark.parametrize(
    "texts",
    [[str(number) for number in range(50)], [letter * 3_000_000 for letter in "ab"]],
    ids=["many", "larger than a part"],
)
def test_messages_arrive_in_order_in_both_directions(
    channel: Channel, connect: Callable[..., Link], texts: list[str]
) -> None:
    link = connect(task=1)
    sent = [events.Log(0, text) for text in texts]
    for message in sent:
        link.put(message)
    received: list[tuple[int, messages.FromRank]] = []
    until(
        lambda: len(received) >= len(sent),
        lambda: link.wait(0.01),
        lambda: received.extend(receive(channel, 0.05)),
    )
    assert received == [(1, message) for message in sent]
    assert channel.received[1] >= len(sent)  # heartbeats count too
    channel.send(1, messages.Stop("enough"))
    assert link.wait(_SECONDS) == [messages.Stop("enough")]


def test_a_task_that_connects_again_takes_the_place_of_its_former_connection(
    channel: Channel, connect: Callable[..., Link]
) -> None:
    """The driver may not know yet that the former one is broken."""
    for name in ("before", "after"):
        link = connect(task=1)
        link.put(events.Log(0, name))
        assert collect(channel, 1, link) == [events.Log(0, name)]
    channel.send(1, messages.Stop("enough"))
    assert link.wait(_SECONDS) == [messages.Stop("enough")]


def test_messages_wait_on_the_rank_while_the_driver_receives_none(
    channel: Channel, connect: Callable[..., Link]
) -> None:
    link = connect()
    count, text, waiting = 0, "x" * 10_000, 500
    while link.waiting < waiting and count < 50_000:  # 500 MB: more than socket buffers hold
        link.put(events.Log(0, text))
        link.flush()
        count += 1
    assert link.waiting == waiting
    assert len(collect(channel, count, link)) == count


def _stranger(address: ChannelAddress, **keys: bytes) -> zmq.Socket[bytes]:
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 0
    if "routing_id" in keys:
        dealer.routing_id = keys["routing_id"]  # takes effect with the next connect
    if keys:
        dealer.curve_serverkey = keys.get("server", address.server_key)
        dealer.curve_publickey, dealer.curve_secretkey = keys["public"], keys["secret"]
    dealer.connect(f"tcp://{address.host}:{address.port}")
    return dealer


OWN_KEYS = dict(zip(("public", "secret"), zmq.curve_keypair(), strict=True))


@pytest.mark.parametrize(
    "keys",
    [{}, OWN_KEYS, {**OWN_KEYS, "server": OWN_KEYS["public"]}],
    ids=["no keys", "own keys", "wrong server key"],
)
def test_a_connection_without_the_keys_is_refused_and_counted(
    channel: Channel, keys: dict[str, bytes]
) -> None:
    stranger = _stranger(channel.address, **keys)
    stranger.send(framing.frame(messages.encode(events.Log(0, "from a stranger"))))
    until(lambda: channel.refused, lambda: refuse(channel))
    assert channel.refused >= 1
    stranger.close()


def test_only_connections_of_tasks_count_as_broken(
    channel: Channel, connect: Callable[..., Link]
) -> None:
    for number in range(20):
        with socket.create_connection((channel.address.host, channel.address.port)) as scanner:
            if number % 2:
                scanner.sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
    stranger = _stranger(channel.address, **OWN_KEYS)
    until(lambda: channel.refused >= 11, lambda: refuse(channel))
    stranger.close()
    link = connect()
    link.put(events.Log(0, "here"))
    assert collect(channel, 1, link) == [events.Log(0, "here")]
    assert channel.broken == 0
    link.close()
    until(lambda: channel.broken, lambda: list(receive(channel, 0.05)))
    assert channel.broken == 1


def test_a_connection_without_keys_cannot_announce_more_than_one_part(channel: Channel) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with socket.create_connection((channel.address.host, channel.address.port)) as stranger:
        stranger.settimeout(_SECONDS / 4)  # ZeroMQ closes it after 30 s, whatever it announces
        stranger.sendall(greeting + b"\x06" + (2 << 20).to_bytes(8, "big"))  # a command of 2 MB
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass  # its greeting; then it closes the connection


def test_thousands_of_refused_connections_do_not_disconnect_the_ranks_of_a_busy_driver(
    channel: Channel, connect: Callable[..., Link]
) -> None:
    link = connect()
    link.put(events.Log(0, "before"))
    assert link.monitor.poll(_SECONDS * 1000)  # the handshake is done
    link.wait(0)
    no_keys = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    count = 3000
    for _ in range(count):  # meanwhile the driver receives nothing
        with socket.create_connection((channel.address.host, channel.address.port)) as stranger:
            stranger.settimeout(_SECONDS)
            stranger.sendall(no_keys)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1000):
                    pass
    link.put(events.Log(0, "after"))
    link.wait(0)
    assert collect(channel, 2) == [events.Log(0, "before"), events.Log(0, "after")]
    until(lambda: channel.refused >= count, lambda: refuse(channel))
    assert channel.refused == count


@pytest.mark.parametrize(
    "name", [b"2", b"-1", b"1000000000", b"00", b" 1", b"1_0", b"x", b"1" * 255]
)
def test_batches_from_unknown_tasks_are_dropped_and_counted(channel: Channel, name: bytes) -> None:
    address = channel.address
    public, secret = address.client_public_key, address.client_secret_key
    dealer = _stranger(address, public=public, secret=secret, routing_id=name)
    dealer.send(framing.frame(messages.encode(events.Log(0, "from an unknown task"))))
    until(lambda: channel.dropped, lambda: refuse(channel))
    assert channel.dropped == 1
    dealer.close()


def test_10000_invalid_batches_with_the_right_keys_are_dropped_and_counted(
    channel: Channel,
) -> None:
    address, noise = channel.address, random.Random(11)
    public, secret = address.client_public_key, address.client_secret_key
    dealer = _stranger(address, public=public, secret=secret, routing_id=b"0")
    whole = framing.frame(messages.encode(events.Log(0, "cut short")))
    sent = 10_000
    for number in range(sent):
        junk = noise.randbytes(noise.randrange(0, 60)) or b"\0"
        data = whole[:-3] if number % 100 == 0 else junk
        until(lambda: dealer.poll(0, zmq.POLLOUT), lambda: refuse(channel))
        dealer.send(data, zmq.NOBLOCK)
    until(lambda: channel.dropped >= sent, lambda: refuse(channel))
    assert channel.dropped == sent
    dealer.close()


def test_a_frozen_driver_counts_as_lost_unless_it_comes_back_in_time(
    connect: Callable[..., Link],
) -> None:
    limits = Limits(heartbeat=0.3, reconnect_driver=1)
    script = textwrap.dedent(
        """
        import pickle, sys
        from horovod_runner.wire.channel import Channel
        with Channel("127.0.0.1", size=1) as channel:
            sys.stdout.buffer.write(pickle.dumps(channel.address))
            sys.stdout.flush()
            while True:
                list(channel.batches())
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as driver:
        try:
            assert driver.stdout is not None
            link = connect(pickle.load(driver.stdout), limits=limits)
            assert link.monitor.poll(30_000)  # the handshake is done
            assert not link.lost
            driver.send_signal(signal.SIGSTOP)
            until(lambda: link.disconnected, lambda: link.wait(0.1))
            driver.send_signal(signal.SIGCONT)
            until(lambda: not link.disconnected, lambda: link.wait(0.1))
            assert not link.disconnected
            assert not link.lost
            driver.send_signal(signal.SIGSTOP)
            until(lambda: link.lost, lambda: link.wait(0.1))
            assert link.lost
        finally:
            driver.kill()


def test_wake_ends_receive(channel: Channel) -> None:
    channel.wake()
    assert list(receive(channel, _SECONDS * 10)) == []
    for _ in range(100_000):  # wake never blocks
        channel.wake()


def test_closing_leaves_no_descriptor_open(channel: Channel) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with Channel("127.0.0.1", size=1) as other:
            link = Link(other.address, 0)
            link.put(events.Log(0, "x"))
            link.close()
            link.close()
        other.close()
        other.wake()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_unknown_host_is_an_error_with_the_setting_to_change() -> None:
    with pytest.raises(ChannelError, match=r"spark.driver.host"):
        Channel("no-such-host.invalid", size=1)


@pytest.mark.parametrize("host", ["fd00:77::1", "[::1]"])
def test_a_host_that_has_only_ipv6_is_refused_with_the_remedy(host: str) -> None:
    with pytest.raises(ChannelError, match=r"IPv6 .*IPv4 .*spark\.driver\.host"):
        Channel(host, size=1)


@pytest.mark.parametrize("host", ["192.0.2.77", "own-name"])
def test_with_an_address_of_another_machine_the_channel_listens_on_all(
    connect: Callable[..., Link], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    if host == "own-name":  # Debian maps the machine's name to loopback
        monkeypatch.setattr(socket, "gethostbyname", {host: "127.0.1.1"}.__getitem__)
    with Channel(host, size=1) as channel:
        assert channel.address.host == host
        here = dataclasses.replace(channel.address, host="127.0.0.1")
        link = connect(here)
        link.put(events.Log(0, "x"))
        assert collect(channel, 1, link) == [events.Log(0, "x")]


def test_a_printed_address_shows_no_keys(channel: Channel) -> None:
    text = repr(channel.address)
    for key in (channel.address.client_secret_key, channel.address.server_key):
        assert key.decode() not in text


class InterruptError(Exception):
    """What a signal raises in the main thread."""


def test_no_interrupt_is_lost_while_messages_arrive(
    channel: Channel, connect: Callable[..., Link]
) -> None:
    link = connect()
    armed, handled, over = threading.Event(), threading.Event(), threading.Event()

    def handle(*_: object) -> None:
        armed.clear()
        handled.set()
        raise InterruptError

    def talk() -> None:
        while not over.is_set():
            link.put(events.Log(0, "x"))
            link.wait(0)

    def interrupt() -> None:
        while armed.wait() and not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            handled.wait()
            handled.clear()

    before = signal.signal(signal.SIGINT, handle)
    threads = [threading.Thread(target=each) for each in (talk, interrupt)]
    for thread in threads:
        thread.start()
    lost = 0
    try:
        for _ in range(1000):
            with contextlib.suppress(InterruptError):
                armed.set()
                while armed.is_set():
                    collections.deque(channel.batches(0.1), maxlen=0)
                lost += 1  # the signal came, and what it raised did not
    finally:
        over.set()
        armed.set()
        for thread in threads:
            thread.join()
        signal.signal(signal.SIGINT, before)
    assert lost == 0
