"""Every socket that a run opens, under fire while the run goes on.

The run must not notice: every sum stays right, every logged line arrives once and in order, and
Horovod starts again and again through the store. Its driver must neither crash nor hang nor grow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import resource
import socket
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest
import zmq

from horovod_runner import (
    HorovodRunner,
    HorovodRunnerError,
    frames,
    log_to_driver,
    messages,
    pipe,
)
from horovod_runner.archive import Archive
from horovod_runner.channel import ChannelAddress
from horovod_runner.driver import Driver
from horovod_runner.job import Job
from horovod_runner.recorder import Recorder
from horovod_runner.rendezvous import Rendezvous
from horovod_runner.result import Run
from horovod_runner.topology import Offer
from tests.fuzz import inputs
from tests.fuzz.live import LiveRun
from tests.fuzz.relay import Relay, start_horovod_twice
from tests.unit.test_driver import Launched

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600), pytest.mark.usefixtures("room")]

INPUTS = int(os.environ.get("FUZZ_INPUTS", "10000"))  # for each socket
OPEN = 64  # connections at a time
PATIENCE = 60.0  # seconds for an answer that takes microseconds
# Of 100,000 inputs a leak of one kilobyte each would be 100 MB.
MEMORY = 32 << 20


@pytest.fixture
def room() -> Iterator[None]:
    """Descriptors for some thousand connections; the driver, elsewhere, has no more than most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LiveRun]:
    with LiveRun(tmp_path) as live:
        yield live


@contextlib.contextmanager
def closed_is_fine() -> Iterator[None]:
    """The other side may close whenever it likes, but not keep us waiting."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError:
        return


def connected(port: int) -> socket.socket:
    client = socket.socket()
    client.settimeout(PATIENCE)
    client.connect(("127.0.0.1", port))
    return client


def throw(port: int, stream: Iterable[bytes]) -> Counter[bytes]:
    """Send each input on a connection of its own; counts how the answers began.

    Each connection must be closed by the other side once this side has said all: no input makes a
    server wait for ever.
    """
    answers: Counter[bytes] = Counter()
    waiting: deque[socket.socket] = deque()
    for number, data in enumerate(stream):
        client = connected(port)
        with closed_is_fine():
            client.sendall(data)
            if number % 2:
                client.shutdown(socket.SHUT_WR)
        waiting.append(client)
        if len(waiting) == OPEN:
            answers[hear(waiting.popleft())] += 1
    answers.update(map(hear, waiting))
    return answers


def hear(client: socket.socket) -> bytes:
    """The first 12 bytes of the answer, when it has ended."""
    answer = b""
    with client:
        with closed_is_fine():
            client.shutdown(socket.SHUT_WR)
        with closed_is_fine():
            while data := client.recv(4096):
                answer += data
    return answer[:12]


class Clients:
    """Opens connections to a channel, with the run's keys or others."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: ChannelAddress) -> None:
        self._context = context
        self._address = address

    def open(self, routing_id: bytes, keys: tuple[bytes, bytes] | None = None) -> zmq.Socket[bytes]:
        address, client = self._address, self._context.socket(zmq.DEALER)
        client.routing_id = routing_id
        client.curve_serverkey = address.server_key
        client.curve_publickey, client.curve_secretkey = keys or (
            address.client_public_key,
            address.client_secret_key,
        )
        client.linger = client.sndtimeo = round(PATIENCE * 1000)
        client.connect(f"tcp://{address.host}:{address.port}")
        return client

    def captured(self) -> list[bytes]:
        """What real clients say to this channel, a good one and a bad one."""
        whole = frames.frame(messages.encode(messages.Log(0, "x" * 300)))
        with Relay(self._address.port) as relay:
            there = Clients(self._context, dataclasses.replace(self._address, port=relay.port))
            for keys in (None, zmq.curve_keypair()):
                with there.open(b"captured", keys=keys) as client:
                    client.send(whole)
                    client.send_multipart([whole, b"", whole])
                    client.poll(3000)  # until its heartbeats have begun
                    client.linger = 0
        return [bytes(said) for said in relay.heard]


