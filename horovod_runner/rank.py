"""One rank's life on its host: say hello, get a slot, run the worker, tell how it ended.

Runs in a Spark task or in a thread of the driver, beside the worker and never in it. One loop reads
what the worker writes, sends it to the driver as fast as that takes it, and hears the driver's
orders; it never waits for the driver while the worker could be waiting for it.
"""

from __future__ import annotations

import codecs
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
import zmq

from horovod_runner import environment, frames, gpu, host, messages
from horovod_runner.channel import ChannelAddress, Link
from horovod_runner.job import Job, Outcome, WorkerJob, WorkerOutcome
from horovod_runner.messages import Assignment
from horovod_runner.process import PIPE_BYTES, TERM_GRACE_SECONDS, WorkerProcess
from horovod_runner.rendezvous import Rendezvous
from horovod_runner.topology import Offer, Slot

REACH_SECONDS = 30.0
_DRAIN_SECONDS = 30.0  # without any progress
_READ_BYTES = 64 << 10
_TAIL_LINES = 30
_TAIL_LINE_CHARACTERS = 2000
_POLL_MS = 100


class _CalledOffError(Exception):
    """The driver called the rank off before its worker was started."""


@dataclass(frozen=True)
class Surroundings:
    """What a launcher knows of the place where a rank is to run.

    Attributes:
        task: the number of the task, 0 to size - 1.
        path: the worker's ``sys.path``.
        user_environment: what counts as set by the user.
        task_gpus: the GPUs that Spark gave this task.
        directory: the worker's working directory; None for this process's.
        echo: takes each line that the rank prints, beside the driver.
    """

    task: int
    path: list[str]
    user_environment: Mapping[str, str]
    task_gpus: tuple[str, ...] = ()
    directory: str | None = None
    echo: Callable[[str], None] | None = None


def run_rank(job: Job, address: ChannelAddress, here: Surroundings) -> Outcome:
    """Run one rank of a job here, from hello to outcome; never raises for what the rank does."""
    link = Link(address, here.task)
    try:
        try:
            outcome = _run(job, address, here, link)
        except Exception as error:
            # Told at once: the others may be waiting for this rank already.
            link.put(messages.Failed(-1, 1, type(error).__name__))
            problem = str(error) if isinstance(error, _CalledOffError) else repr(error)
            outcome = Outcome(here.task, hostname=socket.gethostname(), problem=problem)
        return msgspec.structs.replace(outcome, lost=_drain(link, here.task))
    finally:
        link.close()


def _run(job: Job, address: ChannelAddress, here: Surroundings, link: Link) -> Outcome:
    offer = _offer(job, address, here)
    # Task 0 becomes rank 0: the meeting points are on its host.
    with _Meeting(offer.address, job.size) if here.task == 0 else _NoMeeting() as meeting:
        link.put(messages.Hello(offer, meeting.rendezvous, meeting.master_port))
        assignment = _await_assignment(link, address)
        slot = next(slot for slot in assignment.slots if slot.task == here.task)
        worker_job = WorkerJob(slot.rank, slot.size, job.main, here.path, list(job.argv))
        variables = environment.worker_variables(
            slot,
            assignment,
            environment.available_cores(),
            _gpu_variables(job, slot),
            here.user_environment,
        )
        encoded = msgspec.msgpack.encode(worker_job)
        with WorkerProcess(encoded, variables, here.directory) as worker:
            watch = _Watch(job, slot, link, worker, here.echo)
            watch.until_end()
            return watch.outcome()


def _offer(job: Job, address: ChannelAddress, here: Surroundings) -> Offer:
    own_address = host.address_towards(address.host)
    look_for_gpus = not here.task_gpus and job.gpus_per_rank != 0
    return Offer(
        task=here.task,
        host=host.host_id(),
        hostname=socket.gethostname(),
        address=own_address,
        interface=host.interface_of(own_address),
        task_gpus=here.task_gpus,
        host_gpus=gpu.visible_gpus() if look_for_gpus else (),
    )


class _NoMeeting:
    """The meeting points are on another host."""

    rendezvous = ""
    master_port = 0

    def __enter__(self) -> _NoMeeting:
        return self

    def __exit__(self, *_: object) -> None:
        return


