"""Fuzzes every socket that a run opens, while the run trains.

Every sum must stay right, every logged line must arrive once and in order, and Horovod must start
again and again through the rendezvous server. The driver must not crash, hang or grow.
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

from horovod_runner import HorovodRunner, HorovodRunnerError, Limits, log_to_driver
from horovod_runner.checkpoints.archive import Archive
from horovod_runner.common.options import Options
from horovod_runner.common.slots import Offer
from horovod_runner.driver.attempt import AttemptRunner
from horovod_runner.driver.requests import Requests
from horovod_runner.results.run import Run
from horovod_runner.sinks import Sink
from horovod_runner.wire import events, framing, messages
from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.job import Job
from horovod_runner.worker import context
from horovod_runner.worker.startup.rendezvous import Rendezvous
from tests.events import telling
from tests.fuzz import inputs
from tests.fuzz.live import WARM, LiveRun
from tests.fuzz.relay import Relay, start_horovod_twice
from tests.unit.test_driver import Launched

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(600), pytest.mark.usefixtures("room")]

INPUTS = int(os.environ.get("FUZZ_INPUTS", "1500"))  # per socket
OPEN = 64  # connections at a time
OVER_GLOO = dataclasses.replace(WARM, cpu_collectives="gloo")
PATIENCE = 60.0  # seconds for an answer that takes microseconds
# With 100,000 inputs a leak of one kilobyte per input would be 100 MB.
MEMORY = 32 << 20


@pytest.fixture
def room() -> Iterator[None]:
    """Allow some thousand connections; the driver, another process, keeps the usual limit."""
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
    """Ignore that the other side has closed the connection, but not that it does not answer."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError:
        return


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE)


def throw(port: int, stream: Iterable[bytes]) -> Counter[bytes]:
    """Send every input on a new connection; returns the counts of the answers' first bytes.

    The server must close every connection after the last byte of input: no input makes it wait
    forever.
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
            answers[read_answer(waiting.popleft())] += 1
    answers.update(map(read_answer, waiting))
    return answers


def read_answer(client: socket.socket) -> bytes:
    """Read an answer to its end; returns its first 12 bytes."""
    answer = b""
    with client:
        with closed_is_fine():
            client.shutdown(socket.SHUT_WR)
        with closed_is_fine():
            while data := client.recv(4096):
                answer += data
    return answer[:12]


class Clients:
    """Opens connections to a channel, with the run's keys or with other ones."""

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
        """Record what clients send to this channel, one with the right keys and one without."""
        whole = framing.frame(messages.encode(events.Log(0, "x" * 300)))
        with Relay(self._address.port) as relay:
            relayed = Clients(self._context, dataclasses.replace(self._address, port=relay.port))
            for keys in (None, zmq.curve_keypair()):
                # One that is refused before it sends has nowhere to send to.
                refused = contextlib.suppress(*([] if keys is None else [zmq.Again]))
                with relayed.open(b"captured", keys=keys) as client:
                    if keys is not None:
                        client.sndtimeo = 1000
                    with refused:
                        client.send(whole)
                        client.send_multipart([whole, b"", whole])
                    client.poll(3000)  # until its heartbeats have begun
                    client.linger = 0
        return [bytes(sent) for sent in relay.received]


