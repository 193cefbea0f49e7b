"""The channel over real sockets: order, drain, back-pressure, strangers."""

from __future__ import annotations

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
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from horovod_runner import ChannelError, frames, messages
from horovod_runner.channel import Channel, ChannelAddress, Link

_SECONDS = 60.0


@pytest.fixture
def channel() -> Iterator[Channel]:
    with Channel("127.0.0.1", size=2) as opened:
        yield opened


@pytest.fixture
def connect(channel: Channel) -> Iterator[Callable[..., Link]]:
    """Opens links that are closed whatever becomes of the test: an open one holds up its exit."""
    with contextlib.ExitStack() as links:
        yield lambda address=channel.address, task=0: links.enter_context(
            contextlib.closing(Link(address, task))
        )


def receive(
    channel: Channel, timeout: float | None = None
) -> Iterator[tuple[int, messages.FromRank]]:
    """What comes, the beats left out: they depend on the time."""
    for task, message in channel.receive(timeout):
        if not isinstance(message, messages.Alive):
            yield task, message


def collect(
    channel: Channel, done: Callable[[list[messages.FromRank]], bool]
) -> list[messages.FromRank]:
    found: list[messages.FromRank] = []
    deadline = time.monotonic() + _SECONDS
    while not done(found) and time.monotonic() < deadline:
        found += [message for _, message in receive(channel, 0.1)]
    return found


def test_messages_arrive_in_order_and_orders_come_back(
    channel: Channel, connect: Callable[..., Link]
) -> None:
    link = connect(task=1)
    sent = [messages.Log(0, str(number)) for number in range(50)]
    for message in sent:
        link.put(message)
    link.wait(0)
    found: list[messages.FromRank] = []
    while len(found) < len(sent):
        link.wait(0.01)
        for task, message in receive(channel, 1):
            assert task == 1
            found.append(message)
    assert found == sent
    assert channel.received(1) >= len(sent)  # beats count too
    channel.send(1, messages.Stop("enough"))
    assert link.wait(_SECONDS) == [messages.Stop("enough")]


def test_what_the_driver_does_not_take_waits_with_the_rank(
    channel: Channel, connect: Callable[..., Link]
) -> None:
    link = connect()
    count, text, waiting = 0, "x" * 10_000, 500
    while link.waiting < waiting and count < 50_000:  # 500 MB: more than any sockets hold
        link.put(messages.Log(0, text))
        link.flush()
        count += 1
    assert link.waiting == waiting
    taken = 0
    deadline = time.monotonic() + 60
    while taken < count and time.monotonic() < deadline:
        link.flush()
        taken += len(list(receive(channel, 0.01)))
    assert taken == count


def _stranger(address: ChannelAddress, **keys: bytes) -> zmq.Socket[bytes]:
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 0
    if "routing_id" in keys:
        dealer.routing_id = keys["routing_id"]  # counts from the next connect on
    if keys:
        dealer.curve_serverkey = keys.get("server", address.server_key)
        dealer.curve_publickey, dealer.curve_secretkey = keys["public"], keys["secret"]
    dealer.connect(f"tcp://{address.host}:{address.port}")
    return dealer


def _wait_for_refusals(channel: Channel, count: int) -> None:
    deadline = time.monotonic() + _SECONDS
    while channel.refused < count and time.monotonic() < deadline:
        assert list(receive(channel, 0.1)) == []


@pytest.mark.parametrize("kind", ["no keys", "own keys", "wrong server key"])
def test_a_stranger_is_refused_and_counted(channel: Channel, kind: str) -> None:
    public, secret = zmq.curve_keypair()
    if kind == "no keys":
        stranger = _stranger(channel.address)
    elif kind == "own keys":
        stranger = _stranger(channel.address, public=public, secret=secret)
    else:
        other = zmq.curve_keypair()[0]
        stranger = _stranger(channel.address, public=public, secret=secret, server=other)
    stranger.send(frames.frame(messages.encode(messages.Log(0, "from a stranger"))))
    _wait_for_refusals(channel, 1)
    assert channel.refused >= 1
    stranger.close()


def test_port_scanners_and_noise_change_nothing(
    channel: Channel, connect: Callable[..., Link]
) -> None:
    noise = random.Random(7)
    for number in range(200):
        with socket.create_connection((channel.address.host, channel.address.port)) as scanner:
            if number % 2:
                scanner.sendall(noise.randbytes(noise.randrange(1, 300)))
    link = connect()
    link.put(messages.Log(0, "still here"))
    link.wait(0.1)
    deadline = time.monotonic() + _SECONDS
    found: list[messages.FromRank] = []
    while not found and time.monotonic() < deadline:
        link.wait(0.05)
        found += [m for _, m in receive(channel, 0.05)]
    assert found == [messages.Log(0, "still here")]


def test_a_batch_larger_than_a_part_arrives_whole(
    channel: Channel, connect: Callable[..., Link]
) -> None:
    link = connect()
    sent = [messages.Log(0, letter * 3_000_000) for letter in "ab"]
    for message in sent:
        link.put(message)
    found: list[messages.FromRank] = []
    deadline = time.monotonic() + _SECONDS
    while len(found) < len(sent) and time.monotonic() < deadline:
        link.wait(0.01)
        found += [message for _, message in receive(channel, 0.01)]
    assert found == sent
    assert channel.received(0) >= len(sent)  # beats count too


def test_a_stranger_cannot_make_the_driver_hold_more_than_a_part(channel: Channel) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with socket.create_connection((channel.address.host, channel.address.port)) as stranger:
        stranger.settimeout(_SECONDS)
        stranger.sendall(greeting + b"\x06" + (2 << 20).to_bytes(8, "big"))  # a command of 2 MB
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass  # its greeting; then it hangs up


