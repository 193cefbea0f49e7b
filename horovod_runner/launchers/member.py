"""A task that lives as long as an elastic run, and takes part in one attempt after the other.

    elastic/pool.py  --Work-->  serve  -->  run_rank: one attempt, as any other
                     <--Done--

It keeps what an attempt leaves for the next one: the packed datasets, and the commits in memory.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import zmq

from horovod_runner.checkpoints.commits import Commits
from horovod_runner.common.limits import Limits
from horovod_runner.common.threads import start_thread
from horovod_runner.host import network
from horovod_runner.host.scratch import RunFolder, memory_folder
from horovod_runner.task.task import TaskSetup, keep_scratch, run_rank
from horovod_runner.task.warm.client import end_fork_servers
from horovod_runner.wire import messages
from horovod_runner.wire.addresses import ChannelAddress
from horovod_runner.wire.job import Job
from horovod_runner.wire.job_file import leave_file, remove_leave_files
from horovod_runner.wire.link import Link
from horovod_runner.wire.pool import Change, Done, Joined, Work

_REPEAT_SECONDS = 1.0


def serve(job: Job, pool: ChannelAddress, seat: int, setup: TaskSetup) -> None:
    """Do the pool's work in a seat until the run is over, or the driver is gone.

    The pool's messages say what differs from the job in an attempt.
    """
    with ExitStack() as stack:
        keep_scratch(job, stack)
        # Containers of one machine may share this memory. Each has its own folder, so that the
        # commits of a lost one are not taken for those of another.
        name = f"{job.run_id}-{network.host_id()}"
        commits = stack.enter_context(RunFolder(name, memory_folder())).path
        contact = _PoolContact(pool, seat, commits, job.limits)
        try:
            while (work := contact.work.get()) is not None:
                remove_leave_files(str(commits), work.attempt)
                outcome = run_rank(
                    replace(
                        job, size=work.size, attempt=work.attempt, checkpoints=work.checkpoints
                    ),
                    work.address,
                    replace(setup, task=work.task, commits=str(commits)),
                )
                kept = Commits(str(commits)).latest()
                contact.finish(
                    Done(
                        work.attempt,
                        messages.encode(outcome),
                        -1 if kept is None else kept.step,
                    )
                )
        finally:
            contact.close()
            if setup.owner is not None and not job.options.cluster_config.preload_frameworks:
                end_fork_servers(setup.owner, job.limits)


class _PoolContact:
    """Exchanges messages with the pool, in a separate thread.

    Attributes:
        work: what to do next; None: nothing any more.
    """

    def __init__(self, pool: ChannelAddress, seat: int, commits: Path, limits: Limits) -> None:
        self.work: SimpleQueue[Work | None] = SimpleQueue()
        self._commits = commits
        self._link = Link(pool, seat, limits)
        self._lock = threading.Lock()
        self._joined = Joined(time.time_ns())
        # The message that is repeated until the pool answers it; None while there is work.
        self._said: Joined | Done | None = self._joined
        self._attempt = 0
        self._over = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread = start_thread(f"seat-{seat}", self._talk)

    def finish(self, done: Done) -> None:
        """Tell the pool that the work is done."""
        with self._lock:
            self._said = done
        os.write(self._wake_write, b"w")

    def close(self) -> None:
        """Stop talking."""
        self._over = True
        os.write(self._wake_write, b"w")
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _talk(self) -> None:
        poller = zmq.Poller()
        for source in (self._link.monitor, self._wake_read):
            poller.register(source, zmq.POLLIN)
        say_at = 0.0
        try:
            while not self._over and not self._link.lost:
                with self._lock:
                    said = self._said
                # Not again while it waits: an outcome may be large, and the pool away for long.
                if said is not None and time.monotonic() >= say_at and not self._link.waiting:
                    say_at = time.monotonic() + _REPEAT_SECONDS
                    self._link.put(said)
                self._link.flush()
                poller.register(self._link.socket, self._link.wanted)
                ready = dict(poller.poll(round(_REPEAT_SECONDS * 1000)))
                if self._wake_read in ready:
                    os.read(self._wake_read, 64)
                    say_at = 0.0
                for message in self._link.wait(0):
                    self._handle(message)
        finally:
            self.work.put(None)
            self._link.close()

    def _handle(self, message: messages.FromDriver) -> None:
        match message:
            case Work() if message.attempt > self._attempt:
                self._attempt = message.attempt
                with self._lock:
                    self._said = None
                self.work.put(message)
            case messages.Taken():
                with self._lock:
                    self._said = self._joined
            case Change():
                with suppress(OSError):
                    Path(leave_file(str(self._commits), message.attempt)).touch()
            case messages.Stop():
                self._over = True
