"""Forwards all that a worker writes to the driver, and carries out the driver's orders.

A single loop, which never waits for the driver while the worker could be waiting for the loop.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import zmq

from horovod_runner.common.stacks import without_profiler
from horovod_runner.task.activity import Activity
from horovod_runner.task.lines import LineSplitter
from horovod_runner.task.machine import MachineWatch
from horovod_runner.task.memory import MemoryWatch
from horovod_runner.task.mpi_socket import MpiSocket
from horovod_runner.task.orders import LOST_DRIVER
from horovod_runner.task.process import PIPE_BYTES, WorkerProcess
from horovod_runner.task.stall_reader import StallReader
from horovod_runner.wire import events, framing, messages
from horovod_runner.wire.job import Job, Outcome
from horovod_runner.wire.link import Link
from horovod_runner.wire.measurements import is_waits
from horovod_runner.wire.messages import FromDriver

_READ_BYTES = 64 << 10
_TAIL_LINES = 30
_PROFILER_LINES = 15  # of the thread that measures a rank, in the stacks after a crash
_TAIL_LINE_CHARACTERS = 2000
_POLL_MS = 100
_BEAT_MS = 1000
# Reports are read at intervals: a training loop that reports every step must not wake this process
# every step. The interval doubles while reports keep coming, since each time the driver wakes too,
# and ranks may need all cores. It is short when the pipe fills.
_REPORTS_SECONDS = 0.1
_REPORTS_MOST_SECONDS = 0.5
_REPORTS_SOON_SECONDS = 0.01
_REPORTS_MANY_BYTES = PIPE_BYTES // 8
# With this many batches that the driver has not taken, reports stay in their pipe.
_MAX_WAITING = 32
# The same for pieces of checkpoints: ZeroMQ's queue is full then, and spooling them to disk would
# save no time.
_MAX_WAITING_FILE_PARTS = 2
_ACTIVITY_SECONDS = 5.0  # between two measurements of the worker's activity


class Relay:
    """Sends what a worker writes to the driver, and ends the worker when ordered.

    ``echo`` gets each line that the rank prints, prefixed with the rank; None echoes none.
    """

    def __init__(
        self,
        job: Job,
        assignment: messages.Assignment,
        link: Link,
        worker: WorkerProcess,
        echo: Callable[[str], None] | None,
    ) -> None:
        self._limits = job.limits
        self._slot = assignment.slot
        self._link = link
        self._worker = worker
        self._unspooled: deque[bytes] = deque()  # batches that a full disk has no room for
        pipes = (worker.messages, worker.reports, worker.file_parts)
        self._frames = {pipe: framing.FrameSplitter() for pipe in pipes}
        self._reports_at: float | None = None  # when to read reports; None: as soon as some arrive
        self._reports_seconds = _REPORTS_SECONDS  # the interval
        self._file_parts_paused = False
        self._end_at: float | None = None  # until then the worker may complete a checkpoint
        self._kill_at: float | None = None
        self._stopped = False
        self._problem = ""
        self._activity: Activity | None = None
        self._memory: MemoryWatch | None = None
        self._machine: MachineWatch | None = None
        self._profiles = job.options.debug_config.profile
        self._activity_seconds = min(_ACTIVITY_SECONDS, job.stall_seconds / 2)
        self._stall_reader = StallReader()
        self._stacks = b""
        self._stacks_until: float | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES + _PROFILER_LINES)
        self._echo = echo
        self._stream_output = job.options.stream_output
        self._printing = {"stdout", "stderr"} if job.logs and job.logs.has_root else {"stdout"}
        self._streams = {
            worker.stdout: LineSplitter("stdout", hold=job.size > 1),
            worker.stderr: LineSplitter("stderr", hold=job.size > 1),
        }
        self._open = {worker.stdout, worker.stderr, worker.stacks, *self._frames}
        self._mpi: MpiSocket | None = None
        if worker.pmi is not None:
            self._mpi = MpiSocket(worker.pmi, assignment, self._queue)
        self._poller = self._make_poller()

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._link.socket, self._link.wanted)
        for descriptor in (*self._open, self._link.monitor, self._worker.pid_pipe):
            poller.register(descriptor, zmq.POLLIN)
        if self._mpi is not None:
            poller.register(self._mpi.fileno(), zmq.POLLIN)
        if self._worker.exit_descriptor is not None:
            poller.register(self._worker.exit_descriptor, zmq.POLLIN)
        return poller

    def run(self) -> None:
        """Forward until the worker has ended and all that it wrote is queued for the driver."""
        while self._worker.exit_code is None:
            # While the disk is full the worker's pipes must fill: what is read must not be lost.
            self._obey(self._wait_for_room() if self._unspooled else self._forward_ready())
            if self._link.lost and not self._problem:
                self._problem = LOST_DRIVER
                self._end_worker(self._limits.saving_alone)
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self._worker.kill()
            elif self._end_at is not None and self._kill_at is None:
                self._terminate_unless_saving()
            ended_at = None if self._activity is None else self._activity.ended_at
            if ended_at is not None and (told := self._worker.end_stopped_guard(ended_at)):
                self._log(f"rank {self._slot.rank}: {told}")
        for descriptor in tuple(self._open):
            self._read_rest(descriptor)
        for stream in self._streams.values():
            self._print(stream, b"", final=True)
        if left_behind := self._worker.left_behind:
            self._log(left_behind)
        self._spool_all()

    def outcome(self) -> Outcome:
        """How the rank ended. Also sends Failed if the worker died before it could."""
        exit_code = self._worker.exit_code
        if (worker_outcome := self._worker.outcome()) is not None:
            exit_code = worker_outcome.exit_code
        elif exit_code is not None:
            self._queue(messages.Failed(self._slot.rank, exit_code))
            self._spool_all()
        return Outcome(
            self._slot.task,
            self._slot.rank,
            self._slot.hostname,
            self._worker.pid,
            exit_code,
            self._slot.gpus,
            worker_outcome,
            without_profiler(list(self._tail))[-_TAIL_LINES:],
            self._problem,
            stopped=self._stopped,
            memory=None if self._memory is None else self._memory.at_end(),
        )

    def _wait_for_room(self) -> list[FromDriver]:
        orders = self._link.wait(_POLL_MS / 1000)
        self._spool()
        return orders

    def _forward_ready(self) -> list[FromDriver]:
        self._poller.modify(self._link.socket, self._link.wanted)
        self._pause_file_parts(self._link.waiting >= _MAX_WAITING_FILE_PARTS)
        ready = dict(self._poller.poll(self._poll_timeout()))
        if self._worker.pid_pipe in ready:
            self._worker_started()
        self._read_ready(self._open & ready.keys())
        if self._mpi is not None and self._mpi.fileno() in ready:
            self._keep_mpi(self._mpi.read())
        if self._link.monitor in ready:
            self._link.observe()
        self._send_heartbeat()
        self._send_stacks()
        self._link.flush()
        return self._link.receive()

    def _worker_started(self) -> None:
        self._poller.unregister(self._worker.pid_pipe)
        pid = self._worker.pid
        self._queue(messages.Started(self._slot.rank, pid, self._worker.cold_reason))
        self._activity = Activity(pid, self._activity_seconds)
        guard = self._worker.guard
        self._memory = MemoryWatch(self._slot, pid, guard)
        if self._profiles:
            self._machine = MachineWatch(self._slot, pid, guard, self._memory)

    def _obey(self, orders: Iterable[FromDriver]) -> None:
        for order in orders:
            if isinstance(order, messages.Stop):
                self._end_worker(order.seconds)
            elif isinstance(order, messages.ShowStacks):
                self._stacks = b""
                self._stacks_until = time.monotonic() + self._limits.stacks_begin
                self._worker.show_stacks()
            elif isinstance(order, messages.Fenced) and self._mpi is not None:
                self._keep_mpi(self._mpi.fenced())
            elif isinstance(order, messages.MpiValues) and self._mpi is not None:
                self._keep_mpi(self._mpi.values(order.values))

    def _end_worker(self, seconds: float) -> None:
        """Have the worker ended, within some seconds if it is writing a checkpoint."""
        end_at = time.monotonic() + seconds
        if self._end_at is None and seconds and self._worker.saving:
            self._log(
                f"rank {self._slot.rank} ends when the checkpoint that it is writing is complete, "
                f"in {seconds:g} s at most"
            )
        self._end_at = end_at if self._end_at is None else min(self._end_at, end_at)

    def _terminate_unless_saving(self) -> None:
        now = time.monotonic()
        if self._end_at is None or (now < self._end_at and self._worker.saving):
            return
        if self._worker.outcome() is None:  # otherwise the worker is about to exit by itself
            self._stopped = True
            self._worker.terminate()
        self._kill_at = now + self._limits.worker_end

    def _poll_timeout(self) -> int:
        has_deadline = self._end_at is not None or self._stacks_until is not None
        soon = has_deadline or self._link.disconnected or self._worker.exit_descriptor is None
        longest = _POLL_MS if soon else _BEAT_MS
        if self._reports_at is None or self._link.waiting >= _MAX_WAITING:
            return longest
        return min(longest, max(0, round((self._reports_at - time.monotonic()) * 1000)))

    def _send_heartbeat(self) -> None:
        if self._activity is not None:
            self._activity.measure()
            self._link.beat(self._activity.heartbeat())
        try:
            if self._memory is not None and (warning := self._memory.look()) is not None:
                self._queue(warning)
            if self._machine is not None and (measured := self._machine.measure()) is not None:
                self._queue(measured)
        except Exception as error:  # an unusual system must not end a training
            self._memory = self._machine = None
            self._log(f"the machine under rank {self._slot.rank} cannot be measured: {error!r}")

    def _send_stacks(self) -> None:
        if self._stacks_until is not None and time.monotonic() > self._stacks_until:
            self._queue(messages.Stacks(self._stacks.decode(errors="replace")))
            self._stacks_until = None

    def _pause_file_parts(self, pause: bool) -> None:
        if pause != self._file_parts_paused and self._worker.file_parts in self._open:
            self._file_parts_paused = pause
            self._poller.modify(self._worker.file_parts, 0 if pause else zmq.POLLIN)

    def _keep_mpi(self, in_use: bool) -> None:
        if not in_use and self._mpi is not None:
            self._poller.unregister(self._mpi.fileno())
            self._mpi = None

    def _read_ready(self, ready: set[int]) -> None:
        for descriptor in ready:
            if descriptor == self._worker.reports:
                self._poller.unregister(descriptor)  # from now on it is read by the clock
                self._reports_at = 0.0
            elif self._read(descriptor) is None:
                self._leave(descriptor)
        if self._reports_at is not None and time.monotonic() >= self._reports_at:
            self._read_reports()

    def _read_reports(self) -> None:
        """Empty the pipe of reports, unless the driver is behind."""
        pipe, total = self._worker.reports, 0
        while self._link.waiting < _MAX_WAITING and total < PIPE_BYTES:
            count = self._read(pipe)
            if count is None:
                self._leave(pipe)
            if pipe not in self._open:
                return
            if not count:
                break
            total += count
            self._link.flush()
        if total:
            many = total >= _REPORTS_MANY_BYTES
            pause = _REPORTS_SOON_SECONDS if many else self._reports_seconds
            self._reports_at = time.monotonic() + pause
            self._reports_seconds = min(2 * pause, _REPORTS_MOST_SECONDS)
        elif self._link.waiting < _MAX_WAITING:
            self._reports_at = None  # no reports at the moment: wait for the pipe itself
            self._reports_seconds = _REPORTS_SECONDS
            self._poller.register(pipe, zmq.POLLIN)

    def _read(self, descriptor: int) -> int | None:
        """Read once: the number of bytes, 0 if there are none yet, None at the end of the pipe."""
        try:
            data = os.read(descriptor, PIPE_BYTES if descriptor in self._frames else _READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            return None
        if descriptor == self._worker.stacks:
            self._stacks += data
            if self._stacks_until is not None:  # complete soon: faulthandler writes it in one go
                self._stacks_until = time.monotonic() + self._limits.stacks_begin / 10
        elif descriptor in self._frames:
            self._forward(descriptor, data)
        else:
            self._print(self._streams[descriptor], data)
        return len(data)

    def _read_rest(self, descriptor: int) -> None:
        """Read what the ended worker left in a pipe, and no more: others may still write to it."""
        left = PIPE_BYTES
        while left > 0 and (count := self._read(descriptor)):
            left -= count

    def _leave(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        if descriptor == self._worker.reports:
            self._reports_at = None
        with suppress(KeyError):  # not registered at the moment
            self._poller.unregister(descriptor)

    def _forward(self, pipe: int, data: bytes) -> None:
        try:
            batch = self._frames[pipe].feed(data)
        except ValueError as error:
            # Reading goes on: a full pipe would stop the worker.
            self._log(
                f"what rank {self._slot.rank} reports, logs or saves is lost from here on: there "
                f"is something else among its messages ({error}). Its code may write to a file "
                "descriptor that it did not open, or overwrite its own memory."
            )
            return
        if batch:
            self._queue_batch(batch)
        if not _only_waits(batch):
            self._touch()

    def _print(self, stream: LineSplitter, data: bytes, *, final: bool = False) -> None:
        """Forward output, and look for stall warnings in it."""
        text, lines = stream.feed(data, final=final)
        self._tail.extend(line[:_TAIL_LINE_CHARACTERS] for line in lines)
        stalls, others = self._stall_reader.feed(lines)
        if stalls:
            self._queue(messages.Stalled(stalls))
        if others:
            self._touch()
        if text and self._stream_output:
            self._queue(events.Output(self._slot.rank, stream.name, text))
        elif text and stream.name in self._printing:
            self._printing.clear()
            self._queue(messages.Unshown(self._slot.rank))
        if self._echo is not None:
            for line in lines:
                self._echo(f"[{self._slot.rank}] {line}")

    def _touch(self) -> None:
        if self._activity is not None:
            self._activity.touch()

    def _log(self, text: str) -> None:
        self._queue(events.Log(self._slot.rank, text))

    def _queue(self, message: events.Message) -> None:
        self._queue_batch(framing.frame(messages.encode(message)))

    def _queue_batch(self, batch: bytes) -> None:
        self._unspooled.append(batch)
        self._spool()

    def _spool(self) -> None:
        while self._unspooled:
            try:
                self._link.put_batch(self._unspooled[0])
            except OSError:
                return  # the disk is full: tried again when something has been sent
            self._unspooled.popleft()

    def _spool_all(self) -> None:
        while self._unspooled and not self._link.lost:
            self._link.wait(_POLL_MS / 1000)
            self._spool()
        self._link.dropped += len(self._unspooled)
        self._unspooled.clear()


def _only_waits(batch: bytes) -> bool:
    """Whether a rank says nothing but that it waits for others, which is no progress."""
    first = framing.LENGTH.size
    # Most batches begin with another message, and may be large.
    return is_waits(batch[first : first + 16]) and all(map(is_waits, framing.unframe(batch)))
