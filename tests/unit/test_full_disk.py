"""A full disk under the messages that wait in a task: nothing stops; what is lost is counted."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from horovod_runner.common.limits import DEFAULTS
from horovod_runner.common.options import Options
from horovod_runner.common.slots import Slot
from horovod_runner.launchers.member import _PoolContact
from horovod_runner.task import task, transfer
from horovod_runner.task.relay import Relay
from horovod_runner.wire import events, messages
from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.channel import Channel
from horovod_runner.wire.events import Log
from horovod_runner.wire.job import Job
from horovod_runner.wire.link import Link
from horovod_runner.wire.messages import Assignment, FilePart
from horovod_runner.wire.pool import Done

_DISK_BYTES = 1 << 20
_PATIENCE = 60.0


@pytest.fixture(autouse=True)
def _full_disk() -> Iterator[None]:
    """Files of this process have a limit, as if there were no more room on the disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_DISK_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def channel() -> Iterator[Channel]:
    with Channel("127.0.0.1", size=1) as opened:
        yield opened


@pytest.fixture
def nowhere() -> ChannelAddress:
    """Where no driver listens."""
    return ChannelAddress("127.0.0.1", 9, zmq.curve_keypair()[0], *zmq.curve_keypair())


def filled(address: ChannelAddress) -> Link:
    """A task's end whose messages fill memory and disk, and were not sent yet."""
    link = Link(address, 0)
    for size in (100_000, 1000, 0):
        with suppress(OSError):
            while True:
                link.put(Log(0, "x" * size))
    return link


def take_all(channel: Channel, call: Callable[[], None]) -> list[messages.FromRank]:
    """Collect what the driver receives while a call runs in another thread."""
    received: list[messages.FromRank] = []
    calling = threading.Thread(target=call)
    calling.start()
    while calling.is_alive():
        for _, batch in channel.batches(0.1):
            received += [each for each in batch if not isinstance(each, messages.Alive)]
            if any(isinstance(each, messages.Ended) for each in batch):
                channel.send(0, messages.Taken())
    return received


def test_a_trace_is_sent_as_soon_as_there_is_room(channel: Channel, tmp_path: Path) -> None:
    trace = tmp_path / f"rank-0.{messages.TRACE_NAMES[0]}"
    trace.write_bytes(data := os.urandom(900_000))
    lost: list[int] = []
    with closing(filled(channel.address)) as link:
        waiting = link.waiting

        def send() -> None:
            transfer.send_trace(str(tmp_path / "rank-0"), 0, link, _PATIENCE)
            lost.append(task._drain(link, 0, _PATIENCE))

        received = take_all(channel, send)
    assert lost == [0]
    assert not trace.exists()
    parts = [each for each in received if isinstance(each, FilePart)]
    assert b"".join(part.data for part in parts) == data
    assert parts[-1].data == b""
    assert sum(isinstance(each, Log) for each in received) == waiting


def test_a_trace_that_cannot_be_read_costs_the_trace_alone(
    channel: Channel, tmp_path: Path
) -> None:
    (tmp_path / f"rank-0.{messages.TRACE_NAMES[0]}").mkdir()
    (tmp_path / "timeline").mkdir()
    with closing(Link(channel.address, 0)) as opened:

        def send() -> None:
            transfer.send_trace(str(tmp_path / "rank-0"), 0, opened, _PATIENCE)
            transfer.send_timeline(tmp_path / "timeline", opened, _PATIENCE)
            task._drain(opened, 0, _PATIENCE)

        untraced, log, _ = take_all(channel, send)
    assert isinstance(untraced, events.Untraced)
    assert "Is a directory" in untraced.reason
    assert isinstance(log, Log)
    assert "timeline cannot be read" in log.text


def test_what_the_driver_does_not_take_is_counted_and_not_raised(nowhere: ChannelAddress) -> None:
    with closing(filled(nowhere)) as link:
        assert not link.put_patiently(Log(0, ""), 0.1)
        assert link.dropped == 1
        waiting = link.waiting
        assert waiting > 50
        assert task._drain(link, 0, 0.1) == waiting + 1
        link.mark_lost()
        assert task._drain(link, 0, _PATIENCE) == waiting + 2


def test_a_relay_ends_when_the_driver_is_lost(nowhere: ChannelAddress) -> None:
    slot = Slot(0, 0, 1, 0, 1, 0, 1, "host", "host", "127.0.0.1", "lo")
    link = filled(nowhere)
    link.mark_lost()
    pipes = {
        name: os.pipe()
        for name in ("stdout", "stderr", "messages", "reports", "file_parts", "stacks", "pid_pipe")
    }
    os.write(pipes["stdout"][1], b"a last line\n")
    for _, write in pipes.values():
        os.close(write)
    worker: Any = SimpleNamespace(
        **{name: read for name, (read, _) in pipes.items()},
        exit_descriptor=None,
        exit_code=-9,
        pid=1,
        pmi=None,
        left_behind="",
        outcome=lambda: None,
    )
    job = Job("test", 1, Options(np=1, driver_log_verbosity="all"), b"")
    relay = Relay(job, Assignment(slot, "", "", 1), link, worker, None)
    relay.run()
    outcome = relay.outcome()
    assert (outcome.exit_code, outcome.tail) == (-9, ["a last line"])
    assert link.dropped == 2  # the line, and the notice of the end
    link.close()
    for read, _ in pipes.values():
        os.close(read)


def test_a_tasks_outcome_waits_once_for_a_pool_that_is_away(
    nowhere: ChannelAddress, tmp_path: Path
) -> None:
    contact = _PoolContact(nowhere, 0, tmp_path, DEFAULTS)
    for _ in range(20):
        contact.finish(Done(1, bytes(1 << 20), -1))
        poller = zmq.Poller()
        poller.register(contact._wake_read, zmq.POLLIN)
        while contact._thread.is_alive() and poller.poll(0):  # until the thread has woken up
            pass
    assert contact._thread.is_alive()
    assert contact._link.waiting <= 2
    contact.close()