class _Meeting(_NoMeeting):
    """Where the ranks meet: Horovod's store, and a port held for torch.distributed's."""

    def __init__(self, address: str, size: int) -> None:
        self._store = Rendezvous(address, size) if size > 1 else None
        self._port = host.hold_port(address)
        self.rendezvous = self._store.address if self._store else ""
        self.master_port = self._port.getsockname()[1]

    def __exit__(self, *_: object) -> None:
        self._port.close()
        if self._store is not None:
            self._store.close()


def _await_assignment(link: Link, address: ChannelAddress) -> Assignment:
    """Wait until all tasks are there.

    Raises:
        _CalledOffError: the driver called the run off, or cannot be reached.
    """
    deadline = time.monotonic() + REACH_SECONDS
    reached = False
    while True:
        for message in link.wait(0.5):
            reached = True
            if isinstance(message, Assignment):
                return message
            if isinstance(message, messages.Stop):
                raise _CalledOffError(message.reason)
        if not reached and time.monotonic() > deadline:
            raise _CalledOffError(
                f"the driver did not answer at {address.host}:{address.port} within "
                f"{REACH_SECONDS:.0f} s: a firewall between executors and driver, or a wrong "
                "spark.driver.host"
            )


def _gpu_variables(job: Job, slot: Slot) -> dict[str, str]:
    if job.gpus_per_rank == 0:
        return {"CUDA_VISIBLE_DEVICES": ""}
    return gpu.environment(slot, job.gpu_pinning)


class _Watch:
    """Reads a worker's pipes, feeds the link, and ends the worker when told to."""

    def __init__(
        self,
        job: Job,
        slot: Slot,
        link: Link,
        worker: WorkerProcess,
        echo: Callable[[str], None] | None,
    ) -> None:
        self._slot = slot
        self._link = link
        self._worker = worker
        self._held: deque[bytes] = deque()
        self._frames = bytearray()
        self._kill_at: float | None = None
        whole_lines = job.size > 1
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._echo = echo
        self._stream_output = job.stream_output
        self._streams = {
            worker.stdout: _Lines("stdout", whole_lines),
            worker.stderr: _Lines("stderr", whole_lines),
        }
        self._poller = zmq.Poller()
        self._poller.register(link.socket, link.wanted)
        self._open = {worker.stdout, worker.stderr, worker.frames}
        for descriptor in self._open:
            self._poller.register(descriptor, zmq.POLLIN)
        if worker.exit_descriptor is not None:
            self._poller.register(worker.exit_descriptor, zmq.POLLIN)
        self._queue(messages.Started(slot.rank, worker.pid))

    def until_end(self) -> None:
        """Watch until the worker has ended and all that it wrote is queued."""
        while self._worker.exit_code is None:
            self._step()
        # What it started must not outlive it, nor keep its pipes open.
        self._worker.kill()
        for descriptor in tuple(self._open):
            self._read_rest(descriptor)
        for stream in self._streams.values():
            self._print(stream, stream.rest())
        while self._held:
            self._flush_held()
            self._link.wait(_POLL_MS / 1000)

    def _step(self) -> None:
        """Wait for one thing to happen, and do what it asks for."""
        if self._held:
            # The disk is full. The worker's pipes must fill now: nothing read may be lost.
            orders = self._link.wait(_POLL_MS / 1000)
            self._flush_held()
        else:
            self._poller.modify(self._link.socket, self._link.wanted)
            ready = dict(self._poller.poll(_POLL_MS if self._needs_clock() else None))
            for descriptor in self._open & ready.keys():
                if self._read(descriptor) is None:
                    self._leave(descriptor)
            self._link.flush()
            orders = self._link.receive()
        for message in orders:
            if isinstance(message, messages.Stop) and self._kill_at is None:
                if self._said() is None:  # else it is on its way out
                    self._worker.terminate()
                self._kill_at = time.monotonic() + TERM_GRACE_SECONDS
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._worker.kill()

    def _needs_clock(self) -> bool:
        return self._kill_at is not None or self._worker.exit_descriptor is None

    def _read(self, descriptor: int) -> int | None:
        """Read once: how many bytes, 0 if there were none yet, None at the end of the stream."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            return None
        if descriptor == self._worker.frames:
            self._forward(data)
        else:
            stream = self._streams[descriptor]
            self._print(stream, stream.feed(data))
        return len(data)

    def _read_rest(self, descriptor: int) -> None:
        """Read what the worker left in a pipe: not more, others may still write to it."""
        left = PIPE_BYTES
        while left > 0 and (count := self._read(descriptor)):
            left -= count

    def _leave(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        self._poller.unregister(descriptor)

    def _forward(self, data: bytes) -> None:
        self._frames += data
        try:
            end = frames.complete(self._frames)
        except ValueError:
            # Only a worker that overwrites its own memory comes here; its output still counts.
            self._frames.clear()
            self._leave(self._worker.frames)
            return
        if end:
            self._queue_batch(bytes(self._frames[:end]))
            del self._frames[:end]

    def _print(self, stream: _Lines, text: str) -> None:
        if not text:
            return
        lines = text.splitlines()
        self._tail.extend(line[:_TAIL_LINE_CHARACTERS] for line in lines)
        if self._stream_output:
            self._queue(messages.Output(self._slot.rank, stream.name, text))
        if self._echo is not None:
            for line in lines:
                self._echo(f"[{self._slot.rank}] {line}")

    def _queue(self, message: messages.Message) -> None:
        self._queue_batch(frames.frame(messages.encode(message)))

    def _queue_batch(self, batch: bytes) -> None:
        self._held.append(batch)
        self._flush_held()

    def _flush_held(self) -> None:
        while self._held:
            try:
                self._link.put_batch(self._held[0])
            except OSError:
                return  # the disk is full: tried again when something has been sent
            self._held.popleft()

    def outcome(self) -> Outcome:
        """How the rank ended; also sends Failed where the worker could not."""
        exit_code = self._worker.exit_code
        said = self._said()
        if said is not None:
            exit_code = said.exit_code
        elif exit_code is not None:
            self._queue(messages.Failed(self._slot.rank, exit_code))
        return Outcome(
            self._slot.task,
            self._slot.rank,
            self._slot.hostname,
            self._worker.pid,
            exit_code,
            self._slot.gpus,
            said,
            list(self._tail),
        )

    def _said(self) -> WorkerOutcome | None:
        """The worker's own word on its end, if there is one yet."""
        try:
            return msgspec.msgpack.decode(self._worker.outcome(), type=WorkerOutcome)
        except msgspec.MsgspecError:
            return None