def test_strangers_by_the_thousand_cost_a_busy_driver_none_of_its_ranks(
    channel: Channel, connect: Callable[..., Link]
) -> None:
    link = connect()
    link.put(messages.Log(0, "before"))
    assert link.monitor.poll(_SECONDS * 1000)  # they have shaken hands
    link.wait(0)
    no_keys = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    count = 3000
    for _ in range(count):  # the driver, all the while, takes nothing
        with socket.create_connection((channel.address.host, channel.address.port)) as stranger:
            stranger.settimeout(_SECONDS)
            stranger.sendall(no_keys)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1000):
                    pass
    link.put(messages.Log(0, "after"))
    link.wait(0)
    assert collect(channel, lambda found: len(found) == 2) == [
        messages.Log(0, "before"),
        messages.Log(0, "after"),
    ]
    _wait_for_refusals(channel, count)
    assert channel.refused == count


@pytest.mark.parametrize(
    "name", [b"2", b"-1", b"1000000000", b"00", b" 1", b"1_0", b"x", b"1" * 255]
)
def test_who_is_none_of_the_runs_tasks_is_dropped_and_counted(
    channel: Channel, name: bytes
) -> None:
    address = channel.address
    public, secret = address.client_public_key, address.client_secret_key
    dealer = _stranger(address, public=public, secret=secret, routing_id=name)
    dealer.send(frames.frame(messages.encode(messages.Log(0, "from nobody"))))
    deadline = time.monotonic() + _SECONDS
    while not channel.dropped and time.monotonic() < deadline:
        assert list(receive(channel, 0.1)) == []
    assert channel.dropped == 1
    dealer.close()


def test_10000_random_frames_with_the_right_keys_are_dropped_and_counted(channel: Channel) -> None:
    address, noise = channel.address, random.Random(11)
    public, secret = address.client_public_key, address.client_secret_key
    dealer = _stranger(address, public=public, secret=secret, routing_id=b"0")
    whole = frames.frame(messages.encode(messages.Log(0, "cut short")))
    sent = 10_000
    deadline = time.monotonic() + 60
    for number in range(sent):
        junk = noise.randbytes(noise.randrange(0, 60)) or b"\0"
        data = whole[:-3] if number % 100 == 0 else junk
        while time.monotonic() < deadline:
            try:
                dealer.send(data, zmq.NOBLOCK)
                break
            except zmq.Again:
                assert list(receive(channel, 0.01)) == []
    while channel.dropped < sent and time.monotonic() < deadline:
        assert list(receive(channel, 0.1)) == []
    assert channel.dropped == sent
    dealer.close()


def test_a_driver_that_freezes_is_missed_and_one_that_comes_back_is_not(
    connect: Callable[..., Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in [("HEARTBEAT_MS", 100), ("HEARTBEAT_TIMEOUT_MS", 300), ("LOST_SECONDS", 1)]:
        monkeypatch.setattr(f"horovod_runner.channel._{name}", value)
    script = textwrap.dedent(
        """
        import pickle, sys
        from horovod_runner.channel import Channel
        with Channel("127.0.0.1", size=1) as channel:
            sys.stdout.buffer.write(pickle.dumps(channel.address))
            sys.stdout.flush()
            while True:
                list(channel.receive())
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as driver:
        try:
            assert driver.stdout is not None
            link = connect(pickle.load(driver.stdout))
            assert link.monitor.poll(30_000)  # they have shaken hands
            assert not link.lost

            def until(condition: Callable[[], bool]) -> None:
                deadline = time.monotonic() + 30
                while not condition():
                    assert time.monotonic() < deadline
                    link.wait(0.1)

            driver.send_signal(signal.SIGSTOP)
            until(lambda: link.shaky)
            driver.send_signal(signal.SIGCONT)
            until(lambda: not link.shaky)
            assert not link.lost
            driver.send_signal(signal.SIGSTOP)
            until(lambda: link.lost)
        finally:
            driver.kill()


def test_waking_returns_from_receive(channel: Channel) -> None:
    channel.wake()
    assert list(receive(channel, _SECONDS * 10)) == []
    for _ in range(100_000):  # more than the wake-up pipe holds
        channel.wake()


def test_nothing_stays_open(channel: Channel) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with Channel("127.0.0.1", size=1) as other:
            link = Link(other.address, 0)
            link.put(messages.Log(0, "x"))
            link.close()
            link.close()
        other.close()
        other.wake()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_address_that_is_no_host_is_named() -> None:
    with pytest.raises(ChannelError, match=r"spark.driver.host"):
        Channel("no-such-host.invalid", size=1)


@pytest.mark.parametrize("host", ["192.0.2.77", "own-name"])
def test_an_address_that_is_no_use_here_is_stood_in_for_by_all_of_this_machines(
    connect: Callable[..., Link], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    if host == "own-name":  # as Debian sets it up
        monkeypatch.setattr(socket, "gethostbyname", {host: "127.0.1.1"}.__getitem__)
    with Channel(host, size=1) as channel:
        assert channel.address.host == host
        here = dataclasses.replace(channel.address, host="127.0.0.1")
        link = connect(here)
        link.put(messages.Log(0, "x"))
        link.wait(0.1)
        assert collect(channel, bool) == [messages.Log(0, "x")]


def test_keys_do_not_show_in_a_printed_address(channel: Channel) -> None:
    text = repr(channel.address)
    for key in (channel.address.client_secret_key, channel.address.server_key):
        assert key.decode() not in text
