"""Watches one worker: reads all that it writes, feeds the link, and ends it when told to.

One loop, which never waits for the driver while the worker could be waiting for it.
"""

from __future__ import annotations

import codecs
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import zmq

from horovod_runner import frames, messages
from horovod_runner.activity import Activity
from horovod_runner.channel import Link
from horovod_runner.job import Job, Outcome
from horovod_runner.pmi import Pmi
from horovod_runner.process import PIPE_BYTES, TERM_GRACE_SECONDS, WorkerProcess
from horovod_runner.stall import StallReader
from horovod_runner.topology import Slot

_READ_BYTES = 64 << 10
_TAIL_LINES = 30
_TAIL_LINE_CHARACTERS = 2000
_POLL_MS = 100
_BEAT_MS = 1000
# Reports are fetched on a clock: a training loop that sends one a step is not to wake this process
# with each. Sooner where the pipe fills.
_REPORTS_SECONDS = 0.1
_REPORTS_SOON_SECONDS = 0.01
_REPORTS_MANY_BYTES = PIPE_BYTES // 8
# So many batches that the driver has not taken: reports stay in their pipe.
_ENOUGH_WAITING = 32
# Of checkpoints' pieces: ZeroMQ's own queue is full then, and the disk is no shorter way.
_ENOUGH_BULK_WAITING = 2
_ACTIVITY_SECONDS = 5.0  # between two looks at what the worker does
_STACKS_SECONDS = 2.0  # for the first of a worker's stacks to come, and a tenth for the rest
LOST_DRIVER = (
    "the connection to the driver broke off and did not come back: the driver was killed, or the "
    "network to it is cut"
)


