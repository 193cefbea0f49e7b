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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

from horovod_runner import handover
from horovod_runner.folder import RunFolder, sweep
from horovod_runner.handover import RUN_VARIABLE, Forking, Preparation

#: What a fork server may import: no module of the user's.
FRAMEWORKS: Final = frozenset(
    {
        "PIL",
        "delta",
        "horovod.tensorflow",
        "horovod.torch",
        "keras",
        "lightning",
        "matplotlib",
        "numpy",
        "pandas",
        "petastorm",
        "pyarrow",
        "pytorch_lightning",
        "scipy",
        "sklearn",
        "tensorflow",
        "torch",
        "torchvision",
        "transformers",
    }
)
NO_RUN: Final = "-" * 8  # as long as a run's id
FORK: Final = b"fork"
GO: Final = b"go"
END: Final = b"end"
_PREFIX = "warm-"
_SOCKET, _MODULES = "socket", "modules"
# What differs from rank to rank and run to run, and is read after the imports.
_OF_A_RUN = (
    "CUDA_VISIBLE_DEVICES",
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
)
_OF_A_RUN_PREFIXES = ("HOROVOD_", "PMI_")
# For a fork server that is still importing: TensorFlow takes seconds.
_ANSWER_SECONDS = 30.0
_SUPPORTED = hasattr(os, "pidfd_open")
_IDLE_SECONDS = 600.0
_started: list[subprocess.Popen[bytes]] = []  # so that those that end are waited for


class Forked:
    """A guard that a fork server has started; as :class:`subprocess.Popen` of one's own child."""

    def __init__(self, pid: int, descriptor: int, status: int) -> None:
        self.pid = pid
        self._descriptor = descriptor
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
            if not select.select([self._descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("the guard", timeout or 0.0)
            # It says how its worker ended; nothing where it was killed itself.
            said = os.read(self._status, 20)
            self._code = int(said) if said else -signal.SIGKILL
            os.close(self._descriptor)
            os.close(self._status)
        return self._code

    def kill(self) -> None:
        """End it by force."""
        if self._code is None:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


class Warm:
    """The fork server of a task's host and session, whether there is one or not.

    Args:
        owner: the process that it ends with.
        path: the workers' ``sys.path``.
        environment: a worker's, whole.
    """

    def __init__(self, owner: int, path: Sequence[str], environment: Mapping[str, str]) -> None:
        self._owner = owner
        self._path = list(path)
        self._environment = {
            name: value
            for name, value in environment.items()
            if name not in _OF_A_RUN and not name.startswith(_OF_A_RUN_PREFIXES)
        }
        self._parent = Path(tempfile.gettempdir())

    def _name(self) -> str:
        # Anew each time: an import may write a file that the next one depends on.
        owner = psutil.Process(self._owner)
        depends = (
            owner.create_time(),
            sys.executable,
            sys.version,
            self._path,
            [_changed(entry) for entry in self._path if entry.endswith("-packages")],
            _changed(os.path.join(os.environ.get("KERAS_HOME", "~/.keras"), "keras.json")),
            sorted(self._environment.items()),
        )
        return f"{_PREFIX}{self._owner}-{_digest(depends)}"

    def _folders(self, name: str) -> list[Path]:
        """Those of fork servers whose names begin so, the latest first."""
        found = RunFolder(name, self._parent).path.parent.glob(f"{name}-*")
        return sorted(found, key=lambda folder: _changed(str(folder)) or 0, reverse=True)

    def fork(
        self, environment: Mapping[str, str], directory: str | None, descriptors: Sequence[int]
    ) -> Forked | str:
        """Have a guard and its worker forked.

        Args:
            environment: the worker's, whole.
            directory: the one that it works in; this process's own if None.
            descriptors: standard output and error, those of
                :func:`horovod_runner.worker.main`, and the one that its MPI asks over, if any.

        Returns:
            The guard, or why the worker has to start cold.
        """
        if not _SUPPORTED:
            return "warm starts need Linux 5.3"
        folders = self._folders(self._name())
        if not folders:
            return "no fork server has these settings yet: a run leaves one behind"
        forking = Forking(dict(environment), directory or os.getcwd())
        status, status_write = os.pipe()
        guard: Forked | str = ""
        try:
            with tempfile.TemporaryFile(prefix="horovod_runner-forking-") as file:
                handover.write(file.fileno(), forking)
                guard = self._ask(folders[0], [file.fileno(), status_write, *descriptors], status)
        except (OSError, ValueError) as error:
            guard = f"the fork server does not answer: {error!r}"
        finally:
            os.close(status_write)
            if isinstance(guard, str):
                os.close(status)
        return guard

    def _ask(self, folder: Path, descriptors: Sequence[int], status: int) -> Forked | str:
        with connect(folder) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            socket.send_fds(connection, [FORK], descriptors)
            said, found, _, _ = socket.recv_fds(connection, 4096, 1, socket.MSG_CMSG_CLOEXEC)
            if not found:
                return said.decode() or "the fork server has just ended"
            # Only now does it run: had this waited no longer, it would have ended.
            connection.send(GO)
            return Forked(int(said), found[0], status)

    def keep(self, imported: Sequence[str]) -> None:
        """See to it that there is a fork server for the next run.

        Args:
            imported: the frameworks that this run's worker has imported, in that order.
        """
        _started[:] = [each for each in _started if each.poll() is None]
        name = self._name()
        with suppress(OSError):
            sweep(RunFolder(name, self._parent).path.parent)  # of one that was killed
        enough = any(set(imported) <= _imported(folder) for folder in self._folders(name))
        if enough or not imported or not _SUPPORTED:
            return
        place = RunFolder(f"{name}-{_digest(sorted(imported))}", self._parent)
        plan = Preparation(
            self._owner,
            self._path,
            list(imported),
            str(self._parent),
            place.path.name,
            _IDLE_SECONDS,
        )
        with (
            tempfile.TemporaryFile(prefix="horovod_runner-plan-") as file,
            _sink() as (sink, out),
            ExitStack() as started,
        ):
            handover.write(file.fileno(), plan)
            started.enter_context(place)
            try:
                # Who asks while it imports waits for less than importing all that itself.
                listener = started.enter_context(_listen(place.path, imported))
            except OSError:
                return  # another rank of this owner does the same just now
            for other in self._folders(f"{_PREFIX}{self._owner}"):  # one is enough
                if other != place.path:
                    with suppress(OSError, ValueError), connect(other) as connection:
                        connection.send(END)
            passed = [file.fileno(), place.lock, listener.fileno(), sink]
            server = subprocess.Popen(
                [sys.executable, "-m", "horovod_runner.forkserver", *map(str, passed)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**self._environment, RUN_VARIABLE: NO_RUN},
                pass_fds=passed,
                start_new_session=True,
            )
            started.pop_all()
            place.leave()
            listener.close()
        _started.append(server)


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


def connect(place: Path) -> socket.socket:
    """A connection to the fork server of a folder.

    Raises:
        OSError: there is none.
        ValueError: it is not this user's.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _short(place) as short:
            connection.connect(f"{short}/{_SOCKET}")
        check_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def check_peer(connection: socket.socket) -> None:
    """Make sure that the other side is the same user's.

    Raises:
        ValueError: it is not.
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", found)
    if uid != os.getuid():
        raise ValueError(f"the process at the other end is user {uid}'s")


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _imported(folder: Path) -> set[str]:
    """What the fork server of a folder has imported."""
    try:
        return set((folder / _MODULES).read_text().split())
    except OSError:
        return set()


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
