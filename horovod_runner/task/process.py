"""Starts a worker process, and ends it together with everything that it started.

    task                                     worker
      job file      ------ fd, read ------>  what to run
      outcome file  <----- fd, write ------  how it ended
      pipe          <----- framed messages   log_to_driver
      pipe          <----- framed messages   reports: the worker never waits for room
      pipe          <----- framed messages   pieces of checkpoints
      pipe          <----- stacks            on request
      socket        <----> startup requests of its MPI
      pipes         <----- stdout, stderr
      lifeline      ------ order ----------> its guard, which ends it
      pipe          <----- report            of its guard: how all ended

What a worker wrote before it died stays readable: files and pipes outlive it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from typing import IO, Final

from horovod_runner.common.descriptors import enlarge_pipe, is_byte_locked
from horovod_runner.common.files import memory_file, temporary_files, unnamed_file, write_problem
from horovod_runner.errors import LaunchError
from horovod_runner.task.warm.client import ForkedGuard, ForkServer, NotForkedError
from horovod_runner.wire import job_file
from horovod_runner.wire.job_file import WorkerJob, WorkerOutcome
from horovod_runner.worker import guard
from horovod_runner.worker.guard import GuardReport
from horovod_runner.worker.startup.rank_environment import inherited_environment

PIPE_BYTES: Final = 1 << 20


class WorkerProcess:
    """A worker process and its guard, ``python -m horovod_runner.worker.main``; use as a context.

    The task's child is the guard, which forks the worker. Both are forked from the owner's fork
    server instead if there is one that fits.

    Args:
        environment: variables beside those that this process passes on.
        inherited: the variables that this process passes on; None for its own.
        owner: the process whose fork server to use; None always starts a new interpreter.
        preload: frameworks that the fork server must have imported; it is started if it lacks them.
        meanwhile: called once a second while the start waits for the fork server. An exception from
            it ends the start.

    Attributes:
        stdout, stderr, messages, reports, file_parts, stacks: pipes to read, non-blocking.
        pid_pipe: becomes readable when :attr:`pid` is known.
        exit_descriptor: becomes readable when all has ended; None where the system has no pidfds.
        pmi: the socket for the startup requests of the worker's MPI; None without MPI.
        fork_server: the owner's fork server, which may not exist; None without an owner.
        cold_reason: why the worker was not forked from it; empty if it was, or without an owner.

    Raises:
        LaunchError: the job file cannot be written.
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        job: WorkerJob,
        environment: Mapping[str, str],
        directory: str | None = None,
        *,
        inherited: Mapping[str, str] | None = None,
        mpi: bool = False,
        owner: int | None = None,
        preload: Sequence[str] = (),
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        self._limits = job.limits
        variables = {**inherited_environment(inherited), **environment}
        self.fork_server: ForkServer | None = None
        self.cold_reason = ""
        with ExitStack() as ours, ExitStack() as theirs:
            stdout, stderr, *arguments = self._open(job, ours, theirs)
            descriptors = list(arguments)
            self.pmi: socket.socket | None = None
            if mpi:
                self.pmi, worker_pmi = socket.socketpair()
                ours.enter_context(self.pmi)
                theirs.enter_context(worker_pmi)
                descriptors.append(worker_pmi.fileno())
                variables[job_file.PMI_VARIABLE] = str(worker_pmi.fileno())
            guard_process: subprocess.Popen[bytes] | ForkedGuard | None = None
            if owner is not None:
                self.fork_server = ForkServer(
                    owner, job.path, variables, directory, job.limits, hooks=job.import_hooks
                )
                self.fork_server.keep(preload)
                try:
                    passed = [stdout, stderr, *descriptors]
                    guard_process = self.fork_server.fork(passed, meanwhile)
                except NotForkedError as error:
                    self.cold_reason = str(error)
            if guard_process is None:
                given = map(str, (self._limits.killed_end, *arguments))
                guard_process = subprocess.Popen(
                    job_file.command("horovod_runner.worker.main", *given, directory=directory),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=variables,
                    cwd=directory,
                    pass_fds=descriptors,
                    start_new_session=True,
                )
            self._process = guard_process
            self.exit_descriptor = _exit_descriptor(guard_process)
            self._ours = ours.pop_all()
        self._pid: int | None = None
        self._killed_at = 0.0
        pipes = (self.messages, self.reports, self.file_parts, self.stacks)
        os.set_blocking(self._report_pipe, False)
        for descriptor in (self.stdout, self.stderr, *pipes):
            os.set_blocking(descriptor, False)
            # So that the worker need not wait while this process is scheduled out.
            enlarge_pipe(descriptor, PIPE_BYTES)

    def _open(self, job: WorkerJob, ours: ExitStack, theirs: ExitStack) -> list[int]:
        """Open the files and pipes; returns the worker's ends, as worker.main expects them."""
        job_data = _write_job(theirs, job)
        # In memory: a disk that is full at the end of a training must not cost its result.
        self._outcome_file = ours.enter_context(memory_file("outcome"))
        self.stdout, stdout = _pipe(ours, theirs)
        self.stderr, stderr = _pipe(ours, theirs)
        self.messages, messages = _pipe(ours, theirs)
        self.reports, reports = _pipe(ours, theirs)
        self.file_parts, file_parts = _pipe(ours, theirs)
        self.stacks, stacks = _pipe(ours, theirs)
        self.pid_pipe, pid_pipe = _pipe(ours, theirs)
        self._report_pipe, report = _pipe(ours, theirs)
        lifeline, lifeline_write = os.pipe()
        self._lifeline: int | None = lifeline_write
        theirs.callback(os.close, lifeline)
        ours.callback(self.kill)
        files = (job_data.fileno(), self._outcome_file.fileno())
        pipes = (messages, reports, file_parts, stacks)
        return [stdout, stderr, *files, *pipes, lifeline, pid_pipe, report]

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The worker's process id; waits for it. The guard's if the guard never forked a worker."""
        if self._pid is None:
            self._pid = int(os.read(self.pid_pipe, 20) or self._process.pid)
        return self._pid

    @property
    def guard(self) -> int:
        """The process id of the worker's guard, the parent of the worker and of its orphans."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The worker's exit code, negative for a signal; None until it and its children ended.

        That of the guard if the guard was killed: the worker dies with it.
        """
        code = self._process.poll()
        if code is None:
            return None
        return code if self._report is None else self._report.exit_code

    @cached_property
    def _report(self) -> GuardReport | None:
        """The report of a guard that has ended; None if it was killed before it sent one."""
        with suppress(BlockingIOError):
            if data := os.read(self._report_pipe, 1 << 16):
                return GuardReport.decode(data)
        return None

    @property
    def left_behind(self) -> str:
        """At the end, which processes SIGKILL has not ended, and why that may be; or empty."""
        if self._report is None or not self._report.left:
            return ""
        found = ", ".join(map(_describe_process, self._report.left))
        return (
            f"SIGKILL has not ended these processes within {self._limits.killed_end:g} s: {found}. "
            "In state D a process waits inside the kernel, usually for a network file system that "
            "does not answer; in another state it belongs to another user. The run does not wait "
            "for them, and they may still hold memory, ports and GPUs. As root, "
            f"`cat /proc/{self._report.left[0]}/stack` shows what the first one waits for, and "
            "`kill` ends that of another user"
        )

    @property
    def saving(self) -> bool:
        """Whether the worker is writing a checkpoint."""
        return is_byte_locked(self._outcome_file.fileno(), job_file.CHECKPOINT_BYTE)

    def outcome(self) -> WorkerOutcome | None:
        """The content of the worker's outcome file; None if it is not complete."""
        outcome = job_file.read(self._outcome_file.fileno())
        return outcome if isinstance(outcome, WorkerOutcome) else None

    def terminate(self) -> None:
        """Send SIGTERM to the worker's whole process group."""
        self._order(guard.TERMINATE)

    def show_stacks(self) -> None:
        """Ask the worker for its Python stacks; they arrive in :attr:`stacks`."""
        self._order(guard.SHOW_STACKS)

    def _order(self, order: bytes) -> None:
        if self._lifeline is not None:
            with suppress(BrokenPipeError):
                os.write(self._lifeline, order)

    def kill(self) -> None:
        """Have the guard kill the worker and everything that it started.

        Called again after ``guard_end``, kills the guard: it is stopped, or waits itself.
        """
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
            self._killed_at = time.monotonic()
        elif time.monotonic() > self._killed_at + self._limits.guard_end:
            self._process.kill()

    def end_stopped_guard(self, ended_at: float) -> str:
        """Kill a guard that has not noticed that its worker ended then; returns what to say."""
        limit = self._limits.guard_end
        if time.monotonic() < ended_at + limit or self._process.poll() is not None:
            return ""
        self._process.kill()
        return (
            f"the process has ended, and its guard (process {self.guard}) did not notice it within "
            f"{limit:g} s. It is probably stopped (SIGSTOP, or a debugger), and was killed."
        )

    def close(self) -> None:
        """End all processes and close all descriptors. May be called twice."""
        if self.exit_descriptor is not None:
            os.close(self.exit_descriptor)
            self.exit_descriptor = None
        if self._outcome_file.closed:
            return
        if self.exit_code is None:
            self.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self._limits.worker_end)
        self.kill()
        try:
            self._process.wait(self._limits.guard_end)
        except subprocess.TimeoutExpired:  # the guard itself is stopped
            self._process.kill()
            self._process.wait()
        self._pid = self.pid  # while the pipe is open
        # A guard that was killed has killed nobody. In any other case the worker's process id may
        # belong to another process by now.
        if self._report is None and self._pid != self.guard:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
        self._ours.close()


