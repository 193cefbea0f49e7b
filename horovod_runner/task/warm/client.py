"""The task's side of warm starts: forks a worker from the fork server, or starts a fork server.

The fork server (server.py) runs none of the user's code, so a forked worker finds what it would
find in a new interpreter. Its name depends on everything that an import depends on: with any
difference a worker starts cold. Each executor has at most two fork servers, and so has the driver
of local ranks: two numbers of ranks in turn, with their numbers of threads, both start warm. A fork
server ends with its owner (Spark's daemon of Python workers, or the driver), after a while without
a request, or when memory is short.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from horovod_runner.common.descriptors import enlarge_pipe
from horovod_runner.common.files import unnamed_file
from horovod_runner.common.limits import Limits
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.host.scratch import RunFolder
from horovod_runner.task.warm import protocol
from horovod_runner.task.warm.fingerprint import PREFIX, digest, modified, server_name
from horovod_runner.wire import job_file
from horovod_runner.wire.job_file import RUN_VARIABLE, Forking, ImportHook, Preparation

_MOST = 2  # fork servers of an owner, each with other settings
_SUPPORTED = hasattr(os, "pidfd_open")
# Fork servers that this process started: their exit status has to be read.
_started: list[subprocess.Popen[bytes]] = []


class NotForkedError(Exception):
    """The worker must start cold, in a new interpreter; the text says why."""


class ForkedGuard:
    """A guard that a fork server started; has the methods of :class:`subprocess.Popen`."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._ended = False

    def poll(self) -> int | None:
        """The exit code of SIGKILL, since only its parent gets its own; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait some seconds until the guard has ended; returns what :meth:`poll` does.

        Raises:
            subprocess.TimeoutExpired: the guard still runs.
        """
        if not self._ended:
            poller = select.poll()  # select.select allows no descriptor above 1023
            poller.register(self.pidfd, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("the guard", timeout or 0.0)
            self._ended = True
            os.close(self.pidfd)
        return -signal.SIGKILL

    def kill(self) -> None:
        """Send the guard SIGKILL."""
        if not self._ended:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


class ForkServer:
    """The fork server for the workers of a task. It may not exist yet.

    Args:
        owner: the process that it ends with.
        directory: the workers' working directory; None for this process's.
    """

    def __init__(
        self,
        owner: int,
        path: Sequence[str],
        environment: Mapping[str, str],
        directory: str | None,
        limits: Limits,
        *,
        hooks: tuple[ImportHook, ...] = (),
    ) -> None:
        self._limits = limits
        self._import_hooks = hooks
        self._owner = owner
        self._path = list(path)
        self._worker_environment = dict(environment)
        self._environment = {
            name: value
            for name, value in environment.items()
            if name not in protocol.RANK_VARIABLES
        }
        self._directory = directory or os.getcwd()
        self._parent = Path(tempfile.gettempdir())

    def fork(self, descriptors: Sequence[int], meanwhile: Callable[[], object]) -> ForkedGuard:
        """Have the fork server fork a guard and its worker.

        Args:
            descriptors: standard output and error, those of
                :func:`horovod_runner.worker.main.run_worker`, and the socket of the worker's MPI,
                if any.
            meanwhile: called once a second while the fork server still imports.

        Raises:
            NotForkedError: the worker has to start cold; says why.
            HorovodRunnerError: from ``meanwhile``.
        """
        if not _SUPPORTED:
            raise NotForkedError("warm starts need Linux 5.3")
        try:
            folders = self.folders(self._name())
            for folder in folders:
                try:
                    guard = self._fork(folder, descriptors, meanwhile)
                    with suppress(OSError):
                        os.utime(folder)  # those that were used last are kept
                    return guard
                except OSError:  # told to end: another one has taken its place
                    if folder == folders[-1]:
                        raise
            if self.folders():
                raise NotForkedError("the fork server has other settings: another run started it")
            raise NotForkedError("there is no fork server yet: this run starts one at its end")
        except (NotForkedError, HorovodRunnerError):
            raise
        except Exception as error:  # whatever it is, a cold start still works
            raise NotForkedError(f"the fork server does not answer: {error!r}") from error

    def _fork(
        self, folder: Path, descriptors: Sequence[int], meanwhile: Callable[[], object]
    ) -> ForkedGuard:
        with ExitStack() as stack:
            file = stack.enter_context(unnamed_file("forking"))
            forking = Forking(self._worker_environment, self._directory, self._limits.killed_end)
            job_file.write(file.fileno(), forking)
            connection = stack.enter_context(protocol.connect(folder, self._limits.fork_server))
            sent = [file.fileno(), *descriptors]
            socket.send_fds(connection, [protocol.FORK], sent)
            try:
                _await_answer(connection, meanwhile, self._limits.fork_server)
            except TimeoutError:
                _kill_server(protocol.peer(connection)[0])  # the next run starts another one
                raise
            answer, pidfds, _, _ = socket.recv_fds(connection, 4096, 1, socket.MSG_CMSG_CLOEXEC)
            if not answer:
                raise ConnectionResetError("it has just ended")
            if not pidfds:
                raise NotForkedError(answer.decode())
            try:
                # The guard waits for this. It would end if this process had stopped waiting.
                connection.send(protocol.GO)
            except BaseException:
                os.close(pidfds[0])
                raise
            return ForkedGuard(int(answer), pidfds[0])

    def keep(self, imported: Sequence[str]) -> None:
        """Make sure that there is a fork server with some frameworks. Failures are ignored.

        They are those that this run's worker has imported, or that the user has named, in order.
        Without any, nothing is started.
        """
        _started[:] = [server for server in _started if server.poll() is None]
        if not _SUPPORTED or not imported:
            return
        with suppress(Exception), self.lock():
            name = self._name()
            known = [protocol.imported_modules(folder) for folder in self.folders(name)]
            if not any(set(imported) <= set(modules) for modules in known):
                before = known[0] if known else []
                self._start(name, [*before, *(new for new in imported if new not in before)])

    def _start(self, name: str, modules: list[str]) -> None:
        """Start a fork server that imports some modules, in place of those with its name."""
        folder = RunFolder(f"{name}-{digest(sorted(modules))}", self._parent)
        plan = Preparation(
            self._owner,
            self._path,
            modules,
            str(self._parent),
            folder.path.name,
            self._limits,
            self._import_hooks,
        )
        with (
            unnamed_file("plan") as file,
            _discarding_pipe() as (unread, output),
            ExitStack() as on_failure,
        ):
            job_file.write(file.fileno(), plan)
            on_failure.enter_context(folder)
            # Listens from now on: to wait until the imports are done is shorter than to import.
            listener = on_failure.enter_context(protocol.listen(folder.path, modules))
            self._end_replaced(name, folder.path)
            passed = [file.fileno(), folder.lock, listener.fileno(), unread]
            server = subprocess.Popen(
                job_file.command(
                    "horovod_runner.task.warm.server", *map(str, passed), directory=self._directory
                ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self._environment, RUN_VARIABLE: protocol.NO_RUN},
                cwd=self._directory,
                pass_fds=passed,
                start_new_session=True,
            )
            on_failure.pop_all()
            folder.release()
            listener.close()
        _started.append(server)

    def _end_replaced(self, name: str, started: Path) -> None:
        """End those with the name of one that has just started, and what was unused for longest."""
        others = [each for each in self.folders() if each != started]
        replaced = [each for each in others if each.name.startswith(f"{name}-")]
        unused = [each for each in others if each not in replaced][_MOST - 1 :]
        _end([*replaced, *unused], self._limits.fork_server_end)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock out this user's other tasks, which may start or replace fork servers too."""
        # Entering the folder checks who owns it, and removes the folders of killed processes.
        with RunFolder(f"{PREFIX}{os.getpid()}", self._parent) as folder:
            root = os.open(folder.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(root, fcntl.LOCK_EX)
                yield
            finally:
                os.close(root)

    def _name(self) -> str:
        return server_name(self._owner, self._path, self._environment, self._directory)

    def folders(self, name: str = "") -> list[Path]:
        """The folders of the owner's fork servers, or of those with a name, the latest first."""
        name = name or f"{PREFIX}{self._owner}"
        folders = RunFolder(name, self._parent).path.parent.glob(f"{name}-*")
        return sorted(folders, key=lambda folder: modified(str(folder)) or 0, reverse=True)


def _end(folders: Sequence[Path], patience: float) -> None:
    for folder in folders:
        with suppress(OSError, ValueError), protocol.connect(folder, patience) as connection:
            connection.send(protocol.END)


def _await_answer(
    connection: socket.socket, meanwhile: Callable[[], object], patience: float
) -> None:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    until = time.monotonic() + patience
    while not poller.poll(1000):
        if time.monotonic() > until:
            raise TimeoutError(f"no answer within {patience:g} s")
        meanwhile()


def end_fork_servers(owner: int, limits: Limits) -> None:
    """End all fork servers of an owner, also those that this process has just started."""
    server = ForkServer(owner, [], {}, None, limits)
    _end(server.folders(), limits.fork_server_end)
    for process in _started:
        try:
            process.wait(limits.fork_server_end)
        except subprocess.TimeoutExpired:  # it still imports
            process.kill()
            process.wait()
    if _started:
        with suppress(Exception), server.lock():  # this removes the folders of killed processes
            _started.clear()


def _kill_server(pid: int) -> None:
    # Until the fork server runs, the other end of its socket is the task that created it.
    with suppress(OSError):
        if b"horovod_runner.task.warm.server" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


@contextmanager
def _discarding_pipe() -> Iterator[tuple[int, int]]:
    """A pipe that no process reads, for what the imports print: its read and its write end.

    Not /dev/null: Python's streams adapt to what they write to when it starts, and a worker writes
    to pipes.
    """
    read, write = os.pipe()
    try:
        enlarge_pipe(write, 1 << 20)
        yield read, write
    finally:
        os.close(read)
        os.close(write)