class _Lines:
    """Decodes one stream of a worker, and cuts it into pieces of whole lines.

    Args:
        name: "stdout" or "stderr".
        whole: hold a line back until it is complete; without, text passes as it comes, so that a
            progress bar of a single rank moves.
    """

    def __init__(self, name: Literal["stdout", "stderr"], whole: bool) -> None:
        self.name = name
        self._whole = whole
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._partial = ""

    def feed(self, data: bytes) -> str:
        """The text that can be shown now."""
        text = self._partial + self._decoder.decode(data)
        self._partial = ""
        if not self._whole:
            return text
        end = text.rfind("\n") + 1
        if end == 0 and len(text) > _READ_BYTES:
            return text  # no line: it has to break somewhere
        self._partial = text[end:]
        return _last_overwrite(text[:end])

    def rest(self) -> str:
        """What is left at the end of the stream."""
        text = self._partial + self._decoder.decode(b"", final=True)
        self._partial = ""
        return _last_overwrite(text) if self._whole else text


def _last_overwrite(text: str) -> str:
    """Of a line that was overwritten with carriage returns, what a terminal would show last."""
    if "\r" not in text:
        return text
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def _drain(link: Link, task: int) -> int:
    """Wait until the driver has taken everything; returns how many batches it did not."""
    expected = link.sent + link.waiting
    link.put(messages.Ended(task, expected))
    sent, deadline = link.sent, time.monotonic() + _DRAIN_SECONDS
    while time.monotonic() < deadline:
        if any(isinstance(message, messages.Taken) for message in link.wait(0.5)):
            return 0
        if link.sent > sent:
            sent, deadline = link.sent, time.monotonic() + _DRAIN_SECONDS
    return link.waiting


def stderr_echo(line: str) -> None:
    """Print a line on this process's stderr: an executor's log, in Spark."""
    print(line, file=sys.stderr, flush=True)