class Slow:
    """Clients that send one byte at a time, and never a complete request."""

    def __init__(self, port: int, captured: list[bytes]) -> None:
        self._port = port
        self._captured = captured
        self._clients = [(connected(port), iter(b"")) for _ in range(50)]

    def beside(self, stream: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the stream's inputs; with every input one of the clients sends a byte."""
        for number, data in enumerate(stream):
            client, rest = self._clients.pop(0)
            try:
                client.sendall(bytes([next(rest)]))
            except (OSError, StopIteration):  # disconnected, or at the end
                client.close()
                request = self._captured[number % len(self._captured)]
                client, rest = connected(self._port), iter(request[:-1])
            self._clients.append((client, rest))
            yield data

    def __enter__(self) -> Slow:
        return self

    def __exit__(self, *_: object) -> None:
        for client, _rest in self._clients:
            client.close()


@pytest.fixture
def zmq_context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as opened:
        yield opened


def test_a_run_listens_on_two_ports(run: LiveRun) -> None:
    listening = {
        connection.laddr.port
        for connection in run.driver.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {run.sockets.channel.port, run.sockets.rendezvous_port}


# Slow: thousands of inputs, beside 400 connections that stay open.
def test_connections_without_keys_do_not_harm_the_channel(
    run: LiveRun, zmq_context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    address = run.sockets.channel
    captured = Clients(zmq_context, address).captured()
    stream = inputs.repeat(1, INPUTS, lambda dice: inputs.stranger(dice, captured))
    with contextlib.ExitStack() as silent, Slow(address.port, captured) as slow:
        for _ in range(400):
            silent.enter_context(connected(address.port))
        assert throw(address.port, slow.beside(stream)).total() == INPUTS
        run.goes_on()
    run.settles(MEMORY)
    run.ends_well()
    assert run.refused > INPUTS // 2  # the other clients disconnected first
    assert run.dropped == 2  # the two batches of captured()


def test_batches_from_unknown_tasks_do_not_harm_the_channel(
    run: LiveRun, zmq_context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    clients = Clients(zmq_context, run.sockets.channel)
    dice = random.Random(2)
    names = list(dict.fromkeys(inputs.routing_id(dice, 2) for _ in range(250)))
    per_client = -(-INPUTS // len(names))
    for number, name in enumerate(names):
        with clients.open(name) as client:
            for batch in inputs.repeat(number, per_client, inputs.batch):
                client.send(batch)
    run.goes_on()
    run.settles(MEMORY)
    run.ends_well()
    assert run.dropped == per_client * len(names)


class EndRecorder(Sink):
    """A sink that waits for the tasks' last messages."""

    LOST = 5 * 10**12  # a number that only the last messages claim

    def __init__(self) -> None:
        self.ended = threading.Semaphore(0)

    def output(self, rank: int, stream: str, text: str) -> None:
        assert rank in (0, 1)

    def log(self, rank: int, text: str) -> None:
        assert rank in (0, 1)

    def notice(self, text: str) -> None:
        lost = re.match(r"(\d+) batches of messages from task . were lost", text)
        if lost and 0 <= self.LOST - int(lost[1]) < INPUTS:
            self.ended.release()


def end_of(attempt: AttemptRunner, ends: SimpleQueue[object]) -> None:
    try:
        ends.put(attempt.run())
    except BaseException as error:
        ends.put(error)


@pytest.mark.usefixtures("nothing_left")
def test_messages_of_a_hostile_task_do_not_break_the_driver(
    zmq_context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    episodes, per_task = 50, INPUTS // 100
    assert Run("fuzz", 2).metrics.num_rows == 0  # imports pyarrow
    before = psutil.Process().memory_info().rss
    for episode in range(episodes):
        stack = contextlib.ExitStack()
        launched, recorder, ends = Launched(), EndRecorder(), SimpleQueue[object]()
        archive = stack.enter_context(
            Archive("0a1b2c3d", Options(np=2, checkpoint_dir=tmp_path / "mine"))
        )
        run, requests, job = Run("fuzz", 2), Requests(), Job("fuzz", 2, Options(np=2), b"")
        attempt = AttemptRunner(job, launched, telling(recorder, run=run), requests, archive)
        running = threading.Thread(target=end_of, args=[attempt, ends])
        running.start()
        clients = Clients(zmq_context, launched.address.get())
        with stack, clients.open(b"0") as first, clients.open(b"1") as second:
            tasks = (first, second)
            if episode % 2:  # otherwise the ranks are rarely placed
                for task, client in enumerate(tasks):
                    hello = messages.Hello(Offer(task, "h", "h", "127.0.0.1", "lo"), "x:1/t", 1)
                    client.send(framing.frame(messages.encode(hello)))
                    assert client.poll(PATIENCE * 1000)
            for task, client in enumerate(tasks):
                for batch in inputs.repeat(2 * episode + task, per_task, inputs.batch):
                    client.send(batch)
                client.send(framing.frame(messages.encode(messages.Ended(task, EndRecorder.LOST))))
            for _ in tasks:
                assert recorder.ended.acquire(timeout=PATIENCE)
        supervisor = requests.supervisor
        assert supervisor is not None
        roster = supervisor.roster
        for kept in (roster.hellos, roster.pids, supervisor.failed, supervisor._secondary):
            assert len(kept) <= 2
        launched.end()
        end = ends.get(timeout=PATIENCE)
        assert end == "done" or isinstance(end, HorovodRunnerError)  # their offers may be invalid
        running.join()
        rows = sum(len(each.times) for each in run._metrics.ranks.values())
        assert run.metrics.num_rows == rows
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]  # no file name led out of it
    assert psutil.Process().memory_info().rss - before < MEMORY


def send_random_messages(seed: int, excluded: list[str]) -> None:
    """Rank 1 sends random messages through its pipe to the driver; rank 0 logs lines."""
    import horovod.torch as hvd

    hvd.init()
    rank = context.current()
    assert rank is not None
    if hvd.rank() == 1:
        for data in inputs.repeat(seed, 5000, lambda dice: inputs.message(dice, excluded)):
            rank.pipe.send_batch(framing.frame(data))
    else:
        for number in range(1000):
            log_to_driver(f"honest {number}")
    hvd.barrier()


@pytest.mark.usefixtures("nothing_left")
def test_a_hostile_rank_can_at_most_end_its_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for seed in range(2):
        # Without the messages that end a run, it succeeds and the other rank's lines arrive.
        harmless = {"seed": seed, "excluded": ["Hello", "Failed"]}
        runner = HorovodRunner(np=-2, cluster_config=WARM)
        runner.run(send_random_messages, **harmless)
        numbers = re.findall(r"^honest (\d+)$", capsys.readouterr().out, re.MULTILINE)
        assert numbers == [str(number) for number in range(1000)]
        with contextlib.suppress(HorovodRunnerError):
            runner.run(send_random_messages, seed=seed, excluded=[])
        capsys.readouterr()


def test_requests_without_the_token_do_not_harm_the_rendezvous_server(run: LiveRun) -> None:
    token, port = run.sockets.token, run.sockets.rendezvous_port
    captured = HorovodRunner(np=-2, cluster_config=OVER_GLOO).run(start_horovod_twice)
    stream = inputs.repeat(3, INPUTS, lambda dice: inputs.request(dice, captured, token, port))
    with contextlib.ExitStack() as silent, Slow(port, captured) as slow:
        for number in range(2000):
            client = silent.enter_context(connected(port))
            if number < 100:  # some have the token, and wait for a key that never arrives
                client.sendall(f"GET /{token}:1/cross_77/{number} HTTP/1.1\r\n\r\n".encode())
        answers = throw(port, slow.beside(stream))
        run.goes_on()
    assert answers.total() == INPUTS
    assert set(answers) == {b"", b"HTTP/1.1 400", b"HTTP/1.1 403"}
    run.settles(MEMORY)
    run.ends_well()


def test_requests_with_the_token_do_not_break_the_rendezvous_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(rendezvous_key=0.01)
    cluster = dataclasses.replace(OVER_GLOO, limits=limits)
    captured = HorovodRunner(np=-2, cluster_config=cluster).run(start_horovod_twice)
    with Rendezvous("127.0.0.1", size=2, limits=limits) as server:
        token = server.address.partition("/")[2]
        # Horovod's requests with this server's token.
        valid = [re.sub(rb"/[\w-]+:", f"/{token}:".encode(), sent, count=1) for sent in captured]

        def make(dice: random.Random) -> bytes:
            if dice.random() < 0.5:
                return inputs.lying_request(dice, token, server.port)
            return inputs.mutated(dice, dice.choice(valid))

        answers = throw(server.port, inputs.repeat(4, 10_000, make))
        assert min(server.requests.values()) > 100
        statuses = (200, 400, 403, 404, 413)
        assert set(answers) == {b"", *(b"HTTP/1.1 %d" % status for status in statuses)}
        assert not server._arrivals
    assert caplog.records == []
