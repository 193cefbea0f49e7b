"""Warm starts: workers forked off a process of their host that has imported the frameworks.

    a run      its worker imports torch; the task then starts a fork server, which imports it, too
    the next   task --descriptors, environment--> fork server --fork--> guard --> worker

The fork server (forkserver.py) runs nothing of the user's, so a worker finds what it would find in
a new interpreter. It is named after all that an import depends on: where anything of that is
different, a worker starts cold. Each executor has one, and the driver of local ranks: it ends with
the process that it belongs to (Spark's daemon of Python workers, or the driver), when it has had
nothing to do for a while, and when memory is short.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from horovod_runner import handover, variables
from horovod_runner.errors import HorovodRunnerError
from horovod_runner.folder import RunFolder
from horovod_runner.handover import RUN_VARIABLE, Forking, Preparation

#: What a fork server may import: packages that find nothing of a rank's out when they are imported,
#: and no module of the user's.
FRAMEWORKS: Final = frozenset(
    {
        "horovod.tensorflow",
        "horovod.torch",
        "keras",
        "numpy",
        "pandas",
        "pyarrow",
        "scipy",
        "sklearn",
        "tensorflow",
        "torch",
        "torch._dynamo",  # which torch imports for the first optimizer: longer than torch itself
        "torchvision",
    }
)
#: What differs from rank to rank and run to run. A fork server has none of it.
OF_A_RUN: Final = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "GROUP_RANK",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        "HOROVOD_GLOO_RENDEZVOUS_PORT",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_MPI_WORLD_SIZE",
        "HOROVOD_RANK",
        "HOROVOD_RUNNER_DATA",
        "HOROVOD_RUNNER_DEVICE",
        "HOROVOD_RUNNER_LEFT",
        "HOROVOD_RUNNER_RUN",
        "HOROVOD_SIZE",
        "HOROVOD_TIMELINE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PMI_FD",
        "PMI_RANK",
        "PMI_SIZE",
        "PYTEST_CURRENT_TEST",
        "RANK",
        "WORLD_SIZE",
    }
)
NO_RUN: Final = "-" * 8  # as long as a run's id
FORK: Final = b"fork"
GO: Final = b"go"
END: Final = b"end"
_PREFIX = "warm-"
# What libraries in C read when they are loaded, which nobody sees.
_READ_ONCE = ("KMP_", "MKL_", "NPY_", "OMP_", "OPENBLAS_", "TF_NUM_")
_ADVICE = "Give it by HorovodRunner(env={{{name!r}: ...}}), which is there before any import"
_SOCKET, _MODULES = "socket", "modules"
# For a fork server that is still importing: TensorFlow takes seconds.
_ANSWER_SECONDS = 30.0
_SUPPORTED = hasattr(os, "pidfd_open")
_IDLE_SECONDS = 600.0
_started: list[subprocess.Popen[bytes]] = []  # so that those that end are waited for


class Forked:
    """A guard that a fork server has started; as :class:`subprocess.Popen` of one's own child.

    Args:
        pid: its process id.
        descriptor: its pidfd.
        status: the pipe that its worker's exit code comes over.
    """

    def __init__(self, pid: int, descriptor: int, status: int) -> None:
        self.pid = pid
        self.descriptor = descriptor
        self._status = status
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it has not come.
        """
        if self._code is None:
            poller = select.poll()  # select knows no descriptor above 1023
            poller.register(self.descriptor, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("the guard", timeout or 0.0)
            # It says how its worker ended; nothing where it was killed itself.
            said = os.read(self._status, 20)
            self._code = int(said) if said else -signal.SIGKILL
            os.close(self.descriptor)
            os.close(self._status)
        return self._code

    def kill(self) -> None:
        """End it by force."""
        if self._code is None:
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)