class Slow:
    """Clients that say one byte at a time, and never all they have to say."""

    def __init__(self, port: int, captured: list[bytes]) -> None:
        self._port = port
        self._captured = captured
        self._clients = [(connected(port), iter(b"")) for _ in range(50)]

    def beside(self, stream: Iterable[bytes]) -> Iterator[bytes]:
        """The stream, each of whose inputs lets one of the clients say a byte."""
        for number, data in enumerate(stream):
            client, rest = self._clients.pop(0)
            try:
                client.sendall(bytes([next(rest)]))
            except (OSError, StopIteration):  # cut off, or close to its end
                client.close()
                words = self._captured[number % len(self._captured)]
                client, rest = connected(self._port), iter(words[:-1])
            self._clients.append((client, rest))
            yield data

    def __enter__(self) -> Slow:
        return self

    def __exit__(self, *_: object) -> None:
        for client, _rest in self._clients:
            client.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as own:
        yield own


def test_a_run_listens_on_two_ports(run: LiveRun) -> None:
    listening = {
        connection.laddr.port
        for connection in run.driver.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {run.sockets.channel.port, run.sockets.store_port}


def test_strangers_at_the_message_channel_change_nothing(
    run: LiveRun, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    address = run.sockets.channel
    captured = Clients(context, address).captured()
    stream = inputs.repeat(1, INPUTS, lambda dice: inputs.stranger(dice, captured))
    with contextlib.ExitStack() as silent, Slow(address.port, captured) as slow:
        for _ in range(400):
            silent.enter_context(connected(address.port))
        assert throw(address.port, slow.beside(stream)).total() == INPUTS
        run.goes_on()
    run.settles(MEMORY)
    run.ends_well()
    assert run.refused > INPUTS // 2  # the others went away first
    assert run.dropped == 2  # the captured ones themselves


def test_batches_with_the_right_keys_from_no_task_change_nothing(
    run: LiveRun, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    clients = Clients(context, run.sockets.channel)
    dice = random.Random(2)
    names = list(dict.fromkeys(inputs.routing_id(dice, 2) for _ in range(250)))
    each = -(-INPUTS // len(names))
    for number, name in enumerate(names):
        with clients.open(name) as client:
            for batch in inputs.repeat(number, each, inputs.batch):
                client.send(batch)
    run.goes_on()
    run.settles(MEMORY)
    run.ends_well()
    assert run.dropped == each * len(names)


class LastWords(Recorder):
    """A sink that keeps reports and waits for the tasks' last messages."""

    LOST = 5 * 10**12  # what they claim: no other message does so

    def __init__(self) -> None:
        super().__init__(Run("fuzz", 2))
        self.heard = threading.Semaphore(0)

    def output(self, rank: int, stream: str, text: str) -> None:
        assert rank in (0, 1)

    def log(self, rank: int, text: str) -> None:
        assert rank in (0, 1)

    def notice(self, text: str) -> None:
        lost = re.match(r"(\d+) batches of messages from task . were lost", text)
        if lost and 0 <= self.LOST - int(lost[1]) < INPUTS:
            self.heard.release()


def end_of(driver: Driver, ends: SimpleQueue[object]) -> None:
    try:
        ends.put(driver.run())
    except BaseException as error:
        ends.put(error)


@pytest.mark.usefixtures("nothing_left")
def test_no_message_of_a_hostile_task_breaks_the_driver(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    episodes, each = 50, INPUTS // 100
    assert Run("fuzz", 2).metrics.num_rows == 0  # imports pyarrow
    before = psutil.Process().memory_info().rss
    for episode in range(episodes):
        stack = contextlib.ExitStack()
        launched, words, ends = Launched(), LastWords(), SimpleQueue[object]()
        archive = stack.enter_context(Archive("0a1b2c3d", str(tmp_path / "mine")))
        cancelled = threading.Event()
        driver = Driver(Job("fuzz", 2, b""), launched, words, cancelled, archive)  # type: ignore[arg-type]
        running = threading.Thread(target=end_of, args=[driver, ends])
        running.start()
        clients = Clients(context, launched.address.get())
        with stack, clients.open(b"0") as first, clients.open(b"1") as second:
            tasks = (first, second)
            if episode % 2:  # else few of them get so far as to have ranks
                for task, client in enumerate(tasks):
                    hello = messages.Hello(Offer(task, "h", "h", "127.0.0.1", "lo"), "x:1/t", 1)
                    client.send(frames.frame(messages.encode(hello)))
                    assert client.poll(PATIENCE * 1000)
            for task, client in enumerate(tasks):
                for batch in inputs.repeat(2 * episode + task, each, inputs.batch):
                    client.send(batch)
                client.send(frames.frame(messages.encode(messages.Ended(task, LastWords.LOST))))
            for _ in tasks:
                assert words.heard.acquire(timeout=PATIENCE)
        for kept in (driver._hellos, driver._pids, driver._failed, driver._felt):
            assert len(kept) <= 2
        launched.end()
        end = ends.get(timeout=PATIENCE)
        assert end == "done" or isinstance(end, HorovodRunnerError)  # as their offers cannot be met
        running.join()
        assert words._run.metrics.num_rows == len(words._run._metrics)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]  # no name of a file led out of it
    assert psutil.Process().memory_info().rss - before < MEMORY


def lie(seed: int, spared: list[str]) -> None:
    """Rank 1 sends what it likes through its own way to the driver."""
    import horovod.torch as hvd

    hvd.init()
    way_out = pipe.current()
    assert way_out is not None
    if hvd.rank() == 1:
        for data in inputs.repeat(seed, 5000, lambda dice: inputs.message(dice, spared)):
            way_out.send(frames.frame(data))
    else:
        for number in range(1000):
            log_to_driver(f"honest {number}")
    hvd.barrier()


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_lies_can_do_no_more_than_end_its_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for seed in range(2):
        # It says nothing that ends it: the run goes well, and the other rank's words arrive.
        HorovodRunner(np=-2).run(lie, seed=seed, spared=["Hello", "Failed"])
        told = re.findall(r"^honest (\d+)$", capsys.readouterr().out, re.MULTILINE)
        assert told == [str(number) for number in range(1000)]
        with contextlib.suppress(HorovodRunnerError):
            HorovodRunner(np=-2).run(lie, seed=seed, spared=[])
        capsys.readouterr()


def test_strangers_at_the_rendezvous_store_change_nothing(run: LiveRun) -> None:
    token, port = run.sockets.store_token, run.sockets.store_port
    captured = HorovodRunner(np=-2, controller="gloo").run(start_horovod_twice)
    stream = inputs.repeat(3, INPUTS, lambda dice: inputs.request(dice, captured, token, port))
    with contextlib.ExitStack() as silent, Slow(port, captured) as slow:
        for number in range(2000):
            client = silent.enter_context(connected(port))
            if number < 100:  # some that know the token, and wait for what never comes
                client.sendall(f"GET /{token}:1/cross_77/{number} HTTP/1.1\r\n\r\n".encode())
        answers = throw(port, slow.beside(stream))
        run.goes_on()
    assert answers.total() == INPUTS
    assert set(answers) == {b"", b"HTTP/1.1 400", b"HTTP/1.1 403"}
    run.settles(MEMORY)
    run.ends_well()


def test_requests_with_the_right_token_never_break_the_store(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horovod_runner.rendezvous._LONG_POLL_SECONDS", 0.01)
    captured = HorovodRunner(np=-2, controller="gloo").run(start_horovod_twice)
    with Rendezvous("127.0.0.1", size=2) as store:
        token = store.address.partition("/")[2]
        # As Horovod would have said it to this store.
        said = [re.sub(rb"/[\w-]+:", f"/{token}:".encode(), one, count=1) for one in captured]

        def make(dice: random.Random) -> bytes:
            if dice.random() < 0.5:
                return inputs.lying_request(dice, token, store.port)
            return inputs.mutated(dice, dice.choice(said))

        answers = throw(store.port, inputs.repeat(4, 10_000, make))
        assert min(store.requests.values()) > 100
        assert set(answers) == {b"", *(b"HTTP/1.1 %d" % one for one in (200, 400, 403, 404, 413))}
        assert not store._arrivals
    assert caplog.records == []


def test_nothing_accepts_connections_at_the_held_port(run: LiveRun) -> None:
    for _ in range(INPUTS):
        with pytest.raises(ConnectionRefusedError):
            connected(run.sockets.master_port)
    run.goes_on()
    run.ends_well()