def _describe_process(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        before, _, after = file.read().rpartition(b")")
        name = before.partition(b"(")[2].decode(errors="replace")
        return f"{pid} ({name}, state {after.split()[0].decode()})"
    return str(pid)


def _exit_descriptor(process: subprocess.Popen[bytes] | ForkedGuard) -> int | None:
    """A descriptor that becomes readable when a process ends; None without pidfds."""
    if isinstance(process, ForkedGuard):
        return os.dup(process.pidfd)
    try:
        return os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        return None  # a kernel before 5.3


def _pipe(readers: ExitStack, writers: ExitStack) -> tuple[int, int]:
    read, write = os.pipe()
    readers.callback(os.close, read)
    writers.callback(os.close, write)
    return read, write


def _write_job(stack: ExitStack, job: WorkerJob) -> IO[bytes]:
    folder = ""
    try:
        folder = temporary_files()
        file = stack.enter_context(unnamed_file("job"))
        job_file.write(file.fileno(), job)
    except OSError as error:
        raise LaunchError(
            f"the {len(job.main)} bytes of main and its arguments could not be written: "
            f"{write_problem(error, folder)}. Free space there, or set TMPDIR to another folder."
        ) from error
    return file


def describe_exit(code: int) -> str:
    """An exit code in words, with its usual cause."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    usual = {
        "SIGKILL": "often the out-of-memory killer: check the host's memory",
        "SIGABRT": "native code gave up: MPI or Gloo, in hvd.init() or when another rank is lost",
        "SIGSEGV": "a crash in native code",
        "SIGBUS": "a memory-mapped file was truncated, or /dev/shm is full",
        "SIGTERM": "another process asked it to end, perhaps a resource manager",
        "SIGILL": "native code built for another processor",
    }.get(name)
    return f"killed by {name}" + (f" ({usual})" if usual else "")