class Warm:
    """The fork server of a task's session, whether there is one or not.

    Args:
        owner: the process that it ends with.
        path: the workers' ``sys.path``.
        environment: a worker's, whole.
        directory: the one that the workers work in; this process's own if None.
    """

    def __init__(
        self,
        owner: int,
        path: Sequence[str],
        environment: Mapping[str, str],
        directory: str | None,
    ) -> None:
        self._owner = owner
        self._path = list(path)
        self._whole = dict(environment)
        self._environment = {
            name: value for name, value in environment.items() if name not in OF_A_RUN
        }
        self._directory = directory or os.getcwd()
        self._parent = Path(tempfile.gettempdir())

    def fork(self, descriptors: Sequence[int], meanwhile: Callable[[], None]) -> Forked | str:
        """Have a guard and its worker forked.

        Args:
            descriptors: standard output and error, those of
                :func:`horovod_runner.worker.main`, and the one that its MPI asks over, if any.
            meanwhile: called once a second while the fork server still imports.

        Returns:
            The guard, or why the worker has to start cold.

        Raises:
            HorovodRunnerError: what ``meanwhile`` raises.
        """
        if not _SUPPORTED:
            return "warm starts need Linux 5.3"
        try:
            folders = self._folders(self._name())
            if not folders and self._folders(f"{_PREFIX}{self._owner}"):
                return "the fork server has other settings: it is that of the last run's"
            if not folders:
                return "no fork server is there yet: a run leaves one behind"
            return self._fork(folders[0], descriptors, meanwhile)
        except HorovodRunnerError:
            raise
        except Exception as error:  # whatever it is, there is another way
            return f"the fork server does not answer: {error!r}"

    def _fork(
        self, folder: Path, descriptors: Sequence[int], meanwhile: Callable[[], None]
    ) -> Forked | str:
        with ExitStack() as held:
            file = held.enter_context(tempfile.TemporaryFile(prefix="horovod_runner-forking-"))
            handover.write(file.fileno(), Forking(self._whole, self._directory))
            connection = held.enter_context(connect(folder, _ANSWER_SECONDS))
            status, status_write = os.pipe()
            with ExitStack() as failed:
                failed.callback(os.close, status)
                try:
                    asked = [file.fileno(), status_write, *descriptors]
                    socket.send_fds(connection, [FORK], asked)
                finally:
                    os.close(status_write)
                try:
                    _await_answer(connection, meanwhile)
                except TimeoutError:
                    _kill_server(_peer(connection)[0])  # the next run has another one
                    raise
                said, found, _, _ = socket.recv_fds(connection, 4096, 1, socket.MSG_CMSG_CLOEXEC)
                if not found:
                    return said.decode() or "the fork server has just ended"
                failed.callback(os.close, found[0])
                # Only now does it run: had this waited no longer, it would have ended.
                connection.send(GO)
                failed.pop_all()
            return Forked(int(said), found[0], status)

    def keep(self, imported: Sequence[str]) -> None:
        """See to it that there is a fork server for the next run; where there cannot be, leave it.

        Args:
            imported: the frameworks that this run's worker has imported, in that order.
        """
        _started[:] = [each for each in _started if each.poll() is None]
        if not _SUPPORTED or not imported:
            return
        with suppress(Exception), self._alone():
            name = self._name()
            there = [_imported(folder) for folder in self._folders(name)]
            if not any(set(imported) <= set(modules) for modules in there):
                before = there[0] if there else []
                self._start(name, [*before, *(new for new in imported if new not in before)])

    def _start(self, name: str, modules: list[str]) -> None:
        place = RunFolder(f"{name}-{_digest(sorted(modules))}", self._parent)
        plan = Preparation(
            self._owner,
            self._path,
            modules,
            str(self._parent),
            place.path.name,
            _IDLE_SECONDS,
        )
        with (
            tempfile.TemporaryFile(prefix="horovod_runner-plan-") as file,
            _sink() as (sink, out),
            ExitStack() as failed,
        ):
            handover.write(file.fileno(), plan)
            failed.enter_context(place)
            # Who asks while it imports waits for less than importing all that itself.
            listener = failed.enter_context(_listen(place.path, modules))
            for other in self._folders(f"{_PREFIX}{self._owner}"):  # one is enough
                if other != place.path:
                    with suppress(OSError, ValueError), connect(other, 1.0) as connection:
                        connection.send(END)
            passed = [file.fileno(), place.lock, listener.fileno(), sink]
            server = subprocess.Popen(
                handover.command(
                    "horovod_runner.forkserver", *map(str, passed), directory=self._directory
                ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**self._environment, RUN_VARIABLE: NO_RUN},
                cwd=self._directory,
                pass_fds=passed,
                start_new_session=True,
            )
            failed.pop_all()
            place.leave()
            listener.close()
        _started.append(server)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """As the only one of this user who starts or replaces fork servers."""
        # Entered and left at once: it checks whose the folder is, and removes those of the killed.
        with RunFolder(f"{_PREFIX}{os.getpid()}", self._parent) as own:
            root = os.open(own.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(root, fcntl.LOCK_EX)
                yield
            finally:
                os.close(root)

    def _name(self) -> str:
        """Of all that an import depends on, and a fork inherits."""
        # Anew each time: an import may write a file that the next one depends on.
        home = self._environment.get("KERAS_HOME", os.path.expanduser("~/.keras"))
        status = Path("/proc/self/status").read_text()
        depends = (
            _started_at(self._owner),
            os.stat("/proc/self/ns/pid").st_ino,
            sys.executable,
            sys.version,
            self._path,
            [_changed(entry) for entry in self._path if entry.endswith("-packages")],
            _changed(os.path.join(home, "keras.json")),
            sorted(self._environment.items()),
            self._directory,
            [line for line in status.splitlines() if line.startswith(("Umask", "Cpus_allowed"))],
            os.nice(0),
            Path("/proc/self/limits").read_text(),
        )
        return f"{_PREFIX}{self._owner}-{_digest(depends)}"

    def _folders(self, name: str) -> list[Path]:
        """Those of fork servers whose names begin so, the latest first."""
        found = RunFolder(name, self._parent).path.parent.glob(f"{name}-*")
        return sorted(found, key=lambda folder: _changed(str(folder)) or 0, reverse=True)


class Imports:
    """What a worker imports that is of use to the next run, from here on.

    Args:
        forked: whether it was forked off a fork server.
        tell: takes what the user should know.
    """

    def __init__(self, *, forked: bool, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._forked = forked
        self._asked = frozenset(variables.missed)
        # The first variable that main has set by itself, and what it had imported by then.
        self._first: tuple[str, list[str]] | None = None
        variables.watch(self._on_set)

    def _on_set(self, name: str) -> None:
        if variables.importing(FRAMEWORKS):
            return  # it does so in each process
        self._first = self._first or (name, _frameworks())
        if self._forked and (name in self._asked or name.startswith(_READ_ONCE)):
            self._tell(
                f"HorovodRunner: main sets {name} too late: this rank was forked with its "
                f"frameworks imported (warm=True). {_ADVICE.format(name=name)}"
            )

    def of_use(self) -> tuple[str, ...]:
        """The frameworks, in their order."""
        found = _frameworks()
        if self._first is None:
            return tuple(found)
        name, there = self._first
        later = [module for module in found if module not in there]
        if later:
            self._tell(
                f"HorovodRunner: main sets {name} before it imports {', '.join(later)}, which warm "
                f"starts leave out for that. {_ADVICE.format(name=name)}"
            )
        return tuple(there)


def _frameworks() -> list[str]:
    return [name for name in sys.modules if name in FRAMEWORKS]


def _listen(place: Path, modules: Sequence[str]) -> socket.socket:
    """Where a fork server is asked; in a folder that only its user can enter."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _short(place) as short:
            listener.bind(f"{short}/{_SOCKET}")
        listener.listen(128)
        (place / _MODULES).write_text("\n".join(modules))
    except BaseException:
        listener.close()
        raise
    return listener


def connect(place: Path, seconds: float) -> socket.socket:
    """A connection to the fork server of a folder; no call of it takes longer than that.

    Raises:
        OSError: there is none.
        ValueError: it is not this user's.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(seconds)
        with _short(place) as short:
            connection.connect(f"{short}/{_SOCKET}")
        check_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _await_answer(connection: socket.socket, meanwhile: Callable[[], None]) -> None:
    """Wait until there is something to read.

    Raises:
        TimeoutError: nothing has come.
    """
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    until = time.monotonic() + _ANSWER_SECONDS
    while not poller.poll(1000):
        if time.monotonic() > until:
            raise TimeoutError(f"nothing has come for {_ANSWER_SECONDS:.0f} s")
        meanwhile()


def check_peer(connection: socket.socket) -> None:
    """Make sure that the other side is the same user's.

    Raises:
        ValueError: it is not.
    """
    _, uid = _peer(connection)
    if uid != os.getuid():
        raise ValueError(f"the process at the other end is user {uid}'s")


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", found)
    return pid, uid


def _kill_server(pid: int) -> None:
    # Before it runs, its socket is still that of the task which has made it.
    with suppress(OSError):
        if b"horovod_runner.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def _started_at(pid: int) -> str:
    """When a process was started, in ticks since the boot: ids are used again."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _imported(folder: Path) -> list[str]:
    """What the fork server of a folder has imported."""
    try:
        return (folder / _MODULES).read_text().split()
    except OSError:
        return []


def _changed(path: str) -> int | None:
    """When a file or the listing of a folder was changed; None where there is none."""
    try:
        return os.stat(os.path.expanduser(path)).st_mtime_ns
    except OSError:
        return None


@contextmanager
def _sink() -> Iterator[tuple[int, int]]:
    """A pipe that nobody reads, for what the imports print.

    Python's streams find out what they write to when it starts, and a worker's will be pipes.
    """
    read, write = os.pipe()
    try:
        with suppress(OSError):
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)
        yield read, write
    finally:
        os.close(read)
        os.close(write)


@contextmanager
def _short(place: Path) -> Iterator[str]:
    """Another path of a folder: a socket's may have 107 characters, and TMPDIR many more."""
    descriptor = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