class Watch:
    """Reads a worker's pipes, feeds the link, and ends the worker when told to."""

    def __init__(
        self,
        job: Job,
        slot: Slot,
        link: Link,
        worker: WorkerProcess,
        echo: Callable[[str], None] | None,
        *,
        assignment: messages.Assignment,
    ) -> None:
        self._slot = slot
        self._link = link
        self._worker = worker
        self._held: deque[bytes] = deque()
        self._frames = {pipe: bytearray() for pipe in (worker.frames, worker.reports, worker.bulk)}
        self._reports_at: float | None = None
        self._bulk_waits = False
        self._kill_at: float | None = None
        self._stopped = False
        self._problem = ""
        self._activity: Activity | None = None
        self._activity_seconds = min(_ACTIVITY_SECONDS, job.stall_seconds / 2)
        self._stalls = StallReader()
        self._stacks = b""
        self._stacks_until: float | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._echo = echo
        self._stream_output = job.stream_output
        self._streams = {
            worker.stdout: Lines("stdout", hold=job.size > 1),
            worker.stderr: Lines("stderr", hold=job.size > 1),
        }
        self._poller = zmq.Poller()
        self._poller.register(link.socket, link.wanted)
        self._open = {worker.stdout, worker.stderr, worker.stacks, *self._frames}
        for descriptor in self._open:
            self._poller.register(descriptor, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)
        self._poller.register(worker.born, zmq.POLLIN)
        self._pmi: Pmi | None = None
        if worker.pmi is not None:
            worker.pmi.setblocking(False)
            self._pmi = Pmi(slot.rank, assignment, self._queue)
            self._poller.register(worker.pmi.fileno(), zmq.POLLIN)
        if worker.exit_descriptor is not None:
            self._poller.register(worker.exit_descriptor, zmq.POLLIN)

    def until_end(self) -> None:
        """Watch until the worker has ended and all that it wrote is queued."""
        while self._worker.exit_code is None:
            self._step()
        for descriptor in tuple(self._open):
            self._read_rest(descriptor)
        for stream in self._streams.values():
            self._print(stream, b"", final=True)
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
            self._hold_bulk(self._link.waiting >= _ENOUGH_BULK_WAITING)
            ready = dict(self._poller.poll(self._patience()))
            if self._worker.born in ready:
                self._poller.unregister(self._worker.born)
                started = messages.Started(self._slot.rank, self._worker.pid, self._worker.cold)
                self._queue(started)
                self._activity = Activity(self._worker.pid, self._activity_seconds)
            self._read_ready(self._open & ready.keys())
            if self._worker.pmi is not None and self._worker.pmi.fileno() in ready:
                self._answer_mpi()
            if self._link.monitor in ready:
                self._link.observe()
            self._tell()
            self._link.flush()
            orders = self._link.receive()
        for order in orders:
            if isinstance(order, messages.Stop):
                self._end_worker()
            elif isinstance(order, messages.ShowStacks):
                self._stacks, self._stacks_until = b"", time.monotonic() + _STACKS_SECONDS
                self._worker.show_stacks()
            elif isinstance(order, messages.Fenced) and self._pmi is not None:
                self._send_mpi(self._pmi.fenced())
            elif isinstance(order, messages.Found) and self._pmi is not None:
                self._send_mpi(self._pmi.found(order.values))
        if self._link.lost and not self._problem:
            self._problem = LOST_DRIVER
            self._end_worker()
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._worker.kill()

    def _patience(self) -> int:
        """How long to wait for something to happen, in milliseconds."""
        longest = _POLL_MS if self._needs_clock() else _BEAT_MS
        if self._reports_at is None or self._link.waiting >= _ENOUGH_WAITING:
            return longest
        return min(longest, max(0, round((self._reports_at - time.monotonic()) * 1000)))

    def _hold_bulk(self, wait: bool) -> None:
        if wait != self._bulk_waits and self._worker.bulk in self._open:
            self._bulk_waits = wait
            self._poller.modify(self._worker.bulk, 0 if wait else zmq.POLLIN)

    def _read_reports(self) -> None:
        """Read what is in the pipe of reports, unless the driver takes no more."""
        pipe, count = self._worker.reports, 0
        while self._link.waiting < _ENOUGH_WAITING and count < PIPE_BYTES:
            found = self._read(pipe)
            if found is None:
                self._leave(pipe)
            if pipe not in self._open:
                return
            if not found:
                break
            count += found
            self._link.flush()
        soon = count >= _REPORTS_MANY_BYTES
        if count:
            pause = _REPORTS_SOON_SECONDS if soon else _REPORTS_SECONDS
            self._reports_at = time.monotonic() + pause
        elif self._link.waiting < _ENOUGH_WAITING:
            self._reports_at = None  # nothing for a while: told when something comes
            self._poller.register(pipe, zmq.POLLIN)

    def _read_ready(self, ready: set[int]) -> None:
        for descriptor in ready:
            if descriptor == self._worker.reports:
                self._poller.unregister(descriptor)  # from here on by the clock
                self._reports_at = 0.0
            elif self._read(descriptor) is None:
                self._leave(descriptor)
        if self._reports_at is not None and time.monotonic() >= self._reports_at:
            self._read_reports()

    def _tell(self) -> None:
        """What the driver is told without anything having happened."""
        if self._activity is not None:
            self._activity.look()
            self._link.beat(self._activity.told())
        if self._stacks_until is not None and time.monotonic() > self._stacks_until:
            text = self._stacks.decode(errors="replace")
            self._queue(messages.Stacks(text))
            self._stacks_until = None

    def _touch(self) -> None:
        if self._activity is not None:
            self._activity.touch()

    def _end_worker(self) -> None:
        if self._kill_at is None:
            if self._worker.outcome() is None:  # else it is on its way out
                self._stopped = True
                self._worker.terminate()
            self._kill_at = time.monotonic() + TERM_GRACE_SECONDS

    def _needs_clock(self) -> bool:
        waits = self._kill_at is not None or self._stacks_until is not None or self._link.shaky
        return waits or self._worker.exit_descriptor is None

    def _read(self, descriptor: int) -> int | None:
        """Read once: how many bytes, 0 if there were none yet, None at the end of the stream."""
        try:
            data = os.read(descriptor, PIPE_BYTES if descriptor in self._frames else _READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            return None
        if descriptor == self._worker.stacks:
            self._stacks += data
            if self._stacks_until is not None:  # soon complete: it is written in one go
                self._stacks_until = time.monotonic() + _STACKS_SECONDS / 10
        elif descriptor in self._frames:
            self._touch()
            self._forward(descriptor, data)
        else:
            self._print(self._streams[descriptor], data)
        return len(data)

    def _read_rest(self, descriptor: int) -> None:
        """Read what the worker left in a pipe: not more, others may still write to it."""
        left = PIPE_BYTES
        while left > 0 and (count := self._read(descriptor)):
            left -= count

    def _answer_mpi(self) -> None:
        """Read what the worker's MPI asks, and answer what can be answered here."""
        assert self._worker.pmi is not None and self._pmi is not None  # noqa: S101, PT018
        try:
            data = self._worker.pmi.recv(_READ_BYTES)
            answer = self._pmi.feed(data) if data else None
        except (OSError, ValueError):
            answer = None
        if answer is None:
            self._leave_mpi()
        else:
            self._send_mpi(answer)

    def _send_mpi(self, answer: bytes) -> None:
        if self._worker.pmi is None or self._pmi is None:
            return
        try:
            self._worker.pmi.sendall(answer)
        except OSError:  # it does not read, or has ended
            self._leave_mpi()

    def _leave_mpi(self) -> None:
        assert self._worker.pmi is not None  # noqa: S101 - asked by both
        self._poller.unregister(self._worker.pmi.fileno())
        self._pmi = None

    def _leave(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        if descriptor == self._worker.reports:
            self._reports_at = None
        with suppress(KeyError):  # not polled just now
            self._poller.unregister(descriptor)

    def _forward(self, pipe: int, data: bytes) -> None:
        held = self._frames[pipe]
        held += data
        try:
            end = frames.complete(held)
        except ValueError:
            # Only a worker that overwrites its own memory comes here; its output still counts.
            held.clear()
            self._leave(pipe)
            return
        if end:
            self._queue_batch(bytes(held[:end]))
            del held[:end]

    def _print(self, stream: Lines, data: bytes, *, final: bool = False) -> None:
        text, lines = stream.feed(data, final=final)
        self._tail.extend(line[:_TAIL_LINE_CHARACTERS] for line in lines)
        stalls, others = self._stalls.feed(lines)
        if stalls:
            self._queue(messages.Stalled(stalls))
        if others:
            self._touch()
        if text and self._stream_output:
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
        said = self._worker.outcome()
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
            self._problem,
            stopped=self._stopped,
        )


class Lines:
    """Decodes one stream of a worker and finds its lines.

    Args:
        name: "stdout" or "stderr".
        hold: show a line only when it is complete; without, text is shown as it comes, so that a
            progress bar of a single rank moves.
    """

    def __init__(self, name: Literal["stdout", "stderr"], hold: bool) -> None:
        self.name = name
        self._hold = hold
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._partial = ""

    def feed(self, data: bytes, *, final: bool = False) -> tuple[str, list[str]]:
        """The text to show now, and the lines that are complete with it."""
        text = self._decoder.decode(data, final)
        pending = self._partial + text
        end = pending.rfind("\n") + 1
        if final or (end == 0 and len(pending) > _READ_BYTES):
            end = len(pending)  # a line has to end somewhere
        whole, self._partial = _last_overwrite(pending[:end]), pending[end:]
        return (whole if self._hold else text), split_lines(whole)


def split_lines(text: str) -> list[str]:
    """The lines of a text; unlike ``str.splitlines``, a form feed ends none."""
    return text.removesuffix("\n").split("\n") if text else []


def _last_overwrite(text: str) -> str:
    """Of a line that was overwritten with carriage returns, what a terminal would show last."""
    if "\r" not in text:
        return text
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
