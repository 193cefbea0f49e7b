"""One worker process: started, watched, and ended with everything that it started.

    parent                                   worker
      job file      ------ fd, read ------>  what to run
      outcome file  <----- fd, write ------  how it ended
      pipe          <----- framed messages   log_to_driver
      pipe          <----- framed messages   reports: the worker never waits for room
      pipe          <----- framed messages   checkpoints
      pipe          <----- stacks            when asked for
      socket        <----> what its MPI asks of whoever started it
      pipes         <----- stdout, stderr
      lifeline      ------ order ----------> its guard, which ends it

What a worker wrote before it died stays readable: files and pipes outlive it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import IO, Final

from horovod_runner import guard, handover
from horovod_runner.errors import LaunchError
from horovod_runner.handover import WorkerJob, WorkerOutcome
from horovod_runner.warm import Forked, Warm

TERM_GRACE_SECONDS: Final = 2.0
PIPE_BYTES: Final = 1 << 20
_GUARD_SECONDS = 10.0
# Spark's and Py4J's own secrets and ports are no business of the user's function, and a run inside
# a rank of another run must not meet with that one's ranks.
_WITHHELD = (
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "PYTHON_WORKER_FACTORY_SECRET",
    "PYTHON_WORKER_FACTORY_PORT",
    "PYSPARK_GATEWAY_SECRET",
    "PYSPARK_GATEWAY_PORT",
    "SPARK_AUTH_SOCKET_TIMEOUT",
    "SPARK_BUFFER_SIZE",
)
# Those of an MPI that this process itself was started by: a rank's MPI is answered here (pmi.py).
_WITHHELD_MPI = ("PMI_", "PMIX_")


class WorkerProcess:
    """A worker, by way of the child that is its guard: ``python -m horovod_runner.worker``.

    Args:
        job: what it is to do.
        environment: variables beside those of this process.
        directory: the working directory; this process's own if None.
        mpi: whether its MPI asks for what it needs to start.
        owner: the process whose fork server to fork it off, if there is one; None: it starts cold.
        meanwhile: called once a second while that takes time; what it raises ends the start.

    Attributes:
        stdout, stderr, frames, reports, bulk, stacks: descriptors to read, non-blocking.
        born: becomes readable when :attr:`pid` is known.
        pmi: the socket over which its MPI asks; None without.
        warm: the owner's fork server, whether there is one or not; None without an owner.
        cold: why it was not forked off that; empty if it was.
    """

    def __init__(
        self,
        job: WorkerJob,
        environment: Mapping[str, str],
        directory: str | None = None,
        *,
        mpi: bool = False,
        owner: int | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        variables = {**inherited_environment(), **environment}
        with ExitStack() as ours, ExitStack() as theirs:
            job_file = theirs.enter_context(_unnamed_file("job"))
            _write_job(job_file, job)
            self._outcome_file = ours.enter_context(_unnamed_file("outcome"))
            self.stdout, stdout = _pipe(ours, theirs)
            self.stderr, stderr = _pipe(ours, theirs)
            self.frames, frames = _pipe(ours, theirs)
            self.reports, reports = _pipe(ours, theirs)
            self.bulk, bulk = _pipe(ours, theirs)
            self.stacks, stacks = _pipe(ours, theirs)
            self.born, born = _pipe(ours, theirs)
            lifeline, lifeline_write = os.pipe()
            self._lifeline: int | None = lifeline_write
            theirs.callback(os.close, lifeline)
            ours.callback(self.kill)
            files = (job_file.fileno(), self._outcome_file.fileno())
            passed = [*files, frames, reports, bulk, stacks, lifeline, born]
            self.pmi: socket.socket | None = None
            asked: list[int] = []
            if mpi:
                self.pmi, its_pmi = socket.socketpair()
                ours.enter_context(self.pmi)
                theirs.enter_context(its_pmi)
                asked = [its_pmi.fileno()]
                variables[handover.PMI_VARIABLE] = str(its_pmi.fileno())
            self.warm = None if owner is None else Warm(owner, job.path, variables, directory)
            forked: Forked | str = ""
            if self.warm is not None:
                forked = self.warm.fork([stdout, stderr, *passed, *asked], meanwhile)
            self.cold = forked if isinstance(forked, str) else ""
            self._exit_descriptor: int | None
            self._process: subprocess.Popen[bytes] | Forked
            if isinstance(forked, Forked):
                self._process = forked
                self._exit_descriptor = os.dup(forked.descriptor)
            else:
                self._process = subprocess.Popen(
                    handover.command(
                        "horovod_runner.worker", *map(str, passed), directory=directory
                    ),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=variables,
                    cwd=directory,
                    pass_fds=[*passed, *asked],
                    start_new_session=True,
                )
                self._exit_descriptor = _open_pidfd(self._process.pid)
            self._ours = ours.pop_all()
        self._pid: int | None = None
        for descriptor in (self.stdout, self.stderr, *self._received):
            os.set_blocking(descriptor, False)
            _enlarge(descriptor)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _received(self) -> tuple[int, int, int, int]:
        return self.frames, self.reports, self.bulk, self.stacks

    @property
    def pid(self) -> int:
        """The worker's process id; waits until it has one. The guard's where it never had."""
        if self._pid is None:
            self._pid = int(os.read(self.born, 20) or self._process.pid)
        return self._pid

    @property
    def exit_descriptor(self) -> int | None:
        """Becomes readable when all has ended; None where the system has no such thing."""
        return self._exit_descriptor

    @property
    def exit_code(self) -> int | None:
        """The worker's exit code, negative for a signal; None while anything of it runs."""
        return self._process.poll()

    def outcome(self) -> WorkerOutcome | None:
        """What the worker said of its end; None if it has not said all of it."""
        said = handover.read(self._outcome_file.fileno())
        return said if isinstance(said, WorkerOutcome) else None

    def terminate(self) -> None:
        """Ask the worker's whole process group to end."""
        if self._lifeline is not None:
            with suppress(BrokenPipeError):
                os.write(self._lifeline, guard.TERMINATE)

    def show_stacks(self) -> None:
        """Ask the worker for its Python stacks; they come over :attr:`stacks`."""
        if self._lifeline is not None:
            with suppress(BrokenPipeError):
                os.write(self._lifeline, guard.SHOW_STACKS)

    def kill(self) -> None:
        """End the worker and all that it started."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def close(self) -> None:
        """Leave nothing behind: no process, no descriptor. May be called twice."""
        if self._exit_descriptor is not None:
            os.close(self._exit_descriptor)
            self._exit_descriptor = None
        if self._outcome_file.closed:
            return
        if self.exit_code is None:
            self.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(TERM_GRACE_SECONDS)
        self.kill()
        try:
            self._process.wait(_GUARD_SECONDS)
        except subprocess.TimeoutExpired:  # somebody stopped the guard
            self._process.kill()
            self._process.wait()
        self._pid = self.pid  # while it can be read
        if self.exit_code == -signal.SIGKILL:  # perhaps the guard's own end: nobody else is left
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
        self._ours.close()


def _pipe(readers: ExitStack, writers: ExitStack) -> tuple[int, int]:
    read, write = os.pipe()
    readers.callback(os.close, read)
    writers.callback(os.close, write)
    return read, write


def _write_job(file: IO[bytes], job: WorkerJob) -> None:
    try:
        handover.write(file.fileno(), job)
    except OSError as error:
        raise LaunchError(
            f"the {len(job.main)} bytes of main and its arguments could not be written to "
            f"{tempfile.gettempdir()}: {error}. Free space there, or set TMPDIR."
        ) from error


def _unnamed_file(purpose: str) -> IO[bytes]:
    """A temporary file without a name: nobody else can open it, and it goes away by itself."""
    return tempfile.TemporaryFile(prefix=f"horovod_runner-{purpose}-")


def inherited_environment() -> dict[str, str]:
    """This process's environment, without what is withheld from workers."""
    found = {
        name: value
        for name, value in os.environ.items()
        if name not in _WITHHELD and not name.startswith(_WITHHELD_MPI)
    }
    if "PYTHONPATH" in found:
        found["PYTHONPATH"] = os.pathsep.join(
            without_spark_core(found["PYTHONPATH"].split(os.pathsep))
        )
    return found


def without_spark_core(path: Iterable[str]) -> list[str]:
    """A Python path without the archive of Spark's own JVM classes.

    Spark puts it there for its tasks. It holds no Python, and 15 MB of it are searched at every
    start of an interpreter.
    """
    return [entry for entry in path if not os.path.basename(entry).startswith("spark-core_")]


def _enlarge(descriptor: int) -> None:
    """A larger pipe spares the worker waiting while this process is scheduled out."""
    try:
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except (ImportError, AttributeError, OSError):
        return  # not Linux, or this user's pipe allowance is used up


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None  # not Linux, or a kernel before 5.3


def describe_exit(code: int) -> str:
    """An exit code in words, with what it usually means."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    usual = {
        "SIGKILL": "often the out-of-memory killer: look at the host's memory",
        "SIGABRT": "Horovod aborts so when a rank fails inside hvd.init()",
        "SIGSEGV": "a crash in native code",
        "SIGBUS": "a memory-mapped file was cut short, or /dev/shm is full",
        "SIGTERM": "somebody asked it to end: a resource manager, perhaps",
        "SIGILL": "native code built for another processor",
    }.get(name)
    return f"killed by {name}" + (f" ({usual})" if usual else "")
